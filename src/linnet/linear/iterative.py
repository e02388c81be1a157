"""The linear model by conjugate gradients: products with J̃ᵀJ̃ or K̃ alone, no matrix is formed.

    parameter space   (J̃ᵀJ̃ + ρI) δ = J̃ᵀr̃        β = (r̃ − J̃δ)/ρ
    function space    (K̃ + ρI) β = r̃             δ = J̃ᵀβ

``linnet.fit`` solves in parameter space and answers everything else by further solves, or by the kernel where
that fits the memory. ``linnet.TangentGP`` chooses the space, and adds Krylov spaces for variances and the
evidence (``lanczos.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.products import (
    PROBED,
    FiniteDifferenceFisher,
    GaussNewtonOperator,
    SummedOperator,
    held_fixed,
    require_finite,
)
from linnet.curvatures.stream import DEFAULT_BLOCK, Batch, Batches
from linnet.distributed import current
from linnet.errors import NumericalError
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.operator import LinearOperator, SymmetricOperator
from linnet.linalg.structured import Dense
from linnet.linear.constraints import Constraints
from linnet.linear.dual import Measure, by_matrix, by_quadrature
from linnet.linear.formed_rows import FormedNormal
from linnet.linear.kernel_system import KernelSystem, kernel_fits
from linnet.linear.preconditioner import FEW, TRIAL, CurvatureInverse, precondition
from linnet.linear.problem import Memory, Problem, whitened, whitened_inputs
from linnet.linear.system import System
from linnet.memory import parse_bytes
from linnet.params import integer, number
from linnet.progress import track
from linnet.solvers.cg import block_cg, cg, relative_residual
from linnet.solvers.lanczos import krylov
from linnet.solvers.solution import Solution, Status
from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.capture import capture_bytes
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram, own_kernels
from linnet.tangent.jacobian import JacobianOperator, NormalOperator
from linnet.tangent.modes import in_exact_mode
from linnet.tree import node

# -- iteration -------------------------------------------------------------------------------------
# Conjugate gradients as linear models use them: their settings, a run, and when its end is an answer.

FINE = 1e-11  # relative residual where the ridge is so small that float64 is needed
STAGNATED = (
    1e-3  # residual up to which an answer at the limit of its precision is taken; the certificate says it
)


@node()
@dataclass(frozen=True)
class CGSettings:
    """Settings of conjugate gradients."""

    tolerance: float = 1e-5  # relative residual to reach
    max_steps: int = 2000  # largest number of steps
    rank: int = 0  # rank of a Nyström or pivoted Cholesky preconditioner; 0 for the usual one
    columns: int = 32  # right-hand sides solved at once in the per-example quantities, at the least
    preconditioner: str = "none"  # its name, or ``"given"`` for an operator

    def __post_init__(self) -> None:
        """Raise on values of the wrong kind; conjugate gradients check their ranges."""
        number("tolerance", self.tolerance, above=0, remedy="leave tolerance= out for 1e-5")
        for name, least in (("max_steps", 1), ("rank", 0)):
            integer(name, getattr(self, name), least)

    def finer(self) -> CGSettings:
        """The same for a ridge so small that only float64 answers it; a given operator is left behind."""
        name = "none" if self.preconditioner == "given" else self.preconditioner
        return replace(self, tolerance=min(self.tolerance, FINE), preconditioner=name)

    def run(
        self, matrix: LinearOperator, b: Tensor, preconditioner: LinearOperator | None, start: Tensor | None
    ) -> Solution[Tensor]:
        """Conjugate gradients; where they fail with a preconditioner, they go on without it."""
        # b (n,)
        found = solve_columns(matrix, b, preconditioner, start, self.tolerance, self.max_steps)
        if preconditioner is None or found.status not in (Status.MAX_STEPS, Status.DIVERGED):
            return found
        at = found.value if found.residual < 1 else start
        plain = solve_columns(matrix, b, None, at, self.tolerance, self.max_steps)
        return replace(plain, steps=found.steps + plain.steps)


@dataclass(frozen=True)
class Effort:
    """Steps and tolerance of block conjugate gradients that need not converge."""

    steps: int  # steps at the most
    tolerance: float | None = None  # relative residual that is enough; ``None`` for that of the settings


def solve_columns(*arguments: Any) -> Solution[Tensor]:
    """Conjugate gradients on tensors."""
    found: Solution[Any] = cg(*arguments)
    return found


def accepted(solution: Solution[Tensor], what: str) -> Tensor:
    """The answer, if it converged or came as far as its precision lets it."""
    if solution.status is Status.STAGNATED and solution.residual <= STAGNATED:
        return solution.value
    try:
        return solution.require(what)
    except NumericalError as error:
        raise NumericalError(
            error.what,
            expected=f"a relative residual of at most {STAGNATED:g}",
            remedy='use solver="dual" (solver="cholesky" for a Gaussian process), a larger ridge, another '
            "preconditioner=, or the network in float64",
        ) from error


# -- differences -----------------------------------------------------------------------------------
#
# Fisher products by finite differences for many vectors at once.
#
# ``FiniteDifferenceFisher`` takes two gradients at weights of its own for every vector. Here those of
# several vectors run together, vectorized over the weights; as many at a time as the memory lets, one
# after the other where a network cannot be vectorized.

CHUNK = 0.25  # of the budget that the weights and activations of one chunk of vectors may take
COPIES = 6  # of the weights of a vector: direction, two moved, two gradients, difference


class BatchedDifferences(SummedOperator):
    """The matrix of ``FiniteDifferenceFisher``, with the same steps ε, for several vectors at once."""

    description = FiniteDifferenceFisher.description

    def __init__(self, function: Functional, data: Batches, likelihood: Likelihood) -> None:
        super().__init__(function, data, likelihood)
        self.memory: str | int | None = None
        self._single = FiniteDifferenceFisher(function, data, likelihood)
        self._vectorized = True

    def product(self, batch: Batch, v: Tensor) -> Tensor:
        """The differences of a batch, some vectors at a time."""
        size = self._chunk(batch)
        if v.shape[1] == 1 or size < 2 or not self._vectorized or self.function.recurrent:
            return self._single.product(batch, v)
        try:
            return torch.cat([self._together(batch, part) for part in v.split(size, 1)], 1)
        except (RuntimeError, NotImplementedError):  # an operation without a rule for vmap
            self._vectorized = False
            return self._single.product(batch, v)

    def _chunk(self, batch: Batch) -> int:
        """The number of vectors that run together."""
        item = self.function.dtype.itemsize
        one = (
            COPIES * self.function.space.dim * item
            + 2 * capture_bytes(self.function, batch.x, 1) * batch.size
        )
        return int(CHUNK * parse_bytes(self.memory, self.function.device)) // max(1, one)

    @in_exact_mode
    def _together(self, batch: Batch, v: Tensor) -> Tensor:
        """F v over a batch for columns v (P, K)."""
        function, likelihood = self.function, self.likelihood
        theta = function.space.to_flat(function.theta)
        held = torch.stack([held_fixed(function, column) for column in v.unbind(1)])
        lengths = torch.linalg.vector_norm(held, dim=1, keepdim=True)
        directions = held / torch.where(lengths > 0, lengths, 1.0)  # (K, P); zeros stay zeros
        with torch.no_grad():
            f = function(function.theta, batch.x)
        require_finite(f, batch.index)
        y = None if batch.y is None else likelihood.check(f, batch.y)

        def divergence(step: Tensor) -> Tensor:
            g = function(function.space.to_params(theta + step), batch.x)
            # in float64, since the gradient is a small difference of probabilities
            return likelihood.kl(f.double(), g.double(), y).sum()

        epsilon = self._step_sizes(batch, f, theta, directions)[:, None]
        gradients = torch.func.vmap(torch.func.grad(divergence))
        change = gradients(epsilon * directions) - gradients(-epsilon * directions)
        scaled: Tensor = change * (lengths / (2 * epsilon))
        return scaled.T

    @torch.no_grad()
    def _step_sizes(self, batch: Batch, f: Tensor, theta: Tensor, directions: Tensor) -> Tensor:
        """ε of each direction, (K,), by the rule of ``_step_size``."""
        few = slice(0, min(PROBED, batch.size))
        x = take(batch.x, few)
        norm = float(torch.linalg.vector_norm(theta.double())) or 1.0
        first = self._single.step * norm
        run = torch.func.vmap(lambda step: self.function(self.function.space.to_params(theta + step), x))
        moved = (run(first * directions).double() - f[few].double()).flatten(1)
        motion = moved.square().mean(1).sqrt()
        size = float(f[few].double().square().mean().sqrt()) or 1.0
        longest = norm * torch.finfo(f.dtype).eps ** (1 / 3)  # for directions that hardly move the outputs
        found = first * self._single.step * size / motion.clamp_min(torch.finfo(torch.float64).tiny)
        return found.clamp_max(longest).to(directions)


# -- operators -------------------------------------------------------------------------------------
# K̃ and J̃ᵀJ̃ of a linear model as operators.


class KernelProducts(SymmetricOperator):
    """K̃ = J̃ J̃ᵀ over the data, (N·C) × (N·C): one VJP and one JVP a pass, K̃ is not formed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        size = problem.n * problem.c
        self.shape = (size, size)
        self.dtype, self.device, self.space = problem.function.dtype, problem.function.device, None
        self.passes = 0

    def mm(self, v: Tensor) -> Tensor:
        """J̃ (J̃ᵀ v): (N·C, K) to (N·C, K)."""
        self.passes += 1
        return self.problem.push(self.problem.pull(v))


