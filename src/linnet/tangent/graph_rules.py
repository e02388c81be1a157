"""Forward mode on the graph of a network: what each operation makes of the tangents of its arguments.

Torch's own forward mode cannot be traced for batches of any size: its formulas fix the sizes that they see.
Here a rule is ordinary Python on tensors, so that a graph with its tangents is again a plain graph.

A rule is found by the name of an operation of ATen. A tangent is ``None`` where it is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tangent = Any  # of a tensor: Tensor | None; of several: a sequence of them


@dataclass(frozen=True)
class OpCall:
    """One call of an operation, with the tangents of its arguments."""

    op: torch._ops.OpOverload  # the operation
    given: dict[str, Any]  # its arguments by name, defaults filled in
    tangents: dict[str, Tangent]  # their tangents by name; ``None`` where there is none
    out: Any  # what it returned

    def again(self, /, **changed: Any) -> Any:
        """The operation with some arguments changed."""
        return apply(self.op, self.given | changed)

    def like_out(self, tangent: Tangent) -> Tangent:
        """A tangent in the shape of the result, where the operation broadcasts."""
        if tangent is None or tangent.shape == self.out.shape:
            return tangent
        return tangent.expand(self.out.shape)


Rule = Callable[[OpCall], Tangent]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for operations of these names."""

    def entered(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return entered


def _plus(*parts: Tangent) -> Tangent:
    """The sum of tangents, some of which may be zero."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    total = there[0]
    for part in there[1:]:
        total = total + part
    return total


def bind(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name."""
    schema = op._schema.arguments
    named = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    return {a.name: named.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}


def apply(op: torch._ops.OpOverload, given: Mapping[str, Any]) -> Any:
    """An operation on arguments by name."""
    schema = op._schema.arguments
    args = [given[a.name] for a in schema if not a.kwarg_only]
    return op(*args, **{a.name: given[a.name] for a in schema if a.kwarg_only})


# -- linear in one argument, which is the first ------------------------------------------------------

_LINEAR = (
    "permute", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze",
    "clone", "alias", "neg", "sum", "mean", "index", "index_select", "gather", "avg_pool2d", "avg_pool3d",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_bicubic2d", "upsample_linear1d", "upsample_trilinear3d", "reflection_pad1d", "reflection_pad2d",
    "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "flip", "roll",
    "repeat", "cumsum", "diagonal", "unfold", "im2col", "col2im", "pixel_shuffle",
    "pixel_unshuffle", "channel_shuffle", "tril", "triu", "split", "split_with_sizes", "unbind",
)  # fmt: skip


@_rule(*_LINEAR)
def _linear(c: OpCall) -> Tangent:
    first = next(iter(c.given))
    return c.again(**{first: c.tangents[first]})


@_rule("view", "_unsafe_view")
def _reshaped(c: OpCall) -> Tangent:
    return c.tangents["self"].reshape(c.given["size"])  # strides may differ from the value's


@_rule("_to_copy")
def _copied(c: OpCall) -> Tangent:
    return c.again(self=c.tangents["self"]) if c.out.is_floating_point() else None


@_rule("constant_pad_nd", "masked_fill")
def _with_value(c: OpCall) -> Tangent:
    """A constant takes the place of some numbers."""
    if c.tangents.get("value") is not None:
        return _where(c.given["mask"], c.tangents["self"], c.tangents["value"], c)
    return c.again(self=c.tangents["self"], value=0)


@_rule("embedding")
def _embedding(c: OpCall) -> Tangent:
    indices, tangent = c.given["indices"], c.again(weight=c.tangents["weight"])
    if c.given["padding_idx"] < 0:
        return tangent
    return tangent * (indices != c.given["padding_idx"]).unsqueeze(-1).to(tangent.dtype)


# -- linear in several -------------------------------------------------------------------------------


@_rule("add", "sub", "rsub")
def _sum(c: OpCall) -> Tangent:
    kind, alpha = c.op._schema.name, c.given.get("alpha", 1)
    scales = {"aten::add": (1, alpha), "aten::sub": (1, -alpha), "aten::rsub": (-alpha, 1)}[kind]
    both = c.tangents["self"], c.tangents.get("other")
    parts = [t if t is None or k == 1 else k * t for t, k in zip(both, scales, strict=True)]
    return c.like_out(_plus(*parts))


@_rule("cat", "stack")
def _joined(c: OpCall) -> Tangent:
    values = c.given["tensors"]
    parts = zip(c.tangents["tensors"], values, strict=True)
    return c.again(tensors=[torch.zeros_like(v) if t is None else t for t, v in parts])


@_rule("where")
def _chosen(c: OpCall) -> Tangent:
    return _where(c.given["condition"], c.tangents["self"], c.tangents["other"], c)


def _where(mask: Tensor, first: Tangent, second: Tangent, c: OpCall) -> Tangent:
    """The one tangent or the other."""
    zero = torch.zeros((), dtype=c.out.dtype, device=c.out.device)
    return torch.where(mask, zero if first is None else first, zero if second is None else second)


@_rule("slice_scatter", "select_scatter", "index_put", "scatter", "scatter_add", "index_add", "copy")
def _placed(c: OpCall) -> Tangent:
    source = next(name for name in ("src", "values", "source", "value") if name in c.given)
    value = c.given[source]
    zero = torch.zeros_like(value) if isinstance(value, Tensor) else 0
    own = torch.zeros_like(c.given["self"]) if c.tangents["self"] is None else c.tangents["self"]
    placed = c.tangents.get(source)
    return c.again(**{"self": own, source: zero if placed is None else placed})


# -- bilinear ----------------------------------------------------------------------------------------


@_rule("mul")
def _product(c: OpCall) -> Tangent:
    a, b, da, db = c.given["self"], c.given["other"], c.tangents["self"], c.tangents.get("other")
    return c.like_out(_plus(None if da is None else da * b, None if db is None else a * db))


@_rule("mm", "bmm", "mv", "dot", "_trilinear")
def _matrix_product(c: OpCall) -> Tangent:
    names = list(c.given)
    parts = [None if c.tangents[n] is None else c.again(**{n: c.tangents[n]}) for n in names]
    return _plus(*parts)


@_rule("addmm", "baddbmm", "addmv", "addbmm")
def _sum_of_product(c: OpCall) -> Tangent:
    added, first, second = list(c.given)[:3]
    zero = torch.zeros((), dtype=c.out.dtype, device=c.out.device)
    products: dict[str, Callable[[Tensor, Tensor], Tensor]]
    products = {"addmm": torch.mm, "baddbmm": torch.bmm, "addmv": torch.mv}
    product = products.get(c.op._schema.name.removeprefix("aten::"))
    parts = []
    for name in (first, second):
        if c.tangents[name] is None:
            continue
        if product is None:
            parts.append(c.again(**{added: zero, name: c.tangents[name]}))
        else:
            pair = {first: c.given[first], second: c.given[second], name: c.tangents[name]}
            part = product(pair[first], pair[second])
            parts.append(part if c.given["alpha"] == 1 else c.given["alpha"] * part)
    own = c.tangents[added]
    if own is not None and c.given["beta"] != 1:
        own = c.given["beta"] * own
    return c.like_out(_plus(*parts, own))


@_rule("convolution")
def _affine(c: OpCall) -> Tangent:
    parts = [
        c.again(**{name: c.tangents[name], "bias": None})
        for name in ("input", "weight")
        if c.tangents[name] is not None
    ]
    bias = c.tangents["bias"]
    if bias is not None:
        bias = bias.reshape(1, -1, *(1,) * (c.out.dim() - 2))
    return c.like_out(_plus(*parts, bias))


@_rule("div")
def _quotient(c: OpCall) -> Tangent:
    if c.given.get("rounding_mode") is not None:
        return None
    b, da, db = c.given["other"], c.tangents["self"], c.tangents.get("other")
    return c.like_out(_plus(None if da is None else da / b, None if db is None else -c.out * db / b))


# -- number by number --------------------------------------------------------------------------------


def _elementwise(derivative: Callable[[Any, Any], Any]) -> Rule:
    """The rule of a function of one number, from its derivative at x with value y."""

    def rule(c: OpCall) -> Tangent:
        return c.tangents["self"] * derivative(c.given["self"], c.out)

    return rule


_DERIVATIVES: dict[str, Callable[[Any, Any], Any]] = {
    "relu": lambda x, y: (y > 0).to(y.dtype),
    "sigmoid": lambda x, y: y * (1 - y),
    "tanh": lambda x, y: 1 - y * y,
    "exp": lambda x, y: y,
    "exp2": lambda x, y: y * math.log(2),
    "expm1": lambda x, y: y + 1,
    "log": lambda x, y: 1 / x,
    "log2": lambda x, y: 1 / (x * math.log(2)),
    "log10": lambda x, y: 1 / (x * math.log(10)),
    "log1p": lambda x, y: 1 / (1 + x),
    "sqrt": lambda x, y: 0.5 / y,
    "rsqrt": lambda x, y: -0.5 * y / x,
    "reciprocal": lambda x, y: -y * y,
    "sin": lambda x, y: torch.cos(x),
    "cos": lambda x, y: -torch.sin(x),
    "tan": lambda x, y: 1 + y * y,
    "sinh": lambda x, y: torch.cosh(x),
    "cosh": lambda x, y: torch.sinh(x),
    "asinh": lambda x, y: (x * x + 1).rsqrt(),
    "atan": lambda x, y: 1 / (1 + x * x),
    "erf": lambda x, y: 2 / math.sqrt(math.pi) * torch.exp(-x * x),
    "abs": lambda x, y: torch.sign(x),
    "silu": lambda x, y: torch.sigmoid(x) * (1 + x - y),
}
RULES.update({name: _elementwise(derivative) for name, derivative in _DERIVATIVES.items()})


@_rule("log_sigmoid_forward")
def _log_sigmoid(c: OpCall) -> Tangent:
    return c.tangents["self"] * torch.sigmoid(-c.given["self"]), None


@_rule("gelu")
def _gelu(c: OpCall) -> Tangent:
    x = c.given["self"]
    if c.given["approximate"] == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        t = torch.tanh(inner)
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
        return c.tangents["self"] * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return c.tangents["self"] * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density)


