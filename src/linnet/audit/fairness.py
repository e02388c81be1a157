"""Mean outputs of groups, and the differences between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.audit.predictors import outputs_of
from linnet.errors import InputError
from linnet.linear.constraints import group_numbers
from linnet.shown import Record
from linnet.tangent.batch import Inputs, batch_size
from linnet.tangent.door import tensorize


@dataclass(frozen=True, repr=False)
class GroupMeans(Record):
    """Mean outputs of groups.

    Args:
        groups: Their labels, (G,).
        counts: Their sizes, (G,).
        means: Mean outputs, (G, C).
        before: Mean outputs of another predictor, (G, C), if one was given.

    Example:
        >>> import linnet
        >>> outputs, x = torch.tensor([[1.0], [3.0], [0.0], [0.0]]), torch.zeros(4, 1)
        >>> linnet.audit.group_means(outputs, x, [0, 0, 1, 1]).means[:, 0].tolist()
        [2.0, 0.0]
    """

    groups: Tensor
    counts: Tensor
    means: Tensor
    before: Tensor | None = None

    @property
    def gaps(self) -> Tensor:
        """Largest minus smallest mean of each output, (C,)."""
        return self.means.amax(0) - self.means.amin(0)

    @property
    def gaps_before(self) -> Tensor | None:
        """Those of the other predictor, (C,)."""
        return None if self.before is None else self.before.amax(0) - self.before.amin(0)

    def __str__(self) -> str:
        """The table."""
        outputs = range(self.means.shape[1])
        lines = ["group examples " + " ".join(f"{f'output {k}':>10}" for k in outputs)]
        tables = [("", self.means, self.gaps)]
        if self.before is not None and self.gaps_before is not None:
            tables = [("before: ", self.before, self.gaps_before), ("after: ", self.means, self.gaps)]
        for name, means, gaps in tables:
            for group, count, row in zip(self.groups.tolist(), self.counts.tolist(), means, strict=True):
                lines.append(f"{group:>5} {count:>8} " + " ".join(f"{float(v):>10.4g}" for v in row))
            lines.append(f"{name + 'gap':>14} " + " ".join(f"{float(v):>10.4g}" for v in gaps))
        return "\n".join(lines)


def group_means(fit: Any, x: Inputs, groups: Any, before: Any = None) -> GroupMeans:
    """The mean outputs of groups of examples, and the gaps between them.

    ``fit.constrain(x, groups=groups)`` makes the gaps zero.

    Args:
        fit: A fit, a network, a function of x, or outputs (N, C).
        x: N examples.
        groups: (N,) integers.
        before: Another predictor to set beside it, such as the fit before it was constrained.

    Returns:
        The table.

    Raises:
        InputError: If the labels do not fit, or name one group only, or a group of one member.

    Example:
        >>> print(group_means(torch.tensor([[1.0], [3.0], [0.0], [0.0]]), torch.zeros(4, 1), [0, 0, 1, 1]))
        group examples   output 0
            0        2          2
            1        2          0
                   gap          2
    """
    x = tensorize(x)
    if batch_size(x) == 0:
        raise InputError("x is empty", expected="at least two groups of two examples", remedy="pass examples")
    labels = group_numbers(groups, batch_size(x))
    names, number, counts = labels.cpu().unique(return_inverse=True, return_counts=True)
    after = _means(outputs_of(fit, x, "fit"), number, counts)
    other = None if before is None else _means(outputs_of(before, x, "before"), number, counts)
    if other is not None and other.shape != after.shape:
        raise InputError(
            f"before has {other.shape[1]} outputs, fit {after.shape[1]}",
            expected="predictors of the same outputs",
            remedy="compare predictors of one task",
        )
    return GroupMeans(names, counts, after, other)


def _means(outputs: Tensor, number: Tensor, counts: Tensor) -> Tensor:
    """Mean outputs of each group, (G, C), float64."""
    total = torch.zeros(len(counts), outputs.shape[1], dtype=torch.float64)
    return total.index_add_(0, number, outputs.double().cpu()) / counts[:, None]
