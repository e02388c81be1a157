"""The tables of the page, as rows of cells that sort, filter and export by their own values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linnet.memory import format_bytes
from linnet.plots.measures import ranking
from linnet.report.numbers import FEW, duration, measured_share, number, percent, share_error
from linnet.report.records import Content, HeldOutSet
from linnet.report.steps import class_records
from linnet.report.tiles import Label, label, thumbnail
from linnet.report.verdict import loo_name

_ROWS = 5000  # most rows of a table; the most telling ones are kept
_CONFUSIONS = 6  # pairs of classes that are named
_PICTURES = 1_800_000  # characters that the pictures of a table may take
_PNG = 900  # bytes of such a picture from which it is sent as JPEG
_PIXELS = ((200, 128), (700, 64), (_ROWS, 40))  # of the picture in a row, by the number of rows


@dataclass(frozen=True)
class Cell:
    """One cell."""

    text: str  # what it shows
    value: float | None = None  # the number behind the text, for sorting and for the exported table
    color: str = ""  # color of the class that it names; empty for others
    picture: str = ""  # ``data:`` address; empty where there is none
    length: float | None = None  # length of a bar in [0, 100]; None for none


@dataclass(frozen=True)
class PageTable:
    """One table of the page."""

    name: str  # name of the exported file
    caption: str  # what it shows
    # (heading, kind); the kinds are `"text"`, `"figure"`, `"note"` and `"picture"`. The first column names
    # the row
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Cell, ...], ...]  # the rows, a cell a column
    own: bool = False  # whether the first row is the fit itself


def tables(run: Content) -> dict[str, PageTable]:
    """Every table that the run has data for, by name."""
    made = (
        _comparison(run), _classes(run), _confusions(run), _ridges(run), _spectrum(run), _task(run),
        _suspects(run), _forgetting(run), _choices(run), _memory(run), _parameters(run), _timings(run),
        _predictions(run),
    )  # fmt: skip
    return {table.name: table for table in made if table is not None and table.rows}


def _cell(run: Content, value: Any, form: str) -> Cell:
    """A value in the form of its column."""
    if isinstance(value, Cell):
        return value
    if form == "class":
        shown: Label = label(run, value)
        single = run.classes is None and value is not None and np.size(value) == 1
        return Cell(shown.text, float(np.reshape(value, -1)[0]) if single else None, shown.color)
    if form == "share":  # with the number of samples behind it, which gives its error
        share, count = value
        known = share is not None and count
        return Cell(measured_share(share, share_error(share, count)) if known else percent(share), share)
    if form not in _FORMS:
        return Cell(str(value))
    known = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return Cell(_FORMS[form](value), float(value) if known and np.isfinite(value) else None)


_FORMS: dict[str, Callable[[Any], str]] = {
    "figure": number,
    "percent": percent,
    "whole percent": lambda share: percent(share, 0),
    "time": duration,
    "size": format_bytes,
}
_KINDS = {"class": "text", "text": "text", "note": "note", "picture": "picture"}  # of others "figure"


def _table(
    run: Content,
    name: str,
    caption: str,
    columns: Sequence[str | tuple[str, str]],
    rows: Iterable[Sequence[Any]],
) -> PageTable:
    """A table of values, in the form of their columns: text unless one is given."""
    forms = [(column, "text") if isinstance(column, str) else column for column in columns]
    kinds = tuple((heading, _KINDS.get(form, "figure")) for heading, form in forms)
    made = (
        tuple(_cell(run, value, form) for value, (_, form) in zip(row, forms, strict=True)) for row in rows
    )
    return PageTable(name, caption, kinds, tuple(made), own=name == "scores")


def _comparison(run: Content) -> PageTable | None:
    """The scores of all methods."""
    rows, tested = run.scores, run.tested()
    every = [
        ("accuracy", "Accuracy", "share"), ("nll", "Log loss (nats)", "figure"),
        ("ece", "Calibration error", "percent"), ("rmse", "RMSE", "figure"), ("seconds", "Time", "time"),
        ("note", "Note", "note"),
    ]  # fmt: skip
    kept = [column for column in every if any(getattr(row, column[0]) not in (None, "") for row in rows)]
    if not rows or not kept:
        return None
    better = "lower is better, except for the accuracy" if kept[0][0] == "accuracy" else "lower is better"
    caption = f"Scores on the test samples{f' ({number(tested)})' if tested else ''}; {better}."
    values = [[row.name, *(getattr(row, key) for key, _, _ in kept)] for row in rows]
    if kept[0][0] == "accuracy":
        values = [[name, (accuracy, tested), *rest] for name, accuracy, *rest in values]
    return _table(run, "scores", caption, ("Method", *((heading, form) for _, heading, form in kept)), values)


def _classes(run: Content) -> PageTable | None:
    """How often predictions of each class are right, and samples of each class are found."""

    def of(part: int, whole: int) -> tuple[float | None, int]:
        return part / whole if whole else None, whole

    rows = [
        (r.index, r.tested, of(r.right, r.tested), r.predicted, of(r.right, r.predicted))
        for r in class_records(run)
    ]
    columns = (
        ("Class", "class"), ("Test samples", "figure"), ("Recall", "share"), ("Predictions", "figure"),
        ("Precision", "share"),
    )  # fmt: skip
    caption = (
        "Recall: share of the class's samples that were recognized. Precision: share of predictions of the "
        "class that are correct."
    )
    return _table(run, "classes", caption, columns, rows)


def _confusions(run: Content) -> PageTable | None:
    """The most frequent confusions of the test samples."""
    predicted = None if run.test is None else run.test.predicted()
    if run.test is None or run.test.samples.labels is None or predicted is None or run.classes is None:
        return None
    if len(predicted) < FEW:
        return None
    size = len(run.classes)
    found = np.zeros((size, size), dtype=int)
    np.add.at(found, (run.test.samples.labels, predicted), 1)
    totals = found.sum(axis=1)
    np.fill_diagonal(found, 0)
    pairs = [divmod(int(i), size) for i in ranking(found.reshape(-1))[:_CONFUSIONS]]
    rows = [(t, g, int(found[t, g]), found[t, g] / totals[t]) for t, g in pairs if found[t, g]]
    columns = (
        ("True class", "class"), ("Taken for", "class"), ("Samples", "figure"), ("Share", "whole percent"),
    )  # fmt: skip
    caption = "The most frequent confusions; the share is of the true class."
    return _table(run, "confusions", caption, columns, rows)


def _ridges(run: Content) -> PageTable | None:
    """Scores of all ridges."""
    path = run.fit.path
    if path is None:
        return None
    every = [
        (loo_name(run.fit.ridge), path.loo_error, "figure"),
        ("Leave-one-out accuracy", path.loo_accuracy, "percent"),
        ("Test accuracy", path.test_accuracy, "percent"),
        ("Generalized cross-validation", path.gcv, "figure"),
        ("Log evidence (nats)", path.evidence, "figure"),
    ]
    kept = [(heading, values, form) for heading, values, form in every if values is not None]
    rows = [
        (float(ridge), *(float(values[i]) for _, values, _ in kept)) for i, ridge in enumerate(path.ridges)
    ]
    columns = (("Ridge", "figure"), *((heading, form) for heading, _, form in kept))
    return _table(run, "ridges", "Scores by ridge.", columns, rows)


def _spectrum(run: Content) -> PageTable | None:
    """The facts of the kernel's spectrum."""
    spectrum = run.fit.spectrum
    if spectrum is None or not len(spectrum.eigenvalues):
        return None
    values = np.sort(np.clip(np.asarray(spectrum.eigenvalues, dtype=float), 0.0, None))[::-1]
    found: list[tuple[str, Any]] = [("largest eigenvalue", float(values[0]))]
    total = np.cumsum(values)
    if total[-1] > 0:
        for share in (0.5, 0.9):
            count = int(np.searchsorted(total, share * total[-1])) + 1
            found.append((f"directions that hold {percent(share, 0)} of the trace", count))
    if spectrum.ridge is not None:
        above = int((values > spectrum.ridge).sum())
        found += [("ridge", spectrum.ridge), ("eigenvalues above the ridge", above)]
    effective = spectrum.effective()
    if effective is not None:
        text = f"{number(effective)} of {number(len(values))}"
        found.append(("effective parameters", Cell(text, effective)))
    return _table(run, "spectrum", "The spectrum in numbers.", ("What", ("Value", "figure")), found)


