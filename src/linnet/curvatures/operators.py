"""Structures computed from products with the whole matrix: low rank, and dense Hessians."""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.curvatures import settings
from linnet.curvatures.curvature import Curvature
from linnet.curvatures.engine import Request, everything, layers_of
from linnet.curvatures.expectation import Expectation
from linnet.curvatures.fisher import FiniteDifferenceFisher, FisherOperator
from linnet.curvatures.ggn import GaussNewtonOperator, SummedOperator
from linnet.curvatures.hessian import HessianOperator
from linnet.curvatures.layers import Layer
from linnet.curvatures.parts import Part
from linnet.curvatures.stream import Batches
from linnet.errors import InputError, ModelError
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.operator import LinearOperator
from linnet.linalg.structured import Dense
from linnet.memory import Plan, parse_bytes, require
from linnet.solvers.lanczos import eigenpairs
from linnet.solvers.nystrom import nystrom
from linnet.solvers.solution import led
from linnet.tangent.functional import Functional

COLUMNS = 64  # columns of a dense Hessian computed at once
LANCZOS_TOLERANCE = 1e-4


def matrix_free(
    function: Functional, batches: Batches, expectation: Expectation, derivative: str
) -> SummedOperator:
    """Products with the whole matrix, one pass over the data each."""
    likelihood, kind = expectation.likelihood, expectation.kind
    if derivative == "finite-difference":
        equal = likelihood.canonical and expectation.matrix == "gauss-newton"
        if kind != "exact" or not (equal or expectation.matrix == "fisher"):
            raise InputError(
                f"derivative='finite-difference' with matrix={expectation.matrix!r}, expectation={kind!r}",
                expected='matrix="fisher" with expectation="exact"',
                remedy='pass structure="matrix-free" for the other matrices',
            )
        return FiniteDifferenceFisher(function, batches, likelihood)
    if expectation.matrix == "hessian":
        if kind != "exact":
            raise InputError(
                f"matrix='hessian' with expectation={kind!r}",
                expected='expectation="exact": a Hessian has no columns to draw',
                remedy="leave expectation= out",
            )
        return HessianOperator(function, batches, likelihood)
    given = (function, batches, likelihood, kind, expectation.samples, expectation.seed)
    if expectation.matrix == "fisher" or kind in ("mc", "empirical"):
        return FisherOperator(*given)
    return GaussNewtonOperator(*given)


def whole(
    product: SummedOperator,
    batches: Batches,
    request: Request,
    structure: str,
    low: settings.LowRank,
) -> Curvature:
    """A matrix with closed forms from products with the whole one."""
    function, kept = product.function, request.expectation.matrix
    if function.dtype.itemsize < 4:
        raise ModelError(
            f"model is {function.dtype} with structure={structure!r} and matrix={kept!r}",
            expected="float32 or float64: the matrix is made from whole products with it",
            remedy="pass model.float(), or use a structure that sums in float32, such as kfac or diagonal",
        )
    for _ in batches:  # counts the examples of all processes, and checks them
        pass
    made = request.provenance(structure, float(batches.examples))
    if structure == "low-rank" and kept != "hessian":
        found = _low_rank(product, low, request)
        return Curvature((Part(everything(function), found, "low-rank"),), function, made)
    if kept != "hessian" or structure not in ("full", "block"):
        raise InputError(
            f"structure={structure!r} with matrix={kept!r}",
            expected='"matrix-free", "full" or "block" for a Hessian',
            remedy="use the Gauss-Newton matrix for approximations that must be positive semi-definite",
        )
    layers = [everything(function)] if structure == "full" else layers_of(function, batches.first())
    largest = sum(layer.size**2 for layer in layers) * function.dtype.itemsize
    budget = parse_bytes(request.memory, function.device)
    require(
        Plan(f"{structure} Hessian of {function.space.dim} parameters", budget, (("matrix", largest),)),
        ['use structure="matrix-free"', "select fewer parameters with linnet.linearize(model, params=...)"],
    )
    parts = tuple(Part(layer, Dense(_dense(product, layer)), structure) for layer in layers)
    return Curvature(parts, function, made)


def _low_rank(product: SummedOperator, low: settings.LowRank, request: Request) -> LowRankMatrix:
    """The leading eigenpairs."""
    p = product.shape[0]
    rank, method, seed = min(low.rank, p), low.method, low.seed
    held = {"lanczos": 2 * rank * 20, "randomized": 3 * rank}[method] * p * product.dtype.itemsize
    budget = parse_bytes(request.memory, product.device)
    require(
        Plan(f"{rank} eigenpairs of {p} parameters", budget, (("basis", held),)),
        ["lower the rank of LowRankMatrix(rank)", 'use LowRankMatrix(rank, method="randomized")'],
    )

    def solve(matrix: LinearOperator) -> tuple[Tensor, ...]:
        if method == "randomized":
            near = nystrom(matrix, rank, seed)
            return near.basis, near.values
        pairs = eigenpairs(matrix, rank, tolerance=LANCZOS_TOLERANCE, seed=seed)
        found = pairs.require("the leading eigenpairs of the curvature")
        return found.vectors, found.values.clamp(min=0)

    basis, values = led(product, solve, product.data.share)
    return LowRankMatrix(basis, values, space=product.space, name="low-rank curvature")


def _dense(product: SummedOperator, layer: Layer) -> Tensor:
    """A layer's diagonal block, column by column."""
    space = product.function.space
    rows = torch.cat([torch.arange(space.dim)[space.slices[name]] for name in layer.names])
    rows = rows.to(product.device)
    matrix = torch.empty(len(rows), len(rows), dtype=product.dtype, device=product.device)
    for start in range(0, len(rows), COLUMNS):
        own = rows[start : start + COLUMNS]
        unit = torch.zeros(space.dim, len(own), dtype=product.dtype, device=product.device)
        unit[own, torch.arange(len(own), device=own.device)] = 1
        matrix[:, start : start + len(own)] = product.mm(unit)[rows]
    return (matrix + matrix.T) / 2
