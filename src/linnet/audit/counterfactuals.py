"""Counterfactual labels: predictions of a fit if training labels were different."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from linnet.audit.predictors import check_fit
from linnet.errors import InputError
from linnet.fitting.arguments import positions
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.remarks import after_change
from linnet.linear.targets import Targets, make_targets
from linnet.shown import Record
from linnet.tangent.batch import Inputs
from linnet.tangent.door import known_answers
from linnet.tangent.forward_mode import Params
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode


@dataclass(frozen=True, repr=False)
class Counterfactual(Record):
    """A fit as if some labels had been others.

    Args:
        fit: That fit.
        delta: What it adds to δ, by parameter name.
        before: Predictions at x with the labels as they are, (T, C); ``None`` without x.
        after: Predictions at x with the other labels, (T, C).

    Example:
        >>> import torch
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x, y = torch.randn(8, 2), torch.arange(8) % 2
        >>> fit = linnet.fit(linnet.linearize(net), (x, y))
        >>> found = linnet.audit.counterfactual(fit, 0, 1, x)
        >>> found.after.shape, found.fit.n
        (torch.Size([8, 2]), 8)
    """

    fit: LinearFit
    delta: Params
    before: Tensor | None
    after: Tensor | None

    @property
    def change(self) -> Tensor | None:
        """After minus before, (T, C)."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def flipped(self) -> Tensor | None:
        """Examples of x whose largest output is another one, (k,)."""
        if self.before is None or self.after is None:
            return None
        return (self.before.argmax(1) != self.after.argmax(1)).nonzero()[:, 0]


@in_exact_mode
def counterfactual(fit: LinearFit, index: Any, target: Any, x: Inputs | None = None) -> Counterfactual:
    """The fit as if training examples had other labels, without refitting.

    δ is linear in the targets, Δδ = Jᵀ(K + ρI)⁻¹Δt, so what a first-order analysis says is exact,
    however large the change. The network before the fit, its head included, stays as it is.

    Args:
        fit: The fit.
        index: Positions of k training examples, each once.
        target: Their labels instead: classes (k,), or targets (k, C); for one example without the axis.
        x: Examples whose predictions are compared.

    Returns:
        The other fit, the change of δ, and predictions before and after.

    Raises:
        InputError: If a position is out of range or given twice, or the targets do not fit.
        DataError: If a class is out of range, or a target not finite.

    Source:
        The discussion of Achille et al., CVPR 2021 (counterfactual analysis in the first order).

    Example:
        >>> import torch
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x, y = torch.randn(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
        >>> counterfactual(linnet.fit(linnet.linearize(net), (x, y)), 0, 1, x).change.shape
        torch.Size([6, 2])
    """
    check_fit(fit)
    device = fit.module.function.device
    places = positions(index, fit.n + 1).to(device)  # all of them may be requested
    if places.numel() and int(places.max()) >= fit.n:
        positions(index, fit.n)
    if not places.numel():
        raise InputError(
            "index names no example", expected="one position or more", remedy="pass index=0 for the first"
        )
    new = _targets(target, fit, len(places)).to(fit.targets)
    values = fit.targets.clone()
    values[places] = new
    residual = fit.system.problem.residual.clone()
    residual[places] += (new - fit.targets[places]).to(residual)
    system = fit.system.with_residual(residual)
    targets = Targets(values, fit.classes, fit._targets.scale)
    module = Linearized(fit.module.function)
    warnings = after_change(fit.record.warnings, fit.module.model, fit.x, targets, likely=False)
    record = replace(fit.record, warnings=warnings)
    other = LinearFit(module, targets, system, record)
    moved = {name: value - fit.delta[name] for name, value in other.delta.items()}
    if x is None:
        return Counterfactual(other, moved, None, None)
    return Counterfactual(other, moved, fit.predict(x), other.predict(x))


def _targets(target: Any, fit: LinearFit, k: int) -> Tensor:
    """Targets (k, C)."""
    c = fit.system.c
    y = known_answers(target, fit.record.classes).detach()
    if y.is_floating_point():
        y = y.reshape(1, -1) if k == 1 and y.ndim < 2 else y[:, None] if y.ndim == 1 and c == 1 else y
    else:
        y = y.reshape(1) if k == 1 and y.ndim == 0 else y
    classes = not y.is_floating_point() and y.ndim == 1
    wrong = classes and (fit.classes is None or isinstance(target, bool))  # a flag names no class
    if y.ndim == 0 or len(y) != k or not (classes or y.shape == (k, c)) or wrong:
        kind = "classes or " if fit.classes is not None else ""
        raise InputError(
            f"target is {type(target).__name__} of shape {tuple(y.shape)} and type {y.dtype}",
            expected=f"{kind}float targets for the {k} example(s) of index, ({k}, {c})",
            remedy="pass one label for each example",
        )
    return make_targets(y, c, fit._targets.scale, varied=False, dtype=fit.targets.dtype).values
