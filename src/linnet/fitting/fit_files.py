"""A linear fit on disk: one safetensors file with its record as JSON metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from linnet.files import as_path, load_tensors, save_tensors
from linnet.linear.files import State, flatten_inputs, unflatten_inputs
from linnet.linear.targets import Targets
from linnet.tangent.batch import Inputs
from linnet.tangent.functional import Functional

KIND = "linear-fit"


def write_fit(
    directory: str | Path,
    function: Functional,
    data: tuple[Inputs, Targets],
    solved: State,
    told: dict[str, Any],
    held_out: Tensor | None = None,
) -> Path:
    """Write a fit: its solution and the training data, so that nothing is lost by the round trip.

    Args:
        directory: The folder; made if missing.
        function: The network.
        data: Training inputs and targets.
        solved: Tensors and JSON of the solved equations.
        told: What else the fit knows, as JSON.
        held_out: Held-out outputs of a cross-fitted head, (N, C).

    Returns:
        The file written.
    """
    x, targets = data
    tensors, layout = flatten_inputs(x)
    tensors |= solved[0] | {"targets": targets.values}
    if held_out is not None:
        tensors["held_out"] = held_out
    metadata = {
        **told,
        "weights": function.fingerprint(),
        "float64": function.source is not None,
        "parameters": list(function.names),
        "inputs": layout,
        "output": function.output if isinstance(function.output, str) else None,
        "custom_output": callable(function.output),
        "classes": targets.classes,
        "scale": targets.scale,
        "axis": targets.axis,
        "solved": solved[1],
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
