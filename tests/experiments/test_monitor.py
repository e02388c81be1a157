"""The study of shifts: what it draws, what it alters, and that its fits are those of ``linnet.adapt``."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from experiments.monitor import shifts, sources, stress


@pytest.mark.parametrize("name", sources.IMAGES)
def test_strong_shifts_of_images_change_more(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, 3, 12, 12, generator=generator)
    mild, strong = (
        sources.IMAGES[name](x, severe, torch.Generator().manual_seed(0)) for severe in (False, True)
    )
    assert mild.shape == strong.shape == x.shape
    assert 0 < float((mild - x).abs().mean()) < float((strong - x).abs().mean())
    assert torch.equal(mild, sources.IMAGES[name](x, False, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", sources.TEXTS)
def test_shifts_of_texts(name: str) -> None:
    text = "a film that begins slowly and ends as the best one of all the films of that year"
    changed = sources.TEXTS[name](text, True, random.Random(0))
    assert changed != text
    assert changed.strip()
    assert sources.TEXTS[name]("a", True, random.Random(0)).strip()


def test_classes_are_drawn_in_equal_numbers() -> None:
    y = torch.tensor([0] * 9 + [1] * 5 + [2] * 7)
    at = sources.of_each(y, 4, torch.Generator().manual_seed(0))
    assert y[at].bincount().tolist() == [4, 4, 4]
    assert len(at.unique()) == 12


def test_batches_have_no_sample_twice() -> None:
    y = torch.arange(500) % 10
    calm = shifts.batches(sources.NONE, "", y, 100, 0)
    assert len(calm) == shifts.SIZES[100] * shifts.UNSHIFTED
    assert all(len(at.unique()) == 100 for at in calm)
    (rare, *_) = shifts.batches(sources.LABELS, "strong", y, 100, 0)
    assert float((y[rare] % 2).double().mean()) < 0.25
    assert shifts.batches(sources.LABELS, "strong", y, 500, 0) == []


def test_a_line_of_quantiles() -> None:
    assert float(shifts.on_the_line(0.8, 0.7, 0.7)) == pytest.approx(0.8)
    assert 0.5 < float(shifts.on_the_line(0.8, 0.6, 0.7)) < 0.8


def known(n: int) -> tuple[Any, nn.Module, Tensor, Tensor]:
    """Kept features of a small network, and what they were made of."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 9), nn.Tanh()]
        net = nn.Sequential(*layers, nn.Linear(9, 2)).double()
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    fit = linnet.adapt(net, (x[:40], y[:40]), weight=0)
    rows, half = fit.module.staged(x), n // 2
    kept = {
        "pool": rows[:half], "pool y": y[:half], "test y": y[half:], "other y": y[half:].flip(0),
        "width": fit.module.width,
        "shifted": {
            "none / ": rows[half:], "noise / mild": rows[half:] + 0.1, "noise / strong": 3 * rows[half:],
            "another data set / strong": rows[half:].flip(0),
        },
    }  # fmt: skip
    return kept, net, x, y


def test_fits_of_kept_features_are_those_of_adapt() -> None:
    kept, net, x, y = known(100)
    fit = shifts.fitted(kept["pool"][:40], y[:40], kept["width"], 3)
    other = linnet.adapt(net, (x[:40], y[:40]))
    assert fit.ridge == other.ridge
    assert torch.allclose(fit.predict(kept["pool"]).double(), other.predict(x[:50]), atol=1e-5)


def test_a_cell_and_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifts, "SIZES", {30: 2, 60: 1})
    monkeypatch.setattr(shifts, "TESTED", 100)
    cell = shifts.watched(known(200)[0], 8, 0)
    assert cell["n"] == 24
    none = [row for row in cell["batches"] if row[0] == sources.NONE]
    assert [row[2:4] for row in none] == [[30, 2 * shifts.UNSHIFTED], [60, shifts.UNSHIFTED]]
    width = 6 + 2 * len(shifts.METHODS)
    assert all(len(row) == width for row in cell["batches"])
    strong = [row for row in cell["batches"] if row[:2] == ["noise", "strong"]]
    assert all(row[5] == row[3] for row in strong)  # every batch is an alarm
    cells = [{"set": "reported", "shots": shots, **cell} for shots in shifts.SHOTS]
    table = shifts.table(cells).splitlines()
    assert table[2].startswith("| none |")
    assert len(table) == 2 + 1 + 2 + 3
    assert len(shifts.sizes(cells).splitlines()) == 2 + 4
    named = [{"task": "a task", "network": "a network", **cell} for cell in cells]
    assert shifts.tasks(named).splitlines()[2].startswith("| a task, a network (reported) |")
    assert shifts.table([{**cells[0], "set": "development"}], "development").splitlines()[2:] == table[2:]


def test_a_cell_of_named_shifts_and_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress, "SIZES", (30, 60))
    monkeypatch.setattr(stress, "TESTED", 100)
    kept, *_ = known(200)
    pool = kept["pool"]
    altered = {"noise / mild": pool + 0.1, "noise / strong": 3 * pool}
    cell = stress.watched({**kept, "altered": altered}, 8, 0)
    assert cell["n"] == 24
    by_name = {one["shift"]: one for one in cell["shifts"]}
    assert list(by_name) == ["none / ", "noise / mild", "noise / strong"]
    assert len(by_name["none / "]["batches"]) == 2 * stress.BATCHES
    strong = by_name["noise / strong"]["batches"]
    assert len(strong) == 2 * len(stress.PARTS) * stress.BATCHES
    whole = [row for row in strong if row[1] == 1]
    assert all(len(row) > 3 for row in whole)  # every batch is an alarm
    for row in whole:
        errors, (others, strength, every), known_kind, share = row[2:]
        assert others == 0  # no other kind is known
        assert errors[0] == errors[1]
        assert known_kind == 1
        assert share > 0.8
        assert strength <= every + 1e-9  # more is explained by what was met
    cells = [{"set": "reported", "shots": shots, **cell} for shots in stress.SHOTS]
    assert len(stress.before(cells).splitlines()) == 2 + 3 * 3
    assert len(stress.batches(cells).splitlines()) == 2 + 3 * 2 * 3
    assert len(stress.halves(cells).splitlines()) == 2 + 3 * 2 * 2
    assert stress.kinds(cells).splitlines()[2].startswith("| none |")
    assert len(stress.explained(cells).splitlines()) > 3
    assert stress.development([{**cells[0], "set": "development"}])
