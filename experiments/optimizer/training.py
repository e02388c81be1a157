"""Runs of optimizers that are compared by update and by second, and the first-order methods' grid."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnet import optim
from linnet.errors import DataError
from linnet.likelihoods.likelihood import Likelihood

RATES = tuple(2.0**-k for k in range(6, 14))
DECAYS = (1.0, 0.5, 0.25, 0.125, 0.0625)
POINTS = 60  # of a curve that are kept
WINDOW = 10  # updates that the curves are averaged over, as in the thesis
CURVATURES: dict[str, dict[str, Any]] = {
    "KFRA": {"structure": "kfra"},
    "KFAC": {"structure": "kfac"},
    "KFAC, random projection": {"structure": "kfac", "expectation": "random-projection"},
    "KFLR": {"structure": "kfac", "expectation": "exact"},
}
FIRST_ORDER: dict[str, Callable[[list[nn.Parameter], float], torch.optim.Optimizer]] = {
    "Adam": lambda weights, rate: torch.optim.Adam(weights, lr=rate),
    "SGD": lambda weights, rate: torch.optim.SGD(weights, lr=rate),
    "SGD with momentum": lambda weights, rate: torch.optim.SGD(weights, lr=rate, momentum=0.9),
    "Nesterov": lambda weights, rate: torch.optim.SGD(weights, lr=rate, momentum=0.9, nesterov=True),
}
Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Task:
    """What is optimized.

    Args:
        make: Makes the network at its first weights.
        x: Inputs (N, D).
        y: Targets.
        likelihood: Whose mean negative log-likelihood is the loss.
        batch: Examples of a batch.
        seed: Of the order of the batches.
    """

    make: Make
    x: Tensor
    y: Tensor
    likelihood: Likelihood
    batch: int
    seed: int

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches without end."""
        generator = torch.Generator().manual_seed(1000 + self.seed)
        while True:
            order = torch.randperm(len(self.x), generator=generator).to(self.x.device)
            for start in range(0, len(order) - self.batch + 1, self.batch):
                chosen = order[start : start + self.batch]
                yield self.x[chosen], self.y[chosen]


def run(task: Task, updates: int, step: Callable[[nn.Module], Callable[[Tensor, Tensor], float]]) -> Any:
    """Train, and note the loss of every batch before its update and the seconds until then.

    Args:
        task: What is optimized.
        updates: How often.
        step: From a network to an update of it on a batch, which returns the batch's loss.

    Returns:
        ``update``, ``clock`` (seconds of this process' CPU, or of the clock on a GPU) and ``loss`` (averaged
        over ten updates) at some updates.
    """
    model = task.make().to(task.x.device)
    update, batches = step(model), task.batches()
    clock = time.perf_counter if task.x.device.type == "cuda" else time.process_time
    losses, seconds = [], []
    start = clock()
    for _ in range(updates):
        x, y = next(batches)
        try:
            losses.append(update(x, y))
        except DataError:  # outputs that are no numbers
            losses.append(float("inf"))
        seconds.append(clock() - start)
        if not losses[-1] < float("inf"):
            break
    spaced = torch.logspace(0, torch.tensor(float(len(losses))).log10(), POINTS)
    kept = sorted({min(len(losses), max(1, round(v))) for v in spaced.tolist()})
    smooth = [sum(losses[max(0, k - WINDOW) : k]) / min(k, WINDOW) for k in kept]
    finite = [value if value < float("inf") else None for value in smooth]
    return {"update": kept, "clock": [seconds[k - 1] for k in kept], "loss": finite, "final": finite[-1]}


def first_order(task: Task, method: str, rate: float, period: float, updates: int) -> Any:
    """A run of a method of ``FIRST_ORDER``, its rate halved every ``period`` of the updates."""

    def step(model: nn.Module) -> Callable[[Tensor, Tensor], float]:
        optimizer = FIRST_ORDER[method](list(model.parameters()), rate)
        every = max(1, round(period * updates))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, every, 0.5)

        def update(x: Tensor, y: Tensor) -> float:
            optimizer.zero_grad()
            f = model(x)
            loss = task.likelihood.nll(f, task.likelihood.check(f, y)).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            return loss.item()

        return update

    return run(task, updates, step)


def second_order(task: Task, method: str, updates: int, **settings: Any) -> Any:
    """A run of ``GaussNewton`` with its default settings, or others."""

    def step(model: nn.Module) -> Callable[[Tensor, Tensor], float]:
        optimizer = optim.GaussNewton(model, task.likelihood, **CURVATURES[method], **settings)
        return lambda x, y: optimizer.step(x, y).loss

    return run(task, updates, step)


def grid(full: bool, screened: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Rates and decay periods to run in full.

    Args:
        full: The thesis' whole grid.
        screened: Rates, with the loss after a short run of each without decay, ``None`` if it diverged.

    Returns:
        The grid; else the two best rates of the short runs, without decay and halved every quarter.
    """
    if full:
        return [(rate, period) for rate in RATES for period in DECAYS]
    good = sorted((loss, rate) for rate, loss in screened if loss is not None)[:2]
    return [(rate, period) for _, rate in good for period in (1.0, 0.25)]


def ended(cell: dict[str, Any]) -> float:
    """The last loss of a run; infinite if it diverged."""
    return float("inf") if cell["final"] is None else float(cell["final"])


def decades(larger: float, smaller: float) -> float:
    """Powers of ten between two losses."""
    return math.log10(larger / smaller)


def loss_at(cell: dict[str, Any], key: str, limit: float) -> float:
    """The last loss of a run at or before so many updates or seconds; infinite if it diverged by then."""
    found = float("inf")
    for place, loss in zip(cell[key], cell["loss"], strict=True):
        if place <= limit * (1 + 1e-9):
            found = float("inf") if loss is None else loss
    return found
