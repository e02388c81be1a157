"""The cross-entropy fit: files, labels of every kind, and bad input."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet.errors import MemoryBudgetError, NumericalError
from linnet.fitting import CG
from linnet.fitting import solver as plan_module
from linnet.linear.label_problem import class_problem
from linnet.linear.newton import KernelNewton
from linnet.linear.targets import Targets
from tests.fitting.problems import near, network, peak_bytes
from tests.fitting.softmax_cases import case
from tests.refusals import refused

every_solver = pytest.mark.parametrize("solver", ["dual", "primal", "cg"])
CASES = {"classes": case(), "binary": case(outputs=1), "soft": case(soft=True)}


# --- files -----------------------------------------------------------------------------------------


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


def test_a_broken_kernel_is_named() -> None:
    kernel = torch.full((3, 3), math.nan, dtype=torch.float64)
    function = linnet.linearize(nn.Linear(2, 3)).function
    problem = class_problem(function, torch.ones(1, 2), torch.zeros(1, 3), Targets(torch.eye(1, 3), 3, 1.0))
    with pytest.raises(NumericalError, match="kernel"):
        KernelNewton(problem, kernel, 1.0)


# --- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["dual", "primal"])
@pytest.mark.parametrize("ridge", [1.0, "loo"])
@pytest.mark.thinned(2)
def test_what_a_fit_holds_was_planned(solver: str, ridge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured allocations stay within the plan, which is not generous either."""
    c = case(n=80)
    plans: list[Any] = []
    monkeypatch.setattr(plan_module, "require", lambda plan, ways: plans.append(plan))
    lin = linnet.linearize(network(3, 90, 3)) if solver == "primal" else c.lin

    def fit() -> None:
        linnet.fit(lin, (c.x, c.labels), "cross-entropy", ridge=ridge, solver=solver)

    fit()  # warm up
    plans.clear()
    peak = peak_bytes(fit)
    (plan,) = plans
    assert plan.peak >= (6 * 8 * 240**2 if solver == "dual" else 5 * 8 * lin.space.dim**2)
    assert 0.3 * plan.peak < peak < 1.2 * plan.peak, f"{peak / plan.peak:.2f} of {plan}"


def test_too_little_memory_takes_conjugate_gradients_or_says_so() -> None:
    c = case(n=80)
    in_weights = linnet.fit(c.lin, (c.x, c.labels), "cross-entropy", ridge="loo", memory=400_000)
    assert in_weights.solver == "primal"  # for which the kernel need not fit
    fit = linnet.fit(c.lin, (c.x, c.labels), "cross-entropy", memory=40_000)
    assert fit.solver == "cg"
    assert "the dual would need" in fit.summary()["reasons"]["solver"]
    refused(
        MemoryBudgetError,
        lambda: linnet.fit(c.lin, (c.x, c.labels), "cross-entropy", ridge="loo", memory=40_000),
        "primal fit of",
    )


def test_many_examples_of_few_weights_are_solved_in_the_weights() -> None:
    """By counted operations, and every answer by the factor of the Hessian: no kernel is formed."""
    c = case(n=80)
    lin = linnet.linearize(c.lin.function.model, params="last-layer")
    fit = linnet.fit(lin, (c.x, c.labels), "cross-entropy", ridge="loo")
    same = linnet.fit(lin, (c.x, c.labels), "cross-entropy", ridge=fit.ridge, solver="dual")
    assert (fit.solver, same.solver) == ("primal", "dual")
    assert fit.system.kernel_form is None
    near(fit.loo(), same.loo(), 1e-8)
    near(fit.influence(c.x_test), same.influence(c.x_test), 1e-8)
    near(fit.informativeness(), same.informativeness(), 1e-8)
    near(fit.predictive(c.x_test, joint=True).joint_covariance,
         same.predictive(c.x_test, joint=True).joint_covariance, 1e-8)  # fmt: skip
    near(fit.forget([0, 7]).loo(), same.forget([0, 7]).loo(), 1e-8)
    count = fit.module.space.dim  # JJᵀ has as many eigenvalues that are not zero, at the most
    near(fit._eigenvalues(), same._eigenvalues()[-count:], 1e-8)


@every_solver
def test_the_estimate_of_rounding_errors_bounds_them(solver: str) -> None:
    c = case(n=80)
    model = copy.deepcopy(c.lin.function.model).float()
    lin, double = (
        linnet.linearize(net, params="last-layer") for net in (model, copy.deepcopy(model).double())
    )
    how: Any = CG(tolerance=1e-7) if solver == "cg" else solver
    fit = linnet.fit(lin, (c.x.float(), c.labels), "cross-entropy", ridge=0.3, solver=how)
    right = linnet.fit(double, (c.x, c.labels), "cross-entropy", ridge=0.3)
    found = linnet.audit.accuracy(fit)
    errors = [
        float((one.double() - other).abs().max())
        for one, other in ((fit.predict(c.x.float()), right.predict(c.x)), (fit.loo(), right.loo()))
    ]
    assert errors[0] < found.predictions < 1000 * errors[0]
    assert errors[1] < found.leave_one_out < 1000 * errors[1]
