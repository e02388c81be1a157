"""Influence of every training example on every prediction: exactly, by conjugate gradients, or by EKFAC.

With G = JᵀJ, the residual rᵢ = tᵢ − f(xᵢ) and the leverage Hᵢ = Jᵢ (G + ρI)⁻¹ Jᵢᵀ (C x C),

    eᵢ = (I − Hᵢ)⁻¹ rᵢ                                         residual of the fit without i
    δ − δ₋ᵢ = (G + ρI)⁻¹ Jᵢᵀ eᵢ                                Achille et al., CVPR 2021, eq. (7)
    f(x) − f₋ᵢ(x) = J(x) (G + ρI)⁻¹ Jᵢᵀ eᵢ                     eq. (8) and appendix A.3

Their Sherman-Morrison step has the wrong sign: removing an example lowers G, so that the factor of eq. (8) is
1 + α/(N − 1 − α), not 1 − α/(N − 1 + α). Brute-force retraining agrees with the form here, to rounding.

Influence on the loss, to first order: one number for each training and each test example.

    ∇ℓ(x)·(δ − δ₋ᵢ),   ∇ℓ = J(x)ᵀ(f(x) − t)

is what influence functions estimate (Koh and Liang, ICML 2017), with the weight change itself in place of an
approximation. It takes one gradient of each test example instead of C, and one product with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.audit.predictors import check_fit, check_fitted
from linnet.errors import InputError
from linnet.fitting.arguments import checked_inputs, positions
from linnet.fitting.fitted import Fitted
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.solved_fit import unweighed
from linnet.linear.dual import DualSystem
from linnet.linear.formed_rows import FormedRows, form_rows
from linnet.linear.iterative import CGSettings, Effort, Iterative, Reused
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.label_problem import class_targets
from linnet.linear.preconditioner import CurvatureInverse
from linnet.linear.problem import Problem
from linnet.linear.targets import check_arrangement, make_targets, position_targets
from linnet.memory import Plan, parse_bytes, require
from linnet.params import choice
from linnet.shown import Record, frame
from linnet.solvers.cg import relative_residual
from linnet.tangent.batch import Inputs, batch_size, named_tensor, split, take
from linnet.tangent.data import examples
from linnet.tangent.functional import Functional
from linnet.tangent.inputs import in_rows, known_answers
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.nonfinite import require_finite_products

if TYPE_CHECKING:
    from pandas import DataFrame

METHODS = ("auto", "exact", "cg", "ekfac")
NEAR = Effort(50, 0.1)  # steps of conjugate gradients from EKFAC at the most, and residual at which they end
TOLD = 6  # training examples that are named where the result is shown
TOGETHER = 64  # columns of the inverse contracted at once, and test examples differentiated at once


@dataclass(frozen=True, repr=False)
class Influence(Record):
    """Influence of each training example on each prediction.

    Args:
        outputs: f(x) − f₋ᵢ(x), prediction with example i less prediction without it, (N, T, C).
        loss: ℓ − ℓ₋ᵢ with ℓ = ½‖t − f(x)‖² of a test example, (N, T); negative where example i helped.
            ``None`` without labels.
        method: ``"exact"``, ``"cg"`` or ``"ekfac"``.
        residual: Certificate: the relative residual of the linear systems behind it.
    """

    outputs: Tensor
    loss: Tensor | None
    method: str
    residual: float

    def to_frame(self) -> DataFrame:
        """A pandas table, one row for each training example, prediction and output.

        Returns:
            ``training``, ``test``, ``output``, ``influence`` and, where labels were given, ``loss``.

        Raises:
            DependencyError: If pandas is missing.
        """
        n, t, c = self.outputs.shape
        training, test, output = torch.cartesian_prod(*map(torch.arange, (n, t, c))).unbind(1)
        columns = {"training": training, "test": test, "output": output, "influence": self.outputs.flatten()}
        loss = None if self.loss is None else self.loss[:, :, None].expand(n, t, c).flatten()
        return frame({**columns, "loss": loss}, "row")

    def _shown(self) -> dict[str, Any]:
        n, t, c = self.outputs.shape
        size = self.outputs.abs().amax(1).amax(1)
        return {
            "training examples": n,
            "predictions": t,
            "outputs": c,
            "method": self.method,
            "residual": self.residual,
            "largest": float(size.max()),
            "most influential": size.argsort(descending=True)[:TOLD],
        }


@in_exact_mode
@torch.no_grad()
def influence(
    fit: Fitted,
    x: Inputs,
    method: str = "auto",
    labels: Any = None,
    memory: str | int | None = None,
    *,
    directions: Tensor | None = None,
) -> Influence:
    """Influence of each training example on each of T predictions, and on their losses.

    ``"exact"`` uses the kernel of a dual fit: K(x, X) M where there are few test examples, else the weight
    changes δ − δ₋ᵢ of :func:`weight_changes`, whichever takes fewer operations. ``"cg"`` solves T·C (with the
    leave-one-out residuals of a primal fit N·C) right-hand sides in blocks with formed rows of J. ``"ekfac"``
    stands for (G̃ + ρI)⁻¹ with the eigenvalue-corrected Kronecker factors G̃, and a few block steps of
    conjugate gradients with G̃ as preconditioner, until every right-hand side has a relative residual of 0.1:
    two or three where the ridge is of the size of the kernel's diagonal, and 50 at the most.

    Args:
        fit: A fit of ``linnet.fit`` or ``linnet.adapt``; of the cross-entropy, its influence is one exact
            Newton step from the optimum.
        x: T examples.
        method: ``"exact"`` (dual), ``"cg"``, ``"ekfac"``; ``"auto"`` is exact for a dual fit, else "cg".
            All but the first two are for fits of squared loss by ``linnet.fit``.
        labels: Classes (T,) or targets (T, C), for the influence on their losses.
        memory: Budget such as ``"4GB"``; by default half of what is available.
        directions: δ − δ₋ᵢ of all examples, (N, P), from :func:`weight_changes`, to ask about many x.

    Returns:
        The influence, with its certificate.

    Raises:
        DataError: If x is empty or not finite, or labels are out of range.
        InputError: If the method is none of these or does not go with the fit.
        MemoryBudgetError: If the answer does not fit the budget.

    Source:
        Achille et al., CVPR 2021, eq. (7), (8) and appendix A.3; Grosse et al. 2023 (EKFAC).

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x, y = torch.randn(6, 2), torch.arange(6) % 2
        >>> fit = linnet.fit(linnet.linearize(net), (x, y))
        >>> found = influence(fit, x[:3], labels=y[:3])
        >>> found.outputs.shape, found.loss.shape, found.method
        (torch.Size([6, 3, 2]), torch.Size([6, 3]), 'exact')
    """
    fit, labels = check_fitted(fit), in_rows(x, labels, "labels")
    if not isinstance(fit, LinearFit) or fit.system.shared or fit._targets.weights is not None:
        return _of_other(fit, examples(fit._function, x), method, labels, directions)
    x = checked_inputs(fit.module, x)
    chosen = _method(fit, method, directions)
    t, c, item = batch_size(x), fit.system.c, 8
    plan = Plan(
        f"influence of {fit.n} × {t} examples",
        parse_bytes(memory, fit.module.function.device),
        (("influence", 2 * fit.n * t * c * item),),
    )
    require(plan, ["ask about fewer test examples at once", "raise memory="])
    residual = fit.system.certificate()
    if directions is not None:
        outputs = _along(fit, x, directions, memory)
    elif chosen == "exact":
        outputs = _exact(fit, x, memory)
    elif chosen == "cg":
        outputs, residual = _iterated(fit, x, memory)
    else:
        outputs, residual = _approximate(fit, x, memory)
    loss = None if labels is None else _losses(fit, x, labels, outputs)
    return Influence(outputs, loss, chosen, residual)


@in_exact_mode
@torch.no_grad()
def weight_changes(fit: LinearFit, indices: Any = None, memory: str | int | None = None) -> Tensor:
    """δ − δ₋ᵢ, what each training example contributed to the weights.

    Args:
        fit: A linear fit without constraints.
        indices: Positions of training examples; all by default.
        memory: Budget; by default half of what is available.

    Returns:
        (n, P), in the order of ``named_parameters()``.

    Raises:
        InputError: If an index is out of range or the fit has constraints.
        MemoryBudgetError: If they do not fit the budget.

    Source:
        Achille et al., CVPR 2021, eq. (7).

    Example:
        >>> import linnet
        >>> net = torch.nn.Linear(2, 1).double()
        >>> x = torch.randn(5, 2).double()
        >>> fit = linnet.fit(linnet.linearize(net), (x, x.sum(1, keepdim=True)))
        >>> change = weight_changes(fit, [3])[0]
        >>> without = fit.forget([3]).delta
        >>> bool(torch.allclose(fit.delta["weight"] - without["weight"], change[:2]))
        True
    """
    fit = check_fit(fit)
    unconstrained(fit, "weight_changes")
    unweighed(fit, "weight_changes")
    function = fit.module.function
    every = list(range(fit.n)) if indices is None else indices
    index = positions(every, fit.n, leave=0).to(function.device)
    size = len(index) * function.space.dim * function.dtype.itemsize
    plan = Plan("weight changes", parse_bytes(memory, function.device), (("changes", 2 * size),))
    require(plan, ["ask for fewer examples with indices=", "ask for audit.influence instead"])
    return _directions(fit, index, memory)


def _directions(fit: LinearFit, index: Tensor, memory: str | int | None) -> Tensor:
    """δ − δ₋ᵢ of some examples, (n, P)."""
    system, function = fit.system, fit.module.function
    if isinstance(system.factorized, KernelSystem):
        # Jᵀ M_·i eᵢ
        weights = left_out_columns(system.factorized.dual, index).to(function.dtype)
        total = torch.zeros(len(index), function.space.dim, dtype=function.dtype, device=function.device)
        for place, rows in FormedRows(function, fit.x, system.c, memory, keep=False):
            total.addmm_(weights[place.start * system.c : place.stop * system.c].T, rows)
        return total
    parts = []
    residuals = (system.ridge * system.beta)[index]
    from_x = take(fit.x, index)
    start = 0
    for rows, solved in system.solved_rows(from_x, "weight changes", memory):
        stop = start + len(rows)
        e = _left_out(torch.einsum("ncp,pnd->ncd", rows.to(solved), solved), residuals[start:stop].to(solved))
        parts.append(torch.einsum("pnd,nd->np", solved, e))
        start = stop
    return torch.cat(parts).to(function.dtype)


def left_out_columns(dual: DualSystem, index: Tensor) -> Tensor:
    """M_·i eᵢ: δ − δ₋ᵢ is Jᵀ times it, (N·C, n)."""
    n, c = dual.n, dual.c
    e, inverse = dual.loo_residuals()[index], dual.inverse.view(n, c, n * c)
    # M is symmetric: its rows, which lie together, stand for its columns
    parts = [
        torch.einsum("nca,nc->an", inverse[some], residuals)
        for some, residuals in zip(index.split(TOGETHER), e.split(TOGETHER), strict=True)
    ]
    return torch.cat(parts, 1)


def _left_out(leverage: Tensor, residuals: Tensor) -> Tensor:
    """(I − Hᵢ)⁻¹ rᵢ for leverages (n, C, C)."""
    eye = torch.eye(leverage.shape[-1], dtype=leverage.dtype, device=leverage.device)
    solved: Tensor = torch.linalg.solve(eye - leverage, residuals)
    return solved


def _exact(fit: LinearFit, x: Inputs, memory: str | int | None) -> Tensor:
    """By a factorization; by the kernel in the way that takes fewer operations."""
    if not isinstance(fit.system, KernelSystem):
        return fit.influence(x)
    n, t, c, p = fit.n, batch_size(x), fit.system.c, fit.module.space.dim
    # K(x, X): (T·C)(N·C) P;  directions: (N·C) N P, then (T·C) N P
    by_kernel = t * c * (n * c) * (p + n * c)
    by_directions = n * c * n * p + t * c * n * p + n * (n * c) ** 2
    if fit.constraints is not None or by_kernel <= by_directions or not changes_fit(fit, memory):
        return fit.influence(x)
    return _along(fit, x, every_change(fit, memory), memory)


def changes_fit(fit: LinearFit, memory: str | int | None) -> bool:
    """Whether δ − δ₋ᵢ of all examples fit the budget."""
    function = fit.module.function
    size = fit.n * function.space.dim * function.dtype.itemsize
    return 3 * size <= parse_bytes(memory, function.device)


def every_change(fit: LinearFit, memory: str | int | None) -> Tensor:
    """δ − δ₋ᵢ of all examples, (N, P)."""
    return _directions(fit, torch.arange(fit.n, device=fit.module.function.device), memory)


def _along(fit: LinearFit, x: Inputs, directions: Tensor, memory: str | int | None) -> Tensor:
    """J(x)(δ − δ₋ᵢ), (N, T, C)."""
    directions = checked_directions(fit, directions)
    c = fit.system.c
    formed = FormedRows(fit.module.function, x, c, memory, keep=False)
    parts = [(directions @ rows.T).view(len(directions), -1, c) for _, rows in formed]
    return torch.cat(parts, 1)


def checked_directions(fit: LinearFit, directions: Any) -> Tensor:
    """Weight changes, if they have the size of the fit's weights."""
    p = fit.module.space.dim
    if not isinstance(directions, Tensor) or directions.ndim != 2 or directions.shape[1] != p:
        shape = tuple(directions.shape) if isinstance(directions, Tensor) else type(directions).__name__
        raise InputError(f"directions has shape {shape}", f"(n, {p})", "pass audit.weight_changes(fit)")
    return directions.to(fit.module.function.device, fit.module.function.dtype)


