"""``linnet.fgsm``: predictions under adversarial perturbations by the fast gradient sign method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from linnet.errors import DataError, InputError, NumericalError
from linnet.memory import Plan, parse_bytes, require
from linnet.metrics.answers import ask, class_probabilities
from linnet.metrics.evaluate import Predict, batches_of, same_classes
from linnet.metrics.judged import Judged, join, judge
from linnet.metrics.reports import Report
from linnet.params import integer, refuse, tensor
from linnet.progress import track
from linnet.shown import Record

POINT = 1000  # bytes of a point of an attack at the least: its label, report and tensors


@dataclass(frozen=True, eq=False, repr=False)
class AttackPoint(Record):
    """One point on the curve of an attack."""

    step: float  # step size η
    iterations: int  # number of steps taken
    report: Report  # the predictions there; scores that need labels are there if the data had any


@dataclass(frozen=True, eq=False, repr=False)
class Attack(Record):
    """Predictions along an attack.

    Args:
        clean: Predictions on the examples before it.
        points: Predictions for each step size, or after each iteration of one step size.
        target: The class aimed at, or ``None``.
        index: Places (M,) in the data of the examples attacked: all, less those predicted as the target.
        excluded: Number of examples left out for that reason.
        unmoved: Number of examples whose gradient is exactly zero at the start: predictions so certain
            that they round to 0 or 1. They seem robust and are not; let predict compute in float64.
        inputs: The inputs at the last point, (M, ...), where they were kept.

    Example:
        >>> x = torch.tensor([[0.5], [-1.0], [2.0]])
        >>> attack = fgsm(lambda x: torch.cat([-x, x], 1).softmax(1), x, step=[0.0, 0.75, 1.5])
        >>> attack.kept.tolist(), attack.entropy.argmax().item()
        ([1.0, 0.6666666666666666, 0.3333333333333333], 1)
    """

    clean: Report
    points: tuple[AttackPoint, ...]
    target: int | None
    index: Tensor
    excluded: int
    unmoved: int
    inputs: Tensor | None

    @property
    def steps(self) -> Tensor:
        """Step size of each point, (K,)."""
        return torch.tensor([point.step for point in self.points], dtype=torch.float64)

    @property
    def iterations(self) -> Tensor:
        """Number of iterations of each point, (K,)."""
        return torch.tensor([point.iterations for point in self.points])

    @property
    def accuracy(self) -> Tensor:
        """Share that is predicted as its true class, (K,); needs labels."""
        return self._curve([point.report.accuracy for point in self.points])

    @property
    def entropy(self) -> Tensor:
        """Mean entropy, (K,), in nats."""
        return self._curve([point.report.entropy for point in self.points])

    @property
    def kept(self) -> Tensor:
        """Share that is still predicted as before the attack, (K,)."""
        before = self.clean.examples.predicted
        return self._curve([float((p == before).double().mean()) for p in self._predicted()])

    @property
    def reached(self) -> Tensor:
        """Share that is predicted as the target, (K,).

        Raises:
            InputError: If the attack had no target.
        """
        if self.target is None:
            raise InputError(
                "the attack has no target", expected="target=", remedy="pass fgsm a target class"
            )
        return self._curve([float((p == self.target).double().mean()) for p in self._predicted()])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON.

        Returns:
            A dict.
        """
        points = [
            {"step": point.step, "iterations": point.iterations, **point.report.to_dict()}
            for point in self.points
        ]
        for entry, kept in zip(points, self.kept.tolist(), strict=True):
            entry["kept"] = kept
        if self.target is not None:
            for entry, reached in zip(points, self.reached.tolist(), strict=True):
                entry["reached"] = reached
        counts = {"target": self.target, "excluded": self.excluded, "unmoved": self.unmoved}
        return {**counts, "clean": self.clean.to_dict(), "points": points}

    def __str__(self) -> str:
        """The printed report."""
        aim = "untargeted" if self.target is None else f"toward class {self.target}"
        notes = f"{self.excluded} left out, already there" if self.excluded else ""
        stuck = f"{self.unmoved} unmoved, their gradient is zero" if self.unmoved else ""
        head = "; ".join(filter(None, [f"{self.clean.examples.n:,} examples, {aim}", notes, stuck]))
        labeled = self.clean.examples.label is not None
        names = ["entropy", "kept", *(["reached"] if self.target is not None else [])]
        names = ["accuracy", *names] if labeled else names
        columns = {name: getattr(self, name).tolist() for name in names}
        rows = ["      step  iterations" + "".join(f"  {name:>8}" for name in columns)]
        for k, point in enumerate(self.points):
            values = "".join(f"  {column[k]:>8.4f}" for column in columns.values())
            rows.append(f"{point.step:>10.4g}  {point.iterations:>10}{values}")
        return "\n".join([head, *rows])

    def _shown(self) -> dict[str, Any]:
        counts = {"examples": self.clean.examples.n, "left out": self.excluded, "unmoved": self.unmoved}
        known = {**counts, "target": self.target, "clean": self.clean, "points": list(self.points)}
        return known

    __repr__ = __str__

    def _predicted(self) -> Iterator[Tensor]:
        return (point.report.examples.predicted for point in self.points)

    @staticmethod
    def _curve(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class _Plan:
    """The attack on every batch."""

    steps: tuple[float, ...]
    iterations: int
    every: bool  # a point for every iteration of one step size, not for every step size
    target: int | None
    limits: tuple[Tensor, Tensor] | None

    def labels(self) -> list[tuple[float, int]]:
        """Step size and number of iterations of each point."""
        if self.every:
            return [(self.steps[0], t) for t in range(1, self.iterations + 1)]
        return [(step, self.iterations) for step in self.steps]


def fgsm(
    predict: Predict,
    data: Any,
    step: float | Sequence[float],
    *,
    target: int | None = None,
    iterations: int = 1,
    limits: tuple[float | Tensor, float | Tensor] | None = None,
    scale: float | str | Tensor = 1.0,
    batch_size: int | None = None,
) -> Attack:
    """Attack predictions by the sign of their own gradient, and watch accuracy and uncertainty.

    Untargeted, x ← x − η sign ∇ log p(ŷ | x) for the class ŷ predicted at first; targeted,
    x ← x + η sign ∇ log p(y | x) for a class y, leaving out examples already predicted as y. p is what
    predict returns, averaged over samples where it returns samples: the attack is on the predictive
    distribution, not on one network.

    Args:
        predict: Called with a tensor of inputs (N, ...); returns probabilities (N, C), S samples of them
            (S, N, C), or an object with ``.probs``, differentiable in the inputs.
        data: Inputs, an (x, y) pair, a ``Dataset`` or a ``DataLoader``; inputs are one floating tensor, and
            stay on their device. For one step size and data in tensors the attacked inputs are kept.
        step: Step size η, or several for a curve over step sizes; 0 is the clean input.
        target: Class y of a targeted attack.
        iterations: Number of steps taken one after the other. With one step size there is a point for each.
        limits: Smallest and largest value of an input, to which inputs are clamped after every step: numbers,
            or tensors that broadcast against one input, as one number per channel (C, 1, 1).
        scale: What η is multiplied with: a number, a tensor that broadcasts against one input, or "range",
            the largest minus the smallest value of each input dimension in the data.
        batch_size: Largest number of examples in a call; by default a loader's own batches, otherwise 128.

    Returns:
        The predictions before and along the attack.

    Raises:
        DataError: If the data are empty, or every example is predicted as the target already.
        InputError: If predict is not differentiable or does not return probabilities, or an argument is out
            of range.
        NumericalError: If a gradient is not finite.

    Source:
        I. Goodfellow et al., Explaining and harnessing adversarial examples, ICLR 2015; with the predicted
        instead of the true class, and with targets, in Botev 2020, eqs. 5.15 and 5.16.

    Example:
        >>> predict = lambda x: torch.cat([-x, x], 1).softmax(1)
        >>> attack = fgsm(predict, (torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])), step=0.5)
        >>> attack.inputs.T, attack.accuracy
        (tensor([[ 0.5000, -0.5000]]), tensor([1.], dtype=torch.float64))
    """
    plan = _checked(step, target, iterations, limits)
    batches = batches_of(predict, data, batch_size, None)
    rates = _scale(scale, batches)
    for end in (end for end in plan.limits or () if end.ndim):
        _require_broadcast(end, "limits", _one_tensor(batches.first().x), "pass limits=(0, 1)")
    keep = len(plan.steps) == 1 and isinstance(data, Tensor | tuple | list)
    clean: list[Judged] = []
    points: list[list[Judged]] = [[] for _ in plan.labels()]
    index, inputs, total, unmoved, classes = [], [], 0, 0, 0
    for batch in track(batches, "attacking"):
        x = _one_tensor(batch.x)
        found = _attack(predict, x, batch.y, plan, rates, total)
        classes = same_classes(classes, found.p)
        index.append(total + found.rows)
        total, unmoved = total + batch.size, unmoved + found.unmoved
        clean.append(found.clean)
        for part, judged in zip(points, found.points, strict=True):
            part.append(judged)
        if keep:
            inputs.append(found.x)
    rows = torch.cat(index)
    if rows.numel() == 0:
        raise DataError(
            f"every example is predicted as class {target} already",
            expected="examples of other classes",
            remedy="aim at another class",
        )
    reports = [Report(join(part), classes) for part in points]
    labels = [AttackPoint(*at, report) for at, report in zip(plan.labels(), reports, strict=True)]
    kept = torch.cat(inputs) if keep else None
    excluded = total - rows.numel()
    return Attack(Report(join(clean), classes), tuple(labels), target, rows, excluded, unmoved, kept)


@dataclass(frozen=True)
class _Attacked:
    """One batch along an attack: probabilities and rows before it, then each point, then the inputs."""

    p: Tensor
    rows: Tensor
    clean: Judged
    points: list[Judged]
    unmoved: int
    x: Tensor


def _attack(
    predict: Predict, x: Tensor, y: Tensor | None, plan: _Plan, rates: Tensor | float, start: int
) -> _Attacked:
    """Attack one batch."""
    p, aim, gradient = _ascent(predict, x, plan.target)
    clean = judge(p, y, start)
    rows = torch.arange(x.shape[0])
    if plan.target is not None:
        rows = rows[clean.predicted != plan.target]
    clean = clean.take(rows)
    x, gradient, aim = x[rows.to(x.device)], gradient[rows.to(x.device)], aim[rows.to(aim.device)]
    y = None if y is None else y[rows.to(y.device)]
    if rows.numel() == 0:
        return _Attacked(p, rows, clean, [clean for _ in plan.labels()], 0, x)
    direction = (1 if plan.target is not None else -1) * rates
    points, moved = [], x
    for step in plan.steps:
        moved, sign = x, gradient.sign()
        for t in range(plan.iterations):
            if t:
                here, _, slope = _ascent(predict, moved, None, aim)
                sign = slope.sign()
                points += [judge(here, y, start)] if plan.every else []
            moved = moved + step * direction * sign
            moved = moved if plan.limits is None else moved.clamp(*(end.to(moved) for end in plan.limits))
        with torch.no_grad():
            points.append(judge(class_probabilities(ask(predict, moved), moved.shape[0]), y, start))
    unmoved = int((gradient.flatten(1) == 0).all(1).sum())
    return _Attacked(p, rows, clean, points, unmoved, moved)


def _ascent(
    predict: Predict, x: Tensor, target: int | None, aim: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, the classes in question, and ∇ log p of them in x; by default those predicted."""
    with torch.inference_mode(False), torch.enable_grad():
        variable = x.detach().clone().requires_grad_()
        p = class_probabilities(ask(predict, variable), x.shape[0])
        if not p.requires_grad:
            raise InputError(
                "predict returns probabilities without a gradient in its inputs",
                expected="a differentiable computation in torch",
                remedy="remove torch.no_grad(), .detach() and .numpy() from predict",
            )
        mean = _mean(p)
        if target is not None and not target < mean.shape[1]:
            raise InputError(
                f"target={target}",
                expected=f"a class from 0 to {mean.shape[1] - 1}",
                remedy="pass one of them",
            )
        if aim is None:
            aim = mean.argmax(1) if target is None else torch.full_like(mean[:, 0], target, dtype=torch.long)
        own = mean.gather(1, aim[:, None])[:, 0]
        # Probabilities that underflowed to 0 have no direction: log is cut off there, with gradient 0.
        log_p = own.clamp_min(torch.finfo(p.dtype).tiny).log()
        (gradient,) = torch.autograd.grad(log_p.sum(), variable, allow_unused=True)
    if gradient is None:
        raise InputError(
            "predict returns probabilities that do not depend on its inputs",
            expected="a differentiable computation in torch",
            remedy="remove .detach() from predict",
        )
    finite = torch.isfinite(gradient.flatten(1)).all(1)
    if not finite.all():
        raise NumericalError(
            f"the gradient of log p is not finite for example {int((~finite).nonzero()[0])} of its batch",
            expected="a finite gradient",
            remedy="compute in float64, or use log-softmax inside predict",
        )
    return p.detach(), aim, gradient


def _mean(p: Tensor) -> Tensor:
    """The predictive probabilities (N, C)."""
    return p.mean(0) if p.ndim == 3 else p


def _one_tensor(x: Any) -> Tensor:
    """The inputs, if they can be moved."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1:
        return x
    what = (
        f"a tensor of type {x.dtype}, shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
    )
    raise InputError(
        f"x is {what}",
        expected="one floating-point tensor (N, ...), for only such inputs can take a small step",
        remedy="scale integers to floats first; let predict add inputs that shall stay as they are",
    )


def _scale(scale: float | str | Tensor, batches: Any) -> Tensor | float:
    """The factor on step sizes."""
    if isinstance(scale, str):
        if scale != "range":
            raise InputError(f"scale={scale!r}", expected="'range', a number or a tensor", remedy="pass 1.0")
        ends = (torch.stack(_one_tensor(batch.x).aminmax(dim=0)) for batch in batches)
        low, high = reduce(lambda a, b: torch.stack([a[0].minimum(b[0]), a[1].maximum(b[1])]), ends)
        span: Tensor = high - low
        return span
    values = _numbers(scale, "scale", "'range', a number or a tensor")
    if bool((values < 0).any()):
        raise InputError(
            "scale is negative or not finite", expected="positive numbers", remedy="pass scale=1.0"
        )
    if values.ndim == 0:
        return float(values)
    first = _one_tensor(batches.first().x)
    _require_broadcast(values, "scale", first, "pass x.amax(0) - x.amin(0), or scale='range'")
    return values.to(first)


def _numbers(value: Any, name: str, expected: str) -> Tensor:
    """Real numbers from anything that holds them, float64; not NaN, and infinite only as limits."""
    if isinstance(value, bool):
        refuse(name, value, expected)
    found = tensor(name, value, expected).double()
    if found.numel() == 0 or bool(found.isnan().any()) or (name == "scale" and bool(found.isinf().any())):
        refuse(name, value, expected)
    return found


def _require_broadcast(values: Tensor, name: str, x: Tensor, remedy: str) -> None:
    """Raise unless numbers broadcast against one input."""
    try:
        torch.broadcast_to(values, x.shape[1:])
    except RuntimeError as error:
        raise InputError(
            f"{name} has shape {tuple(values.shape)} but an input has {tuple(x.shape[1:])}",
            expected="a shape that broadcasts against one input",
            remedy=remedy,
        ) from error


def _limits(limits: Any) -> tuple[Tensor, Tensor] | None:
    """The smallest and the largest value of an input."""
    if limits is None:
        return None
    expected = "(smallest, largest) value"
    if not isinstance(limits, tuple | list) or len(limits) != 2:
        refuse("limits", limits, expected, "pass limits=(0, 1)")
    low, high = (_numbers(end, "limits", expected) for end in limits)
    try:
        ordered = bool((low < high).all())
    except RuntimeError:
        ordered = False
    if not ordered:
        refuse("limits", limits, expected, "pass limits=(0, 1)")
    return low, high


def _checked(step: float | Sequence[float], target: int | None, iterations: int, limits: Any) -> _Plan:
    """The plan, or an error that names the argument."""
    expected = "one or more step sizes, 0 or more"
    sizes = tensor("step", step, expected, "pass step=0.1").double()
    positive = bool((torch.isfinite(sizes) & (sizes >= 0)).all())
    if isinstance(step, bool) or sizes.ndim > 1 or sizes.numel() == 0 or not positive:
        refuse("step", step, expected, "pass step=0.1")
    integer("iterations", iterations)
    if target is not None:
        integer("target", target, 0)
    if sizes.ndim == 0:
        items = (("points", iterations * POINT),)
        plan = Plan(f"an attack that keeps {iterations} points", parse_bytes(None), items)
        require(plan, ["pass fewer iterations=", "pass step=[...], which keeps the last"])
    return _Plan(tuple(sizes.reshape(-1).tolist()), iterations, sizes.ndim == 0, target, _limits(limits))
