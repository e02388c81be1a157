"""Which of several networks ``linnet.adapt([net_a, net_b, ...], data)`` takes, and what that loses.

    python -m experiments.adapt.zoo --threads 1

Achille et al. (section 5) name a choice among many pretrained networks as a way for linearization to reach
further. ``linnet.adapt`` fits each and takes the one with the least squared error on samples left out of its
fit. Here these errors are computed on the draws of ``experiments.adapt.depth``, whose cells have the
accuracies on all test samples: that of the network taken is compared with the best network of the draw in
hindsight, with the network that is best on average over the other tasks (what a user who has seen them would
take), and with a network taken at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.adapt.depth import MOST
from experiments.adapt.nested import drawn
from experiments.adapt.tasks import NETWORKS, REPORTED, Network, Task, pools, samples, stored
from experiments.pages import RESULTS
from experiments.study import Cell, Study, parser, read_cells
from experiments.tables import markdown, with_error
from linnet.files import load
from linnet.fitting.last_layer import ending_linear
from linnet.linear.targets import make_targets
from linnet.nested.adapt import HEADS
from linnet.nested.features import RandomHeads, kernels_of
from linnet.nested.search import choose

KINDS = {
    "images": ("lite0", "mobilenet", "resnet20"),
    "texts": ("minilm6", "minilm"),
}
Kept = tuple[Tensor, Tensor, int]  # rows of features (N, D), zero where they were not needed, labels, width


def features(network: Network, task: Task, given: Any, shots: Sequence[int], seeds: Sequence[int]) -> Kept:
    """Features of the pool's samples that some draw has, or of all where ``depth.py`` has kept them."""
    name = f"{network.name} {task.name}".replace(" ", "-").lower()
    if (given.features / f"{name}.safetensors").exists():
        kept = load(given.features / f"{name}.safetensors", name)
        return kept["rows"][: len(kept["pool"])], kept["pool"], int(kept["width"])
    model, prepared = network.load(given.data_dir)
    found = stored(task, given.data_dir)
    pool, _ = pools(found, MOST, 0)
    y = found.train_y[pool]
    needed = torch.cat([drawn(y, count, seed) for count in shots for seed in seeds]).unique()
    x = found.train_x[pool[needed].numpy()]
    reader = RandomHeads(ending_linear(model, samples(x[:8], network, prepared)), HEADS, 0, None)
    parts = np.array_split(np.arange(len(x)), math.ceil(len(x) / 256))
    computed = torch.cat([reader.staged(samples(x[at], network, prepared)).float() for at in parts])
    rows = torch.zeros(len(y), computed.shape[1])
    rows[needed] = computed
    return rows, y, int(reader.width)


def left_out(kept: Kept, shots: int, seeds: Sequence[int], told: Mapping[str, Any]) -> dict[str, Any]:
    """Mean squared error of left-out samples on each draw, beside the accuracies that are known."""
    rows, labels, width = kept
    errors, shares = [], []
    for seed in seeds:
        at = drawn(labels, shots, seed)
        targets = make_targets(labels[at], int(labels.max()) + 1, dtype=torch.float32)
        taken = choose(kernels_of(rows[at].double(), width), targets).taken
        errors.append(taken.score)
        shares.append(taken.earlier)
    return {"left out": errors, "accuracy": told["accuracy"]["adapt"][: len(seeds)], "earlier": shares}


def _left_out(
    read: Callable[[], Kept], shots: int, seeds: Sequence[int], told: Mapping[str, Any]
) -> dict[str, Any]:
    """One cell."""
    return left_out(read(), shots, seeds, told)


