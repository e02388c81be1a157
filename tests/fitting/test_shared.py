"""``solver="shared"`` against dense algebra in float64: the kernel by rows of J, every answer by a refit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import linnet
from linnet.errors import (
    InputError,
    MemoryBudgetError,
    NumericalError,
)
from linnet.fitting import Shared, linear_fit
from linnet.fitting.head import deal, example_hashes
from linnet.fitting.linear_fit import LinearFit
from linnet.linear.features import Heads
from linnet.linear.kernel_system import KernelSystem
from tests.fitting.problems import Problem, near, network, problem, real
from tests.fitting.test_cross_fit import X, Y, crossed, procedure
from tests.refusals import refused

N, T, C, RIDGE = 14, 5, 6, 0.7


@cache
def known(outputs: int = C, classes: bool = True) -> Problem:
    return problem(N, outputs, classes, tests=T)


@cache
def fitted(m: int = 2, classes: bool = True) -> LinearFit:
    p = known(classes=classes)
    return linnet.fit(p.lin, (p.x, p.y), ridge=RIDGE, solver=Shared(m))


def dense(p: Problem, v: Tensor) -> Tensor:
    """1/M Σ_m J_m J_mᵀ over the training and the test examples, from the rows of J."""
    rows = torch.einsum("ncp,cm->nmp", torch.cat([p.j, p.j_test]), v)
    return torch.einsum("nmp,kmp->nk", rows, rows) / v.shape[1]


def solution(p: Problem, v: Tensor, ridge: float, at: list[int], targets: Tensor | None = None) -> Tensor:
    """Outputs everywhere of the ridge regression on some of the examples."""
    kernel, f0 = dense(p, v), torch.cat([p.f0, p.f0_test])
    t = p.t if targets is None else targets
    square = kernel[at][:, at] + ridge * torch.eye(len(at), dtype=torch.float64)
    return f0 + kernel[:, at] @ torch.linalg.solve(square, t[at] - f0[at])


EVERY = list(range(N))


def by_kernel(fit: LinearFit, x: Tensor) -> Tensor:
    """The outputs by the kernel to the training data."""
    assert isinstance(fit.system, KernelSystem)
    [cross] = fit.system.kernel_to_train(x)
    return fit.module.base(x) + fit.system.mean(cross)


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("classes", [True, False])
def test_predictions_are_those_of_the_dense_kernel(m: int, classes: bool) -> None:
    p, fit = known(classes=classes), fitted(m, classes)
    v = fit.combinations
    near(v.T @ v, torch.eye(m, dtype=torch.float64))
    near(fit.predict(torch.cat([p.x, p.x_test])), solution(p, v, RIDGE, EVERY))
    assert fit.system.kernel.shape == (N, N)
    assert (fit.solver, fit.record.reasons["solver"]) == ("shared", "set by the user")


def test_weights_and_kernel_predict_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    p, first, second = known(), fitted().recomputed(), fitted().recomputed()
    expected = solution(p, first.combinations, RIDGE, EVERY)[N:]
    monkeypatch.setattr(Heads, "cross", lambda *_: pytest.fail("a kernel"))
    near(first.predict(p.x_test), expected)
    monkeypatch.undo()
    monkeypatch.setattr(linear_fit, "SHARE", 0.0)
    monkeypatch.setattr(Heads, "weigh", lambda *_: pytest.fail("weights"))
    near(second.predict(p.x_test), expected)
    monkeypatch.undo()
    assert linear_fit.SHARE > 0


@pytest.mark.parametrize("m", [C, C + 3])
def test_all_outputs_give_the_mean_of_their_kernels(m: int) -> None:
    p = known()
    fit = linnet.fit(p.lin, (p.x, p.y), ridge=RIDGE, solver=Shared(m, seed=5))
    near(fit.system.kernel, linnet.spectrum.gram(p.model, p.x, form="trace") / C)
    assert fit.record.reasons["outputs"].startswith(f"one kernel for {C} outputs, from all {C}; ")
    assert fit.summary()["combinations"] == C


def test_one_output_has_its_own_kernel() -> None:
    p = known(1, False)
    shared = linnet.fit(p.lin, (p.x, p.y), ridge=RIDGE, solver="shared")
    full = linnet.fit(p.lin, (p.x, p.y), ridge=RIDGE, solver="dual")
    near(shared.predict(p.x_test), full.predict(p.x_test))
    near(shared.predictive(p.x_test).variance, full.predictive(p.x_test).variance)
    near(shared.loo(), full.loo())
    assert shared.record.reasons["outputs"].endswith("differ from k(x, x) I by 0 % of their norm")


def test_the_distance_from_each_output_is_told() -> None:
    p, fit = known(), fitted(1)
    blocks = torch.einsum("ncp,ndp->ncd", p.j, p.j)
    shared = dense(p, fit.combinations).diagonal()[:N, None, None] * torch.eye(C, dtype=torch.float64)
    error = 100 * float((blocks - shared).norm() / blocks.norm())
    said = fit.record.reasons["outputs"]
    assert said == (
        f"one kernel for {C} outputs, from 1 random combination; the blocks K(x, x) of {N} examples differ "
        f"from k(x, x) I by {error:.0f} % of their norm"
    )
    assert error > 5


def test_combinations_are_drawn_by_their_seed() -> None:
    p = known()
    one, same, other = (
        linnet.fit(p.lin, (p.x, p.y), solver=Shared(2, seed)).combinations for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.allclose(one.abs(), other.abs(), atol=1e-3)


def test_variances() -> None:
    p, fit = known(), fitted()
    kernel = dense(p, fit.combinations)
    own = kernel[:N, :N] + RIDGE * torch.eye(N, dtype=torch.float64)
    explained = kernel[N:, :N] @ torch.linalg.solve(own, kernel[:N, N:])
    covariance = fit.noise / RIDGE * (kernel[N:, N:] - explained)
    found = fit.predictive(p.x_test)
    near(found.variance, covariance.diagonal()[:, None].expand(-1, C), 1e-9)
    near(found.mean, fit.predict(p.x_test))
    whole = fit.predictive(p.x_test, joint=True).joint_covariance
    near(whole[:, 1, :, 1], covariance, 1e-9)
    assert float(whole[:, 0, :, 1].abs().max()) == 0
    residual = p.t - p.f0
    assert fit.noise == pytest.approx(RIDGE * float((residual * torch.linalg.solve(own, residual)).mean()))


def test_leave_one_out_and_influence_are_refits() -> None:
    p, fit = known(), fitted()
    loo, influence = fit.loo(), fit.influence(p.x_test)
    changes = []
    for i in EVERY:
        without = solution(p, fit.combinations, RIDGE, [j for j in EVERY if j != i])
        near(loo[i], without[i], 1e-9)
        near(influence[i], solution(p, fit.combinations, RIDGE, EVERY)[N:] - without[N:], 1e-8)
        changes.append(influence[i].square().sum(1).mean())
    near(fit.informativeness(p.x_test), torch.stack(changes), 1e-8)
    near(fit.informativeness(), fit.informativeness(p.x), 1e-8)


def test_adding_can_take_another_ridge() -> None:
    p = known(classes=False)
    start = linnet.fit(p.lin, (p.x[:9], p.y[:9]), ridge=RIDGE, solver=Shared(2))
    whole = linnet.fit(p.lin, (p.x, p.y), ridge="loo", solver=Shared(2))
    chosen = start.update((p.x[9:], p.y[9:]), ridge="loo")
    assert chosen.ridge == pytest.approx(whole.ridge)
    near(chosen.predict(p.x_test), whole.predict(p.x_test), 1e-8)
    assert chosen.record.criterion == "loo"
    given = start.update((p.x[9:], p.y[9:]), ridge=3.0)
    near(given.predict(p.x_test), solution(p, start.combinations, 3.0, EVERY)[N:], 1e-9)
    assert given.record.reasons["change"] == "added 5 examples; the ridge set to 3"
    for wrong in ("best", -1.0, True):
        refused(InputError, lambda wrong=wrong: start.update((p.x[:1], p.y[:1]), ridge=wrong), "ridge=")


def test_path() -> None:
    p, fit = known(), fitted()
    path = fit.path([RIDGE, 2.0])
    near(path.loo_error[0], (fit.targets - fit.loo()).square().sum(1).mean(), 1e-9)
    full = torch.kron(dense(p, fit.combinations)[:N, :N], torch.eye(C, dtype=torch.float64))
    values, vectors = torch.linalg.eigh(full)
    near(path.degrees_of_freedom[1], (values / (values + 2.0)).sum())
    turned = (vectors.T @ p.residual).square()
    noise = 2.0 * (turned / (values + 2.0)).mean()
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(N * C, dtype=torch.float64),
        noise / 2.0 * (full + 2.0 * torch.eye(N * C, dtype=torch.float64)),
    ).log_prob(p.residual)
    near(path.evidence[1], evidence, 1e-9)
    assert len(fit.path().ridges) > 20
    along = fit.along(p.x_test, torch.tensor([RIDGE, 2.0]))
    near(along[1], solution(p, fit.combinations, 2.0, EVERY)[N:], 1e-9)


@pytest.mark.parametrize("criterion", ["loo", "gcv", "evidence"])
def test_a_criterion_chooses_the_ridge(criterion: str) -> None:
    p = known(classes=False)
    fit = linnet.fit(p.lin, (p.x, p.y), ridge=criterion, solver=Shared(2))
    assert fit.ridge == pytest.approx(fit.path().best(criterion))
    assert " values, " in fit.record.reasons["ridge"]
    near(fit.predict(p.x_test), solution(p, fit.combinations, fit.ridge, EVERY)[N:], 1e-9)


def test_probabilities_are_calibrated_on_leave_one_out() -> None:
    fit = fitted()
    assert fit.temperature is not None
    probs = fit.predictive(known().x_test).probs
    near(probs.sum(1), torch.ones(T, dtype=torch.float64))


def test_cross_fitted_heads_are_left_out_by_folds() -> None:
    lin, fold = linnet.linearize(crossed()), deal(example_hashes(X, Y), Y, 3)
    fit = linnet.fit(lin, (X, Y), ridge="loo", solver=Shared(2))
    assert "over 3 folds" in fit.record.reasons["ridge"]
    for k in range(3):
        expected = procedure(fold != k, fold == k, ridge=fit.ridge, solver=Shared(2))
        near(fit.loo()[fold == k], expected, 1e-8)
    less = fit.forget([0])
    near(less.loo(), less.targets - less.system.loo_residuals())  # of a fixed head, as is said
    assert any("held-out outputs" in line for line in less.record.warnings)


@pytest.mark.long
def test_coordinates_of_a_metric() -> None:
    p = known()
    curvature = linnet.curvature(p.model, (p.x, p.t), linnet.likelihoods.Gaussian(), "kfac")
    metric = linnet.with_metric(p.model, curvature, damping=0.1)
    fit = linnet.fit(linnet.linearize(metric), (p.x, p.y), ridge=RIDGE, solver=Shared(C))
    near(fit.system.kernel, linnet.spectrum.gram(metric, p.x, form="trace") / C)
    near(fit.export()(p.x_test), fit.predict(p.x_test), 1e-8)


def test_outputs_that_an_adapter_picks() -> None:
    p = known()
    lin = linnet.linearize(p.model, output=lambda out: out[:, :3])
    fit = linnet.fit(lin, (p.x, p.t[:, :3]), ridge=RIDGE, solver=Shared(2))
    j, j_test, t = p.j[:, :3], p.j_test[:, :3], p.t[:, :3]
    few = replace(p, t=t, f0=p.f0[:, :3], f0_test=p.f0_test[:, :3], j=j, j_test=j_test)
    near(fit.predict(p.x_test), solution(few, fit.combinations, RIDGE, EVERY)[N:], 1e-9)


@pytest.mark.long
def test_export_and_merge() -> None:
    p, fit = known(), fitted()
    near(fit.export()(p.x_test), fit.predict(p.x_test), 1e-9)
    refused(InputError, lambda: fit.export(variance=True), "variance=True", "predictive()")
    refused(InputError, fit.merge, "merge()", "weights of its own", "export()")
    small = fit.recomputed()
    small.memory = 1000
    refused(MemoryBudgetError, small.export, "12 directions of 56 weights")


def test_a_ridge_too_small_for_float32_is_solved_in_float64(tmp_path: Path) -> None:
    p = known()
    low = network(3, 5, C).float()
    x = p.x.float()
    fit = linnet.fit(linnet.linearize(low), (x, p.y), ridge=1e-5, solver=Shared(2))
    assert fit.record.reasons["precision"] == "float64: float32 cannot answer a ridge of 1e-05"
    exact = linnet.fit(linnet.linearize(low.double()), (x.double(), p.y), ridge=1e-5, solver=Shared(2))
    near(fit.predict(p.x_test.float()), exact.predict(p.x_test.float().double()), 1e-6)
    near(fit.loo(), exact.loo(), 1e-6)
    fit.save(tmp_path)
    near(linnet.load(tmp_path, low.float()).predict(x), fit.predict(x), 1e-6)
    rough = linnet.fit(linnet.linearize(low.float()), (x, p.y), ridge=RIDGE, solver=Shared(2))
    assert "precision" not in rough.record.reasons
    refused(NumericalError, lambda: rough.path([1e-9]), "ridges holds 1e-09")


def test_rounding_errors_are_bounded() -> None:
    p = known()
    low, x = network(3, 5, C).float(), p.x.float()
    for ridge in (0.05, RIDGE):
        fit = linnet.fit(linnet.linearize(low), (x, p.y), ridge=ridge, solver=Shared(2))
        exact = linnet.fit(
            linnet.linearize(network(3, 5, C)), (x.double(), p.y), ridge=ridge, solver=Shared(2)
        )
        bound = linnet.audit.accuracy(fit)
        assert bound.sound
        new = p.x_test.float()
        for found, right, most in (
            (fit.predict(new), exact.predict(new.double()), bound.predictions),
            (by_kernel(fit, new), exact.predict(new.double()), bound.predictions),
            (fit.loo(), exact.loo(), bound.leave_one_out),
        ):
            error = float((found.double() - right).abs().max())
            assert 0 < error < most < 300 * error


def test_a_small_budget_is_refused_or_kept() -> None:
    p = known()
    refused(
        MemoryBudgetError,
        lambda: linnet.fit(p.lin, (p.x, p.y), solver="shared", memory=3000),
        'solver="cg"',
    )
    n = 60
    x, t = real(n, 3), real(n, C, seed=1)
    linnet.fit(p.lin, (x, t), solver=Shared(1), memory="200kB")  # where that of all outputs takes a megabyte
    refused(MemoryBudgetError, lambda: linnet.fit(p.lin, (x, t), solver="dual", memory="200kB"), "dual fit")
