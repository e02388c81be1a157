"""The studies of LQF run from end to end on a network and images of a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from experiments.lqf import (
    ablation,
    adam,
    bilinear,
    condition,
    convex,
    crops,
    few_shot,
    gap,
    informative,
    learning_rate,
    loss,
    online,
    pairs,
    plain_loss,
    tasks,
    uses,
    weight_decay,
)
from experiments.sources import HALF, Images

pytestmark = pytest.mark.long

PAIR = tasks.Pair("small", "stripes", 8, 5)


class Small(nn.Module):
    """Two convolutions and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 8, 3),
        )
        self.act, self.fc = nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.conv2(self.act(self.norm(self.conv1(x))))).mean((2, 3)))


def stripes(n: int, seed: int) -> tuple[np.ndarray, Tensor]:
    """Gray stripes in three directions under noise."""
    draw, y = np.random.default_rng(seed), np.arange(n) % 3
    row, column = np.mgrid[:8, :8]
    waves = np.sin(1.7 * np.stack([row, column, row + column]))
    noisy = 128 + 60 * waves[y] + 40 * draw.standard_normal((n, 8, 8))
    return noisy.clip(0, 255).astype(np.uint8), torch.from_numpy(y)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The studies' network and data set, replaced."""
    torch.manual_seed(0)
    model = Small().eval()
    monkeypatch.setattr(tasks, "pretrained", lambda name, data_dir: (model, HALF))
    stored = Images(*stripes(90, 0), *stripes(60, 1), 3)
    monkeypatch.setattr(tasks, "_stored", lambda name, data_dir: stored)
    for module in (pairs, learning_rate):
        monkeypatch.setattr(module, "STEPS", dict.fromkeys(tasks.METHODS, 3))
    for method in tasks.METHODS:
        monkeypatch.setitem(tasks.RATES, method, (0.01, 0.1))
    monkeypatch.setattr(ablation, "MULTIPLES", (0.5, 1.0))


