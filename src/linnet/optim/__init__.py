"""Training through linearizations and with curvature, as ``linnet.optim``."""

from __future__ import annotations

from linnet.optim.alignment_study import Alignment, alignment
from linnet.optim.feature_schedules import (
    Converged,
    KernelDrift,
    LinearityGap,
    Moment,
    Schedule,
    Verdict,
)
from linnet.optim.gauss_newton import GaussNewton
from linnet.optim.gauss_newton_batch import GrowingBatches
from linnet.optim.gauss_newton_settings import Damping, Settings, StepReport
from linnet.optim.relinearize import IterativeLinearization
from linnet.optim.relinearize_report import LinearizationReport

__all__ = [
    "GaussNewton",
    "Damping",
    "Settings",
    "StepReport",
    "GrowingBatches",
    "alignment",
    "Alignment",
    "IterativeLinearization",
    "LinearizationReport",
    "LinearityGap",
    "KernelDrift",
    "Converged",
    "Schedule",
    "Moment",
    "Verdict",
]
