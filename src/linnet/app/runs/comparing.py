"""Two runs side by side on the test samples that both have: from what they wrote, without their networks.

Samples are paired, so that the error of a difference is that of the differences, sample by sample: for
accuracies the variance of +1 (right in the second run alone), −1 (right in the first alone) and 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linnet.app.runs.folder import TestSource, tested
from linnet.app.runs.results import score_table
from linnet.errors import FileFormatError, InputError
from linnet.files import read_json
from linnet.report.numbers import number
from linnet.report.records import Comparison
from linnet.shown import some

Array = np.ndarray[Any, Any]
_LIKELY = 2.0  # standard errors from which a difference is called one
_SHOWN = 10  # samples of each kind that are named in the text


@dataclass(frozen=True, eq=False)
class Finished:
    """What a run wrote of itself."""

    folder: Path  # where
    classes: tuple[str, ...] | None  # names of its classes; None for regression
    source: TestSource  # its test samples
    scores: Comparison  # scores of its fit
    settings: dict[str, str]  # what was chosen, by name
    ids: tuple[str, ...]  # names of the test samples
    answers: Array  # their labels, (N,), or targets, (N, D)
    predicted: Array  # predicted labels or values, in the same shape

    @classmethod
    def read(cls, folder: Path) -> Finished:
        """Read a run."""
        (classes, source), path = tested(folder), folder / "result.json"
        try:
            result = read_json(path)
            found, why = cls._of(folder, result, classes, source), str(result.get("untested") or "")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise FileFormatError(
                f"{path} does not hold the result of a run ({type(error).__name__}: {error})",
                expected="the file as linnet adapt, forget or update wrote it",
                remedy="run the command again with the same --out",
            ) from error
        if found is None:
            raise InputError(
                f"{folder} has no test samples with answers{': ' * bool(why)}{why}",
                expected="two runs that were scored on test samples",
                remedy="make it again from data that still hold its test samples"
                if why
                else "adapt with data that have a test part",
            )
        return found

    @classmethod
    def _of(
        cls, folder: Path, result: Any, classes: tuple[str, ...] | None, source: TestSource | None
    ) -> Finished | None:
        """What is compared, out of the result of a run; None where it has no test samples with answers."""
        test, chosen = result["report"]["test"], result["report"]["choices"]
        settings = {str(c["what"]): str(c["chosen"]) for c in chosen if c["chosen"] is not None}
        settings["training samples"] = f"{int(result['train']):,}"
        if source is None or test is None or not test["ids"] or test["labels"] is None:
            return None
        kind = np.int64 if classes else np.float64
        ids, answers = tuple(map(str, test["ids"])), np.array(test["labels"], kind)
        predicted = np.array(test["predicted" if classes else "mean"], kind)
        if not len(ids) == len(answers) == len(predicted):
            raise ValueError("its test samples differ in number")
        if classes and not all(
            labels.min() >= 0 and labels.max() < len(classes) for labels in (answers, predicted)
        ):
            raise ValueError("a label is none of the classes")
        scores = Comparison(**result["scores"][0]) if result["scores"] else Comparison("linear fit")
        return cls(folder, classes, source, scores, settings, ids, answers, predicted.reshape(answers.shape))


def compare_runs(first: Path, second: Path) -> dict[str, Any]:
    """Compare two runs on the test samples that both have."""
    a, b = Finished.read(first), Finished.read(second)
    shorter, longer = sorted((a.classes or (), b.classes or ()), key=len)
    grown = bool(shorter) and longer[: len(shorter)] == shorter  # by classes that linnet update has named
    if a.classes != b.classes and not grown:
        raise InputError(
            f"{first} has {_described(a.classes)}, {second} {_described(b.classes)}",
            expected="two runs of one task",
            remedy="compare runs whose data have the same classes",
        )
    both = pairs(a, b)
    left, right = [i for i, _ in both], [j for _, j in both]
    answers, mine, yours = a.answers[left], a.predicted[left], b.predicted[right]
    classes = longer or None
    losses = [_loss(found, answers, classes) for found in (mine, yours)]
    change = losses[0] - losses[1]  # above 0 where the second run is better
    what = "accuracy" if classes else "mean squared error"
    gain = float(change.mean()) if classes else -float(change.mean())

    def told(places: Array) -> list[dict[str, Any]]:
        return [
            {
                "id": a.ids[left[p]],
                "answer": _name(answers[p], classes),
                "first": _name(mine[p], classes),
                "second": _name(yours[p], classes),
            }
            for p in places.tolist()
        ]

    order = np.argsort(-np.abs(change), kind="stable")
    return {
        "command": "compare",
        "runs": [str(first), str(second)],
        "test": len(both),
        "left_out": [len(a.ids) - len(both), len(b.ids) - len(both)],
        "scores": [_scores(run, which, len(both)) for run, which in ((a, losses[0]), (b, losses[1]))],
        "difference": {
            "what": what,
            "value": gain,
            "error": float(change.std(ddof=1) / math.sqrt(len(change))) if len(change) > 1 else None,
        },
        "settings": _different(a.settings, b.settings),
        "worse": told(order[change[order] < 0]),
        "better": told(order[change[order] > 0]),
        "classes": _by_class(answers, change, classes),
    }


def print_comparison(result: dict[str, Any]) -> list[str]:
    """A comparison for people."""
    first, second = result["runs"]
    difference, counted = result["difference"], result["difference"]["what"] == "accuracy"
    rows = [Comparison(**row) for row in result["scores"]]
    lines = [f"{result['test']} test samples of both runs", *score_table(rows, result["test"])]
    lines.append(_verdict(difference, first, second))
    if any(result["left_out"]):
        lines.append("test samples of one run alone, left out: {} and {}".format(*result["left_out"]))
    lines += [f"{one['what']}: {one['first']} | {one['second']}" for one in result["settings"]]
    verb = "right" if counted else "closer"
    for kind, better, worse in (("worse", first, second), ("better", second, first)):
        found = result[kind]
        if not found:
            continue
        head = f"{verb} in {better}" + (f", wrong in {worse}" if counted else f" than in {worse}")
        lines.append(f"{head}: {len(found)}")
        lines += [
            f"  {r['id']}: {r['answer']}, predicted {r['first']} | {r['second']}" for r in found[:_SHOWN]
        ]
        if len(found) > _SHOWN:
            lines.append(f"  and {len(found) - _SHOWN} more; --out FILE lists all")
    moved = [f"{c['name']} {100 * c['difference']:+.1f} points ({c['samples']})" for c in result["classes"]]
    lines += [f"classes that moved most: {', '.join(moved[:3])}"] if moved else []
    return lines


def comparison_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples that one of the runs predicts better, as rows of a table."""
    first, second = result["runs"]
    named = (("worse", first), ("better", second))
    return [{**row, "better": run} for kind, run in named for row in result[kind]]


