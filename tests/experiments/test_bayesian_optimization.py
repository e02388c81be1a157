"""Bayesian optimization after earlier tasks, at sizes that take seconds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from experiments.bayesian_optimization import surrogates, tasks, transfer
from experiments.bayesian_optimization.surrogates import Earlier, Heads
from tests.integrations.botorch_stand_in import INSTALLED, botorch_or_stand_in

POINTS = tasks.candidates()


def family(count: int) -> torch.Tensor:
    """Paraboloids around different places, (count, 512)."""
    places = torch.rand(count, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (POINTS - 0.4 - 0.3 * places).square().sum(-1)


@pytest.mark.parametrize("name", tasks.FAMILIES)
def test_a_task_has_one_cost_at_every_candidate_and_differs_from_others(name: str) -> None:
    few = POINTS[:4].numpy()
    first, again, other = (torch.from_numpy(tasks.FAMILIES[name](few, seed)) for seed in (0, 0, 1))
    assert first.shape == (4,)
    assert first.isfinite().all()
    assert first.equal(again)
    assert not torch.allclose(first, other)
    assert torch.allclose(torch.from_numpy(tasks.FAMILIES[name](few[2:3], 0)), first[2:3])


def test_the_best_controller_is_ten_times_better_than_none() -> None:
    cost = 10 ** tasks.costs("pendulum", "development", 1)[0]
    at_rest = 0.01 * 0.01 * sum(range(300))  # ∫ t dt, of an error that stays one angle
    assert float(cost.min()) < 0.1 * at_rest


def test_no_task_is_in_two_splits() -> None:
    first = sorted(tasks.SPLITS.values())
    assert min(b - a for a, b in itertools.pairwise(first)) >= 1000
    with pytest.raises(KeyError):
        tasks.costs("pendulum", "test", 1)


def test_the_merged_network_is_the_mean_of_the_heads() -> None:
    torch.manual_seed(0)
    network = Heads(5, 3)
    each = network(POINTS[:7].expand(5, 7, 3))
    assert each.shape == (5, 7, 1)
    assert torch.allclose(network.merged()(POINTS[:7]), each.mean(0))
    assert torch.allclose(each[2], network.heads(network.body(2 * POINTS[:7] - 1))[:, 2:3])


def test_earlier_tasks_are_seen_at_their_own_points() -> None:
    costs = family(6)
    earlier = Earlier.drawn(POINTS, costs, 20, seed=0)
    assert earlier.x.shape == (6, 20, 3)
    for x, y, cost in zip(earlier.x, earlier.y, costs, strict=True):
        where = (x[:, None] - POINTS).abs().sum(-1).argmin(1)
        assert len(set(where.tolist())) == 20
        assert torch.equal(y[:, 0], cost[where])
    assert earlier.scaled(earlier.y).std().item() == pytest.approx(1.0)


def test_the_prior_of_the_tangent_process_has_the_highest_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surrogates, "STEPS", 30)
    earlier = Earlier.drawn(POINTS, family(6), 12, seed=0)
    network = surrogates.trained(earlier, seed=0)
    gp = surrogates.tangent_process(network, earlier)
    jacobians, residuals = [], earlier.scaled(earlier.y[-4:]) - network(earlier.x[-4:]).detach()
    for x in earlier.x[-4:]:
        rows = [torch.autograd.grad(network(one).sum(), list(network.parameters())) for one in x]
        jacobians.append(torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]))

    def evidence(precision: float, noise: float) -> float:
        total = 0.0
        for j, r in zip(jacobians, residuals[..., 0], strict=True):
            covariance = j @ j.T / precision + noise * torch.eye(12, dtype=torch.float64)
            normal = torch.distributions.MultivariateNormal(torch.zeros_like(r), covariance)
            total += float(normal.log_prob(r))
        return total

    grid = [(p, n) for p in surrogates.PRECISIONS for n in surrogates.NOISES]
    best = max(grid, key=lambda pair: evidence(*pair))
    assert (gp.prior_precision, float(gp.likelihood.noise)) == pytest.approx(best)  # type: ignore[attr-defined]


def test_regret_is_what_is_left_of_the_median_candidates() -> None:
    cost = torch.arange(101, dtype=torch.float64)  # best 0, median 50
    order = torch.tensor([100, 80, 60, 40, 30, 50, 20, 90, 25, 10, 95, *range(51, 60), 0])
    assert transfer.regrets(cost, order) == pytest.approx([60.0, 20.0, 20.0])


@pytest.mark.long
def test_a_search_tries_no_candidate_twice_and_finds_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surrogates, "STEPS", 150)
    monkeypatch.setattr(transfer, "AFTER", (3, 5, 8))
    costs = family(7)
    earlier = Earlier.drawn(POINTS, costs[:6], 40, seed=0)
    process = surrogates.tangent_process(surrogates.trained(earlier, seed=0), earlier)
    cost = earlier.scaled(costs[6])
    with botorch_or_stand_in():
        made = transfer.searched(surrogates.from_tangents(process), cost, seed=3)
    assert made[:2].equal(transfer.first_points(3)[:2])
    assert len(set(made.tolist())) == 8
    assert transfer.regrets(cost, made)[-1] < transfer.regrets(cost, transfer.first_points(3))[-1]


@pytest.mark.long
@pytest.mark.skipif(not INSTALLED, reason="gpytorch and botorch are not installed")
@pytest.mark.filterwarnings("ignore:::(gpytorch|botorch|linear_operator|pyro)")
@pytest.mark.parametrize("fixed", [False, True])
def test_a_process_around_the_network_keeps_it_where_costs_agree(
    monkeypatch: pytest.MonkeyPatch, fixed: bool
) -> None:
    monkeypatch.setattr(surrogates, "STEPS", 100)
    earlier = Earlier.drawn(POINTS, family(6), 20, seed=0)
    network = surrogates.trained(earlier, seed=0)
    before = [p.clone() for p in network.parameters()]
    outputs = network(POINTS).detach()
    surrogate = surrogates.around(network, earlier, fixed=fixed)
    agreed = surrogate(POINTS[:6], outputs[:6]).posterior(POINTS[:, None]).mean[:, 0]
    assert torch.allclose(agreed, outputs, atol=1e-6)
    higher = surrogate(POINTS[:6], outputs[:6] + 1).posterior(POINTS[:6, None])
    assert (higher.mean[:, 0] - outputs[:6]).mean() > 0.5
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:::(gpytorch|botorch|linear_operator|pyro)")
def test_the_study_runs_or_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(surrogates, "STEPS", 100)
    monkeypatch.setattr(transfer, "AFTER", (3, 4, 5))
    sizes = ["--seeds", "1", "--tasks", "2", "--families", "pendulum", "--split", "development"]
    transfer.main([*sizes, "--out", str(tmp_path)])
    if not INSTALLED:
        assert "BoTorch" in capsys.readouterr().out
        return
    cells = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["cells"]
    assert [(c["draw"], c["after"]) for c in cells] == [(d, a) for d in (0, 1) for a in (3, 4, 5)]
    assert all(c[way] >= 0 for c in cells for way in transfer.WAYS)
