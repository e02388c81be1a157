"""The Gram matrix of the tangent kernel, tile by tile under a memory budget.

A large block of features stays in memory while small ones stream past it, so a kernel whose
features do not fit costs a few more passes over the data instead of more memory. With one data
set only tiles on one side of the diagonal are computed and the result is symmetric to the bit.

Kernels of all outputs together (trace) or apart (diagonal) can also take the outputs in parts, one pass over
the data each: with thousands of outputs that is cheaper than to differentiate examples again and again.

Inside :func:`linnet.distributed.sharing` every process captures its share of a block that stays in memory,
and all exchange these features; steps are dealt out, and tiles exchanged at the end, or written to one file.
:func:`gram_part` does one of several parts without a group: it exchanges nothing but the file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from linnet.distributed import Share, all_filled, all_rows, check_others, current, gathered
from linnet.errors import InputError
from linnet.linalg.factorize import is_finite
from linnet.memory import Plan, parse_bytes, require
from linnet.number_types import products_in
from linnet.params import choice, part_of
from linnet.progress import track
from linnet.tangent.batch import Inputs, batch_size, check_examples, example_shapes, take
from linnet.tangent.capture import capture_bytes, capture_parts_for_products, hollow_capture
from linnet.tangent.capture import capture_for_products as capture  # gradients are only multiplied here
from linnet.tangent.features import (
    Footprint,
    KernelFeatures,
    Outline,
    Treatment,
    TreatmentChanged,
    outline,
    reduce,
    treatment_within,
)
from linnet.tangent.functional import Functional
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.nonfinite import refuse_overflow, require_finite_products
from linnet.tangent.plan import PROBES
from linnet.tangent.rules import Form
from linnet.tangent.store import GramFile, Writer, begun_sizes, checked_name, discard
from linnet.tangent.tiles import (
    Range,
    TileSizes,
    TileStep,
    captured_examples,
    dealt,
    kernel_tile,
    own_tile,
    own_traces,
    ranges,
    run_of,
    tile_bytes,
    tile_steps,
)
from linnet.tree import hash_tensors, tensors_in
from linnet.unfinished import sums_folder

T = TypeVar("T")
OUTPUTS = ("full", "trace", "diagonal", "sum")
CAPTURE = 64  # examples differentiated at once, memory permitting; products of fewer are too small
PRODUCT = 512  # rows (examples, for full kernels × outputs) on each side of one matrix product, at most
SMALLEST_PRODUCT = 128  # and at least


@dataclass(frozen=True)
class GramPlan:
    """Plan of the computation of a Gram matrix."""

    memory: Plan  # predicted bytes, item by item
    treatment: Treatment  # which parameters keep factors
    sizes: TileSizes  # how much is taken at once
    dtype: torch.dtype  # type of the result
    template: KernelFeatures  # features without numbers, of the kind that is kept
    cotangents: int  # K, all of them

    @property
    def parts(self) -> list[Range]:
        """The cotangents that are taken in one pass over the data after another; most often all in one."""
        return ranges(0, self.cotangents, self.template.k)


@dataclass(frozen=True)
class GramTask:
    """A requested kernel."""

    function: Functional  # the network
    x1: Inputs  # examples of the rows
    x2: Inputs | None  # examples of the columns, or ``None`` for the same
    form: Form  # which kernel
    # this part among those that make a file by themselves
    part: Writer = field(default_factory=Writer)

    @property
    def sizes(self) -> tuple[int, int]:
        """N and M."""
        n = batch_size(self.x1)
        return n, n if self.x2 is None else batch_size(self.x2)

    def check(self, kernel: Tensor, row: int = 0, column: int = 0) -> None:
        """Raise if the kernel of examples from ``row`` and ``column`` on is not finite."""
        if not is_finite(kernel):
            bad = (~kernel.isfinite()).nonzero()[0].tolist()
            at = row + bad[0], column + bad[2 if self.form == "full" else 1]
            other = self.x1 if self.x2 is None else self.x2
            refuse_overflow(self.function, ((self.x1, at[0]), (other, at[1])))


@in_exact_mode
def gram(
    function: Functional,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    form: Form = "full",
    memory: str | int | None = None,
    file: str | Path | None = None,
    accumulate: str | None = None,
    progress: bool | None = None,
) -> Tensor:
    """K(x1, x2) of the tangent kernel."""
    task = _task(function, x1, x2, form, accumulate)
    kernel = _settled(task.function, lambda: _compute(task, memory, file, progress))
    assert kernel is not None
    return kernel


@in_exact_mode
def gram_part(
    function: Functional,
    x1: Inputs,
    x2: Inputs | None,
    file: str | Path,
    part: tuple[int, int],
    *,
    form: Form = "full",
    memory: str | int | None = None,
    accumulate: str | None = None,
) -> Tensor | None:
    """One of several parts of K(x1, x2), which write to one file and exchange nothing else."""
    checked_name(file)
    task = _task(function, x1, x2, form, accumulate)
    task = replace(task, part=Writer(*part_of(part), array=True))
    return _settled(task.function, lambda: _compute(task, memory, file, None))


@in_exact_mode
def gram_and_own(
    function: Functional, x1: Inputs, x2: Inputs, memory: str | int | None = None
) -> tuple[Tensor, Tensor]:
    """The trace kernel K(x1, x2), and of every example of ``x1`` with itself, in the same passes, (N, M)."""
    task = _task(function, x1, x2, "trace")

    def both() -> tuple[Tensor, Tensor]:
        own = torch.zeros(task.sizes[0], dtype=torch.float64, device=function.device)
        kernel = _compute(task, memory, None, None, own)
        assert kernel is not None
        return kernel, own

    kernel, own = _settled(function, both)
    require_finite_products(function, x1, own)
    return kernel, own


@in_exact_mode
def own_kernels(function: Functional, x: Inputs, memory: str | int | None = None) -> Tensor:
    """K(x_i, x_i) of every example with itself; no other entry of the kernel is formed, (N, C, C)."""
    every = _settled(function, lambda: _own_tiles(GramTask(function, x, x, "full"), memory))
    require_finite_products(function, x, every)
    return every


def _own_tiles(task: GramTask, memory: str | int | None) -> Tensor:
    """The blocks of the diagonal alone, (N, C, C)."""
    plan = plan_gram(task, memory, to_disk=True)  # the N × N result is never formed
    require(_own_plan(task, plan), _remedies(task, to_disk=True))
    share, n, k = current(), task.sizes[0], plan.template.k
    own = share.part(n)
    parts = [torch.empty(0, k, k, dtype=plan.dtype, device=task.function.device)]
    with _found_by_all(share):
        for wanted in ranges(own.start, own.stop, plan.sizes.capture):
            parts.append(own_tile(_features(task, plan, task.x1, wanted, (0, k)), plan.dtype))
    return all_rows(torch.cat([part.to(parts[-1].dtype) for part in parts]), n)


def _settled(function: Functional, compute: Callable[[], T]) -> T:
    """What is computed, once every parameter is treated as all batches use it."""
    while True:
        try:
            with products_in(function.precision, function.device):
                return compute()
        except TreatmentChanged as change:  # a later batch uses it differently: its gradients are formed
            function.cache.formed.add(change.name)
            function.cache.kernels.clear()


@contextmanager
def _found_by_all(share: Share) -> Iterator[None]:
    """What one process finds of the network is raised on all."""
    change = None
    try:
        yield
    except TreatmentChanged as found:
        change = found.name
    names = [change] if share.world == 1 else gathered(change)
    for name in names:
        if name is not None:
            raise TreatmentChanged(name)


def _own_plan(task: GramTask, plan: GramPlan) -> Plan:
    """The memory of the blocks of the diagonal alone."""
    n, k, sizes = task.sizes[0], plan.template.k, dict(plan.memory.items)
    held = plan.sizes.capture * -(-plan.template.nbytes // plan.template.n)
    working = sizes["derivatives of one block"]
    items = (
        ("kernel", n * k * k * plan.dtype.itemsize),
        ("features kept", held),
        ("derivatives of one block", working),
    )
    return Plan(f"kernels of {n} examples with themselves", plan.memory.budget, items)


def _compute(
    task: GramTask,
    memory: str | int | None,
    file: str | Path | None,
    progress: bool | None,
    own: Tensor | None = None,
) -> Tensor | None:
    """Plan, and run every step of this process; ``own`` takes the traces of the rows with themselves."""
    keeps, begin = sums_folder(), time.monotonic()
    if keeps is not None and file is None and own is None:
        kept = keeps.place("kernel", current(), ".npy")
        found = _compute(replace(task, part=Writer(array=True)), memory, kept, progress)
        if time.monotonic() - begin < keeps.interval and current().rank == 0:
            discard(kept)
        return found
    plan = plan_gram(task, memory, to_disk=file is not None)
    require(plan.memory, _remedies(task, to_disk=file is not None))
    identity: dict[str, object] = {} if file is None else _identity(task)
    sizes = None if file is None else begun_sizes(file, identity, memory is None)
    if file is not None and current().world > 1:
        sizes = gathered(sizes)[0]  # before any process changes what is there
    if sizes is not None:
        plan = replace(plan, sizes=TileSizes(**sizes))
    identity |= asdict(plan.sizes)
    shape = _shape(*task.sizes, plan.template.outputs.shape[1], task.form)
    share = current()
    store = None if file is None else _opened(file, shape, plan.dtype, identity, task.part)
    if store is not None and store.complete:
        return store.finished()
    device = task.function.device
    new = torch.zeros if len(plan.parts) > 1 else torch.empty
    result = new(shape, dtype=plan.dtype, device=device) if store is None else store.array
    every = tile_steps(*task.sizes, task.x2 is None, plan.sizes)
    steps = run_of(every, task.part.index, task.part.of)
    if store is not None:
        steps = [step for step in steps if not store.is_done(step)]
    shares: list[list[TileStep]] = []
    try:
        for part in plan.parts:  # a tile is dealt to the same process for all outputs
            target = _Target(result, part, len(plan.parts) > 1, None if store is None else task)
            shares = _run_blocks(task, plan, (target, own), steps, store, share, progress)
    except BaseException:
        if store is not None:
            store.write_record()
        raise
    if store is None:
        _exchange(shares, result, task.x2 is None, share)
        task.check(result)
        return result
    return _finished(store, every, task.part.array, share)


def _run_blocks(
    task: GramTask,
    plan: GramPlan,
    out: tuple[_Target, Tensor | None],
    steps: list[TileStep],
    store: GramFile | None,
    share: Share,
    progress: bool | None,
) -> list[list[TileStep]]:
    """Run the steps of this process, block after block; the steps that each process has run."""
    shares: list[list[TileStep]] = [[] for _ in range(share.world)]
    blocks = [(rows, dealt(list(own), share.world)) for rows, own in groupby(steps, lambda step: step.rows)]
    for _, parts in blocks:
        for mine, part in zip(shares, parts, strict=True):
            mine += part
    shown = progress if share.rank == 0 else False
    name = f"kernel of {task.sizes[0]} × {task.sizes[1]} examples"
    ticks = track(shares[share.rank], name, len(shares[share.rank]), shown)
    for rows, parts in blocks:
        held = _hold(task, plan, rows, out[0].outputs, share)
        if out[1] is not None:
            out[1][slice(*rows)] += own_traces(held).double()
        with _found_by_all(share):
            for _ in parts[share.rank]:
                step = next(ticks)
                check_others()
                _run(step, held, task, plan, out[0])
                if store is not None:
                    store.mark_done(step)
        del held  # the old block goes before the new one comes
    next(ticks, None)
    return shares


def _opened(
    file: str | Path, shape: tuple[int, ...], dtype: torch.dtype, identity: dict[str, object], part: Writer
) -> GramFile:
    """The file, opened by the first process of a group before the others join it."""
    share = current()
    if share.world == 1:
        return GramFile(file, shape, dtype, identity, part)
    writer, store = Writer(share.rank, share.world, part.array), None
    if share.rank == 0:
        store = GramFile(file, shape, dtype, identity, writer)
    done, complete = gathered(([], False) if store is None else (sorted(store.done), store.complete))[0]
    if store is None:
        path = Path(file)
        if not (path if complete else path.with_suffix(".npy.partial")).exists():
            raise InputError(
                f"file={str(file)!r}: rank {share.rank} does not see what rank 0 has begun",
                expected="a folder that all processes share",
                remedy="name a folder on a file system of all machines, or leave file= out",
            )
        store = GramFile(file, shape, dtype, identity, writer)
    store.done = set(done)
    return store


def _finished(store: GramFile, steps: list[TileStep], array: bool, share: Share) -> Tensor | None:
    """The matrix under its own name; ``None`` where other parts are not done."""
    if share.world == 1:
        return store.finish(steps if array else None)
    store.write_record()
    gathered(None)  # all have
    found = store.finish(steps) if share.rank == 0 else None
    gathered(None)  # it has its name
    found = store.finished() if found is None else found
    gathered(None)  # all have it, whoever takes the name away now
    return found


def _exchange(shares: list[list[TileStep]], result: Tensor, symmetric: bool, share: Share) -> None:
    """Copy the tiles of every process to all."""
    if share.world == 1:
        return
    axis = 2 if result.ndim == 4 else 1

    def view(step: TileStep) -> Tensor:
        (top, bottom), (left, right) = step.region
        return result.narrow(0, top, bottom - top).narrow(axis, left, right - left)

    all_filled([[view(step) for step in part] for part in shares])
    for step in (step for part in shares for step in part) if symmetric else ():
        (top, bottom), (left, right) = step.region
        mirrored = result.narrow(0, left, right - left).narrow(axis, top, bottom - top)
        mirrored.copy_(_transposed(view(step).clone()))


def _remedies(task: GramTask, to_disk: bool) -> dict[str, list[str]]:
    """Remedies for each item of a plan that is too large."""
    disk = [] if to_disk else ["keep it on disk with linnet.spectrum.gram(..., file='kernel.npy')"]
    trace = ['take form="trace"'] if task.form == "full" else []
    one = [] if task.form == "sum" else ['take form="sum", or fewer outputs with output=']
    small = ["raise memory=", "select fewer parameters with params=", *one]
    return {
        "kernel": [*disk, *trace, "use fewer examples", "raise memory="],
        "features kept": small,
        "derivatives of one block": small,
        "tile": ["raise memory=", *trace, *one],
    }


def plan_gram(task: GramTask, memory: str | int | None = None, to_disk: bool = False) -> GramPlan:
    """Choose a treatment and block sizes, and predict the bytes."""
    budget = parse_bytes(memory, task.function.device)
    found = _probe(task)
    k = found.outline.hollow.k
    best = _planned(task, found, budget, to_disk, k)
    # a tile of a file is written once and noted, so that no part of its outputs can be added later
    if to_disk or task.form not in ("trace", "diagonal"):
        return best
    (n, m), symmetric = task.sizes, task.x2 is None
    parts, once = 1, n if symmetric else n + m

    def order(plan: GramPlan, parts: int) -> tuple[int, int]:
        """Bytes over the budget, then passes: every part of the outputs runs the network again."""
        captured = captured_examples(n, m, symmetric, plan.sizes.hold)
        return max(0, plan.memory.peak - budget), captured * (parts + k)

    found_order = order(best, 1)
    while found_order > (0, once * (parts + k)) and parts < k:  # no plan with more parts is cheaper than that
        parts = min(2 * parts, k)
        other = _planned(task, found, budget, to_disk, -(-k // parts))
        if order(other, parts) < found_order:
            best, found_order = other, order(other, parts)
    return best


def _planned(task: GramTask, found: _Probed, budget: int, to_disk: bool, outputs: int) -> GramPlan:
    """The plan that takes so many cotangents in one pass over the data."""
    (n, m), symmetric = task.sizes, task.x2 is None
    k = found.outline.hollow.k

    def sized(features: KernelFeatures) -> GramPlan:
        return _sized(
            task, found, features if outputs == k else features.columns(0, outputs), budget, to_disk
        )

    def fit(features: KernelFeatures) -> Footprint:
        plan = sized(features)
        captured = captured_examples(n, m, symmetric, plan.sizes.hold)
        return Footprint(plan.memory.peak, captured)

    treatment = treatment_within(found.outline, budget, fit, n if symmetric else n + m, symmetric)
    return replace(sized(found.outline.features(treatment)), treatment=treatment)


def _sized(task: GramTask, found: _Probed, features: KernelFeatures, budget: int, to_disk: bool) -> GramPlan:
    """Block sizes for features of one kind, of which no treatment is known here."""
    plan = _blocks(task, found, features, budget, to_disk, features.k)
    excess = plan.memory.peak - budget
    if excess <= 0 or features.k == 1:
        return plan
    # not even one example with all its cotangents: as many of them as fit
    column = found.column + 2 * -(-features.nbytes // (features.n * features.k))
    columns = min(features.k - 1, max(1, features.k - -(-excess // max(column, 1))))
    while (plan := _blocks(task, found, features, budget, to_disk, columns)).memory.peak > budget:
        if columns == 1:
            break
        columns = max(1, columns * 3 // 4)
    return plan


def _blocks(
    task: GramTask, found: _Probed, features: KernelFeatures, budget: int, to_disk: bool, columns: int
) -> GramPlan:
    """Block sizes where so many cotangents are differentiated at once."""
    n, m = task.sizes
    k = features.k
    dtype = task.function.precision.added(features.outputs.dtype)
    shape = _shape(n, m, features.outputs.shape[1], task.form)
    result = 0 if to_disk else torch.Size(shape).numel() * dtype.itemsize
    held = -(-features.nbytes // features.n)
    # what is kept is made in the network's type, and copied
    copies = 1 + max(1, features.outputs.dtype.itemsize // features.rows.dtype.itemsize)
    transient = found.inputs + columns * found.column + copies * held
    if columns < k:
        transient = found.inputs + columns * (found.column + copies * -(-held // k))
        transient += copies * features.input_bytes
    # at least eight tiles a side, so that half of the products of a symmetric kernel are saved
    rows = _product_rows(task.form, k)
    product = max(1, min(max(n * rows // 8, SMALLEST_PRODUCT), PRODUCT) // rows)
    processes, sides = current().world, math.isqrt(2 * task.part.of)  # a part has few of sides² blocks
    if processes * sides > 1:  # tiles small enough to be dealt out
        product = max(1, min(product, -(-n // (2 * processes * sides))))
    left = budget - result
    most = CAPTURE if columns == k else 1
    if sides > 1:
        most = min(most, -(-max(n, m) // (4 * sides)))
    block = max(1, min(most, n if task.x2 is None else max(n, m), int(0.3 * left) // max(transient, 1)))
    # products of fewer than 8 examples are slow: only where half of the memory would be taken otherwise
    while product > 1 and (
        tile_bytes(features, task.form, product, product, dtype.itemsize)
        > (0.2 if product > 8 else 0.5) * left
    ):
        product //= 2
    product = min(product, max(n, m))
    identity = columns * features.outputs.shape[1] * dtype.itemsize  # the cotangents of a block
    working = block * transient + identity
    side = min(product, n), min(product, m)
    tile = tile_bytes(features, task.form, *side, dtype.itemsize)
    whole = task.x2 is None and sides == 1 and n * held + working + tile <= left
    streams = 0 if whole else block * held
    hold = min(n, max(1, (left - working - tile - streams) // max(held, 1)))
    if sides > 1:  # few examples are captured for a part if its blocks are small
        hold = min(hold, -(-n // sides))
    if hold < min(n, product):  # a block of few examples has small tiles, and room for more of them
        widest = min(product, m)

        def small_tile(rows: int) -> int:
            columns = min(widest, max(rows, block))
            return tile_bytes(features, task.form, rows, columns, dtype.itemsize)

        room = left - working - streams
        while hold < min(n, product) and (hold + 1) * held + small_tile(hold + 1) <= room:
            hold += 1
        tile = small_tile(hold)
    items = (
        ("kernel", result),
        ("features kept", hold * held + streams),
        ("derivatives of one block", working),
        ("tile", tile),
    )
    form = "" if task.form == "full" else f" ({task.form})"
    name = f"kernel{form} of {n} × {m} examples"
    sizes = TileSizes(hold, product, block, columns)
    memory, every = Plan(name, budget, items), found.outline.hollow.k
    return GramPlan(memory, Treatment({}, {}), sizes, dtype, features, every)


def _product_rows(form: Form, k: int) -> int:
    """Rows of a matrix product that one example has: of the other forms outputs are summed over, or apart."""
    return k if form == "full" else 1


@dataclass(frozen=True)
class _Probed:
    """Measurements of a few examples, whatever the budget."""

    outline: Outline  # what could be kept of them
    inputs: int  # bytes of one captured example, its gradients apart
    column: int  # bytes of its gradients for one cotangent


def _probe(task: GramTask) -> _Probed:
    """Shapes of what could be kept of the examples, and bytes of one captured example; remembered."""
    n, m = task.sizes
    form = _form_of(task.x1)
    function = task.function
    known: dict[Any, _Probed] = function.cache.kernels
    types = function.precision
    key = (form, task.form, n, m, types.capture)
    if key not in known:
        for x in (task.x1, task.x2):
            if x is not None:
                function.check_runs(take(x, slice(0, 2)))
        k = 1 if task.form == "sum" else function.output_shape(task.x1).numel()
        hollow = hollow_capture(function, take(task.x1, slice(0, min(n, PROBES))), k)
        kept = types.kept(hollow.outputs.dtype)
        found = outline(hollow, function.names, (n, m), task.form, function.cache.formed, kept)
        inputs = capture_bytes(function, task.x1, 0)
        known[key] = _Probed(found, inputs, capture_bytes(function, task.x1, 1) - inputs)
    return known[key]


@dataclass(frozen=True)
class _Target:
    """The kernel that tiles are written to."""

    result: Tensor  # the kernel
    outputs: Range  # the cotangents in hand
    several: bool  # whether there are others, of which kernels are sums, or which have places of their own
    # looks at every tile, of a kernel that is too large to be looked at as a whole
    task: GramTask | None = None

    def write(self, tile: Tensor, row: int, column: int, mirror: bool) -> None:
        """Put a tile in its place, and its transpose across the diagonal."""
        if self.task is not None:
            self.task.check(tile, row, column)
        apart = self.several and self.result.ndim == 3
        place = self.result[..., slice(*self.outputs)] if apart else self.result
        axis = 2 if place.ndim == 4 else 1
        n, m = tile.shape[0], tile.shape[axis]
        both = [(place.narrow(0, row, n).narrow(axis, column, m), tile)]
        if mirror:
            both += [(place.narrow(0, column, m).narrow(axis, row, n), _transposed(tile))]
        for where, what in both:
            _ = where.copy_(what) if apart or not self.several else where.add_(what)


def _run(step: TileStep, held: KernelFeatures, task: GramTask, plan: GramPlan, target: _Target) -> None:
    """Compute the tiles of one step."""
    if step.own is not None:
        _symmetric_tiles(step, held, task, plan, target)
    if step.columns is not None:
        x = task.x1 if task.x2 is None else task.x2
        features = _features(task, plan, x, step.columns, target.outputs)
        for left in ranges(0, held.n, plan.sizes.product):
            tile = kernel_tile(held.part(*left), features, task.form, plan.dtype)
            target.write(tile, step.rows[0] + left[0], step.columns[0], mirror=task.x2 is None)


def _hold(task: GramTask, plan: GramPlan, rows: Range, outputs: Range, share: Share) -> KernelFeatures:
    """Features of a range of x1, side by side; each process captures its share, and all exchange them."""
    n = rows[1] - rows[0]
    held = _room(plan, n, task.function.device, outputs)
    own = share.part(n)
    with _found_by_all(share):
        for start, stop in ranges(own.start, own.stop, plan.sizes.capture):
            check_others()
            wanted = rows[0] + start, rows[0] + stop
            _features(task, plan, task.x1, wanted, outputs, held.part(start, stop))
    if share.world > 1:
        every = [Share(rank, share.world).part(n) for rank in range(share.world)]
        all_filled([held.part(part.start, part.stop).tensors for part in every])
    return held


def _room(plan: GramPlan, n: int, device: torch.device, outputs: Range) -> KernelFeatures:
    """Empty features of n examples and some cotangents."""
    size = outputs[1] - outputs[0]
    kind = plan.template if size == plan.template.k else plan.template.columns(0, size)
    return kind.room_for(n, device)


def _features(
    task: GramTask,
    plan: GramPlan,
    x: Inputs,
    wanted: Range,
    outputs: Range,
    room: KernelFeatures | None = None,
) -> KernelFeatures:
    """Features of a few examples."""
    block = x if wanted == (0, batch_size(x)) else take(x, slice(*wanted))
    names, k, kept = task.function.names, plan.template.k, plan.template.rows.dtype
    cotangents = task.form if task.form == "sum" else range(*outputs)
    if plan.sizes.columns == k:
        return reduce(capture(task.function, block, cotangents), names, plan.treatment, room, kept)
    room = room or _room(plan, wanted[1] - wanted[0], task.function.device, outputs)
    done = 0
    for captured in capture_parts_for_products(task.function, block, cotangents, plan.sizes.columns):
        reduce(captured, names, plan.treatment, room.columns(done, done + captured.k), kept)
        done += captured.k
    return room


def _symmetric_tiles(
    step: TileStep, held: KernelFeatures, task: GramTask, plan: GramPlan, target: _Target
) -> None:
    """Tiles of some rows of a block with the block: on and to the right of the diagonal, then mirrored."""
    assert step.own is not None
    offset = step.rows[0]
    left = (step.own[0] - offset, step.own[1] - offset)
    pairs = _on_diagonal(*left, max(1, SMALLEST_PRODUCT // _product_rows(task.form, held.k)))
    pairs += [(left, right) for right in ranges(left[1], held.n, plan.sizes.product)]
    for rows, columns in pairs:
        tile = kernel_tile(held.part(*rows), held.part(*columns), task.form, plan.dtype)
        if rows == columns:
            tile = (tile + _transposed(tile)) / 2
        target.write(tile, offset + rows[0], offset + columns[0], mirror=rows != columns)


def _on_diagonal(start: int, stop: int, smallest: int) -> list[tuple[Range, Range]]:
    """Tiles of a square on the diagonal: its halves by themselves and once with each other, and so on."""
    # n (n + 1) / 2 of n² products are wanted; two halvings leave 0.625 n²
    if stop - start < 2 * smallest:
        return [((start, stop), (start, stop))]
    middle = (start + stop) // 2
    halves = _on_diagonal(start, middle, smallest) + _on_diagonal(middle, stop, smallest)
    return [*halves, ((start, middle), (middle, stop))]


def _transposed(tile: Tensor) -> Tensor:
    """K(x2, x1) from K(x1, x2)."""
    return tile.permute(2, 3, 0, 1) if tile.ndim == 4 else tile.transpose(0, 1)


def _shape(n: int, m: int, c: int, form: Form) -> tuple[int, ...]:
    """Shape of the result."""
    if form == "full":
        return n, c, m, c
    return (n, m, c) if form == "diagonal" else (n, m)


def _task(
    function: Functional, x1: Inputs, x2: Inputs | None, form: Form, accumulate: str | None = None
) -> GramTask:
    """A kernel that can be computed; sums over parameters in the type named by ``accumulate``."""
    choice("form", form, OUTPUTS)
    if accumulate is not None:
        choice("accumulate", accumulate, ("float32", "float64"))
        function = function.under(replace(function.precision, sums=accumulate))
    task = GramTask(function, x1, x2, form)
    for name, x in (("x1", task.x1), ("x2", task.x2)):
        if x is None:
            continue
        check_examples(x, name)
    if task.x2 is not None and _form_of(task.x1) != _form_of(task.x2):
        task.function.check_runs(take(task.x2, slice(0, 2)))
    return task


def _form_of(x: Inputs) -> tuple[Any, ...]:
    """Names and shapes of an example's tensors, and their types."""
    return (*example_shapes(x), *(t.dtype for t in tensors_in(x)))


def _identity(task: GramTask) -> dict[str, object]:
    """The identity of a kernel, which a file must share to be resumed; the sizes of its steps apart."""
    return {
        "form": task.form,
        "gradients": task.function.precision.capture,
        "weights": task.function.fingerprint(),
        "output": getattr(task.function.output, "__qualname__", task.function.output),
        "x1": hash_tensors(tensors_in(task.x1)),
        "x2": None if task.x2 is None else hash_tensors(tensors_in(task.x2)),
    }
