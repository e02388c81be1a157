"""Scores, calibration, out-of-distribution detection and attacks, as ``linnet.metrics``."""

from __future__ import annotations

from linnet.metrics.adversarial import fgsm
from linnet.metrics.evaluate import evaluate
from linnet.metrics.ood import Separation, ood
from linnet.metrics.reports import RegressionReport, Report

__all__ = ["evaluate", "Report", "RegressionReport", "ood", "Separation", "fgsm"]
