"""Tables as people have them, on the command line: texts, yes and no, empty cells, classes by name."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from linnet.app import cli
from linnet.app.runs.folder import load_run
from tests.app.runs.small_tasks import write_nets

FEATURES = 8  # four for the city, one for the member, two for the age, one for the visits


def people(count: int = 80, seed: int = 0) -> list[dict[str, str]]:
    """Lines whose answer depends on a text, on yes or no, and on a number that is missing at times."""
    rng = np.random.default_rng(seed)
    lines = []
    for n in range(count):
        city, member = rng.choice(["Rome", "Oslo", "Lima", ""]), rng.choice(["yes", "no"])
        visits = int(rng.integers(10))
        stays = (member == "yes") + (city == "Oslo") + visits / 10 > 1.2
        age = "" if rng.random() < 0.2 else str(rng.integers(20, 60))
        lines.append(
            {"name": f"p{seed}-{n}", "city": city, "member": member, "age": age, "visits": str(visits)}
            | {"outcome": "stays" if stays else "goes"}
        )
    return lines


def write(path: Path, lines: list[dict[str, str]], *without: str) -> Path:
    with path.open("w", newline="") as file:
        names = [name for name in lines[0] if name not in without]
        table = csv.DictWriter(file, names, extrasaction="ignore")
        table.writeheader()
        table.writerows(lines)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on such a table."""
    folder = tmp_path_factory.mktemp("tables")
    data = write(folder / "people.csv", people())
    words = ["adapt", "--data", str(data), "--model", f"{write_nets(folder)}:mlp"]
    words += ["--out", str(folder / "run")]
    words += ["--model-args", f'{{"in_features": {FEATURES}, "outputs": 2}}']
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert cli.main(words) == 0
    assert "texts as categories, a number of zero or one each: city (4), member (2)" in told.getvalue()
    assert "columns left out: name (64 different texts)" in told.getvalue()
    return folder / "run"


def test_the_page_and_the_result_name_what_was_encoded(run: Path) -> None:
    found = json.loads((run / "result.json").read_text())
    told = " ".join(found["data"]["findings"])
    page = (run / "report.html").read_text()
    for words in ("city (4), member (2)", "columns left out: name", "filled with the median"):
        assert words in told
        assert words in page
    assert found["data"]["classes"] == ["goes", "stays"]
    assert found["scores"][0]["accuracy"] >= 0.8


def test_new_lines_are_encoded_alike(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = people(20, seed=1)
    known = write(tmp_path / "known.csv", lines)
    for out, data in (("a", known), ("b", write(tmp_path / "new.csv", lines[::-1], "outcome", "name"))):
        words = ["--run", str(run), "--data", str(data), "--out", str(tmp_path / f"{out}.csv")]
        assert cli.main(["predict", *words]) == 0
    with (tmp_path / "a.csv").open() as first, (tmp_path / "b.csv").open() as second:
        one, two = list(csv.DictReader(first)), list(csv.DictReader(second))[::-1]
    assert [row["predicted"] for row in one] == [row["predicted"] for row in two]
    assert np.allclose([float(r["p(stays)"]) for r in one], [float(r["p(stays)"]) for r in two], atol=1e-5)
    right = [row["predicted"] == line["outcome"] for row, line in zip(one, lines, strict=True)]
    assert np.mean(right) >= 0.7
    lines[0]["city"] = "Quito"
    capsys.readouterr()
    words = ["--data", str(write(tmp_path / "other.csv", lines)), "--out", str(tmp_path / "c.csv")]
    assert cli.main(["predict", "--run", str(run), *words]) == 0
    assert "city has texts that the run has not seen: Quito" in capsys.readouterr().out


def test_an_empty_cell_that_no_training_line_had_is_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{**line, "visits": "", "age": ""} if n < 3 else line for n, line in enumerate(people(9, 3))]
    words = ["--run", str(run), "--data", str(write(tmp_path / "new.csv", lines, "outcome")), "--json"]
    assert cli.main(["predict", *words]) == 0
    (found,) = json.loads(capsys.readouterr().out)["findings"]  # of the age a number says that it is empty
    assert "visits is empty in 3 of 9 lines and in no training line: taken as" in found
    assert found in (run / "predict" / "report.html").read_text()


def test_new_lines_are_learned(run: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "more.csv", people(10, seed=2))
    words = ["--run", str(run), "--data", str(data), "--out", str(tmp_path / "more"), "--verify"]
    assert cli.main(["update", *words]) == 0
    fit = load_run(tmp_path / "more").fit
    assert fit.n == 74
    words = ["--ids", load_run(run).samples.ids[0], "--out", str(tmp_path / "less")]
    assert cli.main(["forget", "--run", str(run), *words]) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"outcome": "moves"}, "names classes that the run has not: line 2: moves"),
        ({"age": "old"}, "line 2: age is 'old'"),
        ({"outcome": ""}, "outcome is empty in 1 of 20 lines"),
    ],
)
def test_lines_that_do_not_fit_are_named(
    run: Path, tmp_path: Path, change: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = people(20, seed=1)
    lines[0] |= change
    words = ["--data", str(write(tmp_path / "bad.csv", lines)), "--out", str(tmp_path / "p.csv")]
    assert cli.main(["predict", "--run", str(run), *words]) == 2
    assert said in capsys.readouterr().err
