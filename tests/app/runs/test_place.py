"""Output folders of runs, and samples that `update` and `predict` already know or find hard."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from linnet.app import cli
from linnet.app.runs.folder import load_run
from linnet.errors import NumericalError
from linnet.nested.nested_fit import NestedFit
from tests.app.runs.small_tasks import result
from tests.app.runs.test_adapt import adapt, refused


def test_folders_that_cannot_be_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(folder, ["--out", "/proc/linnet"], "cannot be written", capsys)
    refused(folder, ["--out", ""], "the current folder", capsys)
    refused(folder, ["--shots", "99"], "shots is 99", capsys, out="a/b/c")  # nothing stays, parents included
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.tex").write_text("all of it")
    refused(folder, [], "other files, first thesis.tex", capsys, out="mine")
    assert adapt(folder, "--overwrite", out="mine") == 0
    assert (folder / "mine" / "thesis.tex").exists()


@pytest.mark.long
def test_a_finished_run_is_only_replaced_on_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "run"
    assert adapt(folder) == 0
    assert cli.main(["predict", "--run", str(run), "--data", str(folder / "pictures.npz")]) == 0
    assert adapt(folder) == 0  # the same settings
    refused(folder, ["--shots", "4"], "a finished run of other settings", capsys)
    assert result(run)["train"] == 24
    assert adapt(folder, "--shots", "4", "--overwrite") == 0
    assert result(run)["train"] == 12
    assert not (run / "predict").exists()
    assert not (run / "predictions.csv").exists()
    assert adapt(folder, "--shots", "4") == 0  # the permission is not a setting


@pytest.mark.parametrize("words", [["--seed", "-1"], ["--seed", "9" * 20], ["--size", "100000"]])
def test_numbers_out_of_range(folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(folder, words, words[1].lstrip("0"), capsys)


def test_one_sample_a_class_takes_the_evidence(folder: Path) -> None:
    assert adapt(folder, "--shots", "1") == 0
    assert result(folder / "run")["fit"]["reasons"]["ridge"] == "highest evidence"


def test_a_budget_that_the_kernel_does_not_fit_fails_the_check(folder: Path) -> None:
    words = ["check", "--model", f"{folder / 'nets.py'}:conv", "--data", str(folder / "pictures.npz")]
    assert cli.main(words) == 0
    assert cli.main([*words, "--memory", "1KB"]) == 1


def update(run: Path, data: Path, out: Path) -> int:
    """Run the command."""
    return cli.main(["update", "--run", str(run), "--data", str(data), "--out", str(out)])


def test_samples_that_the_run_knows(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workshop / "pictures"
    with np.load(workshop / "pictures.npz") as data:
        x, y, tests, answers = (data[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    np.savez(tmp_path / "old.npz", x=x[:3], y=y[:3])
    assert update(run, tmp_path / "old.npz", tmp_path / "old") == 2
    assert "3 of 3 samples are training samples" in capsys.readouterr().err
    assert not (tmp_path / "old").exists()
    mixed = np.concatenate([x[:1], tests[:4], 255 - x[:1]])
    np.savez(tmp_path / "mixed.npz", x=mixed, y=np.concatenate([y[:1], answers[:4], y[:1]]))
    assert update(run, tmp_path / "mixed.npz", tmp_path / "mixed") == 0
    found = result(tmp_path / "mixed")
    assert found["train"] == 24 + 1
    assert "1 of 6 samples are training samples" in found["findings"][0]
    assert "4 of 6 samples are test samples" in found["findings"][1]
    after = load_run(tmp_path / "mixed").test
    assert after is not None
    assert after.positions is None
    np.savez(tmp_path / "tests.npz", x=tests[:4], y=answers[:4])
    assert update(run, tmp_path / "tests.npz", tmp_path / "tests") == 2
    assert "4 of 4 samples are test samples of the run" in capsys.readouterr().err
    np.savez(
        tmp_path / "other.npz", x=np.append(x[:3], 255 - tests[:1], 0), y=np.append(1 - y[:3], answers[:1])
    )
    assert update(run, tmp_path / "other.npz", tmp_path / "other") == 0
    assert "3 samples have another answer than equal training" in result(tmp_path / "other")["findings"][1]


def test_probabilities_without_variance_have_their_own_temperature(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_run(workshop / "pictures")
    data, table = workshop / "pictures.npz", tmp_path / "p.csv"
    words = ["predict", "--run", str(workshop / "pictures"), "--data", str(data), "--out", str(table)]
    assert cli.main([*words, "--std", "false"]) == 0
    assert "the probabilities are of the outputs alone" in capsys.readouterr().out
    assert cli.main([*words, "--overwrite"]) == 0
    assert "outputs alone" not in capsys.readouterr().out
    assert cli.main([*words, "--std", "false", "--overwrite"]) == 0
    assert run.temperatures is not None
    with np.load(data) as arrays:
        means = run.fit.predict(run.inputs(arrays["x_test"][..., None]))
    expected = (means.double() / run.temperatures[1]).softmax(1).max(1).values
    told = [float(row["probability"]) for row in csv.DictReader(table.read_text().splitlines())]
    assert told == pytest.approx(expected.tolist(), rel=1e-3)


def test_predictions_without_variances_that_cannot_be_solved_for(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise NumericalError("a solve ended early")

    monkeypatch.setattr(NestedFit, "predictive", fail)
    table = tmp_path / "p.csv"
    words = ["--run", str(workshop / "pictures"), "--data", str(workshop / "pictures.npz")]
    assert cli.main(["predict", *words, "--out", str(table)]) == 0
    assert "a solve ended early; --std false" in (told := capsys.readouterr().out)
    assert "the probabilities are of the outputs alone" in told
    assert all(row["std"] == "" for row in csv.DictReader(table.read_text().splitlines()))
    assert cli.main(["predict", *words, "--out", str(tmp_path / "no" / "p.csv")]) == 2
