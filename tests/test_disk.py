"""A full disk is an error that says so: no signal, no half-written file, and old files as they were."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import linnet
from linnet import files
from linnet.app import cli
from linnet.app.runs.queries import write_rows
from linnet.errors import DiskSpaceError, InputError
from linnet.files import (
    load,
    process_mark,
    remove_partial,
    reserve,
    save,
    write_atomic,
    write_json,
    write_text,
)
from linnet.report.html import write_report
from linnet.report.records import Content
from linnet.tangent.store import GramFile
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[1]
SIZE = 1 << 16  # bytes of the small disk and of the largest file that is allowed
BIG = torch.ones(SIZE)  # four times that


@pytest.fixture
def short_files() -> Iterator[None]:
    """Files of 64 KiB at most: longer ones fail as on a full disk. Python ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITERS: dict[str, Callable[[Path], object]] = {
    "tensors.safetensors": lambda path: save(path.parent, path.stem, {"a": BIG}),
    "run.json": lambda path: write_json(path, {"a": BIG}, kind="run"),
    "plain.json": lambda path: write_json(path, list(range(SIZE))),
    "rows.csv": lambda path: write_rows(path, [{"id": "x" * SIZE, "value": 1.0}]),
    "rows.json": lambda path: write_rows(path, [{"id": "x" * SIZE, "value": 1.0}]),
    "report.html": lambda path: write_report(path, Content("x" * SIZE)),
    "run.yaml": lambda path: write_text(path, "x" * 2 * SIZE),
    "data.npz": lambda path: write_atomic(path, lambda part: np.savez(part, a=BIG.numpy())),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer(name: str, tmp_path: Path, short_files: None) -> None:
    path = tmp_path / name
    error = refused(
        DiskSpaceError, lambda: WRITERS[name](path), str(path), "File too large", "are free there"
    )
    assert isinstance(error, OSError)
    if name != "data.npz":  # its length is not known beforehand
        assert "it takes " in str(error)
    assert list(tmp_path.iterdir()) == []
    path.write_text("old")
    with pytest.raises(DiskSpaceError):
        WRITERS[name](path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_a_kernel_is_reserved_before_it_is_written(tmp_path: Path, short_files: None) -> None:
    lin, file = linnet.linearize(network()), tmp_path / "kernel.npy"
    x = torch.randn(100, 3)
    calls = (
        lambda: linnet.spectrum.gram(lin, x, file=file),
        lambda: linnet.fit(lin, (x, torch.arange(100) % 2), ridge=1.0, solver=linnet.fitting.Dual(file)),
    )
    for call in calls:
        refused(DiskSpaceError, call, "kernel.npy.partial", "File too large", "it takes 160 kB")
        assert list(tmp_path.iterdir()) == []
    file.write_bytes(b"old")
    with pytest.raises(InputError):
        calls[0]()
    assert file.read_bytes() == b"old"


def full(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    opened = lambda: GramFile(tmp_path / "k.npy", (9, 9), torch.float64, {})  # noqa: E731
    refused(DiskSpaceError, opened, "k.npy.partial", "No space left on device", "it takes 776 B")
    assert list(tmp_path.iterdir()) == []


def test_finished_steps_stay_where_the_rest_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = GramFile(tmp_path / "k.npy", (9, 9), torch.float64, {})
    store.array[0] = 1.0
    store.done.add("first")
    store.write_record()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full, raising=False)
        with pytest.raises(DiskSpaceError):
            GramFile(tmp_path / "k.npy", (9, 9), torch.float64, {})
    again = GramFile(tmp_path / "k.npy", (9, 9), torch.float64, {})
    assert again.done == {"first"}
    assert again.array[0].tolist() == [1.0] * 9


class TestReserve:
    @pytest.mark.parametrize("how", ["call", "refused", "missing"])
    def test_blocks_are_taken_and_bytes_stay(
        self, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unsupported(*arguments: object) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        if how == "refused":
            monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
        if how == "missing":
            monkeypatch.delattr(os, "posix_fallocate", raising=False)
        file = tmp_path / "k"
        file.write_bytes(b"head")
        reserve(file, 3 << 20)
        assert file.stat().st_size == 3 << 20
        assert file.stat().st_blocks * 512 >= 3 << 20
        assert file.read_bytes() == b"head".ljust(3 << 20, b"\0")

    def test_holes_count_as_room_that_is_needed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1000))
        file = tmp_path / "k"
        file.touch()
        os.truncate(file, 1 << 20)
        refused(DiskSpaceError, lambda: reserve(file, 1 << 20), "it takes 1.05 MB", "1.00 kB are free")

    def test_other_reasons_keep_their_name(self, tmp_path: Path) -> None:
        refused(InputError, lambda: reserve(tmp_path / "k", 1), "No such file")


ON_A_SMALL_DISK = """
import sys, torch, linnet
from pathlib import Path
from linnet.errors import DiskSpaceError
from linnet.app import cli
from tests.app.runs.small_tasks import write_nets, write_pictures
disk, home = Path(sys.argv[1]), Path(sys.argv[2])
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 100), torch.nn.Tanh(), torch.nn.Linear(100, 2))
lin, x = linnet.linearize(net), torch.randn(100, 3)
data = x, torch.arange(100) % 2
fit = linnet.fit(lin, data, ridge=1.0, solver="dual")
G = linnet.curvature(net, data, linnet.likelihoods.Categorical(), structure="full")
calls = {
    "fit.save": lambda: fit.save(disk / "a"),
    "curvature.save": lambda: G.save(disk / "b"),
    "gram": lambda: linnet.spectrum.gram(lin, x, file=disk / "g.npy"),
    "fit": lambda: linnet.fit(lin, data, ridge=1.0, solver=linnet.fitting.Dual(disk / "f.npy")),
}
for name, call in calls.items():
    try:
        call()
        print(name, "passed")
    except DiskSpaceError as error:
        print(name, str(disk) in str(error), "No space left on device" in str(error))
    left = [path for path in disk.rglob("*") if path.is_file()]
    assert not left, left
words = ["adapt", "--data", str(write_pictures(home / "p.npz")), "--model", f"{write_nets(home)}:conv"]
words += ["--model-args", '{"width": 100}', "--out", str(disk / "run")]
print("adapt", cli.main(words), [path for path in disk.rglob("*") if path.is_file()])
"""


def test_a_small_disk(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)]
    mounted = shutil.which("mount") and subprocess.run(options, capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("a file system of 64 KiB can only be mounted with the rights of an administrator")
    try:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(
            [sys.executable, "-c", ON_A_SMALL_DISK, place, tmp_path],
            capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:4] == [f"{name} True True" for name in ("fit.save", "curvature.save", "gram", "fit")]
    assert lines[4] == "adapt 2 []"
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device on this system")
def test_output_that_does_not_fit(tmp_path: Path) -> None:
    with open("/dev/full", "w") as device:
        done = subprocess.run(
            [sys.executable, "-m", "linnet", "--version"], stdout=device, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert "error:     the output cannot be read or written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_errors_of_the_system_are_told_in_three_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(words: list[str]) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "runs/first")

    monkeypatch.setattr(cli, "_run", broken)
    assert cli.main(["doctor"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error:     runs/first cannot be read or written: Input/output error"
    assert len(lines) == 3
    with pytest.raises(OSError, match="Input/output"):
        cli.main(["doctor", "--traceback"])


class TestLeftovers:
    def left_by(self, mark: str, folder: Path) -> Path:
        path = folder / f".fit.{mark}-abcdef01.partial.json"
        path.mkdir()
        (path / "fit.json").write_text("half")
        (path / ".tmpX1").write_text("what a library's own writer left")
        return path

    def ended(self) -> str:
        """The mark of a process that is over."""
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        return f"{process_mark().partition('-')[0]}-{process.pid:x}"

    def test_those_of_ended_processes_go(self, tmp_path: Path) -> None:
        left = self.left_by(self.ended(), tmp_path)
        write_json(tmp_path / "fit.json", 1)
        assert not left.exists()

    def test_those_that_may_be_in_use_stay(self, tmp_path: Path) -> None:
        mark = self.ended()
        other = "0000" if not mark.startswith("0000") else "ffff"
        strange = [process_mark(), f"{other}{mark[4:]}", f"{mark[:4]}-zz", "", "0-0-0"]
        left = [self.left_by(name, tmp_path) for name in strange]
        for name in (f".fits.{mark}-abcdef01.partial.json", f".fit.{mark}-abcdef01.partial.npz"):
            left.append(tmp_path / name)
            left[-1].mkdir()
        remove_partial(tmp_path / "fit.json")
        assert all(path.exists() for path in left)

    def test_a_kernel_that_is_taken_up_has_none(self, tmp_path: Path) -> None:
        left = tmp_path / f".k.npy.steps.{self.ended()}-abcdef01.partial.json"
        left.mkdir()
        GramFile(tmp_path / "k.npy", (2, 2), torch.float64, {}).finish()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["k.npy", "k.npy.made.json"]


def test_names_that_text_cannot_hold(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.png")
    write_rows(tmp_path / "rows.csv", [{"id": name}])
    assert (tmp_path / "rows.csv").read_text() == "id\n\\udcff.png\n"


def test_a_saved_file_is_none_the_worse(tmp_path: Path) -> None:
    path = save(tmp_path, "a", {"a": BIG})
    assert torch.equal(load(path, "a")["a"], BIG)
    assert files.is_of_the_system(OSError()) is True
    assert files.is_of_the_system(ValueError("os error 28")) is False
