"""Checks of the optimizer, the loss and the gradients in iterative linearization."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from linnet.distributed import all_sum, world
from linnet.errors import InputError, NumericalError
from linnet.params import call, instance, refuse

INDEPENDENT = (
    "the loss that closure returned does not depend on its module",
    "a loss of closure(module), computed from module(x) with gradients on",
    "call the module that the closure is given, not the network, and detach nothing",
)


def made_optimizer(
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer], parameters: dict[str, nn.Parameter]
) -> Optimizer:
    """The optimizer of some parameters, once it is known to train exactly these."""
    expected = "a function from a list of parameters to an optimizer"
    remedy = "pass make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1)"
    if not callable(make_optimizer):
        refuse("make_optimizer", make_optimizer, expected, remedy)
    made = call("make_optimizer", make_optimizer, [*parameters.values()], expected=expected, remedy=remedy)
    optimizer: Optimizer = instance("make_optimizer(...)", made, Optimizer, "a torch.optim.Optimizer", remedy)
    used = {id(p): tuple(p.shape) for group in optimizer.param_groups for p in group["params"]}
    ours = {id(p): name for name, p in parameters.items()}
    others = [shape for key, shape in used.items() if key not in ours]
    missing = [name for key, name in ours.items() if key not in used]
    if others or missing:
        found = [f"has {len(others)} others, one of shape {others[0]}"] if others else []
        found += [f"lacks {missing[0]!r} ({len(missing)} in all)"] if missing else []
        raise InputError(
            f"the optimizer that make_optimizer returned {' and '.join(found)}",
            expected=f"exactly the {len(ours)} parameters it was given",
            remedy="make it from its argument, and choose parameters with params=",
        )
    return optimizer


def evaluates(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step needs the closure, as that of LBFGS does."""
    parameters = inspect.signature(type(optimizer).step).parameters.values()
    return any(p.name == "closure" and p.default is inspect.Parameter.empty for p in parameters)


def checked_loss(loss: Any, steps: int) -> Tensor:
    """A closure's loss, if it can be differentiated."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(
            f"closure returned {kind}",
            expected="the loss, a tensor with one floating point number",
            remedy="end it with return loss, summed or averaged over the batch",
        )
    if not loss.requires_grad:
        raise InputError(*INDEPENDENT)
    value = float(loss.detach())
    if not math.isfinite(value):
        raise NumericalError(
            f"the loss is {value:g} after {steps} steps",
            expected="a finite loss",
            remedy="lower the learning rate; the weights are those before this step",
        )
    return loss


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Make the gradients their mean over all processes, zero where one process has none."""
    gradients = []
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients.append(p.grad)
    all_sum(gradients)
    for gradient in gradients:
        gradient /= world()[1]
