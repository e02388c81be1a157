"""The fast gradient sign method: by hand and by autograd, and what it must not touch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from linnet.errors import DataError, InputError, NumericalError
from linnet.metrics.adversarial import Attack, fgsm
from linnet.metrics.evaluate import evaluate
from linnet.metrics.reports import Report
from tests.fitting.problems import near, network, real
from tests.refusals import refused

MODEL = network(inputs=3, outputs=4)
X, Y = 2 * real(12, 3, seed=3), torch.arange(12) % 4


def predict(x: Tensor) -> Tensor:
    return (8 * MODEL(x)).softmax(1)


def logistic(x: Tensor) -> Tensor:
    """p(1 | x) = σ(2x), for inputs (N, 1)."""
    return torch.cat([-x, x], 1).softmax(1)


def sign_of_gradient(x: Tensor, classes: Tensor, ask: Any = predict) -> Tensor:
    """One example at a time."""
    rows = []
    for row, k in zip(x, classes, strict=True):
        variable = row[None].clone().requires_grad_()
        p = ask(variable)
        own = (p.mean(0) if p.ndim == 3 else p)[0, k]
        rows.append(torch.autograd.grad(own.log(), variable)[0].sign())
    return torch.cat(rows)


def flat(report: Report) -> dict[str, float]:
    """All numbers of a report that has labels and no samples."""
    values = report.to_dict()
    errors = {f"stderr of {name}": value for name, value in values.pop("stderr").items()}
    return {name: value for name, value in {**values, **errors}.items() if value is not None}


def inputs(attack: Attack) -> Tensor:
    assert attack.inputs is not None
    return attack.inputs


@pytest.mark.parametrize("step", [0.0, 0.03, 1.0])
def test_untargeted_moves_against_the_predicted_class(step: float) -> None:
    attack = fgsm(predict, (X, Y), step)
    expected = X - step * sign_of_gradient(X, predict(X).argmax(1))
    near(inputs(attack), expected, 1e-12)
    found = evaluate(predict, (expected, Y))
    assert isinstance(found, Report)
    assert flat(attack.reports[0]) == pytest.approx(flat(found), rel=1e-9)
    assert attack.accuracy.tolist() == [found.accuracy]
    assert attack.entropy.tolist() == pytest.approx([found.entropy])
    near(attack.kept, (predict(expected).argmax(1) == predict(X).argmax(1)).double().mean()[None], 1e-12)
    assert attack.clean.to_dict() == evaluate(predict, (X, Y)).to_dict()


def test_by_hand() -> None:
    """σ(2x): every x moves toward 0 by the step, and past it when the step is larger."""
    x = torch.tensor([[2.0], [-1.0], [0.25]])
    assert inputs(fgsm(logistic, x, 0.5)).tolist() == [[1.5], [-0.5], [-0.25]]
    assert fgsm(logistic, x, 0.5).kept.tolist() == pytest.approx([2 / 3])


def test_a_curve_over_step_sizes() -> None:
    steps = [0.0, 0.1, 0.5, 2.0]
    attack = fgsm(predict, (X, Y), steps, batch_size=5)
    assert attack.steps.tolist() == steps
    assert attack.inputs is None
    assert fgsm(predict, DataLoader(TensorDataset(X, Y), batch_size=5), 0.1).inputs is None
    for k, step in enumerate(steps):
        single = fgsm(predict, (X, Y), step)
        assert flat(attack.reports[k]) == pytest.approx(flat(single.reports[0]), rel=1e-12)
    assert flat(attack.reports[0]) == pytest.approx(flat(attack.clean), rel=1e-12)
    assert attack.kept[0] == 1
    assert attack.kept[-1] < 1


def test_one_gradient_serves_every_step_size() -> None:
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(x.requires_grad)
        return predict(x)

    fgsm(counted, X, [0.1, 0.2, 0.3])
    assert calls == [True, False, False, False]


def test_the_attack_is_on_the_mean_of_samples() -> None:
    """The gradient of log E p, not of one sample nor of E log p."""

    def draws(x: Tensor) -> Tensor:
        return torch.stack([predict(x), predict(3 * x), predict(-x)])

    attack = fgsm(draws, X, 0.3)
    near(inputs(attack), X - 0.3 * sign_of_gradient(X, draws(X).mean(0).argmax(1), draws), 1e-12)
    assert attack.clean.mutual_information is not None
    assert not torch.equal(inputs(attack), inputs(fgsm(predict, X, 0.3)))


# What is left as it was, and honesty


def test_nothing_is_touched() -> None:
    x = X.clone()
    attack = fgsm(predict, x, 0.3)
    assert torch.equal(x, X)
    assert not x.requires_grad
    assert not inputs(attack).requires_grad
    assert all(parameter.grad is None for parameter in MODEL.parameters())
    with torch.no_grad():
        assert torch.equal(inputs(fgsm(predict, x, 0.3)), inputs(attack))


def test_certainty_that_hides_the_gradient_is_counted() -> None:
    """A prediction that rounds to 1 has no gradient: it stays, and the report says why."""
    x = torch.tensor([[500.0], [0.5]])
    attack = fgsm(logistic, x, 0.1)
    assert inputs(attack)[:, 0].tolist() == pytest.approx([500.0, 0.4])
    assert attack.unmoved == 1
    assert fgsm(logistic, x[1:], 0.1).unmoved == 0


@given(st.integers(0, 50), st.floats(0, 2))
def test_an_attack_stays_in_its_box_and_lowers_the_predicted_class(seed: int, step: float) -> None:
    """On a logistic model the step cannot raise the probability of the class predicted."""
    x = real(6, 1, seed=seed)
    moved = inputs(fgsm(logistic, x, step))
    assert ((moved - x).abs() <= step + 1e-12).all()
    before = logistic(x)
    rows = torch.arange(6)
    assert (logistic(moved)[rows, before.argmax(1)] <= before.max(1).values + 1e-12).all()


# Bad input


def test_predictions_without_a_gradient() -> None:
    refused(InputError, lambda: fgsm(lambda x: predict(x).detach(), X, 0.1), "without a gradient")
    refused(InputError, lambda: fgsm(lambda x: predict(x).detach().numpy(), X, 0.1), "without a gradient")
    refused(InputError, lambda: fgsm(lambda x: predict(x.detach()), X, 0.1), "without a gradient")
    refused(InputError, lambda: fgsm(MODEL, X, 0.1), "logits", "softmax")

    def broken(x: Tensor) -> Tensor:
        return logistic((x - 1).sqrt())

    refused(NumericalError, lambda: fgsm(broken, torch.tensor([[2.0], [1.0]]), 0.1), "example 1")


def test_bad_arguments() -> None:
    for step in (-0.1, math.nan, [], "far", [[0.1]], None):
        refused(InputError, lambda step=step: fgsm(predict, X, step), "step=")
    refused(InputError, lambda: fgsm(predict, X.long(), 0.1), "floating-point")
    refused(InputError, lambda: fgsm(predict, X, 0.1).accuracy, "no labels")
    refused(DataError, lambda: fgsm(predict, X[:0], 0.1), "empty")
