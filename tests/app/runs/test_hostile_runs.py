"""Records of runs that lie, and tables of predictions that a spreadsheet would calculate with."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linnet import files
from linnet.app import cli
from linnet.app.runs.folder import load_run, save_run
from linnet.app.runs.queries import write_rows
from linnet.errors import DiskSpaceError, FileFormatError
from linnet.files import read_json, write_json
from tests.refusals import refused


@pytest.fixture
def run(workshop: Path, tmp_path: Path) -> Path:
    shutil.copytree(workshop / "pictures", tmp_path / "run")
    return tmp_path / "run"


def put(*keys: Any) -> Callable[[dict[str, Any]], None]:
    """A change of a record: the last of the keys is the new value."""

    def change(record: dict[str, Any]) -> None:
        *path, last, value = keys
        for key in path:
            record = record[key]
        record[last] = value

    return change


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "10^400 heads": put("origin", "heads", [10**400, 0]),
    "heads that are text": put("origin", "heads", "3"),
    "no heads": put("origin", "heads", None),
    "an unknown origin": put("origin", "extra", 1),
    "no origin": lambda record: record.pop("origin"),
    "arguments that are a list": put("origin", "arguments", [1]),
    "a mean of 10^400": put("transform", "mean", [10**400]),
    "a transform without a kind": put("transform", {"mean": [0.0]}),
    "a huge position": put("test", "positions", [10**30]),
    "a path that is a number": put("test", "path", 3),
    "a temperature of 10^400": put("temperatures", [10**400, 1.0, 1.0]),
    "a temperature that is a list": put("temperatures", [[1.0], 1.0, 1.0]),
    "classes that are numbers": put("classes", [1, 2, 3]),
    "a file elsewhere": put("files", "../model", "0" * 64),
    "files that are a list": put("files", ["model"]),
}


@pytest.mark.parametrize("lie", LIES)
def test_records_that_lie(lie: str, run: Path) -> None:
    record = read_json(run / "run.json", "run")
    LIES[lie](record)
    write_json(run / "run.json", record, "run")
    refused(FileFormatError, lambda: load_run(run), f"{run / 'run.json'} does not describe a run")


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("lie", [
    put("origin", "heads", [10**9, 0]), put("origin", "appended", 10**9),
    put("transform", "size", 10**9), put("transform", "channels", 3), put("classes", ["a", "b"]),
])  # fmt: skip
def test_records_that_do_not_fit_their_files(
    lie: Callable[[dict[str, Any]], None], trust: bool, run: Path
) -> None:
    record = read_json(run / "run.json", "run")
    lie(record)
    write_json(run / "run.json", record, "run")
    named = None if trust else record["origin"]["spec"]
    refused(FileFormatError, lambda: load_run(run, model=named, trust=trust), f"{run / 'run.json'} describes")


def test_a_record_that_is_none(run: Path) -> None:
    write_json(run / "run.json", [1], "run")
    refused(FileFormatError, lambda: load_run(run), "does not describe a run")


DEEP = "[" * 100_000
LABEL = '{"format": "linnet", "kind": "run", "version": 1, "sha256": "0", "content": '


@pytest.mark.parametrize(
    "text", [DEEP, "9" * 5000, f"{LABEL}{'9' * 5000}}}", f"{LABEL}{'[' * 900}{']' * 900}}}", "\0", ""]
)
def test_records_that_no_reader_can_take(text: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "run.json").write_text(text)
    refused(FileFormatError, lambda: load_run(run), str(run / "run.json"))
    monkeypatch.setattr(files, "_LARGEST_JSON", len(text) - 1)
    if text:
        refused(FileFormatError, lambda: load_run(run), str(run / "run.json"), "JSON file of at most")


def test_a_run_that_cannot_be_written_whole_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = load_run(run)

    def full(*arguments: object, **options: object) -> None:
        raise DiskSpaceError("no room", "room", "make some")

    monkeypatch.setattr("linnet.app.runs.folder.write_json", full)
    with pytest.raises(DiskSpaceError):
        save_run(tmp_path / "new", known)
    assert list((tmp_path / "new").iterdir()) == []


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "-x"]
INSIDE = "a\r=1\r\n=2\n=3"  # begins no cell as long as it is quoted


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_begins_a_formula(text: str, tmp_path: Path) -> None:
    rows = [
        {"id": text, text: -1.5, "predicted": "-1", "std": None},
        {"id": INSIDE, text: 2, "predicted": "+3", "std": 0},
    ]
    write_rows(tmp_path / "rows.csv", rows)
    with (tmp_path / "rows.csv").open(newline="") as file:
        found = list(csv.reader(file))
    assert found == [
        [f"'{text}" if name == text else name for name in rows[0]],
        [f"'{text}", "-1.5", "-1", ""],
        [INSIDE, "2", "+3", "0"],
    ]
    write_rows(tmp_path / "rows.json", rows)
    assert json.loads((tmp_path / "rows.json").read_text()) == rows


def test_a_run_killed_before_its_settings_were_written_goes_on(workshop: Path, tmp_path: Path) -> None:
    words = ["adapt", "--data", str(workshop / "prices.csv"), "--model", f"{workshop / 'nets.py'}:mlp"]
    words += ["--out", str(tmp_path / "run")]
    assert cli.main(words) == 0
    (tmp_path / "run" / "run.yaml").unlink()
    assert cli.main(words) == 0
    assert (tmp_path / "run" / "run.yaml").exists()
    assert cli.main([*words, "--seed", "1"]) == 2
