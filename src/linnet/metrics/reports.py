"""Results of an evaluation: scores with standard errors, and their curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from linnet.metrics.calibration import CalibrationBins, equal_mass, equal_width
from linnet.metrics.judged import Judged
from linnet.metrics.plots import RegressionPlots, ReportPlots
from linnet.metrics.ranking import RiskCoverage, plain, risk_coverage
from linnet.params import choice, flag, integer, refuse, tensor
from linnet.params import seed as checked_seed
from linnet.shown import Record
from linnet.solvers.solution import Estimate

_MEANS = ("accuracy", "nll", "brier", "entropy", "expected_entropy", "mutual_information")
_NEED_LABELS = ("accuracy", "nll", "brier", "ece", "adaptive_ece", "entropy_correct", "entropy_wrong", "aurc")


@dataclass(frozen=True, eq=False, repr=False)
class Report(Record):
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
        3 examples, 2 classes
        accuracy  0.6667 ± 0.3333
        nll       0.2781 ± 0.2600
        brier     0.2020 ± 0.2013
        ece       0.1953 (adaptive 0.1953, 15 bins)
        entropy   0.2895 ± 0.1994 (0.0901 where right, 0.6882 where wrong)
        aurc      0.1111
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
        return float(self._column("accuracy").mean())

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood of the true classes; p = 0 counts as its type's smallest number."""
        return float(self._column("nll").mean())

    @property
    def brier(self) -> float:
        """Mean of Σ_c (p_c − [c is the true class])², in [0, 2] (Brier 1950)."""
        return float(self._column("brier").mean())

    @property
    def ece(self) -> float:
        """Expected calibration error over bins of equal width, in [0, 1]."""
        return self.calibration().error

    @property
    def adaptive_ece(self) -> float:
        """Expected calibration error over bins of equally many examples, in [0, 1]."""
        return self.calibration(adaptive=True).error

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
        column = self.examples.expected_entropy
        return None if column is None else float(column.mean())

    @property
    def mutual_information(self) -> float | None:
        """Mean of H[E p] − E H[p]: what the samples disagree about; None without samples."""
        if self.examples.expected_entropy is None:
            return None
        return float(self._column("mutual_information").mean())

    @property
    def entropy_correct(self) -> float:
        """Mean entropy of correct predictions; NaN if there are none."""
        return float(self._entropies("correct").mean())

    @property
    def entropy_wrong(self) -> float:
        """Mean entropy of wrong predictions; NaN if there are none."""
        return float(self._entropies("wrong").mean())

    @property
    def aurc(self) -> float:
        """Area under the risk-coverage curve, ordered by confidence; smaller is better."""
        return self.risk_coverage().area

    @property
    def stderr(self) -> dict[str, float]:
        """Standard errors s/√N of the means; infinite for one example. For the rest, see ``bootstrap``."""
        names = [name for name in _MEANS if self._has(name)]
        return {name: Estimate.of(self._column(name)).stderr for name in names}

    def calibration(self, adaptive: bool = False) -> CalibrationBins:
        """The bins of a reliability diagram.

        Args:
            adaptive: Bins of equally many examples instead of equal width.

        Returns:
            The bins.
        """
        bins = equal_mass if flag("adaptive", adaptive) else equal_width
        return bins(self.examples.confidence, self.examples.correct, self.bins)

    def risk_coverage(self, score: str = "max-probability") -> RiskCoverage:
        """The error rate among the most certain examples, for every share of them.

        Args:
            score: What says how certain: "max-probability", "entropy" or "mutual-information".

        Returns:
            The curve.
        """
        return risk_coverage(self.examples.uncertainty(score), ~self.examples.correct)

    def bootstrap(self, name: str, draws: int = 200, seed: int = 0) -> Estimate:
        """A score with its standard error by resampling examples with replacement.

        Args:
            name: Name of a score, as "ece" or "aurc".
            draws: Number of resampled data sets.
            seed: Seed of the resampling.

        Returns:
            The score of these data and the standard deviation of the resampled ones.

        Raises:
            InputError: If the score is unknown or not defined here, or there are fewer than two draws.

        Source:
            B. Efron, Bootstrap methods: another look at the jackknife, Annals of Statistics 1979.
        """
        scores = [key for key in self.to_dict() if isinstance(getattr(self, key, None), float)]
        value = getattr(self, choice("name", name, scores, "pass name='ece'"))
        integer("draws", draws, 2)
        generator, n = torch.Generator().manual_seed(checked_seed("seed", seed)), self.examples.n
        found = []
        for _ in range(draws):
            index = torch.randint(n, (n,), generator=generator)
            found.append(getattr(Report(self.examples.take(index), self.classes, self.bins), name))
        spread = torch.tensor(found, dtype=torch.float64)
        return Estimate(value, float(spread[~spread.isnan()].std()))

    def to_dict(self) -> dict[str, Any]:
        """The scores as plain values, for JSON; those that need labels are left out where there are none.

        Returns:
            A dict; a score that is not defined, as the entropy of wrong predictions if none is, is None.
        """
        names = (*_MEANS, "ece", "adaptive_ece", "confidence", "entropy_correct", "entropy_wrong", "aurc")
        scores = {name: plain(getattr(self, name)) for name in names if self._has(name, samples=True)}
        stderr = {name: plain(value) for name, value in self.stderr.items()}
        return {"n": self.examples.n, "classes": self.classes, "bins": self.bins, **scores, "stderr": stderr}

    def __str__(self) -> str:
        """The printed report."""
        error = self.stderr
        rows = [f"{self.examples.n:,} examples, {self.classes} classes"]
        rows += [
            f"{name:<9} {getattr(self, name):.4f} ± {error[name]:.4f}" for name in _MEANS[:3] if name in error
        ]
        entropy = f"entropy   {self.entropy:.4f} ± {error['entropy']:.4f}"
        if self.examples.label is not None:
            rows.append(f"ece       {self.ece:.4f} (adaptive {self.adaptive_ece:.4f}, {self.bins} bins)")
            right, wrong = (
                "none" if math.isnan(v) else f"{v:.4f}" for v in (self.entropy_correct, self.entropy_wrong)
            )
            entropy += f" ({right} where right, {wrong} where wrong)"
        rows.append(entropy)
        if self.examples.expected_entropy is not None:
            rows.append(f"  of which {self.mutual_information:.4f} is disagreement of the samples")
        if self.examples.label is not None:
            rows.append(f"aurc      {self.aurc:.4f}")
        return "\n".join(rows)

    def _shown(self) -> dict[str, Any]:
        return _with_errors(self.to_dict())

    __repr__ = __str__

    def _column(self, name: str) -> Tensor:
        """The numbers that a mean is taken of, (N,)."""
        e = self.examples
        if name in ("nll", "brier"):
            return e.known(e.log_loss if name == "nll" else e.brier)
        if name == "accuracy":
            return e.correct.double()
        if name == "expected_entropy" and e.expected_entropy is not None:
            return e.expected_entropy
        return e.uncertainty(name.replace("_", "-"))

    def _has(self, name: str, samples: bool = False) -> bool:
        """Whether a score is defined for these data; with ``samples`` also one that is None without them."""
        if name in ("expected_entropy", "mutual_information"):
            return samples or self.examples.expected_entropy is not None
        return name not in _NEED_LABELS or self.examples.label is not None

    def _entropies(self, of: str) -> Tensor:
        """Entropies of correct or of wrong predictions."""
        return self.examples.entropy[self.examples.correct == (of == "correct")]


