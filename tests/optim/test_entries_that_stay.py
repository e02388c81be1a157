"""Masks of entries where the network's own parameters are trained, and losses that are means over labels."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError
from linnet.likelihoods import Bernoulli, Categorical

MASK = torch.tensor([[True], [False], [False], [False]]).expand(4, 3)


@pytest.fixture
def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 4).double()


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (20,), generator=generator)


def gauss_newton(net: nn.Module, data: tuple[Tensor, Tensor], params: object) -> None:
    linnet.optim.GaussNewton(net, Categorical(), params=params).step(*data)


def iterative(net: nn.Module, data: tuple[Tensor, Tensor], params: object) -> None:
    training = linnet.optim.IterativeLinearization(net, lambda p: torch.optim.SGD(p, 0.1), 5, params=params)
    training.step(lambda module: nn.functional.cross_entropy(module(data[0]), data[1]))


@pytest.mark.parametrize("train", [gauss_newton, iterative])
def test_masks_are_refused_and_hooks_obeyed(train: Callable[..., None], net: nn.Linear, data) -> None:
    start = net.weight.detach().clone()
    with pytest.raises(InputError, match=r"params\['weight'\] is a mask of entries.*register_hook"):
        train(net, data, {"weight": MASK})
    assert torch.equal(net.weight, start)
    net.weight.register_hook(lambda g: g * MASK)  # as the error says
    train(net, data, {"weight": True, "bias": True})
    moved = net.weight.detach() != start
    assert moved[MASK].all()
    assert not moved[~MASK].any()


def test_a_preconditioner_leaves_other_entries_their_gradients(net: nn.Linear, data) -> None:
    curvature = linnet.curvature(net, data, Categorical(), params={"weight": MASK})
    nn.functional.cross_entropy(net(data[0]), data[1]).backward()
    before = net.weight.grad.clone()
    linnet.KroneckerPreconditioner(curvature, net, damping=0.01).step()
    assert torch.equal(net.weight.grad[~MASK], before[~MASK])
    assert (net.weight.grad[MASK] != before[MASK]).all()


SVI = linnet.SVI(training=linnet.Training(epochs=20, learning_rate=0.01))


@pytest.mark.parametrize("method", ["laplace", SVI])
def test_draws_of_a_linear_posterior_leave_them_where_they_are(method, net: nn.Linear, data) -> None:
    lin = linnet.linearize(net, params={"weight": MASK})
    draws = linnet.linear_posterior(lin, data, Categorical(), method=method).sample(30, seed=0)
    spread = draws.std(0)
    assert (spread[MASK.flatten()] > 0).all()
    assert not spread[~MASK.flatten()].any()


def ignored(data: tuple[Tensor, Tensor]) -> tuple[nn.Module, Categorical, Tensor, Tensor]:
    y = data[1].clone()
    y[4:] = -100
    return nn.Linear(3, 4).double(), Categorical(), data[0], y


def positions(data: tuple[Tensor, Tensor]) -> tuple[nn.Module, Categorical, Tensor, Tensor]:
    return nn.Linear(3, 4).double(), Categorical(axis=-1), data[0].view(5, 4, 3), data[1].view(5, 4)


def several(data: tuple[Tensor, Tensor]) -> tuple[nn.Module, Bernoulli, Tensor, Tensor]:
    return nn.Linear(3, 4).double(), Bernoulli(), data[0], nn.functional.one_hot(data[1], 4).double()


@pytest.mark.parametrize("make", [ignored, positions, several])
@pytest.mark.parametrize("closed", [False, True])
def test_a_mean_over_labels_is_refused_and_one_over_examples_is_not(make, closed: bool, data) -> None:
    torch.manual_seed(0)
    net, likelihood, x, y = make(data)

    def loss_of(net: nn.Module, reduction: str) -> Tensor:
        f, t = net(x), y
        if isinstance(likelihood, Bernoulli):
            return nn.functional.binary_cross_entropy_with_logits(f, t, reduction=reduction)
        return nn.functional.cross_entropy(f.flatten(0, -2), t.flatten(), reduction=reduction)

    def stepped(loss: Callable[[nn.Module], Tensor] | None) -> Tensor:
        own = copy.deepcopy(net)
        optimizer = linnet.optim.GaussNewton(own, likelihood, "full", "exact", 0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss(own)
            value.backward()
            return value

        if loss is None:
            optimizer.step(x, y)
        elif closed:
            optimizer.step(x, y, closure=closure)
        else:
            optimizer.step(x, y, loss=closure())
        return own.weight.detach()

    with pytest.raises(InputError, match=r"mean over .* labels"):
        stepped(lambda own: loss_of(own, "mean"))
    found = stepped(lambda own: loss_of(own, "sum") / len(y))
    torch.testing.assert_close(found, stepped(None), rtol=1e-9, atol=1e-9)


def test_the_look_at_a_loss_leaves_the_network_and_the_random_numbers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)).train()
    x, y = torch.randn(8, 3), torch.nn.functional.one_hot(torch.arange(8) % 4, 4).float()
    optimizer = linnet.optim.GaussNewton(net, Bernoulli(), "diagonal", damping=1.0)
    loss = nn.functional.binary_cross_entropy_with_logits(net(x), y, reduction="sum") / 8
    loss.backward()
    drawn = torch.random.get_rng_state()
    seen = int(net[1].num_batches_tracked)
    optimizer._measure([(x, y)], None, float(loss.detach()))
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert int(net[1].num_batches_tracked) == seen


def test_evidence_takes_parameters_whole(net: nn.Linear, data) -> None:
    with pytest.raises(InputError, match="is a mask of entries"):
        linnet.train_with_evidence(
            net, data, Categorical(), 1, lambda p: torch.optim.SGD(p, 0.1), params={"weight": MASK}
        )
