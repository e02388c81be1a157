"""Removing training samples from a run, and adding new ones, without training."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linnet.app.data.transforms import Standardize
from linnet.app.runs.folder import SavedRun, answered, save_run
from linnet.app.runs.held_out import load_test, places_of, test_digest
from linnet.app.runs.place import clear_run
from linnet.app.runs.results import EQUAL, further, place_of, print_change, write
from linnet.app.runs.samples import NewSamples, find_samples, named, read_new, required_answers
from linnet.errors import DataError, InputError
from linnet.linear.dual import DualSystem
from linnet.linear.normal_system import NormalSystem, summed
from linnet.nested.nested_fit import NestedFit
from linnet.report.numbers import duration, number, percent
from linnet.report.reading import (
    Fit,
    certificate_of,
    choices,
    facts,
    held_out,
    scored,
    suspects,
    training_set,
)
from linnet.report.records import (
    Comparison,
    Content,
    FitRecord,
    Forgetting,
    Notes,
    Samples,
    TrainingSet,
)
from linnet.shown import some

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Again:
    """The fit of the same samples, solved again."""

    difference: float  # largest difference of outputs from it
    seconds: float  # time that it took
    own_scales: float | None = None  # that from one whose features have scales of their own


@dataclass(frozen=True, eq=False)
class Change:
    """A run before and after its training samples changed."""

    before: SavedRun  # the run before
    after: SavedRun  # the run after
    seconds: float  # time that the change took
    again: Again  # what it is compared with
    removed: tuple[int, ...] = ()  # positions of forgotten samples, in the run before
    verified: bool = False  # whether the network was run again for that fit, kernel included
    notes: tuple[str, ...] = ()  # what was left out, and why

    @property
    def added(self) -> range:
        """Positions of added samples, in the run after."""
        return range(self.before.fit.n - len(self.removed), self.after.fit.n)


FORGET_FIRST = "linnet forget those first where the new answers are right"
DRAWN = 50  # tables of rows like a run's, by which what chance explains is known
KEPT = "the layers below were trained on them and keep what they learned: adapt again without them"


def forget(run: SavedRun, ids: Sequence[str], verify: bool = False) -> Change:
    """Forget training samples."""
    known = run.samples
    removed = find_samples(ids, known.ids, "training samples", lambda: _test_ids(run))
    if len(removed) == run.fit.n:
        raise InputError(
            f"ids names all {run.fit.n} training samples",
            expected="at least one that stays",
            remedy="leave some out",
        )
    start = time.perf_counter()
    fit = run.fit.forget(removed)
    seconds = time.perf_counter() - start
    keep = np.setdiff1d(np.arange(run.fit.n), np.asarray(removed))
    names = run.fingerprints()
    assert known.labels is not None
    gone = [names[at] for at in removed]
    forgotten = [*run.forgotten, *answered(gone, known.labels[removed])]  # rows of numbers may be equal
    after = replace(run, fit=fit, samples=known.take(keep), forgotten=tuple(sorted(forgotten)))
    compared = _compare(fit, verify)
    same = [known.ids[at] for at in keep.tolist() if names[at] in gone]
    note = f"{len(same)} samples that stay have the inputs of forgotten ones: {some(same)}"
    notes = ((note,) if same else ()) + ((KEPT,) if fit.trained else ())
    return Change(run, after, seconds, compared, tuple(removed), verify, notes)


def _test_ids(run: SavedRun) -> dict[str, tuple[str, ...]]:
    """The names of a run's test samples."""
    task, _ = load_test(run)
    return {} if task is None else {"test samples of the run": task.test.ids}


