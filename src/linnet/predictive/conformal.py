"""Intervals and sets that hold new targets as often as is asked for, whatever their distribution.

Each training example is predicted by the fit without it, which says how far off predictions are; and each
new example by all of those fits. Both come from one solve, so that no example is set apart for calibration.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.params import flag, integer, number, refuse, tensor
from linnet.predictive.model import PredictiveModel
from linnet.tangent.batch import Inputs, batch_size, hash_examples
from linnet.tangent.modes import in_exact_mode

ROUNDING = 1e-9  # of a share of a count: 0.7 of ten is seven


def share_of(coverage: float) -> float:
    """A coverage that was given, or an error."""
    return number("coverage", coverage, above=0, below=1, remedy="pass 0.9 for nine in ten")


def needed(coverage: float) -> int:
    """The fewest examples of which one more may be the furthest off and not be held."""
    return math.ceil(coverage / (1 - coverage) - ROUNDING)


def rank(n: int, coverage: float) -> int:
    """The place of a new example's error among those of n others that it is below so often, from 1."""
    return max(1, math.ceil(coverage * (n + 1) - ROUNDING))


def require_enough(n: float, coverage: float) -> None:
    """Raise where so few examples, each as often as it counts, cannot tell what is so seldom."""
    if coverage * (n + 1) - ROUNDING > n:
        raise InputError(
            f"coverage={coverage!r} from {n:g} examples"
            + (" by their weights" if isinstance(n, float) else ""),
            expected=f"{needed(coverage):,} examples or more",
            remedy=f"pass coverage={math.floor(1000 * n / (n + 1)) / 1000:g} or less, or fit more examples",
        )


@dataclass(frozen=True, eq=False)
class Counts:
    """How often examples count: by their weights in the loss, and where new inputs are others than these."""

    known: Tensor  # of the training examples, (N,)
    new: Tensor  # of the new ones beside these, (T,), or (1,) for all

    def part(self, begin: int, end: int) -> Counts:
        """For some of the new examples."""
        return self if len(self.new) == 1 else Counts(self.known, self.new[begin:end])


def counts_of(weights: Tensor | None, shift: Any, n: int, t: int) -> Counts | None:
    """How often N training and T new examples count; ``None`` where each counts once."""
    # weights (N,)
    if shift is None:
        return None if weights is None else Counts(weights, weights.new_ones(1))
    expected = f"a pair of positive numbers, one of each training example ({n},) and of each of x ({t},)"
    remedy = "pass how many times likelier each input is among the new ones than among those of the training"
    if not isinstance(shift, tuple | list) or len(shift) != 2:
        refuse("shift", shift, expected, remedy)
    found = []
    for given, length in zip(shift, (n, t), strict=True):
        one = tensor("shift", given, expected, remedy).detach()
        if one.dtype == torch.bool or one.shape != (length,) or not bool((one.isfinite() & (one > 0)).all()):
            refuse("shift", given, expected, remedy)
        found.append(one.double())
    known, new = found
    mean = known.mean()
    known, new = known / mean, new / mean
    if weights is not None:
        known = known.to(weights.device) * weights
    return Counts(known, new.to(known.device))


def jackknife(left: Tensor, errors: Tensor, coverage: float, counts: Counts | None = None) -> Tensor:
    """Lower and upper ends of intervals, (T, C, 2), by the outputs of each fit without one example."""
    # left (N, T, C) or (1, T, C), errors (N, C) ≥ 0
    # Source: Barber et al., Annals of Statistics 49 (2021), equation (1.4); with other inputs Prinster, Liu
    # and Saria, NeurIPS 2022
    if counts is not None:
        below, upper = (_least(sign * left + errors[:, None], counts, coverage) for sign in (-1, 1))
        return torch.stack([-below, upper], 2)
    n = len(errors)
    above = rank(n, coverage)
    lower = (left - errors[:, None]).kthvalue(n + 1 - above, 0).values
    upper = (left + errors[:, None]).kthvalue(above, 0).values
    return torch.stack([lower, upper], 2)


def _least(values: Tensor, counts: Counts, coverage: float) -> Tensor:
    """The least value that examples of enough weight do not exceed, the new one among them, (T, C)."""
    # values (N, T, C)
    ordered, order = values.sort(0)
    weights, new = counts.known.to(values), counts.new.to(values)[:, None]
    fewer = weights[order].cumsum(0) < coverage * (weights.sum() + new) - ROUNDING
    every = torch.cat([ordered, torch.full_like(ordered[:1], math.inf)])  # where all together are not enough
    return every.gather(0, fewer.sum(0, keepdim=True))[0]


def drawn(x: Inputs, seed: int) -> list[float]:
    """A number between 0 and 1 for each example, the same wherever it comes, and as good as random."""
    names = [f"{seed} {name}".encode() for name in hash_examples(x)]
    return [int(hashlib.sha256(name).hexdigest()[:13], 16) / 16**13 for name in names]


