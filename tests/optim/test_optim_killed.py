"""Training that is killed with signal 9 goes on, in another process, to the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.files import write_atomic
from linnet.optim import Converged, GaussNewton, IterativeLinearization
from tests.hangs import HANGS
from tests.optim.gauss_newton_cases import classes, classifier, flat, mlp

ROOT = Path(__file__).resolve().parents[2]
STEPS = 14


class Run:
    """A network with whatever trains it, and a step of it."""

    def __init__(self, kind: str) -> None:
        self.net: nn.Sequential = mlp()
        self.trainer: GaussNewton | IterativeLinearization
        if kind == "linearizations":
            self.trainer = IterativeLinearization(
                self.net, lambda p: torch.optim.Adam(p, 0.01), Converged(0.5, most=4)
            )
        else:
            self.trainer = classifier(self.net, structure=kind, momentum=True)

    def step(self, k: int) -> None:
        """Step k on batch k."""
        x, y = classes(seed=k)
        if isinstance(self.trainer, GaussNewton):
            self.trainer.step(x, y)
        else:
            self.trainer.step(lambda module: F.cross_entropy(module(x), y))

    def save(self, file: Path, done: int) -> None:
        """Everything, as one file that is there as a whole or not at all."""
        state = {"net": self.net.state_dict(), "trainer": self.trainer.state_dict(), "done": done}
        write_atomic(file, lambda partial: torch.save(state, partial))

    def load(self, file: Path) -> int:
        """Go on from a file; the number of steps done."""
        state = torch.load(file, weights_only=True)
        self.net.load_state_dict(state["net"])
        self.trainer.load_state_dict(state["trainer"])
        return int(state["done"])


KINDS = ("kfac", "kfra", "linearizations")


def train(folder: Path, pause: float) -> None:
    """All kinds, from where an earlier process came to; a file after every step."""
    torch.set_num_threads(1)
    runs = {kind: Run(kind) for kind in KINDS}
    done = {kind: run.load(folder / kind) if (folder / kind).exists() else 0 for kind, run in runs.items()}
    for k in range(STEPS):
        for kind, run in runs.items():
            if k >= done[kind]:
                run.step(k)
                run.save(folder / kind, k + 1)
                time.sleep(pause)


def start(folder: Path, pause: float) -> subprocess.Popen[bytes]:
    """The training in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, __file__, str(folder), str(pause)], env=environment)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no signal 9 on this system")
def test_killed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    process = start(folder, pause=0.2)
    last = folder / KINDS[-1]
    deadline = time.monotonic() + HANGS
    while not (last.exists() and torch.load(last, weights_only=True)["done"] >= 5):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=HANGS) == -signal.SIGKILL
    for kind in KINDS:
        assert 5 <= torch.load(folder / kind, weights_only=True)["done"] < STEPS
    assert start(folder, pause=0.0).wait(timeout=HANGS) == 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind in KINDS:
            whole = Run(kind)
            for k in range(STEPS):
                whole.step(k)
            resumed = Run(kind)
            assert resumed.load(folder / kind) == STEPS
            kept: Tensor = flat(resumed.net)
            assert torch.equal(kept, flat(whole.net)), kind
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]))
