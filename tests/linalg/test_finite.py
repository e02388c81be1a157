"""One pass tells whether numbers are finite, and lie in a range."""

from __future__ import annotations

import pytest
import torch

from linnet.linalg.factorize import is_finite, lies_within

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_entry_is_found(bad: float, dtype: torch.dtype) -> None:
    t = torch.zeros(3, 5, dtype=dtype)
    assert is_finite(t)
    t[1, 2] = bad
    assert not is_finite(t)
    assert not lies_within(t, -1e4, 1e4)


def test_infinities_of_both_signs_do_not_cancel() -> None:
    assert not is_finite(torch.tensor([torch.inf, -torch.inf]))


def test_a_sum_that_overflows_is_looked_at() -> None:
    assert is_finite(torch.full((4,), LARGEST))
    assert is_finite(torch.full((4,), 6e4, dtype=torch.float16))


def test_what_cannot_be_infinite() -> None:
    assert is_finite(torch.arange(3))
    assert is_finite(torch.tensor([True]))
    assert is_finite(torch.empty(0))
    assert lies_within(torch.empty(0), 0, 1)


def test_the_ends_of_a_range_belong_to_it() -> None:
    t = torch.tensor([0.0, 1.0])
    assert lies_within(t, 0, 1)
    assert not lies_within(t, 0, 0.999)
    assert not lies_within(t, 0.001, 1)
    assert not lies_within(torch.tensor([torch.inf]), 0, 1.7e308)  # above every number of the type
