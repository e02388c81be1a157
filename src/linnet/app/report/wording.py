"""Number formats of the report, and the summary at its top."""

from __future__ import annotations

import math

from linnet.app.report.measures import (
    calibration_error,
    reliability_bins,
    split_by_uncertainty,
    wilson_interval,
)
from linnet.app.report.records import RidgeChoice, TrainingSet
from linnet.app.report.run import Run
from linnet.plots.style import SUPERSCRIPTS

_SPACE = "\u202f"  # narrow, and never a line break


def number(value: object, digits: int = 3, trim: bool = False) -> str:
    """A number with a few significant digits; texts pass unchanged.

    Args:
        value: A number, a text or None.
        digits: Significant digits.
        trim: Whether to leave out zeros at the end.

    Returns:
        Text; a dash for None and for what is not finite.

    Example:
        >>> number(0.012345), number(15234.0), number(None), number("full")
        ('0.0123', '15234', '–', 'full')
        >>> number(2.1e-14, 2), number(0.1, trim=True)
        ('2.1×10⁻¹⁴', '0.1')
    """
    if value is None:
        return "–"
    if isinstance(value, str | bool):
        return str(value)
    figure = float(value)  # type: ignore[arg-type]
    if not math.isfinite(figure):
        return "–"
    if figure == int(figure) and abs(figure) < 1e6:
        return str(int(figure)).replace("-", "−")
    exponent = math.floor(math.log10(abs(figure)))
    plain = -3 <= exponent < 6
    mantissa = figure if plain else figure / 10.0**exponent
    text = f"{mantissa:.{max(0, digits - 1 - (exponent if plain else 0))}f}"
    if trim and "." in text:
        text = text.rstrip("0").rstrip(".")
    text = text.replace("-", "−")
    return text if plain else f"{text}×10{str(exponent).translate(SUPERSCRIPTS)}"


def percent(share: float | None, decimals: int = 1) -> str:
    """A share as a percentage.

    Args:
        share: A share, usually in [0, 1].
        decimals: Digits after the point.

    Returns:
        Text with a narrow space before the sign; a dash for None.

    Example:
        >>> percent(0.9123).replace("\u202f", " ")
        '91.2 %'
    """
    if share is None or not math.isfinite(share):
        return "–"
    return f"{100 * share:.{decimals}f}{_SPACE}%"


def duration(seconds: float | None) -> str:
    """A time span for people.

    Args:
        seconds: Seconds.

    Returns:
        Text; a dash for None.

    Example:
        >>> [duration(s).replace("\u202f", " ") for s in (0.0042, 3.14, 125, 7300)]
        ['4 ms', '3.1 s', '2 min 5 s', '2 h 2 min']
    """
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f}{_SPACE}ms" if seconds >= 0.0005 else f"under 1{_SPACE}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}{_SPACE}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}{_SPACE}min {whole % 60}{_SPACE}s"
    minutes = round(seconds / 60)
    return f"{minutes // 60}{_SPACE}h {minutes % 60}{_SPACE}min"


def signed(value: float) -> str:
    """A number with its sign.

    Args:
        value: A number.

    Returns:
        Text such as ``+0.42``.

    Example:
        >>> signed(0.42), signed(-0.42)
        ('+0.420', '−0.420')
    """
    return ("+" if value > 0 else "") + number(value)


def summary(run: Run) -> list[str]:
    """The sentences at the top of the page: those given, else up to five from the numbers.

    Args:
        run: The run.

    Returns:
        Whole sentences, the most important first.

    Example:
        >>> from linnet.app.report.records import Comparison, Scores
        >>> summary(Run("x", scores=Scores((Comparison("linear fit", rmse=0.5),))))
        ['The root mean squared error on the test set is 0.500.']
    """
    if run.notes.headline:
        return list(run.notes.headline)
    sentences = [_result(run), _beside(run), _trust(run), _freedom(run), _labels(run)]
    return [sentence for sentence in sentences if sentence]


def _result(run: Run) -> str:
    """The sentence on the fit's score."""
    if not run.scores.comparison:
        return ""
    row, tested = run.scores.comparison[0], run.tested()
    if row.accuracy is None:
        return (
            "" if row.rmse is None else f"The root mean squared error on the test set is {number(row.rmse)}."
        )
    sentence = f"The {row.name} predicts the right class for {percent(row.accuracy)}"
    if not tested:
        return sentence + " of the test samples."
    low, high = wilson_interval(row.accuracy * tested, tested)
    return sentence + f" of {tested} test samples (95{_SPACE}% interval {100 * low:.1f} to {percent(high)})."


