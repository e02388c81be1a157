"""``linnet.fit``: plan, solve, and choose the ridge."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

from torch import Tensor

from linnet.distributed import sharing
from linnet.errors import InputError
from linnet.fitting.accuracy import sound_fit
from linnet.fitting.arguments import Choices, base_outputs, check_ridge
from linnet.fitting.combinations import averaged, drawn_combinations, explain_outputs
from linnet.fitting.cross_fit import Chosen, CrossFit, chosen_ridge, find_cross_fit, given_ridge
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.plan import Size, affordable, choose_solver
from linnet.fitting.remarks import head_remarks, held_remarks, single_remarks, unused_remarks
from linnet.fitting.sketch import deflated, sketched
from linnet.fitting.softmax_fit import SoftmaxFit, SoftmaxTask, solve_softmax
from linnet.fitting.softmax_path import check_criterion
from linnet.fitting.solver import Shared, Sketch, Solver, Solving
from linnet.fitting.stochastic import solve_stochastically
from linnet.likelihoods.discrete import Bernoulli, Categorical
from linnet.likelihoods.likelihood import require_axis
from linnet.linalg.factorize import decomposing
from linnet.linear.dual import DualSystem
from linnet.linear.iterative import Iterative, Reused
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.label_problem import class_problem, class_targets
from linnet.linear.normal_system import NormalSystem, summed
from linnet.linear.preconditioner import TRIAL
from linnet.linear.problem import Problem
from linnet.linear.system import System
from linnet.linear.targets import (
    ALPHA,
    OneHot,
    Targets,
    check_arrangement,
    check_names,
    make_targets,
    position_targets,
)
from linnet.memory import require
from linnet.params import choice, no_targets, refuse, warn
from linnet.progress import waiting
from linnet.tangent.alike import require_same_arguments
from linnet.tangent.batch import Inputs, KnownInputs, check_finite, observe, take
from linnet.tangent.gather import gather_data
from linnet.tangent.gram import gram
from linnet.tangent.linearized import Linearized, pinned
from linnet.tangent.loaders import DataNotes
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.output_scale import scale_remarks

LOSSES = ("squared", "cross-entropy")


@overload
def fit(
    lin: Linearized,
    data: Any,
    loss: Literal["squared"] = "squared",
    *,
    targets: Tensor | OneHot | None = None,
    ridge: float | str = 1.0,
    solver: Solver = "auto",
    axis: int | None = None,
    memory: str | int | None = None,
) -> LinearFit: ...


@overload
def fit(
    lin: Linearized,
    data: Any,
    loss: Literal["cross-entropy"],
    *,
    targets: Tensor | OneHot | None = None,
    ridge: float | str = 1.0,
    solver: Solver = "auto",
    axis: int | None = None,
    memory: str | int | None = None,
) -> SoftmaxFit: ...


@overload
def fit(
    lin: Linearized,
    data: Any,
    loss: str,
    *,
    targets: Tensor | OneHot | None = None,
    ridge: float | str = 1.0,
    solver: Solver = "auto",
    axis: int | None = None,
    memory: str | int | None = None,
) -> Any: ...


@in_exact_mode
def fit(
    lin: Linearized,
    data: Any,
    loss: str = "squared",
    *,
    targets: Tensor | OneHot | None = None,
    ridge: float | str = 1.0,
    solver: Solver = "auto",
    axis: int | None = None,
    memory: str | int | None = None,
) -> LinearFit | SoftmaxFit:
    """Solve for the one optimum δ of Σᵢ ℓ(f₀(xᵢ) + Jᵢδ, yᵢ) + ½ ρ‖δ‖², with ℓ half the squared error to tᵢ.

    Args:
        lin: A linearized network; it is left as it is, the fit has a module of its own.
        data: Training data: an (x, y) pair, a Dataset, a DataLoader, an IterableDataset of samples, a list of
            batches or any other object that yields them; a stream that would take more than a quarter of the
            budget is written to a temporary file once and mapped. Integer y are classes and become α-scaled
            one-hot targets, text is numbered in alphabetical order (``class_names`` of the fit); float y
            (N, C) are used as they are. For the cross-entropy, y are integer classes or probabilities (N, C);
            0 and 1 for one output. x may be arrays, a data frame, images, mappings and lists of samples, here
            and in ``predict``; ``record.reasons["data"]`` says what was converted.
        loss: ``"squared"``, or ``"cross-entropy"`` of softmax (logistic for one output), which takes a few
            Newton steps and returns a ``SoftmaxFit``.
        targets: Targets (N, C) to use instead of those made from y, probabilities for the cross-entropy; or
            ``linnet.fitting.OneHot(scale)`` for another α than 15.
        ridge: ρ > 0, or the criterion that chooses it: ``"loo"``, ``"gcv"`` (squared loss) or ``"evidence"``;
            :func:`linnet.audit.tune_ridge` chooses it by validation data.
        solver: ``"dual"`` (the N·C × N·C kernel), ``"shared"`` (one N × N kernel for all outputs, the mean
            over four combinations of them, for many outputs; squared loss),
            ``"primal"`` (the P × P matrix JᵀJ, for many examples and few weights; squared loss), ``"sketch"``
            (the same along 2,048 directions of the weights, for many of both), ``"cg"`` (matrix-free in the
            weights), ``"sgd"`` (the recipe of Achille et al., to compare with), or ``"auto"``, which predicts
            operations and memory, chooses one that is exact where it can, and says what and why.
            ``linnet.fitting.Dual(file=...)``, ``Shared(combinations=...)``, ``Sketch(dim=...)``,
            ``CG(tolerance=...)`` and ``SGD(...)`` have their settings.
        axis: Which axis of outputs such as (N, T, C) or (N, C, H, W) is the classes, where y has an integer
            class at every position, (N, T) or (N, H, W), or −100 where one does not count; such outputs are
            zero in ``targets``. For the squared loss.
        memory: Budget such as ``"4GB"``; by default half of what is available.

    Returns:
        The solved fit.

    Raises:
        DataError: If the data are empty, not finite, of one class only or out of range.
        InputError: If an argument has a value that is not listed.
        MemoryBudgetError: If neither solver fits the budget.
        NumericalError: If conjugate or stochastic gradients or Newton's method do not converge.

    Source:
        Achille et al., CVPR 2021, eq. (3), (4), with ρ = λ/2 for sums over examples.

    Example:
        >>> import linnet, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> x = torch.linspace(-1, 1, 12)[:, None] * torch.ones(1, 2)
        >>> solved = fit(linnet.linearize(net), (x, x.prod(1, keepdim=True)), ridge="loo")
        >>> solved.predict(x).shape, solved.solver
        (torch.Size([12, 1]), 'dual')
    """
    device = lin.function.device if isinstance(lin, Linearized) else "cpu"
    with sharing("linnet.fit", device):
        return _shared_fit(lin, data, loss, targets, ridge, solver, axis, memory)


def _shared_fit(
    lin: Linearized,
    data: Any,
    loss: str,
    targets: Tensor | OneHot | None,
    ridge: float | str,
    solver: Solver,
    axis: int | None,
    memory: str | int | None,
) -> LinearFit | SoftmaxFit:
    """The fit, of which each process of several makes its share."""
    asked = Solving.of(solver)
    scale = targets.scale if isinstance(targets, OneHot) else ALPHA
    given = None if isinstance(targets, OneHot) else targets
    _check(lin, loss, ridge, asked.name, scale)
    _check_axis(axis, loss, given, asked.name)
    given = given.detach().clone() if isinstance(given, Tensor) else given
    said = DataNotes()
    lin = pinned(lin, lin.function.precision)  # which later answers keep
    lin.function.known = None  # the data of another fit
    x, y = gather_data(data, lin.function, memory=memory, said=said)
    if axis is None and said.classes:
        check_names(said.classes, lin.function.output_shape(x).numel())
    arguments = {"lin": lin, "x": x, "y": y, "loss": loss, "targets": targets, "ridge": ridge}
    require_same_arguments({**arguments, "solver": solver, "axis": axis, "memory": memory})
    if axis is not None:
        y, counted = position_targets(y, lin.function.output_shape(x), axis, scale)
        x = x if counted is None else observe(x, counted)

    lin.function.known = KnownInputs.of(x, said.columns)

    def make(chosen: Linearized) -> LinearFit | SoftmaxFit:
        """The fit on a linearization in a type of its own; what was made for another type stays behind."""
        fresh = asked if chosen is lin else asked.finer()
        found = _fit(chosen, Work(x, y, given, ridge, memory, fresh), loss, scale)
        found._targets = replace(found._targets, axis=axis)
        told = (*said.warnings, *unused_remarks(chosen.function), *found.record.warnings)
        reasons = {**found.record.reasons, **said.reasons()}
        found.record = replace(
            found.record, reasons=reasons, warnings=told, classes=said.classes, columns=said.columns
        )
        return found

    return sound_fit(lin, make, factorized=asked.name in ("auto", "dual", "shared", "primal", "sketch"))


@dataclass(frozen=True, eq=False)
class Work:
    """The problem of a fit: N examples, their labels, and arguments of ``fit``."""

    x: Inputs
    y: Tensor
    targets: Tensor | None
    ridge: float | str
    memory: str | int | None
    solving: Solving


def _fit(lin: Linearized, work: Work, loss: str, scale: float) -> LinearFit | SoftmaxFit:
    """The fit, whatever rounding does to it."""
    x, y, targets, ridge, memory = work.x, work.y, work.targets, work.ridge, work.memory
    settings, operator, file = work.solving.settings, work.solving.operator, work.solving.file
    started, asked = time.perf_counter(), settings.preconditioner
    lin.function.check_runs(take(x, slice(0, 1)))
    module, types = Linearized(lin.function), lin.function.precision
    f0 = base_outputs(module, x)
    check_arrangement(y, lin.function.output_shape(x))
    made = _targets(y, targets, f0, loss, scale)
    seconds = {"network": time.perf_counter() - started}
    size = Size(lin.function, x, f0.shape[1], loss, isinstance(ridge, str), memory)
    sketch = work.solving.sketch
    chosen, why = choose_solver(size, work.solving.name, settings, None if sketch is None else sketch.dim)
    reasons = {"solver": why}
    if chosen == "sketch":
        lin, reasons["sketch"] = sketched(lin, x, sketch or Sketch(size.default_dim() or 1), memory)
        module = Linearized(lin.function)
        chosen = "primal" if loss == "squared" else "cg"
    exact = types.exact(lin.function.dtype)  # where products with J are made in the network's type
    capture = types.capture if chosen == "dual" else exact.capture
    sums = types.sums if chosen == "primal" else exact.sums
    module = pinned(module, replace(types, capture=capture, sums=sums))
    folds = find_cross_fit(lin, x, y, made.values, memory)
    criterion = ridge if isinstance(ridge, str) else "given"
    of_head = (folds.said,) if folds is not None else head_remarks(lin.model, x, y)
    name = "sketch" if "sketch" in reasons else chosen
    said = (*held_remarks(lin.function), *of_head, *single_remarks(made), *_of_scale(lin, x, y, made, f0))
    record = Choices(name, criterion, reasons, said, seconds)
    if loss == "cross-entropy":
        settings = affordable(lin.function, x, settings, memory) if chosen == "cg" else settings
        labels = class_problem(module.function, x, f0, made.values)
        task = SoftmaxTask(module, made, labels, ridge, memory, file)
        return solve_softmax(task, record, settings, operator, folds)
    if chosen == "shared":
        return _by_one_kernel(module, work, made, f0, record)
    started = time.perf_counter()
    residual = made.values.to(f0) - f0
    problem = Problem(module.function, x, residual)
    system: System
    held: Tensor | None = None
    if chosen in ("dual", "primal"):
        system, taken = _factorized(problem, work, chosen, made, seconds, folds)
        reasons["ridge"], held = taken.why, taken.held_out
        record = replace(record, noise_factor=taken.noise_factor)
    else:
        assert not isinstance(ridge, str), why
        settings = affordable(lin.function, x, settings, memory)
        solve = solve_stochastically if chosen == "sgd" else Iterative
        shared = Reused(preconditioner=operator)
        if work.solving.deflating is not None:
            shared = deflated(lin, problem, work.solving.deflating, float(ridge), memory)
        system = solve(problem, ridge, settings, memory, shared)
        reasons["ridge"] = "given"
        own = (
            "an operator"
            if work.solving.deflating is None
            else f"a sketch of {work.solving.deflating.dim} directions"
        )
        reasons["preconditioner"] = _explain_steps(system, asked, own)
        held = None if folds is None else folds.iterated(system.ridge, system.settings, squared=True)
    seconds["solve"] = time.perf_counter() - started - seconds.get("kernel", 0.0)
    fitted = LinearFit(module, made, system, record)
    fitted.held_out = held
    return fitted


def _of_scale(lin: Linearized, x: Inputs, y: Tensor, made: Targets, f0: Tensor) -> tuple[str, ...]:
    """Whether outputs are probabilities where y are classes, whose outputs are logits or like them."""
    if y.is_floating_point() and made.classes is None:
        return ()
    found = scale_remarks(lin.function, Bernoulli() if f0.shape[1] == 1 else Categorical(), x, f0)
    for line in found:
        warn(line)
    return found


def _check(lin: Linearized, loss: str, ridge: float | str, solver: str, scale: float) -> None:
    """Raise on arguments that cannot work."""
    if not isinstance(lin, Linearized):
        raise InputError(
            f"lin is {type(lin).__name__}",
            expected="a Linearized",
            remedy="make one with linnet.linearize(model)",
        )
    no_targets("loss", loss)
    choice("loss", loss, LOSSES, 'pass loss="squared" or loss="cross-entropy"')
    check_ridge(ridge)
    if loss == "cross-entropy":
        check_criterion(ridge)
        if scale != ALPHA:
            raise InputError(
                f"targets=OneHot({scale!r}) with loss={loss!r}",
                expected="no scale: labels are probabilities",
                remedy="leave targets= out",
            )
    if solver == "shared" and loss != "squared":
        raise InputError(
            f'solver="shared" with loss={loss!r}',
            expected='loss="squared": the curvature of the cross-entropy is another for each output',
            remedy='pass solver="auto", or loss="squared"',
        )
    if solver == "primal" and loss != "squared":
        raise InputError(
            f'solver="primal" with loss={loss!r}',
            expected='"dual" or "cg": the curvature of the cross-entropy changes with every Newton step',
            remedy='pass solver="auto"',
        )
    if solver == "sketch" and loss != "squared" and isinstance(ridge, str):
        raise InputError(
            f'ridge={ridge!r} with solver="sketch" and loss={loss!r}',
            expected="a number: the cross-entropy of a sketch is solved by iterations",
            remedy='pass a number, or loss="squared"',
        )
    if solver == "sgd" and loss != "squared":
        raise InputError(
            f'solver="sgd" with loss={loss!r}',
            expected='"dual" or "cg": the cross-entropy has its optimum by Newton\'s method',
            remedy='pass solver="auto", or linnet.finetune(recipe="gaf") for training steps',
        )
    if solver in ("cg", "sgd") and isinstance(ridge, str):
        raise InputError(
            f'ridge={ridge!r} with solver="{solver}"',
            expected="a number: the criteria need eigenvalues",
            remedy='pass solver="dual" or "primal", or choose the ridge on a subset first',
        )


def _check_axis(axis: Any, loss: str, targets: Any, solver: str) -> None:
    """Raise unless classes along an axis can be fitted."""
    if axis is None:
        return
    require_axis(axis)
    if solver == "shared":
        raise InputError(
            f'axis={axis} with solver="shared"',
            expected="one row of outputs per example: positions do not share a kernel",
            remedy='pass solver="auto"',
        )
    if loss != "squared" or targets is not None:
        raise InputError(
            f"axis={axis} with " + ("targets=" if targets is not None else f"loss={loss!r}"),
            expected="the squared loss, with targets made from y",
            remedy='pass loss="squared" and leave targets= out',
        )


def _targets(y: Tensor, targets: Tensor | None, f0: Tensor, loss: str, scale: float) -> Targets:
    """The targets: made from y, or given."""
    if targets is not None:
        return _explicit(targets, f0, y, loss)
    if loss == "cross-entropy":
        return class_targets(y, f0.shape[1], f0.dtype)
    return make_targets(y, f0.shape[1], scale, dtype=f0.dtype)


def _explicit(targets: Tensor, f0: Tensor, y: Tensor, loss: str) -> Targets:
    """Targets given by the user; integer y still name the classes."""
    if not isinstance(targets, Tensor) or targets.shape != f0.shape:
        shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise InputError(
            f"targets has shape {shape}",
            expected=f"{tuple(f0.shape)}, like the outputs",
            remedy="pass one row of targets for each example, or leave targets= out",
        )
    check_finite(targets, "targets")
    if targets.is_complex():
        refuse(
            "targets", targets, "real numbers", "pass targets.real, or the two parts as outputs of their own"
        )
    values = targets.to(f0)
    if loss == "cross-entropy":
        return class_targets(values, f0.shape[1], f0.dtype)
    made = make_targets(values, f0.shape[1])
    one_hot = not y.is_floating_point() and y.ndim == 1 and bool((values.argmax(1) == y.to(f0.device)).all())
    return Targets(made.values, f0.shape[1] if one_hot else None, float(values.max()))


def _explain_steps(system: Iterative, asked: str, own: str) -> str:
    """One sentence about the preconditioner and what it took."""
    name = system.settings.preconditioner
    steps = f"{system.steps} steps"
    if asked != "auto" or system.settings.rank:
        return f"{name}: {'set by the user' if asked != 'given' else own}, {steps}"
    if name == "nystrom":
        return f"nystrom: not at the end after {TRIAL} steps without one, {steps} in all"
    return f"none: {steps} without one"


def _factorized(
    problem: Problem,
    work: Work,
    chosen: str,
    targets: Targets,
    seconds: dict[str, float],
    folds: CrossFit | None,
) -> tuple[System, Chosen]:
    """Form K or JᵀJ, choose ρ, solve; with cross-fitted heads, the held-out outputs too."""
    start = time.perf_counter()
    size, ridge, memory = problem.residual.numel(), work.ridge, work.memory
    rho = 1.0 if isinstance(ridge, str) else float(ridge)
    system: System
    if chosen == "dual":
        kernel = gram(problem.function, problem.x, form="full", memory=memory, file=work.solving.file)
        kernel = kernel.reshape(size, size).double()
        seconds["kernel"] = time.perf_counter() - start
        system = KernelSystem(problem, DualSystem(kernel, problem.residual, rho), memory)
    else:
        size = problem.function.space.dim
        system = NormalSystem(problem, summed(problem, memory), rho, memory)
        seconds["kernel"] = time.perf_counter() - start
    if not isinstance(ridge, str):
        return system, given_ridge(rho, folds)
    with decomposing(size):
        system.grid()  # keeps what it decomposes
    with waiting("the criteria at every ridge"):  # for JᵀJ a pass over the data
        path = system.path(None, targets)
    taken = chosen_ridge(path, ridge, targets, folds)
    return system.at(taken.ridge), taken


def _by_one_kernel(
    module: Linearized, work: Work, targets: Targets, f0: Tensor, record: Choices
) -> LinearFit:
    """Form the kernel that all outputs share, choose ρ, solve; with cross-fitted heads, by folds too."""
    asked, x, ridge, memory = work.solving.shared or Shared(), work.x, work.ridge, work.memory
    combinations = drawn_combinations(f0.shape[1], asked.combinations, asked.seed).to(f0.device)
    features = averaged(module.function, combinations)
    size = Size(features.function, x, f0.shape[1], "squared", isinstance(ridge, str), memory)
    require(size.shared_memory(), ['solve matrix-free with solver="cg"', "raise memory="])
    record.reasons["outputs"] = explain_outputs(module.function, x, combinations, memory)
    folds = find_cross_fit(module, x, work.y, targets.values, memory)
    folds = None if folds is None else replace(folds, combinations=combinations)
    start = time.perf_counter()
    problem = Problem(module.function, x, targets.values.to(f0) - f0, features=features)
    system = KernelSystem(
        problem, DualSystem(features.kernel(problem.examples, memory), problem.residual, 1.0), memory
    )
    record.seconds["kernel"] = time.perf_counter() - start
    start = time.perf_counter()
    if isinstance(ridge, str):
        with decomposing(system.n):
            path = system.path(None, targets)
        taken = chosen_ridge(path, ridge, targets, folds)
    else:
        taken = given_ridge(float(ridge), folds)
    record.reasons["ridge"] = taken.why
    record = replace(record, noise_factor=taken.noise_factor)
    fitted = LinearFit(module, targets, system.at(taken.ridge), record)
    fitted.held_out = taken.held_out
    record.seconds["solve"] = time.perf_counter() - start
    return fitted
