"""Safe files: atomic writes, checksums, kinds and versions.

A file is written in a temporary folder beside it, forced to disk and renamed over the old one, so a crash at
any moment leaves the old file or the new one, and at worst a temporary folder that nothing reads and that the
next write removes, with all that a library's own writer left there.
What linnet saves carries its kind, a format version and the SHA-256 of its content. A :mod:`linnet.tree` is
one safetensors file (https://github.com/huggingface/safetensors): its tensors, and in the file's header the
rest as JSON. Nothing is pickled, in or out, and what is read is a regular file that fits into memory.

A mapped file that grows past the end of its disk ends the process with signal SIGBUS, which no ``except``
sees. Reserved blocks cannot run out, so a file is reserved before anything is written through its map.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from linnet import params, tree
from linnet.errors import DiskSpaceError, FileFormatError, InputError, LinnetError, MemoryBudgetError
from linnet.memory import available_bytes, format_bytes

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
    return hashlib.sha256(platform.node().encode()).hexdigest()[:4]


VERSION = 1  # of what is written, and of what is read

_FORMAT = "linnet"
_PARTIAL = ".partial"
_LARGEST_JSON = 1 << 28  # bytes; a record with ten million row numbers takes 90 MB
_NAMES = 8  # of files beside a missing one that an error names
_SMALL = 1 << 20  # bytes that are always available; free memory is not queried for less


def as_path(value: Any, name: str = "directory") -> Path:
    """A path that a user gave."""
    path = params.path(name, value)
    try:
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            params.refuse(name, value, "a path whose names the file system can hold", "use shorter names")
    return path


def write_atomic(
    path: str | os.PathLike[str], writer: Callable[[Path], object], size: int | None = None
) -> Path:
    """Write a file completely or not at all."""
    # Temporary folders that killed processes left of this file are removed first.
    path = params.path("path", path)
    try:
        if path.is_dir():
            raise InputError(f"path {path} is a folder", expected="a file to write", remedy="add a file name")
        with folder_aside(path) as aside:
            temporary = aside / path.name
            temporary.touch()
            mode = temporary.stat().st_mode
            writer(temporary)
            temporary.chmod(mode)  # a writer may have made a file of its own, for the owner alone
            force_to_disk(temporary)
            os.replace(temporary, path)
    except Exception as error:
        if isinstance(error, LinnetError) or not is_of_the_system(error):
            raise
        refuse_write(path, error, size)
    if os.name == "posix":  # the rename itself lives in the folder
        force_to_disk(path.parent)
    return path


@contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """A temporary folder beside a file, to write it in; gone after the block, with what is still in it."""
    # Those that killed processes left of this file go first.
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_partial(path)
    mark = f"{process_mark()}-{secrets.token_hex(4)}"
    aside = path.with_name(f".{path.stem}.{mark}{_PARTIAL}{path.suffix}")
    aside.mkdir()
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_partial(path: Path) -> None:
    """Remove the temporary folders of a file that processes left which are killed."""
    # Those of a living process, or of another machine that shares the folder, stay.
    start, end = f".{path.stem}.", f"{_PARTIAL}{path.suffix}"
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(start)]
    for name in names:
        mark = name.removeprefix(start).removesuffix(end)
        if name.endswith(end) and is_over(mark.rpartition("-")[0]):
            shutil.rmtree(path.with_name(name), ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write text in UTF-8, completely or not at all."""
    content = text.encode("utf-8", "backslashreplace")
    return write_atomic(path, lambda temporary: temporary.write_bytes(content), len(content))


