"""The verdict on a run: whether to use the fit, by its test samples, in one place for all who tell it.

Answers are compared sample by sample: with those of the best other method, and with a constant, which is the
most frequent class of the training samples, or their mean. What test samples leave open is said to be open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from linnet.plots.measures import Array, interval_coverage
from linnet.report.numbers import (
    FEW,
    Z,
    calibration_and_error,
    calibration_by_chance,
    duration,
    mean_and_error,
    measured,
    measured_share,
    number,
    percent,
    share_error,
    split_by_uncertainty,
)
from linnet.report.records import Comparison, Content, HeldOutSet, RidgeChoice, TrainingSet

Answer = Literal["use", "weak", "unclear", "do not use", ""]
_SEEN = Z + NormalDist().inv_cdf(0.8)  # standard errors of a difference that four tests of five would show
_USEFUL = 0.1  # share of a constant's mistakes that a fit avoids if it is of any use
TRY = "Try the full run"  # how the verdict of a quick run begins, where the full one is likely better
_CLEAR = 2.0  # standard errors from which a difference counts
_MATTERS = 0.03  # gap between probabilities and shares of right answers that is worth a word
_FINE = 0.05  # calibration error that the error of its estimate must exclude, to call it good
_LEAST = 0.01  # smallest difference of two methods that is worth telling apart, in accuracy


@dataclass(frozen=True)
class Recommendation:
    """What to make of a fit."""

    # `"use"` it, or the other method that is named; `"weak"`, it is hardly better than a constant;
    # `"unclear"`, the test samples are too few to tell, or a quick run has left out what is likely better;
    # `"do not use"`, it is no better than a constant;
    # empty where there is nothing to compare it with
    answer: Answer
    sentences: tuple[str, ...]  # the same in words, the shortest first


@dataclass(frozen=True)
class Difference:
    """A mean difference of answers to the same test samples."""

    value: float  # the mean
    error: float  # its standard error, never zero
    clear: bool  # whether it is significant at 5 %
    needed: int  # number of test samples that would show it four times in five


@dataclass(frozen=True)
class Gain:
    """How far the first method is ahead of the best of the others."""

    other: Comparison  # the best of the others
    value: float  # gain in accuracy, or in root mean squared error; negative where the other is better
    error: float | None  # its standard error; None where it is not known
    clear: bool  # whether it is significant
    needed: int | None = None  # number of test samples that would show it; None where it is not known


def paired(change: Array, least: float = 0.0) -> Difference:
    """A mean difference of shares, judged with one more sample for and one against it."""
    # With these two the z test of b gains and c losses, (b − c)² > 1.96² (b + c + 2), decides as the exact
    # McNemar test does in all but a few cases at the edge, however few samples there are.
    #
    # Source: Bonett and Price, Journal of Educational and Behavioral Statistics 37 (2012), 479-488.
    count, total = len(change), float(np.sum(change))
    squares = float(np.square(change).sum()) + 2
    error = math.sqrt(squares - total**2 / (count + 2)) / count
    size = max(abs(total / count), least)
    needed = math.ceil(_SEEN**2 * squares / (count * size**2)) if size else 0
    return Difference(total / count, error, abs(total) > Z * math.sqrt(squares), needed)


def paired_values(change: Array, least: float = 0.0) -> Difference:
    """A mean difference of squared errors, judged by Student's t test."""
    count, mean = len(change), float(change.mean())
    spread = float(change.std(ddof=1)) if count > 1 else math.inf
    free = max(count - 1, 1)
    # the quantile of t, in powers of one over its degrees of freedom (Fisher and Cornish 1960)
    edge = Z + (Z**3 + Z) / (4 * free) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * free**2)
    size, error = max(abs(mean), least), spread / math.sqrt(count)
    needed = math.ceil((_SEEN * spread / size) ** 2) if size and count > 1 else 0
    return Difference(mean, error, abs(mean) > edge * error, needed)


