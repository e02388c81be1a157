"""The running curvature average of the Gauss-Newton optimizer, by structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from linnet.curvatures.running import RunningCurvature
from linnet.curvatures.running_recursion import RunningRecursion
from linnet.curvatures.treatments import ALIASES, Structure, resolve
from linnet.distributed import agree
from linnet.errors import InputError
from linnet.likelihoods.likelihood import Likelihood
from linnet.optim.gauss_newton_settings import Settings
from linnet.params import instance
from linnet.tangent.functional import Functional

Average = RunningCurvature | RunningRecursion


def average_of(
    function: Functional,
    likelihood: Likelihood,
    structure: Structure,
    expectation: str | None,
    settings: Settings,
) -> Average:
    """An empty average.

    Args:
        function: The network.
        likelihood: What its outputs mean.
        structure: As in :func:`linnet.curvature`.
        expectation: As there, or ``None``.
        settings: Of the optimizer.

    Returns:
        The average that fits the structure.
    """
    structure, expectation = running_arguments(structure, expectation)
    if structure == "kfra":
        return RunningRecursion(function, likelihood, settings.average, settings.seed)
    return RunningCurvature(
        function, likelihood, structure, expectation, settings.sharing, settings.average, settings.seed
    )


def require_alike(running: Average, settings: Settings, others: Any) -> None:
    """Raise on all processes of ``torch.distributed`` unless their optimizers were made alike.

    Args:
        running: The average.
        settings: Of the optimizer.
        others: What else must be equal.

    Raises:
        InputError: If not; what differs is named.
    """
    e, structure = running.expectation, getattr(running, "structure", "kfra")
    alike = settings._replace(params=None, output=None, examples=None)  # of each process, or told by names
    found = {
        "structure": structure,
        "expectation": e.kind,
        "likelihood": f"{type(e.likelihood).__name__} {e.likelihood.describe()}",
        "the trained parameters": ", ".join(running.function.names),
        "settings": alike,
        "damping, lr, weight_decay or steps": others,
    }
    agree(InputError, found, "make the optimizer with the same arguments on all processes")


def running_arguments(structure: Structure, expectation: str | None) -> tuple[Structure, str]:
    """Structure and expectation in the engine's words, with the optimizer's default of the latter.

    Args:
        structure: As in :func:`linnet.curvature`.
        expectation: As there; by default ``"exact"`` for "block" and "full", what a name such as "kflr"
            says, and else ``"mc"``, whose cost does not grow with the number of outputs.

    Returns:
        Both.

    Raises:
        InputError: If they are unknown or do not go together.

    Example:
        >>> running_arguments("kfac", None), running_arguments("kflr", None)
        (('kfac', 'mc'), ('kfac', 'exact'))
    """
    if not isinstance(structure, str | Mapping):
        raise InputError(
            f"structure={structure!r}", expected="a structure, or a mapping of them", remedy='pass "kfac"'
        )
    if expectation is not None:
        instance("expectation", expectation, str, "a word, as linnet.curvature takes it")
    if not isinstance(structure, str):
        return structure, "mc" if expectation is None else expectation
    named = ALIASES.get(structure.lower(), (structure, None))[1]
    name, implied = resolve(structure, "exact" if expectation is None else expectation)
    if name == "kfra":
        implied = "recursion"
    elif implied == "recursion":
        raise InputError(
            f"expectation='recursion' with structure={structure!r}",
            expected='structure="kfra"',
            remedy="leave expectation= out",
        )
    if expectation is None and named is None and name not in ("full", "block", "kfra"):
        implied = "mc"
    return name, implied
