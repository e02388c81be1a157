"""Every keyword of ``linnet.fit`` changes something; operations are counted; plans are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import linnet
from linnet.fitting import CG, OneHot
from linnet.fitting import solver as plan_module
from linnet.fitting.solver import Size
from linnet.linalg import Dense
from linnet.linear.iterative import CGSettings, Iterative
from linnet.linear.problem import Problem
from linnet.tangent import jacobian
from tests.fitting.problems import flat, near, network, peak_bytes, problem, real, solver_of
from tests.grids import grid
from tests.oracles.dense import ridge_oracle


def test_ridge_changes_the_solution() -> None:
    p = problem()
    for rho in (0.01, 1.0, 100.0):
        near(flat(p.fit(ridge=rho).delta), ridge_oracle(p.j, p.t, p.f0, rho))
    assert p.fit().ridge == 1.0


def test_scale_is_that_of_one_hot_targets() -> None:
    p = problem()
    for alpha in (1.0, 0.1):
        t = p.t * (alpha / 15.0)
        fit = p.fit(targets=OneHot(alpha))
        near(fit.targets, t, 1e-15)
        near(flat(fit.delta), ridge_oracle(p.j, t, p.f0, 1.0))


def test_targets_replace_those_made_from_labels() -> None:
    p = problem()
    t = 3.0 * p.t - 1.0
    fit = p.fit(targets=t)
    near(flat(fit.delta), ridge_oracle(p.j, t, p.f0, 1.0))
    assert fit.classes == 3  # the largest target is still that of the label
    assert torch.equal(fit.labels, p.y)
    other = p.fit(targets=real(7, 3, seed=8))
    assert other.classes is None


def test_solver_is_the_one_asked_for() -> None:
    p = problem()
    for solver, system in (("dual", "KernelSystem"), ("primal", "NormalSystem"), ("cg", "Iterative")):
        fit = p.fit(solver=solver)
        assert fit.solver == solver
        assert type(fit.system).__name__ == system
        assert fit.summary()["reasons"]["solver"] == "set by the user"


# --- auto -----------------------------------------------------------------------------------------


def test_auto_takes_the_exact_solver_for_a_small_problem_and_says_why() -> None:
    fit = problem().fit(solver="auto")
    assert fit.solver == "dual"
    reason = fit.summary()["reasons"]["solver"]
    assert "exact and faster" in reason
    assert "operations" in reason
    assert "conjugate gradients" in reason


def test_auto_iterates_where_the_kernel_does_not_fit() -> None:
    p = problem(n=40)
    fit = p.fit(memory=20_000)
    assert fit.solver == "cg"
    assert "20.0 kB" in fit.summary()["reasons"]["solver"]
    near(flat(fit.delta), ridge_oracle(p.j, p.t, p.f0, 1.0), 1e-3)


@pytest.mark.parametrize("ridge", [1.0, "loo"])
def test_auto_sums_over_the_data_where_weights_are_few(ridge: Any) -> None:
    p = problem(n=40)
    fit = p.fit(ridge=ridge)
    assert fit.solver == "primal"
    near(flat(fit.delta), ridge_oracle(p.j, p.t, p.f0, fit.ridge), 1e-9)


def test_auto_iterates_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem()
    monkeypatch.setattr(Size, "operations", lambda _: {"dual": 1e9, "primal": 2e9, "cg": 1e6})
    fit = p.fit(solver="auto")
    assert fit.solver == "cg"
    assert "1.0e+09" in fit.summary()["reasons"]["solver"]
    assert "faster" in fit.summary()["reasons"]["solver"]


def test_auto_forms_the_kernel_to_choose_a_ridge() -> None:
    fit = problem().fit(ridge="gcv")
    assert fit.solver == "dual"
    assert "every ridge at once" in fit.summary()["reasons"]["solver"]


@pytest.mark.parametrize("ridge", [1.0, "loo"])
def test_what_a_dual_fit_holds_was_planned(ridge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured allocations stay within 1.2 times the plan, which is not generous either."""
    p = problem(n=100)
    lin = p.lin
    plans = []
    monkeypatch.setattr(plan_module, "require", lambda plan, ways: plans.append(plan))
    p.fit(ridge=ridge, solver="dual")  # warm up
    plans.clear()
    peak = peak_bytes(lambda: linnet.fit(lin, (p.x, p.y), ridge=ridge, solver="dual"))
    (plan,) = plans
    assert plan.peak > 2 * 8 * 300**2
    assert 0.4 * plan.peak < peak < 1.2 * plan.peak, f"{peak / plan.peak:.2f} of {plan}"


# --- keywords of the kernel -----------------------------------------------------------------------


