"""Safe files: atomic writes, checksums, kinds and versions.

A file is written in a temporary folder beside it, forced to disk and renamed over the old one, so a crash at
any moment leaves the old file or the new one, and at worst a temporary folder that nothing reads and that the
next write removes, with all that a library's own writer left there.
What linnet saves carries its kind, a format version and the SHA-256 of its content: tensors in a label in the
file's header, or, inside :func:`labels_apart`, in one JSON file beside them. Nothing is pickled, in or out.

Formats: safetensors (https://github.com/huggingface/safetensors) for tensors, JSON for the rest, which has no
NaN and no infinities: in what linnet reads back they are ``{"not finite": "nan"}``, ``"inf"`` or ``"-inf"``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from linnet import params
from linnet.disk import is_of_the_system, is_over, process_mark, refuse_write
from linnet.errors import FileFormatError, InputError, LinnetError
from linnet.limits import require_file, require_room
from linnet.memory import format_bytes

FORMAT_VERSION = 1
"""Version of what is written; files of this version and of older ones are read."""

LABELS = "linnet.json"
"""The file with the labels of a folder whose safetensors files hold tensors alone."""

LABELS_KIND = "folder"
_FORMAT = "linnet"
_PARTIAL = ".partial"
_LOST = "not finite"
_LARGEST_JSON = 1 << 28  # bytes; a record with ten million row numbers takes 90 MB
_apart: ContextVar[dict[str, Any] | None] = ContextVar("apart", default=None)


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


@contextmanager
def labels_apart() -> Iterator[dict[str, Any]]:
    """Collect the labels of what ``save_tensors`` writes in the block, and leave them out of the files."""
    labels: dict[str, Any] = {}
    token = _apart.set(labels)
    try:
        yield labels
    finally:
        _apart.reset(token)


def save_tensors(
    directory: str | os.PathLike[str],
    name: str,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    kind: str | None = None,
) -> Path:
    """Write named tensors and their metadata to one checksummed safetensors file."""
    from safetensors.torch import save_file

    content = _own_memory(tensors)
    label = {
        "format": _FORMAT,
        "kind": kind or name,
        "version": FORMAT_VERSION,
        "order": list(content),
        "metadata": dict(metadata),
    }
    text = _dump(_as_json(label, _marked))
    digest, apart = _digest(text, content), _apart.get()
    header = {_FORMAT: f"{digest} {text}"}  # one entry: several come in random order
    if apart is not None:
        apart[f"{name}.safetensors"] = {"sha256": digest, **label}
        header = {"format": "pt"}  # as other programs expect it
    path = as_path(directory) / f"{name}.safetensors"
    size = sum(t.numel() * t.element_size() for t in content.values()) + len(text)
    return write_atomic(path, lambda temporary: save_file(content, str(temporary), metadata=header), size)


def load_tensors(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``save_tensors`` wrote, exactly or not at all."""
    path = require_file(path)
    header, tensors = _read_safetensors(path)
    digest, _, text = header.get(_FORMAT, "").partition(" ")
    if text:
        label, texts = _unmarked(path, _parse(path, text)), [text]
    else:
        digest, label = _label_beside(path, kind)
        texts = list(dict.fromkeys([_dump(_marked(label)), json.dumps(label)]))  # the latter is older
    _check_label(path, label, kind)
    order = label.get("order")
    named = isinstance(order, list) and all(isinstance(name, str) for name in order)
    if not named or set(order) != set(tensors) or not isinstance(label.get("metadata"), dict):
        _refuse_altered(path)
    ordered = {key: tensors[key] for key in order}
    if all(digest != _digest(text, ordered) for text in texts):
        _refuse_altered(path)
    return ordered, label["metadata"]


