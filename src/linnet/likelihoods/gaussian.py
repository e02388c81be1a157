"""Gaussian likelihoods: of fixed or fitted noise, and with the noise an output of the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.likelihoods.likelihood import (
    IndependentComponents,
    Likelihood,
    Moments,
    first_of,
    require_axis,
    require_finite_targets,
    require_outputs,
    require_psd,
    require_semidefinite,
    require_shape,
    require_targets,
    require_tensor,
)
from linnet.linalg.random import normal
from linnet.params import choice, flag, number, positive_numbers, refuse

_LOG_2PI = math.log(2 * math.pi)


class Gaussian(IndependentComponents):
    """y ~ N(f, σ²), independently for each output: regression with squared error over 2σ².

    Args:
        variance: σ², one number or one for each output (C,).
        axis: The axis of the outputs that holds components.
        masked: Whether targets that are nan are missing, each on its own; otherwise they are errors.

    Raises:
        InputError: The variance is not positive.

    Example:
        >>> Gaussian(variance=0.5).hessian(torch.zeros(1, 1))
        tensor([[[[2.]]]])
    """

    def __init__(self, variance: float | Tensor = 1.0, axis: int = 1, masked: bool = False) -> None:
        remedy = "pass variance=1.0, or Gaussian.fitted(f, y)"
        if not isinstance(variance, Tensor | Sequence):
            variance = number("variance", variance, above=0, remedy=remedy)
        expected = "a positive number, or one for each output (C,)"
        found = positive_numbers("variance", variance, expected, remedy)
        noise = found.detach().to("cpu", torch.float64, copy=True)
        if noise.ndim > 1:
            refuse("variance", variance, expected, remedy)
        self.noise, self.axis, self.masked = noise, require_axis(axis), flag("masked", masked)

    @classmethod
    def fitted(
        cls, f: Tensor, y: Tensor, *, per_output: bool = False, axis: int = 1, masked: bool = False
    ) -> Gaussian:
        """The Gaussian whose variance makes targets most likely: the mean squared residual.

        Args:
            f: Outputs (N, ...), preferably of examples that the network was not trained on.
            y: Targets of the same shape.
            per_output: Whether each output gets its own variance.
            axis: The axis of the outputs that holds components.
            masked: Whether targets that are nan are missing.

        Returns:
            The likelihood.

        Raises:
            DataError: All residuals of some output are zero, or it has no target.

        Example:
            >>> Gaussian.fitted(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
            Gaussian(variance=5.0, masked=False, axis=1)
        """
        flag("per_output", per_output)
        require_outputs(f)
        require_tensor(y)
        rows, labels, counts = cls(axis=axis, masked=masked)._prepare(f.detach(), y)
        weights = torch.ones_like(rows) if counts is None else counts.to(rows.dtype)
        squares, over = weights * (labels - rows) ** 2, (0, 1) if per_output else (0, 1, 2)
        variance = squares.double().sum(over) / weights.double().sum(over)
        if not bool((variance > 0).all()):  # 0 / 0 is nan
            raise DataError(
                f"the mean squared residual of f and y is {variance.tolist()}",
                expected="residuals that are not all zero, for each variance that is fitted",
                remedy="use held-out examples, or pass a variance",
            )
        return cls(variance, axis, masked)

    def _sigma2(self, rows: Tensor) -> Tensor:
        """σ², with the type and device of the outputs."""
        if self.noise.ndim == 1 and len(self.noise) not in (1, rows.shape[-1]):
            raise InputError(
                f"variance has {len(self.noise)} entries and the outputs have {rows.shape[-1]} components",
                expected="one variance for each output, or one for all",
                remedy="check axis",
            )
        return self.noise.to(rows)

    def _nll(self, rows: Tensor, labels: Tensor) -> Tensor:
        variance = self._sigma2(rows)
        # ½ (y − f)² / σ² + ½ log 2πσ²
        return 0.5 * ((labels - rows) ** 2 / variance + variance.log() + _LOG_2PI)

    def _gradient(self, rows: Tensor, labels: Tensor) -> Tensor:
        return (rows - labels) / self._sigma2(rows)

    def _curvature(self, rows: Tensor) -> Tensor:
        return (1 / self._sigma2(rows)).expand(rows.shape)

    def _deviation(self, rows: Tensor) -> Tensor:
        return self._sigma2(rows).rsqrt().expand(rows.shape)

    def _sample(self, rows: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        z = normal((n, *rows.shape), generator, rows.dtype, rows.device)
        return rows + self._sigma2(rows).sqrt() * z

    def _kl(self, f: Tensor, g: Tensor) -> Tensor:
        return 0.5 * (f - g) ** 2 / self._sigma2(f)

    def _moments(self, rows: Tensor) -> Moments:
        return rows, self._sigma2(rows).expand(rows.shape)

    def _predictive(self, mean: Tensor, variance: Tensor, covariance: Tensor) -> Moments:
        return mean, variance + self._sigma2(mean)

    def _settings(self) -> dict[str, Any]:
        return {"variance": self.noise.tolist(), "masked": self.masked}


class HeteroscedasticGaussian(Likelihood):
    """y ~ N(μ, σ²) with both given by the network, for D targets.

    The class axis holds 2D outputs: first those of the D means, then those of the D variances.

    - "log-variance": outputs are μ and log σ². Λ depends on y and is indefinite wherever y ≠ μ, so that
      it has no real square root; the Fisher information is diag(1/σ², ½).
    - "natural": outputs are η₁ = μ/σ² and η₂ = −1/(2σ²) < 0. Λ is independent of y, positive definite,
      and equal to the Fisher information.

    Args:
        parametrization: "log-variance" or "natural".
        psd: What to do where Λ is indefinite: "raise" leaves Λ as it is and makes its root an error,
            "clip" replaces Λ by its positive part everywhere.
        axis: The axis of the outputs that holds components.
        masked: Whether targets that are nan are missing, each on its own; otherwise they are errors.

    Raises:
        InputError: The parametrization or psd is none of these.

    Example:
        >>> likelihood = HeteroscedasticGaussian()
        >>> likelihood.fisher(torch.zeros(1, 2))[0, 0]
        tensor([[1.0000, 0.0000],
                [0.0000, 0.5000]])
    """

    def __init__(
        self,
        parametrization: Literal["log-variance", "natural"] = "log-variance",
        psd: Literal["raise", "clip"] = "raise",
        axis: int = 1,
        masked: bool = False,
    ) -> None:
        choice("parametrization", parametrization, ("log-variance", "natural"))
        self.parametrization, self.psd = parametrization, require_psd(psd)
        self.axis, self.masked = require_axis(axis), flag("masked", masked)
        self.canonical = parametrization == "natural"

    def _arrange(self, f: Tensor, lead: int = 0) -> Tensor:
        rows = super()._arrange(f, lead)
        if rows.shape[-1] % 2:
            raise InputError(
                f"outputs of shape {tuple(f.shape)} have {rows.shape[-1]} components along axis {self.axis}",
                expected="an even number: means, then variances",
                remedy="give the network two outputs for each target, or check axis",
            )
        return rows

    def _check(self, f: Tensor, y: Tensor) -> Tensor:
        axis = self._class_axis(f.ndim)
        expected = [size // 2 if i == axis else size for i, size in enumerate(f.shape)]
        require_shape(y, expected, "give one target for each pair of outputs")
        y = require_targets(y, f.dtype, self.masked, type(self).__name__)
        require_finite_targets(y)
        return y

    def _present(self, y: Tensor) -> Tensor | None:
        missing = y.isnan()
        return ~self._arranged(missing) if self.masked and bool(missing.any()) else None

    def _labels(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        present, labels = self._present(y), self._arranged(y)
        if present is None:
            return labels, None
        # the mean itself, at which Λ is semi-definite
        filled = torch.where(present, labels, self._split(self._arrange(f))[0].detach())
        return filled, torch.cat([present, present], -1)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """μ and log σ², each (*lead, N, T, D)."""
        first, second = rows.chunk(2, -1)
        if not self.canonical:
            return first, second
        bad = ~(second < 0)
        if bool(bad.any()):
            raise InputError(
                f"{first_of(bad, 'η₂')} (example, position, target) is {float(second[bad][0]):.4g}",
                expected="η₂ = −1/(2σ²), negative",
                remedy='end the network with -softplus, or use parametrization="log-variance"',
            )
        return -first / (2 * second), -(-2 * second).log()

    def _nll(self, rows: Tensor, labels: Tensor) -> Tensor:
        mean, log_variance = self._split(rows)
        # ½ (y − μ)² / σ² + ½ log 2πσ²
        return 0.5 * ((labels - mean) ** 2 * (-log_variance).exp() + log_variance + _LOG_2PI)

    def _gradient(self, rows: Tensor, labels: Tensor) -> Tensor:
        mean, log_variance = self._split(rows)
        if self.canonical:
            # E[(y, y²)] − (y, y²)
            second = mean**2 + log_variance.exp() - labels**2
            return torch.cat([mean - labels, second], -1)
        precision = (-log_variance).exp()
        slope = 0.5 * (1 - (labels - mean) ** 2 * precision)
        return torch.cat([(mean - labels) * precision, slope], -1)

    def _blocks(self, rows: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Λ of each target, [[a, b], [b, c]]."""
        mean, log_variance = self._split(rows)
        if self.canonical or labels is None:
            # Cov[(y, y²)] = [[σ², 2μσ²], [2μσ², 4μ²σ² + 2σ⁴]]
            variance = log_variance.exp()
            return variance, 2 * mean * variance, 4 * mean**2 * variance + 2 * variance**2
        # [[1/σ², r/σ²], [r/σ², r²/(2σ²)]] with r = y − μ
        precision, r = (-log_variance).exp(), labels - mean
        return precision, r * precision, 0.5 * r**2 * precision

    def _hessian(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        if not self.canonical and self.psd == "clip":
            root = self._root(rows, labels)
            return root @ root.mT
        a, b, c = (torch.diag_embed(x) for x in self._blocks(rows, labels))
        return torch.cat([torch.cat([a, b], -1), torch.cat([b, c], -1)], -2)

    def _product(self, rows: Tensor, v: Tensor, labels: Tensor | None) -> Tensor:
        a, b, c = self._blocks(rows, labels)
        if not self.canonical and self.psd == "clip":
            first, second = self._positive_column(a, b, c)
            a, b, c = first**2, first * second, second**2
        v1, v2 = v.chunk(2, -1)
        return torch.cat([a * v1 + b * v2, b * v1 + c * v2], -1)

    def _root(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        a, b, c = self._blocks(rows, labels)
        if not self.canonical:
            columns = self._positive_column(a, b, c)
            return torch.cat([torch.diag_embed(x) for x in columns], -2)
        # Cholesky: [[σ, 0], [2μσ, √2 σ²]]
        corner, below, last = a.sqrt(), b / a.sqrt(), 2**0.5 * a
        upper = torch.cat([torch.diag_embed(corner), torch.diag_embed(torch.zeros_like(corner))], -1)
        return torch.cat([upper, torch.cat([torch.diag_embed(below), torch.diag_embed(last)], -1)], -2)

    def _positive_column(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """√λ₊ u₊ of [[a, b], [b, c]], whose determinant −r²/(2σ⁴) leaves one positive eigenvalue at most."""
        half = 0.5 * (a - c)
        radius = torch.hypot(half, b)
        largest = 0.5 * (a + c) + radius
        if self.psd == "raise":
            # λ₋ = det / λ₊, det = ac − b² = −½ b²
            smallest = -0.5 * b * (b / largest.clamp_min(torch.finfo(b.dtype).tiny))
            require_semidefinite(smallest, largest, repr(self))
        # u₊ ∝ (radius + half, b) = (b, radius − half) up to scale: the one that does not cancel
        near, far = radius + half.abs(), b
        first, second = torch.where(half >= 0, near, far), torch.where(half >= 0, far, near)
        scale = largest.sqrt() / torch.hypot(first, second).clamp_min(torch.finfo(b.dtype).tiny)
        return first * scale, second * scale

    def _fisher(self, rows: Tensor) -> Tensor:
        if self.canonical:
            return self._hessian(rows, None)
        precision = (-self._split(rows)[1]).exp()
        return torch.diag_embed(torch.cat([precision, torch.full_like(precision, 0.5)], -1))

    def _fisher_root(self, rows: Tensor) -> Tensor:
        if self.canonical:
            return self._root(rows, None)
        deviation = (-0.5 * self._split(rows)[1]).exp()
        return torch.diag_embed(torch.cat([deviation, torch.full_like(deviation, 0.5**0.5)], -1))

    def _sample(self, rows: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        mean, log_variance = self._split(rows)
        z = normal((n, *mean.shape), generator, rows.dtype, rows.device)
        return mean + (0.5 * log_variance).exp() * z

    def _kl(self, f: Tensor, g: Tensor) -> Tensor:
        (mean_f, log_f), (mean_g, log_g) = self._split(f), self._split(g)
        # ½ (σ_f²/σ_g² − 1 − log σ_f²/σ_g² + (μ_f − μ_g)²/σ_g²)
        d = log_f - log_g
        return 0.5 * (torch.expm1(d) - d + (mean_f - mean_g) ** 2 * (-log_g).exp())

    def _moments(self, rows: Tensor) -> Moments:
        mean, log_variance = self._split(rows)
        return mean, log_variance.exp()

    def _predictive(self, mean: Tensor, variance: Tensor, covariance: Tensor) -> Moments:
        first, second = variance.chunk(2, -1)
        center, log_variance = self._split(mean)
        if not self.canonical:
            # Var[y] = E[σ²] + Var[μ], with σ² log-normal
            return center, (log_variance + second / 2).exp() + first
        # first order in the outputs, for 1/η₂ has no moments: ∂μ/∂η = (σ², 2μσ²)
        noise, half = log_variance.exp(), mean.shape[-1] // 2
        cross = (
            covariance[:, :half, half:].diagonal(dim1=-2, dim2=-1)
            if covariance.ndim == 3
            else torch.zeros_like(first)
        )
        spread = first + 4 * center * cross + 4 * center**2 * second
        return center, noise + noise**2 * spread

    def _settings(self) -> dict[str, Any]:
        return {"parametrization": self.parametrization, "psd": self.psd, "masked": self.masked}
