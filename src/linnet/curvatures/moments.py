"""Second moments of a layer's inputs and output gradients: Σ a aᵀ, Σ a and Σ g gᵀ.

Index letters as in the rules: n example, k column, s position, r group, d and c features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor

from linnet.curvatures.sums import BLOCK, second_moment
from linnet.number_types import wide_type
from linnet.tangent.rules import Use, UseFactors, padded, patches, windows

FEW_CHANNELS = 256  # channels up to which products example by example are large enough to be fast
COPYING = 20.0  # multiplications that take as long as copying one number
WRITING = 40.0  # multiplications that take as long as writing a product and adding it up


@dataclass(frozen=True, eq=False)
class InputMoment:
    """The moment of a layer's inputs that its Kronecker factor A is made of."""

    second: Tensor  # Σ a aᵀ, (R, d, d), or its diagonal (R, d)
    first: Tensor  # Σ a, (R, d)
    count: float  # number of terms

    def hatted(self) -> Tensor:
        """Σ â âᵀ for â = [a; 1], (R, d + 1, d + 1), or its diagonal (R, d + 1)."""
        if self.second.ndim == 2:
            return torch.cat([self.second, torch.full_like(self.first[:, :1], self.count)], 1)
        corner = torch.full_like(self.first[:, :1, None], self.count)
        top = torch.cat([self.second, self.first[:, :, None]], 2)
        return torch.cat([top, torch.cat([self.first[:, None], corner], 2)], 1)


def active(f: UseFactors) -> Tensor:
    """Positions that any column reaches, (N, 1, S)."""
    return (f.g != 0).any(-1).any(0).any(1, keepdim=True)


def counting(reached: Sequence[Tensor], counts: Tensor | None) -> list[Tensor]:
    """Which positions of every use count, where some output positions do not, (N, 1, S)."""
    # reached (N, 1, S), counts (N, T)
    # All positions of examples without masked outputs count and none of examples that are masked whole. Of
    # the others those count that any column reaches: what reaches masked outputs alone is left out like them.
    if counts is None:
        return [torch.ones_like(one) for one in reached]
    whole, some = counts.all(1)[:, None, None], counts.any(1)[:, None, None]
    return [(one | whole) & some for one in reached]


def without_padding(weights: Sequence[Tensor], reached: Sequence[Tensor], tokens: Tensor) -> list[Tensor]:
    """Which positions of every use count, where inputs are padded, (N, 1, S)."""
    # weights (N, 1, S), reached (N, 1, S), tokens (N, T)
    whole = tokens.all(1)[:, None, None]
    own = {1: torch.ones_like(whole), tokens.shape[1]: tokens[:, None]}
    return [w & own.get(w.shape[2], r | whole) for w, r in zip(weights, reached, strict=True)]


def _moment(x: Tensor, diagonal: bool) -> Tensor:
    """X Xᵀ of (..., d, M), or its diagonal (..., d)."""
    return x.square().sum(-1) if diagonal else second_moment(x)


def weighted_input_moment(f: UseFactors, weight: Tensor, diagonal: bool = False) -> InputMoment:
    """Moments of the inputs over the positions that count."""
    # weight (N, 1, S)
    a = f.a.to(wide_type(f.a.dtype))
    flat = (a * weight[..., None]).transpose(0, 1).flatten(1, 2)  # (R, N·S, d)
    return InputMoment(_moment(flat.mT, diagonal), flat.sum(1), float(weight[:, 0].sum()))


def output_moment(f: UseFactors, diagonal: bool = False) -> Tensor:
    """Σ g gᵀ over columns, examples and positions of factors, (R, c, c), or its diagonal (R, c)."""
    g = f.g.to(wide_type(f.g.dtype))
    return _moment(g.permute(2, 4, 0, 1, 3).flatten(2), diagonal)


def input_moment(use: Use, diagonal: bool = False) -> InputMoment:
    """Moments of a use's inputs over all examples and positions."""
    assert use.a is not None
    a = use.a.to(wide_type(use.a.dtype))
    if use.kind == "conv":
        return _patch_moment(a, use.target.shape[2:], use.options, diagonal)
    if use.kind == "conv-transposed":
        a = a.unflatten(1, (use.options["groups"], -1)).flatten(3)  # (B, R, d, S)
        second = a.square().sum((0, 3)) if diagonal else pixel_moment(a)
        return InputMoment(second, a.sum((0, 3)), float(a.shape[0] * a.shape[3]))
    a = use.oriented(a)
    flat = a.reshape(-1, a.shape[-1])[None]  # (1, N·S, d): where the examples are makes no difference
    return InputMoment(_moment(flat.mT, diagonal), flat.sum(1), float(flat.shape[1]))


def shared_input_moment(use: Use, known: dict[Any, InputMoment], diagonal: bool = False) -> InputMoment:
    """The same, once for uses that read the same input: queries, keys and values."""
    a = use.a
    assert a is not None
    options = tuple(sorted((name, str(value)) for name, value in use.options.items()))
    key = (use.kind, a.data_ptr(), a.shape, a.stride(), use.target.shape[2:], use.layout, options, diagonal)
    if key not in known:
        known[key] = input_moment(use, diagonal)
    return known[key]


def gradient_moment(use: Use, diagonal: bool = False) -> Tensor:
    """Σ g gᵀ over columns, examples and positions, (R, c, c), or its diagonal (R, c)."""
    assert use.g is not None
    g = use.g.to(wide_type(use.g.dtype))
    if use.kind == "conv":
        g = g.flatten(0, 1)
        return pixel_moment(g.unflatten(1, (use.options["groups"], -1)).flatten(3), diagonal)
    if use.kind == "conv-transposed":
        g = patches(g.flatten(0, 1), use.target.shape[2:], use.options)  # (K·B, R, c, S)
        return pixel_moment(g, diagonal)
    g = use.oriented(g)
    return _moment(g.reshape(1, -1, g.shape[-1]).mT, diagonal)


