"""Low rank plus diagonal: the spectral form, its accuracy, and its closure under every operation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg import LowRankMatrix, ParameterSpace
from tests.oracles.conformance import check_operator

ranks = st.integers(1, 8)


def dense(factor: Tensor, weights: Tensor, diagonal: Tensor) -> Tensor:
    """U diag(w) Uᵀ + diag(d)."""
    return (factor * weights) @ factor.T + diagonal.diag()


@given(ranks, st.sampled_from([0.0, 0.5]), st.sampled_from([torch.float32, torch.float64]))
def test_a_multiple_of_the_identity_plus_low_rank_conforms(
    rank: int, rest: float, dtype: torch.dtype
) -> None:
    factor = torch.randn(6, rank, dtype=dtype)
    wanted = factor @ factor.T + rest * torch.eye(6, dtype=dtype)
    check_operator(LowRankMatrix.from_factor(factor, diagonal=rest), wanted)


@given(ranks)
def test_a_diagonal_plus_low_rank_conforms(rank: int) -> None:
    factor, diagonal = torch.randn(6, rank).double(), torch.rand(6).double() + 0.5
    wanted = dense(factor, torch.ones(rank).double(), diagonal)
    M = LowRankMatrix.from_factor(factor, diagonal=diagonal, space=ParameterSpace({"weight": (2, 3)}))
    check_operator(M, wanted)
    check_operator(M.damped(0.3).damped(0.4), wanted + 0.7 * torch.eye(6).double())
    check_operator(M.inverse().damped(0.3), torch.linalg.inv(wanted) + 0.3 * torch.eye(6).double())


def test_weights_may_be_negative_while_the_sum_is_positive() -> None:
    factor = torch.linalg.qr(torch.randn(5, 2).double()).Q
    weights, diagonal = torch.tensor([3.0, -0.5]).double(), torch.ones(5).double()
    check_operator(LowRankMatrix.from_factor(factor, weights, diagonal), dense(factor, weights, diagonal))
    check_operator(LowRankMatrix.from_factor(factor, weights, 1.0), dense(factor, weights, diagonal))
    with pytest.raises(NumericalError, match=r"-0\.5"):
        LowRankMatrix.from_factor(factor, weights, 0.0, name="my G")


def test_the_inverse_is_accurate_where_woodbury_in_float32_is_not() -> None:
    factor = 1e4 * torch.linalg.qr(torch.randn(50, 3).double()).Q
    exact = torch.linalg.inv(factor @ factor.T + torch.eye(50).double())
    rows = (factor / 1e4).T  # directions that the data determine: variance 1e-8
    M = LowRankMatrix.from_factor(factor.float(), diagonal=1.0).inverse()
    variance = M.quadratic(rows.float()).diagonal().double()
    torch.testing.assert_close(variance, (rows @ exact @ rows.T).diagonal(), rtol=1e-4, atol=0.0)


def test_full_rank_needs_no_rest() -> None:
    q = torch.linalg.qr(torch.randn(3, 3).double()).Q
    values = torch.tensor([1.0, 2.0, 3.0]).double()
    check_operator(LowRankMatrix(q, values), (q * values) @ q.T)


def test_the_spectral_form_is_taken_as_given() -> None:
    basis = torch.eye(4)[:, :1].double()
    M = LowRankMatrix(
        basis, torch.tensor([5.0]).double(), rest=2.0, scale=torch.tensor([1.0, 2.0, 1.0, 1.0]).double()
    )
    assert torch.equal(M.dense(), torch.diag(torch.tensor([5.0, 8.0, 2.0, 2.0])).double())
