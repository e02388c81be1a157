"""Training by repeated linearization and with curvature, as ``linnet.optim``."""

from __future__ import annotations

from linnet.optim.feature_schedules import (
    Converged,
    Decision,
    KernelDrift,
    Moment,
    OutputGap,
    Schedule,
)
from linnet.optim.gauss_newton import GaussNewton
from linnet.optim.gauss_newton_batch import GrowingBatches
from linnet.optim.gauss_newton_settings import Damping, Settings
from linnet.optim.gradient_flow import gradient_flow
from linnet.optim.preconditioner import KroneckerPreconditioner
from linnet.optim.relinearize import IterativeLinearization

__all__ = [
    "GaussNewton",
    "Damping",
    "Settings",
    "GrowingBatches",
    "IterativeLinearization",
    "OutputGap",
    "KernelDrift",
    "Converged",
    "Schedule",
    "Moment",
    "Decision",
    "gradient_flow",
    "KroneckerPreconditioner",
]
