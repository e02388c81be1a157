"""What a page shows, as plain records of numpy arrays, strings and floats; only the title is required."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from linnet.files import finite
from linnet.plots.measures import Array, calibration_error, ranking, reliability_bins

if TYPE_CHECKING:
    from linnet.tangent.preflight import Preflight


@dataclass(frozen=True, eq=False)
class Comparison:
    """The scores of one method on the test set."""

    name: str  # name of the method, such as ``"linear fit"`` or ``"linear probe"``
    accuracy: float | None = None  # share of correct predictions, in [0, 1]
    nll: float | None = None  # mean negative log-likelihood per example, in nats
    ece: float | None = None  # expected calibration error, in [0, 1]
    rmse: float | None = None  # root mean squared error, in the unit of the targets (regression)
    seconds: float | None = None  # time that the method took, in seconds
    note: str = ""  # anything a reader must know to judge the row
    losses: Array | None = None  # of each test sample: 1 where its class is wrong, or the squared error
    confidence: Array | None = None  # probability of the predicted class of each test sample, in [0, 1]

    @property
    def correct(self) -> Array:
        """Whether each prediction of a class is right, (N,)."""
        right: Array = np.asarray(self.losses) == 0
        return right

    def numbers(self) -> dict[str, Any]:
        """The scores by name, without what they are of."""
        return {name: value for name, value in vars(self).items() if name not in ("losses", "confidence")}


@dataclass(frozen=True, eq=False)
class RidgeScores:
    """The scores of a range of ridge values."""

    ridges: Array  # ridge values, (R,), positive
    loo_error: Array  # leave-one-out mean squared error, (R,)
    chosen: float | None = None  # the ridge taken
    loo_accuracy: Array | None = None  # leave-one-out accuracy in [0, 1], (R,)
    # test accuracy in [0, 1], (R,); shown faintly, never used for the choice
    test_accuracy: Array | None = None
    gcv: Array | None = None  # generalized cross-validation score, (R,), lower is better
    evidence: Array | None = None  # log evidence in nats, (R,), higher is better


@dataclass(frozen=True)
class RidgeChoice:
    """Choice of the ridge."""

    criterion: str  # ``"given"``, ``"loo"``, ``"gcv"``, ``"evidence"``, ``"validation"`` or ``"folds"``
    loss: str = "squared"  # what was fitted, ``"squared"`` or ``"cross-entropy"``
    # whether the head was fitted in folds, so that leave-one-out is the held-out error of these
    crossed: bool = False


@dataclass(frozen=True, eq=False)
class KernelSpectrum:
    """The eigenvalues of the kernel of the training set."""

    eigenvalues: Array  # eigenvalues of K, (M,), in any order
    ridge: float | None = None  # the ridge of the fit, in the unit of the eigenvalues
    # effective degrees of freedom, sum of s / (s + ridge); computed from the eigenvalues when left out and a
    # ridge is given
    degrees_of_freedom: float | None = None

    def effective(self) -> float | None:
        """The degrees of freedom as given, else from the eigenvalues, else None."""
        if self.degrees_of_freedom is not None or self.ridge is None:
            return self.degrees_of_freedom
        values = np.clip(np.asarray(self.eigenvalues, dtype=float), 0.0, None)
        # sum_k s_k / (s_k + rho)
        return float(np.sum(values / (values + self.ridge)))


@dataclass(frozen=True, eq=False)
class TaskKernel:
    """Linearity of a task for a network."""

    eigenvalues: Array  # leading eigenvalues of the kernel's matrix (k,), decreasing
    shares: Array  # share of the labels' squared norm on the first 1, ..., k eigenvectors (k,), in [0, 1]
    rows: int  # size of the matrix
    top: int  # how many leading eigenvectors the text speaks of, at most k
    # the ridge of the fit and its effective degrees of freedom, in units of the eigenvalues
    levels: tuple[float, float]
    verdict: tuple[str, ...]  # the judgment, and the reasons for it, a sentence each
    facts: tuple[tuple[str, str], ...] = ()  # names and values for the table

    @property
    def share(self) -> float:
        """Share of the labels' squared norm on the leading eigenvectors that the text speaks of."""
        return float(self.shares[self.top - 1])


@dataclass(frozen=True, eq=False)
class FitRecord:
    """Record of the fit."""

    path: RidgeScores | None = None  # scores over the ridge
    spectrum: KernelSpectrum | None = None  # eigenvalues of the kernel
    choices: tuple[tuple[str, str, str], ...] = ()  # what was decided, the choice, and the reason
    preflight: Preflight | None = None  # the check of the network
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds of every step
    task: TaskKernel | None = None  # how linear the task is
    ridge: RidgeChoice | None = None  # choice of the ridge
    verdict: str = ""  # what was found on the training samples alone, in a sentence


