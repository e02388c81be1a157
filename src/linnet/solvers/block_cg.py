"""Block conjugate gradients: K right-hand sides that share one Krylov space.

O'Leary 1980 (Linear Algebra Appl. 29, 293); the directions are orthonormalized and dependent ones dropped as
in the breakdown-free form of Ji and Li 2017 (BIT 57, 379). In exact arithmetic it takes no more steps than
the slowest column by itself, and far fewer where K columns together span the few large eigenvalues.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.linalg.factorize import cholesky, eigh
from linnet.linalg.operator import LinearOperator, flatten, unflatten
from linnet.linalg.space import Vector
from linnet.solvers.cg import checked_steps, relative_residual
from linnet.solvers.led import one_leads
from linnet.solvers.solution import Solution, Status

RESTARTS = 3  # times that the residual is computed again where its recursion has drifted


@one_leads
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
    status = _status(residual, tolerance, broken, steps >= limit)
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


def _status(residual: float, tolerance: float, broken: bool, out_of_steps: bool) -> Status:
    """The status, judged by the true residual."""
    if residual <= tolerance:
        return Status.CONVERGED
    if broken or not residual < float("inf"):
        return Status.DIVERGED
    return Status.MAX_STEPS if out_of_steps else Status.STAGNATED
