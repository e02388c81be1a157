"""Networks with a fit's δ in their weights, and how far they are from the linear model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnet.fitting.arguments import BATCH
from linnet.fitting.export import own_network
from linnet.shown import Record
from linnet.tangent.batch import Inputs, batch_size, split
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode


@dataclass(frozen=True, eq=False, repr=False)
class Merged(Record):
    """A network at θ₀ + δ, and its distance from the linear model there."""

    network: nn.Module  # the user's network with its new weights, in evaluation mode
    # ‖f(θ₀ + δ) − f_lin‖ / ‖f_lin − f₀‖ over the examples: 0 where the network is linear so far, 1 where what
    # the linear model neglects is as large as what it predicts
    gap: float
    agreement: float | None  # share of examples of which both predict the same class; ``None`` for regression
    examples: int

    def _shown(self) -> dict[str, Any]:
        known = {"network": type(self.network).__name__, "linearity gap": self.gap}
        same = {} if self.agreement is None else {"the same class": self.agreement}
        return known | same | {"examples": self.examples}

    def __str__(self) -> str:
        same = "" if self.agreement is None else f", the same class for {100 * self.agreement:.1f} %"
        return f"linearity gap {self.gap:.2g} on {self.examples:,} examples{same}"


@in_exact_mode
@torch.no_grad()
def merged_network(module: Linearized, x: Inputs, classes: int | None) -> Merged:
    """The network at θ₀ + δ."""
    function, delta = own_network(module)
    network = copy.deepcopy(function.model)
    own = dict(network.named_parameters())
    for name, change in delta.items():
        own[name].add_(change)
        own[name].requires_grad_(True)
    network.to((module.function.source or module.function).dtype)  # a fit may have gone on in float64
    moved = {name: t + delta[name] for name, t in function.theta.items()}

    def both(part: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        linear = module(part)
        n = len(linear)
        return linear.reshape(n, -1), module.base(part), function.flat(moved, part)

    return compared(network, both, x, classes)


def compared(
    network: nn.Module,
    outputs: Callable[[Inputs], tuple[Tensor, Tensor, Tensor]],
    x: Inputs,
    classes: int | None,
) -> Merged:
    """A network beside the linear model."""
    # outputs (N, C)
    missed, predicted, same = 0.0, 0.0, 0
    for part in split(x, BATCH):
        linear, base, reached = outputs(part)
        missed += float((reached - linear).double().square().sum())
        predicted += float((linear - base).double().square().sum())
        same += int((_class(reached) == _class(linear)).sum())
    n = batch_size(x)
    gap = 0.0 if missed == 0 else (missed / max(predicted, 1e-300)) ** 0.5
    return Merged(network, gap, None if classes is None else same / n, n)


def _class(outputs: Tensor) -> Tensor:
    """The class of the largest output; of one output, its sign."""
    return outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
