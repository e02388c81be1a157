"""Samples on a page: pictures as ``data:`` addresses, with what is said of each."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from linnet.plots.measures import Array, ranking, wilson_interval
from linnet.plots.panels import class_color
from linnet.report.numbers import measured_share, number, percent, share_error, signed
from linnet.report.records import (
    Content,
    DoubtedLabel,
    Explanation,
    HeldOutSet,
    Neighbor,
    NextStep,
    Samples,
)
from linnet.report.steps import next_steps

if TYPE_CHECKING:
    from PIL import Image

_SHOWN = 8  # tiles of a group; twice as many that were forgotten, four times as many doubted labels
_LONG = 40  # characters of an id that a tile has room for, on a few lines
_TILE, _LARGE = 192, 320  # most pixels of the pictures, twice what the page shows or about that
_TINY = 40  # pixels up to which a picture is no photograph but squares
# A photograph of more bytes as PNG is sent as JPEG instead: a page holds a hundred of them.
_LARGE_PNG = 9000
_QUALITY = 84


class Label(NamedTuple):
    """A class name with its color, or a plain value."""

    text: str
    color: str = ""  # empty for values


@dataclass(frozen=True)
class Tile:
    """One sample on the page and what is said of it."""

    full: str  # its id
    picture: str = ""  # ``data:`` address; empty when there is no picture
    alt: str = ""  # what the picture is
    tiny: bool = False  # whether it is so small that its pixels are shown as squares
    labels: tuple[tuple[str, Label], ...] = ()  # (word, label) pairs, such as ("given", ...)
    value: str = ""  # A number, as text
    bar: float | None = None  # an influence, in percent of the strongest
    mark: str = ""  # A remark, such as "known wrong"

    @property
    def name(self) -> str:
        """The id; of a long path the end, which tells samples apart, and of a long text the start."""
        if len(self.full) <= _LONG:
            return self.full
        is_path = "/" in self.full and " " not in self.full
        return "…" + self.full[1 - _LONG :] if is_path else self.full[: _LONG - 1] + "…"

    @property
    def sign(self) -> str:
        """``"up"`` or ``"down"``; empty without an influence."""
        return "" if self.bar is None else "up" if self.bar >= 0 else "down"


def label(run: Content, value: object) -> Label:
    """A class index or a regression target as a label."""
    if value is None:
        return Label("–")
    if run.classes is not None and np.ndim(value) == 0:  # type: ignore[arg-type]
        index = int(value)  # type: ignore[call-overload]
        return Label(run.classes[index], class_color(index))
    values = np.asarray(value, dtype=float).reshape(-1)
    shown = ", ".join(number(v) for v in values[:4])
    return Label(shown + (", …" if len(values) > 4 else ""))


def tiles(run: Content) -> dict[str, list[Tile]]:
    """Every group of tiles of the page, by name."""
    train, test = run.train, run.test
    most, least = _informative(run, _SHOWN)
    uncertain = () if test is None or test.uncertainty is None else ranking(test.uncertainty)[:_SHOWN]
    removed = () if train is None or train.forgetting is None else train.forgetting.removed[: 2 * _SHOWN]
    return {
        "most": most,
        "least": least,
        "uncertain": [_tested(run, int(index)) for index in uncertain],
        "suspects": [] if train is None else [_suspect(run, s) for s in train.suspects[: 4 * _SHOWN]],
        "forgotten": [_training(run, index) for index in removed],
    }


def explanations(run: Content) -> list[dict[str, Any]]:
    """Test samples and the training samples behind their predictions, the strongest with the longest bar."""
    return [] if run.test is None else [_explained(run, run.test, one) for one in run.test.explanations]


def step_tiles(run: Content) -> list[tuple[NextStep, list[Tile]]]:
    """What to do next, with the samples that each step is about."""
    doubted = {} if run.train is None else {suspect.sample: suspect for suspect in run.train.suspects}
    return [
        (
            step,
            [_suspect(run, doubted[i]) if i in doubted else _training(run, i) for i in step.training]
            + [_tested(run, i) for i in step.tested],
        )
        for step in next_steps(run)
    ]


def bars(run: Content) -> list[dict[str, Any]]:
    """The test accuracy of each method with its 95 % interval, in percent of the whole width."""
    tested, made = run.tested(), []
    for row in run.scores:
        if row.accuracy is None:
            continue
        low, high = wilson_interval(row.accuracy * tested, tested) if tested else (row.accuracy, row.accuracy)
        text = measured_share(row.accuracy, share_error(row.accuracy, tested))
        made.append(
            {
                "name": row.name, "text": text, "length": 100 * row.accuracy, "low": 100 * low,
                "high": 100 * high,
            }
        )  # fmt: skip
    return made


def _tile(run: Content, samples: Samples, index: int, kind: str, pixels: int = _TILE) -> Tile:
    """A sample as it looks on the page."""
    full = samples.name(index)
    alt = f"{kind} sample {full}"
    if samples.labels is not None:
        alt += f", labeled {label(run, samples.labels[index]).text}"
    if samples.images is None:
        return Tile(full, alt=alt)
    tiny = max(samples.images.shape[1:3]) <= _TINY
    return Tile(full, thumbnail(samples.images[index], pixels), alt, tiny)


def _informative(run: Content, count: int) -> tuple[list[Tile], list[Tile]]:
    """The most and the least informative training samples, without overlap."""
    if run.train is None or run.train.informativeness is None:
        return [], []
    values = run.train.informativeness
    order = [int(i) for i in ranking(values)]
    count = min(count, (len(order) + 1) // 2)
    last = order[len(order) - min(count, len(order) - count) :][::-1]
    most, least = (
        [replace(_training(run, i), value=number(float(values[i]))) for i in some]
        for some in (order[:count], last)
    )
    return most, least


def _training(run: Content, index: int) -> Tile:
    """A training sample with its label."""
    if run.train is None or not len(run.train.samples):
        return Tile(f"#{index}")
    samples = run.train.samples
    labels = () if samples.labels is None else (
        ("target" if run.classes is None else "", label(run, samples.labels[index])),
    )  # fmt: skip
    return replace(_tile(run, samples, index, "training"), labels=labels)


def _suspect(run: Content, suspect: DoubtedLabel) -> Tile:
    """A training sample with the label given and the one suggested."""
    assert run.train is not None
    labels = [("given", label(run, suspect.given))]
    if suspect.suggested is not None:
        labels.append(("rather", label(run, suspect.suggested)))
    mark = {True: "known wrong", False: "known right", None: ""}[suspect.flipped]
    value = "" if suspect.doubt is None else f"{percent(suspect.doubt, 0)} likely wrong"
    base = _tile(run, run.train.samples, suspect.sample, "training")
    return replace(base, labels=tuple(labels), value=value, mark=mark)


def _tested(run: Content, index: int, pixels: int = _TILE) -> Tile:
    """A test sample with its prediction, the true value, how sure that is, and whether they differ."""
    test = run.test
    assert test is not None
    labels: list[tuple[str, Label]] = []
    predicted, correct, value = test.predicted(), test.correct(), ""
    if predicted is not None:
        labels.append(("says", label(run, predicted[index])))
    elif test.mean is not None:
        spread = "" if test.std is None else f" ± {number(float(np.max(test.std[index])))}"
        labels.append(("says", Label(label(run, test.mean[index]).text + spread)))
    if test.samples.labels is not None:
        labels.append(("is", label(run, test.samples.labels[index])))
    if test.unit == "%" and test.probs is not None:
        value = f"{percent(float(np.max(test.probs[index])), 0)} sure"
    elif test.uncertainty is not None and test.std is None:
        value = f"uncertainty {number(float(test.uncertainty[index]))}"
    mark = "wrong" if correct is not None and not correct[index] else ""
    base = _tile(run, test.samples, index, "test", pixels)
    return replace(base, labels=tuple(labels), value=value, mark=mark)


def _explained(run: Content, test: HeldOutSet, one: Explanation) -> dict[str, Any]:
    """One explanation."""
    strongest = max((abs(n.influence) for n in (*one.up, *one.down)), default=0.0) or 1.0
    probs = None if test.probs is None else test.probs[one.sample]
    likeliest = [] if probs is None else [(int(i), float(probs[i])) for i in ranking(probs)[:3]]
    return {
        "tile": replace(_tested(run, one.sample, _LARGE), value=""),
        "output": Label("") if one.predicted is None else label(run, one.predicted),
        "guesses": [(label(run, i), percent(p, 0), 100 * p) for i, p in likeliest],
        "up": [_neighbor(run, n, strongest) for n in one.up],
        "down": [_neighbor(run, n, strongest) for n in one.down],
    }


def _neighbor(run: Content, neighbor: Neighbor, strongest: float) -> Tile:
    """A training sample with the signed bar of its influence."""
    bar = 100 * neighbor.influence / strongest
    return replace(_training(run, neighbor.sample), value=signed(neighbor.influence), bar=bar)


def thumbnail(image: Array, pixels: int = 128, png: int = _LARGE_PNG) -> str:
    """One picture as a ``data:`` address, of at most the given size."""
    # Large pictures are reduced with a Lanczos filter, others stay as they are: the page enlarges them. The
    # encoding is PNG, or JPEG where a PNG would be large (photographs).
    picture = _resized(_picture(np.asarray(image)), pixels)
    exact = _encode(picture, "PNG", optimize=True)
    if len(exact) <= png or picture.mode == "RGBA":
        return _address("png", exact)
    jpeg = _encode(picture, "JPEG", quality=_QUALITY, optimize=True)
    return _address("jpeg", jpeg) if len(jpeg) < len(exact) else _address("png", exact)


def _picture(image: Array) -> Image.Image:
    """The array as a Pillow image."""
    from PIL import Image

    if image.ndim == 3 and image.shape[-1] == 1:
        image = image[..., 0]
    if image.shape[-1] == 4 and image.ndim == 3 and (image[..., 3] == 255).all():
        image = image[..., :3]
    return Image.fromarray(np.ascontiguousarray(image))


def _resized(picture: Image.Image, pixels: int) -> Image.Image:
    """The picture reduced, or as it is."""
    from PIL import Image

    longest = max(picture.size)
    if longest <= pixels:
        return picture
    scale = pixels / longest
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.LANCZOS)


def _encode(picture: Image.Image, kind: str, **options: int) -> bytes:
    """The bytes of the picture's file."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def _address(kind: str, content: bytes) -> str:
    """The ``data:`` address of a file."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
