"""The fast gradient sign method: both equations, by hand and by autograd, and what it must not touch."""

from __future__ import annotations

import json
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
from tests.fitting.problems import near, network, real, refused

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


# Equation 5.15


@pytest.mark.parametrize("step", [0.0, 0.03, 1.0])
def test_untargeted_moves_against_the_predicted_class(step: float) -> None:
    attack = fgsm(predict, (X, Y), step)
    expected = X - step * sign_of_gradient(X, predict(X).argmax(1))
    near(inputs(attack), expected, 1e-12)
    found = evaluate(predict, (expected, Y))
    assert isinstance(found, Report)
    assert flat(attack.points[0].report) == pytest.approx(flat(found), rel=1e-9)
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
    assert attack.iterations.tolist() == [1, 1, 1, 1]
    assert attack.inputs is None
    for k, step in enumerate(steps):
        single = fgsm(predict, (X, Y), step)
        assert flat(attack.points[k].report) == pytest.approx(flat(single.points[0].report), rel=1e-12)
    assert flat(attack.points[0].report) == pytest.approx(flat(attack.clean), rel=1e-12)
    assert attack.kept[0] == 1
    assert attack.kept[-1] < 1


def test_one_gradient_serves_every_step_size() -> None:
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(x.requires_grad)
        return predict(x)

    fgsm(counted, X, [0.1, 0.2, 0.3])
    assert calls == [True, False, False, False]
    calls.clear()
    fgsm(counted, X, 0.1, iterations=3)  # each gradient is also the prediction at the point before
    assert calls == [True, True, True, False]


def test_the_attack_is_on_the_mean_of_samples() -> None:
    """The gradient of log E p, not of one sample nor of E log p."""

    def draws(x: Tensor) -> Tensor:
        return torch.stack([predict(x), predict(3 * x), predict(-x)])

    attack = fgsm(draws, X, 0.3)
    near(inputs(attack), X - 0.3 * sign_of_gradient(X, draws(X).mean(0).argmax(1), draws), 1e-12)
    assert attack.clean.mutual_information is not None
    assert not torch.equal(inputs(attack), inputs(fgsm(predict, X, 0.3)))


def test_repeated_untargeted_steps_keep_to_the_first_class() -> None:
    attack = fgsm(logistic, torch.tensor([[0.2]]), 0.5, iterations=3)
    near(inputs(attack), torch.tensor([[0.2 - 1.5]]), 1e-6)
    assert attack.kept.tolist() == [0, 0, 0]


# Equation 5.16


def test_targeted_steps_climb_to_the_target() -> None:
    target, eta, steps = 0, 0.2, 8
    attack = fgsm(predict, (X, Y), eta, target=target, iterations=steps)
    assert attack.points[0].report.examples.n < 12
    rows = (predict(X).argmax(1) != target).nonzero()[:, 0]
    assert attack.index.tolist() == rows.tolist()
    assert attack.excluded == 12 - len(rows) > 0
    x, aim = X[rows], torch.full((len(rows),), target)
    for t in range(steps):
        x = x + eta * sign_of_gradient(x, aim)
        p = predict(x)
        assert attack.iterations[t] == t + 1
        assert attack.steps[t] == eta
        assert attack.reached[t] == pytest.approx((p.argmax(1) == target).double().mean().item())
        assert attack.entropy[t] == pytest.approx(torch.special.entr(p).sum(1).mean().item(), rel=1e-10)
        assert attack.accuracy[t] == pytest.approx((p.argmax(1) == Y[rows]).double().mean().item())
    near(inputs(attack), x, 1e-12)
    assert attack.reached[-1] > attack.reached[0]


def test_several_step_sizes_of_several_iterations() -> None:
    steps = [0.05, 0.2]
    attack = fgsm(predict, X, steps, target=1, iterations=4)
    for k, step in enumerate(steps):
        single = fgsm(predict, X, step, target=1, iterations=4)
        assert attack.reached[k] == single.reached[-1]
        assert attack.entropy[k] == single.entropy[-1]
    assert attack.iterations.tolist() == [4, 4]


def test_batches_do_not_matter() -> None:
    """Also where a whole batch is at the target already."""
    x = torch.tensor([[1.0], [2.0], [-1.0], [-0.5]])
    whole = fgsm(logistic, x, 0.4, target=1, iterations=2)
    parts = fgsm(logistic, x, 0.4, target=1, iterations=2, batch_size=2)
    assert parts.to_dict() == whole.to_dict()
    assert parts.index.tolist() == [2, 3]
    assert parts.excluded == 2
    torch.testing.assert_close(inputs(parts), inputs(whole))
    assert parts.clean.examples.n == 2


# Keywords


def test_limits_clamp_after_every_step() -> None:
    x = torch.tensor([[0.75], [0.25]])
    assert inputs(fgsm(lambda x: logistic(x - 5), x, 0.5, limits=(0.0, 1.0))).tolist() == [[1.0], [0.75]]
    down = fgsm(logistic, x, 0.5, iterations=3, limits=(0.0, 1.0))
    assert inputs(down).tolist() == [[0.0], [0.0]]
    assert down.entropy[1:].tolist() == pytest.approx([math.log(2)] * 2)


