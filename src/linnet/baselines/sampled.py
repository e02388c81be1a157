"""Baselines that predict by sampled or several networks, behind one interface.

A baseline is called with the inputs of a batch, as ``linnet.evaluate``, ``linnet.ood`` and ``linnet.fgsm``
call anything: for classes it returns the probabilities of S networks, (S, N, C); for other likelihoods an
object with ``.mean`` and ``.variance``. ``.predictive(x)`` returns that object always.

    mc_dropout            networks with dropout left on (Gal and Ghahramani 2016)
    deep_ensemble         networks trained from several initializations (Lakshminarayanan et al. 2017)
    factorized_gaussian   a factorized Gaussian over all weights, trained by a variational bound
    last_layer            Bayesian linear regression on the last layer's inputs
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import InputError, ModelError
from linnet.fitting.training import Training, filled
from linnet.laplace.outputs import requires_gradient
from linnet.likelihoods.discrete import Bernoulli, Categorical
from linnet.likelihoods.likelihood import Likelihood, check_likelihood, takes_missing, training_nll
from linnet.params import call, integer, number, refuse
from linnet.params import seed as checked_seed
from linnet.predictive.labels import Labels
from linnet.predictive.links import Link
from linnet.predictive.model import PredictiveModel
from linnet.predictive.sampled import SampledPredictive
from linnet.progress import track
from linnet.tangent.batch import Inputs, batch_size, map_tensors, on_device, take
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.gather import examples, gather_data


class Baseline(PredictiveModel):
    """Networks whose predictions are averaged."""

    def __init__(self, likelihood: Likelihood, members: Sequence[Functional]) -> None:
        check_likelihood(likelihood)
        self.likelihood, self.members, self.device = likelihood, list(members), members[0].device

    @abstractmethod
    def _sampled(self, x: Inputs) -> Tensor:
        """The outputs of every network, (S, N, ...)."""

    def outputs(self, x: Inputs) -> Tensor:
        """The outputs of every network, (S, N, ...)."""
        return self._outputs(examples(self.members[0], x))

    def _outputs(self, x: Inputs) -> Tensor:
        """The outputs, or an error that says why there are none."""
        try:
            return self._sampled(x)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            self._check_runs(x)  # may say better what is wrong
            raise

    def predictive(self, x: Inputs) -> SampledPredictive:
        """The distribution of the outputs, and of labels."""
        x = examples(self.members[0], x)
        with torch.set_grad_enabled(requires_gradient(x)):
            f = self._outputs(x)
        return SampledPredictive(f.flatten(2), Labels(self.likelihood, tuple(f.shape[2:]), Link()))

    def _check_runs(self, x: Inputs) -> None:
        """Raise if a network cannot run on x, or gives outputs of another shape than the first."""
        one = take(map_tensors(lambda t: t.detach(), x), slice(0, 1))
        with _seeded(0, self.device):  # dropout draws
            shapes = [tuple(member.check_runs(one).shape[1:]) for member in self.members]
        if len(set(shapes)) > 1:
            raise ModelError(
                f"the networks give outputs of the shapes {', '.join(map(str, dict.fromkeys(shapes)))}",
                expected="networks of one kind",
                remedy="train all of them on the same task",
            )

    def summary(self) -> dict[str, Any]:
        """The likelihood and the networks, as plain numbers and text."""
        return {"likelihood": self.likelihood.describe(), "networks": len(self.members)}

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


# --- dropout --------------------------------------------------------------------------------------


class MCDropout(Baseline):
    """A network with dropout left on; ``mc_dropout`` makes it."""

    def __init__(self, function: Functional, likelihood: Likelihood, samples: int, seed: int) -> None:
        super().__init__(likelihood, [function])
        self._function, self._samples, self._seed = function, samples, seed

    def _sampled(self, x: Inputs) -> Tensor:
        """The outputs under S masks, (S, N, ...); the same masks at every call with as many examples."""
        theta = self._function.theta
        with _seeded(self._seed, self.device):
            return torch.stack([self._function(theta, x) for _ in range(self._samples)])


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
            remedy="add dropout and train, or use deep_ensemble",
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


# --- ensembles ------------------------------------------------------------------------------------


class DeepEnsemble(Baseline):
    """Networks trained from several initializations; ``deep_ensemble`` makes it."""

    def __init__(self, members: list[Functional], likelihood: Likelihood) -> None:
        super().__init__(likelihood, members)

    def _sampled(self, x: Inputs) -> Tensor:
        """The outputs of every member, (S, N, ...)."""
        return torch.stack([member(member.theta, x) for member in self.members])


def deep_ensemble(
    train: Callable[[int], nn.Module],
    likelihood: Likelihood,
    members: int = 5,
    seed: int = 0,
    output: OutputAdapter = None,
) -> DeepEnsemble:
    """Predictions averaged over networks that were trained independently.

    Args:
        train: Takes a seed and returns a network trained from an initialization of its own; for a plain
            trainer, ``lambda seed: trained(make, data, likelihood, seed=seed)``. Torch's random numbers are
            seeded around the call.
        likelihood: What outputs mean.
        members: S, number of networks, at least 2.
        seed: Of the first member; the others have those that follow.
        output: How to turn a network's result into a tensor, as in ``linnet.linearize``.

    Returns:
        A baseline.

    Raises:
        InputError: If ``train`` returns no network, or there are fewer than two members.

    Source:
        Lakshminarayanan, Pritzel, Blundell, "Simple and scalable predictive uncertainty estimation using deep
        ensembles", 2017, without their adversarial training.

    Example:
        >>> data = torch.randn(20, 2), torch.arange(20) % 3
        >>> def train(seed: int) -> nn.Module:
        ...     return trained(lambda: nn.Linear(2, 3), data, Categorical(), Training(epochs=2), seed=seed)
        >>> deep_ensemble(train, Categorical(), members=3)(data[0]).shape
        torch.Size([3, 20, 3])
    """
    integer("members", members)
    if members < 2 or not callable(train):
        raise InputError(
            f"train is {type(train).__name__}, members={members}",
            expected="a function of a seed, and at least two members",
            remedy="pass train=lambda seed: trained(make, data, likelihood, seed=seed)",
        )
    _check_seed(seed)
    found = []
    for own in track(range(seed, seed + members), "training an ensemble"):
        with torch.random.fork_rng():
            torch.manual_seed(own)
            model = call("train", train, own, expected="a function from a seed to a trained network")
        if not isinstance(model, nn.Module):
            raise InputError(
                f"train returned {type(model).__name__}",
                expected="a torch.nn.Module",
                remedy="return the trained network",
            )
        found.append(Functional(model, "all", output))
    return DeepEnsemble(found, likelihood)


def trained(
    make: Callable[[], nn.Module],
    data: Any,
    likelihood: Likelihood,
    training: Training | None = None,
    *,
    prior_precision: float = 1e-2,
    seed: int = 0,
) -> nn.Module:
    """A network trained to its most probable weights by Adam; a plain trainer for ensembles.

    Args:
        make: Makes the network with weights drawn again; its outputs are a tensor (N, ...).
        data: An (x, y) pair, a Dataset, a DataLoader or batches.
        likelihood: What the outputs mean.
        training: ``learning_rate``, ``batch_size`` and ``epochs``; by default 1e-3, 128 and 20.
        prior_precision: λ of the prior N(0, λ⁻¹ I) of the weights; the thesis has 10⁻².
        seed: Of the initial weights, the order of the examples and dropout.

    Returns:
        The network, in evaluation mode.

    Raises:
        InputError: If an argument is not positive.
        NumericalError: If the training diverges.

    Example:
        >>> from linnet.likelihoods import Categorical
        >>> data = torch.randn(12, 2), torch.arange(12) % 3
        >>> trained(lambda: nn.Linear(2, 3), data, Categorical(), Training(epochs=1)).training
        False
    """
    check_likelihood(likelihood)
    how = filled(training, "trained", learning_rate=1e-3, batch_size=128, epochs=20)
    rate, size, epochs = how.learning_rate, how.batch_size, how.epochs
    assert rate
    assert size
    assert epochs
    number("prior_precision", prior_precision, above=0, remedy="leave prior_precision= out")
    _check_seed(seed)
    with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        made = "a function without arguments that makes a network"
        if not callable(make):
            refuse("make", make, made, "pass make=lambda: torch.nn.Linear(2, 3)")
        model = call("make", make, expected=made)
        if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
            refuse("make()", model, "a torch.nn.Module with weights", "return the network")
        weights = [p for p in model.parameters() if p.requires_grad]
        x, y = gather_data(data, model, missing=takes_missing(likelihood), keep=False)
        n, optimizer = batch_size(x), torch.optim.Adam(weights, lr=rate)
        model.train()
        for _ in range(epochs):
            for index in torch.randperm(n).split(min(size, n)):
                part, own = on_device(take(x, index), y.device), index.to(y.device)
                f = call("the network", _run, model, part, expected="a network that can run on x")
                # 1/B Σ nll + λ/2N ‖θ‖²
                squares = torch.stack([p.square().sum() for p in weights]).sum()
                loss = training_nll(likelihood, f, y[own]).mean() + prior_precision / (2 * n) * squares
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model.eval()


def _run(model: nn.Module, x: Inputs) -> Tensor:
    """The network in training mode."""
    args = x if isinstance(x, list | tuple) else () if isinstance(x, Mapping) else (x,)
    f = model(*args, **(x if isinstance(x, Mapping) else {}))
    if not isinstance(f, Tensor):
        raise InputError(
            f"the network returns {type(f).__name__}",
            expected="a tensor (N, ...)",
            remedy="pass deep_ensemble a train= function of your own",
        )
    return f[:, None] if f.ndim == 1 else f
