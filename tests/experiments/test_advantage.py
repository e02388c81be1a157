"""A network against its linearization: what is measured, and that both are trained alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linnet
from experiments.kernels.advantage import linear_advantage
from linnet.errors import DataError, InputError, NumericalError
from tests.fitting.problems import near, network, real
from tests.refusals import refused

X, X_TEST = real(40, 3, seed=1), real(20, 3, seed=2)


def label(x: Tensor) -> Tensor:
    """A linear task."""
    return (x[:, 0] > 0).long()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain gradient descent with momentum."""
    return torch.optim.SGD(parameters, 0.5, momentum=0.9)


def run(model: nn.Module | None = None, data: Any = None, **options: Any) -> Any:
    """A short comparison."""
    options = {"epochs": 5, "batch_size": 16, **options}
    make = options.pop("make_optimizer", sgd)
    model = network(outputs=1, hidden=8) if model is None else model
    return linear_advantage(model, (X, label(X)) if data is None else data, make, **options)


def by_hand(module: nn.Module, steps: int, loss: Any, y: Tensor) -> nn.Module:
    """Full-batch training, so that the order of examples does not matter."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(module(X), y).backward()
        optimizer.step()
    return module


def test_both_trainings_are_the_ones_written_out_by_hand() -> None:
    y = label(X).double()[:, None]
    options: dict[str, Any] = {
        "make_optimizer": lambda p: torch.optim.SGD(p, 0.1),
        "batch_size": 40,
        "epochs": 6,
    }
    found = run(validation=(X_TEST, label(X_TEST)), **options)
    start = network(outputs=1, hidden=8)
    lin = by_hand(linnet.linearize(start), 6, F.binary_cross_entropy_with_logits, y)
    net = by_hand(network(outputs=1, hidden=8), 6, F.binary_cross_entropy_with_logits, y)
    net, lin = net.requires_grad_(False), lin.requires_grad_(False)
    near(found.linear.module(X_TEST), lin(X_TEST), 1e-9)
    near(found.network.module(X_TEST), net(X_TEST), 1e-9)
    theta0 = torch.cat([p.detach().flatten() for p in start.parameters()])
    theta = torch.cat([p.detach().flatten() for p in net.parameters()])
    delta = torch.cat([p.detach().flatten() for p in lin.parameters()])
    assert found.network.distance == pytest.approx(float((theta - theta0).norm()), rel=1e-9)
    assert found.linear.distance == pytest.approx(float(delta.norm()), rel=1e-9)
    assert found.network.cosine == pytest.approx(float(F.cosine_similarity(theta, theta0, 0)), rel=1e-9)
    assert found.linear.cosine == pytest.approx(
        float(F.cosine_similarity(theta0 + delta, theta0, 0)), rel=1e-9
    )
    assert found.network.final_loss == pytest.approx(
        float(F.binary_cross_entropy_with_logits(net(X), y)), rel=1e-9
    )
    for result, module in ((found.network, net), (found.linear, lin)):
        right = ((module(X_TEST)[:, 0] > 0).long() == label(X_TEST)).double().mean()
        assert result.accuracy["validation"] == pytest.approx(float(right))
        loss = F.binary_cross_entropy_with_logits(module(X_TEST), label(X_TEST).double()[:, None])
        assert result.validation_loss == pytest.approx(float(loss), rel=1e-9)
    assert found.gap == pytest.approx(float((net(X_TEST) - lin(X_TEST)).square().mean().sqrt()), rel=1e-9)
    accuracies = found.linear.accuracy["validation"] - found.network.accuracy["validation"]
    assert found.linear_advantage == pytest.approx(accuracies)


def test_a_linear_network_has_no_gap() -> None:
    found = run(nn.Linear(3, 1).double(), validation=(X_TEST, label(X_TEST)))
    assert found.gap < 1e-12
    assert found.network.losses == pytest.approx(found.linear.losses, rel=1e-10)
    assert found.network.distance == pytest.approx(found.linear.distance, rel=1e-10)
    assert found.linear_advantage == 0


def test_iterations_to_the_target_loss() -> None:
    found = run(every=1, target_loss=0.3, epochs=20).network
    steps, losses = list(found.losses), list(found.losses.values())
    assert steps == list(range(61))  # 3 batches an epoch
    first = next(step for step, loss in found.losses.items() if loss <= 0.3)
    assert found.iterations == first > 0
    assert losses[first - 1] > 0.3
    assert run(target_loss=1e-9).network.iterations is None
    assert run(target_loss=10.0).network.iterations == 0
    by_epoch = run(epochs=4).network
    assert list(by_epoch.losses) == [0, 3, 6, 9, 12]
    stopped = run(every=1, target_loss=0.3, epochs=20, stop=True).network
    assert max(stopped.losses) == first
    assert list(run(every=5, epochs=4).network.losses) == [0, 5, 10, 12]


def test_the_seed_orders_the_batches() -> None:
    one, same, other = (run(seed=seed).network.losses for seed in (0, 0, 1))
    assert one == same
    assert one != other


def test_a_schedule_is_stepped_at_every_iteration() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 2))

    frozen = run(every=1, make_schedule=schedule, make_optimizer=lambda p: torch.optim.SGD(p, 0.5)).network
    losses = list(frozen.losses.values())
    assert losses[2] != losses[1]
    assert losses[2] == losses[-1]


def test_classes_regression_and_a_loss_of_ones_own() -> None:
    classes = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
    many = run(network(outputs=3), (X, classes))
    assert set(many.network.accuracy) == {"training"}
    expected = float(F.cross_entropy(network(outputs=3)(X).detach(), classes))
    assert many.network.losses[0] == pytest.approx(expected, rel=1e-9)
    t = real(40, 3, seed=9)
    regression = run(network(outputs=3), (X, t), make_optimizer=lambda p: torch.optim.SGD(p, 0.01))
    assert regression.network.accuracy == {}
    assert regression.linear_advantage is None
    half = float((network(outputs=3)(X).detach() - t).square().sum(1).mean() / 2)
    assert regression.network.losses[0] == pytest.approx(half, rel=1e-9)
    signs = run(data=(X, 2.0 * label(X).double() - 1))
    assert signs.network.losses == run().network.losses
    own = run(loss=lambda f, y: ((2 * y - 1) - f[:, 0]).square().mean(), data=(X, label(X).double()))
    residual = (2 * label(X).double() - 1) - network(outputs=1, hidden=8)(X)[:, 0].detach()
    assert own.network.losses[0] == pytest.approx(float(residual.square().mean()), rel=1e-9)


def test_only_the_chosen_parameters_are_trained() -> None:
    found = run(params="last-layer")
    start = network(outputs=1, hidden=8).state_dict()
    end = found.network.module.state_dict()
    assert torch.equal(end["0.weight"], start["0.weight"])
    assert not torch.equal(end["2.weight"], start["2.weight"])
    assert found.gap < 1e-10  # linear in its last layer


def test_batchnorm_and_dropout_train_in_the_network_and_rest_in_the_linearization() -> None:
    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(
                nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)
            ).double()

    model, state = make(), torch.get_rng_state()
    x, y = X[:33], label(X[:33])  # the last batch would hold a single example, on which BatchNorm fails
    found = run(model, (x, y))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(found.network.module[1].running_mean, model[1].running_mean)
    assert torch.equal(found.linear.module.model[1].running_mean, model[1].running_mean)
    assert run(make(), (x, y)).network.losses == found.network.losses
    fresh = make()
    assert model.training
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True)
    )
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_inputs_of_several_parts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(outputs=1, hidden=8)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            """f(a + b)."""
            found: Tensor = self.inner(a + b)
            return found

    plain = run()
    for x in ((X / 2, X / 2), {"a": X / 2, "b": X / 2}):
        found = run(Two(), (x, label(X)))
        assert found.network.losses == pytest.approx(plain.network.losses, rel=1e-8)
        assert found.linear.losses == pytest.approx(plain.linear.losses, rel=1e-8)


def test_progress_can_be_silenced(capsys: pytest.CaptureFixture[str]) -> None:
    run(progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, ["epochs=0"]),
        ({"batch_size": 0}, ["batch_size=0"]),
        ({"every": 0}, ["every=0"]),
        ({"target_loss": 0.0}, ["target_loss=0.0"]),
        ({"data": (X, torch.arange(40))}, ["y holds integers from 0 to 39"]),
        ({"data": (X, real(40, 2))}, ["y has shape (40, 2)", "1 outputs"]),
        ({"data": X}, ["data is Tensor"]),
        ({"make_optimizer": "sgd"}, ["make_optimizer='sgd'", "lambda parameters"]),
        ({"make_optimizer": lambda p: None}, ["make_optimizer returned NoneType"]),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], words: list[str]) -> None:
    refused(InputError, lambda: run(**options), *words)


def test_data_and_training_that_cannot_be() -> None:
    refused(DataError, lambda: run(data=(X[:0], label(X)[:0])), "empty")
    refused(
        NumericalError,
        lambda: run(network(outputs=3), (X, real(40, 3)), make_optimizer=lambda p: torch.optim.SGD(p, 1e200)),
        "training of the network diverged",
    )
