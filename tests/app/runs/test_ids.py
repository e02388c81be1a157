"""Samples by their ids: what people may write, and that every command and file names them alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from linnet.app.runs.folder import load_run
from linnet.app.runs.samples import find_samples, lines_of, named
from linnet.errors import InputError
from tests.app.runs.small_tasks import linnet, pictures, result, write_folder

IDS = [f"train/{place}" for place in (7, 3, 12, 0)]


def find(*names: str, ids: list[str] | None = None) -> list[int]:
    """The positions of training samples."""
    return find_samples(names, IDS if ids is None else ids, "training samples")


def test_an_id_comes_first() -> None:
    assert find("train/12", "train/7") == [2, 0]
    assert find("14.png", ids=["14.png", "cat/14.png"]) == [0]


def test_the_end_of_one_id_alone() -> None:
    files = ["train/cat/003.png", "train/cat/004.png", "train/dog/004.png"]
    assert find("003.png", ids=files) == [0]
    assert find("dog/004.png", ids=files) == [2]
    with pytest.raises(InputError, match=r"could be train/cat/004\.png, train/dog/004\.png"):
        find("004.png", ids=files)
    with pytest.raises(InputError, match=r"d/1\.png, \.\.\."):
        find("1.png", ids=[f"{folder}/1.png" for folder in "abcdef"])
    assert find("12") == [2]
    assert find("line 3", "line 2", ids=["line 2", "line 3"]) == [1, 0]


@pytest.mark.parametrize("word", ["99", "-1", "train/99", "trian/12", "", "²", "9" * 5000])
def test_what_names_nothing(word: str) -> None:
    with pytest.raises(InputError, match="none of the 4 training samples") as caught:
        find(word)
    assert ("train/12" in str(caught.value.remedy)) == (word == "trian/12")


def test_samples_of_the_other_part_are_known() -> None:
    with pytest.raises(
        InputError, match=r"line 4, which is one of the training samples, and none of the 1"
    ) as caught:
        find_samples(["line 4"], ["line 48"], "test samples", lambda: {"training samples": ("line 4",)})
    known = {"training samples": ("a/river-03.jpg",)}
    with pytest.raises(InputError, match="copy one from the report"):  # nothing was misspelled
        find_samples(["a/river-03.jpg"], ["b/river-04.jpg", "a/rover-03.jpg"], "test samples", lambda: known)
    assert caught.value.remedy == "copy one from the report"  # 48 is no misspelling of 4


def test_a_bare_number_is_no_line_of_a_table() -> None:
    with pytest.raises(InputError, match="5 could be line 5") as caught:  # or the id 5 of a column
        find_samples(["5"], ["line 5", "line 48"], "training samples")
    assert caught.value.remedy == "write the whole id"


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
    label = load_run(run).samples.labels[place]
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
        out = tmp_path / f"run{folder}"
        linnet("update", "--run", run, "--data", tmp_path / folder / "new.npz", "--out", out)
        run = out
    ids = load_run(run).samples.ids
    assert ids[-4:] == ("new.npz/x/0", "new.npz/x/1", "new.npz-2/x/0", "new.npz-2/x/1")
    assert len(set(ids)) == len(ids)