@_rule("leaky_relu")
def _leaky(c: OpCall) -> Tangent:
    t = c.tangents["self"]
    return torch.where(c.given["self"] > 0, t, t * c.given["negative_slope"])


@_rule("elu")
def _elu(c: OpCall) -> Tangent:
    x, t, inner = c.given["self"], c.tangents["self"], c.given["input_scale"]
    slope = c.given["alpha"] * inner * torch.exp(torch.clamp_max(x, 0) * inner)
    return c.given["scale"] * torch.where(x > 0, t, t * slope)


@_rule("hardtanh")
def _hardtanh(c: OpCall) -> Tangent:
    x = c.given["self"]
    inside = (x > c.given["min_val"]) & (x < c.given["max_val"])
    return c.tangents["self"] * inside.to(c.out.dtype)


@_rule("hardsigmoid")
def _hardsigmoid(c: OpCall) -> Tangent:
    x = c.given["self"]
    return c.tangents["self"] * ((x > -3) & (x < 3)).to(c.out.dtype) / 6


@_rule("hardswish")
def _hardswish(c: OpCall) -> Tangent:
    x, t = c.given["self"], c.tangents["self"]
    inside = torch.where(x <= 3, t * (x / 3 + 0.5), t)
    return torch.where(x < -3, torch.zeros_like(t), inside)


