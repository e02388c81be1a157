"""What every fit of data answers, whatever its loss and features, by its solved equations."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, fx

from linnet import pages
from linnet.errors import InputError
from linnet.fitting.accuracy import sound_change
from linnet.fitting.arguments import count_in_words
from linnet.fitting.export import ExportedPosterior, checked_module, exported_fit
from linnet.fitting.plots import FitPlots, eigenvalues_of
from linnet.fitting.solved_fit import SolvedFit
from linnet.linear.constraints import wanted
from linnet.linear.dual import CriteriaByRidge
from linnet.linear.kernel_system import SHARE
from linnet.linear.targets import Targets
from linnet.memory import Plan, parse_bytes, require
from linnet.params import flag, number
from linnet.predictive.conformal import CoveringModel, Unseen
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.noise import Noise, fit_moderation, probabilities
from linnet.shown import frame, outputs
from linnet.tangent.batch import Inputs, batch_size, observed, split, take
from linnet.tangent.data import owned
from linnet.tangent.graph import Prototype, Traced
from linnet.tangent.inputs import in_rows
from linnet.tangent.modes import in_exact_mode

if TYPE_CHECKING:
    from pandas import DataFrame

# The power of the noise factor by which errors are raised: on simulated tasks as much as with a ridge chosen
# anew without each example (experiments/coverage/conformal.py). The factor itself is for Student's t as well.
RAISED = 0.25
TRACED = 3  # examples on which an exported model is compared with the fit


class Fitted(SolvedFit, CoveringModel):
    """Base class of all fits of data: what every loss answers alike, by its solved equations.

    Args:
        module: What the model is made of: a ``Linearized``, whose δ is set to the solution, or a network with
            random heads.
        targets: Training targets.
        system: The solved equations.
        record: What was chosen and why.

    Attributes:
        module: The same; a ``Linearized`` stays at δ = 0 where every output has weights of its own.
        system: The solved equations, in samples or in weights.
        record: What was chosen and why.
        x: Training inputs, N examples.
        held_out: Outputs by a procedure that has not seen the example, where the head was cross-fitted.
    """

    _moderation: tuple[float, float] | None = None  # temperature and scale of the variance
    _own_temperature: float | None = None  # where the loss knows it
    chosen_path: CriteriaByRidge | None = None  # the path that the ridge was chosen from, where it is kept

    # -- what a subclass says --------------------------------------------------------------------

    @abstractmethod
    def _start(self, x: Inputs) -> Tensor:
        """m(x), (T, C), the mean before the data."""

    @abstractmethod
    def _outputs(self, x: Inputs) -> Tensor:
        """f(x), (T, C), of examples that were checked."""

    @property
    def _unit(self) -> float:
        """The noise that ρ is in units of."""
        return self.noise

    @property
    def _possible(self) -> Tensor | None:
        """The classes that may be predicted; ``None`` for all outputs, which are the network's own."""
        return None

    @property
    @in_exact_mode
    def temperature(self) -> float | None:
        """T of the softmax of outputs with their variance, by leave-one-out; ``None`` for regression."""
        labels = self.labels
        if labels is not None and self._moderation is None:
            found = self._left_out_variances()
            if found is None:
                self._moderation = 1.0, 1.0
            else:
                variances = found.diagonal(dim1=1, dim2=2).clamp_min(0).expand(-1, self.system.c)
                outputs, labels, variances = self._of_possible(self.loo(), labels, variances)
                weights, known = self._targets.weights, self._own_temperature
                self._moderation = fit_moderation(outputs, labels, variances, weights, known)
        return None if self._moderation is None else self._moderation[0]

    @property
    def variance_scale(self) -> float:
        """s, the factor on variances in probabilities; fitted together with ``temperature``."""
        _ = self.temperature
        return 1.0 if self._moderation is None else self._moderation[1]

    @abstractmethod
    def _left_out_variances(self) -> Tensor | None:
        """Covariances of leave-one-out outputs, (N, C, C), or (N, 1, 1) of outputs that share them.

        ``None`` where they would take too long.
        """

    def _of_possible(self, outputs: Tensor, labels: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Outputs (N, C), labels, and more like outputs, as if there were no other classes than these."""
        seen = self._possible
        if seen is None:
            return outputs, labels, *others
        return outputs[:, seen], torch.searchsorted(seen, labels), *(one[:, seen] for one in others)

    @property
    def is_probe(self) -> bool:
        """Whether the fit is a linear probe alone."""
        return False

    @property
    def body_weight(self) -> float | None:
        """Share of the layers below a linear probe; ``None`` where the fit has no probe of its own."""
        return None

    @property
    def labels(self) -> Tensor | None:
        """Training classes (N,), the likeliest of soft labels; ``None`` for regression."""
        return self._targets.labels

    @abstractmethod
    def loo(self) -> Tensor:
        """Leave-one-out outputs, (N, C)."""

    def _left_out(self) -> Tensor:
        """Leave-one-out outputs, (N, C), zero where an output does not count."""
        return self.loo()

    @in_exact_mode
    def loo_probs(self) -> Tensor:
        """Probabilities of the classes for each training example by the fit without it.

        The softmax of ``loo``, as it was calibrated by all of them; what tools that ask for held-out
        probabilities take, such as ``pred_probs`` of cleanlab.

        Returns:
            (N, C), and (N, 2) for one output.

        Raises:
            InputError: If the fit is one of values.

        Example:
            >>> import linnet
            >>> x = torch.randn(20, 2)
            >>> fit = linnet.fit(linnet.linearize(torch.nn.Linear(2, 2)), (x, (x[:, 0] > 0).long()))
            >>> fit.loo_probs().sum(1).allclose(torch.ones(20).double())
            True
        """
        if self.labels is None:
            raise InputError("loo_probs() of a fit of values", "a fit of classes", "take loo()")
        return self._class_probs(self.loo().double())

    @abstractmethod
    def path(self, ridges: Tensor | list[float] | None = None) -> CriteriaByRidge:
        """Every criterion along a path of ridges."""

    def _eigenvalues(self) -> Tensor:
        """Eigenvalues of the kernel of the training examples, or an error where nothing was factorized."""
        return eigenvalues_of(self.system)

    # -- predictions -----------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """The outputs f(x).

        Args:
            x: T examples.

        Returns:
            Outputs (T, C); for classes, the largest is the prediction.

        Raises:
            DataError: If x is empty or not finite.
            NumericalError: If outputs overflow.
        """
        return self._outputs(self._examples(x))

    @in_exact_mode
    def predictive(self, x: Inputs, joint: bool = False) -> GaussianPredictive:
        """The posterior of the outputs: mean f, covariance σ² J (JᵀΛJ + ρI)⁻¹ Jᵀ.

        Of the squared loss Λ = I. Of the cross-entropy it is Laplace's, with σ² = 1 and Λ at the optimum,
        which is never inverted: examples fitted with certainty, whose Λ is zero, are as good as others.

        Args:
            x: T examples.
            joint: Whether covariances between examples are wanted, (T, C, T, C).

        Returns:
            A Gaussian for each example, or of all together; with classes its ``probs`` are (T, C), and (T, 2)
            for one output.

        Raises:
            DataError: If x is empty or not finite.
        """
        x = self._examples(x)
        targets = Noise(self.noise, self.temperature, self.variance_scale, self._possible)
        one = None if flag("joint", joint) else self.system.shared_variance(x)
        mean = self._outputs(x)
        if one is not None:
            variance = (self._unit / self.ridge * one).to(mean.dtype)[:, None].expand_as(mean)
            return GaussianPredictive(mean, variance.diag_embed, targets, variance=variance)
        covariance = self.system.covariance(x, joint) / self.ridge
        turned = covariance.permute(2, 3, 0, 1) if joint else covariance.mT
        spread = (self._unit * (covariance + turned) / 2).to(mean.dtype)
        return GaussianPredictive(mean, spread, targets, joint=joint)

    @property
    @abstractmethod
    def point_temperature(self) -> float | None:
        """T for outputs without their variance; ``None`` for regression."""

    def _class_probs(self, outputs: Tensor) -> Tensor:
        """Probabilities of classes by outputs alone."""
        assert self.point_temperature is not None
        return probabilities(outputs, None, self.point_temperature, self._possible)

    def _unseen(self) -> Unseen:
        """Outputs for each training example by what has not seen it, all of which count."""
        self._require_one_target("intervals and sets")
        factor = max(1.0, self.record.noise_factor) ** RAISED if self.held_out is None else 1.0
        outputs, weights = self.loo().double(), self._targets.weights
        return Unseen(self.x, outputs, self.targets, self.labels, self._class_probs, weights, factor)

    def _require_one_target(self, what: str) -> None:
        """Raise unless each example has one class, or targets of all outputs."""
        if self._targets.axis is not None or observed(self.x)[1] is not None:
            raise InputError(
                f"{what} of a fit of positions, or of which some outputs do not count",
                expected="a class, or a target for each output, of each example",
                remedy="fit examples that have one",
            )

    def _without_each(self, x: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs of some examples at a time, (t, C), and by each fit without one of its own, (N, t, C)."""
        # of (N, t, C): effects, outputs, probabilities, their order, scores and what they are made of
        each = 8 * 8 * self.n * self.system.c
        size = max(1, int(SHARE * parse_bytes(self.memory, self._function.device)) // each)
        residuals = None if self.held_out is not None else self.system.loo_residuals()
        for part in split(x, size):
            # the outputs come after the effects, whose kernel they then take
            effects = None if residuals is None else torch.cat([*self.system.effects(part, residuals)], 1)
            outputs = self._outputs(part).double()
            yield outputs, outputs[None] if effects is None else outputs - effects.double()

    # -- weights ---------------------------------------------------------------------------------

    @abstractmethod
    def _weighed_problem(self, targets: Targets) -> Any:
        """The data of the fit with the weights of targets."""

    def _weighing(self) -> Self:
        """The same fit, of which every example has a weight."""
        if self._targets.weights is not None:
            return self
        if self.trained or self._targets.axis is not None:
            return super()._weighing()
        targets, system = replace(self._targets, weights=self._targets.every_weight), copy(self.system)
        system.problem = self._weighed_problem(targets)
        made = self._made(system, targets, self.record)
        made.held_out = self.held_out
        return made

    # -- audits ----------------------------------------------------------------------------------

    @in_exact_mode
    def influence(self, x: Inputs) -> Tensor:
        """Influence of each training example on each prediction: prediction with it minus without it.

        Exact for the squared loss, by one exact Newton step from the optimum for the cross-entropy.

        Args:
            x: T examples.

        Returns:
            (N, T, C), in units of the outputs.

        Raises:
            DataError: If x is empty or not finite.

        Source:
            Achille et al., CVPR 2021, eq. (7), (8) and appendix A.3, without their approximation; Koh and
            Liang, ICML 2017, with the example's own curvature taken out of the Hessian.
        """
        x = self._examples(x)
        count = self.n * batch_size(x) * self.system.c
        items = (("influences, in parts and whole", 2 * 8 * count),)
        budget = parse_bytes(self.memory, self.module.function.device)
        plan = Plan(f"influence on {batch_size(x)} examples", budget, items)
        require(plan, ["ask for fewer examples at a time", "raise memory="])
        residuals = self.system.loo_residuals()
        # f(x) − f₋ᵢ(x) = K(x,X) M_·i (M_ii)⁻¹ β_i
        return torch.cat(list(self.system.effects(x, residuals)), 1)

    @in_exact_mode
    def informativeness(self, x: Inputs | None = None) -> Tensor:
        """Functional information of each training example: the change of predictions without it.

        Args:
            x: The examples whose predictions count; by default the training examples, at the positions that
                count where labels are −100 at others (``axis=``).

        Returns:
            Mean over x of ‖f(x) − f₋ᵢ(x)‖², (N,).

        Raises:
            DataError: If x is empty or not finite.

        Source:
            Achille et al., CVPR 2021, eq. (9).
        """
        residuals = self.system.loo_residuals()
        if x is None and self._targets.weights is None:
            return self.system.reach(residuals) / self.n
        x = self.x if x is None else x
        x, total = self._examples(x), torch.zeros_like(residuals[:, 0])
        if self.system.problem.each < self.system.c:  # one A of all outputs: |A r| = |A| |r|
            residuals = residuals.norm(dim=1, keepdim=True)
        for part in self.system.effects(x, residuals):
            total += part.square().sum((1, 2)).to(total)
        return total / batch_size(x)

    @in_exact_mode
    def constrain(
        self, x: Inputs, targets: Any = None, groups: Any = None, *, weight: float | None = None
    ) -> Self:
        """The optimum among outputs that obey linear equations, on top of those that hold already.

        Outputs are held at old predictions (backward compatibility) or other values; groups get equal
        mean outputs (linear fairness). ``forget`` and ``update`` keep the equations, and leave-one-out,
        influence and covariances are those of the fit that obeys them.

        Args:
            x: M examples.
            targets: Outputs (M, C) to hold, NaN where an output is free; integer classes (M,) stand for
                their training targets, for the squared loss.
            groups: (M,) integers: every output has the same mean over each of the groups.
            weight: w, to add ½w‖S f − v‖² to the objective instead of requiring S f = v, at any ridge.

        Returns:
            A new fit; ``summary()["reasons"]["constraints"]`` says what holds and what was redundant.

        Raises:
            InputError: If equations contradict each other, or an argument does not fit the inputs.
            MemoryBudgetError: If there are too many equations for the budget.

        Example:
            >>> import linnet
            >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
            >>> x = torch.eye(3, 2).double()
            >>> fit = linnet.fit(linnet.linearize(net.double()), (x, x[:, :1]))
            >>> fit.constrain(x[:1], torch.tensor([[0.25]])).predict(x[:1])
            tensor([[0.2500]], dtype=torch.float64)
        """
        start = time.perf_counter()
        if self.trained:
            raise InputError(
                "constrain() of a fit whose lower layers were trained",
                expected="a fit whose leave-one-out is its own: held-out folds know of no equations",
                remedy="adapt with tune=False",
            )
        if weight is not None:
            number("weight", weight, above=0, remedy="leave weight= out for equations that hold exactly")
        targets, groups = in_rows(x, targets, "targets"), in_rows(x, groups, "groups")
        x = owned(self._examples(x), self.memory)
        like = self._targets if self.loss == "squared" else None  # logits have no targets
        asked = wanted(x, targets, groups, like, self.system.c, self._function.device)
        system = self.system.constrained(asked, self._start(x), weight)
        what = f"constrained {count_in_words(batch_size(x))}"
        made = self._changed(self._targets, system, what, start)
        # adapt tells its rounding when it is made, beside an intercept that is exact
        return made if self.body_weight is not None else sound_change(made)

    # -- reports and tables ----------------------------------------------------------------------

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

    def monitor(
        self, batches: Any, *, shifts: Any = None, level: float = 0.05, top: int = 10
    ) -> Iterator[Any]:
        """Watch the fit in use: a record for each batch of new examples, without labels.

        The same as ``linnet.audit.monitor(fit, batches)``, which says what a record promises.

        Args:
            batches: Batches of inputs: a ``DataLoader``, a list or another iterable; or one batch.
            shifts: What inputs may meet in use: functions of training inputs, by name, or these altered.
            level: Share of batches without a shift that may be alarms.
            top: Number of training examples that a drifted batch is traced to.

        Returns:
            An iterator over records: the expected ``accuracy`` or ``rms_error``, ``p_value``, ``drifted``,
            the shift that a batch is ``like`` and its ``share``, ``leans``, and ``to_json()``.

        Raises:
            InputError: If the fit has no leave-one-out that is honest, or an argument is out of range.

        Example:
            >>> import linnet
            >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
            >>> fit = linnet.fit(linnet.linearize(torch.nn.Linear(2, 2)), (x, (x[:, 0] > 0).long()))
            >>> [record.drifted for record in fit.monitor([x + 9])]
            [True]
        """
        return pages.of_batches(self, batches, shifts=shifts, level=level, top=top)

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

    def export(
        self, x: Inputs | None = None, *, variance: bool = False, other_sizes: bool = True
    ) -> fx.GraphModule:
        """The fitted model as a plain module of torch's operations, which needs nothing of linnet.

        It returns what ``predict`` does, for batches of any size, and works with ``torch.export``,
        ``torch.onnx.export(..., dynamo=True)`` and ``torch.compile``. Images and sequences may have other
        sizes where the network allows it, and its layers do not pad by their size;
        ``module.meta["dynamic_shapes"]`` says which axes vary, as the exporters take it; the module refuses
        other sizes. It is compared with the fit, at other sizes too, before it is returned.

        Args:
            x: Examples like those to come; by default training examples.
            variance: Whether it returns the variance of each output (N, C) beside the outputs, that of
                ``predictive``, exactly: in the last linear layer, along the directions of a sketch, and in
                all weights as far as a factor of P times the fewer of P and N·C numbers fits the memory;
                for ``linnet.adapt`` with lower layers, four times P times N. Not with ``solver="shared"``.
            other_sizes: Whether images and sequences may have other sizes than those of x, where the network
                allows it. To find out takes minutes of a network that pads by the sizes of its inputs.

        Returns:
            The module in evaluation mode: from the network's own inputs to outputs (N, C), or to both.

        Raises:
            DataError: If x is empty or not finite.
            InputError: If ``variance`` or ``other_sizes`` is no bool.
            MemoryBudgetError: If the variance, or a module of ``linnet.adapt``, would hold too much.
            ModelError: If ``torch.export`` cannot trace the network, or torch its derivatives.

        Example:
            >>> import linnet
            >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            >>> x = torch.linspace(-1, 1, 20).view(10, 2)
            >>> fit = linnet.fit(linnet.linearize(net, params="last-layer"), (x, x[:, :1]))
            >>> [out.shape for out in fit.export(variance=True)(x)]
            [torch.Size([10, 1]), torch.Size([10, 1])]
        """
        flag("variance", variance)
        given = self.x if x is None else x
        like = Prototype(self._examples(take(observed(given)[0], slice(0, TRACED))))
        like = like if flag("other_sizes", other_sizes) else like.rigid()

        def answer(part: Inputs) -> tuple[Tensor, ...]:
            if not variance:
                return (self.predict(part),)
            found = self.predictive(part)
            return found.mean, found.variance

        return checked_module(lambda like, kind: self._plain(like, variance, kind), like, answer)

    def _plain(self, like: Prototype, variance: bool, kind: torch.dtype | None) -> Traced:
        """The model as a plain module, its variances computed in a type, or in the network's."""
        if not variance:
            return exported_fit(self.module, like, None, kind)
        posterior = ExportedPosterior(
            self.x, self.ridge, self._unit, self._roots, self.memory, self.system.constraints
        )
        return exported_fit(self.module, like, posterior, kind)

    @property
    def _roots(self) -> Tensor | None:
        """L with Λ = LLᵀ at the optimum, (N, C, D); ``None`` for the identity."""
        return None
