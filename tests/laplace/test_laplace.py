"""The posterior over weights: against dense float64 matrices, for every structure, prior and likelihood."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError, NumericalError
from linnet.laplace.laplace import Laplace
from tests import zoo
from tests.curvatures.side_by_side import grouped
from tests.fitting.problems import near, network, real
from tests.laplace.laplace_problems import (
    CATEGORICAL,
    DENSE,
    KRONECKER,
    LinearModel,
    classes,
    fitted,
    numbers,
    theta_of,
)
from tests.oracles.dense import ggn_oracle, jacobian_oracle

L = linnet.likelihoods


def dense_ggn(model: nn.Module, x: Tensor, likelihood: Any = CATEGORICAL) -> Tensor:
    """The exact Gauss-Newton matrix."""
    f = model(x).detach()
    return ggn_oracle(jacobian_oracle(model, x), likelihood.hessian(f)[:, 0])


@pytest.mark.parametrize("structure", ["full", "low-rank"])
def test_full_posterior_is_the_inverse_of_gauss_newton_plus_prior(structure: str) -> None:
    model, x, y = classes()
    la = Laplace(model, CATEGORICAL, prior_precision=0.3, **grouped(structure, rank=64)).fit((x, y))
    expected = torch.linalg.inv(dense_ggn(model, x) + 0.3 * torch.eye(31).double())
    near(la.covariance.dense(), expected, 1e-7 if structure == "low-rank" else 1e-10)


@pytest.mark.parametrize("structure", [*DENSE, *KRONECKER, {"0": "kfac", "2": "block"}])
@pytest.mark.parametrize("prior", ["isotropic", "layer"])
@pytest.mark.thinned(3)
def test_posterior_is_the_damped_curvature(structure: Any, prior: str) -> None:
    """(s G + Δ)⁻¹ for the G of the engine, dense, for one precision and for one a layer."""
    values: Any = 0.3 if prior == "isotropic" else {"0": 0.3, "2": 2.0}
    la, *_ = fitted(structure, prior_precision=values, data_scale=1.7)
    layer = torch.tensor([0.3] * 16 + [2.0] * 15, dtype=torch.float64)
    delta = torch.full((31,), 0.3, dtype=torch.float64) if prior == "isotropic" else layer
    precision = 1.7 * la.curvature.dense() + torch.diag(delta)
    near(la.covariance.dense(), torch.linalg.inv(precision), 1e-7)
    near(la.precision.dense(), precision, 1e-7)
    near(la.prior_moments[0], delta, 1e-12)
    assert la.prior_precision == pytest.approx(values)


@pytest.mark.parametrize("structure", DENSE)
def test_a_precision_for_every_parameter(structure: str) -> None:
    delta = real(31, seed=9).square() + 0.1
    la, *_ = fitted(structure, prior_precision=delta)
    near(la.covariance.dense(), torch.linalg.inv(la.curvature.dense() + torch.diag(delta)), 1e-7)
    named = {n: delta[s].view(la.curvature.function.space.shapes[n]) for n, s in
             la.curvature.function.space.slices.items()}  # fmt: skip
    again, *_ = fitted(structure, prior_precision=named)
    near(again.covariance.dense(), la.covariance.dense(), 1e-12)


def test_matrix_normal_posterior_is_equation_5_14() -> None:
    """(√N Ḡ + √λ I) ⊗ (√N Ā + √λ I), with Ā and Ḡ averages over the data, from first principles."""
    model, x, y = classes(n=10)
    la = Laplace(model, CATEGORICAL, "kfac", 0.3, damping="matrix-normal", data_scale=2.5).fit((x, y))
    n = 2.5 * 10
    hidden = torch.tanh(x @ model[0].weight.T + model[0].bias).detach()
    hessian = CATEGORICAL.hessian(model(x).detach())[:, 0]
    slope = model[2].weight.detach().T[None] * (1 - hidden**2)[:, :, None]  # ∂f/∂h, (N, 4, 3)
    expected = []
    for inputs, outer in ((x, slope @ hessian @ slope.mT), (hidden, hessian)):
        a = torch.cat([inputs, torch.ones(10, 1).double()], 1)
        mean_a, mean_g = a.T @ a / 10, outer.mean(0)
        eye_a, eye_g = torch.eye(len(mean_a)).double(), torch.eye(len(mean_g)).double()
        expected.append(torch.kron(n**0.5 * mean_g + 0.3**0.5 * eye_g, n**0.5 * mean_a + 0.3**0.5 * eye_a))
    for part, matrix in zip(la.precision.parts, expected, strict=True):
        near(part.operator.dense(), matrix, 1e-9)


def test_factored_damping_is_that_of_the_engine() -> None:
    la, *_ = fitted("kfac", prior_precision=0.3, damping="factored")
    near(la.precision.dense(), la.curvature.factored_damped(0.3).dense(), 1e-9)


@pytest.mark.parametrize("damping", ["matrix-normal", "factored"])
@pytest.mark.parametrize("name", ["mobilenet", "gpt2-eager", "transposed-convs"])
@pytest.mark.thinned(4)
def test_factored_damping_on_other_layouts(name: str, damping: str) -> None:
    """Groups, transposed weights: the precision exceeds the exact one in every direction."""
    case = zoo.case(name)
    likelihood = L.Gaussian()
    options: Any = {"params": "all", "output": case.output}
    plain, other = (
        Laplace(case.model(), likelihood, "kfac", 0.5, damping=how, **options).fit(case.x1)
        for how in ("exact", damping)
    )
    excess = other.precision.dense() - plain.precision.dense()
    assert float(torch.linalg.eigvalsh((excess + excess.T) / 2).min()) > -1e-8
    assert float(excess.diagonal().max()) > 1e-3


@pytest.mark.parametrize("structure", ["kfac", "diagonal", "block", "full"])
def test_duplicated_data_are_twice_the_scale(structure: str) -> None:
    model, x, y = classes()
    twice = Laplace(model, CATEGORICAL, structure).fit((torch.cat([x, x]), torch.cat([y, y])))
    scaled = Laplace(model, CATEGORICAL, structure, data_scale=2.0).fit((x, y))
    near(twice.covariance.dense(), scaled.covariance.dense(), 1e-9)


@pytest.mark.parametrize("damping", ["matrix-normal", "exact"])
def test_matrix_normal_sees_duplicates_as_scale(damping: str) -> None:
    model, x, y = classes()
    options: Any = {"structure": "kfac", "damping": damping}
    twice = Laplace(model, CATEGORICAL, **options).fit((torch.cat([x, x]), torch.cat([y, y])))
    scaled = Laplace(model, CATEGORICAL, data_scale=2.0, **options).fit((x, y))
    near(twice.covariance.dense(), scaled.covariance.dense(), 1e-9)


@pytest.mark.parametrize("structure", [*DENSE, *KRONECKER])
def test_an_infinite_prior_precision_collapses_the_posterior(structure: str) -> None:
    la, x, _ = fitted(structure, prior_precision=1e12)
    assert float(la.predictive(x).variance.max()) < 1e-9
    near(la.predictive(x).probs, la.predictive(x).mean.softmax(1), 1e-8)


@pytest.mark.parametrize("structure", ["kfac", "diagonal", "block", "full", "low-rank"])
@pytest.mark.thinned(2)
def test_adding_data_gives_the_posterior_of_the_union(structure: str) -> None:
    model, x, y = classes(n=14)
    whole = Laplace(model, CATEGORICAL, prior_precision=0.4, **grouped(structure, rank=64)).fit((x, y))
    parts = Laplace(model, CATEGORICAL, prior_precision=0.4, **grouped(structure, rank=64)).fit(
        (x[:5], y[:5])
    )
    parts.fit((x[5:], y[5:]), add=True)
    near(parts.covariance.dense(), whole.covariance.dense(), 1e-6 if structure == "low-rank" else 1e-9)
    assert float(parts.log_evidence()) == pytest.approx(float(whole.log_evidence()), rel=1e-9)
    assert parts.examples == whole.examples == 14
    parts.fit((x, y))
    near(parts.covariance.dense(), whole.covariance.dense(), 1e-6 if structure == "low-rank" else 1e-9)


def test_adding_keeps_tuned_hyper_parameters() -> None:
    la, x, y = fitted("kfac")
    tuned = la.tune("evidence").prior_precision
    assert la.fit((x, y), add=True).prior_precision == tuned != 1.0


def test_last_layer_is_a_subset_of_parameters() -> None:
    model, x, y = classes()
    last = Laplace(model, CATEGORICAL, "last-layer", 0.3).fit((x, y))
    subset = Laplace(model, CATEGORICAL, "full", 0.3, params=["2.weight", "2.bias"]).fit((x, y))
    near(last.covariance.dense(), subset.covariance.dense(), 1e-12)
    block = torch.linalg.inv(dense_ggn(model, x)[16:, 16:] + 0.3 * torch.eye(15).double())
    near(last.covariance.dense(), block, 1e-10)
    near(last.predictive(x).mean, model(x).detach(), 1e-12)


def test_lora_parameters_alone() -> None:
    case = zoo.case("lora")
    la = Laplace(case.model(), CATEGORICAL, "full", 0.5, params="lora").fit(case.x1)
    names = la.curvature.function.names
    assert names
    assert all("lora" in name for name in names)
    near(la.predictive(case.x2).mean, case.f2, 1e-10)


def test_samples_have_the_posterior_moments() -> None:
    la, *_ = fitted("kfac", prior_precision=1.0)
    draws = la.sample(20_000, 0)
    near_theta = theta_of(classes()[0])
    deviation = la.covariance.diagonal().sqrt()
    assert (((draws.mean(0) - near_theta) / deviation).abs() < 5 / 20_000**0.5).all()
    ratio = draws.var(0) / la.covariance.diagonal()
    assert ((ratio - 1).abs() < 5 * (2 / 20_000) ** 0.5).all()
    assert torch.equal(la.sample(3, 7), la.sample(3, 7))
    assert not torch.equal(la.sample(3, 7), la.sample(3, 8))


def test_the_model_is_not_touched() -> None:
    model, x, y = classes()
    model.train()
    model[0].bias.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    la = Laplace(model, CATEGORICAL, "kfac", params="all").fit((x, y)).tune("evidence")
    la.predictive(x, "mc", seed=0, samples=3)
    la.predictive(x.clone().requires_grad_()).variance.sum().backward()
    assert model.training
    assert not model[0].bias.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", [animal.name for animal in zoo.ZOO])
@pytest.mark.thinned(6)
def test_zoo(name: str) -> None:
    """Every network: variances equal the dense ones, joint and marginal, and everything is finite."""
    case = zoo.case(name)
    la = Laplace(case.model(), L.Gaussian(variance=0.5), "kfac", 0.5, output=case.output)
    la.fit((case.x1, case.f1) if isinstance(case.x1, tuple) else case.x1)
    prediction = la.predictive(case.x2)
    near(prediction.mean, case.f2, 1e-9)
    joint = torch.einsum("ncp,pq,mdq->ncmd", case.j2, la.covariance.dense(), case.j2)
    near(la.predictive(case.x2, joint=True).joint_covariance, joint, 1e-8)
    near(prediction.covariance, torch.einsum("ncnd->ncd", joint), 1e-8)
    assert bool((prediction.with_noise().variance >= 0.5).all())
    assert la.predictive(case.x2, "mc", samples=2, seed=0).mean.isfinite().all()


@pytest.mark.parametrize("name", ["resnet-batchnorm", "norms"])
def test_normalization_parameters_take_part(name: str) -> None:
    case = zoo.case(name)
    la = Laplace(case.model(), L.Gaussian(), "kfac", params="all", output=case.output).fit(case.x1)
    affine = [n for n, p in case.model().named_parameters() if p.ndim == 1]
    assert set(affine) <= {n for part in la.curvature.parts for n in part.layer.names}
    near(la.covariance.dense() @ la.precision.dense(), torch.eye(case.parameters).double(), 1e-8)


def likelihood_cases() -> list[Any]:
    n = 12
    return [
        pytest.param(L.Gaussian(variance=torch.tensor([0.2, 2.0])), real(n, 2, seed=2), id="gaussian"),
        pytest.param(L.HeteroscedasticGaussian(psd="clip"), real(n, 1, seed=2), id="log-variance"),
        pytest.param(L.Bernoulli(), (real(n, 2, seed=2) > 0).double(), id="bernoulli"),
        pytest.param(L.Poisson(), real(n, 2, seed=2).abs().round(), id="poisson"),
        pytest.param(L.Categorical(), torch.arange(n) % 2, id="categorical"),
        pytest.param(
            L.Custom(lambda f, y: 0.5 * ((f - y) ** 2).sum(1) + 1.8378770664093453,
                     moments=lambda f: (f, torch.ones_like(f)), canonical=True,
                     sample=lambda f, g: f + torch.randn(f.shape, generator=g, dtype=f.dtype)),
            real(n, 2, seed=2), id="custom"),
    ]  # fmt: skip


@pytest.mark.parametrize(("likelihood", "y"), likelihood_cases())
@pytest.mark.parametrize("structure", ["kfac", "full"])
@pytest.mark.thinned(6)
def test_every_likelihood(likelihood: Any, y: Tensor, structure: str) -> None:
    model, x, _ = numbers()
    la = Laplace(model, likelihood, structure).fit((x, y))
    first = float(la.log_evidence())
    la.tune("evidence", noise=False)
    assert float(la.log_evidence()) >= first - 1e-9
    for method in ("glm", "mc"):
        prediction = la.predictive(x, method, samples=200, seed=0)
        assert prediction.log_density(y).shape == (12,)
        assert prediction.log_density(y).isfinite().all()
        if isinstance(likelihood, L.Bernoulli | L.Categorical):
            assert prediction.probs.shape == (12, 2)
            with pytest.raises(InputError, match="with_noise"):
                prediction.with_noise()
        else:
            noisy = prediction.with_noise()
            assert noisy.mean.shape == noisy.variance.shape
            assert (noisy.variance > 0).all()
            with pytest.raises(InputError, match="probs"):
                prediction.probs  # noqa: B018
            assert torch.equal(noisy.with_noise().variance, noisy.variance)  # there is none left to add
    la.tune("loo", (x, y), search=linnet.Grid(prior_precision=[0.1, 1.0, 10.0]))
    assert la.prior_precision in (pytest.approx(0.1), pytest.approx(1.0), pytest.approx(10.0))


def test_outputs_with_positions() -> None:
    """Sequences (N, T, C): probabilities in the network's layout, each position by its own marginal."""
    torch.manual_seed(0)
    model = nn.Linear(2, 3).double()
    x, y = real(5, 4, 2), torch.randint(3, (5, 4))
    likelihood = L.Categorical(axis=-1)
    la = Laplace(model, likelihood, "full").fit((x, y))
    flat = Laplace(model, CATEGORICAL, "full").fit((x.reshape(20, 2), y.reshape(20)))
    near(la.covariance.dense(), flat.covariance.dense(), 1e-10)
    assert float(la.log_evidence()) == pytest.approx(float(flat.log_evidence()), rel=1e-10)
    for link in ("probit", "pairwise", "bridge"):
        p = la.predictive(x, link=link).probs
        assert p.shape == (5, 4, 3)
        near(p.reshape(20, 3), flat.predictive(x.reshape(20, 2), link=link).probs, 1e-9)
    density = flat.predictive(x.reshape(20, 2)).log_density(y.reshape(20)).reshape(5, 4).sum(1)
    near(la.predictive(x).log_density(y), density, 1e-9)
    assert la.predictive(x, "mc", samples=3).sampled_probs.shape == (3, 5, 4, 3)