@dataclass(frozen=True, eq=False)
class Samples:
    """A set of samples as people see them."""

    images: Array | None = None  # pictures, (N, H, W, C) or (N, H, W), uint8, with 1, 3 or 4 channels
    # class indices, (N,), integers; or regression targets, (N,) or (N, D), floats
    labels: Array | None = None
    ids: tuple[str, ...] = ()  # A stable name of each sample: a path, or a text; by default `#index`

    def __len__(self) -> int:
        """Number of samples; 0 when no part is given."""
        return next((len(p) for p in (self.images, self.labels) if p is not None), len(self.ids))

    def name(self, index: int) -> str:
        """The id of one sample."""
        return self.ids[index] if self.ids else f"#{index}"

    def take(self, positions: Array) -> Samples:
        """Some of the samples."""
        images, labels = (None if part is None else part[positions] for part in (self.images, self.labels))
        return Samples(images, labels, tuple(self.name(place) for place in positions))


@dataclass(frozen=True)
class DoubtedLabel:
    """A training sample whose given label looks wrong to the fit on the others."""

    sample: int  # position in the training set
    given: float  # the given label: class index, or regression target
    suggested: float | None = None  # the label that the fit would give from all other samples
    doubt: float | None = None  # probability that the given label is wrong, in [0, 1]
    flipped: bool | None = None  # whether the label is known to be wrong, when the truth is known


@dataclass(frozen=True)
class Forgetting:
    """Changes after forgetting training samples."""

    removed: tuple[int, ...]  # positions of the forgotten samples in the training set
    # rows (what, before, after), numbers or texts
    table: tuple[tuple[str, float | str, float | str], ...] = ()
    difference: float | None = None  # largest absolute difference, in outputs, from what it is compared with
    seconds: float | None = None  # time of forgetting in seconds
    refit_seconds: float | None = None  # time of what it is compared with, in seconds
    note: str = ""  # A remark
    # whether it is compared with a fit that never saw the samples, the network run again, and not with a
    # solution of the remaining equations
    refitted: bool = True


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """The training samples and what the fit says about them."""

    samples: Samples  # pictures, labels and ids
    informativeness: Array | None = None  # how much each sample moved the fit, (N,)
    suspects: tuple[DoubtedLabel, ...] = ()  # probable label errors, the most probable first
    flipped: int | None = None  # number of labels that are known to be wrong, when the truth is known
    forgetting: Forgetting | None = None  # what forgetting some of the samples changed
    by_chance: float | None = None  # how many right labels look wrong by chance
    limits: str = ""  # which wrong labels cannot be seen, as a clause; empty where most can
    unsure: tuple[int, ...] = ()  # positions of those that are worth a look where few can


@dataclass(frozen=True)
class Neighbor:
    """A training sample behind a prediction."""

    sample: int  # position in the training set
    influence: float  # the output for the predicted class with the sample minus without it


@dataclass(frozen=True)
class Explanation:
    """The training samples behind the prediction of one test sample."""

    sample: int  # position in the test set
    predicted: int | None = None  # predicted class index; None for regression
    up: tuple[Neighbor, ...] = ()  # samples that raised the output for the predicted class, strongest first
    down: tuple[Neighbor, ...] = ()  # samples that lowered it, strongest first


@dataclass(frozen=True, eq=False)
class HeldOutSet:
    """The test samples and their predictions."""

    samples: Samples  # pictures, labels (when known) and ids
    probs: Array | None = None  # class probabilities, (N, C)
    mean: Array | None = None  # predicted values, the shape of the targets (regression)
    std: Array | None = None  # standard deviation of each predicted value, noise included (regression)
    uncertainty: Array | None = None  # one number per sample, larger is less sure, (N,)
    # chosen samples and the training samples behind their predictions
    explanations: tuple[Explanation, ...] = ()
    # unit of the uncertainty; `"%"` where it is the probability of a wrong prediction, in [0, 1]
    unit: str = ""
    held: str = ""  # how many test samples sets or intervals hold that are to hold nine in ten

    def predicted(self) -> Array | None:
        """The most probable class of each sample, (N,), or None without probabilities."""
        return None if self.probs is None else np.asarray(self.probs).argmax(axis=1)

    def correct(self) -> Array | None:
        """Whether each prediction is correct, (N,), or None without labels or probabilities."""
        predicted = self.predicted()
        if predicted is None or self.samples.labels is None:
            return None
        return np.asarray(predicted == self.samples.labels)

    def loss(self) -> Array | None:
        """The loss of each prediction: 1 if wrong, or its mean absolute error; None without labels."""
        correct = self.correct()
        if correct is not None:
            return np.asarray(1.0 - correct)
        if self.mean is None or self.samples.labels is None:
            return None
        gap = np.abs(np.asarray(self.samples.labels, dtype=float).reshape(np.shape(self.mean)) - self.mean)
        return np.asarray(gap.reshape(len(gap), -1).mean(axis=1))


@dataclass(frozen=True)
class NextStep:
    """Something to do next."""

    title: str  # what to do, as an order
    text: str = ""  # why, and what it brings, in sentences
    command: str = ""  # A line for the shell that does it; empty where there is none
    training: tuple[int, ...] = ()  # positions of the training samples that it is about
    tested: tuple[int, ...] = ()  # positions of the test samples that it is about


