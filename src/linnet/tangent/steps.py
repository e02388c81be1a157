"""The order in which the tiles of a Gram matrix are computed."""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]  # first example, last + 1


@dataclass(frozen=True)
class Sizes:
    """Numbers of examples taken at once.

    Args:
        hold: Those whose features stay in memory.
        product: Those on each side of a matrix product.
        capture: Those that are differentiated.
        columns: Cotangents of those that are.
    """

    hold: int
    product: int
    capture: int
    columns: int


@dataclass(frozen=True)
class Step:
    """A part of the products of one stationary block of rows; ranges are (first, last + 1) example.

    Args:
        rows: The block that stays from step to step.
        own: Those of its rows that are multiplied with the block itself, or ``None``.
        columns: Examples that stream past the block, or ``None``.
    """

    rows: Range
    own: Range | None
    columns: Range | None

    @property
    def key(self) -> str:
        """A name for the record of finished steps."""
        return f"{self.rows}-{self.own}-{self.columns}"


def in_order(n: int, m: int, symmetric: bool, sizes: Sizes) -> list[Step]:
    """The work in order: block after block, first with itself, then with the columns that are left.

    Args:
        n: Examples of the rows.
        m: Examples of the columns.
        symmetric: Whether both are the same, so that tiles on one side of the diagonal suffice.
        sizes: How many are taken at once.

    Returns:
        The steps.
    """
    steps = []
    for rows in ranges(0, n, sizes.hold):
        own = ranges(*rows, sizes.product) if symmetric else []
        columns = ranges(rows[1] if symmetric else 0, m, sizes.capture)
        steps += [Step(rows, part, None) for part in own]
        steps += [Step(rows, None, part) for part in columns]
    return steps


def captured_examples(n: int, m: int, symmetric: bool, hold: int) -> int:
    """The number of examples differentiated in these steps, with repetitions.

    Args:
        n: Examples of the rows.
        m: Examples of the columns.
        symmetric: Whether both are the same.
        hold: Examples of a block that stays.

    Returns:
        The number.
    """
    blocks = -(-n // hold)
    return sum(n - i * hold for i in range(blocks)) if symmetric else n + blocks * m


def ranges(start: int, stop: int, size: int) -> list[Range]:
    """[start, stop) in pieces of at most ``size``."""
    return [(i, min(i + size, stop)) for i in range(start, stop, size)]
