"""The parts of a report, as plain records of numpy arrays, strings and floats.

Each part checks that its own pieces fit together; :class:`linnet.app.report.Run` checks that the parts
fit each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from linnet.app.report.task_kernel import TaskKernel
from linnet.errors import InputError
from linnet.plots.measures import Array


@dataclass(frozen=True)
class Comparison:
    """The scores of one method on the test set.

    Args:
        name: Name of the method, such as ``"linear fit"`` or ``"linear probe"``.
        accuracy: Share of correct predictions, in [0, 1].
        nll: Mean negative log-likelihood per example, in nats.
        ece: Expected calibration error, in [0, 1].
        rmse: Root mean squared error, in the unit of the targets (regression).
        seconds: Time that the method took, in seconds.
        note: Anything a reader must know to judge the row.
    """

    name: str
    accuracy: float | None = None
    nll: float | None = None
    ece: float | None = None
    rmse: float | None = None
    seconds: float | None = None
    note: str = ""


@dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence and correctness of one method's test predictions.

    Args:
        method: Name of the method.
        confidence: Probability of the predicted class, (N,), in [0, 1].
        correct: Whether the prediction is correct, (N,), bool.
    """

    method: str
    confidence: Array
    correct: Array

    def __post_init__(self) -> None:
        check_length("Reliability.correct", self.correct, "confidence", len(self.confidence))


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of the fit.

    Args:
        comparison: One row per method; the first row is the linear fit itself.
        reliability: Calibration data per method, in the order of display.
        tested: Number of test examples behind the scores; by default the size of the test set.
        squares: Squared error of each test prediction of a regression, (N,), by method.
    """

    comparison: tuple[Comparison, ...] = ()
    reliability: tuple[Reliability, ...] = ()
    tested: int | None = None
    squares: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """One decision that the fit took.

    Args:
        what: What was decided, such as ``"ridge"``.
        chosen: The value taken.
        why: The reason, in a sentence.
    """

    what: str
    chosen: str
    why: str = ""


@dataclass(frozen=True)
class Timing:
    """The time of one step.

    Args:
        what: Name of the step.
        seconds: Wall-clock time in seconds.
    """

    what: str
    seconds: float


@dataclass(frozen=True)
class Coverage:
    """Treatment of one parameter of the network.

    Args:
        name: Name of the parameter.
        shape: Its shape.
        uses: How often the network uses it.
        treatment: The rule that handled it.
    """

    name: str
    shape: tuple[int, ...]
    uses: int
    treatment: str


@dataclass(frozen=True)
class PreflightText:
    """Result of the preflight check.

    Args:
        text: The printed report of the preflight.
        parameters: One row per parameter.
        memory: Memory plan: (name, bytes) of every large item.
        budget: Memory budget in bytes.
        findings: Remarks, a sentence each.
    """

    text: str = ""
    parameters: tuple[Coverage, ...] = ()
    memory: tuple[tuple[str, int], ...] = ()
    budget: int | None = None
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class RidgePath:
    """The scores of a range of ridge values.

    Args:
        ridges: Ridge values, (R,), positive.
        loo_error: Leave-one-out mean squared error, (R,).
        chosen: The ridge taken.
        loo_accuracy: Leave-one-out accuracy in [0, 1], (R,).
        test_accuracy: Test accuracy in [0, 1], (R,); shown faintly, never used for the choice.
        gcv: Generalized cross-validation score, (R,), lower is better.
        evidence: Log evidence in nats, (R,), higher is better.
    """

    ridges: Array
    loo_error: Array
    chosen: float | None = None
    loo_accuracy: Array | None = None
    test_accuracy: Array | None = None
    gcv: Array | None = None
    evidence: Array | None = None

    def __post_init__(self) -> None:
        for name in ("loo_error", "loo_accuracy", "test_accuracy", "gcv", "evidence"):
            check_length(f"RidgePath.{name}", getattr(self, name), "ridges", len(self.ridges))


@dataclass(frozen=True)
class RidgeChoice:
    """Choice of the ridge.

    Args:
        criterion: ``"given"``, ``"loo"``, ``"gcv"``, ``"evidence"``, ``"validation"`` or
            ``"folds"``.
        loss: What was fitted, ``"squared"`` or ``"cross-entropy"``.
        crossed: Whether the head was fitted in folds, so that leave-one-out is the held-out error of these.
    """

    criterion: str
    loss: str = "squared"
    crossed: bool = False


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The eigenvalues of the kernel of the training set.

    Args:
        eigenvalues: Eigenvalues of K, (M,), in any order.
        ridge: The ridge of the fit, in the unit of the eigenvalues.
        degrees_of_freedom: Effective degrees of freedom, sum of s / (s + ridge); computed from the
            eigenvalues when left out and a ridge is given.
    """

    eigenvalues: Array
    ridge: float | None = None
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
    """Record of the fit.

    Args:
        path: Scores over the ridge.
        spectrum: Eigenvalues of the kernel.
        choices: Every decision and its reason.
        preflight: The check of the network.
        timings: Time of every step.
        task: How linear the task is.
        ridge: Choice of the ridge.
        verdict: What was found on the training samples alone, in a sentence.
    """

    path: RidgePath | None = None
    spectrum: Spectrum | None = None
    choices: tuple[Choice, ...] = ()
    preflight: PreflightText | None = None
    timings: tuple[Timing, ...] = ()
    task: TaskKernel | None = None
    ridge: RidgeChoice | None = None
    verdict: str = ""


