"""``linnet.ood``: out-of-distribution detection by predictive uncertainty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from linnet.curvatures.stream import Batches
from linnet.errors import DataError, InputError
from linnet.metrics.evaluate import Predict, ask, asked, batches_of, class_probabilities, same_classes
from linnet.metrics.reports import SCORES, Detection, Judged, Scored, SeparationPlots, join, judge
from linnet.params import choice
from linnet.predictive.model import PredictiveModel
from linnet.progress import track
from linnet.tangent.inputs import bare_inputs


@dataclass(frozen=True, eq=False, repr=False)
class Separation(Scored):
    """Separation of in-distribution and out-of-distribution data by predictive uncertainty.

    Args:
        score: The score that ``auroc`` and the others speak of.
        classes: C.
        inside: Numbers of each inside example.
        outside: Numbers of each outside example.

    Example:
        >>> near, far = torch.tensor([[3.0], [-4.0]]), torch.tensor([[0.1], [-0.2], [3.5]])
        >>> print(ood(lambda x: torch.cat([-x, x], 1).softmax(1), near, far).detection())
        inside   2
        outside  3
        auroc    0.8333 ± 0.2357
        aupr     0.9167
        fpr95    0.5
    """

    score: str
    classes: int
    inside: Judged
    outside: Judged

    @property
    def plot(self) -> SeparationPlots:
        """Plots, which take matplotlib axes: ``separation.plot.scores(ax)``."""
        return SeparationPlots(self)

    @property
    def detections(self) -> dict[str, Detection]:
        """The detection by every score that is there, the chosen one first."""
        both = self.inside.expected_entropy is not None and self.outside.expected_entropy is not None
        names = [self.score, *(name for name in SCORES if name != self.score)]
        return {name: self.detection(name) for name in names if both or name != "mutual-information"}

    @property
    def auroc(self) -> float:
        """P(score outside > score inside), ties half."""
        return self.detection().auroc

    @property
    def aupr(self) -> float:
        """Average precision with outside as the positive class."""
        return self.detection().aupr

    @property
    def fpr95(self) -> float:
        """Share of inside examples that are flagged when at least 95 % of those outside are found."""
        return self.detection().fpr95

    @property
    def entropy_inside(self) -> float:
        """Mean entropy inside, in nats."""
        return float(self.inside.entropy.mean())

    @property
    def entropy_outside(self) -> float:
        """Mean entropy outside, in nats."""
        return float(self.outside.entropy.mean())

    def detection(self, score: str | None = None) -> Detection:
        """Detection metrics of a score.

        Args:
            score: "entropy", "max-probability" or "mutual-information"; by default the chosen one.

        Returns:
            The detection.
        """
        name = self.score if score is None else score
        return Detection(name, self.inside.uncertainty(name), self.outside.uncertainty(name))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON.

        Returns:
            A dict; ``detections`` holds one entry a score.
        """
        counts = {"inside": self.inside.n, "outside": self.outside.n, "classes": self.classes}
        entropies = {"entropy_inside": self.entropy_inside, "entropy_outside": self.entropy_outside}
        found = {name: each.to_dict() for name, each in self.detections.items()}
        return {**counts, "score": self.score, **entropies, "detections": found}

    def _shown(self) -> dict[str, Any]:
        scores = self.to_dict()
        del scores["detections"]
        return {**scores, **{name: dict(each._shown()) for name, each in self.detections.items()}}


def ood(
    predict: Predict | PredictiveModel,
    inside: Any,
    outside: Any,
    *,
    score: str = "entropy",
    batch_size: int | None = None,
    device: torch.device | str | None = None,
) -> Separation:
    """Compare the uncertainty of predictions inside and outside of the distribution trained on.

    Args:
        predict: A model of linnet, such as a fit, whose ``predictive`` is called; or a callable, called
            with the inputs of one batch, that returns probabilities (N, C), S samples of them
            (S, N, C), or an object with ``.probs``.
        inside: Inputs like those trained on, or data with targets, which are not looked at: a tensor, an
            (x, y) pair, a ``Dataset``, a ``DataLoader`` or batches.
        outside: Other inputs, in any of the same forms.
        score: "entropy", "max-probability" or, for samples, "mutual-information".
        batch_size: Largest number of examples in a call; by default a loader's own batches, otherwise 128.
        device: Where inputs are put; by default they stay where they are.

    Returns:
        AUROC, AUPR, FPR95 and entropies.

    Raises:
        DataError: If either data set is empty or not finite.
        InputError: If predict does not return probabilities, cannot take outside examples, or the score is
            unknown.

    Example:
        >>> predict = lambda x: torch.cat([-x, x], 1).softmax(1)
        >>> ood(predict, torch.tensor([[3.0], [-4.0]]), torch.tensor([[0.1], [-0.2]])).auroc
        1.0
    """
    choice("score", score, SCORES)
    predict = asked(predict)
    (known, classes), (apart, others) = (
        _judged(predict, batches_of(predict, bare_inputs(x), batch_size, device), name)
        for name, x in (("inside", inside), ("outside", outside))
    )
    if classes != others:
        raise InputError(
            f"predict returned {classes} classes inside and {others} outside",
            expected="the same classes for both",
            remedy="look at what predict does with outside examples",
        )
    found = Separation(score, classes, known, apart)
    found.detection()  # needs samples for some scores: say so now
    return found


def _judged(predict: Predict, batches: Batches, name: str) -> tuple[Judged, int]:
    """Numbers of each example, and C; an error says which of the two data sets it is about."""
    parts: list[Judged] = []
    classes = 0
    try:
        with torch.no_grad():
            for batch in track(batches, f"predicting {name}"):
                p = class_probabilities(ask(predict, batch.x), batch.size)
                classes = same_classes(classes, p)
                parts.append(judge(p, None))
    except (DataError, InputError) as error:
        raise type(error)(f"{name}: {error.what}", error.expected, error.remedy) from error
    return join(parts), classes
