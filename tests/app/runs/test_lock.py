"""Two processes on one run folder: one writes, the other is told, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from linnet.app import cli
from linnet.app.runs.folder import load_run
from linnet.app.runs.place import LOCK, check_free, is_held, made_folder, writing
from linnet.errors import InputError
from tests.hangs import HANGS

pytestmark = pytest.mark.skipif(os.name != "posix", reason="stops processes by signals")

# The command in a process that says when it has the folder, and then waits for a line before it goes on.
HELD = """
import sys
from linnet.app import cli
from linnet.app.runs import adaptation

read = adaptation.read_task

def wait(options):
    print("held", flush=True)
    sys.stdin.readline()
    return read(options)

adaptation.read_task = wait
sys.exit(cli.main(["adapt", *sys.argv[1:]]))
"""


def words(folder: Path, *more: str) -> list[str]:
    """The command's words."""
    given = ["--model", f"{folder / 'nets.py'}:conv", "--data", str(folder / "pictures.npz")]
    return [*given, "--out", str(folder / "run"), "--ridge", "1", *more]


@pytest.fixture
def first(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the folder."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, *words(folder, "--seed", "1")], text=True, **pipes
    )  # type: ignore[call-overload]
    try:
        assert process.stdout.readline() == "held\n", process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def adapt(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    command = [sys.executable, "-m", "linnet", "adapt", *words(folder, *more)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)


@pytest.mark.long
def test_the_second_process_is_told_and_the_first_finishes(
    folder: Path, first: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "run"
    second = adapt(folder, "--seed", "2", "--overwrite")
    assert second.returncode == 2
    assert second.stderr.splitlines() == [
        f"error:     another linnet process (pid {first.pid}) is writing to {run}",
        "expected:  one process for a folder",
        "to fix it: wait for it, or name another folder",
    ]
    assert cli.main(["predict", "--run", str(run), "--data", str(folder / "pictures.npz")]) == 2
    assert f"(pid {first.pid}) is writing" in capsys.readouterr().err
    out, errors = first.communicate("go on\n", timeout=HANGS)
    assert first.returncode == 0, errors
    assert "report:" in out
    assert "seed: 1" in (run / "run.yaml").read_text()
    assert not (run / LOCK).exists()
    load_run(run)
    # the run that has been finished meanwhile is not replaced by another
    assert cli.main(["adapt", *words(folder, "--seed", "2")]) == 2
    assert "a finished run of other settings" in capsys.readouterr().err
    assert cli.main(["adapt", *words(folder, "--seed", "1")]) == 0


@pytest.mark.long
def test_a_killed_process_leaves_no_lock(folder: Path, first: subprocess.Popen[str]) -> None:
    os.kill(first.pid, signal.SIGKILL)
    first.wait(timeout=HANGS)
    assert (folder / "run" / LOCK).exists()  # the file stays; what locked it is gone
    done = adapt(folder, "--seed", "2")
    assert done.returncode == 0, done.stderr
    assert not (folder / "run" / LOCK).exists()


@pytest.mark.long
def test_two_at_once_do_not_both_succeed_with_different_settings(folder: Path) -> None:
    command = [sys.executable, "-m", "linnet", "adapt"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([*command, *words(folder, "--seed", seed)], **pipes) for seed in "12"]  # type: ignore[call-overload]
    errors = [process.communicate(timeout=HANGS)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], errors
    assert "Traceback" not in "".join(errors)
    winner = codes.index(0)
    assert f"seed: {winner + 1}" in (folder / "run" / "run.yaml").read_text()
    load_run(folder / "run")
    assert not (folder / "run" / LOCK).exists()


def test_the_lock_by_itself(tmp_path: Path) -> None:
    with writing(tmp_path), writing(tmp_path):  # again in the same thread
        assert is_held(tmp_path)
        assert (tmp_path / LOCK).read_text() == str(os.getpid())
        check_free(tmp_path)
        seen: list[str] = []

        def other() -> None:
            for attempt in (lambda: check_free(tmp_path), lambda: writing(tmp_path).__enter__()):
                with pytest.raises(InputError) as caught:
                    attempt()
                seen.append(caught.value.what)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == [f"another thread of this process is writing to {tmp_path}"] * 2
    assert not is_held(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_what_others_have(tmp_path: Path) -> None:
    out = tmp_path / "a" / "run"

    def fail() -> None:
        with made_folder(out):
            (out / "kernel.npy.partial").write_text("mine")
            raise InputError("no")

    with pytest.raises(InputError, match="no"):
        fail()
    assert not list(tmp_path.iterdir())
    out.mkdir(parents=True)
    (out / "kernel.npy").write_text("of a run that goes on")
    with pytest.raises(InputError, match="no"):
        fail()
    assert (out / "kernel.npy").exists()


def test_reading_writes_nothing(workshop: Path, tmp_path: Path) -> None:
    """So that a folder that cannot be written can be read."""
    run = tmp_path / "run"
    shutil.copytree(workshop / "pictures", run, ignore=shutil.ignore_patterns("predict", "explain"))
    before = run.stat().st_mtime_ns, sorted(path.name for path in run.iterdir())
    words = ["explain", "--run", str(run), "--ids", "test/3", "--out", str(tmp_path / "why")]
    assert cli.main(words) == 0
    assert json.loads((tmp_path / "why" / "result.json").read_text())["ids"] == ["test/3"]
    assert before == (run.stat().st_mtime_ns, sorted(path.name for path in run.iterdir()))
