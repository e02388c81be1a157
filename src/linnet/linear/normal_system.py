"""The linear model in weights: (J̃ᵀJ̃ + ρI) δ = J̃ᵀr̃ by a Cholesky factor or eigenvalues, in float64.

J̃ᵀJ̃ is summed over the data, so that examples may be many where weights are few. With J̃ᵀJ̃ = V diag(λ) Vᵀ,
c = Vᵀ J̃ᵀr̃ and Z = J̃V every ridge follows from one more pass over the data:

    J̃δ = Z (c/(λ + ρ)),    H_ii = Z_i diag(1/(λ + ρ)) Z_iᵀ,    r̃ᵀ M r̃ = (‖r̃‖² − Σ c²/(λ + ρ))/ρ

Features Φ (N, D) that all outputs share stand in the place of J, with a solution (D, C), a column an output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from linnet.distributed import all_rows, current, share_sum
from linnet.errors import InputError
from linnet.linalg.factorize import cholesky, eigenvalue_error, shared_eigh
from linnet.linear.constraints import Constraints
from linnet.linear.dual import (
    Along,
    Measure,
    RidgePath,
    at_best_noise,
    by_primal,
    from_eigenvalues,
    joined,
    log_target_noise,
    ridge_grid_of,
)
from linnet.linear.kernel_system import SHARE, KernelSystem, KnownRows, kernel_fits
from linnet.linear.problem import ROWS, Memory, Problem, widened
from linnet.linear.system import Solved, System, apart, require_digits
from linnet.linear.targets import Targets
from linnet.memory import parse_bytes
from linnet.tangent.batch import Inputs, batch_size, hash_examples

TILE = 512  # columns of a tile of J̃ᵀJ̃: large enough for products at full speed, half of them left out
PRODUCTS = 1 << 24  # numbers in the products of eigencoordinates that are formed at once
PANELS = 16  # in which a symmetric matrix is sent: ½ (1 + 1/16) of its numbers


class NormalSystem(System):
    """A solution by the matrix J̃ᵀJ̃ (P, P), or Φ̃ᵀΦ̃ (D, D) of features that all outputs share."""

    # matrices (P, P), and (P,) or (D, C)

    def __init__(
        self,
        problem: Problem,
        matrices: tuple[Tensor, Tensor],
        ridge: float,
        memory: Memory = None,
        work: dict[str, int] | None = None,
        spectrum: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.problem, self.memory = problem, memory
        self.normal, self.right = matrices
        self.ridge = float(ridge)
        self.work = {"factorizations": 1} if work is None else work
        self._spectrum, self._negative = spectrum, 0.0
        self._known = KnownRows()

    @classmethod
    def solved(
        cls, problem: Problem, ridge: float, memory: Memory = None, before: System | None = None
    ) -> NormalSystem:
        """Sum J̃ᵀJ̃ over the data and solve."""
        work = {"examples differentiated": problem.n, "factorizations": 1}
        if isinstance(before, NormalSystem) and before.problem.same_inputs(problem):
            right = problem.pull(problem.residual.reshape(-1, 1))[:, 0].double()
            found = cls(problem, (before.normal, right), ridge, memory, work, before._spectrum)
        else:
            found = cls(problem, summed(problem, memory), ridge, memory, work)
        _ = found.factor  # raises here where the matrix is not positive definite
        return found

    # -- the solution ----------------------------------------------------------------------------

    @cached_property
    def factor(self) -> Tensor:
        """L with L Lᵀ = J̃ᵀJ̃ + ρI."""
        damped = self.normal.clone()
        damped.diagonal().add_(self.ridge)
        return cholesky(damped, "Fisher matrix + ridge")

    @property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues λ (P,) and eigenvectors V (P, P) of J̃ᵀJ̃."""
        if self._spectrum is None:
            [(values, vectors)] = shared_eigh([self.normal], ["Fisher matrix"], current())
            # there is no negative eigenvalue: the most negative one found measures the rounding errors
            self._negative = max(0.0, -float(values.min()), eigenvalue_error(values))
            self._spectrum = values.clamp_min(0), vectors
        return self._spectrum

    @cached_property
    def solution(self) -> Tensor:
        """δ in float64, or the weights (D, C) of shared features."""
        right = self.right.view(len(self.right), -1)
        return torch.cholesky_solve(right, self.factor).view_as(self.right)

    @property
    def delta(self) -> Tensor:
        """(J̃ᵀJ̃ + ρI)⁻¹ J̃ᵀr̃, in the network's type."""
        return self.problem.displaced(self.solution).to(self.function.dtype)

    @cached_property
    def beta(self) -> Tensor:
        """β = (r̃ − J̃δ)/ρ, (N, C)."""
        own = current().part(self.n)
        # one tensor from the start: small ones made between blocks of rows keep the heap from reusing these
        fitted = self.solution.new_empty(own.stop - own.start, self.c)
        for place, rows in self.problem.own_rows(self.memory):
            found = (rows.double() @ self.solution).view(-1, self.c)
            fitted[place.start - own.start : place.stop - own.start] = found
        return (self.residual.double() - all_rows(fitted, self.n)) / self.ridge

    def solve(self, b: Tensor) -> Tensor:
        """(J̃ᵀJ̃ + ρI)⁻¹ b for columns (P, K), in float64."""
        return torch.cholesky_solve(b.double(), self.factor)

    def certificate(self) -> float:
        """‖(J̃ᵀJ̃ + ρI)δ − J̃ᵀr̃‖ / ‖J̃ᵀr̃‖; by products with J itself where J̃ᵀJ̃ was summed in float32."""
        if self.function.precision.sums == "float32" and not self.shared:
            moved = self.problem.pull(self.problem.push(self.solution[:, None].to(self.function.dtype)))[
                :, 0
            ].double()
        else:
            moved = self.normal @ self.solution
        left = moved + self.ridge * self.solution - self.right
        return float(left.norm() / self.right.norm().clamp_min(torch.finfo(left.dtype).tiny))

    @cached_property
    def measure(self) -> Measure:
        """The eigenvalues of J̃ᵀJ̃, which are those of K̃ but for zeros."""
        values, vectors = self.spectrum
        problem = self.problem
        masses = (vectors.T @ self.right.view(len(values), -1)).square().sum(1)
        values, masses = by_primal(values, masses, problem.squared)
        return from_eigenvalues(values, masses, problem.squared, problem.count, problem.log_noise)

    @cached_property
    def kernel_form(self) -> KernelSystem | None:
        """The same solution by its kernel, for what asks for that very matrix."""
        if not kernel_fits(self.function, self.n * self.problem.each, self.memory):
            return None
        return KernelSystem.solved(self.problem, self.ridge, self.memory)

    @property
    def factorized(self) -> NormalSystem:
        """Itself."""
        return self

    def diagonal(self) -> Tensor:
        """The squared norms of the rows, (N·C,)."""
        return torch.cat([rows.double().square().sum(1) for _, rows in self.own_rows()])

    # -- other ridges and other data -------------------------------------------------------------

    def at(self, ridge: float) -> NormalSystem:
        """Another Cholesky factor of the same matrix."""
        if (held := self.constraints) is not None and held.soft:
            return self.given(held.at_ridge(self.ridge, ridge), ridge)
        matrices = self.normal, self.right
        return NormalSystem(self.problem, matrices, ridge, self.memory, dict(self.work), self._spectrum)

    def given(self, constraints: Constraints, ridge: float | None = None) -> NormalSystem:
        """The sums in the weights that equations on outputs leave: P J̃ᵀJ̃ P; anew where others were before."""
        if self.shared:
            raise InputError(
                f"equations on outputs of a fit of {self.n:,} samples in the weights of its features",
                expected="a fit by its kernel, as linnet.adapt makes of up to 10,000 samples",
                remedy="adapt to fewer samples",
            )
        ridge = self.ridge if ridge is None else ridge
        problem = self.problem.given(constraints, False, self.memory)
        if (at := problem.confined) is None or self.problem.held is not None:
            return NormalSystem(problem, summed(problem, self.memory), ridge, self.memory)
        normal = at.mm(at.mm(self.normal).T)
        right = at.mm((self.right - self.normal @ at.center.double())[:, None])[:, 0]
        return NormalSystem(problem, (normal, right), ridge, self.memory, dict(self.work))

    def with_residual(self, residual: Tensor) -> NormalSystem:
        """The same matrix for other targets."""
        problem, change = replace(self.problem, residual=residual), residual - self.problem.residual
        if self.shared:
            more = torch.zeros_like(self.right)
            for place, rows in problem.own_rows(self.memory):
                more += rows.T @ change[place].to(more)
            share_sum([more])
            return self._moved(problem, self.right + more)
        right = self.right + problem.pull(change.reshape(-1, 1))[:, 0].double()
        return self._moved(problem, right)

    def widened(self, count: int) -> NormalSystem:
        """The same shared features, and more outputs whose targets are zero."""
        problem = widened(self.problem, count)
        return self._moved(problem, torch.cat([self.right, self.right.new_zeros(len(self.right), count)], 1))

    def _moved(self, problem: Problem, right: Tensor) -> NormalSystem:
        """The same matrix for other targets, of which Jᵀr is known."""
        matrices = self.normal, right
        return NormalSystem(problem, matrices, self.ridge, self.memory, dict(self.work), self._spectrum)

    def removed(self, index: Tensor) -> NormalSystem:
        """Without some examples: the sums less theirs, or anew where most of them go."""
        rest = self.problem.without(index)
        if rest.n < len(index):
            return NormalSystem(rest, summed(rest, self.memory), self.ridge, self.memory)
        normal, right = summed(self.problem.taken(index), self.memory)
        return NormalSystem(rest, (self.normal - normal, self.right - right), self.ridge, self.memory)

    def extended(self, more: Problem) -> NormalSystem:
        """With more examples: the sums and theirs."""
        normal, right = summed(more, self.memory)
        joined, work = self.problem.joined(more), {"examples differentiated": more.n, "factorizations": 1}
        matrices = self.normal + normal, self.right + right
        return NormalSystem(joined, matrices, self.ridge, self.memory, work)

    # -- predictions and leave-one-out -----------------------------------------------------------

    def covariance(self, x: Inputs, joint: bool = False) -> Tensor:
        """ρ VᵀV with V = L⁻¹ J(x)ᵀ."""
        if self.shared:
            if joint:
                return apart(self.covariances(x, x), self.c)
            variance = self.shared_variance(x)
            assert variance is not None
            return variance[:, None, None] * torch.eye(self.c, dtype=variance.dtype, device=variance.device)
        blocks, n, c = [], batch_size(x), self.c
        for _, rows in self.problem.form(x, self.memory):
            half = torch.linalg.solve_triangular(self.factor, rows.double().T, upper=False)
            each = half.view(len(half), -1, c)
            blocks.append(half if joint else torch.einsum("ptc,ptd->tcd", each, each))
        if not joint:
            return self.ridge * torch.cat(blocks)
        v = torch.cat(blocks, 1)
        return self.ridge * (v.T @ v).view(n, c, n, c)

    def predicted(self, x: Inputs) -> Tensor:
        """Φ(x) W of shared features, (T, C)."""
        return torch.cat([rows @ self.solution for rows in self._formed(x)])

    def shared_variance(self, x: Inputs) -> Tensor | None:
        """ρ ‖L⁻¹ φ(x)‖² of shared features, (T,)."""
        if not self.shared:
            return None
        return self.ridge * torch.cat([self._half(rows).square().sum(0) for rows in self._formed(x)])

    def covariances(self, x1: Inputs, x2: Inputs) -> Tensor:
        """ρ Φ(x1) H⁻¹ Φ(x2)ᵀ of shared features, (T, S)."""
        first = torch.cat([self._half(rows) for rows in self._formed(x1)], 1)
        second = first if x1 is x2 else torch.cat([self._half(rows) for rows in self._formed(x2)], 1)
        return self.ridge * first.T @ second

    def _formed(self, x: Inputs) -> Iterator[Tensor]:
        """Φ of examples, block by block; kept of those that were asked for last."""
        names = hash_examples(x)
        if (known := self._known.find(names)) is not None:
            yield from known.split(ROWS)
            return
        kept: list[Tensor] = []
        room = int(SHARE * parse_bytes(self.memory, self.function.device)) // (8 * len(self.normal))
        for _, rows in self.problem.form(x, self.memory):
            yield rows
            if len(names) <= room:
                kept.append(rows)
        if kept:
            self._known.keep(names, torch.cat(kept))

    def _half(self, rows: Tensor) -> Tensor:
        """L⁻¹ Jᵀ of rows."""
        found: Tensor = torch.linalg.solve_triangular(self.factor, rows.double().T, upper=False)
        return found

    @cached_property
    def _leverages(self) -> Tensor:
        """M_ii = (I − J̃_i H⁻¹ J̃_iᵀ)/ρ with H⁻¹ = T Tᵀ: one product with all rows."""
        if self._spectrum is None:
            eye = torch.eye(len(self.factor), dtype=self.factor.dtype, device=self.factor.device)
            turn = torch.linalg.solve_triangular(self.factor, eye, upper=False).T  # L⁻ᵀ
        else:
            values, vectors = self._spectrum
            turn = vectors * (values + self.ridge).rsqrt()  # V (λ + ρ)^(-1/2)
        parts = []
        for _, rows in self.own_rows():
            half = (rows @ turn.to(rows)).view(-1, self.problem.each, rows.shape[1])
            parts.append((half @ half.mT).double())
        eye = torch.eye(self.problem.each, dtype=torch.float64, device=self.function.device)
        rest = eye - torch.cat(parts)
        # features that are formed count as exact
        kind = torch.float64 if self.shared else self.function.dtype
        require_digits(rest, 16 * torch.finfo(kind).eps, self.ridge)
        return rest / self.ridge

    def again(self) -> NormalSystem:
        """Summed again."""
        return NormalSystem.solved(replace(self.problem, known=None, formed=None), self.ridge, self.memory)

    def reach(self, e: Tensor) -> Tensor:
        """By one pass over the examples."""
        if self.shared:
            one = reached(self, self.normal, torch.ones_like(e[:, :1]))
            return one * e.square().sum(1)
        return reached(self, self.normal, e)

    def grid(self) -> Tensor:
        """Ridges around the mean of the kernel's diagonal, above its rounding, (R,)."""
        values = self.spectrum[0]
        rounding = max(self._negative, len(values) * torch.finfo(values.dtype).eps * float(values.max()))
        copies = self.c // self.problem.each
        scale = copies * float(values.sum()) / self.problem.count
        return ridge_grid_of(scale or 1.0, rounding, values.device)

    def along_path(self, x: Inputs) -> Along:
        """J(x) V of the eigenvectors V of J̃ᵀJ̃."""
        values, vectors = self.spectrum
        rows = torch.cat([rows.double() @ vectors for _, rows in self.problem.form(x, self.memory)])
        at = self.problem.confined
        least = 0.0 if at is None else float(at.center.double().square().sum())
        return Along(rows, values, vectors.T @ self.right, torch.ones_like(values), least)

    def path(self, ridges: Tensor | None, targets: Targets) -> RidgePath:
        """From one eigendecomposition and one pass over the data; penalties take these for each ridge."""
        grid = self.grid() if ridges is None else ridges
        if self.constraints is None or not self.constraints.soft:
            return self._path(grid, targets)
        return joined([self.at(float(one))._path(one[None], targets) for one in grid])

    def _path(self, ridges: Tensor, targets: Targets) -> RidgePath:
        """Every criterion, the equations on outputs being the same at all ridges."""
        values, vectors = self.spectrum
        count, squared = self.problem.count, self.problem.squared
        grid = ridges.to(values)
        copies = self.c // self.problem.each  # of every eigenvalue: C where outputs share features, else 1
        coordinates = vectors.T @ self.right.view(len(values), copies)
        inverse = 1 / (values + grid[:, None])  # (R, P)
        quadratic = (squared - (coordinates.square().sum(1) * inverse).sum(1)).clamp_min(0) / grid
        logdet = copies * (values + grid[:, None]).log().sum(1)
        logdet = logdet + (count - copies * len(values)) * grid.log()
        degrees = copies * (values * inverse).sum(1)
        noise = grid * quadratic / count
        evidence = at_best_noise(grid, noise, count, logdet) - 0.5 * self.problem.log_noise
        error, left, right, asked = torch.zeros(4, len(grid)).to(grid)
        each = self.problem.each
        eye = torch.eye(each, dtype=values.dtype, device=values.device)
        solutions = (inverse[:, :, None] * coordinates).permute(1, 2, 0)  # (P, copies, R)
        one, two = torch.tril_indices(each, each, device=values.device)
        sums = {"error": error, "left": left, "right": right, "asked": asked}
        labels = self.problem.scaled(targets.values)
        given = {"ridges": grid, "labels": labels}
        for place, rows in self.problem.summed_rows("path", sums, self.memory, **given):
            z = (rows @ vectors.to(rows)).view(-1, each, len(values))
            r, t = self.residual[place].double(), labels[place].to(values)
            fitted = (z.flatten(0, 1) @ solutions.flatten(1).to(z)).double()
            rest = r[:, :, None] - fitted.view(len(z), self.c, len(grid))  # (n, C, R)
            # every block of the hat matrix at every ridge in one product: (n · C(C+1)/2, P) times (P, R)
            size = max(1, PRODUCTS // (len(one) * len(values)))
            halves = [(part[:, one] * part[:, two]) @ inverse.T.to(z) for part in z.split(size)]
            hat = z.new_zeros(len(z), each, each, len(grid))
            hat[:, one, two] = hat[:, two, one] = torch.cat(halves)
            blocks = eye - hat.permute(3, 0, 1, 2).double()  # ρ M_ii
            out = rest.permute(2, 0, 1)
            out = out / blocks[..., 0] if each < self.c else torch.linalg.solve(blocks, out)
            error += out.square().sum((1, 2))
            left += rest.square().sum((0, 1))
            if targets.classes is not None:
                right += ((t - out).argmax(2) == t.argmax(1)).sum(1)
            else:
                spread = torch.linalg.inv(blocks).diagonal(dim1=2, dim2=3).mean(2)
                asked += log_target_noise((evidence, noise), count, out, spread).sum(1)
        share_sum([error, left, right, asked])
        gcv = count * left / (count - degrees).clamp_min(1e-300) ** 2
        columns = [grid, error / self.n, gcv, evidence, degrees, noise]
        path = RidgePath(*(column.cpu() for column in columns))
        if targets.classes is not None:
            return replace(path, loo_accuracy=(right / self.n).cpu())
        return replace(path, target_noise=(asked / self.n).exp().cpu())


def evidence_and_noise(system: NormalSystem) -> tuple[float, float]:
    """The evidence at the noise that is best for it, less Σ log σ_i²/2, and that noise, by the factor."""
    count, copies, ridge = system.problem.count, system.c // system.problem.each, system.ridge
    quadratic = (system.problem.squared - float((system.right * system.solution).sum())) / ridge
    noise = max(ridge * quadratic / count, 0.0)
    logdet = 2 * copies * float(system.factor.diagonal().log().sum())
    logdet += (count - copies * len(system.factor)) * math.log(ridge)
    facts = torch.tensor([ridge, noise, logdet], dtype=torch.float64)
    return float(at_best_noise(facts[0], facts[1], count, facts[2])), noise


def summed(problem: Problem, memory: Memory) -> tuple[Tensor, Tensor]:
    """J̃ᵀJ̃ and J̃ᵀr̃, in float64; each process of several sums its share of the examples, (P, P)."""
    p = problem.width
    normal = torch.zeros(p, p, dtype=torch.float64, device=problem.function.device)
    right = normal.new_zeros((p, problem.c) if problem.basis.shared else p)
    for place, rows in problem.summed_rows("normal", {"normal": normal, "right": right}, memory):
        wide = rows.double()  # a product rounded to float32 would be 1/ρ times as far off as the rows are
        narrow = rows.float() if problem.function.precision.sums == "float32" else None
        # in float32 where the caller has asked for it, and the check of rounding counts it
        add_gram(normal, wide if narrow is None else narrow)
        right += (wide.T @ problem.residual[place].reshape(len(wide), -1).double()).view_as(right)
    share_sum([right])
    _sum_triangle(normal)
    return mirrored(normal), right


def mirrored(lower: Tensor) -> Tensor:
    """The symmetric matrix of what is on and below a diagonal; what is above is dropped, in its place."""
    lower = lower.tril_()
    return lower + lower.tril(-1).T


def add_gram(total: Tensor, rows: Tensor) -> None:
    """Add RᵀR to a matrix, on and below its diagonal, in tiles that may reach above it."""
    # total (P, P) float64, rows (n, P)
    for start in range(0, len(total), TILE):
        tile = slice(start, start + TILE)
        if rows.dtype == total.dtype:
            total[tile, : tile.stop].addmm_(rows[:, tile].T, rows[:, : tile.stop])
        else:
            total[tile, : tile.stop] += rows[:, tile].T @ rows[:, : tile.stop]


def reached(system: Solved, normal: Tensor, e: Tensor) -> Tensor:
    """‖J d_i‖² of the change d_i = H⁻¹ J_iᵀ e_i of the weights by each example, (N,)."""
    # normal (P, P) = JᵀJ, e (N, C), or (N, 1) of shared features
    parts = []
    for place, rows in system.own_rows():
        each = rows.view(-1, e.shape[1], rows.shape[1])
        solved = system.solve(torch.einsum("ncp,nc->pn", each, e[place].to(each)))
        parts.append((solved * (normal @ solved)).sum(0))
    return torch.cat(parts)


def _sum_triangle(matrix: Tensor) -> None:
    """The lower triangle of a matrix, summed over all processes in panels up to the diagonal."""
    if current().world == 1:
        return
    p = len(matrix)
    for start in range(0, p, -(-p // PANELS)):
        panel = slice(start, min(start + -(-p // PANELS), p))
        sent = matrix[panel, : panel.stop].contiguous()
        share_sum([sent])
        matrix[panel, : panel.stop] = sent
