"""A network and its derivative as one plain graph, which needs nothing but torch.

The network is traced by ``torch.export`` to a graph of ATen's operations; autograd differentiates that graph
on tensors of free sizes, twice in reverse mode for J δ, while ``make_fx`` writes down the operations; and the
whole is traced again, to a module that holds f₀, δ and no trace of how it was made. Batches may have any
size, and so may images and sequences where the network allows it. Torch's own forward mode would fix them.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from linnet.errors import LinnetError, ModelError
from linnet.shown import first_line
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.forward_mode import Params, jvps_double_backward
from linnet.tangent.functional import FAILURES, OutputAdapter, adapt_outputs, call_arguments
from linnet.tangent.modes import CallMode, differentiable_kernels, has_recurrence, in_exact_mode
from linnet.tree import map_tensors, tensors_in

Axis = tuple[int, int]  # which of the input tensors, and its dimension
MOST = 2**31 - 1  # examples of a batch
# Layers that pad by the size of an image, as those of EfficientNets do: with free sizes torch traces their
# arithmetic by symbols, which took more than four minutes where a trace of one size takes seconds.
PADDED = 8


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


# outputs of the module, from f₀(x) (N, C) and its derivatives: J(x)δ (N, C), or rows (N, C, *shape) by weight
Finish = Callable[[Tensor, Sequence[Tensor]], Any]
State = dict[str, Tensor]  # weights and constants of a graph, by their place
# f₀(x) and its derivatives, from the state, other tensors that were given, and the inputs
Derive = Callable[[State, Sequence[Tensor], Sequence[Any]], list[Tensor]]


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


def name_of(node: fx.Node) -> str:
    """The name of a node's operation, whatever the kinds of its arguments; "" where it is none of torch's."""
    op = node.target
    return op._schema.name.removeprefix("aten::") if isinstance(op, torch._ops.OpOverload) else ""


def bound(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name."""
    schema = op._schema.arguments
    named = dict(zip((a.name for a in schema), args, strict=False)) | {**kwargs}
    return {a.name: named.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}


