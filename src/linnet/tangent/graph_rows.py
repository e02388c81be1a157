"""A network and the rows of its Jacobian as one plain graph.

Every output of every example gets weights of its own, W + Z with Z = 0: with the examples repeated C times,
the gradient of Σ f_c(x_n; W + Z_nc) with respect to Z_nc is the row J_c(x_n), by one backward pass; repeated
K times, those of K combinations of the outputs. The rules here say what an operation does where its weights
have such an axis in front; ``torch.vmap`` knows more of them, but fixes the number of examples where it is
traced.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from linnet.errors import ModelError
from linnet.tangent.batch import batch_size
from linnet.tangent.functional import Functional
from linnet.tangent.graph import (
    ELSEWHERE,
    Differentiable,
    Finish,
    Prototype,
    State,
    Traced,
    batch_normalized,
    bound,
    differentiated,
    flat_values,
    group_normalized,
    name_of,
    network_graph,
    normalized,
    without_padding,
)
from linnet.tangent.modes import in_exact_mode
from linnet.tree import tensors_in

_BY_NUMBER = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "pow", "exp", "log", "sqrt", "rsqrt", "reciprocal", "tanh",
    "sigmoid", "relu", "abs", "silu", "gelu", "where", "clone", "alias", "_to_copy", "maximum", "minimum",
    "clamp",
})  # fmt: skip
_OF_AXES = frozenset({
    "transpose", "slice", "select", "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind",
})  # fmt: skip
_DIMENSION = ("dim", "dim0", "dim1")  # arguments that count axes


class Place(NamedTuple):
    """Where a tensor has its examples."""

    dim: int  # the axis
    outer: Any = 1  # numbers of the same axis that come before each example's, where axes were joined


class EachOwn(Differentiable):
    """Runs a graph in which some weights have an axis of examples in front."""

    # own (M, *shape)

    def __init__(self, graph: fx.GraphModule, state: State, own: State) -> None:
        super().__init__(graph, state | own)
        self.own = own
        count: Any = next(iter(own.values())).shape[0]
        (self.symbol,) = count.node.expr.free_symbols
        self.count = count
        self.weights: set[fx.Node] = set()  # whose value has that axis where the graph has none
        self.places: dict[fx.Node, Place] = {}  # of values with an example axis of their own

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        if n.op == "get_attr" and n.target in self.own:
            self.weights.add(n)
        value = self._value(n) if n.op == "call_function" else self.plain_value(n)
        if n not in self.weights:
            self._find_examples(n, value)
        return value

    def _value(self, n: fx.Node) -> Any:
        """The value of an operation."""
        name = name_of(n)
        if n.target is operator.getitem:
            if n.args[0] in self.weights:
                self.weights.add(n)
            return self.plain_value(n)
        mine, examples = (
            [m for m in n.all_input_nodes if m in known] for known in (self.weights, self.places)
        )
        if not name or not (mine or name in _PLAIN or (examples and name in _ALWAYS)):
            return self.plain_value(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        op = cast(torch._ops.OpOverload, n.target)
        call = {"op": op, **bound(op, args, kwargs)}
        nodes = bound(op, n.args, n.kwargs)
        own = {key: call[key] for key, node in nodes.items() if isinstance(node, fx.Node) and node in mine}
        if not mine and name in _PLAIN:
            return _PLAIN[name](call)
        if name == "expand" and self._has_examples(call["size"]):  # a token before those of every example
            dim = next(d for d, size in enumerate(call["size"]) if self._has_examples([size]))
            return _beside(own["self"], len(call["size"]), dim).expand(call["size"])
        if mine and not examples:
            self.weights.add(n)
            return self._of_weights(name, call, own)
        if name in _DATA:
            main = [node for key, node in nodes.items() if key in _MAIN and node in self.places]
            return _DATA[name](call, own, self.count, self.places[cast(fx.Node, main[-1])])
        if name in _BY_NUMBER:
            axes = max(t.dim() for key, t in call.items() if isinstance(t, Tensor) and key not in own)
            first = next(m for m in examples if isinstance(self.env[m], Tensor) and self.env[m].dim() == axes)
            dim = self.places[first].dim
            return _again(call, {key: _beside(t, axes, dim) for key, t in own.items()})
        raise _without_rule(name)

    def _has_examples(self, sizes: Sequence[Any]) -> bool:
        """Whether the number of examples is in a size."""
        return any(isinstance(s, torch.SymInt) and self.symbol in s.node.expr.free_symbols for s in sizes)

    def _find_examples(self, n: fx.Node, value: Any) -> None:
        """Note where the examples are."""
        first = next((t for t in flat_values(value) if isinstance(t, Tensor)), None)
        if first is None or not self._has_examples(first.shape):
            return
        dim = next(d for d, size in enumerate(first.shape) if self._has_examples([size]))
        before = next((m for m in n.all_input_nodes if m in self.places), None)
        outer: Any = 1
        if before is not None:
            outer = self.places[before].outer
            if name_of(n) in ("view", "_unsafe_view"):
                shape, place = self.env[before].shape, self.places[before]
                outer = math.prod(shape[: place.dim]) * outer // math.prod(first.shape[:dim])
        self.places[n] = Place(dim, outer)

    def _of_weights(self, name: str, call: dict[str, Any], own: Mapping[str, Tensor]) -> Any:
        """Weights in another form, or computed from weights alone, that axis kept."""
        first = next(iter(own.values()))
        if name in _BY_NUMBER:
            axes = max(t.dim() - (key in own) for key, t in call.items() if isinstance(t, Tensor))
            return _again(call, {key: _behind(t, axes) for key, t in own.items()})
        if name in ("mm", "bmm"):
            return torch.matmul(call["self"], call["mat2"])
        if name == "embedding":
            return without_padding(first[:, call["indices"]], call["indices"], call["padding_idx"])
        if name == "t":
            return first.mT
        if name in ("view", "_unsafe_view"):
            return first.reshape(self.count, *call["size"])
        if name == "expand":
            return _behind(first, len(call["size"])).expand(self.count, *call["size"])
        if name == "permute":
            return first.permute(0, *_shifted(call["dims"], first.dim() - 1))
        if name not in _OF_AXES:
            raise _without_rule(name)
        axes = first.dim() - 1 + (name == "unsqueeze")
        shifted = {key: _shifted(call[key], axes) for key in _DIMENSION if key in call}
        return _again(call, {"self": first, **shifted})


def _shifted(dim: Any, axes: int) -> Any:
    """An axis, or several, behind one that was put in front."""
    return [d % axes + 1 for d in dim] if isinstance(dim, list | tuple) else dim % axes + 1


def _again(call: Mapping[str, Any], changed: Mapping[str, Any]) -> Any:
    """An operation with some arguments changed."""
    given, schema = {**call, **changed}, call["op"]._schema.arguments
    args = [given[a.name] for a in schema if not a.kwarg_only]
    return call["op"](*args, **{a.name: given[a.name] for a in schema if a.kwarg_only})


def _behind(weight: Tensor, axes: int) -> Tensor:
    """Weights (M, *shape) beside others of more axes, M in front of all."""
    return weight.reshape(weight.shape[0], *(1,) * (axes + 1 - weight.dim()), *weight.shape[1:])


def _beside(weight: Tensor, axes: int, dim: int) -> Tensor:
    """Weights (M, *shape) beside values with that many axes, M where those have their examples."""
    wide = _behind(weight, axes)
    if wide.shape[dim + 1] != 1:
        raise _without_rule("with an axis of weights for examples")
    return wide.squeeze(dim + 1).movedim(0, dim)


def _product(call: Mapping[str, Any], own: Mapping[str, Tensor], count: Any, place: Place) -> Tensor:
    """Rows times a matrix, and a bias added."""
    added = "mat1" in call
    rows, matrix = call["mat1" if added else "self"], call["mat2"]
    if place.dim or ("mat1" if added else "self") in own:
        raise _without_rule("mm")
    width = rows.shape[1]
    apart = rows.reshape(place.outer, count, -1, width).transpose(0, 1)  # (M, outer, inner, D)
    inner = apart.shape[2]
    out = torch.matmul(apart.reshape(count, -1, width), matrix)
    if added:
        bias = call["self"]
        out = call["alpha"] * out if call["alpha"] != 1 else out
        bias = call["beta"] * bias if call["beta"] != 1 else bias
        out = out + (bias[:, None] if "self" in own else bias)
    together = out.reshape(count, place.outer, inner, out.shape[2]).transpose(0, 1)
    return together.reshape(rows.shape[0], out.shape[2])


def _products(call: Mapping[str, Any], own: Mapping[str, Tensor], count: Any, place: Place) -> Tensor:
    """Rows (T, examples, D), or the like, times matrices (T, D, E) of every example."""
    rows, matrices = call["self"], call["mat2"]
    if place.dim != 1 or "self" in own:
        raise _without_rule("bmm")
    steps, _, width = rows.shape
    apart = rows.reshape(steps, place.outer, count, -1, width).permute(2, 0, 1, 3, 4)
    outer, inner = apart.shape[2], apart.shape[3]
    out = torch.matmul(apart.reshape(count, steps, -1, width), matrices)
    together = out.reshape(count, steps, outer, inner, out.shape[3]).permute(1, 2, 0, 3, 4)
    return together.reshape(steps, rows.shape[1], out.shape[3])


def _convolution(call: Mapping[str, Any], own: Mapping[str, Tensor], count: Any, place: Place) -> Tensor:
    """A convolution as a product with patches: its gradient by weight is one product an example."""
    x, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"]
    axes = len(call["stride"])
    if call["transposed"] or axes > 2:
        if "weight" in own:
            raise _without_rule("convolution" + "_transpose" * call["transposed"])
        out = _again(call, {"bias": None})
    else:
        steps = {key: list(call[key]) for key in ("stride", "padding", "dilation")}
        steps = {key: value * axes if len(value) == 1 else value for key, value in steps.items()}
        kernel = list(weight.shape[-axes:])
        wide = x
        if axes == 1:
            wide, kernel = x.unsqueeze(2), [1, *kernel]
            steps = {key: [0 if key == "padding" else 1, *value] for key, value in steps.items()}
        stride, padding, dilation = steps["stride"], steps["padding"], steps["dilation"]
        size = [
            (wide.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
            for i in range(2)
        ]
        patches = torch.ops.aten.im2col.default(wide, kernel, dilation, padding, stride)
        front = "weight" in own
        rows = weight.shape[int(front)]
        matrix = weight.reshape(*weight.shape[: int(front)], groups, rows // groups, -1)
        out = torch.matmul(matrix, patches.unflatten(1, (groups, -1)))
        out = out.reshape(x.shape[0], rows, *size)
        out = out.squeeze(2) if axes == 1 else out
    if bias is not None:
        out = out + bias.reshape(-1 if "bias" in own else 1, out.shape[1], *(1,) * axes)
    return cast(Tensor, out)


Shape = Callable[[Tensor, bool], Tensor]  # of numbers of all examples, or of each


def _scaled(unit: Tensor, call: Mapping[str, Any], own: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """Unit · weight + bias."""
    for name, combine in (("weight", torch.mul), ("bias", torch.add)):
        if call[name] is not None:
            unit = combine(unit, shape(call[name], name in own))
    return unit


def _layer_norm(
    call: Mapping[str, Any], own: Mapping[str, Tensor], count: Any, place: Place
) -> tuple[Any, ...]:
    x, size = call["input"], len(call["normalized_shape"])
    unit = normalized(x, list(range(-size, 0)), call["eps"])

    def shape(w: Tensor, mine: bool) -> Tensor:
        return _beside(w, x.dim(), place.dim) if mine else w

    return _scaled(unit, call, own, shape), None, None


def _by_channel(x: Tensor) -> Shape:
    """The form of numbers of channels."""
    return lambda w, mine: w.reshape(-1 if mine else 1, x.shape[1], *(1,) * (x.dim() - 2))


def _group_norm(
    call: Mapping[str, Any], own: Mapping[str, Tensor], count: Any, place: Place
) -> tuple[Any, ...]:
    x = call["input"]
    unit = group_normalized(call)
    return _scaled(unit, call, own, _by_channel(x)), None, None


def _batch_norm(
    call: Mapping[str, Any], own: Mapping[str, Tensor], count: Any, place: Place
) -> tuple[Any, ...]:
    x = call["input"]
    if call.get("training", False):
        raise _without_rule("batch_norm")
    unit = batch_normalized(call)
    return (_scaled(unit, call, own, _by_channel(x)), *(None,) * 4)


def _embedding(call: Mapping[str, Any], own: Mapping[str, Tensor], count: Any, place: Place) -> Tensor:
    index, weight = call["indices"].movedim(place.dim, 0), call["weight"]
    places = index.reshape(count, -1, 1).expand(-1, -1, weight.shape[2])
    found = weight.gather(1, places).reshape(*index.shape, weight.shape[2]).movedim(0, place.dim)
    return without_padding(found, call["indices"], call["padding_idx"])


def _picked(call: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The largest of every window, found without derivatives and taken with them."""
    x = call["self"]
    _, index = _again(call, {"self": x.detach()})
    axes = 3 if "3d" in call["op"]._schema.name else 2
    flat = x.flatten(-axes).gather(-1, index.flatten(-axes))
    return flat.reshape(index.shape), index