@_rule("softplus")
def _softplus(c: OpCall) -> Tangent:
    x, t, beta = c.given["self"], c.tangents["self"], c.given["beta"]
    return torch.where(x * beta > c.given["threshold"], t, t * torch.sigmoid(x * beta))


@_rule("clamp", "clamp_min", "clamp_max")
def _clamp(c: OpCall) -> Tangent:
    x, inside = c.given["self"], torch.ones_like(c.given["self"], dtype=torch.bool)
    for name, compare in (("min", torch.ge), ("max", torch.le)):
        limit = c.given.get(name)
        if limit is not None:
            inside = inside & compare(x, limit)
    first = c.tangents["self"]
    total = None if first is None else first * inside.to(c.out.dtype)
    for name, compare in (("min", torch.lt), ("max", torch.gt)):
        moved = c.tangents.get(name)
        if moved is not None:
            total = _plus(total, moved * compare(x, c.given[name]).to(c.out.dtype))
    return c.like_out(total)


@_rule("pow")
def _power(c: OpCall) -> Tangent:
    x = c.given["self"]
    p = c.given["exponent"]
    dx, dp = c.tangents.get("self"), c.tangents.get("exponent")
    by_base = None
    if dx is not None:
        if not isinstance(p, Tensor) and p in (1, 2):
            by_base = dx if p == 1 else 2 * x * dx
        else:
            by_base = dx * (p * torch.pow(x, p - 1))
    logarithm = None if dp is None else (torch.log(x) if isinstance(x, Tensor) else math.log(x))
    return c.like_out(_plus(by_base, None if dp is None else c.out * logarithm * dp))


