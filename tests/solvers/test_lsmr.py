"""LSMR: least squares of any shape and rank, damped or not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg import FunctionOperator
from linnet.solvers import Status, lsmr
from linnet.testing.conformance import CountingOperator


def as_operator(matrix: Tensor) -> FunctionOperator:
    """A matrix as an operator."""
    m, n = matrix.shape
    return FunctionOperator(lambda v: matrix @ v, (m, n), matrix.dtype, adjoint=lambda u: matrix.T @ u)


def ridge_solution(matrix: Tensor, b: Tensor, ridge: float) -> Tensor:
    """The solution of the normal equations, or the pseudo-inverse without ridge."""
    gram = matrix.T @ matrix + ridge * torch.eye(matrix.shape[1]).to(matrix)
    inverse: Tensor = torch.linalg.inv(gram) @ matrix.T if ridge else torch.linalg.pinv(matrix)
    return inverse @ b


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.sampled_from([0.0, 0.3, 20.0]))
def test_the_solution_is_that_of_the_normal_equations(m: int, n: int, columns: int, ridge: float) -> None:
    matrix, b = torch.randn(m, n).double(), torch.randn(m, columns).double()
    solution = lsmr(as_operator(matrix), b, ridge, tolerance=1e-11, max_steps=500)
    assert solution.converged
    torch.testing.assert_close(solution.value, ridge_solution(matrix, b, ridge), rtol=1e-6, atol=1e-6)


def test_the_least_norm_solution_of_a_singular_system() -> None:
    matrix = torch.randn(8, 3).double() @ torch.randn(3, 6).double()
    b = torch.randn(8).double()
    solution = lsmr(as_operator(matrix), b, tolerance=1e-10)
    torch.testing.assert_close(
        solution.value, torch.linalg.pinv(matrix, rtol=1e-10) @ b, rtol=1e-7, atol=1e-7
    )


def test_one_product_each_way_a_step() -> None:
    operator = CountingOperator(as_operator(torch.randn(30, 10).double()))
    solution = lsmr(operator, torch.randn(30, 2).double())
    assert solution.converged
    assert operator.products == solution.steps + 1  # and the check
    assert operator.T.products == solution.steps + 2  # and the start


def test_the_gradient_never_grows() -> None:
    operator, b = as_operator(torch.randn(40, 20).double()), torch.randn(40).double()
    gradients = [lsmr(operator, b, tolerance=1e-15, max_steps=steps).residual for steps in range(1, 15)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(gradients))


def test_more_ridge_needs_fewer_steps() -> None:
    matrix = torch.randn(60, 60).double()
    steps = [lsmr(as_operator(matrix), torch.ones(60).double(), ridge).steps for ridge in (1e-4, 1.0, 1e4)]
    assert steps[0] > steps[1] > steps[2]


def test_columns_do_not_disturb_each_other() -> None:
    operator = as_operator(torch.randn(20, 12).double())
    b = torch.randn(20, 3).double() * torch.tensor([1e-6, 1.0, 0.0]).double()
    together = lsmr(operator, b, tolerance=1e-10).value
    for column in range(3):
        alone = lsmr(operator, b[:, column], tolerance=1e-10).value
        torch.testing.assert_close(together[:, column], alone, rtol=1e-7, atol=1e-20)


def test_the_tolerance_is_met_and_changes_the_steps() -> None:
    matrix, b = torch.randn(50, 40).double(), torch.randn(50).double()
    loose, tight = (lsmr(as_operator(matrix), b, 0.5, tolerance=t) for t in (1e-2, 1e-9))
    assert loose.steps < tight.steps
    gradient = matrix.T @ (b - matrix @ loose.value) - 0.5 * loose.value
    assert loose.residual == pytest.approx(float(gradient.norm() / (matrix.T @ b).norm()), rel=1e-6)
    assert tight.residual <= 1e-9


def test_max_steps_is_obeyed_and_said() -> None:
    solution = lsmr(as_operator(torch.randn(50, 40).double()), torch.randn(50).double(), max_steps=2)
    assert (solution.status, solution.steps) == (Status.MAX_STEPS, 2)


def test_float32_stagnates_honestly_or_converges() -> None:
    matrix = torch.randn(30, 30) * torch.logspace(0, -5, 30)
    solution = lsmr(as_operator(matrix), torch.randn(30), tolerance=1e-9, max_steps=2000)
    assert solution.status in (Status.STAGNATED, Status.MAX_STEPS)
    assert solution.residual > 1e-9


def test_nan_diverges() -> None:
    solution = lsmr(as_operator(torch.full((3, 2), float("nan"))), torch.ones(3), max_steps=5)
    assert solution.status is Status.DIVERGED


def test_a_zero_right_hand_side_needs_no_step() -> None:
    solution = lsmr(as_operator(torch.ones(3, 2)), torch.zeros(3))
    assert (solution.status, solution.steps) == (Status.CONVERGED, 0)
    assert torch.equal(solution.value, torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"b": torch.ones(2)}, r"b has shape \(2,\)"),
        ({"b": torch.ones(3).double()}, r"float64"),
        ({"ridge": -1.0}, r"-1"),
        ({"tolerance": 0.0}, r"tolerance=0"),
        ({"max_steps": -1}, r"max_steps=-1"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        lsmr(**{"operator": as_operator(torch.ones(3, 2)), "b": torch.ones(3), **change})
