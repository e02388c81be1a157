"""`linnet adapt`: what it writes, that it repeats and resumes, and what it refuses."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from linnet.app import cli
from linnet.app.data import load_data
from linnet.app.data.task import InMemory
from linnet.app.models import load_model
from linnet.app.runs import adaptation
from linnet.app.runs.adaptation import ending, trained_on
from linnet.app.runs.folder import load_run
from linnet.app.runs.held_out import load_test
from linnet.errors import ModelError
from linnet.files import load
from linnet.fitting.descent import Descent
from linnet.nested import tuning
from linnet.nested.nested_fit import NestedFit
from linnet.nested.search import Rung, ladder, verdict
from linnet.tree import flatten
from linnet.unfinished import Checkpoint
from tests.app.runs.small_tasks import (
    pictures,
    result,
    write_folder,
    write_pictures,
)

RUN_FILES = {
    "model.safetensors", "nested-fit.safetensors", "samples.safetensors", "run.json",
    "result.json", "report.html", "run.yaml",
}  # fmt: skip


def adapt(
    folder: Path, *words: str, model: str = "conv", data: str = "pictures.npz", out: str = "run"
) -> int:
    """Run the command in a folder."""
    given = ["--model", f"{folder / 'nets.py'}:{model}", "--data", str(folder / data)]
    return cli.main(["adapt", *given, "--out", str(folder / out), *words])


def test_a_run_holds_everything(workshop: Path) -> None:
    run = workshop / "pictures"
    assert {path.name for path in run.iterdir()} >= RUN_FILES
    assert not list(run.glob("*kernel*"))
    found = result(run)
    scores = {row["name"]: row for row in found["scores"]}
    assert list(scores) == ["linear probe", "plain fine-tuning"]  # kept, and told once
    assert scores["linear probe"]["accuracy"] > 0.8
    assert all(0 <= row["ece"] <= 1 and row["nll"] > 0 and row["seconds"] > 0 for row in scores.values())
    assert found["fit"]["criterion"] == "loo"
    assert found["fit"]["certificate"] < 1e-10
    assert found["report"]["ridge_path"]["test_accuracy"] is not None
    page = (run / "report.html").read_text()
    assert "slanted" in page
    assert "How the ridge was chosen" in page


def test_test_samples_that_were_trained_on_are_told(folder: Path) -> None:
    arrays = dict(np.load(folder / "pictures.npz"))
    arrays["x_test"][:3] = arrays["x_train"][5:8]
    np.savez(folder / "twice.npz", **arrays)
    told = "3 of 30 test samples are training samples too"
    assert adapt(folder, "--quiet", data="twice.npz") == 0
    assert sum(told in one for one in result(folder / "run")["data"]["findings"]) == 1
    task = load_data(folder / "twice.npz")
    assert len(trained_on(task)) == 1
    assert trained_on(replace(task, train=task.train.take(np.arange(5)))) == []
    for kinds, count in ((5, 0), (24, 1)):  # rows of few categories are no copies
        rows = InMemory(np.arange(30)[:, None] % kinds)
        train, test = (replace(part, source=rows) for part in (task.train, task.test))
        assert len(trained_on(replace(task, train=train, test=test))) == count


def test_the_test_accuracy_is_that_of_the_kernel(workshop: Path) -> None:
    report = result(workshop / "pictures")["report"]
    at = int(np.argmin(np.abs(np.array(report["ridge_path"]["ridges"]) - report["ridge_path"]["chosen"])))
    # along the path predictions are f0 + K beta, for the score f0 + J delta: the same numbers
    assert report["ridge_path"]["test_accuracy"][at] == pytest.approx(report["comparison"][0]["accuracy"])


def test_the_same_command_gives_the_same_fit(workshop: Path, folder: Path) -> None:
    assert adapt(folder, "--compare", "finetune", "--finetune-steps", "4") == 0
    _, first = flatten(load(workshop / "pictures" / "nested-fit.safetensors", "nested-fit"))
    _, second = flatten(load(folder / "run" / "nested-fit.safetensors", "nested-fit"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert result(folder / "run")["scores"][-1]["nll"] == result(workshop / "pictures")["scores"][-1]["nll"]


def test_options_change_the_outcome(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shots", "4", "--ridge", "2.5", "--params", "^0", "--tests", "9", "--json"]
    assert adapt(folder, *words, "--mean", "half", "--size", "8") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["train"], found["test"], found["fit"]["ridge"]) == (12, 9, 2.5)
    assert found["fit"]["parameters"] == 8 * 9 + 8
    assert "report" not in found
    record = json.loads((folder / "run" / "run.json").read_text())["content"]
    half = {"mean": [0.5], "std": [0.5], "size": 8, "channels": None}
    assert record["transform"] == {"kind": "ImageTransform", **half}


def test_an_interrupted_evaluation_keeps_the_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solved, made = adaptation.solved, []
    monkeypatch.setattr(adaptation, "solved", lambda *a: (made.append(a), solved(*a))[1])
    with monkeypatch.context() as patch:

        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(adaptation, "own_score", interrupt)
        assert adapt(folder) == 130
    kept = load_run(folder / "run").fit
    words = ["--data", str(folder / "pictures.npz"), "--out", str(folder / "p.csv")]
    assert cli.main(["predict", "--run", str(folder / "run"), *words]) == 0
    assert adapt(folder) == 0
    assert len(made) == 1  # the second run goes on from the fit of the first
    assert torch.equal(load_run(folder / "run").fit.system.beta, kept.system.beta)
    assert result(folder / "run")["scores"][0]["accuracy"] > 0.5


def test_a_run_of_a_trained_network_that_reads_earlier_layers_opens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        tuning, "ladder", lambda *given: (*ladder(*given)[:-1], Rung("trained", 1.0, taken=True))
    )
    assert adapt(folder, "--tune", model="deep") == 0
    run = load_run(folder / "run")
    assert run.fit.trained
    assert run.fit.earlier > 0
    words = ["--data", str(folder / "pictures.npz"), "--out", str(folder / "p.csv")]
    assert cli.main(["predict", "--run", str(folder / "run"), *words]) == 0
    assert (
        cli.main(["forget", "--run", str(folder / "run"), "--ids", "train/3", "--out", str(folder / "l")])
        == 0
    )
    assert load_run(folder / "l").fit.n == run.fit.n - 1
    said = result(folder / "l")
    assert any("keep what they learned" in note for note in said["findings"])
    assert "taken out of the fit" in capsys.readouterr().out
    assert "keep what they learned" in (folder / "l" / "report.html").read_text("utf-8")
    (folder / "run" / "result.json").unlink()  # as after a kill while it was evaluated
    monkeypatch.setattr(adaptation, "tuned", lambda *_, **__: pytest.fail("trained again"))
    assert adapt(folder, "--tune", model="deep") == 0


class Stopped:
    """Training that is interrupted before a run, and the runs that were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self.before = 0, 0
        once = Descent.__call__

        def counted(descent: Descent, *given: Any) -> Any:
            self.runs += 1
            if self.runs == self.before:
                raise KeyboardInterrupt
            return once(descent, *given)

        monkeypatch.setattr(tuning, "Checkpoint", partial(Checkpoint, interval=0))
        monkeypatch.setattr(Descent, "__call__", counted)


