"""Networks whose outputs are on another scale than a likelihood's: probabilities for logits, rates for logs.

Values alone prove little: the logits of a network may all lie in [0, 1]. So they are looked at together with
what the network does last, which the graph of its derivatives tells. Probabilities of classes that sum to one
are no accident; their logarithms are logits as good as any others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linnet.likelihoods.discrete import Bernoulli, Categorical, Poisson
from linnet.likelihoods.gaussian import HeteroscedasticGaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.params import warn
from linnet.tangent.batch import Inputs, observed, take
from linnet.tangent.functional import Functional
from linnet.tangent.modes import in_exact_mode

FEW = 16  # examples that are looked at
ROUNDING = 1e-4  # by how much the sum of an example's probabilities may miss one
SQUASHING = {
    "Sigmoid": "sigmoid",
    "LogSigmoid": "log-sigmoid",
    "Softmax": "softmax",
    "Hardsigmoid": "sigmoid",
}
SQUASHING["Reciprocal"] = "sigmoid"  # 1 / (1 + exp(−f))
POSITIVE = {"Softplus": "softplus", "Exp": "exponential", "Relu": "ReLU", "Abs": "abs", "Pow": "power"}
# nodes of the graph that keep the scale; sums and products do with constants, that is with one input alone
ALIKE = frozenset(
    {
        "View",
        "ReshapeAlias",
        "UnsafeView",
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "Permute",
        "T",
        "Slice",
        "Select",
    }
    | {"Clone", "Expand", "Alias", "ToCopy", "Index", "Split", "Unbind", "Clamp", "ClampMin", "ClampMax"}
    | {"Add", "Sub", "Rsub", "Mul", "Div"}
)
JOINED = ("Cat", "Stack")


def scale_remarks(
    function: Functional, likelihood: Likelihood, x: Inputs, f: Tensor | None = None
) -> tuple[str, ...]:
    """Whether outputs are on another scale than the likelihood's."""
    if not isinstance(likelihood, Bernoulli | Categorical | Poisson | HeteroscedasticGaussian):
        return ()
    few = take(observed(x)[0], slice(0, FEW))
    told = _told(function, likelihood, function.check_runs(few) if f is None else f[:FEW], few)
    if told is None:
        return ()
    found, expected, last = told
    return (
        f"the network's outputs are {found}. {type(likelihood).__name__}() expects {expected}; leave the "
        f"last {last} out",
    )


def warn_of_scale(function: Functional, likelihood: Likelihood, x: Inputs, f: Tensor | None = None) -> None:
    """Warn if outputs are on another scale than the likelihood's."""
    for line in scale_remarks(function, likelihood, x, f):
        warn(line)


def _told(function: Functional, likelihood: Likelihood, f: Tensor, x: Inputs) -> tuple[str, str, str] | None:
    """What outputs are, what they should be, and the last operation; ``None`` where nothing is wrong."""
    if not bool(f.isfinite().all()):
        return None
    if isinstance(likelihood, Poisson):
        last = POSITIVE.get(_last(function, x)) if bool((f >= 0).all()) else None
        return None if last is None else ("rates", "their logarithms", last)
    if isinstance(likelihood, HeteroscedasticGaussian):
        axis = likelihood.axis
        variances = f.narrow(axis, f.shape[axis] // 2, f.shape[axis] // 2)
        logs = likelihood.parametrization == "log-variance"
        last = POSITIVE.get(_last(function, x)) if logs and bool((variances >= 0).all()) else None
        return None if last is None else ("means and variances", "means and log-variances", last)
    inside = bool((f >= 0).all()) and bool((f <= 1).all())
    if isinstance(likelihood, Categorical) and inside and _sums_to_one(f, likelihood.axis):
        return "probabilities, not negative and summing to one", "logits", "softmax"
    if not inside and not bool((f <= 0).all()):
        return None
    last = SQUASHING.get(_last(function, x))
    return None if last is None else ("probabilities" if inside else "log-probabilities", "logits", last)


def _sums_to_one(f: Tensor, axis: int) -> bool:
    """Whether the entries along an axis, two or more, sum to one."""
    if not -f.ndim < axis < f.ndim or f.ndim < 2 or f.shape[axis] < 2:
        return False
    return float((f.double().sum(axis) - 1).abs().max()) < ROUNDING


@in_exact_mode
def _last(function: Functional, x: Inputs) -> str:
    """The last operation of a network that is more than another view of its result; empty where none is."""
    with torch.enable_grad():
        params = {name: value.requires_grad_() for name, value in function.theta.items()}
        return _named(function(params, take(x, slice(0, 2))).grad_fn)


def _named(node: Any) -> str:
    """The operation of a node of the graph, or of what it passes on: of joined tensors, the last."""
    while node is not None:
        name = node.name().partition("Backward")[0]
        before = [one for one, _ in node.next_functions if one is not None]
        if not before or not (name in JOINED or (name in ALIKE and len(before) == 1)):
            return str(name)
        node = before[-1]
    return ""
