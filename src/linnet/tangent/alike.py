"""Calls that processes share: opened on all of them, and refused unless all came with the same arguments."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from linnet.distributed import agree, current, sharing, world
from linnet.errors import DataError, InputError, LinnetError, ModelError
from linnet.number_types import current as precision_in_force
from linnet.tangent.batch import tensors_in
from linnet.tangent.functional import Functional, require_whole_weights
from linnet.tangent.hashing import hash_tensors
from linnet.tangent.linearized import Linearized

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


def require_alike(arguments: Mapping[str, Any]) -> None:
    """Raise on all processes unless all came to :func:`linnet.distributed.sharing` with the same arguments.

    Args:
        arguments: Networks, data and settings, by name.

    Raises:
        DataError: Examples differ.
        ModelError: Weights do.
        InputError: Other arguments do.

    Example:
        >>> require_alike({"ridge": 1.0})
    """
    if current().world == 1:
        return
    sorted_out: dict[type[LinnetError], dict[str, str]] = {kind: {} for kind in _KINDS}
    for name, value in {**arguments, "linnet.precision": precision_in_force()}.items():
        sorted_out[_kind(value)][name] = _described(value)
    for kind, remedy in _KINDS.items():
        agree(kind, sorted_out[kind], remedy)


def in_shares(what: str) -> Callable[[F], F]:
    """Decorate a call that processes make together with arguments that are alike.

    Args:
        what: The call, as a user writes it.

    Returns:
        The decorator.

    Example:
        >>> @in_shares("a sum")
        ... def total(x):
        ...     return x.sum()
        >>> total(torch.ones(2))
        tensor(2.)
    """

    def decorated(function: F) -> F:
        names = inspect.signature(function)

        @functools.wraps(function)
        def shared(*args: Any, **kwargs: Any) -> Any:
            if world()[1] == 1 or current().world > 1:
                return function(*args, **kwargs)
            arguments = names.bind(*args, **kwargs).arguments
            with sharing(what, _device(arguments)):
                require_alike(arguments)
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
    if isinstance(value, Linearized):
        value = value.function
    if isinstance(value, Functional):
        return f"{len(value.names)} parameters with the hash {value.fingerprint()[:_DIGITS]}"
    if isinstance(value, nn.Module):
        require_whole_weights(value)
        state = value.state_dict()
        held = [state[name] for name in sorted(state) if isinstance(state[name], Tensor)]
        return f"{type(value).__name__} with the hash {hash_tensors(held)[:_DIGITS]}"
    if tensors := tensors_in(value):
        sizes = ", ".join(str(tuple(t.shape)) for t in tensors)
        return f"{sizes} with the hash {hash_tensors(tensors)[:_DIGITS]}"
    if value is None or isinstance(value, bool | int | float | str | os.PathLike):
        return repr(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f"{f.name}={_described(getattr(value, f.name))}" for f in dataclasses.fields(value)]
        return f"{type(value).__name__}({', '.join(fields)})"
    return type(value).__name__


def _device(arguments: Mapping[str, Any]) -> torch.device:
    """Where the work is done: at the weights."""
    for value in arguments.values():
        if isinstance(value, Functional):
            return value.device
        if isinstance(value, nn.Module):
            first = next(value.parameters(), None)
            return torch.device("cpu") if first is None else first.device
    return next((t.device for value in arguments.values() for t in tensors_in(value)), torch.device("cpu"))
