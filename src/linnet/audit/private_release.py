"""A differentially private release of a fit's weights.

Its noise is calibrated to (ε, δ): for neighboring data D, D' and every set A of results,
P(result(D) ∈ A) ≤ e^ε P(result(D') ∈ A) + δ. What is released is the fit with clipped per-example gradients,

    F(δ) = Σᵢ h(sᵢ (rᵢ − Jᵢδ)) + ½ ρ‖δ‖²,   sᵢ = min(1, κ/‖Jᵢ‖),   h(e) = ½‖e‖² up to ‖e‖ = τ, then τ‖e‖ − ½τ²

The gradient of an example is −sᵢJᵢᵀ e min(1, τ/‖e‖), no longer than κτ whatever the example. h is Huber's
function, so F is convex, its gradient is the clipped one, and its optimum is that of the fit where nothing
is clipped. In the dual, δ = JᵀSβ with ρβ = clip(e), found by Newton's method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.audit.predictors import check_fit
from linnet.errors import InputError, NumericalError
from linnet.fitting.arguments import checked_inputs
from linnet.fitting.last_layer import what_is_known
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.solved_fit import unweighed
from linnet.linear.dual import DualSystem
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.newton import KernelNewton
from linnet.params import choice, instance, number, refuse_first
from linnet.shown import Record
from linnet.tangent.batch import Inputs
from linnet.tangent.forward_mode import Params
from linnet.tangent.jacobian import JacobianOperator
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode

STEPS = 200  # of a bisection: until the interval has no number left inside


def privacy_delta(noise: float, sensitivity: float, epsilon: float) -> float:
    """The least δ for which Gaussian noise on a vector of some sensitivity is (ε, δ)-private: exactly."""
    # Source: Balle and Wang, "Improving the Gaussian mechanism for differential privacy", ICML 2018, theorem
    # 8.
    ratio, half = epsilon * noise / sensitivity, sensitivity / (2 * noise)
    first = float(torch.special.ndtr(_number(half - ratio)))
    # in logarithms: e^ε overflows before the product does
    second = math.exp(min(0.0, epsilon + float(torch.special.log_ndtr(_number(-half - ratio)))))
    return max(0.0, first - second)


def gaussian_noise(sensitivity: float, epsilon: float, delta: float) -> float:
    """The least σ for which Gaussian noise on a vector of some sensitivity is (ε, δ)-private."""
    # Source: Balle and Wang, ICML 2018, algorithm 1.
    low, high = 0.0, sensitivity
    while privacy_delta(high, sensitivity, epsilon) > delta:
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if privacy_delta(middle, sensitivity, epsilon) > delta:
            low = middle
        else:
            high = middle
    return high


def _number(value: float) -> Tensor:
    """A float64 scalar."""
    return torch.tensor(value, dtype=torch.float64)


def jacobian_scales(blocks: Tensor, limit: float, eps: float) -> Tensor:
    """s_i = min(1, κ/‖J_i‖), with ‖J_i‖² the largest eigenvalue of K_ii."""
    # blocks (N, C, C)
    norms = torch.linalg.eigvalsh(blocks.double())[:, -1].clamp_min(0).sqrt() * (1 + 100 * eps)
    scales: Tensor = (limit / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
    return scales


def clip_rows(e: Tensor, limit: float) -> Tensor:
    """Rows no longer than τ: the gradient of Huber's function, (N, C)."""
    return e * _factors(e, limit)[:, None]


def _factors(e: Tensor, limit: float) -> Tensor:
    """min(1, τ/‖e_i‖), (N,)."""
    factors: Tensor = (limit / e.norm(dim=1).clamp_min(torch.finfo(e.dtype).tiny)).clamp_max(1.0)
    return factors


def _roots(e: Tensor, limit: float) -> Tensor:
    """Square roots of the Hessians of h: I, or √(τ/‖e‖) (I − êêᵀ) where clipped, (N, C, C)."""
    eye = torch.eye(e.shape[1], dtype=e.dtype, device=e.device).expand(len(e), -1, -1)
    unit = e / e.norm(dim=1, keepdim=True).clamp_min(torch.finfo(e.dtype).tiny)
    factors = _factors(e, limit)
    outside = factors.sqrt()[:, None, None] * (eye - unit[:, :, None] * unit[:, None, :])
    return torch.where((factors < 1)[:, None, None], outside, eye)


