"""Calibration: reliability bins and calibration errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.params import integer
from linnet.shown import Record


@dataclass(frozen=True, eq=False, repr=False)
class CalibrationBins(Record):
    """Predictions sorted into bins of confidence, as a reliability diagram shows them."""

    edges: Tensor  # ends of the bins, (B + 1,), increasing
    count: Tensor  # predictions in each bin, (B,)
    confidence: Tensor  # their mean confidence, (B,); NaN in an empty bin
    accuracy: Tensor  # share of them that is correct, (B,); NaN in an empty bin

    @property
    def error(self) -> float:
        """Expected calibration error Σ_b n_b / N |accuracy_b − confidence_b|, in [0, 1]."""
        gap = (self.accuracy - self.confidence).abs().nan_to_num(0)
        return float((gap * self.count).sum() / self.count.sum())

    @property
    def largest_error(self) -> float:
        """Maximum calibration error, the largest gap of a bin, in [0, 1]."""
        return float((self.accuracy - self.confidence).abs().nan_to_num(0).max())


def equal_width(confidence: Tensor, correct: Tensor, bins: int = 15) -> CalibrationBins:
    """Bins of equal width: bin b holds confidences in ((b − 1)/B, b/B], the last one a confidence of 1."""
    # confidence (N,), correct (N,)
    # Source: C. Guo et al., On calibration of modern neural networks, ICML 2017, eqs. 1-3.
    confidence = confidence.double()
    edges = torch.linspace(0, 1, _checked(bins) + 1, dtype=torch.float64, device=confidence.device)
    # Interior edges alone, closed on the right: neither 0 nor 1 can fall outside the B bins.
    place = torch.bucketize(confidence, edges[1:-1])
    return _summed(edges, place, confidence, correct.double(), bins)


def equal_mass(confidence: Tensor, correct: Tensor, bins: int = 15) -> CalibrationBins:
    """Bins that hold equally many predictions, to one; no more bins than predictions."""
    # confidence (N,), correct (N,)
    # Predictions of equal confidence may fall into different bins, so each counts as correct to the share of
    # all of them that are: the order of the examples does not matter.
    #
    # Source: K. Nguyen and B. O'Connor, Posterior calibration and exploratory analysis for NLP models, EMNLP
    # 2015, section 3.2.
    n = confidence.shape[0]
    bins = min(_checked(bins), n)
    share = tied_mean(correct, confidence)
    ordered, order = confidence.double().sort()
    place = torch.arange(n, device=confidence.device) * bins // n  # B runs of ⌊N/B⌋ or ⌈N/B⌉
    starts = torch.searchsorted(place, torch.arange(bins, device=place.device))
    edges = torch.cat([ordered[starts], ordered[-1:]])
    return _summed(edges, place, ordered, share[order], bins)


def tied_mean(values: Tensor, key: Tensor) -> Tensor:
    """Each value replaced by the mean over all examples of the same key, (N,)."""
    # values (N,), key (N,)
    _, group, count = key.unique(return_inverse=True, return_counts=True)
    total = torch.zeros_like(count, dtype=torch.float64).index_add_(0, group, values.double())
    means: Tensor = total / count
    return means[group]


def _summed(edges: Tensor, place: Tensor, confidence: Tensor, correct: Tensor, bins: int) -> CalibrationBins:
    """Counts and means of each bin."""
    count = torch.bincount(place, minlength=bins)
    means = [torch.bincount(place, weights=v, minlength=bins) / count for v in (confidence, correct)]
    return CalibrationBins(edges, count, means[0], means[1])


def _checked(bins: int) -> int:
    return integer("bins", bins)
