"""Runs that several tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from linnet.report import figures
from tests.app.runs.small_tasks import linnet, write_nets, write_pictures, write_table


def no_drawing(name: str, alt: str, size: tuple[float, float], paint: object) -> str:
    """An empty figure: most of the time of a small run is that of its drawings."""
    return f'<svg class="figure" role="img" id="{name}"><title>{alt}</title></svg>'


@pytest.fixture(autouse=True)
def pages_without_drawings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are written without their drawings, but for tests that are marked with ``drawings``."""
    if request.node.get_closest_marker("drawings") is None:
        monkeypatch.setattr(figures, "draw", no_drawing)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are not folded, whatever is in them; how they are is a matter of tests/app/test_terminal.py."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Factories and data."""
    write_nets(tmp_path)
    write_pictures(tmp_path / "pictures.npz")
    write_table(tmp_path / "prices.csv")
    return tmp_path


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with factories, pictures, a table, and a run on each of the two data sets."""
    folder = tmp_path_factory.mktemp("workshop")
    nets = write_nets(folder)
    pictures = write_pictures(folder / "pictures.npz")
    table = write_table(folder / "prices.csv")
    finetune = ["--compare", "finetune", "--finetune-steps", 4]
    linnet("adapt", "--data", pictures, "--model", f"{nets}:conv", *finetune, "--out", folder / "pictures")
    linnet("adapt", "--data", table, "--model", f"{nets}:mlp", "--out", folder / "prices")
    return folder
