"""``linnet.Laplace``: Laplace approximations of the posterior of a trained network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from linnet import tree
from linnet.curvatures import settings
from linnet.curvatures.build import check_options, watched
from linnet.curvatures.curvature import Curvature, restored_curvature
from linnet.curvatures.settings import CurvatureOptions, expectation_of, passes_of, reseeded, word_of
from linnet.curvatures.stream import held
from linnet.distributed import Share, collective
from linnet.errors import InputError
from linnet.files import save
from linnet.laplace.blocks import DAMPINGS, union
from linnet.laplace.outputs import linearized, plain_outputs, requires_gradient, sampled_outputs
from linnet.laplace.posterior import (
    FORMS,
    Groups,
    Hyper,
    Posterior,
    State,
    Watcher,
    check_mean,
    check_prior,
    expanded,
    make_mean,
    measure_all,
    prior_values,
    relative_noise,
    require_memory,
    require_origin,
    with_noise,
)
from linnet.laplace.tune import METHODS, Grid, Scorer, Search, Tuned, tuned
from linnet.likelihoods import from_description
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.random import Seed, make_generator
from linnet.memory import parse_bytes
from linnet.params import choice, flag, instance, integer, no_targets, number, optional, own
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.model import PredictiveModel
from linnet.predictive.sampled import Labels, Link, SampledPredictive
from linnet.tangent.batch import Inputs
from linnet.tangent.data import examples
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode

KIND = "laplace"  # of the file
SEARCHES = ("gradient", "fixed-point", "grid")


class Laplace(PredictiveModel):
    """A Gaussian posterior over a trained network's weights: N(θ*, (s G + Δ)⁻¹).

    G is any curvature of :func:`linnet.curvature`, summed over the data; Δ the precision of the prior; s the
    scale of the data. The model is not touched: a copy is taken at every fit.

    Args:
        model: The trained network, or a ``Linearized`` at δ = 0.
        likelihood: What its outputs mean, one of ``linnet.likelihoods``.
        structure: Of the curvature: "kfac", "ekfac", "kfra", "diagonal", "block", "full", "low-rank",
            "last-layer", or a mapping from parameter patterns to structures. The expectation is "auto"
            unless it is said, as in :func:`linnet.curvature`: exact, or sampled where that would take too
            long; that of ``GaussNewton`` is "mc".
        prior_precision: λ: one number; one per layer, by name or (L,); or one per parameter, (P,) or by name,
            where the structure allows it (full, block, diagonal, low-rank).
        prior_mean: μ: a number, (P,), or tensors by parameter name.
        data_scale: s, how often every example counts; the N of eq. 5.14 is s times the number of examples,
            and 1/s is a temperature.
        damping: How λ enters Kronecker products: "exact"; "matrix-normal", (√N Ā + √λ I) ⊗ (√N Ḡ + √λ I);
            "factored", the same balanced by trace norms. The last two understate uncertainty. A layer with a
            diagonal factor is damped exactly by all three.
        **options: Passed on to :func:`linnet.curvature`: expectation, sharing, matrix, passes; and to
            :func:`linnet.linearize`: params ("last-layer", "lora", names: a subnetwork), output.

    Raises:
        InputError: If a value is not one of those listed, or a precision is not positive.

    Source:
        Botev 2020, section 5.1; Ritter, Botev and Barber 2018; MacKay 1992; Immer et al. 2021 ("glm").

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> la = Laplace(net, linnet.likelihoods.Categorical(), prior_precision=1.0).fit((x, y))
        >>> la.tune("evidence").predictive(x).probs.shape
        torch.Size([30, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        structure: Any = "kfac",
        prior_precision: Any = 1.0,
        prior_mean: Any = 0.0,
        data_scale: float = 1.0,
        damping: str = "exact",
        **options: Unpack[CurvatureOptions],
    ) -> None:
        check_likelihood(likelihood)
        if word_of(structure) == "matrix-free" or isinstance(structure, list | tuple):
            raise InputError(
                f"structure={structure!r}",
                expected="one structure with an inverse",
                remedy='pass structure="low-rank" for large networks',
            )
        instance("model", model, nn.Module, "a torch.nn.Module", "pass the network itself")
        check_options(Laplace, structure, options)
        check_mean(prior_mean)
        check_prior(prior_precision)
        number("data_scale", data_scale, above=0, remedy="leave data_scale= out")
        choice("damping", damping, DAMPINGS)
        if isinstance(masks := options.get("params"), Mapping):
            options["params"] = own(masks)
        self._model, self._base, self._structure, self._options = model, likelihood, structure, options
        self._prior, self._prior_mean, self._damping = own(prior_precision), own(prior_mean), damping
        self._scale = float(data_scale)
        self._state: State | None = None
        self._covariance: Curvature | None = None
        self.tuned: Tuned | None = None

    def __repr__(self) -> str:
        state = "not fitted" if self._state is None else repr(self._state.posterior.curvature)
        return f"Laplace({self.likelihood!r}, {state})"

    # Fitting

    @in_exact_mode
    def fit(self, data: Any, add: bool = False) -> Laplace:
        """Sum the curvature over the data, at the weights that the model has now.

        The prior and the noise are those that the posterior was made with, whatever ``tune`` found before.

        Args:
            data: An (x, y) pair, a ``Dataset``, a ``DataLoader`` or batches. Targets may be missing where the
                curvature needs none; then there is no evidence.
            add: Whether the data come on top of those of earlier fits, at the same weights: the posterior is
                then that of all of them.

        Returns:
            This object.

        Raises:
            InputError: If ``add`` does not go with the structure, the weights have changed, or the model is a
                ``Linearized`` with δ ≠ 0.

        Example:
            >>> import linnet
            >>> net, x = torch.nn.Linear(2, 1), torch.randn(8, 2)
            >>> halves = Laplace(net, linnet.likelihoods.Gaussian()).fit((x[:4], x[:4, :1]))
            >>> halves.fit((x[4:], x[4:, :1]), add=True).examples
            8.0
        """
        no_targets("add", add)
        flag("add", add)
        share = Share.of(passes_of(self._options.get("passes")).shard)
        with collective("Laplace.fit", share.world > 1):
            return self._fit(data, add, share)

    def _fit(self, data: Any, add: bool, share: Share) -> Laplace:
        """Sum the curvature; all processes together, if there are any."""
        require_origin(self._model)
        before = self._state if add else None
        structure, options = self._structure, self._options.copy()
        if before is not None:  # other random numbers than those of the first data
            made = before.posterior.curvature.made
            seen_before, usual = int(made.examples), options.get("expectation", "auto")
            if usual == "auto":  # what the first data took, so that the sums are of one kind
                usual = expectation_of(made.expectation, made.samples)
            structure, options["expectation"] = reseeded(structure, usual, seen_before)
        seen = Watcher(self._base)
        data = held(data, passes_of(options.get("passes")).memory)
        found: Curvature = watched(seen.see, self._model, data, self._base, structure, **options)
        require_memory(found, passes_of(options.get("passes")).memory)
        if share.world > 1:
            seen.add_others()
        if seen.examples != found.made.examples:  # summed before, or in another way
            seen = measure_all(
                found.function, self._base, data, passes_of(options.get("passes")).block, share
            )
        fitted, shape = seen.fitted, seen.shape
        if before is None:
            groups, at = self._hyper(found)
        else:
            _require_shape(shape, before.labels.shape)
            found, fitted = union(before.posterior.curvature, found), before.posterior.fitted + fitted
            groups, at = before.groups, before.hyper
        mean = make_mean(self._prior_mean, found.function.space, found.function.device)
        posterior = Posterior(found, fitted, mean, self._damping)
        return self.resume(State(posterior, groups, at, Labels(self._base, shape, Link())))

    def _hyper(self, curvature: Curvature) -> tuple[Groups, Hyper]:
        """The hyper-parameters that the constructor was given."""
        function = curvature.function
        groups, values = prior_values(self._prior, curvature.parts, function.space, function.device)
        scale, noise = (
            torch.tensor(v, dtype=torch.float64, device=function.device) for v in (self._scale, 1.0)
        )
        return groups, Hyper(values, scale, noise)

    @property
    def _fitted(self) -> State:
        """The state, or an error before fit."""
        if self._state is None:
            raise InputError(
                "this Laplace has not been fitted",
                expected="a call of fit(data) first",
                remedy="la.fit((x, y))",
            )
        return self._state

    # What is known

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with the noise variance that was tuned, if any."""
        return self._base if self._state is None else with_noise(self._base, float(self._state.hyper.noise))

    @property
    def prior_precision(self) -> float | dict[str, float] | Tensor:
        """λ: a number, numbers by layer name, or (P,) for one per parameter."""
        state = self._fitted
        if state.groups.form == "isotropic":
            return float(state.hyper.prior)
        if state.groups.form == "layer":
            return dict(zip(state.groups.names, state.hyper.prior.tolist(), strict=True))
        return state.hyper.prior

    @property
    def prior_moments(self) -> tuple[Tensor, Tensor]:
        """The precision and the mean of every parameter under the prior, (P,) each, float64."""
        state = self._fitted
        return state.hyper.prior[state.groups.members], state.posterior.mean

    @property
    def data_scale(self) -> float:
        """s, how often every example counts."""
        return self._scale if self._state is None else float(self._state.hyper.scale)

    @property
    def examples(self) -> float:
        """Number of examples that the posterior has seen."""
        return self._fitted.posterior.curvature.made.examples

    @property
    @in_exact_mode
    def covariance(self) -> Curvature:
        """The posterior covariance of the weights, with ``@``, ``diagonal``, ``dense`` and more."""
        state = self._fitted
        if self._covariance is None:
            self._covariance = state.posterior.covariance(state.groups, state.hyper)
        return self._covariance

    @property
    def precision(self) -> Curvature:
        """The posterior precision s G + Δ (or its factored form)."""
        return self.covariance.inverse()

    @property
    def curvature(self) -> Curvature:
        """G, as the data gave it."""
        return self._fitted.posterior.curvature

    @in_exact_mode
    def sample(self, n: int, seed: Seed = None) -> Tensor:
        """Draw weights.

        Args:
            n: Number of draws.
            seed: Seed or generator.

        Returns:
            θ, (n, P), in the order of the parameters that vary.
        """
        integer("n", n)
        function = self.covariance.function
        theta = function.space.to_flat(function.theta)
        return theta + function.varying(self.covariance.sample(n, seed).to(theta))

    # Predictions

    @in_exact_mode
    def predictive(
        self,
        x: Inputs,
        method: str = "glm",
        *,
        link: str = "probit",
        samples: int | None = None,
        seed: Seed = None,
        joint: bool = False,
        memory: str | int | None = None,
    ) -> GaussianPredictive | SampledPredictive:
        """The distribution of the outputs, and of labels.

        Where x requires gradients, mean and covariance of "glm" are differentiable in x, exactly and once:
        the values are the same, and the backward pass is one double backward pass of the network for each
        example. Outputs of "mc" are differentiable as often as the network is.

        Args:
            x: N examples.
            method: "glm": the linearized network, Gaussian in closed form with mean f(x). "mc": networks with
                sampled weights (Botev 2020, eq. 5.9), whose mean is the samples'.
            link: For class probabilities of "glm": "probit", "pairwise", "bridge" or "mc".
            samples: Networks of "mc" (100 by default), or draws of outputs of link="mc" and of densities that
                have no closed form (1000).
            seed: Seed or generator of whatever is random.
            joint: Whether covariances between examples are wanted, (N, C, N, C).
            memory: Budget such as ``"1GB"``; by default half of what is available.

        Returns:
            ``.mean`` and ``.variance`` (N, C), ``.covariance`` (N, C, C), ``.with_noise()``, ``.sample(n)``,
            ``.probs``, ``.log_density(y)``; ``.joint_covariance``; of "mc" also ``.sampled_probs``. Where the
            covariance would be large, it is computed when it is requested.

        Raises:
            DataError: If x is empty or not finite.
            InputError: If the method or link is unknown, or fit has not been called.
        """
        x = examples(self.covariance.function, x)
        choice("method", method, ("glm", "mc"), 'pass method="glm" for closed forms')
        make_generator(seed)
        flag("joint", joint)
        parse_bytes(memory)
        optional(integer, "samples", samples)
        if method == "mc":
            outputs = sampled_outputs(self.covariance, x, 100 if samples is None else samples, seed)
            return SampledPredictive(outputs, self._labels(Link()))
        labels = self._labels(Link(link, 1000 if samples is None else samples, seed))
        return linearized(self.covariance, x, labels, joint, memory)

    @in_exact_mode
    def predict(self, x: Inputs) -> Tensor:
        """The outputs of the network at the posterior mode, which are the mean under linearization.

        Args:
            x: N examples.

        Returns:
            f(x), (N, C), outputs flattened; differentiable in x where x requires gradients.

        Raises:
            DataError: If x is empty or not finite.
            InputError: If fit has not been called.
        """
        x = examples(self.covariance.function, x)
        if requires_gradient(x):
            return self.predictive(x).mean
        return plain_outputs(self.covariance.function, x)

    def summary(self) -> dict[str, Any]:
        """The posterior's likelihood, curvature, prior and data, as plain numbers and text.

        Returns:
            A dict that ``json`` can write.
        """
        known: dict[str, Any] = {
            "likelihood": self.likelihood.describe(),
            "structure": str(word_of(self._structure)),
        }
        if self._state is None:
            return {**known, "state": "not fitted"}
        prior = self.prior_precision
        return {
            **known,
            "parameters": self.covariance.function.space.dim,
            "examples": self.examples,
            "prior_precision": prior if isinstance(prior, float) else f"{len(prior)} numbers",
            "data_scale": float(self.data_scale),
        }

    def _labels(self, link: Link) -> Labels:
        """The distribution of targets, with the tuned noise."""
        return Labels(self.likelihood, self._fitted.labels.shape, link)

    # Hyper-parameters

    @in_exact_mode
    def log_evidence(self, prior_precision: Any = None, noise_variance: Any = None) -> Tensor:
        """The logarithm of the marginal likelihood of the data, by Laplace's method.

        log p(D | θ*) + log p(θ*) + P/2 log 2π − ½ log det H; for a matrix-normal posterior with its H. The
        curvature is decomposed once; other hyper-parameters then cost a pass over its eigenvalues.

        Args:
            prior_precision: λ instead of the current one; a tensor may require gradients.
            noise_variance: σ² instead of the current one, for a Gaussian likelihood of one variance; a
                tensor may require gradients.

        Returns:
            (), float64, differentiable in tensors that require gradients.

        Raises:
            InputError: If the data had no targets, or a value is not positive.

        Example:
            >>> import linnet
            >>> x = torch.linspace(-1, 1, 9)[:, None]
            >>> la = Laplace(torch.nn.Linear(1, 1), linnet.likelihoods.Gaussian()).fit((x, x))
            >>> λ = torch.tensor(1.0, requires_grad=True)
            >>> la.log_evidence(λ).backward()
            >>> λ.grad.isfinite().item()
            True
        """
        state = self._fitted
        groups, at = state.groups, state.hyper
        if prior_precision is not None:
            check_prior(prior_precision)
            curvature = state.posterior.curvature
            if isinstance(prior_precision, Tensor) and prior_precision.numel() == groups.count:
                values = prior_precision.to(at.prior).reshape(groups.count)
            else:
                groups, values = prior_values(
                    prior_precision, curvature.parts, curvature.function.space, at.prior.device
                )
            at = Hyper(values, at.scale, at.noise)
        noise = relative_noise(self._base, noise_variance)
        if noise is not None and noise.numel() != 1:
            raise InputError(f"noise_variance={noise_variance!r}", "one number", "call it once for each")
        if noise is not None:
            at = Hyper(at.prior, at.scale, noise.to(at.noise).reshape(()))
        return state.posterior.log_evidence(groups, at)

    @in_exact_mode
    def tune(
        self,
        method: str = "evidence",
        data: Any = None,
        *,
        prior: str | None = None,
        noise: bool | None = None,
        data_scale: bool = False,
        search: str | Grid | None = None,
        link: str = "probit",
        steps: int = 200,
    ) -> Laplace:
        """Choose prior precisions, and if wanted the noise variance and the scale of the data.

        Evidence and "loo" look at the data of the fit, which the network has usually been trained on. Where
        it fits them closely, its residuals say nothing about the noise, and leave-one-out is optimistic: an
        example is taken out of the Gaussian, not out of the training of θ*. Held-out data know better.

        Args:
            method: "evidence", the marginal likelihood of the data of the fit; "validation", the predictive
                likelihood of held-out data, by gradient; "grid", the same by trying values; "loo", the
                approximate leave-one-out predictive likelihood of the data of the fit.
            data: Held-out data for "validation" and "grid"; the data of the fit for "loo".
            prior: "isotropic", "layer" or "parameter": how many precisions; as they are by default.
            noise: Whether a Gaussian noise variance is tuned too; by default for "evidence" and
                "validation" where there is one.
            data_scale: Whether the scale of the data is tuned too, by the gradient of "validation" and "loo".
            search: "gradient" or "fixed-point" (MacKay's) for "evidence"; "gradient" or "grid" for "loo", by
                default "grid" unless ``data_scale=True``; or a :class:`linnet.Grid` of values.
            link: Class probabilities of "glm".
            steps: Most evaluations of a gradient or the fixed point.

        Returns:
            This object, tuned; ``.tuned`` says how the search ended. A search by gradient of "validation" or
            "loo" warns where the network alone predicts the data as well.

        Raises:
            InputError: If the arguments do not go together, or data are missing.
        """
        state = self._fitted
        choice("method", method, METHODS, 'pass "evidence"')
        if (data is None) != (method == "evidence"):
            raise InputError(
                f"tune({method!r}) {'without' if data is None else 'with'} data",
                expected='held-out data for "validation" and "grid", that of the fit for "loo", else none',
                remedy="pass data=(x, y)" if data is None else "leave data out",
            )
        optional(choice, "prior", prior, FORMS)
        if search is not None and not isinstance(search, Grid):
            choice("search", search, SEARCHES)
        optional(flag, "noise", noise)
        integer("steps", steps)
        flag("data_scale", data_scale, "pass search=linnet.Grid(data_scale=[...]) for values to try")
        groups, at = state.groups, state.hyper
        if prior is not None and prior != groups.form:
            groups, at = expanded(state, prior)
        by_grid = method == "grid" or (method == "loo" and not data_scale)
        grid = search if isinstance(search, Grid) else Grid()
        kind = "grid" if search is grid else str(search or ("grid" if by_grid else "gradient"))
        if noise is None:
            closed = method in ("evidence", "validation") and kind != "grid"
            noise = (
                closed and isinstance(self._base, Gaussian) and self.curvature.made.expectation != "empirical"
            )
        noises = relative_noise(self._base, grid.noise_variance)
        plan = Search(kind, steps, data_scale, noise, grid, noises)
        labels = Labels(self._base, state.labels.shape, Link(link))
        memory = passes_of(self._options.get("passes")).memory
        scorer = Scorer(
            state.posterior, groups, self._base, held(data, memory), labels, method == "loo", memory
        )
        self.tuned = tuned(method, scorer, at, plan)
        return self.resume(State(state.posterior, groups, self.tuned.hyper, state.labels))

    # Files

    def resume(self, state: State) -> Laplace:
        """Take over what a fit has left, as :func:`linnet.load` does.

        Args:
            state: The posterior, its hyper-parameters, and what outputs mean.

        Returns:
            This object.
        """
        how = "load a saved posterior with linnet.load, or fit one"
        self._state = instance("state", state, State, "the state that another posterior has left", how)
        self._covariance = None
        return self

    def save(self, directory: str | Path) -> Path:
        """Write the posterior, its curvature included, to one checksummed file; see :func:`linnet.load`.

        Args:
            directory: The folder; made if it is missing.

        Returns:
            The folder.
        """
        state, low = self._fitted, self._structure
        saved = {
            "curvature": state.posterior.curvature.state(),
            "form": state.groups.form,
            "hyper": state.hyper,
            "mean": state.posterior.mean,
            "damping": state.posterior.damping,
            "fitted": state.posterior.fitted,
            "likelihood": self._base.describe(),
            "shape": tuple(state.labels.shape),
            "seed": getattr(self._options.get("expectation"), "seed", 0),
            "leading": (low.method, low.seed) if isinstance(low, settings.LowRank) else ("lanczos", 0),
        }
        save(directory, KIND, saved)
        return Path(directory)


def _require_shape(shape: tuple[int, ...], before: tuple[int, ...]) -> None:
    """Raise if data that are added give outputs of another shape."""
    if shape != before:
        raise InputError(
            f"add=True with outputs of shape {shape} after {before}",
            expected="examples whose outputs have one shape",
            remedy="fit them apart",
        )


# -- saved -----------------------------------------------------------------------------------------
# A saved posterior, on the network that it was fitted to.


@in_exact_mode
def restored_laplace(
    saved: dict[str, Any],
    path: Path,
    model: nn.Module,
    output: OutputAdapter = None,
    likelihood: Likelihood | None = None,
) -> Laplace:
    """The posterior that ``Laplace.save`` wrote."""
    family = _likelihood(saved["likelihood"], likelihood)
    curvature = restored_curvature(saved["curvature"], path, model, output)
    hyper, mean = tree.map_tensors(lambda t: t.to(curvature.function.device), (saved["hyper"], saved["mean"]))
    posterior = Posterior(curvature, saved["fitted"], mean, saved["damping"])
    structure, options = _settings(saved, curvature, model)
    la = Laplace(model, family, structure, hyper.prior, mean, float(hyper.scale), saved["damping"], **options)
    labels = Labels(family, saved["shape"], Link())
    return la.resume(State(posterior, posterior.groups(saved["form"]), hyper, labels))


def _likelihood(described: dict[str, Any], given: Likelihood | None) -> Likelihood:
    """The likelihood of a saved posterior."""
    if given is not None:
        check_likelihood(given)
        if given.describe() != described:
            raise InputError(
                f"likelihood={given!r}, but the posterior was saved with {described}",
                expected="the same likelihood",
                remedy="leave likelihood= out, or pass the one of the fit",
            )
        return given
    if described["kind"] == "Custom":
        raise InputError(
            "likelihood is missing, and a Custom one, made of functions, cannot be read from a file",
            expected="the likelihood that the posterior was fitted with",
            remedy="pass likelihood= to linnet.load",
        )
    return from_description(described)


def _settings(saved: dict[str, Any], found: Curvature, model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """The settings of the curvature, so that more data can be added."""
    made, structure = found.made, found.made.structure
    options: dict[str, Any] = {
        "expectation": expectation_of(made.expectation, made.samples, saved.get("seed", 0)),
        "sharing": made.sharing,
        "matrix": made.matrix,
    }
    if not isinstance(model, Linearized):  # which has its own
        options["params"] = {name: found.function.masks.get(name, True) for name in found.function.names}
        options["output"] = found.function.output
    if structure == "mixture":
        names = [(name, part.structure) for part in found.parts for name in part.layer.names]
        return {f"^{re.escape(name)}$": kind for name, kind in names}, options
    if isinstance(found.parts[0].operator, LowRankMatrix):
        return settings.LowRank(found.parts[0].operator.basis.shape[1], *saved.get("leading", ())), options
    return ("full" if structure == "last-layer" else structure), options
