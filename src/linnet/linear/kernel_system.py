"""The linear model in samples: (K̃ + ρI) β = r̃ by a Cholesky factor or eigenvalues, in float64.

The kernel is that of any features; where the outputs share them, K̃ = k ⊗ I and k alone is formed, (N, N).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from linnet.linalg.operator import unit_columns
from linnet.linear.constraints import Constraints, by_output
from linnet.linear.dual import Along, DualSystem, Measure, RidgePath, from_eigenvalues, joined
from linnet.linear.problem import Memory, Problem, widened
from linnet.linear.system import System, apart
from linnet.linear.targets import Targets
from linnet.memory import parse_bytes
from linnet.tangent.batch import Inputs, hash_examples, split, take
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram

# -- known rows ------------------------------------------------------------------------------------
# Cached rows of a kernel, looked up by sample.


class KnownRows:
    """K(x, X) of the last samples that were asked for, by their fingerprints."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._kernel: Tensor | None = None

    def find(self, names: Sequence[str]) -> Tensor | None:
        """The rows of samples, (T, ...), if all are there."""
        places = [self._places.get(name) for name in names]
        if self._kernel is None or None in places:
            return None
        # the same samples again take no copy
        return self._kernel if places == list(range(len(self._kernel))) else self._kernel[places]

    def keep(self, names: Sequence[str], kernel: Tensor) -> None:
        """Keep rows in the place of those before."""
        # kernel (T, ...)
        self._places = {name: row for row, name in enumerate(names)}
        self._kernel = kernel


SHARE = 0.5  # of the budget that a block of K(x, X) and what is made of it may take


