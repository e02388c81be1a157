"""Preconditioned conjugate gradients for A X = B with A symmetric positive definite.

Hestenes and Stiefel 1952; in the form of Saad 2003, algorithm 9.1. Differs from it in that all columns
of B advance together, each with its own step lengths, and a column that has converged stands still.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg.factorize import cholesky, eigh
from linnet.linalg.operator import LinearOperator, Vector, flatten, require_fit, require_square, unflatten
from linnet.params import integer, number, optional, refuse, tensor
from linnet.solvers.solution import Solution, Status, by_first_process

RESTARTS = 3  # times that the residual is computed again where its recursion has drifted


@by_first_process
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
    measured in float64), and one at the start when ``x0`` is given. Where the true residual is not what the
    recursion says, the iteration starts again from there, as long as that halves it.

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
    steps, best = 0, (math.inf, state.x)
    for turn in range(1 + RESTARTS):
        if turn:
            state = _State.start(operator, preconditioner, columns, state.x)
        begin, before = steps, best[0]
        while steps < max_steps and state.advance(operator, preconditioner, targets):
            steps += 1
        residual = relative_residual(operator, state.x, columns)
        settled = residual <= tolerance or not residual <= before / 2  # rounding hides the rest
        if not turn or residual < before:
            best = residual, state.x
        if settled or state.broken or steps >= max_steps or steps == begin:
            break
    residual, x = best
    again = turn > 0 and steps < max_steps  # came as far as rounding lets it
    stagnated = again or bool((state.r.norm(dim=0) <= targets).all())
    status = status_of(residual, tolerance, stagnated=stagnated, broken=state.broken and not again)
    return Solution(unflatten(operator, x.reshape(flat.shape), b), status, steps, residual)


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


@by_first_process
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


def status_of(residual: float, tolerance: float, stagnated: bool, broken: bool = False) -> Status:
    """The status, judged by the true residual."""
    if residual <= tolerance:
        return Status.CONVERGED
    if broken or not residual < float("inf"):
        return Status.DIVERGED
    return Status.STAGNATED if stagnated else Status.MAX_STEPS


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
    optional(integer, "max_steps", max_steps)
    return default if max_steps is None else max_steps


# -- block cg --------------------------------------------------------------------------------------
#
# Block conjugate gradients: K right-hand sides that share one Krylov space.
#
# O'Leary 1980 (Linear Algebra Appl. 29, 293); the directions are orthonormalized and dependent ones
# dropped as in the breakdown-free form of Ji and Li 2017 (BIT 57, 379). In exact arithmetic it takes no
# more steps than the slowest column by itself, and far fewer where K columns together span the few large
# eigenvalues.


@by_first_process
def block_cg(
    operator: LinearOperator,
    b: Vector,
    preconditioner: LinearOperator | None = None,
    tolerance: float = 1e-6,
    max_steps: int | None = None,
) -> Solution[Vector]:
    """Solve A X = B for all columns together.

    A step is one product of A with at most K columns: the directions of columns that have converged and
    those that depend on others are left out. One product more checks the residual, subtracted and measured
    in float64; where it is not what the recursion says, the iteration starts again from there.

    Args:
        operator: A, symmetric positive definite (n x n).
        b: Right-hand sides (n, K), one (n,), or Params.
        preconditioner: Any symmetric positive definite operator that approximates A⁻¹.
        tolerance: Stop when ‖b − A x‖ ≤ tolerance · ‖b‖ for every column.
        max_steps: Largest number of steps; None for 10 n.

    Returns:
        X in the kind of ``b``; ``residual`` is the largest ‖b − A x‖ / ‖b‖.

    Raises:
        InputError: An argument does not fit.

    Example:
        >>> from linnet.linalg import Diagonal
        >>> solution = block_cg(Diagonal(torch.tensor([1.0, 2.0, 4.0])), torch.eye(3))
        >>> solution.value.diagonal(), solution.steps
        (tensor([1.0000, 0.5000, 0.2500]), 1)
    """
    limit = checked_steps(operator, preconditioner, tolerance, max_steps)
    flat = flatten(operator, b)
    columns = flat.reshape(flat.shape[0], -1)
    norms = columns.norm(dim=0)
    scale = torch.where(norms > 0, norms, 1.0)
    right = columns / scale  # a converged column must not look dependent on a larger one
    x = torch.zeros_like(right)
    steps, broken, residual = 0, False, 1.0
    for _ in range(1 + RESTARTS):
        begin = steps
        left = right if steps == 0 else right - operator.mm(x)
        state = _Block.start(left, preconditioner, tolerance)
        while steps < limit and state.advance(operator, preconditioner, tolerance):
            steps += 1
        x = x + state.x
        broken = state.broken
        residual = relative_residual(operator, x, right)
        if residual <= tolerance or broken or steps >= limit or steps == begin:
            break
    status = status_of(residual, tolerance, stagnated=steps < limit, broken=broken)
    return Solution(unflatten(operator, (x * scale).reshape(flat.shape), b), status, steps, residual)


@dataclass
class _Block:
    """Solution, residual and orthonormal directions; (n, K), (n, K), (n, k)."""

    x: Tensor
    r: Tensor
    p: Tensor
    broken: bool = False

    @classmethod
    def start(cls, r: Tensor, preconditioner: LinearOperator | None, tolerance: float) -> _Block:
        """At zero; the first directions are the preconditioned residuals."""
        active = r[:, r.norm(dim=0) > tolerance]
        z = active if preconditioner is None else preconditioner.mm(active)
        return cls(torch.zeros_like(r), r.clone(), _orthonormal(z))

    def advance(
        self, operator: LinearOperator, preconditioner: LinearOperator | None, tolerance: float
    ) -> bool:
        """One step of all columns; False when none needs it or the iteration broke down."""
        if self.p.shape[1] == 0 or not bool((self.r.norm(dim=0) > tolerance).any()):
            return False
        product = operator.mm(self.p)
        inner = _float64(self.p.T @ product)
        inner = (inner + inner.T) / 2  # Pᵀ A P
        self.broken = not bool(inner.isfinite().all()) or bool((inner.diagonal() <= 0).any())
        if self.broken:
            return False
        factor = cholesky(inner, "the search directions of block conjugate gradients")
        # α = (PᵀAP)⁻¹ PᵀR
        alpha = torch.cholesky_solve(_float64(self.p.T @ self.r), factor).to(self.p)
        self.x = self.x + self.p @ alpha
        self.r = self.r - product @ alpha
        active = self.r[:, self.r.norm(dim=0) > tolerance]
        z = active if preconditioner is None else preconditioner.mm(active)
        # P ← orth(Z − P (PᵀAP)⁻¹ (AP)ᵀ Z), conjugate to the P before
        beta = torch.cholesky_solve(_float64(product.T @ z), factor).to(self.p)
        self.p = _orthonormal(z - self.p @ beta)
        return True


def _orthonormal(z: Tensor) -> Tensor:
    """An orthonormal basis of the columns' span; what rounding cannot tell from dependent is left out."""
    for _ in range(2):  # once more, since the first time inherits the condition number
        norms = z.norm(dim=0)
        z = z[:, (norms > 0) & norms.isfinite()]
        if z.shape[1] == 0:
            return z
        z = z / z.norm(dim=0)
        gram = _float64(z.T @ z)
        values, vectors = eigh((gram + gram.T) / 2, "the search directions of block conjugate gradients")
        kept = values > 10 * len(values) * torch.finfo(z.dtype).eps * values[-1]
        z = z @ (vectors[:, kept] / values[kept].sqrt()).to(z)
    return z


