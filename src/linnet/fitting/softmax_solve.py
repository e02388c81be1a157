"""Solving a cross-entropy fit: kernel, ridge, Newton's method and the record of the solution."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linnet.fitting.cross_fit import CrossFit
from linnet.fitting.linear_fit import Record
from linnet.fitting.remarks import empty_remarks
from linnet.fitting.softmax_fit import SoftmaxFit, steps_in_words
from linnet.fitting.softmax_path import SoftmaxPath, as_path, point, softmax_grid, solutions
from linnet.linalg.operator import LinearOperator
from linnet.linear.iteration import CGSettings
from linnet.linear.softmax_dual import SoftmaxDual
from linnet.linear.softmax_loss import ClassLoss
from linnet.linear.softmax_primal import SoftmaxPrimal
from linnet.linear.targets import Targets
from linnet.tangent.batch import Inputs
from linnet.tangent.gram import gram
from linnet.tangent.linearized import Linearized


@dataclass(frozen=True, eq=False)
class SoftmaxTask:
    """The problem to be solved."""

    module: Linearized  # the linearized network, which the fit takes over
    x: Inputs  # N training examples
    targets: Targets  # label probabilities
    base: Tensor  # f₀, (N, C)
    ridge: float | str  # ρ, or ``"loo"`` or ``"evidence"``
    memory: str | int | None  # budget of kernels
    file: str | None  # file of the kernel

    @property
    def loss(self) -> ClassLoss:
        """The cross-entropy against the labels."""
        return ClassLoss(self.targets.values.double())


def solve_softmax(
    task: SoftmaxTask,
    record: Record,
    settings: CGSettings,
    operator: LinearOperator | None,
    folds: CrossFit | None,
) -> SoftmaxFit:
    """Solve for the cross-entropy optimum."""
    started = time.perf_counter()
    seconds, reasons = record.seconds, record.reasons
    system: SoftmaxDual | SoftmaxPrimal
    held: Tensor | None = None
    path: SoftmaxPath | None = None
    if record.solver == "dual":
        system, held, path = _solve_dual(task, record, settings, folds)
    else:
        assert not isinstance(task.ridge, str)
        function = task.module.function
        system = SoftmaxPrimal(function, task.x, task.base, task.loss, task.ridge, settings, (None, operator))
        system.memory = task.memory
        reasons["ridge"] = "given"
        held = None if folds is None else folds.iterated(system.ridge, settings, squared=False)
    reasons["newton"] = f"{steps_in_words(system)}, gradient {system.certificate():.0e} of that at the start"
    seconds["solve"] = time.perf_counter() - started - seconds.get("kernel", 0.0)
    full = replace(record, warnings=(*empty_remarks(task.targets), *record.warnings))
    fitted = SoftmaxFit(task.module, task.x, task.targets, system, full, task.memory)
    fitted.held_out, fitted.chosen_path = held, path
    if isinstance(system, SoftmaxDual) and task.ridge == "loo" and folds is None and fitted.n > 1:
        _say_error(fitted)
    return fitted


def _solve_dual(
    task: SoftmaxTask, record: Record, settings: CGSettings, folds: CrossFit | None
) -> tuple[SoftmaxDual, Tensor | None, SoftmaxPath | None]:
    """Form K, choose ρ, take Newton steps; with cross-fitted heads, the held-out outputs too."""
    start = time.perf_counter()
    function, size = task.module.function, task.base.numel()
    kernel = gram(function, task.x, form="full", memory=task.memory, file=task.file)
    kernel = kernel.reshape(size, size).double()
    record.seconds["kernel"] = time.perf_counter() - start
    ridge, loss, most = task.ridge, task.loss, settings.max_steps
    if not isinstance(ridge, str):
        record.reasons["ridge"] = "given"
        system = SoftmaxDual(kernel, task.base, loss, float(ridge), max_steps=most)
        held = None if folds is None else folds.classified(torch.tensor([system.ridge]))[0]
        return system, held, None
    grid = softmax_grid(kernel, function.dtype)
    every = folds.classified(grid) if folds is not None and ridge == "loo" else None
    labels, points = task.targets.labels, []
    assert labels is not None
    best: SoftmaxDual | None = None
    system = SoftmaxDual(kernel, task.base, loss, float(grid[0]), max_steps=most)
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
