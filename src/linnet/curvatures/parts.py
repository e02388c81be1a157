"""A layer's block of a curvature matrix, and its rows among all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linnet.curvatures.layers import Layer
from linnet.distributed import current
from linnet.linalg.grouped import GroupedKronecker, eigenbases
from linnet.linalg.kronecker import Kronecker
from linnet.linalg.operator import ParameterSpace
from linnet.linalg.structured import StructuredOperator
from linnet.tree import node


@node()
@dataclass(frozen=True, eq=False)
class Part:
    """One layer's block."""

    layer: Layer  # the layer
    operator: StructuredOperator  # its block
    structure: str  # what the block is: "kfac", "ekfac", "kfra", "block", "diagonal", "full" or "low-rank"
    note: str = ""  # why it is not what was requested, or what is approximated beyond that; empty otherwise
    # number of inputs that the factor of the inputs is the mean of, where there is such a factor
    terms: float | None = None

    @property
    def joined(self) -> bool:
        """Whether the block's order is that of the matrix [W b]."""
        return self.structure in ("kfac", "ekfac", "kfra") and self.layer.factored

    def gather(self, v: Tensor, space: ParameterSpace) -> Tensor:
        """The rows of v (P, K) that belong to the layer, in the block's order."""
        pieces = [v[space.slices[name]] for name in self.layer.names]
        if not self.joined or not self.layer.biased:
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        shaped = [p.T.reshape(v.shape[1], *shape) for p, shape in zip(pieces, self.layer.shapes, strict=True)]
        return self.layer.join(shaped).flatten(1).T

    def scatter(self, rows: Tensor, out: Tensor, space: ParameterSpace) -> None:
        """Undo :meth:`gather`, into ``out`` (P, K)."""
        if self.joined and self.layer.biased:
            rows_, columns = self.layer.matrix
            matrices = rows.T.reshape(rows.shape[1], self.layer.groups, rows_, columns)
            pieces = [piece.flatten(1).T for piece in self.layer.part(matrices)]
        else:
            sizes = [torch.Size(shape).numel() for shape in self.layer.shapes]
            pieces = list(rows.split(sizes))
        for name, piece in zip(self.layer.names, pieces, strict=True):
            out[space.slices[name]] = piece


def in_eigenbases(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The same blocks with Kronecker products by their eigenvectors."""
    # Inside `linnet.distributed.sharing` each factor is decomposed by one process for all.
    products = [part.operator for part in parts if isinstance(part.operator, Kronecker | GroupedKronecker)]
    made = iter(eigenbases(products, current()))
    return tuple(
        replace(part, operator=next(made))
        if isinstance(part.operator, Kronecker | GroupedKronecker)
        else part
        for part in parts
    )
