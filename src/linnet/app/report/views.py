"""Converts a :class:`Run` to the values that the page template displays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from linnet.app.report.measures import share_error
from linnet.app.report.records import DoubtedLabel, Explanation, HeldOutSet, Neighbor, Samples, Step
from linnet.app.report.run import Run
from linnet.app.report.steps import next_steps
from linnet.app.report.thumbnails import thumbnail
from linnet.app.report.wording import measured_share, number, percent, signed
from linnet.plots.measures import Array, ranking, wilson_interval
from linnet.plots.style import class_color

_LONG = 40  # characters of an id that a tile has room for, on a few lines
_TILE, _LARGE = 192, 320  # most pixels of the pictures, twice what the page shows or about that
_TINY = 40  # pixels up to which a picture is no photograph but squares


@dataclass(frozen=True)
class Label:
    """A class name with its color, or a plain value.

    Args:
        text: What to show.
        color: Color of the class; empty for values.
    """

    text: str
    color: str = ""


@dataclass(frozen=True)
class Face:
    """Image or text of a sample on the page.

    Args:
        name: The id, shortened if it is long.
        full: Whole id.
        picture: ``data:`` address; empty when there is no picture.
        alt: What the picture is.
        tiny: Whether it is so small that its pixels are shown as squares.
    """

    name: str
    full: str
    picture: str = ""
    alt: str = ""
    tiny: bool = False


@dataclass(frozen=True)
class Tile:
    """One sample on the page and what is said of it.

    Args:
        face: Picture and name.
        labels: (word, label) pairs, such as ("given", ...).
        value: A number, as text.
        bar: Length of the signed bar in [0, 100]; None for no bar.
        sign: ``"up"``, ``"down"`` or empty.
        mark: A remark, such as "known wrong".
    """

    face: Face
    labels: tuple[tuple[str, Label], ...] = ()
    value: str = ""
    bar: float | None = None
    sign: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Bar:
    """The accuracy of one method, as lengths in percent of the whole width.

    Args:
        name: Name of the method.
        text: The accuracy with its standard error.
        length: The accuracy.
        low: Lower end of its 95 % interval.
        high: Upper end of that interval.
    """

    name: str
    text: str
    length: float
    low: float
    high: float


@dataclass(frozen=True)
class ExplanationView:
    """A test sample and the training samples behind its prediction.

    Args:
        tile: The test sample.
        output: The explained output; without text, the one value that is predicted.
        guesses: The most probable classes: (label, probability as text, percent of the bar).
        up: Training samples that raised the output.
        down: Training samples that lowered it.
    """

    tile: Tile
    output: Label
    guesses: tuple[tuple[Label, str, float], ...]
    up: tuple[Tile, ...]
    down: tuple[Tile, ...]


@dataclass(frozen=True)
class Gallery:
    """All tiles of the page.

    Args:
        most: Most informative training samples.
        least: Least informative ones.
        uncertain: Most uncertain test samples.
        suspects: Probable label errors.
        forgotten: Forgotten training samples.
        explanations: Explained test samples.
    """

    most: tuple[Tile, ...] = ()
    least: tuple[Tile, ...] = ()
    uncertain: tuple[Tile, ...] = ()
    suspects: tuple[Tile, ...] = ()
    forgotten: tuple[Tile, ...] = ()
    explanations: tuple[ExplanationView, ...] = field(default=())


def label(run: Run, value: object) -> Label:
    """A class index or a regression target as a label.

    Args:
        run: The run, for its class names.
        value: Class index, target, vector of targets, or None.

    Returns:
        The label.

    Example:
        >>> label(Run("x", classes=("cat", "dog")), 1).text, label(Run("x"), 0.25).text
        ('dog', '0.250')
    """
    if value is None:
        return Label("–")
    if run.classes is not None and np.ndim(value) == 0:  # type: ignore[arg-type]
        index = int(value)  # type: ignore[call-overload]
        return Label(run.classes[index], class_color(index))
    values = np.asarray(value, dtype=float).reshape(-1)
    shown = ", ".join(number(v) for v in values[:4])
    return Label(shown + (", …" if len(values) > 4 else ""))


def face(run: Run, samples: Samples, index: int, kind: str, pixels: int = _TILE) -> Face:
    """A sample as it looks on the page.

    Args:
        run: The run.
        samples: The set of the sample.
        index: Its position.
        kind: ``"training"`` or ``"test"``, for the description of the picture.
        pixels: Size of the picture.

    Returns:
        Picture and name.

    Example:
        >>> face(Run("x"), Samples(ids=("a/b.png",)), 0, "test").name
        'a/b.png'
    """
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
    """Every tile of the page.

    Args:
        run: The run.
        count: Samples at each end of a ranking.

    Returns:
        The tiles; empty where a part of the run is missing.

    Example:
        >>> gallery(Run("x")).most
        ()
    """
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
    """The test accuracy of each method.

    Args:
        run: The run.

    Returns:
        One bar for each method with an accuracy.

    Example:
        >>> bars(Run("x"))
        []
    """
    tested, made = run.tested(), []
    for row in run.scores.comparison:
        if row.accuracy is None:
            continue
        low, high = wilson_interval(row.accuracy * tested, tested) if tested else (row.accuracy, row.accuracy)
        text = measured_share(row.accuracy, share_error(row.accuracy, tested))
        made.append(Bar(row.name, text, 100 * row.accuracy, 100 * low, 100 * high))
    return made


def step_views(run: Run) -> list[tuple[Step, tuple[Tile, ...]]]:
    """What to do next, with the samples that each step is about.

    Args:
        run: The run.

    Returns:
        Steps and their tiles.

    Example:
        >>> step_views(Run("x"))
        []
    """
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
    """What the uncertainty of the test samples is, with its unit.

    Args:
        run: The run.

    Returns:
        A name for an axis.

    Example:
        >>> uncertainty_name(Run("x", test=HeldOutSet(Samples(), unit="%")))
        'probability of being wrong, %'
    """
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
