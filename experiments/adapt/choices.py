"""What was tried for the features of earlier layers, each choice changed alone, on development tasks.

    python -m experiments.adapt.choices

Ahead of the ridge probe on the same draws; what a kernel of derivatives adds is printed below the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.adapt.depth import fitted
from experiments.adapt.nested import drawn
from experiments.adapt.tasks import DEVELOPMENT, MANY, NETWORKS, Network, Task, pools, samples, stored
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.fitting.last_layer import ending_linear
from linnet.linear.dual import DualSystem
from linnet.linear.targets import make_targets
from linnet.nested import stages
from linnet.nested.adapt import HEADS
from linnet.nested.features import RandomHeads, kernels_of
from linnet.nested.search import BIAS, WEIGHTS, Kernels, Shares, best_ridge, choose
from linnet.tangent.batch import concatenate

SHOTS = (5, 20)
POOL, TESTED = 400, 500
TASKS = ("spoken digits", "hand signs", "EuroSAT", "flowers 64", "steel defects", "scenes")
TEXTS = ("question types", "film reviews", "news", *(task.name for task in MANY))
READ: dict[str, dict[str, Any]] = {
    "as it is": {},
    "the first layer of each part, not the narrowest": {"_channels": lambda *_: 0},
    "4 layers": {"STAGES": 4},
    "8 layers": {"STAGES": 8},
    "16 layers": {"STAGES": 16},
    "all layers, not the second half": {"SKIPPED": 0.0},
    "the last quarter": {"SKIPPED": 0.75},
    "maps averaged whole": {"GRID": 1},
    "a grid of 4 × 4": {"GRID": 4, "WIDEST": 16384},
}


@contextmanager
def changed(constants: dict[str, Any]) -> Iterator[None]:
    """The constants by which layers are read, others for a while."""
    before = {name: getattr(stages, name) for name in constants}
    for name, value in constants.items():
        setattr(stages, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(stages, name, value)


def data_of(network: Network, task: Task, folder: str | None) -> tuple[Any, Any, Tensor, Tensor]:
    """The network, its inputs of pool and tests together, and the labels of both."""
    model, prepared = network.load(folder)
    found = stored(task, folder)
    pool, test = pools(found, max(POOL, 8 * found.classes), TESTED)
    every = [
        samples(part[at.numpy()], network, prepared)
        for part, at in ((found.train_x, pool), (found.test_x, test))
    ]
    return model, concatenate(every), found.train_y[pool], found.test_y[test]


def read(
    network: Network, task: Task, constants: dict[str, Any], folder: str | None, seeds: Sequence[int]
) -> Any:
    """Points ahead of the ridge probe for every number of shots and draw, by one way to read the network."""
    model, x, y, yt = data_of(network, task, folder)
    with changed(constants):
        reader = RandomHeads(ending_linear(model, x), HEADS, 0, None)
        rows = reader.staged(x)
    n, width = len(y), reader.width
    ahead: dict[str, list[dict[str, float]]] = {}
    for shots in SHOTS:
        if shots > int(y.bincount().min()):
            continue
        ahead[str(shots)] = []
        for seed in seeds:
            at = drawn(y, shots, seed)
            own, test = rows[:n][at], rows[n:]
            right = {
                name: float((fitted(own, y[at], test, width, given)[0].argmax(1) == yt).double().mean())
                for name, given in (("probe", Shares(0.0)), ("read", Shares(None, 1.0)), ("chosen", Shares()))
            }
            unit = [F.normalize(part[:, :width], dim=1) for part in (own, test)]
            for name, outputs in (
                (
                    "linear",
                    fitted(own[:, width:], y[at], test[:, width:], rows.shape[1] - width, Shares(0.0))[0],
                ),
                ("unit length", fitted(unit[0], y[at], unit[1], width, Shares(0.0))[0]),
                ("gaussian", _gaussian(unit[0], y[at], unit[1])),
            ):
                right[name] = float((outputs.argmax(1) == yt).double().mean())
            probe = right.pop("probe")
            ahead[str(shots)].append({name: found - probe for name, found in right.items()})
    return {"ahead": ahead, "width": rows.shape[1] - width}


def _gaussian(rows: Tensor, y: Tensor, test: Tensor) -> Tensor:
    """Outputs of ridge regression by a Gaussian kernel of features, as wide as they are apart in the mean."""
    spread = float(torch.cdist(rows, rows).square().mean())
    own, cross = ((-torch.cdist(part, rows).square() / spread).exp() for part in (rows, test))
    targets = make_targets(y, int(y.max()) + 1, dtype=torch.float64)
    kernels = Kernels(own)
    kernel = kernels.mixed(0.0)[0]
    ridge = best_ridge(kernel, targets, (0.0, 0.0)).ridge
    return (BIAS + cross / kernels.scales[0]) @ DualSystem(kernel, targets.values, ridge).beta


def derived(network: Network, task: Task, folder: str | None, seeds: Sequence[int]) -> Any:
    """Points by which derivatives beside earlier layers are ahead of earlier layers alone."""
    model, x, y, yt = data_of(network, task, folder)
    keep = torch.cat([torch.arange(200), len(y) + torch.arange(200)])
    x, y, yt = {k: v[keep] for k, v in x.items()} if isinstance(x, dict) else x[keep], y[:200], yt[:200]
    reader = RandomHeads(ending_linear(model, x), HEADS, 0, None)
    rows, body, width = reader.staged(x), reader.kernel(x), reader.width
    found = []
    for seed in seeds:
        at = drawn(y, 20 if int(y.bincount().min()) >= 20 else 10, seed)
        targets = make_targets(y[at], int(y.max()) + 1, dtype=torch.float64)
        whole = kernels_of(rows, width)
        inside = Kernels(whole.head[at][:, at], whole.early[at][:, at], body[at][:, at])  # type: ignore[index]
        right = {}
        for name, kernels in (("earlier", Kernels(inside.head, inside.early)), ("both", inside)):
            taken = choose(kernels, targets).taken
            head, early, scale = kernels.scales
            share, weight = taken.earlier, taken.weight
            mixed = (1 - share) / head * whole.head + share / early * whole.early  # type: ignore[operator]
            cross = (BIAS + (1 - weight) * mixed + weight / scale * body)[200:][:, at]
            system = DualSystem(kernels.mixed(weight, share)[0], targets.values, taken.ridge)
            right[name] = float(((cross @ system.beta).argmax(1) == yt).double().mean())
        found.append({**right, "weight": taken.weight})
    return {"draws": found, "tried": len(WEIGHTS)}


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a way of reading, a column a network and number of shots; errors are over tasks."""
    networks = [*dict.fromkeys(cell["network"] for cell in cells if "way" in cell)]
    header = ["read", *(f"{network}, {shots}" for network in networks for shots in SHOTS)]
    rows = []

    def points(way: str, key: str, network: str, shots: int) -> str:
        own = [
            c for c in cells if c.get("way") == way and c["network"] == network and str(shots) in c["ahead"]
        ]
        draws = [cell["ahead"][str(shots)] for cell in own]
        means = [float(np.mean([one[key] for one in each])) for each in draws if key in each[0]]
        return with_error(means, scale=100) if means else "–"

    for way in dict.fromkeys(cell["way"] for cell in cells if "way" in cell):
        rows.append([way, *(points(way, "read", n, s) for n in networks for s in SHOTS)])
    named = (
        ("share chosen by leave-one-out", "chosen"),
        ("linear, without the random ReLU layer", "linear"),
        ("the last layer alone, of length 1", "unit length"),
        ("the same, with a Gaussian kernel", "gaussian"),
    )
    for name, key in named:
        rows.append([name, *(points("as it is", key, n, s) for n in networks for s in SHOTS)])
    return markdown(header, [row for row in rows if {*row[1:]} != {"–"}])


