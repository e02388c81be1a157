"""Predictions of the linearized network, as large as they are wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.laplace.head import is_head
from linnet.laplace.links import class_probabilities
from linnet.laplace.outputs import (
    differentiable_moments,
    joint_covariance,
    moments,
    on_device,
    plain_outputs,
    requires_gradient,
    spread_blocks,
)
from linnet.laplace.predict import GaussianPredictive, Meaning, needs_covariance
from linnet.likelihoods.discrete import Categorical
from linnet.params import flag
from linnet.tangent.batch import Inputs, batch_size, check_finite

KEPT = 1 << 25  # numbers of a covariance (N, C, C) that a prediction keeps; beyond, variances alone
KEPT_OF_HEAD = 1 << 20  # the same for a last layer, whose variances need no covariance


def linearized(
    covariance: Curvature, x: Inputs, meaning: Meaning, joint: bool, memory: str | int | None
) -> GaussianPredictive:
    """Outputs N(f(x), J M Jᵀ) of the network linearized at θ*.

    Args:
        covariance: M.
        x: N examples; where they require gradients, the moments are differentiable in them.
        meaning: What outputs mean.
        joint: Whether covariances between examples are wanted.
        memory: Budget.

    Returns:
        The prediction.
    """
    flag("joint", joint)
    if requires_gradient(x):
        mean, spread = differentiable_moments(covariance, x, joint, memory)
        return GaussianPredictive(mean, _variance(spread), spread, meaning)
    if joint:
        spread = joint_covariance(covariance, x, memory)
        return GaussianPredictive(plain_outputs(covariance.function, x), _variance(spread), spread, meaning)
    if _is_kept(covariance, x, batch_size(x) * torch.Size(meaning.shape).numel() ** 2):
        mean, spread = moments(covariance, x, memory)
        return GaussianPredictive(mean, _variance(spread), spread, meaning)
    return _wide(covariance, x, meaning, memory)


def _is_kept(covariance: Curvature, x: Inputs, numbers: int) -> bool:
    """Whether covariances are formed and kept; those of a last layer are cheap to form when asked for."""
    if not min(KEPT, KEPT_OF_HEAD) < numbers <= KEPT:
        return numbers <= KEPT
    check_finite(x, "x")
    return not is_head(covariance, on_device(covariance.function, x))


def _variance(spread: Tensor) -> Tensor:
    """The diagonal of (N, C, C) or (N, C, N, C), (N, C)."""
    if spread.ndim == 4:
        spread = spread.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return spread.diagonal(dim1=1, dim2=2)


def _wide(covariance: Curvature, x: Inputs, meaning: Meaning, memory: str | int | None) -> GaussianPredictive:
    """A prediction that keeps variances, and class probabilities where these need more."""
    likelihood = meaning.known()
    if not (isinstance(likelihood, Categorical) and needs_covariance(likelihood, meaning.link)):
        mean, variance = moments(covariance, x, memory, diagonal=True)
        return GaussianPredictive(mean, variance, lambda: moments(covariance, x, memory)[1], meaning)
    found = []
    for mean, spread in spread_blocks(covariance, x, memory):
        p = class_probabilities(likelihood, mean, spread, meaning.shape, meaning.link)
        found.append((mean, _variance(spread).clone(), p))
    mean, variance, probs = (torch.cat(column) for column in zip(*found, strict=True))
    return GaussianPredictive(mean, variance, lambda: moments(covariance, x, memory)[1], meaning, probs)
