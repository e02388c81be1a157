"""The direction −(G̃ + (λ + ζ)I)⁻¹ ∇E, layer by layer and distributed over processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.layers import Layer, Part
from linnet.distributed import all_sum, least, owners, world
from linnet.errors import NumericalError
from linnet.linalg.factorize import cholesky
from linnet.linalg.kronecker import Kronecker, KroneckerEigen, factored_damping, kron_mm
from linnet.linalg.operator import ParameterSpace
from linnet.linalg.structured import StructuredOperator
from linnet.number_types import wide_type
from linnet.optim.gauss_newton_model import QuadraticModel
from linnet.optim.gauss_newton_settings import Damping
from linnet.tangent.modes import in_exact_mode
from linnet.tree import from_plain, node, to_plain


@node()
@dataclass(frozen=True)
class Factors:
    """L ⊗ R of two inverses that were made here: a Kronecker product that need not be looked over again."""

    left: Tensor  # L
    right: Tensor  # R
    name: str  # what to call the product

    def mm(self, v: Tensor) -> Tensor:
        """The product times v (P, K)."""
        return kron_mm(self.left, self.right, v)


Block = Factors | StructuredOperator


class Inverse:
    """(G̃ + (λ + ζ)I)⁻¹ of the layers that this process has."""

    def __init__(self, blocks: tuple[tuple[Part, Block], ...], space: ParameterSpace, shared: bool) -> None:
        self.blocks, self.space, self.shared = blocks, space, shared

    def times(self, g: Tensor) -> Tensor:
        """The inverse times a gradient, (P,)."""
        # g (P,)
        wide = g.to(wide_type(g.dtype))  # factors are no narrower
        out = torch.zeros_like(wide)
        with torch.autocast(g.device.type, enabled=False):  # inverses are not for half precision
            for part, block in self.blocks:
                if isinstance(block, Factors) and part.layer.biased and not part.layer.transposed:
                    _product_in_two(part, block, wide, out, self.space)
                else:
                    part.scatter(block.mm(part.gather(wide[:, None], self.space)), out[:, None], self.space)
        if self.shared:
            all_sum([out])
        return out.to(g.dtype)

    def state(self) -> Any:
        """The blocks by layer name, as dictionaries, numbers and tensors."""
        return to_plain({part.layer.name: block for part, block in self.blocks})


class Undamped:
    """G̃ of one moment, from which inverses with several ζ are made."""

    @in_exact_mode
    def __init__(self, curvature: Curvature, inversion: str, shared: bool) -> None:
        self.space, self.shared = curvature.function.space, shared and world()[1] > 1
        rank, processes = world() if self.shared else (0, 1)
        owner = shares(curvature.parts, processes)
        parts = [part for part in curvature.parts if owner[part.layer.name] == rank]
        self.parts = [replace(part, operator=_prepared(part.operator, inversion)) for part in parts]

    @in_exact_mode
    def inverse(self, zeta: float, decays: Mapping[str, float]) -> Inverse:
        """(G̃ + (λ + ζ)I)⁻¹."""
        made = tuple(
            (part, _inverted(part.operator, zeta + _decay(part.layer, decays))) for part in self.parts
        )
        return Inverse(made, self.space, self.shared)

    def restored(self, state: Any) -> Inverse | None:
        """An inverse that was saved."""
        by_name = from_plain(state)
        blocks = [(p, by_name[p.layer.name]) for p in self.parts if p.layer.name in by_name]
        complete = int(len(blocks) == len(self.parts))
        if not (least(complete) if self.shared else complete):  # else all invert anew
            return None
        return Inverse(tuple(blocks), self.space, self.shared)


def shares(parts: tuple[Part, ...], processes: int) -> dict[str, int]:
    """Which process inverts which layer: the costliest first, each to whoever has least to do."""
    ranks = owners([_cost(part.operator) for part in parts], processes)
    return {part.layer.name: rank for part, rank in zip(parts, ranks, strict=True)}


def _product_in_two(part: Part, block: Factors, g: Tensor, out: Tensor, space: ParameterSpace) -> None:
    """L [V v] R into ``out``, from weight V and bias v where they are."""
    # g (P,)
    # No matrix is copied, and products keep the weight's widths: with the bias as one more column they would
    # have odd ones, which matrix products are slower at.
    left, right = block.left, block.right
    rows, d = part.layer.matrix[0], part.layer.matrix[1] - 1
    weight, bias = (space.slices[name] for name in part.layer.names)
    turned, shifted = left @ g[weight].view(rows, d), left @ g[bias]
    # L [V v] R = [L V R_VV + L v r_Vᵀ, L V r_V + ρ L v] for R = [R_VV r_V; r_Vᵀ ρ]
    into = out[weight].view(rows, d)
    torch.mm(turned, right[:d, :d], out=into).addr_(shifted, right[d, :d])
    torch.mv(turned, right[:d, d], out=out[bias]).add_(shifted * right[d, d])


def _cost(block: StructuredOperator) -> float:
    """Σ n³ over the matrices that are inverted."""
    if isinstance(block, Kronecker):
        return block.groups * sum(float(factor.shape[-1]) ** 3 for factor in (block.left, block.right))
    return float(block.shape[0])


def _prepared(block: StructuredOperator, inversion: str) -> StructuredOperator:
    """Kronecker products by their eigendecompositions, if inverses are to be exact."""
    return KroneckerEigen.of(block) if inversion == "exact" and isinstance(block, Kronecker) else block


def _inverted(block: StructuredOperator, shift: float) -> Block:
    """The inverse of a block with the damping put in, factored where it is a Kronecker product."""
    if not isinstance(block, Kronecker):
        return block.damped(shift).inverse()
    if block.left.ndim == 3:
        return factored_damping(block, shift).inverse()
    return _factors_inverted(block, shift)


def _factors_inverted(block: Kronecker, shift: float) -> Factors:
    """(L + s_L I)⁻¹ ⊗ (R + s_R I)⁻¹; what is added depends on the factors' mean eigenvalues alone."""
    means = [
        factor.diagonal().double().mean().clamp(min=0).view(1, 1) for factor in (block.left, block.right)
    ]
    vanishes = not all(means)  # one factor is zero where no example has a gradient, whatever the other is
    damped = factored_damping(Kronecker(means[0], means[1]), shift)
    inverses = []
    for factor, mean, more, side in zip(
        (block.left, block.right), means, (damped.left, damped.right), ("left", "right"), strict=True
    ):
        shifted = torch.zeros_like(factor) if vanishes else factor.clone()
        shifted.diagonal().add_(float(more if vanishes else more - mean))
        lower = cholesky(shifted, f"damped {side} factor of {block.name}")
        inverses.append(torch.cholesky_inverse(lower))
    return Factors(inverses[0], inverses[1], f"inverse of {block.name}")


