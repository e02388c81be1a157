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

How many right labels are doubted, and how many wrong ones are found, is counted in sets of labels drawn from
the fitted model, with T and η fitted to each set again (parametric bootstrap): under the T and η that were
fitted to them, the labels look more likely than they are.
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
from linnet.predictive.temperature import probabilities
from linnet.shown import Record

if TYPE_CHECKING:
    from pandas import DataFrame

HALVINGS = 20  # of the range of η, which is then known to 10⁻⁶
GOLDEN = 14  # sections of the range of log T, which is then known to 10⁻³
DRAWN = 4_000  # labels that are drawn, in 2 to 20 sets: the more labels a set has, the less sets differ
FLIPS = 0.05  # of labels that are wrong where it is asked how many would be found, if not more are
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
        expected: How many right labels look wrong by chance.
        recall: Share of wrong labels that would be found, if 5 % were wrong, or η of them where that is more.
        contradicted: How many labels are not the likeliest class of the outputs.
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
    recall: float
    contradicted: int

    @property
    def limits(self) -> str:
        """What cannot be seen, as a clause; empty where most wrong labels would be found."""
        if self.recall >= EVEN:
            return ""
        accuracy = 100 * (1 - self.contradicted / len(self.wrong))
        share = "hardly any" if self.recall < FLIPS else f"about {100 * self.recall:.0f} % of"
        return (
            f"at {accuracy:.0f} % leave-one-out accuracy {share} wrong labels can be told from hard samples: "
            f"the {self.contradicted} that leave-one-out contradicts are worth a look"
        )

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
            "right ones among them by chance": self.expected,
            "share of wrong labels that would be found": self.recall,
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
    outputs, labels = searched(outputs, labels)
    found = _Fitted.of(outputs, labels[None])
    suggested, wrong, doubted = (one[0] for one in found.doubts(labels[None]))
    order = wrong.argsort(descending=True, stable=True)
    t, rate = float(found.temperature[0]), float(found.rate[0])
    expected, recall = _simulated(outputs, t, rate)
    rest = _simulated(outputs, t, FLIPS) if rate < FLIPS else (expected, recall)
    predicted = probabilities(outputs, None, 1.0).argmax(1)
    indices, contradicted = order[doubted[order]].to(given.device), int((predicted != labels).sum())
    told = suggested.to(given.device), wrong.to(given.device), expected, rate, t, rest[1], contradicted
    return LabelErrors(indices, *told)


@dataclass(frozen=True, eq=False)
class _Fitted:
    """T and η of highest likelihood for each of several sets of labels of the same outputs."""

    loss: Tensor  # negative log likelihood, (B,)
    temperature: Tensor  # T, (B,)
    rate: Tensor  # η, (B,)
    q: Tensor  # softmax of the outputs at T, (B, N, C)

    @classmethod
    def of(cls, outputs: Tensor, labels: Tensor) -> _Fitted:
        """With wrong labels, but near chance only where they are significant; labels (B, N)."""
        wrong, right = _best(outputs, labels, True), _best(outputs, labels, False)
        predicted = probabilities(outputs, None, 1.0)
        agreed = (predicted.argmax(1) == labels).double().mean(1)
        sure = (agreed >= (1 + 1 / predicted.shape[1]) / 2) | (right.loss - wrong.loss > GAIN)
        pairs = ((vars(wrong)[name], vars(right)[name]) for name in vars(wrong))
        return cls(*(torch.where(sure.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs))

    def doubts(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The class that each label rather is, the probability that it is wrong, whether it is doubted."""
        known = torch.nn.functional.one_hot(labels, self.q.shape[2]).to(self.q)
        thresholds = (self.q * known).sum(1) / known.sum(1)
        thresholds[known.sum(1) == 0] = math.inf
        best = torch.where(self.q >= thresholds[:, None], self.q, -1.0).max(2)
        suggested = torch.where(best.values >= 0, best.indices, -1)
        own, away = _own_and_away(self.q, labels)
        wrong = self.rate[:, None] * away / _mixed(own, away, self.rate).clamp_min(1e-300)
        return suggested, wrong, (suggested >= 0) & (suggested != labels) & (wrong > EVEN)


def _simulated(outputs: Tensor, t: float, rate: float) -> tuple[float, float]:
    """How many right labels are doubted, and the share of wrong ones, in sets drawn from the model."""
    q = probabilities(outputs, None, t)
    n, c = q.shape
    count, generator = max(2, min(20, DRAWN // n)), torch.Generator().manual_seed(0)
    right = torch.multinomial(q.cpu(), count, replacement=True, generator=generator).T
    flipped = torch.rand(count, n, generator=generator) < rate
    shift = torch.randint(1, c, (count, n), generator=generator)
    labels = torch.where(flipped, (right + shift) % c, right).to(q.device)
    doubted = torch.cat([_Fitted.of(outputs, part).doubts(part)[2].cpu() for part in labels.split(20)])
    found = int((doubted & flipped).sum()) / max(int(flipped.sum()), 1)
    return int((doubted & ~flipped).sum()) / count, found


def _own_and_away(q: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The probability of each label, and of one that is another by mistake, (B, N)."""
    own = q.gather(2, labels[:, :, None])[:, :, 0]
    return own, (1 - own) / max(q.shape[2] - 1, 1)


def _mixed(own: Tensor, away: Tensor, rate: Tensor) -> Tensor:
    """The probability of labels of which a share η is wrong, (B, N)."""
    return own + rate[:, None] * (away - own)


def _best(outputs: Tensor, labels: Tensor, free: bool) -> _Fitted:
    """T and η of highest likelihood, with one more example that is of no class; or η = 0."""

    def solved(log_t: Tensor) -> _Fitted:
        scaled = (outputs / log_t.exp()[:, None, None]).flatten(0, 1)
        q = probabilities(scaled, None, 1.0).view(len(log_t), len(outputs), -1)
        own, away = _own_and_away(q, labels)
        low, high = torch.zeros_like(log_t), torch.full_like(log_t, EVEN)
        for _ in range(HALVINGS if free else 0):  # the likelihood is concave in η
            middle = (low + high) / 2
            rises = ((away - own) / _mixed(own, away, middle).clamp_min(1e-300)).sum(1) > 0
            low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
        log_p = _mixed(own, away, low).clamp_min(1e-300).log().sum(1)
        loss = -(log_p + q.clamp_min(1e-300).log().mean((1, 2)))
        return _Fitted(loss, log_t.exp(), low, q)

    scale = math.log(float(outputs.std(correction=0)) + 1e-12)
    grid = torch.linspace(-6, 4, 21, dtype=torch.float64, device=outputs.device) + scale
    losses = torch.stack([solved(at.expand(len(labels))).loss for at in grid])
    best = losses.argmin(0)
    low, high = grid[(best - 1).clamp_min(0)], grid[(best + 1).clamp_max(len(grid) - 1)]
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    of_a, of_b = solved(a).loss, solved(b).loss
    for _ in range(GOLDEN):
        left = of_a < of_b
        low, high = torch.where(left, low, a), torch.where(left, b, high)
        fresh = torch.where(left, high - ratio * (high - low), low + ratio * (high - low))
        loss = solved(fresh).loss
        a, b = torch.where(left, fresh, b), torch.where(left, a, fresh)
        of_a, of_b = torch.where(left, loss, of_b), torch.where(left, of_a, loss)
    return solved((low + high) / 2)
