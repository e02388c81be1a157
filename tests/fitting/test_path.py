"""The path of ridges: every criterion by its own definition, and the ridge that each chooses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import linnet
from linnet.errors import InputError
from linnet.linear.dual import Spectrum
from linnet.linear.iterative import Iterative
from tests.fitting.problems import Problem, near, network, problem, real
from tests.oracles.dense import leave_one_out_oracle
from tests.refusals import refused

RIDGES = [1e-3, 0.05, 1.0, 40.0]
CRITERIA = ["loo", "gcv", "evidence"]


def hat(p: Problem, rho: float) -> Tensor:
    """H = K (K + ρI)⁻¹ by a dense inverse."""
    return p.kernel @ torch.linalg.inv(p.kernel + rho * torch.eye(p.kernel.shape[0], dtype=torch.float64))


def density(p: Problem, rho: float, noise: float) -> float:
    """Log density of the residual under the prior N(0, σ²/ρ) on δ and the noise σ²."""
    eye = torch.eye(p.kernel.shape[0], dtype=torch.float64)
    normal = torch.distributions.MultivariateNormal(
        torch.zeros_like(p.residual), noise / rho * p.kernel + noise * eye
    )
    return normal.log_prob(p.residual).item()


@pytest.mark.parametrize(("classes", "outputs"), [(True, 3), (False, 3), (False, 1)])
def test_every_criterion_by_its_definition(classes: bool, outputs: int) -> None:
    p = problem(outputs=outputs, classes=classes)
    path = p.fit().path(RIDGES)
    assert path.ridges.tolist() == RIDGES
    for i, rho in enumerate(RIDGES):
        loo = leave_one_out_oracle(p.j, p.t, p.f0, rho)
        assert path.loo_error[i].item() == pytest.approx((p.t - loo).square().sum(1).mean().item(), rel=1e-9)
        h = hat(p, rho)
        n = p.residual.numel()
        rest = p.residual - h @ p.residual
        gcv = rest.square().sum() / n / (1 - h.trace() / n) ** 2
        assert path.gcv[i].item() == pytest.approx(gcv.item(), rel=1e-9)
        assert path.degrees_of_freedom[i].item() == pytest.approx(h.trace().item(), rel=1e-9)
        noise = path.noise[i].item()
        assert path.evidence[i].item() == pytest.approx(density(p, rho, noise), rel=1e-9)
        assert path.evidence[i].item() > max(density(p, rho, 0.98 * noise), density(p, rho, 1.02 * noise))
        if classes:
            assert path.loo_accuracy is not None
            right = (loo.argmax(1) == p.y).double().mean()
            assert path.loo_accuracy[i].item() == right.item()
        else:
            assert path.loo_accuracy is None


@pytest.mark.parametrize("solver", ["dual", "primal", "shared"])
def test_the_noise_of_new_targets_averages_over_the_ridges(solver: str) -> None:
    p = problem(outputs=1 if solver == "shared" else 2, classes=False)
    n = p.residual.numel()
    path = p.fit(ridge=1.0, solver=solver).path(RIDGES)
    weights = torch.tensor(
        [density(p, rho, float(noise)) for rho, noise in zip(RIDGES, path.noise, strict=True)]
    ).softmax(0)
    assert 0.05 < float(weights.max()) < 0.99
    fits = [p.fit(ridge=rho) for rho in RIDGES]
    spreads = [fit.system.loo_variances().diagonal(dim1=1, dim2=2) + 1 for fit in fits]
    for i, own in enumerate(fits):
        squares = sum(
            w * (float(noise) * n / (n - 2) * spread + (fit.loo() - own.loo()).square()).sum(1)
            for w, noise, spread, fit in zip(weights, path.noise, spreads, fits, strict=True)
        )
        asked = (squares / spreads[i].sum(1)).log().mean().exp()
        assert path.target_noise is not None
        assert path.target_noise[i].item() == pytest.approx(float(asked), rel=1e-6)


@pytest.mark.parametrize("solver", ["dual", "primal", "shared"])
def test_a_ridge_that_was_chosen_raises_the_noise_of_values(solver: str) -> None:
    p = problem(classes=False)
    fit = p.fit(ridge="loo", solver=solver)
    path = fit.path()
    at = int((path.ridges - fit.ridge).abs().argmin())
    assert path.target_noise is not None
    assert fit.noise == pytest.approx(float(path.target_noise[at]), rel=1e-6)
    given = p.fit(ridge=fit.ridge, solver=solver)
    assert given.noise == pytest.approx(float(path.noise[at]), rel=1e-6)
    factor = fit.noise / given.noise
    assert fit.forget([0]).noise == pytest.approx(factor * given.forget([0]).noise, rel=1e-6)
    again = fit.update((p.x[:2], p.t[:2]), ridge=fit.ridge)
    assert again.noise == pytest.approx(given.update((p.x[:2], p.t[:2])).noise, rel=1e-6)
    assert problem().fit(ridge="loo", solver=solver).record.noise_factor == 1.0


def test_path_agrees_with_the_fits_on_it() -> None:
    p = problem()
    path = p.fit(ridge=5.0).path(RIDGES)
    for i, rho in enumerate(RIDGES):
        fit = p.fit(ridge=rho)
        assert path.noise[i].item() == pytest.approx(fit.noise, rel=1e-9)
        assert path.loo_error[i].item() == pytest.approx(
            (fit.targets - fit.loo()).square().sum(1).mean().item(), rel=1e-9
        )
        assert path.evidence[i].item() == pytest.approx(fit.system.dual.log_evidence(), rel=1e-9)


def test_more_equations_than_parameters() -> None:
    """K is singular: the criteria must not be thrown off by eigenvalues that are zero up to rounding."""
    p = problem(n=30, outputs=2, hidden=2)
    assert p.kernel.shape[0] > p.j.shape[2]
    path = p.fit().path([0.01])
    loo = leave_one_out_oracle(p.j, p.t, p.f0, 0.01)
    assert path.loo_error.item() == pytest.approx((p.t - loo).square().sum(1).mean().item(), rel=1e-7)
    assert path.degrees_of_freedom.item() < p.j.shape[2]


def test_default_grid_follows_the_kernel() -> None:
    p = problem()
    path = p.fit().path()
    scale = p.kernel.diagonal().mean().item()
    assert path.ridges[0].item() == pytest.approx(1e-7 * scale)
    assert path.ridges[-1].item() == pytest.approx(1e2 * scale)
    steps = path.ridges.log10().diff()
    near(steps, torch.full_like(steps, 0.25), 1e-9)
    assert (path.degrees_of_freedom.diff() < 0).all()


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("classes", [True, False])
@pytest.mark.thinned(3)
def test_a_criterion_chooses_the_best_of_the_grid(criterion: str, classes: bool) -> None:
    p = problem(n=9, classes=classes)
    fit = p.fit(ridge=criterion)
    path = fit.path()
    score = {"loo": path.loo_error, "gcv": path.gcv, "evidence": -path.evidence}[criterion]
    assert fit.ridge == path.ridges[score.argmin()].item() == path.best(criterion)
    assert fit.record.criterion == criterion
    words = {"loo": "leave-one-out", "gcv": "generalized cross-validation", "evidence": "evidence"}[criterion]
    assert words in fit.summary()["reasons"]["ridge"]
    assert f"{len(path.ridges)} values" in fit.summary()["reasons"]["ridge"]
    degrees = path.degrees_of_freedom[score.argmin()].item()
    assert f"{degrees:.0f} effective parameters" in fit.summary()["reasons"]["ridge"]
    near(fit.predict(p.x_test), p.fit(ridge=fit.ridge).predict(p.x_test))


def test_criteria_differ() -> None:
    """Each is a criterion of its own: on some problem they choose different ridges."""
    chosen = {
        c: [problem(n=8, outputs=2, classes=False, seed=s).fit(ridge=c).ridge for s in range(4)]
        for c in CRITERIA
    }
    assert chosen["loo"] != chosen["evidence"]
    assert chosen["gcv"] != chosen["evidence"]
    assert chosen["loo"] != chosen["gcv"]


def linear_problem(noise: float, n: int = 60) -> tuple[Any, Tensor, Tensor]:
    """A linear model whose weights have variance 4 about their start, observed with noise."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 1, bias=False)).double()
    x = real(n, 5, seed=1)
    start = model[0].weight.detach()[0]  # type: ignore[union-attr, index]
    weights = start + 2.0 * real(5, seed=2)
    return model, x, (x @ weights)[:, None] + noise * real(n, 1, seed=3)


