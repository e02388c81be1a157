"""Work inside ``resumable`` that is broken off goes on to the same bits, and other work is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import linnet
from linnet.curvatures import Passes
from linnet.curvatures.accumulate import Accumulator
from linnet.errors import InputError, LinnetError
from linnet.fitting import Sketch
from linnet.likelihoods import Categorical
from linnet.linear import formed_rows
from linnet.tangent import gram as gram_module
from linnet.tangent import store
from linnet.unfinished import Checkpoint, resumable, sums_folder
from tests.refusals import refused

N = 40
G = torch.Generator().manual_seed(0)
X, T = torch.randn(N, 4, generator=G), torch.randn(N, 3, generator=G)
Y = torch.randint(3, (N,), generator=G)


class Stop(Exception):
    """The process ends here."""


def net(shift: float = 0.0) -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2 + shift)
    return made


def fitted(**options: Any) -> Tensor:
    x, targets = options.pop("x", X), options.pop("targets", T)
    made = linnet.fit(linnet.linearize(net(options.pop("shift", 0.0))), (x, targets), **options)
    return torch.cat([made.predict(X[:5]).flatten(), made.loo().flatten()])


def curvature(data: Any = (X, Y), structure: str = "ekfac") -> Tensor:
    passes = Passes(block=4)
    return linnet.curvature(net(), data, Categorical(), structure, passes=passes).diagonal()


def typed(work: Callable[[], Tensor], **types: str) -> Callable[[], Tensor]:
    """The work in types of numbers of its own."""

    def found() -> Tensor:
        with linnet.precision(**types):
            return work()

    return found


def primal() -> Tensor:
    return fitted(solver="primal", ridge="loo")


def kernel() -> Tensor:
    return linnet.spectrum.gram(net(), X, form="trace").clone()


WORK: dict[str, Callable[[], Tensor]] = {
    "curvature": curvature,
    "curvature in float64": typed(curvature, sums="float64"),
    "primal in float32": typed(primal, sums="float32"),
    "gram in bfloat16": typed(kernel, capture="bfloat16"),
    "primal": primal,
    "sketch": lambda: fitted(solver=Sketch(dim=20, examples=30), ridge="loo"),
    "dual": lambda: fitted(solver="dual", ridge=0.3),
    "gram": kernel,
}


class Counter:
    """Counts batches, blocks of rows and steps of kernels, and breaks off before one of them."""

    def __init__(self, patch: pytest.MonkeyPatch, stop: int | None) -> None:
        self.done, self.stop = 0, stop
        for place, name in ((Accumulator, "add"), (formed_rows, "form_rows"), (gram_module, "_run")):
            patch.setattr(place, name, self.counting(getattr(place, name)))

    def counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if self.done == self.stop:
                raise Stop
            self.done += 1
            return call(*args, **options)

        return counted


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks of few examples, and a record of every step."""
    monkeypatch.setattr(formed_rows, "LARGEST", 6)
    monkeypatch.setattr(gram_module, "PRODUCT", 6)
    monkeypatch.setattr(gram_module, "SMALLEST_PRODUCT", 6)
    monkeypatch.setattr(store, "RECORD_SECONDS", 0.0)


def broken_off(work: Callable[[], object], folder: Path, stop: int | None) -> int:
    """Do the work until it breaks off; how far it came."""
    with pytest.MonkeyPatch.context() as patch:
        counter = Counter(patch, stop)
        if stop is None:
            with resumable(folder, interval=0):
                work()
        else:
            with pytest.raises(Stop), resumable(folder, interval=0):
                work()
        return counter.done


