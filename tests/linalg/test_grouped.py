"""Kronecker products by group against the dense block diagonal, and against one product at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg import (
    BlockDiagonal,
    GroupedKronecker,
    GroupedKroneckerEigen,
    Kronecker,
    KroneckerEigen,
    ParameterSpace,
    factored_damping,
    grouped_factored_damping,
)
from linnet.linalg.factorize import cholesky, nonnegative_each, root
from linnet.linalg.grouped import grouped_mm
from tests.oracles.conformance import check_operator

sizes = st.integers(1, 4)
dtypes = st.sampled_from([torch.float32, torch.float64])


def positive(groups: int, n: int, dtype: torch.dtype = torch.float64, rank: int | None = None) -> Tensor:
    """Well conditioned positive definite matrices, or singular ones of some rank."""
    factor = torch.randn(groups, n, 2 * n + 2 if rank is None else rank, dtype=dtype)
    return factor @ factor.mT / n


def dense(left: Tensor, right: Tensor) -> Tensor:
    """The block diagonal matrix, formed."""
    return torch.block_diag(*map(torch.kron, left, right))  # type: ignore[no-untyped-call]


def single(product: GroupedKronecker) -> BlockDiagonal:
    """The same matrix, one Kronecker product after the other."""
    return BlockDiagonal(list(map(Kronecker, product.left, product.right)))


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@given(sizes, sizes, sizes, dtypes)
def test_grouped_products_conform(groups: int, n: int, m: int, dtype: torch.dtype) -> None:
    left, right = positive(groups, n, dtype), positive(groups, m, dtype)
    product = GroupedKronecker(left, right, ParameterSpace({"weight": (groups * n, m)}))
    check_operator(product, dense(left, right))
    check_operator(GroupedKroneckerEigen.of(product), dense(left, right))


def test_one_singular_group_conforms_where_no_inverse_is_needed() -> None:
    left, right = positive(3, 3), positive(3, 2)
    left[1] = positive(1, 3, rank=1)[0]
    right[2] = 0.0
    check_operator(GroupedKronecker(left, right), dense(left, right))
    check_operator(GroupedKroneckerEigen.of(GroupedKronecker(left, right)), dense(left, right))


def test_the_layout_is_that_of_a_grouped_weight() -> None:
    # one example of a convolution with 2 groups: the weight (2·3, 4) has a gradient g_r aᵀ_r in each group
    g, a = torch.randn(2, 3, 1).double(), torch.randn(2, 4, 1).double()
    gradient = (g @ a.mT).flatten()
    M = GroupedKronecker(g @ g.mT, a @ a.mT).dense()
    near(M[:12, :12], torch.outer(gradient[:12], gradient[:12]))
    near(M[12:, 12:], torch.outer(gradient[12:], gradient[12:]))
    assert not M[:12, 12:].any()


@given(sizes, sizes, sizes, st.floats(0.01, 10))
def test_everything_is_as_one_product_after_the_other(groups: int, n: int, m: int, tau: float) -> None:
    grouped = GroupedKronecker(positive(groups, n), positive(groups, m))
    each, b = single(grouped), torch.randn(groups * n * m, 3).double()
    near(grouped.damped(tau).dense(), each.damped(tau).dense())
    near(grouped.damped(tau).solve(b), each.damped(tau).solve(b), 1e-8)
    near(grouped.solve(b), each.solve(b), 1e-8)
    near(grouped.inverse().dense(), each.inverse().dense(), 1e-8)
    near(grouped.logdet(), each.logdet())
    near(grouped.quadratic(b.T), each.quadratic(b.T))
    near(grouped.inverse().inverse().dense(), grouped.dense(), 1e-8)


@given(sizes, sizes, sizes, st.floats(0.0, 10))
def test_factored_damping_is_that_of_every_group(groups: int, n: int, m: int, tau: float) -> None:
    scales = torch.logspace(-3, 3, groups).double()[:, None, None]  # every group has an ω of its own
    grouped = GroupedKronecker(scales * positive(groups, n), positive(groups, m))
    products = map(Kronecker, grouped.left, grouped.right)
    expected = [factored_damping(product, tau) for product in products]
    damped = grouped_factored_damping(grouped, tau)
    near(damped.left, torch.stack([each.left for each in expected]))
    near(damped.right, torch.stack([each.right for each in expected]))


def test_factored_damping_is_exact_for_groups_that_are_zero() -> None:
    left, right = positive(3, 2), positive(3, 3)
    left[0], right[2] = 0.0, 0.0
    damped = grouped_factored_damping(GroupedKronecker(left, right), 0.25).dense()
    near(damped[:6, :6], 0.25 * torch.eye(6).double())
    near(damped[12:, 12:], 0.25 * torch.eye(6).double())
    assert bool(damped.isfinite().all())


@given(sizes, sizes, sizes)
def test_rotation_and_corrected_values(groups: int, n: int, m: int) -> None:
    gradients = torch.randn(7, groups, n, m).double()
    basis = GroupedKroneckerEigen.of(GroupedKronecker(positive(groups, n), positive(groups, m)))
    corrected = basis.with_values((basis.rotate(gradients) ** 2).sum(0))
    blocks = []
    for r in range(groups):
        one = KroneckerEigen(basis.left_vectors[r], basis.right_vectors[r], basis.values[r])
        near(basis.rotate(gradients)[:, r], one.rotate(gradients[:, r]))
        blocks.append(one.with_values((one.rotate(gradients[:, r]) ** 2).sum(0)))
    near(corrected.dense(), BlockDiagonal(blocks).dense())
    near(basis.rotate(gradients[0]), basis.rotate(gradients)[0])


@given(sizes, sizes, sizes, sizes, sizes)
def test_grouped_mm_takes_rectangular_factors(r: int, p: int, n: int, q: int, m: int) -> None:
    left, right = torch.randn(r, p, n).double(), torch.randn(r, q, m).double()
    v = torch.randn(r * n * m, 2).double()
    near(grouped_mm(left, right, v), dense(left, right) @ v)


def test_samples_have_the_covariance_of_the_matrix() -> None:
    M = GroupedKronecker(positive(2, 2), positive(2, 2))
    samples = M.sample(40_000, 0)
    assert torch.equal(samples, M.sample(40_000, 0))
    near(samples.T @ samples / 40_000 / M.trace(), M.dense() / M.trace(), 0.02)


def test_a_space_and_a_name_are_kept_by_every_operation() -> None:
    space = ParameterSpace({"weight": (2, 1, 3)})
    M = GroupedKronecker(positive(2, 1), positive(2, 3), space, "G of conv1")
    for each in (M, M.damped(0.5)):
        changed = [each.damped(1.0), each.scaled(2.0), each.inverse(), 2.0 * each]
        assert [other.space for other in changed] == [space] * 4
    assert grouped_factored_damping(M, 1.0).space == space
    assert M.damped(1.0).name == "G of conv1"
    assert M.inverse().name == "inverse of G of conv1"


def test_a_thousand_groups_are_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"cholesky": 0, "eigh": 0}

    def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            counts[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted("cholesky", torch.linalg.cholesky_ex))
    monkeypatch.setattr(torch.linalg, "eigh", counted("eigh", torch.linalg.eigh))
    M = GroupedKronecker(positive(1000, 1), positive(1000, 9))
    b = torch.randn(9000, 2).double()
    near(M @ M.solve(b), b, 1e-8)
    near(M.damped(0.1).solve(b), M.damped(0.1).inverse() @ b, 1e-8)
    assert counts == {"cholesky": 2, "eigh": 4}


def test_a_group_is_judged_by_its_own_size() -> None:
    # −1e-6 is rounding beside the first group's 1e12, and no rounding beside the second one's 1
    assert float(nonnegative_each(torch.tensor([[1e12, -1e-6], [1.0, 2.0]]).double())[0, 1]) == 0.0
    with pytest.raises(NumericalError, match="-1e-06"):
        nonnegative_each(torch.tensor([[1e12, 1.0], [1.0, -1e-6]]).double(), "G")
    assert nonnegative_each(torch.zeros(3, 2)).shape == (3, 2)
    assert nonnegative_each(torch.zeros(0, 2)).shape == (0, 2)


def test_only_the_singular_group_gets_jitter(caplog: pytest.LogCaptureFixture) -> None:
    batch = positive(3, 4)
    batch[1] = torch.ones(4, 4)
    with caplog.at_level(logging.WARNING, logger="linnet"):
        factor = cholesky(batch, "factors of conv1")
    assert torch.equal(factor[::2], torch.linalg.cholesky(batch[::2]))
    near(factor[1] @ factor[1].mT, batch[1], 1e-6)
    assert [record.args[0] for record in caplog.records if record.args] == ["factors of conv1"]


def test_roots_of_a_batch_with_a_singular_matrix() -> None:
    batch = torch.stack([positive(1, 3)[0], positive(1, 3, rank=1)[0], torch.zeros(3, 3).double()])
    near(root(batch) @ root(batch).mT, batch)
