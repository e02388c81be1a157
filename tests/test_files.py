"""Files are whole or an error: round trips, crashes, bit flips, truncation, foreign files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from linnet import files
from linnet.errors import FileFormatError, InputError
from linnet.files import load, read_json, save, write_atomic, write_json

TENSORS = {
    "b.weight": torch.arange(12.0).reshape(3, 4),
    "a.bias": torch.tensor([1.5, -2.5], dtype=torch.float64),
    "count": torch.tensor(7),
    "half": torch.tensor([0.5, 2.0], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
}
METADATA = {"ridge": 0.1, "classes": ["a", "b"], "unbounded": float("inf"), "note": "café"}
CONTENT = {"tensors": TENSORS, **METADATA}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path, "fit", CONTENT)


class TestTensors:
    def test_round_trip_keeps_values_types_shapes_and_order(self, saved: Path) -> None:
        content = load(saved, "fit")
        assert list(content) == list(CONTENT)
        tensors = content.pop("tensors")
        assert list(tensors) == list(TENSORS)
        assert content == METADATA
        for name, tensor in TENSORS.items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name], tensor)

    def test_views_transposes_and_shared_memory_are_saved_as_they_look(self, tmp_path: Path) -> None:
        base = torch.arange(20.0)
        given = {"all": base, "view": base[3:7], "again": base, "turned": base.reshape(4, 5).T}
        tensors = load(save(tmp_path, "views", given), "views")
        assert all(torch.equal(tensors[name], given[name]) for name in given)

    def test_saving_twice_gives_the_same_bytes(self, tmp_path: Path) -> None:
        one = save(tmp_path / "1", "fit", CONTENT).read_bytes()
        assert one == save(tmp_path / "2", "fit", CONTENT).read_bytes()

    def test_kind_is_checked(self, tmp_path: Path) -> None:
        path = save(tmp_path, "state", {"ridge": 1.0}, kind="posterior")
        assert load(path, "posterior") == {"ridge": 1.0}
        with pytest.raises(FileFormatError, match=r"holds a 'posterior'.*Expected: a 'fit'"):
            load(path, "fit")

    def test_another_version_is_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "VERSION", 2)
        path = save(tmp_path, "fit", TENSORS)
        monkeypatch.undo()
        with pytest.raises(FileFormatError, match="format version 2"):
            load(path, "fit")

    def test_metadata_that_json_cannot_hold(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"object.*cannot be saved"):
            save(tmp_path, "fit", {"x": object()})
        assert list(tmp_path.iterdir()) == []

    def test_every_flipped_bit_is_an_error(self, saved: Path) -> None:
        content = saved.read_bytes()
        refused = 0
        for position in range(len(content)):
            flipped = bytearray(content)
            flipped[position] ^= 1 << (position % 8)
            saved.write_bytes(flipped)
            try:
                load(saved, "fit")
            except FileFormatError as error:
                refused += str(saved) in str(error)
        assert refused == len(content)

    def test_every_truncation_is_an_error(self, saved: Path) -> None:
        content = saved.read_bytes()
        for length in range(len(content)):
            saved.write_bytes(content[:length])
            with pytest.raises(FileFormatError, match="truncated"):
                load(saved, "fit")

    def test_appended_bytes_are_an_error(self, saved: Path) -> None:
        saved.write_bytes(saved.read_bytes() + b"\0")
        with pytest.raises(FileFormatError):
            load(saved, "fit")

    def test_changed_tensor_with_a_valid_header_is_an_error(self, saved: Path) -> None:
        content = bytearray(saved.read_bytes())
        content[content.index(TENSORS["b.weight"].numpy().tobytes()) + 9] ^= 64
        saved.write_bytes(content)
        with pytest.raises(FileFormatError, match=r"altered.*SHA-256"):
            load(saved, "fit")

    def test_foreign_files(self, tmp_path: Path) -> None:
        foreign = tmp_path / "weights.safetensors"
        save_file({"w": torch.ones(2)}, str(foreign))
        with pytest.raises(FileFormatError, match=r"not one that linnet saved.*load_weights"):
            load(foreign, "fit")
        foreign.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
        with pytest.raises(FileFormatError, match="of another format"):
            load(foreign, "fit")
        save_file({"w": torch.ones(2)}, str(foreign), metadata={"linnet": '0 {"format": "other"}'})
        with pytest.raises(FileFormatError, match="not written by linnet"):
            load(foreign, "fit")

    def test_missing_file_names_its_neighbors(self, saved: Path) -> None:
        with pytest.raises(
            InputError, match=r"there is no file .*fir\.safetensors.*did you mean .*fit\.safetensors\?"
        ):
            load(saved.with_name("fir.safetensors"), "fit")
        with pytest.raises(InputError, match="is a folder"):
            load(saved.parent, "fit")


class TestJson:
    def test_plain_json_is_for_everyone(self, tmp_path: Path) -> None:
        value = {"path": tmp_path, "array": np.arange(2), "nan": float("nan"), "deep": [(1, -float("inf"))]}
        path = write_json(tmp_path / "result.json", value)
        assert json.loads(path.read_text(), parse_constant=pytest.fail) == read_json(path)
        assert read_json(path) == {"path": str(tmp_path), "array": [0, 1], "nan": None, "deep": [[1, None]]}

    def test_labelled_json_round_trip(self, tmp_path: Path) -> None:
        value = {"ridge": float("inf"), "seed": 3, "tensor": torch.tensor(2.5)}
        path = write_json(tmp_path / "run.json", value, kind="run")
        assert read_json(path, kind="run") == {"ridge": float("inf"), "seed": 3, "tensor": 2.5}
        with pytest.raises(FileFormatError, match="holds a 'run'"):
            read_json(path, kind="fit")

    def test_every_flipped_bit_is_an_error_or_harmless(self, tmp_path: Path) -> None:
        value = {"ridge": 0.25, "names": ["a", "b"]}
        path = write_json(tmp_path / "run.json", value, kind="run")
        content = path.read_bytes()
        refused = 0
        for position in range(len(content)):
            for bit in (0, 3, 7):
                flipped = bytearray(content)
                flipped[position] ^= 1 << bit
                path.write_bytes(flipped)
                try:
                    assert read_json(path, kind="run") == value
                except FileFormatError as error:
                    refused += str(path) in str(error)
        assert refused > 2 * len(content)

    def test_every_truncation_is_an_error(self, tmp_path: Path) -> None:
        path = write_json(tmp_path / "run.json", {"seed": 0}, kind="run")
        content = path.read_bytes().rstrip()
        for length in range(len(content)):
            path.write_bytes(content[:length])
            with pytest.raises(FileFormatError, match="truncated"):
                read_json(path, kind="run")

    def test_foreign_files(self, tmp_path: Path) -> None:
        path = write_json(tmp_path / "run.json", [1, 2])
        with pytest.raises(FileFormatError, match="not written by linnet"):
            read_json(path, kind="run")
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(FileFormatError, match="is not text"):
            read_json(path)
        path.write_text("[" * 100_000)
        with pytest.raises(FileFormatError, match="not valid JSON"):
            read_json(path)

    def test_unwritable_value(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="cannot be written as JSON"):
            write_json(tmp_path / "run.json", {"f": print})
        assert list(tmp_path.iterdir()) == []


class TestAtomicWriting:
    def test_failing_writer_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        path = write_atomic(tmp_path / "a.txt", lambda temporary: temporary.write_text("old"))

        def fail(temporary: Path) -> None:
            temporary.write_text("half")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_atomic(path, fail)
        assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
        assert path.read_text() == "old"

    def test_makes_folders_and_keeps_the_suffix_for_the_writer(self, tmp_path: Path) -> None:
        path = write_atomic(tmp_path / "new" / "deep" / "a.npz", lambda temporary: np.savez(temporary, x=1))
        assert np.load(path)["x"] == 1
        assert len(list(path.parent.iterdir())) == 1

    def test_refuses_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="is a folder"):
            write_atomic(tmp_path, lambda temporary: temporary.write_text(""))

    @pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX")
    def test_permissions_follow_the_umask(self, tmp_path: Path) -> None:
        plain, atomic = tmp_path / "plain", tmp_path / "atomic"
        plain.write_text("")
        write_atomic(atomic, lambda temporary: temporary.write_text(""))
        tensors = save(tmp_path, "fit", TENSORS)
        assert tensors.stat().st_mode == atomic.stat().st_mode == plain.stat().st_mode

    def test_forces_the_file_before_the_rename_and_the_folder_after(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        events: list[str] = []
        fsync, replace = os.fsync, os.replace
        is_folder = lambda descriptor: os.path.isdir(f"/proc/self/fd/{descriptor}")  # noqa: E731
        monkeypatch.setattr(
            os, "fsync", lambda d: (events.append("folder" if is_folder(d) else "file"), fsync(d))[1]
        )
        monkeypatch.setattr(os, "replace", lambda a, b: (events.append("rename"), replace(a, b))[1])
        write_atomic(tmp_path / "a", lambda temporary: temporary.write_text("x"))
        assert events == ["file", "rename", "folder"]

    @pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
    @pytest.mark.long
    def test_killed_at_any_moment_leaves_a_whole_file(self, tmp_path: Path) -> None:
        first = save(tmp_path, "fit", {"w": torch.full((400_000,), 0.0), "step": 0})
        program = (
            "import sys, torch\n"
            "from linnet.files import save\n"
            "for step in range(10**6):\n"
            "    w = torch.full((400_000,), float(step))\n"
            "    save(sys.argv[1], 'fit', {'w': w, 'step': step})\n"
            "    print(step, flush=True)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[1])},
        )
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
            deadline = time.monotonic() + 20
            while not list(tmp_path.glob(".fit.*")) and time.monotonic() < deadline:
                pass  # until it is seen in the middle of a write
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        found = load(first, "fit")
        assert torch.equal(found["w"], torch.full((400_000,), float(found["step"])))
        save(tmp_path, "fit", {"step": -1})  # what was left does no harm
        assert load(first, "fit") == {"step": -1}


def test_one_number_of_a_long_tensor_is_saved(tmp_path: Path) -> None:
    """A copy of it keeps its stride, unless it is told otherwise."""
    number = torch.arange(8.0)[4::4]
    assert number.stride() == (4,)
    saved = save(tmp_path, "one", {"number": number})
    assert torch.equal(load(saved, "one")["number"], number)
