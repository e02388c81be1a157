"""Kronecker products, alone, in groups and with a diagonal factor, against their dense matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.distributed import Share
from linnet.linalg import (
    Kronecker,
    KroneckerEigen,
    ParameterSpace,
    StructuredOperator,
    factored_damping,
    factorize,
)
from linnet.linalg.kronecker import eigenbases, kron_mm
from tests.oracles.conformance import check_operator

sizes = st.integers(1, 4)
dtypes = st.sampled_from([torch.float32, torch.float64])
kinds = st.sampled_from(["alone", "groups", "left", "right"])  # the last two: which factor is a diagonal
groups = st.sampled_from([(), (1,), (3,)])


def positive(*shape: int, dtype: torch.dtype = torch.float64, rank: int | None = None) -> Tensor:
    """Well conditioned positive definite matrices (..., n, n), or singular ones of some rank."""
    n = shape[-1]
    factor = torch.randn(*shape, 2 * n + 2 if rank is None else rank, dtype=dtype)
    return factor @ factor.mT / n


def factors(kind: str, n: int, m: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """L and R of a kind."""
    lead = (3,) if kind == "groups" else ()
    left, right = positive(*lead, n, dtype=dtype), positive(*lead, m, dtype=dtype)
    if kind == "left":
        left = left.diagonal()
    return left, right.diagonal() if kind == "right" else right


def product(left: Tensor, right: Tensor) -> StructuredOperator:
    """L ⊗ R."""
    if left.ndim == right.ndim:
        return Kronecker(left, right, name="G")
    return KroneckerEigen.half_diagonal(left, right, "G")


def dense(left: Tensor, right: Tensor) -> Tensor:
    """The same, formed."""
    left, right = (t.diag() if t.ndim == 1 else t for t in (left, right))
    pairs = zip(left.view(-1, *left.shape[-2:]), right.view(-1, *right.shape[-2:]), strict=True)
    return torch.block_diag(*(torch.kron(a, b) for a, b in pairs))  # type: ignore[no-untyped-call]


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@given(kinds, sizes, sizes, dtypes)
def test_products_conform(kind: str, n: int, m: int, dtype: torch.dtype) -> None:
    left, right = factors(kind, n, m, dtype)
    M = product(left, right)
    check_operator(M, dense(left, right))
    if isinstance(M, Kronecker):
        check_operator(KroneckerEigen.of(M), dense(left, right))


def test_singular_products_conform_where_no_inverse_is_needed() -> None:
    one, two = positive(3, rank=1), positive(2)
    several, others = positive(3, 3), positive(3, 2)
    several[1], others[2] = one, 0.0
    for left, right in ((one, two), (several, others), (torch.tensor([0.0, 2.0]).double(), one)):
        check_operator(product(left, right), dense(left, right))
    check_operator(KroneckerEigen.of(Kronecker(several, others)), dense(several, others))


@pytest.mark.parametrize("lead", [(), (2,)])
def test_the_layout_is_that_of_a_weight(lead: tuple[int, ...]) -> None:
    # the gradient of a weight (d_out, d_in) in one example is g aᵀ in each group, flattened by rows
    g, a = torch.randn(*lead, 3, 1).double(), torch.randn(*lead, 4, 1).double()
    gradients = (g @ a.mT).view(-1, 12)
    wanted = torch.block_diag(*(torch.outer(v, v) for v in gradients))  # type: ignore[no-untyped-call]
    near(Kronecker(g @ g.mT, a @ a.mT).dense(), wanted)


@given(kinds, sizes, sizes, st.floats(0.01, 10))
def test_exact_damping_is_exact(kind: str, n: int, m: int, tau: float) -> None:
    left, right = factors(kind, n, m)
    wanted = dense(left, right)
    check_operator(product(left, right).damped(tau), wanted + tau * torch.eye(len(wanted)).double())


@given(groups, sizes, sizes, st.floats(0.01, 10))
def test_factored_damping_has_the_residual_of_equation_4_26(
    lead: tuple[int, ...], n: int, m: int, tau: float
) -> None:
    scales = torch.logspace(-3, 3, lead[0] if lead else 1).double().view(*lead, 1, 1)  # each has its own ω
    left, right = scales.view(*lead, 1, 1) * positive(*lead, n), positive(*lead, m)
    left = left.view(*lead, n, n)
    damped = factored_damping(Kronecker(left, right), tau).dense()
    for r, (one, other) in enumerate(zip(left.view(-1, n, n), right.view(-1, m, m), strict=True)):
        omega = sqrt(float(other.trace()) / m / (float(one.trace()) / n))
        identity_left, identity_right = torch.eye(n).double(), torch.eye(m).double()
        residual = omega * torch.kron(one, identity_right) + torch.kron(identity_left, other) / omega
        wanted = torch.kron(one, other) + tau * torch.eye(n * m).double() + sqrt(tau) * residual
        own = slice(r * n * m, (r + 1) * n * m)
        torch.testing.assert_close(damped[own, own], wanted, rtol=1e-9, atol=1e-9)


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
    near(one, factored_damping(Kronecker(c * left, right / c), 0.3).dense())


def test_factored_damping_of_a_zero_factor_is_the_damping() -> None:
    left, right = positive(4, 2), positive(4, 3)
    left[0], right[1], left[2], right[2] = 0.0, 0.0, 0.0, 0.0
    before = left.clone(), right.clone()
    damped = factored_damping(Kronecker(left, right), 0.25).dense()
    near(damped[:18, :18], 0.25 * torch.eye(18).double())
    assert torch.equal(left, before[0])
    assert torch.equal(right, before[1])


@given(kinds, sizes, sizes)
def test_corrected_eigenvalues_are_the_diagonal_in_the_eigenbasis(kind: str, n: int, m: int) -> None:
    left, right = factors(kind, n, m)
    M = product(left, right)
    basis = M if isinstance(M, KroneckerEigen) else KroneckerEigen.of(Kronecker(left, right))
    gradients = torch.randn(7, *left.shape[:-2], n, m).double()  # (N, d_out, d_in)
    corrected = basis.with_values(basis.rotate(gradients).square().sum(0))
    q = dense(*(torch.eye(k).double() if s is None else s for s, k in zip(basis.sides, (n, m), strict=True)))
    flat = gradients.flatten(1)
    eigenvalues = (q.T @ flat.T @ flat @ q).diagonal()
    near(corrected.values.flatten(), eigenvalues)
    check_operator(corrected, q @ eigenvalues.diag() @ q.T)


def test_corrected_eigenvalues_are_nearer_than_the_product() -> None:
    gradients = torch.randn(20, 3, 4).double() * torch.rand(20, 1, 1).double() ** 3
    fisher = torch.einsum("nij,nkl->ijkl", gradients, gradients).reshape(12, 12)
    left = torch.einsum("nij,nkj->ik", gradients, gradients)
    one = Kronecker(left, torch.einsum("nij,nik->jk", gradients, gradients) / float(left.trace()))
    basis = KroneckerEigen.of(one)
    corrected = basis.with_values((basis.rotate(gradients) ** 2).sum(0))
    assert float((corrected.dense() - fisher).norm()) < float((one.dense() - fisher).norm())


@given(groups, sizes, sizes, sizes, sizes)
def test_products_take_rectangular_factors(lead: tuple[int, ...], p: int, n: int, q: int, m: int) -> None:
    left, right = torch.randn(*lead, p, n).double(), torch.randn(*lead, q, m).double()
    v = torch.randn((lead or (1,))[0] * n * m, 2).double()
    near(kron_mm(left, right, v), dense(left, right) @ v)


@pytest.mark.parametrize("lead", [(), (2,)])
def test_a_space_and_a_name_are_kept_by_every_operation(lead: tuple[int, ...]) -> None:
    space = ParameterSpace({"weight": (*lead, 1, 3)})
    M = Kronecker(positive(*lead, 1), positive(*lead, 3), space, "G of fc1")
    for each in (M, M.damped(0.5)):
        changed = [each.damped(1.0), each.scaled(2.0), each.inverse(), 2.0 * each]
        assert [other.space for other in changed] == [space] * 4
    assert factored_damping(M, 1.0).space == space
    assert M.damped(1.0).name == "G of fc1"
    assert M.inverse().name == "inverse of G of fc1"


def test_a_thousand_groups_are_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"cholesky_ex": 0, "eigh": 0}

    def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            counts[name] += 1
            return function(*args)

        return call

    for name in counts:
        monkeypatch.setattr(torch.linalg, name, counted(name, getattr(torch.linalg, name)))
    M = Kronecker(positive(1000, 1), positive(1000, 9))
    b = torch.randn(9000, 2).double()
    near(M @ M.solve(b), b, 1e-8)
    near(M.damped(0.1).solve(b), M.damped(0.1).inverse() @ b, 1e-8)
    assert counts == {"cholesky_ex": 2, "eigh": 4}


# -- eigendecompositions that processes share ------------------------------------------------------

PRODUCTS = [Kronecker(positive(3), positive(4), name="one"), Kronecker(positive(2, 3), positive(2, 2))]


def test_one_process_decomposes_all() -> None:
    for one, whole in zip(eigenbases(PRODUCTS, Share()), PRODUCTS, strict=True):
        assert one.name == whole.name
        near(one.dense(), whole.dense())


@pytest.mark.parametrize("size", [2, 3, 7])
def test_each_factor_has_one_owner(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is exchanged is replaced: each process fills its own, and the others take it."""
    found: dict[int, list[list[Tensor]]] = {}
    decomposed: list[str] = []
    eigh = factorize.eigh

    def counting(matrix: Tensor, name: str) -> tuple[Tensor, Tensor]:
        decomposed.append(name)
        return eigh(matrix, name)

    def exchanged(parts: Sequence[Sequence[Tensor]]) -> None:
        found[len(found)] = [[t for t in part] for part in parts]

    monkeypatch.setattr(factorize, "eigh", counting)
    monkeypatch.setattr(factorize, "all_filled", exchanged)
    matrices = [factor for one in PRODUCTS for factor in (one.left, one.right)]
    names = [f"matrix {i}" for i in range(len(matrices))]
    results = [factorize.shared_eigh(matrices, names, Share(rank, size)) for rank in range(size)]
    assert sorted(decomposed) == sorted(names)
    for rank in range(size):  # of all processes, those of each one's own
        for other in range(size):
            for theirs, own in zip(found[other][rank], found[rank][rank], strict=True):
                theirs.copy_(own)
    for pairs in results:
        for (values, vectors), matrix in zip(pairs, matrices, strict=True):
            assert torch.allclose((vectors * values[..., None, :]) @ vectors.mT, matrix, atol=1e-12)
