"""`linnet compare`: two runs on the same test samples."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from linnet.app import cli
from linnet.app.runs.comparing import Finished, compare_runs, pairs
from linnet.errors import InputError


@pytest.fixture(scope="module")
def less(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of the workshop, each without some of its training samples."""
    folder = tmp_path_factory.mktemp("less")
    for name, ids in (
        ("pictures", "train/0,train/1,train/2"),
        ("prices", "line 2,line 3"),
    ):
        words = ["forget", "--run", str(workshop / name), "--ids", ids, "--out", str(folder / name)]
        assert cli.main(words) == 0
    return folder


def altered(run: Path, folder: Path, change: object) -> Path:
    """A copy of a run whose result was changed."""
    shutil.copytree(run, folder)
    path = folder / "result.json"
    value = json.loads(path.read_text())
    change(value)  # type: ignore[operator]
    path.write_text(json.dumps(value))
    return folder


def flipped(value: dict) -> None:  # type: ignore[type-arg]
    """Predictions of which the first two are wrong."""
    test = value["report"]["test"]
    test["predicted"] = [(label + (i < 2)) % 3 for i, label in enumerate(test["labels"])]


def test_flips_are_named_and_the_error_is_of_paired_differences(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def right(value: dict) -> None:  # type: ignore[type-arg]
        value["report"]["test"]["predicted"] = value["report"]["test"]["labels"]

    old = altered(workshop / "pictures", tmp_path / "old, the first", right)
    new = altered(workshop / "pictures", tmp_path / "new", flipped)
    capsys.readouterr()
    out = tmp_path / "flips.csv"
    assert cli.main(["compare", str(old), str(new), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    found = compare_runs(old, new)
    n = found["test"]
    change = np.array([-1.0, -1.0] + [0.0] * (n - 2))
    assert found["difference"]["value"] == pytest.approx(change.mean())
    assert found["difference"]["error"] == pytest.approx(change.std(ddof=1) / n**0.5)
    assert [row["id"] for row in found["worse"]] == ["test/0", "test/1"]
    assert found["better"] == []
    assert f"right in {old}, wrong in {new}: 2" in said
    with out.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["id"] for row in table] == ["test/0", "test/1"]
    assert {row["better"] for row in table} == {str(old)}
    back = compare_runs(new, old)
    assert back["difference"]["value"] == -found["difference"]["value"]
    assert back["better"] == [
        {**row, "first": row["second"], "second": row["first"]} for row in found["worse"]
    ]


def test_runs_with_and_without_samples(workshop: Path, less: Path) -> None:
    for name in ("pictures", "prices"):
        found = compare_runs(workshop / name, less / name)
        first, second = (
            json.loads((folder / name / "result.json").read_text())["scores"][0]
            for folder in (workshop, less)
        )
        assert found["left_out"] == [0, 0]
        changed = {one["what"]: (one["first"], one["second"]) for one in found["settings"]}
        assert "training samples" in changed
        if name == "pictures":
            assert found["difference"]["value"] == pytest.approx(second["accuracy"] - first["accuracy"])
        else:
            gain = second["rmse"] ** 2 - first["rmse"] ** 2
            assert found["difference"]["value"] == pytest.approx(gain, rel=1e-6, abs=1e-12)
            assert len(found["better"]) + len(found["worse"]) == found["test"]


def test_the_same_run_twice_has_no_difference(workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(workshop / "prices")
    assert cli.main(["compare", "--runs", f"{run},{run}"]) == 0
    assert "no difference" in capsys.readouterr().out
    assert cli.main(["compare", run, run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"]["value"] == 0


def test_runs_that_cannot_be_compared(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = workshop / "pictures", workshop / "prices"

    def refused(*words: object) -> str:
        assert cli.main(["compare", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "1 run folder is given" in refused(run)
    assert "the same classes" in refused(run, other)
    assert "holds no finished run" in refused(run, tmp_path)
    assert "there is no run folder" in refused(run, tmp_path / "none")
    assert "ends in .csv or .json" in refused(run, run, "--out", tmp_path / "x.txt")
    for i, change in enumerate((
        lambda value: value.pop("report"),
        lambda value: value["report"]["test"].pop("ids"),
        lambda value: value["report"]["test"]["predicted"].append(0),
        lambda value: value["report"]["test"]["predicted"].__setitem__(0, 7),
        lambda value: value["report"]["test"]["labels"].__setitem__(0, "a"),
    )):  # fmt: skip
        broken = altered(run, tmp_path / f"broken{i}", change)
        assert "does not hold the result of a run" in refused(run, broken)
    bare = altered(run, tmp_path / "bare", lambda value: value["report"].__setitem__("test", None))
    assert "no test samples with answers" in refused(bare, run)


def test_runs_on_other_test_samples(workshop: Path, tmp_path: Path) -> None:
    """Those of one file are matched by their ids; those of another file are refused."""
    run = Finished.read(workshop / "pictures")
    part = replace(
        run, ids=run.ids[1:], answers=run.answers[1:], predicted=run.predicted[1:],
        source=replace(run.source, digest="0" * 64),
    )  # fmt: skip
    assert pairs(run, part) == [(i, i - 1) for i in range(1, len(run.ids))]
    moved = replace(part, source=replace(part.source, path="elsewhere"))
    with pytest.raises(InputError, match=r"from two files, .* and elsewhere"):
        pairs(run, moved)
    with pytest.raises(InputError, match="no test sample in common"):
        pairs(run, replace(part, ids=tuple(f"other {name}" for name in part.ids)))
    shifted = replace(part, answers=(part.answers + 1) % 3)
    with pytest.raises(InputError, match=r"different test samples: .* has another answer in each"):
        pairs(run, shifted)
