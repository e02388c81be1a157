"""The fine-tuning recipes by name: their parts and search grids."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from linnet.errors import InputError
from linnet.finetuning.augment import Augmentation
from linnet.fitting.arguments import check_positive
from linnet.params import choice, instance

BATCH_SIZE = 28  # Achille et al., section A.2
MOMENTUM = 0.9
RATE = 0.01  # of a preconditioned linear model, the upper of the two values of section 4
EFFECTIVE_RATE = RATE / ((1 - MOMENTUM) * BATCH_SIZE)  # η / ((1 − m) b), section 4.7
WEIGHT_DECAY = 1e-5
ADAM_RATE = 1e-3
PLAIN_RATE = 0.01
PRECONDITIONERS = ("kfac", "ekfac", "diagonal", "block", "none")
TUNED = ("learning_rate", "weight_decay", "batch_size", "augmentation")


@dataclass(frozen=True)
class Recipe:
    """The parts of a method.

    Args:
        linear: Whether the network is linearized.
        last_layer: Whether only the last layer is trained.
        leaky: Whether ReLU becomes Leaky ReLU.
        loss: ``"squared"`` or ``"cross-entropy"``.
        preconditioner: The curvature's structure, or ``"none"``.
        bilinear: Whether the last pooling becomes square-root bilinear pooling.
        optimizer: ``"sgd"`` or ``"adam"``.
    """

    linear: bool
    last_layer: bool
    leaky: bool
    loss: str
    preconditioner: str
    bilinear: bool = False
    optimizer: str = "sgd"


RECIPES: dict[str, Recipe] = {
    "lqf": Recipe(True, False, True, "squared", "kfac"),
    "lqf-fc": Recipe(True, True, True, "squared", "kfac"),
    "gaf": Recipe(True, False, False, "cross-entropy", "none"),
    "fc": Recipe(True, True, False, "cross-entropy", "none"),
    "nlft": Recipe(False, False, False, "cross-entropy", "none"),
    "b-lqf": Recipe(True, False, True, "squared", "kfac", bilinear=True),
}


def recipe_for(
    method: str, loss: str | None, activation: str | None, preconditioner: str | None, optimizer: str | None
) -> Recipe:
    """A method's recipe with some of its parts changed.

    Args:
        method: The method.
        loss: Its loss, to replace.
        activation: ``"leaky-relu"`` or ``"relu"`` (no surgery).
        preconditioner: The structure of the curvature, or ``"none"``.
        optimizer: ``"sgd"`` or ``"adam"``; Adam goes without a preconditioner unless one is named.

    Returns:
        The recipe.

    Raises:
        InputError: If a word is not listed, or the parts do not go together.

    Example:
        >>> recipe_for("lqf", None, "relu", None, "adam").preconditioner
        'none'
    """
    choice("method", method, tuple(RECIPES), 'pass method="lqf" if unsure')
    for name, word, known in (
        ("loss", loss, ("squared", "cross-entropy")),
        ("activation", activation, ("leaky-relu", "relu")),
        ("preconditioner", preconditioner, PRECONDITIONERS),
        ("optimizer", optimizer, ("sgd", "adam")),
    ):
        if word is not None and word not in known:
            raise InputError(
                f"{name}={word!r}",
                expected=", ".join(f'"{one}"' for one in known),
                remedy=f"leave {name}= out for what {method} uses",
            )
    base = RECIPES[method]
    if preconditioner not in (None, "none") and not base.linear:
        raise InputError(
            f'preconditioner={preconditioner!r} with method="{method}"',
            expected="a linear model, whose curvature does not change while it is trained",
            remedy="put a KroneckerPreconditioner before your own optimizer and refresh it as you train",
        )
    by_adam = "none" if optimizer == "adam" else base.preconditioner
    return replace(
        base,
        loss=loss or base.loss,
        leaky=base.leaky if activation is None else activation == "leaky-relu",
        preconditioner=preconditioner or by_adam,
        optimizer=optimizer or base.optimizer,
    )


@dataclass(frozen=True)
class Candidate:
    """Values that are tried together.

    Args:
        learning_rate: η; ``None`` for the recipe's own.
        weight_decay: λ.
        batch_size: b.
        augmentation: What is done to training images.

    Raises:
        InputError: If a value does not work.
    """

    learning_rate: float | None
    weight_decay: float
    batch_size: int
    augmentation: Augmentation

    def __post_init__(self) -> None:
        b, decay = self.batch_size, self.weight_decay
        if isinstance(b, bool) or not isinstance(b, int) or b < 1:
            raise InputError(f"batch_size={b!r}", expected="a positive integer", remedy="leave it out for 28")
        if self.learning_rate is not None:
            check_positive("learning_rate", self.learning_rate, "leave learning_rate= out")
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < math.inf:
            raise InputError(
                f"weight_decay={decay!r}",
                expected="a number, zero or positive",
                remedy="leave it out for 1e-5",
            )


def candidates_for(
    search: str | Mapping[str, Sequence[Any]] | None, recipe: Recipe, first: Candidate
) -> list[Candidate]:
    """All values to try.

    ``"paper"`` is the grid of Achille et al. (2021), A.2: for SGD η ∈ {0.01, 0.001}, λ ∈ {1e-4, 1e-5}; Adam
    η ∈ {0.001, 0.0004, 0.0001}, λ ∈ {1e-5, 1e-6}; with center and with random crops of images; resized crops
    at η = 0.001, λ = 1e-5 only. ``"wide"`` is that of its study of learning rates: η ∈ {0.05, 0.01, 0.005,
    0.001, 0.0001}, b ∈ {16, 32, 64}, λ ∈ {1e-5, 1e-4, 5e-4}.

    Args:
        search: A grid by name, or values by name; ``None`` for ``first`` alone.
        recipe: The recipe.
        first: The values where the search has none.

    Returns:
        The candidates.

    Raises:
        InputError: If a grid or a name is unknown, or a list is empty.

    Source:
        Achille et al., CVPR 2021, section A.2.
    """
    if search is None:
        return [first]
    if isinstance(search, str):
        if search not in ("paper", "wide"):
            raise InputError(
                f"search={search!r}",
                expected='"paper", "wide", or lists of values by name',
                remedy='pass search={"learning_rate": [0.01, 0.001]}',
            )
        return _wide(first) if search == "wide" else _paper(recipe, first)
    by_name = "lists of values by name"
    instance("search", search, Mapping, by_name, 'pass search={"learning_rate": [0.01, 0.001]}')
    unknown = [name for name in search if name not in TUNED]
    empty = [name for name, values in search.items() if not _lists(values)]
    if unknown or empty:
        raise InputError(
            f"search has {unknown + empty} without values to try",
            expected=f"lists of values by name, among {', '.join(TUNED)}",
            remedy='pass search={"learning_rate": [0.01, 0.001]}',
        )
    lists = {name: [_as_value(name, v, first) for v in values] for name, values in search.items()}
    return [
        replace(first, **dict(zip(lists, values, strict=True)))
        for values in itertools.product(*lists.values())
    ]


def _lists(values: Any) -> bool:
    """Whether values can be tried one after the other."""
    return isinstance(values, Iterable) and not isinstance(values, str) and bool(list(values))


def _as_value(name: str, value: Any, first: Candidate) -> Any:
    """A value of a search; augmentations also by their kind."""
    if name == "augmentation" and isinstance(value, str):
        return replace(first.augmentation, kind=value)
    return value


def _paper(recipe: Recipe, first: Candidate) -> list[Candidate]:
    """The grid of section A.2; images are cropped where ``first`` says that they are images."""
    adam = recipe.optimizer == "adam"
    rates = (0.001, 0.0004, 0.0001) if adam else (0.01, 0.001)
    decays = (1e-5, 1e-6) if adam else (1e-4, 1e-5)
    kinds = ("none",) if first.augmentation.kind == "none" else ("center", "random-crop")
    found = [
        replace(
            first, learning_rate=rate, weight_decay=decay, augmentation=replace(first.augmentation, kind=kind)
        )
        for kind, rate, decay in itertools.product(kinds, rates, decays)
    ]
    if len(kinds) > 1:
        strong = replace(first.augmentation, kind="resized-crop")
        found.append(replace(first, learning_rate=0.001, weight_decay=1e-5, augmentation=strong))
    return found


def _wide(first: Candidate) -> list[Candidate]:
    """The grid of the study of effective learning rates."""
    return [
        replace(first, learning_rate=rate, batch_size=size, weight_decay=decay)
        for rate, size, decay in itertools.product(
            (0.05, 0.01, 0.005, 0.001, 0.0001), (16, 32, 64), (1e-5, 1e-4, 5e-4)
        )
    ]


def effective_rate(learning_rate: float, momentum: float, batch_size: int) -> float:
    """η / ((1 − m) b), what decides the outcome of SGD with momentum.

    Args:
        learning_rate: η.
        momentum: m.
        batch_size: b.

    Returns:
        The effective learning rate.

    Source:
        Achille et al., CVPR 2021, section 4.7.

    Example:
        >>> round(effective_rate(0.01, 0.9, 28), 5)
        0.00357
    """
    return learning_rate / ((1 - momentum) * batch_size)
