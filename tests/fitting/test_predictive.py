"""The Gaussian that a fit hands back: moments, samples, probabilities, temperature."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linnet.errors import InputError
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.noise import Noise, fit_moderation, fit_temperature, probabilities
from tests.fitting.problems import near, real


def gaussian(
    n: int = 3, c: int = 2, noise: float = 0.5, temperature: float | None = 2.0
) -> GaussianPredictive:
    root = real(n, c, c, seed=5)
    covariance = root @ root.mT + 0.1 * torch.eye(c)
    return GaussianPredictive(real(n, c, seed=6), covariance, Noise(noise, temperature))


def test_variance_is_the_diagonal() -> None:
    p = gaussian()
    for i in range(3):
        assert torch.equal(p.variance[i], p.covariance[i].diag())


def test_noise_is_added_to_every_output_alone() -> None:
    p = gaussian()
    noisy = p.with_noise()
    near(noisy.covariance - p.covariance, (0.5 * torch.eye(2, dtype=torch.float64)).expand(3, 2, 2), 1e-12)
    assert torch.equal(noisy.mean, p.mean)
    torch.testing.assert_close(noisy.probs, probabilities(p.mean, noisy.variance, 2.0))


def test_log_densities() -> None:
    """Values by the Gaussian with its noise, labels by their probabilities."""
    p, y = gaussian(), real(3, 2, seed=7)
    normal = torch.distributions.MultivariateNormal(p.mean, p.with_noise().covariance)
    near(p.log_density(y), normal.log_prob(y), 1e-10)
    labels = torch.tensor([0, 1, 1])
    near(p.log_density(labels), p.probs[range(3), labels].log(), 1e-12)
    for wrong in (torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.tensor([-1, 0, 1])):
        with pytest.raises(InputError, match="labels"):
            p.log_density(wrong)


def test_sample_moments(generator: torch.Generator) -> None:
    """Mean and covariance within five standard errors, and examples are drawn independently."""
    p, draws = gaussian(), 40_000
    samples = p.sample(draws, generator)
    assert samples.shape == (draws, 3, 2)
    mean, variance = samples.mean(0), p.variance
    assert ((mean - p.mean).abs() < 5 * (variance / draws).sqrt()).all()
    centered = samples - p.mean
    second = torch.einsum("snc,smd->nmcd", centered, centered) / draws
    for n in range(3):
        for m in range(3):
            expected = p.covariance[n] if n == m else torch.zeros(2, 2, dtype=torch.float64)
            # Var of a product of two Gaussians: s_c s_d + cov²
            spread = (torch.outer(variance[n], variance[m]) + expected**2).sqrt() / math.sqrt(draws)
            assert ((second[n, m] - expected).abs() < 5 * spread).all()


def test_same_generator_same_samples() -> None:
    p = gaussian()
    first, second = (p.sample(3, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, p.sample(3, torch.Generator().manual_seed(5)))


def test_a_certain_prediction_can_be_sampled() -> None:
    """Without uncertainty every draw is the mean; a covariance of lower rank is no error either."""
    mean = real(2, 3)
    certain = GaussianPredictive(mean, torch.zeros(2, 3, 3, dtype=torch.float64), Noise(1.0))
    near(certain.sample(4), mean.expand(4, 2, 3), 1e-12)
    ones = GaussianPredictive(mean, torch.ones(2, 3, 3, dtype=torch.float64), Noise(1.0))
    shift = ones.sample(5) - mean
    near(shift, shift[..., :1].expand(5, 2, 3), 1e-2)


@given(st.integers(1, 4), st.integers(2, 5), st.floats(0.05, 50.0), st.integers(0, 99))
def test_rows_of_probabilities_sum_to_one(n: int, c: int, temperature: float, seed: int) -> None:
    mean, variance = 10 * real(n, c, seed=seed), real(n, c, seed=seed + 1) ** 2
    p = probabilities(mean, variance, temperature)
    assert (p >= 0).all()
    near(p.sum(1), torch.ones(n, dtype=torch.float64), 1e-12)


def test_certain_outputs_give_the_plain_softmax() -> None:
    mean = 4 * real(3, 4)
    expected = (mean / 2.5).softmax(1)
    near(probabilities(mean, None, 2.5), expected, 1e-14)
    near(probabilities(mean, torch.zeros(3, 4, dtype=torch.float64), 2.5), expected, 1e-14)
    certain = GaussianPredictive(mean, torch.zeros(3, 4, 4, dtype=torch.float64), Noise(1.0, 2.5))
    near(certain.probs, expected, 1e-14)


def test_moderation_is_mackays_formula() -> None:
    """One output with mean m and variance v: κ = 1/√(1 + π v / 8) with everything in units of T."""
    mean, v, t = torch.tensor([[2.0, 0.0]]), torch.tensor([[4.0, 2.0]]), 1.5  # mean variance 3
    kappa = 1 / math.sqrt(1 + math.pi * (3.0 / t**2) / 8)
    expected = 1 / (1 + math.exp(-2.0 / t * kappa))
    assert probabilities(mean, v, t)[0, 0].item() == pytest.approx(expected, rel=1e-6)


def log_loss(outputs: torch.Tensor, labels: torch.Tensor, t: float, v: torch.Tensor | None = None) -> float:
    """Of the labels, and of one more example that is of no class in particular."""
    log_p = probabilities(outputs, v, t).log()
    return -(log_p[torch.arange(len(labels)), labels].sum() + log_p.mean()).item()


@pytest.mark.parametrize("scale", [0.02, 1.0, 300.0])
@pytest.mark.parametrize("uncertain", [False, True])
def test_temperature_is_the_likeliest(scale: float, uncertain: bool, generator: torch.Generator) -> None:
    outputs = scale * 2 * real(300, 3)
    labels = torch.multinomial((outputs / scale).softmax(1), 1, generator=generator)[:, 0]
    variance = torch.full((300, 3), (0.5 * scale) ** 2, dtype=torch.float64) if uncertain else None
    t = fit_temperature(outputs, labels, variance)
    best = log_loss(outputs, labels, t, variance)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert best <= log_loss(outputs, labels, factor * t, variance) + 1e-12
    if not uncertain:  # the labels were drawn at the temperature `scale`
        assert t / scale == pytest.approx(1.0, rel=0.25)


def test_the_most_probable_class_is_that_of_the_largest_mean() -> None:
    """Unequal variances shrink all classes alike, so probabilities and predictions agree."""
    mean = torch.tensor([[2.0, 1.9, 0.0]], dtype=torch.float64)
    covariance = torch.diag_embed(torch.tensor([[90.0, 0.1, 0.1]], dtype=torch.float64))
    assert GaussianPredictive(mean, covariance, Noise(1.0, 0.5)).probs.argmax(1) == mean.argmax(1)


def test_variance_that_counts_too_much_is_scaled(generator: torch.Generator) -> None:
    """Targets of 0 and 15 with much noise: as uncertain as the classes differ, yet mostly right."""
    n = 200
    labels = torch.randint(3, (n,), generator=generator)
    wrong = torch.rand(n, generator=generator) < 0.1
    seen = torch.where(wrong, (labels + 1) % 3, labels)
    outputs = 1.5 * torch.nn.functional.one_hot(seen, 3).double()
    variance = torch.full((n, 3), 8.0, dtype=torch.float64)

    def loss(t: float, s: float) -> float:
        return float(-probabilities(outputs, s * variance, t).gather(1, labels[:, None]).log().mean())

    t, s = fit_moderation(outputs, labels, variance)
    assert s < 1
    assert loss(t, s) < loss(fit_temperature(outputs, labels, variance), 1.0) - 0.1
    assert loss(t, s) < 1.02 * loss(fit_temperature(outputs, labels), 0.0)


def test_variance_that_says_which_outputs_to_trust_counts_as_it_is(generator: torch.Generator) -> None:
    n = 300
    spread = torch.where(torch.rand(n, 1, generator=generator) < 0.5, 0.05, 40.0).double()
    mean = 2 * torch.randn(n, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((mean + spread.sqrt() * noise).softmax(1), 1, generator=generator)[:, 0]
    t, s = fit_moderation(mean, labels, spread.expand(n, 3))
    assert s >= 0.3
    assert 0.5 < t < 2
