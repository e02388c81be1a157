"""A linear fit under equations on its outputs: the same linear algebra with a conditioned kernel.

Let Aδ = b be the equations, LLᵀ = AAᵀ + τI (τ = 0 if they hold exactly, τ = ρ/w for a penalty
½w‖b − Aδ‖²), G(x) = J(x)Aᵀ L⁻ᵀ and g = L⁻¹b. Eliminating the equations' multipliers ν from the KKT system

    (K + ρI) β + K_Xc ν = r,        K_cX β + (K_cc + τI) ν = b

leaves the dual of an unconstrained fit with another kernel and another residual,

    K̃(x, x') = K(x, x') − G(x) G(x')ᵀ,      r̃ = r − G(X) g,      ν = L⁻ᵀ (g − G(X)ᵀ β),

so that δ = Jᵀβ + Aᵀν, and leave-one-out, forgetting, updates, paths of ridges and covariances follow from
(K̃ + ρI)⁻¹ as they do without equations: they are those of the prior δ ~ N(0, σ²/ρ I) given Aδ = b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg.factorize import cholesky
from linnet.linear.equations import Equations, Wanted
from linnet.linear.features import Examples, Features, Memory
from linnet.tangent.batch import Inputs, split
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram, own_kernels
from linnet.tangent.linearized import Linearized

BATCH = 128  # examples predicted at once
ROUNDS = 3  # refinements of the equations after rounding
NAMED = 3  # equations that an error names


@dataclass(frozen=True)
class Constraints:
    """Equations that a fit obeys, ready for use."""

    equations: Equations  # S
    values: Tensor  # v, what S f is to be, (q,)
    gap: Tensor  # b = v − S f₀, (q,)
    slack: Tensor  # τ of each equation, (q,); 0 where it holds exactly
    factor: Tensor  # L, (q, q)
    design: Tensor  # G(X) of the training examples, (N·C, q); with no rows where the fit is primal
    redundant: int = 0  # number of equations that followed from the others and were left out

    @property
    def level(self) -> Tensor:
        """The level g = L⁻¹ b, (q,)."""
        return _forward(self.factor, self.gap[:, None])[:, 0]

    def whitened(self, function: Functional, x: Inputs, memory: str | int | None = None) -> Tensor:
        """G(x) = J(x) Aᵀ L⁻ᵀ, (T·C, q)."""
        return _forward(self.factor, self.equations.kernel_to(function, x, memory)).T

    def multipliers(self, beta: Tensor) -> Tensor:
        """ν = L⁻ᵀ (g − G(X)ᵀ β), (q,)."""
        return _backward(self.factor, self.level - self.design.T @ beta.reshape(-1))

    def without(self, index: Tensor, c: int) -> Constraints:
        """The same equations for a fit that has lost some examples."""
        if not len(self.design):
            return self
        keep = torch.ones(len(self.design) // c, dtype=torch.bool, device=self.design.device)
        keep[index] = False
        return replace(self, design=self.design[keep.repeat_interleave(c)])

    def extended(self, design: Tensor) -> Constraints:
        """The same equations for a fit with more examples."""
        return replace(self, design=torch.cat([self.design, design]))

    @property
    def soft(self) -> bool:
        """Whether any of the equations is a penalty."""
        return bool((self.slack > 0).any())

    def at_ridge(self, old: float, new: float) -> Constraints:
        """The same equations at another ridge: penalties keep their weight w, so that τ = ρ/w follows."""
        slack = self.slack * (new / old)
        # LLᵀ = AAᵀ + τI, and G = JAᵀL⁻ᵀ
        factor = cholesky(self.factor @ self.factor.T + torch.diag(slack - self.slack), "penalties")
        design = _forward(factor, self.factor @ self.design.T).T
        return replace(self, slack=slack, factor=factor, design=design)

    def errors(self, module: Linearized) -> Tensor:
        """The errors v − S f for the present δ, (q,)."""
        with torch.no_grad():
            outputs = [module(part) for part in split(self.equations.x, BATCH)]
        flat = torch.cat([out.reshape(-1) for out in outputs]).double()
        return self.values - self.equations.combine(flat)

    def refined(self, module: Linearized, nu: Tensor) -> Tensor:
        """Remove what rounding left of the equations' errors, in place."""
        if not len(self.values):
            return nu
        eps = torch.finfo(module.function.dtype).eps
        scale = float(self.values.abs().max()) + float(self.gap.abs().max()) + 1e-300
        for _ in range(ROUNDS):
            left = self.errors(module) - self.slack * nu
            if float(left.abs().max()) <= eps * scale:
                break
            step = _backward(self.factor, _forward(self.factor, left[:, None])[:, 0])
            nu = nu + step
            moved = module.space.to_params(self.equations.pull(module.function, step))
            with torch.no_grad():
                for name, value in moved.items():
                    module.delta[name].add_(value)
        return nu

    def says(self) -> str:
        """One sentence about the equations."""
        exact, soft = int((self.slack == 0).sum()), int((self.slack > 0).sum())
        parts = [f"{exact} equation(s) hold exactly"] if exact else []
        parts += [f"{soft} weigh on the fit as a penalty"] if soft else []
        parts += [f"{self.redundant} redundant one(s) left out"] if self.redundant else []
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class Conditioned(Features):
    """J given equations on outputs: K̃(x, x') = K(x, x') − G(x) G(x')ᵀ, in float64."""

    function: Functional
    constraints: Constraints
    shared = False

    def kernel(self, of: Examples, memory: Memory = None) -> Tensor:
        """K̃(x, x), (N, C, N, C)."""
        g = self.constraints.whitened(self.function, of.x, memory)
        kernel = gram(self.function, of.x, form="full", memory=memory).double()
        return kernel - (g @ g.T).view(kernel.shape)

    def cross(self, x: Inputs, train: Examples, memory: Memory = None) -> Tensor:
        """K̃(x, X), (T, C, N, C)."""
        first, second = (self.constraints.whitened(self.function, one, memory) for one in (x, train.x))
        kernel = gram(self.function, x, train.x, form="full", memory=memory).double()
        return kernel - (first @ second.T).view(kernel.shape)

    def own(self, x: Inputs, memory: Memory = None) -> Tensor:
        """K̃(x_i, x_i), (T, C, C)."""
        found = []
        for part in split(x, BATCH):
            own = own_kernels(self.function, part, memory).double()
            g = self.constraints.whitened(self.function, part, memory).view(len(own), own.shape[1], -1)
            found.append(own - g @ g.mT)
        return torch.cat(found)


