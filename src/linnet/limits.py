"""Limits on input files: regular files only, within the available memory."""

from __future__ import annotations

import difflib
import os
import stat
from pathlib import Path

from linnet import params
from linnet.errors import InputError, MemoryBudgetError
from linnet.memory import available_bytes, format_bytes

_NAMES = 8  # of files beside a missing one that an error names
_SMALL = 1 << 20  # bytes that are always available; free memory is not queried for less


def require_file(path: str | os.PathLike[str], name: str | None = None) -> Path:
    """The path, if a regular file lies there: pipes and devices have no end, or wait for a writer."""
    path = params.path("path", path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        what = f"there is no file {path}" if name is None else f"{name} is {path}, and there is no such file"
        raise InputError(what, "an existing file", suggestion(path)) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}", "an existing file", "check the path"
        ) from error
    if stat.S_ISDIR(mode):
        raise InputError(f"{path} is a folder", expected="a file", remedy="pass the file inside it")
    if not stat.S_ISREG(mode):
        raise InputError(
            f"{path} is {special_file(mode)}",
            expected="a regular file",
            remedy="write its content to a file, and name that",
        )
    return path


def suggestion(path: Path) -> str:
    """Remedy for a path that does not exist."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, 1)
    if close:
        return f"did you mean {path.parent / close[0]}?"
    beside = f"beside it are: {', '.join(names[:_NAMES])}" if names else "its folder is empty or missing"
    return f"check the path; {beside}"


def special_file(mode: int) -> str:
    """The kind of a file that is neither regular nor a folder."""
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def require_room(path: Path, size: int, what: str = "its content") -> None:
    """Stop before more is read from a file than there is memory."""
    # Unlike a computation, which is planned for half of what is free, a file is read whole: the limit is all.
    if size > _SMALL and size > (free := available_bytes()):
        raise MemoryBudgetError(
            f"{path} would take {format_bytes(size)} of memory for {what}",
            expected=f"at most {format_bytes(free)}, which are free",
            remedy="check where the file comes from; if it is right, read it on a machine with more memory",
        )
