"""Every loader knows the network again by what it computes, and takes it compiled or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.audit import GradientStore
from linnet.errors import LinnetError
from linnet.likelihoods import Categorical, Gaussian

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(12) % 3


def network(activation: nn.Module | None = None, eps: float = 1e-5) -> nn.Sequential:
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6, eps=eps), activation or nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double().eval()


class Scaled(nn.Module):
    """A number that is neither a weight nor a module's type."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.factor * x)


def stored(net: nn.Module, folder: Path) -> None:
    GradientStore(folder, net, Categorical()).add((X, Y))


SAVED: dict[str, Callable[[nn.Module, Path], Any]] = {
    "fit": lambda net, d: linnet.fit(linnet.linearize(net), (X, Y)).save(d),
    "cross-entropy": lambda net, d: linnet.fit(linnet.linearize(net), (X, Y), "cross-entropy").save(d),
    "adapt": lambda net, d: linnet.adapt(net, (X, Y), weight=0.5, ridge=0.1).save(d),
    "gp": lambda net, d: linnet.TangentGP(net, Gaussian()).fit(X, X[:, :3]).save(d),
    "laplace": lambda net, d: linnet.Laplace(net, Categorical()).fit((X, Y)).save(d),
    "curvature": lambda net, d: linnet.curvature(net, (X, Y), Categorical()).save(d),
    "finetuned": lambda net, d: linnet.finetune(net, (X, Y), training=linnet.Training(steps=2)).save(d),
    "store": stored,
}


def read(kind: str, folder: Path, net: nn.Module) -> Any:
    return GradientStore(folder, net) if kind == "store" else linnet.load(folder, net)


@pytest.fixture(scope="module", params=SAVED)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    torch.manual_seed(0)
    net, folder = network(Scaled(1.0)), tmp_path_factory.mktemp(request.param)
    SAVED[request.param](net, folder)
    return request.param, folder, net


@pytest.mark.parametrize("other", [network(nn.ReLU()), network(Scaled(2.0)), network(Scaled(1.0), 0.5)])
@pytest.mark.thinned(3)
def test_equal_weights_are_not_enough(saved: tuple[str, Path, Any], other: nn.Module) -> None:
    kind, folder, net = saved
    other.load_state_dict(net.state_dict())
    with pytest.raises(LinnetError, match=r"another network|does not fit"):
        read(kind, folder, other)


@pytest.mark.thinned(2)
def test_a_compiled_network_is_the_network(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    kind, folder, net = saved
    compiled = torch.compile(copy.deepcopy(net), backend="eager")
    there, back = read(kind, folder, compiled), read(kind, folder, net)
    SAVED[kind](compiled, tmp_path)  # and conversely
    again = read(kind, tmp_path, net)
    if kind == "store":
        assert len(there) == len(again) == 12
    elif kind == "curvature":
        torch.testing.assert_close(there.dense(), back.dense())
        torch.testing.assert_close(again.dense(), back.dense())
    elif kind != "finetuned":  # trained anew, from other random numbers
        torch.testing.assert_close(there.predict(X), back.predict(X))
        torch.testing.assert_close(again.predict(X), back.predict(X))


MASKED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "fit": lambda net, params: linnet.fit(linnet.linearize(net, params), (X, Y)),
    "cross-entropy": lambda net, params: linnet.fit(linnet.linearize(net, params), (X, Y), "cross-entropy"),
    "adapt": lambda net, params: linnet.adapt(net, (X, Y), params=params, weight=0.5, ridge=0.1),
    "gp": lambda net, params: linnet.TangentGP(net, Gaussian(), params=params).fit(X, X[:, :3]),
    "laplace": lambda net, params: linnet.Laplace(net, Categorical(), "diagonal", params=params).fit((X, Y)),
}


@pytest.mark.parametrize("kind", MASKED)
def test_masks_come_with_the_linearization(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = network()
    params = {"0.weight": torch.arange(24).reshape(6, 4) % 2 == 0, "3.bias": True}
    made = MASKED[kind](net, params)
    made.save(tmp_path)
    with pytest.raises(LinnetError, match=r"linearize\("):
        linnet.load(tmp_path, net)
    back = linnet.load(tmp_path, linnet.linearize(net, params))
    torch.testing.assert_close(back.predict(X), made.predict(X))


def test_made_up_inputs_show_no_example(tmp_path: Path) -> None:
    torch.manual_seed(0)
    linnet.curvature(network(), (X, Y), Categorical()).save(tmp_path)
    from safetensors.torch import load_file

    for t in load_file(tmp_path / "curvature.safetensors").values():
        if t.shape[-1:] == X.shape[1:] and t.dtype == X.dtype:
            assert not (t[..., None, :] == X).all(-1).any()
