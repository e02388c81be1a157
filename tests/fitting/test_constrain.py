"""Equations on outputs: the KKT system solved densely, and everything that follows from it by brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import linnet
from linnet.errors import InputError, MemoryBudgetError
from linnet.fitting import CG
from tests.fitting.problems import Problem, flat, near, network, problem, real
from tests.oracles.dense import jacobian_oracle, output_oracle
from tests.refusals import refused

RHO = 0.3
every_solver = pytest.mark.parametrize("solver", ["dual", "primal", "cg"])
NAN = float("nan")


def case(solver: str) -> tuple[Problem, Tensor]:
    """A problem, and outputs to hold at X."""
    return (P, PARTIAL) if solver == "dual" else (S, SMALL)


def kkt(p: Problem, a: Tensor, b: Tensor, rho: float = RHO, kept: list[int] | None = None) -> Tensor:
    """δ that minimizes the objective given Aδ = b, from the dense KKT system."""
    rows = list(range(len(p.x))) if kept is None else kept
    j, r = p.j[rows].flatten(0, 1), (p.t - p.f0)[rows].reshape(-1)
    h = j.T @ j + rho * torch.eye(j.shape[1], dtype=j.dtype)
    q = len(a)
    top = torch.cat([h, a.T], 1)
    bottom = torch.cat([a, torch.zeros(q, q, dtype=j.dtype)], 1)
    return torch.linalg.solve(torch.cat([top, bottom]), torch.cat([j.T @ r, b]))[: j.shape[1]]


def held(p: Problem, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A and b of outputs that are held; NaN is free."""
    j, f0 = jacobian_oracle(p.model, x), output_oracle(p.model, x)
    some = ~targets.isnan()
    return j[some], (targets - f0)[some]


def means(p: Problem, x: Tensor, groups: list[int]) -> tuple[Tensor, Tensor]:
    """A and b of equal means."""
    j, f0 = jacobian_oracle(p.model, x), output_oracle(p.model, x)
    g = torch.tensor(groups)
    names = g.unique().tolist()
    a = [j[g == k].mean(0) - j[g == names[0]].mean(0) for k in names[1:]]
    b = [f0[g == names[0]].mean(0) - f0[g == k].mean(0) for k in names[1:]]
    return torch.cat(a), torch.cat(b)


P = problem()
S = problem(n=5, outputs=2, hidden=2)  # a small one, for conjugate gradients
X = real(2, 3, seed=11)
OLD = real(2, 3, seed=12)
PARTIAL = torch.tensor([[1.0, NAN, -2.0], [NAN, NAN, 3.0]], dtype=torch.float64)
SMALL = torch.tensor([[1.0, NAN], [NAN, 3.0]], dtype=torch.float64)
GROUPS = [4, 4, 9, 9, 9]
X_GROUPS = real(5, 3, seed=13)


@every_solver
@pytest.mark.parametrize("targets", [OLD, PARTIAL])
@pytest.mark.thinned(3)
def test_held_outputs_are_exact_and_the_rest_is_optimal(solver: str, targets: Tensor) -> None:
    p, _ = case(solver)
    targets = targets[:, : p.t.shape[1]]
    fit = p.fit(ridge=RHO, solver=solver)
    fixed = fit.constrain(X, targets)
    some = ~targets.isnan()
    near(fixed.predict(X)[some], targets[some], 1e-11)
    near(flat(fixed.delta), kkt(p, *held(p, X, targets)))
    assert fixed.summary()["certificate"] < 1e-10
    assert f"{int(some.sum())} equation(s) hold exactly" in fixed.summary()["reasons"]["constraints"]
    # the first fit is as it was
    near(flat(fit.delta), flat(p.fit(ridge=RHO).delta))
    assert fit.constraints is None


