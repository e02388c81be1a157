"""Weights' files that claim, repeat or nest more than they hold."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from linnet import files
from linnet.app.models import load_weights
from linnet.errors import FileFormatError, InputError, LinnetError, MemoryBudgetError
from linnet.files import load
from tests.refusals import refused


def endless() -> dict[str, Any]:
    """A dictionary that holds itself where weights are looked for."""
    found: dict[str, Any] = {}
    found["model"] = found
    return found


@pytest.mark.parametrize(
    ("content", "kind", "what"),
    [
        (endless, FileFormatError, "other things than tensors"),
        (lambda: {"w": torch.zeros(1).expand(10**15)}, MemoryBudgetError, "would take 4000 TB"),
        (lambda: {"w": torch.zeros(3).to_sparse()}, FileFormatError, "other things than tensors: w"),
        (lambda: {"w": torch.zeros(3, device="meta")}, FileFormatError, "other things than tensors: w"),
        (lambda: {"w": 10**6000}, FileFormatError, "holds more than weights|other things"),
    ],
)  # fmt: skip
def test_torch_files(content: Callable[[], Any], kind: type[LinnetError], what: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save(content(), file)
    with pytest.raises(kind, match=what) as caught:
        load_weights(file)
    assert str(file) in str(caught.value)
    assert caught.value.remedy


def test_a_packed_torch_file_is_no_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.zeros(10**6)}, tmp_path / "plain.pt")
    file = tmp_path / "packed.pt"
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as old,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.infolist():
            new.writestr(member.filename, old.read(member.filename))
    assert file.stat().st_size < 10_000
    assert load_weights(file)["w"].sum() == 0
    monkeypatch.setattr(files, "available_bytes", lambda: 2 * 10**6)
    refused(MemoryBudgetError, lambda: load_weights(file), str(file), "4.00 MB", "its members")


def lying(header: dict[str, Any] | bytes, content: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of a header as it is given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def entry(shape: list[int], end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


@pytest.mark.parametrize(
    "content",
    [
        lying(b"{}", length=2**63),
        lying(b"{}", length=10**9),
        lying(b"[" * 50_000),
        lying(entry([10**15], 4 * 10**15)),
        lying(entry([10**15], 4), bytes(4)),
        lying(entry([2**62, 4], 0)),
        lying(entry([1], 8), bytes(4)),
        lying(entry([-1], 4), bytes(4)),
        lying(entry([1], 4, "F3"), bytes(4)),
        lying({**entry([1], 4), "v": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    ],
)
def test_safetensors_that_lie(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(content)
    refused(FileFormatError, lambda: load_weights(file), str(file), "cannot be read as safetensors")


def test_a_file_that_is_mostly_a_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights.safetensors"
    content = lying(entry([10**12], 4 * 10**12))
    file.write_bytes(content)
    os.truncate(file, len(content) + 4 * 10**12)
    refused(MemoryBudgetError, lambda: load_weights(file), str(file), "4.00 TB")
    refused(MemoryBudgetError, lambda: load(file, "fit"), str(file))


@pytest.mark.parametrize(
    "content",
    [{"$tensor": "v"}, {"$tensor": ["w"]}, [{"$tensor": "w"}] * 2, {}, {"$os.system": "true"}, {"$tuple": 1}],
)
def test_a_label_that_lies(content: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from linnet.files import _digest

    label = {"format": "linnet", "kind": "fit", "version": 1, "content": content}
    text, tensors = json.dumps(label), {"w": torch.ones(2)}
    file = tmp_path / "fit.safetensors"
    save_file(tensors, str(file), metadata={"linnet": f"{_digest(text, tensors)} {text}"})
    refused(FileFormatError, lambda: load(file, "fit"), str(file), "cannot be put together")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
@pytest.mark.parametrize("suffix", [".pt", ".npz", ".safetensors"])
def test_pipes(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"weights{suffix}"
    os.mkfifo(file)
    refused(InputError, lambda: load_weights(file), f"{file} is a named pipe")
