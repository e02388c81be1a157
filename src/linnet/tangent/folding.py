"""Batch normalization folded into the convolution before it, for faster directional derivatives.

In evaluation mode, with r = 1/√(var + ε) and s = γ r,

    bn(conv(x, W) + c) = conv(x, s W) + β + s (c − mean),

so the tangents of γ and β act on weights (kilobytes) instead of on maps (megabytes), and the
normalized map is never formed. Only a convolution whose result goes to one normalization and
nowhere else is folded; should a later pass break that, it is run again without folding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from linnet.tangent.batch import Inputs, tensors_in
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional

CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
PARTS = ("running_mean", "running_var", "weight", "bias")


@dataclass(frozen=True)
class Normalization:
    """What a batch normalization reads.

    Args:
        tensors: Mean, variance, weight and bias: the name of a parameter of the pass, a fixed
            tensor, or ``None``.
        eps: ε.
    """

    tensors: dict[str, str | Tensor | None]
    eps: float

    def folded(self, params: Params, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The weight s W and the bias β + s (c − mean)."""
        mean, variance, gamma, beta = (self._value(params, part) for part in PARTS)
        assert mean is not None
        assert variance is not None
        r = torch.rsqrt(variance + self.eps)
        s = r if gamma is None else gamma * r
        shift = -mean * s if bias is None else (bias - mean) * s
        return weight * s.view(-1, *[1] * (weight.ndim - 1)), shift if beta is None else beta + shift

    def _value(self, params: Params, part: str) -> Tensor | None:
        """The tensor of this pass."""
        found = self.tensors[part]
        return params[found] if isinstance(found, str) else found


class Unfoldable(Exception):
    """A pass used a folded convolution's result elsewhere."""


def find_folds(function: Functional, x: Inputs) -> dict[int, Normalization]:
    """Convolutions that can be folded, by their order in the pass.

    Args:
        function: The network.
        x: A small batch.

    Returns:
        The normalization that follows each of them.
    """
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


class Folding(TorchFunctionMode):
    """Runs a pass with convolutions folded.

    Args:
        folds: From ``find_folds``.
        params: The parameters of this pass.

    Raises:
        Unfoldable: From within the pass, if the result of a folded convolution goes elsewhere.
    """

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
            self.closed += 1
            return args[0].view_as(args[0])
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
        func: Callable[..., Any],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The convolution, with its normalization if it has one."""
        index, self.seen = self.seen, self.seen + 1
        if index not in self.folds:
            result: Tensor = func(input, weight, bias, *args, **kwargs)
            return result
        weight, bias = self.folds[index].folded(self.params, weight, bias)
        result = func(input, weight, bias, *args, **kwargs)
        result._linnet_fold = index  # type: ignore[attr-defined]
        return result

    def finish(self, output: Tensor) -> None:
        """Make sure that every folded convolution met its normalization.

        Args:
            output: The result of the pass.

        Raises:
            Unfoldable: If one did not.
        """
        if self.closed != len(self.folds) or hasattr(output, "_linnet_fold"):
            raise Unfoldable("the pass took another way")


def _marks(items: Any) -> list[int]:
    """Order numbers of the convolutions whose results are among the items."""
    return [t._linnet_fold for t in tensors_in(items) if hasattr(t, "_linnet_fold")]
