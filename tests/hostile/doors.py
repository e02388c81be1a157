"""Every public callable of linnet, with valid arguments for each of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import linnet
from linnet.optim.gauss_newton_settings import Settings
from linnet.solvers.solution import Estimate
from tests.hostile import rules, small

NAMESPACES = tuple(name for name in linnet.__all__ if inspect.ismodule(getattr(linnet, name)))
OPERATIONS = ("__call__", "__matmul__", "__add__", "__sub__", "__mul__")
Arguments = dict[str, Any]

# Records that linnet makes and hands out: nobody has to construct them.
MADE_BY_LINNET = frozenset({
    "Linearized", "LinearFit", "SoftmaxFit", "PositionFit", "NestedFit", "Curvature", "solvers.Status",
})  # fmt: skip
# Classes to derive from: their methods are tried in the classes that derive from them.
ABSTRACT = frozenset({"likelihoods.Likelihood", "continual.ContinualMethod"})

# Valid arguments by the name of the parameter, where the callable's own table below has none.
BY_NAME: dict[str, Callable[[], Any]] = {
    "x": small.x,
    "y": small.labels,
    "labels": small.labels,
    "data": small.classes,
    "queries": small.classes,
    "validation": small.classes,
    "model": small.net,
    "lin": small.lin,
    "lin_or_model": small.lin,
    "source": small.lin,
    "fit": small.fit,
    "likelihood": small.likelihood,
    "n": lambda: 2,
    "ridge": lambda: 1.0,
    "state": dict,
    "make_optimizer": lambda: small.make_optimizer,
    "predict": lambda: small.probabilities,
    "operator": small.operator,
    "directory": lambda: "saved",
}

# Valid arguments of functions and classes; parameters that are left out have a default or are in BY_NAME.
FUNCTIONS: dict[str, Callable[[], Arguments]] = {
    "linearize": dict,
    "preflight": lambda: {"batch": small.x()},
    "with_head": lambda: {"classes": 2, "data": small.classes()},
    "Probe": lambda: {"ridge": 0.1},
    "with_metric": lambda: {"curvature": small.curvature("kfac")},
    "with_sketch": lambda: {"curvature": small.curvature("kfac"), "dim": 5},
    "precision": dict,
    "fit": dict,
    "fitting.Dual": dict,
    "fitting.Sketch": dict,
    "fitting.Shared": dict,
    "fitting.CG": dict,
    "fitting.SGD": dict,
    "fitting.Nystrom": lambda: {"rank": 2},
    "fitting.OneHot": dict,
    "examples.load_digits": dict,
    "curvatures.LowRank": dict,
    "curvatures.MatrixFree": dict,
    "curvatures.MonteCarlo": dict,
    "curvatures.RandomProjection": dict,
    "curvatures.Passes": dict,
    "load": lambda: {"directory": small.saved("fit")},
    "load_fit": lambda: {"directory": small.saved("fit")},
    "curvature": lambda: {"structure": "diagonal"},
    "RunningCurvature": dict,
    "Laplace": dict,
    "train_with_evidence": lambda: {"epochs": 1, "schedule": linnet.EvidenceSchedule(steps=2)},
    "EvidenceSchedule": dict,
    "Grid": lambda: {"prior_precision": [0.1, 1.0]},
    "TangentGP": lambda: {"likelihood": linnet.likelihoods.Gaussian()},
    "linear_posterior": lambda: {"method": "map"},
    "Newton": lambda: {"tolerance": 0.1},
    "SVI": lambda: {"training": linnet.Training(epochs=1), "deviation": 0.1},
    "adapt": lambda: {"ridge": 0.1, "weight": 0.5},
    "evaluate": dict,
    "ood": lambda: {"inside": small.x(), "outside": 3 * small.x()},
    "fgsm": lambda: {"predict": small.differentiable, "step": 0.1},
    "finetune": lambda: {
        "model": small.relu_net(),
        "training": linnet.Training(steps=2, learning_rate=0.01, batch_size=5),
    },
    "Recipe": lambda: {"name": "lqf", "damping": 0.1},
    "Training": lambda: {
        "learning_rate": 0.1, "weight_decay": 0.1, "batch_size": 5, "steps": 2, "momentum": 0.5,
        "schedule": "cosine", "clip": 1.0,
    },
    "Run": lambda: {"checkpoint": "runs", "save_every": 2, "evaluate_every": 2, "progress": False},
    "Augmentation": lambda: {"kind": "random-crop", "size": 2},
    "KroneckerPreconditioner": lambda: {
        "curvature": small.curvature("kfac"), "module": small.net(), "damping": 0.1,
    },
    "gradient_flow": lambda: {"times": [0.5, 1.0]},
    "audit.loss_influence": dict,
    "audit.influence": dict,
    "audit.weight_changes": dict,
    "audit.mislabeled": lambda: {"fit": small.targets(), "labels": small.labels()},
    "audit.monitor": lambda: {"batches": [small.x()]},
    "audit.stress_test": lambda: {"shifts": {"turned": torch.neg}},
    "audit.accuracy": dict,
    "audit.summarize": dict,
    "audit.ridge_path": dict,
    "audit.ridge_gradient": dict,
    "audit.tune_ridge": dict,
    "audit.GradientStore": lambda: {"likelihood": small.likelihood()},
    "audit.sketch_error": lambda: {"fit": small.sketched_fit()},
    "audit.select": lambda: {"pool": small.normal(5, 3, seed=9)},
    "audit.flips": lambda: {"before": small.fit(), "after": small.regression_fit()},
    "audit.compatible": lambda: {"old_outputs": small.targets()},
    "audit.counterfactual": lambda: {"index": 0, "target": 1},
    "audit.group_means": lambda: {"groups": small.labels()},
    "audit.forgetting_certificate": lambda: {"forgotten": small.fit().forget([1])},
    "audit.release": lambda: {
        "fit": small.regression_fit(), "epsilon": 1.0, "delta": 1e-3, "clip": (1.0, 10.0),
        "generator": torch.Generator().manual_seed(0),
    },
    "continual.OnlineLaplace": dict,
    "continual.NonOnlineLaplace": dict,
    "continual.EWC": dict,
    "continual.SynapticIntelligence": dict,
    "continual.StreamMetrics": lambda: {"baseline": [0.5, 0.5]},
    "continual.convert_strength": lambda: {
        "strength": 1.0, "source": "averaged", "old": 2, "new": 2,
    },
    "likelihoods.Gaussian": dict,
    "likelihoods.HeteroscedasticGaussian": dict,
    "likelihoods.Categorical": dict,
    "likelihoods.Bernoulli": dict,
    "likelihoods.Poisson": dict,
    "likelihoods.Custom": lambda: {"nll": small.custom_nll},
    "likelihoods.mixture_of_classifiers": dict,
    "likelihoods.from_description": lambda: {"description": small.likelihood().describe()},
    "optim.GaussNewton": dict,
    "optim.Damping": dict,
    "optim.IterativeLinearization": lambda: {"period": 2},
    "optim.OutputGap": lambda: {"threshold": 0.1},
    "optim.KernelDrift": lambda: {"threshold": 0.1},
    "optim.Converged": dict,
    "spectrum.gram": dict,
    "spectrum.gram_part": lambda: {"file": "kernel.npy", "part": (0, 1)},
    "spectrum.eigenfunctions": lambda: {"k": 3},
    "spectrum.alignment": dict,
    "spectrum.kernel_norm_bound": dict,
    "spectrum.energy_concentration": lambda: {"k": 3},
    "spectrum.kernel_distance": lambda: {
        "first": small.lin(), "second": linnet.linearize(small.relu_net()), "x": small.x(),
    },
    "spectrum.centered_alignment": lambda: {
        "first": small.lin(), "second": linnet.linearize(small.relu_net()), "x": small.x(),
    },
    "spectrum.effective_dimension": lambda: {"x": small.x()},
    "spectrum.condition_number": lambda: {"x": small.x()},
    "spectrum.spectral_density": lambda: {"x": small.x(), "samples": 2, "steps": 4},
    "spectrum.Recorder": lambda: {"k": 3},
    "spectrum.anisotropy_directions": lambda: {"model": small.conv_net(), "at": small.images()[0], "k": 2},
    "spectrum.task_linearity": dict,
    "surgery.leaky_relu": lambda: {"model": small.relu_net()},
    "surgery.report": lambda: {"model": linnet.surgery.leaky_relu(small.relu_net())},
    "surgery.recover": lambda: {
        "model": linnet.surgery.leaky_relu(small.relu_net()), "teacher": small.relu_net(),
        "training": linnet.Training(steps=2, batch_size=5),
    },
    "surgery.CappedLeakyReLU": lambda: {"slope": 0.2, "cap": 6.0},
    "surgery.with_bilinear_head": lambda: {
        "model": small.pooled_net(), "classes": 2, "data": small.pictures(),
    },
    "surgery.Bilinear": lambda: {"channels": 2, "layer": "0"},
    "surgery.SquareRootPooling": dict,
    **dict.fromkeys(("solvers.cg", "solvers.block_cg"), lambda: {"b": small.normal(3, 2)}),
    "solvers.shifted_cg": lambda: {"b": small.normal(3), "shifts": torch.tensor([0.5, 1.0]).double()},
    "solvers.tridiagonalize": lambda: {"start": small.normal(3, 2), "steps": 2},
    "solvers.eigenpairs": lambda: {"k": 2},
    "solvers.nystrom": lambda: {"rank": 2},
    "solvers.nystrom_preconditioner": lambda: {"damping": 0.1, "rank": 2},
    "solvers.hutchinson": lambda: {"samples": 4},
    "solvers.slq": lambda: {"function": torch.sqrt, "samples": 2, "steps": 2},
    "solvers.logdet": lambda: {"samples": 2, "steps": 2},
}  # fmt: skip

# Plain tuples of settings are checked by what takes them, and tried there.
TAKERS: dict[str, Callable[..., Any]] = {
    "optim.Damping": lambda **given: linnet.optim.GaussNewton(
        small.net(), small.likelihood(), damping=linnet.optim.Damping(**given)
    ),
}
# Options that a callable takes as **keywords.
CURVATURE_OPTIONS: dict[str, Any] = {
    "expectation": "exact", "sharing": "expand", "matrix": "auto", "params": None, "output": None,
    "passes": None,
}  # fmt: skip
OPTIONS: dict[str, Callable[[], Arguments]] = {
    "Laplace": lambda: dict(CURVATURE_OPTIONS),
    "continual.OnlineLaplace": lambda: dict(CURVATURE_OPTIONS),
    "continual.NonOnlineLaplace": lambda: dict(CURVATURE_OPTIONS),
    "continual.EWC": lambda: dict(CURVATURE_OPTIONS),
    "TangentGP": lambda: {
        "solver": "cg", "variance": "lanczos", "derivative": "exact", "preconditioner": None, "rank": 0,
        "tolerance": 1e-6, "max_steps": 100, "seed": 0, "params": None, "output": None, "memory": None,
        "mean": "network",
    },
    "optim.GaussNewton": lambda: dict(Settings()._asdict()),
}  # fmt: skip

# Objects whose methods are tried: how each is made, and valid arguments of its methods.
OBJECTS: dict[str, Callable[[], Any]] = {
    "Linearized": lambda: linnet.linearize(small.net()),
    "Preflight": lambda: linnet.preflight(small.net(), small.x()),
    "LinearFit": small.fit,
    "SoftmaxFit": small.softmax,
    "PositionFit": small.words,
    "NestedFit": small.adapted,
    "FitPlots": lambda: small.fit().plot,
    "ModelPlots": lambda: small.on_a_line().plot,
    "ReportPlots": lambda: small.report().plot,
    "RegressionPlots": lambda: small.regression_report().plot,
    "SeparationPlots": lambda: small.separation().plot,
    "StreamPlots": lambda: small.metrics().plot,
    "DensityPlots": lambda: small.density().plot,
    "EigenfunctionPlots": lambda: linnet.spectrum.eigenfunctions(small.lin(), small.x(), k=None).plot,
    "TaskPlots": lambda: linnet.spectrum.task_linearity(small.fit()).plot,
    "RecorderPlots": lambda: small.recorded().plot,
    "Predictive": lambda: small.fit().predictive(small.x()),
    "Curvature": lambda: small.curvature("kfac").damped(0.1),
    "Curvature (full)": lambda: small.curvature("full").damped(0.1),
    "Curvature (low-rank)": lambda: small.curvature("low-rank", rank=3).damped(0.1),
    "Curvature (diagonal)": lambda: small.curvature("diagonal"),
    "Curvature (ekfac)": lambda: small.curvature("ekfac").damped(0.1),
    "matrix-free": lambda: small.curvature("matrix-free"),
    "matrix-free Fisher": lambda: small.curvature("matrix-free", expectation="mc"),
    "matrix-free Hessian": lambda: small.curvature("matrix-free", matrix="hessian"),
    "finite-difference": lambda: small.curvature(
        "matrix-free", matrix="fisher", derivative="finite-difference"
    ),
    "RunningCurvature": small.running,
    "Gaussian": linnet.likelihoods.Gaussian,
    "HeteroscedasticGaussian": lambda: linnet.likelihoods.HeteroscedasticGaussian(psd="clip"),
    "Categorical": linnet.likelihoods.Categorical,
    "Bernoulli": linnet.likelihoods.Bernoulli,
    "Poisson": linnet.likelihoods.Poisson,
    "Custom": small.custom,
    "Laplace": lambda: linnet.Laplace(small.net(), small.likelihood()).fit(small.classes()),
    "Laplace (Gaussian)": lambda: linnet.Laplace(small.net(), linnet.likelihoods.Gaussian()).fit(
        small.regression()
    ),
    "Laplace predictive": lambda: small.laplace().predictive(small.x()),
    "GaussianPredictive": lambda: small.laplace_regression().predictive(small.x()),
    "SampledPredictive": lambda: small.laplace().predictive(small.x(), method="mc"),
    "TangentGP": lambda: linnet.TangentGP(small.net(), linnet.likelihoods.Gaussian(), "function").fit(
        *small.regression()
    ),
    "TangentGP (parameter)": lambda: linnet.TangentGP(
        small.net(), linnet.likelihoods.Gaussian(), "parameter"
    ).fit(*small.regression()),
    "TangentGP predictive": small.tangent_predictive,
    "LinearPosterior": small.posterior,
    "continual.NonOnlineLaplace (saved)": small.restored,
    "Report": small.report,
    "RegressionReport": small.regression_report,
    "Separation": small.separation,
    "Finetuned": small.finetuned,
    "Augmentation": lambda: linnet.Augmentation("random-crop", size=2),
    "KroneckerPreconditioner": lambda: small.preconditioner(small.net()),
    "Flow": small.flow,
    "audit.GradientStore": small.gradient_store,
    "audit.ValidationPath": small.ridge_path,
    "audit.Release": small.release,
    "continual.OnlineLaplace": lambda: small.learned("OnlineLaplace"),
    "continual.NonOnlineLaplace": lambda: small.learned("NonOnlineLaplace"),
    "continual.EWC": lambda: small.learned("EWC"),
    "continual.SynapticIntelligence": lambda: small.learned("SynapticIntelligence"),
    "continual.StreamMetrics": small.metrics,
    "optim.GaussNewton": small.gauss_newton,
    "optim.IterativeLinearization": small.relinearized,
    "optim.OutputGap": lambda: linnet.optim.OutputGap(0.1),
    "optim.KernelDrift": lambda: linnet.optim.KernelDrift(0.1, small.x()),
    "optim.Converged": linnet.optim.Converged,
    "optim.LinearizationReport": lambda: small.relinearized().report,
    "spectrum.Eigenfunctions": lambda: linnet.spectrum.eigenfunctions(small.lin(), small.x(), k=None),
    "spectrum.SpectralDensity": small.density,
    "spectrum.Recorder": small.recorder,
    "spectrum.AnisotropyDirections": small.directions,
    "spectrum.TaskLinearity": lambda: linnet.spectrum.task_linearity(small.fit()),
    "surgery.SurgeryReport": small.surgery_report,
    "surgery.CappedLeakyReLU": lambda: linnet.surgery.CappedLeakyReLU(0.2, 6.0),
    "surgery.SquareRootPooling": linnet.surgery.SquareRootPooling,
    "MetricNetwork": small.metric,
    "fitting.SketchedNetwork": small.sketched,
    "fitting.RidgePath": lambda: small.fit().path(),
    "fitting.SoftmaxPath": lambda: small.softmax().path(),
    "ParameterSpace": lambda: small.curvature("full").space,
    "solvers.Solution": lambda: linnet.solvers.cg(small.operator(), small.normal(3)),
    "solvers.Estimate": lambda: Estimate(1.0, 0.1),
}

# Valid arguments of methods, by object and method or by method alone; the rest is in BY_NAME.
METHODS: dict[str, Callable[[], Arguments]] = {
    "Linearized.jvp": lambda: {"v": small.params()},
    "Linearized.vjp": lambda: {"u": small.targets()},
    "Linearized.kernel": lambda: {"x1": small.x()},
    "Linearized.relinearize": lambda: {"at": small.params()},
    "NestedFit.along": lambda: {"ridges": torch.tensor([0.1, 1.0], dtype=torch.float64)},
    "LinearFit.along": lambda: {"ridges": torch.tensor([0.1, 1.0], dtype=torch.float64)},
    "FitPlots.influence": lambda: {"x": small.x()[:1], "ax": small.axes(), "output": 1},
    "ModelPlots.calibration": lambda: {"x": small.places(), "y": small.places(), "ax": small.axes()},
    "ModelPlots.predicted": lambda: {"x": small.places(), "y": small.places(), "ax": small.axes()},
    "ModelPlots.curve": lambda: {"x": small.places(), "ax": small.axes()},
    "calibration": lambda: {"ax": small.axes()},
    "ridge": lambda: {"ax": small.axes()},
    "spectrum": lambda: {"ax": small.axes()},
    "predicted": lambda: {"ax": small.axes()},
    "curve": lambda: {"ax": small.axes()},
    **{
        name: lambda: {"ax": small.axes()}
        for name in ("risk_coverage", "scores", "roc", "accuracy", "history", "energy")
    },
    "DensityPlots.density": lambda: {"ax": small.axes()},
    "EigenfunctionPlots.energy": lambda: {"y": small.targets(), "ax": small.axes()},
    "LinearFit.calibrate": lambda: {"temperature": 1.0, "point_temperature": 1.0},
    "NestedFit.calibrate": lambda: {"temperature": 1.0, "point_temperature": 1.0},
    **{f"{fit}.report": lambda: {"test": small.classes()} for fit in rules.FITS},
    "NestedFit.update": lambda: {"data": (small.normal(2, 3, seed=4), small.labels()[:2])},
    **{
        f"PositionFit.{name}": lambda: {"data": small.sequences()}
        for name in ("losses", "loss_variance", "influence", "update")
    },
    **{
        f"{name}.{operation}": lambda make=make: {"other": make()}
        for name, make in zip(
            ("LinearFit", "SoftmaxFit", "PositionFit"), (small.fit, small.softmax, small.words), strict=True
        )
        for operation in ("__add__", "__sub__")
    },
    "PositionFit.predict": lambda: {"x": small.sequences()[0]},
    "PositionFit.relabel": lambda: {"indices": [0], "y": small.sequences()[1][:1]},
    "constrain": lambda: {"targets": small.targets()},
    "forget": lambda: {"indices": [0]},
    "monitor": lambda: {"batches": [small.x()]},
    "relabel": lambda: {"indices": [0], "y": small.labels()[:1]},
    "sets": lambda: {"coverage": 0.7},  # five examples cannot tell what happens once in ten
    "sample": lambda: {"seed": 0},
    "__matmul__": lambda: {"other": small.normal(26)},
    "__add__": lambda: {"other": small.diagonal()},
    "__sub__": lambda: {"other": small.diagonal()},
    "__mul__": lambda: {"scalar": 2.0},
    "scaled": lambda: {"scalar": 2.0},
    "damped": lambda: {"tau": 0.1},
    "factored_damped": lambda: {"tau": 0.1},
    "quadratic": lambda: {"rows": small.normal(4, 26)},
    "solve": lambda: {"b": small.normal(26)},
    "RunningCurvature.load_state_dict": lambda: {"state": small.running().state_dict()},
    "RunningCurvature.refresh": lambda: {"model": small.net()},
    "KroneckerPreconditioner.multiply": lambda: {"v": small.normal(26)},
    "KroneckerPreconditioner.refresh": lambda: {"curvature": small.curvature("kfac")},
    "Flow.delta": lambda: {"time": 0.5},
    "Flow.predict": lambda: {"time": 0.5},
    "Flow.weights": lambda: {"time": 0.5},
    "preconditioner": lambda: {"examples": 5},
    "continual.OnlineLaplace.load_state_dict": lambda: {"state": small.learned("OnlineLaplace").state_dict()},
    "continual.NonOnlineLaplace.load_state_dict": lambda: {
        "state": small.learned("NonOnlineLaplace").state_dict()
    },
    "continual.EWC.load_state_dict": lambda: {"state": small.learned("EWC").state_dict()},
    "continual.SynapticIntelligence.load_state_dict": lambda: {
        "state": small.learned("SynapticIntelligence").state_dict()
    },
    "to": lambda: {"device": "cpu"},
    "record": lambda: {"accuracies": [0.9, 0.7, 0.5]},
    "optim.GaussNewton.load_state_dict": lambda: {"state_dict": small.gauss_newton().state_dict()},
    "optim.GaussNewton.step": lambda: {"x": small.x(), "y": small.labels()},
    "follow": lambda: {"report": small.step_report()},
    "optim.IterativeLinearization.load_state_dict": lambda: {"state": small.relinearized().state_dict()},
    "optim.IterativeLinearization.backward": lambda: {
        "closure": lambda module: module(small.x()).square().sum()
    },
    "optim.IterativeLinearization.step": lambda: {"closure": lambda module: module(small.x()).square().sum()},
    "binarized": lambda: {"index": 0},
    "spectrum.Eigenfunctions.energy_concentration": lambda: {"y": small.targets()},
    "spectrum.Eigenfunctions.kernel_norm": lambda: {"y": small.targets()},
    "count": lambda: {"low": 0.0},
    "expectation": lambda: {"function": torch.exp},
    "spectrum.Recorder.note": lambda: {"step": 1},
    "covariance": lambda: {"z": small.normal(2, 3, 2, 2)},
    "surgery.SquareRootPooling.forward": lambda: {"z": small.normal(2, 3, 2, 2)},
    "displacement": dict,
    "best": lambda: {"criterion": "loo"},
    "mm": lambda: {"v": small.normal(26, 2)},
    "mv": lambda: {"v": small.normal(26)},
    "resume": lambda: {"state": small.laplace()._state},
    "solvers.Estimate.of": lambda: {"samples": small.normal(4)},
    "ParameterSpace.in_kind": lambda: {"flat": small.normal(26), "like": small.params()},
    "ParameterSpace.of": lambda: {"params": small.params()},
    "ParameterSpace.select": lambda: {"names": ["0.weight"]},
    "to_flat": lambda: {"vector": small.params()},
    "to_params": lambda: {"vector": small.normal(26)},
    "Augmentation.__call__": lambda: {"x": small.images(), "seed": torch.Generator().manual_seed(0)},
    "Laplace predictive.log_density": lambda: {"y": small.labels()},
    "GaussianPredictive.log_density": lambda: {"y": small.targets()},
    "SampledPredictive.log_density": lambda: {"y": small.labels()},
    "TangentGP predictive.log_density": lambda: {"y": small.targets()},
    "Laplace (Gaussian).fit": lambda: {"data": small.regression()},
    "adapt": lambda: {"x": small.x(), "y": small.targets()},
    "TangentGP.fit": lambda: {"x": small.x(), "y": small.targets()},
    "TangentGP.update": lambda: {"x": small.x(), "y": small.targets()},
    "consolidate": lambda: {"data": small.classes()},
    "continual.SynapticIntelligence.consolidate": dict,
}  # fmt: skip
# Valid arguments that belong to the object whose method it is.
OWN: dict[str, Callable[[Any], Arguments]] = {
    "KroneckerPreconditioner.attach": lambda own: {
        "optimizer": small.make_optimizer(own.parameters.values())
    },
    "optim.GaussNewton.add_param_group": lambda own: {
        "param_group": {"params": own.param_groups[0]["params"][:1]}
    },
}
LIKELIHOODS = ("Gaussian", "HeteroscedasticGaussian", "Categorical", "Bernoulli", "Poisson", "Custom")
# Documented as products without checks, for solvers that checked once, or called by linnet alone.
UNCHECKED = frozenset({
    "product", "kernel_rows", "projected", "pulled", "turned", "extra_repr", "forward",
})  # fmt: skip


@dataclass(frozen=True)
class Door:
    """A public callable.

    Args:
        name: What it is called.
        make: The callable and valid arguments for all of its parameters that have no default.
        parameters: Every parameter with its default.
        options: Keywords that it takes as **keywords.
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], Arguments]]
    parameters: Mapping[str, Any]
    options: Arguments


