"""Wrong labels among training data, with the number that would look wrong by chance.

The leave-one-out residual eᵢ = tᵢ − f₋ᵢ(xᵢ) is the training residual plus the self-influence,

    eᵢ = (tᵢ − f(xᵢ)) + (f(xᵢ) − f₋ᵢ(xᵢ)),

so that it sees a wrong label that was fitted as well as one that was not. All of it is exact and trains
nothing; a head that was fitted on the same labels hides some, which cross-fitted heads undo.

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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from linnet.audit.predictors import check_fitted
from linnet.errors import InputError
from linnet.fitting.fitted import Fitted
from linnet.linalg.factorize import searched
from linnet.params import choice, refuse, tensor
from linnet.predictive.gaussian import SURE
from linnet.predictive.noise import probabilities
from linnet.shown import Record, frame
from linnet.tangent.inputs import tensorize
from linnet.tangent.modes import in_exact_mode

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
ROUNDED = 20  # times the usual tolerance, for probabilities of two decimals or in half types
LARGEST = 1e100  # of logits, whose squares are finite
RARE = 1e-30  # no probability counts as less
SCORES = ("auto", "margin", "residual", "self-influence")


@dataclass(frozen=True, eq=False, repr=False)
class LabelErrors(Record):
    """Training examples by how suspect their labels are, and which look wrong; ``mislabeled`` makes it."""

    score: str  # which score it is
    scores: Tensor  # suspicion of each training example, larger is worse, (N,)
    residual: Tensor  # ‖tᵢ − f₋ᵢ(xᵢ)‖, (N,); of probabilities for outputs and under the cross-entropy
    self_influence: Tensor | None  # ‖f(xᵢ) − f₋ᵢ(xᵢ)‖, (N,); None for outputs without a fit
    labels: Tensor | None = None  # classes as given, (N,); None for a regression, as what follows
    predicted: Tensor | None = None  # classes without the example, (N,)
    wrong: Tensor | None = None  # probability that each label is wrong, (N,)
    suggested: Tensor | None = None  # the likeliest class that reaches its threshold, -1 where none, (N,)
    indices: Tensor | None = None  # positions of the labels that look wrong, likeliest first, (K,)
    rate: float = math.nan  # η, the share of wrong labels of highest likelihood; 0 where not significant
    temperature: float = math.nan  # T of the same
    expected: float = math.nan  # how many right labels look wrong by chance
    recall: float = math.nan  # share of wrong labels that would be found, if 5 % were wrong, or η of them

    def __len__(self) -> int:
        """N."""
        return len(self.scores)

    @property
    def order(self) -> Tensor:
        """Positions, most suspect first, (N,)."""
        return self.scores.argsort(descending=True, stable=True)

    def flagged(self) -> Tensor:
        """Positions (K,) whose class is not the one that the others predict, most suspect first."""
        # as many as leave-one-out errors, right labels of hard examples among them; doubted leaves those out
        return self.order[(self._known(self.labels) != self._known(self.predicted))[self.order]]

    def suspected(self) -> Tensor:
        """Positions (K,) of labels that are worth a look, by confident learning, most suspect first."""
        # another class reaches the probability that is usual of it; the doubted ones are among them
        suggested = self._known(self.suggested)
        return self.order[((suggested >= 0) & (suggested != self.labels))[self.order]]

    def doubted(self) -> Tensor:
        """Positions (K,) of labels that are likelier wrong than right, most suspect first."""
        doubted = torch.zeros_like(self.order, dtype=torch.bool)
        doubted[self._known(self.indices)] = True
        return self.order[doubted[self.order]]

    @property
    def limits(self) -> str:
        """What cannot be seen, as a clause; empty where most wrong labels would be found."""
        if self.labels is None or not self.recall < EVEN:  # of very few examples it is not known
            return ""
        wrong = self._known(self.predicted) != self.labels
        accuracy = 100 * (1 - float(wrong.double().mean()))
        suspected = int(wrong[self.suspected()].sum())
        share = "hardly any" if self.recall < FLIPS else f"about {100 * self.recall:.0f} % of"
        told = (
            f"at {accuracy:.0f} % leave-one-out accuracy {share} wrong labels can be told from hard samples"
        )
        most = f"the {suspected} that leave-one-out contradicts most surely are worth a look"
        return f"{told}: {most}" if suspected else told

    def to_frame(self) -> DataFrame:
        """A pandas table, one row a training example, most suspect first."""
        columns = {
            "example": torch.arange(len(self), device=self.scores.device),
            "score": self.scores,
            "residual": self.residual,
            "self influence": self.self_influence,
            "label": self.labels,
            "left out": self.predicted,
            "wrong": self.wrong,
        }
        at = self.order.cpu()
        return frame({name: None if value is None else value.cpu()[at] for name, value in columns.items()})

    def _shown(self) -> dict[str, Any]:
        known = {"examples": len(self), "score": self.score, "most suspect": self.order[:TOLD]}
        if self.indices is None:
            return known
        wrong, suggested = self._known(self.wrong), self._known(self.suggested)
        return {
            **known,
            "look wrong": len(self.indices),
            "right ones among them by chance": self.expected,
            "share of wrong labels that would be found": self.recall,
            "share of wrong labels": self.rate,
            "likeliest wrong": {
                f"example {i}": f"{float(wrong[i]):.3f}, rather class {int(suggested[i])}"
                for i in self.indices[:TOLD].tolist()
            },
        }

    def __str__(self) -> str:
        """The number of labels that look wrong, in words."""
        if self.indices is None:
            return f"{len(self)} training targets, ranked by {self.score}"
        return labels_in_words(len(self.indices), len(self), self.expected, self.limits)

    @staticmethod
    def _known(column: Tensor | None) -> Tensor:
        """A column of classes."""
        if column is None:
            raise InputError(
                "targets of a regression have no classes",
                expected="a fit of integer classes",
                remedy="take the first of .order",
            )
        return column


def labels_in_words(doubted: int, count: int, expected: float, limits: str = "") -> str:
    """Summary of the labels that look wrong."""
    verb = "looks" if doubted == 1 else "look"
    chance = "none" if expected < 0.5 else f"{expected:.0f}"
    text = f"{doubted} of {count} training labels {verb} wrong (by chance alone {chance} would)"
    return f"{text}; {limits}" if limits else text


@in_exact_mode
@torch.no_grad()
def mislabeled(fit: Fitted | Tensor, labels: Tensor | None = None, *, score: str = "auto") -> LabelErrors:
    """Rank training examples by how much what the others say contradicts their labels, and doubt some.

    Args:
        fit: A fit of ``linnet.adapt`` or ``linnet.fit``, of either loss; or, of any other model, outputs
            (N, C) that were left out or cross-validated, logits, or probabilities, whose rows sum to 1; or
            (N, 1) for log odds of the second class.
        labels: Classes (N,) to go with outputs; a fit has its own.
        score: ``"margin"``, the largest leave-one-out output of another class less that of the given one;
            ``"residual"``, ‖tᵢ − f₋ᵢ(xᵢ)‖; ``"self-influence"``, ‖f(xᵢ) − f₋ᵢ(xᵢ)‖, of fits. ``"auto"`` is
            the margin for classes and the residual for regression.

    Returns:
        The ranking: ``order`` and ``scores`` (N,), and their parts ``residual`` and ``self_influence`` (N,).
        Of classes also ``doubted()``, the positions (K,) of labels that are likelier wrong than right, of
        which ``expected`` would be there by chance, ``suspected()``, a longer list that finds more of the
        wrong ones, by the rule of confident learning, and ``flagged()``, all that leave-one-out contradicts;
        by label ``predicted``, ``suggested`` and ``wrong``, the probability that it is wrong, (N,). In words
        by ``print``, as a table by ``to_frame()``.

    Raises:
        InputError: If the score is none of these, the margin is asked of a regression, outputs are not
            finite, or probabilities in most rows alone, or labels are no classes, or not as many as outputs.

    Source:
        Achille et al., CVPR 2021, appendix A.3, at the example itself; Northcutt, Jiang and Chuang, JAIR 2021
        (class thresholds).

    Example:
        >>> import linnet
        >>> net = torch.nn.Linear(1, 2)
        >>> x = torch.linspace(-1, 1, 12)[:, None]
        >>> y = (x[:, 0] > 0).long()
        >>> y[2] = 1  # wrong
        >>> mislabeled(linnet.fit(linnet.linearize(net), (x, y), ridge=0.1)).order[:1]
        tensor([2])
        >>> odds, labels = torch.linspace(-8, 8, 40)[:, None], torch.arange(40) >= 20
        >>> labels[38] = False
        >>> mislabeled(odds, labels.long()).doubted()
        tensor([38])
    """
    choice("score", score, SCORES)
    if isinstance(fit, Tensor) or hasattr(fit, "__array__"):
        known = labels if labels is None else tensorize(labels, "labels")
        outputs, labels = _checked(cast(Tensor, tensorize(fit, "outputs")), cast(Tensor, known))
        loo = _both(outputs, torch.zeros_like(outputs))
        residual = torch.nn.functional.one_hot(labels, loo.shape[1]) - loo.softmax(1)
        return _judged(outputs, loo, labels, residual.norm(dim=1), None, score)
    fit = check_fitted(fit)
    if labels is not None:
        raise InputError("labels= with a fit", expected="those of the fit", remedy="leave labels= out")
    if fit.loss == "squared":
        loo = fit._left_out().double()
        residual = fit.targets.to(loo) - loo
    else:
        odds, targets = fit.loo().double(), fit.targets.double()
        loo = _both(odds, torch.zeros_like(odds))
        residual = _both(targets, 1 - targets).to(loo) - loo.softmax(1)
    # from the fit's own leave-one-out; that of cross-fitted heads has no fit with the example in it
    own = fit.system.own_changes().double()
    return _judged(loo, loo, fit.labels, residual.norm(dim=1), own.norm(dim=1), score, fit._possible)


def _judged(
    outputs: Tensor,
    loo: Tensor,
    labels: Tensor | None,
    residual: Tensor,
    own: Tensor | None,
    score: str,
    seen: Tensor | None = None,
) -> LabelErrors:
    """The ranking by a score, and for classes the labels that look wrong; no label is of a class not seen."""
    if labels is not None and seen is not None:
        found = _judged(
            outputs[:, seen], loo[:, seen], torch.searchsorted(seen, labels), residual, own, score
        )
        assert found.predicted is not None
        assert found.suggested is not None
        suggested = torch.where(found.suggested < 0, -1, seen[found.suggested])
        return replace(found, labels=labels, predicted=seen[found.predicted], suggested=suggested)
    classes = labels is not None and loo.shape[1] > 1
    chosen = ("margin" if classes else "residual") if score == "auto" else score
    if chosen == "margin" and not classes:
        raise InputError(
            'score="margin" of a regression',
            expected="a fit of integer classes",
            remedy='pass score="residual"',
        )
    if chosen == "self-influence" and own is None:
        raise InputError('score="self-influence" of outputs', expected="a fit", remedy='pass score="margin"')
    if chosen == "margin":
        assert labels is not None
        scores = _margin(loo, labels)
    else:
        scores = own if chosen == "self-influence" and own is not None else residual
    if labels is None:
        return LabelErrors(chosen, scores, residual, own)
    return LabelErrors(chosen, scores, residual, own, labels, loo.argmax(1), **_doubts(outputs, labels))


def _margin(outputs: Tensor, labels: Tensor) -> Tensor:
    """Max over other classes of f_c, less f of the given class."""
    given = outputs.gather(1, labels[:, None])
    others = outputs.scatter(1, labels[:, None], float("-inf"))
    return others.amax(1) - given[:, 0]


def _both(second: Tensor, first: Tensor) -> Tensor:
    """A column for each class: one column is that of the second of two, beside which stands the first's."""
    return second if second.shape[1] > 1 else torch.cat([first, second], 1)