def update(run: SavedRun, data: Path, verify: bool = False, new_classes: Sequence[str] = ()) -> Change:
    """Take in new training samples, of new classes too where these are named."""
    before, run = run, _with_classes(run, new_classes)
    new = read_new(data, run, prefer="train")
    answers = required_answers(new, data)
    new, answers, notes = _unknown(run, new, answers)
    if missing := [
        name for at, name in enumerate(new_classes, len(before.classes or ())) if at not in answers
    ]:
        raise DataError(
            f"{data} has no sample of the new classes {some(missing)}",
            expected="a sample of each class that --new-class names",
            remedy="leave these names out, or add samples of them",
        )
    start = time.perf_counter()
    old = copy(run.fit)
    old.record = replace(old.record, classes=())  # new ones get their numbers in the order of their names
    fit = old.update((run.inputs(new.x), run.answers(answers)))
    if run.classes is not None and run.fit.class_names:
        fit.record = replace(fit.record, classes=run.classes)
    seconds = time.perf_counter() - start
    known, images = run.samples, run.samples.images
    assert known.labels is not None
    if images is not None:
        images = np.concatenate([images, new.x]) if images.shape[1:] == new.x.shape[1:] else None
    every = known.ids + unused(known.ids, data.name, new.ids)
    samples = Samples(images, np.concatenate([known.labels, answers]), every)
    after, overlap = _tested_elsewhere(replace(run, fit=fit, samples=samples), new)
    compared = _compare(fit, verify)
    return Change(before, after, seconds, compared, (), verify, (*new.findings, *notes, *overlap))


def _with_classes(run: SavedRun, names: Sequence[str]) -> SavedRun:
    """The run with more classes than its fit has seen."""
    if not names:
        return run
    classes = run.classes or ()
    if run.classes is None or len({*classes, *names}) < len(classes) + len(names) or "" in names:
        raise InputError(
            f"--new-class {some(names)}",
            expected=f"names other than {some(classes)}, each once" if classes else "a run of classes",
            remedy="leave --new-class out",
        )
    numbers = [str(label) for label in range(len(classes), len(classes) + len(names))]
    if any(name.isdecimal() and name != label for name, label in zip(names, numbers, strict=True)):
        raise InputError(
            f"--new-class {some(names)}",
            expected=f"the next numbers, {some(numbers)}, where classes are called by theirs",
            remedy="name them in this order",
        )
    return replace(run, classes=(*classes, *names))


def unused(taken: Sequence[str], name: str, ids: Sequence[str]) -> tuple[str, ...]:
    """Ids with the name of their source before them, which gets a number where the run has such ids."""
    known, source, count = set(taken), name, 1
    while any(f"{source}/{sample}" in known for sample in ids):
        count += 1
        source = f"{name}-{count}"
    return tuple(f"{source}/{sample}" for sample in ids)


