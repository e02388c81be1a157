"""Regressors of few rows and one output, and networks that compute in another type than their weights'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import linnet
from tests.fitting.problems import near, real, solver_of

X, Y = real(5, 3, seed=1), real(5, 1, seed=2)


class Squeezed(nn.Module):
    """A regressor with outputs (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).squeeze(-1)
        return out


def net() -> nn.Module:
    torch.manual_seed(0)
    return Squeezed().double()


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("solver", ["dual", "cg"])
def test_a_fit_of_few_rows_is_the_dense_one(rows: int, solver: str) -> None:
    model, x, y = net(), X[:rows], Y[:rows, 0]
    lin = linnet.linearize(model)
    kernel = lin.kernel(X, x).reshape(5, rows)
    f0 = model(X).detach()
    expected = f0 + kernel @ torch.linalg.solve(kernel[:rows] + 0.3 * torch.eye(rows).double(), y - f0[:rows])
    for targets in (y, y[:, None]):
        fit = linnet.fit(lin, (x, targets), ridge=0.3, solver=solver_of(solver, tolerance=1e-12))
        near(fit.predict(X)[:, 0], expected, 1e-8)
        near(fit.predict(X[:1]), fit.predict(X)[:1], 1e-10)


@pytest.mark.parametrize("rows", [2, 5])
def test_adapt_takes_targets_in_one_axis_or_two(rows: int) -> None:
    flat, column = (linnet.adapt(net(), (X[:rows], y)) for y in (Y[:rows, 0], Y[:rows]))
    assert flat.predict(X[:1]).shape == (1, 1)
    near(flat.predict(X), column.predict(X))


class Autocast(nn.Module):
    """A network that computes in bfloat16 and returns it, or converts it."""

    def __init__(self, convert: bool) -> None:
        super().__init__()
        self.convert = convert
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = self.last(self.norm(self.first(x)).relu())
        return out.float() if self.convert else out


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize(("solver", "ridge"), [("dual", 1.0), ("dual", 1e3), ("cg", 1e3)])
@pytest.mark.thinned(2)
def test_what_is_fitted_under_autocast_predicts(convert: bool, solver: str, ridge: float) -> None:
    torch.manual_seed(0)
    lin, x, y = linnet.linearize(Autocast(convert)), real(12, 3, seed=3).float(), torch.arange(12) % 2
    fit = linnet.fit(lin, (x, y), ridge=ridge, solver=solver)
    assert fit.predict(x).isfinite().all()
    assert fit.predictive(x).variance.min() > 0
    assert fit.forget([0]).predict(x).isfinite().all()
