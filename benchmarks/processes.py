"""Work and time of shared calls on one and two processes. Claim: about half of the operations on each of two.

    python benchmarks/processes.py --json processes.json

Each call runs on one process and on two of one machine (gloo, one thread each), in turns. Operations are
torch's count of matrix products in the process that has most of them, and n³ summed over the matrices whose
eigenvectors a process computes; bytes are those that a process hands to
``all_reduce`` and ``broadcast``. Times are the least of all turns, and processor times those of the process
that takes most; on a machine of two busy cores two processes cannot take half of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Row, parser, publish, setup
from networks import lenet
from torch.utils.flop_counter import FlopCounterMode

import linnet
from linnet.fitting import CG
from linnet.linalg import factorize

EXAMPLES = 240


def calls() -> dict[str, Callable[[], object]]:
    """The calls, on images."""
    torch.manual_seed(0)
    x, y = torch.randn(EXAMPLES, 3, 32, 32), torch.randn(EXAMPLES, 2)
    lin = linnet.linearize(lenet(2))
    few, kfac = CG(1e-2, preconditioner="none"), CG(0.5, preconditioner="kfac")
    return {
        "kernel, full": lambda: linnet.spectrum.gram(lin, x),
        "kernel, trace": lambda: linnet.spectrum.gram(lin, x, form="trace"),
        "fit by the kernel": lambda: linnet.fit(lin, (x, y), solver="dual", ridge=100.0),
        "fit by conjugate gradients": lambda: linnet.fit(lin, (x, y), solver=few, ridge=100.0),
        "preconditioner of K-FAC": lambda: linnet.fit(lin, (x, y), solver=kfac, ridge=100.0),
    }


class Sent:
    """Counts the bytes that this process hands to others."""

    def __init__(self) -> None:
        self.total = 0
        for name in ("all_reduce", "broadcast"):
            setattr(torch.distributed, name, self._counting(getattr(torch.distributed, name)))

    def _counting(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            self.total += tensor.nbytes
            return exchange(tensor, *arguments, **options)

        return counted


class Decomposed:
    """Sums n³ over the Kronecker factors that this process decomposes."""

    def __init__(self) -> None:
        self.total, self.eigh = 0.0, factorize.eigh
        factorize.eigh = self

    def __call__(self, matrix: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Decompose and count."""
        self.total += float(matrix.numel() * matrix.shape[-1])
        return self.eigh(matrix, name)


def run_rank(rank: int, world: int, folder: Path) -> None:
    """One process: every call once to warm up, then counted and timed."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    sent, decomposed, found = Sent(), Decomposed(), {}
    for name, call in calls().items():
        call()
        before, cubes = sent.total, decomposed.total
        with FlopCounterMode(display=False) as counter:
            call()
        cubes = decomposed.total - cubes
        between, begin, used = sent.total, time.perf_counter(), time.process_time()
        call()
        found[name] = {
            "operations": counter.get_total_flops(),
            "cubes": cubes,
            "bytes": between - before,
            "seconds": time.perf_counter() - begin,
            "processor": time.process_time() - used,
        }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def measured(world: int) -> list[dict[str, Any]]:
    """What each of so many processes has found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, str(rank), str(world), folder], env=environment)
            for rank in range(world)
        ]
        if any([rank.wait() for rank in ranks]):
            raise RuntimeError("a process failed")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def rows(repeats: int) -> list[Row]:
    """One row for each call and number of processes."""
    turns: dict[int, list[list[dict[str, Any]]]] = {1: [], 2: []}
    for _ in range(repeats):
        for world, runs in turns.items():
            runs.append(measured(world))
    found = []
    for name, alone in turns[1][0][0].items():
        for world, runs in turns.items():
            seconds = min(max(rank[name]["seconds"] for rank in run) for run in runs)
            most = max(rank[name]["operations"] for rank in runs[0])
            sent = max(rank[name]["bytes"] for rank in runs[0])
            used = min(max(rank[name]["processor"] for rank in run) for run in runs)
            cubes = max(rank[name]["cubes"] for rank in runs[0])
            note = f"{most / 1e9:.2f} G operations, {sent / 1e6:.1f} MB sent, processor {used:.2f} s"
            note += f", decompositions {cubes / 1e6:.1f} M n³" if cubes else ""
            share, bound = most / alone["operations"], 0.6 if world > 1 else 1.0
            found.append(Row(f"{name}, {world} process(es)", seconds, share, "<=", bound, note))
    return found


if __name__ == "__main__":
    if "--rank" in sys.argv:
        at = sys.argv.index("--rank")
        run_rank(int(sys.argv[at + 1]), int(sys.argv[at + 2]), Path(sys.argv[at + 3]))
    else:
        arguments = parser(__doc__, threads=1, repeats=3).parse_args()
        setup(arguments.threads)
        publish("processes", rows(arguments.repeats), arguments.json)
