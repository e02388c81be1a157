"""Plain fine-tuning of all weights by minibatch gradient descent."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from linnet import params as check
from linnet.errors import InputError
from linnet.fitting.head import linear_probe
from linnet.fitting.last_layer import features
from linnet.linear.targets import make_targets
from linnet.progress import Log, track
from linnet.tangent.batch import Inputs, on_device, take
from linnet.tangent.data import Data
from linnet.tangent.functional import Functional, OutputAdapter, called, copied
from linnet.tangent.parts import in_parts
from linnet.tangent.sequences import ignores_padding, shortened
from linnet.training import cosine, stream, train

CLIP = 1.0  # largest norm of a gradient; keeps a high rate from destroying a small network
WARM_UP = 0.1  # share of Adam's steps in which the rate grows: its second moments are noise at first
OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True)
class Descent:
    """One run of minibatch descent with a cosine schedule and clipped gradients."""

    # BatchNorm keeps its running statistics and dropout is off.

    rate: float  # learning rate
    steps: int = 150  # steps
    batch: int = 32  # examples a step
    seed: int = 0  # seed of the batches
    optimizer: str = "sgd"  # ``"sgd"`` with momentum 0.9, or ``"adam"`` with a warm-up
    contrast: bool = False  # whether outputs are features of which those of a class are to be alike

    def __post_init__(self) -> None:
        check.choice("optimizer", self.optimizer, OPTIMIZERS, "leave it out for SGD")

    def __call__(
        self,
        model: nn.Module,
        x: Inputs,
        y: Tensor,
        ticks: Iterator[Any],
        names: Collection[str] | None = None,
        log: Log | None = None,
    ) -> nn.Module:
        """Train a copy of a network."""
        # y (N,)
        network = copied(model).eval().requires_grad_(False)
        weights = [
            p.requires_grad_()
            for name, p in network.named_parameters()
            if p.is_floating_point() and (names is None or name in names)
        ]
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(weights, lr=self.rate, momentum=0.9)
            if self.optimizer == "sgd"
            else torch.optim.AdamW(weights, lr=self.rate, weight_decay=0.0)
        )
        generator = torch.Generator().manual_seed(self.seed)
        n = len(y)
        batches = stream(n, self.batch, lambda _: torch.randperm(n, generator=generator))
        loss_on = contrast_of if self.contrast else loss_of
        short = ignores_padding(network, partial(outputs_of, network), x)

        def gradient(rows: Tensor) -> Tensor:
            rows = rows.to(y.device)
            part = take(x, rows)
            loss = loss_on(outputs_of(network, shortened(part) if short else part), y[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(weights, CLIP)
            return loss.detach()

        losses: list[Tensor] = []
        steps = train(
            optimizer, islice(batches, self.steps), gradient, lambda step: self.rate * self._factor(step)
        )
        for step, loss in steps:
            next(ticks, None)
            if log is not None:
                losses.append(loss)
                if len(losses) * self.batch >= n or step + 1 == self.steps:
                    mean = float(torch.stack(losses).mean())
                    log({"loss": mean, "learning_rate": self.rate * self._factor(step)}, step + 1)
                    losses.clear()
        return network.requires_grad_(False)

    def _factor(self, step: int) -> float:
        """Share of the rate at a step."""
        falling = cosine(step, self.steps)
        if self.optimizer == "sgd":
            return falling
        return min(1.0, (step + 1) / max(1.0, WARM_UP * self.steps)) * falling


def outputs_of(module: nn.Module, x: Inputs, output: OutputAdapter = None) -> Tensor:
    """Outputs (N, C) of a module for one batch of any structure, with gradients."""
    value = called(module, on_device(x, next(module.parameters()).device), output)
    return value.reshape(value.shape[0], -1)


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy for classes, mean squared error for values."""
    if y.is_floating_point():
        return ((outputs - y.reshape(outputs.shape)) ** 2).mean()
    return nn.functional.cross_entropy(outputs, y.long())


TEMPERATURE = 0.1  # of cosines, as in the source; 0.2 was no better on development tasks


def contrast_of(features: Tensor, y: Tensor) -> Tensor:
    """How much likelier others of its class are than the rest to be taken for a sample, by their cosines."""
    # features (N, D), y (N,); samples whose class has no other do not count
    # Source: Khosla et al. 2020, eq. (2)
    unit = nn.functional.normalize(features, dim=1)
    itself = torch.eye(len(y), dtype=torch.bool, device=y.device)
    cosines = (unit @ unit.T / TEMPERATURE).masked_fill(itself, -torch.inf)
    same = (y[:, None] == y) & ~itself
    likely = cosines.log_softmax(1).where(same, 0).sum(1) / same.sum(1).clamp_min(1)
    return -likely.sum() / same.any(1).sum().clamp_min(1)


