"""Runs by solvers other than the kernel's: every command has the answers that their fits have in Python."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import linnet
from linnet.app import cli
from linnet.app.runs.folder import load_run
from linnet.app.serve.session import Session
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.shared_fit import SharedFit
from linnet.tangent.gram import gram
from tests.app.runs.small_tasks import pictures, write_nets, write_pictures, write_table
from tests.grids import grid

NAMES = ["across", "along", "slanted"]
WITHOUT_METRIC = {
    "sketch": "the directions of a sketch are coordinates of their own",
    "shared": "one kernel for all outputs, of which there is no study",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Factories, pictures and new ones, and a run by each solver, with no other option."""
    folder = tmp_path_factory.mktemp("solvers")
    write_nets(folder)
    write_pictures(folder / "pictures.npz")
    write_table(folder / "prices.csv")
    labels = np.array([0, 1, 2, 0])
    np.savez(folder / "new.npz", x=pictures(labels, seed=7), y=labels, class_names=np.array(NAMES))
    for solver in WITHOUT_METRIC:
        adapt(folder, solver, "--solver", solver)
    return folder


def adapt(folder: Path, out: str, *more: object, code: int = 0, data: str = "pictures.npz") -> None:
    """Make a run."""
    net = "conv" if data == "pictures.npz" else "mlp"
    linnet_("adapt", "--model", f"{folder / 'nets.py'}:{net}", "--data", folder / data,
            "--out", folder / out, *more, code=code)  # fmt: skip


def linnet_(*words: object, code: int = 0) -> None:
    """Run a command in this process."""
    assert cli.main([str(word) for word in words]) == code


def result(run: Path) -> Any:
    """What a command wrote."""
    return json.loads((run / "result.json").read_text())


def rows(path: Path) -> np.ndarray:
    """The probabilities in a table of predictions, (T, C)."""
    with path.open(newline="") as file:
        return np.array([[float(row[f"p({name})"]) for name in NAMES] for row in csv.DictReader(file)])