@dataclass(frozen=True, eq=False)
class _Clipped:
    """The problem of Newton's method with Huber's function h of the residuals, Σ h(r_i − f_i)."""

    residual: Tensor  # r, (N, C)
    limit: float  # τ

    @property
    def base(self) -> Tensor:
        """Zero: residuals are those of the network, (N, C)."""
        return torch.zeros_like(self.residual)

    @property
    def n(self) -> int:
        """N."""
        return len(self.residual)

    @property
    def c(self) -> int:
        """C."""
        return self.residual.shape[1]

    def losses(self, f: Tensor) -> Tensor:
        """h(r_i − f_i), (N,)."""
        norms, limit = (self.residual - f).norm(dim=1), self.limit
        return torch.where(norms <= limit, 0.5 * norms**2, limit * norms - 0.5 * limit**2)

    def gradient(self, f: Tensor) -> Tensor:
        """In the outputs, (N, C)."""
        return -clip_rows(self.residual - f, self.limit)

    def roots(self, f: Tensor) -> Tensor:
        """Of the Hessians in the outputs, (N, C, C)."""
        return _roots(self.residual - f, self.limit)


def clipped_optimum(kernel: Tensor, residual: Tensor, ridge: float, limit: float) -> Tensor:
    """β of the optimum, by Newton's method on a strongly convex objective, (N, C)."""
    # kernel (N·C, N·C), residual (N, C)
    problem: Any = _Clipped(residual, limit)  # all that Newton's method asks of one
    found: KernelNewton = KernelNewton(problem, kernel, ridge)
    found.require(EXACT)
    return found.beta


NEIGHBORS = ("replace", "remove")
EXACT = 1e-8  # of the gradient at the start: what may be left of it
INEXACT = 1e-3  # of the sensitivity: how far the solution may be from the optimum; paid for in the noise
PROTECTED = "δ, and whatever is computed from it and from public data, such as predictions"
NOT_PROTECTED = (
    "the network before the fit, its head included: it is taken to be public",
    "the ridge, the clipping limits and the target scale: they must have been chosen without these data",
    "the number of examples",
    "a choice of examples by the data, such as summarize() or what mislabeled() names: the guarantee is of "
    "the examples that were fitted",
    "the fit itself, its temperatures, reports and files: publish the release alone",
    "several releases from the same data: their ε and δ add up",
    "rounding: noise is drawn in floating point from torch's generator, which is not cryptographic, and a "
    "seed that becomes known undoes the release",
)


@dataclass(frozen=True, repr=False)
class PrivacyCertificate(Record):
    """Privacy guarantee of a release, with the constants behind it.

    Args:
        epsilon: ε.
        delta: δ of (ε, δ).
        neighbors: ``"replace"``: data sets of the same size that differ in one example; ``"remove"``: one
            of them has an example more.
        noise: Standard deviation of the noise on each weight.
        constants: The numbers from which it follows.
        not_protected: What the guarantee does not cover.
    """

    epsilon: float
    delta: float
    neighbors: str
    noise: float
    constants: dict[str, float]
    not_protected: tuple[str, ...]

    @property
    def protected(self) -> str:
        """Scope of the guarantee."""
        return PROTECTED

    def __str__(self) -> str:
        """The guarantee in words."""
        kind = "is another" if self.neighbors == "replace" else "is added or removed"
        numbers = ", ".join(f"{name} = {value:.6g}" for name, value in self.constants.items())
        lines = [
            f"({self.epsilon:g}, {self.delta:g}) differential privacy where one example {kind}: "
            f"noise {self.noise:.6g} on each weight ({numbers}).",
            f"Protected: {self.protected}.",
            *(f"Not protected: {line}." for line in self.not_protected),
        ]
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Release(Record):
    """Weights that may be published, with their certificate.

    Args:
        module: The linearized network with the released δ.
        certificate: What is guaranteed.
        private: Figures that must stay private: how many examples were clipped, and how far the
            release is from the optimum.
    """

    module: Linearized
    certificate: PrivacyCertificate
    private: dict[str, float]

    def _shown(self) -> dict[str, Any]:
        return {"weights": self.module.space.dim, "certificate": self.certificate}

    @property
    def delta(self) -> Params:
        """The released δ, by parameter name."""
        return {name: t.detach() for name, t in self.module.delta.items()}

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """f₀(x) + J(x)δ, (N, C)."""
        out: Tensor = self.module(checked_inputs(self.module, x))
        return out.reshape(out.shape[0], -1)