def scores(p: Tensor, draws: Tensor) -> Tensor:
    """The probability of the classes likelier than each, and a random share of its own, like p."""
    # p (..., C), draws (..., 1) between 0 and 1
    # Source: Romano, Sesia and Candès, NeurIPS 2020, equation (5)
    ordered, order = p.sort(descending=True, stable=True)
    found = ordered.cumsum(-1) - (1 - draws) * ordered
    return torch.empty_like(found).scatter_(-1, order, found)


def held(
    left: Tensor, own: Tensor, labels: Tensor, coverage: float, by_class: bool, counts: Counts | None = None
) -> Tensor:
    """The classes that are no more unusual for an example than others were for theirs, (T, C) bool."""
    # left (N, T, C) or (1, T, C): scores of classes by each fit without one example; own and labels (N,)
    # Source: Romano, Sesia and Candès, NeurIPS 2020, equation (13); with other inputs Tibshirani, Barber,
    # Candès and Ramdas, NeurIPS 2019
    beyond = own[:, None, None] < left  # (N, T, C)
    new = 1 if counts is None else counts.new.to(own)[:, None]

    def total(of: Tensor) -> Tensor:
        """How often examples count that something is true of."""
        return of.sum(0) if counts is None else torch.tensordot(counts.known.to(own), of.to(own), 1)

    if not by_class:
        return total(beyond) < coverage * (total(torch.ones_like(own)) + new) - ROUNDING
    of_class = labels[:, None] == torch.arange(left.shape[2], device=labels.device)  # (N, C)
    return total(beyond & of_class[:, None]) < coverage * (total(of_class) + new) - ROUNDING


@dataclass(frozen=True, eq=False)
class Unseen:
    """What a model says of each training example without having seen it."""

    x: Inputs  # N examples
    outputs: Tensor  # (N, C)
    targets: Tensor  # (N, C)
    labels: Tensor | None  # class indices (N,), or ``None`` for values
    probs: Callable[[Tensor], Tensor]  # probabilities of classes by outputs (N, C)
    weights: Tensor | None = None  # of the loss, (N,)
    factor: float = 1.0  # by what errors of values are raised since the ridge was chosen by the same examples

    @property
    def count(self) -> float:
        """How many examples they count as: with weights as many as tell as much where they are equal."""
        return len(self.outputs) if self.counts is None else float(self.counts.sum())

    @property
    def counts(self) -> Tensor | None:
        """How often each counts, (N,): by its weight, in all (Σw)² / Σw² times."""
        w = self.weights
        return None if w is None else w * (w.sum() / w.square().sum())

    @property
    def counts_of_class(self) -> Tensor | None:
        """The same where the examples of each class are asked for themselves."""
        w, labels = self.weights, self.labels
        if w is None or labels is None:
            return None
        empty = w.new_zeros(int(labels.max()) + 1)
        total, squares = (empty.index_add(0, labels, one) for one in (w, w.square()))
        return w * (total / squares.clamp_min(torch.finfo(w.dtype).tiny))[labels]


