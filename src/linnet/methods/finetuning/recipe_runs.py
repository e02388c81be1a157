"""Runs of a recipe: one set of values, or a search among several; or the optimum in closed form."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linnet.curvatures.curvature import Curvature
from linnet.errors import DataError, InputError, NumericalError
from linnet.methods.finetuning.augment import Augmentation
from linnet.methods.finetuning.course import Course, Log, Objective, Optimization, Reporting
from linnet.methods.finetuning.examples import Examples
from linnet.methods.finetuning.finetuned import Finetuned, Settings
from linnet.methods.finetuning.prepared import (
    HeadProblem,
    Prepared,
    Shaping,
    frozen_curvature,
    gathered,
    head_problem,
    largest_eigenvalue,
    prepare,
)
from linnet.methods.finetuning.recipes import (
    ADAM_RATE,
    EFFECTIVE_RATE,
    PLAIN_RATE,
    Candidate,
    Recipe,
    effective_rate,
)
from linnet.methods.finetuning.trainer import Trainer, rank
from linnet.methods.fitting.arguments import check_positive
from linnet.methods.fitting.baselines import _held_out
from linnet.methods.fitting.fit import fit
from linnet.methods.optim.preconditioner import KroneckerPreconditioner, default_damping
from linnet.tangent.linearized import Linearized, linearize
from linnet.tangent.selection import select_parameters

EPOCHS, FEWEST_STEPS = 30, 300
PROBED = 256  # examples that a learning rate is estimated on


@dataclass(frozen=True)
class Problem:
    """The task: number of outputs, and whether they are classes.

    Args:
        outputs: C.
        classes: Whether y are classes.
        labels: y of all training examples.
        notes: What is worth knowing of them.
    """

    outputs: int
    classes: bool
    labels: Tensor
    notes: tuple[str, ...]

    @classmethod
    def of(cls, examples: Examples, classes: int | None, recipe: Recipe) -> Problem:
        """Read it off the targets."""
        y = examples.labels()
        if y.is_floating_point():
            if recipe.loss == "cross-entropy":
                raise InputError(
                    f'y has type {y.dtype} with loss="cross-entropy"',
                    expected="integer classes (N,)",
                    remedy='convert classes with y.long(), or pass loss="squared" for values',
                )
            return cls(y.reshape(len(y), -1).shape[1], False, y, ())
        found = int(y.max()) + 1
        if classes is not None and (isinstance(classes, bool) or classes < found):
            raise InputError(
                f"classes={classes!r}, but y goes up to {found - 1}",
                expected=f"at least {found}",
                remedy="leave classes= out, or check the labels",
            )
        if int(y.min()) < 0 or (y == y.flatten()[0]).all():
            raise DataError(
                f"y holds {'negative labels' if int(y.min()) < 0 else 'one class only'}",
                expected="labels 0 to C − 1 of at least two classes",
                remedy="check the labels and the split",
            )
        outputs = classes or found
        empty = outputs - len(y.unique())
        notes = (f"{empty} of {outputs} classes have no training example",) if empty else ()
        return cls(outputs, True, y, notes)


@dataclass(frozen=True)
class Plan:
    """All that stays the same from candidate to candidate."""

    recipe: Recipe
    shaping: Shaping
    problem: Problem
    optimization: Optimization
    course: Course
    options: dict[str, Any]
    reporting: Reporting

    def settings(self, method: str, candidate: Candidate, values: dict[str, Any], new_head: bool) -> Settings:
        """What decided a result."""
        recipe, shaping = self.recipe, self.shaping
        parts = {
            "loss": recipe.loss,
            "activation": "leaky-relu" if recipe.leaky else "relu",
            "slope": shaping.slope,
            "preconditioner": recipe.preconditioner,
            "optimizer": recipe.optimizer,
            "scale": shaping.scale,
            "head": shaping.head,
            "new_head": new_head,
            "bilinear": shaping.bilinear if recipe.bilinear else None,
            "seed": shaping.seed,
        }
        augmentation, problem = candidate.augmentation, self.problem
        return Settings(method, parts, values, augmentation, problem.outputs, problem.classes)


def searched(
    plan: Plan,
    model: nn.Module,
    method: str,
    data: tuple[Examples, Examples | None],
    candidates: list[Candidate],
) -> Finetuned:
    """Try every candidate, and keep the best.

    Args:
        plan: What stays the same.
        model: The pretrained network.
        method: Its name.
        data: Training examples, and examples to choose by.
        candidates: The values to try.

    Returns:
        The best; trained on everything if the examples to choose by were held out of the training examples.

    Raises:
        NumericalError: If no candidate trains.
    """
    examples, held = data
    if len(candidates) == 1:
        return _Run(plan, model, method, examples, held).result(candidates[0], "")
    train, chosen_by = examples, held
    if held is None:
        rows, kept = _held_out(plan.problem.labels, plan.shaping.seed)
        train, chosen_by = examples.part(rows), examples.part(kept)
    run = _Run(plan, model, method, train, chosen_by)
    tried: list[dict[str, Any]] = []
    best, best_at = None, -1
    for i, candidate in enumerate(candidates):
        try:
            made = run.result(candidate, f"candidate-{i:02d}")
        except NumericalError as error:
            tried.append({**asdict(candidate), "scores": {}, "failed": error.what})
            continue
        tried.append({**asdict(candidate), **made.settings.values, "scores": made.validation})
        if best is None or rank(made.validation) > rank(best.validation):
            best, best_at = made, i
    if best is None:
        raise NumericalError(
            f"the loss became infinite with all {len(candidates)} sets of values",
            expected="at least one that trains",
            remedy="search smaller learning rates, or leave search= out",
        )
    for i, entry in enumerate(tried):
        entry["taken"] = i == best_at
    if held is None:
        final = _Run(plan, model, method, examples, None).result(candidates[best_at], "final", tried)
        note = "values chosen on a fifth of each class held out, then trained on everything"
        return replace(final, notes=(*final.notes, note))
    return replace(best, candidates=tried, notes=(*best.notes, f"best of {len(candidates)} sets of values"))


_Key = tuple[Augmentation, tuple[str, ...]]


def _key(module: nn.Module, candidate: Candidate) -> _Key:
    """What a curvature depends on: how images are seen, and which parameters vary."""
    return candidate.augmentation.evaluation, tuple(name for name, _ in module.named_parameters())


class _Run:
    """Runs of one recipe on one set of examples; what they share is computed once.

    Args:
        plan: What stays the same.
        model: The pretrained network.
        method: Its name.
        examples: Training examples.
        held: Examples to score on.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, method: str, examples: Examples, held: Examples | None
    ) -> None:
        self.plan, self.model, self.method = plan, model, method
        self.examples, self.held = examples, held
        self._ready: dict[Augmentation, Prepared] = {}
        self._curvatures: dict[_Key, Curvature] = {}
        self._stable: dict[_Key, float] = {}
        self._small: dict[Augmentation, HeadProblem | None] = {}

    def ready(self, candidate: Candidate) -> Prepared:
        """The network made ready for a candidate's images."""
        view = candidate.augmentation.evaluation
        if view not in self._ready:
            plan = self.plan
            self._ready[view] = prepare(
                self.model, plan.recipe, plan.shaping, self.examples, view, plan.problem.outputs
            )
        return self._ready[view]

    def result(
        self, candidate: Candidate, folder: str, tried: list[dict[str, Any]] | None = None
    ) -> Finetuned:
        """Train with one set of values."""
        plan, ready = self.plan, self.ready(candidate)
        if candidate.augmentation not in self._small:
            self._small[candidate.augmentation] = head_problem(ready, self.examples, candidate.augmentation)
        small = self._small[candidate.augmentation]
        notes = [*plan.problem.notes, *ready.notes]
        trainer = self._trainer(ready, small, candidate, folder, notes)
        state = trainer.run()
        scores = trainer.score(trainer.validation) if trainer.validation is not None else {}
        module = trainer.module
        if small:
            module = ready.fresh()
            assert isinstance(module, Linearized)
            small.carry(trainer.module, module)
        values = self._values(trainer, candidate)
        if plan.recipe.linear and plan.recipe.loss == "squared" and not candidate.augmentation.is_random:
            notes.append('the optimum of this objective has a closed form: solver="exact"')
        settings = plan.settings(self.method, candidate, values, ready.new_head)
        entries = tried or [{**asdict(candidate), **values, "scores": scores, "taken": True}]
        return Finetuned(
            module.eval(), settings, state.history, entries, tuple(notes), output=plan.shaping.output
        )

    def _trainer(
        self,
        ready: Prepared,
        small: HeadProblem | None,
        candidate: Candidate,
        folder: str,
        notes: list[str],
    ) -> Trainer:
        """The trainer of one set of values."""
        plan = self.plan
        module = Linearized(small.lin.function) if small else ready.fresh()
        if not plan.recipe.linear:
            chosen = set(select_parameters(module, plan.shaping.params))
            for name, p in module.named_parameters():
                p.requires_grad_(name in chosen)
        examples = small.features(self.examples) if small else self.examples
        crop = Augmentation() if small else candidate.augmentation
        before, rate = self._rate(module, examples, crop, candidate, notes)
        n, b = self.examples.n, min(candidate.batch_size, self.examples.n)
        steps = plan.options["steps"] or max(FEWEST_STEPS, math.ceil(EPOCHS * n / b))
        every = plan.options["evaluate_every"] or max(1, math.ceil(n / b))
        trainer = Trainer(
            module,
            examples,
            Objective(plan.recipe.loss, plan.problem.outputs, plan.shaping.scale, candidate.weight_decay),
            replace(plan.optimization, learning_rate=rate),
            replace(plan.course, steps=steps, batch_size=candidate.batch_size, evaluate_every=every),
            self._reporting(folder),
        )
        trainer.augmentation, trainer.preconditioner = crop, before
        trainer.output = None if plan.recipe.linear else plan.shaping.output
        if self.held is not None:
            trainer.validation = small.features(self.held) if small else self.held
        return trainer

    def _rate(
        self,
        module: nn.Module,
        examples: Examples,
        crop: Augmentation,
        candidate: Candidate,
        notes: list[str],
    ) -> tuple[KroneckerPreconditioner | None, float]:
        """The preconditioner, and the learning rate."""
        recipe, given = self.plan.recipe, candidate.learning_rate
        momentum, key = self.plan.optimization.momentum, _key(module, candidate)
        some = torch.arange(min(PROBED, examples.n))
        if recipe.preconditioner != "none":
            assert isinstance(module, Linearized)
            before = self._preconditioner(module, examples, crop, candidate, notes)
            # A is so scaled that the largest eigenvalue of A JᵀJ/N is 1, as an exact inverse would have it
            top = largest_eigenvalue(module, crop.evaluation(examples.batch(some)[0]), before)
            before.gain = 1 / max(top, 1.0)
            notes.append(f"preconditioner divided by {max(top, 1.0):.3g}, the largest eigenvalue of A JᵀJ/N")
            b = min(candidate.batch_size, self.examples.n)
            return before, given or EFFECTIVE_RATE * (1 - momentum) * b
        if given is not None or recipe.optimizer == "adam":
            return None, given or ADAM_RATE
        if recipe.loss == "cross-entropy":
            return None, PLAIN_RATE
        if key not in self._stable:
            lin = linearize(module, "all", self.plan.shaping.output) if not recipe.linear else module
            assert isinstance(lin, Linearized)
            x = crop.evaluation(examples.batch(some)[0])
            self._stable[key] = 0.5 / max(largest_eigenvalue(lin, x), 1e-30)
        notes.append(f"learning rate {self._stable[key]:.3g}: half of 1/λ_max of the Hessian at the start")
        return None, self._stable[key]

    def _preconditioner(
        self,
        module: Linearized,
        examples: Examples,
        crop: Augmentation,
        candidate: Candidate,
        notes: list[str],
    ) -> KroneckerPreconditioner:
        """A = (G/N + (λ + τ) I)⁻¹ of the frozen problem, whose curvature is computed once."""
        plan, key = self.plan, _key(module, candidate)
        if key not in self._curvatures:
            seed, memory = plan.shaping.seed, plan.options["memory"]
            self._curvatures[key] = frozen_curvature(
                module, plan.recipe, examples, crop.evaluation, seed, memory
            )
        made, damping = self._curvatures[key], plan.options["damping"]
        if damping is None:
            damping = default_damping(made, 1 / made.made.examples)
        check_positive("damping", damping, "leave damping= out for a tenth of the mean eigenvalue")
        # the objective's Hessian is JᵀJ/N + λI
        before = KroneckerPreconditioner(made, module.delta, damping + candidate.weight_decay)
        notes.append(f"gradients preconditioned by {made!r}, damping {before.damping:.3g}")
        return before

    def _values(self, trainer: Trainer, candidate: Candidate) -> dict[str, Any]:
        """The values that were taken."""
        optimization, before = trainer.optimization, trainer.preconditioner
        b = min(candidate.batch_size, self.examples.n)
        rate, momentum = optimization.learning_rate, optimization.momentum
        return {
            "learning_rate": rate,
            "effective_learning_rate": effective_rate(rate, momentum, b),
            "weight_decay": candidate.weight_decay,
            "momentum": momentum,
            "batch_size": b,
            "steps": trainer.course.steps,
            "damping": None if before is None else float(before.damping),
        }

    def _reporting(self, folder: str) -> Reporting:
        """Where one run reports: a folder of its own, its name beside the numbers."""
        whole = self.plan.reporting
        place = None if whole.checkpoint is None else Path(whole.checkpoint) / folder
        log = whole.log
        if log is not None and folder.startswith("candidate-"):
            log = _numbered(log, int(folder.removeprefix("candidate-")))
        return replace(whole, checkpoint=place, log=log, description=f"{whole.description} {folder}".strip())


