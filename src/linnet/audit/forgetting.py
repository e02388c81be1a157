"""Verifies that a fit solves the problem without the forgotten examples."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.audit.predictors import check_fit
from linnet.errors import InputError
from linnet.fitting.head import example_hashes
from linnet.fitting.last_layer import RECORD
from linnet.fitting.linear_fit import LinearFit
from linnet.shown import Record
from linnet.tangent.batch import take
from linnet.tangent.jacobian import JacobianOperator
from linnet.tangent.modes import in_exact_mode


@dataclass(frozen=True, repr=False)
class ForgettingCertificate(Record):
    """Bounds on the distance to a fit that never saw the forgotten examples.

    The objective is ρ-strongly convex, so the distance is at most the norm of its gradient over ρ: a bound
    that needs no retraining and no trust in how the fit was made.

    Args:
        gradient: ‖∇F(δ)‖ of the objective on the retained examples at the fit's δ, along its equations.
        relative: The same over ‖∇F(0)‖.
        distance: Bound on ‖δ − δ*‖, δ* the optimum of retraining.
        relative_distance: The same over ‖δ‖.
        retained: Number of retained examples.
        forgotten: Number of forgotten examples.
        warnings: What else of the forgotten examples may be left.
    """

    gradient: float
    relative: float
    distance: float
    relative_distance: float
    retained: int
    forgotten: int
    warnings: tuple[str, ...] = ()


@in_exact_mode
def forgetting_certificate(fit: LinearFit, forgotten: LinearFit | Any) -> ForgettingCertificate:
    """Certify that forgetting equals retraining: the gradient on the retained data vanishes.

    The retained examples are taken from the fit that came before, and the gradient is computed afresh
    from the network: nothing that the forgotten fit says of itself is used but its δ.

    Args:
        fit: The fit before.
        forgotten: The fit after ``fit.forget(...)``, or the positions to forget.

    Returns:
        The certificate.

    Raises:
        InputError: If the second fit is of another network or ridge, or holds examples of its own.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        >>> x = torch.ones(5, 2).cumsum(0).double()
        >>> fit = linnet.fit(linnet.linearize(net), (x, x[:, :1]))
        >>> forgetting_certificate(fit, fit.forget([1, 2])).relative < 1e-12
        True
    """
    check_fit(fit)
    after = forgotten if isinstance(forgotten, LinearFit) else fit.forget(forgotten)
    _check_pair(fit, after)
    kept, lost = _retained(fit, after)
    x = take(fit.x, kept)
    jacobian = JacobianOperator(fit.module.function, x, fit.system.c)
    with torch.no_grad():
        base = _base(fit, x)
    residual = fit.targets[kept].to(base) - base
    delta = after.module.space.to_flat(after.delta)
    start = jacobian.T.mv(residual.reshape(-1))
    # ∇F(δ) = ρδ − Jᵀ(r − Jδ)
    gradient = fit.ridge * delta - jacobian.T.mv(residual.reshape(-1) - jacobian.mv(delta))
    gradient, start = _free(after, gradient).double(), _free(after, start).double()
    size = float(gradient.norm())
    tiny = torch.finfo(torch.float64).tiny
    norm = float(delta.double().norm())
    return ForgettingCertificate(
        size,
        size / max(float(start.norm()), tiny),
        size / fit.ridge,
        size / fit.ridge / max(norm, tiny),
        len(kept),
        len(lost),
        _warnings(fit, lost),
    )


def _base(fit: LinearFit, x: Any) -> Tensor:
    """f₀(x)."""
    base: Tensor = fit.module.base(x)
    return base.reshape(base.shape[0], -1)


def _check_pair(fit: LinearFit, after: LinearFit) -> None:
    """Raise unless both fits solve the same kind of problem."""
    if after.module.function.fingerprint() != fit.module.function.fingerprint():
        raise InputError(
            "forgotten is a fit of another network",
            expected="a fit made from this one with forget",
            remedy="pass fit.forget(indices), or the indices",
        )
    if after.ridge != fit.ridge:
        raise InputError(
            f"forgotten has ridge {after.ridge:g}, the fit {fit.ridge:g}",
            expected="the same objective",
            remedy="compare with fit.forget(indices), which keeps the ridge",
        )


def _retained(fit: LinearFit, after: LinearFit) -> tuple[Tensor, Tensor]:
    """Positions in the first fit of what the second still has, and of what it has not."""
    left = Counter(example_hashes(after.x, after.targets))
    kept, lost = [], []
    for i, name in enumerate(example_hashes(fit.x, fit.targets)):
        if left[name] > 0:
            left[name] -= 1
            kept.append(i)
        else:
            lost.append(i)
    if foreign := sum(left.values()):
        raise InputError(
            f"forgotten holds {foreign} example(s) that the fit does not have",
            expected="a part of the fit's examples",
            remedy="pass the fit that it was made from",
        )
    device = fit.targets.device
    return (
        torch.tensor(kept, dtype=torch.long, device=device),
        torch.tensor(lost, dtype=torch.long, device=device),
    )


def _free(fit: LinearFit, gradient: Tensor) -> Tensor:
    """The part of a gradient that the fit's equations leave free; with penalties, their own is added."""
    held = fit.constraints
    if held is None:
        return gradient
    rows = held.equations.jacobian(fit.module.function, fit.memory).double()
    gradient = gradient.double()
    soft = held.slack > 0
    if soft.any():
        # ∇ ½w‖b − Aδ‖² = −w Aᵀ(b − Aδ), w = ρ/τ
        weight = fit.ridge / held.slack[soft]
        gradient = gradient - rows[:, soft] @ (weight * held.errors(fit.module)[soft])
    basis, _ = torch.linalg.qr(rows[:, ~soft])
    free: Tensor = gradient - basis @ (basis.T @ gradient)
    return free


def _warnings(fit: LinearFit, lost: Tensor) -> tuple[str, ...]:
    """Warnings on what the certificate does not cover."""
    found = []
    record = getattr(fit.module.model, RECORD, {})
    seen = record.get("examples", frozenset())
    if record.get("metric"):
        found.append(
            "the network has the metric of a curvature: what that was summed over stays in it, forgotten "
            "examples too if they were part of it"
        )
    if seen:
        labels = fit.labels
        x, y = take(fit.x, lost), fit.targets[lost] if labels is None else labels[lost]
        again = sum(name in seen for name in example_hashes(x, y)) if len(lost) else 0
        if again:
            found.append(
                f"the head was fitted on {again} of the forgotten examples: it is part of the network before "
                "the fit, and keeps what it learned from them"
            )
    if fit.record.criterion != "given":
        found.append(
            f"the ridge was chosen by {fit.record.criterion!r} on data that include the forgotten ones"
        )
    return tuple(found)
