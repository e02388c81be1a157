"""Networks that write into what an operation on their parameters has returned: derivatives stay exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from tests.oracles.dense import ggn_oracle, jacobian_oracle

Form = Callable[[Any, Tensor], Tensor]


def _part(write: Callable[[Tensor, Tensor], Any]) -> Form:
    """Write into the first two columns."""

    def form(net: Any, x: Tensor) -> Tensor:
        h: Tensor = net.linear(x)
        write(h[:, :2], net.pair)
        return h

    return form


def _multiplied(net: Any, x: Tensor) -> Tensor:
    h: Tensor = net.linear(x)
    h[:, :2] *= net.pair
    return h


#: Results that are views (of a tensor that nobody else has, or of one that the network reads later on).
FORMS: dict[str, Form] = {
    "sequence": lambda net, x: net.linear(torch.stack([x, x.sin()], 1)).tanh_().mean(1),
    "einsum": lambda net, x: torch.einsum("ni,oi->no", x, net.matrix).tanh_(),
    "turned einsum": lambda net, x: torch.einsum("ni,oi->on", x, net.matrix).T.tanh_(),
    "instance norm": lambda net, x: net.norm(net.linear(x).view(-1, 2, 2)).tanh_().flatten(1),
    "added to a part": _part(lambda h, pair: h.add_(pair)),
    "taken from a part": _part(lambda h, pair: h.sub_(pair)),
    "part multiplied": _part(lambda h, pair: h.mul_(pair)),
    "part multiplied and set": _multiplied,
    "part written": _part(lambda h, pair: h.tanh_()),
    "plain": lambda net, x: net.linear(x).tanh_(),
}


class Writing(nn.Module):
    """One of the forms, and a layer after it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.linear, self.norm = nn.Linear(3, 4), nn.InstanceNorm1d(2, affine=True)
        self.matrix, self.pair = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(FORMS[self.form](self, x))
        return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.thinned(3)
def test_results_that_are_written_to(form: str) -> None:
    torch.manual_seed(0)
    net, x = Writing(form).double(), torch.randn(5, 3, dtype=torch.float64)
    j, lin = jacobian_oracle(net, x), linnet.linearize(net)
    torch.testing.assert_close(lin.jacobian(x), j, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lin.kernel(x), torch.einsum("ncp,mdp->ncmd", j, j), rtol=1e-10, atol=1e-12)
    v = torch.randn(j.shape[2], dtype=torch.float64)
    torch.testing.assert_close(lin.jvp(x, v), j @ v, rtol=1e-10, atol=1e-12)
    p = net(x).detach().softmax(1)
    full = ggn_oracle(j, torch.diag_embed(p) - p[:, :, None] * p[:, None])
    found = linnet.curvature(net, x, linnet.likelihoods.Categorical(), ["full", "diagonal", "ekfac"])
    torch.testing.assert_close(found["full"].dense(), full, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["diagonal"].diagonal(), full.diagonal(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["ekfac"].trace(), full.trace(), rtol=1e-10, atol=1e-12)
