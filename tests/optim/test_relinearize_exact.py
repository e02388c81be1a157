"""Each linearization solved exactly is a damped Gauss-Newton step: an identity with dense Jacobians."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError, NumericalError
from linnet.fitting import CG
from linnet.optim import IterativeLinearization
from tests.fitting.problems import near, real
from tests.optim.relinearize_cases import OPTIMIZERS, batches, mlp, run, values
from tests.oracles.dense import jacobian_oracle, output_oracle
from tests.refusals import refused


def gauss_newton(net: nn.Module, x: Tensor, y: Tensor, ridge: float, rate: float) -> Tensor:
    """Equation 6 (5 at ρ = 0, where it is the solution of least norm), in the weights, dense."""
    j = jacobian_oracle(net, x).flatten(0, 1)
    gradient = j.T @ (output_oracle(net, x) - y).reshape(-1)
    normal = j.T @ j + ridge * torch.eye(j.shape[1], dtype=j.dtype)
    inverse = torch.linalg.inv(normal) if ridge else torch.linalg.pinv(normal, rtol=1e-9, hermitian=True)
    return values(net) - rate * inverse @ gradient


@pytest.mark.parametrize(("ridge", "rate"), [(0.3, 1.0), (5.0, 0.5), (1e3, 2.0), (0.0, 1.0), (0.0, 0.25)])
@pytest.mark.parametrize("n", [5, 30])  # fewer and more equations than weights
@pytest.mark.thinned(2)
def test_exact_solutions_are_gauss_newton_steps(n: int, ridge: float, rate: float) -> None:
    net, twin = mlp(), mlp()
    x, y = real(n, 4, seed=1), real(n, 3, seed=2)
    training = IterativeLinearization(net, None, period=None)
    steps = 3 if ridge else 1  # undamped steps go far out, where the rank is a matter of rounding
    for _ in range(steps):
        wanted = gauss_newton(twin, x, y, ridge, rate)
        training.solve((x, y), ridge, learning_rate=rate)
        near(values(net), wanted, 1e-10 if ridge else 1e-6)
        nn.utils.vector_to_parameters(values(net), twin.parameters())
    assert training.report.updates == (1, 2, 3)[:steps]
    assert all(not delta.any() for delta in training.linearization.delta.values())


def test_the_damping_may_be_chosen_and_the_solver_too() -> None:
    x, y = real(12, 4, seed=1), real(12, 3, seed=2)
    net, twin = mlp(), mlp()
    chosen = IterativeLinearization(net, None, period=1).solve((x, y), "evidence")
    given = IterativeLinearization(twin, None, period=1).solve((x, y), chosen.ridge, solver=CG(1e-13))
    assert (chosen.solver, given.solver) == ("dual", "cg")
    near(values(net), values(twin), 1e-8)


def test_the_fit_of_a_linearization_outlives_it() -> None:
    x, y = real(8, 4, seed=1), real(8, 3, seed=2)
    training = IterativeLinearization(mlp(), None, period=None)
    fit = training.solve((x, y), 0.5)
    predicted, left_out = fit.predict(x), fit.loo()
    for _ in range(2):
        training.solve((x, y), 0.5)
    torch.testing.assert_close(fit.predict(x), predicted)
    torch.testing.assert_close(fit.loo(), left_out)
    wanted = output_oracle(mlp(), x) + torch.einsum(
        "ncp,p->nc", jacobian_oracle(mlp(), x), gauss_newton(mlp(), x, y, 0.5, 1.0) - values(mlp())
    )
    near(predicted, wanted, 1e-9)


def test_a_subset_of_parameters_is_solved_for() -> None:
    net, x, y = mlp(), real(8, 4, seed=1), real(8, 3, seed=2)
    hidden, before = torch.tanh(net[0](x)).detach(), net[0].weight.clone()
    IterativeLinearization(net, None, period=1, params="last-layer").solve((x, y), 1e-9)
    assert torch.equal(net[0].weight, before)
    features = torch.cat([hidden, torch.ones(8, 1, dtype=torch.float64)], 1)
    best = features @ torch.linalg.lstsq(features, y).solution
    near(net(x), best, 1e-6)


def test_steps_and_exact_solutions_mix() -> None:
    net, x, y = mlp(), real(8, 4, seed=1), real(8, 3, seed=2)
    training = IterativeLinearization(net, OPTIMIZERS["adam"], period=None)
    run(training, batches(3, (4,), torch.float64))
    twin = mlp()
    nn.utils.vector_to_parameters(values(net), twin.parameters())
    training.solve((x, y), 0.7)  # at the weights reached, not at those of the linearization in use
    near(values(net), gauss_newton(twin, x, y, 0.7, 1.0), 1e-10)
    assert training.report.updates == (3, 4)


def test_at_period_one_there_is_plain_training_before_and_after() -> None:
    net = mlp()
    training = IterativeLinearization(net, OPTIMIZERS["adam"], period=1)
    data = batches(4, (4,), torch.float64)
    run(training, data[:2])
    training.solve((real(8, 4), real(8, 3)), 1.0)
    seen = []
    training.step(lambda module: (seen.append(module), module(data[2][0]).square().sum())[1])
    assert seen == [net]
    assert training.report.relinearizations == training.report.steps == 4


def test_bad_requests() -> None:
    training = IterativeLinearization(mlp(), None, period=1)
    pair = (real(8, 4), real(8, 3))
    refused(
        InputError, lambda: training.step(lambda module: module(pair[0]).sum()), "make_optimizer was None"
    )
    before = values(training.model).clone()
    huge = (real(8, 4), 1e308 * torch.rand(8, 3, dtype=torch.float64))
    with pytest.raises(NumericalError):
        training.solve(huge, ridge=1e-300, solver="dual")
    assert torch.equal(values(training.model), before)
    assert linnet.linearize(training.model).base(pair[0]).isfinite().all()
