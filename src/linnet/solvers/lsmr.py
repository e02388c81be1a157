"""LSMR: least squares min ‖b − A x‖² + ρ ‖x‖² with one product by A and one by Aᵀ a step.

Fong and Saunders 2011 (SIAM J. Sci. Comput. 33, 2950). Equivalent to MINRES on the normal equations
(AᵀA + ρ I) x = Aᵀ b, without squaring the condition number. Differs from theirs in that all columns of
b advance together, and in the stopping rule: the true gradient at the end, its estimate on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg.operator import LinearOperator, require_damping
from linnet.solvers.cg import checked_limits
from linnet.solvers.solution import Solution, Status


def lsmr(
    operator: LinearOperator,
    b: Tensor,
    ridge: float = 0.0,
    tolerance: float = 1e-6,
    max_steps: int | None = None,
) -> Solution[Tensor]:
    """Solve min ‖b − A x‖² + ρ ‖x‖²; of all solutions, the one of least norm.

    Costs one product with A and one with Aᵀ a step, one with Aᵀ at the start, and one with each at the end
    for the true gradient.

    Args:
        operator: A (m x n), of any shape and rank.
        b: Right-hand side (m,) or K of them (m, K).
        ridge: ρ, not negative.
        tolerance: Stop when the gradient ‖Aᵀ (b − A x) − ρ x‖ ≤ tolerance · ‖Aᵀ b‖ for every column.
        max_steps: Largest number of steps; None for 10 min(m, n).

    Returns:
        x (n,) or (n, K); ``residual`` is the largest relative gradient.

    Raises:
        InputError: An argument does not fit.

    Example:
        >>> from linnet.linalg import FunctionOperator
        >>> ones = FunctionOperator(lambda v: v.repeat(2, 1), (2, 1), adjoint=lambda u: u.sum(0)[None])
        >>> lsmr(ones, torch.tensor([1.0, 3.0])).value.round()
        tensor([2.])
    """
    m, n = operator.shape
    if b.ndim not in (1, 2) or b.shape[0] != m or b.dtype != operator.dtype:
        raise InputError(
            f"b has shape {tuple(b.shape)} and type {b.dtype}", f"({m},) or ({m}, K) for {operator!r}"
        )
    limit = checked_limits(tolerance, max_steps, 10 * min(m, n))
    rho = require_damping(ridge)
    columns = b.reshape(m, -1)  # (m, K)
    process = _Process(operator, columns, rho**0.5)
    targets = tolerance * process.gradient  # (K,)
    steps = 0
    while steps < limit and bool((active := process.gradient > targets).any()):
        process.advance(active)
        steps += 1
    residual = _relative_gradient(operator, process.x, columns, rho)
    status = _status(residual, tolerance, bool((process.gradient <= targets).all()))
    return Solution(process.x.reshape(n, *b.shape[1:]), status, steps, residual)


class _Process:
    """The Golub-Kahan bidiagonalization and the rotations that solve it; names as in Fong and Saunders.

    Vectors are (m, K) or (n, K), numbers (K,). A bar or a hat there is ``_bar`` or ``_hat`` here.
    """

    def __init__(self, operator: LinearOperator, b: Tensor, damping: float) -> None:
        self._operator, self._damping = operator, damping
        self._u, beta = _normalized(b)  # β₁ u₁ = b
        self._v, self._alpha = _normalized(operator.T.mm(self._u))  # α₁ v₁ = Aᵀ u₁
        self.x, self._h, self._h_bar = torch.zeros_like(self._v), self._v, torch.zeros_like(self._v)
        self._alpha_bar, self._zeta_bar = self._alpha, self._alpha * beta
        self._rho = self._rho_bar = self._c_bar = torch.ones_like(beta)
        self._s_bar = torch.zeros_like(beta)

    @property
    def gradient(self) -> Tensor:
        """|ζ̄|, the norm of the gradient Aᵀ r − ρ x, (K,)."""
        return self._zeta_bar.abs()

    def advance(self, active: Tensor) -> None:
        """One step of the bidiagonalization, and three rotations that update the active columns of x."""
        beta = self._bidiagonalize()
        _, _, alpha_hat = _rotation(self._alpha_bar, torch.full_like(beta, self._damping))
        scale = self._rho * self._rho_bar  # of the last step
        c, s, self._rho = _rotation(alpha_hat, beta)
        theta, self._alpha_bar = s * self._alpha, c * self._alpha
        theta_bar = self._s_bar * self._rho
        self._c_bar, self._s_bar, self._rho_bar = _rotation(self._c_bar * self._rho, theta)
        zeta = self._c_bar * self._zeta_bar
        self._zeta_bar = torch.where(active, -self._s_bar * self._zeta_bar, self._zeta_bar)
        self._h_bar = self._h - _divided(theta_bar * self._rho, scale) * self._h_bar
        length = torch.where(active, _divided(zeta, self._rho * self._rho_bar), 0.0)
        self.x = self.x + length * self._h_bar
        self._h = self._v - _divided(theta, self._rho) * self._h

    def _bidiagonalize(self) -> Tensor:
        """The next β u = A v − α u and α v = Aᵀ u − β v; returns β."""
        self._u, beta = _normalized(self._operator.mm(self._v) - self._alpha * self._u)
        self._v, self._alpha = _normalized(self._operator.T.mm(self._u) - beta * self._v)
        return beta


def _rotation(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """c, s and r with c a + s b = r ≥ 0 and c b − s a = 0; the identity where both are zero."""
    r = torch.hypot(a, b)
    safe = torch.where(r > 0, r, 1.0)
    return torch.where(r > 0, a / safe, 1.0), b / safe, r


def _normalized(w: Tensor) -> tuple[Tensor, Tensor]:
    """Unit columns and their norms (K,); zero columns stay zero."""
    norms = w.norm(dim=0)
    return w / torch.where(norms > 0, norms, 1.0), norms


def _divided(a: Tensor, b: Tensor) -> Tensor:
    """The quotient a / b, zero where b is zero: such a column is solved."""
    return torch.where(b != 0, a / torch.where(b != 0, b, 1.0), 0.0)


def _relative_gradient(operator: LinearOperator, x: Tensor, b: Tensor, rho: float) -> float:
    """The largest ‖Aᵀ (b − A x) − ρ x‖ / ‖Aᵀ b‖ over the columns."""
    both = operator.T.mm(torch.cat([b - operator.mm(x), b], dim=1))  # Aᵀ r and Aᵀ b, (n, 2 K)
    gradient, start = both.tensor_split(2, dim=1)
    norms = start.norm(dim=0)
    relative = (gradient - rho * x).norm(dim=0) / torch.where(norms > 0, norms, 1.0)
    return float(relative.max()) if relative.numel() else 0.0


def _status(residual: float, tolerance: float, estimate_met: bool) -> Status:
    """The status, judged by the true gradient."""
    if residual <= tolerance:
        return Status.CONVERGED
    if not residual < float("inf"):
        return Status.DIVERGED
    return Status.STAGNATED if estimate_met else Status.MAX_STEPS
