"""The local linear model of any trained PyTorch network, and what it answers in closed form.

``import linnet`` loads nothing heavy: each name below is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linnet import likelihoods as likelihoods
    from linnet.curvatures.build import curvature as curvature
    from linnet.curvatures.curvature import Curvature as Curvature
    from linnet.curvatures.running import RunningCurvature as RunningCurvature
    from linnet.curvatures.saved import load_curvature as load_curvature
    from linnet.methods import audit as audit
    from linnet.methods import continual as continual
    from linnet.methods import optim as optim
    from linnet.methods import rivals as rivals
    from linnet.methods import spectrum as spectrum
    from linnet.methods.evaluation.adversarial import Attack as Attack
    from linnet.methods.evaluation.adversarial import fgsm as fgsm
    from linnet.methods.evaluation.evaluate import evaluate as evaluate
    from linnet.methods.evaluation.ood import Separation as Separation
    from linnet.methods.evaluation.ood import ood as ood
    from linnet.methods.evaluation.reports import RegressionReport as RegressionReport
    from linnet.methods.evaluation.reports import Report as Report
    from linnet.methods.finetuning import surgery as surgery
    from linnet.methods.finetuning.augment import Augmentation as Augmentation
    from linnet.methods.finetuning.finetune import finetune as finetune
    from linnet.methods.finetuning.finetuned import Finetuned as Finetuned
    from linnet.methods.finetuning.finetuned import load_finetuned as load_finetuned
    from linnet.methods.fitting.fit import fit as fit
    from linnet.methods.fitting.head import with_head as with_head
    from linnet.methods.fitting.linear_fit import LinearFit as LinearFit
    from linnet.methods.fitting.load_fit import load_fit as load_fit
    from linnet.methods.fitting.metric import with_metric as with_metric
    from linnet.methods.fitting.predictive import Predictive as Predictive
    from linnet.methods.fitting.softmax_fit import SoftmaxFit as SoftmaxFit
    from linnet.methods.laplace.laplace import Laplace as Laplace
    from linnet.methods.laplace.load import load_laplace as load_laplace
    from linnet.methods.laplace.training import train_with_evidence as train_with_evidence
    from linnet.methods.linear_posterior.posterior import LinearPosterior as LinearPosterior
    from linnet.methods.linear_posterior.posterior import linear_posterior as linear_posterior
    from linnet.methods.nested.adapt import adapt as adapt
    from linnet.methods.nested.adapt import load_adapted as load_adapted
    from linnet.methods.nested.nested_fit import NestedFit as NestedFit
    from linnet.methods.optim.gradient_flow import Flow as Flow
    from linnet.methods.optim.gradient_flow import gradient_flow as gradient_flow
    from linnet.methods.optim.preconditioner import KroneckerPreconditioner as KroneckerPreconditioner
    from linnet.methods.tangent_gp.load import load_gp as load_gp
    from linnet.methods.tangent_gp.predictive import TangentPredictive as TangentPredictive
    from linnet.methods.tangent_gp.tangent_gp import TangentGP as TangentGP
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
    "with_head": "linnet.methods.fitting.head",
    "with_metric": "linnet.methods.fitting.metric",
    "adapt": "linnet.methods.nested.adapt",
    "load_adapted": "linnet.methods.nested.adapt",
    "NestedFit": "linnet.methods.nested.nested_fit",
    "fit": "linnet.methods.fitting.fit",
    "LinearFit": "linnet.methods.fitting.linear_fit",
    "SoftmaxFit": "linnet.methods.fitting.softmax_fit",
    "load_fit": "linnet.methods.fitting.load_fit",
    "Predictive": "linnet.methods.fitting.predictive",
    "audit": "linnet.methods",
    "curvature": "linnet.curvatures.build",
    "Curvature": "linnet.curvatures.curvature",
    "RunningCurvature": "linnet.curvatures.running",
    "load_curvature": "linnet.curvatures.saved",
    "likelihoods": "linnet",
    "Laplace": "linnet.methods.laplace.laplace",
    "load_laplace": "linnet.methods.laplace.load",
    "train_with_evidence": "linnet.methods.laplace.training",
    "TangentGP": "linnet.methods.tangent_gp.tangent_gp",
    "TangentPredictive": "linnet.methods.tangent_gp.predictive",
    "load_gp": "linnet.methods.tangent_gp.load",
    "linear_posterior": "linnet.methods.linear_posterior.posterior",
    "LinearPosterior": "linnet.methods.linear_posterior.posterior",
    "rivals": "linnet.methods",
    "evaluate": "linnet.methods.evaluation.evaluate",
    "Report": "linnet.methods.evaluation.reports",
    "RegressionReport": "linnet.methods.evaluation.reports",
    "ood": "linnet.methods.evaluation.ood",
    "Separation": "linnet.methods.evaluation.ood",
    "fgsm": "linnet.methods.evaluation.adversarial",
    "Attack": "linnet.methods.evaluation.adversarial",
    "finetune": "linnet.methods.finetuning.finetune",
    "Finetuned": "linnet.methods.finetuning.finetuned",
    "load_finetuned": "linnet.methods.finetuning.finetuned",
    "Augmentation": "linnet.methods.finetuning.augment",
    "KroneckerPreconditioner": "linnet.methods.optim.preconditioner",
    "surgery": "linnet.methods.finetuning",
    "gradient_flow": "linnet.methods.optim.gradient_flow",
    "Flow": "linnet.methods.optim.gradient_flow",
    "continual": "linnet.methods",
    "optim": "linnet.methods",
    "spectrum": "linnet.methods",
}
# modules whose contents are public
_NAMESPACES = ("audit", "continual", "likelihoods", "optim", "rivals", "spectrum", "surgery")

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
