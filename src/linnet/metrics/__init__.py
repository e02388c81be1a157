"""Scores, calibration, out-of-distribution detection and attacks, as ``linnet.metrics``."""

from __future__ import annotations

from linnet.metrics.adversarial import fgsm
from linnet.metrics.evaluate import evaluate
from linnet.metrics.ood import ood

__all__ = ["evaluate", "ood", "fgsm"]
