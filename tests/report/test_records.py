"""Checks and JSON form of Run."""

import json
from typing import Any

import numpy as np
import pytest

from linnet.report.records import (
    Comparison,
    Content,
    FitRecord,
    HeldOutSet,
    KernelSpectrum,
    Samples,
)
from tests.report.material import digits_run, regression_run

PICTURES = np.zeros((3, 8, 8, 1), dtype=np.uint8)
LABELS = np.array([0, 1, 1])


def test_degrees_of_freedom_come_from_the_eigenvalues_unless_given() -> None:
    values = np.array([3.0, 1.0, -1e-9])
    assert KernelSpectrum(values, ridge=1.0).effective() == pytest.approx(0.75 + 0.5)
    assert KernelSpectrum(values, ridge=1.0, degrees_of_freedom=7.0).effective() == 7.0
    assert KernelSpectrum(values).effective() is None


def test_number_of_tested_samples_has_three_sources() -> None:
    scores = (Comparison("fit", losses=np.zeros(5)),)
    test = HeldOutSet(Samples(PICTURES))
    assert Content("x").tested() is None
    assert Content("x", scores=scores).tested() == 5
    assert Content("x", scores=scores, test=test).tested() == 3
    assert Content("x", count=9).tested() == 9


def test_loss_is_wrongness_or_absolute_error() -> None:
    probs = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    classified = HeldOutSet(Samples(labels=LABELS), probs)
    assert classified.correct() is not None
    np.testing.assert_array_equal(np.asarray(classified.loss()), [0.0, 1.0, 0.0])
    regressed = HeldOutSet(Samples(labels=np.array([1.0, 2.0])), mean=np.array([[1.5], [1.0]]))
    np.testing.assert_array_equal(np.asarray(regressed.loss()), [0.5, 1.0])
    assert HeldOutSet(Samples(PICTURES), np.ones((3, 2))).loss() is None


@pytest.mark.parametrize("build", [digits_run, regression_run, lambda: Content("bare")])
def test_to_dict_survives_strict_json(build: Any) -> None:
    numbers = build().to_dict()
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers


def test_to_dict_holds_what_the_page_shows() -> None:
    run = digits_run()
    numbers = run.to_dict()
    path, train, test = run.fit.path, run.train, run.test
    assert path is not None
    assert train is not None
    assert test is not None
    assert numbers["ridge_path"]["chosen"] == path.chosen
    assert len(numbers["ridge_path"]["loo_error"]) == len(path.ridges)
    assert numbers["reliability"][0]["calibration_error"] == pytest.approx(run.scores[0].ece)
    assert numbers["train"]["suspects"][0]["id"] == train.samples.name(train.suspects[0].sample)
    explained = numbers["test"]["explanations"][0]
    assert explained["id"] == test.samples.name(test.explanations[0].sample)
    assert explained["up"][0]["influence"] == test.explanations[0].up[0].influence
    assert "images" not in json.dumps(numbers)


def test_to_dict_turns_what_is_not_finite_into_none() -> None:
    run = Content("x", scores=(Comparison("fit", accuracy=float("nan")),),
              fit=FitRecord(spectrum=KernelSpectrum(np.array([np.inf, 1.0]))))  # fmt: skip
    numbers = run.to_dict()
    assert numbers["comparison"][0]["accuracy"] is None
    assert numbers["spectrum"]["eigenvalues"] == [None, 1.0]
