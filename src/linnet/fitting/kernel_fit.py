"""Fits by one kernel for all outputs: K ⊗ I, of which only the (N, N) factor is formed.

    f(x) = m(x) + Σᵢ K(x, xᵢ) βᵢ,        β = (K + ρI)⁻¹ (t − m(X))

with m the mean before the data. Every output has the same posterior variance. A subclass says what the mean
and the kernel are; all answers follow.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from linnet.fitting.arguments import positions, ridge_grid
from linnet.fitting.evaluation import count_in_words
from linnet.fitting.fitted import SquaredFit
from linnet.fitting.known_rows import Rows
from linnet.fitting.record import Record
from linnet.linear.dual import DualSystem, RidgePath
from linnet.linear.targets import Targets
from linnet.memory import Plan
from linnet.params import flag
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.noise import Noise
from linnet.tangent.batch import Inputs, batch_size, concatenate, hash_examples, take
from linnet.tangent.functional import Functional
from linnet.tangent.gather import examples
from linnet.tangent.nonfinite import check_result

SHARE = 0.25  # of the memory budget that directions kept for predictions may take


class KernelFit(SquaredFit):
    """Base class of fits by one kernel for all outputs."""

    def __init__(self, x: Inputs, targets: Targets, system: DualSystem, record: Record) -> None:
        super().__init__(targets, record)
        self.x, self.system = x, system
        self._rows = Rows()

    @property
    def _solved(self) -> DualSystem:
        """The solved equations."""
        return self.system

    # -- what a subclass says --------------------------------------------------------------------

    @property
    @abstractmethod
    def _function(self) -> Functional:
        """The network that runs on the examples, in whose type predictions are."""

    @abstractmethod
    def _start(self, x: Inputs) -> Tensor | float:
        """m(x), (T, C), the mean before the data."""

    @abstractmethod
    def _cross(self, x: Inputs) -> Tensor:
        """K(x, X), (T, N)."""

    @abstractmethod
    def _own(self, x: Inputs) -> Tensor:
        """K(x_i, x_i), (T,)."""

    @abstractmethod
    def _cross_and_own(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """K(x, X) and K(x_i, x_i), with one pass over x."""

    @abstractmethod
    def _square(self, x: Inputs) -> Tensor:
        """K(x, x), (T, T)."""

    @abstractmethod
    def _weights_plan(self) -> Plan:
        """The memory of the fit in its weights."""

    @abstractmethod
    def _by_weights(self) -> Callable[[Inputs], Tensor]:
        """The fit in its weights, examples to f(x)."""

    @abstractmethod
    def _made(self, x: Inputs, targets: Targets, system: DualSystem, record: Record) -> Self:
        """A fit of another system with the same kernel."""

    @abstractmethod
    def ridges(self) -> Tensor:
        """Ridges of the path that is shown by default, the fit's own among them, (R,)."""

    # -- predictions -----------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """f(x).

        Args:
            x: T examples.

        Returns:
            Outputs (T, C); for classes, the largest is the prediction.

        Raises:
            DataError: If x is empty or not finite.
            NumericalError: If outputs overflow.
        """
        x = self._checked(x)
        cross = self._rows.known(hash_examples(x))
        if cross is None and (outputs := self._weights) is not None:
            found = outputs(x).to(self._function.dtype)
        else:
            found = self._mean(self._to_train(x) if cross is None else cross, self._start(x))
        check_result(self._function, x, found)
        return found

    @cached_property
    def _weights(self) -> Callable[[Inputs], Tensor] | None:
        """The fit in its weights, formed once; ``None`` where they exceed a share of the memory."""
        plan = self._weights_plan()
        return self._by_weights() if plan.peak <= SHARE * plan.budget else None

    @torch.no_grad()
    def predictive(self, x: Inputs, joint: bool = False) -> GaussianPredictive:
        """The posterior of the outputs: mean f and variance σ²/ρ [K(x,x) − K(x,X) M K(X,x)], M = (K + ρI)⁻¹.

        Args:
            x: T examples.
            joint: Whether covariances between examples are wanted, (T, C, T, C).

        Returns:
            A Gaussian for each example, or of all together; outputs are independent and of one variance.

        Raises:
            DataError: If x is empty or not finite.
        """
        x = self._checked(x)
        if flag("joint", joint):
            return self._joint(x)
        names = hash_examples(x)
        cross = self._rows.known(names)
        if cross is None:
            cross, own = self._cross_and_own(x)
            self._rows.keep(names, cross)
        else:
            own = self._own(x)
        explained = (self.system.cross(cross) * cross).sum(1)
        variance = self.noise / self.ridge * (own - explained).clamp_min(0)
        mean = self._mean(cross, self._start(x))
        eye = torch.eye(self.system.c, dtype=mean.dtype, device=mean.device)
        spread = variance.to(mean.dtype)[:, None, None] * eye
        targets = Noise(self.noise, self.temperature, self.variance_scale, self._possible)
        return GaussianPredictive(mean, spread, targets)

    def _joint(self, x: Inputs) -> GaussianPredictive:
        """The posterior of the outputs for all examples together."""
        cross = self._to_train(x)
        covariance = self.noise / self.ridge * (self._square(x) - self.system.cross(cross) @ cross.T)
        mean = self._mean(cross, self._start(x))
        eye = torch.eye(self.system.c, dtype=mean.dtype, device=mean.device)
        spread = torch.einsum("ij,cd->icjd", ((covariance + covariance.T) / 2).to(mean.dtype), eye)
        targets = Noise(self.noise, self.temperature, self.variance_scale, self._possible)
        return GaussianPredictive(mean, spread, targets, joint=True)

    def _checked(self, x: Inputs) -> Inputs:
        """Examples, or an error."""
        x = examples(self._function, x)
        self._function.check_runs(take(x, slice(0, 1)))
        return x

    def _to_train(self, x: Inputs) -> Tensor:
        """K(x, X), (T, N), known or formed."""
        names = hash_examples(x)
        cross = self._rows.known(names)
        if cross is None:
            cross = self._cross(x)
            self._rows.keep(names, cross)
        return cross

    def _mean(self, cross: Tensor, start: Tensor | float = 0.0) -> Tensor:
        """m(x) + K(x, X) β in the network's type."""
        return (cross @ self.system.beta + start).to(self._function.dtype)

    # -- audits ----------------------------------------------------------------------------------

    def loo(self) -> Tensor:
        """Outputs for each training example by the fit without it: exactly, without refitting.

        Where outputs were held out by a procedure that has not seen the example, they are those of
        ``held_out`` instead.

        Returns:
            Leave-one-out outputs (N, C); kernel and ridge are kept.
        """
        if self.held_out is not None:
            return self.held_out
        residuals = self.system.loo_residuals()
        return self.targets.to(residuals) - residuals

    @torch.no_grad()
    def influence(self, x: Inputs) -> Tensor:
        """Influence of each training example on each prediction: prediction with it minus without it.

        Args:
            x: T examples.

        Returns:
            (N, T, C), in units of the outputs.

        Raises:
            DataError: If x is empty or not finite.
        """
        solved = self.system.cross(self._to_train(self._checked(x)))
        return torch.einsum("tn,nc->ntc", solved, self.system.loo_residuals())

    @torch.no_grad()
    def informativeness(self, x: Inputs | None = None) -> Tensor:
        """Change of predictions without each training example.

        Args:
            x: The examples whose predictions count; by default the training examples.

        Returns:
            Mean over x of ‖f(x) − f₋ᵢ(x)‖², (N,).

        Raises:
            DataError: If x is empty or not finite.
        """
        if x is None:  # K M = I − ρM
            solved = -self.ridge * self.system.inverse
            solved.diagonal().add_(1)
        else:
            solved = self.system.cross(self._to_train(self._checked(x)))
        return solved.square().mean(0) * self.system.loo_residuals().square().sum(1)

    def path(self, ridges: Tensor | list[float] | None = None) -> RidgePath:
        """Leave-one-out error, GCV, evidence and degrees of freedom along a path of ridges.

        Args:
            ridges: ρ, (R,), all positive; by default decades around the one that was chosen.

        Returns:
            The table, of the kernel that the fit has.

        Raises:
            InputError: If a ridge is not positive.
            NumericalError: If a ridge is below what rounding lets be answered.
        """
        given = self.ridges() if ridges is None else self._answerable(ridge_grid(ridges))
        return self.system.spectrum.path(given, self.classes is not None, self.targets)

    def _answerable(self, ridges: Tensor) -> Tensor:
        """Ridges of a path, or an error where rounding leaves nothing of the solution."""
        return ridges

    @torch.no_grad()
    def along(self, x: Inputs, ridges: Tensor) -> Tensor:
        """Outputs along a path of ridges.

        Args:
            x: T examples.
            ridges: ρ, (R,).

        Returns:
            (R, T, C).

        Raises:
            InputError: If a ridge is not positive.
        """
        grid, x = ridge_grid(ridges), self._checked(x)
        cross, start, spectrum = self._to_train(x), self._start(x), self.system.spectrum
        coordinates = spectrum.coordinates.reshape(len(spectrum.values), -1)
        turned = cross @ spectrum.vectors
        return torch.stack([start + (turned / (spectrum.values + ridge)) @ coordinates for ridge in grid])

    # -- changes ---------------------------------------------------------------------------------

    @torch.no_grad()
    def forget(self, indices: Any) -> Self:
        """The fit without some training examples, exactly and without refitting.

        The kernel, its scale and the ridge stay as they are.

        Args:
            indices: Their positions in the training data, each once.

        Returns:
            A new fit on the remaining examples.

        Raises:
            InputError: If an index is out of range or given twice, or nothing would be left.
        """
        start = time.perf_counter()
        index = positions(indices, self.n).to(self.system.kernel.device)
        keep = self._left(index)
        targets = replace(self._targets, values=self.targets[keep])
        what = f"forgot {count_in_words(len(index))}"
        left = take(self.x, keep.nonzero()[:, 0])
        return self._changed(left, targets, self.system.removed(index), what, start)

    def _left(self, index: Tensor) -> Tensor:
        """Which examples are left without some, (N,) of bools."""
        keep = torch.ones(self.n, dtype=torch.bool, device=index.device)
        keep[index] = False
        return keep

    def _more(self, x: Inputs, new: Targets, start: float) -> Self:
        """The fit with more examples at the same kernel and ridge."""
        joined = concatenate([self.x, x])
        targets = replace(self._targets, values=torch.cat([self.targets, new.values.to(self.targets)]))
        residual = new.values.to(self.system.residual) - self._start(x)
        system = self.system.extended(self._to_train(x).T, self._square(x), residual)
        return self._changed(joined, targets, system, f"added {count_in_words(batch_size(x))}", start)

    def _changed(self, x: Inputs, targets: Targets, system: DualSystem, what: str, start: float) -> Self:
        """A new fit of another system with the same kernel, and with what was done."""
        reasons = {**self.record.reasons, "change": what}
        seconds = {**self.record.seconds, "change": time.perf_counter() - start}
        return self._made(x, targets, system, replace(self.record, reasons=reasons, seconds=seconds))

    @torch.no_grad()
    def recomputed(self) -> Self:
        """The same fit from the network and the training data alone: nothing but the kernel is kept.

        Returns:
            A fit to compare with, after many changes.
        """
        residual = self.targets.to(self.system.residual) - self._start(self.x)
        system = DualSystem(self._square(self.x), residual, self.ridge)
        made = self._made(self.x, self._targets, system, self.record)
        made.held_out = self.held_out
        return made

    # -- elsewhere -------------------------------------------------------------------------------

    @property
    def _training_inputs(self) -> Inputs:
        """Training inputs."""
        return self.x

    def _examples(self, x: Inputs) -> Inputs:
        """Examples on the network's device, or an error."""
        return self._checked(x)
