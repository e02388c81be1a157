"""Fits that are watched: alarms where nothing has changed, expected accuracies, drift, refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet.audit import monitor
from linnet.audit.left_out import Reference, Unseen, _without_one, of_batch
from linnet.audit.monitor import compared
from linnet.errors import DataError, InputError

KINDS = ("adapt", "squared", "shared", "softmax", "binary", "values")


def samples(n: int, seed: int, classes: int = 3, width: int = 3) -> tuple[Tensor, Tensor]:
    """Points and noisy classes, of each at least one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator, dtype=torch.float64)
    score = x[:, 0] + 0.5 * x[:, 1] ** 2 + 0.4 * torch.randn(n, generator=generator, dtype=torch.float64)
    ends = [-0.3, 0.6] if classes == 3 else [0.2]
    y = torch.bucketize(score, torch.tensor(ends, dtype=torch.float64))
    y[:classes] = torch.arange(classes)
    return x, y


def network(outputs: int, seed: int = 0, width: int = 3) -> nn.Module:
    """Random weights in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, outputs)).double()


def values(x: Tensor) -> Tensor:
    """Noisy values."""
    noise = torch.randn(len(x), 1, generator=torch.Generator().manual_seed(len(x)), dtype=torch.float64)
    return x[:, :1].sin() + 0.3 * noise


def fitted(kind: str, x: Tensor, y: Tensor, ridge: float | None = None) -> Any:
    """A fit of any kind."""
    if kind == "values":
        return linnet.fit(linnet.linearize(network(1)), (x, values(x)), ridge=ridge or "loo")
    if kind == "adapt":
        return linnet.adapt(network(3), (x, y), ridge=ridge)
    if kind == "squared":
        return linnet.fit(linnet.linearize(network(3)), (x, y), ridge=ridge or "loo")
    if kind == "shared":
        solver = linnet.fitting.Shared(2)
        return linnet.fit(linnet.linearize(network(3)), (x, y), solver=solver, ridge=ridge or "loo")
    outputs, own = (1, (y > 0).long()) if kind == "binary" else (3, y)
    return linnet.fit(linnet.linearize(network(outputs)), (x, own), "cross-entropy", ridge=ridge or 1.0)


def _units(fit: Any) -> list[Tensor]:
    """Changes of one output of every example."""
    count = 1 if fit.system.shared else fit.system.c
    return [torch.eye(count)[d].double().expand(fit.n, fit.system.c).contiguous() for d in range(count)]


# -- what is compared ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(3)
def test_each_example_is_judged_without_one_training_example(kind: str) -> None:
    (x, y), (new, _) = samples(14, 0), samples(20, 1)
    fit = fitted(kind, x, y, ridge=0.7)
    reference = Reference.of(fit)
    assert reference.left is not None
    found, turns = of_batch(fit, reference, new), torch.arange(20) % 14
    moved = fit.system.paired(new, turns)
    every = [torch.cat([*fit.system.effects(new, e)], 1) for e in _units(fit)]
    for d, effects in enumerate(every):
        part = effects[turns, torch.arange(20), : moved.shape[1]]
        assert torch.allclose(moved[:, :, d], part.to(moved), rtol=1e-7, atol=1e-9)
    own = _without_one(fit, reference.left, new, turns, moved)
    left = reference.left
    if fit.system.shared:  # one output stands for all
        left, own = (one * torch.eye(3).to(one) for one in (left, own))
    one_step = kind in ("softmax", "binary")
    for place in (4, 11, 14, 19):  # the last two begin with the first training example again
        j = place % 14
        without = fit.forget([j])
        exact = without.system.covariance(new[place : place + 1]) / without.ridge
        itself = without.system.covariance(x[j : j + 1]) / without.ridge
        tolerance = 0.15 if one_step else 1e-7
        assert torch.allclose(own[place], exact[0].to(own), rtol=tolerance, atol=tolerance)
        assert torch.allclose(left[j], itself[0].to(own), rtol=tolerance, atol=tolerance)
        outputs = without.predict(new[place : place + 1])[0]
        assert torch.allclose(found.outputs[place], outputs.to(found.outputs), atol=0.1 if one_step else 1e-7)


PAIRED = [
    "dual",
    "primal",
    "many",
    "sketch",
    "cg",
    "softmax, dual",
    "softmax, primal",
    "softmax, cg",
    "equations",
]


@pytest.mark.parametrize("solver", PAIRED)
def test_pairs_are_those_of_all_effects(solver: str) -> None:
    (x, y), (new, _) = samples(60, 0), samples(9, 1)
    at = torch.tensor([3, 3, 59, 0, 17, 40, 21, 8, 30])
    if solver == "many":  # of the last layer alone, in weights
        x, y = (torch.cat([part] * 36) for part in (x, y))
        x = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x)
        fit: Any = linnet.adapt(nn.Linear(3, 3).double(), (x, y))
        assert type(fit.system).__name__ == "NormalSystem"
    else:
        given: Any = {
            "sketch": linnet.fitting.Sketch(dim=40, examples=15),
            "cg": linnet.fitting.CG(1e-12, preconditioner="none"),
        }.get(solver, solver)
        loss, lin = "squared", linnet.linearize(network(3))
        if solver.startswith("softmax"):
            loss, given = "cross-entropy", solver.split(", ")[1]
        given = linnet.fitting.CG(1e-10, preconditioner="none") if given == "cg" else given
        fit = linnet.fit(lin, (x, y), loss, solver="dual" if given == "equations" else given, ridge=0.5)
        if solver == "equations":
            fit = fit.constrain(new[:2], fit.predict(new[:2]) + 0.1)
    found = fit.system.paired(new, at)
    for d, e in enumerate(_units(fit)):
        every = torch.cat([*fit.system.effects(new, e)], 1)[at, torch.arange(9), : found.shape[1]]
        assert torch.allclose(found[:, :, d], every.to(found), rtol=1e-6, atol=1e-8)


def unseen(n: int, seed: int, shift: float = 0.0) -> Unseen:
    """Judgments that are drawn."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    spread = shift + torch.randn(n, generator=generator, dtype=torch.float64)
    return Unseen(outputs, spread.exp(), (2 * outputs).softmax(1))