def _iterated(fit: LinearFit, x: Inputs, memory: str | int | None) -> tuple[Tensor, float]:
    """By block conjugate gradients on the test side; the leave-one-out residuals are exact."""
    system = fit.system
    if not isinstance(system, Iterative):
        primal, residuals = _primal_of(fit, system), system.loo_residuals()
    else:
        if system.kernel_form is not None:
            return fit.influence(x), system.kernel_form.certificate()
        if not system.leverages_known and fit.n <= batch_size(x):
            # the columns of the leave-one-out residuals are those of the weight changes
            return _along(fit, x, every_change(fit, memory), memory), system.settings.tolerance
        primal, residuals = system, system.loo_residuals()
    return _contracted(primal, x, residuals, None, memory)


def _approximate(fit: LinearFit, x: Inputs, memory: str | int | None) -> tuple[Tensor, float]:
    """By EKFAC, and a few steps from there."""
    primal = _primal_of(fit, fit.system)
    primal.reused.preconditioner = CurvatureInverse.of("ekfac", primal.jacobian, primal.ridge)
    if fit.system.factorized is fit.system:
        return _contracted(primal, x, fit.system.loo_residuals(), NEAR, memory)
    residuals = primal.ridge * primal.beta
    found, start = [], 0
    for rows, solved in primal.solved_rows(primal.x, "influence", memory, NEAR):
        own = torch.einsum("ncp,pnd->ncd", rows, solved)
        # Galerkin's solutions bound the leverage from below
        found.append(_left_out((own + own.mT) / 2, residuals[start : start + len(rows)].to(rows)))
        start += len(rows)
    return _contracted(primal, x, torch.cat(found), NEAR, memory)


