"""A linear model by conjugate gradients and Krylov spaces: products with K̃ or J̃ᵀJ̃ alone.

The mean is one solve. Variances come from a cache of r directions, found once by block Lanczos,

    λ Cov[f] = K(x,x) − J(x) M Mᵀ J(x)ᵀ,

    function space    M = J̃ᵀ Q (H + ρI)^(−½)           with H = Qᵀ K̃ Q  (LOVE: Pleiss et al. 2018)
    parameter space   M = U (s / (s + ρ))^(½)          with U s Uᵀ the Nyström form of J̃ᵀJ̃

where K(x,x) is exact, so that what the cache leaves out makes the variance larger, never smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg.operator import LinearOperator
from linnet.linear.evidence import Measure, by_matrix, by_quadrature
from linnet.linear.formed_rows import FormedRows
from linnet.linear.operators import KernelOperator, fisher, precondition, stored_kernel
from linnet.linear.preconditioner import FEW, TRIAL
from linnet.linear.primal import CGSettings
from linnet.linear.problem import Memory, Problem
from linnet.linear.system import System
from linnet.memory import parse_bytes
from linnet.solvers.krylov import krylov
from linnet.solvers.solution import Solution, Status
from linnet.tangent.batch import Inputs, batch_size
from linnet.tangent.gram import gram, own_kernels

RANK = 100  # directions of the variance cache
FLOOR = 0.01  # of ρ: what the cache leaves out of the trace is not worth more directions
SMALL = 256  # equations up to which the spectrum is computed from the whole matrix
PROBES, NODES = 16, 40  # random vectors and Lanczos steps of the evidence
STAGNATED = 1e-3  # residual up to which an answer at the limit of its precision is taken
SHARE = 0.5  # of the budget that the cache may take
ROWS = 1 << 16  # of a panel rotated at once


@dataclass(frozen=True)
class Iteration:
    """Settings of the iterative systems.

    Args:
        variance: ``"lanczos"`` for the cache, ``"exact"`` for a solve for each example and output.
        derivative: ``"exact"`` or ``"finite-difference"`` products in parameter space.
        preconditioner: Its name.
        rank: Directions of the variance cache and rank of the preconditioner; 0 for the usual ones.
        tolerance: Relative residual of conjugate gradients.
        max_steps: Largest number of their steps.
        seed: Seed of everything random.
    """

    variance: str = "lanczos"
    derivative: str = "exact"
    preconditioner: str = "auto"
    rank: int = 0
    tolerance: float = 1e-6
    max_steps: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class Panel:
    """The directions of the variance cache.

    Args:
        columns: B (P, r), with M Mᵀ = B diag(weights) Bᵀ.
        values: Ritz values h, or Nyström values s, (r,).
        primal: Which of the two.
        left_out: tr J̃ᵀJ̃ less what is in the cache; no eigenvalue that it lacks is larger.
    """

    columns: Tensor
    values: Tensor
    primal: bool
    left_out: float

    def weights(self, ridge: float) -> Tensor:
        """1/(h + ρ), or s/(s + ρ)."""
        return self.values / (self.values + ridge) if self.primal else 1 / (self.values + ridge)


@dataclass
class Shared:
    """Parts of a solution that do not depend on ρ, or need not.

    Args:
        operator: K̃ or J̃ᵀJ̃.
        preconditioner: One that was made, for whatever ρ or task.
        name: What it is called.
        panel: The variance cache.
        measure: The spectrum of the evidence.
        solution: The solved equations of this very ρ, if they are known.
    """

    operator: LinearOperator | None = None
    preconditioner: LinearOperator | None = None
    name: str = ""
    panel: Panel | None = None
    measure: Measure | None = None
    solution: Solution[Tensor] | None = None


class Iterative(System):
    """The equations of one of the two spaces, by products.

    Args:
        problem: The data.
        ridge: ρ.
        space: "function", "stored" (function space with K̃ in memory) or "parameter".
        settings: How to iterate.
        memory: Budget.
        shared: What is known already.

    Attributes:
        steps: Steps of conjugate gradients for the mean.
        solution: The solved vector, and how the iteration ended.
    """

    def __init__(
        self,
        problem: Problem,
        ridge: float,
        space: str,
        settings: Iteration,
        memory: Memory,
        shared: Shared,
    ) -> None:
        self.problem, self.ridge, self.memory = problem, ridge, memory
        self.space, self.settings, self.shared = space, settings, shared
        self.work = {}
        self.solution = self._first() if shared.solution is None else shared.solution
        self.steps = self.solution.steps
        self.work["steps"] = self.steps
        self._value = _accepted(self.solution)

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        """The relative residual that solves may leave."""
        return self.settings.tolerance

    @property
    def operator(self) -> LinearOperator:
        """K̃ or J̃ᵀJ̃."""
        if self.shared.operator is None:
            if self.space == "parameter":
                self.shared.operator = fisher(self.problem, self.settings.derivative, self.memory)
            elif self.space == "stored":
                self.shared.operator = stored_kernel(self.problem, self.memory)
            else:
                self.shared.operator = KernelOperator(self.problem)
        return self.shared.operator

    @cached_property
    def right(self) -> Tensor:
        """The right-hand side: r̃, or J̃ᵀr̃ in parameter space, (n, 1)."""
        residual = self.residual.to(self.function.dtype).reshape(-1, 1)
        return self.problem.pull(residual) if self.space == "parameter" else residual

    @cached_property
    def delta(self) -> Tensor:
        """The solution, or J̃ᵀ of it."""
        return (self._value if self.space == "parameter" else self.problem.pull(self._value))[:, 0]

    @cached_property
    def beta(self) -> Tensor:
        """β: the solution, or (r̃ − J̃δ)/ρ in parameter space, (N, C)."""
        if self.space != "parameter":
            return self._value.view(self.n, self.c)
        fitted = self.problem.push(self._value).view(self.n, self.c)
        return (self.residual.to(fitted) - fitted) / self.ridge

    def certificate(self) -> float:
        """The relative residual of the solved equations, measured in float64."""
        return self.solution.residual

    def at(self, ridge: float) -> Iterative:
        """The same operator, cache and spectrum at another ρ; a preconditioner of Nyström's is made again."""
        shared = Shared(self.operator, None, "", self.shared.panel, self.shared.measure)
        if self.shared.name in ("ekfac", "kfac", "diagonal"):
            shared.preconditioner, shared.name = self.shared.preconditioner, self.shared.name
        return Iterative(self.problem, ridge, self.space, self.settings, self.memory, shared)

    def removed(self, index: Tensor) -> Iterative:
        """Without some examples, by another solve."""
        return self._of(self.problem.without(index))

    def extended(self, more: Problem) -> Iterative:
        """With more examples, by another solve."""
        return self._of(self.problem.joined(more))

    def with_residual(self, residual: Tensor) -> Iterative:
        """For other targets, by another solve with the same operator, cache and preconditioner."""
        shared = replace(self.shared, measure=None, solution=None)
        problem = replace(self.problem, residual=residual)
        return Iterative(problem, self.ridge, self.space, self.settings, self.memory, shared)

    def _of(self, problem: Problem) -> Iterative:
        """The solution of other data of the same network; in parameter space by the same preconditioner."""
        shared = Shared()
        if self.space == "parameter":
            shared.preconditioner, shared.name = self.shared.preconditioner, self.shared.name
        return Iterative(problem, self.ridge, self.space, self.settings, self.memory, shared)

    # -- solves ----------------------------------------------------------------------------------

    def solve(self, b: Tensor) -> Tensor:
        """(J̃ᵀJ̃ + ρI)⁻¹ b for columns (P, K)."""
        if self.space == "parameter":
            return _accepted(self._solve(b, None))
        dual = _accepted(self._solve(self.problem.push(b), None))
        return (b - self.problem.pull(dual)) / self.ridge

    def _first(self) -> Solution[Tensor]:
        """The solve for the mean; a preconditioner is made when it is needed."""
        name, settings, right = self.settings.preconditioner, self.settings, self.right
        if name != "auto" or self.shared.preconditioner is not None:
            return self._solve(right, None)
        limit = settings.max_steps if self.operator.shape[0] <= FEW else min(TRIAL, settings.max_steps)
        trial = CGSettings(settings.tolerance, limit)
        found: Solution[Tensor] = trial.run(self.operator.damped(self.ridge), right, None, None)
        if found.status is not Status.MAX_STEPS or limit == settings.max_steps:
            self.shared.name = "none"
            return found
        self._make(self._affordable())
        after = self._solve(right, found.value)
        return Solution(after.value, after.status, found.steps + after.steps, after.residual)

    def _affordable(self) -> str:
        """The preconditioner to take where none is requested."""
        if self.space == "stored":
            return "pivoted-cholesky"
        rank = self.settings.rank or RANK
        needed = 4 * min(rank, *self.operator.shape) * self.operator.shape[0] * self.operator.dtype.itemsize
        fits = needed <= SHARE * parse_bytes(self.memory, self.function.device)
        return "nystrom" if fits or self.space != "parameter" else "ekfac"

    def _make(self, name: str) -> None:
        """Make a preconditioner and remember it."""
        rank, seed = self.settings.rank, self.settings.seed
        self.shared.preconditioner = precondition(name, self.operator, self.problem, self.ridge, rank, seed)
        self.shared.name = name

    def _solve(self, right: Tensor, start: Tensor | None) -> Solution[Tensor]:
        """(A + ρI)⁻¹ b for columns."""
        if not self.shared.name:
            name = self.settings.preconditioner
            self._make(self._affordable() if name == "auto" else name)
        settings = CGSettings(self.settings.tolerance, self.settings.max_steps)
        matrix = self.operator.damped(self.ridge)
        found: Solution[Tensor] = settings.run(matrix, right, self.shared.preconditioner, start)
        return found

    # -- variances -------------------------------------------------------------------------------

    @property
    def panel(self) -> Panel:
        """The variance cache, made when first needed."""
        if self.shared.panel is None:
            self.shared.panel = self._made_panel()
        return self.shared.panel

    def _made_panel(self) -> Panel:
        """As many directions as requested, as fit, or as there is something to find."""
        m, p = self.problem.jacobian.shape
        primal = self.space == "parameter"
        room = int(SHARE * parse_bytes(self.memory, self.function.device))
        rank = max(2, min(self.settings.rank or RANK, room // (p * self.function.dtype.itemsize)))
        block = max(1, min(max(self.c, 4), rank // 2))
        everything = rank >= m
        if everything:  # in parameter space one block more for the null space, one for the Nyström form
            rank = min(p, (-(-m // block) + 2) * block) if primal else m
        own = own_kernels(self.function, self.x, self.memory).diagonal(dim1=1, dim2=2).reshape(-1, 1)
        trace = float(self.problem.weighed(self.problem.weighed(own.double())).sum())
        rounding = 10 * torch.finfo(self.operator.dtype).eps * trace
        enough = math.inf if everything else trace - max(FLOOR * self.ridge, rounding)
        found = krylov(self.operator, block, rank, enough, self.settings.seed)
        self.work["products of the variance cache"] = found.products
        differences = self.settings.derivative == "finite-difference"
        error = torch.finfo(self.operator.dtype).eps ** 0.5 if differences else None
        values, rotation = found.nystrom(error) if primal else found.ritz()
        columns = _rotated(found.basis, rotation)
        if not primal:
            columns = self.problem.pull(columns)
        return Panel(columns, values, primal, max(0.0, trace - float(values.sum())))

    def covariance(self, x: Inputs, joint: bool = False) -> Tensor:
        """K(x,x) less what the data explain."""
        if self.settings.variance == "exact":
            return self._exact(x, joint)
        panel, c = self.panel, self.c
        weights = panel.weights(self.ridge)
        own, halves = [], []
        for _, rows in FormedRows(self.function, x, c, self.memory, keep=False):
            each = rows.view(-1, c, rows.shape[1]).double() if not joint else None
            if each is not None:
                own.append(each @ each.mT)
            halves.append((rows @ panel.columns).double() * weights.sqrt())
        b = torch.cat(halves)
        if joint:
            kernel = gram(self.function, x, form="full", memory=self.memory).double()
            return kernel - (b @ b.T).view(kernel.shape)
        b = b.view(-1, c, b.shape[1])
        return torch.cat(own) - b @ b.mT

    def spread(self, v: Tensor) -> Tensor:
        """V − M Mᵀ v."""
        panel = self.panel
        weights = panel.weights(self.ridge).to(v)[:, None]
        return v - panel.columns @ (weights * (panel.columns.T @ v))

    def _exact(self, x: Inputs, joint: bool) -> Tensor:
        """A solve for each example and output; those of a batch run together."""
        c, found = self.c, []
        if joint:
            size = batch_size(x)
            formed = FormedRows(self.function, x, c, self.memory, keep=False)
            rows = torch.cat([rows for _, rows in formed])
            return self._explained(rows).view(size, c, size, c)
        for _, rows in FormedRows(self.function, x, c, self.memory, keep=False):
            blocks = self._explained(rows).view(len(rows) // c, c, len(rows) // c, c)
            found.append(blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1))
        return torch.cat(found)

    def _explained(self, rows: Tensor) -> Tensor:
        """λ Cov between the outputs whose rows of J are given, (m, P) to (m, m)."""
        if self.space == "parameter":
            solved = _accepted(self._solve(rows.T.contiguous(), None))
            # ρ J (J̃ᵀJ̃ + ρI)⁻¹ Jᵀ
            return self.ridge * (rows @ solved).double()
        cross = self.problem.push(rows.T.contiguous())  # K̃(X,x)
        solved = _accepted(self._solve(cross, None))
        return (rows @ rows.T).double() - (cross.T @ solved).double()

    # -- evidence --------------------------------------------------------------------------------

    @cached_property
    def measure(self) -> Measure:
        """The spectrum, in the smaller space, by stochastic Lanczos quadrature where it is large."""
        if self.shared.measure is None:
            size = self.n * self.c
            primal = self.space == "parameter" and (
                self.settings.derivative != "exact" or self.operator.shape[0] < size
            )
            operator = self.operator if primal or self.space != "parameter" else KernelOperator(self.problem)
            start = self.right[:, 0].double() if primal else self.residual.reshape(-1)
            facts = self.problem.squared, self.problem.count, self.problem.log_noise
            if operator.shape[0] <= SMALL:
                self.shared.measure = by_matrix(operator, start, primal, facts)
                self.work["products of the evidence"] = 1
                return self.shared.measure
            size = operator.shape[0] * operator.dtype.itemsize * (PROBES + 1)
            room = int(SHARE * parse_bytes(self.memory, self.function.device)) // size
            steps = max(2, min(NODES, room, operator.shape[0]))
            self.shared.measure = by_quadrature(
                operator, start, primal, facts, PROBES, steps, self.settings.seed
            )
            self.work["products of the evidence"] = steps
        return self.shared.measure


def _rotated(basis: Tensor, rotation: Tensor) -> Tensor:
    """Q E in the place of Q, some rows at a time."""
    e = rotation.to(basis)
    for start in range(0, basis.shape[0], ROWS):
        basis[start : start + ROWS] = basis[start : start + ROWS] @ e
    return basis


def _accepted(solution: Solution[Tensor]) -> Tensor:
    """The answer, if it converged or came as far as its precision lets it."""
    if solution.status is Status.STAGNATED and solution.residual <= STAGNATED:
        return solution.value
    try:
        return solution.require("the Gaussian process by conjugate gradients")
    except NumericalError as error:
        raise NumericalError(
            error.what,
            expected=f"a relative residual of at most {STAGNATED:g}",
            remedy='use solver="cholesky", another preconditioner=, more max_steps=, or float64',
        ) from error
