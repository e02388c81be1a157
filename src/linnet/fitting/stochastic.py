"""The linear fit by stochastic gradient descent with momentum, run to the optimum.

    v ← m v − η A [Σ_{i ∈ B} J_iᵀ(J_i δ − r_i) + |B|/N ρ δ]        δ ← δ + v

A ≈ (JᵀJ + ρI)⁻¹ is estimated once. Gradients are sums over the batch B, so that η is one fixed effective
learning rate whatever |B|, and no batch has a larger curvature than the whole: with 1/η the largest
eigenvalue of A (JᵀJ + ρI) the steps are stable. A fixed rate on small batches ends in noise, so batches
double where an epoch no longer halves the residual; on all examples the iteration converges, and its
residual certifies it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.linalg.operator import LinearOperator
from linnet.linear.iterative import CGSettings, Iterative, Reused, accepted
from linnet.linear.preconditioner import precondition
from linnet.linear.problem import Memory, Problem
from linnet.solvers.cg import relative_residual
from linnet.solvers.lanczos import power_method
from linnet.solvers.solution import Solution, Status
from linnet.tangent.batch import take
from linnet.tangent.jacobian import JacobianOperator, NormalOperator
from linnet.training import shuffled, train

BATCH = 28  # examples of a step at first; Achille et al., CVPR 2021, section 4
MOMENTUM = 0.9
POWER_STEPS = 20  # for the largest eigenvalue, from below, of which the rate takes about half the limit


def solve_stochastically(
    problem: Problem,
    ridge: float,
    settings: CGSettings,
    memory: Memory = None,
    reused: Reused | None = None,
) -> Iterative:
    """The equations of the fit, solved by stochastic gradients; later solves are by conjugate gradients."""
    # Source: Achille et al., CVPR 2021, sections 3.3 and 4.
    jacobian, operator = problem.jacobian, None if reused is None else reused.preconditioner
    if operator is None:
        name = settings.preconditioner
        operator = precondition(name, NormalOperator(jacobian), problem, ridge, settings.rank)
    found = _Descent(jacobian, problem.residual, ridge, operator).run(settings)
    delta = accepted(found, "the linear fit by stochastic gradients")
    system = Iterative(problem, ridge, settings, memory, Reused(preconditioner=operator, start=delta))
    system.steps += found.steps
    return system


class _Descent:
    """Steps with momentum on ½‖Jδ − r‖² + ½ρ‖δ‖²."""

    # residual (N, C)

    def __init__(
        self,
        jacobian: JacobianOperator,
        residual: Tensor,
        ridge: float,
        preconditioner: LinearOperator | None,
    ) -> None:
        self.jacobian, self.residual, self.ridge = jacobian, residual.to(jacobian.dtype), ridge
        self.preconditioner, self.n = preconditioner, len(residual)
        self.matrix = NormalOperator(jacobian).damped(ridge)

    def run(self, settings: CGSettings) -> Solution[Tensor]:
        """δ from zero, an epoch after the other."""
        right = self.jacobian.T.mv(self.residual.reshape(-1))
        delta = torch.zeros_like(right)
        optimizer = torch.optim.SGD([delta], lr=1.0 / self._top(right), momentum=MOMENTUM)
        generator = torch.Generator().manual_seed(0)

        @torch.no_grad()
        def gradient(index: Tensor) -> None:
            delta.grad = self._preconditioned(self._gradient(delta, index.to(delta.device)))

        batch, steps, residual = min(BATCH, self.n), 0, 1.0 if bool(right.any()) else 0.0
        while settings.tolerance < residual < float("inf") and steps < settings.max_steps:
            steps += sum(1 for _ in train(optimizer, shuffled(self.n, batch, generator), gradient))
            before, residual = residual, relative_residual(self.matrix, delta[:, None], right[:, None])
            batch = min(2 * batch, self.n) if residual > before / 2 else batch
        if residual <= settings.tolerance:
            return Solution(delta, Status.CONVERGED, steps, residual)
        ended = Status.MAX_STEPS if residual < float("inf") else Status.DIVERGED
        return Solution(delta, ended, steps, residual)

    def _gradient(self, delta: Tensor, index: Tensor) -> Tensor:
        """Σ_{i ∈ B} J_iᵀ(J_i δ − r_i) + |B|/N ρ δ."""
        whole = self.jacobian
        rows = JacobianOperator(whole.function, take(whole.x, index), whole.outputs)
        pull = rows.mv(delta) - self.residual[index].reshape(-1)
        return rows.T.mv(pull) + len(index) / self.n * self.ridge * delta

    def _preconditioned(self, gradient: Tensor) -> Tensor:
        """A g."""
        return gradient if self.preconditioner is None else self.preconditioner.mv(gradient)

    def _top(self, right: Tensor) -> float:
        """The largest eigenvalue of A (JᵀJ + ρI)."""
        generator = torch.Generator(device=right.device).manual_seed(0)
        v = torch.randn(right.shape, generator=generator, dtype=right.dtype, device=right.device)
        return power_method(lambda v: self._preconditioned(self.matrix.mv(v)), v / v.norm(), POWER_STEPS)
