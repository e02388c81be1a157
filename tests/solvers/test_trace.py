"""Random traces: exact where theory says so, else within five of their own standard errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from linnet.linalg import Dense, Diagonal, FunctionOperator
from linnet.solvers import hutchinson, logdet, slq
from linnet.solvers.solution import Estimate
from tests.oracles.conformance import CountingOperator


def decaying(n: int, power: float = 2.0) -> Tensor:
    """A positive definite matrix with eigenvalues 1/i^power."""
    q = torch.linalg.qr(torch.randn(n, n).double()).Q
    matrix: Tensor = (q / torch.arange(1, n + 1).double() ** power) @ q.T
    return (matrix + matrix.T) / 2


def near(estimate: Estimate, wanted: float) -> bool:
    """Within five standard errors, which are themselves not large."""
    return abs(estimate.mean - wanted) < 5 * estimate.stderr and 0 < estimate.stderr < 0.5 * abs(wanted)


def test_hutchinson_is_within_its_standard_error() -> None:
    matrix = decaying(40)
    assert near(hutchinson(Dense(matrix), 100, seed=0), float(matrix.trace()))


def test_the_standard_error_is_calibrated() -> None:
    matrix = decaying(30, power=0.5)
    estimates = [hutchinson(Dense(matrix), 30, seed=seed) for seed in range(60)]
    errors = torch.tensor([(e.mean - float(matrix.trace())) / e.stderr for e in estimates])
    assert 0.7 < float((errors**2).mean().sqrt()) < 1.5


def test_hutchinson_is_exact_for_a_diagonal() -> None:
    values = torch.rand(20).double()
    estimate = hutchinson(Diagonal(values), 3, seed=0)
    assert estimate.stderr < 1e-12
    assert estimate.mean == pytest.approx(float(values.sum()), rel=1e-12)


def test_products_are_counted() -> None:
    operator = CountingOperator(Dense(decaying(50)))
    hutchinson(operator, 40, seed=0)
    assert (operator.products, operator.columns) == (2, 40)  # blocks of 32
    operator = CountingOperator(Dense(decaying(50)))
    slq(operator, torch.sqrt, samples=5, steps=4, seed=0)
    assert (operator.products, operator.columns) == (4, 20)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_slq_with_two_steps_is_exact_for_cubic_polynomials(degree: int) -> None:
    values = torch.rand(15).double() + 0.1
    estimate = slq(Diagonal(values), lambda x: x**degree, samples=4, steps=2, seed=0)
    assert estimate.mean == pytest.approx(float((values**degree).sum()), rel=1e-10)


def test_slq_needs_steps_for_other_functions() -> None:
    operator = Diagonal(torch.logspace(-3, 0, 30).double())
    wanted = float(operator.logdet())
    errors = [abs(logdet(operator, 4, steps, seed=0).mean - wanted) for steps in (2, 6, 15)]
    assert errors[0] > errors[1] > errors[2]


def test_logdet_is_within_its_standard_error() -> None:
    matrix = decaying(40) + 0.1 * torch.eye(40).double()
    assert near(logdet(Dense(matrix), 64, 30, seed=0), float(torch.logdet(matrix)))


def test_logdet_of_few_distinct_eigenvalues_is_exact_beyond_the_invariant_subspace() -> None:
    operator = Diagonal(torch.tensor([2.0, 8.0]).double().repeat(10))
    estimate = logdet(operator, samples=3, steps=15, seed=0)
    assert estimate.mean == pytest.approx(10 * math.log(16.0), rel=1e-10)


def test_logdet_of_an_indefinite_operator_is_not_a_number() -> None:
    operator = FunctionOperator(lambda v: torch.tensor([1.0, -1.0])[:, None] * v, (2, 2), symmetric=True)
    assert math.isnan(logdet(operator, 2, 2, seed=0).mean)


def test_more_samples_mean_less_error() -> None:
    operator = Dense(decaying(40))
    few, many = (hutchinson(operator, samples, seed=0).stderr for samples in (10, 1000))
    assert many < few / 5


@pytest.mark.parametrize(
    "estimate",
    [
        lambda A, g: hutchinson(A, 5, seed=g),
        lambda A, g: slq(A, torch.exp, 5, 3, seed=g),
        lambda A, g: logdet(A, 5, 3, seed=g),
    ],
)
def test_the_generator_decides(estimate: Any) -> None:
    operator = Dense(decaying(20))
    assert estimate(operator, 0) == estimate(operator, torch.Generator().manual_seed(0))
    assert estimate(operator, 0) != estimate(operator, 1)


def test_a_seed_draws_different_vectors_for_every_block() -> None:
    matrix = decaying(20)
    one, two = (hutchinson(Dense(matrix), samples, seed=0) for samples in (32, 64))
    assert abs(one.mean - two.mean) > 1e-6


def test_float32_operators_are_accepted() -> None:
    identity = Dense(torch.eye(10))
    for estimate in (hutchinson(identity, 4, 0), slq(identity, torch.sqrt, 4, 3, 0)):
        assert estimate.mean == pytest.approx(10.0, rel=1e-5)
