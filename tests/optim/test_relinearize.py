"""Iterative linearization: plain training at K = 1, linearized training at K = ∞, equation 3 in between."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.optim import IterativeLinearization
from linnet.tangent.linearized import Linearized
from tests.fitting.problems import near, real
from tests.optim.relinearize_cases import (
    OPTIMIZERS,
    batches,
    convnet,
    cross_entropy,
    mlp,
    plain_loop,
    run,
    same_bits,
    values,
)
from tests.oracles.dense import jacobian_oracle, output_oracle


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("training_mode", [True, False])
def test_period_one_is_plain_training_to_the_bit(optimizer: str, training_mode: bool) -> None:
    data = batches(6, (1, 6, 6), torch.float32)
    plain, net = convnet().train(training_mode), convnet().train(training_mode)
    torch.manual_seed(3)  # dropout draws from the global generator
    wanted = plain_loop(plain, OPTIMIZERS[optimizer], data)
    torch.manual_seed(3)
    training = IterativeLinearization(net, OPTIMIZERS[optimizer], period=1)
    run(training, data)
    assert same_bits(plain.state_dict(), net.state_dict())
    assert same_bits(wanted.state_dict(), training.optimizer.state_dict())
    assert not same_bits(convnet().state_dict(), net.state_dict())
    assert training.report.relinearizations == training.report.steps == 6


def test_the_module_of_period_one_is_the_network_itself() -> None:
    net, seen = mlp(), []
    training = IterativeLinearization(net, OPTIMIZERS["sgd"], period=1)
    (batch,) = batches(1, (4,), torch.float64)
    training.step(lambda module: (seen.append(module), cross_entropy(batch)(module))[1])
    assert seen[0] is net


def oracle_step(
    net: nn.Module, theta: Tensor, start: Tensor, batch: tuple[Tensor, Tensor], rate: float
) -> Tensor:
    """Equation 7 with dense Jacobians: θ − η φ_sᵀ L'(f_lin)."""
    x, y = batch
    at = copy.deepcopy(net)
    nn.utils.vector_to_parameters(start, at.parameters())
    j = jacobian_oracle(at, x)
    f = output_oracle(at, x) + j @ (theta - start)
    slope = (f.softmax(1) - nn.functional.one_hot(y, 3)) / len(y)
    return theta - rate * torch.einsum("ncp,nc->p", j, slope)


@pytest.mark.parametrize("period", [2, 3, 7, None])
def test_steps_are_equation_seven(period: int | None) -> None:
    net, data = mlp(), batches(7, (4,), torch.float64)
    training = IterativeLinearization(net, lambda p: torch.optim.SGD(p, lr=0.5), period)
    theta = start = values(net).clone()
    for t, batch in enumerate(data):
        if period is not None and t % period == 0:
            start = theta
        theta = oracle_step(net, theta, start, batch, 0.5)
        training.step(cross_entropy(batch))
        near(values(net), theta)
    wanted = [] if period is None else [t for t in range(1, 8) if t % period == 0]
    assert list(training.report.updates) == wanted


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_relinearizing_after_each_step_is_plain_training_up_to_rounding(optimizer: str) -> None:
    data = batches(8, (4,), torch.float64)
    plain, net = mlp(), mlp()
    plain_loop(plain, OPTIMIZERS[optimizer], data)
    training = IterativeLinearization(net, OPTIMIZERS[optimizer], period=None)
    for batch in data:
        training.step(cross_entropy(batch))
        training.relinearize()
    # Momentum, Adam's moments, their step counts and weight decay went through every linearization.
    near(values(net), values(plain), 1e-9)
    assert training.report.updates == tuple(range(1, 9))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("period", [None, math.inf, 100])
def test_a_period_beyond_the_run_is_linearized_training(optimizer: str, period: Any) -> None:
    data = batches(6, (4,), torch.float64)
    net = mlp()
    lin = linnet.linearize(net)
    plain_loop(lin, OPTIMIZERS[optimizer], data)
    start = values(net).clone()
    training = IterativeLinearization(net, OPTIMIZERS[optimizer], period)
    run(training, data)
    near(values(net) - start, values(lin), 1e-9)
    near(training.linearization(data[0][0]), lin(data[0][0]))
    assert training.report.relinearizations == 0


def test_lbfgs_evaluates_as_often_as_it_wants() -> None:
    net = mlp(outputs=2)
    x, y = real(5, 4, seed=1), real(5, 2, seed=2)
    j, f0, start = jacobian_oracle(net, x).flatten(0, 1), output_oracle(net, x), values(net).clone()
    training = IterativeLinearization(
        net,
        lambda p: torch.optim.LBFGS(
            p, max_iter=200, tolerance_grad=1e-12, tolerance_change=0.0, line_search_fn="strong_wolfe"
        ),
        period=None,
    )
    training.step(lambda module: (module(x) - y).square().sum())
    near(values(net) - start, torch.linalg.pinv(j) @ (y - f0).reshape(-1), 1e-6)
    assert training.steps == 1


def test_the_network_holds_the_current_weights_and_the_module_their_displacement() -> None:
    net = mlp()
    training = IterativeLinearization(net, OPTIMIZERS["adam"], period=3)
    data = batches(4, (4,), torch.float64)
    seen: list[nn.Module] = []
    for batch in data:
        training.step(lambda module, batch=batch: (seen.append(module), cross_entropy(batch)(module))[1])
        lin = training.linearization
        for name, p in net.named_parameters():
            near(lin.theta0[name] + lin.delta[name], p.detach(), 1e-14)
    assert isinstance(seen[0], Linearized)
    assert all(module is seen[0] for module in seen)
    assert any(delta.abs().max() > 0 for delta in training.linearization.delta.values())


