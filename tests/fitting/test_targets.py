"""Targets of fits."""

from __future__ import annotations

import pytest
import torch

from linnet.linear.targets import ALPHA, make_targets
from tests.fitting.problems import real


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8])
def test_integer_labels_become_scaled_one_hot(dtype: torch.dtype) -> None:
    made = make_targets(torch.tensor([2, 0, 1], dtype=dtype), outputs=4)
    expected = torch.zeros(3, 4)
    expected[0, 2] = expected[1, 0] = expected[2, 1] = 15.0
    assert ALPHA == 15.0
    assert torch.equal(made.values, expected)
    assert made.classes == 4
    assert made.labels is not None
    assert made.labels.tolist() == [2, 0, 1]


def test_scale_is_the_value_of_the_right_class() -> None:
    made = make_targets(torch.tensor([1, 0]), outputs=2, scale=3.0)
    assert made.values.tolist() == [[0.0, 3.0], [3.0, 0.0]]
    assert made.scale == 3.0


def test_a_column_of_labels_is_taken() -> None:
    assert make_targets(torch.tensor([[1], [0]]), outputs=2).labels.tolist() == [1, 0]  # type: ignore[union-attr]


def test_float_targets_are_used_as_they_are() -> None:
    y = real(4, 3)
    made = make_targets(y, outputs=3)
    assert made.values.data_ptr() == y.data_ptr()
    assert made.classes is None
    assert made.labels is None


def test_a_vector_of_floats_is_one_output() -> None:
    assert make_targets(torch.ones(5), outputs=1).values.shape == (5, 1)


def test_structured_float_targets_are_flattened() -> None:
    y = real(2, 3, 4)
    assert torch.equal(make_targets(y, outputs=12).values, y.reshape(2, 12))
