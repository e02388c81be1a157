"""Sums over many batches in float64 beside statistics in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


class Totals:
    """Totals of statistics in float64; after every batch the statistics are the totals, rounded once."""

    # A batch adds to empty statistics, so that each of its numbers is rounded as a sum of one batch is, and
    # not as a sum of all batches before it.

    def __init__(self, statistics: Mapping[str, Tensor]) -> None:
        self.statistics = dict(statistics)
        self.state = {
            name: t.double() if t.dtype == torch.float32 else t for name, t in self.statistics.items()
        }

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Statistics and their totals, where these are others."""
        pairs = zip(self.statistics.values(), self.state.values(), strict=True)
        return [(own, total) for own, total in pairs if own is not total]

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """A batch is added to the statistics; one that fails changes no total."""
        for own, _ in self._pairs():
            own.zero_()
        try:
            yield
            for own, total in self._pairs():
                total.add_(own)
        finally:
            self.round()

    def round(self) -> None:
        """Make the statistics those of the totals."""
        for own, total in self._pairs():
            own.copy_(total)

    def fade(self, decay: float) -> None:
        """Multiply the totals by a number."""
        for own, total in self._pairs():
            own.copy_(total.mul_(decay))


def total_bytes(statistics: Mapping[str, Tensor]) -> int:
    """Bytes of the totals beside statistics."""
    return sum(2 * t.nbytes for t in statistics.values() if t.dtype == torch.float32)
