"""What the numbers of a run come to: the verdict, and the numbers beside it with their errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from linnet.app.report.measures import FEW, calibration_and_error, mean_and_error, split_by_uncertainty
from linnet.app.report.records import Comparison, HeldOutSet
from linnet.app.report.run import Run
from linnet.app.report.wording import doubt_found, duration, measured, measured_share, number, percent
from linnet.plots.measures import Array, interval_coverage, wilson_interval

_CLEAR = 2.0  # standard errors from which a difference counts
_Z = NormalDist().inv_cdf(0.975)  # standard errors of a 95 % interval to each side, 1.96
_MATTERS = 0.03  # gap between probabilities and shares of right answers that is worth a word


@dataclass(frozen=True)
class KeyNumber:
    """One number at the top of the page.

    Args:
        value: The number with its standard error and its unit, as text.
        name: What it is.
        note: What to compare it with.
    """

    value: str
    name: str
    note: str = ""


@dataclass(frozen=True)
class Gain:
    """How far the first method is ahead of the best of the others.

    Args:
        other: The best of the others.
        value: Gain in accuracy, or in root mean squared error; negative where the other is better.
        error: Its standard error; None where it is not known.
    """

    other: Comparison
    value: float
    error: float | None

    @property
    def clear(self) -> bool:
        """Whether the difference exceeds two standard errors."""
        return self.error is None or abs(self.value) > _CLEAR * self.error


def summary(run: Run) -> list[str]:
    """The sentences at the top of the page, the verdict first: those given, or written from the numbers.

    Args:
        run: The run.

    Returns:
        Whole sentences.

    Example:
        >>> from linnet.app.report.records import Scores
        >>> summary(Run("x", scores=Scores((Comparison("linear fit", rmse=0.5),))))
        ['The linear fit: its root mean squared error on the test samples is 0.500.']
    """
    if run.notes.headline:
        return list(run.notes.headline)
    return [sentence for sentence in (verdict(run), trust(run), _changes(run)) if sentence]


def verdict(run: Run) -> str:
    """The judgment in one sentence: what to use, by the scores on the test samples.

    Args:
        run: The run.

    Returns:
        A sentence; empty without scores.

    Example:
        >>> from linnet.app.report.records import Scores
        >>> rows = (Comparison("linear fit", accuracy=0.9), Comparison("linear probe", accuracy=0.7))
        >>> told = verdict(Run("x", scores=Scores(rows, tested=100)))
        >>> told.replace("\u00a0", " ").partition(", ")[2]
        '20.0 ± 5.4 points more than the linear probe.'
    """
    if not run.scores.comparison:
        return ""
    own, found = run.scores.comparison[0], gain(run)
    score = _scored(run, own)
    if not score:
        return ""
    if _is_useless(run):
        than = "the most frequent class every time" if own.accuracy is not None else "the mean every time"
        return f"Do not use {_the(own)}: {score}, no better than answering {than}."
    if found is None:
        return f"{_the(own)[:1].upper()}{_the(own)[1:]}: {score}."
    size = _size(found, own.accuracy is not None)
    if not found.clear:
        beside = f"{_short_score(run, own)} against {_short_score(run, found.other)}"
        beside += f"; difference {size}" if found.value else ""
        return f"Use either {_the(own)} or {_the(found.other)}: this test cannot tell them apart ({beside})."
    first, second = (own, found.other) if found.value > 0 else (found.other, own)
    use = f"Use {_the(first)}" + ("" if first is own else " instead")
    ahead = "more" if own.accuracy is not None else "less"
    return f"{use}: {_scored(run, first)}, {size} {ahead} than {_the(second)}."


def trust(run: Run) -> str:
    """The sentence on the probabilities.

    Args:
        run: The run.

    Returns:
        A sentence; empty without probabilities and answers.

    Example:
        >>> from linnet.app.report.records import Reliability, Scores
        >>> part = Reliability("fit", np.full(100, 0.9), np.arange(100) < 60)
        >>> trust(Run("x", scores=Scores(reliability=(part,))))
        'Its probabilities are too high: 90.0\u202f% on average, where 60.0\u202f% are right.'
    """
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
    return f"Its probabilities can be taken as they are (calibration error {shown})."


def key_numbers(run: Run) -> list[KeyNumber]:
    """The numbers at the top of the page.

    Args:
        run: The run.

    Returns:
        At most three, each with its standard error where it has one.

    Example:
        >>> key_numbers(Run("x"))
        []
    """
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


def gain(run: Run) -> Gain | None:
    """The first method against the best of the others, on the same test samples.

    Args:
        run: The run.

    Returns:
        The difference; None where there is no other with the same score.

    Example:
        >>> from linnet.app.report.records import Scores
        >>> rows = (Comparison("linear fit", accuracy=0.9), Comparison("linear probe", accuracy=0.7))
        >>> found = gain(Run("x", scores=Scores(rows, tested=100)))
        >>> round(found.value, 3), round(found.error, 3)
        (0.2, 0.054)
    """
    if len(run.scores.comparison) < 2:
        return None
    own, others = run.scores.comparison[0], run.scores.comparison[1:]
    if own.accuracy is not None:
        scored = [row for row in others if row.accuracy is not None]
        if not scored:
            return None
        other = max(scored, key=lambda row: row.accuracy or 0.0)
        assert other.accuracy is not None
        return Gain(other, own.accuracy - other.accuracy, _error_between(run, own, other))
    scored = [row for row in others if row.rmse is not None]
    if own.rmse is None or not scored:
        return None
    other = min(scored, key=lambda row: row.rmse or 0.0)
    assert other.rmse is not None
    _, spread = _rmse_and_error(run, own)
    # the other's errors are not known one by one: taken as independent, and as widely spread
    return Gain(other, other.rmse - own.rmse, None if spread is None else math.sqrt(2) * spread)


def least_certain(test: HeldOutSet | None) -> tuple[float, float, int] | None:
    """Mean loss of the tenth of the predictions that is least certain, and of the others.

    Args:
        test: The test samples.

    Returns:
        Both, and the number of the former; None without answers, or with fewer than twenty.

    Example:
        >>> least_certain(None) is None
        True
    """
    loss = None if test is None else test.loss()
    if test is None or test.uncertainty is None or loss is None or len(loss) < FEW:
        return None
    return split_by_uncertainty(test.uncertainty, loss)


def share_error(share: float, count: int | None) -> float | None:
    """The standard error of a share, which is not zero where all or none of a few were right.

    Args:
        share: The share, in [0, 1].
        count: Of how many.

    Returns:
        Half the width of Wilson's 95 % interval in units of z: √(p (1 − p) / n) for many; None where the
        number is not known.

    Example:
        >>> [round(share_error(share, count), 3) for share, count in ((0.5, 100), (0.9, 1000), (1.0, 24))]
        [0.049, 0.01, 0.035]
    """
    if not count:
        return None
    low, high = wilson_interval(share * count, count)
    return (high - low) / (2 * _Z)


def _error_between(run: Run, own: Comparison, other: Comparison) -> float | None:
    """The standard error of a difference in accuracy, of pairs where both methods' answers are known."""
    known = {part.method: np.asarray(part.correct, dtype=float) for part in run.scores.reliability}
    first, second = known.get(own.name), known.get(other.name)
    if first is not None and second is not None and len(first) == len(second):
        return mean_and_error(first - second)[1]
    errors = [share_error(row.accuracy or 0.0, run.tested()) for row in (own, other)]
    return None if None in errors else math.hypot(*(error or 0.0 for error in errors))


