"""Builds the report page and the result file of a run."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from linnet.app.runs.adaptation import Adaptation
from linnet.app.runs.place import writing
from linnet.files import write_json
from linnet.nested.nested_fit import NestedFit
from linnet.report.evaluation import Fit
from linnet.report.html import write_report
from linnet.report.reading import facts, fit_record, held_out, training_set
from linnet.report.records import Content, NextStep, Notes, Samples
from linnet.report.steps import folder_beside, next_steps
from linnet.report.verdict import summary

Array = np.ndarray[Any, Any]


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
        x = task.tensors("test")[0].to(run.fit.module.function.device)
        record = fit_record(run, x, task.test.y)
    with found.stages.measure("influence and leave-one-out"):
        train = training_set(run)
        samples = Samples(task.test.x if task.image_mode else None, task.test.y, task.test.ids)
        test = held_out(run, samples, found.predictions, task.test.x)
    record = replace(record, preflight=found.preflight, timings=_timings(found))
    folder = place_of(out)
    steps = further(folder, replay and found.whole and _is_untuned(run.fit), task.classes is not None)
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


def _is_untuned(fit: Fit) -> bool:
    """Whether training of the lower layers was not tried."""
    return isinstance(fit, NestedFit) and not fit.trained and not fit.rungs


def further(folder: str, tunable: bool, classes: bool) -> tuple[NextStep, ...]:
    """The commands that go on from a run, whatever its numbers are."""
    predict = shlex.join(["linnet", "predict", "--run", folder, "--data", "FOLDER"])
    text = "FOLDER: an image folder, .npz or .csv. Without labels, the page suggests which samples to label."
    steps = [NextStep("Predict new samples", text, predict)]
    if tunable:
        words = ["linnet", "adapt", "--config", f"{folder}/run.yaml", "--tune", "true"]
        line = shlex.join([*words, "--out", folder_beside(folder, "tuned")])
        why = "Trains the network as well, and keeps the result only if cross-validation improves."
        steps.insert(0, NextStep("Try for more accuracy" if classes else "Try for less error", why, line))
    return tuple(steps) if folder.isprintable() else ()


def _timings(found: Adaptation) -> dict[str, float]:
    """Seconds of each step, with the fit in its parts."""
    parts = found.run.fit.record.seconds
    seconds: dict[str, float] = {}
    for name, value in found.stages.seconds.items():
        if name == "fit":
            seconds |= {f"fit: {part}": s for part, s in parts.items()}
        else:
            seconds[name] = value
    return seconds
