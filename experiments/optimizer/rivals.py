"""Botev 2020, figure 4.1: curvature without its moving average, and all first-order methods on the grid.

The autoencoders of ``experiments.optimizer.autoencoders`` at its reduced size. KFRA and KFAC run with the
average of ``GaussNewton`` and with the curvature of the batch alone. Adam, SGD, SGD with momentum and
Nesterov's gradient run at learning rates 2^-6 ... 2^-13 halved every 100 % ... 6.25 % of the updates with
seed 0; the best setting of each, and Adam at its default rate of 1e-3, with all seeds. The thesis: Adam
outperforms the others across the board, and varies with its settings (curves of the means of its 10 and 20
best), most on FACES.

    python -m experiments.optimizer.rivals --threads 1 --seeds 5
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from experiments.optimizer.autoencoders import best_of
from experiments.optimizer.problems import DATA, Problem, autoencoder, problem, reduced
from experiments.optimizer.training import DECAYS, FIRST_ORDER, RATES, Task, ended, first_order, second_order
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error

IMAGES, BATCH = 6000, 250
DEFAULT = (1e-3, 1.0)  # Adam's rate, without decay
NO_AVERAGE = 1e-9  # decay of an average that is the last batch


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=5)
    found.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    found.add_argument(
        "--widths", type=int, nargs="+", default=list(reduced(False)), help="of the first half"
    )
    found.add_argument("--images", type=int, default=IMAGES)
    found.add_argument(
        "--updates", type=int, default=100, help="of methods with curvature; others take 5 times"
    )
    return found


class Runs:
    """All runs on one data set."""

    def __init__(self, study: Study, name: str, args: argparse.Namespace) -> None:
        self.study, self.name, self.args = study, name, args
        self._problem: Problem | None = None

    def _task(self, seed: int) -> Task:
        """The problem with a seed; data are read when the first cell is computed."""
        if self._problem is None:
            self._problem = problem(self.name, self.args.images, self.args.data_dir)
        x, widths = self._problem.x.to(self.args.device), self.args.widths
        make = partial(autoencoder, x.shape[1], widths, "tanh", seed)
        return Task(make, x, x, self._problem.likelihood, BATCH, seed)

    def _what(self, method: str, seed: int, **more: Any) -> dict[str, Any]:
        """What a run depends on."""
        sizes = {"widths": self.args.widths, "images": self.args.images}
        return {"data": self.name, "method": method, "seed": seed, **sizes, **more}

    def second(self, method: str, average: bool, seed: int) -> Cell:
        """A run with curvature."""
        settings = {} if average else {"average": NO_AVERAGE}
        updates = self.args.updates
        return self.study.cell(
            self._what(method, seed, average=average, updates=updates),
            lambda: ends(second_order(self._task(seed), method, updates, **settings)),
        )

    def first(self, method: str, rate: float, period: float, seed: int) -> Cell:
        """A run of a first-order method."""
        updates = 5 * self.args.updates
        return self.study.cell(
            self._what(method, seed, rate=rate, period=period, updates=updates),
            lambda: ends(first_order(self._task(seed), method, rate, period, updates)),
        )


def ends(run: dict[str, Any]) -> dict[str, Any]:
    """The last loss of a run, its CPU seconds and its updates; there are too many runs for their curves."""
    return {"final": run["final"], "clock": run["clock"][-1], "done": run["update"][-1]}


def of(cells: Sequence[Cell], **where: Any) -> list[Cell]:
    """The cells that agree with this."""
    return [cell for cell in cells if all(cell.get(key) == value for key, value in where.items())]


def less(ours: Sequence[Cell], theirs: Sequence[Cell]) -> str:
    """Difference of final losses, paired by seed."""
    return with_error((a["final"] - b["final"] for a, b in zip(ours, theirs, strict=True)), 1)


def averages(cells: Sequence[Cell]) -> str:
    """Markdown: curvature with its average and without."""
    rows = []
    for name in dict.fromkeys(cell["data"] for cell in cells):
        for method in dict.fromkeys(cell["method"] for cell in of(cells, data=name) if "average" in cell):
            kept, none = (of(cells, data=name, method=method, average=way) for way in (True, False))
            losses = [with_error((cell["final"] for cell in runs), 1) for runs in (kept, none)]
            rows.append([name, method, str(len(kept)), *losses, less(none, kept)])
    return markdown(["data", "method", "seeds", "average", "batch alone", "batch alone less average"], rows)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: the first-order methods, at their best settings, over the grid, and Adam by default."""
    rows = []
    for name in dict.fromkeys(cell["data"] for cell in cells):
        own = of(cells, data=name)
        adam = best_of(own, "Adam")
        for method in FIRST_ORDER:
            runs = best_of(own, method)
            grid = [c for c in sorted(of(own, method=method, seed=0), key=ended) if c["rate"] != DEFAULT[0]]
            means = [f"{statistics.fmean(cell['final'] for cell in grid[:n]):.1f}" for n in (10, 20)]
            setting = f"{runs[0]['rate']:.2g}, {runs[0]['period']:.0%}"
            default = of(own, method=method, rate=DEFAULT[0])
            by_default = with_error((cell["final"] for cell in default), 1)
            loss = with_error((cell["final"] for cell in runs), 1)
            rows.append([name, method, setting, loss, less(runs, adam), *means, by_default])
    header = ["data", "method", "best rate, halved every", "loss", "less Adam's", "mean of 10 best", "of 20"]
    return markdown([*header, "rate 1e-3"], rows)


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    study = Study("optimizer/rivals", args)
    cells: list[Cell] = []
    for name in args.data:
        runs = Runs(study, name, args)
        ways = [(method, average) for method in ("KFRA", "KFAC") for average in (True, False)]
        cells += [runs.second(*way, seed) for way in ways for seed in study.seeds]
        for method in FIRST_ORDER:
            grid = [runs.first(method, rate, period, 0) for rate in RATES for period in DECAYS]
            best = min(grid, key=ended)
            cells += grid
            cells += [runs.first(method, best["rate"], best["period"], seed) for seed in study.seeds[1:]]
        cells += [runs.first("Adam", *DEFAULT, seed) for seed in study.seeds]
    study.publish(f"{averages(cells)}\n\n{table(cells)}", cells)


if __name__ == "__main__":
    main()
