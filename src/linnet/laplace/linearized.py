"""Predictions of the linearized network in bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.laplace.head import is_head
from linnet.laplace.outputs import (
    differentiable_moments,
    joint_covariance,
    moments,
    plain_outputs,
    requires_gradient,
    spread_blocks,
    without_graph,
)
from linnet.likelihoods.discrete import Categorical
from linnet.params import flag
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.links import class_probabilities
from linnet.predictive.sampled import Labels
from linnet.tangent.batch import Inputs, batch_size, check_finite

KEPT = 1 << 25  # numbers of a covariance (N, C, C) that a prediction keeps; beyond, variances alone
KEPT_OF_HEAD = 1 << 20  # the same for a last layer, whose variances need no covariance


def linearized(
    covariance: Curvature, x: Inputs, labels: Labels, joint: bool, memory: str | int | None
) -> GaussianPredictive:
    """Outputs N(f(x), J M Jᵀ) of the network linearized at θ*."""
    flag("joint", joint)
    if requires_gradient(x):
        mean, spread = differentiable_moments(covariance, x, joint, memory)
        return GaussianPredictive(mean, spread, labels, joint=joint)
    if joint:
        spread = joint_covariance(covariance, x, memory)
        return GaussianPredictive(plain_outputs(covariance.function, x), spread, labels, joint=True)
    if _is_kept(covariance, x, batch_size(x) * torch.Size(labels.shape).numel() ** 2):
        return GaussianPredictive(*moments(covariance, x, memory), labels)
    return _wide(covariance, x, labels, memory)


def _is_kept(covariance: Curvature, x: Inputs, numbers: int) -> bool:
    """Whether covariances are formed and kept; those of a last layer are cheap to form when requested."""
    if not min(KEPT, KEPT_OF_HEAD) < numbers <= KEPT:
        return numbers <= KEPT
    check_finite(x, "x")
    return not is_head(covariance, without_graph(x))


def _wide(covariance: Curvature, x: Inputs, labels: Labels, memory: str | int | None) -> GaussianPredictive:
    """A prediction that keeps variances, and class probabilities where these need more."""
    likelihood = labels.likelihood

    def full() -> Tensor:
        return moments(covariance, x, memory)[1]

    if not (isinstance(likelihood, Categorical) and labels.needs_covariance):
        mean, variance = moments(covariance, x, memory, diagonal=True)
        return GaussianPredictive(mean, full, labels, variance=variance)
    found = []
    for mean, spread in spread_blocks(covariance, x, memory):
        p = class_probabilities(likelihood, mean, spread, labels.shape, labels.link)
        found.append((mean, spread.diagonal(dim1=1, dim2=2).clone(), p))
    mean, variance, probs = (torch.cat(column) for column in zip(*found, strict=True))
    return GaussianPredictive(mean, full, labels, variance=variance, probs=probs)
