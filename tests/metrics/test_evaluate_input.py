"""Invalid predictions and data in linnet.evaluate, and real targets."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

from linnet.errors import DataError, InputError
from linnet.metrics.evaluate import class_probabilities, evaluate
from linnet.metrics.reports import RegressionReport, Report, join, judge
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.noise import Noise
from tests.fitting.problems import near, real
from tests.refusals import refused

X, Y = real(4, 3), torch.tensor([0, 1, 2, 1])
P = real(4, 3, seed=1).softmax(1)


def refused_answer(answer: Any, *words: str, y: Tensor = Y) -> None:
    refused(InputError, lambda: evaluate(lambda x: answer, (X, y)), *words)


# Answers that are no probabilities


def test_logits() -> None:
    refused_answer(real(4, 3), "logits", "softmax(-1)", "sums to")
    refused_answer(2 * P, "logits")
    refused_answer(P.log(), "log-probabilities", "outputs.exp()")
    shifted = torch.tensor([[1.5, -0.5, 0.0]]).expand(4, 3)
    refused_answer(shifted, "smallest value is -0.5")


def test_one_bad_row_is_found_and_named() -> None:
    p = P.clone()
    p[2] *= 1.01
    refused_answer(p, "example 2 of its batch", "sums to 1.01")
    samples = torch.stack([P, p])
    refused_answer(samples, "example 2 of its batch")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none(value: float) -> None:
    p = P.clone()
    p[3, 1] = value
    refused_answer(p, "sums to", "example 3")


def test_wrong_shapes() -> None:
    refused_answer(P.argmax(1), "shape (4,)", "not the class itself")
    refused_answer(P.T, "shape (3, 4)", "4 example(s)")
    refused_answer(P[:, None], "shape (4, 1, 3)")
    refused_answer(torch.zeros(0, 4, 3), "(0, 4, 3)")
    refused_answer(P[:, :1], "torch.stack([1 - p, p], -1)")
    refused_answer("certainly a cat", "predict returned str")
    refused_answer(None, "predict returned NoneType")


def test_classes_that_change() -> None:
    answers = iter([torch.full((2, 2), 0.5), torch.full((2, 4), 0.25)])
    labels = torch.zeros(4, dtype=torch.long)
    call = lambda: evaluate(lambda x: next(answers), (X, labels), batch_size=2)  # noqa: E731
    refused(InputError, call, "4 classes after 2")


def test_hard_predictions_are_probabilities() -> None:
    found = evaluate(lambda x: torch.eye(3, dtype=torch.long)[Y], (X, Y))
    assert isinstance(found, Report)
    assert found.accuracy == 1


def test_samples_in_some_batches_only() -> None:
    parts = [judge(P, None), judge(P[None], None)]
    refused(InputError, lambda: join(parts), "samples of the probabilities")
    refused(InputError, lambda: join([judge(P, Y), judge(P, None)]), "labels")


@given(st.integers(1, 5), st.integers(2, 6), st.integers(0, 99))
def test_every_softmax_is_accepted(n: int, c: int, seed: int) -> None:
    p = (10 * real(n, c, seed=seed, dtype=torch.float32)).softmax(1)
    assert torch.equal(class_probabilities(p, n), p)


# Data


def test_wrong_labels() -> None:
    def error(y: Tensor, kind: type[Any] = InputError) -> str:
        return str(refused(kind, lambda: evaluate(lambda x: P[: len(x)], (X, y), batch_size=2)))

    assert "first 3 at index 2" in error(torch.tensor([0, 1, 3, 0]), DataError)
    assert "first -1 at index 0" in error(torch.tensor([-1, 1, 2, 0]), DataError)
    assert "y.argmax(1)" in error(torch.eye(3)[Y].long())
    assert "torch.bool" in error((Y > 0)[:, None])
    assert ".mean and .variance" in error(Y.float())


def test_wrong_data() -> None:
    def predict(x: Tensor) -> Tensor:
        return P[: len(x)]

    refused(DataError, lambda: evaluate(predict, (X[:0], Y[:0])), "empty")
    refused(DataError, lambda: evaluate(predict, (X, Y[:2])), "4 inputs")
    refused(DataError, lambda: evaluate(predict, (X / 0, Y)), "NaN")
    refused(InputError, lambda: evaluate(predict, X), "no targets")
    mixed = [(X[:2], Y[:2]), (X[2:], Y[2:].float())]
    answers = iter([P[:2], Normal(torch.zeros(2), 1.0)])
    loader = DataLoader(mixed, batch_size=None)  # type: ignore[arg-type]
    refused(InputError, lambda: evaluate(lambda x: next(answers), loader), "mix")


def test_scores_without_labels() -> None:
    found = Report(judge(P, None), 3)
    refused(InputError, lambda: found.accuracy, "no labels")
    refused(InputError, lambda: found.nll, "no labels")
    assert found.entropy > 0
    assert set(found.to_dict()) == {
        "n", "classes", "bins", "entropy", "expected_entropy", "mutual_information", "confidence", "stderr",
    }  # fmt: skip
    assert "accuracy" not in str(found)


# Real targets


def regression(n: int = 50, d: int = 2) -> tuple[RegressionReport, Tensor, Tensor, Tensor]:
    mean, std, t = real(n, d), 0.5 + real(n, d, seed=1).abs(), real(n, d, seed=2)
    found = evaluate(lambda x: Normal(mean[x], std[x]), (torch.arange(n), t), batch_size=7)
    assert isinstance(found, RegressionReport)
    return found, mean, std, t


def test_scores_of_a_regression() -> None:
    found, mean, std, t = regression()
    losses = -Normal(mean, std).log_prob(t)
    assert found.nll == pytest.approx(losses.mean().item(), rel=1e-12)
    assert found.rmse == pytest.approx((mean - t).square().mean().sqrt().item(), rel=1e-12)
    assert found.width == pytest.approx(std.mean().item(), rel=1e-12)
    assert found.stderr["nll"] == pytest.approx(losses.mean(1).std().item() / math.sqrt(50), rel=1e-12)
    squares = (mean - t).square().mean(1)
    expected = squares.std().item() / math.sqrt(50) / (2 * found.rmse)
    assert found.stderr["rmse"] == pytest.approx(expected, rel=1e-12)


def test_coverage_of_intervals() -> None:
    found, mean, std, t = regression()
    levels = [0.1, 0.5, 0.9, 0.99]
    normal = Normal(mean, std)
    inside = [
        ((t > normal.icdf(torch.tensor(0.5 - q / 2))) & (t < normal.icdf(torch.tensor(0.5 + q / 2))))
        for q in levels
    ]
    near(found.coverage(levels), torch.stack([i.double().mean() for i in inside]), 1e-12)
    assert found.coverage(0.5) == found.coverage(levels)[1]
    assert found.coverage() == found.coverage(0.95)


def test_coverage_is_the_level_for_the_truth(generator: torch.Generator) -> None:
    t = 3 * torch.randn(20_000, generator=generator)
    found = evaluate(lambda x: Normal(torch.zeros(len(x)), 3.0), (t, t))
    assert isinstance(found, RegressionReport)
    assert found.coverage(0.8).item() == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / 20_000))


def test_noise_is_added_once() -> None:
    """Predictive distributions of the network's outputs get the noise of the targets."""
    prediction = GaussianPredictive(torch.zeros(4, 1), torch.ones(4, 1, 1), Noise(3.0))
    data = (X, torch.ones(4))
    added, included = (evaluate(lambda x: prediction, data, noise=noise) for noise in ("add", "included"))
    assert isinstance(added, RegressionReport)
    assert isinstance(included, RegressionReport)
    assert added.width == 2
    assert included.width == 1
    assert evaluate(lambda x: prediction, data).to_dict() == added.to_dict()
    assert added.nll == pytest.approx(0.5 * math.log(2 * math.pi * 4) + 1 / 8, rel=1e-6)


