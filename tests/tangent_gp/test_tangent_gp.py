"""The tangent Gaussian process against brute-force Bayesian linear regression, in every space."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.likelihoods import Gaussian, HeteroscedasticGaussian
from linnet.tangent_gp.tangent_gp import TangentGP
from tests.fitting.problems import network, real
from tests.tangent_gp.tangent_gp_cases import DENSE, WAYS, Dense, dense


def close(a: Tensor, b: Tensor, tolerance: float = 1e-8) -> None:
    assert float((a - b).abs().max()) <= tolerance * float(b.abs().max()), (a - b).abs().max()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("noise", [0.2, [0.1, 0.4]], ids=["one", "per-output"])
@pytest.mark.thinned(6)
def test_is_bayesian_linear_regression(way: dict[str, Any], noise: Any) -> None:
    oracle = dense(noise=noise)
    likelihood = Gaussian(variance=torch.tensor(noise, dtype=torch.float64))
    gp = TangentGP(oracle.model, likelihood, prior_precision=0.7, **way).fit(oracle.x, oracle.y)
    mean, covariance = oracle.moments()
    prediction, joint = gp.predictive(oracle.x_test), gp.predictive(oracle.x_test, joint=True)
    close(prediction.mean, mean)
    close(joint.joint_covariance, covariance)
    own = covariance.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    close(prediction.covariance, own)
    close(joint.covariance, own)
    close(prediction.with_noise().covariance, own + oracle.noise[:1].diag_embed())
    close(joint.with_noise().covariance, own + oracle.noise[:1].diag_embed())
    assert gp.log_evidence().mean == pytest.approx(oracle.log_evidence(), rel=1e-7)
    assert gp.log_evidence().stderr == 0
    assert gp.summary()["certificate"] < 1e-11
    assert json.loads(json.dumps(gp.summary()))["plan"]["space"] == gp.plan.space


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.thinned(6)
def test_without_the_networks_output_it_is_regression_on_the_targets_alone(
    way: dict[str, Any], tmp_path: Path
) -> None:
    oracle = dense()
    with torch.no_grad():
        f0, f0_test = oracle.model(oracle.x), oracle.model(oracle.x_test)
    options = {"prior_precision": 0.7, **way}
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), mean="zero", **options).fit(oracle.x, oracle.y)
    other = TangentGP(oracle.model, Gaussian(variance=0.2), **options).fit(oracle.x, oracle.y + f0)
    close(gp.predict(oracle.x_test), other.predict(oracle.x_test) - f0_test)
    close(gp.predictive(oracle.x_test).covariance, other.predictive(oracle.x_test).covariance)
    assert gp.log_evidence().mean == pytest.approx(other.log_evidence().mean, rel=1e-9)
    point = oracle.x_test.clone().requires_grad_()
    close(gp.predictive(point).mean.detach(), gp.predict(oracle.x_test))
    gp.save(tmp_path)
    close(linnet.load(tmp_path, oracle.model).predict(oracle.x_test), gp.predict(oracle.x_test))
    close(gp.adapt(oracle.x, 2 * oracle.y).predict(oracle.x_test), 2 * gp.predict(oracle.x_test))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.thinned(4)
def test_covers_more_weights_than_equations_and_fewer(way: dict[str, Any]) -> None:
    for n, outputs in ((3, 1), (40, 2)):
        oracle = dense(n=n, outputs=outputs)
        mean, covariance = oracle.moments()
        gp = TangentGP(oracle.model, Gaussian(variance=0.2), prior_precision=0.7, **way)
        prediction = gp.fit(oracle.x, oracle.y).predictive(oracle.x_test, joint=True)
        close(prediction.mean, mean)
        close(prediction.joint_covariance, covariance)


@pytest.mark.parametrize("way", DENSE.values(), ids=DENSE)
def test_is_the_linear_fit_at_ridge_variance_times_precision(way: dict[str, Any]) -> None:
    oracle = dense()
    fit = linnet.fit(linnet.linearize(oracle.model), (oracle.x, oracle.y), ridge=0.2 * 0.7)
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), prior_precision=0.7, **way).fit(oracle.x, oracle.y)
    close(gp.predictive(oracle.x_test).mean, fit.predict(oracle.x_test))
    posterior = fit.predictive(oracle.x_test).covariance / fit.noise * 0.2
    close(gp.predictive(oracle.x_test).covariance, posterior)
    for name, value in fit.delta.items():
        close(gp.delta[name], value)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.thinned(2)
def test_missing_targets_take_no_part(way: dict[str, Any]) -> None:
    oracle = dense()
    y = oracle.y.clone()
    y[1, 0], y[4] = torch.nan, torch.nan
    oracle = Dense(oracle.model, oracle.x, y, oracle.x_test, oracle.noise, 0.7)
    gp = TangentGP(oracle.model, Gaussian(0.2, masked=True), prior_precision=0.7, **way).fit(oracle.x, y)
    mean, covariance = oracle.moments()
    prediction = gp.predictive(oracle.x_test, joint=True)
    close(prediction.mean, mean)
    close(prediction.joint_covariance, covariance)
    assert gp.log_evidence().mean == pytest.approx(oracle.log_evidence(), rel=1e-7)
    assert gp.summary()["targets"] == 15


class _Means(nn.Module):
    """The means of a network of means and variances."""

    def __init__(self, model: nn.Module, natural: bool) -> None:
        super().__init__()
        self.model, self.natural = model, natural

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.model(x).chunk(2, 1)
        return -first / (2 * second) if self.natural else first


class _Natural(nn.Module):
    """A network with η₂ < 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network(3, 5, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.body(x).chunk(2, 1)
        return torch.cat([first, -0.2 - nn.functional.softplus(second)], 1)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", ["log-variance", "natural"])
@pytest.mark.thinned(3)
def test_heteroscedastic_noise_is_what_the_network_predicts(way: dict[str, Any], kind: Any) -> None:
    model = network(3, 5, 4) if kind == "log-variance" else _Natural()
    x, y, x_test = real(9, 3, seed=1), real(9, 2, seed=2), real(4, 3, seed=3)
    likelihood = HeteroscedasticGaussian(kind)
    oracle = Dense(
        _Means(model, kind == "natural"), x, y, x_test, likelihood.variance(model(x)).detach(), 0.7
    )
    mean, covariance = oracle.moments()
    gp = TangentGP(model, likelihood, prior_precision=0.7, **way).fit(x, y)
    prediction = gp.predictive(x_test, joint=True)
    close(prediction.mean, mean)
    close(prediction.joint_covariance, covariance)
    close(prediction.noise, likelihood.variance(model(x_test)).detach())
    assert gp.log_evidence().mean == pytest.approx(oracle.log_evidence(), rel=1e-7)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.thinned(6)
def test_gradients_in_x_are_those_of_the_moments(way: dict[str, Any]) -> None:
    oracle = dense(n=6)
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), prior_precision=0.7, **way).fit(oracle.x, oracle.y)
    for joint in (False, True):
        x = oracle.x_test[:2].clone().requires_grad_()

        def value(at: Tensor, joint: bool = joint) -> Tensor:
            prediction = gp.predictive(at, joint=joint)
            second = prediction.joint_covariance if joint else prediction.covariance
            weights = torch.arange(second.numel(), dtype=second.dtype).view_as(second).cos()
            return (second * weights).sum() + prediction.mean.sin().sum()

        (gradient,) = torch.autograd.grad(value(x), x)
        step, numeric = 1e-5, torch.zeros_like(x)
        for i in range(x.numel()):
            moved = torch.zeros(x.numel(), dtype=x.dtype)
            moved[i] = step
            at, back = x.detach() + moved.view_as(x), x.detach() - moved.view_as(x)
            numeric.view(-1)[i] = (value(at) - value(back)) / (2 * step)
        close(gradient, numeric, 1e-6)


