"""``fit.plot``: what was fitted, drawn. matplotlib axes in, a display out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.softmax_path import SoftmaxPath
from linnet.linear.dual import DualSystem, RidgePath
from linnet.linear.newton import NewtonSystem
from linnet.linear.system import System
from linnet.params import choice, integer
from linnet.plots.displays import InfluenceDisplay, RidgeDisplay, SpectrumDisplay, axes_of
from linnet.predictive.plots import ModelPlots, Predicting
from linnet.tangent.batch import Inputs, batch_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORES = ("error", "accuracy", "evidence")


class Fit(Predicting, Protocol):
    """A solved fit."""

    @property
    def ridge(self) -> float:
        """ρ."""

    @property
    def targets(self) -> Tensor:
        """t, (N, C)."""

    @property
    def labels(self) -> Tensor | None:
        """Training classes."""

    @property
    def _solved(self) -> Any:
        """The solved equations."""

    def _examples(self, x: Inputs) -> Inputs:
        """Examples as the network takes them, or an error."""

    def _eigenvalues(self) -> Tensor:
        """Eigenvalues of the kernel of the training examples."""

    def path(self) -> RidgePath | SoftmaxPath:
        """Every criterion along a path of ridges."""

    def influence(self, x: Inputs) -> Tensor:
        """Influence of each training example on each prediction, (N, T, C)."""

    def predict(self, x: Inputs) -> Tensor:
        """Outputs (T, C)."""


class FitPlots(ModelPlots):
    """Plots of a fit; ``fit.plot`` makes it. Beside them are those of every model.

    Args:
        fit: A fit.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x, y = torch.randn(20, 2), torch.arange(20) % 2
        >>> fit = linnet.fit(linnet.linearize(net), (x, y))
        >>> display = fit.plot.ridge()
        >>> display.chosen == fit.ridge, display.ax_.get_ylabel()
        (True, 'mean squared error')
    """

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._fit = fit

    def ridge(self, ax: Axes | None = None, *, of: str = "error") -> RidgeDisplay:
        """A score along a path of ridges, with the ridge of the fit marked.

        Args:
            ax: matplotlib axes; by default those of a new figure.
            of: ``"error"`` (leave-one-out, and generalized cross-validation beside it where there is one),
                ``"accuracy"`` (leave-one-out, classes alone) or ``"evidence"``.

        Returns:
            The display.

        Raises:
            DependencyError: If matplotlib is missing.
            InputError: If there is no such score, or the fit was solved by conjugate gradients.
        """
        axes = axes_of(ax)
        choice("of", of, SCORES, remedy='leave of= out for "error"')
        known = getattr(self._fit, "chosen_path", None)
        path: RidgePath | SoftmaxPath = self._fit.path() if known is None else known
        found = {"leave-one-out": path.loo_error}
        label = "log loss" if isinstance(path, SoftmaxPath) else "mean squared error"
        if of == "error" and isinstance(path, RidgePath):
            # of an example, as leave-one-out: the score itself is of one output
            found["generalized cross-validation"] = path.gcv * self._fit.targets.shape[1]
        elif of == "evidence":
            found, label = {"evidence": path.evidence}, "log evidence"
        elif of == "accuracy":
            if path.loo_accuracy is None:
                raise InputError("of='accuracy' of a regression", "'error' or 'evidence'", "leave of= out")
            found, label = {"leave-one-out": path.loo_accuracy}, "accuracy"
        scores = {name: values.double().cpu().numpy() for name, values in found.items()}
        return RidgeDisplay(path.ridges.double().cpu().numpy(), scores, self._fit.ridge, label).plot(axes)

    def spectrum(self, ax: Axes | None = None) -> SpectrumDisplay:
        """Eigenvalues of the kernel of the training examples by rank, beside the ridge.

        Args:
            ax: matplotlib axes; by default those of a new figure.

        Returns:
            The display; for the squared loss with the effective degrees of freedom, Σ λ/(λ + ρ).

        Raises:
            DependencyError: If matplotlib is missing.
            InputError: If the fit was solved by iterations and its kernel exceeds the budget.
        """
        axes, ridge = axes_of(ax), self._fit.ridge
        values = self._fit._eigenvalues()
        squared = not isinstance(self._fit._solved, NewtonSystem)
        freedom = float((values / (values + ridge)).sum()) if squared else None
        return SpectrumDisplay(values.cpu().numpy(), ridge, freedom).plot(axes)

    def influence(
        self, x: Inputs, ax: Axes | None = None, *, top: int = 10, output: int | None = None
    ) -> InfluenceDisplay:
        """The training examples with the largest influence on one prediction.

        Args:
            x: One example, as a batch: x[:1].
            ax: matplotlib axes; by default those of a new figure.
            top: How many training examples.
            output: Which output; by default the largest, or for a regression the first.

        Returns:
            The display, from the example that adds most to the output to the one that takes most from it.

        Raises:
            DataError: If x is empty or not finite.
            DependencyError: If matplotlib is missing.
            InputError: If x holds several examples, or there is no such output.
        """
        axes = axes_of(ax)
        integer("top", top)
        x = self._fit._examples(x)
        if batch_size(x) != 1:
            raise InputError(
                f"x holds {batch_size(x)} examples",
                expected="one, whose prediction is drawn",
                remedy="pass x[:1]",
            )
        found, labels = self._fit.influence(x)[:, 0], self._fit.labels
        if output is None:
            several = labels is not None and found.shape[1] > 1
            output = int(self._fit.predict(x)[0].argmax()) if several else 0
        integer("output", output, 0, found.shape[1] - 1)
        moved = found[:, output].double()
        largest = moved.abs().argsort(descending=True, stable=True)[:top]
        order = largest[moved[largest].argsort(descending=True, stable=True)]
        classes = None if labels is None else labels.to(order.device)[order].cpu().numpy()
        return InfluenceDisplay(order.cpu().numpy(), moved[order].cpu().numpy(), output, classes).plot(axes)


def eigenvalues_of(system: System | DualSystem | NewtonSystem) -> Tensor:
    """Eigenvalues of the kernel, or an error where nothing was factorized."""
    if isinstance(system, DualSystem):
        return system.spectrum.values
    if isinstance(system, NewtonSystem):
        if (form := system.kernel_form) is not None:
            found: Tensor = torch.linalg.eigvalsh(form.kernel)
            return found
    elif system.factorized is not None:
        return system.factorized.measure.nodes[0]
    raise InputError(
        "the spectrum of a fit by iterations, whose kernel exceeds the memory budget",
        expected='a fit with solver="dual" or "primal"',
        remedy='raise memory=, fit again with solver="dual", or see linnet.spectrum.spectral_density',
    )
