"""Runs a recipe: for one set of values, as a search, or as the closed-form optimum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.default_damping import default_damping
from linnet.distributed import apart
from linnet.errors import NumericalError
from linnet.finetuning.augment import Augmentation
from linnet.finetuning.course import Course, Objective
from linnet.finetuning.examples import Examples
from linnet.finetuning.finetuned import Finetuned
from linnet.finetuning.kernel_steps import SMALL_DECAY, KernelProblem, kernel_problem, pays
from linnet.finetuning.loss_curve import warn_of_large_steps
from linnet.finetuning.plan import Plan
from linnet.finetuning.prepared import (
    HeadProblem,
    Prepared,
    frozen_curvature,
    gathered,
    head_problem,
    largest_eigenvalue,
    prepare,
)
from linnet.finetuning.recipes import (
    ADAM_RATE,
    EFFECTIVE_RATE,
    PLAIN_RATE,
    WEIGHT_DECAY,
    Candidate,
    ClosedForm,
    effective_rate,
)
from linnet.finetuning.run import Run
from linnet.finetuning.trainer import Trainer, rank
from linnet.fitting.comparisons import held_out_split
from linnet.fitting.fit import fit
from linnet.linear.targets import OneHot
from linnet.logged import Log
from linnet.optim.preconditioner import KroneckerPreconditioner
from linnet.tangent.batch import made_up
from linnet.tangent.linearized import Linearized, linearize

EPOCHS, FEWEST_STEPS = 30, 300
RETRIES = 3  # of a run whose rate was not the user's, each with a third of it
PROBED = 256  # examples that a learning rate is estimated on


def searched(
    plan: Plan,
    model: nn.Module,
    data: tuple[Examples, Examples | None],
    candidates: list[Candidate],
) -> Finetuned:
    """Try every candidate, and keep the best."""
    examples, held = data
    if len(candidates) == 1:
        (only,) = candidates
        retries = RETRIES if only.learning_rate is None else 0
        made = _Run(plan, model, examples, held).result(only, "", retries=retries)
        return _told(made)
    train, chosen_by = examples, held
    if held is None:
        rows, kept = held_out_split(plan.problem.labels, plan.shaping.seed)
        train, chosen_by = examples.part(rows), examples.part(kept)
    run = _Run(plan, model, train, chosen_by, len(candidates))
    tried: list[dict[str, Any]] = []
    best, best_at = None, -1
    for i, candidate in enumerate(candidates):
        try:
            made = run.result(candidate, f"candidate-{i:02d}")
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
    if held is None:
        run = _Run(plan, model, examples, None)
        final = run.result(candidates[best_at], "final", tried, RETRIES)
        note = "values chosen on a fifth of each class held out, then trained on everything"
        return _told(replace(final, notes=(*final.notes, note)))
    note = f"best of {len(candidates)} sets of values"
    return _told(replace(best, candidates=tried, notes=(*best.notes, note)))


def _merit(made: Finetuned) -> tuple[bool, float]:
    """The merit of a candidate: the held-out score, of those first whose loss stayed down."""
    return not made.diverged, rank(made.validation)


def _told(made: Finetuned) -> Finetuned:
    """The result; a warning if it diverged."""
    if made.diverged:
        warn_of_large_steps(made.settings.values["learning_rate"])
    return made


_Key = tuple[Augmentation, tuple[str, ...]]


def _key(module: nn.Module, crop: Augmentation) -> _Key:
    """The key of a curvature: the view of images, and the parameters that vary."""
    return crop.evaluation, tuple(name for name, _ in module.named_parameters())


class _Run:
    """Runs of one recipe on one set of examples; what they share is computed once."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        examples: Examples,
        held: Examples | None,
        runs: int = 1,
    ) -> None:
        self.plan, self.model = plan, model
        self.examples, self.held, self.runs = examples, held, runs
        self._ready: dict[Augmentation, Prepared] = {}
        self._curvatures: dict[_Key, Curvature] = {}
        self._tops: dict[_Key, float] = {}
        self._small: dict[Augmentation, HeadProblem | None] = {}
        self._kernels: dict[tuple[Augmentation, float], KernelProblem | None] = {}

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
        self,
        candidate: Candidate,
        folder: str,
        tried: list[dict[str, Any]] | None = None,
        retries: int = 0,
    ) -> Finetuned:
        """Train with one set of values; if the loss rises, restart with a third of the rate."""
        plan, ready = self.plan, self.ready(candidate)
        if candidate.augmentation not in self._small:
            self._small[candidate.augmentation] = head_problem(ready, self.examples, candidate.augmentation)
        small = self._small[candidate.augmentation]
        notes = [*plan.problem.notes, *ready.notes]
        kernel = None if small else self._kernel(ready, candidate, notes)
        trainer = self._trainer(ready, small or kernel, candidate, folder, notes)
        try:
            state = trainer.run()
        except NumericalError:
            if not retries:
                raise
            state = None
        if state is None or (retries and state.curve.rises):
            rate = trainer.optimization.learning_rate
            smaller = replace(candidate, learning_rate=rate / 3)
            again = self.result(smaller, f"{folder}-slower".removeprefix("-"), tried, retries - 1)
            note = f"restarted with learning_rate={rate:g} / 3, because the loss went up again"
            return replace(again, notes=(*again.notes, note))
        scores = trainer.score(trainer.validation) if trainer.validation is not None else {}
        module = trainer.module
        if small:
            module = ready.fresh()
            assert isinstance(module, Linearized)
            small.carry(trainer.module, module)
        if kernel:
            module = ready.fresh()
            assert isinstance(module, Linearized)
            kernel.carry(trainer.module, module, gathered(self.examples, candidate.augmentation)[0])
        before = kernel.before if kernel else trainer.preconditioner
        values = self._values(trainer, candidate, before)
        if plan.recipe.linear and plan.recipe.loss == "squared" and not candidate.augmentation.is_random:
            notes.append('the optimum of this objective has a closed form: training="closed-form"')
        settings = plan.settings(candidate, values, ready.new_head)
        entries = tried or [{**asdict(candidate), **values, "scores": scores, "taken": True}]
        return Finetuned(
            module.eval(),
            settings,
            state.history,
            entries,
            tuple(notes),
            output=plan.shaping.output,
            probe=made_up(self.examples.batch(torch.zeros(1, dtype=torch.long))[0]),
        )

    def _trainer(
        self,
        ready: Prepared,
        small: HeadProblem | KernelProblem | None,
        candidate: Candidate,
        folder: str,
        notes: list[str],
    ) -> Trainer:
        """The trainer of one set of values."""
        plan, decay = self.plan, candidate.weight_decay
        module = small.module() if small else ready.fresh()
        crop = Augmentation() if small else candidate.augmentation
        before: KroneckerPreconditioner | None = None
        if isinstance(small, KernelProblem):
            rate = self._rate(small.before, lambda: self._kernel_top(small), candidate, notes)
            examples, decay = small.features(self.examples), 0.0 if small.before else decay
        else:
            examples = small.features(self.examples) if small else self.examples
            if plan.recipe.preconditioner != "none":
                assert isinstance(module, Linearized)
                before = self._preconditioner(module, examples, crop, candidate, notes)
            rate = self._rate(before, lambda: self._top(module, examples, crop, before), candidate, notes)
        n, b = self.examples.n, min(candidate.batch_size, self.examples.n)
        trainer = Trainer(
            module,
            examples,
            Objective(plan.recipe.loss, plan.problem.outputs, plan.recipe.scale, decay),
            plan.optimization(rate),
            plan.course(self._steps(candidate), candidate.batch_size, max(1, math.ceil(n / b))),
            self._watched(folder),
        )
        trainer.description = f"fine-tuning by {plan.recipe.name} {folder}".strip()
        trainer.augmentation, trainer.preconditioner = crop, before
        trainer.output = None if plan.recipe.linear else plan.shaping.output
        if self.held is not None:
            trainer.validation = small.held(self.held) if small else self.held
        return trainer

    def _steps(self, candidate: Candidate) -> int:
        """Steps of a run."""
        n = self.examples.n
        training, b = self.plan.training, min(candidate.batch_size, n)
        if training.epochs is not None:
            return math.ceil(training.epochs * n / b)
        return training.steps or max(FEWEST_STEPS, math.ceil(EPOCHS * n / b))

    def _kernel(self, ready: Prepared, candidate: Candidate, notes: list[str]) -> KernelProblem | None:
        """The problem in the coordinates of its kernel, where that gives the same steps for less."""
        recipe, crop = self.plan.recipe, candidate.augmentation
        preconditioned = recipe.preconditioner != "none"
        if not recipe.linear or recipe.optimizer != "sgd" or crop.is_random or not self.examples.in_memory:
            return None
        if preconditioned and self.plan.training.clip is not None:
            return None  # the norm of A Jᵀr is not that of its coordinates
        key = crop.evaluation, candidate.weight_decay if preconditioned else 0.0
        if key not in self._kernels:
            self._kernels[key] = self._made_kernel(ready, candidate, preconditioned)
        found = self._kernels[key]
        if found is None or self._shrinks(found, candidate) > SMALL_DECAY:
            return None
        notes.extend(found.notes)
        return found

    def _shrinks(self, kernel: KernelProblem, candidate: Candidate) -> float:
        """The largest share of δ that weight decay, left out, would take away over a preconditioned run."""
        if kernel.before is None:
            return 0.0
        rate = self._rate(kernel.before, lambda: self._kernel_top(kernel), candidate, [])
        # the eigenvalues of λ A are at most gain · λ / (λ + τ)
        share = kernel.gain * candidate.weight_decay / float(kernel.before.damping)
        return self._steps(candidate) * rate / (1 - self.plan.momentum) * share

    def _kernel_top(self, kernel: KernelProblem) -> float:
        """The largest eigenvalue of A JᵀJ/N on the examples that a learning rate is estimated on."""
        return kernel.top(min(PROBED, self.examples.n))

    def _made_kernel(
        self, ready: Prepared, candidate: Candidate, preconditioned: bool
    ) -> KernelProblem | None:
        """The kernel, where it pays and weight decay does not lead out of its span."""
        module, crop = ready.module, candidate.augmentation
        notes: list[str] = []
        assert isinstance(module, Linearized)
        batch, before = min(candidate.batch_size, self.examples.n), None
        sizes = self.examples.n, self.held.n if self.held else 0, self.plan.problem.outputs
        one = crop.evaluation(self.examples.batch(torch.arange(1))[0])
        if not pays(module, one, sizes, self.runs * self._steps(candidate) * batch, self.plan.watched.memory):
            return None
        if preconditioned:
            before = self._preconditioner(module, self.examples, crop, candidate, notes)
            if candidate.weight_decay > float(before.damping) / 10:
                return None  # λ A δ is not in the span of A Jᵀ
        made = kernel_problem(module, before, (self.examples, self.held), crop.evaluation)
        made.notes.extend(notes)
        return made

    def _rate(
        self,
        before: KroneckerPreconditioner | None,
        top: Callable[[], float],
        candidate: Candidate,
        notes: list[str],
    ) -> float:
        """The learning rate, and the preconditioner's gain."""
        recipe, given = self.plan.recipe, candidate.learning_rate
        if before is not None:
            # A is so scaled that the largest eigenvalue of A JᵀJ/N is 1, as an exact inverse would have it
            largest = max(top(), 1.0)
            before.gain = 1 / largest
            notes.append(f"preconditioner divided by {largest:.3g}, the largest eigenvalue of A JᵀJ/N")
            b = min(candidate.batch_size, self.examples.n)
            return given or EFFECTIVE_RATE * (1 - self.plan.momentum) * b
        if given is not None or recipe.optimizer == "adam":
            return given or ADAM_RATE
        if recipe.loss == "cross-entropy":
            return PLAIN_RATE
        rate = 0.5 / max(top(), 1e-30)
        notes.append(f"learning rate {rate:.3g}: half of 1/λ_max of the Hessian at the start")
        return rate

    def _top(
        self,
        module: nn.Module,
        examples: Examples,
        crop: Augmentation,
        before: KroneckerPreconditioner | None,
    ) -> float:
        """The largest eigenvalue of A JᵀJ/N; without A the same for every candidate."""
        key = _key(module, crop)
        if before is None and key in self._tops:
            return self._tops[key]
        linear = self.plan.recipe.linear
        lin = module if linear else linearize(module, "all", self.plan.shaping.output)
        assert isinstance(lin, Linearized)
        some = torch.arange(min(PROBED, examples.n))
        top = largest_eigenvalue(lin, crop.evaluation(examples.batch(some)[0]), before)
        if before is None:
            self._tops[key] = top
        return top

    def _preconditioner(
        self,
        module: Linearized,
        examples: Examples,
        crop: Augmentation,
        candidate: Candidate,
        notes: list[str],
    ) -> KroneckerPreconditioner:
        """A = (G/N + (λ + τ) I)⁻¹ of the frozen problem, whose curvature is computed once."""
        plan, key = self.plan, _key(module, candidate.augmentation)
        if key not in self._curvatures:
            seed, memory = plan.shaping.seed, plan.watched.memory
            self._curvatures[key] = frozen_curvature(
                module, plan.recipe, examples, crop.evaluation, seed, memory
            )
        made, damping = self._curvatures[key], plan.recipe.damping
        if damping is None:
            damping = default_damping(made, 1 / made.made.examples)
        # the objective's Hessian is JᵀJ/N + λI
        before = KroneckerPreconditioner(made, module.delta, damping + candidate.weight_decay)
        notes.append(f"gradients preconditioned by {made!r}, damping {before.damping:.3g}")
        return before

    def _values(
        self, trainer: Trainer, candidate: Candidate, before: KroneckerPreconditioner | None
    ) -> dict[str, Any]:
        """The values that were taken."""
        optimization = trainer.optimization
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
            "diverged": trainer.state.curve.rises,
        }

    def _watched(self, folder: str) -> Run:
        """Record of one run: a folder of its own, its name beside the numbers."""
        whole = self.plan.watched
        place = None if whole.checkpoint is None else Path(whole.checkpoint) / folder
        log = whole.log
        if log is not None and folder.startswith("candidate-"):
            log = _numbered(log, int(folder.removeprefix("candidate-")))
        return replace(whole, checkpoint=place, log=log)


