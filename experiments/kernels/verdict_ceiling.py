"""Upper bound on predicting the winner of the linear fit and plain fine-tuning, on fits of this size.

The winners of ``experiments.kernels.verdict`` are winners on a few hundred test images, and anything learned
from 50 or 200 training images is noisy as well. With the advantage d of the linear fit in test accuracy, its
error e on the test images, and v the variance of the difference on one image:

    measured d = D + e ε,        D ~ N(m, s²),  s² = Var d − mean e²       (by moments, over the fits)
    cross-validation on N images sees D + √(v / N) ε',        v = mean of e² × test images

Four predictors of the sign of the measured d are simulated: D itself; cross-validation; the same, shrunk to m
by Bayes' rule; and always the sign of m.

    python -m experiments.kernels.verdict_ceiling
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.kernels.verdict_folds import KNOWN, known
from experiments.study import ROOT, Study, parser
from experiments.tables import markdown

KEPT = ROOT / "docs" / "results" / "kernels" / "verdict.json"
DRAWS = 200_000


def moments(cells: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """m, s and v."""
    advantages = [c["linear"] - c["plain"] for c in cells]
    noise = statistics.fmean(c["error"] ** 2 for c in cells)
    one = statistics.fmean(c["error"] ** 2 * c["tests"] for c in cells)
    return statistics.fmean(advantages), math.sqrt(max(statistics.variance(advantages) - noise, 0.0)), one


def simulate(cells: Sequence[dict[str, Any]], examples: int, draws: int = DRAWS) -> dict[str, float]:
    """Share of right predictions of each predictor, with so many training images."""
    mean, spread, one = moments(cells)
    errors = [c["error"] for c in cells]
    seen_error = math.sqrt(one / examples)
    # posterior mean of D given what was seen
    weight = spread**2 / (spread**2 + seen_error**2)
    generator = random.Random(0)
    right = dict.fromkeys(("knows D", "cross-validation", "the same, shrunk", "always the more frequent"), 0)
    for _ in range(draws):
        true = generator.gauss(mean, spread)
        wins = generator.gauss(true, generator.choice(errors)) > 0
        seen = generator.gauss(true, seen_error)
        shrunk = weight * seen + (1 - weight) * mean
        for name, value in zip(right, (true, seen, shrunk, mean), strict=True):
            right[name] += (value > 0) == wins
    return {name: count / draws for name, count in right.items()}


def main(words: list[str] | None = None) -> None:
    """Entry point."""
    options = parser(__doc__ or "", seeds=1)
    options.add_argument("--known", type=Path, default=KNOWN if KNOWN.exists() else KEPT)
    options.add_argument("--draws", type=int, default=DRAWS)
    arguments = options.parse_args(words)
    study, cells = Study("kernels/verdict_ceiling", arguments), known(arguments.known)
    sizes = sorted({c["examples"] for c in cells})
    columns = {n: simulate(cells, n, arguments.draws) for n in sizes}
    names = list(columns[sizes[0]])
    rows = [[name, *(f"{100 * columns[n][name]:.0f}" for n in sizes)] for name in names]
    table = markdown(["right, %", *(f"{n} images" for n in sizes)], rows)
    mean, spread, one = moments(cells)
    facts = {"mean": mean, "spread": spread, "variance of one": one, "shares": columns}
    study.publish(table, cells, **facts)
    print(f"advantage {100 * mean:.1f} ± {100 * spread:.1f} points (spread of the fits)")


if __name__ == "__main__":
    main()
