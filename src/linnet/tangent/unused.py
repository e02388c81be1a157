"""Parameters that the outputs do not depend on, and gradients that only training mode has.

Layers that merge low-rank updates into a weight in ``eval()``, or keep a computed weight from one pass to the
next, are another function of their parameters there: derivatives vanish that training has.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import NoReturn

import torch
from torch import Tensor, nn

from linnet.errors import LinnetError, ModelError
from linnet.linalg.host import read
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.functional import FAILURES, Functional
from linnet.tangent.modes import alone, in_exact_mode
from linnet.tangent.streamed import COARSE, ROUNDING, SWITCHING, hand_over, sketch

UNUSED = "unused"  # what a cache calls them
ALIKE = "alike in both modes"  # and whether gradients were compared, or need not be
REMEDY = (
    "compute the weight in every pass: merge_weights=False for loralib, model.unmerge_adapter() for peft, no "
    "cache in eval(); or leave these parameters out with params="
)
_PLAIN = ("torch.nn.modules.module", "transformers.modeling_utils")  # whose train() writes to no weight
# Whose training mode is other than their evaluation mode on purpose.
_SWITCHED = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)


@in_exact_mode
def settle_unused(function: Functional, x: Inputs, names: Iterable[str]) -> None:
    """Warn once of selected parameters that no output depends on; raise if some do in training mode."""
    found = set(names) - set(function.cache.setdefault(UNUSED, ()))
    if not found:
        return
    unused = tuple(name for name in function.names if name in found)
    moving = _in_training(function, take(x, slice(0, min(2, batch_size(x)))), unused)
    if moving:
        _refuse(function, moving, "depends on {} in training mode alone")
    function.cache[UNUSED] = (*function.cache[UNUSED], *unused)
    warnings.warn(unused_remark(function), stacklevel=2)


@in_exact_mode
def require_one_function(function: Functional, x: Inputs) -> None:
    """Raise if training mode has other gradients than evaluation mode where outputs are the same."""
    alike = _wrapped(function) or not any(map(_switches, function.model.modules()))
    if function.cache.setdefault(ALIKE, alike):
        return
    function.cache[ALIKE] = True
    one, found = take(x, slice(0, 1)), []
    for network in (_training_twin(function, ()), function):
        leaves = {name: t.requires_grad_() for name, t in network.theta.items()}
        try:
            with _random_state_kept(function), torch.enable_grad():
                value = network.flat(leaves, one)
        except (LinnetError, *FAILURES):  # a network that cannot be trained on one example says nothing
            return
        found.append((value, leaves))
    (trained, _), (own, _) = found
    least = ROUNDING.get(own.dtype, COARSE) * float(own.detach().abs().max())
    if trained.shape != own.shape or not torch.allclose(trained, own, rtol=0, atol=least):
        return
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(own.shape, generator=generator, dtype=torch.float64).to(own)
    trains: dict[str, Tensor] = {}
    sizes: dict[str, list[Tensor]] = {}
    hand_over(trained, found[0][1], cotangent, lambda name, g: trains.update({name: sketch(g)}))

    def compare(name: str, g: Tensor) -> None:
        mine = sketch(g)
        sizes[name] = [mine.norm(), (trains.pop(name, 0 * mine) - mine).norm()]

    hand_over(own, found[1][1], cotangent, compare)
    sizes |= {name: [0 * g.norm(), g.norm()] for name, g in trains.items()}
    numbers = iter(read([size for pair in sizes.values() for size in pair]))
    pairs = {name: (next(numbers), next(numbers)) for name in sizes}
    whole = sum(size**2 for size, _ in pairs.values()) ** 0.5
    rounding = {name: SWITCHING.get(t.dtype, COARSE) for name, t in function.theta.items()}
    other = [name for name, (size, off) in pairs.items() if off > rounding[name] * (size + 0.1 * whole)]
    if other:
        first = [name for name in function.names if name in other]
        _refuse(function, first, "has other gradients in {} in training mode, though the same outputs")


def _refuse(function: Functional, names: list[str], does: str) -> NoReturn:
    """Raise the error of a network that is another function of some parameters in training mode."""
    kind = type(function.model.get_submodule(names[0].rpartition(".")[0])).__name__
    which = f"{len(names)} selected parameter(s), first {names[0]!r} of a {kind},"
    raise ModelError(
        f"model ({type(function.model).__name__}) {does.format(which)}, and is linearized in evaluation mode",
        expected="the same function of the weights in both modes",
        remedy=REMEDY,
    )


def _switches(module: nn.Module) -> bool:
    """Whether code that is not torch's, dropout apart, reads or sets the mode of a module."""
    kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")]
    if "drop" in type(module).__name__.lower() or isinstance(module, _SWITCHED):
        return False
    members = [inspect.unwrap(f) for kind in kinds for f in vars(kind).values() if callable(f)]
    return _writes(module) or any(
        "training" in _words(f.__code__) for f in members if isinstance(f, FunctionType)
    )


