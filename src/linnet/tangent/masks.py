"""Entries of parameters that stay as they are: masks given with ``params=``, and hooks that zero gradients.

A mask is kept beside its parameter, in a buffer of the module that no ``state_dict`` shows, so that every
copy of the network has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from linnet.errors import InputError, ModelError
from linnet.params import shown, tensor

PREFIX = "_linnet_mask_"  # of the names of such buffers
TINY = 1e-3  # what hooks are tried with: clipping leaves such gradients as they are
REMEDY = "remove the hook (handle.remove()) for linnet, and name the entries that vary: params={{{!r}: mask}}"


def given_mask(name: str, value: Any, p: nn.Parameter) -> Tensor | None:
    """The entries of a parameter that vary, from a value of ``params=``."""
    if value is None or value is True:
        return None
    label, expected = f"params[{name!r}]", f"True, or True and False of shape {tuple(p.shape)}"
    found = tensor(label, value, expected, "pass a boolean tensor: True for what may move")
    if found.dtype != torch.bool:
        raise InputError(
            f"{label} is {shown(value)}", expected=expected, remedy="pass mask.bool(): True for what may move"
        )
    try:
        mask = found.to(p.device).expand(p.shape)
    except RuntimeError as error:
        raise InputError(
            f"{label} is {shown(value)}",
            expected=expected,
            remedy="give it the parameter's shape, or an axis of length one",
        ) from error
    if not bool(mask.any()):
        raise InputError(f"{label} lets no entry move", expected=expected, remedy="leave the parameter out")
    return None if bool(mask.all()) else mask.clone()


def hooked_mask(name: str, p: nn.Parameter) -> Tensor | None:
    """The entries of a parameter whose gradient its hooks leave as it is, where they zero the others."""
    before = list((p._backward_hooks or {}).values())
    after = list((getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())
    if not before and not after:
        return None
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p) + 0.5
    tried = [_hooked(name, p, g, before, after) / TINY for g in (torch.full_like(p, TINY), TINY * noise)]
    mask = tried[0] > 0.5
    expected = mask.to(p), mask * noise
    if not all(torch.allclose(a, b, rtol=1e-2, atol=0) for a, b in zip(tried, expected, strict=True)):
        _refuse_hook(name, "changes gradients in another way than by zeroing entries")
    if not bool(mask.any()):
        _refuse_hook(name, "zeroes the whole gradient")
    return None if bool(mask.all()) else mask


def _hooked(name: str, p: nn.Parameter, g: Tensor, before: Iterable[Any], after: Iterable[Any]) -> Tensor:
    """What the hooks make of a gradient."""
    own = nn.Parameter(p.detach().clone())
    try:
        with torch.no_grad():
            for hook in before:
                found = hook(g.clone())
                g = g if found is None else found
            own.grad = g.clone()
            for hook in after:
                hook(own)
    except Exception as error:  # whatever the user's code raises
        _refuse_hook(name, f"cannot be tried ({type(error).__name__}: {error})", error)
    if own.grad is None or own.grad.shape != p.shape or not torch.equal(own, p):
        _refuse_hook(name, "takes the gradient away or changes the parameter")
    return own.grad


def _refuse_hook(name: str, does: str, cause: Exception | None = None) -> NoReturn:
    """Raise the error of a hook that is no mask."""
    raise ModelError(
        f"parameter {name!r} has a hook that {does}; derivatives are taken without hooks",
        expected="no hooks on parameters that vary, or hooks that zero some entries of the gradient",
        remedy=REMEDY.format(name),
    ) from cause


def set_masks(model: nn.Module, masks: Mapping[str, Tensor | None]) -> None:
    """Keep masks beside the parameters of a network."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, mask in masks.items():
        owner, _, leaf = name.rpartition(".")
        module = modules[owner]
        if mask is not None:
            module.register_buffer(PREFIX + leaf, mask, persistent=False)
        elif PREFIX + leaf in module._buffers:
            del module._buffers[PREFIX + leaf]


def masks_of(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """The masks that are kept beside parameters."""
    found, modules = {}, dict(model.named_modules(remove_duplicate=False))
    for name in names:
        owner, _, leaf = name.rpartition(".")
        mask = getattr(modules[owner], PREFIX + leaf, None)  # TorchScript has buffers of another kind
        if mask is not None:
            found[name] = mask
    return found
