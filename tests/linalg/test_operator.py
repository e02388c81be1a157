"""Operators made of functions, sums, multiples, products; and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.linalg import Diagonal, FunctionOperator, LinearOperator, ParameterSpace, Sum
from linnet.linalg.operator import Composition, flatten, unflatten
from tests.oracles.conformance import CountingOperator, check_operator

SPACE = ParameterSpace({"weight": (2, 2), "bias": (2,)})


def from_matrix(matrix: Tensor, space: ParameterSpace | None = None) -> FunctionOperator:
    """An operator that multiplies by a matrix."""
    m, n = matrix.shape
    return FunctionOperator(
        lambda v: matrix @ v, (m, n), matrix.dtype, adjoint=lambda u: matrix.T @ u, space=space
    )


sizes = st.integers(1, 6)


@given(sizes, sizes, st.sampled_from([torch.float32, torch.float64]))
def test_function_operators_conform(m: int, n: int, dtype: torch.dtype) -> None:
    matrix = torch.randn(m, n, dtype=dtype)
    check_operator(from_matrix(matrix), matrix)


@given(sizes, sizes, sizes)
def test_expressions_of_operators_conform(m: int, k: int, n: int) -> None:
    a, b, c = (torch.randn(*shape).double() for shape in ((m, k), (k, n), (m, n)))
    A, B, C = from_matrix(a), from_matrix(b), from_matrix(c)
    check_operator(2.0 * (A @ B) - C / 4, 2 * a @ b - c / 4)
    check_operator((A @ B + C).T @ C, (a @ b + c).T @ c)
    check_operator((C.T @ C).damped(0.5), c.T @ c + 0.5 * torch.eye(n).double())


@given(sizes, st.floats(-3, 3), st.floats(0, 3))
def test_linearity(n: int, factor: float, tau: float) -> None:
    a = torch.randn(n, n).double()
    A, v, w = from_matrix(a).damped(tau), torch.randn(n).double(), torch.randn(n).double()
    torch.testing.assert_close(A @ (v + factor * w), A @ v + factor * (A @ w), rtol=1e-10, atol=1e-10)


def test_a_square_operator_returns_params_for_params() -> None:
    matrix = torch.randn(6, 6)
    check_operator(from_matrix(matrix, SPACE), matrix)
    product = from_matrix(matrix, SPACE) @ SPACE.to_params(torch.ones(6))
    assert isinstance(product, dict)
    assert product["weight"].shape == (2, 2)


def test_a_rectangular_operator_returns_a_tensor_for_params() -> None:
    matrix = torch.randn(4, 6)
    check_operator(from_matrix(matrix, SPACE), matrix)
    product = from_matrix(matrix, SPACE) @ SPACE.to_params(torch.ones(6))
    assert isinstance(product, Tensor)
    torch.testing.assert_close(product, matrix.sum(1))


def test_the_space_survives_expressions() -> None:
    J = from_matrix(torch.randn(4, 6), SPACE)
    G = 2.0 * (J.T @ J).damped(1.0) + Diagonal(torch.ones(6))
    assert G.space == SPACE
    assert (J @ J.T).space is None
    assert isinstance(G @ SPACE.to_params(torch.ones(6)), dict)


def test_one_product_each_in_an_expression() -> None:
    A, B = (CountingOperator(from_matrix(torch.randn(3, 3))) for _ in range(2))
    expression = (2.0 * (A @ B)).damped(1.0) + A.T
    assert (expression @ torch.ones(3, 5)).shape == (3, 5)
    assert (A.products, A.columns, B.products, A.T.products) == (1, 5, 1, 1)


def test_sums_are_opened() -> None:
    A = Diagonal(torch.ones(2))
    total = A + A + (A + A)
    assert isinstance(total, Sum)
    assert len(total.terms) == 4


def test_a_symmetric_function_is_its_own_transpose() -> None:
    A = FunctionOperator(lambda v: 2 * v, (3, 3), symmetric=True)
    assert A.T is A


def test_scipy_finds_the_eigenvalues() -> None:
    from scipy.sparse.linalg import eigsh

    matrix = torch.randn(12, 12).double()
    matrix = matrix @ matrix.T
    converted = from_matrix(matrix).to_scipy()
    largest = eigsh(converted, k=1, return_eigenvectors=False, v0=np.ones(12))
    assert float(largest[0]) == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-10)
    assert converted.dtype == np.float64


def test_flatten_and_unflatten_are_inverse() -> None:
    A = Diagonal(torch.ones(6), SPACE)
    params = SPACE.to_params(torch.arange(6.0))
    flat = flatten(A, params)
    assert torch.equal(flat, torch.arange(6.0))
    restored = unflatten(A, flat, params)
    assert isinstance(restored, dict)
    assert torch.equal(restored["bias"], params["bias"])
    assert unflatten(Diagonal(torch.ones(6)), flat, flat) is flat


def test_repr_names_shape_and_type() -> None:
    composed: LinearOperator = Composition(Diagonal(torch.ones(2)), Diagonal(torch.ones(2)))
    assert repr(composed) == "Composition(2 x 2, torch.float32, cpu)"


def test_gradients_flow_through_products() -> None:
    values = torch.ones(2, requires_grad=True)
    total = (2.0 * Diagonal(values) @ torch.tensor([1.0, 3.0])).sum()
    assert torch.equal(torch.autograd.grad(total, values)[0], torch.tensor([2.0, 6.0]))
