"""Probable label errors, with the number expected if all labels were right.

The leave-one-out error rate says how often examples are hard, not how often labels are wrong. Let qᵢ be the
softmax of the leave-one-out outputs of example i at temperature T, and let a label be wrong with probability
η, and then be any other class alike:

    p(yᵢ) = (1 − η) qᵢ(yᵢ) + η (1 − qᵢ(yᵢ))/(C − 1)

T and η are those of highest likelihood. Hard examples ask for a higher T, wrong labels of easy examples for
a higher η; near chance the two cannot be told apart. There, where the outputs agree with less of the labels
than halfway from chance to all, η is 0 unless a likelihood-ratio test says that wrong labels are needed. A
label is doubted where it is likelier wrong than right, and where another class is the likeliest of those that
reach the probability that they have on average among the examples labeled so (the confident joint of
confident learning).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.frames import frame
from linnet.linalg.host import searched
from linnet.params import refuse, tensor
from linnet.predictive.temperature import golden_section, probabilities
from linnet.shown import Record

if TYPE_CHECKING:
    from pandas import DataFrame

STEPS = 60  # of expectation maximization for η at each temperature
TOLD = 6  # labels that are named where the result is shown
EVEN = 0.5  # probability of being wrong from which a label is doubted; and η is at most that
# Gain in log likelihood that wrong labels must bring near chance: half the 90 % point of χ² with one degree
# of freedom, exceeded in 5 % of cases where η = 0, the end of its range, is true (Self and Liang, JASA 1987)
GAIN = 1.353


@dataclass(frozen=True, repr=False)
class LabelErrors(Record):
    """Labels that look wrong.

    Args:
        indices: Positions of the labels that look wrong, likeliest first, (K,).
        suggested: The likeliest class by the others that reaches its threshold, -1 where none does, (N,).
        wrong: Probability that each label is wrong, (N,).
        expected: How many labels would look wrong if all were right.
        rate: η, the share of wrong labels of highest likelihood; 0 near chance if not significantly above it.
        temperature: T of the same.

    Example:
        >>> odds = torch.linspace(-8, 8, 40)[:, None]
        >>> labels = (odds[:, 0] > 0).long()
        >>> labels[1] = 1
        >>> label_errors(odds, labels).indices
        tensor([1])
    """

    indices: Tensor
    suggested: Tensor
    wrong: Tensor
    expected: float
    rate: float
    temperature: float

    def to_frame(self) -> DataFrame:
        """A pandas table, one row a label.

        Returns:
            The probability that it is wrong, the class that it rather is (-1 where none is likely), and
            whether it is doubted.

        Raises:
            DependencyError: If pandas is missing.
        """
        doubted = torch.zeros_like(self.suggested, dtype=torch.bool)
        doubted[self.indices] = True
        return frame({"wrong": self.wrong, "suggested": self.suggested, "doubted": doubted})

    def _shown(self) -> dict[str, Any]:
        found = self.indices[:TOLD].tolist()
        return {
            "labels": len(self.wrong),
            "look wrong": len(self.indices),
            "expected if all were right": self.expected,
            "share of wrong labels": self.rate,
            "likeliest wrong": {
                f"example {i}": f"{float(self.wrong[i]):.3f}, rather class {int(self.suggested[i])}"
                for i in found
            },
        }


def label_errors(outputs: Tensor, labels: Tensor) -> LabelErrors:
    """Find labels that held-out outputs contradict more than the difficulty of the examples explains.

    Args:
        outputs: Leave-one-out or cross-validated outputs, (N, C), or (N, 1) for log odds of the second class.
        labels: Classes (N,).

    Returns:
        The labels that look wrong.

    Raises:
        InputError: If there are not as many labels as outputs, or a number is no class or not finite.

    Source:
        Northcutt, Jiang and Chuang, JAIR 2021 (class thresholds).

    Example:
        >>> odds = torch.linspace(-8, 8, 40)[:, None]
        >>> labels = (odds[:, 0] > 0).long()
        >>> labels[38] = 0
        >>> label_errors(odds, labels).indices
        tensor([38])
    """
    outputs = tensor("outputs", outputs, "held-out outputs (N, C)").detach().double()
    if not bool(outputs.isfinite().all()):
        refuse("outputs", outputs, "finite numbers", "look for divergence of the training")
    given = tensor("labels", labels, "classes (N,)").to(outputs.device)
    labels = given.long()
    if outputs.ndim != 2 or labels.shape != outputs.shape[:1] or not len(labels):
        raise InputError(
            f"outputs has shape {tuple(outputs.shape)} and labels {tuple(labels.shape)}",
            expected="outputs (N, C) and one class for each example, (N,)",
            remedy="pass fit.loo() and fit.labels",
        )
    count = max(2, outputs.shape[1])
    if not bool(((given == labels) & (labels >= 0) & (labels < count)).all()):
        refuse("labels", given, f"whole numbers from 0 to {count - 1}", "pass fit.labels")
    t, rate = _most_likely(outputs, labels)
    q = probabilities(outputs, None, t)
    c = q.shape[1]
    known = torch.nn.functional.one_hot(labels, c).to(q)
    thresholds = (q * known).sum(0) / known.sum(0)
    thresholds[known.sum(0) == 0] = math.inf
    # what every label that the example could have would look like, (N, C)
    wrong = _wrong(q, rate)
    typical = q >= thresholds
    best = torch.where(typical, q, -1.0).max(1)
    suggested = torch.where(best.values >= 0, best.indices, -1)
    another = (suggested[:, None] >= 0) & (suggested[:, None] != torch.arange(c, device=q.device))
    doubted = another & (wrong > EVEN)
    mine, own = doubted.gather(1, labels[:, None])[:, 0], wrong.gather(1, labels[:, None])[:, 0]
    order = own.argsort(descending=True, stable=True)
    return LabelErrors(order[mine[order]], suggested, own, float((q * doubted).sum()), rate, t)


def _wrong(q: Tensor, rate: float) -> Tensor:
    """The probability that a label is wrong for each that an example could have, (N, C)."""
    flipped = rate * (1 - q) / max(q.shape[1] - 1, 1)
    return flipped / ((1 - rate) * q + flipped).clamp_min(1e-300)


def _most_likely(outputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """T and η of highest likelihood, with one more example that is of no class, as for other temperatures."""
    outputs, labels = searched(outputs, labels)
    wrong, q = _best(outputs, labels, STEPS), probabilities(outputs, None, 1.0)
    agreed = float((q.argmax(1) == labels).double().mean())
    if agreed >= (1 + 1 / q.shape[1]) / 2:
        return wrong[1:]
    right = _best(outputs, labels, 0)
    return wrong[1:] if right[0] - wrong[0] > GAIN else right[1:]


def _best(outputs: Tensor, labels: Tensor, steps: int) -> tuple[float, float, float]:
    """The smallest negative log likelihood, its T and its η; with no steps for η it is 0."""
    scale = float(outputs.std(correction=0)) + 1e-12

    def solved(log_t: float) -> tuple[float, float]:
        q = probabilities(outputs, None, math.exp(log_t))
        own = q.gather(1, labels[:, None])[:, 0]
        away = (1 - own) / max(q.shape[1] - 1, 1)
        rate = 0.05 if steps else 0.0
        for _ in range(steps):
            found = float((rate * away / ((1 - rate) * own + rate * away).clamp_min(1e-300)).mean())
            rate = min(found, EVEN)
        likelihood = ((1 - rate) * own + rate * away).clamp_min(1e-300).log().sum()
        return -float(likelihood + q.clamp_min(1e-300).log().mean()), rate

    grid = [math.log(scale) + step for step in torch.linspace(-6, 4, 21).tolist()]
    losses = [solved(log_t)[0] for log_t in grid]
    best = min(range(len(grid)), key=losses.__getitem__)
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    log_t = golden_section(lambda at: solved(at)[0], low, high)
    loss, rate = solved(log_t)
    return loss, math.exp(log_t), rate
