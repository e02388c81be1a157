"""What a page says of a fit, read from the fit: its choices, its training samples, its predictions."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from linnet import __version__
from linnet.audit.mislabel import mislabeled
from linnet.errors import InputError, LinnetError, NumericalError
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.linalg.factorize import decomposing
from linnet.linear.iterative import Iterative
from linnet.linear.newton import WeightNewton
from linnet.linear.normal_system import NormalSystem
from linnet.linear.system import System
from linnet.memory import parse_bytes
from linnet.nested.nested_fit import NestedFit
from linnet.plots.measures import Array, calibration_error, ranking, reliability_bins
from linnet.predictive.noise import probabilities
from linnet.progress import track, waiting
from linnet.report.numbers import number, percent
from linnet.report.records import (
    Comparison,
    DoubtedLabel,
    Explanation,
    FitRecord,
    HeldOutSet,
    KernelSpectrum,
    Neighbor,
    RidgeChoice,
    RidgeScores,
    Samples,
    TrainingSet,
)
from linnet.tangent.batch import Inputs, batch_size, split

Fit: TypeAlias = LinearFit | SoftmaxFit | NestedFit
PROBE = "linear probe"
_HELD, _COVERAGE = 300, 0.9  # test samples for which sets or intervals are made, and what these are to hold
_MOST = 10**9  # bytes of kernel between new and training samples held at once


def in_closed_form(fit: Fit) -> bool:
    """Whether leave-one-out, influence and variances take no iterations, of which each sample needs many."""
    return not isinstance(fit.system, Iterative | WeightNewton)


def name_of(fit: Fit) -> str:
    """What a fit is called beside other methods: without its lower layers it is a linear probe."""
    return PROBE if fit.is_probe else "linear fit"


def cross_fitted(fit: Fit) -> bool:
    """Whether head or network were fitted in folds, so that leave-one-out leaves out their part too."""
    return fit.held_out is not None


def temperatures_of(fit: Fit) -> tuple[float, float, float] | None:
    """T of the softmax, fitted to leave-one-out outputs with and without their variance, and its scale."""
    moderated, point = fit.temperature, fit.point_temperature
    return None if moderated is None or point is None else (moderated, point, fit.variance_scale)


def certificate_of(fit: Fit) -> str:
    """Name of the number that shows how exactly a fit was solved."""
    return "relative gradient" if fit.loss == "cross-entropy" else "relative residual"


def contradiction(fit: Fit) -> Tensor:
    """The degree to which the fit of all other examples contradicts each label, (N,)."""
    outputs = fit.loo()
    if fit.loss == "cross-entropy":
        outputs = outputs.sigmoid() if outputs.shape[1] == 1 else outputs.softmax(1)
    return (fit.targets.to(outputs) - outputs).square().sum(1).sqrt()


class Scale(Protocol):
    """Units of regression targets."""

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each target."""

    def inverse(self, values: Tensor) -> Tensor:
        """Predictions in the unit of the data, (N, C)."""

    def inverse_variance(self, values: Tensor) -> Tensor:
        """Variances in that unit, (N, C)."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for T samples, in the units of the data."""

    mean: Array  # outputs (T, C)
    # their standard deviation (T, C), with noise for a regression; None when it was not requested
    std: Array | None
    probs: Array | None  # class probabilities (T, C); None for a regression
    note: str = ""  # why there are no standard deviations, where they were requested

    @property
    def predicted(self) -> Array:
        """The most probable class (T,), or the values (T, C) of a regression."""
        return self.mean if self.probs is None else np.asarray(self.probs.argmax(1))

    @property
    def uncertainty(self) -> Array | None:
        """One minus the highest probability, or the mean standard deviation, (T,)."""
        if self.probs is not None:
            return np.asarray(1 - self.probs.max(1))
        return None if self.std is None else np.asarray(self.std.mean(1))


def predict(
    fit: Fit,
    x: Inputs,
    scale: Scale | None = None,
    temperatures: tuple[float, float, float] | None = None,
    std: bool = True,
) -> Predictions:
    """Predict in pieces that fit the memory."""
    means, variances, note = [], [], ""
    for part in _pieces(fit, x, "predicting"):
        if std and not note:
            try:
                found = fit.predictive(part)
            except NumericalError as error:
                note = f"no standard deviations: {error.what}"
            else:
                means.append(found.mean)
                variances.append(found.variance.clamp_min(0))
                continue
        means.append(fit.predict(part))
    mean = torch.cat(means)
    variance = torch.cat(variances) if std and not note else None
    if temperatures is not None:
        moderated, point, share = temperatures
        known = None if variance is None else share * variance.double()
        probs = probabilities(mean.double(), known, point if known is None else moderated, fit._possible)
        spread = None if variance is None else _numpy(variance.sqrt())
        return Predictions(_numpy(mean), spread, _numpy(probs), note)
    if variance is not None:
        variance = variance + fit.noise
    if scale is not None:
        mean = scale.inverse(mean.double())  # in units of the data, whose squares float32 may not hold
        variance = None if variance is None else scale.inverse_variance(variance.double())
    return Predictions(_numpy(mean), None if variance is None else _numpy(variance.sqrt()), None, note)


