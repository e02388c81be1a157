"""`linnet adapt --loss`: runs with the cross-entropy, and the loss that leave-one-out prefers."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linnet
from linnet.app import cli
from linnet.app.runs.folder import load_run
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.report.kinds import loo_log_loss
from tests.app.runs.small_tasks import write_nets, write_pictures, write_table
from tests.hangs import HANGS


def words(folder: Path, out: str, *more: str, data: str = "pictures.npz", net: str = "conv") -> list[str]:
    """The command's words."""
    given = ["--model", f"{folder / 'nets.py'}:{net}", "--data", str(folder / data)]
    return ["adapt", *given, "--out", str(folder / out), *more]


def result(run: Path) -> Any:
    """What a run says of itself."""
    return json.loads((run / "result.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Factories, data, and a run with each loss."""
    folder = tmp_path_factory.mktemp("losses")
    write_nets(folder)
    write_pictures(folder / "pictures.npz")
    write_table(folder / "prices.csv")
    for loss in ("squared", "cross-entropy", "auto"):
        assert cli.main(words(folder, loss, "--loss", loss)) == 0
    return folder


def test_a_run_with_the_cross_entropy(folder: Path) -> None:
    found = result(folder / "cross-entropy")
    fit = found["fit"]
    assert (fit["loss"], fit["criterion"], fit["solver"]) == ("cross-entropy", "loo", "dual")
    assert fit["certificate"] < 1e-9
    scores = {row["name"]: row for row in found["scores"]}
    assert scores["linear fit"]["accuracy"] > 0.7
    assert "cross-entropy" in scores["linear fit"]["note"]
    path = found["report"]["ridge_path"]
    assert (
        min(path["loo_error"])
        == path["loo_error"][int(np.argmin(np.abs(np.array(path["ridges"]) - path["chosen"])))]
    )
    page = (folder / "cross-entropy" / "report.html").read_text()
    assert "Newton steps" in page
    assert "relative gradient" in page
    assert "refitted without" in page
    run = load_run(folder / "cross-entropy")
    assert isinstance(run.fit, SoftmaxFit)
    assert run.temperatures == (1.0, 1.0, 1.0)


def test_the_probabilities_are_those_of_the_posterior(folder: Path) -> None:
    run, out = folder / "cross-entropy", folder / "predicted.csv"
    data = str(folder / "pictures.npz")
    assert cli.main(["predict", "--run", str(run), "--data", data, "--out", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    written = np.array(
        [[float(row[f"p({name})"]) for name in ("across", "along", "slanted")] for row in rows]
    )
    with np.load(data) as archive:
        x = load_run(run).inputs(archive["x_test"][..., None])
    assert len(rows) == len(x)
    expected = load_run(run).fit.predictive(x).probs.double().numpy()
    assert np.abs(written - expected).max() < 1e-4


def test_auto_takes_the_lower_leave_one_out_log_loss(folder: Path) -> None:
    """And never looks at the test samples."""
    squared, other = (load_run(folder / name).fit for name in ("squared", "cross-entropy"))
    scores = {"squared": loo_log_loss(squared), "cross-entropy": loo_log_loss(other)}
    best = min(scores, key=lambda name: scores[name])
    found = result(folder / "auto")["fit"]
    assert found.get("loss", "squared") == best
    assert "leave-one-out log loss" in found["reasons"]["loss"]
    assert found["ridge"] == pytest.approx(result(folder / best)["fit"]["ridge"])


def test_forgetting_and_updating_such_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = folder / "cross-entropy", folder / "without"
    assert cli.main(["forget", "--run", str(run), "--ids", "3,17", "--out", str(out), "--verify"]) == 0
    assert "norm of the gradient" in capsys.readouterr().out
    found = result(out)
    assert (found["train_before"], found["train"]) == (24, 22)
    assert found["difference"] < 1e-4
    assert found["certificate"] < 1e-9
    assert result(out)["fit"]["loss"] == "cross-entropy"
    again = load_run(out)
    fresh = linnet.fit(
        linnet.linearize(again.fit.module.model), (again.fit.x, again.fit.labels), "cross-entropy",
        ridge=again.fit.ridge, solver="dual",
    )  # fmt: skip
    assert (fresh.predict(again.fit.x) - again.fit.predict(again.fit.x)).abs().max() < 1e-3


def test_explaining_such_a_run(folder: Path) -> None:
    words = ["explain", "--run", str(folder / "cross-entropy"), "--ids", "0", "--out", str(folder / "why")]
    assert cli.main(words) == 0
    assert result(folder / "why")["explanations"][0]["up"]


def test_conjugate_gradients_take_the_ridge_of_a_pilot(folder: Path) -> None:
    assert cli.main(words(folder, "iterated", "--loss", "cross-entropy", "--solver", "cg")) == 0
    fit = result(folder / "iterated")["fit"]
    assert (fit["loss"], fit["solver"]) == ("cross-entropy", "cg")
    assert "chosen by leave-one-out" in fit["reasons"]["ridge"]
    assert fit["certificate"] <= 1e-4


def test_what_makes_no_sense(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words(folder, "no", "--loss", "hinge")) != 0
    assert "loss is 'hinge'" in capsys.readouterr().err
    assert cli.main(words(folder, "no", "--loss", "cross-entropy", data="prices.csv", net="mlp")) != 0
    assert "for a regression" in capsys.readouterr().err
    assert cli.main(words(folder, "no", "--loss", "cross-entropy", "--ridge", "gcv")) != 0
    assert "gcv" in capsys.readouterr().err


@pytest.mark.long
def test_auto_of_what_leave_one_out_cannot_judge(folder: Path) -> None:
    assert cli.main(words(folder, "price", "--loss", "auto", data="prices.csv", net="mlp")) == 0
    assert result(folder / "price")["fit"]["reasons"]["loss"] == "a regression"
    assert cli.main(words(folder, "one", "--loss", "auto", "--shots", "1")) == 0
    assert "a class has one sample" in result(folder / "one")["fit"]["reasons"]["loss"]


@pytest.mark.long
def test_the_command_itself(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "linnet.app.cli",
        *words(folder, "shell", "--loss", "cross-entropy", "--ridge", "1"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert result(folder / "shell")["fit"]["loss"] == "cross-entropy"


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_a_cross_fitted_head(folder: Path, loss: str) -> None:
    out = f"crossed-{loss}"
    assert cli.main(words(folder, out, "--loss", loss, "--cross-fit", "3")) == 0
    fit = result(folder / out)["fit"]
    assert "held-out" in fit["reasons"]["ridge"]
    assert any("cross-fitted" in text for text in fit["warnings"])
    assert load_run(folder / out).fit.held_out is not None
    page, report = (folder / out / "report.html").read_text(), result(folder / out)["report"]
    assert "It was chosen because it has the smallest held-out" in page
    assert "It was chosen by" not in page
    assert ("Held-out log loss" in page) == (loss == "cross-entropy")
    assert "cross-fitted" in report["choices"][0]["chosen"]


def test_only_a_probe_is_cross_fitted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words(folder, "no", "--cross-fit", "3", "--head", "random")) != 0
    assert "--cross-fit is 3" in capsys.readouterr().err