def _adaptive_mean(call: Mapping[str, Any]) -> Tensor:
    """Means of windows of a changing size, as products with matrices."""
    x: Tensor = call["self"]
    height, width = call["output_size"]
    return _windows(x, x.shape[-2], height) @ x @ _windows(x, x.shape[-1], width).mT


def _windows(like: Tensor, size: Any, count: Any) -> Tensor:
    """The means over windows of an axis, (count, size)."""
    window, place = (torch.arange(n, device=like.device) for n in (count, size))
    start: Tensor
    stop: Tensor
    start, stop = window * size // count, ((window + 1) * size + count - 1) // count
    within = (place >= start[:, None]) & (place < stop[:, None])
    return within.to(like.dtype) / (stop - start).to(like.dtype)[:, None]


def _mean_of_windows(call: Mapping[str, Any]) -> Tensor:
    """Means of windows, as those of patches."""
    x, kernel = call["self"], _pair(call["kernel_size"])
    plain = call["count_include_pad"] or not any(call["padding"])
    if call["ceil_mode"] or call["divisor_override"] is not None or not plain or x.dim() != 4:
        return cast(Tensor, _again(call, {}))
    stride, padding = _pair(call["stride"] or kernel), _pair(call["padding"])
    size = [(x.shape[2 + i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in range(2)]
    patches = torch.ops.aten.im2col.default(x, kernel, [1, 1], padding, stride)
    means: Tensor = patches.unflatten(1, (x.shape[1], -1)).mean(2)
    return means.reshape(*x.shape[:2], *size)


def _pair(given: Sequence[int]) -> list[int]:
    """A number for each of two axes."""
    return list(given) * 2 if len(given) == 1 else list(given)


_MAIN = ("input", "mat1", "self", "indices")  # what operations call the numbers of the examples
_DATA: dict[str, Callable[..., Any]] = {
    "mm": _product,
    "addmm": _product,
    "bmm": _products,
    "convolution": _convolution,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "embedding": _embedding,
}
_ALWAYS = _DATA.keys() - {"mm", "addmm", "bmm", "embedding"}  # whose derivatives are others in this form
# operations in another form, whose derivatives are operations that exporters know
_PLAIN: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "view": lambda call: call["self"].reshape(call["size"]),  # strides may differ
    "_unsafe_view": lambda call: call["self"].reshape(call["size"]),
    "max_pool2d_with_indices": _picked,
    "max_pool3d_with_indices": _picked,
    "adaptive_max_pool2d": _picked,
    "adaptive_max_pool3d": _picked,
    "_adaptive_avg_pool2d": _adaptive_mean,
    "avg_pool2d": _mean_of_windows,
}


@in_exact_mode
def module_with_rows(
    function: Functional, finish: Finish, like: Prototype, heads: Tensor | None = None
) -> Traced:
    """A module that computes something of f₀(x) and of the rows of J(x), with torch alone."""
    # heads (K, C)
    if function.masks:
        raise ModelError(
            f"entries of {next(iter(function.masks))!r} do not vary (a mask in params=, or a hook)",
            expected="parameters that vary as a whole, for a module with derivatives in it",
            remedy="export predictions without variances",
        )
    found = network_graph(function.model, like, function.output)
    graph, places = found.graph, found.places(function.names)
    (last,) = graph.graph.find_nodes(op="output")
    outputs = next(flat_values(last.args)).meta["val"].shape[1]
    if not isinstance(outputs, int):
        raise ModelError(
            "the number of outputs depends on the size of the inputs",
            expected="a network with as many outputs for every input",
            remedy="pass output= to take some of them, such as those at the last position",
        )
    if heads is None:
        heads = torch.eye(outputs, dtype=function.dtype, device=function.device)
    count, n = len(heads), batch_size(found.like.x)
    each = [t.ndim > 0 and t.shape[0] == n for t in tensors_in(found.like.x)]
    shapes = {name: function.theta[name].shape for name in function.names}

    def rows(state: State, given: Sequence[Tensor], inputs: Sequence[Any]) -> list[Tensor]:
        """f₀(x) and the rows of every weight."""
        size = inputs[each.index(True)].shape[0]
        repeated = [_repeated(t, count) if mine else t for t, mine in zip(inputs, each, strict=True)]
        moves = {name: given[0].new_zeros(size * count, *shape) for name, shape in shapes.items()}
        for z in moves.values():
            z.requires_grad_()
        own = {place: state[place].detach() + moves[name] for place, name in places.items() if place in state}
        value = EachOwn(graph, state, own).outputs(*repeated).reshape(size, count, outputs)
        # of each its own output; a diagonal's gradient is written in place
        total = (value * given[0].to(value.dtype)).sum()
        found = torch.autograd.grad(total, list(moves.values()), allow_unused=True)
        rows = [torch.zeros_like(z) if g is None else g for g, z in zip(found, moves.values(), strict=True)]
        return [value[:, 0].detach(), *(g.reshape(size, count, *g.shape[1:]) for g in rows)]

    return differentiated(found, [heads], rows, finish)


def _repeated(t: Tensor, count: int) -> Tensor:
    """Every example several times."""
    return t.unsqueeze(1).expand(t.shape[0], count, *t.shape[1:]).reshape(-1, *t.shape[1:])


def _without_rule(name: str) -> ModelError:
    """The error of an operation whose weights cannot be those of each example."""
    return ModelError(
        f"a weight enters aten::{name}, for which linnet.tangent.graph_rows has no rule",
        expected="weights of linear layers, convolutions, normalizations, embeddings, and scales",
        remedy=ELSEWHERE,
    )
