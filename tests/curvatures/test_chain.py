"""One forward pass of a chain gives what autograd gives: outputs, slopes, gradients and J v."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.curvatures.chain import ChainPass
from linnet.curvatures.expectation import Expectation
from linnet.curvatures.kfra import RecursionSums
from linnet.curvatures.layers import Layer
from linnet.curvatures.stream import Batch
from linnet.likelihoods import Categorical
from linnet.tangent.capture import capture_parts
from linnet.tangent.functional import Functional
from linnet.tangent.jacobian import jvp


class Written(nn.Module):
    """A chain that is no ``Sequential``: a function between, nothing after a layer, one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 5), nn.Linear(5, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(2 * self.first(x.flatten(1)))
        return torch.tanh(self.last(self.second(h)))


class ByHand(nn.Module):
    """A chain whose product is not a call of ``linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x.flatten(1) @ self.weight))


NETWORKS = {
    "written": Written,
    "in place": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
    "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)),
}
X = torch.randn(9, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def layers_of(function: Functional) -> tuple[Layer, ...]:
    expectation = Expectation(Categorical(), "recursion", "gauss-newton", 1, 0)
    return RecursionSums(function, expectation, Batch(0, X, None)).layers


@pytest.mark.parametrize("name", NETWORKS)
def test_everything_that_follows_from_the_pass(name: str) -> None:
    function = Functional(NETWORKS[name]().double())
    chain = ChainPass.of(function, layers_of(function), X)
    assert chain is not None
    f = function(function.theta, X)
    assert torch.equal(chain.outputs, f)
    u = torch.randn(9, 3, dtype=torch.float64)
    leaves = {name: t.clone().requires_grad_() for name, t in function.theta.items()}
    wanted = torch.autograd.grad((function(leaves, X) * u).sum(), list(leaves.values()))
    found = chain.gradient(u)
    for key, gradient in zip(leaves, wanted, strict=True):
        assert torch.allclose(found[key], gradient, rtol=1e-12, atol=1e-14)
    v = {name: torch.randn_like(t) for name, t in function.theta.items()}
    assert torch.allclose(chain.tangent(v), jvp(function, X, v)[1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("columns", [None, 1])
def test_captures_are_those_of_a_pass_of_their_own(columns: int | None) -> None:
    function = Functional(Written().double())
    chain = ChainPass.of(function, layers_of(function), X)
    assert chain is not None
    u = torch.randn(2, 9, 3, dtype=torch.float64)
    wanted = capture_parts(function, X, lambda f: u, columns)
    for one, other in zip(chain.captures(lambda f: u, columns), wanted, strict=True):
        assert one.k == other.k == (columns or 2)
        assert [use.signature for use in one.uses] == [use.signature for use in other.uses]
        assert torch.equal(one.outputs, other.outputs)
        for name in function.names:
            assert torch.allclose(one.rows(name), other.rows(name), rtol=1e-12, atol=1e-14)


def test_slopes_are_those_that_probes_find() -> None:
    function = Functional(Written().double())
    layers = layers_of(function)
    chain = ChainPass.of(function, layers, X)
    assert chain is not None
    h = function.model.first(X.flatten(1))
    assert torch.allclose(chain.slopes[0], 2 * torch.cos(2 * h))
    assert torch.equal(chain.slopes[1], torch.ones(9, 4, dtype=torch.float64))
    assert torch.allclose(chain.slopes[2], 1 - chain.outputs**2)
    expectation = Expectation(Categorical(), "recursion", "gauss-newton", 1, 0)
    y = torch.arange(9) % 3
    sums = [RecursionSums(function, expectation, Batch(0, X, None)) for _ in range(2)]
    sums[0].add(Batch(0, X, y), chain.outputs, y)
    sums[1].add_pass(chain, y)
    for key, tensor in sums[0].tensors.items():
        assert torch.allclose(tensor, sums[1].tensors[key], rtol=1e-8, atol=1e-12), key


def test_other_ways_to_write_a_product_are_left_to_autograd() -> None:
    function = Functional(ByHand().double())
    assert ChainPass.of(function, layers_of(function), X) is None


def test_other_calls_of_linear_are_none_of_its_business() -> None:
    """A fixed product before the chain stays in what is fed to it."""
    fixed = torch.randn(6, 6, dtype=torch.float64)

    class Whitened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(F.linear(x.flatten(1), fixed))

    function = Functional(Whitened())
    chain = ChainPass.of(function, layers_of(function), X)
    assert chain is not None
    assert torch.equal(chain.inputs[0], F.linear(X.flatten(1), fixed))
