"""How a tangent Gaussian process is solved: its keywords, the cheapest way that fits, the solution.

function space     (K̃ + ρI) β = r̃       N·C equations, by Cholesky or conjugate gradients
parameter space    (J̃ᵀJ̃ + ρI) δ = J̃ᵀr̃   P equations
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypedDict

from linnet.errors import InputError
from linnet.fitting.solver import CG_STEPS, Size, factorized
from linnet.linear.iterative import RANK, Iteration, Iterative, Reused
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.normal_system import NormalSystem
from linnet.linear.preconditioner import PRECONDITIONERS
from linnet.linear.problem import Memory, Problem
from linnet.linear.system import System
from linnet.memory import Plan, format_bytes, parse_bytes, require
from linnet.params import choice, known
from linnet.tangent.functional import OutputAdapter, check_output
from linnet.tangent.selection import Selector

SPACES = ("auto", "function", "parameter")
WORDS = {
    "solver": ("auto", "cholesky", "cg"),
    "variance": ("lanczos", "exact"),
    "derivative": ("exact", "finite-difference"),
    "mean": ("network", "zero"),
    "preconditioner": tuple(dict.fromkeys(PRECONDITIONERS["function"] + PRECONDITIONERS["parameter"])),
}
ITERATED = ("preconditioner", "variance", "derivative", "tolerance", "rank", "max_steps")


class GPOptions(TypedDict, total=False):
    """Keywords of ``TangentGP``."""

    solver: str  # "auto", "cholesky" or "cg"
    preconditioner: str  # of conjugate gradients, one of ``PRECONDITIONERS``
    tolerance: float  # relative residual of conjugate gradients
    max_steps: int  # largest number of their steps
    rank: int  # directions of the variance cache and rank of the preconditioner
    variance: str  # "lanczos" or "exact"
    derivative: str  # "exact" or "finite-difference"
    seed: int  # of everything random
    mean: str  # "network" or "zero"
    params: Selector  # which parameters vary
    output: OutputAdapter  # how to turn the network's result into a tensor
    memory: str | int | None  # budget


@dataclass(frozen=True)
class Options:
    """Options of the solution of a process."""

    space: str  # where
    solver: str  # how
    iteration: Iteration  # how conjugate gradients and Krylov spaces work
    given: dict[str, Any]  # the keywords that were given, and the space

    @property
    def memory(self) -> Memory:
        """The budget."""
        found: Memory = self.given.get("memory")
        return found

    @classmethod
    def of(cls, space: str, keywords: GPOptions, linearized: bool) -> Options:
        """Options from keywords; those that ask for one way of solving rule the others out."""
        given: dict[str, Any] = {name: value for name, value in keywords.items() if value is not None}
        known("linnet.TangentGP", keywords, GPOptions.__annotations__)
        if linearized and given.keys() & {"params", "output"}:
            raise InputError(
                "params= or output= with a Linearized",
                expected="neither: a linearization has its own",
                remedy="pass them to linnet.linearize",
            )
        choice("space", space, SPACES, "leave space= out")
        for name, words in WORDS.items():
            choice(name, given.get(name, words[0]), words, f"leave {name}= out")
        parse_bytes(keywords.get("memory"))
        check_output(keywords.get("output"))
        iteration = Iteration(**{name: given[name] for name in (*ITERATED, "seed") if name in given})
        solver, wanted = given.get("solver", "auto"), [name for name in ITERATED if name in given]
        if wanted and solver == "cholesky":
            raise InputError(
                f'{wanted[0]}= with solver="cholesky"', 'solver="cg" or "auto"', f"leave {wanted[0]}= out"
            )
        chosen = _space(space, iteration)
        return cls(chosen, "cg" if wanted else solver, iteration, {**given, "space": space})


def _space(space: str, iteration: Iteration) -> str:
    """The space, where differences or a preconditioner belong to one of the two."""
    name, differences = iteration.preconditioner, iteration.derivative != "exact"
    if differences and space == "function":
        raise InputError(
            'derivative="finite-difference" in function space',
            expected='space="parameter": differences give products with the Fisher matrix',
            remedy='pass space="parameter", or leave derivative= out',
        )
    spaces = [where for where in SPACES[1:] if name in PRECONDITIONERS[where]]
    if space not in ("auto", *spaces):
        raise InputError(
            f"preconditioner={name!r} in {space} space",
            expected=", ".join(f'"{one}"' for one in PRECONDITIONERS[space]),
            remedy="leave preconditioner= out",
        )
    if space == "auto" and differences:
        return "parameter"
    return spaces[0] if space == "auto" and len(spaces) == 1 else space


class Way(NamedTuple):
    """One way to solve, and what it would take."""

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
    """The way that is taken, why, and all ways."""

    space: str  # ``"function"`` or ``"parameter"``
    solver: str  # ``"cholesky"`` or ``"cg"``
    stored: bool  # whether the kernel is kept in memory for conjugate gradients
    reason: str  # one sentence
    equations: int  # N·C
    parameters: int  # P
    ways: list[str]  # all, with their predicted operations and memory


def planned(problem: Problem, options: Options) -> GPPlan:
    """The cheapest way that the options leave open and that fits the memory."""
    size = Size(problem.function, problem.x, problem.c, "squared", False, options.memory)
    ways = _ways(size, options.iteration.rank or RANK)
    asked = (options.space, options.solver)
    wanted = [way for way in ways if all(a in ("auto", b) for a, b in zip(asked, way[:2], strict=True))]
    fitting = [way for way in wanted if way.memory.peak <= way.memory.budget]
    if not fitting:
        advice = ['pass solver="cg" and space="auto"', "use fewer parameters with params=, or raise memory="]
        require(min((way.memory for way in wanted), key=lambda plan: plan.peak), advice)
    chosen, best = (min(some, key=lambda way: way.operations) for some in (fitting, wanted))
    reason = "set by the user" if len(wanted) == 1 else "the fewest operations"
    if best.operations < chosen.operations:
        reason += f" that fit; {best} does not fit a budget of {format_bytes(best.memory.budget)}"
    return GPPlan(*chosen[:3], reason, size.equations, size.function.space.dim, [str(way) for way in ways])


def _ways(size: Size, rank: int) -> list[Way]:
    """All ways, with what they would take."""
    m, p, item = size.equations, size.function.space.dim, size.function.dtype.itemsize
    kernel, fisher, small = size.kernel_operations, size.fisher_operations, min(rank, m, p)
    vectors = ("vectors of conjugate gradients", 8 * p * item)
    directions = ("directions of the variance cache", small * p * item)
    outputs = ("vectors in function space", (8 + small) * m * item)
    products = 5.0 * (CG_STEPS + small) * size.forward
    reads = 2.0 * (CG_STEPS + small) * float(m) ** 2  # of a stored kernel
    pulls = 3.0 * small * size.forward  # J̃ᵀ of each direction of the variance cache in function space

    def way(space: str, solver: str, operations: float, *items: tuple[str, int], stored: bool = False) -> Way:
        plan = Plan(f"Gaussian process in {space} space by {solver}", size.budget, items)
        return Way(space, solver, stored, operations, plan)

    return [
        way("function", "cholesky", kernel + float(m) ** 3 / 3, *factorized("kernel", m)),
        way("parameter", "cholesky", fisher + float(p) ** 3 / 3, *factorized("Fisher matrix", p)),
        way("function", "cg", kernel + reads + pulls, ("kernel", 2 * m * m * item), directions, stored=True),
        way("function", "cg", products + pulls, outputs, vectors, directions),
        # as many products on vectors of P numbers instead of N·C, which are orthogonalized
        way("parameter", "cg", products + 4.0 * small**2 * p, vectors, directions),
    ]


def solve(problem: Problem, ridge: float, options: Options, before: System | None) -> tuple[GPPlan, System]:
    """Choose a way and solve."""
    plan = planned(problem, options)
    if plan.solver == "cholesky":
        kind = KernelSystem if plan.space == "function" else NormalSystem
        return plan, kind.solved(problem, ridge, options.memory, before)
    space = "stored" if plan.stored else plan.space
    reused, parameter = Reused(), space == "parameter"
    if parameter and isinstance(before, Iterative) and before.space == space:
        made = before.reused.preconditioner
        name = "" if made is None else before.settings.preconditioner
        reused = Reused(preconditioner=made, name=name)
    unknowns = problem.function.space.dim if parameter else problem.n * problem.c
    settings = options.iteration.settings(unknowns)
    return plan, Iterative(problem, ridge, settings, options.memory, reused, space, options.iteration)


def describe(plan: GPPlan, system: System, options: Options) -> dict[str, Any]:
    """Summary of the solution and its cost."""
    found: dict[str, Any] = {
        "examples": system.n,
        "outputs": system.c,
        "targets": system.problem.count,
        "plan": asdict(plan),
        "certificate": system.certificate(),
        "work": dict(system.work),
        "variance": "exact",
    }
    if isinstance(system, Iterative):
        found["preconditioner"] = system.settings.preconditioner
        found["variance"] = options.iteration.variance
        panel = system.reused.panel
        if panel is not None:
            found["directions"] = panel.columns.shape[1]
            found["left out"] = panel.left_out / system.ridge  # of the trace, in units of ρ
    return found
