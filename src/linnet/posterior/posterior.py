"""``linnet.linear_posterior``: Bayesian classification with the linear model of a network.

With f = f₀ + J δ, the full Taylor expansion, or f = J δ, the finite tangent kernel, and δ ~ N(0, λ⁻¹ I)
(Maddox et al. 2021, eq. A.1), three posteriors over δ:

    map       the most probable δ, with a certificate; outputs are certain
    svi       a factorized Gaussian that maximizes a bound on the evidence; output moments in closed form
    laplace   N(δ*, (F + λ I)⁻¹) with the Fisher information F at the most probable δ*, in draws
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.engine import everything
from linnet.curvatures.parts import Part
from linnet.curvatures.variance import batch_covariance
from linnet.errors import InputError
from linnet.laplace.outputs import captured_blocks
from linnet.likelihoods.likelihood import Likelihood, check_likelihood, takes_missing
from linnet.linalg.random import Seed, make_generator, normal
from linnet.linalg.structured import Diagonal
from linnet.memory import parse_bytes
from linnet.params import choice, flag, instance, integer, no_targets, number
from linnet.posterior.draws import inverse_root
from linnet.posterior.model import LinearModel, Optimum, maximize
from linnet.posterior.svi import SVI, MeanField, bound, mean_field
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.labels import Labels
from linnet.predictive.links import Link
from linnet.predictive.model import PredictiveModel
from linnet.predictive.sampled import SampledPredictive
from linnet.solvers.solution import Estimate
from linnet.tangent.batch import Inputs, batch_size
from linnet.tangent.gather import examples, gather_data
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode


@dataclass(frozen=True, kw_only=True)
class Newton:
    """Newton's method to the most probable weights, and draws of the Gaussian around them.

    Args:
        tolerance: It stops when the gradient's norm is this much smaller than at δ = 0; by default the square
            root of the rounding error of the weights' type.
        max_steps: Largest number of steps.
        samples: Draws of N(δ*, (F + λ I)⁻¹) for predictions, each a vector of P numbers that is kept; 0 for
            the most probable weights alone.

    Raises:
        InputError: If a value does not work.

    Example:
        >>> Newton(samples=5).max_steps
        50
    """

    tolerance: float | None = None
    max_steps: int = 50
    samples: int = 0

    def __post_init__(self) -> None:
        if self.tolerance is not None:
            number("tolerance", self.tolerance, above=0, remedy="leave tolerance= out")
        integer("max_steps", self.max_steps)
        integer("samples", self.samples, 0)


NAMED: dict[str, Newton | SVI] = {"map": Newton(), "svi": SVI(), "laplace": Newton(samples=30)}


@dataclass(frozen=True)
class Found:
    """Result of an inference."""

    mean: Tensor  # E[δ], (P,)
    optimum: Optimum | None = None  # the most probable δ with its certificate, of "map" and "laplace"
    factors: MeanField | None = None  # the factorized Gaussian, of "svi"
    draws: Tensor | None = None  # draws of δ, (P, S), of "laplace"


class LinearPosterior(PredictiveModel):
    """The posterior of a linear model; :func:`linear_posterior` makes it.

    Args:
        model: The linear model and its data.
        method: "map", "svi" or "laplace".
        prior_precision: λ.
        found: What the inference found.

    Attributes:
        method: The same.
        prior_precision: λ.
        mean: E[δ], (P,), in the order of ``lin.parameter_names``.
        optimum: Of "map" and "laplace": the most probable δ, with ``gradient_norm`` and ``distance``, a bound
            on how far it is from the true one; None for "svi".
        bounds: Of "svi": the bound on the log evidence, epoch by epoch; empty otherwise.

    Example:
        >>> import linnet
        >>> net, data = torch.nn.Linear(2, 3), (torch.randn(12, 2), torch.arange(12) % 3)
        >>> likelihood = linnet.likelihoods.Categorical()
        >>> posterior = linear_posterior(linnet.linearize(net), data, likelihood, method="map")
        >>> posterior.predictive(data[0][:2]).mean.shape
        torch.Size([2, 3])
    """

    def __init__(self, model: LinearModel, method: str, prior_precision: float, found: Found) -> None:
        self._model, self._found = model, found
        self.method, self.prior_precision, self.mean = method, prior_precision, found.mean
        self.optimum = found.optimum
        self.bounds = () if found.factors is None else found.factors.bounds

    def __repr__(self) -> str:
        outputs = "f₀ + J δ" if self._model.base else "J δ"
        return f"LinearPosterior({self.method!r}, {outputs}, P = {len(self.mean)})"

    @property
    def delta(self) -> dict[str, Tensor]:
        """E[δ] by parameter name, as ``lin.delta``."""
        return self._model.function.space.to_params(self.mean)

    @property
    def deviation(self) -> Tensor:
        """Standard deviation of every δ under "svi", (P,).

        Raises:
            InputError: For the other methods.
        """
        return self._factors().deviation

    def _factors(self) -> MeanField:
        """The factorized Gaussian, or an error."""
        if self._found.factors is None:
            raise InputError(
                f"method={self.method!r} has no factorized Gaussian",
                expected='method="svi"',
                remedy="see .optimum",
            )
        return self._found.factors

    @in_exact_mode
    def bound(self, samples: int = 100, seed: Seed = 0) -> Estimate:
        """The bound on log p(y | X) over all of the data, of "svi".

        Args:
            samples: Draws of the weights.
            seed: Seed or generator.

        Returns:
            ``.mean`` and ``.stderr``, in nats.

        Raises:
            InputError: For the other methods.
        """
        integer("samples", samples)
        return bound(self._model, self._factors(), self.prior_precision, samples, make_generator(seed))

    @in_exact_mode
    def sample(self, n: int, seed: Seed = None) -> Tensor:
        """Draw δ: new draws, also where predictions use those made when the posterior was.

        Args:
            n: Number of draws.
            seed: Seed or generator.

        Returns:
            (n, P).

        Raises:
            InputError: If the method is "map", whose δ is a point.
        """
        integer("n", n)
        if self.method == "map":
            raise InputError(
                'draws of a posterior made with method="map"',
                expected='method="svi" or "laplace"',
                remedy="use .mean, the most probable δ",
            )
        if self._found.factors is not None:
            noise = normal((n, len(self.mean)), seed, self.mean.dtype, self.mean.device)
            return self.mean + self._found.factors.deviation * noise
        assert self.optimum is not None, "what Laplace's method expands around"
        return _laplace_draws(self._model, self.optimum, self.prior_precision, n, seed).T

    @in_exact_mode
    def predictive(
        self,
        x: Inputs,
        *,
        link: str = "probit",
        samples: int = 1000,
        seed: Seed = None,
        memory: str | int | None = None,
    ) -> GaussianPredictive | SampledPredictive:
        """The distribution of the outputs, and of labels.

        Args:
            x: N examples.
            link: For class probabilities of "map" and "svi": "probit", "pairwise", "bridge" or "mc".
            samples: Draws of outputs of link="mc".
            seed: Their seed or generator.
            memory: Budget for derivatives of "svi"; by default half of what is available.

        Returns:
            ``.mean`` and ``.variance`` (N, C), ``.covariance``, ``.sample(n)``, ``.probs``,
            ``.log_density(y)``. Of "laplace" these are averages over its draws, with ``.sampled_probs``
            (S, N, C); of "map" the variance is zero.

        Raises:
            DataError: If x is empty or not finite.
        """
        x = examples(self._model.function, x)
        parse_bytes(memory)
        labels = Labels(self._model.likelihood, self._model.shape, Link(link, samples, seed))
        if self._found.draws is not None:
            return SampledPredictive(self._model.outputs(x, self._found.draws), labels)
        mean = self._model.outputs(x, self.mean)
        if self._found.factors is None:
            zero = torch.zeros_like(mean)
            return GaussianPredictive(mean, lambda: torch.diag_embed(zero), labels, variance=zero)
        # Cov[f] = J diag(s²) Jᵀ
        function, c = self._model.function, mean.shape[1]
        spread = Diagonal(self._found.factors.deviation.square(), space=function.space)
        parts = (Part(everything(function), spread, "diagonal"),)
        blocks = captured_blocks(function, parts, x, memory, kept=batch_size(x) * c * c)
        covariance = torch.cat([batch_covariance(parts, captured) for captured in blocks])
        return GaussianPredictive(mean, covariance, labels)

    @in_exact_mode
    def predict(self, x: Inputs) -> Tensor:
        """The mean of the outputs.

        Args:
            x: N examples.

        Returns:
            E[f(x)], (N, C); of "laplace" the average over its draws.

        Raises:
            DataError: If x is empty or not finite.
        """
        if self._found.draws is not None:
            return self.predictive(x).mean
        x = examples(self._model.function, x)
        return self._model.outputs(x, self.mean)

    def summary(self) -> dict[str, Any]:
        """The method, the model and the prior, as plain numbers and text.

        Returns:
            A dict that ``json`` can write.
        """
        known: dict[str, Any] = {
            "method": self.method,
            "outputs": "f₀ + J δ" if self._model.base else "J δ",
            "likelihood": self._model.likelihood.describe(),
            "parameters": len(self.mean),
            "prior_precision": self.prior_precision,
        }
        return known if not self.bounds else {**known, "bound": self.bounds[-1]}


@in_exact_mode
def linear_posterior(
    lin: Linearized,
    data: Any,
    likelihood: Likelihood,
    method: str | Newton | SVI = "map",
    *,
    base: bool = True,
    prior_precision: float = 1.0,
    seed: Seed = 0,
) -> LinearPosterior:
    """The posterior of the weights of a linearized network, for labels of any canonical likelihood.

    The displacement that ``lin`` has is not looked at, and it is left as it is: priors are about θ₀.

    Args:
        lin: A linearized network.
        data: Training data: an (x, y) pair, a Dataset, a DataLoader or batches, which is read once.
        likelihood: What the outputs mean, as ``linnet.likelihoods.Categorical()`` or ``Bernoulli()``.
        method: "map", "svi" or "laplace", or a :class:`Newton` or :class:`SVI` for settings other than
            theirs: ``Newton(samples=5)`` is "laplace" in five draws, ``Newton(tolerance=1e-8)`` a closer
            "map". "svi" makes ten passes over the data.
        base: Whether outputs are f₀ + J δ; otherwise J δ alone, a linear model on tangent features.
        prior_precision: λ of the prior N(0, λ⁻¹ I) of δ.
        seed: Seed or generator of "svi" and "laplace".

    Returns:
        The posterior, with ``.predict(x)`` and ``.predictive(x)``.

    Raises:
        DataError: If the data are empty, not finite, or labels are out of range.
        InputError: If an argument has a value that is not listed, or the likelihood is not canonical.
        NumericalError: If Newton's method or Lanczos' does not converge.

    Source:
        Maddox, Tang, Moreno, Wilson, Damianou, "Fast adaptation with linearized neural networks", AISTATS
        2021, supplement A. They train to the most probable δ by SGD, and use the Fisher information of test
        batches, scaled; here it is that of the training data. For Laplace they write the precision as σ².

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> likelihood = linnet.likelihoods.Categorical()
        >>> posterior = linear_posterior(linnet.linearize(net), (x, y), likelihood, Newton(samples=5))
        >>> prediction = posterior.predictive(x)
        >>> prediction.probs.shape, prediction.sampled_probs.shape
        (torch.Size([30, 3]), torch.Size([5, 30, 3]))
        >>> posterior.optimum.gradient_norm < 1e-2
        True
    """
    _check(lin, likelihood)
    flag("base", base)
    make_generator(seed)
    number("prior_precision", prior_precision, above=0, remedy="leave prior_precision= out")
    how = NAMED[choice("method", method, tuple(NAMED))] if isinstance(method, str) else method
    instance("method", how, (Newton, SVI), '"map", "svi", "laplace", a linnet.Newton or a linnet.SVI')
    x, y = gather_data(data, lin.function, missing=takes_missing(likelihood))
    model = LinearModel(lin.function, x, y, likelihood, base)
    precision = float(prior_precision)
    if isinstance(how, SVI):
        factors = mean_field(model, precision, how, make_generator(seed))
        return LinearPosterior(model, "svi", precision, Found(factors.mean, factors=factors))
    eps = torch.finfo(lin.function.dtype).eps
    reached = eps**0.5 if how.tolerance is None else how.tolerance
    optimum = maximize(model, precision, reached, how.max_steps)
    if not how.samples:
        return LinearPosterior(model, "map", precision, Found(optimum.delta, optimum))
    kept = _laplace_draws(model, optimum, precision, how.samples, seed)
    return LinearPosterior(model, "laplace", precision, Found(optimum.delta, optimum, draws=kept))


def _laplace_draws(model: LinearModel, optimum: Optimum, precision: float, n: int, seed: Seed) -> Tensor:
    """Draws of N(δ*, (F + λ I)⁻¹), (P, n)."""
    z = normal((n, len(optimum.delta)), seed, optimum.delta.dtype, optimum.delta.device).T
    fisher = model.problem.hessian(optimum.outputs)
    return optimum.delta[:, None] + inverse_root(fisher.damped(precision), z.contiguous(), precision)


def _check(lin: Any, likelihood: Any) -> None:
    """Raise on arguments that cannot work."""
    if not isinstance(lin, Linearized):
        raise InputError(
            f"lin is {type(lin).__name__}",
            expected="a Linearized",
            remedy="make one with linnet.linearize(model)",
        )
    no_targets("likelihood", likelihood)
    check_likelihood(likelihood)
    if not likelihood.canonical:
        raise InputError(
            f"likelihood={likelihood!r} is not canonical in the outputs",
            expected="one whose negative logarithm is convex in them, such as Categorical() or Bernoulli()",
            remedy="use linnet.Laplace for the network itself",
        )