class KernelSystem(System):
    """A solution by its kernel."""

    in_samples = True

    def __init__(
        self,
        problem: Problem,
        dual: DualSystem,
        memory: Memory = None,
        work: dict[str, int] | None = None,
    ) -> None:
        self.problem, self._dual, self.memory = problem, dual, memory
        self.ridge = dual.ridge
        self.work = {"factorizations": 1} if work is None else work
        self._known = KnownRows()

    @classmethod
    def solved(
        cls, problem: Problem, ridge: float, memory: Memory = None, before: System | None = None
    ) -> KernelSystem:
        """Form the kernel, whiten it and solve."""
        known = before if isinstance(before, KernelSystem) and before.problem.held is None else None
        if known is not None and known.problem.same_inputs(problem):
            factor = known.dual.factor if ridge == known.ridge else None
            dual = DualSystem(known.dual.kernel, problem.residual, ridge, factor=factor)
            _ = dual.beta  # raises here where the kernel is not positive definite
            work = {"examples differentiated": 0, "examples known": problem.n}
            return cls(problem, dual, memory, {**work, "factorizations": int(factor is None)})
        if problem.basis.shared or problem.held is not None:
            square, work = problem.basis.kernel(problem.examples, memory), {"factorizations": 1}
            square = whitened_kernel(square, problem)
        else:
            kernel, work = _kernel(problem, known, memory)
            square = whitened_kernel(kernel, problem)
        dual = DualSystem(square, problem.residual, ridge)
        _ = dual.beta
        return cls(problem, dual, memory, work)

    # -- the solution ----------------------------------------------------------------------------

    @property
    def _apart(self) -> bool:
        """Whether one kernel (N, N) serves all outputs."""
        return self.problem.basis.shared

    @property
    def kernel(self) -> Tensor:
        """K̃, (N·C, N·C), or k (N, N) that the outputs share."""
        return self.dual.kernel

    @property
    def kernel_form(self) -> KernelSystem:
        """Itself."""
        return self

    @property
    def dual(self) -> DualSystem:
        """The equations (K̃ + ρI) β = r̃."""
        return self._dual

    @property
    def residual(self) -> Tensor:
        """r̃ in float64, less what equations on outputs explain, (N, C)."""
        return self.dual.residual

    @property
    def beta(self) -> Tensor:
        """β = M r̃, (N, C)."""
        return self.dual.beta

    @cached_property
    def delta(self) -> Tensor:
        """J̃ᵀβ, and Aᵀν of equations on outputs."""
        problem, beta = self.problem, self.beta
        return problem.combined(problem.weighed(beta.reshape(-1, 1)).view_as(beta))

    def solve(self, b: Tensor) -> Tensor:
        """(b − J̃ᵀ M J̃ b)/ρ."""
        return self.spread(b) / self.ridge

    def spread(self, v: Tensor) -> Tensor:
        """V − J̃ᵀ M J̃ v."""
        if (at := self.problem.confined) is not None:
            v = at.mm(v)
        left = v - self.problem.pull(self.dual.solve(self.problem.push(v).double())).to(v)
        return left if at is None else at.mm(left)

    def certificate(self) -> float:
        """‖(K̃ + ρI)β − r̃‖ / ‖r̃‖; by products with J itself where K̃ is of coarser numbers."""
        if self._apart or not self.function.precision.coarser(self.function.dtype):
            return self.dual.certificate()
        beta = self.beta.reshape(-1, 1)
        left = self.problem.push(self.problem.pull(beta)).double() + self.ridge * beta
        off = left.view_as(self.residual) - self.residual
        return float(off.norm() / self.residual.norm().clamp_min(torch.finfo(off.dtype).tiny))

    def noise(self) -> float:
        """The noise s of highest evidence at this ridge: ρ r̃ᵀβ / n."""
        return self.dual.noise()

    @property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of K̃."""
        return self.dual.spectrum.values

    @cached_property
    def measure(self) -> Measure:
        """The eigenvalues of K̃."""
        spectrum, problem = self.dual.spectrum, self.problem
        masses = spectrum.coordinates**2
        squared = float(self.residual.square().sum())
        return from_eigenvalues(spectrum.values, masses, squared, problem.count, problem.log_noise)

    def grid(self) -> Tensor:
        """Ridges around the mean of the kernel's diagonal, above its rounding, (R,)."""
        return self.dual.spectrum.grid()

    def along_path(self, x: Inputs) -> Along:
        """K̃(x,X) V of the eigenvectors V of K̃."""
        spectrum = self.dual.spectrum
        parts = [self._flat(cross).to(spectrum.vectors) for cross in self.kernel_to_train(x)]
        rows = torch.cat([part @ spectrum.vectors for part in parts])
        # ‖δ‖² = βᵀK̃β, and the least that equations on outputs ask for
        held = self.constraints
        least = 0.0 if held is None else float(held.level.square().sum())
        return Along(rows, spectrum.values, spectrum.coordinates, spectrum.values, least)

    def path(self, ridges: Tensor | None, targets: Targets) -> RidgePath:
        """From one eigendecomposition; penalties on outputs take one for each ridge."""
        classes, spectrum = targets.classes is not None, self.dual.spectrum
        grid = self.grid() if ridges is None else ridges.to(self.dual.kernel.device)
        values = self.problem.scaled(targets.values)
        if (held := self.constraints) is None or not held.soft:
            found = spectrum.path(grid, classes, values)
        else:
            each = (self.at(float(ridge)).dual.spectrum for ridge in grid)
            found = joined([s.path(grid[i : i + 1], classes, values) for i, s in enumerate(each)])
        return replace(found, evidence=found.evidence - 0.5 * self.problem.log_noise)

    # -- other ridges and other data -------------------------------------------------------------

    def at(self, ridge: float) -> KernelSystem:
        """The same kernel at another ridge; penalties keep their weight, so that K̃ and r̃ change with it."""
        held = self.constraints
        if held is None or not held.soft:
            return KernelSystem(self.problem, self.dual.at(ridge), self.memory, dict(self.work))
        return self.given(held.at_ridge(self.ridge, ridge), ridge)

    def given(self, constraints: Constraints, ridge: float | None = None) -> KernelSystem:
        """By the kernel less what equations explain, and with what others before them explained."""
        before, problem = self.problem, self.problem.given(constraints, True, self.memory)
        kernel = by_output(before.basis, self.kernel, self.c).reshape(problem.residual.numel(), -1)
        new = problem.weighed(problem.explained())
        kernel = kernel - new @ new.T
        if before.held is not None:
            old = before.weighed(before.explained())
            kernel = kernel + old @ old.T
        dual = DualSystem(kernel, problem.residual, self.ridge if ridge is None else ridge)
        return KernelSystem(problem, dual, self.memory, dict(self.work))

    def removed(self, index: Tensor) -> KernelSystem:
        """Without some examples: β_R − M_RS (M_SS)⁻¹ β_S."""
        return KernelSystem(self.problem.without(index), self.dual.removed(index), self.memory)

    def extended(self, more: Problem) -> KernelSystem:
        """With more examples, by a bordered Cholesky factor."""
        cross = torch.cat(list(self.kernel_to_train(more.x)))
        corner = self.problem.basis.kernel(more.examples, self.memory)
        if more.weights is not None:
            w = more.weights[:, 0] if self._apart else more.weights
            cross, corner = (part.double() * w[(...,) + (None,) * w.ndim] for part in (cross, corner))
            corner = corner * w
        cross = cross.T if self._apart else cross.permute(2, 3, 0, 1)
        dual = self.dual.extended(cross, corner, more.residual.to(self.dual.residual))
        work = {"examples differentiated": more.n + self.n, "factorizations": 1}
        return KernelSystem(self.problem.joined(more), dual, self.memory, work)

    def again(self) -> KernelSystem:
        """The kernel formed again, with its rows of features and of equations on outputs."""
        return KernelSystem.solved(replace(self.problem, known=None, formed=None), self.ridge, self.memory)

    def with_residual(self, residual: Tensor) -> KernelSystem:
        """The same kernel, and its factor, for other targets."""
        left = self.residual + residual.to(self.residual) - self.problem.residual.to(self.residual)
        dual = DualSystem(self.dual.kernel, left, self.ridge, factor=self.dual.factor)
        return KernelSystem(replace(self.problem, residual=residual), dual, self.memory)

    def widened(self, count: int) -> KernelSystem:
        """The same kernel of all outputs, and more outputs whose targets are zero."""
        problem = widened(self.problem, count)
        dual = DualSystem(self.dual.kernel, problem.residual, self.ridge, factor=self.dual.factor)
        return KernelSystem(problem, dual, self.memory)

    # -- kernels of other inputs -----------------------------------------------------------------

    def _flat(self, cross: Tensor) -> Tensor:
        """A kernel (T, C, N, C) or (T, N) as rows of K̃'s length."""
        return cross.reshape(-1, len(self.kernel))

    def _parts(self, x: Inputs) -> Iterator[Inputs]:
        """As many examples at a time as the memory lets K(x, X) and what is made of it be."""
        row = len(self.kernel) * (1 if self._apart else self.c) * (self.function.dtype.itemsize + 3 * 8)
        size = max(1, int(SHARE * parse_bytes(self.memory, self.function.device)) // row)
        return split(x, size)

    def kernel_to_train(self, x: Inputs) -> Iterator[Tensor]:
        """K̃(x, X) in as many parts as the memory budget asks for; one part is kept."""
        return (cross for cross, _ in self._to_train(x, own=False))

    def _to_train(self, x: Inputs, own: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
        """K̃(x, X) part by part, and K(x_i, x_i) with it if that is wanted."""
        names, features, train = hash_examples(x), self.problem.basis, self.problem.examples
        if (known := self._known.find(names)) is not None:
            yield known, features.own(x, self.memory) if own else None
            return
        for part in self._parts(x):
            alone: Tensor | None = None
            if own:
                cross, alone = features.cross_and_own(part, train, self.memory)
            else:
                cross = features.cross(part, train, self.memory)
            if (w := self.problem.weights) is not None:
                cross = cross.double() * (w[:, 0] if self._apart else w)
            if len(cross) == len(names):
                self._known.keep(names, cross)
            yield cross, alone

    def predicted(self, x: Inputs) -> Tensor | None:
        """K̃(x, X) β by a kernel that is kept, (T, C); ``None`` where it is not."""
        known = self._known.find(hash_examples(x))
        return None if known is None else self.mean(known)

    def mean(self, cross: Tensor) -> Tensor:
        """K̃(x, X) β, (T, C)."""
        beta = self.beta.reshape(len(self.kernel), -1)
        return (self._flat(cross).to(beta) @ beta).view(-1, self.c)

    def covariance(self, x: Inputs, joint: bool = False) -> Tensor:
        """K(x,x) − VᵀV with V = L⁻¹ K̃(X,x)."""
        return self.between(x, x) if joint else self._of_outputs(self._blocks(x))

    def shared_variance(self, x: Inputs) -> Tensor | None:
        """The variances of one output for all of them."""
        return self._blocks(x)[:, 0, 0].clamp_min(0) if self._apart else None

    def _blocks(self, x: Inputs) -> Tensor:
        """Covariances (T, C, C), of shared kernels variances (T, 1, 1)."""
        found = []
        for cross, own in self._to_train(x, own=True):
            factor = self.dual.factor
            half = torch.linalg.solve_triangular(factor, self._flat(cross).to(factor).T, upper=False)
            each = half.view(len(half), len(cross), -1)
            explained = torch.einsum("mtc,mtd->tcd", each, each)
            assert own is not None
            found.append(own.to(explained).view(len(cross), *explained.shape[1:]) - explained)
        return torch.cat(found)

    def _of_outputs(self, blocks: Tensor) -> Tensor:
        """Covariances (T, C, C); of shared kernels from variances (T, 1, 1), by rounding below 0 at times."""
        if not self._apart:
            return blocks
        eye = torch.eye(self.c, dtype=blocks.dtype, device=blocks.device)
        return blocks.clamp_min(0) * eye

    def between(self, x1: Inputs, x2: Inputs) -> Tensor:
        """K(x1,x2) − K̃(x1,X) M K̃(X,x2)."""
        found = self.covariances(x1, x2)
        if not self._apart:
            return found
        return apart(found, self.c)

    def covariances(self, x1: Inputs, x2: Inputs) -> Tensor:
        """As ``between``, and of a kernel that all outputs share without them, (T, S)."""
        second = torch.cat([self._flat(cross) for cross in self.kernel_to_train(x2)]).to(self.kernel)
        solved, same = self.dual.solve(second.T), x1 is x2
        each = [second] if same else [self._flat(cross).to(solved) for cross in self.kernel_to_train(x1)]
        first = torch.cat([rows @ solved for rows in each])
        features, examples = self.problem.basis, self.problem.basis.examples
        if same:
            kernel = features.kernel(examples(x1), self.memory).double()
        else:
            kernel = features.cross(x1, examples(x2), self.memory).double()
        return kernel - first.view(kernel.shape)

    def cross(self, x: Inputs) -> Iterator[Tensor]:
        """K̃(x,X) M of as many examples at a time as the memory budget allows, (t, C, N, C) or (t, N)."""
        return map(self.dual.cross, self.kernel_to_train(x))

    def effects(self, x: Inputs, e: Tensor) -> Iterator[Tensor]:
        """From K̃(x,X) M itself."""
        form = "tn,nd->ntd" if self._apart else "tcnd,nd->ntc"
        for part in self.cross(x):
            yield torch.einsum(form, part, e.to(part))

    def paired(self, x: Inputs, at: Tensor) -> Tensor:
        """From K̃(x,X) M itself."""
        begin, found = 0, []
        for part in self.cross(x):
            place = torch.arange(len(part), device=part.device)
            own = at[begin : begin + len(part)].to(part.device)
            found.append(part[place, own][:, None, None] if self._apart else part[place, :, own])
            begin += len(part)
        return torch.cat(found).double()

    def reach(self, e: Tensor) -> Tensor:
        """By K̃M = I − ρM."""
        blocks = -self.ridge * self.dual.inverse
        if self._apart:
            blocks.diagonal().add_(1)
            return blocks.square().sum(0) * e.square().sum(1)
        change = torch.einsum("tcnd,nd->ntc", blocks.view(self.n, self.c, self.n, self.c), e)
        change.diagonal(dim1=0, dim2=1).add_(e.T)
        return change.square().sum((1, 2))

    # -- leave-one-out ---------------------------------------------------------------------------

    def inverse_blocks(self) -> Tensor:
        """M_ii, (N, C, C)."""
        return self.dual.inverse_blocks()

    def loo_residuals(self) -> Tensor:
        """e_i = (M_ii)⁻¹ β_i, (N, C)."""
        return self.dual.loo_residuals()

    def loo_variances(self) -> Tensor:
        """Cov[f(x_i)] without example i; of one output where they share it, (N, 1, 1)."""
        if not self._apart:
            return super().loo_variances()
        found = (1 / self.dual.inverse.diagonal() / self.ridge - 1)[:, None, None]
        w = self.problem.weights
        return found if w is None else found / w[:, :1, None].square()

    def columns(self, index: Tensor) -> Tensor:
        """M_i· of some examples, (k, C, N·C)."""
        kernel, c = self.dual.kernel, self.c
        rows = (index[:, None] * c + torch.arange(c, device=index.device)).flatten()
        unit = unit_columns(len(kernel), rows, kernel)
        return self.dual.solve(unit).T.reshape(len(index), c, len(kernel))

    def diagonal(self) -> Tensor:
        """The diagonal of K̃ as it is without equations on outputs, (N·C,)."""
        own, problem = self.dual.kernel.diagonal().clamp_min(0), self.problem
        return own if problem.held is None else own + problem.weighed(problem.explained()).square().sum(1)

    def known(self) -> tuple[Tensor, dict[str, int]]:
        """K itself, (N, C, N, C), and where each example is; examples with missing targets are left out."""
        n, c, w = self.n, self.c, self.problem.weights
        kernel, whole = self.dual.kernel, torch.ones(n, dtype=torch.bool)
        if w is not None:
            inverse = torch.where(w > 0, 1 / w, 0.0).reshape(-1)
            kernel, whole = kernel * inverse[:, None] * inverse, (w > 0).all(1)
        keys = {key: i for i, key in enumerate(hash_examples(self.x)) if bool(whole[i])}
        return kernel.view(n, c, n, c), keys


def kernel_fits(function: Functional, size: int, memory: Memory) -> bool:
    """Whether a kernel of so many rows can be formed and solved with."""
    # the kernel in its own type and in float64, K + ρI, its factor and its inverse
    return 5 * 8 * size**2 <= 0.5 * parse_bytes(memory, function.device)


def whitened_kernel(kernel: Tensor, problem: Problem) -> Tensor:
    """K̃ = diag(w) K diag(w) in float64."""
    # kernel (N, C, N, C), or (N, N) where the outputs share it
    if problem.basis.shared:
        w = None if problem.weights is None else problem.weights[:, 0]
        return kernel if w is None else kernel * w[:, None] * w
    size = problem.n * problem.c
    square = kernel.reshape(size, size).double()
    if problem.weights is None:
        return square
    w = problem.weights.reshape(-1)
    return square.mul_(w[:, None]).mul_(w)


def _kernel(problem: Problem, before: KernelSystem | None, memory: Memory) -> tuple[Tensor, dict[str, int]]:
    """K(X,X), (N, C, N, C), with what is known of examples that came before; and what it took."""
    function, x, n = problem.function, problem.x, problem.n
    work = {"examples differentiated": n, "examples known": 0, "factorizations": 1}
    if before is None:
        return gram(function, x, form="full", memory=memory), work
    kernel, places = before.known()
    found = torch.tensor([places.get(key, -1) for key in hash_examples(x)], device=function.device)
    old, new = (found >= 0).nonzero()[:, 0], (found < 0).nonzero()[:, 0]
    if not len(old):
        return gram(function, x, form="full", memory=memory), work
    at = found[old]
    result = kernel.new_empty(n, kernel.shape[1], n, kernel.shape[1])
    # index tensors put their axes first: (old, old, C, C)
    result[old[:, None], :, old] = kernel[at[:, None], :, at]
    if len(new):
        fresh = take(x, new)
        result[new[:, None], :, new] = _pairs(gram(function, fresh, form="full", memory=memory).double())
        cross = gram(function, fresh, take(x, old), form="full", memory=memory).double()
        result[new[:, None], :, old] = _pairs(cross)
        result[old[:, None], :, new] = _pairs(cross.permute(2, 3, 0, 1))
        work["examples differentiated"] = n + len(new)  # the new ones with themselves, then with the old
    else:
        work["examples differentiated"] = 0
    return result, {**work, "examples known": len(old)}


def _pairs(kernel: Tensor) -> Tensor:
    """(N, C, M, C) as (N, M, C, C)."""
    return kernel.permute(0, 2, 1, 3)
