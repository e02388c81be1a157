"""Parameter selection: ``params=`` by keyword, name, regex, module, predicate or masks.

Entries of parameters stay as they are by masks given with ``params=``, and by hooks that zero gradients.
A mask is kept beside its parameter, in a buffer of the module that no ``state_dict`` shows, so that every
copy of the network has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from linnet.errors import InputError, ModelError
from linnet.params import call, instance, refuse, shown, tensor
from linnet.shown import some

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


BESIDE = (".modules_to_save.", ".trainable_tokens_")  # in the names of what peft trains beside LoRA
Selector = str | Sequence[str] | Mapping[str, Any] | nn.Module | Callable[[str, nn.Parameter], bool] | None


def require_module(model: Any) -> nn.Module:
    """Raise unless it is a network."""
    return instance("model", model, nn.Module, "a torch.nn.Module", "pass the network itself")


def select_parameters(model: nn.Module, params: Selector = None) -> list[str]:
    r"""Names of the selected floating-point parameters, in the order of ``named_parameters()``."""
    require_module(model)
    check_selector(params, some=False)  # the error below has the names
    named = {n: p for n, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
    if not named:
        raise ModelError(
            f"model ({type(model).__name__}) has no floating-point parameter",
            expected="a network with weights to linearize in",
            remedy="pass the network that holds the weights",
        )
    chosen = {n for n in _chosen(model, named, params) if is_lazy(named[n]) or named[n].numel()}
    if not chosen:
        merged = "an adapter that was merged or unloaded has none left: pass the network before that; "
        if hasattr(model, "peft_config"):  # of another kind
            merged = "leave params= out for all that peft trains; "
        raise InputError(
            f"params={params!r} selects none of the {len(named)} parameters",
            expected="at least one parameter",
            remedy=f"{merged if params == 'lora' else ''}the names are: {_quoted(named)}",
        )
    for name in chosen:
        if named[name].is_complex():
            raise ModelError(
                f"parameter {name!r} is complex ({named[name].dtype})",
                expected="real parameters",
                remedy="leave it out with params=, or store its real and imaginary parts",
            )
    return [name for name in named if name in chosen]


def owner(name: str) -> str:
    """The layer that a parameter belongs to."""
    layer, parametrized, _ = f".{name}".partition(".parametrizations.")
    return (layer if parametrized else layer.rpartition(".")[0]).removeprefix(".")


def selected(model: nn.Module, params: Selector = None) -> dict[str, Tensor | None]:
    """The selected parameters with the entries that vary."""
    names = select_parameters(model, params)
    every, first = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_parameters())
    kept, found = masks_of(model, names), dict[str, Tensor | None]()
    given = {}
    if isinstance(params, Mapping):
        own = {id(p): n for n, p in first.items()}
        given = {own[id(every[n])]: given_mask(n, value, every[n]) for n, value in params.items()}
    for name in names:
        masks = [given.get(name), kept.get(name), hooked_mask(name, first[name])]
        there = [mask for mask in masks if mask is not None]
        found[name] = torch.stack([mask.to(there[0].device) for mask in there]).all(0) if there else None
    return found


def require_no_masks(model: nn.Module, params: Selector) -> None:
    """Raise where ``params=`` has masks: what trains the network's own parameters takes them whole."""
    every = dict(require_module(model).named_parameters(remove_duplicate=False))
    given = params if isinstance(params, Mapping) else {}
    for name in given:
        if name in every and given_mask(name, given[name], every[name]) is not None:
            raise InputError(
                f"params[{name!r}] is a mask of entries",
                expected="parameters as a whole, which are trained in place",
                remedy="pass True and no weight decay, and call p.register_hook(lambda g: g * mask)",
            )


def check_selector(params: Any, some: bool = True) -> None:
    """Raise unless it can say which parameters take part, and some, before there is a network to ask."""
    several = isinstance(params, list | tuple | Mapping)
    names = several and len(params) >= some and all(isinstance(n, str) for n in params)
    predicate = callable(params) and not isinstance(params, type)
    if not (params is None or isinstance(params, str | nn.Module) or names or predicate):
        expected = "a keyword, regular expression, list of names, dict of masks, module or predicate"
        refuse("params", params, expected, 'pass params="all" for every parameter')


