"""What a tangent Gaussian process predicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.arguments import check_count
from linnet.laplace.links import symmetric_root
from linnet.likelihoods.distribution import require_tensor
from linnet.linalg.factorize import cholesky
from linnet.linalg.random import Seed, normal
from linnet.tangent.batch import check_finite
from linnet.tangent.modes import in_exact_mode


class TangentPredictive:
    """A Gaussian over the outputs f(x) of examples, given the data.

    The covariance is computed when it is first asked for, so that means alone are cheap.

    Args:
        mean: E[f] = f₀(x) + J(x) E[δ], (N, C).
        covariance: Cov[f], (N, C, C), or between examples (N, C, N, C); or a function that computes it.
        noise: Variance of a target about f, (N, C).
        joint: Whether the covariance is that between examples.

    Attributes:
        mean: E[f], (N, C).
        noise: Variance of a target about f, (N, C).
        joint: Whether covariances between examples are known.

    Example:
        >>> prediction = TangentPredictive(torch.zeros(1, 2), torch.eye(2)[None], torch.tensor([[0.5, 1.0]]))
        >>> prediction.with_noise().variance
        tensor([[1.5000, 2.0000]])
    """

    def __init__(
        self,
        mean: Tensor,
        covariance: Tensor | Callable[[], Tensor],
        noise: Tensor,
        joint: bool = False,
    ) -> None:
        self.mean, self.noise, self.joint = mean, noise, joint
        self._second = covariance

    def __repr__(self) -> str:
        return f"TangentPredictive({self.mean.shape[0]} examples x {self.mean.shape[1]} outputs)"

    def __reduce__(self) -> tuple[Any, ...]:
        return TangentPredictive, (self.mean, self._full, self.noise, self.joint)

    @cached_property
    @in_exact_mode
    def _full(self) -> Tensor:
        """The covariance as it was given."""
        return self._second if isinstance(self._second, Tensor) else self._second()

    @property
    def covariance(self) -> Tensor:
        """Cov[f] of each example, (N, C, C)."""
        return self._full.diagonal(dim1=0, dim2=2).permute(2, 0, 1) if self.joint else self._full

    @property
    def joint_covariance(self) -> Tensor:
        """Cov[f] between all examples, (N, C, N, C).

        Raises:
            InputError: If it was not asked for.
        """
        if not self.joint:
            raise InputError(
                "joint_covariance of a prediction without it",
                expected="predict(x, joint=True)",
                remedy="predict again with joint=True",
            )
        return self._full

    @property
    def variance(self) -> Tensor:
        """Var[f], (N, C)."""
        return self.covariance.diagonal(dim1=1, dim2=2)

    @in_exact_mode
    def with_noise(self) -> TangentPredictive:
        """The distribution of new targets: their noise added to the covariance.

        Returns:
            The distribution; it has no noise left to add again.
        """
        noise, full = self.noise.to(self._full), self._full
        added = torch.diag_embed(noise.flatten()).reshape(full.shape) if self.joint else noise.diag_embed()
        return TangentPredictive(self.mean, full + added, torch.zeros_like(self.noise), self.joint)

    @in_exact_mode
    def sample(self, n: int, generator: Seed = None) -> Tensor:
        """Draw outputs; jointly where the joint covariance is known, else independently for each example.

        Args:
            n: Number of draws.
            generator: Generator or seed.

        Returns:
            (n, N, C).
        """
        check_count("n", n)
        z = normal((n, *self.mean.shape), generator, self.mean.dtype, self.mean.device)
        if self.joint:
            size = self.mean.numel()
            root = symmetric_root(self._full.reshape(size, size)).to(z)
            return self.mean + (z.flatten(1) @ root.T).view_as(z)
        return self.mean + torch.einsum("nij,snj->sni", symmetric_root(self.covariance).to(z), z)

    @in_exact_mode
    def log_density(self, y: Tensor) -> Tensor:
        """The log density of new targets, their noise included: each example by its marginal.

        Args:
            y: Targets (N, C), or (N,) for one output.

        Returns:
            (N,), summed over an example's outputs with the covariance between them.

        Raises:
            DataError: If y is not finite.
            InputError: If y is no tensor, or has another shape.
        """
        require_tensor(y)
        check_finite(y, "y")
        y = y.to(self.mean.device, torch.promote_types(y.dtype, self.mean.dtype))
        if y.ndim == 1 and self.mean.shape[1] == 1:
            y = y[:, None]
        if y.shape != self.mean.shape:
            raise InputError(
                f"y has shape {tuple(y.shape)}",
                expected=f"{tuple(self.mean.shape)}, one target for each output",
            )
        noisy = self.covariance.double() + self.noise.double().diag_embed()
        factor = cholesky(noisy, "predictive covariance")
        z = torch.linalg.solve_triangular(factor, (y - self.mean).double()[..., None], upper=False)[..., 0]
        logdet = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
        density: Tensor = -0.5 * ((z**2).sum(1) + logdet + y.shape[1] * math.log(2 * math.pi))
        return density