def _float64(small: Tensor) -> Tensor:
    """A K x K matrix in double precision, where the device has it."""
    return small if small.device.type == "mps" else small.double()


# -- shifted cg ------------------------------------------------------------------------------------
#
# Conjugate gradients for (A + σₖ I) xₖ = b at many shifts: one Krylov space serves them all.
#
# Jegerlehner 1996 (hep-lat/9612014); Frommer and Maass 1999 (SIAM J. Sci. Comput. 20, 1831). The
# residuals of the shifted systems are multiples ζₖ r of that of the smallest shift, so that each shift
# costs two vectors and no product with A.


@by_first_process
def shifted_cg(
    operator: LinearOperator,
    b: Tensor,
    shifts: Tensor,
    tolerance: float = 1e-6,
    max_steps: int | None = None,
) -> Solution[Tensor]:
    """Solve (A + σₖ I) xₖ = b for every shift.

    Costs one product of A with one vector a step, as many steps as the smallest shift needs, and one
    product with S columns at the end for the true residuals.

    Args:
        operator: A, symmetric positive semi-definite (n x n).
        b: Right-hand side (n,).
        shifts: σ, (S,), positive.
        tolerance: Stop when ‖b − (A + σₖ I) xₖ‖ ≤ tolerance · ‖b‖ for every k.
        max_steps: Largest number of steps; None for 10 n.

    Returns:
        X (n, S); ``residual`` is the largest over the shifts.

    Raises:
        InputError: An argument does not fit.

    Example:
        >>> from linnet.linalg import Diagonal
        >>> A = Diagonal(torch.tensor([1.0, 3.0]))
        >>> solution = shifted_cg(A, torch.tensor([2.0, 4.0]), torch.tensor([1.0, 5.0]))
        >>> solution.value, solution.steps
        (tensor([[1.0000, 0.3333],
                [1.0000, 0.5000]]), 2)
    """
    limit = checked_steps(operator, None, tolerance, max_steps)
    require_fit(operator, b, 1)
    wide = torch.float32 if b.device.type == "mps" else torch.float64
    given = tensor("shifts", shifts, "positive numbers (S,)")
    sigma = given.to(device=b.device, dtype=wide).flatten()
    wrong = given.dtype == torch.bool or not sigma.numel()
    if wrong or not bool(((sigma > 0) & sigma.isfinite()).all()):
        refuse("shifts", shifts, "positive numbers (S,)", "leave the others out")
    state = _Shifted(b, sigma)
    target = tolerance * float(b.norm())
    steps = 0
    while steps < limit and state.advance(operator, target):
        steps += 1
    residual = _residual(operator, state.x, b, sigma)
    status = status_of(residual, tolerance, stagnated=steps < limit, broken=state.broken)
    return Solution(state.x, status, steps, residual)


