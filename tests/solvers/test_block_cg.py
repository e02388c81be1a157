"""Block conjugate gradients: exact, together, in fewer steps; shifted ones from a single Krylov space."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linnet.linalg import Dense, Diagonal, FunctionOperator
from linnet.solvers import Status, block_cg, cg, shifted_cg
from tests.oracles.conformance import CountingOperator, check_solver


def spd(n: int, condition: float = 1e3) -> Tensor:
    """A symmetric matrix with eigenvalues spread evenly in logarithm up to the condition number."""
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
    values = torch.logspace(0, torch.tensor(condition).log10().item(), n, dtype=torch.float64)
    matrix = (q * values) @ q.T
    return (matrix + matrix.T) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_conforms(dtype: torch.dtype) -> None:
    check_solver(block_cg, dtype)


@pytest.mark.parametrize("columns", [1, 3, 25])
def test_the_solution_is_that_of_elimination(columns: int) -> None:
    matrix, b = spd(25), torch.randn(25, columns).double()
    found = block_cg(Dense(matrix), b, tolerance=1e-12)
    assert found.status is Status.CONVERGED
    torch.testing.assert_close(found.value, torch.linalg.solve(matrix, b), rtol=1e-9, atol=1e-9)


def test_columns_together_take_fewer_steps_than_one_by_one() -> None:
    matrix, b = spd(200, 1e5), torch.randn(200, 20).double()
    together, apart = block_cg(Dense(matrix), b, tolerance=1e-8), cg(Dense(matrix), b, tolerance=1e-8)
    assert together.converged
    assert 3 * together.steps < apart.steps


def test_one_product_a_step_and_one_for_the_check() -> None:
    operator = CountingOperator(Dense(spd(60, 50.0)))
    found = block_cg(operator, torch.randn(60, 4).double(), tolerance=1e-8)
    assert operator.products == found.steps + 1


def test_dependent_zero_and_tiny_columns_do_no_harm() -> None:
    matrix, b = spd(40), torch.randn(40, 6).double()
    b[:, 1], b[:, 2], b[:, 3] = 2 * b[:, 0], 0.0, 1e-9 * b[:, 3]
    found = block_cg(Dense(matrix), b, tolerance=1e-11)
    assert found.converged
    exact = torch.linalg.solve(matrix, b)
    assert float(((found.value - exact).norm(dim=0) / exact.norm(dim=0).clamp_min(1e-30)).max()) < 1e-8
    assert not found.value[:, 2].any()


def test_a_preconditioner_reduces_the_steps() -> None:
    scales = torch.logspace(0, 3, 80).double()
    matrix = scales[:, None] * spd(80, 5.0) * scales
    b = torch.randn(80, 3).double()
    plain = block_cg(Dense(matrix), b, tolerance=1e-8)
    jacobi = block_cg(Dense(matrix), b, Diagonal(1 / matrix.diagonal()), tolerance=1e-8)
    assert jacobi.converged
    assert 2 * jacobi.steps < plain.steps


def test_the_step_limit_is_obeyed_and_said() -> None:
    found = block_cg(Dense(spd(80, 1e6)), torch.randn(80, 2).double(), tolerance=1e-12, max_steps=3)
    assert (found.status, found.steps) == (Status.MAX_STEPS, 3)
    assert found.residual > 1e-12


def test_an_indefinite_operator_diverges() -> None:
    operator = FunctionOperator(lambda v: torch.tensor([1.0, -1.0, 2.0])[:, None] * v, (3, 3), symmetric=True)
    assert block_cg(operator, torch.tensor([[1.0], [3.0], [1.0]])).status is Status.DIVERGED


def test_one_krylov_space_serves_every_shift() -> None:
    matrix, b = spd(50), torch.randn(50).double()
    shifts = torch.tensor([3.0, 0.01, 1e4, 0.01, 40.0], dtype=torch.float64)
    operator = CountingOperator(Dense(matrix))
    found = shifted_cg(operator, b, shifts, tolerance=1e-11)
    eye = torch.eye(50, dtype=torch.float64)
    exact = torch.stack([torch.linalg.solve(matrix + s * eye, b) for s in shifts], 1)
    torch.testing.assert_close(found.value, exact, rtol=1e-8, atol=1e-9)
    assert operator.products == found.steps + 1
    assert operator.columns == found.steps + len(shifts)
    alone = cg(Dense(matrix + 0.01 * eye), b, tolerance=1e-11)
    assert found.steps <= alone.steps + 1


def test_shifts_far_apart_do_not_overflow() -> None:
    matrix = spd(120, 1e4)
    found = shifted_cg(Dense(matrix), torch.randn(120).double(), torch.tensor([1.0, 1e12]), tolerance=1e-9)
    assert found.converged
    assert found.value.isfinite().all()


def test_a_matrix_that_is_singular_without_its_shift() -> None:
    rows = torch.randn(5, 40).double()
    b = rows.T @ torch.randn(5).double()
    found = shifted_cg(Dense(rows.T @ rows), b, torch.tensor([0.5, 5.0]), tolerance=1e-10)
    assert found.converged
    assert found.steps <= 6


def test_shifted_step_limit() -> None:
    found = shifted_cg(Dense(spd(80, 1e6)), torch.randn(80).double(), torch.tensor([0.1]), max_steps=2)
    assert (found.status, found.steps) == (Status.MAX_STEPS, 2)
