"""The loop over data: accumulates all requested statistics from one capture of each batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.curvatures.chain import ChainPass
from linnet.curvatures.expectation import Expectation
from linnet.curvatures.kfac import EigenvalueSums, KroneckerSums
from linnet.curvatures.moments import InputMoment
from linnet.curvatures.stream import Batch, Batches
from linnet.curvatures.sums import BlockSums, DiagonalSums, Gradients, Sums, Totals, second_moment
from linnet.distributed import all_sum, gathered
from linnet.errors import ModelError
from linnet.likelihoods.custom import Custom
from linnet.likelihoods.likelihood import Likelihood
from linnet.memory import Plan, require
from linnet.number_types import products_in, wide_type
from linnet.progress import track
from linnet.tangent.batch import Inputs, tokens_counted
from linnet.tangent.capture import capture_bytes, capture_parts
from linnet.tangent.functional import Functional, not_finite
from linnet.tangent.plan import expected_plan
from linnet.tangent.rules import Captured
from linnet.tangent.trace import Trace, forward_trace, weighed_trace
from linnet.unfinished import Checkpoint

# -- output layer ----------------------------------------------------------------------------------
#
# The curvature of a final linear layer, from its inputs alone.
#
# For f = W a + b the gradient of uᵀf at the layer is u itself, so that Λ stands where Σ_k u_k u_kᵀ stood.
# With â = [a; 1], over examples and positions,
#
#     kfac       A = 1/M Σ â âᵀ,  B = Σ Λ
#     ekfac      Σ diag(Q_Bᵀ Λ Q_B) ((Q_Aᵀ â)²)ᵀ
#     diagonal   Σ diag(Λ) (â²)ᵀ
#     block      Σ Λ ⊗ â âᵀ
#
# One forward pass, and of C columns an example none. That the outputs are the layer's result is read off
# every pass: autograd delivers gradients at both in one place.

FORMED = 1 << 22  # numbers in the matrices of several examples that are formed at once


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """A batch at the layer."""

    a: Tensor  # inputs (N, ..., d)
    f: Tensor  # outputs (N, ..., C), the class axis last
    y: Tensor | None  # checked labels, where there are any
    likelihood: Likelihood  # what the outputs mean
    biased: bool  # whether the bias varies as well

    @cached_property
    def inputs(self) -> Tensor:
        """â of all positions, (M, D)."""
        a = self.a.flatten(0, -2).to(wide_type(self.a.dtype))
        return F.pad(a, (0, 1), value=1.0) if self.biased else a

    @cached_property
    def counted(self) -> Tensor:
        """Inputs a of the positions that have a label, (M', d)."""
        mask = None if self.y is None else self.likelihood.mask(self.y)
        a = self.a.flatten(0, -2).to(wide_type(self.a.dtype))
        return a if mask is None else a[mask.flatten()]

    def parts(self, numbers: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """A few examples after the other: their positions, outputs and labels."""
        positions = self.f[0].numel() // max(1, self.f.shape[-1])
        size = max(1, FORMED // max(1, numbers * positions))
        for start in range(0, len(self.f), size):
            some = slice(start, start + size)
            rows = slice(start * positions, (start + size) * positions)
            yield rows, self.f[some], None if self.y is None else self.y[some]


def has_closed_form(function: Functional, expectation: Expectation, sums: Sequence[Sums]) -> bool:
    """Whether the statistics are all of one layer, and sums over Λ instead of its columns."""
    likelihood = expectation.likelihood
    known = likelihood.canonical and not isinstance(likelihood, Custom)
    if expectation.kind != "exact" or expectation.matrix == "hessian" or not known:
        return False
    names = {statistic.layer.names for statistic in sums}
    return len(names) == 1 and not names & _inner(function) and all(map(_is_known, sums))


def _inner(function: Functional) -> set[tuple[str, ...]]:
    """Layers, by their parameters, whose result some pass has shown not to be the output."""
    return function.cache.inner_layers


def _is_known(statistic: Sums) -> bool:
    """Whether a statistic has one of the formulas above."""
    layer = statistic.layer
    if isinstance(statistic, KroneckerSums) and statistic.sharing != "expand" and layer.form.positions > 1:
        return False
    if isinstance(statistic, KroneckerSums | EigenvalueSums):
        return layer.groups == 1 and not layer.transposed
    return isinstance(statistic, DiagonalSums | BlockSums)


def output_inputs(run: Trace, names: Sequence[str]) -> Tensor | None:
    """The inputs a of the linear layer whose result the outputs are."""
    own = [use for use in run.uses if set(names) & set(use.sources)]
    expected = [("linear", tuple(names[:1])), ("shift", tuple(names[1:]))][: len(names)]
    if [(use.kind, use.sources) for use in own] != expected or set(names) & set(run.unhandled):
        return None
    if not all(use.direct and use.place == run.place and use.options.get("sign", 1) == 1 for use in own):
        return None
    weight = own[0]
    plain = not weight.options.get("left") and not weight.options.get("transposed")
    if weight.a is None or not plain or weight.a.shape[:-1] != weight.shape[:-1]:
        return None
    return weight.a if weight.shape[0] == run.n else None


def remembered_inputs(function: Functional, run: Trace, names: Sequence[str]) -> Tensor | None:
    """The same; a layer that is not the output's is not requested again."""
    a = output_inputs(run, names)
    if a is None:
        _inner(function).add(tuple(names))
    return a


def add_output_layer(sums: Sequence[Sums], own: OutputLayer) -> None:
    """Add a batch to the statistics of the layer."""
    for statistic in sums:
        if isinstance(statistic, KroneckerSums):
            _add_factors(statistic, own)
        elif isinstance(statistic, EigenvalueSums):
            _add_eigenvalues(statistic, own)
        elif isinstance(statistic, DiagonalSums):
            _add_squares(statistic, own)
        else:
            assert isinstance(statistic, BlockSums), "has_closed_form lets no other through"
            _add_products(statistic, own)


def _add_factors(statistic: KroneckerSums, own: OutputLayer) -> None:
    """Σ â âᵀ and Σ Λ."""
    a = own.counted
    second = a.square().sum(0) if "inputs" in statistic.wide else second_moment(a.mT)
    statistic.add_inputs(InputMoment(second[None], a.sum(0)[None], float(len(a))))
    if "gradients" in statistic.wide:
        statistic.tensors["gradients"] += own.likelihood.hessian_diagonal(own.f, own.y).flatten(0, -2).sum(0)
    else:
        statistic.tensors["gradients"] += own.likelihood.hessian_sum(own.f, own.y)


def _add_squares(statistic: DiagonalSums, own: OutputLayer) -> None:
    """Σ diag(Λ) (â²)ᵀ, parameter after parameter."""
    squares = own.likelihood.hessian_diagonal(own.f, own.y).flatten(0, -2).mT @ own.inputs.square()
    d = own.a.shape[-1]
    statistic.tensors["squares"] += torch.cat([squares[:, :d].flatten(), squares[:, d:].flatten()])


def _add_eigenvalues(statistic: EigenvalueSums, own: OutputLayer) -> None:
    """Σ diag(Q_Bᵀ Λ Q_B) ((Q_Aᵀ â)²)ᵀ."""
    on_a = statistic.input_basis
    turned = (own.inputs if on_a is None else own.inputs @ on_a[0]).square()
    if statistic.gradient_basis is None:
        curved = own.likelihood.hessian_diagonal(own.f, own.y).flatten(0, -2)
        statistic.tensors["values"][0] += curved.mT @ turned
        return
    q = statistic.gradient_basis[0].to(own.f.dtype)
    for rows, f, y in own.parts(q.numel()):
        v = q.mT.reshape(len(q), *[1] * (f.ndim - 1), -1).expand(-1, *f.shape)
        # q_jᵀ Λ q_j for every column j of Q_B
        found = (own.likelihood.product(f, v, y) * v).sum(-1).flatten(1)
        statistic.tensors["values"][0] += found.clamp_min(0) @ turned[rows]


def _add_products(statistic: BlockSums, own: OutputLayer) -> None:
    """Σ Λ ⊗ â âᵀ, one row of classes after the other, parameter after parameter."""
    products, c, d = statistic.tensors["products"], own.f.shape[-1], own.a.shape[-1]
    spans = [slice(0, d), slice(d, d + 1)][: 1 + own.biased]
    places = [slice(0, c * d), slice(c * d, c * d + c)]
    pairs = [
        (p, q, products[at_p, at_q].unflatten(0, (c, -1)).unflatten(2, (c, -1)))
        for p, at_p in zip(spans, places, strict=False)
        for q, at_q in zip(spans, places, strict=False)
    ]
    width = own.inputs.shape[-1]
    for rows, f, y in own.parts(max(c * c, width * width)):
        curved = own.likelihood.hessian(f, y).flatten(0, 1)  # Λ, (M, C, C)
        a = own.inputs[rows]
        outer = (a[:, :, None] * a[:, None]).flatten(1)
        for i in range(c):
            # Σ Λ_ij â âᵀ for all j ≤ i; the blocks above the diagonal are the same
            block = (curved[:, i, : i + 1].mT @ outer).view(i + 1, width, width)
            block = (block + block.mT) / 2
            for p, q, place in pairs:
                place[i, :, : i + 1] += block[:, p, q].transpose(0, 1)
                place[:i, :, i] += block[:i, p, q]


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
        kept = f.to(wide_type(f.dtype))
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
    run = None
    with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        run = weighed_trace(function, x)
    if run is None:
        function.check_runs(x)  # says why
        run = weighed_trace(function, x)
    require_finite_pass(run)
    return run


def require_finite_pass(captured: Captured | Trace) -> None:
    """Raise if an activation or the outputs are not finite, naming the first layer that read one."""
    read = [(use, use.a) for use in captured.uses if use.a is not None and use.a.is_floating_point()]
    distinct = {(a.data_ptr(), a.shape, a.stride()): a for _, a in read}
    # A sum is finite only if all terms are, and reads them once; should it overflow, the terms are looked at.
    total = sum((a.sum(dtype=wide_type(a.dtype)) for a in distinct.values()), captured.outputs.sum())
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
        raise not_finite("x")


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


def sized_chunks(
    function: Functional,
    batch: Batch,
    f: Tensor,
    expectation: Expectation,
    row_numbers: int,
    budget: int,
    most: int = LARGEST,
    fields: int = 0,
) -> Chunks:
    """Plan the chunks of an expectation's columns; f are the outputs of one example."""
    columns, outputs, item = expectation.count_of_one(f, batch.y), f.numel(), function.dtype.itemsize
    alone = expectation.size(f) is not None  # columns can be formed one by one
    chunks = plan_chunks(function, batch, columns, row_numbers * item, budget, most, fields=fields)
    return _capped(chunks, columns, outputs, item, budget, alone)


def require_columns(
    function: Functional, batch: Batch, f: Tensor, expectation: Expectation, budget: int
) -> None:
    """Raise if one example does not fit: its columns, and its derivatives in one of them."""
    columns, outputs = expectation.count_of_one(f, batch.y), f.numel()
    columns = columns if expectation.size(f) is None else 1  # those that are formed one by one
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


def _capped(chunks: Chunks, columns: int, outputs: int, item: int, budget: int, parts: bool) -> Chunks:
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
