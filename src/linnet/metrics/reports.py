"""Results of an evaluation: numbers of each example, and from them scores, calibration and rankings.

All of a report follows from a few numbers of each example (:class:`Judged`): bins of confidence, how well a
score ranks, errors of means and by resampling.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.files import finite
from linnet.params import choice, flag, number, refuse, tensor
from linnet.plots import displays, panels
from linnet.plots.displays import Display, Plots, array
from linnet.plots.measures import ReliabilityBin, calibration_error, equal_mass_bins, reliability_bins
from linnet.shown import Record, in_lines
from linnet.solvers.solution import Estimate
from linnet.tree import map_tensors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class ReportPlots(Plots):
    """``report.plot`` of a report on classes."""

    def calibration(self, ax: Axes | None = None) -> Display:
        """Accuracy against confidence."""
        found = self._of.examples
        return displays.calibration(found.confidence.numpy(), found.correct.numpy(), self._of.bins).plot(ax)

    def risk_coverage(self, ax: Axes | None = None, *, score: str = "max-probability") -> Display:
        """The error rate among the most certain examples, by a score, for every share of them."""
        found = self._of.risk_coverage(score)
        curve = {score: (found.coverage.numpy(), found.risk.numpy())}
        return Display(
            panels.lines,
            lines=curve,
            xlabel="share that is answered",
            ylabel="error rate",
            title=f"area {found.area:.3g}",
        ).plot(ax)


class RegressionPlots(Plots):
    """``report.plot`` of a report on values."""

    def calibration(self, ax: Axes | None = None) -> Display:
        """How many true values lie inside predictive intervals of each level."""
        of = self._of
        return displays.coverage(array(of.mean), array(of.variance.sqrt()), array(of.target)).plot(ax)

    def predicted(self, ax: Axes | None = None) -> Display:
        """Predicted against true values, with the standard deviation of a target."""
        mean, std, target = map(array, (self._of.mean, self._of.variance.sqrt(), self._of.target))
        return Display(panels.against_truth, mean=mean, std=std, target=target).plot(ax)


class SeparationPlots(Plots):
    """``separation.plot``: inside and outside examples by a score, by default the chosen one."""

    def scores(self, ax: Axes | None = None, *, score: str | None = None) -> Display:
        """How a score is distributed inside and outside."""
        found = self._of.detection(score)
        values = {"inside": found.inside.numpy(), "outside": found.outside.numpy()}
        title = f"AUROC {found.auroc:.3g}"
        return Display(panels.histograms, values=values, label=found.score, title=title).plot(ax)

    def roc(self, ax: Axes | None = None, *, score: str | None = None) -> Display:
        """Share of outside examples that are found over the share of inside ones that are flagged."""
        found = self._of.detection(score)
        flagged, caught = found.roc()
        curve, title = {found.score: (flagged.numpy(), caught.numpy())}, f"area {found.auroc:.3g}"
        return Display(
            panels.lines, lines=curve, xlabel="inside flagged", ylabel="outside found", title=title
        ).plot(ax)


SCORES = ("entropy", "max-probability", "mutual-information")


class Scored(Record, ABC):
    """Scores that print as a table, with their standard errors beside them."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The scores as plain values, and under "stderr" the standard errors of some."""

    def _shown(self) -> dict[str, Any]:
        scores = self.to_dict()
        for name, error in scores.pop("stderr", {}).items():
            scores[name] = f"{scores[name]:.4f}" + ("" if error is None else f" ± {error:.4f}")
        return scores

    def __str__(self) -> str:
        """A score a line."""
        return in_lines(self._shown())

    __repr__ = __str__