def summary(cells: Sequence[Cell]) -> str:
    """What derivatives add, by network."""
    lines = []
    for network in dict.fromkeys(cell["network"] for cell in cells if "draws" in cell):
        own = [cell for cell in cells if cell["network"] == network and "draws" in cell]
        gains = [float(np.mean([one["both"] - one["earlier"] for one in cell["draws"]])) for cell in own]
        taken = [one["weight"] > 0 for cell in own for one in cell["draws"]]
        lines.append(
            f"derivatives, {network}: {with_error(gains, scale=100)} points over {len(own)} tasks "
            f"({100 * min(gains):.1f} to {100 * max(gains):.1f}), taken in {sum(taken)} of {len(taken)} draws"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is asked for."""
    arguments = parser(__doc__ or "", seeds=3)
    arguments.add_argument("--networks", nargs="+", default=["lite0", "minilm6"], choices=list(NETWORKS))
    arguments.add_argument("--derivatives", nargs="*", default=["resnet20"], choices=list(NETWORKS))
    given = arguments.parse_args()
    study, cells = Study("adapt/choices", given), []
    tasks = {task.name: task for task in (*DEVELOPMENT, *MANY)}
    for key in given.networks:
        network = NETWORKS[key]
        for way, constants in READ.items():
            for name in TEXTS if network.text else TASKS:
                what = {"network": network.name, "task": name, "way": way, "seeds": given.seeds}
                run = (network, tasks[name], constants, given.data_dir, study.seeds)
                cells.append(study.cell(what, lambda run=run: read(*run)))
    for key in given.derivatives:
        network = NETWORKS[key]
        for name in TEXTS if network.text else TASKS:
            what = {"network": network.name, "task": name, "derivatives": True, "seeds": given.seeds}
            own = (network, tasks[name], given.data_dir, study.seeds)
            cells.append(study.cell(what, lambda own=own: derived(*own)))
    study.publish(table(cells), cells)
    print(summary(cells))


if __name__ == "__main__":
    main()
