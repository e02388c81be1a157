"""What a linear fit is compared with: plain fine-tuning, nearest class means, a probe's held-out outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import InputError
from linnet.methods.fitting.head import features, linear_probe
from linnet.methods.fitting.targets import make_targets
from linnet.progress import track
from linnet.tangent.batch import Inputs, batch_size, gather_data, split, take
from linnet.tangent.functional import Functional

RATES = (0.003, 0.01, 0.03, 0.1)
CLIP = 1.0  # largest norm of a gradient; keeps a high rate from destroying a small network


@dataclass(frozen=True, eq=False)
class FineTuned:
    """A network fine-tuned by stochastic gradient descent.

    Args:
        model: The trained network.
        rate: The learning rate taken.
        held_out: Held-out score of each rate tried: accuracy, or the negative mean squared error.
        steps: Steps of each run.
    """

    model: nn.Module
    rate: float
    held_out: dict[float, float] = field(default_factory=dict)
    steps: int = 0

    @torch.no_grad()
    def predict(self, x: Inputs, batch: int = 256) -> Tensor:
        """Outputs of the network.

        Args:
            x: T examples.
            batch: Examples at once.

        Returns:
            (T, C).
        """
        function = Functional(self.model)
        return torch.cat([function.flat(function.theta, part) for part in split(x, batch)])


def fine_tune(
    model: nn.Module,
    data: Any,
    steps: int = 150,
    batch: int = 32,
    rates: Sequence[float] = RATES,
    seed: int = 0,
    progress: bool | None = None,
) -> FineTuned:
    """Plain fine-tuning of every weight, its learning rate chosen on a fifth of the training data.

    Stochastic gradient descent with momentum 0.9, clipped gradients and a cosine schedule, on the
    cross-entropy (integer y) or the mean squared error (float y); BatchNorm keeps its running statistics and
    dropout is off. Each rate is tried on four fifths of the data and scored on the rest; the best is then
    run on all of it.

    Args:
        model: The network, with the head that it should start from; it is not touched.
        data: Training data: an (x, y) pair, a Dataset or a DataLoader.
        steps: Steps of each run.
        batch: Examples a step.
        rates: Learning rates to try.
        seed: Seed of the held-out draw and of the batches.
        progress: Show progress; by default only when it takes over two seconds.

    Returns:
        The trained network, with the rate and the held-out scores.

    Raises:
        InputError: If there is no step, no rate, or only one example.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> x = torch.linspace(-1, 1, 20)[:, None] * torch.ones(1, 2)
        >>> fine_tune(net, (x, (x[:, 0] > 0).long()), steps=5, rates=(0.1,)).rate
        0.1
    """
    x, y = gather_data(data, next(model.parameters()).device)
    n = batch_size(x)
    if steps < 1 or not rates or n < 2:
        raise InputError(
            f"steps={steps}, rates={tuple(rates)} with {n} examples",
            expected="at least one step, one rate, two examples",
        )
    train, held = held_out_split(y, seed)
    runs = len(rates) + 1
    ticks = track(
        range(runs * steps), f"plain fine-tuning, {runs} runs of {steps} steps", runs * steps, progress
    )
    scores: dict[float, float] = {}
    for rate in rates:
        tried = _descend(model, take(x, train), y[train], rate, _Schedule(steps, batch, seed), ticks)
        scores[rate] = _score(tried, take(x, held), y[held])
    best = max(scores, key=lambda rate: scores[rate])
    trained = _descend(model, x, y, best, _Schedule(steps, batch, seed), ticks)
    for _ in ticks:  # let the meter end on its last line
        pass
    return FineTuned(trained, best, scores, steps)


@dataclass(frozen=True)
class _Schedule:
    """Steps, batch and seed of one run."""

    steps: int
    batch: int
    seed: int


def held_out_split(y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Positions to train on and to score on: a fifth of each class, or of all."""
    generator = torch.Generator().manual_seed(seed)
    labels = y.cpu() if not y.is_floating_point() else torch.zeros(len(y), dtype=torch.long)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        order = members[torch.randperm(len(members), generator=generator)]
        held[order[: len(members) // 5]] = True
    if not held.any():
        held[torch.randperm(len(labels), generator=generator)[: max(1, len(labels) // 5)]] = True
    return (~held).nonzero()[:, 0].to(y.device), held.nonzero()[:, 0].to(y.device)


def _descend(
    model: nn.Module, x: Inputs, y: Tensor, rate: float, schedule: _Schedule, ticks: Any
) -> nn.Module:
    """One run of SGD with momentum."""
    network = copy.deepcopy(model).eval()  # eval: BatchNorm and dropout frozen
    weights = [p.requires_grad_() for p in network.parameters() if p.is_floating_point()]
    optimizer = torch.optim.SGD(weights, lr=rate, momentum=0.9)
    generator = torch.Generator().manual_seed(schedule.seed)
    n, order = len(y), torch.empty(0, dtype=torch.long)
    for step in range(schedule.steps):
        next(ticks)
        if len(order) < min(schedule.batch, n):
            order = torch.cat([order, torch.randperm(n, generator=generator)])
        rows, order = order[: schedule.batch].to(y.device), order[schedule.batch :]
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / schedule.steps)) / 2
        optimizer.zero_grad()
        _loss(_outputs(network, take(x, rows)), y[rows]).backward()
        nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
    return network.requires_grad_(False)


def _outputs(network: nn.Module, x: Inputs) -> Tensor:
    """Outputs (N, C) with gradients."""
    value = network(*x) if isinstance(x, tuple) else network(**x) if isinstance(x, dict) else network(x)
    value = value if isinstance(value, Tensor) else value.logits
    return value.reshape(value.shape[0], -1)


def _loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy for classes, mean squared error for values."""
    if y.is_floating_point():
        return ((outputs - y.reshape(outputs.shape)) ** 2).mean()
    return nn.functional.cross_entropy(outputs, y.long())


@torch.no_grad()
def _score(network: nn.Module, x: Inputs, y: Tensor) -> float:
    """Accuracy less a hair of the loss, so that ties go to the surer; −∞ after divergence."""
    outputs = torch.cat([_outputs(network, part) for part in split(x, 256)])
    loss = float(_loss(outputs, y))
    if not math.isfinite(loss):
        return -math.inf
    if y.is_floating_point():
        return -loss
    return float((outputs.argmax(1) == y).double().mean()) - 1e-6 * min(loss, 1e3)


def held_out_probe(model: nn.Module, data: Any, classes: int, folds: int = 5, seed: int = 0) -> Tensor:
    """Outputs of the linear probe on examples that it was not fitted on, fold by fold.

    Args:
        model: The network; its last linear layer is left out.
        data: Training data with integer classes.
        classes: C.
        folds: Number of folds.
        seed: Seed of the folds.

    Returns:
        (N, C); their softmax temperature makes the probe's probabilities comparable with a fit's.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> held_out_probe(net, (torch.ones(10, 3).cumsum(0), torch.arange(10) % 2), classes=2).shape
        torch.Size([10, 2])
    """
    x, y = gather_data(data, next(model.parameters()).device)
    phi = features(model, x)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
    outputs = torch.zeros(len(y), classes, dtype=phi.dtype, device=phi.device)
    for fold in range(folds):
        held = torch.zeros(len(y), dtype=torch.bool, device=y.device)
        held[order[fold::folds]] = True
        if held.all() or not held.any():
            continue
        weight, bias = linear_probe(phi[~held], make_targets(y[~held], classes, varied=False))
        outputs[held] = phi[held] @ weight.T + bias
    return outputs


def nearest_class_mean(model: nn.Module, data: Any, x: Inputs) -> Tensor:
    """Classify by the nearest class mean of the frozen features.

    Args:
        model: The network; its last linear layer is left out.
        data: Training data with integer classes.
        x: T examples.

    Returns:
        Negative squared distances to the mean of each class, (T, C).

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> train = torch.ones(10, 3).cumsum(0)
        >>> nearest_class_mean(net, (train, torch.arange(10) // 5), train[:2]).shape
        torch.Size([2, 2])
    """
    inputs, y = gather_data(data, next(model.parameters()).device)
    phi, query = features(model, inputs), features(model, x)
    means = torch.stack([phi[y == label].mean(0) for label in range(int(y.max()) + 1)])
    return -torch.cdist(query, means).square()
