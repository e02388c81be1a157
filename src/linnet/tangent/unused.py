"""Parameters that the outputs do not depend on, and whether they do in training mode.

Layers that merge low-rank updates into a weight in ``eval()``, or keep a computed weight from one pass to the
next, are another function of their parameters there: derivatives vanish that training has.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable

import torch
from torch import nn

from linnet.errors import LinnetError, ModelError
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.functional import FAILURES, Functional
from linnet.tangent.modes import alone, in_exact_mode

UNUSED = "unused"  # what a cache calls them
REMEDY = (
    "compute the weight in every pass: merge_weights=False for loralib, model.unmerge_adapter() for peft, no "
    "cache in eval(); or leave these parameters out with params="
)
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
        owner = moving[0].rpartition(".")[0]
        kind = type(function.model.get_submodule(owner)).__name__
        raise ModelError(
            f"model ({type(function.model).__name__}) depends on {len(moving)} selected parameter(s), first "
            f"{moving[0]!r} of a {kind}, in training mode alone, and is linearized in evaluation mode",
            expected="the same function of the weights in both modes",
            remedy=REMEDY,
        )
    function.cache[UNUSED] = (*function.cache[UNUSED], *unused)
    warnings.warn(unused_remark(function), stacklevel=2)


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
    twin = copy.copy(function)
    twin.cache, twin.model = {}, _training_copy(function.model, names)
    devices = [function.device] if function.device.type == "cuda" else []
    leaves = {name: twin.theta[name].requires_grad_() for name in names}
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            value = twin.flat(leaves, few)
            if not value.requires_grad:
                return []
            grads = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    except (LinnetError, *FAILURES):  # a network that cannot be trained on two examples says nothing
        return []
    return [name for name, g in zip(names, grads, strict=True) if g is not None and bool(g.any())]


def _training_copy(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """A copy in training mode, dropout and batch statistics apart, that shares what it does not write to."""
    own: set[int] = set()
    for path, module in model.named_modules():
        inside = any(name.rpartition(".")[0] == path for name in names)
        if inside or type(module).train is not nn.Module.train:  # what merges writes to the weights below it
            own |= {id(p) for p in module.parameters()}
    with alone():
        clone = copy.deepcopy(model, {id(p): p for p in model.parameters() if id(p) not in own})
    clone.train()
    for module in clone.modules():
        if isinstance(module, _SWITCHED) or "drop" in type(module).__name__.lower():
            module.training = False
    return clone
