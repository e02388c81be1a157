"""The linear fit of a linearized network under squared loss.

    δ = argmin ½ Σᵢ ‖tᵢ − f₀(xᵢ) − Jᵢδ‖² + ½ ρ‖δ‖²

Prediction, uncertainty, leave-one-out, influence, exact forgetting and updates are linear algebra
on this solution; none of them trains anything. LQF's objective (Achille et al., CVPR 2021, eq. 3)
is Σᵢ ‖·‖² + ½ λ‖δ‖², so its λ is 2ρ; with a mean over N examples it is λ = 2ρ/N.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linnet.fitting.accuracy import answerable, sound_change
from linnet.fitting.arguments import CRITERIA, positions, ridge_grid
from linnet.fitting.evaluation import base_outputs, checked_inputs, count_in_words, linear_outputs
from linnet.fitting.export import exported_fit
from linnet.fitting.export_variance import Posterior
from linnet.fitting.fit_files import write_fit
from linnet.fitting.fitted import SquaredFit, more_data
from linnet.fitting.merged import Merged, merged_network
from linnet.fitting.record import Record as Record
from linnet.fitting.remarks import after_change
from linnet.fitting.ridge_choice import chosen_ridge
from linnet.linear.constraining import constrained
from linnet.linear.constraints import Constraints
from linnet.linear.dual import RidgePath
from linnet.linear.equations import wanted
from linnet.linear.files import system_state
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.normal_system import NormalSystem
from linnet.linear.problem import Problem
from linnet.linear.system import System
from linnet.linear.targets import Targets
from linnet.params import choice, flag, number
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.noise import Noise
from linnet.tangent.batch import (
    Inputs,
    batch_size,
    observed,
    take,
)
from linnet.tangent.coordinates import Coordinates
from linnet.tangent.forward_mode import Params
from linnet.tangent.gather import copied
from linnet.tangent.graph import Prototype, Traced
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode


class LinearFit(SquaredFit):
    """A solved linear fit. ``linnet.fit`` makes it.

    Args:
        module: The linearized network; its δ is set to the solution.
        targets: Training targets.
        system: The solved equations.
        record: What was chosen and why.

    Attributes:
        module: The trained ``Linearized``.
        system: The solved equations, dual or primal.
        record: What was chosen and why.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> x = torch.ones(3, 2).cumsum(0)
        >>> fit = linnet.fit(linnet.linearize(net), (x, x[:, :1]))
        >>> fit.loo().shape, fit.forget([0]).n
        (torch.Size([3, 1]), 2)
    """

    def __init__(self, module: Linearized, targets: Targets, system: System, record: Record) -> None:
        super().__init__(targets, record)
        self.module, self.system = module, system
        self._set_delta()

    @property
    def _solved(self) -> System:
        """The solved equations."""
        return self.system

    @torch.no_grad()
    def _set_delta(self) -> None:
        """Give the module the solution, δ = Jᵀβ + Aᵀν."""
        module, nu = self.module, self.system.multipliers
        for name, value in module.space.to_params(self.system.delta).items():
            module.delta[name].copy_(value)
        if self.constraints is not None and nu is not None:
            self.constraints.refined(module, nu)

    def _compared(self) -> tuple[Any, ...]:
        """What processes that ask it together must have alike; each may have rounded its δ by itself."""
        return self.module.function, self.x, self.targets, f"{self.ridge:.4g}"

    # -- what was fitted -------------------------------------------------------------------------

    @property
    def x(self) -> Inputs:
        """Training inputs, N examples."""
        return self.system.x

    @property
    def memory(self) -> str | int | None:
        """Budget of what is computed later."""
        return self.system.memory

    @memory.setter
    def memory(self, memory: str | int | None) -> None:
        self.system.memory = memory

    @property
    def constraints(self) -> Constraints | None:
        """Equations on outputs that the fit obeys, ``None`` without any."""
        return self.system.constraints

    @property
    def delta(self) -> Params:
        """δ by parameter name: the fit's own tensors, not to be written to; ``displacement`` gives copies."""
        return {name: t.detach() for name, t in self.module.delta.items()}

    @torch.no_grad()
    def displacement(self) -> dict[str, Tensor]:
        """δ of every weight of the network, also where the fit has other coordinates.

        Returns:
            Copies, by parameter name; of a sketched network or one with a metric δ = H ε.
        """
        model, delta = self.module.model, self.delta
        found = model.displacement(delta["epsilon"]) if isinstance(model, Coordinates) else delta
        return {name: t.clone() for name, t in found.items()}

    # -- predictions -----------------------------------------------------------------------------

    def predict(self, x: Inputs) -> Tensor:
        """f₀(x) + J(x)δ.

        Args:
            x: T examples.

        Returns:
            Outputs (T, C); for classes, the largest is the prediction.

        Raises:
            DataError: If x is empty or not finite.
        """
        return linear_outputs(self.module, x)

    @in_exact_mode
    def predictive(self, x: Inputs, joint: bool = False) -> GaussianPredictive:
        """The posterior of the outputs: mean f₀ + Jδ and covariance σ² J (JᵀJ + ρI)⁻¹ Jᵀ.

        Args:
            x: T examples.
            joint: Whether covariances between examples are wanted, (T, C, T, C).

        Returns:
            A Gaussian for each example, or of all together.

        Raises:
            DataError: If x is empty or not finite.
        """
        x = checked_inputs(self.module, x)
        covariance = self.system.covariance(x, flag("joint", joint)) / self.ridge
        mean = self.predict(x)
        turned = covariance.permute(2, 3, 0, 1) if joint else covariance.mT
        spread, scale = (self.noise * (covariance + turned) / 2).to(mean.dtype), self.variance_scale
        return GaussianPredictive(mean, spread, Noise(self.noise, self.temperature, scale), joint=joint)

    # -- audits ----------------------------------------------------------------------------------

    @in_exact_mode
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
        residuals = self.system.loo_residuals()
        return self.targets.to(residuals) - residuals

    @in_exact_mode
    def influence(self, x: Inputs) -> Tensor:
        """Influence of each training example on each prediction: prediction with it minus without it.

        Args:
            x: T examples.

        Returns:
            (N, T, C), in units of the outputs.

        Raises:
            DataError: If x is empty or not finite.

        Source:
            Achille et al., CVPR 2021, eq. (7), (8) and appendix A.3, without their approximation.
        """
        x = checked_inputs(self.module, x)
        residuals = self.system.loo_residuals()
        # f(x) − f₋ᵢ(x) = K(x,X) M_·i (M_ii)⁻¹ β_i
        return torch.cat(list(self.system.effects(x, residuals)), 1)

    @in_exact_mode
    def informativeness(self, x: Inputs | None = None) -> Tensor:
        """Functional information of each training example: the change of predictions without it.

        Args:
            x: The examples whose predictions count; by default the training examples.

        Returns:
            Mean over x of ‖f(x) − f₋ᵢ(x)‖², (N,).

        Raises:
            DataError: If x is empty or not finite.

        Source:
            Achille et al., CVPR 2021, eq. (9).
        """
        if x is None and isinstance(self.system, KernelSystem):
            dual = self.system.dual
            # K M = I − ρM
            blocks = -dual.ridge * dual.inverse.view(dual.n, dual.c, dual.n, dual.c)
            change = torch.einsum("tcnd,nd->ntc", blocks, dual.loo_residuals())
            change.diagonal(dim1=0, dim2=1).add_(dual.loo_residuals().T)
        elif x is None and isinstance(self.system, NormalSystem):
            return self.system.reach(self.system.loo_residuals()) / self.n
        else:
            change = self.influence(self.x if x is None else x)
        return (change**2).sum(2).mean(1)

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
        given = None if ridges is None else answerable(self, ridge_grid(ridges))
        return self.system.path(given, self._targets)

    # -- changes ---------------------------------------------------------------------------------

    @in_exact_mode
    def forget(self, indices: Any) -> LinearFit:
        """The fit without some training examples, exactly and without refitting.

        Args:
            indices: Their positions in the training data, each once.

        Returns:
            A new fit on the remaining examples; ``summary()["certificate"]`` is the residual of
            its own equations.

        Raises:
            InputError: If an index is out of range or given twice, or nothing would be left.
        """
        index = positions(indices, self.n).to(self.module.function.device)
        start = time.perf_counter()
        system = self.system.removed(index)
        keep = torch.ones(self.n, dtype=torch.bool)
        keep[index.cpu()] = False
        targets = replace(self._targets, values=self.targets[keep.to(index.device)])
        return self._changed(targets, system, f"forgot {count_in_words(len(index))}", start)

    @in_exact_mode
    def update(self, data: Any, ridge: float | str | None = None) -> LinearFit:
        """The fit with more training examples, without refitting.

        Args:
            data: New examples: an (x, y) pair, a Dataset, a DataLoader or batches.
            ridge: ρ, or "loo", "gcv", "evidence": chosen again on all examples (dual); kept by default.

        Returns:
            A new fit on all examples, old ones first.

        Raises:
            DataError: If the data are empty, not finite, or have labels out of range.
        """
        start = time.perf_counter()
        x, new = more_data(self, self.module.function, data)
        base = base_outputs(self.module, x)
        more = Problem(self.module.function, x, new.values.to(base) - base)
        system = self.system.extended(more)
        targets = replace(self._targets, values=torch.cat([self.targets, new.values.to(self.targets)]))
        what, factor = f"added {count_in_words(more.n)}", self.record.noise_factor
        if isinstance(ridge, str):
            choice("ridge", ridge, CRITERIA, remedy='try ridge="loo"')
            taken = chosen_ridge(system.path(None, targets), ridge, targets)
            system, factor = system.at(taken.ridge), taken.noise_factor
            what = f"{what}; the ridge chosen by {ridge}"
        elif ridge is not None:
            number("ridge", ridge, above=0, remedy='pass ρ > 0, or "loo", "gcv" or "evidence"')
            system, factor = system.at(float(ridge)), 1.0
            what = f"{what}; the ridge set to {float(ridge):.4g}"
        fitted = sound_change(self._changed(targets, system, what, start))
        criterion = ridge if isinstance(ridge, str) else fitted.record.criterion
        fitted.record = replace(fitted.record, criterion=criterion, noise_factor=factor)
        return fitted

    @in_exact_mode
    def constrain(
        self, x: Inputs, targets: Any = None, groups: Any = None, *, weight: float | None = None
    ) -> LinearFit:
        """The optimum among outputs that obey linear equations, on top of those that hold already.

        Outputs are held at old predictions (backward compatibility) or other values; groups get equal
        mean outputs (linear fairness). ``forget`` and ``update`` keep the equations, and leave-one-out,
        influence and covariances are those of the fit that obeys them.

        Args:
            x: M examples.
            targets: Outputs (M, C) to hold, NaN where an output is free; integer classes (M,) stand for
                their training targets.
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
        if weight is not None:
            number("weight", weight, above=0, remedy="leave weight= out for equations that hold exactly")
        x = copied(checked_inputs(self.module, x), self.memory)
        asked = wanted(x, targets, groups, self._targets, self.module.function.device)
        system = constrained(self.module, self.system, asked, weight, self.memory)
        what = f"constrained {count_in_words(batch_size(x))}"
        return sound_change(self._changed(self._targets, system, what, start))

    def _changed(self, targets: Targets, system: System, what: str, start: float) -> LinearFit:
        """A new fit of another system on the same network."""
        module = Linearized(self.module.function)
        reasons = {**self.record.reasons, "change": what}
        if system.constraints is not None:
            reasons["constraints"] = system.constraints.says()
        warnings = after_change(self.record.warnings, self.module.model, system.x, targets, likely=False)
        seconds = dict(self.record.seconds)
        record = replace(self.record, reasons=reasons, warnings=warnings, seconds=seconds)
        fitted = LinearFit(module, targets, system, record)
        fitted.record.seconds["change"] = time.perf_counter() - start
        return fitted

    # -- elsewhere -------------------------------------------------------------------------------

    @property
    def _training_inputs(self) -> Inputs:
        """Training inputs."""
        return self.x

    def _examples(self, x: Inputs) -> Inputs:
        """Examples on the network's device, or an error."""
        return checked_inputs(self.module, x)

    def _plain(self, like: Prototype, variance: bool, kind: torch.dtype | None) -> Traced:
        """The model as a plain module, its variances computed in a type, or in the network's."""
        if not variance:
            return exported_fit(self.module, like, None, kind)
        weights = self.system.problem.weights
        roots = None if weights is None else weights.diag_embed()
        posterior = Posterior(self.x, self.ridge, self.noise, roots, self.memory, self.constraints)
        return exported_fit(self.module, like, posterior, kind)

    def _merged(self, x: Inputs) -> Merged:
        """The network at θ₀ + δ, compared on examples."""
        return merged_network(self.module, x, self.classes)

    # -- keeping ---------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Size, solver, ridge and the reasons for choices, as plain numbers and text.

        Returns:
            A dict that ``json`` can write.
        """
        return self._summary(self.module.space.dim)

    def save(self, directory: str | Path) -> Path:
        """Write the fit to a folder: safetensors and JSON, atomically.

        Args:
            directory: The folder; made if missing.

        Returns:
            The file that ``linnet.load_fit`` reads.
        """
        tensors, how = system_state(self.system)
        solved = tensors | {"residual": self.system.problem.residual}, how
        told = {"loss": "squared", "record": asdict(self.record)}
        data = self.x, self._targets
        return write_fit(directory, self.module.function, data, solved, told, self.held_out)
