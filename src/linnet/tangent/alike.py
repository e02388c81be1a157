"""Calls that processes share: opened on all of them, and refused unless all came with the same arguments."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from linnet.distributed import agree, current, sharing, world
from linnet.errors import DataError, InputError, LinnetError, ModelError
from linnet.likelihoods.likelihood import Distribution
from linnet.linalg.operator import LinearOperator
from linnet.number_types import current as precision_in_force
from linnet.tangent.functional import Functional, require_whole_weights
from linnet.tangent.linearized import Linearized
from linnet.tree import hash_tensors, leaves, parts, tensors_in

F = TypeVar("F", bound=Callable[..., Any])
_DIGITS = 12  # of a hash in an error
_KINDS: dict[type[LinnetError], str] = {
    ModelError: "load one state_dict on all processes; running statistics of BatchNorm differ after training "
    "with DistributedDataParallel, too: broadcast them",
    DataError: "pass all the data to every process, in one order: turn shuffling and augmentation off; for "
    "a call on one process alone, put linnet.distributed.apart() around it",
    InputError: "pass the same arguments on all processes; for a call on one process alone, put "
    "linnet.distributed.apart() around it",
}


def require_same_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise on all processes unless all came to ``linnet.distributed.sharing`` with the same arguments."""
    if current().world == 1:
        return
    sorted_out: dict[type[LinnetError], dict[str, str]] = {kind: {} for kind in _KINDS}
    for name, value in {**arguments, "linnet.precision": precision_in_force()}.items():
        sorted_out[_kind(value)][name] = _described(value)
    for kind, remedy in _KINDS.items():
        agree(kind, sorted_out[kind], remedy)


def shared_call(what: str) -> Callable[[F], F]:
    """Decorate a call that processes make together with arguments that are alike."""

    def decorated(function: F) -> F:
        names = inspect.signature(function)

        @functools.wraps(function)
        def shared(*args: Any, **kwargs: Any) -> Any:
            if world()[1] == 1 or current().world > 1:
                return function(*args, **kwargs)
            arguments = names.bind(*args, **kwargs).arguments
            with sharing(what, _device(arguments)):
                require_same_arguments(arguments)
                return function(*args, **kwargs)

        return shared  # type: ignore[return-value]

    return decorated


def _kind(value: Any) -> type[LinnetError]:
    """The error that a difference of this argument is."""
    if isinstance(value, nn.Module | Functional):
        return ModelError
    return DataError if tensors_in(value) else InputError


def _described(value: Any) -> str:
    """An argument in few words that differ if the argument does."""
    # Networks, tensors and matrices are told by hashes of their numbers, and so is an object of linnet that
    # says by `_compared` what it was made of. Of functions and other objects only the name is told.
    if isinstance(value, Linearized):
        value = value.function
    if isinstance(value, Functional):
        return f"{len(value.names)} parameters {_hashed(value.fingerprint())}"
    if isinstance(value, nn.Module):
        require_whole_weights(value)
        state = value.state_dict()
        tensors = [state[name] for name in sorted(state) if isinstance(state[name], Tensor)]
        return f"{type(value).__name__} {_hashed(hash_tensors(tensors))}"
    if isinstance(value, torch.Generator):
        return f"{type(value).__name__} {_hashed(hash_tensors([value.get_state()]))}"
    if (made_of := _made_of(value)) is not None:
        return f"{type(value).__name__} {_hashed(hashlib.sha256(_described(made_of).encode()).hexdigest())}"
    if isinstance(value, Tensor | Mapping | list | tuple) and _is_data(found := leaves(value)):
        sizes = ", ".join(str(tuple(t.shape)) for t in found)
        return f"{sizes} {_hashed(hash_tensors(found))}"
    if isinstance(value, Distribution):
        return repr(value)
    if value is None or isinstance(value, bool | int | float | str | os.PathLike):
        return repr(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if (held := parts(value)) is not None:
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(_described, value))}]"
        told = ", ".join(f"{name}={_described(part)}" for name, part in held.items())
        return f"{type(value).__name__}({told})"
    return str(getattr(value, "__qualname__", type(value).__name__))


def _is_data(found: list[Any]) -> bool:
    """Whether what containers hold are tensors alone."""
    return bool(found) and all(isinstance(leaf, Tensor) for leaf in found)


def _made_of(value: Any) -> Any:
    """What makes an object of linnet, or a matrix, what it is; ``None`` of anything else."""
    if hasattr(value, "_compared"):
        return value._compared()
    if not isinstance(value, LinearOperator):
        return None
    if (found := parts(value)) is None:  # a matrix of the user's own
        held = {name: part for name, part in vars(value).items() if isinstance(part, Tensor | LinearOperator)}
        found = {name: part for name, part in held.items() if not name.startswith("_")}
    return value.shape, found


def _hashed(digest: str) -> str:
    """The words for a hash, which the start of it is enough for."""
    return f"with the hash {digest[:_DIGITS]}"


def _device(arguments: Mapping[str, Any]) -> torch.device:
    """Where the work is done: at the weights."""
    for value in arguments.values():
        if isinstance(value, Functional):
            return value.device
        if isinstance(value, nn.Module):
            first = next(value.parameters(), None)
            return torch.device("cpu") if first is None else first.device
    return next((t.device for value in arguments.values() for t in tensors_in(value)), torch.device("cpu"))
