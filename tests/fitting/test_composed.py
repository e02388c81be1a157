"""Fits added, subtracted and multiplied, against displacements by dense algebra."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError

RIDGE = 0.3


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def inputs(n: int, seed: int) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)).double()


def values(n: int, seed: int) -> tuple[Tensor, Tensor]:
    return inputs(n, seed), torch.randn(n, 3, generator=torch.Generator().manual_seed(seed + 9)).double()


def solution(lin: linnet.Linearized, x: Tensor, y: Tensor) -> Tensor:
    """The optimum of squared losses by its equations, (P,)."""
    j = lin.jacobian(x).flatten(0, 1)
    right = j.T @ (y - lin.base(x)).flatten()
    return torch.linalg.solve(j.T @ j + RIDGE * torch.eye(j.shape[1]).double(), right)


@pytest.mark.parametrize("solver", ["dual", "primal", "cg"])
def test_sums_have_the_displacements_of_all(solver: Any) -> None:
    lin, new = linnet.linearize(network()), inputs(7, 3)
    tasks = [values(n, seed) for n, seed in ((9, 1), (5, 2), (6, 4))]
    solving = linnet.fitting.CG(tolerance=1e-12) if solver == "cg" else solver
    a, b, c = (linnet.fit(lin, task, ridge=RIDGE, solver=solving) for task in tasks)
    deltas = [solution(lin, *task) for task in tasks]
    both = a + 0.5 * b - c
    expected = deltas[0] + 0.5 * deltas[1] - deltas[2]
    found = torch.cat([t.flatten() for t in both.displacement().values()])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    moved = (lin.jacobian(new) @ expected).view(7, 3)
    torch.testing.assert_close(both.predict(new), lin.base(new) + moved, rtol=1e-6, atol=1e-8)
    for other in (-c + (b * 0.5 + a), -(c - a - 0.5 * b), a + (0.5 * b + -1 * c)):
        torch.testing.assert_close(other.predict(new), both.predict(new))
    torch.testing.assert_close((a - a).predict(new), lin.base(new))
    torch.testing.assert_close((a + b).predict(tasks[0][0]), (b + a).predict(tasks[0][0]))
    assert [(fit is one, factor) for (fit, factor), one in zip(both.parts, (a, b, c), strict=True)] == [
        (True, 1.0), (True, 0.5), (True, -1.0),
    ]  # fmt: skip
    assert "9 examples" in repr(both)
    assert "0.5 × 5" in repr(both)


def test_tasks_that_share_no_weights_are_fitted_as_if_together() -> None:
    lin = linnet.linearize(nn.Linear(4, 2, bias=False).double())
    x, y = inputs(10, 1), torch.randn(10, 2).double()
    halves = [x.clone(), x.clone()]
    halves[0][:, 2:], halves[1][:, :2] = 0, 0
    a, b = (linnet.fit(lin, (half, y), ridge=RIDGE) for half in halves)
    joint = linnet.fit(lin, (torch.cat(halves), torch.cat([y, y])), ridge=RIDGE)
    for part in halves:
        torch.testing.assert_close((a + b).predict(part), joint.predict(part))
    torch.testing.assert_close((joint - b).predict(halves[0]), a.predict(halves[0]))


def test_heads_of_other_tasks_keep_to_themselves() -> None:
    net = network()
    heads, fits = [], []
    for classes, seed in ((2, 1), (4, 2)):
        x = inputs(12, seed)
        y = torch.arange(12) % classes
        heads.append(linnet.with_head(net, classes=classes, data=(x, y)))
        fits.append(linnet.fit(linnet.linearize(heads[-1]), (x, y), ridge=RIDGE))
    new = inputs(5, 8)
    a, b = fits
    for first, other in ((a, b), (b, a)):
        lin = linnet.linearize(first.module.model)
        expected = first.displacement()
        for name, t in other.displacement().items():
            if not name.startswith("4."):
                expected[name] = expected[name] + t
        found = first + other
        assert found.predict(new).shape == (5, first.classes)
        torch.testing.assert_close(found.predict(new), lin.base(new) + lin.jvp(new, expected))
        merged = (1e-3 * found).merge(new)
        assert merged.gap < 0.1
        assert merged.network(new).shape == (5, first.classes)
        assert (100 * found).merge().gap > merged.gap


def test_a_displacement_with_the_other_task_s_curvature_as_metric_leaves_that_task_alone() -> None:
    net = network()
    a, b = values(8, 1), values(8, 2)
    base = linnet.fit(linnet.linearize(net), a, ridge=1e-3)
    curvature = linnet.curvature(net, a, linnet.likelihoods.Gaussian(), structure="full")
    metric = linnet.with_metric(net, curvature, damping=1e-6)
    off = {}
    for name, network_b in (("plain", net), ("metric", metric)):
        fit = linnet.fit(linnet.linearize(network_b), b, ridge=1e-3)
        # the parts each fit to its own task as well as the others
        torch.testing.assert_close(fit.predict(b[0]), b[1], rtol=0, atol=0.2)
        off[name] = float(((base + fit).predict(a[0]) - base.predict(a[0])).norm())
    assert off["metric"] < 1e-2 * off["plain"]


def test_cross_entropy_sketches_and_types() -> None:
    net = network().float()
    x, y = inputs(20, 1).float(), torch.arange(20) % 3
    lin = linnet.linearize(net)
    a = linnet.fit(lin, (x, y), "cross-entropy", ridge=RIDGE)
    b = linnet.fit(lin, (x.flip(0), y), ridge=RIDGE)
    G = linnet.curvature(net, (x, y), linnet.likelihoods.Categorical(), structure="kfac")
    sketched = linnet.fit(linnet.linearize(linnet.with_sketch(net, G, dim=20)), (x, y), ridge=RIDGE)
    new = inputs(6, 2).float()
    for other in (b, sketched):
        tangent = linnet.linearize(net).jvp(new, other.displacement())
        torch.testing.assert_close(
            (a + other).predict(new), a.predict(new) + tangent.to(a.predict(new)), rtol=1e-4, atol=1e-4
        )
    assert (sketched + a).displacement().keys() == a.delta.keys()


def changed(net: nn.Module, *names: str) -> nn.Module:
    """A copy with other weights."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for name in names:
            other.get_parameter(name).add_(1.0)
    return other


