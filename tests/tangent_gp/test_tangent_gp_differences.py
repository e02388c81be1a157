"""Fisher products by finite differences, several vectors at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from linnet.curvatures.products import FiniteDifferenceFisher
from linnet.curvatures.stream import Batch, Batches
from linnet.likelihoods import Categorical, Gaussian
from linnet.linear.iterative import BatchedDifferences
from linnet.tangent.functional import Functional
from linnet.tangent_gp.tangent_gp import TangentGP
from tests.fitting.problems import network, real
from tests.tangent_gp.tangent_gp_cases import dense

# of a product, by divergences whose last digits depend on the order of sums, which differs between machines
ROUNDING = 5e-8


@pytest.mark.parametrize("likelihood", [Gaussian(), Categorical()], ids=["gaussian", "categorical"])
def test_columns_together_are_the_columns_one_by_one(likelihood: Gaussian | Categorical) -> None:
    function = Functional(network(3, 5, 2))
    data = Batches(real(12, 3, seed=1), torch.device("cpu"), block=5)
    v = real(function.space.dim, 4, seed=2)
    v[:, 2] = 0
    expected = FiniteDifferenceFisher(function, data, likelihood) @ v
    found = BatchedDifferences(function, data, likelihood) @ v
    assert torch.allclose(found, expected, rtol=1e-7, atol=ROUNDING * float(expected.abs().max()))
    assert not found[:, 2].any()


def test_a_pass_differentiates_once_for_all_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact variance of many points: gradients by the chunk, not by the column."""
    oracle, columns = dense(n=12), []
    column = FiniteDifferenceFisher._column

    def counted(self: FiniteDifferenceFisher, batch: Batch, f: Tensor, y: Tensor | None, v: Tensor) -> Tensor:
        columns.append(1)
        return column(self, batch, f, y, v)

    monkeypatch.setattr(FiniteDifferenceFisher, "_column", counted)
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), derivative="finite-difference", variance="exact")
    gp.fit(oracle.x, oracle.y)
    columns.clear()
    found = gp.predictive(oracle.x_test).variance
    assert not columns
    exact = TangentGP(oracle.model, Gaussian(variance=0.2)).fit(oracle.x, oracle.y)
    assert torch.allclose(found, exact.predictive(oracle.x_test).variance, rtol=1e-4)


class Branching(nn.Module):
    """Looks at values, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Scaled by a number that depends on the data."""
        out: Tensor = self.layer(x)
        return 2 * out if float(out.detach().abs().sum()) > 0 else out


def test_what_cannot_be_vectorized_goes_column_by_column() -> None:
    function = Functional(Branching())
    data = Batches(real(6, 3, seed=1), torch.device("cpu"))
    v = real(function.space.dim, 3, seed=2)
    torch.testing.assert_close(
        BatchedDifferences(function, data, Gaussian()) @ v,
        FiniteDifferenceFisher(function, data, Gaussian()) @ v,
    )


def test_a_small_budget_runs_few_vectors_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    function = Functional(network(3, 5, 2))
    data = Batches(real(12, 3, seed=1), torch.device("cpu"))
    v, sizes = real(function.space.dim, 6, seed=2), []
    together = BatchedDifferences._together

    def counted(self: BatchedDifferences, batch: Batch, part: Tensor) -> Tensor:
        sizes.append(part.shape[1])
        return together(self, batch, part)

    monkeypatch.setattr(BatchedDifferences, "_together", counted)
    operator = BatchedDifferences(function, data, Gaussian())
    whole = operator @ v
    assert sizes == [6]
    sizes.clear()
    monkeypatch.setattr(BatchedDifferences, "_chunk", lambda self, batch: 4)
    assert torch.allclose(operator @ v, whole, rtol=1e-9)
    assert sizes == [4, 2]
    sizes.clear()
    monkeypatch.undo()
    operator.memory = 10 * function.space.dim * 8  # not two vectors
    assert torch.allclose(operator @ v, whole, rtol=1e-7, atol=ROUNDING * float(whole.abs().max()))
