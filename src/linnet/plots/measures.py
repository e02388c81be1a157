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
    """One bin of a reliability diagram.

    Args:
        confidence: Mean confidence of the predictions in the bin, in [0, 1].
        accuracy: Share of them that is correct, in [0, 1].
        low: Lower end of the 95 % Wilson interval of the accuracy.
        high: Upper end of that interval.
        count: Number of predictions in the bin.
    """

    confidence: float
    accuracy: float
    low: float
    high: float
    count: int


def wilson_interval(successes: float, trials: int, level: float = 0.95) -> tuple[float, float]:
    """The Wilson score interval of a share.

    Args:
        successes: Number of successes, at most ``trials``.
        trials: Number of trials; with none the interval is (0, 1).
        level: Two-sided confidence level in (0, 1).

    Returns:
        Lower and upper end, both in [0, 1].

    Source:
        E. B. Wilson (1927), Probable inference, the law of succession, and statistical inference.

    Example:
        >>> low, high = wilson_interval(90, 100)
        >>> round(low, 3), round(high, 3)
        (0.826, 0.945)
    """
    if trials <= 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / trials
    # center = (p + z^2/2n) / (1 + z^2/n);  half = z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n)
    scale = 1 + z * z / trials
    center = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(max(share * (1 - share), 0.0) / trials + (z / (2 * trials)) ** 2) / scale
    return max(center - half, 0.0), min(center + half, 1.0)


def reliability_bins(confidence: Array, correct: Array, bins: int = 10) -> list[ReliabilityBin]:
    """Bins of equal width over confidence; empty ones are left out.

    Args:
        confidence: Confidence of each prediction, (N,), in [0, 1].
        correct: Whether each prediction is correct, (N,), bool or 0/1.
        bins: Number of bins over [0, 1].

    Returns:
        The bins that hold at least one prediction, by rising confidence.

    Example:
        >>> [b.count for b in reliability_bins(np.array([0.15, 0.95, 0.92]), np.array([0, 1, 1]))]
        [1, 2]
    """
    correct = np.asarray(correct, dtype=float)
    place = np.clip((np.asarray(confidence, dtype=float) * bins).astype(int), 0, bins - 1)
    found = []
    for index in range(bins):
        inside = place == index
        count = int(inside.sum())
        if count:
            low, high = wilson_interval(float(correct[inside].sum()), count)
            mean = float(np.asarray(confidence, dtype=float)[inside].mean())
            found.append(ReliabilityBin(mean, float(correct[inside].mean()), low, high, count))
    return found


def calibration_error(bins: list[ReliabilityBin]) -> float:
    """Expected calibration error: the mean gap between confidence and accuracy, weighted by counts.

    Args:
        bins: Bins from :func:`reliability_bins`.

    Returns:
        A share in [0, 1]; 0 when there are no bins.

    Source:
        C. Guo et al. (2017), On calibration of modern neural networks, eq. 3.

    Example:
        >>> calibration_error([ReliabilityBin(0.9, 0.8, 0.7, 0.9, 10)])
        0.09999999999999998
    """
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / total if total else 0.0


def interval_coverage(mean: Array, std: Array, target: Array, levels: Array) -> Array:
    """Share of targets inside the central predictive interval of each level.

    Args:
        mean: Predicted means, any shape.
        std: Predicted standard deviations, noise included, the shape of ``mean``.
        target: True values, the shape of ``mean``.
        levels: Nominal levels in (0, 1), (L,).

    Returns:
        Observed shares, (L,).

    Example:
        >>> z = np.linspace(-3, 3, 7)
        >>> interval_coverage(np.zeros(7), np.ones(7), z, np.array([0.6827]))
        array([0.42857143])
    """
    score = np.abs(np.asarray(target, dtype=float) - mean) / np.maximum(std, np.finfo(float).tiny)
    quantile = np.array([NormalDist().inv_cdf(0.5 + float(level) / 2) for level in levels])
    return np.asarray((score.reshape(1, -1) <= quantile[:, None]).mean(axis=1))


def ranking(values: Array) -> Array:
    """Indices from the largest value to the smallest, not-a-number last, ties in the given order.

    Args:
        values: Numbers, (N,).

    Returns:
        Indices, (N,).

    Example:
        >>> ranking(np.array([1.0, float("nan"), 3.0])).tolist()
        [2, 0, 1]
    """
    return np.argsort(-np.asarray(values, dtype=float), kind="stable")
