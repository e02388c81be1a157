"""Per-example statistics of predictions, from which all scores are computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.params import choice, tensor

SCORES = ("entropy", "max-probability", "mutual-information")


@dataclass(frozen=True, eq=False)
class Judged:
    """Numbers of N examples, in float64 on the CPU, logarithms natural."""

    predicted: Tensor  # the most probable class, (N,)
    confidence: Tensor  # its probability, (N,)
    entropy: Tensor  # H[E p] of the mean probabilities, (N,)
    # E H[p] over samples of the probabilities, (N,), or `None` without samples
    expected_entropy: Tensor | None
    label: Tensor | None  # true class, (N,), or ``None`` where it is not known
    log_loss: Tensor | None  # −log p of the true class, (N,), or ``None``
    brier: Tensor | None  # Σ_c (p_c − [c is the true class])², (N,), or ``None``

    @property
    def n(self) -> int:
        """N."""
        return self.predicted.shape[0]

    @property
    def correct(self) -> Tensor:
        """Whether the most probable class is the true one, (N,) bool."""
        return self.predicted == self.known(self.label)

    def known(self, column: Tensor | None) -> Tensor:
        """A column that needs true classes."""
        if column is None:
            raise InputError(
                "the data had no labels",
                expected="data of (x, y) pairs for scores that compare with the true class",
                remedy="pass data=(x, y)",
            )
        return column

    def uncertainty(self, score: str) -> Tensor:
        """Uncertainty score of each prediction, (N,)."""
        choice("score", score, SCORES)
        if score == "entropy":
            return self.entropy
        if score == "max-probability":
            return -self.confidence
        if self.expected_entropy is None:
            raise InputError(
                "score='mutual-information' needs samples, but predict returns none",
                expected="samples of the probabilities (S, N, C)",
                remedy="return one set of probabilities a draw of the weights, stacked first",
            )
        # I[y; θ] = H[E p] − E H[p] ≥ 0 (Jensen), to rounding
        return (self.entropy - self.expected_entropy).clamp_min(0)

    def take(self, index: Tensor) -> Judged:
        """Some of the examples."""
        return self._mapped(lambda column: column[index])

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Judged:
        """The same with a function applied to every column."""
        columns = (getattr(self, field.name) for field in fields(self))
        return Judged(*(None if column is None else function(column) for column in columns))  # type: ignore[arg-type]


def judge(p: Tensor, y: Tensor | None, start: int = 0) -> Judged:
    """Compare class probabilities with true classes."""
    # p (N, C), y (N,)
    # A class of probability zero counts as the smallest number that the type of p can hold, so that one
    # underflow does not make the mean infinite: 103.3 nats in float32.
    smallest = torch.finfo(p.dtype).tiny * torch.finfo(p.dtype).eps
    samples = p[None] if p.ndim == 2 else p
    mean = samples.mean(0, dtype=torch.float64).clamp_min(0)
    expected = None
    if p.ndim == 3:
        expected = _stack_mean([_entropy(sample.double().clamp_min(0)) for sample in samples])
    confidence, predicted = mean.max(1)
    label = log_loss = brier = None
    if y is not None:
        label = check_labels(y, mean.shape[0], mean.shape[1], start).to(mean.device)
        own = mean.gather(1, label[:, None])[:, 0]
        log_loss = -own.clamp_min(smallest).log()
        # Σ_c (p_c − [c = y])² = Σ_c p_c² − 2 p_y + 1 suffers cancellation; the sum itself does not
        brier = (mean - torch.nn.functional.one_hot(label, mean.shape[1])).square().sum(1)
    found = Judged(predicted, confidence.clamp_max(1), _entropy(mean), expected, label, log_loss, brier)
    return found._mapped(lambda column: column.cpu())


def _entropy(p: Tensor) -> Tensor:
    """−Σ p log p, at most log C."""
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy.clamp(0, math.log(p.shape[-1]))


def _stack_mean(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).mean(0)


def join(parts: Sequence[Judged]) -> Judged:
    """The numbers of several batches, one after the other."""
    columns: list[Tensor | None] = []
    for field in fields(Judged):
        found = [getattr(part, field.name) for part in parts]
        present = [column for column in found if column is not None]
        if present and len(present) < len(found):
            what = "samples of the probabilities" if field.name == "expected_entropy" else "labels"
            raise InputError(
                f"only some batches have {what}", expected="all or none", remedy=f"add the {what}"
            )
        columns.append(torch.cat(present) if present else None)
    return Judged(*columns)  # type: ignore[arg-type]


def check_labels(y: Tensor, n: int, classes: int, start: int = 0) -> Tensor:
    """Labels as (N,) integers below C."""
    # y (N,)
    tensor("y", y, "integer classes (N,)", "pass y.long()")
    if y.dtype == torch.bool or y.is_floating_point() or y.is_complex():
        raise InputError(
            f"y has type {y.dtype}", expected="integer classes (N,)", remedy="convert them with y.long()"
        )
    labels = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if labels.shape != (n,):
        raise InputError(
            f"y has shape {tuple(y.shape)} for {n} example(s)",
            expected="one integer class for each example, (N,)",
            remedy="pass y.argmax(1) for one-hot labels",
        )
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise DataError(
            f"y holds {int(wrong.sum())} label(s) out of range, "
            f"first {int(labels[first])} at index {start + first}",
            expected=f"classes 0 to {classes - 1}, because predict returns {classes} probabilities",
            remedy="use the labels that the network was trained on",
        )
    return labels.long()
