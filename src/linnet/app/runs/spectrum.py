"""The spectrum command: from a run, or a network and data, to a page and a result."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from linnet.app.data import SampleSet
from linnet.app.options import RunOptions, TaskOptions
from linnet.app.runs.adaptation import (
    Stages,
    Started,
    checked_features,
    outputs_of,
    require_linearizable,
    started,
)
from linnet.app.runs.folder import SavedRun, opened
from linnet.app.runs.held_out import load_test
from linnet.app.runs.place import RECORD, check_out
from linnet.app.runs.results import score_table, write, written
from linnet.errors import InputError
from linnet.fitting.fit import fit as fit_linear
from linnet.fitting.head import with_head
from linnet.fitting.last_layer import with_centered_head
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.solver import Dual
from linnet.linear.targets import OneHot
from linnet.nested.features import RandomHeads
from linnet.nested.nested_fit import NestedFit
from linnet.progress import waiting
from linnet.report.numbers import duration, number, percent
from linnet.report.reading import choices, facts
from linnet.report.records import Comparison, Content, FitRecord, Notes, TaskKernel, TrainingSet
from linnet.spectrum.kernel_matrix import gram_part
from linnet.spectrum.task_linearity import TaskLinearity, task_linearity
from linnet.tangent.batch import split
from linnet.tangent.linearized import Linearized, linearize
from linnet.tangent.store import missing_parts

NOTE = "this is about one linearization at a random head; the run averages several beside a linear probe"
BATCH = 128  # samples predicted at once


@dataclass(frozen=True, eq=False)
class Subject:
    """Network and data under examination."""

    run: SavedRun  # the fit, with its network and training samples
    test: SampleSet | None  # test samples; None where there are none or they cannot be read again
    findings: tuple[str, ...]  # remarks on the data
    stages: Stages  # time of each step
    title: str  # of the report


@dataclass(frozen=True, eq=False)
class Examined:
    """Result of the examination."""

    subject: Subject  # what was looked at
    linearity: TaskLinearity  # how linear the task is
    scores: tuple[Comparison, ...]  # the linear fit and the network with the fitted weights, on test samples


def check_place(out: Path, run: Path | None) -> None:
    """Require a folder that holds no run: its report must not be written over."""
    if run is not None and run.is_file():
        raise InputError(
            f"run is {run}, a file", "the folder of a finished run", "name the folder that holds run.json"
        )
    check_out(out, run)
    if (out / RECORD).exists():
        raise InputError(
            f"out is {out}, which holds a run and its report",
            expected="a folder of its own",
            remedy=f"name another folder, such as --out {out / 'spectrum'}",
        )


def from_run(options: RunOptions) -> Subject:
    """One linearization of the network of a finished run, with its training samples."""
    stages = Stages()
    with stages.measure("reading the run"):
        run = opened(options)
        task, why = load_test(run)
    fit = run.fit
    assert isinstance(fit, NestedFit)
    data = fit.x, fit.targets if fit.labels is None else fit.labels
    lin, targets = _at_random_head(fit.module, fit.system.c), OneHot(fit._targets.scale)
    linear = _fit_linear(lin, data, targets=targets, ridge="loo", memory=fit.memory)
    linear.record = replace(linear.record, warnings=(*linear.record.warnings, NOTE))
    found = replace(run, fit=linear)
    test, findings = (None, (why,)) if task is None else (task.test, ())
    return Subject(found, test, findings, stages, f"Linearity of {options.run.name}")


def from_data(options: TaskOptions, kernel: Path | None) -> Subject:
    """The same for a network and data, with the kernel of a file where one is named."""
    begun = started(options)
    task, lin, stages = begun.task, _linearized(options, begun), begun.stages
    with stages.measure("fit"), waiting("fit"):
        solver = "auto" if kernel is None else Dual(kernel)
        fit = _fit_linear(lin, begun.tensors(), ridge="loo", solver=solver, memory=options.memory)
    transforms = (task.transform, task.targets)
    run = SavedRun(begun.origin, fit, task.samples("train"), task.classes, transforms, None)
    network = "random hidden units" if options.model is None else str(options.model).rpartition(":")[2]
    title = f"Linearity of {options.data.stem} for {network}"
    return Subject(run, task.test, task.findings, stages, title)


def _fit_linear(lin: Linearized, data: Any, **how: Any) -> Any:
    """The linear fit, whose record has what it warns of: notes of the page, and not of Python."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", UserWarning)
        found = fit_linear(lin, data, **how)
    told = dict.fromkeys((*found.record.warnings, *(str(one.message) for one in raised)))
    found.record = replace(found.record, warnings=tuple(told))
    return found


