"""What a page says of a fit, read from the fit: its choices, its training samples, its predictions."""

from __future__ import annotations

import platform
from typing import Protocol

import torch
from torch import Tensor

from linnet import __version__
from linnet.audit.mislabel import mislabeled
from linnet.nested.nested_fit import NestedFit
from linnet.plots.measures import Array, ranking
from linnet.report.evaluation import (
    Fit,
    Predictions,
    Scale,
    certificate_of,
    cross_fitted,
    in_closed_form,
    kernel_spectrum,
    ridge_scores,
)
from linnet.report.numbers import number
from linnet.report.records import (
    DoubtedLabel,
    Explanation,
    FitRecord,
    HeldOutSet,
    Neighbor,
    RidgeChoice,
    Samples,
    TrainingSet,
)

TARGET = "standard deviation in the unit of the target"  # what a regression's uncertainty is
_NEIGHBORS = 5  # training samples shown on each side of an explanation
_EXPLAINED = 6  # test samples explained in a report


class FittedTask(Protocol):
    """A fit, with its samples and classes as people know them."""

    @property
    def fit(self) -> Fit:
        """The fit."""

    @property
    def shown(self) -> Samples:
        """Its training samples."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes; None for a regression."""

    @property
    def temperatures(self) -> tuple[float, float, float] | None:
        """T with variances and without, and the factor on variances; None for a regression."""

    @property
    def scale(self) -> Scale | None:
        """The scale of regression targets."""

    @property
    def network(self) -> str:
        """Name of the network."""

    def inputs(self, x: Array) -> Tensor:
        """Samples as the network's inputs, on its device."""


def training_set(run: FittedTask) -> TrainingSet:
    """The training samples, how much each of them moved the fit, and whose labels it doubts."""
    samples = run.shown
    if not in_closed_form(run.fit):
        return TrainingSet(samples)
    informative = run.fit.informativeness().double().cpu().numpy()
    doubted, by_chance, limits = suspects(run.fit)
    return TrainingSet(samples, informative, doubted, by_chance=by_chance, limits=limits)


def suspects(fit: Fit) -> tuple[tuple[DoubtedLabel, ...], float | None, str]:
    """Training samples whose label looks wrong to the fit of all the others."""
    if fit.labels is None:
        return (), None, ""
    errors = mislabeled(fit.loo(), fit.labels)
    assert errors.suggested is not None
    assert errors.wrong is not None
    assert errors.indices is not None
    given, suggested, wrong = fit.labels.cpu(), errors.suggested.cpu(), errors.wrong.cpu()
    order = errors.indices.tolist()
    found = tuple(DoubtedLabel(i, int(given[i]), int(suggested[i]), float(wrong[i])) for i in order)
    return found, errors.expected, errors.limits


def held_out(
    run: FittedTask, samples: Samples, found: Predictions, x: Array, explain: bool = True
) -> HeldOutSet:
    """Test samples with their predictions, some of them explained."""
    explained: tuple[Explanation, ...] = ()
    if explain and in_closed_form(run.fit):
        chosen = _telling(found, samples.labels, run.classes is not None)
        explained = explanations(run, x[chosen], chosen, found)
    return predicted(samples, found, explained)


def predicted(samples: Samples, found: Predictions, explained: tuple[Explanation, ...] = ()) -> HeldOutSet:
    """Samples with their predictions."""
    if found.probs is not None:
        return HeldOutSet(samples, found.probs, None, None, found.uncertainty, explained, "%")
    return HeldOutSet(samples, None, found.mean, found.std, found.uncertainty, explained, TARGET)


def explanations(
    run: FittedTask, x: Array, places: list[int], found: Predictions, top: int = _NEIGHBORS
) -> tuple[Explanation, ...]:
    """The training samples that pushed some predictions up and down."""
    influence = run.fit.influence(run.inputs(x)).double().cpu().numpy()
    scale = run.scale
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


