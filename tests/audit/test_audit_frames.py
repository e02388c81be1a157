"""Data frames whose rows and columns come in another order than what is asked beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import linnet
from linnet import audit
from linnet.errors import InputError

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


@pytest.mark.parametrize("make", [adapted, fitted])
def test_held_values_and_groups_are_found_by_their_index(make: Any) -> None:
    fit, x = make(values(), 1), frame()[:6]
    held, groups = values()[:6] + 1, pd.Series([0, 0, 0, 1, 1, 1])
    expected = fit.constrain(x[:2], torch.as_tensor(held[:2].to_numpy())).predict(x)
    torch.testing.assert_close(fit.constrain(x[:2], held[:2][::-1]).predict(x), expected)
    expected = fit.constrain(x, groups=groups).predict(x)
    torch.testing.assert_close(fit.constrain(x, groups=groups.iloc[[3, 0, 4, 1, 5, 2]]).predict(x), expected)


def test_columns_of_one_name_are_refused() -> None:
    twice = frame().set_axis(list("abca"), axis=1)
    with pytest.raises(InputError, match="several columns named 'a'"):
        linnet.adapt(torch.nn.Linear(4, 2), (twice, classes()))


def test_weights_with_an_index_are_refused_beside_batches() -> None:
    x, y, w = frame(), values(), pd.Series(np.arange(1.0, N + 1))
    pieces, net = [(x[:10], y[:10]), (x[10:], y[10:])], torch.nn.Linear(4, 1)
    with pytest.raises(InputError, match="sample_weight has an index"):
        linnet.adapt(net, pieces, sample_weight=w[::-1])
    found = linnet.adapt(net, pieces, sample_weight=w.to_numpy()).predict(x)
    torch.testing.assert_close(found, linnet.adapt(net, (x, y), sample_weight=w).predict(x))
