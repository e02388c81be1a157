"""Conjugate gradients for (A + σₖ I) xₖ = b at many shifts: one Krylov space serves them all.

Jegerlehner 1996 (hep-lat/9612014); Frommer and Maass 1999 (SIAM J. Sci. Comput. 20, 1831). The residuals of
the shifted systems are multiples ζₖ r of that of the smallest shift, so that each shift costs two vectors and
no product with A.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.linalg.operator import LinearOperator, require_fit
from linnet.params import refuse, tensor
from linnet.solvers.cg import checked_steps
from linnet.solvers.led import one_leads
from linnet.solvers.solution import Solution, Status


@one_leads
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
    if residual <= tolerance:
        status = Status.CONVERGED
    elif state.broken or not residual < float("inf"):
        status = Status.DIVERGED
    else:
        status = Status.MAX_STEPS if steps >= limit else Status.STAGNATED
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
        self.rr, self.alpha, self.beta = _dot(b, b), 1.0, 0.0
        self.broken = False

    def advance(self, operator: LinearOperator, target: float) -> bool:
        """One step; False when every shift has converged or the iteration broke down."""
        # ‖rₖ‖ = ζₖ ‖r‖, largest at the smallest shift
        if not self.rr**0.5 > target:
            return False
        product = operator.mv(self.q) + self.seed * self.q
        curvature = _dot(self.q, product)
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
        rr = _dot(self.r, self.r)
        beta = rr / self.rr
        self.q = self.r + beta * self.q
        # pₖ ← ζₖ⁺ r + β (ζₖ⁺/ζₖ)² pₖ
        self.p = self.r[:, None] * zeta.to(self.p) + self.p * (beta * ratio**2).to(self.p)
        self.zeta_before, self.zeta = self.zeta, zeta
        self.alpha, self.beta, self.rr = alpha, beta, rr
        return True


def _dot(a: Tensor, b: Tensor) -> float:
    """The inner product as a number."""
    return float(a @ b)


def _residual(operator: LinearOperator, x: Tensor, b: Tensor, sigma: Tensor) -> float:
    """The largest ‖b − (A + σₖ I) xₖ‖ / ‖b‖, subtracted and measured in double precision."""
    wide = sigma.dtype
    left = b.to(wide)[:, None] - operator.mm(x).to(wide) - x.to(wide) * sigma
    norm = float(b.to(wide).norm()) or 1.0
    return float(left.norm(dim=0).max()) / norm
