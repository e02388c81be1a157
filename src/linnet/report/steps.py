"""What to do next: labels to look at, samples to label, classes not to trust, and the commands for it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linnet.plots.measures import Array, ranking, wilson_interval
from linnet.report.numbers import FEW, measured_share, number, percent, share_error
from linnet.report.records import Content, NextStep, Samples, TrainingSet
from linnet.report.verdict import least_certain

_LABELS, _NEXT, _EXAMPLES, _CLASSES = 5, 10, 3, 4  # most samples and classes that a step names
_JUDGED = 5  # predictions of a class from which it is judged
_TARGETS = (0.9, 0.95, 0.99)  # shares of right answers at which predictions may do without a person


@dataclass(frozen=True)
class ClassRecord:
    """How often predictions of one class are right."""

    index: int  # the class
    predicted: int  # how often it was predicted
    right: int  # how often that was right, hence how many of its test samples were predicted so
    tested: int  # how many test samples are of this class


def class_records(run: Content) -> list[ClassRecord]:
    """How often predictions of each class are right, on the test samples."""
    test = run.test
    predicted = None if test is None else test.predicted()
    if test is None or test.samples.labels is None or predicted is None or run.classes is None:
        return []
    if len(predicted) < FEW:
        return []
    labels = test.samples.labels
    return [
        ClassRecord(
            c,
            int((predicted == c).sum()),
            int(((predicted == c) & (labels == c)).sum()),
            int((labels == c).sum()),
        )
        for c in range(len(run.classes))
    ]


def distrusted(run: Content) -> list[ClassRecord]:
    """Classes whose predictions are right clearly less often than predictions on the whole."""
    # The 95 % interval of each is widened for the number of classes, so that on average one run in twenty
    # names a class without cause.
    every = [record for record in class_records(run) if record.predicted >= _JUDGED]
    total = sum(record.predicted for record in every)
    if not total:
        return []
    whole = sum(record.right for record in every) / total
    level = 1 - 0.05 / len(every)
    below = [
        r for r in every
        if r.right / r.predicted < whole and wilson_interval(r.right, r.predicted, level)[1] < whole
    ]  # fmt: skip
    return sorted(below, key=lambda r: r.right / r.predicted)


def next_steps(run: Content) -> tuple[NextStep, ...]:
    """What to do next, by what the run holds."""
    made = (_look_at_labels(run), _label_next(run), _distrust(run), _check_by_hand(run), _look_behind(run))
    return (*run.notes.first, *(step for step in made if step is not None), *run.notes.steps)


def command(name: str, run: str, ids: Sequence[str] = (), **options: str) -> str:
    r"""A command of linnet on some samples of a run, as a shell takes it."""
    words = ["linnet", name, "--run", run]
    if ids:
        odd = any("," in sample or sample[:1] in ("", "[", "-", " ") for sample in ids)
        words += ["--ids", json.dumps(list(ids), ensure_ascii=False) if odd else ",".join(ids)]
    for option, value in options.items():
        words += [f"--{option}", value]
    return shlex.join(words)


def folder_beside(run: str, ending: str) -> str:
    """A folder beside that of a run."""
    return f"{run.rstrip('/')}-{ending}"


def _of(run: Content, name: str, samples: Samples, chosen: Sequence[int], **options: str) -> str:
    """A command on samples; empty where the run's folder or the ids are not known, or cannot be typed."""
    if not run.folder or not samples.ids:
        return ""
    named = [samples.name(i) for i in chosen]
    # a pasted line break or escape character could end the line early, an invisible one could mislead
    if not named or not all(sample.isprintable() for sample in (run.folder, *named)):
        return ""
    return command(name, run.folder, named, **options)


def _look_at_labels(run: Content) -> NextStep | None:
    """Probable label errors."""
    train = run.train
    if train is None:
        return None
    gone = set() if train.forgetting is None else set(train.forgetting.removed)
    doubted = [suspect.sample for suspect in train.suspects if suspect.sample not in gone]
    if not doubted:
        return _look_anyway(train)
    chosen = doubted[:_LABELS]
    count = len(doubted)
    text = f"{number(count)} training label{'s' * (count != 1)} look{'' if count > 1 else 's'} wrong"
    if train.by_chance is not None:
        text += f"; by chance alone {number(train.by_chance, 2)} would"
        if len(doubted) < train.by_chance + 2 * max(train.by_chance, 1.0) ** 0.5:
            text += ": most may just be hard"
    made = _of(run, "forget", train.samples, chosen, out=folder_beside(run.folder, "cleaned"))
    text += ". Correct them in the data"
    text += ", or forget those that are wrong, without training again:" if made else "."
    return NextStep(f"Look at {_these(len(chosen), 'label')}", text, made, tuple(chosen))


def _look_anyway(train: TrainingSet) -> NextStep | None:
    """The labels to look at where none is likely wrong, and most that are wrong would not be seen."""
    if train.suspects or train.forgetting is not None or not train.unsure:
        return None
    chosen = train.unsure[:_LABELS]
    text = f"No training label is likelier wrong than right, but {train.limits}."
    return NextStep(f"Look at {_these(len(chosen), 'label')}", text, training=chosen)


