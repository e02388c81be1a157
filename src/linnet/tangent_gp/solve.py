"""Plans and solves a tangent Gaussian process, and records what was done."""

from __future__ import annotations

from typing import Any

from linnet.linear.iterative import Iterative, Shared
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.normal_system import NormalSystem
from linnet.linear.problem import Problem
from linnet.linear.system import System
from linnet.tangent_gp.options import Options
from linnet.tangent_gp.plan import GPPlan, choose


def solve(problem: Problem, ridge: float, options: Options, before: System | None) -> tuple[GPPlan, System]:
    """Choose a way and solve."""
    plan = planned(problem, options)
    way = plan.chosen
    if way.solver == "cholesky":
        kind = KernelSystem if way.space == "function" else NormalSystem
        return plan, kind.solved(problem, ridge, options.memory, before)
    space = "stored" if way.stored else way.space
    shared, how = Shared(), options.iteration
    if (
        isinstance(before, Iterative)
        and before.space == space == "parameter"
        and before.shared.preconditioner is not None
    ):
        shared = Shared(preconditioner=before.shared.preconditioner, name=before.settings.preconditioner)
    unknowns = problem.function.space.dim if space == "parameter" else problem.n * problem.c
    settings = how.settings(unknowns)
    return plan, Iterative(problem, ridge, settings, options.memory, shared, space, how)


def planned(problem: Problem, options: Options) -> GPPlan:
    """The way of solving that the options leave open, chosen."""
    asked = options.space, options.solver, options.memory, options.iteration.rank
    return choose(problem.function, problem.x, problem.c, *asked)


def describe(plan: GPPlan, system: System, options: Options) -> dict[str, Any]:
    """Summary of the solution and its cost."""
    found: dict[str, Any] = {
        "examples": system.n,
        "outputs": system.c,
        "targets": system.problem.count,
        "plan": plan.to_dict(),
        "certificate": system.certificate(),
        "work": dict(system.work),
        "variance": "exact",
    }
    if isinstance(system, Iterative):
        found["preconditioner"] = system.settings.preconditioner
        found["variance"] = options.iteration.variance
        panel = system.shared.panel
        if panel is not None:
            found["directions"] = panel.columns.shape[1]
            found["left out"] = panel.left_out / system.ridge  # of the trace, in units of ρ
    return found
