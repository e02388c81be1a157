"""Labels that look wrong: the rule by its definition, leave-one-out by brute force, planted errors found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.audit.mislabel import GAIN, labels_in_words, mislabeled
from linnet.errors import InputError
from tests.fitting.problems import near, problem, rho_for


def drawn(n: int, classes: int, rate: float, seed: int, sharp: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, labels drawn from their softmax and flipped at a rate, and which were flipped."""
    generator = torch.Generator().manual_seed(seed)
    outputs = sharp * 2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(outputs.softmax(1), 1, generator=generator)[:, 0]
    wrong = torch.rand(n, generator=generator) < rate
    shift = 1 + torch.randint(classes - 1, (n,), generator=generator)
    return outputs, torch.where(wrong, (labels + shift) % classes, labels), wrong


@pytest.mark.parametrize(("classes", "rate"), [(2, 0.1), (3, 0.0), (4, 0.3)])
def test_every_label_by_the_definition(classes: int, rate: float) -> None:
    outputs, labels, _ = drawn(60, classes, rate, seed=classes, sharp=3.0)
    found = mislabeled(outputs, labels)
    q = (outputs / found.temperature).softmax(1).tolist()
    y = labels.tolist()
    means = []
    for c in range(classes):
        own = [q[i][c] for i in range(60) if y[i] == c]
        means.append(sum(own) / len(own) if own else math.inf)

    def doubted(i: int, label: int) -> tuple[bool, float]:
        reached = [c for c in range(classes) if q[i][c] >= means[c]]
        flipped = found.rate * (1 - q[i][label]) / (classes - 1)
        wrong = flipped / (flipped + (1 - found.rate) * q[i][label])
        best = max(reached, key=lambda c: q[i][c], default=label)
        return best != label and wrong > 0.5, wrong

    assert found.wrong.tolist() == pytest.approx(
        [doubted(i, y[i])[1] for i in range(60)], rel=1e-9, abs=1e-12
    )
    assert sorted(found.indices.tolist()) == [i for i in range(60) if doubted(i, y[i])[0]]
    assert torch.equal(found.wrong[found.indices], found.wrong[found.indices].sort(descending=True).values)


@pytest.mark.parametrize(("n", "lost"), [(300, 1e-3), (80, GAIN)])
def test_temperature_and_rate_are_of_highest_likelihood(n: int, lost: float) -> None:
    outputs, labels, _ = drawn(n, 3, 0.15, seed=5)
    found = mislabeled(outputs, labels)
    assert (found.rate == 0) == (lost == GAIN)  # of 80 labels, hard examples explain these as well

    def likelihood(t: float, rate: float) -> float:
        q = (outputs / t).softmax(1)
        own = q.gather(1, labels[:, None])[:, 0]
        return float(((1 - rate) * own + rate * (1 - own) / 2).log().sum() + q.log().mean())

    best = likelihood(found.temperature, found.rate)
    rates = (found.rate, *torch.linspace(0, 0.5, 19).tolist())
    every = [likelihood(found.temperature * f, r) for f in (0.5, 0.8, 0.95, 1, 1.05, 1.3, 2) for r in rates]
    assert max(every) - lost <= best


@pytest.mark.parametrize(("classes", "sharp", "rate"), [(2, 1.0, 0.0), (4, 2.0, 0.1)])
@pytest.mark.thinned(2)
def test_right_labels_look_wrong_as_often_as_expected(classes: int, sharp: float, rate: float) -> None:
    right, expected, seen, recall = [], [], [], []
    for seed in range(8):
        outputs, labels, wrong = drawn(120, classes, rate, seed, sharp)
        found = mislabeled(outputs, labels)
        right.append(float((~wrong[found.indices]).sum()))
        expected.append(found.expected)
        seen.append(float(wrong[found.indices].sum() / wrong.sum().clamp_min(1)))
        recall.append(found.recall)
    spread = torch.tensor(right).std() / 8**0.5
    assert abs(statistics.fmean(right) - statistics.fmean(expected)) < 3 * float(spread) + 0.2
    if rate:
        assert statistics.fmean(seen) == pytest.approx(statistics.fmean(recall), abs=0.15)


