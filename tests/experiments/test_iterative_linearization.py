"""The studies of iterative linearization run from data to table, at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import linnet
from experiments.iterative_linearization import (
    converged,
    data_scaling,
    period,
    quintic,
    resnet,
    solutions,
    stability,
    training,
    transformer,
)
from experiments.iterative_linearization.networks import lenet, resnet18, vision_transformer
from experiments.iterative_linearization.training import Plan, Split, train
from experiments.sources import Images

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random images instead of CIFAR-10."""
    rng = np.random.default_rng(0)

    def read(name: str, data_dir: str | None = None) -> Images:
        del name, data_dir
        x = rng.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
        y = torch.arange(60) % 10
        return Images(x, y, x[:20], y[:20], 10)

    monkeypatch.setattr(training, "images", read)


def result(folder: Path, figure: str) -> list[dict[str, Any]]:
    """The cells that a study published."""
    assert (folder / "table.md").read_text().startswith("| ")
    assert (folder / figure).exists()
    cells: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())["cells"]
    return cells


def test_the_networks_have_the_papers_sizes() -> None:
    big = lenet(50, 32)
    assert [m.weight.shape[0] for m in big if isinstance(m, nn.Conv2d | nn.Linear)] == [50, 50, 120, 84, 10]
    assert big(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert lenet(4, 16)(torch.randn(2, 3, 16, 16)).shape == (2, 10)
    full = resnet18()
    weights = [m for m in full.modules() if isinstance(m, nn.Conv2d | nn.Linear) and m.weight.shape[-1] != 1]
    assert len(weights) == 18
    assert sum(p.numel() for p in full.parameters()) == pytest.approx(11.2e6, rel=0.01)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in full.modules())


def test_periods_one_and_never_differ_and_updates_are_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 3, 16, 16, generator=generator), torch.arange(30) % 10
    data = Split(x, y, x[:10], y[:10])
    found = {k: train(lenet(3, 16), data, Plan(k, 6, 0.05, 10, augment=k == 2)) for k in (1, 2, 3, None)}
    assert [found[k]["updates"] for k in (1, 2, 3, None)] == [6, 3, 2, 0]
    assert found[1]["loss"] != found[None]["loss"]
    stopped = train(lenet(3, 16), data, Plan(1, 50, 0.01, stop=100.0))
    assert stopped["step"] == [1]


def test_period(tmp_path: Path) -> None:
    period.main(
        [
            "--channels",
            "3",
            "--images",
            "30",
            "--test",
            "20",
            "--steps",
            "4",
            "--periods",
            "1",
            "2",
            "0",
            "--out",
            str(tmp_path),
        ]
    )
    assert [cell["updates"] for cell in result(tmp_path, "period.svg")] == [4, 2, 0] * 2


def test_solutions_are_compared_in_pairs(tmp_path: Path) -> None:
    sizes = {"channels": 3, "images": 30, "test": 20, "kernel": 6, "batch": 10, "steps": 4, "rate": 0.01}
    given = [f"--{name}={value}" for name, value in sizes.items()]
    for _ in range(2):  # the second time from the stored cells
        solutions.main([*given, "--periods", "1", "2", "0", "--seeds", "2", "--out", str(tmp_path)])
    cells = json.loads((tmp_path / "result.json").read_text())["cells"]
    assert [c["updates"] for c in cells if c.get("seed") == 0 and "updates" in c] == [4, 2, 0, 4]
    found = {(c["differ in"], c["one"], c["other"]): c for c in cells if c.get("differ in")}
    assert len(found) == 3 + 1 + 3
    assert found["K", "1", "2"]["alignment"] > found["weights", "1", "1"]["alignment"]
    x, y = torch.randn(30, 3, 16, 16), torch.arange(30) % 10
    given = solutions.arguments().parse_args([*given, "--batch", "30"])
    told, linear = solutions.trained((None, 0, 0), Split(x, y, x, y), given)
    _, one = solutions.trained((100, 0, 0), Split(x, y, x, y), given)
    assert told["accuracy"] == float((linear.classes == y).double().mean())
    assert not torch.equal(linear.kernel, one.kernel)  # of the first weights, and of the last


def test_data_scaling(tmp_path: Path) -> None:
    data_scaling.main(
        [
            "--channels",
            "3",
            "--sizes",
            "20",
            "40",
            "--test",
            "20",
            "--steps",
            "3",
            "--periods",
            "1",
            "0",
            "--out",
            str(tmp_path),
        ]
    )
    assert len(result(tmp_path, "data_scaling.svg")) == 4
    assert data_scaling.slope([(10, 0.5), (100, 0.75), (1000, 0.875)]) == pytest.approx(-0.30103, abs=1e-4)


