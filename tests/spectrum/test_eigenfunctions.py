"""Eigenfunctions against dense eigendecompositions, and energy concentration against its definition."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Literal

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor

import linnet
from linnet.errors import InputError, NumericalError
from linnet.spectrum.kernel_matrix import KernelOperator
from tests.fitting.problems import near, problem, real
from tests.oracles.dense import kernel_oracle
from tests.refusals import refused

MODULE = importlib.import_module("linnet.spectrum.eigenfunctions")
ONE = problem(n=16, outputs=1, classes=False, hidden=12)
MANY = problem(n=10, outputs=3, classes=False, hidden=12)
WIDE = problem(n=40, outputs=1, classes=False, hidden=40)
Kind = Literal["full", "trace", "sum"]
KINDS: tuple[Kind, ...] = ("full", "trace", "sum")
METHODS: tuple[Any, ...] = ("eigh", "lanczos", "matrix-free", "auto")


def dense(p: Any, outputs: Kind) -> Tensor:
    """The kernel as a matrix."""
    k = kernel_oracle(p.j, form=outputs)
    return k.flatten(0, 1).flatten(1) if outputs == "full" else k


def leading(k: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Leading eigenpairs by a dense decomposition."""
    values, vectors = torch.linalg.eigh(k)
    return values.flip(0)[:count], vectors.flip(1)[:, :count]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("outputs", KINDS)
def test_eigenpairs_are_those_of_the_dense_kernel(outputs: Kind, method: Any) -> None:
    k = dense(MANY, outputs)
    values, vectors = leading(k, 4)
    found = linnet.spectrum.eigenfunctions(MANY.model, MANY.x, 4, outputs, method=method)
    near(found.values, values / 10)  # Mercer's eigenvalues: of K / N
    flat = found.vectors.reshape(-1, 4)
    near(flat @ flat.T, vectors @ vectors.T, 1e-7)  # free of signs
    near((k @ flat) / 10, flat * found.values, 1e-7)
    assert found.vectors.shape == ((10, 3, 4) if outputs == "full" else (10, 4))
    assert found.method == ("eigh" if method == "auto" else method)
    assert found.residual < 1e-10
    assert bool((flat.gather(0, flat.abs().argmax(0, keepdim=True)) > 0).all())


@pytest.mark.parametrize("outputs", KINDS)
def test_functions_are_orthonormal_in_the_mean(outputs: Kind) -> None:
    found = linnet.spectrum.eigenfunctions(MANY.model, MANY.x, None, outputs)
    phi = found.functions.reshape(10, -1, found.k)
    near(torch.einsum("nqj,nqk->jk", phi, phi) / 10, torch.eye(found.k, dtype=torch.float64))
    # Mercer: Θ = Σ_j λ_j φ_j φ_jᵀ
    flat = phi.flatten(0, 1)
    near((flat * found.values) @ flat.T, dense(MANY, outputs))


@pytest.mark.parametrize("outputs", KINDS)
def test_nystrom_extension(outputs: Kind) -> None:
    found = linnet.spectrum.eigenfunctions(MANY.model, MANY.x, 4, outputs)
    near(found(MANY.x), found.functions, 1e-8)
    cross = kernel_oracle(MANY.j_test, MANY.j, outputs)
    cross = cross.flatten(0, 1).flatten(1) if outputs == "full" else cross
    expected = cross @ found.functions.reshape(-1, 4) / (10 * found.values)
    near(found(MANY.x_test).reshape(-1, 4), expected, 1e-8)
    near(found(MANY.x_test, [2, 0]), found(MANY.x_test)[..., [2, 0]])
    near(found(MANY.x_test, memory=8000), found(MANY.x_test))


