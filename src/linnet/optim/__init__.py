"""Training by repeated linearization and with curvature, as ``linnet.optim``."""

from __future__ import annotations

from linnet.optim.gauss_newton import GaussNewton
from linnet.optim.gauss_newton_settings import Damping
from linnet.optim.gradient_flow import gradient_flow
from linnet.optim.preconditioner import KroneckerPreconditioner
from linnet.optim.relinearize import Converged, IterativeLinearization, KernelDrift, OutputGap

__all__ = [
    "GaussNewton",
    "Damping",
    "IterativeLinearization",
    "OutputGap",
    "KernelDrift",
    "Converged",
    "gradient_flow",
    "KroneckerPreconditioner",
]
