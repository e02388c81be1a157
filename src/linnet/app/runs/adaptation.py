"""Adapts a trained network to a task as ``linnet.adapt`` does, scores the fit, or says what it will cost."""

from __future__ import annotations

import shutil
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet.app.data import TaskData, check_images, read_task
from linnet.app.models import load_model
from linnet.app.options import AdaptOptions, NetworkOptions, TaskOptions, listed
from linnet.app.runs.folder import Origin, SavedRun, TestSource, interrupted_run
from linnet.app.runs.held_out import test_digest
from linnet.app.runs.normalization import normalized
from linnet.app.runs.place import KERNEL_FILE, TRAINING, leave, shared_fit
from linnet.app.runs.trust import absolute_spec
from linnet.distributed import world
from linnet.errors import InputError, ModelError
from linnet.fitting.arguments import Choices
from linnet.fitting.descent import HEAD_SCALE, fine_tune, held_out_probe
from linnet.fitting.head import Probe, with_head
from linnet.fitting.last_layer import Appended, ending_linear, selected_inside
from linnet.fitting.remarks import data_remarks, single_remarks
from linnet.integrations.pretrained import own_size
from linnet.linear.targets import make_targets
from linnet.machine import find_device
from linnet.nested.adapt import HEADS, best_of, requested, require_chosen
from linnet.nested.features import RandomHeads
from linnet.nested.nested_fit import NestedFit, solved, tries_derivatives
from linnet.nested.search import FREE, PILOT, SAME, WEIGHTS, Shares
from linnet.nested.tuning import tuned
from linnet.params import integer
from linnet.predictive.noise import fit_temperature, probabilities
from linnet.progress import is_verbose, waiting
from linnet.report.numbers import duration, number
from linnet.report.reading import (
    PROBE,
    Predictions,
    name_of,
    scored,
)
from linnet.report.records import Comparison, Content
from linnet.report.verdict import TRY, score_in_words
from linnet.tangent.batch import hash_examples
from linnet.tangent.functional import OWN_SHAPE, Functional
from linnet.tangent.parts import in_parts
from linnet.tangent.preflight import LEFT_OUT, Preflight, preflight
from linnet.tangent.store import discard

Array = np.ndarray[Any, Any]
Keep = Callable[[SavedRun], None]
TIMED = 400  # rows of the matrix whose decomposition is timed
TESTED = 2  # passes of a test sample for one of a training sample: the kernel with them, and its own variance
AGAIN = 1.0  # seconds of a few samples below which they are timed again: another process may have been busy
# Of a first answer:
QUICK = 15.0  # seconds of passes through the network, about the time that torch takes to start
FEW = 8  # samples that are timed
LEAST = 32  # test samples, whose accuracy has a standard error of at most 9 points
SHOTS, VALUES = 5, 16  # training samples of each class, or of all values: leave-one-out of fewer says little
MOST = 2000  # training samples of a probe, whose equations then take seconds, and test samples


@dataclass
class Stages:
    """Seconds of each step, in the order in which they were taken."""

    seconds: dict[str, float] = field(default_factory=dict)  # what is known already

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Measure a step; a step that is taken twice is added up."""
        start = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, eq=False)
class Adaptation:
    """Result of an adaptation."""

    run: SavedRun  # what is kept
    task: TaskData  # the data, as they were used
    preflight: Preflight  # the check of the network
    predictions: Predictions  # for the test samples
    scores: tuple[Comparison, ...]  # those of the fit and of what it is compared with
    stages: Stages  # time of each step
    quick: str = ""  # what a quick run has taken of the data, in a sentence; empty for another run
    whole: bool = True  # whether that is all


@dataclass(frozen=True, eq=False)
class Started:
    """What an adaptation starts from."""

    whole: TaskData  # all samples that there are
    task: TaskData  # those that are taken
    network: nn.Module  # the network as it was trained, with a linear layer at its end
    origin: Origin  # where it came from
    device: torch.device  # where it is
    stages: Stages  # time of each step

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Training inputs and answers, where the network is."""
        x, y = self.task.tensors("train")
        return x.to(self.device), y.to(self.device)


