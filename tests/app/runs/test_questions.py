"""`linnet predict`, `explain`, `forget` and `update` on run folders, and folders that are damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from linnet.app import cli
from linnet.app.runs.folder import load_run
from linnet.app.runs.held_out import load_test
from tests.app.runs.small_tasks import linnet, pictures, result, rows, write_folder, write_table

NAMES = ["across", "along", "slanted"]


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
    words = ["predict", "--run", workshop / "pictures", "--data", tmp_path / "new.npz"]
    linnet(*words, "--out", tmp_path / "p.csv")
    table = rows(tmp_path / "p.csv")
    assert [row["predicted"] for row in table] == ["across", "along", "slanted", "across"]
    for row in table:
        probs = [float(row[f"p({name})"]) for name in NAMES]
        assert sum(probs) == pytest.approx(1)
        assert float(row["probability"]) == max(probs)
        assert float(row["std"]) > 0
    linnet(*words, "--no-std", "--out", tmp_path / "p.json")
    as_json = json.loads((tmp_path / "p.json").read_text())
    assert [row["predicted"] for row in as_json] == [row["predicted"] for row in table]
    assert as_json[0]["std"] is None
    assert "<html" in (workshop / "pictures" / "predict" / "report.html").read_text()


def test_predict_sets_and_intervals(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_run(workshop / "pictures")
    task = load_test(run)[0]
    assert task is not None
    words = [
        "predict",
        "--run",
        workshop / "pictures",
        "--data",
        workshop / "pictures.npz",
        "--coverage",
        0.9,
    ]
    linnet(*words, "--out", tmp_path / "p.csv", "--no-std")
    table, sets = rows(tmp_path / "p.csv"), run.fit.sets(task.tensors("test")[0], 0.9)
    named = [[name for name, held in zip(NAMES, row, strict=True) if held] for row in sets.tolist()]
    assert [json.loads(row["set"]) for row in table] == named
    told = result(workshop / "pictures" / "predict")["held"]
    assert told["mean_size"] == float(sets.sum(1).double().mean())
    assert f"they hold {100 * told['share']:.1f} % of the answers" in capsys.readouterr().out
    linnet(*words, "--out", tmp_path / "p.json", "--no-std")
    assert json.loads((tmp_path / "p.json").read_text())[0]["set"] == named[0]

    linnet("predict", "--run", workshop / "prices", "--data", workshop / "prices.csv", "--coverage", 0.8)
    table = rows(workshop / "prices" / "predictions.csv")
    told = result(workshop / "prices" / "predict")["held"]
    held = [float(row["low"]) <= float(row["predicted"]) <= float(row["high"]) for row in table]
    assert np.mean(held) > 0.9  # in the units of the table
    widths = [float(row["high"]) - float(row["low"]) for row in table]
    assert told["mean_width"] == pytest.approx([np.mean(widths)], rel=1e-4)
    assert 0.6 < told["share"] <= 1


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


def test_predict_pictures_of_another_size(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "new", [0, 1, 2], [])
    Image.new("L", (12, 9)).save(folder / "01.png")
    linnet("predict", "--run", workshop / "pictures", "--data", folder, "--out", tmp_path / "p.csv", code=2)
    told = capsys.readouterr().err
    assert "01.png has 9x12 pixels, 00.png has 8x8" in told
    assert "scale them to 8x8, like the samples that the run was trained on" in told
    assert "--size" not in told


def test_predict_a_table(workshop: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "new.csv", lines=20, seed=3)
    predict = ["predict", "--run", workshop / "prices", "--data"]
    linnet(*predict, tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    table = rows(tmp_path / "p.csv")
    truth = [float(row["price"]) for row in rows(tmp_path / "new.csv")]
    z = [(float(row["predicted"]) - y) / float(row["std"]) for row, y in zip(table, truth, strict=True)]
    assert np.mean(np.abs(z) < 3) > 0.8  # standard deviations in the table's own units
    without = [line.rsplit(",", 1)[0] for line in (tmp_path / "new.csv").read_text().splitlines()]
    (tmp_path / "x.csv").write_text("\n".join(without))
    linnet(*predict, tmp_path / "x.csv", "--out", tmp_path / "q.csv")
    assert rows(tmp_path / "q.csv") == table
    (tmp_path / "one.csv").write_text("\n".join(without[:2]))
    linnet(*predict, tmp_path / "one.csv", "--out", tmp_path / "o.csv")
    assert [row["id"] for row in rows(tmp_path / "o.csv")] == [table[0]["id"]]
    assert float(rows(tmp_path / "o.csv")[0]["predicted"]) == pytest.approx(float(table[0]["predicted"]))


def test_explain(workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linnet(
        "explain", "--run", workshop / "pictures", "--ids", "test/3,17", "--top", 2, "--out", tmp_path / "why"
    )
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
    words = ["explain", "--run", workshop / "pictures", "--data", tmp_path / "new.npz"]
    words += ["--out", tmp_path / "why"]
    linnet(*words, "--ids", "x/1")
    assert result(tmp_path / "why")["report"]["test"]["labels"] is None
    assert "label" not in result(tmp_path / "why")["explanations"][0]
    linnet(*words, "--ids", "x/2", code=2)
    words = ["explain", "--run", workshop / "prices", "--ids", "line 4", "--out", tmp_path / "price"]
    linnet(*words)
    told = result(tmp_path / "price")["explanations"][0]
    assert told["up"][0]["influence"] > 0
    assert {type(told[key]) for key in ("predicted", "target")} == {float}
    answers = load_run(workshop / "prices").samples.labels
    assert all(one["target"] == answers[one["position"]] for one in told["up"])


def test_forget(workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_run(workshop / "pictures")
    linnet("forget", "--run", workshop / "pictures", "--ids", "0,5,9", "--out", tmp_path / "less", "--verify")
    said, found = " ".join(capsys.readouterr().out.split()), result(tmp_path / "less")
    assert "21 now" in said
    assert "the mean and the scale of features are those of all samples, forgotten ones too; features" in said
    fit = load_run(tmp_path / "less").fit
    own, other = (fit._class_probs(one.predict(fit.x)) for one in (fit, fit.recomputed(scales=True)))
    change = own - other
    assert found["own_scales"] == pytest.approx(float(change.abs().max()), rel=1e-3)
    assert found["own_scales"] > 0
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


def test_a_class_of_which_no_sample_is_left_has_no_probability(workshop: Path, tmp_path: Path) -> None:
    run = load_run(workshop / "pictures")
    assert run.samples.labels is not None
    slanted = [name for name, label in zip(run.samples.ids, run.samples.labels, strict=True) if label == 2]
    words = ["forget", "--run", workshop / "pictures", "--ids", ",".join(slanted)]
    linnet(*words, "--out", tmp_path / "less")
    less, task = load_run(tmp_path / "less"), load_test(run)[0]
    assert task is not None
    for std in (True, False):
        probs = less.predict(task.test.x, std).probs
        assert probs is not None
        assert not probs[:, 2].any()
        assert np.allclose(probs.sum(1), 1)
    expected = less.fit.predictive(less.inputs(task.test.x)).probs
    assert np.allclose(less.predict(task.test.x).probs, expected, atol=1e-5)


def test_update_leaves_out_what_was_forgotten(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that grows, or holds what was forgotten alone, undoes no request for deletion."""
    with np.load(workshop / "pictures.npz") as data:
        x, y = data["x_train"], data["y_train"]
    new = pictures(np.array([0, 2]), seed=9), np.array([0, 2])
    np.savez(tmp_path / "grown.npz", x=np.concatenate([x, new[0]]), y=np.concatenate([y, new[1]]))
    np.savez(tmp_path / "new.npz", x=new[0], y=new[1])
    np.savez(tmp_path / "back.npz", x=x[[22, 23]], y=y[[22, 23]])
    np.savez(tmp_path / "corrected.npz", x=x[[22, 23]], y=y[[22, 23]] - 1)
    linnet("forget", "--run", workshop / "pictures", "--ids", "22,23", "--out", tmp_path / "less")
    words = ["update", "--run", tmp_path / "less", "--data"]
    for name, train in (("grown", 24), ("new", 24), ("corrected", 24)):
        linnet(*words, tmp_path / f"{name}.npz", "--out", tmp_path / name)
        assert result(tmp_path / name)["train"] == train
    grown, alone = load_run(tmp_path / "grown"), load_run(tmp_path / "new")
    assert torch.allclose(grown.fit.predict(grown.fit.x), alone.fit.predict(grown.fit.x), atol=1e-4)
    told = "2 of 26 samples were forgotten before, first x/22 (linnet adapt would train on them again)"
    assert f"{told}; these are left out" in result(tmp_path / "grown")["findings"]
    capsys.readouterr()
    linnet(*words, tmp_path / "back.npz", "--out", tmp_path / "back", code=2)
    assert "2 of 2 samples were forgotten before" in capsys.readouterr().err


