"""Replaces the ReLUs of a network by Leaky ReLUs, modules and function calls both.

The gradient of a ReLU network at θ₀ is zero in every unit that is off, and in a linear model it stays so: a
Leaky ReLU lets it through (Achille et al., CVPR 2021, section 3.3). Modules are replaced. Calls of functions
and methods (``F.relu``, ``torch.relu``, ``x.relu_()``) are caught while the network runs, in a copy whose
class is a subclass made for it: names of parameters and modules stay as they were. Its
methods run under a mode that replaces ``F.relu`` and its kin.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.errors import InputError, ModelError
from linnet.params import flag, holding, instance, number
from linnet.shown import Record
from linnet.tangent.batch import Inputs
from linnet.tangent.functional import Functional, OutputAdapter, check_output, without_wrapper
from linnet.tangent.modes import CallMode, without_recomputation
from linnet.tangent.selection import require_module

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


class _Leak(CallMode):
    """Replaces calls of rectifiers while the network runs."""

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, with a slope below zero where a rectifier is called."""
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
    with holding(_SLOPE, (slope, clamps)), _Leak(), without_recomputation():
        yield


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


RECORD = "_linnet_surgery"  # attribute of a network after surgery: its report


@dataclass(frozen=True, repr=False)
class Activation(Record):
    """One place where a network rectifies.

    Args:
        where: The module, by its name in the network; empty for the network itself.
        what: What is there: a module's class or a function's name.
        by: What it became; for a place that was left, why.
        times: Calls in one pass; ``None`` where no example was run.

    Example:
        >>> Activation("body.relu", "ReLU", "LeakyReLU", times=2).where
        'body.relu'
    """

    where: str
    what: str
    by: str
    times: int | None = None


