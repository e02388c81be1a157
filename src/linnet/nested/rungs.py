"""The stages from a linear probe to a trained network, each with its gain on held-out samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from linnet.linear.targets import Targets
from linnet.nested.search import ERRORS, counted

_CLEAR = 1.96  # standard errors of a gain that is significant at 5 %


@dataclass(frozen=True)
class Rung:
    """One model on held-out folds of the training samples."""

    name: str  # what it is
    error: float  # mean squared error of the outputs
    accuracy: float | None = None  # share of right classes, 0 to 1; ``None`` for regression
    gain: float = 0.0  # share of the error of the model before that it takes away
    gain_error: float = 0.0  # standard error of ``gain``, over samples
    points: float | None = None  # gain of accuracy over the model before, in percentage points
    points_error: float | None = None  # its standard error
    taken: bool = False  # whether it is the model that is used
    seconds: float = 0.0  # what it took, on top of the one before; 0 where that is not known apart


def ladder(
    before: Sequence[tuple[str, Tensor]],
    outputs: Tensor,
    targets: Targets,
    seconds: float,
    rows: Tensor | None = None,
) -> tuple[Rung, ...]:
    """Models in order, the trained network last."""
    # before (N, C), outputs (N, C), rows (N,)
    # It is taken where its error is lower by more than a standard error and no fewer classes are right.
    counting = counted(targets) if rows is None else counted(targets) & rows
    truth = targets.values.to(outputs)[counting]
    rungs: list[Rung] = []
    last: tuple[Tensor, Tensor | None] | None = None
    models = [*before, ("trained lower layers", outputs)]
    for name, found in models:
        kept = found[counting]
        errors = (kept - truth).square().sum(1)
        labels = targets.labels
        right = None if labels is None else (kept.argmax(1) == labels[counting]).double()
        rung = Rung(
            name, float(errors.mean()), None if right is None else float(right.mean()),
            seconds=seconds if name == models[-1][0] else 0.0,
        )  # fmt: skip
        if last is not None:
            rung = _compared(rung, (errors, right), last)
        rungs.append(rung)
        last = errors, right
    top = rungs[-1]
    helps = top.gain > ERRORS * top.gain_error and (top.points is None or top.points >= 0)
    place = len(rungs) - 1 if helps else len(rungs) - 2
    rungs[place] = replace(rungs[place], taken=True)
    return tuple(rungs)


def _compared(rung: Rung, now: tuple[Tensor, Tensor | None], last: tuple[Tensor, Tensor | None]) -> Rung:
    """A rung with its gains over the one before, sample by sample."""
    root = len(now[0]) ** 0.5
    gains = (last[0] - now[0]) / max(float(last[0].mean()), 1e-300)
    rung = replace(rung, gain=float(gains.mean()), gain_error=float(gains.std()) / root)
    if now[1] is not None and last[1] is not None:
        points = 100 * (now[1] - last[1])
        rung = replace(rung, points=float(points.mean()), points_error=float(points.std()) / root)
    return rung


def verdict(rungs: Sequence[Rung]) -> str:
    """Recommendation in one sentence."""
    last, base = rungs[-1], rungs[-2]
    name, share = base.name, f"{100 * abs(last.gain):.0f} ± {100 * last.gain_error:.0f} %"
    if not last.taken and last.gain <= 0:
        return f"Kept the {name}: training the lower layers gives {share} more error on held-out folds."
    less, points, is_clear = f"{share} less error on held-out folds", "", last.gain > _CLEAR * last.gain_error
    if last.points is not None and last.points_error is not None and base.accuracy is not None:
        verb, to = ("add", "to") if last.points >= 0 else ("take", "from")
        points = f"{verb} {abs(last.points):.1f} ± {last.points_error:.1f} points {to} the "
        points += f"{100 * base.accuracy:.1f} % of the {name}"
        is_clear = last.points > _CLEAR * last.points_error
    if last.taken and is_clear:
        how = f"they {points} ({less})" if points else f"{less} than the {name}"
        return f"Use the {last.name}: {how}; the fit is solved at the trained weights."
    if last.taken:
        what = "whether more are right" if points else "whether that is more than chance"
        return f"Solved at the trained weights: {less} than the {name}; {what} cannot be told."
    how = f"{points} ({less})" if points else f"give {less}"
    short = (
        "but accuracy does not improve"
        if last.gain > ERRORS * last.gain_error
        else "which is not significant"
    )
    return f"Kept the {name}: training the lower layers would {how}, {short}."