@pytest.mark.parametrize("solver", WITHOUT_METRIC)
def test_a_run_is_read_as_it_was_made(folder: Path, solver: str) -> None:
    found, run = result(folder / solver), load_run(folder / solver)
    kind: type = SharedFit if solver == "shared" else LinearFit
    assert isinstance(run.fit, kind)
    assert run.fit.record.reasons["metric"] == WITHOUT_METRIC[solver]
    with np.load(folder / "pictures.npz") as archive:
        x, y = run.inputs(archive["x_test"][..., None]), torch.from_numpy(archive["y_test"])
    accuracy = float((run.fit.predictive(x).probs.argmax(1) == y).double().mean())
    assert accuracy == found["scores"][0]["accuracy"] > 0.7
    assert (run.fit.temperature, run.fit.point_temperature, run.fit.variance_scale) == run.temperatures
    # and as linnet.fit makes it on the same linearization
    network = run.fit.module.function.model
    start = network.network_in_place()[0] if solver == "sketch" else network
    again = linnet.fit(linnet.linearize(start), (run.fit.x, run.fit.labels), ridge="loo", solver=solver)
    assert again.ridge == pytest.approx(run.fit.ridge)
    assert torch.allclose(again.predict(x), run.fit.predict(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("solver", WITHOUT_METRIC)
def test_the_page_says_the_solver_and_what_it_leaves_out(folder: Path, solver: str) -> None:
    found = result(folder / solver)
    kept = found["fit"]["reasons"]["sketch" if solver == "sketch" else "outputs"]
    assert found["fit"]["solver"] == found["report"]["facts"]["solver"] == solver
    choice = next(choice for choice in found["report"]["choices"] if choice["what"] == "solver")
    assert (choice["chosen"], choice["why"]) == (solver, f"set by the user; {kept}")
    page = (folder / solver / "report.html").read_text()
    assert kept.split(";")[0].replace("'", "&#39;") in page
    path, run = found["report"]["ridge_path"], load_run(folder / solver)
    at = path["ridges"].index(min(path["ridges"], key=lambda ridge: abs(ridge - path["chosen"])))
    assert path["test_accuracy"][at] == pytest.approx(found["scores"][0]["accuracy"])
    assert path["loo_error"] == pytest.approx(run.fit.path().loo_error.tolist())
    train = found["report"]["train"]
    assert train["informativeness"] == pytest.approx(run.fit.informativeness().tolist(), rel=1e-3)
    assert found["report"]["test"]["explanations"]


@pytest.mark.parametrize("solver", grid(WITHOUT_METRIC, ["sketch"]))
def test_a_run_explains_forgets_and_learns(folder: Path, solver: str) -> None:
    fit, name = load_run(folder / solver).fit, folder / solver
    with np.load(folder / "pictures.npz") as archive:
        x = load_run(name).inputs(archive["x_test"][7:8][..., None])
    linnet_("explain", "--run", name, "--ids", "test/7")
    told = result(name / "explain")["explanations"][0]
    influence = fit.influence(x)[:, 0, int(fit.predict(x).argmax())]
    assert told["up"][0]["influence"] == pytest.approx(float(influence.max()), rel=1e-3)

    less = folder / f"{solver}-less"
    linnet_("forget", "--run", name, "--ids", "train/3,train/5", "--verify", "--out", less)
    assert result(less)["difference"] < 1e-3
    kept = load_run(less)
    assert torch.allclose(kept.fit.predict(x), fit.forget([3, 5]).predict(x), atol=1e-4)
    assert kept.temperatures == pytest.approx((kept.fit.temperature, kept.fit.point_temperature,
                                               kept.fit.variance_scale))  # fmt: skip

    more = folder / f"{solver}-more"
    linnet_("update", "--run", less, "--data", folder / "new.npz", "--out", more)
    found = result(more)
    assert (found["train"], found["fit"]["solver"]) == (24 - 2 + 4, solver)
    assert found["difference"] < 1e-6
    linnet_("compare", name, more)


@pytest.mark.parametrize("solver", grid(WITHOUT_METRIC, ["sketch"]))
def test_a_run_predicts_and_is_exported_and_served(folder: Path, solver: str) -> None:
    name, out = folder / solver, folder / f"{solver}.csv"
    linnet_("predict", "--run", name, "--data", folder / "new.npz", "--out", out)
    with np.load(folder / "new.npz") as archive:
        raw = archive["x"][..., None]
    run = load_run(name)
    assert rows(out) == pytest.approx(run.fit.predictive(run.inputs(raw)).probs.double().numpy(), abs=1e-5)
    linnet_("export", "--run", name, "--out", folder / f"{solver}.pt2")
    module = torch.export.load(folder / f"{solver}.pt2").module()
    outputs = module(torch.from_numpy(raw))[0]
    assert torch.allclose(outputs, run.fit.predict(run.inputs(raw)), atol=1e-4)
    session = Session(run, solver)
    assert session.forget(["train/3"])["train"] == 23


CASES: list[tuple[str, list[object], str]] = [
    ("sketch", ["--loss", "auto", "--solver", "sketch"], "pictures.npz"),
    ("sketch", ["--solver", "sketch", "--cross-fit", 2], "pictures.npz"),
    ("sketch", ["--solver", "sketch", "--loss", "cross-entropy", "--ridge", 3], "pictures.npz"),
    ("sketch", ["--solver", "sketch", "--params", "^3"], "pictures.npz"),
    ("sketch", ["--solver", "sketch"], "prices.csv"),
    ("shared", ["--solver", "shared", "--loss", "auto"], "pictures.npz"),
    ("shared", ["--solver", "shared", "--cross-fit", 2], "pictures.npz"),
    ("shared", ["--solver", "shared", "--metric", "kfac"], "pictures.npz"),
    ("shared", ["--solver", "shared"], "prices.csv"),
    ("primal", ["--solver", "primal", "--loss", "auto", "--metric", "none"], "pictures.npz"),
    ("primal", ["--solver", "primal"], "pictures.npz"),
    ("primal", ["--solver", "primal"], "prices.csv"),
]


@pytest.mark.parametrize(("solver", "words", "data"), grid(CASES, [CASES[0]]))
def test_other_options_beside_a_solver(
    folder: Path, tmp_path: Path, solver: str, words: list[object], data: str
) -> None:
    run, less = tmp_path / "run", tmp_path / "less"
    adapt(folder, str(run), *words, data=data)
    found, saved = result(run), load_run(run)
    assert found["fit"]["solver"] == saved.fit.solver == solver
    if "auto" in words:
        assert found["fit"]["reasons"]["loss"] == f"solver {solver} is of the squared loss"
    linnet_("explain", "--run", run, "--ids", found["report"]["test"]["ids"][4])
    linnet_("forget", "--run", run, "--ids", saved.samples.ids[1], "--verify", "--out", less)
    assert result(less)["difference"] < 1e-2
    assert load_run(less).fit.n == saved.fit.n - 1
    linnet_("predict", "--run", less, "--data", folder / data)


def test_a_sketch_has_no_metric(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapt(folder, "refused", "--solver", "sketch", "--metric", "kfac", code=2)
    told = capsys.readouterr().err
    assert "--metric is 'kfac' with solver sketch" in told
    assert "pass --metric none, or leave --solver out" in told
    assert not (folder / "refused").exists()


def test_a_sketch_takes_over_where_nothing_else_fits_the_memory(folder: Path) -> None:
    write_pictures(folder / "many.npz", train=60, test=2)
    model = ["--model", f"{folder / 'nets.py'}:conv", "--model-args", '{"width": 60}']
    words = ["--data", folder / "many.npz", "--method", "linear", "--memory", "8MB"]
    linnet_("adapt", *model, *words, "--out", folder / "tight")
    fit = result(folder / "tight")["fit"]
    assert (fit["solver"], fit["parameters"]) == ("sketch", 256)
    assert fit["reasons"]["metric"].startswith("the memory has room for a sketch alone")
    assert fit["reasons"]["solver"].startswith("the kernel is too large")


def test_the_variance_of_one_kernel_for_all_outputs_is_not_exported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linnet_("export", "--run", folder / "shared", "--variance", "--out", folder / "no.pt2", code=2)
    told = capsys.readouterr().err
    assert "export without --variance, and take the spread of each prediction from linnet predict" in told


@pytest.mark.long
@pytest.mark.parametrize("solver", WITHOUT_METRIC)
def test_the_spectrum_of_a_run(folder: Path, solver: str) -> None:
    linnet_("spectrum", "--run", folder / solver)
    found, function = result(folder / solver / "spectrum"), load_run(folder / solver).fit.module.function
    kernel = gram(function, load_run(folder / solver).fit.x, form="full").double().reshape(72, 72)
    values = torch.linalg.eigvalsh(kernel).flip(0)
    assert found["report"]["task"]["eigenvalues"][:20] == pytest.approx(values[:20].tolist(), rel=1e-3)
    told = [text for text in found["findings"] if "the run has one for all of them" in text]
    assert (found["solver"], len(told)) == (("sketch", 0) if solver == "sketch" else ("dual", 1))