def _parameters(target: Callable[..., Any], skip: int) -> dict[str, Any]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    given = list(inspect.signature(target).parameters.values())[skip:]
    return {one.name: one.default for one in given if one.kind not in kinds}


def _filled(parameters: Mapping[str, Any], given: Arguments) -> Arguments:
    required = [name for name, default in parameters.items() if default is inspect.Parameter.empty]
    return {**{name: BY_NAME[name]() for name in required if name not in given}, **given}


def public(name: str) -> Any:
    """A function or class by the name that a user writes after ``linnet.``."""
    found: Any = linnet
    for part in name.split("."):
        found = getattr(found, part)
    return found


def named() -> Iterator[str]:
    """Every public function and class."""
    for name in linnet.__all__:
        if name in ("errors", "distributed"):  # classes that take texts, and contexts around calls
            continue
        if name in NAMESPACES:
            inside = getattr(getattr(linnet, name), "__all__", ())
            yield from (f"{name}.{inner}" for inner in inside if inner not in linnet.__all__)
        elif name != "__version__":
            yield name


def methods(kind: type) -> Iterator[str]:
    """Public methods of a class that linnet defines and that take an argument."""
    for name in dir(kind):
        if name.startswith("_") and name not in OPERATIONS:
            continue
        found = inspect.getattr_static(kind, name)
        found = getattr(found, "__func__", found)
        ours = inspect.isfunction(found) and inspect.unwrap(found).__module__.startswith("linnet")
        if ours and len(inspect.signature(found).parameters) > 1 and name not in UNCHECKED:
            yield name