@pytest.mark.parametrize("way", ["interrupted", "killed", "of two networks"])
def test_training_goes_on_behind_the_last_run_that_was_done(
    way: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ["--model", f"{folder / 'nets.py'}:conv"] if way == "of two networks" else []
    again, stopped = partial(adapt, folder, "--tune", *other, model="deep"), Stopped(monkeypatch)
    assert again(out="whole") == 0
    whole, stopped.before = stopped.runs, stopped.runs + 4
    assert again() == 130
    assert len(list((folder / "run" / "training" / "0").iterdir())) == 3
    if way == "killed":  # and no settings were written
        (folder / "run" / "run.yaml").unlink()
    assert again() == 0
    assert stopped.runs == 2 * whole + 1
    assert not (folder / "run" / "training").exists()
    one, two = (load_run(folder / out).fit for out in ("run", "whole"))
    assert torch.equal(one.predict(one.x), two.predict(one.x))
    assert one.rungs[-1].error == two.rungs[-1].error


def test_networks_of_a_killed_run_go_with_the_next_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Stopped(monkeypatch)
    stopped.before = 3
    assert adapt(folder, "--tune", model="deep") == 130
    (folder / "run" / "run.yaml").unlink()
    assert adapt(folder, model="deep") == 0
    assert not (folder / "run" / "training").exists()
    assert not load_run(folder / "run").fit.trained


@pytest.mark.parametrize("part", ["x_train", "y_train"])
def test_an_interrupted_run_of_other_data_begins_anew(
    part: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Stopped(monkeypatch)
    stopped.before = 2
    assert adapt(folder, "--tune", model="deep") == 130
    file = folder / "pictures.npz"
    arrays = dict(np.load(file))
    arrays[part] = 255 - arrays[part] if part == "x_train" else (arrays[part] + 1) % 3
    np.savez(file, **arrays)
    assert adapt(folder, "--tune", model="deep") == 0
    assert adapt(folder, "--tune", model="deep", out="fresh") == 0
    one, two = (load_run(folder / out).fit for out in ("run", "fresh"))
    assert torch.equal(one.x, two.x)
    assert torch.equal(one.predict(one.x), two.predict(one.x))


@pytest.mark.long
def test_trained_lower_layers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(folder / "more.npz", train=24)
    again, run = partial(adapt, folder, "--model-args", '{"width": 6}', data="more.npz"), folder / "run"
    assert again(out="plain") == 0
    assert "next: --tune" in capsys.readouterr().out
    tuned, begun = adaptation.tuned, []

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(adaptation, "tuned", interrupt)
        assert again("--tune") == 130
    assert not load_run(run).fit.rungs  # the fit at the original weights is there already
    monkeypatch.setattr(adaptation, "tuned", lambda *a, **k: (begun.append(a), tuned(*a, **k))[1])
    with monkeypatch.context() as patch:
        patch.setattr(adaptation, "own_score", interrupt)
        assert again("--tune") == 130
    assert again("--tune") == 0
    assert len(begun) == 1  # the second run goes on from the trained weights of the first
    told = capsys.readouterr().out
    assert "trained lower layers" in told
    assert "<- used" in told
    found = result(run)
    assert found["fit"]["trained"]
    rungs = load_run(run).fit.rungs
    assert rungs[-1].taken
    assert rungs[-1].name == "trained lower layers"
    assert found["fit"]["reasons"]["verdict"] == verdict(rungs)
    assert "trained without it" in (run / "report.html").read_text()
    assert "next: --tune" not in told
    words = ["--data", str(folder / "more.npz"), "--out", str(folder / "p.csv")]
    assert cli.main(["predict", "--run", str(run), *words]) == 0
    words = ["--verify", "--ids", "train/3", "--out", str(folder / "less")]
    assert cli.main(["forget", "--run", str(run), *words]) == 0
    less = load_run(folder / "less").fit
    assert less.trained
    assert (less.n, less.noise) == (71, load_run(run).fit.noise)


def test_a_run_with_rounding_errors_says_so_and_opens_again(folder: Path) -> None:
    """The mean over a picture of what a network makes of it hardly tells the classes apart."""
    (folder / "pooled.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef net():\n    torch.manual_seed(0)\n"
        "    layers = [nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]\n"
        "    return nn.Sequential(*layers, nn.Linear(6, 3))\n"
    )
    data, run = str(folder / "pictures.npz"), str(folder / "run")
    words = "--model", f"{folder / 'pooled.py'}:net", "--data", data, "--ridge", "0.005"
    assert cli.main(["adapt", *words, "--out", run]) == 0
    assert any("rounding leaves errors" in one for one in result(Path(run))["fit"]["warnings"])
    assert cli.main(["predict", "--run", run, "--data", data]) == 0


def test_old_weights_go_into_the_old_head(folder: Path) -> None:

    old = load_model(f"{folder / 'nets.py'}:conv", model_args={"classes": 7})
    with torch.no_grad():
        old[0].weight.mul_(2)  # type: ignore[index, operator]
    torch.save({"state_dict": old.state_dict()}, folder / "old.pt")
    words = ("--weights", str(folder / "old.pt"), "--model-args", '{"classes": 7}')
    assert adapt(folder, *words) == 0
    state = load(folder / "run" / "model.safetensors", "model")
    assert torch.equal(state["0.weight"], old.state_dict()["0.weight"])
    assert state["3.weight"].shape == (4, 72)  # four random heads


def test_regression(workshop: Path) -> None:
    found = result(workshop / "prices")
    fit, probe = found["scores"]
    assert (fit["name"], probe["name"]) == ("linear fit", "linear probe")
    assert fit["rmse"] < 12  # the target's deviation is about 22
    assert fit["accuracy"] is None
    assert "Interval" in (workshop / "prices" / "report.html").read_text() or fit["nll"] is not None


def test_regression_with_a_new_head_and_fine_tuning(folder: Path) -> None:
    words = ["--model-args", '{"outputs": 4}', "--target", "a"]
    words += ["--compare", "finetune", "--finetune-steps", "8"]
    assert adapt(folder, *words, model="mlp", data="prices.csv") == 0
    names = [row["name"] for row in result(folder / "run")["scores"]]
    assert names == ["linear probe", "plain fine-tuning"]


KILLED_AT_THE_FOURTH_STEP = """
import itertools, os, signal, sys
from linnet.app import cli
from linnet.tangent import gram, store

store.RECORD_SECONDS = 0.0  # record every step at once
run, count = gram._run, itertools.count(1)

def step(*arguments):
    if next(count) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    run(*arguments)

gram._run = step
sys.exit(cli.main(["adapt", *sys.argv[1:]]))
"""


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The steps of kernels that are computed from now on."""
    from linnet.tangent import gram

    counted: list[object] = []
    run = gram._run
    monkeypatch.setattr(gram, "_run", lambda step, *rest: (counted.append(step), run(step, *rest)))
    return counted


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many threads as the process that is killed: with others eigenvectors differ in the last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="kills with SIGKILL")
def test_a_killed_run_resumes_to_the_same_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    write_pictures(folder / "many.npz", train=10, test=2)
    words = ["--model", f"{folder / 'nets.py'}:conv", "--model-args", '{"width": 300}']
    words += ["--memory", "1500kB", "--data", str(folder / "many.npz")]
    run, whole = folder / "killed", folder / "whole"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_THE_FOURTH_STEP, *words, "--out", str(run)], env=environment
    )
    assert done.returncode == -signal.SIGKILL
    finished = json.loads((run / "kernel.npy.steps.json").read_text())["done"]
    assert len(finished) == 3
    assert not (run / "run.json").exists()
    assert cli.main(["predict", "--run", str(run), "--data", str(folder / "many.npz")]) == 2
    counted = count_steps(monkeypatch)
    assert cli.main(["adapt", *words, "--out", str(run)]) == 0
    resumed = len(counted)
    whole.mkdir()
    (whole / "kernel.npy").write_text("of a run that was killed when it had its kernel")
    assert cli.main(["adapt", *words, "--out", str(whole)]) == 0
    assert resumed == len(counted) - resumed - len(finished)  # what was done is not done again
    assert not list(run.glob("*kernel*")) + list(whole.glob("*kernel*"))
    _, first = flatten(load(run / "nested-fit.safetensors", "nested-fit"))
    _, second = flatten(load(whole / "nested-fit.safetensors", "nested-fit"))
    assert all(torch.equal(first[name], second[name]) for name in second)


def refused(
    folder: Path, words: list[str], what: str, capsys: pytest.CaptureFixture[str], **where: str
) -> None:
    """Three short lines, status 2, and nothing written."""
    before = {path.name for path in folder.iterdir()}
    capsys.readouterr()
    assert adapt(folder, *words, **where) == 2
    lines = capsys.readouterr().err.splitlines()
    assert what in lines[0]
    assert 2 <= len(lines) <= 3
    assert {path.name for path in folder.iterdir() if path.name != "__pycache__"} == before - {"__pycache__"}


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--shots", "9"], "shots is 9"),
        (["--tests", "0"], "--tests 0"),
        (["--ridge", "-1"], "--ridge -1"),
        (["--ridge", "best"], "ridge is 'best'"),
        (["--weight", "2"], "--weight 2"),
        (["--params", "^3"], "all chosen parameters are in the last layer"),
        (["--memory", "2kB"], "need"),
        (["--memory", "much"], "memory is 'much'"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--params", "nothing"], "params"),
        (["--mean", "dark"], "mean is 'dark'"),
        (["--finetune-steps", "-1"], "-1"),
        (["--model-args", '{"depht": 3}'], "raised TypeError"),
        (["--weights", "absent.pt"], "absent.pt"),
        (["--size", "4"], "cannot run on x"),
        (["--tune", "--weight", "0.5"], "--tune True with weight given"),
        (["--tune", "--ridge", "0.1"], "--tune True with ridge given"),
    ],
)
def test_bad_options(folder: Path, words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(folder, words, what, capsys)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ({"model": "broken"}, "no weights today"),
        ({"model": "noisy"}, "two passes differ"),
        ({"model": "absent"}, "absent"),
        ({"data": "empty.npz"}, "x_train is empty"),
        ({"data": "cut.npz"}, "truncated"),
        ({"out": "nets.py"}, "is a file"),
    ],
)
def test_bad_networks_and_data(
    folder: Path, where: dict[str, str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(folder / "empty.npz", x_train=np.zeros((0, 8, 8), np.uint8), y_train=np.zeros(0, int))
    (folder / "cut.npz").write_bytes((folder / "pictures.npz").read_bytes()[:900])
    refused(folder, [], what, capsys, **where)


def test_data_of_another_shape_say_what_they_became(tmp_path: Path) -> None:
    lines = [
        f"{'' if n % 9 == 8 else n},{'uvw'[n % 3]},name{n},{'yes' if n % 2 else 'no'}\n" for n in range(40)
    ]
    (tmp_path / "d.csv").write_text("age,city,name,buys\n" + "".join(lines))
    np.savez(tmp_path / "d.npz", x_train=np.ones((8, 4, 4, 3)), y_train=np.arange(8) % 2)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2))
    for name, words in (
        ("d.csv", r"2 columns .* became 5 numbers: age 2, city 3; columns left out: name .*takes 5 numbers"),
        ("d.npz", r"array of shape \(N, 4, 4, 3\) is taken as it is.*uint8 .*\(N, C, H, W\)"),
    ):
        task = load_data(tmp_path / name)
        with pytest.raises(ModelError, match=words):
            ending(net, task, task.tensors("train")[0])


def spoiled(folder: Path) -> Path:
    """Folders of pictures, of which one in each part cannot be decoded."""
    root = folder / "photos"
    for part in ("train", "test"):
        write_folder(root / part, [0, 1, 2] * 6, ["across", "along", "slanted"], seed=len(part))
        (root / part / "across" / "0.png").write_bytes(b"no picture")  # the first of all
    return root


def test_damaged_pictures_are_refused_or_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoiled(folder)
    words = ("--size", "8", "--channels", "1")
    assert adapt(folder, *words, data="photos") == 2
    told = capsys.readouterr().err
    assert "2 of 38 images" in told  # of both parts
    assert "test/across/0.png (UnidentifiedImageError: " in told
    assert adapt(folder, *words, "--damaged", "skip", "--tests", "9", data="photos") == 0
    told = "left out, damaged: train/across/0.png"
    assert told in capsys.readouterr().out
    assert told in result(folder / "run")["data"]["findings"]
    assert "train/across/0.png" in (folder / "run" / "report.html").read_text()
    run = load_run(folder / "run")
    assert run.fit.n == 18
    task, why = load_test(run)  # the same test samples, though a damaged one lies among them
    assert why == ""
    assert task is not None
    assert len(task.test) == 9
    assert adapt(folder, "--damaged", "mend", data="photos", out="other") == 2
    assert "--damaged is 'mend'" in capsys.readouterr().err


def test_check_says_what_adapt_would_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--model", f"{folder / 'nets.py'}:conv", "--data", str(spoiled(folder))]
    words += ["--size", "8", "--channels", "1"]
    assert cli.main(words) == 2  # every header is read, not those of the first samples alone
    assert "train/across/0.png" in capsys.readouterr().err
    assert cli.main([*words, "--damaged", "skip"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("ready")
    assert "data: 18 training and 18 test images of 3 classes" in told
    assert "convolution" not in told
    assert "its head of 3 outputs is replaced" in told
    assert "linnet adapt: about" in told
    assert cli.main([*words, "--damaged", "skip", "-v"]) == 0
    assert "convolution" in capsys.readouterr().out


@pytest.mark.parametrize(("data", "words", "shown", "sizes"), [
    ("pictures.npz", ("--weight", "0.5"), "5 of 8 training images per class, 4 of 30 test images", (15, 4)),
    ("pictures.npz", ("--weight", "0.5", "--shots", "3"), "3 of 8 training images per class, 4 of", (9, 4)),
    ("prices.csv", ("--weight", "0.5"), "16 of 48 training samples, 4 of 12 test samples", (16, 4)),
])  # fmt: skip
@pytest.mark.thinned(2)
def test_a_quick_first_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: str,
    words: tuple[str, ...], shown: str, sizes: tuple[int, int],
) -> None:  # fmt: skip
    monkeypatch.setattr(adaptation, "QUICK", 1e-9)  # no time at all: as few samples as there may be
    monkeypatch.setattr(adaptation, "LEAST", 4)
    model = "conv" if data == "pictures.npz" else "mlp"
    assert adapt(folder, "--quick", *words, model=model, data=data) == 0
    told, found = capsys.readouterr().out, result(folder / "run")
    assert shown in " ".join(told.split())
    assert shown in " ".join(found["verdict"]["sentences"])
    assert (found["train"], found["test"]) == sizes
    assert found["verdict"]["answer"] != "do not use"
    first = found["next"][0]["command"]
    assert f"next: {first}" in " ".join(told.split())
    assert cli.main(shlex.split(first)[1:]) == 0
    assert result(Path(f"{folder / 'run'}-full"))["train"] == (
        9 if "--shots" in words else 24 if model == "conv" else 48
    )


def test_a_quick_run_probes_all_and_tries_the_lower_layers_on_some(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    y = np.repeat([0, 1, 2], [12, 12, 3])
    np.savez(folder / "uneven.npz", x_train=pictures(y, 0), y_train=y, x_test=pictures(y, 1), y_test=y)
    monkeypatch.setattr(adaptation, "seconds_each", lambda *_: adaptation.QUICK / 4)  # room for four samples
    assert adapt(folder, "--quick", data="uneven.npz") == 0
    told, run = capsys.readouterr().out, load_run(folder / "run")
    assert told.startswith("linear probe of all 27 training images: ")
    assert isinstance(run.fit, NestedFit)
    assert (run.fit.n, run.fit.body_weight) == (27, 0)
    assert "n 13 of 27 training images, at most 5 per class" in run.fit.verdict
    assert run.fit.verdict in result(folder / "run")["verdict"]["sentences"]
    monkeypatch.setattr(adaptation, "MOST", 13)
    assert adapt(folder, "--quick", out="few") == 0
    assert (result(folder / "few")["train"], result(folder / "few")["test"]) == (12, 13)
    assert adapt(folder, "--weight", "0", data="uneven.npz", out="probe") == 0
    whole = load_run(folder / "probe").fit
    assert torch.equal(whole.system.beta, run.fit.system.beta)
    assert [row["name"] for row in result(folder / "run")["scores"]] == ["linear probe"]


def test_one_verdict_everywhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(folder / "more.npz", train=16)
    assert adapt(folder, data="more.npz") == 0
    told = " ".join(capsys.readouterr().out.replace("\u202f", " ").split())
    found, page = result(folder / "run"), (folder / "run" / "report.html").read_text()
    assert adapt(folder, "--json", "--overwrite", data="more.npz") == 0
    printed = json.loads(capsys.readouterr().out)
    fit = load_run(folder / "run").fit
    assert isinstance(fit, NestedFit)
    sentences = found["verdict"]["sentences"]
    assert printed["verdict"] == found["verdict"]
    assert found["report"]["headline"] == sentences
    assert fit.verdict in sentences
    assert sentences[0] in page
    assert fit.class_names == tuple(found["data"]["classes"])
    assert all(" ".join(one.replace("\u202f", " ").split()) in told for one in sentences)


def test_an_encoder_keeps_the_part_that_is_taken(folder: Path) -> None:
    lines = [
        "from torch import nn",
        "class Encoder(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.conv = nn.Conv2d(1, 4, 3)",
        "    def forward(self, x):",
        "        maps = self.conv(x).tanh()",
        "        return {'last_hidden_state': maps, 'pooled': maps.amax((2, 3))}",
    ]
    (folder / "encoders.py").write_text("\n".join(lines))
    given = ["--model", f"{folder / 'encoders.py'}:Encoder", "--output", "pooled"]
    given += ["--data", str(folder / "pictures.npz")]
    assert cli.main(["check", *given]) == 0
    assert cli.main(["adapt", *given, "--out", str(folder / "run")]) == 0
    run = load_run(folder / "run", trust=True)
    assert isinstance(run.fit, NestedFit)
    encoder, x = run.fit.module.model.get_submodule("body"), run.fit.x
    found = encoder(x)["pooled"]
    assert torch.allclose(run.fit.module.phi(x), found.double(), atol=1e-6)


def test_a_table_needs_no_network(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = ["--data", str(folder / "prices.csv")], str(folder / "run")
    assert cli.main(["adapt", *data, "--out", run]) == 0
    assert result(folder / "run")["verdict"]["answer"] == "use"
    assert cli.main(["predict", "--run", run, *data, "--out", str(folder / "p.csv")]) == 0
    assert cli.main(["adapt", "--data", str(folder / "pictures.npz"), "--out", str(folder / "x")]) == 2
    assert "--model must be given" in capsys.readouterr().err
