"""The linear fit with clipped per-example gradients.

    F(δ) = Σᵢ h(sᵢ (rᵢ − Jᵢδ)) + ½ ρ‖δ‖²,   sᵢ = min(1, κ/‖Jᵢ‖),   h(e) = ½‖e‖² up to ‖e‖ = τ, then τ‖e‖ − ½τ²

The gradient of an example is −sᵢJᵢᵀ e min(1, τ/‖e‖), no longer than κτ whatever the example. h is Huber's
function, so F is convex, its gradient is the clipped one, and its optimum is that of the fit where nothing
is clipped. In the dual, δ = JᵀSβ with ρβ = clip(e), found by Newton's method.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg.factorize import cholesky

STEPS = 200
TOLERANCE = 1e-12  # of the gradient, relative to its two parts
ENOUGH = 1e-4  # share of the slope by which a step must lower the objective
HALVINGS = 50


def jacobian_scales(blocks: Tensor, limit: float, eps: float) -> Tensor:
    """s_i = min(1, κ/‖J_i‖), with ‖J_i‖² the largest eigenvalue of K_ii."""
    # blocks (N, C, C)
    norms = torch.linalg.eigvalsh(blocks.double())[:, -1].clamp_min(0).sqrt() * (1 + 100 * eps)
    scales: Tensor = (limit / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
    return scales


def clip_rows(e: Tensor, limit: float) -> Tensor:
    """Rows no longer than τ: the gradient of Huber's function, (N, C)."""
    return e * _factors(e, limit)[:, None]


def _factors(e: Tensor, limit: float) -> Tensor:
    """min(1, τ/‖e_i‖), (N,)."""
    factors: Tensor = (limit / e.norm(dim=1).clamp_min(torch.finfo(e.dtype).tiny)).clamp_max(1.0)
    return factors


def _losses(e: Tensor, limit: float) -> Tensor:
    """Σ h(e_i)."""
    norms = e.norm(dim=1)
    return torch.where(norms <= limit, 0.5 * norms**2, limit * norms - 0.5 * limit**2).sum()


def _roots(e: Tensor, limit: float) -> Tensor:
    """Square roots of the Hessians of h: I, or √(τ/‖e‖) (I − êêᵀ) where clipped, (N, C, C)."""
    eye = torch.eye(e.shape[1], dtype=e.dtype, device=e.device).expand(len(e), -1, -1)
    unit = e / e.norm(dim=1, keepdim=True).clamp_min(torch.finfo(e.dtype).tiny)
    factors = _factors(e, limit)
    outside = factors.sqrt()[:, None, None] * (eye - unit[:, :, None] * unit[:, None, :])
    return torch.where((factors < 1)[:, None, None], outside, eye)


def clipped_optimum(kernel: Tensor, residual: Tensor, ridge: float, limit: float) -> Tensor:
    """β of the optimum, by Newton's method on a strongly convex objective, (N, C)."""
    # kernel (N·C, N·C), residual (N, C)
    n, c = residual.shape
    beta = torch.zeros_like(residual)
    product = torch.zeros_like(residual)  # Kβ

    def value(b: Tensor, p: Tensor) -> float:
        return float(_losses(residual - p, limit) + 0.5 * ridge * (b * p).sum())

    reached = torch.inf
    for _ in range(STEPS):
        e = residual - product
        pull = clip_rows(e, limit)
        v = ridge * beta - pull  # ∇F = JᵀS v
        kv = (kernel @ v.reshape(-1)).view(n, c)
        scale = _norm(pull, (kernel @ pull.reshape(-1)).view(n, c))
        reached = _norm(v, kv) / scale if scale > 0 else 0.0
        if reached <= TOLERANCE:
            return beta
        eta = _direction(kernel, _roots(e, limit), v, kv, ridge)
        moved = (kernel @ eta.reshape(-1)).view(n, c)
        slope, before, step = float((kv * eta).sum()), value(beta, product), 1.0
        rounding = 1e-14 * abs(before)
        for _ in range(HALVINGS):
            if value(beta + step * eta, product + step * moved) <= before + ENOUGH * step * slope + rounding:
                break
            step /= 2
        beta, product = beta + step * eta, product + step * moved
    if reached <= 1e-8:
        return beta
    raise NumericalError(
        f"the clipped fit stopped at a relative gradient of {reached:.1e} after {STEPS} Newton steps",
        expected=f"at most {TOLERANCE:g}",
        remedy="use a larger ridge",
    )


def _norm(v: Tensor, kv: Tensor) -> float:
    """‖JᵀS v‖."""
    return float((v * kv).sum().clamp_min(0).sqrt())


def _direction(kernel: Tensor, roots: Tensor, v: Tensor, kv: Tensor, ridge: float) -> Tensor:
    """η = −(ρI + ΛK)⁻¹ v = −(v − R B⁻¹ R K v)/ρ with Λ = R², B = ρI + R K R."""
    n, c = v.shape
    half = torch.einsum("nij,njk->nik", roots, kernel.view(n, c, n * c)).reshape(n * c, n, c)
    matrix = torch.einsum("anj,njk->ank", half, roots).reshape(n * c, n * c)
    matrix = (matrix + matrix.T) / 2
    matrix.diagonal().add_(ridge)
    right = torch.einsum("nij,nj->ni", roots, kv).reshape(-1, 1)
    solved = torch.cholesky_solve(right, cholesky(matrix, "clipped kernel + ridge")).view(n, c)
    return -(v - torch.einsum("nij,nj->ni", roots, solved)) / ridge
