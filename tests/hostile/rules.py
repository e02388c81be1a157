"""Kinds of public parameters, and the unusual values that each kind accepts."""

from __future__ import annotations

LIKELIHOODS = ("Gaussian", "HeteroscedasticGaussian", "Categorical", "Bernoulli", "Poisson", "Custom")
REAL = {"half", "three", "scalar tensor", "integer tensor"}
WHOLE = {"integer tensor"}
PLACES = {"text", "missing file"}
KEEPING = (
    "optim.GaussNewton.accumulate",
    "optim.OutputGap",
    "optim.KernelDrift",
    "spectrum.Recorder",
)
FITS = ("LinearFit", "SoftmaxFit", "NestedFit")
TYPES = {"~integer", "~bool", "~float32", "~float64", "~requires grad", "~list"}
SIZES = {"~shorter", "~longer", "~extra axis", "~first example", "~wider"}

# Kind: names of the wrong values that it may take; where it does, the numbers that follow must be finite.
# Whatever is not named here must be refused.
KINDS: dict[str, set[str]] = {
    "word": set(),
    "unused": set(),
    "labels later": TYPES
    | SIZES
    | {"~nan", "~inf", "~no example", "tensor", "tensor of nan", "tensor of inf"}
    | {"empty tensor", "scalar tensor", "integer tensor"},
    "share or zero": {"half", "zero"},
    "tensors by name": REAL | {"zero", "minus one", "empty dict"},
    "made": set(),
    "name": {"text", "empty text", "text with NUL", "long text"},
    "flag": {"true", "false"},
    "flag or none": {"true", "false", "None"},
    "word or none": {"None"},
    "grid": {"empty dict"},
    "removed positions": {"zero", "integer tensor", "empty list", "empty tensor"},
    "scores": TYPES | {"~wider"},
    "tangents": {f"entry: {name}" for name in TYPES} | {"entry: tensor"},
    "weights by name": {f"entry: {name}" for name in TYPES} | {"entry: tensor", "entry unknown", "module"},
    "path of ridges": (TYPES | SIZES | REAL | {"tensor"}) - {"~bool"},
    "means": REAL | {"zero", "minus one", "empty dict", "tensor"},
    "precisions": REAL | {"tensor"},
    "ridge or flow": REAL | {"zero"},
    "points on a line": REAL | {"zero", "tensor", "empty list", "empty tensor"},
    "positive or none": REAL | {"None"},
    "kept inputs": TYPES | SIZES | {"tensor", "complex tensor", "~complex", "~inf"},
    "layers or tensors": {"module", "empty dict"},
    "count": WHOLE,
    "samples": WHOLE,  # three leave the standard error infinite
    "count or none": WHOLE | {"None"},
    "count from zero": WHOLE | {"zero"},
    "integer": WHOLE | {"zero", "minus one"},
    "positive": REAL,
    "not negative": REAL | {"zero"},
    "share": {"half"},
    "real": REAL | {"zero", "minus one"},
    "bound": REAL | {"zero", "minus one", "inf"},
    "numbers": REAL | {"zero", "tensor", "empty list"},
    "times": REAL | {"zero", "tensor", "inf", "tensor of inf"},
    "positions": {"zero", "integer tensor", "empty list", "empty tensor", "None"},
    "seed": WHOLE | {"zero", "None"},
    "place": PLACES,
    "place or none": PLACES | {"None"},
    "step or schedule": {"None", "inf", "three"},
    "model": {"module"},
    "model or none": {"module", "None"},
    "optional mapping": {"empty dict", "empty list"},
    "function": {"lambda", "module", "class"},
    "function or none": {"None", "lambda", "module", "class"},
    "adapter": {"text", "empty text", "text with NUL", "long text", "lambda", "module", "class"},
    "selector": {"text", "empty text", "text with NUL", "long text", "list of text", "lambda", "module"},
    "labels alone": TYPES
    | SIZES
    | {"~no example", "~nan", "~inf", "tensor", "empty tensor"}
    | {"tensor of nan", "tensor of inf", "integer tensor", "scalar tensor"},
    "inputs": TYPES | SIZES | {"tensor"},
    "pair": {f"{part}: {name}" for part in "xy" for name in TYPES | {"~extra axis", "~wider"}}
    | {"tensor", "empty tensor"},
    "kept pair": {f"{part}: {name}" for part in "xy" for name in TYPES | {"~extra axis", "~wider"}}
    | {"tensor", "empty tensor", "x: ~complex"},
    "pair or none": {f"{part}: {name}" for part in "xy" for name in TYPES} | {"None", "y: ~extra axis"},
    "targets": TYPES | {"~extra axis", "~wider", "~shorter", "module", "~nan", "integer tensor"},
    # a product with NaN is NaN, as in torch
    "vector": TYPES | SIZES | {"~requires grad", "~nan", "~inf", "~no example", "tensor", "empty tensor"},
    "any tensors": {
        f"entry: {name}"
        for name in TYPES
        | SIZES
        | {"~nan", "~inf", "~no example", "tensor", "tensor of nan", "tensor of inf"}
        | {"empty tensor", "scalar tensor", "integer tensor"}
    }
    | {"entry missing", "entry unknown"},
    "vector or none": TYPES | SIZES | {"~nan", "~inf", "~no example", "tensor", "empty tensor", "None"},
    "entries": {
        f"entry: {name}" for name in TYPES | {"~nan", "~inf", "tensor", "tensor of nan", "tensor of inf"}
    }
    | {"empty dict", "entry: scalar tensor", "entry: integer tensor"},
}

