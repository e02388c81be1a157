"""Data of any kind: what is a batch, in which order loaders are read, and streams that are written out."""

from __future__ import annotations

import functools
import gc
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import linnet
from linnet.errors import DataError, DiskSpaceError, InputError
from linnet.tangent import data as reading
from linnet.tangent.batch import batch_size
from linnet.tangent.data import Data, Gathered, in_batches, pairs
from linnet.tangent.inputs import DataNotes

N = 23
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
IDS = torch.arange(2 * N).view(N, 2)
MASK = torch.ones(5, dtype=torch.bool)
Y = torch.arange(N) % 3
VALUES = nn.functional.one_hot(Y, 3).double()
CATEGORICAL = linnet.likelihoods.Categorical()
PAIRS = TensorDataset(X, Y)


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
        self.y, self.read = y, 0

    def __iter__(self) -> Iterator[Any]:
        for pair in zip(X, self.y, strict=True):
            self.read += 1
            yield pair


class Positions:
    """Samples by position, without torch's base class, as other libraries have them."""

    def __init__(self, sample: Callable[[int], Any]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.sample(i)


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "pair": lambda y: (X, y),
    "list of x and y": lambda y: [X, y],
    "arrays": lambda y: (X.numpy(), y.numpy()),
    "array and list": lambda y: (X.numpy(), y.tolist()),
    "tensors": lambda y: TensorDataset(X, y),
    "loader": lambda y: DataLoader(TensorDataset(X, y), batch_size=6),
    "loader of a stream": lambda y: DataLoader(Samples(y), batch_size=5),
    "set": lambda y: Positions(lambda i: (X[i], y[i])),
    "set of arrays": lambda y: Positions(lambda i: [X[i].numpy(), int(y[i])]),
    "set of dicts": lambda y: Positions(lambda i: {"input": X[i].tolist(), "label": np.int64(y[i])}),
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


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("share", [reading.IN_MEMORY, 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_data_of_every_kind_are_one_pair(
    kind: str, share: float, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "IN_MEMORY", share)
    x, y = Data.of(KINDS[kind](Y)).pair
    assert torch.equal(x["input"] if "dicts" in kind else x, X.float() if kind == "set of dicts" else X)
    assert torch.equal(y, Y)


def test_structured_samples_and_shared_tensors() -> None:
    def shared(samples: list[Any]) -> Any:
        return {"x": torch.stack([x for x, _ in samples]), "mask": MASK}, torch.stack([y for _, y in samples])

    x, _ = Data.of(DataLoader(PAIRS, batch_size=2, collate_fn=shared)).pair
    assert torch.equal(x["mask"], MASK)
    assert torch.equal(x["x"], X)
    x, _ = Data.of(Positions(lambda i: ((X[i], {"ids": IDS[i], "n": i}), Y[i]))).pair
    assert isinstance(x, tuple)
    assert torch.equal(x[1]["ids"], IDS)
    assert torch.equal(x[1]["n"], torch.arange(N))
    x, _ = Data.of(((X.numpy(), [row.tolist() for row in IDS]), Y)).pair
    assert torch.equal(x[1], IDS)


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
        (PAIRS, False),
        (DataLoader(PAIRS), False),
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


@functools.cache
def of_a_pair(call: str) -> Tensor:
    """What a call makes of one pair."""
    targets, make = CALLS[call]
    return make((X, targets))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["list of two", "iterator", "stream of samples"])
@pytest.mark.thinned(3)
def test_every_call_takes_batches(call: str, kind: str) -> None:
    targets, make = CALLS[call]
    torch.testing.assert_close(make(KINDS[kind](targets)), of_a_pair(call), rtol=1e-6, atol=1e-8)


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
    monkeypatch.setattr("linnet.curvatures.stream.Data", None)
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
    assert [len(y) for _, y in pairs(torch.utils.data.Subset(data, range(60)), DataNotes())] == [32, 8, 20]


def test_device() -> None:
    x, y = Data.of((X, Y), torch.nn.Linear(3, 1, device="meta", dtype=X.dtype)).pair
    assert (x.device.type, y.device.type) == ("cpu", "meta")  # inputs go there batch by batch


def test_the_users_tensors_are_not_changed() -> None:
    found = Data.of((X, Y))
    assert Data.of((X, Y), keep=False).x is X
    assert Data.of(found) is found
    before = X.clone()
    found.x.zero_()
    assert torch.equal(X, before)


# -- loaders ---------------------------------------------------------------------------------------


class Backwards(Sampler[int]):
    """An order that is the user's own, drawn from every random stream."""

    def __iter__(self) -> Iterator[int]:
        random.random()
        np.random.rand()  # noqa: NPY002
        yield from reversed(range(N))


class Augmented(Dataset[Any]):
    """Samples that are flipped at random."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return (X[i] if random.random() < 0.5 else -X[i]), Y[i]


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(PAIRS, 4, shuffle=True),
    "with a generator": lambda: DataLoader(
        PAIRS, 4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "last batch dropped": lambda: DataLoader(PAIRS, 4, shuffle=True, drop_last=True),
    "last batch dropped in order": lambda: DataLoader(PAIRS, 4, drop_last=True),
    "own sampler": lambda: DataLoader(PAIRS, 4, sampler=Backwards()),
    "own batches": lambda: DataLoader(PAIRS, batch_sampler=BatchSampler(RandomSampler(PAIRS), 3, False)),
    "samples without a collation": lambda: DataLoader(
        [(X[i : i + 1], Y[i : i + 1]) for i in range(N)], batch_size=None, shuffle=True
    ),
    "workers": lambda: DataLoader(PAIRS, 4, shuffle=True, num_workers=1),
}


@pytest.mark.parametrize("name", LOADERS)
def test_positions_are_those_of_the_data_set(name: str) -> None:
    loader = LOADERS[name]()
    generator = loader.generator
    streams = [torch.get_rng_state(), *([generator.get_state()] if generator else [])]
    others = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002
    found = Data.of(loader)
    assert torch.equal(found.x, X)
    assert torch.equal(found.y, Y)
    assert not found.warnings
    after = [torch.get_rng_state(), *([generator.get_state()] if generator else [])]
    assert all(torch.equal(a, b) for a, b in zip(streams, after, strict=True))
    assert others == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index] # noqa: NPY002


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_answers_by_position_name_samples_of_the_data_set(loss: str) -> None:
    torch.manual_seed(0)
    lin = linnet.linearize(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    expected, found = (linnet.fit(lin, data, loss) for data in (PAIRS, LOADERS["shuffled"]()))
    torch.testing.assert_close(found.forget([3]).predict(X), expected.forget([3]).predict(X))
    torch.testing.assert_close(found.influence(X[:2]), expected.influence(X[:2]))
    assert found.record.warnings == expected.record.warnings


@pytest.mark.parametrize(
    ("sampler", "positions"),
    [
        (lambda: SubsetRandomSampler([7, 2, 5]), [2, 5, 7]),
        (lambda: [7, 2, 2], [2, 2, 7]),
        (lambda: RandomSampler(PAIRS, num_samples=3), None),
        (lambda: WeightedRandomSampler(torch.ones(N), 2 * N), None),
    ],
)
def test_what_was_drawn_is_said(sampler: Callable[[], Any], positions: list[int] | None) -> None:
    with pytest.warns(UserWarning, match="draws"):
        data = Data.of(DataLoader(PAIRS, 2, sampler=sampler()))
    found = [int((row == X).all(1).nonzero()) for row in data.x]
    assert found == sorted(found)
    assert positions in (None, found)
    assert "draws" in data.warnings[0]


@pytest.mark.parametrize(
    "data", [Augmented(), DataLoader(Augmented(), 3), DataLoader(Subset(Augmented(), range(9)))]
)
def test_augmentation_is_said_and_drawn_alike(data: Any) -> None:
    random.seed(0)
    with pytest.warns(UserWarning, match="augmentation"):
        first, second = Data.of(data), Data.of(data)
    assert torch.equal(first.x, second.x)  # no random stream has moved
    assert "augmentation" in first.warnings[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Data.of(data, keep=False)  # no position is asked for


def test_a_fit_records_what_was_drawn() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    drawn = DataLoader(PAIRS, 4, sampler=SubsetRandomSampler(range(7)))
    with pytest.warns(UserWarning, match="draws"):
        fits = linnet.fit(linnet.linearize(net), drawn), linnet.adapt(net, drawn, weight=0.5, ridge=0.1)
    for fit in fits:
        assert any("draws" in line for line in fit.forget([0]).record.warnings)


# -- streams ---------------------------------------------------------------------------------------


def structured(size: int = 4) -> Iterator[tuple[Any, Tensor]]:
    """A stream of batches, with a mask that all examples share."""
    for start in range(0, N, size):
        part = slice(start, start + size)
        yield {"x": X[part], "ids": IDS[part], "mask": MASK}, Y[part]


@pytest.mark.parametrize("limit", [10**9, 400, 1])
def test_a_stream_is_what_its_batches_are_side_by_side(limit: int, files: Path) -> None:
    stream = Gathered(limit)
    for x, y in structured():
        stream.add(x, y)
    x, y = stream.whole()
    assert torch.equal(x["x"], X)
    assert torch.equal(x["ids"], IDS)
    assert torch.equal(x["mask"], MASK)
    assert torch.equal(y, Y)
    assert x["x"].dtype == X.dtype
    assert y.dtype == Y.dtype
    del stream
    gc.collect()
    assert not list(files.iterdir())  # mapped, and without a name
    assert torch.equal(x["x"], X)


def test_a_stream_is_read_once_by_everything(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    monkeypatch.setattr(reading, "IN_MEMORY", 0.0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    lin = linnet.linearize(net)
    data = Samples()
    fit = linnet.fit(lin, data, ridge="loo", solver=linnet.fitting.Sketch(20))
    assert data.read == N
    expected = linnet.fit(lin, (X, Y), ridge="loo", solver=linnet.fitting.Sketch(20))
    torch.testing.assert_close(fit.loo(), expected.loo())
    torch.testing.assert_close(fit.influence(X[:2]), expected.influence(X[:2]))
    assert fit.forget([1]).update(iter([(X[:2], Y[:2])])).n == N + 1
    process = linnet.TangentGP(net, linnet.likelihoods.Gaussian())
    targets = torch.nn.functional.one_hot(Y).float()
    expected_mean = process.fit(X, targets).predictive(X[:2]).mean
    fitted = linnet.adapt(net, ((X[i : i + 5], Y[i : i + 5]) for i in range(0, N, 5)), weight=0.5, ridge=0.1)
    assert fitted.predict(X[:2]).shape == expected_mean.shape


def test_what_is_held_and_joined_keeps_to_the_limit(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    """Every batch has 128 bytes, and takes as many again when it is put beside the others."""
    joined: list[int] = []
    original = reading.side_by_side

    def noting(parts: Any) -> Any:
        joined.append(sum(x.nbytes + y.nbytes for x, y in parts))
        return original(parts)

    monkeypatch.setattr(reading, "side_by_side", noting)
    for limit, batches_held in ((2 * 128 * 6, 6), (2 * 128 * 3, 3), (2 * 128 - 1, 0)):
        stream, joined[:] = Gathered(limit), []
        for count, start in enumerate(range(0, N, 4), 1):
            stream.add(X[start : start + 4], Y[start : start + 4])
            assert len(stream._batches) == (count if count <= batches_held else 0)
            assert bool(stream._files) == (count > batches_held)
        x, y = stream.whole()
        assert 2 * sum(joined) <= limit
        assert joined == ([32 * N] if batches_held == 6 else [])  # what is in files is not put together
        assert torch.equal(x, X)
        assert torch.equal(y, Y)


def test_files_keep_tensors_apart(files: Path) -> None:
    """Keys that come in another order, and a mask that is as long as a batch."""
    stream = Gathered(2 * 5 * 32 + 2 * 32)  # the first batch is held
    stream.add({"x": X[:5], "mask": MASK}, Y[:5])
    for start in range(5, N, 6):
        part = slice(start, start + 6)
        stream.add({"mask": MASK, "x": X[part]} if start == 5 else {"x": X[part], "mask": MASK}, Y[part])
    assert stream._files
    x, y = stream.whole()
    assert torch.equal(x["x"], X)
    assert torch.equal(x["mask"], MASK)
    assert torch.equal(y, Y)
    stream = Gathered(1)  # the first batch is all that is seen of the mask
    stream.add({"x": X[:5], "mask": MASK}, Y[:5])
    with pytest.raises(DataError, match="examples"):
        stream.add({"x": X[5:11], "mask": MASK}, Y[5:11])


def test_the_budget_of_a_call_is_that_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    class Noted(Gathered):
        def __init__(self, limit: int) -> None:
            limits.append(limit)
            super().__init__(limit)

    monkeypatch.setattr(reading, "Gathered", Noted)
    torch.manual_seed(1)
    net, values = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
        nn.functional.one_hot(Y, 3).float(),
    )
    lin, classes, spectrum = linnet.linearize(net), linnet.likelihoods.Categorical(), linnet.spectrum
    memory: Any = {"memory": "80MB"}
    passes: Any = {"passes": linnet.curvatures.Passes(memory="80MB")}
    settings: tuple[Any, ...] = ("dual", "shared", "primal", linnet.fitting.Sketch(10))
    fits: list[Any] = [linnet.fit(lin, (X, Y), solver=solver, **memory) for solver in settings]
    fits += [linnet.fit(lin, (X, Y), "cross-entropy", **memory), linnet.adapt(net, (X, Y), **memory)]
    process = linnet.TangentGP(net, linnet.likelihoods.Gaussian(), **memory).fit(X, values)
    laplace = linnet.Laplace(net, classes, **passes)
    calls: list[Any] = [
        *(fit.update for fit in fits),
        lambda data: linnet.fit(lin, data, **memory),
        lambda data: linnet.fit(lin, data, "cross-entropy", **memory),
        lambda data: linnet.adapt(net, data, weight=0.5, ridge=0.1, **memory),
        lambda data: linnet.curvature(net, data, classes, "diagonal", **passes),
        lambda data: laplace.fit(data).tune("validation", iter(batches()), steps=1),
        lambda data: spectrum.alignment(lin, data, **memory),
        lambda data: spectrum.energy_concentration(lin, data, k=2, **memory),
        lambda data: linnet.optim.gradient_flow(lin, data, [1.0], learning_rate=0.1, **memory),
        lambda data: linnet.audit.tune_ridge(fits[0], data),
    ]
    for call in calls:
        limits.clear()
        call(iter(batches()))
        assert set(limits) == {20_000_000}
    for conditioned in (process.update, process.adapt, process.fit):
        limits.clear()
        conditioned(iter(batches(VALUES)))
        assert set(limits) == {20_000_000}
    limits.clear()
    linnet.fit(lin, iter(batches()))
    assert limits[0] > 20_000_000  # a share of what there is
    with pytest.raises(InputError, match="'much'"):
        Data.of(iter(batches()), memory="much")


@pytest.mark.parametrize("share", [reading.IN_MEMORY, 0.0])
def test_a_pair_is_copied(monkeypatch: pytest.MonkeyPatch, files: Path, tmp_path: Path, share: float) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    on_disk: list[Any] = []

    class Noted(reading._Mapped):
        def __init__(self, like: Tensor) -> None:
            super().__init__(like)
            on_disk.append(self)

    monkeypatch.setattr(reading, "IN_MEMORY", share)
    monkeypatch.setattr(reading, "_Mapped", Noted)
    mine, ids = X.clone(), IDS.clone()
    x, _ = Data.of(({"x": mine, "ids": ids, "mask": MASK}, Y)).pair
    mine.zero_()
    ids.zero_()
    assert torch.equal(x["x"], X)
    assert torch.equal(x["ids"], IDS)
    assert bool(on_disk) == (share == 0.0)
    for mode, copied in (("r", False), ("c", True), ("r+", True)):
        array = np.load(tmp_path / "x.npy", mmap_mode=mode)
        x, _ = Data.of((array[1:], Y[1:])).pair
        assert (x.data_ptr() != array[1:].ctypes.data) == copied


def test_streams_that_cannot_be(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    for limit in (10**9, 1):
        stream = Gathered(limit)
        with pytest.raises(DataError, match="empty"):
            stream.whole()
        stream.add(X[:4], Y[:4])
        with pytest.raises((DataError, InputError)):
            _added(stream, X[:4, :2], Y[:4])
        stream = Gathered(limit)
        stream.add(X[:4], Y[:4])
        with pytest.raises(InputError, match="structure"):
            _added(stream, {"x": X[:4]}, Y[:4])
    stream = Gathered(1)
    stream.add(X[:4], Y[:4])
    with pytest.raises(DataError, match="float32"):
        stream.add(X[:4].float(), Y[:4])
    with pytest.raises(DataError, match="empty"):
        Data.of(iter([]))
    with pytest.raises(InputError, match="batch"):
        Data.of(iter([(X, Y), 3]))
    with pytest.raises(InputError, match="sample"):
        linnet.fit(linnet.linearize(nn.Linear(3, 3)), _Wrong())
    monkeypatch.setattr(reading._Mapped, "append", _full)
    with pytest.raises(DiskSpaceError, match="linnet-data-"):
        Gathered(1).add(X, Y)
    del stream
    gc.collect()
    assert not list(files.iterdir())


def _added(stream: Gathered, x: Any, y: Tensor) -> None:
    """Add a batch and put all together."""
    stream.add(x, y)
    stream.whole()


def _full(self: Any, rows: Tensor) -> None:
    """No room on the disk."""
    reading.refuse_write(self.path, OSError(28, "No space left on device"))


class _Wrong(IterableDataset[Any]):
    """A stream of numbers."""

    def __iter__(self) -> Iterator[Any]:
        yield 3


@pytest.mark.parametrize("limit", [10, 10**6])
def test_batches_may_be_the_same_tensors_filled_again(limit: int) -> None:
    x, y, held = torch.arange(12.0).view(6, 2), torch.arange(6), Gathered(limit)
    room, label = torch.empty(2, 2), torch.empty(2, dtype=torch.long)
    for at in (0, 2, 4):
        room.copy_(x[at : at + 2])
        label.copy_(y[at : at + 2])
        held.add(room, label)
    found = held.whole()
    assert torch.equal(found[0], x)
    assert torch.equal(found[1], y)


def test_what_is_no_pair_says_what_to_pass() -> None:
    x, y = torch.randn(6, 2), torch.arange(6) % 2
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    cases = (
        ({"train": TensorDataset(x, y), "test": TensorDataset(x, y)}, r"data\['train'\]"),
        ({"train": loader}, r"data\['train'\]"),
        ({"inputs": x.numpy(), "target": y.numpy()}, 'rename the entry .* to "labels"'),
        ({}, "pass data="),
    )
    for data, told in cases:
        with pytest.raises(InputError, match=told):
            linnet.adapt(nn.Linear(2, 2), data)
    with pytest.raises(InputError, match="for texts pass tokenizer"):
        batch_size({"text": ["a", "b"]})
