"""Merging sums of Kronecker products: exact where it can be, never counting the past twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg import Kronecker, merge

METHODS = ["svd", "kl", "count"]


def positive(n: int) -> Tensor:
    factor = torch.randn(n, 2 * n).double()
    return factor @ factor.T / n


def products(count: int, n: int = 3, m: int = 2) -> list[Kronecker]:
    """Random terms."""
    return [Kronecker(positive(n), positive(m)) for _ in range(count)]


def total(terms: list[Kronecker]) -> Tensor:
    """The sum as a matrix."""
    return torch.stack([term.dense() for term in terms]).sum(0)


def merged(terms: list[Kronecker], method: str) -> Kronecker:
    """The sum by a method, with equal counts where they are wanted."""
    return merge(terms, method, [10.0] * len(terms))


@pytest.mark.parametrize("method", METHODS)
@given(st.integers(1, 5))
def test_equal_terms_count_as_often_as_they_are(method: str, count: int) -> None:
    term = products(1)[0]
    torch.testing.assert_close(
        merged([term] * count, method).dense(), count * term.dense(), rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("method", METHODS)
def test_terms_merged_one_by_one_do_not_grow_beyond_the_sum(method: str) -> None:
    term = products(1)[0]
    running: Kronecker = term
    for step in range(2, 6):
        running = merge([running, term], method, [10.0 * (step - 1), 10.0])
        torch.testing.assert_close(running.dense(), step * term.dense(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", ["svd", "kl"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_common_factor_merges_exactly(method: str, side: str) -> None:
    common = positive(3)
    pairs = [(common, positive(3)) if side == "left" else (positive(3), common) for _ in range(4)]
    terms = [Kronecker(left, right) for left, right in pairs]
    torch.testing.assert_close(merged(terms, method).dense(), total(terms), rtol=1e-6, atol=1e-9)


@given(st.integers(2, 5))
def test_svd_is_the_nearest_product(count: int) -> None:
    terms = products(count)
    wanted = total(terms)
    nearest = merge(terms, "svd")
    # The error of the best rank-1 approximation of the rearranged sum (Van Loan and Pitsianis 1993).
    rearranged = wanted.reshape(3, 2, 3, 2).permute(0, 2, 1, 3).reshape(9, 4)
    bound = torch.linalg.svdvals(rearranged)[1:].norm()
    assert float((nearest.dense() - wanted).norm()) == pytest.approx(float(bound), rel=1e-8)


def test_svd_of_positive_terms_is_positive() -> None:
    nearest = merge(products(4), "svd")
    assert float(torch.linalg.eigvalsh(nearest.left)[0]) > 0
    assert float(torch.linalg.eigvalsh(nearest.right)[0]) > 0


def divergence(precision: Tensor, other: Tensor) -> float:
    """KL(N(0, P⁻¹) ‖ N(0, S⁻¹)) up to constants: ½ (tr S P⁻¹ − log det S P⁻¹)."""
    ratio = other @ torch.linalg.inv(precision)
    return 0.5 * float(ratio.trace() - torch.logdet(ratio))


def test_kl_is_a_minimum() -> None:
    terms = products(3)
    wanted, nearest = total(terms), merge(terms, "kl")
    best = divergence(nearest.dense(), wanted)
    assert best < divergence(merge(terms, "svd").dense(), wanted)
    for _ in range(20):
        moved = Kronecker(nearest.left + 1e-3 * positive(3), nearest.right + 1e-3 * positive(2))
        assert divergence(moved.dense(), wanted) > best
        moved = Kronecker(nearest.left - 1e-3 * positive(3), nearest.right)
        assert divergence(moved.dense(), wanted) > best


def test_kl_says_when_it_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linnet.linalg.kronecker._KL_STEPS", 1)
    with pytest.raises(NumericalError, match="method='svd'"):
        merge(products(3), "kl")


def test_counts_weigh_the_right_factors() -> None:
    first, second = products(2)
    merged_terms = merge([first, second], "count", counts=[30, 10])
    left, right = first.left + second.left, 0.75 * first.right + 0.25 * second.right
    torch.testing.assert_close(merged_terms.dense(), torch.kron(left, right), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_the_sum_does_not_depend_on_the_order_of_terms(method: str) -> None:
    terms = products(3)
    one, other = merged(terms, method).dense(), merged(terms[::-1], method).dense()
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_float32_terms_give_float32() -> None:
    term = Kronecker(torch.eye(2), torch.eye(3))
    assert merge([term, term], "svd").dtype == torch.float32
    torch.testing.assert_close(merge([term, term], "svd").dense(), 2 * torch.eye(6))


def test_zero_terms_merge_to_zero() -> None:
    zero = Kronecker(torch.zeros(2, 2), torch.zeros(2, 2))
    assert torch.equal(merge([zero, zero], "svd").dense(), torch.zeros(4, 4))
