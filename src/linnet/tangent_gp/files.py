"""A tangent Gaussian process on disk: one safetensors file with its settings as JSON metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linnet.linear.files import system_state, write_solution
from linnet.linear.system import System
from linnet.tangent.functional import Functional

KIND = "tangent-gp"


def write_gp(directory: str | Path, state: dict[str, Any], system: System, base: Functional) -> Path:
    """Write a process: data, solved equations and variance cache, so that nothing is computed again."""
    problem = system.problem
    assert problem.y is not None
    assert problem.weights is not None
    tensors, how = system_state(system)
    tensors |= {"y": problem.y, "weights": problem.weights, "residual": problem.residual}
    return write_solution(directory, KIND, base, problem.x, (tensors, how), state)