def made_part(options: TaskOptions | None, file: Path | None, part: str) -> tuple[dict[str, Any], list[str]]:
    """Compute one part of the kernel that ``from_data`` fits with; no process group is needed."""
    index, _, of = part.partition("/")
    is_part = index.isdecimal() and of.isdecimal() and int(index) < int(of)
    if options is None or file is None or not is_part:
        raise InputError(
            f"part is {part!r}, with kernel {file}",
            expected="which part, from 0, and the number of parts, of a kernel's file",
            remedy="pass --kernel kernel.npy --part 3/64 for the fourth of 64, beside --model and --data",
        )
    begun = started(options)
    lin, place = _linearized(options, begun), (int(index), int(of))
    found = gram_part(lin, begun.tensors()[0], file=file, part=place, memory=options.memory)
    complete = found is not None
    missing = [] if complete else missing_parts(file)
    result = {
        "command": "spectrum", "part": list(place), "kernel": str(file), "complete": complete,
        "missing": missing,
    }  # fmt: skip
    said = "the kernel is complete" if complete else f"missing: {_spans(missing) or 'none by now'}"
    return result, [f"part {place[0]} of {place[1]} of {file} is done; {said}"]


def _linearized(options: TaskOptions, begun: Started) -> Linearized:
    """A network, checked and linearized at a random head for its task."""
    module, report = checked_features(options, begun.network, begun.tensors()[0][:4])
    require_linearizable(report)
    return _at_random_head(module, outputs_of(begun.task))


def _spans(numbers: list[int]) -> str:
    """Sorted numbers with runs joined."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _at_random_head(module: RandomHeads, outputs: int) -> Linearized:
    """The linearization at a random head, in the parameters that take part below it, and the head."""
    generator = torch.Generator().manual_seed(module.seed)
    network = with_head(module.model, outputs, init="random", seed=generator)
    below, head = set(module.function.names), module.layer
    chosen = [n for n, _ in network.named_parameters() if n in below or n.rpartition(".")[0] == head]
    return linearize(with_centered_head(network), chosen)


def report(
    subject: Subject, out: Path, top: int | None, samples: int | None, memory: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Measure how linear a task is, and write the page: the result, and lines for people."""
    found = examine(subject, top, samples, memory)
    result = result_of(found, out)
    write(out, result, page_of(found))
    return result, print_spectrum(found, out)


def examine(subject: Subject, top: int | None, samples: int | None, memory: str | None) -> Examined:
    """Measure how linear the task is."""
    run = subject.run
    rows = (run.fit.n if samples is None else samples) * run.fit.system.c
    if top is not None and not 1 <= top <= rows:
        raise InputError(
            f"top is {top}",
            expected=f"1 to {rows}, the directions that {rows // run.fit.system.c} samples span",
            remedy="leave it out to have it chosen",
        )
    x = None if subject.test is None else run.inputs(subject.test.x[:])
    with subject.stages.measure("spectrum, alignment and gap"):
        assert isinstance(run.fit, LinearFit)
        found = task_linearity(run.fit, x, top, samples=samples, memory=memory)
    return Examined(subject, found, () if subject.test is None else _scores(run, x, subject.test))


@torch.no_grad()
def _scores(run: SavedRun, x: Any, test: SampleSet) -> tuple[Comparison, ...]:
    """The linear fit, and the network with the weights that it found."""
    fit = run.fit
    assert isinstance(fit, LinearFit)
    function = fit.module.function
    weights = {name: value + fit.delta[name] for name, value in function.theta.items()}
    outputs = {
        "linear fit": fit.predict(x),
        "network, fitted weights": torch.cat([function.flat(weights, part) for part in split(x, BATCH)]),
    }
    rows = []
    for name, f in outputs.items():
        if run.classes is not None:
            right = f.argmax(1).cpu() == torch.from_numpy(test.y)
            rows.append(Comparison(name, accuracy=float(right.double().mean())))
        else:
            values = (run.scale.inverse(f) if run.scale else f).double().cpu().numpy()
            rows.append(
                Comparison(name, rmse=float(((values - test.y.reshape(values.shape)) ** 2).mean() ** 0.5))
            )
    return tuple(rows)


