"""Invariances of results, and transformations that change them in a known way."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from tests.curvatures.side_by_side import curvature_of
from tests.hostile.cases import COUNT, drawn, families, labels, likelihood, near
from tests.hostile.random_networks import Network, joined, parts, rows

SCALES = (1e-6, 1e-3, 1e3, 1e6)
SEEDS = random.Random(19).sample(range(COUNT), 20)
OFTEN = 5  # of them in an ordinary run

networks = pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if k < OFTEN else (pytest.mark.long,)) for k, seed in enumerate(SEEDS)],
)


def solved(net: Network, x: Any, t: Tensor, rho: float, model: nn.Module | None = None) -> Any:
    """The fit of the squared loss."""
    return linnet.fit(linnet.linearize(model or net.model), (x, t), ridge=rho, solver="dual")


def flat(fit: Any) -> Tensor:
    """δ."""
    found: Tensor = fit.module.space.to_flat(fit.delta)
    return found


class Scaled(nn.Module):
    """A network whose outputs are multiplied."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.scale * self.model(*args, **kwargs)
        return out


@networks
@pytest.mark.thinned(2)
def test_the_order_of_examples(seed: int) -> None:
    net = drawn(seed)
    order = torch.randperm(net.n, generator=torch.Generator().manual_seed(seed))
    turned, rho = rows(net.x, order), 0.1 * net.scale
    a, b = solved(net, net.x, net.targets, rho), solved(net, turned, net.targets[order], rho)
    near(flat(b), flat(a))
    near(b.loo(), a.loo()[order])
    near(b.influence(net.x_test), a.influence(net.x_test)[order], float(net.targets.abs().max()))
    lin = linnet.linearize(net.model)
    near(lin.kernel(turned), lin.kernel(net.x)[order][:, :, order])
    for family in families(net):
        y, given = labels(net, family), likelihood(net, family)
        for structure in ("full", "kfac"):
            one = linnet.curvature(net.model, (net.x, y), given, structure).dense()
            near(linnet.curvature(net.model, (turned, y[order]), given, structure).dense(), one)


@networks
@pytest.mark.thinned(2)
@pytest.mark.filterwarnings("ignore:.*are copies of others", "ignore:.*have the inputs of others")
@pytest.mark.filterwarnings("ignore:y is constant")
def test_data_twice_are_half_the_ridge(seed: int) -> None:
    """2 Σ ½‖r‖² + ½ρ‖δ‖² has the optimum of Σ ½‖r‖² + ½ (ρ/2) ‖δ‖², and its curvature is twice as large."""
    net = drawn(seed)
    twice, t, rho = joined(net.x, net.x), torch.cat([net.targets, net.targets]), 0.2 * net.scale
    near(flat(solved(net, twice, t, rho)), flat(solved(net, net.x, net.targets, rho / 2)))
    family = families(net)[-1]
    y, given = labels(net, family), likelihood(net, family)
    for structure in ("full", "diagonal", "kfac"):
        one = linnet.curvature(net.model, (net.x, y), given, structure).dense()
        near(linnet.curvature(net.model, (twice, torch.cat([y, y])), given, structure).dense(), 2 * one)
    la = linnet.Laplace(net.model, given, "full", 0.5, data_scale=2.0).fit((net.x, y))
    other = linnet.Laplace(net.model, given, "full", 0.5).fit((twice, torch.cat([y, y])))
    near(la.covariance.dense(), other.covariance.dense())
    near(la.log_evidence(), other.log_evidence(), 1.0)