@_rule("maximum", "minimum")
def _extreme(c: OpCall) -> Tangent:
    a, b = c.given["self"], c.given["other"]
    first, second = c.tangents["self"], c.tangents["other"]
    wins = a > b if c.op._schema.name == "aten::maximum" else a < b
    share = wins.to(c.out.dtype) + 0.5 * (a == b).to(c.out.dtype)  # a tie is shared, as by torch
    one = None if first is None else first * share
    return c.like_out(_plus(one, None if second is None else second * (1 - share)))


# -- reductions and normalizations -------------------------------------------------------------------


@_rule("amax", "amin")
def _extreme_along(c: OpCall) -> Tangent:
    x, dims, keep = (
        c.given["self"],
        list(c.given["dim"]) or list(range(c.given["self"].dim())),
        c.given["keepdim"],
    )
    out = c.out
    if not keep:
        for d in sorted(d % x.dim() for d in dims):
            out = out.unsqueeze(d)
    mask = (x == out).to(x.dtype)
    return (c.tangents["self"] * mask).sum(dims, keepdim=keep) / mask.sum(dims, keepdim=keep)


@_rule("max", "min", "sort", "topk", "median")
def _picked(c: OpCall) -> Tangent:
    if isinstance(c.out, Tensor):  # of all numbers
        mask = (c.given["self"] == c.out).to(c.out.dtype)
        return (c.tangents["self"] * mask).sum() / mask.sum()
    dim, index = c.given["dim"], c.out[1]
    if c.given.get("keepdim", True):
        return c.tangents["self"].gather(dim, index), None
    return c.tangents["self"].gather(dim, index.unsqueeze(dim)).squeeze(dim), None


