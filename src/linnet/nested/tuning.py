"""Training of the lower layers if it helps on held-out samples, followed by a new fit.

One linearization reaches only so far. The step beyond it is training of every weight below the head: so that
features are alike within a class and differ between classes, which takes tens of steps, or for values from
the linear probe by their squared error. It is judged on folds: for each, a network trained without it, the
nested fit at its weights without it, and the error there. That error is set beside the ones that the probe
and the nested fit at the original weights have on the same folds, sample by sample. Where it is lower, the
network is trained on everything and the nested fit solved at its weights: variances, leave-one-out,
influence, forgetting and updates are those of a linear model again, and how far forgetting a fold is from
training again without it has been measured.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linnet.distributed import Share
from linnet.errors import DataError, LinnetError, NumericalError
from linnet.fitting.descent import Descent
from linnet.fitting.head import deal, example_hashes, with_head
from linnet.fitting.last_layer import bared
from linnet.linalg.factorize import cholesky
from linnet.linear.dual import DualSystem, Spectrum
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.normal_system import NormalSystem
from linnet.nested.features import Prior, RandomHeads, kernels_of, problem_of, read
from linnet.nested.landmarks import LANDMARKS
from linnet.nested.many import prior_of_many
from linnet.nested.nested_fit import NestedFit
from linnet.nested.search import (
    BIAS,
    ERRORS,
    Kernels,
    Mixture,
    Rung,
    counted,
    intercept,
    ladder,
    sampled,
    verdict,
)
from linnet.predictive.noise import fit_moderation, fit_temperature
from linnet.progress import Log, tell, track
from linnet.tangent.batch import take
from linnet.tangent.functional import copied
from linnet.tree import hash_tensors, tensors_in
from linnet.unfinished import Checkpoint, checkpoint

FOLDS = 3  # networks trained without a third each: twice as many cost twice as much
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # of Adam; large transformers to small networks
FIRST = 3  # position in RATES that is tried first, with its neighbors; further as long as the error falls
# At least so many steps, and so many epochs: for the contrast of classes none of 20, 40 and 60 steps was the
# best on all development tasks; squared error takes longer.
STEPS, VALUE_STEPS, BATCH, EPOCHS = 20, 150, 32, 10
RIDGES = tuple(10 ** (step / 4) for step in range(-20, 13))
RETRAINED = (
    "The lower layers were trained on the same labels: influence and forgetting are exact for the fit at the "
    "trained weights and leave those weights as they are; held-out outputs are of networks trained without a "
    "third of the samples each."
)


class Tuning:
    """Networks trained from that of a nested fit, with and without folds of its samples."""

    def __init__(self, fit: NestedFit, seed: int, log: Log | None = None, folder: Path | None = None) -> None:
        self.fit, self.seed, self.log, self.folder = fit, seed, log, folder
        self.runs = 0
        self.features = fit.prior.network
        self.y = fit.targets if fit.labels is None else fit.labels
        self.fold = self._dealt()
        least = VALUE_STEPS if fit.labels is None else STEPS
        self.steps = max(least, math.ceil(EPOCHS * fit.n / BATCH))
        runs = 3 + FOLDS - 1 + 1  # three rates, the other folds, all samples; the search seldom takes more
        label = f"training of the lower layers, about {runs} runs of {self.steps} steps"
        self._ticks: Iterator[Any] = track(range(runs * self.steps), label, runs * self.steps)

    @property
    def in_weights(self) -> bool:
        """Whether samples are many: their kernels are then kept by their roots."""
        return isinstance(self.fit.system, NormalSystem)

    @property
    def bias(self) -> float:
        """κ of the folds' kernels."""
        return intercept(self.fit._targets)

    @property
    def objective(self) -> str:
        """What training lowers."""
        if self.fit.labels is None:
            return "on the squared error from the linear probe"
        return "on the contrast of classes"

    def _dealt(self) -> Tensor:
        """The fold of each sample, (N,)."""
        several = int(counted(self.fit._targets).sum())
        if min(self.fit.n, several) < 2 * FOLDS:
            of = "" if self.fit.n < 2 * FOLDS else " are of classes with more than one"
            raise DataError(
                f"{several if of else self.fit.n} samples{of}",
                expected=f"{2 * FOLDS} or more",
                remedy="leave tune out",
            )
        generator = torch.Generator().manual_seed(self.seed)
        fold = deal(example_hashes(self.fit.x, self.y), self.y, FOLDS, generator).to(self.y.device)
        for k in range(FOLDS):
            rest = self.y[fold != k]
            if self.fit.labels is not None and len(rest.unique()) < 2:
                raise DataError(
                    "a third of the samples leaves one class only",
                    expected="several samples of two classes or more",
                    remedy="leave tune out",
                )
        return fold

    def parts(self, k: int) -> tuple[Tensor, Tensor]:
        """Positions of the samples that fold k leaves, and of its own."""
        return (self.fold != k).nonzero()[:, 0], (self.fold == k).nonzero()[:, 0]

    def trained(self, rows: Tensor, rate: float) -> RandomHeads:
        """The network trained on some samples, those of values from their linear probe."""
        x, y, features = take(self.fit.x, rows), self.y[rows], self.features
        named, classes = set(features.function.names), self.fit.labels is not None
        if not classes:  # in units of their spread, in which the rates are
            spread = float((self.y - self.y.mean(0)).square().mean().sqrt())
            y = y / (spread or 1.0)
        run = Descent(rate, self.steps, BATCH, self.seed, "adam", contrast=classes)
        if classes:
            start = bared(features.model)
        else:
            start = with_head(features.model, self.fit.system.c, data=(x, y))
            named |= {f"{features.layer}.weight", f"{features.layer}.bias"}
        self.runs += 1
        file = self._file(start, rows, rate)
        network = None if file is None else self._known(start, file)
        if network is None:
            network = run(start, x, y, self._ticks, named, None if self.log is None else self.tell)
            if file is not None:
                file.note(0, self.steps, {n: p for n, p in network.named_parameters() if n in named})
        if all(bool(p.isfinite().all()) for p in network.parameters()):
            made = features.moved(network)
            if made.phi(x).isfinite().all():
                return made
        raise NumericalError(
            f"training at a learning rate of {rate:g} led to weights that are not finite",
            expected="a learning rate at which the network trains",
            remedy="leave tune out",
        )

    def _file(self, start: nn.Module, rows: Tensor, rate: float) -> Checkpoint | None:
        """Where the trained weights of this run are kept until all runs are done, if anywhere."""

        def identity() -> dict[str, Any]:
            data = hash_tensors(
                [rows, *tensors_in(take(self.fit.x, rows)), self.y[rows], *start.parameters()]
            )
            return {"rate": rate, "steps": self.steps, "seed": self.seed, "network and samples": data}

        if self.folder is None:
            return checkpoint("training", Share(), identity)
        return Checkpoint(self.folder / f"{self.runs}.safetensors", identity())

    def _known(self, start: nn.Module, file: Checkpoint) -> nn.Module | None:
        """The network of a run that was done before an interruption."""
        try:
            found = file.read()
        except LinnetError:
            if self.folder is None:  # of `resumable`, which says so
                raise
            return None  # of another run, or damaged: it is written anew
        if found is None:
            return None
        network = copied(start).eval().requires_grad_(False)
        weights = dict(network.named_parameters())
        for name, value in found[2].items():
            weights[name].copy_(value)
        for _ in range(self.steps):
            next(self._ticks, None)
        return network

    def kernels(self, features: RandomHeads, share: bool) -> Kernels | Roots:
        """The kernels of all samples at a network's weights."""
        if self.in_weights:
            return Roots(features, self.fit)
        found = read(features, self.fit.x, self.fit.earlier > 0)
        body = features.kernel(self.fit.x, self.fit.memory) if share else None
        return replace(kernels_of(found, features.width), body=body)

    def tell(self, values: dict[str, float], step: int) -> None:
        """Hand numbers of the run that is under way to the logger, if there is one."""
        if self.log is not None:
            made = "the network is as it was, and no fit is made"
            tell(self.log, {**values, "run": self.runs}, (self.runs - 1) * self.steps + step, made, "tune=")

    def held_out(self, kernel: Tensor, k: int, targets: Tensor) -> Tensor:
        """Squared errors on fold k by the fit of the others at its best ridge, which are told."""
        # kernel (N, N) or its root (N, D), targets (N, C)
        parts = self.parts(k)
        outputs, own = held_out(kernel, self.in_weights, targets, parts, RIDGES), targets[parts[1]]
        errors = (outputs - own).square().sum(2)
        best = int(errors.mean(1).argmin())
        values = {"held_out_error": float(errors[best].mean())}
        if self.fit.labels is not None:
            right = outputs[best].argmax(1) == self.fit.labels[parts[1]]
            values["held_out_accuracy"] = float(right.double().mean())
        self.tell(values, self.steps)
        return errors[best]

    def finish(self) -> None:
        """Let the meter end on its last line."""
        for _ in self._ticks:
            pass