def _telling(found: Predictions, answers: Array | None, classes: bool) -> list[int]:
    """The surest right predictions of two classes, the two surest wrong ones, and the two least sure."""
    unsure = found.uncertainty
    if unsure is None:
        return list(range(min(len(found.mean), _EXPLAINED)))
    order = ranking(unsure)
    if not classes:
        return sorted({int(i) for i in (*order[:3], *order[::-1][:3])})
    wrong = found.predicted != answers
    sure = order[::-1]
    right, mistaken = sure[~wrong[sure]], sure[wrong[sure]]
    others = right[found.predicted[right] != found.predicted[right[:1]]] if len(right) else right
    picked = [*right[:1], *others[:1], *mistaken[:2], *order[:2]]
    return list(dict.fromkeys(int(i) for i in picked))


def choices(run: FittedTask) -> tuple[tuple[str, str, str], ...]:
    """What was chosen, the choice, and its reason."""
    fit, reasons = run.fit, run.fit.record.reasons
    ridge = reasons.get("ridge", "")
    made = [
        ("solver", fit.solver, solver_reason(reasons)),
        # a change of the training samples keeps the ridge, and so what was said of the samples before
        ("ridge", number(fit.ridge), f"of the fit before: {ridge}" if "change" in reasons else ridge),
    ]
    if isinstance(fit, NestedFit):
        below = fit.module.below
        parts = [
            ("head", f"new, {fit.system.c} outputs", "a linear probe, part of the fit"),
            (f"weight of the {below}", f"{fit.body_weight:g}", reasons.get("body", "")),
        ]
        if fit.trained:
            parts.append((f"training of the {below}", reasons["training"], reasons["retraining"]))
        made = [*parts, *made]
    if fit.loss == "cross-entropy":
        made.insert(0, ("loss", fit.loss, "set by the user"))
        made.append(("optimum", f"{fit.summary()['steps']} Newton steps", reasons.get("newton", "")))
        if "leave-one-out" in reasons:
            made.append(("leave-one-out", "approximate", reasons["leave-one-out"]))
    else:
        why = "error on held-out folds" if fit.trained else "highest evidence at this ridge"
        made.append(("noise variance", number(fit.noise), why))
    if run.temperatures is not None and fit.loss == "squared":
        made.append(
            ("softmax temperature", number(run.temperatures[0]), _moderation(fit, run.temperatures[2]))
        )
    if "change" in reasons:
        made.append(("change", reasons["change"], "by linear algebra on the fit before"))
    return tuple(made)


def solver_reason(reasons: dict[str, str]) -> str:
    """Why a fit has its solver, and what that leaves out."""
    said = (reasons.get(name) for name in ("solver", "sketch", "outputs"))
    return "; ".join(sentence for sentence in said if sentence)


def _moderation(fit: Fit, scale: float) -> str:
    """The words on how probabilities were calibrated."""
    counted = "" if scale == 1 else f"; variances count {scale:g}-fold"
    kind = "held-out" if cross_fitted(fit) else "leave-one-out"
    return f"likeliest {kind} predictions{counted}"


def facts(run: FittedTask) -> tuple[tuple[str, str], ...]:
    """Versions and sizes for the foot of the page."""
    fit = run.fit
    return (
        ("linnet", __version__),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("device", str(fit.module.function.device)),
        ("network", run.network),
        ("weights fitted", number(fit.module.space.dim)),
        ("solver", fit.solver),
        ("training samples", number(fit.n)),
        (certificate_of(fit), number(fit.system.certificate(), 2)),
    )


def fit_record(run: FittedTask, x: Tensor | None, labels: Array | None) -> FitRecord:
    """What a fit chose and why: the path of ridges, with test accuracies beside it, and the spectrum."""
    record = run.fit.record
    return FitRecord(
        ridge_scores(run.fit, x, labels if run.classes else None),
        kernel_spectrum(run.fit),
        choices(run),
        ridge=RidgeChoice(record.criterion, run.fit.loss, cross_fitted(run.fit)),
        verdict=record.reasons.get("verdict", ""),
    )
