"""Choices, checks and messages of the tangent Gaussian process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import linnet
from linnet.errors import DataError, InputError, MemoryBudgetError
from linnet.likelihoods import Gaussian, HeteroscedasticGaussian
from linnet.linear.problem import Problem
from linnet.tangent.functional import Functional
from linnet.tangent_gp.solving import Options, planned
from linnet.tangent_gp.tangent_gp import TangentGP
from tests.fitting.problems import near, network, real
from tests.laplace.laplace_problems import numbers
from tests.tangent_gp.tangent_gp_cases import dense

NOISE = Gaussian(variance=0.2)


def test_a_predicted_variance_of_zero_is_refused() -> None:
    model = network(3, 5, 2)
    with torch.no_grad():
        model[2].bias[1] = -2000.0  # type: ignore[index,union-attr,operator]
    with pytest.raises(DataError, match="network's"):
        TangentGP(model, HeteroscedasticGaussian()).fit(real(4, 3), real(4, 1))


def test_the_way_is_chosen_by_size() -> None:
    few, many = dense(n=4, outputs=1, hidden=8), dense(n=200, outputs=1, hidden=2)
    gp = TangentGP(few.model, NOISE).fit(few.x, few.y)
    assert (gp.plan.space, gp.plan.solver) == ("function", "cholesky")
    gp = TangentGP(many.model, NOISE).fit(many.x, many.y)
    assert (gp.plan.space, gp.plan.solver) == ("parameter", "cholesky")
    assert gp.plan.reason == "the fewest operations"
    assert "function space by cg" in str(gp.plan)
    assert len(gp.plan.ways) == 5


def test_a_kernel_that_fits_is_factored_since_variances_by_products_cost_the_network() -> None:
    """The cache of variances pulls a hundred directions back through the network, a factor none."""
    wide = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    options = Options.of("function", {"memory": "16GB"}, linearized=False)
    plan = planned(Problem(Functional(wide), torch.zeros(5000, 784), torch.zeros(5000, 1)), options)
    assert (plan.solver, plan.stored) == ("cholesky", False)


def test_the_rank_of_the_variance_cache_counts_in_the_plan() -> None:
    """A rank of 20 fits into 40 MB; the usual hundred directions of 236,000 parameters do not."""
    model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 1))
    x, y = torch.randn(120, 784), torch.randn(120, 1)
    plain = {"space": "parameter", "solver": "cg", "memory": 40_000_000}
    with pytest.raises(MemoryBudgetError, match="variance cache"):
        TangentGP(model, NOISE, **plain).fit(x, y)  # type: ignore[arg-type]
    few = TangentGP(model, NOISE, **plain, rank=20).fit(x, y)  # type: ignore[arg-type]
    assert bool((few.predictive(x[:2]).variance > 0).all())


def test_what_does_not_fit_is_solved_by_products_or_refused() -> None:
    model, x, y = network(3, 40, 1), real(300, 3), real(300, 1, seed=1)
    exact = TangentGP(model, NOISE).fit(x, y)
    tight = TangentGP(model, NOISE, memory=700_000).fit(x, y)
    assert tight.plan.solver == "cg"
    assert "does not fit" in tight.plan.reason
    assert torch.allclose(tight.predictive(x[:5]).mean, exact.predictive(x[:5]).mean, rtol=1e-3, atol=1e-4)
    with pytest.raises(MemoryBudgetError, match='solver="cg"'):
        TangentGP(model, NOISE, space="function", solver="cholesky", memory=700_000).fit(x, y)


@pytest.mark.long
def test_every_option_of_the_iteration_counts() -> None:
    oracle = dense(n=14)

    def made(**options: Any) -> dict[str, Any]:
        gp = TangentGP(oracle.model, NOISE, "parameter", 0.01, solver="cg", **options).fit(oracle.x, oracle.y)
        gp.predictive(oracle.x_test).covariance  # noqa: B018
        return gp.summary()

    plain = made()
    assert made(tolerance=1e-3)["work"]["steps"] < plain["work"]["steps"]
    assert made(rank=8)["directions"] < plain["directions"]
    assert made(variance="exact")["variance"] != plain["variance"]
    assert made(preconditioner="diagonal")["preconditioner"] == "diagonal"
    assert made(seed=1, rank=8)["left out"] != made(rank=8)["left out"]
    assert made(derivative="finite-difference")["certificate"] != plain["certificate"]


def test_data_come_in_every_kind() -> None:
    oracle = dense(n=6)
    pair = TangentGP(oracle.model, NOISE).fit((oracle.x, oracle.y)).predictive(oracle.x_test).mean
    data = torch.utils.data.TensorDataset(oracle.x, oracle.y)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    for kind in (data, loader):
        torch.testing.assert_close(
            TangentGP(oracle.model, NOISE).fit(kind).predictive(oracle.x_test).mean, pair
        )
    one = dense(n=6, outputs=1)
    flat = TangentGP(one.model, NOISE).fit(one.x, one.y[:, 0]).predictive(one.x_test).mean
    torch.testing.assert_close(
        flat, TangentGP(one.model, NOISE).fit(one.x, one.y).predictive(one.x_test).mean
    )


def test_the_model_is_left_alone_and_taken_anew_by_fit() -> None:
    oracle = dense(n=6)
    model = oracle.model.train()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    gp = TangentGP(model, NOISE).fit(oracle.x, oracle.y)
    first = gp.predictive(oracle.x_test).mean
    assert model.training
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    torch.testing.assert_close(gp.predictive(oracle.x_test).mean, first)
    assert not torch.equal(gp.fit(oracle.x, oracle.y).predictive(oracle.x_test).mean, first)
    lin = linnet.linearize(model)
    torch.testing.assert_close(TangentGP(lin, NOISE).fit(oracle.x, oracle.y).predictive(oracle.x_test).mean,
                               gp.predictive(oracle.x_test).mean)  # fmt: skip


def test_outputs_are_picked_by_the_adapter() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network(3, 5, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"moments": self.body(x)}

    x, y = real(6, 3), real(6, 2, seed=1)
    gp = TangentGP(Wrapped(), HeteroscedasticGaussian(), output="moments").fit(x, y)
    plain = TangentGP(network(3, 5, 4), HeteroscedasticGaussian()).fit(x, y)
    assert torch.allclose(gp.predictive(x).covariance, plain.predictive(x).covariance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_processes_of_half_precision_are_sampled(dtype: torch.dtype) -> None:
    model, x, t = numbers()
    process = TangentGP(model.to(dtype), Gaussian(variance=0.5)).fit(x.to(dtype), t.to(dtype))
    for joint in (False, True):
        drawn = process.predictive(x.to(dtype), joint=joint).sample(4000, 0)
        assert drawn.dtype == dtype
        spread = process.predictive(x.to(dtype)).variance.double()
        near(drawn.double().var(0), spread, 0.15)


@pytest.mark.parametrize("space", ["function", "parameter"])
def test_tuning_where_there_is_nothing_to_tell(space: str) -> None:
    model, x, _ = numbers()
    process = TangentGP(model, Gaussian(variance=0.5), space=space).fit(x, model(x).detach())
    before = process.predictive(x).variance
    with pytest.raises(InputError, match="exactly"):
        process.tune()
    assert process.prior_precision == process.noise_scale == 1.0
    torch.testing.assert_close(process.predictive(x).variance, before)


def test_a_fit_that_fails_changes_nothing() -> None:
    model, x, t = numbers()
    process = TangentGP(model, HeteroscedasticGaussian()).fit(x, t[:, :1])
    before = process.predictive(x)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(DataError):
        process.fit(x, t[:5])
    after = process.predictive(x)
    torch.testing.assert_close(after.mean, before.mean)
    assert torch.equal(after.noise, before.noise)


def test_data_with_a_graph_are_taken_without_it() -> None:
    model, x, t = numbers()
    plain = TangentGP(model, Gaussian(variance=0.5)).fit(x, t).tune()
    leaf = torch.ones((), dtype=torch.float64, requires_grad=True)
    process = TangentGP(model, Gaussian(variance=0.5)).fit(leaf * x, leaf * t).tune()
    again = copy.deepcopy(process.update(leaf * x, leaf * t)).predictive(x)
    assert not again.mean.requires_grad
    torch.testing.assert_close(again.mean, plain.update(x, t).predictive(x).mean)
