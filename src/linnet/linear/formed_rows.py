"""The rows of J, formed block by block, kept where that pays, and JᵀJ for many columns at once by them.

A JVP and a VJP a column cost five passes of the network; forming the C rows of an example costs 2C + 1 once
and 4CP operations a column after that, at the speed of large products. Blocks that fit the budget are kept,
so that every product after the first forms only the others. Rows that are short beside the cost of
differentiating an example, those of a sketched network, go to a temporary file where memory ends.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from linnet.distributed import Share, current, share_sum
from linnet.errors import ModelError
from linnet.linalg.operator import SymmetricOperator
from linnet.memory import Plan, parse_bytes
from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.capture import capture, capture_bytes
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional
from linnet.tangent.independence import require_own_rows
from linnet.tangent.jacobian import JacobianOperator
from linnet.tangent.modes import in_exact_mode

# -- cost ------------------------------------------------------------------------------------------
# Operations of a network, counted, not timed, so that plans are alike on every day.

NETWORK_PENALTY = 4.0  # a network's operations take about four times as long as those of one large product


def forward_operations(function: Functional, x: Inputs) -> float:
    """Operations of one example's forward pass; at least two for each weight."""
    if function.cache.operations is None:
        counter, one = FlopCounterMode(display=False), take(x, slice(0, 1))
        try:
            with counter:
                function.check_runs(one)
        except ModelError:  # the counter's hooks fail in networks that differentiate themselves
            function.check_runs(one)
        function.cache.operations = max(counter.get_total_flops(), 2 * function.space.dim)
    return float(function.cache.operations)


LARGEST = 64  # examples in a block, at most
FORMING = 0.15  # share of the budget for a block while it is formed
KEPT = 0.4  # share of the budget for blocks that are kept
OPERATIONS_PER_BYTE = 20.0  # that a core computes while a byte is read from a disk of about 1 GB a second
FREE = 0.5  # share of the free disk that a temporary file may take

Block = tuple[slice, Tensor]


def rows_bytes(rows: int, width: int, item: int, budget: int) -> int:
    """Bytes that :class:`FormedRows` may take: all rows and float64 copies of them, or its shares at most."""
    return min(rows * width * (item + 16), int((KEPT + FORMING) * budget))


class Rows(ABC):
    """The rows of J of n examples, block by block."""

    n: int  # number of examples

    @abstractmethod
    def __iter__(self) -> Iterator[Block]:
        """Each block's place among the examples, and its rows (n·C, P)."""

    def after(self, start: int, size: int) -> Iterator[Block]:
        """The blocks from an example on."""
        return ((place, block) for place, block in self if place.start >= start)

    def without(self, keep: Tensor) -> Rows:
        """The rows of some of the examples, in their order."""
        # keep (n,)
        return _Selected(self, keep)

    def joined(self, more: Rows) -> Rows:
        """These rows, then others."""
        return _Joined(self, more)


