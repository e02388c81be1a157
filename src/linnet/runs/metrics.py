"""The metric of the ridge of an adaptation: which one, and the network in its coordinates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linnet.curvatures.build import curvature as compute_curvature
from linnet.likelihoods import Gaussian
from linnet.methods.fitting.metric import MetricNetwork, with_metric
from linnet.runs.settings import Settings, Solving
from linnet.tangent.linearized import Linearized

SMALL = 1e12  # operations that nobody waits for


def choose_metric(settings: Settings, lin: Linearized, centered: bool, equations: int) -> tuple[str, str]:
    """The metric of the ridge, where nobody has said.

    Behind a probe the curvature's is ahead of one ridge for all weights. The training samples cannot tell:
    their labels are in the derivatives, so that leave-one-out and evidence are too hopeful of both.

    Args:
        settings: What is asked for.
        lin: The network where the fit starts.
        centered: Whether a probe gives the derivatives of an output of zero.
        equations: N·C.

    Returns:
        ``"kfac"`` or ``"none"``, and why.
    """
    solving = settings.solving
    if solving.metric != "auto":
        return solving.metric, "asked for"
    if not centered or settings.network.cross_fit:
        return "none", "the study of metrics is about probes that are not cross-fitted"
    if solving.ridge not in ("auto", "evidence"):
        return "none", "a ridge that is given is that of all weights alike"
    sides = [side for t in lin.theta0.values() if t.ndim > 1 for side in (t.shape[0], t[0].numel())]
    # eigenvectors of all factors, 10 d³, against the products of the kernel, (N·C)² P
    if 10 * sum(side**3 for side in sides) > max(equations**2 * lin.space.dim, SMALL):
        return "none", "its eigenvectors would take longer than the kernel"
    return "kfac", "weights that move the outputs far are held more; ahead on the pairs of a study"


def in_metric(probe: nn.Module, lin: Linearized, x: Tensor, solving: Solving) -> MetricNetwork:
    """The network where the fit starts, in the coordinates of the probe's curvature.

    Args:
        probe: The network with the head whose derivatives are taken.
        lin: The network where the fit starts.
        x: Training inputs.
        solving: The structure of the curvature, the parameters and the memory.

    Returns:
        The network with one parameter.
    """
    outputs = torch.zeros(len(x), lin.base(x[:1]).shape[1], dtype=lin.function.dtype, device=x.device)
    unit, params, memory = Gaussian(variance=1.0), solving.params, solving.memory
    found = compute_curvature(probe, (x, outputs), unit, solving.metric, params=params, memory=memory)
    return with_metric(lin.model, found)
