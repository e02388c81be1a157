"""The penalty Σ w/2 (θ − μ)ᵀ Λ (θ − μ), its value and gradient from one product with each Λ.

Λ is the summed curvature of the tasks so far, in blocks of layers. Dense matrices and diagonals add plainly.
A sum of Kronecker products is no Kronecker product (Botev 2020, section 5.3.1): it is kept as a list, or
merged into one product. Adding the factors one by one instead would make T equal tasks count T² times and is
not offered.

A penalty acts on the tensors that the optimizer moves. Wrappers (``torch.compile``, data parallelism) are
looked through, so that names are those of the network itself, and a ``Linearized`` counts with θ = θ₀ + δ,
whose δ is what is trained.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from linnet.curvatures.layers import Layer, Part
from linnet.errors import InputError, ModelError
from linnet.linalg.kronecker import Kronecker, KroneckerEigen, merge
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.operator import Params
from linnet.linalg.structured import Dense, Diagonal, StructuredOperator
from linnet.number_types import wide_type
from linnet.tangent.linearized import Linearized
from linnet.tangent.selection import require_module
from linnet.tree import map_tensors, node, tensors_in


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of ``torch.compile`` and data parallelism."""
    require_module(model)
    while True:
        inner = model.module if isinstance(model, DataParallel | DistributedDataParallel) else None
        inner = inner if inner is not None else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def own_name(name: str) -> str:
    """The name of a parameter as it is without parts of the network that are compiled."""
    return name.replace("_orig_mod.", "")


@dataclass(frozen=True, eq=False)
class Live:
    """The parameters as they are now."""

    tensors: Mapping[str, Tensor]  # the parameters themselves, by name; what an optimizer moves
    # what is added to get θ, by name: θ₀ of a `Linearized`; empty otherwise
    origins: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Live:
        """The parameters of a network."""
        network = unwrapped(model)
        if isinstance(network, Linearized):
            return cls(network.delta, network.theta0)
        return cls({own_name(n): p for n, p in network.named_parameters() if p.is_floating_point()})

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Live:
        """The same with other tensors in place of some."""
        return Live({**self.tensors, **tensors}, self.origins)

    def theta(self, name: str) -> Tensor:
        """θ of one parameter, with its history."""
        tensor = self.tensors[name]
        return tensor + self.origins[name] if name in self.origins else tensor

    def values(self) -> Params:
        """Copies of all θ, without history, at least float32."""
        return {
            name: self.theta(name).detach().to(wide_type(t.dtype), copy=True)
            for name, t in self.tensors.items()
        }

    def difference(self, anchor: Mapping[str, Tensor]) -> Params:
        """θ − μ for the parameters that are there and have an anchor."""
        found = {}
        for name, mu in anchor.items():
            if name in self.tensors:
                require_shape(tuple(self.tensors[name].shape), tuple(mu.shape), name)
                found[name] = self.theta(name).to(mu.dtype) - mu
        return found


def require_shape(shape: tuple[int, ...], before: tuple[int, ...], name: str) -> None:
    """Raise unless a parameter has the shape that it was consolidated with."""
    if shape != before:
        raise ModelError(
            f"parameter {name!r} has shape {shape}, and had {before} when it was consolidated",
            expected="parameters that keep their shape",
            remedy="give new classes a head of their own, and what replaces a parameter a new name",
        )


MERGES = ("svd", "kl", "count", "exact")


def scaled(operator: StructuredOperator, factor: float) -> StructuredOperator:
    """A multiple of a block; of a Kronecker product the left factor alone, so that counts stay counts."""
    if factor == 1.0:
        return operator
    if isinstance(operator, Kronecker):
        return Kronecker(factor * operator.left, operator.right, name=operator.name)
    return operator.scaled(factor)


def summed(
    first: StructuredOperator,
    second: StructuredOperator,
    method: str,
    counts: tuple[float, float],
    transposed: bool = False,
) -> StructuredOperator | None:
    """One block for the sum of two."""
    if isinstance(first, Dense) and isinstance(second, Dense):
        return Dense(first.matrix + second.matrix, name=second.name)
    if isinstance(first, Diagonal) and isinstance(second, Diagonal):
        return Diagonal(first.values + second.values, name=second.name)
    if method == "exact" or type(first) is not type(second):
        return None
    if isinstance(first, Kronecker) and isinstance(second, Kronecker):
        if first.left.shape != second.left.shape:
            return None
        if first.left.ndim == 2:
            return _product(first, second, method, counts, transposed)
        groups = [
            _product(Kronecker(*a), Kronecker(*b), method, counts, transposed)
            for a, b in zip(_groups(first), _groups(second), strict=True)
        ]
        left, right = (torch.stack(side) for side in zip(*((g.left, g.right) for g in groups), strict=True))
        return Kronecker(left, right, name=second.name)
    if isinstance(first, KroneckerEigen) and isinstance(second, KroneckerEigen):
        return _corrected(first, second)
    if isinstance(first, LowRankMatrix) and isinstance(second, LowRankMatrix):
        return _low_rank(first, second)
    return None