@_rule("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _max_pool(c: OpCall) -> Tangent:
    axes = 2 if "2d" in c.op._schema.name else 3
    flat = c.tangents["self"].flatten(-axes)
    return flat.gather(-1, c.out[1].flatten(-axes)).view(c.out[1].shape), None


@_rule("var", "var_mean")
def _variance(c: OpCall) -> Tangent:
    """Of the variance, and of the mean beside it."""
    x, t, dims = c.given["self"], c.tangents["self"], c.given.get("dim")
    dims = list(range(x.dim())) if not dims else list(dims)
    count: Any = 1
    for d in dims:
        count = count * x.shape[d]
    correction = c.given.get("correction", int(bool(c.given.get("unbiased", True))))
    less = 1 if correction is None else correction
    keep = bool(c.given.get("keepdim", False))
    moved = 2 * ((x - x.mean(dims, keepdim=True)) * t).sum(dims, keepdim=keep) / (count - less)
    return moved if isinstance(c.out, Tensor) else (moved, t.mean(dims, keepdim=keep))


@_rule("linalg_vector_norm")
def _norm(c: OpCall) -> Tangent:
    x, t, p, dims = c.given["self"], c.tangents["self"], c.given["ord"], c.given["dim"]
    dims = list(range(x.dim())) if dims is None else list(dims)
    keep, size = c.given["keepdim"], x.abs()
    if abs(p) == math.inf:
        mask = (size == (size.amax(dims, True) if p > 0 else size.amin(dims, True))).to(x.dtype)
        return (torch.sign(x) * t * mask).sum(dims, keepdim=keep) / mask.sum(dims, keepdim=keep)
    slope = x if p == 2 else torch.sign(x) * size.pow(p - 1)
    moved = (slope * t).sum(dims, keepdim=keep)
    return torch.where(c.out == 0, torch.zeros_like(moved), moved * c.out.pow(1 - p))  # 0 at zero, as torch's


@_rule("_softmax")
def _softmax(c: OpCall) -> Tangent:
    weighted = c.out * c.tangents["self"]
    return weighted - c.out * weighted.sum(c.given["dim"], keepdim=True)


@_rule("_log_softmax")
def _log_softmax(c: OpCall) -> Tangent:
    t = c.tangents["self"]
    return t - (c.out.exp() * t).sum(c.given["dim"], keepdim=True)


def normalized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    """Numbers less their mean over their standard deviation."""
    return _normalized(x, None, dims, eps)[0]


def _normalized(x: Tensor, t: Tangent, dims: list[int], eps: float) -> tuple[Tensor, Tangent]:
    """Numbers less their mean over their standard deviation, and the tangent of that."""
    centered = x - x.mean(dims, keepdim=True)
    scale = torch.rsqrt((centered * centered).mean(dims, keepdim=True) + eps)
    unit = centered * scale
    if t is None:
        return unit, None
    moved = t - t.mean(dims, keepdim=True)
    return unit, scale * (moved - unit * (unit * moved).mean(dims, keepdim=True))


def _scaled(unit: Tensor, moved: Tangent, c: OpCall, shape: Callable[[Tensor], Tensor]) -> Tangent:
    """The tangent of unit · weight + bias."""
    weight, dw, db = c.given["weight"], c.tangents["weight"], c.tangents["bias"]
    if moved is not None and weight is not None:
        moved = moved * shape(weight)
    parts = moved, None if dw is None else unit * shape(dw), None if db is None else shape(db)
    total = _plus(*parts)
    return total if total is None or total.shape == unit.shape else total.expand(unit.shape)


@_rule("native_layer_norm")
def _layer_norm(c: OpCall) -> Tangent:
    x, size = c.given["input"], len(c.given["normalized_shape"])
    dims = list(range(-size, 0))
    unit, moved = _normalized(x, c.tangents["input"], dims, c.given["eps"])
    return _scaled(unit, moved, c, lambda w: w), None, None


@_rule("native_group_norm")
def _group_norm(c: OpCall) -> Tangent:
    x, t = c.given["input"], c.tangents["input"]
    apart = [x.shape[0], c.given["group"], -1]
    grouped = None if t is None else t.reshape(apart)
    unit, moved = _normalized(x.reshape(apart), grouped, [2], c.given["eps"])
    unit, moved = unit.reshape(x.shape), None if moved is None else moved.reshape(x.shape)
    return _scaled(unit, moved, c, lambda w: w.reshape(1, -1, *(1,) * (x.dim() - 2))), None, None


@_rule("_native_batch_norm_legit_no_training", "_native_batch_norm_legit", "native_batch_norm")
def _batch_norm(c: OpCall) -> Tangent:
    x, t = c.given["input"], c.tangents["input"]

    def shape(w: Tensor) -> Tensor:
        return w.reshape(1, -1, *(1,) * (x.dim() - 2))

    if c.given.get("training", False):  # no network in evaluation, but the normalization of single examples
        unit, moved = _normalized(x, t, [d for d in range(x.dim()) if d != 1], c.given["eps"])
    else:
        scale = shape(torch.rsqrt(c.given["running_var"] + c.given["eps"]))
        unit, moved = (x - shape(c.given["running_mean"])) * scale, None if t is None else t * scale
    return (_scaled(unit, moved, c, shape), *(None,) * (len(c.out) - 1))


# -- no derivative, or none but zero -----------------------------------------------------------------

ZERO = frozenset({
    "detach", "floor", "ceil", "round", "trunc", "sign", "zeros_like", "ones_like", "full_like", "empty_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "floor_divide", "rand_like", "randn_like", "heaviside",
})  # fmt: skip
