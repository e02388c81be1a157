"""Disk space: reserved before a file is mapped, with an error that states what is missing.

A mapped file that grows past the end of its disk ends the process with signal SIGBUS, which no ``except``
sees. Reserved blocks cannot run out, so a file is reserved before anything is written through its map.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from linnet.errors import DiskSpaceError, InputError
from linnet.memory import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's quota, the largest file allowed
_NO_CALL = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # the file system cannot reserve
_BYTE = 1 << 30  # the byte that Windows locks; it need not exist, and what is before it stays readable
_PAUSE = 0.02  # seconds between two tries to have a lock
_PATIENCE = 600.0  # seconds to wait for one, which others hold for as long as they reserve a large file
_ZEROS = 1 << 20  # bytes written at once where a file is reserved by writing it


def reserve(path: Path, size: int) -> None:
    """Take the blocks of a file, so that writing through a map of it cannot fail; bytes stay as they are."""
    # File systems that copy on write (btrfs, ZFS) may still need space for an overwritten block.
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            _allocate(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        refuse_write(path, error, size)


def _allocate(descriptor: int, size: int) -> None:
    """Reserve by the system's own call, else by writing zeros where the file has no bytes yet."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in _NO_CALL:
                raise
    state = os.fstat(descriptor)
    taken = min(getattr(state, "st_blocks", 0) * 512, size)
    if size - taken > shutil.disk_usage(descriptor).free:  # holes below the end cannot be filled with zeros
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    end = os.lseek(descriptor, 0, os.SEEK_END)
    while end < size:
        end += os.write(descriptor, bytes(min(_ZEROS, size - end)))


def refuse_write(path: Path, error: BaseException, size: int | None = None) -> NoReturn:
    """Say that a file could not be written."""
    number = _number(error)
    why = os.strerror(number) if number else str(error) or type(error).__name__
    if number not in _FULL:
        raise InputError(
            f"path {path} cannot be written: {why}",
            expected="a folder that can be written",
            remedy="name another folder, or change its permissions",
        ) from error
    needed = "" if size is None else f"; it takes {format_bytes(size)}"
    raise DiskSpaceError(
        f"{path} cannot be written: {why}{needed}, and {_free(path.parent)}",
        expected="space for the whole file" if size is None else f"space for {format_bytes(size)}",
        remedy="free some space, or name a folder on another disk",
    ) from error


def is_of_the_system(error: BaseException) -> bool:
    """Whether an error is the system's, and not one of the program."""
    return isinstance(error, OSError) or _number(error) is not None


def _number(error: BaseException) -> int | None:
    """The system's number of an error; libraries in Rust quote it in their text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    quoted = re.search(r"\(os error (\d+)\)", str(error))
    return int(quoted[1]) if quoted else None


def _free(folder: Path) -> str:
    """Free space of a folder's disk, in words."""
    try:
        return f"{format_bytes(shutil.disk_usage(folder).free)} are free there"
    except OSError:
        return "how much is free cannot be found out"


def try_lock(file: int, shared: bool = False) -> bool:
    """Lock an open file at once or not at all; the system gives the lock back when the process ends."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(file, _BYTE, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            os.lseek(file, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only process in the block, among those that name the same lock; the others wait."""
    end = time.monotonic() + _PATIENCE
    try:
        while (file := open_lock(path)) is None:
            if time.monotonic() > end:
                raise InputError(
                    f"{path} has been locked by another process for {_PATIENCE:.0f} s",
                    expected="processes that take turns",
                    remedy="end the process that hangs, or remove the file if there is none",
                )
            time.sleep(_PAUSE)
    except OSError as error:
        refuse_write(path, error)
    try:
        yield
    finally:
        close_lock(path, file)


def open_lock(path: Path) -> int | None:
    """An open file with the lock on it; None where another process has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if try_lock(file):
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
    os.close(file)  # or the process before removed the file before we had it: this one locks nobody out
    return None


def close_lock(path: Path, file: int) -> None:
    """Give a lock back; its file goes first, so that nobody takes one that is about to vanish."""
    if sys.platform == "win32":  # where an open file cannot be removed
        os.close(file)
    with suppress(OSError):  # another process' by now, or the folder is gone
        path.unlink()
    if sys.platform != "win32":
        os.close(file)


def process_mark() -> str:
    """A short name of this process, for files that nobody else may touch while it lives."""
    return f"{_machine()}-{os.getpid():x}"


def is_over(mark: str) -> bool:
    """Whether a process is known to have ended."""
    machine, _, number = mark.partition("-")
    if os.name != "posix" or machine != _machine():
        return False
    try:
        os.kill(int(number, 16), 0)  # asks only
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return False


def _machine() -> str:
    """Four digits that tell machines apart."""
    return sha256(platform.node().encode()).hexdigest()[:4]
