"""A network and its derivative as one plain graph, which needs nothing but torch.

The network is traced by ``torch.export`` to a graph of ATen's operations; ``graph_rules`` adds the tangents
operation by operation; and the whole is traced again, to a module that holds f₀, δ and no trace of how it was
made. Batches may have any size, and so may images and sequences where the network allows it.

``torch.export`` fixes a size where the network's Python or its layers do. Of the others it knows which are
equal, and between what bounds they lie; the graph refuses everything else in words, since a size that was
divided by or compared with stands in it as a number.
"""

from __future__ import annotations

import bisect
import copyreg
import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from linnet.errors import LinnetError, ModelError
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import OutputAdapter, adapt_outputs, call_arguments
from linnet.tangent.graph_rules import RULES, ZERO, OpCall, Tangent, bind
from linnet.tangent.linearized import as_modules
from linnet.tangent.modes import differentiable_kernels, has_recurrence, in_exact_mode
from linnet.tree import map_tensors, tensors_in

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


Finish = Callable[[Tensor, Sequence[Tensor]], Any]  # outputs of the module, from f₀(x) and J(x)δ


class _TensorNetwork(nn.Module):
    """A network that returns one tensor (N, C); inputs of any strides, in the type of its weights."""

    def __init__(self, model: nn.Module, output: OutputAdapter) -> None:
        super().__init__()
        self.model, self.output = model, output
        kinds = (p.dtype for p in model.parameters() if p.is_floating_point())
        self.dtype = next(kinds, torch.get_default_dtype())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = (map_tensors(self._own, given) for given in (args, kwargs))
        return adapt_outputs(self.model(*args, **kwargs), self.output).flatten(1)

    def _own(self, t: Tensor) -> Tensor:
        t = t.clone(memory_format=torch.contiguous_format)
        return t.to(self.dtype) if t.is_floating_point() and t.dtype != self.dtype else t


