"""Scores, calibration, out-of-distribution detection and attacks, as ``linnet.metrics``."""

from __future__ import annotations

from linnet.metrics.adversarial import Attack, AttackPoint, fgsm
from linnet.metrics.calibration import CalibrationBins, equal_mass, equal_width
from linnet.metrics.evaluate import evaluate
from linnet.metrics.ood import Separation, ood
from linnet.metrics.ranking import (
    Detection,
    InverseCumulative,
    RiskCoverage,
    inverse_cumulative,
    risk_coverage,
)
from linnet.metrics.reports import RegressionReport, Report

__all__ = [
    "evaluate",
    "Report",
    "RegressionReport",
    "ood",
    "Separation",
    "fgsm",
    "Attack",
    "AttackPoint",
    "equal_width",
    "equal_mass",
    "CalibrationBins",
    "risk_coverage",
    "RiskCoverage",
    "inverse_cumulative",
    "InverseCumulative",
    "Detection",
]
