"""Section 5.2: whether iterative linearization finds alike solutions with all periods K.

Goldwaser and Ge leave open whether all finite K end at similar solutions, with a step to linearized
training, or whether solutions change gradually with K. Here networks of one initialization and one order of
the mini-batches are trained with several K to the same training loss and compared in pairs: the share of
test images that two of them put in the same class, and the centered alignment of their tangent kernels on
test images. Beside these stand pairs that differ by chance alone: another order of the mini-batches, and
another initialization. Of linearized training (no update) the linear model is compared, and the kernel
of the initial weights.

    python -m experiments.iterative_linearization.solutions --threads 1
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.iterative_linearization.networks import lenet
from experiments.iterative_linearization.period import named
from experiments.iterative_linearization.training import Plan, Split, accuracy, cifar, train
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

SIDE = 16
Run = tuple[int | None, int, int]  # K, seed of the weights, order of the mini-batches


@dataclass(frozen=True)
class Solution:
    """What is compared of a trained network.

    Args:
        classes: Predicted classes of the test images.
        kernel: Tangent kernel of the first of them, its trace over outputs.
    """

    classes: Tensor
    kernel: Tensor


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=3)
    found.add_argument("--channels", type=int, default=10)
    found.add_argument("--images", type=int, default=1000, help="trained on")
    found.add_argument("--test", type=int, default=1000)
    found.add_argument("--kernel", type=int, default=200, help="test images in the kernels")
    found.add_argument("--batch", type=int, default=32)
    found.add_argument("--rate", type=float, default=0.003)
    found.add_argument("--steps", type=int, default=8000, help="at most")
    found.add_argument("--loss", type=float, default=1.0, help="training loss at which a run ends")
    found.add_argument("--periods", type=int, nargs="+", default=[1, 10, 100, 1000, 0], help="0 for never")
    return found


def trained(run: Run, data: Split, given: argparse.Namespace) -> tuple[dict[str, Any], Solution]:
    """A run's end, and its solution."""
    period, seed, order = run
    model = lenet(given.channels, SIDE, seed)
    first = copy.deepcopy(model)
    plan = Plan(period, given.steps, given.rate, given.batch, seed=order, stop=given.loss)
    told = train(model, data, plan)
    solved: nn.Module = model
    if period is None:
        solved = linnet.linearize(first)
        ended = dict(model.named_parameters())
        with torch.no_grad():
            for name, delta in solved.delta.items():
                delta.copy_(ended[name] - solved.theta0[name])
    with torch.no_grad():
        classes = torch.cat([solved(x).argmax(1) for x in data.test_x.split(500)])
    kernel = linnet.spectrum.gram(
        first if period is None else model, data.test_x[: given.kernel], form="trace", progress=False
    )
    ends = {
        "steps": told["step"][-1], "loss": told["loss"][-1], "diverged": told["diverged"],
        "accuracy": float((classes == data.test_y).double().mean()),
        "training accuracy": accuracy(solved, data.x, data.y), "updates": told["updates"],
    }  # fmt: skip
    return ends, Solution(classes, kernel)


def compared(one: Solution, other: Solution) -> dict[str, float]:
    """How alike two solutions are."""
    return {
        "agreement": float((one.classes == other.classes).double().mean()),
        "alignment": linnet.spectrum.centered_alignment(one.kernel, other.kernel),
    }


def pairs(periods: Sequence[int | None], seeds: Sequence[int]) -> list[tuple[str, int, Run, Run]]:
    """Pairs with what they differ in: K, the order of the mini-batches, or the weights they begin at."""
    found: list[tuple[str, int, Run, Run]] = []
    for seed in seeds:
        found += [
            ("K", seed, (one, seed, seed), (other, seed, seed))
            for one, other in itertools.combinations(periods, 2)
        ]
        found += [("order", seed, (k, seed, seed), (k, seed, seed + 1000)) for k in periods[:1]]
        after = seeds[(seed + 1) % len(seeds)]
        found += [("weights", seed, (k, seed, seed), (k, after, after)) for k in periods]
    return found


def table(cells: Sequence[Cell]) -> str:
    """Markdown: how alike pairs are, a line for each kind of pair."""
    rows = []
    own = [cell for cell in cells if "agreement" in cell]
    for kind, one, other in dict.fromkeys((c["differ in"], c["one"], c["other"]) for c in own):
        where = {"differ in": kind, "one": one, "other": other}
        text = {
            "K": f"K = {one} and {other}",
            "order": f"K = {one}, another order of the batches",
            "weights": f"K = {one}, other initial weights",
        }[kind]
        agreement = chosen(own, "agreement", **where)
        alignment = chosen(own, "alignment", **where)
        rows.append([text, len(agreement), with_error(agreement, 1, 100), with_error(alignment, 3)])
    return markdown(["", "pairs", "same class, % of test images", "alignment of tangent kernels"], rows)


def ends(cells: Sequence[Cell]) -> str:
    """Markdown: where the runs end, a line for each K."""
    rows = []
    own = [cell for cell in cells if "updates" in cell and cell["order"] == cell["seed"]]
    for period in dict.fromkeys(cell["K"] for cell in own):
        runs = [cell for cell in own if cell["K"] == period]
        rows.append([
            named(period), len(runs), with_error(chosen(runs, "steps"), 0),
            with_error(chosen(runs, "updates"), 0), with_error(chosen(runs, "accuracy"), 1, 100),
            with_error(chosen(runs, "training accuracy"), 1, 100), with_error(chosen(runs, "loss"), 3),
        ])  # fmt: skip
    return markdown(["K", "seeds", "steps", "feature updates", "test %", "train %", "loss"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study."""
    given = arguments().parse_args(argv)
    study = Study("iterative_linearization/solutions", given)
    periods = [k or None for k in given.periods]
    sizes = {key: getattr(given, key) for key in ("channels", "images", "test", "kernel", "batch", "rate")}
    shared = {**sizes, "most": given.steps, "to": given.loss}

    @cache
    def data() -> Split:
        return cifar(given.images, given.test, SIDE, given)

    def file(run: Run) -> Any:
        return study.out / f"solution-{'-'.join(map(str, run))}.pt"

    def run_cell(run: Run) -> Cell:
        def compute() -> dict[str, Any]:
            told, solution = trained(run, data(), given)
            torch.save({"classes": solution.classes, "kernel": solution.kernel}, file(run))
            return told

        period, seed, order = run
        return study.cell({"K": period, "seed": seed, "order": order, **shared}, compute)

    def pair_cell(kind: str, seed: int, one: Run, other: Run) -> Cell:
        what = {"differ in": kind, "seed": seed, "one": named(one[0]), "other": named(other[0]), **shared}

        def compute() -> dict[str, float]:
            return compared(*(Solution(**torch.load(file(run), weights_only=True)) for run in (one, other)))

        return study.cell(what, compute)

    listed = pairs(periods, [*study.seeds])
    cells = [run_cell(run) for run in dict.fromkeys(run for *_, one, other in listed for run in (one, other))]
    cells += [pair_cell(*pair) for pair in listed]
    study.publish(f"{ends(cells)}\n\n{table(cells)}", cells)


if __name__ == "__main__":
    main()