def adapt(options: AdaptOptions, out: Path, keep: Keep) -> Adaptation:
    """Adapt a network, or the best of several: load, check, fit, evaluate, compare."""
    # The kernel is written while it grows, so that an interrupted run can continue, and the fit by `keep`
    # before it is evaluated.
    found = []
    for each in each_network(options):
        begun = started(each)
        found.append((begun, *fitted(each, begun, asked(each), out)))
        if "network" in found[-1][1].fit.record.reasons:  # an interrupted run has chosen this one
            found = found[-1:]
            break
    if len(found) == 1:
        return finished(options, *found[0], out, keep)
    fits = [run.fit for _, run, _ in found if isinstance(run.fit, NestedFit)]  # each is: adapt's own
    fit = best_of(fits, [run.network for _, run, _ in found])
    seconds = sum((Counter(begun.stages.seconds) for begun, _, _ in found), Counter[str]())
    begun, run, report = next(one for one in found if one[1].fit is fit)
    return finished(options, replace(begun, stages=Stages(dict(seconds))), run, report, out, keep)


def adapted(options: AdaptOptions, begun: Started, out: Path, keep: Keep) -> Adaptation:
    """Check, fit, evaluate and compare what has been loaded."""
    return finished(options, begun, *fitted(options, begun, asked(options), out), out, keep)


def each_network(options: AdaptOptions) -> list[AdaptOptions]:
    """The options for each network that is named, or for the one that a table has without."""
    if options.model == []:
        raise InputError("model is an empty list", "one network or more", "name them, or leave model out")
    each = [replace(options, model=one) for one in listed(options.model)] or [options]
    for name in ("weights", "model_args") if len(each) > 1 else ():
        if getattr(options, name):
            raise InputError(
                f"{name}= with several networks",
                expected="networks that their names alone describe",
                remedy="build each with its weights in a factory of your own, as FILE:FACTORY",
            )
    return each


def finished(
    options: AdaptOptions, begun: Started, run: SavedRun, report: Preflight, out: Path, keep: Keep
) -> Adaptation:
    """Keep what has been fitted, train its lower layers where that is asked for, evaluate and compare."""
    leave()
    keep(run)
    if options.tune and isinstance(run.fit, NestedFit) and not run.fit.rungs:  # else it was, before a stop
        with begun.stages.measure("training of the lower layers"):
            folder = out / TRAINING / str(world()[0])  # each process has its own
            run = replace(run, fit=tuned(run.fit, options.seed, folder=folder))
        keep(run)
    shutil.rmtree(out / TRAINING, ignore_errors=True)
    return evaluated(run, begun, report, options)


def asked(options: AdaptOptions) -> Shares:
    """The shares and the ridge that are given."""
    integer("finetune_steps", options.finetune_steps)
    ridge = None if options.ridge == "auto" else options.ridge
    weight, earlier = (
        None if isinstance(value, str) else value for value in (options.weight, options.earlier)
    )
    return requested(weight, earlier, ridge, options.tune)


def started(options: TaskOptions, draw: Callable[[TaskData], TaskData] | None = None) -> Started:
    """The data and the network as it was trained."""
    stages, device = Stages(), find_device(options.device)
    if isinstance(options, AdaptOptions):
        asked(options)
    with stages.measure("reading the data"), waiting("reading the data"):
        whole = read_task(options)
        task = draw(whole) if draw else drawn(whole, options.shots, options.tests, options.seed)
        check_images(task)
        task.require_memory(options.memory)
        _ = task.train.x
    with stages.measure("building the network"), waiting("building the network"):
        torch.manual_seed(options.seed)  # factories without weights start at random
        spec, arguments = named_network(options, task)
        old = load_model(spec, options.weights, arguments).to(device)
        task = normalized(task, old, options.mean == "auto")
        network = ending(old, task, task.tensors("train")[0][:4].to(device), options.output)
        appended = network.width if isinstance(network, Appended) else None
        weights = None if options.weights is None else str(options.weights.resolve())
        origin = Origin(absolute_spec(spec), arguments, weights, None, appended, options.output)
        return Started(whole, task, network, origin, device, stages)


