"""Interrupted training goes on bit by bit; bad input is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import linnet
from linnet.errors import InputError, ModelError, NumericalError, WeightsError
from linnet.optim import Converged, IterativeLinearization, KernelDrift, OutputGap
from tests.fitting.problems import real
from tests.optim.relinearize_cases import (
    OPTIMIZERS,
    batches,
    convnet,
    cross_entropy,
    mlp,
    run,
    same_bits,
    values,
)
from tests.refusals import refused

PERIODS: dict[str, Any] = {
    "1": lambda: 1,
    "3": lambda: 3,
    "never": lambda: None,
    "gap": lambda: OutputGap(0.05, every=2),
    "drift": lambda: KernelDrift(0.002, torch.ones(3, 1, 6, 6), every=2),
    "converged": lambda: Converged(gradient=0.9, most=4),
}


@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("stop", [4, 6])
@pytest.mark.thinned(4)
def test_a_resumed_run_has_the_same_bits(period: str, stop: int, tmp_path: Path) -> None:
    data = batches(9, (1, 6, 6), torch.float32)
    net = convnet().eval()
    training = IterativeLinearization(net, OPTIMIZERS["adam"], PERIODS[period]())
    run(training, data[:stop])
    torch.save(training.state_dict(), tmp_path / "state.pt")
    losses = run(training, data[stop:])
    other = convnet(seed=7).eval()
    again = IterativeLinearization(other, OPTIMIZERS["adam"], PERIODS[period]())
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert run(again, data[stop:]) == losses
    assert same_bits(other.state_dict(), net.state_dict())
    assert same_bits(again.state_dict(), training.state_dict())
    assert again.report == training.report


def test_a_run_may_go_on_with_another_period() -> None:
    data = batches(6, (4,), torch.float64)
    net = mlp()
    training = IterativeLinearization(net, OPTIMIZERS["adam"], period=1)
    run(training, data[:3])
    state = copy.deepcopy(training.state_dict())
    other = mlp(seed=5)
    later = IterativeLinearization(other, OPTIMIZERS["adam"], period=2)
    later.load_state_dict(state)
    assert torch.equal(values(other), values(net))
    torch.testing.assert_close(later.linearization.base(data[0][0]), net(data[0][0]))
    run(later, data[3:])
    assert (later.steps, later.report.updates) == (6, (1, 2, 3, 5))
    back = IterativeLinearization(mlp(), OPTIMIZERS["adam"], period=1)
    back.load_state_dict(later.state_dict())
    assert torch.equal(values(back.model), values(other))
    run(back, data[:2])
    assert back.report.updates == (1, 2, 3, 5, 7, 8)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    training = IterativeLinearization(mlp(), OPTIMIZERS["adam"], period=3)
    run(training, batches(2, (4,), torch.float64))

    def groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": [p]} for p in parameters])

    other = IterativeLinearization(mlp(seed=5), groups, period=3)
    before = values(other.model)
    with pytest.raises(WeightsError, match="parameter group"):
        other.load_state_dict(training.state_dict())
    assert torch.equal(values(other.model), before)


def test_states_of_something_else_are_refused() -> None:
    training = IterativeLinearization(mlp(), OPTIMIZERS["sgd"], period=2)
    state = training.state_dict()
    refused(WeightsError, lambda: training.load_state_dict({"model": {}}), "state lacks")
    wider = IterativeLinearization(mlp(outputs=5), OPTIMIZERS["sgd"], period=2)
    refused(WeightsError, lambda: wider.load_state_dict(state), "2.bias")
    bare = IterativeLinearization(mlp(), None, period=2)
    refused(WeightsError, lambda: bare.load_state_dict(state), "optimizer")


# --- bad input ------------------------------------------------------------------------------------


def other_optimizer(state: dict[str, Any]) -> None:
    parameters = [nn.Parameter(torch.zeros_like(t)) for t in state["model"].values()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    state["optimizer"] = optimizer.state_dict()


BROKEN: dict[str, Any] = {
    "of another optimizer": other_optimizer,
    "without groups": lambda state: state.update(optimizer={}),
    "without a parameter": lambda state: state["linearization"].popitem(),
    "of other shapes": lambda state: state.update(
        linearization={name: t[:1] for name, t in state["linearization"].items()}
    ),
    "without a schedule": lambda state: state.update(schedule={}),
    "without numbers": lambda state: state.update(steps="many"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_state_that_is_broken_changes_nothing(what: str) -> None:
    data = batches(5, (4,), torch.float64)
    training, other = (IterativeLinearization(mlp(seed=s), OPTIMIZERS["adam"], period=3) for s in (0, 5))
    run(training, data[:4])
    run(other, data[:2])
    twin = IterativeLinearization(mlp(seed=5), OPTIMIZERS["adam"], period=3)
    run(twin, data[:2])
    state = copy.deepcopy(training.state_dict())
    BROKEN[what](state)
    with pytest.raises(WeightsError):
        other.load_state_dict(state)
    for one in (other, twin):
        run(one, data[2:])
    assert torch.equal(values(other.model), values(twin.model))
    assert other.report == twin.report


def test_whole_floats_are_periods() -> None:
    assert IterativeLinearization(mlp(), None, 1e6).report.schedule == "Every(1000000)"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD(mlp().parameters(), lr=0.1), ["others", "lacks '0.weight'"]),
        (lambda p: torch.optim.SGD(p[:2], lr=0.1), ["lacks '2.weight' (2 in all)"]),
        (lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(7))], lr=0.1), ["1 others", "(7,)"]),
        (lambda p: None, ["make_optimizer(...) is None"]),
    ],
)
def test_optimizers_over_the_wrong_parameters(make: Any, words: list[str]) -> None:
    refused(InputError, lambda: IterativeLinearization(mlp(), make, 2), *words)


def test_models_that_cannot_be_trained() -> None:
    net = mlp()
    refused(InputError, lambda: IterativeLinearization(linnet.linearize(net), None, 2), "linearized already")
    net[0].weight.requires_grad_(False)
    refused(InputError, lambda: IterativeLinearization(net, OPTIMIZERS["sgd"], 2, params="all"), "'0.weight'")
    only = IterativeLinearization(net, OPTIMIZERS["sgd"], 2)
    assert "0.weight" not in only.linearization.parameter_names


@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize(
    ("closure", "words"),
    [
        (lambda module, x: module(x), ["shape (8, 3)"]),
        (lambda module, x: None, ["NoneType"]),
        (lambda module, x: module(x).sum().detach(), ["does not depend on its module"]),
    ],
)
def test_closures_that_return_no_loss(period: int, closure: Any, words: list[str]) -> None:
    net, x = mlp(), real(8, 4)
    training = IterativeLinearization(net, OPTIMIZERS["momentum"], period)
    before = values(net).clone()
    refused(InputError, lambda: training.step(lambda module: closure(module, x)), *words)
    assert torch.equal(values(net), before)
    assert training.steps == 0


def test_closures_that_use_the_network_instead_of_the_module() -> None:
    net, (batch,) = mlp(), batches(1, (4,), torch.float64)
    training = IterativeLinearization(net, OPTIMIZERS["sgd"], period=2)
    refused(InputError, lambda: training.step(lambda module: cross_entropy(batch)(net)), "does not depend")


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_leaves_the_weights_alone(period: int, bad: float) -> None:
    net, data = mlp(), batches(5, (4,), torch.float64)
    training = IterativeLinearization(net, OPTIMIZERS["adam"], period)
    run(training, data[:2])
    before, state = values(net).clone(), copy.deepcopy(training.optimizer.state_dict())
    refused(
        NumericalError, lambda: training.step(lambda module: module(data[2][0]).sum() * bad), "after 2 steps"
    )
    assert torch.equal(values(net), before)
    assert same_bits(training.optimizer.state_dict(), state)
    run(training, data[2:])  # it goes on as if nothing had happened
    undisturbed = mlp()
    run(IterativeLinearization(undisturbed, OPTIMIZERS["adam"], period), data)
    assert torch.equal(values(undisturbed), values(net))


def test_a_network_that_changes_type_is_noticed() -> None:
    net, (batch,) = mlp(), batches(1, (4,), torch.float64)
    training = IterativeLinearization(net, OPTIMIZERS["sgd"], period=2)
    net.float()
    refused(ModelError, lambda: training.step(cross_entropy(batch)), "torch.float32")
    refused(ModelError, training.relinearize, "torch.float32")


def test_a_state_of_other_groups_is_refused() -> None:
    net = mlp()
    training = IterativeLinearization(net, OPTIMIZERS["sgd"], period=2)
    parts = IterativeLinearization(
        mlp(), lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:]}], lr=0.1), period=2
    )
    with pytest.raises(WeightsError, match="parameter groups"):
        training.load_state_dict(parts.state_dict())
