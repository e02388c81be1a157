"""Eigenpairs of a kernel on a data set, with a method that fits the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from linnet.errors import InputError, NumericalError
from linnet.linalg.factorize import eigh
from linnet.linalg.operator import LinearOperator
from linnet.linalg.random import Seed, make_generator
from linnet.memory import Plan, parse_bytes, require
from linnet.params import choice, instance, number
from linnet.progress import waiting
from linnet.solvers.lanczos import eigenpairs
from linnet.spectrum.kernel_matrix import KernelOperator, check_symmetry, flat_gram, stored_operator
from linnet.tangent.batch import Inputs
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram as _gram
from linnet.tangent.rules import Form

Method = Literal["auto", "lanczos", "matrix-free", "eigh"]
METHODS = ("auto", "lanczos", "matrix-free", "eigh")
SMALL = 512  # matrices up to this size are decomposed in full by "auto"
PATIENCE = 0.3  # share of the space that Lanczos may fill before "auto" decomposes in full instead


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """The method that finds the leading eigenpairs of a kernel.

    Args:
        method: ``"lanczos"`` on the stored Gram matrix, ``"matrix-free"`` (two passes over the data for each
            of k vectors a step), ``"eigh"`` (full decomposition), or ``"auto"``: Lanczos, a full
            decomposition where that is cheaper or Lanczos converges too slowly, matrix-free where the Gram
            matrix does not fit.
        tolerance: Lanczos stops at ‖K u − σ u‖ ≤ tolerance · σ₁; by default 1e-9 in double precision and 2e-6
            in single.
        seed: Generator or seed of the start vectors.

    Raises:
        InputError: If a value does not work.

    Example:
        >>> Decomposition(tolerance=1e-4).method
        'auto'
    """

    method: Method = "auto"
    tolerance: float | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        choice("method", self.method, METHODS)
        if self.tolerance is not None:
            number("tolerance", self.tolerance, above=0, remedy="leave tolerance= out")
        make_generator(self.seed)


def decomposition(method: str | Decomposition) -> Decomposition:
    """The settings, or those of a method by its name."""
    if isinstance(method, str):
        return Decomposition(method=cast("Method", choice("method", method, METHODS)))
    return instance("method", method, Decomposition, "the name of a method, or a Decomposition")


@dataclass(frozen=True)
class Request:
    """The kernel to decompose, and the accuracy."""

    function: Functional  # the network
    x: Inputs  # N examples
    form: Form  # which kernel
    rows: int  # R, the size of the kernel's matrix
    k: int  # number of eigenpairs
    how: Decomposition  # the method and its settings


@dataclass(frozen=True)
class Pairs:
    """Leading eigenpairs of K."""

    values: Tensor  # σ (k,), decreasing
    vectors: Tensor  # u (R, k)
    method: str  # how they were found
    residual: float  # the largest ‖K u − σ u‖ / σ₁


def kernel_eigenpairs(
    request: Request,
    given: Tensor | None = None,
    memory: str | int | None = None,
    progress: bool | None = None,
) -> Pairs:
    """Leading eigenpairs of the kernel."""
    check_count(request.k, request.rows, "the values of a function on x")
    chosen = _choose(request, given, memory)
    if chosen == "matrix-free":
        return _lanczos(request, KernelOperator(request.function, request.x, request.form), None)
    matrix = _matrix(request, given, memory, progress)
    return _decompose(request, matrix, chosen, memory, progress)


def check_count(k: Any, limit: int, what: str) -> None:
    """Raise unless 1 ≤ k ≤ limit."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= limit:
        raise InputError(
            f"k is {k!r}",
            expected=f"an integer from 1 to {limit}, {what}",
            remedy="pass a smaller k=, or more examples" if isinstance(k, int) and k > 0 else "leave k= out",
        )


def _choose(request: Request, given: Tensor | None, memory: str | int | None) -> Method:
    """The method, matrix-free where the Gram matrix would not fit."""
    method = request.how.method
    if method == "matrix-free" and given is not None:
        raise InputError(
            'gram= with method="matrix-free"', "no Gram matrix", 'pass method="lanczos" to use it'
        )
    if method != "auto" or given is not None:
        return method
    rows = request.rows
    size = rows * rows * torch.promote_types(request.function.dtype, torch.float32).itemsize
    fits = size <= 0.8 * parse_bytes(memory, request.function.device)
    return "auto" if fits or 4 * request.k > rows else "matrix-free"


def _matrix(
    request: Request,
    given: Tensor | None,
    memory: str | int | None,
    progress: bool | None,
) -> Tensor:
    """The Gram matrix (R, R)."""
    if given is None:
        options: dict[str, Any] = {"form": request.form, "memory": memory}
        return flat_gram(_gram(request.function, request.x, progress=progress, **options))
    flat = flat_gram(given)
    if flat.shape[0] != request.rows:
        raise InputError(
            f"gram has shape {tuple(given.shape)}",
            expected=f"{request.rows} rows: one for each value of a function on x",
            remedy=f"compute it on the same x with form={request.form!r}",
        )
    check_symmetry(flat, "gram")
    return flat


def _decompose(
    request: Request, matrix: Tensor, method: Method, memory: str | int | None, progress: bool | None
) -> Pairs:
    """Leading eigenpairs of a stored matrix."""
    rows = matrix.shape[0]
    if method == "eigh" or (method == "auto" and (rows <= SMALL or 4 * request.k > rows)):
        return _full(request, matrix, memory, progress)
    if method == "lanczos":
        return _lanczos(request, stored_operator(matrix), None)
    steps = max(2, int(PATIENCE * rows) // request.k)
    try:
        return _lanczos(request, stored_operator(matrix), steps)
    except NumericalError:
        return _full(request, matrix, memory, progress)


def _full(request: Request, matrix: Tensor, memory: str | int | None, progress: bool | None) -> Pairs:
    """All eigenpairs, the leading k of them kept."""
    rows = matrix.shape[0]
    bytes_ = 8 * rows * rows
    budget = parse_bytes(memory, matrix.device)
    items = (("matrix in float64", bytes_), ("eigenvectors", bytes_), ("workspace", 2 * bytes_))
    ways = ['pass method="lanczos" with a smaller k', 'pass form="trace"']
    require(Plan(f"eigendecomposition of {rows} rows", budget, items), ways)
    with waiting(f"eigendecomposition of {rows} rows", enabled=progress):
        values, vectors = eigh(matrix, "the Gram matrix")
    values, vectors = values.flip(0)[: request.k], vectors.flip(1)[:, : request.k]
    first = float(values[0].abs())
    error = float((matrix @ vectors - vectors * values).norm(dim=0).max())
    return Pairs(values, vectors, "eigh", error / first if first else 0.0)


def _lanczos(request: Request, operator: LinearOperator, steps: int | None) -> Pairs:
    """Leading eigenpairs by block Lanczos."""
    default = 1e-9 if operator.dtype == torch.float64 else 2e-6
    tolerance = default if request.how.tolerance is None else request.how.tolerance
    name = "matrix-free" if isinstance(operator, KernelOperator) else "lanczos"
    solution = eigenpairs(operator, request.k, tolerance=tolerance, max_steps=steps, seed=request.how.seed)
    pairs = solution.require(f"Lanczos for {request.k} eigenfunctions")
    return Pairs(pairs.values, pairs.vectors, name, solution.residual)
