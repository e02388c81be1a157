"""``linnet.finetune``: the recipes of linear and plain fine-tuning, one call each.

A network is made ready, trained with each set of values, and the best is kept. The preconditioner is
A = (G/N + (λ + τ) I)⁻¹ of the frozen problem, whose curvature is computed once and stays as it is all through
training.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from linnet.curvatures import MonteCarlo, Passes
from linnet.curvatures.build import curvature
from linnet.curvatures.curvature import Curvature, default_damping
from linnet.errors import InputError, ModelError, NumericalError
from linnet.finetuning.augment import Augmentation
from linnet.finetuning.bilinear import with_bilinear_head
from linnet.finetuning.finetuned import Finetuned, FinetunedSettings
from linnet.finetuning.recipes import (
    ADAM_RATE,
    BATCH_SIZE,
    EFFECTIVE_RATE,
    MOMENTUM,
    PLAIN_RATE,
    WEIGHT_DECAY,
    Recipe,
    Trial,
    candidates_for,
    effective_rate,
)
from linnet.finetuning.trainer import (
    ExampleSet,
    Objective,
    Optimization,
    Run,
    Trainer,
    checked_run,
    rank,
    warn_of_large_steps,
    without_rise,
)
from linnet.fitting.descent import held_out_split
from linnet.fitting.head import Probe, with_head
from linnet.fitting.last_layer import RECORD, last_linear
from linnet.likelihoods import Categorical, Gaussian
from linnet.linear.targets import check_arrangement, doubts, make_targets, task_targets
from linnet.optim.preconditioner import KroneckerPreconditioner
from linnet.params import instance, no_targets, tensor, warn
from linnet.params import seed as checked_seed
from linnet.progress import Log
from linnet.solvers.lanczos import power_method
from linnet.tangent.batch import Inputs, concatenate, made_up
from linnet.tangent.functional import Functional, OutputAdapter, without_wrapper
from linnet.tangent.linearized import Linearized, linearize
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.selection import Selector, require_module, select_parameters, selected
from linnet.tangent.surgery import leaky_relu, report
from linnet.training import Training, filled
from linnet.tree import map_tensors

EPOCHS, FEWEST_STEPS = 30, 300
RETRIES = 3  # of a run whose rate was not the user's, each with a third of it
PROBED = 256  # examples that a learning rate is estimated on
LOGITS = 5.0  # α of the probe that cross-entropy starts from: 15 would saturate the softmax
UNHELD = 3  # activations in a row whose change no normalization has to hold
NORMALIZATIONS = (
    nn.modules.batchnorm._BatchNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.modules.instancenorm._InstanceNorm,
)
EXACT_COLUMNS = 32  # outputs up to which a curvature takes all columns


@in_exact_mode
def finetune(
    model: nn.Module,
    data: Any,
    recipe: str | Recipe = "lqf",
    *,
    validation: Any = None,
    search: str | Mapping[str, Sequence[Any]] | None = None,
    training: Training | None = None,
    seed: int = 0,
    run: Run | None = None,
) -> Finetuned:
    """Fine-tune a pretrained network on a new task.

    ========  ==========================================================================================
    lqf       Leaky ReLU, linearized, squared loss to α-scaled targets, K-FAC preconditioner estimated once
    lqf-fc    the same for the last layer alone
    gaf       linearized, cross-entropy, nothing else changed
    fc        the last layer alone, cross-entropy
    nlft      plain fine-tuning of all weights, cross-entropy
    b-lqf     lqf on square-root bilinear pooling of the last feature map
    ========  ==========================================================================================

    Any part can be changed: ``Recipe("lqf", loss="cross-entropy")``, with ``activation="relu"`` or
    ``preconditioner="none"``, takes one out of lqf; ``optimizer="adam"`` takes Adam instead of SGD with
    K-FAC. BatchNorm keeps its running statistics. With preconditioner the learning rate follows the batch
    size at one effective learning rate η/((1 − m) b), the same for every task; without it, squared loss
    starts from the largest eigenvalue of its Hessian. Step, order and augmentation are functions of the
    seed: the same call gives the same bits.

    Where the loss is squared and augmentation is not random the optimum has a closed form:
    ``linnet.fit(linnet.linearize(network), data)``.

    Args:
        model: The pretrained network; it is not touched. Or a linearization of it, as
            ``linearize(net, params=..., output=...)``, whose parameters vary and whose outputs are taken; of
            a network all parameters vary, apart from what is frozen in part of it.
        data: The new task: an (x, y) pair, a map-style ``Dataset`` or a ``DataLoader`` over one. Integer y
            are classes, float y (N, C) values. Classes that have no example need a head of their own:
            ``linnet.with_head(net, classes)``.
        recipe: One of the table, or a :class:`Recipe` for one with parts of it changed.
        validation: Data to score on the way, and to choose by. Without them a search holds a fifth of each
            class out, and trains again on everything with the values it took.
        search: ``"paper"``, ``"wide"``, or lists to try by name: ``learning_rate``, ``weight_decay``,
            ``batch_size``, ``augmentation``. For ``"paper"`` images are cropped where the recipe's
            ``augmentation`` is one of the crops.
        training: Settings of the training steps. A learning rate that is given is kept, with a warning if the
            training loss goes up again; the recipe's own, and one that a search chose on fewer examples, is
            then divided by three. By default λ = 1e-5, batches of 28, momentum 0.9 (0.5 for gaf with Adam), a
            constant rate, and 30 epochs, at least 300 steps.
        seed: Seed of everything random.
        run: Checkpoints, logs, the weights that are kept, and the memory that may be used.

    Returns:
        The trained module with history, validation scores and what was done.

    Raises:
        DataError: If the data are empty, not finite, or have labels out of range.
        InputError: If an argument has a value that is not listed or does not go with another.
        ModelError: If an activation, the pooling or the head cannot be replaced.
        NumericalError: If the loss is not finite with any of the values tried.

    Source:
        Achille, Golatkar, Ravichandran, Polito, Soatto, CVPR 2021, sections 3, 4 and A.2; gaf: Mu, Liang, Li,
        ICLR 2020.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 5))
        >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
        >>> tuned = finetune(net, (x, (x[:, 0] > 0).long()), training=Training(steps=50))
        >>> tuned.predict(x).shape
        torch.Size([40, 2])
    """
    no_targets("recipe", recipe)
    recipe = Recipe(recipe) if isinstance(recipe, str) else recipe
    instance("recipe", recipe, Recipe, "the name of a recipe, or a linnet.Recipe")
    steps = filled(
        training,
        "linnet.finetune",
        learning_rate=None,
        weight_decay=WEIGHT_DECAY,
        batch_size=BATCH_SIZE,
        steps=None,
        epochs=None,
        momentum=0.5 if recipe.name == "gaf" and recipe.optimizer == "adam" else MOMENTUM,
        schedule="constant",
        clip=None,
    )
    run = checked_run(run, "linnet.finetune")
    seed = checked_seed("seed", seed)
    model, params, output = _split(model)
    device = device_of(model)
    _check_masks(model)
    examples = ExampleSet(data, device, model)
    assert steps.weight_decay is not None
    assert steps.batch_size is not None
    first = Trial(steps.learning_rate, steps.weight_decay, steps.batch_size, recipe.view)
    candidates = candidates_for(search, recipe, first)
    if run.keep == "best" and validation is None and search is None:
        raise InputError(
            'keep="best" without validation data',
            expected="data by which weights are compared",
            remedy="pass validation=(x, y), or leave keep= out",
        )
    kept = _outputs_to_keep(model, recipe, output, examples)
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    own = linear[-1].out_features if linear else None
    task = Task.of(examples, kept, recipe, own)
    call = Call(model, recipe, task, params, output, seed, steps, run)
    scored = None if validation is None else ExampleSet(validation, device, model)
    if scored is not None:
        task.check(scored)
    # whatever the caller has switched off. New layers draw from torch's own generator before they are set
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        return searched(call, (examples, scored), candidates)


def _split(model: Any) -> tuple[nn.Module, Selector, OutputAdapter]:
    """The network, and what a linearization of it says: which parameters vary, what its outputs are."""
    if not isinstance(model, Linearized):
        return model, None, None
    network, names = model.model, model.parameter_names
    every = len(names) == len(list(network.parameters()))
    return network, "all" if every else names, model.function.output


def _outputs_to_keep(
    model: nn.Module, recipe: Recipe, output: OutputAdapter, examples: ExampleSet
) -> int | None:
    """Number of outputs of a head that may be kept; ``None`` where there will be a new one."""
    made = recipe.head == "auto" and hasattr(model, RECORD)
    if recipe.pooling is not None or not (made or recipe.head == "keep"):
        return None
    x, _ = examples.batch(torch.arange(min(2, examples.n)))
    own = Functional(model, "all", output).check_runs(recipe.view.evaluation(x)).shape[1:]
    return own[0] if len(own) == 1 else None


def device_of(model: nn.Module) -> torch.device:
    """Where a network lives that can be trained."""
    require_module(model)
    first = next(model.parameters(), None)
    if first is None:
        raise ModelError(
            f"model ({type(model).__name__}) has no parameter",
            expected="a network with weights to train",
            remedy="pass the network that holds the weights",
        )
    return first.device


def _check_masks(model: nn.Module) -> None:
    """Raise if a part of a parameter is frozen, which a solve obeys and training does not."""
    masked = [name for name, mask in selected(model, "all").items() if mask is not None]
    if masked:
        raise ModelError(
            f"parameter {masked[0]!r} has entries that do not vary, by a hook or a mask",
            expected="parameters that are trained as a whole",
            remedy="linnet.fit(linnet.linearize(model), data) obeys hooks and masks",
        )


@dataclass(frozen=True)
class Task:
    """What the targets ask for."""

    outputs: int  # C
    classes: bool  # whether y are classes
    labels: Tensor  # y of all training examples
    notes: tuple[str, ...] = ()  # what is worth knowing of them

    @classmethod
    def of(cls, examples: ExampleSet, kept: int | None, recipe: Recipe, own: int | None) -> Task:
        """Read it off the targets; a head that is kept may have outputs for more classes."""
        y = tensor("y", examples.labels(), "classes or real targets")
        if y.is_floating_point() and recipe.loss == "cross-entropy":
            raise InputError(
                f'y has type {y.dtype} with loss="cross-entropy"',
                expected="integer classes (N,)",
                remedy='convert classes with y.long(), or pass loss="squared" for values',
            )
        targets = task_targets(y, torch.get_default_dtype())
        known = targets.classes is not None and targets.classes <= (kept or 0)
        said = () if known else doubts(y, targets, own)
        for line in said:
            warn(line)
        found = targets.values.shape[1]
        if targets.labels is None:
            return cls(found, False, y, said)
        outputs = max(found, kept or 0)
        empty = outputs - len(targets.labels.unique())
        notes = (f"{empty} of {outputs} classes have no training example",) if empty else ()
        return cls(outputs, True, y, (*said, *notes))

    def check(self, validation: ExampleSet) -> None:
        """Raise unless validation data are of the same kind: before the training, not after it."""
        y = validation.labels()
        if y.is_floating_point() == self.classes:
            raise InputError(
                f"y of the validation data has type {y.dtype}",
                expected="integer classes (N,)" if self.classes else f"float targets (N, {self.outputs})",
                remedy="convert y with y.long() or y.float(), as in the training data",
            )
        make_targets(y, self.outputs, varied=False)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of ``linnet.finetune``: all that stays the same from candidate to candidate."""

    model: nn.Module
    recipe: Recipe
    task: Task
    params: Selector = None  # which parameters vary
    output: OutputAdapter = None  # how to turn the network's result into a tensor
    seed: int = 0  # of everything random
    training: Training = field(default_factory=Training)  # with all values but the learning rate
    run: Run = field(default_factory=Run)

    @property
    def momentum(self) -> float:
        """Of SGD, or β₁ of Adam."""
        assert self.training.momentum is not None
        return self.training.momentum

    def optimization(self, rate: float, trial: Trial, n: int) -> Optimization:
        """The steps of a run on n examples."""
        given, b = self.training, min(trial.batch_size, n)
        steps = given.steps or max(FEWEST_STEPS, math.ceil(EPOCHS * n / b))
        if given.epochs is not None:
            steps = math.ceil(given.epochs * n / b)
        schedule, recipe = given.schedule or "constant", self.recipe
        return Optimization(
            rate, steps, b, self.momentum, schedule, given.clip, recipe.optimizer, recipe.training_mode
        )

    def objective(self, weight_decay: float) -> Objective:
        """The objective at a weight decay."""
        return Objective(self.recipe.loss, self.task.outputs, self.recipe.scale, weight_decay)

    def settings(self, trial: Trial, values: dict[str, Any], new_head: bool) -> FinetunedSettings:
        """The settings of a result."""
        recipe, task = self.recipe, self.task
        parts = {
            "loss": recipe.loss,
            "activation": "leaky-relu" if recipe.leaky else "relu",
            "slope": recipe.slope,
            "preconditioner": recipe.preconditioner,
            "optimizer": recipe.optimizer,
            "scale": recipe.scale,
            "head": recipe.head,
            "new_head": new_head,
            "pooling": None if recipe.pooling is None else asdict(recipe.pooling),
            "seed": self.seed,
        }
        return FinetunedSettings(recipe.name, parts, values, trial.augmentation, task.outputs, task.classes)