@networks
@pytest.mark.thinned(2)
def test_batches_and_shards_add_up(seed: int) -> None:
    net = drawn(seed)
    family = families(net)[-1]
    y, given, half = labels(net, family), likelihood(net, family), max(1, net.n // 2)
    whole = linnet.curvature(net.model, (net.x, y), given, "full").dense()
    pieces = [slice(0, half), slice(half, net.n)] if net.n > 1 else [slice(0, 1)]
    shards = [linnet.curvature(net.model, (rows(net.x, k), y[k]), given, "full").dense() for k in pieces]
    near(torch.stack(shards).sum(0), whole)
    near(curvature_of(net.model, (net.x, y), given, "full", block=1).dense(), whole)
    if len(parts(net.x)) == 1 and isinstance(net.x, Tensor):
        loader = DataLoader(TensorDataset(net.x, y), batch_size=2)  # ragged at the end for odd N
        near(linnet.curvature(net.model, loader, given, "full").dense(), whole)
        loaded = linnet.fit(
            linnet.linearize(net.model),
            DataLoader(TensorDataset(net.x, net.targets), batch_size=2),
            ridge=1.0,
        )
        near(flat(loaded), flat(solved(net, net.x, net.targets, 1.0)))
    la = linnet.Laplace(net.model, given, "full").fit((rows(net.x, pieces[0]), y[pieces[0]]))
    if net.n > 1:
        la.fit((rows(net.x, pieces[1]), y[pieces[1]]), add=True)
    once = linnet.Laplace(net.model, given, "full").fit((net.x, y))
    near(la.covariance.dense(), once.covariance.dense())
    near(la.log_evidence(), once.log_evidence(), 1.0)


@networks
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.thinned(6)
def test_scales(seed: int, scale: float) -> None:
    """Residuals times s: δ and predictions times s. Outputs times s: kernel and ridge times s²."""
    net = drawn(seed)
    rho, size = 0.3 * net.scale, float((net.targets.flatten(1) - net.f).abs().max())
    own = solved(net, net.x, net.targets, rho)
    moved = net.f.view(net.own_shape) + scale * (net.targets - net.f.view(net.own_shape))
    share = 1e-8 + 1e-13 / scale  # of f₀, against which small residuals are rounded
    near(flat(solved(net, net.x, moved, rho)) / scale, flat(own), share=share)
    outputs = Scaled(net.model, scale)
    other = solved(net, net.x, scale * net.targets, scale**2 * rho, outputs)
    near(flat(other), flat(own))
    near(other.predict(net.x_test) / scale, own.predict(net.x_test), size)
    near(other.loo() / scale, own.loo(), size)
    near(other.predictive(net.x_test).covariance / scale**2, own.predictive(net.x_test).covariance, own.noise)
    near(
        linnet.linearize(outputs).kernel(net.x, net.x_test) / scale**2,
        linnet.linearize(net.model).kernel(net.x, net.x_test),
    )


@networks
@pytest.mark.thinned(2)
def test_adding_and_forgetting(seed: int) -> None:
    net = drawn(seed)
    rho, size = 0.1 * net.scale, float(net.targets.abs().max() + net.f.abs().max())
    fit = solved(net, net.x, net.targets, rho)
    more = net.targets[:1].expand(2, *net.targets.shape[1:])
    back = fit
    for _ in range(5):
        back = back.update((net.x_test, more)).forget([net.n, net.n + 1])
    near(back.predict(net.x_test), fit.predict(net.x_test), size)
    near(back.loo(), fit.loo(), size)
    if net.n > 1:
        rest = list(range(1, net.n))
        one = solved(net, rows(net.x, [0]), net.targets[:1], rho)
        near(fit.forget(rest).predict(net.x_test), one.predict(net.x_test), size)
        near(one.update((rows(net.x, rest), net.targets[1:])).loo(), fit.loo(), size)


@networks
@pytest.mark.thinned(2)
def test_ignored_labels_are_no_examples(seed: int) -> None:
    net = drawn(seed)
    if "categorical" not in families(net) or len(net.own_shape) > 2 or net.n == 1:
        assert families(net)[-1] in ("categorical", "bernoulli")
        return
    given, y = likelihood(net, "categorical"), net.labels.clone()
    y[-1] = -100
    kept = slice(0, net.n - 1)
    for structure in ("full", "diagonal", "block"):
        found = linnet.curvature(net.model, (net.x, y), given, structure).dense()
        near(found, linnet.curvature(net.model, (rows(net.x, kept), y[kept]), given, structure).dense())