def test_lines_that_were_forgotten_are_left_out_as_often_as_they_were(tmp_path: Path) -> None:
    lines = [f"{'mf'[n % 2]},{'xyz'[n % 3]},{'no' if n % 5 else 'yes'}\n" for n in range(40)]
    for name, new in (("kinds", lines), ("grown", [*lines, *lines[:5]])):
        (tmp_path / f"{name}.csv").write_text("sex,class,t\n" + "".join(new))
    run, less = tmp_path / "kinds", tmp_path / "less"
    linnet("adapt", "--data", tmp_path / "kinds.csv", "--out", run)
    by_line: dict[str, list[str]] = {}
    for name in load_run(run).samples.ids:
        by_line.setdefault(lines[int(name.removeprefix("line ")) - 2], []).append(name)
    twice = next(names[:2] for names in by_line.values() if len(names) > 1)
    linnet("forget", "--run", run, "--ids", ",".join(twice), "--out", less)
    like = lines[int(twice[0].removeprefix("line ")) - 2]
    (tmp_path / "few.csv").write_text("sex,class,t\n" + 12 * like)
    for name, count in (("grown", 5), ("few", 10)):
        out = tmp_path / f"{name} more"
        linnet("update", "--run", less, "--data", tmp_path / f"{name}.csv", "--out", out)
        found = result(out)
        assert found["train"] == found["train_before"] + count
        assert any(" samples were forgotten before" in line for line in found["findings"])
    linnet("update", "--run", less, "--data", tmp_path / "kinds.csv", "--out", tmp_path / "no", code=2)


