"""Safe files: atomic writes, checksums, kinds and versions.

A file is written in a temporary folder beside it, forced to disk and renamed over the old one, so a crash at
any moment leaves the old file or the new one, and at worst a temporary folder that nothing reads and that the
next write removes, with all that a library's own writer left there.
What linnet saves carries its kind, a format version and the SHA-256 of its content. A :mod:`linnet.tree` is
one safetensors file (https://github.com/huggingface/safetensors): its tensors, and in the file's header the
rest as JSON. Nothing is pickled, in or out, and what is read is a regular file that fits into memory.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from linnet import params, tree
from linnet.disk import is_of_the_system, is_over, process_mark, refuse_write
from linnet.errors import FileFormatError, InputError, LinnetError, MemoryBudgetError
from linnet.memory import available_bytes, format_bytes

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
    plain = _as_json(value)
    if kind is None:
        text = _dump(finite(plain), indent=2)
    else:
        content = tree.to_plain(plain)
        label = {"format": _FORMAT, "kind": kind, "version": VERSION}
        text = _dump({**label, "sha256": _json_digest(kind, content), "content": content}, indent=2)
    return write_text(path, text + "\n")


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


def _as_json(value: object) -> Any:
    """A value in the types of JSON, NaN and infinities among its numbers."""
    try:
        return json.loads(json.dumps(value, default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"a value cannot be written as JSON ({error})",
            expected="numbers, strings, lists, dictionaries with string keys, paths, arrays",
            remedy="convert it, such as with float() or list()",
        ) from error


def _plain(value: Any) -> object:
    """A stand-in for a value that JSON does not know."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # NumPy scalars and arrays, tensors
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON type")


def finite(value: Any) -> Any:
    """A value in the types of JSON, with null for NaN and infinities."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
