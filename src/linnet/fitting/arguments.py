"""Argument checks shared by several methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from linnet.distributed import all_rows
from linnet.errors import InputError
from linnet.params import number, positive_numbers, refuse, tensor
from linnet.tangent.batch import Inputs, batch_size, own_parts, split, take
from linnet.tangent.data import examples
from linnet.tangent.functional import Functional
from linnet.tangent.linearized import Linearized
from linnet.tree import node

CRITERIA = ("loo", "gcv", "evidence")


def check_ridge(ridge: Any) -> None:
    """Raise unless a ridge is a finite positive number or the name of a criterion."""
    if isinstance(ridge, str) and ridge not in CRITERIA:
        known = ", ".join(f'"{one}"' for one in CRITERIA)
        refuse("ridge", ridge, f"a positive number or one of {known}", 'pass ridge="loo" to choose it')
    if not isinstance(ridge, str):
        number("ridge", ridge, above=0, remedy='pass ridge="loo" to choose it')


def ridge_grid(ridges: Any) -> Tensor:
    """Ridges given by the user, (R,)."""
    remedy = "leave ridges= out for a grid around the scale of the kernel"
    found = positive_numbers("ridges", ridges, "positive numbers", remedy)
    return found.to(torch.float64, copy=True).flatten()


def positions(indices: Any, n: int, leave: int = 1) -> Tensor:
    """Distinct positions in a training set, of which at least one example is left, (k,)."""
    index = tensor(
        "indices", indices, "integer positions in the training data", "pass a list or tensor of integers"
    ).flatten()
    if index.numel() and (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool):
        raise InputError(
            f"indices have type {index.dtype}",
            expected="integer positions in the training data",
            remedy="pass mask.nonzero() for a mask, or indices.long()",
        )
    index = index.long()
    wrong = (index < 0) | (index >= n)
    if wrong.any():
        raise InputError(
            f"indices holds {int(index[wrong][0])}",
            expected=f"positions 0 to {n - 1} in the training data",
            remedy="positions count from 0 in the data that this very fit was made on",
        )
    places, counts = index.unique(return_counts=True)
    if places.numel() != index.numel():
        raise InputError(
            f"indices names an example twice: {int(places[counts > 1][0])}",
            expected="each example once",
            remedy="pass sorted(set(indices))",
        )
    if index.numel() > n - leave:
        raise InputError(
            f"indices names all {n} examples",
            expected="at least one example left to fit",
            remedy="use the original network, without a fit",
        )
    return index


# -- record ----------------------------------------------------------------------------------------
# Metadata of a fit: size, solver, ridge and reasons.


@node()
@dataclass(frozen=True)
class Choices:
    """Choices of a fit, their reasons and costs."""

    solver: str  # ``"dual"``, ``"primal"``, ``"cg"`` or ``"sgd"``
    criterion: str  # how the ridge was chosen: ``"given"``, ``"loo"``, ``"gcv"`` or ``"evidence"``
    reasons: dict[str, str] = field(default_factory=dict)  # one sentence for each choice
    warnings: tuple[str, ...] = ()  # what a reader of the numbers must know
    seconds: dict[str, float] = field(default_factory=dict)  # time of each step
    classes: tuple[str, ...] = ()  # names of the classes in the order of the outputs, where y was text
    columns: tuple[str, ...] = ()  # names of the inputs, where x was a data frame
    noise_factor: float = 1.0  # by what σ² was raised since the ridge was chosen by the same data


# -- evaluation ------------------------------------------------------------------------------------
# Input checks and batched evaluation shared by all fits.

BATCH = 128  # examples predicted at once


def checked_inputs(module: Any, x: Inputs, name: str = "x") -> Inputs:
    """Examples that the network runs on, or an error."""
    x = examples(module.function, x, name)
    module.function.check_runs(take(x, slice(0, 1)))
    return x


@torch.no_grad()
def whole_outputs(function: Functional, x: Inputs) -> Tensor:
    """f₀(x) in the network's own shape, batch by batch; each process of several has its share of them."""
    parts = [function.check_runs(part) for _, part in own_parts(x, BATCH)]
    return all_rows(torch.cat(parts or [function.check_runs(take(x, slice(0, 1)))[:0]]), batch_size(x))


def base_outputs(module: Linearized, x: Inputs) -> Tensor:
    """f₀(x), (N, C)."""
    return whole_outputs(module.function, x).flatten(1)


@torch.no_grad()
def linear_outputs(module: Linearized, x: Inputs) -> Tensor:
    """f₀(x) + J(x)δ of examples that were checked, batch by batch."""
    parts = [module(part) for part in split(x, BATCH)]
    return torch.cat([part.reshape(part.shape[0], -1) for part in parts])


def count_in_words(n: int) -> str:
    """A number of examples in words."""
    return f"{n} example" if n == 1 else f"{n} examples"
