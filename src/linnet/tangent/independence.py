"""Networks that have no per-example derivatives, or others than in training, are refused.

Examples of a batch must not influence each other's outputs and gradients: only then has every example a
gradient of its own. A causal dependence (a recurrent layer that takes the batch for the sequence, a running
sum) leaves the first example alone, and a dependence on the place in the batch leaves every batch of one
alone. So three things change around an example: the others go, the order of the batch is reversed, and its
gradient is taken by itself.

Parameters that the outputs do not depend on are told. Layers that merge low-rank updates into a weight in
``eval()``, or keep a computed weight from one pass to the next, are another function of their parameters
there: derivatives vanish that training has.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from linnet.errors import LinnetError, ModelError
from linnet.linalg.factorize import read
from linnet.tangent.batch import (
    SHARED,
    Inputs,
    ambiguity,
    batch_size,
    concatenate,
    example_shapes,
    made_up,
    take,
)
from linnet.tangent.forward_mode import COARSE, ROUNDING, SWITCHING, Params, hand_over, sketch
from linnet.tangent.functional import FAILURES, RUNNING, Findings, Functional, batch_statistics
from linnet.tangent.gradients import random_cotangent, recorded
from linnet.tangent.modes import alone, in_exact_mode, random_kept
from linnet.tree import hash_tensors, map_tensors

MOST = 32  # examples that are run twice: enough for every pattern of places that a program writes by hand

OWN = "the outputs of an example depend on the other examples in its batch"
GRAPHS = "docs/tutorials/graphs.md"  # the page that shows it
SWITCH_OFF = (
    "pass training=self.training to dropout in forward, or use nn.Dropout, so that eval() turns it off"
)


@dataclass(frozen=True)
class KnownOutputs:
    """Outputs of passes that were made for another reason."""

    together: Tensor | None = None  # (N, C) of the whole batch, of which the first 32 are looked at
    turned: Tensor | None = None  # (n, C) of the first n = min(N, 32) examples, the last of them first


NOTHING = KnownOutputs()


@torch.no_grad()
def is_random(function: Functional, x: Inputs) -> bool:
    """Whether two passes over the same examples, of which two are run, differ."""
    few = take(x, slice(0, min(2, batch_size(x))))
    with random_kept(device=function.device):
        first, second = function(function.theta, few), function(function.theta, few)
    return not torch.equal(first.nan_to_num(), second.nan_to_num())


def unsteady(function: Functional, x: Inputs) -> tuple[str, str]:
    """What makes two passes differ, random numbers or a state that the network keeps, and what to do."""
    few, outputs, before = take(x, slice(0, min(2, batch_size(x)))), [], _state(function.model)
    with torch.no_grad(), random_kept(device=function.device):
        for _ in range(2):
            torch.manual_seed(0)
            outputs.append(function(function.theta, few).nan_to_num())
    if torch.equal(*outputs):
        return "is random in evaluation mode: two passes differ", SWITCH_OFF
    after = _state(function.model)
    kept = [name for name, now in after.items() if now != before.get(name)]
    return (
        "has a state that changes from one pass to the next" + (f" ({kept[0]})" if kept else ""),
        "change it under `if self.training:` alone, so that eval() keeps it, or begin every pass alike",
    )


def _state(model: nn.Module) -> dict[str, str]:
    """What a network holds beside its weights, by name: hashes of tensors, and other values in words."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        for key, value in {**module._buffers, **module.__dict__}.items():
            name = f"{path}.{key}" if path else key
            if isinstance(value, Tensor | int | float | str | None):
                found[name] = hash_tensors([value]) if isinstance(value, Tensor) else repr(value)
    return found


