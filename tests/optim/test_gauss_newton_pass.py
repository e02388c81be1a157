"""One forward pass for loss, gradient, curvature and J d: the same steps, and never where it may not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.curvatures.chain import ChainPass
from linnet.optim.gauss_newton import GaussNewton
from linnet.optim.gauss_newton_model import OnePass
from linnet.optim.gauss_newton_settings import StepReport
from tests.optim.gauss_newton_cases import classes, classifier, flat, mlp, weight_of

Steps = tuple[list[StepReport], Tensor, int]


def run(
    net: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    short: bool = True,
    feed: Callable[..., Any] | None = None,
    structure: str = "kfra",
    expectation: str = "mc",
) -> Steps:
    """Six steps: reports, weights, and how often the short way was taken."""
    taken = 0
    measure = OnePass._short

    def counted(self: OnePass, chain: ChainPass, y: Tensor) -> Any:
        nonlocal taken
        taken += 1
        return measure(self, chain, y)

    with monkeypatch.context() as patch:
        patch.setattr(OnePass, "_short", counted)
        if not short:
            patch.setattr(OnePass, "_look", lambda *_: None)
        optimizer = classifier(
            net, structure=structure, expectation=expectation, weight_decay=0.01, momentum=True
        )
        step = feed or (lambda optimizer, k: optimizer.step(*classes(seed=k)))
        reports = [step(optimizer, k) for k in range(6)]
    return reports, flat(net), taken


@pytest.mark.parametrize(
    ("structure", "expectation"),
    [("kfra", "mc"), ("kfac", "mc"), ("kfac", "exact"), ("ekfac", "mc"), ("diagonal", "mc")],
)
@pytest.mark.thinned(2)
def test_the_short_way_takes_the_same_steps(
    structure: str, expectation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = run(mlp(), monkeypatch, structure=structure, expectation=expectation)
    long = run(mlp(), monkeypatch, short=False, structure=structure, expectation=expectation)
    assert (short[2], long[2]) == (5, 0)  # all but the first step, on whose batch the chain is found
    assert torch.allclose(short[1], long[1], rtol=1e-8, atol=1e-10)
    for one, other in zip(short[0], long[0], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.alpha == pytest.approx(other.alpha, rel=1e-7)
        assert one.model_reduction == pytest.approx(other.model_reduction, rel=1e-7)


class Branching(nn.Module):
    """Two ways from the first layer on: no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Both together."""
        h = self.body[0](x)
        both: Tensor = self.body[2](h.tanh()) + self.body[2](h.sin())
        return both


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_what_is_no_chain_goes_the_long_way(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = run(Branching(), monkeypatch, structure=structure)
    long = run(Branching(), monkeypatch, short=False, structure=structure)
    assert short[2] == 0
    torch.testing.assert_close(short[1], long[1])


def test_frozen_parameters_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(optimizer: GaussNewton, k: int) -> StepReport:
        net.get_parameter("0.weight").requires_grad_(k < 3)
        return optimizer.step(*classes(seed=k))

    net = mlp()
    before = run(net, monkeypatch, feed=step)
    other = mlp()
    net, kept = other, before[1]
    assert torch.allclose(run(other, monkeypatch, short=False, feed=step)[1], kept, rtol=1e-8, atol=1e-10)


class Noisy(nn.Module):
    """A chain in evaluation mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body[2](nn.functional.dropout(self.body[1](self.body[0](x)), 0.5, self.training))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_not_passed_over(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = (torch.manual_seed(k) for k in (3, 3))
    next(seeds)
    short = run(Noisy().train(training), monkeypatch)
    next(seeds)
    long = run(Noisy().train(training), monkeypatch, short=False)
    assert short[2] == (1 if training else 5)  # measured both ways once, and then the long way
    assert torch.allclose(short[1], long[1], rtol=1e-8, atol=1e-10)


def test_each_mode_is_measured_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(optimizer: GaussNewton, k: int) -> StepReport:
        net.train(k % 2 == 0)
        torch.manual_seed(k)
        return optimizer.step(*classes(seed=k))

    net = Noisy()
    short = run(net, monkeypatch, feed=step)
    net = Noisy()
    long = run(net, monkeypatch, short=False, feed=step)
    assert torch.allclose(short[1], long[1], rtol=1e-8, atol=1e-10)


def test_hooks_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    net, calls = mlp(), []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    assert run(net, monkeypatch)[2] == 0
    assert len(calls) >= 6


@pytest.mark.parametrize("way", ["parts", "closure", "autocast"])
def test_where_there_is_more_to_it_the_network_is_called(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(optimizer: GaussNewton, k: int) -> StepReport:
        x, y = classes(seed=k)
        if way == "parts":
            optimizer.accumulate(x[:9], y[:9])
            return optimizer.step(x[9:], y[9:])
        if way == "closure":
            return optimizer.step(x, y, closure=lambda: closure(x, y))
        with torch.autocast("cpu", torch.bfloat16):
            return optimizer.step(x, y)

    def closure(x: Tensor, y: Tensor) -> Tensor:
        net.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        return loss

    net = mlp()
    assert run(net, monkeypatch, feed=step)[2] == 0


def test_weights_that_are_not_finite_are_taken_back() -> None:
    net = mlp()
    optimizer = classifier(net, structure="kfra")
    for k in range(3):
        optimizer.step(*classes(seed=k))
    good = flat(net)
    before = torch.cat([optimizer.state[p]["before"].reshape(-1) for p in net.parameters()])
    weight_of(net, "0").fill_(torch.nan)
    report = optimizer.step(*classes(seed=3))
    assert report.rejected
    assert torch.isfinite(flat(net)).all()
    assert not torch.equal(good, before)
