"""The sentences and numbers at the top of a page: the verdict, how far to trust it, and what changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linnet.plots.measures import interval_coverage
from linnet.report.measures import (
    FEW,
    calibration_and_error,
    mean_and_error,
    share_error,
    split_by_uncertainty,
)
from linnet.report.records import Comparison, HeldOutSet
from linnet.report.run import Run
from linnet.report.verdict import constant, gain, losses, short_score, tests_of, the, verdict
from linnet.report.wording import doubt_found, duration, measured_share, number, percent

_CLEAR = 2.0  # standard errors from which a difference counts
_MATTERS = 0.03  # gap between probabilities and shares of right answers that is worth a word
_FINE = 0.05  # calibration error that the error of its estimate must exclude, to call it good


@dataclass(frozen=True)
class KeyNumber:
    """One number at the top of the page."""

    value: str  # the number with its standard error and its unit, as text
    name: str  # what it is
    note: str = ""  # what to compare it with


def summary(run: Run) -> list[str]:
    """The sentences at the top of the page, the verdict first: those given, or written from the numbers."""
    if run.notes.headline:
        return list(run.notes.headline)
    first, *rest = verdict(run).sentences or ("",)
    return [sentence for sentence in (first, run.notes.quick, *rest, trust(run), _changes(run)) if sentence]


def trust(run: Run) -> str:
    """The sentence on the probabilities."""
    if not run.scores.reliability or not len(run.scores.reliability[0].confidence):
        return ""
    part = run.scores.reliability[0]
    error, spread = calibration_and_error(part.confidence, part.correct)
    sure, right = float(part.confidence.mean()), float(part.correct.mean())
    _, uncertain = mean_and_error(np.asarray(part.confidence) - part.correct)
    if abs(sure - right) > max(_CLEAR * uncertain, _MATTERS):
        kind = "high" if sure > right else "low"
        return (
            f"Its probabilities are too {kind}: {percent(sure)} on average, where {percent(right)} are right."
        )
    shown = measured_share(error, spread)
    if error > _MATTERS + _CLEAR * spread:
        return f"Its probabilities are right on average but not one by one (calibration error {shown})."
    if error + _CLEAR * spread > _FINE:
        few = f"{number(len(part.confidence))} predictions are too few to tell"
        return f"{few} how well its probabilities are calibrated (calibration error {shown})."
    return f"Its probabilities are well calibrated (calibration error {shown})."


def key_numbers(run: Run) -> list[KeyNumber]:
    """The numbers at the top of the page."""
    found: list[KeyNumber] = []
    if run.scores.comparison:
        own = run.scores.comparison[0]
        found += _of_classes(run, own) if own.accuracy is not None else _of_values(run, own)
    task = run.fit.task
    if task is not None:
        found.insert(0, KeyNumber(percent(task.share, 0), f"of the labels on {task.top} directions"))
        found.insert(1, KeyNumber(number(task.levels[1]), "effective parameters"))
    if len(found) < 3 and run.train is not None and len(run.train.samples):
        found.append(KeyNumber(number(len(run.train.samples)), "training samples"))
    if len(found) < 3 and run.fit.timings:
        found.append(KeyNumber(duration(sum(t.seconds for t in run.fit.timings)), "in all"))
    return found[:3]


def least_certain(test: HeldOutSet | None) -> tuple[float, float, int] | None:
    """Mean loss of the tenth of the predictions that is least certain, and of the others."""
    loss = None if test is None else test.loss()
    if test is None or test.uncertainty is None or loss is None or len(loss) < FEW:
        return None
    return split_by_uncertainty(test.uncertainty, loss)


def _of_classes(run: Run, own: Comparison) -> list[KeyNumber]:
    """Accuracy, what is gained on the best of the others, and calibration."""
    tested, beside, found = run.tested(), constant(run, own), gain(run)
    counted = tests_of(run) if tested else ""
    if beside is not None:
        counted += f"; always the most frequent class: {percent(1 - beside.loss)}"
    made = [KeyNumber(short_score(run, own), "test accuracy", counted)]
    if found is not None:
        points = measured_share(found.value, found.error, "points", signs=True)
        note = f"which has {percent(found.other.accuracy)}"
        made.append(KeyNumber(points, f"against {the(found.other)}", note))
    if run.scores.reliability and len(run.scores.reliability[0].confidence):
        part = run.scores.reliability[0]
        error, spread = calibration_and_error(part.confidence, part.correct)
        made.append(KeyNumber(measured_share(error, spread), "calibration error", "0 is perfect"))
    return made


def _of_values(run: Run, own: Comparison) -> list[KeyNumber]:
    """Error of a regression, the variance that it explains, and the coverage of its intervals."""
    if own.rmse is None:
        return []
    made = [KeyNumber(short_score(run, own), "root mean squared error", "in the unit of the target")]
    squares, test = losses(run, own), run.test
    if squares is None or test is None or test.mean is None:
        return made
    answers = np.asarray(test.samples.labels, dtype=float).reshape(len(test.mean), -1)
    spread = ((answers - answers.mean(0)) ** 2).mean(1)
    if whole := float(spread.mean()):
        kept, error = mean_and_error(spread - squares)
        shown = measured_share(kept / whole, error / whole)
        made.append(KeyNumber(shown, "of the variance explained", "100 % is perfect"))
    if test.std is not None:
        share = float(
            interval_coverage(test.mean, test.std, answers.reshape(np.shape(test.mean)), np.array([0.9]))[0]
        )
        shown = measured_share(share, share_error(share, int(np.size(test.mean))))
        made.append(KeyNumber(shown, "of the true values in their 90 % intervals", "90 % is perfect"))
    return made


def _changes(run: Run) -> str:
    """Label errors and forgetting."""
    if run.train is None:
        return ""
    parts = []
    if run.train.suspects:
        parts.append(doubt_found(run.train))
    forgotten = run.train.forgetting
    if forgotten is not None:
        count = len(forgotten.removed)
        taken = "" if forgotten.seconds is None else f" in {duration(forgotten.seconds)}"
        parts.append(f"{count} training sample{'s were' if count != 1 else ' was'} forgotten{taken}")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else ""