def test_what_does_not_go_together_is_refused() -> None:
    net, data = network(), values(8, 1)
    fit = linnet.fit(linnet.linearize(net), data, ridge=RIDGE)
    for name in ("0.weight", "2.bias"):  # a single layer, but no head
        with pytest.raises(InputError, match=f"differ in {name[0]}"):
            fit + linnet.fit(linnet.linearize(changed(net, name)), data, ridge=RIDGE)
    head = linnet.fit(linnet.linearize(changed(net, "4.weight")), data, ridge=RIDGE)
    assert (fit + head).displacement().keys() == fit.delta.keys()
    part = torch.zeros(8, 4, dtype=torch.bool)
    part[:3] = True
    for one, other in (("0", "last-layer"), ("0", None), (None, "0"), ({"0.weight": part}, ["0.weight"])):
        fits = [linnet.fit(linnet.linearize(net, params=names), data, ridge=RIDGE) for names in (one, other)]
        with pytest.raises(InputError, match="move other weights"):
            fits[0] - fits[1]
    bent = (linnet.linearize(one, params="last-layer") for one in (net, changed(net, "4.weight")))
    fits = [linnet.fit(lin, data, ridge=RIDGE) for lin in bent]
    with pytest.raises(InputError, match="heads alone"):
        fits[0] + fits[1]
    adapted = linnet.adapt(net, (data[0], torch.arange(8) % 2))
    more = (lambda: 2 * adapted, lambda: sum([adapted, adapted]), lambda: adapted - adapted)
    for make in (lambda: fit + adapted, lambda: fit - adapted, lambda: adapted + fit, *more):
        with pytest.raises(InputError, match=r"fits of linnet\.adapt cannot be added"):
            make()
    shared = linnet.fit(linnet.linearize(net), data, ridge=RIDGE, solver="shared")
    with pytest.raises(InputError, match="weights of their own"):
        fit + shared
    with pytest.raises(InputError, match="scalar"):
        fit * "twice"  # type: ignore[operator]
    with pytest.raises(InputError, match="scalar"):
        float("nan") * fit
    with pytest.raises(InputError, match="not zero"):
        fit / 0
    torch.testing.assert_close((fit / 4).displacement(), (0.25 * fit).displacement())
    for wrong in (2, None, "fit"):
        with pytest.raises(InputError, match="other"):
            fit + wrong
        with pytest.raises(InputError, match="other"):
            wrong + fit
        with pytest.raises(InputError, match="other"):
            fit - wrong


def test_a_list_of_fits_and_outputs_of_every_position() -> None:
    net, data = network(), values(8, 1)
    fits = [linnet.fit(linnet.linearize(net), values(8, seed), ridge=RIDGE) for seed in (1, 2)]
    both = sum(fits)
    torch.testing.assert_close(both.predict(data[0]), (fits[0] + fits[1]).predict(data[0]))
    words = torch.nn.Sequential(torch.nn.Embedding(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5)).double()
    ids = torch.arange(24).view(4, 6) % 5
    fit = linnet.fit(linnet.linearize(words), (ids, ids), "cross-entropy", axis=-1, ridge=RIDGE)
    assert (fit + fit).predict(ids).shape == fit.predict(ids).shape == (4, 6, 5)
    torch.testing.assert_close((1 * fit).predict(ids), fit.predict(ids))
