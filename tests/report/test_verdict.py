"""The verdict says what the test samples say, and no more than their number allows."""

from __future__ import annotations

from dataclasses import replace
from math import comb

import numpy as np
import pytest

from linnet.report.numbers import calibration_and_error, calibration_by_chance
from linnet.report.records import (
    Comparison,
    Content,
    HeldOutSet,
    Notes,
    Samples,
    TrainingSet,
)
from linnet.report.verdict import TRY, gain, paired, verdict
from tests.report.material import regression_run

RNG = np.random.default_rng(0)


def scored(classes: int, right: np.ndarray, labels: np.ndarray | None = None, quick: str = "") -> Content:
    """A fit of balanced training samples with some of its answers right."""
    labels = np.arange(len(right)) % classes if labels is None else labels
    probs = np.eye(classes)[np.where(right, labels, (labels + 1) % classes)]
    row = Comparison("linear fit", accuracy=float(right.mean()), losses=1.0 - right)
    train = TrainingSet(Samples(labels=np.repeat(np.arange(classes), 5)))
    return Content("x", tuple(map(str, range(classes))), Notes(quick=quick), (row,), train=train,
               test=HeldOutSet(Samples(labels=labels), probs))  # fmt: skip


def beside(own: np.ndarray, other: np.ndarray, name: str = "linear probe") -> Content:
    """A fit and another method on the same samples."""
    methods = (("linear fit", own), (name, other))
    rows = (Comparison(method, float(right.mean()), losses=1.0 - right) for method, right in methods)
    return replace(scored(4, own), scores=tuple(rows))


def answers(classes: int, count: int, accuracy: float) -> dict[str, float]:
    """The exact probability of each answer, for test samples of balanced classes."""
    found: dict[str, float] = {}
    for hits in range(count + 1):
        answer = verdict(scored(classes, np.arange(count) < hits)).answer
        chance = comb(count, hits) * accuracy**hits * (1 - accuracy) ** (count - hits)
        found[answer] = found.get(answer, 0.0) + chance
    return found


@pytest.mark.parametrize(("classes", "accuracy"), [(12, 0.28), (20, 0.22), (10, 0.3), (5, 0.45)])
def test_a_useful_fit_is_not_refused_for_want_of_test_samples(classes: int, accuracy: float) -> None:
    few, more = answers(classes, 32, accuracy), answers(classes, 200, accuracy)
    assert few.get("do not use", 0.0) < 0.005
    assert few["use"] + few["unclear"] > 0.99
    assert more["use"] > 0.98


@pytest.mark.parametrize("classes", [2, 5, 12])
def test_a_useless_fit_is_refused_where_that_can_be_seen(classes: int) -> None:
    few, more = answers(classes, 32, 1 / classes), answers(classes, 800, 1 / classes)
    assert few.get("use", 0.0) + few.get("weak", 0.0) < 0.05
    assert more["do not use"] > 0.75
    assert more.get("use", 0.0) + more.get("weak", 0.0) < 0.03


def test_an_untrained_network_is_told() -> None:
    found = verdict(scored(10, np.arange(2000) < 314))
    assert found.answer == "weak"
    assert "trained weights" in " ".join(found.sentences)
    assert verdict(scored(10, np.arange(2000) < 900)).answer == "use"


