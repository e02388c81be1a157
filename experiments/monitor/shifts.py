"""Accuracy estimated without labels, and alarms, on batches of shifted images and texts.

    python -m experiments.monitor.shifts --sets development
    python -m experiments.monitor.shifts --sets reported
    python -m experiments.monitor.shifts --sets natural

What a network computes of a task's samples under each shift is kept (``--features``), so that every draw is
rows of it, fitted by the function that ``linnet.adapt`` calls. All samples of a set are put together and
drawn from at random, so that batches without a shift are like the training samples. Estimators of accuracy:
the mean confidence, with and without the variance of the outputs; the leave-one-out accuracy plus the
difference of mean confidences (Guillory et al. 2021), likewise; the share of confidences above a threshold
that as many leave-one-out confidences exceed as are right (Garg et al. 2022); the difference of confidences
of outputs that are shrunk by the excess of their variance; and how often the likeliest class stays the same
when outputs are drawn with their variance, on a line of normal quantiles through leave-one-out (as Baek et
al. 2022 do with the agreement of two networks).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from experiments.adapt.tasks import NETWORKS
from experiments.monitor.sources import LABELS, NONE, OTHER, SETS, SEVERITIES, drawn, of_each
from experiments.study import Cell, Study, parser
from experiments.tables import markdown
from linnet.audit.left_out import Reference, of_batch
from linnet.audit.monitor import compared
from linnet.files import load, save
from linnet.fitting.arguments import Choices
from linnet.fitting.fitted import Fitted
from linnet.fitting.last_layer import ending_linear
from linnet.linear.targets import make_targets
from linnet.nested.adapt import HEADS
from linnet.nested.features import RandomHeads
from linnet.nested.nested_fit import solved
from linnet.predictive.noise import probabilities
from linnet.tangent.batch import take

POOL, TESTED = 600, 500
SHOTS = (20, 50)
SIZES = {100: 4, 200: 2, 500: 1}  # samples in a batch, and batches under each shift
UNSHIFTED = 5  # times as many without a shift
LEVEL = 0.05  # of alarms
SHARES = {"mild": 0.4, "strong": 0.1}  # of the samples of every second class that stay
METHODS = (
    "confidence with variance", "confidence", "difference of confidences",
    "difference with variance", "threshold", "shrunk by variance", "agreement of draws",
)  # fmt: skip
DRAWN = 50  # of the outputs
PERMUTATIONS = 199  # of each test


# -- what a network computes -----------------------------------------------------------------------


def features(
    key: str, name: str, sizes: tuple[int, int], folder: Path, data_dir: str | None, alter: bool = False
) -> Any:
    """Features of the pool and of the test samples under each shift, computed once."""
    file = f"{key} {name}".replace(" ", "-").lower()
    if not (folder / f"{file}.safetensors").exists():
        model, found = drawn(key, name, *sizes, data_dir, alter)
        few = take(found.pool, slice(0, 8))
        reader = RandomHeads(ending_linear(model, few), HEADS, 0, None)
        reader.earlier(few)
        rows, tried = (
            {" / ".join(at): reader.staged(x).float() for at, x in one.items()}
            for one in (found.shifted, found.altered)
        )
        save(folder, file, {
            "pool": reader.staged(found.pool).float(), "pool y": found.pool_y, "test y": found.test_y,
            "other y": found.other_y, "shifted": rows, "altered": tried, "width": reader.width,
        })  # fmt: skip
    return load(folder / f"{file}.safetensors", file)


class First(nn.Module):
    """The first of some numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Rows (N, D + E) to (N, D)."""
        return x[:, : self.width]


class Kept(RandomHeads):
    """Features that are known: the examples are their rows."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Sequential(First(width), nn.Linear(width, 2)), HEADS, 0, None, stages=("1",))

    def staged(self, x: Any) -> Tensor:
        """Φ and ψ."""
        found: Tensor = x.double()
        return found

    def phi(self, x: Any) -> Tensor:
        """Φ."""
        return self.staged(x)[:, : self.width]


