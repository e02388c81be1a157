"""The report of a fit that was made in Python: no run folder, no files but the page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet.distribution import require_application
from linnet.errors import DataError, InputError
from linnet.fitting.fitted import Fitted
from linnet.pages import Page
from linnet.params import instance
from linnet.report.html import render
from linnet.report.reading import (
    Fit,
    facts,
    fit_record,
    held_out,
    name_of,
    predict,
    scored,
    temperatures_of,
    training_set,
)
from linnet.report.records import Comparison, Content, Notes, Samples
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.coordinates import Coordinates
from linnet.tangent.data import Data

Array = np.ndarray[Any, Any]
_SMALLEST = 4  # pixels a side of what is taken for a picture


@dataclass(frozen=True, eq=False)
class _GivenFit:
    """A fit that is kept nowhere, with its samples as they were given."""

    fit: Fit
    samples: Samples
    classes: tuple[str, ...] | None
    temperatures: tuple[float, float, float] | None
    asked: Inputs  # the test samples
    scale = None

    @property
    def network(self) -> str:
        """Name of its class."""
        model = self.fit.module.model
        return type(model.network if isinstance(model, Coordinates) else model).__name__

    def inputs(self, x: Array) -> Inputs:
        """Test samples by their places."""
        return self.asked if len(x) == batch_size(self.asked) else take(self.asked, torch.from_numpy(x))


def page(
    fit: Any, test: Any = None, *, classes: Sequence[str] | None = None, title: str = "Linear fit"
) -> Page:
    """The report of a fit."""
    require_application("jinja2", "PIL", "matplotlib")
    instance("fit", fit, (Fitted,), "what linnet.fit or linnet.adapt returned")
    instance("title", title, str, "a text")
    run, start = _run(fit, _names(fit, classes)), time.perf_counter()
    y: Array | None = None
    scores: tuple[Comparison, ...] = ()
    shown, seconds = None, {}
    if test is not None:
        x, y = _tested(test, run)
        run = replace(run, asked=x)
        found = predict(fit, x, None, run.temperatures)
        seconds["predictions"] = time.perf_counter() - start
        scores = (scored(name_of(fit), found, y, seconds["predictions"], found.note),)
        shown = held_out(run, Samples(pictures(x), y), found, np.arange(len(y)))
    notes = Notes(warnings=tuple(fit.record.warnings), facts=facts(run))
    record = fit_record(run, None if y is None or run.classes is None else run.asked, y)
    record = replace(record, timings={**fit.record.seconds, **seconds})
    made = Content(title, run.classes, notes, scores, record, training_set(run), shown)
    return Page(title, render(made), made.to_dict())


def pictures(x: Inputs) -> Array | None:
    """Inputs as pictures, where they look like some."""
    if not isinstance(x, Tensor):
        return None
    pixels = x.detach().cpu().numpy()
    kind, shape = pixels.dtype, pixels.shape
    if len(shape) != 4 or shape[1] not in (1, 3) or min(shape[2:]) < _SMALLEST or kind.kind != "f":
        return None
    low, high = pixels.min((0, 2, 3), keepdims=True), pixels.max((0, 2, 3), keepdims=True)
    scaled = 255 * (pixels - low) / np.maximum(high - low, np.finfo(kind).tiny)
    return np.asarray(np.moveaxis(scaled.round().astype(np.uint8), 1, -1))


def _run(fit: Fit, classes: tuple[str, ...] | None) -> _GivenFit:
    """The fit as a run that is kept nowhere."""
    answers = (fit.targets if fit.labels is None else fit.labels).detach().cpu().numpy()
    return _GivenFit(fit, Samples(pictures(fit.x), answers), classes, temperatures_of(fit), fit.x)


def _names(fit: Fit, classes: Sequence[str] | None) -> tuple[str, ...] | None:
    """A name for each class; None for a regression."""
    count = fit.classes
    if classes is None and fit.class_names is not None:
        return fit.class_names
    if classes is None:
        return None if count is None else tuple(str(c) for c in range(count))
    given = tuple(classes) if isinstance(classes, Sequence) and not isinstance(classes, str) else None
    if count is None or given is None or len(given) != count or not all(isinstance(c, str) for c in given):
        raise InputError(
            f"classes={classes!r}",
            expected="no names, for a regression" if count is None else f"{count} texts, one for each class",
            remedy="leave classes= out",
        )
    return given


def _tested(test: Any, run: _GivenFit) -> tuple[Inputs, Array]:
    """The inputs of the test samples, as they were given, and their answers."""
    x, y = Data.of(test, classes=run.fit.record.classes, columns=run.fit.record.columns).pair
    y = y.detach().cpu()
    if run.classes is None:
        answers = y.double().reshape(len(y), -1).numpy()
        fits = answers.shape[1] == run.fit.targets.shape[1]
    else:
        if y.ndim == 2 and y.shape[1] == len(run.classes) > 1:
            y = y.argmax(1)  # the likeliest of soft labels, as those of the training are shown
        answers = y.reshape(-1).long().numpy()
        fits = len(answers) == len(y) and bool((y.reshape(-1) == torch.from_numpy(answers)).all())
        fits = fits and answers.min() >= 0 and answers.max() < len(run.classes)
    if not fits:
        raise DataError(
            f"y of test has shape {tuple(y.shape)} and values from {y.min().item()} to {y.max().item()}",
            expected="targets like those of the fit"
            if run.classes is None
            else f"classes from 0 to {len(run.classes) - 1}",
            remedy="pass test data of the same task",
        )
    return x, answers