def _pieces(fit: Fit, x: Inputs, what: str) -> Any:
    """X in pieces whose kernel with the training samples, or rows of J, are small."""
    # the kernel with the training samples in float32, in float64, and its product with M; or the rows of J
    outputs = 1 if isinstance(fit.system, System) and fit.system.problem.basis.shared else fit.system.c
    row = 24 * outputs * _equations(fit)
    room = min(parse_bytes(fit.memory, fit.module.function.device) // 4, _MOST)
    size = max(1, min(int(room // row), 512))
    parts = list(split(x, size))
    return track(parts, f"{what} {batch_size(x)} samples")


def _equations(fit: Fit) -> int:
    """How many equations a fit has."""
    system = fit.system
    if isinstance(system, NormalSystem):
        return len(system.normal)
    return fit.n if isinstance(system, System) and system.problem.basis.shared else fit.n * system.c


def scored(
    name: str, found: Predictions, truth: Array, seconds: float | None = None, note: str = ""
) -> Comparison:
    """Accuracy, log loss and calibration error of a classifier; RMSE and log loss of a regression."""
    if found.probs is not None:
        own = np.clip(found.probs[np.arange(len(truth)), truth], 1e-300, None)
        confidence, correct = found.probs.max(1), found.predicted == truth
        ece = calibration_error(reliability_bins(confidence, correct))
        nll, accuracy = float(-np.log(own).mean()), float(correct.mean())
        return Comparison(name, accuracy, nll, ece, None, seconds, note, 1.0 - correct, confidence)
    gap, density = found.mean - truth, None
    if found.std is not None and (found.std > 0).all():  # of answers that are all alike there is no density
        # ½ log 2πσ² + (t − μ)² / 2σ², a target
        density = float((0.5 * np.log(2 * math.pi * found.std**2) + gap**2 / (2 * found.std**2)).mean())
    losses = (gap**2).reshape(len(truth), -1).mean(1)
    return Comparison(name, None, density, None, float(np.sqrt((gap**2).mean())), seconds, note, losses)


@torch.no_grad()
def ridge_scores(fit: Fit, x: Inputs | None, labels: Array | None) -> RidgeScores | None:
    """Every criterion along the ridge, and the test accuracy beside it; None where that takes iterations."""
    accuracy: Array | None = None
    path: Any = None
    if isinstance(fit, SoftmaxFit):
        path = fit.chosen_path
    elif in_closed_form(fit):
        with waiting("the criteria at every ridge"):
            path = fit.path()
        if x is not None and labels is not None and fit.classes and fit.constraints is None:
            grid = path.ridges.to(fit.module.function.device)
            parts = _pieces(fit, x, "ridges: predicting")
            chosen = torch.cat([fit.along(part, grid).argmax(2) for part in parts], 1)
            accuracy = (_numpy(chosen) == labels).mean(1)
    if path is None:
        return None
    found = {name: getattr(path, name, None) for name in ("loo_accuracy", "gcv", "evidence")}
    shown = {name: None if values is None else _numpy(values) for name, values in found.items()}
    return RidgeScores(
        _numpy(path.ridges), _numpy(path.loo_error), fit.ridge, test_accuracy=accuracy, **shown
    )


def kernel_spectrum(fit: Fit) -> KernelSpectrum | None:
    """The eigenvalues of the matrix that a fit was solved by; None where it was not decomposed."""
    if not in_closed_form(fit):
        return None
    try:
        with decomposing(_equations(fit)):
            values = fit._eigenvalues()
    except InputError:
        return None
    return KernelSpectrum(_numpy(values.clamp_min(0)), fit.ridge)


def _numpy(value: Tensor) -> Array:
    """A tensor as float64 (or integer) NumPy array."""
    value = value.detach().cpu()
    return np.asarray((value.double() if value.is_floating_point() else value).numpy())


TARGET = "standard deviation in the unit of the target"  # what a regression's uncertainty is
_NEIGHBORS = 5  # training samples shown on each side of an explanation
_EXPLAINED = 6  # test samples explained in a report


class FittedTask(Protocol):
    """A fit, with its samples and classes as people know them."""

    @property
    def fit(self) -> Fit:
        """The fit."""

    @property
    def samples(self) -> Samples:
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

    def inputs(self, x: Array) -> Inputs:
        """Samples as the network's inputs, on its device."""


def training_set(run: FittedTask) -> TrainingSet:
    """The training samples, how much each of them moved the fit, and whose labels it doubts."""
    if not in_closed_form(run.fit):
        return TrainingSet(run.samples)
    informative = run.fit.informativeness().double().cpu().numpy()
    doubted, by_chance, limits, unsure = suspects(run.fit)
    return TrainingSet(run.samples, informative, doubted, by_chance=by_chance, limits=limits, unsure=unsure)


def suspects(fit: Fit) -> tuple[tuple[DoubtedLabel, ...], float | None, str, tuple[int, ...]]:
    """Training samples whose label looks wrong to the fit of all the others, and what it cannot see."""
    if fit.labels is None:
        return (), None, "", ()
    errors = mislabeled(fit.loo(), fit.labels)
    assert errors.suggested is not None
    assert errors.wrong is not None
    assert errors.predicted is not None
    assert errors.indices is not None
    given, suggested, wrong = fit.labels.cpu(), errors.suggested.cpu(), errors.wrong.cpu()
    order = errors.indices.tolist()
    found = tuple(DoubtedLabel(i, int(given[i]), int(suggested[i]), float(wrong[i])) for i in order)
    look = errors.suspected().cpu()
    unsure = look[(errors.predicted.cpu() != given)[look]] if errors.limits else look[:0]
    return found, errors.expected, errors.limits, tuple(unsure.tolist())


def held_out(
    run: FittedTask, samples: Samples, found: Predictions, x: Array, explain: bool = True
) -> HeldOutSet:
    """Test samples with their predictions, some of them explained."""
    explained: tuple[Explanation, ...] = ()
    if explain and in_closed_form(run.fit):
        chosen = _telling(found, samples.labels, run.classes is not None)
        explained = explanations(run, x[chosen], chosen, found)
    held = held_in_words(run, samples, x) if explain else ""
    return replace(predicted(samples, found, explained), held=held)


def holding(run: FittedTask, x: Array, answers: Array | None, coverage: float) -> tuple[Array, float | None]:
    """Sets of classes (T, C), or ends of intervals (T, C, 2) in units of the data; the share they hold."""
    inputs = run.inputs(x)
    if run.classes is not None:
        sets = run.fit.sets(inputs, coverage).cpu().numpy()
        share = None if answers is None else float(sets[np.arange(len(sets)), answers].mean())
        return sets, share
    ends = run.fit.interval(inputs, coverage).double()
    both = [_numpy(run.scale.inverse(one) if run.scale else one) for one in ends.unbind(2)]
    if answers is None:
        return np.stack(both, 2), None
    low, high = both
    truth = np.asarray(answers).reshape(low.shape)
    return np.stack(both, 2), float(((low <= truth) & (truth <= high)).mean())


def held_in_words(run: FittedTask, samples: Samples, x: Array) -> str:
    """How many test samples sets of classes, or intervals, hold that are to hold nine in ten."""
    if samples.labels is None or not len(x):
        return ""
    answers = np.asarray(samples.labels)[:_HELD]
    try:
        found, share = holding(run, x[:_HELD], answers, _COVERAGE)
    except LinnetError:  # such as of too few samples, or of positions with a class each
        return ""
    asked, held, of = percent(_COVERAGE, 0), percent(share), f"{number(len(answers))} test samples"
    if run.classes is None:
        return (
            f"Intervals that are to hold {asked} of values, by the fits without each training sample, hold "
            f"{held} of those of {of}."
        )
    return (
        f"Sets of classes that are to hold the right one for {asked} of samples, by the fits without each "
        f"training sample, hold it for {held} of {of}; they are of {found.sum(1).mean():.1f} classes on "
        f"average, of {len(run.classes)}."
    )


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
            (below, reasons.get("shares", ""), reasons.get("body", "")),
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
    if run.temperatures is not None and (fit.loss == "squared" or run.temperatures[2] != 1):
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


def fit_record(run: FittedTask, x: Inputs | None, labels: Array | None) -> FitRecord:
    """What a fit chose and why: the path of ridges, with test accuracies beside it, and the spectrum."""
    record = run.fit.record
    return FitRecord(
        ridge_scores(run.fit, x, labels if run.classes else None),
        kernel_spectrum(run.fit),
        choices(run),
        ridge=RidgeChoice(record.criterion, run.fit.loss, cross_fitted(run.fit)),
        verdict=record.reasons.get("verdict", ""),
    )
