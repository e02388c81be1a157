"""Heads of a cross-fitted network: one for each fold of the examples, fitted without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.tangent.functional import Functional, tensors_by_name


@dataclass(frozen=True, eq=False)
class Folds:
    """K heads, the head fitted on everything, and the fold of every example."""

    layer: str  # name of the head
    whole: tuple[Tensor, Tensor]  # weight (C, D) and bias (C,) fitted on all examples
    heads: tuple[tuple[Tensor, Tensor], ...]  # the same without each fold
    members: Mapping[str, int]  # fold of an example, by its fingerprint

    @property
    def count(self) -> int:
        """K."""
        return len(self.heads)

    def fits(self, function: Functional) -> bool:
        """Whether a network still has the head that was fitted on everything."""
        tensors = tensors_by_name(function.model)
        found = [tensors.get(f"{self.layer}.{name}") for name in ("weight", "bias")]
        return all(
            a is not None and a.shape == b.shape and bool((a.cpu() == b.cpu()).all())
            for a, b in zip(found, self.whole, strict=True)
        )

    def without(self, function: Functional, fold: int) -> Functional:
        """The network with the head that has not seen a fold."""
        named = zip(("weight", "bias"), self.heads[fold], strict=True)
        mine = tensors_by_name(function.model)
        values = {}
        for name, value in named:
            for key in (f"{self.layer}.{name}", f"{self.layer}.{name}_origin"):  # origin: of a centered head
                if key in mine:
                    values[key] = value.to(mine[key])
        return function.moved(values)

    def of(self, examples: Sequence[str]) -> Tensor:
        """The fold of each example; those that no head has seen are dealt out in turn, (N,)."""
        unseen: dict[str, int] = {}
        found = []
        for example in examples:
            if example not in self.members:
                unseen.setdefault(example, len(unseen) % self.count)
            found.append(self.members.get(example, unseen.get(example, 0)))
        return torch.tensor(found, dtype=torch.long)


def deal(examples: Sequence[str], y: Tensor, count: Any, generator: torch.Generator | None = None) -> Tensor:
    """Deal examples to folds at random, each class evenly; equal examples go to one fold, (N,)."""
    # y (N,)
    distinct = list(dict.fromkeys(examples))
    good = isinstance(count, int) and not isinstance(count, bool) and 2 <= count <= len(distinct)
    if not good:
        raise InputError(
            f"cross_fit={count!r}",
            expected=f"a number of folds from 2 to {len(distinct)}, the different examples",
            remedy="pass cross_fit=5, or leave it out",
        )
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    first = {example: place for place, example in reversed(list(enumerate(examples)))}
    labels = torch.zeros(len(y), dtype=torch.long) if y.is_floating_point() else y.long().flatten().cpu()
    fold: dict[str, int] = {}
    for label in labels.unique().tolist():
        members = [example for example in distinct if int(labels[first[example]]) == label]
        for place in torch.randperm(len(members), generator=generator).tolist():
            fold[members[place]] = len(fold) % count
    return torch.tensor([fold[example] for example in examples], dtype=torch.long)