def named_network(options: NetworkOptions, task: TaskData) -> tuple[str, dict[str, Any]]:
    """The network by name and arguments; where none is given, the random features that a table has."""
    if options.model is not None:
        return options.model, dict(options.model_args or {})
    if task.table is None:
        raise InputError(
            "--model must be given",
            expected="a trained network, which only a table can do without",
            remedy="name one, such as --model timm:resnet18 or --model net.py:make_network",
        )
    return "random:features", {"inputs": len(task.table.labels)}


def ending(model: nn.Module, task: TaskData, x: Tensor, output: str | None = None) -> nn.Module:
    """The network, or with a linear layer behind it where it returns features."""
    try:
        return ending_linear(model, x, output)
    except ModelError as error:
        size, said = own_size(model) or (0, "")
        if size and task.image_mode and tuple(x.shape[-2:]) != (size, size):
            expected = f"images of {size} x {size} pixels, at which it was trained, as {said} says"
            raise ModelError(error.what, expected, f"scale them to that (--size {size})") from error
        if OWN_SHAPE not in (error.expected or ""):
            raise
        told, expected = task.layout()
        remedy = error.remedy if task.image_mode else "change the data, or build the network for them"
        raise ModelError(f"{error.what}; {told}", expected, remedy) from error


def drawn(task: TaskData, shots: int | None, tests: int | None, seed: int, at_most: bool = False) -> TaskData:
    """The samples requested by number; with ``at_most`` a class may have fewer than ``shots``."""
    if shots is not None and task.classes is not None:
        task = task.shots(shots, seed, at_most)
    elif shots is not None:
        task = task.subset("train", _some(len(task.train), shots, seed, "shots"))
    if tests is not None and tests < len(task.test):
        task = task.subset("test", _some(len(task.test), tests, seed, "tests"))
    return task


def _some(samples: int, count: int, seed: int, option: str) -> Array:
    """Positions of samples drawn at random, in order."""
    integer(option, count, remedy=f"leave {option}= out to take all")
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    return np.sort(order[:count].numpy())


def checked_features(options: NetworkOptions, network: nn.Module, x: Tensor) -> tuple[RandomHeads, Preflight]:
    """The features of a network and its lower layers, with the preflight of both."""
    module = RandomHeads(network, HEADS, options.seed, selected_inside(network, options.params))
    require_chosen(module, options.params, asked(options) if isinstance(options, AdaptOptions) else FREE)
    report = preflight(module.model, x, params=tuple(module.function.names), memory=options.memory)
    if options.params is None:  # what is left to the head is no choice of the user
        report = replace(report, findings=tuple(one for one in report.findings if LEFT_OUT not in one))
    return module, report


def require_linearizable(report: Preflight) -> None:
    """Raise what the preflight of a network found."""
    if not report.ok:
        raise ModelError(
            f"the network cannot be linearized: {report.findings[0]}",
            expected="a network whose outputs for a sample depend on that sample alone, the same every time",
            remedy="linnet check shows the whole preflight",
        )


def fitted(options: TaskOptions, begun: Started, given: Shares, out: Path) -> tuple[SavedRun, Preflight]:
    """The linear probe and the lower layers in one solve, or the one that an interrupted run has kept."""
    task, stages, (x, y) = begun.task, begun.stages, begun.tensors()
    with stages.measure("preflight"), waiting("preflight"):
        module, report = checked_features(options, begun.network, x[:4])
    require_linearizable(report)
    report = replace(report, findings=("the old head is replaced by a new one", *report.findings))
    known = interrupted_run(out, options.device, options.memory)
    if known is not None and known.origin.spec == begun.origin.spec and _is_of(known, task, x):
        return known, report
    targets = make_targets(y, outputs_of(task), dtype=module.function.dtype)
    remarks = (*single_remarks(targets), *data_remarks(x, targets))
    record = Choices("dual", "loo", {}, remarks, classes=task.classes or ())
    file = out / KERNEL_FILE
    discard(file)  # a finished one is of a run that was killed, and may be of other settings
    with stages.measure("fit"), shared_fit(options.device, network=module.function, x=x, y=y):
        fit = solved(module, x, targets, options.memory, record, given, file)
    discard(file)
    origin = replace(begun.origin, heads=(module.heads, module.seed))
    transforms, test = (task.transform, task.targets), _test_source(options, begun)
    run = SavedRun(origin, fit, task.samples("train"), task.classes, transforms, test)
    held = run.fingerprints(task.test.x, task.test.y if run.measured else None)
    return replace(run, held=tuple(held)), report


