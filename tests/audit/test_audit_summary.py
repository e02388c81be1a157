"""Summaries: the greedy choice against brute force; informative examples matter on real images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import linnet
from linnet import audit
from tests.fitting.problems import near, problem, rho_for


def test_the_greedy_choice_is_that_of_refitting_every_candidate() -> None:
    p = problem(n=7)
    rho = rho_for(p)
    fit = p.fit(ridge=rho)
    goal = fit.predict(p.x)
    chosen: list[int] = []
    distances = []
    for _ in range(3):
        tried: dict[int, float] = {}
        for j in set(range(7)) - set(chosen):
            keep = [*chosen, j]
            rows = p.j[keep].flatten(0, 1)
            right = rows.T @ (p.t - p.f0)[keep].reshape(-1)
            delta = torch.linalg.solve(rows.T @ rows + rho * torch.eye(rows.shape[1]).double(), right)
            tried[j] = float((p.f0 + p.j @ delta - goal).square().sum(1).mean())
        chosen.append(min(tried, key=lambda j: tried[j]))
        distances.append(tried[chosen[-1]])
    found = audit.summarize(fit, 3)
    assert found.indices.tolist() == chosen
    near(found.scores, torch.tensor(distances, dtype=torch.float64), 1e-9)
    assert abs(found.distance - distances[-1]) < 1e-8 * distances[-1]
    assert sorted([*found.indices.tolist(), *found.rest.tolist()]) == list(range(7))
    near(found.fit.predict(p.x_test), fit.forget(found.rest).predict(p.x_test), 1e-12)


def test_candidates_limit_the_choice() -> None:
    p = problem(n=7)
    fit = p.fit(ridge=1.0)
    assert set(audit.summarize(fit, 2, candidates=[1, 5]).indices.tolist()) == {1, 5}
    informative = audit.summarize(fit, 1, "informative", candidates=[2, 6])
    scores = fit.informativeness()
    assert int(informative.indices) == (2 if scores[2] > scores[6] else 6)


def test_informativeness_is_the_definition() -> None:
    p = problem(n=8, tests=5)
    rho = rho_for(p)
    for solver in ("dual", "cg"):
        fit = p.fit(ridge=rho, solver=solver)
        expected = torch.stack(
            [
                (fit.predict(p.x_test) - fit.forget([i]).predict(p.x_test)).square().sum(1).mean()
                for i in range(8)
            ]
        )  # E over validation inputs of ‖f(x) − f₋ᵢ(x)‖², eq. (9)
        near(fit.informativeness(p.x_test), expected, 1e-7)
        found = audit.summarize(fit, 3, "informative", x=p.x_test)
        near(found.scores, expected, 1e-7)
        assert found.indices.tolist() == expected.argsort(descending=True)[:3].tolist()


def digits(file: Path) -> tuple[nn.Module, Tensor, Tensor]:
    """A network trained on some digits, and other digits, 12 x 12 pixels apart by class for half of them."""
    with np.load(file, allow_pickle=False) as stored:
        x = torch.from_numpy(stored["x_test"][:700].astype(np.float32)) / 255
        y = torch.from_numpy(stored["y_test"][:700].astype(np.int64))
    x = nn.functional.avg_pool2d(x[:, None], 2).flatten(1)
    net = nn.Sequential(nn.Linear(196, 16), nn.Tanh(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(15):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[600:]), y[600:]).backward()
        optimizer.step()
    return net, x[:600], y[:600]


def test_dropping_informative_examples_hurts_more(data_file: Callable[[str], Path]) -> None:
    net, x, y = digits(data_file("mnist.npz"))
    fit = linnet.fit(linnet.linearize(net), (x[:120], y[:120]), ridge="loo", solver="dual")
    order = fit.informativeness().argsort(descending=True)

    def error(dropped: Tensor) -> float:
        return float((fit.forget(dropped).predict(x[200:]).argmax(1) != y[200:]).double().mean())

    most, least = error(order[:60]), error(order[60:])
    assert most > least + 0.02, (most, least)


def test_a_greedy_summary_stands_for_the_whole_better_than_chance(data_file: Callable[[str], Path]) -> None:
    net, x, y = digits(data_file("mnist.npz"))
    fit = linnet.fit(linnet.linearize(net), (x[:80], y[:80]), ridge="loo", solver="dual")
    found = audit.summarize(fit, 20)
    assert bool((found.scores[1:] <= found.scores[:-1] * (1 + 1e-9)).all())
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        rest = torch.randperm(80, generator=generator)[20:]
        gap = (fit.forget(rest).predict(x[:80]) - fit.predict(x[:80])).square().sum(1).mean()
        assert found.distance < 0.7 * float(gap)
