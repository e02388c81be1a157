"""The tangent kernel in GPyTorch, and the tangent Gaussian process in BoTorch; skipped without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import linnet
from linnet.errors import DependencyError, InputError
from linnet.integrations import botorch as botorch_adapter
from linnet.integrations import gpytorch as gpytorch_adapter
from linnet.likelihoods import Gaussian
from linnet.tangent_gp.tangent_gp import TangentGP
from tests.fitting.problems import real
from tests.integrations import botorch_stand_in
from tests.integrations.botorch_stand_in import INSTALLED, botorch_or_stand_in
from tests.tangent_gp.tangent_gp_cases import dense

needed = pytest.mark.skipif(not INSTALLED, reason="gpytorch and botorch are not installed")
# These packages' own warnings; ours stay errors.
quiet = pytest.mark.filterwarnings(
    "ignore:::(gpytorch|botorch|linear_operator|pyro)", "ignore::DeprecationWarning"
)


@pytest.fixture
def botorch() -> Iterator[None]:
    """BoTorch, or its stand-in."""
    with botorch_or_stand_in():
        yield


@pytest.mark.skipif(INSTALLED, reason="gpytorch and botorch are installed")
def test_without_the_packages_the_error_says_how_to_get_them() -> None:
    with pytest.raises(DependencyError, match="gpytorch"):
        _ = gpytorch_adapter.TangentKernel
    with pytest.raises(DependencyError, match="botorch"):
        _ = botorch_adapter.TangentModel


def test_other_names_are_not_there() -> None:
    for module in (gpytorch_adapter, botorch_adapter):
        with pytest.raises(AttributeError, match="nothing"):
            _ = module.nothing


@needed
@quiet
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_kernel_is_the_tangent_kernel(outputs: int) -> None:
    oracle = dense(outputs=outputs)
    kernel = gpytorch_adapter.TangentKernel(oracle.model)
    x, other = oracle.x, oracle.x_test
    expected = linnet.linearize(oracle.model).kernel(x, other).reshape(9 * outputs, 4 * outputs)
    assert torch.allclose(kernel(x, other).to_dense(), expected)
    own = linnet.linearize(oracle.model).kernel(x).reshape(9 * outputs, -1)
    assert torch.allclose(kernel(x).to_dense(), own)
    assert torch.allclose(kernel(x, diag=True), own.diagonal())
    batched = kernel(x.view(3, 3, 3), other[:2]).to_dense()
    assert batched.shape == (3, 3 * outputs, 2 * outputs)
    assert torch.allclose(batched[1], kernel(x[3:6], other[:2]).to_dense())


@needed
@quiet
def test_gpytorchs_exact_process_is_ours() -> None:
    import gpytorch

    oracle = dense(outputs=1, n=15)

    class Network(gpytorch.means.Mean):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            return oracle.model(x).detach()[..., 0]

    class Exact(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self, likelihood: Any) -> None:
            super().__init__(oracle.x, oracle.y[:, 0], likelihood)
            self.mean_module = Network()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch_adapter.TangentKernel(oracle.model))

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.kernel(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Exact(likelihood).double()
    likelihood.noise, model.kernel.outputscale = 0.2, 1 / 0.7
    model.eval()
    likelihood.eval()
    with torch.no_grad():
        found = model(oracle.x_test)
    ours = TangentGP(oracle.model, Gaussian(variance=0.2), prior_precision=0.7).fit(oracle.x, oracle.y)
    prediction = ours.predictive(oracle.x_test, joint=True)
    assert torch.allclose(found.mean, prediction.mean[:, 0], rtol=1e-6)
    assert torch.allclose(found.covariance_matrix, prediction.joint_covariance[:, 0, :, 0], atol=1e-6)


@quiet
@pytest.mark.usefixtures("botorch")
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_botorch_model_gives_our_posterior(outputs: int) -> None:
    oracle = dense(outputs=outputs)
    gp = TangentGP(oracle.model, Gaussian(variance=0.2)).fit(oracle.x, oracle.y)
    model = botorch_adapter.TangentModel(gp)
    assert model.num_outputs == outputs
    sets = torch.stack([oracle.x_test[:2], oracle.x_test[2:]])
    for noisy in (False, True):
        posterior = model.posterior(sets, observation_noise=noisy)
        assert posterior.mean.shape == (2, 2, outputs)
        for i in range(2):
            expected = gp.predictive(sets[i], joint=True)
            expected = expected.with_noise() if noisy else expected
            assert torch.allclose(posterior.mean[i], expected.mean)
            assert torch.allclose(posterior.variance[i], expected.variance)
            dense_covariance = posterior.distribution.covariance_matrix[i]
            assert torch.allclose(dense_covariance, expected.joint_covariance.reshape(2 * outputs, -1))
    last = model.posterior(sets, output_indices=[outputs - 1])
    assert torch.allclose(last.mean[..., 0], model.posterior(sets).mean[..., -1])
    more = model.condition_on_observations(real(3, 3, seed=5), real(3, outputs, seed=6))
    assert more.gp.summary()["examples"] == 12
    with pytest.raises(InputError, match="gp is Linear"):
        botorch_adapter.TangentModel(torch.nn.Linear(1, 1))


@quiet
@pytest.mark.usefixtures("botorch")
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("noisy", [False, True])
def test_single_points_take_one_call_and_say_what_sets_say(outputs: int, noisy: bool) -> None:
    oracle = dense(outputs=outputs)
    calls: list[int] = []

    class Counted(TangentGP):
        """Counts its predictions."""

        def predictive(self, x: Any, joint: bool = False) -> Any:
            calls.append(len(x))
            return super().predictive(x, joint)

    model = botorch_adapter.TangentModel(
        Counted(oracle.model, Gaussian(variance=0.2)).fit(oracle.x, oracle.y)
    )
    points = oracle.x_test[:, None].clone().requires_grad_()
    pairs = torch.cat([points, points.detach().roll(1, 0)], 1)  # each with another: set by set
    alone, pair = (model.posterior(x, observation_noise=noisy) for x in (points, pairs))
    assert calls == [4, 2, 2, 2, 2]
    assert torch.allclose(alone.mean, pair.mean[:, :1])
    assert torch.allclose(alone.variance, pair.variance[:, :1])
    single = alone.distribution.covariance_matrix
    assert torch.allclose(single, pair.distribution.covariance_matrix[:, :outputs, :outputs])
    slopes = [
        torch.autograd.grad((p.mean + p.variance.sqrt())[:, 0].sum(), points, retain_graph=True)[0]
        for p in (alone, pair)
    ]
    assert slopes[0].abs().min() > 0
    assert torch.allclose(*slopes)


@needed
@quiet
def test_the_stand_in_is_botorchs_expected_improvement() -> None:
    from botorch.acquisition import LogExpectedImprovement

    oracle = dense(outputs=1)
    gp = TangentGP(oracle.model, Gaussian(variance=0.2)).fit(oracle.x, oracle.y)
    model, points = botorch_adapter.TangentModel(gp), oracle.x_test[:, None]
    for maximize in (False, True):
        for best in (-0.3, 0.2):
            theirs = LogExpectedImprovement(model, best, maximize=maximize)(points)
            ours = botorch_stand_in.LogExpectedImprovement(model, best, maximize)(points)
            assert torch.allclose(ours, theirs, rtol=1e-6)


def tangent_model(oracle: Any, variance: float) -> Any:
    """BoTorch's model of the process of a small problem."""
    gp = TangentGP(oracle.model, Gaussian(variance=variance)).fit(oracle.x, oracle.y)
    return botorch_adapter.TangentModel(gp)


