"""The studies of fast adaptation at sizes that take seconds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.fast_adaptation import (
    bands,
    classification,
    deep_kernel,
    fisher_product,
    malaria,
    olivetti,
    sinusoids,
    task_jacobians,
    uci,
)
from experiments.fast_adaptation.networks import PreResNet, face_network
from linnet.errors import DataError

pytestmark = pytest.mark.long


def result(out: Path) -> list[dict[str, object]]:
    """The cells that a study has published."""
    assert (out / "table.md").exists()
    found: list[dict[str, object]] = json.loads((out / "result.json").read_text(encoding="utf-8"))["cells"]
    return found


def test_sinusoids_agree_in_every_space(tmp_path: Path) -> None:
    sizes = ["--seeds", "1", "--tasks", "1", "--epochs", "20", "--first", "10"]
    sinusoids.main([*sizes, "--out", str(tmp_path)])
    for cell in result(tmp_path):
        assert cell["apart"]["Fisher products"] < 1e-6  # type: ignore[index]
        assert cell["apart"]["Fisher differences"] < 1e-2  # type: ignore[index]


def test_bands_are_narrow_at_the_points_alone(tmp_path: Path) -> None:
    bands.main(["--seeds", "1", "--epochs", "5", "--out", str(tmp_path)])
    for cell in result(tmp_path):
        assert 20_000 < cell["parameters"] < 22_000  # type: ignore[operator]
        there, *elsewhere = cell["scores"]["without f₀"].values()  # type: ignore[index]
        assert all(place["deviation"] > there["deviation"] for place in elsewhere)


def test_networks_have_the_sizes_of_the_paper() -> None:
    assert sum(p.numel() for p in face_network().parameters()) == 1_627_072
    assert face_network()(torch.zeros(1, 1, 45, 45)).shape == (1, 2)
    convolutions = [
        m for m in PreResNet(56).modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)
    ]
    assert len(convolutions) == 55
    assert PreResNet(8, 4)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_fisher_product(tmp_path: Path, data_directory: Path) -> None:
    sizes = [
        "--images",
        "4",
        "--train",
        "16",
        "--depth",
        "8",
        "--width",
        "4",
        "--epochs",
        "0",
        "1",
        "--pretrained",
    ]
    fisher_product.main([*sizes, "--data-dir", str(data_directory), "--out", str(tmp_path)])
    for cell in result(tmp_path):
        assert cell["library"] < fisher_product.GOAL  # type: ignore[operator]
        assert min(cell["central"]) < fisher_product.GOAL  # type: ignore[call-overload]


def test_task_jacobians(tmp_path: Path, data_directory: Path) -> None:
    sizes = ["--seeds", "1", "--images", "2", "--train", "40", "--steps", "2", "--head-steps", "1"]
    task_jacobians.main([*sizes, "--data-dir", str(data_directory), "--out", str(tmp_path)])
    cells = result(tmp_path)
    assert [c["task"] for c in cells] == list(task_jacobians.TASKS)
    assert all(len(c["values"]) == 20 for c in cells)  # type: ignore[arg-type]


def test_faces_turn_by_their_angle() -> None:
    ramp = torch.linspace(-1, 1, 64)[None, None, None].expand(1, 1, 64, 64)
    x, y = olivetti.turned(ramp, 1, 0, 0.0)
    angle = math.radians(olivetti.UNIT * float(y))
    right, down = (float(x[0, 0].diff(dim=d).mean()) for d in (1, 0))
    assert x.shape == (1, 1, 45, 45)
    assert math.cos(angle) == pytest.approx(right * 63 / 2, abs=1e-3)
    assert -math.sin(angle) == pytest.approx(down * 63 / 2, abs=1e-3)


def test_olivetti(tmp_path: Path, data_directory: Path) -> None:
    sizes = ["--copies", "1", "--epochs", "1", "--retrain", "1", "--points", "3", "--held-out", "4"]
    olivetti.main(["--seeds", "1", *sizes, "--data-dir", str(data_directory), "--out", str(tmp_path)])
    assert [c["way"] for c in result(tmp_path)] == list(olivetti.WAYS)


def test_classification(tmp_path: Path, data_directory: Path) -> None:
    sizes = [
        "--width",
        "4",
        "--train",
        "20",
        "--epochs",
        "1",
        "--linear",
        "6",
        "--test",
        "6",
        "--svi-epochs",
        "1",
    ]
    classification.main([*sizes, "--samples", "2", "--data-dir", str(data_directory), "--out", str(tmp_path)])
    assert len(result(tmp_path)) == 14


def test_uci(tmp_path: Path, data_directory: Path) -> None:
    sizes = ["--seeds", "1", "--sets", "yacht", "--steps", "30"]
    uci.main([*sizes, "--data-dir", str(data_directory), "--out", str(tmp_path)])
    assert [c["way"] for c in result(tmp_path)] == list(uci.WAYS)


def test_uci_scores_are_in_the_units_of_the_data(data_directory: Path) -> None:
    split = uci.Split("yacht", 0, str(data_directory))
    assert len(split.x) + len(split.test_x) == 308
    target = (split.test[1] - split.y_center) / split.y_spread
    exact = split.scores(target + 1.0, torch.ones_like(target))
    assert exact["rmse"] == pytest.approx(float(split.y_spread))
    expected = -0.5 - math.log(float(split.y_spread)) - 0.5 * math.log(2 * math.pi)
    assert exact["density"] == pytest.approx(expected)


def test_deep_kernel_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--seeds", "1", "--tasks", "1", "--epochs", "5", "--steps", "3", "--first", "10"]
    deep_kernel.main([*sizes, "--out", str(tmp_path)])
    assert "GPyTorch" in capsys.readouterr().out or result(tmp_path)


def raster(path: Path, seed: int) -> None:
    """A smooth map with a hole, as .npz."""
    longitude, latitude = np.linspace(3, 14, 30), np.linspace(13, 5, 20)
    values = 0.3 + 0.2 * np.sin(longitude[None] / 2 + seed) * np.cos(latitude[:, None])
    values[:3, :3] = np.nan
    np.savez(path, values=values, longitude=longitude, latitude=latitude)


def test_malaria_on_a_synthetic_raster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{year}.npz" for year in (2012, 2016)]
    for seed, path in enumerate(paths):
        raster(path, seed)
    read = malaria.read_raster(paths[0])
    assert len(read.place) == 30 * 20 - 9
    assert read.value.isfinite().all()
    sizes = ["--points-first", "50", "--points", "10", "--held-out", "20", "--epochs", "5", "--seeds", "1"]
    malaria.main(["--raster", *map(str, paths), *sizes, "--out", str(tmp_path / "out")])
    assert result(tmp_path / "out")
    malaria.main([])
    assert "2012" in capsys.readouterr().out
    with pytest.raises(DataError, match="does not exist"):
        malaria.read_raster(tmp_path / "nigeria.tif")


def test_malaria_reads_geotiff(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    tiff = pytest.importorskip("PIL.TiffImagePlugin")
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    values[0, 0] = -9999
    tags = tiff.ImageFileDirectory_v2()
    for tag, kind, value in (
        (malaria.PIXEL_SCALE, 12, (0.5, 0.25, 0.0)),
        (malaria.TIE_POINT, 12, (0.0, 0.0, 0.0, 3.0, 13.0, 0.0)),
        (malaria.NO_DATA, 2, "-9999"),
    ):
        tags.tagtype[tag] = kind
        tags[tag] = value
    image.fromarray(values).save(tmp_path / "map.tif", tiffinfo=tags)
    read = malaria.read_raster(tmp_path / "map.tif")
    assert len(read.value) == 5
    assert read.place[0].tolist() == [3.75, 12.875]