def _is_of(known: SavedRun, task: TaskData, x: Tensor) -> bool:
    """Whether a run is of these very training samples: names, inputs and answers."""
    there, here = known.samples, task.samples("train")
    inputs = known.fit.x
    return (
        there.ids == here.ids
        and np.array_equal(np.asarray(there.labels), np.asarray(here.labels))
        and inputs.shape == x.shape
        and torch.equal(inputs.to(x), x)
    )


def outputs_of(task: TaskData) -> int:
    """Classes, or values of a regression."""
    return len(task.classes) if task.classes is not None else task.train.y.shape[1]


def _test_source(options: TaskOptions, begun: Started) -> TestSource:
    """Where the test samples can be read again."""
    task, positions = begun.task, None
    if len(task.test) < len(begun.whole.test):
        places = {name: place for place, name in enumerate(begun.whole.test.ids)}
        positions = tuple(places[name] for name in task.test.ids)
    return TestSource(
        str(options.data.resolve()), options.seed, options.target, task.table, positions, test_digest(task),
        options.damaged,
    )  # fmt: skip


# Scores


def evaluated(
    run: SavedRun,
    begun: Started,
    report: Preflight,
    options: AdaptOptions,
    predictions: Predictions | None = None,
) -> Adaptation:
    """The fit and what it is compared with, on the test samples."""
    step, stages, task = "evaluation on the test samples", begun.stages, begun.task
    with stages.measure(step), waiting(step):
        found = predictions or run.predict(task.test.x)
        task = replace(task, findings=(*task.findings, *trained_on(task)))
    every = [own_score(run, found, task.test.y)]
    if name_of(run.fit) != PROBE:
        with stages.measure(PROBE), waiting(PROBE):
            every.append(_probe(begun))
    if options.compare == "finetune":
        with stages.measure("plain fine-tuning"):
            every.append(_fine_tuned(begun, options))
    return Adaptation(run, task, report, found, tuple(every), stages)


def trained_on(task: TaskData) -> list[str]:
    """A finding when test samples are training samples too, byte by byte."""
    known = set(hash_examples(torch.from_numpy(task.train.x)))
    if len(known) <= len(task.train) / 2:  # as rows of few categories, which come again in any sample
        return []
    count = sum(one in known for one in hash_examples(torch.from_numpy(task.test.x)))
    told = f"{count} of {len(task.test)} test samples are training samples too, exactly"
    if task.table is not None:
        told = f"{count} of {len(task.test)} test lines equal training lines in all columns that are used"
        told += ", where they may be the same cases"
    return [f"{told}: the scores say too little of new ones"] if count else []


def own_score(run: SavedRun, found: Predictions, truth: Array) -> Comparison:
    """The scores of a fit on the test samples."""
    fit = run.fit
    note = "" if run.classes is None else f"{fit.solver} solver, ridge {number(fit.ridge)}"
    return scored(name_of(fit), found, truth, sum(fit.record.seconds.values()), note)