def test_finite_differences_give_the_same_process() -> None:
    oracle = dense()
    mean, covariance = oracle.moments()
    gp = TangentGP(
        oracle.model, Gaussian(variance=0.2), prior_precision=0.7, derivative="finite-difference"
    ).fit(oracle.x, oracle.y)
    assert gp.plan.space == "parameter"
    close(gp.predictive(oracle.x_test).mean, mean, 1e-4)
    close(gp.predictive(oracle.x_test, joint=True).joint_covariance, covariance, 1e-4)
    assert gp.log_evidence().mean == pytest.approx(oracle.log_evidence(), rel=1e-4)


@pytest.mark.parametrize("space", ["function", "parameter"])
def test_a_short_variance_cache_never_understates(space: str) -> None:
    oracle = dense(n=30, outputs=2)
    _, covariance = oracle.moments()
    exact = covariance.flatten(2).flatten(0, 1)
    slack = []
    for rank in (8, 16, 32):
        gp = TangentGP(oracle.model, Gaussian(variance=0.2), space, 0.7, solver="cg", rank=rank)
        prediction = gp.fit(oracle.x, oracle.y).predictive(oracle.x_test, joint=True)
        excess = prediction.joint_covariance.flatten(2).flatten(0, 1) - exact
        assert float(torch.linalg.eigvalsh(excess).min()) > -1e-10
        slack.append(float(excess.trace()))
        assert gp.summary()["directions"] <= rank
    assert slack[0] > slack[1] > slack[2] > -1e-10
    assert slack[2] < 0.1 * float(exact.trace())


