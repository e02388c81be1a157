"""`torchrun -m linnet`: the processes fit together, and the first one writes and speaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from linnet.app import cli
from tests.app.runs.small_tasks import write_nets, write_pictures
from tests.hangs import HANGS

ROOT = Path(__file__).resolve().parents[3]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "linnet"]


def torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *TORCHRUN, *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=HANGS,
    )  # fmt: skip


def words(data: str, out: str) -> list[str]:
    return ["adapt", "--model", "nets.py:conv", "--data", data, "--out", out]


def result(run: Path) -> Any:
    return json.loads((run / "result.json").read_text())


@pytest.mark.long
@pytest.mark.dist
def test_two_processes_make_the_run_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nets(tmp_path)
    write_pictures(tmp_path / "pictures.npz")
    done = torchrun(tmp_path, *words("pictures.npz", "two"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1
    monkeypatch.chdir(tmp_path)
    assert cli.main(words("pictures.npz", "one")) == 0
    names = {path.name for path in Path("one").iterdir()}
    assert {path.name for path in Path("two").iterdir()} == names
    one, two = result(Path("one")), result(Path("two"))
    assert one["fit"]["ridge"] == pytest.approx(two["fit"]["ridge"], rel=1e-6)
    for a, b in zip(one["scores"], two["scores"], strict=True):
        assert a["nll"] == pytest.approx(b["nll"], rel=1e-4)


@pytest.mark.dist
@pytest.mark.long
def test_an_error_of_two_processes_is_told_once(tmp_path: Path) -> None:
    write_nets(tmp_path)
    again = torchrun(tmp_path, *words("nothing.npz", "third"))
    assert again.returncode != 0
    assert again.stderr.count("error:     on rank 0: --data is nothing.npz, and there is no such file") == 1
    assert not (tmp_path / "third").exists()


@pytest.mark.dist
@pytest.mark.long
def test_commands_of_one_process_run_on_the_first(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "doctor", "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("everything that linnet needs") == 1
