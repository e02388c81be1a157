"""Iterative solvers in distributed runs: one process iterates, all share the products.

How often a solver multiplies depends on its residuals, and those on the last bits of small decompositions,
which another number of threads, or another machine, rounds differently. If all processes iterated, one could
stop while another goes on. So the first process alone decides.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linnet.curvatures.ggn import SummedOperator
from linnet.distributed import all_same, gathered, sum_numbers
from linnet.linalg.operator import LinearOperator


class _Leading(LinearOperator):
    """The matrix, telling the other processes what is multiplied."""

    def __init__(self, product: SummedOperator) -> None:
        self.product = product
        self.shape, self.dtype, self.device = product.shape, product.dtype, product.device
        self.space = product.space

    def mm(self, v: Tensor) -> Tensor:
        """A v, (P, K) to (P, K)."""
        if v.shape[1] == 0:
            return torch.zeros_like(v)
        sum_numbers([v.shape[1]])
        v = v.contiguous()
        all_same([v])
        return self.product.mm(v)

    @property
    def T(self) -> LinearOperator:
        """Itself."""
        return self


def led(product: SummedOperator, solve: Callable[[LinearOperator], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The solution of a solver, the same on all processes.

    Args:
        product: The matrix.
        solve: From something that multiplies with it to tensors of its type.

    Returns:
        The tensors.

    Example:
        >>> from linnet.curvatures.ggn import GaussNewtonOperator
        >>> from linnet.curvatures.stream import Batches
        >>> from linnet.likelihoods import Gaussian
        >>> from linnet.tangent.functional import Functional
        >>> data = Batches((torch.ones(3, 1), torch.zeros(3, 1)), torch.device("cpu"))
        >>> G = GaussNewtonOperator(Functional(torch.nn.Linear(1, 1, bias=False)), data, Gaussian())
        >>> led(G, lambda matrix: (matrix.mm(torch.ones(1, 1)),))
        (tensor([[3.]]),)
    """
    share = product.data.share
    if share.world == 1:
        return solve(product)
    found: tuple[Tensor, ...] = ()
    if share.rank == 0:
        found = solve(_Leading(product))
        sum_numbers([0])  # columns of the next product: there is none
    else:
        while columns := round(sum_numbers([0])[0]):
            v = torch.empty(product.shape[0], columns, dtype=product.dtype, device=product.device)
            all_same([v])
            product.mm(v)
    shapes = gathered([tuple(t.shape) for t in found])[0]
    if share.rank != 0:
        found = tuple(torch.empty(shape, dtype=product.dtype, device=product.device) for shape in shapes)
    found = tuple(t.contiguous() for t in found)
    all_same(found)
    return found