def _decay(layer: Layer, decays: Mapping[str, float]) -> float:
    """Mean λ over the entries of a layer."""
    sizes = [torch.Size(shape).numel() for shape in layer.shapes]
    total = sum(size * decays[name] for name, size in zip(layer.names, sizes, strict=True))
    return total / max(1, sum(sizes))


GRID = tuple(10.0**k for k in range(2, -7, -1))  # first dampings, in mean eigenvalues of the curvature
LOWEST = 1e-2  # of the grid, where the curvature is approximate: lower ones win one step and lose the next
THRESHOLD = 0.75  # ρ above which the quadratic model is trusted more, and below which less


@dataclass(frozen=True)
class DampingSearch:
    """A search among dampings of one undamped curvature."""

    damping: Damping  # how the dampings move
    undamped: Undamped  # G̃
    decays: Mapping[str, float]  # λ of every parameter by name
    # from an inverse to the directions of a step and the quadratic model along them
    proposal: Callable[[Inverse], tuple[list[Tensor], QuadraticModel]]

    def nearby(self, tau: float, zeta: float) -> tuple[float, Inverse, tuple[list[Tensor], QuadraticModel]]:
        """The ζ among ωζ, ζ, ζ/ω whose direction has the lowest q at its best step size."""
        omega, found = self.damping.decay, []
        for candidate in (omega * zeta, zeta, zeta / omega):
            inverse = self.undamped.inverse(candidate, self.decays)
            directions, model = self.proposal(inverse)
            found.append((model.change(model.best(tau), tau), candidate, inverse, (directions, model)))
        _, best, inverse, proposal = min(found, key=lambda one: one[0])
        return best, inverse, proposal

    def first(
        self, mean: float, reached: Callable[[Sequence[Tensor], Tensor], float]
    ) -> tuple[float, float, Inverse]:
        """Dampings to start with: those of a grid whose step lowers the objective itself the most."""
        if not (math.isfinite(mean) and mean > 0):
            raise NumericalError(
                f"the mean eigenvalue of the curvature is {mean}",
                expected="a positive number to take the first damping from",
                remedy="check whether any target counts and outputs depend on parameters, or pass damping=",
            )
        found = []
        exact = all(part.structure in ("full", "block") for part in self.undamped.parts)
        for factor in GRID if exact else [one for one in GRID if one >= LOWEST]:
            tau = factor * mean if self.damping.tau is None else self.damping.tau
            zeta = factor * mean if self.damping.zeta is None else self.damping.zeta
            inverse = self.undamped.inverse(zeta, self.decays)
            directions, model = self.proposal(inverse)
            value = reached(directions, model.best(tau))
            found.append((value if math.isfinite(value) else math.inf, tau, zeta, inverse))
        value, tau, zeta, inverse = min(found, key=lambda one: one[0])
        if not math.isfinite(value):
            raise NumericalError(
                "no step at any damping leads to a finite loss",
                expected="a loss that is finite around the first weights",
                remedy="check the network's scale, or pass damping=",
            )
        return tau, zeta, inverse


def adapted(tau: float, rho: float, decay: float) -> float:
    """The Levenberg-Marquardt rule: ω τ if ρ > ¾, τ / ω if ρ < ¾."""
    # Source: Botev 2020, section 4.4.1, where the print has ρ on both sides.
    if rho > THRESHOLD:
        return tau * decay
    return tau / decay if rho < THRESHOLD else tau


def hopeless(value: float) -> tuple[str, str, str]:
    """The error's advice where there are no weights to go back to."""
    return (
        f"the loss is {value:.6g}, or its gradient not finite, and there are no better weights to go back to",
        "a finite loss and a finite gradient",
        "check the weights, the scale of x and the targets",
    )
