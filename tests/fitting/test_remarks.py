"""Remarks of a fit are true of its examples, also after a change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import linnet
from linnet.fitting.head import RECORD
from tests.fitting.problems import near, real

X, Y = real(12, 3, seed=1), torch.arange(12) % 2
MORE, MORE_Y = real(4, 3, seed=2), torch.tensor([0, 1, 0, 1])
CHANGES: dict[str, Callable[[Any], Any]] = {
    "forget": lambda fit: fit.forget([0, 1]),
    "update": lambda fit: fit.update((MORE, MORE_Y)),
    "constrain": lambda fit: fit.constrain(MORE, MORE_Y),
    "tune": lambda fit: linnet.audit.tune_ridge(fit, (MORE, MORE_Y)),
    "relabel": lambda fit: linnet.audit.counterfactual(fit, 0, 1).fit,
}


def body() -> nn.Module:
    """A network of four hidden units."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def said(fit: Any) -> str:
    """All remarks in one."""
    return " ".join(fit.summary()["warnings"])


def test_values_far_from_the_outputs_are_said() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    y = X[:, :1].sin() + 0.1 * torch.randn(12, 1).double()
    assert not linnet.fit(linnet.linearize(net), (X, y + 20)).record.warnings
    with pytest.warns(UserWarning, match="times its own spread away"):
        far = linnet.fit(linnet.linearize(net), (X, y + 1e4))
    assert "pass y - y.mean(0)" in said(far)


def test_values_of_unlike_spreads_are_said() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    y = X[:, :2].sin() * torch.tensor([1.0, 9.0])
    for make in (lambda y: linnet.fit(linnet.linearize(net), (X, y)), lambda y: linnet.adapt(net, (X, y))):
        with pytest.warns(UserWarning, match="columns of y have spreads from"):
            assert "pass y / y.std(0)" in said(make(y))
        assert not make(y / y.std(0)).record.warnings
        assert not make((y > y.median(0).values).double()).record.warnings  # several labels of two values


def test_copies_and_constants_are_said() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    twice = torch.arange(12).repeat(2)
    for make in (linnet.adapt, lambda net, data: linnet.fit(linnet.linearize(net), data)):
        with pytest.warns(UserWarning, match="12 of 24 samples are copies of others"):
            fit = make(net, (X[twice], Y[twice]))
        assert "copies of others" in said(fit)
        assert "copies of others" not in said(fit.forget(list(range(12))))
        assert "11 of 23 samples are copies" in said(fit.forget([0]))
        others = torch.cat([Y, torch.where(torch.arange(12) < 3, 1 - Y, Y)])  # rows of few values come again
        assert "copies" not in said(make(net, (X[twice], others)))
        with pytest.warns(UserWarning, match="y is constant"):
            assert "y is constant" in said(make(net, (X, torch.ones(12, 2).double())))


def test_values_beyond_the_type_of_predictions_are_said() -> None:
    torch.manual_seed(0)
    net, y = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), X[:, :1].sin()
    far = "the mean of y is .* more than the intercept carries"
    told = r"rounding leaves errors in the outputs of about .*pass y - y.mean"
    with pytest.warns(UserWarning, match=far), pytest.warns(UserWarning, match=told):
        assert "y.mean(0)" in said(linnet.adapt(net, (X.float(), y + 1e7)))
    for unit in (1e-25, 1e25):
        with pytest.warns(UserWarning, match="float32 does not hold the squares of y"):
            linnet.adapt(net, (X.float(), y * unit))
    with pytest.warns(UserWarning, match=far):
        assert "rounding" not in said(linnet.adapt(net.double(), (X, y + 1e7)))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.thinned(2)
def test_a_changed_fit_no_longer_claims_held_out_outputs(change: str) -> None:
    lin = linnet.linearize(linnet.with_head(body(), 2, linnet.Probe(cross_fit=3), data=(X, Y)))
    fit = linnet.fit(lin, (X, Y))
    assert "leave-one-out outputs are those of 3 procedures" in said(fit)
    changed = CHANGES[change](fit)
    near(changed.loo(), changed.targets - changed.system.loo_residuals())  # the head as it is
    assert "procedures" not in said(changed)
    assert "optimistic" in said(changed)
    assert "fit before it was changed" in said(changed)
    assert said(changed.forget([3])).count("fit before it was changed") == 1


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_the_labels_that_the_head_has_seen_are_counted_anew(loss: str) -> None:
    lin = linnet.linearize(linnet.with_head(body(), 2, data=(X, Y)))
    assert not said(linnet.fit(lin, (MORE, MORE_Y), loss))
    both = linnet.fit(lin, (MORE, MORE_Y), loss).update((X, Y))
    assert "the head was fitted on 12 of these 16 examples" in said(both)
    assert "on 11 of these 15" in said(both.forget([15]))
    rest = both.forget(list(range(4, 16)))
    assert "no longer has" in said(rest)
    assert "optimistic" not in said(rest)


def test_values_are_known_to_the_head_with_and_without_their_axis() -> None:
    values = X.sum(1)
    lin = linnet.linearize(linnet.with_head(body(), 1, data=(X, values)))
    fit = linnet.fit(lin, (X, values))
    assert "12 of these 12" in said(fit)
    assert "11 of these 11" in said(fit.forget([0]))


def test_what_was_said_of_a_head_outlives_its_record(tmp_path: Path) -> None:
    model = linnet.with_head(body(), 2, data=(X, Y))
    linnet.fit(linnet.linearize(model), (X, Y)).save(tmp_path)
    delattr(model, RECORD)  # as in a network built anew, with the weights loaded
    assert "the head was fitted on" in said(linnet.load_fit(tmp_path, model).forget([0]))


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_lonely_classes_are_those_of_the_examples_there_are(loss: str) -> None:
    y = torch.zeros(12, dtype=torch.long)
    y[3] = 1
    lin = linnet.linearize(body())
    fit = linnet.fit(lin, (X, y), loss)
    assert "1 class(es) have a single example" in said(fit)
    assert not said(fit.update((MORE, MORE_Y)))
    assert "single" not in said(fit.forget([3]))
    assert ("1 class(es) have no example (1)" in said(fit.forget([3]))) == (loss == "cross-entropy")
    assert "single" in said(linnet.fit(lin, (X, Y), loss).forget([1, 3, 5, 7, 9]))
