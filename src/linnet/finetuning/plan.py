"""Settings shared by all runs of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.finetuning.course import Course, Optimization, Reporting
from linnet.finetuning.examples import Examples
from linnet.finetuning.finetuned import Settings
from linnet.finetuning.prepared import Shaping
from linnet.finetuning.recipes import Candidate, Recipe
from linnet.fitting.targets import make_targets
from linnet.params import tensor


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
        y = tensor("y", examples.labels(), "classes or real targets")
        if y.is_floating_point():
            if recipe.loss == "cross-entropy":
                raise InputError(
                    f'y has type {y.dtype} with loss="cross-entropy"',
                    expected="integer classes (N,)",
                    remedy='convert classes with y.long(), or pass loss="squared" for values',
                )
            return cls(y.reshape(len(y), -1).shape[1], False, y, ())
        found = int(y.max()) + 1
        whole = isinstance(classes, int) and not isinstance(classes, bool)
        if classes is not None and not (whole and classes >= found):
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

    def check(self, held: Examples) -> None:
        """Raise unless validation data are of the same kind: before the training, not after it.

        Args:
            held: Validation examples.

        Raises:
            DataError: If a class is out of range.
            InputError: If they are values and the training data classes, or the other way round.
        """
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
    optimization: Optimization
    course: Course
    options: dict[str, Any]
    reporting: Reporting

    def settings(self, method: str, candidate: Candidate, values: dict[str, Any], new_head: bool) -> Settings:
        """Settings of a result."""
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
