"""The linear fit of a linearized network under cross-entropy.

    δ = argmin Σᵢ ℓ(f₀(xᵢ) + Jᵢδ, yᵢ) + ½ ρ‖δ‖²

It offers what ``LinearFit`` offers, under the same names. The solution, forgetting and updates are exact up
to their certificate, ‖∇‖ relative to ‖∇‖ at δ = 0. What concerns leaving one example out takes one exact
Newton step from the optimum: ``check_loo`` measures how far that is from refitting. Uncertainty is Laplace's
approximation of the linear model, with the prior precision ρ and no noise to estimate.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.accuracy import answerable, sound_change
from linnet.fitting.arguments import (
    Choices,
    base_outputs,
    count_in_words,
    linear_outputs,
    positions,
    ridge_grid,
)
from linnet.fitting.cross_fit import CrossFit
from linnet.fitting.fitted import Fitted, joined_targets
from linnet.fitting.remarks import empty_remarks
from linnet.fitting.softmax_path import (
    LeftOut,
    SoftmaxPath,
    as_path,
    compare_left_out,
    point,
    softmax_grid,
    solutions,
)
from linnet.linalg.operator import LinearOperator
from linnet.linear.iterative import CGSettings
from linnet.linear.label_problem import LabelProblem, class_problem, class_targets
from linnet.linear.newton import KernelNewton, NewtonSystem, WeightNewton
from linnet.linear.saved import newton_state
from linnet.linear.targets import Targets
from linnet.tangent.batch import Inputs
from linnet.tangent.gram import gram
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode

CHECKED = 3  # examples that are refitted where a ridge is chosen by leave-one-out


class SoftmaxFit(Fitted):
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
        noise: 0; temperature, point_temperature and variance_scale are 1.
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
    temperature = 1.0  # outputs are logits of the classes as they are
    point_temperature = 1.0  # and without their variance alike
    variance_scale = 1.0  # the variance of the logits counts as it is
    _unit = 1.0  # ρ is the precision of the prior

    def _outputs(self, x: Inputs) -> Tensor:
        """f₀(x) + J(x)δ, (T, C): logits."""
        return linear_outputs(self.module, x)

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
        again = [system.outputs_without(i) for i in index.tolist()]
        return compare_left_out(system, index, torch.stack(again))

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
        if not isinstance(system, KernelNewton):
            raise InputError(
                f"path needs the kernel, but the fit was solved by {self.solver!r}",
                expected='solver="dual"',
                remedy='fit again with solver="dual", or fit at each ridge',
            )
        if ridges is None:
            grid = softmax_grid(system.kernel, self.module.function.dtype)
        else:
            grid = answerable(self, ridge_grid(ridges)).sort(descending=True).values
        labels = self.labels
        assert labels is not None
        return as_path([point(solved, labels) for solved in solutions(system, grid)])

    # -- changes and files -----------------------------------------------------------------------

    def _check_new_ridge(self, ridge: Any) -> None:
        """Raise unless it is kept."""
        if ridge is not None:
            raise InputError(
                f"ridge={ridge!r} in update() of a fit with loss='cross-entropy'",
                expected="no ridge; it is kept",
                remedy="leave ridge= out, or fit all examples again with linnet.fit",
            )

    def _updated(self, x: Inputs, y: Tensor, ridge: Any, start: float) -> SoftmaxFit:
        """The fit with more examples: Newton's method from the present one."""
        new = class_targets(y, self.system.c, self.targets.dtype)
        more = class_problem(self._function, x, base_outputs(self.module, x), new.values)
        targets, what = joined_targets(self._targets, new), f"added {count_in_words(len(new.values))}"
        return sound_change(self._changed(targets, self.system.extended(more), what, start))

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

    def _state(self) -> dict[str, Any]:
        """The optimum."""
        return {"loss": self.loss, "solved": newton_state(self.system)}


@dataclass(frozen=True, eq=False)
class SoftmaxTask:
    """The problem to be solved."""

    module: Linearized  # the linearized network, which the fit takes over
    targets: Targets  # label probabilities
    problem: LabelProblem  # the cross-entropy against them
    ridge: float | str  # ρ, or ``"loo"`` or ``"evidence"``
    memory: str | int | None  # budget of kernels
    file: str | None  # file of the kernel