@dataclass(frozen=True)
class ConstantAnswer:
    """A constant answer beside a method."""

    change: Difference  # how much better the method is, in shares of right answers, or in squared error
    loss: float  # share of wrong answers of the constant, or its mean squared error

    def judged(self) -> Answer:
        """Whether the method is of use."""
        most = self.change.value + Z * self.change.error
        is_useful = most >= _USEFUL * self.loss
        if self.change.clear and self.change.value > 0:
            return "use" if is_useful else "weak"
        return "unclear" if is_useful else "do not use"


def verdict(run: Content) -> Recommendation:
    """The verdict on a run."""
    of_fit = [run.fit.verdict] if run.fit.verdict else []
    own = run.scores[0] if run.scores else None
    if own is None or (own.accuracy is None and own.rmse is None):
        return Recommendation("", tuple(of_fit))
    found = gain(run)
    best = found.other if found is not None and found.clear and found.value < 0 else own
    beside = constant(run, best)
    answer: Answer = beside.judged() if beside is not None else "use" if found is not None else ""
    if answer == "do not use" and run.notes.quick:
        answer = "unclear"  # what a quick run finds is there to be gone on with
    if answer == "use" and run.fit.verdict.startswith(TRY):
        return Recommendation("unclear", (*of_fit, *_headline(run, best, False, "", beside)))
    if answer == "use" and found is not None and not found.clear:
        return Recommendation(answer, (_alike(run, own, found.other), _difference(run, own, found), *of_fit))
    sentences = _headline(run, best, best is not own, answer, beside)
    rest = [] if found is None else [_difference(run, own, found)]
    return Recommendation(answer, (*sentences, *rest, *of_fit))


def gain(run: Content) -> Gain | None:
    """The first method against the best of the others, on the same test samples."""
    if not run.scores:
        return None
    own, shares = run.scores[0], run.scores[0].accuracy is not None
    scored = [row for row in run.scores[1:] if _score(row, shares) is not None]
    if not scored or _score(own, shares) is None:
        return None
    other = (max if shares else min)(scored, key=lambda row: _score(row, shares) or 0.0)
    value = (_score(own, shares) or 0.0) - (_score(other, shares) or 0.0)
    value = value if shares else -value
    first, second = own.losses, other.losses
    if first is None or second is None or len(first) != len(second):
        errors = [score_error(run, row) for row in (own, other)]
        error = None if None in errors else math.hypot(*(one or 0.0 for one in errors))
        return Gain(other, value, error, error is None or abs(value) > Z * error)
    change = second - first
    found = paired(change, _LEAST) if shares else paired_values(change)
    if not shares and own.rmse and other.rmse:  # d√m = dm / 2√m
        error = mean_and_error(second / (2 * other.rmse) - first / (2 * own.rmse))[1]
        return Gain(other, value, error, found.clear, found.needed)
    return Gain(other, value, found.error, found.clear, found.needed)


def constant(run: Content, row: Comparison) -> ConstantAnswer | None:
    """A method against always giving the same answer, that of the training samples."""
    # Of classes that are equally frequent in training, one is taken at random.
    own = row.losses
    given = None if run.train is None else run.train.samples.labels
    answers = None if run.test is None else run.test.samples.labels
    if own is None or given is None or answers is None or not len(given) or len(answers) != len(own):
        return None
    if run.classes is not None:
        counts = np.bincount(given, minlength=len(run.classes))
        most = counts == counts.max()
        other = 1.0 - most[answers] / most.sum()
        return ConstantAnswer(paired(other - own, _USEFUL * other.mean()), float(other.mean()))
    mean = np.asarray(given, dtype=float).reshape(len(given), -1).mean(0)
    other = ((np.asarray(answers, dtype=float).reshape(len(answers), -1) - mean) ** 2).mean(1)
    return ConstantAnswer(paired_values(other - own, _USEFUL * other.mean()), float(other.mean()))


