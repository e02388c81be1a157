"""The primal fit under equations: one solve by conjugate gradients for each of them.

With H = JᵀJ + ρI, W = H⁻¹Aᵀ and T = AW + τ/ρ I, the solution is δ + W T⁻¹ (b − Aδ), and its
covariance that of (H⁻¹ − W T⁻¹ Wᵀ).
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.fitting.constraints import Constraints
from linnet.fitting.dual import DualSystem
from linnet.fitting.primal import Primal
from linnet.tangent.batch import Inputs, split
from linnet.tangent.gram import gram
from linnet.tangent.jacobian import jacobian, jvp_columns

TOGETHER = 32  # rows of J formed at once


class ConstrainedPrimal:
    """A primal solution that obeys equations, with everything that a solution without them offers.

    Args:
        free: The solution without the equations.
        constraints: The equations.
        memory: Budget of the equations in the weights.

    Attributes:
        delta: δ, (P,).
        beta: (r − Jδ)/ρ, (N, C).
        steps: Steps taken by the solution without the equations.
    """

    def __init__(self, free: Primal, constraints: Constraints, memory: str | int | None = None) -> None:
        self.free, self.constraints, self.memory = free, constraints, memory
        self.n, self.c, self.ridge, self.residual = free.n, free.c, free.ridge, free.residual
        self.settings, self.function, self.x, self.steps = free.settings, free.function, free.x, free.steps
        self.rows = constraints.equations.jacobian(self.function, memory)  # Aᵀ
        self.solved = free.solve(self.rows)  # W
        product = (self.rows.T @ self.solved).double()
        # T is symmetric; it is kept as computed, so that the equations hold in spite of inexact solves
        self._schur = product + torch.diag(constraints.slack / self.ridge)
        left = constraints.gap - (self.rows.T @ free.delta).double()
        self.multipliers = torch.linalg.solve(self._schur, left)
        self.delta = free.delta + self.solved @ self.multipliers.to(free.delta)
        fitted = free.jacobian.mv(self.delta).view(self.n, self.c)
        self.beta = (self.residual.to(fitted.dtype) - fitted) / self.ridge
        self._blocks: Tensor | None = None
        self._dual: DualSystem | None = None
        self.design: Tensor | None = None  # G(X), once the kernel is formed

    @property
    def dual(self) -> DualSystem | None:
        """The same problem by the kernel given the equations, ``None`` where that does not fit the budget."""
        free = self.free.dual
        if self._dual is None and free is not None:
            self.design = self._reduce(self.x)
            level = (self.design @ self.constraints.level).view(self.n, self.c)
            kernel = free.kernel - self.design @ self.design.T
            self._dual = DualSystem(kernel, free.residual - level, self.ridge)
        return self._dual

    def _reduce(self, x: Inputs) -> Tensor:
        """G(x), by which the equations reduce the kernel, (T·C, q)."""
        return self.constraints.whitened(self.function, x, self.memory).double()

    def solve(self, b: Tensor) -> Tensor:
        """(H⁻¹ − W T⁻¹ Wᵀ) b for columns (P, K)."""
        free = self.free.solve(b)
        held: Tensor = torch.linalg.solve(self._schur, (self.rows.T @ free).double())
        return free - self.solved @ held.to(free)

    def _reach(self, x: Inputs) -> Tensor:
        """J(x) W, (T, C, q)."""
        size = max(1, TOGETHER // self.c)
        if self.solved.shape[1] <= self.c:
            return torch.cat([jvp_columns(self.function, part, self.solved) for part in split(x, size)])
        return torch.cat([jacobian(self.function, part) @ self.solved for part in split(x, size)])

    def _explained(self, x: Inputs) -> Tensor:
        """J(x_i) W T⁻¹ Wᵀ J(x_i)ᵀ, (T, C, C)."""
        reach = self._reach(x)
        half: Tensor = torch.linalg.solve(self._schur, reach.mT.double())
        explained: Tensor = reach @ half.to(reach)
        return explained

    def posterior(self, x: Inputs) -> Tensor:
        """Cov[f(x)] / σ², (T, C, C)."""
        free: Tensor = self.free.posterior(x)
        return free - self._explained(x)

    def cross(self, x: Inputs) -> Tensor:
        """J(x) (H⁻¹ − W T⁻¹ Wᵀ) Jᵀ, (T, C, N, C)."""
        if self.dual is not None and self.design is not None:
            rows = gram(self.function, x, self.x, form="full", memory=self.memory).double()
            return self.dual.cross(rows - (self._reduce(x) @ self.design.T).view(rows.shape))
        there, here = self._reach(x), self._reach(self.x).reshape(self.n * self.c, -1)
        half: Tensor = torch.linalg.solve(self._schur, here.T.double()).to(here)
        explained = (there.reshape(-1, here.shape[1]) @ half).view(-1, self.c, self.n, self.c)
        free: Tensor = self.free.cross(x)
        return free - explained

    def inverse_blocks(self) -> Tensor:
        """M_ii = (I − J_i (H⁻¹ − W T⁻¹ Wᵀ) J_iᵀ)/ρ, (N, C, C)."""
        if self.dual is not None:
            return self.dual.inverse_blocks()
        if self._blocks is None:
            self._blocks = self.free.inverse_blocks() + self._explained(self.x) / self.ridge
        return self._blocks

    def loo_residuals(self) -> Tensor:
        """e_i = (M_ii)⁻¹ β_i, (N, C)."""
        if self.dual is not None:
            return self.dual.loo_residuals()
        residuals: Tensor = torch.linalg.solve(self.inverse_blocks(), self.beta)
        return residuals

    def loo_variances(self) -> Tensor:
        """Cov[f(x_i)] / σ² without example i, (N, C, C)."""
        blocks = self.inverse_blocks()
        eye = torch.eye(self.c, dtype=blocks.dtype, device=blocks.device)
        found: Tensor = torch.linalg.inv(blocks) / self.ridge - eye
        return found

    def certificate(self) -> float:
        """‖Hδ − Jᵀr − Aᵀν‖ / ‖Jᵀr‖, the relative residual of the equations of the whole."""
        right = self.free.jacobian.T.mv(self.residual.to(self.delta.dtype).reshape(-1))
        pull = self.rows @ self.multipliers.to(self.rows)
        left = self.free.matrix.mv(self.delta) - right - pull
        return float(left.double().norm() / right.double().norm().clamp_min(1e-300))

    def noise(self) -> float:
        """σ² of highest evidence given the equations: ρ r̃ᵀβ / (N·C), r̃ = r − J Aᵀ (AAᵀ + τI)⁻¹ b."""
        factor = self.constraints.factor
        weights = torch.cholesky_solve(self.constraints.gap[:, None], factor)[:, 0]
        start = self.free.jacobian.mv(self.rows @ weights.to(self.rows)).view(self.n, self.c)
        left = self.residual.double() - start.double()
        return float(self.ridge * (left * self.beta.double()).sum() / left.numel())

    def removed(self, index: Tensor) -> ConstrainedPrimal:
        """The solution without some examples, under the same equations."""
        return ConstrainedPrimal(self.free.removed(index), self.constraints, self.memory)

    def extended(self, x: Inputs, residual: Tensor) -> ConstrainedPrimal:
        """The solution with more examples, under the same equations."""
        return ConstrainedPrimal(self.free.extended(x, residual), self.constraints, self.memory)
