"""The state of a fitted Laplace approximation: posterior, hyper-parameters, type of output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from linnet.laplace.posterior import Hyper, Posterior
from linnet.laplace.prior import Groups
from linnet.predictive.labels import Labels


@dataclass(frozen=True, eq=False)
class State:
    """A fitted posterior.

    Args:
        posterior: The posterior for any hyper-parameters.
        groups: Groups of the prior.
        hyper: The hyper-parameters.
        labels: How targets are distributed, with the likelihood that the curvature was computed with.
    """

    posterior: Posterior
    groups: Groups
    hyper: Hyper
    labels: Labels


def expanded(state: State, form: str) -> tuple[Groups, Hyper]:
    """The same prior in another form: as it is in a finer one, at its geometric mean in a coarser one.

    Args:
        state: A fitted posterior.
        form: "isotropic", "layer" or "parameter".

    Returns:
        Groups and hyper-parameters.
    """
    groups = state.posterior.groups(form)
    logs = state.hyper.prior.log()[state.groups.members]
    sizes = groups.sums(torch.ones_like(logs))
    return groups, Hyper((groups.sums(logs) / sizes).exp(), state.hyper.scale, state.hyper.noise)
