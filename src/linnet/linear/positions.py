"""The cross-entropy of a class at every position, in as few numbers a position as the network allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.likelihoods.discrete import Categorical
from linnet.tangent.batch import IGNORED, Inputs
from linnet.tangent.cut import Cut
from linnet.tangent.functional import Functional

ROWS_BYTES = 64 << 20  # of the outputs of some positions that are held at once


@dataclass(frozen=True, eq=False)
class PositionLosses:
    """The cross-entropy of outputs (N, ..., C), or of what a linear layer makes of states (N, ..., D)."""

    # f below are the outputs, or the states where there is a layer

    function: Functional  # the network with its last layer, of the inputs of the problem
    of_outputs: Categorical  # of the network's outputs
    layer: nn.Linear | None  # the last layer, where its weights do not vary
    cut: Cut | None  # how the inputs of the problem come from those of the whole network

    def inputs(self, x: Inputs) -> Inputs:
        """Inputs of the whole network as those of the problem."""
        return x if self.cut is None else self.cut.inputs(x)

    def original(self, x: Inputs) -> Inputs:
        """And back."""
        return x if self.cut is None else self.cut.original(x)

    def outputs(self, f: Tensor) -> Tensor:
        """The network's outputs, in its type."""
        return f.to(self.function.dtype) if self.layer is None else self._of_rows(f)

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """Σ_t ℓ(f_t, y_t) of labels (N, ...), (N,), float64."""
        if self.layer is None:
            return self.of_outputs.nll(f, y)
        found = torch.zeros(y.shape, dtype=torch.float64, device=f.device)
        for at, rows, labels in self._counted(f, y):
            found[at] = ROWS.nll(self._of_rows(rows), labels).double()
        return found.flatten(1).sum(1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """g, or Wᵀg, of the shape of f; zero where no label counts."""
        if self.layer is None:
            return self.of_outputs.gradient(f, y)
        found = torch.zeros_like(f)
        for at, rows, labels in self._counted(f, y):
            found[at] = (ROWS.gradient(self._of_rows(rows), labels) @ self.layer.weight).to(f)
        return found

    def product(self, f: Tensor, v: Tensor, y: Tensor) -> Tensor:
        """Λ v, or WᵀΛW v, for v (K, *shape of f)."""
        if self.layer is None:
            return self.of_outputs.product(f, v, y)
        found, moved = torch.zeros_like(v), v.movedim(0, -2)  # (N, ..., K, D)
        weight = self.layer.weight
        for at, rows, _ in self._counted(f, y, len(v)):
            along = moved[at].movedim(-2, 0).to(weight) @ weight.T
            curved = ROWS.product(self._of_rows(rows), along) @ weight
            found.movedim(0, -2)[at] = curved.movedim(0, -2).to(v)
        return found

    def _of_rows(self, rows: Tensor) -> Tensor:
        """W h + b."""
        assert self.layer is not None
        return F.linear(rows.to(self.layer.weight), self.layer.weight, self.layer.bias)

    def _counted(
        self, f: Tensor, y: Tensor, vectors: int = 0
    ) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
        """The positions that count, some at a time: their places, states and labels."""
        assert self.layer is not None
        places, weight = (y != IGNORED).nonzero(), self.layer.weight
        each = len(weight) * weight.element_size() * (4 + 3 * vectors)
        for some in places.split(max(1, ROWS_BYTES // each)):
            at = some.unbind(1)
            yield at, f[at], y[at]


ROWS = Categorical()  # of rows of outputs
