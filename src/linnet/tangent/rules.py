"""Gradient rules: the per-example gradient of a parameter for each kind of use.

A *use* is one operation of the forward pass that reads a parameter. With a the input of the
use and g the gradient of the outputs at its result, the gradient of example n is

    linear, convolution    Σ_s g_ns a_nsᵀ        (s runs over the positions that share the weight)
    transposed convolution Σ_s a_ns g_nsᵀ        (g_ns: gradients wherever input position s reaches)
    embedding              Σ_s e(id_ns) g_nsᵀ    (e: unit vectors; never formed for the kernel)
    scale (norms, x * w)   Σ_s g_ns ∘ a_ns
    shift (biases, x + b)  Σ_s g_ns

Index letters: n example, k cotangent (K of them), s position, c output and d input features,
r group of a grouped convolution.

Networks move and merge the example axis: sequence-first layers have it second, a flattened
(N·S, d) has it outermost of a merged axis, attention projections (S·N, d) innermost. A layout
says which axis holds the examples and on which side of the merge they are; it is found by
experiment (``find_layout``), never by guessing from shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Size, Tensor

from linnet.tangent.forward_mode import Params


@dataclass(frozen=True)
class Layout:
    """The example axis of a tensor, possibly merged with others."""

    axis: int = 0  # which axis holds the examples
    outer: bool = True  # whether the examples are the outer part of that axis: (N·m) rather than (m·N)

    def examples_first(self, t: Tensor, n: int, skip: int = 0) -> Tensor:
        """Move the examples to axis ``skip`` and what was merged with them to the next."""
        axis = self.axis + skip
        merged = t.shape[axis] // n
        parts = (n, merged) if self.outer else (merged, n)
        t = t.reshape(*t.shape[:axis], *parts, *t.shape[axis + 1 :])
        example, other = (axis, axis + 1) if self.outer else (axis + 1, axis)
        return t.movedim((example, other), (skip, skip + 1))


PLAIN = Layout()  # examples on the first axis, nothing merged with them


def find_layout(per_example: Tensor, candidates: Iterable[int], n: int) -> Layout | None:
    """The layout under which the gradient of each example's output stays with that example."""
    # per_example (n, *shape)
    shape = per_example.shape[1:]
    possible = [Layout(axis, outer) for axis in candidates for outer in (True, False) if fits(shape, axis, n)]
    return next((layout for layout in possible if _separates(per_example, layout, n)), None)


def fits(shape: Size, axis: int, n: int) -> bool:
    """Whether n examples can be on that axis."""
    return axis < len(shape) and shape[axis] > 0 and shape[axis] % n == 0


def _separates(per_example: Tensor, layout: Layout, n: int) -> bool:
    """Whether gradients vanish outside each example's own part."""
    blocks = layout.examples_first(per_example, n, skip=1).reshape(n, n, -1)  # (cause, place, rest)
    sizes = blocks.abs().amax(2)
    return bool((sizes - sizes.diag().diag() == 0).all())


EDGE = Any  # torch.autograd.graph.GradientEdge


@dataclass(frozen=True, eq=False)
class Operand:
    """The tensor that an operation read."""

    tensor: Tensor  # the parameter, or a tensor computed from parameters alone
    sources: tuple[str, ...]  # names of the parameters behind it
    direct: bool  # whether it is the parameter itself (or its transpose, see ``Use.options``)


@dataclass(frozen=True, eq=False)
class Result:
    """The result of an operation."""

    shape: Size  # its shape
    edge: EDGE  # where autograd delivers the gradient at it


