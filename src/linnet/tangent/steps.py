"""The order in which the tiles of a Gram matrix are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from linnet.distributed import owners

Range = tuple[int, int]  # first example, last + 1


@dataclass(frozen=True)
class Sizes:
    """Numbers of examples taken at once."""

    hold: int  # those whose features stay in memory
    product: int  # those on each side of a matrix product
    capture: int  # those that are differentiated
    columns: int  # cotangents of those that are


@dataclass(frozen=True)
class Step:
    """A part of the products of one stationary block of rows; ranges are (first, last + 1) example."""

    rows: Range  # the block that stays from step to step
    own: Range | None  # those of its rows that are multiplied with the block itself, or ``None``
    columns: Range | None  # examples that stream past the block, or ``None``

    @property
    def area(self) -> int:
        """Pairs of examples that are multiplied, about."""
        if self.own is not None:
            return (self.own[1] - self.own[0]) * (self.rows[1] - self.own[0])
        assert self.columns is not None
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    @property
    def region(self) -> tuple[Range, Range]:
        """Rows and columns of the matrix that are computed, their mirror image apart."""
        if self.own is not None:
            return self.own, (self.own[0], self.rows[1])
        assert self.columns is not None
        return self.rows, self.columns

    @property
    def key(self) -> str:
        """A name for the record of finished steps."""
        return f"{self.rows}-{self.own}-{self.columns}"


def in_order(n: int, m: int, symmetric: bool, sizes: Sizes) -> list[Step]:
    """The work in order: block after block, first with itself, then with the columns that are left."""
    steps = []
    for rows in ranges(0, n, sizes.hold):
        own = ranges(*rows, sizes.product) if symmetric else []
        columns = ranges(rows[1] if symmetric else 0, m, sizes.capture)
        steps += [Step(rows, part, None) for part in own]
        steps += [Step(rows, None, part) for part in columns]
    return steps


def dealt(steps: Sequence[Step], parts: int) -> list[list[Step]]:
    """Steps of one block in parts of about equal work: the largest first, each to the part that has least."""
    found: list[list[Step]] = [[] for _ in range(parts)]
    for step, owner in zip(steps, owners([step.area for step in steps], parts), strict=True):
        found[owner].append(step)
    return found


def run_of(steps: Sequence[Step], index: int, parts: int) -> list[Step]:
    """One of several consecutive runs of steps, with about equal work, so that each has few blocks."""
    total, found, done = sum(step.area for step in steps), [], 0
    for step in steps:  # a step belongs to the run that its middle lies in
        if (2 * done + step.area) * parts // (2 * max(total, 1)) == index:
            found.append(step)
        done += step.area
    return found


def captured_examples(n: int, m: int, symmetric: bool, hold: int) -> int:
    """The number of examples differentiated in these steps, with repetitions."""
    blocks = -(-n // hold)
    return sum(n - i * hold for i in range(blocks)) if symmetric else n + blocks * m


def ranges(start: int, stop: int, size: int) -> list[Range]:
    """[start, stop) in pieces of at most ``size``."""
    return [(i, min(i + size, stop)) for i in range(start, stop, size)]
