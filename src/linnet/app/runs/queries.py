"""Queries to a run: predictions for new samples, and the training samples behind a prediction."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from linnet.app.data import SampleSet
from linnet.app.data.task import InMemory
from linnet.app.options import RunOptions
from linnet.app.runs.folder import SavedRun, opened
from linnet.app.runs.held_out import load_test
from linnet.app.runs.place import check_file, check_out
from linnet.app.runs.results import place_of, print_prediction, write, written
from linnet.app.runs.samples import NewSamples, answer_in_words, find_samples, named, read_new
from linnet.errors import InputError
from linnet.files import finite, write_text
from linnet.params import integer
from linnet.report.reading import Predictions, explanations, facts, holding, name_of, predicted, scored
from linnet.report.records import Content, Explanation, Neighbor, Notes, TrainingSet

TABLES = (".csv", ".json")  # the files that rows are written to
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # what begins a formula for some spreadsheet
OUTPUTS_ALONE = (
    "the probabilities are of the outputs alone, at a temperature of their own: those beside standard "
    "deviations know the variance too, and are others"
)
Array = np.ndarray[Any, Any]


def predict(
    options: RunOptions, data: Path, out: Path | None, std: bool, coverage: float | None, overwrite: bool
) -> tuple[dict[str, Any], list[str]]:
    """Predict new samples, and write a table and a page: the result, and lines for people."""
    table, folder = out or options.run / "predictions.csv", options.run / "predict"
    if out is not None:
        check_file(out, TABLES, overwrite)
    run = opened(options)
    new = _with_known(run, read_new(data, run, prefer="test"))
    if out is None and table.exists():
        told = f"{table.name} of an earlier call is replaced: --out names another file"
        new = replace(new, findings=(*new.findings, told))
    found = run.predict(new.x, std)
    result, page = prediction_page(run, new, found, f"Predictions for {data.name}", options.run)
    result |= {"predictions": str(table), "out": str(folder)}
    rows = prediction_rows(run, new, found)
    if coverage is not None:
        held, result["held"] = held_rows(run, new, coverage)
        rows = [{**row, **more} for row, more in zip(rows, held, strict=True)]
    write_rows(table, rows)
    write(folder, result, page)
    return result, print_prediction(result, told_rows(run, new, rows))


def _with_known(run: SavedRun, new: NewSamples) -> NewSamples:
    """Samples with answers, and a note where some of them are those of the training."""
    trained = set() if new.y is None else set(run.fingerprints())
    known = sum(name in trained for name in run.fingerprints(new.x)) if trained else 0
    if not known:
        return new
    note = (
        f"{known} of {len(new.ids)} samples are training samples of the run, or like these: the scores are "
        "too good for new ones"
    )
    if run.columns is not None:
        note = (
            f"{known} of {len(new.ids)} lines equal training lines in all columns that are used: where they "
            "are the same cases, the scores are too good for new ones"
        )
    return replace(new, findings=(*new.findings, note))


def prediction_rows(run: SavedRun, new: NewSamples, found: Predictions) -> list[dict[str, Any]]:
    """Predictions as rows of a table."""
    rows = []
    for i, name in enumerate(new.ids):
        row: dict[str, Any] = {"id": name}
        if found.probs is not None and run.classes is not None:
            best = int(found.predicted[i])
            row |= {"predicted": run.classes[best], "probability": float(found.probs[i, best])}
            row["std"] = None if found.std is None else float(found.std[i, best])
            row |= {f"p({c})": float(p) for c, p in zip(run.classes, found.probs[i], strict=True)}
        else:
            for column, end in enumerate(_endings(found.mean)):
                row[f"predicted{end}"] = float(found.mean[i, column])
                row[f"std{end}"] = None if found.std is None else float(found.std[i, column])
        rows.append(row)
    return rows


def _endings(values: Array) -> list[str]:
    """What the names of the columns of several values end in; nothing for one."""
    # values (N, C)
    return [""] if values.shape[1] == 1 else [f"_{column}" for column in range(values.shape[1])]


def held_rows(run: SavedRun, new: NewSamples, coverage: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The classes or interval that are to hold each answer, as cells of a table; and how many they hold."""
    found, share = holding(run, new.x, new.y, coverage)
    rows: list[dict[str, Any]]
    if run.classes is not None:
        rows = [{"set": [name for name, held in zip(run.classes, row, strict=True) if held]} for row in found]
        return rows, {"coverage": coverage, "share": share, "mean_size": float(found.sum(1).mean())}
    low, high = found[..., 0], found[..., 1]
    rows = [{} for _ in low]
    for row, down, up in zip(rows, low.tolist(), high.tolist(), strict=True):
        for column, end in enumerate(_endings(low)):
            row |= {f"low{end}": down[column], f"high{end}": up[column]}
    return rows, {"coverage": coverage, "share": share, "mean_width": (high - low).mean(0).tolist()}


