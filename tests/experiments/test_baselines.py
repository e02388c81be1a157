"""Dropout, factorized Gaussians and last-layer regression: closed forms where there are any."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from experiments.baselines.dropout import mc_dropout
from experiments.baselines.factorized import factorized_gaussian
from experiments.baselines.last_layer import last_layer
from linnet.errors import DataError, InputError, ModelError, NumericalError
from linnet.fitting.last_layer import features
from tests.fitting.problems import near, network, real

L = linnet.likelihoods


def dropout(rate: float = 0.5) -> nn.Module:
    """A linear network of its dropped inputs, with BatchNorm to be left in evaluation mode."""
    return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(rate), nn.Linear(4, 3)).double()


def blobs(n: int = 60) -> tuple[Tensor, Tensor]:
    """Three classes that can be told apart."""
    y = torch.arange(n) % 3
    return real(n, 2) * 0.3 + torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]]).double()[y], y


# --- dropout --------------------------------------------------------------------------------------


def test_dropout_moments_of_a_linear_network() -> None:
    """E[f] = W x + b and Var[f] = p/(1 − p) Σ w² x², for rate p."""
    model, x = dropout(0.3), real(5, 4)
    prediction = mc_dropout(model, L.Gaussian(), samples=5000).predictive(x)
    model.eval()
    weight = model[2].weight.detach()  # type: ignore[index,union-attr]
    normalized = model[0](x).detach()  # type: ignore[index,operator]
    variance = 0.3 / 0.7 * normalized.square() @ weight.square().T  # type: ignore[operator]
    assert float((prediction.variance / variance - 1).abs().max()) < 0.12
    error = (prediction.mean - model(x).detach()).abs() / (variance / 5000).sqrt()
    assert float(error.max()) < 4.5


def test_dropout_leaves_model_and_random_numbers_and_is_reproducible() -> None:
    model, x = dropout().train(), real(5, 4)
    state, buffers = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    baseline = mc_dropout(model, L.Categorical(), samples=7)
    first, second = baseline(x), baseline(x)
    assert isinstance(first, Tensor)
    assert torch.equal(first, second)  # type: ignore[arg-type]
    assert first.shape == (7, 5, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(buffers[k], v) for k, v in model.state_dict().items())
    assert not torch.equal(mc_dropout(model, L.Categorical(), 7, seed=1)(x), first)  # type: ignore[arg-type]


def test_networks_without_dropout_are_refused() -> None:
    for model in (network(), dropout(0.0)):
        with pytest.raises(InputError, match="no dropout"):
            mc_dropout(model, L.Categorical())
    with pytest.raises(InputError, match="samples"):
        mc_dropout(dropout(), L.Categorical(), samples=0)
    with pytest.raises(InputError, match="likelihoods"):
        mc_dropout(dropout(), "categorical")  # type: ignore[arg-type]


def test_dropout_inside_attention_counts() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0].mean(1)

    p = mc_dropout(Attends(), L.Categorical(), samples=5)(torch.randn(2, 3, 4))
    assert float(p.std(0).max()) > 0  # type: ignore[union-attr]


# --- the convention -------------------------------------------------------------------------------


def test_baselines_go_into_evaluate_ood_and_fgsm() -> None:
    x, y = blobs()
    baseline = mc_dropout(
        nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)).double(), L.Categorical(), 9
    )
    report = linnet.evaluate(baseline, (x, y))
    assert report.mutual_information > 0  # type: ignore[union-attr,operator]
    linnet.ood(baseline, x, 5 * x)
    leaf = x.clone().requires_grad_()
    p = baseline(leaf)
    (gradient,) = torch.autograd.grad(p.mean(0)[:, 0].log().sum(), leaf)  # type: ignore[union-attr]
    assert float(gradient.abs().max()) > 0
    assert not baseline(x).requires_grad  # type: ignore[union-attr]


def test_a_yes_or_no_has_two_columns_and_numbers_have_moments() -> None:
    x = real(6, 4)
    model = nn.Sequential(nn.Dropout(), nn.Linear(4, 1)).double()
    p = mc_dropout(model, L.Bernoulli(), 5)(x)
    assert p.shape == (5, 6, 2)  # type: ignore[union-attr]
    near(p.sum(-1), torch.ones(5, 6).double(), 1e-12)  # type: ignore[union-attr]
    report = linnet.evaluate(mc_dropout(model, L.Gaussian(0.5), 50), (x, real(6, 1)))
    assert math.isfinite(report.rmse)  # type: ignore[union-attr]
    with pytest.raises(DataError, match="finite"):
        mc_dropout(model, L.Bernoulli(), 5)(x * math.nan)


# --- factorized Gaussian --------------------------------------------------------------------------


def linear_optimum(x: Tensor, y: Tensor, noise: float, precision: float) -> tuple[Tensor, Tensor]:
    """The mean-field optimum of linear regression: the posterior mean, and deviations."""
    phi = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    a = phi.T @ phi / noise + precision * torch.eye(phi.shape[1]).double()
    return torch.linalg.solve(a, phi.T @ y[:, 0] / noise), a.diagonal().rsqrt()


class Shared(nn.Module):
    """A linear layer whose weights are also a parameter by another name: they have to be drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.again = nn.Linear(3, 1), nn.Linear(3, 1)
        self.again.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0 * self.again.bias


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: nn.Linear(3, 1), id="by outputs"),
        pytest.param(Shared, id="by weights", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_factorized_gaussian_of_a_linear_model_is_the_mean_field_optimum(make: Any) -> None:
    x, y = real(40, 3), real(40, 1, seed=1)
    found = factorized_gaussian(
        make().double(), (x, y), L.Gaussian(0.5),
        linnet.SVI(training=linnet.Training(epochs=1000, learning_rate=0.03), draws=4, deviation=0.1),
        prior_precision=2.0,
    )  # fmt: skip
    mean, deviation = linear_optimum(x, y, 0.5, 2.0)
    near(found.mean[:4], mean, 2e-2)
    assert float((found.deviation[:4] / deviation - 1).abs().max()) < 0.06
    assert found.bounds[0] < found.bounds[-1]


def test_which_layers_are_drawn_by_their_outputs() -> None:
    from experiments.baselines.factorized import _qualifying
    from linnet.tangent.functional import Functional

    plain = Functional(network(), "all")
    assert sorted(chain.from_iterable(_qualifying(plain, real(2, 3)).values())) == sorted(plain.names)
    assert not _qualifying(Functional(Shared().double(), "all"), real(2, 3))
    assert not _qualifying(Functional(nn.Linear(3, 2).double(), "all"), real(2, 5, 3))  # positions share W
    twice = nn.Linear(3, 3).double()
    assert not _qualifying(Functional(nn.Sequential(twice, twice), "all"), real(2, 3))
    merged = nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 2), nn.Unflatten(0, (-1, 5))).double()
    assert not _qualifying(Functional(merged, "all"), real(2, 5, 3))


