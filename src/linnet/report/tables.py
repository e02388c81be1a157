"""The tables of the page, as rows of cells that sort, filter and export by their own values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linnet.memory import format_bytes
from linnet.plots.measures import Array, ranking
from linnet.report.measures import FEW, share_error
from linnet.report.records import DoubtedLabel, HeldOutSet
from linnet.report.run import Run
from linnet.report.steps import class_records
from linnet.report.thumbnails import thumbnail
from linnet.report.views import Label, label
from linnet.report.wording import duration, loo_name, measured_share, number, percent

_ROWS = 5000  # most rows of a table; the most telling ones are kept
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
class Table:
    """One table of the page."""

    name: str  # name of the exported file
    caption: str  # what it shows
    # (heading, kind); the kinds are `"text"`, `"figure"`, `"note"` and `"picture"`. The first column names
    # the row
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Cell, ...], ...]  # the rows, a cell a column
    own: bool = False  # whether the first row is the fit itself


def tables(run: Run) -> dict[str, Table]:
    """Every table that the run has data for, by name."""
    made = (
        _comparison(run), _classes(run), _confusions(run), _ridges(run), _spectrum(run), _task(run),
        _suspects(run), _forgetting(run), _choices(run), _memory(run), _parameters(run), _timings(run),
        _predictions(run),
    )  # fmt: skip
    return {table.name: table for table in made if table is not None and table.rows}


def _figure(value: Any, form: Callable[[Any], str] = number) -> Cell:
    """A number in its format; texts pass unchanged."""
    known = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return Cell(form(value), float(value) if known and np.isfinite(value) else None)


def _whole(share: float | None) -> str:
    """A share in whole percent."""
    return percent(share, 0)


def _class(run: Run, value: Any) -> Cell:
    """A class, or a target."""
    shown: Label = label(run, value)
    single = run.classes is None and value is not None and np.size(value) == 1
    return Cell(shown.text, float(np.reshape(value, -1)[0]) if single else None, shown.color)


def _table(
    name: str, caption: str, columns: Sequence[str | tuple[str, str]], rows: Iterable[Sequence[Cell]]
) -> Table:
    """A table, whose columns are text unless a kind is given."""
    kinds = tuple(column if isinstance(column, tuple) else (column, "text") for column in columns)
    return Table(name, caption, kinds, tuple(tuple(row) for row in rows))


def _comparison(run: Run) -> Table | None:
    """The scores of all methods."""
    rows, tested = run.scores.comparison, run.tested()

    def accuracy(value: float | None) -> str:
        if value is None or not tested:
            return percent(value)
        return measured_share(value, share_error(value, tested))

    every: list[tuple[str, str, str, Callable[[Any], str]]] = [
        ("accuracy", "Accuracy", "figure", accuracy), ("nll", "Log loss (nats)", "figure", number),
        ("ece", "Calibration error", "figure", percent), ("rmse", "RMSE", "figure", number),
        ("seconds", "Time", "figure", duration), ("note", "Note", "note", str),
    ]  # fmt: skip
    kept = [column for column in every if any(getattr(row, column[0]) not in (None, "") for row in rows)]
    if not rows or not kept:
        return None
    better = "lower is better, except for the accuracy" if kept[0][0] == "accuracy" else "lower is better"
    return Table(
        "scores",
        f"Scores on the test samples{f' ({number(tested)})' if tested else ''}; {better}.",
        (("Method", "text"), *((heading, kind) for _, heading, kind, _ in kept)),
        tuple(
            (Cell(row.name), *(_figure(getattr(row, key), form) for key, _, _, form in kept)) for row in rows
        ),
        own=True,
    )


def _classes(run: Run) -> Table | None:
    """How often predictions of each class are right, and samples of each class are found."""

    def of(part: int, whole: int) -> Cell:
        if not whole:
            return Cell("–")
        share = part / whole
        return Cell(measured_share(share, share_error(share, whole)), share)

    rows = [
        (
            _class(run, r.index), _figure(r.tested), of(r.found, r.tested), _figure(r.predicted),
            of(r.right, r.predicted),
        )
        for r in class_records(run)
    ]  # fmt: skip
    columns = ("Class", ("Test samples", "figure"), ("Recall", "figure"), ("Predictions", "figure"),
               ("Precision", "figure"))  # fmt: skip
    caption = (
        "Recall: share of the class's samples that were recognized. Precision: share of predictions of the "
        "class that are correct."
    )
    return _table("classes", caption, columns, rows)


def _confusions(run: Run, count: int = 6) -> Table | None:
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
    pairs = [divmod(int(i), size) for i in ranking(found.reshape(-1))[:count]]
    rows = [
        (
            _class(run, true), _class(run, guess), _figure(int(found[true, guess])),
            _figure(found[true, guess] / totals[true], _whole),
        )
        for true, guess in pairs
        if found[true, guess]
    ]  # fmt: skip
    columns = ("True class", "Taken for", ("Samples", "figure"), ("Share", "figure"))
    return _table(
        "confusions", "The most frequent confusions; the share is of the true class.", columns, rows
    )


def _ridges(run: Run) -> Table | None:
    """Scores of all ridges."""
    path = run.fit.path
    if path is None:
        return None
    every: list[tuple[str, Array | None, Callable[[Any], str]]] = [
        (loo_name(run.fit.ridge), path.loo_error, number),
        ("Leave-one-out accuracy", path.loo_accuracy, percent),
        ("Test accuracy", path.test_accuracy, percent), ("Generalized cross-validation", path.gcv, number),
        ("Log evidence (nats)", path.evidence, number),
    ]  # fmt: skip
    kept = [(heading, values, form) for heading, values, form in every if values is not None]
    rows = [
        (_figure(float(ridge)), *(_figure(float(values[i]), form) for _, values, form in kept))
        for i, ridge in enumerate(path.ridges)
    ]
    columns = (("Ridge", "figure"), *((heading, "figure") for heading, _, _ in kept))
    return _table("ridges", "Scores by ridge.", columns, rows)


def _spectrum(run: Run) -> Table | None:
    """The facts of the kernel's spectrum."""
    spectrum = run.fit.spectrum
    if spectrum is None or not len(spectrum.eigenvalues):
        return None
    values = np.sort(np.clip(np.asarray(spectrum.eigenvalues, dtype=float), 0.0, None))[::-1]
    found = [("largest eigenvalue", _figure(float(values[0])))]
    total = np.cumsum(values)
    if total[-1] > 0:
        for share in (0.5, 0.9):
            count = int(np.searchsorted(total, share * total[-1])) + 1
            found.append((f"directions that hold {percent(share, 0)} of the trace", _figure(count)))
    if spectrum.ridge is not None:
        found.append(("ridge", _figure(spectrum.ridge)))
        found.append(("eigenvalues above the ridge", _figure(int((values > spectrum.ridge).sum()))))
    effective = spectrum.effective()
    if effective is not None:
        found.append(
            ("effective parameters", Cell(f"{number(effective)} of {number(len(values))}", effective))
        )
    rows = [(Cell(name), cell) for name, cell in found]
    return _table("spectrum", "The spectrum in numbers.", ("What", ("Value", "figure")), rows)


