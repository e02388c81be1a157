"""A new head: the probe is the dense ridge regression, the network is not touched, a fit remembers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.fitting.head import linear_probe
from linnet.fitting.last_layer import features
from linnet.linear.targets import make_targets
from tests.fitting.problems import near, real
from tests.oracles.dense import leave_one_out_oracle

RIDGES = [1e-3, 0.3, 20.0]
X, Y = real(12, 4, seed=1), torch.arange(12) % 3


def body() -> nn.Module:
    """A network whose last layer has ten outputs."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 10)).double()


def dense_probe(phi: Tensor, t: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """argmin ‖T − ΦWᵀ − 1bᵀ‖² + ρ‖W‖² by the normal equations with an intercept that costs nothing."""
    design = torch.cat([phi, torch.ones(len(phi), 1, dtype=torch.float64)], 1)
    penalty = rho * torch.eye(design.shape[1], dtype=torch.float64)
    penalty[-1, -1] = 0
    solution = torch.linalg.solve(design.T @ design + penalty, design.T @ t)
    return solution[:-1].T, solution[-1]


def left_out_error(phi: Tensor, t: Tensor, rho: float) -> float:
    """Mean squared leave-one-out residual by refits."""
    total = 0.0
    for i in range(len(phi)):
        kept = [k for k in range(len(phi)) if k != i]
        w, b = dense_probe(phi[kept], t[kept], rho)
        total += (t[i] - w @ phi[i] - b).square().sum().item()
    return total / len(phi)


def one_hot(y: Tensor, classes: int = 3, scale: float = 15.0) -> Tensor:
    return scale * nn.functional.one_hot(y, classes).double()


@pytest.mark.parametrize("rho", RIDGES)
@pytest.mark.parametrize("examples", [4, 12])
def test_probe_is_dense_ridge_regression(rho: float, examples: int) -> None:
    """With fewer examples than features and with more."""
    phi = real(examples, 6, seed=4) + 3.0
    t = one_hot(torch.arange(examples) % 3)
    weight, bias = linear_probe(phi, make_targets(torch.arange(examples) % 3, 3), rho)
    w, b = dense_probe(phi, t, rho)
    near(weight, w, 1e-9)
    near(bias, b, 1e-9)


def test_probe_of_regression_targets() -> None:
    phi, t = real(9, 4, seed=1), real(9, 2, seed=2)
    weight, bias = linear_probe(phi, make_targets(t, 2), 0.5)
    near(weight, dense_probe(phi, t, 0.5)[0])
    near(bias, dense_probe(phi, t, 0.5)[1])


def grid_of(phi: Tensor) -> list[float]:
    """The ridges that are tried: quarter decades around the mean of the centered Gram's diagonal."""
    centered = phi - phi.mean(0)
    scale = (centered @ centered.T).diagonal().mean().item()
    return [scale * 10 ** (-7 + k / 4) for k in range(37)]


@pytest.mark.parametrize("width", [6, 20])
def test_chosen_by_leave_one_out(width: int) -> None:
    """The closed form picks what brute force picks."""
    phi, t = real(12, width, seed=5), one_hot(Y)
    errors = [left_out_error(phi, t, rho) for rho in grid_of(phi)]
    best = grid_of(phi)[errors.index(min(errors))]
    weight, bias = linear_probe(phi, make_targets(Y, 3), "loo")
    near(weight, dense_probe(phi, t, best)[0], 1e-8)
    near(bias, dense_probe(phi, t, best)[1], 1e-8)


@pytest.mark.parametrize("width", [6, 20])
def test_chosen_by_cross_validation_score(width: int) -> None:
    """GCV of the hat matrix with the intercept."""
    phi, t = real(12, width, seed=5), one_hot(Y)
    design = torch.cat([phi, torch.ones(12, 1, dtype=torch.float64)], 1)

    def score(rho: float) -> float:
        penalty = rho * torch.eye(width + 1, dtype=torch.float64)
        penalty[-1, -1] = 0
        rest = torch.eye(12, dtype=torch.float64) - design @ torch.linalg.solve(
            design.T @ design + penalty, design.T
        )
        return ((rest @ t).square().sum() / rest.trace() ** 2).item()

    scores = [score(rho) for rho in grid_of(phi)]
    best = grid_of(phi)[scores.index(min(scores))]
    near(linear_probe(phi, make_targets(Y, 3), "gcv")[0], dense_probe(phi, t, best)[0], 1e-8)


@pytest.mark.parametrize("width", [6, 20])
def test_chosen_by_evidence(width: int) -> None:
    """The restricted likelihood: density of the targets in the directions orthogonal to the intercept."""
    phi, t = real(12, width, seed=5), 0.3 * real(12, 3, seed=6)
    t = t + phi @ real(width, 3, seed=7)
    basis = torch.linalg.svd(torch.ones(12, 1, dtype=torch.float64)).U[:, 1:]
    z, psi = basis.T @ t, basis.T @ phi

    def density(rho: float) -> float:
        matrix = psi @ psi.T + rho * torch.eye(11, dtype=torch.float64)
        noise = (z * torch.linalg.solve(matrix, z)).sum() / z.numel()  # σ²/ρ of highest density
        normal = torch.distributions.MultivariateNormal(torch.zeros(11, dtype=torch.float64), noise * matrix)
        return normal.log_prob(z.T).sum().item()

    densities = [density(rho) for rho in grid_of(phi)]
    best = grid_of(phi)[densities.index(max(densities))]
    near(linear_probe(phi, make_targets(t, 3), "evidence")[0], dense_probe(phi, t, best)[0], 1e-8)


# --- the new network ---------------------------------------------------------------------------------


def test_the_head_is_the_probe_on_the_features() -> None:
    model = body()
    head = linnet.with_head(model, 3, linnet.Probe(ridge=0.5), data=(X, Y))
    phi = model[:2](X).detach()  # type: ignore[index]
    near(features(model, X, batch=5), phi, 1e-14)
    w, b = dense_probe(phi, one_hot(Y), 0.5)
    near(head[2].weight, w, 1e-9)  # type: ignore[index]
    near(head[2].bias, b, 1e-9)  # type: ignore[index]
    near(head(X), phi @ w.T + b, 1e-9)
    assert head[2].weight.requires_grad  # type: ignore[index]
    assert head[2].weight.dtype == torch.float64  # type: ignore[index]


def test_scale_and_ridge_matter() -> None:
    default = linnet.with_head(body(), 3, linnet.Probe(ridge=0.5), data=(X, Y))(X)
    near(
        linnet.with_head(body(), 3, linnet.Probe(ridge=0.5, scale=3.0), data=(X, Y))(X),
        default.detach() / 5,
        1e-9,
    )
    strong = linnet.with_head(body(), 3, linnet.Probe(ridge=1e9), data=(X, Y))(X)
    near(strong, one_hot(Y).mean(0).expand(12, 3), 1e-6)
    chosen = {
        r: linnet.with_head(body(), 3, linnet.Probe(ridge=r), data=(X, Y))[2].weight.norm().item()
        for r in ("loo", "evidence")
    }  # type: ignore[index, operator]
    assert chosen["loo"] != chosen["evidence"]


@pytest.mark.parametrize("init", ["probe", "random", "zero"])
def test_the_network_is_not_touched(init: str) -> None:
    model = body()
    model.train()
    model[0].weight.grad = torch.ones_like(model[0].weight)  # type: ignore[index]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    head = linnet.with_head(model, 3, init, data=(X, Y), seed=torch.Generator().manual_seed(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[2].out_features == 10  # type: ignore[index]
    assert model.training
    assert head.training
    assert (model[0].weight.grad == 1).all()  # type: ignore[index]
    assert head[2].out_features == 3  # type: ignore[index]
    assert head[0].weight is not model[0].weight  # type: ignore[index]
    assert torch.equal(head[0].weight, model[0].weight)  # type: ignore[index]
    assert not model[0]._forward_hooks  # type: ignore[index]


def test_zero() -> None:
    head = linnet.with_head(body(), 3, "zero")
    assert not head(X).any()
    lin = linnet.linearize(head)
    assert not lin.jacobian(X)[:, :, : 4 * 6 + 6].any()  # what "probe" is for
    assert linnet.linearize(linnet.with_head(body(), 3, data=(X, Y))).jacobian(X)[:, :, :30].any()


def test_random(generator: torch.Generator) -> None:
    head = linnet.with_head(nn.Sequential(nn.Linear(4, 4), nn.Linear(400, 10)), 50, "random", seed=generator)
    weight = head[1].weight  # type: ignore[index]
    bound = 400**-0.5
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    again = linnet.with_head(body(), 3, "random", seed=torch.Generator().manual_seed(1))
    same = linnet.with_head(body(), 3, "random", seed=torch.Generator().manual_seed(1))
    other = linnet.with_head(body(), 3, "random", seed=torch.Generator().manual_seed(2))
    assert torch.equal(again(X), same(X))
    assert not torch.equal(again(X), other(X))


class Nested(nn.Module):
    """A head inside a container, inputs as a dict, dropout and batch normalization in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.classifier = nn.ModuleDict({"out": nn.Linear(6, 10)})

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier["out"](self.body(image))


def test_any_place_and_any_input() -> None:
    torch.manual_seed(0)
    model = Nested().double().train()
    head = linnet.with_head(model, 3, linnet.Probe(ridge=0.5), data=({"image": X}, Y))
    phi = model.eval().body(X).detach()
    near(
        head.eval()(X),
        phi @ dense_probe(phi, one_hot(Y), 0.5)[0].T + dense_probe(phi, one_hot(Y), 0.5)[1],
        1e-9,
    )
    near(
        linnet.with_head(Nested().double(), 3, linnet.Probe(ridge=0.5), data=((X,), Y)).eval()(X).sum(1),
        torch.full((12,), 15.0),
        1e-9,
    )


def test_float_targets_give_a_regression_head() -> None:
    t = real(12, 2, seed=3)
    head = linnet.with_head(body(), 2, linnet.Probe(ridge=0.5), data=(X, t))
    phi = body()[:2](X).detach()  # type: ignore[index]
    near(head(X), phi @ dense_probe(phi, t, 0.5)[0].T + dense_probe(phi, t, 0.5)[1], 1e-9)


# --- what a fit says about a probe -------------------------------------------------------------------


def test_a_fit_on_the_labels_of_its_head_says_that_leave_one_out_is_optimistic() -> None:
    head = linnet.with_head(body(), 3, data=(X, Y))
    lin = linnet.linearize(head)
    (warning,) = linnet.fit(lin, (X, Y)).summary()["warnings"]
    assert "optimistic" in warning
    assert "forget" in warning
    assert linnet.fit(lin, (X, Y.to(torch.int32))).summary()["warnings"], "the same labels in another type"
    some = linnet.fit(lin, (X[3:7], Y[3:7])).summary()["warnings"][0]
    assert "4 of these 4 examples" in some
    mixed = torch.cat([X[:2], real(4, 4, seed=8)]), torch.arange(6) % 3
    assert "of these 6 examples" in linnet.fit(lin, mixed).summary()["warnings"][0]
    other = real(12, 4, seed=8), (torch.arange(12) + 1) % 3
    assert linnet.fit(lin, other).summary()["warnings"] == []
    for init in ("random", "zero"):
        plain = linnet.linearize(linnet.with_head(body(), 3, init))
        assert linnet.fit(plain, (X, Y)).summary()["warnings"] == []


def test_leave_one_out_of_a_probe_is_that_of_the_fixed_network() -> None:
    """It leaves out what the labels did to the fit, not what they did to θ₀, as the warning says."""
    from tests.oracles.dense import jacobian_oracle, output_oracle

    head = linnet.with_head(body(), 3, data=(X, Y))
    fit = linnet.fit(linnet.linearize(head), (X, Y), ridge=0.5)
    expected = leave_one_out_oracle(jacobian_oracle(head, X), one_hot(Y), output_oracle(head, X), 0.5)
    near(fit.loo(), expected, 1e-9)


# --- bad input ---------------------------------------------------------------------------------------
