"""Appendix A.1: the weight decay that the gradient of a validation loss leads to.

Achille et al. derive the gradient of a validation loss in the weight decay of a linear model (eq. 10 to 12)
and leave its use to future work. Here the ridge goes to the zero of that derivative from a value that is a
hundred times too large, on two thirds of the training images, the others being the validation set; beside it
are the best of a fine grid by the same loss, leave-one-out on the same two thirds, which needs no validation
set, and leave-one-out on all images. The head is random: a probe has seen the labels.

    python -m experiments.lqf.validation_decay --threads 1 --seeds 5
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

import linnet
from experiments.lqf.informative import part_of
from experiments.lqf.tasks import PAIRS, Pair, accuracy, linear_model, load, place_in_class
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

PARAMS = r"layer3\.2|fc|linear"  # last block and head
SHOTS, TESTED, VALIDATED = 30, 500, 10  # images a class: for training, of which so many are for validation
FACTOR = 100.0  # by which the ridge is too large at the start
WAYS = ("start", "gradient", "grid", "leave-one-out", "leave-one-out, all images")


def compute(pair: Pair, seed: int, data_dir: str | None) -> dict[str, Any]:
    """Test accuracy and ridge of each way to choose it."""
    model, (x, y), (xt, yt) = load(pair, seed, data_dir, SHOTS, tested=TESTED)
    held = place_in_class(y) < VALIDATED  # the first of each class
    lin = part_of(linear_model(model, (x, y), head="random", seed=seed), PARAMS)
    validation, rest = (x[held], y[held]), (x[~held], y[~held])
    left_out = linnet.fit(lin, rest, ridge="loo")
    start = linnet.fit(lin, rest, ridge=FACTOR * left_out.ridge)
    tuned = linnet.audit.tune_ridge(start, validation)
    grid = left_out.ridge * torch.logspace(-4, 4, 161, dtype=torch.float64)
    path = linnet.audit.ridge_path(start, validation, grid)
    best = float(grid[int(path.loss.argmin())])
    fits = {
        "start": start,
        "gradient": tuned,
        "grid": linnet.fit(lin, rest, ridge=best),
        "leave-one-out": left_out,
        "leave-one-out, all images": linnet.fit(lin, (x, y), ridge="loo"),
    }
    return {
        "accuracy": {way: accuracy(fit.predict(xt), yt) for way, fit in fits.items()},
        "ridge": {way: fit.ridge for way, fit in fits.items()},
    }


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a way, test errors by task, differences over tasks and draws."""
    pairs = list(dict.fromkeys(cell["pair"] for cell in cells))
    rows = []
    for way in WAYS:
        errors = [
            with_error((1 - one[way] for one in chosen(cells, "accuracy", pair=pair)), scale=100)
            for pair in pairs
        ]
        less = with_error((c["accuracy"]["grid"] - c["accuracy"][way] for c in cells), scale=100)
        apart = with_error((math.log10(c["ridge"][way] / c["ridge"]["grid"]) for c in cells), 2)
        rows.append([way, *errors, "–" if way == "grid" else less, "–" if way == "grid" else apart])
    short = [f"{pair.split(' → ')[1].split(' ')[0]}, error %" for pair in pairs]
    return markdown(
        ["ridge by", *short, "error less that of the grid", "log₁₀ of the ridge less the grid's"], rows
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study."""
    given = parser(__doc__ or "", seeds=5).parse_args(argv)
    study = Study("lqf/validation_decay", given)
    pairs = [pair for pair in PAIRS if pair.network == "resnet20" and not pair.coarse]
    cells = [
        study.cell(
            {"pair": pair.name, "shots": SHOTS, "validated": VALIDATED, "seed": seed},
            lambda pair=pair, seed=seed: compute(pair, seed, given.data_dir),
        )
        for seed in study.seeds
        for pair in pairs
    ]
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
