"""A factorized Gaussian over all weights of a network, trained by a variational bound.

FFG of Botev (2020, section 5.2.2, after Kingma and Welling 2014 and Blundell et al. 2015): the bound

    Σᵢ E_q[log p(yᵢ | xᵢ, θ)] − KL(N(μ, s²) ‖ N(0, λ⁻¹ I)),

by mini-batches and the reparametrization θ = μ + s ε. Where a linear layer is called once, on inputs (N, d),
its outputs are drawn instead of its weights, independently for each example (Kingma, Salimans and Welling
2015, eq. 6):

    b = x Mᵀ + √(x² (S²)ᵀ) ε,

which is the same bound with less noise in its gradients. It does not hold for shared weights, such as those
of convolutions, whose positions are not independent given q: these, and all others, are drawn once a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.baselines.dropout import Baseline
from linnet.likelihoods.likelihood import Likelihood, check_likelihood, takes_missing, training_nll
from linnet.linalg.random import Seed, make_generator, normal
from linnet.params import instance, integer, number
from linnet.params import seed as checked_seed
from linnet.posterior import SVI, divergence, maximize_bound
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.data import Data
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.preflight import warn_of_scale

EPOCHS = 50
DEVIATION = 6.7e-3  # softplus(−5)

Hook = Callable[[nn.Module, Any, Tensor], Tensor]


class FactorizedGaussian(Baseline):
    """A factorized Gaussian over weights; ``factorized_gaussian`` makes it."""

    # mean (P,), deviation (P,)

    def __init__(
        self,
        function: Functional,
        likelihood: Likelihood,
        mean: Tensor,
        deviation: Tensor,
        bounds: tuple[float, ...],
        samples: int,
        seed: int,
    ) -> None:
        super().__init__(likelihood, function)
        self._samples, self._seed = samples, seed
        self.mean, self.deviation, self.bounds = mean, deviation, bounds

    def _sampled(self, x: Inputs) -> Tensor:
        """The outputs under S draws of the weights, (S, N, ...); the same draws at every call."""
        source, found = make_generator(self._seed), []
        for _ in range(self._samples):
            noise = normal(self.mean.shape, source, self.mean.dtype, self.device)
            theta = self.function.space.to_params(self.mean + self.deviation * noise)
            found.append(self.function(theta, x))
        return torch.stack(found)


@in_exact_mode
def factorized_gaussian(
    model: nn.Module,
    data: Any,
    likelihood: Likelihood,
    inference: SVI | None = None,
    *,
    prior_precision: float = 1.0,
    samples: int = 100,
    seed: int = 0,
    output: OutputAdapter = None,
) -> FactorizedGaussian:
    """Train a factorized Gaussian over all weights.

    The network runs in evaluation mode: dropout is off, and BatchNorm uses the statistics that it has.

    Args:
        model: The network; a copy is used, and μ begins at its weights.
        data: An (x, y) pair, a Dataset, a DataLoader or batches, which is read once.
        likelihood: What its outputs mean.
        inference: Settings of the training; by default 50 passes over the data.
        prior_precision: λ.
        samples: S, draws of the weights for predictions.
        seed: Of everything random.
        output: How to turn the network's result into a tensor, as in ``linnet.linearize``.

    Returns:
        A baseline.

    Raises:
        DataError: If the data are empty, not finite, or labels are out of range.
        InputError: If a value is not positive.
        NumericalError: If the bound stops being finite.

    Source:
        Botev 2020, section 5.2.2, where the optimizer is SGD with momentum.

    Example:
        >>> import linnet
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> likelihood = linnet.likelihoods.Categorical()
        >>> short = linnet.SVI(training=linnet.Training(epochs=2))
        >>> ffg = factorized_gaussian(net, (x, y), likelihood, short, samples=10)
        >>> ffg(x).shape, len(ffg.bounds)
        (torch.Size([10, 30, 3]), 2)
    """
    check_likelihood(likelihood)
    number("prior_precision", prior_precision, above=0, remedy="leave prior_precision= out")
    integer("samples", samples)
    checked_seed("seed", seed)
    how = SVI() if inference is None else inference
    instance("inference", how, SVI, "a linnet.SVI")
    deviation, draws = DEVIATION if how.deviation is None else how.deviation, how.draws
    function = Functional(model, "all", output)
    x, y = Data.of(data, function, missing=takes_missing(likelihood), keep=False).pair
    likelihood.check(function.check_runs(x), y)
    warn_of_scale(function, likelihood, x)
    mean = function.space.to_flat(function.theta).clone().requires_grad_()
    # v with softplus(v) = s
    raw = torch.full_like(mean, math.log(math.expm1(deviation))).requires_grad_()
    source = make_generator(seed)
    drawing = _Drawing(function, take(x, slice(0, 2)), source)

    def gradient(index: Tensor) -> float:
        index = index.to(function.device)
        own_x, own_y = take(x, index), y[index]
        s = F.softplus(raw)
        fitted = sum(training_nll(likelihood, drawing(mean, s, own_x), own_y).sum() for _ in range(draws))
        bound = -len(y) / (len(index) * draws) * fitted - divergence(mean, s, prior_precision)
        (-bound).backward()
        return float(bound.detach())

    try:
        bounds = maximize_bound(how, EPOCHS, [mean, raw], len(y), source, gradient)
    finally:
        drawing.close()
    found = mean.detach(), F.softplus(raw.detach())
    return FactorizedGaussian(function, likelihood, *found, bounds, samples, seed)


class _Drawing:
    """Outputs of the network under fresh draws, by its linear layers' outputs where that is exact."""

    def __init__(self, function: Functional, probe: Inputs, source: Seed) -> None:
        self.function, self.source = function, make_generator(source)
        self.spreads: dict[str, Tensor] = {}  # s of the parameters of the layers that qualify
        found = _qualifying(function, probe)
        self.local = {name for names in found.values() for name in names}
        self.handles = [layer.register_forward_hook(self._hook(names)) for layer, names in found.items()]

    def __call__(self, mean: Tensor, deviation: Tensor, x: Inputs) -> Tensor:
        """The outputs, differentiable in μ and s."""
        space = self.function.space
        centers, self.spreads = space.to_params(mean), space.to_params(deviation)
        theta = {}
        for name, center in centers.items():
            if name in self.local:
                theta[name] = center
            else:
                noise = normal(center.shape, self.source, center.dtype, center.device)
                theta[name] = center + self.spreads[name] * noise
        return self.function(theta, x)

    def _hook(self, names: list[str]) -> Hook:
        """Adds the noise of a layer's outputs to what it gives for μ."""

        def add(module: nn.Module, args: Any, result: Tensor) -> Tensor:
            variances = [self.spreads[name].square() for name in names]
            variance = F.linear(args[0].square(), *variances).clamp_min(torch.finfo(result.dtype).tiny)
            return result + variance.sqrt() * normal(result.shape, self.source, result.dtype, result.device)

        return add

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()


def _qualifying(function: Functional, probe: Inputs) -> dict[nn.Linear, list[str]]:
    """Linear layers called once with inputs (N, d), whose parameters nothing else has, and their names."""
    owners = [p for module in function.model.modules() for p in module._parameters.values() if p is not None]
    calls: dict[nn.Linear, list[int]] = {}
    handles = []
    for module in function.model.modules():
        if type(module) is nn.Linear:
            calls[module] = []
            note = _note(calls[module])
            handles.append(module.register_forward_hook(note))
    try:
        function.check_runs(probe)
    finally:
        for handle in handles:
            handle.remove()
    names = {id(p): name for name, p in function.model.named_parameters()}
    found = {}
    for module, seen in calls.items():
        own = [p for p in (module.weight, module.bias) if p is not None]
        alone = all(sum(p is other for other in owners) == 1 for p in own)
        if seen == [batch_size(probe)] and alone:
            found[module] = [names[id(p)] for p in own]
    return found


def _note(seen: list[int]) -> Hook:
    """Writes down the N of a layer's inputs (N, d), 0 for those of another kind."""

    def note(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        seen.append(len(args[0]) if args and args[0].ndim == 2 else 0)
        return result

    return note