def _task(run: Content) -> PageTable | None:
    """The statistics of the task."""
    if run.fit.task is None:
        return None
    caption = "Statistics, of training samples unless stated otherwise."
    columns = ("What", ("Value", "figure"))
    return _table(run, "statistics", caption, columns, run.fit.task.facts)


def _suspects(run: Content) -> PageTable | None:
    """All probable label errors."""
    train = run.train
    if train is None:
        return None
    columns: list[str | tuple[str, str]] = [
        "Sample", ("Given", "class"), ("Rather", "class"), ("Likely wrong", "whole percent"),
    ]  # fmt: skip
    rows = [[train.samples.name(s.sample), s.given, s.suggested, s.doubt] for s in train.suspects[:_ROWS]]
    if any(suspect.flipped is not None for suspect in train.suspects):
        columns.append("Known to be")
        for row, suspect in zip(rows, train.suspects, strict=False):
            row.append({True: "wrong", False: "right", None: "–"}[suspect.flipped])
    caption = "Probable label errors, with the probability that the given label is wrong."
    return _table(run, "label-errors", caption, columns, rows)


def _forgetting(run: Content) -> PageTable | None:
    """Before and after forgetting."""
    forgotten = None if run.train is None else run.train.forgetting
    if forgotten is None:
        return None
    columns = ("What", ("Before", "figure"), ("After", "figure"))
    return _table(run, "forgetting", "Before and after forgetting.", columns, forgotten.table)