def told_rows(run: SavedRun, new: NewSamples, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predictions as the terminal names them: id, what was predicted, and the answer where it is known."""
    known = named(new.ids, new.y, run.classes, range(len(new.ids)))
    told = []
    for row, one in zip(rows, known, strict=True):
        said = [value for key, value in row.items() if key.startswith("predicted")]
        told.append({"id": one["id"], "predicted": said[0] if len(said) == 1 else said, **one})
    return told


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as ``.csv`` or ``.json``."""
    # In a table, text that a spreadsheet would take for a formula gets an apostrophe before it.
    check_file(path, TABLES, overwrite=True)
    if path.suffix.lower() == ".json":
        text = json.dumps(finite(rows), indent=2, allow_nan=False) + "\n"
    else:
        text = "".join(
            _line(cells) for cells in (*map(list, rows[:1]), *(list(row.values()) for row in rows))
        )
    write_text(path, text)


def _line(cells: Iterable[object]) -> str:
    """One line of a table."""
    buffer = io.StringIO()  # cells with a character of the writer's line end are quoted: with either, here
    csv.writer(buffer, lineterminator="\r\n").writerow(map(_as_text, cells))
    return buffer.getvalue().removesuffix("\r\n") + "\n"


def _as_text(value: object) -> object:
    """A cell that no spreadsheet takes for a formula: such text gets an apostrophe; numbers stay numbers."""
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)  # a class may be called -1
    except ValueError:
        return f"'{value}"
    return value


def prediction_page(
    run: SavedRun, new: NewSamples, found: Predictions, title: str, folder: Path
) -> tuple[dict[str, Any], Content]:
    """The result and the page of predictions."""
    scores = () if new.y is None else (scored(name_of(run.fit), found, new.y),)
    test = predicted(run.pictured(new.x, new.y, new.ids), found)
    unknown = f"{len(new.ids)} samples were predicted; their answers are not known."
    headline = (unknown,) if new.y is None else ()
    notes = [f"{found.note}; --std false leaves them out from the start"] if found.note else []
    notes += [OUTPUTS_ALONE] if found.probs is not None and found.std is None else []
    findings = (*new.findings, *notes)
    warnings = (*run.fit.record.warnings, *findings)
    page = Content(
        title, run.classes, Notes(headline, warnings, facts(run)), scores, test=test, folder=place_of(folder)
    )
    counts = None
    if run.classes is not None:
        counts = {name: int((found.predicted == label).sum()) for label, name in enumerate(run.classes)}
    result = {
        "command": "predict", "samples": len(new.ids), "scores": [row.numbers() for row in scores],
        "predicted": counts,
        "mean_std": None if found.std is None else float(found.std.mean()),
        "findings": list(findings),
    }  # fmt: skip
    return result, page


