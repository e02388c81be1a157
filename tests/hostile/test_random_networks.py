"""Random networks: derivatives, kernels, linear fits and tangent processes against dense float64 algebra.

Three hundred networks are drawn from fixed seeds; an ordinary run takes the same few of them, and
``make test-hostile`` all. Nothing here is compared with linnet itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from tests.fitting.problems import fit_options
from tests.hostile.cases import (
    COUNT,
    SHORT,
    drawn,
    every_network,
    left_out,
    near,
    ridge_solution,
    untouched,
)
from tests.hostile.random_networks import (
    Network,
    called,
    examples,
    featured,
    jacobian,
    network,
    tracked,
)

# what is drawn may end in a sigmoid, or have a layer that nothing depends on
pytestmark = pytest.mark.filterwarnings(
    "ignore:the network's outputs are",
    "ignore:the outputs do not depend on",
    "ignore:y is constant",
    "ignore:.*are copies of others",
    "ignore:.*have the inputs of others",
)


def test_the_same_seed_is_the_same_network() -> None:
    for seed in SHORT[:4]:
        a, b = network(seed), network(seed)
        torch.manual_seed(seed)
        assert str(a) == str(b)
        assert torch.equal(a.j, b.j)
        assert torch.equal(a.f_test, b.f_test)


def test_all_networks_together_hold_every_kind_of_layer() -> None:
    assert len(featured()) < COUNT  # so that each comes up twice or more
    made = [drawn(seed) for seed in range(COUNT)]
    assert {(net.kind, net.feature) for net in made} == set(featured())
    shapes = {len(net.own_shape) for net in made}
    assert shapes == {2, 3, 4, 5}
    assert {net.n for net in made} == {1, 2, 3, 4, 5, 6}
    assert max(sum(p.numel() for p in tracked(net.model)) for net in made) <= 80
    assert {net.model.training for net in made} == {True, False}


def test_the_oracle_is_the_limit_of_differences() -> None:
    for seed in SHORT[:6]:
        net, step = drawn(seed), 1e-6
        v = net.numbers((net.j.shape[2],), 3)
        up, down = (called(net.moved(sign * step * v), net.x).flatten(1) for sign in (1, -1))
        near((up - down) / (2 * step), net.j @ v, share=1e-6)


@every_network
def test_derivatives_and_kernels(seed: int) -> None:
    with untouched(drawn(seed)) as net:
        lin, p = linnet.linearize(net.model), net.j.shape[2]
        assert lin.parameter_names == net.names
        assert lin.space.dim == p
        near(lin.base(net.x), net.f)
        near(lin.jacobian(net.x), net.j)
        v, u = net.numbers((p, 2), 3), net.numbers((*net.f.shape, 2), 4)
        near(lin.jvp(net.x, v), torch.einsum("ncp,pk->nck", net.j, v))
        near(lin.jvp(net.x, v[:, 0]), net.j @ v[:, 0])
        near(lin.jvp(net.x, lin.space.to_params(v[:, 0])), net.j @ v[:, 0])
        wanted = torch.einsum("ncp,nck->pk", net.j, u)
        near(lin.vjp(net.x, u, like="flat"), wanted)
        near(lin.space.to_flat(lin.vjp(net.x, u[..., 0])), wanted[:, 0])
        for other, j2 in ((None, net.j), (net.x_test, net.j_test)):
            full = torch.einsum("ncp,mdp->ncmd", net.j, j2)
            near(lin.kernel(net.x, other), full)
            near(lin.kernel(net.x, other, form="trace"), torch.einsum("ncmc->nm", full))
            near(lin.kernel(net.x, other, form="diagonal"), torch.einsum("ncmc->nmc", full))
            near(lin.kernel(net.x, other, form="sum"), full.sum((1, 3)), float(full.abs().max()))
        _check_module(net, lin, 0.1 * v[:, 1])


def _check_module(net: Network, lin: linnet.Linearized, step: Tensor) -> None:
    """The linearization as a module at δ ≠ 0, its gap, and what it becomes at θ₀ + δ."""
    with torch.no_grad():
        for name, part in lin.space.to_params(step).items():
            lin.delta[name].copy_(part)
    linear = net.f + net.j @ step
    near(lin(net.x).flatten(1), linear)
    there = called(net.moved(step), net.x).flatten(1).detach()
    near(lin.gap(net.x), (there - linear).norm() / (linear - net.f).norm(), 1.0)
    lin(net.x).square().sum().backward()
    found = {name: torch.zeros_like(d) if d.grad is None else d.grad for name, d in lin.delta.items()}
    gradient = lin.space.to_flat(found)
    near(gradient, 2 * torch.einsum("ncp,nc->p", net.j, linear))
    lin.relinearize()
    near(lin.base(net.x), there)
    near(lin.jacobian(net.x_test), jacobian(net.moved(step), net.x_test))


# --- the fit of the squared loss ------------------------------------------------------------------


def fit_targets(net: Network) -> tuple[Tensor, Tensor]:
    """What is handed to the fit, and the targets (N, C) that it stands for."""
    two = net.f.shape[1] > 1 and len(net.own_shape) == 2
    if net.seed % 2 and two and len(net.labels.unique()) > 1:
        return net.labels, 15.0 * nn.functional.one_hot(net.labels, net.f.shape[1]).double()
    return net.targets, net.targets.flatten(1)


@every_network
@pytest.mark.parametrize("solver", ["dual", "cg"])
@pytest.mark.thinned(2)
def test_squared_fit(seed: int, solver: str) -> None:
    with untouched(drawn(seed)) as net:
        y, t = fit_targets(net)
        rho = (1e-3, 0.1, 10.0)[seed % 3] * net.scale
        options: dict[str, Any] = {"tolerance": 1e-14} if solver == "cg" else {}
        fit = linnet.fit(
            linnet.linearize(net.model), (net.x, y), ridge=rho, **fit_options(solver=solver, **options)
        )
        r, size = t - net.f, float((t - net.f).abs().max())
        delta = ridge_solution(net.j, r, rho)
        near(fit.module.space.to_flat(fit.delta), delta)
        prediction = net.f_test + net.j_test @ delta
        near(fit.predict(net.x_test), prediction, size)
        without = list(left_out(net.j, r, rho))
        alone = torch.stack([net.f[i] + net.j[i] @ d for i, d in enumerate(without)])
        near(fit.loo(), alone, size)
        change = torch.stack([net.j_test @ (delta - d) for d in without])
        near(fit.influence(net.x_test), change, size)
        near(fit.informativeness(net.x_test), change.square().sum(2).mean(1), size**2)
        _check_posterior(net, fit, r, rho)
        _check_changes(net, fit, y, t, rho)


def _check_posterior(net: Network, fit: Any, r: Tensor, rho: float) -> None:
    """Noise and covariance, from the marginal likelihood of the linear model."""
    flat = net.j.flatten(0, 1)
    matrix = flat @ flat.T + rho * torch.eye(len(flat), dtype=torch.float64)
    noise = rho * float(r.flatten() @ torch.linalg.solve(matrix, r.flatten())) / r.numel()
    near(fit.noise, noise)
    precision = flat.T @ flat + rho * torch.eye(flat.shape[1], dtype=torch.float64)
    covariance = torch.linalg.inv(precision)
    wanted = noise * torch.einsum("ncp,pq,ndq->ncd", net.j_test, covariance, net.j_test)
    prior = noise / rho * float(net.j_test.square().sum(2).max())
    near(fit.predictive(net.x_test).covariance, wanted, prior)


def _check_changes(net: Network, fit: Any, y: Tensor, t: Tensor, rho: float) -> None:
    """Forgetting and adding are fitting again."""
    size = float((t - net.f).abs().max())
    if net.n > 1:
        gone = [0, net.n - 1] if net.n > 2 else [1]
        kept = [i for i in range(net.n) if i not in gone]
        smaller = fit.forget(gone)
        delta = ridge_solution(net.j[kept], (t - net.f)[kept], rho)
        near(smaller.predict(net.x), net.f + net.j @ delta, size)
        near(smaller.loo(), fit.forget(gone).loo(), size)
    more = y[:1].expand(2, *y.shape[1:])
    larger = fit.update((net.x_test, more))
    j, f = torch.cat([net.j, net.j_test]), torch.cat([net.f, net.f_test])
    r = torch.cat([t, t[:1].expand(2, -1)]) - f
    delta = ridge_solution(j, r, rho)
    near(larger.predict(net.x), net.f + net.j @ delta, size)
    refits = [f[i] + j[i] @ d for i, d in enumerate(left_out(j, r, rho))]
    near(larger.loo(), torch.stack(refits), float(r.abs().max()))


# --- the fit of the cross-entropy -----------------------------------------------------------------


def softmax_gradient(j: Tensor, f: Tensor, y: Tensor, rho: float, delta: Tensor) -> Tensor:
    """∇ of Σ −log p + ½ρ‖δ‖² at δ, for classes y."""
    f = f + j @ delta
    p = f.sigmoid() if f.shape[1] == 1 else f.softmax(1)
    wanted = y[:, None].double() if f.shape[1] == 1 else nn.functional.one_hot(y, f.shape[1]).double()
    return torch.einsum("ncp,nc->p", j, p - wanted) + rho * delta


@every_network
@pytest.mark.parametrize("solver", ["dual", "primal", "cg"])
@pytest.mark.thinned(3)
def test_cross_entropy_fit(seed: int, solver: str) -> None:
    with untouched(drawn(seed)) as net:
        y = net.labels.flatten(1)[:, 0] if net.labels.ndim > 1 else net.labels
        rho = (1e-2, 0.3)[seed % 2] * net.scale
        options: dict[str, Any] = {"tolerance": 1e-12} if solver == "cg" else {}
        options |= {"loss": "cross-entropy", "ridge": rho, "solver": solver}
        lin = linnet.linearize(net.model)
        if (
            sum(size > 1 for size in net.own_shape[1:]) > 1
        ):  # a class for each example, outputs in several axes
            with pytest.raises(linnet.errors.InputError, match="y has one class for each example"):
                linnet.fit(lin, (net.x, y), **fit_options(**options))
            lin = linnet.linearize(net.model, output=lambda outputs: outputs.flatten(1))
        fit = linnet.fit(lin, (net.x, y), **fit_options(**options))
        delta = lin.space.to_flat(fit.delta)
        pull = float(softmax_gradient(net.j, net.f, y, rho, torch.zeros_like(delta)).abs().max())
        near(softmax_gradient(net.j, net.f, y, rho, delta), torch.zeros_like(delta), pull)
        near(fit.predict(net.x_test), net.f_test + net.j_test @ delta)
        for i, kept in examples(net.n):
            if kept:
                found = lin.space.to_flat(fit.forget([i]).delta)
                near(softmax_gradient(net.j[kept], net.f[kept], y[kept], rho, found), 0 * delta, pull)
        new = torch.arange(2)
        larger = lin.space.to_flat(fit.update((net.x_test, new)).delta)
        j, f = torch.cat([net.j, net.j_test]), torch.cat([net.f, net.f_test])
        near(softmax_gradient(j, f, torch.cat([y, new]), rho, larger), 0 * delta, pull)


# --- the tangent process --------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "function": {"space": "function", "solver": "cholesky"},
    "parameter": {"space": "parameter", "solver": "cholesky"},
    "iterative": {"space": "parameter", "solver": "cg", "variance": "exact", "tolerance": 1e-13},
}


@every_network
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thinned(2)
def test_tangent_process(seed: int, way: str) -> None:
    with untouched(drawn(seed)) as net:
        noise, precision = 0.2, (0.5 * net.scale, 5.0 * net.scale)[seed % 2]
        given = linnet.likelihoods.Gaussian(noise, axis=net.axis)
        gp = linnet.TangentGP(net.model, given, prior_precision=precision, **WAYS[way])
        gp.fit(net.x, net.targets)
        _check_process(net, gp, (net.j, net.f, net.targets.flatten(1)), noise, precision)
        if way != "iterative":
            r = (net.targets.flatten(1) - net.f).flatten()
            flat = net.j.flatten(0, 1)
            total = flat @ flat.T / precision + noise * torch.eye(len(r), dtype=torch.float64)
            normal = torch.distributions.MultivariateNormal(torch.zeros_like(r), total)
            near(gp.log_evidence().mean, normal.log_prob(r))
        more = net.numbers((2, *net.own_shape[1:]), 5)
        both = torch.cat([net.j, net.j_test]), torch.cat([net.f, net.f_test])
        everything = *both, torch.cat([net.targets, more]).flatten(1)
        _check_process(net, gp.update(net.x_test, more), everything, noise, precision)


def _check_process(
    net: Network, gp: Any, data: tuple[Tensor, Tensor, Tensor], noise: float, precision: float
) -> None:
    """Mean and joint covariance, by Bayesian linear regression on the weights."""
    j, f, t = data
    flat, r = j.flatten(0, 1), (t - f).flatten()
    eye = torch.eye(flat.shape[1], dtype=torch.float64)
    covariance = torch.linalg.inv(flat.T @ flat / noise + precision * eye)
    size = float(r.abs().max())
    found = gp.predictive(net.x_test, joint=True)
    near(found.mean, net.f_test + net.j_test @ (covariance @ (flat.T @ r) / noise), size)
    wanted = torch.einsum("ncp,pq,mdq->ncmd", net.j_test, covariance, net.j_test)
    prior = float(net.j_test.square().sum(2).max()) / precision
    near(found.joint_covariance, wanted, prior)
    near(found.with_noise().variance, torch.einsum("ncnc->nc", wanted) + noise, prior)
