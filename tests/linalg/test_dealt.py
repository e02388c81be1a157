"""Eigendecompositions that processes deal out: by one process they are those of each matrix by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from linnet.distributed import Share
from linnet.linalg import GroupedKronecker, GroupedKroneckerEigen, Kronecker, KroneckerEigen, grouped


def positive(*shape: int) -> Tensor:
    root = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)
    return root @ root.mT


PRODUCTS: list[Any] = [
    Kronecker(positive(3, 3), positive(4, 4), name="one"),
    GroupedKronecker(positive(2, 3, 3), positive(2, 2, 2), name="two"),
    Kronecker(positive(5, 5), positive(1, 1), name="three"),
]


def test_one_process_decomposes_all() -> None:
    made = grouped.eigenbases(PRODUCTS, Share())
    assert [type(one) for one in made] == [KroneckerEigen, GroupedKroneckerEigen, KroneckerEigen]
    for one, product in zip(made, PRODUCTS, strict=True):
        assert one.name == product.name
        assert torch.allclose(one.dense(), product.dense(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_each_factor_has_one_owner(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is exchanged is replaced: each process fills its own, and the others take it."""
    found: dict[int, list[list[Tensor]]] = {}
    decomposed: list[str] = []
    eigh = grouped.eigh

    def counting(matrix: Tensor, name: str) -> tuple[Tensor, Tensor]:
        decomposed.append(name)
        return eigh(matrix, name)

    def exchanged(parts: Sequence[Sequence[Tensor]]) -> None:
        found[len(found)] = [[t for t in part] for part in parts]

    monkeypatch.setattr(grouped, "eigh", counting)
    monkeypatch.setattr(grouped, "all_filled", exchanged)
    matrices = [factor for product in PRODUCTS for factor in (product.left, product.right)]
    names = [f"matrix {i}" for i in range(len(matrices))]
    results = [grouped.dealt_eigh(matrices, names, Share(rank, size)) for rank in range(size)]
    assert sorted(decomposed) == sorted(names)
    for rank in range(size):  # of all processes, those of each one's own
        for other in range(size):
            for theirs, own in zip(found[other][rank], found[rank][rank], strict=True):
                theirs.copy_(own)
    for pairs in results:
        for (values, vectors), matrix in zip(pairs, matrices, strict=True):
            assert torch.allclose((vectors * values[..., None, :]) @ vectors.mT, matrix, atol=1e-12)
