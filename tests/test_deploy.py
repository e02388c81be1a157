"""The examples in deploy/ run: on one process, on two, and part by part."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.app.runs.small_tasks import write_nets, write_pictures
from tests.hangs import HANGS

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"


def run(*words: str, **variables: str) -> str:
    environment = {
        **os.environ, "PYTHONPATH": str(DEPLOY.parent / "src"), "OMP_NUM_THREADS": "1", **variables
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *words], cwd=DEPLOY, env=environment, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.dist
@pytest.mark.long
def test_the_fit_is_the_same_on_two_processes(tmp_path: Path) -> None:
    alone = run("fit.py", OUT=str(tmp_path / "one"))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert run(*torchrun, "fit.py", OUT=str(tmp_path / "two")) == alone
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == sorted(
        p.name for p in (tmp_path / "one").iterdir()
    )


@pytest.mark.long
def test_the_parts_of_the_kernel_end_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "kernel.npy"
    first, second = (run("kernel.py", "--file", str(file), "--part", f"{i}/2") for i in range(2))
    assert first == "part 0 of 2 is done\n"
    assert "is complete: (300, 300)" in second
    kernel = np.load(file)
    assert np.array_equal(kernel, kernel.T)


@pytest.mark.skipif(shutil.which("bash") is None, reason="runs a script of bash")
@pytest.mark.long
def test_the_array_job_and_its_report(tmp_path: Path) -> None:
    """Tasks 0 and 63 of 64, one of them again among fewer tasks, and the report of all."""
    write_nets(tmp_path)
    write_pictures(tmp_path / "pictures.npz", train=12)
    (tmp_path / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "linnet").write_text(f'#!/bin/sh\nexec {sys.executable} -m linnet "$@"\n')
    for name in ("srun", "linnet"):
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PYTHONPATH": str(DEPLOY.parent / "src"), "OMP_NUM_THREADS": "1", "DEVICE": "cpu",
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SCRATCH": str(tmp_path),
    }  # fmt: skip

    def submitted(**variables: str) -> str:
        words = ["bash", str(DEPLOY / "slurm_array.sh"), f"{tmp_path / 'nets.py'}:conv"]
        done = subprocess.run(
            [*words, str(tmp_path / "pictures.npz")], cwd=tmp_path, env={**environment, **variables},
            capture_output=True, text=True, timeout=HANGS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.split())  # lines are folded at 80 columns

    file = tmp_path / "kernel.npy"
    said = submitted(SLURM_ARRAY_TASK_ID="63", SLURM_ARRAY_TASK_COUNT="64")
    assert said == f"part 63 of 64 of {file} is done; missing: 0-62"
    said = submitted(SLURM_ARRAY_TASK_ID="3", SLURM_ARRAY_TASK_COUNT="2")
    assert said == f"part 3 of 64 of {file} is done; missing: 0-2, 4-62"
    assert "training samples" in submitted(SLURM_ARRAY_TASK_ID="0", OUT="verdict")
    assert np.load(file).shape == (36, 3, 36, 3)
    assert (tmp_path / "verdict" / "report.html").exists()


@pytest.mark.parametrize("script", sorted(path.name for path in DEPLOY.glob("*.sh")))
def test_scripts_are_bash(script: str) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", str(DEPLOY / script)], check=True)
    text = (DEPLOY / script).read_text()
    assert "set -euo pipefail" in text
    assert os.access(DEPLOY / script, os.X_OK)


def test_the_example_of_ray_names_what_exists() -> None:
    """Ray is not among the packages of the tests."""
    tree = ast.parse((DEPLOY / "ray_fit.py").read_text())
    names = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "fit"]
    assert [alias.name for node in names for alias in node.names] == ["fit"]
    assert "def fit(out: Path)" in (DEPLOY / "fit.py").read_text()
