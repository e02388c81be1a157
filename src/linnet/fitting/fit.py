"""``linnet.fit``: plan, solve, and choose the ridge."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from linnet.distributed import shared_call
from linnet.errors import InputError
from linnet.fitting.accuracy import sound_fit
from linnet.fitting.arguments import Choices, base_outputs, check_ridge
from linnet.fitting.combinations import averaged, drawn_combinations, explain_outputs
from linnet.fitting.cross_fit import Chosen, CrossFit, chosen_ridge, explained, find_cross_fit, given_ridge
from linnet.fitting.last_layer import is_head
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.position_fit import PositionFit, fit_positions
from linnet.fitting.remarks import (
    data_remarks,
    empty_remarks,
    far_remarks,
    head_remarks,
    held_remarks,
    single_remarks,
    unused_remarks,
)
from linnet.fitting.sketch import deflated, sketched
from linnet.fitting.softmax_fit import SoftmaxFit, followed, softmax_grid
from linnet.fitting.solver import Shared, Size, Sketch, Solver, Solving, affordable, choose_solver
from linnet.fitting.stochastic import solve_stochastically
from linnet.likelihoods.discrete import Bernoulli, Categorical
from linnet.likelihoods.likelihood import require_axis
from linnet.linalg.factorize import decomposing
from linnet.linear.dual import DualSystem
from linnet.linear.features import Heads
from linnet.linear.formed_rows import FormedRows
from linnet.linear.iterative import Iterative, Reused
from linnet.linear.kernel_system import KernelSystem, whitened_kernel
from linnet.linear.label_problem import class_problem, class_targets
from linnet.linear.newton import FactorNewton, KernelNewton, WeightNewton
from linnet.linear.normal_newton import NormalNewton, summed_gram
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
    weighed_targets,
)
from linnet.memory import require
from linnet.params import choice, instance, no_targets, refuse, warn
from linnet.progress import waiting
from linnet.tangent.batch import Inputs, batch_size, check_finite, observe, take
from linnet.tangent.data import SHIFTED, Data
from linnet.tangent.gram import gram
from linnet.tangent.inputs import KnownInputs
from linnet.tangent.linearized import Linearized, pinned
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.preflight import scale_remarks

LOSSES = ("squared", "cross-entropy")
MANY = 3000  # equations that take seconds


class FitOptions(TypedDict, total=False):
    """Keywords of ``fit``."""

    targets: Tensor | OneHot | None
    ridge: float | str
    solver: Solver
    axis: int | None
    memory: str | int | None
    sample_weight: Any


@overload
def fit(
    lin: Linearized, data: Any, loss: Literal["squared"] = "squared", **options: Unpack[FitOptions]
) -> LinearFit: ...


@overload
def fit(
    lin: Linearized, data: Any, loss: Literal["cross-entropy"], **options: Unpack[FitOptions]
) -> SoftmaxFit: ...


@overload
def fit(lin: Linearized, data: Any, loss: str, **options: Unpack[FitOptions]) -> Any: ...


@in_exact_mode
@shared_call("linnet.fit")
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
    sample_weight: Any = None,
) -> LinearFit | SoftmaxFit | PositionFit:
    """Solve for the one optimum δ of Σᵢ wᵢ ℓ(f₀(xᵢ) + Jᵢδ, yᵢ) + ½ρ‖δ‖², with ℓ half the squared error to tᵢ.

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
            ``"primal"`` (the P × P matrix JᵀJ or JᵀΛJ, for many examples and few weights), ``"sketch"``
            (the same along 2,048 directions of the weights, for many of both), ``"cg"`` (matrix-free in the
            weights), ``"sgd"`` (the recipe of Achille et al., to compare with), or ``"auto"``, which predicts
            operations and memory, chooses one that is exact where it can, and says what and why.
            ``linnet.fitting.Dual(file=...)``, ``Shared(combinations=...)``, ``Sketch(dim=...)``,
            ``CG(tolerance=...)`` and ``SGD(...)`` have their settings.
        axis: Which axis of outputs such as (N, T, C) or (N, C, H, W) is the classes, where y has an integer
            class at every position, (N, T) or (N, H, W), or −100 where one does not count; such outputs are
            zero in ``targets``. Under the cross-entropy an example is a sequence with all its positions, and
            the fit a ``PositionFit``: solved in the weights, at a ridge that is a number.
        memory: Budget such as ``"4GB"``; by default half of what is available.
        sample_weight: w, what each example counts in the loss, (N,), positive; ``"balanced"`` for classes
            that count as much as each other, N in all. 1 by default. A target of weight w has the noise
            variance σ²/w, and leave-one-out as a criterion of the ridge counts it w times; probabilities are
            those of a mean weight of about 1.

    Returns:
        The solved fit.

    Raises:
        DataError: If the data are empty, not finite, out of range, or of one class only (squared loss).
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
    solving = Solving.of(solver)
    instance("lin", lin, Linearized, "a Linearized", "make one with linnet.linearize(model)")
    no_targets("loss", loss)
    choice("loss", loss, LOSSES, 'pass loss="squared" or loss="cross-entropy"')
    check_ridge(ridge)
    _check_together(loss, targets, ridge, solving.name, axis)
    if sample_weight is not None:
        _check_weighing(solving.name, axis)
    scale = targets.scale if isinstance(targets, OneHot) else ALPHA
    given = None if isinstance(targets, OneHot) else targets
    given = given.detach().clone() if isinstance(given, Tensor) else given
    lin = pinned(lin, lin.function.precision)  # which later answers keep
    lin.function.known = None  # the data of another fit
    data = Data.of(data, lin.function, memory=memory, text=True).weighing(sample_weight)
    x, y = data.pair
    if axis is None and data.classes:
        check_names(data.classes, lin.function.output_shape(x).numel())
    moved = SHIFTED in data.notes
    if axis is not None and loss == "cross-entropy":
        lin.function.known = KnownInputs.of(x, data.columns, lin.function.token, moved)
        return fit_positions(Linearized(lin.function), data, float(ridge), solving, axis, memory)
    if axis is not None:
        y, counted = position_targets(y, lin.function.output_shape(x), axis, scale)
        x = x if counted is None else observe(x, counted)

    lin.function.known = KnownInputs.of(x, data.columns, lin.function.token, moved)

    def make(chosen: Linearized) -> LinearFit | SoftmaxFit:
        """The fit on a linearization in a type of its own; what was made for another type stays behind."""
        start = time.perf_counter()
        chosen.function.check_runs(take(x, slice(0, 1)))
        f0 = base_outputs(Linearized(chosen.function), x)
        check_arrangement(y, chosen.function.output_shape(x))
        made = replace(_targets(y, given, f0, loss, scale), axis=axis)
        made = weighed_targets(made, data.weights)
        seconds = {"network": time.perf_counter() - start}
        asked = solving if chosen is lin else solving.finer()
        found = _fit(chosen, FitRequest(x, y, f0, made, loss, ridge, memory, asked), seconds)
        told = (*data.warnings, *unused_remarks(chosen.function), *found.record.warnings)
        reasons = {**found.record.reasons, **data.reasons}
        named = {"classes": data.classes, "columns": data.columns}
        found.record = replace(found.record, reasons=reasons, warnings=told, **named)
        return found

    return sound_fit(lin, make, factorized=solving.name in ("auto", "dual", "shared", "primal", "sketch"))


