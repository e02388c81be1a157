"""Linearized PyTorch networks: kernels, closed-form fits, curvature and uncertainty.

``import linnet`` loads nothing heavy: each name below is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from linnet import pages

if TYPE_CHECKING:
    from linnet import audit as audit
    from linnet import continual as continual
    from linnet import curvatures as curvatures
    from linnet import distributed as distributed
    from linnet import errors as errors
    from linnet import examples as examples
    from linnet import finetuning as finetuning
    from linnet import fitting as fitting
    from linnet import integrations as integrations
    from linnet import laplace as laplace
    from linnet import likelihoods as likelihoods
    from linnet import metrics as metrics
    from linnet import optim as optim
    from linnet import posterior as posterior
    from linnet import solvers as solvers
    from linnet import spectrum as spectrum
    from linnet import surgery as surgery
    from linnet import tangent_gp as tangent_gp
    from linnet.curvatures.build import curvature as curvature
    from linnet.curvatures.curvature import Curvature as Curvature
    from linnet.curvatures.running import RunningCurvature as RunningCurvature
    from linnet.finetuning.augment import Augmentation as Augmentation
    from linnet.finetuning.finetune import finetune as finetune
    from linnet.finetuning.recipes import Recipe as Recipe
    from linnet.finetuning.trainer import Run as Run
    from linnet.fitting.fit import fit as fit
    from linnet.fitting.head import Probe as Probe
    from linnet.fitting.head import with_head as with_head
    from linnet.fitting.linear_fit import LinearFit as LinearFit
    from linnet.fitting.position_fit import PositionFit as PositionFit
    from linnet.fitting.sketch import with_metric as with_metric
    from linnet.fitting.sketch import with_sketch as with_sketch
    from linnet.fitting.softmax_fit import SoftmaxFit as SoftmaxFit
    from linnet.laplace.laplace import Laplace as Laplace
    from linnet.laplace.training import EvidenceSchedule as EvidenceSchedule
    from linnet.laplace.training import train_with_evidence as train_with_evidence
    from linnet.laplace.tune import Grid as Grid
    from linnet.metrics.adversarial import fgsm as fgsm
    from linnet.metrics.evaluate import evaluate as evaluate
    from linnet.metrics.ood import ood as ood
    from linnet.nested.adapt import adapt as adapt
    from linnet.nested.nested_fit import NestedFit as NestedFit
    from linnet.number_types import precision as precision
    from linnet.optim.gradient_flow import gradient_flow as gradient_flow
    from linnet.optim.preconditioner import KroneckerPreconditioner as KroneckerPreconditioner
    from linnet.posterior import SVI as SVI
    from linnet.posterior import Newton as Newton
    from linnet.posterior import linear_posterior as linear_posterior
    from linnet.saved import load as load
    from linnet.saved import load_fit as load_fit
    from linnet.tangent.linearized import Linearized as Linearized
    from linnet.tangent.linearized import linearize as linearize
    from linnet.tangent.preflight import preflight as preflight
    from linnet.tangent_gp.tangent_gp import TangentGP as TangentGP
    from linnet.training import Training as Training

__version__ = "0.1.0"

_HOME = {
    "linearize": "linnet.tangent.linearized",
    "Linearized": "linnet.tangent.linearized",
    "preflight": "linnet.tangent.preflight",
    "with_head": "linnet.fitting.head",
    "Probe": "linnet.fitting.head",
    "with_metric": "linnet.fitting.sketch",
    "with_sketch": "linnet.fitting.sketch",
    "adapt": "linnet.nested.adapt",
    "NestedFit": "linnet.nested.nested_fit",
    "precision": "linnet.number_types",
    "fit": "linnet.fitting.fit",
    "LinearFit": "linnet.fitting.linear_fit",
    "SoftmaxFit": "linnet.fitting.softmax_fit",
    "PositionFit": "linnet.fitting.position_fit",
    "load": "linnet.saved",
    "load_fit": "linnet.saved",
    "curvature": "linnet.curvatures.build",
    "Curvature": "linnet.curvatures.curvature",
    "RunningCurvature": "linnet.curvatures.running",
    "Laplace": "linnet.laplace.laplace",
    "EvidenceSchedule": "linnet.laplace.training",
    "Grid": "linnet.laplace.tune",
    "train_with_evidence": "linnet.laplace.training",
    "TangentGP": "linnet.tangent_gp.tangent_gp",
    "linear_posterior": "linnet.posterior",
    "Newton": "linnet.posterior",
    "SVI": "linnet.posterior",
    "evaluate": "linnet.metrics.evaluate",
    "ood": "linnet.metrics.ood",
    "fgsm": "linnet.metrics.adversarial",
    "finetune": "linnet.finetuning.finetune",
    "Recipe": "linnet.finetuning.recipes",
    "Training": "linnet.training",
    "Run": "linnet.finetuning.trainer",
    "Augmentation": "linnet.finetuning.augment",
    "KroneckerPreconditioner": "linnet.optim.preconditioner",
    "gradient_flow": "linnet.optim.gradient_flow",
}
# packages and modules whose contents are public
_NAMESPACES = (
    "audit", "continual", "curvatures", "distributed", "errors", "examples", "finetuning",
    "fitting", "integrations", "laplace", "likelihoods", "metrics", "optim", "posterior",
    "solvers", "spectrum", "surgery", "tangent_gp",
)  # fmt: skip

__all__ = ["__version__", *_HOME, *_NAMESPACES]

# fit.report() and fit.monitor() are made by layers above that of fits, imported when they are first called
pages.of_fit = lambda *given, **options: import_module("linnet.report.of_fit").page(*given, **options)
pages.of_batches = lambda *given, **options: import_module("linnet.audit").monitor(*given, **options)


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name in _NAMESPACES:
        value: Any = import_module(f"linnet.{name}")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'linnet' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names."""
    return sorted(__all__)