class FormedRows(Rows):
    """The rows of J(x) in blocks of examples."""

    def __init__(
        self,
        function: Functional,
        x: Inputs,
        outputs: int,
        memory: str | int | None = None,
        keep: bool = True,
        spool: bool = False,
    ) -> None:
        require_own_rows(function, x)
        self.function, self.x, self.outputs = function, x, outputs
        self.n = batch_size(x)
        budget = parse_bytes(memory, function.device)
        own = outputs * function.space.dim * function.dtype.itemsize
        transient = capture_bytes(function, take(x, slice(0, 1)), outputs) + 2 * own
        self.size = max(1, min(LARGEST, self.n, int(FORMING * budget) // max(transient, 1)))
        pays = spool and self._pays(own)
        self._room = int(KEPT * budget) // max(own, 1) if keep or pays else 0  # examples whose rows are kept
        self._spool = pays and self.n > self._room
        self._blocks: dict[int, Tensor] = {}
        self._file: BinaryIO | None = None
        self._written: dict[int, tuple[int, int]] = {}  # offset and rows of the blocks in the file

    def __getstate__(self) -> dict[str, Any]:
        """Copies form their blocks anew."""
        return {**self.__dict__, "_blocks": {}, "_file": None, "_written": {}}

    def _pays(self, own: int) -> bool:
        """Whether the rows of an example are sooner read than formed, and the disk has room for all."""
        operations = NETWORK_PENALTY * forward_operations(self.function, self.x) * (1 + 2 * self.outputs)
        free = shutil.disk_usage(tempfile.gettempdir()).free
        return own * OPERATIONS_PER_BYTE < operations and own * self.n < FREE * free

    def __iter__(self) -> Iterator[Block]:
        """Each block's place among the examples, and its rows (n·C, P)."""
        return self._from(0)

    def after(self, start: int, size: int) -> Iterator[Block]:
        """The blocks from an example on, of as many examples as those before it; those are not formed."""
        self.size = size
        return self._from(start)

    def _from(self, first: int) -> Iterator[Block]:
        """The blocks from an example on."""
        start = 0
        for part in split(self.x, self.size):
            place = slice(start, start + batch_size(part))
            if start < first:
                start = place.stop
                continue
            block = self._blocks.get(start)
            if block is None and start in self._written:
                block = self._read(start)
            if block is None:
                block = form_rows(self.function, part)
                if place.stop <= self._room:
                    self._blocks[start] = block
                elif self._spool:
                    self._write(start, block)
            yield place, block
            start = place.stop

    def _write(self, start: int, block: Tensor) -> None:
        """Append a block to the file; a disk that is full ends the spooling, not the work."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="linnet-rows-")  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            offset = self._file.seek(0, 2)
            self._file.write(block.detach().cpu().contiguous().view(torch.uint8).numpy().data)
            self._written[start] = offset, len(block)
        except OSError:
            self._spool = False

    def _read(self, start: int) -> Tensor:
        """A block from the file."""
        assert self._file is not None
        offset, rows = self._written[start]
        block = torch.empty(rows, self.function.space.dim, dtype=self.function.dtype)
        self._file.seek(offset)
        self._file.readinto(block.view(torch.uint8).numpy().data)  # type: ignore[attr-defined]
        return block.to(self.function.device)


class _Selected(Rows):
    """The rows of some of the examples."""

    # keep (n,)

    def __init__(self, rows: Rows, keep: Tensor) -> None:
        self.rows, self.keep, self.n = rows, keep.cpu(), int(keep.sum())

    def __iter__(self) -> Iterator[Block]:
        """The blocks of all, less the rows of the others."""
        start = 0
        for place, block in self.rows:
            own = self.keep[place]
            count = int(own.sum())
            if count:
                each = block.view(len(own), -1, block.shape[1])
                rows = block if count == len(own) else each[own.to(block.device)].flatten(0, 1)
                yield slice(start, start + count), rows
                start += count


class _Joined(Rows):
    """Rows one after the other."""

    def __init__(self, first: Rows, second: Rows) -> None:
        self.first, self.second, self.n = first, second, first.n + second.n

    def __iter__(self) -> Iterator[Block]:
        """The blocks of both."""
        yield from self.first
        for place, block in self.second:
            yield slice(place.start + self.first.n, place.stop + self.first.n), block


@torch.no_grad()
def form_rows(function: Functional, x: Inputs, cotangents: Tensor | Literal["full"] = "full") -> Tensor:
    """J(x), (n·C, P), or J(x)ᵀ times cotangents, (n·K, P), for examples that are differentiated at once."""
    # cotangents (K, n, C)
    captured = capture(function, x, cotangents)
    rows = captured.n * captured.k
    out = torch.empty(rows, function.space.dim, dtype=function.dtype, device=function.device)
    for name, place in function.space.slices.items():
        out[:, place] = captured.rows(name).reshape(rows, -1)
    return out


class FormedNormal(SymmetricOperator):
    """JᵀJ, P x P, by formed rows."""

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


# -- directions ------------------------------------------------------------------------------------
#
# A kernel that all outputs share, in weights: one direction for each derivative and each output.
#
#     Σ_i s Σ_h J_h(x) J_h(x_i)ᵀ β_ic = Σ_h J_h(x) δ_hc,        δ_hc = s Σ_i J_h(x_i)ᵀ β_ic
#
# The kernel takes the derivatives of all N training samples again for every prediction. The H·C
# directions δ take them once; a prediction then costs the derivatives of x alone.


class Directions:
    """The directions δ that the outputs of a shared kernel move along."""

    # beta (N, C)

    @in_exact_mode
    def __init__(
        self,
        function: Functional,
        heads: int,
        train: Inputs,
        beta: Tensor,
        scale: float,
        memory: str | int | None = None,
    ) -> None:
        self.function, self.heads, self.memory = function, heads, memory
        scaled = (scale * beta).to(function.dtype)
        self.values = scaled.new_zeros(heads, function.space.dim, beta.shape[1])
        for place, rows in self._rows(train):
            self.values.baddbmm_(rows.permute(1, 2, 0), scaled[place].expand(heads, -1, -1))

    @staticmethod
    def plan(
        function: Functional, heads: int, outputs: int, memory: str | int | None, copies: Sequence[str] = ()
    ) -> Plan:
        """The memory of the directions."""
        size = heads * outputs * function.space.dim * function.dtype.itemsize
        items = tuple((item, size) for item in ("directions", *copies))
        name = f"{heads * outputs} directions of {function.space.dim} weights"
        return Plan(name, parse_bytes(memory, function.device), items)

    @in_exact_mode
    def moved(self, x: Inputs) -> Tensor:
        """Σ_h J_h(x) δ_hc."""
        parts = [(rows.transpose(0, 1) @ self.values).double().sum(0) for _, rows in self._rows(x)]
        return torch.cat(parts)

    def by_output(self) -> list[Params]:
        """The directions by parameter name, for each output c one h after another."""
        columns = self.values.permute(2, 0, 1).flatten(0, 1)
        space = self.function.space
        return [{name: t.clone() for name, t in space.to_params(column).items()} for column in columns]

    def _rows(self, x: Inputs) -> Iterator[tuple[slice, Tensor]]:
        """The place of n examples, and J_h of each, (n, H, P)."""
        for place, rows in FormedRows(self.function, x, self.heads, self.memory, keep=False):
            yield place, rows.view(-1, self.heads, rows.shape[1])
