""":class:`Run`, the record of a whole report.

A :class:`Run` is filled by whoever did the work (the command line, a notebook) and handed to
:func:`linnet.report.write_report`. Only the title is required: every part that is missing is left
out of the page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from linnet.errors import InputError
from linnet.plots.measures import Array, calibration_error, ranking, reliability_bins
from linnet.report.records import (
    DoubtedLabel,
    Explanation,
    FitRecord,
    HeldOutSet,
    Neighbor,
    Notes,
    PreflightText,
    Reliability,
    Samples,
    Scores,
    Spectrum,
    TrainingSet,
    check_indices,
)


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that a report shows; only the title is required."""

    title: str  # title of the page
    classes: tuple[str, ...] | None = None  # class names, in the order of the indices; None for regression
    notes: Notes = field(default_factory=Notes)  # headline, warnings and facts
    scores: Scores = field(default_factory=Scores)  # how good the fit is, beside other methods
    fit: FitRecord = field(default_factory=FitRecord)  # how the fit was made
    train: TrainingSet | None = None  # training samples
    test: HeldOutSet | None = None  # test samples
    folder: str = ""  # the run's folder as commands take it; without it the page has no commands of its own

    def __post_init__(self) -> None:
        if self.test is not None and self.train is not None and len(self.train.samples):
            named = [n.sample for e in self.test.explanations for n in (*e.up, *e.down)]
            check_indices("Neighbor.sample", named, len(self.train.samples))
        if self.classes is None:
            return
        for part in (self.train, self.test):
            if part is not None and part.samples.labels is not None:
                _check_labels(part.samples.labels, len(self.classes))
        probs = None if self.test is None else self.test.probs
        if probs is not None and (probs.ndim != 2 or probs.shape[1] != len(self.classes)):
            raise InputError(
                f"HeldOutSet.probs has shape {tuple(probs.shape)}",
                expected=f"(N, {len(self.classes)}), one column per class name",
                remedy="pass the probabilities of the classes named in Run.classes",
            )

    def tested(self) -> int | None:
        """Number of test examples behind the scores, or None when it is not known."""
        if self.scores.tested is not None:
            return self.scores.tested
        if self.test is not None and len(self.test.samples):
            return len(self.test.samples)
        return len(self.scores.reliability[0].correct) if self.scores.reliability else None

    def to_dict(self) -> dict[str, Any]:
        """Every number of the report, ready for ``json.dump``; pictures are left out."""
        fit, train, test = self.fit, self.train, self.test
        raw: dict[str, Any] = {
            "title": self.title,
            "classes": self.classes,
            "headline": self.notes.headline,
            "warnings": self.notes.warnings,
            "facts": dict(self.notes.facts),
            "tested": self.tested(),
            "comparison": [vars(row) for row in self.scores.comparison],
            "reliability": [_reliability_dict(r) for r in self.scores.reliability],
            "ridge_path": None if fit.path is None else vars(fit.path),
            "ridge": None if fit.ridge is None else vars(fit.ridge),
            "spectrum": None if fit.spectrum is None else _spectrum_dict(fit.spectrum),
            "choices": [vars(choice) for choice in fit.choices],
            "preflight": None if fit.preflight is None else _preflight_dict(fit.preflight),
            "timings": [vars(timing) for timing in fit.timings],
            "task": None if fit.task is None else vars(fit.task),
            "train": None if train is None else _train_dict(train),
            "test": None if test is None else self._test_dict(test),
        }
        plain = _plain(raw)
        assert isinstance(plain, dict)
        return plain

    def _test_dict(self, test: HeldOutSet) -> dict[str, Any]:
        """The test part: predictions by id, the most uncertain first, explanations with ids."""
        name = test.samples.name
        trained = self.train.samples if self.train is not None else Samples()

        def neighbors(found: tuple[Neighbor, ...]) -> list[dict[str, Any]]:
            return [_named(n, trained) for n in found]

        order = [] if test.uncertainty is None else ranking(test.uncertainty).tolist()
        return {
            "ids": [name(i) for i in range(len(test.samples))],
            "labels": test.samples.labels,
            "predicted": test.predicted(),
            "mean": test.mean,
            "std": test.std,
            "uncertainty": test.uncertainty,
            "most_uncertain": [name(i) for i in order[:12]],
            "explanations": [
                {**_named(e, test.samples), "up": neighbors(e.up), "down": neighbors(e.down)}
                for e in test.explanations
            ],
        }


def _reliability_dict(part: Reliability) -> dict[str, Any]:
    """The bins that the diagram shows."""
    bins = reliability_bins(part.confidence, part.correct)
    shown = [vars(b) for b in bins]
    return {"method": part.method, "calibration_error": calibration_error(bins), "bins": shown}


def _spectrum_dict(part: Spectrum) -> dict[str, Any]:
    """The spectrum with its effective degrees of freedom."""
    return {**vars(part), "degrees_of_freedom": part.effective()}


def _preflight_dict(part: PreflightText) -> dict[str, Any]:
    """The preflight with its rows as dicts."""
    return {**vars(part), "parameters": [vars(p) for p in part.parameters]}


def _train_dict(part: TrainingSet) -> dict[str, Any]:
    """The training part with ids in place of pictures."""
    forgotten = part.forgetting
    return {
        "count": len(part.samples),
        "informativeness": part.informativeness,
        "suspects": [_named(s, part.samples) for s in part.suspects],
        "flipped": part.flipped,
        "by_chance": part.by_chance,
        "limits": part.limits,
        "forgetting": None if forgotten is None else {
            **vars(forgotten), "removed": [part.samples.name(i) for i in forgotten.removed]
        },
    }  # fmt: skip


def _named(part: Neighbor | Explanation | DoubtedLabel, samples: Samples) -> dict[str, Any]:
    """A record about one sample, by its id; the position serves calls in Python."""
    rest = {key: value for key, value in vars(part).items() if key != "sample"}
    return {"id": samples.name(part.sample), "position": part.sample, **rest}


def _plain(value: Any) -> Any:
    """The value in types that JSON knows; numbers that are not finite become None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def _check_labels(labels: Array, classes: int) -> None:
    """Raise unless the labels are indices of classes."""
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise InputError(
            f"Samples.labels has shape {tuple(labels.shape)} and type {labels.dtype}",
            expected="integer class indices of shape (N,), because Run.classes is given",
            remedy="pass class indices, or leave Run.classes out for regression",
        )
    check_indices("Samples.labels", labels.tolist(), classes)
