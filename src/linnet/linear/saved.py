"""Solved equations of a linear model as trees of tensors, and back, so that nothing is computed again."""

from __future__ import annotations

from typing import Any

from linnet.linear.constrained_system import ConstrainedSystem
from linnet.linear.dual import DualSystem
from linnet.linear.iterative import Iteration, Iterative, Reused
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.label_problem import LabelProblem
from linnet.linear.newton import KernelNewton, NewtonSystem, WeightNewton
from linnet.linear.normal_system import NormalSystem
from linnet.linear.problem import Memory, Problem
from linnet.linear.system import System

State = dict[str, Any]


def system_state(system: System) -> State:
    """Solved equations, apart from their problem."""
    free = system.free if isinstance(system, ConstrainedSystem) else system
    state = {"ridge": system.ridge, "work": dict(system.work), "constraints": system.constraints}
    if system.constraints is not None:
        state["left"] = system.residual
    if isinstance(free, KernelSystem):
        return state | {"kind": "kernel", "kernel": free.dual.kernel, "beta": free.dual.beta}
    if isinstance(free, NormalSystem):
        return state | {"kind": "normal", "normal": free.normal, "right": free.right}
    assert isinstance(free, Iterative)
    if free.krylov is None:
        return state | {"kind": "cg", "solution": free.delta, "settings": free.settings}
    state |= {"kind": "iterative", "solution": free.solution, "panel": free.reused.panel}
    return state | {"space": free.space, "preconditioner": free.settings.preconditioner}


def restored_system(
    problem: Problem, state: State, memory: Memory = None, iteration: Iteration | None = None
) -> System:
    """The solved equations of ``system_state``."""
    ridge, work, kind, constraints = state["ridge"], state["work"], state["kind"], state["constraints"]
    system: System
    if kind == "kernel":
        left = problem.residual if constraints is None else state["left"]
        dual = DualSystem(state["kernel"], left, ridge, beta=state["beta"])
        return KernelSystem(problem, dual, memory, constraints, work)
    if kind == "normal":
        system = NormalSystem(problem, (state["normal"], state["right"]), ridge, memory, work)
    elif kind == "cg":
        system = Iterative(problem, ridge, state["settings"], memory, Reused(start=state["solution"]))
    else:
        assert iteration is not None
        solution = state["solution"]
        reused = Reused(name=state["preconditioner"], panel=state["panel"], solution=solution)
        settings = iteration.settings(len(solution.value))
        system = Iterative(problem, ridge, settings, memory, reused, state["space"], iteration)
        system.work = work
    return system if constraints is None else ConstrainedSystem(system, constraints, memory)


def newton_state(system: NewtonSystem) -> State:
    """An optimum, apart from its problem."""
    state = {"ridge": system.ridge, "base": system.base, "beta": system.beta}
    if isinstance(system, KernelNewton):
        return state | {"kernel": system.kernel}
    assert isinstance(system, WeightNewton)
    return state | {"solution": system.delta, "settings": system.settings}


def restored_newton(problem: LabelProblem, state: State) -> NewtonSystem:
    """The optimum of ``newton_state``."""
    if "kernel" in state:
        return KernelNewton(problem, state["kernel"], state["ridge"], state["beta"])
    return WeightNewton(problem, state["ridge"], state["settings"], state["solution"])
