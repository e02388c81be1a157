"""The cross-entropy optimum of a linearized network in the dual: Newton's method on the kernel.

    δ = argmin Σᵢ ℓ(f₀(xᵢ) + Jᵢδ, yᵢ) + ½ ρ‖δ‖²

With δ = Jᵀβ the outputs are f = f₀ + Kβ and the gradient in δ is Jᵀr, r = g + ρβ, which vanishes where
β = (y − p)/ρ. Newton's direction solves (ΛK + ρI) d = −r; with Λ = LLᵀ (block diagonal, C − 1 columns
for each example) and the symmetric B = ρI + LᵀKL, all of whose eigenvalues are at least ρ,

    d = −(r − L B⁻¹ Lᵀ K r)/ρ                      (Rasmussen and Williams 2006, algorithm 3.3)
    H⁻¹ = (I − Jᵀ L B⁻¹ Lᵀ J)/ρ                    inverse Hessian JᵀΛJ + ρI at the optimum
    A(x, x') = J(x) H⁻¹ J(x')ᵀ                      covariance of the Laplace posterior

and what one Newton step from the optimum says of a fit without example i:

    f₋ᵢ(x) − f(x) ≈ A(x, xᵢ) eᵢ,  eᵢ = (I − ΛᵢAᵢᵢ)⁻¹ gᵢ = gᵢ + Lᵢ (I − LᵢᵀAᵢᵢLᵢ)⁻¹ LᵢᵀAᵢᵢ gᵢ
    I − LᵢᵀAᵢᵢLᵢ = ρ [B⁻¹]ᵢᵢ
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg.factorize import cholesky, require_finite
from linnet.linear.newton import STEPS, Direction, NewtonMethod
from linnet.linear.softmax_loss import ClassLoss

TOLERANCE = 1e-13  # gradient, relative to that at δ = 0, at which Newton's method in float64 has arrived
ARRIVED = 1e-16  # dᵀHd relative to the objective: the step d leaves the square of that
STALLED = (
    1e-6  # gradient up to which an answer at the limit of its precision is taken; the certificate says it
)
COLUMNS = 1024  # columns of the kernel solved for at once


def one_newton_step(own: Tensor, rest: Tensor, roots: Tensor, gradient: Tensor) -> Tensor:
    """e_i = (I − Λ_i A_ii)⁻¹ g_i, by which one Newton step leaves an example out, (N, C)."""
    # own (N, C, C), rest (N, D, D), roots (N, C, D), gradient (N, C)
    seen = roots.mT @ (own @ gradient[:, :, None])  # L_iᵀ A_ii g_i
    solved: Tensor = torch.linalg.solve(rest, seen)
    return gradient + (roots @ solved)[:, :, 0]


class SoftmaxDual(NewtonMethod):
    """K, f₀, y and ρ with the optimal β, and what follows from the Hessian there."""

    # kernel (N·C, N·C), base (N, C), start (N, C)

    def __init__(
        self,
        kernel: Tensor,
        base: Tensor,
        loss: ClassLoss,
        ridge: float,
        start: Tensor | None = None,
        max_steps: int = STEPS,
    ) -> None:
        self.kernel, self.base, self.loss, self.ridge = kernel, base.to(kernel), loss, float(ridge)
        self.n, self.c = base.shape
        self.max_steps = max_steps
        self._curvature: tuple[Tensor, Tensor] | None = None
        self._own: Tensor | None = None
        self._unexplained: Tensor | None = None
        require_finite(kernel, "kernel")
        require_finite(self.base, "outputs f₀")
        self._scale = self._norm(self._product(loss.gradient(self.base)), loss.gradient(self.base))
        self.beta = torch.zeros_like(self.base) if start is None else start.to(kernel).clone()
        if start is not None and self._value(self.beta) > self._value(torch.zeros_like(self.base)):
            self.beta = torch.zeros_like(self.base)
        self.outputs = self.base + self._product(self.beta)
        self.steps, self.objective = 0, [self._value(self.beta)]
        reached, stalled = self.descend(TOLERANCE, ARRIVED)
        if stalled and reached > STALLED:
            raise NumericalError(
                f"Newton's method for the cross-entropy stopped after {self.steps} steps with a gradient "
                f"of {reached:.1e} of the one at the start",
                expected=f"at most {STALLED:g}",
                remedy=f"raise max_steps=, take a ridge above {self.ridge:g}, or the network in float64",
            )

    # -- Newton's method -------------------------------------------------------------------------

    def _product(self, v: Tensor) -> Tensor:
        """K v for v (N, C)."""
        return (self.kernel @ v.reshape(-1)).view(self.n, self.c)

    @staticmethod
    def _norm(product: Tensor, v: Tensor) -> float:
        """‖Jᵀv‖ = √(vᵀKv)."""
        return math.sqrt(max(float((v * product).sum()), 0.0))

    def _value(self, beta: Tensor) -> float:
        """Σ ℓ_i + ½ ρ βᵀKβ."""
        change = self._product(beta)
        loss = float(self.loss.losses(self.base + change).sum())
        return loss + 0.5 * self.ridge * float((beta * change).sum())

    @property
    def gradient(self) -> Tensor:
        """Gradient of the losses in the outputs, g = p − y, (N, C)."""
        return self.loss.gradient(self.outputs)

    def certificate(self) -> float:
        """‖∇‖ at the solution over ‖∇‖ at δ = 0."""
        r = self.gradient + self.ridge * self.beta
        return self._norm(self._product(r), r) / self._scale if self._scale else 0.0

    def _total_loss(self, outputs: Tensor) -> float:
        """Σ ℓ_i at outputs."""
        return float(self.loss.losses(outputs).sum())

    def _spent(self) -> bool:
        """Whether no further step may be taken."""
        return self.steps >= min(self.max_steps, STEPS)

    def _reached(self) -> float:
        """The certificate."""
        return self.certificate()

    def _towards(self, reached: float) -> Direction:
        """Newton's direction by a Cholesky factor; its squares are those in the norm of the kernel."""
        r = self.gradient + self.ridge * self.beta
        d = self._direction(r)
        product, change = self.outputs - self.base, self._product(d)
        own, mixed, square = (
            float((u * v).sum()) for u, v in ((self.beta, product), (d, product), (d, change))
        )
        size = self._total_loss(self.outputs) + 0.5 * self.ridge * own
        size = abs(size) + self.ridge * float((self.beta * product).abs().sum())
        rounding = 16 * torch.finfo(d.dtype).eps * size
        return Direction(d, change, float((r * change).sum()), (own, mixed, square), rounding)

    def _move(self, t: float, direction: Direction, value: float) -> None:
        """Go t of the direction; the outputs are made anew, so that no rounding piles up."""
        self.beta = self.beta + t * direction.step
        self.outputs = self.base + self._product(self.beta)
        self.objective.append(value)

    def _direction(self, r: Tensor) -> Tensor:
        """Newton's direction d = −(r − L B⁻¹ Lᵀ K r)/ρ."""
        roots = self.loss.roots(self.outputs)
        factor = self._factor(roots)
        seen = (roots.mT @ self._product(r)[:, :, None]).reshape(-1, 1)
        solved = torch.cholesky_solve(seen, factor).view(self.n, -1, 1)
        return -(r - (roots @ solved)[:, :, 0]) / self.ridge

    def _factor(self, roots: Tensor) -> Tensor:
        """The Cholesky factor of B = ρI + LᵀKL, (N·D, N·D)."""
        half = self._half(roots)
        b = torch.einsum("ncd,nck->ndk", roots, half.view(self.n, self.c, -1)).reshape(-1, half.shape[1])
        b.diagonal().add_(self.ridge)
        try:
            return cholesky(b, "ridge + curvature of the cross-entropy")
        except NumericalError as error:
            raise NumericalError(
                error.what,
                error.expected,
                f"take a ridge larger than {self.ridge:g}, or the network in float64",
            ) from error

    def _half(self, roots: Tensor) -> Tensor:
        """K L, (N·C, N·D)."""
        blocks = self.kernel.view(-1, self.n, self.c)
        return torch.einsum("anc,ncd->and", blocks, roots).reshape(self.n * self.c, -1)

    # -- the Hessian at the optimum --------------------------------------------------------------

    @property
    def curvature(self) -> tuple[Tensor, Tensor]:
        """L at the optimum, (N, C, D), and the Cholesky factor of B there."""
        if self._curvature is None:
            roots = self.loss.roots(self.outputs)
            self._curvature = roots, self._factor(roots)
        return self._curvature

    def weighted(self, columns: Tensor) -> Tensor:
        """(I − L B⁻¹ Lᵀ K) v for columns v: with them J(x)H⁻¹Jᵀv = K(x, X) of it, over ρ."""
        # columns (N·C, k)
        roots, factor = self.curvature
        seen = torch.einsum("ncd,nck->ndk", roots, (self.kernel @ columns).view(self.n, self.c, -1))
        solved = torch.cholesky_solve(seen.reshape(factor.shape[0], -1), factor)
        back = torch.einsum("ncd,ndk->nck", roots, solved.view(self.n, -1, solved.shape[1]))
        return columns - back.reshape(columns.shape)

    def next_change(self) -> Tensor:
        """The change of the outputs by one more Newton step, (N, C): their distance to the optimum."""
        r = (self.gradient + self.ridge * self.beta).reshape(-1, 1)
        return self._product(self.weighted(r)) / self.ridge

    def explained(self, kernel: Tensor) -> Tensor:
        """K(x,X) L B⁻¹ Lᵀ K(X,x), the part of the prior covariance that the data take away."""
        # kernel (T, C, N, C)
        roots, factor = self.curvature
        t = kernel.shape[0]
        rows = torch.einsum("tcne,ned->tcnd", kernel.to(roots).view(t, self.c, self.n, self.c), roots)
        seen = rows.reshape(t * self.c, -1).T
        half = torch.linalg.solve_triangular(factor, seen, upper=False).view(-1, t, self.c)
        return torch.einsum("ktc,kte->tce", half, half)

    def own_covariances(self) -> Tensor:
        """A_ii, (N, C, C)."""
        if self._own is None:
            blocks = self.kernel.view(self.n, self.c, self.n, self.c)
            size = max(1, COLUMNS // self.c)
            parts = [self.explained(blocks[i : i + size]) for i in range(0, self.n, size)]
            self._own = (blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1) - torch.cat(parts)) / self.ridge
        return self._own

    def _rest(self) -> Tensor:
        """I − L_iᵀ A_ii L_i = ρ [B⁻¹]_ii, (N, D, D)."""
        if self._unexplained is None:
            roots, factor = self.curvature
            inverse = torch.cholesky_inverse(factor).view(self.n, roots.shape[2], self.n, roots.shape[2])
            blocks = inverse.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            self._unexplained = self.ridge * blocks  # a copy, so that the inverse can go
        return self._unexplained

    def one_step(self) -> Tensor:
        """e, (N, C), by which one Newton step leaves each example out."""
        roots, _ = self.curvature
        return one_newton_step(self.own_covariances(), self._rest(), roots, self.gradient)

    def loo_outputs(self) -> Tensor:
        """f_i + A_ii e_i, one Newton step from the optimum, (N, C)."""
        return self.outputs + (self.own_covariances() @ self.one_step()[:, :, None])[:, :, 0]

    def degrees_of_freedom(self) -> float:
        """Effective parameters, tr ΛA = tr (I − ρB⁻¹)."""
        rest = self._rest()
        return rest.shape[0] * rest.shape[1] - float(rest.diagonal(dim1=1, dim2=2).sum())

    def log_evidence(self) -> float:
        """−Σℓ − ½ρ‖δ‖² − ½ log det(I + LᵀKL/ρ), Laplace's approximation."""
        _, factor = self.curvature
        logdet = 2 * float(factor.diagonal().log().sum()) - len(factor) * math.log(self.ridge)
        return -self.objective[-1] - 0.5 * logdet

    # -- changes ---------------------------------------------------------------------------------

    def at(self, ridge: float) -> SoftmaxDual:
        """The solution at another ridge, from the present one."""
        return SoftmaxDual(self.kernel, self.base, self.loss, ridge, self.beta, self.max_steps)

    def removed(self, index: Tensor) -> SoftmaxDual:
        """The solution without some examples, from the present one."""
        # index (k,)
        keep = torch.ones(self.n, dtype=torch.bool, device=self.kernel.device)
        keep[index] = False
        rows = keep.repeat_interleave(self.c)
        kernel = self.kernel[rows][:, rows]
        return SoftmaxDual(
            kernel, self.base[keep], self.loss.taken(keep), self.ridge, self.beta[keep], self.max_steps
        )

    def extended(self, cross: Tensor, corner: Tensor, base: Tensor, loss: ClassLoss) -> SoftmaxDual:
        """The solution with more examples, from the present one."""
        # cross (N, C, m, C), corner (m, C, m, C), base (m, C)
        m = base.numel()
        k12, k22 = cross.reshape(-1, m).to(self.kernel), corner.reshape(m, m).to(self.kernel)
        kernel = torch.cat([torch.cat([self.kernel, k12], 1), torch.cat([k12.T, k22], 1)])
        base = torch.cat([self.base, base.to(self.base)])
        start = torch.cat([self.beta, self.beta.new_zeros(base.shape[0] - self.n, self.c)])
        return SoftmaxDual(kernel, base, self.loss.joined(loss), self.ridge, start, self.max_steps)
