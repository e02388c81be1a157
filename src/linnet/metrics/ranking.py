"""Ranking by an uncertainty score: separation of two sets, and selective prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.metrics.calibration import tied_mean
from linnet.shown import Record


@dataclass(frozen=True, eq=False, repr=False)
class Detection(Record):
    """Detection metrics: how well a score separates two sets."""

    # The score should be larger outside. Outside is the positive class: a true positive is an outside example
    # that is found, a false positive an inside example that is flagged.

    score: str  # name of the score
    inside: Tensor  # its values inside, (N,)
    outside: Tensor  # its values outside, (M,)

    def __post_init__(self) -> None:
        for name, values in (("inside", self.inside), ("outside", self.outside)):
            if values.numel() == 0:
                raise DataError(
                    f"{name} is empty: there is one class only",
                    expected="examples of both, inside and outside",
                    remedy="a ranking of one set against another needs both",
                )
            if values.isnan().any():
                raise DataError(
                    f"the score {self.score!r} is NaN {name}",
                    expected="numbers",
                    remedy="look at the predictions",
                )

    @property
    def auroc(self) -> float:
        """P(score outside > score inside) + ½ P(equal): the area under the ROC curve."""
        # In whole numbers: 2 · #(inside < outside) + #(inside = outside), over 2NM
        twice = int(_placements(self.inside, self.outside).sum())
        return twice / (2 * self.inside.numel() * self.outside.numel())

    @property
    def auroc_stderr(self) -> float:
        """Standard error of the AUROC (DeLong, DeLong and Clarke-Pearson 1988); infinite for one example."""
        if min(self.inside.numel(), self.outside.numel()) < 2:
            return math.inf
        found = _placements(self.inside, self.outside).double() / (2 * self.inside.numel())
        missed = _placements(self.outside, self.inside).double() / (2 * self.outside.numel())
        # Var = Var_outside[P(inside < s)] / M + Var_inside[P(outside > s)] / N
        return math.sqrt(float(found.var() / found.numel() + missed.var() / missed.numel()))

    @property
    def aupr(self) -> float:
        """Average precision Σ_k (R_k − R_{k−1}) P_k with outside as the positive class."""
        return _average_precision(*_counts(self.inside, self.outside))

    @property
    def aupr_in(self) -> float:
        """Average precision with inside as the positive class."""
        return _average_precision(*_counts(-self.outside, -self.inside))

    @property
    def fpr95(self) -> float:
        """Share of inside examples that are flagged when at least 95 % of those outside are found."""
        return self.false_positive_rate(0.95)

    @property
    def fpr95_in(self) -> float:
        """Share of outside examples that pass when at least 95 % of those inside do (Liang et al. 2018)."""
        return Detection(self.score, -self.outside, -self.inside).fpr95

    def false_positive_rate(self, recall: float) -> float:
        """Share of inside examples that are flagged at the highest threshold that finds enough outside."""
        if not 0 < recall <= 1:
            raise InputError(f"recall={recall}", expected="a share in (0, 1]", remedy="pass recall=0.95")
        true, false = _counts(self.inside, self.outside)
        enough = true >= recall * self.outside.numel() * (1 - 1e-12)
        return int(false[enough][0]) / self.inside.numel()

    def roc(self) -> tuple[Tensor, Tensor]:
        """The ROC curve."""
        true, false = _counts(self.inside, self.outside)
        zero = torch.zeros(1, dtype=torch.float64, device=true.device)
        return (
            torch.cat([zero, false.double() / self.inside.numel()]),
            torch.cat([zero, true.double() / self.outside.numel()]),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        names = ("auroc", "auroc_stderr", "aupr", "aupr_in", "fpr95", "fpr95_in")
        counts = {"score": self.score, "inside": self.inside.numel(), "outside": self.outside.numel()}
        return {**counts, **{name: plain(getattr(self, name)) for name in names}}

    def _shown(self) -> dict[str, Any]:
        return self.to_dict()

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.score}: auroc {self.auroc:.4f} ± {self.auroc_stderr:.4f}, aupr {self.aupr:.4f} "
            f"(inside {self.aupr_in:.4f}), fpr95 {self.fpr95:.4f}"
        )


def _placements(lower: Tensor, upper: Tensor) -> Tensor:
    """For each value in ``upper`` twice the number of ``lower`` below it, equal ones once."""
    ordered = lower.sort().values
    below, not_above = (torch.searchsorted(ordered, upper, right=right) for right in (False, True))
    return below + not_above


def _counts(negatives: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
    """True and false positives at every distinct threshold, the highest first."""
    values = torch.cat([negatives, positives])
    positive = torch.cat([torch.zeros_like(negatives), torch.ones_like(positives)]).bool()
    ordered, order = values.sort(descending=True)
    last = torch.ones_like(positive)
    last[:-1] = ordered[1:] != ordered[:-1]  # equal scores are flagged together
    return positive[order].cumsum(0)[last], (~positive[order]).cumsum(0)[last]


def _average_precision(true: Tensor, false: Tensor) -> float:
    """Σ_k (R_k − R_{k−1}) P_k."""
    precision = true.double() / (true + false)
    gained = torch.diff(true, prepend=torch.zeros_like(true[:1]))
    return float((gained * precision).sum() / true[-1])


@dataclass(frozen=True, eq=False, repr=False)
class RiskCoverage(Record):
    """The error rate of a classifier that answers only when it is certain enough."""

    # Source: Y. Geifman and R. El-Yaniv, Selective classification for deep neural networks, NeurIPS 2017.

    coverage: Tensor  # share of examples that are answered, k/N for k = 1, ..., N, (N,)
    risk: Tensor  # mean loss of the k most certain, (N,)

    @property
    def area(self) -> float:
        """Area under the curve, (1/N) Σ_k risk_k."""
        return float(self.risk.mean())

    def risk_at(self, coverage: float) -> float:
        """The mean loss when at least a share of the examples is answered."""
        if not 0 < coverage <= 1:
            raise InputError(f"coverage={coverage}", expected="a share in (0, 1]", remedy="pass coverage=0.8")
        n = self.risk.shape[0]
        return float(self.risk[math.ceil(coverage * n * (1 - 1e-12)) - 1])

    def coverage_at(self, risk: float) -> float:
        """The largest share of examples that can be answered at a mean loss."""
        allowed = self.coverage[self.risk <= risk]
        return float(allowed[-1]) if allowed.numel() else 0.0


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """The risk-coverage curve of an uncertainty score."""
    # uncertainty (N,), loss (N,)
    # Examples of equal uncertainty come in random order; the curve is the mean over all such orders.
    n = uncertainty.shape[0]
    ordered = tied_mean(loss, uncertainty)[uncertainty.argsort()]
    k = torch.arange(1, n + 1, dtype=torch.float64, device=ordered.device)
    return RiskCoverage(k / n, ordered.cumsum(0) / k)


def plain(value: float | None) -> float | None:
    """A number that JSON can hold: None for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None
