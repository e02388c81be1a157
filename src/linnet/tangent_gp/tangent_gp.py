"""``linnet.TangentGP``: the Gaussian process of a network's tangent kernel (Maddox et al. 2021).

    f(x) = f₀(x) + J(x) δ,   δ ~ N(0, I/λ):   mean f₀(x), covariance J(x) J(x')ᵀ / λ

conditioned on data t = f(X) + ε. The network is trained on one task; for others only the data change. On the
very data that the network was trained on, residuals are its training errors: they say nothing about the
noise, and the process, which is told that f₀ came before the data, is too sure of itself.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from linnet.distributed import require_same_arguments, sharing
from linnet.errors import DataError, InputError
from linnet.files import save
from linnet.fitting.arguments import whole_outputs
from linnet.fitting.saved import OTHER
from linnet.likelihoods import from_description
from linnet.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.linear.problem import Problem
from linnet.linear.saved import restored_system, system_state
from linnet.linear.system import System
from linnet.params import flag, number, warn
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.model import PredictiveModel
from linnet.predictive.noise import Noise
from linnet.solvers.solution import Estimate
from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.data import Data, examples, owned
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional, OutputAdapter, adapt_outputs
from linnet.tangent.gradients import side_by_side
from linnet.tangent.jacobian import jvp
from linnet.tangent.linearized import Linearized, function_of
from linnet.tangent.matching import given_network, identity, matching_function, require_same_outputs
from linnet.tangent.modes import differentiable_kernels, in_exact_mode
from linnet.tangent.preflight import warn_of_scale
from linnet.tangent_gp.solving import GPOptions, GPPlan, Options, describe, planned, solve
from linnet.tree import map_tensors, tensors_in

KIND = "tangent-gp"  # of the file
BATCH = 128  # examples evaluated at once
NEAR = 1.01  # times the floor of the noise: at it
LEAST = 1e-4  # the usual floor: a standard deviation of 1 % of what there is to explain


class Observed:
    """The outputs of a network that have targets, and the noise of these."""

    # - `Gaussian(variance)`: all outputs, with σ² the likelihood's, one for all or one for each output.
    # - `HeteroscedasticGaussian`: the network has 2D outputs, means and variances. The process is over the D
    #   means alone, f(x) = μ₀(x) + J_μ(x) δ, and σ²(x) is the variance that the network predicts at θ₀,
    #   for training and for new examples; it is not linearized.

    def __init__(self, base: Functional, likelihood: Likelihood, mean: str = "network") -> None:
        if not isinstance(likelihood, Gaussian | HeteroscedasticGaussian):
            raise InputError(
                f"likelihood is {likelihood!r}",
                expected="Gaussian(variance=...) or HeteroscedasticGaussian(), which have a closed form",
                remedy="for classes and counts use linnet.Laplace(model, likelihood); for classes as "
                "regression on one-hot targets use linnet.fit",
            )
        self.base, self.likelihood, self.centered = base, likelihood, mean == "network"
        self.function = base
        if isinstance(likelihood, HeteroscedasticGaussian):
            output, known = base.output, likelihood

            def means(result: Any) -> Tensor:
                return known.mean(adapt_outputs(result, output))

            self.function = Functional(base.model, base.names, means)

    def shape_of(self, x: Inputs) -> torch.Size:
        """The shape of targets, (N, ...)."""
        one = self.likelihood.mean(self.base.check_runs(take(x, slice(0, 1))))
        return torch.Size((batch_size(x), *one.shape[1:]))

    @property
    def masked(self) -> bool:
        """Whether targets may be missing."""
        return self.likelihood.masked

    @torch.no_grad()
    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """f₀(x) and σ²(x), without the scale s."""
        f = whole_outputs(self.base, x)
        return self.likelihood.mean(f).flatten(1), self.likelihood.variance(f).flatten(1)

    def problem(self, x: Inputs, y: Tensor) -> Problem:
        """Data in units of their noise."""
        f = whole_outputs(self.base, x)
        mean, variance = self.likelihood.mean(f), self.likelihood.variance(f).flatten(1).double()
        if y.numel() == mean.numel() and y.ndim == mean.ndim - 1:
            y = y.reshape(mean.shape)  # one output, and targets (N,)
        y, mean = self.likelihood.check(f, y).flatten(1).double(), mean.flatten(1).double()
        there = ~y.isnan()
        if not bool(there.any()):
            raise DataError("all targets are missing", expected="targets", remedy="check y for NaN")
        if not bool(((variance > 0) & variance.isfinite())[there].all()):
            raise DataError(
                f"the predicted noise variance lies between {float(variance.min())} and "
                f"{float(variance.max())}",
                expected="positive, finite variances",
                remedy="bound the network's variance output from below, as in 1e-5 + softplus",
            )
        weights = torch.where(there, variance.rsqrt(), 0.0)
        residual = torch.where(there, weights * (y - mean if self.centered else y), 0.0)
        return Problem(self.function, x, residual, weights, y)


class TangentGP(PredictiveModel):
    """A Gaussian process with a trained network's tangent kernel, and the network as its mean.

    Args:
        model: The trained network, or a ``Linearized``, of which the point of linearization counts.
        likelihood: ``Gaussian(variance)``, one variance or one for each output, targets possibly missing
            (``masked=True``), or ``HeteroscedasticGaussian()``: then the process is over the network's D
            means, and its own predicted variances are the noise of training and new targets.
        space: ``"function"`` for N·C × N·C equations, ``"parameter"`` for P × P, or ``"auto"``.
        prior_precision: λ.
        noise_scale: s, a factor on the likelihood's variances; ``tune`` finds it.
        **options: ``solver`` ("auto", "cholesky", "cg"); of conjugate gradients ``preconditioner`` ("auto",
            "none", "nystrom", "pivoted-cholesky", "ekfac", "kfac", "diagonal"), ``tolerance``,
            ``max_steps``, ``rank`` (of preconditioner and variance cache), ``variance`` ("lanczos", "exact"),
            ``mean`` before the data ("network": f₀; "zero", for a task that the network's outputs say
            nothing about),
            ``derivative`` ("exact", "finite-difference": gradients of a KL divergence alone), ``seed``;
            ``params`` and ``output`` as of :func:`linnet.linearize`; ``memory`` such as "4GB".

    Attributes:
        prior_precision: λ; the equations are solved again where it is set.
        noise_scale: s, likewise.

    Raises:
        InputError: If a value is not one of those listed, or the likelihood has no Gaussian process in
            closed form (classes: ``linnet.Laplace``, or ``linnet.fit`` on one-hot targets).

    Source:
        Maddox, Tang, Moreno, Wilson, Damianou, "Fast adaptation with linearized neural networks", 2021,
        eq. 2 and 3, appendices B and D. With variance σ², the mean is that of ``linnet.fit`` at the ridge
        σ² λ; ``mean="zero"`` is their mean without f₀.

    Example:
        >>> import linnet
        >>> net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        >>> x = torch.linspace(-2, 2, 20)[:, None]
        >>> gp = TangentGP(net, linnet.likelihoods.Gaussian(variance=0.01)).fit(x, x.sin())
        >>> other = gp.adapt(x[:5], x[:5].cos())  # another task: the network and its derivatives stay
        >>> other.predictive(x).mean.shape, other.predictive(x).covariance.shape
        (torch.Size([20, 1]), torch.Size([20, 1, 1]))
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        space: str = "auto",
        prior_precision: float = 1.0,
        noise_scale: float = 1.0,
        **options: Unpack[GPOptions],
    ) -> None:
        if not isinstance(likelihood, Likelihood):
            raise InputError(
                f"likelihood is {type(likelihood).__name__}",
                expected="Gaussian(variance=...) or HeteroscedasticGaussian() of linnet.likelihoods",
                remedy="call the class: linnet.likelihoods.Gaussian(variance=0.1)",
            )
        self._system: System | None = None
        self._precision, self._scale = 1.0, 1.0
        self.prior_precision, self.noise_scale = prior_precision, noise_scale
        self._options = Options.of(space, options, isinstance(model, Linearized))
        self._model = model
        self._observed = self._observed_by(likelihood)
        self._plan: GPPlan | None = None

    def __repr__(self) -> str:
        state = f"{self._plan.space} space, {self._problem.n} examples" if self._plan else "not fitted"
        return (
            f"TangentGP({self._observed.likelihood!r}, prior_precision={self.prior_precision:.4g}, {state})"
        )

    def _observed_by(self, likelihood: Likelihood) -> Observed:
        """The outputs of the network as it is now, and their noise."""
        given = self._options.given
        base = function_of(self._model, given.get("params"), given.get("output"))
        return Observed(base, likelihood, given.get("mean", "network"))

    # -- data ------------------------------------------------------------------------------------

    @in_exact_mode
    def fit(self, x: Any, y: Any = None) -> TangentGP:
        """Condition on data, at the weights that the model has now.

        Args:
            x: Inputs of N examples; or an (x, y) pair, a Dataset, a DataLoader or batches.
            y: Targets (N, C), or (N,) for one output.

        Returns:
            This object.

        Raises:
            DataError: If the data are empty, not finite, or do not fit the outputs.
            MemoryBudgetError: If no way of solving fits the memory.
            NumericalError: If conjugate gradients do not converge, or the kernel is not positive
                semi-definite.
        """
        twin = copy.copy(self)  # this object stays as it is where the data cannot be used
        twin._observed = self._observed_by(self._observed.likelihood)
        with sharing("TangentGP.fit", twin._observed.base.device):
            vars(self).update(vars(twin._condition(twin._gathered(x, y), None)))
        return self

    @in_exact_mode
    def adapt(self, x: Any, y: Any = None) -> TangentGP:
        """The process of another task: the same prior, conditioned on that task's data alone.

        What does not depend on the data is shared with this object, not computed again: the network at θ₀
        and all that is known of its derivatives, hyper-parameters that were tuned, the preconditioner in
        parameter space, and, where inputs come again, their part of the kernel (all of it and its
        factorization if all do). The result is that of ``fit`` on these data with these hyper-parameters.

        Args:
            x: Inputs of the new task, as for ``fit``.
            y: Its targets.

        Returns:
            A new object; this one stays as it is.

        Raises:
            DataError: If the data are empty, not finite, or do not fit the outputs.

        Source:
            Maddox et al. 2021, section 3 and appendix D.
        """
        with sharing("TangentGP.adapt", self._observed.base.device):
            return copy.copy(self)._condition(self._gathered(x, y), self._system)

    @in_exact_mode
    def update(self, x: Any, y: Any = None) -> TangentGP:
        """The process conditioned on more data of the same task.

        Args:
            x: New inputs, as for ``fit``.
            y: Their targets.

        Returns:
            A new object; this one stays as it is.

        Raises:
            DataError: If the data are empty, not finite, or do not fit the outputs.
        """
        with sharing("TangentGP.update", self._observed.base.device):
            system, twin, (x, y) = self._fitted, copy.copy(self), self._gathered(x, y)
            require_same_arguments(self._alike(system))
            more = self._observed.problem(x, y)
            if self.plan.solver == "cholesky":
                twin._system = system.extended(more)
                return twin
            return twin._take(system.problem.joined(more), system)

    def _gathered(self, x: Any, y: Any) -> tuple[Inputs, Tensor]:
        """Data on the network's device, without a graph."""
        data = x if y is None else (x, y)
        observed = self._observed
        found = Data.of(data, observed.base, missing=observed.masked, memory=self._options.memory)
        return map_tensors(lambda t: t.detach(), found.x), found.y.detach()

    def _condition(self, data: tuple[Inputs, Tensor], before: System | None) -> TangentGP:
        """Solve for some data."""
        x, y = data
        self._observed.base.check_runs(take(x, slice(0, 1)))
        warn_of_scale(self._observed.base, self._observed.likelihood, x)
        require_same_arguments(self._alike(before))
        return self._take(self._observed.problem(x, y), before)

    def _alike(self, before: System | None) -> dict[str, Any]:
        """What all processes that share the work must have alike."""
        past = {} if before is None else {"x before": before.problem.x, "y before": before.problem.y}
        scales = {"prior_precision": self.prior_precision, "noise_scale": self.noise_scale}
        settings = {"likelihood": self._observed.likelihood, **self._options.given}
        return {"model": self._observed.base, **past, **scales, **settings}

    def _take(self, problem: Problem, before: System | None) -> TangentGP:
        """Solve a problem."""
        ridge = self.prior_precision * self.noise_scale
        self._plan, self._system = solve(problem, ridge, self._options, before)
        return self

    @property
    def _fitted(self) -> System:
        """The solved equations, or an error before fit."""
        if self._system is None:
            raise InputError(
                "this TangentGP has not been fitted",
                expected="a call of fit(x, y) first",
                remedy="gp.fit(x, y), or gp.adapt(x, y)",
            )
        return self._system

    @property
    def _problem(self) -> Problem:
        """The data."""
        return self._fitted.problem

    # -- predictions -----------------------------------------------------------------------------

    @in_exact_mode
    def predictive(self, x: Inputs, joint: bool = False) -> GaussianPredictive:
        """The posterior of the outputs, and of new targets.

        Where x requires gradients, mean, covariance and noise are differentiable in x, once.

        Args:
            x: T examples.
            joint: Whether covariances between examples are wanted, (T, C, T, C); samples are then joint.

        Returns:
            ``.mean`` and ``.variance`` (T, C), ``.covariance`` (T, C, C), ``.with_noise()``,
            ``.sample(n)``, ``.log_density(y)``, ``.joint_covariance``. The covariance is computed when it is
            first requested.

        Raises:
            DataError: If x is empty or not finite.
            InputError: If fit has not been called.
        """
        flag("joint", joint)
        system, x = self._fitted, self._checked(x)
        if any(t.requires_grad for t in tensors_in(x)) and torch.is_grad_enabled():
            mean, covariance = _differentiable_moments(system, x, joint, self._observed.centered)
            f = self._observed.base(self._observed.base.theta, x)
            noise = self.noise_scale * self._observed.likelihood.variance(f).flatten(1)
            return GaussianPredictive(mean, covariance / self.prior_precision, Noise(noise), joint=joint)
        x = owned(x, self._options.memory)  # the covariance is computed later
        mean = self._mean(system, x)
        noise = self.noise_scale * self._observed.moments(x)[1]
        precision, dtype = self.prior_precision, mean.dtype

        @torch.no_grad()
        def covariance_of() -> Tensor:
            found = system.covariance(x, joint) / precision
            size = found.shape[0] * found.shape[1]
            square = found.reshape(size, size) if joint else found
            square = (square + square.mT) / 2
            # what is left of K(x,x) − … by rounding where the data explain all
            square.diagonal(dim1=-2, dim2=-1).clamp_(min=0)
            return square.reshape(found.shape).to(dtype)

        return GaussianPredictive(mean, covariance_of, Noise(noise), joint=joint)

    @torch.no_grad()
    def _mean(self, system: System, x: Inputs) -> Tensor:
        """f₀(x) + J(x) E[δ], or J(x) E[δ] alone where the mean before the data is zero."""
        direction, found = system.function.space.to_params(system.delta), []
        for part in split(x, BATCH):
            outputs, change = jvp(system.function, part, direction)
            found.append((outputs + change if self._observed.centered else change).flatten(1))
        return torch.cat(found)

    def _checked(self, x: Inputs) -> Inputs:
        """X, or an error."""
        x = examples(self._observed.base, x)
        self._observed.base.check_runs(take(x, slice(0, 1)))
        return x

    # -- hyper-parameters ------------------------------------------------------------------------

    @in_exact_mode
    def log_evidence(
        self, prior_precision: float | None = None, noise_scale: float | None = None
    ) -> Estimate:
        """The log marginal likelihood of the data, log N(t; m, J Jᵀ/λ + s diag σ²).

        In closed form from one eigendecomposition where equations are solved by Cholesky; by stochastic
        Lanczos quadrature otherwise, whose products serve all hyper-parameters.

        Args:
            prior_precision: λ instead of the current one.
            noise_scale: s instead of the current one.

        Returns:
            ``.mean`` in nats, and ``.stderr``, 0 in closed form.

        Raises:
            InputError: If a value is not positive, or fit has not been called.

        Source:
            Rasmussen and Williams 2006, eq. 2.30.
        """
        precision = self.prior_precision if prior_precision is None else prior_precision
        scale = self.noise_scale if noise_scale is None else noise_scale
        number("prior_precision", precision, above=0, remedy="leave it out for the current one")
        number("noise_scale", scale, above=0, remedy="leave it out for the current one")
        return self._fitted.measure.evidence(precision * scale, scale)

    @in_exact_mode
    def tune(self, prior: bool = True, noise: bool = True, least_noise: float = LEAST) -> TangentGP:
        """Take the hyper-parameters of highest marginal likelihood, and solve with them.

        Tune on data that the network was *not* trained on: where f₀ has been fitted to the targets, what it
        leaves of them says nothing about the noise of new ones, nor about the prior, and evidence (like
        leave-one-out) takes both too small. A kernel of full rank interpolates any targets, so that with few
        of them the evidence may be highest without noise: they cannot tell.

        Args:
            prior: Whether λ is tuned.
            noise: Whether s is tuned.
            least_noise: The smallest noise variance that is looked for, as a share of the mean square of
                y − f₀(x): with few targets the evidence may be highest without any noise, and a warning is
                given where the search ends at this floor. 0 for none.

        Returns:
            This object.

        Raises:
            InputError: If neither is tuned, ``least_noise`` is not in [0, 1), or the network fits every
                target exactly.
            NumericalError: If the kernel is zero.
        """
        system, problem = self._fitted, self._fitted.problem
        least = number("least_noise", least_noise, least=0, below=1, remedy="leave it out for 1e-4")
        least *= problem.squared / max(1, problem.count)  # the smallest s
        if not (flag("prior", prior) | flag("noise", noise)):
            raise InputError("prior=False, noise=False", "True for one of them", "gp.tune() tunes both")
        if noise and not problem.squared > 0:
            raise InputError(
                f"noise={noise!r}, but the network fits every target exactly",
                expected="residuals that are not all zero",
                remedy="pass noise=False, or data that the network was not trained on",
            )
        measure, precision, scale = system.measure, self.prior_precision, self.noise_scale
        if prior and noise:

            def best_scale(rho: float) -> float:
                # the best s of each ρ is q(ρ)/n, or, where that is below the floor, the floor
                return max(least, measure.best_scale(rho))

            rho = measure.maximize(best_scale)
            scale = best_scale(rho)
            precision = rho / scale
        elif prior:
            precision = measure.maximize(lambda rho: scale) / scale
        else:
            scale = measure.maximize(lambda rho: rho / precision, least * precision) / precision
        self._at(float(precision), float(scale))
        if noise and least > 0 and scale < NEAR * least:
            warn(
                f"the evidence of {problem.count} targets is highest with less noise than least_noise= "
                "allows, and perhaps with none: they cannot tell noise from signal. The noise stays at that "
                "floor; with few targets pass noise=False and keep the likelihood's variance, or give more"
            )
        return self

    # -- what is known ---------------------------------------------------------------------------

    @property
    def prior_precision(self) -> float:
        """λ, at which the equations are solved."""
        return self._precision

    @prior_precision.setter
    def prior_precision(self, value: float) -> None:
        number("prior_precision", value, above=0, remedy="leave prior_precision= out for 1")
        self._at(float(value), self._scale)

    @property
    def noise_scale(self) -> float:
        """The factor s on the likelihood's variances."""
        return self._scale

    @noise_scale.setter
    def noise_scale(self, value: float) -> None:
        number("noise_scale", value, above=0, remedy="leave noise_scale= out for 1")
        self._at(self._precision, float(value))

    def _at(self, precision: float, scale: float) -> None:
        """Take other hyper-parameters."""
        if self._system is not None and precision * scale != self._precision * self._scale:
            self._system = self._system.at(precision * scale)
        self._precision, self._scale = precision, scale

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, a Gaussian's variance with the scale s in it."""
        base = self._observed.likelihood
        if isinstance(base, Gaussian) and self.noise_scale != 1.0:
            return Gaussian(self.noise_scale * base.noise, base.axis, base.masked)
        return base

    @property
    def plan(self) -> GPPlan:
        """In which space the equations are solved and how, with what the others would have taken.

        Raises:
            InputError: If fit has not been called.
        """
        if self._plan is None:
            raise InputError("this TangentGP has no plan yet", "a call of fit(x, y) first", "gp.fit(x, y)")
        return self._plan

    @property
    @in_exact_mode
    def delta(self) -> Params:
        """E[δ] by parameter name: the weights of the posterior mean are θ₀ + E[δ]."""
        return self._fitted.function.space.to_params(self._fitted.delta)

    @in_exact_mode
    def summary(self) -> dict[str, Any]:
        """Size, plan, reasons and operations of the solution, as plain numbers and text.

        Returns:
            A dict that ``json`` can write.
        """
        known = {
            "prior_precision": self.prior_precision,
            "noise_scale": self.noise_scale,
            "likelihood": self._observed.likelihood.describe(),
        }
        if self._plan is None:
            return {**known, "state": "not fitted"}
        return {**known, **describe(self.plan, self._fitted, self._options)}

    def save(self, directory: str | Path) -> Path:
        """Write the process to a folder: safetensors and JSON, atomically.

        Args:
            directory: The folder; made if missing.

        Returns:
            The file that ``linnet.load`` reads.
        """
        system, base = self._fitted, self._observed.base
        problem = system.problem
        state = {
            "network": identity(base),
            "likelihood": self._observed.likelihood.describe(),
            "prior_precision": self.prior_precision,
            "noise_scale": self.noise_scale,
            "options": {k: v for k, v in self._options.given.items() if k not in ("params", "output")},
            "x": problem.x,
            "y": problem.y,
            "weights": problem.weights,
            "residual": problem.residual,
            "solved": system_state(system),
        }
        return save(directory, KIND, state)