@dataclass(frozen=True)
class Notes:
    """The words of a report."""

    # sentences for the top of the page, the verdict first; written from the numbers by default
    headline: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # sentences that a reader must not miss
    # (name, value) pairs for the foot of the page: versions, seed, command
    facts: tuple[tuple[str, str], ...] = ()
    steps: tuple[NextStep, ...] = ()  # what to do next, behind what follows from the numbers
    quick: str = ""  # what a quick run has taken of the data, in a sentence; empty for a whole one
    first: tuple[NextStep, ...] = ()  # what to do before all else


@dataclass(frozen=True, eq=False)
class Content:
    """Everything that a report shows; only the title is required."""

    title: str  # title of the page
    classes: tuple[str, ...] | None = None  # class names, in the order of the indices; None for regression
    notes: Notes = field(default_factory=Notes)  # headline, warnings and facts
    scores: tuple[Comparison, ...] = ()  # how good the fit is, and after it other methods
    fit: FitRecord = field(default_factory=FitRecord)  # how the fit was made
    train: TrainingSet | None = None  # training samples
    test: HeldOutSet | None = None  # test samples
    folder: str = ""  # the run's folder as commands take it; without it the page has no commands of its own
    count: int | None = None  # number of test samples, where neither these nor losses of a method are given

    @property
    def calibrated(self) -> list[Comparison]:
        """The methods whose probabilities are known."""
        return [row for row in self.scores if row.confidence is not None and len(row.confidence)]

    def tested(self) -> int | None:
        """Number of test examples behind the scores, or None when it is not known."""
        if self.test is not None and len(self.test.samples):
            return len(self.test.samples)
        return next((len(row.losses) for row in self.scores if row.losses is not None), self.count)

    def to_dict(self) -> dict[str, Any]:
        """Every number of the report, ready for ``json.dump``; pictures are left out."""
        fit, train, test = self.fit, self.train, self.test
        raw = {
            "title": self.title,
            "classes": self.classes,
            "headline": self.notes.headline,
            "warnings": self.notes.warnings,
            "facts": dict(self.notes.facts),
            "tested": self.tested(),
            "comparison": [row.numbers() for row in self.scores],
            "reliability": [_binned(row) for row in self.calibrated],
            "ridge_path": fit.path,
            "ridge": fit.ridge,
            "spectrum": fit.spectrum
            and {**vars(fit.spectrum), "degrees_of_freedom": fit.spectrum.effective()},
            "choices": [{"what": what, "chosen": chosen, "why": why} for what, chosen, why in fit.choices],
            "preflight": fit.preflight and fit.preflight.to_dict(),
            "timings": fit.timings,
            "task": fit.task,
            "train": train and _train_dict(train),
            "test": test and _test_dict(test, Samples() if train is None else train.samples),
        }
        plain: dict[str, Any] = finite(raw)
        return plain


def _test_dict(test: HeldOutSet, trained: Samples) -> dict[str, Any]:
    """The test part: predictions by id, the most uncertain first, explanations with ids."""
    name = test.samples.name
    order = [] if test.uncertainty is None else ranking(test.uncertainty).tolist()

    def explained(one: Explanation) -> dict[str, Any]:
        sides = {"up": one.up, "down": one.down}
        behind = {side: [_named(n, trained) for n in found] for side, found in sides.items()}
        return _named(one, test.samples) | behind

    return {
        "ids": [name(i) for i in range(len(test.samples))],
        "labels": test.samples.labels,
        "predicted": test.predicted(),
        "mean": test.mean,
        "std": test.std,
        "uncertainty": test.uncertainty,
        "most_uncertain": [name(i) for i in order[:12]],
        "explanations": [explained(one) for one in test.explanations],
    }


def _train_dict(train: TrainingSet) -> dict[str, Any]:
    """The training part, with ids in place of pictures."""
    name, forgotten = train.samples.name, train.forgetting
    shown = {key: value for key, value in vars(train).items() if key != "samples"}
    return shown | {
        "count": len(train.samples),
        "suspects": [_named(suspect, train.samples) for suspect in train.suspects],
        "unsure": [name(i) for i in train.unsure],
        "forgetting": forgotten and {**vars(forgotten), "removed": [name(i) for i in forgotten.removed]},
    }


def _binned(row: Comparison) -> dict[str, Any]:
    """The bins that the diagram shows."""
    bins = reliability_bins(np.asarray(row.confidence), row.correct)
    return {"method": row.name, "calibration_error": calibration_error(bins), "bins": bins}


def _named(part: Neighbor | Explanation | DoubtedLabel, samples: Samples) -> dict[str, Any]:
    """A record about one sample, by its id; the position serves calls in Python."""
    rest = {key: value for key, value in vars(part).items() if key != "sample"}
    return {"id": samples.name(part.sample), "position": part.sample, **rest}
