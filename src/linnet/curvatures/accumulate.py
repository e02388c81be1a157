"""The loop over data: accumulates all requested statistics from one capture of each batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from linnet.curvatures.chain import ChainPass
from linnet.curvatures.expectation import Expectation
from linnet.curvatures.output_layer import OutputLayer, add_output_layer, has_closed_form, remembered_inputs
from linnet.curvatures.stream import Batch, Batches
from linnet.curvatures.sums import Gradients, Sums, wide
from linnet.curvatures.totals import Totals
from linnet.distributed import all_sum, gathered
from linnet.errors import ModelError
from linnet.memory import Plan, require
from linnet.number_types import products_in
from linnet.progress import track
from linnet.tangent.batch import Inputs, tokens_counted
from linnet.tangent.capture import capture_bytes, capture_parts
from linnet.tangent.functional import Functional
from linnet.tangent.plan import expected_plan
from linnet.tangent.rules import Captured
from linnet.tangent.trace import Trace, forward_trace, weighed_trace
from linnet.unfinished import Checkpoint

TARGET = 64 << 20  # bytes of one captured batch: more does not run faster where that holds BUSY examples
BUSY = 64  # examples of a captured batch below which several threads wait for one another
MOST = 256 << 20  # bytes of one captured batch of BUSY examples
MOST_FIELDS = 96 << 20  # the same where receptive fields are held: few examples keep threads busy
LARGEST = 512  # examples of a captured batch, at most
LONG = 1 << 20  # bytes of one column's gradients from which a CPU does better with one column at a time
FEWEST = 8  # examples of a captured batch before its columns are taken in parts

Watch = Callable[[Tensor, Tensor | None], None]  # is shown outputs (N, ...) and checked labels


@dataclass(frozen=True)
class Chunks:
    """Numbers of examples and columns captured at once."""

    examples: int  # examples of a batch
    columns: int  # columns of the outputs' curvature


class Accumulator:
    """Statistics of several structures, fed batch by batch."""

    def __init__(
        self,
        function: Functional,
        expectation: Expectation,
        sums: Sequence[Sums],
        columns: int | None = None,
        few: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.function, self.expectation, self.sums = function, expectation, sums
        self.columns, self.few, self.watch = columns, few, watch
        self._closed = has_closed_form(function, expectation, sums)
        self.examples = torch.zeros((), dtype=torch.float64, device=function.device)
        self.types = function.precision
        own = {f"{i}/{name}": t for i, s in enumerate(sums) for name, t in s.tensors.items()}
        self._totals = Totals(own) if self.types.sums == "float64" else None

    @torch.no_grad()
    def add(self, batch: Batch, seen: ChainPass | None = None) -> None:
        """Add a batch to all statistics."""
        kept = contextlib.nullcontext() if self._totals is None else self._totals.batch()
        with kept, products_in(self.types, self.function.device):
            if seen is not None:
                self._add_columns(batch, seen)
            else:
                self._closed = self._closed and self._add_closed(batch)
                for part in () if self._closed else self._parts(batch):
                    self._add_columns(part)
        self.examples += batch.size

    def _add_closed(self, batch: Batch) -> bool:
        """Add a batch without columns, if the outputs are the layer's own result."""
        run = forward_trace(self.function, batch.x)
        require_finite_pass(run)
        layer, likelihood = self.sums[0].layer, self.expectation.likelihood
        a = remembered_inputs(self.function, run, layer.names)
        f, y = self._outputs(run.outputs.detach(), batch)
        if a is None or (f.ndim > 2 and likelihood.axis not in (-1, f.ndim - 1)):
            return False
        if f.ndim > 2 and tokens_counted(batch.x) is not None:  # whose positions do not all count
            return False
        kept = f.to(wide(f.dtype))
        add_output_layer(self.sums, OutputLayer(a, kept, y, likelihood, len(layer.names) > 1))
        self._show(f, y)
        return True

    def _parts(self, batch: Batch) -> list[Batch]:
        """A batch in parts that are differentiated at once."""
        size = self.few or batch.size
        if size >= batch.size:
            return [batch]
        return [batch.part(slice(start, start + size)) for start in range(0, batch.size, size)]

    def _outputs(self, flat: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Outputs in the network's own shape, and checked labels."""
        f = flat.view(-1, *self.function.output_shape(batch.x))
        return f, self.expectation.targets(f, batch.y)

    def _show(self, f: Tensor, y: Tensor | None) -> None:
        """Let the watcher see a batch."""
        if self.watch is not None:
            self.watch(f, y)

    def _add_columns(self, batch: Batch, seen: ChainPass | None = None) -> None:
        """Add a batch by the columns of its Λ."""
        marks: list[Tensor | None] = []
        widths: list[int] = []

        def columns(flat: Tensor) -> Tensor | list[Callable[[], Tensor]]:
            f, y = self._outputs(flat, batch)
            self._show(f, y)
            marks.append(None if y is None else self.expectation.likelihood.mask(y))
            parts = None if self.columns is None else self.expectation.parts(f, y, self.columns)
            if parts is not None:
                widths.append(self.expectation.count(f[:1], None if y is None else y[:1]))
                return [partial(_flat, part) for part in parts]
            u = self.expectation.columns(f, y, batch.index).flatten(2)
            widths.append(len(u))
            return u

        done, tokens = 0, tokens_counted(batch.x)
        for captured in (
            capture_parts(self.function, batch.x, columns, self.columns)
            if seen is None
            else seen.captures(columns, self.columns)
        ):
            if done == 0:
                require_finite_pass(captured)
            counts = None if marks[0] is None or bool(marks[0].all()) else marks[0]
            fresh, done = done == 0, done + captured.k
            gradients = Gradients(captured, fresh, done == widths[0], counts, tokens, widths[0])
            for statistic in self.sums:
                statistic.add(gradients)

    def fade(self, decay: float) -> None:
        """Let what was added so far count ``decay`` times as much: an exponential average."""
        # Sums and counts fade alike, so that means have no bias towards the zero they started from.
        for statistic in self.sums:
            statistic.fade(decay)
        if self._totals is not None:
            self._totals.fade(decay)
        self.examples *= decay

    def state(self) -> dict[str, Tensor]:
        """All tensors that add up, to save or to share; they are not copied."""
        if self._totals is not None:
            return {"examples": self.examples, **self._totals.state}
        tensors = {f"{i}/{name}": t for i, s in enumerate(self.sums) for name, t in s.tensors.items()}
        return {"examples": self.examples, **tensors}

    def _round(self) -> None:
        """Make the statistics those of the totals, where there are any."""
        if self._totals is not None:
            self._totals.round()

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over saved tensors."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self._round()

    def clear(self) -> None:
        """Set all statistics to zero."""
        for tensor in self.state().values():
            tensor.zero_()
        self._round()

    def share(self) -> None:
        """Add up the statistics of all processes."""
        all_sum(list(self.state().values()))
        self._round()


def _flat(part: Callable[[], Tensor]) -> Tensor:
    """Columns with their outputs flattened."""
    return part().flatten(2)


def require_runs(function: Functional, x: Inputs) -> Trace:
    """Raise if the network cannot run on x, or not with finite activations."""
    run = _traced(function, x)
    if run is None:
        function.check_runs(x)  # says why
        run = weighed_trace(function, x)
    require_finite_pass(run)
    return run


def _traced(function: Functional, x: Inputs) -> Trace | None:
    """A traced pass, if the network can run on x."""
    try:
        return weighed_trace(function, x)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None


def require_finite_pass(captured: Captured | Trace) -> None:
    """Raise if an activation or the outputs are not finite, naming the first layer that read one."""
    read = [(use, use.a) for use in captured.uses if use.a is not None and use.a.is_floating_point()]
    distinct = {(a.data_ptr(), a.shape, a.stride()): a for _, a in read}
    # A sum is finite only if all terms are, and reads them once; should it overflow, the terms are looked at.
    total = sum((a.sum(dtype=wide(a.dtype)) for a in distinct.values()), captured.outputs.sum())
    if bool(torch.isfinite(total)):
        return
    for use, a in read:
        if not bool(torch.isfinite(a).all()):
            raise ModelError(
                f"activations are NaN or infinite at the input of {', '.join(use.sources)}",
                expected="finite activations",
                remedy="check the scale of x and the layers before it",
            )
    if not bool(torch.isfinite(captured.outputs).all()):
        raise ModelError(
            "model returns NaN or infinite outputs on x",
            expected="finite outputs",
            remedy="check the weights and the scale of x",
        )


def plan_chunks(
    function: Functional,
    batch: Batch,
    columns: int,
    row_bytes: int,
    budget: int,
    most: int = LARGEST,
    *,
    fields: int = 0,
) -> Chunks:
    """Plan the number of examples and columns to capture at once."""
    most_held = MOST_FIELDS if fields else MOST
    target, most_bytes = (max(1, min(size, budget // 4)) for size in (TARGET, most_held))
    plan = expected_plan(function, batch.x)
    one = plan.bytes.gradients
    # what autograd keeps, and what a backward pass holds besides the gradients that are requested
    inputs, column = plan.bytes.saved + 3 * one, one + row_bytes
    held = inputs + column + fields * plan.bytes.fields
    alone = min(LARGEST, most, _examples(target, most_bytes, held))
    if columns > 1 and function.device.type == "cpu" and alone * column >= LONG:
        return Chunks(max(1, alone), 1)
    examples = _examples(target, most_bytes, inputs + columns * column)
    if examples >= FEWEST:
        return Chunks(max(1, min(LARGEST, examples)), columns)
    parts = max(1, (target // FEWEST - inputs) // max(1, column))
    return Chunks(FEWEST if parts > 1 else max(1, examples), max(1, min(columns, parts)))


def require_columns(function: Functional, batch: Batch, columns: int, outputs: int, budget: int) -> None:
    """Raise if one example does not fit: its columns, and its derivatives in one of them."""
    items = (
        ("columns of one example", columns * outputs * function.dtype.itemsize),
        ("derivatives of one example", capture_bytes(function, batch.x, 1)),
    )
    plan = Plan(f"curvature with {columns} columns of {outputs} outputs", budget, items)
    require(
        plan,
        {
            items[0][0]: ['pass expectation="mc"', "use fewer outputs with output="],
            items[1][0]: ["raise memory=", "use smaller inputs"],
        },
    )


def capped(chunks: Chunks, columns: int, outputs: int, item: int, budget: int, parts: bool) -> Chunks:
    """The sizes with as many examples as can have their columns (K, N, C) at once."""
    room, each = budget // 4, max(1, outputs * item)
    if parts:
        columns = min(chunks.columns, max(1, min(TARGET, room) // each))
        chunks = Chunks(chunks.examples, columns)
    return Chunks(min(chunks.examples, max(1, room // max(1, columns * each))), chunks.columns)


def _examples(target: int, most: int, each: int) -> int:
    """Examples of ``each`` bytes in ``target`` bytes; of large ones up to BUSY, in ``most`` bytes."""
    return max(target // max(1, each), min(BUSY, most // max(1, each)))


class Summation:
    """Passes over the data, one accumulator each, with progress and, where asked, a file to resume from."""

    def __init__(
        self,
        function: Functional,
        batches: Batches,
        expectation: Expectation,
        columns: int | None = None,
        checkpoint: Checkpoint | None = None,
        few: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.function, self.batches, self.expectation = function, batches, expectation
        self.columns, self.few, self.checkpoint, self.watch = columns, few, checkpoint, watch
        self._saved = None if checkpoint is None else checkpoint.read()
        own = 0 if self._saved is None else self._saved[0]
        shared = checkpoint is not None and batches.share.world > 1
        self._turns = gathered(own) if shared else [own]  # the pass that each process had come to
        self._finished: dict[str, Tensor] = {}
        self._data: dict[str, Tensor] = {}
        self._turn = 0

    def run(self, sums: Sequence[Sums], what: str) -> Accumulator:
        """One pass."""
        turn, self._turn = self._turn, self._turn + 1
        watch = self.watch if turn == 0 else None
        accumulator = Accumulator(self.function, self.expectation, sums, self.columns, self.few, watch)
        done = self._restore(accumulator, turn)
        if done is not None:
            found = done == 0  # what was summed before
            for batch in track(self.batches, what, total=self.batches.length()):
                if batch.index + 1 == done:
                    self._require_same_data(turn)
                    found = True
                elif batch.index >= done:
                    accumulator.add(batch)
                    self._note(turn, batch.index + 1, accumulator)
            if not found:
                self._require_same_data(turn, ended=True)
            if self.batches.share.world > 1:
                accumulator.share()
            self._data[f"{turn}/data"] = self.batches.passed()
        if self.checkpoint is not None:
            self._finished |= _prefixed(accumulator, turn)
            if done is not None:
                self.checkpoint.end_pass(turn + 1, {**self._finished, **self._data})
        return accumulator

    def finish(self) -> None:
        """The result is complete: the file is not needed any more."""
        if self.checkpoint is not None:
            self.checkpoint.remove()

    def _restore(self, accumulator: Accumulator, turn: int) -> int | None:
        """Batches that are done in this pass; ``None`` if all are, on all processes."""
        saved_turn, done, tensors = self._saved or (0, 0, {})
        prefix = f"{turn}/"
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        if own:
            accumulator.load(own)
        last = max(self._turns)
        if last <= turn:
            return done if saved_turn == turn else 0
        if min(self._turns) <= turn:  # a process died before it wrote the sums of all, which others have
            if self.batches.share.rank != self._turns.index(last):
                accumulator.clear()
            accumulator.share()
        if saved_turn > turn and "data" in own:
            self._data[f"{turn}/data"] = own["data"]
            self.batches.expect(own["data"])
        return None

    def _note(self, turn: int, done: int, accumulator: Accumulator) -> None:
        """Write what has been summed, now and then."""
        if self.checkpoint is not None:
            data = {**self._data, f"{turn}/data": self.batches.passed()}
            self.checkpoint.note(turn, done, {**self._finished, **_prefixed(accumulator, turn), **data})

    def _require_same_data(self, turn: int, ended: bool = False) -> None:
        """Raise if the batches that were summed before the interruption held other data, or more."""
        assert self._saved is not None
        assert self.checkpoint is not None
        before = self._saved[2][f"{turn}/data"]
        if ended:
            now = int(self.batches.passed()[0])
            self.checkpoint.refuse([f"data ({int(before[0])} examples had been summed, now there are {now})"])
        if not self.batches.has_passed(before):
            self.checkpoint.refuse(["data"])


def _prefixed(accumulator: Accumulator, turn: int) -> dict[str, Tensor]:
    """The tensors of one pass under names of their own."""
    return {f"{turn}/{name}": tensor for name, tensor in accumulator.state().items()}