def test_limits_and_scale_of_each_dimension() -> None:
    """Images that were standardized channel by channel have ends of their own in each."""
    low, high = torch.tensor([-0.5, 0.0, -9.0]).double(), torch.tensor([0.5, 0.25, 9.0]).double()
    found = inputs(fgsm(predict, X, 0.3, limits=(low, high)))
    near(found, inputs(fgsm(predict, X, 0.3)).clamp(low, high), 1e-12)
    assert torch.equal(
        inputs(fgsm(predict, X, 0.3, limits=[low.tolist(), 0.5])).amax(), torch.tensor(0.5).double()
    )
    tripled = inputs(fgsm(predict, X, 0.1, scale=3 * torch.ones(3)))
    for other in ([3, 3, 3], torch.full((3,), 3).numpy(), 3):
        near(inputs(fgsm(predict, X, 0.1, scale=other)), tripled, 1e-12)


def test_scale_is_the_range_of_each_dimension() -> None:
    span = X.amax(0) - X.amin(0)
    expected = X - 0.1 * span * sign_of_gradient(X, predict(X).argmax(1))
    near(inputs(fgsm(predict, X, 0.1, scale="range")), expected, 1e-12)
    near(inputs(fgsm(predict, X, 0.1, scale="range", batch_size=5)), expected, 1e-12)
    near(inputs(fgsm(predict, X, 0.1, scale=span)), expected, 1e-12)
    near(inputs(fgsm(predict, X, 0.05, scale=2.0)), inputs(fgsm(predict, X, 0.1)), 1e-12)


def test_inputs_are_kept_when_asked() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=5)
    assert fgsm(predict, loader, 0.1).inputs is None
    assert fgsm(predict, (X, Y), [0.5, 0.1]).inputs is None
    assert fgsm(predict, (X, Y), 0.1).inputs is not None


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
    assert "1 unmoved" in str(attack)
    assert fgsm(logistic, x[1:], 0.1).unmoved == 0


def test_the_report() -> None:
    attack = fgsm(predict, (X, Y), 0.2, target=2, iterations=2)
    values = json.loads(json.dumps(attack.to_dict(), allow_nan=False))
    assert [point["reached"] for point in values["points"]] == attack.reached.tolist()
    assert [point["kept"] for point in values["points"]] == attack.kept.tolist()
    assert values["clean"]["accuracy"] == attack.clean.accuracy
    lines = str(attack).splitlines()
    assert "toward class 2" in lines[0]
    assert lines[1].split() == ["step", "iterations", "accuracy", "entropy", "kept", "reached"]
    assert len(lines) == 4
    unlabeled = fgsm(predict, X, 0.2)
    assert str(unlabeled).splitlines()[1].split() == ["step", "iterations", "entropy", "kept"]
    assert "accuracy" not in unlabeled.to_dict()["points"][0]
    refused(InputError, lambda: unlabeled.accuracy, "no labels")
    refused(InputError, lambda: unlabeled.reached, "no target")


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
    refused(InputError, lambda: fgsm(lambda x: predict(x.detach()), X, 0.1), "do not depend")
    refused(InputError, lambda: fgsm(MODEL, X, 0.1), "logits", "softmax")

    def broken(x: Tensor) -> Tensor:
        return logistic((x - 1).sqrt())

    refused(NumericalError, lambda: fgsm(broken, torch.tensor([[2.0], [1.0]]), 0.1), "example 1")


def test_bad_arguments() -> None:
    def attack(data: Any = X, step: Any = 0.1, **options: Any) -> Any:
        return lambda: fgsm(predict, data, step, **options)

    for step in (-0.1, math.nan, [], "far", [[0.1]], None):
        refused(InputError, attack(step=step), "step=")
    refused(InputError, attack(iterations=0), "iterations=0")
    refused(InputError, attack(target=-1), "target=-1")
    refused(InputError, attack(target=4), "target=4", "0 to 3")
    refused(InputError, attack(limits=(1.0, 0.0)), "limits=(1.0, 0.0)")
    for limits in (
        1.0,
        (0.0,),
        ("a", "b"),
        (None, 1.0),
        (float("nan"), 1.0),
        (torch.ones(3), torch.ones(3)),
        "ab",
    ):
        refused(InputError, attack(limits=limits), "limits")
    refused(InputError, attack(limits=(torch.zeros(5), 1.0)), "limits has shape (5,)", "(3,)")
    refused(InputError, attack(scale="unit"), "scale='unit'")
    for scale in (None, "", True, float("inf"), [[1.0], [1.0, 2.0]]):
        refused(InputError, attack(scale=scale), "scale")
    refused(InputError, attack(scale=-1.0), "scale is negative")
    refused(InputError, attack(scale=torch.ones(5)), "scale has shape (5,)", "(3,)")
    refused(InputError, attack(X.long()), "torch.int64", "(12, 3)")
    refused(InputError, attack({"x": X}), "x is dict")
    refused(DataError, attack(X[:0]), "empty")
    refused(DataError, attack((X, Y + 9)), "out of range")
    refused(DataError, lambda: fgsm(logistic, torch.ones(3, 1), 0.1, target=1), "class 1 already")
