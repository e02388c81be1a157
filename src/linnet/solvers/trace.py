"""Random estimates of traces: tr A, tr f(A) and log det A, each with its standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from linnet import params
from linnet.errors import InputError
from linnet.linalg.operator import LinearOperator, require_square
from linnet.linalg.random import Seed, make_generator, signs
from linnet.params import integer
from linnet.solvers.lanczos import tridiagonalize
from linnet.solvers.solution import Estimate, by_first_process

_COLUMNS = 32  # random vectors multiplied at once


@by_first_process
def hutchinson(operator: LinearOperator, samples: int, seed: Seed = None) -> Estimate:
    """The trace of A as the mean of zᵀ A z over random signs z (Hutchinson 1990).

    Costs one product with A a sample, in blocks of 32. Exact for a diagonal A.

    Args:
        operator: A (n x n).
        samples: Number of random vectors; the standard error needs two.
        seed: Seed or generator.

    Returns:
        tr A.

    Raises:
        InputError: A is not square, or ``samples`` is less than 1.

    Example:
        >>> from linnet.linalg import Diagonal
        >>> hutchinson(Diagonal(torch.tensor([1.0, 2.0])), samples=2, seed=0).mean
        3.0
    """
    samples = _checked(operator, samples)
    parts = [(z * operator.mm(z)).sum(0) for z in _probes(operator, samples, seed)]
    return Estimate.of(torch.cat(parts))


@by_first_process
def slq(
    operator: LinearOperator,
    function: Callable[[Tensor], Tensor],
    samples: int,
    steps: int,
    seed: Seed = None,
) -> Estimate:
    """The trace of f(A) by stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017).

    For each of the random signs z, m Lanczos steps give the quadrature zᵀ f(A) z ≈ n Σₖ (e₁ᵀ sₖ)² f(θₖ) with
    the eigenpairs (θₖ, sₖ) of T; exact when f is a polynomial of degree 2 m − 1.

    Args:
        operator: A, symmetric (n x n).
        function: f, applied to eigenvalues elementwise.
        samples: Number of random vectors; the standard error needs two.
        steps: Lanczos steps m for each; memory is for 32 m vectors.
        seed: Seed or generator.

    Returns:
        tr f(A). The standard error covers the random vectors, not the error of the quadrature.

    Raises:
        InputError: A is not square, or ``samples`` or ``steps`` is less than 1.

    Example:
        >>> from linnet.linalg import Diagonal
        >>> A = Diagonal(torch.tensor([1.0, 4.0]))
        >>> round(slq(A, torch.sqrt, samples=2, steps=2, seed=0).mean, 4)
        3.0
    """
    samples = _checked(operator, samples)
    params.function("function", function, "a function of eigenvalues, such as torch.sqrt")
    blocks = _probes(operator, samples, make_generator(seed))
    return Estimate.of(torch.cat([_quadrature(operator, z, function, steps) for z in blocks]))


def logdet(operator: LinearOperator, samples: int, steps: int, seed: Seed = None) -> Estimate:
    """The log determinant of A as tr log A by :func:`slq`.

    Args:
        operator: A, symmetric positive definite (n x n).
        samples: Number of random vectors.
        steps: Lanczos steps for each.
        seed: Seed or generator.

    Returns:
        log det A; NaN when A has a negative eigenvalue.

    Raises:
        InputError: A is not square, or ``samples`` or ``steps`` is less than 1.

    Example:
        >>> from linnet.linalg import Diagonal
        >>> round(logdet(Diagonal(torch.tensor([1.0, 4.0])), samples=2, steps=2, seed=0).mean, 4)
        1.3863
    """
    return slq(operator, torch.log, samples, steps, seed)


def _quadrature(
    operator: LinearOperator, z: Tensor, function: Callable[[Tensor], Tensor], steps: int
) -> Tensor:
    """The quadrature of zᵀ f(A) z for each column of z (n, K); (K,)."""
    matrices = tridiagonalize(operator, z, steps).matrices().double()
    theta, s = torch.linalg.eigh(matrices)  # (K, m), (K, m, m)
    weights = s[:, 0, :] ** 2  # (e₁ᵀ sₖ)²
    # Steps beyond an invariant subspace add zeros to T, of no weight, where f may be infinite.
    counted = weights > torch.finfo(z.dtype).eps ** 2
    given = torch.where(counted, theta, 1.0)
    values = params.call("function", function, given, expected="a function of eigenvalues, elementwise")
    if not isinstance(values, Tensor) or values.shape != given.shape or values.is_complex():
        raise InputError(
            f"function returns {params.shown(values)} for {params.shown(given)}",
            expected="a real tensor of the same shape, f of each eigenvalue",
            remedy="pass a function such as torch.sqrt",
        )
    terms = torch.where(counted, weights * values, 0.0)
    return z.shape[0] * terms.sum(1)


def _probes(operator: LinearOperator, samples: int, seed: Seed) -> Iterator[Tensor]:
    """Random signs (n, K) in blocks of columns, ``samples`` columns in all."""
    seed = make_generator(seed)
    for first in range(0, samples, _COLUMNS):
        columns = min(_COLUMNS, samples - first)
        yield signs((operator.shape[0], columns), seed, operator.dtype, operator.device)


def _checked(operator: LinearOperator, samples: int) -> int:
    """The number of samples, of a square operator."""
    require_square(operator)
    return integer("samples", samples, remedy="pass samples=10")
