"""Scores of class probabilities: against their definitions and scikit-learn, and what must not matter."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from linnet.errors import InputError
from linnet.metrics.evaluate import batches_of, evaluate
from linnet.metrics.reports import Report
from linnet.plots.measures import calibration_error, equal_mass_bins, reliability_bins
from tests.fitting.problems import near, peak_bytes, real
from tests.refusals import refused

metrics = pytest.importorskip("sklearn.metrics")


def probabilities(n: int = 60, c: int = 4, seed: int = 0, sharp: float = 2.0) -> Tensor:
    return (sharp * real(n, c, seed=seed)).softmax(1)


def labels(n: int = 60, c: int = 4, seed: int = 1) -> Tensor:
    return torch.randint(c, (n,), generator=torch.Generator().manual_seed(seed))


def drawn(p: Tensor) -> Tensor:
    """Labels that the probabilities are right about."""
    return torch.multinomial(p, 1, generator=torch.Generator().manual_seed(2))[:, 0]


def flat(found: Report) -> dict[str, float]:
    """All numbers of a report."""
    values = found.to_dict()
    errors = {f"stderr of {name}": value for name, value in values.pop("stderr").items()}
    return {name: math.inf if value is None else value for name, value in {**values, **errors}.items()}


def report(p: Tensor, y: Tensor, **options: Any) -> Report:
    """Inputs are the places of the examples, so that predict only looks its answers up."""
    x = torch.arange(len(y))
    found = evaluate(lambda x: p[..., x, :], (x, y), **options)
    assert isinstance(found, Report)
    return found


def ece_by_definition(confidence: Tensor, correct: Tensor, bins: int) -> float:
    """Σ_b n_b / N |acc_b − conf_b| over ((b − 1)/B, b/B], one example at a time."""
    inside: dict[int, list[tuple[float, float]]] = {}
    for c, right in zip(confidence.tolist(), correct.tolist(), strict=True):
        inside.setdefault(max(math.ceil(c * bins), 1), []).append((c, float(right)))
    n = len(confidence)
    return sum(abs(sum(r - c for c, r in members)) / n for members in inside.values())


# Against other definitions


@pytest.mark.parametrize("c", [2, 3, 10])
def test_agrees_with_scikit_learn(c: int) -> None:
    p, y = probabilities(c=c), labels(c=c)
    found = report(p, y)
    assert found.accuracy == pytest.approx(metrics.accuracy_score(y, p.argmax(1)), abs=1e-12)
    assert found.nll == pytest.approx(metrics.log_loss(y, p, labels=list(range(c))), rel=1e-12)
    one_hot = np.eye(c)[y.numpy()]
    assert found.brier == pytest.approx(c * metrics.mean_squared_error(one_hot, p.numpy()), rel=1e-12)


@pytest.mark.parametrize("bins", [1, 7, 15, 40])
def test_calibration_error_by_definition(bins: int) -> None:
    p = probabilities(n=200)
    y = drawn(p)
    confidence, predicted = p.max(1)
    assert report(p, y, bins=bins).ece == pytest.approx(
        ece_by_definition(confidence, predicted == y, bins), abs=1e-12
    )


def test_adaptive_calibration_error_by_definition() -> None:
    """Equal mass: the sorted confidences cut into runs whose lengths differ by one at most."""
    p = probabilities(n=52)
    y = drawn(p)
    confidence, predicted = p.max(1)
    order = np.argsort(confidence.numpy())
    found = report(p, y, bins=7)
    counts = [one.count for one in found.calibration(adaptive=True)]
    assert sum(counts) == 52
    assert set(counts) == {7, 8}
    runs = np.split(order, np.cumsum(counts)[:-1])
    gap = (predicted == y).double().numpy() - confidence.numpy()
    assert found.adaptive_ece == pytest.approx(sum(abs(gap[run].sum()) for run in runs) / 52, abs=1e-12)


def test_the_last_bin_counts() -> None:
    """A network that is right 997 times of 1000 and always certain: a dropped last bin would hide or invent
    an error, as digitizing to 1, ..., B and then looping over 0, ..., B − 1 does."""
    p, y = torch.zeros(1000, 10), torch.zeros(1000, dtype=torch.long)
    p[:, 0] = 1.0
    y[:3] = 1
    found = report(p, y, bins=100)
    assert found.calibration()[-1].count == 1000
    assert found.ece == pytest.approx(0.003, abs=1e-12)
    assert found.adaptive_ece == pytest.approx(0.003, abs=1e-12)


def test_bins_are_closed_on_the_right() -> None:
    bins = reliability_bins(np.array([0.0, 0.25, 0.26, 0.5, 0.75, 1.0]), np.ones(6), bins=4)
    assert [one.count for one in bins] == [2, 2, 1, 1]


def test_ties_do_not_depend_on_the_order() -> None:
    """Ten predictions of one confidence, half of them right: the order must not sort them into bins."""
    confidence, correct = np.full(10, 0.5), np.repeat([1, 0], 5)
    for right in (correct, correct[::-1]):
        assert calibration_error(equal_mass_bins(confidence, right, bins=2)) == 0.0


# Entropy


def test_entropy_by_definition() -> None:
    p, y = probabilities(), labels()
    entropy = -(p * p.log()).sum(1)
    found = report(p, y)
    near(found.examples.entropy, entropy, 1e-12)
    right = p.argmax(1) == y
    assert found.entropy == pytest.approx(entropy.mean().item(), rel=1e-12)
    assert found.entropy_correct == pytest.approx(entropy[right].mean().item(), rel=1e-12)
    assert found.entropy_wrong == pytest.approx(entropy[~right].mean().item(), rel=1e-12)
    assert found.expected_entropy is None
    assert found.mutual_information is None


def test_entropy_splits_over_samples() -> None:
    p, y = torch.stack([probabilities(seed=s) for s in range(5)]), labels()
    found = report(p, y)
    mean = p.mean(0)
    expected = -(p * p.log()).sum(2).mean(0)
    near(found.examples.entropy, -(mean * mean.log()).sum(1), 1e-12)
    assert found.expected_entropy == pytest.approx(expected.mean().item(), rel=1e-12)
    assert found.mutual_information == pytest.approx(found.entropy - expected.mean().item(), rel=1e-10)
    assert found.nll == pytest.approx(report(mean, y).nll, rel=1e-12)
    assert "mutual_information" in str(found)


def test_the_two_kinds_of_uncertainty() -> None:
    """Certain samples that contradict each other, and samples that agree on not knowing."""
    y = torch.tensor([0])
    contradicting = report(torch.eye(2).reshape(2, 1, 2), y)
    agreeing = report(torch.full((3, 1, 2), 0.5), y)
    assert contradicting.expected_entropy == 0.0
    assert contradicting.mutual_information == pytest.approx(math.log(2))
    assert agreeing.expected_entropy == pytest.approx(math.log(2))
    assert agreeing.mutual_information == 0.0


# Errors of the means


def test_standard_errors_of_means() -> None:
    p, y = probabilities(), labels()
    found = report(p, y)
    a = found.accuracy
    assert found.stderr["accuracy"] == pytest.approx(math.sqrt(a * (1 - a) / 59), rel=1e-12)
    losses = -p[torch.arange(60), y].log()
    assert found.stderr["nll"] == pytest.approx(losses.std().item() / math.sqrt(60), rel=1e-12)
    assert set(found.stderr) == {"accuracy", "nll", "brier", "entropy"}
    assert report(p[:1], y[:1]).stderr["nll"] == math.inf


# What must not matter


@given(st.integers(1, 40), st.integers(2, 5), st.integers(0, 99), st.floats(0.1, 8), st.booleans())
def test_order_does_not_matter(n: int, c: int, seed: int, sharp: float, rounded: bool) -> None:
    p, y = probabilities(n, c, seed, sharp), labels(n, c, seed)
    if rounded:  # many ties
        p = torch.nn.functional.one_hot(p.argmax(1), c) * 0.5 + 0.5 / c
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert flat(report(p, y)) == pytest.approx(flat(report(p[order], y[order])), rel=1e-9, abs=1e-12)


@given(st.integers(1, 40), st.integers(2, 5), st.integers(0, 99), st.integers(1, 20))
def test_ranges(n: int, c: int, seed: int, bins: int) -> None:
    found = report(probabilities(n, c, seed), labels(n, c, seed), bins=bins)
    for score in (found.ece, found.adaptive_ece, found.accuracy, found.aurc, found.confidence):
        assert 0 <= score <= 1
    assert 0 <= found.entropy <= math.log(c)
    assert 0 <= found.brier <= 2
    assert abs(found.accuracy - found.confidence) <= found.ece + 1e-12  # Jensen
    assert found.nll >= 0


@given(st.integers(1, 30), st.integers(2, 5), st.integers(0, 99))
def test_the_perfect_predictor(n: int, c: int, seed: int) -> None:
    y = labels(n, c, seed)
    found = report(torch.eye(c)[y], y)
    assert found.accuracy == 1
    assert [found.ece, found.adaptive_ece, found.nll, found.brier, found.aurc, found.entropy] == [0] * 6
    assert math.isnan(found.entropy_wrong)


@pytest.mark.parametrize("batch_size", [7, 1000])
def test_batches_do_not_matter(batch_size: int) -> None:
    p, y = probabilities(), labels()
    sizes = []

    def predict(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return p[x]

    found = evaluate(predict, (torch.arange(60), y), batch_size=batch_size)
    assert found.to_dict() == report(p, y).to_dict()
    assert max(sizes) == min(batch_size, 60)
    assert sum(sizes) == 60


def test_memory_holds_a_few_numbers_an_example() -> None:
    """All probabilities at once would be 80 MB in float64, one batch of their samples 1 MB."""
    x, y = torch.zeros(5_000, 1), torch.zeros(5_000, dtype=torch.long)

    def predict(x: Tensor) -> Tensor:
        return torch.full((10, len(x), 200), 1 / 200)

    assert peak_bytes(lambda: evaluate(predict, (x, y), batch_size=100)) < 4e6


def test_any_data_and_any_answer() -> None:
    model = torch.nn.Linear(3, 4).double()
    x, y = real(30, 3), labels(30)

    def predict(x: Tensor) -> Tensor:
        return model(x).softmax(1)

    expected = flat(evaluate(predict, (x, y)))  # type: ignore[arg-type]
    data = TensorDataset(x, y)
    for found in (
        evaluate(predict, data),
        evaluate(predict, DataLoader(data, batch_size=8)),
        evaluate(predict, DataLoader(data, batch_size=8), batch_size=3),
        evaluate(predict, (x, y[:, None])),
        evaluate(lambda x: predict(x).numpy(), (x, y)),
        evaluate(lambda x: SimpleNamespace(probs=predict(x)), (x, y)),
    ):
        # products of other batch sizes may differ in the last digit
        assert flat(found) == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_predictions_are_made_without_a_graph() -> None:
    seen = []

    def predict(x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return torch.full((len(x), 2), 0.5)

    evaluate(predict, (torch.zeros(3, 1), torch.zeros(3, dtype=torch.long)))
    assert seen == [False]


def test_the_device_is_where_inputs_go() -> None:
    assert batches_of(torch.softmax, torch.zeros(1, 1), None, "cpu").device == torch.device("cpu")
    refused(InputError, lambda: batches_of(torch.softmax, torch.zeros(1, 1), None, "meta"), "device='meta'")
    assert batches_of(torch.softmax, torch.zeros(1, 1), None, None).device is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_probabilities_are_accepted(dtype: torch.dtype) -> None:
    p, y = probabilities(n=20, c=1000), labels(20, 1000)
    assert report(p.to(dtype), y).nll == pytest.approx(report(p, y).nll, rel=0.01)


def test_a_probability_of_zero_is_the_smallest_number() -> None:
    y = torch.tensor([1])
    for dtype, nats in ((torch.float16, 24), (torch.float32, 149), (torch.float64, 1074)):
        found = report(torch.tensor([[1.0, 0.0]], dtype=dtype), y)
        assert found.nll == pytest.approx(nats * math.log(2), rel=1e-3)


# The report


def test_the_report_is_json() -> None:
    perfect = report(torch.eye(2)[[0, 1]], torch.tensor([0, 1]))
    values = json.loads(json.dumps(perfect.to_dict(), allow_nan=False))
    assert values["entropy_wrong"] is None
    assert values["mutual_information"] is None
    assert values["n"] == 2
    assert values["stderr"]["accuracy"] == 0
    assert repr(perfect) == str(perfect)


def test_questions_that_cannot_be_answered() -> None:
    found = report(probabilities(), labels())
    refused(InputError, lambda: found.risk_coverage("mutual-information"), "samples")
    refused(InputError, lambda: found.risk_coverage("gut feeling"), "score='gut feeling'")
