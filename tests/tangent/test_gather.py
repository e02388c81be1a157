"""Streams of data: read once, written out where they are large, and mapped."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import linnet
from linnet.errors import DataError, DiskSpaceError, InputError
from linnet.tangent import gather
from linnet.tangent.gather import Gathered, gather_data

N = 23
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(2 * N).view(N, 2)
MASK = torch.ones(5, dtype=torch.bool)
Y = torch.arange(N) % 3


class Samples(IterableDataset[Any]):
    """A stream of single samples."""

    def __init__(self, dicts: bool = False) -> None:
        self.dicts, self.read = dicts, 0

    def __iter__(self) -> Iterator[Any]:
        for i in range(N):
            self.read += 1
            yield {"x": X[i], "label": int(Y[i])} if self.dicts else (X[i], Y[i])


def batches(size: int = 4) -> Iterator[tuple[Any, Tensor]]:
    """A stream of batches, with a mask that all examples share."""
    for start in range(0, N, size):
        part = slice(start, start + size)
        yield {"x": X[part], "ids": IDS[part], "mask": MASK}, Y[part]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("limit", [10**9, 200, 1])
def test_a_stream_is_what_its_batches_are_side_by_side(limit: int, files: Path) -> None:
    stream = Gathered(limit)
    for x, y in batches():
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


def test_every_kind_of_stream(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    for share in (gather.IN_MEMORY, 0.0):
        monkeypatch.setattr(gather, "IN_MEMORY", share)
        pairs = (
            gather_data(Samples()),
            gather_data(DataLoader(Samples(), batch_size=5)),
            gather_data((X[i : i + 7], Y[i : i + 7]) for i in range(0, N, 7)),
            gather_data(iter([(X.numpy()[:9], Y.numpy()[:9]), (X.numpy()[9:], Y.numpy()[9:])])),
            gather_data(DataLoader(TensorDataset(X, Y), batch_size=6)),
        )
        for x, y in pairs:
            assert torch.equal(x, X)
            assert torch.equal(y, Y)
        x, y = gather_data(Samples(dicts=True))
        assert torch.equal(x["x"], X)
        assert torch.equal(y, Y)


def test_a_stream_is_read_once_by_everything(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    monkeypatch.setattr(gather, "IN_MEMORY", 0.0)
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
    """Every batch has 80 bytes, and takes as many again when it is put beside the others."""
    joined: list[int] = []
    original = gather.side_by_side

    def noting(parts: Any) -> Any:
        joined.append(sum(x.nbytes + y.nbytes for x, y in parts))
        return original(parts)

    monkeypatch.setattr(gather, "side_by_side", noting)
    for limit, batches_held in ((2 * 80 * 6, 6), (2 * 80 * 3, 3), (2 * 80 - 1, 0)):
        stream, joined[:] = Gathered(limit), []
        for count, start in enumerate(range(0, N, 4), 1):
            stream.add(X[start : start + 4], Y[start : start + 4])
            assert len(stream._batches) == (count if count <= batches_held else 0)
            assert bool(stream._files) == (count > batches_held)
        x, y = stream.whole()
        assert 2 * sum(joined) <= limit
        assert joined == ([20 * N] if batches_held == 6 else [])  # what is in files is not put together
        assert torch.equal(x, X)
        assert torch.equal(y, Y)


def test_files_keep_tensors_apart(files: Path) -> None:
    """Keys that come in another order, and a mask that is as long as a batch."""
    stream = Gathered(2 * 5 * 20 + 2 * 20)  # the first batch is held
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

    monkeypatch.setattr(gather, "Gathered", Noted)
    torch.manual_seed(0)
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
        lambda data: laplace.fit(data).tune("validation", batches_of(Y), steps=1),
        lambda data: spectrum.alignment(lin, data, **memory),
        lambda data: spectrum.energy_concentration(lin, data, k=2, **memory),
        lambda data: linnet.optim.gradient_flow(lin, data, [1.0], learning_rate=0.1, **memory),
        lambda data: linnet.audit.tune_ridge(fits[0], data),
    ]
    for call in calls:
        limits.clear()
        call(batches_of(Y))
        assert set(limits) == {20_000_000}
    for conditioned in (process.update, process.adapt, process.fit):
        limits.clear()
        conditioned(batches_of(values))
        assert set(limits) == {20_000_000}
    limits.clear()
    linnet.fit(lin, batches_of(Y))
    assert limits[0] > 20_000_000  # a share of what there is
    with pytest.raises(InputError, match="'much'"):
        gather_data(batches_of(Y), memory="much")


@pytest.mark.parametrize("share", [gather.IN_MEMORY, 0.0])
def test_a_pair_is_copied(monkeypatch: pytest.MonkeyPatch, files: Path, tmp_path: Path, share: float) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    on_disk: list[Any] = []

    class Noted(gather._Mapped):
        def __init__(self, like: Tensor) -> None:
            super().__init__(like)
            on_disk.append(self)

    monkeypatch.setattr(gather, "IN_MEMORY", share)
    monkeypatch.setattr(gather, "_Mapped", Noted)
    mine, ids = X.clone(), IDS.clone()
    x, _ = gather_data(({"x": mine, "ids": ids, "mask": MASK}, Y))
    mine.zero_()
    ids.zero_()
    assert torch.equal(x["x"], X)
    assert torch.equal(x["ids"], IDS)
    assert bool(on_disk) == (share == 0.0)
    for mode, copied in (("r", False), ("c", True), ("r+", True)):
        array = np.load(tmp_path / "x.npy", mmap_mode=mode)
        x, _ = gather_data((array[1:], Y[1:]))
        assert (x.data_ptr() != array[1:].ctypes.data) == copied


def batches_of(y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """A stream of batches, as tensors."""
    yield from zip(X.split(5), y.split(5), strict=True)


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
    with pytest.raises(DataError, match="float64"):
        stream.add(X[:4].double(), Y[:4])
    with pytest.raises(DataError, match="empty"):
        gather_data(iter([]))
    with pytest.raises(InputError, match="batch"):
        gather_data(iter([(X, Y), 3]))
    with pytest.raises(InputError, match="sample"):
        linnet.fit(linnet.linearize(nn.Linear(3, 3)), _Wrong())
    monkeypatch.setattr(gather._Mapped, "append", _full)
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
    gather.refuse_write(self.path, OSError(28, "No space left on device"))


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