def test_the_choice_of_the_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(MODULE, "SMALL", 8)
    monkeypatch.setattr(MODULE, "PATIENCE", 1.0)
    values, _ = leading(dense(WIDE, "full"), 3)

    def run(**options: Any) -> Any:
        found = linnet.spectrum.eigenfunctions(WIDE.model, WIDE.x, options.pop("k", 3), **options)
        near(found.values[:3], values / 40, 1e-8)
        return found

    assert run().method == "lanczos"
    assert run(k=12).method == "eigh"
    assert run(memory=12_000).method == "matrix-free"
    kept = linnet.spectrum.gram(WIDE.model, WIDE.x, file=tmp_path / "k.npy")
    assert run(memory=90_000, gram=kept).method == "lanczos"
    monkeypatch.setattr(MODULE, "PATIENCE", 0.0)  # too few steps for Lanczos
    assert run().method == "eigh"
    monkeypatch.setattr(MODULE, "FINE", 1e-30)
    refused(NumericalError, lambda: run(method="lanczos"), "eigenfunctions")


def test_a_gram_matrix_is_used_as_it_is() -> None:
    given = 2 * linnet.spectrum.gram(ONE.model, ONE.x)
    found = linnet.spectrum.eigenfunctions(ONE.model, ONE.x, 3, gram=given)
    near(found.values, leading(dense(ONE, "full"), 3)[0] / 8)
    shares = linnet.spectrum.energy_concentration(ONE.model, (ONE.x, ONE.y), 3, gram=given[:, 0, :, 0])
    near(shares, linnet.spectrum.energy_concentration(ONE.model, (ONE.x, ONE.y), 3))


@pytest.mark.parametrize("outputs", KINDS)
def test_the_kernel_without_a_matrix(outputs: Kind) -> None:
    k = dense(MANY, outputs)
    operator = KernelOperator(MANY.lin.function, MANY.x, outputs, block=3)
    near(operator.dense(), k)
    v = real(k.shape[0], 11, seed=3)
    near(operator @ v, k @ v)
    near(operator.T @ v[:, 0], k @ v[:, 0])


# Energy concentration.


@pytest.mark.parametrize("outputs", KINDS)
@pytest.mark.parametrize("k", [1, 4, 10])
@pytest.mark.thinned(3)
def test_energy_concentration_is_its_definition(outputs: Kind, k: int) -> None:
    y = real(10, 3, 5, seed=2) if outputs == "full" else real(10, 5, seed=2)
    flat = y.reshape(-1, 5)
    _, phi = leading(dense(MANY, outputs), k)
    expected = (phi @ (phi.T @ flat)).norm(dim=0) / flat.norm(dim=0)  # ‖Φ y‖ / ‖y‖
    near(linnet.spectrum.energy_concentration(MANY.model, (MANY.x, y), k, outputs), expected, 1e-8)
    squared = linnet.spectrum.energy_concentration(MANY.model, (MANY.x, y), k, outputs, squared=True)
    near(squared, expected**2, 1e-8)
    one = linnet.spectrum.energy_concentration(MANY.model, (MANY.x, y[..., 0]), k, outputs)
    near(one, expected[0], 1e-8)


@hypothesis.settings(max_examples=6)
@hypothesis.given(scale=st.floats(0.1, 10), seed=st.integers(0, 50))
def test_concentration_is_scale_free_and_permutation_free(scale: float, seed: int) -> None:
    y = real(16, seed=seed)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
    first = linnet.spectrum.energy_concentration(ONE.model, (ONE.x, y), 3)
    near(linnet.spectrum.energy_concentration(ONE.model, (ONE.x[order], -scale * y[order]), 3), first, 1e-8)
    every = linnet.spectrum.energy_concentration(ONE.model, (ONE.x, y), 16)
    near(every, torch.ones((), dtype=torch.float64))


def test_concentration_grows_with_k() -> None:
    found = linnet.spectrum.eigenfunctions(ONE.model, ONE.x, None)
    shares = torch.stack([found.energy_concentration(ONE.y, k, squared=True) for k in range(1, 17)])
    assert bool((shares.diff() > -1e-12).all())
    near(shares[-1], torch.ones((), dtype=torch.float64))
    near(found.energy_concentration(found.functions, 4), (torch.arange(16) < 4).double(), 1e-6)


