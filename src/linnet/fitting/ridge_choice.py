"""The ridge that a criterion prefers, with one sentence that says so."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linnet.fitting.cross_fit import CrossFit
from linnet.linear.dual import RidgePath
from linnet.linear.targets import Targets


class Chosen(NamedTuple):
    """A ridge, why, held-out outputs (N, C) of cross-fitted heads, and the factor of the noise."""

    ridge: float
    why: str
    held_out: Tensor | None = None
    noise_factor: float = 1.0


def given_ridge(ridge: float, folds: CrossFit | None) -> Chosen:
    """A ridge that was given."""
    return Chosen(ridge, "given", None if folds is None else folds.squared(torch.tensor([ridge]))[0])


def chosen_ridge(path: RidgePath, criterion: str, targets: Targets, folds: CrossFit | None = None) -> Chosen:
    """The ridge that a criterion prefers."""
    held: Tensor | None
    if folds is not None and criterion == "loo":
        every = folds.squared(path.ridges)
        errors = (targets.values.double() - every).square().sum(2).mean(1)
        at = int(errors.argmin())
        said = f"lowest held-out error of {len(path.ridges)} values over {folds.folds.count} folds"
        ridge, held = float(path.ridges[at]), every[at]
    else:
        ridge = path.best(criterion)
        said, held = _explain(path, criterion, ridge), given_ridge(ridge, folds).held_out
    return Chosen(ridge, said, held, path.noise_factor(ridge))


def _explain(path: RidgePath, criterion: str, ridge: float) -> str:
    """One sentence about a chosen ridge."""
    at = int((path.ridges - ridge).abs().argmin())
    words = {
        "loo": "lowest leave-one-out error",
        "gcv": "lowest generalized cross-validation score",
        "evidence": "highest evidence",
    }[criterion]
    edge = "; it is at the edge of the grid" if at in (0, len(path.ridges) - 1) else ""
    degrees = float(path.degrees_of_freedom[at])
    return f"{words} of {len(path.ridges)} values, {degrees:.0f} effective parameters{edge}"
