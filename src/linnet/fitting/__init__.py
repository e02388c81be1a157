"""The linear fit and everything it answers; ``linnet.fit`` makes one, and these say how it is solved."""

from __future__ import annotations

from linnet.fitting.solver import CG, SGD, Dual, Nystrom, Shared, Sketch
from linnet.linear.targets import OneHot

__all__ = [
    "CG", "SGD", "Dual", "Nystrom", "OneHot",
    "Shared", "Sketch",
]  # fmt: skip
