"""Checked options of a tangent Gaussian process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypedDict

from linnet.errors import InputError
from linnet.linear.lanczos import Iteration
from linnet.linear.preconditioner import PRECONDITIONERS
from linnet.memory import parse_bytes
from linnet.params import integer, number
from linnet.tangent.functional import OutputAdapter, check_output
from linnet.tangent.selection import Selector

SPACES = ("auto", "function", "parameter")
SOLVERS = ("auto", "cholesky", "cg")
MEANS = ("network", "zero")
WORDS = {
    "solver": SOLVERS,
    "variance": ("lanczos", "exact"),
    "derivative": ("exact", "finite-difference"),
    "mean": MEANS,
    "preconditioner": tuple(dict.fromkeys(PRECONDITIONERS["function"] + PRECONDITIONERS["parameter"])),
}
ITERATION = ("variance", "derivative", "preconditioner", "rank", "tolerance", "max_steps", "seed")
NAMES = ("solver", *ITERATION, "mean", "params", "output", "memory")


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
    params: Any = None  # which parameters vary
    output: Any = None  # how to turn the network's result into a tensor
    memory: str | int | None = None  # budget
    mean: str = "network"  # that of the process before the data

    @classmethod
    def of(cls, space: str, keywords: GPOptions, linearized: bool) -> Options:
        """Options from keywords."""
        given = dict[str, Any](keywords)
        unknown = sorted(set(given) - set(NAMES))
        if unknown:
            raise InputError(
                f"unknown argument {unknown[0]!r}", ", ".join(NAMES), "see help(linnet.TangentGP)"
            )
        if linearized and (given.get("params") is not None or given.get("output") is not None):
            raise InputError(
                "params= or output= with a Linearized",
                expected="neither: a linearization has its own",
                remedy="pass them to linnet.linearize",
            )
        for name, value, known in [
            ("space", space, SPACES),
            *((k, given.get(k), v) for k, v in WORDS.items()),
        ]:
            if (value is not None or name == "space") and value not in known:
                raise InputError(
                    f"{name}={value!r}", ", ".join(f'"{one}"' for one in known), f"leave {name}= out"
                )
        iteration = Iteration(**{name: given[name] for name in ITERATION if given.get(name) is not None})
        for name, least in (("rank", 0), ("max_steps", 1), ("seed", 0)):
            integer(name, getattr(iteration, name), least)
        parse_bytes(given.get("memory"))
        check_output(given.get("output"))
        number("tolerance", iteration.tolerance, above=0, remedy="leave tolerance= out for 1e-6")
        options = cls(
            space,
            given.get("solver") or "auto",
            iteration,
            given.get("params"),
            given.get("output"),
            given.get("memory"),
            given.get("mean") or "network",
        )
        return options._consistent(given)

    def _consistent(self, given: dict[str, Any]) -> Options:
        """Keywords that ask for one way of solving rule the others out."""
        name, solver, space = self.iteration.preconditioner, self.solver, self.space
        differences = self.iteration.derivative != "exact"
        wanted = [n for n in ("preconditioner", "variance", "derivative", "tolerance", "rank", "max_steps")
                  if given.get(n) is not None]  # fmt: skip
        if wanted and solver == "cholesky":
            raise InputError(
                f'{wanted[0]}= with solver="cholesky"', 'solver="cg" or "auto"', f"leave {wanted[0]}= out"
            )
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
        if space == "auto" and (differences or len(spaces) == 1):
            space = "parameter" if differences else spaces[0]
        if wanted:
            solver = "cg"
        return replace(self, space=space, solver=solver)
