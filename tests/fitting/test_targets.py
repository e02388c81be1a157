"""Targets of fits."""

from __future__ import annotations

import math

import pytest
import torch

from linnet.errors import DataError, InputError
from linnet.linear.targets import ALPHA, make_targets
from tests.fitting.problems import real, refused


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


def test_one_class_is_enough_where_classes_are_not_asked_to_vary() -> None:
    assert make_targets(torch.tensor([1, 1]), outputs=2, varied=False).classes == 2
    refused(DataError, lambda: make_targets(torch.tensor([1, 1]), outputs=2), "y", "one class only", "1")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 3, 1], ("y", "3", "index 1", "0 to 2", "with_head")),
        ([0, 4, -1], ("y", "1 negative", "-1", "index 2", "from 0", "unique")),
    ],
)
def test_labels_out_of_range(labels: list[int], words: tuple[str, ...]) -> None:
    refused(DataError, lambda: make_targets(torch.tensor(labels), outputs=3), *words)


@pytest.mark.parametrize("y", [torch.tensor([True, False]), torch.tensor([1j, 2j])])
def test_types_that_are_neither(y: torch.Tensor) -> None:
    refused(InputError, lambda: make_targets(y, outputs=2), "y", str(y.dtype))


def test_labels_with_a_second_axis() -> None:
    refused(
        InputError,
        lambda: make_targets(torch.zeros(3, 2, dtype=torch.long), outputs=2),
        "y",
        "(3, 2)",
        "(N,)",
    )


@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 2, 2)])
def test_float_targets_of_another_width(shape: tuple[int, ...]) -> None:
    refused(InputError, lambda: make_targets(torch.zeros(shape), outputs=3), "y", str(shape), "(N, 3)")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_targets_that_are_not_finite(value: float) -> None:
    y = torch.zeros(4, 2)
    y[2, 1] = value
    refused(DataError, lambda: make_targets(y, outputs=2), "y", "index 2")


def test_empty_labels() -> None:
    refused(DataError, lambda: make_targets(torch.zeros(0, dtype=torch.long), outputs=2), "y", "0 examples")
