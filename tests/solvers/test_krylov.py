"""Block Krylov spaces and partial Cholesky factors against dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linnet.linalg import Dense
from linnet.solvers.lanczos import krylov
from linnet.solvers.nystrom import pivoted_cholesky
from tests.oracles.conformance import CountingOperator


def matrix(n: int = 20, rank: int = 20, repeat: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Positive semi-definite, with eigenvalues that fall by a third and occur ``repeat`` times."""
    q = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    values = torch.zeros(n, dtype=torch.float64)
    values[:rank] = 100 * (2 / 3) ** torch.arange(rank).div(repeat, rounding_mode="floor").double()
    a = (q * values) @ q.T
    return ((a + a.T) / 2).to(dtype)


def approximations(a: Tensor, block: int, rank: int) -> tuple[Tensor, Tensor]:
    found = krylov(Dense(a), block, rank, seed=0)
    assert torch.allclose(
        found.basis.T @ found.basis, torch.eye(found.basis.shape[1], dtype=a.dtype), atol=1e-5
    )
    pairs = []
    for values, e in (found.ritz(), found.nystrom()):
        u = found.basis.double() @ e
        pairs.append((u * values) @ u.T)
    return pairs[0], pairs[1]


@pytest.mark.parametrize("block", [1, 3])
def test_the_whole_space_is_the_matrix(block: int) -> None:
    a = matrix()
    for approximation in approximations(a, block, 20):
        assert torch.allclose(approximation, a, atol=1e-9)


def test_the_nystrom_form_is_below_the_matrix_and_closer_with_rank() -> None:
    a, gaps = matrix(), []
    for rank in (4, 8, 12):
        _, below = approximations(a, 2, rank)
        left = a - below
        assert float(torch.linalg.eigvalsh(left).min()) > -1e-8
        gaps.append(float(left.trace()))
    assert gaps[0] > gaps[1] > gaps[2]


def test_the_galerkin_form_understates_the_inverse() -> None:
    a, rho = matrix(), 0.5
    found = krylov(Dense(a), 2, 10, seed=0)
    values, e = found.ritz()
    u = found.basis @ e
    inverse = torch.linalg.inv(a + rho * torch.eye(20, dtype=a.dtype))
    assert float(torch.linalg.eigvalsh(inverse - (u / (values + rho)) @ u.T).min()) > -1e-10


def test_repeated_eigenvalues_need_a_block_of_as_many() -> None:
    a = matrix(24, 12, repeat=3)
    _, alone = approximations(a, 1, 8)
    _, together = approximations(a, 3, 18)
    assert float((a - alone).trace()) > 50
    assert torch.allclose(together, a, atol=1e-4)


def test_a_low_rank_matrix_in_float32_is_not_overstated() -> None:
    a = matrix(40, 6, dtype=torch.float32)
    _, below = approximations(a, 2, 24)
    assert float(torch.linalg.eigvalsh(a.double() - below).min()) > -1e-2
    assert float((a.double() - below).trace()) < 0.1


def test_it_stops_when_the_trace_is_enough_and_counts_its_products() -> None:
    a = matrix()
    counting = CountingOperator(Dense(a))
    found = krylov(counting, 2, 20, enough=0.9 * float(a.trace()), seed=0)
    assert 0.9 * float(a.trace()) <= found.trace < float(a.trace())
    assert found.basis.shape[1] < 20
    assert found.products == counting.products == found.basis.shape[1] // 2


def test_the_partial_cholesky_factor_is_below_the_matrix_and_exact_at_full_rank() -> None:
    a, gaps = matrix(), []
    for rank in (3, 6, 20):
        factor = pivoted_cholesky(a.diagonal(), lambda i: a[i], rank)
        assert factor.shape[1] <= rank
        left = a - factor @ factor.T
        assert float(torch.linalg.eigvalsh(left).min()) > -1e-8
        gaps.append(float(left.trace()))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-6
    low = matrix(20, 5)
    assert pivoted_cholesky(low.diagonal(), lambda i: low[i], 20).shape[1] <= 6
    assert pivoted_cholesky(a.diagonal(), lambda i: a[i], 20, tolerance=0.5).shape[1] < 6
