"""KFRA as an exponential average: no bias, the weights of the moment, and states."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import linnet
from linnet.curvatures.running import RunningRecursion
from linnet.errors import DataError, InputError
from linnet.likelihoods import Bernoulli, Categorical
from linnet.tangent.functional import Functional


def net(seed: int = 0, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def running(decay: float = 0.5) -> RunningRecursion:
    return RunningRecursion(Functional(net()), Categorical(), decay)


X = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def test_constant_batches_have_no_bias() -> None:
    average = running()
    wanted = linnet.curvature(net(), (X, Y), Categorical(), "kfra").dense()
    for _ in range(4):
        average.add(X, Y)
        found = average.curvature(examples=len(X)).dense()
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
    assert float(average.examples) == pytest.approx(12 * (1 + 0.5 + 0.25 + 0.125))


def test_decay_one_adds_up_and_masked_examples_do_not_count() -> None:
    average = running(1.0)
    masked = torch.cat([Y[6:], torch.full((3,), -100)])
    average.add(X[:6], Y[:6])
    average.add(torch.cat([X[6:], X[:3]]), masked)
    wanted = linnet.curvature(net(), (X, Y), Categorical(), "kfra")
    assert average.curvature().made.examples == 12
    assert torch.allclose(average.curvature().dense(), wanted.dense(), rtol=1e-9, atol=1e-12)


def test_follows_the_network() -> None:
    average = running(1e-9)
    average.add(X, Y)
    other = net(3)
    average.refresh(other)
    average.add(X, Y)
    wanted = linnet.curvature(other, (X, Y), Categorical(), "kfra").dense() / 12
    assert torch.allclose(average.curvature(examples=1.0).dense(), wanted, rtol=1e-6, atol=1e-9)


def test_state_goes_on_with_the_same_bits() -> None:
    average = running()
    average.add(X[:6], Y[:6])
    twin = running()
    twin.load_state_dict(average.state_dict(), X[:2])
    for one in (average, twin):
        one.add(X[6:], Y[6:])
    assert torch.equal(average.curvature().dense(), twin.curvature().dense())
    with pytest.raises(DataError, match="no batch"):
        running().curvature()
    with pytest.raises(InputError, match="slopes 1"):
        RunningRecursion(Functional(net(outputs=4)), Categorical()).load_state_dict(average.state_dict(), X)


def test_diagonal_and_full_curvature_of_the_outputs_agree() -> None:
    """Independent outputs take a short way; it is that of the Hessians."""
    model, y = net(), (torch.arange(36) % 2).view(12, 3).double()
    f = model(X).detach()
    last = linnet.curvature(model, (X, y), Bernoulli(), "kfra").parts[-1].operator
    wanted = Bernoulli().hessian(f, y).sum((0, 1))
    hatted = torch.cat([model[:2](X), torch.ones(12, 1, dtype=X.dtype)], 1).detach()
    product = torch.kron(wanted, hatted.T @ hatted / 12)
    assert torch.allclose(last.dense(), product, rtol=1e-9, atol=1e-12)
