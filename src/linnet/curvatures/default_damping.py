"""Default damping."""

from __future__ import annotations

import math

from linnet.curvatures.curvature import Curvature
from linnet.errors import NumericalError

DAMPING = 0.1  # share of the mean eigenvalue


def default_damping(curvature: Curvature, scale: float) -> float:
    """A tenth of the mean eigenvalue of s G."""
    mean = scale * float(curvature.trace()) / curvature.shape[0]
    if not (math.isfinite(mean) and mean > 0):
        raise NumericalError(
            f"the mean eigenvalue of the curvature is {mean}",
            expected="a positive number to take the damping from",
            remedy="pass damping=1.0, or check whether the outputs depend on the parameters",
        )
    return DAMPING * mean