def impose(
    module: Linearized,
    asked: Wanted,
    slack: float,
    kernel: Tensor,
    before: Constraints | None,
    memory: str | int | None,
) -> Constraints:
    """The equations that are new and consistent, after those that the fit obeys already."""
    # kernel (q₀ + q, q₀ + q)
    function, equations = module.function, asked.equations
    with torch.no_grad():
        base = torch.cat([module.base(part).reshape(-1) for part in split(equations.x, BATCH)]).double()
    gap = asked.values - equations.combine(base)
    old = 0 if before is None else before.equations.count
    own, cross = kernel[old:, old:], kernel[old:, :old]
    given = cross.new_zeros(len(gap), 0) if before is None else _forward(before.factor, cross.T).T
    rest = own - given @ given.T
    left = gap if before is None else gap - given @ before.level
    tau = torch.full_like(gap, slack)
    if slack > 0:
        order = torch.arange(len(gap), device=gap.device)
        factor = cholesky(rest + torch.diag(tau), "kernel of the constraints")
    else:
        norms = equations.norms(function, memory)
        order, factor, residual = _independent(rest, left, norms, torch.finfo(function.dtype).eps)
        _consistent(asked, residual, order, base, function.dtype)
    kept = equations.chosen(order)
    empty = kernel.new_zeros(0, old + len(order))
    redundant = len(gap) - len(order)
    parts = (asked.values[order], gap[order], tau[order])
    if before is None:
        return Constraints(kept, *parts, factor, empty, redundant)
    corner = torch.cat([given[order], factor], 1)
    top = torch.cat([before.factor, before.factor.new_zeros(old, len(order))], 1)
    values, gaps, slacks = (
        torch.cat([a, b]) for a, b in zip((before.values, before.gap, before.slack), parts, strict=True)
    )
    return Constraints(
        before.equations.joined(kept),
        values,
        gaps,
        slacks,
        torch.cat([top, corner]),
        empty,
        before.redundant + redundant,
    )


