"""Batch normalization folded into the convolution before it, for the tangent of a pass.

In evaluation mode, with r = 1/√(var + ε) and s = γ r, the directional derivative of
z = bn(conv(x, W) + c) along (dx, dW, dc, dγ, dβ) is

    dz = conv(dx, s W) + conv(x, s dW + r W dγ) + dβ + s dc + r (c − mean) dγ,

so dγ and dβ act on weights (kilobytes) instead of on maps (megabytes), and the normalized map is
never differentiated. The pass itself is left as it is, so outputs and derivatives belong to the same
activations to the bit. Only a convolution whose result goes to one normalization and nowhere else is
folded; should a later pass break that, it is run again without folding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from linnet.tangent.batch import Inputs, tensors_in
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional

CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
Dual = tuple[Tensor | None, Tensor | None]  # a value and its tangent, None for zero
PARTS = ("running_mean", "running_var", "weight", "bias")


@dataclass(frozen=True)
class Normalization:
    """The buffers and weights of a batch normalization."""

    # mean, variance, weight and bias: the name of a parameter of the pass, a fixed tensor, or `None`
    tensors: dict[str, str | Tensor | None]
    eps: float  # ε

    def tangents(
        self, params: Params, weight: Dual, bias: Dual
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The weights s W and s dW + r W dγ, and the bias dβ + s dc + r (c − mean) dγ; ``None`` is zero."""
        mean, variance = (self._value(params, part) for part in PARTS[:2])
        (gamma, d_gamma), (_, d_beta) = (_dual(self._value(params, part)) for part in PARTS[2:])
        assert mean is not None
        assert variance is not None
        assert weight[0] is not None
        r = torch.rsqrt(variance + self.eps)
        s = r if gamma is None else gamma * r
        centered = -mean if bias[0] is None else bias[0] - mean
        d_weight = _sum(
            _times(_column(s, weight[0]), weight[1]), _times(_column(r, weight[0]) * weight[0], d_gamma)
        )
        d_bias = _sum(_sum(d_beta, _times(s, bias[1])), _times(r * centered, d_gamma))
        return _column(s, weight[0]) * weight[0], d_weight, d_bias

    def _value(self, params: Params, part: str) -> Tensor | None:
        """The tensor of this pass."""
        found = self.tensors[part]
        return params[found] if isinstance(found, str) else found


def _dual(t: Tensor | None) -> Dual:
    """Value and tangent of a tensor in forward mode."""
    if t is None:
        return None, None
    pair = forward_ad.unpack_dual(t)
    return pair.primal, pair.tangent


def _primal(argument: Any) -> Any:
    """The value of a tensor, anything else as it is."""
    return _dual(argument)[0] if isinstance(argument, Tensor) else argument


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum where ``None`` is zero."""
    return b if a is None else a if b is None else a + b


def _times(a: Tensor, b: Tensor | None) -> Tensor | None:
    """The product where ``None`` is zero; a vector scales the first axis of a weight."""
    return None if b is None else a * (_column(b, a) if b.ndim < a.ndim else b)


def _column(scale: Tensor, like: Tensor) -> Tensor:
    """(c,) as (c, 1, ..., 1), to scale the first axis."""
    return scale.view(-1, *[1] * (like.ndim - 1))


class Unfoldable(Exception):
    """A pass used a folded convolution's result elsewhere."""


def find_folds(function: Functional, x: Inputs) -> dict[int, Normalization]:
    """Convolutions that can be folded, by their order in the pass."""
    watcher = _Watcher(function.theta)
    with torch.no_grad(), watcher:
        output = function(watcher.params, x)
    return {
        index: consumers[0]
        for index, consumers in watcher.consumers.items()
        if len(consumers) == 1 and isinstance(consumers[0], Normalization) and index not in _marks(output)
    }


