"""The local linear model of any trained PyTorch network, and what it answers in closed form.

``import linnet`` loads nothing heavy: each name below is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linnet.curvatures import likelihoods as likelihoods
    from linnet.curvatures.build import curvature as curvature
    from linnet.curvatures.curvature import Curvature as Curvature
    from linnet.curvatures.saved import load_curvature as load_curvature
    from linnet.methods import continual as continual
    from linnet.methods import optim as optim
    from linnet.methods import rivals as rivals
    from linnet.methods import spectrum as spectrum
    from linnet.methods import surgery as surgery
    from linnet.methods.adversarial import Attack as Attack
    from linnet.methods.adversarial import fgsm as fgsm
    from linnet.methods.evaluate import evaluate as evaluate
    from linnet.methods.augment import Augmentation as Augmentation
    from linnet.methods.finetune import finetune as finetune
    from linnet.methods.finetuned import Finetuned as Finetuned
    from linnet.methods.finetuned import load_finetuned as load_finetuned
    from linnet.methods.fit import fit as fit
    from linnet.methods.gradient_flow import Flow as Flow
    from linnet.methods.gradient_flow import gradient_flow as gradient_flow
    from linnet.methods.head import with_head as with_head
    from linnet.methods.laplace import Laplace as Laplace
    from linnet.methods.laplace_load import load_laplace as load_laplace
    from linnet.methods.laplace_training import train_with_evidence as train_with_evidence
    from linnet.methods.linear_fit import LinearFit as LinearFit
    from linnet.methods.linear_posterior import LinearPosterior as LinearPosterior
    from linnet.methods.linear_posterior import linear_posterior as linear_posterior
    from linnet.methods.load_fit import load_fit as load_fit
    from linnet.methods.load_gp import load_gp as load_gp
    from linnet.methods.ood import Separation as Separation
    from linnet.methods.ood import ood as ood
    from linnet.methods.preconditioner import KroneckerPreconditioner as KroneckerPreconditioner
    from linnet.methods.predictive import Predictive as Predictive
    from linnet.methods.reports import RegressionReport as RegressionReport
    from linnet.methods.reports import Report as Report
    from linnet.methods.tangent_gp import TangentGP as TangentGP
    from linnet.methods.tangent_gp_predictive import TangentPredictive as TangentPredictive
    from linnet.tangent.linearized import Linearized as Linearized
    from linnet.tangent.linearized import linearize as linearize
    from linnet.tangent.preflight import Preflight as Preflight
    from linnet.tangent.preflight import preflight as preflight

__version__ = "0.1.0"

_HOME = {
    "linearize": "linnet.tangent.linearized",
    "Linearized": "linnet.tangent.linearized",
    "preflight": "linnet.tangent.preflight",
    "Preflight": "linnet.tangent.preflight",
    "with_head": "linnet.methods.head",
    "fit": "linnet.methods.fit",
    "LinearFit": "linnet.methods.linear_fit",
    "load_fit": "linnet.methods.load_fit",
    "Predictive": "linnet.methods.predictive",
    "curvature": "linnet.curvatures.build",
    "Curvature": "linnet.curvatures.curvature",
    "load_curvature": "linnet.curvatures.saved",
    "likelihoods": "linnet.curvatures",
    "Laplace": "linnet.methods.laplace",
    "load_laplace": "linnet.methods.laplace_load",
    "train_with_evidence": "linnet.methods.laplace_training",
    "TangentGP": "linnet.methods.tangent_gp",
    "TangentPredictive": "linnet.methods.tangent_gp_predictive",
    "load_gp": "linnet.methods.load_gp",
    "linear_posterior": "linnet.methods.linear_posterior",
    "LinearPosterior": "linnet.methods.linear_posterior",
    "rivals": "linnet.methods",
    "evaluate": "linnet.methods.evaluate",
    "Report": "linnet.methods.reports",
    "RegressionReport": "linnet.methods.reports",
    "ood": "linnet.methods.ood",
    "Separation": "linnet.methods.ood",
    "fgsm": "linnet.methods.adversarial",
    "Attack": "linnet.methods.adversarial",
    "finetune": "linnet.methods.finetune",
    "Finetuned": "linnet.methods.finetuned",
    "load_finetuned": "linnet.methods.finetuned",
    "Augmentation": "linnet.methods.augment",
    "KroneckerPreconditioner": "linnet.methods.preconditioner",
    "surgery": "linnet.methods",
    "gradient_flow": "linnet.methods.gradient_flow",
    "Flow": "linnet.methods.gradient_flow",
    "continual": "linnet.methods",
    "optim": "linnet.methods",
    "spectrum": "linnet.methods",
}
_NAMESPACES = ("continual", "likelihoods", "optim", "rivals", "spectrum", "surgery")  # modules whose contents are public

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'linnet' has no attribute {name!r}")
    if name in _NAMESPACES:
        value: Any = import_module(f"{_HOME[name]}.{name}")
    else:
        value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names."""
    return sorted(__all__)