def test_factorized_gaussian_classifies_and_is_unsure_far_away() -> None:
    x, y = blobs()
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    before = {name: p.clone() for name, p in model.named_parameters()}
    how = linnet.SVI(training=linnet.Training(epochs=150, learning_rate=0.02))
    found = factorized_gaussian(model, (x, y), L.Categorical(), how, samples=30)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    report = linnet.evaluate(found, (x, y))
    assert report.accuracy > 0.9
    assert torch.equal(found(x), found(x))  # type: ignore[arg-type]
    assert found.bounds[-1] > found.bounds[0]
    assert not any(module._forward_hooks for module in found.function.model.modules())


def test_factorized_gaussian_of_convolutions_runs_and_errors_are_named() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3)).double()
    x, y = real(8, 2, 4), torch.arange(8) % 3
    short = linnet.SVI(training=linnet.Training(epochs=2))
    assert factorized_gaussian(model, (x, y), L.Categorical(), short, samples=4)(x).shape == (4, 8, 3)  # type: ignore[union-attr]
    for wrong in ({"prior_precision": -1.0}, {"samples": 0}, {"inference": "svi"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            factorized_gaussian(model, (x, y), L.Categorical(), **wrong)  # type: ignore[arg-type]
    for given in ({"draws": 0}, {"deviation": 0.0}, {"training": linnet.Training(momentum=0.5)}):
        with pytest.raises(InputError, match="momentum" if "training" in given else next(iter(given))):
            linnet.SVI(**given)  # type: ignore[arg-type]
    with pytest.raises((DataError, InputError)):
        factorized_gaussian(model, (x, y + 5), L.Categorical())
    with pytest.raises(NumericalError, match="rate"):
        factorized_gaussian(
            model,
            (x, y),
            L.Categorical(),
            linnet.SVI(training=linnet.Training(epochs=3, learning_rate=1e300)),
        )


# --- last-layer regression ------------------------------------------------------------------------


def test_last_layer_is_the_closed_form_at_a_given_ridge() -> None:
    model, x, y = network(3, 5, 2), real(20, 3), real(20, 2, seed=1)
    found = last_layer(model, (x, y), ridge=0.7)
    phi = torch.cat([features(model, x), torch.ones(20, 1).double()], 1)
    inverse = torch.linalg.inv(phi.T @ phi + 0.7 * torch.eye(6).double())
    near(found.weights, inverse @ phi.T @ y, 1e-10)
    near(found.covariance, found.noise * inverse, 1e-10)
    own = torch.cat([features(model, real(7, 3, seed=2)), torch.ones(7, 1).double()], 1)
    prediction = found(real(7, 3, seed=2))
    near(prediction.mean, own @ inverse @ phi.T @ y, 1e-10)
    near(prediction.variance[:, 0], found.noise * torch.einsum("np,pq,nq->n", own, inverse, own), 1e-10)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(20).double(), found.noise * (torch.eye(20).double() + phi @ phi.T / 0.7)
    )
    assert found.log_evidence == pytest.approx(float(marginal.log_prob(y.T).sum()), rel=1e-10)
    for factor in (0.9, 1.1):  # σ² is the most likely one
        other = torch.distributions.MultivariateNormal(
            torch.zeros(20).double(), factor * marginal.covariance_matrix
        )
        assert float(other.log_prob(y.T).sum()) < found.log_evidence


def test_last_layer_chooses_the_ridge_of_greatest_evidence() -> None:
    model, x = network(3, 5, 1), real(30, 3)
    y = features(model, x) @ real(5, 1, seed=3) + 0.2 * real(30, 1, seed=4)
    found = last_layer(model, (x, y[:, 0]))
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert last_layer(model, (x, y), found.ridge * factor).log_evidence < found.log_evidence
    assert found.noise == pytest.approx(0.04, rel=0.5)
    report = linnet.evaluate(found, (x, y))
    assert report.rmse < 0.3  # type: ignore[union-attr]


def test_last_layer_errors() -> None:
    x = real(10, 3)
    with pytest.raises(InputError, match="regression"):
        last_layer(network(), (x, torch.arange(10) % 3))
    with pytest.raises(InputError, match="ridge"):
        last_layer(network(), (x, real(10, 3)), ridge=0.0)
    with pytest.raises(InputError, match="evidence"):
        last_layer(network(), (x, real(10, 3)), ridge="loo")
    with pytest.raises(ModelError, match="linear"):
        last_layer(nn.Sequential(nn.Linear(3, 3), nn.ReLU()).double(), (x, real(10, 3)))
    with pytest.raises(DataError, match="finite"):
        last_layer(network(), (x, real(10, 3)))(x * math.nan)
    for baseline in (last_layer(network(), (x, real(10, 3))), mc_dropout(dropout(), L.Categorical(), 3)):
        with pytest.raises(DataError, match="x is empty"):
            baseline(x[:0])


def test_dropout_names_inputs_that_it_cannot_take() -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2))
    baseline = mc_dropout(net, linnet.likelihoods.Categorical(), samples=2)
    with pytest.raises(ModelError, match="cannot run on x"):
        baseline.predictive(torch.zeros(4, 5))


