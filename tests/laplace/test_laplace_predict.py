"""Predictions: closed forms against Monte Carlo, joint covariances, gradients in x, sampled weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.curvatures import Passes
from linnet.errors import InputError, MemoryBudgetError
from linnet.laplace import outputs as laplace_outputs
from linnet.laplace.laplace import Laplace
from linnet.likelihoods import Categorical
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.sampled import Link, SampledPredictive, class_probabilities, log_density
from tests import zoo
from tests.fitting.problems import near, network, real
from tests.laplace.laplace_problems import CATEGORICAL, classes, fitted, numbers, output_covariance

L = linnet.likelihoods


@pytest.mark.parametrize("structure", ["full", "block", "diagonal", "low-rank", "kfac", "ekfac", "kfra"])
@pytest.mark.parametrize("damping", ["exact", "matrix-normal"])
@pytest.mark.thinned(3)
def test_covariance_is_that_of_the_dense_jacobian(structure: str, damping: str) -> None:
    if damping == "matrix-normal" and structure not in ("kfac", "kfra"):
        structure = "kfac"
    la, *_ = fitted(structure, prior_precision=0.4, damping=damping)
    model, x = classes()[0], real(5, 3, seed=8)
    joint = output_covariance(model, x, la.covariance.dense())
    prediction = la.predictive(x)
    near(prediction.mean, model(x).detach(), 1e-12)
    near(prediction.covariance, torch.einsum("ncnd->ncd", joint), 1e-9)
    near(prediction.variance, torch.einsum("ncnc->nc", joint), 1e-9)
    whole = la.predictive(x, joint=True)
    near(whole.joint_covariance, joint, 1e-9)
    near(whole.covariance, prediction.covariance, 1e-9)
    near(whole.variance, prediction.variance, 1e-9)
    with pytest.raises(InputError, match="joint"):
        prediction.joint_covariance  # noqa: B018


def test_joint_covariance_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged tiles give the same numbers, and no budget is exceeded in silence."""
    la, *_ = fitted("kfac")
    x = real(7, 3, seed=8)
    whole = la.predictive(x, joint=True).joint_covariance
    monkeypatch.setattr(laplace_outputs, "MOST", 3)
    near(la.predictive(x, joint=True).joint_covariance, whole, 1e-12)
    assert torch.equal(whole, whole.permute(2, 3, 0, 1))
    with pytest.raises(MemoryBudgetError, match="joint"):
        la.predictive(x, joint=True, memory=2000)