def test_update_with_classes_that_are_new(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load(workshop / "pictures.npz") as data:
        two = data["y_train"] < 2
        parts = {"x_train": data["x_train"][two], "y_train": data["y_train"][two]}
        np.savez(tmp_path / "two.npz", **parts, x_test=data["x_test"], y_test=np.minimum(data["y_test"], 1))
        np.savez(tmp_path / "third.npz", x=data["x_train"][~two], y=data["y_train"][~two])
        x_test, y_test = data["x_test"], data["y_test"]
    run, out = tmp_path / "run", tmp_path / "more"
    linnet("adapt", "--data", tmp_path / "two.npz", "--model", f"{workshop / 'nets.py'}:conv", "--out", run)
    words = ["update", "--run", run, "--data", tmp_path / "third.npz", "--out", out]
    assert cli.main([str(word) for word in words]) == 2  # a label that the run does not know
    capsys.readouterr()
    linnet(*words, "--new-class", "slanted", "--verify")
    found = load_run(out)
    assert found.classes == ("0", "1", "slanted")
    assert found.fit.classes == 3
    assert (found.predict(x_test[..., None]).predicted == y_test).mean() > 0.8
    linnet("predict", "--run", out, "--data", tmp_path / "third.npz", "--out", tmp_path / "p.csv")
    assert "slanted" in (tmp_path / "p.csv").read_text()
    for names, said in (
        (["0"], "names other than 0, 1"),
        (["slanted", "other"], "new classes other"),
        ([""], "each once"),
    ):
        more, chosen = tmp_path / f"no {names[0]}", [word for name in names for word in ("--new-class", name)]
        assert cli.main([str(word) for word in [*words[:-1], more, *chosen]]) == 2
        assert said in capsys.readouterr().err
        assert not more.exists()
    new = [
        "update",
        "--run",
        workshop / "prices",
        "--data",
        workshop / "prices.csv",
        "--out",
        tmp_path / "no",
    ]
    assert cli.main([str(word) for word in [*new, "--new-class", "cheap"]]) == 2
    assert "a run of classes" in capsys.readouterr().err


def test_new_classes_get_the_numbers_of_their_names(workshop: Path, tmp_path: Path) -> None:
    rng, labels = np.random.default_rng(0), np.arange(36) % 9
    x = rng.normal(size=(48, 3)) + np.r_[labels, np.full(6, 9), np.full(6, 10)][:, None]
    np.savez(tmp_path / "nine.npz", x_train=x[:36], y_train=labels, x_test=x[:36], y_test=labels)
    np.savez(tmp_path / "more.npz", x=x[36:], y=np.repeat([9, 10], 6))
    model = ["--model", f"{workshop / 'nets.py'}:mlp"]
    linnet("adapt", "--data", tmp_path / "nine.npz", *model, "--out", tmp_path / "run")
    words = ["update", "--run", tmp_path / "run", "--data", tmp_path / "more.npz", "--out", tmp_path / "all"]
    linnet(*words, "--new-class", "9", "--new-class", "10")
    found = load_run(tmp_path / "all")
    assert found.classes == tuple(map(str, range(11)))
    assert found.fit.labels is not None
    assert found.fit.labels[36:].tolist() == [9] * 6 + [10] * 6
    assert [one["label"] for one in result(tmp_path / "all")["added"]] == ["9"] * 6 + ["10"] * 6


def test_folders_that_are_no_classes_are_named(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = write_folder(tmp_path / "new", [0, 1], ["across", "curly"])
    words = ["update", "--run", workshop / "pictures", "--data", new, "--out", tmp_path / "out"]
    assert cli.main([str(word) for word in words]) == 2
    told = capsys.readouterr().err
    assert "no classes of the run: curly" in told
    assert "--new-class curly" in told
    linnet(*words, "--new-class", "curly")
    assert load_run(tmp_path / "out").classes == ("across", "along", "slanted", "curly")


def test_update_a_regression(workshop: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "new.csv", lines=30, seed=8)
    run, out = workshop / "prices", tmp_path / "more"
    linnet("update", "--run", run, "--data", tmp_path / "new.csv", "--out", out, "--verify")
    found = result(out)
    assert (found["train_before"], found["train"]) == (48, 78)
    assert found["difference"] < 1e-3
    after, before = found["scores"]
    assert after["rmse"] != before["rmse"]


def test_lines_that_others_are_like_are_taken_as_far_as_they_are_new(tmp_path: Path) -> None:
    """A line is known by its values and its answer, and a file by its lines, where these repeat."""
    with (tmp_path / "d.csv").open("w") as file:
        file.writelines(["a,t\n", *(f"{n},{n % 7}.5\n" for n in range(20))])
    (tmp_path / "new.csv").write_text("a,t\n" + "".join(f"{n},{n % 7}.5\n{n},9.5\n" for n in range(20)))
    linnet("adapt", "--data", tmp_path / "d.csv", "--out", tmp_path / "run", "--tune", "false")
    before, tested = (result(tmp_path / "run")[part] for part in ("train", "test"))
    linnet("update", "--run", tmp_path / "run", "--data", tmp_path / "new.csv", "--out", tmp_path / "more")
    found = result(tmp_path / "more")
    assert (found["train_before"], found["train"]) == (before, before + 20)
    assert any(f"{before} of 40 samples are training samples" in line for line in found["findings"])
    assert any(f"{tested} of 40 samples are test samples" in line for line in found["findings"])
    lines = [f"{'mf'[n % 2]},{'xyz'[n % 3]},{'no' if n % 5 else 'yes'}\n" for n in range(40)]
    (tmp_path / "kinds.csv").write_text("sex,class,t\n" + "".join(lines))
    linnet("adapt", "--data", tmp_path / "kinds.csv", "--out", tmp_path / "kinds")
    for name, new, count in (("few", lines[:12], 12), ("grown", [*lines, *lines[:5]], 5)):
        (tmp_path / f"{name}.csv").write_text("sex,class,t\n" + "".join(new))
        linnet(
            "update",
            "--run",
            tmp_path / "kinds",
            "--data",
            tmp_path / f"{name}.csv",
            "--out",
            tmp_path / name,
        )
        found = result(tmp_path / name)
        assert found["train"] == found["train_before"] + count
    assert any("are training samples of the run already" in line for line in found["findings"])
    assert any("are like samples of the training" in one for one in result(tmp_path / "few")["findings"])
    linnet(
        "predict", "--run", tmp_path / "few", "--data", tmp_path / "grown.csv", "--out", tmp_path / "p.csv"
    )


def test_scores_on_samples_of_the_training_are_said_to_be_no_test(workshop: Path, tmp_path: Path) -> None:
    run, out = workshop / "prices", tmp_path / "p.csv"
    linnet("predict", "--run", run, "--data", workshop / "prices.csv", "--out", out)
    told = result(run / "predict")["findings"]
    assert any("48 of 60 lines equal training lines in all columns" in line for line in told)
    write_table(tmp_path / "new.csv", lines=30, seed=8)
    linnet("predict", "--run", run, "--data", tmp_path / "new.csv", "--out", out, "--overwrite")
    assert not any("training" in line for line in result(run / "predict")["findings"])
    (run / "predictions.csv").unlink(missing_ok=True)
    for count in (0, 1):
        linnet("predict", "--run", run, "--data", tmp_path / "new.csv")
        assert (
            sum("of an earlier call is replaced" in one for one in result(run / "predict")["findings"])
            == count
        )


ZEROS = np.zeros((2, 8, 8), np.uint8)
NEW = {
    "none": {"x": ZEROS[:0]},
    "larger": {"x": np.zeros((2, 9, 9), np.uint8)},
    "channels": {"x": np.zeros((2, 8, 8, 4), np.uint8)},
    "floats": {"x": np.zeros((2, 8, 8))},
    "other": {"z": np.zeros(2)},
    "labels": {"x": ZEROS, "y": np.array([0, 3])},
    "short": {"x": ZEROS, "y": np.array([0])},
    "bare": {"x": ZEROS},
}
FORGET, PREDICT = "forget --run pictures --out less --ids=", "predict --run pictures --out p.csv --data "


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (f"{FORGET}24", "ids holds 24"),
        (f"{FORGET}test/3", "none of the 24 training samples"),
        (f"{FORGET}-1", "-1"),
        (f"{FORGET}2,train/2", "ids holds train/2 twice"),
        (f"{FORGET}{','.join(map(str, range(24)))}", "all 24"),
        (f"{FORGET}[]", "ids is empty"),
        ("forget --run pictures --ids 1 --out pictures", "the same folder"),
        ("update --run pictures --data x.npz --out pictures", "the same folder"),
        ("update --run pictures --data bare.npz --out less", "has no answers"),
        (f"{PREDICT}none.npz", "x is empty"),
        (f"{PREDICT}larger.npz", "(1, 9, 9)"),
        (f"{PREDICT}channels.npz", "(2, 8, 8, 4) and type uint8"),
        (f"{PREDICT}floats.npz", "float64"),
        (f"{PREDICT}other.npz", "has no samples"),
        (f"{PREDICT}labels.npz", "y of labels.npz has the labels 3"),
        (f"{PREDICT}short.npz", "x has 2 samples but y has 1"),
        (f"{PREDICT}absent", "does not exist"),
        (f"{PREDICT}prices.csv", "is a table"),
        (f"{PREDICT}bare.npz --memory none", "memory is 'none'"),
        ("predict --run pictures --data bare.npz --out p.xlsx", "p.xlsx"),
        ("predict --run absent --data bare.npz", "there is no run folder"),
        ("explain --run pictures --ids 30", "ids holds 30, which is none of the 30"),
        ("explain --run pictures --ids 1 --top 0", "--top 0"),
    ],
)
def test_what_is_refused(
    workshop: Path, tmp_path: Path, words: str, what: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Status 2, at most three lines, and nothing written."""
    for name, arrays in NEW.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    for name in ("pictures", "prices.csv"):
        (tmp_path / name).symlink_to(workshop / name)
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    capsys.readouterr()
    linnet(*words.split(), code=2)
    lines = capsys.readouterr().err.splitlines()
    assert what in lines[0]
    assert 2 <= len(lines) <= 3
    assert set(tmp_path.iterdir()) == before


def test_rows_of_another_width_have_no_pixels(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2
    np.savez(tmp_path / "rows.npz", x_train=x, y_train=y, x_test=x + 1, y_test=y)
    np.savez(tmp_path / "narrow.npz", x=x[:, :2])
    model = ["--model", f"{workshop / 'nets.py'}:mlp", "--tune", "false"]
    linnet("adapt", "--data", tmp_path / "rows.npz", *model, "--out", tmp_path / "run")
    capsys.readouterr()
    linnet("predict", "--run", tmp_path / "run", "--data", tmp_path / "narrow.npz", code=2)
    told = capsys.readouterr().err
    assert "inputs of shape (2,)" in told
    assert "give samples of the form that the run was trained on" in told


def test_a_fit_that_python_saved_is_no_run(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_run(workshop / "prices").fit.save(tmp_path / "fit")
    words = ["predict", "--run", tmp_path / "fit", "--data", workshop / "prices.csv"]
    refused(words, "nested-fit.safetensors alone, as save of Python writes it", capsys)
    (tmp_path / "fit" / "model.safetensors").touch()  # as of a run that was killed while it was written
    refused(words, "holds no finished run", capsys)


def refused(words: list[object], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, and a sentence that holds a word."""
    capsys.readouterr()
    linnet(*words, code=2)
    assert what in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize(("name", "damage"), [
    ("model.safetensors", "truncated"), ("nested-fit.safetensors", "altered"),
    ("samples.safetensors", "missing"), ("model.safetensors", "foreign"), ("run.json", "truncated"),
    ("run.json", "altered"), ("run.json", "missing"), ("run.json", "foreign"),
])  # fmt: skip
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
    refused(["predict", "--run", run, "--data", workshop / "pictures.npz"], "run", capsys)
    assert not (run / "predict").exists()


def test_a_changed_factory_is_noticed(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(workshop / "nets.py", tmp_path / "nets.py")
    words = ["adapt", "--model", f"{tmp_path / 'nets.py'}:conv", "--data", workshop / "pictures.npz"]
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
@pytest.mark.thinned(2)
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