@in_exact_mode
@torch.no_grad()
def dependence(function: Functional, x: Inputs, seen: KnownOutputs = NOTHING) -> str | None:
    """Find out whether the outputs of an example depend on the rest of its batch."""
    every = batch_size(x)
    if every == 1:
        return _dependence_of_one(function, x)
    n = min(every, MOST)
    block = take(x, slice(0, n))
    together = seen.together
    if together is None or len(together) != every or not bool(torch.isfinite(together[:n]).all()):
        together = function.check_runs(block).reshape(n, -1)  # says what is wrong, if something is
    together = together[:n]
    places = sorted({0, n // 2, n - 1})
    alone = torch.cat([function.check_runs(take(block, [i])).reshape(1, -1) for i in places])
    if _differ(alone, together[places], together):
        return OWN
    turned = seen.turned
    if turned is None:
        turned = function.check_runs(take(block, backwards(n))).reshape(n, -1)
    turned = turned.flip(0)
    return f"{OWN}: they change with its order" if _differ(turned, together, together) else None


def _dependence_of_one(function: Functional, x: Inputs) -> str | None:
    """The same where there is one example: it is put after itself, and after its half."""
    own = function.check_runs(x).reshape(1, -1)

    def half(t: Tensor) -> Tensor:
        """It stays in every range that holds 0; integers (tokens, masks) and shared inputs are kept as is."""
        return t / 2 if t.is_floating_point() and t.ndim > 0 and len(t) == 1 else t

    for other in (x, map_tensors(half, x)):
        try:
            second = function.flat(function.theta, concatenate([other, x]))[-1:]
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            continue  # what is made up may be no input of this network
        if second.shape == own.shape and _differ(second, own, own):
            return OWN
    return None


def _differ(found: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Whether outputs (n, C) differ by more than rounding; not a number is no difference."""
    sizes = scale.abs().amax(1) if scale.shape[1] else scale.new_zeros(len(scale))
    own = expected.abs().amax(1) if expected.shape[1] else expected.new_zeros(len(expected))
    # an output near zero is as inexact as those of other examples
    allowed = torch.maximum(own, sizes.median()) + 1e-12
    tolerance = ROUNDING.get(expected.dtype, COARSE)
    return bool(((found - expected).abs() > tolerance * allowed[:, None]).any())


def backwards(n: int) -> list[int]:
    """The numbers of n examples, the last first."""
    return list(reversed(range(n)))


def require_independence(
    function: Functional, x: Inputs, kind: Any = None, seen: KnownOutputs = NOTHING
) -> None:
    """Raise if the outputs of an example depend on the others in its batch: it has no gradient of its own."""
    if torch.compiler.is_compiling():
        return
    level = min(batch_size(x), 4) // 2  # 0 for one example, 1 for two or three, 2 for more
    known: dict[Any, int] = function.cache.independent
    shapes = example_shapes(x)
    key = shapes if kind is None else kind
    if known.get(key, -1) >= level:
        return
    found = dependence(function, x, seen)
    if found is not None:
        _refuse(function, found, x)
    known[key] = known[shapes] = level
    if function.cache.probe is None:
        function.cache.probe = made_up(x)


def _refuse(function: Functional, found: str, x: Inputs) -> NoReturn:
    """Raise the error of a network whose examples depend on each other."""
    if is_random(function, x):
        said, remedy = unsteady(function, x)
        raise ModelError(
            f"model ({type(function.model).__name__}) {said}",
            expected="the same outputs at every call",
            remedy=remedy,
        )
    together = batch_statistics(function.model)
    statistics = RUNNING.format(together[0]) if together else "use running statistics in normalization layers"
    recurrent = " and batch_first=True in recurrent layers" if function.recurrent else ""
    shared = ambiguity(x)
    raise ModelError(
        f"model ({type(function.model).__name__}) gives an example other outputs when its batch changes: "
        f"{found}" + (f"; {shared}" if shared else ""),
        expected="outputs that depend on their own example alone",
        remedy=f"{statistics}{recurrent}; "
        f"for a graph, pass its nodes by number ({GRAPHS})" + (f"; {SHARED}" if shared else ""),
    )


def only_of(weights: Tensor, i: int) -> Tensor:
    """Cotangents (n, C) with those of all examples but one set to zero."""
    alone = torch.zeros_like(weights)
    alone[i] = weights[i]
    return alone


def require_own_gradients(
    function: Functional, few: Inputs, together: Mapping[int, Params], weights: Tensor
) -> None:
    """Raise if an example alone has another gradient than in its batch, though its outputs are the same."""
    # weights (n, C)
    if not any(together.values()):
        require_history(function, few)
    alone = [
        _sketches(*recorded(function, take(few, [i]), seen), weights[i : i + 1])
        for i, seen in together.items()
    ]
    for name in _unlike(list(together.values()), alone, function):
        if not any(bool(own[name].any()) for own in alone if name in own):  # a weight that was kept
            settle_unused(function, few, [name])
        raise ModelError(
            f"model ({type(function.model).__name__}) gives an example another gradient when its batch "
            f"changes, in {name}",
            expected="outputs whose gradients depend on their own example alone",
            remedy="set scale_grad_by_freq=False, which scales gradients by what a batch holds"
            if any(getattr(module, "scale_grad_by_freq", False) for module in function.model.modules())
            else "use no value of other examples in the forward pass, detached or not",
        )


def _sketches(value: Tensor, leaves: Params, cotangent: Tensor) -> Params:
    """The gradients of a combination of outputs, in few numbers each; none of what it does not depend on."""
    found: Params = {}
    hand_over(value, leaves, cotangent, lambda name, g: found.update({name: sketch(g)}))
    return found


def _unlike(expected: Sequence[Params], found: Sequence[Params], function: Functional) -> list[str]:
    """Parameters in which some gradients differ by more than rounding; what is missing is zero."""
    names = list(dict.fromkeys(name for one in (*expected, *found) for name in one))
    sizes: dict[str, list[Tensor]] = {name: [] for name in names}
    for one, other in zip(expected, found, strict=True):
        for name in one.keys() | other.keys():
            zero = torch.zeros_like(one[name] if name in one else other[name])
            g = one.get(name, zero)
            sizes[name] += [torch.linalg.vector_norm(t) for t in (g, other.get(name, zero) - g)]
    numbers = iter(read([size for own in sizes.values() for size in own]))
    squares = {name: [next(numbers) ** 2 for _ in own] for name, own in sizes.items()}
    whole = sum(sum(own[::2]) for own in squares.values()) ** 0.5
    tolerance = {name: SWITCHING.get(t.dtype, COARSE) for name, t in function.theta.items()}
    return [
        name
        for name, own in squares.items()
        if sum(own[1::2]) ** 0.5 > tolerance[name] * (sum(own[::2]) ** 0.5 + 0.1 * whole)
    ]


@in_exact_mode
def require_own_rows(function: Functional, x: Inputs) -> None:
    """Raise if an example alone has another output or gradient than in its batch; without a plan."""
    require_independence(function, x)
    key, n = example_shapes(x), min(batch_size(x), 3)
    known: dict[Any, int] = function.cache.own_rows
    if known.get(key, 0) >= n:
        return
    few = take(x, [i % n for i in range(3)])
    value, leaves = recorded(function, few)
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
    seen = {i: _sketches(value, leaves, only_of(weights, i)) for i in (0, 2)}
    require_own_gradients(function, few, seen, weights)
    if value.requires_grad:
        settle_unused(function, x, [name for name in leaves if not any(name in own for own in seen.values())])
        require_one_function(function, x)
    else:
        require_history(function, few)
    known[key] = n


FEW = 3  # parameters that an error names
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
    found = set(names) - set(function.cache.unused)
    if not found:
        return
    unused = tuple(name for name in function.names if name in found)
    moving = _in_training(function, take(x, slice(0, min(2, batch_size(x)))), unused)
    if moving:
        _refuse_mode(function, moving, "depends on {} in training mode alone")
    if _merged(function) and len(function.cache.unused) + len(unused) == len(function.names):
        raise ModelError(
            f"the adapters are merged into the weights of model ({type(function.model).__name__}): no "
            f"output depends on the {len(function.names)} selected parameter(s)",
            expected="adapters that are computed in each pass",
            remedy="call model.unmerge_adapter() first, or select the weights that they were merged into",
        )
    function.cache.unused += unused
    warnings.warn(unused_remark(function), stacklevel=2)


@in_exact_mode
def require_one_function(function: Functional, x: Inputs) -> None:
    """Raise if training mode has other gradients than evaluation mode where outputs are the same."""
    if function.cache.one_function:
        return
    function.cache.one_function = True
    if _wrapped(function) or not any(map(_switches, function.model.modules())):
        return
    one, found = take(x, slice(0, 1)), []
    for network in (_training_twin(function, ()), function):
        try:
            with random_kept(device=function.device):
                found.append(recorded(network, one))
        except (LinnetError, *FAILURES):  # a network that cannot be trained on one example says nothing
            return
    trained, own = (value.detach() for value, _ in found)
    least = ROUNDING.get(own.dtype, COARSE) * float(own.abs().max())
    if trained.shape != own.shape or not torch.allclose(trained, own, rtol=0, atol=least):
        return
    theirs, mine = (_sketches(*made, random_cotangent(own)[0]) for made in found)
    other = _unlike([mine], [theirs], function)
    if other and not _is_random(function, one, theirs):
        first = [name for name in function.names if name in other]
        _refuse_mode(function, first, "has other gradients in {} in training mode, though the same outputs")


def require_history(function: Functional, x: Inputs) -> None:
    """Raise where autograd sees no parameter of a network, and warn where it sees none that is selected."""
    moved = {name: t + random_cotangent(t)[0] for name, t in function.theta.items()}
    with torch.no_grad():
        outputs, others = (function.flat(at, x).nan_to_num() for at in (function.theta, moved))
    if torch.equal(outputs, others):
        return  # they do not depend on what is selected
    every = {n: p.detach() for n, p in function.model.named_parameters() if p.is_floating_point()}
    with torch.enable_grad():
        if function.flat({n: p.requires_grad_() for n, p in every.items()}, x).requires_grad:
            settle_unused(function, x, function.names)  # layers below a head that are frozen in this way
            return
    raise ModelError(
        f"model ({type(function.model).__name__}) gives outputs without a gradient in any parameter",
        expected="outputs that autograd can differentiate",
        remedy="forward runs under torch.no_grad() or inference_mode(), or detaches: let the caller do that; "
        "or its outputs are whole numbers, comparisons or places, which have no derivative",
    )


def _refuse_mode(function: Functional, names: list[str], does: str) -> NoReturn:
    """Raise the error of a network that is another function of some parameters in training mode."""
    kind = type(function.model.get_submodule(names[0].rpartition(".")[0])).__name__
    which = f"{len(names)} selected parameter(s), first {names[0]!r} of a {kind},"
    raise ModelError(
        f"model ({type(function.model).__name__}) {does.format(which)}, and is linearized in evaluation mode",
        expected="the same function of the weights in both modes",
        remedy=REMEDY + _others_than(names),
    )


def _others_than(names: list[str]) -> str:
    """What ``params=`` is without a few parameters, such as one that fills masked places in training."""
    if len(names) > FEW:
        return ""
    ends = tuple(name.removeprefix("body.") for name in names)  # of a network behind which a head was put
    return f"lambda n, p: p.requires_grad and not n.endswith({ends if len(ends) > 1 else ends[0]!r})"


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


def _merged(function: Functional) -> bool:
    """Whether adapters are part of the weights that they adapt."""
    return any(getattr(module, "merged", False) is True for module in function.model.modules())


def unused_remark(function: Functional) -> str:
    """A sentence on selected parameters that no output depends on, as far as passes have shown."""
    unused = function.cache.unused
    if not unused:
        return ""
    told = "; adapters are merged into the weights (peft: model.unmerge_adapter())"
    told = told if _merged(function) else ""
    first = f"the outputs do not depend on {len(unused)} selected parameter(s), first {unused[0]!r}"
    return f"{first}: their derivatives are zero{told}"


def _is_random(function: Functional, x: Inputs, before: Params) -> bool:
    """Whether training mode has other gradients at each pass, as with dropout that is no module."""
    with random_kept(device=function.device):
        torch.manual_seed(1)
        again = recorded(_training_twin(function, ()), x)
    return bool(_unlike([before], [_sketches(*again, random_cotangent(again[0].detach())[0])], function))


def _in_training(function: Functional, few: Inputs, names: tuple[str, ...]) -> list[str]:
    """Those of the parameters that have a gradient in training mode."""
    if _wrapped(function):
        return []
    twin = _training_twin(function, names)
    try:
        with random_kept(device=function.device):
            value, leaves = recorded(twin, few, names)
            if not value.requires_grad:
                return []
            grads = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    except (LinnetError, *FAILURES):  # a network that cannot be trained on two examples says nothing
        return []
    return [name for name, g in zip(leaves, grads, strict=True) if g is not None and bool(g.any())]


def _wrapped(function: Functional) -> bool:
    """Whether the network is one process' part of several, which cannot be copied without gradients."""
    return isinstance(function.model, nn.parallel.DistributedDataParallel)


def _training_twin(function: Functional, names: tuple[str, ...]) -> Functional:
    """The same function in training mode."""
    twin = copy.copy(function)
    twin.cache, twin.model = Findings(), _training_copy(function.model, names)
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