def _check_together(loss: str, targets: Any, ridge: float | str, solver: str, axis: int | None) -> None:
    """Raise on arguments that do not go together."""
    if axis is not None:
        require_axis(axis)
    likely, searched, one_hot = loss != "squared", isinstance(ridge, str), isinstance(targets, OneHot)
    table = (
        (likely and ridge == "gcv", f"ridge={ridge!r}",
         "a criterion that the cross-entropy has: GCV is defined by squared residuals",
         'pass ridge="loo" (leave-one-out log loss) or ridge="evidence"'),
        (likely and one_hot and targets.scale != ALPHA, f"targets={targets!r}",
         "no scale: labels are probabilities", "leave targets= out"),
        (likely and solver in ("shared", "sgd"), f'solver="{solver}"',
         '"dual", "primal", "cg" or "sketch": the curvature of the cross-entropy changes with every output',
         'pass solver="auto", or loss="squared"'),
        (solver in ("cg", "sgd") and searched, f'ridge={ridge!r}, solver="{solver}"',
         "a number: the criteria need eigenvalues",
         'pass solver="dual" or "primal", or choose the ridge on a subset first'),
        (axis is not None and solver == "shared", f'axis={axis}, solver="shared"',
         "one row of outputs per example: positions do not share a kernel", 'pass solver="auto"'),
        (axis is not None and likely and searched, f"axis={axis}, ridge={ridge!r}",
         "a number: there is no kernel, whose eigenvalues the criteria need",
         "fit at some ridges, and compare the sums of held_out_losses()"),
        (axis is not None and likely and solver not in ("auto", "cg"), f'axis={axis}, solver="{solver}"',
         '"auto" or "cg": a class at every position is solved in the weights', 'pass solver="auto"'),
        (axis is not None and targets is not None and not one_hot, f"axis={axis}, targets=",
         "targets made from y", "leave targets= out"),
    )  # fmt: skip
    for wrong, what, expected, remedy in table:
        if wrong:
            raise InputError(f"{what} with loss={loss!r}", expected, remedy)


