"""What a fit is worth under shifts that are tried on its training examples, and under those that are not.

    python -m experiments.monitor.stress

Every training example is altered and judged without having been seen, and the accuracy compared with that
on test samples under the same shift. Then the accuracy of batches of these is estimated without labels as
``fit.monitor`` does: with no shift named, with all kinds but that of the batch, with its kind in the other
strength alone, and with all of them. The error that the draws of batches and of training samples leave
stands beside them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from experiments.monitor.shifts import LEVEL, PERMUTATIONS, fitted, run
from experiments.monitor.sources import NONE, OTHER, SEVERITIES, of_each
from experiments.study import Cell
from experiments.tables import markdown, with_error
from linnet.audit.left_out import Reference, Unseen, of_batch
from linnet.audit.monitor import Met, compared, expected, likened
from linnet.audit.stress import references, stress_test
from linnet.fitting.fitted import Fitted

POOL, TESTED = 3000, 1000  # at most
SHOTS = (20, 50, 100)
SIZES = (100, 500)  # samples in a batch
PARTS = (1.0, 0.5)  # of a batch that meet the shift
BATCHES = 4  # under each shift, of each size and part
EXPLAINED = (0.0, 0.5, 0.9, 1.01)  # of the drift
NAMED = ("no shift", "other kinds", "other strength", "all")  # of what is tried on the training samples


@dataclass(frozen=True)
class Judged:
    """What is said of test samples under a shift."""

    unseen: Unseen
    probs: Tensor  # (T, K)
    right: Tensor  # (T,)

    def mixed(self, calm: Judged, place: Tensor, met: Tensor) -> tuple[Unseen, Any, Tensor]:
        """The same of samples at some places, as they are where they have not met the shift."""

        def of(one: Tensor | None, other: Tensor | None) -> Tensor:
            assert one is not None
            assert other is not None
            return torch.where(met.view(-1, *[1] * (one.ndim - 1)), one[place], other[place])

        unseen = (of(getattr(self.unseen, n), getattr(calm.unseen, n)) for n in ("outputs", "spread", "p"))
        probs = SimpleNamespace(probs=of(self.probs, calm.probs))
        return Unseen(*unseen), probs, of(self.right, calm.right)


def judged(fit: Fitted, reference: Reference, rows: Tensor, y: Tensor) -> Judged:
    """By fits without one training sample, and by all."""
    prediction = fit.predictive(rows)
    right = (prediction.mean.argmax(1) == y[: len(rows)]).double()
    return Judged(of_batch(fit, reference, rows), prediction.probs.double(), right)


def tried(every: Mapping[str, Tensor], kind: str, severity: str) -> dict[str, dict[str, Tensor]]:
    """The shifts that are named for batches of a kind and severity."""
    apart = {name: x for name, x in every.items() if not name.startswith(f"{kind} /")}
    strength = {name: x for name, x in every.items() if name != f"{kind} / {severity}"}
    return {"other kinds": apart, "other strength": strength, "all": dict(every)}


def watched(kept: Any, shots: int, seed: int) -> dict[str, Any]:
    """For each shift: accuracies on training and test samples, and errors of the estimates of batches."""
    pool_y, width = kept["pool y"], int(kept["width"])
    if int(pool_y.bincount().min()) < 1.2 * shots:  # draws would be nearly one
        return {"n": 0, "tested": len(kept["test y"]), "shifts": []}
    at = of_each(pool_y, shots, torch.Generator().manual_seed(seed))
    fit = fitted(kept["pool"][at], pool_y[at], width, int(pool_y.max()) + 1)
    every = {name: rows[at] for name, rows in kept["altered"].items()}
    reference, found = Reference.of(fit), []
    under = {one.shift: one for one in references(fit, reference, every)}
    records = {record.shift: record for record in stress_test(fit, every)}
    told = {name: judged(fit, reference, rows, kept["test y"]) for name, rows in kept["shifted"].items()}
    calm = told[f"{NONE} / "]
    for name, own in told.items():
        kind, severity = name.split(" / ")
        if kind == OTHER:
            continue
        record = records[None if kind == NONE else name]
        draw = torch.Generator().manual_seed(seed)
        named = {"no shift": {}} | tried(every, kind, severity)
        batches = []
        for size, part, _ in itertools.product(SIZES, PARTS, range(BATCHES)):
            if (kind == NONE and part < 1) or size > len(own.right):
                continue
            place = torch.randperm(len(kept["test y"]), generator=draw)[:size]
            shifted = torch.arange(size) < round(part * size)
            batch, probs, right = own.mixed(calm, place, shifted)
            met, told = [Met(reference, 0.0, 0.0)], []
            if compared(reference.unseen, batch, PERMUTATIONS) <= LEVEL:
                met = [likened([reference, *(under[one] for one in some)], batch) for some in named.values()]
                known = int((met[-1].like.shift or NONE).split(" / ")[0] == kind)
                told = [[round(each.explained, 2) for each in met[1:]], known, round(met[-1].share, 2)]
            accuracies = [expected(fit, reference, probs, each)[0] for each in met]
            errors = [round(100 * (each - float(right.mean())), 1) for each in accuracies]
            batches.append([size, part, errors, *told])
        found.append({
            "shift": name, "accuracy": 100 * float(own.right.mean()),
            "tried": 100 * float(record.accuracy or 0), "standard error": 100 * record.standard_error,
            "batches": batches,
        })  # fmt: skip
    return {"n": len(at), "tested": len(kept["test y"]), "shifts": found}


# -- tables ----------------------------------------------------------------------------------------


def shifts_of(
    cells: Sequence[Cell], part: str, shots: int | None = None
) -> list[tuple[int, int, dict[str, Any]]]:
    """Training samples, test samples and results of all shifts of a set of tasks."""
    return [
        (cell["n"], cell["tested"], one)
        for cell in cells
        if cell["set"] == part and shots in (None, cell["shots"])
        for one in cell["shifts"]
    ]


def severity_of(one: Mapping[str, Any]) -> str:
    """Of a shift, or none."""
    kind, severity = one["shift"].split(" / ")
    return NONE if kind == NONE else severity


def before(cells: Sequence[Cell], part: str = "reported") -> str:
    """Markdown: accuracies of altered training samples, left out, beside those of altered test samples."""
    made = []
    for shots, severity in itertools.product(SHOTS, (NONE, *SEVERITIES)):
        own = [row for row in shifts_of(cells, part, shots) if severity_of(row[2]) == severity]
        if own:
            off = [one["tried"] - one["accuracy"] for *_, one in own]
            both = [math.hypot(one["standard error"], _draw(one["accuracy"], t)) for _, t, one in own]
            held = fmean(abs(a) <= 2 * b for a, b in zip(off, both, strict=True))
            numbers = (fmean(one["accuracy"] for *_, one in own), fmean(map(abs, off)))
            floor = math.sqrt(2 / math.pi) * fmean(both)
            of_fits = [
                fmean(one["tried"] - one["accuracy"] for *_, one in mine)
                for cell in cells
                if (mine := [r for r in shifts_of([cell], part, shots) if severity_of(r[2]) == severity])
            ]
            made.append([f"{shots}, {severity}", *(f"{n:.1f}" for n in numbers), f"{floor:.1f}",
                         with_error(of_fits), f"{100 * held:.0f}"])  # fmt: skip
    header = ["samples a class, shift", "accuracy on test samples %", "off by", "by the draw alone",
              "tried less tested", "within two standard errors %"]  # fmt: skip
    return markdown(header, made)


def _draw(accuracy: float, size: int) -> float:
    """Standard error of an accuracy in percent."""
    return math.sqrt(max(accuracy * (100 - accuracy), 0) / size)


def rows_of(own: Sequence[Any], size: int | None = None, part: float = 1.0) -> list[list[Any]]:
    """The batches of some shifts, of a size and a share of shifted samples."""
    # [size, part, errors by what was named] and of alarms [..., explained by it, whether the kind is known,
    # the share that is told]; where there is no alarm one error stands for all, since nothing is corrected
    return [
        row for one in own for row in one["batches"] if row[1] == part and (size is None or row[0] == size)
    ]


def _error(row: list[Any], named: int) -> float:
    """The absolute error of a batch."""
    errors: list[float] = row[2]
    return abs(errors[named if len(errors) > 1 else 0])


def errors_of(rows: Sequence[list[Any]]) -> list[str]:
    """Mean absolute errors of the expected accuracy, by what was named."""
    return [f"{fmean(_error(row, i) for row in rows):.1f}" for i in range(len(NAMED))]


def batches(cells: Sequence[Cell], part: str = "reported", share: float = 1.0) -> str:
    """Markdown: errors of the expected accuracy of batches, by what was named."""
    made = []
    for shots, size, severity in itertools.product(SHOTS, SIZES, (NONE, *SEVERITIES)):
        own = [row for row in shifts_of(cells, part, shots) if severity_of(row[2]) == severity]
        rows = rows_of([one for *_, one in own], size, share)
        if not rows:
            continue
        drifted = [(row[4], row[5], row[3][-1]) for row in rows if len(row) > 3]
        draws = [(one["accuracy"], n) for n, _, one in own]
        floor = fmean(math.hypot(_draw(a, n), _draw(a, size)) for a, n in draws)
        numbers = [f"{math.sqrt(2 / math.pi) * floor:.1f}"]
        if severity == NONE or not drifted:
            numbers += ["–", "–", "–"]
        else:
            numbers += [f"{100 * fmean(told[i] for told in drifted):.0f}" for i in range(3)]
        alarms = f"{100 * len(drifted) / len(rows):.0f}"
        made.append([f"{shots}, {size}, {severity}", alarms, *errors_of(rows), *numbers])
    header = ["samples a class, in a batch, shift", "alarms %", *(f"named: {one}" for one in NAMED),
              "by the draw alone", "kind known %", "share told %", "explained %"]  # fmt: skip
    return markdown(header, made)


def explained(cells: Sequence[Cell], part: str = "reported") -> str:
    """Markdown: errors by how much of the drift the nearest shift explains, of whole shifted batches."""
    every = rows_of([one for *_, one in shifts_of(cells, part) if severity_of(one) != NONE])
    made = []
    for i, named in enumerate(NAMED[1:], 1):
        for low, high in itertools.pairwise(EXPLAINED):
            rows = [row for row in every if len(row) > 3 and low <= row[3][i - 1] < high]
            if rows:
                errors = [fmean(_error(row, j) for row in rows) for j in (0, i)]
                span = f"{low:g} to {min(high, 1):g}"
                made.append([f"{named}, {span}", str(len(rows)), *(f"{one:.1f}" for one in errors)])
    return markdown(["named, explained", "batches", "error, no shift named", "error"], made)


def halves(cells: Sequence[Cell]) -> str:
    """Markdown: the same of batches of which half meets the shift."""
    return batches(cells, share=PARTS[1])


def development(cells: Sequence[Cell]) -> str:
    """Markdown: the same of development tasks."""
    return batches(cells, "development")


def kinds(cells: Sequence[Cell], part: str = "reported") -> str:
    """Markdown: the same by kind of shift, all sizes together."""
    made, every = [], shifts_of(cells, part)
    for name in dict.fromkeys(one["shift"] for *_, one in every):
        own = [one for *_, one in every if one["shift"] == name]
        accuracy = fmean(one["accuracy"] for one in own)
        made.append([name.replace(" /", "").strip(), f"{accuracy:.1f}", *errors_of(rows_of(own))])
    return markdown(["shift", "accuracy %", *(f"named: {one}" for one in NAMED)], made)


def tables(cells: Sequence[Cell], part: str) -> str:
    """Markdown: all tables of a set of tasks."""
    return "\n\n".join(made(cells, part) for made in (before, batches, explained, kinds))


def main() -> None:
    """Run the study."""
    run("monitor/stress", __doc__ or "", (POOL, TESTED), SHOTS, watched, tables, alter=True)


if __name__ == "__main__":
    main()
