"""Figures 2 and 3: iterative linearization with periods K from 1 to 10^6.

LeNet-50 on CIFAR-10, cross-entropy. Figure 2: full batches (learning rate 1e-3) and mini-batches of 256
(1e-4): after two or three updates of the features every K has caught up with K = 1. Figure 3: mini-batches
with flips and crops (1e-5): 82.3 % for K = 1 and 81.4 % for K = 5 x 10^6. Runs without an update of the
features (K beyond the last step) are linearized training.

What counts is the training time between updates, learning rate x K: large rates and small K do what small
rates and large K do, in fewer steps. Default: 10 channels on 16 x 16 pixels, 300 images in full batches
(300 steps) and 1,000 in mini-batches of 64 (700 steps), rate 0.02, 500 for testing; ``--modes augmented`` has
flips and crops. ``--full``: the paper's network, rates and K on the 10,000 images.

    python -m experiments.iterative_linearization.period
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.figures import COLORS, figure, save
from experiments.iterative_linearization.networks import lenet
from experiments.iterative_linearization.training import Plan, Split, cifar, shown, train
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, mean_and_error, with_error

# mode: (images, batch, rate, steps, periods, augmented); a period of None: never
SMALL = {
    "full batch": (300, None, 0.02, 300, (1, 10, 50, None), False),
    "mini-batch": (1000, 64, 0.02, 700, (1, 10, 100, None), False),
    "augmented": (1000, 64, 0.02, 700, (1, 10, 100, None), True),
}
FULL = {
    "full batch": (10000, None, 1e-3, 3_000_000, (1, 10**3, 10**4, 10**5, 10**6, None), False),
    "mini-batch": (10000, 256, 1e-4, 30_000_000, (1, 10**4, 10**5, 10**6, None), False),
    "augmented": (10000, 256, 1e-5, 100_000_000, (1, 5 * 10**6), True),
}


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=1)
    found.add_argument("--channels", type=int, default=None)
    found.add_argument("--modes", nargs="+", default=["full batch", "mini-batch"], choices=[*SMALL])
    found.add_argument("--steps", type=int, default=None, help="of every run")
    found.add_argument("--rate", type=float, default=None, help="below 2/λ_max, which stability.py finds")
    found.add_argument("--images", type=int, default=None)
    found.add_argument("--test", type=int, default=None)
    found.add_argument("--periods", type=int, nargs="+", default=None, help="0 for never")
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    study = Study("iterative_linearization/period", args)
    channels, side = args.channels or (50 if args.full else 10), 32 if args.full else 16
    splits: dict[int, Split] = {}
    cells: list[Cell] = []
    for mode in args.modes:
        count, batch, rate, steps, periods, augment = (FULL if args.full else SMALL)[mode]
        count, steps, rate = args.images or count, args.steps or steps, args.rate or rate
        for period in [k or None for k in args.periods] if args.periods else periods:
            what = {
                "mode": mode,
                "period": period,
                "images": count,
                "batch": batch,
                "rate": rate,
                "steps": steps,
                "channels": channels,
            }

            plan = Plan(period, steps, rate, batch, augment=augment)

            def compute(seed: int, count: int = count, plan: Plan = plan) -> dict[str, Any]:
                if count not in splits:
                    test = args.test or (5000 if args.full else 500)
                    splits[count] = cifar(count, test, side, args)
                return train(lenet(channels, side, seed), splits[count], plan)

            cells += [study.cell({**what, "seed": s}, lambda s=s: compute(s)) for s in study.seeds]  # type: ignore[misc]
    study.publish(table(cells), cells)
    draw(cells, study.out / "period.svg")


def named(period: int | None) -> str:
    """A period in tables and figures."""
    return "never" if period is None else f"{period:,}"


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row for each kind of batches and period, means over seeds."""
    rows = []
    for mode, period in dict.fromkeys((cell["mode"], cell["period"]) for cell in cells):
        runs = [cell for cell in cells if (cell["mode"], cell["period"]) == (mode, period)]
        accuracies = [with_error(chosen(runs, key), 1, 100) for key in ("final", "best", "final train")]
        size = [f"{runs[0]['images']:,}", runs[0]["rate"], len(runs)]
        rows.append([mode, named(period), *size, f"{runs[0]['updates']:,}", *accuracies, shown(runs)])
    header = ["batches", "K", "images", "rate", "seeds", "feature updates", "test %"]
    return markdown([*header, "best test %", "train %", "loss trained on"], rows)


def draw(cells: Sequence[Cell], file: Path) -> None:
    """Test accuracy over the steps, a panel for each kind of batches, means over seeds."""
    modes = list(dict.fromkeys(cell["mode"] for cell in cells))
    picture, axes = figure(len(modes), 1, width=3.4)
    for axis, mode in zip([axes] if len(modes) == 1 else axes, modes, strict=True):
        own = [cell for cell in cells if cell["mode"] == mode]
        for color, period in zip(COLORS, dict.fromkeys(cell["period"] for cell in own), strict=False):
            runs = [cell for cell in own if cell["period"] == period]
            accuracies = zip(*chosen(runs, "test"), strict=False)  # a run that diverged is shorter
            means = [100 * mean_and_error(values)[0] for values in accuracies]
            axis.plot(runs[0]["step"][: len(means)], means, color=color, label=f"K: {named(period)}")
        axis.set(title=mode, xlabel="step", ylabel="test accuracy, %")
        axis.legend(fontsize=7)
    save(picture, file)


if __name__ == "__main__":
    main()
