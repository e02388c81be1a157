"""Runs of iterative linearization on images, with the accuracies on the way."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.sources import CIFAR, images, pixels
from experiments.tables import with_error
from linnet import optim
from linnet.errors import ModelError, NumericalError

POINTS = 25  # of a run, at which accuracies are taken


@dataclass(frozen=True)
class Split:
    """Images and labels for training and testing."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def cifar(train: int, test: int, side: int, args: argparse.Namespace) -> Split:
    """The first images of CIFAR-10's subset; its classes are balanced and in random order."""
    found = images("cifar10_10k_5k", args.data_dir)
    order = torch.randperm(len(found.train_y), generator=torch.Generator().manual_seed(0))[:train]
    other = torch.randperm(len(found.test_y), generator=torch.Generator().manual_seed(1))[:test]
    x, t = (
        pixels(part, CIFAR, side).to(args.device)
        for part in (found.train_x[order.numpy()], found.test_x[other.numpy()])
    )
    return Split(x, found.train_y[order].to(args.device), t, found.test_y[other].to(args.device))


@dataclass(frozen=True)
class Plan:
    """How a run goes.

    Args:
        period: K, ``None`` for never, or a schedule.
        steps: How many.
        rate: Learning rate.
        batch: Examples of a step; ``None`` for all.
        method: ``"sgd"`` or ``"adam"``.
        seed: Of the order of the examples.
        stop: Mean training loss of the last steps at which the run ends; 0 for never.
        augment: Whether images are flipped and cropped at random.
    """

    period: Any
    steps: int
    rate: float
    batch: int | None = None
    method: str = "sgd"
    seed: int = 0
    stop: float = 0.0
    augment: bool = False


def train(model: nn.Module, data: Split, plan: Plan) -> dict[str, Any]:
    """Train a network, in evaluation mode, so that K = 1 trains the same function as larger K.

    Args:
        model: The network.
        data: The data.
        plan: How.

    Returns:
        At some steps: ``step``, ``test`` and ``train`` accuracy of the network, ``linear``, the test accuracy
        of the linearization, ``loss``; and ``final``, ``best`` and ``updates`` of features.
    """
    model = model.to(data.x.device).eval()

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if plan.method == "adam":
            return torch.optim.Adam(parameters, lr=plan.rate)
        return torch.optim.SGD(parameters, lr=plan.rate)

    training = optim.IterativeLinearization(model, make, plan.period)
    draw = _batches(data, plan)
    found: dict[str, Any] = {key: [] for key in ("step", "test", "train", "linear", "loss")}
    every, recent = max(1, plan.steps // POINTS), 0.0
    for step in range(1, plan.steps + 1):
        x, y = draw()
        try:
            loss = float(training.step(lambda module, x=x, y=y: F.cross_entropy(module(x), y)))  # type: ignore[misc]
        except (NumericalError, ModelError):  # a rate above 2/λ of the linear model's Hessian
            loss = math.inf
        recent = loss if step == 1 else recent + (loss - recent) / min(step, 20)
        ended = step == plan.steps or (plan.stop > 0 and recent < plan.stop) or not loss < float("inf")
        if step == 1 or step % every == 0 or ended:
            now = accuracy(model, data.test_x, data.test_y), accuracy(model, data.x[:1000], data.y[:1000])
            linear = (
                now[0] if plan.period == 1 else accuracy(training.linearization, data.test_x, data.test_y)
            )
            known = recent if recent < math.inf else None
            for key, value in zip(found, (step, *now, linear, known), strict=True):
                found[key].append(value)
        if ended:
            break
    found |= {
        "diverged": not loss < math.inf,
        "final": found["test"][-1],
        "best": max(found["test"]),
        "final train": found["train"][-1],
        "updates": training.report.relinearizations,
    }
    if plan.period != 1:
        found["updated at"] = list(training.report.updates)[:1000]
    return found


def _batches(data: Split, plan: Plan) -> Callable[[], tuple[Tensor, Tensor]]:
    """The examples of the next step."""
    generator = torch.Generator().manual_seed(plan.seed)
    order: list[Tensor] = []

    def draw() -> tuple[Tensor, Tensor]:
        if plan.batch is None or plan.batch >= len(data.y):
            return data.x, data.y
        if not order:
            drawn = torch.randperm(len(data.y), generator=generator)
            order.extend(drawn[: len(drawn) // plan.batch * plan.batch].split(plan.batch))
        chosen = order.pop().to(data.x.device)
        x = data.x[chosen]
        return (_augmented(x, generator) if plan.augment else x), data.y[chosen]

    return draw


def _augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Flips and random crops, the same crop for the images of a batch."""
    side = x.shape[-1]
    flip = (torch.rand(len(x), generator=generator) < 0.5).to(x.device)
    x = torch.where(flip[:, None, None, None], x.flip(3), x)
    wide = F.pad(x, (4, 4, 4, 4), mode="reflect")
    top, left = torch.randint(9, (2,), generator=generator).tolist()
    return wide[:, :, top : top + side, left : left + side]


@torch.no_grad()
def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of right classes; none where outputs overflow, as after a run that diverged."""
    try:
        found = [module(part).argmax(1) for part in x.split(500)]
    except (NumericalError, ModelError):
        return 0.0
    return int((torch.cat(found) == y).sum()) / len(y)


def shown(runs: Sequence[Mapping[str, Any]]) -> str:
    """The last training losses of some runs, or that one diverged."""
    lost = sum(cell["diverged"] for cell in runs)
    return f"{lost} of {len(runs)} diverged" if lost else with_error((c["loss"][-1] for c in runs), 3)
