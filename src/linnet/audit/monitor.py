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
from torch.utils.data import Dataset, IterableDataset

from linnet.audit.left_out import EXAMPLES, Reference, Unseen, check_left_out, confidence, of_batch
from linnet.audit.stress import Shifts, references
from linnet.fitting.fitted import Fitted
from linnet.params import integer, number, refuse
from linnet.predictive.gaussian import GaussianPredictive
from linnet.shown import Record
from linnet.tangent.batch import Inputs, batch_size, yields
from linnet.tangent.data import as_new_inputs, items_of
from linnet.tangent.modes import in_exact_mode

DRAWS = 499  # of the permutation test
CHUNK = 1 << 21  # numbers of its permutations at a time


@dataclass(frozen=True, eq=False, repr=False)
class Watched(Record):
    """What is known of a batch without its labels; ``monitor`` makes it."""

    batch: int  # its place in the stream, from 0
    n: int  # its examples
    accuracy: float | None  # expected share of right predictions; None for a regression
    rms_error: float | None  # expected root mean square error of an output; None for classes
    # of either, by the draw of the batch and of the training examples: of 30 values a quarter too small
    standard_error: float
    p_value: float  # how often a batch like the training examples looks as unlike them as this one
    drifted: bool  # whether that is at most the level
    like: str | None  # the named shift that it most likely met; None if not drifted, or like none of them
    share: float | None  # the share of it that did; None if not drifted, or no shift was named
    explained: float | None  # how much of the drift that explains, from 0 to 1, or None as above
    leans: Tensor | None  # positions of the training examples that move its outputs most; None if not drifted

    def to_json(self) -> str:
        """A line for a log: all numbers, and ``leans`` as a list."""
        told = {**self._shown(), "leans": None if self.leans is None else self.leans.tolist()}
        return json.dumps(told)


# -- whether a batch is like the training examples -------------------------------------------------


def compared(train: Unseen, batch: Unseen, draws: int = DRAWS) -> float:
    """The p-value of the largest difference of the two, by permutations of all their examples."""
    # Of each group the squared distance of the batch's mean to that of all; the least of their p-values is
    # compared with the least of each permutation (Westfall and Young 1993), so that all three count once.
    generator = torch.Generator().manual_seed(0)
    some = torch.randperm(len(train.outputs), generator=generator)[:EXAMPLES]
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


@dataclass(frozen=True, eq=False)
class Met:
    """The shift that a batch has most likely met."""

    like: Reference
    share: float  # of the batch that has
    explained: float  # share of the squared drift of its mean judgments that this explains


def likened(known: list[Reference], batch: Unseen) -> Met:
    """The shift of which a batch has most likely met some share: the nearest one."""
    # The means of a batch of which a share is shifted lie between those without and with the shift.
    rows, found = _judged(known[0].unseen), _judged(batch).mean(0)
    deviation = rows.std(0, correction=0)
    deviation = deviation.clamp_min(max(1e-3 * float(deviation.max()), 1e-12))
    start, best = rows.mean(0), Met(known[0], 0.0, 0.0)
    off = (found - start) / deviation
    for one in known[1:]:
        same = rows if one.at is None else rows[one.at]
        way = (_judged(one.unseen) - same).mean(0) / deviation
        share = float((off @ way / way.square().sum().clamp_min(1e-300)).clamp(0, 1))
        left = (off - share * way).square().sum() / off.square().sum().clamp_min(1e-300)
        if 1 - float(left) > best.explained + 1e-6:  # more than rounding does
            best = Met(one, share, 1 - float(left))
    return best


def _judged(unseen: Unseen) -> Tensor:
    """Outputs, the logarithm of their variance, and the confidence as a logit, (N, C + 2)."""
    columns = [unseen.outputs]
    if unseen.spread is not None:
        columns.append(unseen.spread.clamp_min(1e-12).log()[:, None])
    if unseen.p is not None:
        columns.append(unseen.p.amax(1).logit(1e-4)[:, None])
    return torch.cat(columns, 1)


