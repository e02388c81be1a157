"""Figure 7: plain fine-tuning with the squared loss and with cross-entropy, where images are few.

Achille et al. train a plain network with both losses, the best of several rates each, and find the squared
loss ahead where there are few images of each class, and cross-entropy as good or better where there are
many. Here both have the same clipped and annealed steps and the same rates to choose from, for each
task and number of images: by training on another draw and scoring on images of the training part that
have no part in it, never on test images.

    python -m experiments.lqf.plain_loss --threads 1
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from experiments.lqf.tasks import PAIRS, Pair, accuracy, finetune, load, log_loss
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

LOSSES = ("squared", "cross-entropy")
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
SHOTS = (2, 10)
HELD = 10  # images a class that rates are scored on
TUNING = (100,)  # draws that rates are chosen on
TESTED = 500


def settings(steps: int) -> dict[str, Any]:
    """What both losses have alike."""
    return {"steps": steps, "batch_size": 16, "clip": 1.0, "schedule": "cosine"}


def scored(pair: Pair, shots: int, loss: str, steps: int, data_dir: str | None) -> dict[str, Any]:
    """Mean accuracy of each rate on images of the training part, and the rate that has most."""
    found: dict[float, list[float]] = {rate: [] for rate in RATES}
    for seed in TUNING:
        model, (x, y), _ = load(pair, seed, data_dir, shots + HELD)
        first = torch.zeros(len(y), dtype=torch.bool)
        for label in y.unique():
            first[(y == label).nonzero()[:shots, 0]] = True
        for rate in RATES:
            given = {"loss": loss, "learning_rate": rate, "seed": seed, **settings(steps)}
            run = finetune(model, (x[first], y[first]), "nlft", **given)
            found[rate].append(accuracy(run.predict(x[~first]), y[~first]))
    means = {rate: statistics.fmean(values) for rate, values in found.items()}
    return {"rate": max(means, key=means.__getitem__), "held out": {f"{r:g}": m for r, m in means.items()}}


def tested(
    pair: Pair, shots: int, loss: str, seed: int, rate: float, steps: int, data_dir: str | None
) -> dict[str, float]:
    """Test accuracy of one draw, and its log loss at the temperature that is best for it."""
    model, train, (xt, yt) = load(pair, seed, data_dir, shots, TESTED)
    run = finetune(model, train, "nlft", loss=loss, learning_rate=rate, seed=seed, **settings(steps))
    outputs = run.predict(xt)
    temperatures = torch.logspace(-1, 2, 61)
    return {
        "accuracy": accuracy(outputs, yt),
        "log loss": min(log_loss((outputs / t).softmax(1), yt) for t in temperatures),
    }


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a line for each task and number of images, and their means below."""
    rows: list[list[str]] = []
    own = [cell for cell in cells if "accuracy" in cell]
    ahead: dict[int, list[list[float]]] = {}
    for pair, shots in dict.fromkeys((cell["pair"], cell["shots"]) for cell in own):
        where = {"pair": pair, "shots": shots}
        found = [chosen(own, "accuracy", **where, loss=loss) for loss in LOSSES]
        losses = [chosen(own, "log loss", **where, loss=loss) for loss in LOSSES]
        rates = [f"{next(iter(chosen(own, 'rate given', **where, loss=loss))):g}" for loss in LOSSES]
        gains = [100 * (a - b) for a, b in zip(*found, strict=True)]
        ahead.setdefault(shots, []).append(gains)
        rows.append([f"{pair}, {shots} shots", *rates, *(with_error(a, 1, 100) for a in found),
                     with_error(gains), with_error(a - b for a, b in zip(*losses, strict=True))])  # fmt: skip
    for shots, gains in ahead.items():
        means = [statistics.fmean(draws) for draws in zip(*gains, strict=True)]
        rows.append([f"mean, {shots} shots", "", "", "", "", with_error(means), ""])
    header = ["", "rate, squared", "rate, cross-entropy", "squared, accuracy %", "cross-entropy, accuracy %",
              "ahead, points", "log loss less"]  # fmt: skip
    return markdown(header, rows)


def main(argv: Sequence[str] | None = None, pairs: Sequence[Pair] | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "", seeds=5)
    arguments.add_argument("--pairs", type=int, nargs="*", default=[1, 0, 2], help="numbers of the pairs")
    arguments.add_argument("--shots", type=int, nargs="*", default=list(SHOTS))
    arguments.add_argument("--steps", type=int, default=40)
    given = arguments.parse_args(argv)
    study, directory = Study("lqf/plain_loss", given), given.data_dir
    cells: list[Cell] = []
    for pair in pairs or [PAIRS[i] for i in given.pairs]:
        for shots in given.shots:
            for loss in LOSSES:
                where = {"pair": pair.name, "shots": shots, "loss": loss, "steps": given.steps}
                known = (pair, shots, loss)
                grid = {"rates": [*RATES], "draws": [*TUNING], "held": HELD}
                tuned = study.cell({**where, **grid}, partial(scored, *known, given.steps, directory))
                cells.append(tuned)
                for seed in study.seeds:
                    run_of = partial(tested, *known, seed, tuned["rate"], given.steps, directory)
                    cells.append(study.cell({**where, "seed": seed, "rate given": tuned["rate"]}, run_of))
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