def published(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def arguments(folder: Path, seeds: int = 2) -> list[str]:
    return ["--out", str(folder), "--seeds", str(seeds)]


def test_pairs_and_the_studies_that_use_their_cells(small: None, tmp_path: Path) -> None:
    pairs.main(arguments(tmp_path), [PAIR])
    result = published(tmp_path)
    cells = result["cells"]
    assert {c["method"] for c in cells} == {*tasks.METHODS, "optimum"}
    assert all(0 <= c["accuracy"] <= 1 for c in cells)
    first = [c for c in cells if c["method"] == "lqf"]
    assert len(first[0]["held_out"]) == 2
    assert first[1]["rate"] == first[0]["rate"]
    assert (tmp_path / "pairs.svg").exists()
    assert "median increase" in (tmp_path / "table.md").read_text()
    lines = len((tmp_path / "cells.jsonl").read_text().splitlines())
    few_shot.main(arguments(tmp_path), [PAIR], (1,))
    assert (
        len((tmp_path / "cells.jsonl").read_text().splitlines()) == lines + 2 * 4
    )  # four methods at one shot
    assert {c["shots"] for c in published(tmp_path)["cells"]} == {1, 5}
    ablation.main(arguments(tmp_path, 1), [PAIR])
    assert len(published(tmp_path)["increases"]) == 4
    assert all(name in (tmp_path / "table.md").read_text() for name in ablation.CHANGES)


def test_losses_are_compared_as_adapt_would_fit_them(small: None, tmp_path: Path) -> None:
    loss.main([*arguments(tmp_path), "--shots", "5"], [PAIR])
    cells = published(tmp_path)["cells"]
    assert len(cells) == 2
    for cell in cells:
        better = cell["cross-entropy leave-one-out"] < cell["squared leave-one-out"]
        assert cell["auto"] == loss.LOSSES[int(better)]
        assert cell["auto log loss"] == cell[f"{cell['auto']} log loss"]
        assert all(0 <= cell[f"{name} accuracy"] <= 1 for name in (*loss.LOSSES, "auto"))
    assert "auto takes cross-entropy" in (tmp_path / "table.md").read_text()


def test_an_increase_is_relative_to_plain_fine_tuning() -> None:
    cells = [
        {"pair": p, "method": m, "accuracy": a}
        for p, m, a in (("a", "nlft", 0.9), ("a", "lqf", 0.8), ("b", "nlft", 0.5), ("b", "lqf", 0.6))
    ]
    assert pairs.increases(cells, "lqf") == pytest.approx({"a": 100.0, "b": -20.0})


def test_informative_drops_and_refits(small: None, tmp_path: Path) -> None:
    part = ["--params", "conv2|fc", "--shots", "5", "--within-class"]
    informative.main([*arguments(tmp_path, 1), *part], PAIR)
    cell = published(tmp_path)["cells"][0]
    assert all(cell[f"classes {name}"] == [3, 3, 3, 3] for name in informative.ORDERS)
    for kind in (["--head", "probe"], ["--on", "held-out"], []):
        informative.main([*arguments(tmp_path, 1), *kind], PAIR)
    cell = published(tmp_path)["cells"][0]
    assert all(len(cell[name]) == len(informative.SHARES) for name in informative.ORDERS)
    assert cell["classes most"][0] <= 3
    assert -1 <= cell["rank correlation with leave-one-out residuals"] <= 1
    assert (tmp_path / "informative.svg").exists()
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 4


def test_classes_lose_samples_at_the_same_pace() -> None:
    y = torch.tensor([0, 0, 0, 1, 1, 0])
    order = informative.evenly(torch.tensor([5, 3, 0, 1, 2, 4]), y)
    assert set(order[:2].tolist()) == {5, 3}
    assert set(order[:3].tolist()) == {5, 3, 0}
    assert order[-1].item() == 2


def test_online_updates_are_the_fit_at_once(small: None, tmp_path: Path) -> None:
    online.main(arguments(tmp_path, 1), PAIR, steps=2)
    for cell in published(tmp_path)["cells"]:
        assert cell["update against at once"] < 1e-4
        assert sum(cell["sizes"]) == 15
    online.main([*arguments(tmp_path, 1), "--head", "random", "--linear"], PAIR)
    (cell,) = published(tmp_path)["cells"]
    assert "plain, continued" not in cell
    # the ridge chosen anew at each update is that of its paragon
    assert cell["ridges"]["anew"] == pytest.approx(cell["ridges"]["same θ₀"], rel=1e-3)
    assert cell["linear, updated, ridge chosen anew"] == cell["linear, from scratch, same θ₀"]
    y = torch.arange(20) % 4
    first = online.parts((torch.zeros(20, 1), y), 2)[0]
    assert set(first[1].tolist()) == {0, 1, 2, 3}


def test_weight_decay_has_an_error_for_every_ridge(small: None, tmp_path: Path) -> None:
    words = ["--head", "random", "--params", "conv2|fc"]
    for folder, more in ((tmp_path / "probe", []), (tmp_path / "random", words)):
        weight_decay.main([*arguments(folder, 1), *more], PAIR)
        (cell,) = published(folder)["cells"]
        assert len(cell["accuracy"]) == len(cell["loo"]) == len(weight_decay.DECADES)
        assert cell["degrees"] == sorted(cell["degrees"], reverse=True)
        assert cell["scale"] > 0
        assert set(cell["chosen"]) == set(weight_decay.CHOICES)
        assert all(0 <= one["told"] <= 1 for one in cell["chosen"].values())


def test_the_kernel_is_conditioned_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = np.random.default_rng(0).integers(0, 255, (40, 28, 28), dtype=np.uint8)
    labels = torch.arange(40) % 10
    stored = Images(drawn, labels, drawn, labels, 10)
    monkeypatch.setattr(condition, "images", lambda name, data_dir: stored)
    condition.main([*arguments(tmp_path, 1), "--train", "40", "--images", "3", "--steps", "2"])
    for cell in published(tmp_path)["cells"]:
        assert 1 < cell["after"]["with ridge"] < cell["after"]["condition"]
        assert abs(cell["growth"]["with ridge"]) < 2


def test_losses_of_plain_fine_tuning_have_the_same_rates_to_choose_from(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_loss, "RATES", (0.01, 0.1))
    monkeypatch.setattr(plain_loss, "TESTED", 30)
    plain_loss.main([*arguments(tmp_path), "--shots", "2", "--steps", "3"], [PAIR])
    cells = published(tmp_path)["cells"]
    tuned = [cell for cell in cells if "held out" in cell]
    assert [cell["loss"] for cell in tuned] == [*plain_loss.LOSSES]
    assert all(cell["held out"][f"{cell['rate']:g}"] == max(cell["held out"].values()) for cell in tuned)
    assert len(cells) == 2 * (1 + 2)
    assert "mean, 2 shots" in (tmp_path / "table.md").read_text()


def test_the_last_layer_is_compared_with_its_optimum(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "TESTED", 30)
    adam.drawn.cache_clear()
    data, _ = adam.drawn(PAIR, 0, None)
    best = adam.optimum(data, 3)
    slope = torch.autograd.functional.jacobian(
        lambda w: (
            0.5 * (adam.goals(data[1], 3) - adam.design(data[0]) @ w).square().sum() / len(data[1])
            + 0.5 * adam.DECAY * w.square().sum()
        ),
        best,
    )
    assert float(slope.abs().max()) < 1e-8
    for method, changes in (
        ("K-FAC", {}),
        ("Adam", {"optimizer": "adam"}),
        ("SGD", {"preconditioner": "none"}),
    ):
        head = nn.Linear(data[0].shape[1], 3)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        tuned = tasks.finetune(
            nn.Sequential(head), data, "lqf-fc", activation="relu", head="keep", learning_rate=0.01,
            weight_decay=adam.DECAY, steps=60, batch_size=16, schedule="cosine", **changes,
        )  # fmt: skip
        zero = tuned.predict(torch.zeros(1, data[0].shape[1]))
        weights = torch.cat([tuned.predict(torch.eye(data[0].shape[1])) - zero, zero]).double()
        found = adam.objective(adam.run(data, 3, method, 0.01, 60, 0), data)
        assert found == pytest.approx(adam.objective(weights, data), rel=0.02)  # another order of the images
    adam.main([*arguments(tmp_path), "--steps", "20"], [PAIR])
    found = [cell for cell in published(tmp_path)["cells"] if "missing" in cell]
    assert len(found) == 3 * 2 * 2
    assert all(cell["missing"] > 0 for cell in found)  # below the optimum there is nothing
    assert min(cell["missing"] for cell in found) < 0.9


def test_bilinear_pooling_is_compared_on_the_same_draws(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bilinear, "CHANNELS", 6)
    monkeypatch.setattr(bilinear, "STEPS", 3)
    bilinear.main(arguments(tmp_path), [PAIR])
    cells = published(tmp_path)["cells"]
    assert len(cells) == 3 * 2 * 2
    assert all(0 <= cell["accuracy"] <= 1 for cell in cells)
    tuned = [cell for cell in cells if cell["method"] == "nlft" and cell["bilinear"]]
    assert tuned[1]["rate given"] == tuned[0]["rate"]
    assert (tmp_path / "table.md").read_text().count("±") == 9


def test_learning_rates_are_compared(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_rate, "GRID", {m: ((0.01, 0.1), (4, 8)) for m in ("lqf", "nlft")})
    learning_rate.main(arguments(tmp_path, 1), [PAIR], (3, 2))
    assert all(len(cell["tried"]) == 4 for cell in published(tmp_path)["cells"])
    cells = [
        {"pair": p, "tried": [{"rate": 1.0, "batch": 2, "elr": 5.0, "accuracy": a},
                              {"rate": 2.0, "batch": 2, "elr": 10.0, "accuracy": b}]}
        for p, a, b in (("a", 0.9, 0.89), ("b", 0.5, 0.7))
    ]  # fmt: skip
    assert learning_rate.best_and_near(cells[0]) == (0.9, 5.0, 5.0, 10.0)
    key, lost = learning_rate.one_for_all(cells)
    assert key == (2.0, 2)
    assert lost == pytest.approx({"a": 1.0, "b": 0.0})


def test_gap_has_a_row_for_everything_tried(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gap, "PLAIN", {**gap.PLAIN, "steps": 4})
    monkeypatch.setattr(gap, "LINEAR", {**gap.LINEAR, "steps": 3})
    monkeypatch.setattr(gap, "PERIODS", (4, 2))
    monkeypatch.setattr(gap, "LARGE", 10)
    gap.main([*arguments(tmp_path, 1), "--large", "--augmented", "--cross-entropy"], [4])
    rows = {cell["row"] for cell in published(tmp_path)["cells"]}
    assert len(rows) == 21
    assert all(row in (tmp_path / "table.md").read_text() for row in rows)


def test_crops_leave_images_out_with_all_their_copies(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crops, "PARAMS", "conv2|fc")
    monkeypatch.setattr(crops, "SIDE", 6)
    monkeypatch.setattr(crops, "COPIES", 2)
    crops.main(arguments(tmp_path), [PAIR])
    cells = published(tmp_path)["cells"]
    assert [cell["kind"] for cell in cells] == [*crops.KINDS] * 2
    assert all(0 <= cell["accuracy"] <= 1 and cell["told"] > 0 for cell in cells)
    assert (tmp_path / "table.md").read_text().count("±") == 8
    # the same copies twice, each of half the weight, are what one is; and both are linnet's fit without some
    model, (x, y), _ = tasks.load(PAIR, 0)
    lin = informative.part_of(tasks.linear_model(model, (x, y), head="random"), "conv2|fc")
    ridges = torch.tensor([0.1, 10.0], dtype=torch.float64)
    goal = (15 * torch.nn.functional.one_hot(y) - lin.base(x)).double()
    found = [
        crops.left_out(
            crops.kernels(lin, x.repeat(copies, 1, 1, 1), x)[0],
            (goal.repeat(copies, 1), goal),
            torch.arange(len(y)) % 3,
            ridges,
        )
        for copies in (1, 2)
    ]
    assert torch.allclose(found[0], found[1], rtol=1e-4)
    errors = 0.0
    for k in range(3):
        out = torch.arange(len(y)) % 3 == k
        fit = linnet.fit(lin, (x[~out], y[~out]), ridge=10.0)
        errors += float((fit.predict(x[out]) - lin.base(x[out]) - goal[out]).double().square().sum()) / len(y)
    assert float(found[0][1]) == pytest.approx(errors, rel=1e-3)


def test_convex_penalties_are_solved_to_optimality(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 60, generator=draw, dtype=torch.float64)
    target = torch.randn(20, generator=draw, dtype=torch.float64)
    for ridge in (0.0, 2.0):
        for (w, missed), strength in zip(
            convex.path(rows, target, (3.0, 1.0), ridge), (3.0, 1.0), strict=True
        ):
            gradient = torch.autograd.functional.jacobian(
                lambda v, rho=ridge: 0.5 * (target - rows @ v).square().sum() + 0.5 * rho * v.square().sum(),
                w,
            )
            assert missed <= convex.TOLERANCE
            assert float((gradient[w != 0] + strength * w[w != 0].sign()).abs().max()) < 1.1e-2 * strength
            assert float(gradient.abs().max()) < 1.011 * strength
            assert 0 < int((w != 0).sum()) < 60
    q = torch.linalg.qr(torch.randn(20, 20, generator=draw, dtype=torch.float64))[0]
    (w, _), inner = convex.path(q, target, (0.5,), 1.0)[0], q.T @ target
    assert torch.allclose(w, inner.sign() * (inner.abs() - 0.5).clamp_min(0) / 2, atol=5e-3)
    monkeypatch.setattr(convex, "PARAMS", "conv2|fc")
    monkeypatch.setattr(convex, "SHOTS", (2, 3))
    monkeypatch.setattr(convex, "STRENGTHS", (0.5, 0.1, 0.03))
    convex.main(arguments(tmp_path), [PAIR])
    cells = published(tmp_path)["cells"]
    assert len(cells) == 4
    for cell in cells:
        assert all(cell[method]["optimality"] <= convex.TOLERANCE for method in convex.METHODS)
        assert cell["elastic net"]["told"] <= cell["ridge"]["told"]
        assert cell["L1"]["nonzero"] < cell["weights"]


def test_uses_of_a_linear_model_have_numbers(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uses, "PARAMS", "conv2|fc")
    for name, value in (("TRAINED", 8), ("HELD", 4), ("TESTED", 60), ("PUBLIC", 10), ("VALIDATED", 5)):
        monkeypatch.setattr(uses, name, value)
    monkeypatch.setattr(uses, "COUNTS", (20, 30))
    monkeypatch.setattr(uses, "RIDGES", (10.0, 100.0))
    monkeypatch.setattr(uses, "PLAIN", {**uses.PLAIN, "steps": 3})
    uses.halves.cache_clear()
    uses.features.cache_clear()
    uses.main(arguments(tmp_path), [PAIR])
    cells = published(tmp_path)["cells"]
    held = [cell["ways"] for cell in uses.of_use(cells, "compatibility")]
    assert all(0 <= one["negative"] <= 1 - one["accuracy"] for ways in held for one in ways.values())
    groups = [cell["ways"] for cell in uses.of_use(cells, "fairness")]
    assert len(groups) == 2
    for cell in uses.of_use(cells, "forgetting"):
        assert cell["forget against a fit without"] < 1e-4
        for one in cell["changes"].values():
            assert all(-1 <= one[key] <= 1 for key in ("correlation", "of two"))
            assert all(0 <= share <= 1 for share in one["agreement"].values())
    released = [cell for cell in uses.of_use(cells, "privacy") if "open" in cell]
    assert len(released) == 2 * 2
    assert all(len(cell["accuracy"]) == len(uses.EPSILONS) for cell in released)
    assert (tmp_path / "table.md").read_text().count("|---") >= 4


def test_outputs_by_epsilon_are_those_of_releases(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "PUBLIC", 10)
    uses.halves.cache_clear()
    uses.features.cache_clear()
    lin, (fitted, _, _, (xt, _)) = uses.features(PAIR, None)
    fit = linnet.fit(lin, uses.some(fitted, 20, 0), ridge=5.0, solver="dual")
    found = uses.at_each(fit, xt, (1.0, 1.0), 3)
    for epsilon, draw in ((1.0, 0), (30.0, 4), (1000.0, 9)):
        generator = torch.Generator().manual_seed(3 * uses.DRAWS + draw)
        made = linnet.audit.release(fit, epsilon, uses.DELTA, clip=(1.0, 1.0), generator=generator)
        assert torch.allclose(found[epsilon][draw], made.predict(xt)[:, 0], atol=1e-9)
    uses.halves.cache_clear()
    uses.features.cache_clear()


def test_groups_have_their_shares_of_each_class() -> None:
    y = torch.arange(20) % 2
    x, group = uses.grouped((torch.rand(20, 3, 8, 8), y), torch.tensor([0.9, 0.1]))
    assert group[y == 0].sum() == 9
    assert group[y == 1].sum() == 1
    first, second = uses.parted((x, y), 4, 6)
    assert torch.equal(first[1].bincount(), torch.tensor([4, 4]))
    assert torch.equal(torch.cat([first[0], second[0]]).sum((1, 2, 3)).sort()[0], x.sum((1, 2, 3)).sort()[0])


def test_real_pairs_load(data_directory: Path) -> None:
    for pair, classes in zip(tasks.PAIRS, (10, 5, 10, 10, 20, 5), strict=True):
        if pair.network == "mobilenet":
            continue
        _, (x, y), (xt, yt) = tasks.load(pair, 0, str(data_directory), tested=2 * classes)
        assert x.shape == (classes * pair.shots, 3, pair.side, pair.side)
        assert torch.equal(y.bincount(), torch.full((classes,), pair.shots))
        assert len(xt) == len(yt) == 2 * classes
