"""Builds the report page and the result file of a run."""

from __future__ import annotations

import platform
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet import __version__
from linnet.app.data import Part
from linnet.app.report import (
    Choice,
    Coverage,
    DoubtedLabel,
    Explanation,
    FitRecord,
    HeldOutSet,
    Neighbor,
    Notes,
    PreflightText,
    RidgeChoice,
    Run,
    Samples,
    Spectrum,
    Step,
    Timing,
    TrainingSet,
    write_report,
)
from linnet.app.report.judgment import summary
from linnet.app.report.steps import beside, next_steps
from linnet.app.report.wording import number
from linnet.app.runs.adaptation import Adaptation
from linnet.app.runs.evaluation import Predictions, ridge_path, softmax_path, spectrum_of
from linnet.app.runs.folder import SavedRun, TrainingSamples
from linnet.app.runs.kinds import (
    Fit,
    certificate_of,
    contradiction,
    cross_fitted,
    in_closed_form,
    loss_of,
)
from linnet.app.runs.lock import writing
from linnet.audit.label_errors import label_errors
from linnet.files import write_json
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.nested.nested_fit import NestedFit
from linnet.plots.measures import ranking
from linnet.tangent.preflight import Preflight

Array = np.ndarray[Any, Any]
TARGET = "standard deviation in the unit of the target"  # what a regression's uncertainty is
_NEIGHBORS = 5  # training samples shown on each side of an explanation
_EXPLAINED = 6  # test samples explained in a report


def write(folder: Path, result: dict[str, Any], page: Run) -> None:
    """Write ``report.html`` and ``result.json``: the result, and every number of the page."""
    with writing(folder, wait=True):  # both of one process
        write_report(folder / "report.html", page)
        write_json(folder / "result.json", {**result, "next": _named_steps(page), "report": page.to_dict()})


def _named_steps(page: Run) -> list[dict[str, Any]]:
    """What the page says to do next, with samples by their ids."""
    train = Samples() if page.train is None else page.train.samples
    test = Samples() if page.test is None else page.test.samples
    return [
        {
            "title": step.title, "text": step.text, "command": step.command,
            "training": [train.name(i) for i in step.training], "test": [test.name(i) for i in step.tested],
        }
        for step in next_steps(page)
    ]  # fmt: skip


def adaptation_page(found: Adaptation, title: str, out: Path, replay: bool = False) -> Run:
    """The report of an adaptation."""
    run, task = found.run, found.task
    with found.stages.measure("ridge path and spectrum"):
        eigen = spectrum_of(run.fit)
        path = None
        if isinstance(run.fit, SoftmaxFit):
            path = softmax_path(run.fit)
        elif eigen is not None:
            x = task.tensors("test")[0].to(run.fit.module.function.device)
            path = ridge_path(run.fit, x, task.test.y if task.classes else None)
    with found.stages.measure("influence and leave-one-out"):
        train = training_set(run)
        test = held_out(run, task.test, found.predictions, task.image_mode is not None)
    record = FitRecord(
        path, spectrum_record(run.fit, eigen), choices(run), _preflight(found.preflight),
        tuple(Timing(name, seconds) for name, seconds in _timings(found).items()),
        ridge=RidgeChoice(run.fit.record.criterion, loss_of(run.fit), cross_fitted(run.fit)),
        verdict=run.fit.record.reasons.get("verdict", ""),
    )  # fmt: skip
    folder = place_of(out)
    steps = further(folder, replay and found.whole and _is_untuned(run.fit), task.classes is not None)
    notes = Notes(
        warnings=(*run.fit.record.warnings, *task.findings), facts=facts(run), steps=steps, quick=found.quick,
        first=() if found.whole or not replay else _in_full(folder),
    )  # fmt: skip
    page = Run(title, run.classes, notes, found.scores, record, train, test, folder)
    return replace(page, notes=replace(notes, headline=tuple(summary(page))))


def _in_full(folder: str) -> tuple[Step, ...]:
    """The command that takes all samples for the lower layers too."""
    words = ["linnet", "adapt", "--config", f"{folder}/run.yaml", "--quick", "false"]
    line = shlex.join([*words, "--out", beside(folder, "full")])
    text = "A quick run gives a first answer. The full one fits all layers, to all training samples."
    return (Step("Run it in full", text, line),) if folder.isprintable() else ()


def place_of(folder: Path) -> str:
    """A run's folder as commands take it."""
    return str(folder if folder.name not in ("", "..") else folder.resolve())


def _is_untuned(fit: Fit) -> bool:
    """Whether training of the lower layers was not tried."""
    return isinstance(fit, NestedFit) and not fit.trained and not fit.rungs


