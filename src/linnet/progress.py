"""Progress bars of long steps, silent for short ones, and numbers of a run for its user.

Set the environment variable ``LINNET_PROGRESS`` to 0 to silence every bar, to 2 to show it from the start.
What takes steps gives numbers for dashboards to ``log(values, step)``, which is checked and called here.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from linnet.params import flag, function

T = TypeVar("T")

_DELAY = 2.0  # seconds of silence before anything is shown
_LINE_INTERVAL = 10.0  # seconds between two plain lines
_LINE = 79  # characters of a plain line: one less than terminals have had, since some wrap a full one
_BAR = 40  # columns that a bar, its share done and the time left take beside what is being done


class _Meter(Protocol):
    """Progress display, made once there is something to show."""

    def advance(self, done: int) -> None:
        """Show that ``done`` items are finished."""

    def close(self) -> None:
        """Leave the last state on the screen."""


def track(
    iterable: Iterable[T], description: str, total: int | None = None, enabled: bool | None = None
) -> Iterator[T]:
    """Iterate, showing progress on standard error once two seconds have passed."""
    # On a terminal it is a bar with the time left; elsewhere (a log file, a batch job) a plain line every ten
    # seconds.
    if not _is_enabled(enabled):
        yield from iterable
        return
    start = time.monotonic()
    meter: _Meter | None = None
    try:
        for done, item in enumerate(iterable):
            if meter is None and time.monotonic() - start >= _delay():
                meter = _make_meter(description, _length(iterable, total), start)
            if meter is not None:
                meter.advance(done)
            yield item
            finished = done + 1
        if meter is not None:
            meter.advance(finished)
    finally:
        if meter is not None:
            meter.close()


@contextmanager
def waiting(description: str, seconds: float | None = None, enabled: bool | None = None) -> Iterator[None]:
    """Say that one long step without countable parts is under way, once two seconds have passed."""
    # A line at first and then every ten seconds, on standard error, with the time left where it can be
    # guessed and is not up.
    if not _is_enabled(enabled):
        yield
        return
    done, start = threading.Event(), time.monotonic()

    def speak() -> None:
        pause = _delay()
        while not done.wait(pause):
            elapsed, pause = time.monotonic() - start, _LINE_INTERVAL
            left = ""
            if seconds is not None and elapsed < seconds:
                left = f", about {format_seconds(max(seconds - elapsed, 1))} left"
            sys.stderr.write(_fitted(description, f": {format_seconds(elapsed)} so far{left}") + "\n")
            sys.stderr.flush()

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _is_enabled(enabled: bool | None) -> bool:
    """The argument if given, else the environment's word, else True."""
    return os.environ.get("LINNET_PROGRESS", "1") != "0" if enabled is None else flag("progress", enabled)


def is_verbose() -> bool:
    """Whether everything is to be shown, as ``--verbose`` asks for."""
    return os.environ.get("LINNET_PROGRESS") == "2"


def _delay() -> float:
    """Seconds of silence before anything is shown."""
    return 0.0 if is_verbose() else _DELAY


def _fitted(description: str, rest: str, width: int = _LINE) -> str:
    """A description, cut where needed, and what follows it."""
    room = max(width - len(rest), 10)
    return (description if len(description) <= room else f"{description[: room - 3].rstrip()}...") + rest


def _length(iterable: Iterable[T], total: int | None) -> int | None:
    """The number of items, if anybody knows it."""
    if total is not None:
        return total
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None


def _make_meter(description: str, total: int | None, start: float) -> _Meter:
    """A bar on a terminal, lines elsewhere."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return _Bar(description, total, start) if is_terminal else _Lines(description, total, start)


class _Bar:
    """A tqdm bar that counts its time from when the work began."""

    def __init__(self, description: str, total: int | None, start: float) -> None:
        from tqdm import tqdm

        # the rate, which tqdm shows too, tells less than the time left; the bar gets its room
        form = (
            None
            if total is None
            else "{desc}: {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}, {remaining} left"
        )
        desc = _fitted(description, "", shutil.get_terminal_size().columns - _BAR)
        self._bar = tqdm(desc=desc, total=total, file=sys.stderr, dynamic_ncols=True, bar_format=form)
        self._bar.start_t -= time.monotonic() - start

    def advance(self, done: int) -> None:
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """Plain lines for where a bar cannot be redrawn."""

    def __init__(self, description: str, total: int | None, start: float) -> None:
        self._description, self._total, self._start = description, total, start
        self._last = -_LINE_INTERVAL

    def advance(self, done: int) -> None:
        now = time.monotonic()
        if now - self._last >= _LINE_INTERVAL or done == self._total:
            self._last = now
            sys.stderr.write(self._text(done, now - self._start) + "\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Every line is already complete."""

    def _text(self, done: int, elapsed: float) -> str:
        if self._total is None:
            return _fitted(self._description, f": {done} done, {format_seconds(elapsed)} so far")
        left = elapsed * (self._total - done) / max(done, 1)
        return _fitted(self._description, f": {done} of {self._total}, {format_seconds(left)} left")


def format_seconds(seconds: float) -> str:
    """A duration for people."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


Log = Callable[[dict[str, float], int], object]


def check_log(log: Any) -> Log | None:
    """Raise unless numbers can be told to an argument."""
    return None if log is None else function("log", log, "a function of a dict of numbers and a step")


def tell(log: Log, values: dict[str, float], step: int, after: str, name: str = "log=") -> None:
    """Call a user's log; an error that it raises stays the user's own, such as one that stops a run."""
    try:
        log(values, step)
    except Exception as error:
        error.add_note(
            f"{name} raised this at step {step}: {after}. Expected: a function of a dict of numbers and a "
            "step. To fix it: mend the function; to go on without its numbers, catch the error inside it."
        )
        raise
