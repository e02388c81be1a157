"""Λ: the summed curvature of the tasks so far, in blocks of layers, and its products."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from linnet.continual.merge import scaled, summed
from linnet.continual.parameters import require_shape
from linnet.curvatures.layers import Layer, Part
from linnet.errors import ModelError
from linnet.linalg.kronecker import Kronecker
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.operator import Params
from linnet.linalg.structured import Dense, Diagonal, StructuredOperator
from linnet.tree import map_tensors, node, tensors_in

Shapes = Mapping[str, tuple[int, ...]]

WHOLE = ("full", "low-rank")  # one block for all parameters, whichever they are


@node()
@dataclass(frozen=True, eq=False)
class Block:
    """A layer's part of Λ."""

    layer: Layer  # the layer
    structure: str  # what its blocks are, in the engine's words
    # what they add up to; one, unless a list of Kronecker products is kept
    terms: tuple[StructuredOperator, ...]
    examples: float  # number of inputs behind the means of Kronecker products, examples where there are none

    @classmethod
    def of(cls, part: Part, strength: float, examples: float, like: torch.dtype) -> Block:
        """The block of one task."""
        operator = moved(part.operator, part.operator.device, like)
        # positions without a label are in no mean
        count = examples if part.terms is None else part.terms
        return cls(part.layer, part.structure, (scaled(operator, strength),), count)

    @property
    def _joined(self) -> bool:
        """Whether the order is that of the matrix [W b]."""
        return Part(self.layer, self.terms[0], self.structure).joined

    def accepts(self, other: Block) -> bool:
        """Whether another task's block describes the same parameters in the same form."""
        if self.structure != other.structure or self._joined != other._joined:
            return False
        if self.structure in WHOLE:
            return True
        return self.layer.names == other.layer.names and self.layer.transposed == other.layer.transposed

    def plus(self, other: Block, merge: str) -> Block:
        """The sum with another task's block."""
        shapes = _united(self.layer.shapes_by_name, other.layer.shapes_by_name)
        layer = replace(other.layer, shapes_by_name=shapes)
        terms = [_spread(term, self.layer, layer) for term in self.terms]
        fresh = [_spread(term, other.layer, layer) for term in other.terms]
        examples = self.examples + other.examples
        if len(terms) == len(fresh) == 1:
            counts = (self.examples, other.examples)
            one = summed(terms[0], fresh[0], merge, counts, layer.transposed)
            terms, fresh = ([one], []) if one is not None else (terms, fresh)
        return Block(layer, self.structure, (*terms, *fresh), examples)

    def times(self, factor: float) -> Block:
        """A multiple."""
        return replace(self, terms=tuple(scaled(term, factor) for term in self.terms))

    def product(self, delta: Mapping[str, Tensor]) -> Params:
        """Λ δ for the layer's parameters; those that are absent count as δ = 0."""
        shapes = self.layer.shapes_by_name
        present = [name for name in shapes if name in delta]
        if not present:
            return {}
        like = delta[present[0]]
        pieces = [delta[name] if name in delta else like.new_zeros(shape) for name, shape in shapes.items()]
        parts = self._products(pieces)
        return {name: part for name, part in zip(shapes, parts, strict=True) if name in delta}

    def _products(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """The product with the layer's parameters, each in its shape."""
        if not self._joined:
            return _in_a_row(self.terms, pieces)
        layer = self.layer
        if layer.groups == 1 and not layer.transposed:
            products = [t for t in self.terms if isinstance(t, Kronecker)]
            if len(products) == len(self.terms):
                return _of_weight_and_bias(products, pieces)
        v = layer.join(pieces)  # (R, rows, columns)
        return layer.part(_summed_products(self.terms, v.flatten()).view(v.shape))


def _summed_products(terms: Sequence[StructuredOperator], v: Tensor) -> Tensor:
    """Σₖ Mₖ v."""
    total = terms[0].mv(v)
    for term in terms[1:]:
        total = total + term.mv(v)
    return total


def _in_a_row(terms: Sequence[StructuredOperator], pieces: Sequence[Tensor]) -> list[Tensor]:
    """The product with parameters one after another."""
    sizes = [piece.numel() for piece in pieces]
    if len(terms) == 1 and isinstance(terms[0], Diagonal):
        values = terms[0].values.split(sizes)
        return [v.view(p.shape) * p for v, p in zip(values, pieces, strict=True)]
    flat = pieces[0].flatten() if len(pieces) == 1 else torch.cat([p.flatten() for p in pieces])
    out = _summed_products(terms, flat)
    return [o.view(p.shape) for o, p in zip(out.split(sizes), pieces, strict=True)]


def _of_weight_and_bias(terms: Sequence[Kronecker], pieces: Sequence[Tensor]) -> list[Tensor]:
    """Σₖ Lₖ [W b] Rₖ without joining weight and bias or taking them apart."""
    weight = pieces[0].flatten(1)
    m = weight.shape[1]
    totals: list[Tensor] = []
    for term in terms:
        # [W b] R = [W R₁₁ + b r₂₁, W r₁₂ + b r₂₂]
        right = term.right
        if len(pieces) == 1:
            found = [term.left @ (weight @ right)]
        else:
            edge = right[m, :m]  # r₂₁ = r₁₂ᵀ
            inner = torch.addr(weight @ right[:m, :m], pieces[1], edge)
            last = torch.addcmul(torch.mv(weight, edge), right[m, m], pieces[1])
            found = [term.left @ inner, torch.mv(term.left, last)]
        totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else found
    return [total.view(piece.shape) for total, piece in zip(totals, pieces, strict=True)]


def moved(operator: StructuredOperator, device: torch.device, dtype: torch.dtype) -> StructuredOperator:
    """A block on another device or in another type."""
    if operator.dtype == dtype and operator.device == device:
        return operator
    made: StructuredOperator = map_tensors(lambda t: t.to(device, dtype), operator)
    return made


@node()
@dataclass(frozen=True, eq=False)
class Precision:
    """Λ = p I + Σ of blocks; p I for the parameters that a task has reached, nothing for others."""

    blocks: tuple[Block, ...] = ()  # the curvature, layer by layer
    prior: float = 0.0  # p, the precision of the prior
    # shapes of the parameters that have had curvature, which p applies to
    reached: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def plus(self, blocks: Iterable[Block], merge: str, decay: float = 1.0) -> Precision:
        """Λ after one more task."""
        known = [block.times(decay) for block in self.blocks]
        reached = dict(self.reached)
        for block in blocks:
            shapes = _with_curvature(block)
            if not shapes:
                continue
            reached = _united(reached, shapes)
            place = next((i for i, old in enumerate(known) if old.accepts(block)), None)
            if place is None:
                known.append(block)
            else:
                known[place] = known[place].plus(block, merge)
        return Precision(tuple(known), self.prior, reached)

    @property
    def names(self) -> list[str]:
        """All parameters that it says something about."""
        return list(dict.fromkeys([*self.reached, *(n for b in self.blocks for n in b.layer.names)]))

    def product(self, delta: Mapping[str, Tensor]) -> Params:
        """Λ δ."""
        out: Params = {}
        for block in self.blocks:
            for name, product in block.product(delta).items():
                out[name] = out[name] + product if name in out else product
        for name in self.reached if self.prior else ():
            if name in out:
                out[name] = torch.add(out[name], delta[name], alpha=self.prior)
            elif name in delta:
                out[name] = self.prior * delta[name]
        return out

    def to(self, device: torch.device, dtype: torch.dtype) -> Precision:
        """Λ on another device or in another type."""
        return replace(
            self,
            blocks=tuple(
                replace(block, terms=tuple(moved(term, device, dtype) for term in block.terms))
                for block in self.blocks
            ),
        )

    def nbytes(self) -> int:
        """Memory of all blocks, in bytes."""
        terms = [term for block in self.blocks for term in block.terms]
        return sum(tensor.nbytes for tensor in tensors_in(terms))

    def diagonal(self) -> Tensor:
        """The diagonal entries of all blocks one after another, with the prior's p."""
        found = [torch.stack([t.diagonal() for t in b.terms]).sum(0) + self.prior for b in self.blocks]
        return torch.cat(found) if found else torch.zeros(0)

    def parts(self) -> tuple[Part, ...]:
        """Λ with its prior, as one structured block a layer."""
        several = next((block.layer.name for block in self.blocks if len(block.terms) > 1), None)
        if several is not None:
            raise ModelError(
                f"the precision of {several} is a list of Kronecker products",
                expected="one product, which has an inverse in closed form",
                remedy='use merge="svd"',
            )
        return tuple(Part(b.layer, b.terms[0].damped(self.prior), b.structure) for b in self.blocks)


def _with_curvature(block: Block) -> dict[str, tuple[int, ...]]:
    """The parameters of a task's block whose diagonal is not all zero."""
    diagonal = torch.stack([term.diagonal() for term in block.terms]).sum(0)
    shapes = block.layer.shapes_by_name
    if block._joined:
        pieces = block.layer.part(diagonal.view(block.layer.groups, *block.layer.matrix))
    else:
        pieces = list(diagonal.split([torch.Size(shape).numel() for shape in shapes.values()]))
    return {
        name: shape for (name, shape), p in zip(shapes.items(), pieces, strict=True) if bool((p != 0).any())
    }


def _united(first: Shapes, second: Shapes) -> dict[str, tuple[int, ...]]:
    """The parameters of both; those of both have one shape."""
    for name in first.keys() & second.keys():
        require_shape(tuple(second[name]), tuple(first[name]), name)
    return {**first, **second}


def _spread(operator: StructuredOperator, old: Layer, new: Layer) -> StructuredOperator:
    """A block of some parameters as one of more, with zeros for the others."""
    if old.shapes_by_name == new.shapes_by_name:
        return operator
    sizes = {name: torch.Size(shape).numel() for name, shape in new.shapes_by_name.items()}
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    index = torch.cat([starts[name] + torch.arange(sizes[name]) for name in old.shapes_by_name])
    index = index.to(operator.device)
    if isinstance(operator, Dense):
        matrix = operator.matrix.new_zeros(new.size, new.size)
        matrix[index[:, None], index] = operator.matrix
        return Dense(matrix, name=operator.name)
    if isinstance(operator, LowRankMatrix) and operator.rest == 0 and operator.scale is None:
        basis = operator.basis.new_zeros(new.size, operator.values.numel())
        basis[index] = operator.basis
        return LowRankMatrix(basis, operator.values, name=operator.name)
    raise ModelError(
        f"parameters have joined those of {new.name}, and {operator!r} cannot take them",
        expected='structure="full" or "low-rank", or blocks by layer',
        remedy="start again with another structure",
    )
