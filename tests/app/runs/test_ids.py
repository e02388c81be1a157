"""Samples by their ids: what people may write, and that every command and file names them alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linnet.app import cli
from linnet.app.runs.folder import load_run
from linnet.app.runs.samples import find_samples, lines_of, named
from linnet.errors import InputError
from tests.app.runs.small_tasks import pictures, write_folder

IDS = [f"train/{place}" for place in (7, 3, 12, 0)]


def find(*names: str, ids: list[str] | None = None) -> list[int]:
    """The positions of training samples, whose labels alternate."""
    known = IDS if ids is None else ids
    return find_samples(names, known, np.arange(len(known)) % 2, ("cat", "dog"), "training samples")


def linnet(*words: object, code: int = 0) -> None:
    """Run a command in this process."""
    assert cli.main([str(word) for word in words]) == code


def result(folder: Path) -> dict[str, Any]:
    """What a command wrote."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_an_id_comes_first() -> None:
    assert find("train/12", "train/7") == [2, 0]
    assert find("14.png", ids=["14.png", "cat/14.png"]) == [0]


def test_the_end_of_one_id_alone() -> None:
    files = ["train/cat/003.png", "train/cat/004.png", "train/dog/004.png"]
    assert find("003.png", ids=files) == [0]
    assert find("dog/004.png", ids=files) == [2]
    with pytest.raises(InputError, match="could be train/cat/004") as caught:
        find("004.png", ids=files)
    assert caught.value.remedy == "write train/cat/004.png or train/dog/004.png"


def test_a_bare_number_with_two_readings_is_refused_with_both() -> None:
    with pytest.raises(InputError) as caught:
        find("3")
    assert (
        caught.value.what == "3 could be train/3 (position 1, label dog) or position 3 (train/0, label dog)"
    )
    assert caught.value.remedy == "write train/3 or train/0"
    files = [f"cat/{place:03}.png" for place in range(9, -1, -1)]
    with pytest.raises(InputError, match=r"cat/002\.png \(position 7, label dog\) or position 2 \(cat/007"):
        find("2", ids=files)
    many = [f"{folder}/1.png" for folder in "abcdef"]
    with pytest.raises(InputError, match=r"a/1\.png .*, b/1\.png .*, c/1\.png .* or f/1\.png"):
        find("1.png", ids=many)
    with pytest.raises(InputError, match=r"1 could be a/1\.png .* or f/1\.png"):
        find("1", ids=many)


def test_a_bare_number_with_one_reading_is_taken() -> None:
    assert find("12") == [2]  # no position 12
    assert find("1", ids=["cat/ann.png", "dog/bob.png"]) == [1]  # ids without numbers
    assert find("2", ids=["train/0", "train/1", "train/2"]) == [2]  # both are the same
    assert find("3", "line 2", ids=["line 2", "line 3"]) == [1, 0]


@pytest.mark.parametrize("word", ["99", "-1", "train/99", "trian/12", "", "²", "9" * 5000])
def test_what_names_nothing(word: str) -> None:
    with pytest.raises(InputError, match="none of the 4 training samples") as caught:
        find(word)
    assert ("train/12" in str(caught.value.remedy)) == (word == "trian/12")


def test_samples_of_the_other_part_are_known() -> None:
    with pytest.raises(
        InputError, match=r"line 4, which is one of the training samples, and none of the 1"
    ) as caught:
        find_samples(["line 4"], ["line 48"], None, None, "test samples", {"training samples": ("line 4",)})
    assert caught.value.remedy == "copy one from the report"  # 48 is no misspelling of 4


def test_a_number_of_no_id_is_no_position_where_ids_are_numbered() -> None:
    with pytest.raises(InputError, match=r"1 is in no id here; position 1 is train/3, label dog") as caught:
        find("1")
    assert caught.value.remedy == "write train/3 if that is meant"


def test_each_sample_once() -> None:
    with pytest.raises(InputError, match="ids holds train/12 twice"):
        find("train/12", "12")
    with pytest.raises(InputError, match="ids is empty"):
        find()


def test_lists_are_cut_and_say_so() -> None:
    ids = [f"cat/{place}.png" for place in range(25)]
    lines = lines_of(named(ids, np.zeros(25, int), ("cat",), range(25)))
    assert lines[0] == "  cat/0.png   label cat"
    assert len(lines) == 21
    assert lines[-1] == "  and 5 more, named in result.json"
    assert lines_of(named(ids, np.array([[0.25, 2.0]] * 25), None, [3])) == ["  cat/3.png  target 0.25, 2"]


def test_the_report_the_terminal_and_the_commands_name_the_same_sample(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few of the samples taken, the number in an id is not the position in the fit."""
    run = tmp_path / "few"
    words = ["--model", f"{workshop / 'nets.py'}:conv", "--data", workshop / "pictures.npz", "--out", run]
    linnet("adapt", *words, "--shots", 2, "--ridge", 1)
    ids = load_run(run).samples.ids
    place, name = next((i, name) for i, name in enumerate(ids) if name != f"train/{i}")
    assert f">{name}</span>" in (run / "report.html").read_text()
    linnet("forget", "--run", run, "--ids", name, "--out", tmp_path / "less")
    label = load_run(run).samples.answers[place]
    classes = ("across", "along", "slanted")
    assert result(tmp_path / "less")["removed"] == [{"id": name, "label": classes[label]}]
    assert result(tmp_path / "less")["report"]["train"]["forgetting"]["removed"] == [name]
    assert f"  {name}  label {classes[label]}" in capsys.readouterr().out
    assert load_run(tmp_path / "less").samples.ids == (*ids[:place], *ids[place + 1 :])
    linnet("explain", "--run", run, "--ids", "test/3", "--out", tmp_path / "why")
    told = capsys.readouterr().out
    for side in ("up", "down"):
        for one in result(tmp_path / "why")["explanations"][0][side]:
            assert ids[one["position"]] == one["id"]
            assert f"  {one['id']}  (" in told


def test_files_of_an_image_folder(workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["across", "along", "slanted"]
    new = write_folder(tmp_path / "new", [0, 1, 2], names)
    linnet("update", "--run", workshop / "pictures", "--data", new, "--out", tmp_path / "more")
    added = [{"id": f"new/{name}/{i:02}.png", "label": name} for i, name in enumerate(names)]
    assert result(tmp_path / "more")["added"] == added
    assert "  new/along/01.png    label along" in capsys.readouterr().out
    linnet("forget", "--run", tmp_path / "more", "--ids", "01.png", "--out", tmp_path / "less")
    assert result(tmp_path / "less")["removed"] == added[1:2]
    linnet("predict", "--run", tmp_path / "more", "--data", new, "--out", tmp_path / "p.csv")
    assert "  along/01.png    predicted along  label along" in capsys.readouterr().out


def test_ids_stay_unique(workshop: Path, tmp_path: Path) -> None:
    """Samples from two archives of one name have ids of their own."""
    for folder, seed in (("a", 21), ("b", 22)):
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "new.npz", x=pictures(np.array([0, 1]), seed), y=np.array([0, 1]))
    run = workshop / "pictures"
    for folder in ("a", "b"):
        linnet(
            "update",
            "--run",
            run,
            "--data",
            tmp_path / folder / "new.npz",
            "--out",
            tmp_path / f"run{folder}",
        )
        run = tmp_path / f"run{folder}"
    ids = load_run(run).samples.ids
    assert ids[-4:] == ("new.npz/x/0", "new.npz/x/1", "new.npz-2/x/0", "new.npz-2/x/1")
    assert len(set(ids)) == len(ids)