def _of_function(name: str) -> Door:
    """The door of a public function, or of a class that users construct."""
    given, target = FUNCTIONS[name], TAKERS.get(name, public(name))
    options = OPTIONS[name]() if name in OPTIONS else {}
    parameters = _parameters(public(name), 0)
    return Door(name, lambda: (target, _filled(parameters, given())), parameters, options)


def _likelihood_arguments(name: str, parameters: Mapping[str, Any]) -> Arguments:
    f = small.normal(5, 2)
    y = {
        "Categorical": small.labels(),
        "Bernoulli": torch.ones(5, 2),
        "Poisson": torch.ones(5, 2),
        "Custom": small.labels(),
    }
    y |= {"HeteroscedasticGaussian": small.normal(5, 1, seed=2)}
    found = {
        "f": f,
        "g": f + 0.1,
        "y": y.get(name, small.targets()),
        "v": small.normal(5, 2, seed=3),
        "mean": f,
        "covariance": torch.eye(2, dtype=f.dtype).expand(5, 2, 2).clone(),
        "n": 2,
        "seed": 0,
    }
    if name in ("HeteroscedasticGaussian",):
        found["f"] = found["g"] = found["mean"] = torch.stack([f[:, 0], f[:, 1] * 0.1], 1)
    return {key: value for key, value in found.items() if key in parameters}


