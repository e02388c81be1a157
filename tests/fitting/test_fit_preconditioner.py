"""Preconditioned conjugate gradients: the same fit in fewer steps, in every audit, and after a round trip."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import MemoryBudgetError, NumericalError
from linnet.fitting import CG
from linnet.linalg import Dense, Diagonal
from linnet.linear import iterative, preconditioner
from linnet.linear.iterative import fisher
from linnet.linear.preconditioner import (
    FEW,
    RANK,
    TRIAL,
    precondition,
    preconditioner_bytes,
)
from linnet.linear.problem import Problem
from linnet.tangent.functional import Functional
from tests.fitting.problems import fit_options, flat, near, network, problem, real
from tests.refusals import refused

CURVATURES = ("ekfac", "kfac", "diagonal")
NAMED = ("nystrom", *CURVATURES)
P = problem(n=7)
RIDGE = 0.3


def fitted(name: Any, **options: Any) -> Any:
    return P.fit(solver="cg", ridge=RIDGE, preconditioner=name, **options)


@cache
def large() -> tuple[nn.Module, Tensor, Tensor]:
    """A problem with more equations and parameters than conjugate gradients solve at a glance."""
    model = network(inputs=6, hidden=24, outputs=3)
    x = real(60, 6, seed=4) * torch.logspace(1, -1, 6, dtype=torch.float64)
    return model, x, real(60, 3, seed=5)


def large_fit(ridge: float, tolerance: float = 1e-8, **options: Any) -> Any:
    model, x, y = large()
    lin = linnet.linearize(model)
    return linnet.fit(lin, (x, y), ridge=ridge, **fit_options(solver="cg", tolerance=tolerance, **options))


# --- the same answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMED, "auto", "none", None])
@pytest.mark.thinned(2)
def test_the_solution_is_that_of_the_dual(name: Any) -> None:
    dual = P.fit(solver="dual", ridge=RIDGE)
    fit = fitted(name)
    near(flat(fit.delta), flat(dual.delta), 1e-9)
    near(fit.predict(P.x_test), dual.predict(P.x_test), 1e-9)
    assert fit.summary()["certificate"] <= 1e-12


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.thinned(2)
def test_audits_are_those_of_the_dual(name: str) -> None:
    dual, fit = P.fit(solver="dual", ridge=RIDGE), fitted(name, tolerance=1e-11)
    near(fit.loo(), dual.loo(), 1e-8)
    near(fit.influence(P.x_test), dual.influence(P.x_test), 1e-8)
    near(fit.predictive(P.x_test).covariance, dual.predictive(P.x_test).covariance, 1e-8)
    assert fit.noise == pytest.approx(dual.noise, rel=1e-8)
    near(flat(fit.forget([1, 4]).delta), flat(dual.forget([1, 4]).delta), 1e-8)
    data = real(2, 3, seed=9), torch.tensor([0, 2])
    near(flat(fit.update(data).delta), flat(dual.update(data).delta), 1e-8)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.thinned(2)
def test_convolutions_in_single_precision(name: str) -> None:
    """Outputs with positions, inputs with channels, float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 2))
    x, y = torch.randn(6, 2, 5, 5), torch.randn(6, 8)
    fits = [
        linnet.fit(linnet.linearize(model), (x, y), ridge=0.1, **fit_options(**options))
        for options in ({"solver": "dual"}, {"solver": "cg", "preconditioner": name, "tolerance": 1e-6})
    ]
    near(fits[1].predict(x).double(), fits[0].predict(x).double(), 1e-3)


# --- fewer steps ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_nystrom_needs_fewer_steps() -> None:
    plain, nystrom = (large_fit(0.01, preconditioner=name) for name in (None, "nystrom"))
    assert nystrom.system.steps < plain.system.steps / 2
    near(flat(nystrom.delta), flat(plain.delta), 1e-5)


def test_curvatures_need_fewer_steps_where_they_fit() -> None:
    """One linear layer: JᵀJ is the Kronecker product, and (G̃ + τI)⁻¹ is its inverse with τ for ρ."""
    model = nn.Linear(12, 3).double()
    x = real(100, 12) * torch.logspace(2, -1, 12, dtype=torch.float64)
    y = real(100, 3, seed=1)
    steps = {
        name: linnet.fit(
            linnet.linearize(model), (x, y), ridge=1e-2, solver=CG(1e-8, preconditioner=name)
        ).system.steps
        for name in ("none", "ekfac", "kfac", "diagonal")
    }
    assert max(steps["ekfac"], steps["kfac"], steps["diagonal"]) < steps["none"], steps


@pytest.mark.long
def test_automatic_choice_waits_and_sees() -> None:
    easy, hard = large_fit(1e5), large_fit(0.01)
    assert easy.system.steps <= TRIAL
    assert easy.system.settings.preconditioner == "none"
    assert easy.summary()["reasons"]["preconditioner"] == f"none: {easy.system.steps} steps without one"
    assert hard.system.settings.preconditioner == "nystrom"
    assert f"not at the end after {TRIAL} steps" in hard.summary()["reasons"]["preconditioner"]
    plain = large_fit(0.01, preconditioner=None)
    assert hard.system.steps + RANK < plain.system.steps
    near(flat(hard.delta), flat(plain.delta), 1e-5)


def test_few_unknowns_need_none() -> None:
    fit = P.fit(solver="cg", ridge=1e-4)  # 21 equations
    assert P.kernel.shape[0] <= FEW
    assert fit.system.settings.preconditioner == "none"
    assert fit.system.preconditioner is None


