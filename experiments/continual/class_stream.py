"""Steps of new classes behind a kept encoder: closed forms that meet every sample once.

There are ten steps, or nine where there are ten classes, the first with two.
``linnet.adapt`` is fitted to the first classes and updated with the others. Beside it are the ridge
regression of random ReLU features by a Gram matrix with a ridge chosen on held-out fifths, as in RanPAC
(McDonnell et al., NeurIPS 2023), the same by recursive least squares at a fixed ridge, as in ACIL (Zhuang et
al., NeurIPS 2022), the nearest class mean, and one fit of all samples at once. All see the same features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.adapt.encoded import IMAGES, TEXTS, encoded
from experiments.adapt.tasks import Network, Task
from experiments.selection.criteria import find
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet.nested.nested_fit import NestedFit

SETS: dict[str, tuple[Network, Task]] = {
    "CIFAR-100": (IMAGES, Task("CIFAR-100", "cifar100_5k_2k")),
    "bank requests": (TEXTS, find("bank requests")),
    "traffic signs": (IMAGES, find("traffic signs")),
    "scenes": (IMAGES, find("scenes")),
    "hand signs": (IMAGES, find("hand signs")),
    "EuroSAT": (IMAGES, find("EuroSAT")),
}
STEPS, SHOTS = 10, 20  # steps, samples of a class
COMPUTED, TESTED = 5000, 2000
WIDTH = 2000  # random ReLU features
RIDGES = tuple(10.0**power for power in range(-8, 9))  # as RanPAC has them
HELD = 5  # one sample in so many is held out
GONE = 2  # the step that is forgotten, the third

Step = tuple[Tensor, Tensor]  # features (N, D), classes in the order of their arrival (N,)


class Learner(Protocol):
    """What learns a stream of classes."""

    def learn(self, phi: Tensor, y: Tensor) -> None:
        """Take in a step."""

    def outputs(self, phi: Tensor) -> Tensor:
        """Outputs (T, C) for the classes so far."""

    def tensors(self) -> list[Tensor]:
        """What is kept from one step to the next."""


# -- learners --------------------------------------------------------------------------------------


class Expansion(nn.Module):
    """A random ReLU layer.

    Args:
        inputs: D.
        seed: Seed of its weights.
    """

    def __init__(self, inputs: int, seed: int) -> None:
        super().__init__()
        draws = torch.randn(inputs, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.register_buffer("draws", draws)

    def forward(self, phi: Tensor) -> Tensor:
        """(N, D) to (N, WIDTH)."""
        return (phi @ self.draws).relu()


class Adapted:
    """``linnet.adapt``, updated.

    Args:
        encoder: What the features go through.
        width: Features behind it.
    """

    def __init__(self, encoder: nn.Module, width: int) -> None:
        self.encoder = nn.Sequential(encoder, nn.Linear(width, 2)).double()
        self.fit: NestedFit | None = None

    def learn(self, phi: Tensor, y: Tensor) -> None:
        """Fit the first step, update with the others."""
        if self.fit is None:
            self.fit = linnet.adapt(self.encoder, (phi, y))
        else:
            self.fit = self.fit.update((phi, y))

    def outputs(self, phi: Tensor) -> Tensor:
        """Of the fit."""
        assert self.fit is not None
        return self.fit.predict(phi)

    def tensors(self) -> list[Tensor]:
        """The samples, their features, the kernel, its factor and the solution."""
        assert self.fit is not None
        fit, dual = self.fit, self.fit.system.dual
        rows = [one for one in fit.system.problem.examples.rows if isinstance(one, Tensor)]
        return [fit.x, *rows, dual.kernel, dual.factor, dual.beta, fit.targets]


class Gram:
    """Ridge regression of random ReLU features by their Gram matrix, its ridge chosen on held-out samples.

    Four in five samples and the fifth have sums of their own, so that the held-out squared error over all
    that was seen is known without any sample.

    Args:
        encoder: The random layer.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self.encoder, self.ridge = encoder, math.nan
        self.sums: list[tuple[Tensor, Tensor]] = []  # HᵀH and HᵀY of both parts
        self.weights = torch.zeros(0)

    def learn(self, phi: Tensor, y: Tensor) -> None:
        """Add to the sums, choose the ridge, solve."""
        h, c = self.encoder(phi), int(y.max()) + 1
        t = F.one_hot(y, c).to(h)
        parts = torch.arange(len(y)) % HELD == HELD - 1
        found = []
        for k, part in enumerate((~parts, parts)):
            square, product = h[part].T @ h[part], h[part].T @ t[part]
            if self.sums:
                before, with_targets = self.sums[k]
                square += before
                product[:, : with_targets.shape[1]] += with_targets
            found.append((square, product))
        self.sums = found
        (square, product), (held, with_held) = found
        self.ridge = least(
            lambda ridge: held_out(solved(square, product, ridge), held, with_held), self.ridge
        )
        self.weights = solved(square + held, product + with_held, self.ridge)

    def outputs(self, phi: Tensor) -> Tensor:
        """H W."""
        return self.encoder(phi) @ self.weights

    def tensors(self) -> list[Tensor]:
        """The sums, the random layer and the weights."""
        return [*(one for pair in self.sums for one in pair), *self.encoder.buffers(), self.weights]


