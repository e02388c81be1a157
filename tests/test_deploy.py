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

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"


def run(*words: str, **variables: str) -> str:
    environment = {
        **os.environ, "PYTHONPATH": str(DEPLOY.parent / "src"), "OMP_NUM_THREADS": "1", **variables
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *words], cwd=DEPLOY, env=environment, capture_output=True, text=True, timeout=240
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


def test_the_parts_of_the_kernel_end_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "kernel.npy"
    first, second = (run("kernel.py", "--file", str(file), "--part", f"{i}/2") for i in range(2))
    assert first == "part 0 of 2 is done\n"
    assert "is complete: (300, 300)" in second
    kernel = np.load(file)
    assert np.array_equal(kernel, kernel.T)


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
