"""The commands that a page and its result file propose run as they are copied."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from linnet.app import cli
from tests.app.runs.small_tasks import pictures, write_nets


def steps(folder: Path) -> dict[str, dict[str, list[str] | str]]:
    """What a result says to do next, by the command's name."""
    every = json.loads((folder / "result.json").read_text())["next"]
    return {shlex.split(step["command"])[1]: step for step in every if step["command"]}


def run(step: dict[str, list[str] | str], **places: str) -> list[str]:
    """Run a step's command, with a place for its words in capitals."""
    words = [places.get(word, word) for word in shlex.split(str(step["command"]))]
    assert words[0] == "linnet"
    assert cli.main(words[1:]) == 0
    return words


@pytest.mark.long
def test_proposed_commands_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nets = write_nets(tmp_path)
    y_train, y_test = np.repeat(np.arange(3), 20), np.repeat(np.arange(3), 20)
    given = y_train.copy()
    flipped = [2, 9, 27, 33, 50]
    given[flipped] = (given[flipped] + 1) % 3
    x_test = pictures(y_test, 1)
    np.savez("pictures.npz", x_train=pictures(y_train, 0), y_train=given, x_test=x_test, y_test=y_test)
    np.savez("new.npz", x=pictures(y_test, 2))
    np.savez("labeled.npz", x=pictures(y_test, 2)[:5], y=y_test[:5])
    words = ["adapt", "--model", f"{nets}:conv", "--data", "pictures.npz", "--out", "my runs"]
    assert cli.main(words) == 0

    found = steps(Path("my runs"))
    assert set(found["forget"]["training"]) <= {f"train/{i}" for i in flipped}
    cleaned = run(found["forget"])[-1]
    assert cleaned == "my runs-cleaned"
    left = json.loads((Path(cleaned) / "result.json").read_text())
    assert left["train"] == 60 - len(found["forget"]["training"])

    run(found["predict"], FOLDER="new.npz")
    told = steps(Path("my runs/predict"))["update"]
    assert len(told["test"]) == 10
    assert run(told, FOLDER="labeled.npz")[-1] == "my runs-more"
    assert "adapt" in found  # with --tune, which trains: test_adapt.py
    assert shlex.split(str(found["adapt"]["command"]))[2:4] == ["--config", "my runs/run.yaml"]

    monkeypatch.chdir("my runs")
    assert cli.main(["predict", "--run", ".", "--data", "../new.npz"]) == 0
    assert shlex.split(str(steps(Path("predict"))["update"]["command"]))[3] == str(tmp_path / "my runs")
