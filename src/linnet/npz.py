"""Reads NumPy's ``.npz`` archives member by member, checked to the last byte.

``numpy.load`` stops at the end of an array, before the archive's own checksum is compared, so an altered
member can pass; here every member is read to its end. Before that its claimed length is held against its
packed size and against the memory that is free. Members may be stored, deflated, or packed with BZIP2 or
LZMA. Arrays of Python objects, which would need pickle, are refused.
"""

from __future__ import annotations

import io
import lzma
import math
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from linnet.errors import FileFormatError, LinnetError, MemoryBudgetError
from linnet.files import require_file, require_room
from linnet.memory import format_bytes

# What the decoders raise on damaged bytes.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, ValueError, OSError, KeyError,
    IndexError, TypeError, OverflowError, RuntimeError, UserWarning,
)  # fmt: skip

# The most that a byte of an archive can unpack to: when deflated, two bits stand for 258 bytes at best. For
# BZIP2 and LZMA the memory alone is the limit.
_LARGEST_RATIO = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
_LARGEST_HEADER = 10_000  # characters; more numpy refuses too, once it has read them
_PREFIX = 12  # bytes before them
_TAIL = 22 + 0xFFFF  # bytes that a zip archive's last record can take, its comment included


@dataclass(frozen=True)
class ArrayHeader:
    """Type and shape of an array, without its content."""

    shape: tuple[int, ...]  # its shape
    dtype: np.dtype[Any]  # its element type


def npz_headers(path: str | os.PathLike[str]) -> dict[str, ArrayHeader]:
    """Read the shapes and types of an archive's arrays, without unpacking them."""
    with _open_archive(require_file(path)) as archive:
        return {name: _read_header(archive, name) for name in _names(archive)}


def read_npz(path: str | os.PathLike[str], names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Read arrays of an archive; members that are not requested are not unpacked."""
    path = require_file(path)
    with _open_archive(path) as archive:
        present = _names(archive)
        require_arrays(path, names or (), present)
        return {name: _read_array(archive, name) for name in (present if names is None else names)}


def require_arrays(path: Path, names: Sequence[str], present: Collection[str]) -> None:
    """Check that an archive holds the arrays that are needed."""
    missing = [name for name in names if name not in present]
    if missing:
        raise FileFormatError(
            f"{path} has no {' and no '.join(missing)}; it holds: {', '.join(present) or 'nothing'}",
            expected=f"arrays named {', '.join(names)}",
            remedy="save it again with these names: numpy.savez(file, name=array, ...)",
        )


@contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """The open archive; damage found while it is open becomes a FileFormatError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a damaged header passes for one of Python 2
            with zipfile.ZipFile(path) as archive:
                _check_count(path, archive)
                yield archive
    except LinnetError:
        raise
    except _DAMAGE as error:
        state = "truncated or altered" if _looks_zipped(path) else "not an .npz archive"
        raise FileFormatError(
            f"{path} is {state} ({error or type(error).__name__})",
            expected="a complete file written by numpy.savez or numpy.savez_compressed",
            remedy="write or download it again",
        ) from error


def _check_count(path: Path, archive: zipfile.ZipFile) -> None:
    """Require as many members as the archive's last record says: a damaged directory can hide some."""
    with path.open("rb") as file:
        file.seek(-min(_TAIL, path.stat().st_size), os.SEEK_END)
        tail = file.read()
    (count,) = struct.unpack_from("<H", tail, tail.rindex(b"PK\5\6") + 10)
    if count not in (len(archive.namelist()), 0xFFFF):  # 0xFFFF: more than fit, counted elsewhere
        raise zipfile.BadZipFile(f"{len(archive.namelist())} of {count} members are listed")


def _looks_zipped(path: Path) -> bool:
    """Whether a file begins as a zip archive does."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _names(archive: zipfile.ZipFile) -> list[str]:
    """The arrays' names: the members' without their suffix."""
    members = archive.namelist()
    if not all(member.endswith(".npy") for member in members) or len(set(members)) != len(members):
        raise FileFormatError(
            f"{archive.filename} is a zip archive, but of other things: {', '.join(members[:8])}",
            expected="an .npz file written by numpy.savez",
            remedy="write the file with numpy.savez",
        )
    return [member.removesuffix(".npy") for member in members]


def _read_header(archive: zipfile.ZipFile, name: str) -> ArrayHeader:
    """One array's header, checked against the member's length, and that against the archive's."""
    member = archive.getinfo(f"{name}.npy")
    ratio = _LARGEST_RATIO.get(member.compress_type)
    if ratio is not None and member.file_size > ratio * member.compress_size:
        raise ValueError(f"array {name} claims {format_bytes(member.file_size)}, more than is in the archive")
    if member.compress_size > Path(str(archive.filename)).stat().st_size:
        raise ValueError(f"array {name} claims to be longer than the archive")
    with archive.open(member) as file:
        start = io.BytesIO(file.read(_PREFIX + _LARGEST_HEADER))
    header = _parse_header(archive, name, start)
    size = header.dtype.itemsize * math.prod(header.shape)
    if start.tell() + size != member.file_size:
        raise ValueError(f"array {name} is not as long as its header says")
    return header


def _parse_header(archive: zipfile.ZipFile, name: str, start: IO[bytes]) -> ArrayHeader:
    """The header in the first bytes of a member."""
    version = np.lib.format.read_magic(start)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(start)
    if dtype.hasobject:
        raise FileFormatError(
            f"array {name} of {archive.filename} holds Python objects, which could run code when read",
            expected="arrays of numbers or of text",
            remedy="give all samples one shape and save numpy.array(..., dtype=float), or str for names",
        )
    if dtype.itemsize == 0 or any(length < 0 for length in shape):
        raise ValueError(f"array {name} has the shape {shape} and elements of {dtype.itemsize} bytes")
    return ArrayHeader(tuple(shape), dtype)


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One array, read to the end of its member, where its checksum is compared."""
    header = _read_header(archive, name)
    size = header.dtype.itemsize * math.prod(header.shape)
    require_room(Path(str(archive.filename)), size, f"the array {name}")
    with archive.open(f"{name}.npy") as member:
        try:
            array = np.lib.format.read_array(member, allow_pickle=False)
        except MemoryError as error:  # a limit of this process, which the free memory does not show
            raise MemoryBudgetError(
                f"array {name} of {archive.filename} takes {format_bytes(size)}, more than this process may",
                expected="an array that fits into memory",
                remedy="check where the file comes from, or raise the limit (ulimit -v)",
            ) from error
        if member.read(1):
            raise ValueError(f"array {name} is longer than its header says")
    return np.asarray(array)
