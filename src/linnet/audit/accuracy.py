"""Bounds on the effect of rounding errors on a fit."""

from __future__ import annotations

import torch

from linnet.errors import InputError
from linnet.fitting.accuracy import Accuracy as Accuracy
from linnet.fitting.accuracy import estimated, largest_base, measured_rounding, observed
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.params import instance
from linnet.tangent.modes import in_exact_mode

COLUMNS = 2048  # of the inverse of the kernel that are looked at


@in_exact_mode
@torch.no_grad()
def accuracy(fit: LinearFit | SoftmaxFit) -> Accuracy:
    """Bounds on the rounding errors of a fit's predictions, leave-one-out and influence.

    The rounding errors of the kernel are measured on four examples, which are computed in float64 as well,
    and propagated to first order. For a fit by conjugate gradients the distance to the solution by the kernel
    is added. A fit at a ridge too small for the type of its network is made in float64, or refused, when it
    is solved; a fit says so in ``summary()["reasons"]["precision"]``.

    Args:
        fit: A fit of ``linnet.fit``, of either loss.

    Returns:
        Estimates of the largest absolute errors, in units of the outputs. Errors are expected to be several
        times smaller. They are those of the approximation for the leave-one-out of a cross-entropy fit, which
        ``check_loo`` compares with refitting.

    Raises:
        InputError: If it is no fit, or one by conjugate gradients whose kernel exceeds the memory budget.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> x = torch.linspace(-1, 1, 6)[:, None] * torch.ones(1, 2)
        >>> found = accuracy(linnet.fit(linnet.linearize(net), (x, x[:, :1]), ridge=0.1))
        >>> found.sound, found.dtype
        (True, 'float32')
    """
    instance("fit", fit, (LinearFit, SoftmaxFit), "a fit", "make one with linnet.fit(lin, data)")
    rounding = measured_rounding(
        fit.module.function, fit.x, largest_base(fit), getattr(fit.system, "memory", None)
    )
    found = estimated(fit, rounding, observed(fit, max(1, min(fit.n, COLUMNS // fit.system.c))))
    if found is None:
        raise InputError(
            f"fit was solved by {fit.solver!r} with a kernel beyond the budget",
            expected="a fit whose kernel fits the memory budget",
            remedy='fit with solver="dual", or raise memory=',
        )
    return found
