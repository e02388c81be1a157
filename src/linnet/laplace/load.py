"""``linnet.load_laplace``: loads a saved posterior."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from linnet.curvatures import settings
from linnet.curvatures.curvature import Curvature
from linnet.curvatures.saved import load_curvature
from linnet.curvatures.settings import expectation_of
from linnet.laplace.files import (
    read_posterior,
    restored,
    restored_hyper,
    restored_likelihood,
)
from linnet.laplace.laplace import Laplace
from linnet.laplace.state import State
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.linalg.lowrank import LowRankMatrix
from linnet.predictive.labels import Labels
from linnet.predictive.links import Link
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.modes import in_exact_mode


@in_exact_mode
def load_laplace(
    directory: str | Path,
    model: nn.Module,
    likelihood: Likelihood | None = None,
    output: OutputAdapter = None,
) -> Laplace:
    """Read a posterior that ``Laplace.save`` wrote.

    Args:
        directory: The folder.
        model: The network that it was fitted to, with the same weights.
        likelihood: The likelihood; needed for ``Custom`` alone.
        output: The output adapter, if there was a callable one.

    Returns:
        The posterior, able to do all that it could before.

    Raises:
        FileFormatError: If a file is truncated, altered, not linnet's, or of another network.

    Example:
        >>> import linnet, tempfile, torch
        >>> net, x, folder = torch.nn.Linear(2, 1), torch.randn(5, 2), tempfile.mkdtemp()
        >>> la = Laplace(net, linnet.likelihoods.Gaussian()).fit((x, x[:, :1]))
        >>> again = load_laplace(la.save(folder), net)
        >>> torch.equal(again.predictive(x).variance, la.predictive(x).variance)
        True
    """
    tensors, metadata = read_posterior(directory)
    family = restored_likelihood(metadata["likelihood"], likelihood)
    if likelihood is not None:
        check_likelihood(likelihood)
    found = load_curvature(directory, model, output)
    posterior = restored(found, tensors, metadata)
    hyper = restored_hyper(tensors, found.function.device)
    structure, options = _settings(found)
    la = Laplace(
        model,
        family,
        structure,
        hyper.prior,
        posterior.mean,
        float(hyper.scale),
        metadata["damping"],
        **options,
    )
    labels = Labels(family, tuple(metadata["shape"]), Link())
    return la.resume(State(posterior, posterior.groups(metadata["form"]), hyper, labels))


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
