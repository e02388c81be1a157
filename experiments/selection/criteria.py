"""Which examples to label next: the criteria of ``linnet.audit.select`` and others, by accuracy over labels.

Features of a pretrained encoder are classified by ``linnet.adapt``, fitted again after every batch. The
criteria of ``select`` are read off its posterior and see no label; "entropy" and "margin" are of its
probabilities; "BADGE" (Ash et al., ICLR 2020) is k-means++ on the gradients of the last layer for the class
predicted, (p - y) φᵀ; "coreset" (Sener and Savarese, ICLR 2018) takes the example whose features are farthest
from all labeled ones; both also with features of length one. The default of ``select`` is chosen on
development tasks (``--tasks development``), and what was found there is checked on others (``--tasks
reported``).
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.adapt.encoded import encoded
from experiments.adapt.tasks import DEVELOPMENT, NETWORKS, REPORTED, Network, Task
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, mean_and_error
from linnet.audit.selection import CRITERIA
from linnet.nested.nested_fit import NestedFit
from linnet.tangent.batch import hash_examples

TASKS = {
    "development": ("EuroSAT", "spoken digits", "scenes", "Fashion-MNIST", "question types", "news"),
    "reported": (
        "food", "aerial views", "trash", "groceries", "Kannada digits", "traffic signs", "emotions",
        "subjectivity",
    ),
}  # fmt: skip
COMPUTED, POOL, TESTED = 1000, 500, 1000  # samples to draw a pool from, in a pool, tested
FIRST, BATCH, MOST = 20, 10, 100  # labels at the start, of a batch, at the end
SHOWN = (50, 100)
RIVALS = ("entropy", "margin", "BADGE", "BADGE, unit length", "coreset", "coreset, unit length")
METHODS = ("random", *CRITERIA, *RIVALS)
# What is run on reported tasks. Where one kernel serves all outputs, "uncertainty" chooses as "information".
COMPARED = tuple(name for name in METHODS if name not in ("uncertainty", "BADGE", "coreset"))


# -- choices ---------------------------------------------------------------------------------------


def least_certain(p: Tensor, criterion: str, n: int) -> Tensor:
    """The examples of largest entropy or smallest margin of their probabilities (T, C)."""
    if criterion == "entropy":
        return torch.special.entr(p).sum(1).topk(n).indices
    two = p.topk(2, dim=1).values
    return (two[:, 1] - two[:, 0]).topk(n).indices


def badge(p: Tensor, phi: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """k-means++ on the gradients (p - y) φᵀ of predicted classes, from their scalar products alone."""
    # p (T, C), phi (T, D)
    residual = p - F.one_hot(p.argmax(1), p.shape[1])
    own = residual.square().sum(1) * phi.square().sum(1)
    chosen = [int(own.argmax())]
    nearest = torch.full_like(own, torch.inf)
    while True:
        j = chosen[-1]
        product = (residual @ residual[j]) * (phi @ phi[j])
        nearest = torch.minimum(nearest, (own + own[j] - 2 * product).clamp_min(0))
        nearest[chosen] = 0
        if len(chosen) == n:
            return torch.tensor(chosen)
        weights = (
            nearest if nearest.sum() > 0 else torch.ones_like(own).index_fill(0, torch.tensor(chosen), 0)
        )
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))


def coreset(phi: Tensor, labeled: Tensor, n: int) -> Tensor:
    """Greedy k-center: the example farthest from the labeled ones and from those chosen before, n times."""
    nearest, chosen = torch.cdist(phi, labeled).min(1).values, []
    for _ in range(n):
        chosen.append(int(nearest.argmax()))
        nearest = torch.minimum(nearest, torch.cdist(phi, phi[chosen[-1:]])[:, 0])
        nearest[chosen] = -1
    return torch.tensor(chosen)


def selected(
    method: str, fit: NestedFit, labeled: Tensor, pool: Tensor, n: int, generator: torch.Generator
) -> Tensor:
    """Positions in the pool of the n examples that a method has labeled next."""
    if method == "random":
        return torch.randperm(len(pool), generator=generator)[:n]
    if method in CRITERIA:
        return linnet.audit.select(fit, pool, n, method).indices
    name, _, unit = method.partition(", ")
    rows, others = (F.normalize(part) if unit else part for part in (pool, labeled))
    if name == "coreset":
        return coreset(rows, others, n)
    p = fit.predictive(pool).probs
    return badge(p, rows, n, generator) if name == "BADGE" else least_certain(p, name, n)


# -- a run -----------------------------------------------------------------------------------------


def curve(kept: dict[str, Tensor], method: str, seed: int) -> dict[str, Any]:
    """Accuracy after every batch of labels, in percent, and the CPU seconds of a choice."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(kept["pool labels"]), generator=generator)
    names, first = hash_examples(kept["pool"]), dict[Any, int]()
    for i in order.tolist():
        first.setdefault(names[i], i)  # a sample that the set holds twice is taken once
    order = torch.tensor([*first.values()][:POOL])
    phi, y = kept["pool"][order], kept["pool labels"][order]
    labeled = list(range(FIRST))
    head = nn.Sequential(nn.Identity(), nn.Linear(phi.shape[1], 2)).double()  # a linear layer to replace
    accuracy, seconds = [], 0.0
    while True:
        fit = linnet.adapt(head, (phi[labeled], y[labeled]))
        right = fit.predict(kept["test"]).argmax(1) == kept["test labels"]
        accuracy.append(100 * float(right.double().mean()))
        if len(labeled) >= MOST:
            break
        rest = torch.ones(len(y), dtype=torch.bool)
        rest[labeled] = False
        left = rest.nonzero()[:, 0]
        begin = time.process_time()
        chosen = selected(method, fit, phi[labeled], phi[left], BATCH, generator)
        seconds += time.process_time() - begin
        labeled += left[chosen].tolist()
    return {
        "accuracy": accuracy,
        "a choice": seconds / (len(accuracy) - 1),
        "classes found": len(y[labeled].unique()),
        "classes": len(y.unique()),
    }