def test_too_few_test_samples_are_named_with_how_many_would_do() -> None:
    found = verdict(scored(12, np.arange(32) % 6 == 0))
    assert found.answer == "unclear"
    assert "32 test samples are too few" in found.sentences[0]
    needed = int("".join(c for c in found.sentences[1] if c.isdigit()))
    right = np.arange(needed) % 6 == 0
    assert verdict(scored(12, right, np.arange(needed) // 6 % 12)).answer == "use"


def test_the_constant_is_that_of_the_training_samples() -> None:
    labels = np.repeat([0, 1, 2, 3], [70, 10, 10, 10])  # more than half of the test samples are of one class
    run = scored(4, np.arange(100) >= 45, labels)
    assert verdict(run).answer == "use"
    assert run.train is not None
    uneven = replace(run, train=TrainingSet(Samples(labels=np.repeat([0, 1, 2, 3], [9, 2, 2, 2]))))
    assert verdict(uneven).answer == "do not use"


def test_a_quick_run_refuses_nothing() -> None:
    for count in (32, 2000):
        found = verdict(scored(10, np.arange(count) < count // 10, quick="Quick run."))
        assert found.answer == "unclear"
        assert "not use" not in " ".join(found.sentences)
    assert verdict(scored(10, np.arange(2000) < 200)).answer == "do not use"


def test_a_quick_run_that_leaves_out_what_helps_says_so_first() -> None:
    run = scored(4, np.arange(100) < 65, quick="Quick run.")
    told = f"{TRY}: on 5 of 40 images per class the lower layers add 16.7 ± 4.9 points."
    found = verdict(replace(run, fit=replace(run.fit, verdict=told)))
    assert (found.answer, found.sentences[0]) == ("unclear", told)
    assert "Use" not in " ".join(found.sentences)


@pytest.mark.parametrize(
    ("own", "other", "beginning", "has"),
    [
        (90, 70, "Use the linear fit: 90.0", "20.0 ± 2.0 points ahead of the linear probe"),
        (70, 90, "Use the linear probe instead: 90.0", "ahead of the linear fit"),
        (
            80,
            79.75,
            "The linear fit and the linear probe cannot",
            "too few to tell the linear fit from the linear probe",
        ),
    ],
)
def test_the_better_of_two_is_named_where_it_can_be_told(
    own: float, other: float, beginning: str, has: str
) -> None:
    order = np.arange(400) / 4  # the worse one misses more of the same
    found = verdict(beside(order < own, order < other))
    assert found.sentences[0].replace("\xa0", " ").startswith(beginning)
    assert has in " ".join(found.sentences).replace("\xa0", " ")
    assert "than" not in verdict(beside(order < 90, order < 70, "plain fine-tuning")).sentences[0]


def test_differences_are_judged_on_the_same_samples() -> None:
    order = np.arange(400) / 4
    run = beside(order < 90, order < 88)
    alone = tuple(replace(row, losses=None) for row in run.scores)
    found, apart = gain(run), gain(replace(run, scores=alone, count=400, test=None))
    assert found is not None
    assert apart is not None
    assert found.value == pytest.approx(apart.value) == pytest.approx(0.02)
    assert found.clear
    assert not apart.clear  # unpaired, the samples that both miss blur the difference


def test_pairs_are_judged_as_the_exact_test_of_mcnemar_does() -> None:
    same, level = [], []
    for count in range(1, 61):
        chances = [comb(count, gains) / 2**count for gains in range(count + 1)]
        clear = []
        for gains in range(count + 1):
            change = np.repeat([1.0, -1.0, 0.0], [gains, count - gains, 40])
            clear.append(paired(change).clear)
            tail = 2 * sum(chances[: min(gains, count - gains) + 1])
            same.append(clear[-1] == (tail < 0.05))
        level.append(sum(chance for chance, is_clear in zip(chances, clear, strict=True) if is_clear))
    assert np.mean(same) > 0.98
    assert max(level) < 0.065
    assert not paired(np.zeros(50)).clear


def test_the_verdict_of_a_regression() -> None:
    run = regression_run()
    assert verdict(run).sentences[0].startswith("Use the linear fit: its root mean squared error on")
    noise = RNG.normal(size=400)
    train = TrainingSet(Samples(labels=np.array([-1.0, 1.0])))

    def of(mean: np.ndarray) -> str:
        test = HeldOutSet(Samples(labels=noise[: len(mean)]), mean=mean)
        losses = (mean - noise[: len(mean)]) ** 2
        scores = (Comparison("linear fit", rmse=1.0, losses=losses),)
        return verdict(Content("x", scores=scores, test=test, train=train)).answer

    assert of(noise[::-1].copy()) == "do not use"
    assert of(0.9 * noise) == "use"
    assert of(0.02 * noise) == "weak"
    assert of(0.9 * noise[:4]) == "unclear"
    assert verdict(Content("x")).sentences == ()


@pytest.mark.parametrize("count", [18, 45, 300])
def test_perfect_probabilities_are_seldom_called_wrong(count: int) -> None:
    generator, called = np.random.default_rng(0), 0
    for _ in range(60):
        confidence = generator.uniform(0.5, 1.0, count)
        correct = (generator.random(count) < confidence).astype(float)
        error = calibration_and_error(confidence, correct)[0]
        mean, high = calibration_by_chance(confidence)
        assert mean < high
        called += error > high
    assert called <= 8  # 3 of 60 are expected
    overconfident = (generator.random(count) < 0.6).astype(float)
    sure = np.full(count, 0.97)
    assert calibration_and_error(sure, overconfident)[0] > calibration_by_chance(sure)[1]
