"""The solved equations of a linear model at one ridge, and everything that its posterior answers.

With prior δ ~ N(0, I/λ), noise s, ρ = λ s, H = J̃ᵀJ̃ + ρI and M = (K̃ + ρI)⁻¹, in samples or in weights alike

    δ = H⁻¹ J̃ᵀr̃ = J̃ᵀβ               β = M r̃ = (r̃ − J̃δ)/ρ
    λ Cov[f(x)] = ρ J(x) H⁻¹ J(x)ᵀ = K(x,x) − K̃(x,X) M K̃(X,x)
    K̃(x,X) M = J(x) H⁻¹ J̃ᵀ          M_ii = (I − J̃_i H⁻¹ J̃_iᵀ)/ρ

(Maddox et al. 2021, eq. 2 and 3; Rasmussen and Williams 2006, section 2). ``System`` states them by solves
with H; a subclass that knows better, because it holds a kernel or a factorization, says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from linnet.distributed import all_rows, current
from linnet.errors import InputError, NumericalError
from linnet.linear.constraints import Constraints, Wanted, impose
from linnet.linear.dual import Along, DualSystem, Measure, RidgePath
from linnet.linear.label_problem import LabelProblem
from linnet.linear.problem import Memory, Problem
from linnet.linear.targets import Targets
from linnet.memory import Plan, parse_bytes, require
from linnet.tangent.batch import Inputs, batch_size
from linnet.tangent.functional import Functional
from linnet.tangent.gram import own_kernels

DIGITS = 100.0  # times its error that 1 − leverage must be at the least


class Solved(ABC):
    """A linear model solved at one ρ, and what follows by solves with H for any likelihood."""

    problem: Problem | LabelProblem  # the data
    ridge: float  # ρ
    memory: Memory  # budget of what is formed later
    in_samples: ClassVar[bool] = False  # whether it is a solution by the kernel
    tolerance: float = 0.0  # relative residual that a solve may leave; 0 for factorizations

    # -- the problem -----------------------------------------------------------------------------

    @property
    def function(self) -> Functional:
        """The network."""
        return self.problem.function

    @property
    def x(self) -> Inputs:
        """Training inputs."""
        return self.problem.x

    @property
    def n(self) -> int:
        """N."""
        return self.problem.n

    @property
    def c(self) -> int:
        """C."""
        return self.problem.c

    @property
    def shared(self) -> bool:
        """Whether outputs share features, and every output has weights of its own."""
        return self.problem.free.shared

    @property
    def constraints(self) -> Constraints | None:
        """Equations on outputs that the solution obeys."""
        return self.problem.constraints

    @property
    @abstractmethod
    def delta(self) -> Tensor:
        """The posterior mean δ, (P,)."""

    @property
    @abstractmethod
    def beta(self) -> Tensor:
        """β, (N, C)."""

    @abstractmethod
    def solve(self, b: Tensor) -> Tensor:
        """H⁻¹ b for columns b (P, K)."""

    @abstractmethod
    def certificate(self) -> float:
        """The relative residual of the equations."""

    @abstractmethod
    def loo_residuals(self) -> Tensor:
        """e, (N, C), whose ``effects`` are what each example does to a prediction."""

    @property
    @abstractmethod
    def _elsewhere(self) -> Solved | None:
        """Another form of the solution, which answers in fewer operations."""

    @abstractmethod
    def removed(self, index: Tensor) -> Solved:
        """The solution without some examples."""
        # index (k,)

    # -- equations on outputs --------------------------------------------------------------------

    @abstractmethod
    def given(self, constraints: Constraints) -> Self:
        """The solution of the same data under other equations on outputs."""

    def constrained(self, asked: Wanted, start: Tensor, weight: float | None) -> Self:
        """The solution that obeys equations, on top of those that it obeys already."""
        # start (M, C), the mean before the data at the equations' examples
        problem, before, memory = self.problem, self.constraints, self.memory
        every = asked.equations if before is None else before.equations.joined(asked.equations)
        size = self.n * self.c
        items = (
            ("kernel given the equations", 2 * 8 * size**2 if self.in_samples else 0),
            ("equations at the training data", 3 * 8 * size * every.count),
            ("kernel of the equations", 4 * 8 * every.count**2),
        )
        plan = Plan(f"{every.count} equations on outputs", parse_bytes(memory, self.function.device), items)
        require(plan, ["constrain fewer outputs", "raise memory="])
        kernel, slack = every.kernel(problem.free, memory), 0.0 if weight is None else self.ridge / weight
        return self.given(impose(problem.free, self.function, asked, start, slack, kernel, before, memory))

    # -- predictions -----------------------------------------------------------------------------

    def solved_rows(self, x: Inputs, what: str, memory: Memory = None) -> Iterator[tuple[Tensor, Tensor]]:
        """J(x) and H⁻¹ J(x)ᵀ block by block."""
        del what
        for _, rows in self.problem.form(x, memory or self.memory):
            each, size = self.problem.each, len(rows)
            if self.problem.basis.shared:  # which come in large blocks
                room = parse_bytes(memory or self.memory, self.function.device)
                size = max(1, room // (64 * self.n * self.c))
            for some in rows.split(size):
                n = len(some) // each
                yield some.view(n, each, -1), self.solve(some.T).view(-1, n, each)

    def shared_variance(self, x: Inputs) -> Tensor | None:
        """The variance λ Var[f(x)] of outputs that are apart and have the same, (T,); None of others."""
        return None

    def covariance(self, x: Inputs, joint: bool = False) -> Tensor:
        """The posterior covariance λ Cov[f(x)]."""
        if joint:
            return self.between(x, x)
        found = [
            torch.einsum("ncp,pnd->ncd", rows.to(solved), solved)
            for rows, solved in self.solved_rows(x, "predictive covariance")
        ]
        return self.ridge * torch.cat(found)

    def between(self, x1: Inputs, x2: Inputs) -> Tensor:
        """The posterior covariance λ Cov[f(x1), f(x2)], (T, C, S, C)."""
        parts = []
        for _, solved in self.solved_rows(x2, "joint covariance"):
            columns = solved.flatten(1)
            formed = self.problem.form(x1, self.memory)
            parts.append(torch.cat([rows.to(columns) @ columns for _, rows in formed]).double())
        whole = self.ridge * torch.cat(parts, 1)
        if self.problem.basis.shared:
            return apart(whole, self.c)
        return whole.view(batch_size(x1), self.c, batch_size(x2), self.c)

    def effects(self, x: Inputs, e: Tensor) -> Iterator[Tensor]:
        """Σ_d [K̃(x,X) M]_id e_id by training example i: what a change e_i of its target does to f(x)."""
        # e (N, C), or (N, 1) of outputs that share features
        if (form := self._elsewhere) is not None:
            yield from form.effects(x, e)
            return
        for rows, solved in self.solved_rows(x, "influence"):
            columns, t = solved.flatten(1), len(rows)
            parts = []
            for place, own in self.own_rows():  # Σ_d first: it makes the product C times smaller
                if self.problem.basis.shared:
                    moved = own.to(columns) @ columns
                    parts.append((moved[:, :, None] * e[place, None].to(moved)).flatten(1))
                    continue
                each = own.view(-1, self.c, own.shape[1])
                moved = torch.einsum("ncp,nc->np", each, e[place].to(each))
                parts.append(moved.to(columns) @ columns)
            yield torch.cat(parts).view(self.n, t, -1)

    def paired(self, x: Inputs, at: Tensor) -> Tensor:
        """J(x) H⁻¹ J̃ⱼᵀ of each example and one training example, (T, C, C); of outputs alike (T, 1, 1)."""
        # at (T,): the training examples
        if (form := self._elsewhere) is not None:
            return form.paired(x, at)
        begin, found, each = 0, [], self.problem.each
        for rows, solved in self.solved_rows(x, "influence"):
            own = at[begin : begin + len(rows)]
            made = solved.new_zeros(len(rows), each, each)
            for place, block in self.own_rows():
                here = ((own >= place.start) & (own < place.stop)).nonzero()[:, 0]
                of_pair = block.view(-1, each, block.shape[1])[own[here] - place.start].to(solved)
                made[here] = torch.einsum("tdp,ptc->tcd", of_pair, solved[:, here])
            found.append(made.double())
            begin += len(rows)
        return torch.cat(found)

    def reach(self, e: Tensor) -> Tensor:
        """Σ ‖·‖² of ``effects`` over the training examples, (N,)."""
        # e (N, C)
        return torch.cat(list(self.effects(self.x, e)), 1).square().sum((1, 2))

    def own_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows of the training examples: the place of n of them and (n·C, P), block by block."""
        return self.problem.form(self.x, self.memory)