def _differentiable_moments(
    system: System, x: Inputs, joint: bool, centered: bool = True
) -> tuple[Tensor, Tensor]:
    """The posterior mean and λ times the covariance, differentiable once in x, (T, C)."""
    # With R = J(x) and S = λ Cov[δ], R S Rᵀ and its derivative are those of R W + Wᵀ Rᵀ − (R W)ᵒ with
    # W = (S Rᵀ)ᵒ, where ᵒ marks what is held constant: S is symmetric, so d(R S Rᵀ) = dR W + Wᵀ dRᵀ.
    # Costs one backward pass with its graph for each example and output.
    function = system.function
    outputs, rows = _rows(function, x)
    n, c = outputs.shape
    mean = (rows @ system.delta).view(n, c) + (outputs if centered else 0.0)
    held = system.spread(rows.detach().T.contiguous())  # W, (P, T·C)
    if joint:
        product = rows @ held
        return mean, (product + product.T - product.detach()).view(n, c, n, c)
    own = rows.view(n, c, -1) @ held.T.reshape(n, c, -1).mT
    return mean, own + own.mT - own.detach()


def _rows(function: Functional, x: Inputs) -> tuple[Tensor, Tensor]:
    """f₀(x) (T, C) and J(x) (T·C, P), both with their history."""
    outputs, rows = [], []
    with torch.enable_grad(), differentiable_kernels(function.recurrent):
        for part in split(x, 1):
            leaves = {name: t.detach().requires_grad_() for name, t in function.theta.items()}
            value = function.flat(leaves, part)[0]
            outputs.append(value)
            for one in value:
                grads = torch.autograd.grad(one, list(leaves.values()), create_graph=True, allow_unused=True)
                rows.append(side_by_side(grads, leaves.values()))
    return torch.stack(outputs), torch.stack(rows)


@in_exact_mode
def restored_gp(
    saved: dict[str, Any], path: Path, model: nn.Module, output: OutputAdapter = None
) -> TangentGP:
    """The process that ``TangentGP.save`` wrote."""
    network, x = given_network(model), saved.pop("x")
    base = matching_function(network, saved["network"], output, path, OTHER)
    gp = TangentGP(
        network,
        from_description(saved["likelihood"]),
        prior_precision=saved["prior_precision"],
        noise_scale=saved["noise_scale"],
        **saved["options"],
        params=saved["network"]["parameters"],
        output=base.output,
    )
    moved = map_tensors(lambda t: t.to(base.device), saved)
    residual, weights, y = (moved[key] for key in ("residual", "weights", "y"))
    problem = Problem(gp._observed.function, x, residual, weights, y)
    options = gp._options
    gp._system = restored_system(problem, moved["solved"], options.memory, options.iteration)
    gp._plan = planned(problem, options)
    y = y.reshape(gp._observed.shape_of(x))
    require_same_outputs(
        lambda few: gp._observed.problem(few, y[: batch_size(few)]).residual, x, residual, path, OTHER
    )
    return gp