def _task(run: Run) -> Table | None:
    """The statistics of the task."""
    if run.fit.task is None:
        return None
    rows = [(Cell(name), Cell(value)) for name, value in run.fit.task.facts]
    caption = "Statistics, of training samples unless stated otherwise."
    return _table("statistics", caption, ("What", ("Value", "figure")), rows)


def _suspects(run: Run) -> Table | None:
    """All probable label errors."""
    train = run.train
    if train is None:
        return None
    known = any(suspect.flipped is not None for suspect in train.suspects)

    def row(suspect: DoubtedLabel) -> list[Cell]:
        cells = [
            Cell(train.samples.name(suspect.sample)), _class(run, suspect.given),
            _class(run, suspect.suggested), _figure(suspect.doubt, _whole),
        ]  # fmt: skip
        return [*cells, Cell({True: "wrong", False: "right", None: "–"}[suspect.flipped])] if known else cells

    columns: list[str | tuple[str, str]] = ["Sample", "Given", "Rather", ("Likely wrong", "figure")]
    columns += ["Known to be"] if known else []
    caption = "Probable label errors, with the probability that the given label is wrong."
    return _table("label-errors", caption, columns, map(row, train.suspects[:_ROWS]))


def _forgetting(run: Run) -> Table | None:
    """Before and after forgetting."""
    forgotten = None if run.train is None else run.train.forgetting
    if forgotten is None:
        return None
    rows = [(Cell(what), _figure(before), _figure(after)) for what, before, after in forgotten.table]
    columns = ("What", ("Before", "figure"), ("After", "figure"))
    return _table("forgetting", "Before and after forgetting.", columns, rows)


