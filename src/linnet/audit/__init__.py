"""Audits of a fit, as ``linnet.audit``: influence, label errors, selection, compatibility, privacy, drift.

Every answer is linear algebra on the solved fit; none of them trains anything.
"""

from __future__ import annotations

from linnet.audit.certificates import accuracy, sketch_error
from linnet.audit.constrained import compatible, counterfactual, flips, group_means
from linnet.audit.forgetting import forgetting_certificate
from linnet.audit.gradient_store import GradientStore
from linnet.audit.influence import influence, loss_influence, weight_changes
from linnet.audit.mislabel import mislabeled
from linnet.audit.monitor import monitor
from linnet.audit.private_release import release
from linnet.audit.selection import select, summarize
from linnet.audit.stress import stress_test
from linnet.fitting.validation_ridge import ridge_gradient, ridge_path, tune_ridge

__all__ = [
    "accuracy",
    "loss_influence",
    "influence",
    "weight_changes",
    "GradientStore",
    "mislabeled",
    "monitor",
    "stress_test",
    "sketch_error",
    "summarize",
    "ridge_path",
    "ridge_gradient",
    "tune_ridge",
    "select",
    "flips",
    "compatible",
    "counterfactual",
    "group_means",
    "forgetting_certificate",
    "release",
]
