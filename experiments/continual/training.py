"""Training along a stream of tasks, the same loop for every method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.continual.networks import Heads
from experiments.continual.streams import Examples, Task

Method = linnet.continual.ContinualMethod
JOINT = "Joint training"
Maker = Callable[[nn.Module, float, float], Method]


@dataclass(frozen=True)
class Training:
    """How a task is trained.

    Args:
        epochs: Passes over the task.
        batch: Examples a step.
        optimizer: "adam", "momentum" or "nesterov".
        rate: Learning rate.
        momentum: Of "momentum" and "nesterov".
        decay: k: the first rate of task t is rate / (1 + k t).
        drop: Steps after which the rate is divided by 10; 0 for never.
        measured: Examples that a task's curvature is measured on; it counts for all.
        keep: Whether the optimizer's state is kept from task to task.
        device: Where.
        precondition: τ > 0: gradients of all tasks but the first are multiplied by τ (Λ / N + τ I)⁻¹ with the
            precision Λ of the past; 0 for never.
    """

    epochs: int = 2
    batch: int = 250
    optimizer: str = "adam"
    rate: float = 1e-3
    momentum: float = 0.9
    decay: float = 0.0
    drop: int = 0
    measured: int = 10_000
    keep: bool = False
    device: str = "cpu"
    precondition: float = 0.0

    def make(self, net: nn.Module, task: int) -> torch.optim.Optimizer:
        """The optimizer of task t = 0, 1, ..."""
        rate = self.rate / (1 + self.decay * task)
        if self.optimizer == "adam":
            return torch.optim.Adam(net.parameters(), lr=rate, fused=True)
        nesterov = self.optimizer == "nesterov"
        return torch.optim.SGD(net.parameters(), lr=rate, momentum=self.momentum, nesterov=nesterov)

    def words(self) -> dict[str, Any]:
        """What numbers depend on, for a cell; not the device, and no preconditioner that is not there."""
        unsaid = {"device", *(() if self.precondition else ("precondition",))}
        return {key: value for key, value in asdict(self).items() if key not in unsaid}


def laplace(structure: str, merge: str = "svd", expectation: str = "exact") -> Maker:
    """Online Laplace; ``scale`` makes up for the examples that the curvature is not measured on."""

    def make(net: nn.Module, strength: float, scale: float) -> Method:
        return linnet.continual.OnlineLaplace(
            net, linnet.likelihoods.Categorical(), structure, strength=strength * scale, merge=merge,
            expectation=expectation,
        )  # fmt: skip

    return make


def non_online(structure: str, merge: str = "svd") -> Maker:
    """Laplace with all curvatures measured anew."""

    def make(net: nn.Module, strength: float, scale: float) -> Method:
        return linnet.continual.NonOnlineLaplace(
            net, linnet.likelihoods.Categorical(), structure, strength=strength * scale, merge=merge
        )

    return make


def ewc(structure: str) -> Maker:
    """Elastic weight consolidation with one term a task."""

    def make(net: nn.Module, strength: float, scale: float) -> Method:
        return linnet.continual.EWC(
            net, linnet.likelihoods.Categorical(), structure, strength=strength * scale
        )

    return make


def intelligence(net: nn.Module, strength: float, scale: float) -> Method:
    """Synaptic intelligence; it needs no curvature, and so no scale."""
    del scale
    return linnet.continual.SynapticIntelligence(net, strength=strength)


METHODS: dict[str, Maker] = {
    "Online Laplace (KF)": laplace("kfac"),
    "Online Laplace (D)": laplace("diagonal"),
    "Non-online Laplace (KF)": non_online("kfac"),
    "Non-online Laplace (D)": non_online("diagonal"),
    "EWC (KF)": ewc("kfac"),
    "EWC (D)": ewc("diagonal"),
    "SI": intelligence,
}


def batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices of one pass in random order; a last batch that is not full is left out unless it is alone."""
    order = torch.randperm(count, generator=generator)
    whole = [part for part in order.split(size) if len(part) == size]
    yield from whole or [order]


def lower(optimizer: torch.optim.Optimizer) -> None:
    """Divide the learning rate by ten."""
    for group in optimizer.param_groups:
        group["lr"] /= 10


def learn(
    net: Heads,
    data: tuple[Tensor, Tensor],
    method: Method | None,
    optimizer: torch.optim.Optimizer,
    how: Training,
    generator: torch.Generator,
) -> None:
    """Train on one task, with the method's penalty."""
    x, y = data
    net.train()
    step = 0
    for _ in range(how.epochs):
        for rows in batches(len(x), how.batch, generator):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            if method is not None:
                method.add_grad_(examples=len(x))
            optimizer.step()
            if method is not None:
                method.after_step()
            step += 1
            if how.drop and step % how.drop == 0:
                lower(optimizer)


