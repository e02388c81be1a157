"""The studies of kernels at a tiny size, on images made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.kernels import (
    concentration,
    directions,
    directions_of_data,
    eigenfunctions,
    networks,
    spike,
    verdict,
    verdict_ceiling,
    verdict_folds,
    verdict_pairs,
)
from experiments.lqf.tasks import Pair
from experiments.sources import Images

pytestmark = pytest.mark.long

GRAY = ("mnist", "fashion_mnist")


def synthetic(name: str, data_dir: str | None = None) -> Images:
    """Ten classes of bright bars in noise, in the shape of a set."""
    generator = torch.Generator().manual_seed(len(name))
    shape, labels = (28, 28) if name in GRAY else (32, 32, 3), torch.arange(300) % 10
    x = torch.randint(120, (300, *shape), generator=generator, dtype=torch.uint8)
    for row, label in enumerate(labels.tolist()):
        x[row, 2 * label : 2 * label + 4] += 120
    return Images(x[100:].numpy(), labels[100:], x[:100].numpy(), labels[:100], 10)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of every script, which reads synthetic images."""
    for module in (networks, eigenfunctions, verdict):
        monkeypatch.setattr(module, "images", synthetic)
    return ["--out", str(tmp_path), "--seeds", "1", "--device", "cpu"]


def result(folder: Path, *figures: str) -> dict[str, Any]:
    """What a script has written."""
    for name in figures:
        assert (folder / f"{name}.svg").stat().st_size > 1000
    assert (folder / "table.md").read_text().startswith("| ")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert found["cells"]
    return found


def test_concentration_grows_with_training(words: list[str], tmp_path: Path) -> None:
    concentration.main([*words, "--networks", "MLP", "--epochs", "30"])
    (cell,) = result(tmp_path, "concentration")["cells"]
    assert cell["samples"] == 40  # cats and dogs of 200 images
    at = concentration.COUNTS.index(5)
    assert cell["start"][at] < cell["end"][at] <= 1
    assert cell["start"] == sorted(cell["start"])
    assert cell["training accuracy"] == 1


def test_the_narrow_resnet_has_a_kernel() -> None:
    network = networks.build("ResNet18", 0, width=1).eval()
    found = concentration.shares(network, torch.randn(6, 3, 32, 32), torch.tensor([1.0, -1, 1, -1, 1, -1]))
    assert len(found) == 3  # counts up to the number of samples
    assert all(0 <= share <= 1 for share in found)
    assert sum(p.numel() for p in networks.resnet18().parameters()) == 11_169_345


def test_eigenfunctions_of_two_data_sets(words: list[str], tmp_path: Path) -> None:
    eigenfunctions.main(
        [*words, "--samples", "48", "--epochs", "2", "--indices", "0", "3", "--networks", "MLP"]
    )
    cells = result(tmp_path, "eigenfunctions")["cells"]
    assert len(cells) == 2 * 3 + 2  # with the labels of two classes on CIFAR-10
    for cell in cells:
        for kind in ("plain", "linear"):
            assert 0 <= cell[kind]["validation"] <= 1
            assert cell[kind]["distance"] > 0
    assert "CIFAR-2" in (tmp_path / "table.md").read_text()


def test_the_trained_eigenfunction_spikes(words: list[str], tmp_path: Path) -> None:
    spike.main([*words, "--samples", "60", "--epochs", "20", "--count", "8", "--networks", "MLP"])
    (cell,) = result(tmp_path, "spike")["cells"]
    own, median, largest, rank = spike.growth(cell)
    assert own > median
    assert largest >= median
    assert 1 <= rank <= 8
    # at initialization the alignment of an eigenfunction is its eigenvalue, and these decrease
    assert cell["before"] == sorted(cell["before"], reverse=True)


def test_directions_over_images_overlap_with_those_at_the_origin(words: list[str], tmp_path: Path) -> None:
    directions_of_data.main([*words, "--images", "2"])
    (cell,) = result(tmp_path)["cells"]
    assert 10 / 1024 < cell["overlap"] <= 1 + 1e-5
    assert 0 <= cell["first"] <= 1 + 1e-5


