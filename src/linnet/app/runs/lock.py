"""A lock for one writer per folder, released by the operating system when its process ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from linnet.disk import try_lock
from linnet.errors import InputError

LOCK = ".linnet.lock"
TRIES = 100  # a folder that a failing process removes is made again; more in a row is no coincidence
PAUSE = 0.05  # seconds between two tries
GLANCE = 0.5  # seconds of trying at least: a reader holds the lock for an instant to see whether it is free
MOMENT = 10.0  # seconds that writing a report may take another process


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
    # Where the file system has no locks, nothing is locked.
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
