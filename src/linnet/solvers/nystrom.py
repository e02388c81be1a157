"""Randomized Nyström approximation of a positive semi-definite operator, and the preconditioner from it.

Frangella, Tropp and Udell 2023, "Randomized Nyström preconditioning" (SIAM J. Matrix Anal. Appl. 44, 718).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg.factorize import cholesky, require_finite
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.operator import LinearOperator, require_square
from linnet.linalg.random import Seed, normal
from linnet.params import integer, number
from linnet.solvers.solution import by_first_process


def nystrom(operator: LinearOperator, rank: int, seed: Seed = None) -> LowRankMatrix:
    """The approximation (A Ω)(Ωᵀ A Ω)⁻¹(A Ω)ᵀ = U diag(λ) Uᵀ for a random Ω (algorithm 2.1).

    Costs one product of A with ``rank`` vectors. Never larger than A, and exact when A has at most this
    rank.

    Args:
        operator: A, symmetric positive semi-definite (n x n).
        rank: Number of random vectors.
        seed: Seed or generator.

    Returns:
        U diag(λ) Uᵀ.

    Raises:
        InputError: The rank is not between 1 and n, or A is not square.
        NumericalError: A gives NaN or Inf, or is not positive semi-definite.

    Example:
        >>> from linnet.linalg import Diagonal
        >>> nystrom(Diagonal(torch.tensor([3.0, 0.0, 0.0])), rank=1, seed=0).trace().round()
        tensor(3.)
    """
    basis, values = _decompose(operator, rank, seed)
    return LowRankMatrix(basis, values, space=operator.space, name="Nyström approximation")


def nystrom_preconditioner(
    operator: LinearOperator, damping: float, rank: int, seed: Seed = None
) -> LowRankMatrix:
    """A preconditioner for A + μ I: its approximate inverse, up to a factor.

    P⁻¹ = (λₗ + μ) U (Λ + μ I)⁻¹ Uᵀ + (I − U Uᵀ) with the smallest kept eigenvalue λₗ (their section 5). When
    the eigenvalues of A beyond the rank are below μ, the preconditioned condition number is a small
    constant.

    Args:
        operator: A without its damping, symmetric positive semi-definite (n x n).
        damping: μ, positive.
        rank: Number of random vectors.
        seed: Seed or generator.

    Returns:
        P⁻¹, for the argument ``preconditioner`` of :func:`~linnet.solvers.cg` with ``A.damped(μ)``.

    Raises:
        InputError: An argument is out of range.

    Example:
        >>> from linnet.linalg import Diagonal
        >>> A = Diagonal(torch.tensor([99.0, 0.0, 0.0]))
        >>> nystrom_preconditioner(A, 1.0, rank=1, seed=0).diagonal().round()
        tensor([1., 1., 1.])
    """
    mu = number("damping", damping, above=0, remedy="pass the μ of A.damped(μ), such as 0.1")
    basis, values = _decompose(operator, rank, seed)
    ratios = (values.min() + mu) / (values + mu)
    return LowRankMatrix(basis, ratios, rest=1.0, space=operator.space, name="Nyström preconditioner")


@by_first_process
def _decompose(operator: LinearOperator, rank: int, seed: Seed) -> tuple[Tensor, Tensor]:
    """U (n, rank) and λ (rank,), with the small shift ν that keeps the Cholesky factor stable."""
    n = require_square(operator, factored=True).shape[0]
    rank = integer("rank", rank, 1, n, f"pass rank={min(n, 50)}")
    test = torch.linalg.qr(normal((n, rank), seed, operator.dtype, operator.device)).Q  # Ω
    sketch = operator.mm(test)  # Y = A Ω
    require_finite(sketch, "the product of the operator with random vectors")
    shift = torch.finfo(sketch.dtype).eps * float(sketch.norm())  # ν
    shifted = sketch + shift * test
    gram = test.T @ shifted
    factor = cholesky((gram + gram.T) / 2, "the Nyström core")  # Ωᵀ Y = L Lᵀ
    half = torch.linalg.solve_triangular(factor, shifted.T, upper=False).T  # B = Y L⁻ᵀ
    u, s, _ = torch.linalg.svd(half, full_matrices=False)
    return u, (s**2 - shift).clamp(min=0)


# -- pivoted cholesky ------------------------------------------------------------------------------
# The partial Cholesky factor of a kernel, its rows chosen greedily (Harbrecht, Peters, Schneider 2012).


def pivoted_cholesky(
    diagonal: Tensor, row: Callable[[int], Tensor], rank: int, tolerance: float = 0.0
) -> Tensor:
    """L with L Lᵀ ≈ K, from the diagonal of K and ``rank`` of its rows, (n, r)."""
    # diagonal (n,), row (n,)
    # Each step takes the row whose diagonal entry is the least explained.
    #
    # Source: Gardner et al. 2018, section 4.1, use it as the preconditioner (L Lᵀ + σ²I)⁻¹ of a Gaussian
    # process.
    rank = integer("rank", rank)
    if not bool((diagonal >= 0).all()):
        raise InputError("the diagonal has a negative entry", "that of a kernel", "check that K is symmetric")
    left = diagonal.double().clone()
    total = float(left.sum())
    factor = left.new_zeros(len(left), min(rank, len(left)))
    rounding = 100 * torch.finfo(diagonal.dtype).eps * float(left.max()) if len(left) else 0.0
    for k in range(factor.shape[1]):
        pivot = int(left.argmax())
        if float(left[pivot]) <= rounding or float(left.sum()) <= tolerance * total:
            return factor[:, :k]
        # column k of L: what is left of row i, over the root of its pivot
        column = row(pivot).double() - factor[:, :k] @ factor[pivot, :k]
        factor[:, k] = column / left[pivot].sqrt()
        left = (left - factor[:, k] ** 2).clamp_min(0)
        left[pivot] = 0
    return factor