def _groups(operator: Kronecker) -> list[tuple[Tensor, Tensor]]:
    """Left and right factor of every group."""
    return list(zip(operator.left, operator.right, strict=True))


def _product(
    first: Kronecker, second: Kronecker, method: str, counts: tuple[float, float], transposed: bool
) -> Kronecker:
    """One Kronecker product for the sum of two."""
    nonzero = [term for term in (first, second) if float(term.trace()) > 0]
    if len(nonzero) < 2:
        return nonzero[0] if nonzero else second
    if method == "kl":
        return _nearest_gaussian(nonzero)
    if method == "count" and transposed:
        swapped = [Kronecker(term.right, term.left, name=term.name) for term in nonzero]
        one = merge(swapped, "count", counts)
        return Kronecker(one.right, one.left, name=one.name)
    return merge(nonzero, method, counts)


def _nearest_gaussian(terms: Sequence[Kronecker]) -> Kronecker:
    """The KL merge, inside the span of the factors: dead inputs and outputs have no curvature to compare."""
    lefts = [term.left.double() for term in terms]
    rights = [term.right.double() for term in terms]
    resolution = torch.finfo(terms[0].dtype).eps
    left_basis, right_basis = _span(lefts, resolution), _span(rights, resolution)
    inside = [
        Kronecker(_between(left_basis, left), _between(right_basis, right), name=term.name)
        for left, right, term in zip(lefts, rights, terms, strict=True)
    ]
    one = merge(inside, "kl")
    left, right = _between(left_basis.T, one.left), _between(right_basis.T, one.right)
    kind = terms[0].dtype
    return Kronecker(left.to(kind), right.to(kind), name=terms[-1].name)


def _span(factors: Sequence[Tensor], resolution: float) -> Tensor:
    """Orthonormal columns that span all factors' images."""
    # Factors weigh alike, whatever their scales: Σ F / tr F
    total = torch.stack([factor / factor.trace() for factor in factors]).sum(0)
    values, vectors = torch.linalg.eigh(total)
    kept: Tensor = vectors[:, values > len(total) * resolution * values[-1]]
    return kept


def _between(basis: Tensor, matrix: Tensor) -> Tensor:
    """Uᵀ M U, exactly symmetric."""
    product = basis.T @ matrix @ basis
    return (product + product.T) / 2


def _corrected(first: KroneckerEigen, second: KroneckerEigen) -> KroneckerEigen | None:
    """Eigenvalue-corrected products: a common eigenbasis, and the eigenvalues nearest in Frobenius norm."""
    # The basis is that of the sum's partial traces, Σₖ Q_Lk diag(λₖ 1) Q_Lkᵀ on the left; the eigenvalues are
    # the diagonal of the sum in this basis, Σₖ (Q_Lᵀ Q_Lk)² λₖ ((Q_Rᵀ Q_Rk)²)ᵀ. A side that is its own basis
    # in both stays so.
    sides = (first.left_vectors, second.left_vectors), (first.right_vectors, second.right_vectors)
    if any((one is None) != (other is None) for one, other in sides):
        return None
    turned = [[q for q in side if q is not None] for side in sides]
    if all(not side or torch.equal(*side) for side in turned):
        return first.with_values(first.values + second.values)
    values = [first.values.double(), second.values.double()]
    sums = [
        [_spectral(q.double(), v.sum(axis)) for q, v in zip(side, values, strict=False)]
        for side, axis in zip(turned, (-1, -2), strict=True)
    ]
    left, right = (torch.linalg.eigh(sum(side))[1] if side else None for side in sums)
    if left is not None:
        pairs = zip(turned[0], values, strict=True)
        values = [(left.mT @ q.double()).square() @ v for q, v in pairs]
    if right is not None:
        pairs = zip(turned[1], values, strict=True)
        values = [v @ (right.mT @ q.double()).square().mT for q, v in pairs]
    left, right = (None if q is None else q.to(first.dtype) for q in (left, right))
    return KroneckerEigen(left, right, torch.stack(values).sum(0).to(first.dtype), name=second.name)


