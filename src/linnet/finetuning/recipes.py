"""The recipes of fine-tuning by name: what each is made of, and the values that are tried with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from linnet.errors import InputError
from linnet.finetuning.augment import Augmentation
from linnet.finetuning.bilinear import Bilinear
from linnet.linear.targets import ALPHA
from linnet.params import choice, flag, instance, integer, number, optional, refuse_first

BATCH_SIZE = 28  # Achille et al., section A.2
MOMENTUM = 0.9
RATE = 0.01  # of a preconditioned linear model, the upper of the two values of section 4
EFFECTIVE_RATE = RATE / ((1 - MOMENTUM) * BATCH_SIZE)  # η / ((1 − m) b), section 4.7
WEIGHT_DECAY = 1e-5
ADAM_RATE = 1e-3
PLAIN_RATE = 0.01
SLOPE = 0.2  # of Leaky ReLU below zero
PRECONDITIONERS = ("kfac", "ekfac", "diagonal", "block", "none")
TUNED = ("learning_rate", "weight_decay", "batch_size", "augmentation")


@dataclass(frozen=True)
class _Parts:
    """The parts of a recipe."""

    linear: bool  # whether the network is linearized
    last_layer: bool  # whether only the last layer is trained
    activation: str  # ``"leaky-relu"`` or ``"relu"``
    loss: str  # ``"squared"`` or ``"cross-entropy"``
    preconditioner: str  # the curvature's structure, or ``"none"``


_PARTS: dict[str, _Parts] = {
    "lqf": _Parts(True, False, "leaky-relu", "squared", "kfac"),
    "lqf-fc": _Parts(True, True, "leaky-relu", "squared", "kfac"),
    "gaf": _Parts(True, False, "relu", "cross-entropy", "none"),
    "fc": _Parts(True, True, "relu", "cross-entropy", "none"),
    "nlft": _Parts(False, False, "relu", "cross-entropy", "none"),
    "b-lqf": _Parts(True, False, "leaky-relu", "squared", "kfac"),
}
RECIPES = tuple(_PARTS)
LOSSES = ("squared", "cross-entropy")
ACTIVATIONS = ("leaky-relu", "relu")
OPTIMIZERS = ("sgd", "adam")
OWN = "own"  # the word for a part as the recipe has it
HEADS = ("auto", "probe", "random", "zero", "keep")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe of fine-tuning by name, with parts of it changed.

    ========  ==========================================================================================
    lqf       Leaky ReLU, linearized, squared loss to α-scaled targets, K-FAC preconditioner estimated once
    lqf-fc    the same for the last layer alone
    gaf       linearized, cross-entropy, nothing else changed
    fc        the last layer alone, cross-entropy
    nlft      plain fine-tuning of all weights, cross-entropy
    b-lqf     lqf on square-root bilinear pooling of the last feature map
    ========  ==========================================================================================

    What is left out is as the recipe has it, and can be read from the object.

    Args:
        name: One of the table.
        loss: ``"squared"`` or ``"cross-entropy"``.
        scale: α of one-hot targets.
        activation: ``"leaky-relu"``, ``torch.nn.LeakyReLU(slope)`` for another slope than 0.2, or ``"relu"``
            (as it is; better for deep networks without normalization layers, or with them folded away,
            unless :func:`linnet.surgery.recover` trains them first).
        preconditioner: ``"kfac"``, ``"ekfac"``, ``"diagonal"``, ``"block"`` or ``"none"``.
        damping: τ added to the curvature of the mean loss before it is inverted; by default a tenth of its
            mean eigenvalue. The weight decay is added as well.
        optimizer: ``"sgd"`` or ``"adam"``; Adam goes without a preconditioner unless one is named.
        augmentation: ``"none"``, ``"center"``, ``"random-crop"``, ``"resized-crop"``, or an ``Augmentation``.
        head: ``"probe"``, ``"random"``, ``"zero"`` or ``"keep"``; ``"auto"`` keeps a head that
            ``linnet.with_head`` made with outputs for all classes, and fits a probe otherwise.
        pooling: Settings of bilinear pooling; with them any recipe but nlft pools as b-lqf does.
        training_mode: Whether BatchNorm uses the batch and dropout is on, for nlft.

    Raises:
        InputError: If a value does not work, or does not go with another.

    Source:
        Achille, Golatkar, Ravichandran, Polito, Soatto, CVPR 2021, sections 3, 4 and A.2; gaf: Mu, Liang, Li,
        ICLR 2020.

    Example:
        >>> Recipe("lqf", optimizer="adam").preconditioner
        'none'
    """

    name: str = field(default="lqf", kw_only=False)
    loss: str = OWN
    scale: float = ALPHA
    activation: str | nn.LeakyReLU = OWN
    preconditioner: str = OWN
    damping: float | None = None
    optimizer: str = "sgd"
    augmentation: str | Augmentation = "none"
    head: str = "auto"
    pooling: Bilinear | None = None
    training_mode: bool = False

    def __post_init__(self) -> None:
        choice("recipe", self.name, RECIPES, 'pass recipe="lqf" if in doubt')
        choice("optimizer", self.optimizer, OPTIMIZERS)
        base = _PARTS[self.name]
        by_adam = "none" if self.optimizer == "adam" else base.preconditioner
        self._fill("loss", base.loss, LOSSES)
        if isinstance(self.activation, nn.LeakyReLU):
            number("slope", self.activation.negative_slope, above=0, most=1, remedy="try nn.LeakyReLU(0.2)")
        else:
            self._fill("activation", base.activation, ACTIVATIONS)
        self._fill("preconditioner", by_adam, PRECONDITIONERS)
        object.__setattr__(self, "scale", number("scale", self.scale, above=0))
        choice("head", self.head, HEADS)
        flag("training_mode", self.training_mode)
        crop = self.augmentation
        crop = Augmentation(crop) if isinstance(crop, str) else crop
        instance("augmentation", crop, Augmentation, "a kind of augmentation, or an Augmentation")
        object.__setattr__(self, "augmentation", crop)
        if self.name == "b-lqf" and self.pooling is None:
            object.__setattr__(self, "pooling", Bilinear())
        self._check_together()

    def _fill(self, name: str, default: str, allowed: tuple[str, ...]) -> None:
        """A part as it is given, or the recipe's own."""
        found = getattr(self, name)
        taken = default if isinstance(found, str) and found == OWN else choice(name, found, allowed)
        object.__setattr__(self, name, taken)

    def _check_together(self) -> None:
        """Raise where a part would not be used, or could not."""
        optional(instance, "pooling", self.pooling, Bilinear, "a linnet.surgery.Bilinear")
        if self.damping is not None:
            number("damping", self.damping, above=0, remedy="leave it out for a tenth of the mean eigenvalue")
        whole = self.linear and not self.last_layer and self.head != "keep"
        table = (
            (
                self.pooling is not None and not whole,
                f"bilinear pooling with recipe={self.name!r} and head={self.head!r}",
                "a linear model of all layers, with a new head behind the pooling",
                'leave pooling= out, or pass Recipe("b-lqf")',
            ),
            (
                self.preconditioner != "none" and not self.linear,
                f'preconditioner={self.preconditioner!r} with recipe="{self.name}"',
                "a linear model, whose curvature does not change while it is trained",
                "put a KroneckerPreconditioner before your own optimizer and refresh it as you train",
            ),
            (
                self.training_mode and self.linear,
                "training_mode=True with a linear model",
                "BatchNorm with its running statistics: a linear model has no others",
                'leave training_mode= out, or pass Recipe("nlft")',
            ),
            (
                self.damping is not None and self.preconditioner == "none",
                f"damping={self.damping!r} without a preconditioner",
                "a recipe whose steps a curvature preconditions",
                'leave damping= out, or pass preconditioner="kfac"',
            ),
        )
        refuse_first(table)

    @property
    def linear(self) -> bool:
        """Whether the network is linearized."""
        return _PARTS[self.name].linear

    @property
    def last_layer(self) -> bool:
        """Whether only the last layer is trained."""
        return _PARTS[self.name].last_layer

    @property
    def leaky(self) -> bool:
        """Whether ReLU becomes Leaky ReLU."""
        return self.activation != "relu"

    @property
    def slope(self) -> float:
        """Slope of Leaky ReLU below zero."""
        given = self.activation
        return float(given.negative_slope) if isinstance(given, nn.LeakyReLU) else SLOPE

    @property
    def view(self) -> Augmentation:
        """Preprocessing of training images."""
        assert isinstance(self.augmentation, Augmentation)
        return self.augmentation


