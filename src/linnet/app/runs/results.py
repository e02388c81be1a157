"""What a run says of itself: its report page, its result file, and a few lines of text."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from linnet.app.runs.adaptation import Adaptation
from linnet.app.runs.place import writing
from linnet.app.runs.samples import lines_of
from linnet.app.terminal import kept
from linnet.files import write_json
from linnet.nested.nested_fit import NestedFit
from linnet.report.html import write_report
from linnet.report.numbers import duration, number, percent, share_error
from linnet.report.reading import facts, fit_record, held_out, solver_reason, training_set
from linnet.report.records import Comparison, Content, NextStep, Notes, Samples
from linnet.report.steps import folder_beside, next_steps
from linnet.report.verdict import summary, verdict

Array = np.ndarray[Any, Any]
EQUAL = 1e-3  # difference from a fit from scratch, in nats or spreads of the targets, that changes no answer


def write(folder: Path, result: dict[str, Any], page: Content) -> None:
    """Write ``report.html`` and ``result.json``: the result, and every number of the page."""
    with writing(folder, wait=True):  # both of one process
        write_report(folder / "report.html", page)
        write_json(folder / "result.json", {**result, "next": _named_steps(page), "report": page.to_dict()})


def _named_steps(page: Content) -> list[dict[str, Any]]:
    """What the page says to do next, with samples by their ids."""
    train = Samples() if page.train is None else page.train.samples
    test = Samples() if page.test is None else page.test.samples
    return [
        {
            "title": step.title, "text": step.text, "command": step.command,
            "training": [train.name(i) for i in step.training], "test": [test.name(i) for i in step.tested],
        }
        for step in next_steps(page)
    ]  # fmt: skip


def adaptation_page(found: Adaptation, title: str, out: Path, replay: bool = False) -> Content:
    """The report of an adaptation."""
    run, task = found.run, found.task
    with found.stages.measure("ridge path and spectrum"):
        record = fit_record(run, run.inputs(task.test.x), task.test.y)
    with found.stages.measure("influence and leave-one-out"):
        train = training_set(run)
        test = held_out(run, task.samples("test"), found.predictions, task.test.x)
    record = replace(record, preflight=found.preflight, timings=_timings(found))
    folder = place_of(out)
    tunable = isinstance(run.fit, NestedFit) and not run.fit.trained and not run.fit.rungs
    steps = further(folder, replay and found.whole and tunable, task.classes is not None)
    notes = Notes(
        warnings=(*run.fit.record.warnings, *task.findings), facts=facts(run), steps=steps, quick=found.quick,
        first=() if found.whole or not replay else _in_full(folder),
    )  # fmt: skip
    page = Content(title, run.classes, notes, found.scores, record, train, test, folder)
    return replace(page, notes=replace(notes, headline=tuple(summary(page))))


def _in_full(folder: str) -> tuple[NextStep, ...]:
    """The command that takes all samples for the lower layers too."""
    words = ["linnet", "adapt", "--config", f"{folder}/run.yaml", "--quick", "false"]
    line = shlex.join([*words, "--out", folder_beside(folder, "full")])
    text = "A quick run gives a first answer. The full one fits all layers, to all training samples."
    return (NextStep("Run it in full", text, line),) if folder.isprintable() else ()


def place_of(folder: Path) -> str:
    """A run's folder as commands take it."""
    return str(folder if folder.name not in ("", "..") else folder.resolve())


def further(folder: str, tunable: bool, classes: bool) -> tuple[NextStep, ...]:
    """The commands that go on from a run, whatever its numbers are."""
    predict = shlex.join(["linnet", "predict", "--run", folder, "--data", "FOLDER"])
    text = "FOLDER: an image folder, .npz or .csv. Without labels, the page suggests which samples to label."
    steps = [NextStep("Predict new samples", text, predict)]
    if tunable:
        words = ["linnet", "adapt", "--config", f"{folder}/run.yaml", "--tune", "true"]
        line = shlex.join([*words, "--out", folder_beside(folder, "tuned")])
        why = "Trains the network as well, and keeps the result unless cross-validation is worse."
        steps.insert(0, NextStep("Try for more accuracy" if classes else "Try for less error", why, line))
    return tuple(steps) if folder.isprintable() else ()