def score_error(run: Content, row: Comparison) -> float | None:
    """The standard error of a method's score."""
    if row.accuracy is not None:
        return share_error(row.accuracy, run.tested())
    squares = row.losses
    return None if squares is None or not row.rmse else mean_and_error(squares)[1] / (2 * row.rmse)


def short_score(run: Content, row: Comparison) -> str:
    """A method's score with its standard error."""
    if row.accuracy is not None:
        return measured_share(row.accuracy, score_error(run, row))
    return measured(row.rmse or 0.0, score_error(run, row))


def score_in_words(run: Content, row: Comparison) -> str:
    """A method's score as a clause."""
    if row.accuracy is not None:
        return f"{short_score(run, row)} of {tests_of(run)} are right"
    return f"its root mean squared error on {tests_of(run)} is {short_score(run, row)}"


def tests_of(run: Content) -> str:
    """The test samples, counted, in words."""
    kind = "images" if run.test is not None and run.test.samples.images is not None else "samples"
    tested = run.tested()
    return f"{number(tested)} test {kind}" if tested else f"the test {kind}"


def the(row: Comparison) -> str:
    """A method's name in a sentence."""
    return row.name if row.name.endswith("ing") or " " not in row.name else f"the {row.name}"


def _headline(
    run: Content, best: Comparison, is_other: bool, answer: Answer, beside: ConstantAnswer | None
) -> list[str]:
    """The answer in a sentence, and what to do about it."""
    name, score = the(best), score_in_words(run, best)
    subject = name[:1].upper() + name[1:]
    if not answer:
        return [f"{subject}: {score}."]
    if answer == "use" or beside is None:
        return [f"Use {name}{' instead' * is_other}: {score}."]
    if run.classes is None:
        always = f"always predicting the mean ({number(math.sqrt(beside.loss))})"
    else:
        always = f"always predicting the most frequent class ({percent(1 - beside.loss)})"
    if answer == "weak":
        cause = "Check that the network has its trained weights and sees inputs as in its training"
        return [f"{subject} is hardly better than {always}: {score}.", f"{cause}, or give it more samples."]
    if answer == "unclear" and not beside.change.needed:
        return [f"{subject} gives what {always} gives on {tests_of(run)}: {score}."]
    if answer == "unclear":
        return [
            f"{tests_of(run)} are too few to tell whether {name} is better than {always}: {score}.",
            f"About {_rounded(max(beside.change.needed, (run.tested() or 0) + 1))} would be enough.",
        ]
    return [f"Do not use {name}: {score}, not more than {always}." if run.classes is not None
            else f"Do not use {name}: {score}, not less than {always}."]  # fmt: skip


def _alike(run: Content, own: Comparison, other: Comparison) -> str:
    """Two methods that the test samples do not tell apart, in a sentence."""
    names, scores = f"{the(own)} and {the(other)}", f"{short_score(run, own)} and {short_score(run, other)}"
    if own.accuracy is not None:
        said = f"{scores} of {tests_of(run)} are right"
    else:
        said = f"root mean squared errors of {scores} on {tests_of(run)}"
    return f"{names[:1].upper()}{names[1:]} cannot be told apart: {said}."


def _difference(run: Content, own: Comparison, found: Gain) -> str:
    """The best of the others beside the first method, in a sentence."""
    first, second = the(own), the(found.other)
    shares = own.accuracy is not None
    size, error = abs(found.value), found.error
    shown = measured_share(size, error, "points") if shares else measured(size, error)
    if not found.clear:
        more = f"; about {_rounded(found.needed)} would be needed" if found.needed else ""
        return f"{tests_of(run)} are too few to tell {first} from {second} (difference {shown}{more})."
    if found.value < 0:
        first, second = second, first
    subject = first[:1].upper() + first[1:]
    ahead = f"is {shown} ahead of {second}" if shares else f"has an error {shown} lower than {second}"
    return f"{subject} {ahead}."


