"""Bayesian inference in linear models: against dense Newton, quadrature and inverses in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import posterior as module
from linnet.errors import NumericalError
from linnet.laplace.laplace import Laplace
from linnet.linalg import Diagonal
from linnet.posterior import Newton, divergence, inverse_root, linear_posterior
from tests.fitting.problems import near, network, real
from tests.laplace.laplace_problems import classes
from tests.oracles.dense import ggn_oracle, jacobian_oracle, output_oracle

L = linnet.likelihoods
BOTH = pytest.mark.parametrize("base", [True, False], ids=["taylor", "kernel"])


def svi(draws: int = 1, **training: Any) -> linnet.SVI:
    """Inference by steps."""
    return linnet.SVI(training=linnet.Training(**training), draws=draws)


def short(method: str) -> Any:
    """A method with little to do."""
    return {"map": "map", "laplace": Newton(samples=4), "svi": svi(epochs=2)}[method]


def problem(kind: str, n: int = 14) -> tuple[nn.Module, Tensor, Tensor, Any]:
    """A network, data and a likelihood."""
    if kind == "categorical":
        return *classes(n), L.Categorical()
    if kind == "bernoulli":
        return network(3, 4, 2), real(n, 3, seed=1), (real(n, 2, seed=2) > 0).double(), L.Bernoulli()
    return network(3, 4, 2), real(n, 3, seed=1), real(n, 2, seed=2), L.Gaussian(0.3)


def dense_newton(
    model: nn.Module, x: Tensor, y: Tensor, likelihood: Any, base: bool, precision: float
) -> tuple[Tensor, Tensor, Tensor]:
    """δ*, the outputs there and the Fisher information, from dense matrices and full steps of Newton."""
    j = jacobian_oracle(model, x)
    f0 = output_oracle(model, x) * (1.0 if base else 0.0)
    delta = torch.zeros(j.shape[2]).double()
    eye = torch.eye(len(delta)).double()
    for _ in range(60):
        f = (f0 + j @ delta).requires_grad_()
        (slope,) = torch.autograd.grad(likelihood.nll(f, y).sum(), f)
        hessian = [_hessian(likelihood, f[i].detach(), y[i : i + 1]) for i in range(len(f))]
        fisher = ggn_oracle(j, torch.stack(hessian))
        gradient = torch.einsum("ncp,nc->p", j, slope) + precision * delta
        delta = delta - 0.7 * torch.linalg.solve(fisher + precision * eye, gradient)
    return delta, f0 + j @ delta, fisher


def _hessian(likelihood: Any, f: Tensor, y: Tensor) -> Tensor:
    """The second derivative of nll in the outputs of one example, by autograd."""
    return torch.autograd.functional.hessian(lambda own: likelihood.nll(own[None], y).sum(), f)


@BOTH
@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.thinned(4)
def test_map_is_that_of_dense_newton(kind: str, base: bool) -> None:
    model, x, y, likelihood = problem(kind)
    found = linear_posterior(
        linnet.linearize(model), (x, y), likelihood, Newton(tolerance=1e-10), base=base, prior_precision=0.4
    )
    delta, f, _ = dense_newton(model, x, y, likelihood, base, 0.4)
    near(found.mean, delta, 1e-8)
    near(found.predictive(x).mean, f, 1e-8)
    assert float((found.mean - delta).norm()) <= found.optimum.distance + 1e-9  # type: ignore[union-attr]


def test_map_does_not_depend_on_the_displacement_and_leaves_it() -> None:
    model, x, y, likelihood = problem("categorical")
    lin = linnet.linearize(model)
    expected = linear_posterior(lin, (x, y), likelihood).mean
    with torch.no_grad():
        for value in lin.delta.values():
            value.fill_(0.5)
    near(linear_posterior(lin, (x, y), likelihood).mean, expected, 1e-12)
    assert all(bool((value == 0.5).all()) for value in lin.delta.values())


def test_certificate_bounds_the_distance_at_any_tolerance() -> None:
    model, x, y, likelihood = problem("categorical")
    exact = dense_newton(model, x, y, likelihood, True, 0.1)[0]
    for tolerance in (0.5, 1e-2, 1e-4):
        loose = linear_posterior(
            linnet.linearize(model), (x, y), likelihood, Newton(tolerance=tolerance), prior_precision=0.1
        )
        assert loose.optimum is not None
        assert loose.optimum.gradient_norm <= tolerance * loose.optimum.first_norm
        assert float((loose.mean - exact).norm()) <= loose.optimum.distance


def test_map_of_separable_data_in_float32_needs_the_line_search() -> None:
    """A weak prior and separable classes: full steps of Newton overshoot far from the optimum."""
    x = torch.cat([real(40, 3) + 4, real(40, 3, seed=1) - 4]).float()
    y = torch.arange(2).repeat_interleave(40)
    lin = linnet.linearize(network(3, 16, 2).float())
    found = linear_posterior(lin, (x, y), L.Categorical(), base=False, prior_precision=1e-3)
    assert bool((found.predictive(x).probs.argmax(1) == y).all())
    assert found.predictive(x).variance.abs().max() == 0


def test_several_positions_and_blocks() -> None:
    """Outputs (N, C, T), more examples than a block, and labels that do not count."""
    model = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv1d(3, 3, 1)).double()
    x, y = real(150, 2, 4), (torch.arange(600) * 7 % 3).reshape(150, 4)
    y[::5, 1] = -100
    likelihood = L.Categorical()
    found = linear_posterior(linnet.linearize(model), (x, y), likelihood, Newton(tolerance=1e-10))
    j, f0 = jacobian_oracle(model, x), output_oracle(model, x)
    delta = found.mean.clone().requires_grad_()
    f = (f0.flatten(1) + j @ delta).reshape(150, 3, 4)
    (slope,) = torch.autograd.grad(likelihood.nll(f, y).sum() + 0.5 * delta @ delta, delta)
    assert float(slope.norm()) < 1e-7
    assert found.predictive(x[:7]).probs.shape == (7, 3, 4)


# --- Laplace --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("kind", ["categorical", "bernoulli"])
@pytest.mark.thinned(2)
def test_laplace_draws_are_the_root_of_the_dense_inverse(kind: str, base: bool) -> None:
    """The same normal numbers through (F + λ I)^(−½) from an eigendecomposition."""
    model, x, y, likelihood = problem(kind)
    found = linear_posterior(
        linnet.linearize(model), (x, y), likelihood, Newton(tolerance=1e-10, samples=6), base=base,
        prior_precision=0.4, seed=3,
    )  # fmt: skip
    delta, _, fisher = dense_newton(model, x, y, likelihood, base, 0.4)
    values, vectors = torch.linalg.eigh(fisher + 0.4 * torch.eye(len(delta)).double())
    z = torch.randn(6, len(delta), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = delta + z @ vectors @ torch.diag(values.rsqrt()) @ vectors.T
    near(found.sample(6, 3), expected, 2e-2)
    outputs = torch.einsum("ncp,sp->snc", jacobian_oracle(model, x), found.sample(6, 3))
    near(found.predictive(x).outputs, outputs + (output_oracle(model, x) if base else 0), 1e-8)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["categorical", "bernoulli"])
def test_laplace_is_that_of_the_house_at_the_optimum(kind: str) -> None:
    """A last layer is linear: the network at its optimum is the linear model, with the same posterior."""
    model, x, y, likelihood = problem(kind)
    lin = linnet.linearize(model, "last-layer")
    found = linear_posterior(
        lin, (x, y), likelihood, Newton(tolerance=1e-12, samples=30), prior_precision=0.5
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in found.delta:
                p += found.delta[name]
    house = Laplace(model, likelihood, "full", 0.5, params="last-layer").fit((x, y))
    z = torch.randn(5, len(found.mean), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values, vectors = torch.linalg.eigh(house.covariance.dense())
    near(found.sample(5, 1) - found.mean, z @ vectors @ torch.diag(values.sqrt()) @ vectors.T, 1e-8)
    here, there = found.predictive(x), house.predictive(x)
    assert float(((here.variance / there.variance).log()).mean().abs()) < 0.3  # 30 draws, 26 % each


def test_lanczos_root_is_exact_after_rank_plus_one_steps_and_fails_aloud(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ERROR", 1e-9)
    values = torch.cat([torch.linspace(1, 1e4, 10), torch.zeros(190)]).double() + 1e-2
    z = real(200, 5)
    near(inverse_root(Diagonal(values), z, 1e-2), values.rsqrt()[:, None] * z, 1e-8)
    hard = Diagonal(torch.logspace(-6, 6, 200).double())
    monkeypatch.setattr(module, "MOST", 20)
    with pytest.raises(NumericalError, match="prior_precision"):
        inverse_root(hard, z, 1e-6)


# --- SVI ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_svi_of_a_gaussian_model_reaches_the_mean_field_optimum() -> None:
    """There q is N(δ*, 1/(λ + F_pp)), and the bound its closed form below the evidence."""
    model, x, y, likelihood = problem("gaussian")
    found = linear_posterior(
        linnet.linearize(model), (x, y), likelihood, svi(epochs=500, learning_rate=0.05, draws=6),
        prior_precision=2.0,
    )  # fmt: skip
    delta, f, fisher = dense_newton(model, x, y, likelihood, True, 2.0)
    near(found.mean, delta, 4e-2)
    exact = (2.0 + fisher.diagonal()).rsqrt()
    assert float((found.deviation / exact - 1).abs().max()) < 0.08
    j = jacobian_oracle(model, x)
    kernel = torch.einsum("ncp,mdp->ncmd", j, j).reshape(28, 28)
    evidence = torch.distributions.MultivariateNormal(
        output_oracle(model, x).flatten(), kernel / 2.0 + 0.3 * torch.eye(28).double()
    ).log_prob(y.flatten())
    # E_q[log p] in closed form: ½ Σ_p F_pp s_p² below log p at δ*
    own = -likelihood.nll(f, y).sum() - 0.5 * (fisher.diagonal() * exact**2).sum()
    optimum = float(own - divergence(delta, exact, 2.0))
    estimate = found.bound(400)
    assert optimum <= float(evidence)
    assert abs(estimate.mean - optimum) < 0.02 * abs(optimum) + 4 * estimate.stderr
    assert estimate.mean <= float(evidence) + 4 * estimate.stderr
    covariance = torch.einsum("ncp,p,ndp->ncd", j, found.deviation**2, j)
    near(found.predictive(x).covariance, covariance, 1e-10)
    near(found.predictive(x).mean, output_oracle(model, x) + j @ found.mean, 1e-10)
    near(found.sample(4000, 0).std(0), found.deviation, 0.06)


@BOTH
@pytest.mark.thinned(2)
@pytest.mark.long
def test_svi_bound_is_below_the_evidence_of_an_integrable_model_and_increases(base: bool) -> None:
    """Two weights and one yes or no: the evidence by a grid over the weights."""
    model, x = nn.Linear(1, 1).double(), real(20, 1)
    y = (x + 0.5 * real(20, 1, seed=5) > 0).double()
    likelihood, precision = L.Bernoulli(), 0.5
    found = linear_posterior(
        linnet.linearize(model), (x, y), likelihood, svi(epochs=150, learning_rate=0.05, batch_size=5),
        base=base, prior_precision=precision,
    )  # fmt: skip
    side = torch.linspace(-14, 14, 401).double()
    grid = torch.cartesian_prod(side, side)
    f = (model(x).detach() if base else 0) + x @ grid[:, :1].T + grid[:, 1]
    log_joint = -(torch.nn.functional.softplus(f) - y * f).sum(0)
    log_joint = log_joint - 0.5 * precision * grid.square().sum(1) + math.log(precision / (2 * math.pi))
    evidence = float(torch.logsumexp(log_joint, 0)) + 2 * math.log(float(side[1] - side[0]))
    estimate = found.bound(500)
    assert evidence - 1.0 < estimate.mean < evidence + 3 * estimate.stderr
    thirds = torch.tensor(found.bounds).reshape(3, 50).mean(1)
    assert thirds[0] < thirds[1]
    assert thirds[1] < thirds[2] + 0.1


def test_svi_begins_as_the_paper_does() -> None:
    model, x, y, likelihood = problem("categorical")
    found = linear_posterior(linnet.linearize(model), (x, y), likelihood, svi(epochs=1, learning_rate=1e-9))
    near(found.deviation, torch.full((31,), math.log1p(math.exp(-5))).double(), 1e-6)
    near(found.predictive(x).mean, output_oracle(model, x), 1e-6)


def test_svi_by_default_says_when_its_steps_were_few() -> None:
    model, x, y, likelihood = problem("categorical")
    with pytest.warns(UserWarning, match=r"ended after 10 steps, of 0\.001 at most"):
        linear_posterior(linnet.linearize(model), (x, y), likelihood, "svi")


def test_svi_is_reproducible() -> None:
    model, x, y, likelihood = problem("categorical")
    lin = linnet.linearize(model)
    one, two, other = (
        linear_posterior(lin, (x, y), likelihood, svi(epochs=3, batch_size=4), seed=seed)
        for seed in (1, 1, 2)
    )
    torch.testing.assert_close(one.mean, two.mean)
    assert not torch.equal(one.mean, other.mean)


# --- predictions and errors -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["map", "svi", "laplace"])
def test_predictions_go_into_evaluate(method: str) -> None:
    model, x, y, likelihood = problem("categorical")
    found = linear_posterior(linnet.linearize(model), (x, y), likelihood, short(method))
    report = linnet.evaluate(found.predictive, (x, y))
    assert 0 <= report.accuracy <= 1
    prediction = found.predictive(x)
    assert prediction.sample(3, 0).shape == (3, 14, 3)
    assert prediction.log_density(y).shape == (14,)
    assert set(found.delta) == set(dict(model.named_parameters()))
    assert method in repr(found)


def test_a_network_that_ends_in_a_softmax_and_a_rate_that_diverges_are_told() -> None:
    model, x, y, likelihood = problem("categorical")
    with pytest.warns(UserWarning, match="softmax"):
        linear_posterior(linnet.linearize(nn.Sequential(model, nn.Softmax(1))), (x, y), likelihood)
    with pytest.raises(NumericalError, match="rate"):
        linear_posterior(linnet.linearize(model), (x, y), likelihood, svi(epochs=3, learning_rate=1e300))


@BOTH
def test_a_jacobian_without_room_is_not_kept(base: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that pass over the data give what those with a stored Jacobian give."""
    from linnet.linear import label_problem as streamed

    net, x, y, likelihood = problem("categorical", 140)
    lin = linnet.linearize(net)
    kept = linear_posterior(lin, (x, y), likelihood, Newton(samples=3, tolerance=1e-10), base=base)
    monkeypatch.setattr(streamed, "MOST", 0)
    passed = linear_posterior(lin, (x, y), likelihood, Newton(samples=3, tolerance=1e-10), base=base)
    assert kept._problem.rows is not None
    assert passed._problem.rows is None
    near(passed.mean, kept.mean, 1e-7)
    near(passed._draws, kept._draws, 1e-6)
