"""A linear fit on disk: one safetensors file with its record as JSON metadata."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from linnet.files import load_tensors, save_tensors
from linnet.methods.fitting.dual import Dual
from linnet.methods.fitting.primal import Primal
from linnet.methods.fitting.targets import Targets
from linnet.tangent.batch import Inputs
from linnet.tangent.functional import Functional

KIND = "linear-fit"


def write_fit(
    directory: str | Path,
    function: Functional,
    x: Inputs,
    targets: Targets,
    system: Dual | Primal,
    record: dict[str, Any],
) -> Path:
    """Write a fit: δ, β, the kernel and the training inputs, so that nothing is lost by the round trip.

    Args:
        directory: The folder; made if missing.
        function: The network.
        x: Training inputs.
        targets: Training targets.
        system: The solved equations.
        record: What was chosen and why.

    Returns:
        The file written.
    """
    tensors, layout = _flatten_inputs(x)
    tensors |= {"targets": targets.values, "residual": system.residual, "beta": system.beta}
    tensors["solution"] = system.kernel if isinstance(system, Dual) else system.delta
    settings = asdict(system.settings) if isinstance(system, Primal) else None
    metadata = {
        "weights": function.fingerprint(),
        "parameters": list(function.names),
        "inputs": layout,
        "output": function.output if isinstance(function.output, str) else None,
        "custom_output": callable(function.output),
        "ridge": system.ridge,
        "classes": targets.classes,
        "scale": targets.scale,
        "record": record,
        "settings": settings,
    }
    return save_tensors(Path(directory), KIND, {k: t.contiguous() for k, t in tensors.items()}, metadata)


def read_fit(directory: str | Path) -> tuple[Path, dict[str, Tensor], Inputs, dict[str, Any]]:
    """Read what ``write_fit`` wrote.

    Args:
        directory: The folder, or the file itself.

    Returns:
        The file, its tensors, the training inputs and the metadata.
    """
    path = Path(directory)
    path = path / f"{KIND}.safetensors" if path.is_dir() or not path.suffix else path
    tensors, metadata = load_tensors(path, KIND)
    return path, tensors, _unflatten_inputs(tensors, metadata["inputs"]), metadata


def _flatten_inputs(x: Inputs, prefix: str = "x") -> tuple[dict[str, Tensor], Any]:
    """Tensors by path, and the structure as JSON."""
    if isinstance(x, Tensor):
        return {prefix: x}, "tensor"
    items = x.items() if isinstance(x, dict) else enumerate(x)
    tensors: dict[str, Tensor] = {}
    layout: dict[str, Any] = {"kind": "dict" if isinstance(x, dict) else "tuple", "parts": {}}
    for key, value in items:
        found, layout["parts"][str(key)] = _flatten_inputs(value, f"{prefix}/{key}")
        tensors |= found
    return tensors, layout


def _unflatten_inputs(tensors: dict[str, Tensor], layout: Any, prefix: str = "x") -> Inputs:
    """The reverse of ``_flatten_inputs``."""
    if layout == "tensor":
        return tensors[prefix]
    parts = {
        key: _unflatten_inputs(tensors, part, f"{prefix}/{key}") for key, part in layout["parts"].items()
    }
    return parts if layout["kind"] == "dict" else tuple(parts.values())
