"""Structured matrices against the dense matrices that they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.linalg import (
    Dense,
    Diagonal,
    Kronecker,
    LowRankMatrix,
    ParameterSpace,
    StructuredOperator,
    cholesky,
)
from tests.oracles.conformance import check_operator

DTYPES = [torch.float32, torch.float64]
SPACE = ParameterSpace({"weight": (2, 2), "bias": (2,)})


def positive(n: int, dtype: torch.dtype = torch.float64, rank: int | None = None) -> Tensor:
    """A well conditioned positive definite matrix, or a singular one of some rank."""
    factor = torch.randn(n, 2 * n if rank is None else rank, dtype=dtype)
    return factor @ factor.T / n


@given(st.integers(1, 6), st.sampled_from(DTYPES))
def test_dense_conforms(n: int, dtype: torch.dtype) -> None:
    matrix = positive(n, dtype)
    check_operator(Dense(matrix), matrix)


@given(st.integers(1, 6), st.sampled_from(DTYPES))
def test_diagonal_conforms(n: int, dtype: torch.dtype) -> None:
    values = torch.rand(n, dtype=dtype) + 0.5
    check_operator(Diagonal(values), values.diag())


def test_singular_matrices_conform_where_no_inverse_is_needed() -> None:
    matrix = positive(5, rank=2)
    check_operator(Dense(matrix), matrix)
    values = torch.tensor([0.0, 2.0, 1.0]).double()
    check_operator(Diagonal(values), values.diag())


def test_a_space_is_kept_by_every_operation() -> None:
    matrix = positive(6)
    for operator in (Dense(matrix, SPACE), Diagonal(matrix.diagonal(), SPACE)):
        check_operator(operator, operator.dense())
        changed = [operator.inverse(), operator.damped(1.0), operator.scaled(2.0), 2.0 * operator]
        assert [each.space for each in changed] == [SPACE] * 4
    params = SPACE.to_params(torch.ones(6).double())
    solution = Dense(matrix, SPACE).solve(params)
    assert isinstance(solution, dict)
    torch.testing.assert_close(
        matrix @ SPACE.to_flat(solution), torch.ones(6).double(), rtol=1e-10, atol=1e-10
    )


def test_positive_multiples_keep_the_structure_negative_ones_do_not() -> None:
    M = Diagonal(torch.ones(2))
    assert isinstance(2.0 * M, Diagonal)
    assert not isinstance(-2.0 * M, StructuredOperator)
    assert torch.equal((-2.0 * M) @ torch.ones(2), torch.tensor([-2.0, -2.0]))


@given(st.floats(0, 2), st.floats(0, 2))
def test_damping_twice_is_damping_by_the_sum(first: float, second: float) -> None:
    for M in every_structure():
        twice, once = M.damped(first).damped(second), M.damped(first + second)
        torch.testing.assert_close(twice.dense(), once.dense(), rtol=1e-10, atol=1e-10)


def every_structure() -> list[StructuredOperator]:
    """One matrix of each structure, 6 x 6 and positive definite."""
    torch.manual_seed(1)
    factor = torch.randn(6, 2).double()
    return [
        Dense(positive(6)),
        Diagonal(torch.rand(6).double() + 0.5),
        Kronecker(positive(2), positive(3)),
        Kronecker(positive(2), positive(3)).damped(0.1),
        LowRankMatrix.from_factor(factor, diagonal=0.5),
        LowRankMatrix.from_factor(factor, diagonal=torch.rand(6).double() + 0.5),
    ]


@pytest.mark.parametrize("index", range(6))
def test_metamorphic_identities(index: int) -> None:
    M = every_structure()[index]
    rows = torch.randn(3, 6).double()
    inverse = M.inverse()
    assert float(M.logdet() + inverse.logdet()) == pytest.approx(0.0, abs=1e-9)
    torch.testing.assert_close(inverse @ (M @ rows.T), rows.T, rtol=1e-9, atol=1e-9)
    wanted = rows @ torch.linalg.solve(M.dense(), rows.T)
    torch.testing.assert_close(inverse.quadratic(rows), wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(M.scaled(3.0).logdet(), M.logdet() + 6 * torch.tensor(3.0).double().log())
    torch.testing.assert_close(
        M.quadratic(torch.eye(6).double()).diagonal(), M.diagonal(), rtol=1e-10, atol=1e-10
    )


def test_quadratic_is_symmetric_and_never_negative() -> None:
    tiny = Dense(1e-8 * positive(4, torch.float32, rank=2))
    form = tiny.quadratic(torch.randn(7, 3, 4))
    assert form.shape == (7, 3, 3)
    assert torch.equal(form, form.mT)
    assert bool((form.diagonal(dim1=1, dim2=2) >= 0).all())


def test_samples_depend_on_the_generator_alone() -> None:
    M = Dense(positive(3))
    assert M.sample(5, 0).shape == (5, 3)
    assert torch.equal(M.sample(5, 0), M.sample(5, torch.Generator().manual_seed(0)))
    assert not torch.equal(M.sample(5, 0), M.sample(5, 1))


def test_the_inverse_of_a_matrix_says_what_it_is() -> None:
    assert Dense(torch.eye(2), name="G of fc1").inverse().name == "inverse of G of fc1"


def test_slightly_asymmetric_matrices_are_taken_as_symmetric() -> None:
    matrix = torch.eye(2).double()
    matrix[0, 1] = 1e-14
    assert Dense(matrix).shape == (2, 2)


def test_a_dense_matrix_is_factorized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(matrix: Tensor, name: str) -> Tensor:
        calls.append(name)
        return cholesky(matrix, name)

    monkeypatch.setattr("linnet.linalg.structured.cholesky", counted)
    M = Dense(positive(3), name="G")
    M.solve(torch.ones(3).double())
    M.logdet()
    M.inverse()
    assert calls == ["G"]
