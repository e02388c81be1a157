"""The factorization ladder: precision, jitter, and an error that names the matrix."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import log10

import pytest
import torch
from torch import Tensor

import linnet
from linnet.errors import NumericalError
from linnet.linalg import factorize
from linnet.linalg.factorize import cholesky, eigh, nonnegative, root


def spd(n: int, condition: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """A symmetric matrix with eigenvalues from 1 down to 1/condition."""
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
    matrix: Tensor = (q * torch.logspace(0, -log10(condition), n, dtype=torch.float64)) @ q.T
    return ((matrix + matrix.T) / 2).to(dtype)


def test_cholesky_of_a_good_matrix_is_torch_own() -> None:
    matrix = spd(8, 10.0)
    assert torch.equal(cholesky(matrix), torch.linalg.cholesky(matrix))


def test_cholesky_of_a_batch() -> None:
    batch = torch.stack([spd(4, 10.0), spd(4, 100.0)])
    factor = cholesky(batch)
    torch.testing.assert_close(factor @ factor.mT, batch, rtol=1e-10, atol=1e-12)


def test_float64_saves_a_float32_matrix_without_jitter(caplog: pytest.LogCaptureFixture) -> None:
    # 1 + 1e-8 rounds to 1 in the float32 product of the pivot, not in float64.
    row = torch.tensor([[1.0, 1.0 - 2**-24], [1.0 - 2**-24, 1.0]], dtype=torch.float32)
    matrix = row + torch.tensor([[2**-23, 0.0], [0.0, 0.0]], dtype=torch.float32)
    assert factorize._try_cholesky(matrix.double()) is not None
    factor = cholesky(matrix)
    assert factor.dtype == torch.float32
    assert not caplog.records


def test_a_singular_matrix_gets_a_little_jitter_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ones = torch.ones(5, 5)
    with caplog.at_level(logging.WARNING, logger="linnet"):
        factor = cholesky(1e6 * ones, "factor A of layer fc1")
    torch.testing.assert_close(factor @ factor.T, 1e6 * ones, rtol=1e-5, atol=0.0)
    assert "factor A of layer fc1" in caplog.text


def test_jitter_is_relative_to_the_mean_diagonal() -> None:
    tiny, huge = cholesky(1e-30 * torch.ones(3, 3).double()), cholesky(1e30 * torch.ones(3, 3).double())
    torch.testing.assert_close(1e30 * tiny, huge, rtol=1e-3, atol=0.0)


def test_an_indefinite_matrix_is_named_with_its_smallest_eigenvalue() -> None:
    matrix = torch.diag(torch.tensor([1.0, -0.25, 3.0]))
    with pytest.raises(NumericalError, match=r"-0\.25"):
        cholesky(matrix, "factor B of conv2")


def test_half_precision_is_factorized_in_more() -> None:
    matrix = spd(4, 2.0).to(torch.bfloat16)
    factor = cholesky(matrix)
    assert factor.dtype == torch.bfloat16
    torch.testing.assert_close(factor @ factor.T, matrix, rtol=0.05, atol=0.02)
    values, vectors = eigh(matrix)
    assert values.dtype == vectors.dtype == torch.bfloat16


def test_eigh_gives_the_matrix_back() -> None:
    matrix = spd(12, 1e4)
    values, vectors = eigh(matrix)
    torch.testing.assert_close((vectors * values) @ vectors.T, matrix, rtol=1e-10, atol=1e-12)
    assert bool((values.diff() >= 0).all())


def test_large_matrices_are_decomposed_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = spd(20, 1e6, torch.float32)
    exact = torch.linalg.eigvalsh(matrix.double())
    monkeypatch.setattr(factorize, "_LARGE", 20)
    values, vectors = eigh(matrix)
    assert values.dtype == vectors.dtype == torch.float32
    assert torch.equal(values, exact.float())
    monkeypatch.setattr(factorize, "_LARGE", 21)
    assert not torch.equal(eigh(matrix)[0], exact.float())


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(40, 40), (3, 40, 40)])
def test_eigenvalues_in_float32(
    kind: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right to 16 units of roundoff of the largest; what is below that is not negative."""
    monkeypatch.setattr(factorize, "_LARGE", 40)
    matrix = torch.stack([spd(40, 10.0**k) for k in (2, 9, 14)])[: shape[0] if len(shape) == 3 else 1]
    matrix = matrix.reshape(shape).to(kind)
    exact = torch.linalg.eigvalsh(matrix.double())
    plain = eigh(matrix)
    with linnet.precision(decompositions="float32"):
        values, vectors = eigh(matrix)
        error = factorize.eigenvalue_error(exact.reshape(-1, 40)[0])
    assert values.dtype == vectors.dtype == kind
    assert not torch.equal(values, plain[0])
    size = exact.abs().amax(-1, keepdim=True)
    eps = torch.finfo(torch.float32).eps
    assert float(((values.double() - exact).abs() / size).max()) <= 16 * eps
    assert error == pytest.approx(16 * eps * float(exact.reshape(-1, 40)[0].max()))
    assert float(values.min()) >= 0
    eye = torch.eye(40, dtype=torch.float64)
    assert float((vectors.mT.double() @ vectors.double() - eye).abs().max()) <= 40 * eps
    assert torch.equal(eigh(matrix)[0], plain[0])
    assert factorize.eigenvalue_error(exact.reshape(-1, 40)[0]) == 0.0