def expected(fit: Fitted, known: Reference, prediction: GaussianPredictive, met: Met) -> tuple[float, float]:
    """The accuracy, or the root mean square error, with its standard error, of which a share is shifted."""
    like, share = met.like, met.share
    if known.unseen.p is not None:
        p = prediction.probs.double().amax(1)
        variance = (p * (1 - p)).mean() / len(p)
        off = known.right - known.unseen.p.amax(1)
        value, variance = p.mean(), variance + (1 - share) ** 2 * off.var(correction=0) / len(off)
        if share:  # by how much confidence is off under the shift is known and not guessed
            off = like.right - confidence(fit, like.unseen)
            value = value + share * off.mean()
            variance = variance + share**2 * off.var(correction=0) / len(off)
        return float(value.clamp(0, 1)), float(variance.sqrt())
    squared = torch.ones_like(prediction.mean[:, 0], dtype=torch.float64)
    if known.unseen.spread is not None:
        squared = prediction.variance.double().mean(1) + fit.noise
    total = expected_total = within = between = 0.0
    for one, part in ((known, 1 - share), (like, share)):
        spread, spreads = one.unseen.spread, float(one.right.var(correction=0))
        total += part * float(one.right.mean())
        expected_total += part * (1.0 if spread is None else float((spread + fit.noise).mean()))
        within += part * spreads / len(squared)
        between += part**2 * spreads / len(one.right)
    mean = total / max(expected_total, 1e-300) * squared.mean()
    if not float(mean):
        return 0.0, 0.0
    error = mean * (within + between) ** 0.5 / total
    return float(mean.sqrt()), float(error / (2 * mean.sqrt()))


@in_exact_mode
@torch.no_grad()
def _record(fit: Fitted, known: list[Reference], x: Inputs, place: int, level: float, top: int) -> Watched:
    """What is known of a batch."""
    batch, classes = of_batch(fit, known[0], x), fit.labels is not None
    p = compared(known[0].unseen, batch)
    met, leans = Met(known[0], 0.0, 0.0), None
    if p <= level:
        met = likened(known, batch)
        leans = fit.informativeness(x).topk(min(top, fit.n)).indices
    value, error = expected(fit, known[0], fit.predictive(x), met)
    accuracy, rms = (value, None) if classes else (None, value)
    share, explained = (met.share, met.explained) if p <= level and known[1:] else (None, None)
    like = met.like.shift if share else None
    return Watched(place, batch_size(x), accuracy, rms, error, p, p <= level, like, share, explained, leans)


def monitor(
    fit: Fitted, batches: Any, *, shifts: Shifts | None = None, level: float = 0.05, top: int = 10
) -> Iterator[Watched]:
    """Watch a fit in use: a record for each batch of new examples, without labels.

    The expected accuracy is the mean of the largest probabilities of ``fit.predictive(x)``, whose temperature
    is fitted to leave-one-out predictions and which have less confidence where the variance is larger. It
    is right on batches like the training examples. Under a shift it falls less than the accuracy does, so
    that of a batch that drifted it is an upper bound more than an estimate.

    With ``shifts`` the mean outputs, variances and confidences of a drifted batch are compared with those of
    the training examples under each shift: ``like`` is the shift that comes nearest, ``share`` the part of
    the batch that then met it, and ``explained`` how much of the drift that accounts for. By how much
    confidence is off under it is known, as ``linnet.audit.stress_test`` knows it, and is taken off: under a
    shift that was named, in about its strength, the expected accuracy is as good as without any. Where less
    than about 0.9 is explained the batch has probably met something else, and the accuracy is a guess; where
    more is it may still be one, if what was met looks like what was named.

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
        shifts: What inputs may meet in use, by name: functions of training inputs, or the training inputs
            altered, as ``linnet.audit.stress_test`` takes them.
        level: Share of batches without a shift that may be alarms, each batch by itself.
        top: Number of training examples that a drifted batch is traced to.

    Returns:
        An iterator over records, one when each batch comes: ``accuracy`` of classes or ``rms_error`` of
        values with its ``standard_error``, ``p_value``, ``drifted``, and of drifted batches the shift that
        they are ``like``, their ``share`` of it, what that has ``explained``, and ``leans``, the positions of
        the training examples whose removal would change their outputs most, largest first. ``to_json()`` is a
        line of JSON.

    Raises:
        InputError: If the fit has no leave-one-out that is honest: one of positions, or of trained layers
            without held-out outputs; if training examples have weights; if there are ``shifts`` and no closed
            form for examples left out; if ``level`` is no share, or ``top`` no positive integer.
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
    fit = check_left_out(fit, "monitor()")
    level = number("level", level, above=0, below=1, remedy="pass 0.05 for one false alarm in twenty")
    top = integer("top", top)
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        refuse("batches", batches, "batches of examples", "pass a DataLoader of it, with batch_size=")
    if not isinstance(batches, list) and not yields(batches):
        batches = [batches]
    known = [reference := Reference.of(fit)]
    if shifts is not None:
        known += references(fit, reference, shifts)
    return (
        _record(fit, known, fit._examples(as_new_inputs(item)[0]), place, level, top)
        for place, item in enumerate(items_of(batches))
    )