# -- tables ----------------------------------------------------------------------------------------


def figures(cell: Cell) -> list[float]:
    """Accuracy at 50 and at 100 labels, and the mean over the curve."""
    found = [cell["accuracy"][(labels - FIRST) // BATCH] for labels in SHOWN]
    steps = cell["accuracy"]
    area = (sum(steps) - (steps[0] + steps[-1]) / 2) / (len(steps) - 1)
    return [*found, area]


def compared(cells: list[Cell]) -> list[str]:
    """The methods that were run."""
    run = {cell["method"] for cell in cells}
    return [method for method in METHODS if method in run]


def by_task(cells: list[Cell], method: str) -> dict[str, list[list[float]]]:
    """The figures of every draw of a method, by task."""
    own: dict[str, list[list[float]]] = {}
    for cell in sorted(cells, key=lambda cell: int(cell["seed"])):
        if cell["method"] == method:
            own.setdefault(cell["task"], []).append(figures(cell))
    return own


def ahead(cells: list[Cell], method: str) -> list[list[float]]:
    """By how much a method is ahead of random choices on each task, as the mean over draws, (tasks, 3)."""
    base, own = by_task(cells, "random"), by_task(cells, method)
    return [
        [
            sum(a[i] - b[i] for a, b in zip(own[task], base[task], strict=True)) / len(own[task])
            for i in range(3)
        ]
        for task in base
    ]


def summary(cells: list[Cell]) -> str:
    """Markdown: a row a method, its figures and what it is ahead of random choices, over tasks."""
    rows = []
    for method in compared(cells):
        own = [
            [sum(one) / len(draws) for one in zip(*draws, strict=True)]
            for draws in by_task(cells, method).values()
        ]
        means = [f"{sum(column) / len(own):.1f}" for column in zip(*own, strict=True)]
        gains = ["–"] * 3
        if method != "random":
            gains = [_signed(*mean_and_error(column)) for column in zip(*ahead(cells, method), strict=True)]
        seconds = [cell["a choice"] for cell in cells if cell["method"] == method]
        columns = [text for pair in zip(means, gains, strict=True) for text in pair]
        rows.append([method, *columns, f"{sum(seconds) / len(seconds):.3f}"])
    header = ["choice"]
    for name in (*(f"{labels} labels" for labels in SHOWN), "area"):
        header += [f"{name}, %", "ahead of random"]
    return markdown([*header, "seconds"], rows)


def _signed(mean: float, error: float) -> str:
    """A difference with its sign."""
    return f"{mean:+.1f} ± {error:.1f}".replace("-", "−")


def tasks(cells: list[Cell]) -> str:
    """Markdown: a row a task, the area of random choices and what every method is ahead of it."""
    rows = []
    for task, draws in by_task(cells, "random").items():
        row = [task, f"{sum(one[2] for one in draws) / len(draws):.1f}"]
        for method in compared(cells)[1:]:
            own = by_task(cells, method)[task]
            gains = [a[2] - b[2] for a, b in zip(own, draws, strict=True)]
            row.append(_signed(*mean_and_error(gains)))
        rows.append(row)
    return markdown(["area, points ahead of random", *compared(cells)], rows)


def table(cells: list[Cell]) -> str:
    """Both tables."""
    return f"{summary(cells)}\n\n{tasks(cells)}"


@lru_cache(maxsize=1)
def kept(name: str, folder: Path, data_dir: str | None) -> dict[str, Tensor]:
    """Features and labels of a task."""
    return encoded(network_of(find(name)), find(name), COMPUTED, TESTED, folder, data_dir)


def find(name: str) -> Task:
    """A task by its name."""
    return next(task for task in (*DEVELOPMENT, *REPORTED) if task.name == name)


def network_of(task: Task) -> Network:
    """The encoder of a task's samples."""
    return NETWORKS["minilm" if task.text else "lite"]


def main() -> None:
    """Run the study."""
    make = parser(__doc__ or "", seeds=5)
    make.add_argument("--tasks", choices=[*TASKS], default="development", help="which (default %(default)s)")
    make.add_argument("--features", type=Path, default=Path("runs/features"), help="where features are kept")
    make.add_argument("--only", nargs="*", default=None, help="some of the tasks")
    arguments = make.parse_args()
    study, cells = Study(f"selection/criteria-{arguments.tasks}", arguments), []
    for seed in study.seeds:
        for name in arguments.only or TASKS[arguments.tasks]:
            network = network_of(find(name)).name
            for method in METHODS if arguments.tasks == "development" else COMPARED:
                what = {"network": network, "task": name, "method": method, "seed": seed}

                def compute(name: str = name, method: str = method, seed: int = seed) -> dict[str, Any]:
                    return curve(kept(name, arguments.features, arguments.data_dir), method, seed)

                cells.append(study.cell(what, compute))
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