def test_directions_are_drawn_and_learned(words: list[str], tmp_path: Path) -> None:
    sizes = ["--samples", "40", "--epochs", "1", "--indices", "0", "11", "--networks", "LeNet"]
    directions.main([*words, *sizes])
    found = result(tmp_path, "directions", "directions_accuracy")
    first, *learned = found["cells"]
    assert first["singular_values"] == sorted(first["singular_values"], reverse=True)
    assert first["mismatch"] < 1e-3  # a smooth network: the derivative exists at the origin
    assert [cell["index"] for cell in learned] == [0, 11]


def test_the_verdict_is_judged(words: list[str], tmp_path: Path) -> None:
    sizes = ["--shots", "2", "--tests", "40", "--steps", "3", "--pretraining", "100"]
    targets = ["mnist", "notmnist_test10k", "eurosat_1000_500"]
    verdict.main([*words, "--sources", "mnist", "--targets", *targets, *sizes])
    found = result(tmp_path, "verdict")
    assert [cell["target"] for cell in found["cells"]] == targets[1:]
    assert all(0 <= cell["linear"] <= 1 for cell in found["cells"])
    assert 0 <= found["explained"]["right"] <= found["decided"]


def test_cross_validation_asks_the_same_fits(words: list[str], tmp_path: Path) -> None:
    sizes = ["--shots", "2", "--tests", "40", "--steps", "3", "--pretraining", "100"]
    targets = ["notmnist_test10k", "eurosat_1000_500"]
    verdict.main([*words, "--sources", "mnist", "--targets", *targets, *sizes])
    known = ["--known", str(tmp_path / "cells.jsonl")]
    verdict_folds.main(["--out", str(tmp_path / "folds"), *known])
    cells = json.loads((tmp_path / "folds" / "result.json").read_text())["cells"]
    assert [cell["target"] for cell in cells] == targets
    for cell in cells:
        # the outputs of twenty samples: every score is a share of them, and a rank no less than 1 / 10
        assert (20 * cell["linear right"]) % 1 == pytest.approx(0, abs=1e-9)
        assert 0.1 <= cell["plain rank"] <= 1
        assert cell["linear rank"] >= cell["linear right"]
    with pytest.raises(SystemExit, match=r"run python -m experiments\.kernels\.verdict first"):
        verdict_folds.main(["--out", str(tmp_path / "none"), "--known", str(tmp_path / "no.jsonl")])


def test_the_fold_is_not_seen() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    x = torch.randn(30, 3)
    noise = torch.arange(30) % 2  # labels that have nothing to do with x
    scores = verdict_folds.held_out(model, x, noise, 30, 0)
    assert scores["linear right"] < 0.8
    assert scores["plain right"] < 0.8
    found = verdict_folds.ranks(torch.tensor([[0.1, 0.5, 0.4], [0.9, 0.0, 0.2]]), torch.tensor([2, 0]))
    assert found.tolist() == [0.5, 1]


def test_the_ceiling_of_a_prediction(tmp_path: Path) -> None:
    clear = [
        {"linear": 0.6 + d, "plain": 0.6, "error": 0.01, "tests": 100, "examples": 50}
        for d in (0.3, -0.3, 0.2, -0.2)
    ]
    found = verdict_ceiling.simulate(clear, 50, 5000)
    assert found["knows D"] > 0.95  # advantages are thirty times the error of the test
    assert found["always the more frequent"] == pytest.approx(0.5, abs=0.03)
    # var of ±0.3, ±0.2 with n − 1 is 0.26 / 3; the error's square comes off
    assert verdict_ceiling.moments(clear) == pytest.approx((0, (0.26 / 3 - 1e-4) ** 0.5, 0.01))
    noisy = [{**c, "error": 1.0} for c in clear]
    assert verdict_ceiling.simulate(noisy, 50, 2000)["knows D"] < 0.6
    (tmp_path / "fits.json").write_text(json.dumps({"cells": clear}))
    words = ["--out", str(tmp_path), "--known", str(tmp_path / "fits.json"), "--draws", "100"]
    verdict_ceiling.main(words)
    assert "| knows D |" in (tmp_path / "table.md").read_text()


