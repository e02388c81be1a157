"""The position of the example dimension in tensors of activations.

Networks move and merge the example axis: sequence-first layers have it second, a flattened
(N·S, d) has it outermost of a merged axis, attention projections (S·N, d) innermost. A layout
says which axis holds the examples and on which side of the merge they are; it is found by
experiment (``find_layout``), never by guessing from shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Size, Tensor


@dataclass(frozen=True)
class Layout:
    """The example axis of a tensor, possibly merged with others."""

    axis: int = 0  # which axis holds the examples
    outer: bool = True  # whether the examples are the outer part of that axis: (N·m) rather than (m·N)

    def examples_first(self, t: Tensor, n: int, skip: int = 0) -> Tensor:
        """Move the examples to axis ``skip`` and what was merged with them to the next."""
        axis = self.axis + skip
        merged = t.shape[axis] // n
        parts = (n, merged) if self.outer else (merged, n)
        t = t.reshape(*t.shape[:axis], *parts, *t.shape[axis + 1 :])
        example, other = (axis, axis + 1) if self.outer else (axis + 1, axis)
        return t.movedim((example, other), (skip, skip + 1))


PLAIN = Layout()  # examples on the first axis, nothing merged with them


def find_layout(per_example: Tensor, candidates: Iterable[int], n: int) -> Layout | None:
    """The layout under which the gradient of each example's output stays with that example."""
    # per_example (n, *shape)
    shape = per_example.shape[1:]
    possible = [Layout(axis, outer) for axis in candidates for outer in (True, False) if fits(shape, axis, n)]
    return next((layout for layout in possible if _separates(per_example, layout, n)), None)


def fits(shape: Size, axis: int, n: int) -> bool:
    """Whether n examples can be on that axis."""
    return axis < len(shape) and shape[axis] > 0 and shape[axis] % n == 0


def _separates(per_example: Tensor, layout: Layout, n: int) -> bool:
    """Whether gradients vanish outside each example's own part."""
    blocks = layout.examples_first(per_example, n, skip=1).reshape(n, n, -1)  # (cause, place, rest)
    sizes = blocks.abs().amax(2)
    return bool((sizes - sizes.diag().diag() == 0).all())
