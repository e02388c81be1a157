"""Curvature blocks of a layer that has grown, in its new coordinates.

What was measured before a head grew says nothing about its new rows: their curvature is zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from linnet.curvatures.layers import Layer
from linnet.errors import ModelError
from linnet.linalg.grouped import GroupedKronecker, GroupedKroneckerEigen
from linnet.linalg.kronecker import HalfDiagonal, Kronecker, KroneckerEigen
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.structured import Dense, Diagonal, StructuredOperator

Shapes = Mapping[str, tuple[int, ...]]


def united(first: Shapes, second: Shapes) -> dict[str, tuple[int, ...]]:
    """The parameters of both, each as large as the larger."""
    shapes = dict(first)
    for name, shape in second.items():
        old = shapes.get(name, shape)
        shapes[name] = tuple(max(pair) for pair in zip(old, shape, strict=True))
    return shapes


def places(small: Shapes, large: Shapes) -> Tensor:
    """Where the entries of small parameters are among those of large ones, in their flat vector."""
    starts, total = {}, 0
    for name, shape in large.items():
        starts[name] = total
        total += torch.Size(shape).numel()
    found = [starts[name] + _corner(shape, large[name]) for name, shape in small.items()]
    return torch.cat(found)


def _corner(small: tuple[int, ...], large: tuple[int, ...]) -> Tensor:
    """Flat indices of the leading corner of a tensor."""
    index = torch.arange(torch.Size(large).numel()).view(large)
    return index[tuple(slice(0, size) for size in small)].flatten()


def grown(operator: StructuredOperator, old: Layer, new: Layer) -> StructuredOperator:
    """A block in the coordinates of a larger layer."""
    if dict(old.shapes_by_name) == dict(new.shapes_by_name):
        return operator
    if isinstance(
        operator, Kronecker | KroneckerEigen | GroupedKronecker | GroupedKroneckerEigen | HalfDiagonal
    ):
        left, right, sizes = _sides(old, new)
        return _grown_product(operator, left, right, sizes)
    index = places(old.shapes_by_name, new.shapes_by_name).to(operator.device)
    if isinstance(operator, Diagonal):
        return Diagonal(_spread(operator.values, [index], [new.size]), name=operator.name)
    if isinstance(operator, Dense):
        matrix = _spread(operator.matrix, [index, index], [new.size, new.size])
        return Dense(matrix, name=operator.name)
    if isinstance(operator, LowRankMatrix) and operator.rest == 0 and operator.scale is None:
        basis = operator.basis.new_zeros(new.size, operator.values.numel())
        basis[index] = operator.basis
        return LowRankMatrix(basis, operator.values, name=operator.name)
    raise ModelError(
        f"layer {new.name} has grown, and {operator!r} cannot grow with it",
        expected="structures that grow: diagonal, block, kfac, ekfac or low-rank",
        remedy="start again with another structure, or keep the size of the layer",
    )


def _sides(old: Layer, new: Layer) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Where rows and columns of [W b] go, and how many there are of each."""
    if old.groups != new.groups or (old.groups > 1 and old.matrix != new.matrix):
        raise ModelError(
            f"layer {new.name} had {old.groups} groups of {old.matrix} weights and has {new.groups} of "
            f"{new.matrix}",
            expected="grouped convolutions of one size for all tasks",
            remedy="give the larger layer a new name",
        )
    rows, columns = new.matrix if new.factored else _matrix(new)
    old_rows, old_columns = old.matrix if old.factored else _matrix(old)
    left = torch.arange(old_rows)
    right = _corner(old.shapes[0][1:], new.shapes[0][1:])
    if old.biased and old.transposed:
        left = torch.cat([left[:-1], torch.tensor([rows - 1])])
    elif old.biased:
        right = torch.cat([right, torch.tensor([columns - 1])])
    assert len(right) == old_columns
    return left, right, (rows, columns)


def _matrix(layer: Layer) -> tuple[int, int]:
    """(rows, columns) of a weight without outer products."""
    rows = layer.shapes[0][0]
    return rows, layer.size // rows


def _grown_product(
    operator: StructuredOperator, left: Tensor, right: Tensor, sizes: tuple[int, int]
) -> StructuredOperator:
    """A Kronecker product, perhaps eigenvalue-corrected, with more rows and columns."""
    rows, columns = sizes
    left, right = left.to(operator.device), right.to(operator.device)
    if isinstance(operator, Kronecker):
        return Kronecker(
            _spread(operator.left, [left, left], [rows, rows]),
            _spread(operator.right, [right, right], [columns, columns]),
            name=operator.name,
        )
    if isinstance(operator, KroneckerEigen):
        values = operator.values.new_zeros(rows, columns)
        values[: len(left), : len(right)] = operator.values
        return KroneckerEigen(
            _more_vectors(operator.left_vectors, left, rows),
            _more_vectors(operator.right_vectors, right, columns),
            values,
            name=operator.name,
        )
    if isinstance(operator, HalfDiagonal):
        values = operator.values.new_zeros(rows, columns)
        if operator.side == "left":
            values[left, : len(right)] = operator.values
            vectors = _more_vectors(operator.vectors, right, columns)
        else:
            values[: len(left), right] = operator.values
            vectors = _more_vectors(operator.vectors, left, rows)
        return HalfDiagonal(vectors, values, operator.side, name=operator.name)
    return operator  # groups keep their size


def _more_vectors(vectors: Tensor, index: Tensor, size: int) -> Tensor:
    """Orthonormal columns in a larger space: the old ones first, then unit vectors of what is new."""
    more = vectors.new_zeros(size, size)
    more[index, : len(index)] = vectors
    fresh = torch.ones(size, dtype=torch.bool, device=vectors.device)
    fresh[index] = False
    more[fresh.nonzero()[:, 0], torch.arange(len(index), size, device=vectors.device)] = 1.0
    return more


def _spread(values: Tensor, index: list[Tensor], sizes: list[int]) -> Tensor:
    """Entries of a vector or matrix put into zeros."""
    out = values.new_zeros(sizes)
    if len(index) == 1:
        out[index[0]] = values
    else:
        out[index[0][:, None], index[1]] = values
    return out