def test_file_keeps_the_kernel(tmp_path: Path) -> None:
    p = problem()
    file = tmp_path / "kernel.npy"
    fit = p.fit(file=file, solver="dual")
    saved = np.load(file)
    assert saved.shape == (7, 3, 7, 3)
    near(torch.from_numpy(saved).reshape(21, 21), p.kernel)
    near(flat(fit.delta), ridge_oracle(p.j, p.t, p.f0, 1.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernel.npy", "kernel.npy.made.json"]


# --- keywords of conjugate gradients ---------------------------------------------------------------


def test_tolerance_is_reached_and_no_more() -> None:
    p = problem()
    residuals = [p.fit(solver="cg", tolerance=t).summary()["certificate"] for t in (1e-2, 1e-6, 1e-12)]
    assert residuals[0] <= 1e-2 < residuals[0] * 1e3
    assert residuals[1] <= 1e-6
    assert residuals[2] <= 1e-12
    steps = [p.fit(solver="cg", tolerance=t).system.steps for t in (1e-2, 1e-6, 1e-12)]
    assert steps == sorted(set(steps))


def ill_conditioned() -> Any:
    """Inputs of very different scales, so that plain conjugate gradients need many steps."""
    p = problem(n=20)
    x = p.x * torch.tensor([30.0, 1.0, 0.03])
    return linnet.linearize(network()), x, p.y


def test_rank_preconditions() -> None:
    lin, x, y = ill_conditioned()
    plain, nystrom = (
        linnet.fit(lin, (x, y), solver=solver_of("cg", tolerance=1e-8, rank=r), ridge=0.01) for r in (0, 25)
    )
    assert nystrom.system.steps < plain.system.steps / 2
    near(flat(nystrom.delta), flat(plain.delta), 1e-5)
    again = linnet.fit(lin, (x, y), solver=solver_of("cg", tolerance=1e-8, rank=25), ridge=0.01)
    assert torch.equal(flat(again.delta), flat(nystrom.delta))


def test_a_perfect_preconditioner_takes_one_step() -> None:
    p = problem()
    j = p.j.flatten(0, 1)
    inverse = torch.linalg.inv(j.T @ j + 0.3 * torch.eye(j.shape[1], dtype=torch.float64))
    fit = p.fit(solver="cg", ridge=0.3, tolerance=1e-9, preconditioner=Dense(inverse))
    assert fit.system.steps == 1
    assert p.fit(solver="cg", ridge=0.3, tolerance=1e-9).system.steps > 5


# --- operations are counted ------------------------------------------------------------------------


class Counter:
    """Counts the directional derivatives and pullbacks of a run, in columns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self.jvp = self.vjp = 0
        jvp, vjp = jacobian.jvp_columns, jacobian.vjp_columns

        def counted_jvp(function: Any, x: Any, v: Tensor, *rest: Any, **kept: Any) -> Tensor:
            self.jvp += 1 if v.ndim == 1 else v.shape[1]
            return jvp(function, x, v, *rest, **kept)

        def counted_vjp(function: Any, x: Any, u: Tensor, *rest: Any, **kept: Any) -> Tensor:
            self.vjp += 1 if u.ndim == 2 else u.shape[2]
            return vjp(function, x, u, *rest, **kept)

        for module in modules:
            monkeypatch.setattr(module, "jvp_columns", counted_jvp)
            monkeypatch.setattr(module, "vjp_columns", counted_vjp)


def test_one_jvp_and_one_vjp_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem()
    lin = p.lin
    count = Counter(monkeypatch, jacobian)
    solved = Iterative(Problem(lin.function, p.x, p.t - lin.base(p.x)), 0.3, CGSettings(tolerance=1e-6))
    _ = solved.beta
    # a step each, one for the true residual, one Jᵀr before and one Jδ after
    assert solved.steps > 5
    assert count.jvp == solved.steps + 2
    assert count.vjp == solved.steps + 2


class Passes(nn.Module):
    """Counts how often the network is run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.count = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.count[0] += 1
        return self.net(x)


def test_passes_through_the_network_in_a_step() -> None:
    """A step of conjugate gradients on one batch runs the network twice: once for Jv, once for Jᵀu."""
    p = problem()
    lin = linnet.linearize(Passes())
    counts = []
    for tolerance in (1e-3, 1e-9):
        before = lin.model.count[0]
        fit = linnet.fit(lin, (p.x, p.y), solver=CG(tolerance=tolerance), ridge=0.3)
        counts.append((fit.system.steps, fit.module.model.count[0] - before))
    steps = counts[1][0] - counts[0][0]
    assert steps > 3
    # the first fit also probes which derivatives work, once for each network
    again = linnet.fit(lin, (p.x, p.y), solver=CG(tolerance=1e-3), ridge=0.3)
    before = again.module.model.count[0]
    Iterative(Problem(lin.function, p.x, p.t - p.f0), 0.3, CGSettings(tolerance=1e-9))
    long = lin.model.count[0] - before
    before = lin.model.count[0]
    Iterative(Problem(lin.function, p.x, p.t - p.f0), 0.3, CGSettings(tolerance=1e-3))
    short = lin.model.count[0] - before
    assert long - short == 2 * steps


def test_audits_of_a_dual_fit_do_not_run_the_network() -> None:
    p = problem()
    lin = linnet.linearize(Passes())
    fit = linnet.fit(lin, (p.x, p.y), solver="dual")
    before = fit.module.model.count[0]
    fit.loo(), fit.informativeness(), fit.path(), fit.noise, fit.temperature, fit.summary()
    assert fit.module.model.count[0] == before
    fit.influence(p.x_test)
    after = fit.module.model.count[0]
    fit.influence(p.x_test)  # K(x, X) is kept for the last x
    assert fit.module.model.count[0] - after <= 2
    assert after > before


def test_left_out_predictions_of_an_iterated_fit_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """N · C solves are dear: loo, temperature and informativeness share them where no kernel fits."""
    monkeypatch.setattr(Iterative, "kernel_form", None)
    p = problem()
    fit = p.fit(solver="cg", ridge=1.0, tolerance=1e-6)
    calls = []
    solve = Iterative.solve
    monkeypatch.setattr(Iterative, "solve", lambda self, b: calls.append(b.shape[1]) or solve(self, b))
    first = fit.loo()
    assert sum(calls) == 21
    torch.testing.assert_close(fit.loo(), first)
    assert fit.temperature > 0
    assert sum(calls) == 21


# --- kinds of data ---------------------------------------------------------------------------------


class Samples(Dataset[Any]):
    """A data set of (x, y) pairs, y as a number."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i].numpy(), int(self.y[i])


def test_data_of_every_kind(float64: torch.dtype) -> None:
    """Lists of numbers become the default type."""
    p = problem()
    expected = flat(p.fit().delta)
    kinds = [
        [p.x, p.y],
        (p.x.numpy(), p.y.numpy()),
        (p.x.tolist(), p.y.tolist()),
        TensorDataset(p.x, p.y),
        Samples(p.x, p.y),
        DataLoader(TensorDataset(p.x, p.y), batch_size=3),
        DataLoader(Samples(p.x, p.y), batch_size=2),
    ]
    for data in kinds:
        near(flat(linnet.fit(p.lin, data).delta), expected, 1e-12)


@pytest.mark.parametrize("preconditioner", grid(("auto", "none", "ekfac"), ("auto",)))
@pytest.mark.long
def test_stochastic_gradients_end_at_the_same_weights(preconditioner: str) -> None:
    """More examples than a first batch: batches grow until the residual certifies the optimum."""
    p = problem(n=60)
    exact = p.fit(ridge=0.5, solver="dual")
    fit = p.fit(ridge=0.5, solver="sgd", preconditioner=preconditioner, tolerance=1e-9, max_steps=5000)
    assert fit.solver == "sgd"
    assert fit.summary()["certificate"] <= 1e-9
    near(fit.predict(p.x_test), exact.predict(p.x_test), 1e-6)
    near(fit.loo(), exact.loo(), 1e-6)
    near(fit.forget([0]).predict(p.x_test), exact.forget([0]).predict(p.x_test), 1e-6)
    assert ("kfac" if preconditioner == "auto" else preconditioner) in fit.summary()["reasons"][
        "preconditioner"
    ]


def test_a_ridge_may_be_any_kind_of_number() -> None:
    p = problem()
    assert p.fit(ridge=torch.tensor(2.0)).ridge == 2.0
    assert p.fit(ridge=2).ridge == 2.0


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_explicit_targets_of_other_types(loss: str) -> None:
    """Whether numbers come as booleans or integers does not matter."""
    p = problem()
    hot = torch.nn.functional.one_hot(p.y, p.t.shape[1])
    expected = p.fit(loss=loss, targets=hot.double()).predict(p.x)
    for targets in (hot.bool(), hot, hot.to(torch.uint64)):
        torch.testing.assert_close(p.fit(loss=loss, targets=targets).predict(p.x), expected)


def test_a_displacement_is_a_copy() -> None:
    p = problem()
    fit = linnet.fit(p.lin, (p.x, p.y))
    before = fit.predict(p.x)
    for t in fit.displacement().values():
        t.zero_()
    assert torch.equal(fit.predict(p.x), before)
