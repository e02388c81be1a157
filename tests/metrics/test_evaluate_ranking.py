"""Telling two sets apart and abstaining: AUROC, AUPR, FPR95, risk against coverage, and linnet.ood."""

from __future__ import annotations

import json
import math
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from linnet.errors import DataError, InputError
from linnet.metrics.evaluate import evaluate
from linnet.metrics.ood import ood
from linnet.metrics.reports import Detection, Report, risk_coverage
from tests.fitting.problems import near, real, refused

metrics = pytest.importorskip("sklearn.metrics")


def scores(n: int, m: int, seed: int, ties: bool) -> Detection:
    inside, outside = real(n, seed=seed), 0.7 + real(m, seed=seed + 1)
    if ties:
        inside, outside = inside.mul(2).round(), outside.mul(2).round()
    return Detection("s", inside, outside)


CASES = [(n, m, seed, ties) for n, m, seed in ((40, 25, 0), (7, 90, 1), (3, 2, 2)) for ties in (False, True)]


@pytest.mark.parametrize(("n", "m", "seed", "ties"), CASES)
def test_agrees_with_scikit_learn(n: int, m: int, seed: int, ties: bool) -> None:
    found = scores(n, m, seed, ties)
    truth = torch.cat([torch.zeros(n), torch.ones(m)])
    values = torch.cat([found.inside, found.outside])
    assert found.auroc == pytest.approx(metrics.roc_auc_score(truth, values), abs=1e-12)
    assert found.aupr == pytest.approx(metrics.average_precision_score(truth, values), abs=1e-12)
    false, true, _ = metrics.roc_curve(truth, values, drop_intermediate=False)
    own_false, own_true = found.roc()
    near(own_false, torch.from_numpy(false), 1e-12)
    near(own_true, torch.from_numpy(true), 1e-12)
    assert found.fpr95 == pytest.approx(false[(true >= 0.95).argmax()], abs=1e-12)


@pytest.mark.parametrize("ties", [False, True])
def test_standard_error_of_the_auroc(ties: bool) -> None:
    """DeLong's formula pair by pair, and against the spread over many draws."""
    found = scores(30, 20, 3, ties)
    pairs = (found.outside[:, None] > found.inside).double() + 0.5 * (found.outside[:, None] == found.inside)
    variance = pairs.mean(1).var() / 20 + pairs.mean(0).var() / 30
    assert found.auroc == pytest.approx(pairs.mean().item(), abs=1e-12)
    assert found.auroc_stderr == pytest.approx(variance.sqrt().item(), rel=1e-12)
    draws = [scores(30, 20, seed, ties) for seed in range(10, 410, 2)]
    spread = torch.tensor([draw.auroc for draw in draws]).std().item()
    assert sum(draw.auroc_stderr for draw in draws) / len(draws) == pytest.approx(spread, rel=0.15)
    assert scores(1, 20, 0, ties).auroc_stderr == math.inf


sizes = st.integers(1, 12)


@given(sizes, sizes, st.integers(0, 99), st.booleans())
def test_only_the_order_of_scores_matters(n: int, m: int, seed: int, ties: bool) -> None:
    found = scores(n, m, seed, ties)
    for function in (torch.exp, torch.atan, lambda s: 3 * s - 5):
        other = Detection("s", function(found.inside), function(found.outside))
        assert other.to_dict() == found.to_dict()


@given(sizes, sizes, st.integers(0, 99), st.booleans())
def test_order_of_examples_does_not_matter(n: int, m: int, seed: int, ties: bool) -> None:
    found = scores(n, m, seed, ties)
    other = Detection("s", found.inside.flip(0), found.outside.flip(0))
    assert other.auroc_stderr == pytest.approx(found.auroc_stderr, rel=1e-9, abs=1e-12)
    for name in ("auroc", "aupr", "fpr95"):
        assert getattr(other, name) == getattr(found, name)


def test_extremes() -> None:
    low, high = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])
    perfect, worst, blind = Detection("s", low, high), Detection("s", high, low), Detection("s", low, low)
    assert [perfect.auroc, perfect.aupr, perfect.fpr95] == [1, 1, 0]
    assert [worst.auroc, worst.fpr95] == [0, 1]
    constant = Detection("s", torch.zeros(3), torch.zeros(1))
    assert [blind.auroc, constant.auroc, constant.aupr, constant.fpr95] == [0.5, 0.5, 0.25, 1]


def test_one_class_is_refused() -> None:
    some, none = torch.zeros(3), torch.zeros(0)
    refused(DataError, lambda: Detection("s", none, some), "inside is empty")
    refused(DataError, lambda: Detection("s", some, none), "outside is empty")
    refused(DataError, lambda: Detection("s", some / 0, some), "NaN inside")


# Risk against coverage


def test_risk_is_the_mean_loss_of_the_most_certain() -> None:
    uncertainty, loss = real(20), real(20, seed=1) ** 2
    curve = risk_coverage(uncertainty, loss)
    order = uncertainty.argsort().tolist()
    risks = [loss[order[:k]].mean() for k in range(1, 21)]
    near(curve.risk, torch.stack(risks), 1e-12)
    near(curve.coverage, torch.arange(1, 21) / 20, 1e-7)
    assert curve.area == pytest.approx(sum(risks).item() / 20, rel=1e-12)
    assert curve.risk_at(0.61) == float(curve.risk[12])
    refused(InputError, lambda: curve.risk_at(0.0), "coverage=0.0")


