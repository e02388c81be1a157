"""Networks that are unrolled over steps, from a state of zeros that is made in whatever way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.likelihoods import Categorical

N, STEPS, WIDTH = 6, 5, 4
States = Callable[[Tensor], Tensor]
STATES: dict[str, States] = {
    "of x": lambda x: x.new_zeros(len(x), WIDTH),
    "zeros": lambda x: torch.zeros(len(x), WIDTH, dtype=x.dtype),
    "of layers": lambda x: torch.zeros(1, x.shape[0], WIDTH, dtype=x.dtype)[0],
    "alike": lambda x: torch.zeros(1, WIDTH, dtype=x.dtype).expand(len(x), WIDTH),
    "one": lambda x: torch.zeros(WIDTH, dtype=x.dtype),
}


class Unrolled(nn.Module):
    """A recurrent network, step by step."""

    def __init__(self, begin: States) -> None:
        super().__init__()
        self.begin = begin
        self.step, self.state, self.out = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.begin(x)
        for t in range(x.shape[1]):
            h = torch.tanh(self.step(x[:, t]) + self.state(h))
        return self.out(h)  # type: ignore[no-any-return]


def made(begin: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    data = torch.randn(N, STEPS, 3, dtype=torch.float64), torch.arange(N) % 2
    return Unrolled(STATES[begin]).double(), data


@pytest.mark.parametrize("begin", STATES)
def test_jacobians_do_not_depend_on_how_the_state_was_made(begin: str) -> None:
    net, (x, y) = made(begin)
    wanted = torch.stack(
        [
            torch.cat(
                [g.flatten() for g in torch.autograd.grad(f, list(net.parameters()), retain_graph=True)]
            )
            for f in net(x).flatten()
        ]
    )
    matrix = linnet.curvature(net, (x, y), Categorical(), "full").dense()
    root = net(x).detach().softmax(1)
    blocks = torch.diag_embed(root) - root[:, :, None] * root[:, None]
    rows = wanted.view(N, 2, -1)
    torch.testing.assert_close(matrix, torch.einsum("nip,nij,njq->pq", rows, blocks, rows))


@pytest.mark.parametrize("begin", ["zeros", "of layers"])
def test_zeros_of_the_examples_begin_a_state(begin: str) -> None:
    net, data = made(begin)
    found = linnet.curvature(net, data, Categorical(), "kfac")
    other, _ = made("of x")
    torch.testing.assert_close(found.dense(), linnet.curvature(other, data, Categorical(), "kfac").dense())
    assert "state  4x4 + 4              kfac" in str(found.coverage())


def test_what_is_no_state_of_the_examples_has_exact_blocks_and_says_why() -> None:
    net, data = made("alike")
    found = linnet.curvature(net, data, Categorical(), "kfac")
    assert "a constant that is not known to belong to the examples" in str(found.coverage())


def test_zeros_as_long_as_the_batch_are_no_state() -> None:
    class Table(nn.Module):
        """What it adds to every example is made of as many rows of zeros as there happen to be examples."""

        def __init__(self) -> None:
            super().__init__()
            self.rows, self.out = nn.Linear(2, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(x + self.rows(torch.zeros(N, 2, dtype=x.dtype)).sum(0)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net, x = Table().double(), torch.randn(4 * N, 3, dtype=torch.float64)
    y = torch.arange(4 * N) % 2
    whole = linnet.curvature(net, (x, y), Categorical(), "full").dense()
    parts = [(x[i : i + N], y[i : i + N]) for i in range(0, 4 * N, N)]
    torch.testing.assert_close(linnet.curvature(net, parts, Categorical(), "full").dense(), whole)
