"""Where a run is written: a folder that can be made, holds nothing else, and is left clean by a failure."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from linnet.errors import InputError

RECORD = "run.json"
KERNEL_FILE = "kernel.npy"
REPLAY = "run.yaml"
_FILES = (
    RECORD, "model.safetensors", "curvature.safetensors", "linear-fit.safetensors", "nested-fit.safetensors",
    "samples.safetensors", "result.json", "report.html", "predictions.csv", "predictions.json", REPLAY,
)  # fmt: skip
_FOLDERS = ("predict", "explain", "spectrum")


def check_out(out: Path, source: Path | None = None) -> None:
    """Require a place where a run can be written.

    Args:
        out: The folder.
        source: The run that is read meanwhile, which must be another one.

    Raises:
        InputError: It has no name, a file lies there or above, or it is the run that is read.
    """
    if out == Path():
        raise InputError(
            "out names no folder of its own",
            expected="a folder, new or old",
            remedy="name one, such as --out runs/first",
        )
    for place in (out, *out.absolute().parents):
        if place.exists():
            if not place.is_dir():
                raise InputError(
                    f"out is {out}, but {place} is a file",
                    expected="a folder, new or old",
                    remedy="name another folder",
                )
            break
    if source is not None and out.resolve() == source.resolve():
        raise InputError(
            f"out and run are the same folder, {out}",
            expected="another folder, so that the old run stays as it is",
            remedy="name another folder with --out",
        )


def check_unused(out: Path, command: str, settings: str, overwrite: bool) -> None:
    """Require that nothing of another run is lost: a new or empty folder, or a run of the same settings.

    Args:
        out: The folder.
        command: The command that will write there.
        settings: Its settings as YAML.
        overwrite: Whether a run of other settings may be replaced.

    Raises:
        InputError: A finished run of other settings, or files of somebody else, lie there.
    """
    if not out.is_dir() or overwrite or out == Path():
        return
    names = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    remedy = "name another folder, or pass --overwrite"
    if RECORD in names:
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
    return name in _FILES or name in _FOLDERS or KERNEL_FILE in name or name.startswith("run-")


def _same_settings(path: Path, command: str, settings: str) -> bool:
    """Whether a folder's settings file is of this command and says the same."""
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    return f"linnet {command} " in text and plain_settings(text) == plain_settings(settings)


def plain_settings(text: str) -> str:
    r"""Settings without comments and without the permission to overwrite, which belongs to one call.

    Args:
        text: YAML.

    Returns:
        The other lines.

    Example:
        >>> plain_settings("# of a run\nshots: 3\noverwrite: true\n")
        'shots: 3\n'
    """
    lines = [line for line in text.splitlines() if not line.startswith(("#", "overwrite:"))]
    return "".join(f"{line}\n" for line in lines)


def clear_run(out: Path) -> None:
    """Remove what linnet wrote for an earlier run; files of others stay.

    Args:
        out: The folder.
    """
    for name in _FILES:
        (out / name).unlink(missing_ok=True)
    for path in out.glob("run-*.yaml"):
        path.unlink()
    for name in _FOLDERS:
        if (out / name / "report.html").exists():
            shutil.rmtree(out / name)


@contextmanager
def made_folder(out: Path) -> Iterator[None]:
    """A folder that is as it was if anything goes wrong; only an interruption leaves a partial kernel.

    Args:
        out: The folder; it and those above are made if missing.

    Yields:
        None.

    Raises:
        InputError: It cannot be made, or not be written.
        KeyboardInterrupt: The user interrupted what is done inside.
    """
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
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        if out in made:
            for path in out.glob(f"*{KERNEL_FILE}*"):
                path.unlink()
        for folder in reversed(made):
            if not any(folder.iterdir()):
                folder.rmdir()
        raise


def _make(out: Path, made: list[Path]) -> None:
    """Make a folder and those above; say which were made; try to write there."""
    for folder in (*reversed(out.parents), out):
        if not folder.exists():
            folder.mkdir()
            made.append(folder)
    probe = out / ".linnet-probe"
    probe.touch()
    probe.unlink()
