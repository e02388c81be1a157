"""Work that is killed with signal 9 at random moments after its first file, and then taken up again.

Run as a script it does one kind of work in processes of its own, forked once everything is imported. A moment
is a number of function calls since the first file was opened for writing, so a seed gives the same moments on
every machine.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import linnet
from linnet.app import cli
from linnet.app.runs import adaptation, results
from linnet.continual import OnlineLaplace
from linnet.files import write_atomic
from linnet.likelihoods import Categorical
from linnet.tangent import store
from tests.app.runs.small_tasks import write_nets, write_pictures
from tests.continual.continual_cases import small_network, small_task

ROOT = Path(__file__).resolve().parents[1]
LOADED = (adaptation, results)  # imported here, so that no process has to
TASKS, STEPS = 3, 4


def adapt(run: Path) -> None:
    """The command line, with a kernel in several tiles."""
    store.RECORD_SECONDS = 0.0  # record every step at once
    words = ["--model", f"{run.parent / 'nets.py'}:conv", "--model-args", '{"width": 300}']
    words += ["--memory", "1500kB"]
    assert cli.main(["adapt", *words, "--data", str(run.parent / "pictures.npz"), "--out", str(run)]) == 0


def finetune(run: Path) -> None:
    """Fine-tuning that keeps its state after every step."""
    torch.manual_seed(0)
    x, y = small_task(0)
    linnet.finetune(
        small_network(),
        (x, y),
        training=linnet.Training(steps=6, batch_size=8, learning_rate=0.05),
        run=linnet.Run(checkpoint=run, save_every=1),
    ).save(run / "result")


def stream(run: Path) -> None:
    """Tasks one after another under a penalty; weights, optimizer and memory go into one file."""
    torch.manual_seed(0)
    net = small_network()
    method, optimizer = OnlineLaplace(net, Categorical()), torch.optim.Adam(net.parameters(), 0.05)
    done, file = 0, run / "stream.pt"
    if file.exists():
        state = torch.load(file, weights_only=True)
        net.load_state_dict(state["net"])
        method.load_state_dict(state["method"])
        optimizer.load_state_dict(state["optimizer"])
        done = int(state["done"])
    for k in range(done, TASKS * STEPS):
        x, y = small_task(k // STEPS)
        optimizer.zero_grad()
        (F.cross_entropy(net(x), y, reduction="sum") + method.penalty()).backward()
        optimizer.step()
        if k % STEPS == STEPS - 1:
            method.consolidate((x, y))
        state = {
            "net": net.state_dict(), "method": method.state_dict(), "optimizer": optimizer.state_dict(),
            "done": k + 1,
        }  # fmt: skip
        write_atomic(file, lambda partial, state=state: torch.save(state, partial))  # type: ignore[misc]


WORK: dict[str, Callable[[Path], None]] = {"adapt": adapt, "finetune": finetune, "stream": stream}


class Counter:
    """Counts function calls from the first file that is opened for writing in a folder.

    Args:
        folder: The folder.
        moment: Calls after which the process is killed; ``None`` for never.
    """

    def __init__(self, folder: Path, moment: int | None) -> None:
        self.folder, self.moment, self.calls, self.started = str(folder), moment, 0, False
        sys.addaudithook(self.watch)

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Begin with the first file."""
        if self.started or event != "open" or not isinstance(arguments[0], str | os.PathLike):
            return
        writes = arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes and os.fspath(arguments[0]).startswith(self.folder):
            self.started = True
            sys.setprofile(self.count)

    def count(self, frame: object, event: str, argument: object) -> None:
        """One more call, or the last."""
        self.calls += 1
        if self.calls == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)


def forked(kind: str, run: Path, moment: int | None) -> int:
    """Do the work in another process; how it ended, as ``subprocess`` says it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        torch.set_num_threads(1)
        run.mkdir(exist_ok=True)
        counter = Counter(run, moment)
        WORK[kind](run)
        sys.setprofile(None)
        run.with_suffix(".calls").write_text(str(counter.calls))
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def kill_and_resume(kind: str, folder: Path, moments: int, seed: int) -> None:
    """The work as a whole, then killed at each moment and done again."""
    assert forked(kind, folder / "whole", None) == 0
    calls = int((folder / "whole.calls").read_text())
    for i, moment in enumerate(random.Random(seed).sample(range(1, calls - 50), moments)):
        run = folder / f"killed{i}"
        assert forked(kind, run, moment) == -signal.SIGKILL, (moment, calls)
        assert forked(kind, run, None) == 0, (moment, calls)


def start(kind: str, folder: Path, moments: int, seed: int = 0) -> subprocess.CompletedProcess[str]:
    """All of it in a process without other threads, from which it is safe to fork."""
    write_nets(folder)
    write_pictures(folder / "pictures.npz", train=10, test=2)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "LINNET_PROGRESS": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    words = [sys.executable, __file__, kind, str(folder), str(moments), str(seed)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    kill_and_resume(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
