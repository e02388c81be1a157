"""Target alignment and the kernel norm bound: lemma 1 against dense kernels in float64."""

from __future__ import annotations

from typing import Literal

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet.errors import MemoryBudgetError
from tests.fitting.problems import near, network, problem, real
from tests.oracles.dense import kernel_oracle
from tests.refusals import refused
from tests.zoo import case, every_animal, linearize

ONE = problem(n=9, outputs=1, classes=False)
MANY = problem(n=9, outputs=3, classes=False)
Kind = Literal["full", "trace", "sum"]
KINDS: tuple[Kind, ...] = ("full", "trace", "sum")


def by_kernel(j: Tensor, f: Tensor, outputs: Kind) -> Tensor:
    """α from its definition: E E f(x) Θ(x, x') f(x')."""
    k = kernel_oracle(j, form=outputs)
    n = j.shape[0]
    if outputs == "full":
        return torch.einsum("nct,ncmd,mdt->t", f, k, f) / n**2
    return torch.einsum("nt,nm,mt->t", f, k, f) / n**2


def targets(outputs: Kind, count: int, c: int = 3, n: int = 9) -> Tensor:
    """T functions of the kernel's space."""
    return real(n, c, count, seed=11) if outputs == "full" and c > 1 else real(n, count, seed=12)


def test_one_target_of_one_output_is_a_number() -> None:
    y = real(9, seed=3)
    found = linnet.spectrum.alignment(ONE.model, (ONE.x, y))
    near(found, by_kernel(ONE.j, y[:, None, None], "full")[0])
    near(linnet.spectrum.alignment(ONE.model, (ONE.x, y[:, None])), found)
    # lemma 1 word for word: the squared norm of the mean of f ∇f
    near(found, (y[:, None] * ONE.j[:, 0]).mean(0).square().sum())


@pytest.mark.parametrize("count", [1, 2, 5, 20])
@pytest.mark.parametrize("outputs", KINDS)
def test_alignment_is_its_definition(outputs: Kind, count: int) -> None:
    f = targets(outputs, count)
    if count == 1:
        f = f[..., 0]
        near(
            linnet.spectrum.alignment(MANY.model, (MANY.x, f), outputs),
            by_kernel(MANY.j, f[..., None], outputs)[0],
        )
        return
    found = linnet.spectrum.alignment(MANY.model, (MANY.x, f), outputs)
    near(found, by_kernel(MANY.j, f, outputs))


@pytest.mark.parametrize("outputs", KINDS)
def test_with_one_output_the_kernels_agree(outputs: Kind) -> None:
    f = real(9, 4, seed=5)
    near(linnet.spectrum.alignment(ONE.model, (ONE.x, f), outputs), by_kernel(ONE.j, f, "trace"))


@every_animal
@pytest.mark.thinned(3)
def test_any_network(name: str) -> None:
    known = case(name)
    c = known.j1.shape[1]
    one, several = real(4, c, 1, seed=2), real(4, c, 2 * c + 1, seed=2)
    for f in (one, several):  # the first is differentiated as a sum, the others share gradients
        given = f[:, 0] if c == 1 else f
        found = linnet.spectrum.alignment(linearize(name), (known.x1, given)).reshape(-1)
        near(found, by_kernel(known.j1, f, "full"), 1e-9)


def test_a_linearization_counts_its_own_parameters() -> None:
    lin = linnet.linearize(ONE.model, params="last-layer")
    y = real(9, seed=3)
    near(linnet.spectrum.alignment(lin, (ONE.x, y)), by_kernel(ONE.j[:, :, 20:], y[:, None], "trace")[0])


@pytest.mark.parametrize("outputs", KINDS)
@pytest.mark.parametrize("count", [1, 20])
def test_memory_is_met_by_groups_and_blocks(outputs: Kind, count: int) -> None:
    f = targets(outputs, count, n=40)
    x = real(40, 3, seed=1)
    model = network()
    whole = linnet.spectrum.alignment(model, (x, f), outputs)
    tight = linnet.spectrum.alignment(model, (x, f), outputs, memory=20_000)
    near(tight, whole)
    refused(MemoryBudgetError, lambda: linnet.spectrum.alignment(model, (x, f), outputs, memory=500), "500 B")


def test_data_of_every_kind() -> None:
    y = real(9, 2, seed=3)
    expected = linnet.spectrum.alignment(ONE.model, (ONE.x, y))
    for data in (TensorDataset(ONE.x, y), DataLoader(TensorDataset(ONE.x, y), batch_size=4)):
        near(linnet.spectrum.alignment(ONE.model, data), expected)


