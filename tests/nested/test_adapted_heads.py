"""``linnet.adapt`` of networks with heads, wrappers and weights of every make: the plain network's values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import linnet
from linnet.errors import InputError, ModelError
from linnet.nested.search import BIAS

N = 15


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, 4, generator=generator, dtype=torch.float64), torch.arange(N) % 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def half_weights(layer: nn.Linear) -> nn.Module:
    """A mask over half of the weights."""
    return prune.random_unstructured(layer, "weight", 0.5)


def old_norm(layer: nn.Linear) -> nn.Module:
    """Weight normalization as it was before parametrizations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = nn.utils.weight_norm(layer)
    return made


MAKES: list[Callable[[nn.Linear], nn.Module]] = [
    parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal,
    nn.utils.spectral_norm, old_norm, half_weights,
]  # fmt: skip


@pytest.mark.parametrize("outputs", [3, 7])
def test_a_lone_linear_layer_is_a_head_on_features(outputs: int, tmp_path: Path) -> None:
    (x, y), layer = data(), nn.Linear(4, outputs).double()
    fit, same = linnet.adapt(layer, (x, y)), linnet.adapt(nn.Sequential(layer), (x, y))
    assert fit.is_probe
    assert torch.equal(fit.predict(data(1)[0]), same.predict(data(1)[0]))
    assert torch.equal(fit.loo(), same.loo())
    fit.save(tmp_path)
    assert torch.equal(linnet.load(tmp_path, layer).predict(x), fit.predict(x))
    half = linnet.adapt(layer, (x, y), output=lambda r: r / 2)
    half.save(tmp_path / "half")
    assert torch.equal(
        linnet.load(tmp_path / "half", layer, output=lambda r: r / 2).predict(x), half.predict(x)
    )


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.thinned(3)
def test_a_head_whose_weight_is_made_of_others_is_replaced(make: Any) -> None:
    net, plain, (x, y) = network(), network(), data()
    make(net[4])
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fit = linnet.adapt(net.train(), (x, y), weight=0.5, ridge=0.1)
    same = linnet.adapt(plain, (x, y), weight=0.5, ridge=0.1)
    assert torch.allclose(fit.predict(data(1)[0]), same.predict(data(1)[0]), atol=1e-8)
    headed = linnet.with_head(net, 3, data=(x, y))
    assert torch.allclose(headed(x), linnet.with_head(plain, 3, data=(x, y))(x))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("make", MAKES)
def test_a_fit_on_such_a_head_alone_is_loaded(make: Any, tmp_path: Path) -> None:
    (x, y), layer = data(), make(nn.Linear(4, 4).double())
    fit = linnet.adapt(layer, (x, y))
    fit.save(tmp_path)
    assert torch.equal(linnet.load(tmp_path, layer).predict(x), fit.predict(x))


@pytest.mark.parametrize("make", MAKES)
def test_lower_layers_whose_weights_are_made_of_others_take_part(make: Any) -> None:
    net, (x, y) = network(), data()
    make(net[2])
    fit = linnet.adapt(net.train(), (x, y), weight=0.5, ridge=0.1)
    own, head = fit.module.model, fit.module.model[4].weight
    rows = []
    for value in own[:4].requires_grad_()(x) @ head.T:
        parts = [
            torch.autograd.grad(one, list(own[:4].parameters()), retain_graph=True, allow_unused=True)
            for one in value
        ]
        rows.append([torch.cat([g.flatten() for g in part if g is not None]) for part in parts])
    j = torch.stack([torch.cat(row) for row in rows])
    assert torch.allclose(fit.module.kernel(x), j @ j.T / len(head), atol=1e-8)


def test_a_last_layer_with_a_parametrization_is_selected_whole() -> None:
    net = network()
    parametrizations.weight_norm(net[4])
    names = linnet.linearize(net, "last-layer").parameter_names
    assert sorted(names) == sorted(f"4.{name}" for name, _ in net[4].named_parameters())
    assert parametrize.is_parametrized(net[4])


@pytest.mark.parametrize("compiled", ["wrapped", "in place", "a part"])
def test_a_compiled_network_is_adapted_as_it_was(compiled: str, tmp_path: Path) -> None:
    net, (x, y) = network(), data()
    expected = linnet.adapt(net, (x, y), weight=0.5, ridge=0.1)
    made: Any = net
    if compiled == "wrapped":
        made = torch.compile(net, backend="eager")
    elif compiled == "in place":
        made.compile(backend="eager")
    else:
        made = nn.Sequential(torch.compile(net[:3], backend="eager"), *net[3:])
    fit = linnet.adapt(made, (x, y), weight=0.5, ridge=0.1)
    assert torch.allclose(fit.predict(data(1)[0]), expected.predict(data(1)[0]), atol=1e-10)
    fit.save(tmp_path)
    assert torch.allclose(linnet.load(tmp_path, made).predict(x), fit.predict(x), atol=1e-10)


def test_leave_one_out_is_the_criterion_that_there_is() -> None:
    net, (x, y) = network(), data()
    by_name, by_default = linnet.adapt(net, (x, y), ridge="loo"), linnet.adapt(net, (x, y))
    assert (by_name.ridge, by_name.body_weight) == (by_default.ridge, by_default.body_weight)
    for criterion in ("gcv", "evidence", "LOO"):
        with pytest.raises(InputError, match="loo"):
            linnet.adapt(net, (x, y), ridge=criterion)


@pytest.mark.parametrize(
    ("net", "params"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double(), None),
        (network(), ["4.weight", "4.bias"]),
        (network(), "last-layer"),
    ],
)
def test_no_weights_below_the_head_leave_the_probe(net: nn.Sequential, params: Any, tmp_path: Path) -> None:
    x, y = data()
    for weight in (None, 0.5)[params is None :]:  # what has no weights below its head is a probe
        with pytest.raises(ModelError, match="weight=0"):
            linnet.adapt(net, (x, y), params=params, weight=weight)
    fit = linnet.adapt(net, (x, y), params=params, weight=0, ridge=0.1)
    both = torch.cat([x, data(1)[0]])
    phi = net[:-1](both).detach()
    phi = phi - phi[:N].mean(0)
    kernel = BIAS + phi @ phi[:N].T / phi[:N].square().sum(1).mean()
    square = kernel[:N] + 0.1 * torch.eye(N, dtype=torch.float64)
    expected = kernel[N:] @ torch.linalg.solve(square, 15 * nn.functional.one_hot(y).double())
    assert torch.allclose(fit.predict(both[N:]), expected, atol=1e-6)
    fit.save(tmp_path)
    back = linnet.load(tmp_path, net)
    assert torch.allclose(back.predict(both[N:]), expected, atol=1e-6)
    more = back.update((data(1)[0], y), ridge="loo")
    assert more.body_weight == 0
    assert torch.allclose(fit.merge().network(both[N:]).double(), expected, atol=1e-5)
