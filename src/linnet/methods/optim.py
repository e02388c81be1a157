"""Training through linearizations and with curvature, as ``linnet.optim``."""

from __future__ import annotations

from linnet.methods.feature_schedules import Converged, KernelDrift, LinearityGap, Moment, Schedule, Verdict
from linnet.methods.relinearize import IterativeLinearization
from linnet.methods.relinearize_report import LinearizationReport

__all__ = [
    "IterativeLinearization",
    "LinearizationReport",
    "LinearityGap",
    "KernelDrift",
    "Converged",
    "Schedule",
    "Moment",
    "Verdict",
]
