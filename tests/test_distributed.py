"""Several processes: the numbers of one, or the same error on all of them, and nobody waits.

Run as a script (``RANK WORLD FOLDER``) this file is one rank.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

import linnet
from linnet import memory
from linnet.continual.laplace import OnlineLaplace
from linnet.distributed import (
    Share,
    _excerpts,
    _exchanged,
    all_same,
    all_sum,
    check_others,
    collective,
    gathered,
    least,
    sum_numbers,
)
from linnet.errors import InputError, LinnetError
from linnet.fitting import CG
from linnet.likelihoods import Categorical, Gaussian
from linnet.optim.gauss_newton import GaussNewton
from linnet.tangent.data import sharded
from linnet.unfinished import Checkpoint
from tests.curvatures.side_by_side import curvature_of, grouped
from tests.ranks import one_of_ranks, run_ranks

STRUCTURES = ["kfac", "ekfac", "diagonal", "block", "full"]
N = 50
G = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, generator=G, dtype=torch.float64)
Y = torch.randint(3, (N,), generator=G)
ROUNDING = 1e-12
STOPS = ((1, 0), (0, 2), (1, 2))  # passes finished and batches done when the second process is stopped


def net() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return made


def full(data: Any, structure: Any = "full", model: nn.Module | None = None, **options: Any) -> Any:
    return curvature_of(model or net(), data, Categorical(), structure, **options)


def parts_of(n: int, size: int, rank: int, **options: Any) -> DataLoader[Any]:
    """A loader as for training with several processes."""
    data = TensorDataset(X[:n], Y[:n])
    sampler: Any = DistributedSampler(data, size, rank, seed=5, **options)
    return DataLoader(data, batch_size=7, sampler=sampler)


# --- numbers ------------------------------------------------------------------------------------------


def numbers(rank: int, size: int) -> dict[str, Tensor]:
    """What all processes must find alike; shares are uneven, and some are empty."""
    found: dict[str, Tensor] = {}
    for expectation, block in (("exact", 20), ("mc", 30), ("empirical", 7)):
        made = full((X, Y), STRUCTURES, expectation=expectation, block=block)
        found |= {f"{name} {expectation}": one.dense() for name, one in made.items()}
        found[f"examples {expectation}"] = torch.tensor([one.made.examples for one in made.values()])
    for n in (50, 49, 1):  # 49 and 1 are no multiples of 2 or 3: the sampler fills up
        made = full(parts_of(n, size, rank), expectation="exact")
        found |= {f"sampler {n}": made.dense(), f"sampler {n} examples": torch.tensor(made.made.examples)}
    own = X[rank::size], Y[rank::size]
    found["own"] = full(own, shard=False).dense()
    found["own, low-rank"] = full(own, "low-rank", rank=6, shard=False).dense()
    found["own, product"] = full(own, "matrix-free", shard=False) @ torch.ones(43, dtype=torch.float64)
    found["loader"] = full(DataLoader(TensorDataset(X, Y), batch_size=9)).dense()
    for name, seed in (("alike", 3), ("apart", rank)):  # read in the order of the data set
        drawn = torch.Generator().manual_seed(seed)
        shuffled = DataLoader(TensorDataset(X, Y), 7, shuffle=True, generator=drawn)
        found[f"shuffled {name}"] = full(shuffled).dense()
    low = full(parts_of(49, size, rank), "low-rank", rank=43, method="randomized")
    found |= {"randomized": low.dense(), "randomized examples": torch.tensor(low.made.examples)}
    found["kfra"] = full((X, Y), "kfra", block=7).dense()
    found["local"] = full((X, Y), shard=None).dense()
    for structure in ("full", "low-rank"):
        for name, data, options in (("", (X, Y), {}), (", own", own, {"shard": False})):
            la = linnet.Laplace(net(), Categorical(), **grouped(structure, **options)).fit(data)
            found[f"evidence {structure}{name}"] = torch.stack([la.log_evidence(), torch.tensor(la.examples)])
    return found


def little(rank: int) -> dict[str, Tensor]:
    """The first process has much memory, the others little: each by itself would choose other batches."""
    kept = memory.available_bytes
    memory.available_bytes = lambda device="cpu": 10**10 if rank == 0 else 10**5
    try:
        made = full((X.repeat(6, 1), Y.repeat(6)))
    finally:
        memory.available_bytes = kept
    return {"little memory": made.dense(), "little memory examples": torch.tensor(made.made.examples)}


def alone() -> dict[str, Tensor]:
    """What every process computes by itself."""
    lin = linnet.linearize(net())
    targets = torch.eye(3, dtype=torch.float64)[Y[:12]]
    fit = linnet.fit(lin, (X[:12], targets), ridge=0.5, loss="squared")
    iterated = linnet.fit(lin, (X[:12], targets), ridge=0.5, solver=CG(1e-12, preconditioner="kfac"))
    gp = linnet.TangentGP(net(), Gaussian(variance=0.5)).fit(X[:12], targets)
    online = OnlineLaplace(network := net(), Categorical())
    online.consolidate((X, Y))
    with torch.no_grad():
        network[0].weight.add_(0.1)  # type: ignore[operator, union-attr]
    optimizer = GaussNewton(trained := net(), Categorical(), "kfac", "exact", damping=0.1)
    optimizer.step(X, Y)
    return {
        "fit": fit.predict(X),
        "cg": iterated.predict(X),
        "kernel": lin.kernel(X[:5]),
        "gp": gp.predictive(X).mean,
        "penalty": online.penalty().detach(),
        "step": torch.cat([p.detach().flatten() for p in trained.parameters()]),
    }


# --- failures -----------------------------------------------------------------------------------------


class Steps(Dataset[Any]):
    """Data that may do anything when an example is read."""

    def __init__(self, n: int, at: int, act: Callable[[], object]) -> None:
        self.n, self.at, self.act = n, at, act

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if i == self.at:
            self.act()
        return X[i % N], Y[i % N]


class Streamed(IterableDataset[Any]):
    """A stream that every process starts elsewhere in."""

    def __init__(self, rank: int, size: int) -> None:
        self.start, self.step = rank, size

    def __iter__(self) -> Iterator[Any]:
        return iter([(X[i], Y[i]) for i in range(self.start, N, self.step)])


class Broken(nn.Module):
    """A network that runs on the first process alone."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.rank = net(), rank

    def forward(self, x: Tensor) -> Tensor:
        if self.rank:
            raise RuntimeError("no such device")
        found: Tensor = self.inner(x)
        return found


