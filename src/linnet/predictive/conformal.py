"""Intervals and sets that hold new targets as often as is asked for, whatever their distribution.

Each training example is predicted by the fit without it, which says how far off predictions are; and each
new example by all of those fits. Both come from one solve, so that no example is set apart for calibration.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linnet.errors import InputError


def needed(coverage: float) -> int:
    """The fewest examples of which one more may be the furthest off and not be held."""
    return math.ceil(coverage / (1 - coverage) - ROUNDING)


def rank(n: int, coverage: float) -> int:
    """The place of a new example's error among those of n others that it is below so often, from 1."""
    return math.ceil(coverage * (n + 1) - ROUNDING)


ROUNDING = 1e-9  # 0.7 of ten is seven


def require_enough(n: int, coverage: float) -> None:
    """Raise where so few examples cannot tell what is so seldom."""
    if rank(n, coverage) > n:
        raise InputError(
            f"coverage={coverage:g} from {n} examples",
            expected=f"{needed(coverage):,} examples or more",
            remedy=f"pass coverage={math.floor(1000 * n / (n + 1)) / 1000:g} or less, or fit more examples",
        )


def jackknife(left: Tensor, errors: Tensor, coverage: float) -> Tensor:
    """Lower and upper ends of intervals, (T, C, 2), by the outputs of each fit without one example."""
    # left (N, T, C) or (1, T, C), errors (N, C) ≥ 0
    # Source: Barber et al., Annals of Statistics 49 (2021), equation (1.4)
    n = len(errors)
    above = rank(n, coverage)
    lower = (left - errors[:, None]).kthvalue(n + 1 - above, 0).values
    upper = (left + errors[:, None]).kthvalue(above, 0).values
    return torch.stack([lower, upper], 2)


def scores(p: Tensor, draws: Tensor) -> Tensor:
    """The probability of the classes likelier than each, and a random share of its own, like p."""
    # p (..., C), draws (..., 1) between 0 and 1
    # Source: Romano, Sesia and Candès, NeurIPS 2020, equation (5)
    ordered, order = p.sort(descending=True, stable=True)
    found = ordered.cumsum(-1) - (1 - draws) * ordered
    return torch.empty_like(found).scatter_(-1, order, found)


def held(left: Tensor, own: Tensor, labels: Tensor, coverage: float, by_class: bool) -> Tensor:
    """The classes that are no more unusual for an example than others were for theirs, (T, C) bool."""
    # left (N, T, C) or (1, T, C): scores of classes by each fit without one example; own and labels (N,)
    # Source: Romano, Sesia and Candès, NeurIPS 2020, equation (13)
    beyond = own[:, None, None] < left  # (N, T, C)
    if not by_class:
        return beyond.sum(0) < rank(len(own), coverage)
    of_class = labels[:, None] == torch.arange(left.shape[2], device=labels.device)  # (N, C)
    limits = [rank(count, coverage) for count in of_class.sum(0).tolist()]
    counts = (beyond & of_class[:, None]).sum(0)
    return counts < torch.tensor(limits, device=counts.device)
