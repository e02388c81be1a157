"""The output folder of a run: created or refused, written by one process, and cleaned up after a failure.

The lock of a folder is released by the operating system when its process ends. Where the file system has no
locks, nothing is locked.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from linnet.app.runs.ranks import is_first
from linnet.disk import try_lock
from linnet.errors import InputError

RECORD = "run.json"
KERNEL_FILE = "kernel.npy"
REPLAY = "run.yaml"
_FILES = (
    RECORD, "model.safetensors", "nested-fit.safetensors",
    "samples.safetensors", "result.json", "report.html", "predictions.csv", "predictions.json", REPLAY,
)  # fmt: skip
_FOLDERS = ("predict", "explain", "spectrum")
_DEMO = ("digits.npz", "digits-flipped.npz", "pretrained.safetensors", "flipped", "forgotten")
LOCK = ".linnet.lock"
TRIES = 100  # a folder that a failing process removes is made again; more in a row is no coincidence
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


def check_new_file(out: Path, overwrite: bool) -> None:
    """Require that no file is lost."""
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
    return name in (*_FILES, *_FOLDERS, *_DEMO) or KERNEL_FILE in name or name.startswith("run-")


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
    for name in _FOLDERS:
        if (out / name / "report.html").exists():
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
        yield


@contextmanager
def made_folder(out: Path) -> Iterator[None]:
    """A folder of this process (of several, the first) that is as it was if anything goes wrong."""
    # Only an interruption leaves something, a partial kernel from which the same command goes on.
    if not is_first():
        yield
        return
    made: list[Path] = []
    try:
        try:
            _make(out, made)
        except OSError as error:
            raise InputError(
                f"out is {out}, which cannot be written ({error.strerror or type(error).__name__})",
                expected="a folder that you may write to",
                remedy="name another folder with --out",
            ) from error
        with writing(out):
            try:
                yield
            except KeyboardInterrupt:
                raise
            except BaseException:
                if out in made:
                    for path in out.glob(f"*{KERNEL_FILE}*"):
                        path.unlink()
                raise
    except BaseException:
        for folder in reversed(made):
            with suppress(OSError):  # it holds something, of this run or of another process
                folder.rmdir()
        raise


def _make(out: Path, made: list[Path]) -> None:
    """Make a folder and those above; say which were made."""
    for folder in (*reversed(out.parents), out):
        if not folder.exists():
            with suppress(FileExistsError):  # another process was faster
                folder.mkdir()
                made.append(folder)


# The lock


@dataclass
class _Held:
    """A lock that this process holds: its open file, the thread that took it, and how often it did."""

    file: int
    thread: int
    depth: int = 1


_held: dict[Path, _Held] = {}
_table = threading.Lock()


@contextmanager
def writing(folder: Path, wait: bool = False) -> Iterator[None]:
    """Be the only one that writes to a folder; again in the same thread is no hindrance."""
    key = folder.resolve()
    end = time.monotonic() + (MOMENT if wait else GLANCE)
    try:
        while not _enter(key, folder):
            if time.monotonic() >= end:
                _refuse(folder)
            time.sleep(PAUSE)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror or type(error).__name__})",
            expected="a folder that you may write to",
            remedy="name another folder",
        ) from error
    try:
        yield
    finally:
        _leave(key)


def is_held(folder: Path) -> bool:
    """Whether this thread is the one that writes to a folder."""
    with _table:
        held = _held.get(folder.resolve())
    return held is not None and held.thread == threading.get_ident()


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


def _enter(key: Path, folder: Path) -> bool:
    """Take the lock, or once more where this thread has it; False where another has."""
    with _table:
        held = _held.get(key)
        if held is not None:
            if held.thread != threading.get_ident():
                return False
            held.depth += 1
            return True
        file = _take(folder)
        if file is None:
            return False
        _held[key] = _Held(file, threading.get_ident())
        return True


def _leave(key: Path) -> None:
    """Give the lock back; its file goes first, so that nobody takes one that is about to vanish."""
    with _table:
        held = _held[key]
        held.depth -= 1
        if held.depth:
            return
        del _held[key]
        if sys.platform == "win32":  # where an open file cannot be removed
            os.close(held.file)
        with suppress(OSError):  # another writer's by now, or the folder is gone
            (key / LOCK).unlink()
        if sys.platform != "win32":
            os.close(held.file)


def _take(folder: Path) -> int | None:
    """An open file of this process with the lock on it, or None where another process has it."""
    for _ in range(TRIES):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the folder was removed in between
            continue
        if not try_lock(file):
            os.close(file)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(folder / LOCK)):
                os.ftruncate(file, 0)
                os.write(file, str(os.getpid()).encode())
                return file
        os.close(file)  # the process before removed the file before we had it: this one locks nobody out
    return None


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