@pytest.mark.parametrize("link", ["probit", "pairwise", "bridge", "mc"])
def test_large_predictions_keep_variances_only(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    la, x, y = fitted("kfac")
    whole = la.predictive(x, link=link, seed=3)
    monkeypatch.setattr(laplace_outputs, "KEPT", 0)
    lean = la.predictive(x, link=link, seed=3)
    near(lean.probs, whole.probs, 1e-12)
    near(lean.variance, whole.variance, 1e-12)
    near(lean.covariance, whole.covariance, 1e-12)
    near(lean.log_density(y), whole.log_density(y), 1e-12 if link != "mc" else 1.0)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal", "full"])
@pytest.mark.parametrize("tail", [False, True])
def test_last_layer_without_derivatives(structure: str, tail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same covariance as by the dense Jacobian, also where something follows the last layer."""
    model, x, y = classes()
    model = nn.Sequential(*model, nn.LeakyReLU(0.5)) if tail else model
    la = Laplace(model, CATEGORICAL, structure, params=["2.weight", "2.bias"]).fit((x, y))
    j = linnet.linearize(model, params=["2.weight", "2.bias"]).jacobian(x)
    expected = torch.einsum("ncp,pq,ndq->ncd", j, la.covariance.dense(), j)
    near(la.predictive(x).covariance, expected, 1e-9)
    monkeypatch.setattr(laplace_outputs, "FORMED", 30)  # three examples at once
    for name in ("KEPT_OF_HEAD", "KEPT"):
        monkeypatch.setattr(laplace_outputs, name, 0)
        prediction = la.predictive(x)
        near(prediction.variance, expected.diagonal(dim1=1, dim2=2), 1e-9)
        near(prediction.mean, model(x).detach(), 1e-12)
        near(prediction.covariance, expected, 1e-9)


@pytest.mark.parametrize("link", ["probit", "pairwise", "bridge", "mc"])
@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_links_of_a_last_layer_in_parts(link: str, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same probabilities where covariances are formed for a few examples, or never."""
    model, x, y = classes()
    la = Laplace(model, CATEGORICAL, structure, params="last-layer").fit((x, y))
    whole = la.predictive(x, link=link, samples=20_000, seed=3)
    formed: list[int] = []
    original = laplace_outputs.head_spreads

    def noting(covariance: Any, block: Tensor) -> Any:
        formed.append(len(block))
        return original(covariance, block)

    monkeypatch.setattr(laplace_outputs, "head_spreads", noting)
    monkeypatch.setattr(laplace_outputs, "KEPT", 0)
    monkeypatch.setattr(laplace_outputs, "FORMED", 30)
    lean = la.predictive(x, link=link, samples=20_000, seed=3)
    near(lean.probs, whole.probs, 1e-12 if link != "mc" else 0.03)
    assert formed == ([] if link == "probit" else [12])
    near(lean.covariance, whole.covariance, 1e-12)
    with pytest.raises(MemoryBudgetError, match="output covariance"):
        _ = la.predictive(x, link=link, memory=200).covariance


def test_a_thousand_classes_without_their_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means, variances and probabilities need nothing of C² numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1000))
    la = Laplace(model, CATEGORICAL, "kfac", params="last-layer").fit((torch.randn(20, 4), torch.arange(20)))
    monkeypatch.setattr(laplace_outputs, "spread_blocks", lambda *_: pytest.fail("covariances"))
    x = torch.randn(30, 4)
    near(la.predictive(x).probs.sum(1).double(), torch.ones(30).double(), 1e-5)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal"])