# --- what is made --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CURVATURES)
def test_the_operator_is_the_damped_curvature(name: str) -> None:
    model, x, y = P.model, P.x, P.t
    function = Functional(model)
    problem = Problem(function, x, P.t - P.f0)
    made = precondition(name, fisher(problem), problem, RIDGE)
    assert made is not None
    likelihood = linnet.likelihoods.Gaussian(variance=1.0)
    curvature = linnet.curvature(model, (x, y), likelihood, name).dense()
    p = curvature.shape[0]
    tau = RIDGE + curvature.trace() / p
    near(made.dense(), torch.linalg.inv(curvature + tau * torch.eye(p, dtype=torch.float64)), 1e-9)
    assert made.T is made


def count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the preconditioners that are made."""
    made: list[str] = []

    def counted(name: str, *rest: Any) -> Any:
        made.append(name)
        return precondition(name, *rest)

    monkeypatch.setattr(iterative, "precondition", counted)
    return made


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.thinned(2)
def test_it_is_made_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits, forgetting and updates go on with the one there is."""
    made = count(monkeypatch)
    fit = fitted(name)
    fit.predictive(P.x_test[:1])
    smaller = fit.forget([2])
    larger = smaller.update((real(1, 3), torch.tensor([1])))
    assert made == [name]
    assert larger.system.preconditioner is fit.system.preconditioner


@pytest.mark.parametrize("name", [*NAMED, "auto"])
@pytest.mark.thinned(4)
def test_saved_and_loaded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fitted(name)
    fit.save(tmp_path)
    made = count(monkeypatch)
    loaded = linnet.load_fit(tmp_path, P.model)
    assert loaded.system.settings == fit.system.settings
    assert loaded.summary()["reasons"] == fit.summary()["reasons"]
    assert loaded.system.steps == 0
    assert made == []  # nothing before it is needed
    near(loaded.loo(), fit.loo(), 1e-9)  # by the kernel
    assert made == []
    near(loaded.system.covariance(P.x), fit.system.covariance(P.x), 1e-6)
    assert made == ([] if name == "auto" else [name])
    near(flat(loaded.forget([0]).delta), flat(fit.forget([0]).delta), 1e-9)


def test_an_operator_is_not_saved(tmp_path: Path) -> None:
    fit = fitted(Diagonal(torch.full((P.j.shape[2],), 0.5, dtype=torch.float64)))
    fit.save(tmp_path)
    loaded = linnet.load_fit(tmp_path, P.model)
    assert loaded.system.preconditioner is None
    near(loaded.loo(), fit.loo(), 1e-9)


# --- where it hurts ------------------------------------------------------------------------------------


def test_a_harmful_preconditioner_is_given_up() -> None:
    """One that is not positive definite breaks the iteration down; it goes on without it."""
    p = P.j.shape[2]
    dual = P.fit(solver="dual", ridge=RIDGE)
    bad = Diagonal(torch.logspace(0, 14, p, dtype=torch.float64))
    for harmful in (-1.0 * Dense(torch.eye(p, dtype=torch.float64)), bad):
        fit = fitted(harmful, max_steps=60)
        near(flat(fit.delta), flat(dual.delta), 1e-9)
        near(fit.predictive(P.x_test[:1]).variance, dual.predictive(P.x_test[:1]).variance, 1e-8)
    assert fit.system.steps > 60
    with pytest.raises(NumericalError, match="2 steps"):
        fitted(None, max_steps=2)


# --- memory and input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_memory_is_planned(name: str) -> None:
    model, x, y = large()
    lin = linnet.linearize(model)
    own = 8 * lin.space.dim * 8
    needed = preconditioner_bytes(lin.function, x, name, 0)
    assert needed > 0

    def fit(memory: int) -> Any:
        return linnet.fit(lin, (x, y), ridge=10.0, solver=CG(1e-3, preconditioner=name), memory=memory)

    fit(own + needed)
    error = refused(MemoryBudgetError, lambda: fit(own + needed - 1), "conjugate gradients")
    assert f"preconditioner '{name}'" in str(error)


def test_the_plan_holds_what_is_made() -> None:
    """Factors, their eigenvectors and the eigenvalues, by the tensors themselves."""
    function = Functional(large()[0])
    x = large()[1]
    problem = Problem(function, x, torch.zeros(len(x), 3, dtype=torch.float64))
    nystrom = precondition("nystrom", fisher(problem), problem, RIDGE)
    assert preconditioner_bytes(function, x, "nystrom", 0) >= nystrom.basis.nbytes  # type: ignore[union-attr]
    ekfac = precondition("ekfac", fisher(problem), problem, RIDGE)
    held = 0
    for part in ekfac.inverse.parts:  # type: ignore[union-attr]
        m = part.operator
        held += m.left_vectors.nbytes + m.right_vectors.nbytes + m.values.nbytes
    assert held <= preconditioner_bytes(function, x, "ekfac", 0) <= 3 * held
    assert preconditioner_bytes(function, x, "none", 0) == 0


def test_without_memory_for_it_the_choice_is_none() -> None:
    own = 8 * sum(p.numel() for p in large()[0].parameters()) * 8
    fit = large_fit(0.01, tolerance=1e-3, memory=own + 100)
    assert fit.system.settings.preconditioner == "none"


def test_names_are_the_documented_ones() -> None:
    assert set(preconditioner.NAMES) == {"auto", "none", *NAMED}
    assert all(f'"{name}"' in (CG.__doc__ or "") for name in preconditioner.NAMES)
