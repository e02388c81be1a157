"""Solved equations of a linear model as tensors and JSON, and back, so that nothing is computed again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from linnet.files import as_path, load_tensors, save_tensors
from linnet.linear.constrained_system import ConstrainedSystem
from linnet.linear.constraints import Constraints, constraint_tensors, constraints_from
from linnet.linear.dual import DualSystem
from linnet.linear.iterative import CGSettings, Iteration, Iterative, Panel, Reused
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.label_problem import LabelProblem
from linnet.linear.newton import KernelNewton, NewtonSystem, WeightNewton
from linnet.linear.normal_system import NormalSystem
from linnet.linear.problem import Memory, Problem
from linnet.linear.system import System
from linnet.solvers.solution import Solution, Status
from linnet.tangent.batch import Inputs, flatten_inputs, unflatten_inputs
from linnet.tangent.functional import Functional

State = tuple[dict[str, Tensor], dict[str, Any]]


def system_state(system: System) -> State:
    """Tensors and JSON of solved equations, apart from their problem."""
    free = system.free if isinstance(system, ConstrainedSystem) else system
    tensors, how = _solved(free)
    how |= {"ridge": system.ridge, "work": dict(system.work), "constraints": None}
    if system.constraints is not None:
        inputs, layout = flatten_inputs(system.constraints.equations.x, "constraints.x")
        tensors |= inputs | constraint_tensors(system.constraints)
        how["constraints"] = {"inputs": layout, "redundant": system.constraints.redundant}
        tensors["left"] = system.residual
    return tensors, how


def restored_system(
    problem: Problem, state: State, memory: Memory = None, iteration: Iteration | None = None
) -> System:
    """The solved equations that ``system_state`` wrote."""
    tensors, how = state
    ridge, work, kind = how["ridge"], dict(how["work"]), how["kind"]
    held = _constraints(tensors, how, problem.c)
    system: System
    if kind == "kernel":
        left = problem.residual if held is None else tensors["left"]
        dual = DualSystem(tensors["kernel"], left, ridge, beta=tensors["beta"])
        return KernelSystem(problem, dual, memory, held, work)
    if kind == "normal":
        system = NormalSystem(problem, (tensors["normal"], tensors["right"]), ridge, memory, work)
    elif kind == "cg":
        settings = CGSettings(**how["settings"])
        system = Iterative(problem, ridge, settings, memory, Reused(start=tensors["solution"]))
    else:
        assert iteration is not None
        found = how["panel"]
        panel = found and Panel(tensors["columns"], tensors["values"], found["primal"], found["left_out"])
        status, residual = Status[how["status"]], how["residual"]
        solution = Solution(tensors["solution"], status, how["steps"], residual)
        reused = Reused(name=how["preconditioner"], panel=panel, solution=solution)
        settings = iteration.settings(len(solution.value))
        system = Iterative(problem, ridge, settings, memory, reused, how["space"], iteration)
        system.work = work
    return system if held is None else ConstrainedSystem(system, held, memory)


def newton_state(system: NewtonSystem) -> State:
    """Tensors and JSON of an optimum, apart from its problem."""
    tensors, how = {"base": system.base, "beta": system.beta}, {"ridge": system.ridge, "settings": None}
    if isinstance(system, KernelNewton):
        return tensors | {"kernel": system.kernel}, how
    assert isinstance(system, WeightNewton)
    return tensors | {"solution": system.delta}, how | {"settings": asdict(system.settings)}


def restored_newton(problem: LabelProblem, state: State) -> NewtonSystem:
    """The optimum that ``newton_state`` wrote."""
    tensors, how = state
    if how["settings"] is None:
        return KernelNewton(problem, tensors["kernel"], how["ridge"], tensors["beta"])
    return WeightNewton(problem, how["ridge"], CGSettings(**how["settings"]), tensors["solution"])


def _solved(system: System) -> State:
    """Tensors of a solution, and what they are."""
    if isinstance(system, KernelSystem):
        return {"kernel": system.dual.kernel, "beta": system.dual.beta}, {"kind": "kernel"}
    if isinstance(system, NormalSystem):
        return {"normal": system.normal, "right": system.right}, {"kind": "normal"}
    assert isinstance(system, Iterative)
    if system.krylov is None:
        return {"solution": system.delta}, {"kind": "cg", "settings": asdict(system.settings)}
    solution, panel = system.solution, system.reused.panel
    how: dict[str, Any] = {
        "kind": "iterative",
        "space": system.space,
        "preconditioner": system.settings.preconditioner,
        "status": solution.status.name,
        "steps": solution.steps,
        "residual": solution.residual,
        "panel": None,
    }
    tensors = {"solution": solution.value}
    if panel is not None:
        how["panel"] = {"primal": panel.primal, "left_out": panel.left_out}
        tensors |= {"columns": panel.columns, "values": panel.values}
    return tensors, how


def _constraints(tensors: dict[str, Tensor], how: dict[str, Any], outputs: int) -> Constraints | None:
    """The equations on outputs, ``None`` without any."""
    held = how["constraints"]
    if held is None:
        return None
    x = unflatten_inputs(tensors, held["inputs"], "constraints.x")
    return constraints_from(tensors, x, outputs, held["redundant"])


def write_solution(
    directory: str | Path, kind: str, function: Functional, x: Inputs, state: State, told: dict[str, Any]
) -> Path:
    """Write a solution with its inputs to a folder, atomically."""
    tensors, layout = flatten_inputs(x)
    metadata = {
        **told,
        "weights": function.fingerprint(),
        "parameters": list(function.names),
        "output": function.output if isinstance(function.output, str) else None,
        "custom_output": callable(function.output),
        "inputs": layout,
        "solved": state[1],
    }
    tensors = {key: t.detach().contiguous() for key, t in (tensors | state[0]).items()}
    return save_tensors(directory, kind, tensors, metadata)


def read_solution(directory: str | Path, kind: str) -> tuple[Path, dict[str, Tensor], Inputs, dict[str, Any]]:
    """Read what ``write_solution`` wrote."""
    path = as_path(directory)
    path = path / f"{kind}.safetensors" if path.is_dir() or not path.suffix else path
    tensors, metadata = load_tensors(path, kind)
    return path, tensors, unflatten_inputs(tensors, metadata["inputs"]), metadata