class Duals(fx.Interpreter):
    """Runs a graph with the tangents of several directions beside its values."""

    def __init__(self, graph: fx.GraphModule, directions: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.extra_traceback = False  # which would go into the text of our errors
        self.directions = directions
        self.moved: list[dict[fx.Node, Tangent]] = [{} for _ in directions]

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node; its tangents are kept."""
        constant = n.target is _constant()
        value = self.fetch_args_kwargs_from_env(n)[0][0] if constant else super().run_node(n)
        for direction, moved in zip(self.directions, self.moved, strict=True):
            weight = n.op in ("placeholder", "get_attr")
            moved[n] = direction.get(str(n.target)) if weight else self._tangent(n, value, moved)
        return value

    def _tangent(self, n: fx.Node, value: Any, moved: Mapping[fx.Node, Tangent]) -> Tangent:
        """The tangent of a node, from those before it."""
        args, kwargs = _moved(n.args, moved), _moved(n.kwargs, moved)
        if n.op == "output":
            return args[0]
        if n.op != "call_function" or n.target is _constant() or not _any(args, kwargs):
            return None
        if n.target is operator.getitem:
            return args[0][n.args[1]]
        op = cast(torch._ops.OpOverload, n.target)
        name = _name(op)
        floating = [t for t in flat_values(value) if isinstance(t, Tensor) and t.is_floating_point()]
        if name in ZERO or not floating:
            return None
        own, others = self.fetch_args_kwargs_from_env(n)
        call = OpCall(op, bind(op, own, others), bind(op, args, kwargs), value)
        tangents = {key: t if _any(t) else None for key, t in call.tangents.items()}
        if name not in RULES:
            raise _without_rule(name)
        return RULES[name](OpCall(op, call.given, tangents, value))


def _name(op: torch._ops.OpOverload) -> str:
    """The name of an operation, whatever the kinds of its arguments."""
    return op._schema.name.removeprefix("aten::")


def _moved(args: Any, moved: Mapping[fx.Node, Tangent]) -> Any:
    """Tangents of nodes in the structure of arguments; ``None`` for everything else."""
    if isinstance(args, fx.Node):
        return moved.get(args)
    if isinstance(args, Mapping):
        return {key: _moved(value, moved) for key, value in args.items()}
    if isinstance(args, list | tuple):
        return [_moved(value, moved) for value in args]
    return None


def name_of(node: fx.Node) -> str:
    """The name of a node's operation, "" where it is none of torch's."""
    return _name(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""


def flat_values(value: Any) -> Iterator[Any]:
    """Everything in nested sequences and dicts."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        yield value
        return
    for part in value:
        yield from flat_values(part)


def _any(*given: Any) -> bool:
    """Whether any tangent is there."""
    return any(isinstance(t, Tensor) for t in flat_values(given))


class _WithTangents(nn.Module):
    """What is traced the second time: the graph with its weights, and the directions."""

    def __init__(
        self, graph: fx.GraphModule, directions: Sequence[Params], ties: Mapping[str, str], finish: Finish
    ) -> None:
        super().__init__()
        self.network, self.finish, self.ties = graph, finish, dict(ties)
        self.directions = nn.ModuleList(as_modules(direction) for direction in directions)
        self.requires_grad_(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        moved = []
        for direction in self.directions:
            known = dict(direction.named_parameters())
            moved.append({place: known[own] for place, own in self.ties.items() if own in known})
        duals = Duals(self.network, moved)
        (value,) = duals.run(*flat_values(args), *flat_values(kwargs), enable_io_processing=False)
        (last,) = (n for n in self.network.graph.nodes if n.op == "output")
        tangents = [moved[last][0] for moved in duals.moved]
        return self.finish(value, [torch.zeros_like(value) if t is None else t for t in tangents])


@in_exact_mode
@torch.no_grad()
def plain_module(
    model: nn.Module,
    directions: Sequence[Params],
    finish: Finish,
    like: Prototype,
    output: OutputAdapter = None,
) -> Traced:
    """A module that computes something of f₀(x) and of J(x)δ for some directions δ, with torch alone."""
    found = network_graph(model, like, output)
    ties = found.places(list(dict.fromkeys(name for direction in directions for name in direction)))
    return finished(_WithTangents(found.graph, directions, ties, finish), found)


@dataclass(frozen=True, eq=False)
class NetworkGraph:
    """A network as a graph of operations that have rules."""

    graph: fx.GraphModule  # the graph
    like: Prototype  # the few examples that were traced
    names: list[str]  # of the network's inputs
    free: list[FreeSize]  # sizes that may vary
    parameters: dict[str, nn.Parameter]  # of the network, by every name

    def places(self, names: Sequence[str]) -> dict[str, str]:
        """Which of some weights stands where in the graph; tied ones in several places."""
        owners = {id(self.parameters[f"model.{name}"]): name for name in names}
        every = self.parameters.items()
        return {f"of.{place}": owners[id(p)] for place, p in every if id(p) in owners}


def network_graph(model: nn.Module, like: Prototype, output: OutputAdapter = None) -> NetworkGraph:
    """A network as a graph."""
    network, like = _TensorNetwork(model, output), Prototype(_few(like.x), like.fixed)
    names = _names(model, like.x)
    with torch.no_grad():
        graph, free = _traced(network, like, names, decompose=True)
    every = dict(network.named_parameters(remove_duplicate=False))
    return NetworkGraph(graph, like.only(free), names, free, every)


def finished(module: nn.Module, found: NetworkGraph) -> Traced:
    """What was made of a network's graph, as a graph in its place."""
    like = found.like
    try:
        made, left = _traced(module, like, found.names)
    except ModelError:  # torch cannot always prove what holds for a batch of one
        made, left = _traced(module, like := replace(like, alone=False), found.names)
    free = in_both(found.free, left)
    refuse_others(made.graph, like.x, free)
    made.recompile()
    made.meta["dynamic_shapes"] = dimensions(like.only(free), found.names)
    return Traced(made, free)


def _traced(module: nn.Module, like: Prototype, names: list[str], decompose: bool = False) -> Traced:
    """A module as a graph of plain operations, the example axis and others free."""
    args, kwargs = call_arguments(like.x)
    shapes = dimensions(like, names)
    with warnings.catch_warnings(), differentiable_kernels(has_recurrence(module)):
        warnings.simplefilter("ignore")  # of torch's own tracing
        try:
            named = _Named(module.eval(), names)
            made = torch.export.export(named, args, kwargs, dynamic_shapes=shapes, strict=False)
            if decompose:
                made = _decomposed(made)
            found, free = made.module(), free_sizes(made)
        except LinnetError:
            raise
        except Exception as error:  # torch raises of many kinds here
            raise _untraceable(error) from error
    for node in list(found.graph.nodes):  # checks of shapes, which no other exporter takes, and of types
        guards = node.op == "call_module" and node.target == "_guards_fn"
        if guards or node.target is torch.ops.aten._assert_tensor_metadata.default:
            found.graph.erase_node(node)
    for node in found.graph.find_nodes(op="get_attr"):  # torch 2.6 leaves constants that are no buffers
        place, _, name = str(node.target).rpartition(".")
        owner, value = found.get_submodule(place), operator.attrgetter(str(node.target))(found)
        if isinstance(value, Tensor) and name not in owner._buffers and name not in owner._parameters:
            delattr(owner, name)
            owner.register_buffer(name, value)
    found.graph.eliminate_dead_code()
    found.graph._tracer_cls = None  # torch's own cannot be made again when the module is unpickled
    # a module that can be put in evaluation mode as any other
    return Traced(fx.GraphModule(found, found.graph), free)


class _Named(nn.Module):
    """A module whose inputs go by names, which torch gives to the inputs of what it exports."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.of = module

        def forward(*args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        self.forward = forward


def _names(model: nn.Module, x: Inputs) -> list[str]:
    """What the network calls its inputs."""
    args, kwargs = call_arguments(x)
    if kwargs:
        return list(kwargs)
    try:
        own = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # a compiled forward without a signature
        own = []
    names = [p.name for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names[: len(args)] if len(names) >= len(args) else [f"x{i}" for i in range(len(args))]


@functools.cache
def _constant() -> torch._ops.OpOverload:
    """An operation that returns its argument without a derivative: torch's own is lost in decompositions."""
    made = torch.library.custom_op(
        "linnet::constant", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    made.register_fake(torch.empty_like)
    return torch.ops.linnet.constant.default


def _decomposed(made: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same graph in operations that have rules, as far as torch knows how."""
    for node in made.graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            node.target = _constant()
    made = made.run_decompositions()
    further = {
        node.target
        for node in made.graph.nodes
        if node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and _name(node.target) not in RULES
        and _name(node.target) not in ZERO
        and _floating(node)
        and any(map(_floating, node.all_input_nodes))  # what no tangent passes stays as it is
    }
    known = torch._decomp.decomposition_table
    table = torch.export.default_decompositions()
    more = {op: known[op] for op in further if op in known}
    if not more:
        return made
    for op, rule in more.items():
        table[op] = rule
    decomposed: torch.export.ExportedProgram = made.run_decompositions(table)
    return decomposed


def _floating(node: fx.Node) -> bool:
    """Whether a node gives real numbers."""
    values = flat_values(node.meta.get("val"))
    return any(isinstance(t, Tensor) and t.is_floating_point() for t in values)


def _few(x: Inputs) -> Inputs:
    """Two examples, or more where another input has as many rows; tensors of their own each."""
    n = batch_size(x)
    shared = {t.shape[0] for t in tensors_in(x) if t.ndim and t.shape[0] != n}
    count = next(k for k in range(2, len(shared) + 3) if k not in shared)
    few = take(x, torch.arange(count) % n)
    return map_tensors(lambda t: t.detach().clone(), few)


def _untraceable(error: Exception) -> ModelError:
    """The error of a network that torch cannot trace."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelError(
        f"model cannot be traced by torch.export: {first[:200]}",
        expected="a network whose Python does not depend on the values or the number of its inputs",
        remedy="see that torch.export.export(model, (x,)) works; conditions on values go by torch.where",
    )


def _without_rule(name: str) -> ModelError:
    """The error of an operation whose derivative is not known."""
    return ModelError(
        f"the network has an operation without a rule for its derivative: aten::{name}",
        expected="operations of torch that are differentiated by the rules of linnet.tangent.graph_rules",
        remedy="leave the layers up to it out of params= of linnet.linearize, or keep the fit in linnet",
    )