@every_solver
def test_group_means_agree_and_the_rest_is_optimal(solver: str) -> None:
    p, _ = case(solver)
    fixed = p.fit(ridge=RHO, solver=solver).constrain(X_GROUPS, groups=GROUPS)
    outputs = fixed.predict(X_GROUPS)
    near(outputs[:2].mean(0), outputs[2:].mean(0), 1e-11)
    near(flat(fixed.delta), kkt(p, *means(p, X_GROUPS, GROUPS)))


def test_three_groups_of_the_training_data() -> None:
    groups = [0, 1, 2, 0, 1, 2, 0]
    fixed = P.fit(ridge=RHO).constrain(P.x, groups=torch.tensor(groups))
    near(flat(fixed.delta), kkt(P, *means(P, P.x, groups)))
    outputs = fixed.predict(P.x)
    for k in (1, 2):
        near(outputs[k::3].mean(0), outputs[::3].mean(0), 1e-10)


@every_solver
def test_outputs_and_means_at_once_or_one_after_the_other(solver: str) -> None:
    p, _ = case(solver)
    targets = torch.full((5, p.t.shape[1]), NAN, dtype=torch.float64)
    targets[3, 1] = 2.0
    fit = p.fit(ridge=RHO, solver=solver)
    a, b = held(p, X_GROUPS, targets)
    a2, b2 = means(p, X_GROUPS, GROUPS)
    expected = kkt(p, torch.cat([a, a2]), torch.cat([b, b2]))
    near(flat(fit.constrain(X_GROUPS, targets, GROUPS).delta), expected)
    near(flat(fit.constrain(X_GROUPS, targets).constrain(X_GROUPS, groups=GROUPS).delta), expected)


@every_solver
def test_a_weight_is_a_penalty(solver: str) -> None:
    p, partial = case(solver)
    weight = 0.7
    soft = p.fit(ridge=RHO, solver=solver).constrain(X, partial, weight=weight)
    a, b = held(p, X, partial)
    j, r = p.j.flatten(0, 1), p.residual
    h = j.T @ j + RHO * torch.eye(j.shape[1], dtype=j.dtype) + weight * a.T @ a
    near(flat(soft.delta), torch.linalg.solve(h, j.T @ r + weight * a.T @ b))
    assert "penalty" in soft.summary()["reasons"]["constraints"]
    # the larger the weight, the closer to equality; and an equality may follow a penalty
    near(P.fit(ridge=RHO).constrain(X, OLD, weight=1e9).predict(X), OLD, 1e-6)
    both = soft.constrain(X_GROUPS, groups=GROUPS)
    a2, b2 = means(p, X_GROUPS, GROUPS)
    weighted = torch.cat([j, weight**0.5 * a]), torch.cat([r, weight**0.5 * b])
    h = weighted[0].T @ weighted[0] + RHO * torch.eye(j.shape[1], dtype=j.dtype)
    left = torch.cat(
        [torch.cat([h, a2.T], 1), torch.cat([a2, torch.zeros(len(a2), len(a2), dtype=j.dtype)], 1)]
    )
    right = torch.cat([weighted[0].T @ weighted[1], b2])
    near(flat(both.delta), torch.linalg.solve(left, right)[: j.shape[1]])


