"""Audits of a fit, as ``linnet.audit``: influence, label errors, selection, compatibility, privacy.

Every answer is linear algebra on the solved fit; none of them trains anything.
"""

from __future__ import annotations

from linnet.audit.accuracy import Accuracy, accuracy
from linnet.audit.compatibility import Compatible, Flips, compatible, flips
from linnet.audit.counterfactuals import Counterfactual, counterfactual
from linnet.audit.fairness import GroupMeans, group_means
from linnet.audit.forgetting import ForgettingCertificate, forgetting_certificate
from linnet.audit.gradient_store import GradientStore, TopExamples
from linnet.audit.influence import Influence, influence, weight_changes
from linnet.audit.loss_influence import loss_influence
from linnet.audit.mislabel import mislabeled
from linnet.audit.private_release import PrivacyCertificate, Release, release
from linnet.audit.selection import Selection, select
from linnet.audit.sketch import SketchError, sketch_error
from linnet.audit.summary import Summary, summarize
from linnet.fitting.validation_ridge import ValidationPath, ridge_gradient, ridge_path, tune_ridge

__all__ = [
    "accuracy",
    "Accuracy",
    "loss_influence",
    "influence",
    "Influence",
    "weight_changes",
    "GradientStore",
    "TopExamples",
    "mislabeled",
    "sketch_error",
    "SketchError",
    "summarize",
    "Summary",
    "ridge_path",
    "ridge_gradient",
    "tune_ridge",
    "ValidationPath",
    "select",
    "Selection",
    "flips",
    "Flips",
    "compatible",
    "Compatible",
    "counterfactual",
    "Counterfactual",
    "group_means",
    "GroupMeans",
    "forgetting_certificate",
    "ForgettingCertificate",
    "release",
    "Release",
    "PrivacyCertificate",
]