def further(folder: str, tunable: bool, classes: bool) -> tuple[Step, ...]:
    """The commands that go on from a run, whatever its numbers are."""
    predict = shlex.join(["linnet", "predict", "--run", folder, "--data", "FOLDER"])
    text = "FOLDER: an image folder, .npz or .csv. Without labels, the page suggests which samples to label."
    steps = [Step("Predict new samples", text, predict)]
    if tunable:
        words = ["linnet", "adapt", "--config", f"{folder}/run.yaml", "--tune", "true"]
        line = shlex.join([*words, "--out", beside(folder, "tuned")])
        why = "Trains the network as well, and keeps the result only if cross-validation improves."
        steps.insert(0, Step("Try for more accuracy" if classes else "Try for less error", why, line))
    return tuple(steps) if folder.isprintable() else ()


def training_set(run: SavedRun) -> TrainingSet:
    """The training samples, how much each of them moved the fit, and whose labels it doubts."""
    samples = seen(run.samples)
    if not in_closed_form(run.fit):
        return TrainingSet(samples)
    informative = run.fit.informativeness().double().cpu().numpy()
    doubted, by_chance, limits = suspects(run.fit)
    return TrainingSet(samples, informative, doubted, by_chance=by_chance, limits=limits)


def doubts(fit: Fit) -> Array:
    """The degree to which the fit of all other samples contradicts each label, (N,)."""
    return np.asarray(contradiction(fit).cpu().numpy())


def suspects(fit: Fit) -> tuple[tuple[DoubtedLabel, ...], float | None, str]:
    """Training samples whose label looks wrong to the fit of all the others."""
    if fit.labels is None:
        return (), None, ""
    errors = label_errors(fit.loo(), fit.labels)
    given, suggested, wrong = fit.labels.cpu(), errors.suggested.cpu(), errors.wrong.cpu()
    order = errors.indices.tolist()
    found = tuple(DoubtedLabel(i, int(given[i]), int(suggested[i]), float(wrong[i])) for i in order)
    return found, errors.expected, errors.limits


def held_out(
    run: SavedRun, part: Part, found: Predictions, images: bool, chosen: list[int] | None = None
) -> HeldOutSet:
    """Test samples with their predictions, some of them explained."""
    samples = Samples(part.x if images else None, part.y, part.ids)
    if chosen is None:
        chosen = _telling(found, part.y, run.classes is not None)
    explained: tuple[Explanation, ...] = ()
    if chosen and in_closed_form(run.fit):
        explained = explanations(run, part.take(np.asarray(chosen)).x, chosen, found)
    if found.probs is not None:
        return HeldOutSet(samples, found.probs, None, None, found.uncertainty, explained, "%")
    return HeldOutSet(samples, None, found.mean, found.std, found.uncertainty, explained, TARGET)


def explanations(
    run: SavedRun, x: Array, places: list[int], found: Predictions, top: int = _NEIGHBORS
) -> tuple[Explanation, ...]:
    """The training samples that pushed some predictions up and down."""
    influence = run.fit.influence(run.inputs(x)).double().cpu().numpy()
    scale = run.transforms[1]
    made = []
    for row, place in enumerate(places):
        label = None if run.classes is None else int(found.predicted[place])
        # one output of two classes is the odds of the second
        one = label is not None and influence.shape[2] == 1
        unit = (1.0 if label else -1.0) if one else scale.std[0] if scale else 1.0
        pushed = influence[:, row, 0 if one else label or 0] * unit
        order = ranking(pushed)
        up = tuple(Neighbor(int(i), float(pushed[i])) for i in order[:top] if pushed[i] > 0)
        down = tuple(Neighbor(int(i), float(pushed[i])) for i in order[::-1][:top] if pushed[i] < 0)
        made.append(Explanation(place, label, up, down))
    return tuple(made)


def _telling(found: Predictions, answers: Array, classes: bool) -> list[int]:
    """The surest right predictions of two classes, the two surest wrong ones, and the two least sure."""
    unsure = found.uncertainty
    if unsure is None:
        return list(range(min(len(answers), _EXPLAINED)))
    order = ranking(unsure)
    if not classes:
        return sorted({int(i) for i in (*order[:3], *order[::-1][:3])})
    wrong = found.predicted != answers
    sure = order[::-1]
    right, mistaken = sure[~wrong[sure]], sure[wrong[sure]]
    others = right[found.predicted[right] != found.predicted[right[:1]]] if len(right) else right
    picked = [*right[:1], *others[:1], *mistaken[:2], *order[:2]]
    return list(dict.fromkeys(int(i) for i in picked))


def seen(samples: TrainingSamples) -> Samples:
    """Training samples for the page."""
    return Samples(samples.images, samples.answers, samples.ids)


