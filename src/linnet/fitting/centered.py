"""A head whose outputs start at zero while the layers below keep the derivatives of a probe.

A linear probe fits its own training labels almost perfectly, so what is left of them, t − f₀, is tiny, and
leave-one-out on it would say that nothing remains to be learned. The head is linear in its weights, so

    f₀(x) + J(x) δ  =  J_body(x) δ_body + φ(x)ᵀ(W₀ + δ_W)

is fitted as well with the ridge on W₀ + δ_W in place of δ_W: the head is drawn to zero and not to the probe.
In the fit this is f₀ ≡ 0 with the same J. The labels enter f₀ no more, but through W₀ they still enter
the derivatives of the layers below, so leave-one-out stays optimistic where samples are fewer than features.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from linnet.fitting.last_layer import RECORD, last_linear, replace_module
from linnet.tangent.functional import copied


class CenteredLinear(nn.Module):
    """A linear layer less its own value at the start, so that it begins at zero."""

    # W φ + b − (W₀ φ + b₀), where no derivative passes through the second term.

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())
        self.register_buffer("weight_origin", layer.weight.detach().clone())
        self.register_buffer("bias_origin", layer.bias.detach().clone())

    def forward(self, phi: Tensor) -> Tensor:
        """The layer's change since the start, (..., C)."""
        # phi (..., D)
        origin = F.linear(phi.detach(), self.weight_origin, self.bias_origin)  # type: ignore[arg-type]
        return F.linear(phi, self.weight, self.bias) - origin


def with_centered_head(model: nn.Module) -> nn.Module:
    """A copy of a network whose outputs are zero, with the derivatives that it has."""
    clone = copied(model)
    name, layer = last_linear(clone)
    replace_module(clone, name, CenteredLinear(layer))
    if hasattr(clone, RECORD) and "folds" not in getattr(clone, RECORD):
        delattr(clone, RECORD)  # the labels are in the outputs no more
    return clone
