"""``linnet.ood``: out-of-distribution detection by predictive uncertainty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from linnet.curvatures.stream import Batch, Batches
from linnet.errors import DataError, InputError
from linnet.metrics.evaluate import Predict, ask, asked, batches_of, class_probabilities, same_classes
from linnet.metrics.reports import SCORES, Detection, Judged, SeparationPlots, join, judge
from linnet.params import choice
from linnet.predictive.model import PredictiveModel
from linnet.progress import track
from linnet.shown import Record
from linnet.tangent.door import bare_inputs
from linnet.tree import tensors_in

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False, repr=False)
class Separation(Record):
    """Separation of in-distribution and out-of-distribution data by predictive uncertainty.

    Args:
        score: The score that ``auroc`` and the others speak of.
        classes: C.
        inside: Numbers of each inside example.
        outside: Numbers of each outside example.

    Example:
        >>> near, far = torch.tensor([[3.0], [-4.0]]), torch.tensor([[0.1], [-0.2], [3.5]])
        >>> print(ood(lambda x: torch.cat([-x, x], 1).softmax(1), near, far))
        2 inside, 3 outside; mean entropy 0.0102 inside, 0.4563 outside
        entropy: auroc 0.8333 ± 0.2357, aupr 0.9167 (inside 0.8333), fpr95 0.5000
        max-probability: auroc 0.8333 ± 0.2357, aupr 0.9167 (inside 0.8333), fpr95 0.5000
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
        return {
            "inside": self.inside.n,
            "outside": self.outside.n,
            "classes": self.classes,
            "score": self.score,
            "entropy_inside": self.entropy_inside,
            "entropy_outside": self.entropy_outside,
            "detections": {name: found.to_dict() for name, found in self.detections.items()},
        }

    def __str__(self) -> str:
        """The printed report."""
        head = (
            f"{self.inside.n:,} inside, {self.outside.n:,} outside; mean entropy "
            f"{self.entropy_inside:.4f} inside, {self.entropy_outside:.4f} outside"
        )
        return "\n".join([head, *(str(found) for found in self.detections.values())])

    def _shown(self) -> dict[str, Any]:
        counts = {"inside": self.inside.n, "outside": self.outside.n}
        entropies = {"entropy inside": self.entropy_inside, "entropy outside": self.entropy_outside}
        return {**counts, **entropies, "detections": [str(found) for found in self.detections.values()]}

    __repr__ = __str__


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
    known, classes, shapes = _judged(
        predict, batches_of(predict, bare_inputs(inside), batch_size, device), "inside", ()
    )
    apart, others, _ = _judged(
        predict, batches_of(predict, bare_inputs(outside), batch_size, device), "outside", shapes
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


def _judged(predict: Predict, batches: Batches, name: str, before: Shapes) -> tuple[Judged, int, Shapes]:
    """Numbers of each example, C, and the shapes of an example's inputs."""
    parts: list[Judged] = []
    classes, shapes = 0, before
    with torch.no_grad():
        for batch in track(_named(batches, name), f"predicting {name}"):
            here = tuple(tuple(t.shape[1:]) for t in tensors_in(batch.x))
            try:
                answer = ask(predict, batch.x)
            except InputError as error:
                if not before or here == before:
                    raise
                raise InputError(
                    f"predict failed on {name} examples of shape {_shown(here)} after inside ones of "
                    f"{_shown(before)} ({error.what})",
                    expected="outside examples that predict can take",
                    remedy="resize or pad the outside examples",
                ) from error
            p = class_probabilities(answer, batch.size)
            classes, shapes = same_classes(classes, p), here
            parts.append(judge(p, None))
    return join(parts), classes, shapes


def _named(batches: Batches, name: str) -> Iterator[Batch]:
    """The batches; what is wrong with the data is said of the argument that holds them."""
    try:
        yield from batches
    except DataError as error:
        raise DataError(f"{name}: {error.what}", error.expected, error.remedy) from error


def _shown(shapes: Shapes) -> str:
    """Shapes in words."""
    return " and ".join("×".join(map(str, shape)) or "scalar" for shape in shapes)
