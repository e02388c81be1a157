"""The studies of Laplace's method at sizes that take seconds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import linnet
from experiments.laplace import (
    adversarial,
    networks,
    out_of_distribution,
    pretrained,
    toy_regression,
    tradeoff,
)
from experiments.laplace.hmc import network_posterior
from experiments.sources import Images

pytestmark = pytest.mark.long

SMALL = [
    "--width", "16", "--train", "300", "--validation", "50", "--test", "60", "--letters", "60",
    "--epochs", "2", "--ffg-epochs", "1", "--samples", "3",
]  # fmt: skip


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids of two values."""
    for module in (toy_regression, networks, pretrained):
        monkeypatch.setattr(module, "SCALES", (1.0, 100.0))
        monkeypatch.setattr(module, "PRIORS", (1.0, 100.0))
    monkeypatch.setattr(toy_regression, "STARTS", 1)
    monkeypatch.setattr(toy_regression, "STEPS", 50)


def result(out: Path) -> dict[str, object]:
    """What a study has published."""
    assert (out / "table.md").exists()
    found: dict[str, object] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return found


def test_batched_outputs_are_those_of_the_network(float64: torch.dtype) -> None:
    task = toy_regression.Task(0, 5)
    model = toy_regression.network("tanh", 0)
    theta, x = torch.randn(3, 78), task.scaled(task.test)[0]
    outputs = network_posterior(model, x, x, task.likelihood.nll, 1.0)[1]
    torch.testing.assert_close(toy_regression.batched(model, theta, x), outputs(theta, x))


def test_the_held_out_density_is_that_of_the_mixture(float64: torch.dtype) -> None:
    task = toy_regression.Task(0, 1)
    outputs = torch.tensor([[[0.1]], [[0.4]]])
    y, scale = float(task.test[1]), float(task.y_scale)
    each = [math.exp(-0.5 * ((y - scale * f) / 3.0) ** 2) / math.sqrt(2 * math.pi * 9.0) for f in (0.1, 0.4)]
    assert task.density(outputs) == pytest.approx(math.log(sum(each) / 2), rel=1e-10)


def test_toy_regression(tmp_path: Path) -> None:
    sizes = [
        "--chains",
        "4",
        "--draws",
        "5",
        "--warmup",
        "5",
        "--samples",
        "10",
        "--tuning",
        "5",
        "--held-out",
        "10",
    ]
    toy_regression.main(["--seeds", "1", *sizes, "--out", str(tmp_path)])
    assert len(result(tmp_path)["cells"]) == 14  # type: ignore[arg-type]
    assert "below HMC" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "toy_regression.svg").exists()


def test_letters_and_attacks_share_networks(
    tmp_path: Path, data_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [*SMALL, "--data-dir", str(data_directory), "--networks", str(tmp_path / "networks")]
    out_of_distribution.main([*shared, "--out", str(tmp_path / "ood")])
    cells = result(tmp_path / "ood")["cells"]
    assert {c["method"] for c in cells} == set(networks.METHODS)  # type: ignore[attr-defined]
    for cell in cells:  # type: ignore[attr-defined]
        assert 0 <= cell["accuracy"] <= 1
        assert cell["share"] == sorted(cell["share"], reverse=True)
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "networks").rglob("*") if p.is_file()}
    few = ["--attacked", "10", "--aimed", "8", "--drawn", "2", "--iterations", "2"]
    adversarial.main([*shared, *few, "--out", str(tmp_path / "attacks")])
    attacks = result(tmp_path / "attacks")["cells"]
    assert len(attacks) == 2 * len(networks.METHODS)  # type: ignore[arg-type]
    assert all(c["kept"][0] == 1.0 for c in attacks if c["attack"] == "untargeted")  # type: ignore[attr-defined]
    monkeypatch.setattr(
        tradeoff, "GRIDS", {name: (kind, grid[:1]) for name, (kind, grid) in tradeoff.GRIDS.items()}
    )
    tradeoff.main([*shared, "--out", str(tmp_path / "tradeoff")])
    assert len(result(tmp_path / "tradeoff")["cells"]) == 4  # type: ignore[arg-type]
    assert files == {p: p.stat().st_mtime_ns for p in files}, "networks were trained again"


@pytest.mark.parametrize("predict", ["mc", "glm"])
def test_posteriors_of_a_network_without_dropout(predict: str, tmp_path: Path, data_directory: Path) -> None:
    """Laplace and FFG are of the plain network, MC dropout and the deterministic pass of the other."""
    out = ["--data-dir", str(data_directory), "--out", str(tmp_path), "--networks", str(tmp_path / "n")]
    what = ["--recipe", "sgd", "--posterior-of", "plain", "--predict", predict]
    out_of_distribution.main([*SMALL, *out, *what])
    cells = {c["method"]: c for c in result(tmp_path)["cells"]}  # type: ignore[attr-defined]
    assert set(cells) == {*networks.METHODS, networks.PLAIN}
    assert cells[networks.PLAIN]["nll"] != cells["deterministic"]["nll"]
    kinds = {p.name.split("-")[0] for p in (tmp_path / "n").glob("*.pt")}
    assert kinds == {"dropout", "plain", "ffg"}
    plain = torch.load(next((tmp_path / "n").glob("plain-*.pt")))
    model = networks.network(16, 0, 0.0)
    model.load_state_dict(plain)
    file = next(p for p in (tmp_path / "n").iterdir() if p.name.startswith("kfac-plain"))
    assert linnet.load(file, model).data_scale in (1.0, 100.0)


def test_sampled_networks_at_the_weights_are_the_network() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    theta = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    x = torch.randn(6, 4)
    sampled = networks.Sampled(model, theta.expand(2, -1))
    torch.testing.assert_close(sampled(x), model(x).softmax(1).expand(2, -1, -1))


def test_seeds_draw_other_images() -> None:
    sets = Images(np.arange(60, dtype=np.uint8).reshape(60, 1, 1), torch.arange(60),
                  np.arange(30, dtype=np.uint8).reshape(30, 1, 1), torch.arange(30), 60)  # fmt: skip
    given = SimpleNamespace(train=20, validation=10, test=15, device="cpu")
    first, second = (pretrained.drawn(sets, None, given, seed) for seed in (0, 1))
    assert [len(first[part][1]) for part in ("train", "validation", "test")] == [20, 10, 15]
    assert not {*first["validation"][1].tolist()} & {*first["test"][1].tolist()}
    assert not any(torch.equal(first[part][1], second[part][1]) for part in first)


def test_pretrained(tmp_path: Path, data_directory: Path) -> None:
    few = ["--train", "6", "--validation", "6", "--tuning", "2", "--test", "6", "--samples", "2"]
    pretrained.main(
        ["--networks", "resnet20", *few, "--data-dir", str(data_directory), "--out", str(tmp_path)]
    )
    cells = result(tmp_path)["cells"]
    assert [c["method"] for c in cells] == list(pretrained.METHODS)  # type: ignore[attr-defined]
