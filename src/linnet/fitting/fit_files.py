"""A linear fit on disk: one safetensors file with its record as JSON metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from linnet.fitting.sketch import SketchedNetwork, sketch_state
from linnet.linear.files import State, write_solution
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
    """Write a fit: its solution and the training data, so that nothing is lost by the round trip."""
    # held_out (N, C)
    x, targets = data
    tensors = solved[0] | {"targets": targets.values}
    if held_out is not None:
        tensors["held_out"] = held_out
    own = {"classes": targets.classes, "scale": targets.scale, "axis": targets.axis}
    types = {} if function.pinned is None else function.pinned.named()
    told = told | own | {"float64": function.source is not None, "precision": types, "sketch": None}
    if isinstance(function.model, SketchedNetwork):  # made by the fit, so that nobody else can bring it
        basis, told["sketch"] = sketch_state(function.model)
        tensors |= basis
    return write_solution(directory, KIND, function, x, (tensors, solved[1]), told)
