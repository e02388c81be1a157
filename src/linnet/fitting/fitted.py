"""Base classes of fits: size, choices and calibration; and new data made ready for them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx

from linnet import pages
from linnet.errors import DataError
from linnet.fitting.export import checked_module
from linnet.fitting.merged import Merged
from linnet.fitting.plots import FitPlots, eigenvalues_of
from linnet.fitting.record import Record
from linnet.fitting.softmax_path import SoftmaxPath
from linnet.frames import frame, outputs
from linnet.linear.dual import RidgePath
from linnet.linear.targets import Targets, check_arrangement, make_targets, position_targets
from linnet.params import flag, number
from linnet.predictive.model import PredictiveModel
from linnet.predictive.temperature import fit_moderation, fit_temperature
from linnet.tangent.batch import Inputs, observe, observed, take
from linnet.tangent.functional import Functional
from linnet.tangent.gather import gather_data
from linnet.tangent.graph import Prototype, Traced
from linnet.tangent.loaders import Said
from linnet.tangent.modes import in_exact_mode

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
        return self._merged(self._examples(self._training_inputs if x is None else x))

    def _some(self, x: Inputs | None) -> Inputs:
        """A few examples to trace, as the network takes them."""
        given = self._training_inputs if x is None else x
        return self._examples(take(observed(given)[0], slice(0, TRACED)))

    @property
    @abstractmethod
    def _training_inputs(self) -> Inputs:
        """Training inputs."""

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


class SolvedSquares(Solved, Protocol):
    """Solved equations of the squared loss."""

    def noise(self) -> float:
        """The noise variance of highest evidence."""

    def loo_variances(self) -> Tensor:
        """Variances of the left-out outputs in units of the noise, (N, C, C)."""

    def loo_residuals(self) -> Tensor:
        """Target less output without the example, (N, C)."""

    @property
    def beta(self) -> Tensor:
        """β, (N, C): the residual of each example is ρβ."""


class SquaredFit(Fitted):
    """A fit of the squared loss, whose probabilities are calibrated on leave-one-out outputs."""

    def __init__(self, targets: Targets, record: Record) -> None:
        super().__init__(targets, record)
        self._moderation: tuple[float, float] | None = None
        self._point_temperature: float | None = None
        self._noise: float | None = None

    @property
    @abstractmethod
    def _solved(self) -> SolvedSquares:
        """The solved equations."""

    @property
    @abstractmethod
    def memory(self) -> str | int | None:
        """The budget of what is formed later."""

    @property
    def classes(self) -> int | None:
        """Number of classes, ``None`` for regression."""
        return self._targets.classes

    @property
    def labels(self) -> Tensor | None:
        """Training classes (N,), ``None`` for regression."""
        return self._targets.labels

    @property
    def noise(self) -> float:
        """σ², the noise variance of highest evidence at this ridge; the prior precision is ρ/σ².

        Where the ridge was chosen for values, it is raised to what new targets need whose ridge and noise are
        not known: the ridges are averaged over by their evidence, and the noise as in Student's t.
        """
        known = self._evident_noise() * self.record.noise_factor if self._noise is None else self._noise
        return max(known, torch.finfo(torch.float64).tiny)

    def _evident_noise(self) -> float:
        """σ² of highest evidence."""
        return self._solved.noise()

    @property
    @in_exact_mode
    def temperature(self) -> float | None:
        """T of the softmax of outputs with their variance, by leave-one-out; ``None`` for regression."""
        labels = self.labels
        if labels is not None and self._moderation is None:
            variances = self.noise * self._solved.loo_variances().diagonal(dim1=1, dim2=2)
            outputs, labels, variances = self._of_possible(self.loo(), labels, variances.clamp_min(0))
            self._moderation = fit_moderation(outputs, labels, variances)
        return None if self._moderation is None else self._moderation[0]

    @property
    def variance_scale(self) -> float:
        """s, the factor on variances in probabilities; fitted together with ``temperature``."""
        _ = self.temperature
        return 1.0 if self._moderation is None else self._moderation[1]

    @property
    def point_temperature(self) -> float | None:
        """T for outputs without their variance, fitted to the leave-one-out predictions alike."""
        labels = self.labels
        if labels is not None and self._point_temperature is None:
            self._point_temperature = fit_temperature(*self._of_possible(self.loo(), labels))
        return self._point_temperature

    @property
    def _possible(self) -> Tensor | None:
        """The classes that may be predicted; ``None`` for all outputs, which are the network's own."""
        return None

    def _of_possible(self, outputs: Tensor, labels: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Outputs (N, C), labels, and more like outputs, as if there were no other classes than these."""
        seen = self._possible
        if seen is None:
            return outputs, labels, *others
        return outputs[:, seen], torch.searchsorted(seen, labels), *(one[:, seen] for one in others)

    def calibrate(
        self,
        temperature: float | None = None,
        point_temperature: float | None = None,
        variance_scale: float = 1.0,
        noise: float | None = None,
    ) -> None:
        """Take temperatures and noise that are known already, instead of fitting them in closed form.

        Args:
            temperature: T of outputs with their variance.
            point_temperature: T of outputs without it.
            variance_scale: Factor on variances in probabilities.
            noise: σ².

        Raises:
            InputError: If one is not a positive number.
        """
        scale = number("variance_scale", variance_scale, above=0)
        if noise is not None:
            self._noise = number("noise", noise, above=0)
        if temperature is not None:
            self._moderation = number("temperature", temperature, above=0), scale
        if point_temperature is not None:
            self._point_temperature = number("point_temperature", point_temperature, above=0)


def more_data(
    fit: SquaredFit, function: Functional, data: Any, what: str = "the new data"
) -> tuple[Inputs, Targets]:
    """New data for a fit, on its device and with targets like those that it was fitted to."""
    said = Said.known(fit.record.classes)
    x, y = gather_data(data, function, memory=fit.memory, said=said)
    function.check_runs(take(x, slice(0, 1)))
    like = fit._targets
    if like.axis is not None:
        y, counted = position_targets(y, function.output_shape(x), like.axis, like.scale, some=False)
        x = x if counted is None else observe(x, counted)
    c = fit.targets.shape[1]
    if function.check_runs(take(x, slice(0, 1))).numel() == c:  # not several random heads
        check_arrangement(y, function.output_shape(x))
    made = make_targets(y, c, like.scale, varied=False, dtype=fit.targets.dtype)
    if (made.classes is None) != (like.classes is None):
        kind = "integer classes" if like.classes is not None else "float targets (N, C)"
        raise DataError(
            f"y of {what} has type {y.dtype}",
            expected=f"{kind}, as in the data before",
            remedy="convert y with y.long() or y.float()",
        )
    return x, made