# What is refused


def test_nothing_works_before_fit() -> None:
    model, x, y = classes()
    la = Laplace(model, CATEGORICAL)
    for call in (
        lambda: la.predictive(x),
        lambda: la.predictive(x, "mc"),
        lambda: la.tune("evidence"),
        lambda: la.log_evidence(),
        lambda: la.covariance,
        lambda: la.prior_precision,
        lambda: la.save("nowhere"),
    ):
        with pytest.raises(InputError, match="fitted"):
            call()
    assert "not fitted" in repr(la)
    assert "31" in repr(la.fit((x, y)))


def test_an_indefinite_hessian_is_a_singular_posterior() -> None:
    model, x, y = classes()
    la = Laplace(model, CATEGORICAL, "full", 1e-6, matrix="hessian").fit((x, y))
    with pytest.raises(NumericalError, match="eigenvalue -"):
        la.predictive(x)
    assert (
        Laplace(model, CATEGORICAL, "full", 1e3, matrix="hessian").fit((x, y)).predictive(x).variance.min()
        > 0
    )


def test_probabilities_instead_of_logits_are_noticed() -> None:
    model, x, y = classes()
    with pytest.warns(UserWarning, match="leave the last softmax out"):
        Laplace(nn.Sequential(model, nn.Softmax(1)), CATEGORICAL).fit((x, y))
    yes = nn.Sequential(network(3, 4, 1), nn.Linear(1, 1).double())
    nn.init.constant_(yes[1].weight, 20.0)
    yes[1].bias.data.copy_(-yes(x).median())
    with pytest.warns(UserWarning, match="leave the last sigmoid out"):
        Laplace(nn.Sequential(yes, nn.Sigmoid()), L.Bernoulli(), "full").fit((x, y.clamp_max(1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Laplace(model, CATEGORICAL).fit((x, y))
        Laplace(yes, L.Bernoulli(), "full").fit((x, y.clamp_max(1)))


def test_data_without_targets_have_a_posterior_but_no_evidence() -> None:
    model, x, y = classes()
    la = Laplace(model, CATEGORICAL, "kfac").fit(x)
    near(
        la.predictive(x).variance,
        Laplace(model, CATEGORICAL, "kfac").fit((x, y)).predictive(x).variance,
        1e-12,
    )
    with pytest.raises(InputError, match="without targets"):
        la.log_evidence()


def test_prior_mean_moves_the_evidence_alone() -> None:
    model, x, y = classes()
    plain = Laplace(model, CATEGORICAL, "full", 2.0).fit((x, y))
    centered = Laplace(model, CATEGORICAL, "full", 2.0, prior_mean=theta_of(model)).fit((x, y))
    near(plain.covariance.dense(), centered.covariance.dense(), 1e-12)
    gap = float(centered.log_evidence() - plain.log_evidence())
    assert gap == pytest.approx(float(theta_of(model).square().sum()), rel=1e-9)  # ½ λ ‖θ‖², λ = 2
    named = Laplace(
        model, CATEGORICAL, "full", 2.0, prior_mean={n: p.detach() for n, p in model.named_parameters()}
    ).fit((x, y))
    assert float(named.log_evidence()) == pytest.approx(float(centered.log_evidence()), rel=1e-12)


def test_float32_and_conjugate_mode() -> None:
    """A float32 network gives the float64 posterior to single precision."""
    problem = LinearModel()
    exact = problem.laplace("kfac").predictive(problem.x)
    single = Laplace(
        LinearModel().model.float(), L.Gaussian(variance=problem.noise), "kfac", problem.prior
    ).fit((problem.x.float(), problem.y.float()))
    near(single.predictive(problem.x.float()).variance.double(), exact.variance, 1e-4)