def flat_values(value: Any) -> Iterator[Any]:
    """Everything in nested sequences and dicts."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        yield value
        return
    for part in value:
        yield from flat_values(part)


class _Convolution(torch.autograd.Function):
    """A convolution whose derivatives hold for inputs of any size: torch's second one fixes those it sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, options: tuple[Any, ...]) -> Tensor:
        """The convolution, without a bias."""
        ctx.save_for_backward(x, weight)
        ctx.options = options
        found: Tensor = torch.ops.aten.convolution.default(x, weight, None, *options)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients in the input and the weight."""
        return *cast(Any, _PulledConvolution).apply(gradients[0], *ctx.saved_tensors, ctx.options), None


class _PulledConvolution(torch.autograd.Function):
    """The gradients of a convolution, differentiated in that of its result."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, options: tuple[Any, ...]) -> Any:
        """Gradients in the input and the weight."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.options = options
        found = torch.ops.aten.convolution_backward(g, x, weight, None, *options, (True, True, False))
        return found[:2]

    @staticmethod
    def backward(ctx: Any, *moved: Tensor | None) -> Any:
        """The convolution of the one that moves with the other, for both."""
        x, weight = ctx.saved_tensors
        pairs = [
            pair
            for pair in ((moved[0], weight), (x, moved[1]))
            if pair[0] is not None and pair[1] is not None
        ]
        parts = [torch.ops.aten.convolution.default(*pair, None, *ctx.options) for pair in pairs]
        return sum(parts[1:], parts[0]), None, None, None


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """A convolution, and a bias added."""
    out: Tensor = cast(Any, _Convolution).apply(x, weight, options)
    return out if bias is None else out + _by_channel(bias, x)


def _by_channel(t: Tensor, x: Tensor) -> Tensor:
    """Numbers of channels beside maps."""
    return t.view(1, -1, *[1] * (x.dim() - 2))


def normalized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    """Numbers less their mean over their standard deviation."""
    centered = x - x.mean(dims, keepdim=True)
    unit: Tensor = centered * torch.rsqrt((centered * centered).mean(dims, keepdim=True) + eps)
    return unit


def batch_normalized(call: Mapping[str, Any]) -> Tensor:
    """Batch normalization before its weights; without running statistics, that of single examples."""
    x: Tensor = call["input"]
    if call.get("training", False):
        return normalized(x, [d for d in range(x.dim()) if d != 1], call["eps"])
    scale = torch.rsqrt(call["running_var"] + call["eps"])
    return (x - _by_channel(call["running_mean"], x)) * _by_channel(scale, x)


def group_normalized(call: Mapping[str, Any]) -> Tensor:
    """Group normalization before its weights."""
    x: Tensor = call["input"]
    return normalized(x.reshape(x.shape[0], call["group"], -1), [2], call["eps"]).reshape(x.shape)


def without_padding(rows: Tensor, ids: Tensor, padding: int = -1) -> Tensor:
    """Rows of a table, of which that of the padding does not move."""
    return rows if padding < 0 else torch.where((ids == padding).unsqueeze(-1), rows.detach(), rows)


class Differentiable(fx.Interpreter, ABC):
    """Runs a graph with given weights and constants, in operations whose derivatives hold for all sizes."""

    def __init__(self, graph: fx.GraphModule, state: State) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.extra_traceback = False  # which would go into the text of our errors
        self.state = state

    @abstractmethod
    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""

    def plain_value(self, n: fx.Node) -> Any:
        """The value of a node whose weights are those of the network."""
        if n.op == "get_attr":
            return self.state[str(n.target)]
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is _constant():
            return args[0].detach()
        if name_of(n) == "copy":
            return args[1].expand(args[0].shape).to(args[0].dtype)
        if name_of(n) == "convolution":
            return _affine(*args)
        if name_of(n) == "embedding":
            table, ids, *rest = args
            rows = table.index_select(0, ids.flatten()).unflatten(0, ids.shape)
            return without_padding(rows, ids, *rest[:1])
        if "native_batch_norm" in name_of(n) or name_of(n) == "native_group_norm":
            given = bound(cast(Any, n.target), args, kwargs)
            unit = group_normalized(given) if "group" in given else batch_normalized(given)
            scale, shift = (given[name] for name in ("weight", "bias"))
            scaled = unit if scale is None else unit * _by_channel(scale, unit)
            return (scaled if shift is None else scaled + _by_channel(shift, unit),)
        return super().run_node(n)

    def outputs(self, *inputs: Any) -> Tensor:
        """f₀(x)."""
        found: Tensor = next(flat_values(self.run(*inputs, enable_io_processing=False)))
        return found


class OneForAll(Differentiable):
    """Runs a graph whose weights are the same for all examples."""

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        return self.plain_value(n)


@in_exact_mode
def plain_module(
    model: nn.Module,
    directions: Sequence[Params],
    finish: Finish,
    like: Prototype,
    output: OutputAdapter = None,
) -> Traced:
    """A module that computes something of f₀(x) and of J(x)δ for some directions δ, with torch alone."""
    found = network_graph(model, like, output)
    names = list(dict.fromkeys(name for direction in directions for name in direction))
    owners = found.places(names)

    def tangents(state: State, moved: Sequence[Tensor], inputs: Sequence[Any]) -> list[Tensor]:
        """f₀(x) and J(x)δ for every direction."""
        theta = {owner: state[place] for place, owner in owners.items() if place in state}
        values = iter(moved)
        along = [{name: next(values) for name in direction} for direction in directions]

        def network(params: Params) -> Tensor:
            own = {place: params[owner] for place, owner in owners.items() if place in state}
            return OneForAll(found.graph, state | own).outputs(*inputs)

        value, products = jvps_double_backward(network, theta, along)
        return [value, *products]

    return differentiated(
        found, [t for direction in directions for t in direction.values()], tangents, finish
    )


@dataclass(frozen=True, eq=False)
class NetworkGraph:
    """A network as a graph of torch's core operations."""

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


class _Paddings(CallMode):
    """How much inputs of layers are padded by, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result; a padding is noted."""
        if func is nn.functional.pad:
            self.found.append(tuple(kwargs["pad"] if "pad" in kwargs else args[1]))
        return func(*args, **kwargs)