@pytest.mark.parametrize("kind", ["shared", "adapt"])
@pytest.mark.parametrize("weight", [None, 0.7])
@pytest.mark.thinned(2)
def test_shared_features_obey_as_if_the_equations_were_observed(kind: str, weight: float | None) -> None:
    labels = torch.arange(len(P.x)) % 3
    if kind == "shared":
        fit: Any = P.fit(ridge=RHO, solver="shared")
        base, at, t = fit._start, fit._start(X_GROUPS), fit.targets - fit._start(P.x)
    else:
        fit = linnet.adapt(P.model, (P.x, labels), weight=0.5, ridge=RHO)
        base, at, t = fit._start, 0.0, fit.targets
    features = fit.system.problem.basis
    every, noise = torch.cat([P.x, X]), 0.0 if weight is None else RHO / weight
    some = torch.cat([torch.ones_like(t).bool(), ~PARTIAL.isnan()]).reshape(-1)
    eye = torch.eye(3, dtype=torch.float64)
    kernel = torch.kron(features.kernel(features.examples(every)), eye)[some][:, some]
    kernel += torch.diag(torch.tensor([RHO] * t.numel() + [noise] * 3, dtype=torch.float64))
    wanted = (PARTIAL - base(X)).reshape(-1)[some[t.numel() :]]
    cross = torch.kron(features.cross(X_GROUPS, features.examples(every)), eye)[:, some]
    beta = torch.linalg.solve(kernel, torch.cat([t.reshape(-1), wanted]))
    fixed = fit.constrain(X, PARTIAL, weight=weight)
    near(fixed.predict(X_GROUPS), at + (cross @ beta).view(-1, 3), 1e-9)
    own = torch.kron(features.kernel(features.examples(X_GROUPS)), eye)
    spread = fixed.noise / RHO * (own - cross @ torch.linalg.solve(kernel, cross.T))
    near(fixed.predictive(X_GROUPS, joint=True).joint_covariance.reshape(15, 15), spread, 1e-9)
    if kind == "adapt":
        near(fixed.export()(X_GROUPS), fixed.predict(X_GROUPS), 1e-9)


@pytest.mark.parametrize("solver", ["dual", "primal", "cg"])
@pytest.mark.parametrize("weight", [None, 0.7])
@pytest.mark.thinned(2)
def test_the_cross_entropy_has_its_optimum_given_the_equations(solver: str, weight: float | None) -> None:
    p, labels = S, torch.arange(len(S.x)) % 2
    how: Any = CG(tolerance=1e-13) if solver == "cg" else solver
    fit = linnet.fit(p.lin, (p.x, labels), "cross-entropy", ridge=RHO, solver=how)
    fixed = fit.constrain(X, SMALL, weight=weight)
    a, b = held(p, X, SMALL)
    delta, j = flat(fixed.delta), p.j
    slopes = (p.f0 + j @ delta).softmax(1) - torch.nn.functional.one_hot(labels, 2)
    gradient = torch.einsum("ncp,nc->p", j, slopes) + RHO * delta
    if weight is None:
        near(fixed.predict(X)[~SMALL.isnan()], SMALL[~SMALL.isnan()], 1e-10)
        gradient = gradient - a.T @ torch.linalg.lstsq(a.T, gradient[:, None]).solution[:, 0]
    else:
        gradient = gradient - weight * a.T @ (b - a @ delta)
    assert float(gradient.norm()) < 1e-9


def test_contradictions_may_be_weighed() -> None:
    x, targets = X[[0, 0]], torch.stack([OLD[0], -OLD[0]])
    soft = P.fit(ridge=RHO).constrain(x, targets, weight=1e8)
    assert float(soft.predict(x).abs().max()) < 1e-4 * float(OLD.abs().max())


@every_solver
def test_leave_one_out_obeys_the_equations(solver: str) -> None:
    p, partial = case(solver)
    fixed = p.fit(ridge=RHO, solver=solver).constrain(X, partial)
    a, b = held(p, X, partial)
    expected = torch.stack(
        [
            p.f0[i] + p.j[i] @ kkt(p, a, b, kept=[k for k in range(len(p.x)) if k != i])
            for i in range(len(p.x))
        ]
    )
    near(fixed.loo(), expected, 1e-9)


@every_solver
def test_influence_and_informativeness_obey_the_equations(solver: str) -> None:
    p, partial = case(solver)
    fixed = p.fit(ridge=RHO, solver=solver).constrain(X, partial)
    a, b = held(p, X, partial)
    whole = kkt(p, a, b)
    n = len(p.x)
    left = torch.stack([whole - kkt(p, a, b, kept=[k for k in range(n) if k != i]) for i in range(n)])
    near(fixed.influence(p.x_test), torch.einsum("np,tcp->ntc", left, p.j_test), 1e-9)
    own = torch.einsum("np,tcp->ntc", left, p.j)
    near(fixed.informativeness(), (own**2).sum(2).mean(1), 1e-9)
    assert float(fixed.influence(X)[:, ~partial.isnan()].abs().max()) < 1e-9


