"""The numbers behind the page: those of every figure, and those of its text."""

from __future__ import annotations

import numpy as np

from linnet.plots.measures import (
    Array,
    ReliabilityBin,
    calibration_error,
    interval_coverage,
    ranking,
    reliability_bins,
    wilson_interval,
)

__all__ = [
    "Array",
    "ReliabilityBin",
    "calibration_error",
    "interval_coverage",
    "ranking",
    "reliability_bins",
    "split_by_uncertainty",
    "wilson_interval",
]


def split_by_uncertainty(uncertainty: Array, loss: Array, share: float = 0.1) -> tuple[float, float, int]:
    """The mean loss of the most uncertain predictions, and of the others.

    Args:
        uncertainty: Uncertainty of each prediction, (N,).
        loss: What each prediction cost, (N,): 0 or 1 for right or wrong, or an absolute error.
        share: Share of the predictions that counts as most uncertain.

    Returns:
        Mean loss of the most uncertain, mean loss of the others, and the number of the former.

    Example:
        >>> split_by_uncertainty(np.arange(10.0), np.arange(10) == 9)
        (1.0, 0.0, 1)
    """
    order = ranking(uncertainty)
    count = min(max(1, round(share * len(order))), len(order))
    values = np.asarray(loss, dtype=float)
    rest = values[order[count:]]
    return float(values[order[:count]].mean()), float(rest.mean()) if rest.size else 0.0, count
