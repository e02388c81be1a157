"""A tangent Gaussian process on disk: one safetensors file with its settings as JSON metadata."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from linnet.files import as_path, load_tensors, save_tensors
from linnet.fitting.dual import DualSystem
from linnet.fitting.fit_files import flatten_inputs, unflatten_inputs
from linnet.solvers.solution import Solution, Status
from linnet.tangent.batch import Inputs
from linnet.tangent.functional import Functional
from linnet.tangent_gp.dense import FunctionDense, ParameterDense, System
from linnet.tangent_gp.iterative import Iterative, Panel, Shared
from linnet.tangent_gp.options import Options
from linnet.tangent_gp.task import Task

KIND = "tangent-gp"


def write_gp(
    directory: str | Path, state: dict[str, Any], task: Task, system: System, base: Functional
) -> Path:
    """Write a process: data, solved equations and variance cache, so that nothing is computed again.

    Args:
        directory: The folder; made if missing.
        state: Likelihood, hyper-parameters and options, as JSON.
        task: The data.
        system: The solved equations.
        base: The network.

    Returns:
        The file written.
    """
    tensors, layout = flatten_inputs(task.x)
    tensors |= {"y": task.y, "weights": task.weights, "residual": task.residual}
    solved, how = _solved(system)
    metadata = {
        **state,
        "weights": base.fingerprint(),
        "parameters": list(base.names),
        "output": base.output if isinstance(base.output, str) else None,
        "custom_output": callable(base.output),
        "inputs": layout,
        "log_noise": task.log_noise,
        "ridge": system.ridge,
        "work": dict(system.work),
        **how,
    }
    tensors |= solved
    return save_tensors(directory, KIND, {k: t.detach().contiguous() for k, t in tensors.items()}, metadata)


def _solved(system: System) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of solved equations, and what they are."""
    if isinstance(system, FunctionDense):
        return {"kernel": system.dual.kernel, "beta": system.dual.beta}, {"kind": "function"}
    if isinstance(system, ParameterDense):
        return {"normal": system.normal, "right": system.right}, {"kind": "parameter"}
    assert isinstance(system, Iterative)
    solution, panel = system.solution, system.shared.panel
    how: dict[str, Any] = {
        "kind": "iterative",
        "space": system.space,
        "preconditioner": system.shared.name,
        "status": solution.status.name,
        "steps": solution.steps,
        "certificate": solution.residual,
        "panel": None,
    }
    tensors = {"solution": solution.value}
    if panel is not None:
        how["panel"] = {"primal": panel.primal, "left_out": panel.left_out}
        tensors |= {"columns": panel.columns, "values": panel.values}
    return tensors, how


def read_gp(directory: str | Path) -> tuple[Path, dict[str, Tensor], Inputs, dict[str, Any]]:
    """Read what ``write_gp`` wrote.

    Args:
        directory: The folder, or the file itself.

    Returns:
        The file, its tensors, the training inputs and the metadata.
    """
    path = as_path(directory)
    path = path / f"{KIND}.safetensors" if path.is_dir() or not path.suffix else path
    tensors, metadata = load_tensors(path, KIND)
    return path, tensors, unflatten_inputs(tensors, metadata["inputs"]), metadata


def restored_system(
    function: Functional, task: Task, tensors: dict[str, Tensor], metadata: dict[str, Any], options: Options
) -> System:
    """The solved equations as they were saved.

    Args:
        function: The network, of the observed outputs.
        task: The data.
        tensors: Tensors of the file.
        metadata: Its metadata.
        options: How to go on.

    Returns:
        The system.
    """
    ridge, work = metadata["ridge"], metadata["work"]
    if metadata["kind"] == "function":
        dual = DualSystem(tensors["kernel"], task.residual, ridge, beta=tensors["beta"])
        return FunctionDense(function, task, dual, options.memory, work)
    if metadata["kind"] == "parameter":
        matrices = tensors["normal"], tensors["right"]
        return ParameterDense(function, task, matrices, ridge, options.memory, work)
    how = metadata["panel"]
    panel = how and Panel(tensors["columns"], tensors["values"], how["primal"], how["left_out"])
    status, steps = Status[metadata["status"]], metadata["steps"]
    solution = Solution(tensors["solution"], status, steps, metadata["certificate"])
    shared = Shared(panel=panel, solution=solution)
    if metadata["preconditioner"] == "none":
        shared.name = "none"
    system = Iterative(function, task, ridge, metadata["space"], options.iteration, options.memory, shared)
    system.work = dict(work)
    return system


def options_of(options: Options) -> dict[str, Any]:
    """Options as JSON, those of the network apart.

    Args:
        options: The options.

    Returns:
        Keywords of ``TangentGP`` that are not at their defaults.
    """
    plain = type(options.iteration)()
    found = {k: v for k, v in asdict(options.iteration).items() if v != getattr(plain, k)}
    return {**found, "solver": options.solver, "memory": options.memory, "mean": options.mean}
