"""Predictive likelihoods of a Laplace posterior for many hyper-parameters: held-out or leave-one-out.

The network is differentiated once for each batch, whatever the number of hyper-parameters that are compared.
Leave-one-out removes an example's own factor from the Gaussian over its outputs N(f, V): with Λ and g the
Hessian and gradient of its negative log-likelihood at f,

    V₋ = (V⁻¹ − Λ)⁻¹ = V + V R (I − Rᵀ V R)⁻¹ Rᵀ V,  Λ = R Rᵀ,     f₋ = f + V₋ g

exact for a linear model with Gaussian noise at its mode. An approximate V can claim a leverage Rᵀ V R of one
or more, of which no part may be left: it is scaled down to just below one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.stream import Batches
from linnet.curvatures.variance import batch_covariance
from linnet.errors import InputError
from linnet.laplace.outputs import Draws, captured_blocks, outputs_under
from linnet.laplace.posterior import Hyper, Posterior, with_noise
from linnet.laplace.prior import Groups
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.predictive.links import log_density
from linnet.predictive.sampled import Labels, SampledPredictive
from linnet.tangent.rules import Captured

LEVERAGE = 0.999
MOST_GROUPS = 256  # hyper-parameters that the gradient of a validation likelihood is taken in


@dataclass(frozen=True, eq=False)
class Scorer:
    """A posterior, data, and what is asked of the one about the other."""

    posterior: Posterior  # the posterior
    groups: Groups  # groups of the prior
    likelihood: Likelihood  # the likelihood that the curvature was computed with
    data: Any  # held-out data; for leave-one-out those of the fit
    labels: Labels  # how targets are distributed, given the outputs
    left_out: bool = False  # whether each example is taken out of the posterior first
    memory: str | int | None = None  # budget

    def values(self, points: Sequence[Hyper]) -> Tensor:
        """The summed log predictive density at several hyper-parameters."""
        spreads = [self.posterior.covariance(self.groups, at).parts for at in points]
        total = torch.zeros(len(points), dtype=torch.float64)
        for captured, y in self._captured():
            for i, (parts, at) in enumerate(zip(spreads, points, strict=True)):
                total[i] += float(
                    self._density(captured, batch_covariance(parts, captured), y, at).double().sum()
                )
        return total

    def sampled_values(self, points: Sequence[Hyper], samples: int, seed: int) -> Tensor:
        """The same with sampled weights: one set of networks a point, run on all data."""
        # Random numbers are common to all points, so that differences between points are not those of draws.
        total = torch.zeros(len(points), dtype=torch.float64)
        for i, at in enumerate(points):
            covariance = self.posterior.covariance(self.groups, at)
            labels = replace(self.labels, likelihood=with_noise(self.likelihood, float(at.noise)))
            draws = Draws(covariance, samples, seed, self.memory)
            for batch in self._batches():
                outputs = outputs_under(covariance.function, draws, samples, batch.x)
                total[i] += float(
                    SampledPredictive(outputs, labels).log_density(_labels(batch.y)).double().sum()
                )
        return total

    def gradient(self, at: Hyper, scale: bool, noise: bool) -> tuple[float, Tensor]:
        """The summed log predictive density, and its gradient in the logarithms of the hyper-parameters."""
        parts = self.posterior.covariance(self.groups, at).parts
        slopes = self._slopes(at, scale, noise)
        eta = torch.zeros(len(slopes), dtype=torch.float64, requires_grad=True)
        value, total = 0.0, torch.zeros_like(eta)
        for captured, y in self._captured():
            spread = batch_covariance(parts, captured)
            for one, (sign, changing) in zip(eta.unbind(0), slopes, strict=True):
                # Σ dV/dη η at η = 0: what follows sees the derivative of V, exactly
                spread = spread + sign * batch_covariance(changing, captured) * one.to(spread)
            if noise:
                spread = spread + torch.diag_embed(self._noise(captured, at)) * eta[-1].to(spread)
            # an example that is left out takes with it what the scale of the data multiplies
            moved = replace(at, scale=at.scale * eta[self.groups.count].exp()) if scale else at
            density = self._density(captured, spread, y, moved).double().sum()
            total += torch.autograd.grad(density, eta)[0]
            value += float(density.detach())
        return value, total

    def _slopes(self, at: Hyper, scale: bool, noise: bool) -> list[tuple[float, Any]]:
        """±dM/dη, with positive semi-definite dM, for every hyper-parameter."""
        if self.groups.count > MOST_GROUPS:
            raise InputError(
                f"the gradient of a predictive likelihood in {self.groups.count} prior precisions",
                expected=f"at most {MOST_GROUPS}",
                remedy='use .tune("evidence"), or prior="layer"',
            )
        still = Hyper(torch.zeros_like(at.prior), torch.zeros_like(at.scale), torch.zeros_like(at.noise))
        found: list[tuple[float, Any]] = []
        for g in range(self.groups.count):
            one = torch.zeros_like(at.prior)
            one[g] = at.prior[g]
            towards = replace(still, prior=one)
            found.append((-1.0, self.posterior.slopes(self.groups, at, towards, g)))
        if scale:
            found.append((-1.0, self.posterior.slopes(self.groups, at, replace(still, scale=at.scale), None)))
        if noise:  # H falls as the noise rises
            found.append((1.0, self.posterior.slopes(self.groups, at, replace(still, noise=-at.noise), None)))
        return found

    def _noise(self, captured: Captured, at: Hyper) -> Tensor:
        """σ² of each output, the derivative of the variance of a target in log m, (N, K)."""
        likelihood = with_noise(self.likelihood, float(at.noise))
        if not isinstance(likelihood, Gaussian) or self.left_out:
            raise InputError(
                "the gradient of this likelihood in the noise variance",
                expected="a Gaussian likelihood and held-out data",
                remedy="pass noise=False",
            )
        return likelihood.variance(captured.outputs.reshape(-1, *self.labels.shape)).flatten(1)

    def _batches(self) -> Batches:
        """The data."""
        return Batches(self.data, self.posterior.curvature.function)

    def _captured(self) -> Iterator[tuple[Captured, Tensor]]:
        """The network differentiated on a few examples, with their labels."""
        curvature: Curvature = self.posterior.curvature
        for batch in self._batches():
            y, start = _labels(batch.y), 0
            for captured in captured_blocks(curvature.function, curvature.parts, batch.x, self.memory):
                yield captured, y[start : start + captured.n]
                start += captured.n

    def _density(self, captured: Captured, spread: Tensor, y: Tensor, at: Hyper) -> Tensor:
        """Log predictive density of each label, (N,)."""
        likelihood, mean = with_noise(self.likelihood, float(at.noise)), captured.outputs.to(spread)
        if self.left_out:
            fisher = self.posterior.curvature.made.matrix == "fisher"
            mean, spread = left_out(likelihood, mean, spread, y, self.labels.shape, at.scale, fisher=fisher)
        return log_density(likelihood, mean, spread, y, self.labels.shape, self.labels.link)


def left_out(
    likelihood: Likelihood,
    mean: Tensor,
    spread: Tensor,
    y: Tensor,
    shape: Sequence[int],
    scale: Tensor | float = 1.0,
    *,
    fisher: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the outputs of each example from a posterior that has not seen it."""
    # mean (N, K), spread (N, K, K)
    n, f = len(mean), mean.detach().reshape(-1, *shape)
    columns = likelihood.fisher_root(f, y) if fisher else likelihood.root(f, y)
    weight = torch.as_tensor(scale).to(spread)
    root = weight.sqrt() * columns.flatten(2).permute(1, 2, 0)  # R, (N, K, R)
    gradient = weight * likelihood.gradient(f, y).reshape(n, -1, 1)
    across = spread @ root
    leverage = root.mT @ across
    largest = torch.linalg.eigvalsh(leverage).amax(1)
    leverage = leverage * (LEVERAGE / largest.clamp_min(LEVERAGE))[:, None, None]
    identity = torch.eye(leverage.shape[1], dtype=spread.dtype, device=spread.device)
    left: Tensor = spread + across @ torch.linalg.solve(identity - leverage, across.mT)
    return mean + (left @ gradient)[..., 0], (left + left.mT) / 2


def grid_points(at: Hyper, priors: Tensor, scales: Tensor, noises: Tensor) -> list[Hyper]:
    """All combinations of hyper-parameters."""
    logs = at.prior.log()
    return [
        Hyper((logs - logs.mean() + prior.log()).exp(), scale, noise)
        for prior in priors.to(logs)
        for scale in scales.to(logs)
        for noise in noises.to(logs)
    ]


def _labels(y: Tensor | None) -> Tensor:
    """Targets, or an error."""
    if y is None:
        raise InputError(
            "data have no targets", expected="(x, y) pairs", remedy="pass data=(x, y) to tune by predictions"
        )
    return y