# -- the network made ready ------------------------------------------------------------------------


class Prepared:
    """A network ready to be trained, and what its runs share."""

    def __init__(self, call: Call, examples: ExampleSet, view: Augmentation) -> None:
        self.call, self.examples, self.view = call, examples, view
        self.notes: list[str] = []  # what was done, one sentence each
        model, recipe = call.model, call.recipe
        network = without_wrapper(model)
        if recipe.leaky:
            network = leaky_relu(network, recipe.slope)
            self.notes += _surgery_notes(network, len(report(network).replaced), recipe.slope)
        before, network = network, _with_head(network, call, examples, view, self.notes)
        self.new_head = network is not before
        self.module = self._chosen(network)

    def _chosen(self, network: nn.Module) -> nn.Module:
        """A ``Linearized``, or the network itself, in which what is trained requires gradients."""
        call, recipe = self.call, self.call.recipe
        wanted = _selected(call.params, call.model)
        if not recipe.linear:
            plain = copy.deepcopy(network) if network is call.model else network
            chosen = set(select_parameters(plain, wanted))
            for name, p in plain.named_parameters():
                p.requires_grad_(name in chosen)
            return plain
        if recipe.last_layer:
            last = last_linear(network)[0]
            wanted = [f"{last}.{name}" for name, _ in network.get_submodule(last).named_parameters()]
        lin = linearize(network, wanted, call.output)
        self.notes.append(f"linearized in {lin.space.dim} parameters of {len(lin.parameter_names)} tensors")
        return lin

    def fresh(self) -> nn.Module:
        """The module as before any training."""
        if isinstance(self.module, Linearized):
            return Linearized(self.module.function)
        return copy.deepcopy(self.module)

    @cached_property
    def curvature(self) -> Curvature:
        """The Gauss-Newton matrix of the frozen problem."""
        assert isinstance(self.module, Linearized)
        return frozen_curvature(Linearized(self.module.function), self.call, self.examples, self.view)

    @cached_property
    def own_rate(self) -> float:
        """Half of 1/λ_max of the Hessian at the start."""
        return 0.5 / max(self._largest(self.fresh()), 1e-30)

    def preconditioner(self, module: Linearized, decay: float, notes: list[str]) -> KroneckerPreconditioner:
        """A, whose gain makes the largest eigenvalue of A JᵀJ/N 1, as an exact inverse would have it."""
        damping = self.call.recipe.damping
        if damping is None:
            damping = default_damping(self.curvature, 1 / self.curvature.made.examples)
        # the objective's Hessian is JᵀJ/N + λI
        before = KroneckerPreconditioner(self.curvature, module.delta, damping + decay)
        notes.append(f"gradients preconditioned by {self.curvature!r}, damping {before.damping:.3g}")
        largest = max(self._largest(module, before), 1.0)
        before.gain = 1 / largest
        notes.append(f"preconditioner divided by {largest:.3g}, the largest eigenvalue of A JᵀJ/N")
        return before

    def rate(self, trial: Trial, preconditioned: bool, notes: list[str]) -> float:
        """The learning rate."""
        recipe, given = self.call.recipe, trial.learning_rate
        if preconditioned:
            b = min(trial.batch_size, self.examples.n)
            return given or EFFECTIVE_RATE * (1 - self.call.momentum) * b
        if given is not None or recipe.optimizer == "adam":
            return given or ADAM_RATE
        if recipe.loss == "cross-entropy":
            return PLAIN_RATE
        notes.append(f"learning rate {self.own_rate:.3g}: half of 1/λ_max of the Hessian at the start")
        return self.own_rate

    def _largest(self, module: nn.Module, before: KroneckerPreconditioner | None = None) -> float:
        """The largest eigenvalue of A JᵀJ/N."""
        lin = module if isinstance(module, Linearized) else linearize(module, "all", self.call.output)
        some = torch.arange(min(PROBED, self.examples.n))
        return largest_eigenvalue(lin, self.view(self.examples.batch(some)[0]), before)


