"""Two processes of torch.distributed: a test file run as a script, once a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.hangs import HANGS

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(script: str, folder: Path, world: int = 2, killed: tuple[int, ...] = ()) -> None:
    """Run ``script RANK WORLD FOLDER`` for every rank; all must succeed.

    Args:
        script: The test file, ``__file__``.
        folder: Where the ranks meet and leave their results.
        world: Number of ranks.
        killed: Ranks that signal 9 ends.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(script).resolve())]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder)], env=environment, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = []
    try:
        said = [process.communicate(timeout=HANGS)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    expected = [-signal.SIGKILL if rank in killed else 0 for rank in range(world)]
    assert [process.returncode for process in ranks] == expected, "\n".join(said)


@contextmanager
def one_of_ranks(rank: int, world: int, folder: Path, *, torchs_own: bool = False) -> Iterator[None]:
    """Be one rank of a group on the CPU, which meets in a file.

    Args:
        rank: Which.
        world: Number of ranks.
        folder: Where they meet.
        torchs_own: Whether torch exchanges tensors by itself, for ``DistributedDataParallel`` or a sharded
            network. The process then ends without tearing the interpreter down: a thread of gloo that still
            holds a tensor would abort it (linnet waits for that after its own exchanges).
    """
    store = torch.distributed.FileStore(str(folder / "store"), world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
    if torchs_own:
        sys.stdout.flush()
        os._exit(0)