@needed
@quiet
def test_an_acquisition_function_is_optimized() -> None:
    from botorch.acquisition import UpperConfidenceBound
    from botorch.optim import optimize_acqf

    oracle = dense(outputs=1, n=12)
    model = tangent_model(oracle, 0.05)
    bound = UpperConfidenceBound(model, beta=1.0)
    bounds = torch.tensor([[-1.0] * 3, [1.0] * 3], dtype=torch.float64)
    at, value = optimize_acqf(bound, bounds, q=1, num_restarts=2, raw_samples=8, options={"maxiter": 20})
    some = torch.rand(50, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    assert at.shape == (1, 3)
    assert float(value) >= float(bound(some).detach().max()) - 1e-3


@needed
@quiet
def test_what_a_model_cannot_be_asked_is_refused_in_words() -> None:
    oracle = dense(outputs=2)
    model = tangent_model(oracle, 0.2)
    x, noise = oracle.x_test, torch.rand(4, 2).double()
    plain, noisy = (model.posterior(x, [1], observation_noise=given).variance for given in (False, noise))
    assert torch.allclose(noisy, plain + noise[:, 1:])
    scalar = model.posterior(x, observation_noise=torch.tensor(0.3)).variance
    assert torch.allclose(scalar, model.posterior(x).variance + 0.3)
    with pytest.raises(InputError, match="noise= of observations"):
        model.condition_on_observations(x, torch.zeros(4, 2).double(), noise=noise)
    with pytest.raises(InputError, match=r"X has shape \(2, 2, 3\)"):
        model.condition_on_observations(x.view(2, 2, 3), torch.zeros(2, 2, 2).double())
    with pytest.raises(InputError, match="fantasies"):
        model.fantasize(x)


@needed
@quiet
def test_points_that_are_equal_or_more_than_the_kernel_has_rank_have_a_posterior() -> None:
    oracle = dense(outputs=1)
    model = tangent_model(oracle, 0.2)
    same = torch.stack([oracle.x_test[0]] * 2)
    many = torch.randn(90, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for points in (same, many):
        assert bool(model.posterior(points).rsample(torch.Size([3])).isfinite().all())
