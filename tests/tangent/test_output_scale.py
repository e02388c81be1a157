"""Outputs on another scale than the likelihood's are told by every door, and only they."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from linnet.likelihoods.likelihood import Likelihood
from linnet.optim import GaussNewton

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SIGN = (X[:, 0] > 0).long()


class Ending(nn.Module):
    """A linear layer and something behind it."""

    def __init__(self, outputs: int, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = nn.Linear(3, outputs).double(), last

    def forward(self, x: Tensor) -> Tensor:
        """The outputs."""
        return self.last(self.layer(x))


def positive_second(f: Tensor) -> Tensor:
    """A mean and a variance."""
    return torch.cat([f[:, :1], nn.functional.softplus(f[:, 1:]) + 1e-6], 1)


WRONG: list[tuple[int, Callable[[Tensor], Tensor], Likelihood]] = [
    (1, torch.sigmoid, Bernoulli()),
    (2, torch.sigmoid, Bernoulli()),
    (1, lambda f: f.sigmoid().clamp(1e-6, 1 - 1e-6).squeeze(1).unsqueeze(1), Bernoulli()),
    (1, lambda f: 1 / (1 + torch.exp(-f)), Bernoulli()),
    (1, nn.functional.logsigmoid, Bernoulli()),
    (3, lambda f: f.softmax(1), Categorical()),
    (3, torch.sigmoid, Categorical()),
    (6, lambda f: f.view(-1, 2, 3).softmax(-1), Categorical(axis=-1)),
    (1, nn.functional.softplus, Poisson()),
    (1, torch.exp, Poisson()),
    (2, lambda f: nn.functional.relu(f) + 0.1, Poisson()),
    (2, positive_second, HeteroscedasticGaussian()),
    (2, lambda f: torch.stack([f[:, 0], f[:, 1].exp()], 1), HeteroscedasticGaussian()),
]
RIGHT: list[tuple[int, Callable[[Tensor], Tensor], Likelihood]] = [
    (1, lambda f: 0.5 + 0.01 * f, Bernoulli()),  # logits that happen to lie in [0, 1]
    (1, lambda f: 4 * f.sigmoid() - 2, Bernoulli()),  # bounded logits
    (3, lambda f: f.log_softmax(1), Categorical()),  # logits as good as any
    (3, lambda f: 0.5 + 0.01 * f, Categorical()),
    (1, lambda f: 3 + 0.01 * f, Poisson()),
    (1, lambda f: nn.functional.softplus(f).log(), Poisson()),
    (1, nn.functional.softplus, Gaussian()),
    (
        2,
        lambda f: torch.cat([f[:, :1], nn.functional.softplus(f[:, 1:]).log()], 1),
        HeteroscedasticGaussian(),
    ),
    (2, lambda f: torch.cat([f[:, :1].exp(), f[:, 1:]], 1), HeteroscedasticGaussian()),  # a positive mean
]


def targets(likelihood: Likelihood, outputs: int) -> Tensor:
    """Targets that fit."""
    if isinstance(likelihood, Categorical):
        return SIGN if outputs < 6 else SIGN[:, None].expand(-1, 2)
    columns = outputs // 2 if isinstance(likelihood, HeteroscedasticGaussian) else outputs
    return SIGN.double()[:, None].expand(-1, columns).clone()


def said(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return seen


def diagonal(net: nn.Module, y: Tensor, likelihood: Likelihood) -> None:
    """A curvature that every likelihood has."""
    linnet.curvature(net, (X, y), likelihood, structure="diagonal", expectation="mc")


@pytest.mark.parametrize("case", WRONG)
def test_outputs_on_another_scale_are_told(case: tuple[int, Any, Likelihood]) -> None:
    outputs, last, likelihood = case
    (line,) = said(lambda: diagonal(Ending(outputs, last), targets(likelihood, outputs), likelihood))
    assert type(likelihood).__name__ in str(line.message)


@pytest.mark.parametrize("case", RIGHT)
def test_outputs_on_the_right_scale_are_not(case: tuple[int, Any, Likelihood]) -> None:
    outputs, last, likelihood = case
    assert not said(lambda: diagonal(Ending(outputs, last), targets(likelihood, outputs), likelihood))


def laplace(net: nn.Module, y: Tensor, likelihood: Likelihood) -> None:
    """A posterior."""
    linnet.Laplace(net, likelihood, structure="diagonal").fit((X, y))


def product(net: nn.Module, y: Tensor, likelihood: Likelihood) -> None:
    """A product with a curvature that is not formed."""
    linnet.curvature(net, (X, y), likelihood, structure="matrix-free")


def cross_entropy(net: nn.Module, y: Tensor, likelihood: Likelihood) -> None:
    """A fit of classes."""
    linnet.fit(linnet.linearize(net), (X, y), loss="cross-entropy")


def squared(net: nn.Module, y: Tensor, likelihood: Likelihood) -> None:
    """A fit of classes by squares, where there are several outputs."""
    loss = "squared" if isinstance(likelihood, Categorical) else "cross-entropy"
    linnet.fit(linnet.linearize(net), (X, y), loss=loss)


def step(net: nn.Module, y: Tensor, likelihood: Likelihood) -> None:
    """Steps of an optimizer, of which the first tells."""
    optimizer = GaussNewton(net, likelihood, structure="kfac")
    for _ in range(3):
        optimizer.step(X, y)


def task(net: nn.Module, y: Tensor, likelihood: Likelihood) -> None:
    """A task that is remembered."""
    linnet.continual.OnlineLaplace(net, likelihood, structure="diagonal").consolidate((X, y))


def posterior(net: nn.Module, y: Tensor, likelihood: Likelihood) -> None:
    """A linear model under a likelihood."""
    linnet.linear_posterior(linnet.linearize(net), (X, y), likelihood, method="map")


@pytest.mark.parametrize("door", [laplace, product, cross_entropy, squared, step, task, posterior])
@pytest.mark.parametrize("case", [WRONG[0], WRONG[5]])
def test_every_door_tells_once(door: Callable[..., None], case: tuple[int, Any, Likelihood]) -> None:
    outputs, last, likelihood = case
    seen = said(lambda: door(Ending(outputs, last), targets(likelihood, outputs), likelihood))
    assert [line.filename for line in seen] == [__file__]  # where the user calls


def test_a_gaussian_process_tells_of_variances() -> None:
    gp = linnet.TangentGP(Ending(2, positive_second), HeteroscedasticGaussian())
    assert any("log-variances" in str(line.message) for line in said(lambda: gp.fit(X, X[:, :1])))


def test_preflight_and_the_record_of_a_fit_keep_it() -> None:
    net = Ending(3, lambda f: f.softmax(1))
    checked = linnet.preflight(net, X)
    assert checked.ok
    assert any("softmax" in line for line in checked.findings)
    with pytest.warns(UserWarning, match="softmax"):
        fit = linnet.fit(linnet.linearize(net), (X, SIGN))
    assert any("softmax" in line for line in fit.record.warnings)
