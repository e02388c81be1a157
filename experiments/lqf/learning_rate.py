"""Figure 1 (right): which effective learning rate η / ((1 − m) b) is best, task by task.

The paper finds one effective learning rate nearly optimal on all tasks for LQF, while that of plain fine-
tuning varies by orders of magnitude. Here both are searched on the same grid of learning rates and batch
sizes and scored on training images that are not trained on; reported are the best rate of every task, the
rates within two points of the best, and what the one rate that is best on average loses on each task.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from experiments.figures import COLORS, figure, save
from experiments.lqf.tasks import PAIRS, Pair, finetune, load, options
from experiments.study import Cell, Study, parser
from experiments.tables import markdown

SHOTS, HELD = 5, 10  # images a class to train on and to score on
GRID: dict[str, tuple[tuple[float, ...], tuple[int, ...]]] = {
    "lqf": ((0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0), (16, 32)),
    "nlft": ((0.001, 0.003, 0.01, 0.03, 0.1), (16,)),
}
STEPS = {"lqf": 300, "nlft": 60}
NEAR = 0.02  # what counts as nearly as good


def scores(pair: Pair, method: str, seed: int, data_dir: str | None, shots: int, held: int) -> dict[str, Any]:
    """Held-out accuracy for every learning rate and batch size.

    Args:
        pair: The pair.
        method: ``"lqf"`` or ``"nlft"``.
        seed: Seed of the draw.
        data_dir: Folder of the data.
        shots: Images a class to train on.
        held: Images a class to score on, from the training part too.

    Returns:
        Effective learning rates with their accuracies; a run that diverged has none.
    """
    model, (x, y), _ = load(pair, seed, data_dir, shots + held)
    first = torch.zeros(len(y), dtype=torch.bool)
    for label in y.unique():
        first[(y == label).nonzero()[:shots, 0]] = True
    rates, batches = GRID[method]
    settings = {k: v for k, v in options(method, STEPS[method]).items() if k != "batch_size"}
    search = {"learning_rate": list(rates), "batch_size": list(batches)}
    run = finetune(
        model, (x[first], y[first]), method, (x[~first], y[~first]), search=search, seed=seed,
        evaluate_every=STEPS[method], **settings,
    )  # fmt: skip
    found = [
        {"rate": c["learning_rate"], "batch": c["batch_size"], "elr": c.get("effective_learning_rate"),
         "accuracy": c["scores"].get("accuracy")}
        for c in run.candidates
    ]  # fmt: skip
    return {"tried": found}


def best_and_near(cell: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Best accuracy, its effective rate, and the range of rates within two points of it."""
    tried = [c for c in cell["tried"] if c["accuracy"] is not None]
    best = max(c["accuracy"] for c in tried)
    near = [c["elr"] for c in tried if c["accuracy"] >= best - NEAR]
    top = [c["elr"] for c in tried if c["accuracy"] == best]
    return best, statistics.median(top), min(near), max(near)


def one_for_all(cells: Sequence[Cell]) -> tuple[tuple[float, int], dict[str, float]]:
    """The rate and batch size of highest mean accuracy, and what it loses on each task, in points."""
    keys = {(c["rate"], c["batch"]) for cell in cells for c in cell["tried"]}
    accuracies = {
        key: [
            next((c["accuracy"] or 0.0 for c in cell["tried"] if (c["rate"], c["batch"]) == key), 0.0)
            for cell in cells
        ]
        for key in keys
    }
    key = max(sorted(keys), key=lambda k: statistics.fmean(accuracies[k]))
    lost = {
        cell["pair"]: 100 * (best_and_near(cell)[0] - a)
        for cell, a in zip(cells, accuracies[key], strict=True)
    }
    return key, lost


def main(
    argv: Sequence[str] | None = None,
    pairs: Sequence[Pair] | None = None,
    sizes: tuple[int, int] = (SHOTS, HELD),
) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "", seeds=1)
    arguments.add_argument("--pairs", type=int, nargs="*", default=[1, 0, 2, 3], help="numbers of the pairs")
    given = arguments.parse_args(argv)
    study = Study("lqf/learning_rate", given)
    taken = pairs or [PAIRS[i] for i in given.pairs]
    cells: dict[str, list[Cell]] = {method: [] for method in GRID}
    rows: list[list[object]] = []
    for method in GRID:
        for pair in taken:
            cells[method] += [
                study.cell(
                    {"pair": pair.name, "shots": sizes[0], "held": sizes[1], "method": method, "seed": seed,
                     "grid": GRID[method]},
                    lambda pair=pair, method=method, seed=seed: scores(
                        pair, method, seed, given.data_dir, *sizes
                    ),
                )
                for seed in study.seeds
            ]  # fmt: skip
        key, lost = one_for_all(cells[method])
        for cell in cells[method]:
            best, elr, low, high = best_and_near(cell)
            near, own = f"{low:.2g} to {high:.2g}", lost[cell["pair"]]
            rows.append([f"{method}, {cell['pair']}", f"{100 * best:.1f}", f"{elr:.2g}", near, f"{own:.1f}"])
        mean = statistics.fmean(lost.values())
        rows.append([f"{method}: η = {key[0]:g}, b = {key[1]} for all", "", "", "", f"{mean:.1f} on average"])
    header = [
        "",
        "best held-out accuracy, %",
        "its effective rate",
        "within 2 points",
        "lost by one rate for all",
    ]
    study.publish(markdown(header, rows), [c for found in cells.values() for c in found])
    drawn, axes = figure(width=5.2)
    for i, method in enumerate(GRID):
        for j, cell in enumerate(cells[method]):
            _, elr, low, high = best_and_near(cell)
            at = i * (len(taken) + 1) + j
            axes.plot([low, high], [at, at], color=COLORS[i], linewidth=2)
            axes.plot(elr, at, "o", color=COLORS[i], label=method if j == 0 else None)
    axes.set_xscale("log")
    axes.set_yticks([])
    axes.set_xlabel("effective learning rate: best, and within 2 points")
    axes.legend()
    save(drawn, study.out / "learning_rate.svg")


if __name__ == "__main__":
    main()