@in_exact_mode
def release(
    fit: LinearFit,
    epsilon: float,
    delta: float,
    *,
    clip: tuple[float, float],
    neighbors: str = "replace",
    generator: torch.Generator | None = None,
) -> Release:
    """Release δ with (ε, δ) differential privacy.

    With ``clip=(κ, τ)`` an example counts as if ‖J_i‖ were at most κ and pulls on its residual with at most
    τ, so that its gradient is at most κτ (see the top of this file); where nothing is clipped
    the optimum is the fit's own. The objective is ρ-strongly convex, so that one example moves the optimum
    by at most κτ/ρ when it is removed and 2κτ/ρ when it is replaced. Gaussian noise of that sensitivity is
    added to δ: the larger the ridge, the less.

    Args:
        fit: A fit in the dual, with a given ridge, of a network that does not depend on the data.
        epsilon: ε > 0.
        delta: δ, below 1/N.
        clip: κ in units of the Jacobian's norm, τ in units of the outputs: chosen without these data.
        neighbors: ``"replace"`` (data sets of one size that differ in one example) or ``"remove"``.
        generator: Source of the noise; its seed must stay secret. If left out, torch's global stream, which
            is then as secret as whatever seeded it.

    Returns:
        The released weights and the certificate.

    Raises:
        InputError: If a condition of the guarantee does not hold, or an argument is out of range.
        NumericalError: If rounding keeps the solution too far from the optimum.

    Source:
        Chaudhuri, Monteleoni, Sarwate, JMLR 2011 (output perturbation); Balle and Wang, ICML 2018
        (calibration).

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> x = torch.randn(50, 2)
        >>> fit = linnet.fit(linnet.linearize(net), (x, x[:, :1]), ridge=20.0, solver="dual")
        >>> release(fit, 1.0, 1e-3, clip=(2.0, 1.0)).certificate.constants["gradient"]
        2.0
    """
    number("epsilon", epsilon, above=0, remedy="pass a positive ε, such as 1.0")
    number("delta", delta, above=0, below=1, remedy="pass a δ well below 1/N, such as 1e-5")
    choice("neighbors", neighbors, NEIGHBORS)
    kappa, tau = _limits(clip)
    if generator is not None:
        instance("generator", generator, torch.Generator, "a torch.Generator, with a secret seed, or None")
    system = _releasable(fit, delta)
    function, c = fit.module.function, system.c
    blocks = system.kernel.view(fit.n, c, fit.n, c).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    scales = jacobian_scales(blocks, kappa, torch.finfo(function.dtype).eps)
    exact = (2 if neighbors == "replace" else 1) * kappa * tau / fit.ridge
    flat, private = _solve(system, JacobianOperator(function, fit.x, c), scales, tau)
    if private["distance"] > INEXACT * exact:
        raise NumericalError(
            f"the solution may be {private['distance']:.1e} away from the optimum",
            expected=f"at most {INEXACT:g} of the sensitivity",
            remedy="fit with the network in float64",
        )
    # both solutions may be INEXACT · exact away from their optima
    sensitivity = exact * (1 + 2 * INEXACT)
    noise = gaussian_noise(sensitivity, epsilon, delta)
    drawn = torch.randn(function.space.dim, generator=generator, dtype=torch.float64)
    flat = flat + noise * drawn.to(function.device)
    module = Linearized(function)
    with torch.no_grad():
        for name, value in module.space.to_params(flat.to(function.dtype)).items():
            module.delta[name].copy_(value)
    constants = {"jacobian": kappa, "residual": tau, "ridge": fit.ridge, "gradient": kappa * tau}
    constants["sensitivity"] = sensitivity
    made = PrivacyCertificate(float(epsilon), float(delta), neighbors, noise, constants, NOT_PROTECTED)
    return Release(module, made, private)


