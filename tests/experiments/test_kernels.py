"""The studies of kernels at a tiny size, on images made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.kernels import concentration, directions, eigenfunctions, networks, spike, verdict
from experiments.sources import Images

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


def test_directions_are_drawn_and_learned(words: list[str], tmp_path: Path) -> None:
    sizes = ["--samples", "40", "--epochs", "1", "--indices", "0", "11", "--networks", "LeNet"]
    directions.main([*words, *sizes])
    found = result(tmp_path, "directions", "directions_accuracy")
    first = found["first_ten"]["LeNet"]
    assert first["singular_values"] == sorted(first["singular_values"], reverse=True)
    assert first["mismatch"] < 1e-3  # a smooth network: the derivative exists at the origin
    assert [cell["index"] for cell in found["cells"]] == [0, 11]


def test_the_verdict_is_judged(words: list[str], tmp_path: Path) -> None:
    sizes = ["--shots", "2", "--tests", "40", "--steps", "3", "--pretraining", "100"]
    targets = ["mnist", "notmnist_test10k", "eurosat_1000_500"]
    verdict.main([*words, "--sources", "mnist", "--targets", *targets, *sizes])
    found = result(tmp_path, "verdict")
    assert [cell["target"] for cell in found["cells"]] == targets[1:]
    assert all(0 <= cell["linear"] <= 1 for cell in found["cells"])
    assert 0 <= found["explained"]["right"] <= found["decided"]


def test_the_threshold_is_the_one_that_is_right_most_often() -> None:
    cut, above = verdict.threshold([1.0, 2.0, 3.0, 4.0], [False, False, True, True])
    assert 2 < cut < 3
    assert above
    assert not verdict.threshold([1.0, 2.0, 3.0, 4.0], [True, True, True, False])[1]
    low, high = verdict.wilson(9, 10)
    assert low == pytest.approx(0.596, abs=1e-3)
    assert high == pytest.approx(0.982, abs=1e-3)


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
