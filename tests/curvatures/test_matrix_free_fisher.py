"""Sampled matrices, and the Fisher matrix by finite differences, against dense float64 oracles."""

from __future__ import annotations

import pytest
import torch

from linnet.curvatures.products import FiniteDifferenceFisher, FisherOperator, GaussNewtonOperator
from linnet.curvatures.stream import Batches
from linnet.errors import ModelError
from linnet.likelihoods import Categorical
from linnet.tangent.functional import Functional
from tests.curvatures.matrix_free_cases import CPU, FEW, batches, function_of, likelihood_of, output_hessian
from tests.oracles.conformance import check_operator
from tests.oracles.dense import fisher_oracle, ggn_oracle
from tests.zoo import assert_near, case
from tests.zoo_modules import lenet

# --- randomness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mc", "random-projection"])
@pytest.mark.parametrize("name", ["mlp-tanh", "structured-output"])
@pytest.mark.thinned(2)
def test_sampled_matrices_are_fixed_and_unbiased(name: str, kind: str) -> None:
    function, expected = function_of(name), case(name)
    likelihood = likelihood_of(name, "categorical")
    exact = ggn_oracle(expected.j1, output_hessian(name, "categorical"))
    kernel = GaussNewtonOperator if kind == "random-projection" else FisherOperator
    v = expected.direction(1)
    drawn = []
    for seed in range(60):
        operator = kernel(function, batches(name, "categorical", 3), likelihood, kind, 4, seed)
        drawn.append(operator @ v)
        if seed == 0:
            assert_near(operator @ v, drawn[0], 1e-12)
            check_operator(operator, operator.dense())
            assert_near(
                operator @ torch.stack([v, 2 * v, -v], 1), torch.stack([drawn[0], 2 * drawn[0], -drawn[0]], 1)
            )
    found = torch.stack(drawn)
    stderr = found.std(0) / 60**0.5
    error = (found.mean(0) - exact @ v).abs()
    assert bool((error <= 5 * stderr + 1e-12).all())
    assert float(found.std(0).max()) > 1e-6


def test_more_samples_are_closer() -> None:
    name, v = "mlp-tanh", case("mlp-tanh").direction(1)
    exact = fisher_oracle(case(name).j1, case(name).f1, "categorical") @ v

    def error(samples: int) -> float:
        operator = FisherOperator(
            function_of(name), Batches(case(name).x1, CPU), Categorical(), "mc", samples
        )
        return float((operator @ v - exact).norm() / exact.norm())

    assert error(4000) < 0.1 < error(1) * 4


# --- finite differences ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gaussian", "categorical"])
@pytest.mark.parametrize("name", FEW)
def test_finite_differences_are_close_to_the_exact_product(name: str, family: str) -> None:
    exact = ggn_oracle(case(name).j1, output_hessian(name, family))
    operator = FiniteDifferenceFisher(
        function_of(name), batches(name, family, 3), likelihood_of(name, family)
    )
    v = case(name).direction(1)
    stiff = exact @ v  # moves the outputs as much as any direction of its length
    assert_near(operator @ v, stiff, 1e-6)
    assert_near(operator @ stiff, exact @ stiff, 1e-6)
    assert operator.passes == 2


def test_finite_differences_in_single_precision() -> None:
    net, x = lenet(), torch.randn(100, 1, 14, 14)
    exact = FisherOperator(Functional(net.double()), Batches(x.double(), CPU), Categorical())
    operator = FiniteDifferenceFisher(Functional(net.float()), Batches(x, CPU), Categorical())
    v = torch.randn(operator.shape[0])
    for u in (v, operator @ v):
        expected = exact @ u.double()
        error = ((operator @ u).double() - expected).norm() / expected.norm()
        assert float(error) < 1e-2  # Maddox et al., figure 3


def test_finite_differences_are_exact_in_the_length_of_v() -> None:
    name = "mlp-tanh"
    operator = FiniteDifferenceFisher(function_of(name), Batches(case(name).x1, CPU), Categorical())
    v = case(name).direction()
    product = operator @ v
    for scale in (1e-12, -1e-3, 1e6):
        assert_near((operator @ (scale * v)) / scale, product, 1e-6)
    found = operator @ torch.stack([v, torch.zeros_like(v), 3 * v], 1)
    assert_near(found, torch.stack([product, torch.zeros_like(v), 3 * product], 1), 1e-6)


def test_finite_differences_along_a_parameter_without_effect() -> None:
    name = "plain-arithmetic"  # has an unused parameter
    operator = FiniteDifferenceFisher(function_of(name), Batches(case(name).x1, CPU), Categorical())
    useless = (case(name).j1.abs().sum((0, 1)) == 0).double()
    assert useless.any()
    assert not (operator @ useless).any()


class TiedPadding(torch.nn.Module):
    """A table with a padding row that is read again as the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 3, padding_idx=0)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.table(ids).mean(1).tanh())
        return found


def test_a_table_that_cannot_be_held_is_refused() -> None:
    with pytest.raises(ModelError, match="padding row"):
        FiniteDifferenceFisher(
            Functional(TiedPadding()), Batches(torch.zeros(2, 3).long(), CPU), Categorical()
        )
