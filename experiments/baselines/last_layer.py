"""Bayesian linear regression on the inputs of a network's last layer (ABLR).

With Φ = [φ 1] the inputs of the last linear layer and a constant, targets are y = Φ w + ε with
w ~ N(0, σ²/ρ I) and ε ~ N(0, σ²), for each output alone. Given ρ, the evidence is greatest at a σ² in closed
form, so that one eigendecomposition of ΦᵀΦ and a search over ρ choose both (Bishop 2006, section 3.5).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import InputError
from linnet.fitting.last_layer import features
from linnet.linalg.factorize import eigh
from linnet.linear.targets import make_targets
from linnet.params import number
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.model import PredictiveModel
from linnet.predictive.noise import Noise
from linnet.tangent.batch import Inputs
from linnet.tangent.data import Data, examples
from linnet.tangent.functional import Functional
from linnet.tangent.modes import in_exact_mode

POINTS = 65  # of each grid over ln ρ
REFINEMENTS = 6


class LastLayerRegression(PredictiveModel):
    """Bayesian linear regression on a network's features; ``last_layer`` makes it."""

    def __init__(
        self,
        model: nn.Module,
        weights: Tensor,
        covariance: Tensor,
        noise: float,
        ridge: float,
        log_evidence: float,
    ) -> None:
        self._model, self.weights, self.covariance = model, weights, covariance
        self.noise, self.ridge, self.log_evidence = noise, ridge, log_evidence

    @in_exact_mode
    def predictive(self, x: Inputs) -> GaussianPredictive:
        """The distribution of the outputs."""
        x = examples(self._model, x)
        phi = _with_constant(features(self._model, x))
        # φᵀ Cov[w] φ, the same for every output
        variance = ((phi @ self.covariance) * phi).sum(1).clamp_min(0)
        mean = phi @ self.weights
        spread = torch.diag_embed(variance[:, None].expand(mean.shape))
        return GaussianPredictive(mean, spread, Noise(self.noise))

    def summary(self) -> dict[str, Any]:
        """Sizes, noise, ridge and evidence, as plain numbers."""
        features_, outputs = len(self.weights) - 1, self.weights.shape[1]
        sizes = {"features": features_, "outputs": outputs}
        return {**sizes, "noise": self.noise, "ridge": self.ridge, "log_evidence": self.log_evidence}

    def __call__(self, x: Inputs) -> GaussianPredictive:
        """The distribution of the outputs."""
        return self.predictive(x)


@in_exact_mode
def last_layer(model: nn.Module, data: Any, ridge: float | str = "evidence") -> LastLayerRegression:
    """Replace a network's last layer by its Bayesian linear regression.

    Args:
        model: A network that ends in a linear layer; a copy is kept, in evaluation mode.
        data: An (x, y) pair, a Dataset, a DataLoader or batches, with real targets (N,) or (N, C).
        ridge: ρ = σ² times the prior's precision, or "evidence" to choose it; σ² is the most likely given ρ.

    Returns:
        A baseline.

    Raises:
        DataError: If the data are empty or not finite.
        InputError: If targets are classes, or ridge is neither positive nor "evidence".
        ModelError: If the network does not end in a linear layer.

    Source:
        Perrone, Jenatton, Seeger, Archambeau, "Scalable hyperparameter transfer learning", 2018; Snoek et al.
        2015.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> last_layer(net, (x, x.square())).predictive(x).variance.shape
        torch.Size([20, 1])
    """
    frozen = Functional(model, "all").model
    x, y = Data.of(data, frozen, keep=False).pair
    if not y.is_floating_point():
        raise InputError(
            f"y has type {y.dtype}",
            expected="real targets: this is a regression",
            remedy='use linnet.Laplace(model, likelihood, "last-layer") for classes',
        )
    t = make_targets(y, y[0].numel()).values.double()
    phi = _with_constant(features(frozen, x))
    values, vectors = eigh(phi.T @ phi, "ΦᵀΦ")
    values = values.clamp_min(0)
    projected = vectors.T @ (phi.T @ t)
    squares = float(t.square().sum())
    if isinstance(ridge, str):
        if ridge != "evidence":
            raise InputError(
                f"ridge={ridge!r}", expected='a positive number or "evidence"', remedy="leave ridge= out"
            )
        rho = _most_likely(values, projected, squares, t.shape)
    else:
        number("ridge", ridge, above=0, remedy='pass ridge="evidence" to choose it')
        rho = float(ridge)
    noise, evidence = _evidence(values.new_tensor([rho]), values, projected, squares, t.shape)
    # E[w] = (ΦᵀΦ + ρ I)⁻¹ Φᵀ y, Cov[w] = σ² (ΦᵀΦ + ρ I)⁻¹
    weights = vectors @ (projected / (values + rho)[:, None])
    covariance = float(noise) * (vectors / (values + rho)) @ vectors.T
    return LastLayerRegression(frozen, weights, covariance, float(noise), rho, float(evidence))


def _with_constant(phi: Tensor) -> Tensor:
    """[φ 1], float64."""
    return torch.nn.functional.pad(phi.double(), (0, 1), value=1.0)


def _evidence(
    rho: Tensor, values: Tensor, projected: Tensor, squares: float, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """The most likely σ² for each ρ (R,), and the log evidence there."""
    n, c = shape
    damped = values + rho[:, None]
    # yᵀ (I − Φ (ΦᵀΦ + ρ I)⁻¹ Φᵀ) y over n c, bounded away from zero where the fit is perfect
    left = squares - (projected.square().sum(1) / damped).sum(1)
    noise = left.clamp_min(1e-12 * squares + torch.finfo(values.dtype).tiny) / (n * c)
    # −½ [n c (ln 2πσ² + 1) + c ln det(I + ΦΦᵀ/ρ)]
    volume = (damped / rho[:, None]).log().sum(1)
    return noise, -0.5 * (n * c * ((2 * math.pi * noise).log() + 1) + c * volume)


def _most_likely(values: Tensor, projected: Tensor, squares: float, shape: torch.Size) -> float:
    """The ρ of the greatest evidence, by grids that close in."""
    top = math.log(float(values.max()) + 1e-12)
    low, high = top - 30.0, top + 5.0
    for _ in range(REFINEMENTS):
        grid = torch.linspace(low, high, POINTS, dtype=values.dtype, device=values.device)
        best = float(grid[_evidence(grid.exp(), values, projected, squares, shape)[1].argmax()])
        width = (high - low) / (POINTS - 1)
        low, high = best - width, best + width
    return math.exp(best)
