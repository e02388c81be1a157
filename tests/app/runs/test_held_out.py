"""What `linnet update` and `forget` do with samples that are held out, known, or forgotten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from linnet.app.runs.folder import load_run
from tests.app.runs.small_tasks import linnet, result, write_folder, write_table

NAMES = ["across", "along", "slanted"]


def update(run: Path, data: Path, out: Path, *words: object, code: int = 0) -> dict[str, object]:
    linnet("update", "--run", run, "--data", data, "--out", out, *words, code=code)
    return result(out) if not code else {}


def test_of_a_folder_what_is_to_be_trained_on_is_taken(workshop: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "new" / "train", [0, 1, 2, 0], NAMES, seed=31)
    write_folder(tmp_path / "new" / "test", [0, 1], NAMES, seed=32)
    found = update(workshop / "pictures", tmp_path / "new", tmp_path / "run")
    assert [one["id"] for one in found["added"]] == [  # type: ignore[attr-defined]
        f"new/train/{name}" for name in sorted(p.relative_to(tmp_path / "new" / "train").as_posix()
        for p in (tmp_path / "new" / "train").rglob("*.png"))
    ]  # fmt: skip
    assert any("images of train are taken, those of test left out" in one for one in found["findings"])  # type: ignore[attr-defined]


def split_table(path: Path, marks: str, seed: int) -> Path:
    lines = write_table(path, lines=len(marks), seed=seed).read_text().splitlines()
    kinds = {"r": "train", "e": "test"}
    body = [f"{kinds[mark]},{line}" for mark, line in zip(marks, lines[1:], strict=True)]
    path.write_text("\n".join([f"split,{lines[0]}", *body]) + "\n")
    return path


def test_of_a_table_what_is_to_be_trained_on_is_taken(tmp_path: Path) -> None:
    data = split_table(tmp_path / "a.csv", "r" * 30 + "e" * 10, 0)
    linnet("adapt", "--data", data, "--target", "price", "--out", tmp_path / "run")
    found = update(tmp_path / "run", split_table(tmp_path / "b.csv", "rrree", 1), tmp_path / "more")
    assert found["train"] == 33
    grown = tmp_path / "grown.csv"
    grown.write_text(data.read_text() + "train,0,0,0,100\n")
    assert update(tmp_path / "run", grown, tmp_path / "one more")["train"] == 31


def test_a_growing_table_without_a_split_keeps_what_is_held_out(tmp_path: Path) -> None:
    data = write_table(tmp_path / "a.csv", lines=40)
    linnet("adapt", "--data", data, "--out", tmp_path / "run")
    before = result(tmp_path / "run")["train"]
    data.write_text(data.read_text() + "0.5,0.5,0.5,100\n0.5,0.5,-0.5,900000\n")
    found = update(tmp_path / "run", data, tmp_path / "more")
    assert found["train"] == before + 2
    told = " ".join(found["findings"])  # type: ignore[call-overload]
    assert f"{40 - before} of 42 samples are test samples of the run" in told
    assert "price: 1 of 42 values lie far outside" in told
    update(tmp_path / "more", write_table(tmp_path / "b.csv", lines=5, seed=9), tmp_path / "third")


def test_a_unit_that_is_another_is_said(tmp_path: Path) -> None:
    data = write_table(tmp_path / "a.csv", lines=40)
    linnet("adapt", "--data", data, "--out", tmp_path / "run")
    (tmp_path / "new.csv").write_text("a,b,c\n0,0,0\n0,700,0\n")
    linnet("predict", "--run", tmp_path / "run", "--data", tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    told = result(tmp_path / "run" / "predict")["findings"]
    assert [one.partition(":")[0] for one in told] == ["b"]
    assert "1 of 2 values lie far outside" in told[0]
    assert "first 700 in line 3" in told[0]


def test_numbered_classes_and_runs_before_and_after_new_ones(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, labels = np.random.default_rng(0), np.arange(24) % 2
    x = rng.normal(size=(32, 3)) + np.r_[labels, np.full(4, 2), np.full(4, 3)][:, None]
    np.savez(tmp_path / "two.npz", x_train=x[:24], y_train=labels, x_test=x[:24] + 0.1, y_test=labels)
    model = ["--model", f"{workshop / 'nets.py'}:mlp"]
    linnet("adapt", "--data", tmp_path / "two.npz", *model, "--out", tmp_path / "run")
    new = tmp_path / "new.npz"
    np.savez(new, x=x[24:], y=np.repeat([2, 3], 4))
    update(tmp_path / "run", new, tmp_path / "no", code=2)
    assert "has the labels 2, 3" in (told := capsys.readouterr().err)
    assert "--new-class" in told
    update(tmp_path / "run", new, tmp_path / "no", "--new-class", "3", "--new-class", "2", code=2)
    assert "the next numbers, 2, 3" in capsys.readouterr().err
    update(tmp_path / "run", new, tmp_path / "four", "--new-class", "2", "--new-class", "3")
    linnet("compare", tmp_path / "run", tmp_path / "four")
    assert "24 test samples" in capsys.readouterr().out


def test_forgetting_names_what_stays_and_what_is_meant(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workshop / "pictures"
    known = load_run(run).samples
    assert known.images is not None
    assert known.labels is not None
    np.savez(tmp_path / "new.npz", x_test=255 - known.images[:2], y_test=known.labels[:2])
    update(run, tmp_path / "new.npz", tmp_path / "more")
    linnet("forget", "--run", tmp_path / "more", "--ids", "test/0", "--out", tmp_path / "less", code=2)
    assert "one of the test samples of the run" in capsys.readouterr().err
    linnet("forget", "--run", tmp_path / "more", "--ids", "new.npz/test/0", "--out", tmp_path / "less")
    assert result(tmp_path / "less")["findings"] == []


def test_copies_of_what_was_forgotten_are_named(tmp_path: Path) -> None:
    lines = write_table(tmp_path / "a.csv", lines=30).read_text().splitlines()
    (tmp_path / "a.csv").write_text("\n".join([*lines, lines[1], lines[1]]) + "\n")
    linnet("adapt", "--data", tmp_path / "a.csv", "--out", tmp_path / "run")
    known = load_run(tmp_path / "run").samples.ids
    first = next(name for name in ("line 2", "line 32", "line 33") if name in known)
    linnet("forget", "--run", tmp_path / "run", "--ids", first, "--out", tmp_path / "less")
    assert any("have the inputs of forgotten ones" in one for one in result(tmp_path / "less")["findings"])