def fitted(rows: Tensor, y: Tensor, width: int, classes: int) -> Fitted:
    """The fit of ``linnet.adapt`` of kept features."""
    targets = make_targets(y, classes, dtype=torch.float32)
    return solved(Kept(width), rows, targets, None, Choices("dual", "loo"))


# -- estimators of accuracy ------------------------------------------------------------------------


def kept_class(outputs: Tensor, variance: Tensor) -> Tensor:
    """How often outputs that are drawn have the largest where their mean has it, (T,)."""
    draws = torch.randn(
        DRAWN, *outputs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    moved = outputs + variance.sqrt()[:, None] * draws
    return (moved.argmax(2) == outputs.argmax(1)).double().mean(0)


def on_the_line(accuracy: float, agreed: float, before: float) -> Tensor:
    """The accuracy that falls as agreement does, on the scale of normal quantiles (Baek et al. 2022)."""
    a, b, c = torch.special.ndtri(torch.tensor([accuracy, agreed, before]).double().clamp(0.01, 0.99))
    return torch.special.ndtr(a + b - c)


@dataclass(frozen=True)
class Known:
    """What estimators know of a fit, and of the examples under a shift."""

    reference: Reference
    fit: Fitted
    outputs: Tensor  # (T, C)
    variance: Tensor  # (T,)
    moderated: Tensor  # probabilities with the variance, (T, C)


def left_out(known: Known) -> tuple[Tensor, Tensor, Tensor]:
    """Of the training samples: which are right, the confidence without and with the variance."""
    unseen, fit = known.reference.unseen, known.fit
    assert unseen.p is not None
    assert unseen.spread is not None
    assert fit.temperature is not None
    spread = fit.variance_scale * unseen.spread[:, None].expand_as(unseen.outputs)
    p = probabilities(unseen.outputs, spread, fit.temperature, fit._possible)
    return known.reference.right, unseen.p.amax(1), p.amax(1)


def estimates(known: Known, at: Tensor) -> dict[str, float]:
    """The accuracy on some of the examples by every method."""
    right, plain, moderated = left_out(known)
    accuracy, fit, unseen = right.mean(), known.fit, known.reference.unseen
    outputs, variance = known.outputs[at], known.variance[at]
    own = fit._class_probs(outputs).amax(1)
    wide = known.moderated[at].amax(1)
    wrong = round(float((1 - right).sum()))
    threshold = plain.sort().values[wrong - 1] if wrong else plain.min() - 1
    assert unseen.spread is not None
    mean = unseen.spread.mean()
    shrunk, before = (
        fit._class_probs(f * (mean / v).clamp(max=1).sqrt()[:, None]).amax(1)
        for f, v in ((outputs, variance), (unseen.outputs, unseen.spread))
    )
    found = (
        wide.mean(), own.mean(), accuracy + own.mean() - plain.mean(),
        accuracy + wide.mean() - moderated.mean(), (own > threshold).double().mean(),
        accuracy + shrunk.mean() - before.mean(),
        on_the_line(float(accuracy), float(kept_class(outputs, variance).mean()),
                    float(kept_class(unseen.outputs, unseen.spread).mean())),
    )  # fmt: skip
    return {name: 100 * float(one) for name, one in zip(METHODS, found, strict=True)}


# -- cells -----------------------------------------------------------------------------------------


def batches(shift: str, severity: str, y: Tensor, size: int, seed: int) -> list[Tensor]:
    """Positions of the samples of batches, each without any sample twice."""
    generator, found = torch.Generator().manual_seed(seed), []
    count = SIZES[size] * (UNSHIFTED if shift == NONE and size < TESTED else 1)
    for _ in range(count):
        order = torch.randperm(len(y), generator=generator)
        if shift == LABELS:
            order = order[(y[order] % 2 == 0) | (torch.rand(len(y), generator=generator) < SHARES[severity])]
        found.append(order[:size])
    return [at for at in found if len(at) == size]


def watched(kept: Any, shots: int, seed: int) -> dict[str, Any]:
    """For the batches of each shift, severity and size: accuracy, alarms, errors of each estimator."""
    pool_y, width = kept["pool y"], int(kept["width"])
    at = of_each(pool_y, shots, torch.Generator().manual_seed(seed))
    fit = fitted(kept["pool"][at], pool_y[at], width, int(pool_y.max()) + 1)
    reference, found = Reference.of(fit), []
    for name, rows in kept["shifted"].items():
        shift, severity = name.split(" / ")
        y = kept["other y"] if shift == OTHER else kept["test y"]
        prediction, unseen = fit.predictive(rows), of_batch(fit, reference, rows)
        known = Known(
            reference, fit, prediction.mean.double(), prediction.variance.double().mean(1),
            prediction.probs.double(),
        )  # fmt: skip
        right = (prediction.mean.argmax(1) == y).double()
        of_these = [(shift, severity)]
        of_these += [(LABELS, each) for each in SEVERITIES] if shift == NONE else []
        for own, severe in of_these:
            for size in SIZES:
                places = batches(own, severe, y, size, seed)
                if not places:
                    continue
                truth = [100 * float(right[place].mean()) for place in places]
                alarms = sum(
                    compared(reference.unseen, unseen.taken(place), PERMUTATIONS) <= LEVEL for place in places
                )
                told = [estimates(known, place) for place in places]
                errors = [[one[m] - t for one, t in zip(told, truth, strict=True)] for m in METHODS]
                row = [fmean(truth), alarms, *(fmean(map(abs, each)) for each in errors), *map(fmean, errors)]
                found.append([own, severe, size, len(places), *(round(value, 2) for value in row)])
    accuracy = 100 * float(reference.right.mean())
    return {"n": len(at), "left out": accuracy, "tested": len(kept["test y"]), "batches": found}


# -- tables ----------------------------------------------------------------------------------------


def rows_of(cells: Sequence[Cell], part: str) -> list[list[Any]]:
    """The rows of all cells of a set of tasks."""
    return [row for cell in cells if cell["set"] == part for row in cell["batches"]]


def pooled(rows: Sequence[list[Any]], column: int) -> float:
    """The mean of a column, each row by its batches."""
    return sum(row[3] * row[column] for row in rows) / sum(row[3] for row in rows)


def kinds(rows: Sequence[list[Any]]) -> list[tuple[str, str]]:
    """Shifts and severities in the order in which they come."""
    found = dict.fromkeys((row[0], row[1]) for row in rows)
    return sorted(found, key=lambda kind: (kind[0] != NONE, [one[0] for one in found].index(kind[0])))


def table(cells: Sequence[Cell], part: str = "reported") -> str:
    """Markdown: a row a shift, with alarms and the mean absolute error of each estimator in points."""
    rows = rows_of(cells, part)
    made = []
    for shift, severity in kinds(rows):
        own = [row for row in rows if row[:2] == [shift, severity]]
        alarms = sum(row[5] for row in own) / sum(row[3] for row in own)
        errors = [f"{pooled(own, 6 + m):.1f}" for m in range(len(METHODS))]
        bias, accuracy = f"{pooled(own, 6 + len(METHODS)):+.1f}", f"{pooled(own, 4):.1f}"
        made.append([" ".join((shift, severity)).strip(), accuracy, f"{100 * alarms:.1f}", *errors, bias])
    header = ("shift", "accuracy %", "alarms %", *METHODS, "bias of the first")
    return markdown(header, made)


def development(cells: Sequence[Cell]) -> str:
    """The same of development tasks."""
    return table(cells, "development")


def sizes(cells: Sequence[Cell]) -> str:
    """Markdown: alarms and errors of the estimate by samples a class and size of the batch."""
    made = []
    for shots in SHOTS:
        every = rows_of([cell for cell in cells if cell["shots"] == shots], "reported")
        for size in SIZES:
            own = [row for row in every if row[2] == size]
            none = [row for row in own if row[0] == NONE]
            parts = [[row for row in own if row[0] != NONE and row[1] == one] for one in SEVERITIES]
            alarms = [100 * sum(r[5] for r in one) / sum(r[3] for r in one) for one in (none, *parts)]
            errors = [pooled(one, 6) for one in (none, *parts)]
            made.append([f"{shots}, {size}", *(f"{one:.1f}" for one in (*alarms, *errors))])
    header = ["samples a class, in a batch"]
    header += [f"{what}, {one}" for what in ("alarms %", "error") for one in ("no shift", *SEVERITIES)]
    return markdown(header, made)


def tasks(cells: Sequence[Cell]) -> str:
    """Markdown: alarms and errors of the estimate by task."""
    made = []
    for part in ("development", "reported"):
        for network, task in dict.fromkeys((c["network"], c["task"]) for c in cells if c["set"] == part):
            own = [cell for cell in cells if (cell["set"], cell["task"]) == (part, task)]
            rows = rows_of(own, part)
            none = [row for row in rows if row[0] == NONE]
            parts = [none, *([row for row in rows if row[0] != NONE and row[1] == one] for one in SEVERITIES)]
            before, after = fmean(cell["left out"] for cell in own), pooled(none, 4)
            alarms = [100 * sum(r[5] for r in one) / sum(r[3] for r in one) for one in parts]
            numbers = (before, after, *alarms, *(pooled(one, 6) for one in parts))
            made.append([f"{task}, {network} ({part})", *(f"{number:.1f}" for number in numbers)])
    header = ["task", "left out %", "no shift: accuracy %"]
    header += [f"{what}, {one}" for what in ("alarms %", "error") for one in ("no shift", *SEVERITIES)]
    return markdown(header, made)


def natural(cells: Sequence[Cell]) -> str:
    """Markdown: a row a set and whose samples they are, of shifts that nobody made."""
    made = []
    every = [cell for cell in cells if cell["set"] == "natural"]
    for task in (*dict.fromkeys(cell["task"] for cell in every), "all"):
        rows = rows_of([cell for cell in every if task in (cell["task"], "all")], "natural")
        for whose, shift in (("its own", NONE), ("others'", OTHER)):
            own = [row for row in rows if row[0] == shift]
            alarms = 100 * sum(row[5] for row in own) / sum(row[3] for row in own)
            columns = [pooled(own, at) for at in (4, *range(6, 6 + len(METHODS)))]
            bias = f"{pooled(own, 6 + len(METHODS)):+.1f}"
            numbers = [f"{number:.1f}" for number in (columns[0], alarms, *columns[1:])]
            made.append([task, whose, *numbers, bias])
    header = ("set", "whose samples", "accuracy %", "alarms %", *METHODS, "bias of the first")
    return markdown(header, made)


def run(
    name: str,
    description: str,
    sizes: tuple[int, int],
    shots: Sequence[int],
    compute: Callable[[Any, int, int], dict[str, Any]],
    tables: Callable[[Sequence[Cell], str], str],
    alter: bool = False,
) -> None:
    """Run a study of every task, number of samples and draw; features are read where they are needed."""
    arguments = parser(description)
    folder = Path("runs/experiments/monitor") / ("altered" if alter else "features")
    arguments.add_argument("--features", type=Path, default=folder)
    sets = [part for part in SETS if part != "natural" or not alter]
    arguments.add_argument("--sets", nargs="+", default=sets, choices=sets)
    given = arguments.parse_args()
    study, cells = Study(name, given), []
    for part in given.sets:
        for key, task in SETS[part]:
            kept = cache(partial(features, key, task, sizes, given.features, given.data_dir, alter))
            for count, seed in itertools.product(shots, study.seeds):

                def cell(count: int = count, seed: int = seed, kept: Any = kept) -> dict[str, Any]:
                    return compute(kept(), count, seed)

                network = NETWORKS[key].name
                what = {"set": part, "network": network, "task": task, "shots": count, "seed": seed}
                cells.append(study.cell(what, cell))
    parts = [tables(cells, part) for part in given.sets if part != "natural"]
    study.publish("\n\n".join([*parts, natural(cells)] if "natural" in given.sets else parts), cells)


def main() -> None:
    """Run the study."""
    run("monitor/shifts", __doc__ or "", (POOL, TESTED), SHOTS, watched, table)


if __name__ == "__main__":
    main()