@pytest.mark.parametrize("kind", WORK)
@pytest.mark.thinned(3)
def test_it_goes_on_where_it_was_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    expected, folder = WORK[kind](), tmp_path / "sums"
    total = broken_off(WORK[kind], tmp_path / "whole", None)
    assert total > 5
    found: list[Tensor] = []
    for stop in (total // 3, total - 2):
        first = broken_off(WORK[kind], folder, stop)
        again = broken_off(lambda: found.append(WORK[kind]()), folder, None)
        assert torch.equal(found.pop(), expected), stop
        assert not folder.exists()
        if kind.startswith(("curvature", "gram")):  # a fit also asks for rows that an earlier sum had formed
            assert first + again == total
        else:
            assert again < total
    assert sums_folder() is None


@pytest.mark.parametrize("kind", ["primal", "gram"])
def test_another_budget_does_not_change_the_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are those that the sum was begun with."""
    expected, found = WORK[kind](), list[Tensor]()
    broken_off(WORK[kind], tmp_path, 4)
    monkeypatch.setattr(formed_rows, "LARGEST", 5)
    monkeypatch.setattr(gram_module, "PRODUCT", 5)
    broken_off(lambda: found.append(WORK[kind]()), tmp_path, None)
    assert torch.equal(found[0], expected)


def test_without_time_to_write_nothing_is_written(tmp_path: Path) -> None:
    with resumable(tmp_path / "sums"):
        for work in WORK.values():
            work()
        left = [path for path in tmp_path.rglob("*") if path.is_file() and "lock" not in path.name]
        assert not left
    assert not list(tmp_path.iterdir())


def test_writing_takes_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("linnet.unfinished.time.monotonic", lambda: now[0])
    file = Checkpoint(tmp_path / "sums.safetensors", {}, interval=10.0)
    writes: list[float] = []

    def slow(*args: Any) -> None:
        writes.append(now[0])
        now[0] += 5.0

    monkeypatch.setattr("linnet.unfinished.save", slow)
    for place in range(400):
        now[0] += 1.0
        file.note(0, place, {})
    assert writes[0] == 10.0
    assert all(later - earlier >= 100.0 for earlier, later in pairwise(writes))


class Stream(IterableDataset[Any]):
    """Samples one after another."""

    def __init__(self, n: int, change: float = 0.0) -> None:
        self.n, self.change = n, change

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.n):
            yield X[i] + (self.change if i == 2 else 0.0), Y[i]


def of_stream(n: int = N, change: float = 0.0, size: int = 4) -> Callable[[], Tensor]:
    return lambda: curvature(DataLoader(Stream(n, change), batch_size=size), "kfac")


OTHERS: dict[str, tuple[str, Callable[[], object], str]] = {
    "a network": ("primal", lambda: fitted(solver="primal", ridge="loo", shift=0.1), "network"),
    "targets": ("primal", lambda: fitted(solver="primal", ridge="loo", targets=T + 1), "another targets"),
    "inputs": ("primal", lambda: fitted(solver="primal", ridge="loo", x=X + 1), "another x"),
    "fewer": ("primal", lambda: fitted(solver="primal", x=X[:30], targets=T[:30]), "examples (40, now 30)"),
    "labels": ("curvature", lambda: curvature((X, Y.flip(0))), "data"),
    "a structure": ("curvature", lambda: curvature(structure="kfac"), "settings"),
    "a kernel": ("gram", lambda: linnet.spectrum.gram(net(), X + 1, form="trace"), "of other examples"),
    "sums in float64": ("curvature", typed(curvature, sums="float64"), "settings"),
    "sums in float32": ("primal", typed(primal, sums="float32"), "another types"),
    "another capture": ("gram", typed(kernel, capture="bfloat16"), "of other linnet.precision"),
    "a stream": ("stream", of_stream(change=1.0), "data"),
    "a stream that ends": ("stream", of_stream(n=8), "12 examples had been summed, now there are 8"),
    "its batches": ("stream", of_stream(size=5), "data"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.thinned(3)
def test_other_work_is_refused(name: str, tmp_path: Path) -> None:
    kind, other, words = OTHERS[name]
    folder = tmp_path / "sums"
    assert broken_off(WORK.get(kind, of_stream()), folder, 3) == 3
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert before

    def again() -> None:
        with resumable(folder, interval=1000):
            other()

    refused(InputError, again, "sums", words)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_stream_goes_on(tmp_path: Path) -> None:
    expected, folder, found = of_stream()(), tmp_path / "sums", list[Tensor]()
    broken_off(of_stream(), folder, 7)
    assert broken_off(lambda: found.append(of_stream()()), folder, None) == 3
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("name", ["3-of-4", "notes.txt"])
def test_a_folder_that_is_not_for_these_sums(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    words = ("the sums of 4 processes; there are 1", "start 4") if "of" in name else ("first notes.txt",)

    def enter() -> None:
        with resumable(tmp_path):
            raise AssertionError("entered")

    refused(InputError, enter, *words)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "arguments", [(3,), ("",), ("sums", -1.0), ("sums", "often"), ("sums", float("nan"))]
)
def test_wrong_arguments(arguments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LinnetError), resumable(*arguments):
        raise AssertionError("entered")
    assert not list(tmp_path.iterdir())