class System(Solved):
    """The solved equations of squares, at ρ = λ s."""

    problem: Problem  # the data
    work: dict[str, int]  # what was done, counted: examples differentiated, factorizations, steps

    # -- the problem -----------------------------------------------------------------------------

    @property
    def residual(self) -> Tensor:
        """r̃, (N, C)."""
        return self.problem.residual

    # -- the solution ----------------------------------------------------------------------------

    @property
    def coefficients(self) -> Tensor:
        """α with f(x) − m(x) = K(x, X) α, (N, C): β in the units of the targets."""
        beta = self.beta
        return self.problem.weighed(beta.reshape(-1, 1)).view_as(beta)

    @property
    def left_over(self) -> Tensor:
        """t_i − f(x_i), (N, C)."""
        return self.problem.unscaled(self.ridge * self.beta)

    @abstractmethod
    def at(self, ridge: float) -> System:
        """The same problem at another ρ, with all that does not depend on it."""

    @abstractmethod
    def removed(self, index: Tensor) -> System:
        """The solution without some examples."""
        # index (k,)

    @abstractmethod
    def extended(self, more: Problem) -> System:
        """The solution with more examples."""

    @abstractmethod
    def with_residual(self, residual: Tensor) -> System:
        """The same equations for other targets."""
        # residual (N, C)

    def again(self) -> System:
        """The same system from its problem alone."""
        raise self._refused("solving from scratch")

    @property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of K̃, or of J̃ᵀJ̃, where they are known or found by a factorization."""
        return self.measure.nodes[0]

    @property
    def measure(self) -> Measure:
        """The spectrum of K̃, which the evidence is made of."""
        if (form := self._elsewhere) is None:
            raise self._refused("the evidence at every ridge")
        return form.measure

    @property
    def kernel_form(self) -> System | None:
        """The same solution by its kernel; ``None`` where that does not fit the memory."""
        return None

    @property
    def dual(self) -> DualSystem | None:
        """The equations (K̃ + ρI) β = r̃ of ``kernel_form``."""
        return None if self.kernel_form is None else self.kernel_form.dual

    @property
    def factorized(self) -> System | None:
        """The same solution by a factorization, which may be itself; ``None`` where none fits."""
        return self.kernel_form

    @property
    def _elsewhere(self) -> System | None:
        """Another form of the solution, which answers in fewer operations."""
        form = self.factorized
        return None if form is self else form

    def path(self, ridges: Tensor | None, targets: Targets) -> RidgePath:
        """Every criterion along a path of ridges, penalties on outputs at the same weight all along."""
        # ridges (R,)
        if (form := self._elsewhere) is None:
            raise self._refused("a path of ridges")
        return form.path(ridges, targets)

    def grid(self) -> Tensor:
        """Ridges to try, (R,), increasing."""
        raise self._refused("a grid of ridges")

    def along_path(self, x: Inputs) -> Along:
        """The outputs at x as a function of the ridge."""
        raise self._refused("predictions along a path of ridges")

    def _refused(self, what: str) -> InputError:
        """The error of what only a factorization answers."""
        return InputError(
            f"{what} of a fit that was solved by iterations",
            expected='solver="dual" or "primal", whose eigenvalues have every ridge',
            remedy='fit again with solver="dual", or fit at each ridge',
        )

    def spread(self, v: Tensor) -> Tensor:
        """The posterior covariance of the weights, λ Cov[δ] v for columns v (P, K)."""
        at = self.problem.confined
        found = self.solve(v) if at is None else at.mm(self.solve(at.mm(v)))
        return (self.ridge * found).to(v)

    # -- predictions -----------------------------------------------------------------------------

    def cross(self, x: Inputs) -> Iterator[Tensor]:
        """K̃(x,X) M = J(x) H⁻¹ J̃ᵀ: what the targets weigh in the outputs at x, some examples at a time."""
        if (form := self._elsewhere) is not None:
            yield from form.cross(x)
            return
        for rows, solved in self.solved_rows(x, "influence"):
            columns, t = solved.flatten(1), len(rows)
            product = torch.cat([own.to(columns) @ columns for _, own in self.own_rows()])  # (N·C, t·C)
            shape = (t, self.n) if self.problem.basis.shared else (t, self.c, self.n, self.c)
            yield product.T.reshape(shape)

    def own_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """J̃ of the training examples: the place of n of them and their rows (n·C, P), block by block."""
        return self.problem.rows(self.memory)

    # -- leave-one-out ---------------------------------------------------------------------------

    def inverse_blocks(self) -> Tensor:
        """M_ii, (N, C, C)."""
        form = self._elsewhere
        return self._leverages if form is None else form.inverse_blocks()

    @property
    def leverages_known(self) -> bool:
        """Whether the N·C solves of ``inverse_blocks`` are done."""
        return "_leverages" in vars(self)

    @cached_property
    def _leverages(self) -> Tensor:
        """M_ii = (I − J̃_i H⁻¹ J̃_iᵀ)/ρ, by N·C solves."""
        eye = torch.eye(self.c, dtype=torch.float64, device=self.function.device)
        parts = []
        for _, rows in self.own_rows():
            each = rows.view(-1, self.c, rows.shape[1]).double()
            solved = self.solve(rows.T.contiguous()).T.reshape(each.shape).double()
            parts.append(eye - each @ solved.mT)
        rest = torch.cat(parts)
        # a solve may leave its tolerance, and the rows are rounded
        require_digits(rest, self.tolerance + 16 * torch.finfo(self.function.dtype).eps, self.ridge)
        return rest / self.ridge

    def columns(self, index: Tensor) -> Tensor:
        """M_i· of some examples, (k, C, N·C)."""
        # index (k,)
        c, k = self.c, len(index)
        if (form := self._elsewhere) is not None:
            return form.columns(index)
        chosen = torch.cat([rows for _, rows in self.problem.taken(index).rows(self.memory)])
        solved = self.solve(chosen.T.contiguous()).double()
        rows_of = self.problem.own_rows if current().world > 1 else lambda _: self.own_rows()
        parts = [(rows.double() @ solved).view(-1, c, solved.shape[1]) for _, rows in rows_of(self.memory)]
        reach = all_rows(torch.cat(parts or [solved.new_empty(0, c, solved.shape[1])]), self.n)
        reach = reach.flatten(0, 1).T  # (k·C, N·C)
        own = (index[:, None] * c + torch.arange(c, device=index.device)).reshape(-1, 1)
        found = (-reach).scatter_add(1, own, torch.ones_like(reach[:, :1])) / self.ridge
        return found.view(k, c, -1)

    def diagonal(self) -> Tensor:
        """The diagonal of K̃ as it is without equations on outputs, (N·C,), float64."""
        if (form := self._elsewhere) is not None:
            return form.diagonal()
        own = own_kernels(self.function, self.x, self.memory).diagonal(dim1=1, dim2=2).reshape(-1, 1)
        return self.problem.weighed(self.problem.weighed(own.double()))[:, 0]

    def loo_residuals(self) -> Tensor:
        """e_i = (M_ii)⁻¹ β_i, (N, C): t_i − f₋ᵢ(x_i)."""
        if (form := self._elsewhere) is not None:
            return form.loo_residuals()
        blocks, beta = self.inverse_blocks(), self.beta
        if blocks.shape[1] < self.c:
            return beta / blocks[:, 0]
        residuals: Tensor = torch.linalg.solve(blocks, beta.to(blocks))
        return residuals

    def own_changes(self) -> Tensor:
        """f(x_i) − f₋ᵢ(x_i), (N, C)."""
        return self.problem.unscaled(self.loo_residuals()) - self.left_over

    def loo_variances(self) -> Tensor:
        """Cov[f(x_i)] in units of the noise without example i: ((M_ii)⁻¹ − ρI)/ρ, (N, C, C)."""
        blocks = self.inverse_blocks()
        each = blocks.shape[1]  # 1 where outputs share features
        eye = torch.eye(each, dtype=blocks.dtype, device=blocks.device)
        found: Tensor = torch.linalg.inv(blocks) / self.ridge - eye
        w = self.problem.weights
        return found if w is None else found / w[:, :each, None] / w[:, None, :each]

    def noise(self) -> float:
        """The noise s of highest evidence at this ridge: ρ r̃ᵀβ / n."""
        product = (self.residual.double() * self.beta.double()).sum()
        return float(self.ridge * product / self.problem.count)


def apart(found: Tensor, outputs: int) -> Tensor:
    """Covariances (T, S) of every output by itself as those between outputs, (T, C, S, C)."""
    eye = torch.eye(outputs, dtype=found.dtype, device=found.device)
    return torch.einsum("ts,cd->tcsd", found, eye)


def require_digits(rest: Tensor, error: float, ridge: float) -> None:
    """Raise where I − J̃_i H⁻¹ J̃_iᵀ is no larger than its error."""
    # rest (N, C, C)
    least = float(torch.linalg.eigvalsh((rest + rest.mT).double() / 2).min())
    if least < DIGITS * error:
        # 1 − h grows as ρ where it is small
        enough = ridge * DIGITS * error / max(least, error)
        raise NumericalError(
            f"leave-one-out at ridge={ridge:g} without the kernel: 1 − leverage is {least:.1e} for an "
            f"example and known to {error:.0e}",
            expected=f"a ridge of about {enough:.1g} or more, or a smaller tolerance",
            remedy='use solver="dual", raise memory= so that the kernel fits, or the network in float64',
        )
