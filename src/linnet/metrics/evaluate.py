"""``linnet.evaluate``: scores of the predictions of any callable.

What it returns is looked at once, where it comes in, so that a network that returns logits is told to use
softmax instead of being scored as nonsense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from linnet.curvatures.stream import Batches
from linnet.errors import InputError
from linnet.metrics.reports import Judged, RegressionReport, Report, join, judge
from linnet.params import call, choice, function, integer, optional, wrapped
from linnet.params import device as checked_device
from linnet.predictive.model import PredictiveModel
from linnet.progress import track
from linnet.tangent.batch import Inputs, check_finite
from linnet.tangent.inputs import DataNotes, in_columns
from linnet.tree import map_tensors

SHAPES = "probabilities (N, C), or S samples of them (S, N, C)"


def ask(predict: Callable[[Any], Any], x: Any) -> Any:
    """Call the user's own callable, naming the inputs in the error if it fails."""
    return call("predict", predict, map_tensors(torch.clone, x), expected="inputs that predict can take")


def class_probabilities(answer: Any, n: int) -> Tensor:
    """The class probabilities in what a predict callable returned."""
    p = _as_tensor(answer if isinstance(answer, Tensor) else getattr(answer, "probs", answer))
    if p.ndim not in (2, 3) or p.shape[-2] != n or 0 in p.shape or p.shape[-1] < 2:
        hint = "return p for all classes, not the class itself" if p.ndim < 2 else "put the classes last"
        one_column = p.ndim > 1 and p.shape[-1] == 1
        raise InputError(
            f"predict returned the shape {tuple(p.shape)} for {n} example(s)",
            expected=f"{SHAPES}, with one column per class, two for a yes or no",
            remedy="return torch.stack([1 - p, p], -1)" if one_column else hint,
        )
    p = p if p.is_floating_point() else p.to(torch.get_default_dtype())
    _check_distribution(p.detach())
    return p


def _as_tensor(value: Any) -> Tensor:
    """A tensor on a device that has float64, from numbers of any kind."""
    try:
        p = wrapped(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"predict returned {type(value).__name__}",
            expected=SHAPES + ", or an object with .probs",
            remedy="return the tensor of probabilities",
        ) from error
    return p.cpu() if p.device.type == "mps" else p


def _check_distribution(p: Tensor) -> None:
    """Raise unless every row is a distribution, to rounding; say what it seems to be instead."""
    slack = max(1e-4, 4 * torch.finfo(p.dtype).eps)
    total = p.sum(-1, dtype=torch.float64)
    right = torch.isfinite(p).all(-1) & ((total - 1).abs() <= slack) & (p >= -slack).all(-1)
    if right.all():
        return
    place = tuple((~right).nonzero()[0].tolist())
    likely_log = bool(((p.exp().sum(-1, dtype=torch.float64) - 1).abs() < slack).all())
    use = "return outputs.exp()" if likely_log else "return outputs.softmax(-1)"
    raise InputError(
        f"predict returned rows that are no distribution: example {place[-1]} of its batch sums to "
        f"{float(total[place]):.4g} and its smallest value is {float(p[place].min()):.4g}",
        expected="rows of finite, non-negative numbers that sum to one",
        remedy=f"{use} for {'log-probabilities' if likely_log else 'logits; of a fit, pass the fit itself'}",
    )


def compared(answer: Any, y: Tensor, noise: str) -> tuple[Tensor, Tensor, Tensor]:
    """Means and variances that a predict callable returned for a regression, and its targets, (N, D) each."""
    if noise == "add" and callable(getattr(answer, "with_noise", None)):
        answer = answer.with_noise()
    if isinstance(answer, Tensor) or not (hasattr(answer, "mean") and hasattr(answer, "variance")):
        raise InputError(
            f"predict returned {type(answer).__name__}, but the targets are floating-point numbers",
            expected="an object with .mean and .variance, as torch.distributions.Normal has them",
            remedy="return such an object, or convert class labels to integers with y.long()",
        )
    check_finite(y, "y")
    found = [_as_tensor(value).detach().cpu().double() for value in (answer.mean, answer.variance, y)]
    mean, variance, target = (part.reshape(len(part), -1) if part.ndim else part for part in found)
    if not mean.shape == variance.shape == target.shape:
        raise InputError(
            f"predict returned .mean of shape {tuple(mean.shape)} and .variance of {tuple(variance.shape)} "
            f"for y of shape {tuple(y.shape)}",
            expected="a mean and a marginal variance for each target, (N,) or (N, D)",
            remedy="put the examples first; convert class labels to integers with y.long()",
        )
    wrong = ~(torch.isfinite(mean) & torch.isfinite(variance) & (variance > 0)).all(1)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise InputError(
            f"predict returned NaN, an infinite value or a variance of {float(variance[first].min()):.4g} "
            f"for example {first} of its batch",
            expected="finite means, and positive variances of a target about them",
            remedy="look at the network's outputs for this example, and add the variance of the noise, of "
            "which a constant y has none",
        )
    return mean, variance, target


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
                values.append(compared(answer, batch.y, noise))
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
    optional(integer, "batch_size", batch_size)
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
