"""Results of a predict callable: class probabilities, samples of them, or means and variances.

Everything is looked at once, where it comes in, so that a network that returns logits is told to use
softmax instead of being scored as nonsense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.params import call, wrapped
from linnet.tree import map_tensors

SHAPES = "probabilities (N, C), or S samples of them (S, N, C)"


def ask(predict: Callable[[Any], Any], x: Any) -> Any:
    """Call the user's own callable, naming the inputs in the error if it fails."""
    return call("predict", predict, map_tensors(torch.clone, x), expected="inputs that predict can take")


def class_probabilities(answer: Any, n: int) -> Tensor:
    """The class probabilities in what a predict callable returned."""
    p = _as_tensor(answer if isinstance(answer, Tensor) else getattr(answer, "probs", answer))
    if p.ndim not in (2, 3) or p.shape[-2] != n or 0 in p.shape:
        hint = "return p for all classes, not the class itself" if p.ndim < 2 else "put the classes last"
        raise InputError(
            f"predict returned the shape {tuple(p.shape)} for {n} example(s)", expected=SHAPES, remedy=hint
        )
    if p.shape[-1] < 2:
        raise InputError(
            f"predict returned one column, the shape {tuple(p.shape)}",
            expected="one column per class, two for a yes or no",
            remedy="return torch.stack([1 - p, p], -1)",
        )
    p = p if p.is_floating_point() else p.to(torch.get_default_dtype())
    _check_distribution(p.detach())
    return p


def tolerance(dtype: torch.dtype) -> float:
    """The largest distance from one of the sum of a row of rounded probabilities."""
    return max(1e-4, 4 * torch.finfo(dtype).eps)


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
    finite = torch.isfinite(p).all(-1)
    if not finite.all():
        first = int((~finite).nonzero()[0, -1])
        raise InputError(
            f"predict returned NaN or infinite values, first for example {first} of its batch",
            expected="finite probabilities",
            remedy="look at the network's outputs for this example",
        )
    slack = tolerance(p.dtype)
    total = p.sum(-1, dtype=torch.float64)
    wrong = ((total - 1).abs() > slack) | (p < -slack).any(-1)
    if not wrong.any():
        return
    place = tuple(wrong.nonzero()[0].tolist())
    likely_log = bool((p <= 0).all()) and bool(
        ((p.exp().sum(-1, dtype=torch.float64) - 1).abs() < slack).all()
    )
    kind = "log-probabilities" if likely_log else "logits, not probabilities"
    raise InputError(
        f"predict returned rows that are no distribution: example {place[-1]} of its batch sums to "
        f"{float(total[place]):.4g} and its smallest value is {float(p[place].min()):.4g}; "
        f"these seem to be {kind}",
        expected="rows of non-negative numbers that sum to one",
        remedy=(
            "return outputs.exp()"
            if likely_log
            else "return outputs.softmax(-1); of a fit, pass the fit itself"
        ),
    )


def mean_and_variance(answer: Any, n: int, noise: str) -> tuple[Tensor, Tensor]:
    """The mean and variance in what a predict callable returned for a regression."""
    if noise == "add" and callable(getattr(answer, "with_noise", None)):
        answer = answer.with_noise()
    if isinstance(answer, Tensor) or not (hasattr(answer, "mean") and hasattr(answer, "variance")):
        raise InputError(
            f"predict returned {type(answer).__name__}, but the targets are floating-point numbers",
            expected="an object with .mean and .variance, as torch.distributions.Normal has them",
            remedy="return such an object, or convert class labels to integers with y.long()",
        )
    mean, variance = (_column(value, n) for value in (answer.mean, answer.variance))
    if mean.shape != variance.shape:
        raise InputError(
            f"predict returned .mean of shape {tuple(mean.shape)} and .variance of {tuple(variance.shape)}",
            expected="one variance for each mean",
            remedy="return the marginal variances, as in covariance.diagonal(dim1=1, dim2=2)",
        )
    bad = ~(torch.isfinite(mean) & torch.isfinite(variance)).all(1)
    if bad.any():
        raise InputError(
            f"predict returned NaN or infinite values, as for example {int(bad.nonzero()[0])} of its batch",
            expected="a finite mean and variance",
            remedy="look at the network's outputs for this example",
        )
    if not (variance > 0).all():
        raise InputError(
            f"predict returned a variance of {float(variance.min()):.4g}",
            expected="positive variances, those of a target about the mean",
            remedy="add the variance of the noise",
        )
    return mean, variance


def _column(value: Any, n: int) -> Tensor:
    """Numbers as (N, D) in float64 on the CPU."""
    column = _as_tensor(value).detach().cpu().double()
    if column.ndim == 0 or column.shape[0] != n:
        raise InputError(
            f"predict returned a mean or variance of shape {tuple(column.shape)} for {n} example(s)",
            expected="(N,) or (N, D)",
            remedy="put the examples first",
        )
    return column.reshape(n, -1)
