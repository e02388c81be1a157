"""``Linearized.relinearize`` copies the network only if somebody else may hold it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import linnet
from linnet.errors import ModelError, WeightsError
from linnet.optim import IterativeLinearization
from tests.fitting.problems import near, network, real
from tests.optim.relinearize_cases import OPTIMIZERS, batches, convnet, mlp, run
from tests.oracles.dense import jacobian_oracle
from tests.refusals import refused
from tests.zoo import case


def frozen(lin: linnet.Linearized) -> nn.Module:
    """The frozen network, without asking for it."""
    return lin._function.model


def set_random(lin: linnet.Linearized, seed: int) -> None:
    for name, value in lin.space.to_params(0.1 * real(lin.space.dim, seed=seed)).items():
        lin.delta[name].data.copy_(value)


def test_a_network_that_nobody_else_holds_is_not_copied() -> None:
    lin, x = linnet.linearize(network()), real(4, 3)
    lin(x)
    lin.relinearize()  # makes it its own
    own = frozen(lin)
    theta = {name: t.clone() for name, t in lin.theta0.items()}
    for seed in range(3):
        set_random(lin, seed)
        theta = {name: t + lin.delta[name].detach() for name, t in theta.items()}
        lin.relinearize()
        assert frozen(lin) is own
        for name, t in theta.items():
            assert torch.equal(lin.theta0[name], t)
        fresh = copy.deepcopy(own).requires_grad_(True)
        near(lin.jvp(x, real(lin.space.dim)), jacobian_oracle(fresh, x) @ real(lin.space.dim))
        torch.testing.assert_close(lin(x), fresh(x))


def test_whoever_asked_for_the_network_keeps_it() -> None:
    for ask in (lambda lin: lin.function, lambda lin: lin.model, lambda lin: lin.theta0):
        lin, x = linnet.linearize(network()), real(4, 3)
        lin.relinearize()
        held = ask(lin)
        before = copy.deepcopy(held.theta if hasattr(held, "theta") else held)
        set_random(lin, 1)
        lin.relinearize()
        after = held.theta if hasattr(held, "theta") else held
        if isinstance(after, nn.Module):
            before, after = before.state_dict(), after.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not torch.equal(lin.theta0["0.weight"], before["0.weight"])
        assert lin(x).isfinite().all()


def test_fits_keep_their_linearization_while_training_goes_on() -> None:
    training = IterativeLinearization(mlp(), OPTIMIZERS["adam"], period=2)
    data = batches(9, (4,), torch.float64)
    run(training, data[:5])
    x, y = real(7, 4), real(7, 3)
    fit = linnet.fit(training.linearization, (x, y))
    wanted = fit.predict(x)
    moved = linnet.fit(training.linearization, (x, y))
    moved.module.relinearize()  # nor does a fit move the training
    run(training, data[5:])
    torch.testing.assert_close(fit.predict(x), wanted)
    undisturbed = IterativeLinearization(mlp(), OPTIMIZERS["adam"], period=2)
    run(undisturbed, data)
    for a, b in zip(training.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_retained_graph_is_not_changed() -> None:
    lin, x = linnet.linearize(network()), real(4, 3)
    lin.relinearize()
    value = lin(x).sum()
    (wanted,) = torch.autograd.grad(value, [lin.delta["0.weight"]], retain_graph=True)
    object.__setattr__(lin, "_function", lin._function.moved(lin.theta0, in_place=True))
    theta = {name: t + 1 for name, t in lin.theta0.items()}
    lin._function.moved(theta, in_place=True)
    (found,) = torch.autograd.grad(value, [lin.delta["0.weight"]])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "name", ["resnet-batchnorm", "tied-transpose", "lstm", "weight-norm", "vit-mha", "bert-eager"]
)
@pytest.mark.thinned(3)
def test_networks_of_all_kinds_are_moved_in_place(name: str) -> None:
    expected = case(name)
    net = expected.model()
    lin = linnet.linearize(net)
    lin(expected.x1)
    lin.relinearize()
    lin(expected.x1)
    own, known = frozen(lin), copy.copy(lin._function.cache)
    torch.manual_seed(1)
    for delta in lin.delta.values():
        delta.data.copy_(0.05 * torch.randn_like(delta))
    lin.relinearize()
    assert frozen(lin) is own
    assert lin._function.cache.jvp is known.jvp
    assert lin._function.cache.folds is known.folds
    fresh = linnet.linearize(copy.deepcopy(own), params=lin.parameter_names)
    v = torch.randn(lin.space.dim, dtype=lin.theta0[lin.parameter_names[0]].dtype)
    near(lin.base(expected.x2), fresh.base(expected.x2), 1e-12)
    near(lin.jvp(expected.x2, v), fresh.jvp(expected.x2, v), 1e-9)


def test_the_path_of_derivatives_is_not_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    from linnet.tangent import jacobian

    for name in ("probe_jvp", "find_folds"):
        original = getattr(jacobian, name)
        monkeypatch.setattr(
            jacobian, name, lambda *args, original=original: (calls.append(1), original(*args))[1]
        )
    training = IterativeLinearization(convnet().eval(), OPTIMIZERS["sgd"], period=2)
    data = batches(12, (1, 6, 6), torch.float32)
    run(training, data[:4])
    before = len(calls)
    assert before > 0
    run(training, data[4:])
    assert training.report.relinearizations == 6
    assert len(calls) == before


def test_other_buffers_are_taken_over() -> None:
    net = convnet().eval()
    lin = linnet.linearize(net)
    x = batches(1, (1, 6, 6), torch.float32)[0][0]
    lin(x)
    for _ in range(2):
        with torch.no_grad():
            net.train()(x)
            net.eval()
        lin.relinearize(at=net)
        torch.testing.assert_close(lin.base(x), net(x))
        v = torch.randn(lin.space.dim)
        torch.testing.assert_close(lin.jvp(x, v), linnet.linearize(net).jvp(x, v), rtol=1e-4, atol=1e-5)


class Rescaled(nn.Module):
    """Normalization by a variance that is computed from two buffers in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = nn.functional.batch_norm(self.conv(x), self.mean, self.variance * self.scale)
        return torch.relu(maps).mean((2, 3))


def test_what_is_known_of_old_buffers_is_forgotten() -> None:
    net, x = Rescaled().double(), real(3, 1, 6, 6)
    lin = linnet.linearize(net)
    for _ in range(2):
        lin.relinearize(at=net)
        lin(x)
        assert lin._function.cache.folds
    net.scale.fill_(4.0)
    lin.relinearize(at=net)
    v = real(lin.space.dim)
    near(lin.jvp(x, v), jacobian_oracle(net, x) @ v)


def test_places_that_do_not_fit() -> None:
    lin = linnet.linearize(network())
    before = copy.deepcopy(lin.theta0)
    refused(WeightsError, lambda: lin.relinearize(at=nn.Linear(2, 2)), "'0.weight'")
    refused(WeightsError, lambda: lin.relinearize(at=network(hidden=9)), "(9, 3)")
    broken = network()
    with torch.no_grad():
        broken[2].bias[0] = float("inf")
    refused(ModelError, lambda: lin.relinearize(at=broken), "2.bias")
    assert all(torch.equal(lin.theta0[name], t) for name, t in before.items())