def test_pairs_are_judged_by_cuts_of_other_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    x = torch.randn(12, 3)
    data = x, (x[:, 0] > 0).long()
    monkeypatch.setattr(verdict_pairs, "load", lambda pair, seed, data_dir: (model, data, data))
    pair = Pair("small", "stripes", 8, 5)
    runs = [
        {"pair": pair.name, "method": m, "seed": s, "accuracy": a, "change": {}}
        for s, scores in enumerate([(0.5, 0.6, 0.4), (0.5, 0.4, 0.5)])
        for m, a in zip(("nlft", "lqf", "optimum"), scores, strict=True)
    ]
    runs.append({"pair": pair.name, "method": "lqf", "seed": 0, "accuracy": 0.0, "change": {"loss": "other"}})
    (tmp_path / "pairs.json").write_text(json.dumps({"cells": runs}))
    fits = [
        {"linear": 0.5 + sign, "plain": 0.5, **dict.fromkeys(verdict.MEASURES, sign)} for sign in (-0.1, 0.1)
    ]
    (tmp_path / "fits.json").write_text(json.dumps({"cells": fits}))
    files = ["--outcomes", str(tmp_path / "pairs.json"), "--known", str(tmp_path / "fits.json")]
    verdict_pairs.main(["--out", str(tmp_path), "--seeds", "3", *files], [pair])
    found = json.loads((tmp_path / "result.json").read_text())
    assert [cell["seed"] for cell in found["cells"]] == [0, 1]
    assert [cell["lqf"] for cell in found["cells"]] == [0.6, 0.4]
    # the lift of both draws is the same positive number, over the cut of zero: linear, and once right
    assert found["lqf, lift"] == {"right": 1, "of": 2, "cut": 0.0, "above": True}
    assert found["optimum, lift"] == {"right": 0, "of": 1, "cut": 0.0, "above": True}


def test_the_threshold_is_the_one_that_is_right_most_often() -> None:
    cut, above = verdict.threshold([1.0, 2.0, 3.0, 4.0], [False, False, True, True])
    assert 2 < cut < 3
    assert above
    assert not verdict.threshold([1.0, 2.0, 3.0, 4.0], [True, True, True, False])[1]
    # tabulated: Clopper and Pearson 1934
    assert verdict.interval(9, 10) == pytest.approx((0.5550, 0.9975), abs=1e-4)
    assert verdict.interval(0, 10) == pytest.approx((0, 0.3085), abs=1e-4)
    assert verdict.interval(10, 10) == pytest.approx((0.6915, 1), abs=1e-4)


def test_a_measure_that_knows_the_winner_is_found_out() -> None:
    cells = [
        {"source": "a", "target": t, "linear": 0.6 + sign, "plain": 0.6, "good": sign + 0.1 * i, "bad": 1.0}
        for i, t in enumerate("bcde")
        for sign in (-1, 1)
    ]  # fmt: skip
    assert verdict.left_out(cells, "good") == 8
    assert verdict.area(cells, "good") == 1
    assert verdict.area(cells, "bad") == 0.5
    assert verdict.resampled(cells, "good", 50) == (1.0, 1.0)


def test_separable_data_are_equation_1() -> None:
    u = torch.tensor([[1.0, -2.0], [0.5, 0.0], [3.0, 1.0]], dtype=torch.float64)
    unit = (u / u.norm()).reshape(-1)
    x, y = directions.separable_data(u, 20_000, 3)
    assert x.shape == (20_000, 3, 2)
    assert set(y.tolist()) == {-1.0, 1.0}
    flat = x.flatten(1)
    torch.testing.assert_close(flat @ unit, y, rtol=0, atol=1e-9)  # the noise has no part along u
    w = flat - y[:, None] * unit
    expected = torch.eye(6).double() - torch.outer(unit, unit)
    assert float((w.T @ w / 20_000 - expected).abs().max()) < 0.04
    assert float((y[:, None] * w).mean(0).abs().max()) < 0.03  # labels and noise are independent
    assert torch.equal(x, directions.separable_data(u, 20_000, 3)[0])
    assert not torch.equal(x[:50], directions.separable_data(u, 50, 4)[0])
