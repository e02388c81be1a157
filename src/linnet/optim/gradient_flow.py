"""Gradient flow and gradient descent on a linearized network to any time, in closed form.

The residual z_t = f_t(X) − Y of the squared loss ½ ‖z‖² follows ż = −η K z with K = φφᵀ, so

    z_t = e^{−ηKt} z₀                                                                      (eq. 13, 14)
    θ_t = θ₀ − φᵀ K⁻¹ (I − e^{−ηKt}) z₀                                                    (eq. 18)

and gradient descent, z_{k+1} = (I − ηK) z_k, replaces e^{−ηλt} by (1 − ηλ)^k. One eigendecomposition of
K answers for every time.

Source: Goldwaser, Ge, "Understanding sparse feature updates in deep networks using iterative linearisation",
appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError, NumericalError
from linnet.fitting.arguments import linear_outputs
from linnet.linalg.factorize import decomposing
from linnet.linear.dual import Spectrum
from linnet.linear.targets import ALPHA, make_targets
from linnet.memory import Plan, parse_bytes, require
from linnet.params import flag, instance, number, refuse, tensor
from linnet.shown import Shown
from linnet.tangent.batch import Inputs, batch_size, check_examples, check_finite, split, take
from linnet.tangent.data import Data
from linnet.tangent.forward_mode import Params
from linnet.tangent.gram import gram
from linnet.tangent.inputs import taken
from linnet.tangent.jacobian import jvp, vjp_columns
from linnet.tangent.linearized import Linearized

BATCH = 128  # examples differentiated at once


class Flow(Shown):
    """The path of a linear model under gradient flow or gradient descent. ``gradient_flow`` makes it.

    Args:
        lin: A linearization of its own; its δ is where the path starts.
        x: Training inputs, N examples.
        targets: Y, (N, C).
        spectrum: Eigenvalues λ and eigenvectors u of K, and the coordinates of −z₀ in them.
        times: Times (T,), or numbers of steps.
        learning_rate: η.
        discrete: Whether the path is that of gradient descent.

    Attributes:
        lin: The linearization, its δ at the start of the path.
        times: Times (T,), or numbers of steps.
        learning_rate: η.
        discrete: Whether the path is that of gradient descent.
        outputs: f_t(X) at these times, (T, N, C).
        losses: ½ ‖f_t(X) − Y‖², summed over examples, (T,) in float64.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> x = torch.linspace(-1, 1, 6)[:, None] ** torch.arange(2)
        >>> flow = gradient_flow(linnet.linearize(net), (x, x.prod(1)), [0.0, 1.0, math.inf])
        >>> flow.outputs.shape, bool((flow.losses.diff() < 0).all())
        (torch.Size([3, 6, 1]), True)
    """

    def __init__(
        self,
        lin: Linearized,
        x: Inputs,
        targets: Tensor,
        spectrum: Spectrum,
        times: Tensor,
        learning_rate: float,
        discrete: bool,
    ) -> None:
        self.lin, self.x, self.targets, self.times = lin, x, targets, times
        self.learning_rate, self.discrete, self._spectrum = learning_rate, discrete, spectrum
        # Eigenvalues that are rounding errors are zero: no direction in the weights belongs to them.
        n, largest = len(spectrum.values), float(spectrum.values.max())
        of_network = math.sqrt(n) * torch.finfo(lin.function.dtype).eps
        share = max(n * torch.finfo(torch.float64).eps, of_network)
        cutoff = max(share * largest, 10 * spectrum.rounding)
        self.eigenvalues = torch.where(spectrum.values > cutoff, spectrum.values, 0.0)
        self._check_rate()
        self._start = {name: t.detach() for name, t in lin.delta.items()}
        paths = [self._residual(float(t)) for t in times]  # Y − f_t
        residuals = torch.stack(paths) if paths else spectrum.residual.new_zeros(0, *targets.shape)
        self.outputs = (targets.to(residuals) - residuals).to(targets.dtype)
        self.losses = 0.5 * residuals.square().sum((1, 2))

    def _shown(self) -> dict[str, Any]:
        known = {"examples": self.n, "times": self.times, "losses": self.losses}
        return {**known, "learning rate": self.learning_rate, "in steps": self.discrete}

    @property
    def n(self) -> int:
        """Number of training examples."""
        return self._spectrum.n

    @property
    def stable_rate(self) -> float:
        """2/λ_max: gradient descent converges with any learning rate below it."""
        return 2 / max(float(self.eigenvalues.max()), torch.finfo(torch.float64).tiny)

    def delta(self, time: float) -> Params:
        """δ_t = θ_t − θ₀.

        Args:
            time: t ≥ 0 or infinity, any time and not only those of ``times``; a number of steps for
                gradient descent.

        Returns:
            δ_t by parameter name.

        Raises:
            InputError: If the time is not allowed.
        """
        time = _checked_times([time], self.discrete)[0].item()
        # θ_t − θ_start = φᵀ Σ_i u_i g_t(λ_i) u_iᵀ(Y − f_start), g_t(λ) = (1 − e^{−ηλt}) / λ
        spectrum, filtered = self._spectrum, self._filter(time) * self._spectrum.coordinates
        beta = (spectrum.vectors @ filtered).view(self.n, -1).to(self.targets.dtype)
        function, start = self.lin.function, 0
        flat = beta.new_zeros(function.space.dim)
        for part in split(self.x, BATCH):
            n = batch_size(part)
            flat += vjp_columns(function, part, beta[start : start + n])
            start += n
        change = function.space.to_params(flat)
        return {name: self._start[name] + change[name] for name in change}

    def weights(self, time: float) -> Params:
        """θ_t.

        Args:
            time: t, as for ``delta``.

        Returns:
            The tracked parameters by name.

        Raises:
            InputError: If the time is not allowed.
        """
        delta = self.delta(time)
        return {name: t + delta[name] for name, t in self.lin.theta0.items()}

    @torch.no_grad()
    def predict(self, x: Inputs, time: float) -> Tensor:
        """f₀(x) + J(x) δ_t.

        Args:
            x: M examples.
            time: t, as for ``delta``.

        Returns:
            Outputs (M, C).

        Raises:
            InputError: If the time is not allowed.
            DataError: If x is empty or not finite.
        """
        x = taken(self.lin.function, x)
        check_examples(x)
        function, delta = self.lin.function, self.delta(time)
        function.check_runs(take(x, slice(0, 1)))
        parts = [sum(jvp(function, part, delta)) for part in split(x, BATCH)]
        return torch.cat([part.reshape(part.shape[0], -1) for part in parts])  # type: ignore[union-attr]

    def _decay(self, time: float) -> Tensor:
        """The share of the residual left along each eigenvector: e^{−ηλt}, or (1 − ηλ)^k."""
        scaled = self.learning_rate * self.eigenvalues
        if math.isinf(time):
            return (scaled == 0).double()
        return (1 - scaled) ** time if self.discrete else torch.exp(-scaled * time)

    def _filter(self, time: float) -> Tensor:
        """g_t(λ) = (1 − e^{−ηλt}) / λ, or (1 − (1 − ηλ)^k) / λ; 0 in the null space, which φᵀ removes."""
        scaled = self.learning_rate * self.eigenvalues
        if self.discrete and not math.isinf(time):
            small = scaled < 0.5  # where 1 − (1 − x)^k would cancel
            gentle = -torch.expm1(time * torch.log1p(-torch.where(small, scaled, 0.0)))
            gone = torch.where(small, gentle, 1 - (1 - scaled) ** time)
        else:
            gone = 1 - self._decay(time) if math.isinf(time) else -torch.expm1(-scaled * time)
        return torch.where(self.eigenvalues > 0, gone / self.eigenvalues.clamp_min(1e-300), 0.0)

    def _residual(self, time: float) -> Tensor:
        """Y − f_t(X), (N, C) in float64."""
        left = self._spectrum.vectors @ (self._decay(time) * self._spectrum.coordinates)
        if not torch.isfinite(left.square().sum()):
            raise NumericalError(
                f"gradient descent with learning_rate={self.learning_rate:g} overflows within {time:g} steps",
                expected=f"a rate below 2/λ_max = {self.stable_rate:.3g}",
                remedy="lower learning_rate=, or ask for fewer steps",
            )
        return left.view(self.n, -1)

    def _check_rate(self) -> None:
        """Raise if gradient descent is followed to its end but has none."""
        if self.discrete and self.learning_rate >= self.stable_rate and bool(self.times.isinf().any()):
            raise InputError(
                f"learning_rate={self.learning_rate:g} with infinitely many steps: gradient descent diverges",
                expected=f"a rate below 2/λ_max = {self.stable_rate:.3g}",
                remedy="lower learning_rate=",
            )


def gradient_flow(
    lin: Linearized,
    data: Any,
    times: Tensor | Sequence[float],
    *,
    learning_rate: float = 1.0,
    discrete: bool = False,
    targets: Tensor | None = None,
    scale: float = ALPHA,
    memory: str | int | None = None,
) -> Flow:
    """Follow gradient flow of ½ Σᵢ ‖f_lin(xᵢ) − yᵢ‖² from the present δ to any times, in closed form.

    At t = ∞ it is the fit of smallest ‖δ − δ_start‖, the limit of ``linnet.fit`` for ridge → 0. The kernel
    (N·C, N·C) is formed and decomposed once.

    Args:
        lin: A linearized network; it is left as it is. The path starts at its δ, zero for a fresh one.
        data: Training data, as for ``linnet.fit``: integer y become α-scaled one-hot targets.
        times: t ≥ 0, (T,), in any order; infinity is allowed. Numbers of steps if ``discrete``.
        learning_rate: η. Flow depends on η·t only; gradient descent has it as its step size, for a
            loss summed over examples and outputs.
        discrete: Follow full-batch gradient descent, step by step, instead of flow.
        targets: Targets (N, C) to use instead of those made from y.
        scale: α of one-hot targets.
        memory: Budget such as ``"4GB"``; by default half of what is available.

    Returns:
        Outputs and losses at the times; weights and predictions at these and any others.

    Raises:
        DataError: If the data are empty, not finite or out of range.
        InputError: If an argument has a value that is not allowed.
        MemoryBudgetError: If the decomposition does not fit the budget.
        NumericalError: If gradient descent overflows.

    Source:
        Goldwaser, Ge, appendix B, eq. (9)-(19).

    Example:
        >>> import linnet
        >>> layers = torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        >>> net = torch.nn.Sequential(*layers).double()
        >>> x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
        >>> lin = linnet.linearize(net)
        >>> flow = gradient_flow(lin, (x, x.abs()), [1e2], learning_rate=1e-3)
        >>> steps = gradient_flow(lin, (x, x.abs()), [1e6], learning_rate=1e-7, discrete=True)
        >>> torch.allclose(flow.outputs, steps.outputs, atol=1e-4)
        True
    """
    instance("lin", lin, Linearized, "a Linearized", "make one with linnet.linearize(model)")
    flag("discrete", discrete)
    number("learning_rate", learning_rate, above=0, remedy="pass learning_rate=1.0")
    number("scale", scale, above=0, remedy="leave scale= out for α = 15")
    when = _checked_times(times, discrete)
    x, y = Data.of(data, lin.function, memory=memory).pair
    lin.function.check_runs(take(x, slice(0, 1)))
    own = Linearized(lin.function)
    with torch.no_grad():
        for name, value in lin.delta.items():
            own.delta[name].copy_(value)
    f0 = linear_outputs(own, x)
    wanted = _targets(targets, y, f0, scale)
    square = 8 * f0.numel() ** 2
    items = (("kernel in float64", square), ("eigenvectors", square), ("workspace", 3 * square))
    plan = Plan(f"gradient flow of {f0.numel()} equations", parse_bytes(memory, f0.device), items)
    require(plan, ["follow fewer examples", "raise memory="])
    kernel = gram(lin.function, x, form="full", memory=memory).reshape(f0.numel(), f0.numel()).double()
    with decomposing(f0.numel()):
        spectrum = Spectrum(kernel, (wanted - f0).double())
    return Flow(own, x, wanted, spectrum, when.to(f0.device), float(learning_rate), discrete)


def _targets(targets: Tensor | None, y: Tensor, f0: Tensor, scale: float) -> Tensor:
    """Y, (N, C), like the outputs."""
    if targets is None:
        return make_targets(y, f0.shape[1], scale, varied=False, dtype=f0.dtype).values.to(f0)
    expected = f"{tuple(f0.shape)}, like the outputs"
    tensor("targets", targets, expected, convert=False)
    if targets.shape != f0.shape:
        refuse("targets", targets, expected)
    check_finite(targets, "targets")
    return targets.detach().to(f0, copy=True)


def _checked_times(times: Any, discrete: bool) -> Tensor:
    """Times as (T,), float64."""
    found = tensor("times", times, "times, 0 or greater", "pass times=[0, 10, 100]").double().flatten()
    whole = not discrete or bool((found.isinf() | (found == found.floor())).all())
    if (
        isinstance(times, bool)
        or (isinstance(times, list | tuple) and any(isinstance(t, bool) for t in times))
        or not found.numel()
        or bool(found.isnan().any())
        or bool((found < 0).any())
        or not whole
    ):
        allowed = "whole numbers of steps k ≥ 0" if discrete else "times t ≥ 0"
        refuse("times", times, f"{allowed}, or infinity", "pass times=[0, 10, 100]")
    return found