@dataclass(frozen=True, repr=False)
class SurgeryReport(Record):
    """Report of replaced and kept activations.

    Args:
        slope: Slope of the new activations below zero.
        replaced: Places that changed.
        left: Places that rectify still, and why.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> print(report(leaky_relu(net)))
        ReLU to Leaky ReLU of slope 0.2: 1 place
          1  ReLU -> LeakyReLU
    """

    slope: float
    replaced: tuple[Activation, ...]
    left: tuple[Activation, ...] = ()

    def __str__(self) -> str:
        lines = [f"ReLU to Leaky ReLU of slope {self.slope:g}: {_count(self.replaced)}"]
        lines += [_line(one, "->") for one in self.replaced]
        if self.left:
            lines += [f"left as they were: {_count(self.left)}"] + [_line(one, ":") for one in self.left]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain numbers and text, for JSON."""
        return asdict(self)


def _count(places: Collection[Activation]) -> str:
    return f"{len(places)} place" + ("" if len(places) == 1 else "s")


def _line(one: Activation, sign: str) -> str:
    times = "" if one.times is None else f" ({one.times} a pass)"
    return f"  {one.where or '(network)'}  {one.what}{'' if sign == ':' else ' '}{sign} {one.by}{times}"


def leaky_relu(
    model: nn.Module,
    slope: float = 0.2,
    example: Inputs | None = None,
    *,
    keep: Collection[str] = (),
    clamps: bool = False,
    output: OutputAdapter = None,
) -> nn.Module:
    """A copy of the network in which every ReLU is a Leaky ReLU.

    ReLU6 and ``hardtanh(x, 0, cap)`` keep their cap and leak below zero. In-place calls stay in place.
    ``torch.utils.checkpoint`` is put aside inside the copy, because a recomputation would run outside of it.

    Args:
        model: The network; it is not touched.
        slope: Slope below zero, in (0, 1].
        example: A small batch. With it the report counts the calls of functions as they happen; without it
            they are found by their names in the code. What is replaced does not depend on it.
        keep: Names of modules to leave as they are, with all that is inside them.
        clamps: Whether ``clamp(min=0)`` is an activation too; it may as well guard a root or a logarithm.
        output: How to turn the network's result into a tensor, for the run on the example.

    Returns:
        The copy, with the same names of parameters; :func:`report` says what was replaced.

    Raises:
        InputError: If an argument has a value that does not work, or the network was operated on before.
        ModelError: If a ReLU is out of reach: in a compiled script, or inside a recurrent kernel.

    Source:
        Achille et al., CVPR 2021, section 3.3; Maas et al. 2013.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> leaky_relu(net)[1], net[1]
        (LeakyReLU(negative_slope=0.2), ReLU())
    """
    model = without_wrapper(model)
    _check(model, slope, keep, clamps)
    check_output(output)
    function = Functional(model, output=output, params=None) if example is not None else None
    if function is not None:
        function.check_runs(example)
    clone = copy.deepcopy(model)
    kept = {id(m) for name in keep for m in clone.get_submodule(name).modules()}
    _require_reachable(clone, kept)
    replaced, clone = _replace_modules(clone, slope, kept)
    named = {id(m): name for name, m in reversed(list(clone.named_modules()))}
    for module in list(clone.modules()):
        if id(module) in kept:
            make_leaking(module, ("forward",), None, clamps)
            continue
        plain: Any = type(module)
        if found := mentions(plain):
            make_leaking(module, tuple(found), slope, clamps)
            replaced += [] if function else _from_code(named[id(module)], module, found)
    if not isinstance(clone, Leaking):
        make_leaking(clone, ("forward",), slope, clamps)
    left = [Activation(name, type(clone.get_submodule(name)).__name__, "asked to keep") for name in keep]
    setattr(clone, RECORD, SurgeryReport(slope, (), ()))
    if function is not None:
        calls, passed = _watch(clone, example, output)
        replaced += [Activation(where, func, "leaky_relu", n) for (where, func), n in calls.items()]
        left += passed
    setattr(clone, RECORD, SurgeryReport(slope, tuple(replaced), tuple(left)))
    return clone


def report(model: nn.Module) -> SurgeryReport:
    """Report of the surgery on a network.

    Args:
        model: A network from :func:`leaky_relu`, or a copy of one.

    Returns:
        The report.

    Raises:
        InputError: If the network was not operated on.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> isinstance(report(leaky_relu(net)), SurgeryReport)
        True
    """
    instance("model", model, nn.Module, "a torch.nn.Module", "pass the network itself")
    for module in model.modules():
        found = getattr(module, RECORD, None)
        if isinstance(found, SurgeryReport):
            return found
    raise InputError(
        f"model ({type(model).__name__}) has no report of surgery",
        expected="a network from linnet.surgery.leaky_relu",
        remedy="call linnet.surgery.leaky_relu(model)",
    )


def _check(model: nn.Module, slope: float, keep: Collection[str], clamps: bool) -> None:
    """Raise on arguments that cannot work."""
    require_module(model)
    number("slope", slope, above=0, most=1, remedy="leave slope= out for 0.2")
    flag("clamps", clamps)
    if any(hasattr(module, RECORD) for module in model.modules()):
        raise InputError(
            "model had surgery before",
            expected="a network with its own activations",
            remedy="pass the network from before linnet.surgery.leaky_relu",
        )
    if not isinstance(keep, Collection) or isinstance(keep, Tensor):
        raise InputError(
            f"keep is {type(keep).__name__}",
            expected="a list of names of modules of the network",
            remedy="leave keep= out to replace all",
        )
    names = dict(model.named_modules(remove_duplicate=False))
    missing = [name for name in ([keep] if isinstance(keep, str) else keep) if name not in names]
    if isinstance(keep, str) or missing:
        raise InputError(
            f"keep={keep!r}" + (f": there is no module {missing[0]!r}" if missing else ""),
            expected="a list of names of modules of the network",
            remedy="see dict(model.named_modules()) for all of them",
        )


def _require_reachable(model: nn.Module, kept: set[int]) -> None:
    """Raise for a rectifier that neither a module nor a call stands for."""
    for name, module in model.named_modules():
        if id(module) in kept:
            continue
        why = ""
        if isinstance(module, torch.jit.ScriptModule):
            why = "is compiled by torch.jit, which no replacement reaches"
        elif isinstance(module, nn.RNN | nn.RNNCell) and getattr(module, "nonlinearity", "") == "relu":
            why = "rectifies inside the recurrent kernel"
        if why:
            raise ModelError(
                f"module {name or '(network)'!r} ({type(module).__name__}) {why}",
                expected="activations that are modules or calls of torch's functions",
                remedy=f"leave it unchanged: leaky_relu(model, keep=[{name!r}])",
            )


def _replace_modules(model: nn.Module, slope: float, kept: set[int]) -> tuple[list[Activation], nn.Module]:
    """Put new modules where rectifying ones are; one instance used in several places stays one."""
    made: dict[int, nn.Module] = {}
    found: list[Activation] = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in kept:
            continue
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            found += _in_transformer(name, module, slope)
        new = made.get(id(module)) or _module_for(module, slope)
        if new is None:
            continue
        made[id(module)] = new
        found.append(Activation(name, type(module).__name__, type(new).__name__))
        if not name:
            return found, new
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)
    return found, model


def _module_for(module: nn.Module, slope: float) -> nn.Module | None:
    """The replacement of a module, ``None`` where it is to stay."""
    kind, inplace = type(module).forward, bool(getattr(module, "inplace", False))
    new: nn.Module | None = None
    if isinstance(module, nn.ReLU) and kind is nn.ReLU.forward:
        new = nn.LeakyReLU(slope, inplace)
    elif isinstance(module, nn.ReLU6 | nn.Hardtanh) and kind in (nn.ReLU6.forward, nn.Hardtanh.forward):
        new = CappedLeakyReLU(slope, float(module.max_val), inplace) if module.min_val == 0 else None
    elif isinstance(module, nn.Threshold) and kind is nn.Threshold.forward:
        new = nn.LeakyReLU(slope, inplace) if module.threshold == 0 == module.value else None
    if new is not None:
        new.training = module.training
        for key, value in vars(module).items():  # hooks stay
            if "_hooks" in key:
                new.__dict__[key] = value
    return new


def _in_transformer(name: str, layer: nn.Module, slope: float) -> list[Activation]:
    """The activation of torch's own transformer layers, which also have a fused kernel for it."""
    if getattr(layer, "activation", None) not in RELU:
        return []
    layer.activation = functools.partial(F.leaky_relu, negative_slope=slope)  # type: ignore[assignment]
    layer.activation_relu_or_gelu = 0  # type: ignore[assignment]  # not the fused kernel
    return [Activation(name, "activation=relu", "leaky_relu")]


