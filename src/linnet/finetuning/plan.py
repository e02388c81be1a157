"""Settings shared by all runs of a recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.finetuning.course import Course, Optimization
from linnet.finetuning.examples import Examples
from linnet.finetuning.finetuned import Settings
from linnet.finetuning.prepared import Shaping
from linnet.finetuning.recipes import Candidate, Recipe
from linnet.finetuning.run import Run
from linnet.linear.targets import doubts, make_targets, task_targets
from linnet.params import tensor, warn
from linnet.training import Training


@dataclass(frozen=True)
class Problem:
    """The task: number of outputs, and whether they are classes."""

    outputs: int  # C
    classes: bool  # whether y are classes
    labels: Tensor  # y of all training examples
    notes: tuple[str, ...]  # what is worth knowing of them

    @classmethod
    def of(cls, examples: Examples, kept: int | None, recipe: Recipe, own: int | None) -> Problem:
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

    def check(self, held: Examples) -> None:
        """Raise unless validation data are of the same kind: before the training, not after it."""
        y = held.labels()
        if y.is_floating_point() == self.classes:
            raise InputError(
                f"y of the validation data has type {y.dtype}",
                expected="integer classes (N,)" if self.classes else f"float targets (N, {self.outputs})",
                remedy="convert y with y.long() or y.float(), as in the training data",
            )
        make_targets(y, self.outputs, varied=False)


@dataclass(frozen=True)
class Plan:
    """All that stays the same from candidate to candidate."""

    recipe: Recipe
    shaping: Shaping
    problem: Problem
    training: Training
    watched: Run

    @property
    def momentum(self) -> float:
        """Of SGD, or β₁ of Adam."""
        assert self.training.momentum is not None
        return self.training.momentum

    def optimization(self, rate: float) -> Optimization:
        """The optimizer of a run, at its learning rate."""
        schedule = self.training.schedule or "constant"
        return Optimization(self.recipe.optimizer, rate, self.momentum, schedule, self.training.clip)

    def course(self, steps: int, batch_size: int, epoch: int) -> Course:
        """The length of a run; validated once an epoch of so many steps unless told."""
        every = self.watched.evaluate_every or epoch
        mode = self.recipe.training_mode
        return Course(steps, batch_size, self.shaping.seed, every, self.watched.keep, mode)

    def settings(self, candidate: Candidate, values: dict[str, Any], new_head: bool) -> Settings:
        """The settings of a result."""
        recipe, problem = self.recipe, self.problem
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
            "seed": self.shaping.seed,
        }
        return Settings(recipe.name, parts, values, candidate.augmentation, problem.outputs, problem.classes)
