"""The page: one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import os
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from linnet.files import write_text
from linnet.memory import format_bytes
from linnet.report import figures, numbers
from linnet.report.numbers import FEW
from linnet.report.records import Content, KernelSpectrum
from linnet.report.tables import tables
from linnet.report.tiles import bars, explanations, step_tiles, tiles
from linnet.report.verdict import (
    doubt_found,
    key_numbers,
    least_certain,
    ridge_choice,
    ridge_heading,
    summary,
)

_MOST_CLASSES = 40  # a confusion matrix of more classes could not be read


def write_report(path: str | os.PathLike[str], run: Content) -> Path:
    """Write the report of a run as one HTML file that needs nothing else."""
    # Pictures, figures and styles are inside the file; it uses no network, follows the reader's light or dark
    # mode, and prints. One script sorts, filters and exports tables, enlarges pictures and copies commands;
    # the page's policy allows that script alone, by its hash, and everything is readable without it.
    page = render(run)
    return write_text(path, page)


def render(run: Content) -> str:
    """The report of a run as HTML text."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=numbers.number, percent=numbers.percent, duration=numbers.duration, size=format_bytes
    )
    style, script = _text("page.css"), _text("page.js")
    context = _context(run) | {
        "style": Markup(style), "script": Markup(script), "policy": _policy(style, script)
    }  # fmt: skip
    return environment.from_string(_text("template.html.j2")).render(context)


def _text(name: str) -> str:
    """A file of this package."""
    return files("linnet.report").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """What a browser may do with the page: its own style and script, pictures inside it, nothing else."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return "; ".join((
        "default-src 'none'", "img-src data:", f"script-src {digest(script)}",
        f"style-src-elem {digest(style)}",
        "style-src-attr 'unsafe-inline'",  # lengths of bars, colors of dots
        "base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'",
    ))  # fmt: skip


def _context(run: Content) -> dict[str, Any]:
    """Everything that the template reads."""
    train, drawn = run.train, _figures(run)
    known = {
        "tiles": tiles(run),
        "explanations": explanations(run),
        "steps": step_tiles(run),
        "figures": defaultdict(list, drawn),
        "doubt": doubt_found(train) if train else "",
    }
    return known | {
        "run": run,
        "fit": run.fit,
        "summary": [_unbroken(sentence) for sentence in summary(run)],
        "key_numbers": key_numbers(run),
        "bars": bars(run),
        "tables": tables(run),
        "sections": _sections(run, known),
        "split": least_certain(run.test),
        "forgetting": None if train is None else train.forgetting,
        "ridge_choice": ridge_choice(run.fit.ridge),
    }


def _unbroken(sentence: str) -> str:
    """The sentence without line breaks inside a number and its error, or before its unit."""
    return sentence.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")


def _figures(run: Content) -> dict[str, list[Any]]:
    """The figures that the run has data for, by name, as trusted markup."""
    from markupsafe import Markup

    drawn: dict[str, list[str]] = {}
    fit, train = run.fit, run.train
    if run.calibrated:
        drawn["reliability"] = [figures.reliability_diagram(row, i) for i, row in enumerate(run.calibrated)]
    if fit.path is not None and len(fit.path.ridges):
        drawn["ridge"] = figures.ridge_curves(fit.path, fit.ridge)
    if fit.spectrum is not None and len(fit.spectrum.eigenvalues):
        drawn["spectrum"] = [figures.kernel_spectrum(fit.spectrum)]
    if fit.task is not None:
        drawn["energy"] = [figures.label_energy(fit.task)]
        drawn["task"] = [
            figures.kernel_spectrum(KernelSpectrum(fit.task.eigenvalues, *fit.task.levels), "task")
        ]
    if train is not None and train.informativeness is not None and len(train.informativeness):
        labels = train.samples.labels if run.classes else None
        drawn["informativeness"] = [
            figures.informativeness_bars(train.informativeness, labels, run.classes or ())
        ]
    drawn |= _test_figures(run)
    return {name: [Markup(drawing) for drawing in several] for name, several in drawn.items()}


def _test_figures(run: Content) -> dict[str, list[str]]:
    """The figures of the test samples."""
    test = run.test
    if test is None:
        return {}
    drawn: dict[str, list[str]] = {}
    if test.uncertainty is not None and len(test.uncertainty):
        what = "probability of being wrong, %" if test.unit == "%" else f"uncertainty, {test.unit}"
        name = what if test.unit else "uncertainty"
        drawn["uncertainty"] = [figures.uncertainty_histogram(test.uncertainty, test.correct(), name)]
    labels, predicted = test.samples.labels, test.predicted()
    few = len(test.samples) < FEW or not run.classes or len(run.classes) > _MOST_CLASSES
    if labels is not None and predicted is not None and run.classes and not few:
        drawn["confusion"] = [figures.confusion_matrix(labels, predicted, run.classes)]
    if labels is not None and test.mean is not None and len(labels):
        targets = np.asarray(labels, dtype=float).reshape(np.shape(test.mean))
        drawn["predicted"] = [figures.predicted_against_true(test.mean, targets, test.std)]
        if test.std is not None:
            drawn["coverage"] = [figures.interval_calibration(test.mean, test.std, targets)]
    return drawn


def _sections(run: Content, known: dict[str, Any]) -> list[tuple[str, str]]:
    """The sections that have something to show: (id, heading)."""
    fit, tiles, drawn = run.fit, known["tiles"], set(known["figures"])
    pictures = run.train is not None and run.train.samples.images is not None
    predicted = run.test is not None and (run.test.probs is not None or run.test.mean is not None)
    every = [
        ("next", "What to do next", known["steps"]),
        ("linear", "Is this task linear", fit.task is not None),
        ("good", "How good is it", run.scores or {"predicted", "confusion"} & drawn),
        ("sure", "How sure is it", {"reliability", "uncertainty", "coverage"} & drawn or tiles["uncertain"]),
        ("ridge", ridge_heading(fit.ridge), "ridge" in drawn),
        ("kernel", "What the kernel looks like", "spectrum" in drawn),
        (
            "mattered",
            f"Which training {'images' if pictures else 'samples'} mattered",
            "informativeness" in drawn,
        ),
        ("why", "Why these predictions", known["explanations"]),
        ("doubtful", "Probable label errors", tiles["suspects"]),
        ("forgetting", "Forgetting", run.train is not None and run.train.forgetting is not None),
        ("choices", "What was chosen and why", fit.choices),
        ("coverage", "Network coverage", fit.preflight is not None),
        ("timings", "Timings", fit.timings),
        ("predictions", "Every prediction", run.test is not None and len(run.test.samples) and predicted),
    ]
    return [(anchor, heading) for anchor, heading, present in every if present]
