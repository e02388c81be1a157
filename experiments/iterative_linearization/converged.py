"""Figure 5: linearizations that are optimized to the end generalize worse.

LeNet-50 on CIFAR-10. K = 1 with SGD reaches 69.4 % test accuracy; a sequence of linearizations, each trained
with Adam (K = 200,000) until its training accuracy is perfect, 61.3 %; plain Adam over 70 %, so that it is
not the optimizer.

Default: 10 channels on 16 x 16 pixels, 200 images, full batches: 200 steps of SGD (rate 0.05) or Adam
(1e-3), and 3 linearizations of at most 300 steps of Adam (5e-3), each until its loss is 0.01.
``--full``: the paper's network, all 10,000 images and 5 linearizations of at most 200,000 steps.

    python -m experiments.iterative_linearization.converged
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from experiments.figures import COLORS, figure, save
from experiments.iterative_linearization.networks import lenet
from experiments.iterative_linearization.training import Plan, cifar, shown, train
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet import optim

PAPER = {"SGD, K = 1": "69.4", "Adam, K = 1": "over 70", "Adam, each linearization to the end": "61.3"}

HEADER = (
    "training",
    "steps",
    "feature updates",
    "test %",
    "best test %",
    "train %",
    "loss trained on",
    "paper, test %",
)


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=1)
    found.add_argument("--channels", type=int, default=None)
    found.add_argument("--images", type=int, default=None)
    found.add_argument("--test", type=int, default=None)
    found.add_argument("--steps", type=int, default=None, help="with K = 1")
    found.add_argument("--linearizations", type=int, default=None)
    found.add_argument("--each", type=int, default=None, help="most steps of a linearization")
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    study = Study("iterative_linearization/converged", args)
    full = args.full
    channels, side = args.channels or (50 if full else 10), 32 if full else 16
    count, steps = args.images or (10000 if full else 200), args.steps or (400_000 if full else 200)
    each, times = args.each or (200_000 if full else 300), args.linearizations or (5 if full else 3)
    split = None
    rates = (1e-4, 1e-4, 1e-4) if full else (0.05, 1e-3, 5e-3)
    batch = 256 if full else None
    plans = dict(
        zip(
            PAPER,
            (
                lambda: Plan(1, steps, rates[0], batch),
                lambda: Plan(1, steps, rates[1], batch, "adam"),
                lambda: Plan(
                    optim.Converged(None, loss=0.01, most=each), each * times, rates[2], None, "adam"
                ),
            ),
            strict=True,
        )
    )
    rows, cells, drawn = [], [], {}
    for number, (name, plan) in enumerate(plans.items()):

        def compute(seed: int, plan: Any = plan) -> dict[str, Any]:
            nonlocal split
            split = split or cifar(count, args.test or (5000 if full else 500), side, args)
            return train(lenet(channels, side, seed), split, plan())

        what = {
            "method": name,
            "images": count,
            "channels": channels,
            "rate": rates[number],
            "steps": each * times if number == 2 else steps,
            "each": each if number == 2 else None,
        }
        runs = [study.cell({**what, "seed": s}, lambda s=s: compute(s)) for s in study.seeds]  # type: ignore[misc]
        cells += runs
        drawn[name] = runs[0]
        rows.append(
            [
                name,
                f"{runs[0]['step'][-1]:,}",
                f"{runs[0]['updates']:,}",
                *(with_error((c[key] for c in runs), 1, 100) for key in ("final", "best", "final train")),
                shown(runs),
                PAPER[name],
            ]
        )
    study.publish(markdown(HEADER, rows), cells, paper=PAPER)
    _draw(drawn, study)


def _draw(drawn: dict[str, Cell], study: Study) -> None:
    """Test accuracy, and training accuracy of the network."""
    picture, axes = figure(2, 1)
    for color, (name, cell) in zip(COLORS, drawn.items(), strict=False):
        axes[0].plot(cell["step"], [100 * v for v in cell["test"]], color=color, label=name)
        axes[1].plot(cell["step"], [100 * v for v in cell["train"]], color=color)
    axes[0].set(xlabel="step", ylabel="test accuracy, %")
    axes[1].set(xlabel="step", ylabel="training accuracy of the network, %")
    axes[0].legend(fontsize=7)
    save(picture, study.out / "converged.svg")


if __name__ == "__main__":
    main()
