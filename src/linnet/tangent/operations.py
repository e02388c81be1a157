"""Maps torch functions to the gradient rules in ``rules``.

``describe`` turns a call into uses ``(kind, operand, a, options)`` or answers ``None`` when the
call is not understood; the parameter is then differentiated example by example instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Described = tuple[str, Tensor, Tensor | None, dict[str, Any]]

REPEATING = frozenset({"expand", "expand_as", "repeat", "tile", "broadcast_to"})


def describe(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, n: int
) -> list[Described] | None:
    """The uses that one call of a torch function makes of tracked tensors."""
    reader = _READERS.get(name)
    if reader is None or "out" in kwargs:
        return None
    try:
        found = reader(result, *args, **kwargs)
    except TypeError:  # an argument that the reader does not know
        return None
    return None if found is None else [use for use in found if use is not None]


def _tracked(t: Any) -> bool:
    return isinstance(t, Tensor) and hasattr(t, "_linnet_from") and t.requires_grad


def _data(t: Any) -> bool:
    return isinstance(t, Tensor) and not _tracked(t)


def _shift(operand: Any, sign: int = 1) -> Described | None:
    return ("shift", operand, None, {"sign": sign}) if _tracked(operand) else None


def _scale(operand: Any, a: Callable[[], Tensor]) -> Described | None:
    return ("scale", operand, a(), {}) if _tracked(operand) else None


Found = list[Described | None] | None


def _linear(result: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Found:
    if not _data(input) or input.ndim < 2 or weight.ndim != 2:
        return None
    return [("linear", weight, input, {}) if _tracked(weight) else None, _shift(bias)]


def _matmul(result: Tensor, input: Tensor, other: Tensor) -> Found:
    if _data(input) and _tracked(other) and other.ndim == 2 and input.ndim >= 2:
        return [("linear", other, input, {"transposed": True})]  # y = x W, W stored (d, c)
    if _data(other) and _tracked(input) and input.ndim == 2 and other.ndim >= 2:
        return [("linear", input, other, {"left": True})]  # y = W x
    return None


def _reverse_matmul(result: Tensor, input: Tensor, other: Tensor) -> Found:
    return _matmul(result, other, input)


def _addmm(
    result: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Found:
    if beta != 1 or alpha != 1:
        return None
    product = _matmul(result, mat1, mat2) if _tracked(mat1) or _tracked(mat2) else []
    return None if product is None else [*product, _shift(input)]


def _einsum(result: Tensor, equation: Any, *operands: Any) -> Found:
    """A matrix applied to one axis of the data, with its outputs on the last: "...i,oi->...o" and its kin."""
    operands = (
        tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    )
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return None
    *inputs, outputs = equation.replace(" ", "").replace("->", ",").split(",")
    (data, read), (weight, own) = sorted(
        zip(operands, inputs, strict=True), key=lambda pair: _tracked(pair[0])
    )
    if not _data(data) or not _tracked(weight) or weight.ndim != 2:
        return None
    dots = [str(i) for i in range(data.ndim - len(read.replace(".", "")))]  # axes that have no letter
    axes, (*batch, c) = _axes(read, dots), _axes(outputs, dots) or [""]
    inner = [axis for axis in axes if axis not in batch]
    is_linear = sorted(axes) == sorted([*batch, *inner]) and sorted(own) == sorted([*inner, c])
    if not batch or len(inner) != 1 or not is_linear or c in axes:  # y[batch, c] = Σ_d x[batch, d] W[c, d]
        return None
    a = data.permute([axes.index(axis) for axis in (*batch, *inner)])
    return [("linear", weight, a, {"transposed": own[0] == inner[0]})]


def _axes(letters: str, dots: list[str]) -> list[str]:
    """One name for each axis of an operand of einsum."""
    before, found, after = letters.partition("...")
    return [*before, *(dots if found else []), *after]


def _convolution(axes: int) -> Callable[..., Found]:
    """The reader of a convolution with that many spatial axes."""

    def read(
        result: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Found:
        if not _data(input) or input.ndim != axes + 2:
            return None
        stride, dilation = _per_axis(stride, axes), _per_axis(dilation, axes)
        options = {
            "stride": stride,
            "dilation": dilation,
            "groups": groups,
            "padding": _padding(padding, weight.shape[2:], dilation, axes),
        }
        return [("conv", weight, input, options) if _tracked(weight) else None, _channel_shift(bias)]

    return read


def _transposed_convolution(axes: int) -> Callable[..., Found]:
    """The reader of a transposed convolution with that many spatial axes."""

    def read(
        result: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Found:
        if not _data(input) or input.ndim != axes + 2:
            return None
        # the convolution that takes the outputs back to the inputs; it does not reach the padded outputs
        added = zip(_per_axis(padding, axes), _per_axis(output_padding, axes), strict=True)
        options = {
            "stride": _per_axis(stride, axes),
            "dilation": _per_axis(dilation, axes),
            "groups": groups,
            "padding": [(p, p - extra) for p, extra in added],
            "transposed": True,
        }
        use: Described = ("conv-transposed", weight, input, options)
        return [use if _tracked(weight) else None, _channel_shift(bias)]

    return read


def _channel_shift(bias: Any) -> Described | None:
    """The bias of a convolution, which varies along axis 1."""
    return ("shift", bias, None, {"sign": 1, "channel": True}) if _tracked(bias) else None


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    """One number for each spatial axis."""
    values: tuple[int, ...] = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


def _padding(padding: Any, kernel: torch.Size, dilation: tuple[int, ...], axes: int) -> list[tuple[int, int]]:
    """(before, after) for each spatial axis; "same" puts the odd one after, as torch does."""
    if padding == "valid":
        return [(0, 0)] * axes
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(t // 2, t - t // 2) for t in total]
    return [(p, p) for p in _per_axis(padding, axes)]


def _embedding(
    result: Tensor,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Found:
    if not _data(input) or max_norm is not None or scale_grad_by_freq or not _tracked(weight):
        return None
    index = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return [("embedding", weight, input, {"padding_idx": index})]


def _layer_norm(
    result: Tensor,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *ignored: Any,
    **also_ignored: Any,
) -> Found:
    return [_scale(weight, lambda: F.layer_norm(input, normalized_shape, None, None, eps)), _shift(bias)]


def _rms_norm(
    result: Tensor, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Found:
    return [_scale(weight, lambda: F.rms_norm(input, normalized_shape, None, eps))]


def _channelwise(weight: Any, bias: Any, normalized: Callable[[], Tensor]) -> Found:
    """A norm whose weight and bias vary along axis 1."""
    scale = _scale(weight, normalized)
    shift = _shift(bias)
    for use in (scale, shift):
        if use is not None:
            use[3]["channel"] = True
    return [scale, shift]


def _batch_norm(
    result: Tensor,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *ignored: Any,
) -> Found:
    if training:
        return None
    return _channelwise(
        weight, bias, lambda: F.batch_norm(input, running_mean, running_var, None, None, False, 0.0, eps)
    )


def _group_norm(
    result: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *ignored: Any,
) -> Found:
    return _channelwise(weight, bias, lambda: F.group_norm(input, num_groups, None, None, eps))


def _instance_norm(
    result: Tensor,
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *ignored: Any,
) -> Found:
    def normalized() -> Tensor:
        return F.instance_norm(input, running_mean, running_var, None, None, use_input_stats, 0.0, eps)

    return _channelwise(weight, bias, normalized)


def _multiply(result: Tensor, input: Any, other: Any) -> Found:
    if _tracked(other) and _data(input):
        return [_scale(other, lambda: input)]
    if _tracked(input) and _data(other):
        return [_scale(input, lambda: other)]
    return None


def _add(result: Tensor, input: Any, other: Any, *, alpha: float = 1, sign: int = 1) -> Found:
    if alpha != 1 or (_tracked(input) and _tracked(other)):
        return None
    return [_shift(input), _shift(other, sign)]


def _reverse_subtract(result: Tensor, input: Any, other: Any, *, alpha: float = 1) -> Found:
    return _add(result, other, input, alpha=alpha, sign=-1)


def _repeat(result: Tensor, input: Tensor, *sizes: Any, **options: Any) -> Found:
    lengths = zip(reversed(input.shape), reversed(result.shape), strict=False)
    return [_shift(input)] if all(own in (1, new) for own, new in lengths) else None


_READERS: dict[str, Callable[..., Found]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "imatmul"), _matmul),
    "rmatmul": _reverse_matmul,
    "addmm": _addmm,
    "einsum": _einsum,
    **{f"conv{axes}d": _convolution(axes) for axes in (1, 2, 3)},
    **{f"conv_transpose{axes}d": _transposed_convolution(axes) for axes in (1, 2, 3)},
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    **dict.fromkeys(("mul", "multiply", "rmul", "imul"), _multiply),
    **dict.fromkeys(("add", "radd", "iadd"), _add),
    **dict.fromkeys(("sub", "subtract", "isub"), partial(_add, sign=-1)),
    **dict.fromkeys(("rsub",), _reverse_subtract),
    **dict.fromkeys(REPEATING, _repeat),
}