@pytest.mark.parametrize("sharp", [0.5, 3.0, 30.0])
def test_the_longer_list_is_that_of_confident_learning(sharp: float) -> None:
    outputs, labels = drawn(200, 4, 0.1, 2, sharp)[:2]
    found = mislabeled(outputs, labels)
    q = (outputs / found.temperature).softmax(1)
    own = torch.stack([q[labels == c, c].mean() for c in range(4)])
    sure = [[c for c in range(4) if q[i, c] >= own[c]] for i in range(200)]
    wanted = [i for i in range(200) if sure[i] and max(sure[i], key=lambda c: float(q[i, c])) != labels[i]]
    assert sorted(found.suspected().tolist()) == wanted
    assert set(found.doubted().tolist()) <= set(wanted) <= set(found.flagged().tolist())


def test_what_cannot_be_seen_is_said() -> None:
    hard, sure = (drawn(100, 4, 0.1, 1, sharp) for sharp in (0.5, 30.0))
    found = mislabeled(*hard[:2])
    assert found.recall < 0.2
    assert f"the {len(found.suspected())} that leave-one-out" in found.limits
    assert mislabeled(*sure[:2]).limits == ""
    assert mislabeled(*sure[:2]).recall > 0.5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.thinned(2)
def test_outputs_that_say_nothing_doubt_no_label(seed: int) -> None:
    outputs, labels, _ = drawn(80, 5, 0.0, seed)
    labels = labels[torch.randperm(80, generator=torch.Generator().manual_seed(seed))]
    against = outputs - 3 * torch.nn.functional.one_hot(labels, 5)  # as leaving out makes a class rarer
    for nothing in (outputs, against, torch.zeros(80, 5)):
        found = mislabeled(nothing, labels)
        assert not len(found.indices)
        assert found.rate == 0
        assert found.expected < 4
        assert found.recall < 0.5


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_hard_examples_are_told_from_wrong_labels(rate: float) -> None:
    outputs, labels, wrong = drawn(800, 4, rate, seed=1, sharp=2.0)
    found = mislabeled(outputs, labels)
    assert found.rate == pytest.approx(rate, abs=0.03)
    disagree = int((outputs.argmax(1) != labels).sum())
    if rate:
        doubted = wrong[found.indices]
        assert doubted.double().mean() > 0.85
        assert doubted.sum() > 0.6 * wrong.sum()
        right = len(found.indices) - int(doubted.sum())
        assert (
            abs(right - found.expected) < 4 * math.sqrt(found.expected) + 2
        )  # the labels expected by chance
    else:
        assert disagree > 80
        assert len(found.indices) < 0.02 * disagree


def test_one_output_is_the_log_odds_of_the_second_class() -> None:
    outputs, labels, _ = drawn(100, 2, 0.1, seed=2, sharp=2.0)
    odds = outputs[:, 1:] - outputs[:, :1]
    wide = mislabeled(torch.cat([-odds / 2, odds / 2], 1), labels)
    narrow = mislabeled(odds, labels)
    assert narrow.rate == pytest.approx(wide.rate, abs=0.02)
    assert torch.equal(narrow.suggested, wide.suggested)


def test_a_fit_says_it_in_words() -> None:
    p = problem(n=12)
    found = mislabeled(p.fit(ridge=1.0))
    assert found.indices is not None
    assert set(found.doubted().tolist()) == set(found.indices.tolist()) <= set(found.flagged().tolist())
    told = labels_in_words(len(found.doubted()), 12, found.expected, found.limits)
    assert str(found) == told
    assert labels_in_words(1, 9, 0.1) == "1 of 9 training labels looks wrong (by chance alone none would)"
    regression = mislabeled(problem(n=6, outputs=1, classes=False).fit(ridge=1.0))
    assert str(regression) == "6 training targets, ranked by residual"


# --- rankings -------------------------------------------------------------------------------------


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
    found = mislabeled(fit)
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
    found = mislabeled(problem(n=9).fit(ridge=1.0), score=score)
    assert found.score == score
    wanted = {"residual": found.residual, "self-influence": found.self_influence}.get(score, found.scores)
    assert torch.equal(found.scores, wanted)


