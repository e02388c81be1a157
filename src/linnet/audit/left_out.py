"""What a fit says of examples that it has not seen: its training examples, each left out, and new ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.audit.predictors import check_fitted
from linnet.errors import InputError
from linnet.fitting.fitted import Fitted
from linnet.fitting.solved_fit import unweighed
from linnet.predictive.noise import probabilities
from linnet.tangent.batch import Inputs, batch_size
from linnet.tangent.modes import in_exact_mode

DIGITS = 16  # binary ones of an output that count in comparisons
EXAMPLES = 2000  # training examples that a batch is compared with, at most


def check_left_out(fit: Any, what: str) -> Fitted:
    """Raise unless a fit knows what it says of examples that it has not seen."""
    checked = check_fitted(fit)
    checked._require_one_target(what)
    unweighed(checked, what)
    if checked.trained and checked.held_out is None:
        raise InputError(
            f"{what} of a fit whose lower layers were trained, without held-out outputs",
            expected="outputs by a procedure that has not seen the example",
            remedy="adapt again with tune=True, or with tune=False",
        )
    return checked


@dataclass(frozen=True, eq=False)
class Unseen:
    """What is said of examples by fits that have not seen them."""

    outputs: Tensor  # (N, C)
    spread: Tensor | None  # mean variance of the outputs, (N,); None where only held-out folds are known
    p: Tensor | None  # probabilities of classes by the outputs, (N, K); None for a regression

    def taken(self, at: Tensor) -> Unseen:
        """Some of the examples."""
        spread, p = (None if one is None else one[at] for one in (self.spread, self.p))
        return Unseen(self.outputs[at], spread, p)

    @property
    def groups(self) -> list[Tensor]:
        """What is compared: numbers (N,), of which the ranks count, or indicators of classes (N, K)."""
        known = [] if self.spread is None else [self.spread]
        if self.p is None:
            return [*known, *_of_digits(self.outputs).unbind(1)]
        likeliest = self.p.max(1)
        return [*known, likeliest.values, F.one_hot(likeliest.indices, self.p.shape[1]).double()]


def _of_digits(outputs: Tensor) -> Tensor:
    """Outputs without the digits that rounding leaves, by which constant ones would have ranks."""
    largest = outputs.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny)
    step = 2.0 ** (largest.log2().floor() - DIGITS)
    return (outputs / step).round() * step


@dataclass(frozen=True, eq=False)
class Reference:
    """What a fit says of its training examples without having seen them, as they are or altered."""

    unseen: Unseen
    right: Tensor  # whether the prediction is right, or its mean square error, (N,)
    left: Tensor | None  # V_j = J_j H₋ⱼ⁻¹ J_jᵀ, (N, C, C), or (N, 1, 1) of outputs alike; if asked for
    shift: str | None = None  # how they were altered
    at: Tensor | None = None  # which of the training examples these are; None for all

    @classmethod
    def of(cls, fit: Fitted, spread: bool = True) -> Reference:
        """By leave-one-out, or by held-out folds; with variances only by the former, and only if asked."""
        left = fit.system.loo_variances().double() if spread and fit.held_out is None else None
        outputs = fit.loo().double()
        p = None if fit.labels is None else fit._class_probs(outputs)
        unseen = Unseen(outputs, None if left is None else _mean_variance(fit, left), p)
        return cls(unseen, _right(fit, unseen, slice(None)), left)

    def altered(self, fit: Fitted, shift: str, x: Inputs, at: Tensor) -> Reference:
        """The same of the training examples at some positions, which a shift has made into x."""
        unseen = of_batch(fit, self, x, at)
        return Reference(unseen, _right(fit, unseen, at), None, shift, at.to(unseen.outputs.device))


def confidence(fit: Fitted, unseen: Unseen) -> Tensor:
    """The largest probability of each example by outputs with their variance, (N,)."""
    assert unseen.p is not None
    if unseen.spread is None:
        return unseen.p.amax(1)
    assert fit.temperature is not None
    spread = fit.variance_scale * unseen.spread[:, None].expand_as(unseen.outputs)
    return probabilities(unseen.outputs, spread, fit.temperature, fit._possible).amax(1)


def _right(fit: Fitted, unseen: Unseen, at: Tensor | slice) -> Tensor:
    """Whether predictions for training examples are right, or their mean square errors, (N,)."""
    outputs, labels = unseen.outputs, fit.labels
    if labels is None or unseen.p is None:
        return (fit.targets[at].to(outputs) - outputs).square().mean(1)
    return (unseen.p.argmax(1) == labels[at].to(outputs.device)).double()


@in_exact_mode
@torch.no_grad()
def of_batch(fit: Fitted, reference: Reference, x: Inputs, at: Tensor | None = None) -> Unseen:
    """Each example of a batch by the fit without one training example, at the positions or in turn."""
    spread = change = None
    if fit.held_out is None:
        # the outputs come after the effects, whose kernel they then take
        place = fit.targets.device
        at = torch.arange(batch_size(x), device=place) % fit.n if at is None else at.to(place)
        moved, residuals = fit.system.paired(x, at), fit.system.loo_residuals().double()[at]
        of_one = moved.shape[1] < residuals.shape[1]  # A = a I: one output stands for all
        change = moved[:, 0] * residuals if of_one else (moved @ residuals[:, :, None])[:, :, 0]
        if reference.left is not None:
            spread = _mean_variance(fit, _without_one(fit, reference.left, x, at, moved))
    outputs = fit._outputs(x).double()
    if change is not None:
        outputs = outputs - change.to(outputs)
    return Unseen(outputs, spread, None if fit.labels is None else fit._class_probs(outputs))


def _mean_variance(fit: Fitted, found: Tensor) -> Tensor:
    """Mean variance of the outputs, (N,), by J H⁻¹ Jᵀ, (N, C, C)."""
    return fit._unit * found.diagonal(dim1=1, dim2=2).mean(1).clamp_min(0)


def _without_one(fit: Fitted, left: Tensor, x: Inputs, at: Tensor, moved: Tensor) -> Tensor:
    """J(x) H₋ⱼ⁻¹ J(x)ᵀ without training example j, another for each example, as ``left``."""
    # S + A (Λⱼ + Λⱼ Vⱼ Λⱼ) Aᵀ with S = J(x) H⁻¹ J(x)ᵀ and A = J(x) H⁻¹ Jⱼᵀ, by the formula of Woodbury
    system, c = fit.system, moved.shape[1]
    roots = None if fit._roots is None else fit._roots[:, :c, :c]
    found = (system.covariance(x) / system.ridge).double()[:, :c, :c]
    curved = torch.eye(c).to(found).expand(system.n, c, c) if roots is None else (roots @ roots.mT).to(found)
    return found + moved @ (curved + curved @ left.to(found) @ curved)[at] @ moved.mT
