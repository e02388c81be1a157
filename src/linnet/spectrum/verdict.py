"""Verdicts: recommendation of linear or plain fine-tuning from the statistics of a task."""

from __future__ import annotations

from dataclasses import dataclass

from linnet.shown import Record

# Rules of thumb: the skill of leave-one-out (see ``Evidence.skill``) from which a fit does well, and below
# which it does poorly. In experiments/kernels/verdict.py the skill on test samples was 0.45 to 0.83 for the
# tasks in between and at most 0.51 for those below; no task there was above.
WELL, POORLY = 0.75, 0.35
NEAR, FAR = 0.1, 1.0  # relative linearity gaps: as good as the same network, and another network
OPEN = (
    "These numbers do not tell whether plain fine-tuning would do better still: linnet adapt compares the "
    "two on test samples."
)


@dataclass(frozen=True, repr=False)
class Verdict(Record):
    """A judgment in words.

    Args:
        level: ``"well"``, ``"partly"``, ``"poorly"`` or ``"unknown"``.
        text: One sentence.
        reasons: Sentences with the numbers that it rests on.

    Example:
        >>> Verdict("well", "It is likely to do well.", ("Leave-one-out explains 90 %.",)).level
        'well'
    """

    level: str
    text: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """Evidence for a verdict."""

    # share of the labels' variance that leave-one-out predicts; None if it is not known
    explained: float | None
    accuracy: float | None  # leave-one-out accuracy; None for a regression
    chance: float | None  # share of the most frequent class; None for a regression
    lift: float  # alignment over that of random labels
    share: float  # share of the labels' squared norm on the leading eigenvectors
    fair: float  # that share for random labels
    gap: float  # relative linearity gap on the training data

    @property
    def skill(self) -> float | None:
        """(accuracy − chance) / (1 − chance) for classes, the share explained for values."""
        if self.accuracy is None or self.chance is None:
            return self.explained
        return (self.accuracy - self.chance) / (1 - self.chance)


def judge(evidence: Evidence) -> Verdict:
    """Judge a task by what the fit predicts of each training example from all the others."""
    skill = evidence.skill
    reasons = [_prediction(evidence), _alignment(evidence), _gap(evidence.gap), OPEN]
    if skill is None:
        level, text = "unknown", (
            "Whether linear fine-tuning does well cannot be said without leave-one-out, which needs the "
            "kernel of all samples; the alignment is the only evidence."
        )  # fmt: skip
    elif skill >= WELL:
        level, text = "well", "Linear fine-tuning is likely to do well on this task."
    elif skill >= POORLY:
        level, text = (
            "partly",
            ("Linear fine-tuning is likely to learn a good part of this task, but not all of it."),
        )
    else:
        level, text = "poorly", "Linear fine-tuning is likely to do poorly on this task with these samples."
    return Verdict(level, text, tuple(reason for reason in reasons if reason))


def _prediction(evidence: Evidence) -> str:
    """Leave-one-out in words."""
    if evidence.accuracy is not None and evidence.chance is not None:
        return (
            f"Predicted from all the others, {_percent(evidence.accuracy)} of the training samples get the "
            f"right class; always naming the most frequent one would get {_percent(evidence.chance)}."
        )
    if evidence.explained is None:
        return ""
    if evidence.explained <= 0:
        return "Predicted from all the others, training samples come out no better than their mean."
    return (
        f"Predicted from all the others, the training samples' values are explained to "
        f"{_percent(evidence.explained)} of their variance."
    )


def _alignment(evidence: Evidence) -> str:
    """Alignment in words."""
    lift = f"{evidence.lift:.2g}" if evidence.lift < 100 else f"{evidence.lift:.0f}"
    side = (
        "better than" if evidence.lift > 1.2 else "worse than" if evidence.lift < 0.8 else "about as well as"
    )
    return (
        f"The labels are aligned with the kernel {side} random labels ({lift} times their alignment); "
        f"its leading directions hold {_percent(evidence.share)} of them, and of random ones "
        f"{_percent(evidence.fair)}."
    )


def _gap(gap: float) -> str:
    """The linearity gap in words."""
    start = f"The network with the fitted weights is {_percent(gap)} away from its linear model"
    if gap < NEAR:
        return f"{start}: the task lies within its linear range, and plain fine-tuning could move there too."
    if gap < FAR:
        return f"{start}: use the linear model for predictions, not the network with those weights."
    return f"{start}, farther than the fit moved it: only the linear model can be used, not those weights."


def _percent(share: float) -> str:
    """A share as text."""
    if 0 < share < 0.001:
        return "less than 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.095 or share == 0 else f"{100 * share:.2g} %"
