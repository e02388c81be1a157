"""A solution in weights under equations on outputs: one more solve for each of them.

With H = J̃ᵀJ̃ + ρI, W = H⁻¹Aᵀ and T = AW + τ/ρ I, the solution is δ + W T⁻¹ (b − Aδ), and H⁻¹ becomes
H⁻¹ − W T⁻¹ Wᵀ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.linear.constraints import Constraints, Wanted, impose
from linnet.linear.dual import DualSystem
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.problem import Memory, Problem
from linnet.linear.system import System
from linnet.memory import Plan, parse_bytes, require
from linnet.tangent.linearized import Linearized


class ConstrainedSystem(System):
    """A solution that obeys equations on outputs."""

    def __init__(self, free: System, constraints: Constraints, memory: Memory = None) -> None:
        self.problem, self.ridge, self.work = free.problem, free.ridge, free.work
        self.free, self.memory = free, memory
        self.constraints = self._held = constraints
        self.tolerance = free.tolerance
        self.rows = constraints.equations.jacobian(self.function, memory)  # Aᵀ
        self.solved = free.solve(self.rows)  # W
        product = (self.rows.T.to(self.solved) @ self.solved).double()
        # T is symmetric; it is kept as computed, so that the equations hold in spite of inexact solves
        self._schur = product + torch.diag(constraints.slack / self.ridge)
        left = constraints.gap - (self.rows.T @ free.delta).double()
        self._pull: Tensor = torch.linalg.solve(self._schur, left)
        self._delta: Tensor = free.delta + (self.solved @ self._pull.to(self.solved)).to(free.delta)
        fitted = self.problem.push(self._delta[:, None]).view(self.n, self.c)
        self._beta = (self.problem.residual.to(fitted.dtype) - fitted) / self.ridge
        self._kernel_form: KernelSystem | None = None

    @property
    def delta(self) -> Tensor:
        """δ, (P,)."""
        return self._delta

    @property
    def beta(self) -> Tensor:
        """(r̃ − J̃δ)/ρ, (N, C)."""
        return self._beta

    @property
    def multipliers(self) -> Tensor:
        """ν of the equations: δ = J̃ᵀβ + Aᵀν, (q,)."""
        return self._pull / self.ridge

    @property
    def kernel_form(self) -> KernelSystem | None:
        """The same problem by the kernel given the equations, ``None`` where that does not fit the budget."""
        free = self.free.kernel_form
        if self._kernel_form is None and isinstance(free, KernelSystem):
            self._kernel_form = conditioned(free, self._held)
        return self._kernel_form

    @property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the kernel given the equations."""
        form = self.kernel_form
        return super().eigenvalues if form is None else form.eigenvalues

    @property
    def factorized(self) -> System | None:
        """Itself where the solution without the equations has a factorization of its own."""
        return self if self.free.factorized is self.free else self.kernel_form

    def solve(self, b: Tensor) -> Tensor:
        """(H⁻¹ − W T⁻¹ Wᵀ) b for columns b (P, K)."""
        free = self.free.solve(b)
        held: Tensor = torch.linalg.solve(self._schur, (self.rows.T.to(free) @ free).double())
        return free - self.solved @ held.to(free)

    def certificate(self) -> float:
        """‖Hδ − J̃ᵀr̃ − Aᵀν‖ / ‖J̃ᵀr̃‖, the relative residual of the equations of the whole."""
        problem, delta = self.problem, self.delta[:, None]
        right = problem.pull(problem.residual.reshape(-1, 1))
        left = problem.pull(problem.push(delta)) + self.ridge * delta
        rest = left - right - self.rows @ self._pull.to(self.rows)[:, None]
        return float(rest.double().norm() / right.double().norm().clamp_min(1e-300))

    def noise(self) -> float:
        """The noise of highest evidence given the equations, of r̃ − J̃ Aᵀ (AAᵀ + τI)⁻¹ b."""
        weights = torch.cholesky_solve(self._held.gap[:, None], self._held.factor)
        start = self.problem.push(self.rows @ weights.to(self.rows)).view(self.n, self.c)
        left = self.problem.residual.double() - start.double()
        return float(self.ridge * (left * self.beta.double()).sum() / left.numel())

    def at(self, ridge: float) -> ConstrainedSystem:
        """At another ridge; penalties keep their weight."""
        there = self._held.at_ridge(self.ridge, ridge)
        return ConstrainedSystem(self.free.at(ridge), there, self.memory)

    def removed(self, index: Tensor) -> ConstrainedSystem:
        """The solution without some examples, under the same equations."""
        return ConstrainedSystem(self.free.removed(index), self._held, self.memory)

    def extended(self, more: Problem) -> ConstrainedSystem:
        """The solution with more examples, under the same equations."""
        return ConstrainedSystem(self.free.extended(more), self._held, self.memory)

    def with_residual(self, residual: Tensor) -> ConstrainedSystem:
        """The solution for other targets, under the same equations."""
        return ConstrainedSystem(self.free.with_residual(residual), self._held, self.memory)


def conditioned(system: KernelSystem, constraints: Constraints) -> KernelSystem:
    """A solution by its kernel under equations that it did not obey."""
    design = constraints.whitened(system.function, system.x, system.memory).double()
    design = system.problem.weighed(design)
    held, dual = constraints.extended(design), system.dual
    residual = dual.residual - (design @ held.level).view(dual.residual.shape)
    solved = DualSystem(dual.kernel - design @ design.T, residual, system.ridge)
    return KernelSystem(system.problem, solved, system.memory, held)


# -- constraining ----------------------------------------------------------------------------------
# Makes a solution obey equations on its outputs.


def constrained(
    module: Linearized, system: System, asked: Wanted, weight: float | None, memory: Memory
) -> System:
    """The solution that obeys equations, on top of those that it obeys already."""
    slack = 0.0 if weight is None else system.ridge / weight
    before = system.constraints
    every = asked.equations if before is None else before.equations.joined(asked.equations)
    if not isinstance(system, KernelSystem):
        rows = every.jacobian(module.function, memory).double()
        made = impose(module, asked, slack, rows.T @ rows, before, memory)
        free = system.free if isinstance(system, ConstrainedSystem) else system
        return ConstrainedSystem(free, made, memory)
    dual = system.dual
    size = len(dual.kernel)
    items = (
        ("kernel given the equations", 2 * 8 * size**2),
        ("equations at the training data", 3 * 8 * size * every.count),
        ("kernel of the equations", 4 * 8 * every.count**2),
    )
    plan = Plan(f"{every.count} equations on outputs", parse_bytes(memory, module.function.device), items)
    require(plan, ["constrain fewer outputs", "raise memory="])
    made = impose(module, asked, slack, every.kernel(module.function, memory), before, memory)
    made = made.extended(made.whitened(module.function, system.x, memory))
    # K̃ and r̃ lose what the new equations explain; those before them are taken off already
    new = made.design[:, 0 if before is None else before.equations.count :]
    residual = dual.residual.reshape(-1) - new @ made.level[made.level.shape[0] - new.shape[1] :]
    kernel = dual.kernel - new @ new.T
    solved = DualSystem(kernel, residual.view(dual.residual.shape), system.ridge)
    return KernelSystem(system.problem, solved, system.memory, made)
