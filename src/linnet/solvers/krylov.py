"""A block Krylov space of a symmetric operator, and the operator's projection onto it.

With Q an orthonormal basis of span{X, A X, ..., Aᵐ⁻¹ X} for a block X of b random columns (block Lanczos with
full reorthogonalization: Golub and Van Loan 2013, section 10.3.6), H = Qᵀ A Q is known when Q is, and so is
A on all of Q but its last block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.linalg.factorize import eigh
from linnet.linalg.operator import LinearOperator, require_square
from linnet.linalg.random import Seed, normal
from linnet.params import integer
from linnet.solvers.led import one_leads
from linnet.tree import node


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


@one_leads
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