def _checked(outputs: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs (N, C) in float64, and a class for each, (N,)."""
    outputs = tensor("outputs", outputs, "held-out outputs (N, C)").detach().double()
    if not bool(outputs.isfinite().all()):
        refuse("outputs", outputs, "finite numbers", "look for divergence of the training")
    if outputs.numel() and float(outputs.abs().max()) > LARGEST:
        refuse(
            "outputs", outputs, f"logits up to {LARGEST:g}", "divide them by their largest: the ranking stays"
        )
    given = tensor("labels", labels, "classes (N,)", "pass those that go with the outputs").to(outputs.device)
    classes = given.long().clone()  # of our own
    if outputs.ndim != 2 or classes.shape != outputs.shape[:1] or not len(classes):
        raise InputError(
            f"outputs has shape {tuple(outputs.shape)} and labels {tuple(classes.shape)}",
            expected="outputs (N, C) and one class for each example, (N,)",
            remedy="pass fit.loo() and fit.labels",
        )
    count = max(2, outputs.shape[1])
    if not bool(((given == classes) & (classes >= 0) & (classes < count)).all()):
        refuse("labels", given, f"whole numbers from 0 to {count - 1}", "pass fit.labels")
    total = outputs.sum(1, keepdim=True)
    whole = (total - 1).abs() <= ROUNDED * SURE
    if outputs.shape[1] > 1 and bool((outputs >= 0).all()) and float(whole.double().mean()) > EVEN:
        if not bool(whole.all()):
            refuse("outputs", outputs, "logits, or probabilities whose rows sum to 1", "pass either of them")
        outputs = (outputs / total).clamp_min(RARE).log()  # whose softmax they are
    return outputs, classes


def _doubts(outputs: Tensor, labels: Tensor) -> dict[str, Any]:
    """The labels that held-out outputs contradict more than the difficulty of the examples explains."""
    place = labels.device
    several = (
        labels.bincount()[labels] > 1
    )  # others can contradict no label that is the only one of its class
    if not several.all():
        return _doubts_of_several(outputs, labels, several)
    outputs, labels = searched(outputs, labels)
    scores = _Scores(outputs)
    found = _Fitted.of(scores, labels[None])
    suggested, wrong, doubted = (one[0] for one in found.doubts(labels[None]))
    order = wrong.argsort(descending=True, stable=True)
    t, rate = float(found.temperature[0]), float(found.rate[0])
    expected, recall = _simulated(scores, t, rate)
    rest = _simulated(scores, t, FLIPS) if rate < FLIPS else (expected, recall)
    columns = {"wrong": wrong, "suggested": suggested, "indices": order[doubted[order]]}
    numbers = {"rate": rate, "temperature": t, "expected": expected, "recall": rest[1]}
    return {name: column.to(place) for name, column in columns.items()} | numbers


def _doubts_of_several(outputs: Tensor, labels: Tensor, several: Tensor) -> dict[str, Any]:
    """The same where some labels are the only ones of their classes, which are not doubted."""
    # several (N,)
    wrong = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
    suggested, index = torch.full_like(labels, -1), several.nonzero()[:, 0]
    if not len(index):
        told = {"rate": 0.0, "temperature": 1.0, "expected": 0.0, "recall": math.nan}
        return {"wrong": wrong, "suggested": suggested, "indices": index, **told}
    found = _doubts(outputs[index], labels[index])
    wrong[index], suggested[index] = found["wrong"].to(wrong), found["suggested"]
    return {**found, "wrong": wrong, "suggested": suggested, "indices": index[found["indices"]]}


@dataclass(frozen=True, eq=False)
class _Fitted:
    """T and η of highest likelihood for each of several sets of labels of the same outputs."""

    loss: Tensor  # negative log likelihood, (B,)
    temperature: Tensor  # T, (B,)
    rate: Tensor  # η, (B,)
    q: Tensor  # softmax of the outputs at T, (B, N, C)

    @classmethod
    def of(cls, scores: _Scores, labels: Tensor) -> _Fitted:
        """With wrong labels, but near chance only where they are significant; labels (B, N)."""
        wrong, right = _best(scores, labels, True), _best(scores, labels, False)
        predicted = probabilities(scores.outputs, None, 1.0)
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


def _simulated(scores: _Scores, t: float, rate: float) -> tuple[float, float]:
    """How many right labels are doubted, and the share of wrong ones, in sets drawn from the model."""
    q = probabilities(scores.outputs, None, t)
    n, c = q.shape
    count, generator = max(2, min(20, DRAWN // n)), torch.Generator().manual_seed(0)
    right = torch.multinomial(q.cpu(), count, replacement=True, generator=generator).T
    flipped = torch.rand(count, n, generator=generator) < rate
    shift = torch.randint(1, c, (count, n), generator=generator)
    labels = torch.where(flipped, (right + shift) % c, right).to(q.device)
    doubted = torch.cat([_Fitted.of(scores, part).doubts(part)[2].cpu() for part in labels.split(20)])
    found = int((doubted & flipped).sum()) / max(int(flipped.sum()), 1)
    return int((doubted & ~flipped).sum()) / count, found


def _own_and_away(q: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The probability of each label, and of one that is another by mistake, (B, N)."""
    own = q.gather(2, labels[:, :, None])[:, :, 0]
    return own, _away(own, q.shape[2])


def _away(own: Tensor, classes: int) -> Tensor:
    """The probability of one other class by mistake, the mean of the others, (B, N)."""
    return (1 - own) / max(classes - 1, 1)


def _mixed(own: Tensor, away: Tensor, rate: Tensor) -> Tensor:
    """The probability of labels of which a share η is wrong, (B, N)."""
    return own + rate[:, None] * (away - own)


class _Scores:
    """Outputs, and what their softmax at temperatures is made of."""

    def __init__(self, outputs: Tensor) -> None:
        self.outputs = outputs  # (N, C)
        both = torch.cat([-outputs, outputs], 1) / 2 if outputs.shape[1] == 1 else outputs
        self.both = both - both.amax(1, keepdim=True)  # (N, C), the largest 0
        self.mean = self.both.mean()
        scale = math.log(float(outputs.std(correction=0)) + 1e-12)
        self.grid = torch.linspace(-6, 4, 21, dtype=torch.float64, device=outputs.device) + scale
        self.totals = [self.total(at[None]) for at in self.grid]

    def total(self, log_t: Tensor) -> Tensor:
        """Log of Σ exp(z/T) over the classes, z the outputs less the largest, (B, N)."""
        return (self.both / log_t.exp()[:, None, None]).exp_().sum(2).log()

    def probabilities(self, log_t: Tensor) -> Tensor:
        """Of the classes, (B, N, C)."""
        scaled = (self.outputs / log_t.exp()[:, None, None]).flatten(0, 1)
        return probabilities(scaled, None, 1.0).view(len(log_t), len(self.outputs), -1)


def _best(scores: _Scores, labels: Tensor, free: bool) -> _Fitted:
    """T and η of highest likelihood, with one more example that is of no class; or η = 0."""
    given = scores.both.gather(1, labels.T).T

    def solved(log_t: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # log softmax(z/T)_y = z_y/T − log Σ exp(z/T), whose means need no probabilities of the other classes
        t, total = log_t.exp(), scores.total(log_t) if total is None else total
        own = (given / t[:, None] - total).exp()
        away = _away(own, scores.both.shape[1])
        low, high = torch.zeros_like(log_t), torch.full_like(log_t, EVEN)
        for _ in range(HALVINGS if free else 0):  # the likelihood is concave in η
            middle = (low + high) / 2
            rises = ((away - own) / _mixed(own, away, middle).clamp_min(1e-300)).sum(1) > 0
            low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
        log_p = _mixed(own, away, low).clamp_min(1e-300).log().sum(1)
        return -(log_p + scores.mean / t - total.mean(1)), low

    grid, count = scores.grid, len(labels)
    losses = [solved(at.expand(count), total)[0] for at, total in zip(grid, scores.totals, strict=True)]
    best = torch.stack(losses).argmin(0)
    low, high = grid[(best - 1).clamp_min(0)], grid[(best + 1).clamp_max(len(grid) - 1)]
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    of_a, of_b = solved(a)[0], solved(b)[0]
    for _ in range(GOLDEN):
        left = of_a < of_b
        low, high = torch.where(left, low, a), torch.where(left, b, high)
        fresh = torch.where(left, high - ratio * (high - low), low + ratio * (high - low))
        loss = solved(fresh)[0]
        a, b = torch.where(left, fresh, b), torch.where(left, a, fresh)
        of_a, of_b = torch.where(left, loss, of_b), torch.where(left, of_a, loss)
    middle = (low + high) / 2
    loss, rate = solved(middle)
    return _Fitted(loss, middle.exp(), rate, scores.probabilities(middle))