def test_regression_ranks_by_the_residual() -> None:
    p = problem(n=9, outputs=1, classes=False)
    p.y[4] += 30
    found = mislabeled(p.fit(ridge=0.5))
    assert found.score == "residual"
    assert int(found.order[0]) == 4
    assert found.predicted is None


@pytest.mark.long
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
    found = mislabeled(fit)
    assert auroc(found.scores, wrong) > 0.9
    # what is left of the residual after training misses wrong labels that were fitted
    training = (fit.targets - fit.predict(x[:130])).norm(dim=1)
    assert auroc(found.scores, wrong) >= auroc(training, wrong)


def test_outputs_of_any_model_are_ranked_as_those_of_a_fit() -> None:
    p = problem(n=9)
    fit = p.fit(ridge=1.0)
    own, found = mislabeled(fit), mislabeled(fit.loo(), p.y)
    near(found.scores, own.scores, 1e-12)
    assert torch.equal(found.order, own.order)
    assert torch.equal(found.doubted(), own.doubted())
    assert found.self_influence is None


def test_arrays_are_outputs_too() -> None:
    outputs, labels = 4 * torch.randn(30, 3).double(), torch.arange(30) % 3
    ours, theirs = mislabeled(outputs, labels), mislabeled(outputs.numpy(), labels.numpy())
    assert torch.equal(ours.order, theirs.order)
    told = linnet.audit.flips(outputs.numpy(), -outputs, torch.zeros(30, 1), labels)
    assert told.accuracy_before == float((outputs.argmax(1) == labels).double().mean())


def test_labels_that_are_alone_are_not_doubted_and_gaps_change_nothing() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    y = torch.arange(120) % 3
    x = torch.randn(120, 3).double() + 1.5 * nn.functional.one_hot(y, 3)
    y[:8] = (y[:8] + 1) % 3
    names = torch.tensor([1, 3, 4])
    one = mislabeled(linnet.adapt(net, (x, y)))
    with pytest.warns(UserWarning, match="without a sample"):
        other = mislabeled(linnet.adapt(net, (x, names[y])))
    assert other.temperature == pytest.approx(one.temperature)
    near(other.wrong, one.wrong, 1e-8)
    near(other.scores, one.scores, 1e-8)
    assert other.predicted.tolist() == names[one.predicted].tolist()
    assert other.suggested.tolist() == [-1 if c < 0 else int(names[c]) for c in one.suggested]
    alone = y.clone()
    alone[5] = 3
    found = mislabeled(linnet.adapt(net, (x, alone)))
    assert (float(found.wrong[5]), int(found.suggested[5])) == (0.0, -1)
    assert 5 not in found.doubted().tolist()
    assert len(mislabeled(torch.eye(4).double(), torch.arange(4)).doubted()) == 0


def test_rare_classes_are_not_said_to_be_contradicted() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(200, 6, dtype=torch.float64), (torch.arange(200) < 3).long()
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    found = linnet.audit.mislabeled(fit := linnet.adapt(net, (x, y)))
    contradicted = int((fit.loo().argmax(1) != y).sum())
    told = [int(word) for word in found.limits.partition("the ")[2].split()[:1]]
    assert all(count <= contradicted for count in told)
    few = linnet.audit.mislabeled(linnet.adapt(net, (x[:3], y[1:4])))
    assert "nan" not in str(few)


def test_probabilities_are_outputs_too() -> None:
    outputs, labels, _ = drawn(80, 3, 0.15, seed=5)
    own, other = mislabeled(outputs, labels), mislabeled(outputs.softmax(1), labels)
    assert torch.equal(own.doubted(), other.doubted())
    assert torch.equal(own.order, other.order)
    torch.testing.assert_close(own.wrong, other.wrong)
    for rounded in (outputs.softmax(1).half(), (100 * outputs.softmax(1)).round() / 100):
        assert mislabeled(rounded, labels).temperature == pytest.approx(own.temperature, rel=0.2)
    with pytest.raises(InputError, match="probabilities whose rows sum to 1"):
        mislabeled(torch.cat([outputs[1:].softmax(1), torch.zeros(1, 3)]), labels)
    certain = torch.eye(3, dtype=torch.float64)[labels]
    assert not len(mislabeled(certain, labels).doubted())
