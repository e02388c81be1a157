"""Intervals, calibration bins and rankings against independent computations."""

import numpy as np
import pytest
from scipy import stats

from linnet.plots.measures import (
    calibration_error,
    interval_coverage,
    ranking,
    reliability_bins,
    wilson_interval,
)
from linnet.report.numbers import measured, split_by_uncertainty
from linnet.report.reading import Predictions, scored


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (3, 10), (90, 100), (50, 50)])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_wilson_interval_is_scipys(successes: int, trials: int, level: float) -> None:
    expected = stats.binomtest(successes, trials).proportion_ci(level, method="wilson")
    assert wilson_interval(successes, trials, level) == pytest.approx(
        (expected.low, expected.high), abs=1e-12
    )


def test_bins_hold_every_prediction_once() -> None:
    rng = np.random.default_rng(0)
    confidence = np.append(rng.uniform(size=500), [0.0, 1.0])
    correct = rng.uniform(size=502) < confidence
    bins = reliability_bins(confidence, correct, bins=7)
    assert sum(b.count for b in bins) == 502
    assert len(bins) == 7
    weighted = sum(b.count * b.accuracy for b in bins) / 502
    assert weighted == pytest.approx(correct.mean())
    assert all(b.low <= b.accuracy <= b.high for b in bins)


def test_calibration_error_is_the_weighted_gap() -> None:
    confidence, correct = np.array([0.95, 0.95, 0.55, 0.55]), np.array([1, 0, 1, 1])
    # bin of 0.95: accuracy 0.5, gap 0.45; bin of 0.55: accuracy 1, gap 0.45
    assert calibration_error(reliability_bins(confidence, correct)) == pytest.approx(0.45)
    assert calibration_error([]) == 0.0


def test_interval_coverage_of_a_true_model_is_nominal() -> None:
    rng = np.random.default_rng(1)
    mean, std = rng.normal(size=40_000), rng.uniform(0.5, 2.0, 40_000)
    levels = np.array([0.1, 0.5, 0.9])
    observed = interval_coverage(mean, std, mean + std * rng.normal(size=40_000), levels)
    np.testing.assert_allclose(observed, levels, atol=0.01)
    assert interval_coverage(mean, std / 3, mean + std, levels)[2] == 0.0


def test_values_without_spread_have_no_density() -> None:
    mean, truth = np.ones((4, 1)), np.array([[1.0], [1.0], [1.0], [3.0]])
    found = scored("fit", Predictions(mean, np.zeros((4, 1)), None), truth)
    assert (found.nll, found.rmse) == (None, 1.0)
    spread = scored("fit", Predictions(mean, np.full((4, 1), 2.0), None), truth)
    assert spread.nll == pytest.approx(-stats.norm.logpdf(truth, 1, 2).mean())


def test_split_by_uncertainty_takes_the_largest() -> None:
    uncertainty, loss = np.tile([0.1, 0.9, 0.3, 0.8, 0.2], 4), np.tile([0, 1, 0, 3, 0], 4)
    assert split_by_uncertainty(uncertainty, loss) == (1.0, 14 / 18, 2)
    assert split_by_uncertainty(np.array([1.0]), np.array([1])) == (1.0, 0.0, 1)


def test_ranking_is_stable_and_puts_nan_last() -> None:
    assert ranking(np.array([1.0, np.nan, 2.0, 1.0])).tolist() == [2, 0, 3, 1]


def test_numbers_are_as_small_as_they_are() -> None:
    assert measured(1.152e-16, 2.3e-17) == "1.15×10⁻¹⁶\u00a0±\u00a02.3×10⁻¹⁷"
    assert measured(0.123456, 0.00034) == "0.12346\u00a0±\u00a00.00034"
