"""Progress: silent when quick, lines in a log, a bar on a terminal."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Generator

import pytest

from linnet import progress
from linnet.progress import format_seconds, track


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that moves four seconds whenever it is read."""
    now = [0.0]

    def tick() -> float:
        now[0] += 4.0
        return now[0]

    monkeypatch.setattr("linnet.progress.time.monotonic", tick)
    monkeypatch.delenv("LINNET_PROGRESS", raising=False)
    return now


def test_quick_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(5), "quick")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr() == ("", "")


def test_long_work_in_a_log_writes_lines_with_the_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(track("abcdef", "factors")) == list("abcdef")
    out, err = capsys.readouterr()
    assert not out
    assert "factors: 3 of 6, " in err
    assert err.splitlines()[-1] == "factors: 6 of 6, 0 s left"


def test_an_unknown_length_says_how_much_is_done(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    list(track(iter("abc"), "stream"))
    assert "stream: 0 done, " in capsys.readouterr().err


def test_total_is_believed(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    list(track(iter("abc"), "stream", total=3))
    assert "stream: 3 of 3, 0 s left" in capsys.readouterr().err


def test_a_terminal_gets_a_bar(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    list(track(range(3), "batches"))
    text = screen.getvalue()
    assert "batches" in text
    assert "3/3" in text


@pytest.mark.parametrize(("enabled", "variable"), [(False, "1"), (None, "0")])
def test_it_can_be_silenced(
    enabled: bool | None,
    variable: str,
    clock: list[float],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LINNET_PROGRESS", variable)
    assert list(track(range(9), "silent", enabled=enabled)) == list(range(9))
    assert not capsys.readouterr().err


def test_the_argument_is_stronger_than_the_environment(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINNET_PROGRESS", "0")
    list(track(range(9), "loud", enabled=True))
    assert "loud" in capsys.readouterr().err


def test_an_abandoned_loop_closes_its_bar(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(progress._Lines, "close", lambda self: closed.append(True))
    items = track(range(100), "abandoned")
    assert isinstance(items, Generator)
    next(items)
    items.close()
    assert closed == [True]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599, "59 min 59 s"), (90061, "25 h 01 min")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_waiting_speaks_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_DELAY", 0.01)
    monkeypatch.setattr(progress, "_LINE_INTERVAL", 0.02)
    told = ""
    with progress.waiting("thinking", seconds=90):
        for _ in range(3000):  # on a busy machine the thread that speaks may be kept waiting
            time.sleep(0.02)
            told += capsys.readouterr().err
            if told.count("\n") > 1:
                break
    lines = told.splitlines()
    assert len(lines) > 1
    assert lines[0].startswith("thinking: 0 s so far, about 1 min 30 s left")
    capsys.readouterr()
    with monkeypatch.context() as patience:
        patience.setattr(progress, "_DELAY", 60.0)
        with progress.waiting("thinking"):
            pass
    with progress.waiting("thinking", enabled=False):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