class Recursive:
    """The same at a fixed ridge by recursive least squares; the ridge of the first step's held-out samples.

    Args:
        encoder: The random layer.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self.encoder, self.first = encoder, Gram(encoder)
        self.inverse = self.weights = torch.zeros(0)

    def learn(self, phi: Tensor, y: Tensor) -> None:
        """Woodbury's identity."""
        h, c = self.encoder(phi), int(y.max()) + 1
        t = F.one_hot(y, c).to(h)
        if not self.inverse.numel():
            self.first.learn(phi, y)
            self.inverse = torch.eye(WIDTH, dtype=h.dtype) / self.first.ridge
            self.weights = h.new_zeros(WIDTH, 0)
            self.first.sums = []
        half = self.inverse @ h.T
        small = torch.eye(len(h), dtype=h.dtype) + h @ half
        self.inverse = self.inverse - half @ torch.linalg.solve(small, half.T)
        grown = F.pad(self.weights, (0, c - self.weights.shape[1]))
        self.weights = grown + self.inverse @ (h.T @ (t - h @ grown))

    def outputs(self, phi: Tensor) -> Tensor:
        """H W."""
        return self.encoder(phi) @ self.weights

    def tensors(self) -> list[Tensor]:
        """The inverse, the random layer and the weights."""
        return [self.inverse, *self.encoder.buffers(), self.weights]


class Means:
    """The class of the mean with the largest cosine."""

    def __init__(self) -> None:
        self.means = torch.zeros(0)

    def learn(self, phi: Tensor, y: Tensor) -> None:
        """Means of new classes."""
        new = torch.stack([phi[y == label].mean(0) for label in y.unique()])
        self.means = torch.cat([self.means, new]) if len(self.means) else new

    def outputs(self, phi: Tensor) -> Tensor:
        """Cosines."""
        return F.normalize(phi) @ F.normalize(self.means).T

    def tensors(self) -> list[Tensor]:
        """The means."""
        return [self.means]


def held_out(weights: Tensor, square: Tensor, product: Tensor) -> float:
    """‖H W − Y‖² less ‖Y‖² by the sums of the held-out samples."""
    error = float((weights * (square @ weights)).sum() - 2 * (weights * product).sum())
    return math.inf if math.isnan(error) else error


def least(error: Callable[[float], float], start: float) -> float:
    """The ridge of least error: of all, or where one was found before of those downhill from it."""
    if math.isnan(start):
        return min(RIDGES, key=error)
    known = cache(error)
    at = RIDGES.index(start)
    while True:
        near = range(max(at - 1, 0), min(at + 2, len(RIDGES)))
        best = min(near, key=lambda place: known(RIDGES[place]))
        if best == at:
            return RIDGES[at]
        at = best


