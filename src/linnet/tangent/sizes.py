"""Sizes of inputs beside the example axis: which of them a traced network leaves free.

``torch.export`` fixes a size where the network's Python or its layers do. Of the others it knows which are
equal, and between what bounds they lie; the graph refuses everything else in words, since a size that was
divided by or compared with stands in it as a number.
"""

from __future__ import annotations

import bisect
import copyreg
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from linnet.tangent.batch import Inputs, batch_size, map_tensors, tensors_in
from linnet.tangent.functional import call_arguments

Axis = tuple[int, int]  # which of the input tensors, and its dimension
MOST = 2**31 - 1  # examples of a batch


@dataclass(frozen=True, eq=False)
class Prototype:
    """Examples like those to come."""

    x: Inputs  # A batch
    # axes that keep their sizes; all others vary where the network allows it
    fixed: frozenset[Axis] = frozenset()
    alone: bool = True  # whether exporters are to be told that a batch may be of one example

    def rigid(self) -> Prototype:
        """The same with no axis free but that of the examples."""
        every = enumerate(tensors_in(self.x))
        return replace(self, fixed=frozenset((i, d) for i, t in every for d in range(1, t.ndim)))

    def only(self, free: Sequence[FreeSize]) -> Prototype:
        """The same with no axis free but these, and that of the examples."""
        return replace(self, fixed=self.rigid().fixed - {axis for one in free for axis in one.axes})


class FreeSize(NamedTuple):
    """A size that may vary."""

    axes: tuple[Axis, ...]  # where it stands: axes that always have the same size
    size: int  # the size that was traced
    least: int  # the least that the graph holds for
    most: int  # the most

    def others(self) -> list[int]:
        """Other sizes to try: the least, and one less and one more, which break every divisibility."""
        tried = {self.least, self.size - 1, self.size + 1} - {self.size}
        return sorted(size for size in tried if max(self.least, 1) <= size <= self.most)


def in_both(first: Sequence[FreeSize], second: Sequence[FreeSize]) -> list[FreeSize]:
    """Sizes that two traces leave free, within the bounds and with the equalities of both."""
    found: list[FreeSize] = []
    for one in [*first, *second]:
        met = [other for other in found if {*other.axes} & {*one.axes}]
        every = [*met, one]
        axes = tuple(dict.fromkeys(axis for part in every for axis in part.axes))
        least, most = max(part.least for part in every), min(part.most for part in every)
        found = [other for other in found if other not in met] + [FreeSize(axes, one.size, least, most)]
    free = [{axis for one in given for axis in one.axes} for given in (first, second)]
    return [one for one in found if {*one.axes} <= free[0] & free[1]]


class Traced(NamedTuple):
    """A network as a graph."""

    module: fx.GraphModule  # the graph
    free: list[FreeSize]  # sizes that may vary, beside the number of examples


def _as_call(dim: Any) -> tuple[Any, tuple[()]]:
    """How a dimension that is a class is pickled: by the call that made it."""
    return partial(torch.export.Dim, dim.__name__, min=dim.min, max=dim.max), ()


def dimensions(like: Prototype, names: Sequence[str]) -> dict[str, Any]:
    """What ``torch.export`` is told of sizes."""
    n, auto = batch_size(like.x), torch.export.Dim.AUTO
    batch = torch.export.Dim("batch", min=1, max=MOST) if like.alone else auto
    if isinstance(batch, type):  # before torch 2.7 a Dim is a class of its own, which pickle does not find
        copyreg.pickle(cast(Any, type(batch)), _as_call)
    found = iter(range(len(tensors_in(like.x))))

    def free(t: Any) -> Any:
        if isinstance(t, Mapping):
            return {key: free(value) for key, value in t.items()}
        if isinstance(t, list | tuple):
            return type(t)(free(value) for value in t)
        if not isinstance(t, Tensor):
            return None
        i = next(found)
        if not t.ndim or t.shape[0] != n:
            return None
        varied = {d: auto for d in range(1, t.ndim) if t.shape[d] > 1 and (i, d) not in like.fixed}
        return {0: batch, **varied}

    args, kwargs = call_arguments(like.x)
    return dict(zip(names, map(free, [*args, *kwargs.values()]), strict=True))


