"""The processes that torchrun started for one command: all fit, and the first writes.

Every process reads the data and builds the network; the fit is divided among them. After it the group ends,
the first process evaluates and writes, and the others have done their part.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch

from linnet.distributed import collective, require_same_arguments, sharing, world


class Released(Exception):
    """This process has done its part, and the first one goes on alone."""


class Group:
    """The processes of torchrun as one group until ``leave``; nothing for a process by itself."""

    def __init__(self, what: str, device: str) -> None:
        self.what, self.device = what, device
        self._call: AbstractContextManager[None] | None = None

    def __enter__(self) -> Group:
        if started() == 1 or world()[1] > 1:
            return self
        on_gpus = self.device.startswith("cuda")
        if on_gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group("nccl" if on_gpus else "gloo")
        self._call = collective(self.what)
        self._call.__enter__()
        _groups.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _groups:
            self.end(kind, error, trace)

    def end(self, *failure: Any) -> None:
        """End the group, on all of its processes."""
        _groups.remove(self)
        assert self._call is not None
        try:
            self._call.__exit__(*(failure or (None, None, None)))
        finally:
            torch.distributed.destroy_process_group()


_groups: list[Group] = []


def started() -> int:
    """The number of processes that torchrun has started; 1 where it has not."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return not _groups or world()[0] == 0


@contextmanager
def shared_fit(device: str, **arguments: Any) -> Iterator[None]:
    """Divide a fit among the processes."""
    with sharing("the fit", device):
        require_same_arguments(arguments)
        yield


def leave() -> None:
    """End the group after the fit; the first process goes on alone."""
    if not _groups:
        return
    first = is_first()
    _groups[-1].end()
    if not first:
        raise Released
