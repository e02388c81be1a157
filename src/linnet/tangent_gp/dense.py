"""Tangent Gaussian processes by Cholesky factors: K̃ + ρI in function space, J̃ᵀJ̃ + ρI in parameter space.

With prior precision λ, noise scale s and ρ = λ s (Maddox et al. 2021, eq. 2 and 3, with the noise in K̃):

    function space     E[δ] = J̃ᵀ(K̃ + ρI)⁻¹ r̃      λ Cov[f] = K(x,x) − K̃(x,X) (K̃ + ρI)⁻¹ K̃(X,x)
    parameter space    E[δ] = (J̃ᵀJ̃ + ρI)⁻¹ J̃ᵀr̃     λ Cov[f] = ρ J(x) (J̃ᵀJ̃ + ρI)⁻¹ J(x)ᵀ
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from linnet.fitting.dual import DualSystem, Spectrum
from linnet.linalg.factorize import cholesky, eigh
from linnet.memory import parse_bytes
from linnet.tangent.batch import Inputs, batch_size, split, take, tensors_in
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram, own_kernels
from linnet.tangent.hashing import hash_tensors
from linnet.tangent.jacobian import JacobianOperator, jacobian
from linnet.tangent_gp.evidence import Measure, by_primal, from_eigenvalues
from linnet.tangent_gp.task import BATCH, Task

Memory = str | int | None
SHARE = 0.25  # of the budget that a block of Jacobian rows may take


class System(ABC):
    """The solved equations of a task at one ρ.

    Attributes:
        function: The network, of the outputs that have targets.
        task: The data.
        ridge: ρ = λ s.
        work: What was done, counted: examples differentiated, passes over the data.
    """

    function: Functional
    task: Task
    ridge: float
    work: dict[str, int]

    @property
    @abstractmethod
    def delta(self) -> Tensor:
        """The posterior mean E[δ], (P,)."""

    @abstractmethod
    def covariance(self, x: Inputs, joint: bool) -> Tensor:
        """The posterior covariance λ Cov[f(x)], (T, C, C), or (T, C, T, C) between examples."""

    @abstractmethod
    def spread(self, v: Tensor) -> Tensor:
        """The posterior covariance of the weights, λ Cov[δ] v for columns v (P, K)."""

    @property
    @abstractmethod
    def measure(self) -> Measure:
        """The spectrum that the evidence is made of."""

    @abstractmethod
    def at(self, ridge: float) -> System:
        """The same equations at another ρ, with all that does not depend on it."""

    @property
    @abstractmethod
    def certificate(self) -> float:
        """The relative residual of the equations."""

    def same_inputs(self, task: Task) -> bool:
        """Whether another task has these very inputs, and noise.

        Args:
            task: The other task.

        Returns:
            Whether its matrices are these.
        """
        mine = self.task
        return torch.equal(mine.weights, task.weights) and example_keys(mine.x) == example_keys(task.x)

    @property
    def squared(self) -> float:
        """‖r̃‖²."""
        return float((self.task.residual**2).sum())


class FunctionDense(System):
    """The (N·C) × (N·C) equations (K̃ + ρI) β = r̃, in float64.

    Args:
        function: The network.
        task: The data.
        dual: The solved equations.
        memory: Budget of kernels formed later.
        work: What it took.
    """

    def __init__(
        self, function: Functional, task: Task, dual: DualSystem, memory: Memory, work: dict[str, int]
    ) -> None:
        self.function, self.task, self.dual, self.memory = function, task, dual, memory
        self.ridge, self.work = dual.ridge, work

    @classmethod
    def solve(
        cls, function: Functional, task: Task, ridge: float, memory: Memory, before: System | None
    ) -> FunctionDense:
        """Form the kernel, whiten it and solve.

        Args:
            function: The network.
            task: The data.
            ridge: ρ.
            memory: Budget.
            before: The solved task before, whose kernel is used for examples that come again.

        Returns:
            The system.
        """
        known = before if isinstance(before, FunctionDense) else None
        if known is not None and known.same_inputs(task):
            factor = known.dual.factor if ridge == known.ridge else None
            dual = DualSystem(known.dual.kernel, task.residual, ridge, factor=factor)
            work = {"examples differentiated": 0, "examples known": task.n}
            return cls(function, task, dual, memory, {**work, "factorizations": int(factor is None)})
        kernel, work = _kernel(function, task.x, known, memory)
        size = task.n * task.c
        w = task.weights.reshape(-1)
        # K̃ = diag(w) K diag(w)
        scaled = kernel.reshape(size, size).double().mul_(w[:, None]).mul_(w)
        return cls(function, task, DualSystem(scaled, task.residual, ridge), memory, work)

    @cached_property
    def delta(self) -> Tensor:
        """J̃ᵀβ."""
        cotangents = (self.task.weights * self.dual.beta).to(self.function.dtype)
        transposed = JacobianOperator(self.function, self.task.x, self.task.c).T
        return transposed.mv(cotangents.reshape(-1))

    def covariance(self, x: Inputs, joint: bool) -> Tensor:
        """K(x,x) − VᵀV with V = L⁻¹ K̃(X,x)."""
        c, size = self.task.c, self.task.n * self.task.c
        if joint:
            halves = torch.cat([v for v in self._halves(x)], 1)
            own = gram(self.function, x, form="full", memory=self.memory).double()
            explained = (halves.T @ halves).reshape(own.shape)
        else:
            parts = [v.reshape(size, -1, c) for v in self._halves(x)]
            own = own_kernels(self.function, x, self.memory).double()
            explained = torch.cat([torch.einsum("mtc,mtd->tcd", v, v) for v in parts])
        return own - explained

    def _halves(self, x: Inputs) -> list[Tensor]:
        """V of some examples at a time, (N·C, t·C)."""
        size = self.task.n * self.task.c
        row = size * self.task.c * (self.function.dtype.itemsize + 3 * 8)
        block = max(1, int(SHARE * parse_bytes(self.memory, self.function.device)) // row)
        halves = []
        for part in split(x, block):
            cross = gram(self.function, part, self.task.x, form="full", memory=self.memory)
            rows = cross.reshape(-1, size).double() * self.task.weights.reshape(-1)
            halves.append(torch.linalg.solve_triangular(self.dual.factor, rows.T, upper=False))
        return halves

    def spread(self, v: Tensor) -> Tensor:
        """V − J̃ᵀ (K̃ + ρI)⁻¹ J̃ v."""
        jacobian_of = JacobianOperator(self.function, self.task.x, self.task.c)
        w = self.task.weights.reshape(-1, 1)
        solved = self.dual.solve(w * jacobian_of.mm(v).double())
        return v - jacobian_of.T.mm((w * solved).to(v))

    @cached_property
    def measure(self) -> Measure:
        """The eigenvalues of K̃."""
        spectrum: Spectrum = self.dual.spectrum
        task = self.task
        masses = spectrum.coordinates**2
        return from_eigenvalues(spectrum.values, masses, self.squared, task.count, task.log_noise)

    def at(self, ridge: float) -> FunctionDense:
        """Another Cholesky factor of the same kernel."""
        spectrum = self.dual._spectrum
        dual = DualSystem(self.dual.kernel, self.task.residual, ridge, spectrum=spectrum)
        return FunctionDense(self.function, self.task, dual, self.memory, dict(self.work))

    def extended(self, more: Task, joined: Task) -> FunctionDense:
        """More data, by a bordered Cholesky factor.

        Args:
            more: The new data.
            joined: Old and new data.

        Returns:
            The system of both.
        """
        cross = gram(self.function, self.task.x, more.x, form="full", memory=self.memory).double()
        corner = gram(self.function, more.x, form="full", memory=self.memory).double()
        w1, w2 = self.task.weights, more.weights
        dual = self.dual.extended(
            cross * w1[:, :, None, None] * w2, corner * w2[:, :, None, None] * w2, more.residual
        )
        work = {"examples differentiated": more.n + self.task.n, "factorizations": 1}
        return FunctionDense(self.function, joined, dual, self.memory, work)

    def known(self) -> tuple[Tensor, dict[str, int]]:
        """K itself, (N, C, N, C), and where each example is; examples with missing targets are left out."""
        w = self.task.weights.reshape(-1)
        inverse = torch.where(w > 0, 1 / w, 0.0)
        whole = (self.task.weights > 0).all(1)
        kernel = self.dual.kernel * inverse[:, None] * inverse
        keys = {key: i for i, key in enumerate(example_keys(self.task.x)) if bool(whole[i])}
        return kernel.view(self.task.n, self.task.c, self.task.n, self.task.c), keys

    @property
    def certificate(self) -> float:
        """‖(K̃ + ρI)β − r̃‖ / ‖r̃‖."""
        return self.dual.certificate()


def example_keys(x: Inputs) -> list[str]:
    """A fingerprint of each example.

    Args:
        x: N examples.

    Returns:
        N texts, equal for equal examples.

    Example:
        >>> a, b, c = example_keys(torch.tensor([[1.0], [2.0], [1.0]]))
        >>> a == c, a == b
        (True, False)
    """
    return [hash_tensors(tensors_in(take(x, slice(i, i + 1)))) for i in range(batch_size(x))]


def _kernel(
    function: Functional, x: Inputs, before: FunctionDense | None, memory: Memory
) -> tuple[Tensor, dict[str, int]]:
    """K(X,X), (N, C, N, C), with what is known of examples that came before; and what it took."""
    n = batch_size(x)
    work = {"examples differentiated": n, "examples known": 0, "factorizations": 1}
    if before is None:
        return gram(function, x, form="full", memory=memory), work
    kernel, places = before.known()
    found = torch.tensor([places.get(key, -1) for key in example_keys(x)], device=function.device)
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


class ParameterDense(System):
    """The P × P equations (J̃ᵀJ̃ + ρI) δ = J̃ᵀr̃, in float64.

    Args:
        function: The network.
        task: The data.
        matrices: J̃ᵀJ̃ (P, P) and J̃ᵀr̃ (P,).
        ridge: ρ.
        memory: Budget of later blocks.
        work: What it took.
    """

    def __init__(
        self,
        function: Functional,
        task: Task,
        matrices: tuple[Tensor, Tensor],
        ridge: float,
        memory: Memory,
        work: dict[str, int],
    ) -> None:
        self.function, self.task, self.memory, self.work = function, task, memory, work
        self.normal, self.right = matrices
        self.ridge = ridge
        self._spectrum: tuple[Tensor, Tensor] | None = None
        damped = self.normal.clone()
        damped.diagonal().add_(ridge)
        self.factor = cholesky(damped, "Fisher matrix + ridge")

    @classmethod
    def solve(
        cls, function: Functional, task: Task, ridge: float, memory: Memory, before: System | None
    ) -> ParameterDense:
        """Sum J̃ᵀJ̃ over the data and solve.

        Args:
            function: The network.
            task: The data.
            ridge: ρ.
            memory: Budget.
            before: The solved task before; with the same examples and noise, its matrix is taken.

        Returns:
            The system.
        """
        work = {"examples differentiated": task.n, "factorizations": 1}
        if isinstance(before, ParameterDense) and before.same_inputs(task):
            cotangents = (task.weights * task.residual).to(function.dtype).reshape(-1)
            right = JacobianOperator(function, task.x, task.c).T.mv(cotangents).double()
            return cls(function, task, (before.normal, right), ridge, memory, work)
        p = function.space.dim
        normal = torch.zeros(p, p, dtype=torch.float64, device=function.device)
        right, start = normal.new_zeros(p), 0
        for part, rows in jacobian_rows(function, task.x, task.c, memory):
            stop = start + batch_size(part)
            scaled = rows.double() * task.weights[start:stop].reshape(-1, 1)
            normal.addmm_(scaled.T, scaled)
            right += scaled.T @ task.residual[start:stop].reshape(-1)
            start = stop
        return cls(function, task, (normal, right), ridge, memory, work)

    @cached_property
    def _solution(self) -> Tensor:
        """δ in float64."""
        return torch.cholesky_solve(self.right[:, None], self.factor)[:, 0]

    @property
    def delta(self) -> Tensor:
        """(J̃ᵀJ̃ + ρI)⁻¹ J̃ᵀr̃."""
        return self._solution.to(self.function.dtype)

    def covariance(self, x: Inputs, joint: bool) -> Tensor:
        """ρ VᵀV with V = L⁻¹ J(x)ᵀ."""
        halves = []
        for _, rows in jacobian_rows(self.function, x, self.task.c, self.memory):
            halves.append(torch.linalg.solve_triangular(self.factor, rows.double().T, upper=False))
        v = torch.cat(halves, 1)
        n, c = batch_size(x), self.task.c
        if joint:
            return self.ridge * (v.T @ v).view(n, c, n, c)
        each = v.view(v.shape[0], n, c)
        return self.ridge * torch.einsum("ptc,ptd->tcd", each, each)

    def spread(self, v: Tensor) -> Tensor:
        """ρ (J̃ᵀJ̃ + ρI)⁻¹ v."""
        return (self.ridge * torch.cholesky_solve(v.double(), self.factor)).to(v)

    @cached_property
    def measure(self) -> Measure:
        """The eigenvalues of J̃ᵀJ̃, which are those of K̃ but for zeros."""
        if self._spectrum is None:
            self._spectrum = eigh(self.normal, "Fisher matrix")
        values, vectors = self._spectrum
        values, masses = by_primal(values.clamp_min(0), (vectors.T @ self.right) ** 2, self.squared)
        return from_eigenvalues(values, masses, self.squared, self.task.count, self.task.log_noise)

    def at(self, ridge: float) -> ParameterDense:
        """Another Cholesky factor of the same matrix."""
        matrices = self.normal, self.right
        other = ParameterDense(self.function, self.task, matrices, ridge, self.memory, dict(self.work))
        other._spectrum = self._spectrum
        return other

    @property
    def certificate(self) -> float:
        """‖(J̃ᵀJ̃ + ρI)δ − J̃ᵀr̃‖ / ‖J̃ᵀr̃‖."""
        left = self.normal @ self._solution + self.ridge * self._solution - self.right
        return float(left.norm() / self.right.norm().clamp_min(torch.finfo(left.dtype).tiny))


def jacobian_rows(
    function: Functional, x: Inputs, outputs: int, memory: Memory
) -> Iterator[tuple[Inputs, Tensor]]:
    """J(x), as many examples at a time as the memory budget allows.

    Args:
        function: The network.
        x: N examples.
        outputs: C.
        memory: Budget.

    Yields:
        A block of n examples and its rows (n·C, P).
    """
    row = outputs * function.space.dim * (2 * function.dtype.itemsize + 8)
    budget = int(SHARE * parse_bytes(memory, function.device))
    for part in split(x, max(1, min(BATCH, budget // row))):
        yield part, jacobian(function, part, memory).flatten(0, 1)