# --- what cannot be used ----------------------------------------------------------------------------


def test_inputs_that_no_network_takes_are_named() -> None:
    x, y = real(8, 3), torch.arange(8) % 3
    likelihood = L.Categorical()
    ffg = factorized_gaussian(
        network(), (x, y), likelihood, linnet.SVI(training=linnet.Training(epochs=1)), samples=2
    )
    for wrong in (x[:, :2], x > 0):
        with pytest.raises(ModelError, match="cannot run on x"):
            ffg(wrong)


@pytest.mark.parametrize("seed", ["one", None, 0.5, True, 2**70])
def test_seeds_that_are_none(seed: Any) -> None:
    with pytest.raises(InputError, match="seed="):
        mc_dropout(dropout(), L.Categorical(), seed=seed)


def test_missing_targets_take_no_part() -> None:
    """Those of a whole example may as well be left out."""
    x, t = real(12, 3), real(12, 2, seed=1)
    t[8:] = math.nan
    likelihood, kept = L.Gaussian(variance=0.5, masked=True), (x[:8], t[:8])
    lin = linnet.linearize(network(3, 4, 2))
    some, all_ = (
        linnet.linear_posterior(lin, data, likelihood, linnet.Newton(tolerance=1e-9))
        for data in (kept, (x, t))
    )
    near(all_.mean, some.mean, 1e-8)
    t[:8, 1] = math.nan
    short = linnet.SVI(training=linnet.Training(epochs=2))
    bounds = [factorized_gaussian(network(3, 4, 2), (x, t), likelihood, short, samples=2).bounds]
    assert all(math.isfinite(bound) for bound in bounds[0])
    with pytest.raises(DataError, match="y holds NaN"):
        linnet.linear_posterior(lin, (x, t), L.Gaussian())