def _label_next(run: Content) -> NextStep | None:
    """New samples whose labels would tell most."""
    test = run.test
    if test is None or test.uncertainty is None or test.samples.labels is not None or test.explanations:
        return None
    chosen = tuple(int(i) for i in ranking(test.uncertainty)[:_NEXT])
    if not chosen:
        return None
    kind = "image" if test.samples.images is not None else "sample"
    text = f"The fit is least sure of {'them' if len(chosen) > 1 else 'it'}"
    if not run.folder or not run.folder.isprintable():
        return NextStep(f"Label {_these(len(chosen), kind)} next", f"{text}.", tested=chosen)
    text += ". Put them with their answers into a folder, and add them without training again:"
    line = shlex.join(["linnet", "update", "--run", run.folder, "--data", "FOLDER", "--out",
                       folder_beside(run.folder, "more")])  # fmt: skip
    return NextStep(f"Label {_these(len(chosen), kind)} next", text, line, tested=chosen)


def _distrust(run: Content) -> NextStep | None:
    """Classes whose predictions are often wrong."""
    records, classes, test = distrusted(run)[:_CLASSES], run.classes, run.test
    if not records or classes is None or test is None or test.probs is None:
        return None
    named = [
        f"{classes[r.index]} ({percent(r.right / r.predicted, 0)} of {r.predicted} right)" for r in records
    ]
    predicted, labels = test.probs.argmax(1), test.samples.labels
    wrong = np.flatnonzero((predicted != labels) & np.isin(predicted, [r.index for r in records]))
    surest = wrong[ranking(test.probs[wrong].max(1))][:_EXAMPLES]
    chosen = tuple(int(i) for i in surest)
    title = "Do not trust this class" if len(records) == 1 else f"Do not trust these {len(records)} classes"
    text = f"Where it says {_listed(named)}, it is wrong more often than elsewhere. The surest mistakes"
    made = _of(run, "explain", test.samples, chosen)
    text += ", and the training samples behind them:" if made else ":"
    return NextStep(title, text, made, tested=chosen)


def _check_by_hand(run: Content) -> NextStep | None:
    """What a person should check: predictions below the probability from which on enough are right."""
    split, test = least_certain(run.test), run.test
    correct = None if test is None else test.correct()
    if split is None or test is None or test.uncertainty is None or test.probs is None or correct is None:
        return None
    worst, rest, count = split
    target = next((share for share in _TARGETS if correct.mean() < share), None)
    if target is not None and (made := _to_target(test.probs.max(1), correct, target)) is not None:
        return made
    if worst <= rest or wilson_interval(worst * count, count)[0] <= rest:
        return None
    edge = float(np.sort(test.probs.max(1))[count - 1])
    text = (
        f"Among the {count} least confident predictions, {percent(worst, 0)} are wrong; "
        f"among the others, {percent(rest, 0)}."
    )
    return NextStep(f"Have a person check predictions below {percent(edge, 0)}", text)


def _to_target(confidence: Array, correct: Array, target: float) -> NextStep | None:
    """The lowest probability from which on a share of the predictions is right, where there is one."""
    order = ranking(confidence)
    right = np.cumsum(correct[order]) / np.arange(1, len(order) + 1)
    last = np.append(np.diff(confidence[order]) != 0, True)  # equal ones are on the same side
    found = np.flatnonzero((right >= target) & last & (np.arange(len(order)) >= FEW - 1))
    if not len(found) and target > _TARGETS[0]:
        return None
    if not len(found):
        text = f"There is no probability from which on {percent(target, 0)} of the predictions are right."
        return NextStep(
            "Have a person check every prediction", f"{text} All together, {percent(correct.mean(), 0)} are."
        )
    count = int(found[-1]) + 1
    shown = measured_share(right[count - 1], share_error(right[count - 1], count))
    others = correct[order[count:]].mean()
    text = (
        f"Of the {count} test predictions from there on, {shown} are right; "
        f"of the {len(order) - count} others, {percent(others, 0)}."
    )
    return NextStep(f"Have a person check predictions below {percent(confidence[order[count - 1]], 0)}", text)


def _look_behind(run: Content) -> NextStep | None:
    """Training samples that pushed wrong predictions, on a page of explanations."""
    test, train = run.test, run.train
    if test is None or train is None or run.scores or not test.explanations:
        return None
    correct = test.correct()
    if correct is None:
        return None
    wrong = [e for e in test.explanations if not correct[e.sample] and e.up]
    chosen = list(dict.fromkeys(e.up[0].sample for e in wrong))[:_LABELS]
    if not chosen:
        return None
    text = "They did most for the wrong predictions below. If their labels are wrong too, forget them:"
    made = _of(run, "forget", train.samples, chosen, out=folder_beside(run.folder, "cleaned"))
    title = f"Look at {_these(len(chosen), 'training sample')}"
    return NextStep(title, text if made else text.partition(".")[0] + ".", made, tuple(chosen))


def _these(count: int, noun: str) -> str:
    """A number of things at hand."""
    return f"this {noun}" if count == 1 else f"these {count} {noun}s"


def _listed(parts: list[str]) -> str:
    """Parts joined as in a sentence."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"