def test_ties_are_averaged_over_all_orders() -> None:
    uncertainty, loss = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])
    orders = [(0, *inner, 4) for inner in permutations((1, 2, 3))]
    risks = [loss[list(order)].double().cumsum(0) / torch.arange(1, 6) for order in orders]
    near(risk_coverage(uncertainty, loss).risk, torch.stack(risks).mean(0), 1e-12)


@given(st.integers(2, 30), st.integers(0, 99))
def test_the_best_order_has_the_least_area(n: int, seed: int) -> None:
    uncertainty, loss = real(n, seed=seed), (real(n, seed=seed + 1) > 0).double()
    best, worst = risk_coverage(loss, loss).area, risk_coverage(-loss, loss).area
    assert best - 1e-12 <= risk_coverage(uncertainty, loss).area <= worst + 1e-12


def lookup(p: Tensor, y: Tensor) -> Report:
    found = evaluate(lambda x: p[..., x, :], (torch.arange(len(y)), y))
    assert isinstance(found, Report)
    return found


def test_report_orders_by_the_chosen_score() -> None:
    p = torch.stack([(2 * real(30, 4, seed=s)).softmax(1) for s in range(3)])
    y = torch.randint(4, (30,), generator=torch.Generator().manual_seed(0))
    found = lookup(p, y)
    mean = p.mean(0)
    wrong = (mean.argmax(1) != y).double()
    entropy = torch.special.entr(mean).sum(1)
    disagreement = entropy - torch.special.entr(p).sum(2).mean(0)
    near(found.risk_coverage().risk, risk_coverage(-mean.max(1).values, wrong).risk, 1e-12)
    near(found.risk_coverage("entropy").risk, risk_coverage(entropy, wrong).risk, 1e-12)
    near(found.risk_coverage("mutual-information").risk, risk_coverage(disagreement, wrong).risk, 1e-12)
    assert found.aurc == found.risk_coverage().area
    assert len({found.risk_coverage(s).area for s in ("max-probability", "mutual-information")}) == 2


# linnet.ood


def logistic(x: Tensor) -> Tensor:
    return torch.cat([-x, x], 1).softmax(1)


def draws(x: Tensor) -> Tensor:
    """Three samples that agree far to the right and contradict each other far to the left."""
    return torch.stack([logistic(torch.where(x < 0, slope * x, x)) for slope in (-3.0, 1.0, 2.0)])


def test_scores_of_ood() -> None:
    inside, outside = 3 + real(40, 1), real(30, 1, seed=1) - 1
    found = ood(draws, inside, outside)
    values = {}
    for name, x in (("inside", inside), ("outside", outside)):
        p = draws(x)
        entropy = torch.special.entr(p.mean(0)).sum(1)
        disagreement = (entropy - torch.special.entr(p).sum(2).mean(0)).clamp_min(0)
        values[name] = {
            "entropy": entropy,
            "max-probability": -p.mean(0).max(1).values,
            "mutual-information": disagreement,
        }
    assert list(found.detections) == ["entropy", "max-probability", "mutual-information"]
    for score, detection in found.detections.items():
        near(detection.inside, values["inside"][score], 1e-12)
        near(detection.outside, values["outside"][score], 1e-12)
        chosen = ood(draws, inside, outside, score=score)
        assert (chosen.auroc, chosen.aupr, chosen.fpr95) == (detection.auroc, detection.aupr, detection.fpr95)
    assert found.auroc != found.detections["mutual-information"].auroc
    assert found.entropy_inside == pytest.approx(values["inside"]["entropy"].mean().item())
    assert found.entropy_outside == pytest.approx(values["outside"]["entropy"].mean().item())


def test_any_data_for_ood() -> None:
    inside, outside = 2 + real(20, 1), real(15, 1, seed=1)
    expected = ood(logistic, inside, outside).to_dict()
    text = torch.full((20,), 77)  # labels that are no class of the network are not looked at
    loader = DataLoader(TensorDataset(outside, outside), batch_size=4)
    assert ood(logistic, (inside, text), loader, batch_size=3).to_dict() == expected
    assert json.loads(json.dumps(expected, allow_nan=False)) == expected
    assert list(expected["detections"]) == ["entropy", "max-probability"]


def test_bad_input_of_ood() -> None:
    x = real(4, 3)
    weight = real(3, 2)

    def predict(x: Tensor) -> Tensor:
        return (x @ weight).softmax(-1)

    refused(InputError, lambda: ood(predict, x, real(4, 5)), "outside", "(4, 5)")
    refused(InputError, lambda: ood(predict, x, x, score="energy"), "score='energy'")
    refused(InputError, lambda: ood(predict, x, x, score="mutual-information"), "samples")
    refused(InputError, lambda: ood(lambda x: x @ weight, x, x), "inside", "softmax")
    refused(DataError, lambda: ood(predict, x, x[:0]), "outside", "empty")
    refused(DataError, lambda: ood(predict, x / 0, x), "inside", "NaN")
    refused(
        InputError, lambda: ood(lambda x: torch.eye(len(x)), x, real(3, 3)), "4 classes inside", "3 outside"
    )
    with pytest.raises(InputError, match="shapes cannot be multiplied"):
        ood(predict, real(4, 5), x)