def fail(error: BaseException) -> Callable[[], object]:
    def act() -> object:
        raise error

    return act


def trained(rank: int, x: Tensor, **options: Any) -> Any:
    optimizer = GaussNewton(nn.parallel.DistributedDataParallel(net()), Categorical(), **options)
    return optimizer.step(x[rank::2], Y[rank::2])


def failures(rank: int) -> dict[str, tuple[Callable[[], object], list[str]]]:
    """What fails on two ranks, and words of the error on both."""
    flawed = X.clone()
    flawed[-1] = float("nan") if rank else flawed[-1]
    other = net()
    with torch.no_grad():
        other[0].bias.add_(rank)  # type: ignore[operator, union-attr]
    data = TensorDataset(X[:49], Y[:49])
    short: Any = DistributedSampler(data, 2, rank)
    cut = DataLoader(data, batch_size=7, drop_last=True, sampler=short)
    stray: Any = DistributedSampler(data, num_replicas=3, rank=rank)
    loader = DataLoader(TensorDataset(X.roll(rank, 0), Y.roll(rank)), batch_size=7)
    product = full((X, Y), "matrix-free")
    late = TensorDataset(torch.cat([X[:25], X[25:].roll(rank, 0)]), Y)
    return {
        "NaN": (lambda: full((flawed, Y), shard=False), ["DataError: on rank 1: x holds NaN"]),
        "NaN in one's share": (lambda: full((flawed, Y), block=7), ["DataError: on rank 1: x holds NaN"]),
        "no data": (lambda: full((X[: N * (1 - rank)], Y[: N * (1 - rank)]), shard=False),
                    ["DataError: on rank 1: data is empty"]),
        "no memory": (lambda: full((X, Y), memory=10), ["MemoryBudgetError: on rank 0"]),
        "a network that fails": (lambda: full((X, Y), model=Broken(rank)), ["ModelError: on rank 1: model"]),
        "another's error": (lambda: full(Steps(N, 20, fail(KeyError("k")) if rank else bool)),
                            ["ProcessGroupError: on rank 1: KeyError: 'k'"]),
        "a long pass elsewhere": (
            lambda: full(Steps(N if rank else 10**9, 0 if rank else -1, fail(OSError("gone"))), shard=False),
            ["ProcessGroupError: on rank 1: OSError: gone"]),
        "an interrupt": (lambda: full(Steps(N, 20, fail(KeyboardInterrupt()) if rank else bool)), []),
        "structure": (lambda: full((X, Y), ("kfac", "block")[rank]),
                      ["InputError: processes differ: structure is ['kfac'] on rank 0 and ['block'] on"]),
        "memory": (lambda: full((X, Y), memory=("1GB", "2GB")[rank]),
                   ["InputError", "memory is 1GB on rank 0 and 2GB on rank 1"]),
        "weights": (lambda: full((X, Y), model=other), ["ModelError", "the hash of weights and buffers"]),
        "form": (lambda: full((X, Y if rank else Y[:, None]), shard=False),
                 ["DataError", "the form of y is torch.int64 (1,) on rank 0 and torch.int64 () on rank 1"]),
        "order": (lambda: full(loader), ["DataError", "the hash of the first examples"]),
        "a stream": (lambda: full(DataLoader(Streamed(rank, 2), 5)), ["DataError", "first examples"]),
        "other data, later": (lambda: full(late, block=5), ["DataError", "2 processes read other batches"]),
        "more data": (lambda: full((X[: N - rank], Y[: N - rank]), block=5),
                      ["DataError", "49 examples were counted on 2 processes, of 50"]),
        "a sampler that drops": (lambda: full(parts_of(49, 2, rank, drop_last=True)),
                                 ["DataError", "48 examples of 49"]),
        "a loader that drops": (lambda: full(cut), ["DataError", "42 examples of 49"]),
        "a sampler for others": (lambda: full(DataLoader(data, sampler=stray)), ["DataError", "part 0 of 3"]),
        "places": (lambda: full((X, Y)) if rank else product @ torch.ones(43).double(),
                   ["ProcessGroupError: processes came to different places"]),
        "a fit of a part": (lambda: linnet.fit(linnet.linearize(net()), parts_of(N, 2, rank), ridge=1.0),
                            ["DataError: on rank 0", "about 25 of 50 examples"]),
        "a step": (lambda: trained(rank, flawed), ["DataError: on rank 1: x holds NaN"]),
        "optimizers": (lambda: trained(rank, X, damping=0.1 + rank), ["InputError", "damping"]),
        "Laplace": (lambda: linnet.Laplace(net(), Categorical(), **grouped(shard=False)).fit((flawed, Y)),
                    ["DataError: on rank 1"]),
    }  # fmt: skip