@pytest.mark.parametrize("widest", [3, 100])
def test_a_head_at_every_position(structure: str, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variances of classes at each of three tokens, from the features; also with a diagonal factor."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 6)).double()
    x, y = real(5, 3, 4, seed=1), torch.arange(15).view(5, 3) % 6
    la = Laplace(
        model, Categorical(axis=2), structure, params="last-layer", passes=Passes(widest=widest)
    ).fit((x, y))
    j = linnet.linearize(model, params="last-layer").jacobian(x).flatten(1, -2)
    expected = torch.einsum("ncp,pq,ncq->nc", j, la.covariance.dense(), j)
    near(la.predictive(x).variance, expected, 1e-9)
    monkeypatch.setattr(laplace_outputs, "KEPT", 0)
    monkeypatch.setattr(laplace_outputs, "variance_blocks", lambda *_: pytest.fail("derivatives"))
    prediction = la.predictive(x)
    near(prediction.variance, expected, 1e-9)
    near(prediction.mean, model(x).detach().flatten(1), 1e-12)


def test_many_outputs_of_the_whole_network_have_variances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where covariances do not fit, .variance and .probs do, and .covariance says so."""
    torch.manual_seed(0)
    c = 7000
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, c))
    x = torch.randn(2, 3)
    la = Laplace(model, CATEGORICAL, "diagonal", passes=Passes(memory="1GB")).fit((x, torch.arange(2)))
    prediction = la.predictive(x, memory="50MB")
    assert prediction.variance.shape == prediction.probs.shape == (2, c)
    few = [0, 5, c - 1]
    j = linnet.linearize(model, output=lambda out: out[:, few]).jacobian(x)
    expected = torch.einsum("ncp,p,ncp->nc", j, la.covariance.diagonal(), j)
    near(prediction.variance[:, few].double(), expected.double(), 1e-4)
    with pytest.raises(MemoryBudgetError, match="variance"):
        _ = la.predictive(x, memory="50MB").covariance
    with pytest.raises(MemoryBudgetError, match="output variances"):
        la.predictive(x, memory="50kB")


def gaussian(n: int = 40, c: int = 3, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Means and covariances of logits."""
    root = real(n, c, c, seed=5)
    return real(n, c, seed=6), size * (root @ root.mT + 0.1 * torch.eye(c).double()) / c


def monte_carlo(mean: Tensor, covariance: Tensor, draws: int = 20_000) -> Tensor:
    """Class probabilities by brute force."""
    root = torch.linalg.cholesky(covariance)
    z = real(draws, *mean.shape, seed=7)
    return (mean + torch.einsum("nij,snj->sni", root, z)).softmax(-1).mean(0)


@pytest.mark.parametrize(
    ("link", "size", "largest", "average"),
    [
        ("probit", 0.1, 0.02, 0.005),
        ("probit", 1.0, 0.1, 0.03),
        ("pairwise", 0.1, 0.02, 0.003),
        ("pairwise", 1.0, 0.07, 0.02),
        ("pairwise", 5.0, 0.12, 0.04),
        ("mc", 1.0, 0.03, 0.006),
        ("mc", 5.0, 0.03, 0.006),
    ],
)
@pytest.mark.thinned(4)
def test_class_probabilities_agree_with_monte_carlo(
    link: str, size: float, largest: float, average: float
) -> None:
    """How far each closed form is off, for covariances that are far from multiples of the identity."""
    mean, covariance = gaussian(size=size)
    truth = monte_carlo(mean, covariance)
    p = class_probabilities(CATEGORICAL, mean, covariance, (3,), Link(link, 2000, 0))
    near(p.sum(1), torch.ones(40).double(), 1e-9)
    assert float((p - truth).abs().max()) < largest
    assert float((p - truth).abs().mean()) < average


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_yes_or_no_by_quadrature(link: str) -> None:
    mean, variance = real(6, 2, seed=1), real(6, 2, seed=2).square()
    z = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    truth = ((mean[..., None] + variance.sqrt()[..., None] * z).sigmoid() * weight).sum(-1)
    p = class_probabilities(L.Bernoulli(), mean, variance, (2,), Link(link, 20_000, 0))
    assert float((p - truth).abs().max()) < 0.02
    with pytest.raises(InputError, match="bridge"):
        class_probabilities(L.Bernoulli(), mean, variance, (2,), Link("bridge"))


@pytest.mark.parametrize("link", ["probit", "pairwise", "mc"])
def test_certain_outputs_give_the_softmax(link: str) -> None:
    mean, _ = gaussian()
    p = class_probabilities(CATEGORICAL, mean, torch.zeros(40, 3, 3).double(), (3,), Link(link, 10))
    near(p, mean.softmax(1), 1e-10)


@pytest.mark.parametrize("classes_", [2, 3, 10])
def test_bridge_inverts_the_laplace_approximation_of_a_dirichlet(classes_: int) -> None:
    """From N(μ, Σ) of a Dirichlet in the basis of logits, any shift of the logits, back to its mean."""
    k, alpha = classes_, real(6, classes_, seed=2).abs() * 20 + 5
    mean = alpha.log() - alpha.log().mean(1, keepdim=True)
    inverse = 1 / alpha
    spread = torch.diag_embed(inverse) - (inverse[:, :, None] + inverse[:, None]) / k
    spread = spread + (inverse.sum(1) / k**2)[:, None, None]
    expected = alpha / alpha.sum(1, keepdim=True)
    for shift in (0.0, 0.7):  # an uncertain common shift of all logits changes no probability
        moved = spread + shift * torch.ones(k, k).double()
        p = class_probabilities(CATEGORICAL, mean + shift, moved, (k,), Link("bridge"))
        near(p, expected, 1e-8)
    flat = class_probabilities(CATEGORICAL, mean, 50 * spread / spread.max(), (k,), Link("bridge"))
    assert float(flat.max()) < float(expected.max())


def test_sampled_weights_are_equation_5_9() -> None:
    """The average of the softmax over networks with weights drawn from the posterior."""
    la, x, y = fitted("full", prior_precision=5.0)
    weights = la.sample(400, 0)
    function = la.curvature.function
    outputs = torch.stack([function.flat(function.space.to_params(w), x) for w in weights])
    prediction = la.predictive(x, "mc", samples=400, seed=0)
    assert isinstance(prediction, SampledPredictive)
    near(prediction.probs, prediction.sampled_probs.mean(0), 1e-12)
    long = la.predictive(x, "mc", samples=4000, seed=1)
    error = (outputs.softmax(-1).mean(0) - long.probs).abs() / outputs.softmax(-1).std(0) * 400**0.5
    assert float(error.max()) < 5
    density = torch.logsumexp(outputs.log_softmax(-1)[:, torch.arange(12), y], 0) - math.log(400)
    assert float((density - prediction.log_density(y)).abs().max()) < 0.2


def test_sampling_a_linear_network_meets_the_closed_form() -> None:
    """Where the network is linear, both predictions are the same Gaussian."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2).double(), real(10, 3), real(10, 2, seed=1)
    la = Laplace(model, L.Gaussian(variance=torch.tensor([0.3, 1.2])), "kfac").fit((x, y))
    drawn = 4000  # every bound but the last follows it
    closed, sampled = la.predictive(x, joint=True), la.predictive(x, "mc", samples=drawn, seed=0)
    spread = closed.variance
    assert ((sampled.mean - closed.mean).abs() < 5 * (spread / drawn).sqrt()).all()
    assert ((sampled.variance / spread - 1).abs() < 5 * (2 / drawn) ** 0.5).all()
    scale = (spread.flatten()[:, None] * spread.flatten()).sqrt().view(10, 2, 10, 2)
    assert ((sampled.joint_covariance - closed.joint_covariance).abs() < 8 * scale / drawn**0.5).all()
    near(
        sampled.with_noise().variance - sampled.variance,
        torch.tensor([[0.3, 1.2]]).double().expand(10, 2),
        1e-9,
    )
    difference = sampled.log_density(y) - closed.log_density(y)
    # the components of a target are independent given f, and f of two outputs are nearly so here
    assert float(difference.abs().mean()) < 0.1


def test_draws_have_the_moments_they_claim() -> None:
    la, x, _ = fitted("kfac", prior_precision=2.0)
    prediction = la.predictive(x[:4], joint=True)
    draws = prediction.sample(40_000, 0)
    joint = prediction.joint_covariance
    centered = draws - prediction.mean
    found = torch.einsum("snc,smd->ncmd", centered, centered) / 40_000
    deviation = prediction.variance.sqrt()
    scale = torch.einsum("nc,md->ncmd", deviation, deviation)
    assert float(((found - joint) / scale).abs().max()) < 0.04
    alone = la.predictive(x[:4]).sample(40_000, 0) - prediction.mean
    across = torch.einsum("snc,smd->ncmd", alone, alone) / 40_000 / scale
    assert float(across[0, :, 1].abs().max()) < 0.04
    assert torch.equal(la.predictive(x).sample(2, 3), la.predictive(x).sample(2, 3))
    mc = la.predictive(x, "mc", samples=5, seed=0)
    assert mc.sample(7, 0).shape == (7, 12, 3)
    with pytest.raises(InputError, match="n=0"):
        prediction.sample(0)
    with pytest.raises(InputError, match="samples"):
        la.predictive(x, "mc", samples=0)


def test_noise_is_added_once_in_every_form() -> None:
    model, x, y = numbers()
    la = Laplace(model, L.Gaussian(variance=torch.tensor([0.3, 1.2])), "kfac").fit((x, y))
    noise = torch.tensor([0.3, 1.2]).double()
    for joint in (False, True):
        plain = la.predictive(x, joint=joint)
        noisy = plain.with_noise()
        near(noisy.variance, plain.variance + noise, 1e-12)
        near(noisy.covariance, plain.covariance + torch.diag(noise), 1e-12)
        assert torch.equal(noisy.mean, plain.mean)
    gap = noisy.joint_covariance - plain.joint_covariance
    near(gap.reshape(24, 24), torch.diag(noise.repeat(12)), 1e-12)
    expected = torch.distributions.Normal(noisy.mean, noisy.variance.sqrt()).log_prob(y).sum(1)
    near(plain.log_density(y), expected, 1e-10)


def test_heteroscedastic_noise_is_the_expected_one() -> None:
    """Var[y] = E[σ²] + Var[μ] against draws of both outputs."""
    model, x, _ = numbers()
    y = real(12, 1, seed=2)
    la = Laplace(model, L.HeteroscedasticGaussian(psd="clip"), "full", 5.0).fit((x, y))
    prediction = la.predictive(x)
    draws = prediction.sample(200_000, 0)
    truth = draws[..., :1].var(0) + draws[..., 1:].exp().mean(0)
    near(prediction.with_noise().variance, truth, 0.05)
    near(prediction.with_noise().mean, prediction.mean[:, :1], 1e-12)
    density = prediction.log_density(y)
    direct = -0.5 * (
        (y - draws[..., :1]) ** 2 / draws[..., 1:].exp() + draws[..., 1:] + math.log(2 * math.pi)
    )
    assert float((density - torch.logsumexp(direct[..., 0], 0) + math.log(200_000)).abs().max()) < 0.2


# Gradients in x


@pytest.mark.parametrize("structure", ["kfac", "full", "diagonal", "low-rank", "ekfac"])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.thinned(6)
def test_gradient_of_mean_and_covariance_in_x(structure: str, joint: bool) -> None:
    la, *_ = fitted(structure, prior_precision=0.4)
    x = real(3, 3, seed=8).requires_grad_()
    weight = real(3, 3, 3, 3, seed=4) if joint else real(3, 3, 3, seed=4)

    def value(at: Tensor) -> Tensor:
        p = la.predictive(at, joint=joint)
        spread = p.joint_covariance if joint else p.covariance
        return (weight * spread).sum() + (p.mean * weight.flatten(1)[:, :3]).sum()

    assert torch.autograd.gradcheck(value, (x,), eps=1e-6, atol=1e-6, rtol=1e-5)
    near(la.predictive(x, joint=joint).covariance.detach(), la.predictive(x.detach()).covariance, 1e-10)


@pytest.mark.parametrize("name", ["resnet-batchnorm", "vit-mha", "lstm", "two-inputs"])
@pytest.mark.thinned(2)
def test_gradient_in_x_of_other_networks(name: str) -> None:
    """Along one direction, against finite differences."""
    case = zoo.case(name)
    data = (case.x1, case.f1) if isinstance(case.x1, tuple) else case.x1
    la = Laplace(case.model(), L.Gaussian(), "kfac", output=case.output).fit(data)
    single = not isinstance(case.x2, tuple)
    tensors = [case.x2] if single else list(case.x2)
    directions = [real(*t.shape, seed=i) for i, t in enumerate(tensors)]

    def variance(step: float) -> Tensor:
        moved = [t + step * d for t, d in zip(tensors, directions, strict=True)]
        return la.predictive(moved[0] if single else tuple(moved)).variance.sum()

    leaves = [t.clone().requires_grad_() for t in tensors]
    la.predictive(leaves[0] if single else tuple(leaves)).variance.sum().backward()
    slope = sum(float((leaf.grad * d).sum()) for leaf, d in zip(leaves, directions, strict=True))
    assert slope == pytest.approx(float(variance(1e-6) - variance(-1e-6)) / 2e-6, rel=1e-4, abs=1e-7)


def test_sampled_outputs_are_differentiable_in_x() -> None:
    la, *_ = fitted("kfac", prior_precision=3.0)
    x = real(2, 3, seed=8).requires_grad_()
    value = lambda at: la.predictive(at, "mc", samples=3, seed=0).variance.sum()  # noqa: E731
    assert torch.autograd.gradcheck(value, (x,), eps=1e-6, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        assert not la.predictive(x).variance.requires_grad
    assert not la.predictive(x.detach(), "mc", samples=2).outputs.requires_grad


def test_probabilities_are_differentiable_in_x() -> None:
    la, *_ = fitted("kfac", prior_precision=0.4)
    x = real(2, 3, seed=8).requires_grad_()
    value = lambda at: la.predictive(at).probs[:, 0].sum()  # noqa: E731
    assert torch.autograd.gradcheck(value, (x,), eps=1e-6, atol=1e-6, rtol=1e-5)


# Together with the rest


def test_evaluate_takes_predictions() -> None:
    la, x, y = fitted("kfac")
    report = linnet.evaluate(la.predictive, (x, y))
    p = la.predictive(x).probs
    assert report.nll == pytest.approx(float(-p[torch.arange(12), y].log().mean()), rel=1e-5)
    sampled = linnet.evaluate(lambda z: la.predictive(z, "mc", samples=5, seed=0).sampled_probs, (x, y))
    assert 0 <= sampled.accuracy <= 1
    model, x, t = numbers()
    regression = Laplace(model, L.Gaussian(variance=0.5), "kfac").fit((x, t))
    report = linnet.evaluate(regression.predictive, (x, t))
    expected = -float(regression.predictive(x).log_density(t).mean()) / 2
    assert report.nll == pytest.approx(expected, rel=1e-4) or report.nll == pytest.approx(
        2 * expected, rel=1e-4
    )


def test_targets_of_one_output_may_be_flat() -> None:
    """Targets (N,) of one output are those of (N, 1): they are not broadcast against all examples."""
    model, x, y = numbers(outputs=1)
    la = Laplace(model, L.Gaussian(variance=0.5), "kfac").fit((x, y[:, 0]))
    prediction = la.predictive(x)
    expected = torch.distributions.Normal(prediction.mean, (prediction.variance + 0.5).sqrt()).log_prob(y)
    near(prediction.log_density(y[:, 0]), expected[:, 0], 1e-10)
    for method in ("validation", "grid", "loo"):
        flat, column = (la.tune(method, (x, t)).tuned for t in (y[:, 0], y))
        assert flat is not None
        assert column is not None
        assert flat.value == pytest.approx(column.value, rel=1e-6), method


def test_density_of_missing_labels_is_one() -> None:
    mean, covariance = gaussian(4)
    masked = L.Gaussian(masked=True)
    y = mean.clone()
    y[0] = torch.nan
    density = log_density(masked, mean, covariance, y, (3,), Link())
    assert float(density[0]) == 0.0
    assert (density[1:] != 0).all()
    labels = torch.tensor([-100, 0, 1, 2])
    assert float(log_density(CATEGORICAL, mean, covariance, labels, (3,), Link())[0]) == 0.0


def test_uncertainty_grows_away_from_the_data() -> None:
    """What a posterior is for: more variance where there were no data."""
    x = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None]
    model = network(1, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(200):
        optimizer.zero_grad()
        ((model(x) - x**3) ** 2).mean().backward()
        optimizer.step()
    for structure in ("kfac", "diagonal", "full"):
        la = Laplace(model, L.Gaussian(variance=0.01), structure).fit((x, x**3)).tune("evidence", noise=False)
        far = la.predictive(torch.tensor([[4.0]]).double()).variance
        assert float(far) > 5 * float(la.predictive(x).variance.mean())


def test_repr_says_what_it_is() -> None:
    la, x, _ = fitted("kfac")
    prediction: Any = la.predictive(x)
    assert isinstance(prediction, GaussianPredictive)
    assert repr(prediction) == "GaussianPredictive(12 examples x 3 outputs)"
    assert repr(la.predictive(x, "mc", samples=2)) == "SampledPredictive(2 samples, 12 examples x 3 outputs)"


def test_laplace_process_and_fit_are_one_posterior() -> None:
    """Three ways to the same Gaussian, which share neither a factorization nor a pass over the data."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y, x_test = (torch.randn(n, d, dtype=torch.float64) for n, d in ((15, 3), (15, 2), (4, 3)))
    noise, prior = 0.4, 0.7
    likelihood = linnet.likelihoods.Gaussian(variance=noise)
    la = linnet.Laplace(net, likelihood, "full", prior).fit((x, y))
    expected = la.predictive(x_test, joint=True).joint_covariance
    system = linnet.fit(linnet.linearize(net), (x, y), solver="primal", ridge=noise * prior).system
    torch.testing.assert_close(system.covariance(x_test, joint=True) / prior, expected, rtol=0, atol=1e-11)
    for space in ("function", "parameter"):
        gp = linnet.TangentGP(net, likelihood, space, prior).fit(x, y)
        torch.testing.assert_close(
            gp.predictive(x_test, joint=True).joint_covariance, expected, rtol=0, atol=1e-11
        )
    # the evidence too, where θ* is the mode
    line, mode = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    nn.init.zeros_(line.weight), nn.init.zeros_(line.bias)
    process = linnet.TangentGP(line, likelihood, "parameter", prior).fit(x, y)
    mode.load_state_dict(process.delta)
    evidence = linnet.Laplace(mode, likelihood, "full", prior).fit((x, y)).log_evidence()
    assert float(evidence) == pytest.approx(process.log_evidence().mean, abs=1e-9)