def _contracted(
    primal: Iterative, x: Inputs, residuals: Tensor, effort: Effort | None, memory: str | int | None
) -> tuple[Tensor, float]:
    """J(x) (G + ρI)⁻¹ Jᵢᵀ eᵢ block by block, (N, T, C), and the largest residual of the solutions."""
    parts, worst = [], 0.0
    matrix = primal.formed.damped(primal.ridge)
    for rows, solved in primal.solved_rows(x, "influence", memory, effort):
        t, c = rows.shape[:2]
        columns, pieces = solved.flatten(1), []
        worst = max(worst, relative_residual(matrix, columns, rows.flatten(0, 1).T))
        for place, block in primal.formed.rows:
            product = (block @ columns).view(-1, c, t, c)
            pieces.append(torch.einsum("ndtc,nd->ntc", product, residuals[place].to(product)))
        parts.append(torch.cat(pieces))
    return torch.cat(parts, 1), worst


def _primal_of(fit: LinearFit, system: Any) -> Iterative:
    """The same problem without its kernel, started at its solution."""
    tolerance = 1e-10 if fit.module.function.dtype == torch.float64 else 1e-6
    settings = system.settings if isinstance(system, Iterative) else CGSettings(tolerance)
    start = fit.module.space.to_flat(fit.delta)
    residual = system.problem.residual.to(fit.module.function.dtype)
    loose = CGSettings(max(settings.tolerance, 1e-4), settings.max_steps, preconditioner="none")
    problem = Problem(fit.module.function, fit.x, residual)
    primal = Iterative(problem, system.ridge, loose, reused=Reused(start=start))
    primal.settings = settings
    if isinstance(system, Iterative):
        primal.reused.preconditioner = system.reused.preconditioner
    return primal