def result_of(found: Examined, out: Path) -> dict[str, Any]:
    """Result as plain values."""
    run = found.subject.run
    return {
        "command": "spectrum", "title": found.subject.title, "train": run.fit.n, "classes": run.classes,
        **found.linearity.to_dict(),
        "solver": run.fit.solver, "scores": [row.numbers() for row in found.scores],
        "findings": list(_warnings(found)), "seconds": dict(found.subject.stages.seconds), "out": str(out),
    }  # fmt: skip


def page_of(found: Examined) -> Content:
    """The report."""
    run, seen_task = found.subject.run, found.linearity
    energy, verdict = seen_task.energy, seen_task.verdict
    scale = energy.samples / run.fit.n
    task = TaskKernel(
        energy.values.numpy(), energy.shares.numpy(), energy.rows, energy.top,
        (seen_task.ridge * scale, seen_task.effective_dimension), (verdict.text, *verdict.reasons),
        tuple((name, str(value)) for name, value in table_of(found)),
    )  # fmt: skip
    record = FitRecord(choices=choices(run), timings=dict(found.subject.stages.seconds), task=task)
    notes = Notes((verdict.text, *verdict.reasons[:1]), _warnings(found), facts(run))
    tested = None if found.subject.test is None else len(found.subject.test)
    train, title = TrainingSet(run.samples), found.subject.title
    return Content(title, run.classes, notes, found.scores, record, train, count=tested)


def table_of(found: Examined) -> list[tuple[str, str]]:
    """The numbers behind the verdict."""
    task, run = found.linearity, found.subject.run
    energy, held, gap = task.energy, task.held_out, task.gap
    rows = [
        (
            f"labels' squared norm on the top {energy.top}",
            f"{percent(energy.share)} (random {percent(energy.fair)})",
        ),
        (f"energy concentration on the top {energy.top} (norms)", percent(task.concentration)),
        ("target alignment α(y)", number(task.alignment)),
        ("alignment over that of random labels", number(task.lift)),
        ("effective dimension at the ridge", f"{number(task.effective_dimension)} of {number(energy.rows)}"),
        ("ridge", number(task.ridge, trim=True)),
    ]
    if held is not None:
        rows.append(("leave-one-out: variance explained", percent(held.explained)))
        if held.accuracy is not None:
            rows.append(
                (
                    "leave-one-out: accuracy",
                    f"{percent(held.accuracy)} (most frequent class {percent(held.chance)})",
                )
            )
    rows.append(("linearity gap, training samples", percent(gap.training)))
    if gap.validation is not None:
        rows.append(("linearity gap, test samples", percent(gap.validation)))
    if gap.agreement is not None:
        rows.append(("same class by network and linear model", percent(gap.agreement)))
    if energy.samples < run.fit.n:
        rows.append(("samples the kernel was taken on", f"{number(energy.samples)} of {number(run.fit.n)}"))
    return rows


def _warnings(found: Examined) -> tuple[str, ...]:
    """Remarks on the fit and on the data."""
    return (*found.subject.run.fit.record.warnings, *found.subject.findings)


def print_spectrum(found: Examined, out: Path) -> list[str]:
    """Result as lines of text."""
    run, verdict = found.subject.run, found.linearity.verdict
    rows = table_of(found)
    width = max(len(name) for name, _ in rows)
    task = f"{len(run.classes)} classes" if run.classes else f"{run.fit.system.c} value(s)"
    return [
        f"{found.subject.title}: {run.fit.n} training samples, {task}; {run.fit.module.space.dim:,} weights",
        verdict.text,
        *(f"  {reason}" for reason in verdict.reasons),
        *(f"  {name:<{width}}  {value}" for name, value in rows),
        *(score_table(list(found.scores)) if found.scores else []),
        "time: " + ", ".join(f"{step} {duration(t)}" for step, t in found.subject.stages.seconds.items()),
        *(f"note: {text}" for text in _warnings(found)),
        *written(out),
    ]
