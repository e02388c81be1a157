"""Solves an adaptation: loss, ridge, and the solver for kernels that exceed memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from linnet.app.data import draw_shots
from linnet.app.runs.settings import SQUARED, Solving
from linnet.errors import InputError, MemoryBudgetError
from linnet.fitting.centered import CenteredLinear
from linnet.fitting.fit import fit as fit_linear
from linnet.fitting.solver import CG, Dual, Nystrom, Solver
from linnet.memory import parse_bytes
from linnet.report.kinds import Fit, loo_log_loss, loss_of
from linnet.report.wording import number
from linnet.tangent.coordinates import Coordinates
from linnet.tangent.linearized import Linearized
from linnet.tangent.store import discard

PILOT = 1500  # equations of the small dual fit that chooses the ridge of a large one
_WORDS = {"loo": "leave-one-out", "gcv": "generalized cross-validation", "evidence": "evidence"}
Solved = tuple[Fit, Fit | None]


def solve(lin: Linearized, data: tuple[Tensor, Tensor], solving: Solving, file: Path) -> Solved:
    """Fit with the loss that is requested, or the one that leave-one-out prefers."""
    y, kept = data[1], solving.kernel
    if y.is_floating_point() and solving.loss == "cross-entropy":
        raise InputError(
            "loss is 'cross-entropy' for a regression",
            expected="classes: the cross-entropy is that of their probabilities",
            remedy="leave --loss out, or pass --loss squared",
        )
    if kept is None:
        discard(file)  # a finished one is of a run that was killed, and may be of other settings
    file = kept or file
    try:
        if solving.loss != "auto":
            return _solve(lin, data, solving, file)
        if y.is_floating_point():
            found = _solve(lin, data, replace(solving, loss="squared"), file)
            found[0].record.reasons["loss"] = "a regression"
            return found
        return _better(lin, data, solving, file)
    finally:
        if kept is None:
            discard(file)  # the fit has it from here on; a partial one stays for the next run


def _better(lin: Linearized, data: tuple[Tensor, Tensor], solving: Solving, file: Path) -> Solved:
    """Both losses, and the one of lower leave-one-out log loss on the training samples."""
    why = "a class has one sample, so leave-one-out cannot compare" if _singles(data[1]) else ""
    if solving.ridge == "gcv":
        why = "ridge gcv is of the squared loss, so leave-one-out cannot compare"
    if solving.solver in SQUARED:
        why = f"solver {solving.solver} is of the squared loss"
    if why:
        found = _solve(lin, data, replace(solving, loss="squared"), file)
        found[0].record.reasons["loss"] = why
        return found
    both = [_solve(lin, data, replace(solving, loss=loss), file) for loss in ("squared", "cross-entropy")]
    scores = [loo_log_loss(pilot or fit) for fit, pilot in both]
    best = int(scores[1] < scores[0])
    fit, other = both[best][0], both[1 - best][0]
    fit.record.reasons["loss"] = (
        f"lower leave-one-out log loss on the training samples, {number(scores[best])} against "
        f"{number(scores[1 - best])} of the {loss_of(other)} loss at its best temperature"
        if best
        else f"lower leave-one-out log loss on the training samples at its best temperature, "
        f"{number(scores[best])} against {number(scores[1 - best])} of the {loss_of(other)}"
    )
    return both[best]


def _solve(lin: Linearized, data: tuple[Tensor, Tensor], solving: Solving, file: Path) -> Solved:
    """The fit of one loss."""
    if solving.solver == "cg":
        return _by_gradients(lin, data, solving, "set by the user")
    criterion, why = _criterion(solving, lin, data[1])
    searched = isinstance(criterion, str)
    tries: list[Solver] = [Dual(file) if forms_kernel(solving) else solving.solver]
    if solving.solver == "auto" and searched and solving.loss == "squared":
        # where the kernel is too large: JᵀJ, or a sketch, for which a metric leaves no room
        tries.append("primal" if isinstance(lin.model, Coordinates) else "auto")
    told = ""
    for solver in tries:
        try:
            found: Fit = fit_linear(
                lin, data, solving.loss, ridge=criterion, solver=solver, memory=solving.memory
            )
        except MemoryBudgetError as error:
            if solving.solver != "auto":
                raise
            told = told or f"the kernel is too large: {error.what}"
            continue
        if searched:
            found.record.reasons["ridge"] += why
            if solving.solver == "auto":
                found.record.reasons["solver"] = told or _why_dual(solving.loss)
        if found.solver != "cg":
            return found, None
        told = found.record.reasons["solver"]
    return _by_gradients(lin, data, solving, told)


def forms_kernel(solving: Solving) -> bool:
    """Whether the kernel is formed first: where it is asked for, or a ridge is to be chosen."""
    return solving.solver == "dual" or (solving.solver == "auto" and isinstance(solving.ridge, str))


def _by_gradients(lin: Linearized, data: tuple[Tensor, Tensor], solving: Solving, reason: str) -> Solved:
    """The fit by conjugate gradients, and why."""
    fit, pilot = _solve_large(lin, data, solving)
    fit.record.reasons["solver"] = reason
    return fit, pilot


def _why_dual(loss: str) -> str:
    """Why the kernel is formed when a ridge is to be chosen."""
    if loss == "squared":
        return "the ridge is chosen from the kernel's eigenvalues"
    return "every ridge of the path takes its Newton steps on one kernel"


def _singles(y: Tensor) -> int:
    """The number of classes with one sample."""
    return 0 if y.is_floating_point() else int((torch.bincount(y.cpu().flatten()) == 1).sum())


def _criterion(solving: Solving, lin: Linearized, y: Tensor) -> tuple[float | str, str]:
    """The ridge or its criterion, and why it is not what auto usually is."""
    if solving.ridge == "auto" and (singles := _singles(y)):
        return "evidence", (
            "; by evidence, since leave-one-out cannot score a class with a single sample, "
            f"and {singles} class(es) have one"
        )
    probed = any(isinstance(layer, CenteredLinear) for layer in lin.model.modules())
    if solving.ridge == "auto" and solving.metric != "none" and probed:
        return "evidence", "; by evidence and not by leave-one-out, which knows the labels behind a probe"
    return solving.criterion, ""


def _solve_large(lin: Linearized, data: tuple[Tensor, Tensor], solving: Solving) -> tuple[Fit, Fit]:
    """Conjugate gradients, with the ridge and the temperature of a dual fit of some of the samples."""
    x, y = data
    outputs = lin.base(x[:1]).shape[1]
    count = max(2, min(len(x), PILOT // outputs))
    if y.is_floating_point():
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:count].sort().values
    else:
        names = [str(c) for c in range(outputs)]
        drawn = draw_shots(y.cpu().numpy(), max(1, count // outputs), 0, names, at_most=True)
        rows = torch.from_numpy(drawn)
    rows = rows.to(x.device)
    budget = parse_bytes(solving.memory, lin.function.device)
    rank = min(100, len(x), budget // (16 * lin.space.dim * lin.function.dtype.itemsize))
    criterion, why = _criterion(solving, lin, y[rows])
    few = (x[rows], y[rows])
    try:
        pilot: Fit = fit_linear(lin, few, solving.loss, ridge=criterion, solver="dual", memory=solving.memory)
    except MemoryBudgetError as error:
        raise MemoryBudgetError(
            f"the fit of {len(rows)} samples that chooses ridge and temperature is too large: {error.what}",
            error.expected,
            remedy="raise memory=, or fit fewer parameters with params=",
        ) from error
    solver = CG(preconditioner=Nystrom(int(rank)) if rank else "auto")
    fit: Fit = fit_linear(lin, data, solving.loss, ridge=pilot.ridge, solver=solver, memory=solving.memory)
    if isinstance(criterion, str):
        part = "all samples" if len(rows) == len(x) else f"{len(rows)} of {len(x)} of the samples"
        fit.record = replace(fit.record, criterion=criterion)
        fit.record.reasons["ridge"] = f"chosen by {_WORDS[criterion]} on {part}{why}"
    return fit, pilot