def _from_code(name: str, module: nn.Module, found: dict[str, frozenset[str]]) -> list[Activation]:
    """Calls of functions as the code names them; attributes that are modules have been replaced already."""
    return [
        Activation(name, f"{word} in {method}", "leaky_relu")
        for method, words in found.items()
        for word in sorted(words)
        if not isinstance(getattr(module, word, None), nn.Module)
    ]


def _watch(
    model: nn.Module, example: Inputs, output: OutputAdapter
) -> tuple[dict[tuple[str, str], int], list[Activation]]:
    """Calls by module and function in one pass, and the clamps among them that were left."""
    function = Functional(model, output=output)
    stack = [""]
    calls: dict[tuple[str, str], int] = {}
    left: dict[tuple[str, str], int] = {}

    def note(func: str, passed: bool) -> None:
        into = left if passed else calls
        key = (stack[-1], func)
        into[key] = into.get(key, 0) + 1

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: stack.append(name)

    def leave(*_: Any) -> None:
        stack.pop()

    for name, module in function.model.named_modules():
        module.register_forward_pre_hook(enter(name))
        module.register_forward_hook(leave)
    with holding(CALLS, note):
        function.check_runs(example)
    remedy = "may guard a root or a logarithm; clamps=True replaces it"
    return calls, [Activation(where, f"{func}(min=0)", remedy, n) for (where, func), n in left.items()]