def solved(square: Tensor, product: Tensor, ridge: float) -> Tensor:
    """(HᵀH + ridge I)⁻¹ HᵀY; not a number where rounding lets no ridge be that small."""
    moved = square.clone()
    moved.diagonal().add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(moved)
    return product * math.nan if failed else torch.cholesky_solve(product, factor)


LEARNERS = {
    "linnet": lambda width, seed: Adapted(nn.Identity(), width),
    "linnet, random ReLU features": lambda width, seed: Adapted(Expansion(width, seed), WIDTH),
    "Gram matrix, random ReLU features (RanPAC)": lambda width, seed: Gram(Expansion(width, seed)),
    "recursive least squares, random ReLU features (ACIL)": lambda width, seed: Recursive(
        Expansion(width, seed)
    ),
    "nearest class mean": lambda width, seed: Means(),
}
ORDERS = {name: make for name, make in LEARNERS.items() if name.startswith("linnet")}


# -- streams ---------------------------------------------------------------------------------------


def streamed(data: dict[str, Tensor], seed: int) -> tuple[list[Step], Step]:
    """The steps of a drawn order of classes and of drawn samples, and the test samples."""
    generator = torch.Generator().manual_seed(seed)
    phi, y = data["pool"], data["pool labels"]
    classes = int(y.max()) + 1
    order = torch.randperm(classes, generator=generator)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(classes)
    shuffled = torch.randperm(len(y), generator=generator)
    steps = []
    for part in torch.arange(classes).tensor_split(min(STEPS, classes - 1)):  # the first of two or more
        own = torch.cat([shuffled[y[shuffled] == order[label]][:SHOTS] for label in part])
        own = own[torch.randperm(len(own), generator=generator)]
        steps.append((phi[own], rank[y[own]]))
    return steps, (data["test"], rank[data["test labels"]])


def right(outputs: Tensor, y: Tensor) -> float:
    """Per cent of right classes."""
    return 100 * float((outputs.argmax(1) == y).double().mean())


def learned(learner: Learner, steps: list[Step], test: Step) -> dict[str, Any]:
    """Accuracy over the classes so far after every step, in percent, seconds of a step and bytes kept."""
    accuracy, seconds = [], []
    for phi, y in steps:
        begin = time.process_time()
        learner.learn(phi, y)
        seen = test[1] <= int(y.max())
        outputs = learner.outputs(test[0][seen])
        seconds.append(time.process_time() - begin)
        accuracy.append(right(outputs, test[1][seen]))
    kept = {one.data_ptr(): one.numel() * one.element_size() for one in learner.tensors()}
    ridge = getattr(learner, "ridge", None)
    return {"accuracy": accuracy, "seconds of a step": seconds, "bytes": sum(kept.values()), "ridge": ridge}


def differences(make: Any, width: int, steps: list[Step], test: Tensor, seed: int) -> dict[str, float]:
    """Between orders of the steps after the first, and between forgetting a step and never seeing it."""
    first, *others = steps
    one, other, without = (make(width, seed) for _ in range(3))
    for phi, y in steps:
        one.learn(phi, y)
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed)).tolist()
    columns = torch.cat([first[1].unique(), *(others[k][1].unique() for k in order)])
    for phi, y in renumbered([first, *(others[k] for k in order)]):
        other.learn(phi, y)
    outputs = one.outputs(test)
    between = float((outputs[:, columns] - other.outputs(test)).abs().max())

    left = [step for k, step in enumerate(steps) if k != GONE]
    for phi, y in renumbered(left):
        without.learn(phi, y)
    forgotten = one.fit.forget(classes=steps[GONE][1].unique())
    kept = torch.cat([y.unique() for _, y in left])
    never = float((forgotten.predict(test)[:, kept] - without.outputs(test)).abs().max())
    lost = forgotten.predictive(test[:100]).probs[:, steps[GONE][1].unique()]
    return {
        "orders": between, "forgotten": never, "outputs": float(outputs.square().mean().sqrt()),
        "probability of the forgotten": float(lost.max()),
    }  # fmt: skip


