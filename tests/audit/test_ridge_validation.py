"""The ridge by validation data: paths, exact gradients and the minimum, dual and primal alike."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import audit
from tests.fitting.problems import ALPHA, Problem, near, problem, rho_for

LABELS = torch.tensor([0, 2, 1, 1, 0, 2])


@pytest.fixture(scope="module")
def p() -> Problem:
    return problem(n=9, tests=6)


def loss_at(p: Problem, rho: float, labels: Tensor = LABELS) -> tuple[float, Tensor, Tensor]:
    """Validation loss, δ and outputs of a dense fit."""
    rows = p.j.flatten(0, 1)
    delta = torch.linalg.solve(rows.T @ rows + rho * torch.eye(rows.shape[1]).double(), rows.T @ p.residual)
    f = p.f0_test + p.j_test @ delta
    targets = ALPHA * torch.nn.functional.one_hot(labels, 3).double()
    return float((targets - f).square().sum(1).mean()), delta, f


@pytest.mark.parametrize("solver", ["dual", "cg"])
def test_the_path_is_that_of_fitting_at_every_ridge(p: Problem, solver: str) -> None:
    rho = rho_for(p)
    path = audit.ridge_path(p.fit(ridge=rho, solver=solver), (p.x_test, LABELS), [rho / 10, rho, 30 * rho])
    assert path.accuracy is not None
    for k, ridge in enumerate((rho / 10, rho, 30 * rho)):
        loss, delta, f = loss_at(p, ridge)
        assert float(path.loss[k]) == pytest.approx(loss, rel=1e-8)
        assert float(path.distance[k]) == pytest.approx(float(delta.norm()), rel=1e-8)
        near(path.outputs[k], f, 1e-8)
        assert float(path.accuracy[k]) == pytest.approx(float((f.argmax(1) == LABELS).double().mean()))
    assert path.best() == float(path.ridges[path.loss.argmin()])


@pytest.mark.parametrize("solver", ["dual", "cg"])
@pytest.mark.parametrize("share", [1e-3, 0.1, 10.0])
@pytest.mark.thinned(3)
def test_the_gradient_is_the_finite_difference(p: Problem, solver: str, share: float) -> None:
    rho, step = rho_for(p, share), 1e-4
    up, down = (loss_at(p, rho * math.exp(s))[0] for s in (step, -step))
    found = audit.ridge_gradient(p.fit(ridge=rho, solver=solver), p.x_test, LABELS)
    assert found == pytest.approx((up - down) / (2 * step), rel=1e-6)


def test_the_path_has_the_gradients_of_a_dual_fit(p: Problem) -> None:
    rho = rho_for(p)
    path = audit.ridge_path(p.fit(ridge=7 * rho), (p.x_test, LABELS), [rho])
    assert path.gradient is not None
    expected = audit.ridge_gradient(p.fit(ridge=rho), p.x_test, LABELS)
    assert float(path.gradient) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("solver", ["dual", "cg"])
def test_the_chosen_ridge_is_the_minimum(solver: str) -> None:
    # noisy linear data: too small a ridge fits the noise, too large a one nothing
    p = problem(n=14, outputs=1, classes=False, tests=40, hidden=6)
    generator = torch.Generator().manual_seed(5)
    truth = torch.randn(p.j.shape[2], generator=generator, dtype=torch.float64)
    y = p.f0 + p.j @ truth + 3 * torch.randn(p.f0.shape, generator=generator, dtype=torch.float64)
    noisy = Problem(p.model, p.x, y, p.x_test, y, p.f0, p.f0_test, p.j, p.j_test)
    validation = p.x_test, p.f0_test + p.j_test @ truth
    tuned = audit.tune_ridge(noisy.fit(ridge=rho_for(p), solver=solver), validation)

    def loss(rho: float) -> float:
        rows = p.j.flatten(0, 1)
        delta = torch.linalg.solve(
            rows.T @ rows + rho * torch.eye(rows.shape[1]).double(), rows.T @ noisy.residual
        )
        return float((p.f0_test + p.j_test @ delta - validation[1]).square().sum(1).mean())

    grid = [tuned.ridge * math.exp(s) for s in torch.linspace(-0.05, 0.05, 5).tolist()]
    assert min(grid, key=loss) == grid[2]
    assert tuned.summary()["criterion"] == "validation"
    assert "validation loss" in tuned.summary()["reasons"]["ridge"]
    near(tuned.predict(p.x_test), noisy.fit(ridge=tuned.ridge).predict(p.x_test), 1e-6)


def test_a_minimum_outside_the_grid_is_said() -> None:
    p = problem(n=9, tests=6)
    fit = p.fit(ridge=rho_for(p))
    tuned = audit.tune_ridge(fit, (p.x_test, p.f0_test.argmax(1)))
    assert ("edge" in tuned.summary()["reasons"]["ridge"]) == (
        tuned.ridge in (float(fit.system.grid()[0]), float(fit.system.grid()[-1]))
    )


def test_constrained_dual_fits_keep_their_equations_along_the_path(p: Problem) -> None:
    fit = p.fit(ridge=rho_for(p)).constrain(p.x_test[:1], p.f0_test[:1] + 1)
    path = audit.ridge_path(fit, (p.x_test, LABELS), [rho_for(p), 5 * rho_for(p)])
    near(path.outputs[0], fit.predict(p.x_test), 1e-8)
    near(path.outputs[1, 0], p.f0_test[0] + 1, 1e-7)


def test_the_ridge_is_never_worse_than_the_best_of_the_grid() -> None:
    # a curve with two minima between two values of the grid
    draw = torch.Generator().manual_seed(2118)
    s = 10 ** torch.randn(3, generator=draw, dtype=torch.float64)
    a = torch.randn(1, 3, generator=draw, dtype=torch.float64) * 3
    y = torch.randn(1, 1, generator=draw, dtype=torch.float64) * a.abs().sum(1, keepdim=True) * 0.5
    net = nn.Linear(3, 1, bias=False).double()
    net.weight.data.zero_()
    fit = linnet.fit(linnet.linearize(net), (torch.diag(s.sqrt()), s.sqrt()[:, None]), ridge=1.0)
    tuned = linnet.audit.tune_ridge(fit, (a, y))
    path = linnet.audit.ridge_path(fit, (a, y), [tuned.ridge, *torch.logspace(1, 4, 13).tolist()])
    assert path.loss[0] <= path.loss.min() + 1e-9


def test_a_ridge_at_the_end_of_the_grid_is_told() -> None:
    draw = torch.Generator().manual_seed(7)
    net = nn.Linear(3, 2).double()
    x, y, xv, yv = (
        torch.randn(n, k, generator=draw, dtype=torch.float64) for n, k in ((25, 3), (25, 2), (9, 3), (9, 2))
    )
    net.weight.data.zero_(), net.bias.data.zero_()
    fit = linnet.fit(linnet.linearize(net), (x, y), ridge=0.7)
    tuned = linnet.audit.tune_ridge(fit, (xv, 0 * yv))  # the best prediction is nothing at all
    assert any("lowest at the largest ridge" in text for text in tuned.record.warnings)
