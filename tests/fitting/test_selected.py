"""``params=`` and a ``Linearized`` say the same, whatever takes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import linnet
from linnet.errors import InputError
from linnet.likelihoods import Categorical


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(20) % 3


def test_curvatures_and_posteriors(net: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    lin, likelihood = linnet.linearize(net, params="2"), Categorical()
    given = linnet.curvature(net, data, likelihood, structure="full", params="2")
    own = linnet.curvature(lin, data, likelihood, structure="full")
    assert given.shape == (35, 35)
    assert torch.equal(given.dense(), own.dense())
    first, second = (
        linnet.Laplace(model, likelihood, "full", params=params).fit(data)
        for model, params in ((net, "2"), (lin, None))
    )
    assert torch.equal(first.predictive(data[0]).variance, second.predictive(data[0]).variance)
    with pytest.raises(InputError, match="a linearization has its own"):
        linnet.curvature(lin, data, likelihood, params="2")
    same = linnet.curvature(net, data, likelihood, structure="full", params="2", output=lambda f: f + 1)
    assert torch.allclose(same.dense(), own.dense())  # softmax does not see a shift of all outputs
    twice = linnet.curvature(net, data, likelihood, structure="full", params="2", output=lambda f: 2 * f)
    assert not torch.allclose(twice.dense(), own.dense(), rtol=0.1)


def test_coordinates(net: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    lin = linnet.linearize(net, params="2")
    G = linnet.curvature(lin, data, Categorical(), structure="kfac")
    for make in (
        lambda model: linnet.with_sketch(model, G, dim=8),
        lambda model: linnet.with_metric(model, G),
    ):
        fits = [linnet.fit(linnet.linearize(make(model)), data) for model in (net, lin)]
        assert torch.equal(fits[0].predict(data[0]), fits[1].predict(data[0]))
    with pytest.raises(InputError, match="a network, or a Linearized"):
        linnet.with_metric("net", G)


def test_stores(net: nn.Module, data: tuple[torch.Tensor, torch.Tensor], tmp_path) -> None:
    lin = linnet.linearize(net, params="2")
    one = linnet.audit.GradientStore(tmp_path / "one", net, Categorical(), params="2").add(data)
    two = linnet.audit.GradientStore(tmp_path / "two", lin, Categorical()).add(data)
    assert one.folder.dim == 35
    assert torch.equal(one.self_influence(), two.self_influence())
    again = linnet.audit.GradientStore(tmp_path / "one", net)
    assert torch.equal(again.self_influence(), one.self_influence())
