"""The evidence: against brute force, against exact marginal likelihoods, and its maximum."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError
from linnet.laplace.laplace import Laplace
from linnet.laplace.training import EvidenceSchedule, train_with_evidence
from tests.curvatures.side_by_side import grouped
from tests.fitting.problems import near, real
from tests.laplace.laplace_problems import (
    CATEGORICAL,
    DENSE,
    KRONECKER,
    LinearModel,
    evidence_oracle,
    fitted,
    numbers,
    theta_of,
)

L = linnet.likelihoods
ALL = [*DENSE, *KRONECKER]


@pytest.mark.parametrize("structure", ALL)
@pytest.mark.parametrize("prior", [0.3, {"0": 0.3, "2": 2.0}])
def test_evidence_by_brute_force(structure: str, prior: Any) -> None:
    la, x, y = fitted(structure, prior_precision=prior, data_scale=1.4)
    model = la.curvature.function.model
    nll = float(CATEGORICAL.nll(model(x), y).sum())
    expected = evidence_oracle(nll, theta_of(model), la.curvature.dense(), la.prior_moments[0], 1.4)
    assert float(la.log_evidence()) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("damping", ["matrix-normal", "factored"])
def test_evidence_of_damped_products(damping: str) -> None:
    """The same formula with the logarithm of the determinant of the factored precision."""
    la, *_ = fitted("kfac", prior_precision=0.3, damping=damping)
    exact, *_ = fitted("kfac", prior_precision=0.3)
    gap = -0.5 * float(torch.logdet(la.precision.dense()) - torch.logdet(exact.precision.dense()))
    assert float(la.log_evidence() - exact.log_evidence()) == pytest.approx(gap, rel=1e-7)


@pytest.mark.parametrize("structure", ["full", "block", "kfac", "ekfac", "low-rank"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_evidence_of_a_linear_model_is_its_marginal_likelihood(structure: str, outputs: int) -> None:
    """Exactly, at the mode; Kronecker factors are exact too, as Λ is the same for every example."""
    problem = LinearModel(outputs=outputs)
    evidence = float(problem.laplace(structure, rank=6).log_evidence())
    assert evidence == pytest.approx(problem.marginal(), rel=1e-9)


def test_evidence_of_a_logistic_model_by_numerical_integration() -> None:
    """Laplace's formula with the exact Hessian, and the integral it approximates, on a fine grid."""
    x, y = real(40, 1, seed=4), (real(40, 1, seed=5) > -0.3).double()
    grid = torch.linspace(-6, 6, 60_001, dtype=torch.float64)
    logits = x * grid
    log_joint = -L.Bernoulli().nll(logits.T.reshape(-1, 40), y.T.expand(len(grid), 40))
    log_joint = log_joint - 0.5 * 0.8 * grid**2 + 0.5 * math.log(0.8 / (2 * math.pi))
    integral = float(torch.logsumexp(log_joint, 0) + math.log(float(grid[1] - grid[0])))
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(float(grid[log_joint.argmax()]))
    la = Laplace(model, L.Bernoulli(), "full", 0.8).fit((x, y))
    assert float(la.log_evidence()) == pytest.approx(integral, abs=0.02)
    step = grid[1] - grid[0]
    best = int(log_joint.argmax())
    second = (log_joint[best - 50] - 2 * log_joint[best] + log_joint[best + 50]) / (50 * step) ** 2
    formula = float(log_joint[best] + 0.5 * math.log(2 * math.pi) - 0.5 * (-second).log())
    assert float(la.log_evidence()) == pytest.approx(formula, abs=1e-5)


