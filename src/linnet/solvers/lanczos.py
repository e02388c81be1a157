"""Lanczos processes with full reorthogonalization, and extreme eigenpairs.

A symmetric A is projected to a tridiagonal matrix, A V = V T + r eᵀ with orthonormal V (Golub and Van Loan
2013, section 10.1), or to a block tridiagonal one when it acts on a block of vectors at once (section
10.3.6; Golub and Underwood 1977). Every new vector is orthogonalized twice against all earlier ones,
which the textbook recurrence leaves out and floating point needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.linalg.factorize import eigh
from linnet.linalg.operator import LinearOperator, require_fit, require_square
from linnet.linalg.random import Seed, normal
from linnet.params import flag, integer, refuse
from linnet.solvers.cg import checked_limits, status_of
from linnet.solvers.solution import Solution, by_first_process
from linnet.tree import node


@dataclass(frozen=True)
class Tridiagonal:
    """K Lanczos processes of m steps each.

    Args:
        basis: The orthonormal vectors V (m, n, K).
        diagonal: The diagonal of T (m, K).
        offdiagonal: The off-diagonal of T and the norm of the remainder r (m, K).

    Example:
        >>> one = torch.ones(1, 1)
        >>> Tridiagonal(one[None], 2 * one, 0 * one).matrices()
        tensor([[[2.]]])
    """

    basis: Tensor
    diagonal: Tensor
    offdiagonal: Tensor

    def matrices(self) -> Tensor:
        """T of every process.

        Returns:
            (K, m, m).
        """
        beta = self.offdiagonal[:-1].T  # (K, m - 1)
        return self.diagonal.T.diag_embed() + beta.diag_embed(1) + beta.diag_embed(-1)


def tridiagonalize(operator: LinearOperator, start: Tensor, steps: int) -> Tridiagonal:
    """Run K Lanczos processes side by side, with one product A V a step for all of them.

    A process whose vectors span an invariant subspace goes on with zeros, which leaves the leading part of
    its T as it is.

    Args:
        operator: A, symmetric (n x n).
        start: First vectors (n, K), not zero; they are normalized here.
        steps: Number of steps m, at least 1; n if that is less.

    Returns:
        V and T.

    Raises:
        InputError: The shapes do not fit, or ``steps`` is less than 1.

    Example:
        >>> from linnet.linalg import Diagonal
        >>> process = tridiagonalize(Diagonal(torch.tensor([1.0, 3.0])), torch.ones(2, 1), steps=2)
        >>> process.diagonal.round()
        tensor([[2.],
                [2.]])
    """
    require_fit(require_square(operator), start, 2)
    start = start.detach()
    norms = start.norm(dim=0)
    if not bool(((norms > 0) & norms.isfinite()).all()):
        refuse("start", start, "finite columns, none of them zero", "draw them, torch.randn(n, K)")
    steps = min(integer("steps", steps, remedy="pass steps=20"), operator.shape[0])
    basis = start.new_zeros(steps + 1, *start.shape)  # (m + 1, n, K)
    diagonal, offdiagonal = start.new_zeros(2, steps, start.shape[1])  # (m, K) each
    basis[0] = start / norms
    for j in range(steps):
        w = operator.mm(basis[j])
        diagonal[j] = (basis[j] * w).sum(0)
        offdiagonal[j], basis[j + 1] = _normalized(_orthogonalized(w, basis[: j + 1]), w.norm(dim=0))
    return Tridiagonal(basis[:-1], diagonal, offdiagonal)


def _orthogonalized(w: Tensor, basis: Tensor) -> Tensor:
    """The part of each w (n, K) orthogonal to its basis (m, n, K), by classical Gram-Schmidt twice."""
    for _ in range(2):
        w = w - torch.einsum("mnk,mk->nk", basis, torch.einsum("mnk,nk->mk", basis, w))
    return w


def _normalized(w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Norms (K,) and unit vectors (n, K); zero for both where only rounding errors of ``scale`` are left."""
    norms = w.norm(dim=0)
    is_zero = norms <= 10 * torch.finfo(w.dtype).eps * scale
    return torch.where(is_zero, 0.0, norms), torch.where(is_zero, 0.0, w / torch.where(is_zero, 1.0, norms))


@node()
@dataclass(frozen=True)
class Eigenpairs:
    """Some eigenpairs of a symmetric operator.

    Args:
        values: (k,), the wanted end of the spectrum first.
        vectors: (n, k), orthonormal.

    Example:
        >>> Eigenpairs(torch.ones(2), torch.eye(3, 2)).vectors.shape
        torch.Size([3, 2])
    """

    values: Tensor
    vectors: Tensor