@dataclass(frozen=True, eq=False, repr=False)
class RegressionReport(Record):
    """Scores of Gaussian predictions of real targets. Each of the N·D target values has the same weight.

    Args:
        mean: Predicted means, (N, D), in the units of the targets.
        variance: Variances of a target about them, noise included, (N, D).
        target: True values, (N, D).

    Example:
        >>> normal = torch.distributions.Normal(torch.zeros(4), 2.0)
        >>> from linnet.metrics.evaluate import evaluate
        >>> print(evaluate(lambda x: normal, (torch.zeros(4, 1), torch.tensor([1.0, -1.0, 2.0, 4.0]))))
        4 examples, 1 target value each
        rmse      2.3452 ± 0.7613
        nll       2.2996 ± 0.4463
        coverage  0.5000 at 0.5, 0.7500 at 0.9, 0.7500 at 0.95
        width     2.0000 (mean standard deviation)
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
        stderr = {name: plain(value) for name, value in self.stderr.items()}
        n, d = self.target.shape
        scores = {"rmse": self.rmse, "nll": self.nll, "width": self.width}
        return {"n": n, "outputs": d, **scores, "coverage": coverage, "stderr": stderr}

    def __str__(self) -> str:
        """The printed report."""
        n, d = self.target.shape
        error = self.stderr
        coverage = ", ".join(f"{share:.4f} at {level}" for level, share in self.to_dict()["coverage"].items())
        return "\n".join([
            f"{n:,} examples, {d} target value{'s' if d > 1 else ''} each",
            f"rmse      {self.rmse:.4f} ± {error['rmse']:.4f}",
            f"nll       {self.nll:.4f} ± {error['nll']:.4f}",
            f"coverage  {coverage}",
            f"width     {self.width:.4f} (mean standard deviation)",
        ])  # fmt: skip

    def _shown(self) -> dict[str, Any]:
        return _with_errors(self.to_dict())

    __repr__ = __str__

    def _log_losses(self) -> Tensor:
        """½ log 2πσ² + (t − μ)² / 2σ², (N, D)."""
        distance = (self.target - self.mean).square() / self.variance
        return 0.5 * ((2 * math.pi * self.variance).log() + distance)


def _with_errors(scores: dict[str, Any]) -> dict[str, Any]:
    """Scores with their standard errors beside them."""
    errors = scores.pop("stderr")
    known = {name: f"{scores[name]:.4f} ± {error:.4f}" for name, error in errors.items() if error is not None}
    return {"examples": scores.pop("n"), **scores, **known}
