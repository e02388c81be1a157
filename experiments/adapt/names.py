"""The names of the classes as one more sample of each: what they are worth to a text encoder.

    python -m experiments.adapt.names --sets development more many
    python -m experiments.adapt.names --sets reported

A name such as "negative" is a text of its class that costs no label. ``linnet.adapt`` is fitted with and
without these samples on the same draws, whose features are those that ``depth.py`` keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.adapt.depth import computed, fitted, resampled
from experiments.adapt.kernels import SETS, suited
from experiments.adapt.nested import drawn
from experiments.adapt.tasks import NETWORKS, Network, Task, samples
from experiments.locate import find_data_dir
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.fitting.last_layer import ending_linear
from linnet.nested.adapt import HEADS
from linnet.nested.features import RandomHeads

SHOTS = (2, 5, 20)
# Where a set stores abbreviations; all others store words.
WORDS = {
    "question types": ("abbreviation", "description", "entity", "human being", "location", "number"),
}


def named(network: Network, task: Task, data_dir: str | None) -> Tensor:
    """The features of the names of a task's classes, (C, D + E)."""
    words = WORDS.get(task.name)
    if words is None:
        with np.load(find_data_dir(data_dir) / f"{task.file}.npz", allow_pickle=False) as file:
            words = tuple(str(name).replace("_", " ").replace("-", " ") for name in file["classes"])
    model, prepared = network.load(data_dir)
    x = samples(np.array(words * 2), network, prepared)  # twice: the axis of samples is told by three
    reader = RandomHeads(ending_linear(model, x), HEADS, 0, None)
    return reader.staged(x)[: len(words)]


def compared(kept: Mapping[str, Any], names: Tensor, shots: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Accuracies with and without the names on every draw, and the paired difference with its error."""
    n, width, truth = len(kept["pool"]), int(kept["width"]), kept["test"]
    rows, right = kept["rows"].double(), {"without": [], "with": []}  # type: ignore[var-annotated]
    for seed in seeds:
        at = drawn(kept["pool"], shots, seed)
        own, y = rows[:n][at], kept["pool"][at]
        more = torch.cat([own, names]), torch.cat([y, torch.arange(len(names))])
        for key, (x, labels) in {"without": (own, y), "with": more}.items():
            right[key].append(fitted(x, labels, rows[n:], width)[0].argmax(1) == truth)
    scores = {key: torch.stack(each) for key, each in right.items()}
    return {
        "classes": len(names),
        "accuracy": {key: each.double().mean(1).tolist() for key, each in scores.items()},
        "gain": resampled(scores["with"], scores["without"]),
    }


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a set of tasks, network and number of shots; means over tasks."""
    header = ("tasks", "network", "a class", "tasks", "samples alone", "with the names", "gain", "worst task")
    rows = []
    for part, network, shots in dict.fromkeys((c["set"], c["network"], c["shots"]) for c in cells):
        own = [c for c in cells if (c["set"], c["network"], c["shots"]) == (part, network, shots)]
        means = [
            f"{100 * np.mean([np.mean(c['accuracy'][key]) for c in own]):.1f}" for key in ("without", "with")
        ]
        worst = min(own, key=lambda cell: float(cell["gain"][0]))
        told = f"{worst['gain'][0]:.1f} ± {worst['gain'][1]:.1f} ({worst['task']})"
        gain = with_error(cell["gain"][0] for cell in own)
        rows.append((part, network, str(shots), str(len(own)), *means, gain, told))
    return markdown(header, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked for."""
    options = parser(__doc__ or "", seeds=5)
    options.add_argument("--sets", nargs="+", default=["development", "more", "many"], choices=list(SETS))
    options.add_argument("--networks", nargs="+", default=["minilm6", "minilm"], choices=list(NETWORKS))
    options.add_argument("--shots", nargs="+", type=int, default=list(SHOTS))
    options.add_argument("--features", type=Path, default=Path("runs/experiments/adapt/features"))
    given = options.parse_args(arguments)
    study, cells = Study("adapt/names", given), []
    given.features.mkdir(parents=True, exist_ok=True)
    for part in given.sets:
        for key in given.networks:
            network = NETWORKS[key]
            for task in (one for one in suited(part, network) if one.text):
                read = lru_cache(1)(partial(computed, network, task, given.features, given.data_dir))
                name = lru_cache(1)(partial(named, network, task, given.data_dir))
                fewest = int(read()["pool"].bincount().min())
                for shots in (s for s in given.shots if s <= fewest):
                    where = {"set": part, "network": network.name, "task": task.name, "shots": shots}
                    what = {**where, "seeds": given.seeds}
                    run = partial(compared, shots=shots, seeds=study.seeds)
                    cells.append(study.cell(what, lambda r=read, t=name, run=run: run(r(), t())))
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