def test_shapes_of_a_regression() -> None:
    t = real(4)
    answer = SimpleNamespace(mean=real(4, seed=1), variance=torch.ones(4))
    column = SimpleNamespace(mean=answer.mean[:, None], variance=answer.variance[:, None])
    first = evaluate(lambda x: answer, (X, t)).to_dict()
    assert evaluate(lambda x: column, (X, t)).to_dict() == first
    assert evaluate(lambda x: answer, (X, t[:, None])).to_dict() == first
    data = TensorDataset(X, t)
    assert evaluate(lambda x: answer, DataLoader(data, batch_size=4)).to_dict() == first
    assert json.loads(json.dumps(first, allow_nan=False)) == first
    assert first["outputs"] == 1


def test_exact_predictions_have_a_report() -> None:
    found = evaluate(lambda x: Normal(torch.zeros(1), 1.0), (X[:1], torch.zeros(1)))
    assert found.to_dict()["rmse"] == 0
    assert found.to_dict()["stderr"] == {"rmse": None, "nll": None}
    assert "rmse" in repr(found)


def test_wrong_answers_of_a_regression() -> None:
    t, zero, one = real(4), torch.zeros(4), torch.ones(4)

    def bad(mean: Any, variance: Any, *words: str) -> None:
        refused_answer(SimpleNamespace(mean=mean, variance=variance), *words, y=t)

    bad(zero, zero, "variance of 0", "noise")
    bad(zero, -one, "variance of -1")
    bad(zero, torch.ones(4, 2), ".mean of shape (4, 1)", "(4, 2)")
    bad(zero[:3], one[:3], "shape (3, 1)", "shape (4,)")
    bad(zero / 0, one, "NaN", "example 0")
    bad(torch.zeros(4, 2), torch.ones(4, 2), "y of shape (4,)", "(4, 2)")
    refused_answer(zero, "Tensor", ".mean and .variance", y=t)
    refused_answer(P.numpy(), "y.long()", y=t)
    answer = SimpleNamespace(mean=zero, variance=one)
    targets = torch.tensor([0.0, math.nan, 0.0, 0.0])
    refused(DataError, lambda: evaluate(lambda x: answer, (X, targets)), "y")
    found, *_ = regression()
    refused(InputError, lambda: found.coverage(1.0), "levels=1.0")
    refused(InputError, lambda: found.coverage([]), "levels=[]")
