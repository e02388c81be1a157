"""The captured batch size does not depend on where the examples are stored."""

from __future__ import annotations

import torch
from torch import nn

from linnet.curvatures.accumulate import plan_chunks
from linnet.curvatures.stream import Batch
from linnet.tangent.functional import Functional
from linnet.tangent.plan import expected_plan


def network() -> Functional:
    """A small network; what is known of it is forgotten with it."""
    torch.manual_seed(0)
    return Functional(nn.Sequential(nn.Linear(50, 20), nn.ReLU(), nn.Linear(20, 3)))


def test_a_slice_of_large_data_counts_as_its_own_size() -> None:
    data = torch.randn(100_000, 50)
    alone, slice_ = data[:8].clone(), data[:8]
    saved = [expected_plan(network(), x).bytes.saved for x in (alone, slice_)]
    assert saved[0] == saved[1] >= 50 * 4
    plans = [plan_chunks(network(), Batch(0, x, None), 3, 0, 1 << 28) for x in (alone, slice_)]
    assert plans[0] == plans[1]