def _choices(run: Run) -> Table:
    """The choices of the fit and their reasons."""
    rows = [(Cell(choice.what), Cell(choice.chosen), Cell(choice.why)) for choice in run.fit.choices]
    caption = "The choices made for this fit, and their reasons."
    return _table("choices", caption, ("What", "Chosen", ("Why", "note")), rows)


def _memory(run: Run) -> Table | None:
    """The memory plan."""
    plan = run.fit.preflight
    if plan is None:
        return None
    within = "" if plan.budget is None else f", within a budget of {format_bytes(plan.budget)}"
    rows = [(Cell(name), _figure(amount, format_bytes)) for name, amount in plan.memory]
    return _table("memory", f"Memory plan{within}.", ("Item", ("Size", "figure")), rows)


def _parameters(run: Run) -> Table | None:
    """How each parameter was treated."""
    plan = run.fit.preflight
    if plan is None:
        return None
    rows = [
        (
            Cell(row.name), Cell(" × ".join(map(str, row.shape)) or "scalar"), _figure(row.uses),
            Cell(row.treatment),
        )
        for row in plan.parameters
    ]  # fmt: skip
    caption = "Parameters of the network, and the rule that covers each."
    return _table("parameters", caption, ("Parameter", "Shape", ("Uses", "figure"), "Treatment"), rows)


def _timings(run: Run) -> Table:
    """The time of every step."""
    longest = max((timing.seconds for timing in run.fit.timings), default=0.0) or 1.0
    rows = [
        (Cell(t.what), Cell(duration(t.seconds), t.seconds, length=100 * t.seconds / longest))
        for t in run.fit.timings
    ]
    columns = ("Step", ("Time", "figure"))
    return _table("timings", "Wall-clock time of each step.", columns, rows)


def _predictions(run: Run) -> Table | None:
    """The prediction for each test sample, the least certain first."""
    test = run.test
    predicted = None if test is None else test.predicted()
    if test is None or (predicted is None and test.mean is None) or not len(test.samples):
        return None
    count = len(test.samples)
    order = list(range(count) if test.uncertainty is None else ranking(test.uncertainty))[:_ROWS]
    columns: list[str | tuple[str, str]] = ["Sample", "Predicted"]
    if predicted is not None:
        columns.append(("Probability", "figure"))
    elif test.std is not None:
        columns.append(("± standard deviation", "figure"))
    labels = test.samples.labels
    if labels is not None:
        columns += ["True"] if predicted is None else ["True", "Verdict"]
    rows = [_prediction(run, test, i) for i in order]
    pictures = _pictures(test, order)
    if pictures:
        columns.insert(0, ("Picture", "picture"))
        rows = [[Cell("", picture=picture), *row] for picture, row in zip(pictures, rows, strict=True)]
    kept = "" if len(order) == count else f" of the {number(len(order))} least certain of {number(count)}"
    drawn = sum(map(bool, pictures))
    some = f"; the first {number(drawn)} with their picture" if 0 < drawn < len(order) else ""
    return _table("predictions", f"Every test sample{kept}, the least certain first{some}.", columns, rows)


def _prediction(run: Run, test: HeldOutSet, index: int) -> list[Cell]:
    """One sample of that table."""
    cells = [Cell(test.samples.name(index))]
    answer = None if test.samples.labels is None else test.samples.labels[index]
    if test.probs is not None:
        best = int(test.probs[index].argmax())
        cells += [_class(run, best), _figure(float(test.probs[index, best]), percent)]
        if answer is not None:
            cells += [_class(run, answer), Cell("right" if best == answer else "wrong")]
        return cells
    assert test.mean is not None
    cells.append(_class(run, test.mean[index]))
    if test.std is not None:
        spread = np.reshape(test.std[index], -1)
        text = ", ".join(number(float(value)) for value in spread[:4])
        cells.append(Cell(text, float(spread[0]) if len(spread) == 1 else None))
    if answer is not None:
        cells.append(_class(run, answer))
    return cells


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
