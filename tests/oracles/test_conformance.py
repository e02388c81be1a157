"""The conformance suites accept what is right, and catch every kind of wrong answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg import Dense, Diagonal, FunctionOperator, LinearOperator, ParameterSpace, Vector
from linnet.solvers import Status, cg
from linnet.solvers.solution import Solution
from tests.oracles.conformance import CountingOperator, check_operator, check_solver

MATRIX = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.0, 0.5, 2.0]]).double()
BIASED = torch.tensor([[4.0, 1.0, 0.0], [0.0, 3.0, 0.5], [0.0, 0.5, 2.0]]).double()


def test_right_operators_pass() -> None:
    check_operator(Dense(MATRIX), MATRIX)
    check_operator(Dense(MATRIX.float()), MATRIX.float())


def test_a_wrong_matrix_is_caught() -> None:
    with pytest.raises(AssertionError, match="mv: off by"):
        check_operator(Dense(MATRIX), MATRIX + 1e-6 * torch.eye(3).double())
    with pytest.raises(AssertionError, match="shape"):
        check_operator(Dense(MATRIX), MATRIX[:2])
    with pytest.raises(AssertionError, match="dtype"):
        check_operator(Dense(MATRIX), MATRIX.float())


def test_the_tolerance_decides() -> None:
    nearly = MATRIX + 1e-6 * torch.eye(3).double()
    check_operator(Dense(MATRIX), nearly, rtol=1e-5)
    with pytest.raises(AssertionError, match="off by"):
        check_operator(Dense(MATRIX), nearly, rtol=1e-8)


def test_a_wrong_transpose_is_caught() -> None:
    operator = FunctionOperator(lambda v: BIASED @ v, (3, 3), torch.float64, symmetric=True)
    with pytest.raises(AssertionError, match=r"^T: off by"):
        check_operator(operator, BIASED)


@pytest.mark.parametrize(
    "method", ["diagonal", "trace", "logdet", "inverse", "quadratic", "sample", "solve", "damped"]
)
def test_a_wrong_closed_form_is_caught(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true_method = getattr(Dense, method)

    def wrong(self: Dense, *arguments: Any) -> Any:
        answer = true_method(self, *arguments)
        return 1.2 * answer

    monkeypatch.setattr(Dense, method, wrong)
    with pytest.raises(AssertionError, match=method):
        check_operator(Dense(MATRIX), MATRIX)


def test_params_that_come_back_flat_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    space = ParameterSpace({"weight": (3,)})
    check_operator(Diagonal(torch.ones(3), space), torch.eye(3))
    monkeypatch.setattr(ParameterSpace, "in_kind", lambda self, flat, like: flat)
    with pytest.raises(AssertionError, match="@ with Params: got Tensor"):
        check_operator(Diagonal(torch.ones(3), space), torch.eye(3))


def test_integer_matrices_are_refused() -> None:
    with pytest.raises(InputError, match="int64"):
        check_operator(Dense(torch.eye(2)), torch.eye(2, dtype=torch.int64))


def test_counting_counts_each_way() -> None:
    counting = CountingOperator(Dense(MATRIX))
    check_operator(counting, MATRIX)
    counting = CountingOperator(Dense(MATRIX))
    counting.mv(torch.ones(3).double())
    counting.T.mm(torch.ones(3, 4).double())
    assert (counting.products, counting.columns) == (1, 1)
    assert (counting.T.products, counting.T.columns) == (1, 4)


Answer = Solution[Vector]


def too_sure(operator: LinearOperator, b: Vector, *, tolerance: float, max_steps: int | None) -> Answer:
    """Says that it has converged whatever happens."""
    solution = cg(operator, b, tolerance=tolerance, max_steps=max_steps)
    return Solution(solution.value, Status.CONVERGED, solution.steps, 0.0)


def inaccurate(operator: LinearOperator, b: Vector, *, tolerance: float, max_steps: int | None) -> Answer:
    """Solves another system."""
    return cg(operator.damped(1e-3), b, tolerance=tolerance, max_steps=max_steps)


def tireless(operator: LinearOperator, b: Vector, *, tolerance: float, max_steps: int | None) -> Answer:
    """Does not stop when told to."""
    return cg(operator, b, tolerance=tolerance)


def flattening(operator: LinearOperator, b: Vector, *, tolerance: float, max_steps: int | None) -> Answer:
    """Returns a tensor for Params."""
    solution = cg(operator, b, tolerance=tolerance, max_steps=max_steps)
    if isinstance(solution.value, Tensor) or operator.space is None:
        return solution
    return Solution(
        operator.space.to_flat(solution.value), solution.status, solution.steps, solution.residual
    )


def lazy(operator: LinearOperator, b: Vector, *, tolerance: float, max_steps: int | None) -> Answer:
    """Gives up early, and says so."""
    return cg(operator, b, tolerance=tolerance, max_steps=2)


@pytest.mark.parametrize(
    ("solve", "text"),
    [
        (too_sure, r"max_steps=1: got Status\.CONVERGED"),
        (inaccurate, r"several right-hand sides: off by"),
        (tireless, r"max_steps=1: got Status\.CONVERGED after"),
        (flattening, r"Params: the solution is a Tensor"),
        (lazy, r"several right-hand sides: Status\.MAX_STEPS"),
    ],
)
def test_wrong_solvers_are_caught(solve: Any, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_solver(solve)


def test_right_solvers_pass_in_both_precisions() -> None:
    for dtype in (torch.float32, torch.float64):
        check_solver(cg, dtype, device="cpu")


def test_the_precision_asked_for_is_used() -> None:
    seen: list[torch.dtype] = []

    def watched(operator: LinearOperator, b: Vector, *, tolerance: float, max_steps: int | None) -> Answer:
        seen.append(operator.dtype)
        return cg(operator, b, tolerance=tolerance, max_steps=max_steps)

    check_solver(watched, torch.float32)
    assert set(seen) == {torch.float32}


def test_nan_that_counts_as_solved_is_caught() -> None:
    def blind(operator: LinearOperator, b: Vector, *, tolerance: float, max_steps: int | None) -> Answer:
        flat = b if isinstance(b, Tensor) else torch.zeros(())
        if bool(flat.isnan().any()):
            return Solution(b, Status.CONVERGED, 1, 0.0)
        return cg(operator, b, tolerance=tolerance, max_steps=max_steps)

    with pytest.raises(AssertionError, match="NaN on the right-hand side"):
        check_solver(blind)