def _squares(run: Run) -> tuple[Array, Array] | None:
    """Squared errors of a regression, and squared distances of the answers from their mean."""
    test = run.test
    if test is None or test.mean is None or test.samples.labels is None or not len(test.mean):
        return None
    answers = np.asarray(test.samples.labels, dtype=float).reshape(len(test.mean), -1)
    gaps = np.asarray(test.mean, dtype=float).reshape(len(test.mean), -1) - answers
    return (gaps**2).mean(1), ((answers - answers.mean(0)) ** 2).mean(1)


def _rmse_and_error(run: Run, row: Comparison) -> tuple[float | None, float | None]:
    """The root mean squared error; its standard error too where the row is the fit's own."""
    squares = _squares(run)
    if squares is None or row is not run.scores.comparison[0] or not row.rmse:
        return row.rmse, None
    return row.rmse, mean_and_error(squares[0])[1] / (2 * row.rmse)  # d√m = dm / 2√m


def _is_useless(run: Run) -> bool:
    """Whether the fit is no better than always giving the same answer."""
    own, test = run.scores.comparison[0], run.test
    if test is None or test.samples.labels is None or len(test.samples) < FEW:
        return False
    if own.accuracy is not None and run.classes is not None:
        constant = float(np.bincount(test.samples.labels).max() / len(test.samples))
        return wilson_interval(own.accuracy * len(test.samples), len(test.samples))[0] <= constant
    squares = _squares(run)
    if squares is None:
        return False
    saved, error = mean_and_error(squares[1] - squares[0])
    return saved <= _CLEAR * error


