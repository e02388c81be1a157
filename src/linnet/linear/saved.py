"""Solved equations of a linear model as trees of tensors, and back, so that nothing is computed again."""

from __future__ import annotations

from typing import Any

from linnet.linear.dual import DualSystem
from linnet.linear.iterative import Iteration, Iterative, Reused
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.label_problem import LabelProblem
from linnet.linear.newton import KernelNewton, NewtonSystem, WeightNewton
from linnet.linear.normal_newton import NormalNewton
from linnet.linear.normal_system import NormalSystem
from linnet.linear.problem import Memory, Problem
from linnet.linear.system import System

State = dict[str, Any]


def system_state(system: System) -> State:
    """Solved equations, apart from their problem."""
    constraints = system.constraints
    state = {"ridge": system.ridge, "work": dict(system.work), "constraints": constraints}
    if isinstance(system, KernelSystem):
        return state | {"kind": "kernel", "kernel": system.dual.kernel, "beta": system.dual.beta}
    if isinstance(system, NormalSystem):
        return state | {"kind": "normal", "normal": system.normal, "right": system.right}
    assert isinstance(system, Iterative)
    if system.krylov is None:
        start = system.solution.value[:, 0]
        return state | {"kind": "cg", "solution": start, "settings": system.settings}
    state |= {"kind": "iterative", "solution": system.solution, "panel": system.reused.panel}
    return state | {"space": system.space, "preconditioner": system.settings.preconditioner}


def restored_system(
    problem: Problem, state: State, memory: Memory = None, iteration: Iteration | None = None
) -> System:
    """The solved equations of ``system_state``."""
    ridge, work, kind = state["ridge"], state["work"], state["kind"]
    if state["constraints"] is not None:
        problem = problem.given(state["constraints"], kind == "kernel", memory)
    if kind == "kernel":
        dual = DualSystem(state["kernel"], problem.residual, ridge, beta=state["beta"])
        return KernelSystem(problem, dual, memory, work)
    if kind == "normal":
        return NormalSystem(problem, (state["normal"], state["right"]), ridge, memory, work)
    if kind == "cg":
        return Iterative(problem, ridge, state["settings"], memory, Reused(start=state["solution"]))
    assert iteration is not None
    solution = state["solution"]
    reused = Reused(name=state["preconditioner"], panel=state["panel"], solution=solution)
    settings = iteration.settings(len(solution.value))
    system = Iterative(problem, ridge, settings, memory, reused, state["space"], iteration)
    system.work = work
    return system


def newton_state(system: NewtonSystem) -> State:
    """An optimum, apart from its problem."""
    constraints = system.constraints
    state = {
        "ridge": system.ridge,
        "base": system.problem.free_base,
        "beta": system.beta,
        "constraints": constraints,
    }
    if isinstance(system, KernelNewton):
        return state | {"kernel": system.kernel}
    if isinstance(system, NormalNewton):
        return state | {"solution": system.eta, "settings": None}
    assert isinstance(system, WeightNewton)
    return state | {"solution": system.eta, "settings": system.settings}


def restored_newton(problem: LabelProblem, state: State) -> NewtonSystem:
    """The optimum of ``newton_state``."""
    if state["constraints"] is not None:
        problem = problem.given(state["constraints"], "kernel" in state)
    if "kernel" in state:
        return KernelNewton(problem, state["kernel"], state["ridge"], state["beta"])
    if state["settings"] is None:
        return NormalNewton(problem, state["ridge"], state["solution"])
    return WeightNewton(problem, state["ridge"], state["settings"], state["solution"])