def _writes(module: nn.Module) -> bool:
    """Whether its ``train()`` may write to weights."""
    return type(module).train.__module__ not in _PLAIN


def _words(code: CodeType) -> Iterator[str]:
    """Attributes and texts that code names."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _words(part)
        elif isinstance(part, str):
            yield part


def unused_remark(function: Functional) -> str:
    """A sentence on selected parameters that no output depends on, as far as passes have shown."""
    unused = function.cache.get(UNUSED, ())
    if not unused:
        return ""
    merged = any(getattr(module, "merged", False) is True for module in function.model.modules())
    told = "; adapters are merged into the weights (peft: model.unmerge_adapter())" if merged else ""
    first = f"the outputs do not depend on {len(unused)} selected parameter(s), first {unused[0]!r}"
    return f"{first}: their derivatives are zero{told}"


def _in_training(function: Functional, few: Inputs, names: tuple[str, ...]) -> list[str]:
    """Those of the parameters that have a gradient in training mode."""
    if _wrapped(function):
        return []
    twin = _training_twin(function, names)
    leaves = {name: twin.theta[name].requires_grad_() for name in names}
    try:
        with _random_state_kept(function), torch.enable_grad():
            value = twin.flat(leaves, few)
            if not value.requires_grad:
                return []
            grads = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    except (LinnetError, *FAILURES):  # a network that cannot be trained on two examples says nothing
        return []
    return [name for name, g in zip(names, grads, strict=True) if g is not None and bool(g.any())]


def _wrapped(function: Functional) -> bool:
    """Whether the network is one process' part of several, which cannot be copied without gradients."""
    return isinstance(function.model, nn.parallel.DistributedDataParallel)


def _random_state_kept(function: Functional) -> AbstractContextManager[None]:
    """What is drawn inside leaves the global generators as they were."""
    return torch.random.fork_rng([function.device] if function.device.type == "cuda" else [])


def _training_twin(function: Functional, names: tuple[str, ...]) -> Functional:
    """The same function in training mode."""
    twin = copy.copy(function)
    twin.cache, twin.model = {}, _training_copy(function.model, names)
    return twin


def _training_copy(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """A copy in training mode, dropout and batch statistics apart, that shares what it does not write to."""
    own: set[int] = set()
    for path, module in model.named_modules():
        inside = any(name.rpartition(".")[0] == path for name in names)
        if inside or _writes(module):  # what merges writes to the weights below it
            own |= {id(p) for p in module.parameters()}
        elif _switches(module):
            own |= {id(p) for p in module.parameters(recurse=False)}
    with alone():
        clone = copy.deepcopy(model, {id(p): p for p in model.parameters() if id(p) not in own})
    clone.train()
    for module in clone.modules():
        if isinstance(module, _SWITCHED) or "drop" in type(module).__name__.lower():
            module.training = False
    return clone