def pairs(a: Finished, b: Finished) -> list[tuple[int, int]]:
    """Positions of the test samples that both runs have: by name, where the files are the same."""
    if a.source.digest == b.source.digest:
        return [(i, i) for i in range(len(a.ids))]
    places = {name: j for j, name in enumerate(b.ids)}
    found = [(i, places[name]) for i, name in enumerate(a.ids) if name in places]
    same = [(i, j) for i, j in found if np.array_equal(a.answers[i], b.answers[j])]
    both, why = f"{a.folder} and {b.folder}", ""
    if a.source.path != b.source.path:
        why = f"{both} have their test samples from two files, {a.source.path} and {b.source.path}"
    elif not found:
        why = f"{both} have no test sample in common"
    elif len(same) < len(found):
        other = next(i for i, j in found if not np.array_equal(a.answers[i], b.answers[j]))
        why = f"{both} were scored on different test samples: {a.ids[other]} has another answer in each"
    if why:
        raise InputError(
            why,
            expected="runs on the same data, with the same test samples or some in common",
            remedy="adapt again with the same --data, or compare predictions of linnet predict",
        )
    return same


def _scores(run: Finished, loss: Array, tested: int) -> dict[str, Any]:
    """Scores of a run on the test samples of both: its own, or of its predictions where it had others too."""
    if tested == len(run.ids):
        row = {**vars(run.scores), "note": ""}
    elif run.classes:
        row = Comparison("", accuracy=1 - float(loss.mean())).numbers()
    else:
        row = Comparison("", rmse=float(np.sqrt(loss.mean()))).numbers()
    return {**row, "name": str(run.folder)}


def _verdict(difference: dict[str, Any], first: str, second: str) -> str:
    """The difference in a sentence."""
    value, error, what = difference["value"], difference["error"], difference["what"]
    counted = what == "accuracy"
    shown = f"{100 * value:+.1f}" if counted else f"{'−' if value < 0 else '+'}{number(abs(value))}"
    spread = "" if error is None else f" ± {100 * error:.1f}" if counted else f" ± {number(error)}"
    text = f"{what}, {second} minus {first}: {shown}{spread}" + " points" * counted
    if value == 0:
        return f"{text}, no difference"
    if error is None or abs(value) < _LIKELY * error:
        return f"{text}, no more than chance explains"
    return f"{text}, {second if (value > 0) == counted else first} is better"


def _different(a: dict[str, str], b: dict[str, str]) -> list[dict[str, str]]:
    """Choices that differ."""
    names = [*a, *(name for name in b if name not in a)]
    found = [{"what": n, "first": a.get(n, "–"), "second": b.get(n, "–")} for n in names]
    return [one for one in found if one["first"] != one["second"]]


def _by_class(answers: Array, change: Array, classes: tuple[str, ...] | None) -> list[dict[str, Any]]:
    """Change of the share of right predictions by true class, the largest first; none without one."""
    found = []
    for index, name in enumerate(classes or ()):
        own = change[answers == index]
        if len(own) and own.mean():
            found.append({"name": name, "samples": len(own), "difference": float(own.mean())})
    return sorted(found, key=lambda one: -abs(one["difference"]))


def _loss(predicted: Array, answers: Array, classes: tuple[str, ...] | None) -> Array:
    """One for each wrong class, or the squared error of each sample, averaged over its values, (N,)."""
    if classes:
        return np.asarray(predicted != answers, dtype=float)
    squared: Array = (predicted - answers.astype(float)).reshape(len(answers), -1) ** 2
    return np.asarray(squared.mean(1))


def _name(value: Any, classes: tuple[str, ...] | None) -> str:
    """A label by its name, or values as text."""
    if classes:
        return classes[int(value)]
    return ", ".join(number(float(v)).replace("\u202f", " ") for v in np.ravel(value))


def _described(classes: tuple[str, ...] | None) -> str:
    """Classes in a phrase."""
    return f"{len(classes)} classes ({some(classes, 5)})" if classes else "no classes"
