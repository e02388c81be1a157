"""Adapts a trained network to a task as ``linnet.adapt`` does, and scores the fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from linnet.app.data import TaskData, read_task
from linnet.app.models import load_model
from linnet.app.options import AdaptOptions, NetworkOptions, TaskOptions
from linnet.app.runs.folder import (
    Origin,
    SavedRun,
    TestSource,
    TrainingSamples,
    interrupted_run,
    test_digest,
)
from linnet.app.runs.normalization import normalized
from linnet.app.runs.place import KERNEL_FILE, check_out, made_folder
from linnet.app.runs.ranks import leave, shared_fit
from linnet.app.runs.trust import absolute_spec
from linnet.errors import InputError, ModelError
from linnet.fitting.arguments import Choices
from linnet.fitting.descent import fine_tune, held_out_probe
from linnet.fitting.head import Probe, with_head
from linnet.fitting.last_layer import Appended, ending_linear, selected_inside
from linnet.fitting.remarks import single_remarks
from linnet.linear.targets import make_targets
from linnet.machine import find_device
from linnet.nested.adapt import HEADS, requested
from linnet.nested.features import RandomHeads
from linnet.nested.nested_fit import NestedFit, solved
from linnet.nested.tuning import HEAD_SCALE, tuned
from linnet.params import integer
from linnet.predictive.noise import fit_temperature, probabilities
from linnet.progress import waiting
from linnet.report.numbers import number
from linnet.report.reading import (
    PROBE,
    Predictions,
    name_of,
    predict,
    reliability,
    score_classes,
    score_values,
    temperatures_of,
)
from linnet.report.records import Comparison, Reliability, Scores
from linnet.tangent.batch import hash_examples, split
from linnet.tangent.functional import OWN_SHAPE, Functional
from linnet.tangent.preflight import LEFT_OUT, Preflight, preflight
from linnet.tangent.store import discard

Array = np.ndarray[Any, Any]
Keep = Callable[[SavedRun], None]
ALL = "leave it out to take all"
TESTED = 2  # passes of a test sample for one of a training sample: the kernel with them, and its own variance
AGAIN = 1.0  # seconds of a few samples below which they are timed again: another process may have been busy


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
    scores: Scores  # those of the fit and of what it is compared with
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


def adapt(options: AdaptOptions, out: Path, keep: Keep | None = None) -> Adaptation:
    """Adapt a network: load, check, fit, evaluate, compare."""
    # The kernel is written while it grows, so that an interrupted run can continue, and the fit by `keep`
    # before it is evaluated.
    check_out(out)
    with made_folder(out):
        return adapted(options, started(options), out, keep)


def adapted(options: AdaptOptions, begun: Started, out: Path, keep: Keep | None = None) -> Adaptation:
    """Check, fit, evaluate and compare what has been loaded."""
    weight, ridge = asked(options)
    run, report = fitted(options, begun, (weight, ridge), out)
    leave()
    if keep:
        keep(run)
    if options.tune:
        run = _tuned(run, options, begun.stages, keep)
    return evaluated(run, begun, report, options)


def asked(options: AdaptOptions) -> tuple[float | None, float | None]:
    """The weight and the ridge that are given."""
    integer("finetune_steps", options.finetune_steps)
    weight, ridge = (None if value == "auto" else value for value in (options.weight, options.ridge))
    assert not isinstance(weight, str)
    return requested(weight, ridge, options.tune)


def started(options: TaskOptions, draw: Callable[[TaskData], TaskData] | None = None) -> Started:
    """The data and the network as it was trained."""
    stages, device = Stages(), find_device(options.device)
    integer("seed", options.seed, least=0, most=2**63 - 1)
    if isinstance(options, AdaptOptions):
        asked(options)
    with stages.measure("reading the data"), waiting("reading the data"):
        whole = read_task(options)
        task = draw(whole) if draw else drawn(whole, options.shots, options.tests, options.seed)
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
    if count < 1:
        raise InputError(f"{option} is {count}", expected="a positive number of samples", remedy=ALL)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    return np.sort(order[:count].numpy())


def checked_features(options: NetworkOptions, network: nn.Module, x: Tensor) -> tuple[RandomHeads, Preflight]:
    """The features of a network and its lower layers, with the preflight of both."""
    module = RandomHeads(network, HEADS, options.seed, selected_inside(network, options.params))
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


def fitted(
    options: TaskOptions, begun: Started, given: tuple[float | None, float | None], out: Path
) -> tuple[SavedRun, Preflight]:
    """The linear probe and the lower layers in one solve, or the one that an interrupted run has kept."""
    task, stages, (x, y) = begun.task, begun.stages, begun.tensors()
    with stages.measure("preflight"), waiting("preflight"):
        module, report = checked_features(options, begun.network, x[:4])
    require_linearizable(report)
    report = replace(report, findings=("the old head is replaced by a new one", *report.findings))
    known = interrupted_run(out, options.device, options.memory)
    if known is not None and known.samples.ids == task.train.ids:
        return known, report
    targets = make_targets(y, outputs_of(task), dtype=module.function.dtype)
    record = Choices("dual", "loo", {}, single_remarks(targets), classes=task.classes or ())
    file = out / KERNEL_FILE
    discard(file)  # a finished one is of a run that was killed, and may be of other settings
    with stages.measure("fit"), shared_fit(options.device, network=module.function, x=x, y=y):
        fit = solved(module, x, targets, options.memory, record, given, file)
    discard(file)
    origin = replace(begun.origin, heads=(module.heads, module.seed))
    temperatures = None if task.classes is None else temperatures_of(fit)
    samples = TrainingSamples.of(task)
    return SavedRun(
        origin, fit, samples, task.classes, (task.transform, task.targets), _test_source(options, begun),
        temperatures,
    ), report  # fmt: skip


def outputs_of(task: TaskData) -> int:
    """Classes, or values of a regression."""
    return len(task.classes) if task.classes is not None else task.train.y.shape[1]


def _tuned(run: SavedRun, options: AdaptOptions, stages: Stages, keep: Keep | None) -> SavedRun:
    """The run with trained lower layers where that is better, unless an interrupted run has come so far."""
    fit = run.fit
    if not isinstance(fit, NestedFit) or fit.rungs:
        return run
    with stages.measure("training of the lower layers"):
        made = tuned(fit, options.seed)
    run = replace(run, fit=made, temperatures=None if run.classes is None else temperatures_of(made))
    if keep:
        keep(run)
    return run


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


def predict_test(run: SavedRun, task: TaskData) -> Predictions:
    """Predictions for the test samples."""
    x = task.tensors("test")[0].to(run.fit.module.function.device)
    return predict(run.fit, x, run.transforms[1], run.temperatures)


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
        found = predictions or predict_test(run, task)
        task = replace(task, findings=(*task.findings, *trained_on(task)))
    every = [own_score(run, task, found)]
    if name_of(run.fit) != PROBE:
        with stages.measure(PROBE), waiting(PROBE):
            every.append(_probe_score(begun))
    if options.compare == "finetune":
        with stages.measure("plain fine-tuning"):
            every.append(_fine_tuned_score(begun, options))
    scores = Scores(
        tuple(one.row for one in every),
        tuple(one.reliability for one in every if one.reliability is not None),
        len(task.test),
        {one.row.name: one.squares for one in every if one.squares is not None},
    )
    return Adaptation(run, task, report, found, scores, stages)


def trained_on(task: TaskData) -> list[str]:
    """A finding when test samples are training samples too, byte by byte."""
    known = set(hash_examples(torch.from_numpy(task.train.x)))
    if len(known) <= len(task.train) / 2:  # as rows of few categories, which come again in any sample
        return []
    count = sum(one in known for one in hash_examples(torch.from_numpy(task.test.x)))
    told = f"{count} of {len(task.test)} test samples are training samples too, exactly"
    return [f"{told}: the scores say too little of new ones"] if count else []


class Scored(NamedTuple):
    """The scores of a method, and what they are of: right answers, or squared errors."""

    row: Comparison
    reliability: Reliability | None = None
    squares: Array | None = None


def own_score(run: SavedRun, task: TaskData, found: Predictions) -> Scored:
    """Scores of a fit on the test samples."""
    name, seconds, truth = name_of(run.fit), sum(run.fit.record.seconds.values()), task.test.y
    if found.probs is None:
        row = score_values(name, found.mean, truth, found.std, seconds)
        return Scored(row, None, _squared(found.mean, truth))
    note = f"{run.fit.solver} solver, ridge {number(run.fit.ridge)}"
    row = score_classes(name, found.probs, truth, seconds, note)
    return Scored(row, reliability(name, found.probs, truth))


def _probe_score(begun: Started) -> Scored:
    """The linear probe, on the test samples."""
    start, (x, y) = time.perf_counter(), begun.tensors()
    model = with_head(begun.network, outputs_of(begun.task), data=(x, y))
    outputs, temperature = _outputs(model, begun), None
    if begun.task.classes is not None:
        temperature = fit_temperature(held_out_probe(begun.network, (x, y), len(begun.task.classes)), y)
    note = "ridge regression on the last features"
    return _score(PROBE, begun.task, outputs, temperature, (time.perf_counter() - start, note))


def _fine_tuned_score(begun: Started, options: AdaptOptions) -> Scored:
    """Plain fine-tuning from the linear probe, on the test samples."""
    start, data = time.perf_counter(), begun.tensors()
    model = with_head(begun.network, outputs_of(begun.task), Probe(scale=HEAD_SCALE), data=data)
    best = fine_tune(model, data, options.finetune_steps, seed=options.seed, optimizer="adam")
    seconds = time.perf_counter() - start
    tried = len(best.held_out)
    rate = f"{best.learning_rate:g}, the best of {tried} rates on held-out samples"
    outputs = best.predict(begun.task.tensors("test")[0].to(begun.device))
    temperature = 1.0 if begun.task.classes is not None else None
    note = f"Adam, {best.steps} steps at {rate}"
    return _score("plain fine-tuning", begun.task, outputs, temperature, (seconds, note))


def _score(
    name: str, task: TaskData, outputs: Tensor, temperature: float | None, about: tuple[float, str]
) -> Scored:
    """Scores of some outputs; with the seconds and the note of the method."""
    truth, (seconds, note) = task.test.y, about
    if temperature is None:
        values = task.targets.inverse(outputs) if task.targets else outputs
        mean = values.double().cpu().numpy()
        return Scored(score_values(name, mean, truth, None, seconds, note), None, _squared(mean, truth))
    probs = probabilities(outputs.double(), None, temperature).cpu().numpy()
    return Scored(score_classes(name, probs, truth, seconds, note), reliability(name, probs, truth))


def _squared(mean: Array, truth: Array) -> Array:
    """Squared errors of values, (N,)."""
    found: Array = ((mean - truth) ** 2).reshape(len(truth), -1).mean(1)
    return found


@torch.no_grad()
def _outputs(model: nn.Module, begun: Started) -> Tensor:
    """Outputs of a network for the test samples, batch by batch."""
    function, x = Functional(model), begun.task.tensors("test")[0].to(begun.device)
    return torch.cat([function.flat(function.theta, part) for part in split(x, 128)])


def seconds_each(work: Callable[[Tensor], object], x: Tensor) -> float:
    """Seconds for each sample, without what the first call alone takes."""
    work(x[:1])
    found: list[float] = []
    while len(found) < 3 and sum(found) < AGAIN:
        start = time.perf_counter()
        work(x)
        found.append(time.perf_counter() - start)
    return min(found) / len(x)
