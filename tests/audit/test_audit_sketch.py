"""Bounds on the distance of a sketched fit from the exact one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import linnet
from linnet.fitting import Sketch


def problem() -> tuple[linnet.Linearized, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A network, data and other inputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    x = torch.randn(46, 4).double()
    return linnet.linearize(net), (x[:40], torch.stack([x[:40].prod(1), x[:40, 0].sin()], 1)), x[40:]


@pytest.mark.parametrize("dim", [5, 20, 40, 80])
@pytest.mark.parametrize("ridge", [0.01, 1.0])
@pytest.mark.thinned(3)
def test_the_bounds_hold_and_tighten(dim: int, ridge: float) -> None:
    lin, data, new = problem()
    exact = linnet.fit(lin, data, ridge=ridge, solver="dual")
    fit = linnet.fit(lin, data, ridge=ridge, solver=Sketch(dim))
    found = linnet.audit.sketch_error(fit, new)
    assert found.lower is not None
    assert found.upper is not None
    assert found.predictions is not None
    # at the noise of the sketched fit
    variance = exact.predictive(new).variance * fit.noise / exact.noise
    assert bool((found.lower <= variance * (1 + 1e-9)).all())
    assert bool((variance <= found.upper * (1 + 1e-9)).all())
    assert bool(((exact.predict(new) - fit.predict(new)).abs() <= found.predictions * (1 + 1e-9)).all())
    moved = [torch.cat([t.flatten() for t in one.displacement().values()]) for one in (exact, fit)]
    assert float((moved[0] - moved[1]).norm() / moved[1].norm()) <= found.weights * (1 + 1e-9)
    j = lin.jacobian(data[0]).flatten(0, 1)
    right = j.T @ (data[1] - lin.base(data[0])).reshape(-1)
    left = j.T @ (j @ moved[1]) + ridge * moved[1] - right
    assert found.residual == pytest.approx(float(left.norm() / right.norm()), rel=1e-6)


def test_all_directions_leave_nothing() -> None:
    lin, data, new = problem()
    found = linnet.audit.sketch_error(linnet.fit(lin, data, ridge=0.1, solver=Sketch(10_000)), new)
    assert found.residual < 1e-9
    assert found.upper is not None
    assert torch.allclose(found.upper, found.lower, rtol=1e-6)
