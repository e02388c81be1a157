"""Batch sizes that grow when a step's predicted reduction is within its noise.

Over the examples of a batch the quadratic model's reduction r_n = −(∇ℓ_nᵀδ + ½ δᵀG_nδ) has a mean r and a
standard deviation s. At N examples its standard error is s/√N, so that N* = (s/r)² examples are needed for an
error as large as r (Botev 2020, chapter 6, names the automatic batch size as future work; the criterion is
that of Byrd et al. 2012 on the reduction in place of the gradient).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.optim.gauss_newton_settings import StepReport
from linnet.params import instance, integer, refuse, tensor
from linnet.params import seed as checked_seed
from linnet.shown import Shown
from linnet.tangent.batch import Inputs, batch_size, check_examples, check_finite, take
from linnet.tangent.door import tensorize
from linnet.tangent.gather import owned


def suggested_batch(examples: int, noise: float, reduction: float) -> int:
    """The batch size at which the noise of the reduction equals the reduction."""
    if reduction == 0:
        return examples
    return min(max(examples, math.ceil(examples * (noise / reduction) ** 2)), 2 * examples)


class GrowingBatches(Shown):
    """Endless shuffled batches whose size follows what the optimizer suggests.

    Args:
        x: All examples.
        y: All targets, (N, ...).
        size: Size of the first batch.
        largest: Largest size; by default all examples.
        patience: Reports in a row that must ask for more before the size grows.
        seed: Seed of the order.

    Attributes:
        size: Size of the next batch.

    Raises:
        InputError: If a size is wrong, or x and y differ in length.

    Example:
        >>> batches = GrowingBatches(torch.randn(100, 2), torch.zeros(100, 1), size=10)
        >>> x, y = next(iter(batches))
        >>> len(x)
        10
    """

    def __init__(
        self, x: Inputs, y: Tensor, size: int, largest: int | None = None, patience: int = 3, seed: int = 0
    ) -> None:
        x = tensorize(x)
        check_examples(x)
        n = batch_size(x)
        expected = f"a tensor of {n} targets, like x"
        tensor("y", y, expected, "check the split", convert=False)
        if y.ndim == 0 or len(y) != n:
            refuse("y", y, expected, "check the split")
        check_finite(y, "y")
        largest = n if largest is None else largest
        for name, value, top in (("size", size, n), ("largest", largest, n), ("patience", patience, None)):
            integer(name, value, 1, top, "pass a smaller size")
        self.x, self.y = owned(x), y.detach().clone()
        self.size, self.largest, self.patience = size, largest, patience
        self._generator = torch.Generator().manual_seed(checked_seed("seed", seed))
        self._asked: list[int] = []

    def _shown(self) -> dict[str, Any]:
        known = {"examples": batch_size(self.x), "size": self.size, "largest": self.largest}
        return {**known, "patience": self.patience}

    def follow(self, report: StepReport) -> None:
        """Grow if the last few reports all ask for more.

        Args:
            report: From ``GaussNewton(..., noise=True).step``.

        Raises:
            InputError: If the report has no suggestion.
        """
        instance("report", report, StepReport, "what GaussNewton.step returned", "pass that")
        if report.suggested_batch is None:
            raise InputError("report has no suggested_batch", expected="one", remedy="pass noise=True")
        self._asked.append(report.suggested_batch)
        recent = self._asked[-self.patience :]
        if len(recent) == self.patience and min(recent) > self.size:
            self.size, self._asked = min(self.largest, min(recent)), []

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        """Batches without end; every example once before any comes again."""
        n = batch_size(self.x)
        while True:
            order, start = torch.randperm(n, generator=self._generator).to(self.y.device), 0
            while start == 0 or start + self.size <= n:
                few = order[start : start + self.size]
                start += self.size
                yield take(self.x, few), self.y[few]