def _timings(found: Adaptation) -> dict[str, float]:
    """Seconds of each step, with the fit in its parts."""
    seconds: dict[str, float] = {}
    for name, value in found.stages.seconds.items():
        parts = {f"fit: {part}": s for part, s in found.run.fit.record.seconds.items()}
        seconds |= parts if name == "fit" else {name: value}
    return seconds


def keep_adaptation(found: Adaptation, out: Path, title: str, replay: bool = False) -> dict[str, Any]:
    """Write the report of an adaptation whose fit is kept already."""
    page = adaptation_page(found, title, out, replay)
    task, fit = found.task, found.run.fit
    result = {
        "command": "adapt",
        "title": title,
        "train": len(task.train),
        "test": len(task.test),
        "verdict": {"answer": verdict(page).answer, "sentences": list(page.notes.headline)},
        "scores": [row.numbers() for row in found.scores],
        "fit": fit.summary(),
        "below": fit.module.below,
        "device": str(fit.module.function.device),
        "next": [asdict(step) for step in page.notes.first],
        "data": {"classes": task.classes, "findings": list(task.findings)},
        "preflight": {"parameters": found.preflight.total, "findings": list(found.preflight.findings)},
        "seconds": dict(found.stages.seconds),
        "out": str(out),
    }
    write(out, result, page)
    return result


NEXT = "next: --tune trains the network as well, and keeps the result unless cross-validation is worse"


def print_adaptation(result: dict[str, Any]) -> list[str]:
    """An adaptation for people."""
    fit = result["fit"]
    classes = result["data"]["classes"]
    task = f"{len(classes)} classes" if classes else f"{fit['outputs']} value(s)"
    return [
        f"{result['title']}: {result['train']} training and {result['test']} test samples, {task}; "
        f"{fit['parameters']:,} weights",
        *score_table([Comparison(**row) for row in result["scores"]], result["test"]),
        *result["verdict"]["sentences"],
        *rung_table(fit.get("rungs", [])),
        *(f"next: {step['command']}" for step in result["next"]),
        *([NEXT] if not result["next"] and fit.get("trained") is False and not fit["rungs"] else []),
        f"{result['below']}: {fit['reasons']['shares']} ({fit['reasons']['body']})",
        f"ridge {number(fit['ridge'])}: {fit['reasons'].get('ridge', '')}",
        f"solver {fit['solver']}: {solver_reason(fit['reasons'])}",
        "time: " + ", ".join(f"{step} {duration(t)}" for step, t in result["seconds"].items()),
        *(f"note: {text}" for text in (*fit["warnings"], *result["data"]["findings"])),
        *written(Path(result["out"])),
    ]


def rung_table(rungs: list[dict[str, Any]]) -> list[str]:
    """The models that were compared on held-out folds, as aligned text."""
    if not rungs:
        return []
    width = max(len(rung["name"]) for rung in rungs)
    lines = ["on held-out folds of the training samples, each gain over the line above:"]
    for rung in rungs:
        gain = f"{100 * rung['gain']:.0f} ± {100 * rung['gain_error']:.0f} % less error"
        if rung["points"] is not None:
            gain = f"{rung['points']:+.1f} ± {rung['points_error']:.1f} points, {gain}"
        score = f"error {number(rung['error'])}"
        if rung["accuracy"] is not None:
            score = f"{100 * rung['accuracy']:5.1f} % right"
        first = rung is rungs[0]
        took = f"  ({duration(rung['seconds'])})" if rung["seconds"] else ""
        used = "  <- used" if rung["taken"] else ""
        lines.append(f"  {rung['name']:<{width}}  {score}  {'' if first else gain}{took}{used}".rstrip())
    return lines