def _of_other(fit: Fitted, x: Inputs, method: Any, labels: Any, directions: Any) -> Influence:
    """Influence on a fit that has no displacement of one network's weights under squared loss."""
    if method not in ("auto", "exact") or directions is not None:
        raise InputError(
            f"method={method!r} of a {type(fit).__name__}" if directions is None else "directions=",
            expected='method="exact": this fit has its influence in closed form',
            remedy="leave method= and directions= out",
        )
    outputs = fit.influence(x)
    loss = None if labels is None else _losses(fit, x, labels, outputs)
    return Influence(outputs, loss, "exact", fit.system.certificate())


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """−Σ t log p of logits (..., C), or of the log odds (..., 1) of the second class."""
    if outputs.shape[-1] == 1:
        return (F.softplus(outputs) - targets * outputs)[..., 0]
    return -(targets * outputs.log_softmax(-1)).sum(-1)


def _losses(fit: Fitted, x: Inputs, labels: Any, outputs: Tensor) -> Tensor:
    """The loss with each example less that without it, exact in both, (N, T)."""
    targets, now = label_targets(fit, x, labels).to(outputs), fit.predict(x).to(outputs)
    if fit.loss == "cross-entropy":
        return _cross_entropy(now, targets) - _cross_entropy(now - outputs, targets)
    # f₋ᵢ = f − Δ: ½‖t − f‖² − ½‖t − f + Δ‖² = −(t − f)·Δ − ½‖Δ‖²
    return -torch.einsum("tc,ntc->nt", targets - now, outputs) - outputs.square().sum(2) / 2


