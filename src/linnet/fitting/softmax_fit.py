"""The linear fit of a linearized network under cross-entropy.

    δ = argmin Σᵢ ℓ(f₀(xᵢ) + Jᵢδ, yᵢ) + ½ ρ‖δ‖²

It offers what ``LinearFit`` offers, under the same names. The solution, forgetting and updates are exact up
to their certificate, ‖∇‖ relative to ‖∇‖ at δ = 0. What concerns leaving one example out takes one exact
Newton step from the optimum: ``check_loo`` measures how far that is from refitting. Uncertainty is Laplace's
approximation of the linear model, with the prior precision ρ and no noise to estimate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.accuracy import answerable, sound_change
from linnet.fitting.arguments import positions, ridge_grid
from linnet.fitting.evaluation import base_outputs, checked_inputs, count_in_words, linear_outputs
from linnet.fitting.export import exported_fit
from linnet.fitting.export_variance import Posterior
from linnet.fitting.fit_files import write_fit
from linnet.fitting.fitted import Fitted
from linnet.fitting.linear_fit import Record
from linnet.fitting.merged import Merged, merged_network
from linnet.fitting.remarks import after_change
from linnet.fitting.softmax_path import (
    LeftOut,
    SoftmaxPath,
    as_path,
    compare_left_out,
    left_out_refitted,
    point,
    softmax_grid,
    solutions,
)
from linnet.linear.files import softmax_state
from linnet.linear.softmax_dual import SoftmaxDual
from linnet.linear.softmax_loss import ClassLoss, class_targets
from linnet.linear.softmax_primal import SoftmaxPrimal
from linnet.linear.targets import Targets
from linnet.memory import parse_bytes
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.noise import Noise
from linnet.tangent.batch import (
    Inputs,
    batch_size,
    concatenate,
    hash_tensors,
    split,
    take,
    tensors_in,
)
from linnet.tangent.forward_mode import Params
from linnet.tangent.gather import gather_data
from linnet.tangent.gram import gram, own_kernels
from linnet.tangent.graph import Prototype, Traced
from linnet.tangent.jacobian import JacobianOperator
from linnet.tangent.linearized import Linearized
from linnet.tangent.loaders import Said
from linnet.tangent.modes import in_exact_mode

CHECKED = 3  # examples that are refitted where a ridge is chosen by leave-one-out


class SoftmaxFit(Fitted):
    """A solved cross-entropy fit. ``linnet.fit(..., loss="cross-entropy")`` makes it.

    Args:
        module: The linearized network; its δ is set to the solution.
        x: Training inputs, N examples.
        targets: Label probabilities.
        system: The solved problem.
        record: What was chosen and why.
        memory: Budget of kernels formed later.

    Attributes:
        module: The trained ``Linearized``.
        x: Training inputs.
        system: The solved problem, dual or primal.
        record: What was chosen and why.
        held_out: Outputs by a procedure that has not seen the example, where the head was cross-fitted.
        chosen_path: The path that the ridge was chosen from; ``None`` where it was given.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x = torch.linspace(-1, 1, 6)[:, None] * torch.ones(1, 2)
        >>> fit = linnet.fit(linnet.linearize(net), (x, (x[:, 0] > 0).long()), loss="cross-entropy")
        >>> fit.loo().shape, fit.forget([0]).n, fit.summary()["certificate"] < 1e-8
        (torch.Size([6, 2]), 5, True)
    """

    def __init__(
        self,
        module: Linearized,
        x: Inputs,
        targets: Targets,
        system: SoftmaxDual | SoftmaxPrimal,
        record: Record,
        memory: str | int | None = None,
    ) -> None:
        super().__init__(targets, record)
        self.module, self.x, self.system, self.memory = module, x, system, memory
        self.chosen_path: SoftmaxPath | None = None
        self._cross: dict[str, Tensor] = {}
        _set_delta(module, x, system)

    # -- what was fitted -------------------------------------------------------------------------

    @property
    def _solved(self) -> SoftmaxDual | SoftmaxPrimal:
        """The solved problem."""
        return self.system

    @property
    def classes(self) -> int:
        """Number of classes: C, or 2 for one output."""
        return self._targets.classes or 2

    @property
    def labels(self) -> Tensor:
        """Training classes (N,); the likeliest of soft labels."""
        found = self._targets.labels
        assert found is not None
        return found

    @property
    def delta(self) -> Params:
        """δ by parameter name: the fit's own tensors, not to be written to."""
        return {name: t.detach() for name, t in self.module.delta.items()}

    @property
    def noise(self) -> float:
        """0: the cross-entropy has its own noise, the draw of the class."""
        return 0.0

    @property
    def temperature(self) -> float:
        """1: outputs are logits of the classes as they are."""
        return 1.0

    @property
    def point_temperature(self) -> float:
        """1, for outputs without their variance alike."""
        return 1.0

    @property
    def variance_scale(self) -> float:
        """1: the variance of the logits counts as it is."""
        return 1.0

    # -- predictions -----------------------------------------------------------------------------

    def predict(self, x: Inputs) -> Tensor:
        """f₀(x) + J(x)δ.

        Args:
            x: T examples.

        Returns:
            Logits (T, C); their softmax, or sigmoid for one output, are the probabilities at the optimum.

        Raises:
            DataError: If x is empty or not finite.
        """
        return linear_outputs(self.module, x)

    @in_exact_mode
    def predictive(self, x: Inputs) -> GaussianPredictive:
        """Laplace's posterior of the outputs: mean f₀ + Jδ and covariance J (JᵀΛJ + ρI)⁻¹ Jᵀ.

        Λ is never inverted, so that examples fitted with certainty, whose Λ is zero, are as good as others.

        Args:
            x: T examples.

        Returns:
            A Gaussian for each example; ``probs`` are (T, C), and (T, 2) for one output.

        Raises:
            DataError: If x is empty or not finite.
        """
        x = checked_inputs(self.module, x)
        if isinstance(self.system, SoftmaxPrimal):
            covariance = self.system.covariances(x)
        else:
            dual = self.system
            explained = torch.cat([dual.explained(cross) for cross in self._kernel_to_train(x)])
            own = own_kernels(self.module.function, x, self.memory)
            covariance = (own.to(explained) - explained) / dual.ridge
        mean = self.predict(x)
        spread = ((covariance + covariance.mT) / 2).to(mean.dtype)
        return GaussianPredictive(mean, spread, Noise(0.0, 1.0))

    def _kernel_to_train(self, x: Inputs) -> Iterator[Tensor]:
        """K(x, X), (T, C, N, C), in as many parts as the memory budget asks for; one part is kept."""
        key = hash_tensors(tensors_in(x))
        if (known := self._cross.get(key)) is not None:
            yield known
            return
        row = self.n * self.system.c**2 * (self.module.function.dtype.itemsize + 3 * 8)
        budget = parse_bytes(self.memory, self.module.function.device)
        for part in split(x, max(1, int(0.5 * budget) // row)):
            cross = gram(self.module.function, part, self.x, form="full", memory=self.memory)
            self._cross = {key: cross} if batch_size(part) == batch_size(x) else {}
            yield cross

    # -- audits ----------------------------------------------------------------------------------

    @in_exact_mode
    def loo(self) -> Tensor:
        """Outputs for each training example without it: one exact Newton step from the optimum.

        Where the head was cross-fitted they are the held-out outputs of ``held_out`` instead.

        Returns:
            Leave-one-out outputs (N, C), approximate; ``check_loo`` says how far from refitting.

        Source:
            Pregibon 1981 (logistic regression); Giordano et al. 2019, Koh and Liang 2017.
        """
        return self.system.loo_outputs() if self.held_out is None else self.held_out

    @in_exact_mode
    def check_loo(self, examples: Any = None) -> LeftOut:
        """Refit without some examples and compare with the one Newton step of ``loo``.

        Args:
            examples: Their positions; by default the few whose outputs change most.

        Returns:
            Both outputs, and ``.error`` and ``.loss_error``.

        Raises:
            InputError: There is no position, or one is out of range or given twice.
        """
        system = self.system
        if examples is None:
            change = (system.loo_outputs() - system.outputs).norm(dim=1)
            index = change.argsort(descending=True)[: min(CHECKED, self.n - 1)]
        else:
            index = positions(examples, self.n, leave=0).to(self.module.function.device)
            if not len(index):
                raise InputError("examples is empty", "at least one position", "leave examples= out")
        if isinstance(system, SoftmaxDual):
            return compare_left_out(system, index, left_out_refitted(system, index))
        again = [self.forget([i]).predict(take(self.x, [i])) for i in index.tolist()]
        return compare_left_out(system, index, torch.cat(again))

    @in_exact_mode
    def influence(self, x: Inputs) -> Tensor:
        """Influence of each training example on each prediction, with minus without, by one Newton step.

        Args:
            x: T examples.

        Returns:
            (N, T, C), in units of the logits.

        Raises:
            DataError: If x is empty or not finite.

        Source:
            Koh and Liang, ICML 2017, with the example's own curvature taken out of the Hessian.
        """
        x = checked_inputs(self.module, x)
        e = self.system.one_step()
        if isinstance(self.system, SoftmaxPrimal):
            cross = self.system.cross(x)
            return -torch.einsum("tcnd,nd->ntc", cross, e.to(cross))
        changes = self._changes(e)
        parts = []
        for cross in self._kernel_to_train(x):
            t = cross.shape[0]
            moved = cross.reshape(t * self.system.c, -1).to(changes) @ changes
            parts.append(-moved.view(t, self.system.c, self.n).permute(2, 0, 1))
        return torch.cat(parts, 1)

    def _changes(self, e: Tensor) -> Tensor:
        """Change of β by leaving out each example, (N·C, N): column i is (I − LB⁻¹LᵀK) eᵢ/ρ."""
        dual = self._dual("influence")
        columns = torch.zeros(self.n, dual.c, self.n, dtype=e.dtype, device=e.device)
        columns.diagonal(dim1=0, dim2=2).copy_(e.T)
        return dual.weighted(columns.view(self.n * dual.c, self.n)) / dual.ridge

    @in_exact_mode
    def informativeness(self, x: Inputs | None = None) -> Tensor:
        """Change of predictions without each training example, by one Newton step.

        Args:
            x: The examples whose predictions count; by default the training examples.

        Returns:
            Mean over x of ‖f(x) − f₋ᵢ(x)‖², (N,).

        Raises:
            DataError: If x is empty or not finite.

        Source:
            Achille et al., CVPR 2021, eq. (9), for the cross-entropy.
        """
        if x is None and isinstance(self.system, SoftmaxDual):
            change = (self.system.kernel @ self._changes(self.system.one_step())).view(
                self.n, self.system.c, self.n
            )
            return (change**2).sum(1).mean(0)
        change = self.influence(self.x if x is None else x)
        return (change**2).sum(2).mean(1)

    def path(self, ridges: Tensor | list[float] | None = None) -> SoftmaxPath:
        """Leave-one-out log loss, evidence and degrees of freedom along a path of ridges.

        Each ridge takes a few Newton steps from the one before; nothing is free here as it is for squares.

        Args:
            ridges: ρ, (R,), all positive; by default six decades around the scale of the kernel.

        Returns:
            The table, its ridges descending.

        Raises:
            InputError: If a ridge is not positive, or the fit was solved by conjugate gradients.
            NumericalError: If a ridge is below what rounding lets be answered.
        """
        dual = self._dual("path")
        if ridges is None:
            grid = softmax_grid(dual.kernel, self.module.function.dtype)
        else:
            grid = answerable(self, ridge_grid(ridges)).sort(descending=True).values
        return as_path([point(system, self.labels) for system in solutions(dual, grid)])

    def _dual(self, what: str) -> SoftmaxDual:
        """The dual, or an error that says what needs it."""
        if isinstance(self.system, SoftmaxDual):
            return self.system
        raise InputError(
            f"{what} needs the kernel, but the fit was solved by {self.solver!r}",
            expected='solver="dual"',
            remedy='fit again with solver="dual", or fit at each ridge',
        )

    # -- changes ---------------------------------------------------------------------------------

    def constrain(self, *_: Any, **__: Any) -> NoReturn:
        """Not offered: a constrained optimum has a closed form under the squared loss alone.

        Raises:
            InputError: Always.
        """
        raise InputError(
            "constrain() of a fit with loss='cross-entropy'",
            expected="a fit with the squared loss, whose constrained optimum is linear algebra",
            remedy="fit with loss='squared' and constrain that",
        )

    @in_exact_mode
    def forget(self, indices: Any) -> SoftmaxFit:
        """The fit without some training examples, by Newton's method from the present one.

        Args:
            indices: Their positions in the training data, each once.

        Returns:
            A new fit on the remaining examples, exact to ``summary()["certificate"]``.

        Raises:
            InputError: If an index is out of range or given twice, or nothing would be left.
        """
        start = time.perf_counter()
        index = positions(indices, self.n).to(self.module.function.device)
        keep = torch.ones(self.n, dtype=torch.bool, device=index.device)
        keep[index] = False
        kept = keep.nonzero()[:, 0]
        system = self.system.removed(index)
        targets = replace(self._targets, values=self.targets[kept])
        return self._changed(
            take(self.x, kept), targets, system, f"forgot {count_in_words(len(index))}", start
        )

    @in_exact_mode
    def update(self, data: Any, ridge: None = None) -> SoftmaxFit:
        """The fit with more training examples: Newton's method from the present one.

        Args:
            data: New examples: an (x, y) pair, a Dataset, a DataLoader or batches.
            ridge: Stays as it is; only the fit of the squared loss can choose another.

        Returns:
            A new fit on all examples, old ones first, exact to ``summary()["certificate"]``.

        Raises:
            InputError: If a ridge is given.
            DataError: If the data are empty, not finite, or have labels out of range.
        """
        if ridge is not None:
            raise InputError(
                f"ridge={ridge!r} in update() of a fit with loss='cross-entropy'",
                expected="no ridge; it is kept",
                remedy="leave ridge= out, or fit all examples again with linnet.fit",
            )
        start = time.perf_counter()
        function = self.module.function
        said = Said.known(self.record.classes)
        x, y = gather_data(data, function, memory=self.memory, said=said)
        function.check_runs(take(x, slice(0, 1)))
        new = class_targets(y, self.system.c, self.targets.dtype)
        loss, base = ClassLoss(new.values.double()), base_outputs(self.module, x)
        system: SoftmaxDual | SoftmaxPrimal
        if isinstance(self.system, SoftmaxDual):
            cross = gram(function, self.x, x, form="full", memory=self.memory)
            corner = gram(function, x, form="full", memory=self.memory)
            system = self.system.extended(cross, corner, base, loss)
        else:
            system = self.system.extended(x, base, loss)
        targets = replace(self._targets, values=torch.cat([self.targets, new.values]))
        what = f"added {count_in_words(len(base))}"
        return sound_change(self._changed(concatenate([self.x, x]), targets, system, what, start))

    def _changed(
        self, x: Inputs, targets: Targets, system: SoftmaxDual | SoftmaxPrimal, what: str, start: float
    ) -> SoftmaxFit:
        """A new fit of another system on the same network."""
        reasons = {**self.record.reasons, "change": f"{what}, {steps_in_words(system)}"}
        warnings = after_change(self.record.warnings, self.module.model, x, targets, likely=True)
        seconds = dict(self.record.seconds)
        record = replace(self.record, reasons=reasons, warnings=warnings, seconds=seconds)
        fitted = SoftmaxFit(Linearized(self.module.function), x, targets, system, record, self.memory)
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
        roots = self.system.loss.roots(self.system.outputs)
        posterior = Posterior(self.x, self.ridge, 1.0, roots, self.memory)
        return exported_fit(self.module, like, posterior, kind)

    def _merged(self, x: Inputs) -> Merged:
        """The network at θ₀ + δ, compared on examples."""
        return merged_network(self.module, x, self.classes)

    # -- keeping ---------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Size, solver, ridge and the reasons for choices, as plain numbers and text.

        Returns:
            A dict that ``json`` can write; ``"certificate"`` is ‖∇‖ relative to ‖∇‖ at δ = 0.
        """
        own = {"objective": self.system.objective[-1], "steps": self.system.steps}
        return {
            "loss": "cross-entropy",
            **self._summary(self.module.space.dim),
            "classes": self.classes,
            **own,
        }

    def save(self, directory: str | Path) -> Path:
        """Write the fit to a folder: safetensors and JSON, atomically.

        Args:
            directory: The folder; made if missing.

        Returns:
            The file that ``linnet.load_fit`` reads.
        """
        told = {"loss": "cross-entropy", "record": asdict(self.record)}
        data, solved = (self.x, self._targets), softmax_state(self.system)
        return write_fit(directory, self.module.function, data, solved, told, self.held_out)


def steps_in_words(system: SoftmaxDual | SoftmaxPrimal) -> str:
    """The steps that a solution took, in words."""
    newton = f"{system.steps} Newton step" + "s" * (system.steps != 1)
    if isinstance(system, SoftmaxPrimal):
        return f"{newton} with {system.products} of conjugate gradients"
    return newton


@torch.no_grad()
def _set_delta(module: Linearized, x: Inputs, system: SoftmaxDual | SoftmaxPrimal) -> None:
    """δ = Jᵀβ."""
    if isinstance(system, SoftmaxPrimal):
        flat = system.delta
    else:
        jacobian = JacobianOperator(module.function, x, system.c)
        flat = jacobian.T.mv(system.beta.to(module.function.dtype).reshape(-1))
    for name, value in module.space.to_params(flat).items():
        module.delta[name].copy_(value)