@pytest.mark.parametrize(("train", "batch"), [(4, 1), (8, 3), (30, 60)])
def test_p_values_of_like_examples_are_uniform(train: int, batch: int) -> None:
    found = torch.tensor(
        [compared(unseen(train, s), unseen(batch, 10_000 + s), draws=99) for s in range(250)]
    )
    for level in (0.05, 0.2, 0.5):
        # at most the level, but for three standard errors
        assert float((found <= level).double().mean()) <= level + 3 * (level * (1 - level) / 250) ** 0.5
    assert float(found.mean()) < 0.75  # and not always one


@pytest.mark.parametrize("kind", ["adapt", "squared", "softmax", "values"])
@pytest.mark.thinned(2)
def test_false_alarms_of_small_fits(kind: str) -> None:
    alarms = 0
    for seed in range(12):
        x, y = samples(12 + 20, seed)
        fit = fitted(kind, x[:12], y[:12])
        reference = Reference.of(fit)
        alarms += compared(reference.unseen, of_batch(fit, reference, x[12:]), draws=99) <= 0.05
    assert alarms <= 3  # 4 or more have a probability of 0.2 % at 5 %


def test_a_shift_of_one_group_is_found() -> None:
    assert compared(unseen(50, 0), unseen(50, 1)) > 0.05
    assert compared(unseen(50, 0), unseen(50, 1, shift=1.0)) <= 0.01
    assert compared(unseen(50, 0), unseen(50, 1, shift=-1.0)) <= 0.01


def test_many_training_examples_are_a_sample_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["linnet.audit.monitor"], "EXAMPLES", 40)
    assert compared(unseen(5000, 0), unseen(50, 1, shift=2.0)) <= 0.01


