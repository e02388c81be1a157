"""How far an answer may be from the one that it stands for: by rounding, by a sketch.

With the solution δ = H ε of the sketch, β = (r − Jδ)/ρ and the part of Jᵀβ outside the sketch,
e = (I − HHᵀ) Jᵀβ, the gradient of the whole objective at δ is −ρ e, so that the optimum δ* of all weights has

    ‖δ* − δ‖ ≤ ‖e‖,        |f*(x) − f(x)| ≤ √v(x) ‖e‖

with v(x) the posterior variance of an output at x in units of the prior. It is bounded from both sides:
by what it would be if the weights outside the sketch were known, and by the error of the sketched estimate,

    v̂(x)  ≤  v(x)  ≤  v̂(x) + ‖(I − HHᵀ)(J(x)ᵀ − Jᵀ w(x))‖²,        w(x) = Φ (ΦᵀΦ + ρI)⁻¹ φ(x)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.audit.predictors import check_fitted
from linnet.errors import InputError
from linnet.fitting.accuracy import Accuracy as Accuracy
from linnet.fitting.accuracy import estimated, largest_base, measured_rounding, observed
from linnet.fitting.arguments import checked_inputs
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.sketch import SketchedNetwork
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.fitting.solved_fit import unweighed
from linnet.linalg.operator import LinearOperator
from linnet.linear.system import System
from linnet.params import instance
from linnet.shown import Record
from linnet.tangent.batch import Inputs, batch_size
from linnet.tangent.coordinates import moved_network
from linnet.tangent.functional import Functional
from linnet.tangent.jacobian import JacobianOperator
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
    expected = "a fit of linnet.fit; those of linnet.adapt are solved in float64"
    kinds = LinearFit, SoftmaxFit
    instance("fit", check_fitted(fit), kinds, expected, "make one with linnet.fit(lin, data)")
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


@dataclass(frozen=True, repr=False)
class SketchError(Record):
    """Bounds on the distance of a sketched fit from that of all weights.

    Args:
        residual: Relative residual of the equations of all weights, ‖(JᵀJ + ρI)δ − Jᵀr‖ / ‖Jᵀr‖.
        weights: Bound on ‖δ* − δ‖, relative to ‖δ‖.
        lower: Posterior variance of each output that is at least there, (T, C); ``None`` without inputs.
        upper: And at most, (T, C).
        predictions: Bound on the change of each output, (T, C).
    """

    residual: float
    weights: float
    lower: Tensor | None = None
    upper: Tensor | None = None
    predictions: Tensor | None = None


@in_exact_mode
@torch.no_grad()
def sketch_error(fit: LinearFit, x: Inputs | None = None) -> SketchError:
    """Bounds on the distance of a sketched fit from the fit of all weights, at the same ridge and noise.

    They hold for every data set and network, and are pessimistic: what is outside the sketch is taken at its
    worst. It takes two passes of gradients over the training data, and one more for each output in ``x``.
    ``solver=CG(preconditioner=Sketch(...))`` at the same ridge goes the rest of the way.

    Args:
        fit: A fit with ``solver="sketch"``, or of a network that :func:`linnet.with_sketch` made, with
            orthonormal directions.
        x: T examples whose variances and predictions are bounded; few of them.

    Returns:
        The bounds.

    Raises:
        InputError: If it is no fit of a sketch with orthonormal directions.

    Source:
        The minimality of the posterior variance among linear estimates; Rasmussen and Williams 2006,
        section 2.2.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        >>> x = torch.linspace(-1, 1, 40).view(20, 2)
        >>> data = x, x.prod(1, keepdim=True)
        >>> fit = linnet.fit(linnet.linearize(net), data, ridge=0.1, solver=linnet.fitting.Sketch(dim=19))
        >>> bool((sketch_error(fit, x[:3]).lower <= sketch_error(fit, x[:3]).upper).all())
        True
    """
    instance("fit", fit, LinearFit, "a sketched fit", 'make one with linnet.fit(lin, data, solver="sketch")')
    small, inner = fit.module.model, moved_network(fit.module.function)
    if not isinstance(small, SketchedNetwork) or inner is None or not small.orthonormal:
        raise InputError(
            f"fit was solved by {fit.solver!r} in other coordinates than orthonormal directions",
            expected="a fit of a sketch along the eigenvectors of a curvature",
            remedy='make one with linnet.fit(lin, data, solver="sketch")',
        )
    unweighed(fit, "sketch_error")
    system, jacobian = fit.system, JacobianOperator(inner, fit.x, fit.system.c)
    back = jacobian.T
    outside = _outside(small, inner, back.mm(system.beta.reshape(-1, 1).to(inner.dtype)))
    right = back.mm(system.residual.reshape(-1, 1).to(inner.dtype))
    e = float(outside.norm())
    tiny = torch.finfo(right.dtype).tiny
    residual = system.ridge * e / max(float(right.norm()), tiny)
    # the directions are orthonormal, so that ‖δ‖ = ‖ε‖
    found = SketchError(residual, e / max(float(system.delta.norm()), tiny))
    if x is None:
        return found
    x = checked_inputs(fit.module, x)
    within = system.covariance(x).diagonal(dim1=1, dim2=2)  # v̂, (T, C)
    beyond = _beyond(system, small, inner, x, back)
    scale = fit.noise / fit.ridge
    bound = (within + beyond).clamp_min(0).sqrt() * e
    return SketchError(
        found.residual, found.weights, scale * within, scale * (within + beyond), bound.to(within)
    )


def _outside(small: SketchedNetwork, inner: Functional, v: Tensor) -> Tensor:
    """(I − HHᵀ) v for columns (P, M)."""
    along = small.projected(inner.space.to_params(v))
    inside = [inner.space.to_flat(small._moved(column)) for column in along.T]
    return v - torch.stack(inside, 1).to(v)


def _beyond(
    system: System, small: SketchedNetwork, inner: Functional, x: Inputs, back: LinearOperator
) -> Tensor:
    """‖(I − HHᵀ)(J(x)ᵀ − Jᵀ w(x))‖² of every output, (T, C)."""
    t, c = batch_size(x), system.c
    weights = torch.cat([part.flatten(2) for part in system.cross(x)])  # w, (T, C, N·C)
    unit = torch.eye(t * c, dtype=inner.dtype, device=inner.device)
    own = JacobianOperator(inner, x, c).T
    found = []
    for i in range(t * c):
        w = weights.reshape(t * c, -1)[i, :, None].to(inner.dtype)
        found.append(_outside(small, inner, own.mm(unit[:, i, None]) - back.mm(w)).double().square().sum())
    return torch.stack(found).view(t, c)
