"""A realistic run for the report's tests: kernel ridge regression on the digits of scikit-learn.

The numbers come from a real fit of a real data set, with five labels flipped on purpose, so that every
section of the page has something true to show.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linnet.memory import Plan
from linnet.plots.measures import calibration_error, reliability_bins
from linnet.report.records import (
    Comparison,
    Content,
    DoubtedLabel,
    Explanation,
    FitRecord,
    Forgetting,
    HeldOutSet,
    KernelSpectrum,
    Neighbor,
    Notes,
    RidgeScores,
    Samples,
    TrainingSet,
)
from linnet.tangent.preflight import Coverage, Preflight

Array = NDArray[Any]
CLASSES = ("five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Split:
    """Digits 5 to 9, ten shots a class, five labels flipped."""

    x: Array
    labels: Array
    truth: Array
    test_x: Array
    test_labels: Array
    images: Array
    test_images: Array
    ids: tuple[str, ...]
    test_ids: tuple[str, ...]


def digits(shots: int = 10, flips: int = 5, seed: int = 0) -> Split:
    """The digits of scikit-learn as a small adaptation task."""
    from sklearn.datasets import load_digits

    data = load_digits()
    rng = np.random.default_rng(seed)
    indices = np.flatnonzero(data.target >= 5)
    rng.shuffle(indices)
    labels = data.target[indices] - 5
    train = np.concatenate([indices[labels == c][:shots] for c in range(5)])
    test = np.setdiff1d(indices, train)
    truth = data.target[train] - 5
    given = truth.copy()
    flipped = rng.choice(len(train), flips, replace=False)
    given[flipped] = (truth[flipped] + rng.integers(1, 5, flips)) % 5
    pixels = (data.images / 16 * 255).round().astype(np.uint8)
    scaled = data.data / 16
    return Split(
        scaled[train], given, truth, scaled[test], data.target[test] - 5, pixels[train], pixels[test],
        tuple(f"train/digit-{i:04d}.png" for i in train), tuple(f"test/digit-{i:04d}.png" for i in test),
    )  # fmt: skip


def gauss_kernel(x: Array, y: Array, width: float = 1.6) -> Array:
    """Gaussian kernel of two sets."""
    squared = (x * x).sum(1)[:, None] + (y * y).sum(1)[None] - 2 * x @ y.T
    return np.asarray(np.exp(-squared / (2 * width**2)))


def softmax(values: Array, scale: float) -> Array:
    """Probabilities of scaled outputs."""
    shifted = scale * (values - values.max(axis=1, keepdims=True))
    return np.asarray(np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True))


def row(name: str, probs: Array, labels: Array, seconds: float, note: str = "") -> Comparison:
    """The scores of one method."""
    nll = -np.log(np.clip(probs[np.arange(len(labels)), labels], 1e-12, None)).mean()
    confidence, correct = probs.max(axis=1), probs.argmax(axis=1) == labels
    gap = calibration_error(reliability_bins(confidence, correct))
    losses = 1.0 - correct
    return Comparison(name, float(correct.mean()), float(nll), gap, None, seconds, note, losses, confidence)


def ridge_path(kernel: Array, onehot: Array, labels: Array, cross: Array, test_labels: Array) -> RidgeScores:
    """Leave-one-out scores over the ridge by one eigendecomposition."""
    values, vectors = np.linalg.eigh(kernel)
    ridges = np.logspace(-4, 2, 31)
    error, right, tested, gcv, evidence = [], [], [], [], []
    for ridge in ridges:
        inverse = (vectors / (values + ridge)) @ vectors.T
        beta = inverse @ onehot
        residual = beta / np.diag(inverse)[:, None]
        error.append(float((residual**2).mean()))
        right.append(float(((onehot - residual).argmax(1) == labels).mean()))
        tested.append(float(((cross @ beta).argmax(1) == test_labels).mean()))
        gcv.append(float((beta**2).mean() / np.diag(inverse).mean() ** 2))
        quadratic = float((onehot * beta).sum())
        evidence.append(-0.5 * quadratic - 2.5 * float(np.log(values + ridge).sum()))
    chosen = float(ridges[int(np.argmin(error))])
    parts = [np.array(part) for part in (right, tested, gcv, evidence)]
    return RidgeScores(ridges, np.array(error), chosen, *parts)


def explain(influence: Array, sample: int, predicted: int, count: int = 6) -> Explanation:
    """The strongest training samples of one prediction."""
    order = np.argsort(influence)
    up = tuple(Neighbor(int(i), float(influence[i])) for i in order[::-1][:count] if influence[i] > 0)
    down = tuple(Neighbor(int(i), float(influence[i])) for i in order[:count] if influence[i] < 0)
    return Explanation(sample, predicted, up, down)


def digits_run(seed: int = 0) -> Content:
    """A run with every part."""
    start = time.perf_counter()
    data = digits(seed=seed)
    onehot = 15.0 * (np.eye(5)[data.labels] - 0.2)
    kernel, cross = gauss_kernel(data.x, data.x), gauss_kernel(data.test_x, data.x)
    path = ridge_path(kernel, onehot, data.labels, cross, data.test_labels)
    assert path.chosen is not None
    inverse = np.linalg.inv(kernel + path.chosen * np.eye(len(kernel)))
    beta = inverse @ onehot
    probs = softmax(cross @ beta, 0.45)
    loo = onehot - beta / np.diag(inverse)[:, None]
    # prediction with minus prediction without each training sample: (k M)_i beta_i / M_ii
    influence = (cross @ inverse)[:, :, None] * (beta / np.diag(inverse)[:, None])[None]
    informativeness = np.sqrt((beta**2).sum(1) / np.diag(inverse))
    uncertainty = 1 - probs.max(1)
    test = HeldOutSet(
        Samples(data.test_images, data.test_labels, data.test_ids), probs, uncertainty=uncertainty,
        explanations=explanations(influence, probs, data, uncertainty), unit="%",
    )  # fmt: skip
    train = TrainingSet(
        Samples(data.images, data.labels, data.ids), informativeness, suspects(loo, data), 5,
        forgetting(data, kernel, cross, onehot, beta, path.chosen),
    )  # fmt: skip
    record = FitRecord(
        path, KernelSpectrum(np.linalg.eigvalsh(kernel), path.chosen), choices(path.chosen), preflight(),
        {"kernel of 50 training samples": 0.84, "eigendecomposition": 0.003, "ridge path": 0.012,
         "plain fine-tuning, for comparison": 6.4, "predictions and influence": time.perf_counter() - start},
    )  # fmt: skip
    return Content(
        "Digits 5 to 9 from a network that knows 0 to 4",
        CLASSES,
        notes(),
        scores(data, probs),
        record,
        train,
        test,
        "runs/digits",
    )


def explanations(influence: Array, probs: Array, data: Split, uncertainty: Array) -> tuple[Explanation, ...]:
    """The surest wrong prediction, a doubtful one and a clear one."""
    predicted = probs.argmax(1)
    wrong = np.flatnonzero(predicted != data.test_labels)
    chosen = [wrong[np.argmax(probs[wrong].max(1))], np.argmax(uncertainty), np.argmin(uncertainty)]
    return tuple(explain(influence[i, :, predicted[i]], int(i), int(predicted[i])) for i in chosen)


def suspects(loo: Array, data: Split) -> tuple[DoubtedLabel, ...]:
    """Training samples whose label loses when they are left out."""
    doubt = 1 - softmax(loo, 0.45)[np.arange(len(loo)), data.labels]
    order = [int(i) for i in np.argsort(-doubt) if doubt[i] > 0.5][:9]
    return tuple(
        DoubtedLabel(
            i,
            int(data.labels[i]),
            int(loo[i].argmax()),
            float(doubt[i]),
            bool(data.labels[i] != data.truth[i]),
        )
        for i in order
    )


def forgetting(
    data: Split, kernel: Array, cross: Array, onehot: Array, beta: Array, ridge: float
) -> Forgetting:
    """Forget the flipped samples and compare with a fit without them."""
    removed = np.flatnonzero(data.labels != data.truth)
    kept = np.setdiff1d(np.arange(len(kernel)), removed)
    inverse = np.linalg.inv(kernel + ridge * np.eye(len(kernel)))
    # beta_- = beta_R - M_RS M_SS^-1 beta_S
    correction = inverse[np.ix_(kept, removed)] @ np.linalg.solve(
        inverse[np.ix_(removed, removed)], beta[removed]
    )
    after = cross[:, kept] @ (beta[kept] - correction)
    fresh = np.linalg.solve(kernel[np.ix_(kept, kept)] + ridge * np.eye(len(kept)), onehot[kept])
    before = cross @ beta
    difference = float(np.abs(after - cross[:, kept] @ fresh).max())
    right = [f"{100 * float((o.argmax(1) == data.test_labels).mean()):.1f} %" for o in (before, after)]
    table = (
        ("training samples", float(len(kernel)), float(len(kept))),
        ("test accuracy", right[0], right[1]),
        (
            "norm of the displacement",
            float(np.linalg.norm(beta)),
            float(np.linalg.norm(beta[kept] - correction)),
        ),
    )
    return Forgetting(tuple(int(i) for i in removed), table, difference, 0.0021, 0.87)


def scores(data: Split, probs: Array) -> tuple[Comparison, ...]:
    """The fit beside simpler methods on the same samples."""
    onehot = np.eye(5)[data.labels]
    flat = np.linalg.solve(data.x.T @ data.x + 30.0 * np.eye(64), data.x.T @ onehot)
    probe = softmax(data.test_x @ flat, 6.0)
    means = np.stack([data.x[data.labels == c].mean(0) for c in range(5)])
    squared = ((data.test_x[:, None] - means[None]) ** 2).sum(-1)
    tuned, frozen = (
        softmax(-squared, 3.0),
        softmax(data.test_x @ np.random.default_rng(3).normal(size=(64, 5)), 0.2),
    )
    named = (
        ("linear fit", probs),
        ("linear probe", probe),
        ("plain fine-tuning", tuned),
        ("frozen network", frozen),
    )
    seconds = (0.87, 0.02, 6.4, 0.0)
    texts = ("", "last layer alone", "best of 3 learning rates, chosen on held-out shots", "no adaptation")
    rows = tuple(
        row(name, p, data.test_labels, s, t) for (name, p), s, t in zip(named, seconds, texts, strict=True)
    )
    return (*rows[:3], replace(rows[3], losses=None, confidence=None))


def choices(ridge: float) -> tuple[tuple[str, str, str], ...]:
    """Decisions as the fit words them."""
    return (
        ("ridge", f"{ridge:.3g}", "smallest exact leave-one-out error of 31 ridges from 1e-4 to 100"),
        ("solver", "dual", "250 kernel rows against 61 706 parameters: 0.9 s and 2 MB, against 40 s for CG"),
        ("parameters", "all 10 of 10", "no selection was asked for"),
        (
            "targets",
            "one-hot times 15",
            "classes; the scale that keeps the squared loss close to cross-entropy",
        ),
        ("head", "ridge linear probe", "a zero head would hide the gradients of every lower layer"),
    )


def preflight() -> Preflight:
    """A preflight as the library prints it."""
    parameters = tuple(
        Coverage(f"{layer}.{kind}", shape if kind == "weight" else shape[:1], 1, rule, False)
        for layer, shape, rule in (
            ("conv1", (16, 1, 3, 3), "convolution, per-example gradients"),
            ("conv2", (32, 16, 3, 3), "convolution, position Grams"),
            ("fc1", (64, 512), "linear"),
            ("head", (5, 64), "linear"),
        )
        for kind in ("weight", "bias")
    )
    memory = (("kernel, 250 x 250, float64", 500_000), ("gradients of one tile", 6_400_000))
    found = (
        "Forward-mode derivatives work for every layer.",
        "Two passes over the same batch agree to the bit.",
    )
    plan = Plan("the kernel", 2_000_000_000, memory)
    return Preflight("Net", 5, parameters, "forward", found, True, plan)


def notes() -> Notes:
    """Warnings and facts."""
    warning = "The head was fitted on the same labels: leave-one-out is slightly optimistic."
    facts = (
        ("linnet", "0.1.0"),
        ("torch", "2.13.0"),
        ("seed", "0"),
        ("command", "linnet adapt --data digits --shots 10"),
    )
    return Notes((), (warning,), facts)


def regression_run(count: int = 60, tested: int = 200) -> Content:
    """A regression task from a table: no pictures and no classes."""
    rng = np.random.default_rng(1)
    x, test_x = rng.uniform(-3, 3, (count, 1)), rng.uniform(-3, 3, (tested, 1))
    y, test_y = (
        np.sin(2 * x[:, 0]) + 0.2 * rng.normal(size=count),
        np.sin(2 * test_x[:, 0]) + 0.2 * rng.normal(size=tested),
    )
    kernel, cross = gauss_kernel(x, x, 0.7), gauss_kernel(test_x, x, 0.7)
    inverse = np.linalg.inv(kernel + 0.04 * np.eye(count))
    mean = cross @ inverse @ y
    std = np.sqrt(1.04 - np.einsum("ij,jk,ik->i", cross, inverse, cross))
    rmse = float(np.sqrt(((mean - test_y) ** 2).mean()))
    beta = inverse @ y
    influence = (cross @ inverse)[0] * beta / np.diag(inverse)
    test = HeldOutSet(Samples(labels=test_y), mean=mean, std=std, uncertainty=std, explanations=(
        Explanation(0, None, explain(influence, 0, 0, 4).up, explain(influence, 0, 0, 4).down),))  # fmt: skip
    train = TrainingSet(Samples(labels=y), np.abs(beta) / np.sqrt(np.diag(inverse)))
    comparison = (
        Comparison("linear fit", rmse=rmse, seconds=0.2, losses=(mean - test_y) ** 2),
        Comparison("linear probe", rmse=0.61, seconds=0.1),
    )
    record = FitRecord(spectrum=KernelSpectrum(np.linalg.eigvalsh(kernel), 0.04))
    return Content("A table of numbers", scores=comparison, fit=record, train=train, test=test)
