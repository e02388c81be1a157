"""Parameter selection: ``params=`` by keyword, name, regex, module or predicate."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import InputError, ModelError
from linnet.params import call, refuse
from linnet.tangent.masks import given_mask, hooked_mask, masks_of

Selector = str | Sequence[str] | Mapping[str, Any] | nn.Module | Callable[[str, nn.Parameter], bool] | None


def require_module(model: Any) -> nn.Module:
    """Raise unless it is a network."""
    if isinstance(model, nn.Module):
        return model
    raise InputError(
        f"model is {type(model).__name__}", expected="a torch.nn.Module", remedy="pass the network itself"
    )


def select_parameters(model: nn.Module, params: Selector = None) -> list[str]:
    r"""Names of the selected floating-point parameters, in the order of ``named_parameters()``."""
    require_module(model)
    named = {n: p for n, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
    if not named:
        raise ModelError(
            f"model ({type(model).__name__}) has no floating-point parameter",
            expected="a network with weights to linearize in",
            remedy="pass the network that holds the weights",
        )
    chosen = _chosen(model, named, params)
    if not chosen:
        raise InputError(
            f"params={params!r} selects none of the {len(named)} parameters",
            expected="at least one parameter",
            remedy=f"the names are: {_some(list(named))}",
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


def check_selector(params: Any) -> None:
    """Raise unless it can say which parameters take part, before there is a network to ask."""
    several = isinstance(params, list | tuple | Mapping)
    names = several and bool(params) and all(isinstance(n, str) for n in params)
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
    if callable(params) and not isinstance(params, type):
        expected = "a predicate of a name and a parameter"
        return {n for n, p in named.items() if call("params", params, n, p, expected=expected)}
    if isinstance(params, Mapping):
        return _by_name(model, named, list(params))
    if not isinstance(params, Sequence):
        raise InputError(
            f"params={params!r} is {type(params).__name__}",
            expected="a keyword, regular expression, list of names, module or predicate",
            remedy='pass params="all" for every parameter',
        )
    return _by_name(model, named, params)


def _by_keyword(model: nn.Module, named: dict[str, nn.Parameter], word: str) -> set[str]:
    """A keyword, or else a regular expression."""
    word_ = word.replace("_", "-")
    if word_ == "all":
        return set(named)
    if word_ in ("bias", "biases"):
        return {n for n in named if n.split(".")[-1].endswith("bias")}
    if word_ == "lora":
        return {n for n in named if "lora" in n.lower()}
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
    missing = [n for n in names if not isinstance(n, str) or n not in every or id(every[n]) not in first]
    if missing:
        raise InputError(
            f"params names {_some(missing)}, not among the floating-point parameters",
            expected=f"names such as {_some(list(named))}",
            remedy="see dict(model.named_parameters()) for all of them",
        )
    return {first[id(every[n])] for n in names}


def _some(names: Sequence[str], limit: int = 8) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - limit
    return ", ".join(map(repr, names[:limit])) + (f" and {more} more" if more > 0 else "")
