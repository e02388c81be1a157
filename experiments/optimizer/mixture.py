"""Botev 2020, figure 4.4: Fisher and Gauss-Newton where they differ, on a mixture of two classifiers.

Even against odd digits of MNIST with p(y | h) = s(h1) Bernoulli(y; s(h2)) + s(-h1) Bernoulli(y; s(h3)), a
likelihood outside the exponential family (eq. 4.28), and the network D-1000-500-250-30-3. KFAC estimates the
Fisher matrix from sampled labels; KFLR and KFRA take the Gauss-Newton matrix. The thesis shows curves: all
second-order methods reach a loss of about 1e-8, faster than Adam by update (and by second on a CPU), Adam
ends lower; KFAC is almost identical to KFLR.

Default: an eighth of the widths, 6,000 images, batch 250, 100 updates of the second-order and 500 of Adam.
``--full``: the thesis' widths, 50,000 images, batch 1,000, 5,000 and 40,000 updates and the whole grid.

    python -m experiments.optimizer.mixture
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.figures import COLORS, figure, save
from experiments.optimizer.autoencoders import best_of
from experiments.optimizer.problems import WIDTHS, chain, reduced
from experiments.optimizer.training import RATES, Task, decades, first_order, grid, loss_at, second_order
from experiments.sources import images, pixels
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, mean_and_error, with_error
from linnet.likelihoods import mixture_of_classifiers

SECOND = {"KFAC": "Fisher, sampled labels", "KFLR": "Gauss-Newton, exact", "KFRA": "Gauss-Newton, recursion"}


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=2)
    found.add_argument("--widths", type=int, nargs="+", default=None)
    found.add_argument("--images", type=int, default=None)
    found.add_argument("--batch", type=int, default=None)
    found.add_argument("--updates", type=int, default=None, help="of the second-order methods")
    found.add_argument("--factor", type=int, default=None, help="Adam's updates for each of these")
    return found


class Mixture:
    """All runs."""

    def __init__(self, study: Study, args: argparse.Namespace) -> None:
        self.study, self.args = study, args
        full = args.full
        self.widths = tuple(args.widths or (WIDTHS if full else reduced(full)))
        self.count, self.batch = (
            args.images or (50000 if full else 6000),
            args.batch or (1000 if full else 250),
        )
        self.updates = args.updates or (5000 if full else 100)
        self.long = self.updates * (args.factor or (8 if full else 5))
        self._data: tuple[Tensor, Tensor] | None = None

    def _task(self, seed: int) -> Task:
        """The problem with a seed."""
        if self._data is None:
            found = images("mnist", self.args.data_dir)
            x = pixels(found.train_x[: self.count]).flatten(1).to(self.args.device)
            self._data = x, (found.train_y[: self.count] % 2).to(self.args.device)
        x, y = self._data

        def make() -> Any:
            torch.manual_seed(seed)
            return chain([x.shape[1], *self.widths, 3], "tanh")

        return Task(make, x, y, mixture_of_classifiers(psd="clip"), self.batch, seed)

    def _cell(self, method: str, seed: int, updates: int, **more: float) -> Cell:
        """One run."""
        what = {
            "method": method,
            "seed": seed,
            "updates": updates,
            "batch": self.batch,
            "images": self.count,
            "widths": list(self.widths),
            **more,
        }
        if more:
            return self.study.cell(
                what, lambda: first_order(self._task(seed), method, more["rate"], more["period"], updates)
            )
        return self.study.cell(what, lambda: second_order(self._task(seed), method, updates))

    def second(self, method: str) -> list[Cell]:
        """Runs with curvature."""
        return [self._cell(method, seed, self.updates) for seed in self.study.seeds]

    def adam(self) -> tuple[list[Cell], list[Cell]]:
        """All of Adam's runs, and those of its best setting."""
        screened = (
            [] if self.args.full else [self._cell("Adam", 0, self.updates, rate=r, period=1.0) for r in RATES]
        )
        settings = grid(self.args.full, [(cell["rate"], cell["final"]) for cell in screened])
        runs = [self._cell("Adam", 0, self.long, rate=rate, period=period) for rate, period in settings]
        best = min(runs, key=lambda cell: loss_at(cell, "update", self.long))
        chosen = [
            self._cell("Adam", seed, self.long, rate=best["rate"], period=best["period"])
            for seed in self.study.seeds
        ]
        return [*screened, *runs], chosen


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    study = Study("optimizer/mixture", args)
    mixture = Mixture(study, args)
    runs = {method: mixture.second(method) for method in SECOND}
    every, adam = mixture.adam()
    cells = [*(c for found in runs.values() for c in found), *every, *adam[1:]]
    study.publish(table(cells), cells)
    picture, axes = figure(2, 1)
    for axis, key in zip(axes, ("clock", "update"), strict=True):
        for color, (method, found) in zip(COLORS, {**runs, "Adam": adam}.items(), strict=False):
            axis.plot(found[0][key], found[0]["loss"], color=color, label=method)
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="CPU seconds" if key == "clock" else "updates",
            ylabel="loss of a batch",
        )
    axes[0].legend()
    save(picture, study.out / "mixture.svg")


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a method; decades of the loss below Adam's best setting and KFAC, paired by seed."""
    of = {method: [cell for cell in cells if cell["method"] == method] for method in SECOND}
    adam = best_of(cells, "Adam")
    rows = []
    for method, matrix in SECOND.items():
        pairs = list(zip(of[method], adam, strict=True))
        below = [
            with_error((decades(loss_at(b, key, a[key][-1]), a["final"]) for a, b in pairs), 1)
            for key in ("update", "clock")
        ]
        kfac = (decades(b["final"], a["final"]) for a, b in zip(of[method], of["KFAC"], strict=True))
        ahead = "" if method == "KFAC" else with_error(kfac, 1)
        rows.append([method, matrix, *_ends(of[method]), *below, ahead])
    setting = f"rate 2^{round(math.log2(adam[0]['rate']))}, halved every {adam[0]['period']:.0%}"
    rows.append(["Adam", setting, *_ends(adam), "", "", ""])
    header = ["method", "matrix", "seeds", "updates", "loss", "CPU s"]
    return markdown([*header, "decades below Adam, same updates", "same seconds", "below KFAC"], rows)


def _ends(runs: Sequence[Cell]) -> list[str]:
    """Seeds, updates, last loss and seconds."""
    seconds = with_error((cell["clock"][-1] for cell in runs), 1)
    return [str(len(runs)), str(runs[0]["updates"]), _pm(mean_and_error(c["final"] for c in runs)), seconds]


def _pm(value: tuple[float, float]) -> str:
    """Mean ± standard error, in powers of ten."""
    return f"{value[0]:.2e}" if math.isnan(value[1]) else f"{value[0]:.2e} ± {value[1]:.0e}"


if __name__ == "__main__":
    main()