def _surgery_notes(network: nn.Module, found: int, slope: float) -> list[str]:
    """Remarks on replaced activations and the normalization behind them."""
    if not found:
        return ["the network has no ReLU to replace"]
    notes = [f"ReLU replaced by Leaky ReLU of slope {slope:g} in {found} place(s)"]
    if found > UNHELD and not any(isinstance(module, NORMALIZATIONS) for module in network.modules()):
        notes.append(
            "no normalization layers: Leaky ReLU changes such a network most; compare activation='relu', or "
            "train it first with linnet.surgery.recover"
        )
    return notes


def _selected(params: Selector, model: nn.Module) -> Selector:
    """All parameters by default: a network may come frozen; where only a part of it is, that stays so."""
    if isinstance(params, nn.Module):
        return select_parameters(model, params)  # by name: what is trained is a copy
    free = {p.requires_grad for p in model.parameters()}
    return "all" if params is None and len(free) == 1 else params


def _with_head(
    network: nn.Module, call: Call, examples: ExampleSet, view: Augmentation, notes: list[str]
) -> nn.Module:
    """The network with a last layer for the task."""
    recipe, outputs = call.recipe, call.task.outputs
    probe, y = examples.batch(torch.arange(min(2, examples.n)))
    own = Functional(network, "all", call.output).check_runs(view(probe)).shape[1:]
    current = own.numel()
    head = recipe.head
    if head == "auto":
        fitted = hasattr(network, RECORD) and current == outputs and recipe.pooling is None
        head = "keep" if fitted else "probe"
    if head == "keep" and current != outputs:
        raise ModelError(
            f'head="keep", but the network has {current} outputs',
            expected=f"{outputs} outputs, as the data have",
            remedy='leave head= out for a linear probe, or pass head="random"',
        )
    if head == "keep":
        check_arrangement(y, own)
        notes.append("the network's own head was kept")
        return network
    generator = torch.Generator().manual_seed(call.seed)
    scale = recipe.scale if recipe.loss == "squared" else LOGITS
    init: str | Probe = Probe(scale=scale) if head == "probe" else head
    data = gathered(examples, view) if head == "probe" or recipe.pooling else None
    if recipe.pooling is not None:
        made = with_bilinear_head(network, outputs, data, recipe.pooling, init=init, seed=generator)
        notes.append("global average pooling replaced by square-root bilinear pooling")
    else:
        made = with_head(network, outputs, init, data, seed=generator)
    words = {
        "probe": f"a linear probe of targets of scale {scale:g}, its ridge by leave-one-out",
        "random": "random",
        "zero": "zero",
    }
    notes.append(f"new head for {outputs} outputs: {words[head]}")
    return made


