"""Likelihoods: distributions of labels given outputs, and their curvature."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from linnet.errors import InputError
from linnet.likelihoods.custom import Custom, mixture_of_classifiers
from linnet.likelihoods.discrete import Bernoulli, Categorical, Poisson
from linnet.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.params import instance, known, shown

__all__ = [
    "Likelihood",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Categorical",
    "Bernoulli",
    "Poisson",
    "Custom",
    "mixture_of_classifiers",
    "from_description",
]

_FAMILIES: tuple[type[Likelihood], ...] = (
    Gaussian, HeteroscedasticGaussian, Categorical, Bernoulli, Poisson,
)  # fmt: skip


def from_description(description: dict[str, Any]) -> Likelihood:
    """The likelihood of a description that ``describe`` returned.

    Args:
        description: What ``describe`` returned.

    Returns:
        A likelihood of the same kind and settings.

    Raises:
        InputError: The kind is unknown, or Custom, whose functions are not in its description.

    Example:
        >>> from_description(Categorical(axis=-1).describe())
        Categorical(ignore_index=-100, axis=-1)
    """
    instance("description", description, Mapping, "what describe() returned", "pass likelihood.describe()")
    settings = dict(description)
    kind = settings.pop("kind", None)
    for family in _FAMILIES:
        if family.__name__ == kind:
            known(family.__name__, list(settings), list(inspect.signature(family).parameters))
            return family(**settings)
    raise InputError(
        f"the description has kind {shown(kind)}",
        expected=f"one of {', '.join(family.__name__ for family in _FAMILIES)}",
        remedy="make a Custom likelihood again from its functions",
    )
