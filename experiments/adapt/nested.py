"""Derivatives of the lower layers beside a linear probe, on draws from cached kernels of networks and tasks.

``python -m experiments.adapt.kernels --out FOLDER`` first, then
``python -m experiments.adapt.nested --kernels FOLDER --sets development``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from torch import Tensor

from experiments.adapt.kernels import SETS, suited
from experiments.adapt.tasks import NETWORKS
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, mean_and_error, with_error
from linnet.files import load
from linnet.linear.targets import make_targets
from linnet.nested.search import BIAS, Shares, choose
from linnet.nested.search import Kernels as Parts

SHOTS = (2, 5, 10, 20, 50)
Kernels = tuple[dict[str, Tensor], dict[str, Any]]


def drawn(labels: Tensor, shots: int, seed: int) -> Tensor:
    """Positions of ``shots`` images of every class."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.cat([order[labels[order] == label][:shots] for label in labels.unique()])


def compared(kernels: Mapping[str, Tensor], shots: int, seed: int) -> dict[str, float]:
    """Test accuracies of the probe, of what ``linnet.adapt`` takes and of the lower layers alone.

    Args:
        kernels: What ``experiments.adapt.kernels`` stored.
        shots: Images of every class.
        seed: Seed of the draw.

    Returns:
        Accuracies, the weight of the lower layers, and the accuracy of the best weight by hindsight.
    """
    pool, test = kernels["pool"], kernels["test"]
    n, at = len(pool), drawn(pool, shots, seed)
    classes = int(max(pool.max(), test.max())) + 1
    phi = kernels["features"].double()
    phi = phi - phi[at].mean(0)
    head, body = phi @ phi.T, (kernels["early"] + kernels["late"]).double()
    targets = make_targets(pool[at], classes, varied=False)
    inside = Parts(head[at][:, at], body=body[at][:, at])

    def accuracy(weight: float, ridge: float) -> float:
        kernel = BIAS + (1 - weight) / inside.scales[0] * head + weight / inside.scales[2] * body
        square = kernel[at][:, at] + ridge * torch.eye(len(at), dtype=torch.float64)
        outputs = kernel[n:, at] @ torch.linalg.solve(square, targets.values.double())
        return float((outputs.argmax(1) == test).double().mean())

    taken = choose(inside, targets)
    each = [choose(inside, targets, Shares(w)).taken for w in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)]
    right = {one.weight: accuracy(one.weight, one.ridge) for one in each}
    return {
        "probe": accuracy(0.0, taken.probe.ridge),
        "adapt": accuracy(taken.taken.weight, taken.taken.ridge),
        "body": right[1.0],
        "hindsight": max(right.values()),
        "weight": taken.taken.weight,
    }


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a set of tasks, network and number of shots; means over tasks."""
    header = (
        "tasks", "network", "a class", "rows", "linear probe", "with derivatives", "gain", "behind",
        "derivatives alone",
    )  # fmt: skip
    rows = []
    for part, network, shots in dict.fromkeys((c["set"], c["network"], c["shots"]) for c in cells):
        own = [c for c in cells if (c["set"], c["network"], c["shots"]) == (part, network, shots)]
        tasks = [[c for c in own if c["task"] == task] for task in dict.fromkeys(c["task"] for c in own)]
        probe, taken, body = (
            [100 * mean(cell[key] for cell in one) for one in tasks] for key in ("probe", "adapt", "body")
        )
        gains = [mean_and_error(100 * (c["adapt"] - c["probe"]) for c in one) for one in tasks]
        behind = sum(gain < -(error if error == error else 0.0) - 1e-9 for gain, error in gains)
        numbers = (f"{mean(probe):.1f}", f"{mean(taken):.1f}", with_error(gain for gain, _ in gains))
        rows.append((part, network, str(shots), str(len(tasks)), *numbers, str(behind), f"{mean(body):.1f}"))
    return markdown(header, rows)


def summary(cells: Sequence[Cell]) -> str:
    """A line a network: rows, median gain, and those behind the probe by more than their standard error."""
    lines = []
    for network in dict.fromkeys(cell["network"] for cell in cells):
        own = [cell for cell in cells if cell["network"] == network]
        gains, behind = [], []
        for task, shots in dict.fromkeys((cell["task"], cell["shots"]) for cell in own):
            columns = [chosen(own, key, task=task, shots=shots) for key in ("adapt", "probe")]
            each = [100 * (a - b) for a, b in zip(*columns, strict=True)]
            gains.append(mean(each))
            error = stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0
            if mean(each) < -error - 1e-9:  # where one draw alone differs, both are equal up to rounding
                behind.append(f"{task} {shots}")
        ends = f"{min(gains):.1f} to {max(gains):.1f}"
        found = f"{network}: {len(gains)} rows, median gain {median(gains):.1f} ({ends})"
        lines.append(f"{found}; behind by more than the error: {', '.join(behind) or 'none'}")
    return "\n".join(lines)


def main() -> None:
    """Run what is cached."""
    arguments = parser(__doc__ or "", seeds=5)
    arguments.add_argument("--kernels", type=Path, default=Path("runs/experiments/adapt/kernels"))
    arguments.add_argument("--sets", nargs="+", default=["development"], choices=list(SETS))
    given = arguments.parse_args()
    study, cells = Study("adapt/nested", given), []
    for part in given.sets:
        for network in NETWORKS.values():
            for task in suited(part, network):
                file = f"{network.name} {task.name}".replace(" ", "-").lower()
                if not (given.kernels / f"{file}.safetensors").exists():
                    continue
                kernels = load(given.kernels / f"{file}.safetensors", file)
                fewest = int(kernels["pool"].bincount().min())
                for shots in (s for s in SHOTS if s <= fewest):
                    for seed in study.seeds:
                        where = {"set": part, "network": network.name, "task": task.name}
                        what = {**where, "shots": shots, "seed": seed}
                        cells.append(study.cell(what, lambda k=kernels, s=shots, d=seed: compared(k, s, d)))
    study.publish(table(cells), cells)
    print(summary(cells))


if __name__ == "__main__":
    main()