def _probe(begun: Started) -> Comparison:
    """The scores of the linear probe on the test samples."""
    start, (x, y) = time.perf_counter(), begun.tensors()
    model = with_head(begun.network, outputs_of(begun.task), data=(x, y))
    outputs, temperature = _outputs(model, begun), None
    if begun.task.classes is not None:
        temperature = fit_temperature(held_out_probe(begun.network, (x, y), len(begun.task.classes)), y)
    found = _plain_predictions(begun.task, outputs, temperature)
    note = "ridge regression on the last features"
    return scored(PROBE, found, begun.task.test.y, time.perf_counter() - start, note)


def _fine_tuned(begun: Started, options: AdaptOptions) -> Comparison:
    """The scores of plain fine-tuning from the linear probe, on the test samples."""
    start, data = time.perf_counter(), begun.tensors()
    model = with_head(begun.network, outputs_of(begun.task), Probe(scale=HEAD_SCALE), data=data)
    best = fine_tune(model, data, options.finetune_steps, seed=options.seed, optimizer="adam")
    seconds = time.perf_counter() - start
    rate = f"{best.learning_rate:g}, the best of {len(best.held_out)} rates on held-out samples"
    outputs = best.predict(begun.task.tensors("test")[0].to(begun.device))
    found = _plain_predictions(begun.task, outputs, 1.0 if begun.task.classes is not None else None)
    note = f"Adam, {best.steps} steps at {rate}"
    return scored("plain fine-tuning", found, begun.task.test.y, seconds, note)


def _plain_predictions(task: TaskData, outputs: Tensor, temperature: float | None) -> Predictions:
    """Outputs of a network as predictions, without standard deviations."""
    if temperature is None:
        outputs = task.targets.inverse(outputs) if task.targets else outputs
    mean = outputs.double().cpu()
    probs = None if temperature is None else probabilities(mean, None, temperature).numpy()
    return Predictions(mean.numpy(), None, probs)


@torch.no_grad()
def _outputs(model: nn.Module, begun: Started) -> Tensor:
    """Outputs of a network for the test samples, batch by batch."""
    function, x = Functional(model), begun.task.tensors("test")[0].to(begun.device)
    return in_parts(function.model, partial(function.flat, function.theta), x, 128)


def seconds_each(work: Callable[[Tensor], object], x: Tensor) -> float:
    """Seconds for each sample, without what the first call alone takes."""
    work(x[:1])
    found: list[float] = []
    while len(found) < 3 and sum(found) < AGAIN:
        start = time.perf_counter()
        work(x)
        found.append(time.perf_counter() - start)
    return min(found) / len(x)


# A first answer: a linear probe of all samples, then the lower layers on as many as half a minute allows.


def first_answer(
    options: AdaptOptions, out: Path, keep: Keep, tell: Callable[[str], None] = print
) -> Adaptation:
    """Adapt a network as ``linnet.app.runs.adaptation.adapt`` does, with what takes half a minute."""
    # What is kept is the linear probe of all samples, or the fit with the lower layers where the time allows
    # all of them. Where something is asked for that a probe is not, samples are left out.
    options, *others = each_network(options)
    if others:
        raise InputError("quick=True with several networks", "one network", "leave quick= out, or name one")
    begun = started(options, lambda task: _bounded(options, task))
    x = begun.tensors()[0][:FEW]
    features, given = checked_features(options, begun.network, x)[0], asked(options)
    tries = tries_derivatives(features, given, x, begun.task.classes is not None)
    if tries and given.weight is None and not options.tune:
        return _probed(options, begun, out, keep, tell)
    each = seconds_each(features.kernel if tries or options.tune else features.staged, x)
    shots, tests = _shots(begun.task, QUICK / 2 / each), int(QUICK / 2 / each / TESTED)
    return _part(options, begun, (shots, tests), out, keep)


