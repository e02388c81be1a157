"""Adapts a trained network to a few samples, scores the fit and writes a run folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from linnet.app.data import TaskData, load_data
from linnet.app.models import load_model
from linnet.app.runs.folder import (
    Origin,
    SavedRun,
    TestSource,
    TrainingSamples,
    interrupted_run,
    test_digest,
)
from linnet.app.runs.metrics import choose_metric, in_metric
from linnet.app.runs.normalization import normalized
from linnet.app.runs.place import KERNEL_FILE, check_out, made_folder
from linnet.app.runs.ranks import leave, shared_fit
from linnet.app.runs.settings import Network, Settings, Solving, Source
from linnet.app.runs.solving import solve
from linnet.app.runs.stages import Stages
from linnet.app.runs.trust import absolute_spec
from linnet.errors import InputError, ModelError
from linnet.fitting.centered import CenteredLinear, with_centered_head
from linnet.fitting.comparisons import fine_tune, held_out_probe
from linnet.fitting.head import Probe, with_head
from linnet.fitting.last_layer import RECORD, Appended, ending_linear, features, last_linear, selected_inside
from linnet.fitting.metric import MetricNetwork
from linnet.fitting.record import Record
from linnet.fitting.remarks import single_remarks
from linnet.linear.targets import make_targets
from linnet.nested.adapt import HEADS
from linnet.nested.features import Features
from linnet.nested.nested_fit import NestedFit, solved
from linnet.nested.tuning import HEAD_SCALE, tuned
from linnet.predictive.temperature import fit_temperature, probabilities
from linnet.progress import waiting
from linnet.report import Comparison, Reliability, Scores
from linnet.report.evaluation import Predictions, predict, reliability, score_classes, score_values
from linnet.report.kinds import PROBE, cross_fitted, loss_of, name_of, temperatures_of
from linnet.report.wording import number
from linnet.spectrum.kernel_matrix import gram_part
from linnet.tangent.batch import hash_examples, split
from linnet.tangent.functional import OWN_SHAPE, Functional
from linnet.tangent.linearized import Linearized, linearize
from linnet.tangent.preflight import LEFT_OUT, Preflight, preflight
from linnet.tangent.selection import owner
from linnet.tangent.store import discard

Array = np.ndarray[Any, Any]
ALL = "leave it out to take all"
PROBED = (
    "The derivatives of the lower layers are taken at a linear probe that was fitted on the same labels: "
    "leave-one-out, influence and forgetting are exact for the fit, but do not undo a sample's effect on "
    "that probe."
)


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

    task: TaskData  # the data
    network: nn.Module  # the network as it was trained
    data: tuple[Tensor, Tensor]  # training inputs and answers, where the network is
    stages: Stages  # time of each step


def adapt(settings: Settings, out: Path, keep: Callable[[SavedRun], None] | None = None) -> Adaptation:
    """Adapt a network: load, check, put on a head, fit, evaluate, compare."""
    # The kernel is written while it grows, so that an interrupted run can continue, and the fit by `keep`
    # before it is evaluated.
    check_out(out)
    with made_folder(out):
        return adapted(settings, started(settings), out, keep)


def adapted(
    settings: Settings, begun: Started, out: Path, keep: Callable[[SavedRun], None] | None = None
) -> Adaptation:
    """Check, put on a head, fit, evaluate and compare what has been loaded."""
    stages, network, task, old = begun.stages, settings.network, begun.task, begun.network
    x, y = begun.data
    if nests(settings, task, old, x):
        run, report = nested_run(settings, begun, out)
        leave()
        if keep:
            keep(run)
        if settings.solving.tune:
            run = _tuned(run, settings, stages, keep)
        return evaluated(run, begun, report, Others(settings, task, old, old))
    made = _linearized(settings, begun)
    lin, probe, head, solving = made.lin, made.probe, made.head, made.solving
    with stages.measure("fit"), shared_fit(solving.device, network=lin, x=x, y=y):
        fit, pilot = solve(lin, (x, y), solving, out / KERNEL_FILE)
    leave()
    fit.record = replace(fit.record, classes=task.classes or ())
    fit.record.reasons["metric"] = made.why
    fit.record.reasons["head"] = _why_head(network, made.init, made.centered)
    temperatures = None if task.classes is None else temperatures_of(pilot or fit)
    if made.centered and not cross_fitted(fit):
        fit.record = replace(fit.record, warnings=(*fit.record.warnings, PROBED))
    origin = replace(_origin(network, old, head, made.centered, lin.model), init=made.init)
    run = SavedRun(
        origin, fit, _samples(task), task.classes,
        (task.transform, task.targets), _test_source(settings.source, task), temperatures,
    )  # fmt: skip
    if keep:
        keep(run)
    others = Others(settings, task, probe, old, head is not None)
    return evaluated(run, begun, made.report, others, pilot is None)


def kernel_part(settings: Settings, file: Path, part: tuple[int, int]) -> bool:
    """One part of the kernel that the fit of one linearization is made of; no process group is needed."""
    begun = started(settings)
    lin = _linearized(settings, begun).lin
    return gram_part(lin, begun.data[0], file=file, part=part, memory=settings.solving.memory) is not None


def started(settings: Settings) -> Started:
    """The data, the network as it was trained, and training inputs and answers where it is."""
    network, solving, stages = settings.network, settings.solving, Stages()
    torch.manual_seed(settings.source.seed)  # factories without weights start at random
    with stages.measure("reading the data"), waiting("reading the data"):
        task = _read(settings.source)
        task.require_memory(solving.memory)
        _ = task.train.x
    with stages.measure("building the network"), waiting("building the network"):
        old = load_model(network.spec, network.weights, network.arguments).to(solving.device)
        task = normalized(task, old, settings.source.normalizes)
        x, y = (t.to(solving.device) for t in task.tensors("train"))
        return Started(task, ended(old, task, x, network.output), (x, y), stages)


@dataclass(frozen=True, eq=False)
class _Linearization:
    """A network with the head of a task, linearized."""

    lin: Linearized  # it, in the metric of the ridge
    probe: nn.Module  # the network with its head
    head: int | None  # outputs of a new head
    init: str  # where the head comes from
    centered: bool  # whether only its derivatives are taken from the head
    report: Preflight  # the check of the network
    solving: Solving  # how to fit, with the metric that was chosen
    why: str  # why that metric


def _linearized(settings: Settings, begun: Started) -> _Linearization:
    """The head, the linearization, its check and the metric."""
    (x, y), network, solving = begun.data, settings.network, settings.solving
    task, old, stages = begun.task, begun.network, begun.stages
    with stages.measure("building the head"), waiting("building the head"):
        probe, head = _headed(old, network, task, (x, y))
        init = "keep" if head is None else getattr(probe, RECORD)["init"]
        centered = init == "probe"
        lin = linearize(with_centered_head(probe) if centered else probe, params=solving.params)
        if centered and not _fits_head(lin):  # what the head says must then stay in f₀
            centered, lin = False, linearize(probe, params=solving.params)
    with stages.measure("preflight"), waiting("preflight"):
        report = _checked(probe, x, solving)  # a centered head would hide randomness
    metric, why = choose_metric(settings, lin, task.classes is not None, x)
    if metric != "none":
        with stages.measure("metric"), waiting("metric"):
            lin, metric, why = in_metric(settings, probe, lin, x, (metric, why))
    solving = replace(solving, metric=metric)
    return _Linearization(lin, probe, head, init, centered, report, solving, why)


def evaluated(
    run: SavedRun,
    begun: Started,
    report: Preflight,
    others: Others,
    std: bool = True,
    predictions: Predictions | None = None,
) -> Adaptation:
    """The fit and what it is compared with, on the test samples."""
    step, stages, task = "evaluation on the test samples", begun.stages, begun.task
    with stages.measure(step), waiting(step):
        found = predictions or predict_test(run, task, std=std)
        task = replace(task, findings=(*task.findings, *_trained_on(task)))
    every = [own_score(run, task, found), *others.scores(name_of(run.fit) == PROBE, stages)]
    scores = Scores(
        tuple(one.row for one in every),
        tuple(one.reliability for one in every if one.reliability is not None),
        len(task.test),
        {one.row.name: one.squares for one in every if one.squares is not None},
    )
    return Adaptation(run, task, report, found, scores, stages)


def _why_head(network: Network, init: str, centered: bool) -> str:
    """Why the head is what it is, and what that means for the fit."""
    chosen = {
        "keep": "a regression whose values the network's outputs fit",
        "probe": "as many samples as features, or more",
        "random": "fewer samples than features, because a probe would overfit",
    }
    why = "set by the user" if network.head != "auto" else chosen[init]
    if network.cross_fit:
        why = "fitted in folds, so that leave-one-out leaves out its part too"
    if centered:
        return f"{why}; it gives the derivatives, and the ridge draws the outputs to zero"
    if init == "probe":
        return f"{why}; the fit starts from its outputs"
    return why if init == "keep" else f"{why}; the labels have no part in it"


def ended(model: nn.Module, task: TaskData, x: Tensor, output: str | None = None) -> nn.Module:
    """The network, or with a head behind it where it returns features."""
    arranged = Appended(model, None, output)
    plain = model if output is None else arranged
    try:
        if task.classes is None and Functional(arranged).output_shape(x).numel() == task.train.y.shape[1]:
            return plain
        return ending_linear(model, x, output)
    except ModelError as error:
        if OWN_SHAPE not in (error.expected or ""):
            return plain  # the preflight says what is wrong, where it is
        told, expected = task.layout()
        remedy = error.remedy if task.image_mode else "change the data, or build the network for them"
        raise ModelError(f"{error.what}; {told}", expected, remedy) from error


def nests(settings: Settings, task: TaskData, model: nn.Module, x: Tensor) -> bool:
    """Whether the nested fit is made: where it is requested, or nothing that only one linearization has."""
    network, solving = settings.network, settings.solving
    if solving.method == "linear":
        if solving.tune:
            raise InputError(
                "tune is given with method linear",
                expected="a nested fit, whose lower layers are trained",
                remedy="leave --method or --tune out",
            )
        return False
    others = {
        "head": network.head != "auto",
        "cross_fit": bool(network.cross_fit),
        "metric": solving.metric != "auto",
        "loss": solving.loss != "squared",
        "solver": solving.solver not in ("auto", "dual"),
        "ridge": solving.ridge not in ("auto", "loo") and isinstance(solving.ridge, str),
    }
    asked = [name for name, given in others.items() if given]
    if solving.method == "nested" or solving.weight != "auto" or solving.tune:
        if asked:
            raise InputError(
                f"{asked[0]} is given with method nested",
                expected="its own probe, one metric, the squared loss, the kernel and leave-one-out",
                remedy=f"leave {asked[0]} out, or pass --method linear",
            )
        return True
    if asked or not _has_body(model, x, solving.params):
        return False
    if task.classes is None:  # a regressor of as many values goes on from what it predicts
        outputs = Functional(model).output_shape(x[:2]).numel()
        return bool(outputs != task.tensors("train")[1].shape[1])
    return True


def _has_body(model: nn.Module, x: Tensor, params: str | tuple[str, ...] | None) -> bool:
    """Whether a network ends in a linear layer, and parameters below it are to be fitted."""
    try:
        features(model, x[:1])
        head = last_linear(model)[0]
    except ModelError:
        return False
    return any(owner(name) != head for name in selected_inside(model, params))


def nested_run(settings: Settings, begun: Started, out: Path) -> tuple[SavedRun, Preflight]:
    """The linear probe and the lower layers in one solve, or the one that an interrupted run has kept."""
    network, solving, task, old = settings.network, settings.solving, begun.task, begun.network
    (x, y), stages = begun.data, begun.stages
    with stages.measure("preflight"), waiting("preflight"):
        module = Features(old, HEADS, settings.source.seed, selected_inside(old, solving.params))
        report = _checked(module.model, x, replace(solving, params=tuple(module.function.names)))
        if solving.params is None:  # what a nested fit leaves to its heads is no choice of the user
            others = (one for one in report.findings if LEFT_OUT not in one)
            report = replace(report, findings=("the old head is replaced by a new one", *others))
    known = interrupted_run(out, solving.device, solving.memory)
    if known is not None and known.origin.heads is not None and known.samples.ids == task.train.ids:
        return known, report
    weight, ridge = (None if isinstance(v, str) else float(v) for v in (solving.weight, solving.ridge))
    outputs = len(task.classes) if task.classes is not None else y.shape[1]
    targets = make_targets(y, outputs, dtype=module.function.dtype)
    record = Record("dual", "loo", {}, single_remarks(targets), classes=task.classes or ())
    file = out / KERNEL_FILE
    discard(file)  # a finished one is of a run that was killed, and may be of other settings
    with stages.measure("fit"), shared_fit(solving.device, network=module.function, x=x, y=y):
        fit = solved(module, x, targets, solving.memory, record, (weight, ridge), file)
    discard(file)
    origin = _origin(network, old, None, False)
    temperatures = None if task.classes is None else temperatures_of(fit)
    run = SavedRun(
        replace(origin, heads=(module.heads, module.seed)), fit, _samples(task), task.classes,
        (task.transform, task.targets), _test_source(settings.source, task), temperatures,
    )  # fmt: skip
    return run, report


def _tuned(
    run: SavedRun, settings: Settings, stages: Stages, keep: Callable[[SavedRun], None] | None
) -> SavedRun:
    """The run with trained lower layers where that is better, unless an interrupted run has come so far."""
    fit = run.fit
    if not isinstance(fit, NestedFit) or fit.rungs:
        return run
    with stages.measure("training of the lower layers"):
        made = tuned(fit, settings.source.seed)
    run = replace(run, fit=made, temperatures=None if run.classes is None else temperatures_of(made))
    if keep:
        keep(run)
    return run


def _fits_head(lin: Linearized) -> bool:
    """Whether the weight of a centered head is among the parameters that are fitted."""
    heads = [name for name, layer in lin.model.named_modules() if isinstance(layer, CenteredLinear)]
    return any(f"{name}.weight".lstrip(".") in lin.parameter_names for name in heads)


def _checked(model: nn.Module, x: Tensor, solving: Solving) -> Preflight:
    """The preflight of a network that can be linearized."""
    report = preflight(model, x[:4], params=solving.params, memory=solving.memory)
    if not report.ok:
        raise ModelError(
            f"the network cannot be linearized: {report.findings[0]}",
            expected="a network whose outputs for a sample depend on that sample alone, the same every time",
            remedy="linnet check shows the whole preflight",
        )
    return report


def loaded(source: Source) -> TaskData:
    """The whole task, its samples not read yet where they are files."""
    return load_data(
        source.path, source.transform, seed=source.seed, target=source.target, damaged=source.damaged
    )


def _read(source: Source) -> TaskData:
    """The task with the samples requested."""
    return drawn(loaded(source), source)


def drawn(task: TaskData, source: Source) -> TaskData:
    """The samples of a task that are requested by number."""
    if source.shots is not None:
        if task.classes is None:
            if source.shots < 1:
                raise InputError(
                    f"shots is {source.shots}", expected="a positive number of samples", remedy=ALL
                )
            order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(source.seed))
            task = task.subset("train", np.sort(order[: source.shots].numpy()))
        else:
            task = task.shots(source.shots, source.seed, source.at_most)
    if source.tests is not None and source.tests < len(task.test):
        if source.tests < 1:
            raise InputError(
                f"tests is {source.tests}", expected="a positive number of test samples", remedy=ALL
            )
        order = torch.randperm(len(task.test), generator=torch.Generator().manual_seed(source.seed))
        task = task.subset("test", np.sort(order[: source.tests].numpy()))
    return task


def _headed(
    model: nn.Module, network: Network, task: TaskData, data: tuple[Tensor, Tensor]
) -> tuple[nn.Module, int | None]:
    """The network with the head for the task, and the outputs of a new head."""
    x, y = data
    outputs = len(task.classes) if task.classes is not None else y.shape[1]
    own = Functional(model).check_runs(x[:2])
    width = own.reshape(len(own), -1).shape[1]
    init = network.head
    if init == "auto":
        kept = task.classes is None and width == outputs
        init = "probe" if network.cross_fit else "keep" if kept else choose_head(model, x[:1], len(x))
    if init == "keep":
        if width != outputs:
            raise ModelError(
                f"the network has {width} outputs, the data need {outputs}",
                expected="as many outputs as classes or targets",
                remedy="leave --head out, which puts on a new one",
            )
        return model, None
    generator = torch.Generator().manual_seed(0)
    given = (x, y) if init == "probe" else None
    made = Probe(cross_fit=network.cross_fit) if init == "probe" else init
    return with_head(model, outputs, made, given, seed=generator), outputs


def choose_head(model: nn.Module, x: Tensor, samples: int) -> str:
    """The default head."""
    # A linear probe with fewer samples than features fits any labels. The derivatives that pass through it
    # then hold the labels, and leave-one-out would be optimistic: a random head knows nothing of them.
    return "probe" if samples >= features(model, x).shape[1] else "random"


def _origin(
    network: Network, old: nn.Module, head: int | None, centered: bool, start: nn.Module | None = None
) -> Origin:
    """The network's origin, with absolute paths."""
    appended = old.width if isinstance(old, Appended) else None
    weights = None if network.weights is None else str(Path(network.weights).resolve())
    metric = start.damping if isinstance(start, MetricNetwork) else None
    made = Origin(absolute_spec(network.spec), dict(network.arguments), head, centered, weights, metric)
    return replace(made, appended=appended, output=network.output)


