"""Numbers by step to TensorBoard, Weights & Biases, MLflow or a table, by their own writers."""

from __future__ import annotations

import csv
import difflib
import importlib
import re
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from linnet.disk import refuse_write
from linnet.distribution import importing
from linnet.errors import DependencyError, InputError, LinnetError
from linnet.logged import Log, numbers
from linnet.params import integer, refuse, shown
from linnet.shown import Shown

_REASON = 200  # characters of another package's error

Opened = tuple[Log, Callable[[], object]]  # what writes, and what ends it


class Logger:
    """Takes numbers by step; a context that ends the record when it is left.

    A place that fails with the first number raises. One that fails later does not end the training whose
    numbers it takes: that is warned of, what follows is left out, and ``close()`` raises.

    Args:
        where: The place, in words.
        start: Begins the record, when there is a first number: what writes, and what ends it.

    Example:
        >>> with Logger("the screen", lambda: (print, lambda: print("end"))) as log:
        ...     log({"loss": 0.5, "why": "a text"}, 3)
        {'loss': 0.5} 3
        end
    """

    def __init__(self, where: str, start: Callable[[], Opened]) -> None:
        self._where, self._start = where, start
        self._opened: Opened | None = None
        self._has_written = False
        self._failure: LinnetError | None = None

    def __call__(self, values: Any, step: int = 0) -> None:
        """Write the numbers of a step.

        Args:
            values: A dict, or a report, fit or result, of which the numbers are taken.
            step: The step.

        Raises:
            InputError: If they are neither.
            LinnetError: If the package behind it does not take the first ones.
        """
        integer("step", step, least=0)
        found = numbers(values)
        if not found and not isinstance(values, Mapping | Shown):
            expected = "a dict of numbers, or a report, fit or result"
            refuse("values", values, expected, "give every number a name")
        if not found or self._failure is not None:
            return
        try:
            with self._explained():
                self._opened = self._opened or self._start()
                self._opened[0](found, step)
                self._has_written = True
        except LinnetError as error:
            if not self._has_written:
                raise
            self._failure = error
            warnings.warn(f"the record ends before step {step}: {error}", RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """End the record.

        Raises:
            DependencyError: If the package behind it has failed on the way, or does not end it.
        """
        opened, self._opened = self._opened, None
        failure, self._failure = self._failure, None
        if opened is not None:
            with self._explained() if failure is None else suppress(Exception):
                opened[1]()
        if failure is not None:
            raise failure

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the package, such as of a server that is not there, in our words."""
        try:
            yield
        except LinnetError:
            raise
        except Exception as error:
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", _REASON, placeholder="...")
            raise DependencyError(
                f"numbers could not be written to {self._where} ({reason})",
                expected="a place that can be reached and written",
                remedy='check the address and the account, or write to "csv:FILE"',
            ) from error

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with suppress(LinnetError) if kind is not None else nullcontext():
            self.close()


def log_to(where: str) -> Logger:
    """Where numbers of training, fits and results are written: for ``log=``, or to be called.

    Args:
        where: ``"tensorboard:FOLDER"``, ``"wandb:PROJECT"``, ``"mlflow:URI"`` or ``"csv:FILE"``, a new file
            with a row a number. ``"mlflow:"`` takes MLflow's own setting; its run, or that of W&B, is the
            one that is active, else a new one.

    Returns:
        A function of numbers and a step. The record begins with the first number, and ends with ``close()``.
        Folders are tried at once: that files can be made there.

    Raises:
        DependencyError: If the package cannot be imported.
        DiskSpaceError: If the disk is full.
        InputError: If ``where`` names no place, or one that cannot be written.

    Example:
        >>> import linnet, tempfile, torch
        >>> file = Path(tempfile.mkdtemp()) / "numbers.csv"
        >>> net, x = torch.nn.Linear(2, 1), torch.ones(4, 2)
        >>> with log_to(f"csv:{file}") as log:
        ...     optimizer = linnet.optim.GaussNewton(net, linnet.likelihoods.Gaussian(), log=log)
        ...     _ = optimizer.step(x, torch.ones(4, 1))
        >>> file.read_text().splitlines()[:2]
        ['step,name,value', '1,examples,4.0']
    """
    kind, colon, place = where.partition(":") if isinstance(where, str) else ("", "", "")
    if not colon or kind not in _KINDS or not (place or kind == "mlflow"):
        close = difflib.get_close_matches(kind, _KINDS, n=1)
        raise InputError(
            f"numbers cannot be written to {shown(where)}",
            expected='"tensorboard:FOLDER", "wandb:PROJECT", "mlflow:URI" or "csv:FILE"',
            remedy=f'did you mean "{close[0]}:{place or "PLACE"}"?' if close else "name one of the four",
        )
    return Logger(where, _KINDS[kind](place))


def _csv(place: str) -> Callable[[], Opened]:
    """A table with a row a number."""
    path = Path(place)

    def require_new() -> None:
        if path.exists():
            raise InputError(f"{path} exists", expected="a new file", remedy="name another one, or delete it")

    require_new()
    _try_folder(path.parent)

    def start() -> Opened:
        require_new()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("x", newline="", encoding="utf-8")
        except OSError as error:
            refuse_write(path, error)
        table = csv.writer(file)
        table.writerow(["step", "name", "value"])

        def write(values: dict[str, float], step: int) -> None:
            table.writerows([step, name, value] for name, value in values.items())
            file.flush()

        return write, file.close

    return start


def _tensorboard(place: str) -> Callable[[], Opened]:
    """Scalars for TensorBoard."""
    package = _package("torch.utils.tensorboard", "tensorboard")
    if "://" not in place:  # such as s3://
        _try_folder(Path(place))

    def start() -> Opened:
        writer = package.SummaryWriter(place)

        def write(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return write, writer.close

    return start


def _wandb(place: str) -> Callable[[], Opened]:
    """The history of a run of Weights & Biases."""
    package = _package("wandb", "wandb")

    def start() -> Opened:
        active = package.run
        run = package.init(project=place) if active is None else active

        def write(values: dict[str, float], step: int) -> None:
            run.log(values, step=step)

        return write, run.finish if active is None else lambda: None

    return start


def _mlflow(place: str) -> Callable[[], Opened]:
    """The metrics of a run of MLflow."""
    package = _package("mlflow", "mlflow")

    def start() -> Opened:
        if place:
            package.set_tracking_uri(place)
        active = package.active_run()
        run = (package.start_run() if active is None else active).info.run_id

        def write(values: dict[str, float], step: int) -> None:
            allowed = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in values.items()}
            package.log_metrics(allowed, step=step, run_id=run)

        return write, package.end_run if active is None else lambda: None

    return start


_KINDS: dict[str, Callable[[str], Callable[[], Opened]]] = {
    "csv": _csv,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}


def _try_folder(folder: Path) -> None:
    """Raise unless files can be made in a folder; it is left as it was."""
    made: list[Path] = []
    try:
        for place in (*reversed(folder.parents), folder):
            if not place.exists():
                place.mkdir()
                made.append(place)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        refuse_write(folder, error)
    finally:
        for place in reversed(made):
            with suppress(OSError):  # of others that use it already
                place.rmdir()


def _package(module: str, name: str) -> Any:
    """A module of an optional package."""
    remedy = f'pip install {name}, or write to "csv:FILE", which needs nothing'
    with importing(module, f"log_to({name!r})", f"{name}, which writes the numbers", remedy):
        return importlib.import_module(module)
