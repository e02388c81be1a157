"""Arguments that cannot be used, or would be used without effect: an error names them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import linnet
from linnet.errors import InputError
from linnet.laplace.laplace import Laplace
from tests.fitting.problems import near
from tests.laplace.laplace_problems import CATEGORICAL, classes, fitted, numbers

L = linnet.likelihoods


def test_a_prior_mean_is_taken_in_full_precision() -> None:
    model, x, y = classes()
    la = Laplace(model, CATEGORICAL, prior_mean=0.3).fit((x, y))
    assert set(la.prior_moments[1].tolist()) == {0.3}


def test_named_precisions_keep_their_gradients() -> None:
    la, _, _ = fitted("diagonal")
    names = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(2)]
    la.log_evidence(dict(zip(("0", "2"), names, strict=True))).backward()
    both = torch.ones(2, dtype=torch.float64, requires_grad=True)
    la.log_evidence(both).backward()
    near(torch.stack([t.grad for t in names if t.grad is not None]), both.grad, 1e-12)


def test_leave_one_out_follows_the_scale_of_the_data() -> None:
    la, x, y = fitted("kfac")
    by_default = la.tune("loo", (x, y), data_scale=True, steps=20).data_scale
    again, _, _ = fitted("kfac")
    assert (
        by_default == again.tune("loo", (x, y), data_scale=True, search="gradient", steps=20).data_scale != 1
    )


def test_one_sample_has_no_variance() -> None:
    model, x, t = numbers()
    la = Laplace(model, L.Gaussian(variance=0.5)).fit((x, t))
    one = la.predictive(x, "mc", samples=1, seed=0)
    torch.testing.assert_close(one.mean, one.outputs[0])
    for ask in ("variance", "covariance", "joint_covariance"):
        with pytest.raises(InputError, match="variance"):
            getattr(one, ask)
    with pytest.raises(InputError, match="variance"):
        one.with_noise()


def test_a_linearization_that_was_trained_is_refused() -> None:
    """Its curvature and outputs would be those of δ = 0, not those that it predicts with."""
    model, x, y = classes()
    lin = linnet.linearize(model)
    near(Laplace(lin, CATEGORICAL).fit((x, y)).predictive(x).mean, lin(x), 1e-12)
    with torch.no_grad():
        lin.delta["0.weight"].add_(0.1)
    with pytest.raises(InputError, match="Linearized"):
        Laplace(lin, CATEGORICAL).fit((x, y))
    lin.relinearize()
    near(Laplace(lin, CATEGORICAL).fit((x, y)).predictive(x).mean, lin(x), 1e-12)


@pytest.mark.parametrize("structure", ["kfac", "last-layer", "diagonal"])
def test_networks_of_half_a_type_have_distributions(structure: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(torch.bfloat16)
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    posterior = linnet.Laplace(net, linnet.likelihoods.Categorical(), structure=structure).fit((x, y))
    found = posterior.predictive(x[:4])
    assert found.probs.shape == (4, 3)
    assert found.mean.dtype == found.covariance.dtype
