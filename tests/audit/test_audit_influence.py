"""Influence: every method against brute-force retraining in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import linnet
from linnet import audit
from linnet.fitting import CG
from tests.fitting.problems import ALPHA, Problem, near, problem, rho_for
from tests.oracles.conformance import CountingOperator


def solve(p: Problem, keep: Tensor, rho: float) -> Tensor:
    """δ of the fit on some examples, densely in the primal."""
    rows = p.j[keep].flatten(0, 1)
    right = rows.T @ (p.t - p.f0)[keep].reshape(-1)
    return torch.linalg.solve(rows.T @ rows + rho * torch.eye(rows.shape[1], dtype=rows.dtype), right)


def retrained(p: Problem, rho: float) -> tuple[Tensor, Tensor]:
    """δ − δ₋ᵢ (N, P), by solving N + 1 problems; and f − f₋ᵢ at the test inputs (N, T, C)."""
    n = len(p.x)
    full = solve(p, torch.ones(n, dtype=torch.bool), rho)
    changes = []
    for i in range(n):
        keep = torch.ones(n, dtype=torch.bool)
        keep[i] = False
        changes.append(full - solve(p, keep, rho))
    change = torch.stack(changes)
    return change, torch.einsum("tcp,np->ntc", p.j_test, change)


@pytest.fixture(scope="module")
def p() -> Problem:
    return problem(n=8, tests=5)


@pytest.mark.parametrize(("solver", "method"), [("dual", "auto"), ("dual", "cg"), ("cg", "auto")])
@pytest.mark.parametrize("tests", [2, 12])
def test_influence_is_retraining(solver: str, method: str, tests: int) -> None:
    p = problem(n=8, tests=tests)  # both routes: through the kernel, and through the weight changes
    rho = rho_for(p)
    _, expected = retrained(p, rho)
    found = audit.influence(p.fit(ridge=rho, solver=solver), p.x_test, method)
    near(found.outputs, expected, 1e-10 if method == "auto" else 1e-8)
    assert found.method == {"dual": "exact" if method == "auto" else "cg", "cg": "cg"}[solver]
    assert found.residual < 1e-8


@pytest.mark.parametrize("solver", ["dual", "cg"])
def test_weight_changes_are_retraining(p: Problem, solver: str) -> None:
    rho = rho_for(p)
    expected, _ = retrained(p, rho)
    fit = p.fit(ridge=rho, solver=solver)
    near(audit.weight_changes(fit), expected, 1e-9)
    near(audit.weight_changes(fit, [5, 1]), expected[[5, 1]], 1e-9)


def test_known_directions_answer_for_any_input(p: Problem) -> None:
    fit = p.fit(ridge=rho_for(p))
    changes = audit.weight_changes(fit)
    _, expected = retrained(p, rho_for(p))
    near(audit.influence(fit, p.x_test, directions=changes).outputs, expected, 1e-10)


@pytest.mark.parametrize("solver", ["dual", "cg"])
def test_the_loss_is_that_of_retraining(p: Problem, solver: str) -> None:
    rho = rho_for(p)
    _, outputs = retrained(p, rho)
    labels = torch.tensor([0, 2, 1, 1, 0])
    targets = ALPHA * torch.nn.functional.one_hot(labels, 3).double()
    fit = p.fit(ridge=rho, solver=solver)
    f = fit.predict(p.x_test)
    with_, without = (targets - f).square().sum(1) / 2, (targets - f + outputs).square().sum(2) / 2
    found = audit.influence(fit, p.x_test, labels=labels)
    assert found.loss is not None
    near(found.loss, with_ - without, 1e-8)
    assert audit.influence(fit, p.x_test).loss is None


@pytest.mark.parametrize("tests", [5, 12])
@pytest.mark.parametrize("solver", ["dual", "cg"])
def test_the_loss_to_first_order(solver: str, tests: int) -> None:
    p = problem(n=8, tests=tests)  # through the rows of J, and through the weight changes where T > N
    rho = rho_for(p)
    change, outputs = retrained(p, rho)
    labels = torch.tensor([0, 2, 1, 1, 0, 2, 2, 1, 0, 0, 1, 2])[:tests]
    fit = p.fit(ridge=rho, solver=solver)
    targets = ALPHA * torch.nn.functional.one_hot(labels, 3).double()
    expected = torch.einsum("ntc,tc->nt", outputs, fit.predict(p.x_test) - targets)
    near(audit.loss_influence(fit, p.x_test, labels), expected, 1e-8)
    near(audit.loss_influence(fit, p.x_test, labels, directions=change), expected, 1e-8)


@pytest.mark.parametrize("solver", ["dual", "cg"])
def test_ekfac_correlates_with_retraining(solver: str) -> None:
    p = problem(n=20, tests=10, hidden=8)
    rho = rho_for(p, 0.1)
    _, expected = retrained(p, rho)
    found = audit.influence(p.fit(ridge=rho, solver=solver, tolerance=1e-6), p.x_test, "ekfac")
    correlation = torch.corrcoef(torch.stack([found.outputs.reshape(-1), expected.reshape(-1)]))[0, 1]
    assert float(correlation) > 0.98
    assert 1e-4 < found.residual <= 0.1  # no further than it needs


def test_columns_are_solved_together(p: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    from linnet.linear import iterative

    asked: list[Any] = []
    plain = iterative.block_cg

    def counting(operator: Any, b: Tensor, *rest: Any) -> Any:
        counted = CountingOperator(operator)
        asked.append((b.shape[1], counted))
        return plain(counted, b, *rest)

    monkeypatch.setattr(iterative, "block_cg", counting)
    monkeypatch.setattr(
        iterative.Iterative, "kernel_form", None
    )  # as where the kernel does not fit the budget
    fit = p.fit(ridge=rho_for(p), solver="cg")
    fit.loo()
    asked.clear()
    audit.influence(fit, p.x_test, "cg")
    assert [columns for columns, _ in asked] == [15]  # T·C in one block
    assert asked[0][1].products <= 15


def test_float32_networks(p: Problem) -> None:
    single = problem(n=8, tests=5)
    model = single.model.float()
    rho = rho_for(p)
    fit = linnet.fit(linnet.linearize(model), (p.x.float(), p.y), ridge=rho, solver=CG(tolerance=1e-6))
    _, expected = retrained(p, rho)
    near(audit.influence(fit, p.x_test.float()).outputs, expected, 1e-3)


def test_influence_of_a_constrained_fit_goes_through_its_kernel(p: Problem) -> None:
    fit = p.fit(ridge=rho_for(p)).constrain(p.x_test[:1], p.f0_test[:1])
    found = audit.influence(fit, p.x_test)
    near(found.outputs, fit.influence(p.x_test), 1e-12)
    assert found.outputs[:, 0].abs().max() < 1e-8  # held outputs do not move
