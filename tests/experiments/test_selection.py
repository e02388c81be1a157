"""The study of what to label next: its own criteria are their definitions, a run is honest, tables add up."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import linnet
from experiments import pages
from experiments.adapt import encoded as encoding
from experiments.adapt.tasks import Network, Task
from experiments.selection import criteria
from experiments.sources import Images
from experiments.tables import mean_and_error


def drawn(seed: int = 0) -> dict[str, Tensor]:
    """Features of three classes."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(180) % 3
    phi = torch.randn(180, 6, generator=generator).double() + 2 * F.one_hot(y, 6)
    return {"pool": phi[:120], "pool labels": y[:120], "test": phi[120:], "test labels": y[120:]}


def test_badge_spreads_over_gradients_of_predicted_classes() -> None:
    """Its distances are those of the gradients formed one by one: what is chosen has none left."""
    generator = torch.Generator().manual_seed(0)
    p, phi = torch.rand(30, 4, generator=generator).softmax(1), torch.randn(30, 5, generator=generator)
    gradients = ((p - F.one_hot(p.argmax(1), 4))[:, :, None] * phi[:, None]).flatten(1)
    found = criteria.badge(p, phi, 6, torch.Generator().manual_seed(1))
    assert int(found[0]) == int(gradients.square().sum(1).argmax())
    assert len(found.unique()) == 6
    twins = criteria.badge(p.repeat(2, 1), phi.repeat(2, 1), 30, torch.Generator().manual_seed(1))
    assert len((twins % 30).unique()) == 30  # never the same gradient twice while others are left


def test_coreset_takes_the_farthest() -> None:
    line = torch.tensor([[0.0], [1.0], [9.0], [5.0]])
    assert criteria.coreset(line, torch.tensor([[0.0]]), 2).tolist() == [2, 3]


def test_certainty() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.4, 0.3, 0.3], [1.0, 0.0, 0.0]])
    assert criteria.least_certain(p, "margin", 1).tolist() == [0]
    assert criteria.least_certain(p, "entropy", 1).tolist() == [1]


@pytest.mark.long
def test_runs_start_alike_and_end_at_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteria, "MOST", 50)
    found = {method: criteria.curve(drawn(), method, 0) for method in criteria.METHODS}
    assert {one["accuracy"][0] for one in found.values()} == {found["random"]["accuracy"][0]}
    assert all(len(one["accuracy"]) == 4 for one in found.values())
    assert found["variance"]["accuracy"][-1] > 60
    assert found["random"]["classes found"] == found["random"]["classes"] == 3


def test_differences_are_paired() -> None:
    cells = []
    for task, level in (("easy", 90.0), ("hard", 40.0)):
        for seed in (0, 1):
            for method in criteria.METHODS:
                gain = 2.0 if method == "variance" else 0.0
                steps = [level + seed + gain] * 9
                cells.append(
                    {"task": task, "seed": seed, "method": method, "accuracy": steps, "a choice": 0.1}
                )
    rows = {line.split(" | ")[0]: line for line in criteria.summary(cells).splitlines()}
    assert "| 67.5 | +2.0 ± 0.0 | 67.5 | +2.0 ± 0.0 | 67.5 | +2.0 ± 0.0 |" in rows["| variance"]
    assert "| 65.5 | +0.0 ± 0.0 |" in rows["| BADGE"]
    assert "| easy | 90.5 |" in criteria.tasks(cells)
    assert "| hard | 40.5 |" in criteria.tasks(cells)


def test_features_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(12, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2)
    )
    loads: list[int] = []

    def load(data_dir: str | None) -> tuple[torch.nn.Module, Any]:
        loads.append(1)
        return net, None

    images = torch.randint(256, (20, 2, 2, 3), dtype=torch.uint8).numpy()
    labels = torch.arange(20) % 2
    found = Images(images, labels, images[:8], labels[:8], 2)
    monkeypatch.setattr(encoding, "stored", lambda task, data_dir: found)
    scaled = lambda x, network, prepared: torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255  # noqa: E731
    monkeypatch.setattr(encoding, "samples", scaled)
    given = Network("small", 2, load, ()), Task("toys", "toys"), 10, 8, tmp_path, None
    one, other = encoding.encoded(*given), encoding.encoded(*given)
    assert len(loads) == 1
    assert one["pool"].shape == (10, 5)
    assert one["pool"].dtype == torch.float64
    assert all(torch.equal(one[key], other[key]) for key in one)
    known = net[:3](scaled(images[:8], None, None)).double()
    rows = torch.cdist(known, one["test"]).min(1)
    assert float(rows.values.detach().max()) < 1e-6


def test_the_page_says_what_its_tables_say() -> None:
    """Every figure with an error in its text is of a table, or the difference of the two best criteria."""
    page = pages.RESULTS / "selection.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    numbers = re.compile(r"\d+\.\d ± \d+\.\d")
    known = {one for line in lines if line.startswith("|") for one in numbers.findall(line)}
    for part in ("development", "reported"):
        cells = pages.stored(f"selection/criteria-{part}.json")["cells"]
        one = criteria.ahead(cells, "predictive-information")
        for name in ("variance", "expected-error"):
            other = criteria.ahead(cells, name)
            mean, error = mean_and_error([a[2] - b[2] for a, b in zip(one, other, strict=True)])
            known.add(f"{abs(mean):.1f} ± {error:.1f}")
    said = {one for line in lines if not line.startswith("|") for one in numbers.findall(line)}
    assert len(said) > 5
    assert said <= known


def test_the_default_is_the_best_on_development_tasks() -> None:
    cells = pages.stored("selection/criteria-development.json")["cells"]
    area = {
        name: mean_and_error([one[2] for one in criteria.ahead(cells, name)])[0] for name in criteria.CRITERIA
    }
    default = inspect.signature(linnet.audit.select).parameters["criterion"].default
    assert default == max(area, key=area.__getitem__)
