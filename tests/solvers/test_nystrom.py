"""Nyström approximation: exact for low rank, below the operator, and a preconditioner that works."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.linalg import Dense, Diagonal, ParameterSpace
from linnet.solvers import cg, nystrom, nystrom_preconditioner
from tests.oracles.conformance import CountingOperator, check_operator


def decaying(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A positive definite matrix with eigenvalues 10⁴, 10⁴/2, 10⁴/4, ... ."""
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
    matrix: Tensor = (q * (1e4 * 0.5 ** torch.arange(n).double())) @ q.T
    return ((matrix + matrix.T) / 2).to(dtype)


@given(st.integers(1, 5))
def test_exact_for_a_matrix_of_that_rank(rank: int) -> None:
    factor = torch.randn(8, rank).double()
    approximation = nystrom(Dense(factor @ factor.T), rank, seed=0)
    torch.testing.assert_close(approximation.dense(), factor @ factor.T, rtol=1e-6, atol=1e-6)


def test_it_is_an_operator_with_closed_forms() -> None:
    approximation = nystrom(Dense(decaying(10)), 4, seed=0)
    check_operator(approximation, approximation.dense())


@given(st.integers(1, 9))
def test_never_larger_than_the_operator(rank: int) -> None:
    matrix = decaying(10)
    difference = matrix - nystrom(Dense(matrix), rank, seed=0).dense()
    assert float(torch.linalg.eigvalsh(difference)[0]) > -1e-6 * float(matrix.diagonal().max())


def test_more_rank_is_nearer() -> None:
    matrix = decaying(20)
    errors = [float((matrix - nystrom(Dense(matrix), r, seed=0).dense()).norm()) for r in (2, 5, 10)]
    assert errors[0] > errors[1] > 10 * errors[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_singular_operator_in_any_precision(dtype: torch.dtype) -> None:
    operator = Diagonal(torch.tensor([5.0, 3.0, 0.0, 0.0, 0.0, 0.0], dtype=dtype))
    approximation = nystrom(operator, 4, seed=0)
    torch.testing.assert_close(approximation.dense(), operator.dense(), rtol=1e-4, atol=1e-4)


def test_one_product_with_rank_vectors() -> None:
    operator = CountingOperator(Dense(decaying(10)))
    nystrom(operator, 4, seed=0)
    assert (operator.products, operator.columns) == (1, 4)


def test_the_generator_decides() -> None:
    operator = Dense(decaying(10))
    first, again, other = (nystrom(operator, 3, seed=g).dense() for g in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_space_is_kept() -> None:
    space = ParameterSpace({"weight": (2, 5)})
    assert nystrom(Dense(decaying(10), space), 3, seed=0).space == space
    assert nystrom_preconditioner(Dense(decaying(10), space), 1.0, 3, seed=0).space == space


def test_the_preconditioner_is_the_formula_of_the_paper() -> None:
    operator, mu = Dense(decaying(10)), 0.5
    eigenvalues, vectors = torch.linalg.eigh(nystrom(operator, 3, seed=0).dense())
    kept, U = eigenvalues[-3:], vectors[:, -3:]
    wanted = (kept[0] + mu) * (U / (kept + mu)) @ U.T + torch.eye(10).double() - U @ U.T
    check_operator(nystrom_preconditioner(operator, mu, 3, seed=0), wanted)


@pytest.mark.parametrize(
    ("dtype", "damping", "tolerance"), [(torch.float32, 5.0, 1e-3), (torch.float64, 0.1, 1e-8)]
)
def test_the_preconditioner_reduces_the_steps(dtype: torch.dtype, damping: float, tolerance: float) -> None:
    matrix, b = decaying(200, dtype), torch.randn(200, 2).to(dtype)
    damped = Dense(matrix).damped(damping)
    plain = cg(damped, b, tolerance=tolerance)
    preconditioner = nystrom_preconditioner(Dense(matrix), damping, rank=25, seed=0)
    fast = cg(damped, b, preconditioner, tolerance=tolerance)
    assert fast.converged
    assert fast.steps < 10
    assert plain.steps > 3 * fast.steps


def test_the_condition_number_is_small_when_the_rest_is_below_the_damping() -> None:
    matrix = decaying(40)
    inverse = nystrom_preconditioner(Dense(matrix), 1.0, rank=25, seed=0)
    eigenvalues = torch.linalg.eigvals(inverse @ (matrix + torch.eye(40).double())).real
    assert float(eigenvalues.max() / eigenvalues.min()) < 5
    assert torch.linalg.cond(matrix + torch.eye(40).double()) > 1e3


def test_more_damping_is_a_milder_preconditioner() -> None:
    operator = Dense(decaying(10))
    mild, strong = (nystrom_preconditioner(operator, mu, 4, seed=0).trace() for mu in (1e6, 1.0))
    assert float(strong) < float(mild)
