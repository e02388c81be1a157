"""Results as plain values, and as a few lines of text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from linnet.app.runs.adaptation import Adaptation
from linnet.app.runs.naming import lines_of
from linnet.app.runs.pages import adaptation_page, write
from linnet.app.terminal import kept
from linnet.report.numbers import duration, number, percent, share_error
from linnet.report.reading import solver_reason
from linnet.report.records import Comparison
from linnet.report.verdict import verdict


def keep_adaptation(found: Adaptation, out: Path, title: str, replay: bool = False) -> dict[str, Any]:
    """Write the report of an adaptation whose fit is kept already."""
    page = adaptation_page(found, title, out, replay)
    task, fit = found.task, found.run.fit
    result = {
        "command": "adapt",
        "title": title,
        "train": len(task.train),
        "test": len(task.test),
        "verdict": {"answer": verdict(page).answer, "sentences": list(page.notes.headline)},
        "scores": [asdict(row) for row in found.scores.comparison],
        "fit": fit.summary(),
        "below": fit.module.below,
        "device": str(fit.module.function.device),
        "next": [asdict(step) for step in page.notes.first],
        "data": {"classes": task.classes, "findings": list(task.findings)},
        "preflight": {"parameters": found.preflight.total, "findings": list(found.preflight.findings)},
        "seconds": dict(found.stages.seconds),
        "out": str(out),
    }
    write(out, result, page)
    return result


NEXT = "next: --tune trains the network as well, and keeps the result only if cross-validation improves"


def print_adaptation(result: dict[str, Any]) -> list[str]:
    """An adaptation for people."""
    fit = result["fit"]
    classes = result["data"]["classes"]
    task = f"{len(classes)} classes" if classes else f"{fit['outputs']} value(s)"
    lines = [
        f"{result['title']}: {result['train']} training and {result['test']} test samples, {task}; "
        f"{fit['parameters']:,} weights",
        *score_table([Comparison(**row) for row in result["scores"]], result["test"]),
        *result["verdict"]["sentences"],
        *rung_table(fit.get("rungs", [])),
        *(f"next: {step['command']}" for step in result["next"]),
        *([NEXT] if not result["next"] and fit.get("trained") is False and not fit["rungs"] else []),
        f"weight of the {result['below']} {fit['body_weight']:g}: {fit['reasons']['body']}",
        f"ridge {number(fit['ridge'])}: {fit['reasons'].get('ridge', '')}",
        f"solver {fit['solver']}: {solver_reason(fit['reasons'])}",
        "time: "
        + ", ".join(f"{step} {in_plain_spaces(duration, t)}" for step, t in result["seconds"].items()),
        *(f"note: {text}" for text in (*fit["warnings"], *result["data"]["findings"])),
        *written(Path(result["out"])),
    ]
    return [line.replace("\u202f", " ") for line in lines]


def rung_table(rungs: list[dict[str, Any]]) -> list[str]:
    """The models that were compared on held-out folds, as aligned text."""
    if not rungs:
        return []
    width = max(len(rung["name"]) for rung in rungs)
    lines = ["on held-out folds of the training samples, each gain over the line above:"]
    for rung in rungs:
        gain = f"{100 * rung['gain']:.0f} ± {100 * rung['gain_error']:.0f} % less error"
        if rung["points"] is not None:
            gain = f"{rung['points']:+.1f} ± {rung['points_error']:.1f} points, {gain}"
        score = f"error {number(rung['error'])}"
        if rung["accuracy"] is not None:
            score = f"{100 * rung['accuracy']:5.1f} % right"
        first = rung is rungs[0]
        took = f"  ({in_plain_spaces(duration, rung['seconds'])})" if rung["seconds"] else ""
        used = "  <- used" if rung["taken"] else ""
        lines.append(f"  {rung['name']:<{width}}  {score}  {'' if first else gain}{took}{used}".rstrip())
    return lines


def score_table(rows: list[Comparison], tested: int | None = None) -> list[str]:
    r"""Scores as aligned text."""

    def share(value: float | None) -> str:
        error = None if value is None else share_error(value, tested)
        return percent(value) if error is None else f"{100 * (value or 0):.1f} ± {100 * error:.1f} %"

    columns = [
        ("accuracy", "accuracy", share),
        ("nll", "log loss", number),
        ("ece", "calibration error", percent),
        ("rmse", "RMSE", number),
        ("seconds", "time", duration),
    ]
    shown = [c for c in columns if any(getattr(row, c[0]) is not None for row in rows)]
    width = max(len(row.name) for row in rows)
    wide = [max(len(heading), 8) for _, heading, _ in shown]
    head = " " * (width + 2) + "".join(f"  {c[1]:>{w}}" for c, w in zip(shown, wide, strict=True))
    body = [
        f"  {row.name:<{width}}"
        + "".join(
            f"  {in_plain_spaces(c[2], getattr(row, c[0])):>{w}}" for c, w in zip(shown, wide, strict=True)
        )
        for row in rows
    ]
    return [head, *body]


def in_plain_spaces(form: Any, value: float | None) -> str:
    """A value in its format."""
    return str(form(value)).replace("\u202f", " ")


def written(out: Path) -> list[str]:
    """Paths of the report and the result."""
    return [f"report: {kept(out / 'report.html')}   numbers: {kept(out / 'result.json')}"]


def print_prediction(result: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Predictions for people."""
    lines = [f"{result['samples']} samples predicted: {kept(result['predictions'])}"]
    lines += lines_of(rows, Path(result["predictions"]).name)
    if result["predicted"]:
        counts = ", ".join(f"{name} ({count})" for name, count in result["predicted"].items() if count)
        lines.append(f"  predicted classes: {counts}")
    if result["scores"]:
        lines += score_table([Comparison(**row) for row in result["scores"]], result["samples"])
    lines += [f"note: {text}" for text in result["findings"]]
    return [*lines, *written(Path(result["out"]))]


def print_change(result: dict[str, Any]) -> list[str]:
    """A change for people."""
    text, key = ("forgotten", "removed") if result["command"] == "forget" else ("added", "added")
    count = len(result[key])
    many = "training samples" if count != 1 else "training sample"
    lines = [
        f"{count} {many} {text} in {in_plain_spaces(duration, result['seconds'])}; {result['train']} now",
        *lines_of(result[key]),
    ]
    if result["scores"]:
        lines += score_table([Comparison(**row) for row in reversed(result["scores"])], result.get("test"))
    how = "a fit from scratch" if result["verified"] else "the equations solved from scratch"
    lines += [
        f"relative residual of the equations: {result['certificate']:.1e}",
        f"largest difference of outputs from {how}: {result['difference']:.1e} "
        f"({in_plain_spaces(duration, result['refit_seconds'])})",
    ]
    lines += [f"note: {text}" for text in (*result["fit"]["warnings"], *result["findings"])]
    return [*lines, *written(Path(result["out"]))]
