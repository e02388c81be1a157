"""Variances and the evidence of a linear model from Krylov spaces, found once for all examples.

Variances come from a cache of r directions, found once by block Lanczos,

    λ Cov[f] = K(x,x) − J(x) M Mᵀ J(x)ᵀ,

    function space    M = J̃ᵀ Q (H + ρI)^(−½)           with H = Qᵀ K̃ Q  (LOVE: Pleiss et al. 2018)
    parameter space   M = U (s / (s + ρ))^(½)          with U s Uᵀ the Nyström form of J̃ᵀJ̃

where K(x,x) is exact, so that what the cache leaves out makes the variance larger, never smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.linalg.operator import LinearOperator
from linnet.linear.evidence import Measure, by_matrix, by_quadrature
from linnet.linear.formed_rows import FormedRows
from linnet.linear.iteration import CGSettings
from linnet.linear.operators import KernelOperator
from linnet.linear.problem import Memory, Problem
from linnet.memory import parse_bytes
from linnet.params import integer, number
from linnet.solvers.lanczos import krylov
from linnet.tangent.batch import Inputs
from linnet.tangent.gram import gram, own_kernels

RANK = 100  # directions of the variance cache, and rank of a preconditioner: LOVE's cache is of this order
FLOOR = 0.01  # of ρ: what the cache leaves out of the trace is not worth more directions
SMALL = 256  # equations up to which the whole matrix is decomposed, in less time than PROBES · NODES products
PROBES, NODES = 16, 40  # random vectors and Lanczos steps of the evidence, whose standard error is told
SHARE = 0.5  # of the budget that the cache may take
ROWS = 1 << 16  # of a panel rotated at once


@dataclass(frozen=True)
class Iteration:
    """Settings of conjugate gradients beside Krylov spaces."""

    # `"lanczos"` for the cache, `"exact"` for a solve for each example and output
    variance: str = "lanczos"
    derivative: str = "exact"  # ``"exact"`` or ``"finite-difference"`` products in parameter space
    preconditioner: str = "auto"  # its name
    rank: int = 0  # directions of the variance cache and rank of the preconditioner; 0 for the usual ones
    tolerance: float = 1e-6  # relative residual of conjugate gradients
    max_steps: int = 2000  # largest number of their steps
    seed: int = 0  # seed of everything random

    def __post_init__(self) -> None:
        """Raise on values of the wrong kind."""
        number("tolerance", self.tolerance, above=0, remedy="leave tolerance= out for 1e-6")
        for name, least in (("rank", 0), ("max_steps", 1), ("seed", 0)):
            integer(name, getattr(self, name), least)

    def settings(self, unknowns: int) -> CGSettings:
        """Those of conjugate gradients."""
        rank = min(self.rank or RANK, unknowns)
        return CGSettings(self.tolerance, self.max_steps, rank, preconditioner=self.preconditioner)


@dataclass(frozen=True)
class Panel:
    """The directions of the variance cache."""

    columns: Tensor  # B (P, r), with M Mᵀ = B diag(weights) Bᵀ
    values: Tensor  # ritz values h, or Nyström values s, (r,)
    primal: bool  # which of the two
    left_out: float  # tr J̃ᵀJ̃ less what is in the cache; no eigenvalue that it lacks is larger

    def weights(self, ridge: float) -> Tensor:
        """1/(h + ρ), or s/(s + ρ)."""
        return self.values / (self.values + ridge) if self.primal else 1 / (self.values + ridge)

    def spread(self, v: Tensor, ridge: float) -> Tensor:
        """V − M Mᵀ v for columns v (P, K)."""
        weights = self.weights(ridge).to(v)[:, None]
        return v - self.columns @ (weights * (self.columns.T @ v))

    def covariance(self, problem: Problem, x: Inputs, ridge: float, joint: bool, memory: Memory) -> Tensor:
        """K(x,x) less what the data explain."""
        c, own, halves = problem.c, [], []
        for _, rows in FormedRows(problem.function, x, c, memory, keep=False):
            if not joint:
                each = rows.view(-1, c, rows.shape[1]).double()
                own.append(each @ each.mT)
            halves.append((rows @ self.columns).double() * self.weights(ridge).sqrt())
        b = torch.cat(halves)
        if joint:
            kernel = gram(problem.function, x, form="full", memory=memory).double()
            return kernel - (b @ b.T).view(kernel.shape)
        b = b.view(-1, c, b.shape[1])
        return torch.cat(own) - b @ b.mT


def make_panel(
    operator: LinearOperator, problem: Problem, ridge: float, how: Iteration, memory: Memory
) -> tuple[Panel, int]:
    """The variance cache: as many directions as requested, as fit, or as there is something to find."""
    m, p = problem.jacobian.shape
    primal = operator.space is not None  # J̃ᵀJ̃, which acts on parameters
    room = int(SHARE * parse_bytes(memory, problem.function.device))
    rank = max(2, min(how.rank or RANK, room // (p * problem.function.dtype.itemsize)))
    block = max(1, min(max(problem.c, 4), rank // 2))
    everything = rank >= m
    if everything:  # in parameter space one block more for the null space, one for the Nyström form
        rank = min(p, (-(-m // block) + 2) * block) if primal else m
    own = own_kernels(problem.function, problem.x, memory).diagonal(dim1=1, dim2=2).reshape(-1, 1)
    trace = float(problem.weighed(problem.weighed(own.double())).sum())
    rounding = 10 * torch.finfo(operator.dtype).eps * trace
    enough = math.inf if everything else trace - max(FLOOR * ridge, rounding)
    found = krylov(operator, block, rank, enough, how.seed)
    error = torch.finfo(operator.dtype).eps ** 0.5 if how.derivative == "finite-difference" else None
    values, rotation = found.nystrom(error) if primal else found.ritz()
    columns = _rotated(found.basis, rotation)
    if not primal:
        columns = problem.pull(columns)
    return Panel(columns, values, primal, max(0.0, trace - float(values.sum()))), found.products


def make_measure(
    operator: LinearOperator, problem: Problem, right: Tensor, how: Iteration, memory: Memory
) -> tuple[Measure, int]:
    """The spectrum, in the smaller space, by stochastic Lanczos quadrature where it is large."""
    # right (P,)
    size, primal = problem.n * problem.c, operator.space is not None
    if primal and how.derivative == "exact" and operator.shape[0] >= size:
        operator, primal = KernelOperator(problem), False
    start = right.double() if primal else problem.residual.reshape(-1)
    facts = problem.squared, problem.count, problem.log_noise
    if operator.shape[0] <= SMALL:
        return by_matrix(operator, start, primal, facts), 1
    each = operator.shape[0] * operator.dtype.itemsize * (PROBES + 1)
    room = int(SHARE * parse_bytes(memory, problem.function.device)) // each
    steps = max(2, min(NODES, room, operator.shape[0]))
    return by_quadrature(operator, start, primal, facts, PROBES, steps, how.seed), steps


def _rotated(basis: Tensor, rotation: Tensor) -> Tensor:
    """Q E in the place of Q, some rows at a time."""
    e = rotation.to(basis)
    for start in range(0, basis.shape[0], ROWS):
        basis[start : start + ROWS] = basis[start : start + ROWS] @ e
    return basis
