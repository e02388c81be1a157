"""``report.plot`` and ``separation.plot``: scores drawn. matplotlib axes in, a display out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from linnet.metrics.judged import Judged
from linnet.metrics.ranking import Detection, RiskCoverage
from linnet.plots.displays import (
    CalibrationDisplay,
    CoverageDisplay,
    HistogramDisplay,
    LinesDisplay,
    Plots,
    PredictionDisplay,
    axes_of,
)
from linnet.plots.measures import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Classified(Protocol):
    """A report on class probabilities."""

    @property
    def examples(self) -> Judged:
        """Numbers of each example."""

    @property
    def bins(self) -> int:
        """Bins of the calibration errors."""

    def risk_coverage(self, score: str = "max-probability") -> RiskCoverage:
        """The error rate among the most certain."""


class Regressed(Protocol):
    """A report on predictions of values, each (N, D)."""

    @property
    def mean(self) -> Tensor:
        """Predicted means."""

    @property
    def variance(self) -> Tensor:
        """Variances of a target, noise included."""

    @property
    def target(self) -> Tensor:
        """True values."""


class Separated(Protocol):
    """A comparison of two sets by a score."""

    def detection(self, score: str | None = None) -> Detection:
        """The values of a score in both."""


class ReportPlots(Plots[Classified]):
    """Plots of a report on classes; ``report.plot`` makes it.

    Args:
        of: What ``linnet.evaluate`` returned.

    Example:
        >>> import torch, linnet
        >>> x, y = torch.tensor([[2.0], [-2.0], [0.1]]), torch.tensor([1, 0, 0])
        >>> report = linnet.evaluate(lambda x: torch.cat([-x, x], 1).softmax(1), (x, y))
        >>> report.plot.risk_coverage().title
        'area 0.111'
    """

    def calibration(self, ax: Axes | None = None) -> CalibrationDisplay:
        """Accuracy against confidence.

        Args:
            ax: matplotlib axes; by default those of a new figure.

        Returns:
            The display.

        Raises:
            DependencyError: If matplotlib is missing.
            InputError: If the data had no labels.
        """
        axes, e = axes_of(ax), self._of.examples
        return CalibrationDisplay(e.confidence.numpy(), e.correct.numpy(), self._of.bins).plot(axes)

    def risk_coverage(self, ax: Axes | None = None, *, score: str = "max-probability") -> LinesDisplay:
        """The error rate among the most certain examples, for every share of them.

        Args:
            ax: matplotlib axes; by default those of a new figure.
            score: What says how certain: "max-probability", "entropy" or "mutual-information".

        Returns:
            The display, with the area under the curve as its title.

        Raises:
            DependencyError: If matplotlib is missing.
            InputError: If the data had no labels, or there is no such score.
        """
        axes, found = axes_of(ax), self._of.risk_coverage(score)
        curve = {score: (found.coverage.numpy(), found.risk.numpy())}
        title = f"area {found.area:.3g}"
        return LinesDisplay(curve, "share that is answered", "error rate", title).plot(axes)


class RegressionPlots(Plots[Regressed]):
    """Plots of a report on values; ``report.plot`` makes it.

    Args:
        of: What ``linnet.evaluate`` returned.

    Example:
        >>> import torch, linnet
        >>> normal = torch.distributions.Normal(torch.zeros(4), 2.0)
        >>> report = linnet.evaluate(lambda x: normal, (torch.zeros(4, 1), torch.tensor([1.0, -1, 2, 4])))
        >>> round(report.plot.predicted().rmse, 4)
        2.3452
    """

    def calibration(self, ax: Axes | None = None) -> CoverageDisplay:
        """How many true values lie inside predictive intervals of each level.

        Args:
            ax: matplotlib axes; by default those of a new figure.

        Returns:
            The display.

        Raises:
            DependencyError: If matplotlib is missing.
        """
        return CoverageDisplay(*_values(self._of)).plot(axes_of(ax))

    def predicted(self, ax: Axes | None = None) -> PredictionDisplay:
        """Predicted against true values, with the standard deviation of a target.

        Args:
            ax: matplotlib axes; by default those of a new figure.

        Returns:
            The display.

        Raises:
            DependencyError: If matplotlib is missing.
        """
        return PredictionDisplay(*_values(self._of)).plot(axes_of(ax))


class SeparationPlots(Plots[Separated]):
    """Plots of inside and outside examples; ``separation.plot`` makes it.

    Args:
        of: What ``linnet.ood`` returned.

    Example:
        >>> import torch, linnet
        >>> predict = lambda x: torch.cat([-x, x], 1).softmax(1)
        >>> apart = linnet.ood(predict, torch.tensor([[3.0], [-4.0]]), torch.tensor([[0.1], [-0.2]]))
        >>> apart.plot.roc().title
        'area 1'
    """

    def scores(self, ax: Axes | None = None, *, score: str | None = None) -> HistogramDisplay:
        """How a score is distributed inside and outside.

        Args:
            ax: matplotlib axes; by default those of a new figure.
            score: "entropy", "max-probability" or "mutual-information"; by default the chosen one.

        Returns:
            The display, with the AUROC as its title.

        Raises:
            DependencyError: If matplotlib is missing.
            InputError: If there is no such score.
        """
        axes, found = axes_of(ax), self._of.detection(score)
        values = {"inside": found.inside.numpy(), "outside": found.outside.numpy()}
        return HistogramDisplay(values, found.score, f"AUROC {found.auroc:.3g}").plot(axes)

    def roc(self, ax: Axes | None = None, *, score: str | None = None) -> LinesDisplay:
        """Share of outside examples that are found over the share of inside ones that are flagged.

        Args:
            ax: matplotlib axes; by default those of a new figure.
            score: "entropy", "max-probability" or "mutual-information"; by default the chosen one.

        Returns:
            The display, with the area under the curve as its title.

        Raises:
            DependencyError: If matplotlib is missing.
            InputError: If there is no such score.
        """
        axes, found = axes_of(ax), self._of.detection(score)
        flagged, caught = found.roc()
        curve = {found.score: (flagged.numpy(), caught.numpy())}
        return LinesDisplay(curve, "inside flagged", "outside found", f"area {found.auroc:.3g}").plot(axes)


def _values(report: Regressed) -> tuple[Array, Array, Array]:
    """Mean, standard deviation and target, (N, D) each."""
    parts = (report.mean, report.variance.sqrt(), report.target)
    mean, std, target = (part.detach().double().cpu().numpy() for part in parts)
    return mean, std, target
