"""The cross-entropy fit: files, labels of every kind, and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet.errors import DataError, FileFormatError, InputError, MemoryBudgetError, NumericalError
from linnet.fitting import OneHot
from linnet.fitting import plan as plan_module
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.linear.softmax_dual import SoftmaxDual
from linnet.linear.softmax_loss import ClassLoss
from tests.fitting.problems import near, network, peak_bytes, real, refused
from tests.fitting.softmax_cases import case

every_solver = pytest.mark.parametrize("solver", ["dual", "cg"])
CASES = {"classes": case(), "binary": case(outputs=1), "soft": case(soft=True)}


# --- files -----------------------------------------------------------------------------------------


@every_solver
@pytest.mark.parametrize("key", ["classes", "binary"])
@pytest.mark.thinned(2)
def test_a_saved_fit_can_do_all_that_it_could(key: str, solver: str, tmp_path: Path) -> None:
    c = CASES[key]
    fit = c.fit(ridge=0.1, solver=solver)
    fit.save(tmp_path)
    loaded: Any = linnet.load_fit(tmp_path, c.model)
    assert isinstance(loaded, SoftmaxFit)
    near(loaded.predict(c.x_test), fit.predict(c.x_test), 1e-9)
    near(loaded.loo(), fit.loo(), 1e-7)
    near(loaded.predictive(c.x_test).covariance, fit.predictive(c.x_test).covariance, 1e-7)
    near(loaded.forget([1]).predict(c.x_test), fit.forget([1]).predict(c.x_test), 1e-7)
    assert loaded.classes == fit.classes
    assert torch.equal(loaded.labels, c.labels)
    assert loaded.summary()["reasons"] == json.loads(json.dumps(fit.summary()["reasons"]))
    assert loaded.system.steps <= 1
    refused(
        FileFormatError, lambda: linnet.load_fit(tmp_path, network(3, 5, c.y.shape[1], seed=9)), "weights"
    )


# --- input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "last"), [("classes", nn.Softmax(1)), ("binary", nn.Sigmoid())])
def test_a_network_that_returns_probabilities_is_noticed(key: str, last: nn.Module) -> None:
    c = CASES[key]
    scale = nn.Linear(c.y.shape[1], c.y.shape[1]).double()
    scale.weight.data.copy_(30 * torch.eye(c.y.shape[1]))
    scale.bias.data.copy_(-30 * c.model(c.x).median(0).values)
    with pytest.warns(UserWarning, match=f"leave the last {type(last).__name__.lower()} out"):
        linnet.fit(
            linnet.linearize(nn.Sequential(c.model, scale, last)), (c.x, c.labels), loss="cross-entropy"
        )


def test_labels_of_every_kind() -> None:
    c = CASES["classes"]
    expected = c.fit(ridge=0.1).predict(c.x_test)
    for labels in (c.labels.int(), c.labels.short(), c.labels[:, None], c.y, c.y.float()):
        found = linnet.fit(c.lin, (c.x, labels), loss="cross-entropy", ridge=0.1)
        near(found.predict(c.x_test), expected, 1e-9)
    loader = DataLoader(TensorDataset(c.x, c.labels), batch_size=1)
    near(linnet.fit(c.lin, loader, loss="cross-entropy", ridge=0.1).predict(c.x_test), expected, 1e-9)
    given = linnet.fit(c.lin, (c.x, c.labels), "cross-entropy", targets=CASES["soft"].y, ridge=0.1)
    soft = linnet.fit(c.lin, (c.x, CASES["soft"].y), "cross-entropy", ridge=0.1)
    near(given.predict(c.x_test), soft.predict(c.x_test), 1e-12)
    binary = CASES["binary"]
    floats = linnet.fit(binary.lin, (binary.x, binary.labels.double()), "cross-entropy", ridge=0.1)
    near(floats.predict(c.x_test), binary.fit(ridge=0.1).predict(c.x_test), 1e-12)
    assert (floats.classes, floats.labels.tolist()) == (2, binary.labels.tolist())


def test_one_output_is_two_classes_with_one_logit() -> None:
    """The logistic fit equals the softmax of (0, f)."""

    class Pair(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            f = self.inner(x)
            return torch.cat([torch.zeros_like(f), f], 1)

    c = CASES["binary"]
    pair = linnet.fit(linnet.linearize(Pair(c.model)), (c.x, c.labels), "cross-entropy", ridge=0.1)
    fit = c.fit(ridge=0.1)
    near(pair.predict(c.x_test)[:, 1:], fit.predict(c.x_test), 1e-9)
    near(pair.loo()[:, 1:], fit.loo(), 1e-8)


@pytest.mark.parametrize(
    ("labels", "error", "words"),
    [
        (real(9, 3), InputError, ["no probability", 'loss="squared"']),
        (real(9, 2), InputError, ["shape (9, 2)", "probabilities (N, 3)"]),
        (real(9), InputError, ["shape (9,)", 'loss="squared"']),
        (torch.full((9, 3), 0.5), InputError, ["no probability", "sum to one"]),
        (torch.full((9, 3), math.nan), DataError, ["NaN"]),
        (torch.tensor([0, 1, -100] * 3), DataError, ["-100", "ignore_index is not supported"]),
        (torch.tensor([0, 1, 3] * 3), DataError, ["out of range", "3 outputs"]),
        (torch.ones(9, 1, dtype=torch.bool), InputError, ["torch.bool"]),
        (torch.ones(9, 3, dtype=torch.long), InputError, ["shape (9, 3)"]),
    ],
)
def test_labels_that_are_none(labels: torch.Tensor, error: type, words: list[str]) -> None:
    c = CASES["classes"]
    refused(error, lambda: linnet.fit(c.lin, (c.x, labels), loss="cross-entropy"), *words)


def test_labels_of_one_output_that_are_none() -> None:
    c = CASES["binary"]
    refused(DataError, lambda: linnet.fit(c.lin, (c.x, c.labels + 1), "cross-entropy"), "out of range")
    refused(
        InputError, lambda: linnet.fit(c.lin, (c.x, real(9)), "cross-entropy"), "no probability", "0 to 1"
    )


def test_arguments_that_do_not_go_together() -> None:
    c = CASES["classes"]
    refused(InputError, lambda: c.fit(targets=OneHot(3.0)), "OneHot(3.0)", "labels are probabilities")
    refused(InputError, lambda: c.fit(targets=c.y[:, :2]), "targets", "(9, 3)")
    refused(InputError, lambda: c.fit(ridge=0.0), "ridge=0.0", "positive")
    x = c.x.clone()
    x[0, 0] = math.nan
    refused(DataError, lambda: linnet.fit(c.lin, (x, c.labels), "cross-entropy"), "x")


@every_solver
def test_one_example_and_one_class(solver: str) -> None:
    c = CASES["classes"]
    fit = linnet.fit(c.lin, (c.x[:1], c.labels[:1]), "cross-entropy", ridge=0.1, solver=solver)
    near(fit.predict(c.x_test), c.f0_test + c.j_test @ c.optimum(0.1, slice(0, 1)), 1e-4)
    near(fit.loo(), c.f0[:1], 1e-4)
    warnings = fit.summary()["warnings"]
    assert any("2 class(es) have no example" in text for text in warnings)
    assert fit.predictive(c.x_test).probs.isfinite().all()


def test_an_empty_class_gets_less_probable() -> None:
    c = CASES["classes"]
    labels = c.labels % 2
    fit = linnet.fit(c.lin, (c.x, labels), "cross-entropy", ridge=0.01)
    assert any("1 class(es) have no example (2)" in text for text in fit.summary()["warnings"])
    assert fit.predict(c.x).softmax(1)[:, 2].mean() < c.f0.softmax(1)[:, 2].mean()


def test_not_converged_says_what_to_do() -> None:
    c = CASES["classes"]
    error = refused(NumericalError, lambda: c.fit(ridge=1e-3, solver="dual", max_steps=1), "after 1 steps")
    assert "max_steps=" in str(error)
    error = refused(
        NumericalError, lambda: c.fit(ridge=1e-3, solver="cg", max_steps=3, tolerance=1e-12), "after"
    )
    assert 'solver="dual"' in str(error)


def test_a_broken_kernel_is_named() -> None:
    kernel = torch.full((3, 3), math.nan, dtype=torch.float64)
    loss = ClassLoss(torch.eye(1, 3, dtype=torch.float64))
    with pytest.raises(NumericalError, match="kernel has 9 NaN"):
        SoftmaxDual(kernel, torch.zeros(1, 3, dtype=torch.float64), loss, 1.0)


# --- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [1.0, "loo"])
def test_what_a_dual_fit_holds_was_planned(ridge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured allocations stay within the plan, which is not generous either."""
    c = case(n=80)
    plans: list[Any] = []
    monkeypatch.setattr(plan_module, "require", lambda plan, ways: plans.append(plan))
    lin = c.lin
    linnet.fit(lin, (c.x, c.labels), "cross-entropy", ridge=1.0, solver="dual")  # warm up
    plans.clear()
    peak = peak_bytes(lambda: linnet.fit(lin, (c.x, c.labels), "cross-entropy", ridge=ridge, solver="dual"))
    (plan,) = plans
    assert plan.peak >= 6 * 8 * 240**2
    assert 0.3 * plan.peak < peak < 1.2 * plan.peak, f"{peak / plan.peak:.2f} of {plan}"


