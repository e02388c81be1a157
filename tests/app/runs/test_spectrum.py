"""`linnet spectrum`: from a run and from a network with data, its page, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from linnet.app import cli
from linnet.tangent import gram as gram_module
from tests.app.runs.small_tasks import result as read
from tests.app.runs.small_tasks import write_nets, write_pictures, write_table
from tests.hangs import HANGS
from tests.report.test_page import Page

PART = ["--model", "nets.py:conv", "--data", "pictures.npz", "--kernel", "k.npy"]


def spectrum(*words: object) -> int:
    """Run the command in this process."""
    return cli.main(["spectrum", *map(str, words)])


def in_a_process(words: list[str], folder: Path) -> dict[str, Any]:
    """What the command prints as a process of its own."""
    environment = {**os.environ, "PYTHONWARNINGS": "error::UserWarning", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "linnet.app.cli", *words],
        capture_output=True, text=True, env=environment, cwd=folder, timeout=HANGS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.long
def test_from_a_network_and_data_as_a_process(tmp_path: Path) -> None:
    write_nets(tmp_path)
    write_pictures(tmp_path / "pictures.npz")
    words = ["spectrum", "--model", "nets.py:conv", "--data", "pictures.npz", "--out", "found", "--json"]
    printed, kept = in_a_process(words, tmp_path), read(tmp_path / "found")
    assert kept.items() >= printed.items()
    assert printed["command"] == "spectrum"
    assert printed["held_out"]["accuracy"] > 0.8
    assert printed["verdict"]["level"] == "well"
    assert printed["lift"] > 1
    assert printed["energy"]["rows"] == 72
    assert 0 < printed["effective_dimension"] < 72
    assert {row["name"] for row in printed["scores"]} == {"linear fit", "network, fitted weights"}
    assert kept["report"]["task"]["shares"] == printed["energy"]["shares"]
    assert (tmp_path / "found" / "run.yaml").exists()
    # what is written there can be asked for again
    words = ["spectrum", "--config", "found/run.yaml", "--out", "again", "--json"]
    assert in_a_process(words, tmp_path)["energy"] == printed["energy"]


def weights_of(said: str) -> int:
    """The number of weights of the network that was examined, as the first line tells it."""
    return int(said.splitlines()[0].rpartition("; ")[2].partition(" weights")[0].replace(",", ""))


def test_of_a_run(workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = workshop / "pictures"
    before = (run / "report.html").read_bytes()
    assert spectrum("--run", run, "--top", 7, "--out", workshop / "seen") == 0
    said = capsys.readouterr().out
    found = read(workshop / "seen")
    assert "Linear fine-tuning is likely to" in said
    assert "top 7" in said
    assert "one linearization at a random head" in said
    assert weights_of(said) > json.loads((run / "result.json").read_text())["fit"]["parameters"]
    assert found["scores"][0]["accuracy"] > 0.8
    assert (run / "report.html").read_bytes() == before


def test_of_a_regression_beside_the_run(workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = workshop / "prices"
    assert spectrum("--run", run) == 0
    found = read(run / "spectrum")
    assert found["held_out"]["accuracy"] is None
    assert found["held_out"]["explained"] > 0.5
    assert found["scores"][0]["rmse"] > 0
    assert "explained to" in capsys.readouterr().out


def test_what_the_fit_warns_of_is_a_note(workshop: Path, tmp_path: Path) -> None:
    data, out = write_table(tmp_path / "a.csv", lines=20), tmp_path / "spectrum"
    data.write_text(data.read_text() + 4 * "0.5,0.5,0.5,100\n")
    words = ["--data", data, "--model", f"{workshop / 'nets.py'}:mlp", "--out", out]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spectrum(*words) == 0
    assert sum("are copies of others" in one for one in read(out)["findings"]) == 1


@pytest.mark.drawings
def test_the_page(workshop: Path) -> None:
    out = workshop / "page"
    assert spectrum("--run", workshop / "pictures", "--out", out, "--samples", 12) == 0
    text = (out / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    ids = [values["id"] for tag, values in page.tags if tag == "section"]
    assert ids == ["linear", "good", "choices", "timings"]
    labels = [str(values["aria-label"]) for tag, values in page.tags if tag == "svg"]
    assert any("directions hold" in label for label in labels)
    assert any("eigenvalues of the kernel" in label for label in labels)
    found = read(out)
    for sentence in (found["verdict"]["text"], *found["verdict"]["reasons"]):
        assert sentence in " ".join(" ".join(page.words).split())
    assert "12 of 24" in text
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "--data and --run are not given"),
        (["--model", "nets.py:conv", "--data", "pictures.npz"], "--out must be given"),
        (["--run", "run", "--data", "pictures.npz"], "--data and --run are both given"),
        (["--run", "absent"], "there is no run folder absent"),
        (["--run", "nets.py"], "run is nets.py, a file"),
        (["--run", "run", "--out", "run"], "are the same folder"),
        (["--run", "run", "--out", "other"], "which holds a run"),
        (["--run", "run", "--top", "0"], "--top 0"),
        (["--run", "run", "--top", "73"], "top is 73"),
        (["--run", "run", "--top", "many"], "--top is 'many'"),
        (["--run", "run", "--samples", "25"], "--samples 25"),
        (["--run", "run", "--samples", "1"], "--samples 1"),
        (["--model", "nets.py:conv", "--data", "pictures.npz", "--out", "o", "--top", "-3"], "--top -3"),
        (["--model", "nets.py:conv", "--data", "pictures.npz", "--out", "o", "--top", "9000"], "top is 9000"),
        (["--model", "nets.py:conv", "--data", "pictures.npz", "--out", "o", "--samples", "900"], "2 to 24"),
        (["--model", "nets.py:noisy", "--data", "pictures.npz", "--out", "o"], "cannot be linearized"),
        (
            ["--model", "nets.py:conv", "--data", "pictures.npz", "--part", "3/64"],
            "part is '3/64', with kernel None",
        ),
        ([*PART, "--part", "3/3"], "part is '3/3'"),
        ([*PART, "--part", "three"], "part is 'three'"),
        ([*PART[:2], *PART[4:], "--part", "0/2"], "--data and --run are not given"),
        ([*PART[:-1], "absent/k.npy", "--part", "0/2"], "its folder does not exist"),
        ([*PART[:-1], "k.bin", "--part", "0/2"], "a name that ends in .npy"),
        (["--run", "run", "--kernel", "k.npy"], "no --kernel where there is one"),
    ],
)
@pytest.mark.thinned(3)
def test_wrong_input(
    workshop: Path, words: list[str], what: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(workshop)
    for name, run in (("run", "pictures"), ("other", "prices")):
        if not (workshop / name).exists():
            (workshop / name).symlink_to(workshop / run)
    assert cli.main(["spectrum", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert what in said.err
    assert "expected:" in said.err
    assert "Traceback" not in said.err
    assert not (workshop / "o").exists()


@pytest.mark.long
def test_a_kernel_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tasks of an array job, of which one never ran; then the report, which computes what is missing."""
    write_nets(tmp_path)
    write_pictures(tmp_path / "pictures.npz")
    kernel, run, steps = tmp_path / "kernel.npy", gram_module._run, list[str]()

    def noting(step: Any, held: Any, task: Any, *others: Any) -> None:
        steps.extend([step.key] if task.x2 is None else [])  # those of test samples come anew each time
        run(step, held, task, *others)

    monkeypatch.setattr(gram_module, "_run", noting)
    words = ["--model", f"{tmp_path / 'nets.py'}:conv", "--data", tmp_path / "pictures.npz"]
    for part, missing in ((3, "0-2"), (1, "0, 2")):
        assert spectrum(*words, "--kernel", kernel, "--part", f"{part}/4") == 0
        said = capsys.readouterr().out
        assert said == f"part {part} of 4 of {kernel} is done; missing: {missing}\n"
    assert spectrum(*words, "--kernel", kernel, "--part", "0/4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["missing"] == [2]
    assert spectrum(*words, "--kernel", kernel, "--part", "1/2") == 2
    assert "is made in 4 parts, and this is one of 2" in capsys.readouterr().err
    assert spectrum(*words, "--kernel", kernel, "--part", "2/4", "--seed", 1) == 2
    assert "belongs to another run, of other weights" in capsys.readouterr().err
    before = len(steps)
    assert spectrum(*words, "--kernel", kernel, "--out", tmp_path / "found") == 0
    assert 0 < before < len(steps) == len(set(steps)), "steps were computed twice"
    assert spectrum(*words, "--kernel", kernel, "--part", "2/4") == 0
    assert "the kernel is complete" in capsys.readouterr().out
    steps.clear()
    assert spectrum(*words, "--kernel", kernel, "--out", tmp_path / "again", "--top", 5) == 0
    assert not steps
    made = kernel.read_bytes()
    for others in (("--shots", 3), ("--seed", 1), ("--model-args", '{"width": 3}')):
        assert spectrum(*words, *others, "--kernel", kernel, "--out", tmp_path / "other") == 2
        assert "holds the kernel of another run, of other " in capsys.readouterr().err
    assert kernel.read_bytes() == made
    assert spectrum(*words, "--out", tmp_path / "whole") == 0
    found, whole = read(tmp_path / "found"), read(tmp_path / "whole")
    assert found["effective_dimension"] == pytest.approx(whole["effective_dimension"], rel=1e-4)
    assert found["scores"] == whole["scores"]
    assert kernel.exists()
    assert not list((tmp_path / "whole").glob("kernel*"))