class Roots:
    """As ``Kernels``, of many samples: features (N, D), of whose products the kernel is made."""

    body = None

    def __init__(self, features: RandomHeads, fit: NestedFit) -> None:
        self.features, self.x = features, fit.x
        few = take(fit.x, sampled(fit.n, LANDMARKS).to(fit.targets.device))
        self.found = read(features, few, fit.earlier > 0)

    def prior(self, earlier: float, bias: float) -> tuple[Prior, Tensor]:
        """The prior at a share of earlier layers, and its rows, (N, D)."""
        return prior_of_many(self.features, self.x, self.found, earlier, bias)

    def mixed(self, weight: float, earlier: float = 0.0, bias: float = BIAS) -> tuple[Tensor, Mixture]:
        """The features with an intercept, (N, D + 1), and how they were made."""
        del weight
        prior, rows = self.prior(earlier, bias)
        return torch.cat([torch.full_like(rows[:, :1], bias**0.5), rows], 1), prior.mixture


def held_out(
    kernel: Tensor, rooted: bool, targets: Tensor, parts: tuple[Tensor, Tensor], ridges: Any
) -> Tensor:
    """Outputs for the samples of a fold by the fit of the others, (R, H, C)."""
    # kernel (N, N), or its root (N, D); targets (N, C)
    rest, held = parts
    if rooted:
        known = kernel[rest]
        spectrum = Spectrum(known.T @ known, known.T @ targets[rest])
        turned = kernel[held] @ spectrum.vectors
    else:
        spectrum = Spectrum(kernel[rest][:, rest], targets[rest])
        turned = kernel[held][:, rest] @ spectrum.vectors
    coordinates = spectrum.coordinates.reshape(len(spectrum.values), -1)
    return torch.stack([(turned / (spectrum.values + ridge)) @ coordinates for ridge in ridges])