def label_targets(fit: Fitted, x: Inputs, labels: Any) -> Tensor:
    """Targets of a fit for the labels of test examples, (n, C)."""
    n, c, dtype = batch_size(x), fit.targets.shape[1], fit.targets.dtype
    names = fit.record.classes
    y = (known_answers(labels, names) if names else named_tensor(labels, "labels")).to(fit.targets.device)
    if y.ndim == 0:
        raise InputError(
            f"labels is one value for {n} examples", "one label for each example of x", "pass labels (n,)"
        )
    scale = fit._targets.scale
    if isinstance(fit, LinearFit):
        dtype, shape = fit.module.function.dtype, fit.module.function.output_shape(x)
        y, some = position_targets(y, shape, fit._targets.axis, scale)
        if some is not None:
            raise InputError(
                "labels leaves positions out, by -100",
                expected="a class at every position of the test examples",
                remedy="pass test examples whose positions all count, or their targets as numbers",
            )
        check_arrangement(y, shape, "labels")
    made = (
        class_targets(y, c, dtype)
        if fit.loss == "cross-entropy"
        else make_targets(y, c, scale, varied=False, dtype=dtype)
    )
    if len(made.values) != n:
        raise InputError(
            f"labels holds {len(made.values)} examples and x {n}",
            expected="one label for each example of x",
            remedy="pass the labels of these very examples",
        )
    return made.values


def _method(fit: LinearFit, method: Any, directions: Tensor | None) -> str:
    """The method that is used."""
    choice("method", method, METHODS)
    dual = fit.system.factorized is fit.system
    chosen: str = ("exact" if dual or fit.constraints is not None else "cg") if method == "auto" else method
    if chosen == "exact" and not dual and fit.constraints is None:
        raise InputError(
            f"method={method!r} of a fit that was solved by {fit.solver!r}",
            expected="a fit by a factorization, which gives it",
            remedy='pass method="cg", or fit with solver="dual"',
        )
    if chosen != "exact" or directions is not None:
        unconstrained(fit, f"method={chosen!r}" if directions is None else "directions")
    return chosen


def unconstrained(fit: LinearFit, what: str) -> None:
    """Raise for a fit with constraints, whose weights are no combination of the training rows alone."""
    if fit.constraints is not None:
        raise InputError(
            f"{what} of a fit with constraints",
            expected="a fit without constraints",
            remedy='pass method="exact", or ask the fit before fit.constrain',
        )