def _solve(
    system: DualSystem, jacobian: JacobianOperator, scales: Tensor, tau: float
) -> tuple[Tensor, dict[str, float]]:
    """The optimum of the clipped objective, and what must stay private about it."""
    wide = scales.repeat_interleave(system.c)
    kernel = wide[:, None] * system.kernel * wide
    beta = clipped_optimum(kernel, scales[:, None] * system.residual, system.ridge, tau)
    flat = jacobian.T.mv((scales[:, None] * beta).reshape(-1).to(jacobian.dtype)).double()
    # the gradient, computed afresh: ρδ − JᵀS clip(S(r − Jδ))
    fitted = jacobian.mv(flat.to(jacobian.dtype)).view(system.residual.shape).double()
    e = scales[:, None] * (system.residual - fitted)
    pull = (scales[:, None] * clip_rows(e, tau)).reshape(-1)
    gradient = system.ridge * flat - jacobian.T.mv(pull.to(jacobian.dtype)).double()
    return flat, {
        "clipped_jacobians": float((scales < 1).sum()),
        "clipped_residuals": float((e.norm(dim=1) > tau).sum()),
        "distance": float(gradient.norm()) / system.ridge,
    }


def _limits(clip: Any) -> tuple[float, float]:
    """κ and τ."""
    if not isinstance(clip, tuple | list) or len(clip) != 2:
        raise InputError(
            f"clip={clip!r}",
            expected="two numbers (κ, τ): limits of ‖J_i‖ and of the residual",
            remedy="choose them from public data or from what outputs can be at all, not from these data",
        )
    kappa, tau = (number(f"clip[{i}]", value, above=0) for i, value in enumerate(clip))
    return kappa, tau


def _releasable(fit: LinearFit, delta: float) -> DualSystem:
    """The equations of a fit that can be released, or an error that says why it cannot."""
    check_fit(fit)
    unweighed(fit, "release")
    head = what_is_known(fit.module.model)
    leaks = [
        (
            fit.record.criterion != "given",
            f"the ridge of the fit was chosen by {fit.record.criterion!r} on the data, which gives them away",
            "a ridge chosen without these data",
            "fit with ridge= a number",
        ),
        (
            head.get("init") == "probe" or any("head was" in line for line in fit.record.warnings),
            "the head of the network was fitted on data, and a release would publish that head",
            "a network that does not depend on the data, its head included",
            'make the head with linnet.with_head(model, classes, init="random")',
        ),
        (
            bool(head.get("metric")),
            "the network has the metric of a curvature, which was summed over data",
            "a network that does not depend on the data",
            "release a fit of the network without linnet.with_metric",
        ),
        (
            bool(head.get("sketch")),
            "the network moves along directions that were made of data, which a release would publish",
            "a network that does not depend on the data",
            "release a fit of the network without linnet.with_sketch",
        ),
        (
            fit.constraints is not None,
            "the fit obeys equations on outputs, whose values no noise hides",
            "a fit without constraints",
            "release fit before it is constrained",
        ),
    ]
    refuse_first(leaks)
    if not isinstance(fit.system, KernelSystem):
        raise InputError(
            f"the fit was solved by {fit.solver!r}",
            expected='solver="dual": the clipped optimum is found in the kernel',
            remedy='fit again with solver="dual"',
        )
    if delta >= 1 / fit.n or math.isclose(delta, 1 / fit.n):
        raise InputError(
            f"delta={delta:g} with {fit.n} examples",
            expected=f"a δ below 1/N = {1 / fit.n:.3g}: publishing one example outright has δ = 1/N",
            remedy="pass a smaller delta=",
        )
    return fit.system.dual