def _samples(task: TaskData) -> TrainingSamples:
    """The training samples as people see them."""
    images = np.ascontiguousarray(task.train.x) if task.image_mode else None
    return TrainingSamples(images, np.ascontiguousarray(task.train.y), task.train.ids)


def _test_source(source: Source, task: TaskData) -> TestSource:
    """Where the test samples can be read again."""
    positions = None
    if source.tests is not None:
        whole = loaded(source).test.ids
        places = {name: place for place, name in enumerate(whole)}
        positions = tuple(places[name] for name in task.test.ids)
    return TestSource(
        str(source.path.resolve()), source.seed, source.target, task.table, positions, test_digest(task),
        source.damaged,
    )  # fmt: skip


def predict_test(run: SavedRun, task: TaskData, std: bool = True) -> Predictions:
    """Predictions for the test samples."""
    x = task.tensors("test")[0].to(run.fit.module.function.device)
    return predict(run.fit, x, run.transforms[1], run.temperatures, std)


def _trained_on(task: TaskData) -> list[str]:
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
        return Scored(
            score_values(name, found.mean, truth, found.std, seconds), None, _squared(found.mean, truth)
        )
    note = f"{run.fit.solver} solver, ridge {number(run.fit.ridge)}"
    if loss_of(run.fit) != "squared":
        note = f"{loss_of(run.fit)}, {note}"
    row = score_classes(name, found.probs, truth, seconds, note)
    return Scored(row, reliability(name, found.probs, truth))


