"""Training with prior precision and noise tuned by the evidence during training.

Every few epochs the posterior is fitted at the weights of the moment, and the regularizer of the loss follows
the prior precisions that maximize its evidence, so that no validation data are needed (Immer, Bauer, Fortuin,
Rätsch and Khan 2021, "Scalable marginal likelihood estimation for model selection in deep learning").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from linnet.curvatures.settings import CurvatureOptions
from linnet.errors import ModelError, NumericalError
from linnet.laplace.laplace import Laplace
from linnet.laplace.posterior import FORMS
from linnet.likelihoods.likelihood import Likelihood, training_nll
from linnet.linalg.random import Seed, make_generator
from linnet.params import call, choice, instance, integer, refuse
from linnet.tangent.batch import Inputs, batch_size, on_device, take
from linnet.tangent.data import Data, as_pair
from linnet.tangent.functional import called
from linnet.tangent.selection import require_no_masks
from linnet.training import shuffled, train

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

MAKE = "pass make_optimizer=lambda p: torch.optim.Adam(p, 1e-3)"


@dataclass(frozen=True, kw_only=True)
class EvidenceSchedule:
    """When and how the evidence updates the prior during training.

    Args:
        every: Epochs between updates of the prior.
        burn_in: Epochs before the first update.
        steps: Most evaluations of the evidence in an update.
        prior: "isotropic", "layer" or "parameter": how many precisions.

    Raises:
        InputError: If a value does not work.

    Example:
        >>> EvidenceSchedule(every=5).prior
        'layer'
    """

    every: int = 1
    burn_in: int = 0
    steps: int = 50
    prior: str = "layer"

    def __post_init__(self) -> None:
        integer("every", self.every)
        integer("burn_in", self.burn_in, 0)
        integer("steps", self.steps)
        choice("prior", self.prior, FORMS)


class LaplaceOptions(CurvatureOptions, total=False):
    """Keywords that are handed on to ``linnet.Laplace``."""

    structure: Any  # as of :func:`linnet.curvature`
    prior_precision: Any  # δ, one for all parameters, for each layer, or for each parameter
    prior_mean: Any  # μ
    data_scale: float  # s, the weight of the data
    damping: str  # "exact" or "factors"


@torch.inference_mode(False)
@torch.enable_grad()
def train_with_evidence(
    model: nn.Module,
    data: Any,
    likelihood: Likelihood,
    epochs: int,
    make_optimizer: MakeOptimizer,
    *,
    schedule: EvidenceSchedule | None = None,
    batch_size: int = 128,
    seed: Seed = 0,
    **options: Unpack[LaplaceOptions],
) -> Laplace:
    """Train a network, in place, on its loss plus a prior that the evidence keeps choosing.

    The loss of a batch is its mean negative log-likelihood plus ½ Σ δ (θ − μ)² / (s N). Keep the epoch of the
    largest evidence by comparing :meth:`Laplace.log_evidence` of what several calls return.

    Args:
        model: The network; trained in place, and left in evaluation mode.
        data: An (x, y) pair or a ``Dataset``, reshuffled every epoch, or a ``DataLoader`` as it is.
        likelihood: What the outputs mean.
        epochs: Passes over the data.
        make_optimizer: From parameters to an optimizer without weight decay of its own.
        schedule: When and how the prior is updated; by default after every epoch.
        batch_size: Examples a step, where data are no loader.
        seed: Seed or generator of the order of the examples.
        **options: Passed on to :class:`Laplace`: structure, prior_precision, prior_mean, params, ...

    Returns:
        The posterior at the final weights, tuned.

    Raises:
        InputError: If a number is not positive.
        ModelError: If the network's result is no tensor.
        NumericalError: If the training diverges.

    Example:
        >>> import linnet
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> noisy = linnet.likelihoods.Gaussian(variance=0.1)
        >>> la = train_with_evidence(net, (x, x**2), noisy, 20, lambda p: torch.optim.Adam(p, 0.01))
        >>> sorted(la.prior_precision)
        ['0', '2']
    """
    integer("epochs", epochs)
    size = integer("batch_size", batch_size)
    when = EvidenceSchedule() if schedule is None else schedule
    instance("schedule", when, EvidenceSchedule, "a linnet.EvidenceSchedule")
    instance("model", model, nn.Module, "a torch.nn.Module", "pass the network itself")
    expected = "a function from parameters to an optimizer"
    if not callable(make_optimizer):
        refuse("make_optimizer", make_optimizer, expected, MAKE)
    require_no_masks(model, options.get("params"))
    la = Laplace(model, likelihood, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    made = call("make_optimizer", make_optimizer, trained, expected=expected, remedy=MAKE)
    optimizer: torch.optim.Optimizer = instance(
        "make_optimizer(...)", made, torch.optim.Optimizer, "a torch optimizer", MAKE
    )
    place = next(model.parameters()).device
    held = data if isinstance(data, DataLoader) else Data.of(data, model, missing=True, keep=False).pair
    n = _count(held)
    source = make_generator(seed)
    penalty = _Penalty(la.fit(held))

    def gradient(batch: tuple[Inputs, Tensor]) -> None:
        x, y = batch
        f = called(model, on_device(x, place), options.get("output"))
        # −1/n of the log posterior, in which every example counts s times, over s
        loss = training_nll(la.likelihood, f, y).mean() + penalty(model) / (la.data_scale * n)
        loss.backward()

    for epoch in range(1, epochs + 1):
        model.train()
        for _ in train(optimizer, _batches(held, size, source), gradient):
            pass
        if (epoch > when.burn_in and epoch % when.every == 0) or epoch == epochs:
            options["prior_precision"] = la.prior_precision
            try:
                la = Laplace(model, la.likelihood, **options).fit(held)
            except ModelError as error:  # the same network was fitted before: now it is not finite
                raise NumericalError(
                    f"the training diverged: {error.what}",
                    expected="finite outputs at every step",
                    remedy="pass a smaller learning rate, or check the data and the network's scale",
                ) from error
            la.tune("evidence", prior=when.prior, steps=when.steps)
            penalty = _Penalty(la)
    optimizer.zero_grad()
    model.eval()
    return la


def _count(data: Any) -> int:
    """Number of examples."""
    if isinstance(data, DataLoader):
        return sum(batch_size(as_pair(item)[0]) for item in data)
    return batch_size(data[0])


def _batches(data: Any, size: int, source: torch.Generator | None) -> Iterator[tuple[Inputs, Tensor]]:
    """One epoch."""
    if isinstance(data, DataLoader):
        yield from map(as_pair, data)
        return
    x, y = data
    for index in shuffled(len(y), size, source):
        yield take(x, index), y[index.to(y.device)]


class _Penalty:
    """½ Σ δ (θ − μ)² of the parameters that vary."""

    def __init__(self, la: Laplace) -> None:
        space = la.curvature.function.space
        self._precision, self._mean = (space.to_params(v) for v in la.prior_moments)

    def __call__(self, model: nn.Module) -> Tensor:
        named = dict(model.named_parameters())
        each = [
            (delta.to(named[name]) * (named[name] - self._mean[name].to(named[name])).square()).sum()
            for name, delta in self._precision.items()
        ]
        return 0.5 * torch.stack(each).sum()