def _beside(run: Run) -> str:
    """The sentence on the comparison with the other methods."""
    if len(run.scores.comparison) < 2:
        return ""
    own, others = run.scores.comparison[0], run.scores.comparison[1:]
    if own.accuracy is not None:
        parts = [f"{row.name} {percent(row.accuracy)}" for row in others if row.accuracy is not None]
    elif own.rmse is not None:
        parts = [f"{row.name} {number(row.rmse)}" for row in others if row.rmse is not None]
    else:
        parts = []
    return f"For comparison: {_listed(parts)}." if parts else ""


def _trust(run: Run) -> str:
    """The sentence on the calibration of its probabilities."""
    parts = []
    if run.scores.reliability:
        part = run.scores.reliability[0]
        error = calibration_error(reliability_bins(part.confidence, part.correct))
        gap = float(part.confidence.mean()) - float(part.correct.mean())
        manner = "over-confident" if gap > 0 else "under-confident"
        verdict = "well calibrated" if error < 0.03 else manner if abs(gap) > 0.02 else "unevenly calibrated"
        parts.append(f"it is {verdict} (calibration error {percent(error)})")
    test = run.test
    correct = None if test is None else test.correct()
    if test is not None and test.uncertainty is not None and correct is not None and len(correct) >= 20:
        worst, rest, _ = split_by_uncertainty(test.uncertainty, ~correct)
        parts.append(
            f"the error rate is {percent(worst, 0)} among the 10{_SPACE}% least certain predictions "
            f"and {percent(rest)} among the others"
        )
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else ""


def _freedom(run: Run) -> str:
    """Effective number of parameters."""
    spectrum, path = run.fit.spectrum, run.fit.path
    ridge = path.chosen if path is not None else spectrum.ridge if spectrum is not None else None
    if ridge is None:
        return ""
    effective = None if spectrum is None else spectrum.effective()
    if effective is None or spectrum is None:
        return f"The ridge is {number(ridge, trim=True)}."
    count = len(spectrum.eigenvalues)
    known = number(ridge, trim=True)
    return f"Effective parameters: {number(effective)} of {count} (ridge {known})."


def _labels(run: Run) -> str:
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
    """The name of the leave-one-out score of a path of ridges.

    Args:
        choice: How the ridge was chosen, where that is known.

    Returns:
        A title.

    Example:
        >>> loo_name(RidgeChoice("loo", "cross-entropy"))
        'Leave-one-out log loss'
    """
    if choice is None or choice.loss != "cross-entropy":
        return "Leave-one-out error"
    return "Held-out log loss" if choice.crossed and choice.criterion == "loo" else "Leave-one-out log loss"


def ridge_heading(choice: RidgeChoice | None) -> str:
    """The heading above the scores of a range of ridges.

    Args:
        choice: How the ridge was chosen, where that is known.

    Returns:
        A heading.

    Example:
        >>> ridge_heading(RidgeChoice("given"))
        'The ridge beside others'
    """
    is_given = choice is not None and choice.criterion == "given"
    return "The ridge beside others" if is_given else "How the ridge was chosen"


def ridge_choice(choice: RidgeChoice | None) -> str:
    """The criterion that chose the ridge, and the scores beside it.

    Args:
        choice: How the ridge was chosen, where that is known.

    Returns:
        Whole sentences.

    Example:
        >>> ridge_choice(RidgeChoice("gcv")).split(",")[0]
        'It was chosen by generalized cross-validation'
    """
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
    """Counts of labels that look wrong, expected by chance, and found among the wrong ones.

    Args:
        train: The training samples.

    Returns:
        A clause without a full stop.

    Example:
        >>> from linnet.app.report.records import Samples, DoubtedLabel
        >>> two = (DoubtedLabel(3, 0, 1, flipped=True), DoubtedLabel(4, 1, 0, flipped=False))
        >>> doubt_found(TrainingSet(Samples(), suspects=two, flipped=1))
        '2 training labels look wrong, among them 1 of the 1 that are known to be wrong'
    """
    count, every = len(train.suspects), len(train.samples)
    of_all = f" of {every}" if every else ""
    text = f"{count}{of_all} training label{'s' if every or count != 1 else ''} "
    text += f"look{'' if count != 1 else 's'} wrong"
    if train.by_chance is not None:
        text += f" ({train.by_chance:.0f} expected by chance)"
    found = [suspect.flipped for suspect in train.suspects if suspect.flipped is not None]
    if not found:
        return text
    known = f"{sum(found)} of the {train.flipped}" if train.flipped is not None else f"{sum(found)}"
    return f"{text}, among them {known} that are known to be wrong"


def _listed(parts: list[str]) -> str:
    """Parts joined as in a sentence."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
