"""The report of a fit that was made in Python: no run folder, no files but the page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet.app.data import Part
from linnet.app.data.task import InMemory
from linnet.app.report import (
    FitRecord,
    Notes,
    RidgeChoice,
    Run,
    Scores,
    Timing,
    render,
)
from linnet.app.runs.evaluation import (
    Predictions,
    predict,
    reliability,
    ridge_path,
    score_classes,
    score_values,
    softmax_path,
    spectrum_of,
)
from linnet.app.runs.folder import Origin, SavedRun, TrainingSamples, temperatures_of
from linnet.app.runs.kinds import Fit, cross_fitted, loss_of, name_of
from linnet.app.runs.pages import choices, facts, held_out, spectrum_record, training_set
from linnet.errors import DataError, InputError
from linnet.files import write_text
from linnet.fitting.kernel_fit import KernelFit
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.nested.nested_fit import NestedFit
from linnet.params import instance
from linnet.tangent.coordinates import Coordinates
from linnet.tangent.gather import gather_data
from linnet.tangent.loaders import Said

Array = np.ndarray[Any, Any]
_SMALLEST = 4  # pixels a side of what is taken for a picture
_HEIGHT = 640  # pixels of the page inside a notebook


@dataclass(frozen=True, eq=False, repr=False)
class Page:
    """A report: in a notebook it shows itself, and ``save`` writes it.

    Args:
        run: What the page shows.
    """

    run: Run

    @cached_property
    def html(self) -> str:
        """The page as text: it loads nothing from elsewhere."""
        return render(self.run)

    def save(self, file: str | Path) -> Path:
        """Write the page.

        Args:
            file: The file, such as ``"page.html"``.

        Returns:
            The file.

        Raises:
            InputError: If ``file`` is a folder.
        """
        return write_text(file, self.html)

    def __repr__(self) -> str:
        return f"Page({self.run.title!r})"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that neither its style nor the notebook's reaches the other."""
        return (
            f'<iframe srcdoc="{escape(self.html, quote=True)}" sandbox="allow-scripts allow-downloads" '
            f'style="width:100%;height:{_HEIGHT}px;border:0"></iframe>'
        )


def fit_page(fit: Any, test: Any, classes: Sequence[str] | None, title: str) -> Page:
    """The report of a fit."""
    instance("fit", fit, (LinearFit, SoftmaxFit, KernelFit), "what linnet.fit or linnet.adapt returned")
    instance("title", title, str, "a text")
    run, start = _run(fit, _names(fit, classes)), time.perf_counter()
    part = None if test is None else _part(test, run)
    scores, shown, seconds = Scores(), None, {}
    if part is not None:
        found = predict(fit, run.inputs(part.x), None, run.temperatures)
        seconds["predictions"] = time.perf_counter() - start
        scores = _scores(name_of(fit), found, part.y, seconds["predictions"])
        shown = held_out(run, part, found, images=False)
        shown = replace(shown, samples=replace(shown.samples, images=pictures(part.x)))
    notes = Notes(warnings=tuple(fit.record.warnings), facts=facts(run))
    record = _record(run, part, {**fit.record.seconds, **seconds})
    return Page(Run(title, run.classes, notes, scores, record, training_set(run), shown))


def pictures(x: Any) -> Array | None:
    """Inputs as pictures, where they look like some."""
    if x.ndim != 4 or x.shape[1] not in (1, 3) or min(x.shape[2:]) < _SMALLEST or x.dtype.kind != "f":
        return None
    low, high = x.min((0, 2, 3), keepdims=True), x.max((0, 2, 3), keepdims=True)
    scaled = 255 * (x - low) / np.maximum(high - low, np.finfo(x.dtype).tiny)
    return np.asarray(np.moveaxis(scaled.round().astype(np.uint8), 1, -1))


def _run(fit: Fit, classes: tuple[str, ...] | None) -> SavedRun:
    """The fit as a run that is kept nowhere."""
    x, answers = fit.x, fit.targets if fit.labels is None else fit.labels
    ids = tuple(f"#{i}" for i in range(fit.n))
    images = pictures(x.detach().cpu().numpy()) if isinstance(x, Tensor) else None
    samples = TrainingSamples(images, answers.detach().cpu().numpy(), ids)
    model = fit.module.model
    network = model.network if isinstance(model, Coordinates) else model
    origin = Origin(type(network).__name__, {}, None, False)
    return SavedRun(origin, fit, samples, classes, (None, None), None, temperatures_of(fit))


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


def _part(test: Any, run: SavedRun) -> Part:
    """The test samples."""
    said = Said.known(run.fit.record.classes)
    said.columns = run.fit.record.columns
    x, y = gather_data(test, said=said)
    if not isinstance(x, Tensor):
        raise InputError(
            f"the inputs of test are {type(x).__name__}",
            expected="one tensor (N, ...)",
            remedy="leave test= out: the page then shows the training examples alone",
        )
    y = y.detach().cpu()
    if run.classes is None:
        answers = y.double().reshape(len(y), -1).numpy()
        fits = answers.shape[1] == run.fit.targets.shape[1]
    else:
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
    ids = tuple(f"#{i}" for i in range(len(y)))
    return Part(InMemory(x.detach().cpu().numpy()), np.arange(len(y)), answers, ids)


def _scores(name: str, found: Predictions, y: Array, seconds: float) -> Scores:
    """The row of the fit, and its calibration."""
    if found.probs is None:
        return Scores((score_values(name, found.mean, y, found.std, seconds, found.note),), (), len(y))
    row = score_classes(name, found.probs, y, seconds, found.note)
    return Scores((row,), (reliability(name, found.probs, y),), len(y))


def _record(run: SavedRun, part: Part | None, seconds: dict[str, float]) -> FitRecord:
    """The path, the spectrum and what was chosen."""
    fit, eigen, path = run.fit, spectrum_of(run.fit), None
    if isinstance(fit, SoftmaxFit):
        path = softmax_path(fit)
    elif eigen is not None:
        known = part is not None and run.classes is not None
        x, labels = (run.inputs(part.x), part.y) if part is not None and known else (None, None)
        path = ridge_path(fit, x, labels)
    # what became of the head, only the command line knows; a nested fit has its own
    made = tuple(one for one in choices(run) if one.what != "head" or isinstance(fit, NestedFit))
    return FitRecord(
        path,
        spectrum_record(fit, eigen),
        made,
        timings=tuple(Timing(name, value) for name, value in seconds.items()),
        ridge=RidgeChoice(fit.record.criterion, loss_of(fit), cross_fitted(fit)),
        verdict=fit.record.reasons.get("verdict", ""),
    )
