"""The two kinds of fit that a run can hold, and their differences."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.linear.dual import DualSystem
from linnet.linear.iterative import Iterative
from linnet.linear.softmax_dual import SoftmaxDual
from linnet.linear.system import System
from linnet.linear.targets import OneHot
from linnet.nested.nested_fit import NestedFit
from linnet.predictive.temperature import fit_temperature, probabilities

Fit: TypeAlias = LinearFit | SoftmaxFit | NestedFit


def loss_of(fit: Fit) -> str:
    """The loss of a fit, as ``linnet.fit`` calls it."""
    return "cross-entropy" if isinstance(fit, SoftmaxFit) else "squared"


def cross_fitted(fit: Fit) -> bool:
    """Whether head or network were fitted in folds, so that leave-one-out leaves out their part too."""
    return fit.held_out is not None


def certificate_of(fit: Fit) -> str:
    """Name of the number that shows how exactly a fit was solved."""
    return "relative gradient" if isinstance(fit, SoftmaxFit) else "relative residual"


def known_outputs(fit: Fit, rows: slice) -> Tensor:
    """Outputs on some training examples, from the saved solution and without the network.

    Args:
        fit: The fit.
        rows: The examples.

    Returns:
        (k, C), in float64.
    """
    if isinstance(fit, SoftmaxFit):
        return fit.system.outputs[rows].double()
    # f = t − ρβ
    return (fit.targets.double() - fit.ridge * fit.system.beta.double())[rows]


def contradiction(fit: Fit) -> Tensor:
    """The degree to which the fit of all other examples contradicts each label.

    Args:
        fit: A dual fit of classes.

    Returns:
        The norm of target less leave-one-out output, or of label less leave-one-out probability, (N,).
    """
    outputs = fit.loo()
    if isinstance(fit, SoftmaxFit):
        outputs = outputs.sigmoid() if outputs.shape[1] == 1 else outputs.softmax(1)
    return (fit.targets.to(outputs) - outputs).square().sum(1).sqrt()


def loo_log_loss(fit: Fit) -> float:
    """Log loss of the leave-one-out outputs; those of the squared loss at their best temperature.

    Args:
        fit: A dual fit of classes.

    Returns:
        The mean over the training examples, in nats.
    """
    outputs, labels = fit.loo().double(), fit.labels
    assert labels is not None
    temperature = 1.0 if isinstance(fit, SoftmaxFit) else fit_temperature(outputs, labels)
    p = probabilities(outputs, None, temperature).clamp_min(1e-300)
    return -float(p.gather(1, labels[:, None]).log().mean())


def solved_anew(fit: Fit) -> Tensor | None:
    """Outputs on the training examples of a solution from scratch, with the same kernel.

    Args:
        fit: The fit.

    Returns:
        Their difference from the outputs of the fit, flat; ``None`` for a fit by conjugate gradients.
    """
    system = fit.system
    if isinstance(system, SoftmaxDual):
        return (
            SoftmaxDual(system.kernel, system.base, system.loss, fit.ridge).outputs - system.outputs
        ).flatten()
    dual = dual_of(fit)
    if dual is None or isinstance(system, Iterative):
        return None
    anew = DualSystem(dual.kernel, dual.residual, fit.ridge)
    # outputs on the training samples are f₀ + Kβ
    change: Tensor = dual.kernel @ (anew.beta - system.beta).reshape(len(dual.kernel), -1)
    return change.flatten()


def dual_of(fit: Fit) -> DualSystem | None:
    """The equations of a fit of the squared loss by its kernel.

    Args:
        fit: The fit.

    Returns:
        The equations; ``None`` for the cross-entropy, and where the kernel does not fit the memory.
    """
    system = fit.system
    if isinstance(system, DualSystem):
        return system
    return system.dual if isinstance(system, System) else None


def kernel_and_residual(fit: Fit) -> tuple[Tensor, Tensor] | None:
    """K and t − f₀ (or y − p at δ = 0) of a dual fit, for the spectrum."""
    system = fit.system
    if isinstance(system, SoftmaxDual):
        return system.kernel, -system.loss.gradient(system.base)
    dual = None if isinstance(system, Iterative) else dual_of(fit)
    return None if dual is None else (dual.kernel, dual.residual)


def refit_arguments(fit: Fit) -> dict[str, object]:
    """Arguments of ``linnet.fit`` that make a fit anew: targets and loss."""
    if isinstance(fit, SoftmaxFit):
        return {"loss": "cross-entropy", "targets": fit.targets}
    return {"targets": OneHot(fit._targets.scale)}
