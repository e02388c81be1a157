"""What a fit is asked to keep: outputs of an old model, means of groups, another answer for one sample.

All of them are fits under equations on outputs, or compare two fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.audit.predictors import check_fit, class_labels, outputs_of, require_same_classes
from linnet.errors import InputError
from linnet.fitting.arguments import positions
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.remarks import after_change
from linnet.linear.constraints import group_numbers
from linnet.linear.targets import make_targets
from linnet.params import integer, number, optional
from linnet.shown import Record
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.data import examples
from linnet.tangent.forward_mode import Params
from linnet.tangent.inputs import in_rows, known_answers, tensorize
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode


@dataclass(frozen=True, repr=False)
class Flips(Record):
    """Answers that changed from one predictor to another.

    Args:
        negative: Examples that were right and are wrong now, (k,).
        positive: Examples that were wrong and are right now, (k,).
        accuracy_before: Share of right answers before.
        accuracy_after: Share of right answers after.
        examples: Number of examples.
    """

    negative: Tensor
    positive: Tensor
    accuracy_before: float
    accuracy_after: float
    examples: int

    @property
    def negative_rate(self) -> float:
        """Share of all examples that were right and are wrong now."""
        return len(self.negative) / self.examples

    @property
    def positive_rate(self) -> float:
        """Share of all examples that were wrong and are right now."""
        return len(self.positive) / self.examples

    @property
    def relative_negative_rate(self) -> float:
        """The negative rate over that of an independent predictor of the same accuracy; 0 without errors."""
        chance = self.accuracy_before * (1 - self.accuracy_after)
        return self.negative_rate / chance if chance > 0 else 0.0

    def __str__(self) -> str:
        """The figures in one line."""
        return (
            f"accuracy {self.accuracy_before:.1%} -> {self.accuracy_after:.1%}; "
            f"{len(self.negative)} negative flip(s) ({self.negative_rate:.1%}), "
            f"{len(self.positive)} positive ({self.positive_rate:.1%}) of {self.examples}"
        )


def flips(before: Any, after: Any, x: Inputs, y: Any) -> Flips:
    """Count the predictions that an update made wrong, and those that it made right.

    Args:
        before: A fit, a network, a function of x, or outputs (N, C).
        after: Likewise.
        x: N examples.
        y: Their classes, (N,).

    Returns:
        The flips.

    Raises:
        InputError: If a predictor or the labels do not fit the examples.

    Source:
        Yan et al., "Positive-congruent training: towards regression-free model updates", CVPR 2021.

    Example:
        >>> old, new = torch.eye(3), torch.eye(3)[[0, 2, 2]]
        >>> print(flips(old, new, torch.zeros(3, 1), [0, 1, 2]))
        accuracy 100.0% -> 66.7%; 1 negative flip(s) (33.3%), 0 positive (0.0%) of 3
    """
    y = in_rows(x, y)
    old, new = outputs_of(before, x, "before"), outputs_of(after, x, "after")
    if old.shape != new.shape or old.shape[1] < 2 or not len(old):
        raise InputError(
            f"before gives outputs {tuple(old.shape)}, after {tuple(new.shape)}",
            expected="outputs of the same classes, two at least, for one example or more",
            remedy="compare predictors of one task; of log odds f pass torch.cat([-f, f], 1)",
        )
    labels = class_labels(y, len(old), old.shape[1], before, after)
    was = old.argmax(1).cpu() == labels.cpu()
    now = new.argmax(1).cpu() == labels.cpu()
    return Flips(
        (was & ~now).nonzero()[:, 0],
        (~was & now).nonzero()[:, 0],
        float(was.double().mean()),
        float(now.double().mean()),
        len(old),
    )


@dataclass(frozen=True, repr=False)
class Compatible(Record):
    """A fit that loses few of the old right answers, or none.

    Args:
        fit: The fit under its equations.
        before: Flips of the fit as it was.
        after: Flips of the fit under its equations.
        pinned: Examples whose outputs are held at the old ones, (k,).
        rounds: Rounds of pinning.
    """

    fit: LinearFit
    before: Flips
    after: Flips
    pinned: Tensor
    rounds: int

    def _shown(self) -> dict[str, Any]:
        held = {"outputs held": len(self.pinned), "rounds": self.rounds}
        return {"examples": self.fit.n, **held, "before": self.before, "after": self.after}


def compatible(
    fit: LinearFit,
    x: Inputs,
    old_outputs: Any,
    y: Any,
    weight: float | None = None,
    *,
    pin: str = "flips",
    rounds: int = 20,
) -> Compatible:
    """Make a new fit keep the right answers of an old one.

    With ``pin="flips"`` only those right answers are held, at the old outputs, that the fit would take
    back; holding them moves other outputs a little, so this is repeated until none is taken back. The
    old outputs should be on the scale of the fit's: those of an earlier fit, or of the network itself.

    Args:
        fit: The new fit.
        x: N examples on which answers must not get worse.
        old_outputs: Old outputs (N, C), or the old predictor.
        y: Their classes, (N,).
        weight: Weight of a penalty instead of an exact hold: fewer changes elsewhere, perhaps some flips.
        pin: ``"flips"``, or ``"correct"`` to hold every old right answer.
        rounds: Most rounds of pinning.

    Returns:
        The fit, what flipped before and after, and what is held.

    Raises:
        InputError: If an argument does not fit the examples, or no hold is possible.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> x, y = torch.randn(12, 2), torch.arange(12) % 3
        >>> old = linnet.fit(linnet.linearize(net), (x[:8], y[:8]))
        >>> compatible(old.update((x[8:], y[8:])), x, old, y).after.negative_rate
        0.0
    """
    check_fit(fit)
    if pin not in ("flips", "correct"):
        raise InputError(f"pin={pin!r}", expected='"flips" or "correct"', remedy='leave pin= out for "flips"')
    integer("rounds", rounds)
    optional(number, "weight", weight, above=0)
    y, old = in_rows(x, y), outputs_of(old_outputs, x, "old_outputs")
    x = examples(fit._function, x)
    if old.shape[1] != fit.system.c:
        raise InputError(
            f"old_outputs has {old.shape[1]} outputs but the fit has {fit.system.c}",
            expected=f"outputs ({batch_size(x)}, {fit.system.c}) on the scale of the fit's",
            remedy="give both predictors the same classes in the same order",
        )
    if not old.is_floating_point():
        raise InputError(
            f"old_outputs has type {old.dtype}", expected="outputs, not classes", remedy="pass old.predict(x)"
        )
    before = after = flips(old, fit, x, y)
    labels = class_labels(y, len(old), old.shape[1], fit)
    right = old.argmax(1).cpu() == labels.cpu()
    made, done = fit, 0
    pinned = torch.zeros(len(old), dtype=torch.bool)
    while done < rounds:
        wanted = right if pin == "correct" else pinned | torch.isin(torch.arange(len(old)), after.negative)
        if bool((wanted == pinned).all()):
            break
        pinned, done = wanted, done + 1
        index = pinned.nonzero()[:, 0].to(old.device)
        # from the fit as it was: the equations of an earlier round are among these
        made = fit.constrain(take(x, index), old[index], weight=weight)
        after = flips(old, made, x, y)
    return Compatible(made, before, after, pinned.nonzero()[:, 0], done)


@dataclass(frozen=True, repr=False)
class GroupMeans(Record):
    """Mean outputs of groups.

    Args:
        groups: Their labels, (G,).
        counts: Their sizes, (G,).
        means: Mean outputs, (G, C).
        before: Mean outputs of another predictor, (G, C), if one was given.
    """

    groups: Tensor
    counts: Tensor
    means: Tensor
    before: Tensor | None = None

    @property
    def gaps(self) -> Tensor:
        """Largest minus smallest mean of each output, (C,)."""
        return self.means.amax(0) - self.means.amin(0)

    @property
    def gaps_before(self) -> Tensor | None:
        """Those of the other predictor, (C,)."""
        return None if self.before is None else self.before.amax(0) - self.before.amin(0)

    def __str__(self) -> str:
        """The table."""
        outputs = range(self.means.shape[1])
        lines = ["group examples " + " ".join(f"{f'output {k}':>10}" for k in outputs)]
        tables = [("", self.means, self.gaps)]
        if self.before is not None and self.gaps_before is not None:
            tables = [("before: ", self.before, self.gaps_before), ("after: ", self.means, self.gaps)]
        for name, means, gaps in tables:
            for group, count, row in zip(self.groups.tolist(), self.counts.tolist(), means, strict=True):
                lines.append(f"{group:>5} {count:>8} " + " ".join(f"{float(v):>10.4g}" for v in row))
            lines.append(f"{name + 'gap':>14} " + " ".join(f"{float(v):>10.4g}" for v in gaps))
        return "\n".join(lines)


def group_means(fit: Any, x: Inputs, groups: Any, before: Any = None) -> GroupMeans:
    """The mean outputs of groups of examples, and the gaps between them.

    ``fit.constrain(x, groups=groups)`` makes the gaps zero.

    Args:
        fit: A fit, a network, a function of x, or outputs (N, C).
        x: N examples.
        groups: (N,) integers.
        before: Another predictor to set beside it, such as the fit before it was constrained.

    Returns:
        The table.

    Raises:
        InputError: If the labels do not fit, or name one group only, or a group of one member.

    Example:
        >>> print(group_means(torch.tensor([[1.0], [3.0], [0.0], [0.0]]), torch.zeros(4, 1), [0, 0, 1, 1]))
        group examples   output 0
            0        2          2
            1        2          0
                   gap          2
    """
    n = batch_size(tensorize(x))
    if n == 0:
        raise InputError("x is empty", expected="at least two groups of two examples", remedy="pass examples")
    require_same_classes((fit, before))
    labels = group_numbers(in_rows(x, groups, "groups"), n)
    names, number, counts = labels.cpu().unique(return_inverse=True, return_counts=True)
    after = _means(outputs_of(fit, x, "fit"), number, counts)
    other = None if before is None else _means(outputs_of(before, x, "before"), number, counts)
    if other is not None and other.shape != after.shape:
        raise InputError(
            f"before has {other.shape[1]} outputs, fit {after.shape[1]}",
            expected="predictors of the same outputs",
            remedy="compare predictors of one task",
        )
    return GroupMeans(names, counts, after, other)


def _means(outputs: Tensor, number: Tensor, counts: Tensor) -> Tensor:
    """Mean outputs of each group, (G, C), float64."""
    total = torch.zeros(len(counts), outputs.shape[1], dtype=torch.float64)
    return total.index_add_(0, number, outputs.double().cpu()) / counts[:, None]


@dataclass(frozen=True, repr=False)
class Counterfactual(Record):
    """A fit as if some labels had been others.

    Args:
        fit: That fit.
        delta: What it adds to δ, by parameter name.
        before: Predictions at x with the labels as they are, (T, C); ``None`` without x.
        after: Predictions at x with the other labels, (T, C).
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
    targets, system = fit._retargeted(places, new)
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