@every_solver
def test_covariance_is_conditioned_on_the_equations(solver: str) -> None:
    """Gaussian conditioning of δ ~ N(0, σ²/ρ I) on the data (noise σ²) and on Aδ = b (no noise)."""
    p, partial = case(solver)
    fixed = p.fit(ridge=RHO, solver=solver).constrain(X, partial)
    a, _ = held(p, X, partial)
    rows = torch.cat([p.j.flatten(0, 1), a])
    noise = torch.cat([torch.full((p.t.numel(),), RHO, dtype=torch.float64), torch.zeros(len(a)).double()])
    j = p.j_test.flatten(0, 1)
    k = rows @ rows.T + torch.diag(noise)
    # in units of σ²/ρ
    full = j @ j.T - j @ rows.T @ torch.linalg.solve(k, rows @ j.T)
    c = p.t.shape[1]
    blocks = full.view(4, c, 4, c).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    predictive = fixed.predictive(p.x_test)
    near(predictive.covariance, fixed.noise / RHO * blocks, 1e-8)
    # nothing is uncertain about what is held
    at = fixed.predictive(X).variance
    assert float(at[~partial.isnan()].abs().max()) < 1e-9 * float(predictive.variance.max())
    assert float(at[1, 0]) > 1e-3 * float(predictive.variance.max())


@every_solver
def test_noise_is_that_of_the_data_given_the_equations(solver: str) -> None:
    p, partial = case(solver)
    fixed = p.fit(ridge=RHO, solver=solver).constrain(X, partial)
    a, b = held(p, X, partial)
    j = p.j.flatten(0, 1)
    inverse = torch.linalg.inv(a @ a.T)
    mean = p.residual - j @ a.T @ inverse @ b
    covariance = j @ j.T - j @ a.T @ inverse @ a @ j.T + RHO * torch.eye(p.t.numel(), dtype=j.dtype)
    # σ² of highest N(r; mean, σ²/ρ · covariance)
    expected = RHO * float(mean @ torch.linalg.solve(covariance, mean)) / p.t.numel()
    assert fixed.noise == pytest.approx(expected, rel=1e-8)
    if solver == "dual":
        best = linnet.fit(p.lin, (p.x, p.y), ridge=RHO).constrain(X, partial).path([RHO])
        near(best.noise, torch.tensor([expected], dtype=torch.float64), 1e-9)


def test_every_ridge_of_a_path_obeys_the_equations() -> None:
    fixed = P.fit(ridge=RHO).constrain(X, PARTIAL)
    a, b = held(P, X, PARTIAL)
    errors = []
    for rho in (0.1, 2.0):
        out = [P.f0[i] + P.j[i] @ kkt(P, a, b, rho, [k for k in range(7) if k != i]) for i in range(7)]
        errors.append((P.t - torch.stack(out)).square().sum(1).mean())
    near(fixed.path([0.1, 2.0]).loo_error, torch.stack(errors), 1e-9)


def weighed(p: Problem, rho: float, weight: float, kept: list[int]) -> Tensor:
    """δ that minimizes the objective with ½w‖b − Aδ‖² added to it, from the normal equations."""
    a, b = held(p, X, PARTIAL)
    j, r = p.j[kept].flatten(0, 1), (p.t - p.f0)[kept].reshape(-1)
    h = j.T @ j + weight * a.T @ a + rho * torch.eye(j.shape[1], dtype=j.dtype)
    return torch.linalg.solve(h, j.T @ r + weight * a.T @ b)