@torch.no_grad()
def tuned(fit: NestedFit, seed: int, log: Log | None = None, folder: Path | None = None) -> NestedFit:
    """The nested fit at trained weights where held-out samples say that it is better, else the one given."""
    # Weights of runs that took long are kept in the folder, or in that of `resumable`, until all are done.
    start = time.perf_counter()
    try:
        tuning = Tuning(fit, seed, log, folder)
        made = _tuned(fit, tuning, start)
        tuning.finish()
    except (DataError, NumericalError) as error:  # the fit that there is stays
        return _noted(fit, f"The lower layers were not trained: {error.what}.")
    return made


def _tuned(fit: NestedFit, tuning: Tuning, start: float) -> NestedFit:
    """The comparison on folds, and the fit that it prefers."""
    targets = fit.targets.double()
    before = _held_before(tuning, targets)
    rate, first = _searched(tuning, targets)
    kernels: list[Kernels | Roots] = [tuning.kernels(first, fit.body_weight > 0)]
    shares, ridge, outputs = _chosen(tuning, kernels, targets)
    rungs = ladder(before, outputs, fit._targets, time.perf_counter() - start, tuning.fold == 0)
    if rungs[-1].gain < -ERRORS * rungs[-1].gain_error:  # two more folds would hardly turn it round
        return _noted(fit, verdict(rungs), rungs)
    for k in range(1, FOLDS):
        kernels.append(tuning.kernels(tuning.trained(tuning.parts(k)[0], rate), shares[0] > 0))
        if tuning.log is not None:
            tuning.held_out(kernels[-1].mixed(0.0, fit.earlier, tuning.bias)[0], k, targets)
    shares, ridge, outputs = _chosen(tuning, kernels, targets)
    rungs = ladder(before, outputs, fit._targets, time.perf_counter() - start)
    if not rungs[-1].taken:
        return _noted(fit, verdict(rungs), rungs)
    network = tuning.trained(torch.arange(fit.n, device=tuning.y.device), rate)
    whole = tuning.kernels(network, shares[0] > 0)
    made = _noted(_solved(fit, network, whole, (shares, ridge)), verdict(rungs), rungs)
    _calibrate(made, tuning, kernels, (shares, ridge), outputs)
    reasons = {
        **made.record.reasons,
        "training": f"Adam at {rate:g}, {tuning.steps} steps of {BATCH}, {tuning.objective}; rate, shares "
        f"and ridge by {FOLDS} folds of the training samples",
        "ridge": f"lowest error on {FOLDS} folds, each with a network trained without it",
        "shares": "those of the fit at the original weights, or zero: lower error on the folds",
        "retraining": _distance(tuning, whole.mixed(*shares, tuning.bias)[0], ridge, outputs),
    }
    seconds = {**fit.record.seconds, "training": time.perf_counter() - start}
    warnings = (*made.record.warnings, RETRAINED)
    made.record = replace(made.record, criterion="folds", reasons=reasons, seconds=seconds, warnings=warnings)
    return made


