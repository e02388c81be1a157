"""Conjugate gradients: exact, one product a step, honest about how it ended."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.linalg import Dense, Diagonal, FunctionOperator, ParameterSpace
from linnet.solvers import Status, cg
from tests.oracles.conformance import CountingOperator, check_solver


def spd(n: int, condition: float = 100.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A symmetric matrix with eigenvalues spread evenly in logarithm from 1 to the condition number."""
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
    eigenvalues = torch.logspace(0, torch.tensor(condition).log10().item(), n, dtype=torch.float64)
    matrix: Tensor = (q * eigenvalues) @ q.T
    return ((matrix + matrix.T) / 2).to(dtype)


def value(solution_value: object) -> Tensor:
    """The value of a flat solution."""
    assert isinstance(solution_value, Tensor)
    return solution_value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cg_conforms(dtype: torch.dtype) -> None:
    check_solver(cg, dtype)


@given(st.integers(1, 12), st.integers(1, 4))
def test_the_solution_is_that_of_elimination(n: int, columns: int) -> None:
    matrix, b = spd(n), torch.randn(n, columns).double()
    solution = cg(Dense(matrix), b, tolerance=1e-12)
    assert solution.status is Status.CONVERGED
    torch.testing.assert_close(value(solution.value), torch.linalg.solve(matrix, b), rtol=1e-10, atol=1e-10)


def test_one_product_a_step_and_one_for_the_check() -> None:
    operator, preconditioner = (
        CountingOperator(Dense(spd(40))),
        CountingOperator(Diagonal(torch.ones(40).double())),
    )
    solution = cg(operator, torch.randn(40, 3).double(), preconditioner, tolerance=1e-8)
    assert operator.products == solution.steps + 1
    assert operator.columns == 3 * operator.products
    assert preconditioner.products == solution.steps + 1


def test_a_start_costs_one_product_more_and_saves_steps() -> None:
    matrix, b = spd(40), torch.randn(40).double()
    exact = torch.linalg.solve(matrix, b)
    operator = CountingOperator(Dense(matrix))
    warm = cg(operator, b, x0=exact + 1e-6 * torch.randn(40).double(), tolerance=1e-8)
    assert operator.products == warm.steps + 2
    assert warm.steps < cg(Dense(matrix), b, tolerance=1e-8).steps
    perfect = cg(Dense(matrix), b, x0=exact, tolerance=1e-8)
    assert (perfect.steps, perfect.status) == (0, Status.CONVERGED)


def test_x0_is_not_changed() -> None:
    x0 = torch.zeros(10).double()
    cg(Dense(spd(10)), torch.ones(10).double(), x0=x0)
    assert torch.equal(x0, torch.zeros(10).double())


def test_as_many_steps_as_distinct_eigenvalues() -> None:
    operator = Diagonal(torch.tensor([1.0, 5.0, 9.0]).double().repeat(20))
    assert cg(operator, torch.randn(60).double(), tolerance=1e-10).steps == 3


def test_the_exact_inverse_as_preconditioner_needs_one_step() -> None:
    operator = Dense(spd(30, 1e6))
    solution = cg(operator, torch.randn(30).double(), operator.inverse(), tolerance=1e-8)
    assert solution.steps == 1
    assert solution.converged


def test_a_preconditioner_reduces_the_steps() -> None:
    scales = torch.logspace(0, 3, 60).double()
    matrix = scales[:, None] * spd(60, 10.0) * scales
    b = torch.randn(60).double()
    plain = cg(Dense(matrix), b, tolerance=1e-8)
    jacobi = cg(Dense(matrix), b, Diagonal(1 / matrix.diagonal()), tolerance=1e-8)
    assert jacobi.converged
    assert 3 * jacobi.steps < plain.steps


def test_the_preconditioner_acts_from_the_first_direction_on() -> None:
    # After one step from zero, x is a multiple of the preconditioned right-hand side.
    inverse, b = Diagonal(torch.tensor([1.0, 0.01]).double()), torch.ones(2).double()
    first = value(cg(Dense(spd(2)), b, inverse, tolerance=1e-15, max_steps=1).value)
    assert float(first[0] / first[1]) == pytest.approx(100.0)


def test_columns_do_not_disturb_each_other() -> None:
    matrix, b = spd(25), torch.randn(25, 4).double() * torch.tensor([1e-6, 1.0, 1e6, 0.0]).double()
    together = value(cg(Dense(matrix), b, tolerance=1e-10).value)
    for column in range(4):
        alone = value(cg(Dense(matrix), b[:, column], tolerance=1e-10).value)
        assert float((together[:, column] - alone).norm()) <= 1e-9 * float(alone.norm())


def test_a_column_that_has_converged_stands_still() -> None:
    operator = Diagonal(torch.cat([torch.ones(1), torch.linspace(1, 50, 30)]).double())
    easy, hard = torch.zeros(31).double(), torch.ones(31).double()
    easy[0] = 1.0
    solution = value(cg(operator, torch.stack([easy, hard], dim=1), tolerance=1e-12).value)
    assert torch.equal(solution[:, 0], easy)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-5, 1e-9])