@torch.no_grad()
def _pads_by_size(network: nn.Module, x: Inputs) -> bool:
    """Whether many layers pad images by as much as their size asks for."""
    if not isinstance(x, Tensor) or x.ndim != 4 or min(x.shape[2:]) < 2:
        return False
    found = []
    for images in (x, x[:, :, 1:, 1:]):
        with _Paddings() as seen:
            try:
                network(images)
            except FAILURES:  # it takes images of one size
                return False
        found.append(seen.found)
    return len(found[0]) >= PADDED and found[0] != found[1]


def network_graph(model: nn.Module, like: Prototype, output: OutputAdapter = None) -> NetworkGraph:
    """A network as a graph."""
    network, like = _TensorNetwork(model, output), Prototype(_few(like.x), like.fixed)
    if _pads_by_size(network.eval(), like.x):
        like = like.rigid()
    names = _names(model, like.x)
    with torch.no_grad():
        graph, free = _traced(network, like, names, decompose=True)
    every = dict(network.named_parameters(remove_duplicate=False))
    return NetworkGraph(graph, like.only(free), names, free, every)


def differentiated(found: NetworkGraph, given: Sequence[Tensor], derive: Derive, finish: Finish) -> Traced:
    """A network's graph with derivatives in it, as a graph in its place."""
    graph = found.graph.graph
    places = sorted({str(node.target) for node in graph.find_nodes(op="get_attr")})
    state = {place: operator.attrgetter(place)(found.graph) for place in places}
    inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    constants = [t.detach() for t in (*state.values(), *given)]

    def flat(*tensors: Any) -> list[Tensor]:
        known, rest = dict(zip(state, tensors, strict=False)), tensors[len(state) :]
        return derive(known, rest[: len(given)], rest[len(given) :])

    mode = next(t for t in inputs if isinstance(t, Tensor)).fake_mode  # type: ignore[attr-defined]
    try:
        with mode, enable_python_dispatcher(), torch.enable_grad():
            fake = [mode.from_tensor(t, static_shapes=True) for t in constants]
            made = make_fx(flat)(*fake, *inputs)
    except LinnetError:
        raise
    except Exception as error:  # torch raises of many kinds here
        raise _untraceable("the derivatives cannot be traced", error, DIFFERENTIABLE, ELSEWHERE) from error
    with torch.no_grad():
        return finished(_Bound(made, constants, finish), found)


class _Bound(nn.Module):
    """A graph of constants and examples, with the constants in place."""

    def __init__(self, graph: fx.GraphModule, constants: Sequence[Tensor], finish: Finish) -> None:
        super().__init__()
        self.graph, self.finish, self.count = graph, finish, len(constants)
        for i, t in enumerate(constants):
            self.register_buffer(f"constant_{i}", t)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        constants = [self.get_buffer(f"constant_{i}") for i in range(self.count)]
        value, *derivatives = self.graph(*constants, *flat_values(args), *flat_values(kwargs))
        return self.finish(value, derivatives)


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
            raise _untraceable(
                "model cannot be traced by torch.export",
                error,
                "a network whose Python does not depend on the values or the number of its inputs",
                "see that torch.export.export(model, (x,)) works; conditions on values go by torch.where",
            ) from error
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
    """The same graph in torch's core operations."""
    for node in made.graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            node.target = _constant()
    decomposed: torch.export.ExportedProgram = made.run_decompositions()
    return decomposed


def _few(x: Inputs) -> Inputs:
    """Two examples, or more where another input has as many rows; tensors of their own each."""
    n = batch_size(x)
    shared = {t.shape[0] for t in tensors_in(x) if t.ndim and t.shape[0] != n}
    count = next(k for k in range(2, len(shared) + 3) if k not in shared)
    few = take(x, torch.arange(count) % n)
    return map_tensors(lambda t: t.detach().clone(), few)


DIFFERENTIABLE = (
    "layers that torch differentiates twice; for variances, whose weights meet the examples in products, \
convolutions, norms and embeddings"
)
ELSEWHERE = "leave that layer out of params= of linnet.linearize, or keep the fit in linnet"


def _untraceable(what: str, error: Exception, expected: str, remedy: str) -> ModelError:
    """The error of a network that torch cannot trace."""
    return ModelError(f"{what}: {first_line(error)[:200]}", expected, remedy)
