"""Networks on graphs: nodes are no rows of a batch, their numbers are."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import linnet
from linnet.errors import ModelError
from linnet.tangent.independence import GRAPHS
from tests.fitting.problems import near, real
from tests.refusals import refused

H = real(6, 3, seed=1)


class Mean(nn.Module):
    """Each node with the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.layer(h + h.mean(0)).tanh()
        return out


class Nodes(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("h", H)

    def forward(self, node: Tensor) -> Tensor:
        out: Tensor = self.network(self.h)[node]
        return out


def test_the_error_names_a_page_that_there_is() -> None:
    net = Mean()
    refused(ModelError, lambda: linnet.linearize(net).kernel(H), "graph", GRAPHS)
    assert (Path(__file__).parents[2] / GRAPHS).is_file()


def test_nodes_by_number_have_exact_kernels() -> None:
    torch.manual_seed(0)
    net = Nodes(Mean())
    rows = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (torch.arange(6),)))(
        dict(net.named_parameters())
    )
    flat = torch.cat([j.flatten(2) for j in rows.values()], 2)
    near(
        linnet.linearize(net).kernel(torch.arange(6)).reshape(12, 12),
        (flat.view(12, -1) @ flat.view(12, -1).T),
        1e-10,
    )