def gathered(examples: ExampleSet, view: Augmentation) -> tuple[Inputs, Tensor]:
    """All examples in memory, as they are predicted, (x, y)."""
    parts = [(view(x), y) for x, y in examples.batches()]
    return concatenate([x for x, _ in parts]), torch.cat([y for _, y in parts])


class _Viewed(Dataset[Any]):
    """Inputs one at a time, as they are predicted, with a target that says nothing."""

    def __init__(self, examples: ExampleSet, view: Augmentation, target: Tensor) -> None:
        self.examples, self.view, self.target = examples, view, target

    def __len__(self) -> int:
        return self.examples.n

    def __getitem__(self, index: int) -> Any:
        x = self.view(self.examples.batch(torch.tensor([index]))[0])
        return map_tensors(lambda t: t[0], x), self.target


def frozen_curvature(lin: Linearized, call: Call, examples: ExampleSet, view: Augmentation) -> Curvature:
    """The Gauss-Newton matrix of the frozen problem."""
    own = lin.function.output_shape(view(examples.batch(torch.arange(1))[0]))
    expectation = "exact" if own.numel() <= EXACT_COLUMNS else MonteCarlo(seed=call.seed)
    squared = call.recipe.loss == "squared"
    # neither curvature depends on the targets; with them, inputs in a tuple are not taken for (x, y)
    blank = torch.zeros(own) if squared else torch.tensor(0)
    data: Any = _Viewed(examples, view, blank)
    if examples.in_memory:
        data = gathered(examples, view)[0], blank.expand(examples.n, *blank.shape).contiguous()
    made = curvature(
        lin,
        data,
        Gaussian() if squared else Categorical(),
        call.recipe.preconditioner,
        expectation,
        passes=Passes(memory=call.run.memory, shard=None),
    )
    assert isinstance(made, Curvature)
    return made


