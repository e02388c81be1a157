"""Parameter space: the names and shapes behind a flat vector of P numbers.

A vector in parameter space is either ``Params``, a dict of tensors by parameter name, or a flat tensor
(P,) in the order of the names. K vectors at once are a flat (P, K), or Params whose tensors have one
more dimension ``(*shape, K)`` at the end. Everything that takes one kind returns the same kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.params import instance, refuse, shown, tensor
from linnet.tree import node

Params = dict[str, Tensor]
Vector = Params | Tensor


@node("shapes")
class ParameterSpace:
    """The parameters of a network as one vector space of dimension P."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        if not shapes:
            raise InputError("shapes is empty", "at least one parameter", "pass a shape for each name")
        for name, shape in shapes.items():
            if any(size < 0 for size in shape):
                raise InputError(f"shapes has {name!r} of shape {tuple(shape)}", "sizes from 0", "check it")
        self.names = tuple(shapes)
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        ends = list(accumulate((prod(shape) for shape in self.shapes.values()), initial=0))
        self.slices = {name: slice(*ends) for name, ends in zip(self.names, pairwise(ends), strict=True)}
        self.dim = ends[-1]

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> ParameterSpace:
        """The space that given parameters live in."""
        require_params(params, "params")
        return cls({name: tensor.shape for name, tensor in params.items()})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParameterSpace) and list(self.shapes.items()) == list(other.shapes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.shapes.items()))

    def __repr__(self) -> str:
        return f"ParameterSpace({len(self.names)} parameters, P = {self.dim})"

    def select(self, names: Iterable[str]) -> ParameterSpace:
        """The subspace of some parameters."""
        if isinstance(names, str | bytes | Tensor) or not isinstance(names, Iterable):
            refuse("names", names, "several parameter names", f"pass a list such as [{self.names[0]!r}]")
        listed = list(names)
        if wrong := [name for name in listed if not isinstance(name, str)]:
            refuse("names", listed, "several parameter names", f"{shown(wrong[0])} is no name")
        chosen = set(listed)
        if unknown := chosen - set(self.names):
            raise InputError(
                f"names has {_listed(unknown)}",
                expected=f"some of {_listed(self.names)}",
                remedy="see .names, which are those of named_parameters()",
            )
        return ParameterSpace({name: shape for name, shape in self.shapes.items() if name in chosen})

    def to_flat(self, vector: Vector) -> Tensor:
        """A vector as a flat tensor; a flat one is returned as it is, (P,)."""
        if isinstance(vector, Tensor):
            return self._checked(vector)
        self._check_params(vector)
        first = self.names[0]
        columns = vector[first].shape[len(self.shapes[first]) :]  # () or (K,)
        parts = [vector[name].reshape(shape.numel(), *columns) for name, shape in self.shapes.items()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def to_params(self, vector: Vector) -> Params:
        """A vector as tensors by name; those made from a flat tensor are views of it."""
        if not isinstance(vector, Tensor):
            self._check_params(vector)
            return vector
        columns = self._checked(vector).shape[1:]
        return {name: vector[rows].reshape(self.shapes[name] + columns) for name, rows in self.slices.items()}

    def in_kind(self, flat: Tensor, like: Vector) -> Vector:
        """A flat vector in the same kind as another one."""
        # flat (P,)
        if not isinstance(like, Tensor):
            require_params(like, "like")
        return flat if isinstance(like, Tensor) else self.to_params(flat)

    def _checked(self, flat: Tensor) -> Tensor:
        """The flat vector, if it fits."""
        tensor("the parameter vector", flat, f"a dense tensor ({self.dim},)", convert=False)
        if flat.ndim not in (1, 2) or flat.shape[0] != self.dim:
            raise InputError(
                f"the parameter vector has shape {tuple(flat.shape)}",
                expected=f"({self.dim},), ({self.dim}, K) or a dict with the {len(self.names)} parameters",
                remedy="make one with .to_flat(dict of parameters)",
            )
        return flat

    def _check_params(self, params: Mapping[str, Tensor]) -> None:
        """Names and shapes fit, and all tensors have the same number of columns."""
        require_params(params, "the parameter vector")
        missing, unknown = set(self.names) - set(params), set(params) - set(self.names)
        if missing or unknown:
            raise InputError(
                f"the parameter vector lacks {_listed(missing)} and has unknown {_listed(unknown)}",
                expected=f"exactly {_listed(self.names)}",
                remedy="the names are those of named_parameters()",
            )
        first = self.names[0]
        columns = params[first].shape[len(self.shapes[first]) :]
        for name, shape in self.shapes.items():
            if len(columns) > 1 or params[name].shape != shape + columns:
                raise InputError(
                    f"parameter {name!r} has shape {tuple(params[name].shape)}",
                    expected=f"{tuple(shape)}, or {(*shape, 'K')} for K vectors, with equal K",
                    remedy="give every parameter its own shape",
                )


def require_params(params: Any, name: str) -> None:
    """Raise unless it is a mapping from names to tensors that have values."""
    instance(name, params, Mapping, "tensors by parameter name, or a flat tensor", "pass a dict of tensors")
    for key, value in params.items():
        if not isinstance(key, str):
            refuse(name, params, "tensors by parameter name", f"{shown(key)} is no name")
        tensor(f"{name}[{key!r}]", value, "a dense tensor of real numbers", convert=False)


def _listed(names: Iterable[str]) -> str:
    """The first few names, quoted, for an error."""
    listed = [repr(name) for name in sorted(names)]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "") or "nothing"
