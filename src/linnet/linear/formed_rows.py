"""JᵀJ for many columns at once: the rows of J formed block by block, and two matrix products with each block.

A JVP and a VJP a column cost five passes of the network; forming the C rows of an example costs 2C + 1 once
and 4CP operations a column after that, at the speed of large products. Blocks that fit the budget are kept,
so that every product after the first forms only the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from linnet.distributed import Share, current, share_sum
from linnet.linalg.operator import LinearOperator
from linnet.memory import parse_bytes
from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.capture import capture, capture_bytes
from linnet.tangent.functional import Functional
from linnet.tangent.independence import require_own_rows
from linnet.tangent.jacobian import JacobianOperator

LARGEST = 64  # examples in a block, at most
KEPT = 0.4  # share of the budget for blocks that are kept


class FormedRows:
    """The rows of J(x) in blocks of examples.

    Args:
        function: The network.
        x: N examples.
        outputs: C.
        memory: Budget; by default half of what is available.
        keep: Whether blocks are kept where they fit.
    """

    def __init__(
        self,
        function: Functional,
        x: Inputs,
        outputs: int,
        memory: str | int | None = None,
        keep: bool = True,
    ) -> None:
        require_own_rows(function, x)
        self.function, self.x, self.outputs = function, x, outputs
        self.n = batch_size(x)
        budget = parse_bytes(memory, function.device)
        own = outputs * function.space.dim * function.dtype.itemsize
        transient = capture_bytes(function, take(x, slice(0, 1)), outputs) + 2 * own
        self.size = max(1, min(LARGEST, self.n, int(0.15 * budget) // max(transient, 1)))
        self._room = int(KEPT * budget) // max(own, 1) if keep else 0  # examples whose rows are kept
        self._blocks: dict[int, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Each block's place among the examples, and its rows (n·C, P)."""
        start = 0
        for part in split(self.x, self.size):
            place = slice(start, start + batch_size(part))
            block = self._blocks.get(start)
            if block is None:
                block = form_rows(self.function, part)
                if place.stop <= self._room:
                    self._blocks[start] = block
            yield place, block
            start = place.stop


@torch.no_grad()
def form_rows(function: Functional, x: Inputs) -> Tensor:
    """J(x), (n·C, P), for examples that are differentiated at once.

    Args:
        function: The network.
        x: n examples.

    Returns:
        Every output's gradient, example by example.
    """
    captured = capture(function, x)
    n, c = captured.outputs.shape
    out = torch.empty(n * c, function.space.dim, dtype=function.dtype, device=function.device)
    for name, place in function.space.slices.items():
        out[:, place] = captured.rows(name).reshape(n * c, -1)
    return out


class FormedNormal(LinearOperator):
    """JᵀJ, P x P, by formed rows.

    Args:
        jacobian: J.
        memory: Budget.
    """

    def __init__(self, jacobian: JacobianOperator, memory: str | int | None = None) -> None:
        self.jacobian, self.memory = jacobian, memory
        self.rows = FormedRows(jacobian.function, jacobian.x, jacobian.outputs, memory)
        self._own: dict[Share, FormedRows | tuple[()]] = {Share(): self.rows}
        self.shape = (jacobian.shape[1], jacobian.shape[1])
        self.dtype, self.device, self.space = jacobian.dtype, jacobian.device, jacobian.space

    def mm(self, v: Tensor) -> Tensor:
        """Σ over blocks of Rᵀ(R v)."""
        total = torch.zeros_like(v, memory_format=torch.contiguous_format)
        for _, rows in self._shared(current()):
            total.addmm_(rows.T, rows @ v)
        share_sum([total])
        return total

    def _shared(self, share: Share) -> FormedRows | tuple[()]:
        """The rows of the examples that this process has a share in."""
        if share not in self._own:
            jacobian = self.jacobian
            x = take(jacobian.x, share.part(self.rows.n))
            own = FormedRows(jacobian.function, x, jacobian.outputs, self.memory) if batch_size(x) else ()
            self._own[share] = own
        return self._own[share]

    @property
    def T(self) -> LinearOperator:
        """Itself."""
        return self