def _spectral(vectors: Tensor, values: Tensor) -> Tensor:
    """Q diag(v) Qᵀ, for one or many."""
    return (vectors * values[..., None, :]) @ vectors.mT


def _low_rank(first: LowRankMatrix, second: LowRankMatrix) -> LowRankMatrix | None:
    """The leading eigenpairs of the sum, as many as the larger of the two has."""
    if first.rest or second.rest or first.scale is not None or second.scale is not None:
        return None
    rank = max(first.values.numel(), second.values.numel())
    factor = torch.cat([m.basis.double() * m.values.double().sqrt() for m in (first, second)], 1)
    u, s, _ = torch.linalg.svd(factor, full_matrices=False)
    return LowRankMatrix(u[:, :rank].to(first.dtype), s[:rank].square().to(first.dtype), name=second.name)


def check_merge(merge_: str) -> None:
    """Raise unless a way of merging is one of those known."""
    if merge_ not in MERGES:
        added = merge_ in ("add", "sum", "additive")
        raise InputError(
            f"merge={merge_!r}" + (": adding factors counts T equal tasks T² times" if added else ""),
            expected=", ".join(f'"{one}"' for one in MERGES),
            remedy='use merge="svd" at constant memory, or merge="exact" for a list',
        )


Shapes = Mapping[str, tuple[int, ...]]

WHOLE = ("full", "low-rank")  # one block for all parameters, whichever they are


@node()
@dataclass(frozen=True, eq=False)
class PenaltyBlock:
    """A layer's part of Λ."""

    layer: Layer  # the layer
    structure: str  # what its blocks are, in the engine's words
    # what they add up to; one, unless a list of Kronecker products is kept
    terms: tuple[StructuredOperator, ...]
    examples: float  # number of inputs behind the means of Kronecker products, examples where there are none

    @classmethod
    def of(cls, part: Part, strength: float, examples: float, like: torch.dtype) -> PenaltyBlock:
        """The block of one task."""
        operator = moved(part.operator, part.operator.device, like)
        # positions without a label are in no mean
        count = examples if part.terms is None else part.terms
        return cls(part.layer, part.structure, (scaled(operator, strength),), count)

    @property
    def _joined(self) -> bool:
        """Whether the order is that of the matrix [W b]."""
        return Part(self.layer, self.terms[0], self.structure).joined

    def accepts(self, other: PenaltyBlock) -> bool:
        """Whether another task's block describes the same parameters, or some of them, in the same form."""
        if self.structure != other.structure or self._joined != other._joined:
            return False
        if self.structure in WHOLE:
            return True
        fewer, more = sorted((self.layer.names, other.layer.names), key=len)
        # of a product the weight must be in both: a bias alone has no factor
        nested = set(fewer) <= set(more) and (fewer[0] == more[0] or not self._joined)
        return nested and self.layer.transposed == other.layer.transposed

    def plus(self, other: PenaltyBlock, merge: str) -> PenaltyBlock:
        """The sum with another task's block."""
        shapes = _united(self.layer.shapes_by_name, other.layer.shapes_by_name)
        larger = max(other.layer, self.layer, key=lambda layer: len(layer.names))
        layer = replace(larger, shapes_by_name=shapes)
        terms = [_spread(term, self.layer, layer) for term in self.terms]
        fresh = [_spread(term, other.layer, layer) for term in other.terms]
        examples = self.examples + other.examples
        if len(terms) == len(fresh) == 1:
            counts = (self.examples, other.examples)
            one = summed(terms[0], fresh[0], merge, counts, layer.transposed)
            terms, fresh = ([one], []) if one is not None else (terms, fresh)
        return PenaltyBlock(layer, self.structure, (*terms, *fresh), examples)

    def times(self, factor: float) -> PenaltyBlock:
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
        v = self.layer.join(pieces)  # (R, rows, columns)
        return self.layer.part(_summed_products(self.terms, v.flatten()).view(v.shape))


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


def moved(operator: StructuredOperator, device: torch.device, dtype: torch.dtype) -> StructuredOperator:
    """A block on another device or in another type."""
    if operator.dtype == dtype and operator.device == device:
        return operator
    made: StructuredOperator = map_tensors(lambda t: t.to(device, dtype), operator)
    return made


