"""A saved posterior, on the network that it was fitted to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from linnet import tree
from linnet.curvatures import settings
from linnet.curvatures.curvature import Curvature
from linnet.curvatures.saved import restored_curvature
from linnet.curvatures.settings import expectation_of
from linnet.errors import InputError
from linnet.laplace.laplace import Laplace
from linnet.laplace.posterior import Posterior
from linnet.laplace.state import State
from linnet.likelihoods import from_description
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.linalg.lowrank import LowRankMatrix
from linnet.predictive.links import Link
from linnet.predictive.sampled import Labels
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.modes import in_exact_mode


@in_exact_mode
def restored_laplace(
    saved: dict[str, Any],
    path: Path,
    model: nn.Module,
    output: OutputAdapter = None,
    likelihood: Likelihood | None = None,
) -> Laplace:
    """The posterior that ``Laplace.save`` wrote."""
    family = _likelihood(saved["likelihood"], likelihood)
    curvature = restored_curvature(saved["curvature"], path, model, output)
    hyper, mean = tree.map_tensors(lambda t: t.to(curvature.function.device), (saved["hyper"], saved["mean"]))
    posterior = Posterior(curvature, saved["fitted"], mean, saved["damping"])
    structure, options = _settings(curvature)
    la = Laplace(model, family, structure, hyper.prior, mean, float(hyper.scale), saved["damping"], **options)
    labels = Labels(family, saved["shape"], Link())
    return la.resume(State(posterior, posterior.groups(saved["form"]), hyper, labels))


def _likelihood(described: dict[str, Any], given: Likelihood | None) -> Likelihood:
    """The likelihood of a saved posterior."""
    if given is not None:
        check_likelihood(given)
        if given.describe() != described:
            raise InputError(
                f"likelihood={given!r}, but the posterior was saved with {described}",
                expected="the same likelihood",
                remedy="leave likelihood= out, or pass the one of the fit",
            )
        return given
    if described["kind"] == "Custom":
        raise InputError(
            "likelihood is missing, and a Custom one, made of functions, cannot be read from a file",
            expected="the likelihood that the posterior was fitted with",
            remedy="pass likelihood= to linnet.load",
        )
    return from_description(described)


def _settings(found: Curvature) -> tuple[Any, dict[str, Any]]:
    """The settings of the curvature, so that more data can be added."""
    made, structure = found.made, found.made.structure
    options: dict[str, Any] = {
        "expectation": expectation_of(made.expectation, made.samples),
        "sharing": made.sharing,
        "matrix": made.matrix,
        "params": list(found.function.names),
        "output": found.function.output,
    }
    if structure == "mixture":
        names = [(name, part.structure) for part in found.parts for name in part.layer.names]
        return {f"^{re.escape(name)}$": kind for name, kind in names}, options
    if isinstance(found.parts[0].operator, LowRankMatrix):
        return settings.LowRank(found.parts[0].operator.basis.shape[1]), options
    return ("full" if structure == "last-layer" else structure), options