def _check_weighing(solver: str, axis: int | None) -> None:
    """Raise where examples cannot count more than others."""
    table = (
        (axis is not None, f"axis={axis}", "one target or class for each example"),
        (solver == "sgd", 'solver="sgd"', "a solver that gives the optimum"),
    )
    for wrong, what, expected in table:
        if wrong:
            raise InputError(f"sample_weight= with {what}", expected, "leave sample_weight= out")


@dataclass(frozen=True, eq=False)
class FitRequest:
    """A fit to be made: its data, and the arguments of ``fit``."""

    x: Inputs  # N examples
    y: Tensor  # their labels
    f0: Tensor  # f₀, (N, C)
    targets: Targets  # t, or label probabilities
    loss: str
    ridge: float | str
    memory: str | int | None
    solving: Solving


def _fit(lin: Linearized, task: FitRequest, seconds: dict[str, float]) -> LinearFit | SoftmaxFit:
    """The fit, whatever rounding does to it."""
    x, made, ridge, asked = task.x, task.targets, task.ridge, task.solving
    size = Size(lin.function, x, task.f0.shape[1], task.loss, isinstance(ridge, str), task.memory)
    chosen, why = choose_solver(size, asked)
    name, reasons, squared = chosen, {"solver": why}, task.loss == "squared"
    solved = min(size.equations, lin.function.space.dim)
    if squared and asked.name == "auto" and solved > max(MANY, batch_size(x)) and is_head(lin.function, x):
        warn(
            f'the {size.c} outputs of the last layer share one kernel: solver="shared" is exact here and has '
            f"{batch_size(x):,} equations in place of {solved:,}"
        )
    types = lin.function.precision
    if chosen == "sketch":
        sketch = asked.sketch or Sketch(size.default_dim() or 1)
        lin, reasons["sketch"] = sketched(lin, x, sketch, task.memory)
        chosen = "primal"
    exact = types.exact(lin.function.dtype)  # where products with J are made in the network's type
    capture = types.capture if chosen == "dual" else exact.capture
    sums = types.sums if chosen == "primal" and squared else exact.sums
    module = pinned(Linearized(lin.function), replace(types, capture=capture, sums=sums))
    folds = find_cross_fit(lin, x, task.y, made, task.memory)
    of_head = (folds.said,) if folds is not None else head_remarks(lin.model, x, task.y)
    said = (*held_remarks(lin.function), *of_head, *single_remarks(made), *_of_data(lin, task))
    said = said if squared else (*empty_remarks(made), *said)
    record = Choices(name, ridge if isinstance(ridge, str) else "given", reasons, said, seconds)
    start = time.perf_counter()
    solve: Callable[..., tuple[Any, Chosen]]
    system: Any
    if not squared:
        solve = _newton_by_factors if chosen in ("dual", "primal") else _newton_in_weights
    else:
        solve = _factorized if chosen in ("dual", "shared", "primal") else _iterated
    system, taken = solve(module, task, chosen, record, folds)
    reasons["ridge"] = taken.why
    seconds["solve"] = time.perf_counter() - start - seconds.get("kernel", 0.0)
    fitted: LinearFit | SoftmaxFit
    if squared:
        fitted = LinearFit(module, made, system, replace(record, noise_factor=taken.noise_factor))
    else:
        reasons["newton"] = f"{system.described()}, gradient {system.certificate():.0e} of that at the start"
        fitted = SoftmaxFit(module, made, system, record)
        if chosen in ("dual", "primal") and ridge == "loo" and folds is None and fitted.n > 1:
            _say_error(fitted)
    fitted.held_out, fitted.chosen_path = taken.held_out, taken.path
    return fitted