def test_evidence_finds_the_noise_and_the_prior() -> None:
    model, x, t = linear_problem(noise=0.5, n=200)
    fit = linnet.fit(linnet.linearize(model), (x, t), ridge="evidence")
    assert fit.noise == pytest.approx(0.25, rel=0.25)
    assert math.log10(fit.noise / fit.ridge / 4.0) == pytest.approx(0.0, abs=0.7)  # prior variance σ²/ρ


def test_a_ridge_at_the_edge_of_the_grid_is_told() -> None:
    model, x, t = linear_problem(noise=0.0)
    fit = linnet.fit(linnet.linearize(model), (x, t), ridge="loo")
    assert "edge of the grid" in fit.summary()["reasons"]["ridge"]
    assert "edge" not in problem(n=12).fit(ridge=1.0).summary()["reasons"]["ridge"]


@pytest.mark.parametrize("criterion", CRITERIA)
def test_criteria_work_in_float32(criterion: str) -> None:
    """Rounding makes eigenvalues of a float32 kernel negative; no criterion may fall for it."""
    lin = linnet.linearize(network().float())
    x = real(40, 3, seed=1).float()
    step = lin.jvp(x, real(38, seed=2).float())
    t = lin.base(x) + step + 0.1 * real(40, 3, seed=3).float()
    fit = linnet.fit(lin, (x, t), ridge=criterion)
    assert torch.isfinite(fit.path().loo_error).all()
    assert (fit.predict(x) - lin.base(x) - step).square().mean() < 0.01
    assert torch.isfinite(fit.predictive(x).covariance).all()
    assert (fit.predictive(x).variance >= 0).all()


def test_the_path_of_a_fit_without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem()
    fit = p.fit(solver="cg", ridge=1.0, tolerance=1e-10)
    found, expected = fit.path(RIDGES), p.fit(solver="dual").path(RIDGES)
    assert torch.allclose(found.loo_error, expected.loo_error)
    monkeypatch.setattr(Iterative, "kernel_form", None)
    refused(InputError, fit.path, "path", "iterations", "dual")


def test_ridges_in_any_form() -> None:
    fit = problem().fit()
    expected = fit.path([0.5]).evidence
    for ridges in (0.5, torch.tensor(0.5), torch.tensor([0.5]), (0.5,)):
        assert torch.equal(fit.path(ridges).evidence, expected)


def test_spectrum_of_a_zero_kernel() -> None:
    """Nothing can be learned from features that are zero, and nothing breaks."""
    spectrum = Spectrum(torch.zeros(4, 4, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64))
    path = spectrum.path(spectrum.grid(), False, torch.ones(4, 1, dtype=torch.float64))
    near(path.loo_error, torch.ones_like(path.loo_error))
    assert not path.degrees_of_freedom.any()
