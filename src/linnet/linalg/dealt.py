"""Eigendecompositions of several matrices, each made by one of the processes that share the work.

A decomposition costs some ten times n³ operations, and its copy n² numbers, so that each has one owner and
the others take what it found. All then have one basis to the bit, also where eigenvalues coincide and another
machine would find another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linnet.distributed import Share, all_filled, owners
from linnet.linalg.factorize import eigh
from linnet.linalg.grouped import GroupedKronecker, GroupedKroneckerEigen
from linnet.linalg.kronecker import Kronecker, KroneckerEigen

Pair = tuple[Tensor, Tensor]  # eigenvalues and eigenvectors


def dealt_eigh(matrices: Sequence[Tensor], names: Sequence[str], share: Share) -> list[Pair]:
    """Eigenvalues and eigenvectors of symmetric matrices, or batches of them, on all processes, (..., n)."""
    # matrices (..., n, n)
    ranks = owners([float(matrix.numel() * matrix.shape[-1]) for matrix in matrices], share.world)
    found = [
        eigh(matrix, name)
        if owner == share.rank
        else (matrix.new_empty(matrix.shape[:-1]), torch.empty_like(matrix))
        for matrix, name, owner in zip(matrices, names, ranks, strict=True)
    ]
    if share.world > 1:
        pairs = list(zip(found, ranks, strict=True))
        all_filled([[t for pair, own in pairs if own == rank for t in pair] for rank in range(share.world)])
    return found


def eigenbases(
    products: Sequence[Kronecker | GroupedKronecker], share: Share
) -> list[KroneckerEigen | GroupedKroneckerEigen]:
    """The eigendecompositions of Kronecker products, their factors dealt out."""
    matrices = [factor for product in products for factor in (product.left, product.right)]
    names = [name for product in products for name in product.factor_names]
    pairs = dealt_eigh(matrices, names, share)
    found: list[KroneckerEigen | GroupedKroneckerEigen] = []
    for i, product in enumerate(products):
        left, right = pairs[2 * i : 2 * i + 2]
        if isinstance(product, Kronecker):
            found.append(KroneckerEigen.of(product, (left, right)))
        else:
            found.append(GroupedKroneckerEigen.of(product, (left, right)))
    return found