@dataclass(frozen=True, eq=False)
class Others:
    """The methods that the fit is compared with."""

    settings: Settings  # what is requested
    task: TaskData  # the data
    model: nn.Module  # the network at θ₀
    old: nn.Module  # the network as it was trained
    new_head: bool = True  # whether it got a new head

    def scores(self, is_probe: bool, stages: Stages) -> list[Scored]:
        """The network at θ₀, unless the fit is the same linear probe, and plain fine-tuning."""
        device, found = self.settings.solving.device, []
        x, y = (t.to(device) for t in self.task.tensors("train"))
        test = self.task.tensors("test")[0].to(device)
        if not (is_probe and self.new_head):
            with stages.measure(PROBE), waiting(PROBE):
                found.append(self._start(x, y, test))
        if self.settings.compare == "finetune":
            with stages.measure("plain fine-tuning"):
                found.append(self._tuned(x, y, test))
        return found

    def _start(self, x: Tensor, y: Tensor, test: Tensor) -> Scored:
        """The network at θ₀."""
        start = time.perf_counter()
        name, model, temperature = "network as it is", self.model, None
        if self.new_head:
            classes = len(self.task.classes) if self.task.classes is not None else y.shape[1]
            name, model = PROBE, with_head(self.old, classes, data=(x, y))
        outputs = _outputs(model, test)
        if self.task.classes is not None:
            held = held_out_probe(self.model, (x, y), len(self.task.classes))
            temperature = fit_temperature(held, y)
        seconds = time.perf_counter() - start
        note = "ridge regression on the last features" * self.new_head
        return self._row(name, outputs, temperature, seconds, note)

    def _tuned(self, x: Tensor, y: Tensor, test: Tensor) -> Scored:
        """Plain fine-tuning, from the linear probe where there is a new head."""
        start = time.perf_counter()
        seed, model = self.settings.source.seed, self.model
        classes = len(self.task.classes) if self.task.classes is not None else y.shape[1]
        if self.new_head:
            model = with_head(self.old, classes, Probe(scale=HEAD_SCALE), data=(x, y))
        best = fine_tune(model, (x, y), self.settings.finetune_steps, seed=seed, optimizer="adam")
        seconds = time.perf_counter() - start
        tried = len(best.held_out)
        rate = f"{best.learning_rate:g}, the best of {tried} rates on held-out samples"
        note = f"Adam, {best.steps} steps at {rate}"
        temperature = 1.0 if self.task.classes is not None else None
        return self._row("plain fine-tuning", best.predict(test), temperature, seconds, note)

    def _row(
        self, name: str, outputs: Tensor, temperature: float | None, seconds: float, note: str
    ) -> Scored:
        """Scores of some outputs."""
        truth = self.task.test.y
        if temperature is None:
            values = self.task.targets.inverse(outputs) if self.task.targets else outputs
            mean = values.double().cpu().numpy()
            return Scored(score_values(name, mean, truth, None, seconds, note), None, _squared(mean, truth))
        probs = probabilities(outputs.double(), None, temperature).cpu().numpy()
        return Scored(score_classes(name, probs, truth, seconds, note), reliability(name, probs, truth))


def _squared(mean: Array, truth: Array) -> Array:
    """Squared errors of values, (N,)."""
    found: Array = ((mean - truth) ** 2).reshape(len(truth), -1).mean(1)
    return found


@torch.no_grad()
def _outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Outputs of a network, batch by batch."""
    function = Functional(model)
    return torch.cat([function.flat(function.theta, part) for part in split(x, 128)])
