"""Kronecker products: layout, exact and factored damping, corrected eigenvalues."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.linalg import Kronecker, KroneckerEigen, ParameterSpace, factored_damping
from linnet.linalg.kronecker import kron_mm
from tests.oracles.conformance import check_operator

sizes = st.integers(1, 4)
dtypes = st.sampled_from([torch.float32, torch.float64])


def positive(n: int, dtype: torch.dtype = torch.float64, rank: int | None = None) -> Tensor:
    """A well conditioned positive definite matrix, or a singular one of some rank."""
    factor = torch.randn(n, 2 * n + 2 if rank is None else rank, dtype=dtype)
    return factor @ factor.T / n


def identity(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


@given(sizes, sizes, dtypes)
def test_products_conform(n: int, m: int, dtype: torch.dtype) -> None:
    left, right = positive(n, dtype), positive(m, dtype)
    space = ParameterSpace({"weight": (n, m)})
    check_operator(Kronecker(left, right, space), torch.kron(left, right))
    check_operator(KroneckerEigen.of(Kronecker(left, right, space)), torch.kron(left, right))


def test_singular_products_conform() -> None:
    left, right = positive(3, rank=1), positive(2)
    check_operator(Kronecker(left, right), torch.kron(left, right))
    check_operator(KroneckerEigen.of(Kronecker(left, right)), torch.kron(left, right))


def test_the_layout_is_that_of_a_weight() -> None:
    # One example of a linear layer: the gradient of the weight (d_out, d_in) is g aᵀ, flattened by rows.
    g, a = torch.randn(3).double(), torch.randn(4).double()
    gradient = torch.outer(g, a).flatten()
    M = Kronecker(torch.outer(g, g), torch.outer(a, a))
    torch.testing.assert_close(M.dense(), torch.outer(gradient, gradient), rtol=1e-12, atol=1e-12)


@given(sizes, sizes, st.floats(0.01, 10))
def test_exact_damping_is_exact(n: int, m: int, tau: float) -> None:
    left, right = positive(n), positive(m)
    damped = Kronecker(left, right).damped(tau)
    wanted = torch.kron(left, right) + tau * identity(n * m)
    torch.testing.assert_close(damped.dense(), wanted, rtol=1e-10, atol=1e-10)
    b = torch.ones(n * m).double()
    solution = damped.solve(b)
    assert isinstance(solution, Tensor)
    torch.testing.assert_close(wanted @ solution, b, rtol=1e-9, atol=1e-9)


def test_exact_damping_needs_no_regular_factors() -> None:
    damped = Kronecker(positive(3, rank=1), torch.zeros(2, 2).double()).damped(0.5)
    torch.testing.assert_close(damped.inverse().dense(), 2 * identity(6), rtol=1e-12, atol=1e-12)


@given(sizes, sizes, st.floats(0.01, 10))
def test_factored_damping_has_the_residual_of_equation_4_26(n: int, m: int, tau: float) -> None:
    left, right = positive(n), positive(m)
    omega = sqrt(float(right.trace()) / m / (float(left.trace()) / n))
    residual = omega * torch.kron(left, identity(m)) + torch.kron(identity(n), right) / omega
    wanted = torch.kron(left, right) + tau * identity(n * m) + sqrt(tau) * residual
    torch.testing.assert_close(
        factored_damping(Kronecker(left, right), tau).dense(), wanted, rtol=1e-10, atol=1e-10
    )


@given(sizes, sizes, st.floats(0.1, 10))
def test_the_ratio_minimizes_the_bound_of_equation_4_26(n: int, m: int, scale: float) -> None:
    left, right = positive(n), scale * positive(m)
    damped = factored_damping(Kronecker(left, right), 1.0)
    omega = float((damped.right - right).diagonal().mean())

    def bound(w: float) -> float:
        return w * float(left.trace()) * m + float(right.trace()) * n / w

    assert bound(omega) <= min(bound(0.99 * omega), bound(1.01 * omega))


@given(st.floats(0.01, 100))
def test_factored_damping_depends_on_the_product_not_on_how_it_is_split(c: float) -> None:
    left, right = positive(2), positive(3)
    one = factored_damping(Kronecker(left, right), 0.3).dense()
    other = factored_damping(Kronecker(c * left, right / c), 0.3).dense()
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("which", ["left", "right", "both"])
def test_factored_damping_of_a_zero_factor_is_the_damping(which: str) -> None:
    left = positive(2) if which == "right" else torch.zeros(2, 2).double()
    right = positive(3) if which == "left" else torch.zeros(3, 3).double()
    damped = factored_damping(Kronecker(left, right), 0.25)
    torch.testing.assert_close(damped.dense(), 0.25 * identity(6), rtol=1e-12, atol=1e-12)


def test_damping_leaves_the_factors_alone() -> None:
    left, right = positive(2), positive(3)
    before = left.clone(), right.clone()
    product = Kronecker(left, right)
    for _ in range(2):  # again and again, from the same factors
        damped = product.damped(1.0).dense(), factored_damping(product, 1.0).dense()
    assert torch.equal(left, before[0])
    assert torch.equal(right, before[1])
    torch.testing.assert_close(damped[0], torch.kron(*before) + identity(6), rtol=1e-10, atol=1e-10)


def test_corrected_eigenvalues_are_the_diagonal_in_the_eigenbasis() -> None:
    gradients = torch.randn(10, 2, 3).double()  # (N, d_out, d_in)
    fisher = torch.einsum("nij,nkl->ijkl", gradients, gradients).reshape(6, 6)
    basis = KroneckerEigen.of(Kronecker(positive(2), positive(3)))
    corrected = basis.with_values((basis.rotate(gradients) ** 2).sum(0))
    q = torch.kron(basis.left_vectors, basis.right_vectors)
    torch.testing.assert_close(
        corrected.values.flatten(), (q.T @ fisher @ q).diagonal(), rtol=1e-10, atol=1e-10
    )
    assert float(corrected.trace()) == pytest.approx(float(fisher.trace()), rel=1e-10)
    check_operator(corrected, q @ (q.T @ fisher @ q).diagonal().diag() @ q.T)


def test_corrected_eigenvalues_are_nearer_than_the_product() -> None:
    gradients = torch.randn(20, 3, 4).double() * torch.rand(20, 1, 1).double() ** 3
    fisher = torch.einsum("nij,nkl->ijkl", gradients, gradients).reshape(12, 12)
    left = torch.einsum("nij,nkj->ik", gradients, gradients)
    right = torch.einsum("nij,nik->jk", gradients, gradients) / float(left.trace())
    product = Kronecker(left, right)
    basis = KroneckerEigen.of(product)
    corrected = basis.with_values((basis.rotate(gradients) ** 2).sum(0))
    assert float((corrected.dense() - fisher).norm()) < float((product.dense() - fisher).norm())


@given(sizes, sizes, sizes, sizes)
def test_kron_mm_takes_rectangular_factors(p: int, n: int, q: int, m: int) -> None:
    left, right, v = torch.randn(p, n).double(), torch.randn(q, m).double(), torch.randn(n * m, 2).double()
    torch.testing.assert_close(kron_mm(left, right, v), torch.kron(left, right) @ v, rtol=1e-10, atol=1e-10)
