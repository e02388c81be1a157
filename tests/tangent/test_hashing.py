"""Fingerprints are of values, however a tensor lies in memory."""

from __future__ import annotations

import pytest
import torch

from linnet import tree
from linnet.tangent.batch import hash_examples
from linnet.tree import hash_tensors


@pytest.mark.parametrize("shape", [(6, 4), (6, 1), (1,), (1, 1), ()])
def test_strides_do_not_count(shape: tuple[int, ...]) -> None:
    values = torch.arange(24.0)[: max(1, torch.Size(shape).numel())].reshape(shape)
    wide = torch.zeros(*shape, 5)
    wide[..., 0] = values
    strided = wide[..., 0]
    assert hash_tensors([strided]) == hash_tensors([values])


def test_one_column_of_a_wider_table() -> None:
    """Each of its rows is one number whose stride is the table's width."""
    table = torch.arange(12.0).reshape(4, 3)
    column = table[:, :1]
    rows = torch.as_strided(table, (4, 1), (3, 3))
    assert hash_examples(rows) == hash_examples(column) == hash_examples(column.clone())


def test_values_and_shapes_count() -> None:
    one = torch.ones(2, 1)
    assert len({hash_tensors([t]) for t in (one, 2 * one, one.T, one.double())}) == 4


def test_pieces_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(30.0).view(10, 3), torch.ones(0, 2), torch.ones(7, 2)[:, :1], torch.tensor(2)]
    whole = hash_tensors(tensors)
    for size in (1, 24, 10**9):
        monkeypatch.setattr(tree, "PIECE", size)
        assert hash_tensors(tensors) == whole