def _numbered(log: Log, candidate: int) -> Log:
    """A logger that says which candidate it hears of."""
    return lambda values, step: log({**values, "candidate": candidate}, step)


def exact(
    plan: Plan,
    model: nn.Module,
    method: str,
    data: tuple[Examples, Examples | None],
    candidate: Candidate,
    ridge: float | str | None,
) -> Finetuned:
    """The optimum of the same objective in closed form.

    Args:
        plan: What stays the same.
        model: The pretrained network.
        method: Its name.
        data: Training examples, and examples to score on.
        candidate: The values.
        ridge: ρ, or the criterion that chooses it; N λ by default.

    Returns:
        The result, with the fit.
    """
    examples, held = data
    run = _Run(plan, model, method, examples, held)
    ready, view = run.ready(candidate), candidate.augmentation.evaluation
    assert isinstance(ready.module, Linearized)
    scale, chosen = plan.shaping.scale, examples.n * candidate.weight_decay if ridge is None else ridge
    solved = fit(
        ready.module,
        gathered(examples, view),
        plan.recipe.loss,
        ridge=chosen,
        scale=scale,
        memory=plan.options["memory"],
    )
    decay = solved.ridge / examples.n
    objective = Objective(plan.recipe.loss, plan.problem.outputs, scale, decay)
    trainer = Trainer(solved.module, examples, objective, plan.optimization, plan.course)
    trainer.augmentation = view
    scores = trainer.score(held) if held is not None else {}
    values = {"ridge": solved.ridge, "weight_decay": decay, "solver": solved.solver}
    notes = (*plan.problem.notes, *ready.notes, f"optimum in closed form at ridge ρ = {solved.ridge:.3g}")
    settings = plan.settings(method, candidate, values, ready.new_head)
    history = [{"step": 0.0, **trainer.score(examples)}]
    entries = [{**values, "scores": scores, "taken": True}]
    return Finetuned(solved.module, settings, history, entries, notes, solved, plan.shaping.output)
