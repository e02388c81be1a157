"""``report.plot`` and ``separation.plot``: scores drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from linnet.plots import displays
from linnet.plots.displays import Display, Plots, array

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
        title = f"area {found.area:.3g}"
        return displays.lines(curve, "share that is answered", "error rate", title).plot(ax)


class RegressionPlots(Plots):
    """``report.plot`` of a report on values."""

    def calibration(self, ax: Axes | None = None) -> Display:
        """How many true values lie inside predictive intervals of each level."""
        of = self._of
        return displays.coverage(array(of.mean), array(of.variance.sqrt()), array(of.target)).plot(ax)

    def predicted(self, ax: Axes | None = None) -> Display:
        """Predicted against true values, with the standard deviation of a target."""
        of = self._of
        return displays.prediction(array(of.mean), array(of.variance.sqrt()), array(of.target)).plot(ax)


class SeparationPlots(Plots):
    """``separation.plot``: inside and outside examples by a score, by default the chosen one."""

    def scores(self, ax: Axes | None = None, *, score: str | None = None) -> Display:
        """How a score is distributed inside and outside."""
        found = self._of.detection(score)
        values = {"inside": found.inside.numpy(), "outside": found.outside.numpy()}
        return displays.histogram(values, found.score, f"AUROC {found.auroc:.3g}").plot(ax)

    def roc(self, ax: Axes | None = None, *, score: str | None = None) -> Display:
        """Share of outside examples that are found over the share of inside ones that are flagged."""
        found = self._of.detection(score)
        flagged, caught = found.roc()
        curve, title = {found.score: (flagged.numpy(), caught.numpy())}, f"area {found.auroc:.3g}"
        return displays.lines(curve, "inside flagged", "outside found", title).plot(ax)
