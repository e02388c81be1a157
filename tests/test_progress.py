"""Progress: silent when quick, lines in a log, a bar on a terminal; ``log=`` takes numbers and a step."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import linnet
from linnet import progress
from linnet.errors import InputError
from linnet.likelihoods import Gaussian
from linnet.progress import check_log, format_seconds, track


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


def test_a_log_is_a_function() -> None:
    assert check_log(None) is None
    with pytest.raises(InputError, match="a function of a dict of numbers and a step"):
        check_log("tensorboard")


def test_an_error_of_a_users_log_is_the_users_and_says_what_is_done(tmp_path: Path) -> None:
    class Pruned(Exception):
        pass

    def stop(values: Any, step: int) -> None:
        raise Pruned

    torch.manual_seed(0)
    net, x = nn.Linear(2, 1), torch.randn(16, 2)
    optimizer = linnet.optim.GaussNewton(net, Gaussian(), log=stop)
    training = linnet.optim.IterativeLinearization(net, lambda p: torch.optim.SGD(p, 0.1), 5, log=stop)
    steps = {
        lambda: optimizer.step(x, x[:, :1]): optimizer,
        lambda: training.step(lambda module: module(x).square().mean()): training,
    }
    for step, of in steps.items():
        before = net.weight.clone()
        with pytest.raises(Pruned) as caught:
            step()
        assert "at step 1: the step is complete" in caught.value.__notes__[0]
        assert not torch.equal(net.weight, before)
        assert of.steps == 1  # type: ignore[attr-defined]
    how: dict[str, Any] = {"training": linnet.Training(steps=2)}
    relu, labels = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), torch.arange(16) % 2
    for folder, words in (
        (None, "the same call would go on"),
        (tmp_path / "run", "goes on from the last state"),
    ):
        run = linnet.Run(log=stop, checkpoint=folder)
        with pytest.raises(Pruned) as caught:
            linnet.finetune(relu, (x, labels), "nlft", run=run, **how)
        assert words in caught.value.__notes__[0]


def test_optimizers_and_trainings_are_logged(float64: torch.dtype) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(16, 2)
    y, rows = x.prod(1, keepdim=True), list[tuple[int, dict[str, float]]]()

    def log(values: dict[str, float], step: int) -> None:
        rows.append((step, values))

    def taken(name: str) -> list[float]:
        found = [values[name] for _, values in rows if name in values]
        return found

    optimizer = linnet.optim.GaussNewton(net, Gaussian(), damping=1.0, log=log)
    reports = [optimizer.step(x, y) for _ in range(3)]
    assert taken("loss") == [report.loss for report in reports]
    assert [step for step, _ in rows] == [1, 2, 3]
    rows.clear()
    training = linnet.optim.IterativeLinearization(
        net, lambda p: torch.optim.SGD(p, lr=0.01), period=2, record_gap=True, log=log
    )
    losses = [float(training.step(lambda f: (f(x) - y).square().mean())) for _ in range(4)]
    assert taken("loss") == losses
    assert taken("feature updates") == [0.0, 1.0, 1.0, 2.0]
    assert taken("gap") == [value for _, value in training.report.gaps]
    rows.clear()
    labels, how = (y[:, 0] > 0).long(), {"training": linnet.Training(epochs=2)}
    tuned = linnet.finetune(net, (x, labels), "nlft", run=linnet.Run(log=log, log_every=1), **how)
    assert taken("loss") == [h["loss"] for h in tuned.history if "loss" in h]
