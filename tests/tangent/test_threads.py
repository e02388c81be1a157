"""Threads that ask one linearization at the same time, as the workers of a server do."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

import linnet

INSIDE: list[int] = []  # a copy of the network keeps no state of the test


class Slow(nn.Module):
    """A layer that gives other threads time to come in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The layer, and how many threads are in it."""
        INSIDE.append(1)
        time.sleep(0.002)
        alone = len(INSIDE) == 1
        out: Tensor = self.layer(x).tanh()
        INSIDE.pop()
        assert alone, "two threads run one network, whose parameters each of them replaces"
        return out


def test_threads_that_share_a_fit_get_what_they_would_get_alone() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3).double(), torch.arange(8) % 2
    fit = linnet.fit(linnet.linearize(Slow().double()), (x, y))

    def ask(i: int) -> Tensor:
        moved = x + i
        return torch.cat([fit.predict(moved), fit.influence(moved)[0], fit.predictive(moved).variance])

    alone = [ask(i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, range(4)))
    torch.testing.assert_close(together, alone)
