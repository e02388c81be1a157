"""`linnet predict`, `explain`, `forget` and `update` on run folders, and folders that are damaged."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from linnet.app import cli
from linnet.app.runs.folder import load_run, load_test
from tests.app.runs.small_tasks import pictures, write_folder, write_table

NAMES = ["across", "along", "slanted"]


def linnet(*words: object, code: int = 0) -> None:
    """Run a command in this process."""
    assert cli.main([str(word) for word in words]) == code


def result(folder: Path) -> dict[str, Any]:
    """What a command wrote."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_loads_as_it_was(workshop: Path) -> None:
    run = load_run(workshop / "pictures")
    task, why = load_test(run)
    assert task is not None, why
    x, y = task.tensors("test")
    accuracy = float((run.fit.predictive(x).probs.argmax(1) == y).double().mean())
    assert accuracy == result(workshop / "pictures")["scores"][0]["accuracy"]
    assert run.samples.images is not None
    assert run.samples.ids[0] == "train/0"
    fit = run.fit
    assert (fit.temperature, fit.point_temperature, fit.variance_scale) == run.temperatures


def test_predict_new_pictures(workshop: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x=pictures(np.array([0, 1, 2, 0]), seed=7))
    linnet(
        "predict", "--run", workshop / "pictures", "--data", tmp_path / "new.npz", "--out", tmp_path / "p.csv"
    )
    table = rows(tmp_path / "p.csv")
    assert [row["predicted"] for row in table] == ["across", "along", "slanted", "across"]
    for row in table:
        probs = [float(row[f"p({name})"]) for name in NAMES]
        assert sum(probs) == pytest.approx(1)
        assert float(row["probability"]) == max(probs)
        assert float(row["std"]) > 0
    words = ["predict", "--run", workshop / "pictures", "--data", tmp_path / "new.npz", "--no-std"]
    linnet(*words, "--out", tmp_path / "p.json")
    as_json = json.loads((tmp_path / "p.json").read_text())
    assert [row["predicted"] for row in as_json] == [row["predicted"] for row in table]
    assert as_json[0]["std"] is None
    assert "<html" in (workshop / "pictures" / "predict" / "report.html").read_text()


def test_predict_folders(workshop: Path, tmp_path: Path) -> None:
    labels = [0, 1, 2, 2]
    flat = write_folder(tmp_path / "flat", labels, [])
    sorted_by_class = write_folder(tmp_path / "classes", labels, NAMES)
    run = tmp_path / "run"
    shutil.copytree(workshop / "pictures", run)
    linnet("predict", "--run", run, "--data", flat)
    assert [row["predicted"] for row in rows(run / "predictions.csv")] == [NAMES[label] for label in labels]
    assert result(run / "predict")["scores"] == []
    linnet("predict", "--run", run, "--data", sorted_by_class)
    assert result(run / "predict")["scores"][0]["accuracy"] == 1.0


def test_predict_a_table(workshop: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "new.csv", lines=20, seed=3)
    linnet(
        "predict", "--run", workshop / "prices", "--data", tmp_path / "new.csv", "--out", tmp_path / "p.csv"
    )
    table = rows(tmp_path / "p.csv")
    truth = [float(row["price"]) for row in rows(tmp_path / "new.csv")]
    z = [(float(row["predicted"]) - y) / float(row["std"]) for row, y in zip(table, truth, strict=True)]
    assert np.mean(np.abs(z) < 3) > 0.8  # standard deviations in the table's own units
    without = [line.rsplit(",", 1)[0] for line in (tmp_path / "new.csv").read_text().splitlines()]
    (tmp_path / "x.csv").write_text("\n".join(without))
    linnet("predict", "--run", workshop / "prices", "--data", tmp_path / "x.csv", "--out", tmp_path / "q.csv")
    assert rows(tmp_path / "q.csv") == table
    (tmp_path / "one.csv").write_text("\n".join(without[:2]))
    linnet(
        "predict", "--run", workshop / "prices", "--data", tmp_path / "one.csv", "--out", tmp_path / "o.csv"
    )
    assert [row["id"] for row in rows(tmp_path / "o.csv")] == [table[0]["id"]]
    assert float(rows(tmp_path / "o.csv")[0]["predicted"]) == pytest.approx(float(table[0]["predicted"]))