@torch.no_grad()
def score_of(network: nn.Module, x: Inputs, y: Tensor) -> float:
    """Accuracy less a hair of the loss, so that ties go to the surer; −∞ after divergence."""
    outputs = in_parts(network, partial(outputs_of, network), x, 256)
    loss = float(loss_of(outputs, y))
    if not math.isfinite(loss):
        return -math.inf
    if y.is_floating_point():
        return -loss
    return float((outputs.argmax(1) == y).double().mean()) - 1e-6 * min(loss, 1e3)


# -- comparisons -----------------------------------------------------------------------------------
# Baselines of a linear fit: plain fine-tuning, nearest class means, a probe's held-out outputs.

# α of the probe that fine-tuning starts from: at 15 the softmax is so sure of its training samples that
# hardly any gradient is left, and accuracy ended lower in trials on development tasks
HEAD_SCALE = 4.0
RATES = {"sgd": (0.003, 0.01, 0.03, 0.1), "adam": (1e-4, 3e-4, 1e-3, 3e-3)}


@dataclass(frozen=True, eq=False)
class FineTuned:
    """A network fine-tuned by stochastic gradient descent."""

    model: nn.Module  # the trained network
    learning_rate: float  # the learning rate taken
    # held-out score of each rate tried: accuracy, or the negative mean squared error
    held_out: dict[float, float] = field(default_factory=dict)
    steps: int = 0  # steps of each run

    @torch.no_grad()
    def predict(self, x: Inputs, batch: int = 256) -> Tensor:
        """Outputs of the network, (T, C)."""
        function = Functional(self.model)
        return in_parts(function.model, partial(function.flat, function.theta), x, batch)


def fine_tune(
    model: nn.Module,
    data: Any,
    steps: int = 150,
    batch_size: int = 32,
    learning_rates: Sequence[float] | None = None,
    seed: int = 0,
    optimizer: str = "sgd",
    folds: int = 1,
) -> FineTuned:
    """Plain fine-tuning of every weight, its learning rate chosen on held-out training data."""
    # Minibatch descent with clipped gradients and a cosine schedule, on the cross-entropy (integer y) or the
    # mean squared error (float y); BatchNorm keeps its running statistics and dropout is off. Each rate is
    # tried on four fifths of the data and scored on the rest, once or in every fold of a cross-validation;
    # the best is then run on all of it.
    x, y = Data.of(data, model, keep=False).pair
    n = len(y)
    check.choice("optimizer", optimizer, OPTIMIZERS, "leave it out for SGD")
    rates = RATES[optimizer] if learning_rates is None else learning_rates
    if steps < 1 or not rates or n < 2:
        raise InputError(
            f"steps={steps}, learning_rates={tuple(rates)} with {n} examples",
            expected="at least one step, one rate, two examples",
            remedy="leave steps= and learning_rates= out, and pass two examples or more",
        )
    splits = held_out_splits(y, seed, folds)
    runs = len(rates) * len(splits) + 1
    ticks = track(range(runs * steps), f"plain fine-tuning, {runs} runs of {steps} steps", runs * steps)
    scores: dict[float, float] = {}
    for rate in rates:
        run = Descent(rate, steps, batch_size, seed, optimizer)
        found = []
        for rest, held in splits:
            tried = run(model, take(x, rest), y[rest], ticks)
            found.append(score_of(tried, take(x, held), y[held]))
        scores[rate] = sum(found) / len(found)
    best = max(scores, key=lambda rate: scores[rate])
    trained = Descent(best, steps, batch_size, seed, optimizer)(model, x, y, ticks)
    for _ in ticks:  # let the meter end on its last line
        pass
    return FineTuned(trained, best, scores, steps)


def held_out_splits(y: Tensor, seed: int, folds: int) -> list[tuple[Tensor, Tensor]]:
    """Positions to train on and to score on: one split, or one for each fold, classes spread over all."""
    if folds == 1:
        return [held_out_split(y, seed)]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    if not y.is_floating_point():
        order = order[y.cpu()[order].argsort(stable=True)]
    fold = torch.empty(len(y), dtype=torch.long)
    fold[order] = torch.arange(len(y)) % folds
    parts = [((fold != k).nonzero()[:, 0], (fold == k).nonzero()[:, 0]) for k in range(folds)]
    return [(train.to(y.device), held.to(y.device)) for train, held in parts if len(held)]


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


def held_out_probe(model: nn.Module, data: Any, classes: int, folds: int = 5, seed: int = 0) -> Tensor:
    """Outputs of the linear probe on examples that it was not fitted on, fold by fold."""
    x, y = Data.of(data, model, keep=False).pair
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
    """Classify by the nearest class mean of the frozen features, (T, C)."""
    inputs, y = Data.of(data, model, keep=False).pair
    phi, query = features(model, inputs), features(model, x)
    means = torch.stack([phi[y == label].mean(0) for label in range(int(y.max()) + 1)])
    return -torch.cdist(query, means).square()
