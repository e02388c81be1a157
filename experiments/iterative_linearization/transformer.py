"""Section 5.2: whether transformers behave as LeNets do when their features are updated every K steps.

Goldwaser and Ge leave open whether their findings extend to transformers: that every finite K catches up with
K = 1 in test accuracy, and that training without an update of the features does not. Here a vision
transformer (4 x 4 patches of 16 x 16 images, two pre-norm blocks of width 32 with four heads, no dropout)
learns CIFAR-10 in mini-batches, in evaluation mode, from the same weights and batches at each K.

The rate is the largest of a few at which η λ stays below 1 along a run with K = 1 from another seed, λ the
largest eigenvalue of the Gauss-Newton matrix of the mean loss. The paper's condition is η λ < 2; where plain
training stays at 2 by itself, linear models have nothing that keeps them there (``stability.py``).

    python -m experiments.iterative_linearization.transformer --threads 1
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import nn

from experiments.figures import COLORS, figure, save
from experiments.iterative_linearization.networks import vision_transformer
from experiments.iterative_linearization.period import named
from experiments.iterative_linearization.stability import sharpness
from experiments.iterative_linearization.training import Plan, Split, cifar, shown, train
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, mean_and_error, with_error

RATES = (0.03, 0.02, 0.015, 0.01, 0.005)
MOST = 1.0  # of η λ
ANOTHER = 100  # the seed that the rate is chosen on
STAGES = 8  # of that run, with λ after each
LOOKED_AT, PRODUCTS = 256, 20  # images and steps of power iteration for λ


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=3)
    found.add_argument("--width", type=int, default=32)
    found.add_argument("--images", type=int, default=2000)
    found.add_argument("--test", type=int, default=1000)
    found.add_argument("--batch", type=int, default=32)
    found.add_argument("--steps", type=int, default=3000)
    found.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    found.add_argument("--beside", type=float, nargs="*", default=[], help="other rates, run with seed 0")
    found.add_argument("--periods", type=int, nargs="+", default=[1, 10, 100, 1000, 0], help="0 for never")
    return found


def measured(model: nn.Module, rate: float, data: Split) -> float:
    """η λ."""
    return rate * sharpness(model, data.x[:LOOKED_AT], None, PRODUCTS)[0]


def tried(rate: float, data: Split, args: argparse.Namespace) -> dict[str, Any]:
    """A run with K = 1, and η λ on the way."""
    model = vision_transformer(16, 4, args.width, ANOTHER).to(args.device).eval()
    found: dict[str, Any] = {"rate times sharpness": [measured(model, rate, data)]}
    for stage in range(STAGES):
        run = train(model, data, Plan(1, args.steps // STAGES, rate, args.batch, seed=ANOTHER + stage))
        found["rate times sharpness"].append(measured(model, rate, data))
    return found | {"largest": max(found["rate times sharpness"]), "loss": run["loss"][-1]}


def compute(plan: Plan, seed: int, data: Split, width: int) -> dict[str, Any]:
    """A run, and η λ at its end."""
    model = vision_transformer(16, 4, width, seed)
    found = train(model, data, plan)
    ended = None if found["diverged"] else measured(model, plan.rate, data)
    return found | {"rate times sharpness": ended}


def rates(cells: Sequence[Cell]) -> str:
    """Markdown: η λ at each rate that was tried."""
    own = [cell for cell in cells if cell["part"] == "rate"]
    rows = [
        [f"{c['rate']:g}", f"{c['rate times sharpness'][0]:.2f}", f"{c['largest']:.2f}", f"{c['loss']:.3f}"]
        for c in own
    ]
    return markdown(["rate, K = 1", "η λ at the first weights", "largest η λ", "loss at the end"], rows)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a rate and period, differences from K = 1 paired over seeds, in points."""
    done = [cell for cell in cells if cell["part"] == "run"]
    rows = []
    for rate, period in dict.fromkeys((cell["rate"], cell["period"]) for cell in done):
        own, plain = (
            [cell for cell in done if (cell["rate"], cell["period"]) == (rate, k)] for k in (period, 1)
        )
        less = [
            with_error((a[key] - b[key] for a, b in zip(own, plain, strict=True)), 1, 100)
            for key in ("best", "final")
        ]
        row = [f"{rate:g}", named(period), str(len(own)), f"{own[0]['updates']:,}"]
        row += [with_error(chosen(own, key), 1, 100) for key in ("best", "final", "final train")]
        row += ["", ""] if period == 1 else less
        row.append(with_error((max(run["linear"]) for run in own), 1, 100))
        ends = [value for value in chosen(own, "rate times sharpness") if value is not None]
        rows.append([*row, shown(own), with_error(ends, 2)])
    header = [
        "rate",
        "K",
        "seeds",
        "feature updates",
        "best test %",
        "test %",
        "train %",
        "best test less K = 1's",
    ]
    more = ["test less K = 1's", "best test % of the linear model", "loss trained on", "η λ at the end"]
    return markdown([*header, *more], rows)


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    study, splits = Study("iterative_linearization/transformer", args), list[Split]()

    def data() -> Split:
        if not splits:
            splits.append(cifar(args.images, args.test, 16, args))
        return splits[0]

    size = {"width": args.width, "images": args.images, "batch": args.batch, "steps": args.steps}
    cells = [
        study.cell(
            {"part": "rate", "rate": rate, "seed": ANOTHER, **size},
            lambda rate=rate: tried(rate, data(), args),  # type: ignore[misc]
        )
        for rate in args.rates
    ]
    rate = max((c["rate"] for c in cells if c["largest"] < MOST), default=min(args.rates))
    settings = [(rate, seed) for seed in study.seeds] + [(other, 0) for other in args.beside]
    for rate, seed in settings:
        for period in [k or None for k in args.periods]:
            plan = Plan(period, args.steps, rate, args.batch, seed=seed)
            cells.append(
                study.cell(
                    {"part": "run", "period": period, "rate": rate, "seed": seed, **size},
                    lambda plan=plan, seed=seed: compute(plan, seed, data(), args.width),  # type: ignore[misc]
                )
            )
    study.publish(f"{table(cells)}\n\n{rates(cells)}", cells)
    draw(cells, study)


def draw(cells: Sequence[Cell], study: Study) -> None:
    """Test accuracy over the steps, means over seeds."""
    picture, axis = figure(width=4.2)
    done = [cell for cell in cells if cell["part"] == "run"]
    own = [cell for cell in done if cell["rate"] == done[0]["rate"]]
    for color, period in zip(COLORS, dict.fromkeys(cell["period"] for cell in own), strict=False):
        runs = [cell for cell in own if cell["period"] == period]
        accuracies = zip(*chosen(runs, "test"), strict=False)  # a run that diverged is shorter
        means = [100 * mean_and_error(values)[0] for values in accuracies]
        axis.plot(runs[0]["step"][: len(means)], means, color=color, label=f"K: {named(period)}")
    axis.set(xlabel="step", ylabel="test accuracy, %")
    axis.legend(fontsize=7)
    save(picture, study.out / "transformer.svg")


if __name__ == "__main__":
    main()