def _noted(fit: NestedFit, sentence: str, rungs: tuple[Rung, ...] = ()) -> NestedFit:
    """A fit, with what was found about training its lower layers."""
    below = fit.module.below
    told = sentence.replace("lower layers", below)
    fit.record = replace(fit.record, reasons={**fit.record.reasons, "verdict": told})
    fit.rungs = tuple(replace(rung, name=rung.name.replace("lower layers", below)) for rung in rungs)
    return fit


def _held_before(tuning: Tuning, targets: Tensor) -> list[tuple[str, Tensor]]:
    """Held-out outputs of the probe and of the nested fit at the original weights, each at its best ridge."""
    fit = tuning.fit
    original: Kernels | Roots
    if isinstance(fit.system, NormalSystem):
        original, problem = Roots(fit.module, fit), fit.system.problem
        whole = None if fit.is_probe else problem.basis.root(problem.examples)
    else:
        phi = fit.module.phi(fit.x)
        phi = phi - phi.mean(0)
        original = Kernels(phi @ phi.T)
        whole = None if fit.is_probe else fit.system.kernel.double()
    models = [("linear probe", original.mixed(0.0, bias=tuning.bias)[0])]
    if whole is not None:
        models.append(("linearized lower layers", whole))
    return [(name, _best(tuning, repeat(one, FOLDS), FOLDS, targets)[2]) for name, one in models]


def _searched(tuning: Tuning, targets: Tensor) -> tuple[float, RandomHeads]:
    """A learning rate by the errors on the first fold, and the network trained there."""
    # targets (N, C)
    rest, held = tuning.parts(0)
    errors: dict[int, Tensor] = {}
    networks: dict[int, RandomHeads] = {}

    def tried(place: int) -> Tensor:
        if place not in errors:
            errors[place] = targets.new_full((len(held),), math.inf)
            with contextlib.suppress(NumericalError):
                network = tuning.trained(rest, RATES[place])
                kernel = tuning.kernels(network, share=False).mixed(0.0, tuning.fit.earlier, tuning.bias)[0]
                errors[place], networks[place] = tuning.held_out(kernel, 0, targets), network
        return errors[place]

    def better(place: int, than: int) -> bool:
        return 0 <= place < len(RATES) and float(tried(place).mean()) < float(tried(than).mean())

    best = FIRST
    while better(best - 1, best):
        best -= 1
    while best >= FIRST and better(best + 1, best):
        best += 1
    if best not in networks:
        raise NumericalError(
            "no learning rate led to weights that are finite",
            expected="a network that trains",
            remedy="leave tune out",
        )
    return RATES[best], networks[best]


def _best(
    tuning: Tuning, kernels: Iterable[Tensor], count: int, targets: Tensor
) -> tuple[float, float, Tensor]:
    """Lowest held-out error over ridges, the ridge, and the outputs (N, C), with one kernel a fold."""
    # kernels (N, N) or their roots (N, D), one at a time; targets (N, C)
    # With fewer kernels than folds the error is that of the first folds, and the other outputs are zero.
    counting = counted(tuning.fit._targets) & (tuning.fold < count)
    outputs = targets.new_zeros(len(RIDGES), *targets.shape)
    for k, kernel in enumerate(kernels):
        parts = tuning.parts(k)
        outputs[:, parts[1]] = held_out(kernel, tuning.in_weights, targets, parts, RIDGES)
    errors = (outputs - targets).square().sum(2)[:, counting].mean(1)
    place = int(errors.argmin())
    return float(errors[place]), RIDGES[place], outputs[place]


def _chosen(
    tuning: Tuning, kernels: list[Kernels | Roots], targets: Tensor
) -> tuple[tuple[float, float], float, Tensor]:
    """Shares of the lower layers and ridge of lowest held-out error, and the outputs there, (N, C)."""
    # targets (N, C)
    # The shares are zero or those of the fit at the original weights, where the lower layers have seen no
    # label; where the first fold prefers no derivatives, the kernels of the others come without them.
    fit, found = tuning.fit, []
    weight = fit.body_weight if all(one.body is not None for one in kernels) else 0.0
    for shares in dict.fromkeys(((0.0, 0.0), (0.0, fit.earlier), (weight, fit.earlier))):
        mixed = (one.mixed(*shares, tuning.bias)[0] for one in kernels)
        error, ridge, outputs = _best(tuning, mixed, len(kernels), targets)
        found.append((error, shares, ridge, outputs))
    return min(found, key=lambda one: one[0])[1:]