def _unknown(run: SavedRun, new: NewSamples, answers: Array) -> tuple[NewSamples, Array, tuple[str, ...]]:
    """The samples that the run neither trained on, forgot nor holds out, and notes about the others."""
    assert run.samples.labels is not None
    bare, values = run.fingerprints(), run.fingerprints(new.x)
    whole, labeled = answered(bare, run.samples.labels), answered(values, answers)
    measured = run.measured
    own, theirs = (whole, labeled) if measured else (bare, values)
    every = [*own, *run.held]
    known = _copies(enumerate(theirs), places_of(every), once=measured)
    found = {row: at for row, at in known.items() if at < len(own)}
    count, what, notes = len(new.ids), [], []
    alike = measured and len(found) < len(own) and _by_chance(every, own, len(found), count)
    if alike:  # another table, in which what is held out may still be
        held = _copies(enumerate(theirs), places_of(run.held), once=True)
        mere = bool(held) and _by_chance(every, run.held, len(held), count)
        like = ("samples of the training", found), ("test samples of the run", held if mere else {})
        told = "by chance: they are taken as new; where they are not, give the new ones alone"
        notes += [f"{len(rows)} of {count} samples are like {kind}, {told}" for kind, rows in like if rows]
        found, known = {}, {} if mere else {row: len(own) + at for row, at in held.items()}
    if found:
        row, at = next(iter(found.items()))
        told = f"training samples of the run already, first {new.ids[row]}, which is {run.samples.ids[at]}"
        what.append(f"{len(found)} of {count} samples are {told}")
    if tested := [row for row in known if row not in found]:
        told = f"test samples of the run, first {new.ids[min(tested)]}"
        what.append(f"{len(tested)} of {count} samples are {told}")
    rest = [(row, name) for row, name in enumerate(labeled) if row not in known]
    gone = _copies(rest, places_of(run.forgotten), once=measured)
    if gone:
        told = f"forgotten before, first {new.ids[min(gone)]} (linnet adapt would train on them again)"
        what.append(f"{len(gone)} of {count} samples were {told}")
    corrected: dict[int, int] = {}
    if measured and 2 * len(found) > len(own):  # a table that has the run's rows has each of them once
        lacking = [name.partition(" ")[0] for name in every]
        for at in known.values():
            lacking[at] = ""
        rest = [(row, values[row]) for row, _ in rest if row not in gone]
        corrected = _copies(rest, places_of(lacking), once=True)
    if corrected:
        row, at = next(iter(corrected.items()))
        which = f"which is {run.samples.ids[at]}" if at < len(own) else "a test sample"
        told = f"another answer in the run, first {new.ids[row]}, {which} ({FORGET_FIRST})"
        what.append(f"{len(corrected)} of {count} samples have {told}")
    left = {*known, *gone, *corrected}
    if len(left) == count:
        raise DataError(
            "; ".join(what),
            expected="samples that the run was not trained on, has not forgotten and does not hold out",
            remedy="give other samples; linnet forget takes out those that have a wrong answer, linnet adapt "
            "draws anew what is held out",
        )
    notes += [f"{told}; these are left out" for told in what]
    other = [one for one in _otherwise(values, answers, bare, run.samples.labels) if one[0] not in corrected]
    equal = len(_copies([(row, values[row]) for row, _ in other], places_of(bare), once=True))
    if other and not alike and not (measured and _by_chance(bare, bare, equal, count)):
        row, at = other[0]
        told = f"equal training samples, first {new.ids[row]}, which is {run.samples.ids[at]}"
        beside = "both are trained on; " if measured else ""
        notes.append(f"{len(other)} samples have another answer than {told}: {beside}{FORGET_FIRST}")
    keep = np.setdiff1d(np.arange(count), sorted(left))
    ids = tuple(new.ids[row] for row in keep)
    kept = replace(new, x=new.x[keep], y=answers[keep], ids=ids)
    return kept, answers[keep], tuple(notes)


def _copies(names: Iterable[tuple[int, str]], places: dict[str, list[int]], once: bool) -> dict[int, int]:
    """Rows whose name is among the places, each place taken once if so, with that place."""
    found = {}
    for row, name in names:
        if places.get(name):
            found[row] = places[name].pop(0) if once else places[name][0]
    return found


def _by_chance(every: Sequence[str], part: Sequence[str], equal: int, count: int) -> bool:
    """Whether no more rows of a part are found than another table of so many rows like them would hold."""
    kinds, inside = Counter(every), Counter(part)
    times, there = np.array(list(kinds.values())), np.array([inside[kind] for kind in kinds])
    # a new row is like some row as often as the run's rows are like each other (Good and Turing)
    share = times[times > 1].sum() / len(every)
    if not share:
        return False
    chances, rng = np.append(times / len(every) * share, 1 - share), np.random.default_rng(0)
    drawn = [np.minimum(rng.multinomial(count, chances)[:-1], there).sum() for _ in range(DRAWN)]
    return bool(equal <= min(np.mean(drawn) + 3 * np.std(drawn), np.max(drawn)))


