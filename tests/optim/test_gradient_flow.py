"""Closed forms of gradient flow and gradient descent, against integration, iteration and dense algebra."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import DataError, InputError, MemoryBudgetError, NumericalError
from linnet.optim import IterativeLinearization
from linnet.optim.gradient_flow import Flow, gradient_flow
from tests.fitting.problems import Problem, flat, near, problem, real
from tests.refusals import refused

INF = math.inf


@pytest.fixture(params=["fewer equations than weights", "more"])
def p(request: pytest.FixtureRequest) -> Problem:
    return problem(n=5 if request.param.startswith("fewer") else 14, outputs=3, classes=False, hidden=3)


def expm_path(p: Problem, time: float, rate: float) -> tuple[Tensor, Tensor]:
    """δ_t and f_t(X) from the exponential of the dense, augmented system of equation 15."""
    j, r = p.j.flatten(0, 1), p.residual
    size = j.shape[1]
    system = torch.zeros(size + 1, size + 1, dtype=j.dtype)
    system[:size, :size], system[:size, size] = -rate * j.T @ j, rate * j.T @ r
    delta = torch.linalg.matrix_exp(time * system)[:size, size]  # δ̇ = −η Jᵀ(J δ − r)
    return delta, p.f0 + p.j @ delta


@pytest.mark.parametrize("rate", [1.0, 0.02])
def test_weights_outputs_and_losses_at_any_time(p: Problem, rate: float) -> None:
    times = [0.0, 0.01, 0.3, 2.0, 30.0]
    flow = gradient_flow(p.lin, (p.x, p.y), times, learning_rate=rate)
    assert flow.outputs.shape == (5, p.x.shape[0], 3)
    for i, time in enumerate(times):
        delta, outputs = expm_path(p, time, rate)
        near(flow.outputs[i], outputs, 1e-9)
        near(flow.losses[i], 0.5 * (outputs - p.y).square().sum(), 1e-9)
        if time:
            near(flat(flow.delta(time)), delta, 1e-8)
        near(flow.predict(p.x_test, time), p.f0_test + p.j_test @ delta, 1e-9)
        start = torch.cat([t.reshape(-1) for t in p.lin.theta0.values()])
        near(flat(flow.weights(time)), start + delta, 1e-9)


def test_its_end_is_the_fit_of_least_norm(p: Problem) -> None:
    flow = gradient_flow(p.lin, (p.x, p.y), [INF])
    j = p.j.flatten(0, 1)
    least = torch.linalg.pinv(j, rtol=1e-8) @ p.residual
    near(flat(flow.delta(INF)), least, 1e-7)
    near(flow.outputs[0].reshape(-1), p.f0.reshape(-1) + j @ least, 1e-8)
    near(flow.predict(p.x_test, INF), p.f0_test + p.j_test @ least, 1e-7)
    fits = [linnet.fit(p.lin, (p.x, p.y), ridge=ridge) for ridge in (1e-3, 1e-7, 1e-9)]
    errors = [float((flat(fit.delta) - flat(flow.delta(INF))).norm()) for fit in fits]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-4 * float(least.norm())


def test_flow_descends_and_its_slope_is_the_gradient(p: Problem) -> None:
    step = 1e-6
    flow = gradient_flow(p.lin, (p.x, p.y), torch.logspace(-3, 3, 20), learning_rate=0.7)
    assert bool((flow.losses.diff() <= 0).all())
    # −η Jᵀ(f₀ − Y): equation 15 at t = 0
    near(flat(flow.delta(step)) / step, 0.7 * p.j.flatten(0, 1).T @ p.residual, 1e-3)


@pytest.mark.parametrize("share", [0.1, 0.6, 0.99, 1.7])  # of 1/λ_max: either branch of each formula
def test_gradient_descent_is_the_loop_itself(p: Problem, share: float) -> None:
    rate = share / float(torch.linalg.eigvalsh(p.kernel).max())
    counts = [0, 1, 2, 7, 50]
    path = gradient_flow(p.lin, (p.x, p.y), counts, learning_rate=rate, discrete=True)
    j, delta = p.j.flatten(0, 1), torch.zeros(p.lin.space.dim, dtype=torch.float64)
    for k in range(51):
        if k in counts:
            at = counts.index(k)
            near(path.outputs[at].reshape(-1), p.f0.reshape(-1) + j @ delta, 1e-10)
            if k:
                near(flat(path.delta(k)), delta, 1e-10)
        delta = delta + rate * j.T @ (p.residual - j @ delta)
    assert path.stable_rate == pytest.approx(2 * rate / share)


def test_gradient_descent_through_the_trainer() -> None:
    p = problem(n=6, outputs=2, classes=False)
    rate = 0.5 / float(torch.linalg.eigvalsh(p.kernel).max())
    path = gradient_flow(p.lin, (p.x, p.y), [25], learning_rate=rate, discrete=True)
    training = IterativeLinearization(p.model, lambda q: torch.optim.SGD(q, lr=rate), period=None)
    for _ in range(25):
        training.step(lambda module: 0.5 * (module(p.x) - p.y).square().sum())
    for name, weight in path.weights(25).items():
        near(dict(p.model.named_parameters())[name], weight, 1e-10)
    near(training.linearization(p.x), path.outputs[0])


def test_small_steps_of_gradient_descent_converge_to_flow(p: Problem) -> None:
    flow = gradient_flow(p.lin, (p.x, p.y), [0.2])
    errors = []
    for halvings in (6, 8, 10, 12):
        rate = 0.2 / 2**halvings
        steps = gradient_flow(p.lin, (p.x, p.y), [2**halvings], learning_rate=rate, discrete=True)
        errors.append(float((steps.outputs - flow.outputs).norm()))
    for coarse, fine in itertools.pairwise(errors):
        assert fine < 0.3 * coarse  # of first order: a quarter for a quarter of the step


def test_both_ends_are_the_same(p: Problem) -> None:
    rate = 1.9 / float(torch.linalg.eigvalsh(p.kernel).max())
    flow, steps = (
        gradient_flow(p.lin, (p.x, p.y), [INF], learning_rate=rate, discrete=d) for d in (False, True)
    )
    near(flow.outputs, steps.outputs, 1e-12)
    near(flat(flow.delta(INF)), flat(steps.delta(INF)), 1e-12)


def test_paths_start_where_delta_is(p: Problem) -> None:
    lin = p.lin
    flow = gradient_flow(lin, (p.x, p.y), [0.1, 0.4])
    for name, value in flow.delta(0.1).items():
        lin.delta[name].data.copy_(value)
    later = gradient_flow(lin, (p.x, p.y), [0.0, 0.3])
    near(later.outputs, flow.outputs, 1e-9)
    near(flat(later.delta(0.3)), flat(flow.delta(0.4)), 1e-8)
    for value in lin.delta.values():
        value.data.zero_()
    lin.relinearize()
    near(later.outputs[1], later.predict(p.x, 0.3), 1e-9)  # the path keeps its start


def test_a_linearization_may_move_on_while_its_path_is_kept(p: Problem) -> None:
    lin = p.lin
    flow = gradient_flow(lin, (p.x, p.y), [1.0])
    before = flow.predict(p.x_test, 1.0)
    for value in lin.delta.values():
        value.data.add_(0.3)
    lin.relinearize()
    lin.relinearize()
    torch.testing.assert_close(flow.predict(p.x_test, 1.0), before)


def test_duplicated_examples_double_the_speed() -> None:
    p = problem(n=5, outputs=2, classes=False)
    once = gradient_flow(p.lin, (p.x, p.y), [0.6])
    twice = gradient_flow(p.lin, (torch.cat([p.x, p.x]), torch.cat([p.y, p.y])), [0.3])
    near(twice.outputs[0, :5], once.outputs[0], 1e-9)
    near(flat(twice.delta(0.3)), flat(once.delta(0.6)), 1e-7)
    near(twice.predict(p.x_test, INF), once.predict(p.x_test, INF), 1e-6)  # K is singular here


def test_classes_become_scaled_targets_as_in_a_fit() -> None:
    p = problem(n=6, outputs=3)
    default = gradient_flow(p.lin, (p.x, p.y), [INF])
    near(default.targets, p.t)
    near(gradient_flow(p.lin, (p.x, p.y), [INF], scale=3.0).targets, p.t / 5)
    given = gradient_flow(p.lin, (p.x, p.y), [INF], targets=p.t)
    torch.testing.assert_close(given.outputs, default.outputs)


def test_single_precision_stays_close() -> None:
    p = problem(n=8, outputs=2, classes=False)
    flow = gradient_flow(p.lin, (p.x, p.y), [0.5, 5.0])
    lin = linnet.linearize(p.model.float())
    low = gradient_flow(lin, (p.x.float(), p.y.float()), [0.5, 5.0])
    assert low.outputs.dtype == low.delta(0.5)["0.weight"].dtype == torch.float32
    near(low.outputs, flow.outputs, 1e-4)
    near(flat(low.delta(0.5)), flat(flow.delta(0.5)), 1e-3)
    assert all(t.isfinite().all() for t in low.delta(INF).values())


def test_networks_with_one_output_column_missing() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double()
    x = real(5, 3)
    flow = gradient_flow(linnet.linearize(net), (x, x[:, 0]), [1.0])
    assert flow.outputs.shape == (1, 5, 1)
    near(flow.predict(x, 1.0), flow.outputs[0], 1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"times": [-1.0]}, "-1.0"),
        ({"times": [1.5], "discrete": True}, "whole numbers"),
        ({"targets": torch.zeros(2, 2)}, "(2, 2)"),
        ({"times": [INF], "discrete": True, "learning_rate": 1e3}, "diverges"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], words: str) -> None:
    p = problem(n=4, outputs=2, classes=False)
    refused(InputError, lambda: gradient_flow(p.lin, (p.x, p.y), **{"times": [1.0], **options}), words)


def test_bad_data_budgets_and_divergence() -> None:
    p = problem(n=4, outputs=2, classes=False)
    with pytest.raises(MemoryBudgetError):
        gradient_flow(p.lin, (p.x, p.y), [1.0], memory=100)
    refused(
        NumericalError,
        lambda: gradient_flow(p.lin, (p.x, p.y), [1e4], learning_rate=10.0, discrete=True),
        "overflows",
    )
    flow: Flow = gradient_flow(p.lin, (p.x, p.y), [1.0])
    refused(InputError, lambda: flow.delta(-2.0), "-2.0")
    refused(DataError, lambda: flow.predict(p.x[:0], 1.0), "empty")
