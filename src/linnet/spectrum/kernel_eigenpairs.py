"""Eigenpairs of a kernel on a data set, with a method that fits the memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from linnet.errors import InputError, NumericalError
from linnet.fitting.arguments import check_positive
from linnet.linalg.factorize import eigh
from linnet.linalg.operator import LinearOperator
from linnet.linalg.random import Seed
from linnet.memory import Plan, parse_bytes, require
from linnet.params import choice
from linnet.progress import waiting
from linnet.solvers.lanczos import eigenpairs
from linnet.spectrum.kernel_matrix import KernelOperator, check_symmetry, flat_gram, stored_operator
from linnet.tangent.batch import Inputs
from linnet.tangent.captured import Outputs
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram as _gram

Method = Literal["auto", "lanczos", "matrix-free", "eigh"]
METHODS = ("auto", "lanczos", "matrix-free", "eigh")
SMALL = 512  # matrices up to this size are decomposed in full by "auto"
PATIENCE = 0.3  # share of the space that Lanczos may fill before "auto" decomposes in full instead


@dataclass(frozen=True)
class Request:
    """What is to be decomposed, and how exactly.

    Args:
        function: The network.
        x: N examples.
        outputs: Which kernel.
        rows: R, the size of the kernel's matrix.
        k: Number of eigenpairs.
        tolerance: Of Lanczos, or None.
        seed: Of its start vectors.
    """

    function: Functional
    x: Inputs
    outputs: Outputs
    rows: int
    k: int
    tolerance: float | None
    seed: Seed


@dataclass(frozen=True)
class Pairs:
    """Leading eigenpairs of K.

    Args:
        values: σ (k,), decreasing.
        vectors: u (R, k).
        method: How they were found.
        residual: The largest ‖K u − σ u‖ / σ₁.
    """

    values: Tensor
    vectors: Tensor
    method: str
    residual: float


def kernel_eigenpairs(
    request: Request,
    method: Method = "auto",
    given: Tensor | None = None,
    memory: str | int | None = None,
    file: str | Path | None = None,
    progress: bool | None = None,
) -> Pairs:
    """Leading eigenpairs of the kernel.

    Args:
        request: What is wanted.
        method: ``"auto"``, ``"lanczos"``, ``"matrix-free"`` or ``"eigh"``.
        given: The Gram matrix, where it is known.
        memory: The budget.
        file: A ``.npy`` file for the Gram matrix.
        progress: Show progress.

    Returns:
        The pairs.

    Raises:
        InputError: If an argument is out of range.
    """
    choice("method", method, METHODS)
    check_count(request.k, request.rows, "the values of a function on x")
    if request.tolerance is not None:
        check_positive("tolerance", request.tolerance, "leave tolerance= out")
    chosen = _choose(request, method, given, memory, file)
    if chosen == "matrix-free":
        return _lanczos(request, KernelOperator(request.function, request.x, request.outputs), None)
    matrix = _matrix(request, given, memory, file, progress)
    return _decompose(request, matrix, chosen, memory, progress)


def check_count(k: Any, limit: int, what: str) -> None:
    """Raise unless 1 ≤ k ≤ limit.

    Args:
        k: A number of eigenpairs.
        limit: The largest.
        what: What it is the number of.

    Raises:
        InputError: If it is not.
    """
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= limit:
        raise InputError(
            f"k is {k!r}",
            expected=f"an integer from 1 to {limit}, {what}",
            remedy="pass a smaller k=, or more examples" if isinstance(k, int) and k > 0 else "leave k= out",
        )


def _choose(
    request: Request, method: Method, given: Tensor | None, memory: str | int | None, file: Any
) -> Method:
    """The method, matrix-free where the Gram matrix would not fit."""
    if method == "matrix-free" and (given is not None or file is not None):
        raise InputError(
            'gram= or file= with method="matrix-free"', "no Gram matrix", 'pass method="lanczos" to use it'
        )
    if method != "auto" or given is not None or file is not None:
        return method
    rows = request.rows
    size = rows * rows * torch.promote_types(request.function.dtype, torch.float32).itemsize
    fits = size <= 0.8 * parse_bytes(memory, request.function.device)
    return "auto" if fits or 4 * request.k > rows else "matrix-free"


def _matrix(
    request: Request,
    given: Tensor | None,
    memory: str | int | None,
    file: str | Path | None,
    progress: bool | None,
) -> Tensor:
    """The Gram matrix (R, R)."""
    if given is None:
        options: dict[str, Any] = {"outputs": request.outputs, "memory": memory, "file": file}
        return flat_gram(_gram(request.function, request.x, progress=progress, **options))
    flat = flat_gram(given)
    if flat.shape[0] != request.rows:
        raise InputError(
            f"gram has shape {tuple(given.shape)}",
            expected=f"{request.rows} rows: one for each value of a function on x",
            remedy=f"compute it on the same x with outputs={request.outputs!r}",
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
    ways = ['pass method="lanczos" with a smaller k', 'pass outputs="trace"']
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
    tolerance = default if request.tolerance is None else request.tolerance
    name = "matrix-free" if isinstance(operator, KernelOperator) else "lanczos"
    solution = eigenpairs(operator, request.k, tolerance=tolerance, max_steps=steps, generator=request.seed)
    pairs = solution.require(f"Lanczos for {request.k} eigenfunctions")
    return Pairs(pairs.values, pairs.vectors, name, solution.residual)
