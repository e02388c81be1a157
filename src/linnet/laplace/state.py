"""The state of a fitted Laplace approximation: posterior, hyper-parameters, type of output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from linnet.laplace.posterior import Hyper, Posterior
from linnet.laplace.prior import Groups
from linnet.predictive.sampled import Labels


@dataclass(frozen=True, eq=False)
class State:
    """A fitted posterior."""

    posterior: Posterior  # the posterior for any hyper-parameters
    groups: Groups  # groups of the prior
    hyper: Hyper  # the hyper-parameters
    labels: Labels  # how targets are distributed, with the likelihood that the curvature was computed with


def expanded(state: State, form: str) -> tuple[Groups, Hyper]:
    """The same prior in another form: as it is in a finer one, at its geometric mean in a coarser one."""
    groups = state.posterior.groups(form)
    logs = state.hyper.prior.log()[state.groups.members]
    sizes = groups.sums(torch.ones_like(logs))
    return groups, Hyper((groups.sums(logs) / sizes).exp(), state.hyper.scale, state.hyper.noise)
