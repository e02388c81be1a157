"""Batches of any structure, and data of any kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linnet import tree
from linnet.tangent.batch import batch_size, check_finite, concatenate, hash_examples, split, take
from linnet.tree import hash_tensors, map_tensors, tensors_in
from tests.fitting.problems import real

A, B, SHARED = real(5, 2), real(5, 3, seed=1), real(7, seed=2)
FORMS: dict[str, Any] = {
    "tensor": A,
    "tuple": (A, B),
    "list": [A, B],
    "dict": {"a": A, "b": B, "shared": SHARED, "number": torch.tensor(2.0)},
    "nested": (A, {"b": B, "flag": True}),
}


def equal(x: Any, y: Any) -> bool:
    left, right = tensors_in(x), tensors_in(y)
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_number_of_examples(form: str) -> None:
    assert batch_size(FORMS[form]) == 5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("index", [slice(1, 3), [4, 0], torch.tensor([2]), slice(0, 0)])
def test_taking_examples(form: str, index: Any) -> None:
    taken = take(FORMS[form], index)
    for old, new in zip(tensors_in(FORMS[form]), tensors_in(taken), strict=True):
        shared = old.ndim == 0 or old.shape[0] != 5
        assert torch.equal(new, old if shared else old[index])


@given(st.integers(1, 9), st.integers(1, 12), st.sampled_from(sorted(FORMS)))
def test_splitting_and_joining(n: int, size: int, form: str) -> None:
    x = take(FORMS[form], [i % 5 for i in range(n)])
    if n == 7:
        return  # as long as the shared tensor, which is then taken for examples
    parts = list(split(x, size))
    assert [batch_size(part) for part in parts] == [min(size, n - i) for i in range(0, n, size)]
    assert equal(concatenate(parts), x)


def test_splitting_a_batch_that_fits_copies_nothing() -> None:
    (part,) = split(FORMS["dict"], 5)
    assert part is FORMS["dict"]


def test_mapping_keeps_structure_and_other_values() -> None:
    doubled = map_tensors(lambda t: 2 * t, FORMS["nested"])
    assert torch.equal(doubled[1]["b"], 2 * B)
    assert doubled[1]["flag"] is True
    assert isinstance(doubled, tuple)


def test_tensors_in_order() -> None:
    assert [t.shape for t in tensors_in(FORMS["dict"])] == [A.shape, B.shape, SHARED.shape, ()]


# --- finiteness -------------------------------------------------------------------------------------


def test_integers_and_empty_tensors_are_finite() -> None:
    check_finite((torch.ones(2, 2).long(), A, torch.zeros(0, 3), torch.tensor([True])), "x")


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