def _of_data(lin: Linearized, task: FitRequest) -> tuple[str, ...]:
    """What is likely to be a mistake in the data, or in the network that they are given to."""
    if task.y.is_floating_point() and task.targets.classes is None:
        away = task.targets.values.double() - task.f0.to(task.targets.values).double()
        found = far_remarks(away)
    else:
        likelihood = Bernoulli() if task.f0.shape[1] == 1 else Categorical()
        found = scale_remarks(lin.function, likelihood, task.x, task.f0)
    found = (*found, *data_remarks(task.x, task.targets))
    for line in found:
        warn(line)
    return found


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
        remedy = "pass targets.real, or the two parts as outputs of their own"
        refuse("targets", targets, "real numbers", remedy)
    values = targets.to(f0)
    if loss == "cross-entropy":
        return class_targets(values, f0.shape[1], f0.dtype)
    made = make_targets(values, f0.shape[1])
    one_hot = not y.is_floating_point() and y.ndim == 1 and bool((values.argmax(1) == y.to(f0.device)).all())
    return Targets(made.values, f0.shape[1] if one_hot else None, float(values.max()))


# -- solving ---------------------------------------------------------------------------------------
# By a kernel or JᵀJ, by iterations, or by Newton's method in either space: each gives the solved equations,
# and the ridge with its reason.


def _factorized(
    module: Linearized, task: FitRequest, chosen: str, record: Choices, folds: CrossFit | None
) -> tuple[System, Chosen]:
    """Form K, the one K̄ of all outputs, or JᵀJ; choose ρ, solve; with cross-fitted heads, by folds too."""
    ridge, memory, residual = task.ridge, task.memory, task.targets.values.to(task.f0) - task.f0
    rho = 1.0 if isinstance(ridge, str) else float(ridge)
    features = None
    if chosen == "shared":
        combinations, features = _shared_features(module, task, record)
        folds = None if folds is None else replace(folds, combinations=combinations)
    start = time.perf_counter()
    problem = Problem(module.function, task.x, residual, features=features).weighing(task.targets.weights)
    system: System
    if chosen == "primal":
        size = problem.function.space.dim
        system = NormalSystem(problem, summed(problem, memory), rho, memory)
    else:
        kernel = _kernel(module, task) if features is None else features.kernel(problem.examples, memory)
        if problem.weights is not None:  # the one in a file is kept
            kernel = whitened_kernel(kernel.clone(), problem)
        size, system = len(kernel), KernelSystem(problem, DualSystem(kernel, problem.residual, rho), memory)
    record.seconds["kernel"] = time.perf_counter() - start
    if not isinstance(ridge, str):
        return system, given_ridge(rho, folds)
    with decomposing(size):
        system.grid()  # keeps what it decomposes
    with waiting("the criteria at every ridge"):  # for JᵀJ a pass over the data
        path = system.path(None, task.targets)
    taken = chosen_ridge(path, ridge, task.targets, folds)
    return system.at(taken.ridge), taken


def _kernel(module: Linearized, task: FitRequest) -> Tensor:
    """K, (N·C, N·C), float64."""
    kernel = gram(module.function, task.x, form="full", memory=task.memory, file=task.solving.file)
    return kernel.reshape(task.f0.numel(), -1).double()


def _shared_features(module: Linearized, task: FitRequest, record: Choices) -> tuple[Tensor, Heads]:
    """A few combinations of the outputs, and what their mean kernel is that of."""
    asked, outputs = task.solving.shared or Shared(), task.f0.shape[1]
    combinations = drawn_combinations(outputs, asked.combinations, asked.seed).to(task.f0.device)
    features = averaged(module.function, combinations)
    size = Size(features.function, task.x, outputs, "squared", isinstance(task.ridge, str), task.memory)
    require(size.shared_memory(), ['solve matrix-free with solver="cg"', "raise memory="])
    record.reasons["outputs"] = explain_outputs(module.function, task.x, combinations, task.memory)
    return combinations, features