@node()
@dataclass(frozen=True, eq=False)
class PenaltyPrecision:
    """Λ = p I + Σ of blocks; p I for the parameters that a task has reached, nothing for others."""

    blocks: tuple[PenaltyBlock, ...] = ()  # the curvature, layer by layer
    prior: float = 0.0  # p, the precision of the prior
    # shapes of the parameters that have had curvature, which p applies to
    reached: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def plus(self, blocks: Iterable[PenaltyBlock], merge: str, decay: float = 1.0) -> PenaltyPrecision:
        """Λ after one more task."""
        known = [block.times(decay) for block in self.blocks]
        reached = dict(self.reached)
        for block in blocks:
            shapes = _with_curvature(block)
            if not shapes:
                continue
            reached = _united(reached, shapes)
            same = [i for i, old in enumerate(known) if old.accepts(block)]
            for i in same:
                block = known[i].plus(block, merge)
            for i in reversed(same):
                del known[i]
            known.insert(same[0] if same else len(known), block)
        return PenaltyPrecision(tuple(known), self.prior, reached)

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

    def to(self, device: torch.device, dtype: torch.dtype) -> PenaltyPrecision:
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
        """The diagonal entries of all blocks one after another, each with the prior's p."""
        found = [torch.stack([t.diagonal() for t in b.terms]).sum(0) + self.prior for b in self.blocks]
        return torch.cat(found) if found else torch.zeros(0)

    def parts(self) -> tuple[Part, ...]:
        """Λ with its prior, as one structured block a layer."""
        counts = Counter(name for block in self.blocks for name in block.layer.names)
        twice = next((name for name, count in counts.items() if count > 1), None)
        if twice is not None:
            raise ModelError(
                f"{twice} stands in blocks of two forms: the tasks trained other parts of its layer",
                expected="the same parameters in all tasks, for blocks with inverses in closed form",
                remedy='use structure="full" or "diagonal"',
            )
        several = next((block.layer.name for block in self.blocks if len(block.terms) > 1), None)
        if several is not None:
            raise ModelError(
                f"the precision of {several} is a list of Kronecker products",
                expected="one product, which has an inverse in closed form",
                remedy='use merge="svd"',
            )
        return tuple(Part(b.layer, b.terms[0].damped(self.prior), b.structure) for b in self.blocks)


def _with_curvature(block: PenaltyBlock) -> dict[str, tuple[int, ...]]:
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


def _with_bias(operator: Kronecker | KroneckerEigen, transposed: bool) -> Kronecker | KroneckerEigen:
    """The block of a weight as that of weight and bias, with zeros for the bias."""
    if isinstance(operator, Kronecker):
        left, right = operator.left, operator.right
        sides = (_wider(left, 0.0), right) if transposed else (left, _wider(right, 0.0))
        return Kronecker(*sides, name=operator.name)
    own, other = operator.left_vectors, operator.right_vectors
    if transposed:
        own = own if own is None else _wider(own, 1.0)
    else:
        other = other if other is None else _wider(other, 1.0)
    values = F.pad(operator.values, (0, 0, 0, 1) if transposed else (0, 1))
    return KroneckerEigen(own, other, values, name=operator.name)


def _wider(matrix: Tensor, corner: float) -> Tensor:
    """A matrix, or each of a batch, with one more row and column of zeros and their common entry."""
    made = F.pad(matrix, (0, 1, 0, 1))
    made[..., -1, -1] = corner
    return made


def _spread(operator: StructuredOperator, old: Layer, new: Layer) -> StructuredOperator:
    """A block of some parameters as one of more, with zeros for the others."""
    if old.names == new.names:
        return operator
    sizes = {name: torch.Size(shape).numel() for name, shape in new.shapes_by_name.items()}
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    index = torch.cat([starts[name] + torch.arange(sizes[name]) for name in old.shapes_by_name])
    index = index.to(operator.device)
    if isinstance(operator, Dense):
        matrix = operator.matrix.new_zeros(new.size, new.size)
        matrix[index[:, None], index] = operator.matrix
        return Dense(matrix, name=operator.name)
    if isinstance(operator, Diagonal):
        values = operator.values.new_zeros(new.size)
        values[index] = operator.values
        return Diagonal(values, name=operator.name)
    if isinstance(operator, Kronecker | KroneckerEigen):
        return _with_bias(operator, new.transposed)
    if isinstance(operator, LowRankMatrix) and operator.rest == 0 and operator.scale is None:
        basis = operator.basis.new_zeros(new.size, operator.values.numel())
        basis[index] = operator.basis
        return LowRankMatrix(basis, operator.values, name=operator.name)
    raise ModelError(
        f"parameters have joined those of {new.name}, and {operator!r} cannot take them",
        expected='structure="full" or "low-rank", or blocks by layer',
        remedy="start again with another structure",
    )


Observe = Callable[[Tensor, Params], None]  # a factor, and gradients by parameter


