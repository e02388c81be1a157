"""Fits of the squared loss: every answer once, by the solved equations.

    f(x) = m(x) + Φ(x) δ,    δ = argmin ½ Σᵢ ‖tᵢ − f(xᵢ)‖² + ½ ρ‖δ‖²

Prediction, uncertainty, leave-one-out, influence, exact forgetting and updates are linear algebra on this
solution (``linear/system.py``); none of them trains anything. What a model is linear in is a ``Features``
(``linear/features.py``). LQF's objective (Achille et al., CVPR 2021, eq. 3) is Σᵢ ‖·‖² + ½ λ‖δ‖², so its λ is
2ρ; with a mean over N examples it is λ = 2ρ/N.

``LinearFit`` is that of a linearized network, f(x) = f₀(x) + J(x) δ. With ``solver="shared"`` its features
are those of a few combinations of the outputs (``combinations.py``): every output has its own displacements.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.fitting.accuracy import answerable, sound_change
from linnet.fitting.arguments import (
    Choices,
    base_outputs,
    check_ridge,
    count_in_words,
    linear_outputs,
    ridge_grid,
)
from linnet.fitting.composed import Summable
from linnet.fitting.cross_fit import chosen_ridge
from linnet.fitting.export import exported_directions
from linnet.fitting.fitted import Fitted
from linnet.linear.dual import RidgePath
from linnet.linear.features import Heads, Weights
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.normal_system import NormalSystem
from linnet.linear.problem import Problem
from linnet.linear.saved import system_state
from linnet.linear.system import System
from linnet.linear.targets import Targets, check_arrangement, make_targets, position_targets, weighed_targets
from linnet.params import flag, number
from linnet.predictive.noise import fit_temperature
from linnet.tangent.batch import Inputs, observe, observed, take
from linnet.tangent.coordinates import Coordinates
from linnet.tangent.graph import Prototype, Traced
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.nonfinite import check_result

SHARE = 0.25  # of the memory budget that weights kept for predictions may take


class SquaredFit(Fitted):
    """A fit of the squared loss."""

    system: System

    def __init__(self, module: Any, targets: Targets, system: System, record: Choices) -> None:
        super().__init__(module, targets, system, record)
        self._point_temperature: float | None = None
        self._noise: float | None = None

    # -- what was fitted -------------------------------------------------------------------------

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
        return self.system.noise()

    def _left_out_variances(self) -> Tensor:
        """In the unit of the outputs."""
        return self.noise * self.system.loo_variances()

    @property
    def point_temperature(self) -> float | None:
        """T for outputs without their variance, fitted to the leave-one-out predictions alike."""
        labels = self.labels
        if labels is not None and self._point_temperature is None:
            outputs, labels = self._of_possible(self.loo(), labels)
            self._point_temperature = fit_temperature(outputs, labels, None, self._targets.weights)
        return self._point_temperature

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

    # -- predictions -----------------------------------------------------------------------------

    @torch.no_grad()
    def _outputs(self, x: Inputs) -> Tensor:
        """f(x) of shared features: by a kernel that is kept, in weights, or by K(x, X)."""
        system, start = self.system, self._start(x)
        assert isinstance(system, KernelSystem | NormalSystem)
        found, held = system.predicted(x), system.problem.held
        if found is None and self._weights is not None:
            found, held = self._weights(x), None
        if found is None:
            assert isinstance(system, KernelSystem)
            found = torch.cat([system.mean(cross) for cross in system.kernel_to_train(x)])
        if held is not None:
            found = found + held.shift(held.examples(x))
        made = (found + start).to(self._function.dtype)
        check_result(self._function, x, made)
        return made

    @cached_property
    def _weights(self) -> Weights | None:
        """Shared features in weights, formed once; ``None`` where they exceed a share of the memory."""
        problem, memory = self.system.problem, self.memory
        plan = problem.basis.plan(self.system.c, memory)
        if not problem.basis.finite or plan.peak > SHARE * plan.budget:
            return None
        return problem.basis.weights(problem.examples, self.system.coefficients.double(), memory)

    @torch.no_grad()
    def along(self, x: Inputs, ridges: Tensor) -> Tensor:
        """Outputs along a path of ridges.

        Args:
            x: T examples.
            ridges: ρ, (R,).

        Returns:
            (R, T, C).

        Raises:
            InputError: If a ridge is not positive, the fit was solved by iterations, or obeys equations.
        """
        grid, x = ridge_grid(ridges), self._examples(x)
        if self.constraints is not None:
            raise InputError(
                "along() of a fit that obeys equations on outputs",
                expected="a fit whose outputs are f₀ + Jδ with δ by the data alone",
                remedy="take the path of the fit before constrain()",
            )
        found, start = self.system.along_path(x), self._start(x)
        coordinates = found.coordinates.reshape(len(found.values), -1)
        shape = -1, self.system.c
        moved = [(found.rows / (found.values + ridge)) @ coordinates for ridge in grid]
        return torch.stack([start + change.view(shape) for change in moved])

    # -- audits ----------------------------------------------------------------------------------

    @in_exact_mode
    def loo(self) -> Tensor:
        """Outputs for each training example by the fit without it: exactly, without refitting.

        t_i − (M_ii)⁻¹ β_i with M = (K + ρI)⁻¹.

        Where the head was cross-fitted they are the held-out outputs of ``held_out`` instead. At positions
        that do not count (``axis=``, labels of −100) they are the outputs of the fit without the example all
        the same; NaN of cross-fitted heads.

        Returns:
            Leave-one-out outputs (N, C).
        """
        found, (x, mask) = self._left_out(), observed(self.x)
        if mask is None:
            return found
        counted = mask.flatten(1).to(found.device)
        if self.held_out is not None:
            return found.masked_fill(~counted, torch.nan)
        index = (~counted.all(1)).nonzero()[:, 0]
        if not len(index):  # those that have gone
            return found
        plain = take(x, index)
        outputs, begin = self.predict(plain).to(found), 0
        for effect in self.system.effects(plain, self.system.loo_residuals()):  # (N, t, C)
            part = slice(begin, begin := begin + effect.shape[1])
            outputs[part] -= effect[index[part], torch.arange(effect.shape[1])].to(found)
        found[index] = torch.where(counted[index], found[index], outputs)
        return found

    def _left_out(self) -> Tensor:
        """As ``loo``, and zero at positions that do not count, like the targets there."""
        if self.held_out is not None:
            return self.held_out
        residuals = self.system.problem.unscaled(self.system.loo_residuals())
        return self.targets.to(residuals) - residuals

    def path(self, ridges: Tensor | list[float] | None = None) -> RidgePath:
        """Leave-one-out error, GCV, evidence and degrees of freedom along a path of ridges.

        Args:
            ridges: ρ, (R,), all positive; by default nine decades around the scale of the kernel.

        Returns:
            The table.

        Raises:
            InputError: If a ridge is not positive, or the fit was solved by conjugate gradients.
            NumericalError: If a ridge is below what rounding lets be answered.
        """
        given = self._grid() if ridges is None else answerable(self, ridge_grid(ridges))
        found = self.system.path(given, self._targets)
        if (w := self._targets.weights) is None:
            return found
        mean = float(w.double().mean())  # Σ w e² / Σ w, however large the weights are
        return replace(found, loo_error=found.loo_error / mean, gcv=found.gcv / mean)

    @abstractmethod
    def _grid(self) -> Tensor | None:
        """Ridges of the default path, (R,); ``None`` for those of the equations."""

    # -- changes ---------------------------------------------------------------------------------

    def _check_new_ridge(self, ridge: Any) -> None:
        """Raise unless it is a positive number or a criterion."""
        if ridge is not None:
            check_ridge(ridge)

    def _weighed_problem(self, targets: Targets) -> Problem:
        """By the noise of each example."""
        return self.system.problem.weighing(targets.weights)

    def _updated(self, x: Inputs, y: Tensor, ridge: Any, start: float, sample_weight: Any) -> Self:
        """The fit with more examples, the ridge kept, given or chosen by a criterion."""
        x, new = self._like(x, y)
        new = weighed_targets(new, sample_weight)
        system = self.system.extended(self._more(x, new))
        targets = self._targets.joined(new)
        what, factor = f"added {count_in_words(len(new.values))}", self.record.noise_factor
        if isinstance(ridge, str):
            taken = chosen_ridge(system.path(None, targets), ridge, targets)
            system, factor = system.at(taken.ridge), taken.noise_factor
            what = f"{what}; the ridge chosen by {ridge}"
        elif ridge is not None:
            system, factor = system.at(float(ridge)), 1.0
            what = f"{what}; the ridge set to {float(ridge):.4g}"
        fitted = sound_change(self._changed(targets, system, what, start))
        criterion = ridge if isinstance(ridge, str) else fitted.record.criterion
        fitted.record = replace(fitted.record, criterion=criterion, noise_factor=factor)
        return fitted

    def _relabelled(self, index: Tensor, x: Inputs, y: Tensor) -> tuple[Targets, System]:
        """The same equations for other targets."""
        if self._targets.axis is not None:
            raise InputError(
                "relabel() of a fit with a class at every position",
                expected="one class or target for each example",
                remedy="forget the examples, and update the fit with them",
            )
        return self._retargeted(index, self._like(x, y, "the new labels")[1].values)

    def _retargeted(self, index: Tensor, new: Tensor) -> tuple[Targets, System]:
        """The same equations for other targets (k, C) of some examples."""
        values, problem = self.targets.clone(), self.system.problem
        values[index] = new.to(values)
        residual = problem.residual + problem.scaled(values - self.targets).to(problem.residual)
        return replace(self._targets, values=values), self.system.with_residual(residual)

    def _more(self, x: Inputs, new: Targets) -> Problem:
        """More data of the same model."""
        start = self._start(x)
        more = self.system.problem.of(x, new.values.to(start) - start)
        return more if self._targets.weights is None else more.weighing(new.every_weight)

    def _like(self, x: Inputs, y: Tensor, what: str = "the new data") -> tuple[Inputs, Targets]:
        """Inputs, and targets like those that the fit was made of."""
        function, like = self._function, self._targets
        if like.axis is not None:
            y, counted = position_targets(y, function.output_shape(x), like.axis, like.scale, some=False)
            x = x if counted is None else observe(x, counted)
        c = self.targets.shape[1]
        if function.check_runs(take(x, slice(0, 1))).numel() == c:  # not several random heads
            check_arrangement(y, function.output_shape(x))
        made = make_targets(y, c, like.scale, varied=False, dtype=self.targets.dtype)
        if (made.classes is None) != (like.classes is None):
            kind = "integer classes" if like.classes is not None else "float targets (N, C)"
            raise DataError(
                f"y of {what} has type {y.dtype}",
                expected=f"{kind}, as in the data before",
                remedy="convert y with y.long() or y.float()",
            )
        return x, made

    @torch.no_grad()
    def recomputed(self, *, scales: bool = False) -> Self:
        """The same fit from the network and the training data alone: nothing but the model is kept.

        Args:
            scales: Whether a fit of ``linnet.adapt`` takes the mean and the scales of its features anew too,
                and landmarks: after ``forget`` nothing but the ridge and the shares of the layers then knows
                what was forgotten. Fits of ``linnet.fit`` have none.

        Returns:
            A fit to compare with, after many changes; with ``scales`` what ``linnet.adapt`` gives for these
            examples, ridge and shares.

        Raises:
            InputError: If the fit was solved by iterations, or obeys equations on outputs.
        """
        flag("scales", scales)
        return self._made(self.system.again(), self._targets, self.record)


class LinearFit(SquaredFit, Summable):
    """A solved linear fit. ``linnet.fit`` makes it.

    Args:
        module: The linearized network; its δ is set to the solution.
        targets: Training targets.
        system: The solved equations.
        record: What was chosen and why.

    Attributes:
        module: The trained ``Linearized``; at δ = 0 with ``solver="shared"``.
        system: The solved equations, in samples or in weights.
        record: What was chosen and why.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> x = torch.ones(3, 2).cumsum(0)
        >>> fit = linnet.fit(linnet.linearize(net), (x, x[:, :1]))
        >>> fit.loo().shape, fit.forget([0]).n
        (torch.Size([3, 1]), 2)
    """

    module: Linearized

    def _compared(self) -> tuple[Any, ...]:
        """What processes that ask it together must have alike; each may have rounded its δ by itself."""
        return self.module.function, self.x, self.targets, f"{self.ridge:.4g}"

    @property
    def combinations(self) -> Tensor | None:
        """V, (C, M), whose columns are the combinations of outputs that make a shared kernel."""
        basis = self.system.problem.free
        return basis.combinations if isinstance(basis, Heads) else None

    @torch.no_grad()
    def displacement(self) -> dict[str, Tensor]:
        """δ of every weight of the network, also where the fit has other coordinates.

        Returns:
            Copies, by parameter name; of a sketched network or one with a metric δ = H ε.

        Raises:
            InputError: If every output has displacements of its own (``solver="shared"``).
        """
        model, delta = self.module.model, self.delta
        found = model.displacement(delta["epsilon"]) if isinstance(model, Coordinates) else delta
        return {name: t.clone() for name, t in found.items()}

    def _start(self, x: Inputs) -> Tensor:
        """f₀(x)."""
        base = base_outputs(self.module, x)
        return base.double() if self.system.shared else base

    def _grid(self) -> None:
        """Those of the equations."""

    @property
    def _roots(self) -> Tensor | None:
        """√w I of examples that count more than others, (N, C, C)."""
        w = self._targets.weights
        if w is None:
            return None
        eye = torch.eye(self.system.c, dtype=w.dtype, device=w.device)
        found: Tensor = w.sqrt()[:, None, None] * eye
        return found

    def _outputs(self, x: Inputs) -> Tensor:
        """f₀(x) + J(x)δ."""
        return super()._outputs(x) if self.system.shared else linear_outputs(self.module, x)

    def _plain(self, like: Prototype, variance: bool, kind: torch.dtype | None) -> Traced:
        """The model as a plain module; of one kernel for all outputs with displacements of every output."""
        if not self.system.shared:
            return super()._plain(like, variance, kind)
        if variance:
            self._require_one_delta("export(variance=True)")
        problem, function = self.system.problem, self.module.function
        beta, combinations = self.system.coefficients.double(), self.combinations
        assert combinations is not None
        return exported_directions(
            function,
            problem.basis.plan(self.system.c, self.memory, ["the same in the module"]),
            lambda: problem.basis.weights(problem.examples, beta, self.memory).directions[0].by_output(),
            combinations.T.to(function.device, function.dtype),
            like,
        )

    def summary(self) -> dict[str, Any]:
        """As of every fit, and the number of combinations of outputs that make a shared kernel.

        Returns:
            A dict that ``json`` can write.
        """
        shared = {} if self.combinations is None else {"combinations": self.combinations.shape[1]}
        return super().summary() | shared

    def _state(self) -> dict[str, Any]:
        """The solved equations."""
        return {
            "loss": self.loss,
            "solved": system_state(self.system),
            "residual": self.system.problem.free_residual,
            "combinations": self.combinations,
        }
