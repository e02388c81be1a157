"""The parts of a report, as plain records of numpy arrays, strings and floats.

Each part checks that its own pieces fit together; :class:`linnet.report.Run` checks that the parts
fit each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from linnet.errors import InputError
from linnet.plots.measures import Array
from linnet.report.task_kernel import TaskKernel


@dataclass(frozen=True)
class Comparison:
    """The scores of one method on the test set."""

    name: str  # name of the method, such as ``"linear fit"`` or ``"linear probe"``
    accuracy: float | None = None  # share of correct predictions, in [0, 1]
    nll: float | None = None  # mean negative log-likelihood per example, in nats
    ece: float | None = None  # expected calibration error, in [0, 1]
    rmse: float | None = None  # root mean squared error, in the unit of the targets (regression)
    seconds: float | None = None  # time that the method took, in seconds
    note: str = ""  # anything a reader must know to judge the row


@dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence and correctness of one method's test predictions."""

    method: str  # name of the method
    confidence: Array  # probability of the predicted class, (N,), in [0, 1]
    correct: Array  # whether the prediction is correct, (N,), bool

    def __post_init__(self) -> None:
        check_length("Reliability.correct", self.correct, "confidence", len(self.confidence))


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of the fit."""

    comparison: tuple[Comparison, ...] = ()  # one row per method; the first row is the linear fit itself
    reliability: tuple[Reliability, ...] = ()  # calibration data per method, in the order of display
    # number of test examples behind the scores; by default the size of the test set
    tested: int | None = None
    # squared error of each test prediction of a regression, (N,), by method
    squares: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """One decision that the fit took."""

    what: str  # what was decided, such as ``"ridge"``
    chosen: str  # the value taken
    why: str = ""  # the reason, in a sentence


@dataclass(frozen=True)
class Timing:
    """The time of one step."""

    what: str  # name of the step
    seconds: float  # wall-clock time in seconds


@dataclass(frozen=True)
class Coverage:
    """Treatment of one parameter of the network."""

    name: str  # name of the parameter
    shape: tuple[int, ...]  # its shape
    uses: int  # how often the network uses it
    treatment: str  # the rule that handled it


@dataclass(frozen=True)
class PreflightText:
    """Result of the preflight check."""

    text: str = ""  # the printed report of the preflight
    parameters: tuple[Coverage, ...] = ()  # one row per parameter
    memory: tuple[tuple[str, int], ...] = ()  # memory plan: (name, bytes) of every large item
    budget: int | None = None  # memory budget in bytes
    findings: tuple[str, ...] = ()  # remarks, a sentence each


@dataclass(frozen=True, eq=False)
class RidgePath:
    """The scores of a range of ridge values."""

    ridges: Array  # ridge values, (R,), positive
    loo_error: Array  # leave-one-out mean squared error, (R,)
    chosen: float | None = None  # the ridge taken
    loo_accuracy: Array | None = None  # leave-one-out accuracy in [0, 1], (R,)
    # test accuracy in [0, 1], (R,); shown faintly, never used for the choice
    test_accuracy: Array | None = None
    gcv: Array | None = None  # generalized cross-validation score, (R,), lower is better
    evidence: Array | None = None  # log evidence in nats, (R,), higher is better

    def __post_init__(self) -> None:
        for name in ("loo_error", "loo_accuracy", "test_accuracy", "gcv", "evidence"):
            check_length(f"RidgePath.{name}", getattr(self, name), "ridges", len(self.ridges))


@dataclass(frozen=True)
class RidgeChoice:
    """Choice of the ridge."""

    criterion: str  # ``"given"``, ``"loo"``, ``"gcv"``, ``"evidence"``, ``"validation"`` or ``"folds"``
    loss: str = "squared"  # what was fitted, ``"squared"`` or ``"cross-entropy"``
    # whether the head was fitted in folds, so that leave-one-out is the held-out error of these
    crossed: bool = False


@dataclass(frozen=True, eq=False)
class Spectrum:
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
class FitRecord:
    """Record of the fit."""

    path: RidgePath | None = None  # scores over the ridge
    spectrum: Spectrum | None = None  # eigenvalues of the kernel
    choices: tuple[Choice, ...] = ()  # every decision and its reason
    preflight: PreflightText | None = None  # the check of the network
    timings: tuple[Timing, ...] = ()  # time of every step
    task: TaskKernel | None = None  # how linear the task is
    ridge: RidgeChoice | None = None  # choice of the ridge
    verdict: str = ""  # what was found on the training samples alone, in a sentence


@dataclass(frozen=True, eq=False)
class Samples:
    """A set of samples as people see them."""

    images: Array | None = None  # pictures, (N, H, W, C) or (N, H, W), uint8, with 1, 3 or 4 channels
    # class indices, (N,), integers; or regression targets, (N,) or (N, D), floats
    labels: Array | None = None
    # A stable name of each sample: a path, or a text; by default `#index`
    ids: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        sizes = {len(part) for part in (self.images, self.labels, self.ids) if part is not None}
        if len(sizes) > 1:
            raise InputError(
                f"Samples has parts of different lengths {sorted(sizes)}",
                expected="images, labels and ids of the same N samples",
                remedy="select the same samples in each part",
            )
        if self.images is not None:
            _check_images(self.images)

    def __len__(self) -> int:
        """Number of samples; 0 when no part is given."""
        return next((len(p) for p in (self.images, self.labels, self.ids) if p is not None), 0)

    def name(self, index: int) -> str:
        """The id of one sample."""
        return self.ids[index] if self.ids is not None else f"#{index}"


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

    def __post_init__(self) -> None:
        count = len(self.samples)
        if count:
            check_length("TrainingSet.informativeness", self.informativeness, "samples", count)
            check_indices("TrainingSet.suspects", [s.sample for s in self.suspects], count)
            if self.forgetting is not None:
                check_indices("Forgetting.removed", list(self.forgetting.removed), count)


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
    output: str = ""  # name of the explained output, when it is not the predicted class


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

    def __post_init__(self) -> None:
        count = len(self.samples)
        for name in ("probs", "mean", "std", "uncertainty"):
            if count:
                check_length(f"HeldOutSet.{name}", getattr(self, name), "samples", count)
        if count:
            check_indices("HeldOutSet.explanations", [e.sample for e in self.explanations], count)

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
class Step:
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
    steps: tuple[Step, ...] = ()  # what to do next, behind what follows from the numbers
    quick: str = ""  # what a quick run has taken of the data, in a sentence; empty for a whole one
    first: tuple[Step, ...] = ()  # what to do before all else


def check_length(name: str, value: Array | None, other: str, count: int) -> None:
    """Raise unless the value is missing or has the length of the other part."""
    if value is not None and len(value) != count:
        raise InputError(
            f"{name} has length {len(value)} where {other} has {count}",
            expected="one entry for each",
            remedy=f"select the same entries in {name} and {other}",
        )


def check_indices(name: str, values: Sequence[int], count: int) -> None:
    """Raise unless every index lies in [0, count)."""
    bad = [value for value in values if not 0 <= value < count]
    if bad:
        raise InputError(
            f"{name} holds the index {bad[0]}",
            expected=f"whole numbers from 0 to {count - 1}",
            remedy="count from 0 within the set that the record belongs to",
        )


def _check_images(images: Array) -> None:
    """Raise unless the pictures can be shown."""
    shape_ok = images.ndim == 3 or (images.ndim == 4 and images.shape[-1] in (1, 3, 4))
    if images.dtype != np.uint8 or not shape_ok:
        raise InputError(
            f"Samples.images has shape {tuple(images.shape)} and type {images.dtype}",
            expected="uint8 of shape (N, H, W, C) with 1, 3 or 4 channels, or (N, H, W)",
            remedy="undo the normalization and move the channels last: "
            "(x.permute(0, 2, 3, 1) * 255).round().clip(0, 255).to(torch.uint8).numpy()",
        )
