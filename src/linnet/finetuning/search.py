"""What ``linnet.finetune`` does: a network is made ready, trained with each set of values, the best is kept.

The preconditioner is A = (G/N + (λ + τ) I)⁻¹ of the frozen problem, whose curvature is computed once and
stays as it is all through training.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from linnet.curvatures import MonteCarlo, Passes
from linnet.curvatures.build import curvature
from linnet.curvatures.curvature import Curvature, default_damping
from linnet.distributed import apart
from linnet.errors import InputError, ModelError, NumericalError
from linnet.finetuning.augment import Augmentation
from linnet.finetuning.bilinear import with_bilinear_head
from linnet.finetuning.finetuned import Finetuned, FinetunedSettings
from linnet.finetuning.recipes import (
    ADAM_RATE,
    EFFECTIVE_RATE,
    PLAIN_RATE,
    WEIGHT_DECAY,
    ClosedForm,
    Recipe,
    Trial,
    effective_rate,
)
from linnet.finetuning.trainer import (
    ExampleSet,
    Objective,
    Optimization,
    Run,
    Trainer,
    rank,
    warn_of_large_steps,
)
from linnet.fitting.descent import held_out_split
from linnet.fitting.fit import fit
from linnet.fitting.head import Probe, with_head
from linnet.fitting.last_layer import RECORD, last_linear
from linnet.likelihoods import Categorical, Gaussian
from linnet.linear.targets import OneHot, check_arrangement, doubts, make_targets, task_targets
from linnet.optim.preconditioner import KroneckerPreconditioner
from linnet.params import tensor, warn
from linnet.progress import Log
from linnet.tangent.batch import Inputs, concatenate, made_up
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.linearized import Linearized, linearize
from linnet.tangent.selection import Selector, select_parameters
from linnet.tangent.surgery import leaky_relu, report
from linnet.training import Training
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

    def optimization(self, rate: float, candidate: Trial, n: int) -> Optimization:
        """The steps of a run on n examples."""
        given, b = self.training, min(candidate.batch_size, n)
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

    def settings(self, candidate: Trial, values: dict[str, Any], new_head: bool) -> FinetunedSettings:
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
        return FinetunedSettings(
            recipe.name, parts, values, candidate.augmentation, task.outputs, task.classes
        )


# -- the network made ready ------------------------------------------------------------------------


@dataclass(eq=False)
class Prepared:
    """A network ready to be trained, and what its runs share."""

    module: nn.Module  # a ``Linearized``, or the network itself
    notes: list[str]  # what was done, one sentence each
    new_head: bool  # whether the head was replaced
    curvature: Curvature | None = None  # of the frozen problem, once it is needed
    top: float | None = None  # the largest eigenvalue of JᵀJ/N, once it is needed

    def fresh(self) -> nn.Module:
        """The module as before any training."""
        if isinstance(self.module, Linearized):
            return Linearized(self.module.function)
        return copy.deepcopy(self.module)


def prepare(call: Call, examples: ExampleSet, view: Augmentation) -> Prepared:
    """Surgery, a new head, linearization."""
    model, recipe, notes = call.model, call.recipe, list[str]()
    network: nn.Module = getattr(model, "_orig_mod", model)
    if recipe.leaky:
        network = leaky_relu(network, recipe.slope)
        notes += _surgery_notes(network, len(report(network).replaced), recipe.slope)
    before, network = network, _with_head(network, call, examples, view, notes)
    wanted = _selected(call.params, model)
    if not recipe.linear:
        plain = copy.deepcopy(network) if network is model else network
        chosen = set(select_parameters(plain, wanted))
        for name, p in plain.named_parameters():
            p.requires_grad_(name in chosen)
        return Prepared(plain, notes, network is not before)
    if recipe.last_layer:
        last = last_linear(network)[0]
        wanted = [f"{last}.{name}" for name, _ in network.get_submodule(last).named_parameters()]
    lin = linearize(network, wanted, call.output)
    notes.append(f"linearized in {lin.space.dim} parameters of {len(lin.parameter_names)} tensors")
    return Prepared(lin, notes, network is not before)


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
def largest_eigenvalue(
    lin: Linearized, x: Inputs, before: KroneckerPreconditioner | None = None, steps: int = 12
) -> float:
    """Of A JᵀJ/N, by power iteration; A is the preconditioner, if there is one."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(lin.base(x).shape, generator=generator, dtype=torch.float64).to(lin.function.dtype)
    u, value = u.to(lin.function.device), 0.0
    for _ in range(steps):
        v = lin.vjp(x, u / u.norm(), like="flat")
        assert isinstance(v, Tensor)
        u = lin.jvp(x, v if before is None else before.multiply(v))  # J A Jᵀ u
        value = float(u.norm())
        if value == 0:
            break
    return value / u.shape[0]


