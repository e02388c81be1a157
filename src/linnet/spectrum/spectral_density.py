"""Spectral densities and summary statistics of a kernel or any symmetric operator.

Eigenvalues are those of the operator itself: for a Gram matrix K = JJᵀ sums over parameters, not
divided by N, so that a ridge here is the ridge of ``linnet.fit``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.distributed import shared_call
from linnet.errors import NumericalError
from linnet.linalg.factorize import eigh, is_finite, nonnegative
from linnet.linalg.operator import LinearOperator
from linnet.linalg.random import Seed, make_generator, signs
from linnet.params import call, choice, integer, number, optional, refuse, tensor
from linnet.params import function as checked_function
from linnet.shown import Record
from linnet.solvers.lanczos import eigenpairs, tridiagonalize
from linnet.solvers.solution import Estimate
from linnet.solvers.trace import slq
from linnet.spectrum.kernel_matrix import Source, kernel_matrix, kernel_operator
from linnet.spectrum.plots import DensityPlots
from linnet.tangent.batch import Inputs
from linnet.tangent.rules import Form

COLUMNS = 16  # Lanczos processes side by side


@dataclass(frozen=True, repr=False)
class SpectralDensity(Record):
    """The distribution of the eigenvalues of a symmetric operator, estimated from S random vectors.

    Args:
        nodes: Eigenvalues θ of each Lanczos process (S, m).
        weights: Their weights (S, m), which sum to one for each process.
        dimension: Number of eigenvalues n.

    Example:
        >>> found = spectral_density(torch.diag(torch.tensor([1.0, 1.0, 1.0, 5.0])), samples=4, steps=2)
        >>> print(found.count(0.5, 2.0))
        3 ± 0
    """

    nodes: Tensor
    weights: Tensor
    dimension: int

    def _shown(self) -> dict[str, Any]:
        mean = self.expectation(lambda t: t)
        known = {"dimension": self.dimension, "mean eigenvalue": str(mean)}
        return {**known, "largest": float(self.nodes.max()), "samples": len(self.nodes)}

    @property
    def plot(self) -> DensityPlots:
        """Plots, which take matplotlib axes: ``density.plot.density(ax)``."""
        return DensityPlots(self)

    def expectation(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        """The mean of f over the eigenvalues, tr f(A) / n, with its standard error.

        Args:
            function: f, applied to eigenvalues (k,) elementwise.

        Returns:
            The estimate; exact for polynomials up to degree 2 m − 1 but for the random vectors.
        """
        checked_function("function", function, "a function of the eigenvalues", "pass torch.exp, or another")
        values = call("function", function, self.nodes, expected="a function of the eigenvalues, elementwise")
        if not isinstance(values, Tensor) or values.shape != self.nodes.shape:
            refuse(
                "function(nodes)", values, f"a tensor of shape {tuple(self.nodes.shape)}", "map each alone"
            )
        return Estimate.of((self.weights * values).sum(1))

    def count(self, low: float, high: float = math.inf) -> Estimate:
        """Number of eigenvalues in [low, high).

        Args:
            low: From here.
            high: To below here.

        Returns:
            The estimate, between 0 and n.
        """
        for name, bound in (("low", low), ("high", high)):
            if not (isinstance(bound, float) and math.isinf(bound)):
                number(name, bound, remedy="pass a number; -math.inf and math.inf are among them")
        share = self.expectation(lambda t: ((t >= low) & (t < high)).to(t))
        return Estimate(self.dimension * share.mean, self.dimension * share.stderr)

    def density(
        self, points: Tensor | None = None, width: float | None = None, scale: str = "linear"
    ) -> tuple[Tensor, Tensor]:
        """The density of eigenvalues, each node widened to a Gaussian; it integrates to one.

        Args:
            points: Where to evaluate, (M,); by default 512 from end to end.
            width: Standard deviation of the Gaussian; by default a hundredth of the range.
            scale: ``"log"`` for the density of log₁₀ λ, where points and width are in powers of ten
                and eigenvalues at or below 1e-12 of the largest are counted there.

        Returns:
            The points (G,), and the density at them (G,).

        Raises:
            InputError: If an argument is out of range.
        """
        choice("scale", scale, ("linear", "log"), "leave scale= out for linear")
        nodes = self.nodes
        if scale == "log":
            largest = float(nodes.abs().max())
            nodes = nodes.clamp(min=1e-12 * largest if largest else 1.0).log10()
        counted = nodes[self.weights > 0]
        low, high = float(counted.min()), float(counted.max())
        extent = high - low or max(abs(high), 1.0)
        width = extent / 100 if width is None else width
        number("width", width, above=0, remedy="leave width= out")
        if points is None:
            points = torch.linspace(low - 4 * width, high + 4 * width, 512, dtype=nodes.dtype)
        expected = "finite numbers (G,)"
        points = tensor("points", points, expected)
        if points.ndim != 1 or points.dtype == torch.bool or not is_finite(points):
            refuse("points", points, expected)
        points = points.to(nodes)
        # p(t) = E_s Σ_k w_sk N(t; θ_sk, width²)
        z = (points[:, None] - nodes.reshape(1, -1)) / width
        bumps = torch.exp(-(z**2) / 2) / (width * math.sqrt(2 * math.pi))
        return points, bumps @ self.weights.reshape(-1) / self.nodes.shape[0]


@shared_call("linnet.spectrum.spectral_density")
def spectral_density(
    source: Source,
    x: Inputs | None = None,
    *,
    form: Form = "full",
    samples: int = 8,
    steps: int = 64,
    seed: Seed = 0,
    memory: str | int | None = None,
) -> SpectralDensity:
    """The spectral density by stochastic Lanczos quadrature, from products alone.

    Works for any symmetric ``LinearOperator``: a Gauss-Newton matrix, a Hessian, a kernel. Costs
    ``steps`` products with ``samples`` vectors.

    Args:
        source: A symmetric operator, a Gram matrix, or a network (then x is needed).
        x: N examples.
        form: Which kernel of a network with several outputs.
        samples: Number of random vectors.
        steps: Lanczos steps for each.
        seed: Generator or seed of the random vectors.
        memory: Budget of the Gram matrix.

    Returns:
        Nodes and weights, from which densities, counts and means follow.

    Raises:
        InputError: If ``samples`` or ``steps`` is less than 1, or x is missing.
        NumericalError: If a product holds NaN or Inf.

    Source:
        Ghorbani, Krishnan, Xiao, ICML 2019, algorithm 1; Ubaru, Chen, Saad 2017.

    Example:
        >>> density = spectral_density(torch.diag(torch.arange(1.0, 101.0)), samples=4, seed=1)
        >>> round(density.expectation(lambda t: t).mean, 2)
        50.5
    """
    integer("samples", samples)
    integer("steps", steps)
    operator = kernel_operator(source, x, form, memory)
    generator = make_generator(seed)
    nodes, weights = [], []
    for first in range(0, samples, COLUMNS):
        shape = (operator.shape[0], min(COLUMNS, samples - first))
        start = signs(shape, generator, operator.dtype, operator.device)
        matrices = tridiagonalize(operator, start, steps).matrices().double().cpu()
        if not torch.isfinite(matrices).all():
            raise NumericalError(
                f"products with {operator!r} hold NaN or infinite values",
                expected="finite products",
                remedy="look for NaN in the data and in the network's weights",
            )
        theta, s = torch.linalg.eigh(matrices)
        nodes.append(theta)
        weights.append(s[:, 0] ** 2)  # (e₁ᵀ s_k)²
    return SpectralDensity(torch.cat(nodes), torch.cat(weights), operator.shape[0])


@shared_call("linnet.spectrum.effective_dimension")
def effective_dimension(
    source: Source,
    ridge: float,
    x: Inputs | None = None,
    *,
    form: Form = "full",
    samples: int = 16,
    steps: int = 64,
    seed: Seed = 0,
    memory: str | int | None = None,
) -> Estimate:
    """Effective dimension Σ_j σ_j / (σ_j + ρ) = tr K (K + ρI)⁻¹: the degrees of freedom of a ridge fit.

    Exact, from all eigenvalues, for a Gram matrix or a network; for an operator by stochastic Lanczos
    quadrature, with its standard error.

    Args:
        source: A Gram matrix, a network (then x is needed), or a positive semi-definite operator.
        ridge: ρ > 0, the ridge of ``linnet.fit`` (absolute; for sums over examples).
        x: N examples.
        form: Which kernel of a network with several outputs.
        samples: Random vectors, for an operator.
        steps: Lanczos steps, for an operator.
        seed: Generator or seed, for an operator.
        memory: Budget of the Gram matrix.

    Returns:
        The dimension, with standard error 0 where it is exact.

    Raises:
        InputError: If the ridge is not positive, or x is missing.
        NumericalError: If the matrix is not positive semi-definite.

    Source:
        Zhang, Neural Computation 2005; Hastie, Tibshirani, Friedman, section 3.4.1.

    Example:
        >>> effective_dimension(torch.diag(torch.tensor([3.0, 1.0])), ridge=1.0).mean
        1.25
    """
    number("ridge", ridge, above=0, remedy="pass a positive ridge")
    integer("samples", samples)
    integer("steps", steps)
    make_generator(seed)
    if isinstance(source, LinearOperator):
        operator = kernel_operator(source, x)
        rounding = math.sqrt(torch.finfo(operator.dtype).eps)

        def share(t: Tensor) -> Tensor:
            _check_semidefinite(t, rounding)
            return t.clamp(min=0) / (t.clamp(min=0) + ridge)

        return slq(operator, share, samples, steps, seed)
    values = _eigenvalues(kernel_matrix(source, x, form, memory))
    return Estimate(float((values / (values + ridge)).sum()), 0.0)


@shared_call("linnet.spectrum.condition_number")
def condition_number(
    source: Source,
    x: Inputs | None = None,
    ridge: float = 0.0,
    *,
    form: Form = "full",
    tolerance: float = 1e-6,
    max_steps: int | None = 1000,
    seed: Seed = 0,
    memory: str | int | None = None,
) -> float:
    """Condition number (σ₁ + ρ) / (σ_R + ρ), which sets the speed of gradient descent on the linear model.

    Args:
        source: A Gram matrix, a network (then x is needed), or a positive semi-definite operator, whose
            two ends are found by Lanczos.
        x: N examples.
        ridge: ρ ≥ 0, added to every eigenvalue.
        form: Which kernel of a network with several outputs.
        tolerance: Of the ends of an operator's spectrum, relative to σ₁.
        max_steps: Largest number of Lanczos steps, for an operator.
        seed: Generator or seed, for an operator.
        memory: Budget of the Gram matrix.

    Returns:
        The number; infinite where the smallest eigenvalue is zero up to rounding and ρ = 0. For an
        operator the smallest eigenvalue is known up to tolerance · σ₁, and what is below counts as zero.

    Raises:
        InputError: If the ridge is negative, or x is missing.
        NumericalError: If the matrix is not positive semi-definite, or Lanczos does not converge.

    Example:
        >>> condition_number(torch.diag(torch.tensor([4.0, 1.0])))
        4.0
        >>> condition_number(torch.diag(torch.tensor([4.0, 1.0])), ridge=2.0)
        2.0
    """
    ridge = number("ridge", ridge, least=0)
    number("tolerance", tolerance, above=0)
    optional(integer, "max_steps", max_steps)
    make_generator(seed)
    if isinstance(source, LinearOperator):
        operator = kernel_operator(source, x)
        ends = [
            eigenpairs(operator, 1, largest, tolerance, max_steps, seed).require("Lanczos for an eigenvalue")
            for largest in (True, False)
        ]
        largest, smallest = (float(pair.values[0]) for pair in ends)
        rounding = max(tolerance, torch.finfo(operator.dtype).eps * operator.shape[0]) * largest
    else:
        values = _eigenvalues(kernel_matrix(source, x, form, memory))
        largest, smallest = float(values[-1]), float(values[0])
        rounding = torch.finfo(values.dtype).eps * values.shape[0] * largest
    smallest = 0.0 if abs(smallest) <= rounding else smallest
    if smallest < 0:
        raise NumericalError(
            f"the smallest eigenvalue is {smallest:.3g}", "a positive semi-definite operator", "damp it"
        )
    return (largest + ridge) / (smallest + ridge) if smallest + ridge > 0 else math.inf


def _check_semidefinite(values: Tensor, rounding: float) -> None:
    """Raise if a Ritz value is further below zero than rounding takes that of a singular operator."""
    if float(values.min()) < -rounding * float(values.abs().max()):
        raise NumericalError(
            f"source has eigenvalues down to {float(values.min()):.3g}",
            expected="a positive semi-definite operator, such as a Gauss-Newton matrix or a kernel",
            remedy="damp it, or take spectral_density(source), which is for any symmetric operator",
        )


def _eigenvalues(matrix: Tensor) -> Tensor:
    """All eigenvalues, ascending, none of them below zero; in the matrix's own precision."""
    return nonnegative(eigh(matrix, "the Gram matrix")[0], "the Gram matrix")
