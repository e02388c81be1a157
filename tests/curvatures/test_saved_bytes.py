"""How much is captured at once does not depend on where the examples are stored."""

from __future__ import annotations

import torch
from torch import nn

from linnet.curvatures.accumulate import plan_chunks, saved_bytes
from linnet.curvatures.stream import Batch
from linnet.tangent.functional import Functional


def test_a_slice_of_large_data_counts_as_its_own_size() -> None:
    net = Functional(nn.Sequential(nn.Linear(50, 20), nn.ReLU(), nn.Linear(20, 3)))
    data = torch.randn(100_000, 50)
    alone, slice_ = data[:8].clone(), data[:8]
    assert saved_bytes(net, slice_) == saved_bytes(net, alone)
    plans = [plan_chunks(net, Batch(0, x, None), 3, 0, 1 << 28) for x in (alone, slice_)]
    assert plans[0] == plans[1]