def _probed(
    options: AdaptOptions, begun: Started, out: Path, keep: Keep, tell: Callable[[str], None]
) -> Adaptation:
    """The linear probe of all samples, and what the lower layers would add on some of them."""
    task, stages, every = begun.task, begun.stages, begun.whole
    run, report = fitted(options, begun, Shares(0.0, None, asked(options).ridge), out)
    fit = run.fit
    assert isinstance(fit, NestedFit)
    with stages.measure("linear probe on the test samples"):
        found = run.predict(task.test.x)
    own = own_score(run, found, task.test.y)
    page = Content("", task.classes, scores=(own,))
    told, seconds = score_in_words(page, own), duration(sum(stages.seconds.values()))
    tell(f"linear probe of {taken(every, task, tests=False)}: {told} ({seconds})")
    each = seconds_each(fit.module.kernel, begun.tensors()[0][:FEW])
    shots = _shots(task, QUICK / each)
    if shots >= _counts(task).max():
        return _part(options, begun, (shots, int(QUICK / each / TESTED)), out, keep)
    part = replace(begun, task=drawn(task, shots, None, options.seed, at_most=True))
    x, y = part.tensors()
    with stages.measure("lower layers on some samples"):
        targets = make_targets(y, fit.system.c, dtype=fit.module.function.dtype)
        trial = solved(fit.module, x, targets, options.memory, Choices("dual", "loo", {}, ()))
    some = taken(every, part.task, tests=False)
    reasons = {"body": "a quick run keeps the linear probe"}
    verdict = str(trial.verdict).removeprefix("Kept the linear probe: ")
    tried = f"{TRY}: on" if not trial.is_probe and SAME not in verdict else "On"
    reasons["verdict"] = f"{tried} {some} {verdict[:1].lower()}{verdict[1:]}"
    fit.record = replace(fit.record, reasons={**fit.record.reasons, **reasons})
    keep(run)
    made = evaluated(run, begun, report, options, predictions=found)
    return replace(made, quick=f"Quick run, the linear probe alone: {taken(every, task)}.", whole=False)


def _part(options: AdaptOptions, begun: Started, most: tuple[int, int], out: Path, keep: Keep) -> Adaptation:
    """The fit that was asked for, of some samples; what was asked for by number is kept."""
    task, every = begun.task, begun.whole
    shots = most[0] if options.shots is None and most[0] < _counts(task).max() else None
    tests = max(LEAST, most[1]) if options.tests is None else None
    task = drawn(task, shots, tests, options.seed, at_most=True)
    found = adapted(options, replace(begun, task=task), out, keep)
    is_whole = len(task.train) == len(every.train) and len(task.test) == len(every.test)
    return replace(found, quick=f"Quick run: {taken(every, task)}.", whole=is_whole)


def _bounded(options: AdaptOptions, task: TaskData) -> TaskData:
    """The samples that are asked for, or as many as a probe of seconds takes."""
    shots, tests, at_most = options.shots, options.tests, False
    if shots is None and len(task.train) > MOST:
        shots, at_most = max(_most_shots(_counts(task), MOST), 1), True
    return drawn(task, shots, MOST if tests is None else tests, options.seed, at_most)


def _shots(task: TaskData, room: float) -> int:
    """The training samples of each class, or of a regression, that a number in all allows; five at least."""
    return max(VALUES if task.classes is None else SHOTS, _most_shots(_counts(task), int(room)))


def taken(every: TaskData, part: TaskData, tests: bool = True) -> str:
    """What was taken of the data."""
    noun, own, counts = "images" if every.image_mode else "samples", _counts(part), _counts(every)
    if len(part.train) == len(every.train):
        told = f"all {number(len(every.train))} training {noun}"
    elif len(own) > 1 and own.min() == own.max() and counts.min() == counts.max():
        told = f"{own[0]} of {counts[0]} training {noun} per class"
    else:
        most = f", at most {own.max()} per class" if len(own) > 1 else ""
        told = f"{number(len(part.train))} of {number(len(every.train))} training {noun}{most}"
    if not tests:
        return told
    share = "all" if len(part.test) == len(every.test) else f"{number(len(part.test))} of"
    return f"{told}, {share} {number(len(every.test))} test {noun}"


def _counts(task: TaskData) -> Array:
    """Training samples of each class, or of all values."""
    return np.array([len(task.train)]) if task.classes is None else np.bincount(task.train.y)


