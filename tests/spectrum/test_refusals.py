"""What questions about the kernel refuse, beyond single values of the wrong kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import spectrum
from linnet.errors import DataError, InputError, MemoryBudgetError, ModelError, NumericalError
from linnet.linalg import Diagonal, FunctionOperator
from linnet.spectrum.kernel_matrix import stored_operator
from tests.fitting.problems import network, problem, real
from tests.oracles.dense import kernel_oracle
from tests.refusals import Row, holds, refused, table

ONE = problem(n=9, outputs=1, classes=False)
MANY = problem(n=9, outputs=3, classes=False)
K = kernel_oracle(MANY.j).flatten(0, 1).flatten(1)  # (27, 27)
EYE, NAN = torch.eye(2), torch.nan


def of_one(y: Any = None, outputs: Any = "full", call: Any = spectrum.alignment) -> Any:
    """Alignment of targets with the kernel of one output."""
    return call(ONE.model, (ONE.x, real(9) if y is None else y), outputs)


def of_many(y: Any, outputs: Any = "full") -> Any:
    """The same with three."""
    return spectrum.alignment(MANY.model, (MANY.x, y), outputs)


def with_nan(x: Tensor) -> Tensor:
    """A copy whose example 2 is infinite."""
    x = x.clone()
    x[2, 1] = torch.inf
    return x


TARGETS: list[Row] = [
    (InputError, "(9, 2, 2)", lambda: of_one(real(9, 2, 2))),
    (InputError, "(9, 0)", lambda: of_one(real(9, 0))),
    (DataError, "9 inputs", lambda: of_one(real(8))),
    (InputError, "0 and 1", lambda: of_one(torch.arange(9))),
    (DataError, "complex", lambda: of_one(real(9).to(torch.complex128))),
    (InputError, "'diagonal'", lambda: of_one(outputs="diagonal", call=spectrum.kernel_norm_bound)),
    (InputError, "trace", lambda: of_many(real(9))),
    (InputError, "(9, 4)", lambda: of_many(real(9, 4))),
    (DataError, "0 to 2", lambda: of_many(torch.full((9,), 3))),
    (InputError, "integers", lambda: of_many(torch.zeros(9, 3, dtype=torch.long))),
    (InputError, "(9, 3, 2)", lambda: of_many(real(9, 3, 2), "trace")),
    (DataError, "NaN", lambda: of_many(real(9).log(), "sum")),
    (DataError, "empty", lambda: spectrum.alignment(ONE.model, (ONE.x[:0], real(9)[:0]))),
]


def eigen(k: Any = 2, **options: Any) -> Any:
    """Eigenfunctions of the kernel of one output."""
    return spectrum.eigenfunctions(ONE.model, ONE.x, k, **options)


def concentration(y: Tensor, k: Any = 2) -> Any:
    """Of the energy of targets."""
    return spectrum.energy_concentration(ONE.model, (ONE.x, y), k)


EIGENFUNCTIONS: list[Row] = [
    (InputError, "k=10", lambda: eigen(10)),
    (InputError, "'qr'", lambda: eigen(method="qr")),
    (InputError, "(4, 4)", lambda: eigen(gram=real(4, 4))),
    (InputError, "int64", lambda: eigen(gram=torch.ones(9, 9, dtype=torch.long))),
    (InputError, "matrix-free", lambda: eigen(gram=real(9, 9), method="matrix-free")),
    (InputError, "symmetric", lambda: eigen(gram=real(9, 9))),
    (InputError, "torch.as_tensor", lambda: eigen(gram=real(9, 9).numpy())),
    (NumericalError, "gram", lambda: eigen(gram=-torch.eye(9).double())),
    (InputError, "k=50", lambda: concentration(ONE.t, 50)),
    (InputError, "zero", lambda: concentration(0 * ONE.t)),
    (InputError, "(9, 2, 2)", lambda: concentration(real(9, 2, 2))),
    (DataError, "x is empty", lambda: spectrum.eigenfunctions(ONE.model, ONE.x[:0], 2)),
    (InputError, "[2]", lambda: eigen()(ONE.x, [2])),
    (DataError, "x is empty", lambda: eigen()(ONE.x[:0])),
    (InputError, "index=-1", lambda: eigen().binarized(-1)),
    (InputError, "(3, 1)", lambda: eigen().energy_concentration(ONE.t[:3])),
    (InputError, "k=3", lambda: eigen().energy_concentration(ONE.t, 3)),
    (DataError, "NaN", lambda: eigen().energy_concentration(ONE.t * NAN)),
    (MemoryBudgetError, "lanczos", lambda: eigen(None, gram=kernel_oracle(ONE.j, form="trace"), memory=700)),
]


def recorded(*steps: Any, **options: Any) -> Any:
    """Notes of a training."""
    recorder = spectrum.Recorder(MANY.x, **{"k": 2, **options})
    return [recorder.note(MANY.model, step) for step in steps]


class Bias(nn.Module):
    """A sum of a function of x and a function of θ."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(1, keepdim=True) + self.bias


