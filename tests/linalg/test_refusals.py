"""What matrices and iterations refuse, one row for each check."""

from __future__ import annotations

from typing import Any

import torch

from linnet.errors import InputError, NumericalError
from linnet.linalg import (
    Dense,
    Diagonal,
    FunctionOperator,
    Kronecker,
    KroneckerEigen,
    LinearOperator,
    LowRankMatrix,
    ParameterSpace,
    Sum,
    factored_damping,
)
from linnet.linalg.factorize import cholesky, eigh, root
from linnet.linalg.random import make_generator
from linnet.solvers import (
    cg,
    eigenpairs,
    hutchinson,
    nystrom,
    nystrom_preconditioner,
    shifted_cg,
    slq,
    tridiagonalize,
)
from linnet.solvers.lanczos import krylov
from linnet.solvers.nystrom import pivoted_cholesky
from tests.refusals import Row, holds, table

EYE, EYES, ONES = torch.eye(2), torch.eye(2).repeat(2, 1, 1), torch.ones(2)
NEGATIVE = torch.tensor([1.0, -2.0])
SPACE = ParameterSpace({"weight": (2, 3), "bias": (2,)})
TALL: Any = FunctionOperator(lambda v: v[:2], (2, 3))
SQUARE: Any = Dense(torch.eye(3))


def function(scale: float) -> Any:
    """A multiple of the identity, as a function."""
    return FunctionOperator(lambda v: scale * v, (4, 4), symmetric=True)


def params(**changed: Any) -> dict[str, Any]:
    """Parameters of the space, some of them changed."""
    return {**SPACE.to_params(torch.zeros(8)), **changed}


def product(right: Any, left: Any = EYE) -> Any:
    """A Kronecker product with a name."""
    return Kronecker(left, right, name="G of fc1")


def composed(a: LinearOperator, b: LinearOperator) -> object:
    """A B."""
    return a @ b