def _the(row: Comparison) -> str:
    """A method's name in a sentence."""
    return row.name if row.name.endswith("ing") or " " not in row.name else f"the {row.name}"


def _scored(run: Run, row: Comparison) -> str:
    """A method's score as a clause about it."""
    tested = run.tested()
    if row.accuracy is not None:
        of = f"{number(tested)} test samples" if tested else "the test samples"
        return f"it predicts {_short_score(run, row)} of {of} right"
    if row.rmse is None:
        return ""
    return f"its root mean squared error on the test samples is {_short_score(run, row)}"


def _short_score(run: Run, row: Comparison) -> str:
    """A method's score with its standard error."""
    if row.accuracy is not None:
        return measured_share(row.accuracy, share_error(row.accuracy, run.tested()))
    rmse, error = _rmse_and_error(run, row)
    return measured(rmse or 0.0, error)


def _size(found: Gain, shares: bool) -> str:
    """The size of a difference, with its standard error."""
    if shares:
        return measured_share(abs(found.value), found.error, "points")
    return measured(abs(found.value), found.error)


def _of_classes(run: Run, own: Comparison) -> list[KeyNumber]:
    """Accuracy, what is gained on the best of the others, and calibration."""
    tested = run.tested()
    counted = f"{number(tested)} test samples" if tested else ""
    made = [KeyNumber(_short_score(run, own), "test accuracy", counted)]
    found = gain(run)
    if found is not None:
        points = measured_share(found.value, found.error, "points", signs=True)
        made.append(KeyNumber(points, f"against {_the(found.other)}", "difference in test accuracy"))
    if run.scores.reliability and len(run.scores.reliability[0].confidence):
        part = run.scores.reliability[0]
        error, spread = calibration_and_error(part.confidence, part.correct)
        made.append(KeyNumber(measured_share(error, spread), "calibration error", "0 is perfect"))
    return made


def _of_values(run: Run, own: Comparison) -> list[KeyNumber]:
    """Error of a regression, the variance that it explains, and the coverage of its intervals."""
    if own.rmse is None:
        return []
    made = [KeyNumber(_short_score(run, own), "root mean squared error", "in the unit of the target")]
    squares, test = _squares(run), run.test
    if squares is not None and squares[1].mean() > 0:
        whole = float(squares[1].mean())
        kept, error = mean_and_error(squares[1] - squares[0])
        made.append(
            KeyNumber(
                measured_share(kept / whole, error / whole), "of the variance explained", "100 % is perfect"
            )
        )
    if squares is not None and test is not None and test.mean is not None and test.std is not None:
        answers = np.asarray(test.samples.labels, dtype=float).reshape(np.shape(test.mean))
        share = float(interval_coverage(test.mean, test.std, answers, np.array([0.9]))[0])
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