@pytest.mark.parametrize("ridge", [4.0, "loo"])
def test_a_penalty_keeps_its_weight_at_another_ridge(ridge: float | str) -> None:
    rows = list(range(len(P.x)))
    first = linnet.fit(P.lin, (P.x[:-2], P.y[:-2]), ridge=RHO).constrain(X, PARTIAL, weight=2.0)
    moved = first.update((P.x[-2:], P.y[-2:]), ridge=ridge)
    near(flat(moved.delta), weighed(P, moved.ridge, 2.0, rows))
    near(flat(moved.forget([0]).delta), weighed(P, moved.ridge, 2.0, rows[1:]))
    errors = []
    for rho in (0.1, moved.ridge):
        without = [weighed(P, rho, 2.0, [k for k in rows if k != i]) for i in rows]
        left = [P.t[i] - P.f0[i] - P.j[i] @ delta for i, delta in enumerate(without)]
        errors.append(torch.stack(left).square().sum(1).mean())
    near(moved.path([0.1, moved.ridge]).loo_error, torch.stack(errors), 1e-9)


def test_the_ridge_by_validation_knows_of_equations() -> None:
    fit = linnet.fit(P.lin, (P.x, P.y), ridge=RHO)
    path = linnet.audit.ridge_path(fit.constrain(X, PARTIAL), (P.x, P.y), [0.1, 2.0])
    near(path.distance, torch.stack([kkt(P, *held(P, X, PARTIAL), rho).norm() for rho in (0.1, 2.0)]))
    penalized = fit.constrain(X, PARTIAL, weight=2.0)
    refused(InputError, lambda: linnet.audit.ridge_path(penalized, (P.x, P.y)), "penalties")
    refused(InputError, lambda: linnet.audit.ridge_gradient(penalized, P.x, P.y), "penalties")


def test_old_predictions_are_kept_through_an_update() -> None:
    """Backward compatibility: the updated fit says on chosen inputs what the old one said."""
    old = linnet.fit(P.lin, (P.x[:5], P.y[:5]), ridge=RHO)
    new = old.update((P.x[5:], P.y[5:])).constrain(P.x_test, old.predict(P.x_test))
    near(new.predict(P.x_test), old.predict(P.x_test), 1e-10)
    assert float((new.predict(P.x) - old.predict(P.x)).abs().max()) > 1e-3


def test_classes_stand_for_their_targets() -> None:
    fixed = P.fit(ridge=RHO).constrain(X, torch.tensor([2, 0]))
    near(fixed.predict(X), torch.tensor([[0.0, 0.0, 15.0], [15.0, 0.0, 0.0]], dtype=torch.float64), 1e-10)


def test_one_output_may_come_without_its_axis() -> None:
    p = problem(outputs=1, classes=False)
    near(p.fit().constrain(X, torch.tensor([0.5, NAN]).double()).predict(X)[0], torch.tensor([0.5]).double())


@every_solver
def test_redundant_equations_are_left_out_and_said(solver: str) -> None:
    p, _ = case(solver)
    c = p.t.shape[1]
    old = OLD[:, :c]
    fit = p.fit(ridge=RHO, solver=solver)
    twice = fit.constrain(torch.cat([X, X]), torch.cat([old, old]))
    near(flat(twice.delta), kkt(p, *held(p, X, old)))
    assert f"{2 * c} redundant one(s) left out" in twice.summary()["reasons"]["constraints"]
    again = fit.constrain(X, old).constrain(X, old)
    near(flat(again.delta), flat(twice.delta))
    # held outputs of two whole groups already have some means: equal ones follow, or contradict
    x = X_GROUPS[:4]
    same = torch.tensor([[1.0, 0.0, 2.0], [3.0, 4.0, 0.0]], dtype=torch.float64).repeat(2, 1)
    implied = fit.constrain(x, same[:, :c]).constrain(x, groups=[0, 0, 1, 1])
    assert f"{c} redundant one(s) left out" in implied.summary()["reasons"]["constraints"]