class Fused(nn.Module):
    """Distances to the unit vectors, by an operation without a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(self.layer(x), torch.eye(4))


def directions(at: Any, model: nn.Module | None = None, k: int = 2) -> Any:
    """Neural anisotropy directions."""
    return spectrum.anisotropy_directions(model or network().float(), at, k)


def linearity(y: Tensor = MANY.y, *validation: Any, **options: Any) -> Any:
    """Of a task."""
    return spectrum.task_linearity(MANY.fit(), *validation, **options)


LOPSIDED = torch.tensor([[1.0, 2.0], [0.0, 1.0]]).double()
INDEFINITE = torch.diag(torch.tensor([2.0, 1.0, -1.0])).double()
OTHERS: list[Row] = [
    (InputError, "first", lambda: spectrum.kernel_distance(MANY.model, network(seed=7))),
    (InputError, "second", lambda: spectrum.kernel_distance(K, network(seed=7))),
    (InputError, "x is given", lambda: spectrum.kernel_distance(K, K, MANY.x)),
    (InputError, "shape", lambda: spectrum.kernel_distance(K, network(seed=7), MANY.x[:4])),
    (InputError, "(3, 4)", lambda: spectrum.kernel_distance(K, real(3, 4))),
    (InputError, "zero", lambda: spectrum.kernel_distance(0 * EYE, EYE)),
    (InputError, "zero", lambda: spectrum.centered_alignment(EYE, torch.ones(2, 2))),
    (NumericalError, "NaN", lambda: spectrum.kernel_distance(EYE, EYE / 0)),
    (InputError, "step=3", lambda: recorded(3, 3)),
    (InputError, "k=50", lambda: recorded(0, k=50)),
    (InputError, "(9, 2)", lambda: recorded(0, y=real(9, 2))),
    (InputError, "x is missing", lambda: spectrum.spectral_density(MANY.model)),
    (InputError, "x is given", lambda: spectrum.spectral_density(K, MANY.x)),
    (InputError, "x is given", lambda: spectrum.spectral_density(Diagonal(torch.ones(3)), MANY.x)),
    (InputError, "(3, 27)", lambda: spectrum.spectral_density(K[:3])),
    (InputError, "width=0.0", lambda: spectrum.spectral_density(K).density(width=0.0)),
    (InputError, "square", lambda: spectrum.spectral_density(FunctionOperator(lambda v: v[:2], (2, 3)))),
    (InputError, "symmetric", lambda: spectrum.spectral_density(LOPSIDED)),
    (InputError, "symmetric", lambda: spectrum.effective_dimension(LOPSIDED, 1.0)),
    (InputError, "symmetric", lambda: spectrum.condition_number(LOPSIDED)),
    (NumericalError, "NaN", lambda: spectrum.spectral_density(K * NAN)),
    (NumericalError, "-1", lambda: spectrum.effective_dimension(stored_operator(INDEFINITE), 0.5)),
    (NumericalError, "eigenvalue", lambda: spectrum.condition_number(stored_operator(INDEFINITE))),
    (InputError, "ridge=-1", lambda: spectrum.condition_number(EYE, ridge=-1.0)),
    (DataError, "x1 is empty", lambda: spectrum.condition_number(MANY.model, MANY.x[:0])),
    (InputError, "accumulate", lambda: spectrum.gram(MANY.lin, MANY.x, accumulate=torch.float64)),
    (InputError, "kernel.pt", lambda: spectrum.gram(MANY.lin, MANY.x, file="kernel.pt")),
    (DataError, "x2 is empty", lambda: spectrum.gram(MANY.lin, MANY.x, MANY.x[:0])),
    (DataError, "index 2", lambda: spectrum.gram(MANY.lin, with_nan(MANY.x))),
    (DataError, "x2", lambda: spectrum.gram(MANY.lin, MANY.x, with_nan(MANY.x))),
    (ModelError, "(2, 4)", lambda: spectrum.gram(MANY.lin, MANY.x, real(2, 4))),
    (InputError, "x.float()", lambda: directions(torch.zeros(3, dtype=torch.long))),
    (InputError, "shape ()", lambda: directions(torch.tensor(1.0))),
    (InputError, "empty", lambda: directions(torch.zeros(0, 3))),
    (DataError, "NaN", lambda: directions(torch.full((3,), NAN))),
    (ModelError, "cannot run", lambda: directions(torch.zeros(5))),
    (InputError, "k=4", lambda: directions(torch.zeros(3), k=4)),
    (ModelError, "second derivative", lambda: directions(torch.ones(3), Fused())),
    (ModelError, "vanishes", lambda: directions(torch.ones(3), Bias())),
    (InputError, "k", lambda: linearity(k=28)),
    (InputError, "samples", lambda: linearity(samples=10)),
    (ModelError, "cannot run", lambda: linearity(MANY.y, MANY.x[:, :1])),
    (DataError, "NaN", lambda: linearity(MANY.y, MANY.x * NAN)),
    (
        DataError,
        "same",
        lambda: spectrum.task_linearity(linnet.fit(MANY.lin, (MANY.x, torch.ones(9, 3).double()))),
    ),
]


@table([*TARGETS, *EIGENFUNCTIONS, *OTHERS])
@pytest.mark.filterwarnings("ignore:y is constant")
@pytest.mark.thinned(3)
def test_what_is_refused(row: Row) -> None:
    holds(row)


@pytest.mark.parametrize(
    "call",
    [
        lambda **m: spectrum.alignment(ONE.model, (ONE.x, ONE.t), **m),
        lambda **m: spectrum.eigenfunctions(ONE.model, ONE.x, 2, method="lanczos", **m),
        lambda **m: spectrum.energy_concentration(ONE.model, (ONE.x, ONE.t), 2, method="eigh", **m),
        lambda **m: spectrum.kernel_norm_bound(ONE.model, (ONE.x, ONE.t), **m),
        lambda **m: spectrum.kernel_distance(ONE.model, ONE.lin, ONE.x, **m),
        lambda **m: spectrum.centered_alignment(ONE.model, ONE.lin, ONE.x, **m),
        lambda **m: spectrum.effective_dimension(ONE.model, 1.0, ONE.x, **m),
        lambda **m: spectrum.condition_number(ONE.model, ONE.x, **m),
        lambda **m: spectrum.spectral_density(ONE.model, ONE.x, **m),
        lambda **m: spectrum.Recorder(ONE.x, k=2, **m).note(ONE.model, 0),
    ],
)
def test_every_budget_is_kept(call: Callable[..., object]) -> None:
    call(memory="1GB")
    refused(MemoryBudgetError, lambda: call(memory=500), "500 B")
