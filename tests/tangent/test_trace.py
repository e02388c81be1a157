"""Passes with channels last: the same numbers, and none where the network does not run so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.likelihoods import Categorical
from linnet.tangent import trace as module
from linnet.tangent.functional import Functional
from linnet.tangent.trace import channels_last, forward_trace
from tests.zoo import assert_near


class Images(nn.Module):
    """A small convolutional network that joins its pixels as it is told."""

    def __init__(self, channels: int, viewing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(channels, 6, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(6 * 9, 4)
        self.viewing = viewing

    def forward(self, x: Tensor) -> Tensor:
        maps = self.body(x)
        f: Tensor = self.head(maps.view(len(maps), -1) if self.viewing else maps.flatten(1))
        return f


def traced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the passes that are traced have channels last."""
    seen: list[bool] = []
    original = module.trace

    def noting(function: Functional, x: Any) -> Any:
        seen.append(x.ndim == 4 and x.stride(1) == 1)
        return original(function, x)

    monkeypatch.setattr(module, "trace", noting)
    return seen


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("viewing", [False, True])
def test_the_pass_is_the_plain_one(channels: int, viewing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    function = Functional(Images(channels, viewing), "last-layer")
    x, seen = torch.randn(5, channels, 8, 8), traced(monkeypatch)
    run = forward_trace(function, x)
    assert seen == ([True, False] if viewing else [True])
    assert_near(run.outputs.detach().double(), function.check_runs(x).double(), 1e-5)
    forward_trace(function, x)
    assert seen[-1] != viewing  # what did not run is not tried again


def test_only_images_of_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = traced(monkeypatch)
    forward_trace(Functional(Images(3).double(), "last-layer"), torch.randn(2, 3, 8, 8).double())
    forward_trace(Functional(nn.Sequential(nn.Flatten(), nn.Linear(192, 2))), torch.randn(2, 3, 8, 8))
    forward_trace(Functional(nn.Linear(3, 2)), torch.randn(2, 3))
    assert seen == [False] * 3
    x = torch.randn(2, 3, 8)
    assert channels_last(x) is x
    image = torch.randn(2, 1, 3, 4)
    assert torch.equal(channels_last(image), image)


def test_an_error_of_the_network_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="channels"):
        forward_trace(Functional(Images(3), "last-layer"), torch.randn(2, 5, 8, 8))


@pytest.mark.parametrize("viewing", [False, True])
def test_posterior_of_a_last_layer(viewing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit and predictions are those without."""
    model, x, y = Images(3, viewing), torch.randn(20, 3, 8, 8), torch.arange(20) % 4
    plain = linnet.Laplace(model, Categorical(), params="last-layer")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_helps", lambda *_: False)
        before = plain.fit((x, y)).predictive(x)
    seen = traced(monkeypatch)
    la = linnet.Laplace(model, Categorical(), params="last-layer").fit((x, y))
    assert_near(la.curvature.dense().double(), plain.curvature.dense().double(), 1e-5)
    assert_near(la.predictive(x).variance.double(), before.variance.double(), 1e-4)
    assert any(seen)