def _of_method(name: str, kind: type, method: str) -> Door:
    """The door of a method of an object."""
    static = inspect.getattr_static(kind, method)
    parameters = _parameters(getattr(static, "__func__", static), 1)
    keys = (f"{name}.{method}", f"{name.split(' (')[0]}.{method}", method)
    given = next((METHODS[key] for key in keys if key in METHODS), dict)

    def make() -> tuple[Callable[..., Any], Arguments]:
        own = OBJECTS[name]()
        if name in LIKELIHOODS:
            return getattr(own, method), _likelihood_arguments(name, parameters)
        found = OWN[f"{name}.{method}"](own) if f"{name}.{method}" in OWN else given()
        known = {key: value for key, value in found.items() if key in parameters}
        return getattr(own, method), _filled(parameters, known)

    return Door(f"{name}.{method}", make, parameters, {})


NAMES = (*(f"linnet.{name}" for name in FUNCTIONS), *OBJECTS)  # of what tests try, one after the other


@cache
def doors(name: str) -> list[Door]:
    """A function, or the methods of an object, which is not made while tests are collected."""
    if name.startswith("linnet."):
        return [_of_function(name.removeprefix("linnet."))]
    kind = type(OBJECTS[name]())
    return [_of_method(name, kind, method) for method in methods(kind)]