def _otherwise(
    names: Sequence[str], answers: Array, own: Sequence[str], known: Array
) -> list[tuple[int, int]]:
    """Rows that equal training rows, all of which have other answers, with one such row."""
    found, groups = [], places_of(own)
    for row, name in enumerate(names):
        places = groups.get(name, ())
        if places and not any(np.array_equal(known[at], answers[row]) for at in places):
            found.append((row, places[0]))
    return found


def _tested_elsewhere(run: SavedRun, new: NewSamples) -> tuple[SavedRun, tuple[str, ...]]:
    """The run with test samples that it has not been trained on, and a note about the others."""
    task, _ = load_test(run)
    if task is None or run.test is None:
        return run, ()
    added = set(run.fingerprints(new.x))
    keep = [row for row, name in enumerate(run.fingerprints(task.test.x)) if name not in added]
    overlap = len(task.test) - len(keep)
    if not overlap:
        return run, ()
    note = f"{overlap} of {len(task.test)} test samples are training samples now"
    positions = tuple(keep if run.test.positions is None else (run.test.positions[row] for row in keep))
    digest = test_digest(task.subset("test", keep)) if keep else run.test.digest
    test = replace(run.test, positions=positions, digest=digest)
    then = "the scores, before and after, leave them out" if keep else "none is left to score on"
    return replace(run, test=test), (f"{note}; {then}",)


@torch.no_grad()
def _compare(fit: Fit, verify: bool) -> Again:
    """The fit beside a solution from scratch, by the outputs on training samples."""
    start = time.perf_counter()
    assert isinstance(fit, NestedFit)
    if verify:
        own, same = fit.predict(fit.x), fit.recomputed().predict(fit.x)
        seconds = time.perf_counter() - start
        scaled = fit.recomputed(scales=True).predict(fit.x)
        if fit.classes is None:
            spread = fit.targets.double().std(0, correction=0).max()  # of answers that are all alike, none
            apart = (scaled - own).abs().max() / (spread if spread > 0 else 1.0)
        else:
            apart = (fit._class_probs(scaled) - fit._class_probs(own)).abs().max()
        return Again(float((same - own).abs().max()), seconds, float(apart))
    if isinstance(system := fit.system, NormalSystem):
        again = NormalSystem(system.problem, summed(system.problem, system.memory), fit.ridge)
        moved = again.solution - system.solution
        gap = torch.stack([(rows @ moved).abs().max() for _, rows in system.problem.rows()]).max()
        return Again(float(gap), time.perf_counter() - start)
    kernel, known = system.kernel, system.beta
    beta = DualSystem(kernel, system.residual, fit.ridge).beta  # outputs on the training samples are Kβ
    gap = (kernel @ (beta - known).reshape(len(kernel), -1)).abs().max()
    return Again(float(gap), time.perf_counter() - start)


def keep_change(
    change: Change, command: str, out: Path, title: str, overwrite: bool
) -> tuple[dict[str, Any], list[str]]:
    """Write the run after a change, with its report: the result, and lines for people."""
    result, page = report_change(change, command, out, title)
    if overwrite:
        clear_run(out)
    save_run(out, change.after)
    write(out, result, page)
    return result, print_change(result)


