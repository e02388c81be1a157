"""The cross-entropy of a fit: its labels, and loss, gradient and Hessian of every example in its outputs.

With p = softmax(f) (or σ(f) for one output) and labels y that are probabilities themselves

    ℓ_i = −Σ_c y_ic log p_ic        g_i = p_i − y_i        Λ_i = diag(p_i) − p_i p_iᵀ = L_i L_iᵀ

where L_i has C − 1 columns (one for one output): softmax does not see a shift of all outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.likelihoods.discrete import Bernoulli, Categorical
from linnet.linear.targets import Targets, make_targets

SUMS = 1e-4  # by how much the probabilities of an example may miss the sum of one


@dataclass(frozen=True)
class ClassLoss:
    """Cross-entropy against given labels."""

    y: Tensor  # label probabilities, (N, C), float64

    @property
    def likelihood(self) -> Categorical | Bernoulli:
        """Of one of C classes, or of yes or no for one output."""
        return Bernoulli() if self.y.shape[1] == 1 else Categorical()

    @property
    def rank(self) -> int:
        """D, the columns of L_i."""
        return max(1, self.y.shape[1] - 1)

    def losses(self, f: Tensor) -> Tensor:
        """ℓ_i, (N,), in float64."""
        # f (N, C)
        return self.likelihood.nll(f.to(self.y), self.y)

    def gradient(self, f: Tensor) -> Tensor:
        """g_i = p_i − y_i, (N, C)."""
        # f (N, C)
        return self.likelihood.gradient(f.to(self.y), self.y)

    def roots(self, f: Tensor) -> Tensor:
        """L_i with L_i L_iᵀ = Λ_i, (N, C, D)."""
        # f (N, C)
        # Source: Tanabe and Sagae 1992, the Cholesky factor of the multinomial covariance.
        return self.likelihood.position_root(f.to(self.y))[:, 0]

    def taken(self, index: Tensor) -> ClassLoss:
        """The loss of some examples."""
        return replace(self, y=self.y[index])

    def joined(self, other: ClassLoss) -> ClassLoss:
        """The loss of these examples and then others."""
        return ClassLoss(torch.cat([self.y, other.y]))


def class_targets(y: Tensor, outputs: int, dtype: torch.dtype) -> Targets:
    """Label probabilities (N, C) for a network with C outputs."""
    # y (N,)
    if y.is_floating_point():
        return Targets(_probabilities(y, outputs).to(dtype), max(2, outputs), 1.0)
    if y.numel() and not y.is_complex() and y.dtype != torch.bool and bool((y < 0).any()):
        first = int((y.flatten() < 0).nonzero()[0])
        raise DataError(
            f"y holds the negative label {int(y.flatten()[first])} at index {first}",
            expected=f"classes 0 to {max(2, outputs) - 1}; ignore_index is not supported",
            remedy="leave out the examples that should not count: x[y >= 0], y[y >= 0]",
        )
    # for one output, labels 0 and 1
    made = make_targets(y, max(2, outputs), 1.0, varied=False, dtype=dtype)
    return made if outputs > 1 else Targets(made.values[:, 1:], 2, 1.0)


def _probabilities(y: Tensor, outputs: int) -> Tensor:
    """Float labels as (N, C)."""
    values = y[:, None] if y.ndim == 1 and outputs == 1 else y
    if values.ndim != 2 or values.shape[1] != outputs:
        raise InputError(
            f"y has type {y.dtype} and shape {tuple(y.shape)}",
            expected=f"integer classes (N,), or probabilities (N, {outputs})",
            remedy='convert classes with y.long(); for regression targets pass loss="squared"',
        )
    if values.shape[0] == 0:
        raise DataError(
            "y is empty: it holds 0 examples",
            expected="at least one example",
            remedy="check the path and the split that the data come from",
        )
    if not torch.isfinite(values).all():
        bad = int((~torch.isfinite(values).all(1)).nonzero()[0])
        raise DataError(
            f"y is not finite at index {bad}",
            expected="probabilities",
            remedy="drop or repair these examples",
        )
    sums = values.double().sum(1)
    wrong = (values < 0).any(1) | (values > 1 + SUMS).any(1)
    if outputs > 1:
        wrong = wrong | ((sums - 1).abs() > SUMS)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        shown = [round(v, 4) for v in values[first].tolist()[:4]]
        raise InputError(
            f"y is of float type, and at index {first} it is no probability: {shown}",
            expected="integer classes, or probabilities"
            + (" that sum to one for each example" if outputs > 1 else " from 0 to 1"),
            remedy='convert classes with y.long(); for regression targets pass loss="squared"',
        )
    return values