def force_to_disk(path: Path) -> None:
    """Return once a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(directory: str | os.PathLike[str], name: str, value: object, kind: str | None = None) -> Path:
    """Write a tree of tensors and plain values to one checksummed safetensors file."""
    from safetensors.torch import save_file

    content, named = tree.flatten(value)
    tensors = _own_memory(named)
    label = {"format": _FORMAT, "kind": kind or name, "version": VERSION, "content": content}
    text = _dump(label)
    header = {_FORMAT: f"{_digest(text, tensors)} {text}"}  # one entry: several come in random order
    path = as_path(directory) / f"{name}.safetensors"
    size = sum(t.nbytes for t in tensors.values()) + len(text)
    return write_atomic(path, lambda temporary: save_file(tensors, str(temporary), metadata=header), size)


def load(path: str | os.PathLike[str], kind: str) -> Any:
    """Read what ``save`` wrote, exactly or not at all."""
    path = require_file(path)
    header, tensors = _read_safetensors(path)
    if _FORMAT not in header:
        raise FileFormatError(
            f"{path} is a safetensors file, but not one that linnet saved: no label is in it",
            expected=f"a file of kind {kind!r} written by linnet",
            remedy="give a saved one; network weights are read by load_weights",
        )
    digest, _, text = header[_FORMAT].partition(" ")
    label = _parse(path, text)
    _check_label(path, label, kind)
    if digest != _digest(text, tensors):
        _refuse_altered(path)
    return _put_together(path, label.get("content"), tensors)


def _put_together(path: Path, content: object, tensors: Mapping[str, Tensor]) -> Any:
    """What a file holds, or an error that names the file."""
    try:
        return tree.rebuild(content, tensors)
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error.what}", error.expected, error.remedy) from error


def _own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CPU copies where needed, so that each tensor has contiguous memory of its own."""
    owned: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in taken or storage.nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone(memory_format=torch.contiguous_format)  # the stride of one element too
        taken.add(plain.untyped_storage().data_ptr())
        owned[name] = plain
    return owned


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the label's text and every tensor's name, type, shape and bytes."""
    names = sorted(tensors)
    content = json.dumps([text, names, tree.hash_tensors(tensors[name] for name in names)])
    return hashlib.sha256(content.encode()).hexdigest()


def _read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header's metadata and the tensors of any safetensors file."""
    from safetensors import SafetensorError, safe_open

    require_room(path, path.stat().st_size)
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, ValueError, RuntimeError, KeyError, OSError) as error:
        raise FileFormatError(
            f"{path} cannot be read as safetensors ({error}): it is truncated, altered or of another format",
            expected="a complete .safetensors file",
            remedy="write or download it again",
        ) from error
    return header, tensors


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of any safetensors file, whoever wrote it."""
    return _read_safetensors(require_file(path))[1]


def write_json(path: str | os.PathLike[str], value: object, kind: str | None = None) -> Path:
    """Write JSON atomically."""
    content = finite(value) if kind is None else finite(value, tree.to_plain)
    if kind is not None:
        label = {"format": _FORMAT, "kind": kind, "version": VERSION}
        content = {**label, "sha256": _json_digest(kind, content), "content": content}
    return write_text(path, _dump(content, indent=2) + "\n")


def read_json(path: str | os.PathLike[str], kind: str | None = None) -> Any:
    """Read what ``write_json`` wrote."""
    path = require_file(path)
    if path.stat().st_size > _LARGEST_JSON:
        raise FileFormatError(
            f"{path} has {format_bytes(path.stat().st_size)}",
            expected=f"a JSON file of at most {format_bytes(_LARGEST_JSON)}",
            remedy="check where the file comes from: the records that linnet writes take kilobytes",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"{path} is not text",
            expected="a JSON file in UTF-8",
            remedy="save the object again, or pass the file that linnet wrote",
        ) from error
    value = _parse(path, text)
    if kind is None:
        return value
    _check_label(path, value, kind)
    if value.get("sha256") != _digest_of_read(path, kind, value.get("content")):
        _refuse_altered(path)
    return _put_together(path, value["content"], {})


def _digest_of_read(path: Path, kind: str, content: object) -> str:
    """The digest of content that came from a file, which may be nested deeper than can be written."""
    try:
        return _json_digest(kind, content)
    except (RecursionError, ValueError):
        _refuse_altered(path)


def _json_digest(kind: str, content: object) -> str:
    """SHA-256 of a kind and a value in one canonical spelling."""
    return hashlib.sha256(json.dumps([kind, content], sort_keys=True).encode()).hexdigest()


def _dump(value: object, indent: int | None = None) -> str:
    """JSON text of a value that is JSON already, and finite."""
    return json.dumps(value, indent=indent, allow_nan=False)


def finite(value: Any, other: Callable[[float], Any] = lambda number: None) -> Any:
    """A value in the types of JSON, with null, or what a function makes of them, for NaN and infinities."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else other(value)
    if isinstance(value, list | tuple):
        return [finite(item, other) for item in value]
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item, other) for key, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # NumPy scalars and arrays, tensors
        return finite(value.tolist(), other)
    raise InputError(
        f"{value!r:.80} cannot be written as JSON",
        expected="numbers, strings, lists, dictionaries, dataclasses, paths, arrays",
        remedy="convert it, such as with float() or list()",
    )


def _parse(path: Path, text: str) -> Any:
    """The value of a JSON text that came from a file."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(
            f"{path} is not valid JSON ({error}): it is truncated, altered or of another format",
            expected="a complete JSON file",
            remedy="write it again",
        ) from error


def _check_label(path: Path, label: Any, kind: str) -> None:
    """Raise unless a file is linnet's, of the right kind and of a version that can be read."""
    if not isinstance(label, dict) or label.get("format") != _FORMAT:
        raise FileFormatError(
            f"{path} was not written by linnet",
            expected=f"a file of kind {kind!r} written by linnet",
            remedy="give the path of a saved one",
        )
    if label.get("version") != VERSION:
        raise FileFormatError(
            f"{path} has format version {label.get('version')!r}",
            expected=f"version {VERSION}",
            remedy="read it with the version of linnet that wrote it",
        )
    if label.get("kind") != kind:
        raise FileFormatError(
            f"{path} holds a {label.get('kind')!r}",
            expected=f"a {kind!r}",
            remedy="pass the folder that this kind of object was saved to",
        )


def _refuse_altered(path: Path) -> NoReturn:
    """Say that content does not have the checksum written with it."""
    raise FileFormatError(
        f"{path} was altered after it was written: its content does not match its SHA-256 checksum",
        expected="the file exactly as linnet wrote it",
        remedy="restore it from a copy or write it again",
    )


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