@pytest.mark.parametrize("outputs", KINDS)
def test_alignment_and_norm_are_mercer_sums(outputs: Kind) -> None:
    found = linnet.spectrum.eigenfunctions(MANY.model, MANY.x, None, outputs)
    y = real(10, 3, 4, seed=2) if outputs == "full" else real(10, 4, seed=2)
    phi = found.functions.reshape(-1, found.k)
    coefficients = phi.T @ y.reshape(-1, 4) / 10  # E φ_j f
    # eq. 2: α(f) = Σ λ_j (E φ_j f)²
    alpha = (found.values[:, None] * coefficients**2).sum(0)
    near(linnet.spectrum.alignment(MANY.model, (MANY.x, y), outputs), alpha)
    k = dense(MANY, outputs)
    near(found.kernel_norm(y), (y.reshape(-1, 4) * torch.linalg.solve(k, y.reshape(-1, 4))).sum(0), 1e-5)
    bound = linnet.spectrum.kernel_norm_bound(MANY.model, (MANY.x, y), outputs)
    assert bool((bound <= found.kernel_norm(y)).all())


def test_the_norm_outside_the_range_is_infinite() -> None:
    model = torch.nn.Linear(3, 1, bias=False).double()
    found = linnet.spectrum.eigenfunctions(model, ONE.x, None)
    norms = found.kernel_norm(torch.stack([ONE.x @ real(3, seed=1), real(16, seed=4)], 1))
    assert bool(norms[1].isinf())
    near(norms[0], real(3, seed=1).square().sum(), 1e-8)  # the least norm of weights: those of the target
    partial = linnet.spectrum.eigenfunctions(model, ONE.x, 3)
    refused(InputError, lambda: partial.kernel_norm(ONE.y), "13 eigenfunctions are missing", "k=None")
    refused(NumericalError, lambda: found(ONE.x, [5]), "eigenvalue 5 is zero")


# Binarized eigenfunctions.


def test_binarized_targets_are_signs() -> None:
    found = linnet.spectrum.eigenfunctions(ONE.model, ONE.x, 4)
    assert torch.equal(found.binarized(2), found.functions[:, 2].sign())
    assert torch.equal(found.binarized(1, ONE.x_test), found(ONE.x_test)[:, 1].sign())


def test_binarization_keeps_most_of_the_direction() -> None:
    p = problem(n=600, outputs=1, classes=False, hidden=20)
    found = linnet.spectrum.eigenfunctions(p.model, p.x, 10)
    signs = found.functions.sign()
    cosines = (signs * found.functions).mean(0)  # E sign(φ) φ; about √(2/π) = 0.798 for a Gaussian φ
    assert bool(((cosines > 0.6) & (cosines < 0.95)).all())


# What cannot be.


def test_concentration_from_a_gram_matrix_in_a_file(tmp_path: Path) -> None:
    kept = linnet.spectrum.gram(ONE.model, ONE.x, file=tmp_path / "kernel.npy")
    share = linnet.spectrum.energy_concentration(ONE.model, (ONE.x, ONE.y), 2, gram=kept)
    near(torch.from_numpy(np.load(tmp_path / "kernel.npy")).reshape(16, 16), dense(ONE, "full"))
    near(
        share, linnet.spectrum.energy_concentration(ONE.model, (ONE.x, ONE.y), 2, method="matrix-free"), 1e-7
    )


def test_a_long_decomposition_says_what_it_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LINNET_PROGRESS", raising=False)
    monkeypatch.setattr("linnet.progress._DELAY", 0.0)
    for progress in (None, False):
        linnet.spectrum.alignment(ONE.model, (ONE.x, ONE.y), progress=progress)
        linnet.spectrum.kernel_norm_bound(ONE.model, (ONE.x, ONE.y), progress=progress)
        linnet.spectrum.eigenfunctions(ONE.model, ONE.x, 2, progress=progress)
        shown = capsys.readouterr().err
        assert ("alignment of 1 targets" in shown) == (progress is None)
        assert ("kernel of 16" in shown) == (progress is None)