@dataclass(frozen=True, eq=False)
class Judged:
    """Numbers of N examples, in float64 on the CPU, logarithms natural."""

    predicted: Tensor  # the most probable class, (N,)
    confidence: Tensor  # its probability, (N,)
    entropy: Tensor  # H[E p] of the mean probabilities, (N,)
    # E H[p] over samples of the probabilities, (N,), or `None` without samples
    expected_entropy: Tensor | None
    label: Tensor | None  # true class, (N,), or ``None`` where it is not known
    log_loss: Tensor | None  # −log p of the true class, (N,), or ``None``
    brier: Tensor | None  # Σ_c (p_c − [c is the true class])², (N,), or ``None``

    @property
    def n(self) -> int:
        """N."""
        return self.predicted.shape[0]

    @property
    def correct(self) -> Tensor:
        """Whether the most probable class is the true one, (N,) bool."""
        return self.predicted == self.known(self.label)

    def known(self, column: Tensor | None) -> Tensor:
        """A column that needs true classes."""
        if column is None:
            raise InputError(
                "the data had no labels",
                expected="data of (x, y) pairs for scores that compare with the true class",
                remedy="pass data=(x, y)",
            )
        return column

    def uncertainty(self, score: str) -> Tensor:
        """Uncertainty score of each prediction, (N,)."""
        choice("score", score, SCORES)
        if score == "entropy":
            return self.entropy
        if score == "max-probability":
            return -self.confidence
        if self.expected_entropy is None:
            raise InputError(
                "score='mutual-information' needs samples, but predict returns none",
                expected="samples of the probabilities (S, N, C)",
                remedy="return one set of probabilities a draw of the weights, stacked first",
            )
        # I[y; θ] = H[E p] − E H[p] ≥ 0 (Jensen), to rounding
        return (self.entropy - self.expected_entropy).clamp_min(0)


def judge(p: Tensor, y: Tensor | None, start: int = 0) -> Judged:
    """Compare class probabilities with true classes."""
    # p (N, C), y (N,)
    # A class of probability zero counts as the smallest number that the type of p can hold, so that one
    # underflow does not make the mean infinite: 103.3 nats in float32.
    smallest = torch.finfo(p.dtype).tiny * torch.finfo(p.dtype).eps
    samples = p[None] if p.ndim == 2 else p
    mean = samples.mean(0, dtype=torch.float64).clamp_min(0)
    expected = None
    if p.ndim == 3:
        expected = torch.stack([_entropy(sample.double().clamp_min(0)) for sample in samples]).mean(0)
    confidence, predicted = mean.max(1)
    label = log_loss = brier = None
    if y is not None:
        label = check_labels(y, mean.shape[0], mean.shape[1], start).to(mean.device)
        own = mean.gather(1, label[:, None])[:, 0]
        log_loss = -own.clamp_min(smallest).log()
        # Σ_c (p_c − [c = y])² = Σ_c p_c² − 2 p_y + 1 suffers cancellation; the sum itself does not
        brier = (mean - torch.nn.functional.one_hot(label, mean.shape[1])).square().sum(1)
    found = Judged(predicted, confidence.clamp_max(1), _entropy(mean), expected, label, log_loss, brier)
    moved: Judged = map_tensors(Tensor.cpu, found)
    return moved


def _entropy(p: Tensor) -> Tensor:
    """−Σ p log p, at most log C."""
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy.clamp(0, math.log(p.shape[-1]))


def join(parts: Sequence[Judged]) -> Judged:
    """The numbers of several batches, one after the other."""
    columns: list[Tensor | None] = []
    for field in fields(Judged):
        found = [getattr(part, field.name) for part in parts]
        present = [column for column in found if column is not None]
        if present and len(present) < len(found):
            what = "samples of the probabilities" if field.name == "expected_entropy" else "labels"
            raise InputError(
                f"only some batches have {what}", expected="all or none", remedy=f"add the {what}"
            )
        columns.append(torch.cat(present) if present else None)
    return Judged(*columns)  # type: ignore[arg-type]


def check_labels(y: Tensor, n: int, classes: int, start: int = 0) -> Tensor:
    """Labels as (N,) integers below C."""
    # y (N,)
    tensor("y", y, "integer classes (N,)", "pass y.long()")
    if y.dtype == torch.bool or y.is_floating_point() or y.is_complex():
        raise InputError(
            f"y has type {y.dtype}", expected="integer classes (N,)", remedy="convert them with y.long()"
        )
    labels = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if labels.shape != (n,):
        raise InputError(
            f"y has shape {tuple(y.shape)} for {n} example(s)",
            expected="one integer class for each example, (N,)",
            remedy="pass y.argmax(1) for one-hot labels",
        )
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise DataError(
            f"y holds {int(wrong.sum())} label(s) out of range, "
            f"first {int(labels[first])} at index {start + first}",
            expected=f"classes 0 to {classes - 1}, because predict returns {classes} probabilities",
            remedy="use the labels that the network was trained on",
        )
    return labels.long()


