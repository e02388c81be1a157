"""Steps of the Gauss-Newton optimizer against dense oracles, and what its keywords change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.optim.gauss_newton import GaussNewton
from linnet.optim.gauss_newton_model import LinearizedBatch
from linnet.optim.gauss_newton_settings import Damping
from tests.optim.gauss_newton_cases import (
    classes,
    classifier,
    dense_gauss_newton,
    flat,
    gradient_of,
    mlp,
    regressor,
    values,
)


@torch.no_grad()
def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """The mean loss."""
    return float(nn.functional.cross_entropy(net(x), y))


FIXED = Damping(tau=0.3, zeta=0.1, tau_period=0, zeta_period=0)


@pytest.mark.parametrize("structure", ["full", "block"])
def test_one_step_on_a_linear_model_is_newtons(structure: str) -> None:
    # by default their curvature is exact: that of sampled labels is 1.26 of the distance off
    x, y = values()
    net = nn.Linear(4, 3).double()
    report = regressor(net, structure=structure, damping=0.0).step(x, y)
    hatted = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    wanted = torch.linalg.lstsq(hatted, y).solution.T
    assert torch.allclose(torch.cat([net.weight, net.bias[:, None]], 1), wanted, rtol=1e-10, atol=1e-10)
    assert report.alpha == pytest.approx(1.0, rel=1e-10)


def test_weight_decay_is_the_objectives() -> None:
    x, y = values()
    net, decay = nn.Linear(4, 3, bias=False).double(), 0.7
    report = regressor(net, structure="block", damping=0.0, weight_decay=decay).step(x, y)
    eye = torch.eye(4, dtype=x.dtype)
    wanted = torch.linalg.solve(x.T @ x / len(x) + decay * eye, x.T @ y / len(x)).T
    assert torch.allclose(net.weight, wanted, rtol=1e-10, atol=1e-12)
    assert report.objective > report.loss


@pytest.mark.parametrize(
    ("structure", "expectation"),
    [
        *((structure, "mc") for structure in ("kfra", "kfac", "ekfac", "diagonal")),
        *((structure, "exact") for structure in ("kfac", "block", "full")),
    ],
)
def test_step_against_dense_oracle(structure: str, expectation: str) -> None:
    """Whatever the direction, α, the reduction and the step are those of the exact matrix."""
    x, y = classes()
    net, decay = mlp(), 0.05
    G, g, before = dense_gauss_newton(net, x), gradient_of(net, x, y, decay), flat(net)
    optimizer = classifier(
        net, structure=structure, expectation=expectation, damping=FIXED, weight_decay=decay
    )
    report = optimizer.step(x, y)
    step = flat(net) - before
    C = G + (decay + 0.3) * torch.eye(len(G), dtype=G.dtype)
    d = step / report.alpha
    assert report.alpha == pytest.approx(float(-(d @ g) / (d @ C @ d)), rel=1e-8)
    assert report.model_reduction == pytest.approx(float(step @ g + 0.5 * step @ C @ step), rel=1e-8)
    assert report.gradient_norm == pytest.approx(float(g.norm()), rel=1e-10)
    assert report.step_norm == pytest.approx(float(step.norm()), rel=1e-10)
    assert report.direction_norm == pytest.approx(float(d.norm()), rel=1e-8)
    if structure == "full":
        exact = torch.linalg.solve(G + (decay + 0.1) * torch.eye(len(G), dtype=G.dtype), -g)
        assert torch.allclose(d, exact, rtol=1e-8, atol=1e-10)


def test_direction_of_factored_and_exact_inversion() -> None:
    """KFLR of one linear layer with one example is the block, so that its exact inverse is known."""
    x, y = classes(1)
    found = {}
    for inversion in ("factored", "exact"):
        net = nn.Linear(4, 3).double()
        with torch.no_grad():
            net.weight.fill_(0.1)
            net.bias.fill_(0.0)
        G, g, before = dense_gauss_newton(net, x), gradient_of(net, x, y), flat(net)
        damping = FIXED._replace(inversion=inversion)
        report = classifier(net, structure="kfac", expectation="exact", damping=damping).step(x, y)
        found[inversion] = (flat(net) - before) / report.alpha
    exact = torch.linalg.solve(G + 0.1 * torch.eye(len(G), dtype=G.dtype), -g)
    assert torch.allclose(found["exact"], exact, rtol=1e-8, atol=1e-10)
    assert not torch.allclose(found["factored"], exact, rtol=1e-3)


def test_momentum_solves_the_two_dimensional_problem() -> None:
    x, y = classes()
    net = mlp()
    optimizer = classifier(net, structure="kfac", expectation="exact", damping=FIXED, momentum=True)
    start = flat(net)
    first = optimizer.step(x, y)
    previous = flat(net) - start
    G, g, before = dense_gauss_newton(net, x), gradient_of(net, x, y), flat(net)
    report = optimizer.step(x, y)
    step = flat(net) - before
    assert first.mu == 0
    assert report.mu != 0
    C = G + 0.3 * torch.eye(len(G), dtype=G.dtype)
    d = (step - report.mu * previous) / report.alpha
    ways = torch.stack([d, previous])
    best = torch.linalg.solve(ways @ C @ ways.T, -ways @ g)
    assert torch.allclose(best, torch.tensor([report.alpha, report.mu], dtype=best.dtype), rtol=1e-8)


def test_tau_follows_the_reference() -> None:
    """ρ measured by hand at every second step; τ moves by ω each time."""
    x, y = classes()
    net = mlp()
    optimizer = classifier(
        net,
        structure="kfac",
        expectation="exact",
        damping=Damping(tau=2.0, zeta=0.1, decay=0.8, tau_period=2, zeta_period=0),
    )
    tau, moves = 2.0, set()
    for k in range(1, 13):
        before = loss_of(net, x, y)
        report = optimizer.step(x, y)
        after = loss_of(net, x, y)
        if k % 2:
            assert report.rho is None
        else:
            rho = (after - before) / report.model_reduction
            assert report.rho == pytest.approx(rho, rel=1e-8)
            tau = tau * 0.8 if rho > 0.75 else tau / 0.8
            moves.add(rho > 0.75)
        assert report.tau == pytest.approx(tau, rel=1e-12)
    assert moves == {True} or moves == {True, False}


def test_tau_rises_where_the_model_is_wrong() -> None:
    x, y = classes()
    net = mlp()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(4)
    optimizer = classifier(
        net, structure="full", expectation="exact", damping=Damping(1e-3, 1e-3, tau_period=1), limit=100
    )
    report = optimizer.step(x, y)
    assert report.rho is not None
    assert report.rho < 0.75
    assert report.tau == pytest.approx(1e-3 / 0.95)


def test_zeta_follows_the_reference() -> None:
    """At each search the ζ of three whose direction has the lowest q, computed densely."""
    x, y = classes()
    net, damping = mlp(), Damping(tau=0.2, zeta=1.0, decay=0.5, tau_period=0, zeta_period=2)
    optimizer = classifier(net, structure="full", expectation="exact", damping=damping, average=1e-12)
    zeta = 1.0
    for k in range(1, 7):
        G, g = dense_gauss_newton(net, x), gradient_of(net, x, y)
        eye = torch.eye(len(G), dtype=G.dtype)
        if k % 2 == 0:
            scores = {}
            for one in (0.5 * zeta, zeta, zeta / 0.5):
                d = torch.linalg.solve(G + one * eye, -g)
                scores[one] = float(-0.5 * (d @ g) ** 2 / (d @ (G + 0.2 * eye) @ d))
            zeta = min(scores, key=lambda one: scores[one])
        assert optimizer.step(x, y).zeta == pytest.approx(zeta, rel=1e-12)
    assert zeta != 1.0


def test_first_damping_is_the_best_of_the_grid() -> None:
    x, y = classes()
    reached = {}
    for factor in (None, *(10.0**k for k in range(2, -7, -1))):
        net = mlp()
        damping: Any = None
        if factor is not None:
            G = dense_gauss_newton(net, x)
            damping = factor * float(G.trace()) / len(G)
        report = classifier(net, structure="full", expectation="exact", damping=damping).step(x, y)
        reached[factor] = loss_of(net, x, y)
        if factor is None:
            chosen = report.zeta
    assert reached[None] == pytest.approx(min(reached.values()), rel=1e-9)
    given = classifier(mlp(), structure="full", expectation="exact", damping=Damping(tau=5.0)).step(x, y)
    assert given.tau == 5.0
    assert given.zeta != chosen or chosen > 0


def test_one_product_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One J d for α, two with momentum, three more where ζ is searched."""
    batches: list[LinearizedBatch] = []
    make = LinearizedBatch.__init__

    def noted(self: LinearizedBatch, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        batches.append(self)

    monkeypatch.setattr(LinearizedBatch, "__init__", noted)
    x, y = classes()
    optimizer = classifier(mlp(), damping=Damping(1.0, 1.0, zeta_period=3))
    for _ in range(3):
        optimizer.step(x, y)
    assert [b.products for b in batches] == [1, 1, 3]
    batches.clear()
    optimizer = classifier(mlp(), damping=1.0, momentum=True)
    for _ in range(2):
        optimizer.step(x, y)
    assert [b.products for b in batches] == [1, 2]


VARIANTS: dict[str, dict[str, Any]] = {
    "structure": {"structure": "kfra"},
    "expectation": {"expectation": "exact"},
    "damping": {"damping": 0.5},
    "inversion": {"damping": Damping(0.1, 0.1, inversion="exact")},
    "decay": {"damping": Damping(0.1, 0.1, decay=0.5)},
    "tau_period": {"damping": Damping(0.1, 0.1, tau_period=1)},
    "zeta_period": {"damping": Damping(0.1, 0.1, zeta_period=1)},
    "limit": {"damping": Damping(0.1, 0.1, tau_period=1), "lr": 30.0, "limit": 1e-3},
    "weight_decay": {"weight_decay": 0.1},
    "lr": {"lr": 0.5},
    "momentum": {"momentum": True},
    "average": {"average": 0.1},
    "inverse_period": {"inverse_period": 1},
    "params": {"params": "last-layer"},
    "output": {"output": lambda f: 2 * f},
    "seed": {"seed": 7},
}


def trained(steps: int = 8, **options: Any) -> Tensor:
    """Weights after a few steps on changing batches."""
    net = mlp()
    optimizer = classifier(net, **{"damping": 0.1, **options})
    for k in range(steps):
        optimizer.step(*classes(seed=k))
    return flat(net)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.thinned(6)
def test_every_keyword_changes_the_outcome(name: str) -> None:
    assert torch.equal(trained(), trained())
    assert not torch.allclose(trained(), trained(**VARIANTS[name]), rtol=1e-6)


def test_parts_and_accumulation_change_nothing() -> None:
    whole = trained(expectation="exact")
    assert torch.allclose(whole, trained(expectation="exact", examples=7), rtol=1e-9)
    net = mlp()
    optimizer = classifier(net, damping=0.1, expectation="exact")
    for k in range(8):
        x, y = classes(seed=k)
        optimizer.accumulate(x[:5], y[:5])
        optimizer.accumulate(x[5:12], y[5:12])
        report = optimizer.step(x[12:], y[12:])
        assert report.examples == 20
    assert torch.allclose(flat(net), whole, rtol=1e-9)
    optimizer.accumulate(x, y)
    assert optimizer.step().examples == 20


def test_sharing_changes_convolutions() -> None:
    def run(sharing: str) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
        x, y = torch.randn(10, 1, 3, 3, dtype=torch.float64), torch.arange(10) % 3
        classifier(net, damping=0.1, sharing=sharing, expectation="exact").step(x, y)
        return flat(net)

    assert not torch.allclose(run("expand"), run("reduce"), rtol=1e-6)


@pytest.mark.long
def test_defaults_train_without_tuning() -> None:
    x = classes(60)[0]
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()
    for structure in ("kfac", "kfra", "ekfac"):
        net = mlp()
        optimizer = classifier(net, structure=structure)
        reports = [optimizer.step(x, y) for _ in range(60)]
        assert reports[-1].loss < 0.4 * reports[0].loss
        assert not any(report.rejected for report in reports)
        assert all(math.isfinite(report.tau) for report in reports)


def test_is_a_torch_optimizer() -> None:
    optimizer = classifier(mlp())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, GaussNewton)
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda *args: seen.append(args[1]))
    x, y = classes()
    optimizer.step(x, y)
    assert seen[0][1] is x
