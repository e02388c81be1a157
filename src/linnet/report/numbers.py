"""Numbers of a page: their standard errors, and how they are written, with their units."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from linnet.plots.measures import Array, place_of, ranking, wilson_interval
from linnet.plots.panels import SUPERSCRIPTS

_SPACE = "\u202f"  # narrow, and never a line break
FEW = 20  # test samples below which shares of them are not judged
_BINS = 10  # of confidence
Z = NormalDist().inv_cdf(0.975)  # standard errors of a 95 % interval to each side, 1.96


def mean_and_error(values: Array) -> tuple[float, float]:
    """A mean with its standard error."""
    values = np.asarray(values, dtype=float)
    if not values.size:
        return 0.0, 0.0
    return float(values.mean()), float(values.std() / math.sqrt(values.size))


def share_error(share: float, count: int | None) -> float | None:
    """The standard error of a share, which is not zero where all or none of a few were right."""
    if not count:
        return None
    low, high = wilson_interval(share * count, count)
    return (high - low) / (2 * Z)


def calibration_and_error(confidence: Array, correct: Array) -> tuple[float, float]:
    """The expected calibration error with its standard error."""
    # With the bins and the sign of each gap held fixed it is a mean over the predictions, Σ s(bin) (correct −
    # confidence) / N, whose standard error is that of a mean.
    confidence, correct = np.asarray(confidence, dtype=float), np.asarray(correct, dtype=float)
    place = place_of(confidence, _BINS)
    gap = np.bincount(place, correct - confidence, minlength=_BINS)  # (correct - confidence) summed in a bin
    return mean_and_error(np.copysign(1.0, gap)[place] * (correct - confidence))


def calibration_by_chance(confidence: Array) -> tuple[float, float]:
    """Mean and 95 % quantile of the calibration error where predictions are right as often as they say."""
    confidence = np.asarray(confidence, dtype=float)
    place, generator = place_of(confidence, _BINS), np.random.default_rng(0)
    found = []
    for _ in range(200):
        off: Array = (generator.random(len(confidence)) < confidence) - confidence
        found.append(np.abs(np.bincount(place, off, minlength=_BINS)).sum() / len(confidence))
    return float(np.mean(found)), float(np.quantile(found, 0.95))


def split_by_uncertainty(uncertainty: Array, loss: Array) -> tuple[float, float, int]:
    """The mean loss of the most uncertain tenth of the predictions, and of the others."""
    order = ranking(uncertainty)
    count = min(max(1, round(0.1 * len(order))), len(order))
    values = np.asarray(loss, dtype=float)
    rest = values[order[count:]]
    return float(values[order[:count]].mean()), float(rest.mean()) if rest.size else 0.0, count


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


FINEST = 6  # decimals, beyond which a power of ten stands


def measured(value: float, error: float | None, signs: bool = False, most: int = FINEST) -> str:
    """A number with its standard error, as many digits as the error allows."""
    sign = "+" if signs and value > 0 else ""
    if not error or not math.isfinite(error):
        return sign + number(value)
    wanted = 1 - math.floor(math.log10(error))  # two digits of the error
    places = min(wanted, most)
    if places < -3 or (wanted > most == FINEST):
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
