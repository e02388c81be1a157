"""Label errors and influence of every kind of fit, against fits without the example."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from linnet.audit import influence, mislabeled
from linnet.fitting.softmax_fit import SoftmaxFit

N, T = 24, 4


def problem(classes: int) -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1 if classes == 2 else classes)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    x = torch.randn(N + T, 2, generator=generator, dtype=torch.float64)
    y = (
        (x[:, 0] > 0).long()
        if classes == 2
        else torch.bucketize(x[:, 0].contiguous(), torch.tensor([-0.5, 0.5]).double())
    )
    y[5] = (y[5] + 1) % classes  # wrong
    return net, x[:N], y[:N], x[N:], y[N:]


def fitted(kind: str) -> tuple[Any, Tensor, Tensor, Tensor, Tensor]:
    net, x, y, new, answers = problem(2 if kind == "binary" else 3)
    if kind == "adapt":
        fit: Any = linnet.adapt(net, (x, y), ridge=0.3)
    elif kind == "shared":
        fit = linnet.fit(linnet.linearize(net), (x, y), solver=linnet.fitting.Shared(2), ridge=0.3)
    elif kind == "squared":
        fit = linnet.fit(linnet.linearize(net), (x, y), ridge=0.3)
    else:
        fit = linnet.fit(linnet.linearize(net), (x, y), "cross-entropy", ridge=3.0)
    return fit, x, y, new, answers


def losses(fit: Any, outputs: Tensor, y: Tensor) -> Tensor:
    """The loss of each example, by torch."""
    if isinstance(fit, SoftmaxFit):
        if outputs.shape[1] == 1:
            return F.binary_cross_entropy_with_logits(outputs[:, 0], y.double(), reduction="none")
        return F.cross_entropy(outputs, y, reduction="none")
    scale = float(fit.targets.max())
    targets = scale * F.one_hot(y, outputs.shape[1]).double()
    if float(fit.targets.min()) < 0:
        targets = fit.targets[[int((fit.labels == k).nonzero()[0]) for k in y]]
    return 0.5 * (targets - outputs).square().sum(1)


@pytest.mark.parametrize("kind", ["adapt", "squared", "shared", "softmax", "binary"])
def test_influence_is_what_the_fit_without_the_example_says(kind: str) -> None:
    fit, _, _, new, answers = fitted(kind)
    found = influence(fit, new, labels=answers)
    assert found.method == "exact"
    assert found.residual < 1e-6
    tolerance = 0.3 if kind in ("softmax", "binary") else 1e-7  # one Newton step, or exact
    for i in (0, 5, 11):
        without = fit.forget([i])
        change = fit.predict(new) - without.predict(new)
        assert float((found.outputs[i] - change).norm()) <= tolerance * float(change.norm()) + 1e-9
        moved = fit.predict(new) - found.outputs[i].to(new)
        loss = losses(fit, fit.predict(new), answers) - losses(fit, moved, answers)
        assert found.loss is not None
        assert torch.allclose(found.loss[i].to(loss), loss, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["adapt", "squared", "shared", "softmax", "binary"])
@pytest.mark.thinned(2)
def test_the_wrong_label_leads_the_ranking(kind: str) -> None:
    fit, x, y, _, _ = fitted(kind)
    for score in ("auto", "margin", "residual"):
        found = mislabeled(fit, score=score)
        assert int(found.order[0]) == 5, score
        assert torch.equal(found.labels, y)
    assert found.predicted is not None
    assert int(found.predicted[5]) != int(y[5])
    i = int(found.self_influence.argmax())
    own = fit.predict(x[i : i + 1])
    without = fit.loo()[i] if isinstance(fit, SoftmaxFit) else fit.forget([i]).predict(x[i : i + 1])
    assert float(found.self_influence[i]) == pytest.approx(float((own - without).norm()), rel=1e-6)
    assert found.indices is not None


@pytest.mark.parametrize("kind", ["adapt", "squared", "shared"])
def test_joint_covariances_have_those_of_each_example_on_their_diagonal(kind: str) -> None:
    fit, x, _, new, _ = fitted(kind)
    apart, together = fit.predictive(new), fit.predictive(new, joint=True)
    assert torch.allclose(together.covariance, apart.covariance)
    torch.testing.assert_close(together.mean, apart.mean)
    whole = together.joint_covariance.reshape(3 * T, 3 * T)
    assert torch.allclose(whole, whole.T)
    assert float(torch.linalg.eigvalsh(whole).min()) > -1e-10
    # Gaussian conditioning: telling it one more example explains the others as the joint covariance says
    more = fit.update((new[:1], torch.tensor([1])))
    between = together.joint_covariance / fit.noise
    noisy = between[0, :, 0] + torch.eye(3).double()
    left = between[1, :, 1] - between[1, :, 0] @ torch.linalg.solve(noisy, between[0, :, 1])
    assert torch.allclose(more.predictive(new[1:2]).covariance[0] / more.noise, left, atol=1e-8)
    assert x.shape[1] == 2


@pytest.mark.parametrize("kind", ["adapt", "squared", "shared", "softmax"])
def test_a_model_is_scored_without_a_lambda(kind: str) -> None:
    fit, x, y, _, _ = fitted(kind)

    def probs(x: Tensor) -> Tensor:
        return fit.predictive(x).probs  # type: ignore[no-any-return]

    assert str(linnet.evaluate(fit, (x, y))) == str(linnet.evaluate(probs, (x, y)))
    assert linnet.ood(fit, x, 3 * x).auroc == linnet.ood(probs, x, 3 * x).auroc


def test_a_process_tells_that_it_is_not_fitted_and_is_scored_when_it_is() -> None:
    net, x, y, _, _ = problem(3)
    gp = linnet.TangentGP(net, linnet.likelihoods.Gaussian(variance=0.1))
    assert "not fitted" in repr(gp)
    assert "not fitted" in gp._repr_html_()
    t = torch.nn.functional.one_hot(y, 3).double()
    assert linnet.evaluate(gp.fit(x, t), (x, t)).rmse >= 0  # type: ignore[union-attr]


def test_weights_that_require_no_gradient_are_told() -> None:
    net, x, y, _, _ = problem(3)
    frozen = linnet.with_head(net.requires_grad_(False), 3, init="random")
    fit = linnet.fit(linnet.linearize(frozen), (x, y))
    assert any("require no gradient" in text for text in fit.summary()["warnings"])
    every = linnet.fit(linnet.linearize(frozen, params="all"), (x, y))
    assert not any("require no gradient" in text for text in every.summary()["warnings"])
    free = linnet.adapt(copy.deepcopy(frozen).requires_grad_(True), (x, y), weight=0.5)
    own = linnet.adapt(frozen, (x, y), weight=0.5)  # which trains no layer
    torch.testing.assert_close(own.predict(x), free.predict(x))
