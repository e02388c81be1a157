"""Label error detection by leave-one-out predictions.

The leave-one-out residual eᵢ = tᵢ − f₋ᵢ(xᵢ) is the training residual plus the self-influence,

    eᵢ = (tᵢ − f(xᵢ)) + (f(xᵢ) − f₋ᵢ(xᵢ)),

so that it sees a wrong label that was fitted as well as one that was not. All of it is exact and trains
nothing; a head that was fitted on the same labels hides some, which cross-fitted heads undo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from linnet.audit.label_errors import LabelErrors, label_errors
from linnet.audit.predictors import check_fitted
from linnet.errors import InputError
from linnet.fitting.fitted import Fitted, SquaredFit
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.frames import frame
from linnet.shown import Record
from linnet.tangent.modes import in_exact_mode

if TYPE_CHECKING:
    from pandas import DataFrame

TOLD = 6  # examples that are named where the result is shown
SCORES = ("auto", "margin", "residual", "self-influence")


@dataclass(frozen=True, repr=False)
class LabelRanking(Record):
    """Training examples in the order in which their labels should be looked at.

    Args:
        order: Positions, most suspect first, (N,).
        scores: Suspicion of each training example, larger is worse, (N,).
        labels: Classes as given, (N,); ``None`` for regression.
        predicted: Classes by the fit without the example, (N,); ``None`` for regression.
        residual: ‖tᵢ − f₋ᵢ(xᵢ)‖, (N,); of probabilities under the cross-entropy.
        self_influence: ‖f(xᵢ) − f₋ᵢ(xᵢ)‖, (N,).
        score: Which score it is.
        errors: Which labels look wrong, and how many would by chance; ``None`` for regression.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x, y = torch.randn(8, 2), torch.arange(8) % 2
        >>> fit = linnet.fit(linnet.linearize(net), (x, y))
        >>> linnet.audit.mislabeled(fit).order.shape
        torch.Size([8])
    """

    order: Tensor
    scores: Tensor
    labels: Tensor | None
    predicted: Tensor | None
    residual: Tensor
    self_influence: Tensor
    score: str
    errors: LabelErrors | None = None

    def __len__(self) -> int:
        """N."""
        return len(self.order)

    def flagged(self) -> Tensor:
        """Positions whose class is not the one that the others predict, most suspect first; classes alone.

        They are as many as leave-one-out errors, right labels of hard examples among them; ``doubted`` leaves
        those out.

        Returns:
            Positions, (K,).
        """
        if self.labels is None or self.predicted is None:
            _refuse_regression()
        return self.order[(self.labels != self.predicted)[self.order]]

    def doubted(self) -> Tensor:
        """Positions (K,) of labels that are likelier wrong than right, most suspect first; classes alone."""
        if self.errors is None:
            _refuse_regression()
        doubted = torch.zeros_like(self.order, dtype=torch.bool)
        doubted[self.errors.indices] = True
        return self.order[doubted[self.order]]

    def to_frame(self) -> DataFrame:
        """A pandas table, one row a training example, most suspect first.

        Returns:
            The score, the two parts that it is made of, and for classes the label, the class by the fit
            without the example, and the probability that the label is wrong.

        Raises:
            DependencyError: If pandas is missing.
        """
        columns = {
            "example": torch.arange(len(self), device=self.order.device),
            "score": self.scores,
            "residual": self.residual,
            "self influence": self.self_influence,
            "label": self.labels,
            "left out": self.predicted,
            "wrong": None if self.errors is None else self.errors.wrong,
        }
        at = self.order.cpu()
        return frame({name: None if value is None else value.cpu()[at] for name, value in columns.items()})

    def _shown(self) -> dict[str, Any]:
        known = {"examples": len(self), "score": self.score, "most suspect": self.order[:TOLD]}
        found = {} if self.errors is None else self.errors._shown()
        return known | {name: value for name, value in found.items() if name != "labels"}

    def __str__(self) -> str:
        """The number of labels that look wrong, in words."""
        if self.errors is None:
            return f"{len(self)} training targets, ranked by {self.score}"
        found = self.errors
        return labels_in_words(len(found.indices), len(self), found.expected, found.limits)


def labels_in_words(doubted: int, count: int, expected: float, limits: str = "") -> str:
    """Summary of the labels that look wrong."""
    verb = "looks" if doubted == 1 else "look"
    chance = "none" if expected < 0.5 else f"{expected:.0f}"
    text = f"{doubted} of {count} training labels {verb} wrong ({chance} expected by chance)"
    return f"{text}; {limits}" if limits else text


def _refuse_regression() -> NoReturn:
    """Raise the error of asking a regression for classes."""
    raise InputError(
        "targets of a regression have no classes",
        expected="a fit of integer classes",
        remedy="take the first of .order",
    )


@in_exact_mode
@torch.no_grad()
def mislabeled(fit: Fitted, score: str = "auto") -> LabelRanking:
    """Rank training examples by how much the fit without them contradicts their labels.

    Args:
        fit: A fit of ``linnet.adapt`` or ``linnet.fit``, of either loss.
        score: ``"margin"``, the largest leave-one-out output of another class less that of the given one;
            ``"residual"``, ‖tᵢ − f₋ᵢ(xᵢ)‖; ``"self-influence"``, ‖f(xᵢ) − f₋ᵢ(xᵢ)‖. ``"auto"`` is the margin
            for classes and the residual for regression.

    Returns:
        The ranking.

    Raises:
        InputError: If the score is none of these, or the margin is asked of a regression.

    Source:
        Achille et al., CVPR 2021, appendix A.3, at the example itself.

    Example:
        >>> import linnet
        >>> net = torch.nn.Linear(1, 2)
        >>> x = torch.linspace(-1, 1, 12)[:, None]
        >>> y = (x[:, 0] > 0).long()
        >>> y[2] = 1  # wrong
        >>> mislabeled(linnet.fit(linnet.linearize(net), (x, y), ridge=0.1)).order[:1]
        tensor([2])
    """
    fit = check_fitted(fit)
    if isinstance(fit, SquaredFit):
        loo, solved = fit._left_out().double(), fit._solved
        residual = fit.targets.to(loo) - loo
        # from the fit's own leave-one-out; that of cross-fitted heads has no fit with the example in it
        own = solved.loo_residuals() - solved.ridge * solved.beta
    else:
        assert isinstance(fit, SoftmaxFit)
        odds, targets = fit.loo().double(), fit.targets.double()
        loo = _both(odds, torch.zeros_like(odds))
        residual = _both(targets, 1 - targets).to(loo) - loo.softmax(1)
        own = fit.system.outputs - fit.system.loo_outputs()
    chosen = _score(fit.labels, loo.shape[1], score)
    size, change = residual.norm(dim=1), own.double().norm(dim=1)
    labels = fit.labels
    predicted = None if labels is None else loo.argmax(1)
    if chosen == "margin":
        assert labels is not None
        scores = _margin(loo, labels)
    else:
        scores = size if chosen == "residual" else change
    order = scores.argsort(descending=True, stable=True)
    errors = None if labels is None else label_errors(loo, labels)
    return LabelRanking(order, scores, labels, predicted, size, change, chosen, errors)


def _margin(outputs: Tensor, labels: Tensor) -> Tensor:
    """Max over other classes of f_c, less f of the given class."""
    given = outputs.gather(1, labels[:, None])
    others = outputs.scatter(1, labels[:, None], float("-inf"))
    return others.amax(1) - given[:, 0]


def _both(second: Tensor, first: Tensor) -> Tensor:
    """A column for each class: one column is that of the second of two, beside which stands the first's."""
    return second if second.shape[1] > 1 else torch.cat([first, second], 1)


def _score(labels: Tensor | None, outputs: int, score: str) -> str:
    """The score that is used."""
    classes = labels is not None and outputs > 1
    if score not in SCORES:
        raise InputError(
            f"score={score!r}",
            expected=", ".join(f'"{name}"' for name in SCORES),
            remedy='leave score= out for "auto"',
        )
    if score == "margin" and not classes:
        raise InputError(
            'score="margin" of a regression',
            expected="a fit of integer classes",
            remedy='pass score="residual"',
        )
    return ("margin" if classes else "residual") if score == "auto" else score
