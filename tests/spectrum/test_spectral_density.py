"""Spectral densities, effective dimension and condition number against dense eigenvalues."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

import linnet
from linnet.errors import NumericalError
from linnet.linalg import Diagonal, FunctionOperator
from linnet.linalg.kronecker import Kronecker
from linnet.spectrum.kernel_matrix import kernel_matrix
from tests.fitting.problems import near, problem, real
from tests.oracles.dense import kernel_oracle

P = problem(n=12, outputs=2, classes=False, hidden=20)
K = kernel_oracle(P.j).flatten(0, 1).flatten(1)  # (24, 24)
VALUES = torch.linalg.eigvalsh(K)


def line(n: int) -> Tensor:
    """Eigenvalues 1 to n."""
    return torch.arange(1.0, n + 1, dtype=torch.float64)


def rotated(values: Tensor, seed: int = 0) -> Tensor:
    """A matrix with these eigenvalues."""
    q, _ = torch.linalg.qr(real(values.numel(), values.numel(), seed=seed))
    matrix = (q * values) @ q.T
    return (matrix + matrix.T) / 2


def test_density_of_a_kernel_from_every_source() -> None:
    options: dict[str, Any] = {"samples": 40, "steps": 24}
    by_network = linnet.spectrum.spectral_density(P.model, P.x, **options)
    by_matrix = linnet.spectrum.spectral_density(linnet.spectrum.gram(P.lin, P.x), **options)
    by_operator = linnet.spectrum.spectral_density(Diagonal(VALUES), **options)
    for found in (by_network, by_matrix, by_operator):
        assert found.dimension == 24
        mean = found.expectation(lambda t: t)
        assert abs(mean.mean - float(VALUES.mean())) <= 4 * mean.stderr + 1e-9
        near(found.weights.sum(1), torch.ones(40, dtype=torch.float64))


def test_with_all_steps_the_quadrature_is_exact_for_each_vector() -> None:
    matrix = rotated(line(10))
    found = linnet.spectrum.spectral_density(matrix, samples=3, steps=10, seed=5)
    generator = torch.Generator().manual_seed(5)
    z = (2 * torch.randint(2, (10, 3), generator=generator) - 1).double()
    for power in (1, 2, 3, 7):
        quadrature = (found.weights * found.nodes**power).sum(1)
        near(quadrature, (z * (torch.linalg.matrix_power(matrix, power) @ z)).sum(0) / 10, 1e-9)


def test_counts_and_density_against_the_eigenvalues() -> None:
    values = torch.cat([torch.full((60,), 1.0), torch.full((30,), 4.0), torch.full((10,), 100.0)]).double()
    found = linnet.spectrum.spectral_density(rotated(values), samples=200, steps=3)
    for low, high, expected in ((0.5, 2.0, 60), (2.0, 50.0, 30), (50.0, math.inf, 10)):
        count = found.count(low, high)
        assert abs(count.mean - expected) <= 4 * count.stderr
        assert count.stderr < 2
    points, density = found.density(torch.linspace(-10, 120, 4000), width=1.0)
    assert points.shape == density.shape == (4000,)
    total = torch.trapezoid(density, points)
    assert abs(float(total) - 1) < 1e-6
    near_hundred = torch.trapezoid(density[points > 50], points[points > 50])
    assert abs(float(near_hundred) - 0.1) < 0.02
    default_points, default = found.density()
    assert abs(float(torch.trapezoid(default, default_points)) - 1) < 1e-3
    wide = found.density(points, width=5.0)[1]
    assert float(wide.max()) < float(density.max())
    logs, log_density = found.density(scale="log", width=0.01)
    assert abs(float(torch.trapezoid(log_density, logs)) - 1) < 2e-2
    assert abs(float(logs[log_density.argmax()])) < 0.02  # most eigenvalues are 10⁰


def test_a_flat_spectrum_has_a_density() -> None:
    points, density = linnet.spectrum.spectral_density(torch.eye(5), samples=2, steps=4).density()
    assert abs(float(torch.trapezoid(density, points)) - 1) < 1e-3


def test_seed_samples_and_steps_change_the_estimate() -> None:
    matrix = rotated(line(30))
    one, same = (linnet.spectrum.spectral_density(matrix, samples=2, steps=4, seed=1) for _ in range(2))
    assert torch.equal(one.nodes, same.nodes)
    assert not torch.equal(one.nodes, linnet.spectrum.spectral_density(matrix, samples=2, steps=4).nodes)
    assert linnet.spectrum.spectral_density(matrix, samples=20, steps=7).nodes.shape == (20, 7)


def test_outputs_choose_the_kernel() -> None:
    trace = linnet.spectrum.spectral_density(P.model, P.x, form="trace", samples=30, steps=12)
    assert trace.dimension == 12
    expected = float(kernel_oracle(P.j, form="trace").trace()) / 12
    mean = trace.expectation(lambda t: t)
    assert abs(mean.mean - expected) <= 4 * mean.stderr + 1e-9
    summed = linnet.spectrum.condition_number(P.model, P.x, ridge=1.0, form="sum")
    values = torch.linalg.eigvalsh(kernel_oracle(P.j, form="sum"))
    assert summed == pytest.approx(float((values[-1] + 1) / (values[0] + 1)), rel=1e-9)


@pytest.mark.parametrize("ridge", [0.01, 1.0, 30.0])
def test_effective_dimension(ridge: float) -> None:
    expected = float((VALUES / (VALUES + ridge)).sum())
    for source, x in ((P.model, P.x), (P.lin, P.x), (K, None), (K.reshape(12, 2, 12, 2), None)):
        found = linnet.spectrum.effective_dimension(source, ridge, x)
        assert found.mean == pytest.approx(expected, rel=1e-10)
        assert found.stderr == 0
    operator = FunctionOperator(lambda v: K @ v, (24, 24), torch.float64, symmetric=True)
    options: dict[str, Any] = {"samples": 200, "steps": 24, "seed": 3}
    estimate = linnet.spectrum.effective_dimension(operator, ridge, **options)
    assert 0 < estimate.stderr < 0.5
    assert abs(estimate.mean - expected) <= 4 * estimate.stderr


def test_effective_dimension_is_that_of_the_fit() -> None:
    fit = P.fit(ridge=2.0, solver="dual")
    degrees = fit.path(ridges=[2.0]).degrees_of_freedom
    found = linnet.spectrum.effective_dimension(P.model, 2.0, P.x)
    assert found.mean == pytest.approx(float(degrees[0]), rel=1e-9)


@hypothesis.given(scale=st.floats(0.01, 100), ridge=st.floats(0.01, 10))
def test_scaling_kernel_and_ridge_alike_changes_nothing(scale: float, ridge: float) -> None:
    first = linnet.spectrum.effective_dimension(K, ridge).mean
    assert linnet.spectrum.effective_dimension(scale * K, scale * ridge).mean == pytest.approx(
        first, rel=1e-9
    )
    number = linnet.spectrum.condition_number(K, ridge=ridge)
    assert linnet.spectrum.condition_number(scale * K, ridge=scale * ridge) == pytest.approx(number, rel=1e-6)


def test_condition_number() -> None:
    expected = float(VALUES[-1] / VALUES[0])
    assert linnet.spectrum.condition_number(P.model, P.x) == pytest.approx(expected, rel=1e-6)
    assert linnet.spectrum.condition_number(K, ridge=0.5) == pytest.approx(
        float((VALUES[-1] + 0.5) / (VALUES[0] + 0.5)), rel=1e-10
    )
    by_lanczos = linnet.spectrum.condition_number(Diagonal(line(40)), tolerance=1e-10, seed=2)
    assert by_lanczos == pytest.approx(40, rel=1e-8)
    with pytest.raises(NumericalError, match="eigenvalue"):
        linnet.spectrum.condition_number(Diagonal(line(400)), tolerance=1e-10, max_steps=3)
    singular = line(6) - 1
    assert linnet.spectrum.condition_number(rotated(singular)) == math.inf
    assert linnet.spectrum.condition_number(Diagonal(singular)) == math.inf
    assert linnet.spectrum.condition_number(rotated(singular), ridge=1.0) == pytest.approx(6)


def test_an_operator_becomes_the_same_matrix_in_every_mode() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 3), torch.randn(4, 4)
    product = Kronecker(a @ a.T, b @ b.T)
    plain = kernel_matrix(product)
    assert (plain - torch.kron(a @ a.T, b @ b.T)).abs().max() < 1e-4
    with torch.autocast("cpu"):
        mixed = kernel_matrix(product)
    with torch.inference_mode():
        inferred = kernel_matrix(product)
    torch.testing.assert_close(mixed, plain)
    torch.testing.assert_close(inferred, plain)
    assert not inferred.is_inference()