@dataclass(eq=False)
class Use:
    """One use of a tracked parameter."""

    kind: str  # ``"linear"``, ``"conv"``, ``"conv-transposed"``, ``"embedding"``, ``"scale"`` or ``"shift"``
    operand: Operand  # what the operation read
    result: Result  # what it returned
    a: Tensor | None = None  # input of the use, in the operation's own shape; ``None`` for a shift
    # what the operation was told: transposed, stride, groups,
    options: dict[str, Any] = field(default_factory=dict)
    layout: Layout = PLAIN  # where the examples are in the result (and in ``a``)
    g: Tensor | None = None  # gradients at the result, (K, *shape)
    # what was computed from `a` and is wanted again for other cotangents
    kept: dict[str, Tensor] = field(default_factory=dict, init=False)

    @property
    def target(self) -> Tensor:
        """The tensor that the operation read."""
        return self.operand.tensor

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the parameters behind it."""
        return self.operand.sources

    @property
    def direct(self) -> bool:
        """Whether the target is a parameter itself."""
        return self.operand.direct

    @property
    def shape(self) -> Size:
        """Shape of the operation's result."""
        return self.result.shape

    @property
    def place(self) -> tuple[Any, int]:
        """Which result of which operation; uses of one operation share it."""
        return self.result.edge.node, self.result.edge.output_nr

    @property
    def signature(self) -> tuple[Any, ...]:
        """The part that must repeat from batch to batch for a plan to hold."""
        return (self.kind, self.sources, self.direct, len(self.shape), self.target.ndim)

    @property
    def spread(self) -> Size:
        """Shape of the target as it is broadcast against the result: (c, 1, ...) for one number a channel."""
        return (
            Size([*self.target.shape, *[1] * (len(self.shape) - 2)])
            if self.options.get("channel")
            else self.target.shape
        )

    def oriented(self, t: Tensor) -> Tensor:
        """``t`` with the features last, which W @ x leaves second to last."""
        return t.mT if self.options.get("left") else t


@dataclass(frozen=True)
class UseFactors:
    """The outer-product form of one parameter's gradients, Σ_s g_ns a_nsᵀ."""

    a: Tensor  # (N, R, S, d), or integer ids (N, 1, S) for an embedding
    g: Tensor  # (K, N, R, S, c)
    transposed: bool = False  # whether the parameter is stored (d, c) rather than (c, d)

    @property
    def is_embedding(self) -> bool:
        """Whether ``a`` holds ids instead of vectors."""
        return not self.a.is_floating_point()


CONVOLUTIONS = ("conv", "conv-transposed")
OUTER = ("linear", *CONVOLUTIONS, "embedding")


def example_axes(use: Use) -> Sequence[int]:
    """Axes of the use's result that can hold the examples."""
    if use.kind in CONVOLUTIONS:
        return range(1)
    if use.kind in ("linear", "embedding"):
        return range(len(use.shape) - 1)
    # a broadcast operand leaves those axes free on which it is absent or has length one
    return [i for i in range(len(use.shape)) if _broadcast_axis(use.shape, use.spread, i)]


def _broadcast_axis(shape: Size, target: Size, axis: int) -> bool:
    """Whether ``target`` is repeated along that axis of ``shape``."""
    own = axis - (len(shape) - len(target))
    return own < 0 or target[own] == 1


def factors(use: Use, n: int, keep: bool = False) -> UseFactors:
    """The outer-product form of a linear, convolution or embedding use."""
    assert use.a is not None
    assert use.g is not None
    if use.kind in CONVOLUTIONS:
        return _convolution_factors(use, n, keep)
    a, g = use.oriented(use.a), use.oriented(use.g)
    g = use.layout.examples_first(g, n, skip=1).flatten(2, -2)  # (K, N, S, c)
    if use.kind == "embedding":
        ids = use.layout.examples_first(a, n).reshape(n, 1, -1)
        counted = ids != use.options.get("padding_idx", -1)
        if "rows" in use.options:  # the others do not vary
            counted = counted & use.options["rows"].to(ids.device)[ids]
        return UseFactors(ids, (g * counted[:, 0, :, None])[:, :, None], transposed=True)
    a = use.layout.examples_first(a, n).flatten(1, -2)  # (N, S, d)
    return UseFactors(a[:, None], g[:, :, None], bool(use.options.get("transposed")))


