"""Number formats of the report, and the sentences of its sections."""

from __future__ import annotations

import math

from linnet.plots.style import SUPERSCRIPTS
from linnet.report.records import RidgeChoice, TrainingSet

_SPACE = "\u202f"  # narrow, and never a line break


def number(value: object, digits: int = 3, trim: bool = False) -> str:
    """A number with a few significant digits; texts pass unchanged."""
    if value is None:
        return "–"
    if isinstance(value, str | bool):
        return str(value)
    figure = float(value)  # type: ignore[arg-type]
    if not math.isfinite(figure):
        return "–"
    if figure == int(figure) and abs(figure) < 1e6:
        return f"{int(figure):,}".replace("-", "−")
    exponent = math.floor(math.log10(abs(figure)))
    plain = -3 <= exponent < 6
    mantissa = figure if plain else figure / 10.0**exponent
    text = f"{mantissa:,.{max(0, digits - 1 - (exponent if plain else 0))}f}"
    if trim and "." in text:
        text = text.rstrip("0").rstrip(".")
    text = text.replace("-", "−")
    return text if plain else f"{text}×10{str(exponent).translate(SUPERSCRIPTS)}"


def measured(value: float, error: float | None, signs: bool = False, most: int = 6) -> str:
    """A number with its standard error, as many digits as the error allows."""
    sign = "+" if signs and value > 0 else ""
    if not error or not math.isfinite(error):
        return sign + number(value)
    places = min(1 - math.floor(math.log10(error)), most)  # two digits of the error
    if not -3 <= places <= 6:
        return f"{sign}{number(value)}\u00a0±\u00a0{number(error, 2)}"
    shown, spread = (f"{round(part, places):,.{max(places, 0)}f}" for part in (value, error))
    return f"{sign}{shown}\u00a0±\u00a0{spread}".replace("-", "−")


def measured_share(share: float, error: float | None, unit: str = "%", signs: bool = False) -> str:
    """A share with its standard error, as a percentage."""
    known = None if error is None else 100 * error
    return f"{measured(100 * share, known, signs, 1)}\u00a0{unit}"


def percent(share: float | None, decimals: int = 1) -> str:
    """A share as a percentage."""
    if share is None or not math.isfinite(share):
        return "–"
    text, least = f"{100 * share:.{decimals}f}", 10.0**-decimals
    if 0 < share < 1 and float(text) in (0.0, 100.0):  # nearly none and nearly all are neither
        text = f"<{least:.{decimals}f}" if share < 0.5 else f">{100 - least:.{decimals}f}"
    return f"{text}{_SPACE}%"


def duration(seconds: float | None) -> str:
    """A time span for people."""
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
    """A number with its sign."""
    return ("+" if value > 0 else "") + number(value)


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
        text += f" ({train.by_chance:.0f} expected by chance)"
    limits = f"; {train.limits}" if train.limits else ""
    found = [suspect.flipped for suspect in train.suspects if suspect.flipped is not None]
    if not found:
        return text + limits
    known = f"{sum(found)} of the {train.flipped}" if train.flipped is not None else f"{sum(found)}"
    return f"{text}, among them {known} that are known to be wrong{limits}"
