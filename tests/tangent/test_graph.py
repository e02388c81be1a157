"""Networks with their tangents as plain graphs: the whole zoo, against dense Jacobians."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import ModelError
from linnet.tangent.functional import call_arguments
from linnet.tangent.graph import Prototype, plain_module
from tests import zoo

# animals with an operation that has no rule, and the operation
WITHOUT_RULE = {"embedding-bag": "_embedding_bag"}


class Sum(nn.Module):
    """f₀ + Jδ."""

    def forward(self, value: Tensor, tangents: list[Tensor]) -> Tensor:
        return value + tangents[0]


def module_of(name: str, v: Tensor) -> nn.Module:
    """The plain module of an animal along a direction."""
    lin, case = zoo.linearized(name), zoo.case(name)
    direction = lin.space.to_params(v)
    return plain_module(lin.model, [direction], Sum(), Prototype(case.x1), lin.function.output).module


@pytest.mark.long
@pytest.mark.parametrize("name", [animal.name for animal in zoo.ZOO])
def test_a_graph_is_the_linear_model(name: str) -> None:
    case = zoo.case(name)
    generator = torch.Generator().manual_seed(7)
    v = torch.randn(zoo.linearized(name).space.dim, generator=generator, dtype=torch.float64)
    if name in WITHOUT_RULE:
        with pytest.raises(ModelError, match=f"aten::{WITHOUT_RULE[name]}"):
            module_of(name, v)
        return
    module = module_of(name, v)
    for x, f, j in ((case.x1, case.f1, case.j1), (case.x2, case.f2, case.j2)):
        args, kwargs = call_arguments(x)
        zoo.assert_near(module(*args, **kwargs), f + j @ v, 1e-9)


def test_a_module_needs_no_tangent() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).eval()
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
    module = plain_module(net, [], lambda value, _: 2 * value, Prototype(x)).module
    torch.testing.assert_close(module(x), 2 * net(x).detach())


def test_weights_that_have_no_influence_have_no_tangent() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval()
    net.unused = nn.Parameter(torch.ones(2))
    net.forward = lambda x: net[1](net[0](x))
    x = torch.ones(3, 2)
    module = plain_module(net, [{"unused": torch.ones(2)}], Sum(), Prototype(x)).module
    torch.testing.assert_close(module(x), net(x).detach())


def test_an_operation_without_a_rule_is_named() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.eigvalsh(self.layer(x).view(-1, 2, 2))

    lin = linnet.linearize(Own())
    with pytest.raises(ModelError, match="aten::_linalg_eigh"):
        plain_module(lin.model, [lin.theta0], Sum(), Prototype(torch.ones(3, 4)))