# The kind of a parameter by its name; where a name has several, OF_CALL decides.
_NAMES = {
    "word": "accumulate activation criterion derivative expectation head init inversion inversions kind "
    "layer "
    "form link matrix merge method name neighbors of parametrization pin predict prior psd "
    "recipe reduction root schedule score search sharing solver source space structure structures "
    "to variant keep preconditioner loss names mode like metric sample_weight shift",
    "made": "ax curvature fit forgotten lin likelihood moment param_group report seen description "
    "augmentation operator memory device dtype candidates gram directions pooling training run inference "
    "passes",
    "selector": "params",
    "flag": "adaptive add base by_class canonical clamps discrete empty flip inplace joint masked momentum "
    "per_output tune progress "
    "record_gap shared squared stop training_mode",
    "flag or none": "shard",
    "count": "batch batch_size bins block channels classes draws epochs evaluate_every every folds heads "
    "inverse_period "
    "iterations largest log_every members most n patience points rank rejections rounds samples "
    "save_every size "
    "steps top",
    "count or none": "k max_steps",
    "count from zero": "burn_in cross_fit target index step tau_period zeta_period",
    "integer": "axis ignore_index",
    "positive": "cap clip data_scale damping decay deviation epsilon examples least_noise lr new "
    "noise_scale old "
    "target_loss threshold tolerance width weight learning_rate noise_variance limit average "
    "point_temperature temperature variance_scale "
    "variance ridge",
    "not negative": "sigma strength tau time weight_decay zeta prior_precision scale",
    "share": "area coverage delta eps level slope",
    "real": "gradient scalar",
    "bound": "high low",
    "numbers": "accuracies accuracy baseline levels limits ridges support prior_mean",
    "times": "times",
    "positions": "indices",
    "seed": "generator seed",
    "place": "checkpoint directory file folder",
    "step or schedule": "period",
    "model": "model module teacher lin_or_model first second",
    "optional mapping": "options",
    "function": "closure function log make make_schedule moments nll sample train",
    "function or none": "make_optimizer prepare",
    "adapter": "output",
    "inputs": "batches example inside outside pool x x1 x2 z at",
    "targets": "after before groups old_outputs targets y labels",
    "pair": "data queries validation",
    "vector": "b flat rows u v vector covariance f g mean other",
    "entries": "state state_dict optimizer",
}
OF_NAME = {name: kind for kind, names in _NAMES.items() for name in names.split()}
OF_CALL: dict[str, str] = {
    **{f"precision({name})": "word or none" for name in ("capture", "sums", "decompositions")},
    **{f"solvers.{name}(preconditioner)": "word or none" for name in ("cg", "block_cg")},
    "solvers.cg(x0)": "vector or none",
    "solvers.shifted_cg(shifts)": "path of ridges",
    "solvers.tridiagonalize(start)": "vector",
    "solvers.eigenpairs(k)": "count",
    "solvers.eigenpairs(largest)": "flag",
    "solvers.Solution.require(what)": "unused",
    "solvers.Estimate.of(samples)": "vector",
    **{f"{name}.resume(state)": "made" for name in ("Laplace", "Laplace (Gaussian)")},
    "spectrum.gram_part(part)": "word",
    "spectrum.gram_part(file)": "place",
    "audit.GradientStore(shard_size)": "count",
    "audit.GradientStore.add(part)": "word",
    "audit.GradientStore.top(k)": "count",
    "audit.GradientStore.top(lowest)": "flag",
    "adapt(weight)": "share or zero",
    "audit.stress_test(shifts)": "word",
    **{f"{name}(shifts)": "word or none" for name in ("audit.monitor", *(f"{fit}.monitor" for fit in FITS))},
    "adapt(earlier)": "share or zero",
    "fitting.Dual(file)": "place or none",
    "fitting.Sketch(basis)": "word",
    "fitting.Sketch(dim)": "count",
    "fitting.Shared(combinations)": "count",
    "with_sketch(dim)": "count",
    "fitting.Dual(max_steps)": "count",
    "fitting.CG(max_steps)": "count",
    "fitting.SGD(max_steps)": "count",
    "fitting.CG(preconditioner)": "word or none",
    "fitting.SGD(preconditioner)": "word or none",
    "fitting.OneHot(scale)": "positive",
    "curvatures.Passes(block)": "count or none",
    "curvatures.Passes(file)": "place or none",
    "curvatures.Passes(widest)": "count",
    "LinearFit.calibrate(temperature)": "positive or none",
    "LinearFit.calibrate(point_temperature)": "positive or none",
    "LinearFit.calibrate(noise)": "positive or none",
    "NestedFit.calibrate(temperature)": "positive or none",
    "NestedFit.calibrate(point_temperature)": "positive or none",
    "NestedFit.calibrate(noise)": "positive or none",
    "audit.mislabeled(fit)": "scores",
    "Linearized.base(x)": "kept inputs",
    "Linearized.jvp(v)": "tangents",
    "Linearized.relinearize(at)": "weights by name",
    "SoftmaxFit.forget(indices)": "removed positions",
    "NestedFit.along(ridges)": "path of ridges",
    "LinearFit.along(ridges)": "path of ridges",
    "TangentGP(rank)": "count from zero",
    "finetune(search)": "grid",
    "audit.forgetting_certificate(forgotten)": "positions",
    "SoftmaxFit.check_loo(examples)": "positions",
    "Laplace(prior_mean)": "means",
    "Laplace(prior_precision)": "precisions",
    "TangentGP.tune(least_noise)": "share or zero",
    "TangentGP (parameter).tune(least_noise)": "share or zero",
    "spectrum.condition_number(ridge)": "not negative",
    "optim.GaussNewton(damping)": "not negative",
    "optim.IterativeLinearization.solve(ridge)": "ridge or flow",
    "spectrum.SpectralDensity.density(points)": "points on a line",
    "Augmentation.__call__(x)": "vector",
    "surgery.SquareRootPooling.covariance(z)": "vector",
    "continual.OnlineLaplace.preconditioner(damping)": "positive or none",
    "RunningCurvature.refresh(model)": "layers or tensors",
    "continual.NonOnlineLaplace (saved).remember(data)": "kept pair",
    **{f"{name}(x)": "kept inputs" for name in KEEPING},
    "evaluate(noise)": "word",
    **{f"{fit}.export({name})": "flag" for fit in FITS for name in ("variance", "other_sizes")},
    **{f"{fit}.recomputed(scales)": "flag" for fit in ("LinearFit", "NestedFit")},
    **{f"{fit}.report(file)": "place or none" for fit in FITS},
    **{f"{fit}.report(test)": "pair or none" for fit in FITS},
    **{f"{fit}.report(title)": "name" for fit in FITS},
    "optim.GaussNewton.accumulate(y)": "labels later",
    "preflight(batch)": "kept inputs",
    "continual.convert_strength(batch)": "positive",
    "fgsm(step)": "not negative",
    "surgery.leaky_relu(keep)": "optional mapping",
    "optim.Converged(loss)": "real",
    "Laplace.tune(noise)": "flag",
    "Laplace (Gaussian).tune(noise)": "flag",
    "TangentGP.tune(noise)": "flag",
    "TangentGP (parameter).tune(noise)": "flag",
    "TangentGP.tune(prior)": "flag",
    "TangentGP (parameter).tune(prior)": "flag",
    "audit.group_means(fit)": "model",
    "FitPlots.influence(output)": "count from zero",
    "ModelPlots.curve(output)": "count from zero",
    "ModelPlots.calibration(y)": "targets",
    "ModelPlots.predicted(y)": "targets",
    "Recipe(scale)": "positive",
    "Grid(prior_precision)": "precisions",
    "Grid(data_scale)": "precisions",
    "Grid(noise_variance)": "precisions",
    "train_with_evidence(schedule)": "made",
    "Laplace.tune(data_scale)": "flag",
    "Laplace (Gaussian).tune(data_scale)": "flag",
    "Recipe(optimizer)": "word",
    "Training(momentum)": "share or zero",
    "Newton(samples)": "count from zero",
    "surgery.Bilinear(layer)": "name",
    "spectrum.effective_dimension(source)": "model",
    "spectrum.condition_number(source)": "model",
    "spectrum.spectral_density(source)": "model",
    "Flow.delta(time)": "times",
    "Flow.predict(time)": "times",
    "Flow.weights(time)": "times",
    "continual.OnlineLaplace(prior_mean)": "tensors by name",
    "ParameterSpace.of(params)": "any tensors",
    **{f"{kind}.mask(y)": "labels alone" for kind in LIKELIHOODS},
    **{f"continual.SynapticIntelligence.consolidate({p})": "unused" for p in ("data", "output", "prepare")},
}

