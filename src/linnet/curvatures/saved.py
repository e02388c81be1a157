"""A saved curvature, on the network that it was computed for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from linnet import tree
from linnet.curvatures.curvature import Curvature
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.matching import given_network, matching_function, require_witness
from linnet.tangent.modes import in_exact_mode

_OTHER = (
    "computed for",
    "the same network with the same weights",
    "load the same checkpoint into the network first, or compute the curvature again",
)


@in_exact_mode
def restored_curvature(
    state: dict[str, Any], path: Path, model: nn.Module, output: OutputAdapter = None
) -> Curvature:
    """The curvature of which ``Curvature.state`` was read from a file."""
    function = matching_function(given_network(model), state["network"], output, path, _OTHER)
    function.cache.probe = require_witness(function.check_runs, state["witness"], path, _OTHER)
    parts = tree.map_tensors(lambda t: t.to(function.device), state["parts"])
    return Curvature(parts, function, state["made"], state["applied"])
