"""Preconditioned conjugate gradients for A X = B with A symmetric positive definite.

Hestenes and Stiefel 1952; in the form of Saad 2003, algorithm 9.1. Differs from it in that all columns
of B advance together, each with its own step lengths, and a column that has converged stands still.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg.operator import LinearOperator, flatten, require_square, unflatten
from linnet.linalg.space import Vector
from linnet.params import integer, number
from linnet.solvers.led import one_leads
from linnet.solvers.solution import Solution, Status


@one_leads
def cg(
    operator: LinearOperator,
    b: Vector,
    preconditioner: LinearOperator | None = None,
    x0: Vector | None = None,
    tolerance: float = 1e-6,
    max_steps: int | None = None,
) -> Solution[Vector]:
    """Solve A x = b by preconditioned conjugate gradients.

    Costs one product with A a step, one at the end for the true residual b − A x (subtracted and
    measured in float64), and one at the start when ``x0`` is given.

    Args:
        operator: A, symmetric positive definite (n x n).
        b: Right-hand side (n,), K of them (n, K), or Params.
        preconditioner: Any symmetric positive definite operator that approximates A⁻¹.
        x0: Where to start, of the same kind as ``b``; None for zero.
        tolerance: Stop when ‖b − A x‖ ≤ tolerance · ‖b‖ for every column.
        max_steps: Largest number of steps; None for 10 n.

    Returns:
        x in the kind of ``b``; ``residual`` is the largest ‖b − A x‖ / ‖b‖.

    Raises:
        InputError: An argument does not fit.

    Example:
        >>> from linnet.linalg import Diagonal
        >>> solution = cg(Diagonal(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 4.0]))
        >>> solution.value, solution.steps
        (tensor([1., 2.]), 2)
    """
    max_steps = checked_steps(operator, preconditioner, tolerance, max_steps)
    flat = flatten(operator, b)
    columns = flat.reshape(flat.shape[0], -1)  # (n, K)
    start = None if x0 is None else _like(flatten(operator, x0), flat).reshape(columns.shape)
    state = _State.start(operator, preconditioner, columns, start)
    targets = tolerance * columns.norm(dim=0)  # (K,)
    steps = 0
    while steps < max_steps and state.advance(operator, preconditioner, targets):
        steps += 1
    residual = relative_residual(operator, state.x, columns)
    status = _status(state, targets, residual, tolerance)
    return Solution(unflatten(operator, state.x.reshape(flat.shape), b), status, steps, residual)


def _like(start: Tensor, flat: Tensor) -> Tensor:
    """A start of the shape of the right-hand side, or an error."""
    if start.shape == flat.shape:
        return start
    raise InputError(
        f"x0 has shape {tuple(start.shape)}", f"{tuple(flat.shape)}, like b", "leave x0= out to start at zero"
    )


@dataclass
class _State:
    """Everything that changes from step to step; vectors are (n, K), numbers (K,)."""

    x: Tensor
    r: Tensor  # residual b − A x, by recursion
    p: Tensor  # search direction
    rz: Tensor  # rᵀ z with the preconditioned residual z = M r
    broken: bool = False

    @classmethod
    def start(
        cls, operator: LinearOperator, preconditioner: LinearOperator | None, b: Tensor, x0: Tensor | None
    ) -> _State:
        """The state at x0; the first direction is the preconditioned residual."""
        x = torch.zeros_like(b) if x0 is None else x0.clone()
        r = b.clone() if x0 is None else b - operator.mm(x)
        z = r.clone() if preconditioner is None else preconditioner.mm(r)
        return cls(x, r, z, _dot(r, z))

    def advance(
        self, operator: LinearOperator, preconditioner: LinearOperator | None, targets: Tensor
    ) -> bool:
        """One step of all columns that still need it; False when none does or the iteration broke down."""
        active = self.r.norm(dim=0) > targets  # (K,), also False for NaN
        if not bool(active.any()):
            return False
        product = operator.mm(self.p)
        curvature = _dot(self.p, product)  # pᵀ A p
        self.broken = bool((active & ~((curvature > 0) & (self.rz > 0) & curvature.isfinite())).any())
        if self.broken:
            return False
        alpha = torch.where(active, self.rz / curvature, 0.0)
        self.x = self.x + alpha * self.p
        self.r = self.r - alpha * product
        z = self.r if preconditioner is None else preconditioner.mm(self.r)
        rz = _dot(self.r, z)
        beta = torch.where(active, rz / self.rz, 0.0)
        self.p = z + beta * self.p
        self.rz = rz
        return True


@one_leads
def relative_residual(operator: LinearOperator, x: Tensor, b: Tensor) -> float:
    """The largest ‖b − A x‖ / ‖b‖ over the columns, subtracted and measured in float64."""
    # x (n, K), b (m, K)
    if b.shape[1] == 0:
        return 0.0
    wide = torch.float32 if b.device.type == "mps" else torch.float64
    target = b.to(wide)
    residuals = (target - operator.mm(x).to(wide)).norm(dim=0)
    norms = target.norm(dim=0)
    return float((residuals / torch.where(norms > 0, norms, 1.0)).max())


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Column by column, aᵀ b."""
    return (a * b).sum(dim=0)


def _status(state: _State, targets: Tensor, residual: float, tolerance: float) -> Status:
    """The status, judged by the true residual."""
    if residual <= tolerance:
        return Status.CONVERGED
    if state.broken or not residual < float("inf"):
        return Status.DIVERGED
    recursion_met = bool((state.r.norm(dim=0) <= targets).all())
    return Status.STAGNATED if recursion_met else Status.MAX_STEPS


def checked_steps(
    operator: LinearOperator,
    preconditioner: LinearOperator | None,
    tolerance: float,
    max_steps: int | None,
) -> int:
    """The step limit of conjugate gradients, after checking the arguments."""
    require_square(operator)
    like = operator.shape, operator.dtype, operator.device
    if preconditioner is not None:
        own = require_square(preconditioner, "preconditioner")
        if (own.shape, own.dtype, own.device) != like:
            raise InputError(
                f"preconditioner is {own!r}",
                expected=f"shape, type and device of {operator!r}",
                remedy="make it of the same operator, or leave preconditioner= out",
            )
    return checked_limits(tolerance, max_steps, 10 * operator.shape[0])


def checked_limits(tolerance: float, max_steps: int | None, default: int) -> int:
    """The step limit of an iteration, after checking it and the tolerance."""
    number("tolerance", tolerance, above=0, below=1)
    if max_steps is not None:
        integer("max_steps", max_steps)
    return default if max_steps is None else max_steps