@pytest.mark.parametrize("structure", [*ALL, "matrix-normal"])
def test_gradient_of_the_evidence_by_finite_differences(structure: str) -> None:
    model, x, y = numbers()
    damping = "matrix-normal" if structure == "matrix-normal" else "exact"
    kind = "kfac" if structure == "matrix-normal" else structure
    la = Laplace(
        model,
        L.Gaussian(variance=0.5),
        prior_precision={"0": 0.3, "2": 2.0},
        damping=damping,
        **grouped(kind, rank=26),
    ).fit((x, y))
    prior = torch.tensor([0.3, 2.0], dtype=torch.float64, requires_grad=True)
    noise = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def value(p: Tensor, v: Tensor) -> Tensor:
        return la.log_evidence(p, v)

    assert torch.autograd.gradcheck(value, (prior, noise), eps=1e-6, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("structure", ["diagonal", "full", "low-rank"])
def test_gradient_in_one_precision_a_parameter(structure: str) -> None:
    delta = (real(31, seed=9).square() + 0.1).requires_grad_()
    la, *_ = fitted(structure, prior_precision=delta.detach())
    assert torch.autograd.gradcheck(la.log_evidence, (delta,), eps=1e-6, atol=1e-6, rtol=1e-4)


def test_noise_scales_the_curvature_and_the_fit() -> None:
    """The evidence at another noise variance is that of a posterior fitted with it."""
    model, x, y = numbers()
    for structure in ("kfac", "full", "diagonal"):
        la = Laplace(model, L.Gaussian(variance=0.5), structure, 0.4).fit((x, y))
        other = Laplace(model, L.Gaussian(variance=0.9), structure, 0.4).fit((x, y))
        assert float(la.log_evidence(noise_variance=0.9)) == pytest.approx(
            float(other.log_evidence()), rel=1e-9
        )
    masked = y.clone()
    masked[:4, 0] = torch.nan
    la = Laplace(model, L.Gaussian(variance=0.5, masked=True), "full", 0.4).fit((x, masked))
    other = Laplace(model, L.Gaussian(variance=0.9, masked=True), "full", 0.4).fit((x, masked))
    assert float(la.log_evidence(noise_variance=0.9)) == pytest.approx(float(other.log_evidence()), rel=1e-9)


# Tuning


@pytest.mark.parametrize("structure", ALL)
@pytest.mark.parametrize("search", ["gradient", "fixed-point"])
@pytest.mark.thinned(3)
def test_tuned_prior_maximizes_the_evidence(structure: str, search: str) -> None:
    la, *_ = fitted(structure)
    la.tune("evidence", search=search)
    assert la.tuned is not None
    assert la.tuned.converged
    best, prior = float(la.log_evidence()), la.prior_precision
    assert best == pytest.approx(la.tuned.value, rel=1e-9)
    assert isinstance(prior, float)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert float(la.log_evidence(prior * factor)) < best


@pytest.mark.parametrize("search", ["gradient", "fixed-point"])
def test_layers_noise_and_matrix_normal_are_tuned_together(search: str) -> None:
    model, x, y = numbers(n=30)
    for damping in ("exact", "matrix-normal"):
        la = Laplace(model, L.Gaussian(variance=0.5), "kfac", damping=damping).fit((x, y))
        before = float(la.log_evidence())
        la.tune("evidence", prior="layer", search=search, steps=1000)
        best = float(la.log_evidence())
        assert best > before
        assert isinstance(la.likelihood, L.Gaussian)
        noise, prior = float(la.likelihood.noise), la.prior_precision
        assert isinstance(prior, dict)
        for factor in (0.9, 1.1):
            assert float(la.log_evidence(noise_variance=noise * factor)) < best
            for name in prior:
                assert float(la.log_evidence({**prior, name: prior[name] * factor})) < best
        assert float(la.predictive(x).with_noise().variance.min()) > noise


def test_one_precision_a_parameter_by_evidence() -> None:
    la, *_ = fitted("diagonal")
    layer = float(la.tune("evidence", prior="layer").log_evidence())
    each = la.tune("evidence", prior="parameter")
    assert float(each.log_evidence()) > layer
    assert isinstance(each.prior_precision, Tensor)
    assert each.prior_precision.shape == (31,)
    assert isinstance(each.tune("evidence", prior="isotropic").prior_precision, float)


def test_evidence_of_a_linear_model_recovers_noise_and_prior() -> None:
    """With many data the tuned noise is near the true one, and the evidence is that of its own maximum."""
    problem = LinearModel(noise=0.3, n=400)
    la = problem.laplace().tune("evidence")
    assert isinstance(la.likelihood, L.Gaussian)
    assert float(la.likelihood.noise) == pytest.approx(0.3, rel=0.2)
    assert la.summary()["likelihood"]["variance"] == pytest.approx(float(la.likelihood.noise))
    fixed = problem.laplace().tune("evidence", noise=False)
    assert fixed.likelihood.describe()["variance"] == pytest.approx(0.3)


def test_empirical_curvature_does_not_tell_the_noise() -> None:
    model, x, y = numbers()
    la = Laplace(model, L.Gaussian(variance=0.5), "diagonal", expectation="empirical").fit((x, y))
    with pytest.raises(InputError, match="empirical"):
        la.tune("evidence", noise=True)
    la.tune("evidence")
    assert la.likelihood.describe()["variance"] == pytest.approx(0.5)


def test_evidence_refuses_values_that_do_not_fit() -> None:
    la, *_ = fitted("kfac")
    with pytest.raises(InputError, match="Gaussian"):
        la.log_evidence(noise_variance=1.0)
    with pytest.raises(InputError, match="prior_precision"):
        la.log_evidence(-1.0)
    model, x, y = numbers()
    gaussian = Laplace(model, L.Gaussian()).fit((x, y))
    with pytest.raises(InputError, match="noise_variance"):
        gaussian.log_evidence(noise_variance=0.0)
    exact = Laplace(model, L.Gaussian()).fit((x, model(x).detach()))
    with pytest.raises(InputError, match="exactly"):
        exact.tune("evidence")
    assert exact.tune("evidence", noise=False).predictive(x).mean.isfinite().all()


# During training


@pytest.mark.long
def test_training_follows_the_evidence() -> None:
    """From a prior that is far too narrow, the evidence ends above that of training without updates."""
    x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    y = torch.sin(2 * x) + 0.1 * real(40, 1, seed=3)

    def run(burn_in: int) -> Laplace:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).double()
        return train_with_evidence(
            net, (x, y), L.Gaussian(variance=0.1), 150, lambda p: torch.optim.Adam(p, 0.02),
            schedule=EvidenceSchedule(every=15, burn_in=burn_in), batch_size=40, structure="kfac",
            prior_precision=30.0,
        )  # fmt: skip

    online, afterwards = run(0), run(150)
    assert isinstance(online.prior_precision, dict)
    assert sorted(online.prior_precision) == ["0", "2"]
    assert float(online.log_evidence()) > float(afterwards.log_evidence())
    again = run(0)
    assert again.prior_precision == online.prior_precision


