"""Chooses the space and the solver of a tangent Gaussian process by predicted cost and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linnet.linear.cost import NETWORK_PENALTY, forward_operations
from linnet.memory import Plan, format_bytes, parse_bytes, require
from linnet.tangent.batch import Inputs, batch_size
from linnet.tangent.functional import Functional

STEPS = 300  # of conjugate gradients, assumed
DIRECTIONS = 100  # of the variance cache, assumed


@dataclass(frozen=True)
class Way:
    """One way to solve."""

    space: str  # ``"function"`` or ``"parameter"``
    solver: str  # ``"cholesky"`` or ``"cg"``
    stored: bool  # whether the kernel is kept in memory for conjugate gradients
    operations: float  # predicted operations
    memory: Plan  # predicted bytes, item by item

    def __str__(self) -> str:
        name = f"{self.space} space by {self.solver}" + (" with the kernel stored" if self.stored else "")
        return f"{name}: about {self.operations:.1e} operations, {format_bytes(self.memory.peak)}"


@dataclass(frozen=True)
class GPPlan:
    """The chosen plan, its alternatives and the reason."""

    chosen: Way  # the way taken
    ways: tuple[Way, ...]  # all ways, the chosen one among them
    reason: str  # one sentence
    equations: int  # N·C
    parameters: int  # P

    @property
    def space(self) -> str:
        """``"function"`` or ``"parameter"``."""
        return self.chosen.space

    @property
    def solver(self) -> str:
        """``"cholesky"`` or ``"cg"``."""
        return self.chosen.solver

    def __str__(self) -> str:
        head = f"{self.equations} equations, {self.parameters} parameters: {self.chosen}"
        others = [f"  {way}" for way in self.ways if way is not self.chosen]
        return "\n".join([head, f"  because: {self.reason}", *others])

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers and text."""
        return {
            "space": self.space,
            "solver": self.solver,
            "kernel stored": self.chosen.stored,
            "reason": self.reason,
            "equations": self.equations,
            "parameters": self.parameters,
            "ways": [str(way) for way in self.ways],
        }


def choose(
    function: Functional,
    x: Inputs,
    outputs: int,
    space: str,
    solver: str,
    memory: str | int | None,
    rank: int = 0,
) -> GPPlan:
    """The cheapest way among those that fit the memory."""
    ways = _ways(function, x, outputs, parse_bytes(memory, function.device), rank or DIRECTIONS)
    wanted = [way for way in ways if space in ("auto", way.space) and solver in ("auto", way.solver)]
    fitting = [way for way in wanted if way.memory.peak <= way.memory.budget]
    if not fitting:
        smallest = min(wanted, key=lambda way: way.memory.peak)
        advice = ['pass solver="cg" and space="auto"', "use fewer parameters with params=, or raise memory="]
        require(smallest.memory, advice)
    chosen = min(fitting, key=lambda way: way.operations)
    size = batch_size(x) * outputs
    return GPPlan(chosen, tuple(ways), _reason(chosen, wanted, fitting), size, function.space.dim)


def _reason(chosen: Way, wanted: list[Way], fitting: list[Way]) -> str:
    """Why this way."""
    cheaper = [way for way in wanted if way not in fitting and way.operations < chosen.operations]
    if len(wanted) == 1:
        return "set by the user"
    if cheaper:
        best = min(cheaper, key=lambda way: way.operations)
        budget = format_bytes(best.memory.budget)
        return f"the fewest operations that fit; {best} does not fit a budget of {budget}"
    return "the fewest operations"


def _ways(function: Functional, x: Inputs, outputs: int, budget: int, rank: int) -> list[Way]:
    """All ways, with what they would take."""
    n, p = batch_size(x), function.space.dim
    m, item = n * outputs, function.dtype.itemsize
    forward = NETWORK_PENALTY * n * forward_operations(function, x)
    derivatives = forward * (1 + 2 * outputs)
    kernel = derivatives + float(m) ** 2 * p  # half of 2 (N·C)² P, symmetric
    passes = 5.0 * forward  # a JVP costs two forward passes, a VJP three
    small = min(rank, m, p)
    vectors = ("vectors of conjugate gradients", 8 * p * item)
    directions = ("directions of the variance cache", small * p * item)

    def way(space: str, solver: str, stored: bool, operations: float, *items: tuple[str, int]) -> Way:
        plan = Plan(f"Gaussian process in {space} space by {solver}", budget, items)
        return Way(space, solver, stored, operations, plan)

    square, normal = 8 * m * m, 8 * p * p
    products = (STEPS + small) * passes
    pulls = 3.0 * small * forward  # J̃ᵀ of each direction of the variance cache in function space
    return [
        way("function", "cholesky", False, kernel + float(m) ** 3 / 3,
            ("kernel in float64", square), ("kernel + ridge", square), ("factor", square)),
        way("parameter", "cholesky", False, derivatives + 2.0 * m * p**2 + float(p) ** 3 / 3,
            ("Fisher matrix in float64", normal), ("Fisher matrix + ridge", normal), ("factor", normal)),
        way("function", "cg", True, kernel + 2.0 * (STEPS + small) * float(m) ** 2 + pulls,
            ("kernel", 2 * m * m * item), directions),
        way("function", "cg", False, products + pulls, ("vectors in function space", (8 + small) * m * item),
            vectors, directions),
        # as many products on vectors of P numbers instead of N·C, which are orthogonalized
        way("parameter", "cg", False, products + 4.0 * small**2 * p, vectors, directions),
    ]  # fmt: skip