def solve_softmax(
    task: SoftmaxTask,
    record: Choices,
    settings: CGSettings,
    operator: LinearOperator | None,
    folds: CrossFit | None,
) -> SoftmaxFit:
    """Solve for the cross-entropy optimum."""
    started = time.perf_counter()
    seconds, reasons = record.seconds, record.reasons
    system: NewtonSystem
    held: Tensor | None = None
    path: SoftmaxPath | None = None
    if record.solver == "dual":
        system, held, path = _solve_dual(task, record, settings, folds)
    else:
        assert not isinstance(task.ridge, str)
        given = None, operator
        system = WeightNewton(task.problem, task.ridge, settings, *given, memory=task.memory)
        reasons["ridge"] = "given"
        held = None if folds is None else folds.iterated(system.ridge, settings, squared=False)
    reasons["newton"] = f"{system.described()}, gradient {system.certificate():.0e} of that at the start"
    seconds["solve"] = time.perf_counter() - started - seconds.get("kernel", 0.0)
    full = replace(record, warnings=(*empty_remarks(task.targets), *record.warnings))
    fitted = SoftmaxFit(task.module, task.targets, system, full)
    fitted.held_out, fitted.chosen_path = held, path
    if isinstance(system, KernelNewton) and task.ridge == "loo" and folds is None and fitted.n > 1:
        _say_error(fitted)
    return fitted


def _solve_dual(
    task: SoftmaxTask, record: Choices, settings: CGSettings, folds: CrossFit | None
) -> tuple[KernelNewton, Tensor | None, SoftmaxPath | None]:
    """Form K, choose ρ, take Newton steps; with cross-fitted heads, the held-out outputs too."""
    start = time.perf_counter()
    problem, ridge = task.problem, task.ridge
    function, size = problem.function, problem.base.numel()
    kernel = gram(function, problem.x, form="full", memory=task.memory, file=task.file)
    kernel = kernel.reshape(size, size).double()
    record.seconds["kernel"] = time.perf_counter() - start
    if not isinstance(ridge, str):
        record.reasons["ridge"] = "given"
        system = KernelNewton(problem, kernel, float(ridge), None, settings.max_steps, task.memory)
        held = None if folds is None else folds.classified(torch.tensor([system.ridge]))[0]
        return system, held, None
    grid = softmax_grid(kernel, function.dtype)
    every = folds.classified(grid) if folds is not None and ridge == "loo" else None
    labels, points = task.targets.labels, []
    assert labels is not None
    best: KernelNewton | None = None
    system = KernelNewton(problem, kernel, float(grid[0]), None, settings.max_steps, task.memory)
    for place, solved in enumerate(solutions(system, grid)):
        exact = None if every is None else every[place]
        if exact is not None and not bool(exact.isfinite().all()):
            break
        points.append(point(solved, labels, exact))
        if as_path(points).best(ridge) == solved.ridge:
            best = solved
    assert best is not None
    path = as_path(points)
    record.reasons["ridge"] = _explain(path, ridge, best.ridge, folds)
    if folds is None:
        return best, None, path
    if every is None:
        return best, folds.classified(torch.tensor([best.ridge]))[0], path
    return best, every[int((path.ridges - best.ridge).abs().argmin())], path


def _explain(path: SoftmaxPath, criterion: str, ridge: float, folds: CrossFit | None) -> str:
    """One sentence about a chosen ridge."""
    at = int((path.ridges - ridge).abs().argmin())
    words = "highest Laplace evidence"
    if criterion == "loo":
        words = "lowest approximate leave-one-out log loss, by one Newton step each,"
        if folds is not None:
            words = f"lowest held-out log loss over {folds.folds.count} folds"
    edge = "; it is at the edge of the grid" if at in (0, len(path.ridges) - 1) else ""
    degrees = float(path.degrees_of_freedom[at])
    return f"{words} of {len(path.ridges)} values, {degrees:.0f} effective parameters{edge}"


def _say_error(fitted: SoftmaxFit) -> None:
    """Refit without the few examples that matter most, and note how far one Newton step is from that."""
    start = time.perf_counter()
    found = fitted.check_loo()
    fitted.record.reasons["leave-one-out"] = (
        f"one Newton step; refitted without the {len(found.examples)} examples that matter most, their log "
        f"losses differ by at most {found.loss_error:.2g} (of {float(found.losses[:, 1].max()):.2g}), their "
        f"logits by {found.error:.2g}"
    )
    fitted.record.seconds["leave-one-out check"] = time.perf_counter() - start
