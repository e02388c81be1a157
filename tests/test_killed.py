"""Work killed with signal 9 after its first file ends, taken up again, with the same numbers and files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from linnet.files import load
from linnet.tree import flatten
from tests.grids import grid
from tests.killing import start

KINDS = ("adapt", "finetune", "stream")
RESULTS = {
    "adapt": "nested-fit.safetensors",
    "finetune": "result/finetuned.safetensors",
    "stream": "stream.pt",
}


def numbers(kind: str, run: Path) -> dict[str, torch.Tensor]:
    """The tensors of a result."""
    file = run / RESULTS[kind]
    if kind != "stream":
        return flatten(load(file, file.stem))[1]
    state = torch.load(file, weights_only=True)
    found = dict(state["net"])
    pending = [("method", state["method"]), ("optimizer", state["optimizer"])]
    while pending:
        name, value = pending.pop()
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            pending += [(f"{name}/{key}", part) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(f"{name}/{key}", part) for key, part in enumerate(value)]
    return found


def files(run: Path) -> set[str]:
    """All files, hidden ones too."""
    return {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}


def check(kind: str, folder: Path, moments: int) -> None:
    """Every killed run ended as the whole one."""
    done = start(kind, folder, moments)
    assert done.returncode == 0, done.stderr[-4000:]
    whole = numbers(kind, folder / "whole")
    assert whole
    for i in range(moments):
        run = folder / f"killed{i}"
        assert files(run) == files(folder / "whole")
        found = numbers(kind, run)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole), (kind, i)


@pytest.mark.skipif(os.name != "posix", reason="kills with SIGKILL")
@pytest.mark.parametrize("kind", grid(KINDS, ("stream",)))
def test_killed_and_resumed(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path, 1)


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="kills with SIGKILL")
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_twenty_moments(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path, 20)
