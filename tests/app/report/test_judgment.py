"""The verdict says what the numbers say, and no more than their errors allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from linnet.app.report import Comparison, HeldOutSet, Notes, Reliability, Run, Samples, Scores
from linnet.app.report.judgment import gain, key_numbers, share_error, summary, trust, verdict
from linnet.app.report.measures import calibration_and_error
from linnet.app.report.wording import measured_share
from linnet.app.runs.summary import score_table
from tests.app.report.material import digits_run, regression_run

RNG = np.random.default_rng(0)


def classified(own: float, other: float, count: int = 400, name: str = "linear probe") -> Run:
    """Two methods of the given accuracy on the same samples, where the worse one misses more of the same."""
    labels = np.arange(count) % 4
    parts = []
    for method, share in (("linear fit", own), (name, other)):
        parts.append(Reliability(method, np.full(count, share), np.arange(count) < share * count))
    probs = np.eye(4)[np.where(parts[0].correct, labels, (labels + 1) % 4)]
    rows = (Comparison("linear fit", accuracy=own), Comparison(name, accuracy=other))
    return Run("x", ("a", "b", "c", "d"), scores=Scores(rows, tuple(parts)),
               test=HeldOutSet(Samples(labels=labels), probs))  # fmt: skip


@pytest.mark.parametrize(
    ("own", "other", "beginning", "has"),
    [
        (0.9, 0.7, "Use the linear fit: it predicts 90.0", "20.0 ± 2.0 points more than the linear probe."),
        (0.7, 0.9, "Use the linear probe instead: it predicts 90.0", "more than the linear fit."),
        (0.8, 0.7975, "Use either the linear fit or the linear probe", "difference 0.3 ± 0.2 points"),
        (0.25, 0.2, "Do not use the linear fit", "no better than answering the most frequent class"),
    ],
)
def test_the_verdict_follows_the_scores(own: float, other: float, beginning: str, has: str) -> None:
    text = verdict(classified(own, other)).replace("\xa0", " ")
    assert text.startswith(beginning)
    assert has in text


@pytest.mark.parametrize("count", [1, 8, 24, 2000])
def test_the_error_of_an_accuracy_is_never_zero_and_the_same_everywhere(count: int) -> None:
    for right in {0, count // 3, count}:
        share = right / count
        error = share_error(share, count)
        assert error is not None
        assert error >= 0.5 / (count + 4)  # half a sample of Wilson's, which adds about four
        if 0 < right < count == 2000:
            assert error == pytest.approx((share * (1 - share) / count) ** 0.5, rel=0.01)
        row = Comparison("linear fit", accuracy=share)
        run = Run("x", ("a", "b"), scores=Scores((row,), tested=count))
        (key,) = key_numbers(run)
        assert key.value == measured_share(share, error)
        assert score_table([row], count)[1].endswith(f"{100 * share:.1f} ± {100 * error:.1f} %")


def test_differences_are_judged_on_the_same_samples() -> None:
    run = classified(0.9, 0.88)
    paired = gain(run)
    apart = gain(replace(run, scores=replace(run.scores, reliability=(), tested=400)))
    assert paired is not None
    assert apart is not None
    assert paired.value == pytest.approx(apart.value) == pytest.approx(0.02)
    assert paired.clear
    assert not apart.clear  # unpaired, the samples that both miss blur the difference


def test_the_verdict_of_a_regression() -> None:
    run = regression_run()
    assert verdict(run).startswith("Use the linear fit: its root mean squared error on the test samples is")
    noise = RNG.normal(size=200)
    test = HeldOutSet(Samples(labels=noise), mean=noise[::-1].copy())
    useless = Run("x", scores=Scores((Comparison("linear fit", rmse=1.4),)), test=test)
    assert "no better than answering the mean every time" in verdict(useless)
    assert verdict(Run("x")) == ""


def test_a_method_that_is_a_gerund_has_no_article() -> None:
    assert "than plain fine-tuning." in verdict(classified(0.9, 0.7, name="plain fine-tuning"))


@pytest.mark.parametrize(
    ("confidence", "right", "says"),
    [(0.95, 0.6, "too high"), (0.5, 0.9, "too low"), (0.8, 0.8, "can be taken as they are")],
)
def test_trust_follows_the_calibration(confidence: float, right: float, says: str) -> None:
    part = Reliability("fit", np.full(500, confidence), np.arange(500) < 500 * right)
    assert says in trust(Run("x", scores=Scores(reliability=(part,))))


def test_uneven_probabilities_are_named() -> None:
    confidence = np.repeat([0.95, 0.55], 500)
    correct = np.concatenate([np.arange(500) < 375, np.arange(500) < 375])  # 75 % each
    part = Reliability("fit", confidence, correct)
    assert "not one by one" in trust(Run("x", scores=Scores(reliability=(part,))))


def test_the_error_of_the_calibration_error_is_that_of_repeated_samples() -> None:
    def draw() -> tuple[float, float]:
        confidence = RNG.uniform(0.5, 1, 600)
        return calibration_and_error(confidence, RNG.uniform(size=600) < confidence - 0.15)

    errors, spreads = np.array([draw() for _ in range(300)]).T
    assert errors.mean() == pytest.approx(0.15, abs=0.01)
    assert spreads.mean() == pytest.approx(errors.std(), rel=0.15)


def test_three_numbers_with_their_errors() -> None:
    for run in (digits_run(), regression_run(), classified(0.9, 0.7)):
        found = key_numbers(run)
        assert len(found) == 3
        assert all("±" in number.value for number in found)
    rmse = key_numbers(regression_run())[0]
    assert rmse.note == "in the unit of the target"


def test_a_headline_takes_the_place_of_the_verdict() -> None:
    assert summary(replace(digits_run(), notes=Notes(("We are done.",)))) == ["We are done."]
