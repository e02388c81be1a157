"""Builds curvature operators in one or two passes over the data."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.accumulate import (
    LARGEST,
    Summation,
    Watch,
    has_closed_form,
    plan_chunks,
    remembered_inputs,
    require_columns,
    require_runs,
    sized_chunks,
)
from linnet.curvatures.curvature import Curvature, Provenance
from linnet.curvatures.expectation import Expectation, by_cost, exact_passes
from linnet.curvatures.kfac import (
    EigenvalueSums,
    KroneckerSums,
    RowEigenvalueSums,
    RowMomentSums,
    shared_eigenvalue_sums,
)
from linnet.curvatures.kfra import RecursionSums, counted
from linnet.curvatures.layers import UNSEEN, Layer, Part, find_layers
from linnet.curvatures.settings import WIDEST
from linnet.curvatures.stream import DEFAULT_BLOCK, Batch, Batches
from linnet.curvatures.sums import Sums, total_bytes
from linnet.curvatures.treatments import Structure, by_layer, make_sums, sides, treatment
from linnet.distributed import Share, all_sum, least
from linnet.errors import InputError
from linnet.linalg.factorize import eigh_bytes
from linnet.memory import Plan, parse_bytes, require
from linnet.number_types import wide_type
from linnet.progress import track
from linnet.tangent.batch import Inputs, take
from linnet.tangent.capture import planned
from linnet.tangent.functional import Functional
from linnet.tangent.plan import PROBES
from linnet.tangent.trace import Trace, trace
from linnet.unfinished import Checkpoint, checkpoint

MORE = 64  # examples on which layers are looked for that none of a few has used
NARROW = 1024  # rows of a Kronecker factor that memory never makes a diagonal of: the matrix has 4 MB


@dataclass(frozen=True)
class Request:
    """A request for curvatures, structures apart."""

    expectation: Expectation  # which columns stand for the outputs' curvature
    sharing: str = "expand"  # "expand" or "reduce"
    memory: str | int | None = None  # budget
    file: Path | None = None  # where unfinished sums are kept, or ``None``
    # is shown outputs and checked labels, batch by batch, where the structures share passes
    watch: Watch | None = None
    widest: int = WIDEST  # rows that a Kronecker factor may have; of a wider side the diagonal is kept
    reason: str = ""  # why the columns are sampled, where that was chosen by their cost

    def provenance(self, structure: str, examples: float) -> Provenance:
        """Where a matrix comes from."""
        return Provenance.of(self.expectation, structure, self.sharing, examples, self.reason)


@dataclass(frozen=True)
class Assignment:
    """The representation of one layer in one of the structures."""

    layer: Layer  # the layer
    how: str  # its treatment
    note: str  # what is worth saying about it


def by_structure(
    function: Functional, batches: Batches, request: Request, wanted: Sequence[tuple[str, Structure]]
) -> list[Curvature]:
    """Several structures from the same passes over the data."""
    if any(structure == "full" for _, structure in wanted):  # is refused before the network is looked at
        whole, meta = [[Assignment(everything(function), "full", "")]], torch.device("meta")
        _require_memory(_memory(function, whole, _first_sums(whole, request, function, meta), request))
    first = batches.first()
    look = require_runs(function, _looked_at(first))
    if any(structure == "kfra" for _, structure in wanted):
        return [_recursion(function, batches, request, first)]
    layers = layers_of(function, first, look)
    plans, request = _affordable([structure for _, structure in wanted], layers, function, request)
    sums = _first_sums(plans, request, function, function.device)
    f = look.outputs.detach()[:1].view(1, *function.output_shape(first.x))
    request = _settled(request, layers, look, first, f, list(sums.values()), function, batches)
    closed = _closed_examples(look, first, function, request, sums)
    budget = parse_bytes(request.memory, function.device)
    if closed is None:
        require_columns(function, first, f, request.expectation, budget)
    rows, most = max(map(_row_numbers, sums.values()), default=0), batches.most(first)
    chunks = sized_chunks(function, first, f, request.expectation, rows, budget, most, _fields(plans))
    batches.block = batches.block or closed or chunks.examples
    kept = _checkpoint(function, batches, request, [structure for _, structure in wanted])
    few = chunks.examples if closed else None
    passes = Summation(function, batches, request.expectation, chunks.columns, kept, few, request.watch)
    examples = float(passes.run(list(sums.values()), "curvature").examples)
    corrected = _second_sums(plans, sums, batches.share)
    if corrected:
        passes.run(list(corrected.values()), "eigenvalues")
    passes.finish()
    found = []
    left = Counter(_place(a) for plan in plans for a in plan)
    for (name, _), plan in zip(wanted, plans, strict=True):
        parts = []
        for a in plan:
            left[_place(a)] -= 1
            held: dict[tuple[str, str], Any] = corrected if a.how == "ekfac" else sums
            own = held[_key(a)] if left[_place(a)] else held.pop(_key(a))  # sums go as blocks come
            parts.append(Part(a.layer, own.block(), a.how, a.note, own.terms))
        found.append(Curvature(tuple(parts), function, request.provenance(name, examples)))
    return found


def _checkpoint(
    function: Functional, batches: Batches, request: Request, structures: Sequence[Structure]
) -> Checkpoint | None:
    """Where unfinished sums are kept, and what they belong to."""
    e, share = request.expectation, batches.share
    settings = structures, e.kind, e.matrix, e.samples, e.seed, request.sharing, request.widest
    types = [f"{name}={value}" for name, value in function.precision.named().items()]

    def identity() -> dict[str, Any]:
        return {
            "network": function.fingerprint(),
            "settings": " ".join(map(str, [*settings, *types])),
            "likelihood": e.likelihood.describe(),
            "number of examples": batches.count(),
            "data": batches.identity(),
        }

    if request.file is None:
        return checkpoint("curvature", share, identity)
    file = request.file
    _require_as_many(file, share.world)
    if share.world > 1:
        file = file.with_name(f"{file.stem}-{share.rank}-of-{share.world}{file.suffix}")
    return Checkpoint(file, identity())


def _require_as_many(file: Path, processes: int) -> None:
    """Raise if sums of another number of processes lie there: each goes on with its own share."""
    own = f"-of-{processes}{file.suffix}" if processes > 1 else file.name
    for entry in sorted(file.parent.iterdir()) if file.parent.is_dir() else ():
        name = entry.name
        ranked = re.fullmatch(r"-\d+-of-\d+", name.removeprefix(file.stem).removesuffix(file.suffix))
        of_this = name == file.name or (name.startswith(file.stem) and ranked is not None)
        if of_this and not name.endswith(own):
            raise InputError(
                f"file={str(file)!r}: {name} holds the sums of another number of processes than {processes}",
                expected="as many processes as have begun",
                remedy="start as many, or delete it to start over",
            )


def _recursion(function: Functional, batches: Batches, request: Request, first: Batch) -> Curvature:
    """KFRA, one pass."""
    sums = RecursionSums(function, request.expectation, first)
    plan = Plan(
        f"KFRA factors of {function.space.dim} parameters",
        parse_bytes(request.memory, function.device),
        (("factors", sum(t.nbytes for t in sums.tensors.values())),),
    )
    require(plan, ['use structure="diagonal"', "select parameters with linnet.linearize(model, params=...)"])
    batches.block = batches.block or LARGEST
    for batch in track(batches, "curvature", total=batches.length()):
        own, f, y = counted(function, request.expectation, batch)
        if len(f):
            sums.add(own, f, y)
    if batches.share.world > 1:
        all_sum(list(sums.tensors.values()))
    made = request.provenance("kfra", float(sums.tensors["count"]))
    return Curvature(tuple(sums.parts()), function, made)


def _looked_at(batch: Batch, most: int = PROBES) -> Inputs:
    """A few examples, from all over a batch: those of sorted data may take different ways each."""
    return take(batch.x, torch.linspace(0, batch.size - 1, min(most, batch.size)).long())


def layers_of(function: Functional, batch: Batch, run: Trace | None = None) -> tuple[Layer, ...]:
    """The layers of a network, found on a few examples."""
    few = _looked_at(batch)
    layers = _found(function, few, run or trace(function, few))
    if batch.size > PROBES and any(layer.why == UNSEEN for layer in layers):  # others may take that way
        more = _looked_at(batch, MORE)
        layers = _found(function, more, trace(function, more))
    return layers


def _found(function: Functional, x: Inputs, run: Trace) -> tuple[Layer, ...]:
    """The layers of a pass."""
    captured = planned(function, x, run)
    plans = function.cache.plans.values()
    reasons = {name: why for plan in plans for name, why in plan.exact.items()}
    return find_layers(captured, function.names, reasons)


def everything(function: Functional) -> Layer:
    """All parameters as one layer."""
    return Layer("all", {name: tuple(shape) for name, shape in function.space.shapes.items()})


def _assign(
    structure: Structure, layers: Sequence[Layer], function: Functional, widest: int
) -> list[Assignment]:
    """The treatment of every layer."""
    if structure == "full":
        return [Assignment(everything(function), "full", "")]
    chosen = by_layer(structure, layers)
    return [Assignment(layer, *treatment(layer, chosen[layer.name], widest)) for layer in layers]


def _affordable(
    structures: Sequence[Structure], layers: Sequence[Layer], function: Functional, request: Request
) -> tuple[list[list[Assignment]], Request]:
    """The treatments, with diagonals for the widest Kronecker factors if the sums do not fit otherwise."""
    asked, meta = request, torch.device("meta")
    while True:
        plans = [_assign(structure, layers, function, request.widest) for structure in structures]
        sums = _first_sums(plans, request, function, meta)
        plan = _memory(function, plans, sums, request)
        if plan.peak <= plan.budget:
            return plans, request
        kept = [size for s in sums.values() for size in _matrices(s) if size > NARROW]
        if not kept:  # nothing smaller is left; the error is about what was asked for
            plans = [_assign(structure, layers, function, asked.widest) for structure in structures]
            _require_memory(_memory(function, plans, _first_sums(plans, asked, function, meta), asked))
        request = replace(request, widest=max(kept) - 1)


def _matrices(statistic: Sums) -> list[int]:
    """Rows of the Kronecker factors that are matrices and could be diagonals."""
    if not isinstance(statistic, KroneckerSums | RowMomentSums) or statistic.layer.groups > 1:
        return []
    return [size for side, size in sides(statistic.layer).items() if side not in statistic.wide]


def _key(assignment: Assignment) -> tuple[str, str]:
    """Statistics of the first pass that two structures can share."""
    how = {"ekfac": "kfac", "full": "block"}.get(assignment.how, assignment.how)
    return "all parameters" if assignment.how == "full" else assignment.layer.name, how


def _place(assignment: Assignment) -> tuple[str, str, bool]:
    """The statistics that a block is made of, of either pass."""
    return *_key(assignment), assignment.how == "ekfac"


def _first_sums(
    plans: Sequence[Sequence[Assignment]], request: Request, function: Functional, device: torch.device
) -> dict[tuple[str, str], Sums]:
    """Empty statistics of all layers and structures, none twice."""
    unique = {_key(a): a for plan in plans for a in plan}
    return {
        key: make_sums(a.layer, key[1], request.sharing, function.dtype, device, request.widest)
        for key, a in unique.items()
    }


def _second_sums(
    plans: Sequence[Sequence[Assignment]], sums: dict[tuple[str, str], Sums], share: Share
) -> dict[tuple[str, str], EigenvalueSums | RowEigenvalueSums]:
    """Eigenvalue statistics of the layers that are eigenvalue-corrected; factors that only they need go."""
    firsts = {}
    others = {_key(a) for plan in plans for a in plan if a.how != "ekfac"}
    for key in dict.fromkeys(_key(a) for plan in plans for a in plan if a.how == "ekfac"):
        first = sums[key] if key in others else sums.pop(key)
        assert isinstance(first, KroneckerSums | RowMomentSums)
        firsts[key] = first
    return dict(zip(firsts, shared_eigenvalue_sums(list(firsts.values()), share), strict=True))


def _memory(
    function: Functional,
    plans: Sequence[Sequence[Assignment]],
    sums: Mapping[Any, Sums],
    request: Request,
) -> Plan:
    """The memory of the statistics, here without numbers."""
    sizes = [(f"{key[1]} of {key[0]}", sum(t.nbytes for t in s.tensors.values())) for key, s in sums.items()]
    largest = sorted(sizes, key=lambda item: -item[1])
    few = [*largest[:5], ("the other layers", sum(size for _, size in largest[5:]))]
    corrected = {_key(a): a.layer.size for plan in plans for a in plan if a.how == "ekfac"}
    if corrected:
        few.append(("eigenvalues", sum(corrected.values()) * wide_type(function.dtype).itemsize))
    passing = max(_added(sums), _decomposed(sums, corrected))
    few.append(("what a batch adds, or eigenvectors in the making", passing))
    if function.precision.sums == "float64":
        few.append(("sums in float64", sum(total_bytes(s.tensors) for s in sums.values())))
    budget = parse_bytes(request.memory, function.device)
    return Plan(f"curvature of {function.space.dim} parameters", budget, tuple(few))


def _added(sums: Mapping[Any, Sums]) -> int:
    """Bytes that a batch takes beside the statistics: moments of inputs until its end, and what it adds."""
    inputs = sum(s.tensors["inputs"].nbytes for s in sums.values() if isinstance(s, KroneckerSums))
    added = (t.nbytes for s in sums.values() for t in s.tensors.values())
    return inputs + max(added, default=0)


def _decomposed(sums: Mapping[Any, Sums], corrected: Collection[Any]) -> int:
    """Bytes beside the factors that are decomposed: their means, their eigenvectors and the workspace."""
    products = {key: s for key, s in sums.items() if isinstance(s, KroneckerSums | RowMomentSums)}
    matrices = [
        t
        for key, s in products.items()
        for t in s.tensors.values()
        if (key in corrected or s.wide) and t.ndim > 1 and t.shape[-1] == t.shape[-2]
    ]
    workspace = (t.shape[:-2].numel() * eigh_bytes(t.shape[-1], t.itemsize) for t in matrices)
    return 2 * sum(t.nbytes for t in matrices) + max(workspace, default=0)


def _require_memory(plan: Plan) -> None:
    """Raise if the statistics would not fit."""
    require(
        plan,
        [
            'use structure="kfac" or "diagonal"',
            'use structure="matrix-free"',
            "select parameters with linnet.linearize(model, params=...)",
        ],
    )


def _settled(
    request: Request,
    layers: Sequence[Layer],
    look: Trace,
    first: Batch,
    f: Tensor,
    sums: Sequence[Sums],
    function: Functional,
    batches: Batches,
) -> Request:
    """The request with an expectation where the choice was left open; f are the outputs of one example."""
    if request.expectation.kind != "auto":
        return request
    exact = replace(request.expectation, kind="exact")
    closed = has_closed_form(function, exact, sums)
    if closed and remembered_inputs(function, look, sums[0].layer.names) is not None:
        return replace(request, expectation=exact)  # no columns are made
    count = exact.count_of_one(f, first.y)
    passes = exact_passes(layers, count)
    if batches.share.world > 1:  # the first batches of others may have other shapes; all decide alike
        passes = -float(least(-math.ceil(passes)))
    chosen, reason = by_cost(exact, passes)
    return replace(request, expectation=chosen, reason=reason)


def _fields(plans: Sequence[Sequence[Assignment]]) -> int:
    """The number of copies of receptive fields for all columns: plain, and for EKFAC in its basis too."""
    held = {"diagonal": 1, "ekfac": 2}
    shared = (a for plan in plans for a in plan if a.layer.factored and a.layer.form.positions > 1)
    return max((held.get(a.how, 0) for a in shared), default=0)


def _closed_examples(
    look: Trace, first: Batch, function: Functional, request: Request, sums: Mapping[Any, Sums]
) -> int | None:
    """Examples at once where the outputs are the only layer's result; ``None`` where columns are needed."""
    statistics = list(sums.values())
    if not has_closed_form(function, request.expectation, statistics):
        return None
    if remembered_inputs(function, look, statistics[0].layer.names) is None:
        return None
    budget = parse_bytes(request.memory, function.device)
    return min(DEFAULT_BLOCK, plan_chunks(function, first, 1, 0, budget).examples)


def _row_numbers(statistic: Sums) -> int:
    """Numbers in the gradients of one example and column that the statistic forms whole."""
    closed = isinstance(statistic, KroneckerSums) or (
        not isinstance(statistic, RowMomentSums)
        and set(statistic.tensors) == {"squares"}
        and (statistic.layer.factored or statistic.layer.embedding)
    )
    return 0 if closed else statistic.layer.size
