"""Conformance suites for operators and solvers.

Each check raises AssertionError with the question that was answered wrongly.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.errors import InputError
from linnet.linalg import Dense, LinearOperator, ParameterSpace, StructuredOperator, Vector
from linnet.solvers.solution import Solution, Status

_SAMPLES = 4_000


class CountingOperator(LinearOperator):
    """An operator that counts how often it is used."""

    def __init__(self, operator: LinearOperator) -> None:
        self._operator = operator
        self._transposed: CountingOperator | None = None
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device
        self.space = operator.space
        self.products = self.columns = 0

    def mm(self, v: Tensor) -> Tensor:
        """A v, counted."""
        self.products += 1
        self.columns += v.shape[1]
        return self._operator.mm(v)

    @property
    def T(self) -> CountingOperator:
        """The transpose, always the same object."""
        if self._transposed is None:
            self._transposed = CountingOperator(self._operator.T)
        return self._transposed


class Solver(Protocol):
    """A solver of A x = b as :func:`check_solver` calls it."""

    def __call__(
        self, operator: LinearOperator, b: Vector, *, tolerance: float, max_steps: int | None
    ) -> Solution[Vector]:
        """Solve A x = b."""


def check_operator(operator: LinearOperator, dense: Tensor, rtol: float | None = None) -> None:
    """Check everything an operator can do against the matrix that it should be."""
    # dense (m, n)
    rtol = _default_tolerance(dense) if rtol is None else rtol
    m, n = operator.shape
    _equal("shape", torch.tensor(operator.shape), torch.tensor(dense.shape), 0.0)
    if operator.dtype != dense.dtype or operator.device != dense.device:
        raise AssertionError(f"dtype or device: got {operator!r}, expected {dense.dtype} on {dense.device}")
    v, u = _vectors(n, 3, dense), _vectors(m, 3, dense)
    _check_products(operator, dense, v, rtol)
    _equal("T", operator.T.mm(u), dense.T @ u, rtol)
    _equal("T of T", operator.T.T.mm(v), dense @ v, rtol)
    _check_algebra(operator, dense, v, rtol)
    _check_scipy(operator, dense, v, u, rtol)
    _check_space(operator, dense, rtol)
    if isinstance(operator, StructuredOperator):
        _check_structured(operator, dense, rtol)


def _check_products(operator: LinearOperator, dense: Tensor, v: Tensor, rtol: float) -> None:
    """Products with one vector, several, and none."""
    _equal("mv", operator.mv(v[:, 0]), dense @ v[:, 0], rtol)
    _equal("mm", operator.mm(v), dense @ v, rtol)
    _equal("@ with (n,)", operator @ v[:, 0], dense @ v[:, 0], rtol)
    _equal("@ with (n, K)", operator @ v, dense @ v, rtol)
    _equal("@ with (n, 0)", operator @ v[:, :0], dense @ v[:, :0], rtol)
    _equal("dense", operator.dense(), dense, rtol)


def _check_algebra(operator: LinearOperator, dense: Tensor, v: Tensor, rtol: float) -> None:
    """Sums, multiples, compositions and damping."""
    _equal("sum", (operator + operator).mm(v), 2 * dense @ v, rtol)
    _equal("difference", (3.0 * operator - operator).mm(v), 2 * dense @ v, rtol)
    _equal("negation", (-operator).mm(v), -dense @ v, rtol)
    _equal("composition", (operator.T @ operator).mm(v), dense.T @ (dense @ v), rtol)
    if dense.shape[0] == dense.shape[1]:
        _equal("damped", operator.damped(0.7).mm(v), dense @ v + 0.7 * v, rtol)


def _check_scipy(operator: LinearOperator, dense: Tensor, v: Tensor, u: Tensor, rtol: float) -> None:
    """The SciPy operator, both ways, with one vector and several."""
    converted = operator.to_scipy()
    matrix, right, left = dense.cpu(), v.cpu(), u.cpu()
    _equal("to_scipy matvec", torch.as_tensor(converted @ right[:, 0].numpy()), matrix @ right[:, 0], rtol)
    _equal("to_scipy matmat", torch.as_tensor(converted @ right.numpy()), matrix @ right, rtol)
    _equal("to_scipy rmatvec", torch.as_tensor(converted.T @ left[:, 0].numpy()), matrix.T @ left[:, 0], rtol)
    _equal("to_scipy rmatmat", torch.as_tensor(converted.T @ left.numpy()), matrix.T @ left, rtol)


def _check_space(operator: LinearOperator, dense: Tensor, rtol: float) -> None:
    """Params in, Params out, where the operator knows its space."""
    space = operator.space
    if space is None:
        return
    for v in (_vectors(dense.shape[1], 1, dense)[:, 0], _vectors(dense.shape[1], 3, dense)):
        product = operator @ space.to_params(v)
        if isinstance(product, dict) is not (dense.shape[0] == dense.shape[1]):
            raise AssertionError(f"@ with Params: got {type(product).__name__}")
        flat = product if isinstance(product, Tensor) else space.to_flat(product)
        _equal("@ with Params", flat, dense @ v, rtol)


def _check_structured(operator: StructuredOperator, dense: Tensor, rtol: float) -> None:
    """The closed forms of a symmetric positive semi-definite matrix."""
    rows = _vectors(dense.shape[0], 4, dense).T.reshape(2, 2, -1)  # (2, C, n)
    _equal("diagonal", operator.diagonal(), dense.diagonal(), rtol)
    _equal("trace", operator.trace(), dense.trace(), rtol)
    _equal("quadratic of rows", operator.quadratic(rows), rows @ dense @ rows.mT, rtol)
    _equal("quadratic of one row", operator.quadratic(rows[0, 0]), rows[0, 0] @ dense @ rows[0, 0], rtol)
    _equal("scaled", operator.scaled(2.5).dense(), 2.5 * dense, rtol)
    _equal(
        "damped, structured",
        operator.damped(0.7).dense(),
        dense + 0.7 * torch.eye(*dense.shape).to(dense),
        rtol,
    )
    _check_samples(operator, dense)
    for candidate, matrix in ((operator, dense), (operator.damped(0.7), operator.damped(0.7).dense())):
        if float(torch.linalg.eigvalsh(matrix.double())[0]) > 1e-3 * float(matrix.abs().max()):
            _check_inverse(candidate, matrix, rtol)


def _check_inverse(operator: StructuredOperator, dense: Tensor, rtol: float) -> None:
    """The closed forms that need a positive definite matrix; conditioning costs three digits at most."""
    b, rtol = _vectors(dense.shape[0], 3, dense), 1e3 * rtol
    _equal("solve", operator.solve(b), torch.linalg.solve(dense, b), rtol)
    _equal("solve of one", operator.solve(b[:, 0]), torch.linalg.solve(dense, b[:, 0]), rtol)
    _equal("inverse", operator.inverse().dense(), torch.linalg.inv(dense), rtol)
    _equal("inverse of inverse", operator.inverse().inverse().dense(), dense, rtol)
    _equal("logdet", operator.logdet(), torch.logdet(dense), rtol)


def _check_samples(operator: StructuredOperator, dense: Tensor) -> None:
    """The covariance of samples, entry by entry, within six standard errors."""
    generator = torch.Generator().manual_seed(0)
    samples = operator.sample(_SAMPLES, generator).double()
    covariance, wanted = samples.T @ samples / _SAMPLES, dense.double()
    # The variance of a product of two Gaussian numbers: Mᵢᵢ Mⱼⱼ + Mᵢⱼ².
    stderr = ((torch.outer(wanted.diagonal(), wanted.diagonal()) + wanted**2) / _SAMPLES).sqrt()
    slack = 1e-6 * wanted.abs().max()
    if not bool(((covariance - wanted).abs() <= 6 * stderr + slack).all()):
        raise AssertionError("sample: the covariance of the samples is not the matrix")
    again = operator.sample(_SAMPLES, torch.Generator().manual_seed(0)).double()
    _equal("sample with the same seed", again, samples, 0.0)


def check_curvature(
    curvature: Curvature, dense: Tensor, x: Any, jacobian: Tensor, rtol: float | None = None
) -> None:
    """Check everything a curvature can do against the matrix that it should be."""
    # dense (P, P), jacobian (N, C, P)
    rtol = _default_tolerance(dense) if rtol is None else rtol
    names = [name for part in curvature.parts for name in part.layer.names]
    if sorted(names) != sorted(curvature.function.names):
        raise AssertionError(f"parts: they hold {names}, of {curvature.function.names}")
    # singular as it is; with τ of the size of its largest entry it is not
    tau = max(float(dense.abs().max()), 1e-3)
    damped = dense + tau * torch.eye(*dense.shape).to(dense)
    check_operator(curvature.damped(tau), damped, rtol)
    _equal("dense", curvature.dense(), dense, rtol)
    _equal("output_covariance", curvature.output_covariance(x), jacobian @ dense @ jacobian.mT, rtol)
    own = (jacobian @ dense @ jacobian.mT).diagonal(dim1=1, dim2=2)
    _equal("output_variance", curvature.output_variance(x), own, rtol)
    _equal(
        "output_covariance of the inverse",
        curvature.damped(tau).inverse().output_covariance(x),
        jacobian @ torch.linalg.solve(damped, jacobian.mT),
        1e3 * rtol,
    )
    factored = curvature.factored_damped(tau)
    excess = torch.linalg.eigvalsh((factored.dense() - damped).double())[0]
    if float(excess) < -rtol * tau:
        raise AssertionError(f"factored_damped: smaller than G + τ I by {-float(excess):.3g}")
    check_operator(factored, factored.dense(), rtol)


def check_solver(solve: Solver, dtype: torch.dtype = torch.float64, device: str = "cpu") -> None:
    """Check a solver of symmetric positive definite systems."""
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    matrix, b = _system(30, dtype, device)
    operator = Dense(matrix, space=ParameterSpace({"weight": (5, 5), "bias": (5,)}))
    wanted = torch.linalg.solve(matrix, b)
    several = solve(operator, b, tolerance=tolerance, max_steps=None)
    _check_solution("several right-hand sides", several, wanted, tolerance)
    one = solve(operator, b[:, 0], tolerance=tolerance, max_steps=None)
    _check_solution("one right-hand side", one, wanted[:, 0], tolerance)
    zero = solve(operator, torch.zeros_like(b), tolerance=tolerance, max_steps=None)
    _check_solution("zero right-hand sides", zero, torch.zeros_like(b), tolerance)
    _check_params(solve, operator, b[:, 0], wanted[:, 0], tolerance)
    _check_failures(solve, operator, b, tolerance)


def _check_params(
    solve: Solver, operator: LinearOperator, b: Tensor, wanted: Tensor, tolerance: float
) -> None:
    """A right-hand side in Params gives a solution in Params."""
    assert operator.space is not None
    solution = solve(operator, operator.space.to_params(b), tolerance=tolerance, max_steps=None)
    if not isinstance(solution.value, dict):
        raise AssertionError(f"Params: the solution is a {type(solution.value).__name__}")
    _equal("Params", operator.space.to_flat(solution.value), wanted, 1e3 * tolerance)


def _check_failures(solve: Solver, operator: Dense, b: Tensor, tolerance: float) -> None:
    """One step is too few, and says so; an indefinite matrix or NaN does not count as converged."""
    short = solve(operator, b, tolerance=tolerance, max_steps=1)
    if short.status is not Status.MAX_STEPS or short.steps != 1:
        raise AssertionError(f"max_steps=1: got {short.status} after {short.steps} steps")
    if not short.residual > tolerance:
        raise AssertionError(f"max_steps=1: claims the residual {short.residual:.2g}")
    missing = solve(operator, torch.full_like(b, float("nan")), tolerance=tolerance, max_steps=5)
    if missing.converged:
        raise AssertionError("NaN on the right-hand side: claims to have converged")


def _check_solution(question: str, solution: Solution[Vector], wanted: Tensor, tolerance: float) -> None:
    """The status, the residual it claims, and the value."""
    if solution.status is not Status.CONVERGED or solution.residual > tolerance:
        raise AssertionError(f"{question}: {solution.status} with the residual {solution.residual:.2g}")
    if not isinstance(solution.value, Tensor):
        raise AssertionError(f"{question}: the solution is a {type(solution.value).__name__}")
    _equal(question, solution.value, wanted, 1e3 * tolerance)


def _system(n: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A symmetric positive definite matrix with condition number 100, and three right-hand sides."""
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    matrix = (q * torch.logspace(0, 2, n, dtype=torch.float64)) @ q.T
    b = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return ((matrix + matrix.T) / 2).to(device, dtype), b.to(device, dtype)


def _vectors(n: int, columns: int, like: Tensor) -> Tensor:
    """Fixed random vectors (n, columns) in the type of another tensor."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, columns, generator=generator, dtype=torch.float64).to(like)


def _default_tolerance(dense: Tensor) -> float:
    """1e-10 in float64, 1e-4 in less."""
    if not dense.is_floating_point():
        raise InputError(
            f"dense is of type {dense.dtype}",
            expected="a floating point matrix",
            remedy="pass dense.double()",
        )
    return 1e-10 if dense.dtype == torch.float64 else 1e-4


def _equal(question: str, got: object, wanted: Tensor, rtol: float) -> None:
    """Two tensors agree in shape, and in value relative to the largest entry."""
    if not isinstance(got, Tensor) or got.shape != wanted.shape:
        shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
        raise AssertionError(f"{question}: got {shape}, expected {tuple(wanted.shape)}")
    if wanted.numel() == 0:
        return
    error = float((got - wanted).abs().max())
    if not error <= rtol * max(float(wanted.abs().max()), 1e-30):
        raise AssertionError(f"{question}: off by {error:.3g}, of {float(wanted.abs().max()):.3g}")
