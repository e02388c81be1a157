"""Newton's method for a linear model with any canonical likelihood, and what its optimum answers.

    δ = argmin Σᵢ ℓ(f₀(xᵢ) + Jᵢδ, yᵢ) + ½ ρ‖δ‖²,        H = JᵀΛJ + ρI at the optimum

What a step changes in the outputs is one product, so that a line search needs no pass of the network. With
Λᵢ = LᵢLᵢᵀ and A(x, x') = J(x) H⁻¹ J(x')ᵀ, the covariance of Laplace's posterior, one Newton step from the
optimum says of a fit without example i

    f₋ᵢ(x) − f(x) ≈ A(x, xᵢ) eᵢ,  eᵢ = (I − ΛᵢAᵢᵢ)⁻¹ gᵢ = gᵢ + Lᵢ (I − LᵢᵀAᵢᵢLᵢ)⁻¹ LᵢᵀAᵢᵢ gᵢ

``NewtonSystem`` states this once, and answers by the names that ``System`` has for squares.

``KernelNewton`` works in samples, on K = JJᵀ in float64. With δ = Jᵀβ the outputs are f = f₀ + Kβ and the
gradient in δ is Jᵀr, r = g + ρβ, which vanishes where β = −g/ρ. Newton's direction solves (ΛK + ρI) d = −r;
with Λ = LLᵀ (block diagonal) and the symmetric B = ρI + LᵀKL, all of whose eigenvalues are at least ρ,

    d = −(r − L B⁻¹ Lᵀ K r)/ρ                      (Rasmussen and Williams 2006, algorithm 3.3)
    H⁻¹ = (I − Jᵀ L B⁻¹ Lᵀ J)/ρ,                   I − LᵢᵀAᵢᵢLᵢ = ρ [B⁻¹]ᵢᵢ

``WeightNewton`` works in weights: each H d = −(Jᵀg + ρδ) by conjugate gradients, solved only as far as the
gradient has fallen (Dembo, Eisenstat and Steihaug 1982).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from linnet.curvatures.expectation import Expectation
from linnet.errors import NumericalError
from linnet.linalg.factorize import cholesky, require_finite
from linnet.linalg.operator import LinearOperator, SymmetricOperator
from linnet.linear.constraints import Constraints
from linnet.linear.iterative import STAGNATED, CGSettings, accepted, solve_columns
from linnet.linear.kernel_system import SHARE, kernel_fits
from linnet.linear.label_problem import LabelProblem, WeighedLosses
from linnet.linear.positions import PositionLosses
from linnet.linear.preconditioner import FEW, RANK, TRIAL, CurvatureInverse, curvature_of
from linnet.linear.problem import Memory
from linnet.linear.system import Solved
from linnet.memory import parse_bytes
from linnet.progress import track
from linnet.solvers.nystrom import nystrom_preconditioner
from linnet.tangent.batch import Inputs, all_but, batch_size, split
from linnet.tree import hash_tensors, tensors_in

STEPS = 100  # of Newton's method: from any start a few tens suffice in float64
# gradient up to which an answer at the limit of its precision is taken; the certificate says it
STALLED = 1e-6
SHRINK = 0.5  # of the step, when the objective does not fall enough
ENOUGH = 1e-4  # share of the slope by which it must fall (Armijo)
HALVINGS = 60  # until a step is below the rounding of float64
TOLERANCE = 1e-13  # gradient, relative to that at δ = 0, at which Newton's method in float64 has arrived
ARRIVED = 1e-16  # dᵀHd relative to the objective: the step d leaves the square of that
COLUMNS = 1024  # columns of the kernel solved for at once
FORCING = 0.1  # the first systems are solved to a tenth, later ones to the root of the gradient left


@dataclass(frozen=True, eq=False)
class Direction:
    """A direction d of descent from the present point."""

    step: Tensor  # d, in the coordinates of the solver
    change: Tensor  # what it changes in the outputs, of their shape
    slope: float  # the derivative of the objective along it
    squares: tuple[float, float, float]  # ‖δ‖², δᵀd and ‖d‖²
    rounding: float  # what two values of the objective may be off


class NewtonSystem(Solved):
    """A point that is moved to the optimum, and what follows from the Hessian there."""

    problem: LabelProblem  # the data
    outputs: Tensor  # f at the point, (N, ...), float64
    steps: int  # newton steps taken
    objective: list[float]  # its value after each step; it never rises, but for rounding
    first_norm: float  # ‖∇‖ at δ = 0
    stalled: bool  # whether the steps ended before the gradient was small

    # -- the solution ----------------------------------------------------------------------------

    @property
    def base(self) -> Tensor:
        """f₀, (N, ...)."""
        return self.problem.base

    @property
    @abstractmethod
    def gradient_norm(self) -> float:
        """‖∇‖, the norm of the gradient in δ."""

    @property
    def distance(self) -> float:
        """A bound on the distance of δ to the optimum, ‖∇‖/ρ: the objective is ρ-strongly convex."""
        return self.gradient_norm / self.ridge

    def certificate(self) -> float:
        """‖∇‖ at the solution over ‖∇‖ at δ = 0."""
        return self.gradient_norm / self.first_norm if self.first_norm else 0.0

    @property
    def gradient(self) -> Tensor:
        """Gradient g of the losses in the outputs, (N, C)."""
        return self.problem.gradient(self.outputs)

    def require(self, enough: float) -> None:
        """Raise where the steps ended before the gradient was small."""
        if self.stalled and (reached := self.certificate()) > enough:
            raise NumericalError(
                f"Newton's method stopped after {self.described()} with a gradient of {reached:.1e} of the "
                "one at the start",
                expected=f"at most {enough:g}",
                remedy=f"take a ridge (prior_precision=) above {self.ridge:g}, raise max_steps= or "
                'tolerance= of the solver, take solver="dual" for one class each, or the network in float64',
            )

    def described(self) -> str:
        """The steps that the solution took, in words."""
        return f"{self.steps} Newton step" + "s" * (self.steps != 1)

    # -- Newton's method -------------------------------------------------------------------------

    @abstractmethod
    def _spent(self) -> bool:
        """Whether no further step may be taken."""

    @abstractmethod
    def _towards(self, reached: float) -> Direction:
        """Newton's direction, as precise as the gradient that is left deserves."""

    @abstractmethod
    def _move(self, t: float, direction: Direction) -> None:
        """Go t of the direction."""

    def _total_loss(self, outputs: Tensor) -> float:
        """Σ ℓ_i at outputs."""
        return float(self.problem.losses(outputs).sum())

    def _descend(self, tolerance: float, arrived: float = 0.0) -> bool:
        """Steps until the gradient is small (True), or they are spent or the objective falls no more."""
        while (reached := self.certificate()) > tolerance:
            if self._spent():
                return False
            direction = self._towards(reached)
            found = self._search(direction)
            if found is None:
                return False
            t, value = found
            self._move(t, direction)
            self.objective.append(value)
            self.steps += 1
            if -direction.slope <= arrived * abs(value):
                return True
        return True

    def _search(self, direction: Direction) -> tuple[float, float] | None:
        """The first of 1, ½, ¼, … of a direction that lowers the objective enough, up to its rounding."""
        if not direction.slope < 0:
            return None
        own, mixed, square = direction.squares
        before, t = self._total_loss(self.outputs) + 0.5 * self.ridge * own, 1.0
        for _ in range(HALVINGS):
            penalty = 0.5 * self.ridge * (own + 2 * t * mixed + t * t * square)
            value = self._total_loss(self.outputs + t * direction.change) + penalty
            least = before + ENOUGH * t * direction.slope + direction.rounding
            if math.isfinite(value) and value <= least:
                return t, value
            t *= SHRINK
        return None

    # -- the Hessian at the optimum --------------------------------------------------------------

    @property
    @abstractmethod
    def kernel_form(self) -> KernelNewton | None:
        """The same solution by its kernel; ``None`` where that does not fit the memory."""

    @property
    def _elsewhere(self) -> KernelNewton | None:
        """Another form of the solution, which answers in fewer operations."""
        form = self.kernel_form
        return None if form is self else form

    @property
    def roots(self) -> Tensor:
        """L at the optimum, (N, C, D)."""
        return self.problem.roots(self.outputs)

    @property
    @abstractmethod
    def factorized(self) -> FactorNewton | None:
        """The same solution by a factorization, which may be itself; ``None`` where none fits."""

    @property
    @abstractmethod
    def _own(self) -> Tensor:
        """A_ii, (N, C, C)."""

    def _unexplained(self) -> Tensor:
        """I − L_iᵀ A_ii L_i, (N, D, D)."""
        roots = self.roots
        seen = roots.mT @ self._own @ roots
        rest: Tensor = torch.eye(seen.shape[2]).to(seen) - seen
        return rest

    def loo_residuals(self) -> Tensor:
        """−e, (N, ...): what each example pulls its own output by, beside all others."""
        gradient, roots = self.gradient, self.roots
        seen = roots.mT @ (self._own @ gradient[:, :, None])  # L_iᵀ A_ii g_i
        solved: Tensor = torch.linalg.solve(self._unexplained(), seen)
        return -(gradient + (roots @ solved)[:, :, 0])

    def loo_outputs(self) -> Tensor:
        """f_i + A_ii e_i, one Newton step from the optimum, (N, ...)."""
        return self.outputs - (self._own @ self.loo_residuals()[:, :, None])[:, :, 0]

    def loo_variances(self) -> Tensor:
        """A_ii + A_ii L_i (I − L_iᵀ A_ii L_i)⁻¹ L_iᵀ A_ii, of outputs without their example, (N, C, C)."""
        seen = self._own @ self.roots
        solved: Tensor = torch.linalg.solve(self._unexplained(), seen.mT)
        return self._own + seen @ solved

    def degrees_of_freedom(self) -> float:
        """Effective parameters, tr ΛA."""
        rest = self._unexplained()
        return rest.shape[0] * rest.shape[1] - float(rest.diagonal(dim1=1, dim2=2).sum())

    def paired(self, x: Inputs, at: Tensor) -> Tensor:
        """By the effects of a unit of each output."""
        columns = []
        for unit in torch.eye(self.c, dtype=torch.float64, device=at.device):
            begin, parts = 0, []
            for part in self.effects(x, unit.expand(self.n, self.c).contiguous()):
                place = torch.arange(part.shape[1], device=at.device)
                parts.append(part[at[begin + place], place])
                begin += len(place)
            columns.append(torch.cat(parts).double())
        return torch.stack(columns, 2)

    def own_changes(self) -> Tensor:
        """f_i less the output without the example, (N, C)."""
        return self.outputs - self.loo_outputs()

    # -- changes ---------------------------------------------------------------------------------

    @abstractmethod
    def extended(self, more: LabelProblem) -> NewtonSystem:
        """The solution with more examples, from the present one."""

    @abstractmethod
    def relabelled(self, y: Tensor) -> NewtonSystem:
        """The solution with other labels, from the present one."""


