"""Solutions say how they ended and what to try; estimates say how good they are."""

from __future__ import annotations

import math

import pytest
import torch

from linnet.errors import NumericalError
from linnet.solvers.solution import Estimate, Solution, Status


def test_require_returns_the_value_of_a_converged_solution() -> None:
    solution = Solution(torch.ones(2), Status.CONVERGED, steps=3, residual=1e-9)
    assert solution.converged
    assert solution.require() is solution.value


@pytest.mark.parametrize("status", [Status.MAX_STEPS, Status.STAGNATED, Status.DIVERGED])
def test_require_raises_with_what_to_try(status: Status) -> None:
    solution = Solution(torch.ones(2), status, steps=7, residual=0.125)
    assert not solution.converged
    with pytest.raises(NumericalError, match=r"0\.12") as error:
        solution.require("the fit")
    assert status.value in str(error.value)


def test_every_failure_says_what_to_try() -> None:
    hints = ("allow", "use", "look for")
    failures = [status for status in Status if status is not Status.CONVERGED]
    assert len(failures) == 3
    assert all(any(hint in status.value for hint in hints) for status in failures)


def test_estimate_of_samples() -> None:
    estimate = Estimate.of(torch.tensor([1.0, 3.0, 5.0, 7.0]))
    assert estimate.mean == 4.0
    assert estimate.stderr == pytest.approx(math.sqrt(20 / 3) / 2)
    assert str(Estimate(1234.5678, 0.5)) == "1234.57 ± 0.5"


def test_one_sample_has_no_standard_error() -> None:
    assert Estimate.of(torch.tensor([2.0])) == Estimate(2.0, math.inf)
