"""Kernel distance and centered alignment against their definitions, and the recorder built on them."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn

import linnet
from tests.fitting.problems import near, network, problem, real
from tests.oracles.dense import jacobian_oracle, kernel_oracle

P = problem(n=8, outputs=3, classes=False)
OTHER = network(seed=7)
K1 = kernel_oracle(P.j)  # (8, 3, 8, 3)
K2 = kernel_oracle(jacobian_oracle(OTHER, P.x))


def cosine(a: Tensor, b: Tensor) -> float:
    """Of the Frobenius inner product."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def centered(k: Tensor) -> Tensor:
    """H K H with a dense H."""
    n = k.shape[0]
    h = torch.eye(n, dtype=torch.float64) - 1 / n
    return torch.einsum("an,ncmd,mb->acbd", h, k, h) if k.ndim == 4 else h @ k @ h


@pytest.mark.parametrize("outputs", ["full", "trace", "sum"])
def test_two_checkpoints(outputs: Any) -> None:
    k1, k2 = (kernel_oracle(j, form=outputs) for j in (P.j, jacobian_oracle(OTHER, P.x)))
    distance = linnet.spectrum.kernel_distance(P.model, OTHER, P.x, outputs)
    assert distance == pytest.approx(1 - cosine(k1, k2), rel=1e-10)
    alignment = linnet.spectrum.centered_alignment(P.model, OTHER, P.x, outputs)
    assert alignment == pytest.approx(cosine(centered(k1), centered(k2)), rel=1e-10)
    assert linnet.spectrum.kernel_distance(P.model, linnet.linearize(OTHER), P.x, outputs) == distance


def test_matrices_networks_and_mixtures_agree() -> None:
    distance = linnet.spectrum.kernel_distance(K1, K2)
    assert linnet.spectrum.kernel_distance(K1, OTHER, P.x) == pytest.approx(distance, rel=1e-9)
    assert linnet.spectrum.kernel_distance(P.model, K2, P.x) == pytest.approx(distance, rel=1e-9)
    tight = linnet.spectrum.kernel_distance(P.model, OTHER, P.x, memory=100_000)
    assert tight == pytest.approx(distance, rel=1e-9)
    alignment = linnet.spectrum.centered_alignment(K1, K2)
    assert linnet.spectrum.centered_alignment(P.model, K2, P.x) == pytest.approx(alignment, rel=1e-9)


@hypothesis.settings(max_examples=10)
@hypothesis.given(scale=st.floats(0.01, 100), seed=st.integers(0, 50))
def test_equivariance(scale: float, seed: int) -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    a, b = (kernel_oracle(j, form="trace") for j in (P.j, jacobian_oracle(OTHER, P.x)))
    for measure in (linnet.spectrum.kernel_distance, linnet.spectrum.centered_alignment):
        value = measure(a, b)
        assert measure(b, a) == pytest.approx(value, abs=1e-12)
        assert measure(scale * a, b) == pytest.approx(value, abs=1e-12)
        assert measure(a[order][:, order], b[order][:, order]) == pytest.approx(value, abs=1e-12)
        assert 0 <= value <= 1
    shifted = linnet.spectrum.centered_alignment(a + scale, b)  # constants do not count
    assert shifted == pytest.approx(linnet.spectrum.centered_alignment(a, b), abs=1e-9)
    assert linnet.spectrum.kernel_distance(a, a) == pytest.approx(0, abs=1e-12)


# The recorder.


def trained(steps: int, recorder: Any, x: Tensor, y: Tensor) -> nn.Module:
    """A network trained by plain gradient descent with a recorder in the loop."""
    model = network(outputs=1, hidden=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    for step in range(steps):
        recorder.note(model, step)
        optimizer.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        optimizer.step()
    return model


def test_notes_are_the_measures_of_the_kernel_at_each_step() -> None:
    x, y = real(10, 3, seed=1), real(10, seed=2)
    recorder = linnet.spectrum.Recorder(x, y, k=3)
    model = trained(3, recorder, x, y)
    before = linnet.spectrum.gram(model, x)[:, 0, :, 0]
    recorder.note(model, 5)
    with torch.no_grad():
        model[0].weight.mul_(1.1)
    recorder.note(model, 7)
    assert [note.step for note in recorder.notes] == [0, 1, 2, 5, 7]
    k = kernel_oracle(jacobian_oracle(model, x), form="trace")
    last = recorder.notes[-1]
    values, vectors = torch.linalg.eigh(k)
    near(torch.tensor(last.values, dtype=torch.float64), values.flip(0)[:3] / 10)
    assert last.trace == pytest.approx(float(k.trace()) / 10, rel=1e-10)
    assert last.alignment == [pytest.approx(float(y @ k @ y) / 100, rel=1e-10)]
    assert last.alignment == [pytest.approx(float(linnet.spectrum.alignment(model, (x, y))), rel=1e-10)]
    share = float((vectors[:, -3:].T @ y).norm() / y.norm())
    assert last.concentration == [pytest.approx(share, rel=1e-8)]
    first = kernel_oracle(jacobian_oracle(network(outputs=1, hidden=8), x), form="trace")
    assert last.distances["first"] == pytest.approx(1 - cosine(first, k), rel=1e-8)
    assert last.distances["previous"] == pytest.approx(1 - cosine(before, k), rel=1e-6)
    assert last.centered["first"] == pytest.approx(cosine(centered(first), centered(k)), rel=1e-8)
    task = cosine(centered(torch.outer(y, y)), centered(k))
    assert last.centered["targets"] == pytest.approx(task, rel=1e-8)
    assert recorder.notes[0].distances == {
        "first": pytest.approx(0, abs=1e-12),
        "previous": pytest.approx(0, abs=1e-12),
    }


def test_without_targets_and_with_several_outputs() -> None:
    recorder = linnet.spectrum.Recorder(P.x, k=2, form="trace")
    note = recorder.note(P.model, 0)
    assert (note.alignment, note.concentration, set(note.centered)) == ([], [], {"first"})
    several = linnet.spectrum.Recorder(P.x, real(8, 3, 4, seed=3), k=2)
    note = several.note(P.lin, 0)
    expected = linnet.spectrum.alignment(P.model, (P.x, real(8, 3, 4, seed=3)))
    near(torch.tensor(note.alignment, dtype=torch.float64), expected)
    assert len(note.concentration) == 4
    f = real(8, 3, 4, seed=3)
    task = torch.einsum("nct,mdt->ncmd", f, f)
    assert note.centered["targets"] == pytest.approx(cosine(centered(task), centered(K1)), rel=1e-8)


def test_training_is_the_same_with_and_without_a_recorder() -> None:
    class Deaf:
        def note(self, *_: object) -> None:
            """Records nothing."""

    x, y = real(6, 3, seed=1), real(6, seed=2)
    states = [
        trained(3, recorder, x, y).state_dict() for recorder in (linnet.spectrum.Recorder(x, y, k=2), Deaf())
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