def _numbered(log: Log, candidate: int) -> Log:
    """A logger that says which candidate it hears of."""
    return lambda values, step: log({**values, "candidate": candidate}, step)


def exact(
    plan: Plan,
    model: nn.Module,
    data: tuple[Examples, Examples | None],
    candidate: Candidate,
    closed: ClosedForm,
) -> Finetuned:
    """The optimum of the same objective in closed form."""
    examples, held = data
    run = _Run(plan, model, examples, held)
    ready, view = run.ready(candidate), candidate.augmentation.evaluation
    assert isinstance(ready.module, Linearized)
    scale, decay = plan.recipe.scale, WEIGHT_DECAY if closed.weight_decay is None else closed.weight_decay
    with apart():  # like every fine-tuning
        solved = fit(
            ready.module,
            gathered(examples, view),
            plan.recipe.loss,
            ridge=examples.n * decay if closed.ridge is None else closed.ridge,
            targets=OneHot(scale) if plan.recipe.loss == "squared" else None,
            memory=plan.watched.memory,
        )
    decay = solved.ridge / examples.n
    objective = Objective(plan.recipe.loss, plan.problem.outputs, scale, decay)
    trainer = Trainer(solved.module, examples, objective, plan.optimization(PLAIN_RATE), Course(1))
    trainer.augmentation = view
    scores = trainer.score(held) if held is not None else {}
    values = {"ridge": solved.ridge, "weight_decay": decay, "solver": solved.solver}
    notes = (*plan.problem.notes, *ready.notes, f"optimum in closed form at ridge ρ = {solved.ridge:.3g}")
    settings = plan.settings(candidate, values, ready.new_head)
    history = [{"step": 0.0, **trainer.score(examples)}]
    entries = [{**values, "scores": scores, "taken": True}]
    probe = made_up(examples.batch(torch.zeros(1, dtype=torch.long))[0])
    return Finetuned(solved.module, settings, history, entries, notes, solved, plan.shaping.output, probe)
