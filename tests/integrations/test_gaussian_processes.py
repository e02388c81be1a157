"""The tangent kernel in GPyTorch, and the tangent Gaussian process in BoTorch; skipped without them."""

from __future__ import annotations

import importlib.util
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
from tests.tangent_gp.tangent_gp_cases import dense

HAS = all(importlib.util.find_spec(name) for name in ("gpytorch", "botorch"))
needed = pytest.mark.skipif(not HAS, reason="gpytorch and botorch are not installed")
# These packages' own warnings; ours stay errors.
quiet = pytest.mark.filterwarnings(
    "ignore:::(gpytorch|botorch|linear_operator|pyro)", "ignore::DeprecationWarning"
)


@pytest.mark.skipif(HAS, reason="gpytorch and botorch are installed")
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


@needed
@quiet
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


@needed
@quiet
def test_an_acquisition_function_is_optimized() -> None:
    from botorch.acquisition import UpperConfidenceBound
    from botorch.optim import optimize_acqf

    oracle = dense(outputs=1, n=12)
    model = botorch_adapter.TangentModel(
        TangentGP(oracle.model, Gaussian(variance=0.05)).fit(oracle.x, oracle.y)
    )
    bound = UpperConfidenceBound(model, beta=1.0)
    bounds = torch.tensor([[-1.0] * 3, [1.0] * 3], dtype=torch.float64)
    at, value = optimize_acqf(bound, bounds, q=1, num_restarts=2, raw_samples=8, options={"maxiter": 20})
    some = torch.rand(50, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    assert at.shape == (1, 3)
    assert float(value) >= float(bound(some).detach().max()) - 1e-3