def test_classes_become_signs_or_centered_indicators() -> None:
    labels = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1])
    signs = 2.0 * labels.double() - 1
    expected = by_kernel(ONE.j, signs[:, None], "trace")[0]
    for y in (labels, labels.bool(), signs.long(), labels[:, None]):
        near(linnet.spectrum.alignment(ONE.model, (ONE.x, y)), expected)
    classes = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])
    indicator = torch.nn.functional.one_hot(classes, 3).double() - 1 / 3
    expected = by_kernel(MANY.j, indicator[..., None], "full")[0]
    near(linnet.spectrum.alignment(MANY.model, (MANY.x, classes)), expected)
    near(linnet.spectrum.alignment(MANY.model, (MANY.x, classes[:, None])), expected)


@hypothesis.settings(max_examples=6)
@hypothesis.given(scale=st.floats(-3, 3), seed=st.integers(0, 100))
def test_equivariance(scale: float, seed: int) -> None:
    y = real(9, 3, seed=seed)
    alpha = linnet.spectrum.alignment(ONE.model, (ONE.x, y))
    near(linnet.spectrum.alignment(ONE.model, (ONE.x, scale * y)), scale**2 * alpha, 1e-9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    near(linnet.spectrum.alignment(ONE.model, (ONE.x[order], y[order])), alpha)
    # a data set twice over is the same distribution
    near(linnet.spectrum.alignment(ONE.model, (ONE.x.repeat(2, 1), y.repeat(2, 1))), alpha)
    # α is a quadratic form: the parallelogram law
    a, b = y[:, 0], y[:, 1]
    both = linnet.spectrum.alignment(ONE.model, (ONE.x, torch.stack([a + b, a - b], 1))).sum()
    near(both, 2 * (alpha[0] + alpha[1]))


def test_rotations_of_the_targets_keep_the_sum() -> None:
    y, (q, _) = real(9, 4, seed=1), torch.linalg.qr(real(4, 4, seed=2))
    before, after = (linnet.spectrum.alignment(ONE.model, (ONE.x, f)).sum() for f in (y, y @ q))
    near(after, before)


# The kernel norm and its bound.


@pytest.mark.parametrize("outputs", KINDS)
def test_the_bound_holds_and_is_tight_on_eigenfunctions(outputs: Kind) -> None:
    rows = kernel_oracle(MANY.j, form=outputs)
    k = rows.flatten(0, 1).flatten(1) if outputs == "full" else rows
    values, vectors = torch.linalg.eigh(k)
    keep = values > 1e-9 * values.max()
    inside = vectors[:, keep]  # functions with a finite norm
    coefficients = real(int(keep.sum()), 30, seed=4)
    f = inside @ coefficients
    norms = (coefficients.square() / values[keep, None]).sum(0)  # fᵀK⁺f
    n = MANY.x.shape[0]
    shaped = f.reshape(n, -1, 30) if outputs == "full" else f
    bound = linnet.spectrum.kernel_norm_bound(MANY.model, (MANY.x, shaped), outputs)
    near(bound, f.square().sum(0).square() / torch.einsum("rt,rs,st->t", f, k, f))
    assert bool((bound <= norms * (1 + 1e-9)).all())
    assert bool((bound < 0.9 * norms).any())  # and it is not the norm itself
    shaped = inside.reshape(n, -1, inside.shape[1]) if outputs == "full" else inside
    exact = linnet.spectrum.kernel_norm_bound(MANY.model, (MANY.x, shaped), outputs)
    near(exact * values[keep], torch.ones(int(keep.sum()), dtype=torch.float64), 1e-6)


def test_the_bound_of_functions_without_norm_or_alignment() -> None:
    bound = linnet.spectrum.kernel_norm_bound(ONE.model, (ONE.x, torch.zeros(9, dtype=torch.float64)))
    assert float(bound) == 0
    net = nn.Linear(2, 1, bias=False).double()
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    assert float(linnet.spectrum.alignment(net, (x, torch.ones(2)))) == 0
    assert float(linnet.spectrum.kernel_norm_bound(net, (x, torch.ones(2)))) == float("inf")


# What cannot be.


def test_the_network_is_not_touched() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    linnet.spectrum.alignment(model, (ONE.x, real(9)))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_inference_mode_and_autocast_do_not_matter() -> None:
    y = real(9, 4, seed=3)
    expected = linnet.spectrum.alignment(ONE.model, (ONE.x, y))
    shares = linnet.spectrum.energy_concentration(ONE.model, (ONE.x, y), 3)
    with torch.inference_mode():
        near(linnet.spectrum.alignment(ONE.model, (ONE.x, y)), expected)
        near(linnet.spectrum.alignment(ONE.model, (ONE.x, y[:, 0])), expected[0])
        near(linnet.spectrum.energy_concentration(ONE.model, (ONE.x, y), 3), shares)
        recorder = linnet.spectrum.Recorder(ONE.x, y, k=3)
        note = recorder.note(ONE.model, 0)
    assert note is not None
    near(torch.tensor(note.alignment, dtype=torch.float64), expected)
    with torch.autocast("cpu"):
        near(linnet.spectrum.alignment(ONE.model, (ONE.x, y)), expected)