def _label_beside(path: Path, kind: str) -> tuple[str, dict[str, Any]]:
    """The digest and the label of a file that has none in its header."""
    beside = path.with_name(LABELS)
    if not beside.exists():
        raise FileFormatError(
            f"{path} is a safetensors file, but not one that linnet saved: no label is in it or beside it",
            expected=f"a file of kind {kind!r} written by linnet",
            remedy=f"give a saved one, with its {LABELS}; network weights are read by load_weights",
        )
    label = read_labels(beside)["files"].get(path.name)
    if label is None:
        raise FileFormatError(
            f"{beside} says nothing of {path.name}",
            expected="the files of one folder, as they were saved",
            remedy="save or download the folder again",
        )
    return label["sha256"], {key: value for key, value in label.items() if key != "sha256"}


def read_labels(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the labels of a folder, which ``labels_apart`` has collected."""
    content = read_json(path, LABELS_KIND)
    files = content.get("files") if isinstance(content, dict) else None
    for name, label in files.items() if isinstance(files, dict) else [("", None)]:
        if not (isinstance(label, dict) and isinstance(label.get("sha256"), str) and _is_plain(name)):
            raise FileFormatError(
                f"{path} has no label that can be read for the file {name!r}",
                expected="labels of safetensors files in its own folder",
                remedy="save or download the folder again",
            )
    return dict(content)


def _is_plain(name: str) -> bool:
    """Whether a name is that of a safetensors file, without a folder."""
    return name.endswith(".safetensors") and not set(name) & set("/\\:\0")


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
    digest = hashlib.sha256(text.encode())
    for name, tensor in tensors.items():
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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


def has_label(path: Path) -> bool:
    """Whether a safetensors file has its label inside, and can be read without a ``linnet.json``."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return _FORMAT in (file.metadata() or {})
    except (SafetensorError, ValueError, RuntimeError, OSError):
        return False


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of any safetensors file, whoever wrote it."""
    return _read_safetensors(require_file(path))[1]


def write_json(path: str | os.PathLike[str], value: object, kind: str | None = None) -> Path:
    """Write JSON atomically."""
    if kind is None:
        text = _dump(_as_json(value, finite), indent=2)
    else:
        content = _as_json(value, _marked)
        label = {"format": _FORMAT, "kind": kind, "version": FORMAT_VERSION}
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
    return _unmarked(path, value["content"])


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


def _as_json(value: object, strict: Callable[[Any], Any]) -> Any:
    """A value in the types of JSON, with what stands in for NaN and infinities."""
    try:
        return strict(json.loads(json.dumps(value, default=_plain)))
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
    return _replaced(value, lambda number: None)


def _marked(value: Any) -> Any:
    """A value with NaN and infinities as dictionaries that :func:`_unmarked` knows."""
    return _replaced(value, lambda number: {_LOST: str(number)}, marks=True)


def _replaced(value: Any, replace: Callable[[float], Any], marks: bool = False) -> Any:
    """A value with something in place of NaN and infinities."""
    if isinstance(value, dict):
        inner = {key: _replaced(item, replace, marks) for key, item in value.items()}
        return {_LOST: inner} if marks and list(inner) == [_LOST] else inner
    if isinstance(value, list | tuple):
        return [_replaced(item, replace, marks) for item in value]
    return replace(value) if isinstance(value, float) and not math.isfinite(value) else value


def _unmarked(path: Path, value: Any) -> Any:
    """The value of which :func:`_marked` was written to a file."""

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            lost = value.get(_LOST) if len(value) == 1 else None
            if isinstance(lost, str) and lost in ("nan", "inf", "-inf"):
                return float(lost)
            inside = lost if isinstance(lost, dict) else value  # a dictionary that only looked like one
            return {key: read(item) for key, item in inside.items()}
        return [read(item) for item in value] if isinstance(value, list) else value

    try:
        return read(value)
    except RecursionError:
        _refuse_altered(path)


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
    version = label.get("version")
    if not isinstance(version, int):
        _refuse_altered(path)
    if version > FORMAT_VERSION:
        raise FileFormatError(
            f"{path} has format version {version}",
            expected=f"version {FORMAT_VERSION} or older",
            remedy="upgrade linnet: the file was written by a newer one",
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
