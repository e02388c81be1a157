"""A tangent Gaussian process on disk: one safetensors file with its settings as JSON metadata."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from linnet.files import as_path, load_tensors, save_tensors
from linnet.linear.files import flatten_inputs, system_state, unflatten_inputs
from linnet.linear.system import System
from linnet.tangent.batch import Inputs
from linnet.tangent.functional import Functional
from linnet.tangent_gp.options import Options

KIND = "tangent-gp"


def write_gp(directory: str | Path, state: dict[str, Any], system: System, base: Functional) -> Path:
    """Write a process: data, solved equations and variance cache, so that nothing is computed again.

    Args:
        directory: The folder; made if missing.
        state: Likelihood, hyper-parameters and options, as JSON.
        system: The solved equations.
        base: The network.

    Returns:
        The file written.
    """
    problem = system.problem
    assert problem.y is not None
    assert problem.weights is not None
    tensors, layout = flatten_inputs(problem.x)
    tensors |= {"y": problem.y, "weights": problem.weights, "residual": problem.residual}
    solved, how = system_state(system)
    metadata = {
        **state,
        "weights": base.fingerprint(),
        "parameters": list(base.names),
        "output": base.output if isinstance(base.output, str) else None,
        "custom_output": callable(base.output),
        "inputs": layout,
        "log_noise": problem.log_noise,
        "solved": how,
    }
    tensors |= solved
    return save_tensors(directory, KIND, {k: t.detach().contiguous() for k, t in tensors.items()}, metadata)


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
