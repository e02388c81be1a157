"""The stream of classes: closed forms that meet samples once are those of all samples at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.continual import class_stream
from experiments.continual.class_stream import Expansion, Gram, Means, Recursive, learned, right, streamed


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Features of twenty classes."""
    monkeypatch.setattr(class_stream, "WIDTH", 40)
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(800) % 20
    centers = 2 * torch.randn(20, 8, generator=generator)
    phi = (centers[y] + torch.randn(800, 8, generator=generator)).double()
    return {"pool": phi[:600], "pool labels": y[:600], "test": phi[600:], "test labels": y[600:]}


def test_a_stream_has_every_class_once(data: dict[str, Tensor]) -> None:
    steps, (_, y) = streamed(data, 0)
    assert [sorted(labels.unique().tolist()) for _, labels in steps] == [
        [2 * k, 2 * k + 1] for k in range(10)
    ]
    assert {len(labels) for _, labels in steps} == {2 * class_stream.SHOTS}
    assert y.bincount().tolist() == [10] * 20


def test_ridges_are_those_of_all_samples(data: dict[str, Tensor]) -> None:
    steps, test = streamed(data, 0)
    layer = Expansion(8, 0)
    gram, recursive = Gram(layer), Recursive(layer)
    for phi, y in steps:
        gram.learn(phi, y)
        recursive.learn(phi, y)
    h = layer(torch.cat([phi for phi, _ in steps]))
    t = F.one_hot(torch.cat([y for _, y in steps]), 20).double()
    for found, ridge in ((gram, gram.ridge), (recursive, recursive.first.ridge)):
        weights = torch.linalg.solve(h.T @ h + ridge * torch.eye(40).double(), h.T @ t)
        assert torch.allclose(found.outputs(test[0]), layer(test[0]) @ weights, atol=1e-6)
    held = torch.cat([torch.arange(len(y)) % 5 == 4 for _, y in steps])

    def error(ridge: float) -> float:
        rest = h[~held]
        weights = torch.linalg.solve(rest.T @ rest + ridge * torch.eye(40).double(), rest.T @ t[~held])
        return float((h[held] @ weights - t[held]).square().sum())

    assert gram.ridge == min(class_stream.RIDGES, key=error)


def test_what_is_learned_and_kept(data: dict[str, Tensor]) -> None:
    steps, test = streamed(data, 1)
    found = {name: learned(make(8, 0), steps, test) for name, make in class_stream.LEARNERS.items()}
    assert min(one["accuracy"][-1] for one in found.values()) > 50
    assert found["nearest class mean"]["bytes"] == 20 * 8 * 8
    mean = Means()
    for phi, y in steps:
        mean.learn(phi, y)
    known = torch.stack([torch.cat([phi[y == k] for phi, y in steps]).mean(0) for k in range(20)])
    assert (
        right(F.normalize(test[0]) @ F.normalize(known).T, test[1])
        == found["nearest class mean"]["accuracy"][-1]
    )


@pytest.mark.parametrize("kind", class_stream.ORDERS)
def test_orders_and_forgetting_are_exact(kind: str, data: dict[str, Tensor]) -> None:
    steps, test = streamed(data, 0)
    found = class_stream.differences(class_stream.ORDERS[kind], 8, steps, test[0], 0)
    assert max(found["orders"], found["forgotten"]) < 1e-5
    assert found["outputs"] > 1
    assert found["probability of the forgotten"] == 0


def test_tables() -> None:
    cells: list[dict[str, Any]] = []
    for seed in (0, 1):
        for name in class_stream.SETS:
            parts = [("stream", one) for one in class_stream.LEARNERS]
            parts += [("joint", one) for one in class_stream.ORDERS]
            for role, method in parts:
                accuracy = [80.0 + seed, 60.0 + seed]
                own = {"accuracy": accuracy, "seconds of a step": [0.5, 0.7], "bytes": 2_000_000}
                cells.append({"set": name, "method": method, "role": role, "seed": seed, **own})
            for method in class_stream.ORDERS:
                own = {"orders": 1e-9 * (1 + seed), "forgotten": 1e-10, "outputs": 3.0}
                cells.append({"set": name, "method": method, "role": "exactness", "seed": seed, **own})
    assert "| CIFAR-100, nearest class mean | 70.5 ± 0.5 | 60.5 ± 0.5 | 2.0 | 0.60 |" in class_stream.table(
        cells
    )
    assert "| CIFAR-100, linnet, all at once | – | 60.5 ± 0.5 |" in class_stream.table(cells)
    assert "| bank requests, linnet | 2.0e-09 | 1.0e-10 | 3.0 |" in class_stream.exactness(cells)


def test_the_layer_is_random_by_its_seed() -> None:
    one, other = Expansion(3, 0), Expansion(3, 1)
    assert isinstance(one, nn.Module)
    assert not torch.equal(one.draws, other.draws)
