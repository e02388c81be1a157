"""Numbers for people's dashboards: ``log=`` is called with a dict and a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import linnet
from linnet.errors import InputError
from linnet.likelihoods import Gaussian
from linnet.progress import check_log


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
