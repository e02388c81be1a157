"""The studies of continual learning at a tiny size, on images made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import linnet
from experiments.continual import (
    disjoint_mnist,
    five_data_sets,
    linear_stream,
    long_stream,
    permuted_mnist,
    si_reference,
    split_mnist,
    streams,
    two_gaussians,
)
from experiments.continual.networks import multilayer
from experiments.continual.streams import classes, fitted, flat_parts, permuted
from experiments.continual.training import METHODS, Training, run_stream
from experiments.sources import Images

pytestmark = pytest.mark.long

SHAPES = {"eurosat_1000_500": (40, 40, 3), "cifar10_10k_5k": (32, 32, 3), "notmnist_test10k": (28, 28)}


def synthetic(name: str, data_dir: str | None = None) -> Images:
    """Ten classes of bright squares in noise, in the shape of a set."""
    generator = torch.Generator().manual_seed(len(name))
    shape, labels = SHAPES.get(name, (8, 8)), torch.arange(400) % 10
    x = torch.randint(100, (400, *shape), generator=generator, dtype=torch.uint8)
    for row, label in enumerate(labels.tolist()):
        x[row, label % 5, label // 5 :: 2] += 100
    return Images(x[100:].numpy(), labels[100:], x[:100].numpy(), labels[:100], 10)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of every script, which reads synthetic images."""
    monkeypatch.setattr(streams, "images", synthetic)
    return ["--out", str(tmp_path), "--seeds", "1", "--device", "cpu"]


def result(folder: Path, script: str) -> dict[str, Any]:
    """What a script has written."""
    assert (folder / f"{script}.svg").stat().st_size > 1000
    assert (folder / "table.md").read_text().startswith("| ")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert found["cells"]
    return found


def parts(examples: int = 60) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Images whose class is where they are bright."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(3 * examples) % 3
    x = torch.randint(100, (len(labels), 6, 2), generator=generator, dtype=torch.uint8)
    for row, label in enumerate(labels.tolist()):
        x[row, 2 * label : 2 * label + 2] += 100
    images = Images(x[examples:].numpy(), labels[examples:], x[:examples].numpy(), labels[:examples], 3)
    return flat_parts(images, None, None)


