"""The data of one task: residuals in units of their noise.

With targets t_i = f(x_i) + ε_i, ε_i ~ N(0, s σ_i²), known σ_i² and a common scale s, everything is written in

    w_i = 1/σ_i,   r̃ = w ∘ (t − m(X)),   J̃ = diag(w) J,   K̃ = J̃ J̃ᵀ

in which the noise is s I, and m the mean before the data: f₀, the network's own output, or zero. A target
that is missing has w = 0, and takes no part in anything.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import DataError, InputError
from linnet.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.functional import Functional, adapt_outputs, call_arguments

BATCH = 128  # examples evaluated at once


@dataclass(frozen=True)
class Task:
    """Whitened data.

    Args:
        x: N examples.
        y: Targets (N, C), as given.
        weights: w, (N, C), float64; 0 for a missing target.
        residual: r̃, (N, C), float64.
        log_noise: Σ log σ_i² over the targets that are there.
    """

    x: Inputs
    y: Tensor
    weights: Tensor
    residual: Tensor
    log_noise: float

    @property
    def n(self) -> int:
        """N."""
        return self.weights.shape[0]

    @property
    def c(self) -> int:
        """C."""
        return self.weights.shape[1]

    @property
    def count(self) -> int:
        """Number of targets that are there."""
        return int((self.weights > 0).sum())

    def joined(self, more: Task, x: Inputs) -> Task:
        """These data and more.

        Args:
            more: The new data.
            x: All inputs, these first.

        Returns:
            All data.
        """
        pairs = [(self.y, more.y), (self.weights, more.weights), (self.residual, more.residual)]
        y, weights, residual = (torch.cat(pair) for pair in pairs)
        return Task(x, y, weights, residual, self.log_noise + more.log_noise)


class Observed:
    """What is observed of a network: the outputs that have targets, and the noise of these.

    - ``Gaussian(variance)``: all outputs, with σ² the likelihood's, one for all or one for each output.
    - ``HeteroscedasticGaussian``: the network has 2D outputs, means and variances. The process is over the D
      means alone, f(x) = μ₀(x) + J_μ(x) δ, and σ²(x) is the variance that the network itself predicts at θ₀,
      for training and for new examples; it is not linearized.

    Args:
        base: The network with all its outputs.
        likelihood: One of the two.
        mean: "network" or "zero": that of the process before the data.

    Attributes:
        function: The network with the outputs that have targets.

    Raises:
        InputError: If the likelihood is another.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> observed = Observed(Functional(net), HeteroscedasticGaussian())
        >>> mean, variance = observed.moments(torch.zeros(5, 3))
        >>> mean.shape, bool((variance > 0).all())
        (torch.Size([5, 1]), True)
    """

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

    def with_likelihood(self, likelihood: Likelihood) -> Observed:
        """The same network with another noise.

        Args:
            likelihood: Of the same kind.

        Returns:
            The observation; the function is shared.
        """
        assert isinstance(likelihood, Gaussian | HeteroscedasticGaussian)
        twin = copy.copy(self)
        twin.likelihood = likelihood
        return twin

    def shape_of(self, x: Inputs) -> torch.Size:
        """The shape of targets.

        Args:
            x: N examples.

        Returns:
            (N, ...), as the likelihood wants them.
        """
        one = self.likelihood.mean(self.base.check_runs(take(x, slice(0, 1))))
        return torch.Size((batch_size(x), *one.shape[1:]))

    @property
    def masked(self) -> bool:
        """Whether targets may be missing."""
        return self.likelihood.masked

    @torch.no_grad()
    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """f₀(x) and σ²(x), without the scale s.

        Args:
            x: N examples.

        Returns:
            (N, C) each, outputs flattened.
        """
        f = self._outputs(x)
        return self.likelihood.mean(f).flatten(1), self.likelihood.variance(f).flatten(1)

    def _outputs(self, x: Inputs) -> Tensor:
        """All outputs of the network, in its own shape."""
        return torch.cat([self.base.check_runs(part) for part in split(x, BATCH)])

    def task(self, x: Inputs, y: Tensor) -> Task:
        """Data in units of their noise.

        Args:
            x: N examples.
            y: Their targets.

        Returns:
            The task.

        Raises:
            DataError: If all targets are missing, or the network predicts a variance of zero.
        """
        f = self._outputs(x)
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
        return Task(x, y, weights, residual, float(variance[there].log().sum()))


class _Whitened(nn.Module):
    """A network with outputs in units of their noise."""

    def __init__(self, network: nn.Module, output: Any) -> None:
        super().__init__()
        self.network, self.output = network, output

    def forward(self, x: Any, weights: Tensor) -> Tensor:
        """The outputs f(x) ∘ w, (N, C)."""
        args, kwargs = call_arguments(x)
        value = adapt_outputs(self.network(*args, **kwargs), self.output)
        return value.reshape(value.shape[0], -1) * weights


def whitened(function: Functional) -> Functional:
    """The network f̃(x, w) = w ∘ f(x), whose Jacobian is J̃ = diag(w) J.

    Args:
        function: f, of C outputs.

    Returns:
        A network of pairs (x, w), with the parameters in the same order.

    Example:
        >>> double = whitened(Functional(nn.Linear(1, 1)))
        >>> x = torch.ones(2, 1)
        >>> at = double.theta
        >>> torch.equal(double(at, (x, 2 * torch.ones(2, 1))), 2 * double(at, (x, torch.ones(2, 1))))
        True
    """
    names = [f"network.{name}" for name in function.names]
    return Functional(_Whitened(function.model, function.output), names)
