"""Base classes of fits: size, choices and calibration; and new data made ready for them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx

from linnet import pages
from linnet.fitting.arguments import Record
from linnet.fitting.export import checked_module
from linnet.fitting.merged import Merged
from linnet.fitting.plots import FitPlots, eigenvalues_of
from linnet.fitting.softmax_path import SoftmaxPath
from linnet.frames import frame, outputs
from linnet.linear.dual import RidgePath
from linnet.linear.targets import Targets
from linnet.params import flag
from linnet.predictive.model import PredictiveModel
from linnet.tangent.batch import Inputs, observed, take
from linnet.tangent.graph import Prototype, Traced

if TYPE_CHECKING:
    from pandas import DataFrame

TRACED = 3  # examples on which an exported model is compared with the fit


class Solved(Protocol):
    """Solved equations, of any loss."""

    @property
    def n(self) -> int:
        """N."""

    @property
    def c(self) -> int:
        """C."""

    @property
    def ridge(self) -> float:
        """ρ."""

    def certificate(self) -> float:
        """The relative residual."""


class Fitted(PredictiveModel):
    """Base class of all fits of data.

    Args:
        targets: Training targets.
        record: What was chosen and why.

    Attributes:
        record: The same.
        held_out: Outputs by a procedure that has not seen the example, where the head was cross-fitted.
    """

    x: Inputs  # training inputs, N examples

    def __init__(self, targets: Targets, record: Record) -> None:
        self._targets, self.record = targets, record
        self.held_out: Tensor | None = None

    @property
    @abstractmethod
    def _solved(self) -> Solved:
        """The solved equations."""

    @property
    def n(self) -> int:
        """Number of training examples."""
        return self._solved.n

    @property
    def ridge(self) -> float:
        """ρ."""
        return self._solved.ridge

    @property
    def solver(self) -> str:
        """``"dual"``, ``"shared"``, ``"primal"``, ``"sketch"``, ``"cg"`` or ``"sgd"``."""
        return self.record.solver

    @property
    def targets(self) -> Tensor:
        """t, (N, C), not to be written to; label probabilities for the cross-entropy."""
        return self._targets.values

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of the outputs, where y was text; otherwise ``None``."""
        return self.record.classes or None

    @property
    @abstractmethod
    def noise(self) -> float:
        """The noise variance σ²; 0 for the cross-entropy."""

    @property
    @abstractmethod
    def labels(self) -> Tensor | None:
        """Training classes (N,), ``None`` for regression."""

    @abstractmethod
    def loo(self) -> Tensor:
        """Leave-one-out outputs, (N, C)."""

    def _left_out(self) -> Tensor:
        """Leave-one-out outputs, (N, C), zero where an output does not count."""
        return self.loo()

    @abstractmethod
    def path(self, ridges: Tensor | list[float] | None = None) -> RidgePath | SoftmaxPath:
        """Every criterion along a path of ridges."""

    @abstractmethod
    def influence(self, x: Inputs) -> Tensor:
        """Influence of each training example on each prediction, (N, T, C)."""

    def _eigenvalues(self) -> Tensor:
        """Eigenvalues of the kernel of the training examples, or an error where nothing was factorized."""
        return eigenvalues_of(self._solved)  # type: ignore[arg-type]

    @property
    def plot(self) -> FitPlots:
        """Plots: ``ridge``, ``spectrum``, ``influence``, ``calibration``, ``predicted`` and ``curve``."""
        return FitPlots(self)

    def report(
        self,
        file: str | Path | None = None,
        test: Any = None,
        *,
        classes: Sequence[str] | None = None,
        title: str = "Linear fit",
    ) -> pages.Page:
        """The report page, as the command line writes it: how good, how sure, which examples mattered.

        Args:
            file: Where it is written, such as ``"page.html"``; by default nowhere.
            test: Test samples that are scored, some of their predictions explained: an (x, y) pair, a
                ``Dataset`` or a ``DataLoader``; by default none.
            classes: Names of the classes; by default their numbers.
            title: Title of the page.

        Returns:
            The page: a notebook shows it inline, and ``save("page.html")`` writes it. Inputs (N, C, H, W)
            with one or three channels are shown as pictures.

        Raises:
            DataError: If the test samples cannot be used.
            DependencyError: If matplotlib, Jinja2 or Pillow is missing.
            InputError: If ``file`` is a folder, or the names do not fit the classes.

        Example:
            >>> import linnet
            >>> x = torch.randn(40, 2)
            >>> train, test = (x[:20], (x[:20, 0] > 0).long()), (x[20:], (x[20:, 0] > 0).long())
            >>> fit = linnet.fit(linnet.linearize(torch.nn.Linear(2, 2)), train)
            >>> fit.report("page.html", test, classes=("left", "right"))
            Page('Linear fit')
        """
        page = pages.of_fit(self, test, classes=classes, title=title)
        if file is not None:
            page.save(file)
        return page

    def to_frame(self) -> DataFrame:
        """A pandas table of the training examples and what the fit without each says of it.

        Returns:
            One row per example: its class or target, the prediction by the fit without it, whether that is
            right or how far it is off, and the outputs of that fit.

        Raises:
            DependencyError: If pandas is missing.
        """
        out = self.loo()
        labels = self.labels
        if labels is None:
            off = self.targets.to(out) - out
            return frame(
                outputs("target", self.targets) | outputs("left out", out) | outputs("residual", off)
            )
        predicted = out.argmax(1) if out.shape[1] > 1 else (out[:, 0] > 0).long()
        known = {"label": labels, "left out": predicted, "right": predicted == labels.to(predicted.device)}
        return frame(known | outputs("output", out))

    # -- elsewhere -------------------------------------------------------------------------------

    def export(self, x: Inputs | None = None, *, variance: bool = False) -> fx.GraphModule:
        """The fitted model as a plain module of torch's operations, which needs nothing of linnet.

        It returns what ``predict`` does, for batches of any size, and works with ``torch.export``,
        ``torch.onnx.export(..., dynamo=True)`` and ``torch.compile``. Images and sequences may have other
        sizes where the network allows it; ``module.meta["dynamic_shapes"]`` says which axes vary, as the
        exporters take it, and the module refuses other sizes. It is compared with the fit, at other sizes
        too, before it is returned.

        Args:
            x: Examples like those to come; by default training examples.
            variance: Whether it returns the variance of each output (N, C) beside the outputs, that of
                ``predictive``, exactly: in the last linear layer, along the directions of a sketch, and in
                all weights as far as a factor of P times the fewer of P and N·C numbers fits the memory;
                for ``linnet.adapt`` with lower layers, four times P times N. Not with ``solver="shared"``.

        Returns:
            The module in evaluation mode: from the network's own inputs to outputs (N, C), or to both.

        Raises:
            DataError: If x is empty or not finite.
            InputError: If ``variance`` is no bool.
            MemoryBudgetError: If the variance, or a module of ``linnet.adapt``, would hold too much.
            ModelError: If ``torch.export`` cannot trace the network, or it has an operation without a rule.

        Example:
            >>> import linnet
            >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            >>> x = torch.linspace(-1, 1, 20).view(10, 2)
            >>> fit = linnet.fit(linnet.linearize(net, params="last-layer"), (x, x[:, :1]))
            >>> [out.shape for out in fit.export(variance=True)(x)]
            [torch.Size([10, 1]), torch.Size([10, 1])]
        """
        flag("variance", variance)
        few = self._some(x)

        def answer(part: Inputs) -> tuple[Tensor, ...]:
            if not variance:
                return (self.predict(part),)
            found = self.predictive(part)
            return found.mean, found.variance

        return checked_module(lambda like, kind: self._plain(like, variance, kind), few, answer)

    def merge(self, x: Inputs | None = None) -> Merged:
        """The network at θ₀ + δ, and how far it is from the linear model.

        Args:
            x: Examples on which the two are compared; by default the training examples.

        Returns:
            The network in evaluation mode, the linearity gap and the share of equal classes.

        Raises:
            DataError: If x is empty or not finite.
            InputError: If no weights of the network have the fit's outputs to first order.

        Example:
            >>> import linnet
            >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            >>> x = torch.linspace(-1, 1, 20).view(10, 2)
            >>> merged = linnet.fit(linnet.linearize(net, params="last-layer"), (x, x[:, :1])).merge()
            >>> merged.network(x).shape, merged.gap < 1e-5
            (torch.Size([10, 1]), True)
        """
        return self._merged(self._examples(self.x if x is None else x))

    def _some(self, x: Inputs | None) -> Inputs:
        """A few examples to trace, as the network takes them."""
        given = self.x if x is None else x
        return self._examples(take(observed(given)[0], slice(0, TRACED)))

    @abstractmethod
    def _examples(self, x: Inputs) -> Inputs:
        """Examples on the network's device, or an error."""

    @abstractmethod
    def _plain(self, like: Prototype, variance: bool, kind: torch.dtype | None) -> Traced:
        """The model as a plain module, its variances computed in a type, or in the network's."""

    @abstractmethod
    def _merged(self, x: Inputs) -> Merged:
        """The network at θ₀ + δ, compared on examples."""

    def _summary(self, parameters: int) -> dict[str, Any]:
        """Size, choices and their reasons, as plain numbers and text."""
        return {
            "examples": self.n,
            "outputs": self._solved.c,
            "parameters": parameters,
            "classes": self._targets.classes,
            "solver": self.solver,
            "ridge": self.ridge,
            "criterion": self.record.criterion,
            "noise": self.noise,
            "certificate": self._solved.certificate(),
            "reasons": dict(self.record.reasons),
            "warnings": list(self.record.warnings),
            "seconds": dict(self.record.seconds),
        }