def test_too_little_memory_takes_conjugate_gradients_or_says_so() -> None:
    c = case(n=80)
    fit = linnet.fit(c.lin, (c.x, c.labels), "cross-entropy", memory=400_000)
    assert fit.solver == "cg"
    assert "the dual would need" in fit.summary()["reasons"]["solver"]
    refused(
        MemoryBudgetError,
        lambda: linnet.fit(c.lin, (c.x, c.labels), "cross-entropy", ridge="loo", memory=400_000),
        "dual fit of 240 equations",
    )


def test_constraints_want_the_squared_loss() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 3), torch.randint(3, (12,))
    lin = linnet.linearize(torch.nn.Linear(3, 3))
    fit = linnet.fit(lin, (x, y), loss="cross-entropy", ridge=1.0)
    with pytest.raises(InputError, match="loss='squared'"):
        fit.constrain(x[:1], torch.zeros(1, 3))


def test_the_criteria_of_a_ridge_are_named() -> None:
    x, y = torch.randn(12, 3), torch.randn(12, 3)
    lin = linnet.linearize(torch.nn.Linear(3, 3))
    with pytest.raises(InputError, match='"loo", "gcv", "evidence"'):
        linnet.fit(lin, (x, y), ridge="foo")


def test_a_ridge_stays_when_examples_come() -> None:
    x, y, wrong = real(6, 3), torch.arange(6) % 3, "loo"
    fit: Any = linnet.fit(linnet.linearize(network()), (x, y), loss="cross-entropy", ridge=1.0)
    refused(InputError, lambda: fit.update((x, y), ridge=wrong), "ridge='loo'", "cross-entropy")
    refused(InputError, lambda: fit.check_loo([]), "examples is empty")
