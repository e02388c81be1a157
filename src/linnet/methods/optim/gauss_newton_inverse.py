"""The direction −(G̃ + (λ + ζ)I)⁻¹ ∇E, layer by layer, the layers shared out over processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.distributed import all_sum, world
from linnet.curvatures.layers import Layer
from linnet.curvatures.parts import Part
from linnet.linalg.grouped import GroupedKronecker, GroupedKroneckerEigen, grouped_factored_damping
from linnet.linalg.kronecker import Kronecker, KroneckerEigen, factored_damping
from linnet.linalg.space import ParameterSpace
from linnet.linalg.stored import from_tensors, to_tensors
from linnet.linalg.structured import StructuredOperator


class Inverse:
    """(G̃ + (λ + ζ)I)⁻¹ of the layers that this process has.

    Args:
        parts: The inverted blocks.
        space: All parameters.
        shared: Whether the other layers are with other processes.
    """

    def __init__(self, parts: tuple[Part, ...], space: ParameterSpace, shared: bool) -> None:
        self.parts, self.space, self.shared = parts, space, shared

    def times(self, g: Tensor) -> Tensor:
        """The inverse times a gradient.

        Args:
            g: (P,), the same on all processes.

        Returns:
            (P,).
        """
        out = torch.zeros_like(g)[:, None]
        for part in self.parts:
            part.scatter(part.operator.mm(part.gather(g[:, None], self.space)), out, self.space)
        if self.shared:
            all_sum([out])
        return out[:, 0]

    def state(self) -> list[tuple[str, dict[str, Any], dict[str, Tensor]]]:
        """Layer name, description and tensors of every block."""
        return [(part.layer.name, *to_tensors(part.operator)) for part in self.parts]


class Undamped:
    """G̃ of one moment, from which inverses with several ζ are made.

    Args:
        curvature: G̃ of the mean loss.
        inversion: ``"factored"`` or ``"exact"``; the eigendecompositions of the latter serve every ζ.
        shared: Whether each process inverts some of the layers for all.
    """

    def __init__(self, curvature: Curvature, inversion: str, shared: bool) -> None:
        self.space, self.shared = curvature.function.space, shared and world()[1] > 1
        rank, processes = world() if self.shared else (0, 1)
        owner = shares(curvature.parts, processes)
        parts = [part for part in curvature.parts if owner[part.layer.name] == rank]
        self.parts = [replace(part, operator=_prepared(part.operator, inversion)) for part in parts]

    def inverse(self, zeta: float, decays: Mapping[str, float]) -> Inverse:
        """(G̃ + (λ + ζ)I)⁻¹.

        Args:
            zeta: ζ.
            decays: λ of every parameter by name; a layer whose parameters differ takes the mean over its
                entries here (and the exact λ in the quadratic model).

        Returns:
            The inverse.
        """
        made = tuple(
            replace(part, operator=_damped(part.operator, zeta + _decay(part.layer, decays)).inverse())
            for part in self.parts
        )
        return Inverse(made, self.space, self.shared)

    def restored(self, state: list[tuple[str, dict[str, Any], dict[str, Tensor]]]) -> Inverse:
        """An inverse that was saved.

        Args:
            state: From :meth:`Inverse.state`.

        Returns:
            The same blocks.
        """
        by_name = {name: from_tensors(spec, tensors) for name, spec, tensors in state}
        parts = [replace(p, operator=by_name[p.layer.name]) for p in self.parts if p.layer.name in by_name]
        return Inverse(tuple(parts), self.space, self.shared)


def shares(parts: tuple[Part, ...], processes: int) -> dict[str, int]:
    """Which process inverts which layer: the costliest first, each to whoever has least to do.

    Args:
        parts: The blocks.
        processes: Their number.

    Returns:
        Layer name to rank.

    Example:
        >>> shares((), 2)
        {}
    """
    loads, owner = [0.0] * processes, {}
    for part in sorted(parts, key=lambda part: -_cost(part.operator)):
        rank = loads.index(min(loads))
        owner[part.layer.name], loads[rank] = rank, loads[rank] + _cost(part.operator)
    return owner


def _cost(block: StructuredOperator) -> float:
    """Σ n³ over the matrices that are inverted."""
    if isinstance(block, Kronecker):
        return float(block.left.shape[0]) ** 3 + float(block.right.shape[0]) ** 3
    if isinstance(block, GroupedKronecker):
        groups, n, m = block.left.shape[0], block.left.shape[1], block.right.shape[1]
        return groups * (float(n) ** 3 + float(m) ** 3)
    return float(block.shape[0])


def _prepared(block: StructuredOperator, inversion: str) -> StructuredOperator:
    """Kronecker products by their eigendecompositions, if inverses are to be exact."""
    if inversion == "exact" and isinstance(block, Kronecker):
        return KroneckerEigen.of(block)
    if inversion == "exact" and isinstance(block, GroupedKronecker):
        return GroupedKroneckerEigen.of(block)
    return block


def _damped(block: StructuredOperator, shift: float) -> StructuredOperator:
    """A block with the damping put in, factored where it is a Kronecker product."""
    if isinstance(block, Kronecker):
        return factored_damping(block, shift)
    if isinstance(block, GroupedKronecker):
        return grouped_factored_damping(block, shift)
    return block.damped(shift)


def _decay(layer: Layer, decays: Mapping[str, float]) -> float:
    """Mean λ over the entries of a layer."""
    sizes = [torch.Size(shape).numel() for shape in layer.shapes]
    total = sum(size * decays[name] for name, size in zip(layer.names, sizes, strict=True))
    return total / max(1, sum(sizes))
