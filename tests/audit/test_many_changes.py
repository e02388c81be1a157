"""A thousand changes in a row equal a fit of what is left, and nothing is left of what was forgotten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet

RIDGE = 0.5


def task(n: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network in float64 and n examples of three classes."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(n, 4).double()
    return net, x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def made(net: nn.Module, x: Tensor, y: Tensor, kind: str) -> Any:
    """A fit of one of the kinds that are changed in closed form."""
    if kind == "adapt":
        return linnet.adapt(net, (x, y), weight=0.3, ridge=0.1)
    return linnet.fit(linnet.linearize(net), (x, y), ridge=RIDGE, solver=kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dual", "primal", "adapt"])
def test_a_thousand_deletions_and_additions_equal_a_refit(kind: str) -> None:
    net, x, y = task(60)
    generator, query = torch.Generator().manual_seed(2), torch.randn(20, 4).double()
    first = made(net, x, y, kind)
    fit, inside, outside = first, list(range(60)), []
    for step in range(1000):
        leave = len(inside) > 30 and (not outside or torch.rand(1, generator=generator) < 0.5)
        pool = inside if leave else outside
        one = pool.pop(int(torch.randint(len(pool), (1,), generator=generator)))
        if leave:
            fit = fit.forget([_place(fit, x[one])])
            outside.append(one)
        else:
            fit = fit.update((x[one : one + 1], y[one : one + 1]))
            inside.append(one)
        if step % 250 == 249:
            kept = torch.tensor(inside)
            torch.testing.assert_close(fit.x[_order(fit.x)], x[kept][_order(x[kept])])
            again = fit.recomputed().predict(query)
            scale = float(again.std())
            assert float((fit.predict(query) - again).abs().max()) < 1e-8 * scale
            if kind != "adapt":  # whose features are scaled by the first samples
                refit = made(net, x[kept], y[kept], kind).predict(query)
                assert float((fit.predict(query) - refit).abs().max()) < 1e-8 * scale


def _place(fit: Any, one: Tensor) -> int:
    """The position of an example in a fit."""
    return int((fit.x == one).all(1).nonzero()[0, 0])


def _order(x: Tensor) -> Tensor:
    """An order that does not depend on how examples came."""
    return x[:, 0].argsort()


def area(members: Tensor, others: Tensor) -> float:
    """The area under the ROC curve of an attack that takes larger scores for members."""
    ordered = torch.cat([members, others]).argsort().argsort().double() + 1
    n, m = len(members), len(others)
    return float((ordered[:n].sum() - n * (n + 1) / 2) / (n * m))


@pytest.mark.long
def test_an_attack_cannot_tell_what_was_forgotten_from_what_was_never_seen() -> None:
    """Membership inference by the loss: it tells members from others, and forgotten ones from none."""
    count, generator = 1500, torch.Generator().manual_seed(3)
    lin = linnet.linearize(nn.Linear(8, 1, bias=False).double())
    kept, gone, never = [], [], []
    for _ in range(count):
        x = torch.randn(14, 8, generator=generator).double()
        y = x.sum(1, keepdim=True) + torch.randn(14, 1, generator=generator).double()
        fit = linnet.fit(lin, (x[:12], y[:12]), ridge=1.0, solver="dual")
        without = fit.forget([0])
        kept.append(-(fit.predict(x[:1]) - y[:1]).square())
        gone.append(-(without.predict(x[:1]) - y[:1]).square())
        never.append(-(without.predict(x[12:13]) - y[12:13]).square())
    members, forgotten, others = (torch.cat(one).flatten() for one in (kept, gone, never))
    assert area(members, others) > 0.7
    # the standard error of the area is 0.0105
    assert abs(area(forgotten, others) - 0.5) < 0.03
