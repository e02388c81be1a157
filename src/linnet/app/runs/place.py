"""The output folder of a run: created or refused, and cleaned up after a failure."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from linnet.app.runs.lock import writing
from linnet.app.runs.ranks import is_first
from linnet.errors import InputError

RECORD = "run.json"
KERNEL_FILE = "kernel.npy"
REPLAY = "run.yaml"
_FILES = (
    RECORD, "model.safetensors", "curvature.safetensors", "linear-fit.safetensors", "nested-fit.safetensors",
    "samples.safetensors", "result.json", "report.html", "predictions.csv", "predictions.json", REPLAY,
)  # fmt: skip
_FOLDERS = ("predict", "explain", "spectrum")
_DEMO = ("digits.npz", "digits-flipped.npz", "pretrained.safetensors", "flipped", "forgotten")


def check_out(out: Path, source: Path | None = None) -> None:
    """Require a place where a run can be written."""
    if out == Path():
        raise InputError(
            "out is the current folder",
            expected="a run folder, new or existing",
            remedy="name one, such as --out runs/first",
        )
    for place in (out, *out.absolute().parents):
        if place.exists():
            if not place.is_dir():
                raise InputError(
                    f"out is {out}, but {place} is a file",
                    expected="a run folder, new or existing",
                    remedy="name another folder",
                )
            break
    if source is not None and out.resolve() == source.resolve():
        raise InputError(
            f"out and run are the same folder, {out}",
            expected="another folder, to keep the old run",
            remedy="name another folder with --out",
        )


def check_new_file(out: Path, overwrite: bool) -> None:
    """Require that no file is lost."""
    if out.exists() and not overwrite:
        raise InputError(
            f"out is {out}, which exists already",
            expected="a new file",
            remedy="name another file, or pass --overwrite",
        )


def check_unused(out: Path, command: str, settings: str, overwrite: bool) -> None:
    """Require that nothing of another run is lost: a new or empty folder, or a run of the same settings."""
    if not out.is_dir() or overwrite or out == Path():
        return
    names = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    remedy = "name another folder, or pass --overwrite"
    if RECORD in names and REPLAY in names:  # without its settings, which come last, a run was killed
        if not _same_settings(out / REPLAY, command, settings):
            raise InputError(
                f"out is {out}, which holds a finished run of other settings",
                expected="a new folder, or the settings of that run",
                remedy=remedy,
            )
        return
    others = [name for name in names if not _is_own(name)]
    if others:
        raise InputError(
            f"out is {out}, which holds other files, first {others[0]}",
            expected="a new or empty folder, or one of an interrupted run",
            remedy=remedy,
        )


def _is_own(name: str) -> bool:
    """Whether linnet writes a file or a folder of this name into a run."""
    return name in (*_FILES, *_FOLDERS, *_DEMO) or KERNEL_FILE in name or name.startswith("run-")


def _same_settings(path: Path, command: str, settings: str) -> bool:
    """Whether a folder's settings file is of this command and says the same."""
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    return f"linnet {command} " in text and plain_settings(text) == plain_settings(settings)


def plain_settings(text: str) -> str:
    r"""Settings without comments and without the permission to overwrite, which belongs to one call."""
    lines = [line for line in text.splitlines() if not line.startswith(("#", "overwrite:"))]
    return "".join(f"{line}\n" for line in lines)


def clear_run(out: Path) -> None:
    """Remove what linnet wrote for an earlier run; files of others stay."""
    for name in _FILES:
        (out / name).unlink(missing_ok=True)
    for path in out.glob("run-*.yaml"):
        path.unlink()
    for name in _FOLDERS:
        if (out / name / "report.html").exists():
            shutil.rmtree(out / name)


@contextmanager
def claimed(
    out: Path, command: str, settings: str, overwrite: bool, source: Path | None = None
) -> Iterator[None]:
    """A folder of this process alone, in which nothing of another run is lost."""
    check_out(out, source)
    with made_folder(out):
        if is_first():
            check_unused(out, command, settings, overwrite)  # nobody else writes from here on
        yield


@contextmanager
def made_folder(out: Path) -> Iterator[None]:
    """A folder of this process (of several, the first) that is as it was if anything goes wrong."""
    # Only an interruption leaves something, a partial kernel from which the same command goes on.
    if not is_first():
        yield
        return
    made: list[Path] = []
    try:
        try:
            _make(out, made)
        except OSError as error:
            raise InputError(
                f"out is {out}, which cannot be written ({error.strerror or type(error).__name__})",
                expected="a folder that you may write to",
                remedy="name another folder with --out",
            ) from error
        with writing(out), _watched(out):
            try:
                yield
            except KeyboardInterrupt:
                raise
            except BaseException:
                if out in made:
                    for path in out.glob(f"*{KERNEL_FILE}*"):
                        path.unlink()
                raise
    except BaseException:
        for folder in reversed(made):
            with suppress(OSError):  # it holds something, of this run or of another process
                folder.rmdir()
        raise


def _make(out: Path, made: list[Path]) -> None:
    """Make a folder and those above; say which were made."""
    for folder in (*reversed(out.parents), out):
        if not folder.exists():
            with suppress(FileExistsError):  # another process was faster
                folder.mkdir()
                made.append(folder)


_records: dict[Path, tuple[int, int] | None] = {}
"""What the record of a finished run looked like in the folders that this process has claimed."""


@contextmanager
def _watched(out: Path) -> Iterator[None]:
    """Remember which run lies in a folder now, for `check_still`."""
    key = out.resolve()
    if key in _records:  # claimed already
        yield
        return
    _records[key] = _record(out)
    try:
        yield
    finally:
        del _records[key]


def _record(out: Path) -> tuple[int, int] | None:
    """The identity of a finished run's record; None where there is none."""
    try:
        found = (out / RECORD).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def check_still(out: Path) -> None:
    """Require that no run has been finished in a folder since this process claimed it."""
    # The lock sees to that, but where the file system has none.
    now, key = _record(out), out.resolve()
    if now is not None and key in _records and now != _records[key]:
        raise InputError(
            f"out is {out}, where another process has finished a run meanwhile",
            expected="a folder to which no other process writes",
            remedy="name another folder, or pass --overwrite",
        )


def note_record(out: Path) -> None:
    """Take the run that lies in a folder now for one that this process has written."""
    key = out.resolve()
    if key in _records:
        _records[key] = _record(out)
