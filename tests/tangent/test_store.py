"""The Gram matrix on disk: what is recorded is on the disk, and nothing foreign is ever resumed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from linnet.errors import InputError
from linnet.tangent import store as store_module
from linnet.tangent.store import GramFile
from tests.refusals import refused


@dataclass(frozen=True)
class Named:
    key: str


def opened(path: Path, **changes: Any) -> GramFile:
    options: dict[str, Any] = {
        "shape": (3, 2),
        "dtype": torch.float64,
        "identity": {"weights": "a"},
        **changes,
    }
    return GramFile(path, options["shape"], options["dtype"], options["identity"])


def test_a_finished_matrix(tmp_path: Path) -> None:
    store = opened(tmp_path / "k.npy")
    store.array.copy_(torch.arange(6.0).view(3, 2))
    assert not (tmp_path / "k.npy").exists()
    kept = store.finish()
    assert kept.tolist() == np.load(tmp_path / "k.npy").tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k.npy", "k.npy.made.json"]
    kept[0, 0] = 9.0  # mapped from the file, which stays as it is
    assert np.load(tmp_path / "k.npy")[0, 0] == 0.0


def test_steps_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RECORD_SECONDS", 0.0)
    store = opened(tmp_path / "k.npy")
    store.array[0] = 1.0
    store.mark_done(Named("first"))
    store.array[1] = 2.0  # not recorded
    again = opened(tmp_path / "k.npy")
    assert again.is_done(Named("first"))
    assert not again.is_done(Named("second"))
    assert again.array[0].tolist() == [1.0, 1.0]


def test_the_record_is_written_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing the matrix is dear, so it does not happen with every small step."""
    now = [0.0]
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now[0])
    store = opened(tmp_path / "k.npy")
    record = tmp_path / "k.npy.steps.json"
    store.mark_done(Named("first"))
    assert not record.exists()
    now[0] = store_module.RECORD_SECONDS
    store.mark_done(Named("second"))
    assert '"first"' in record.read_text()
    before = record.read_text()
    now[0] *= 1.5
    store.mark_done(Named("third"))
    assert record.read_text() == before


@pytest.mark.parametrize(
    "change", [{"shape": (2, 3)}, {"dtype": torch.float32}, {"identity": {"weights": "b"}}, {"identity": {}}]
)
def test_another_task_is_not_resumed(change: dict[str, Any], tmp_path: Path) -> None:
    store = opened(tmp_path / "k.npy")
    store.array.fill_(7.0)
    store.mark_done(Named("first"))
    store.write_record()
    other = opened(tmp_path / "k.npy", **change)
    assert not other.is_done(Named("first"))
    assert not other.array.any()
    assert tuple(other.array.shape) == change.get("shape", (3, 2))
    # the other task has overwritten the matrix: the first may not be resumed either
    back = opened(tmp_path / "k.npy")
    assert not back.is_done(Named("first"))
    assert not back.array.any()


@pytest.mark.parametrize("note", [None, "{", "[]"])
def test_a_file_that_nothing_is_known_of_is_left_alone(note: str | None, tmp_path: Path) -> None:
    np.save(tmp_path / "k.npy", np.ones(4))
    if note is not None:
        (tmp_path / "k.npy.made.json").write_text(note)
    refused(InputError, lambda: opened(tmp_path / "k.npy"), "k.npy", "nothing", "another file, or delete")
    assert np.load(tmp_path / "k.npy").shape == (4,)
    assert not (tmp_path / "k.npy.partial").exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"identity": {"weights": "b"}}, "other weights"),
        ({"dtype": torch.float32}, "other number type"),
        ({"shape": (2, 3)}, "other number of examples"),
    ],
)
def test_a_finished_matrix_is_not_written_over(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    opened(tmp_path / "k.npy").finish()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refused(InputError, lambda: opened(tmp_path / "k.npy", **change), "k.npy", word, "delete k.npy")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert opened(tmp_path / "k.npy").complete


def test_other_sizes_of_steps_are_no_other_matrix(tmp_path: Path) -> None:
    opened(tmp_path / "k.npy", identity={"weights": "a", "hold": 3}).finish()
    assert opened(tmp_path / "k.npy", identity={"weights": "a", "hold": 4}).complete


def test_a_damaged_matrix_is_made_again(tmp_path: Path) -> None:
    opened(tmp_path / "k.npy").finish()
    (tmp_path / "k.npy").write_bytes(b"\x93NUMPY")
    store = opened(tmp_path / "k.npy")
    assert not store.complete
    store = opened(tmp_path / "k.npy")  # broken off before it was done
    assert not store.complete
    store.finish()
    assert opened(tmp_path / "k.npy").complete


def test_a_matrix_that_was_taken_away_leaves_its_name(tmp_path: Path) -> None:
    opened(tmp_path / "k.npy").finish()
    (tmp_path / "k.npy").unlink()
    assert not opened(tmp_path / "k.npy", identity={"weights": "b"}).complete
    assert not (tmp_path / "k.npy.made.json").exists()


@pytest.mark.parametrize("name", ["k.npz", "k", "k.npy.gz"])
def test_other_suffixes(name: str, tmp_path: Path) -> None:
    refused(InputError, lambda: opened(tmp_path / name), "file", name, ".npy")
    assert list(tmp_path.iterdir()) == []
