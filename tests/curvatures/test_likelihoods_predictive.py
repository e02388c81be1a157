"""Predictive distributions of labels under uncertain outputs, against sampling and quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from linnet.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    mixture_of_classifiers,
)
from linnet.predictive.sampled import Link, log_density

close = torch.testing.assert_close
DRAWS = 200_000


def uncertain(classes: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """A mean and a covariance of outputs of three examples."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(3, classes, generator=generator, dtype=torch.float64)
    factor = torch.randn(3, classes, classes, generator=generator, dtype=torch.float64) * scale
    return mean, factor @ factor.mT / classes


def outputs(mean: Tensor, covariance: Tensor, n: int = DRAWS) -> Tensor:
    """Draws of the outputs, (n, N, C)."""
    factor = torch.linalg.cholesky(covariance)
    z = torch.randn(n, *mean.shape, generator=torch.Generator().manual_seed(2), dtype=mean.dtype)
    return mean + torch.einsum("nij,snj->sni", factor, z)


@pytest.mark.parametrize(
    ("likelihood", "classes"),
    [(Gaussian(torch.tensor([0.5, 2.0])), 2), (Poisson(), 2), (HeteroscedasticGaussian(), 4)],
)
def test_exact_predictives_agree_with_sampled_labels(likelihood: Likelihood, classes: int) -> None:
    mean, covariance = uncertain(classes, 0.5)
    center, variance = likelihood.predictive(mean, covariance)
    f = outputs(mean, covariance)
    y = likelihood.sample(f.flatten(0, 1), 1, 3)[0].reshape(DRAWS, 3, -1)
    error = y.std(0) / DRAWS**0.5
    assert bool(((y.mean(0) - center).abs() < 5 * error).all())
    squares = (y - center) ** 2
    assert bool(((squares.mean(0) - variance).abs() < 5 * squares.std(0) / DRAWS**0.5).all())
    diagonal = likelihood.predictive(mean, covariance.diagonal(dim1=1, dim2=2))
    close(diagonal, (center, variance))


@pytest.mark.parametrize("m", [-3.0, -1.0, 0.0, 0.5, 2.0, 5.0])
@pytest.mark.parametrize("v", [0.01, 0.5, 2.0, 10.0, 50.0])
def test_the_probit_approximation_is_within_its_known_error(m: float, v: float) -> None:
    # Gauss-Hermite quadrature; σ(m / √(1 + πv/8)) is never off by more than about 0.02
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    points = torch.from_numpy(nodes) * math.sqrt(v) + m
    exact = float((torch.from_numpy(weights) * points.sigmoid()).sum() / math.sqrt(2 * math.pi))
    p = Bernoulli().predictive(torch.tensor([[m]]), torch.tensor([[[v]]]))
    assert isinstance(p, Tensor)
    assert abs(float(p) - exact) < 0.02


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
def test_the_extended_probit_is_near_the_mean_of_the_softmax(scale: float) -> None:
    mean, _ = uncertain(4)
    variance = scale * torch.linspace(0.5, 1.5, 4, dtype=mean.dtype).expand(3, 4)
    p = Categorical().predictive(mean, torch.diag_embed(variance))
    assert isinstance(p, Tensor)
    expected = outputs(mean, torch.diag_embed(variance), 50_000).softmax(-1).mean(0)
    assert float((p - expected).abs().max()) < 0.06
    close(p.sum(1), torch.ones(3, dtype=p.dtype))
    close(p, Categorical().predictive(mean, variance))


def test_the_extended_probit_is_better_than_no_correction() -> None:
    mean, variance = 2 * uncertain(4)[0], torch.full((3, 4), 2.0, dtype=torch.float64)
    p = Categorical().predictive(mean, variance)
    assert isinstance(p, Tensor)
    expected = outputs(mean, torch.diag_embed(variance), 50_000).softmax(-1).mean(0)
    assert bool(((p - expected).abs().sum(1) < 0.5 * (mean.softmax(-1) - expected).abs().sum(1)).all())


@pytest.mark.parametrize(
    ("likelihood", "classes", "shift"),
    [
        (HeteroscedasticGaussian("natural"), 4, lambda m: torch.cat([m[:, :2], -m[:, 2:].exp() - 1], 1)),
        (mixture_of_classifiers(), 3, lambda m: m),
    ],
)
def test_first_order_predictives_are_right_where_outputs_are_nearly_certain(
    likelihood: Likelihood, classes: int, shift: Callable[[Tensor], Tensor]
) -> None:
    mean, covariance = uncertain(classes)
    mean = shift(mean)
    small = 1e-4
    center, variance = likelihood.predictive(mean, small * covariance)
    rows, noise = likelihood.mean(mean), likelihood.variance(mean)
    close(center.reshape(rows.shape), rows)
    # the share of the outputs' uncertainty, against the spread of E[y | f]
    share = (variance.reshape(noise.shape) - noise) / small
    f = outputs(mean, small * covariance, 20_000)
    spread = likelihood.mean(f.flatten(0, 1)).reshape(20_000, *rows.shape).var(0) / small
    close(share, spread, rtol=0.06, atol=1e-3)
    diagonal = torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))
    close(
        likelihood.predictive(mean, diagonal.diagonal(dim1=1, dim2=2)), likelihood.predictive(mean, diagonal)
    )


@pytest.mark.parametrize(
    "likelihood", [Bernoulli(), Categorical(), Poisson(), Gaussian(), mixture_of_classifiers()]
)
def test_certain_outputs_predict_what_the_likelihood_says(likelihood: Likelihood) -> None:
    mean, covariance = uncertain(3)
    predicted = likelihood.predictive(mean, torch.zeros_like(covariance))
    if isinstance(predicted, Tensor):
        close(predicted, likelihood.mean(mean))
    else:
        close(predicted, (likelihood.mean(mean), likelihood.variance(mean)))


def test_moments_of_several_components_are_propagated() -> None:
    matrix = torch.tensor([[1.0, 2.0, 0.0], [0.0, -1.0, 3.0]], dtype=torch.float64)
    likelihood = Custom(
        lambda f, y: 0.5 * ((f @ matrix.T - y) ** 2).sum(1),
        moments=lambda f: (f @ matrix.T, torch.ones_like(f[:, :2])),
    )
    mean, covariance = uncertain(3)
    center, variance = likelihood.predictive(mean, covariance)
    close(center, mean @ matrix.T)  # exact, for it is linear
    close(variance, 1 + (matrix @ covariance @ matrix.T).diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("count", [0.0, 3.0, 60.0, 5000.0])
@pytest.mark.parametrize("std", [0.0, 0.1, 2.5, 40.0])
def test_the_density_of_a_count_is_an_integral(count: float, std: float) -> None:
    mean = torch.tensor([[0.3], [1.7]], dtype=torch.float64)
    spread = torch.full((2, 1, 1), std**2, dtype=torch.float64)
    y = torch.full((2, 1), count, dtype=torch.float64)
    found = log_density(Poisson(), mean, spread, y, (1,), Link())
    if not std:
        expected = -Poisson().nll(mean, y)
    else:
        # far beyond both the prior and what the likelihood allows
        low, high = mean - 90 * std, torch.minimum(mean + 90 * std, torch.tensor(700.0))
        f = low + (high - low) * torch.linspace(0, 1, 400_001, dtype=torch.float64)
        log = count * f - f.exp() - math.lgamma(count + 1) - ((f - mean) / std).square() / 2
        step = ((high - low) / 400_000)[:, 0]
        expected = log.logsumexp(1) + (step / std).log() - math.log(2 * math.pi) / 2
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
