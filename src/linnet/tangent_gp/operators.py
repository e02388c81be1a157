"""The two matrices of a tangent Gaussian process as operators, and their preconditioners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.ggn import GaussNewtonOperator, SummedOperator
from linnet.curvatures.stream import Batches
from linnet.fitting.fit_preconditioner import make_preconditioner
from linnet.likelihoods.gaussian import Gaussian
from linnet.linalg.lowrank import LowRank
from linnet.linalg.operator import LinearOperator
from linnet.linalg.random import make_generator
from linnet.linalg.structured import Dense
from linnet.solvers.nystrom import nystrom_preconditioner
from linnet.solvers.pivoted_cholesky import pivoted_cholesky
from linnet.tangent.batch import Inputs, take
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram, own_kernels
from linnet.tangent.jacobian import JacobianOperator, NormalOperator
from linnet.tangent_gp.differences import BatchedDifferences
from linnet.tangent_gp.task import Task, whitened

PRECONDITIONERS = {
    "function": ("auto", "none", "pivoted-cholesky", "nystrom"),
    "parameter": ("auto", "none", "nystrom", "ekfac", "kfac", "diagonal"),
}
RANK = 100  # of pivoted Cholesky and Nyström


class KernelOperator(LinearOperator):
    """K̃ = J̃ J̃ᵀ over a task's data, (N·C) × (N·C): one VJP and one JVP a pass, K̃ is not formed.

    Args:
        function: The network.
        task: The data.

    Attributes:
        jacobian: J.
        passes: Number of products so far.
    """

    def __init__(self, function: Functional, task: Task) -> None:
        self.jacobian = JacobianOperator(function, task.x, task.c)
        self.weights = task.weights.to(function.dtype).reshape(-1, 1)
        size = task.n * task.c
        self.shape = (size, size)
        self.dtype, self.device, self.space = function.dtype, function.device, None
        self.passes = 0

    def mm(self, v: Tensor) -> Tensor:
        """J̃ (J̃ᵀ v): (N·C, K) to (N·C, K)."""
        self.passes += 1
        return self.weights * self.jacobian.mm(self.pull(v))

    def pull(self, v: Tensor) -> Tensor:
        """J̃ᵀ v: (N·C, K) to (P, K)."""
        return self.jacobian.T.mm(self.weights * v)

    @property
    def T(self) -> LinearOperator:
        """Itself."""
        return self


def stored_kernel(function: Functional, task: Task, memory: str | int | None) -> Dense:
    """K̃ as a matrix in the network's own precision.

    Args:
        function: The network.
        task: The data.
        memory: Budget.

    Returns:
        The operator.
    """
    size = task.n * task.c
    w = task.weights.to(function.dtype).reshape(-1)
    kernel = gram(function, task.x, form="full", memory=memory).reshape(size, size)
    return Dense(kernel.to(function.dtype).mul_(w[:, None]).mul_(w), name="tangent kernel")


def pair_of(function: Functional, task: Task) -> tuple[Inputs, Tensor]:
    """The inputs of the whitened network.

    Args:
        function: The network.
        task: The data.

    Returns:
        (x, w).
    """
    return task.x, task.weights.to(function.dtype)


def whitened_network(function: Functional) -> Functional:
    """The network in units of its noise; made once.

    Args:
        function: The network.

    Returns:
        f̃(x, w).
    """
    if "whitened" not in function.cache:
        function.cache["whitened"] = whitened(function)
    double: Functional = function.cache["whitened"]
    return double


def fisher(
    function: Functional, task: Task, derivative: str, memory: str | int | None = None
) -> SummedOperator:
    """The Fisher matrix J̃ᵀJ̃ = Σ_i J_iᵀ J_i / σ_i² of the observed outputs, one pass over the data a product.

    Args:
        function: The network.
        task: The data.
        derivative: "exact", or "finite-difference" for the directional derivative of the gradient of
            KL(p_θ ‖ p_θ') (Maddox et al. 2021, eq. 5).
        memory: Budget of vectors whose differences run together.

    Returns:
        The operator (P x P).
    """
    zeros = torch.zeros(task.n, task.c, dtype=function.dtype, device=function.device)
    batches = Batches((pair_of(function, task), zeros), function.device)
    network = whitened_network(function)
    if derivative == "finite-difference":
        found = BatchedDifferences(network, batches, Gaussian(variance=1.0))
        found.memory = memory
        return found
    return GaussNewtonOperator(network, batches, Gaussian(variance=1.0))


def precondition(
    name: str,
    operator: LinearOperator,
    data: tuple[Functional, Task],
    ridge: float,
    rank: int,
    seed: int,
) -> LinearOperator | None:
    """An approximation of (A + ρI)⁻¹, up to a factor.

    Args:
        name: One of ``PRECONDITIONERS`` other than "auto".
        operator: A, one of the two matrices.
        data: The network and the task.
        ridge: ρ.
        rank: Of pivoted Cholesky and Nyström; 0 for the usual one.
        seed: Of Nyström.

    Returns:
        The operator, ``None`` for none.
    """
    function, task = data
    rank = min(rank or RANK, operator.shape[0])
    if name == "none":
        return None
    if name == "nystrom":
        return nystrom_preconditioner(operator, ridge, rank, make_generator(seed))
    if name == "pivoted-cholesky":
        factor = _partial_factor(operator, function, task, rank).to(operator.dtype)
        return LowRank.from_factor(factor, diagonal=ridge, name="pivoted Cholesky + ridge").inverse()
    normal = NormalOperator(JacobianOperator(whitened_network(function), pair_of(function, task), task.c))
    return make_preconditioner(name, normal, task.c, ridge)


def _partial_factor(operator: LinearOperator, function: Functional, task: Task, rank: int) -> Tensor:
    """L with L Lᵀ ≈ K̃."""
    if isinstance(operator, Dense):
        matrix = operator.matrix
        return pivoted_cholesky(matrix.diagonal().clamp_min(0), lambda i: matrix[i], rank)
    weights = task.weights.reshape(-1)
    diagonal = own_kernels(function, task.x).diagonal(dim1=1, dim2=2).reshape(-1).double() * weights**2
    rows: dict[int, Any] = {}

    def row(i: int) -> Tensor:
        example, output = divmod(i, task.c)
        if example not in rows:
            one = take(task.x, slice(example, example + 1))
            rows[example] = gram(function, one, task.x, form="full")[0].reshape(task.c, -1)
        found: Tensor = weights[i] * weights * rows[example][output].double()
        return found

    return pivoted_cholesky(diagonal.clamp_min(0), row, rank)
