"""What certificates say and releases refuse of networks that were made of data, wherever it is in them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import audit
from linnet.errors import InputError


class Scaled(nn.Module):
    """A network behind a fixed scale, as photographs have it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of scaled inputs."""
        found: Tensor = self.body((x - 0.1) / 2)
        return found


X = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(30) % 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def made(kind: str) -> tuple[nn.Module, str]:
    """A network made of the data, and what is said of it."""
    net = network()
    if kind == "head":
        return linnet.with_head(net, 3, data=(X, Y)), "the head"
    G = linnet.curvature(net, (X, Y), linnet.likelihoods.Categorical(), structure="kfac")
    if kind == "metric":
        return linnet.with_metric(net, G), "the metric of a curvature"
    return linnet.with_sketch(net, G, dim=10), "directions that were made of data"


@pytest.mark.parametrize("wrap", [lambda net: net, Scaled, nn.Sequential])
@pytest.mark.parametrize("kind", ["head", "metric", "sketch"])
def test_what_was_made_of_data_is_found_in_a_network(kind: str, wrap: type[nn.Module]) -> None:
    network, said = made(kind)
    fit = linnet.fit(linnet.linearize(wrap(network)), (X, Y), ridge=20.0, solver="dual")
    [told] = audit.forgetting_certificate(fit, [3]).warnings
    assert said in told
    with pytest.raises(InputError, match=said):
        audit.release(fit, 1.0, 1e-3, clip=(1.0, 1.0))


def test_a_sketch_of_the_solver_is_told_too() -> None:
    fit = linnet.fit(linnet.linearize(network()), (X, Y), ridge=1.0, solver=linnet.fitting.Sketch(dim=12))
    [told] = audit.forgetting_certificate(fit, [3]).warnings
    assert "directions that were made of data" in told


def test_a_head_that_adapt_replaces_is_not_told_of_and_what_it_measured_is() -> None:
    plain = linnet.adapt(network(), (X, Y), weight=0.5, ridge=0.1)
    headed = linnet.adapt(Scaled(linnet.with_head(network(), 3, data=(X, Y))), (X, Y), weight=0.5, ridge=0.1)
    for fit in (plain, headed):
        [told] = audit.forgetting_certificate(fit, [3]).warnings
        assert told.startswith("the mean of the features and the scales of the kernels")


def test_weights_make_no_more_examples_than_there_are() -> None:
    lin = linnet.linearize(nn.Linear(1, 1).double())
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(20, 1, generator=draw, dtype=torch.float64)
    y = x + 0.3 * torch.randn(20, 1, generator=draw, dtype=torch.float64)
    plain = linnet.fit(lin, (x, y), ridge=0.5)
    for weight in (0.05, 1.0, 10.0):  # the same fit in other units
        fit = linnet.fit(lin, (x, y), ridge=0.5 * weight, sample_weight=torch.full((20,), weight))
        assert torch.allclose(fit.interval(x, 0.9), plain.interval(x, 0.9), atol=1e-8)
    few = linnet.fit(lin, (x[:4], y[:4]), ridge=0.5, sample_weight=torch.full((4,), 10.0))
    with pytest.raises(InputError, match="from 4 examples by their weights"):
        few.interval(x, 0.95)
    uneven = torch.tensor([30.0] * 3 + [0.1] * 17)
    with pytest.raises(InputError, match="examples by their weights"):
        linnet.fit(lin, (x, y), ridge=0.5, sample_weight=uneven).interval(x, 0.9)