def test_explain(workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linnet("explain", "--run", workshop / "pictures", "--ids", "3,17", "--top", 2, "--out", tmp_path / "why")
    text = capsys.readouterr().out
    told = result(tmp_path / "why")["explanations"]
    assert [item["id"] for item in told] == ["test/3", "test/17"]
    assert text.count("  up ") == sum(len(item["up"]) for item in told) > 0
    assert "labeled across" in text
    assert (told[0]["label"], told[1]["label"]) == ("across", "along")
    for item in told:
        assert item["predicted"] == NAMES[item["class"]]
        assert f"predicted {item['predicted']} ({100 * item['probability']:.0f} %)" in text
        for one in (*item["up"], *item["down"]):
            assert one["label"] == NAMES[one["position"] // 8]
    run = load_run(workshop / "pictures")
    task, _ = load_test(run)
    assert task is not None
    x = task.tensors("test")[0][17:18]
    first = told[1]["up"][0]
    without = run.fit.forget([first["position"]])
    change = (run.fit.predict(x) - without.predict(x))[0, told[1]["class"]]
    assert float(change) == pytest.approx(first["influence"], rel=1e-3)


def test_explain_new_samples(workshop: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x=pictures(np.array([2, 0]), seed=9))
    words = [
        "explain",
        "--run",
        workshop / "pictures",
        "--data",
        tmp_path / "new.npz",
        "--out",
        tmp_path / "why",
    ]
    linnet(*words, "--ids", "x/1")
    assert result(tmp_path / "why")["report"]["test"]["labels"] is None
    assert "label" not in result(tmp_path / "why")["explanations"][0]
    linnet(*words, "--ids", "x/2", code=2)
    words = ["explain", "--run", workshop / "prices", "--ids", "line 4", "--out", tmp_path / "price"]
    linnet(*words)
    told = result(tmp_path / "price")["explanations"][0]
    assert told["up"][0]["influence"] > 0
    assert {type(told[key]) for key in ("predicted", "target")} == {float}
    answers = load_run(workshop / "prices").samples.answers
    assert all(one["target"] == answers[one["position"]] for one in told["up"])


def test_forget(workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_run(workshop / "pictures")
    linnet("forget", "--run", workshop / "pictures", "--ids", "0,5,9", "--out", tmp_path / "less", "--verify")
    assert "21 now" in capsys.readouterr().out
    found = result(tmp_path / "less")
    assert (found["train_before"], found["train"], found["removed"]) == (
        24,
        21,
        [{"id": f"train/{i}", "label": "across" if i < 8 else "along"} for i in (0, 5, 9)],
    )
    assert found["certificate"] < 1e-10
    assert found["difference"] < 1e-3
    assert found["verified"] is True
    assert [row["name"] for row in found["scores"]] == ["after", "before"]
    after = load_run(tmp_path / "less")
    assert after.samples.ids == tuple(name for i, name in enumerate(before.samples.ids) if i not in (0, 5, 9))
    assert torch.equal(after.fit.x, before.fit.x[[i for i in range(24) if i not in (0, 5, 9)]])
    assert not torch.equal(after.fit.predict(before.fit.x), before.fit.predict(before.fit.x))
    page = (tmp_path / "less" / "report.html").read_text()
    assert "from a fit that never saw them" in page
    ridge = next(c for c in found["report"]["choices"] if c["what"] == "ridge")
    assert ridge["why"].startswith("of the fit before: lowest squared error")
    linnet("explain", "--run", tmp_path / "less", "--ids", "test/0")
    linnet("forget", "--run", tmp_path / "less", "--ids", "train/20", "--out", tmp_path / "less2")
    assert result(tmp_path / "less2")["train"] == 20
    page = (tmp_path / "less2" / "report.html").read_text()
    assert "a solution of the remaining equations from scratch" in page
    assert "never saw" not in page
    assert "fitting anew" not in page


def test_update_undoes_forgetting(workshop: Path, tmp_path: Path) -> None:
    with np.load(workshop / "pictures.npz") as data:
        np.savez(tmp_path / "more.npz", x=data["x_train"][[22, 23]], y=data["y_train"][[22, 23]])
    linnet("forget", "--run", workshop / "pictures", "--ids", "22,23", "--out", tmp_path / "less")
    linnet(
        "update",
        "--run",
        tmp_path / "less",
        "--data",
        tmp_path / "more.npz",
        "--out",
        tmp_path / "again",
        "--verify",
    )
    first, again = load_run(workshop / "pictures"), load_run(tmp_path / "again")
    assert torch.allclose(again.fit.predict(first.fit.x), first.fit.predict(first.fit.x), atol=1e-3)
    assert again.samples.ids[-1] == "more.npz/x/1"
    assert result(tmp_path / "again")["train"] == 24


def test_update_a_regression(workshop: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "new.csv", lines=30, seed=8)
    run, out = workshop / "prices", tmp_path / "more"
    linnet("update", "--run", run, "--data", tmp_path / "new.csv", "--out", out, "--verify")
    found = result(out)
    assert (found["train_before"], found["train"]) == (48, 78)
    assert found["difference"] < 1e-3
    after, before = found["scores"]
    assert after["rmse"] != before["rmse"]


def refused(
    words: list[object], what: str, capsys: pytest.CaptureFixture[str], out: Path | None = None
) -> None:
    """Status 2, at most three lines, and nothing written."""
    capsys.readouterr()
    linnet(*words, code=2)
    lines = capsys.readouterr().err.splitlines()
    assert what in lines[0]
    assert 2 <= len(lines) <= 3
    assert out is None or not out.exists()


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        ("24", "ids holds 24"),
        ("train/24", "none of the 24 training samples"),
        ("test/3", "none of the 24 training samples"),
        ("-1", "-1"),
        ("2,train/2", "ids holds train/2 twice"),
        (",".join(map(str, range(24))), "all 24"),
        ("[]", "ids is empty"),
    ],
)
def test_bad_ids(
    workshop: Path, tmp_path: Path, ids: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "less"
    refused(["forget", "--run", workshop / "pictures", f"--ids={ids}", "--out", out], what, capsys, out)


def test_forget_wants_another_folder(workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = workshop / "pictures"
    refused(["forget", "--run", run, "--ids", "1", "--out", run], "the same folder", capsys)
    refused(["update", "--run", run, "--data", "x.npz", "--out", run], "the same folder", capsys)


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"x": np.zeros((0, 8, 8), np.uint8)}, "x is empty"),
        ({"x": np.zeros((2, 9, 9), np.uint8)}, "(1, 9, 9)"),
        ({"x": np.zeros((2, 8, 8, 4), np.uint8)}, "(2, 8, 8, 4) and type uint8"),
        ({"x": np.zeros((2, 8, 8))}, "float64"),
        ({"z": np.zeros(2)}, "has no samples"),
        ({"x": np.zeros((2, 8, 8), np.uint8), "y": np.array([0, 3])}, "y holds 3"),
        ({"x": np.zeros((2, 8, 8), np.uint8), "y": np.array([0])}, "x has 2 samples but y has 1"),
    ],
)
def test_bad_new_samples(
    workshop: Path, tmp_path: Path, arrays: dict[str, Any], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "new.npz", **arrays)
    out = tmp_path / "p.csv"
    words: list[object] = [
        "predict",
        "--run",
        workshop / "pictures",
        "--data",
        tmp_path / "new.npz",
        "--out",
        out,
    ]
    refused(words, what, capsys, out)