@dataclass(frozen=True, eq=False)
class Samples:
    """A set of samples as people see them.

    Args:
        images: Pictures, (N, H, W, C) or (N, H, W), uint8, with 1, 3 or 4 channels.
        labels: Class indices, (N,), integers; or regression targets, (N,) or (N, D), floats.
        ids: A stable name of each sample: a path, or a text; by default ``#index``.
    """

    images: Array | None = None
    labels: Array | None = None
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
        """The id of one sample.

        Args:
            index: Position of the sample.

        Returns:
            Its id, or ``#index`` when there are none.
        """
        return self.ids[index] if self.ids is not None else f"#{index}"


@dataclass(frozen=True)
class DoubtedLabel:
    """A training sample whose given label looks wrong to the fit on the others.

    Args:
        sample: Position in the training set.
        given: The given label: class index, or regression target.
        suggested: The label that the fit would give from all other samples.
        doubt: Probability that the given label is wrong, in [0, 1].
        flipped: Whether the label is known to be wrong, when the truth is known.
    """

    sample: int
    given: float
    suggested: float | None = None
    doubt: float | None = None
    flipped: bool | None = None


@dataclass(frozen=True)
class Forgetting:
    """Changes after forgetting training samples.

    Args:
        removed: Positions of the forgotten samples in the training set.
        table: Rows (what, before, after), numbers or texts.
        difference: Largest absolute difference, in outputs, from what it is compared with.
        seconds: Time of forgetting in seconds.
        refit_seconds: Time of what it is compared with, in seconds.
        note: A remark.
        refitted: Whether it is compared with a fit that never saw the samples, the network run again, and not
            with a solution of the remaining equations.
    """

    removed: tuple[int, ...]
    table: tuple[tuple[str, float | str, float | str], ...] = ()
    difference: float | None = None
    seconds: float | None = None
    refit_seconds: float | None = None
    note: str = ""
    refitted: bool = True


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """The training samples and what the fit says about them.

    Args:
        samples: Pictures, labels and ids.
        informativeness: How much each sample moved the fit, (N,).
        suspects: Probable label errors, the most probable first.
        flipped: Number of labels that are known to be wrong, when the truth is known.
        forgetting: What forgetting some of the samples changed.
        by_chance: How many right labels look wrong by chance.
        limits: Which wrong labels cannot be seen, as a clause; empty where most can.
    """

    samples: Samples
    informativeness: Array | None = None
    suspects: tuple[DoubtedLabel, ...] = ()
    flipped: int | None = None
    forgetting: Forgetting | None = None
    by_chance: float | None = None
    limits: str = ""

    def __post_init__(self) -> None:
        count = len(self.samples)
        if count:
            check_length("TrainingSet.informativeness", self.informativeness, "samples", count)
            check_indices("TrainingSet.suspects", [s.sample for s in self.suspects], count)
            if self.forgetting is not None:
                check_indices("Forgetting.removed", list(self.forgetting.removed), count)


@dataclass(frozen=True)
class Neighbor:
    """A training sample behind a prediction.

    Args:
        sample: Position in the training set.
        influence: The output for the predicted class with the sample minus without it.
    """

    sample: int
    influence: float


@dataclass(frozen=True)
class Explanation:
    """The training samples behind the prediction of one test sample.

    Args:
        sample: Position in the test set.
        predicted: Predicted class index; None for regression.
        up: Samples that raised the output for the predicted class, strongest first.
        down: Samples that lowered it, strongest first.
        output: Name of the explained output, when it is not the predicted class.
    """

    sample: int
    predicted: int | None = None
    up: tuple[Neighbor, ...] = ()
    down: tuple[Neighbor, ...] = ()
    output: str = ""


@dataclass(frozen=True, eq=False)
class HeldOutSet:
    """The test samples and their predictions.

    Args:
        samples: Pictures, labels (when known) and ids.
        probs: Class probabilities, (N, C).
        mean: Predicted values, the shape of the targets (regression).
        std: Standard deviation of each predicted value, noise included (regression).
        uncertainty: One number per sample, larger is less sure, (N,).
        explanations: Chosen samples and the training samples behind their predictions.
        unit: Unit of the uncertainty; ``"%"`` where it is the probability of a wrong prediction, in [0, 1].
    """

    samples: Samples
    probs: Array | None = None
    mean: Array | None = None
    std: Array | None = None
    uncertainty: Array | None = None
    explanations: tuple[Explanation, ...] = ()
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
    """Something to do next.

    Args:
        title: What to do, as an order.
        text: Why, and what it brings, in sentences.
        command: A line for the shell that does it; empty where there is none.
        training: Positions of the training samples that it is about.
        tested: Positions of the test samples that it is about.
    """

    title: str
    text: str = ""
    command: str = ""
    training: tuple[int, ...] = ()
    tested: tuple[int, ...] = ()


@dataclass(frozen=True)
class Notes:
    """The words of a report.

    Args:
        headline: Sentences for the top of the page, the verdict first; written from the numbers by default.
        warnings: Sentences that a reader must not miss.
        facts: (name, value) pairs for the foot of the page: versions, seed, command.
        steps: What to do next, behind what follows from the numbers.
        quick: What a quick run has taken of the data, in a sentence; empty for a whole one.
        first: What to do before all else.
    """

    headline: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    steps: tuple[Step, ...] = ()
    quick: str = ""
    first: tuple[Step, ...] = ()


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
