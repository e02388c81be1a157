"""The linear fit of a linearized network under cross-entropy.

    δ = argmin Σᵢ ℓ(f₀(xᵢ) + Jᵢδ, yᵢ) + ½ ρ‖δ‖²

It offers what ``LinearFit`` offers, under the same names. The solution, forgetting and updates are exact up
to their certificate, ‖∇‖ relative to ‖∇‖ at δ = 0. What concerns leaving one example out takes one exact
Newton step from the optimum: ``check_loo`` measures how far that is from refitting. Uncertainty is Laplace's
approximation of the linear model, with the prior precision ρ and no noise to estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError, NumericalError
from linnet.fitting.accuracy import answerable, sound_change
from linnet.fitting.arguments import (
    base_outputs,
    count_in_words,
    linear_outputs,
    positions,
    ridge_grid,
)
from linnet.fitting.composed import Summable
from linnet.fitting.fitted import Fitted
from linnet.linear.dual import CriteriaByRidge
from linnet.linear.label_problem import LabelProblem, WeighedLosses, class_targets, weighed_labels
from linnet.linear.newton import FactorNewton, NewtonSystem
from linnet.linear.targets import Targets, weighed_targets
from linnet.params import choice
from linnet.progress import track
from linnet.shown import Record
from linnet.solvers.lanczos import power_method
from linnet.tangent.batch import Inputs, take
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode

DECADES = (-5, 1)  # ridges of a path, relative to the mean diagonal of the kernel
ROUNDING = 4.0  # units of roundoff of the kernel's largest eigenvalue, below which a ridge is no ridge
PER_DECADE = 2  # of them
POWER_STEPS = 20  # of the power method, for the kernel's largest eigenvalue from below
CHECKED = 3  # examples that are refitted where a ridge is chosen by leave-one-out


@dataclass(frozen=True, repr=False)
class SoftmaxPath(CriteriaByRidge):
    """Every criterion along a path of ridges, (R,) each."""

    criteria = ("loo", "evidence")

    ridges: Tensor  # ρ, descending
    loo_error: Tensor  # mean leave-one-out log loss, by the weights, by one Newton step
    evidence: Tensor  # log evidence in Laplace's approximation
    degrees_of_freedom: Tensor  # tr ΛA = tr JᵀΛJ (JᵀΛJ + ρI)⁻¹
    loo_accuracy: Tensor  # share of examples whose likeliest class is right when left out
    certificate: Tensor  # gradient relative to that at δ = 0
    steps: Tensor  # Newton steps from the ridge before

    def best(self, criterion: str) -> float:
        """The ridge that a criterion prefers, "loo" or "evidence"."""
        choice("criterion", criterion, self.criteria)
        return self._least({"loo": self.loo_error, "evidence": -self.evidence}[criterion])


@dataclass(frozen=True, repr=False)
class LeftOut(Record):
    """Leave-one-out by one Newton step beside refitting, for some examples."""

    examples: Tensor  # their positions, (k,)
    one_step: Tensor  # outputs by one Newton step from the optimum, (k, C)
    refitted: Tensor  # outputs of fits without the example, solved to their certificate, (k, C)
    losses: Tensor  # log losses of the two, (k, 2)

    @property
    def error(self) -> float:
        """The largest difference of an output."""
        return float((self.one_step - self.refitted).abs().max())

    @property
    def loss_error(self) -> float:
        """The largest difference of a log loss."""
        return float((self.losses[:, 0] - self.losses[:, 1]).abs().max())


class SoftmaxFit(Fitted, Summable):
    """A solved cross-entropy fit. ``linnet.fit(..., loss="cross-entropy")`` makes it.

    Args:
        module: The linearized network; its δ is set to the solution.
        targets: Label probabilities.
        system: The solved problem.
        record: What was chosen and why.

    Attributes:
        module: The trained ``Linearized``.
        system: The solved problem, in samples or in weights.
        record: What was chosen and why.
        held_out: Outputs by a procedure that has not seen the example, where the head was cross-fitted.
        noise: 0.
        temperature, point_temperature: 1, as outputs are logits.
        variance_scale: What their variance is multiplied with before it moderates probabilities: 1, or less
            where leave-one-out outputs are likelier by more than a nat; 1 where no matrix fits the memory.
        chosen_path: The path that the ridge was chosen from; ``None`` where it was given.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x = torch.linspace(-1, 1, 6)[:, None] * torch.ones(1, 2)
        >>> fit = linnet.fit(linnet.linearize(net), (x, (x[:, 0] > 0).long()), loss="cross-entropy")
        >>> fit.loo().shape, fit.forget([0]).n, fit.summary()["certificate"] < 1e-8
        (torch.Size([6, 2]), 5, True)
    """

    module: Linearized
    system: NewtonSystem
    loss = "cross-entropy"
    noise = 0.0  # the cross-entropy has its own, the draw of the class
    point_temperature = _own_temperature = 1.0  # outputs are logits of the classes as they are
    _unit = 1.0  # ρ is the precision of the prior

    def _start(self, x: Inputs) -> Tensor:
        """f₀(x)."""
        return base_outputs(self.module, x)

    def _outputs(self, x: Inputs) -> Tensor:
        """f₀(x) + J(x)δ, (T, C): logits."""
        return linear_outputs(self.module, x)

    def _left_out_variances(self) -> Tensor | None:
        """By a factorization; without one each example takes C solves."""
        return None if self.system.factorized is None else self.system.loo_variances()

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
        if self.n < 2:
            raise InputError("a fit of one example", "two or more", "update the fit with others first")
        if examples is None:
            change = (system.loo_outputs() - system.outputs).norm(dim=1)
            index = change.argsort(descending=True)[: min(CHECKED, self.n - 1)]
        else:
            index = positions(examples, self.n, leave=0).to(self.module.function.device)
            if not len(index):
                raise InputError("examples is empty", "at least one position", "leave examples= out")
        alone = [
            (take(self.x, index[k : k + 1]), system.removed(index[k : k + 1])) for k in range(len(index))
        ]
        again = [self._made(rest, self._targets, self.record)._outputs(x).double() for x, rest in alone]
        return compare_left_out(system, index, torch.cat(again))

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
        system = self.system
        if not isinstance(system, FactorNewton):
            raise InputError(
                f"path needs a factorization, but the fit was solved by {self.solver!r}",
                expected='solver="dual" or "primal"',
                remedy='fit again with solver="dual" or "primal", or fit at each ridge',
            )
        if ridges is None:
            grid = softmax_grid(system.gram, system.base.numel(), self.module.function.dtype)
        else:
            grid = answerable(self, ridge_grid(ridges)).sort(descending=True).values
        found = followed(system, grid, self._targets)[0]
        if (w := self._targets.weights) is None:
            return found
        return replace(found, loo_error=found.loo_error / float(w.double().mean()))

    # -- changes and files -----------------------------------------------------------------------

    def _updated(self, x: Inputs, y: Tensor, ridge: Any, start: float, sample_weight: Any) -> SoftmaxFit:
        """The fit with more examples: Newton's method from the present one."""
        new = weighed_targets(class_targets(y, self.system.c, self.targets.dtype), sample_weight)
        if self._targets.weights is not None:
            new = replace(new, weights=new.every_weight)
        more = self.system.problem.of(x, self._start(x), weighed_labels(new))
        targets, what = self._targets.joined(new), f"added {count_in_words(len(new.values))}"
        return sound_change(self._changed(targets, self.system.extended(more), what, start))

    def _relabelled(self, index: Tensor, x: Inputs, y: Tensor) -> tuple[Targets, NewtonSystem]:
        """Newton's method from the present optimum."""
        values = self.targets.clone()
        values[index] = class_targets(y, self.system.c, values.dtype).values.to(values)
        targets = replace(self._targets, values=values)
        return targets, self.system.relabelled(weighed_labels(targets))

    def _weighed_problem(self, targets: Targets) -> LabelProblem:
        """By a column behind the labels."""
        problem = self.system.problem
        likelihood: Any = WeighedLosses(problem.likelihood)
        return replace(problem, likelihood=likelihood, y=weighed_labels(targets))

    @property
    def _roots(self) -> Tensor:
        """L with Λ = LLᵀ at the optimum, (N, C, D)."""
        return self.system.roots

    def summary(self) -> dict[str, Any]:
        """As of every fit, the objective and the Newton steps that it took.

        Returns:
            A dict that ``json`` can write.
        """
        return {**super().summary(), "objective": self.system.objective[-1], "steps": self.system.steps}