class FactorNewton(NewtonSystem):
    """A solution by factors of K or H, which has every ridge."""

    max_steps: int  # of Newton's method, STEPS at the most

    @property
    @abstractmethod
    def factor(self) -> Tensor:
        """The Cholesky factor of B or H at the optimum."""

    @property
    def factorized(self) -> Self:
        """Itself."""
        return self

    @property
    @abstractmethod
    def gram(self) -> Tensor:
        """K or JᵀJ, which have the same eigenvalues but for zeros."""

    @abstractmethod
    def at(self, ridge: float) -> Self:
        """The solution at another ridge, from the present one."""

    def _spent(self) -> bool:
        """Whether no further step may be taken."""
        return self.steps >= min(self.max_steps, STEPS)

    def log_evidence(self) -> float:
        """−Σℓ − ½ρ‖δ‖² − ½ log det of B/ρ or H/ρ, which are equal: Laplace's approximation."""
        logdet = 2 * float(self.factor.diagonal().log().sum()) - len(self.factor) * math.log(self.ridge)
        return -self.objective[-1] - 0.5 * logdet

    @abstractmethod
    def next_change(self) -> Tensor:
        """The change of the outputs by one more Newton step, (N, C): their distance to the optimum."""


class KernelNewton(FactorNewton):
    """The optimal β of a kernel."""

    in_samples = True

    # kernel (N·C, N·C) float64, start (N, C)

    def __init__(
        self,
        problem: LabelProblem,
        kernel: Tensor,
        ridge: float,
        start: Tensor | None = None,
        max_steps: int = STEPS,
        memory: Memory = None,
    ) -> None:
        self.problem, self.kernel, self.ridge, self.memory = problem, kernel, float(ridge), memory
        self.max_steps = max_steps
        self._kept: dict[str, Tensor] = {}
        require_finite(kernel, "kernel")
        require_finite(self.base, "outputs f₀")
        first = problem.gradient(self.base)
        self.first_norm = _norm(self._product(first), first)
        self._beta = torch.zeros_like(self.base) if start is None else start.to(kernel).clone()
        if start is not None and self._value(self._beta) > self._value(torch.zeros_like(self.base)):
            self._beta = torch.zeros_like(self.base)
        self.outputs = self.base + self._product(self._beta)
        self.steps, self.objective = 0, [self._value(self._beta)]
        self.stalled = not self._descend(TOLERANCE, ARRIVED)
        self.require(STALLED)

    # -- Newton's method -------------------------------------------------------------------------

    def _product(self, v: Tensor) -> Tensor:
        """K v for v (N, C)."""
        return (self.kernel @ v.reshape(-1)).view(self.n, self.c)

    def _value(self, beta: Tensor) -> float:
        """Σ ℓ_i + ½ ρ βᵀKβ."""
        change = self._product(beta)
        return self._total_loss(self.base + change) + 0.5 * self.ridge * float((beta * change).sum())

    @property
    def beta(self) -> Tensor:
        """β, (N, C)."""
        return self._beta

    @cached_property
    def delta(self) -> Tensor:
        """Jᵀβ, and Aᵀν of equations on outputs, (P,)."""
        return self.problem.combined(self.beta)

    @property
    def gradient_norm(self) -> float:
        """‖Jᵀr‖."""
        r = self.gradient + self.ridge * self.beta
        return _norm(self._product(r), r)

    def _towards(self, reached: float) -> Direction:
        """Newton's direction by a Cholesky factor; its squares are those in the norm of the kernel."""
        r = self.gradient + self.ridge * self.beta
        roots = self.roots
        seen = (roots.mT @ self._product(r)[:, :, None]).reshape(-1, 1)
        solved = torch.cholesky_solve(seen, self._factor(roots)).view(self.n, -1, 1)
        d = -(r - (roots @ solved)[:, :, 0]) / self.ridge
        product, change = self.outputs - self.base, self._product(d)
        own, mixed, square = (
            float((u * v).sum()) for u, v in ((self.beta, product), (d, product), (d, change))
        )
        size = self._total_loss(self.outputs) + 0.5 * self.ridge * own
        size = abs(size) + self.ridge * float((self.beta * product).abs().sum())
        rounding = 16 * torch.finfo(d.dtype).eps * size
        return Direction(d, change, float((r * change).sum()), (own, mixed, square), rounding)

    def _move(self, t: float, direction: Direction) -> None:
        """Go t of the direction; the outputs are made anew, so that no rounding piles up."""
        self._beta = self._beta + t * direction.step
        self.outputs = self.base + self._product(self._beta)

    def _factor(self, roots: Tensor) -> Tensor:
        """The Cholesky factor of B = ρI + LᵀKL, (N·D, N·D)."""
        blocks = self.kernel.view(-1, self.n, self.c)
        half = torch.einsum("anc,ncd->and", blocks, roots).reshape(self.n, self.c, -1)  # K L
        b = torch.einsum("ncd,nck->ndk", roots, half).reshape(-1, half.shape[2])
        b.diagonal().add_(self.ridge)
        try:
            return cholesky(b, "ridge + curvature of the likelihood")
        except NumericalError as error:
            raise NumericalError(
                error.what,
                error.expected,
                f"take a ridge larger than {self.ridge:g}, or the network in float64",
            ) from error

    # -- the Hessian at the optimum --------------------------------------------------------------

    @property
    def kernel_form(self) -> KernelNewton:
        """Itself."""
        return self

    @property
    def gram(self) -> Tensor:
        """K."""
        return self.kernel

    @cached_property
    def factor(self) -> Tensor:
        """The Cholesky factor of B at the optimum."""
        return self._factor(self.roots)

    def _filtered(self, u: Tensor) -> Tensor:
        """L B⁻¹ Lᵀ u for columns u, (N·C, K)."""
        roots = self.roots
        seen = torch.einsum("ncd,nck->ndk", roots, u.to(roots).view(self.n, self.c, -1))
        solved = torch.cholesky_solve(seen.reshape(len(self.factor), -1), self.factor)
        return torch.einsum("ncd,ndk->nck", roots, solved.view(self.n, -1, u.shape[1])).reshape(u.shape)

    def solve(self, b: Tensor) -> Tensor:
        """(b − Jᵀ L B⁻¹ Lᵀ J b)/ρ."""
        return (b - self.problem.pulled(self._filtered(self.problem.moved(b)).to(b))) / self.ridge

    def weighted(self, columns: Tensor) -> Tensor:
        """(I − L B⁻¹ Lᵀ K) v for columns v: with them J(x)H⁻¹Jᵀv = K(x, X) of it, over ρ."""
        # columns (N·C, K)
        return columns - self._filtered(self.kernel @ columns)

    def next_change(self) -> Tensor:
        """The change of the outputs by one more Newton step, (N, C): their distance to the optimum."""
        r = (self.gradient + self.ridge * self.beta).reshape(-1, 1)
        return self._product(self.weighted(r)) / self.ridge

    def _half(self, kernel: Tensor) -> Tensor:
        """The root of K(x,X) L B⁻¹ Lᵀ K(X,x), what the data take from the prior covariance, (N·D, T·C)."""
        # kernel (T, C, N, C)
        rows = torch.einsum("tcne,ned->tcnd", kernel.to(self.factor), self.roots)
        half: Tensor = torch.linalg.solve_triangular(
            self.factor, rows.flatten(2).flatten(0, 1).T, upper=False
        )
        return half

    def _explained(self, kernel: Tensor) -> Tensor:
        """That part of each example's covariance, (T, C, C)."""
        # kernel (T, C, N, C)
        half = self._half(kernel).view(-1, len(kernel), self.c)
        return torch.einsum("ktc,kte->tce", half, half)

    def covariance(self, x: Inputs, joint: bool = False) -> Tensor:
        """K(x,x) less what the data explain."""
        if joint:
            return self.between(x, x)
        explained = torch.cat([self._explained(cross) for cross in self._kernel_to_train(x)])
        return self.problem.basis.own(x, self.memory).to(explained) - explained

    def between(self, x1: Inputs, x2: Inputs) -> Tensor:
        """K(x1,x2) less what the data explain."""
        first, second = (
            torch.cat([self._half(cross) for cross in self._kernel_to_train(x)], 1) for x in (x1, x2)
        )
        basis = self.problem.basis
        of = basis.examples(x2)
        kernel = basis.kernel(of, self.memory) if x1 is x2 else basis.cross(x1, of, self.memory)
        return kernel.to(first) - (first.T @ second).view(kernel.shape)

    def effects(self, x: Inputs, e: Tensor) -> Iterator[Tensor]:
        """K(x,X) of the change of β that each e_i makes, (I − LB⁻¹LᵀK) eᵢ/ρ."""
        # e (N, C)
        columns = torch.zeros(self.n, self.c, self.n, dtype=e.dtype, device=e.device)
        columns.diagonal(dim1=0, dim2=2).copy_(e.T)
        changes = self.weighted(columns.view(self.n * self.c, self.n)) / self.ridge
        for cross in self._kernel_to_train(x):
            moved = cross.flatten(2).flatten(0, 1).to(changes) @ changes
            yield moved.view(len(cross), self.c, self.n).permute(2, 0, 1)

    def _kernel_to_train(self, x: Inputs) -> Iterator[Tensor]:
        """K(x, X), (T, C, N, C), in as many parts as the memory budget asks for; one part is kept."""
        if x is self.x:
            yield self.kernel.view(self.n, self.c, self.n, self.c)
            return
        key = hash_tensors(tensors_in(x))
        if (known := self._kept.get(key)) is not None:
            yield known
            return
        row = self.n * self.c**2 * (self.function.dtype.itemsize + 3 * 8)
        budget = parse_bytes(self.memory, self.function.device)
        for part in split(x, max(1, int(SHARE * budget) // row)):
            cross = self.problem.basis.cross(part, self.problem.examples, self.memory)
            self._kept = {key: cross} if batch_size(part) == batch_size(x) else {}
            yield cross

    @cached_property
    def _own(self) -> Tensor:
        """A_ii, (N, C, C)."""
        blocks = self.kernel.view(self.n, self.c, self.n, self.c)
        parts = [self._explained(part) for part in blocks.split(max(1, COLUMNS // self.c))]
        return (blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1) - torch.cat(parts)) / self.ridge

    @cached_property
    def _blocks(self) -> Tensor:
        """[B⁻¹]_ii, (N, D, D)."""
        size = len(self.factor) // self.n
        inverse = torch.cholesky_inverse(self.factor).view(self.n, size, self.n, size)
        return inverse.diagonal(dim1=0, dim2=2).permute(2, 0, 1).clone()  # so that the inverse can go

    def _unexplained(self) -> Tensor:
        """I − L_iᵀ A_ii L_i = ρ [B⁻¹]_ii, (N, D, D)."""
        return self.ridge * self._blocks

    # -- changes ---------------------------------------------------------------------------------

    def at(self, ridge: float) -> KernelNewton:
        """The solution at another ridge, from the present one."""
        if (held := self.constraints) is not None and held.soft:
            return self.given(held.at_ridge(self.ridge, ridge), ridge)
        return KernelNewton(self.problem, self.kernel, ridge, self.beta, self.max_steps, self.memory)

    def removed(self, index: Tensor) -> KernelNewton:
        """The solution without some examples, from the present one."""
        # index (k,)
        keep = all_but(self.n, index.to(self.kernel.device))
        rows = keep.repeat_interleave(self.c)
        return self._changed(self.problem.without(index), self.kernel[rows][:, rows], self.beta[keep])

    def extended(self, more: LabelProblem) -> KernelNewton:
        """The solution with more examples, from the present one."""
        m, basis = more.base.numel(), self.problem.basis
        cross = basis.cross(self.x, more.examples, self.memory)
        corner = basis.kernel(more.examples, self.memory)
        k12, k22 = cross.reshape(-1, m).to(self.kernel), corner.reshape(m, m).to(self.kernel)
        kernel = torch.cat([torch.cat([self.kernel, k12], 1), torch.cat([k12.T, k22], 1)])
        start = torch.cat([self.beta, self.beta.new_zeros(more.base.shape)])
        return self._changed(self.problem.joined(more), kernel, start)

    def relabelled(self, y: Tensor) -> KernelNewton:
        """The solution with other labels, from the present one."""
        return self._changed(replace(self.problem, y=y), self.kernel, self.beta)

    def given(self, constraints: Constraints, ridge: float | None = None) -> KernelNewton:
        """The solution by the kernel less what equations explain, and with what others before explained."""
        before, problem = self.problem, self.problem.given(constraints, True, self.memory)
        kernel = self.kernel - problem.explained() @ problem.explained().T
        if before.held is not None:
            kernel = kernel + before.explained() @ before.explained().T
        ridge = self.ridge if ridge is None else ridge
        return KernelNewton(problem, kernel, ridge, self.beta, self.max_steps, self.memory)

    def _changed(self, problem: LabelProblem, kernel: Tensor, start: Tensor) -> KernelNewton:
        """The solution on other examples."""
        return KernelNewton(problem, kernel, self.ridge, start, self.max_steps, self.memory)


def _norm(product: Tensor, v: Tensor) -> float:
    """‖Jᵀv‖ = √(vᵀKv)."""
    return math.sqrt(max(float((v * product).sum()), 0.0))


class InWeights(NewtonSystem):
    """A point in the weights, (P,)."""

    _delta: Tensor

    @property
    def delta(self) -> Tensor:
        """δ, (P,), in the network's type."""
        return self.problem.displaced(self.eta).to(self.function.dtype)

    @property
    def eta(self) -> Tensor:
        """δ, or what it is made of where outputs obey equations, (P,)."""
        return self._delta

    @cached_property
    def beta(self) -> Tensor:
        """−g/ρ, (N, C)."""
        return -self.gradient / self.ridge

    def _along(self, d: Tensor, change: Tensor, slope: Tensor) -> Direction:
        """A direction and what it changes in the outputs, by the gradient."""
        wide, along = self._delta.double(), d.double()
        squares = float(wide.square().sum()), float(wide @ along), float(along.square().sum())
        rounding = 16 * torch.finfo(d.dtype).eps * abs(self.objective[-1])
        return Direction(d, change, float(slope.double() @ along), squares, rounding)

    def _move(self, t: float, direction: Direction) -> None:
        """Go t of the direction."""
        self._delta = self._delta + t * direction.step
        self.outputs = self.outputs + t * direction.change
        self._left()

    @abstractmethod
    def _left(self) -> None:
        """Drop what is known of the point before."""


class WeightNewton(InWeights):
    """The optimal δ by products with J alone, and solves with the Hessian there."""

    # start (P,)

    def __init__(
        self,
        problem: LabelProblem,
        ridge: float,
        settings: CGSettings,
        start: Tensor | None = None,
        preconditioner: LinearOperator | None = None,
        limit: int = STEPS,
        memory: Memory = None,
    ) -> None:
        self.problem, self.ridge, self.settings, self.limit = problem, float(ridge), settings, limit
        self.preconditioner, self._given, self.memory = preconditioner, preconditioner, memory
        function = problem.function
        self._delta = torch.zeros(function.space.dim, dtype=function.dtype, device=function.device)
        self.outputs = problem.base.clone()
        if start is not None and bool(start.any()):
            self._delta, self.outputs = start.clone(), problem.base + problem.push(start)
        self.steps = self.products = 0
        self.tolerance = settings.tolerance  # the gradient, relative to that at δ = 0
        penalty = 0.5 * self.ridge * float(self._delta.double().square().sum())
        self.objective = [self._total_loss(self.outputs) + penalty]
        self.first_norm = float(problem.pull(problem.gradient(problem.base)).double().norm())
        self._slope: Tensor | None = None
        self._kernel_form: KernelNewton | None = None
        self.stalled = self.first_norm > 0 and not self._descend(settings.tolerance)
        self.require(STALLED if function.dtype == torch.float64 else STAGNATED)

    @property
    def gradient_norm(self) -> float:
        """‖Jᵀg + ρδ‖."""
        return float(self._gradient_in_weights().double().norm())

    def described(self) -> str:
        """The steps that the solution took, in words."""
        return f"{super().described()} with {self.products} of conjugate gradients"

    # -- Newton's method -------------------------------------------------------------------------

    @property
    def hessian(self) -> LinearOperator:
        """JᵀΛJ + ρI at the present outputs."""
        return self.problem.hessian(self.outputs).damped(self.ridge)

    def _gradient_in_weights(self) -> Tensor:
        """Jᵀg + ρδ at the present point, (P,), kept."""
        if self._slope is None:
            self._slope = self.problem.pull(self.gradient) + self.ridge * self._delta
        return self._slope

    def _spent(self) -> bool:
        """Whether no further step may be taken."""
        return self.steps >= self.limit or self.products >= self.settings.max_steps

    def _towards(self, reached: float) -> Direction:
        """Newton's direction by conjugate gradients."""
        gradient = self._gradient_in_weights()
        d = self._direction(gradient, reached)
        return self._along(d, self.problem.push(d), gradient)

    def _left(self) -> None:
        """The gradient."""
        self._slope = None

    def _direction(self, gradient: Tensor, reached: float) -> Tensor:
        """The direction, as precise as the gradient deserves; the preconditioner is made at need."""
        settings, hessian = self.settings, self.hessian
        tolerance = max(min(FORCING, reached**0.5), 0.3 * settings.tolerance / reached)
        left = max(1, settings.max_steps - self.products)
        open_choice = settings.preconditioner == "auto" and self.preconditioner is None
        if settings.preconditioner not in ("none", "auto", "given") and self.preconditioner is None:
            self._make(settings.preconditioner)
        trial = min(left, TRIAL) if open_choice and min(self.problem.jacobian.shape) > FEW else left
        found = solve_columns(hessian, -gradient, self.preconditioner, None, tolerance, trial)
        self.products += found.steps
        if found.residual > tolerance and trial < left:
            self._make("nystrom")
            rest = max(1, left - trial)
            found = solve_columns(hessian, -gradient, self.preconditioner, found.value, tolerance, rest)
            self.products += found.steps
        elif found.steps > RANK and self._given is None and settings.preconditioner in ("auto", "nystrom"):
            self.preconditioner = None  # Λ has moved away from where it was made
        return found.value

    def _make(self, name: str) -> None:
        """The preconditioner of a name, at the present Λ (Nyström) or at that of the network (curvatures)."""
        problem = self.problem
        function = problem.function
        if name == "nystrom":
            rank = self.settings.rank or min(RANK, *problem.jacobian.shape)
            matrix = problem.hessian(self.outputs)
            self.preconditioner = nystrom_preconditioner(matrix, self.ridge, rank, 0)
            return
        y, losses = problem.y, problem.likelihood
        if isinstance(losses, PositionLosses):  # with labels that are drawn: one backward pass a sequence
            function, expectation = losses.function, Expectation(losses.of_outputs, "mc")
        else:
            if isinstance(losses, WeighedLosses):  # with weights of one
                y, losses = y[:, :-1], losses.likelihood
            expectation = Expectation(losses)
        if y.shape == problem.base.shape:
            y = y.to(function.dtype).view(-1, *function.output_shape(problem.x))
        curvature = curvature_of(name, function, (problem.x, y), expectation)
        self.preconditioner = CurvatureInverse(curvature, self.ridge, function.dtype)

    # -- the Hessian at the optimum --------------------------------------------------------------

    @property
    def kernel_form(self) -> KernelNewton | None:
        """The same problem by its kernel, from the present solution; ``None`` beyond the budget."""
        if isinstance(self.problem.likelihood, PositionLosses):  # a row for every output of every position
            return None
        # It takes fewer operations than N·C solves, and I − ΛA keeps its digits where the ridge is small.
        size = self.base.numel()
        if self._kernel_form is None and kernel_fits(self.function, size, self.memory):
            kernel = self.problem.basis.kernel(self.problem.examples, self.memory).reshape(size, size)
            start, memory = self.beta, self.memory
            self._kernel_form = KernelNewton(self.problem, kernel.double(), self.ridge, start, memory=memory)
        return self._kernel_form

    @property
    def factorized(self) -> KernelNewton | None:
        """By the kernel."""
        return self.kernel_form

    @cached_property
    def _own(self) -> Tensor:
        """By the kernel, or by N·C solves."""
        form = self.kernel_form
        return self.covariance(self.x) / self.ridge if form is None else form._own

    def _unexplained(self) -> Tensor:
        """By the kernel where it fits, which keeps the digits of small ones."""
        form = self.kernel_form
        return super()._unexplained() if form is None else form._unexplained()

    def solve(self, b: Tensor) -> Tensor:
        """(JᵀΛJ + ρI)⁻¹ b for columns (P, K)."""
        solution = self.settings.run(self.hessian, b, self.preconditioner, None)
        return accepted(solution, "a solve by conjugate gradients")

    def solved_rows(self, x: Inputs, what: str, memory: Memory = None) -> Iterator[tuple[Tensor, Tensor]]:
        """J(x) and H⁻¹ J(x)ᵀ, few examples at a time."""
        for part in track(list(split(x, max(1, self.settings.columns // self.c))), what):
            formed, n = self.problem.form(part, memory or self.memory), batch_size(part)
            rows = torch.cat([block for _, block in formed])
            yield rows.view(n, self.c, -1), self.solve(rows.T.contiguous()).view(-1, n, self.c)

    def effects(self, x: Inputs, e: Tensor) -> Iterator[Tensor]:
        """By the kernel, or by solves and products with J, which few columns make cheaper than its rows."""
        # e (N, C)
        if (form := self._elsewhere) is not None:
            yield from form.effects(x, e)
            return
        for _, solved in self.solved_rows(x, "influence"):
            cross = self.problem.moved(solved.flatten(1)).view(self.n, self.c, -1, self.c)
            yield torch.einsum("ndtc,nd->ntc", cross, e.to(cross))

    @cached_property
    def _gained(self) -> Tensor:
        """J_i d_i of d_i = (H − J_iᵀΛ_iJ_i)⁻¹ J_iᵀ g_i, (N, ...): what outputs gain without their example."""
        every, found = range(self.n), []
        size = self.settings.columns
        parts = [every[first : first + size] for first in range(0, self.n, size)]
        for part in track(parts, "leave-one-out", len(parts)):
            own = [self.problem.taken(torch.tensor([i], device=self.base.device)) for i in part]
            slopes = [one.pull(self.gradient[i : i + 1]) for one, i in zip(own, part, strict=True)]
            hessians = [one.hessian(self.outputs[i : i + 1]) for one, i in zip(own, part, strict=True)]
            without = _WithoutEach(self.hessian, hessians)
            solution = self.settings.run(without, torch.stack(slopes, 1), self.preconditioner, None)
            moved = accepted(solution, "leave-one-out by conjugate gradients")
            found += [one.push(d) for one, d in zip(own, moved.unbind(1), strict=True)]
        return torch.cat(found)

    def loo_residuals(self) -> Tensor:
        """−(g + Λ J_i d_i), (N, ...), by the kernel where it fits."""
        if (form := self._elsewhere) is not None:
            return form.loo_residuals()
        curved = self.problem.likelihood.product(self.outputs, self._gained[None], self.problem.y)[0]
        return -(self.gradient + curved)

    def loo_outputs(self) -> Tensor:
        """f_i + J_i d_i, (N, ...), by the kernel where it fits."""
        form = self._elsewhere
        return self.outputs + self._gained if form is None else form.loo_outputs()

    # -- changes ---------------------------------------------------------------------------------

    def given(self, constraints: Constraints) -> WeightNewton:
        """The solution in the weights that equations on outputs leave, from the present one."""
        return self.on(self.problem.given(constraints, False, self.memory))

    def removed(self, index: Tensor) -> WeightNewton:
        """The solution without some examples, from the present one."""
        # index (k,)
        return self.on(self.problem.without(index))

    def extended(self, more: LabelProblem) -> WeightNewton:
        """The solution with more examples, from the present one."""
        return self.on(self.problem.joined(more))

    def relabelled(self, y: Tensor) -> WeightNewton:
        """The solution with other labels, from the present one."""
        return self.on(replace(self.problem, y=y))

    def on(self, problem: LabelProblem) -> WeightNewton:
        """The solution on other examples, from the present one."""
        given = self._given, self.limit, self.memory
        return WeightNewton(problem, self.ridge, self.settings, self._delta, *given)


class _WithoutEach(SymmetricOperator):
    """H less an example's own part, another example for each of K vectors."""

    def __init__(self, hessian: LinearOperator, own: list[LinearOperator]) -> None:
        self.hessian, self.own = hessian, own
        self.shape, self.dtype = hessian.shape, hessian.dtype
        self.device, self.space = hessian.device, hessian.space

    def mm(self, v: Tensor) -> Tensor:
        """The product of each vector with its own matrix, (P, K) to (P, K)."""
        own = [one.mm(v[:, k : k + 1]) for k, one in enumerate(self.own)]
        return self.hessian.mm(v) - torch.cat(own, 1)