Chosen = tuple[tuple[float, float], float]  # shares and ridge


def _solved(fit: NestedFit, network: RandomHeads, whole: Kernels | Roots, chosen: Chosen) -> NestedFit:
    """The nested fit at the trained weights."""
    shares, ridge = chosen
    if isinstance(whole, Roots):
        prior, rows = whole.prior(shares[1], intercept(fit._targets, ridge))
        problem = problem_of(prior, (fit.x, rows), fit._targets)
        return NestedFit(prior, fit._targets, NormalSystem.solved(problem, ridge, fit.memory), fit.record)
    kernel, mixture = whole.mixed(*shares, intercept(fit._targets, ridge))
    found = network.staged(fit.x) if mixture.earlier else network.phi(fit.x)
    prior = Prior(network, found[:, : network.width].mean(0), mixture)
    dual = DualSystem(kernel, fit.targets, ridge)
    problem = problem_of(prior, (fit.x, prior.scaled(found)), fit._targets)
    system = KernelSystem(problem, dual, fit.memory)
    return NestedFit(prior, fit._targets, system, fit.record)


def _calibrate(
    made: NestedFit, tuning: Tuning, kernels: list[Kernels | Roots], chosen: Chosen, outputs: Tensor
) -> None:
    """Noise and temperatures by held-out outputs: leave-one-out knows the labels through the weights."""
    made.held_out, (shares, ridge) = outputs, chosen
    own = torch.zeros_like(outputs[:, 0])
    for k, kernel in enumerate(kernels):
        rest, held = tuning.parts(k)
        mixed = kernel.mixed(*shares, tuning.bias)[0]
        if tuning.in_weights:
            gram = mixed[rest].T @ mixed[rest]
            gram.diagonal().add_(ridge)
            half = torch.linalg.solve_triangular(cholesky(gram, "features"), mixed[held].T, upper=False)
            own[held] = ridge * half.square().sum(0).to(own)
            continue
        system = DualSystem(mixed[rest][:, rest], made.targets[rest], ridge)
        cross = mixed[held][:, rest]
        own[held] = (mixed.diagonal()[held] - (system.cross(cross) * cross).sum(1)).clamp_min(0).to(own)
    counting = counted(made._targets)
    # an output has the variance σ² (1 + own/ρ) about its target
    possible = made.classes if made._possible is None else len(made._possible)
    squares = (outputs - made.targets.to(outputs)).square().sum(1) / (possible or outputs.shape[1])
    squares = squares / (1 + own / ridge)
    weights = made._targets.weights
    if weights is not None:  # a target of weight w has the noise σ²/w
        squares, weights = squares * weights.to(squares), weights[counting]
    made.calibrate(noise=float(squares[counting].mean()))
    if made.labels is None:
        return
    variances = (made.noise / ridge * own)[:, None].expand_as(outputs)
    known, labels, spread = made._of_possible(*(one[counting] for one in (outputs, made.labels, variances)))
    temperature, scale = fit_moderation(known, labels, spread, weights)
    made.calibrate(temperature, fit_temperature(known, labels, None, weights), scale)


def _distance(tuning: Tuning, kernel: Tensor, ridge: float, retrained: Tensor) -> str:
    """One sentence on the distance between forgetting a fold and training again without it."""
    fit = tuning.fit
    targets = fit.targets.double()
    forgotten = torch.zeros_like(targets)
    for k in range(FOLDS):
        parts = tuning.parts(k)
        forgotten[parts[1]] = held_out(kernel, tuning.in_weights, targets, parts, (ridge,))[0]
    every = torch.arange(fit.n, device=targets.device)
    kept = held_out(kernel, tuning.in_weights, targets, (every, every), (ridge,))[0]
    if fit.labels is None:
        spread = float((retrained - retrained.mean(0)).square().sum().sqrt())
        near, far = (float((one - retrained).square().sum().sqrt()) / spread for one in (forgotten, kept))
        return (
            f"on {FOLDS} folds of samples, forgetting them comes within {100 * near:.0f} % of training again "
            f"without them (root mean square, relative to the spread of the outputs; keeping them: "
            f"{100 * far:.0f} %)"
        )
    same, before = (
        100 * float((one.argmax(1) == retrained.argmax(1)).double().mean()) for one in (forgotten, kept)
    )
    return (
        f"on {FOLDS} folds of samples, forgetting them gives the same class as training again without them "
        f"for {same:.0f} % (keeping them: {before:.0f} %)"
    )
