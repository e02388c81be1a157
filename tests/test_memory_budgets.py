"""A budget is one: peaks of public calls in processes of their own, counts without end, texts of memory."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import linnet
from linnet.curvatures import Passes
from linnet.errors import InputError, MemoryBudgetError
from linnet.likelihoods import Categorical, Gaussian
from linnet.linalg import Diagonal
from linnet.posterior import linear_posterior
from linnet.tangent.capture import hollow_capture
from linnet.tangent.forward_mode import hand_over, largest_difference, product, sketch
from linnet.tangent.functional import Functional

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "memory_budgets.py"
# What has been measured, of all that benchmarks/memory_budgets.py can measure.
SLOW = {
    (
        "mlp",
        "300MB",
    ): "fit, preflight, gram trace, gram diagonal, gram full, kfac, ekfac, diagonal, full, laplace",
    ("mlp", "1GB"): "preflight, gram trace, adapt, kfac",
    ("mobile", "300MB"): "preflight, adapt, kfac",
    ("transformer", "300MB"): "preflight, gram full, fit, adapt, kfac, ekfac, laplace",
}
CASES = [(call, *case) for case, calls in SLOW.items() for call in calls.split(", ")]


@pytest.mark.parametrize(
    ("call", "network", "budget"),
    [("adapt", "mlp", "300MB"), *(pytest.param(*case, marks=pytest.mark.long) for case in CASES)],
)
def test_a_peak_is_the_budget_and_what_is_said(call: str, network: str, budget: str) -> None:
    command = [sys.executable, str(SCRIPT), "--child", call, network, budget]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["peak"] <= found["said"], found


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A network of three classes and twelve examples."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return net, (torch.randn(12, 3), torch.arange(12) % 3)


@pytest.mark.parametrize("huge", [10**9, 10**400])
def test_counts_that_would_run_without_end_are_refused(small: Any, huge: int) -> None:
    net, (x, y) = small
    lin, matrix = linnet.linearize(net), Diagonal(torch.ones(4))
    posterior = linear_posterior(
        lin, (x, torch.randn(12, 3)), Gaussian(), linnet.SVI(training=linnet.Training(epochs=10))
    )
    calls: list[Callable[[], Any]] = [
        lambda: linnet.evaluate(lambda part: net(part).softmax(-1), (x, y), bins=huge),
        lambda: linnet.spectrum.spectral_density(torch.eye(4), samples=huge),
        lambda: posterior.bound(samples=huge),
        lambda: linnet.solvers.hutchinson(matrix, samples=huge),
        lambda: linnet.solvers.logdet(matrix, samples=huge, steps=2),
    ]
    for call in calls:
        with pytest.raises(InputError, match="from"):
            call()


def test_a_full_matrix_is_refused_before_the_network_is_looked_at(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, data = small
    monkeypatch.setattr("linnet.curvatures.engine.require_runs", lambda *_: pytest.fail("it has run"))
    with pytest.raises(MemoryBudgetError, match="31 parameters"):
        linnet.curvature(net, data, Categorical(), structure="full", passes=Passes(memory="1kB"))


def test_checks_hold_no_gradient_of_every_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five layers of equal size, the gradients of one are alive at a time."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    alive: list[Any] = []
    most = [0]

    def watched(t: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(t))
        most[0] = max(most[0], sum(ref() is not None for ref in alive))
        return sketch(t)

    monkeypatch.setattr("linnet.tangent.plan.sketch", watched)
    hollow_capture(Functional(net), torch.randn(3, 64), 64)
    assert len(alive) == 10  # of the first and the last example
    assert most[0] == 1


def test_sketches_keep_norms_and_products_are_whole() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(300, 5000, dtype=torch.float64), torch.randn(300, 5000, dtype=torch.float64)
    assert torch.allclose(sketch(a - b), sketch(a) - sketch(b))
    one = torch.zeros(300, 5000, dtype=torch.float64)
    one[7] = b[7]  # rank one: the least that a norm is averaged over
    for t in (a, b, one):
        assert 0.3 < float(sketch(t).norm() / t.norm()) < 2
    assert torch.equal(sketch(a[0]), a[:1].mT)
    assert torch.equal(sketch(a[:3]), a[:3])
    assert float(largest_difference(a, b)) == float((a - b).abs().max())
    assert abs(float(product(a, b)) - float((a * b).sum())) < 1e-9


def test_gradients_are_handed_over_and_let_go() -> None:
    net = nn.Linear(3, 2).double()
    x, u = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    found: dict[str, torch.Tensor] = {}
    leaves = dict(net.named_parameters())
    value = net(x)
    hand_over(value, leaves, u, lambda name, g: found.update({name: g.clone()}))
    expected = torch.autograd.grad(value, list(leaves.values()), u)
    assert all(torch.equal(found[name], g) for name, g in zip(leaves, expected, strict=True))