def _convolution_factors(use: Use, n: int, keep: bool) -> UseFactors:
    """Positions are output pixels with their receptive fields; if transposed, it is the other way round."""
    assert use.a is not None
    assert use.g is not None
    kernel, transposed = use.target.shape[2:], use.kind == "conv-transposed"
    if transposed or "patches" not in use.kept:
        fields = use.g.flatten(0, 1) if transposed else use.a
        fields = patches(fields, kernel, use.options).mT  # (B, R, S, d), or (K·B, R, S, c)
        if keep and not transposed:
            use.kept["patches"] = fields
    else:
        fields = use.kept["patches"]
    a = _pixels(use.a, use.options) if transposed else fields  # (B, R, S, d)
    g = fields if transposed else _pixels(use.g.flatten(0, 1), use.options)
    g = g.unflatten(0, use.g.shape[:2])  # (K, B, R, S, c)
    a = a.unflatten(0, (n, -1)).transpose(1, 2).flatten(2, 3) if a.shape[0] != n else a
    g = g.unflatten(1, (n, -1)).transpose(2, 3).flatten(3, 4) if g.shape[1] != n else g
    return UseFactors(a, g, transposed)


def _pixels(x: Tensor, options: dict[str, Any]) -> Tensor:
    """The channels of every pixel by group, (B, R, S, c)."""
    groups: int = options["groups"]
    return x.flatten(2).reshape(x.shape[0], groups, x.shape[1] // groups, -1).mT


def patches(x: Tensor, kernel: Size, options: dict[str, Any]) -> Tensor:
    """Receptive fields of a convolution, (B, R, d, S): positions last, so that rows are copied whole."""
    # x (B, c, *pixels)
    axes = len(kernel)
    x = windows(x, kernel, options)
    positions, fields = range(3, 3 + axes), range(3 + axes, 3 + 2 * axes)
    return x.permute(0, 1, 2, *fields, *positions).flatten(3 + axes).flatten(2, 2 + axes)


def padded(x: Tensor, options: dict[str, Any]) -> Tensor:
    """The input of a convolution with its padding of zeros (negative: cropped)."""
    if not any(map(any, options["padding"])):
        return x
    return F.pad(x, [p for pair in reversed(options["padding"]) for p in pair])


def windows(x: Tensor, kernel: Size, options: dict[str, Any]) -> Tensor:
    """Receptive fields without a copy, (B, R, c / R, *positions, *kernel)."""
    # x (B, c, *pixels)
    x = padded(x, options)
    for axis, (size, stride, dilation) in enumerate(
        zip(kernel, options["stride"], options["dilation"], strict=True), start=2
    ):
        x = x.unfold(axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
    fields: Tensor = x.unflatten(1, (options["groups"], -1))
    return fields


def outer_rows(f: UseFactors, shape: Size) -> Tensor:
    """Σ_s g_ns a_nsᵀ for every example and cotangent, shape (N, K, *shape)."""
    if f.is_embedding:
        return _embedding_rows(f, shape)
    k, n, groups, s, c = f.g.shape
    # one product for each example and group: (K·c × S)(S × d)
    g = f.g.permute(1, 2, 0, 4, 3).reshape(n * groups, k * c, s)
    rows = torch.bmm(g, f.a.reshape(n * groups, s, -1)).view(n, groups, k, c, -1)
    rows = rows.mT if f.transposed else rows
    return rows.transpose(1, 2).reshape(n, k, *shape)


def _embedding_rows(f: UseFactors, shape: Size) -> Tensor:
    """Gradients of an embedding table, scattered to the rows that were looked up."""
    k, n, _, s, c = f.g.shape
    rows = f.g.new_zeros(n, k, *shape)
    index = f.a.reshape(n, 1, s, 1).expand(n, k, s, c)
    return rows.scatter_add_(2, index, f.g[:, :, 0].transpose(0, 1))


def broadcast_rows(use: Use, n: int) -> Tensor:
    """Gradients of a scale or shift, summed over what was broadcast; shape (N, K, *target)."""
    assert use.g is not None
    g = _with_examples(use.g, use, n, skip=1)  # (K, N, *result), the example axis shortened by N
    over = [i + 2 for i in range(len(use.shape)) if _broadcast_axis(use.shape, use.spread, i)]
    if use.a is None:
        rows = g.sum(over, keepdim=True) if over else g
        rows = rows if use.options.get("sign", 1) == 1 else -rows
    else:  # the product is summed as it is formed
        a = _with_examples(use.a.expand(use.shape), use, n, skip=0)
        axes = list(range(g.ndim))
        rows = torch.einsum(g, axes, a, axes[1:], [i for i in axes if i not in over])
    return rows.transpose(0, 1).reshape(n, g.shape[0], *use.target.shape)


def _with_examples(t: Tensor, use: Use, n: int, skip: int) -> Tensor:
    """Examples to axis ``skip``; the rest of a merged axis keeps the place of the example axis."""
    return use.layout.examples_first(t, n, skip).movedim(skip + 1, skip + 1 + use.layout.axis)


def use_rows(use: Use, n: int) -> Tensor:
    """Per-example gradients of the use's target, (N, K, *target)."""
    if use.kind in OUTER:
        f = factors(use, n)
        shape = use.target.shape
        return outer_rows(f, shape)
    return broadcast_rows(use, n)


def example_row(use: Use, n: int, i: int) -> Tensor:
    """The gradient of one of n examples in the use's target, (1, K, *target); the others' are not formed."""
    assert use.g is not None
    if use.kind in CONVOLUTIONS and use.a is not None:
        part = slice(i * (use.a.shape[0] // n), (i + 1) * (use.a.shape[0] // n))
        return use_rows(replace(use, a=use.a[part], g=use.g[:, part]), 1)
    if use.kind in OUTER:
        f = factors(use, n)
        return outer_rows(replace(f, a=f.a[i : i + 1], g=f.g[:, i : i + 1]), use.target.shape)
    return broadcast_rows(use, n)[i : i + 1]


def pull_back(rows: Tensor, target: Tensor, source: Tensor) -> Tensor:
    """Per-example gradients of ``source`` from those of ``target``, which was computed from it."""
    # rows (N, K, *target)
    if target is source:
        return rows
    n, k = rows.shape[:2]
    cotangents = rows.reshape(n * k, *target.shape).to(target.dtype)
    pulled: Tensor | None = torch.autograd.grad(
        target, [source], cotangents, is_grads_batched=True, retain_graph=True, allow_unused=True
    )[0]
    if pulled is None:
        return rows.new_zeros(n, k, *source.shape)
    return pulled.view(n, k, *source.shape)


Form = Literal["full", "trace", "diagonal", "sum"]


@dataclass(eq=False)
class Captured:
    """One batch, differentiated."""

    n: int  # number of examples
    outputs: Tensor  # f₀(x), (N, C)
    uses: list[Use]  # uses with their gradients g, those that the plan takes
    leaves: Params  # the tracked parameters
    exact: Params  # per-example gradients (N, K, *shape) of the parameters outside every rule
    k: int  # number of cotangents

    @cached_property
    def _by_parameter(self) -> dict[str, list[Use]]:
        """The uses of each parameter, sorted once."""
        found: dict[str, list[Use]] = {}
        for use in self.uses:
            for name in use.sources:
                found.setdefault(name, []).append(use)
        return found

    def by_parameter(self) -> dict[str, list[Use]]:
        """The uses of each parameter."""
        return self._by_parameter

    def rows(self, name: str, only: int | None = None) -> Tensor:
        """Gradient of every example, or of one alone, and cotangent in one parameter, (N, K, *shape)."""
        if name in self.exact:
            return self.exact[name] if only is None else self.exact[name][only : only + 1]
        leaf = self.leaves[name]
        total: Tensor | None = None
        for use in self._by_parameter.get(name, []):
            part = use_rows(use, self.n) if only is None else example_row(use, self.n, only)
            part = part if use.direct else pull_back(part, use.target, leaf)
            total = part if total is None else total + part
        if total is None:  # the gradient vanishes here
            return leaf.new_zeros(self.n if only is None else 1, self.k, *leaf.shape)
        return total
