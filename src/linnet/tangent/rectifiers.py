"""Intercepts rectifier calls of functions and methods to make them leaky.

A module is given a subclass of its own class, made for it, whose methods run under a mode that replaces
``F.relu`` and its kin. Names, copies and pickles stay what they were.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from linnet.params import flag, number
from linnet.tangent.modes import without_recomputation

_WORDS = frozenset({"relu", "relu_", "relu6", "hardtanh", "hardtanh_", "threshold", "threshold_"})
_THRESHOLD_IN_PLACE: Any = torch.threshold_
_IN_PLACE = frozenset({torch.relu_, Tensor.relu_, F.hardtanh_, _THRESHOLD_IN_PLACE,
                       Tensor.clamp_, Tensor.clip_, Tensor.clamp_min_,
                       torch.clamp_, torch.clip_, torch.clamp_min_})  # fmt: skip
RELU = frozenset({F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_})
_RANGE = frozenset({torch.clamp, Tensor.clamp, torch.clip, Tensor.clip, Tensor.clamp_, Tensor.clip_,
                    torch.clamp_, torch.clip_})  # fmt: skip
_LOWER = frozenset({torch.clamp_min, Tensor.clamp_min, Tensor.clamp_min_, torch.clamp_min_})
_HARDTANH = frozenset({F.hardtanh, F.hardtanh_})
_THRESHOLD = frozenset({F.threshold, torch.threshold, _THRESHOLD_IN_PLACE})


class CappedLeakyReLU(nn.Module):
    """A Leaky ReLU with a largest value: the replacement of ReLU6.

    Args:
        slope: Slope below zero.
        cap: Largest value.
        inplace: Whether the input is overwritten.

    Example:
        >>> CappedLeakyReLU(0.1, 6.0)(torch.tensor([-1.0, 2.0, 9.0]))
        tensor([-0.1000,  2.0000,  6.0000])
    """

    def __init__(self, slope: float, cap: float, inplace: bool = False) -> None:
        super().__init__()
        self.slope = number("slope", slope, above=0, most=1, remedy="pass slope=0.2")
        self.cap = number("cap", cap, above=0, remedy="pass cap=6.0")
        self.inplace = flag("inplace", inplace)

    def forward(self, x: Tensor) -> Tensor:
        """min(leaky(x), cap), of the shape of x."""
        return leak(x, self.slope, self.cap, self.inplace)

    def extra_repr(self) -> str:
        """The extra line of ``print``."""
        return f"slope={self.slope}, cap={self.cap}" + (", inplace=True" if self.inplace else "")


def leak(x: Tensor, slope: float, cap: float | None, inplace: bool) -> Tensor:
    """min(x if x > 0 else slope · x, cap)."""
    if inplace and cap is not None:  # both steps would overwrite what the other's derivative needs
        return x.copy_(F.leaky_relu(x.clone(), slope).clamp(max=cap))
    y: Tensor = F.leaky_relu_(x, slope) if inplace else F.leaky_relu(x, slope)
    return y if cap is None else y.clamp(max=cap)


# the slope in force, ``None`` where rectifiers stay, and whether clamps count; who is told of calls
_SLOPE: ContextVar[tuple[float | None, bool]] = ContextVar("slope", default=(None, False))
CALLS: ContextVar[Callable[[str, bool], None] | None] = ContextVar("calls", default=None)


class Leaking:
    """Base of every class made by surgery."""


class _Leak(TorchFunctionMode):
    """Replaces calls of rectifiers while the network runs."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        kinds: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        slope, clamps = _SLOPE.get()
        found = None if slope is None else _rectifier(func, args, kwargs)
        if found is None or slope is None:
            return func(*args, **kwargs)
        x, cap, inplace, clamped = found
        if note := CALLS.get():
            note(func.__name__, clamped and not clamps)
        if clamped and not clamps:
            return func(*args, **kwargs)
        return leak(x, slope, cap, inplace)


def _rectifier(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, float | None, bool, bool] | None:
    """The input, the cap, whether in place, and whether by a clamp; ``None`` for any other call."""
    try:
        known = func in RELU or func in _RANGE or func in _LOWER or func in _HARDTANH or func in _THRESHOLD
    except TypeError:
        return None
    if not known and func is not F.relu6:
        return None
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor) or not x.is_floating_point() or "out" in kwargs:
        return None

    def given(place: int, name: str, default: Any = None) -> Any:
        return args[place] if len(args) > place else kwargs.get(name, default)

    if func in RELU:
        return x, None, func in _IN_PLACE or bool(given(1, "inplace", False)), False
    if func is F.relu6:
        return x, 6.0, bool(given(1, "inplace", False)), False
    if func in _HARDTANH:
        inplace = func in _IN_PLACE or bool(given(3, "inplace", False))
        low, cap = given(1, "min_val", -1.0), given(2, "max_val", 1.0)
        return (x, float(cap), inplace, False) if _is_zero(low) else None
    if func in _THRESHOLD:
        inplace = func in _IN_PLACE or bool(given(3, "inplace", False))
        plain = _is_zero(given(1, "threshold")) and _is_zero(given(2, "value"))
        return (x, None, inplace, False) if plain else None
    high = given(2, "max") if func in _RANGE else None
    if not _is_zero(given(1, "min")) or not (high is None or isinstance(high, int | float)):
        return None
    return x, None if high is None else float(high), func in _IN_PLACE, True


def _is_zero(value: Any) -> bool:
    """Whether a bound is the number zero."""
    return isinstance(value, int | float) and value == 0


@contextmanager
def _leaking(slope: float | None, clamps: bool) -> Iterator[None]:
    """Run with rectifiers replaced, or left alone inside where they are replaced."""
    token = _SLOPE.set((slope, clamps))
    try:
        with _Leak(), without_recomputation():
            yield
    finally:
        _SLOPE.reset(token)


def _inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs with rectifiers replaced."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _leaking(*self._linnet_slope):
            return function(self, *args, **kwargs)

    return method


@functools.cache
def _class_for(cls: Any, methods: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of a module's class whose methods, and calls, run with rectifiers replaced."""
    body: dict[str, Any] = {name: _inside(getattr(cls, name)) for name in methods}
    body |= {
        "__call__": _inside(cls.__call__),
        "__reduce_ex__": _reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_linnet_plain": (cls, methods),
    }
    metaclass: Any = type(cls)
    made: type[nn.Module] = metaclass(cls.__name__, (Leaking, cls), body)
    return made


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Copies and pickles are made by the plain class, which can be found by its name."""
    del protocol
    return _rebuild, self._linnet_plain, self.__getstate__()


def _rebuild(cls: Any, methods: tuple[str, ...]) -> nn.Module:
    """An empty module of the subclass."""
    made = _class_for(cls, methods)
    return made.__new__(made)


def make_leaking(module: nn.Module, methods: tuple[str, ...], slope: float | None, clamps: bool) -> None:
    """Give a module its subclass."""
    if isinstance(module, Leaking):
        return
    object.__setattr__(module, "_linnet_slope", (slope, clamps))
    plain: Any = type(module)
    module.__class__ = _class_for(plain, methods)


@functools.cache
def mentions(cls: Any) -> dict[str, frozenset[str]]:
    """Methods of a class outside torch that name a rectifier in their code, and the names."""
    found: dict[str, frozenset[str]] = {}
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for name, member in vars(base).items():
            if isinstance(member, types.FunctionType) and name not in found and not name.startswith("__"):
                words = _names_in(member.__code__) & _WORDS
                if words:
                    found[name] = words
    return found


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Names that a piece of code uses, functions inside it counted."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)
