"""A tangent Gaussian process as a BoTorch model; needs ``pip install 'linnet-torch[gp]'``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.integrations import classes
from linnet.tangent_gp.tangent_gp import TangentGP

if TYPE_CHECKING:
    TangentModel: Any


class _TangentModel:
    """A fitted ``TangentGP`` for acquisition functions: joint posteriors, differentiable in x."""

    def __init__(self, gp: TangentGP) -> None:
        super().__init__()
        if not isinstance(gp, TangentGP):
            raise InputError(f"gp is {type(gp).__name__}", "a linnet.TangentGP", "TangentModel(gp.fit(x, y))")
        self.gp = gp
        self._outputs = gp._problem.c

    @property
    def num_outputs(self) -> int:
        """C."""
        return self._outputs

    @property
    def batch_shape(self) -> torch.Size:
        """One process, no batch of them."""
        return torch.Size()

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The joint posterior of q points, for each of a batch of such sets."""
        # X (..., q, d), observation_noise (..., q, C)
        sets = X.reshape(-1, *X.shape[-2:])
        chosen = list(range(self._outputs)) if output_indices is None else list(output_indices)
        mean, covariance = self._moments(sets.to(self._dtype), observation_noise is True)
        mean, covariance = mean[..., chosen].to(X), covariance[..., chosen][:, :, chosen].to(X)
        size = X.shape[-2] * len(chosen)
        covariance = covariance.reshape(*X.shape[:-2], size, size)
        if isinstance(observation_noise, Tensor):
            noise = observation_noise.to(X).expand(*X.shape[:-1], self._outputs)[..., chosen]
            covariance = covariance + noise.reshape(*X.shape[:-2], size).diag_embed()
        from botorch.posteriors.gpytorch import GPyTorchPosterior

        normal = _normal(mean.reshape(*X.shape[:-1], len(chosen)), covariance)
        found = GPyTorchPosterior(normal)
        return found if posterior_transform is None else posterior_transform(found)

    @property
    def _dtype(self) -> torch.dtype:
        """The network's type."""
        return self.gp._fitted.function.dtype

    def _moments(self, sets: Tensor, noisy: bool) -> tuple[Tensor, Tensor]:
        """Means (B, q, C) and joint covariances (B, q, C, q, C) of sets (B, q, d)."""
        if sets.shape[1] == 1:  # single points, as most acquisition functions ask for: all at once
            prediction = self.gp.predictive(sets[:, 0])
            prediction = prediction.with_noise() if noisy else prediction
            return prediction.mean[:, None], prediction.covariance[:, None, :, None]
        each = [self.gp.predictive(one, joint=True) for one in sets]
        each = [one.with_noise() if noisy else one for one in each]
        return torch.stack([p.mean for p in each]), torch.stack([p.joint_covariance for p in each])

    def condition_on_observations(self, X: Tensor, Y: Tensor, noise: Any = None, **_: Any) -> Any:
        """The model with more data, whose noise is that of the process."""
        # X (m, d), Y (m, C)
        if noise is not None:
            raise InputError("noise= of observations", "the noise of the process", "leave noise= out")
        if X.ndim != 2:
            raise InputError(
                f"X has shape {tuple(X.shape)}",
                expected="one set of points, (m, d): a process is conditioned on one set at a time",
                remedy="call condition_on_observations for each set",
            )
        return type(self)(self.gp.update(X.detach().to(self._dtype), Y.detach().to(self._dtype)))

    def fantasize(self, X: Tensor, *_: Any, **__: Any) -> Any:
        """Refuse: a process is no batch of processes, one a fantasy."""
        raise InputError(
            "fantasies of a tangent Gaussian process",
            expected="an acquisition function that looks at the posterior, such as qLogExpectedImprovement",
            remedy="take another one in the place of those that look ahead (qKnowledgeGradient, qMES)",
        )


def _normal(mean: Tensor, covariance: Tensor) -> Any:
    """GPyTorch's distribution of outputs (..., q, C)."""
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator import to_linear_operator

    # as an operator it is factorized with a jitter: points may be equal, or more than the kernel has rank
    lazy = to_linear_operator(covariance)
    if mean.shape[-1] == 1:
        return MultivariateNormal(mean[..., 0], lazy)
    return MultitaskMultivariateNormal(mean, lazy, interleaved=True)


def _bases() -> tuple[type, ...]:
    """BoTorch's model."""
    from botorch.models.model import Model

    return (Model,)


__getattr__ = classes(__name__, "gp", "botorch", {"TangentModel": (_TangentModel, _bases)})
