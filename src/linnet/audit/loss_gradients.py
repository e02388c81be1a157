"""Gradients of the loss of every example of a stream, and the stream itself, batch by batch.

The gradient of example i is J(x_i)ᵀ u_i with u_i that of its negative log-likelihood in the outputs, summed
over the positions that have a label. In the coordinates of a sketched network it is formed along its D
directions from captured inputs and output gradients, Q_Lᵀ (Σ_s g_s a_sᵀ) Q_R, with one backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.stream import usable
from linnet.likelihoods.likelihood import Likelihood
from linnet.memory import parse_bytes
from linnet.tangent.batch import (
    Inputs,
    batch_size,
    check_finite,
    example_shapes,
    require_some,
    split,
    take,
)
from linnet.tangent.capture import capture, capture_bytes
from linnet.tangent.door import answers, taken
from linnet.tangent.functional import Functional
from linnet.tangent.gather import pairs, require_targets
from linnet.tangent.independence import require_own_rows
from linnet.tangent.loaders import DataNotes
from linnet.tangent.output_scale import warn_of_scale
from linnet.tree import map_tensors

Pair = tuple[Inputs, Tensor]

LARGEST = 64  # examples differentiated at once, at most
SHARE = 0.5  # of the budget that one captured batch may take


def stream(data: Any, function: Functional) -> Iterator[Pair]:
    """The batches of any kind of data, one after the other; nothing is gathered."""
    said = DataNotes()
    for i, (inputs, targets) in enumerate(pairs(data, said)):
        while said.warnings:
            warnings.warn(said.warnings.pop(), stacklevel=2)
        y, name = answers(targets), f"batch {i} of data"
        x = taken(function, inputs)
        require_some(x, name)
        require_targets(x, y, name)
        check_finite(x, "x")
        check_finite(y, "y")
        yield x, y


class LossGradients:
    """The gradient of the loss of every example, in the parameters of a network."""

    def __init__(self, function: Functional, likelihood: Likelihood, memory: str | int | None = None) -> None:
        self.function, self.likelihood = function, likelihood
        self._budget = parse_bytes(memory, function.device)
        self._sizes: dict[object, int] = {}  # examples at once, by their shapes

    def rows(self, x: Inputs, y: Tensor) -> Tensor:
        """The gradients of a batch, (n, P)."""
        device = self.function.device
        x, y = map_tensors(lambda t: usable(t, device), x), usable(y, device)
        size = self._size(x)
        pieces = zip(split(x, size), y.split(size), strict=True)
        return torch.cat([self._of_piece(part, labels) for part, labels in pieces])

    def _of_piece(self, x: Inputs, y: Tensor) -> Tensor:
        """The gradients of examples that are differentiated at once."""
        function, n = self.function, batch_size(x)
        shape = function.output_shape(x)

        def cotangents(outputs: Tensor) -> Tensor:
            f = outputs.view(n, *shape)
            u: Tensor = self.likelihood.gradient(f, self.likelihood.check(f, y))
            return u.reshape(1, n, -1).to(outputs.dtype)

        captured = capture(function, x, cotangents)
        return torch.cat([captured.rows(name).reshape(n, -1) for name in function.names], 1)

    def _size(self, x: Inputs) -> int:
        """Examples at once; a kind of batch is looked at when it first comes."""
        kind = example_shapes(x)
        if kind not in self._sizes:
            self.function.output_shape(x)  # raises in words where the network cannot run
            require_own_rows(self.function, x)
            if not self._sizes:
                warn_of_scale(self.function, self.likelihood, x)
            own = capture_bytes(self.function, take(x, slice(0, 1)), 1)
            self._sizes[kind] = max(1, min(LARGEST, int(SHARE * self._budget) // max(own, 1)))
        return self._sizes[kind]
