"""The studies of the optimizer run from data to table, at tiny sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.optimizer import (
    alignment,
    autoencoders,
    batch_sizes,
    landscape,
    mixture,
    problems,
    relu,
    rivals,
    sequences,
)
from experiments.optimizer.curves import curves
from experiments.optimizer.training import grid, loss_at
from experiments.sources import Images

pytestmark = pytest.mark.long

WIDTHS = ["--widths", "6", "4", "3"]


def result(folder: Path) -> dict[str, Any]:
    """What a study published."""
    assert (folder / "table.md").read_text().startswith("| ")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Images]:
    """Random images instead of MNIST."""
    rng = np.random.default_rng(0)

    def read(name: str, data_dir: str | None = None) -> Images:
        del name, data_dir
        x = rng.integers(0, 256, (80, 28, 28), dtype=np.uint8)
        y = torch.arange(80) % 10
        return Images(x, y, x[:10], y[:10], 10)

    for module in (problems, mixture, relu, sequences):
        monkeypatch.setattr(module, "images", read)
    return read


def test_curves_are_lines_through_their_points() -> None:
    x = curves(50)
    assert x.shape == (50, 784)
    assert float(x.min()) >= 0
    assert 0.9 < float(x.max()) <= 1
    assert 0.03 < float(x.mean()) < 0.15
    assert torch.equal(x, curves(50))
    assert not torch.equal(x, curves(50, seed=1))
    border = x.view(-1, 28, 28)
    assert float(border[:, 0].max()) < 0.1  # curves end two pixels before the border, but may bend over it
    assert len({tuple(row.tolist()) for row in x}) == 50


def test_faces_are_rotated_scaled_and_normalized(data_file: Callable[[str], Path]) -> None:
    x = problems.faces(500, str(data_file("olivetti.npz").parent))
    assert x.shape == (500, 625)
    assert float(x.square().mean()) == pytest.approx(1, abs=1e-4)
    assert float(x.mean(0).abs().max()) < 1e-4


def test_autoencoders(tmp_path: Path) -> None:
    given = [
        "--data",
        "curves",
        *WIDTHS,
        "--images",
        "40",
        "--batch",
        "20",
        "--updates",
        "2",
        "--factor",
        "2",
    ]
    autoencoders.main([*given, "--seeds", "1", "--out", str(tmp_path)])
    found = result(tmp_path)
    assert (tmp_path / "autoencoders.svg").exists()
    assert autoencoders.table(found["cells"]).count("| curves |") == 5
    assert {cell["method"] for cell in found["cells"]} == {*autoencoders.SECOND, *autoencoders.FIRST}
    assert all(cell["final"] > 0 for cell in found["cells"])


def test_alignment(tmp_path: Path) -> None:
    given = ["--data", "curves", *WIDTHS, "--images", "40", "--batch", "20", "--at", "0", "1", "--steps", "5"]
    alignment.main([*given, "--out", str(tmp_path)])
    cell = result(tmp_path)["cells"][0]
    assert set(cell["whole"][0]) == {"kfac", "kfac*", "kfra", "kfra*", "block-diagonal"}
    assert all(-1 <= value <= 1.0001 for found in cell["whole"] for value in found.values())
    assert len(cell["layers"][1]["kfra*"]) == 6
    assert {path.name for path in tmp_path.glob("*.svg")} == {"whole.svg", "layers_curves.svg"}


def test_mixture(tmp_path: Path, digits: Callable[..., Images]) -> None:
    given = [*WIDTHS, "--images", "80", "--batch", "40", "--updates", "2", "--factor", "2", "--seeds", "1"]
    mixture.main([*given, "--out", str(tmp_path)])
    assert {cell["method"] for cell in result(tmp_path)["cells"]} == {"KFAC", "KFLR", "KFRA", "Adam"}
    assert (tmp_path / "mixture.svg").exists()


def test_relu(tmp_path: Path, digits: Callable[..., Images]) -> None:
    relu.main(
        [
            "--widths",
            "24",
            "16",
            "8",
            "--images",
            "80",
            "--batch",
            "40",
            "--updates",
            "3",
            "--out",
            str(tmp_path),
        ]
    )
    found = result(tmp_path)
    assert {cell["method"] for cell in found["cells"]} == {"KFRA", "KFAC"}
    assert all(cell["train"][-1] > 0 for cell in found["cells"])


def test_rivals(tmp_path: Path) -> None:
    given = ["--data", "curves", *WIDTHS, "--images", "260", "--updates", "2", "--seeds", "2"]
    rivals.main([*given, "--out", str(tmp_path)])
    cells = result(tmp_path)["cells"]
    grid_runs = [cell for cell in cells if cell["method"] == "Nesterov" and cell["seed"] == 0]
    assert len({(cell["rate"], cell["period"]) for cell in grid_runs}) == 40
    assert len(rivals.best_of(rivals.of(cells, data="curves"), "SGD")) == 2
    assert {cell["average"] for cell in cells if cell["method"] == "KFAC"} == {True, False}
    rows = rivals.table(cells).splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == list(rivals.FIRST_ORDER)
    assert " 0.0 ± 0.0 " in rows[0]


def test_batch_sizes(tmp_path: Path, digits: Callable[..., Images]) -> None:
    given = [*WIDTHS, "--images", "80", "--updates", "3", "--seeds", "1"]
    batch_sizes.main([*given, "--out", str(tmp_path)])
    cells = result(tmp_path)["cells"]
    assert {cell["batch"]: cell["size"][-1] for cell in cells} == {
        50: 50,
        250: 250,
        1000: 1000,
        "adapted": 50,
    }
    assert (tmp_path / "batch_sizes.svg").exists()


@pytest.mark.parametrize(("spread", "size"), [(1.0, 100), (0.01, 50)])
def test_a_batch_grows_when_its_gradient_is_noise(spread: float, size: int) -> None:
    test, generator = batch_sizes.NormTest(50), torch.Generator().manual_seed(0)
    for _ in range(batch_sizes.MEMORY):
        first, second = 0.1 + spread * torch.randn(2, 500, generator=generator)
        test.observe(first, second)
    assert test.size == size


def test_landscapes_have_what_the_lemmas_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(landscape, "DRAWS", 5)
    monkeypatch.setattr(landscape, "PLANES", 3)
    landscape.main(["--seeds", "1", "--out", str(tmp_path)])
    cells = {cell["activation"]: cell for cell in result(tmp_path)["cells"]}
    assert cells["ReLU"]["blocks"] == cells["ReLU"]["traces"] == 0
    assert cells["tanh"]["blocks"] > 0
    assert sum(cells["ReLU"]["smooth maxima"].values()) == 0


def test_maxima_are_smooth_where_no_unit_changes_its_regime() -> None:
    loss, regimes = torch.zeros(5, 5), torch.zeros(5, 5, 2, dtype=torch.bool)
    loss[2, 2] = 1.0
    assert landscape.maxima(loss, regimes) == (1, 1)
    regimes[1, 3, 0] = True
    assert landscape.maxima(loss, regimes) == (1, 0)
    assert landscape.maxima(-loss, regimes) == (0, 0)


def test_the_recurrent_network_and_its_unrolled_form_are_one_function() -> None:
    one, other = (sequences.network(name, 8, 3) for name in ("nn.RNN", "unrolled"))
    x = torch.randn(5, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(one(x), other(x), atol=1e-6)
    assert sum(p.numel() for p in one.parameters()) == sum(p.numel() for p in other.parameters())


def test_sequences(tmp_path: Path, digits: Callable[..., Images]) -> None:
    sizes = {"images": 40, "test": 10, "batch": 20, "width": 8, "updates": 2, "factor": 2, "seeds": 2}
    given = [f"--{name}={value}" for name, value in sizes.items()]
    sequences.main([*given, "--device", "cpu", "--out", str(tmp_path)])
    found = result(tmp_path)["cells"]
    assert (tmp_path / "sequences.svg").exists()
    chosen = [cell for cell in found if cell["part"] == "run"]
    assert len(chosen) == 2 * (5 + 3 * 2 * 2)  # seeds, with curvature, and networks, methods and lengths
    assert all(cell["final"] > 0 for cell in chosen)
    layers = {(c["network"], one["layer"]): one for c in found for one in c.get("layers", [])}
    assert layers["unrolled", "state"]["note"] == "28 uses taken as independent"
    assert "no rule for rnn_tanh" in layers["nn.RNN", "rnn.weight_hh_l0"]["note"]
    assert layers["transformer", "blocks.0.self_attn"]["kept"] == "kfac"


def test_the_grid_is_the_thesis_or_pruned() -> None:
    assert len(grid(True, [])) == 40
    assert grid(False, [(0.1, None), (0.2, 3.0), (0.3, 1.0), (0.4, 2.0)]) == [
        (0.3, 1.0), (0.3, 0.25), (0.4, 1.0), (0.4, 0.25),
    ]  # fmt: skip


def test_losses_are_read_off_where_they_are_known() -> None:
    cell = {"update": [1, 5, 9], "loss": [3.0, 2.0, None]}
    assert [loss_at(cell, "update", k) for k in (0, 1, 7, 9)] == [float("inf"), 3.0, 2.0, float("inf")]