def test_permuted_tasks_are_the_same_images_in_other_orders() -> None:
    tasks = permuted(parts(), 3)
    first, second = (task.read("train") for task in tasks[:2])
    assert tasks[1].order is not None
    assert torch.equal(first[0][:, tasks[1].order], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(permuted(parts(), 3, seed=1)[2].read("test")[0], tasks[2].read("test")[0])
    kept = {tuple(row.tolist()) for part in ("train", "validation") for row in tasks[0].read(part)[0]}
    assert len(kept) == 120  # nothing twice, nothing lost


def test_classes_are_split_and_numbered() -> None:
    apart = classes(parts(), [[0], [1, 2]], heads=True)
    assert set(apart[1].read("train")[1].tolist()) == {0, 1}
    assert [task.head for task in apart] == [0, 1]
    together = classes(parts(), [[0], [1, 2]], heads=False)
    assert set(together[1].read("test")[1].tolist()) == {1, 2}


def test_images_are_fitted() -> None:
    assert fitted(torch.ones(2, 1, 28, 28)).shape == (2, 3, 32, 32)
    assert fitted(torch.ones(2, 1, 28, 28))[:, :, :2].abs().max() == 0
    assert fitted(torch.ones(2, 3, 64, 64)).shape == (2, 3, 32, 32)


def test_a_stream_is_learned_and_kept() -> None:
    tasks = permuted(parts(), 3)
    how = Training(epochs=30, batch=20, rate=1e-2, measured=60)
    runs = {
        name: run_stream(multilayer((20,), 12, (3,)), tasks, METHODS.get(name), strength, how)
        for name, strength in (("none", 0.0), ("Online Laplace (KF)", 10.0), ("SI", 0.0))
    }
    assert [len(row) for _, row in runs["none"]["rows"]] == [1, 2, 3]
    assert runs["none"]["rows"] == runs["SI"]["rows"]  # strength 0 is plain training
    assert runs["Online Laplace (KF)"]["average"] > runs["none"]["average"]
    assert runs["none"]["rows"][0][1][0] > 0.9


def test_permuted_mnist(words: list[str], tmp_path: Path) -> None:
    sizes = [
        "--train",
        "100",
        "--test",
        "50",
        "--epochs",
        "1",
        "--tasks",
        "2",
        "--long",
        "3",
        "--hidden",
        "8",
    ]
    permuted_mnist.main([*words, *sizes, "--rates", "0.005"])
    found = result(tmp_path, "permuted_mnist")
    assert {c["method"] for c in found["cells"]} == {
        permuted_mnist.PLAIN, permuted_mnist.JOINT, *permuted_mnist.COMPARED
    }  # fmt: skip
    assert sum(c["role"] == "long" for c in found["cells"]) == 4


def test_long_stream(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--train", "100", "--test", "50", "--epochs", "1", "2", "--tasks", "6", "--batch", "25"]
    long_stream.main([*words, *sizes])
    cells = result(tmp_path, "long_stream")["cells"]
    assert [[index for index, _ in c["rows"]] for c in cells] == [[0, 4, 5]] * 2
    assert cells[1]["rows"][0][1][0] >= cells[0]["rows"][0][1][0]  # two epochs learn more than one
    assert "after 5: mean" in capsys.readouterr().out


def test_long_stream_all_at_once(words: list[str], tmp_path: Path) -> None:
    sizes = ["--train", "500", "--test", "50", "--epochs", "20", "--tasks", "2", "--batch", "25"]
    long_stream.main([*words, *sizes, "--methods", "Joint training", "--merge", "svd"])
    (cell,) = result(tmp_path, "long_stream")["cells"]
    ((last, accuracies),) = cell["rows"]
    assert (last, len(accuracies), cell["strength"]) == (1, 2, 0.0)
    assert min(accuracies) > 0.5  # neither task is forgotten


def test_long_stream_with_the_precision_before_the_optimizer(words: list[str], tmp_path: Path) -> None:
    sizes = ["--train", "100", "--test", "50", "--epochs", "10", "--tasks", "3", "--batch", "25"]
    shared = [*words, *sizes, "--decay", "0", "--optimizer", "momentum", "--rate", "0.1"]
    averages = []
    for damping in ("0", "1", "1e6"):
        long_stream.main([*shared, "--precondition", damping])
        (cell,) = result(tmp_path, "long_stream")["cells"]
        assert cell.get("precondition", 0) == float(damping)
        averages.append(cell["rows"])
    assert averages[1] != averages[0]
    # damped beyond all curvature, gradients stay as they are
    last = [[row[1] for row in rows] for rows in (averages[0], averages[2])]
    assert all(abs(a - b) <= 0.04 for x, y in zip(*last, strict=True) for a, b in zip(x, y, strict=True))


def test_si_reference(words: list[str], tmp_path: Path) -> None:
    sizes = ["--train", "256", "--test", "50", "--epochs", "1", "--tasks", "2", "--hidden", "8"]
    si_reference.main([*words, *sizes])
    assert [c["c"] for c in result(tmp_path, "si_reference")["cells"]] == [0.1, 0.0]


@pytest.mark.parametrize("damping", ["0", "1"])
def test_disjoint_mnist(
    damping: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disjoint_mnist, "GRID", {name: [1.0, 1e6] for name in disjoint_mnist.GRID})
    sizes = ["--train", "300", "--test", "100", "--epochs", "1", "--precondition", damping]
    disjoint_mnist.main([*words, *sizes])
    cells = result(tmp_path, "disjoint_mnist")["cells"]
    assert len(cells) == 3
    assert damping == "0" or all(row[-1] for cell in cells for row in cell["found"])  # nothing diverged


def test_stiffness_is_the_largest_eigenvalue() -> None:
    net = multilayer((5,), 12, (3,))
    x, y = permuted(parts(), 1)[0].read("train")
    method = METHODS["Online Laplace (KF)"](net, 2.0, 1.0)
    method.consolidate((x, y))
    assert isinstance(method, linnet.continual.OnlineLaplace)
    want = float(torch.linalg.eigvalsh(method.precision().dense())[-1]) / len(x)
    assert disjoint_mnist.stiffness(net, method, len(x), 100) == pytest.approx(want, rel=1e-3)
    assert method.penalty().item() == 0.0  # the network is where it was


def test_split_mnist(words: list[str], tmp_path: Path) -> None:
    sizes = ["--train", "500", "--test", "100", "--iterations", "1", "--hidden", "8"]
    split_mnist.main([*words, *sizes])
    assert len(result(tmp_path, "split_mnist")["cells"]) == 5


def test_five_data_sets(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(five_data_sets, "STRENGTHS", {"laplace": [1.0], "SI": [0.1]})
    sizes = ["--train", "30", "--test", "20", "--epochs", "1", "--scale", "0.1"]
    five_data_sets.main([*words, *sizes])
    assert "eurosat" in (tmp_path / "table.md").read_text()
    assert len(result(tmp_path, "five_data_sets")["cells"]) == 12


def test_linear_stream(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_stream, "STRENGTHS", (1.0,))
    monkeypatch.setattr(linear_stream, "PRIORS", (1.0,))
    monkeypatch.setattr(linear_stream, "STRUCTURES", (("full", "svd"), ("kfac", "svd")))
    monkeypatch.setattr(linear_stream, "FIRST", 100)
    sizes = ["--side", "3", "--hidden", "3", "--tasks", "2", "--train", "40", "--test", "30"]
    linear_stream.main([*words, *sizes])
    cells = result(tmp_path, "linear_stream")["cells"]
    full = next(c for c in cells if c["structure"] == "full")
    assert full["distance"] < 1e-6
    assert full["residual"] < 1e-6
    assert next(c for c in cells if c["structure"] == "kfac")["distance"] > 1e-3


def test_two_gaussians(tmp_path: Path) -> None:
    two_gaussians.main(["--seeds", "2", "--out", str(tmp_path)])
    cells = json.loads((tmp_path / "result.json").read_text())["cells"]
    for structure in two_gaussians.STRUCTURES:
        for seed in (0, 1):
            own = [c for c in cells if (c["structure"], c["seed"]) == (structure, seed)]
            past, new = ([cell[f"from the {of}"] for cell in own] for of in ("past", "new task"))
            assert past == sorted(past, reverse=True), "with a larger λ the past is kept better"
            assert new == sorted(new)
            if structure != "diagonal":
                assert max(cell["from the product"] for cell in own) < 1e-7
