"""Baselines that predict by sampled networks, behind one interface, and dropout.

A baseline is called with the inputs of a batch, as ``linnet.evaluate``, ``linnet.ood`` and ``linnet.fgsm``
call anything: for classes it returns the probabilities of S samples, (S, N, C); for other likelihoods an
object with ``.mean`` and ``.variance``. ``.predictive(x)`` returns that object always.

    mc_dropout            networks with dropout left on (Gal and Ghahramani 2016)
    factorized_gaussian   a factorized Gaussian over all weights, trained by a variational bound
    last_layer            Bayesian linear regression on the last layer's inputs
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import InputError
from linnet.laplace.outputs import requires_gradient
from linnet.likelihoods.discrete import Bernoulli, Categorical
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.params import integer
from linnet.params import seed as checked_seed
from linnet.predictive.model import PredictiveModel
from linnet.predictive.sampled import Labels, Link, SampledPredictive
from linnet.tangent.batch import Inputs, take
from linnet.tangent.data import examples
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tree import map_tensors


class Baseline(PredictiveModel):
    """A network whose predictions are averaged over samples."""

    def __init__(self, likelihood: Likelihood, function: Functional) -> None:
        check_likelihood(likelihood)
        self.likelihood, self.function, self.device = likelihood, function, function.device

    @abstractmethod
    def _sampled(self, x: Inputs) -> Tensor:
        """The outputs of every sample, (S, N, ...)."""

    def outputs(self, x: Inputs) -> Tensor:
        """The outputs of every sample, (S, N, ...)."""
        return self._outputs(examples(self.function, x))

    def _outputs(self, x: Inputs) -> Tensor:
        """The outputs, or an error that says why there are none."""
        try:
            return self._sampled(x)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            self._check_runs(x)  # may say better what is wrong
            raise

    def predictive(self, x: Inputs) -> SampledPredictive:
        """The distribution of the outputs, and of labels."""
        x = examples(self.function, x)
        with torch.set_grad_enabled(requires_gradient(x)):
            f = self._outputs(x)
        return SampledPredictive(f.flatten(2), Labels(self.likelihood, tuple(f.shape[2:]), Link()))

    def _check_runs(self, x: Inputs) -> None:
        """Raise if the network cannot run on x."""
        one = take(map_tensors(lambda t: t.detach(), x), slice(0, 1))
        with _seeded(0, self.device):  # dropout draws
            self.function.check_runs(one)

    def summary(self) -> dict[str, Any]:
        """The likelihood, as plain text."""
        return {"likelihood": self.likelihood.describe()}

    def __call__(self, x: Inputs) -> Tensor | SampledPredictive:
        """Class probabilities (S, N, C), two columns for a yes or no; or the prediction, for numbers."""
        prediction = self.predictive(x)
        if not isinstance(self.likelihood, Categorical | Bernoulli):
            return prediction
        with torch.set_grad_enabled(requires_gradient(x)):
            p = prediction.sampled_probs
            if isinstance(self.likelihood, Bernoulli) and p.shape[-1] == 1:
                return torch.cat([1 - p, p], -1)
        return p


class MCDropout(Baseline):
    """A network with dropout left on; ``mc_dropout`` makes it."""

    def __init__(self, function: Functional, likelihood: Likelihood, samples: int, seed: int) -> None:
        super().__init__(likelihood, function)
        self._samples, self._seed = samples, seed

    def _sampled(self, x: Inputs) -> Tensor:
        """The outputs under S masks, (S, N, ...); the same masks at every call with as many examples."""
        theta = self.function.theta
        with _seeded(self._seed, self.device):
            return torch.stack([self.function(theta, x) for _ in range(self._samples)])


def mc_dropout(
    model: nn.Module,
    likelihood: Likelihood,
    samples: int = 100,
    seed: int = 0,
    output: OutputAdapter = None,
) -> MCDropout:
    """Predictions averaged over dropout masks.

    Args:
        model: A network with dropout; a copy is used, in evaluation mode but for dropout.
        likelihood: What its outputs mean.
        samples: S, number of masks.
        seed: Of the masks; torch's own random numbers are left alone.
        output: How to turn the network's result into a tensor, as in ``linnet.linearize``.

    Returns:
        A baseline.

    Raises:
        InputError: If the network has no dropout module whose rate is positive.

    Source:
        Gal and Ghahramani, "Dropout as a Bayesian approximation", 2016.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
        >>> mc_dropout(net, Categorical(), samples=10)(torch.ones(4, 2)).shape
        torch.Size([10, 4, 3])
    """
    integer("samples", samples)
    _check_seed(seed)
    function = Functional(model, "all", output)
    dropping = [module for module in function.model.modules() if _drops(module)]
    if not dropping:
        raise InputError(
            f"model ({type(model).__name__}) has no dropout",
            expected="a module such as torch.nn.Dropout with a positive rate",
            remedy="add dropout and train",
        )
    for module in dropping:
        module.training = True  # of this module alone, not of those inside it
    return MCDropout(function, likelihood, samples, seed)


def _drops(module: nn.Module) -> bool:
    """Whether dropout is all that training mode changes in a module, and its rate is positive."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0


def _check_seed(seed: Any) -> None:
    """Raise unless torch takes the seed."""
    checked_seed("seed", seed)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's random numbers from a seed, and as they were afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
