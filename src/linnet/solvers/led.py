"""Iterative solvers on several processes: one process iterates, all share the products.

How often a solver multiplies depends on its residuals, and those on the last bits of small decompositions,
which another number of threads, or another machine, rounds differently. If all processes iterated, one could
stop while another goes on. So the first process alone decides, and the result is the same on all to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from linnet.distributed import Share, all_same, current, of_first, sum_numbers, taking
from linnet.linalg.operator import LinearOperator

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


class _Leading(LinearOperator):
    """The matrix, telling the other processes what is multiplied."""

    def __init__(self, matrix: LinearOperator, share: Share) -> None:
        self.matrix, self.share = matrix, share
        self.shape, self.dtype, self.device, self.space = (
            matrix.shape, matrix.dtype, matrix.device, matrix.space
        )  # fmt: skip

    def mm(self, v: Tensor) -> Tensor:
        """A v, (n, K) to (n, K)."""
        if v.shape[1] == 0:
            return torch.zeros_like(v)
        sum_numbers([v.shape[1]])
        v = v.contiguous()
        all_same([v])
        with taking(self.share):
            return self.matrix.mm(v)

    @property
    def T(self) -> LinearOperator:
        """Itself."""
        return self


def led(matrix: LinearOperator, solve: Callable[[LinearOperator], R], share: Share) -> R:
    """The solution of a solver, the same on all processes."""
    if share.world == 1:
        return solve(matrix)
    found: R | None = None
    if share.rank == 0:
        with taking(Share()):  # what the solver does between products it does alone
            found = solve(_Leading(matrix, share))
        sum_numbers([0])  # columns of the next product: there is none
    else:
        while columns := round(sum_numbers([0])[0]):
            v = torch.empty(matrix.shape[0], columns, dtype=matrix.dtype, device=matrix.device)
            all_same([v])
            matrix.mm(v)
    return of_first(found, matrix.device)


def one_leads(solver: F) -> F:
    """A solver that the first process leads inside ``linnet.distributed.sharing``."""

    @functools.wraps(solver)
    def solved(operator: LinearOperator, *args: Any, **kwargs: Any) -> Any:
        share = current()
        if share.world == 1:
            return solver(operator, *args, **kwargs)
        return led(operator, lambda matrix: solver(matrix, *args, **kwargs), share)

    return solved  # type: ignore[return-value]