# Callables that refuse even valid arguments: this kind of object cannot do what is asked.
ALWAYS_REFUSED = frozenset({
    "FitPlots.curve",
    "FitPlots.predicted",
    "Finetuned.predictive",
    "NestedFit.merge",  # of a fit in which the lower layers take part
    *(f"NestedFit.{operation}" for operation in ("__add__", "__sub__", "__mul__")),
    "LinearPosterior.save",
    *(f"{fit}.interval" for fit in FITS),  # of classes
    "continual.NonOnlineLaplace (saved).consolidate",
    "continual.NonOnlineLaplace.remember",
})  # fmt: skip

# Parameters that may still end in an error of torch's or Python's own, each with its reason.
DIFFERS: dict[str, str] = {
    "ParameterSpace.in_kind(like)": "only the kind of like= is looked at, not what it holds",
    "ParameterSpace.to_flat(vector)": "NaN in a vector stays where it is",
    "spectrum.condition_number(source)": "the kernel of another network may be singular: infinity is right",
    "spectrum.condition_number(x)": "likewise the kernel of an example that is given twice",
    **{
        f"{name}(batches)": "batches are looked at when their turn comes"
        for name in ("audit.monitor", *(f"{fit}.monitor" for fit in FITS))
    },
    "load_fit(output)": "an output= that fails raises its own error",
}


def kind_of(name: str, parameter: str) -> str | None:
    """The kind of a parameter of a callable."""
    return OF_CALL.get(f"{name}({parameter})", OF_NAME.get(parameter))


# Kinds whose values may be infinite or NaN, or stand in the result as they are.
NOT_FINITE = frozenset(
    {
        "kept inputs",
        "removed positions",
        "ridge or flow",
        "labels later",
        "samples",
        "times",
        "bound",
        "vector",
        "entries",
        "any tensors",
        "labels alone",
    }
)


def may_take(name: str, parameter: str, wrong: str) -> bool:
    """Whether a wrong value may be taken, because it is none for this kind of parameter."""
    kind = kind_of(name, parameter)
    return kind == "unused" or (kind is not None and wrong in KINDS[kind])