@torch.no_grad()
def largest_eigenvalue(lin: Linearized, x: Inputs, before: KroneckerPreconditioner | None = None) -> float:
    """Of A JᵀJ/N, by power iteration; A is the preconditioner, if there is one."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(lin.base(x).shape, generator=generator, dtype=torch.float64).to(lin.function.dtype)
    u = u.to(lin.function.device)

    def product(u: Tensor) -> Tensor:
        """J A Jᵀ u."""
        v = lin.vjp(x, u, like="flat")
        assert isinstance(v, Tensor)
        return lin.jvp(x, v if before is None else before.multiply(v))

    return power_method(product, u / u.norm(), steps=12) / u.shape[0]


# -- runs ------------------------------------------------------------------------------------------


class Runs:
    """Runs of one recipe on one set of examples."""

    def __init__(self, call: Call, examples: ExampleSet, validation: ExampleSet | None) -> None:
        self.call, self.examples, self.validation = call, examples, validation
        self._prepared: dict[Augmentation, Prepared] = {}

    def result(
        self, trial: Trial, folder: str, tried: list[dict[str, Any]] | None = None, retries: int = 0
    ) -> Finetuned:
        """Train with one set of values; if the loss rises, restart with a third of the rate."""
        call, view = self.call, trial.augmentation.evaluation
        if view not in self._prepared:
            self._prepared[view] = Prepared(call, self.examples, view)
        ready, notes = self._prepared[view], list[str]()

        def trainer(rate: float | None, folder: str) -> Trainer:
            notes[:] = [*call.task.notes, *ready.notes]
            return self._trainer(ready, replace(trial, learning_rate=rate), folder, notes)

        made, rose = without_rise(trainer, trial.learning_rate, folder, retries)
        scores = made.score(self.validation) if self.validation is not None else {}
        values = _values(made)
        if call.recipe.linear and call.recipe.loss == "squared" and not trial.augmentation.is_random:
            notes.append("the optimum of this objective has a closed form: linnet.fit")
        notes += [f"restarted with learning_rate={r:g} / 3, because the loss went up again" for r in rose]
        rate = rose[0] / 3 if rose else trial.learning_rate
        entry = {**asdict(replace(trial, learning_rate=rate)), **values, "scores": scores, "taken": True}
        return Finetuned(
            made.module.eval(),
            call.settings(trial, values, ready.new_head),
            made.history,
            tried or [entry],
            tuple(notes),
            output=call.output,
            probe=made_up(self.examples.batch(torch.zeros(1, dtype=torch.long))[0]),
        )

    def _trainer(self, ready: Prepared, trial: Trial, folder: str, notes: list[str]) -> Trainer:
        """The trainer of one set of values: a folder of its own, its name beside the numbers."""
        call, module, before = self.call, ready.fresh(), None
        if call.recipe.preconditioner != "none":
            assert isinstance(module, Linearized)
            before = ready.preconditioner(module, trial.weight_decay, notes)
        rate = ready.rate(trial, before is not None, notes)
        optimization = call.optimization(rate, trial, self.examples.n)
        place, log = call.run.checkpoint, call.run.log
        if log is not None and folder.startswith("candidate-"):
            log = _numbered(log, int(folder.removeprefix("candidate-")))
        run = replace(call.run, checkpoint=None if place is None else Path(place) / folder, log=log)
        objective = call.objective(trial.weight_decay)
        trainer = Trainer(module, self.examples, objective, optimization, call.seed, run)
        trainer.description = f"fine-tuning by {call.recipe.name} {folder}".strip()
        trainer.augmentation, trainer.preconditioner = trial.augmentation, before
        trainer.output = None if call.recipe.linear else call.output
        trainer.validation = self.validation
        return trainer


def searched(call: Call, data: tuple[ExampleSet, ExampleSet | None], candidates: list[Trial]) -> Finetuned:
    """Try every candidate, and keep the best."""
    examples, validation = data
    if len(candidates) == 1:
        (only,) = candidates
        retries = RETRIES if only.learning_rate is None else 0
        return _warned(Runs(call, examples, validation).result(only, "", retries=retries))
    train, chosen_by = examples, validation
    if validation is None:
        rows, kept = held_out_split(call.task.labels, call.seed)
        train, chosen_by = examples.part(rows), examples.part(kept)
    runs = Runs(call, train, chosen_by)
    tried: list[dict[str, Any]] = []
    best, best_at = None, -1
    for i, trial in enumerate(candidates):
        try:
            made = runs.result(trial, f"candidate-{i:02d}")
        except NumericalError as error:
            tried.append({**asdict(trial), "scores": {}, "failed": error.what})
            continue
        tried.append({**asdict(trial), **made.settings.values, "scores": made.validation})
        if best is None or _merit(made) > _merit(best):
            best, best_at = made, i
    if best is None:
        raise NumericalError(
            f"the loss became infinite with all {len(candidates)} sets of values",
            expected="at least one that trains",
            remedy="search smaller learning rates, or leave search= out",
        )
    for i, entry in enumerate(tried):
        entry["taken"] = i == best_at
    if validation is None:
        final = Runs(call, examples, None).result(candidates[best_at], "final", tried, RETRIES)
        note = "values chosen on a fifth of each class held out, then trained on everything"
        return _warned(replace(final, notes=(*final.notes, note)))
    note = f"best of {len(candidates)} sets of values"
    return _warned(replace(best, candidates=tried, notes=(*best.notes, note)))


def _values(trainer: Trainer) -> dict[str, Any]:
    """The values that were taken."""
    steps, before = trainer.optimization, trainer.preconditioner
    return {
        "learning_rate": steps.learning_rate,
        "effective_learning_rate": effective_rate(steps.learning_rate, steps.momentum, steps.batch_size),
        "weight_decay": trainer.objective.weight_decay,
        "momentum": steps.momentum,
        "batch_size": steps.batch_size,
        "steps": steps.steps,
        "damping": None if before is None else float(before.damping),
        "diverged": trainer.curve.rises,
    }


def _merit(made: Finetuned) -> tuple[bool, float]:
    """The merit of a candidate: the held-out score, of those first whose loss stayed down."""
    return not made.diverged, rank(made.validation)


def _warned(made: Finetuned) -> Finetuned:
    """The result; a warning if it diverged."""
    if made.diverged:
        warn_of_large_steps(made.settings.values["learning_rate"], given=True)
    return made


def _numbered(log: Log, candidate: int) -> Log:
    """A logger that says which candidate it hears of."""
    return lambda values, step: log({**values, "candidate": candidate}, step)
