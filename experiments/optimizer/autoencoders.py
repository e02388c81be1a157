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
from experiments.optimizer.training import RATES, Task, first_order, grid, loss_at, second_order
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, mean_and_error

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
    rows, cells, drawn, verdicts = [], [], {}, {}
    for name in args.data:
        comparison = Comparison(study, name, args)
        second = {m: [comparison.second(m, seed) for seed in study.seeds] for m in SECOND}
        first = {m: comparison.tuned(m) for m in FIRST}
        drawn[name] = {**second, **{m: best for m, (_, best) in first.items()}}
        cells += [
            c for runs in [*second.values(), *(every + best for every, best in first.values())] for c in runs
        ]
        verdicts[name] = _rows(rows, name, comparison, second, first)
    header = [
        "data",
        "method",
        "updates",
        "loss",
        "CPU s",
        "best first-order loss, same updates",
        "same seconds",
    ]
    unique = list(
        {
            str((c["data"], c["method"], c["seed"], c["updates"], c.get("rate"), c.get("period"))): c
            for c in cells
        }.values()
    )
    study.publish(
        markdown(header, rows),
        unique,
        widths=list(WIDTHS if args.full else reduced(False)),
        verdicts=verdicts,
    )
    _draw(drawn, study.out / "autoencoders.svg")


def _rows(
    rows: list[list[str]],
    name: str,
    comparison: Comparison,
    second: dict[str, list[Cell]],
    first: dict[str, tuple[list[Cell], list[Cell]]],
) -> dict[str, Any]:
    """Add a data set's rows; who was lower."""
    every = [cell for runs, best in first.values() for cell in [*runs, *best]]
    verdict = {}
    for method, runs in second.items():
        loss, seconds = mean_and_error(c["final"] for c in runs), mean_and_error(c["clock"][-1] for c in runs)
        same_updates = min(loss_at(cell, "update", comparison.updates) for cell in every)
        same_time = min(loss_at(cell, "clock", seconds[0]) for cell in every)
        rows.append(
            [
                name,
                method,
                str(comparison.updates),
                _pm(loss),
                f"{seconds[0]:.1f}",
                f"{same_updates:.2f}",
                f"{same_time:.2f}",
            ]
        )
        verdict[method] = {"per update": loss[0] < same_updates, "per second": loss[0] < same_time}
    for method, (_, best) in first.items():
        loss, seconds = mean_and_error(c["final"] for c in best), mean_and_error(c["clock"][-1] for c in best)
        setting = f"{method}, rate 2^{_power(best[0]['rate'])}, halved every {best[0]['period']:.0%}"
        rows.append([name, setting, str(comparison.long), _pm(loss), f"{seconds[0]:.1f}", "", ""])
    return verdict


def _pm(value: tuple[float, float]) -> str:
    """Mean ± standard error."""
    return f"{value[0]:.2f}" if value[1] != value[1] else f"{value[0]:.2f} ± {value[1]:.2f}"


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