@torch.no_grad()
def accuracy(net: Heads, task: Task, part: str = "test", device: str = "cpu") -> float:
    """Share of a task's examples that are classified correctly."""
    x, y = (tensor.to(device) for tensor in task.read(part))
    net.eval().select(task.head)
    right = sum(int((net(a).argmax(1) == b).sum()) for a, b in zip(x.split(5000), y.split(5000), strict=True))
    return right / len(y)


def run_stream(
    net: Heads,
    tasks: Sequence[Task],
    make: Maker | None,
    strength: float,
    how: Training,
    seed: int = 0,
    *,
    along: Sequence[int] | None = None,
    told: Callable[[int, list[float]], None] | None = None,
) -> dict[str, Any]:
    """Learn a stream of tasks one after the other.

    Args:
        net: The network.
        tasks: The tasks.
        make: The method; ``None`` for plain training.
        strength: λ, or c of synaptic intelligence.
        how: The training.
        seed: Seed of the order of the examples.
        along: After which tasks (0, 1, ...) the test sets of all so far are evaluated; by default all. After
            the last one the validation sets are, too.
        told: Is called with every row of test accuracies as it comes.

    Returns:
        Accuracies on the test sets after tasks, [t, [R[t][0], ...]], their means, validation accuracies at
        the end and their mean, and whether all weights are finite.
    """
    net = net.to(how.device)
    generator = torch.Generator().manual_seed(seed)
    method = None
    optimizer = how.make(net, 0)
    rows: list[list[Any]] = []
    for index, task in enumerate(tasks):
        data = task.read("train")
        data = (data[0].to(how.device), data[1].to(how.device))
        used = min(how.measured, len(data[0]))
        if make is not None and method is None:
            method = make(net, strength, len(data[0]) / used)
        if index and not how.keep:
            optimizer = how.make(net, index)
        if index and how.precondition:
            assert isinstance(method, linnet.continual.OnlineLaplace)
            method.preconditioner(len(data[0]), how.precondition).attach(optimizer)
        learn(net.select(task.head), data, method, optimizer, how, generator)
        if not all(bool(p.isfinite().all()) for p in net.parameters()):
            return {"rows": rows, "average": None, "validation": None, "finite": False}
        last = index == len(tasks) - 1
        if method is not None and (not last or along is None):
            pick = torch.randperm(len(data[0]), generator=generator)[:used]
            head = task.head
            method.consolidate((data[0][pick], data[1][pick]), prepare=lambda copy, h=head: copy.select(h))
        if last or along is None or index in along:
            rows.append([index, [accuracy(net, seen, "test", how.device) for seen in tasks[: index + 1]]])
            if told is not None:
                told(*rows[-1])
    final = [accuracy(net, seen, "validation", how.device) for seen in tasks]
    return {
        "rows": rows,
        "average": sum(rows[-1][1]) / len(tasks),
        "validation": sum(final) / len(tasks),
        "finite": True,
    }


def tell(task: int, accuracies: list[float]) -> None:
    """A line of progress."""
    mean, first, newest = sum(accuracies) / len(accuracies), accuracies[0], accuracies[-1]
    print(
        f"after {task + 1}: mean {100 * mean:.1f}, first {100 * first:.1f}, newest {100 * newest:.1f}",
        flush=True,
    )


def train_jointly(
    net: Heads, parts: dict[str, Examples], stream: Sequence[Task], how: Training, seed: int
) -> dict[str, Any]:
    """One network trained on all tasks at once, every batch from all of them.

    Args:
        net: The network.
        parts: The images before they are permuted.
        stream: The permutations.
        how: The training; where the rate drops within a task, it does for the last quarter here.
        seed: Seed of the batches.

    Returns:
        As :func:`run_stream`.
    """
    net.to(how.device)
    x, y = parts["train"]
    x, y = x.to(how.device), y.to(how.device)
    orders = torch.stack([task.order for task in stream if task.order is not None]).to(how.device)
    generator = torch.Generator().manual_seed(seed)
    optimizer = how.make(net, 0)
    steps = max(1, how.epochs * len(stream) * (len(x) // how.batch))
    for step in range(steps):
        if how.drop and step == 3 * steps // 4:
            lower(optimizer)
        rows = torch.randint(len(x), (how.batch,), generator=generator)
        picked = torch.randint(len(stream), (how.batch,), generator=generator)
        inputs = x[rows].gather(1, orders[picked]).float() / 255
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), y[rows]).backward()
        optimizer.step()
    tests = [accuracy(net, task, "test", how.device) for task in stream]
    final = [accuracy(net, task, "validation", how.device) for task in stream]
    return {
        "rows": [[len(stream) - 1, tests]], "average": sum(tests) / len(tests),
        "validation": sum(final) / len(final), "finite": True,
    }  # fmt: skip


def best(cells: Sequence[dict[str, Any]], key: str = "strength") -> Any:
    """The value of ``key`` with the best mean validation accuracy; runs that diverged are out."""
    scores: dict[Any, list[float]] = {}
    for cell in cells:
        scores.setdefault(cell[key], []).append(-1.0 if cell["validation"] is None else cell["validation"])
    return max(scores, key=lambda value: sum(scores[value]) / len(scores[value]))