def choices(run: SavedRun) -> tuple[Choice, ...]:
    """The choices and their reasons."""
    fit, reasons = run.fit, run.fit.record.reasons
    ridge = reasons.get("ridge", "")
    made = [
        Choice("head", _head(run), reasons.get("head", "")),
        Choice("solver", fit.solver, solver_reason(reasons)),
        # a change of the training samples keeps the ridge, and so what was said of the samples before
        Choice("ridge", number(fit.ridge), f"of the fit before: {ridge}" if "change" in reasons else ridge),
    ]
    if isinstance(fit, NestedFit):
        made[0] = Choice("head", f"new, {fit.system.c} outputs", "a linear probe, part of the fit")
        made.insert(
            1, Choice(f"weight of the {fit.module.below}", f"{fit.body_weight:g}", reasons.get("body", ""))
        )
        if fit.trained:
            made.insert(
                2, Choice(f"training of the {fit.module.below}", reasons["training"], reasons["retraining"])
            )
    if "metric" in reasons:
        metric = "one for all weights" if run.origin.metric is None else "K-FAC"
        made.insert(2, Choice("metric of the ridge", metric, reasons["metric"]))
    if "loss" in reasons or isinstance(fit, SoftmaxFit):
        made.insert(1, Choice("loss", loss_of(fit), reasons.get("loss", "set by the user")))
    if isinstance(fit, SoftmaxFit):
        made.append(Choice("optimum", f"{fit.system.steps} Newton steps", reasons.get("newton", "")))
        if "leave-one-out" in reasons:
            made.append(Choice("leave-one-out", "approximate", reasons["leave-one-out"]))
    else:
        trained = isinstance(fit, NestedFit) and fit.trained
        why = "error on held-out folds" if trained else "highest evidence at this ridge"
        made.append(Choice("noise variance", number(fit.noise), why))
    if run.temperatures is not None and not isinstance(fit, SoftmaxFit):
        made.append(
            Choice("softmax temperature", number(run.temperatures[0]), _moderation(fit, run.temperatures[2]))
        )
    if "change" in reasons:
        made.append(Choice("change", reasons["change"], "by linear algebra on the fit before"))
    return tuple(made)


def solver_reason(reasons: dict[str, str]) -> str:
    """Why a fit has its solver, and what that leaves out."""
    said = (reasons.get(name) for name in ("solver", "sketch", "outputs"))
    return "; ".join(sentence for sentence in said if sentence)


def _head(run: SavedRun) -> str:
    """The row on the head."""
    if run.origin.head is None:
        return "kept"
    init = run.origin.init or ("probe" if run.origin.centered else "")
    kind = {"probe": ", linear probe", "random": ", random", "zero": ", zero"}.get(init, "")
    crossed = ", cross-fitted" if cross_fitted(run.fit) else ""
    return f"new, {run.origin.head} outputs{kind}{crossed}"


def _moderation(fit: Fit, scale: float) -> str:
    """The words on how probabilities were calibrated."""
    counted = "" if scale == 1 else f"; variances count {scale:g}-fold"
    kind = "held-out" if cross_fitted(fit) else "leave-one-out"
    part = "" if in_closed_form(fit) else " of the small fit that chose the ridge"
    return f"likeliest {kind} predictions{part}{counted}"


def facts(run: SavedRun) -> tuple[tuple[str, str], ...]:
    """Versions and sizes for the foot of the page."""
    fit = run.fit
    return (
        ("linnet", __version__),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("device", str(fit.module.function.device)),
        ("network", Path(run.origin.spec).name),
        ("weights fitted", number(fit.module.space.dim)),
        ("solver", fit.solver),
        ("training samples", number(fit.n)),
        (certificate_of(fit), number(fit.system.certificate(), 2)),
    )


def spectrum_record(fit: Fit, eigen: Tensor | None) -> Spectrum | None:
    """The kernel's eigenvalues."""
    return None if eigen is None else Spectrum(eigen.cpu().numpy(), fit.ridge)


def _preflight(report: Preflight) -> PreflightText:
    """The preflight for the page."""
    return PreflightText(
        str(report),
        tuple(Coverage(p.name, p.shape, p.uses, p.treatment) for p in report.parameters),
        report.memory.items, report.memory.budget, report.findings,
    )  # fmt: skip


def _timings(found: Adaptation) -> dict[str, float]:
    """Seconds of each step, with the fit in its parts."""
    parts = found.run.fit.record.seconds
    seconds: dict[str, float] = {}
    for name, value in found.stages.seconds.items():
        if name == "fit":
            seconds |= {f"fit: {part}": s for part, s in parts.items()}
        else:
            seconds[name] = value
    return seconds