# -- records ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(3)
def test_a_stream(kind: str) -> None:
    (x, y), (new, truth) = samples(90, 0), samples(400, 1)
    fit = fitted(kind, x, y)
    calm, far = monitor(fit, [new, new + 6], top=4)
    assert (calm.batch, calm.n, far.batch) == (0, 400, 1)
    assert calm.p_value > 0.01  # one in a hundred is less by chance
    assert (calm.leans is None) is not calm.drifted
    assert far.drifted
    assert far.p_value <= 0.05
    assert far.leans is not None
    assert torch.equal(far.leans, fit.informativeness(new + 6).topk(4).indices)
    prediction = fit.predict(new)
    if kind == "values":
        assert calm.accuracy is None
        error = float((prediction - values(new)).square().mean().sqrt())
        assert calm.rms_error == pytest.approx(error, rel=0.25)
        assert far.rms_error > 2 * calm.rms_error
    else:
        right = prediction.argmax(1) == truth if kind != "binary" else (prediction[:, 0] > 0) == (truth > 0)
        assert calm.rms_error is None
        assert abs(calm.accuracy - float(right.double().mean())) < 3 * calm.standard_error
    assert 0 < calm.standard_error < 0.2


def test_a_line_of_json() -> None:
    x, y = samples(40, 0)
    fit = fitted("adapt", x, y)
    for record in fit.monitor([x + 6, x[:1]]):
        line = record.to_json()
        told = json.loads(line)
        assert "\n" not in line
        assert told["drifted"] is record.drifted
        assert told["accuracy"] == record.accuracy
        assert told["leans"] is None or len(told["leans"]) == 10
    assert "p_value" in repr(record)


def test_batches_of_every_kind() -> None:
    (x, y), (new, truth) = samples(40, 0), samples(30, 1)
    fit = fitted("squared", x, y)
    (whole,) = fit.monitor(new)
    for one in ((new, truth), [new], [(new, truth)], iter([new]), [new.numpy()]):
        (record,) = monitor(fit, one)
        assert (record.p_value, record.accuracy) == (whole.p_value, whole.accuracy)
    loader: DataLoader[Any] = DataLoader(TensorDataset(new, truth), batch_size=10)
    assert [record.n for record in monitor(fit, loader)] == [10, 10, 10]


def test_a_record_comes_with_its_batch() -> None:
    (x, y), seen = samples(30, 0), []

    def stream() -> Iterator[Tensor]:
        for seed in range(3):
            seen.append(seed)
            yield samples(5, seed)[0]

    records = monitor(fitted("adapt", x, y), stream())
    next(records)
    assert seen == [0]


def test_trained_layers_are_judged_by_held_out_folds() -> None:
    (x, y), (new, _) = samples(60, 0), samples(50, 1)
    fit = linnet.adapt(network(3).float(), (x.float(), y), tune=True)
    fit.held_out = fit.loo()
    (record,) = monitor(fit, new.float())
    assert Reference.of(fit).unseen.spread is None
    assert 0 < record.accuracy < 1


# -- refusals --------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    x, y = samples(20, 0)
    fit = fitted("adapt", x, y)
    for wrong in ({"level": 0}, {"level": 1.5}, {"top": 0}):
        with pytest.raises(InputError):
            monitor(fit, x, **wrong)
    with pytest.raises(InputError, match="DataLoader"):
        monitor(fit, TensorDataset(x, y))
    with pytest.raises(DataError, match="empty"):
        list(monitor(fit, [x[:0]]))
    with pytest.raises(DataError, match="NaN"):
        list(monitor(fit, [x * torch.nan]))
    with pytest.raises(InputError, match="a fit"):
        monitor(network(3), x)  # type: ignore[arg-type]


def test_fits_without_leave_one_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = samples(20, 0)
    fit = fitted("adapt", x, y)
    monkeypatch.setattr(type(fit), "trained", True)
    with pytest.raises(InputError, match="trained"):
        monitor(fit, x)
    words = torch.arange(15).view(5, 3) % 4
    embedding = nn.Sequential(nn.Embedding(4, 5), nn.Linear(5, 4)).double()
    of_positions = linnet.fit(linnet.linearize(embedding), (words, (words + 1) % 4), axis=-1)
    with pytest.raises(InputError, match="position"):
        monitor(of_positions, words)
    with pytest.raises(InputError):
        monitor(SimpleNamespace(labels=y), x)  # type: ignore[arg-type]


def test_fits_with_weights_are_refused() -> None:
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    weights = torch.linspace(1, 2, 20)
    fit = linnet.fit(linnet.linearize(nn.Linear(2, 2)), (x, (x[:, 0] > 0).long()), sample_weight=weights)
    with pytest.raises(InputError, match="sample_weight"):
        linnet.audit.monitor(fit, [x])