# -- paths -----------------------------------------------------------------------------------------


def softmax_grid(gram: Tensor, equations: int, dtype: torch.dtype) -> Tensor:
    """Ridges in steps of a decade's parts, relative to the mean of K's diagonal, above its rounding."""
    # gram, K or JᵀJ
    scale = float(gram.diagonal().sum()) / equations or 1.0
    low, high = DECADES
    count = (high - low) * PER_DECADE + 1
    every = scale * torch.logspace(high, low, count, dtype=torch.float64)
    sound = every[every >= ROUNDING * torch.finfo(dtype).eps * _largest(gram)]
    return sound if len(sound) else every[:1]


def _largest(gram: Tensor) -> float:
    """The largest eigenvalue, from below."""
    v = torch.ones(gram.shape[0], dtype=gram.dtype, device=gram.device)
    v[1::2] = 0.5
    size = power_method(gram.matmul, v, POWER_STEPS)
    return size if math.isfinite(size) else 0.0


def solutions(system: FactorNewton, ridges: Tensor) -> Iterator[FactorNewton]:
    """The solutions along a path, each from the one before; where the precision ends, so does the path."""
    first = True
    for ridge in track(ridges.tolist(), f"cross-entropy: {len(ridges)} ridges", len(ridges)):
        try:
            system = system.at(ridge)
        except NumericalError:
            if first:
                raise
            return
        first = False
        yield system