def report_change(change: Change, command: str, out: Path, title: str) -> tuple[dict[str, Any], Content]:
    """The result and the page of a change."""
    before, after = change.before, change.after
    task, why = load_test(after)
    rows: tuple[Comparison, ...] = ()
    test = None
    if task is not None:
        found, then = after.predict(task.test.x), before.predict(task.test.x)
        rows = scored("after", found, task.test.y, change.seconds), scored("before", then, task.test.y)
        test = held_out(after, task.samples("test"), found, task.test.x, explain=not change.removed)
    train = training_set(after)
    if change.removed:
        doubted, by_chance, limits, _ = suspects(before.fit)
        forgotten = _forgetting(change, rows)
        train = TrainingSet(before.samples, None, doubted, None, forgotten, by_chance, limits)
    findings = (*change.notes, *((why,) if why else ()))
    warnings = (*after.fit.record.warnings, *findings)
    steps = further(place_of(out), False, after.classes is not None)
    notes = Notes(_headline(change, rows), warnings, facts(after), steps)
    again = "the same from scratch" if change.verified else "solving from scratch"
    timings = {command: change.seconds, again: change.again.seconds}
    record = FitRecord(choices=choices(after), timings=timings)
    page = Content(title, after.classes, notes, rows, record, train, test, place_of(out))
    summary = after.fit.summary()
    result = {
        "command": command, "train_before": before.fit.n, "train": after.fit.n,
        "test": 0 if task is None else len(task.test), "scores": [row.numbers() for row in rows],
        "certificate": summary["certificate"], "difference": change.again.difference,
        "equal": change.again.difference <= _tolerance(after.fit.targets), "verified": change.verified,
        "removed": _named(before, change.removed), "added": _named(after, change.added),
        "seconds": change.seconds, "refit_seconds": change.again.seconds,
        "own_scales": change.again.own_scales, "kept_scales": _kept(after),
        "trained": after.fit.trained, "fit": summary,
        "untested": why, "findings": list(findings), "out": str(out),
    }  # fmt: skip
    return result, page


def _tolerance(targets: torch.Tensor) -> float:
    """The difference of outputs that changes no answer; targets that are all alike are known to rounding."""
    found = targets.double()
    return EQUAL * float(found.std(correction=0)) + 1e-5 * float(found.abs().max())


def _kept(run: SavedRun) -> str:
    """What the run has from all samples that it ever had."""
    features = "the mean and the scale of features"
    if isinstance(run.transforms[0], Standardize):
        return f"the means, spreads and fill values of columns and {features}"
    return features


def _named(run: SavedRun, positions: Sequence[int]) -> list[dict[str, Any]]:
    """Training samples of a run, with their answers."""
    return named(run.samples.ids, run.samples.labels, run.classes, positions)


def _headline(change: Change, rows: tuple[Comparison, ...]) -> tuple[str, ...]:
    """The change, in sentences."""
    count = len(change.removed)
    if count:
        every = number(change.before.fit.n)
        what = "forgotten" if not change.before.fit.trained else "taken out of the fit"
        first = f"{count} of {every} training samples were {what} in {duration(change.seconds)}."
    else:
        added = change.after.fit.n - change.before.fit.n
        first = f"{added} training samples were added to {change.before.fit.n} in {duration(change.seconds)}."
    if not rows:
        return (first,)
    now, then = rows
    if now.accuracy is not None and then.accuracy is not None:
        was, becomes = percent(then.accuracy), percent(now.accuracy)
        return first, f"The test accuracy was {was} before and is {becomes} after."
    return first, f"The test RMSE was {number(then.rmse)} before and is {number(now.rmse)} after."


def _forgetting(change: Change, rows: tuple[Comparison, ...]) -> Forgetting:
    """The part of the page about forgetting."""
    before, after = change.before.fit, change.after.fit
    table: list[tuple[str, float | str, float | str]] = [("training samples", before.n, after.n)]
    if rows:
        now, then = rows
        for what, was, becomes in (
            ("test accuracy", then.accuracy, now.accuracy),
            ("test log loss, nats", then.nll, now.nll),
            ("test RMSE", then.rmse, now.rmse),
        ):
            if was is not None and becomes is not None:
                table.append((what, was, becomes))
    table.append((certificate_of(after), before.system.certificate(), after.system.certificate()))
    how = "The comparison ran the network again, kernel included." if change.verified else (
        "The comparison solves the equations of the remaining samples from scratch."
    )  # fmt: skip
    how += f" Both take {_kept(change.after)} from all samples, forgotten ones too."
    seconds = change.seconds, change.again.seconds
    return Forgetting(change.removed, tuple(table), change.again.difference, *seconds, how, change.verified)
