"""Sums and kernels that are killed with signal 9 at random moments go on to the same bits, and leave no file.

Run as a script (``KIND MOMENTS FOLDER``) this file is the process that starts and kills others. It never runs
a network itself, so that the ones that it forks can.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import linnet
from linnet.fitting import Sketch
from linnet.likelihoods import Categorical
from linnet.linear import formed_rows
from linnet.tangent import store
from linnet.tangent.gram import gram
from linnet.unfinished import Checkpoint, resumable
from tests.curvatures.side_by_side import curvature_of
from tests.hangs import HANGS
from tests.tangent.test_gram import streaming
from tests.zoo import case

ROOT = Path(__file__).resolve().parents[1]
N = 40


def sums(file: Path | None) -> Tensor:
    """EKFAC and diagonal in two passes of N batches."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, *case("lenet").x1.shape[1:], generator=generator, dtype=torch.float64)
    y = torch.randint(3, (N,), generator=generator)
    structures = ["ekfac", "diagonal"]
    made = curvature_of(case("lenet").model(), (x, y), Categorical(), structures, block=1, file=file)
    return torch.cat([one.diagonal() for one in made.values()])


def kernel(file: Path | None) -> Tensor:
    """A kernel in many steps."""
    function, x, _, budget = streaming()
    return gram(function, x, memory=budget, file=file).clone()


def fits(file: Path | None) -> Tensor:
    """A fit by a sketch and one by the kernel, in many blocks."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N // 2, *case("lenet").x1.shape[1:], generator=generator, dtype=torch.float64)
    targets = torch.randn(N // 2, 4, generator=generator, dtype=torch.float64)
    formed_rows.LARGEST = 2
    lin = linnet.linearize(case("lenet").model())
    with nullcontext() if file is None else resumable(file, interval=0):
        solver = Sketch(dim=60, basis="kfac", examples=10)
        sketched = linnet.fit(lin, (x, targets), solver=solver, ridge="loo")
        dual = linnet.fit(lin, (x, targets), solver="dual", ridge=10.0)
    return torch.cat([sketched.predict(x), dual.predict(x)])


# what is computed, the file of the result, and that of unfinished work
KINDS: dict[str, tuple[Callable[[Path | None], Tensor], str, str]] = {
    "curvature": (
        sums,
        "sums.safetensors",
        "sums.safetensors",
    ),
    "gram": (kernel, "kernel.npy", "kernel.npy.steps.json"),
    "fit": (fits, "sums", "sums/0-of-1"),
}


def forked(work: Callable[[], object]) -> int:
    """A process that does the work."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def started(own: Path, compute: Callable[[Path | None], Tensor], name: str, unfinished: str) -> int:
    """A process that has written its unfinished work for the first time."""
    own.mkdir()
    pid, deadline = forked(lambda: compute(own / name)), time.monotonic() + HANGS
    while not (own / unfinished).exists():
        assert time.monotonic() < deadline, "it writes unfinished work"
        time.sleep(0.0002)
    return pid


def kill(kind: str, moments: int, folder: Path) -> None:
    """Kill the work at so many moments of the time that it takes, and let another process go on each time."""
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # else every process imports it anew
    Checkpoint.note = Checkpoint.write  # type: ignore[method-assign]  # after every batch
    store.RECORD_SECONDS = 0.0
    compute, name, unfinished = KINDS[kind]
    random.seed(7)
    pid, begun = started(folder / "whole", compute, name, unfinished), time.monotonic()
    assert os.waitpid(pid, 0)[1] == 0
    length, killed = time.monotonic() - begun, 0
    for attempt in range(10 * moments):
        own = folder / str(attempt)
        pid = started(own, compute, name, unfinished)
        time.sleep(random.random() * length)
        os.kill(pid, signal.SIGKILL)
        if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):  # it was done before
            continue

        def go_on(own: Path = own, result: Path = folder / f"result{killed}.pt") -> None:
            torch.save(compute(own / name), result)

        assert os.waitpid(forked(go_on), 0)[1] == 0
        left = {path.name for path in own.iterdir()}
        assert left <= {name, f"{name}.made.json"} - {unfinished} - {"sums"}, left
        killed += 1
        if killed == moments:
            return
    raise AssertionError(f"killed {killed} times")


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes to kill on this system")
@pytest.mark.parametrize("moments", [3, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments(kind: str, moments: int, tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "LINNET_PROGRESS": "0"}
    command = [sys.executable, __file__, kind, str(moments), str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = KINDS[kind][0](None if kind == "fit" else tmp_path / KINDS[kind][1])
    finally:
        torch.set_num_threads(threads)
    for moment in range(moments):
        assert torch.equal(torch.load(tmp_path / f"result{moment}.pt", weights_only=True), expected)


if __name__ == "__main__":
    kill(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
