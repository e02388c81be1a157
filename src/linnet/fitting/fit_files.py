"""A linear fit on disk: one safetensors file with its record as JSON metadata."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from linnet.files import as_path, load_tensors, save_tensors
from linnet.fitting.constraints import Constraints, constraint_tensors, constraints_from
from linnet.fitting.dual import DualSystem
from linnet.fitting.primal import Primal
from linnet.fitting.softmax_dual import SoftmaxDual
from linnet.fitting.softmax_newton_cg import SoftmaxPrimal
from linnet.fitting.targets import Targets
from linnet.tangent.batch import Inputs
from linnet.tangent.functional import Functional

KIND = "linear-fit"


def write_fit(
    directory: str | Path,
    function: Functional,
    x: Inputs,
    targets: Targets,
    system: DualSystem | Primal | SoftmaxDual | SoftmaxPrimal,
    record: dict[str, Any],
    held_out: Tensor | None = None,
    constraints: Constraints | None = None,
) -> Path:
    """Write a fit: δ, β, the kernel and the training inputs, so that nothing is lost by the round trip.

    Args:
        directory: The folder; made if missing.
        function: The network.
        x: Training inputs.
        targets: Training targets.
        system: The solved equations.
        record: What was chosen and why.
        held_out: Held-out outputs of a cross-fitted head, (N, C).
        constraints: Equations on outputs that the system is to obey.

    Returns:
        The file written.
    """
    tensors, layout = flatten_inputs(x)
    held = None
    if constraints is not None:
        inputs, held_layout = flatten_inputs(constraints.equations.x, "constraints.x")
        tensors |= inputs | constraint_tensors(constraints)
        held = {"inputs": held_layout, "redundant": constraints.redundant}
    tensors |= {"targets": targets.values, "beta": system.beta}
    if isinstance(system, DualSystem | Primal):
        tensors["residual"] = system.residual
    else:
        tensors["base"] = system.base
    if held_out is not None:
        tensors["held_out"] = held_out
    tensors["solution"] = system.kernel if isinstance(system, DualSystem | SoftmaxDual) else system.delta
    settings = None if isinstance(system, DualSystem | SoftmaxDual) else asdict(system.settings)
    metadata = {
        "loss": "squared" if isinstance(system, DualSystem | Primal) else "cross-entropy",
        "weights": function.fingerprint(),
        "float64": function.source is not None,
        "parameters": list(function.names),
        "inputs": layout,
        "output": function.output if isinstance(function.output, str) else None,
        "custom_output": callable(function.output),
        "ridge": system.ridge,
        "classes": targets.classes,
        "scale": targets.scale,
        "axis": targets.axis,
        "record": record,
        "settings": settings,
        "constraints": held,
    }
    return save_tensors(directory, KIND, {k: t.contiguous() for k, t in tensors.items()}, metadata)


def read_fit(directory: str | Path) -> tuple[Path, dict[str, Tensor], Inputs, dict[str, Any]]:
    """Read what ``write_fit`` wrote.

    Args:
        directory: The folder, or the file itself.

    Returns:
        The file, its tensors, the training inputs and the metadata.
    """
    path = as_path(directory)
    path = path / f"{KIND}.safetensors" if path.is_dir() or not path.suffix else path
    tensors, metadata = load_tensors(path, KIND)
    return path, tensors, unflatten_inputs(tensors, metadata["inputs"]), metadata


def read_constraints(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Constraints | None:
    """The equations on outputs of a fit that was read.

    Args:
        tensors: Its tensors.
        metadata: Its metadata.

    Returns:
        The equations, ``None`` for a fit without any.
    """
    held = metadata.get("constraints")
    if held is None:
        return None
    x = unflatten_inputs(tensors, held["inputs"], "constraints.x")
    return constraints_from(tensors, x, tensors["beta"].shape[1], held["redundant"])


def flatten_inputs(x: Inputs, prefix: str = "x") -> tuple[dict[str, Tensor], Any]:
    """Tensors by path, and the structure as JSON."""
    if isinstance(x, Tensor):
        return {prefix: x}, "tensor"
    items = x.items() if isinstance(x, dict) else enumerate(x)
    tensors: dict[str, Tensor] = {}
    layout: dict[str, Any] = {"kind": "dict" if isinstance(x, dict) else "tuple", "parts": {}}
    for key, value in items:
        found, layout["parts"][str(key)] = flatten_inputs(value, f"{prefix}/{key}")
        tensors |= found
    return tensors, layout


def unflatten_inputs(tensors: dict[str, Tensor], layout: Any, prefix: str = "x") -> Inputs:
    """The reverse of ``flatten_inputs``."""
    if layout == "tensor":
        return tensors[prefix]
    parts = {key: unflatten_inputs(tensors, part, f"{prefix}/{key}") for key, part in layout["parts"].items()}
    return parts if layout["kind"] == "dict" else tuple(parts.values())