# -- runs ------------------------------------------------------------------------------------------


class Runs:
    """Runs of one recipe on one set of examples."""

    def __init__(self, call: Call, examples: ExampleSet, validation: ExampleSet | None) -> None:
        self.call, self.examples, self.validation = call, examples, validation
        self._prepared: dict[Augmentation, Prepared] = {}

    def prepared(self, candidate: Trial) -> Prepared:
        """The network made ready for a candidate's images."""
        view = candidate.augmentation.evaluation
        if view not in self._prepared:
            self._prepared[view] = prepare(self.call, self.examples, view)
        return self._prepared[view]

    def result(
        self,
        candidate: Trial,
        folder: str,
        tried: list[dict[str, Any]] | None = None,
        retries: int = 0,
    ) -> Finetuned:
        """Train with one set of values; if the loss rises, restart with a third of the rate."""
        ready = self.prepared(candidate)
        notes = [*self.call.task.notes, *ready.notes]
        trainer = self._trainer(ready, candidate, folder, notes)
        rate = trainer.optimization.learning_rate
        try:
            trainer.run()
            again = retries > 0 and trainer.curve.rises
        except NumericalError:
            if not retries:
                raise
            again = True
        if again:
            smaller = replace(candidate, learning_rate=rate / 3)
            made = self.result(smaller, f"{folder}-slower".removeprefix("-"), tried, retries - 1)
            note = f"restarted with learning_rate={rate:g} / 3, because the loss went up again"
            return replace(made, notes=(*made.notes, note))
        scores = trainer.score(trainer.validation) if trainer.validation is not None else {}
        values = _values(trainer)
        recipe = self.call.recipe
        if recipe.linear and recipe.loss == "squared" and not candidate.augmentation.is_random:
            notes.append('the optimum of this objective has a closed form: training="closed-form"')
        return Finetuned(
            trainer.module.eval(),
            self.call.settings(candidate, values, ready.new_head),
            trainer.history,
            tried or [{**asdict(candidate), **values, "scores": scores, "taken": True}],
            tuple(notes),
            output=self.call.output,
            probe=made_up(self.examples.batch(torch.zeros(1, dtype=torch.long))[0]),
        )

    def _trainer(self, ready: Prepared, candidate: Trial, folder: str, notes: list[str]) -> Trainer:
        """The trainer of one set of values."""
        call, module, before = self.call, ready.fresh(), None
        if call.recipe.preconditioner != "none":
            assert isinstance(module, Linearized)
            before = self._preconditioner(ready, module, candidate, notes)
        rate = self._rate(ready, before, candidate, notes)
        optimization = call.optimization(rate, candidate, self.examples.n)
        objective = call.objective(candidate.weight_decay)
        trainer = Trainer(module, self.examples, objective, optimization, call.seed, self._monitor(folder))
        trainer.description = f"fine-tuning by {call.recipe.name} {folder}".strip()
        trainer.augmentation, trainer.preconditioner = candidate.augmentation, before
        trainer.output = None if call.recipe.linear else call.output
        trainer.validation = self.validation
        return trainer

    def _preconditioner(
        self, ready: Prepared, module: Linearized, candidate: Trial, notes: list[str]
    ) -> KroneckerPreconditioner:
        """A, whose gain makes the largest eigenvalue of A JᵀJ/N 1, as an exact inverse would have it."""
        view, damping = candidate.augmentation.evaluation, self.call.recipe.damping
        if ready.curvature is None:
            ready.curvature = frozen_curvature(module, self.call, self.examples, view)
        if damping is None:
            damping = default_damping(ready.curvature, 1 / ready.curvature.made.examples)
        # the objective's Hessian is JᵀJ/N + λI
        before = KroneckerPreconditioner(ready.curvature, module.delta, damping + candidate.weight_decay)
        notes.append(f"gradients preconditioned by {ready.curvature!r}, damping {before.damping:.3g}")
        largest = max(self._top(module, view, before), 1.0)
        before.gain = 1 / largest
        notes.append(f"preconditioner divided by {largest:.3g}, the largest eigenvalue of A JᵀJ/N")
        return before

    def _rate(
        self,
        ready: Prepared,
        before: KroneckerPreconditioner | None,
        candidate: Trial,
        notes: list[str],
    ) -> float:
        """The learning rate."""
        recipe, given = self.call.recipe, candidate.learning_rate
        if before is not None:
            b = min(candidate.batch_size, self.examples.n)
            return given or EFFECTIVE_RATE * (1 - self.call.momentum) * b
        if given is not None or recipe.optimizer == "adam":
            return given or ADAM_RATE
        if recipe.loss == "cross-entropy":
            return PLAIN_RATE
        if ready.top is None:
            ready.top = self._top(ready.fresh(), candidate.augmentation.evaluation)
        rate = 0.5 / max(ready.top, 1e-30)
        notes.append(f"learning rate {rate:.3g}: half of 1/λ_max of the Hessian at the start")
        return rate

    def _top(
        self, module: nn.Module, view: Augmentation, before: KroneckerPreconditioner | None = None
    ) -> float:
        """The largest eigenvalue of A JᵀJ/N."""
        lin = module if self.call.recipe.linear else linearize(module, "all", self.call.output)
        assert isinstance(lin, Linearized)
        some = torch.arange(min(PROBED, self.examples.n))
        return largest_eigenvalue(lin, view(self.examples.batch(some)[0]), before)

    def _monitor(self, folder: str) -> Run:
        """Record of one run: a folder of its own, its name beside the numbers."""
        whole = self.call.run
        place = None if whole.checkpoint is None else Path(whole.checkpoint) / folder
        log = whole.log
        if log is not None and folder.startswith("candidate-"):
            log = _numbered(log, int(folder.removeprefix("candidate-")))
        return replace(whole, checkpoint=place, log=log)


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
    for i, candidate in enumerate(candidates):
        try:
            made = runs.result(candidate, f"candidate-{i:02d}")
        except NumericalError as error:
            tried.append({**asdict(candidate), "scores": {}, "failed": error.what})
            continue
        tried.append({**asdict(candidate), **made.settings.values, "scores": made.validation})
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