def _rounded(count: int | None) -> str:
    """A number of samples, of two digits that are not zero."""
    digits = max(len(str(count or 0)) - 2, 0)
    return number(math.ceil((count or 0) / 10**digits) * 10**digits)


def _score(row: Comparison, shares: bool) -> float | None:
    """Accuracy or root mean squared error."""
    return row.accuracy if shares else row.rmse


@dataclass(frozen=True)
class KeyNumber:
    """One number at the top of the page."""

    value: str  # the number with its standard error and its unit, as text
    name: str  # what it is
    note: str = ""  # what to compare it with


def summary(run: Content) -> list[str]:
    """The sentences at the top of the page, the verdict first: those given, or written from the numbers."""
    if run.notes.headline:
        return list(run.notes.headline)
    first, *rest = verdict(run).sentences or ("",)
    return [sentence for sentence in (first, run.notes.quick, *rest, trust(run), _changes(run)) if sentence]


def trust(run: Content) -> str:
    """The sentence on the probabilities."""
    if not run.calibrated:
        return ""
    correct, confidence = run.calibrated[0].correct, np.asarray(run.calibrated[0].confidence)
    error, spread = calibration_and_error(confidence, correct)
    sure, right = float(confidence.mean()), float(correct.mean())
    _, uncertain = mean_and_error(confidence - correct)
    if abs(sure - right) > max(_CLEAR * uncertain, _MATTERS):
        kind = "high" if sure > right else "low"
        return (
            f"Its probabilities are too {kind}: {percent(sure)} on average, where {percent(right)} are right."
        )
    shown = measured_share(error, spread)
    chance, high = calibration_by_chance(confidence)
    if error > high and error > _MATTERS + chance:
        return f"Its probabilities are right on average but not one by one (calibration error {shown})."
    if error + _CLEAR * spread > _FINE:
        few = f"{number(len(confidence))} predictions are too few to tell"
        return f"{few} how well its probabilities are calibrated (calibration error {shown})."
    return f"Its probabilities are well calibrated (calibration error {shown})."


def key_numbers(run: Content) -> list[KeyNumber]:
    """The numbers at the top of the page."""
    found: list[KeyNumber] = []
    if run.scores:
        own = run.scores[0]
        found += _of_classes(run, own) if own.accuracy is not None else _of_values(run, own)
    task = run.fit.task
    if task is not None:
        found.insert(0, KeyNumber(percent(task.share, 0), f"of the labels on {task.top} directions"))
        found.insert(1, KeyNumber(number(task.levels[1]), "effective parameters"))
    if len(found) < 3 and run.train is not None and len(run.train.samples):
        found.append(KeyNumber(number(len(run.train.samples)), "training samples"))
    if len(found) < 3 and run.fit.timings:
        found.append(KeyNumber(duration(sum(run.fit.timings.values())), "in all"))
    return found[:3]


def least_certain(test: HeldOutSet | None) -> tuple[float, float, int] | None:
    """Mean loss of the tenth of the predictions that is least certain, and of the others."""
    loss = None if test is None else test.loss()
    if test is None or test.uncertainty is None or loss is None or len(loss) < FEW:
        return None
    return split_by_uncertainty(test.uncertainty, loss)


def _of_classes(run: Content, own: Comparison) -> list[KeyNumber]:
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
    for row in run.calibrated[:1]:
        error, spread = calibration_and_error(np.asarray(row.confidence), row.correct)
        chance = calibration_by_chance(np.asarray(row.confidence))[0]
        note = f"{percent(chance)} by chance if it were perfect"
        made.append(KeyNumber(measured_share(error, spread), "calibration error", note))
    return made


