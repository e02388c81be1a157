"""Numbers that are read together, and where a search is done."""

from __future__ import annotations

import math

import torch

from linnet.linalg import factorize


def test_numbers_of_several_types_are_read_as_they_are() -> None:
    values = [
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([3]),
        torch.tensor(True),
        torch.tensor(torch.nan),
    ]
    found = factorize.read(values)
    assert found[:3] == [0.1, 3.0, 1.0]
    assert math.isnan(found[3])
    assert factorize.read([]) == []


def test_large_tensors_are_searched_where_they_are() -> None:
    small, large = torch.ones(2, device="meta"), torch.ones(factorize.SMALL + 1, device="meta")
    assert all(t.device.type == "meta" for t in factorize.searched(small, large))
