"""The benchmark of accelerators runs from end to end at toy size, on the pretend device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.backend_registration

from tests.hangs import HANGS

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
def test_every_part_has_its_rows_on_the_page(tmp_path: Path) -> None:
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("torch has no devices made in Python yet")
    pytest.importorskip("transformers")
    parts = ["rates", "kernel", "types", "curvature", "vision", "language", "tokens", "many"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/accelerator.py", "--device", "pretend", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--parts", *parts],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads((tmp_path / "accelerator.json").read_text())["parts"]
    assert list(found) == parts
    assert all(part["rows"] and "failed" not in part for part in found.values())
    page = (tmp_path / "accelerator.md").read_text()
    assert all(f"## {name}" in page and found[name]["rows"][0]["name"] in page for name in parts)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["accelerator.json", "accelerator.md"]
