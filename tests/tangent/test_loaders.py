"""Loaders are read in the order of their data set, and say so where that cannot be."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import linnet
from linnet.tangent.gather import gather_data, pairs
from linnet.tangent.loaders import DataNotes

N = 11
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(N) % 3
DATA = TensorDataset(X, Y)


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
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "with a generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "last batch dropped": lambda: DataLoader(DATA, 4, shuffle=True, drop_last=True),
    "last batch dropped in order": lambda: DataLoader(DATA, 4, drop_last=True),
    "own sampler": lambda: DataLoader(DATA, 4, sampler=Backwards()),
    "own batches": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, False)),
    "samples without a collation": lambda: DataLoader(
        [(X[i : i + 1], Y[i : i + 1]) for i in range(N)], batch_size=None, shuffle=True
    ),
    "workers": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=1),
}


@pytest.mark.parametrize("name", LOADERS)
def test_positions_are_those_of_the_data_set(name: str) -> None:
    said, loader = DataNotes(), LOADERS[name]()
    generator = loader.generator
    streams = [torch.get_rng_state(), *([generator.get_state()] if generator else [])]
    others = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002
    x, y = gather_data(loader, said=said)
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    assert said == DataNotes()
    after = [torch.get_rng_state(), *([generator.get_state()] if generator else [])]
    assert all(torch.equal(a, b) for a, b in zip(streams, after, strict=True))
    assert others == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index] # noqa: NPY002


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_answers_by_position_name_samples_of_the_data_set(loss: str) -> None:
    torch.manual_seed(0)
    lin = linnet.linearize(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    expected, found = (linnet.fit(lin, data, loss) for data in (DATA, LOADERS["shuffled"]()))
    torch.testing.assert_close(found.forget([3]).predict(X), expected.forget([3]).predict(X))
    torch.testing.assert_close(found.influence(X[:2]), expected.influence(X[:2]))
    assert found.record.warnings == expected.record.warnings


@pytest.mark.parametrize(
    ("sampler", "positions"),
    [
        (lambda: SubsetRandomSampler([7, 2, 5]), [2, 5, 7]),
        (lambda: [7, 2, 2], [2, 2, 7]),
        (lambda: RandomSampler(DATA, num_samples=3), None),
        (lambda: WeightedRandomSampler(torch.ones(N), 2 * N), None),
    ],
)
def test_what_was_drawn_is_said(sampler: Callable[[], Any], positions: list[int] | None) -> None:
    said = DataNotes()
    with pytest.warns(UserWarning, match="draws"):
        x, _ = gather_data(DataLoader(DATA, 2, sampler=sampler()), said=said)
    found = [int((row == X).all(1).nonzero()) for row in x]
    assert found == sorted(found)
    assert positions in (None, found)
    assert "draws" in said.warnings[0]


@pytest.mark.parametrize(
    "data", [Augmented(), DataLoader(Augmented(), 3), DataLoader(Subset(Augmented(), range(9)))]
)
def test_augmentation_is_said_and_drawn_alike(data: Any) -> None:
    random.seed(0)
    said = DataNotes()
    with pytest.warns(UserWarning, match="augmentation"):
        first, second = gather_data(data, said=said), gather_data(data)
    assert torch.equal(first[0], second[0])  # no random stream has moved
    assert "augmentation" in said.warnings[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gather_data(data, keep=False)  # no position is asked for


def mixed(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return 0.7 * x + 0.3 * x.flip(0), y


def permuted(samples: list[Any]) -> Any:
    return default_collate(samples[1:] + samples[:1])


def filled_up(samples: list[Any]) -> Any:
    longest = max(int(y) for _, y in samples) + 1
    x = torch.stack([torch.cat([x, x.new_zeros(longest)]) for x, _ in samples])
    return {"x": x, "labels": torch.stack([y for _, y in samples])}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("collate", [mixed, permuted])
def test_a_collation_that_mixes_or_permutes_is_said(collate: Any, shuffle: bool) -> None:
    said = DataNotes()
    with pytest.warns(UserWarning, match="collate_fn"):
        gather_data(DataLoader(DATA, 4, shuffle=shuffle, collate_fn=collate), said=said)
    assert len(said.warnings) == 1


def test_collations_that_keep_samples_apart_are_not_spoken_of() -> None:
    for collate in (lambda samples: default_collate(samples), filled_up):
        for batch in (1, 4):
            said = DataNotes()
            for _ in pairs(DataLoader(DATA, batch, shuffle=True, collate_fn=collate), said):
                pass
            assert not said.warnings


def test_a_fit_records_what_was_drawn() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    drawn = DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(7)))
    with pytest.warns(UserWarning, match="draws"):
        fits = linnet.fit(linnet.linearize(net), drawn), linnet.adapt(net, drawn, weight=0.5, ridge=0.1)
    for fit in fits:
        assert any("draws" in line for line in fit.forget([0]).record.warnings)
