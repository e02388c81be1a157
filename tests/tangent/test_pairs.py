"""Data that come in batches: what is a batch, what is a pair, and what is neither."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import linnet
from linnet.errors import DataError
from linnet.tangent.gather import gather_data, in_batches, pairs

N = 23
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(N) % 3
VALUES = nn.functional.one_hot(Y, 3).double()
CATEGORICAL = linnet.likelihoods.Categorical()


def batches(y: Tensor = Y, size: int = 5) -> list[tuple[Tensor, Tensor]]:
    return [(X[i : i + size], y[i : i + size]) for i in range(0, N, size)]


class Again:
    """Batches that can be read again."""

    def __init__(self, y: Tensor = Y) -> None:
        self.y = y

    def __iter__(self) -> Iterator[Any]:
        yield from batches(self.y)


class Samples(IterableDataset[Any]):
    """A stream of samples."""

    def __init__(self, y: Tensor = Y) -> None:
        self.y = y

    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, self.y, strict=True)


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "list": batches,
    "list of one": lambda y: [(X, y)],
    "list of two": lambda y: batches(y, 12),
    "list of dicts": lambda y: [{"input": one, "labels": targets} for one, targets in batches(y)],
    "list of two dicts": lambda y: [{"input": one, "label": targets} for one, targets in batches(y, 12)],
    "list of arrays": lambda y: [[one.numpy(), targets.numpy()] for one, targets in batches(y)],
    "anything that yields": Again,
    "iterator": lambda y: iter(batches(y)),
    "stream of samples": Samples,
    "list of samples": lambda y: list(zip(X, y, strict=True)),
    "samples": lambda y: zip(X, y.numpy(), strict=True),
    "values of a dict": lambda y: dict(enumerate(batches(y))).values(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_every_kind_are_one_pair(kind: str) -> None:
    x, y = gather_data(KINDS[kind](Y))
    assert torch.equal(x["input"] if "dict" in kind and kind.startswith("list") else x, X)
    assert torch.equal(y, Y)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([X, Y], False),
        ([X, Y.tolist()], False),
        ([X.tolist(), Y.tolist()], False),
        ([[[1.0, 2.0], [3.0, 4.0]], [[0.0, 1.0], [1.0, 0.0]]], False),
        ([(X, X), Y], False),
        ([{"input": X}, Y], False),
        ((X, Y), False),
        (tuple(batches()), False),
        ([X, X, Y], False),
        (X, False),
        (X.numpy(), False),
        ("data", False),
        ({"input": X, "labels": Y}, False),
        (TensorDataset(X, Y), False),
        (DataLoader(TensorDataset(X, Y)), False),
        (Again, False),
        ([(X, Y), (X, Y)], True),
        ([((X, X), Y), ((X, X), Y)], True),
    ],
)
def test_what_holds_batches(data: Any, expected: bool) -> None:
    assert in_batches(data) == expected


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def gp() -> Any:
    return linnet.TangentGP(network(), linnet.likelihoods.Gaussian())


def stored(data: Any) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        store = linnet.audit.GradientStore(folder, network(), CATEGORICAL, torch.float64).add(data)
        return store.self_influence()


# what each call makes of data with the targets that it takes, as tensors
CALLS: dict[str, tuple[Tensor, Callable[[Any], Tensor]]] = {
    "fit": (Y, lambda data: linnet.fit(linnet.linearize(network()), data, solver="dual").predict(X)),
    "softmax": (Y, lambda data: linnet.fit(linnet.linearize(network()), data, "cross-entropy").predict(X)),
    "update": (Y, lambda data: linnet.fit(linnet.linearize(network()), (X, Y)).update(data).predict(X)),
    "adapt": (Y, lambda data: linnet.adapt(network(), data, weight=0.5, ridge=0.1).predict(X)),
    "with_head": (Y, lambda data: linnet.with_head(network(), 3, data=data)(X)),
    "TangentGP": (VALUES, lambda data: gp().fit(data).predictive(X).mean),
    "TangentGP.adapt": (VALUES, lambda data: gp().fit(X, VALUES).adapt(data).predictive(X).mean),
    "curvature": (Y, lambda data: linnet.curvature(network(), data, CATEGORICAL, "kfac").dense()),
    "Laplace": (Y, lambda data: linnet.Laplace(network(), CATEGORICAL, "low-rank").fit(data).log_evidence()),
    "evaluate": (Y, lambda data: torch.tensor(linnet.evaluate(lambda x: network()(x).softmax(1), data).nll)),
    "store": (Y, stored),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "kind", ["list", "list of two", "anything that yields", "iterator", "stream of samples"]
)
def test_every_call_takes_batches(call: str, kind: str) -> None:
    targets, make = CALLS[call]
    torch.testing.assert_close(make(KINDS[kind](targets)), make((X, targets)), rtol=1e-6, atol=1e-8)


class Once:
    """Batches that look as if they could be read again."""

    def __init__(self) -> None:
        self.rest = iter(batches())

    def __iter__(self) -> Iterator[Any]:
        return self.rest


def test_curvatures_keep_nothing_that_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def curvature(data: Any, **options: Any) -> Tensor:
        return linnet.curvature(network(), data, CATEGORICAL, "diagonal", **options).dense()

    expected = curvature((X, Y))
    monkeypatch.setattr("linnet.curvatures.stream.gather_data", None)
    for data in (batches(), [(X, Y)], Again(), Samples()):
        torch.testing.assert_close(curvature(data), expected)
    inputs = linnet.curvature(
        network(), [{"input": x} for x, _ in batches()], CATEGORICAL, "diagonal"
    ).dense()
    torch.testing.assert_close(inputs, expected)  # without targets
    with pytest.raises(DataError, match="second"):
        curvature(Once())
    monkeypatch.undo()
    torch.testing.assert_close(curvature(iter(Once())), expected)


def test_iterators_last_for_calls_that_read_them_twice() -> None:
    tuned = [
        linnet.Laplace(network(), CATEGORICAL).fit((X, Y)).tune("validation", data, steps=2).prior_precision
        for data in ((X, Y), iter(batches()))
    ]
    assert tuned[0] == pytest.approx(tuned[1])
    penalties, evidence = [], []
    for make in (lambda: (X, Y), lambda: iter(batches())):
        net = network()
        method = linnet.continual.NonOnlineLaplace(net, CATEGORICAL, "diagonal")
        method.consolidate(make())
        method.consolidate(make())  # looks at the data of both
        with torch.no_grad():
            net[0].weight += 0.1
        penalties.append(method.penalty())
        online = linnet.continual.OnlineLaplace(net, CATEGORICAL, "diagonal", prior_precision=1.0)
        evidence.append(online.log_evidence(make()))
    torch.testing.assert_close(*penalties)
    assert evidence[0] == pytest.approx(evidence[1])


def test_samples_come_together_as_far_as_they_have_one_shape() -> None:
    data = [(torch.ones(2 + i // 40), 0) for i in range(60)]
    assert [len(y) for _, y in pairs(torch.utils.data.Subset(data, range(60)))] == [32, 8, 20]
