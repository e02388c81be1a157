"""What is said at the top of a page, the numbers there with their errors, and which score chose the ridge."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from linnet.app.runs.results import score_table
from linnet.report.html import render
from linnet.report.numbers import calibration_and_error, measured_share, share_error
from linnet.report.records import Comparison, Content, Notes, RidgeChoice
from linnet.report.verdict import key_numbers, loo_name, ridge_choice, summary, trust
from tests.report.material import digits_run, regression_run

RNG = np.random.default_rng(0)


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
        run = Content("x", ("a", "b"), scores=(row,), count=count)
        (key,) = key_numbers(run)
        assert key.value == measured_share(share, error)
        assert score_table([row], count)[1].endswith(f"{100 * share:.1f} ± {100 * error:.1f} %")


@pytest.mark.parametrize(
    ("confidence", "right", "says"),
    [(0.95, 0.6, "too high"), (0.5, 0.9, "too low"), (0.8, 0.8, "well calibrated")],
)
def test_trust_follows_the_calibration(confidence: float, right: float, says: str) -> None:
    part = Comparison("fit", confidence=np.full(500, confidence), losses=1.0 - (np.arange(500) < 500 * right))
    assert says in trust(Content("x", scores=(part,)))


def test_few_predictions_are_not_called_calibrated() -> None:
    part = Comparison("fit", confidence=np.full(32, 0.75), losses=1.0 - (np.arange(32) < 24))
    assert "too few" in trust(Content("x", scores=(part,)))


def test_uneven_probabilities_are_named() -> None:
    confidence = np.repeat([0.95, 0.55], 500)
    correct = np.concatenate([np.arange(500) < 375, np.arange(500) < 375])  # 75 % each
    part = Comparison("fit", confidence=confidence, losses=1.0 - correct)
    assert "not one by one" in trust(Content("x", scores=(part,)))


def test_the_error_of_the_calibration_error_is_that_of_repeated_samples() -> None:
    def draw() -> tuple[float, float]:
        confidence = RNG.uniform(0.5, 1, 600)
        return calibration_and_error(confidence, RNG.uniform(size=600) < confidence - 0.15)

    errors, spreads = np.array([draw() for _ in range(300)]).T
    assert errors.mean() == pytest.approx(0.15, abs=0.01)
    assert spreads.mean() == pytest.approx(errors.std(), rel=0.15)


def test_three_numbers_with_their_errors() -> None:
    for run in (digits_run(), regression_run()):
        found = key_numbers(run)
        assert len(found) == 3
        assert all("±" in number.value for number in found)
    rmse = key_numbers(regression_run())[0]
    assert rmse.note == "in the unit of the target"


def test_a_headline_takes_the_place_of_the_verdict() -> None:
    assert summary(replace(digits_run(), notes=Notes(("We are done.",)))) == ["We are done."]


CHOSEN = {
    "loo": "It was chosen by leave-one-out",
    "gcv": "It was chosen by generalized cross-validation",
    "evidence": "It was chosen by the evidence",
    "validation": "It was chosen by the loss on validation data",
    "given": "It was set by the user",
}


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
@pytest.mark.parametrize("criterion", CHOSEN)
def test_one_criterion_is_named(criterion: str, loss: str) -> None:
    text = ridge_choice(RidgeChoice(criterion, loss))
    assert text.startswith(CHOSEN[criterion])
    assert text.count("chosen by") == int(criterion != "given")
    assert ("was not used for the choice" in text) == (criterion != "loo")
    assert ("Newton step" in text) == (loss == "cross-entropy")
    assert "without training again" not in text or loss == "squared"


def test_a_cross_fitted_head() -> None:
    squared, softmax = (RidgeChoice("loo", loss, crossed=True) for loss in ("squared", "cross-entropy"))
    for choice in (squared, softmax):
        assert "smallest held-out" in ridge_choice(choice)
        assert "by leave-one-out" not in ridge_choice(choice)
    assert "curve shown is for a fixed head" in ridge_choice(squared)
    assert (loo_name(squared), loo_name(softmax)) == ("Leave-one-out error", "Held-out log loss")
    assert loo_name(RidgeChoice("evidence", "cross-entropy")) == "Leave-one-out log loss"


@pytest.mark.parametrize("criterion", [None, "evidence", "given"])
@pytest.mark.thinned(2)
def test_on_the_page(criterion: str | None) -> None:
    run = digits_run()
    choice = None if criterion is None else RidgeChoice(criterion)
    page = render(replace(run, fit=replace(run.fit, ridge=choice)))
    section = re.search(r'<section id="ridge".*?</section>', page, re.DOTALL)
    assert section is not None
    heading = "The ridge beside others" if criterion == "given" else "How the ridge was chosen"
    assert section[0].count(heading) == 1
    assert page.count(heading) == 2  # in the list of sections too
    said = [name for name, text in CHOSEN.items() if text in section[0]]
    assert said == ([] if criterion is None else [criterion])