def score_table(rows: list[Comparison], tested: int | None = None) -> list[str]:
    """Scores as aligned text."""

    def share(value: float | None) -> str:
        error = None if value is None else share_error(value, tested)
        return percent(value) if error is None else f"{100 * (value or 0):.1f} ± {100 * error:.1f} %"

    forms = (
        ("accuracy", "accuracy", share),
        ("nll", "log loss", number),
        ("ece", "calibration error", percent),
        ("rmse", "RMSE", number),
        ("seconds", "time", duration),
    )
    names = ["", *(row.name for row in rows)]
    columns = [
        [heading, *(form(getattr(row, field)) for row in rows)]
        for field, heading, form in forms
        if any(getattr(row, field) is not None for row in rows)
    ]
    width, wide = max(map(len, names)), [max(len(column[0]), 8) for column in columns]
    return [
        f"  {name:<{width}}" + "".join(f"  {c[i]:>{w}}" for c, w in zip(columns, wide, strict=True))
        for i, name in enumerate(names)
    ]


def written(out: Path) -> list[str]:
    """Paths of the report and the result."""
    return [f"report: {kept(out / 'report.html')}   numbers: {kept(out / 'result.json')}"]


def print_prediction(result: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Predictions for people."""
    lines = [f"{result['samples']} samples predicted: {kept(result['predictions'])}"]
    lines += lines_of(rows, Path(result["predictions"]).name)
    if result["predicted"]:
        counts = ", ".join(f"{name} ({count})" for name, count in result["predicted"].items() if count)
        lines.append(f"  predicted classes: {counts}")
    if result["scores"]:
        lines += score_table([Comparison(**row) for row in result["scores"]], result["samples"])
    if (held := result.get("held")) is not None:
        if "mean_size" in held:
            what, size = "sets", f"{held['mean_size']:.2f} classes"
        else:
            what, size = "intervals", "width " + ", ".join(f"{width:.3g}" for width in held["mean_width"])
        known = "" if held["share"] is None else f"; they hold {100 * held['share']:.1f} % of the answers"
        lines.append(f"  {what} that are to hold {100 * held['coverage']:g} %: of {size} on average{known}")
    lines += [f"note: {text}" for text in result["findings"]]
    return [*lines, *written(Path(result["out"]))]


def compared(result: dict[str, Any]) -> str:
    """Whether a change is what a fit from scratch gives."""
    how = "a fit from scratch" if result["verified"] else "the equations solved from scratch"
    how += " with the same means and scales" * ("kept_scales" in result and result["verified"])
    return f"equal to {how}" if result["equal"] else f"NOT equal to {how}"


def print_change(result: dict[str, Any]) -> list[str]:
    """A change for people."""
    text, key = ("forgotten", "removed") if result["command"] == "forget" else ("added", "added")
    if result["trained"] and key == "removed":
        text = "taken out of the fit"
    count = len(result[key])
    many = "training samples" if count != 1 else "training sample"
    lines = [
        f"{count} {many} {text} in {duration(result['seconds'])}; {result['train']} now",
        *lines_of(result[key]),
    ]
    if result["scores"]:
        lines += score_table([Comparison(**row) for row in reversed(result["scores"])], result.get("test"))
    lines += [
        f"relative residual of the equations: {result['certificate']:.1e}",
        f"{compared(result)}: outputs differ by {result['difference']:.1e} at most "
        f"({duration(result['refit_seconds'])})",
    ]
    if result["command"] == "forget":
        told = f"{result['kept_scales']} are those of all samples, forgotten ones too"
        if (apart := result["own_scales"]) is not None:
            unit = "in a probability" if result["fit"]["classes"] else "standard deviations of the answers"
            told += f"; features with their own change predictions by {apart:.2g} {unit} at most"
        lines.append(f"note: {told}")
    lines += [f"note: {text}" for text in (*result["fit"]["warnings"], *result["findings"])]
    return [*lines, *written(Path(result["out"]))]