def test_a_subset_of_parameters_is_trained_and_the_rest_left_alone() -> None:
    for period in (1, 2):
        net = mlp()
        first = net[0].weight.clone()
        last = net[2].weight.clone()
        training = IterativeLinearization(net, OPTIMIZERS["adam"], period, params="last-layer")
        run(training, batches(4, (4,), torch.float64))
        assert torch.equal(net[0].weight, first)
        assert net[0].weight.grad is None
        assert net[0].weight.requires_grad
        assert not torch.equal(net[2].weight, last)


def test_schedulers_see_the_optimizer() -> None:
    net = mlp()
    training = IterativeLinearization(net, lambda p: torch.optim.SGD(p, lr=1.0), period=2)
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, step_size=1, gamma=0.0)
    data = batches(3, (4,), torch.float64)
    run(training, data[:1])
    scheduler.step()
    before = values(net).clone()
    run(training, data[1:])
    assert torch.equal(values(net), before)


@pytest.mark.parametrize("period", [1, 3])
def test_hooks_of_the_optimizer_see_the_gradients_of_the_step(period: int) -> None:
    net, norms = mlp(), []
    training = IterativeLinearization(net, lambda p: torch.optim.SGD(p, lr=1.0), period)

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 1e-3)))

    training.optimizer.register_step_pre_hook(clip)
    before = values(net).clone()
    run(training, batches(1, (4,), torch.float64))
    assert norms[0] > 1e-3
    assert float((values(net) - before).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_penalties_on_the_networks_own_weights_count() -> None:
    (batch,) = batches(1, (4,), torch.float64)
    moved = []
    for period in (1, 5):
        net = mlp()
        training = IterativeLinearization(net, lambda p: torch.optim.SGD(p, lr=0.1), period)
        training.step(
            lambda module, net=net: (
                cross_entropy(batch)(module) + sum(p.square().sum() for p in net.parameters())
            )
        )
        moved.append(values(net))
    near(moved[0], moved[1], 1e-12)


def test_accumulation_over_micro_batches_in_the_closure() -> None:
    data = batches(4, (4,), torch.float64)
    joined = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    reached = []
    for closure in (
        cross_entropy(joined),
        lambda module: torch.stack([cross_entropy(batch)(module) for batch in data]).mean(),
    ):
        net = mlp()
        training = IterativeLinearization(net, OPTIMIZERS["adam"], period=2)
        for _ in range(3):
            training.step(closure)
        reached.append(values(net))
    near(reached[0], reached[1], 1e-9)


def test_linearizations_use_evaluation_mode_and_take_over_refreshed_statistics() -> None:
    net = convnet()
    data = batches(5, (1, 6, 6), torch.float32)
    training = IterativeLinearization(net, OPTIMIZERS["sgd"], period=2)
    run(training, data)
    assert torch.equal(net[1].running_mean, torch.zeros(4))  # nothing was averaged
    assert net.training
    assert "BatchNorm2d, Dropout" in training.report.notes[0]
    x = data[0][0]
    before = training.linearization.base(x)
    with torch.no_grad():
        net(x)
    training.relinearize()
    torch.testing.assert_close(training.linearization.base(x), net.eval()(x))
    assert not torch.equal(before, training.linearization.base(x))
    assert training.report.updates == (2, 4, 5)
    assert training.report.notes == ()


def test_parameters_frozen_half_way_stay_where_they_are() -> None:
    for period in (1, 2):
        net = mlp()
        training = IterativeLinearization(net, OPTIMIZERS["momentum"], period)
        data = batches(5, (4,), torch.float64)
        run(training, data[:2])
        net[0].weight.requires_grad_(False)
        before = net[0].weight.clone()
        run(training, data[2:])
        assert torch.equal(net[0].weight, before)
        assert not net[0].weight.requires_grad


def test_outputs_are_picked_by_the_adapter() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"other": x, "value": self.inner(x)}

    net, twin = Pair(), mlp()
    data = batches(4, (4,), torch.float64)
    run(IterativeLinearization(net, OPTIMIZERS["adam"], 2, output="value"), data)
    run(IterativeLinearization(twin, OPTIMIZERS["adam"], 2), data)
    assert torch.equal(values(net), values(twin))


@pytest.mark.parametrize("period", [1, 3])
def test_steps_of_another_loop_are_those_of_its_own(period: int) -> None:
    """``backward`` of both halves of a batch, and a step of the optimizer by somebody else."""
    x, y = real(12, 4, seed=1), real(12, 3, seed=2)
    ends = []
    for way in ("step", "backward", "copy"):
        training = IterativeLinearization(mlp(), lambda p: torch.optim.SGD(p, 0.05, 0.9), period)
        if way == "copy":
            training = copy.deepcopy(training)
        optimizer = training.optimizer
        assert optimizer is not None
        for _ in range(7):
            if way == "step":
                loss = training.step(lambda module: (module(x) - y).square().sum())
                continue
            optimizer.zero_grad()
            halves = [
                training.backward(lambda module, p=part: (module(x[p]) - y[p]).square().sum())
                for part in (slice(0, 5), slice(5, 12))
            ]
            loss = halves[0] + halves[1]
            optimizer.step()
        optimizer.step()  # no gradients of its own: not a step of training
        assert training.steps == 7
        ends.append((torch.cat([p.detach().flatten() for p in training.model.parameters()]), loss))
        assert len(training.report.updates) == 7 // period
    for weights, loss in ends[1:]:
        near(weights, ends[0][0])
        near(loss, ends[0][1])
