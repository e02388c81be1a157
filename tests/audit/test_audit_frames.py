"""Data frames whose rows and columns come in another order than what is asked beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import linnet
from linnet import audit

pd = pytest.importorskip("pandas")
matplotlib = pytest.importorskip("matplotlib")
N = 30


def frame() -> Any:
    return pd.DataFrame(np.random.default_rng(0).normal(size=(N, 4)), columns=list("abcd"))


def classes() -> Any:
    return pd.Series((frame().a + frame().b > 0).astype(int))


def values() -> Any:
    return pd.DataFrame({"y": frame().a - frame().c})


def adapted(y: Any, outputs: int) -> Any:
    torch.manual_seed(0)
    return linnet.adapt(torch.nn.Linear(4, outputs), (frame(), y))


def fitted(y: Any, outputs: int) -> Any:
    torch.manual_seed(0)
    return linnet.fit(linnet.linearize(torch.nn.Linear(4, outputs)), (frame(), y), ridge=0.1)


ASKED: dict[str, tuple[bool, Callable[[Any, Any, Any], Any]]] = {
    "flips": (True, lambda fit, x, y: audit.flips(fit, fit, x, y).accuracy_before),
    "influence": (True, lambda fit, x, y: audit.influence(fit, x, labels=y).loss),
    "group_means": (True, lambda fit, x, y: audit.group_means(fit, x, y).means),
    "evaluate": (True, lambda fit, x, y: linnet.evaluate(fit, (x, y)).accuracy),
    "calibration": (True, lambda fit, x, y: fit.plot.calibration(x, y).error),
    "predicted": (False, lambda fit, x, y: fit.plot.predicted(x, y).target),
    "loss_influence": (False, lambda fit, x, y: audit.loss_influence(fit, x, y)),
}


@pytest.mark.parametrize("make", [adapted, fitted])
@pytest.mark.parametrize("name", ASKED)
def test_answers_are_found_by_their_index_and_inputs_by_their_columns(name: str, make: Any) -> None:
    of_classes, ask = ASKED[name]
    if name == "loss_influence" and make is adapted:
        make = fitted
    y = classes() if of_classes else values()
    fit, x = make(y, 2 if of_classes else 1), frame()
    expected = torch.as_tensor(ask(fit, x, y))
    for inputs, answers in (
        (x, y[::-1]),
        (x[list("dbca")], y),
        (x[list("dbca")], y.iloc[np.roll(range(N), 7)]),
    ):
        torch.testing.assert_close(torch.as_tensor(ask(fit, inputs, answers)), expected)
