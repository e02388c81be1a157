"""Normalization inside the convolution before it: found where allowed, exact, undone when a pass differs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.tangent.jacobian import find_folds
from tests.oracles.dense import jacobian_oracle


class Net(nn.Module):
    """Two convolutions with normalization; ``shared`` also uses the first map before it is normalized."""

    def __init__(self, shared: bool = False, affine: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 3, 3, bias=bias), nn.BatchNorm2d(3, affine=affine)
        self.conv2, self.bn2 = nn.Conv2d(3, 4, 3, groups=1, bias=bias), nn.BatchNorm2d(4, affine=affine)
        self.head, self.shared = nn.Linear(4, 2), shared
        self.detour = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x)
        z = torch.relu(self.bn1(h))
        z = z + h if self.shared or self.detour else z
        return self.head(torch.relu(self.bn2(self.conv2(z))).mean((2, 3)))


def trained(net: Net) -> Net:
    """Running statistics that are not the initial ones, in double precision."""
    net = net.double().train()
    with torch.no_grad():
        net(torch.randn(16, 2, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    return net.eval()


def images(n: int) -> Tensor:
    return torch.randn(n, 2, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("options", "folds"),
    [
        ({}, 2),
        ({"bias": False}, 2),
        ({"affine": False}, 2),
        ({"shared": True}, 1),
    ],
)
def test_folded_derivatives_are_exact(options: dict[str, bool], folds: int) -> None:
    torch.manual_seed(0)
    net, x = trained(Net(**options)), images(3)
    lin = linnet.linearize(net)
    v = torch.randn(lin.space.dim, dtype=torch.float64)
    wanted = torch.einsum("ncp,p->nc", jacobian_oracle(net, x), v)
    torch.testing.assert_close(lin.jvp(x, v), wanted, rtol=1e-10, atol=1e-12)
    assert len(lin.function.cache.folds) == folds


def test_parameters_that_are_not_tracked_are_folded_too() -> None:
    torch.manual_seed(0)
    net, x = trained(Net()), images(3)
    lin = linnet.linearize(net, params="conv")
    v = torch.randn(lin.space.dim, dtype=torch.float64)
    wanted = torch.einsum("ncp,p->nc", jacobian_oracle(net, x, lin.parameter_names), v)
    torch.testing.assert_close(lin.jvp(x, v), wanted, rtol=1e-10, atol=1e-12)
    assert len(lin.function.cache.folds) == 2


def test_a_pass_that_takes_another_way_is_run_without_folding() -> None:
    torch.manual_seed(0)
    net, x = trained(Net()), images(3)
    lin = linnet.linearize(net)
    v = torch.randn(lin.space.dim, dtype=torch.float64)
    lin.jvp(x, v)
    assert lin.function.cache.folds
    lin.model.detour = net.detour = True  # now the first map is used before it is normalized
    wanted = torch.einsum("ncp,p->nc", jacobian_oracle(net, x), v)
    torch.testing.assert_close(lin.jvp(x, v), wanted, rtol=1e-10, atol=1e-12)
    assert lin.function.cache.folds == {}


def test_training_statistics_are_not_folded() -> None:
    net = Net().double()
    function = linnet.linearize(net).function
    function.model.train()
    assert find_folds(function, images(4)) == {}