def pixel_moment(x: Tensor, diagonal: bool = False) -> Tensor:
    """Σ x xᵀ over examples and positions, (R, c, c)."""
    # x (B, R, c, S)
    # Many positions of few channels are multiplied example by example, as they lie in memory; otherwise the
    # positions are copied together first.
    if diagonal:
        return x.square().sum((0, 3))
    b, r, c, s = x.shape
    if s >= c and c < FEW_CHANNELS:
        flat = x.reshape(b * r, c, s)
        return torch.bmm(flat, flat.mT).view(b, r, c, c).sum(0)
    return second_moment(x.permute(1, 2, 0, 3).flatten(2))


def _patch_moment(x: Tensor, kernel: Size, options: dict[str, Any], diagonal: bool) -> InputMoment:
    """Moments of the receptive fields of a convolution's input."""
    first = windows(x.sum(0, keepdim=True), kernel, options)  # (1, R, c, *positions, *kernel)
    axes = len(kernel)
    positions = first.shape[3 : 3 + axes].numel()
    places = tuple(range(3, 3 + axes))
    total = first.sum(places)[0].flatten(1)  # (R, c · kernel)
    count = float(x.shape[0] * positions)
    if diagonal:
        squares = windows(x.square().sum(0, keepdim=True), kernel, options)
        return InputMoment(squares.sum(places)[0].flatten(1), total, count)
    if axes == 2 and options["groups"] == 1 and _rows_pay(x, kernel, options, positions):
        return InputMoment(_moment_by_rows(padded(x, options), kernel, options)[None], total, count)
    fields = windows(x, kernel, options)
    order = (1, 2, *range(3 + axes, 3 + 2 * axes), 0, *range(3, 3 + axes))
    flat = fields.permute(order).flatten(2 + axes).flatten(1, 1 + axes)  # (R, d, B·S)
    return InputMoment(second_moment(flat), total, count)


def _rows_pay(x: Tensor, kernel: Size, options: dict[str, Any], positions: int) -> bool:
    """Whether products of whole rows of pixels are cheaper than products of receptive fields."""
    reach = [k * d for k, d in zip(kernel, options["dilation"], strict=True)]
    height, width = (
        size + before + after for size, (before, after) in zip(x.shape[2:], options["padding"], strict=True)
    )
    d = x.shape[1] * kernel.numel()
    pairs = height * reach[0] - reach[0] * (reach[0] - 1) // 2
    examples = x.shape[0]
    by_rows = float(pairs * (width * x.shape[1]) ** 2 * (examples + WRITING))
    fields = examples * positions * d * (COPYING + (0.6 if d > BLOCK else 1.0) * d)
    return bool(by_rows < fields)


def _moment_by_rows(x: Tensor, kernel: Size, options: dict[str, Any]) -> Tensor:
    """Σ a aᵀ of receptive fields a without forming them, (d, d)."""
    # x (B, c, height, width)
    # Receptive fields overlap, so that the same products of pixels appear in many entries. With M the second
    # moment of whole rows of pixels, each pair of near rows multiplied once,
    #
    #     A[(c, i, j), (c', i', j')] = Σ_s M[s₁ + i, s₂ + j, c; s₁ + i', s₂ + j', c']
    channels, height, width = x.shape[1:]
    (k1, k2), (t1, t2), (d1, d2) = kernel, options["stride"], options["dilation"]
    rows = x.permute(2, 3, 1, 0).reshape(height, width * channels, -1)  # (height, width · c, B)
    out1, out2 = (height - d1 * (k1 - 1) - 1) // t1 + 1, (width - d2 * (k2 - 1) - 1) // t2 + 1
    moment = x.new_zeros(channels, k1, k2, channels, k1, k2)
    for shift in range(k1):
        # M for all pairs of rows that are ``shift`` kernel rows apart
        needed = height - shift * d1
        products = torch.bmm(rows[:needed], rows[shift * d1 :].mT)
        # Σ over s₂, (rows, j, j', c, c'), then over s₁ for every kernel row i and i' = i + shift
        sizes, steps = (k2, k2, out2, channels, channels), width * channels
        strides = (d2 * channels * steps, d2 * channels, t2 * channels * (steps + 1), steps, 1)
        lines = products.as_strided((needed, *sizes), (steps * steps, *strides)).sum(3)
        each = lines.stride(0)
        counted = (k1 - shift, out1, *lines.shape[1:])
        both = lines.as_strided(counted, (d1 * each, t1 * each, *lines.stride()[1:])).sum(1)
        for i, picked in enumerate(both.unbind()):  # (j, j', c, c')
            moment[:, i, :, :, i + shift] = picked.permute(2, 0, 3, 1)
            moment[:, i + shift, :, :, i] = picked.permute(3, 1, 2, 0)
    d = channels * k1 * k2
    return moment.view(d, d)


def mean_input(parts: list[UseFactors], weights: Sequence[Tensor]) -> Tensor:
    """The mean input of an example over all its positions, (N, R, 1, d)."""
    # weights (N, 1, S)
    count = torch.stack([w.sum(-1) for w in weights]).sum(0)  # (N, 1)
    total = torch.stack([(f.a * w[..., None]).sum(2) for f, w in zip(parts, weights, strict=True)]).sum(0)
    mean: Tensor = total / count.clamp(min=1)[..., None]
    return mean[:, :, None]


def summed_gradients(parts: list[UseFactors]) -> Tensor:
    """The gradient of an example, summed over all its positions, (K, N, R, 1, c)."""
    return torch.stack([f.g.sum(3) for f in parts]).sum(0)[:, :, :, None]