def test_in_single_precision_the_equations_hold_to_its_rounding() -> None:
    model = network().float()
    lin = linnet.linearize(model)
    fit = linnet.fit(lin, (P.x.float(), P.y), ridge=RHO)
    fixed = fit.constrain(X.float(), OLD.float())
    near(fixed.predict(X.float()), OLD, 3e-6)
    doubled = fit.constrain(torch.cat([X, X]).float(), torch.cat([OLD, OLD]).float())
    assert "6 redundant" in doubled.summary()["reasons"]["constraints"]


def test_an_output_that_nothing_moves() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False)).double()
    fit = linnet.fit(linnet.linearize(model), (P.x, P.t), ridge=RHO)
    zero = torch.zeros(1, 3, dtype=torch.float64)
    near(flat(fit.constrain(zero, zero).delta), flat(fit.delta), 1e-12)
    refused(InputError, lambda: fit.constrain(zero, zero + 1.0), "cannot be reached", "output 0 of example 0")


def test_more_equations_than_parameters_that_agree() -> None:
    """A linear network of 9 parameters, held on 20 inputs at the outputs of another one."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False)).double()
    fit = linnet.fit(linnet.linearize(model), (P.x, P.t), ridge=RHO)
    x = real(20, 3, seed=5)
    other = real(3, 3, seed=6)
    fixed = fit.constrain(x, x @ other.T)
    near(fixed.predict(P.x_test), P.x_test @ other.T, 1e-9)
    assert "9 equation(s) hold exactly, 51 redundant" in fixed.summary()["reasons"]["constraints"]


# --- bad input ------------------------------------------------------------------------------------


@every_solver
def test_contradictions_name_the_equations_and_the_residual(solver: str) -> None:
    p, _ = case(solver)
    c = p.t.shape[1]
    old = OLD[:, :c]
    fit = p.fit(ridge=RHO, solver=solver)
    targets = torch.cat([old[:1], old[:1]])
    targets[1, c - 1] += 1.0
    refused(
        InputError,
        lambda: fit.constrain(X[[0, 0]], targets),
        "contradict",
        f"output {c - 1} of example",
        "residual 1",
    )
    with_old = fit.constrain(X, old)
    refused(
        InputError,
        lambda: with_old.constrain(X, old + 2.0),
        "contradict",
        "residual 2",
        f"and {2 * c - 3} more",
    )
    same = torch.zeros(4, c, dtype=torch.float64)
    same[2:] = 1.0
    x = X_GROUPS[:4]
    error = refused(InputError, lambda: fit.constrain(x, same, [0, 0, 1, 1]), "contradict")
    assert "equal means of output" in str(error) or "output 0 of example" in str(error)


@every_solver
def test_too_many_equations_for_the_budget(solver: str) -> None:
    p, partial = case(solver)
    fit = p.fit(ridge=RHO, solver=solver)
    fit.memory = 100
    refused(MemoryBudgetError, lambda: fit.constrain(X, partial), "equations", "constrain fewer outputs")


def test_every_ridge_of_a_primal_path_obeys_penalties_at_their_weight() -> None:
    ridges = torch.tensor([0.1, 1.0, 30.0])
    found, expected = (
        S.fit(ridge=RHO, solver=solver).constrain(X, SMALL, weight=0.7).path(ridges)
        for solver in ("primal", "dual")
    )
    near(found.loo_error, expected.loo_error, 1e-9)
    near(found.evidence - found.evidence[0], expected.evidence - expected.evidence[0], 1e-9)


def test_equations_in_single_precision_are_told_from_an_exact_intercept() -> None:
    labels = torch.arange(len(P.x)) % 3
    fit = linnet.adapt(network().float(), (P.x.float(), labels), weight=0.5, ridge=RHO)
    outputs = fit.constrain(X_GROUPS.float(), groups=GROUPS).predict(X_GROUPS.float())
    near(outputs[:2].mean(0), outputs[2:].mean(0), 1e-5)
    with pytest.raises(InputError, match="ridge='loo'"):
        fit.constrain(X.float(), PARTIAL.float()).update((P.x.float(), labels), ridge="loo")