@node()
@dataclass(frozen=True, eq=False)
class Quadratic:
    """w/2 (θ − μ)ᵀ Λ (θ − μ)."""

    anchor: Params  # μ by parameter name
    precision: PenaltyPrecision  # Λ
    weight: float = 1.0  # w

    def to(self, device: torch.device, dtype: torch.dtype) -> Quadratic:
        """The same on another device or in another type."""
        anchor = {name: mu.to(device, dtype) for name, mu in self.anchor.items()}
        return replace(self, anchor=anchor, precision=self.precision.to(device, dtype))

    def after(self, blocks: Sequence[PenaltyBlock], live: Live, merge: str, decay: float = 1.0) -> Quadratic:
        """The same after a task: its blocks added, μ where the parameters are, or were if they are absent."""
        some = blocks[0].terms[0]
        before = self.to(some.device, some.dtype)
        precision, values = before.precision.plus(blocks, merge, decay), live.values()
        kept = {name: mu for name, mu in before.anchor.items() if name not in values}
        anchor = {**kept, **{name: values[name] for name in precision.names if name in values}}
        return replace(before, anchor=anchor, precision=precision)

    def without(self, names: Collection[str]) -> Quadratic:
        """What is left for other parameters of a term that has a prior alone."""
        reached = {name: shape for name, shape in self.precision.reached.items() if name not in names}
        anchor = {name: self.anchor[name] for name in reached}
        return replace(self, anchor=anchor, precision=replace(self.precision, reached=reached))


def value_and_gradient(quadratics: Sequence[Quadratic], live: Live) -> tuple[Tensor, Params]:
    """The penalty and its gradient in θ, in differentiable operations."""
    total = torch.zeros(())
    gradients: Params = {}
    for term in quadratics:
        delta = live.difference(term.anchor)
        for name, product in term.precision.product(delta).items():
            # ∇ = w Λ δ and the value is w/2 δᵀ Λ δ
            product = product if term.weight == 1 else term.weight * product
            half = 0.5 * torch.dot(delta[name].flatten(), product.flatten())
            total = half if total.device != half.device else total.to(half.dtype) + half
            tensor = live.tensors[name]
            # strides of the parameter: optimizers treat tensors alike all at once
            product = product.to(tensor.dtype).contiguous()
            gradients[name] = gradients[name] + product if name in gradients else product
    return total, gradients


class _SummedPenalty(torch.autograd.Function):
    """The penalty, whose products Λ δ are formed once for value and gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        quadratics: Sequence[Quadratic],
        live: Live,
        names: Sequence[str],
        observe: Observe | None,
        *tensors: Tensor,
    ) -> Tensor:
        """The value; the gradient is kept."""
        with torch.autocast(tensors[0].device.type, enabled=False):
            value, gradients = value_and_gradient(
                quadratics, live.with_tensors(dict(zip(names, tensors, strict=True)))
            )
        ctx.quadratics, ctx.live, ctx.names, ctx.observe = quadratics, live, names, observe
        ctx.save_for_backward(*tensors)
        ctx.gradients = [gradients.get(name) for name in names]
        return value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """The kept gradient, or one with a history if there will be a second derivative."""
        (g,) = grad_outputs
        if ctx.observe is not None:
            known = zip(ctx.names, ctx.gradients, strict=True)
            ctx.observe(g.detach(), {name: d for name, d in known if d is not None})
        gradients = ctx.gradients
        if torch.is_grad_enabled():
            live = ctx.live.with_tensors(dict(zip(ctx.names, ctx.saved_tensors, strict=True)))
            found = value_and_gradient(ctx.quadratics, live)[1]
            gradients = [found.get(name) for name in ctx.names]
        products = [None if d is None else (g * d).to(d.dtype) for d in gradients]
        return None, None, None, None, *products


def penalty(quadratics: Sequence[Quadratic], live: Live, observe: Observe | None = None) -> Tensor:
    """The penalty as a scalar that can be added to a loss."""
    wanted = set().union(*(term.precision.names for term in quadratics)) if quadratics else set()
    names = [n for n, t in live.tensors.items() if n in wanted and t.requires_grad]
    if names:
        tensors = [live.tensors[name] for name in names]
        apply: Any = _SummedPenalty.apply
        value: Tensor = apply(quadratics, live, names, observe, *tensors)
        return value
    if wanted & set(live.tensors):
        with torch.no_grad():
            return value_and_gradient(quadratics, live)[0]
    some = next(iter(live.tensors.values()))
    return torch.zeros((), dtype=some.dtype, device=some.device)
