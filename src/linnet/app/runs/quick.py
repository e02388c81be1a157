"""A first answer: a linear probe of all samples, then the lower layers on as many as half a minute allows."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from linnet.app.data import TaskData
from linnet.app.runs.adaptation import (
    Adaptation,
    Others,
    Started,
    adapted,
    drawn,
    evaluated,
    loaded,
    nested_run,
    nests,
    own_score,
    predict_test,
    started,
)
from linnet.app.runs.folder import SavedRun
from linnet.app.runs.place import check_out, made_folder
from linnet.app.runs.planning import TESTED, planned, seconds_each
from linnet.app.runs.settings import Settings, Source
from linnet.fitting.record import Record
from linnet.linear.targets import make_targets
from linnet.nested.nested_fit import NestedFit, solved
from linnet.nested.search import SAME
from linnet.report import Run, Scores
from linnet.report.verdict import TRY, told
from linnet.report.wording import duration, number
from linnet.tangent.linearized import linearize

Array = np.ndarray[Any, Any]
Keep = Callable[[SavedRun], None]
QUICK = 15.0  # seconds of passes through the network, about the time that torch takes to start
FEW = 8  # samples that are timed
LEAST = 32  # test samples, whose accuracy has a standard error of at most 9 points
SHOTS, VALUES = 5, 16  # training samples of each class, or of all values: leave-one-out of fewer says little
MOST = 2000  # training samples of a probe, whose equations then take seconds, and test samples


def first_answer(
    settings: Settings, out: Path, keep: Keep, tell: Callable[[str], None] = print
) -> Adaptation:
    """Adapt a network as ``linnet.app.runs.adaptation.adapt`` does, with what takes half a minute."""
    # What is kept is the linear probe of all samples, or the fit with the lower layers where the time allows
    # all of them. Where something is asked for that a probe is not, samples are left out.
    check_out(out)
    with made_folder(out):
        every = loaded(settings.source)
        settings = replace(settings, source=_bounded(settings.source, every))
        begun, solving = started(settings), settings.solving
        is_open = solving.weight == "auto" and not solving.tune
        if is_open and nests(settings, begun.task, begun.network, begun.data[0]):
            return _probed(settings, begun, every, out, keep, tell)
        x = begun.data[0][:FEW]
        names = solving.params if solving.params is None or isinstance(solving.params, str) else None
        plan = planned(begun.network, begun.task, x, names)
        work = plan.nested.body if plan.nested else linearize(plan.model, params=plan.params).kernel
        each = seconds_each(work, x)
        shots, tests = _shots(begun.task, QUICK / 2 / each), int(QUICK / 2 / each / TESTED)
        return _part(settings, begun, every, (shots, tests), out, keep)


def _probed(
    settings: Settings, begun: Started, every: TaskData, out: Path, keep: Keep, tell: Callable[[str], None]
) -> Adaptation:
    """The linear probe of all samples, and what the lower layers would add on some of them."""
    task, stages, solving = begun.task, begun.stages, settings.solving
    run, report = nested_run(replace(settings, solving=replace(solving, weight=0.0)), begun, out)
    fit = run.fit
    assert isinstance(fit, NestedFit)
    with stages.measure("linear probe on the test samples"):
        found = predict_test(run, task)
    score = own_score(run, task, found)
    page = Run("", task.classes, scores=Scores((score.row,), tested=len(task.test)))
    seconds = duration(sum(stages.seconds.values())).replace("\u202f", " ")
    tell(f"linear probe of {taken(every, task, tests=False)}: {told(page, score.row)} ({seconds})")
    each = seconds_each(fit.module.body, begun.data[0][:FEW])
    shots = _shots(task, QUICK / each)
    if shots >= _counts(task).max():
        return _part(settings, begun, every, (shots, int(QUICK / each / TESTED)), out, keep)
    part = drawn(task, replace(settings.source, shots=shots, at_most=True))
    x, y = (t.to(begun.data[0].device) for t in part.tensors("train"))
    with stages.measure("lower layers on some samples"):
        targets = make_targets(y, fit.system.c, dtype=fit.module.function.dtype)
        trial = solved(fit.module, x, targets, solving.memory, Record("dual", "loo", {}, ()))
    some = taken(every, part, tests=False)
    reasons = {"body": "a quick run keeps the linear probe"}
    verdict = str(trial.verdict).removeprefix("Kept the linear probe: ")
    tried = f"{TRY}: on" if trial.body_weight and SAME not in verdict else "On"
    reasons["verdict"] = f"{tried} {some} {verdict[:1].lower()}{verdict[1:]}"
    fit.record = replace(fit.record, reasons={**fit.record.reasons, **reasons})
    keep(run)
    others = Others(settings, task, begun.network, begun.network)
    made = evaluated(run, begun, report, others, predictions=found)
    return replace(made, quick=f"Quick run, the linear probe alone: {taken(every, task)}.", whole=False)


def _part(
    settings: Settings, begun: Started, every: TaskData, most: tuple[int, int], out: Path, keep: Keep
) -> Adaptation:
    """The fit that was asked for, of some samples; what was asked for by number is kept."""
    source, (shots, tests), counts = settings.source, most, _counts(begun.task)
    if source.shots is None and shots < counts.max():
        source = replace(source, shots=shots, at_most=bool(shots > counts.min()))
    if source.tests is None and max(LEAST, tests) < len(begun.task.test):
        source = replace(source, tests=max(LEAST, tests))
    task = drawn(begun.task, source)
    x, y = (t.to(begun.data[0].device) for t in task.tensors("train"))
    begun = replace(begun, task=task, data=(x, y))
    found = adapted(replace(settings, source=source), begun, out, keep)
    is_whole = len(task.train) == len(every.train) and len(task.test) == len(every.test)
    return replace(found, quick=f"Quick run: {taken(every, task)}.", whole=is_whole)


def _bounded(source: Source, task: TaskData) -> Source:
    """The data, with numbers of samples where there are too many for a probe of seconds."""
    if source.shots is None and len(task.train) > MOST:
        source = replace(source, shots=max(_most_shots(_counts(task), MOST), 1), at_most=True)
    return replace(source, tests=MOST) if source.tests is None and len(task.test) > MOST else source


def _shots(task: TaskData, room: float) -> int:
    """The training samples of each class, or of a regression, that a number in all allows; five at least."""
    return max(VALUES if task.classes is None else SHOTS, _most_shots(_counts(task), int(room)))


def taken(every: TaskData, part: TaskData, tests: bool = True) -> str:
    """What was taken of the data."""
    noun, own, counts = "images" if every.image_mode else "samples", _counts(part), _counts(every)
    if len(part.train) == len(every.train):
        told = f"all {number(len(every.train))} training {noun}"
    elif len(own) > 1 and own.min() == own.max() and counts.min() == counts.max():
        told = f"{own[0]} of {counts[0]} training {noun} per class"
    else:
        most = f", at most {own.max()} per class" if len(own) > 1 else ""
        told = f"{number(len(part.train))} of {number(len(every.train))} training {noun}{most}"
    if not tests:
        return told
    share = "all" if len(part.test) == len(every.test) else f"{number(len(part.test))} of"
    return f"{told}, {share} {number(len(every.test))} test {noun}"


def _counts(task: TaskData) -> Array:
    """Training samples of each class, or of all values."""
    return np.array([len(task.train)]) if task.classes is None else np.bincount(task.train.y)


def _most_shots(counts: Array, room: int) -> int:
    """The most samples of each class, or all of a smaller one, that are not more than ``room`` together."""
    every = range(int(counts.max()) + 1)
    return bisect(every, room, key=lambda shots: int(np.minimum(counts, shots).sum())) - 1