def _of_values(run: Content, own: Comparison) -> list[KeyNumber]:
    """Error of a regression, the variance that it explains, and the coverage of its intervals."""
    if own.rmse is None:
        return []
    made = [KeyNumber(short_score(run, own), "root mean squared error", "in the unit of the target")]
    squares, test = own.losses, run.test
    if squares is None or test is None or test.mean is None:
        return made
    answers = np.asarray(test.samples.labels, dtype=float).reshape(len(test.mean), -1)
    spread = ((answers - answers.mean(0)) ** 2).mean(1)
    if whole := float(spread.mean()):
        # the ratio of two means of the same samples: error of its linear part (Cochran 1977, section 6.4)
        left = float(np.mean(squares)) / whole
        _, error = mean_and_error(squares - left * spread)
        shown = measured_share(1 - left, error / whole)
        made.append(KeyNumber(shown, "of the variance explained", "100 % is perfect"))
    if test.std is not None:
        share = float(
            interval_coverage(test.mean, test.std, answers.reshape(np.shape(test.mean)), np.array([0.9]))[0]
        )
        shown = measured_share(share, share_error(share, int(np.size(test.mean))))
        made.append(KeyNumber(shown, "of the true values in their 90 % intervals", "90 % is perfect"))
    return made


def _changes(run: Content) -> str:
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


def loo_name(choice: RidgeChoice | None) -> str:
    """The name of the leave-one-out score of a path of ridges."""
    if choice is None or choice.loss != "cross-entropy":
        return "Leave-one-out error"
    return "Held-out log loss" if choice.crossed and choice.criterion == "loo" else "Leave-one-out log loss"


def ridge_heading(choice: RidgeChoice | None) -> str:
    """The heading above the scores of a range of ridges."""
    is_given = choice is not None and choice.criterion == "given"
    return "The ridge beside others" if is_given else "How the ridge was chosen"


def ridge_choice(choice: RidgeChoice | None) -> str:
    """The criterion that chose the ridge, and the scores beside it."""
    softmax = choice is not None and choice.loss == "cross-entropy"
    loo = "Leave-one-out predicts each training sample from all the others, in closed form"
    loo += ", approximately, by one Newton step each" if softmax else " and without training again"
    held = (
        "The head was fitted in folds: the held-out error predicts each sample by a head and a fit that have "
        "not seen its fold"
    )
    if choice is None:
        return f"{loo}."
    if choice.crossed and softmax:
        loo = held
    beside = f"{loo}; its score is shown for comparison and was not used for the choice."
    score = "log loss" if softmax else "error"
    if choice.criterion == "loo":
        if not choice.crossed:
            return f"It was chosen by leave-one-out: it has the smallest {score}. {loo}."
        drawn = "" if softmax else (
            " The leave-one-out curve shown is for a fixed head and was not used for the choice."
        )  # fmt: skip
        return f"It was chosen because it has the smallest held-out {score}. {held}.{drawn}"
    return f"{_CRITERIA[choice.criterion]} {beside}"


_CRITERIA = {
    "given": "It was set by the user.",
    "gcv": "It was chosen by generalized cross-validation, from the residuals and the degrees of freedom.",
    "evidence": "It was chosen by the evidence (marginal likelihood) of the training labels.",
    "validation": "It was chosen by the loss on validation data.",
    "folds": "It was chosen by the error on folds, each predicted by a network trained without it.",
}


def doubt_found(train: TrainingSet) -> str:
    """Counts of labels that look wrong, expected by chance, and found among the wrong ones."""
    count, every = len(train.suspects), len(train.samples)
    of_all = f" of {every}" if every else ""
    text = f"{count}{of_all} training label{'s' if every or count != 1 else ''} "
    text += f"look{'' if count != 1 else 's'} wrong"
    if train.by_chance is not None:
        text += f" (by chance alone {train.by_chance:.0f} would)"
    limits = f"; {train.limits}" if train.limits else ""
    found = [suspect.flipped for suspect in train.suspects if suspect.flipped is not None]
    if not found:
        return text + limits
    known = f"{sum(found)} of the {train.flipped}" if train.flipped is not None else f"{sum(found)}"
    return f"{text}, among them {known} that are known to be wrong{limits}"
