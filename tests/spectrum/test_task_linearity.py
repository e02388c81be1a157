"""Every number of ``task_linearity`` equals its definition on the dense float64 kernel."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import NumericalError
from linnet.spectrum.task_linearity import (
    FULL,
    HeldOut,
    LabelEnergy,
    LinearityGap,
    TaskLinearity,
    task_linearity,
)
from tests.oracles.dense import jacobian_oracle

N, C = 24, 3


def network() -> nn.Module:
    """A small smooth network in double precision."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, C)).double()


def inputs(n: int = N, seed: int = 1) -> Tensor:
    """Examples."""
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(x: Tensor) -> Tensor:
    """Three classes that a linear function nearly tells apart."""
    return (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()


def dense(model: nn.Module, x: Tensor) -> Tensor:
    """K (N·C, N·C) from the dense Jacobian."""
    j = jacobian_oracle(model, x).reshape(len(x) * C, -1)
    return j @ j.T


def fitted(ridge: Any = "loo", solver: str = "auto") -> linnet.LinearFit:
    """A fit of the classes."""
    return linnet.fit(linnet.linearize(network()), (inputs(), labels(inputs())), ridge=ridge, solver=solver)


def centered(y: Tensor) -> Tensor:
    """One-hot classes with their mean removed (N, C)."""
    hot = nn.functional.one_hot(y, C).double()
    return hot - hot.mean(0)


def near(a: Any, b: Any, rtol: float = 1e-9) -> None:
    """Equal up to rounding."""
    torch.testing.assert_close(
        torch.as_tensor(a, dtype=torch.float64),
        torch.as_tensor(b, dtype=torch.float64),
        rtol=rtol,
        atol=1e-10,
    )


def test_every_number_is_its_definition() -> None:
    fit, x = fitted(), inputs()
    found = task_linearity(fit, inputs(7, seed=2), k=5)
    y = centered(labels(x)).reshape(-1)
    k = dense(network(), x)
    values, vectors = torch.linalg.eigh(k)
    values, vectors = values.flip(0), vectors.flip(1)
    near(found.energy.values, values.clamp(min=0), 1e-7)
    near(found.energy.trace, k.trace())
    shares = ((vectors.T @ y).square() / y.square().sum()).cumsum(0)
    near(found.energy.shares[:30], shares[:30], 1e-7)
    near(found.concentration, shares[4].sqrt(), 1e-7)
    near(found.alignment, y @ k @ y / N**2)
    near(found.effective_dimension, (values / (values + fit.ridge)).sum(), 1e-7)
    eye = torch.eye(N, dtype=torch.float64)
    h = torch.kron(eye - 1 / N, torch.eye(C, dtype=torch.float64))
    fair = (h @ k @ h).trace() / ((N - 1) * C)
    near(found.lift, y @ k @ y / (y @ y) / fair)
    assert (found.energy.rows, found.energy.samples, found.ridge) == (N * C, N, fit.ridge)


@pytest.mark.long
def test_random_labels_have_a_lift_of_one() -> None:
    model, x = network(), inputs()
    lin = linnet.linearize(model)
    generator = torch.Generator().manual_seed(3)
    lifts = []
    for _ in range(60):
        y = torch.randn(N, C, generator=generator, dtype=torch.float64)
        lifts.append(task_linearity(linnet.fit(lin, (x, y)), k=1).lift)
    mean = torch.tensor(lifts)
    assert abs(float(mean.mean()) - 1) < 4 * float(mean.std()) / 60**0.5


def test_leave_one_out_is_made_by_leaving_out() -> None:
    fit, x = fitted(), inputs()
    y = labels(x)
    t = fit.targets
    errors = means = 0.0
    right = 0
    for i in range(N):
        rest = [j for j in range(N) if j != i]
        without = linnet.fit(linnet.linearize(network()), (x[rest], t[rest]), ridge=fit.ridge)
        f = without.predict(x[i : i + 1])[0]
        errors += float((f - t[i]).square().sum())
        means += float((t[rest].mean(0) - t[i]).square().sum())
        right += int(f.argmax() == y[i])
    held = task_linearity(fit).held_out
    assert held is not None
    near(held.explained, 1 - errors / means, 1e-7)
    assert held.accuracy == right / N
    assert held.chance == float(torch.bincount(y).max()) / N


def test_the_gap_is_that_of_the_fitted_weights() -> None:
    fit, model, other = fitted(), network(), inputs(9, seed=5)
    moved = {name: value + fit.delta[name] for name, value in model.named_parameters()}
    found = task_linearity(fit, other).gap
    assert found.validation is not None
    for x, value in ((inputs(), found.training), (other, found.validation)):
        f = torch.func.functional_call(model, moved, (x,))
        far, moves = f - fit.module(x), fit.module(x) - model(x)
        near(value, (far.square().sum() / moves.square().sum()).sqrt())
    f = torch.func.functional_call(model, moved, (other,))
    assert found.agreement == float((f.argmax(1) == fit.predict(other).argmax(1)).double().mean())


def test_a_linear_network_has_no_gap() -> None:
    x = inputs()
    fit = linnet.fit(linnet.linearize(nn.Linear(4, 1).double()), (x, x[:, :1] * 2 + 1), ridge=1e-6)
    found = task_linearity(fit)
    assert found.gap.training < 1e-10
    assert found.gap.agreement is None
    assert found.held_out is not None
    assert found.held_out.accuracy is None
    assert found.held_out.explained > 0.999
    assert found.verdict.level == "well"


def test_without_the_kernel_it_is_taken_on_some_examples() -> None:
    fit = fitted(ridge=0.5, solver="cg")
    whole = task_linearity(fit, k=5)
    assert whole.held_out is None
    assert whole.verdict.level == "unknown"
    near(whole.effective_dimension, task_linearity(fitted(ridge=0.5), k=5).effective_dimension, 1e-7)
    part = task_linearity(fit, k=5, samples=10)
    assert (part.energy.samples, part.energy.rows) == (10, 30)
    # the ridge of ten examples is scaled as their eigenvalues are
    expected = part.energy.values / (part.energy.values + 0.5 * 10 / N)
    near(part.effective_dimension, expected.sum())
    # the kernel of a dual fit is cut to the same examples
    near(task_linearity(fitted(ridge=0.5), k=5, samples=10).energy.values, part.energy.values, 1e-7)


def test_leading_pairs_of_a_large_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FULL > 500
    fit = fitted()
    whole = task_linearity(fit, k=4)
    module = importlib.import_module("linnet.spectrum.task_linearity")
    monkeypatch.setattr(module, "FULL", 10)
    some = task_linearity(fit, k=4)
    assert len(some.energy.values) == 4
    near(some.energy.values, whole.energy.values[:4], 1e-7)
    near(some.energy.shares, whole.energy.shares[:4], 1e-6)
    near(some.effective_dimension, whole.effective_dimension, 1e-7)


def test_numbers_are_plain() -> None:
    found = task_linearity(fitted())
    again = json.loads(json.dumps(found.to_dict()))
    assert again["concentration"] == found.concentration
    assert again["verdict"]["level"] == found.verdict.level
    assert len(again["energy"]["shares"]) == found.energy.rows
    assert found.energy.top == 14  # a fifth of the rows, which are fewer than 250


ENERGY = LabelEnergy(torch.ones(1), torch.tensor([0.7]), 1, 10, 10, 1.0)
KNOWN = TaskLinearity(ENERGY, 1.0, 10.0, 1.0, 0.1, HeldOut(0.8, 0.95, 0.5), LinearityGap(0.02))


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({}, "well", "95 % of the training samples"),
        ({"held_out": HeldOut(0.8, 0.75, 0.5)}, "partly", "75 %"),
        ({"held_out": HeldOut(0.8, 0.55, 0.5)}, "poorly", "55 %"),
        ({"held_out": HeldOut(0.8)}, "well", "explained to 80 %"),
        ({"held_out": HeldOut(-0.2)}, "poorly", "no better than their mean"),
        ({"held_out": None}, "unknown", "10 times"),
        ({"lift": 0.5}, "well", "worse than random labels"),
        ({"gap": LinearityGap(0.5)}, "well", "use the linear model for predictions"),
        ({"gap": LinearityGap(2.0)}, "well", "only the linear model can be used"),
        ({}, "well", "within its linear range"),
    ],
)
def test_the_verdict_in_words(change: dict[str, Any], level: str, words: str) -> None:
    found = replace(KNOWN, **change).verdict
    assert found.level == level
    assert words in " ".join(found.reasons)
    assert found.text.endswith((".", "evidence."))


def test_a_kernel_that_tells_no_examples_apart_is_refused() -> None:
    net = network()
    with torch.no_grad():
        net[0].weight.zero_()  # all that is left is the same for every example
        net[2].weight.zero_()
    fit = linnet.fit(linnet.linearize(net, "2.bias"), (inputs(), labels(inputs())), ridge=1.0)
    with pytest.raises(NumericalError, match="24"):
        task_linearity(fit)
