"""The numbers behind figures: intervals, calibration bins, rankings.

Everything here takes and returns numpy arrays and Python floats, so that the plots of the library, the
page of the command line and ``result.json`` all show the same figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class ReliabilityBin:
    """One bin of a reliability diagram."""

    confidence: float  # mean confidence of the predictions in the bin, in [0, 1]
    accuracy: float  # share of them that is correct, in [0, 1]
    low: float  # lower end of the 95 % Wilson interval of the accuracy
    high: float  # upper end of that interval
    count: int  # number of predictions in the bin


def wilson_interval(successes: float, trials: int, level: float = 0.95) -> tuple[float, float]:
    """The Wilson score interval of a share."""
    # Source: E. B. Wilson (1927), Probable inference, the law of succession, and statistical inference.
    if trials <= 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / trials
    # center = (p + z^2/2n) / (1 + z^2/n);  half = z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n)
    scale = 1 + z * z / trials
    center = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(max(share * (1 - share), 0.0) / trials + (z / (2 * trials)) ** 2) / scale
    return max(center - half, 0.0), min(center + half, 1.0)


def place_of(confidence: Array, bins: int) -> Array:
    """The bin of each confidence, of equal width: bin b holds those in ((b − 1)/B, b/B], (N,)."""
    # Interior edges alone, closed on the right: neither 0 nor 1 can fall outside the B bins.
    return np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], np.asarray(confidence, dtype=float))


BINS = 15  # as in the source, and in ``linnet.evaluate``


def reliability_bins(confidence: Array, correct: Array, bins: int = BINS) -> list[ReliabilityBin]:
    """Bins of equal width over confidence; empty ones are left out."""
    # Source: C. Guo et al., On calibration of modern neural networks, ICML 2017, eqs. 1-3.
    return _binned(np.asarray(confidence, dtype=float), correct, place_of(confidence, bins), bins)


def equal_mass_bins(confidence: Array, correct: Array, bins: int = 15) -> list[ReliabilityBin]:
    """Bins that hold equally many predictions, to one; no more bins than predictions."""
    # Predictions of equal confidence may fall into different bins, so each counts as correct to the share of
    # all of them that are: the order of the examples does not matter.
    #
    # Source: K. Nguyen and B. O'Connor, Posterior calibration and exploratory analysis for NLP models, EMNLP
    # 2015, section 3.2.
    _, group, count = np.unique(confidence, return_inverse=True, return_counts=True)
    share = (np.bincount(group, np.asarray(correct, dtype=float)) / count)[group]
    order, n = np.argsort(confidence, kind="stable"), len(confidence)
    bins = min(bins, n)
    place = np.arange(n) * bins // n  # B runs of ⌊N/B⌋ or ⌈N/B⌉
    return _binned(np.asarray(confidence, dtype=float)[order], share[order], place, bins)


def _binned(confidence: Array, correct: Array, place: Array, bins: int) -> list[ReliabilityBin]:
    """Counts and means of each bin that is not empty, with the interval of its accuracy."""
    found, correct = [], np.asarray(correct, dtype=float)
    for index in range(bins):
        inside = place == index
        count = int(inside.sum())
        if count:
            low, high = wilson_interval(float(correct[inside].sum()), count)
            mean, right = float(confidence[inside].mean()), float(correct[inside].mean())
            found.append(ReliabilityBin(mean, right, low, high, count))
    return found


def calibration_error(bins: list[ReliabilityBin]) -> float:
    """Expected calibration error: the mean gap between confidence and accuracy, weighted by counts."""
    # Source: C. Guo et al. (2017), On calibration of modern neural networks, eq. 3.
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / total if total else 0.0


def interval_coverage(mean: Array, std: Array, target: Array, levels: Array) -> Array:
    """Share of targets inside the central predictive interval of each level, (L,)."""
    score = np.abs(np.asarray(target, dtype=float) - mean) / np.maximum(std, np.finfo(float).tiny)
    quantile = np.array([NormalDist().inv_cdf(0.5 + float(level) / 2) for level in levels])
    return np.asarray((score.reshape(1, -1) <= quantile[:, None]).mean(axis=1))


def ranking(values: Array) -> Array:
    """Indices from the largest value to the smallest, not-a-number last, ties in the given order, (N,)."""
    return np.argsort(-np.asarray(values, dtype=float), kind="stable")
