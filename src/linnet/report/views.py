"""Converts a :class:`Run` to the values that the page template displays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from linnet.plots.measures import Array, ranking, wilson_interval
from linnet.plots.style import class_color
from linnet.report.measures import share_error
from linnet.report.records import DoubtedLabel, Explanation, HeldOutSet, Neighbor, Samples, Step
from linnet.report.run import Run
from linnet.report.steps import next_steps
from linnet.report.thumbnails import thumbnail
from linnet.report.wording import measured_share, number, percent, signed

_LONG = 40  # characters of an id that a tile has room for, on a few lines
_TILE, _LARGE = 192, 320  # most pixels of the pictures, twice what the page shows or about that
_TINY = 40  # pixels up to which a picture is no photograph but squares


@dataclass(frozen=True)
class Label:
    """A class name with its color, or a plain value."""

    text: str  # what to show
    color: str = ""  # color of the class; empty for values


@dataclass(frozen=True)
class Face:
    """Image or text of a sample on the page."""

    name: str  # the id, shortened if it is long
    full: str  # whole id
    picture: str = ""  # ``data:`` address; empty when there is no picture
    alt: str = ""  # what the picture is
    tiny: bool = False  # whether it is so small that its pixels are shown as squares


@dataclass(frozen=True)
class Tile:
    """One sample on the page and what is said of it."""

    face: Face  # picture and name
    labels: tuple[tuple[str, Label], ...] = ()  # (word, label) pairs, such as ("given", ...)
    value: str = ""  # A number, as text
    bar: float | None = None  # length of the signed bar in [0, 100]; None for no bar
    sign: str = ""  # ``"up"``, ``"down"`` or empty
    mark: str = ""  # A remark, such as "known wrong"


@dataclass(frozen=True)
class Bar:
    """The accuracy of one method, as lengths in percent of the whole width."""

    name: str  # name of the method
    text: str  # the accuracy with its standard error
    length: float  # the accuracy
    low: float  # lower end of its 95 % interval
    high: float  # upper end of that interval


@dataclass(frozen=True)
class ExplanationView:
    """A test sample and the training samples behind its prediction."""

    tile: Tile  # the test sample
    output: Label  # the explained output; without text, the one value that is predicted
    # the most probable classes: (label, probability as text, percent of the bar)
    guesses: tuple[tuple[Label, str, float], ...]
    up: tuple[Tile, ...]  # training samples that raised the output
    down: tuple[Tile, ...]  # training samples that lowered it


@dataclass(frozen=True)
class Gallery:
    """All tiles of the page."""

    most: tuple[Tile, ...] = ()  # most informative training samples
    least: tuple[Tile, ...] = ()  # least informative ones
    uncertain: tuple[Tile, ...] = ()  # most uncertain test samples
    suspects: tuple[Tile, ...] = ()  # probable label errors
    forgotten: tuple[Tile, ...] = ()  # forgotten training samples
    explanations: tuple[ExplanationView, ...] = field(default=())  # explained test samples


def label(run: Run, value: object) -> Label:
    """A class index or a regression target as a label."""
    if value is None:
        return Label("–")
    if run.classes is not None and np.ndim(value) == 0:  # type: ignore[arg-type]
        index = int(value)  # type: ignore[call-overload]
        return Label(run.classes[index], class_color(index))
    values = np.asarray(value, dtype=float).reshape(-1)
    shown = ", ".join(number(v) for v in values[:4])
    return Label(shown + (", …" if len(values) > 4 else ""))


def face(run: Run, samples: Samples, index: int, kind: str, pixels: int = _TILE) -> Face:
    """A sample as it looks on the page."""
    full = samples.name(index)
    picture, tiny = "", False
    if samples.images is not None:
        picture = thumbnail(samples.images[index], pixels)
        tiny = max(samples.images.shape[1:3]) <= _TINY
    described = f"{kind} sample {full}"
    if samples.labels is not None:
        described += f", labeled {label(run, samples.labels[index]).text}"
    return Face(_short(full), full, picture, described, tiny)


def gallery(run: Run, count: int = 8) -> Gallery:
    """Every tile of the page."""
    most, least = _informative(run, count)
    train = run.train
    removed = () if train is None or train.forgetting is None else train.forgetting.removed
    return Gallery(
        most=most,
        least=least,
        uncertain=_uncertain(run, count),
        suspects=() if train is None else tuple(_suspect(run, s) for s in train.suspects[: 4 * count]),
        forgotten=tuple(_training_tile(run, index) for index in removed[: 2 * count]),
        explanations=()
        if run.test is None
        else tuple(_explain(run, run.test, e) for e in run.test.explanations),
    )


def bars(run: Run) -> list[Bar]:
    """The test accuracy of each method."""
    tested, made = run.tested(), []
    for row in run.scores.comparison:
        if row.accuracy is None:
            continue
        low, high = wilson_interval(row.accuracy * tested, tested) if tested else (row.accuracy, row.accuracy)
        text = measured_share(row.accuracy, share_error(row.accuracy, tested))
        made.append(Bar(row.name, text, 100 * row.accuracy, 100 * low, 100 * high))
    return made


def step_views(run: Run) -> list[tuple[Step, tuple[Tile, ...]]]:
    """What to do next, with the samples that each step is about."""
    doubted = {} if run.train is None else {suspect.sample: suspect for suspect in run.train.suspects}
    made = []
    for step in next_steps(run):
        tiles = [
            _suspect(run, doubted[index]) if index in doubted else _training_tile(run, index)
            for index in step.training
        ]
        if run.test is not None:
            tiles += [_tested(run, run.test, index) for index in step.tested]
        made.append((step, tuple(tiles)))
    return made


def uncertainty_name(run: Run) -> str:
    """What the uncertainty of the test samples is, with its unit."""
    unit = "" if run.test is None else run.test.unit
    if unit == "%":
        return "probability of being wrong, %"
    return f"uncertainty, {unit}" if unit else "uncertainty"


def _informative(run: Run, count: int) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """The most and the least informative training samples, without overlap."""
    train = run.train
    if train is None or train.informativeness is None:
        return (), ()
    order = [int(i) for i in ranking(train.informativeness)]
    count = min(count, (len(order) + 1) // 2)
    values = train.informativeness

    def shown(indices: Sequence[int]) -> tuple[Tile, ...]:
        return tuple(_training_tile(run, i, number(float(values[i]))) for i in indices)

    return shown(order[:count]), shown(order[len(order) - min(count, len(order) - count) :][::-1])


def _training_tile(run: Run, index: int, value: str = "") -> Tile:
    """A training sample with its label."""
    assert run.train is not None
    samples = run.train.samples
    base = face(run, samples, index, "training")
    word = "target" if run.classes is None else ""
    labels = () if samples.labels is None else ((word, label(run, samples.labels[index])),)
    return Tile(base, labels, value)


def _suspect(run: Run, suspect: DoubtedLabel) -> Tile:
    """A training sample with the label given and the one suggested."""
    assert run.train is not None
    base = face(run, run.train.samples, suspect.sample, "training")
    labels = [("given", label(run, suspect.given))]
    if suspect.suggested is not None:
        labels.append(("rather", label(run, suspect.suggested)))
    mark = {True: "known wrong", False: "known right", None: ""}[suspect.flipped]
    value = "" if suspect.doubt is None else f"{percent(suspect.doubt, 0)} likely wrong"
    return Tile(base, tuple(labels), value, mark=mark)


def _uncertain(run: Run, count: int) -> tuple[Tile, ...]:
    """The test samples that the fit is least sure of."""
    test = run.test
    if test is None or test.uncertainty is None:
        return ()
    return tuple(_tested(run, test, int(index)) for index in ranking(test.uncertainty)[:count])


def _tested(run: Run, test: HeldOutSet, index: int) -> Tile:
    """A test sample with its prediction and how sure that is."""
    labels, wrong = _prediction(run, test, index)
    value = ""
    if test.unit == "%" and test.probs is not None:
        value = f"{percent(float(np.max(test.probs[index])), 0)} sure"
    elif test.uncertainty is not None and test.std is None:
        value = f"uncertainty {number(float(test.uncertainty[index]))}"
    return Tile(face(run, test.samples, index, "test"), labels, value, mark=wrong)


def _prediction(run: Run, test: HeldOutSet, index: int) -> tuple[tuple[tuple[str, Label], ...], str]:
    """The prediction, the true value, and whether they differ."""
    labels: list[tuple[str, Label]] = []
    predicted = test.predicted()
    if predicted is not None:
        labels.append(("says", label(run, predicted[index])))
    elif test.mean is not None:
        shown = label(run, test.mean[index])
        spread = "" if test.std is None else f" ± {number(float(np.max(test.std[index])))}"
        labels.append(("says", Label(shown.text + spread)))
    if test.samples.labels is not None:
        labels.append(("is", label(run, test.samples.labels[index])))
    correct = test.correct()
    return tuple(labels), "wrong" if correct is not None and not correct[index] else ""


def _explain(run: Run, test: HeldOutSet, explanation: Explanation) -> ExplanationView:
    """One explanation, its bars scaled to its strongest training sample."""
    base = face(run, test.samples, explanation.sample, "test", _LARGE)
    labels, wrong = _prediction(run, test, explanation.sample)
    strongest = max((abs(n.influence) for n in (*explanation.up, *explanation.down)), default=0.0) or 1.0
    guesses = _guesses(run, None if test.probs is None else test.probs[explanation.sample])
    output = Label(explanation.output)
    if not explanation.output and explanation.predicted is not None:
        output = label(run, explanation.predicted)
    return ExplanationView(
        tile=Tile(base, labels, mark=wrong),
        output=output,
        guesses=guesses,
        up=tuple(_neighbor(run, n, strongest) for n in explanation.up),
        down=tuple(_neighbor(run, n, strongest) for n in explanation.down),
    )


def _neighbor(run: Run, neighbor: Neighbor, strongest: float) -> Tile:
    """A training sample with the signed bar of its influence."""
    if run.train is None or not len(run.train.samples):
        base = Tile(Face(f"#{neighbor.sample}", f"#{neighbor.sample}"))
    else:
        base = _training_tile(run, neighbor.sample)
    bar = 100 * abs(neighbor.influence) / strongest
    sign = "up" if neighbor.influence >= 0 else "down"
    return replace(base, value=signed(neighbor.influence), bar=bar, sign=sign)


def _guesses(run: Run, probs: Array | None) -> tuple[tuple[Label, str, float], ...]:
    """The three most probable classes."""
    if probs is None:
        return ()
    return tuple(
        (label(run, int(index)), percent(float(probs[index]), 0), 100 * float(probs[index]))
        for index in ranking(probs)[:3]
    )


def _short(full: str) -> str:
    """An id as it is; of a long path the end, which tells samples apart, and of a long text the start."""
    if len(full) <= _LONG:
        return full
    return "…" + full[1 - _LONG :] if "/" in full and " " not in full else full[: _LONG - 1] + "…"
