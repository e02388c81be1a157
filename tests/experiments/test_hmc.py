"""Hamiltonian Monte Carlo against Gaussian posteriors in closed form, and its diagnostics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import linnet
from experiments.laplace.hmc import Chains, hmc, network_posterior
from tests.fitting.problems import near, real


def gaussian() -> tuple[Tensor, Tensor]:
    """A mean, and a covariance with correlations and scales from 0.3 to 2."""
    root = torch.tensor([[0.5, 0.0, 0.0], [0.4, 1.0, 0.0], [-0.3, 0.8, 2.0]]).double()
    return torch.tensor([1.0, -2.0, 0.5]).double(), root @ root.T


@pytest.mark.long
def test_moments_of_a_correlated_gaussian(generator: torch.Generator) -> None:
    mean, covariance = gaussian()
    precision = torch.linalg.inv(covariance)
    chains = hmc(
        lambda z: -0.5 * ((z - mean) @ precision * (z - mean)).sum(1), 5 * real(40, 3), draws=300, warmup=150,
        generator=generator,
    )  # fmt: skip
    assert float((chains.flat.mean(0) - mean).abs().max()) < 0.1
    assert float((chains.flat.T.cov() - covariance).abs().max()) < 0.25
    assert bool((chains.rhat() < 1.02).all())
    assert bool(((chains.acceptance > 0.6) & (chains.acceptance < 0.98)).all())
    assert chains.divergences == 0
    assert chains.draws.shape == (40, 300, 3)


@pytest.mark.long
def test_posterior_of_a_linear_network(generator: torch.Generator) -> None:
    """Bayesian linear regression: N((λI + XᵀX/σ²)⁻¹ Xᵀy/σ², (λI + XᵀX/σ²)⁻¹)."""
    x, y = real(15, 2), real(15, 1, seed=1)
    likelihood = linnet.likelihoods.Gaussian(0.25)
    log_density, outputs = network_posterior(nn.Linear(2, 1), x, y, likelihood.nll, 0.7)
    chains = hmc(log_density, real(60, 3, seed=2), draws=120, warmup=100, generator=generator)
    phi = torch.cat([x, torch.ones(15, 1).double()], 1)
    covariance = torch.linalg.inv(phi.T @ phi / 0.25 + 0.7 * torch.eye(3).double())
    mean = covariance @ phi.T @ y[:, 0] / 0.25
    deviation = covariance.diagonal().sqrt()
    assert float(((chains.flat.mean(0) - mean) / deviation).abs().max()) < 0.06
    assert float((chains.flat.std(0) / deviation - 1).abs().max()) < 0.06
    near(outputs(chains.flat[:2], x)[:, :, 0], chains.flat[:2] @ phi.T, 1e-12)
    # the log density with all constants: the evidence is its integral, log p(y) − log p(θ | y) at any θ
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(15).double(), 0.25 * torch.eye(15).double() + phi @ phi.T / 0.7
    ).log_prob(y[:, 0])
    at = torch.tensor([0.3, -0.2, 0.1]).double()
    own = torch.distributions.MultivariateNormal(mean, covariance).log_prob(at)
    near(log_density(at[None])[0], evidence + own, 1e-10)


@pytest.mark.long
def test_outputs_of_a_tiny_network_mix(generator: torch.Generator) -> None:
    x = torch.linspace(-1, 1, 10).double()[:, None]
    model, likelihood = (
        nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)),
        linnet.likelihoods.Gaussian(0.05),
    )
    log_density, outputs = network_posterior(model, x, (2 * x).sin(), likelihood.nll, 1.0)
    chains = hmc(log_density, real(20, 10), draws=120, warmup=100, leapfrog=15, generator=generator)
    assert bool((chains.rhat(lambda theta: outputs(theta, x).flatten(1)) < 1.1).all())
    assert float((outputs(chains.flat, x).mean(0) - (2 * x).sin()).abs().max()) < 0.3


def test_rhat_sees_chains_that_disagree() -> None:
    draws = real(4, 200, 2)
    draws[0, :, 1] += 3
    rhat = Chains(draws, torch.ones(4), 0.1, 0).rhat()
    assert rhat[0] < 1.02
    assert rhat[1] > 1.3
    # drift within chains that agree on their means
    drift = real(4, 200, 1) + torch.linspace(-3, 3, 200).double()[:, None]
    assert float(Chains(drift, torch.ones(4), 0.1, 0).rhat()) > 1.3


def test_reproducible_and_errors() -> None:
    def run(seed: int) -> Tensor:
        source = torch.Generator().manual_seed(seed)
        start = torch.zeros(2, 1).double()
        return hmc(lambda z: -z.square().sum(1), start, 5, 5, generator=source).draws

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    with pytest.raises(ValueError, match="float64"):
        hmc(lambda z: -z.square().sum(1), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="positive"):
        hmc(lambda z: -z.square().sum(1), torch.zeros(2, 1).double(), draws=0)
    with pytest.raises(ValueError, match="finite"):
        hmc(lambda z: z.sum(1) - math.inf, torch.zeros(2, 1).double())