def explain(
    options: RunOptions, data: Path | None, ids: Sequence[str], top: int, out: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """Name the training samples behind some predictions: the result, and lines for people."""
    folder = out or options.run / "explain"
    check_out(folder, options.run)
    integer("top", top)
    run = opened(options)
    new = None if data is None else read_new(data, run, prefer="test")
    part = _part(run, new)
    kind = "test samples of the run" if new is None else "new samples"
    answered = new is None or new.y is not None
    trained = {"training samples": run.samples.ids}
    places = find_samples(ids, part.ids, kind, lambda: trained)
    chosen = part.take(np.asarray(places))
    found = run.predict(chosen.x)
    made = explanations(run, chosen.x, list(range(len(chosen.ids))), found, top)
    samples = run.pictured(chosen.x, chosen.y if answered else None, chosen.ids)
    test = replace(predicted(samples, found, made), uncertainty=None)
    headline = (f"The training samples behind {len(chosen.ids)} predictions.",)
    notes = Notes(headline, run.fit.record.warnings, facts(run))
    title, train = f"Why these predictions: {options.run.name}", TrainingSet(run.samples)
    page = Content(title, run.classes, notes, train=train, test=test, folder=place_of(options.run))
    known = named(chosen.ids, samples.labels, run.classes, range(len(chosen.ids)))
    told = [{**known[one.sample], **_told(run, one, found)} for one in made]
    result = {"command": "explain", "ids": list(chosen.ids), "explanations": told, "out": str(folder)}
    write(folder, result, page)
    return result, [*(line for item in told for line in _lines(item)), *written(folder)]


def _part(run: SavedRun, new: NewSamples | None) -> SampleSet:
    """The samples to choose from."""
    if new is not None:
        y = np.zeros(len(new.ids), dtype=np.int64) if new.y is None else new.y
        if new.y is None and run.classes is None:
            y = np.zeros((len(new.ids), run.fit.system.c))
        return SampleSet(InMemory(new.x), np.arange(len(new.ids)), y, new.ids)
    task, why = load_test(run)
    if task is None:
        raise InputError(
            why, expected="the data that the run was made from", remedy="give the samples with --data"
        )
    return task.test


def _told(run: SavedRun, made: Explanation, found: Predictions) -> dict[str, Any]:
    """An explanation as plain values: classes by name, and by number for calls in Python."""
    row = made.sample
    said: dict[str, Any]
    if run.classes is not None and found.probs is not None:
        label = int(found.predicted[row])
        probability = float(found.probs[row, label])
        said = {"predicted": run.classes[label], "class": label, "probability": probability}
    else:
        values = found.mean[row].tolist()
        said = {"predicted": values[0] if len(values) == 1 else values}

    def behind(side: Sequence[Neighbor]) -> list[dict[str, Any]]:
        places = [n.sample for n in side]
        known = named(run.samples.ids, run.samples.labels, run.classes, places)
        pushed = [{"position": n.sample, "influence": n.influence} for n in side]
        return [{**one, **more} for one, more in zip(known, pushed, strict=True)]

    return {"position": row, **said, "up": behind(made.up), "down": behind(made.down)}


def _lines(item: dict[str, Any]) -> list[str]:
    """One explanation for people."""
    head = f"{item['id']}: predicted {_shown(item['predicted'])}"
    if "probability" in item:
        head += f" ({100 * item['probability']:.0f} %)"
    if "label" in item:
        head += f", labeled {item['label']}"
    elif "target" in item:
        head += f", known to be {_shown(item['target'])}"
    sides = [(word, one) for word in ("up", "down") for one in item[word]]
    return [
        head,
        *(
            f"  {word:<5}{n['influence']:+9.3f}  {n['id']}  ({_shown(n.get('label', n.get('target')))})"
            for word, n in sides
        ),
    ]


def _shown(answer: Any) -> str:
    """A class by its name, or values."""
    return answer if isinstance(answer, str) else answer_in_words(answer, None)