FACTORS: list[Row] = [
    (NumericalError, "factor B", lambda: cholesky(torch.diag(NEGATIVE), "factor B")),
    (NumericalError, "4 NaN", lambda: eigh(torch.nan * EYE, "H")),
    (InputError, "H has shape", lambda: cholesky(torch.ones(3), "H")),
    (InputError, "int64", lambda: eigh(torch.ones(2, 2, dtype=torch.int64), "H")),
    (NumericalError, "-2", lambda: root(torch.diag(NEGATIVE), "H")),
    (InputError, "seed='0'", lambda: make_generator("0")),  # type: ignore[arg-type]
]
MATRICES: list[Row] = [
    (InputError, "(2, 3)", lambda: Dense(torch.ones(2, 3))),
    (InputError, "one matrix", lambda: Dense(torch.ones(2, 2, 2))),
    (InputError, "symmetric", lambda: Dense(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))),
    (NumericalError, "4 NaN", lambda: Dense(torch.full((2, 2), torch.nan))),
    (InputError, "dimension 8", lambda: Dense(EYE, SPACE)),
    (NumericalError, "my G", lambda: Dense(torch.diag(NEGATIVE), name="my G").solve(ONES)),
    (InputError, "(2, 2)", lambda: Diagonal(torch.ones(2, 2))),
    (InputError, "negative entry -2", lambda: Diagonal(NEGATIVE)),
    (NumericalError, "my G", lambda: Diagonal(torch.tensor([1.0, 0.0]), name="my G").inverse()),
    (InputError, "(2, 3)", lambda: Diagonal(ONES).quadratic(torch.ones(2, 3))),
    (InputError, "-1", lambda: Diagonal(ONES).scaled(-1.0)),
    (InputError, "matrix", lambda: KroneckerEigen.half_diagonal(ONES, ONES)),
    (NumericalError, "left", lambda: KroneckerEigen.half_diagonal(NEGATIVE, EYE)),
    (InputError, "left factor", lambda: Kronecker(torch.ones(2, 3), EYE)),
    (InputError, "float64", lambda: product(EYE.double())),
    (NumericalError, "right factor of G of fc1", lambda: product(torch.diag(NEGATIVE)).solve(torch.ones(4))),
    (NumericalError, "G of fc1", lambda: KroneckerEigen.of(product(0 * EYE)).logdet()),
    (InputError, "(3, 2)", lambda: KroneckerEigen(EYE, torch.eye(3), torch.ones(3, 2))),
    (NumericalError, "-1", lambda: KroneckerEigen(EYE, EYE, -torch.ones(2, 2))),
    (InputError, "damping", lambda: factored_damping(product(EYE), -0.1)),
    (InputError, "(2, 2)", lambda: Kronecker(EYE, EYES)),
    (InputError, "(1, 2, 2)", lambda: Kronecker(EYES, EYES[:1])),
    (InputError, "symmetric", lambda: Kronecker(EYES, torch.ones(2, 2, 2).triu())),
    (InputError, "(2, 2, 2)", lambda: KroneckerEigen(EYES, EYES, torch.ones(2, 2))),
    (NumericalError, "matrix 1", lambda: Kronecker(EYES, EYES * NEGATIVE[:, None, None]).inverse()),
    (InputError, "(3,)", lambda: LowRankMatrix(torch.ones(3), torch.ones(1))),
    (InputError, "scale", lambda: LowRankMatrix(torch.ones(3, 1), torch.ones(1), scale=ONES)),
    (NumericalError, "-2", lambda: LowRankMatrix(EYE, NEGATIVE)),
    (InputError, "-1", lambda: LowRankMatrix(EYE, ONES, rest=-1.0)),
    (InputError, "(3,)", lambda: LowRankMatrix.from_factor(torch.ones(3))),
    (
        NumericalError,
        "diagonal",
        lambda: LowRankMatrix.from_factor(torch.ones(3, 1), diagonal=torch.zeros(3)),
    ),
    (NumericalError, "my G", lambda: LowRankMatrix.from_factor(torch.ones(5, 2), name="my G").inverse()),
]
OPERATORS: list[Row] = [
    (InputError, "adjoint=", lambda: TALL.T),
    (InputError, "square", lambda: FunctionOperator(lambda v: v[:2], (2, 3), symmetric=True)),
    (InputError, "(4, 3)", lambda: SQUARE @ torch.ones(4, 3)),
    (InputError, "float64", lambda: SQUARE @ torch.ones(3).double()),
    (InputError, "space", lambda: SQUARE @ {"weight": torch.ones(3)}),
    (InputError, "composed", lambda: composed(TALL, TALL)),
    (InputError, "added", lambda: TALL + SQUARE),
    (InputError, "damped", lambda: TALL.damped(1.0)),
    (InputError, "terms", lambda: Sum([])),
    (InputError, "spaces", lambda: Diagonal(torch.ones(8), SPACE) + Diagonal(torch.ones(8), SPACES)),
    (InputError, "multiplier", lambda: SQUARE * torch.nan),
    (InputError, "damping", lambda: SQUARE.damped(-1.0)),
    (InputError, "shapes", lambda: ParameterSpace({})),
    (InputError, "(9, 1, 1)", lambda: SPACE.to_flat(torch.zeros(9, 1, 1))),
    (InputError, "'extra'", lambda: SPACE.to_flat(params(extra=torch.zeros(1)))),
    (InputError, "'bias'", lambda: SPACE.to_flat(params(bias=torch.zeros(2, 4)))),
    (InputError, "'wings'", lambda: SPACE.select(["wings"])),
    (InputError, "and 4 more", lambda: ParameterSpace({f"p{i}": () for i in range(9)}).to_flat({})),
]
SPACES = ParameterSpace({"weight": (2, 4)})
ITERATIONS: list[Row] = [
    (InputError, "square", lambda: cg(TALL, torch.ones(3))),
    (InputError, "(4,)", lambda: cg(SQUARE, torch.ones(4))),
    (InputError, "preconditioner", lambda: cg(SQUARE, torch.ones(3), preconditioner=Diagonal(torch.ones(4)))),
    (InputError, "tolerance", lambda: cg(SQUARE, torch.ones(3), tolerance=2.0)),
    (InputError, "max_steps", lambda: cg(SQUARE, torch.ones(3), max_steps=0)),
    (InputError, "shifts", lambda: shifted_cg(SQUARE, torch.ones(3), torch.tensor([1.0, -1.0]))),
    (InputError, "shape", lambda: shifted_cg(SQUARE, torch.ones(3, 2), torch.ones(1))),
    (InputError, "block", lambda: krylov(SQUARE, 0, 4)),
    (InputError, "rank", lambda: pivoted_cholesky(torch.ones(3), lambda i: torch.ones(3), 0)),
    (NumericalError, "NaN", lambda: eigenpairs(function(torch.nan), 1, seed=0)),
    (InputError, "k=4", lambda: eigenpairs(SQUARE, 4)),
    (InputError, "square", lambda: eigenpairs(TALL, 1)),
    (InputError, "tolerance", lambda: eigenpairs(SQUARE, 1, tolerance=-1.0)),
    (InputError, "max_steps", lambda: eigenpairs(SQUARE, 1, max_steps=0)),
    (InputError, "shape", lambda: tridiagonalize(SQUARE, torch.ones(4, 1), 2)),
    (InputError, "steps", lambda: tridiagonalize(SQUARE, torch.ones(3, 1), 0)),
    (InputError, "rank=4", lambda: nystrom_preconditioner(SQUARE, 1.0, 4)),
    (InputError, "square", lambda: nystrom_preconditioner(TALL, 1.0, 2)),
    (InputError, "damping", lambda: nystrom_preconditioner(SQUARE, 0.0, 2)),
    (NumericalError, "positive definite", lambda: nystrom(function(-1.0), 2, seed=0)),
    (NumericalError, "8 NaN", lambda: nystrom(function(torch.nan), 2, seed=0)),
    (InputError, "samples", lambda: hutchinson(SQUARE, 0)),
    (InputError, "square", lambda: hutchinson(TALL, 1)),
    (InputError, "samples", lambda: slq(SQUARE, torch.log, 0, 1)),
    (InputError, "steps", lambda: slq(SQUARE, torch.log, 1, 0)),
]


@table([*FACTORS, *MATRICES, *OPERATORS, *ITERATIONS])
def test_what_is_refused(row: Row) -> None:
    holds(row)