class _Shifted:
    """The seed system r, q at the smallest shift, and x, p (n, S), ζ (S,) of all; at zero to begin with."""

    def __init__(self, b: Tensor, sigma: Tensor) -> None:
        self.seed = float(sigma.min())
        self.above = sigma - self.seed
        self.p = b[:, None].repeat(1, len(sigma))
        self.x = torch.zeros_like(self.p)
        self.r, self.q = b.clone(), b.clone()
        self.zeta = self.zeta_before = torch.ones_like(sigma)
        self.rr, self.alpha, self.beta = _column_dots(b, b), 1.0, 0.0
        self.broken = False

    def advance(self, operator: LinearOperator, target: float) -> bool:
        """One step; False when every shift has converged or the iteration broke down."""
        # ‖rₖ‖ = ζₖ ‖r‖, largest at the smallest shift
        if not self.rr**0.5 > target:
            return False
        product = operator.mv(self.q) + self.seed * self.q
        curvature = _column_dots(self.q, product)
        self.broken = not (0 < curvature < float("inf"))
        if self.broken:
            return False
        alpha = self.rr / curvature
        # ζₖ⁺ = ζₖ ζₖ⁻ α⁻ / [α⁻ ζₖ⁻ (1 + α σₖ) + α β⁻ (ζₖ⁻ − ζₖ)]
        below = self.alpha * self.zeta_before * (1 + alpha * self.above)
        below = below + alpha * self.beta * (self.zeta_before - self.zeta)
        zeta = torch.where(self.zeta != 0, self.zeta * self.zeta_before * self.alpha / below, 0.0)
        zeta = torch.where(zeta > torch.finfo(zeta.dtype).tiny ** 0.25, zeta, 0.0)  # converged long ago
        ratio = torch.where(self.zeta > 0, zeta / self.zeta, 0.0)
        self.x = self.x + self.p * (alpha * ratio).to(self.p)
        self.r = self.r - alpha * product
        rr = _column_dots(self.r, self.r)
        beta = rr / self.rr
        self.q = self.r + beta * self.q
        # pₖ ← ζₖ⁺ r + β (ζₖ⁺/ζₖ)² pₖ
        self.p = self.r[:, None] * zeta.to(self.p) + self.p * (beta * ratio**2).to(self.p)
        self.zeta_before, self.zeta = self.zeta, zeta
        self.alpha, self.beta, self.rr = alpha, beta, rr
        return True


def _column_dots(a: Tensor, b: Tensor) -> float:
    """The inner product as a number."""
    return float(a @ b)


def _residual(operator: LinearOperator, x: Tensor, b: Tensor, sigma: Tensor) -> float:
    """The largest ‖b − (A + σₖ I) xₖ‖ / ‖b‖, subtracted and measured in double precision."""
    wide = sigma.dtype
    left = b.to(wide)[:, None] - operator.mm(x).to(wide) - x.to(wide) * sigma
    norm = float(b.to(wide).norm()) or 1.0
    return float(left.norm(dim=0).max()) / norm
