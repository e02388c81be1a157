"""A linear fit on disk: the solution and the training data, so that nothing is lost by the round trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linnet.files import save
from linnet.fitting.sketch import SketchedNetwork, sketch_state
from linnet.tangent.functional import Functional
from linnet.tangent.matching import identity

KIND = "linear-fit"


def write_fit(directory: str | Path, function: Functional, state: dict[str, Any]) -> Path:
    """Write a fit and what tells its network from others."""
    network = identity(function) | {
        "float64": function.source is not None,
        "precision": {} if function.pinned is None else function.pinned.named(),
        "sketch": None,
    }
    if isinstance(function.model, SketchedNetwork):  # made by the fit, so that nobody else can bring it
        network["sketch"] = sketch_state(function.model)
    return save(directory, KIND, {"network": network, **state})
