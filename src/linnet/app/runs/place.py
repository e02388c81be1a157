"""The output folder of a run, and the processes that write it.

A folder is created or refused, written by one process, and cleaned up after a failure. The operating system
releases its lock when the process ends; where the file system has no locks, nothing is locked. Of the
processes that torchrun started, every one reads the data, builds the network and does its part of the fit;
then the group ends, and the first evaluates and writes.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch

from linnet.distributed import collective, require_same_arguments, sharing, world
from linnet.errors import InputError
from linnet.files import close_lock, open_lock, try_lock

RECORD = "run.json"
KERNEL_FILE = "kernel.npy"
TRAINING = "training"  # folder of networks that --tune has trained, until all are
REPLAY = "run.yaml"
_FILES = (
    RECORD, "model.safetensors", "nested-fit.safetensors", "linear-fit.safetensors",
    "samples.safetensors", "result.json", "report.html", "predictions.csv", "predictions.json", REPLAY,
)  # fmt: skip
_FOLDERS = ("predict", "explain", "spectrum")
_DEMO = ("digits.npz", "digits-flipped.npz", "pretrained.safetensors", "flipped", "forgotten")
LOCK = ".linnet.lock"
PAUSE = 0.05  # seconds between two tries
GLANCE = 0.5  # seconds of trying at least: a reader holds the lock for an instant to see whether it is free
MOMENT = 10.0  # seconds that writing a report may take another process


def check_out(out: Path, source: Path | None = None) -> None:
    """Require a place where a run can be written."""
    if out == Path():
        raise InputError(
            "out is the current folder",
            expected="a run folder, new or existing",
            remedy="name one, such as --out runs/first",
        )
    for place in (out, *out.absolute().parents):
        if place.exists():
            if not place.is_dir():
                raise InputError(
                    f"out is {out}, but {place} is a file",
                    expected="a run folder, new or existing",
                    remedy="name another folder",
                )
            break
    if source is not None and out.resolve() == source.resolve():
        raise InputError(
            f"out and run are the same folder, {out}",
            expected="another folder, to keep the old run",
            remedy="name another folder with --out",
        )


def check_file(out: Path, endings: Sequence[str], overwrite: bool) -> None:
    """Require a file of a kind that can be written, in a folder that is there, and that no other is lost."""
    if out.suffix.lower() not in endings or out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(
            f"out is {out}",
            expected=f"a file that ends in {' or '.join(endings)}, in a folder that exists",
            remedy=f"name one, such as --out file{endings[0]}, or make the folder first",
        )
    if out.exists() and not overwrite:
        raise InputError(
            f"out is {out}, which exists already",
            expected="a new file",
            remedy="name another file, or pass --overwrite",
        )


def check_unused(out: Path, command: str, settings: str, overwrite: bool) -> None:
    """Require that nothing of another run is lost: a new or empty folder, or a run of the same settings."""
    if not out.is_dir() or overwrite or out == Path():
        return
    names = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    remedy = "name another folder, or pass --overwrite"
    if RECORD in names and REPLAY in names:  # without its settings, which come last, a run was killed
        if not _same_settings(out / REPLAY, command, settings):
            raise InputError(
                f"out is {out}, which holds a finished run of other settings",
                expected="a new folder, or the settings of that run",
                remedy=remedy,
            )
        return
    others = [name for name in names if not _is_own(name)]
    if others:
        raise InputError(
            f"out is {out}, which holds other files, first {others[0]}",
            expected="a new or empty folder, or one of an interrupted run",
            remedy=remedy,
        )


def _is_own(name: str) -> bool:
    """Whether linnet writes a file or a folder of this name into a run."""
    return name in (*_FILES, *_FOLDERS, *_DEMO, TRAINING) or KERNEL_FILE in name or name.startswith("run-")


def _same_settings(path: Path, command: str, settings: str) -> bool:
    """Whether a folder's settings file is of this command and says the same."""
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    return f"linnet {command} " in text and plain_settings(text) == plain_settings(settings)