def tied_mean(values: Tensor, key: Tensor) -> Tensor:
    """Each value replaced by the mean over all examples of the same key, (N,)."""
    # values (N,), key (N,)
    _, group, count = key.unique(return_inverse=True, return_counts=True)
    total = torch.zeros_like(count, dtype=torch.float64).index_add_(0, group, values.double())
    means: Tensor = total / count
    return means[group]


@dataclass(frozen=True, eq=False, repr=False)
class Detection(Scored):
    """How well a score separates two sets; it should be larger outside, which is the positive class."""

    score: str  # name of the score
    inside: Tensor  # its values inside, (N,)
    outside: Tensor  # its values outside, (M,)

    def __post_init__(self) -> None:
        for name, values in (("inside", self.inside), ("outside", self.outside)):
            if values.numel() == 0 or values.isnan().any():
                raise DataError(
                    f"the score {self.score!r} is NaN {name}" if values.numel() else f"{name} is empty",
                    expected="examples of both sets, with numbers as scores",
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
        true, false = self._counts()
        gained = torch.diff(true, prepend=torch.zeros_like(true[:1]))
        return float((gained * (true.double() / (true + false))).sum() / true[-1])

    @property
    def fpr95(self) -> float:
        """Share of inside examples that are flagged when at least 95 % of those outside are found."""
        true, false = self._counts()
        enough = true >= 0.95 * self.outside.numel() * (1 - 1e-12)
        return int(false[enough][0]) / self.inside.numel()

    def roc(self) -> tuple[Tensor, Tensor]:
        """Shares of inside examples that are flagged, and of outside ones that are found, from (0, 0) on."""
        true, false = (torch.nn.functional.pad(counted.double(), (1, 0)) for counted in self._counts())
        return false / self.inside.numel(), true / self.outside.numel()

    def _counts(self) -> tuple[Tensor, Tensor]:
        """True and false positives at every distinct threshold, the highest first."""
        values = torch.cat([self.inside, self.outside])
        positive = torch.arange(len(values)) >= self.inside.numel()
        ordered, order = values.sort(descending=True)
        last = torch.ones_like(positive)
        last[:-1] = ordered[1:] != ordered[:-1]  # equal scores are flagged together
        return positive[order].cumsum(0)[last], (~positive[order]).cumsum(0)[last]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        counts = {"inside": self.inside.numel(), "outside": self.outside.numel()}
        scores = {"auroc": self.auroc, "aupr": self.aupr, "fpr95": self.fpr95}
        return {**counts, **scores, "stderr": {"auroc": finite(self.auroc_stderr)}}


def _placements(lower: Tensor, upper: Tensor) -> Tensor:
    """For each value in ``upper`` twice the number of ``lower`` below it, equal ones once."""
    ordered = lower.sort().values
    below, not_above = (torch.searchsorted(ordered, upper, right=right) for right in (False, True))
    return below + not_above


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
        number("coverage", coverage, above=0, most=1, remedy="pass coverage=0.8")
        n = self.risk.shape[0]
        return float(self.risk[math.ceil(coverage * n * (1 - 1e-12)) - 1])


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """The risk-coverage curve of an uncertainty score."""
    # uncertainty (N,), loss (N,)
    # Examples of equal uncertainty come in random order; the curve is the mean over all such orders.
    n = uncertainty.shape[0]
    ordered = tied_mean(loss, uncertainty)[uncertainty.argsort()]
    k = torch.arange(1, n + 1, dtype=torch.float64, device=ordered.device)
    return RiskCoverage(k / n, ordered.cumsum(0) / k)


@dataclass(frozen=True, eq=False, repr=False)
class Report(Scored):
    """Scores of class probabilities: accuracy, calibration and uncertainty.

    Everything follows from a few numbers kept of each example. Logarithms are natural; entropies and
    log losses are in nats.

    Args:
        examples: Those numbers.
        classes: C.
        bins: Number of bins of the calibration errors.

    Example:
        >>> x, y = torch.tensor([[2.0], [-2.0], [0.1]]), torch.tensor([1, 0, 0])
        >>> from linnet.metrics.evaluate import evaluate
        >>> report = evaluate(lambda x: torch.cat([-x, x], 1).softmax(1), (x, y))
        >>> print(report)
        n                3
        classes          2
        bins             15
        accuracy         0.6667 ± 0.3333
        nll              0.2781 ± 0.2600
        brier            0.2020 ± 0.2013
        entropy          0.2895 ± 0.1994
        confidence       0.838
        ece              0.1953
        adaptive_ece     0.1953
        entropy_correct  0.09009
        entropy_wrong    0.6882
        aurc             0.1111
    """

    examples: Judged
    classes: int
    bins: int = 15

    @property
    def plot(self) -> ReportPlots:
        """Plots, which take matplotlib axes: ``report.plot.risk_coverage(ax)``."""
        return ReportPlots(self)

    @property
    def accuracy(self) -> float:
        """Share of examples whose most probable class is the true one."""
        return float(self.examples.correct.double().mean())

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood of the true classes; p = 0 counts as its type's smallest number."""
        return float(self.examples.known(self.examples.log_loss).mean())

    @property
    def brier(self) -> float:
        """Mean of Σ_c (p_c − [c is the true class])², in [0, 2] (Brier 1950)."""
        return float(self.examples.known(self.examples.brier).mean())

    @property
    def ece(self) -> float:
        """Expected calibration error over bins of equal width, in [0, 1]."""
        return calibration_error(self.calibration())

    @property
    def adaptive_ece(self) -> float:
        """Expected calibration error over bins of equally many examples, in [0, 1]."""
        return calibration_error(self.calibration(adaptive=True))

    @property
    def confidence(self) -> float:
        """Mean probability of the most probable class."""
        return float(self.examples.confidence.mean())

    @property
    def entropy(self) -> float:
        """Mean entropy of the predicted distribution, H[E p] where there are samples of it."""
        return float(self.examples.entropy.mean())

    @property
    def expected_entropy(self) -> float | None:
        """Mean of E H[p] over samples: uncertainty that more data would leave; None without samples."""
        column = self._columns().get("expected_entropy")
        return None if column is None else float(column.mean())

    @property
    def mutual_information(self) -> float | None:
        """Mean of H[E p] − E H[p]: what the samples disagree about; None without samples."""
        column = self._columns().get("mutual_information")
        return None if column is None else float(column.mean())

    @property
    def entropy_correct(self) -> float:
        """Mean entropy of correct predictions; NaN if there are none."""
        return float(self.examples.entropy[self.examples.correct].mean())

    @property
    def entropy_wrong(self) -> float:
        """Mean entropy of wrong predictions; NaN if there are none."""
        return float(self.examples.entropy[~self.examples.correct].mean())

    @property
    def aurc(self) -> float:
        """Area under the risk-coverage curve, ordered by confidence; smaller is better."""
        return self.risk_coverage().area

    @property
    def stderr(self) -> dict[str, float]:
        """Standard errors s/√N of the means; infinite for one example."""
        return {name: Estimate.of(column).stderr for name, column in self._columns().items()}

    def calibration(self, adaptive: bool = False) -> list[ReliabilityBin]:
        """The bins of a reliability diagram; empty ones are left out.

        Args:
            adaptive: Bins of equally many examples instead of equal width.

        Returns:
            Of each bin the mean confidence, the accuracy with its 95 % interval, and the count.
        """
        bins = equal_mass_bins if flag("adaptive", adaptive) else reliability_bins
        return bins(self.examples.confidence.numpy(), self.examples.correct.numpy(), self.bins)

    def risk_coverage(self, score: str = "max-probability") -> RiskCoverage:
        """The error rate among the most certain examples, for every share of them.

        Args:
            score: What says how certain: "max-probability", "entropy" or "mutual-information".

        Returns:
            The curve.
        """
        return risk_coverage(self.examples.uncertainty(score), ~self.examples.correct)

    def to_dict(self) -> dict[str, Any]:
        """The scores as plain values, for JSON; those that need labels are left out where there are none.

        Returns:
            A dict; a score that is not defined, as the entropy of wrong predictions if none is, is None.
        """
        labeled = ("accuracy", "nll", "brier") if self.examples.label is not None else ()
        derived = ("ece", "adaptive_ece", "entropy_correct", "entropy_wrong", "aurc") if labeled else ()
        names = (*labeled, "entropy", "expected_entropy", "mutual_information", "confidence", *derived)
        sizes = {"n": self.examples.n, "classes": self.classes, "bins": self.bins}
        scores = {name: getattr(self, name) for name in names}
        values: dict[str, Any] = finite({**sizes, **scores, "stderr": self.stderr})
        return values

    def _columns(self) -> dict[str, Tensor]:
        """The numbers that means are taken of, (N,) each."""
        e = self.examples
        found = {"entropy": e.entropy}
        if e.label is not None:
            found |= {"accuracy": e.correct.double(), "nll": e.known(e.log_loss), "brier": e.known(e.brier)}
        if e.expected_entropy is not None:
            found |= {"expected_entropy": e.expected_entropy}
            found |= {"mutual_information": e.uncertainty("mutual-information")}
        return found


@dataclass(frozen=True, eq=False, repr=False)
class RegressionReport(Scored):
    """Scores of Gaussian predictions of real targets. Each of the N·D target values has the same weight.

    Args:
        mean: Predicted means, (N, D), in the units of the targets.
        variance: Variances of a target about them, noise included, (N, D).
        target: True values, (N, D).

    Example:
        >>> normal = torch.distributions.Normal(torch.zeros(4), 2.0)
        >>> from linnet.metrics.evaluate import evaluate
        >>> print(evaluate(lambda x: normal, (torch.zeros(4, 1), torch.tensor([1.0, -1.0, 2.0, 4.0]))))
        n         4
        outputs   1
        rmse      2.3452 ± 0.7613
        nll       2.2996 ± 0.4463
        width     2
        coverage  0.5: 0.5, 0.9: 0.75, 0.95: 0.75
    """

    mean: Tensor
    variance: Tensor
    target: Tensor

    @property
    def plot(self) -> RegressionPlots:
        """Plots, which take matplotlib axes: ``report.plot.predicted(ax)``."""
        return RegressionPlots(self)

    @property
    def rmse(self) -> float:
        """Root mean squared error, in the units of the targets."""
        return math.sqrt(float((self.target - self.mean).square().mean()))

    @property
    def nll(self) -> float:
        """Mean negative log density of a target value, ½ log 2πσ² + (t − μ)² / 2σ², in nats."""
        return float(self._log_losses().mean())

    @property
    def width(self) -> float:
        """Mean predicted standard deviation, in the units of the targets."""
        return float(self.variance.sqrt().mean())

    @property
    def stderr(self) -> dict[str, float]:
        """Standard errors over examples: of ``nll``, and of ``rmse`` to first order; infinite for one."""
        squared = Estimate.of((self.target - self.mean).square().mean(1))
        # d√m = dm / 2√m
        rmse = squared.stderr / (2 * self.rmse) if self.rmse > 0 else squared.stderr
        return {"rmse": rmse, "nll": Estimate.of(self._log_losses().mean(1)).stderr}

    def coverage(self, levels: float | Sequence[float] = 0.95) -> Tensor:
        """The share of target values inside central predictive intervals; ideally the level itself.

        Args:
            levels: One nominal level in (0, 1), or several, (L,).

        Returns:
            Observed shares, () or (L,).

        Raises:
            InputError: If a level is not in (0, 1).
        """
        given = tensor("levels", levels, "levels in (0, 1)", "pass levels=0.95").double()
        if given.ndim > 1 or not given.numel() or not bool(((given > 0) & (given < 1)).all()):
            refuse("levels", levels, "levels in (0, 1)", "pass levels=0.95")
        wanted = given.reshape(-1).tolist()
        distance = (self.target - self.mean).abs() / self.variance.sqrt()
        # |t − μ| ≤ σ Φ⁻¹((1 + level) / 2)
        shares = [(distance <= NormalDist().inv_cdf((1 + level) / 2)).double().mean() for level in wanted]
        return torch.stack(shares).reshape(given.shape)

    def to_dict(self) -> dict[str, Any]:
        """The scores as plain values, for JSON.

        Returns:
            A dict; ``coverage`` maps nominal levels to observed shares.
        """
        coverage = {str(level): float(self.coverage(level)) for level in (0.5, 0.9, 0.95)}
        n, d = self.target.shape
        scores = {"rmse": self.rmse, "nll": self.nll, "width": self.width, "coverage": coverage}
        values: dict[str, Any] = finite({"n": n, "outputs": d, **scores, "stderr": self.stderr})
        return values

    def _log_losses(self) -> Tensor:
        """½ log 2πσ² + (t − μ)² / 2σ², (N, D)."""
        distance = (self.target - self.mean).square() / self.variance
        return 0.5 * ((2 * math.pi * self.variance).log() + distance)
