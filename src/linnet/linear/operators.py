"""K̃ and J̃ᵀJ̃ of a linear model as operators, and their preconditioners."""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.curvatures.ggn import GaussNewtonOperator, SummedOperator
from linnet.curvatures.stream import DEFAULT_BLOCK, Batches
from linnet.distributed import current
from linnet.likelihoods.gaussian import Gaussian
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.operator import LinearOperator
from linnet.linalg.random import make_generator
from linnet.linalg.structured import Dense
from linnet.linear.differences import BatchedDifferences
from linnet.linear.preconditioner import make_preconditioner
from linnet.linear.problem import Memory, Problem, whitened, whitened_inputs
from linnet.solvers.nystrom import nystrom_preconditioner
from linnet.solvers.pivoted_cholesky import pivoted_cholesky
from linnet.tangent.batch import take
from linnet.tangent.gram import gram, own_kernels
from linnet.tangent.jacobian import JacobianOperator, NormalOperator

PRECONDITIONERS = {
    "function": ("auto", "none", "pivoted-cholesky", "nystrom"),
    "parameter": ("auto", "none", "nystrom", "ekfac", "kfac", "diagonal"),
}
RANK = 100  # of pivoted Cholesky and Nyström


class KernelOperator(LinearOperator):
    """K̃ = J̃ J̃ᵀ over the data, (N·C) × (N·C): one VJP and one JVP a pass, K̃ is not formed.

    Args:
        problem: The data.

    Attributes:
        passes: Number of products so far.
    """

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

    @property
    def T(self) -> LinearOperator:
        """Itself."""
        return self


def stored_kernel(problem: Problem, memory: Memory) -> Dense:
    """K̃ as a matrix in the network's own precision.

    Args:
        problem: The data.
        memory: Budget.

    Returns:
        The operator.
    """
    size = problem.n * problem.c
    kernel = gram(problem.function, problem.x, form="full", memory=memory).reshape(size, size)
    kernel = kernel.to(problem.function.dtype)
    return Dense(problem.weighed(problem.weighed(kernel).T), name="tangent kernel")


def fisher(problem: Problem, derivative: str, memory: Memory = None) -> SummedOperator:
    """The Fisher matrix J̃ᵀJ̃ = Σ_i J_iᵀ J_i / σ_i² of the observed outputs, one pass over the data a product.

    Args:
        problem: The data.
        derivative: "exact", or "finite-difference" for the directional derivative of the gradient of
            KL(p_θ ‖ p_θ') (Maddox et al. 2021, eq. 5).
        memory: Budget of vectors whose differences run together.

    Returns:
        The operator (P x P).
    """
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


def precondition(
    name: str, operator: LinearOperator, problem: Problem, ridge: float, rank: int, seed: int
) -> LinearOperator | None:
    """An approximation of (A + ρI)⁻¹, up to a factor.

    Args:
        name: One of ``PRECONDITIONERS`` other than "auto".
        operator: A, one of the two matrices.
        problem: The data.
        ridge: ρ.
        rank: Of pivoted Cholesky and Nyström; 0 for the usual one.
        seed: Of Nyström.

    Returns:
        The operator, ``None`` for none.
    """
    rank = min(rank or RANK, operator.shape[0])
    if name == "none":
        return None
    if name == "nystrom":
        return nystrom_preconditioner(operator, ridge, rank, make_generator(seed))
    if name == "pivoted-cholesky":
        factor = _partial_factor(operator, problem, rank).to(operator.dtype)
        return LowRankMatrix.from_factor(factor, diagonal=ridge, name="pivoted Cholesky + ridge").inverse()
    jacobian = JacobianOperator(whitened(problem.function), whitened_inputs(problem), problem.c)
    return make_preconditioner(name, NormalOperator(jacobian), problem.c, ridge)


def _partial_factor(operator: LinearOperator, problem: Problem, rank: int) -> Tensor:
    """L with L Lᵀ ≈ K̃."""
    if isinstance(operator, Dense):
        matrix = operator.matrix
        return pivoted_cholesky(matrix.diagonal().clamp_min(0), lambda i: matrix[i], rank)
    function, x, c = problem.function, problem.x, problem.c
    diagonal = own_kernels(function, x).diagonal(dim1=1, dim2=2).reshape(-1, 1).double()
    diagonal = problem.weighed(problem.weighed(diagonal))[:, 0]
    rows: dict[int, Tensor] = {}

    def row(i: int) -> Tensor:
        example, output = divmod(i, c)
        if example not in rows:
            one = gram(function, take(x, slice(example, example + 1)), x, form="full")[0].reshape(c, -1)
            rows[example] = problem.weighed(problem.weighed(one.T.double()).T, example).T
        return rows[example][:, output]

    return pivoted_cholesky(diagonal.clamp_min(0), row, rank)