@by_first_process
def eigenpairs(
    operator: LinearOperator,
    k: int,
    largest: bool = True,
    tolerance: float = 1e-6,
    max_steps: int | None = None,
    seed: Seed = None,
) -> Solution[Eigenpairs]:
    """The k largest or smallest eigenvalues and their vectors, by block Lanczos with blocks of k vectors.

    A block of k finds eigenvalues that occur up to k times. Costs one product of A with k vectors a step,
    and memory for 2 k vectors a step.

    Args:
        operator: A, symmetric (n x n).
        k: Number of eigenpairs.
        largest: The largest eigenvalues; False for the smallest.
        tolerance: Stop when ‖A v − λ v‖ ≤ tolerance · λ₁ for all k pairs, λ₁ the largest modulus of λ.
        max_steps: Largest number of steps; None for as many as fill the space, ⌈n / k⌉.
        seed: Seed or generator of the start vectors.

    Returns:
        The pairs; ``residual`` is the largest ‖A v − λ v‖ / λ₁.

    Raises:
        InputError: k is not between 1 and n, or a limit is out of range.
        NumericalError: A gives NaN or Inf.

    Example:
        >>> from linnet.linalg import Diagonal
        >>> pairs = eigenpairs(Diagonal(torch.tensor([1.0, 5.0, 5.0])), k=2, seed=0).value
        >>> pairs.values.round()
        tensor([5., 5.])
    """
    n = require_square(operator, factored=True).shape[0]
    k, largest = integer("k", k, 1, n, f"pass k={min(n, 5)}"), flag("largest", largest)
    filled = -(-n // k)  # with this many blocks there is no space for another one
    limit = min(checked_limits(tolerance, max_steps, filled), filled)
    block = torch.linalg.qr(normal((n, k), seed, operator.dtype, operator.device)).Q
    basis, products = [block], [operator.mm(block)]
    due = 1
    while True:
        steps = len(basis)
        if steps >= due or steps == limit:
            pairs, residual = _ritz(torch.cat(basis, dim=1), torch.cat(products, dim=1), k, largest)
            due = steps + max(1, steps // 4)  # the test costs more with every step
            if residual <= tolerance or steps == limit:
                break
        basis.append(_next_block(products[-1], basis))
        products.append(operator.mm(basis[-1]))
    # a basis of the whole space that is not good enough is not for want of steps
    status = status_of(residual, tolerance, stagnated=steps == filled)
    return Solution(pairs, status, steps, residual)


def _next_block(w: Tensor, basis: list[Tensor]) -> Tensor:
    """Orthonormal columns that span what is new in w (n, k), or as many of them as there is room for."""
    room = w.shape[0] - sum(block.shape[1] for block in basis)
    w = w[:, :room]
    # QR turns columns with nothing new in them into arbitrary directions made of rounding errors, which
    # are not yet orthogonal to the basis: hence twice.
    for _ in range(2):
        for block in basis:
            w = w - block @ (block.T @ w)
        w = torch.linalg.qr(w).Q
    return w


def _ritz(basis: Tensor, products: Tensor, k: int, largest: bool) -> tuple[Eigenpairs, float]:
    """The k extreme Ritz pairs from Q and A Q (n, m), and the largest ‖A v − λ v‖ / |λ|ₘₐₓ."""
    projected = (basis.T @ products).double()
    # Qᵀ A Q = S diag(λ) Sᵀ
    values, s = eigh((projected + projected.T) / 2, "the projected operator")
    order = values.argsort(descending=largest)[:k]
    chosen, s = values[order].to(basis), s[:, order].to(basis)
    vectors = basis @ s
    errors = (products @ s - vectors * chosen).norm(dim=0)
    scale = float(values.abs().max())
    return Eigenpairs(chosen, vectors), float(errors.max()) / (scale if scale > 0 else 1.0)


# -- krylov ----------------------------------------------------------------------------------------
#
# A block Krylov space of a symmetric operator, and the operator's projection onto it.
#
# With Q an orthonormal basis of span{X, A X, ..., Aᵐ⁻¹ X} for a block X of b random columns (block
# Lanczos with full reorthogonalization: Golub and Van Loan 2013, section 10.3.6), H = Qᵀ A Q is known
# when Q is, and so is A on all of Q but its last block.


@node()
@dataclass(frozen=True)
class Krylov:
    """A symmetric positive semi-definite A seen through a Krylov space."""

    basis: Tensor  # Q (n, r), orthonormal columns
    projected: Tensor  # H = Qᵀ A Q (r, r), float64
    block: int  # b, the size of the last block
    products: int  # number of products of A with a block

    @property
    def trace(self) -> float:
        """The trace of H; what tr A is more than this is the sum of what was left out."""
        return float(self.projected.diagonal().sum())

    def ritz(self) -> tuple[Tensor, Tensor]:
        """The Galerkin form A ≈ (QE) diag(h) (QE)ᵀ."""
        # For ρ > 0, (QE) diag(1/(h + ρ)) (QE)ᵀ is at most (A + ρI)⁻¹ in the order of symmetric matrices.
        values, vectors = eigh(self.projected, "the projected operator")
        return values.clamp_min(0), vectors

    def nystrom(self, rounding: float | None = None) -> tuple[Tensor, Tensor]:
        """The Nyström form A Ω (Ωᵀ A Ω)⁻¹ Ωᵀ A = (QE) diag(s) (QE)ᵀ, at most A."""
        # Ω is Q without its last block, so that A Ω = Q C with the C known from H; all of Q where Q fills the
        # space.
        n, r = self.basis.shape
        if r == n:
            return self.ritz()
        inner = r - self.block
        columns = self.projected[:, :inner].clone()  # C
        # of A + νI, for a ν above the rounding errors of H, which the inverse would blow up
        error = torch.finfo(self.basis.dtype).eps if rounding is None else rounding
        shift = 10 * error * self.trace
        columns.diagonal().add_(shift)
        values, vectors = eigh(columns[:inner], "the Nyström core")
        half = (columns @ vectors) / values.clamp_min(shift or 1.0).sqrt()
        s, e = eigh(half @ half.T, "the Nyström core")
        return (s - shift).clamp_min(0), e


@by_first_process
def krylov(
    operator: LinearOperator, block: int, rank: int, enough: float = math.inf, seed: Seed = None
) -> Krylov:
    """A Krylov space of at most ``rank`` dimensions."""
    # Costs one product of A with `block` columns for each block, and memory for the basis and three blocks.
    # Eigenvalues that occur up to `block` times are found. Stops early when tr Qᵀ A Q reaches `enough`.
    n = require_square(operator, factored=True).shape[0]
    block, rank = min(integer("block", block), n), integer("rank", rank)
    # whole blocks, so that A maps all but the last into the space
    rank = n if rank >= n else min(n, max(rank // block, 2) * block)
    basis = torch.zeros(n, rank, dtype=operator.dtype, device=operator.device)
    h = torch.zeros(rank, rank, dtype=torch.float64, device=operator.device)
    start = normal((n, block), seed, operator.dtype, operator.device)
    basis[:, :block] = torch.linalg.qr(start).Q
    done, used, products = 0, block, 0
    while True:
        w = operator.mm(basis[:, done:used])
        products += 1
        h[:used, done:used] = (basis[:, :used].T @ w).double()
        h[done:used, :used] = h[:used, done:used].T.clone()
        room = min(block, rank - used)
        if room == 0 or (done > 0 and float(h.diagonal().sum()) >= enough):
            break
        new = _new_block(w, basis[:, :used], room)
        # the coupling of the blocks, Q_newᵀ A Q_last
        h[used : used + room, done:used] = (new.T @ w).double()
        h[done:used, used : used + room] = h[used : used + room, done:used].T.clone()
        basis[:, used : used + room] = new
        done, used = used, used + room
    h = h[:used, :used]
    return Krylov(basis[:, :used], (h + h.T) / 2, used - done, products)


def _new_block(w: Tensor, basis: Tensor, room: int) -> Tensor:
    """Orthonormal columns for what is new in w (n, b), as many as there is room for."""
    if room < w.shape[1]:
        w = w[:, :room]
    # QR turns columns with nothing new in them into directions made of rounding errors, which are not yet
    # orthogonal to the basis: hence three times
    for _ in range(3):
        w = torch.linalg.qr(w - basis @ (basis.T @ w)).Q
    return w


LEAST = 1e-30  # of the norm of an iterate of the power method


def power_method(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> float:
    """The largest eigenvalue of a positive semi-definite matrix, from below, by the power method."""
    v, norm = start, start.norm()
    for _ in range(steps):
        v = product(v)
        norm = v.norm()
        v = v / norm.clamp_min(LEAST)
    return float(norm)