@dataclass(frozen=True)
class Trial:
    """Values that are tried together."""

    learning_rate: float | None  # η; ``None`` for the recipe's own
    weight_decay: float  # λ
    batch_size: int  # b
    augmentation: Augmentation  # what is done to training images

    def __post_init__(self) -> None:
        integer("batch_size", self.batch_size, remedy="leave it out for 28")
        if self.learning_rate is not None:
            number("learning_rate", self.learning_rate, above=0, remedy="leave it out for the recipe's own")
        number("weight_decay", self.weight_decay, least=0, remedy="leave it out for 1e-5")


def candidates_for(
    search: str | Mapping[str, Sequence[Any]] | None, recipe: Recipe, first: Trial
) -> list[Trial]:
    """All values to try."""
    # `"paper"` is the grid of Achille et al. (2021), A.2: for SGD η ∈ {0.01, 0.001}, λ ∈ {1e-4, 1e-5}; Adam η
    # ∈ {0.001, 0.0004, 0.0001}, λ ∈ {1e-5, 1e-6}; with center and with random crops of images; resized crops
    # at η = 0.001, λ = 1e-5 only. `"wide"` is that of its study of learning rates: η ∈ {0.05, 0.01, 0.005,
    # 0.001, 0.0001}, b ∈ {16, 32, 64}, λ ∈ {1e-5, 1e-4, 5e-4}.
    #
    # Source: Achille et al., CVPR 2021, section A.2.
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


def _as_value(name: str, value: Any, first: Trial) -> Any:
    """A value of a search; augmentations also by their kind."""
    if name == "augmentation" and isinstance(value, str):
        return replace(first.augmentation, kind=value)
    return value


def _paper(recipe: Recipe, first: Trial) -> list[Trial]:
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


def _wide(first: Trial) -> list[Trial]:
    """The grid of the study of effective learning rates."""
    return [
        replace(first, learning_rate=rate, batch_size=size, weight_decay=decay)
        for rate, size, decay in itertools.product(
            (0.05, 0.01, 0.005, 0.001, 0.0001), (16, 32, 64), (1e-5, 1e-4, 5e-4)
        )
    ]


def effective_rate(learning_rate: float, momentum: float, batch_size: int) -> float:
    """η / ((1 − m) b), what decides the outcome of SGD with momentum."""
    # Source: Achille et al., CVPR 2021, section 4.7.
    return learning_rate / ((1 - momentum) * batch_size)
