"""Plain fine-tuning of all weights by minibatch gradient descent."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from linnet import params as check
from linnet.logged import Log
from linnet.tangent.batch import Inputs, on_device, split, take
from linnet.tangent.functional import OutputAdapter, adapt_outputs, call_arguments, copied
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

        def gradient(rows: Tensor) -> Tensor:
            rows = rows.to(y.device)
            loss = loss_of(outputs_of(network, take(x, rows)), y[rows])
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
    arguments, keywords = call_arguments(on_device(x, next(module.parameters()).device))
    value = adapt_outputs(module(*arguments, **keywords), output)
    return value.reshape(value.shape[0], -1)


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy for classes, mean squared error for values."""
    if y.is_floating_point():
        return ((outputs - y.reshape(outputs.shape)) ** 2).mean()
    return nn.functional.cross_entropy(outputs, y.long())


@torch.no_grad()
def score_of(network: nn.Module, x: Inputs, y: Tensor) -> float:
    """Accuracy less a hair of the loss, so that ties go to the surer; −∞ after divergence."""
    outputs = torch.cat([outputs_of(network, part) for part in split(x, 256)])
    loss = float(loss_of(outputs, y))
    if not math.isfinite(loss):
        return -math.inf
    if y.is_floating_point():
        return -loss
    return float((outputs.argmax(1) == y).double().mean()) - 1e-6 * min(loss, 1e3)
