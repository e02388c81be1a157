"""The kinds of fit that a run can hold, and their differences."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.linear.dual import DualSystem
from linnet.linear.iterative import Iterative
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.newton import KernelNewton, WeightNewton
from linnet.linear.normal_system import NormalSystem
from linnet.nested.nested_fit import NestedFit

Fit: TypeAlias = LinearFit | SoftmaxFit | NestedFit
PROBE = "linear probe"


def in_closed_form(fit: Fit) -> bool:
    """Whether leave-one-out, influence and variances take no iterations, of which each sample needs many."""
    return not isinstance(fit.system, Iterative | WeightNewton)


def loss_of(fit: Fit) -> str:
    """The loss of a fit, as ``linnet.fit`` calls it."""
    return "cross-entropy" if isinstance(fit, SoftmaxFit) else "squared"


def name_of(fit: Fit) -> str:
    """What a fit is called beside other methods: without its lower layers it is a linear probe."""
    is_probe = isinstance(fit, NestedFit) and not (fit.body_weight or fit.trained)
    return PROBE if is_probe else "linear fit"


def cross_fitted(fit: Fit) -> bool:
    """Whether head or network were fitted in folds, so that leave-one-out leaves out their part too."""
    return fit.held_out is not None


def temperatures_of(fit: Fit) -> tuple[float, float, float] | None:
    """T of the softmax, fitted to leave-one-out outputs with and without their variance, and its scale."""
    moderated, point = fit.temperature, fit.point_temperature
    return None if moderated is None or point is None else (moderated, point, fit.variance_scale)


def certificate_of(fit: Fit) -> str:
    """Name of the number that shows how exactly a fit was solved."""
    return "relative gradient" if isinstance(fit, SoftmaxFit) else "relative residual"


def contradiction(fit: Fit) -> Tensor:
    """The degree to which the fit of all other examples contradicts each label, (N,)."""
    outputs = fit.loo()
    if isinstance(fit, SoftmaxFit):
        outputs = outputs.sigmoid() if outputs.shape[1] == 1 else outputs.softmax(1)
    return (fit.targets.to(outputs) - outputs).square().sum(1).sqrt()


def equations_of(fit: Fit) -> KernelSystem | DualSystem | NormalSystem | KernelNewton | None:
    """The equations of a fit by a matrix with eigenvalues: the kernel, or JᵀJ."""
    system = fit.system
    if isinstance(system, Iterative | WeightNewton):
        return None
    if isinstance(system, DualSystem | NormalSystem | KernelNewton):
        return system
    form = system.kernel_form
    assert form is None or isinstance(form, KernelSystem)
    return form