def _independent(kernel: Tensor, gap: Tensor, norms: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Cholesky with pivots: equations that do not follow from others, L of their kernel, errors of all."""
    scale = torch.where(norms > 0, norms, 1.0)
    rest = kernel.diagonal() / scale**2  # what is left of each row, relative to what it could be
    tolerance = eps**0.7
    columns = kernel.new_zeros(len(gap), len(gap))
    order: list[int] = []
    error = gap.clone()
    for k in range(len(gap)):
        best = int(rest.argmax())
        if rest[best] <= tolerance:
            break
        # ℓ_k = (K_·p − Σ_j ℓ_j ℓ_pj) / √pivot
        column = kernel[:, best] - columns[:, :k] @ columns[best, :k]
        pivot = column[best].sqrt()
        column = column / pivot
        column[order] = 0
        columns[:, k] = column
        error = error - column * (error[best] / pivot)
        rest = (rest - (column / scale) ** 2).clamp_min(0)
        order.append(best)
        rest[order] = 0
    places = torch.tensor(order, dtype=torch.long, device=gap.device)
    return places, columns[places, : len(order)], error


def _consistent(asked: Wanted, error: Tensor, order: Tensor, base: Tensor, dtype: torch.dtype) -> None:
    """Raise if an equation that follows from the others is not met when they are."""
    scale = max(float(asked.values.abs().max()), float(base.abs().max()), 1e-300)
    limit = math.sqrt(torch.finfo(dtype).eps) * scale
    dropped = torch.ones_like(error, dtype=torch.bool)
    dropped[order] = False
    wrong = (dropped & (error.abs() > limit)).nonzero()[:, 0]
    if not len(wrong):
        return
    said = "; ".join(f"{asked.names[i]}: residual {float(error[i]):.3g}" for i in wrong[:NAMED].tolist())
    more = f", and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    raise InputError(
        f"the constraints contradict each other or cannot be reached ({said}{more})",
        expected="equations that some weights can meet at once, such as one target for equal inputs",
        remedy="drop one of them, set its target to NaN, or pass weight= to weigh them instead",
    )


def _forward(factor: Tensor, b: Tensor) -> Tensor:
    """L⁻¹ b for columns b."""
    solved: Tensor = torch.linalg.solve_triangular(factor, b, upper=False)
    return solved


def _backward(factor: Tensor, b: Tensor) -> Tensor:
    """L⁻ᵀ b for a vector b."""
    solved: Tensor = torch.linalg.solve_triangular(factor.T, b[:, None], upper=True)
    return solved[:, 0]


def constraint_tensors(constraints: Constraints | None) -> dict[str, Any]:
    """The tensors of the equations that a file keeps besides their inputs."""
    if constraints is None:
        return {}
    equations = constraints.equations
    named = {"row": equations.row, "place": equations.place, "weight": equations.weight}
    for name in ("values", "gap", "slack", "factor", "design"):
        named[name] = getattr(constraints, name)
    return {f"constraints.{name}": t for name, t in named.items()}


def constraints_from(tensors: dict[str, Tensor], x: Inputs, outputs: int, redundant: int = 0) -> Constraints:
    """The equations that ``constraint_tensors`` wrote."""
    named = {name.removeprefix("constraints."): t for name, t in tensors.items()}
    equations = Equations(x, named["row"], named["place"], named["weight"], len(named["values"]), outputs)
    values, gap, slack, factor, design = (
        named[name] for name in ("values", "gap", "slack", "factor", "design")
    )
    return Constraints(equations, values, gap, slack, factor, design, redundant)