def plain_settings(text: str) -> str:
    r"""Settings without comments and without the permission to overwrite, which belongs to one call."""
    lines = [line for line in text.splitlines() if not line.startswith(("#", "overwrite:"))]
    return "".join(f"{line}\n" for line in lines)


def clear_run(out: Path) -> None:
    """Remove what linnet wrote for an earlier run; files of others stay."""
    for name in _FILES:
        (out / name).unlink(missing_ok=True)
    for path in out.glob("run-*.yaml"):
        path.unlink()
    shutil.rmtree(out / TRAINING, ignore_errors=True)
    for name in _FOLDERS:
        if any((out / name / file).exists() for file in ("report.html", "result.json")):
            shutil.rmtree(out / name)


@contextmanager
def claimed(
    out: Path, command: str, settings: str, overwrite: bool, source: Path | None = None
) -> Iterator[None]:
    """A folder of this process alone, in which nothing of another run is lost."""
    check_out(out, source)
    with made_folder(out):
        if is_first():
            check_unused(out, command, settings, overwrite)  # nobody else writes from here on
            finished = (out / "result.json").exists()
            if overwrite and not finished and not _same_settings(out / REPLAY, command, settings):
                (out / RECORD).unlink(missing_ok=True)  # else this run would go on with that one's fit
        yield


@contextmanager
def made_folder(out: Path) -> Iterator[None]:
    """A folder of this process (of several, the first) that is as it was if anything goes wrong."""
    # Only an interruption leaves something, a partial kernel from which the same command goes on.
    if not is_first():
        yield
        return
    made = [folder for folder in (*reversed(out.parents), out) if not folder.exists()]
    try:
        with writing(out):
            try:
                yield
            except Exception:
                if out in made:
                    for path in out.glob(f"*{KERNEL_FILE}*"):
                        path.unlink()
                raise
    except BaseException:
        for folder in reversed(made):
            with suppress(OSError):  # it holds something, of this run or of another process
                folder.rmdir()
        raise


# The lock


_writers: dict[Path, int] = {}  # the thread of this process that writes to a folder


@contextmanager
def writing(folder: Path, wait: bool = False) -> Iterator[None]:
    """Be the only one that writes to a folder; again in the same thread is no hindrance."""
    if is_held(folder):
        yield
        return
    key, end = folder.resolve(), time.monotonic() + (MOMENT if wait else GLANCE)
    try:
        while (file := _take(folder)) is None:
            if time.monotonic() >= end:
                _refuse(folder)
            time.sleep(PAUSE)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror or type(error).__name__})",
            expected="a folder that you may write to",
            remedy="name another folder with --out",
        ) from error
    _writers[key] = threading.get_ident()
    try:
        yield
    finally:
        _writers.pop(key, None)
        close_lock(key / LOCK, file)


def is_held(folder: Path) -> bool:
    """Whether this thread is the one that writes to a folder."""
    return _writers.get(folder.resolve()) == threading.get_ident()


def check_free(folder: Path) -> None:
    """Require that no other process is writing to a folder that is to be read; nothing is written for it."""
    if is_held(folder):
        return
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:  # nobody has written there since it was made, or it may not be looked at
        return
    try:
        if not try_lock(file, shared=True):
            _refuse(folder)
    finally:
        os.close(file)


def _take(folder: Path) -> int | None:
    """An open file of this process with the lock on it, or None where another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file = open_lock(folder / LOCK)
    except FileNotFoundError:  # a process that failed has removed the folder in between
        return None
    if file is not None:
        os.ftruncate(file, 0)
        os.write(file, str(os.getpid()).encode())
    return file


def _refuse(folder: Path) -> NoReturn:
    """Raise the error for the second process."""
    try:
        writer = (folder / LOCK).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        writer = ""
    if writer == str(os.getpid()):
        who = "another thread of this process"
    else:
        who = f"another linnet process{f' (pid {writer})' if writer.isdigit() else ''}"
    raise InputError(
        f"{who} is writing to {folder}",
        expected="one process for a folder",
        remedy="wait for it, or name another folder",
    )


# The processes that torchrun started for one command


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