def test_training_takes_loaders_and_says_what_is_wrong() -> None:
    x, y = real(12, 3), torch.arange(12) % 3
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)
    net = nn.Linear(3, 3).double()
    before = net.weight.detach().clone()
    make = lambda p: torch.optim.SGD(p, 0.1)  # noqa: E731
    la = train_with_evidence(net, loader, CATEGORICAL, 2, make, schedule=EvidenceSchedule(prior="isotropic"))
    assert not torch.equal(net.weight, before)
    assert torch.equal(la.curvature.function.theta["weight"], net.weight)
    assert not net.training
    assert net.weight.grad is None
    with pytest.raises(InputError, match="epochs"):
        train_with_evidence(net, loader, CATEGORICAL, 0, make)


def test_training_reaches_the_mode_of_scaled_data() -> None:
    """Data that count three times, against a prior that stays: the weights of Bayesian linear regression."""
    x, y = real(20, 3), real(20, 1, seed=1)
    net = nn.Linear(3, 1, bias=False).double()
    likelihood = L.Gaussian(variance=0.5)
    train_with_evidence(
        net, (x, y), likelihood, 400, lambda p: torch.optim.SGD(p, 0.1),
        schedule=EvidenceSchedule(burn_in=400, steps=1), structure="full", data_scale=3.0,
        prior_precision=20.0,
    )  # fmt: skip
    precision = 3 * x.T @ x / 0.5 + 20 * torch.eye(3, dtype=torch.float64)
    near(net.weight.T, torch.linalg.solve(precision, 3 * x.T @ y / 0.5), 1e-8)


def test_training_takes_the_outputs_that_it_is_told() -> None:
    class Named(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return {"scores": super().forward(input), "features": input}

    x, y = real(12, 3), torch.arange(12) % 3
    make = lambda p: torch.optim.SGD(p, 0.1)  # noqa: E731
    torch.manual_seed(0)
    net, plain = Named(3, 3).double(), nn.Linear(3, 3).double()
    plain.load_state_dict(net.state_dict())
    train_with_evidence(net, (x, y), CATEGORICAL, 2, make, output="scores")
    train_with_evidence(plain, (x, y), CATEGORICAL, 2, make)
    near(net.weight, plain.weight, 1e-12)


def test_entries_that_do_not_vary_have_no_prior() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y, s = torch.randn(12, 3).double(), torch.randn(12, 3).double(), 0.3
    masks = {name: torch.rand_like(p) > 0.5 for name, p in net.named_parameters()}
    free = torch.cat([mask.flatten() for mask in masks.values()])
    theta = torch.cat([p.detach().flatten() for p in net.parameters()])[free]
    rows = linnet.linearize(net).jacobian(x)[..., free].flatten(0, 1)
    left, k = float((y - net(x).detach()).square().sum()) / s, len(theta)

    def evidence(precision: float) -> float:
        h = rows.T @ rows / s + precision * torch.eye(k).double()
        fit = -0.5 * left - 18 * math.log(2 * math.pi * s)
        prior = 0.5 * (k * math.log(precision) - precision * float(theta @ theta))
        return fit + prior - 0.5 * float(torch.linalg.slogdet(h)[1])

    found = linnet.Laplace(net, linnet.likelihoods.Gaussian(s), "full", params=masks).fit((x, y))
    assert float(found.log_evidence()) == pytest.approx(evidence(1.0), rel=1e-9)
    best = found.tune(noise=False).prior_precision
    assert evidence(best) >= max(evidence(best * 1.01), evidence(best / 1.01))
