"""Exact blocks of the Gauss-Newton matrix, Σ_n Σ_k (∂ u_nkᵀf / ∂θ)(∂ u_nkᵀf / ∂θ)ᵀ.

The parameters of one layer give a block of the block-diagonal matrix, all parameters the full matrix.
"""

from __future__ import annotations

import torch

from linnet.curvatures.layers import Layer
from linnet.curvatures.sums import Gradients, Sums, layer_rows, second_moment, wide
from linnet.linalg.structured import Dense


class BlockSums(Sums):
    """Σ of outer products of the per-example gradients of a layer."""

    def __init__(self, layer: Layer, dtype: torch.dtype, device: torch.device) -> None:
        self.layer = layer
        self.tensors = {"products": torch.zeros(layer.size, layer.size, dtype=wide(dtype), device=device)}

    def add(self, gradients: Gradients) -> None:
        """Add a batch."""
        rows = layer_rows(gradients.captured, self.layer).flatten(0, 1)
        self.tensors["products"] += second_moment(rows.mT.to(self.tensors["products"].dtype))

    def block(self) -> Dense:
        """The matrix."""
        return Dense(self.tensors["products"], name=f"curvature of {self.layer.name}")