def test_the_tolerance_is_relative_and_met(tolerance: float) -> None:
    matrix, b = spd(30), 1e5 * torch.randn(30).double()
    solution = cg(Dense(matrix), b, tolerance=tolerance)
    residual = float((b - matrix @ value(solution.value)).norm() / b.norm())
    assert solution.residual == pytest.approx(residual, rel=1e-4)
    assert tolerance / 1e3 < residual <= tolerance


def test_a_smaller_tolerance_takes_more_steps() -> None:
    operator, b = Dense(spd(50)), torch.randn(50).double()
    steps = [cg(operator, b, tolerance=tolerance).steps for tolerance in (1e-2, 1e-5, 1e-9)]
    assert steps == sorted(set(steps))


def test_max_steps_is_obeyed_and_said() -> None:
    solution = cg(Dense(spd(50)), torch.randn(50).double(), tolerance=1e-12, max_steps=4)
    assert (solution.status, solution.steps) == (Status.MAX_STEPS, 4)
    assert solution.residual > 1e-12


@pytest.mark.parametrize("eigenvalues", [[1.0, -1.0, 2.0], [-1.0, -2.0, -3.0]])
def test_an_indefinite_operator_diverges(eigenvalues: list[float]) -> None:
    operator = FunctionOperator(lambda v: torch.tensor(eigenvalues)[:, None] * v, (3, 3), symmetric=True)
    solution = cg(operator, torch.tensor([1.0, 3.0, 1.0]))
    assert solution.status is Status.DIVERGED


def test_nan_from_the_operator_diverges() -> None:
    operator = FunctionOperator(lambda v: v / 0 * 0, (3, 3), symmetric=True)
    assert cg(operator, torch.ones(3)).status is Status.DIVERGED


def test_float32_that_cannot_reach_the_tolerance_stagnates() -> None:
    matrix = spd(60, 1e7, torch.float32)
    solution = cg(Dense(matrix), torch.randn(60), tolerance=1e-7, max_steps=5000)
    assert solution.status in (Status.STAGNATED, Status.MAX_STEPS)
    assert solution.residual > 1e-7


def test_the_residual_is_measured_not_believed() -> None:
    # The operator answers the first question in another way than those that come after.
    calls: list[int] = []

    def changing(v: Tensor) -> Tensor:
        calls.append(1)
        return v if len(calls) == 1 else 2 * v

    operator = FunctionOperator(changing, (3, 3), symmetric=True)
    found = cg(operator, torch.ones(3), max_steps=1)
    assert found.status is Status.STAGNATED
    assert found.residual == pytest.approx(1.0)
    calls.clear()
    again = cg(operator, torch.ones(3))  # goes on from there, and then it is right
    assert again.status is Status.CONVERGED
    assert again.value.tolist() == [0.5] * 3


def test_rounding_in_the_recursion_is_caught_up_with() -> None:
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(200, 200, generator=generator, dtype=torch.float64))
    matrix = ((basis * torch.logspace(0, -3.5, 200, dtype=torch.float64)) @ basis.T).float()
    right = torch.randn(200, 4, generator=generator)
    solution = cg(Dense(matrix), right, tolerance=1e-4, max_steps=2000)
    assert solution.status is Status.CONVERGED
    assert solution.residual <= 1e-4


def test_params_in_params_out() -> None:
    space = ParameterSpace({"weight": (2, 3), "bias": (2,)})
    matrix, b = spd(8), torch.randn(8).double()
    operator = Dense(matrix, space)
    solution = cg(operator, space.to_params(b), x0=space.to_params(torch.ones(8).double()), tolerance=1e-12)
    assert isinstance(solution.value, dict)
    torch.testing.assert_close(
        space.to_flat(solution.value), torch.linalg.solve(matrix, b), rtol=1e-9, atol=1e-9
    )


def test_no_right_hand_side_is_solved_at_once() -> None:
    solution = cg(Dense(spd(5)), torch.empty(5, 0).double())
    assert (solution.status, solution.steps) == (Status.CONVERGED, 0)
    assert value(solution.value).shape == (5, 0)


def test_what_a_restart_makes_worse_is_not_returned() -> None:
    # The identity, until it is checked; a tenth more then, and seven times as much once it starts again.
    calls: list[int] = []

    def changing(v: Tensor) -> Tensor:
        calls.append(1)
        return v * (1.0 if len(calls) == 1 else 1.1 if len(calls) < 4 else 7.0)

    found = cg(FunctionOperator(changing, (3, 3), symmetric=True), torch.ones(3), tolerance=1e-3)
    assert found.status is Status.STAGNATED
    assert found.residual == pytest.approx(0.1)
    assert found.value.tolist() == [1.0] * 3
