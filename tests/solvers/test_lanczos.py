"""Lanczos processes and eigenpairs: orthonormal, one product a step, multiplicities found."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.linalg import Diagonal, FunctionOperator
from linnet.solvers import Status, eigenpairs, tridiagonalize
from tests.oracles.conformance import CountingOperator


def symmetric(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random symmetric matrix, as a rule indefinite."""
    matrix = torch.randn(n, n, dtype=dtype)
    return matrix + matrix.T


@given(st.integers(1, 10), st.integers(1, 3), st.integers(1, 10))
def test_the_process_projects_the_operator(n: int, columns: int, steps: int) -> None:
    matrix = symmetric(n)
    process = tridiagonalize(as_operator(matrix), torch.randn(n, columns).double(), steps)
    for k, T in enumerate(process.matrices()):
        V = process.basis[:, :, k].T  # (n, m)
        torch.testing.assert_close(V.T @ matrix @ V, T, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(V.T @ V, torch.eye(min(n, steps)).double(), rtol=1e-9, atol=1e-9)


def as_operator(matrix: Tensor) -> FunctionOperator:
    """A symmetric matrix as an operator, without asking for its closed forms."""
    return FunctionOperator(lambda v: matrix @ v, (len(matrix), len(matrix)), matrix.dtype, symmetric=True)


def test_vectors_stay_orthogonal_over_many_steps_in_float32() -> None:
    operator = Diagonal(torch.logspace(-6, 0, 300))
    process = tridiagonalize(operator, torch.randn(300, 1), 120)
    V = process.basis[:, :, 0].T
    assert float((V.T @ V - torch.eye(120)).abs().max()) < 1e-5


def test_one_product_a_step_for_all_processes() -> None:
    operator = CountingOperator(Diagonal(torch.rand(50)))
    tridiagonalize(operator, torch.randn(50, 4), 7)
    assert (operator.products, operator.columns) == (7, 28)


def test_an_invariant_subspace_ends_a_process_and_no_other() -> None:
    operator = Diagonal(torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
    start = torch.ones(4, 2).double()
    start[1:, 0] = 0.0  # an eigenvector
    process = tridiagonalize(operator, start, 4)
    assert process.diagonal[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert torch.equal(process.offdiagonal[:, 0], torch.zeros(4).double())
    torch.testing.assert_close(
        torch.linalg.eigvalsh(process.matrices()[1]), torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    )


@given(st.integers(1, 12), st.booleans(), st.data())
def test_eigenpairs_are_those_of_the_matrix(n: int, largest: bool, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    matrix = symmetric(n)
    solution = eigenpairs(as_operator(matrix), k, largest, tolerance=1e-10, seed=0)
    pairs = solution.value
    assert solution.status is Status.CONVERGED
    exact = torch.linalg.eigvalsh(matrix)
    wanted = exact.flip(0)[:k] if largest else exact[:k]
    torch.testing.assert_close(pairs.values, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(matrix @ pairs.vectors, pairs.vectors * pairs.values, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(k).double(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "spectrum", [[5.0, 5.0, 5.0, 1.0, 1.0, 0.0, 0.0], [1.0] * 7, [2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
)
def test_repeated_eigenvalues_are_found_as_often_as_they_occur(spectrum: list[float]) -> None:
    solution = eigenpairs(Diagonal(torch.tensor(spectrum).double()), 3, seed=0)
    assert solution.converged
    torch.testing.assert_close(
        solution.value.values, torch.tensor(spectrum[:3]).double(), rtol=1e-9, atol=1e-9
    )


def test_few_products_find_a_separated_spectrum() -> None:
    values = torch.cat([torch.tensor([100.0, 80.0, 60.0]), torch.rand(997)]).double()
    operator = CountingOperator(Diagonal(values))
    solution = eigenpairs(operator, 3, seed=0)
    assert solution.converged
    assert solution.steps < 15
    assert operator.products == solution.steps
    assert operator.columns == 3 * solution.steps
    torch.testing.assert_close(solution.value.values, values[:3], rtol=1e-9, atol=0.0)


def test_float32_works_in_float32() -> None:
    matrix = symmetric(40, torch.float32)
    pairs = eigenpairs(as_operator(matrix), 2, tolerance=1e-4, seed=0).require()
    assert pairs.values.dtype == pairs.vectors.dtype == torch.float32
    torch.testing.assert_close(pairs.values, torch.linalg.eigvalsh(matrix).flip(0)[:2], rtol=1e-4, atol=1e-4)


def test_max_steps_is_obeyed_and_said() -> None:
    solution = eigenpairs(Diagonal(torch.linspace(0, 1, 200).double()), 2, max_steps=3, seed=0)
    assert (solution.status, solution.steps) == (Status.MAX_STEPS, 3)
    assert solution.residual > 1e-6


def test_a_tolerance_below_rounding_stagnates() -> None:
    solution = eigenpairs(as_operator(symmetric(8, torch.float32)), 2, tolerance=1e-12, seed=0)
    assert (solution.status, solution.steps) == (Status.STAGNATED, 4)


def test_a_smaller_tolerance_takes_more_steps() -> None:
    operator = Diagonal(torch.linspace(0, 1, 150).double())
    loose, tight = (eigenpairs(operator, 2, tolerance=t, seed=0) for t in (1e-2, 1e-8))
    assert loose.steps < tight.steps
    assert tight.residual <= 1e-8 < loose.residual <= 1e-2


def test_the_generator_decides_the_start() -> None:
    operator = Diagonal(torch.linspace(0, 1, 100).double())
    first, again, other = (eigenpairs(operator, 1, max_steps=2, seed=g).value.values for g in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_zero_operator_has_zero_eigenvalues() -> None:
    solution = eigenpairs(Diagonal(torch.zeros(5)), 2, seed=0)
    assert solution.converged
    assert torch.equal(solution.value.values, torch.zeros(2))
