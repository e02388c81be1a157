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
    assert found["test"] == 40 - before
    linnet("compare", tmp_path / "run", tmp_path / "more")
    assert "price: 1 of 42 values lie far outside" in told
    update(tmp_path / "more", write_table(tmp_path / "b.csv", lines=5, seed=9), tmp_path / "third")


def repeated(path: Path, lines: list[str]) -> Path:
    path.write_text("a,b,c,t\n" + "".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def of_few_kinds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[int], list[int]]:
    """A run on a table some of whose lines are alike; the lines, and which were trained on and held out."""
    folder, rng = tmp_path_factory.mktemp("kinds"), np.random.default_rng(0)
    values = rng.integers(4, size=(80, 3))
    lines = [f"{a},{b},{c},{'yes' if a + b > c else 'no'}" for a, b, c in values.tolist()]
    data = repeated(folder / "kinds.csv", lines)
    linnet("adapt", "--data", data, "--out", folder / "run", "--tune", "false")
    trained = [int(name.removeprefix("line ")) - 2 for name in load_run(folder / "run").samples.ids]
    return folder / "run", lines, trained, sorted({*range(80)} - {*trained})


NEW_LINES = ["9,0,0,yes", "0,0,9,no", "9,9,9,yes"]


@pytest.mark.parametrize("change", ["deleted", "other values", "corrected", "corrected test line"])
def test_a_table_that_grows_is_known_though_a_line_of_it_has_changed(
    of_few_kinds: tuple[Path, list[str], list[int], list[int]], tmp_path: Path, change: str
) -> None:
    run, lines, trained, held = of_few_kinds
    grown, more, said = list(lines), 3, ""
    at = (held if "test" in change else trained)[5]
    if change == "deleted":
        del grown[at]
    elif change == "other values":
        grown[at], more = f"7{grown[at]}", 4
    else:
        line, _, answer = grown[at].rpartition(",")
        grown[at] = f"{line},{'no' if answer == 'yes' else 'yes'}"
        said = "1 of 83 samples have another answer in the run"
    found = update(run, repeated(tmp_path / "grown.csv", [*grown, *NEW_LINES]), tmp_path / "more")
    assert found["train"] == len(trained) + more
    told = " ".join(found["findings"])  # type: ignore[call-overload]
    assert said in told
    assert f"{len(held) - ('test' in change)} of {len(grown) + 3} samples are test samples of the run" in told


def test_lines_that_are_held_out_are_known_in_a_table_of_their_own(
    of_few_kinds: tuple[Path, list[str], list[int], list[int]], tmp_path: Path
) -> None:
    run, lines, trained, held = of_few_kinds
    tested = repeated(tmp_path / "tested.csv", [*(lines[at] for at in held), *NEW_LINES])
    found = update(run, tested, tmp_path / "more")
    assert found["train"] == len(trained) + 3
    assert any(f"{len(held)} of {len(held) + 3} samples are test samples" in one for one in found["findings"])  # type: ignore[attr-defined]


def test_lines_that_are_held_out_alike_by_chance_are_taken_and_told(
    of_few_kinds: tuple[Path, list[str], list[int], list[int]], tmp_path: Path
) -> None:
    run, lines, trained, held = of_few_kinds
    other = repeated(tmp_path / "other.csv", [lines[held[0]], *NEW_LINES])
    found = update(run, other, tmp_path / "more")
    assert found["train"] == len(trained) + 4
    assert any(
        "1 of 4 samples are like test samples of the run, by chance" in one for one in found["findings"]
    )  # type: ignore[attr-defined]


def test_a_run_says_what_of_its_test_samples_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_table(tmp_path / "a.csv", lines=40)
    linnet("adapt", "--data", data, "--out", tmp_path / "run", "--tune", "false")
    tested = result(tmp_path / "run")["report"]["test"]["ids"]
    lines = data.read_text().splitlines(keepends=True)
    del lines[int(tested[0].removeprefix("line ")) - 1]
    data.write_text("".join(lines) + "0.5,0.5,0.5,100\n")
    found = update(tmp_path / "run", data, tmp_path / "more")
    said = f"are not those of the run any more: 1 of {len(tested)} are gone"
    assert said in found["untested"]  # type: ignore[operator]
    capsys.readouterr()
    linnet("compare", tmp_path / "run", tmp_path / "more", code=2)
    assert said in (told := capsys.readouterr().err)
    assert "data that still hold its test samples" in told


def test_a_folder_that_grows_in_place_keeps_its_test_images(workshop: Path, tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data", [0, 1, 2] * 5, NAMES)
    model = ["--model", f"{workshop / 'nets.py'}:conv", "--channels", 1]
    linnet("adapt", "--data", data, *model, "--out", tmp_path / "run", "--tune", "false")
    write_folder(tmp_path / "new", [0, 1, 2], NAMES, seed=32)
    for file in (tmp_path / "new").rglob("*.png"):
        file.rename(data / file.parent.name / f"new {file.name}")
    found = update(tmp_path / "run", data, tmp_path / "more")
    before = result(tmp_path / "run")
    assert (found["train"], found["test"]) == (before["train"] + 3, before["test"])
    told = result(tmp_path / "more")["report"]["test"]
    assert told["ids"] == before["report"]["test"]["ids"]
    assert told["labels"] == before["report"]["test"]["labels"]


def test_test_lines_that_are_trained_on_stay_out_when_the_table_grows_again(tmp_path: Path) -> None:
    data = write_table(tmp_path / "a.csv", lines=40)
    linnet("adapt", "--data", data, "--out", tmp_path / "run", "--tune", "false")
    tested = result(tmp_path / "run")["report"]["test"]["ids"]
    again = data.read_text().splitlines()[int(tested[0].removeprefix("line ")) - 1].rpartition(",")[0]
    for name, run, line in (("one", "run", f"{again},150"), ("two", "one", "0.5,0.5,0.5,100")):
        data.write_text(data.read_text() + f"{line}\n")
        found = update(tmp_path / run, data, tmp_path / name)
        assert found["test"] == len(tested) - 1
        assert result(tmp_path / name)["report"]["test"]["ids"] == tested[1:]


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