def test_joint_samples_have_the_joint_moments() -> None:
    oracle = dense()
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), prior_precision=0.7).fit(oracle.x, oracle.y)
    mean, covariance = oracle.moments()
    draws = gp.predictive(oracle.x_test, joint=True).sample(20000, 0)
    close(draws.mean(0), mean, 0.05)
    close(torch.cov(draws.flatten(1).T), covariance.flatten(2).flatten(0, 1), 0.05)
    alone = gp.predictive(oracle.x_test).sample(20000, 0)
    between = torch.cov(alone.flatten(1).T)[:2, 2:4]
    assert float(between.abs().max()) < 0.03 * float(covariance.abs().max())


def test_log_density_is_that_of_the_noisy_marginal() -> None:
    oracle = dense()
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), prior_precision=0.7).fit(oracle.x, oracle.y)
    y, prediction = real(4, 2, seed=9), gp.predictive(oracle.x_test)
    noisy = prediction.with_noise()
    expected = torch.distributions.MultivariateNormal(noisy.mean, noisy.covariance).log_prob(y)
    close(prediction.log_density(y), expected)
    model, x = network(3, 4, 1), real(5, 3)
    one = TangentGP(model, Gaussian(variance=0.2)).fit(x, x[:, 0]).predictive(x)
    close(one.log_density(x[:, 0]), one.log_density(x[:, :1]))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.thinned(4)
def test_outputs_at_positions_and_inputs_by_name(way: dict[str, Any]) -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network(3, 4, 2)

        def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
            return self.body(tokens) * scale[:, None, None]

    model, tokens, scale = Sequence(), real(5, 4, 3, seed=1), real(5, seed=2).abs() + 0.5
    y, x = real(5, 4, 2, seed=3), {"tokens": tokens, "scale": scale}
    j = linnet.linearize(model).jacobian(x).flatten(0, 1)
    f = model(**x).detach().reshape(-1)
    total = j @ j.T
    gain = torch.linalg.solve(total + 0.2 * torch.eye(40, dtype=f.dtype), total)
    blocks = (total - total @ gain).view(5, 8, 5, 8).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    found = TangentGP(model, Gaussian(variance=0.2, axis=-1), **way).fit(x, y).predictive(x)
    assert found.mean.shape == (5, 8)
    close(found.mean, (f + gain.T @ (y.reshape(-1) - f)).view(5, 8))
    close(found.covariance, blocks)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.thinned(4)
def test_convolutions_in_float32_and_a_part_of_the_parameters(way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 2),
    )
    x, y = torch.randn(12, 1, 6, 6), torch.randn(12, 2)
    way = {**way, "tolerance": 1e-5} if "tolerance" in way else way
    found, exact = (
        TangentGP(model, Gaussian(variance=0.1), **options).fit(x, y).predictive(x[:4])
        for options in (way, WAYS["function"])
    )
    assert found.mean.dtype == found.covariance.dtype == torch.float32
    close(found.mean, exact.mean, 1e-3)
    close(found.covariance, exact.covariance, 1e-3)
    few = TangentGP(model, Gaussian(variance=0.1), params="last-layer").fit(x, y)
    assert few.plan.parameters == 26
    assert float(few.predictive(x).variance.sum()) < float(
        TangentGP(model, Gaussian(variance=0.1), params="last-layer", prior_precision=0.1).fit(x, y)
        .predictive(x).variance.sum()
    )  # fmt: skip
