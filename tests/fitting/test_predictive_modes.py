"""Posteriors in whatever state of torch the caller is: autocast, inference mode, without gradients."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.laplace.laplace import Laplace
from linnet.laplace.training import train_with_evidence
from linnet.metrics.adversarial import fgsm
from linnet.posterior import linear_posterior
from linnet.tangent_gp.tangent_gp import TangentGP
from tests.fitting.problems import near

L = linnet.likelihoods
Numbers = list[Tensor]
STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
}


def problem() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A network in float32, which autocast would compute in bfloat16, with classes and numbers as targets."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(20, 3)
    return net, x, torch.arange(20) % 3, torch.randn(20, 3)


def of_laplace(**options: Any) -> Numbers:
    """Numbers of a posterior over weights."""
    net, x, y, _ = problem()
    la = Laplace(net, L.Categorical(), **options).fit((x, y)).tune("evidence")
    p, q = la.predictive(x), la.predictive(x, "mc", samples=4, seed=0)
    joint = la.predictive(x[:4], joint=True)
    found = [
        p.covariance,
        p.probs,
        p.sample(3, 0),
        p.log_density(y),
        joint.joint_covariance,
        joint.sample(2, 0),
    ]
    found += [la.predictive(x, link=link, seed=0).probs for link in ("pairwise", "bridge", "mc")]
    return [*found, q.covariance, q.probs, q.log_density(y), la.sample(2, 0), la.covariance.dense()]


def of_process(**options: Any) -> Numbers:
    """Numbers of a tangent process."""
    net, x, _, t = problem()
    gp = TangentGP(net, L.Gaussian(variance=0.5), **options).fit(x[:12], t[:12]).update(x[12:], t[12:])
    p, joint = gp.predictive(x), gp.adapt(x, -t).predictive(x[:4], joint=True)
    evidence = torch.tensor(gp.log_evidence().mean)
    found = [p.mean, p.covariance, p.with_noise().variance, p.log_density(t), p.sample(2, 0), evidence]
    return [*found, joint.joint_covariance, joint.sample(2, 0), *gp.tune().delta.values()]


def of_linear(method: str) -> Numbers:
    """Numbers of a linear posterior."""
    net, x, y, _ = problem()
    how = linnet.SVI(training=linnet.Training(epochs=10)) if method == "svi" else method
    posterior = linear_posterior(linnet.linearize(net), (x, y), L.Categorical(), how)
    p = posterior.predictive(x)
    drawn = [] if method == "map" else [posterior.sample(2, 0)]
    return [p.mean, p.probs, p.log_density(y), *drawn]


MAKERS: dict[str, Callable[[], Numbers]] = {
    "kfac": of_laplace,
    "full": lambda: of_laplace(structure="full"),
    "last layer": lambda: of_laplace(structure="last-layer"),
    "function": lambda: of_process(space="function"),
    "parameter": lambda: of_process(space="parameter"),
    "function by cg": lambda: of_process(space="function", solver="cg"),
    "parameter by cg": lambda: of_process(space="parameter", solver="cg"),
    "exact variances": lambda: of_process(space="parameter", solver="cg", variance="exact"),
    "map": lambda: of_linear("map"),
    "svi": lambda: of_linear("svi"),
    "laplace": lambda: of_linear("laplace"),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.thinned(12)
def test_numbers_do_not_depend_on_the_callers_state(maker: str, state: str) -> None:
    make = MAKERS[maker]
    plain = make()
    with STATES[state]():
        found = make()
    for one, other in zip(found, plain, strict=True):
        assert one.dtype == other.dtype
        near(one, other, 1e-12)


def test_what_was_made_in_inference_mode_is_used_outside(tmp_path: Path) -> None:
    net, x, y, t = problem()
    with torch.inference_mode():
        la = Laplace(net, L.Categorical()).fit((x.clone(), y)).tune()
        gp = TangentGP(net, L.Gaussian(variance=0.5)).fit(x.clone(), t.clone())
        lin = linnet.linearize(net)
        loaded = linnet.load(la.save(tmp_path / "la"), net), linnet.load(gp.save(tmp_path / "gp"), net)
    for one in (la, loaded[0]):
        one.tune("validation", (x, y)).fit((x, y), add=True)
    for process in (gp, loaded[1]):
        process.tune()
    point = x.clone().requires_grad_()
    found = [
        la.predictive(point),
        loaded[0].predictive(point),
        gp.predictive(point),
        loaded[1].predictive(point),
    ]
    (gradient,) = torch.autograd.grad(sum(p.variance.sum() for p in found), point)
    assert bool(gradient.isfinite().all())
    assert linear_posterior(lin, (x, y), L.Categorical()).predictive(x).mean.shape == (20, 3)


@pytest.mark.parametrize("state", ["inference", "no gradients"])
def test_training_has_gradients_of_its_own(state: str) -> None:
    net, x, y, _ = problem()

    def everything(own: nn.Module) -> Numbers:
        short = linnet.Training(epochs=2)
        factorized = linear_posterior(
            linnet.linearize(net), (x, y), L.Categorical(), linnet.SVI(training=short)
        )
        train_with_evidence(own, (x, y), L.Categorical(), 2, lambda p: torch.optim.Adam(p, 0.01))
        attack = fgsm(lambda z: net(z).softmax(1), (x, y), step=0.1)
        assert attack.inputs is not None
        return [factorized.mean, attack.inputs, *own.parameters()]

    first, second = problem()[0], problem()[0]
    plain = everything(first)
    with STATES[state]():
        found = everything(second)
    for one, other in zip(found, plain, strict=True):
        near(one, other, 1e-12)


def test_predictions_of_a_process_can_be_pickled() -> None:
    net, x, _, t = problem()
    prediction = TangentGP(net, L.Gaussian(variance=0.5)).fit(x, t).predictive(x[:3], joint=True)
    again = pickle.loads(pickle.dumps(prediction))
    torch.testing.assert_close(again.joint_covariance, prediction.joint_covariance)
    torch.testing.assert_close(again.with_noise().variance, prediction.with_noise().variance)
