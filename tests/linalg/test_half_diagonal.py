"""Kronecker products with one diagonal side, against the dense product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.linalg import HalfDiagonal, KroneckerEigen, ParameterSpace
from tests.oracles.conformance import check_operator

sizes = st.integers(1, 4)
dtypes = st.sampled_from([torch.float32, torch.float64])
sides = st.sampled_from(["left", "right"])


def positive(n: int, dtype: torch.dtype = torch.float64, rank: int | None = None) -> Tensor:
    factor = torch.randn(n, 2 * n + 2 if rank is None else rank, dtype=dtype)
    return factor @ factor.T / n


def factors(n: int, m: int, side: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A vector on one side, a matrix on the other."""
    if side == "left":
        return torch.rand(n, dtype=dtype) + 0.1, positive(m, dtype)
    return positive(n, dtype), torch.rand(m, dtype=dtype) + 0.1


def dense(left: Tensor, right: Tensor) -> Tensor:
    """The product of both as matrices."""
    return torch.kron(*(t.diag() if t.ndim == 1 else t for t in (left, right)))


@given(sizes, sizes, sides, dtypes)
def test_products_conform(n: int, m: int, side: str, dtype: torch.dtype) -> None:
    left, right = factors(n, m, side, dtype)
    M = HalfDiagonal.of(left, right)
    assert M.side == side
    check_operator(M, dense(left, right))
    corrected = HalfDiagonal(M.vectors, M.values, side, ParameterSpace({"weight": (n, m)}))
    check_operator(corrected, dense(left, right))


def test_singular_products_conform() -> None:
    left, right = torch.tensor([0.0, 2.0, 1.0]).double(), positive(4, rank=1)
    check_operator(HalfDiagonal.of(left, right), dense(left, right))
    check_operator(HalfDiagonal.of(right, left), dense(right, left))


@given(sizes, sizes, sides, st.floats(0.01, 10))
def test_damping_is_exact(n: int, m: int, side: str, tau: float) -> None:
    left, right = factors(n, m, side)
    wanted = dense(left, right) + tau * torch.eye(n * m).double()
    check_operator(HalfDiagonal.of(left, right).damped(tau), wanted)


@pytest.mark.parametrize("side", ["left", "right"])
def test_it_is_the_product_with_an_identity_for_a_basis(side: str) -> None:
    """Whatever the eigenvalues: KroneckerEigen with I on the diagonal side."""
    values = torch.rand(3, 5).double()
    vectors = torch.linalg.qr(torch.randn(5 if side == "left" else 3, 5 if side == "left" else 3).double())[0]
    M = HalfDiagonal(vectors, values, side)
    left = torch.eye(3).double() if M.left_vectors is None else M.left_vectors
    right = torch.eye(5).double() if M.right_vectors is None else M.right_vectors
    expected = KroneckerEigen(left, right, values)
    check_operator(M, expected.dense())
    v = torch.randn(2, 3, 5).double()
    torch.testing.assert_close(M.rotate(v), expected.rotate(v))
    torch.testing.assert_close(M.with_values(2 * values).dense(), 2 * expected.dense())
