"""Arguments that cannot be used, or would be used without effect: an error names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import linnet
from linnet.errors import InputError
from linnet.laplace.laplace import Laplace
from tests.fitting.problems import near
from tests.laplace.laplace_problems import CATEGORICAL, classes, fitted, numbers

L = linnet.likelihoods


@pytest.mark.parametrize(
    ("mean", "match"),
    [
        ("zero", "prior_mean='zero'"),
        (None, "prior_mean=None"),
        (float("nan"), "prior_mean=nan"),
        (torch.zeros(3), r"prior_mean has shape \(3,\)"),
        (torch.zeros(1, 1), r"prior_mean has shape \(1, 1\)"),
    ],
)
def test_prior_means_that_are_none(mean: Any, match: str) -> None:
    model, x, y = classes()
    with pytest.raises(InputError, match=match):
        Laplace(model, CATEGORICAL, prior_mean=mean).fit((x, y))


def test_a_prior_mean_is_taken_in_full_precision() -> None:
    model, x, y = classes()
    la = Laplace(model, CATEGORICAL, prior_mean=0.3).fit((x, y))
    assert set(la.prior_moments[1].tolist()) == {0.3}


@pytest.mark.parametrize(
    ("prior", "match"),
    [
        ({"0": torch.ones(2), "2": 1.0}, r"prior_precision\['0'\] has shape \(2,\)"),
        ({"0.weight": torch.ones(7), "0.bias": 1.0, "2.weight": 1.0, "2.bias": 1.0}, r"shape \(7,\)"),
        (torch.tensor(True), "prior_precision is"),
        (torch.tensor(1 + 2j), "prior_precision is"),
    ],
)
def test_prior_precisions_of_other_shapes(prior: Any, match: str) -> None:
    model, x, y = classes()
    with pytest.raises(InputError, match=match):
        Laplace(model, CATEGORICAL, "diagonal", prior).fit((x, y))


def test_named_precisions_keep_their_gradients() -> None:
    la, _, _ = fitted("diagonal")
    names = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(2)]
    la.log_evidence(dict(zip(("0", "2"), names, strict=True))).backward()
    both = torch.ones(2, dtype=torch.float64, requires_grad=True)
    la.log_evidence(both).backward()
    near(torch.stack([t.grad for t in names if t.grad is not None]), both.grad, 1e-12)


def test_tune_names_what_would_have_no_effect() -> None:
    la, x, y = fitted("kfac")
    with pytest.raises(InputError, match="data_scale=True in a grid"):
        la.tune("grid", (x, y), data_scale=True)
    model, x, t = numbers()
    regression = Laplace(model, L.Gaussian(variance=0.5), "full").fit((x, t))
    for method in ("grid", "loo"):
        with pytest.raises(InputError, match="noise=True in a grid"):
            regression.tune(method, (x, t), noise=True)
    with pytest.raises(InputError, match="noise_variance="):
        regression.log_evidence(noise_variance=[0.5, 1.0])


def test_leave_one_out_follows_the_scale_of_the_data() -> None:
    la, x, y = fitted("kfac")
    by_default = la.tune("loo", (x, y), data_scale=True, steps=20).data_scale
    again, _, _ = fitted("kfac")
    assert (
        by_default == again.tune("loo", (x, y), data_scale=True, search="gradient", steps=20).data_scale != 1
    )


def test_labels_that_are_no_tensor() -> None:
    la, x, y = fitted("kfac")
    for prediction in (la.predictive(x), la.predictive(x, "mc", samples=2, seed=0)):
        for labels in (None, y.numpy()):
            with pytest.raises(InputError, match=r"y(=None| is )"):
                prediction.log_density(labels)


def test_one_sample_has_no_variance() -> None:
    model, x, t = numbers()
    la = Laplace(model, L.Gaussian(variance=0.5)).fit((x, t))
    one = la.predictive(x, "mc", samples=1, seed=0)
    torch.testing.assert_close(one.mean, one.outputs[0])
    for ask in ("variance", "covariance", "joint_covariance"):
        with pytest.raises(InputError, match="the variance of one sample"):
            getattr(one, ask)
    with pytest.raises(InputError, match="the variance of one sample"):
        one.with_noise()


def test_a_linearization_that_was_trained_is_refused() -> None:
    """Its curvature and outputs would be those of δ = 0, not those that it predicts with."""
    model, x, y = classes()
    lin = linnet.linearize(model)
    near(Laplace(lin, CATEGORICAL).fit((x, y)).predictive(x).mean, lin(x), 1e-12)
    with torch.no_grad():
        lin.delta["0.weight"].add_(0.1)
    with pytest.raises(InputError, match="Linearized that has been trained"):
        Laplace(lin, CATEGORICAL).fit((x, y))
    lin.relinearize()
    near(Laplace(lin, CATEGORICAL).fit((x, y)).predictive(x).mean, lin(x), 1e-12)
