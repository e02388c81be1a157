"""The metric of an adaptation's ridge, and the network in its coordinates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linnet.app.runs.settings import Settings
from linnet.curvatures import Passes
from linnet.curvatures.build import curvature as compute_curvature
from linnet.errors import MemoryBudgetError
from linnet.fitting.metric import with_metric
from linnet.fitting.plan import Size
from linnet.likelihoods import Gaussian
from linnet.tangent.linearized import Linearized, linearize

SMALL = 1e12  # operations; below this cost, timing does not matter
_WITHOUT = {  # solvers that take no metric by themselves, and why
    "cg": "conjugate gradients are preconditioned instead",
    "sketch": "the directions of a sketch are coordinates of their own",
    "shared": "one kernel for all outputs, of which there is no study",
}


def choose_metric(settings: Settings, lin: Linearized, classes: bool, x: Tensor) -> tuple[str, str]:
    """The default metric of the ridge."""
    # The curvature's was ahead of one ridge for all weights on every pair of a study of images. The training
    # samples cannot tell behind a probe: their labels are in the derivatives.
    solving = settings.solving
    if solving.metric != "auto":
        return solving.metric, "set by the user"
    if not classes:
        return "none", "a regression, of which there is no study"
    if settings.network.cross_fit:
        return "none", "each fold of a cross-fitted probe would need its own"
    if not isinstance(solving.ridge, str):
        return "none", "a ridge was given, which is one for all weights"
    if solving.solver in _WITHOUT:
        return "none", _WITHOUT[solving.solver]
    outputs, sketchable = lin.function.output_shape(x).numel(), solving.loss != "cross-entropy"
    size = Size(lin.function, x, outputs, "squared", True, solving.memory)
    if solving.solver == "auto" and sketchable and size.sketched_only:
        return "none", f"the memory has room for a sketch alone, and {_WITHOUT['sketch']}"
    sides = [side for t in lin.theta0.values() if t.ndim > 1 for side in (t.shape[0], t[0].numel())]
    # eigenvectors of all factors, 10 d³, against the products of the kernel, (N·C)² P
    if 10 * sum(side**3 for side in sides) > max((len(x) * outputs) ** 2 * lin.space.dim, SMALL):
        return "none", "its eigenvectors would take longer than the kernel"
    return "kfac", "directions of high curvature are regularized more; ahead on every pair of a study"


def in_metric(
    settings: Settings, probe: nn.Module, lin: Linearized, x: Tensor, chosen: tuple[str, str]
) -> tuple[Linearized, str, str]:
    """The network where the fit starts, in the coordinates of the probe's curvature."""
    structure, why = chosen
    shape = len(x), lin.function.output_shape(x).numel()
    outputs = torch.zeros(shape, dtype=lin.function.dtype, device=x.device)
    unit, params, memory = Gaussian(variance=1.0), settings.solving.params, settings.solving.memory
    try:
        found = compute_curvature(
            linearize(probe, params=params), (x, outputs), unit, structure, passes=Passes(memory=memory)
        )
    except MemoryBudgetError as error:
        if settings.solving.metric != "auto":
            raise
        return lin, "none", f"the metric is too large: {error.what}"
    # G + 0 I in its eigenbasis: so the run folder keeps it, and nothing is decomposed when it is opened
    return linearize(with_metric(lin.model, found.damped(0.0))), structure, why
