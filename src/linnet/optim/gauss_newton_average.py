"""The running curvature average of the Gauss-Newton optimizer, by structure."""

from __future__ import annotations

from typing import Any

from linnet.curvatures.running import RunningCurvature
from linnet.curvatures.running_recursion import RunningRecursion
from linnet.curvatures.settings import EXPECTATIONS
from linnet.curvatures.treatments import Structure, resolve
from linnet.distributed import agree
from linnet.errors import InputError
from linnet.likelihoods.likelihood import Likelihood
from linnet.optim.gauss_newton_settings import Settings
from linnet.params import choice
from linnet.tangent.functional import Functional

EXPECTATION = "mc"  # the optimizer's default: one backward pass a batch, however many outputs there are
Average = RunningCurvature | RunningRecursion


def average_of(
    function: Functional,
    likelihood: Likelihood,
    structure: Structure,
    expectation: str,
    settings: Settings,
) -> Average:
    """An empty average."""
    choice("expectation", expectation, EXPECTATIONS, 'pass "mc" if unsure')
    if structure == "kfra":
        resolve("kfra", expectation, default=EXPECTATION)
        return RunningRecursion(function, likelihood, settings.average, settings.seed)
    return RunningCurvature(
        function, likelihood, structure, expectation, settings.sharing, settings.average, settings.seed
    )


def require_alike(running: Average, settings: Settings, others: Any) -> None:
    """Raise on all processes of ``torch.distributed`` unless their optimizers were made alike."""
    e, structure = running.expectation, getattr(running, "structure", "kfra")
    # these are of each process, or told by names
    alike = settings._replace(params=None, output=None, examples=None, log=None)
    found = {
        "structure": structure,
        "expectation": e.kind,
        "likelihood": f"{type(e.likelihood).__name__} {e.likelihood.describe()}",
        "the trained parameters": ", ".join(running.function.names),
        "settings": alike,
        "damping, lr, weight_decay or steps": others,
    }
    agree(InputError, found, "make the optimizer with the same arguments on all processes")