def choices(cells: Sequence[Cell], kind: str, shots: int) -> list[dict[str, Any]]:
    """Accuracies of each choice on every task that all networks have, means over draws."""
    own = [cell for cell in cells if (cell["kind"], cell["shots"]) == (kind, shots)]
    networks = [*dict.fromkeys(cell["network"] for cell in own)]
    grid: dict[str, np.ndarray] = {}
    judged: dict[str, np.ndarray] = {}
    for task in dict.fromkeys(cell["task"] for cell in own):
        of = {cell["network"]: cell for cell in own if cell["task"] == task}
        if len(of) < len(networks):  # tasks that all networks have
            continue
        grid[task] = 100 * np.array([of[name]["accuracy"] for name in networks])
        judged[task] = np.array([of[name]["left out"] for name in networks])
    found = []
    for task, accuracies in grid.items():  # (networks, draws)
        taken = judged[task].argmin(0)
        mine = accuracies[taken, np.arange(len(taken))]
        others = np.mean([a.mean(1) for name, a in grid.items() if name != task], axis=0)
        fixed = accuracies[int(others.argmax())]
        found.append({
            "task": task, "taken": float(mine.mean()), "best": float(accuracies.max(0).mean()),
            "fixed": float(fixed.mean()), "random": float(accuracies.mean()),
            "right": float((taken == accuracies.argmax(0)).mean()),
            "networks": [networks[i] for i in taken],
        })  # fmt: skip
    return found


def table(cells: Sequence[Cell]) -> str:
    """Markdown: means over tasks, a line for each kind of samples and number of them."""
    rows = []
    for kind, shots in dict.fromkeys((cell["kind"], cell["shots"]) for cell in cells):
        own = choices(cells, kind, shots)
        count = len({cell["network"] for cell in cells if cell["kind"] == kind})
        rows.append([
            f"{kind}, {count} networks, {shots} a class", len(own),
            *(f"{np.mean([one[key] for one in own]):.1f}" for key in ("taken", "best", "fixed", "random")),
            f"{100 * np.mean([one['right'] for one in own]):.0f}",
            *(with_error(one["taken"] - one[key] for one in own) for key in ("best", "fixed", "random")),
        ])  # fmt: skip
    header = ["", "tasks", "taken by left-out error", "best in hindsight", "best over the other tasks",
              "at random", "best is taken, % of draws", "taken less best", "less best over the others",
              "less at random"]  # fmt: skip
    return markdown(header, rows)


def by_task(cells: Sequence[Cell], shots: int = 20) -> str:
    """Markdown: a line for each task, accuracies of all networks and of the one taken."""
    rows = []
    for kind in dict.fromkeys(cell["kind"] for cell in cells):
        for one in choices(cells, kind, shots):
            often = {name: one["networks"].count(name) for name in dict.fromkeys(one["networks"])}
            rows.append([
                one["task"], ", ".join(f"{name} ({times})" for name, times in often.items()),
                *(f"{one[key]:.1f}" for key in ("taken", "best", "fixed", "random")),
            ])  # fmt: skip
    header = ["task", "taken (draws)", "its accuracy, %", "best", "best over the other tasks", "at random"]
    return markdown(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=5)
    options.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    options.add_argument("--tasks", nargs="+", default=None, help="names of tasks (default: all)")
    options.add_argument("--shots", nargs="+", type=int, default=[5, 20])
    options.add_argument("--features", type=Path, default=Path("runs/experiments/adapt/features"))
    options.add_argument("--depth", type=Path, default=RESULTS / "adapt" / "depth-reported.json")
    given = options.parse_args(argv)
    study, cells = Study("adapt/zoo", given), []
    known = read_cells(given.depth)
    for kind in given.kinds:
        for key in KINDS[kind]:
            network = NETWORKS[key]
            for task in REPORTED:
                if task.text != network.text or (given.tasks and task.name not in given.tasks):
                    continue
                read: Callable[[], Kept] = cache(
                    partial(features, network, task, given, given.shots, study.seeds)
                )
                for shots in given.shots:
                    where = {"network": network.name, "task": task.name, "shots": shots}
                    (told,) = (cell for cell in known if where.items() <= cell.items())
                    run_of = partial(_left_out, read, shots, study.seeds, told)
                    cells.append(study.cell({"kind": kind, **where, "seeds": given.seeds}, run_of))
    study.publish(f"{table(cells)}\n\n{by_task(cells, given.shots[-1])}", cells)


if __name__ == "__main__":
    main()