@in_exact_mode
@torch.no_grad()
def loss_influence(
    fit: LinearFit,
    x: Inputs,
    labels: Any,
    directions: Tensor | None = None,
    memory: str | int | None = None,
) -> Tensor:
    """The derivative of each test example's loss along the weight change due to each training example.

    Of a dual fit it takes one product of the T gradients with the N·C rows of J, or with the weight changes
    where they are known or T is larger than N; of a primal fit T right-hand sides, solved together.

    Args:
        fit: A linear fit without constraints.
        x: T examples.
        labels: Their classes (T,) or targets (T, C).
        directions: δ − δ₋ᵢ of all training examples, (N, P), from :func:`linnet.audit.weight_changes`.
        memory: Budget; by default half of what is available.

    Returns:
        (N, T): to first order, ½‖t − f(x)‖² with training example i less without it. Negative where it
        helped.

    Raises:
        DataError: If x is empty or not finite, or labels are out of range.
        InputError: If the fit has constraints or the directions are of another fit.

    Source:
        Koh and Liang, ICML 2017; Achille et al., CVPR 2021, eq. (7).

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x, y = torch.randn(6, 2), torch.arange(6) % 2
        >>> fit = linnet.fit(linnet.linearize(net), (x, y))
        >>> loss_influence(fit, x[:3], y[:3]).shape
        torch.Size([6, 3])
    """
    fit = check_fit(fit)
    unconstrained(fit, "loss_influence")
    unweighed(fit, "loss_influence")
    labels, x = in_rows(x, labels, "labels"), checked_inputs(fit.module, x)
    function = fit.module.function
    gradients = _gradients(function, x, fit.predict(x) - label_targets(fit, x, labels))
    if directions is not None:
        found = checked_directions(fit, directions) @ gradients.T
    else:
        found = _through_system(fit, gradients, memory)
    require_finite_products(function, x, found.T)
    return found


def _through_system(fit: LinearFit, gradients: Tensor, memory: str | int | None) -> Tensor:
    """The influences on losses with gradients (T, P), by the solved equations."""
    function, system = fit.module.function, fit.system
    dual = system.factorized.dual if isinstance(system.factorized, KernelSystem) else None
    if dual is not None and _through_changes(fit, len(gradients), memory):
        return every_change(fit, memory) @ gradients.T
    if dual is not None:
        formed = FormedRows(function, fit.x, system.c, memory, keep=False)
        cross = torch.cat([gradients @ rows.T for _, rows in formed], 1)  # ∇ℓᵀ Jᵀ, (T, N·C)
        index = torch.arange(fit.n, device=function.device)
        # by the columns M_·i eᵢ of all examples
        return (cross.double() @ left_out_columns(dual, index)).T.to(function.dtype)
    residuals = system.loo_residuals()
    size = max(1, parse_bytes(memory, function.device) // (20 * function.space.dim * function.dtype.itemsize))
    found = []
    for part in gradients.split(size):
        solved = system.solve(part.T.contiguous())
        pieces = [
            torch.einsum(
                "nct,nc->nt",
                (rows.to(solved) @ solved).view(-1, system.c, len(part)),
                residuals[place].to(solved),
            )
            for place, rows in system.own_rows()
        ]
        found.append(torch.cat(pieces))
    return torch.cat(found, 1).to(function.dtype)


def _through_changes(fit: LinearFit, tests: int, memory: str | int | None) -> bool:
    """Whether the weight changes, once formed, take fewer operations than T products with all rows of J."""
    n, rows = fit.n, fit.n * fit.system.c
    # T·(N·C)·P against N·(N·C)·P + T·N·P
    return tests * rows > n * rows + tests * n and changes_fit(fit, memory)


def _gradients(function: Functional, x: Inputs, cotangents: Tensor) -> Tensor:
    """J(x)ᵀu for each example, (T, P)."""
    out = torch.empty(batch_size(x), function.space.dim, dtype=function.dtype, device=function.device)
    parts = zip(out.split(TOGETHER), split(x, TOGETHER), cotangents.split(TOGETHER), strict=True)
    for place, part, u in parts:
        place.copy_(form_rows(function, part, u[None]))
    return out