def _most_shots(counts: Array, room: int) -> int:
    """The most samples of each class, or all of a smaller one, that are not more than ``room`` together."""
    every = range(int(counts.max()) + 1)
    return bisect(every, room, key=lambda shots: int(np.minimum(counts, shots).sum())) - 1


# The preflight of a network and data, and what a fit will cost


def check_task(options: TaskOptions, batch: int) -> tuple[dict[str, Any], list[str]]:
    """Check a network on a few samples, and every file of the data by its header: as values, and in lines."""
    integer("batch", batch)
    device, task = find_device(options.device), read_task(options)
    check_images(task)
    sample = task.subset("train", range(min(batch, len(task.train))))
    if options.size is not None:  # of what a few samples take in their own size, the preflight tells
        replace(sample, test=sample.train).require_memory(options.memory)  # only these are decoded
    spec, arguments = named_network(options, task)
    old = load_model(spec, options.weights, arguments).to(device)
    sample = normalized(sample, old, options.mean == "auto")
    x = sample.tensors("train")[0].to(device)
    network = ending(old, task, x, options.output)
    module, report = checked_features(options, network, x)
    own = Functional(network).output_shape(x).numel()
    headless = isinstance(network, Appended) and network.width is not None
    taken = "it is given a head" if headless else f"its head of {own} outputs is replaced by a new one"
    note = f"{taken}, as linnet adapt does"
    # with too large a plan the finding says so; nothing could be computed
    fits = report.ok and report.memory.peak <= report.memory.budget
    report = replace(report, ok=fits, findings=(*report.findings, note))
    # passes through the network, which grow with the samples, and decompositions, with their cube; the
    # products of pairs of samples are left out
    tries = fits and tries_derivatives(module, FREE, x, task.classes is not None)
    work = module.kernel if tries else module.staged
    each = seconds_each(work, x) if fits else 0.0
    known = None
    if fits:
        solving = _solving_seconds(len(task.train), tries, device)
        known = {"fit": each * len(task.train) + solving, "test": TESTED * each * len(task.test)}
    data = {
        "train": len(task.train), "test": len(task.test), "findings": list(sample.findings),
        "classes": None if task.classes is None else list(task.classes),
    }  # fmt: skip
    result = {**report.to_dict(), "ok": report.ok, "data": data, "seconds": known}
    return result, _in_lines(report, task, sample.findings, known)


def _solving_seconds(n: int, tries: bool, device: torch.device) -> float:
    """Seconds of the eigendecompositions of a fit: of its kernel, and of a pilot's at each share tried."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(TIMED, TIMED, dtype=torch.float64, generator=generator).to(device)
    matrix = matrix + matrix.T
    each = seconds_each(lambda rows: torch.linalg.eigh(matrix)[1].sum().item(), matrix[:1]) / TIMED**3
    return each * (n**3 + tries * len(WEIGHTS) * min(n, PILOT) ** 3)


def _in_lines(
    report: Preflight, task: TaskData, findings: Sequence[str], seconds: dict[str, float] | None
) -> list[str]:
    """For people: the answer, what to look at, and the time; all else with --verbose."""
    kinds = "" if task.classes is None else f" of {len(task.classes)} classes"
    noun = "images" if task.image_mode else "samples"
    lines = ["ready: linnet adapt takes this network and these data" if report.ok else "NOT ready:"]
    lines += [f"  {one}" for one in (() if report.ok else report.findings)]
    lines += [f"data: {finding}" for finding in findings]
    lines.append(f"data: {len(task.train)} training and {len(task.test)} test {noun}{kinds}")
    if seconds is not None:
        fit, tests = duration(seconds["fit"]), duration(seconds["test"])
        lines.append(
            f"linnet adapt: about {fit} for the fit, {tests} for the test {noun} with their variances"
        )
    lines += [f"note: {one}" for one in (report.findings if report.ok else ())]
    if not is_verbose():
        total = f"{len(report.parameters)} parameters, {report.total:,} weights"
        return [*lines, f"{total}; --verbose lists them"]
    return [*lines, "", *str(report).splitlines()]