def _chosen(model: nn.Module, named: dict[str, nn.Parameter], params: Selector) -> set[str]:
    """The selected names as a set."""
    if params is None:
        return {n for n, p in named.items() if p.requires_grad} or set(named)
    if isinstance(params, str):
        return _by_keyword(model, named, params)
    if isinstance(params, nn.Module):
        inside = {id(p) for p in params.parameters()}
        return {n for n, p in named.items() if id(p) in inside}
    if callable(params):
        expected = "a predicate of a name and a parameter"
        return {n for n, p in named.items() if call("params", params, n, p, expected=expected)}
    if isinstance(params, Mapping):
        return _by_name(model, named, list(params))
    return _by_name(model, named, params)


def _by_keyword(model: nn.Module, named: dict[str, nn.Parameter], word: str) -> set[str]:
    """A keyword, or else a regular expression."""
    word_ = word.replace("_", "-")
    if word_ == "all":
        return set(named)
    if word_ in ("bias", "biases"):
        return {n for n in named if n.split(".")[-1].endswith("bias")}
    if word_ == "lora":
        matrices = {n for n in named if "lora" in n.lower()}
        beside = {n for n in named if any(part in n for part in BESIDE)}  # what peft trains with them
        return matrices | beside | _biases(model, matrices, named) if matrices else set()
    if word_ == "last-layer":
        return _last_layer(model, named)
    try:
        pattern = re.compile(word)
    except re.error as error:
        raise InputError(
            f"params={word!r} is no regular expression: {error}",
            expected="a keyword or a regular expression",
            remedy="pass a list of names to have them taken literally",
        ) from error
    return {n for n in named if pattern.search(n)}


def _biases(model: nn.Module, matrices: Iterable[str], named: Iterable[str]) -> set[str]:
    """The biases that peft trains beside an adapter, as its configuration says."""
    known = [own for m in model.modules() if isinstance(own := getattr(m, "peft_config", None), Mapping)]
    words = {getattr(config, "bias", "none") for own in known for config in own.values()}
    layers = {n.partition(".lora_")[0] for n in matrices}
    found = {n for n in named if n.rpartition(".")[2] == "bias"}
    if "lora_only" in words and "all" not in words:
        return {n for n in found if owner(n).removesuffix(".base_layer") in layers}
    return found if "all" in words else set()


def _last_layer(model: nn.Module, named: dict[str, nn.Parameter]) -> set[str]:
    """Parameters of the module that owns the last parameter with two or more axes, and that module's bias."""
    matrices = [n for n, p in named.items() if p.ndim >= 2]
    if not matrices:
        return set()
    every = dict(model.named_parameters(remove_duplicate=False))
    last = next(n for n in reversed(every) if every[n].ndim >= 2 and every[n].is_floating_point())
    if last not in named:
        first = next(n for n, p in named.items() if p is every[last])
        raise InputError(
            f"params='last-layer', but {last!r}, the last matrix, is the same parameter as {first!r}",
            expected="a last layer with its own parameters",
            remedy=f"name the parameters, for example params=[{first!r}], or untie them",
        )
    return {n for n in named if owner(n) == owner(matrices[-1])}


def _by_name(model: nn.Module, named: dict[str, nn.Parameter], names: Sequence[str]) -> set[str]:
    """Exact names; the second name of a tied parameter stands for its first."""
    first = {id(p): n for n, p in named.items()}
    every: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    missing = [n for n in names if n not in every or id(every[n]) not in first]
    if missing:
        raise InputError(
            f"params names {_quoted(missing)}, not among the floating-point parameters",
            expected=f"names such as {_quoted(named)}",
            remedy="see dict(model.named_parameters()) for all of them",
        )
    return {first[id(every[n])] for n in names}


def _quoted(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    return some(list(map(repr, names)))
