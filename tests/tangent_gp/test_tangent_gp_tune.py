"""Hyper-parameters of the tangent Gaussian process by marginal likelihood."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError
from linnet.likelihoods import Gaussian, HeteroscedasticGaussian
from linnet.linear import iterative
from linnet.tangent_gp.tangent_gp import TangentGP
from tests.fitting.problems import network, real
from tests.tangent_gp.tangent_gp_cases import DENSE, WAYS, Dense, dense


def density(oracle: Dense, precision: float, scale: float) -> float:
    return Dense(
        oracle.model, oracle.x, oracle.y, oracle.x_test, scale * oracle.noise, precision
    ).log_evidence()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.thinned(2)
def test_evidence_is_the_dense_density_at_every_hyper_parameter(way: dict[str, Any]) -> None:
    oracle = dense(n=12)
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), **way).fit(oracle.x, oracle.y)
    for precision, scale in ((0.7, 1.0), (30.0, 0.1), (0.01, 5.0)):
        found = gp.log_evidence(precision, scale).mean
        assert found == pytest.approx(density(oracle, precision, scale), rel=1e-6)


@pytest.mark.parametrize("way", DENSE.values(), ids=DENSE)
@pytest.mark.parametrize(("prior", "noise"), [(True, True), (True, False), (False, True)])
@pytest.mark.thinned(2)
def test_tuning_finds_the_top_of_the_dense_density(way: dict[str, Any], prior: bool, noise: bool) -> None:
    oracle = dense(n=25, outputs=1)
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), prior_precision=0.7, noise_scale=2.0, **way)
    gp.fit(oracle.x, oracle.y).tune(prior=prior, noise=noise)
    precision, scale = gp.prior_precision, gp.noise_scale
    assert (precision != 0.7, scale != 2.0) == (prior, noise)
    top = density(oracle, precision, scale)
    assert gp.log_evidence().mean == pytest.approx(top, rel=1e-7)
    for factor in (0.5, 0.9, 1.1, 2.0):
        if prior:
            assert density(oracle, factor * precision, scale) < top
        if noise:
            assert density(oracle, precision, factor * scale) < top
    fresh = TangentGP(oracle.model, Gaussian(variance=0.2 * scale), prior_precision=precision, **way)
    expected = fresh.fit(oracle.x, oracle.y).predictive(oracle.x_test).with_noise()
    found = gp.predictive(oracle.x_test).with_noise()
    assert torch.allclose(found.mean, expected.mean, rtol=1e-8)
    assert torch.allclose(found.covariance, expected.covariance, rtol=1e-8)
    assert float(gp.likelihood.noise) == pytest.approx(0.2 * scale)  # type: ignore[attr-defined]


def test_tuning_scales_the_networks_own_noise() -> None:
    model, x, y = network(3, 5, 2), real(20, 3, seed=1), real(20, 1, seed=2)
    gp = TangentGP(model, HeteroscedasticGaussian()).fit(x, y)
    before = gp.log_evidence().mean
    gp.tune()
    assert gp.log_evidence().mean > before
    own = HeteroscedasticGaussian().variance(model(x)).detach()
    assert torch.allclose(gp.predictive(x).noise, gp.noise_scale * own)


@pytest.mark.parametrize("space", ["function", "parameter"])
def test_quadrature_is_right_within_its_error(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterative, "SMALL", 0)
    oracle = dense(n=60, outputs=2)
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), space, solver="cg").fit(oracle.x, oracle.y)
    for precision, scale in ((1.0, 1.0), (20.0, 0.3)):
        found = gp.log_evidence(precision, scale)
        assert found.stderr > 0
        assert abs(found.mean - density(oracle, precision, scale)) < 4 * found.stderr
    exact = TangentGP(oracle.model, Gaussian(variance=0.2)).fit(oracle.x, oracle.y).tune()
    gp.tune()
    best = density(oracle, exact.prior_precision, exact.noise_scale)
    assert best - density(oracle, gp.prior_precision, gp.noise_scale) < 0.5
    again = TangentGP(oracle.model, Gaussian(variance=0.2), space, solver="cg", seed=1)
    assert again.fit(oracle.x, oracle.y).log_evidence().mean != found.mean


def few_points() -> tuple[TangentGP, Tensor, Tensor, float]:
    """Five targets drawn from the process itself, without noise; the floor of their variance."""
    model, x = network(1, 40, 1), torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    lin = linnet.linearize(model)
    residual = lin.jvp(x, real(lin.space.dim, seed=9)).detach()
    floor = 1e-4 * float(residual.square().mean())
    return TangentGP(model, Gaussian(variance=1.0), "function"), x, model(x).detach() + residual, floor


def variance_of(gp: TangentGP) -> Tensor:
    found: Tensor = gp.likelihood.noise  # type: ignore[attr-defined]
    return found


def test_few_points_do_not_take_the_noise_to_zero() -> None:
    gp, x, y, floor = few_points()
    with pytest.warns(UserWarning, match="least_noise"):
        gp.fit(x, y).tune()
    assert float(variance_of(gp)) == pytest.approx(floor, rel=0.01)
    best = gp.log_evidence().mean  # λ is the best at that noise
    for factor in (0.8, 1.25):
        assert gp.log_evidence(prior_precision=factor * gp.prior_precision).mean < best


def test_the_floor_of_the_noise_can_be_moved_or_taken_away() -> None:
    gp, x, y, floor = few_points()
    gp.fit(x, y)
    with pytest.warns(UserWarning, match="least_noise"):
        gp.tune(least_noise=1e-2)
    assert float(variance_of(gp)) == pytest.approx(100 * floor, rel=1e-6)
    gp.tune(least_noise=0)
    assert float(variance_of(gp)) < 0.5 * floor


def test_the_floor_holds_for_a_fixed_prior() -> None:
    gp, x, y, floor = few_points()
    gp.fit(x, y)
    with pytest.warns(UserWarning, match="least_noise"):
        gp.tune(prior=False)
    assert float(variance_of(gp)) == pytest.approx(floor, rel=0.01)
    assert gp.prior_precision == 1.0


def test_hyper_parameters_that_are_set_are_those_of_a_new_fit() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x, z = torch.randn(9, 2).double(), torch.randn(4, 2).double()
    noise = linnet.likelihoods.Gaussian(0.1)
    both = {"prior_precision": 2.0, "noise_scale": 0.5}
    for values in ({"prior_precision": 5.0}, {"noise_scale": 3.0}, both):
        found = linnet.TangentGP(net, noise).fit(x, x[:, :1].sin())
        for name, value in values.items():
            setattr(found, name, value)
        expected = linnet.TangentGP(net, noise, **values).fit(x, x[:, :1].sin())
        own, other = (gp.predictive(z).with_noise() for gp in (found, expected))
        torch.testing.assert_close(own.mean, other.mean)
        torch.testing.assert_close(own.variance, other.variance)
        with pytest.raises(InputError, match=next(iter(values))):
            setattr(found, next(iter(values)), -1.0)