def test_bad_questions(workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, new = workshop / "pictures", tmp_path / "new.npz"
    np.savez(new, x=np.zeros((2, 8, 8), np.uint8))
    refused(
        ["update", "--run", run, "--data", new, "--out", tmp_path / "u"],
        "has no answers",
        capsys,
        tmp_path / "u",
    )
    refused(["predict", "--run", run, "--data", new, "--out", tmp_path / "p.xlsx"], "p.xlsx", capsys)
    refused(["predict", "--run", run, "--data", tmp_path / "absent"], "does not exist", capsys)
    refused(["explain", "--run", run, "--ids", "30"], "ids holds 30, which is none of the 30", capsys)
    refused(["explain", "--run", run, "--ids", "1", "--top", "0"], "top is 0", capsys)
    refused(["predict", "--run", tmp_path / "absent", "--data", new], "there is no run folder", capsys)
    refused(["predict", "--run", run, "--data", new, "--memory", "none"], "memory is 'none'", capsys)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "nested-fit.safetensors", "samples.safetensors", "run.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "altered", "missing", "foreign"])
def test_damaged_runs(
    workshop: Path, tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(workshop / "pictures", run, ignore=shutil.ignore_patterns("predict"))
    content = (run / name).read_bytes()
    if damage == "missing":
        (run / name).unlink()
    elif damage == "truncated":
        (run / name).write_bytes(content[: len(content) // 2])
    elif damage == "foreign":
        shutil.copy(workshop / "prices" / name, run / name)
    else:
        middle = len(content) // 2
        (run / name).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    refused(["predict", "--run", run, "--data", workshop / "pictures.npz"], "run", capsys, run / "predict")


def test_a_changed_factory_is_noticed(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(workshop / "nets.py", tmp_path / "nets.py")
    words = [
        "adapt",
        "--model",
        f"{tmp_path / 'nets.py'}:conv",
        "--data",
        workshop / "pictures.npz",
    ]
    linnet(*words, "--out", tmp_path / "run")
    text = (tmp_path / "nets.py").read_text()
    (tmp_path / "nets.py").write_text(text.replace("stride=2), nn.Tanh()", "stride=2), nn.ReLU()"))
    words = ["predict", "--run", tmp_path / "run", "--data", workshop / "pictures.npz"]
    refused(words, "has changed since", capsys)
    refused([*words, "--trust"], "outputs differ", capsys)


def test_changed_test_data_are_noticed(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "pictures.npz"
    shutil.copy(workshop / "pictures.npz", data)
    words = ["adapt", "--model", f"{workshop / 'nets.py'}:conv", "--data", data]
    linnet(*words, "--out", tmp_path / "run")
    with np.load(data) as arrays:
        changed = {**arrays, "y_test": arrays["y_test"][::-1]}
    np.savez(data, **changed)
    linnet("forget", "--run", tmp_path / "run", "--ids", "1", "--out", tmp_path / "less")
    assert "not those of the run any more" in capsys.readouterr().out
    assert result(tmp_path / "less")["scores"] == []
    refused(["explain", "--run", tmp_path / "run", "--ids", "1"], "not those of the run", capsys)


@pytest.mark.parametrize("name", ["predict", "compare", "export"])
def test_files_are_replaced_only_where_that_is_asked_for(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run, out = workshop / "prices", tmp_path / ("m.pt2" if name == "export" else "t.csv")
    out.write_text("of another run")
    words = {
        "predict": ["--run", run, "--data", workshop / "prices.csv"],
        "compare": [run, run],
        "export": ["--run", run],
    }
    linnet(name, *words[name], "--out", out, code=2)
    errors = capsys.readouterr().err
    assert f"--out is {out}, which exists already" in errors
    assert "name another file, or pass --overwrite" in errors
    assert out.read_text() == "of another run"
    linnet(name, *words[name], "--out", out, "--overwrite")
    assert out.read_bytes() != b"of another run"