class _Watcher(TorchFunctionMode):
    """Notes what becomes of the results of convolutions."""

    def __init__(self, theta: Params) -> None:
        super().__init__()
        self.params = {name: t.view_as(t) for name, t in theta.items()}
        self.names = {id(t): name for name, t in self.params.items()}
        self.consumers: dict[int, list[Normalization | None]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not tensors_in(result):
            return result  # a property such as the shape
        read = _marks((*args, *kwargs.values()))
        normalization = self._normalization(func, args, kwargs)
        for index in read:
            self.consumers[index].append(normalization)
        if getattr(func, "__name__", "") in CONVOLUTIONS:
            result._linnet_fold = len(self.consumers)
            self.consumers[len(self.consumers)] = []
        return result

    def _normalization(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Normalization | None:
        """The call as a batch normalization on running statistics, if it is one."""
        if getattr(func, "__name__", "") != "batch_norm":
            return None
        call = batch_norm_call(args, kwargs)
        if call["training"] or call["running_mean"] is None or call["running_var"] is None:
            return None
        return Normalization({part: self._known(call[part]) for part in PARTS}, call["eps"])

    def _known(self, t: Tensor | None) -> str | Tensor | None:
        """The name of a parameter of the pass, or the tensor itself."""
        return None if t is None else self.names.get(id(t), t)


def batch_norm_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``F.batch_norm`` by name."""
    names = ("input", *PARTS, "training", "momentum", "eps")
    defaults = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@dataclass(frozen=True)
class _Pending:
    """A convolution whose tangent waits for its normalization."""

    index: int
    convolve: Callable[..., Tensor]
    inputs: tuple[Dual, Dual, Dual]  # input, weight, bias


class Folding(TorchFunctionMode):
    """Runs a pass in forward mode with the tangents of normalizations folded."""

    def __init__(self, folds: dict[int, Normalization], params: Params) -> None:
        super().__init__()
        self.folds, self.params, self.seen, self.closed = folds, params, 0, 0

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in CONVOLUTIONS:
            return self._convolve(func, *args, **kwargs)
        if name == "batch_norm" and hasattr(args[0], "_linnet_fold"):
            return self._normalize(func, args, kwargs)
        result = func(*args, **kwargs)
        if (
            isinstance(result, Tensor | tuple | list)
            and _marks((*args, *kwargs.values()))
            and tensors_in(result)
        ):
            raise Unfoldable(name)
        return result

    def _convolve(
        self,
        func: Callable[..., Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The convolution; its tangent is left to its normalization, if it has one."""
        index, self.seen = self.seen, self.seen + 1
        if index not in self.folds:
            return func(input, weight, bias, *args, **kwargs)
        inputs = _dual(input), _dual(weight), _dual(bias)

        def convolve(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return func(x, w, b, *args, **kwargs)

        assert inputs[0][0] is not None
        assert inputs[1][0] is not None
        result = convolve(inputs[0][0], inputs[1][0], inputs[2][0])
        result._linnet_fold = index  # type: ignore[attr-defined]
        result._linnet_pending = _Pending(index, convolve, inputs)  # type: ignore[attr-defined]
        return result

    def _normalize(
        self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """The normalization of a pending convolution, and the tangent of both."""
        self.closed += 1
        pending: _Pending = args[0]._linnet_pending
        (x, d_x), weight, bias = pending.inputs
        with torch.no_grad():
            value = func(*map(_primal, args), **{key: _primal(arg) for key, arg in kwargs.items()})
        scaled, d_weight, d_bias = self.folds[pending.index].tangents(self.params, weight, bias)
        assert x is not None
        tangent = None if d_x is None else pending.convolve(d_x, scaled, None)
        if d_weight is not None:
            tangent = _sum(tangent, pending.convolve(x, d_weight, d_bias))
        elif d_bias is not None:
            tangent = _sum(tangent, _column(d_bias, value[0]).expand_as(value))
        return value if tangent is None else forward_ad.make_dual(value, tangent)

    def finish(self, output: Tensor) -> None:
        """Make sure that every folded convolution met its normalization."""
        if self.closed != len(self.folds) or hasattr(output, "_linnet_fold"):
            raise Unfoldable("the pass took another way")


def _marks(items: Any) -> list[int]:
    """Order numbers of the convolutions whose results are among the items."""
    return [t._linnet_fold for t in tensors_in(items) if hasattr(t, "_linnet_fold")]
