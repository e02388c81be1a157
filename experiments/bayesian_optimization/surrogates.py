"""What a search may know before and learn during a task: surrogates with and without earlier tasks.

Every surrogate is a BoTorch model of the cost after some evaluations; those with earlier tasks see costs in
units of the earlier tasks' mean and deviation. A small network has learned two thirds of the earlier tasks, a
head each; the mean of the heads is the network of a new task. The rest of the earlier tasks, which it was not
trained on, give the hyper-parameters of the processes around it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from linnet.likelihoods import Gaussian

WIDTH, STEPS, HELD_OUT = 32, 1500, 4
PRECISIONS = [10.0 ** (k / 2) for k in range(-4, 9)]
NOISES = [10.0 ** (k / 2) for k in range(-8, 0)]
Surrogate = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Earlier:
    """Costs that earlier tasks left behind.

    Args:
        x: (T, n, d) points in the unit cube.
        y: (T, n, 1) costs.
        center: Their mean.
        spread: Their standard deviation.
    """

    x: Tensor
    y: Tensor
    center: float
    spread: float

    @classmethod
    def drawn(cls, points: Tensor, costs: Tensor, count: int, seed: int) -> Earlier:
        """A few random evaluations of each task.

        Args:
            points: (M, d) candidates.
            costs: (T, M) of all tasks.
            count: n.
            seed: Seed.
        """
        source = torch.Generator().manual_seed(seed)
        index = torch.stack([torch.randperm(len(points), generator=source)[:count] for _ in costs])
        y = costs.gather(1, index)[..., None]
        return cls(points[index], y, float(y.mean()), float(y.std()))

    def scaled(self, y: Tensor) -> Tensor:
        """Costs in the unit of the earlier ones."""
        return (y - self.center) / self.spread


class Heads(nn.Module):
    """A network with an output for each task.

    Args:
        tasks: T.
        dimensions: d.
    """

    def __init__(self, tasks: int, dimensions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(dimensions, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        ).double()
        self.heads = nn.Linear(WIDTH, tasks).double()

    def forward(self, x: Tensor) -> Tensor:
        """The outputs (T, n, 1) at the points (T, n, d) of every task."""
        features = self.body(2 * x - 1)
        return (features * self.heads.weight[:, None]).sum(-1, keepdim=True) + self.heads.bias[:, None, None]

    def merged(self) -> nn.Sequential:
        """The network of a new task, from the unit cube: its head is the mean of all heads."""
        first = nn.Linear(self.body[0].in_features, WIDTH).double()
        last = nn.Linear(WIDTH, 1).double()
        with torch.no_grad():  # the map to [−1, 1] goes into the first layer
            first.weight.copy_(2 * self.body[0].weight)
            first.bias.copy_(self.body[0].bias - self.body[0].weight.sum(1))
            last.weight.copy_(self.heads.weight.mean(0, keepdim=True))
            last.bias.copy_(self.heads.bias.mean(0, keepdim=True))
        return nn.Sequential(first, *self.body[1:], last).eval()


def trained(earlier: Earlier, seed: int, decay: float = 1e-4) -> nn.Sequential:
    """The network that has learned all but the last ``HELD_OUT`` tasks.

    Args:
        earlier: The tasks.
        seed: Of its initialization.
        decay: Weight decay.
    """
    torch.manual_seed(seed)
    x, y = earlier.x[:-HELD_OUT], earlier.scaled(earlier.y[:-HELD_OUT])
    network = Heads(len(x), x.shape[-1])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (network(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.merged()


def tangent_process(network: nn.Module, earlier: Earlier, params: Any = None) -> linnet.TangentGP:
    """The tangent process whose prior and noise have the highest evidence on the held-out tasks.

    Args:
        network: What ``trained`` returned.
        earlier: The tasks.
        params: Which weights vary; all by default.
    """
    gp = linnet.TangentGP(network, Gaussian(variance=1.0), params=params)
    held_out = zip(earlier.x[-HELD_OUT:], earlier.scaled(earlier.y[-HELD_OUT:]), strict=True)
    fitted = [gp.adapt(x, y) for x, y in held_out]

    def evidence(precision: float, noise: float) -> float:
        return sum(one.log_evidence(precision, noise).mean for one in fitted)

    grid = [(precision, noise) for precision in PRECISIONS for noise in NOISES]
    precision, noise = max(grid, key=lambda pair: evidence(*pair))
    return linnet.TangentGP(network, Gaussian(variance=noise), prior_precision=precision, params=params)


def from_tangents(gp: linnet.TangentGP) -> Surrogate:
    """The tangent process conditioned on the new task alone."""
    from linnet.integrations.botorch import TangentModel

    return lambda x, y: TangentModel(gp.adapt(x, y))


def matern(dimensions: int) -> Any:
    """BoTorch's Matérn-5/2 kernel, with its prior on length scales."""
    from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior

    return get_covar_module_with_dim_scaled_prior(ard_num_dims=dimensions, use_rbf_kernel=False)


def plain(x: Tensor, y: Tensor) -> Any:
    """BoTorch's process of one task, with hyper-parameters by its priors and the data."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    model = SingleTaskGP(x, y, covar_module=matern(x.shape[-1]))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def network_mean(network: nn.Module) -> Any:
    """The network as the mean of a process of GPyTorch."""
    from gpytorch.means import Mean

    class NetworkMean(Mean):  # type: ignore[misc]
        """Its outputs, without a graph to its weights."""

        def forward(self, x: Tensor) -> Tensor:
            """(..., n)."""
            return network(x).squeeze(-1)

    return NetworkMean()


def around(network: nn.Module, earlier: Earlier, fixed: bool) -> Surrogate:
    """A Matérn process with the network as its mean.

    Args:
        network: What ``trained`` returned.
        earlier: The tasks.
        fixed: Whether the hyper-parameters are those of the held-out tasks (after Wang et al. 2024,
            "Pre-trained Gaussian processes for Bayesian optimization"), or found by the new evaluations.
    """
    import gpytorch
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    network = copy.deepcopy(network).requires_grad_(False)
    scale = gpytorch.kernels.ScaleKernel
    if fixed:
        x, y = earlier.x[-HELD_OUT:], earlier.scaled(earlier.y[-HELD_OUT:])[..., 0]
        kernel = scale(gpytorch.kernels.MaternKernel(2.5, ard_num_dims=x.shape[-1])).double()
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        likelihood.noise = 0.01
        learn(kernel, likelihood, x, y - network(x)[..., 0])

        def known(x: Tensor, y: Tensor) -> Any:
            made = SingleTaskGP(
                x, y, likelihood=likelihood, covar_module=kernel,
                mean_module=network_mean(network), outcome_transform=None,
            )  # fmt: skip
            return made.eval()

        return known

    def found(x: Tensor, y: Tensor) -> Any:
        model = SingleTaskGP(
            x, y, covar_module=scale(matern(x.shape[-1])),
            mean_module=network_mean(network), outcome_transform=None,
        )  # fmt: skip
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model

    return found


def learn(kernel: Any, likelihood: Any, x: Tensor, residual: Tensor, steps: int = 300) -> None:
    """The hyper-parameters of highest evidence on residuals (T, n) of several tasks, in place."""
    parameters = [*kernel.parameters(), *likelihood.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    zero = torch.zeros(x.shape[1], dtype=x.dtype)
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        covariance = kernel(x).to_dense() + likelihood.noise * eye
        density = torch.distributions.MultivariateNormal(zero, covariance).log_prob(residual)
        loss = -density.mean()
        loss.backward()
        optimizer.step()
