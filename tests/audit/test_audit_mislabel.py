"""Doubted labels: exact leave-one-out against brute force, and planted noise found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import audit
from linnet.errors import InputError
from tests.fitting.problems import near, problem, rho_for
from tests.refusals import refused


def auroc(scores: Tensor, positive: Tensor) -> float:
    """Probability that a positive scores higher than a negative."""
    above = scores[positive][:, None] > scores[~positive]
    return float(above.double().mean())


@pytest.mark.parametrize("solver", ["dual", "cg"])
def test_scores_are_those_of_retraining(solver: str) -> None:
    p = problem(n=9)
    rho = rho_for(p)
    fit = p.fit(ridge=rho, solver=solver)
    loo = []
    for i in range(9):
        keep = [j for j in range(9) if j != i]
        rows = p.j[keep].flatten(0, 1)
        right = rows.T @ (p.t - p.f0)[keep].reshape(-1)
        delta = torch.linalg.solve(rows.T @ rows + rho * torch.eye(rows.shape[1]).double(), right)
        loo.append(p.f0[i] + p.j[i] @ delta)
    outputs = torch.stack(loo)
    found = audit.mislabeled(fit)
    near(found.residual, (p.t - outputs).norm(dim=1), 1e-8)
    near(found.self_influence, (fit.predict(p.x) - outputs).norm(dim=1), 1e-8)
    given = outputs[torch.arange(9), p.y]
    others = outputs.clone()
    others[torch.arange(9), p.y] = -1e9
    near(found.scores, others.amax(1) - given, 1e-8)
    assert found.predicted is not None
    assert torch.equal(found.predicted, outputs.argmax(1))
    assert torch.equal(found.flagged().sort().values, (outputs.argmax(1) != p.y).nonzero()[:, 0])
    assert torch.equal(found.order, found.scores.argsort(descending=True, stable=True))


@pytest.mark.parametrize("score", ["margin", "residual", "self-influence"])
def test_each_score_orders_by_itself(score: str) -> None:
    found = audit.mislabeled(problem(n=9).fit(ridge=1.0), score=score)
    assert found.score == score
    wanted = {"residual": found.residual, "self-influence": found.self_influence}.get(score, found.scores)
    assert torch.equal(found.scores, wanted)


def test_regression_ranks_by_the_residual() -> None:
    p = problem(n=9, outputs=1, classes=False)
    p.y[4] += 30
    found = audit.mislabeled(p.fit(ridge=0.5))
    assert found.score == "residual"
    assert int(found.order[0]) == 4
    assert found.predicted is None
    refused(InputError, found.flagged, "classes")
    refused(InputError, lambda: audit.mislabeled(p.fit(ridge=0.5), score="margin"), "margin")
    refused(InputError, lambda: audit.mislabeled(p.fit(ridge=0.5), score="loss"), "loss")


def test_planted_noise_on_real_digits_is_found(data_file: Callable[[str], Path]) -> None:
    with np.load(data_file("mnist.npz"), allow_pickle=False) as file:
        x = torch.from_numpy(file["x_test"][:260].astype(np.float32)) / 255
        y = torch.from_numpy(file["y_test"][:260].astype(np.int64))
    x = nn.functional.avg_pool2d(x[:, None], 2).flatten(1)
    net = nn.Sequential(nn.Linear(196, 24), nn.Tanh(), nn.Linear(24, 10))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(40):  # pretrained on half of the digits; the others are the new task
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[130:]), y[130:]).backward()
        optimizer.step()
    generator = torch.Generator().manual_seed(0)
    wrong = torch.zeros(130, dtype=torch.bool)
    wrong[torch.randperm(130, generator=generator)[:13]] = True
    noisy = torch.where(wrong, (y[:130] + 1 + torch.randint(9, (130,), generator=generator)) % 10, y[:130])
    fit = linnet.fit(linnet.linearize(net), (x[:130], noisy), ridge="loo", solver="dual")
    found = audit.mislabeled(fit)
    assert auroc(found.scores, wrong) > 0.9
    # what is left of the residual after training misses wrong labels that were fitted
    training = (fit.targets - fit.predict(x[:130])).norm(dim=1)
    assert auroc(found.scores, wrong) >= auroc(training, wrong)


def test_outputs_of_any_model_are_ranked_as_those_of_a_fit() -> None:
    p = problem(n=9)
    fit = p.fit(ridge=1.0)
    own, found = audit.mislabeled(fit), audit.mislabeled(fit.loo(), p.y)
    near(found.scores, own.scores, 1e-12)
    assert torch.equal(found.order, own.order)
    assert torch.equal(found.doubted(), own.doubted())
    assert found.self_influence is None
    refused(InputError, lambda: audit.mislabeled(fit.loo(), p.y, score="self-influence"), "self-influence")
    refused(InputError, lambda: audit.mislabeled(fit, p.y), "labels")