def resized(x: Inputs, free: FreeSize, size: int) -> Inputs:
    """Examples of another size: cut, or continued from their beginning."""
    found = iter(range(len(tensors_in(x))))

    def other(t: Tensor) -> Tensor:
        i = next(found)
        for d in (d for number, d in free.axes if number == i):
            t = t.index_select(d, torch.arange(size, device=t.device) % t.shape[d])
        return t

    return map_tensors(other, x)


def free_sizes(made: torch.export.ExportedProgram) -> list[FreeSize]:
    """Sizes that a trace leaves free, the number of examples aside."""
    places: dict[Any, list[Axis]] = {}
    hints: dict[Any, int] = {}
    for i, shape in enumerate(_shapes(made)):
        for d, size in enumerate(shape):
            if d and not isinstance(size, int):
                places.setdefault(size.node.expr, []).append((i, d))
                hints[size.node.expr] = size.node.hint
    found = []
    for expr, axes in places.items():
        bounds = made.range_constraints.get(expr)
        if bounds is None:  # a size computed from another, such as its double
            continue
        least, most = (int(b) if b.is_Integer else None for b in (bounds.lower, bounds.upper))
        found.append(FreeSize(tuple(axes), hints[expr], least or 1, MOST if most is None else most))
    return found


def that_run(module: nn.Module, x: Inputs, free: Sequence[FreeSize]) -> list[FreeSize]:
    """Free sizes that a module really takes: a trace may hold for few of those it leaves free."""

    def runs(sizes: Mapping[FreeSize, int]) -> bool:
        other = x
        for one, size in sizes.items():
            other = resized(other, one, size)
        args, kwargs = call_arguments(other)
        try:
            module(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, AssertionError):  # torch's own refusals are assertions
            return False
        return True

    found = []
    for one in free:
        larger = {min(size, one.most) for size in (one.size + 1, 2 * one.size)}
        if not all(runs({one: size}) for size in larger):
            continue
        least = bisect.bisect_left(range(one.size), True, lo=1, key=lambda size: runs({one: size}))
        found.append(one._replace(least=least))
    return found if runs({one: one.least for one in found}) else []


def _shapes(made: torch.export.ExportedProgram) -> list[Sequence[int | torch.SymInt]]:
    """Shapes of the input tensors, sizes that vary as symbols."""
    inputs = set(made.graph_signature.user_inputs)
    nodes = (node for node in made.graph.nodes if node.op == "placeholder" and node.name in inputs)
    return [node.meta["val"].shape for node in nodes if isinstance(node.meta.get("val"), Tensor)]


def refuse_others(graph: fx.Graph, x: Inputs, free: Sequence[FreeSize]) -> None:
    """Let a graph refuse sizes that it does not hold for."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    given, n = tensors_in(x), batch_size(x)
    if len(inputs) != len(given):  # an input that is no tensor, of which nothing is known
        return
    by_axis = {axis: one for one in free for axis in one.axes}
    with graph.inserting_before(inputs[-1].next):
        for i, (node, t) in enumerate(zip(inputs, given, strict=True)):
            for d in range(1, t.ndim) if t.ndim and t.shape[0] == n else ():
                size = graph.call_function(torch.ops.aten.sym_size.int, (node, d))
                where, one = f"dimension {d} of {node.name}", by_axis.get((i, d))
                if one is None:
                    said = f"{where} must have the size {t.shape[d]} of the examples that were exported"
                    _require(graph, operator.eq, size, t.shape[d], said)
                    continue
                if one.least > 1:
                    _require(graph, operator.ge, size, one.least, f"{where} must be at least {one.least}")
                if one.most < MOST:
                    _require(graph, operator.le, size, one.most, f"{where} must be at most {one.most}")
                first, axis = one.axes[0]
                if (first, axis) != (i, d):
                    other = graph.call_function(torch.ops.aten.sym_size.int, (inputs[first], axis))
                    said = f"{where} must equal dimension {axis} of {inputs[first].name}"
                    _require(graph, operator.eq, size, other, said)


def _require(graph: fx.Graph, compare: Any, size: fx.Node, other: Any, said: str) -> None:
    """An assertion about a size."""
    holds = graph.call_function(compare, (size, other))
    graph.call_function(torch.ops.aten._assert_scalar.default, (holds, said))
