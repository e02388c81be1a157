"""``linnet.evaluate``: scores of the predictions of any callable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from linnet.curvatures.stream import Batches
from linnet.errors import DataError, InputError
from linnet.metrics.answers import ask, class_probabilities, mean_and_variance
from linnet.metrics.judged import Judged, join, judge
from linnet.metrics.reports import RegressionReport, Report
from linnet.params import choice, function, integer
from linnet.params import device as checked_device
from linnet.predictive.model import PredictiveModel
from linnet.progress import track
from linnet.tangent.batch import Inputs
from linnet.tangent.door import in_columns
from linnet.tangent.loaders import DataNotes

Predict = Callable[[Inputs], Any]


def evaluate(
    predict: Predict | PredictiveModel,
    data: Any,
    *,
    bins: int = 15,
    noise: str = "add",
    batch_size: int | None = None,
    device: torch.device | str | None = None,
) -> Report | RegressionReport:
    """Score class probabilities against integer labels, or means and variances against real targets.

    Only a few numbers are kept of each example, so data of any size can be streamed.

    Args:
        predict: A model of linnet, such as a fit, whose ``predictive`` is called; or a callable, called
            with the inputs of one batch. For integer labels it returns probabilities (N, C), S
            samples of them (S, N, C), or an object with ``.probs``; samples are averaged, and the entropy
            is then split into its expectation and the mutual information. For real targets it returns an
            object with ``.mean`` and ``.variance``, (N,) or (N, D).
        data: An (x, y) pair, a ``Dataset``, a ``DataLoader`` or batches, with integer classes (N,), or real
            targets (N,) or (N, D).
        bins: Number of bins of the calibration errors.
        noise: For real targets: "add" calls ``.with_noise()`` where the answer has it, since linnet's own
            predictive distributions are those of the network's outputs; "included" takes answers as they are.
        batch_size: Largest number of examples in a call; by default a loader's own batches, otherwise 128.
        device: Where inputs are put; by default they stay where they are.

    Returns:
        A ``Report`` for classes, a ``RegressionReport`` for real targets.

    Raises:
        DataError: If the data are empty or not finite, or a label is out of range.
        InputError: If predict returns something else, as logits; or data have no targets.

    Example:
        >>> x, y = torch.randn(50, 3), torch.arange(50) % 2
        >>> model = torch.nn.Linear(3, 2)
        >>> report = evaluate(lambda x: model(x).softmax(1), (x, y))
        >>> 0 <= report.ece <= 1
        True
    """
    choice("noise", noise, ("add", "included"))
    integer("bins", bins)
    columns = getattr(getattr(predict, "record", None), "columns", ())
    if columns and isinstance(data, tuple) and len(data) == 2:
        data = in_columns(data[0], DataNotes(columns=columns)), data[1]
    predict = asked(predict)
    judged: list[Judged] = []
    values: list[tuple[Tensor, Tensor, Tensor]] = []
    classes, start = 0, 0
    with torch.no_grad():
        for batch in track(batches_of(predict, data, batch_size, device), "evaluating"):
            if batch.y is None:
                raise InputError("data have no targets", expected="(x, y) pairs", remedy="pass data=(x, y)")
            answer = ask(predict, batch.x)
            if batch.y.is_floating_point():
                values.append(_compared(answer, batch.y, noise, start))
            else:
                p = class_probabilities(answer, batch.size)
                classes = same_classes(classes, p)
                judged.append(judge(p, batch.y, start))
            start += batch.size
    if judged and values:
        raise InputError(
            "data mix integer and real targets", expected="targets of one kind", remedy="convert the targets"
        )
    if values:
        mean, variance, target = (torch.cat(column) for column in zip(*values, strict=True))
        return RegressionReport(mean, variance, target)
    return Report(join(judged), classes, bins)


def _compared(answer: Any, y: Tensor, noise: str, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and target of one batch, (N, D) each."""
    mean, variance = mean_and_variance(answer, y.shape[0], noise)
    target = y.detach().cpu().double().reshape(y.shape[0], -1)
    if target.shape != mean.shape:
        raise InputError(
            f"y has shape {tuple(y.shape)} but predict returned a mean of shape {tuple(mean.shape)}",
            expected="a mean for each target",
            remedy="convert class labels to integers with y.long(), or check what predict returns",
        )
    bad = ~torch.isfinite(target).all(1)
    if bad.any():
        raise DataError(
            f"y is not finite at index {start + int(bad.nonzero()[0])}",
            expected="finite targets",
            remedy="drop or repair these examples",
        )
    return mean, variance, target


def asked(predict: Any) -> Predict:
    """What is called for the predictions of a batch."""
    if isinstance(predict, PredictiveModel) and not callable(predict):
        return predict.predictive
    found: Predict = predict
    return found


def batches_of(
    predict: Predict,
    data: Any,
    batch_size: int | None,
    device: torch.device | str | None,
) -> Batches:
    """The batches to be asked about, with the model's names of classes, after a look at the arguments."""
    takes = "a callable that takes the inputs of a batch"
    function("predict", predict, takes, "pass lambda x: model(x).softmax(-1)")
    if batch_size is not None:
        integer("batch_size", batch_size)
    place = None if device is None else checked_device("device", device)
    model = getattr(predict, "__self__", predict)  # of a method such as fit.predictive
    names = getattr(model, "class_names", None) or ()
    # None leaves batches where they are
    return Batches(data, cast("torch.device", place), batch_size, names=names)


def same_classes(before: int, p: Tensor) -> int:
    """The number of classes C, which must not change from batch to batch."""
    # p (..., C)
    if before and p.shape[-1] != before:
        raise InputError(
            f"predict returned {p.shape[-1]} classes after {before} before",
            expected="the same classes for every batch",
            remedy="look at what predict does with a batch of another size",
        )
    return p.shape[-1]