def _choices(run: Content) -> PageTable:
    """The choices of the fit and their reasons."""
    caption = "The choices made for this fit, and their reasons."
    return _table(run, "choices", caption, ("What", "Chosen", ("Why", "note")), run.fit.choices)


def _memory(run: Content) -> PageTable | None:
    """The memory plan."""
    if run.fit.preflight is None:
        return None
    plan = run.fit.preflight.memory
    within = "" if plan.budget is None else f", within a budget of {format_bytes(plan.budget)}"
    caption = f"Memory plan of the {plan.operation}{within}."
    return _table(run, "memory", caption, ("Item", ("Size", "size")), plan.items)


def _parameters(run: Content) -> PageTable | None:
    """How each parameter was treated."""
    if run.fit.preflight is None:
        return None
    rows = [
        (row.name, " × ".join(map(str, row.shape)) or "scalar", row.uses, row.treatment)
        for row in run.fit.preflight.parameters
    ]
    caption = "Parameters of the network, and the rule that covers each."
    columns = ("Parameter", "Shape", ("Uses", "figure"), "Treatment")
    return _table(run, "parameters", caption, columns, rows)


def _timings(run: Content) -> PageTable:
    """The time of every step."""
    longest = max(run.fit.timings.values(), default=0.0) or 1.0
    rows = [(what, Cell(duration(t), t, length=100 * t / longest)) for what, t in run.fit.timings.items()]
    return _table(run, "timings", "Wall-clock time of each step.", ("Step", ("Time", "time")), rows)


def _predictions(run: Content) -> PageTable | None:
    """The prediction for each test sample, the least certain first."""
    test = run.test
    predicted = None if test is None else test.predicted()
    if test is None or (predicted is None and test.mean is None) or not len(test.samples):
        return None
    count, labels = len(test.samples), test.samples.labels
    order = list(range(count) if test.uncertainty is None else ranking(test.uncertainty))[:_ROWS]
    columns: list[str | tuple[str, str]] = ["Sample", ("Predicted", "class")]
    if predicted is not None:
        columns.append(("Probability", "percent"))
    elif test.std is not None:
        columns.append(("± standard deviation", "figure"))
    if labels is not None:
        columns.append(("True", "class"))
        columns += ["Verdict"] * (predicted is not None)
    rows = [_prediction(test, i) for i in order]
    pictures = _pictures(test, order)
    if pictures:
        columns.insert(0, ("Picture", "picture"))
        rows = [[Cell("", picture=picture), *row] for picture, row in zip(pictures, rows, strict=True)]
    kept = "" if len(order) == count else f" of the {number(len(order))} least certain of {number(count)}"
    drawn = sum(map(bool, pictures))
    some = f"; the first {number(drawn)} with their picture" if 0 < drawn < len(order) else ""
    caption = f"Every test sample{kept}, the least certain first{some}."
    return _table(run, "predictions", caption, columns, rows)


def _prediction(test: HeldOutSet, index: int) -> list[Any]:
    """One sample of that table."""
    name, labels = test.samples.name(index), test.samples.labels
    answer = [] if labels is None else [labels[index]]
    if test.probs is not None:
        best = int(test.probs[index].argmax())
        verdict = ["right" if best == one else "wrong" for one in answer]
        return [name, best, float(test.probs[index, best]), *answer, *verdict]
    assert test.mean is not None
    if test.std is None:
        return [name, test.mean[index], *answer]
    spread = np.reshape(test.std[index], -1)
    text = ", ".join(number(float(value)) for value in spread[:4])
    return [name, test.mean[index], Cell(text, float(spread[0]) if len(spread) == 1 else None), *answer]


def _pictures(test: HeldOutSet, order: Sequence[int]) -> list[str]:
    """Small pictures of samples, as many as there is room for; none without pictures."""
    if test.samples.images is None:
        return []
    found, room = [], _PICTURES
    pixels = next(size for most, size in _PIXELS if len(order) <= most)
    for index in order:
        picture = thumbnail(test.samples.images[index], pixels, _PNG) if room > 0 else ""
        room -= len(picture)
        found.append(picture if room > 0 else "")
    return found
