"""K̃ and J̃ᵀJ̃ of a linear model as operators."""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.curvatures.products import GaussNewtonOperator, SummedOperator
from linnet.curvatures.stream import DEFAULT_BLOCK, Batches
from linnet.distributed import current
from linnet.likelihoods.gaussian import Gaussian
from linnet.linalg.operator import LinearOperator
from linnet.linalg.structured import Dense
from linnet.linear.differences import BatchedDifferences
from linnet.linear.problem import Memory, Problem, whitened, whitened_inputs
from linnet.tangent.gram import gram
from linnet.tangent.jacobian import NormalOperator


class KernelOperator(LinearOperator):
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

    @property
    def T(self) -> LinearOperator:
        """Itself."""
        return self


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