def test_converged(tmp_path: Path) -> None:
    converged.main(
        [
            "--channels",
            "3",
            "--images",
            "30",
            "--test",
            "20",
            "--steps",
            "3",
            "--linearizations",
            "2",
            "--each",
            "3",
            "--seeds",
            "1",
            "--out",
            str(tmp_path),
        ]
    )
    assert [cell["updates"] for cell in result(tmp_path, "converged.svg")] == [3, 3, 2]


def test_quintic(tmp_path: Path) -> None:
    quintic.main(["--damping", "1", "--seeds", "2", "--steps", "15", "--width", "20", "--out", str(tmp_path)])
    cells = result(tmp_path, "quintic.svg")
    assert all(cell["steps taken"] == 15 for cell in cells)
    assert min(cell["train"] for cell in cells) < 1.5
    x = torch.linspace(-quintic.RANGE, quintic.RANGE, 100)
    assert float(quintic.quintic(x).abs().max()) < 4


def test_resnet(tmp_path: Path) -> None:
    resnet.main(
        [
            "--width",
            "2",
            "--images",
            "30",
            "--test",
            "20",
            "--steps",
            "2",
            "--periods",
            "1",
            "2",
            "--out",
            str(tmp_path),
        ]
    )
    cells = result(tmp_path, "resnet.svg")
    assert {cell["network"] for cell in cells} == {"without BatchNorm", "frozen BatchNorm"}
    assert [cell["updates"] for cell in cells] == [2, 1, 2, 1]


def test_frozen_statistics_are_those_of_the_images() -> None:
    x = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 10
    model = resnet.freeze(resnet18(2, norm=True), Split(x, y, x, y))
    norm = model.get_submodule("1")
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    first = model.get_submodule("0")(x)
    assert torch.allclose(norm.running_mean, first.mean((0, 2, 3)), atol=1e-5)
    assert not model.training


def test_sharpness_is_the_gauss_newton_matrix_largest_eigenvalue() -> None:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    rows = [
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(v, list(net.parameters()), retain_graph=True)])
        for v in net(x).reshape(-1)
    ]
    J, p = torch.stack(rows).view(7, 3, -1), net(x).detach().softmax(1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    G = torch.einsum("ncp,ncd,ndq->pq", J, hessian, J) / 7
    found, vector = stability.sharpness(net, x, None, 300)
    assert found == pytest.approx(float(torch.linalg.eigvalsh(G)[-1]), rel=1e-8)
    assert torch.allclose(G @ vector, found * vector, atol=1e-6)


def test_stability(tmp_path: Path) -> None:
    runs = ["K = 1", "K = 10", "new features at a gap of 0.1"]
    sizes = ["--images", "60", "--test", "20", "--channels", "3", "--looked-at", "10", "--time", "0.8"]
    stability.main(["--runs", *runs, *sizes, "--seeds", "1", "--out", str(tmp_path), "--device", "cpu"])
    cells = result(tmp_path, "stability.svg")
    assert [c["updates"] for c in cells[:2]] == [40, 4]
    assert all(v > 0 for c in cells for v in c["sharpness"])


def test_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "STAGES", 2)
    monkeypatch.setattr(transformer, "PRODUCTS", 3)
    sizes = ["--width", "8", "--images", "30", "--test", "20", "--batch", "10", "--steps", "8"]
    given = ["--rates", "0.5", "0.02", "0.01", "--periods", "1", "4", "0", "--seeds", "2", "--device", "cpu"]
    for _ in range(2):  # the second time from the stored cells
        transformer.main([*given, *sizes, "--out", str(tmp_path)])
    cells = result(tmp_path, "transformer.svg")
    tried, runs = cells[:3], cells[3:]
    assert [cell["updates"] for cell in runs] == [8, 2, 0] * 2
    below = [cell["rate"] for cell in tried if cell["largest"] < transformer.MOST]
    assert {cell["rate"] for cell in runs} == {max(below)}


def test_patches_are_the_squares_of_the_image() -> None:
    x = torch.arange(3 * 4 * 4.0).view(1, 3, 4, 4)
    found = vision_transformer(4, 2).get_submodule("0")(x)
    assert torch.equal(found[0, 1], x[0, :, :2, 2:].reshape(-1))
    assert found.shape == (1, 4, 12)


def test_the_largest_eigenvalue_is_that_of_another_way() -> None:
    model = lenet(3, 16).eval()
    x = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    p = model(x).detach().softmax(1)
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]  # Λ = root rootᵀ
    rows = (root.mT @ linnet.linearize(model, "all").jacobian(x).flatten(2)).flatten(0, 1)
    dense = float(torch.linalg.eigvalsh(rows @ rows.T)[-1]) / len(x)
    assert stability.sharpness(model, x, None, 200)[0] == pytest.approx(dense, rel=1e-3)
