"""Mixed precision: gradients that a scaler scaled, autocast around a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.optim.gauss_newton import GaussNewton
from linnet.optim.gauss_newton_settings import StepReport
from tests.optim.gauss_newton_cases import classes, classifier, flat, mlp

SUITED = {"kfac": "mc", "kfra": "mc", "ekfac": "mc", "diagonal": "mc", "block": "exact", "full": "exact"}


def scaled_step(
    net: nn.Module, optimizer: GaussNewton, scaler: Any, x: Tensor, y: Tensor, factor: float = 1.0
) -> StepReport | None:
    """One step of the loop that torch documents; ``None`` where the scaler skipped it."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
        loss = factor * F.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    report: StepReport | None = scaler.step(optimizer, x, y, loss=float(loss.detach()))
    scaler.update()
    return report


@pytest.mark.parametrize("structure", ["kfac", "kfra"])
def test_a_scaler_changes_nothing(structure: str) -> None:
    nets = mlp(), mlp()
    scaled, plain = (classifier(net, structure=structure, damping=0.1) for net in nets)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for k in range(6):
        x, y = classes(seed=k)
        report = scaled_step(nets[0], scaled, scaler, x, y)
        assert report is not None
        assert report.loss == pytest.approx(plain.step(x, y).loss, rel=1e-10)
    assert torch.allclose(flat(nets[0]), flat(nets[1]), rtol=1e-8, atol=1e-10)


def test_a_scale_that_overflows_is_skipped_and_lowered() -> None:
    net = mlp().float()
    optimizer = classifier(net, damping=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
    x, y = classes()
    before = flat(net)
    assert (
        scaled_step(net, optimizer, scaler, x.float(), y, factor=1e36) is None
    )  # the gradients are infinite
    assert torch.equal(flat(net), before)
    assert optimizer.steps == 0
    assert scaler.get_scale() == 2.0**19
    report = scaled_step(net, optimizer, scaler, x.float(), y)
    assert report is not None
    assert not torch.equal(flat(net), before)


def test_training_under_autocast_converges() -> None:
    net = mlp().float()
    optimizer = classifier(net, structure="kfra")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    x, y = classes(60)
    reports = [scaled_step(net, optimizer, scaler, x.float(), y) for _ in range(25)]
    losses = [report.loss for report in reports if report is not None]
    assert len(losses) == 25
    assert losses[-1] < 0.6 * losses[0]
    assert all(p.dtype == torch.float32 for p in net.parameters())
    state = optimizer.state_dict()["gauss_newton"]["curvature"]
    assert all(t.dtype in (torch.float32, torch.float64, torch.int64) for t in state.values())


@pytest.mark.parametrize("structure", ["kfac", "kfra", "block", "full"])
@pytest.mark.thinned(2)
def test_autocast_around_a_step_leaves_dampings_and_curvature_alone(structure: str) -> None:
    x, y = classes(40)
    reports = {}
    for cast in (False, True):
        optimizer = classifier(mlp().float(), structure=structure, expectation=SUITED[structure])
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):  # several steps in one context
            reports[cast] = [optimizer.step(x.float(), y) for _ in range(10)]
    for plain, mixed in zip(reports[False], reports[True], strict=True):
        assert mixed.loss == pytest.approx(plain.loss, rel=0.1)
    assert reports[True][-1].loss < 0.8 * reports[True][0].loss
    assert reports[True][0].tau == pytest.approx(reports[False][0].tau, rel=0.1)  # the best of the same grid
    assert reports[True][4].rho == pytest.approx(reports[False][4].rho, abs=0.3)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("structure", ["kfac", "kfra", "ekfac", "diagonal", "full"])
@pytest.mark.thinned(4)
def test_weights_of_half_precision_are_trained(structure: str, kind: torch.dtype) -> None:
    net = mlp().to(kind)
    x, y = classes(40)
    optimizer = classifier(net, structure=structure, expectation=SUITED[structure])
    reports = [optimizer.step(x.to(kind), y) for _ in range(10)]
    assert reports[-1].loss < 0.9 * reports[0].loss
    assert all(p.dtype == kind for p in net.parameters())
