"""Figure 4: how test accuracy grows with the data, for several periods K.

LeNet-50 on subsets of CIFAR-10, trained until the training loss has converged, with optimal early stopping.
The paper shows that accuracy grows at the same rate for all finite K, and slower for K = infinity, whose
features are never updated.

Default: 10 channels on 16 x 16 pixels, 250 to 2,000 images, mini-batches of 64, rate 0.02, at most 500
steps. ``--full``: the paper's network, up to 10,000 images, rate 1e-5 (1e-3 for K = infinity and a K = 1
beside it, as in the paper), until the training loss is 0.01.

    python -m experiments.iterative_linearization.data_scaling
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from experiments.figures import COLORS, figure, save
from experiments.iterative_linearization.networks import lenet
from experiments.iterative_linearization.training import Plan, cifar, train
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=1)
    found.add_argument("--channels", type=int, default=None)
    found.add_argument("--sizes", type=int, nargs="+", default=None, help="images")
    found.add_argument("--periods", type=int, nargs="+", default=None, help="0 for never")
    found.add_argument("--steps", type=int, default=None)
    found.add_argument("--rate", type=float, default=0.02, help="of runs that are not --full")
    found.add_argument("--test", type=int, default=None)
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the logarithm of the test error over the logarithm of the number of images, by least squares."""
    logs = [(math.log(n), math.log(1 - accuracy)) for n, accuracy in points]
    x, y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    return sum((a - x) * (b - y) for a, b in logs) / max(sum((a - x) ** 2 for a, _ in logs), 1e-12)


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    study = Study("iterative_linearization/data_scaling", args)
    full = args.full
    channels, side = args.channels or (50 if full else 10), 32 if full else 16
    sizes = args.sizes or ([300, 1000, 3000, 10000] if full else [250, 700, 2000])
    small: list[tuple[int | None, float]] = [(1, args.rate), (50, args.rate), (None, args.rate)]
    large: list[tuple[int | None, float]] = [(1, 1e-5), (1000, 1e-5), (10**5, 1e-5), (1, 1e-3), (None, 1e-3)]
    settings = [(k or None, args.rate) for k in args.periods] if args.periods else (large if full else small)
    rows, cells, drawn = [], [], {}
    for period, rate in settings:
        columns: list[list[Cell]] = []
        for count in sizes:
            steps = args.steps or (10**8 if full else 500)
            plan = Plan(period, steps, rate, 256 if full else 64, stop=0.01 if full else 0.02)
            what = {"period": period, "rate": rate, "images": count, "steps": steps, "channels": channels}

            def compute(seed: int, count: int = count, plan: Plan = plan) -> dict[str, Any]:
                split = cifar(count, args.test or (5000 if full else 1000), side, args)
                return train(lenet(channels, side, seed), split, plan)

            columns.append([study.cell({**what, "seed": s}, lambda s=s: compute(s)) for s in study.seeds])  # type: ignore[misc]
        cells += [cell for column in columns for cell in column]
        points = [(n, sum(c["best"] for c in col) / len(col)) for n, col in zip(sizes, columns, strict=True)]
        drawn[period, rate] = points
        rows.append(
            [
                "never" if period is None else f"{period:,}",
                f"{rate:g}",
                *(with_error((c["best"] for c in column), 1, 100) for column in columns),
                f"{slope(points):.3f}",
            ]
        )
    header = ["K", "rate", *(f"{n:,} images" for n in sizes), "slope of log error"]
    study.publish(markdown(header, rows), cells)
    picture, axis = figure()
    for color, ((period, rate), points) in zip(COLORS, drawn.items(), strict=False):
        label = ("never" if period is None else f"K = {period:,}") + (f", rate {rate:g}" if full else "")
        axis.plot(*zip(*[(n, 100 * a) for n, a in points], strict=True), "o-", color=color, label=label)
    axis.set(xscale="log", xlabel="training images", ylabel="best test accuracy, %")
    axis.legend(fontsize=7)
    save(picture, study.out / "data_scaling.svg")


if __name__ == "__main__":
    main()
