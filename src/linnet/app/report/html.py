"""The page: one self-contained HTML file."""

from __future__ import annotations

import os
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from linnet.app.report import figures, wording
from linnet.app.report.measures import split_by_uncertainty
from linnet.app.report.records import Spectrum
from linnet.app.report.run import Run
from linnet.app.report.task_kernel import label_energy
from linnet.app.report.views import Gallery, confusions, gallery, key_numbers, spectrum_facts
from linnet.files import write_text
from linnet.memory import format_bytes

_MOST_CLASSES = 40  # a confusion matrix of more classes could not be read


def write_report(path: str | os.PathLike[str], run: Run) -> Path:
    """Write the report of a run as one HTML file that needs nothing else.

    Pictures, figures and styles are inside the file; it uses no scripts and no network, follows the
    reader's light or dark mode, and prints.

    Args:
        path: The file to write; missing folders above it are made.
        run: What to show. Parts that are missing are left out.

    Returns:
        The path written.

    Raises:
        InputError: ``path`` is a folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = write_report(Path(folder) / "report.html", Run("Digits"))
        ...     "<h1>Digits</h1>" in page.read_text(encoding="utf-8")
        True
    """
    page = render(run)
    return write_text(path, page)


def render(run: Run) -> str:
    """The report of a run as HTML text.

    Args:
        run: What to show.

    Returns:
        A whole HTML document.

    Example:
        >>> render(Run("Digits"))[:15]
        '<!DOCTYPE html>'
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=wording.number, percent=wording.percent, duration=wording.duration, size=format_bytes
    )
    source = files("linnet.app.report").joinpath("template.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(_context(run))


def _context(run: Run) -> dict[str, Any]:
    """Everything that the template reads."""
    tiles = gallery(run)
    forgotten = None if run.train is None else run.train.forgetting
    drawn = _figures(run)
    return {
        "run": run,
        "fit": run.fit,
        "summary": wording.summary(run),
        "key_numbers": key_numbers(run),
        "figures": defaultdict(str, drawn),
        "sections": _sections(run, drawn, tiles),
        "tiles": tiles,
        "split": _split(run),
        "doubt": wording.doubt_found(run.train) if run.train else "",
        "more_suspects": len(run.train.suspects) - len(tiles.suspects) if run.train else 0,
        "forgetting": forgotten,
        "columns": _columns(run),
        "ridge_choice": wording.ridge_choice(run.fit.ridge),
        "loo_name": wording.loo_name(run.fit.ridge),
        "confusions": confusions(run),
        "spectrum_facts": spectrum_facts(run),
        "longest": max((timing.seconds for timing in run.fit.timings), default=0.0) or 1.0,
    }


def _figures(run: Run) -> dict[str, Any]:
    """The figures that the run has data for, by name, as trusted markup."""
    from markupsafe import Markup

    drawn: dict[str, str] = {}
    scores, fit, train, test = run.scores, run.fit, run.train, run.test
    if any(row.accuracy is not None for row in scores.comparison):
        drawn["accuracy"] = figures.accuracy_bars(scores.comparison, run.tested())
    known = [part for part in scores.reliability if len(part.confidence)]
    if known:
        drawn["reliability"] = figures.reliability_diagram(known)
    if fit.path is not None and len(fit.path.ridges):
        drawn["ridge"] = figures.ridge_curve(fit.path, fit.ridge)
    if fit.spectrum is not None and len(fit.spectrum.eigenvalues):
        drawn["spectrum"] = figures.kernel_spectrum(fit.spectrum)
    if fit.task is not None:
        drawn["energy"] = label_energy(fit.task)
        drawn["task"] = figures.kernel_spectrum(Spectrum(fit.task.eigenvalues, *fit.task.levels), "task")
    if train is not None and train.informativeness is not None and len(train.informativeness):
        labels = train.samples.labels if run.classes else None
        drawn["informativeness"] = figures.informativeness_bars(
            train.informativeness, labels, run.classes or ()
        )
    if test is None:
        return {name: Markup(drawing) for name, drawing in drawn.items()}
    if test.uncertainty is not None and len(test.uncertainty):
        drawn["uncertainty"] = figures.uncertainty_histogram(test.uncertainty, test.correct())
    labels, predicted = test.samples.labels, test.predicted()
    if labels is not None and predicted is not None and run.classes and len(run.classes) <= _MOST_CLASSES:
        drawn["confusion"] = figures.confusion_matrix(labels, predicted, run.classes)
    if labels is not None and test.mean is not None and len(labels):
        targets = np.asarray(labels, dtype=float).reshape(np.shape(test.mean))
        drawn["predicted"] = figures.predicted_against_true(test.mean, targets, test.std)
        if test.std is not None:
            drawn["coverage"] = figures.interval_calibration(test.mean, test.std, targets)
    return {name: Markup(drawing) for name, drawing in drawn.items()}


def _split(run: Run) -> tuple[float, float, int] | None:
    """Mean loss of the most uncertain predictions and of the others."""
    loss = None if run.test is None else run.test.loss()
    if run.test is None or run.test.uncertainty is None or loss is None or len(loss) < 20:
        return None
    return split_by_uncertainty(run.test.uncertainty, loss)


def _columns(run: Run) -> list[tuple[str, str, str]]:
    """The columns of the comparison that have a value: (field, heading, filter)."""
    every = [
        ("accuracy", "Accuracy", "percent"),
        ("nll", "Log loss", "number"),
        ("ece", "Calibration error", "percent"),
        ("rmse", "RMSE", "number"),
        ("seconds", "Time", "duration"),
        ("note", "Note", "text"),
    ]
    rows = run.scores.comparison
    return [column for column in every if any(getattr(row, column[0]) not in (None, "") for row in rows)]


def _sections(run: Run, drawn: dict[str, Any], tiles: Gallery) -> list[tuple[str, str]]:
    """The sections that have something to show: (id, heading)."""
    fit = run.fit
    pictures = run.train is not None and run.train.samples.images is not None
    sure = {"reliability", "uncertainty", "coverage"} & set(drawn) or tiles.uncertain
    every = [
        ("linear", "Is this task linear", fit.task is not None),
        ("good", "How good is it", run.scores.comparison or {"predicted", "confusion"} & set(drawn)),
        ("sure", "How sure is it", sure),
        ("ridge", wording.ridge_heading(fit.ridge), "ridge" in drawn),
        ("kernel", "What the kernel looks like", "spectrum" in drawn),
        (
            "mattered",
            f"Which training {'images' if pictures else 'samples'} mattered",
            "informativeness" in drawn,
        ),
        ("why", "Why these predictions", tiles.explanations),
        ("doubtful", "Probable label errors", tiles.suspects),
        ("forgetting", "Forgetting", run.train is not None and run.train.forgetting is not None),
        ("choices", "What was chosen and why", fit.choices),
        ("coverage", "Network coverage", fit.preflight is not None),
        ("timings", "Timings", fit.timings),
    ]
    return [(anchor, heading) for anchor, heading, present in every if present]