def _iterated(
    module: Linearized, task: FitRequest, chosen: str, record: Choices, folds: CrossFit | None
) -> tuple[System, Chosen]:
    """Solve by conjugate or stochastic gradients at the ridge that is given."""
    ridge, memory, asked = float(task.ridge), task.memory, task.solving
    problem = Problem(module.function, task.x, task.targets.values.to(task.f0) - task.f0)
    problem = problem.weighing(task.targets.weights)
    settings = affordable(module.function, task.x, asked.settings, memory)
    shared = Reused(preconditioner=asked.operator)
    if asked.deflating is not None:
        shared = deflated(module, problem, asked.deflating, ridge, memory)
    solve = solve_stochastically if chosen == "sgd" else Iterative
    system = solve(problem, ridge, settings, memory, shared)
    record.reasons["preconditioner"] = _explain_steps(system, asked)
    held = None if folds is None else folds.iterated(ridge, system.settings, squared=True)
    return system, Chosen(ridge, "given", held)


def _explain_steps(system: Iterative, asked: Solving) -> str:
    """One sentence about the preconditioner and what it took."""
    name, wanted = system.settings.preconditioner, asked.settings.preconditioner
    steps = f"{system.steps} steps"
    if wanted == "given":
        of = "an operator" if asked.deflating is None else f"a sketch of {asked.deflating.dim} directions"
        return f"{name}: {of}, {steps}"
    if wanted != "auto" or system.settings.rank:
        return f"{name}: set by the user, {steps}"
    if name == "nystrom":
        return f"nystrom: not at the end after {TRIAL} steps without one, {steps} in all"
    return f"none: {steps} without one"


def _newton_in_weights(
    module: Linearized, task: FitRequest, chosen: str, record: Choices, folds: CrossFit | None
) -> tuple[WeightNewton, Chosen]:
    """The cross-entropy at the ridge that is given, by products with J."""
    ridge, problem = float(task.ridge), class_problem(module.function, task.x, task.f0, task.targets)
    settings = affordable(module.function, task.x, task.solving.settings, task.memory)
    system = WeightNewton(problem, ridge, settings, None, task.solving.operator, memory=task.memory)
    held = None if folds is None else folds.iterated(ridge, settings, squared=False)
    return system, Chosen(ridge, "given", held)


def _newton_by_factors(
    module: Linearized, task: FitRequest, chosen: str, record: Choices, folds: CrossFit | None
) -> tuple[FactorNewton, Chosen]:
    """The cross-entropy by factors of K or H, at the ridge that is given or that a criterion prefers."""
    start, ridge, memory = time.perf_counter(), task.ridge, task.memory
    problem, dual = class_problem(module.function, task.x, task.f0, task.targets), chosen == "dual"
    steps = task.solving.settings.max_steps
    kernel = _kernel(module, task) if dual else None
    rows = None if dual else FormedRows(problem.function, problem.x, problem.c, memory)

    def solved(rho: float) -> FactorNewton:
        """The optimum at a ridge."""
        if kernel is not None:
            return KernelNewton(problem, kernel, rho, None, steps, memory)
        return NormalNewton(problem, rho, None, steps, memory, rows)

    if not isinstance(ridge, str):
        record.seconds["kernel"] = time.perf_counter() - start
        system = solved(float(ridge))
        held = None if folds is None else folds.classified(torch.tensor([system.ridge]), dual)[0]
        return system, Chosen(system.ridge, "given", held)
    gram = kernel if rows is None else summed_gram(problem, rows)
    assert gram is not None
    record.seconds["kernel"] = time.perf_counter() - start
    grid = softmax_grid(gram, problem.base.numel(), module.function.dtype)
    system = solved(float(grid[0]))
    every = folds.classified(grid, dual) if folds is not None and ridge == "loo" else None
    path, best = followed(system, grid, task.targets, ridge, every)
    held = None
    if every is not None:
        held = every[int((path.ridges - best.ridge).abs().argmin())]
    elif folds is not None:
        held = folds.classified(torch.tensor([best.ridge]), dual)[0]
    return best, Chosen(best.ridge, explained(path, ridge, best.ridge, folds), held, path=path)


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