def said_by(act: Callable[[], object]) -> str:
    try:
        act()
    except (LinnetError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def resumed(rank: int, folder: Path) -> dict[str, Tensor]:
    """The second process is stopped, also when others have written the sums of all; then all go on."""
    whole, note = Checkpoint.write, Checkpoint.note
    found = {}
    for stop in STOPS:

        def write(
            self: Checkpoint, turn: int, batches: int, tensors: Any, stop: tuple[int, int] = stop
        ) -> None:
            if rank and (turn, batches) == stop:
                raise InputError("stopped")
            whole(self, turn, batches, tensors)

        file = folder / "sums.safetensors"
        Checkpoint.write = Checkpoint.note = write  # type: ignore[method-assign]
        assert "on rank 1: stopped" in said_by(lambda file=file: full((X, Y), "ekfac", block=7, file=file))  # type: ignore[misc]
        Checkpoint.write, Checkpoint.note = whole, note  # type: ignore[method-assign]
        found[f"stopped at {stop}"] = full((X, Y), "ekfac", block=7, file=file).dense()
    return found


def run_rank(rank: int, size: int, folder: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with one_of_ranks(rank, size, folder):
        torch.save(
            numbers(rank, size) | little(rank) | alone() | resumed(rank, folder), folder / f"rank{rank}.pt"
        )
        if size == 2:
            said = {name: said_by(act) for name, (act, _) in failures(rank).items()}
            (folder / f"said{rank}.json").write_text(json.dumps(said))
            gc.collect()  # networks that the errors hold, which must not outlive the group
        assert sum_numbers([1.0]) == [size]
        if size == 3:  # the last thing that this group does
            kill = Steps(N, 20, lambda: os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None)
            (folder / f"gone{rank}.txt").write_text(said_by(lambda: full(kill)))


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    whole = full((X, Y), "ekfac", block=7).dense()
    stops = {f"stopped at {stop}": whole for stop in STOPS}
    return numbers(0, 1) | little(0) | alone() | stops


def compare(folder: Path, size: int, expected: dict[str, Tensor], ranks: list[int]) -> None:
    for rank in ranks:
        found = torch.load(folder / f"rank{rank}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            error = float((found[name] - value).abs().max() / value.abs().max())
            assert error <= (1e-6 if "low-rank" in name else 1e-10 if name == "cg" else ROUNDING), (
                f"{name} on rank {rank} of {size}: {error}"
            )
    assert not list(folder.glob("*sums*"))


@pytest.mark.dist
def test_two_processes_have_the_numbers_of_one_and_fail_alike(
    tmp_path: Path, expected: dict[str, Tensor]
) -> None:
    run_ranks(__file__, tmp_path)
    compare(tmp_path, 2, expected, [0, 1])
    first, second = (json.loads((tmp_path / f"said{rank}.json").read_text()) for rank in range(2))
    with_words = {name: words for name, (_, words) in failures(0).items()}
    assert first.pop("an interrupt").startswith("ProcessGroupError: on rank 1: KeyboardInterrupt")
    assert second.pop("an interrupt").startswith("KeyboardInterrupt")
    for name, text in first.items():
        assert all(words in text for words in with_words[name]), f"{name}: {text}"
    alike = {name for name in first if first[name] == second[name]}
    assert alike == first.keys()


@pytest.mark.long
@pytest.mark.dist
def test_three_processes_have_the_numbers_of_one_and_notice_a_death(
    tmp_path: Path, expected: dict[str, Tensor]
) -> None:
    run_ranks(__file__, tmp_path, 3, killed=(1,))
    compare(tmp_path, 3, expected, [0, 1, 2])
    for rank in (0, 2):
        text = (tmp_path / f"gone{rank}.txt").read_text()
        assert text.startswith(f"ProcessGroupError: rank {rank} of 3 has lost another process")


# --- one process --------------------------------------------------------------------------------------


def test_a_process_by_itself_exchanges_nothing() -> None:
    ones = torch.ones(2)
    with collective("a test"):
        all_sum([ones])
        all_same([ones])
        check_others()
    assert bool((ones == 1).all())
    assert least(3) == 3
    assert gathered("a") == ["a"]
    assert Share.of(None) == Share.of(True) == Share(0, 1)
    with pytest.raises(KeyError), collective("a test"):
        raise KeyError("as it was")
    with pytest.raises(InputError, match="shard='all'"):
        full((X, Y), shard="all")


class Foreign:
    """A sampler of another library, which names its numbers in its own way."""

    def __init__(self, **numbers: Any) -> None:
        self.__dict__.update(numbers)

    def __iter__(self) -> Iterator[Any]:
        return iter([[0, 2], [1, 0]])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("numbers", "by"),
    [({"num_replicas": 2, "rank": 1}, "Foreign"), ({"num_processes": 2, "process_index": 1}, "Foreign"),
     ({"batch_sampler": Foreign(num_replicas=2, rank=1)}, "Foreign"), ({"num_replicas": 1, "rank": 0}, None),
     ({"num_replicas": "2", "rank": 1}, None)],
)  # fmt: skip
def test_samplers_of_other_libraries_are_recognized(numbers: dict[str, Any], by: str | None) -> None:
    loader = DataLoader(TensorDataset(X), batch_sampler=Foreign(**numbers))  # type: ignore[arg-type]
    found = sharded(loader)
    assert (None if found is None else (found.by, found.parts, found.index, found.total, found.own)) == (
        None if by is None else (by, 2, 1, N, None)
    )


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("batched", [False, True])
def test_fillers_of_torchs_sampler_are_counted(n: int, size: int, batched: bool) -> None:
    data = TensorDataset(torch.arange(n))
    read = []
    for rank in range(size):
        sampler: Any = DistributedSampler(data, size, rank)
        own = BatchSampler(sampler, 2, drop_last=False)
        found = sharded(DataLoader(data, batch_sampler=own) if batched else DataLoader(data, sampler=sampler))
        assert found is not None
        read += list(sampler)[: found.own]
    assert sorted(read) == list(range(n))


def test_an_exchange_ends_when_the_backend_has_let_go_of_its_tensors() -> None:
    held: list[Any] = []
    a, b = torch.zeros(2), [torch.zeros(1), torch.zeros(3)]

    def let_go() -> None:
        time.sleep(0.05)
        held.clear()

    def exchange(one: Tensor, others: list[Tensor], operation: object) -> None:
        held.extend([one, *others])
        threading.Thread(target=let_go).start()

    _exchanged(exchange, a, b, torch.distributed.ReduceOp.MAX)
    assert not held


def test_what_differs_is_shown_however_long_the_texts_are() -> None:
    assert _excerpts("dim=30", "dim=31") == ("dim=30", "dim=31")
    first, second = (f"Sketch({'a' * 300}, seed={seed}, {'b' * 300})" for seed in range(2))
    found = _excerpts(first, second)
    assert "seed=0" in found[0]
    assert "seed=1" in found[1]
    assert all(len(text) < 210 and text[0] == text[-1] == "…" for text in found)
    assert _excerpts("a" * 300, "a" * 301) == ("…" + "a" * 100, "…" + "a" * 101)
    assert _excerpts("", "a" * 300) == ("", "a" * 200 + "…")


def test_whole_data_are_whole() -> None:
    assert sharded((X, Y)) is None
    assert sharded(DataLoader(TensorDataset(X), shuffle=True)) is None
    assert sharded(DataLoader(Streamed(0, 1))) is None
    part = sharded(DataLoader(Named()))
    assert part is not None
    assert (part.parts, part.index, part.total) == (4, 3, None)


class Named(IterableDataset[Any]):
    """A stream that says which part it is."""

    num_processes, process_index = 4, 3

    def __iter__(self) -> Iterator[Any]:
        return iter([])


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