def renumbered(steps: list[Step]) -> Iterator[Step]:
    """The steps with classes numbered as they come."""
    seen = 0
    for phi, y in steps:
        labels = y.unique()
        yield phi, seen + torch.searchsorted(labels, y)
        seen += len(labels)


# -- tables ----------------------------------------------------------------------------------------


def known(cells: list[Cell]) -> list[str]:
    """The sets of some cells."""
    return [name for name in SETS if any(cell["set"] == name for cell in cells)]


def table(cells: list[Cell]) -> str:
    """Markdown: a row a set and method."""
    rows = []
    for name in known(cells):
        for role, methods in (("stream", LEARNERS), ("joint", ORDERS)):
            for method in methods:
                where = {"set": name, "method": method, "role": role}
                curves = chosen(cells, "accuracy", **where)
                seconds = [sum(one) / len(one) for one in chosen(cells, "seconds of a step", **where)]
                size = max(chosen(cells, "bytes", **where)) / 1e6
                whole = role == "joint"
                average = "–" if whole else with_error(sum(one) / len(one) for one in curves)
                rows.append([
                    f"{name}, {method}{', all at once' if whole else ''}", average,
                    with_error(one[-1] for one in curves), f"{size:.1f}",
                    f"{sum(seconds) / len(seconds):.2f}",
                ])  # fmt: skip
    header = ["classes and method", "average incremental accuracy, %", "final accuracy, %", "MB kept"]
    return markdown([*header, "seconds of a step"], rows)


def exactness(cells: list[Cell]) -> str:
    """Markdown: a row a set and features; the largest difference over draws."""
    rows = []
    for name in known(cells):
        for method in ORDERS:
            where = {"set": name, "method": method, "role": "exactness"}
            size = chosen(cells, "outputs", **where)
            worst = [f"{max(chosen(cells, key, **where)):.1e}" for key in ("orders", "forgotten")]
            rows.append([f"{name}, {method}", *worst, f"{sum(size) / len(size):.1f}"])
    return markdown(
        ["largest difference of outputs", "another order", "forgetting and never seeing", "size of outputs"],
        rows,
    )


@lru_cache(maxsize=1)
def kept(name: str, folder: Path, data_dir: str | None) -> dict[str, Tensor]:
    """Features and labels of a set."""
    return encoded(*SETS[name], COMPUTED, TESTED, folder, data_dir)


def main() -> None:
    """Run the study."""
    make = parser(__doc__ or "")
    make.add_argument("--features", type=Path, default=Path("runs/features"), help="where features are kept")
    make.add_argument("--only", nargs="*", default=[*SETS], help="some of the sets")
    arguments = make.parse_args()
    study, cells = Study("continual/class_stream", arguments), []
    for seed in study.seeds:
        for name in arguments.only:

            def compute(role: str, method: str, name: str = name, seed: int = seed) -> dict[str, Any]:
                data = kept(name, arguments.features, arguments.data_dir)
                steps, test = streamed(data, seed)
                width = data["pool"].shape[1]
                if role == "exactness":
                    return differences(ORDERS[method], width, steps, test[0], seed)
                if role == "joint":
                    steps = [(torch.cat([x for x, _ in steps]), torch.cat([y for _, y in steps]))]
                return learned(LEARNERS[method](width, seed), steps, test)

            for role, methods in (("stream", LEARNERS), ("joint", ORDERS), ("exactness", ORDERS)):
                for method in methods:
                    what = {"set": name, "method": method, "role": role, "seed": seed, "shots": SHOTS}
                    run = partial(compute, role, method)
                    cells.append(study.cell(what, run))
    study.publish(f"{table(cells)}\n\n{exactness(cells)}", cells)


if __name__ == "__main__":
    main()
