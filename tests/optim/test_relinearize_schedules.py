"""When features are updated: periods, the linearity gap, the kernel's drift, convergence; and the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import linnet
from linnet.optim import Converged, IterativeLinearization, KernelDrift, OutputGap
from linnet.optim.relinearize import LinearizationReport
from tests.fitting.problems import near, real
from tests.optim.relinearize_cases import OPTIMIZERS, batches, cross_entropy, mlp, run, values
from tests.oracles.dense import jacobian_oracle, output_oracle


def test_the_gap_is_what_its_formula_says() -> None:
    net, x = mlp(), real(5, 4, seed=3)
    lin = linnet.linearize(net)
    assert lin.gap(x) == 0.0
    delta = 0.3 * real(lin.space.dim, seed=4)
    for name, value in lin.space.to_params(delta).items():
        lin.delta[name].data.copy_(value)
    f0, tangent = output_oracle(net, x), jacobian_oracle(net, x) @ delta
    nn.utils.vector_to_parameters(values(net) + delta, net.parameters())
    missed = output_oracle(net, x) - f0 - tangent
    assert lin.gap(x) == pytest.approx(float(missed.norm() / tangent.norm()), rel=1e-10)


def test_a_network_linear_in_its_weights_has_no_gap() -> None:
    net = nn.Linear(4, 3).double()
    schedule = OutputGap(1e-6, every=1)
    training = IterativeLinearization(net, OPTIMIZERS["adam"], schedule)
    run(training, batches(5, (4,), torch.float64))
    assert training.report.relinearizations == 0
    assert len(training.report.gaps) == 5
    assert max(value for _, value in training.report.gaps) < 1e-12


def test_the_gap_schedule_updates_exactly_when_the_gap_is_over_its_threshold() -> None:
    threshold = 0.05
    training = IterativeLinearization(mlp(), OPTIMIZERS["adam"], OutputGap(threshold, every=2))
    run(training, batches(40, (4,), torch.float64))
    report = training.report
    assert 1 <= report.relinearizations < 20
    assert list(report.updates) == [step for step, value in report.gaps if value > threshold]


def test_tighter_thresholds_update_more_often() -> None:
    counts = []
    for threshold in (0.3, 0.1, 0.03, 0.01):
        training = IterativeLinearization(mlp(), OPTIMIZERS["adam"], OutputGap(threshold, every=1))
        run(training, batches(40, (4,), torch.float64))
        counts.append(training.report.relinearizations)
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_measuring_does_not_change_the_path_unless_features_are_updated() -> None:
    data, reached = batches(8, (4,), torch.float64), []
    x = data[0][0]
    for schedule in (
        None,
        OutputGap(1e9, every=1),
        OutputGap(1e9, x, every=3),
        KernelDrift(0.999, x, 2),
    ):
        net = mlp()
        training = IterativeLinearization(net, OPTIMIZERS["adam"], schedule)
        run(training, data)
        reached.append(values(net))
    assert all(torch.equal(reached[0], other) for other in reached[1:])


def test_a_fixed_batch_or_the_batch_of_the_step() -> None:
    data, gaps = batches(4, (4,), torch.float64), []
    for x in (None, data[-1][0]):
        training = IterativeLinearization(mlp(), OPTIMIZERS["adam"], OutputGap(1e9, x, every=1))
        run(training, data)
        gaps.append([value for _, value in training.report.gaps])
    assert gaps[0][-1] == gaps[1][-1]
    assert gaps[0][0] != gaps[1][0]


@pytest.mark.parametrize("outputs", ["trace", "full"])
def test_the_drift_schedule_measures_the_distance_of_the_kernels(outputs: Any) -> None:
    net, data, x = mlp(), batches(12, (4,), torch.float64), real(6, 4, seed=8)
    start = linnet.spectrum.gram(net, x, form=outputs)
    training = IterativeLinearization(net, OPTIMIZERS["adam"], KernelDrift(0.9, x, every=6, form=outputs))
    run(training, data)
    here = linnet.spectrum.gram(net, x, form=outputs)
    (first, _), (last, value) = training.report.drifts
    assert (first, last) == (6, 12)
    assert value == pytest.approx(1 - float((start * here).sum() / start.norm() / here.norm()), rel=1e-6)


def test_the_drift_schedule_updates_when_the_kernel_has_moved() -> None:
    threshold = 0.002
    training = IterativeLinearization(
        mlp(), OPTIMIZERS["adam"], KernelDrift(threshold, real(6, 4, seed=8), every=2)
    )
    run(training, batches(30, (4,), torch.float64))
    assert 1 <= training.report.relinearizations < 15
    assert list(training.report.updates) == [s for s, value in training.report.drifts if value > threshold]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda x: OutputGap(1e9, x, every=100, most=4),
        lambda x: KernelDrift(0.9, x, every=100, most=4),
        lambda x: Converged(gradient=1e-30, most=4),
    ],
)
def test_features_are_updated_after_so_many_steps_in_any_case(schedule: Any) -> None:
    training = IterativeLinearization(mlp(), OPTIMIZERS["sgd"], schedule(real(3, 4)))
    run(training, batches(9, (4,), torch.float64))
    assert training.report.updates == (4, 8)


def test_training_each_linearization_to_convergence_is_the_damped_gauss_newton_iteration() -> None:
    net, twin, ridge = mlp(outputs=1), mlp(outputs=1), 2.0
    x, y = real(4, 4, seed=1), real(4, 1, seed=2)

    def loss(module: nn.Module) -> torch.Tensor:
        penalty = sum(delta.square().sum() for delta in module.parameters())
        return 0.5 * (module(x) - y).square().sum() + 0.5 * ridge * penalty

    training = IterativeLinearization(
        net, lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.5), Converged(gradient=1e-8)
    )
    while training.report.relinearizations < 3 and training.steps < 2000:
        training.step(loss)
    newton = IterativeLinearization(twin, None, period=1)
    for _ in range(3):
        newton.solve((x, y), ridge=ridge)
    near(values(net), values(twin), 1e-6)
    assert training.report.relinearizations == newton.report.relinearizations == 3


def test_convergence_is_judged_by_each_linearizations_own_first_gradient() -> None:
    (batch,) = batches(1, (4,), torch.float64)
    training = IterativeLinearization(mlp(), lambda p: torch.optim.SGD(p, lr=0.5), Converged(gradient=0.5))
    norms = []
    for _ in range(60):
        training.step(cross_entropy(batch))
        norms.append(float(torch.cat([p.grad.reshape(-1) for p in training.model.parameters()]).norm()))
    assert training.report.relinearizations >= 2
    begin = 0
    for step in training.report.updates:
        assert norms[step - 1] <= 0.5 * norms[begin]
        assert all(norm > 0.5 * norms[begin] for norm in norms[begin + 1 : step - 1])
        begin = step


def test_a_loss_to_be_reached() -> None:
    (batch,) = batches(1, (4,), torch.float64)
    training = IterativeLinearization(mlp(), OPTIMIZERS["adam"], Converged(gradient=None, loss=1.0))
    losses = [float(training.step(cross_entropy(batch))) for _ in range(80)]
    first = next(i for i, loss in enumerate(losses) if loss <= 1.0)
    assert training.report.updates[0] == first + 1


def test_gaps_of_a_fixed_period_are_recorded_on_request() -> None:
    data = batches(6, (4,), torch.float64)
    for record in (True, False):
        training = IterativeLinearization(mlp(), OPTIMIZERS["adam"], 3, record_gap=record)
        run(training, data)
        assert [step for step, _ in training.report.gaps] == ([3, 6] if record else [])
        assert all(0 < value < 1 for _, value in training.report.gaps)
    assert training.gap(data[0][0]) == 0.0
    assert training.report.gaps == ((6, 0.0),)


def test_the_report_in_numbers_and_words() -> None:
    report = LinearizationReport("Every(2)", 5, (2, 4), ((2, "gap", 0.5), (4, "drift", 0.25)), ("a note",))
    assert report.relinearizations == 2
    assert report.mean_period == 2.0
    assert report.gaps == ((2, 0.5),)
    assert report.drifts == ((4, 0.25),)
    assert str(report).splitlines() == [
        "Every(2): 5 steps, 2 feature updates, one in 2.0 steps",
        "gap: 1 measured, mean 0.5, largest 0.5 after step 2",
        "drift: 1 measured, mean 0.25, largest 0.25 after step 4",
        "a note",
    ]
    assert LinearizationReport("Every(None)", 3, ()).mean_period is None
