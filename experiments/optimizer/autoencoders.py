"""Botev 2020, figure 4.1: deep autoencoders trained with KFRA and KFAC against tuned first-order methods.

Autoencoders D-1000-500-250-30-250-500-1000-D on CURVES, MNIST (binary cross-entropy) and FACES (squared
error), batch 1,000. KFRA, KFAC and the random projection run with the defaults of ``GaussNewton``; Adam and
SGD with momentum take the best of a grid of learning rates 2^-6 ... 2^-13 and decay periods 100 % ...
6.25 %. The thesis shows curves: both second-order methods below the best Adam per update and per second on
all three, KFRA below KFAC.

Default: an eighth of the widths, 6,000 images, batch 250, 100 updates of the second-order and 500 of the
first-order methods, whose grid is pruned by runs of 100 updates. ``--full``: the thesis' sizes, 2,000 and
40,000 updates, the whole grid.

    python -m experiments.optimizer.autoencoders
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.figures import COLORS, figure, save
from experiments.optimizer.problems import DATA, WIDTHS, Problem, autoencoder, problem, reduced
from experiments.optimizer.training import RATES, Task, ended, first_order, grid, loss_at, second_order
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error

SECOND = ("KFRA", "KFAC", "KFAC, random projection")
FIRST = ("Adam", "SGD with momentum")


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=2)
    found.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    found.add_argument("--activation", choices=("tanh", "relu", "sigmoid"), default="tanh")
    found.add_argument("--widths", type=int, nargs="+", default=None, help="of the first half")
    found.add_argument("--images", type=int, default=None)
    found.add_argument("--batch", type=int, default=None)
    found.add_argument("--updates", type=int, default=None, help="of the second-order methods")
    found.add_argument("--factor", type=int, default=None, help="first-order updates for each of these")
    return found


class Comparison:
    """All runs on one data set."""

    def __init__(self, study: Study, name: str, given: argparse.Namespace) -> None:
        full = given.full
        self.study, self.name, self.full, self.activation = study, name, full, given.activation
        self.widths = tuple(given.widths or reduced(full))
        self.count = given.images or (
            {"curves": 20000, "mnist": 50000, "faces": 103500}[name] if full else 6000
        )
        self.batch = given.batch or (1000 if full else 250)
        self.updates = given.updates or (2000 if full else 100)
        self.long = self.updates * (given.factor or (20 if full else 5))
        self.device, self.folder = given.device, given.data_dir
        self._problem: Problem | None = None

    def _task(self, seed: int) -> Task:
        """The problem with a seed; data are read when the first cell is computed."""
        if self._problem is None:
            self._problem = problem(self.name, self.count, self.folder)
        x = self._problem.x.to(self.device)

        def make() -> Any:
            return autoencoder(x.shape[1], self.widths, self.activation, seed)

        return Task(make, x, x, self._problem.likelihood, self.batch, seed)

    def _what(self, method: str, seed: int, updates: int, **more: Any) -> dict[str, Any]:
        """What a run depends on."""
        return {
            "data": self.name,
            "method": method,
            "seed": seed,
            "updates": updates,
            "batch": self.batch,
            "images": self.count,
            "widths": list(self.widths),
            "activation": self.activation,
            **more,
        }

    def second(self, method: str, seed: int) -> Cell:
        """A run with curvature."""
        return self.study.cell(
            self._what(method, seed, self.updates),
            lambda: second_order(self._task(seed), method, self.updates),
        )

    def first(self, method: str, seed: int, rate: float, period: float, updates: int) -> Cell:
        """A run of a first-order method."""
        return self.study.cell(
            self._what(method, seed, updates, rate=rate, period=period),
            lambda: first_order(self._task(seed), method, rate, period, updates),
        )

    def tuned(self, method: str) -> tuple[list[Cell], list[Cell]]:
        """All runs of a first-order method, and those of its best setting, one a seed."""
        screened = [] if self.full else [self.first(method, 0, r, 1.0, self.updates) for r in RATES]
        settings = grid(self.full, [(cell["rate"], cell["final"]) for cell in screened])
        runs = [self.first(method, 0, rate, period, self.long) for rate, period in settings]
        best = min(runs, key=lambda cell: loss_at(cell, "update", self.long))
        return [*screened, *runs], [
            self.first(method, seed, best["rate"], best["period"], self.long) for seed in self.study.seeds
        ]


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    study = Study("optimizer/autoencoders", args)
    cells: list[Cell] = []
    drawn = {}
    for name in args.data:
        comparison = Comparison(study, name, args)
        second = {m: [comparison.second(m, seed) for seed in study.seeds] for m in SECOND}
        first = {m: comparison.tuned(m) for m in FIRST}
        drawn[name] = {**second, **{m: best for m, (_, best) in first.items()}}
        for runs in [*second.values(), *(every + best for every, best in first.values())]:
            cells += runs
    cells = [cell for i, cell in enumerate(cells) if cell not in cells[:i]]  # the best of a grid is in it
    study.publish(table(cells), cells, widths=list(WIDTHS if args.full else reduced(False)))
    _draw(drawn, study.out / "autoencoders.svg")


def best_of(cells: Sequence[Cell], method: str) -> list[Cell]:
    """Of one data set the runs of a first-order method at the best setting of its long runs, by seed."""
    runs = [cell for cell in cells if cell["method"] == method]
    long = max(cell["updates"] for cell in runs)
    grid_runs = [cell for cell in runs if cell["updates"] == long and cell["seed"] == 0]
    best = min(grid_runs, key=ended)
    setting = {key: best[key] for key in ("updates", "rate", "period")}
    return sorted((c for c in runs if setting.items() <= c.items()), key=lambda cell: int(cell["seed"]))


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a data set and method; losses less those of Adam's best setting, paired by seed."""
    rows = []
    for name in dict.fromkeys(cell["data"] for cell in cells):
        own = [cell for cell in cells if cell["data"] == name]
        adam = best_of(own, "Adam")
        for method in dict.fromkeys(cell["method"] for cell in own):
            first = method in FIRST
            runs = best_of(own, method) if first else [c for c in own if c["method"] == method]
            pairs = [] if first else list(zip(runs, adam, strict=True))
            shown = method
            if first:
                shown += f", rate 2^{_power(runs[0]['rate'])}, halved every {runs[0]['period']:.0%}"
            less = (
                with_error((a["final"] - loss_at(b, key, a[key][-1]) for a, b in pairs), 1) if pairs else ""
                for key in ("update", "clock")
            )
            loss, clock = (
                with_error(numbers, 2 - i)
                for i, numbers in enumerate(([c["final"] for c in runs], [c["clock"][-1] for c in runs]))
            )
            rows.append([name, shown, str(len(runs)), str(runs[0]["updates"]), loss, clock, *less])
    header = [
        "data",
        "method",
        "seeds",
        "updates",
        "loss",
        "CPU s",
        "less Adam's, same updates",
        "same seconds",
    ]
    return markdown(header, rows)


def _power(rate: float) -> int:
    """Log2 of a rate."""
    return round(math.log2(rate))


def _draw(drawn: dict[str, dict[str, list[Cell]]], path: Path) -> None:
    """Loss against CPU time above, against updates below."""
    picture, axes = figure(len(drawn), 2, width=3.4, height=2.6)
    axes = axes.reshape(2, len(drawn))
    for column, (name, methods) in enumerate(drawn.items()):
        for row, key in enumerate(("clock", "update")):
            axis = axes[row, column]
            for color, (method, runs) in zip(COLORS, methods.items(), strict=False):
                axis.plot(runs[0][key], runs[0]["loss"], color=color, label=method, lw=1.2)
            axis.set(xscale="log", yscale="log", xlabel="CPU seconds" if key == "clock" else "updates")
            if row == 0:
                axis.set_title(name.upper())
        axes[0, column].set_ylabel("loss of a batch" if column == 0 else "")
    axes[0, 0].legend(fontsize=6)
    save(picture, path)


if __name__ == "__main__":
    main()
