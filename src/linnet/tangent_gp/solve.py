"""Plans and solves a tangent Gaussian process, and records what was done."""

from __future__ import annotations

from typing import Any

from linnet.tangent.functional import Functional
from linnet.tangent_gp.dense import FunctionDense, ParameterDense, System
from linnet.tangent_gp.iterative import Iterative, Shared
from linnet.tangent_gp.options import Options
from linnet.tangent_gp.plan import GPPlan, choose
from linnet.tangent_gp.task import Task


def solve(
    function: Functional, task: Task, ridge: float, options: Options, before: System | None
) -> tuple[GPPlan, System]:
    """Choose a way and solve.

    Args:
        function: The network.
        task: The data.
        ridge: ρ.
        options: What was requested.
        before: The system of another task on the same network, whose caches are taken.

    Returns:
        What was chosen, and the solved equations.

    Raises:
        MemoryBudgetError: If no way fits.
        NumericalError: If conjugate gradients do not converge.
    """
    rank = options.iteration.rank
    plan = choose(function, task.x, task.c, options.space, options.solver, options.memory, rank)
    way = plan.chosen
    if way.solver == "cholesky":
        kind = FunctionDense if way.space == "function" else ParameterDense
        return plan, kind.solve(function, task, ridge, options.memory, before)
    space = "stored" if way.stored else way.space
    shared = Shared()
    if isinstance(before, Iterative) and before.space == space == "parameter":
        shared.preconditioner, shared.name = before.shared.preconditioner, before.shared.name
    return plan, Iterative(function, task, ridge, space, options.iteration, options.memory, shared)


def describe(plan: GPPlan, system: System, options: Options) -> dict[str, Any]:
    """What was solved and what it took.

    Args:
        plan: What was chosen.
        system: The solved equations.
        options: What was requested.

    Returns:
        A dict that ``json`` can write.
    """
    found: dict[str, Any] = {
        "examples": system.task.n,
        "outputs": system.task.c,
        "targets": system.task.count,
        "plan": plan.to_dict(),
        "certificate": system.certificate,
        "work": dict(system.work),
        "variance": "exact",
    }
    if isinstance(system, Iterative):
        found["preconditioner"] = system.shared.name
        found["variance"] = options.iteration.variance
        panel = system.shared.panel
        if panel is not None:
            found["directions"] = panel.columns.shape[1]
            found["left out"] = panel.left_out / system.ridge  # of the trace, in units of ρ
    return found