def exact(
    call: Call,
    data: tuple[ExampleSet, ExampleSet | None],
    candidate: Trial,
    closed: ClosedForm,
) -> Finetuned:
    """The optimum of the same objective in closed form."""
    (examples, validation), recipe = data, call.recipe
    ready, view = Runs(call, examples, validation).prepared(candidate), candidate.augmentation.evaluation
    assert isinstance(ready.module, Linearized)
    decay = WEIGHT_DECAY if closed.weight_decay is None else closed.weight_decay
    with apart():  # like every fine-tuning
        solved = fit(
            ready.module,
            gathered(examples, view),
            recipe.loss,
            ridge=examples.n * decay if closed.ridge is None else closed.ridge,
            targets=OneHot(recipe.scale) if recipe.loss == "squared" else None,
            memory=call.run.memory,
        )
    decay = solved.ridge / examples.n
    trainer = Trainer(solved.module, examples, call.objective(decay), Optimization(PLAIN_RATE))
    trainer.augmentation = view
    scores = trainer.score(validation) if validation is not None else {}
    values = {"ridge": solved.ridge, "weight_decay": decay, "solver": solved.solver}
    notes = (*call.task.notes, *ready.notes, f"optimum in closed form at ridge ρ = {solved.ridge:.3g}")
    return Finetuned(
        solved.module,
        call.settings(candidate, values, ready.new_head),
        [{"step": 0.0, **trainer.score(examples)}],
        [{**values, "scores": scores, "taken": True}],
        notes,
        solved,
        call.output,
        made_up(examples.batch(torch.zeros(1, dtype=torch.long))[0]),
    )


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
        warn_of_large_steps(made.settings.values["learning_rate"])
    return made


def _numbered(log: Log, candidate: int) -> Log:
    """A logger that says which candidate it hears of."""
    return lambda values, step: log({**values, "candidate": candidate}, step)
