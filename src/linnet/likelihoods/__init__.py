"""Likelihoods: how labels depend on outputs, and the curvature that follows."""

from __future__ import annotations

from typing import Any

from linnet.errors import InputError
from linnet.likelihoods.custom import Custom, mixture_of_classifiers
from linnet.likelihoods.discrete import Bernoulli, Categorical, Poisson
from linnet.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from linnet.likelihoods.likelihood import Likelihood

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
    """The likelihood that ``describe`` described.

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
    settings = dict(description)
    kind = settings.pop("kind", None)
    for family in _FAMILIES:
        if family.__name__ == kind:
            return family(**settings)
    raise InputError(
        f"the description has kind {kind!r}",
        expected=f"one of {', '.join(family.__name__ for family in _FAMILIES)}",
        remedy="make a Custom likelihood again from its functions",
    )
