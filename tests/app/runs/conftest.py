"""Runs that several tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from linnet.app import cli
from tests.app.runs.small_tasks import write_nets, write_pictures, write_table


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with factories, pictures, a table, and a run on each of the two data sets."""
    folder = tmp_path_factory.mktemp("workshop")
    nets = write_nets(folder)
    pictures = write_pictures(folder / "pictures.npz")
    table = write_table(folder / "prices.csv")
    words = [
        "adapt",
        "--data",
        str(pictures),
        "--model",
        f"{nets}:conv",
        "--compare",
        "finetune",
        "--finetune-steps",
        "4",
    ]
    assert cli.main([*words, "--out", str(folder / "pictures")]) == 0
    words = ["adapt", "--data", str(table), "--model", f"{nets}:mlp"]
    assert cli.main([*words, "--out", str(folder / "prices")]) == 0
    return folder
