"""A fit that is watched in use: how often it is right on new batches, and whether they have drifted.

What a fit says of examples that it has not seen is known by leave-one-out. Each example of a batch is judged
by the fit without one training example, another one for each, as each training example is judged by the fit
without itself. If both come from one source, all of these judgments have the same distribution, and which
of them are the batch's is not to be told: a permutation test compares the variances, the confidences and the
predictions of the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from linnet.audit.predictors import check_fitted, unweighed
from linnet.errors import InputError
from linnet.fitting.fitted import Fitted
from linnet.params import integer, number, refuse
from linnet.shown import Record
from linnet.tangent.batch import Inputs, batch_size, yields
from linnet.tangent.data import as_new_inputs, items_of
from linnet.tangent.modes import in_exact_mode

DIGITS = 16  # binary ones of an output that count in comparisons
DRAWS = 499  # of the permutation test
CHUNK = 1 << 21  # numbers of its permutations at a time
REFERENCE = 2000  # training examples that a batch is compared with, at most


@dataclass(frozen=True, eq=False, repr=False)
class Watched(Record):
    """What is known of a batch without its labels; ``monitor`` makes it."""

    batch: int  # its place in the stream, from 0
    n: int  # its examples
    accuracy: float | None  # expected share of right predictions; None for a regression
    rms_error: float | None  # expected root mean square error of an output; None for classes
    standard_error: float  # of either, by the draw of the batch and of the training examples
    p_value: float  # how often a batch like the training examples looks as unlike them as this one
    drifted: bool  # whether that is at most the level
    leans: Tensor | None  # positions of the training examples that move its outputs most; None if not drifted

    def to_json(self) -> str:
        """A line for a log: all numbers, and ``leans`` as a list."""
        told = {**self._shown(), "leans": None if self.leans is None else self.leans.tolist()}
        return json.dumps(told)


@dataclass(frozen=True, eq=False)
class Unseen:
    """What is said of examples by fits that have not seen them."""

    outputs: Tensor  # (N, C)
    spread: Tensor | None  # mean variance of the outputs, (N,); None where only held-out folds are known
    p: Tensor | None  # probabilities of classes by the outputs, (N, K); None for a regression

    def taken(self, at: Tensor) -> Unseen:
        """Some of the examples."""
        spread, p = (None if one is None else one[at] for one in (self.spread, self.p))
        return Unseen(self.outputs[at], spread, p)

    @property
    def groups(self) -> list[Tensor]:
        """What is compared: numbers (N,), of which the ranks count, or indicators of classes (N, K)."""
        known = [] if self.spread is None else [self.spread]
        if self.p is None:
            return [*known, *_of_digits(self.outputs).unbind(1)]
        likeliest = self.p.max(1)
        return [*known, likeliest.values, F.one_hot(likeliest.indices, self.p.shape[1]).double()]


def _of_digits(outputs: Tensor) -> Tensor:
    """Outputs without the digits that rounding leaves, by which constant ones would have ranks."""
    largest = outputs.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny)
    step = 2.0 ** (largest.log2().floor() - DIGITS)
    return (outputs / step).round() * step


@dataclass(frozen=True, eq=False)
class Reference:
    """What a fit says of its training examples without having seen them."""

    unseen: Unseen
    right: Tensor  # whether the prediction is right, or its mean square error, (N,)
    left: Tensor | None  # V_j = J_j H₋ⱼ⁻¹ J_jᵀ, (N, C, C), or (N, 1, 1) where outputs share it

    @classmethod
    def of(cls, fit: Fitted) -> Reference:
        """By leave-one-out, or by held-out folds."""
        left = None if fit.held_out is not None else fit.system.loo_variances().double()
        outputs, labels = fit.loo().double(), fit.labels
        p = None if labels is None else fit._class_probs(outputs)
        spread = None if left is None else _mean_variance(fit, left)
        if labels is None or p is None:
            right = (fit.targets.to(outputs) - outputs).square().mean(1)
        else:
            right = (p.argmax(1) == labels.to(p.device)).double()
        return cls(Unseen(outputs, spread, p), right, left)


@in_exact_mode
@torch.no_grad()
def of_batch(fit: Fitted, reference: Reference, x: Inputs) -> Unseen:
    """Each example of a batch by the fit without one training example."""
    parts, begin = [], 0
    for _, left in fit._without_each(x):
        place = torch.arange(left.shape[1], device=left.device)
        parts.append(left[(begin + place) % len(left), place])
        begin += len(place)
    outputs = torch.cat(parts).double()
    p = None if fit.labels is None else fit._class_probs(outputs)
    if reference.left is None:
        return Unseen(outputs, None, p)
    return Unseen(outputs, _mean_variance(fit, _without_one(fit, reference.left, x)), p)


def _mean_variance(fit: Fitted, found: Tensor) -> Tensor:
    """Mean variance of the outputs, (N,), by J H⁻¹ Jᵀ, (N, C, C)."""
    return fit._unit * found.diagonal(dim1=1, dim2=2).mean(1).clamp_min(0)


def _without_one(fit: Fitted, left: Tensor, x: Inputs) -> Tensor:
    """J(x) H₋ⱼ⁻¹ J(x)ᵀ without training example j, another for each example; of shape as ``left``."""
    # S + A (Λⱼ + Λⱼ Vⱼ Λⱼ) Aᵀ with S = J(x) H⁻¹ J(x)ᵀ and A = J(x) H⁻¹ Jⱼᵀ, by the formula of Woodbury
    system, roots, c = fit.system, fit._roots, fit.system.c
    found = (system.covariance(x) / system.ridge).double()
    j = torch.arange(len(found), device=found.device) % system.n
    if left.shape[1] < c:  # A = a I: one output stands for all
        found, c, roots = found[:, :1, :1], 1, None if roots is None else roots[:, :1, :1]
    eye = torch.eye(c).to(found)
    curved = eye.expand(system.n, c, c) if roots is None else (roots @ roots.mT).to(found)
    columns = []
    for d in range(c):
        e = eye[d].expand(system.n, system.c).contiguous()
        begin, parts = 0, []
        for part in system.effects(x, e):
            place = torch.arange(part.shape[1], device=part.device)
            parts.append(part[j[begin + place], place, :c])
            begin += len(place)
        columns.append(torch.cat(parts).double())
    moved = torch.stack(columns, 2)
    return found + moved @ (curved + curved @ left.to(found) @ curved)[j] @ moved.mT


# -- whether a batch is like the training examples -------------------------------------------------


def compared(train: Unseen, batch: Unseen, draws: int = DRAWS) -> float:
    """The p-value of the largest difference of the two, by permutations of all their examples."""
    # Of each group the squared distance of the batch's mean to that of all; the least of their p-values is
    # compared with the least of each permutation (Westfall and Young 1993), so that all three count once.
    generator = torch.Generator().manual_seed(0)
    some = torch.randperm(len(train.outputs), generator=generator)[:REFERENCE]
    pairs = zip(train.taken(some.to(train.outputs.device)).groups, batch.groups, strict=True)
    groups = [_standard(torch.cat([a, b.to(a)]).cpu()) for a, b in pairs]
    size, n = len(groups[0]), len(batch.outputs)
    # Training examples are judged by each other: what a pair says of one it says of the other too, so that
    # the variance of their mean is up to twice that of as many independent ones (Hoeffding 1948).
    allowed = (2 / (size - n) + 1 / n) / (1 / (size - n) + 1 / n)
    rows = [torch.stack([group[-n:].mean(0).square().sum() / allowed for group in groups])[None]]
    for begin in range(0, draws, step := max(1, CHUNK // size)):
        count = min(step, draws - begin)
        index = torch.rand(count, size, generator=generator).argsort(1)[:, :n]
        mask = torch.zeros(count, size, dtype=torch.float64).scatter_(1, index, 1 / n)
        rows.append(torch.stack([(mask @ group).square().sum(1) for group in groups], 1))
    found = torch.cat(rows)
    least = torch.stack([_shares_above(one) for one in found.unbind(1)]).amin(0)
    return float((least <= least[0]).double().mean())


def _standard(values: Tensor) -> Tensor:
    """Columns of mean 0 and variance 1: those given, or of the ranks and their squares."""
    if values.ndim == 1:
        ordered = values.sort().values.contiguous()
        ends = [torch.searchsorted(ordered, values.contiguous(), right=right) for right in (False, True)]
        ranks = (ends[0] + ends[1]).double() / len(values) - 1
        values = torch.stack([ranks, ranks.square()], 1)
    values = values - values.mean(0)
    deviation = values.std(0, correction=0)
    return values / torch.where(deviation > 1e-9, deviation, torch.inf)


def _shares_above(values: Tensor) -> Tensor:
    """The share of the values that are as large as each, itself among them."""
    ordered = values.sort().values.contiguous()
    rounding = 1e-9 * values.abs().clamp_min(1e-9)
    return 1 - torch.searchsorted(ordered, (values - rounding).contiguous()).double() / len(values)


# -- records ---------------------------------------------------------------------------------------


def _expected(fit: Fitted, reference: Reference, x: Inputs) -> tuple[float, float]:
    """The accuracy, or the root mean square error, with its standard error."""
    prediction, unseen = fit.predictive(x), reference.unseen
    if unseen.p is not None:
        p = prediction.probs.double().amax(1)
        off = reference.right - unseen.p.amax(1)
        return float(p.mean()), float(
            ((p * (1 - p)).mean() / len(p) + off.var(correction=0) / len(off)).sqrt()
        )
    squared = torch.ones_like(prediction.mean[:, 0], dtype=torch.float64)
    scale = reference.right.mean()
    if unseen.spread is not None:
        squared = prediction.variance.double().mean(1) + fit.noise
        scale = scale / (unseen.spread + fit.noise).mean()
    mean = scale * squared.mean()
    relative = reference.right.var(correction=0) / reference.right.mean().square()
    error = mean * (relative * (1 / len(squared) + 1 / len(reference.right))).sqrt()
    return float(mean.sqrt()), float(error / (2 * mean.sqrt()))


@in_exact_mode
@torch.no_grad()
def _record(fit: Fitted, reference: Reference, x: Inputs, place: int, level: float, top: int) -> Watched:
    """What is known of a batch."""
    value, error = _expected(fit, reference, x)
    p, classes = compared(reference.unseen, of_batch(fit, reference, x)), fit.labels is not None
    leans = fit.informativeness(x).topk(min(top, fit.n)).indices if p <= level else None
    accuracy, rms = (value, None) if classes else (None, value)
    return Watched(place, batch_size(x), accuracy, rms, error, p, p <= level, leans)


def monitor(fit: Fitted, batches: Any, *, level: float = 0.05, top: int = 10) -> Iterator[Watched]:
    """Watch a fit in use: a record for each batch of new examples, without labels.

    The expected accuracy is the mean of the largest probabilities of ``fit.predictive(x)``, whose temperature
    is fitted to leave-one-out predictions and which have less confidence where the variance is larger. It
    is right on batches like the training examples. Under a shift it falls less than the accuracy does, so
    that of a batch that drifted it is an upper bound more than an estimate.

    ``drifted`` says that variances, confidences or predictions differ from those of leave-one-out by a
    permutation test, which allows for training examples that are judged by each other. Where both are draws
    from one source, at most about ``level`` of the batches are alarms, however few the examples; that ridge
    and temperature are chosen by the same examples has changed little where it was measured. A batch with
    other shares of the classes has drifted. Where the head was cross-fitted or the lower layers were trained,
    held-out folds take the place of leave-one-out, variances are not compared, and nothing is promised.

    Args:
        fit: A fit of ``linnet.adapt`` or ``linnet.fit``, of either loss, with one class or target (C,) for
            each example.
        batches: A ``DataLoader``, a list or another iterable of batches of inputs, each as the network takes
            them; targets in (x, y) batches are not looked at. A tensor, dict or array is one batch.
        level: Share of batches without a shift that may be alarms, each batch by itself.
        top: Number of training examples that a drifted batch is traced to.

    Returns:
        An iterator over records, one when each batch comes: ``accuracy`` of classes or ``rms_error`` of
        values with its ``standard_error``, ``p_value``, ``drifted``, and of drifted batches ``leans``, the
        positions of the training examples whose removal would change its outputs most, largest first.
        ``to_json()`` is a line of JSON.

    Raises:
        InputError: If the fit has no leave-one-out that is honest: one of positions, or of trained layers
            without held-out outputs; if training examples have weights; if ``level`` is no share, or ``top``
            no positive integer.
        DataError: At a batch that is empty or not finite.

    Source:
        Barber et al., Annals of Statistics 49 (2021), for fits without one example; Westfall and Young (1993)
        for several tests at once; Hoeffding (1948) for means over pairs; Guo et al., ICML 2017, for the
        temperature.

    Example:
        >>> import linnet
        >>> x = torch.randn(150, 2, generator=torch.Generator().manual_seed(0))
        >>> fit = linnet.adapt(torch.nn.Linear(2, 2), (x[:50], (x[:50, 0] > 0).long()))
        >>> [batch.drifted for batch in monitor(fit, [x[50:], x[50:] + 3])]
        [False, True]
    """
    fit = check_fitted(fit)
    level = number("level", level, above=0, below=1, remedy="pass 0.05 for one false alarm in twenty")
    top = integer("top", top)
    fit._require_one_target("monitor()")
    unweighed(fit, "monitor()")
    if fit.trained and fit.held_out is None:
        raise InputError(
            "monitor() of a fit whose lower layers were trained, without held-out outputs",
            expected="outputs by a procedure that has not seen the example",
            remedy="adapt again with tune=True, or with tune=False",
        )
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        refuse("batches", batches, "batches of examples", "pass a DataLoader of it, with batch_size=")
    if not isinstance(batches, list) and not yields(batches):
        batches = [batches]
    reference = Reference.of(fit)
    return (
        _record(fit, reference, fit._examples(as_new_inputs(item)[0]), place, level, top)
        for place, item in enumerate(items_of(batches))
    )
