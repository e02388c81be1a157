"""A first answer: a linear probe of all samples, then the lower layers on as many as half a minute allows."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from linnet.app.data import TaskData
from linnet.app.options import AdaptOptions
from linnet.app.runs.adaptation import (
    TESTED,
    Adaptation,
    Keep,
    Started,
    adapted,
    asked,
    checked_features,
    drawn,
    evaluated,
    fitted,
    own_score,
    predict_test,
    seconds_each,
    started,
)
from linnet.app.runs.place import check_out, made_folder
from linnet.fitting.arguments import Choices
from linnet.linear.targets import make_targets
from linnet.nested.nested_fit import NestedFit, solved
from linnet.nested.search import SAME
from linnet.report.numbers import duration, number
from linnet.report.records import Content, Scores
from linnet.report.verdict import TRY, score_in_words

Array = np.ndarray[Any, Any]
QUICK = 15.0  # seconds of passes through the network, about the time that torch takes to start
FEW = 8  # samples that are timed
LEAST = 32  # test samples, whose accuracy has a standard error of at most 9 points
SHOTS, VALUES = 5, 16  # training samples of each class, or of all values: leave-one-out of fewer says little
MOST = 2000  # training samples of a probe, whose equations then take seconds, and test samples


def first_answer(
    options: AdaptOptions, out: Path, keep: Keep, tell: Callable[[str], None] = print
) -> Adaptation:
    """Adapt a network as ``linnet.app.runs.adaptation.adapt`` does, with what takes half a minute."""
    # What is kept is the linear probe of all samples, or the fit with the lower layers where the time allows
    # all of them. Where something is asked for that a probe is not, samples are left out.
    check_out(out)
    with made_folder(out):
        begun = started(options, lambda task: _bounded(options, task))
        if options.weight == "auto" and not options.tune:
            return _probed(options, begun, out, keep, tell)
        x = begun.tensors()[0][:FEW]
        each = seconds_each(checked_features(options, begun.network, x)[0].kernel, x)
        shots, tests = _shots(begun.task, QUICK / 2 / each), int(QUICK / 2 / each / TESTED)
        return _part(options, begun, (shots, tests), out, keep)


def _probed(
    options: AdaptOptions, begun: Started, out: Path, keep: Keep, tell: Callable[[str], None]
) -> Adaptation:
    """The linear probe of all samples, and what the lower layers would add on some of them."""
    task, stages, every = begun.task, begun.stages, begun.whole
    run, report = fitted(options, begun, (0.0, asked(options)[1]), out)
    fit = run.fit
    assert isinstance(fit, NestedFit)
    with stages.measure("linear probe on the test samples"):
        found = predict_test(run, task)
    score = own_score(run, task, found)
    page = Content("", task.classes, scores=Scores((score.row,), tested=len(task.test)))
    seconds = duration(sum(stages.seconds.values())).replace("\u202f", " ")
    tell(f"linear probe of {taken(every, task, tests=False)}: {score_in_words(page, score.row)} ({seconds})")
    each = seconds_each(fit.module.kernel, begun.tensors()[0][:FEW])
    shots = _shots(task, QUICK / each)
    if shots >= _counts(task).max():
        return _part(options, begun, (shots, int(QUICK / each / TESTED)), out, keep)
    part = replace(begun, task=drawn(task, shots, None, options.seed, at_most=True))
    x, y = part.tensors()
    with stages.measure("lower layers on some samples"):
        targets = make_targets(y, fit.system.c, dtype=fit.module.function.dtype)
        trial = solved(fit.module, x, targets, options.memory, Choices("dual", "loo", {}, ()))
    some = taken(every, part.task, tests=False)
    reasons = {"body": "a quick run keeps the linear probe"}
    verdict = str(trial.verdict).removeprefix("Kept the linear probe: ")
    tried = f"{TRY}: on" if trial.body_weight and SAME not in verdict else "On"
    reasons["verdict"] = f"{tried} {some} {verdict[:1].lower()}{verdict[1:]}"
    fit.record = replace(fit.record, reasons={**fit.record.reasons, **reasons})
    keep(run)
    made = evaluated(run, begun, report, options, predictions=found)
    return replace(made, quick=f"Quick run, the linear probe alone: {taken(every, task)}.", whole=False)


def _part(options: AdaptOptions, begun: Started, most: tuple[int, int], out: Path, keep: Keep) -> Adaptation:
    """The fit that was asked for, of some samples; what was asked for by number is kept."""
    task, every = begun.task, begun.whole
    shots = most[0] if options.shots is None and most[0] < _counts(task).max() else None
    tests = max(LEAST, most[1]) if options.tests is None else None
    task = drawn(task, shots, tests, options.seed, at_most=True)
    found = adapted(options, replace(begun, task=task), out, keep)
    is_whole = len(task.train) == len(every.train) and len(task.test) == len(every.test)
    return replace(found, quick=f"Quick run: {taken(every, task)}.", whole=is_whole)


def _bounded(options: AdaptOptions, task: TaskData) -> TaskData:
    """The samples that are asked for, or as many as a probe of seconds takes."""
    shots, tests, at_most = options.shots, options.tests, False
    if shots is None and len(task.train) > MOST:
        shots, at_most = max(_most_shots(_counts(task), MOST), 1), True
    return drawn(task, shots, MOST if tests is None else tests, options.seed, at_most)


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
