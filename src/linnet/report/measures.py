"""The numbers behind the page: those of every figure, and those of its text."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from linnet.plots.measures import Array, ranking, wilson_interval

FEW = 20  # test samples below which shares of them are not judged
_BINS = 10  # of confidence
_Z = NormalDist().inv_cdf(0.975)  # standard errors of a 95 % interval to each side, 1.96


def mean_and_error(values: Array) -> tuple[float, float]:
    """A mean with its standard error."""
    values = np.asarray(values, dtype=float)
    if not values.size:
        return 0.0, 0.0
    return float(values.mean()), float(values.std() / math.sqrt(values.size))


def share_error(share: float, count: int | None) -> float | None:
    """The standard error of a share, which is not zero where all or none of a few were right."""
    if not count:
        return None
    low, high = wilson_interval(share * count, count)
    return (high - low) / (2 * _Z)


def calibration_and_error(confidence: Array, correct: Array) -> tuple[float, float]:
    """The expected calibration error with its standard error."""
    # With the bins and the sign of each gap held fixed it is a mean over the predictions, Σ s(bin) (correct −
    # confidence) / N, whose standard error is that of a mean.
    confidence, correct = np.asarray(confidence, dtype=float), np.asarray(correct, dtype=float)
    place = np.clip((confidence * _BINS).astype(int), 0, _BINS - 1)
    gap = np.bincount(place, correct - confidence, minlength=_BINS)  # (correct - confidence) summed in a bin
    return mean_and_error(np.copysign(1.0, gap)[place] * (correct - confidence))


def split_by_uncertainty(uncertainty: Array, loss: Array, share: float = 0.1) -> tuple[float, float, int]:
    """The mean loss of the most uncertain predictions, and of the others."""
    order = ranking(uncertainty)
    count = min(max(1, round(share * len(order))), len(order))
    values = np.asarray(loss, dtype=float)
    rest = values[order[count:]]
    return float(values[order[:count]].mean()), float(rest.mean()) if rest.size else 0.0, count