def point(system: FactorNewton, labels: Tensor, exact: Tensor | None = None) -> tuple[float, ...]:
    """All criteria at one ridge."""
    # labels (N,), exact (N, C)
    outputs = system.loo_outputs() if exact is None else exact
    chosen = outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()
    return (
        system.ridge,
        float(system.problem.losses(outputs).mean()),
        system.log_evidence(),
        system.degrees_of_freedom(),
        float((chosen == labels).double().mean()),
        system.certificate(),
        float(system.steps),
    )


def followed(
    system: FactorNewton,
    ridges: Tensor,
    targets: Targets,
    criterion: str = "loo",
    exact: Tensor | None = None,
) -> tuple[SoftmaxPath, FactorNewton]:
    """Every criterion along a path, by held-out outputs where there are any, and the solution of the best."""
    # ridges (R,) descending, exact (R, N, C)
    labels, points = targets.labels, []
    assert labels is not None
    best = system
    for place, solved in enumerate(solutions(system, ridges)):
        held = None if exact is None else exact[place]
        if held is not None and not bool(held.isfinite().all()):
            break
        points.append(point(solved, labels, held))
        if as_path(points).best(criterion) == solved.ridge:
            best = solved
    return as_path(points), best


def as_path(points: list[tuple[float, ...]]) -> SoftmaxPath:
    """A table of the points of a path."""
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True)]
    ridges, loo, evidence, degrees, accuracy, certificate, steps = columns
    return SoftmaxPath(ridges, loo, evidence, degrees, accuracy, certificate, steps.long())


def compare_left_out(system: NewtonSystem, examples: Tensor, refitted: Tensor) -> LeftOut:
    """Leave some examples out by one Newton step, compared with refitting."""
    # examples (k,), refitted (k, C)
    quick, problem = system.loo_outputs()[examples], system.problem
    losses = [problem.likelihood.nll(f.to(quick), problem.y[examples]) for f in (quick, refitted)]
    return LeftOut(examples, quick, refitted, torch.stack(losses, 1))