class CoveringModel(PredictiveModel):
    """Base class of models that are known without each training example: intervals and sets of targets."""

    @abstractmethod
    def _examples(self, x: Inputs) -> Inputs:
        """Examples on the network's device, or an error."""

    @abstractmethod
    def _unseen(self) -> Unseen:
        """Outputs for each training example by what has not seen it, all of which count."""

    @abstractmethod
    def _without_each(self, x: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs of some examples at a time, (t, C), and by each fit without one of its own, (N, t, C)."""
        # the second (1, t, C), the same outputs, where only held-out folds are known

    @in_exact_mode
    def interval(self, x: Inputs, coverage: float = 0.9, *, shift: Any = None) -> Tensor:
        """Intervals that hold new targets as often as ``coverage`` says, by the fits without each example.

        The jackknife+, in closed form: no noise model, and no examples set apart. Where new examples are like
        those of the training, it holds at least 2·coverage − 1 of their targets, whatever their distribution,
        and about ``coverage``; the first is proved where examples count alike and nothing was chosen by them,
        as in ``linnet.fit`` at a ridge that is given. With weights they count by these, in all as
        (Σw)² / Σw² examples. Where the ridge was chosen, errors are raised by the fourth root of
        ``record.noise_factor``. Where the head was cross-fitted or the lower layers were trained, it is f(x)
        and the errors on held-out folds.

        Args:
            x: T examples.
            coverage: Share of new targets that are to be held, above 0 and below 1.
            shift: Where the new inputs are distributed otherwise than those of the training: how many times
                likelier each input is among the new ones, in any unit, as a pair, of the training examples
                (N,) and of x (T,). Known, or by a classifier of the two: p / (1 − p).

        Returns:
            Lower and upper ends, (T, C, 2), of each output alone; infinite where ``shift`` leaves too little
            that is like the example.

        Raises:
            DataError: If x is empty or not finite.
            InputError: If the fit is of classes, ``coverage`` is no such share, or the examples are too few
                for it: coverage / (1 − coverage) are needed.

        Source:
            Barber, Candès, Ramdas and Tibshirani, Annals of Statistics 49 (2021), equation (1.4); with
            ``shift`` Prinster, Liu and Saria, NeurIPS 2022.

        Example:
            >>> import linnet
            >>> x = torch.linspace(-1, 1, 40).view(20, 2)
            >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            >>> fit = linnet.fit(linnet.linearize(net), (x, x[:, :1].sin()))
            >>> fit.interval(x[:3], coverage=0.8).shape
            torch.Size([3, 1, 2])
        """
        coverage, unseen = share_of(coverage), self._unseen()
        if unseen.labels is not None:
            raise InputError("interval() of a fit of classes", "a fit of values", "take sets() for classes")
        require_enough(unseen.count, coverage)
        errors = unseen.factor * (unseen.targets.to(unseen.outputs) - unseen.outputs).abs()
        x, found, begin = self._examples(x), [], 0
        counts = counts_of(unseen.counts, shift, len(errors), batch_size(x))
        for _, left in self._without_each(x):
            end = begin + left.shape[1]
            found.append(jackknife(left, errors, coverage, counts and counts.part(begin, end)))
            begin = end
        return torch.cat(found).to(unseen.targets.dtype)

    @in_exact_mode
    def sets(
        self,
        x: Inputs,
        coverage: float = 0.9,
        by_class: bool = False,
        seed: int = 0,
        *,
        empty: bool = False,
        shift: Any = None,
    ) -> Tensor:
        """Sets of classes that hold the right one as often as ``coverage`` says, by the fits without each.

        A class is in the set of an example unless the probability of the likelier ones is higher than it was
        for that share of the training examples, each by the fit without it. The likeliest class is always in,
        so that a fit that is right more often than ``coverage`` holds more, unless sets may be ``empty``.
        Nothing is proved, as the
        temperature of the probabilities, and mostly the ridge, were chosen by the same examples. Of weights
        and of held-out folds the same is true as in ``interval``.

        Args:
            x: T examples.
            coverage: Share of right classes that are to be held, above 0 and below 1.
            by_class: Whether each class is to be held so often, not the mean of all; classes of fewer than
                coverage / (1 − coverage) examples are then in every set.
            seed: Of the draws by which the last class of a set is in it or not; those of an example are the
                same wherever it comes.
            empty: Whether the likeliest class too is left out of its set where that is drawn, so that about
                ``coverage`` is held, and not more where the fit is right more often. Sets without a class are
                of examples of which the fit is surest, and do not tell that x is unusual.
            shift: As in ``interval``.

        Returns:
            Whether each class is in the set, (T, C) of bool. Classes without an example are in none.

        Raises:
            DataError: If x is empty or not finite.
            InputError: If the fit is of values, or of positions with a class each, ``coverage`` is no such
                share, or the examples are too few for it.

        Source:
            Romano, Sesia and Candès, NeurIPS 2020, equations (5) and (13).

        Example:
            >>> import linnet
            >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
            >>> fit = linnet.fit(linnet.linearize(torch.nn.Linear(2, 2)), (x, (x[:, 0] > 0).long()))
            >>> fit.sets(torch.tensor([[3.0, 0.0], [-3.0, 0.0]])).tolist()
            [[False, True], [True, False]]
        """
        coverage, seed = share_of(coverage), integer("seed", seed, least=0)
        by_class, empty, unseen = flag("by_class", by_class), flag("empty", empty), self._unseen()
        if unseen.labels is None:
            raise InputError(
                "sets() of a fit of values",
                expected="a fit of classes",
                remedy="take interval() for values",
            )
        x, n, labels = self._examples(x), len(unseen.outputs), unseen.labels
        if not by_class:
            require_enough(unseen.count, coverage)
        often = unseen.counts_of_class if by_class else unseen.counts
        counts = counts_of(often, shift, n, batch_size(x))
        u = unseen.outputs.new_tensor(drawn(unseen.x, seed) + drawn(x, seed))[:, None]
        p = unseen.probs(unseen.outputs)
        own = scores(p, u[:n]).gather(1, labels[:, None])[:, 0]
        found, begin, known = [], n, labels.bincount(minlength=p.shape[1]) > 0
        for outputs, left in self._without_each(x):
            many, t, _ = left.shape
            p = unseen.probs(left.flatten(0, 1)).view(many, t, -1)
            of_classes = scores(p, u[begin : begin + t])
            some = counts and counts.part(begin - n, begin - n + t)
            sets = held(of_classes, own, labels, coverage, by_class, some) & known
            likeliest = unseen.probs(outputs).argmax(1, keepdim=True)
            found.append(sets if empty else sets.scatter(1, likeliest, True))
            begin += t
        return torch.cat(found)