def test_small_matrices_and_negative_eigenvalues_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    small = spd(20, 1e6)
    with linnet.precision(decompositions="float32"):
        assert torch.equal(eigh(small)[0], torch.linalg.eigh(small)[0])
        monkeypatch.setattr(factorize, "_LARGE", 4)
        values = eigh(torch.diag(torch.tensor([1.0, -1e-3, 2.0, -3.0], dtype=torch.float64)))[0]
    torch.testing.assert_close(
        values, torch.tensor([-3.0, -1e-3, 1.0, 2.0], dtype=torch.float64), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("wrong", ["values", "vectors", "nan"])
def test_a_wrong_float32_decomposition_is_made_in_float64(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_eigh: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.linalg.eigh

    def off_in_float32(matrix: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = true_eigh(matrix)
        if matrix.dtype == torch.float32:
            values = values * (1.01 if wrong == "values" else float("nan") if wrong == "nan" else 1)
            vectors = vectors * (1.01 if wrong == "vectors" else 1)
        return values, vectors

    matrix = spd(20, 1e3)
    monkeypatch.setattr(factorize, "_LARGE", 20)
    monkeypatch.setattr(torch.linalg, "eigh", off_in_float32)
    with linnet.precision(decompositions="float32"):
        assert torch.equal(eigh(matrix)[0], true_eigh(matrix)[0])


def test_eigh_tries_float64_when_it_fails_and_then_names_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    true_eigh: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.linalg.eigh

    def fails_in_float32(matrix: Tensor) -> tuple[Tensor, Tensor]:
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")  # type: ignore[attr-defined]
        return true_eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_float32)
    assert torch.equal(eigh(torch.eye(3))[0], torch.ones(3))
    monkeypatch.setattr(factorize, "_double", lambda matrix: matrix)
    with pytest.raises(NumericalError, match="my factor"):
        eigh(torch.eye(3), "my factor")


def test_eigh_does_not_take_nan_for_success(monkeypatch: pytest.MonkeyPatch) -> None:
    true_eigh: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.linalg.eigh

    def spoiled_in_float32(matrix: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = true_eigh(matrix)
        return (values * torch.nan, vectors) if matrix.dtype == torch.float32 else (values, vectors)

    monkeypatch.setattr(torch.linalg, "eigh", spoiled_in_float32)
    assert torch.equal(eigh(torch.eye(3))[0], torch.ones(3))


@pytest.mark.parametrize("rank", [3, 6])
def test_root_of_singular_and_regular_matrices(rank: int) -> None:
    u = torch.randn(6, rank, dtype=torch.float64)
    s = root(u @ u.T)
    torch.testing.assert_close(s @ s.T, u @ u.T, rtol=1e-10, atol=1e-10)


def test_nonnegative_removes_rounding_only() -> None:
    assert torch.equal(nonnegative(torch.tensor([-1e-9, 1.0])), torch.tensor([0.0, 1.0]))
    assert nonnegative(torch.empty(0)).numel() == 0
    with pytest.raises(NumericalError, match=r"-0\.01"):
        nonnegative(torch.tensor([-1e-2, 1.0]))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_eigenvalues_of_what_has_underflowed_are_rounding(kind: torch.dtype) -> None:
    least = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps  # the smallest number
    values = torch.tensor([-34.0, 0.0, 20.0], dtype=kind) * least
    assert torch.equal(nonnegative(values), values.clamp(min=0))
    with pytest.raises(NumericalError):
        nonnegative(torch.tensor([-1e-30, 1e-30], dtype=kind))