def stored_kernel(problem: Problem, memory: Memory) -> Dense:
    """K̃ as a matrix in the network's own precision."""
    size = problem.n * problem.c
    kernel = gram(problem.function, problem.x, form="full", memory=memory).reshape(size, size)
    kernel = kernel.to(problem.function.dtype)
    return Dense(problem.weighed(problem.weighed(kernel).T), name="tangent kernel")


def fisher(
    problem: Problem, derivative: str = "exact", memory: Memory = None
) -> SummedOperator | NormalOperator:
    """The Fisher matrix J̃ᵀJ̃ = Σ_i J_iᵀ J_i / σ_i² of the observed outputs; a pass a product."""
    if problem.weights is None and derivative == "exact":
        return NormalOperator(problem.jacobian)
    function = problem.function
    zeros = torch.zeros(problem.n, problem.c, dtype=function.dtype, device=function.device)
    block = min(
        DEFAULT_BLOCK, -(-problem.n // current().world)
    )  # a batch for each process, where it is in time
    batches = Batches((whitened_inputs(problem), zeros), function.device, block)
    network = whitened(function)
    if derivative == "finite-difference":
        found = BatchedDifferences(network, batches, Gaussian(variance=1.0))
        found.memory = memory
        return found
    return GaussNewtonOperator(network, batches, Gaussian(variance=1.0))


# -- lanczos ---------------------------------------------------------------------------------------
#
# Variances and the evidence of a linear model from Krylov spaces, found once for all examples.
#
# Variances come from a cache of r directions, found once by block Lanczos,
#
#     λ Cov[f] = K(x,x) − J(x) M Mᵀ J(x)ᵀ,
#
#     function space    M = J̃ᵀ Q (H + ρI)^(−½)           with H = Qᵀ K̃ Q  (LOVE: Pleiss et al. 2018)
#     parameter space   M = U (s / (s + ρ))^(½)          with U s Uᵀ the Nyström form of J̃ᵀJ̃
#
# where K(x,x) is exact, so that what the cache leaves out makes the variance larger, never smaller.

RANK = 100  # directions of the variance cache, and rank of a preconditioner: LOVE's cache is of this order
FLOOR = 0.01  # of ρ: what the cache leaves out of the trace is not worth more directions
SMALL = 256  # equations up to which the whole matrix is decomposed, in less time than PROBES · NODES products
PROBES, NODES = 16, 40  # random vectors and Lanczos steps of the evidence, whose standard error is told
SHARE = 0.5  # of the budget that the cache may take
ROWS = 1 << 16  # of a panel rotated at once


@dataclass(frozen=True)
class Iteration:
    """Settings of conjugate gradients beside Krylov spaces."""

    # `"lanczos"` for the cache, `"exact"` for a solve for each example and output
    variance: str = "lanczos"
    derivative: str = "exact"  # ``"exact"`` or ``"finite-difference"`` products in parameter space
    preconditioner: str = "auto"  # its name
    rank: int = 0  # directions of the variance cache and rank of the preconditioner; 0 for the usual ones
    tolerance: float = 1e-6  # relative residual of conjugate gradients
    max_steps: int = 2000  # largest number of their steps
    seed: int = 0  # seed of everything random

    def __post_init__(self) -> None:
        """Raise on values of the wrong kind."""
        number("tolerance", self.tolerance, above=0, remedy="leave tolerance= out for 1e-6")
        for name, least in (("rank", 0), ("max_steps", 1), ("seed", 0)):
            integer(name, getattr(self, name), least)

    def settings(self, unknowns: int) -> CGSettings:
        """Those of conjugate gradients."""
        rank = min(self.rank or RANK, unknowns)
        return CGSettings(self.tolerance, self.max_steps, rank, preconditioner=self.preconditioner)


@node()
@dataclass(frozen=True)
class Panel:
    """The directions of the variance cache."""

    columns: Tensor  # B (P, r), with M Mᵀ = B diag(weights) Bᵀ
    values: Tensor  # ritz values h, or Nyström values s, (r,)
    primal: bool  # which of the two
    left_out: float  # tr J̃ᵀJ̃ less what is in the cache; no eigenvalue that it lacks is larger

    def weights(self, ridge: float) -> Tensor:
        """1/(h + ρ), or s/(s + ρ)."""
        return self.values / (self.values + ridge) if self.primal else 1 / (self.values + ridge)

    def spread(self, v: Tensor, ridge: float) -> Tensor:
        """V − M Mᵀ v for columns v (P, K)."""
        weights = self.weights(ridge).to(v)[:, None]
        return v - self.columns @ (weights * (self.columns.T @ v))

    def covariance(self, problem: Problem, x: Inputs, ridge: float, joint: bool, memory: Memory) -> Tensor:
        """K(x,x) less what the data explain."""
        c, own, halves = problem.c, [], []
        for _, rows in problem.form(x, memory):
            if not joint:
                each = rows.view(-1, c, rows.shape[1]).double()
                own.append(each @ each.mT)
            halves.append((rows @ self.columns).double() * self.weights(ridge).sqrt())
        b = torch.cat(halves)
        if joint:
            kernel = gram(problem.function, x, form="full", memory=memory).double()
            return kernel - (b @ b.T).view(kernel.shape)
        b = b.view(-1, c, b.shape[1])
        return torch.cat(own) - b @ b.mT


def make_panel(
    operator: LinearOperator, problem: Problem, ridge: float, how: Iteration, memory: Memory
) -> tuple[Panel, int]:
    """The variance cache: as many directions as requested, as fit, or as there is something to find."""
    m, p = problem.jacobian.shape
    primal = operator.space is not None  # J̃ᵀJ̃, which acts on parameters
    room = int(SHARE * parse_bytes(memory, problem.function.device))
    rank = max(2, min(how.rank or RANK, room // (p * problem.function.dtype.itemsize)))
    block = max(1, min(max(problem.c, 4), rank // 2))
    everything = rank >= m
    if everything:  # in parameter space one block more for the null space, one for the Nyström form
        rank = min(p, (-(-m // block) + 2) * block) if primal else m
    own = own_kernels(problem.function, problem.x, memory).diagonal(dim1=1, dim2=2).reshape(-1, 1)
    trace = float(problem.weighed(problem.weighed(own.double())).sum())
    rounding = 10 * torch.finfo(operator.dtype).eps * trace
    enough = math.inf if everything else trace - max(FLOOR * ridge, rounding)
    found = krylov(operator, block, rank, enough, how.seed)
    error = torch.finfo(operator.dtype).eps ** 0.5 if how.derivative == "finite-difference" else None
    values, rotation = found.nystrom(error) if primal else found.ritz()
    columns = _rotated(found.basis, rotation)
    if not primal:
        columns = problem.pull(columns)
    return Panel(columns, values, primal, max(0.0, trace - float(values.sum()))), found.products


def make_measure(
    operator: LinearOperator, problem: Problem, right: Tensor, how: Iteration, memory: Memory
) -> tuple[Measure, int]:
    """The spectrum, in the smaller space, by stochastic Lanczos quadrature where it is large."""
    # right (P,)
    size, primal = problem.n * problem.c, operator.space is not None
    if primal and how.derivative == "exact" and operator.shape[0] >= size:
        operator, primal = KernelProducts(problem), False
    start = right.double() if primal else problem.residual.reshape(-1)
    facts = problem.squared, problem.count, problem.log_noise
    if operator.shape[0] <= SMALL:
        return by_matrix(operator, start, primal, facts), 1
    each = operator.shape[0] * operator.dtype.itemsize * (PROBES + 1)
    room = int(SHARE * parse_bytes(memory, problem.function.device)) // each
    steps = max(2, min(NODES, room, operator.shape[0]))
    return by_quadrature(operator, start, primal, facts, PROBES, steps, how.seed), steps


def _rotated(basis: Tensor, rotation: Tensor) -> Tensor:
    """Q E in the place of Q, some rows at a time."""
    e = rotation.to(basis)
    for start in range(0, basis.shape[0], ROWS):
        basis[start : start + ROWS] = basis[start : start + ROWS] @ e
    return basis


VECTORS = 10  # of each right-hand side that block conjugate gradients hold
MOST_COLUMNS = 512  # solved at once: products of more columns are no faster


@dataclass
class Reused:
    """Parts of a solution that do not depend on ρ, or need not."""

    operator: LinearOperator | None = None  # K̃ or J̃ᵀJ̃
    # an approximation of (J̃ᵀJ̃ + ρI)⁻¹ or (K̃ + ρI)⁻¹, for whatever ρ or task it was made
    preconditioner: LinearOperator | None = None
    name: str = ""  # what it is called; empty for the name in the settings
    start: Tensor | None = None  # where to start, (P,) or (N·C,)
    panel: Panel | None = None  # the variance cache
    measure: Measure | None = None  # the spectrum of the evidence
    solution: Solution[Tensor] | None = None  # the solved equations of this very ρ, if they are known


class Iterative(System):
    """The solved equations of one of the two spaces, by products."""

    def __init__(
        self,
        problem: Problem,
        ridge: float,
        settings: CGSettings,
        memory: Memory = None,
        reused: Reused | None = None,
        space: str = "parameter",
        krylov: Iteration | None = None,
    ) -> None:
        self.problem, self.ridge, self.memory = problem, float(ridge), memory
        self.space, self.krylov = space, krylov
        self.reused = Reused() if reused is None else reused
        self._asked = settings
        name = self.reused.name
        self.settings = replace(settings, preconditioner=name) if name else settings
        self._kernel_form: KernelSystem | None = None
        known = self.reused.solution
        self.solution = self._first() if known is None else known
        self._value = accepted(self.solution, "the linear fit by conjugate gradients")
        self.steps = self.solution.steps
        self.work = {"steps": self.steps}

    # -- the equations ---------------------------------------------------------------------------

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        """The relative residual that solves may leave."""
        return self.settings.tolerance

    @property
    def jacobian(self) -> JacobianOperator:
        """J̃."""
        return self.problem.scaled_jacobian

    @property
    def operator(self) -> LinearOperator:
        """K̃ or J̃ᵀJ̃."""
        if self.reused.operator is None:
            if self.space == "parameter":
                derivative = "exact" if self.krylov is None else self.krylov.derivative
                self.reused.operator = self._within(fisher(self.problem, derivative, self.memory))
            elif self.space == "stored":
                self.reused.operator = stored_kernel(self.problem, self.memory)
            else:
                self.reused.operator = KernelProducts(self.problem)
        return self.reused.operator

    def _within(self, matrix: LinearOperator) -> LinearOperator:
        """A matrix (P, P) in the weights that equations on outputs leave."""
        at = self.problem.confined
        return matrix if at is None else at @ matrix @ at

    @property
    def matrix(self) -> LinearOperator:
        """J̃ᵀJ̃ + ρI or K̃ + ρI."""
        return self.operator.damped(self.ridge)

    @cached_property
    def right(self) -> Tensor:
        """The right-hand side: J̃ᵀr̃, or r̃ in function space, (n, 1)."""
        residual = self.problem.residual.to(self.function.dtype).reshape(-1, 1)
        return self.problem.pull(residual) if self.space == "parameter" else residual

    @cached_property
    def delta(self) -> Tensor:
        """The solution, or J̃ᵀ of it, (P,)."""
        found = self._value if self.space == "parameter" else self.problem.pull(self._value)
        return self.problem.displaced(found[:, 0])

    @cached_property
    def beta(self) -> Tensor:
        """β: (r̃ − J̃δ)/ρ, or the solution in function space, (N, C)."""
        if self.space != "parameter":
            return self._value.view(self.n, self.c)
        fitted = self.problem.push(self._value).view(self.n, self.c)
        return (self.problem.residual.to(fitted) - fitted) / self.ridge

    def certificate(self) -> float:
        """Relative residual of the solved equations, measured in float64."""
        return self.solution.residual

    # -- solves ----------------------------------------------------------------------------------

    def _first(self) -> Solution[Tensor]:
        """The solve for the mean; a preconditioner is made when it is needed, and chosen if it is to be."""
        settings, start, steps = self.settings, self.reused.start, 0
        if start is not None:
            start = start[:, None]
            residual = relative_residual(self.matrix, start, self.right)
            if residual <= settings.tolerance:
                self._choose("none")
                return Solution(start, Status.CONVERGED, 0, residual)
            start = start if residual < 1 else None  # zero is nearer
        if settings.preconditioner == "auto":
            limit = settings.max_steps if min(self.jacobian.shape) <= FEW else TRIAL
            limit = min(limit, settings.max_steps)
            found = solve_columns(self.matrix, self.right, None, start, settings.tolerance, limit)
            if found.status is not Status.MAX_STEPS or limit == settings.max_steps:
                self._choose("none")
                return found
            self._choose(self._affordable())
            start, steps = found.value, found.steps
        solution = self._run(self.right, start)
        return replace(solution, steps=solution.steps + steps)

    def _choose(self, name: str) -> None:
        """Settle on a preconditioner, if it was left open."""
        if self.settings.preconditioner == "auto":
            self.settings = replace(self.settings, preconditioner=name)

    def _affordable(self) -> str:
        """The preconditioner to take where none is requested."""
        if self.space == "stored":
            return "pivoted-cholesky"
        if self.space == "function" or self.krylov is None:  # whether it fits was asked before a fit began
            return "nystrom"
        needed = 4 * self.settings.rank * self.operator.shape[0] * self.operator.dtype.itemsize
        return "nystrom" if needed <= SHARE * parse_bytes(self.memory, self.function.device) else "ekfac"

    @property
    def preconditioner(self) -> LinearOperator | None:
        """The approximate inverse that conjugate gradients use, made when first requested."""
        if self.settings.preconditioner == "auto":
            self._choose(self._affordable())
        name, reused = self.settings.preconditioner, self.reused
        if reused.preconditioner is None and name not in ("none", "given"):
            seed = 0 if self.krylov is None else self.krylov.seed
            # the rank's products at once cost less by formed rows
            plain = self.space == "parameter" and not self._differences and self.problem.weights is None
            wide = self._within(self.formed) if plain else self.operator
            rank = self.settings.rank
            reused.preconditioner = precondition(name, wide, self.problem, self.ridge, rank, seed)
        return reused.preconditioner

    def _run(self, right: Tensor, start: Tensor | None = None) -> Solution[Tensor]:
        """The equations for columns (n, K), each by itself."""
        return self.settings.run(self.matrix, right, self.preconditioner, start)

    def solve(self, b: Tensor) -> Tensor:
        """(J̃ᵀJ̃ + ρI)⁻¹ b for columns (P, K)."""
        # In parameter space as many columns as there are outputs, or more, go together: block conjugate
        # gradients with the rows of J̃ formed. Where that ends early, each column goes on by itself.
        what = "a solve by conjugate gradients"
        if self.space != "parameter":
            return (b - self.problem.pull(accepted(self._run(self.problem.push(b)), what))) / self.ridge
        if b.shape[1] >= max(self.c, 2) and not self._differences:
            found = self._together(b, self.settings.tolerance, self.settings.max_steps)
            if found.converged:
                return found.value
        return accepted(self._run(b), what)

    @property
    def _differences(self) -> bool:
        """Whether products are finite differences."""
        return self.krylov is not None and self.krylov.derivative != "exact"

    def approach(self, b: Tensor, effort: Effort) -> Tensor:
        """The same after some block steps, converged or not, in parameter space."""
        # b (P, K)
        tolerance = self.settings.tolerance if effort.tolerance is None else effort.tolerance
        return self._together(b, tolerance, effort.steps).value

    def _together(self, b: Tensor, tolerance: float, steps: int) -> Solution[Tensor]:
        """Block conjugate gradients with formed rows."""
        matrix = self._within(self.formed).damped(self.ridge)
        found: Solution[Any] = block_cg(matrix, b, self.preconditioner, tolerance, steps)
        return found

    @cached_property
    def formed(self) -> FormedNormal:
        """J̃ᵀJ̃ for many columns at once."""
        return FormedNormal(self.jacobian, self.memory)

    def together(self, memory: Memory = None) -> int:
        """The number of right-hand sides solved at once."""
        vector = self.function.space.dim * self.function.dtype.itemsize
        budget = parse_bytes(self.memory if memory is None else memory, self.function.device)
        fitting = budget // (2 * VECTORS * vector)
        return max(self.settings.columns, self.c, min(MOST_COLUMNS, fitting))

    def solved_rows(
        self, x: Inputs, what: str, memory: Memory = None, effort: Effort | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """J(x) and (J̃ᵀJ̃ + ρI)⁻¹ J(x)ᵀ block by block."""
        size = max(1, self.together(memory) // self.c)
        for part in track(list(split(x, size)), what):
            rows = torch.cat([block for _, block in self.problem.form(part, memory or self.memory)])
            right = rows.T.contiguous()
            solved = self.solve(right) if effort is None else self.approach(right, effort)
            n = batch_size(part)
            yield rows.view(n, self.c, -1), solved.view(-1, n, self.c)

    def own_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """J̃ of the training examples; blocks that fit the budget are kept."""
        return ((place, self.problem.confine(rows)) for place, rows in self.formed.rows)

    # -- what Krylov spaces and the kernel answer ------------------------------------------------

    @property
    def kernel_form(self) -> KernelSystem | None:
        """The same problem by its kernel; ``None`` where Krylov spaces answer, or it exceeds the budget."""
        # It takes fewer operations than N·C solves and has M_ii without I − J̃_i (J̃ᵀJ̃ + ρI)⁻¹ J̃_iᵀ, in
        # which all digits cancel where the ridge is small.
        if self.krylov is not None:
            return None
        if self._kernel_form is None and kernel_fits(self.function, self.n * self.c, self.memory):
            self._kernel_form = KernelSystem.solved(self.problem, self.ridge, self.memory)
        return self._kernel_form

    @property
    def panel(self) -> Panel | None:
        """The variance cache, made when first needed; ``None`` where variances are solved for."""
        if self.krylov is None or self.krylov.variance != "lanczos":
            return None
        if self.reused.panel is None:
            made = make_panel(self.operator, self.problem, self.ridge, self.krylov, self.memory)
            self.reused.panel, self.work["products of the variance cache"] = made
        return self.reused.panel

    @property
    def measure(self) -> Measure:
        """The spectrum of K̃, by the kernel or by Krylov spaces."""
        if self.krylov is None:
            return super().measure
        if self.reused.measure is None:
            made = make_measure(self.operator, self.problem, self.right[:, 0], self.krylov, self.memory)
            self.reused.measure, self.work["products of the evidence"] = made
        return self.reused.measure

    def covariance(self, x: Inputs, joint: bool = False) -> Tensor:
        """The posterior covariance λ Cov[f(x)], (T, C, C) or (T, C, T, C)."""
        if (panel := self.panel) is None:
            return super().covariance(x, joint)
        return panel.covariance(self.problem, x, self.ridge, joint, self.memory)

    def spread(self, v: Tensor) -> Tensor:
        """The posterior covariance of the weights, λ Cov[δ] v for columns v (P, K)."""
        return super().spread(v) if (panel := self.panel) is None else panel.spread(v, self.ridge)

    # -- other ridges and other data -------------------------------------------------------------

    def at(self, ridge: float) -> Iterative:
        """The solution at another ridge, from the present one."""
        if (held := self.constraints) is not None and held.soft:
            return self.given(held.at_ridge(self.ridge, ridge), ridge)
        # Operator, cache and spectrum are reused, a curvature as preconditioner is damped anew, and one of
        # Nyström's or pivoted Cholesky is made again.
        made = self.reused.preconditioner
        kept = made.at(ridge) if isinstance(made, CurvatureInverse) else None
        reused = replace(self.reused, preconditioner=kept, name="", start=self._value[:, 0], solution=None)
        return self._again(self.problem, ridge, reused)

    def given(self, constraints: Constraints, ridge: float | None = None) -> Iterative:
        """The solution in the weights that equations on outputs leave, from the present one."""
        reused = Reused(preconditioner=self.reused.preconditioner, start=self._value[:, 0])
        problem = self.problem.given(constraints, False, self.memory)
        return self._again(problem, self.ridge if ridge is None else ridge, reused)

    def removed(self, index: Tensor) -> Iterative:
        """The solution without some examples, in parameter space from the present one."""
        return self._of(self.problem.without(index), Reused())

    def extended(self, more: Problem) -> Iterative:
        """The solution with more examples, in parameter space from the present one."""
        return self._of(self.problem.joined(more), Reused())

    def with_residual(self, residual: Tensor) -> Iterative:
        """For other targets, from the present solution, with its operator, cache and preconditioner."""
        problem = replace(self.problem, residual=residual)
        reused = Reused(self.reused.operator, panel=self.reused.panel)
        return self._of(problem, reused, alike=True)

    def _of(self, problem: Problem, reused: Reused, alike: bool = False) -> Iterative:
        """The solution of other data of the same network; ``alike`` if its equations have the same matrix."""
        if alike or self.space == "parameter":
            reused.start, reused.preconditioner = self._value[:, 0], self.reused.preconditioner
        return self._again(problem, self.ridge, reused)

    def _again(self, problem: Problem, ridge: float, reused: Reused) -> Iterative:
        """Other equations in the same way; whether to go without a preconditioner is left open again."""
        settings = self._asked if self.settings.preconditioner == "none" else self.settings
        return Iterative(problem, ridge, settings, self.memory, reused, self.space, self.krylov)
