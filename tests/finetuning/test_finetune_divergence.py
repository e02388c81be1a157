"""Steps that are too large: seen in the training loss, told, taken again smaller where the rate is free."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import DataError, InputError, ModelError, NumericalError
from linnet.finetuning.finetune import Prepared
from linnet.finetuning.trainer import LossCurve
from linnet.fitting.descent import held_out_split
from linnet.tangent.surgery import leaky_relu
from tests.finetuning import by_name
from tests.finetuning.by_name import finetune, recover
from tests.refusals import refused

QUIET: dict[str, Any] = {"steps": 100, "batch_size": 100, "head": "zero", "momentum": 0.0}
PLAIN: dict[str, Any] = {**QUIET, "preconditioner": "none", "activation": "relu", "params": "last-layer"}


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def classes(n: int = 40) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    y = torch.arange(n) % 2
    x = torch.randn(n, 3, generator=g, dtype=torch.float64)
    return x + y[:, None], y


def threshold(x: Tensor) -> float:
    """2/λ_max of the mean squared loss ½‖f − y‖² in the last layer: above it gradient descent diverges."""
    features = net()[:2](x).detach()
    features = torch.cat([features, torch.ones(len(x), 1, dtype=features.dtype)], 1)
    return 2 / float(torch.linalg.eigvalsh(features.T @ features / len(x))[-1])


def curve(losses: list[float], window: int = 4) -> LossCurve:
    made = LossCurve(window)
    for loss in losses:
        made.add(loss)
    return made


def test_a_curve_rises_by_a_fifth_of_its_first_mean() -> None:
    assert curve([10.0] * 4 + [1.0] * 4 + [3.1] * 4).rises
    assert not curve([10.0] * 4 + [1.0] * 4 + [2.9] * 4).rises
    assert not curve([10.0] * 4 + [0.0, 8.0] * 2 + [4.0, 11.0] * 2).rises  # batches differ that much
    assert not curve([1.0] * 4).rises  # one window says nothing
    assert curve([10.0] * 4 + [1.0] * 4 + [9.0] * 2).rises  # half a window says enough
    assert not curve([10.0] * 4 + [1.0] * 4 + [9.0]).rises
    assert not curve([1.0] * 4 + [9.0] * 4 + [0.5] * 4).rises  # a detour that was mended
    assert LossCurve.of(100, 16).window == 13  # two epochs: ten steps at least
    assert LossCurve.of(1000, 16).window == 63


@hypothesis.given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=60), st.integers(1, 59))
def test_curves_take_up_where_they_were(losses: list[float], cut: int) -> None:
    whole, first = curve(losses), curve(losses[:cut])
    again = LossCurve(**asdict(first))
    for loss in losses[cut:]:
        again.add(loss)
    assert (again.means, again.rises) == (whole.means, whole.rises)
    assert not curve(sorted(losses, reverse=True)).rises


def test_a_rate_beyond_the_threshold_is_told(tmp_path: Path) -> None:
    x, y = classes()
    rate = threshold(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calm = finetune(net(), (x, y), "lqf", learning_rate=0.98 * rate, **PLAIN)
    assert not calm.diverged
    assert not calm.summary()["values"]["diverged"]
    with pytest.warns(UserWarning, match="learning_rate=") as told:
        wild = finetune(net(), (x, y), "lqf", learning_rate=1.1 * rate, **PLAIN)
    assert told[0].filename == by_name.__file__  # the line is the caller's
    assert wild.diverged
    assert wild.settings.values["learning_rate"] == 1.1 * rate  # the user's word is kept
    wild.save(tmp_path)
    assert linnet.load(tmp_path, net()).diverged
    assert wild.summary()["values"]["diverged"]


@pytest.mark.parametrize("factor", [1.1, 1e200])
def test_the_recipes_own_rate_is_made_smaller(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = classes()
    given: dict[str, Any] = {**QUIET, "loss": "squared", "params": "last-layer"}
    wanted = finetune(net(), (x, y), "nlft", learning_rate=0.4 * threshold(x), **given)
    own = {1.1: 1.2 * threshold(x), 1e200: 1e200}[factor]
    monkeypatch.setattr(Prepared, "rate", lambda _self, trial, _p, _n: trial.learning_rate or own)
    if factor == 1e200:  # three thirds do not mend this
        refused(NumericalError, lambda: finetune(net(), (x, y), "nlft", **given), "learning_rate=")
        return
    tuned = finetune(net(), (x, y), "nlft", **given)
    assert not tuned.diverged
    assert tuned.settings.values["learning_rate"] == pytest.approx(0.4 * threshold(x))
    assert any("restarted with learning_rate" in note for note in tuned.notes)
    assert (tuned.predict(x) - wanted.predict(x)).abs().max() < 1e-9


def uneven() -> tuple[Tensor, Tensor]:
    """Examples of which those that a search holds out reach far: what trains on the rest diverges on all."""
    x, y = classes()
    _, kept = held_out_split(y, 0)
    x[kept] *= 10
    return x, y


@pytest.mark.long
def test_a_search_whose_last_run_diverges_takes_smaller_steps(tmp_path: Path) -> None:
    x, y = uneven()
    train, _ = held_out_split(y, 0)
    low, high = threshold(x), threshold(x[train])
    assert high > 1.1 * low
    rate = 0.5 * (low + high)
    search: dict[str, Any] = {"search": {"learning_rate": [1e300, rate]}}
    tuned = finetune(net(), (x, y), "lqf", **search, **PLAIN, checkpoint=tmp_path)
    assert [c["taken"] for c in tuned.candidates] == [False, True]
    assert not tuned.diverged
    assert tuned.settings.values["learning_rate"] == pytest.approx(rate / 3)
    once = finetune(net(), (x, y), "lqf", learning_rate=tuned.settings.values["learning_rate"], **PLAIN)
    torch.testing.assert_close(once.predict(x), tuned.predict(x))
    again = finetune(net(), (x, y), "lqf", **search, **PLAIN, checkpoint=tmp_path)  # from what was kept
    torch.testing.assert_close(again.predict(x), tuned.predict(x))
    assert again.notes == tuned.notes


@pytest.mark.long
def test_a_search_leaves_out_what_diverges() -> None:
    x, y = classes()
    wild, calm = 1.05 * threshold(x), 1e-3 * threshold(x)
    search: dict[str, Any] = {"search": {"learning_rate": [wild, calm]}}
    tuned = finetune(net(), (x, y), "lqf", (x, y), **search, **PLAIN)
    assert [(c["diverged"], c["taken"]) for c in tuned.candidates] == [(True, False), (False, True)]
    with pytest.warns(UserWarning, match="went up again"):
        only = finetune(net(), (x, y), "lqf", (x, y), search={"learning_rate": [wild, 1.1 * wild]}, **PLAIN)
    assert only.diverged


def test_recovery_with_large_steps_is_told() -> None:
    x, y = classes()
    model = nn.Linear(3, 2).double()
    hessian = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    rate = 2 / float(torch.linalg.eigvalsh(hessian.T @ hessian / len(x))[-1])
    start = nn.Linear(3, 2).double()
    options: dict[str, Any] = {"steps": 60, "momentum": 0.0, "schedule": "constant", "weight_decay": 0.0}
    recover(start, (x, y), teacher=model, learning_rate=0.9 * rate, **options)
    with pytest.warns(UserWarning, match="went up again") as told:
        recover(start, (x, y), teacher=model, learning_rate=1.2 * rate, **options)
    assert told[0].filename == by_name.__file__  # the line is the caller's


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_recovery_finds_a_rate_of_its_own(momentum: float, tmp_path: Path) -> None:
    # a hundred outputs times a hundred: a rate of 0.01 is far beyond 2/λ_max
    x, _ = classes()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 100)).double()
    with torch.no_grad():
        for p in model[2].parameters():
            p.mul_(100)
    leaky = leaky_relu(model, 0.2)
    data, options = (x, torch.zeros(len(x))), {"steps": 60, "momentum": momentum, "weight_decay": 0.0}

    def missed(net: nn.Module) -> float:
        return float((net(x) - model(x)).detach().square().mean())

    with pytest.raises(NumericalError):
        recover(leaky, data, teacher=model, learning_rate=0.01, **options)  # type: ignore[arg-type]
    found = recover(leaky, data, teacher=model, checkpoint=tmp_path, **options)  # type: ignore[arg-type]
    assert missed(found) < 0.7 * missed(leaky)
    again = recover(leaky, data, teacher=model, checkpoint=tmp_path, **options)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), again.parameters(), strict=True))


def test_recovery_refuses_what_cannot_be_learned_from() -> None:
    model, (x, y) = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), (torch.randn(8, 4), torch.arange(8) % 3)
    refused(InputError, lambda: recover(model, (x, y), [model]), "teacher")  # type: ignore[arg-type]
    refused(InputError, lambda: recover(model, (x, y), keep="best"), "keep=", "recover")
    refused(DataError, lambda: recover(model, (x, y + 5)), "out of range, first 5")
    refused(DataError, lambda: recover(model, (x, y - 100)), "first -100")
    refused(ModelError, lambda: recover(nn.ReLU(), (x, y)), "no parameter")
    refused(InputError, lambda: recover(model, (x, y), nn.Linear(4, 2)), "teacher has 2 outputs", "3")
