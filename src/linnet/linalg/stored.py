"""Serialization of structured matrices as named tensors and JSON metadata.

The description names kinds and says nothing about sizes, which the tensors have::

    {"kind": "block_diagonal", "blocks": [{"kind": "dense", "name": "G of fc1"}, ...]}

The tensors of a part are named by its place: ``matrix`` of the second block is ``1.matrix``. What cannot have
been written this way is refused with a :class:`~linnet.errors.FileFormatError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from linnet.errors import FileFormatError, InputError, LinnetError
from linnet.linalg.grouped import GroupedKronecker, GroupedKroneckerEigen
from linnet.linalg.half_diagonal import SIDES, HalfDiagonal
from linnet.linalg.kronecker import Kronecker, KroneckerEigen
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.operator import LinearOperator, Scaled, Sum
from linnet.linalg.space import ParameterSpace
from linnet.linalg.structured import BlockDiagonal, Dense, Diagonal, Permuted, StructuredOperator

Spec = dict[str, Any]

# Tensors of each kind: attribute and first arguments of its class; a letter for every size.
_PLAIN: dict[str, tuple[Callable[..., StructuredOperator], dict[str, str]]] = {
    "dense": (Dense, {"matrix": "nn"}),
    "diagonal": (Diagonal, {"values": "n"}),
    "kronecker": (Kronecker, {"left": "nn", "right": "mm"}),
    "kronecker_eigen": (KroneckerEigen, {"left_vectors": "nn", "right_vectors": "mm", "values": "nm"}),
    "grouped_kronecker": (GroupedKronecker, {"left": "rnn", "right": "rmm"}),
    "grouped_kronecker_eigen": (
        GroupedKroneckerEigen,
        {"left_vectors": "rnn", "right_vectors": "rmm", "values": "rnm"},
    ),
}
_KINDS = ("block_diagonal", "half_diagonal", "low_rank", "permuted", "scaled", "sum", *_PLAIN)


def to_tensors(operator: LinearOperator) -> tuple[Spec, dict[str, Tensor]]:
    """Take a structured matrix apart."""
    tensors: dict[str, Tensor] = {}
    return _take_apart(operator, "", tensors), tensors


def from_tensors(
    spec: Mapping[str, Any], tensors: Mapping[str, Tensor], space: ParameterSpace | None = None
) -> StructuredOperator:
    """Put together what ``to_tensors`` took apart."""
    operator = operator_from_tensors(spec, tensors, space)
    if not isinstance(operator, StructuredOperator):
        raise FileFormatError(
            f"the stored matrix is of kind {spec.get('kind')!r}",
            expected="a matrix with closed forms",
            remedy="read it with operator_from_tensors",
        )
    return operator


def operator_from_tensors(
    spec: Mapping[str, Any], tensors: Mapping[str, Tensor], space: ParameterSpace | None = None
) -> LinearOperator:
    """Like ``from_tensors``, also for sums and multiples, which have no closed forms."""
    unused = dict(tensors)
    try:
        operator = _put_together(spec, "", unused)
    except RecursionError:
        _refuse("the stored matrix", "has parts within parts without end")
    if unused:
        _refuse("the stored matrix", f"has unknown tensors {', '.join(sorted(map(repr, unused))[:5])}")
    if space is None:
        return operator
    if operator.space is not None and operator.space != space:
        raise InputError(
            f"space is {space!r}",
            expected=f"the stored {operator.space!r}, with its names and shapes",
            remedy="pass the space of the network that it was made on, or leave space= out",
        )
    if space.dim != operator.shape[1]:
        raise InputError(
            f"space has dimension {space.dim}",
            expected=f"{operator.shape[1]}, as {operator!r}",
            remedy="pass the space of the network that it was made on, or leave space= out",
        )
    _settle(operator, space)
    return operator


def _settle(operator: LinearOperator, space: ParameterSpace) -> None:
    """Let an operator, and what it is a sum or multiple of, know its parameter space."""
    operator.space = space
    parts = operator.terms if isinstance(operator, Sum) else ()
    for part in (operator.operator,) if isinstance(operator, Scaled) else parts:
        _settle(part, space)


def _take_apart(operator: LinearOperator, place: str, tensors: dict[str, Tensor]) -> Spec:
    """The description of an operator; its tensors are added to the others."""
    spec: Spec
    if isinstance(operator, BlockDiagonal):
        blocks = [_take_apart(block, f"{place}{i}.", tensors) for i, block in enumerate(operator.blocks)]
        spec = {"kind": "block_diagonal", "blocks": blocks}
    elif isinstance(operator, Sum):
        terms = [_take_apart(term, f"{place}{i}.", tensors) for i, term in enumerate(operator.terms)]
        return {"kind": "sum", "terms": terms}
    elif isinstance(operator, Scaled):
        inner = _take_apart(operator.operator, f"{place}0.", tensors)
        return {"kind": "scaled", "scalar": operator.scalar, "operator": inner}
    elif isinstance(operator, Permuted):
        tensors[f"{place}order"] = operator.order
        spec = {"kind": "permuted", "operator": _take_apart(operator.operator, f"{place}0.", tensors)}
    elif isinstance(operator, LowRankMatrix):
        spec = {"kind": "low_rank", "name": operator.name, "rest": operator.rest}
        tensors[f"{place}basis"], tensors[f"{place}values"] = operator.basis, operator.values
        if operator.scale is not None:
            tensors[f"{place}scale"] = operator.scale
    elif isinstance(operator, HalfDiagonal):
        spec = {"kind": "half_diagonal", "name": operator.name, "side": operator.side}
        tensors[f"{place}vectors"], tensors[f"{place}values"] = operator.vectors, operator.values
    else:
        spec = _plain_spec(operator, place, tensors)
    if operator.space is not None:
        spec["space"] = [[name, list(shape)] for name, shape in operator.space.shapes.items()]
    return spec


def _plain_spec(operator: LinearOperator, place: str, tensors: dict[str, Tensor]) -> Spec:
    """The description of a matrix that is nothing but some tensors and a name."""
    for kind, (cls, fields) in _PLAIN.items():
        if type(operator) is cls and isinstance(operator, StructuredOperator):
            tensors.update({f"{place}{field}": getattr(operator, field) for field in fields})
            return {"kind": kind, "name": operator.name}
    raise InputError(
        f"{operator!r} cannot be stored",
        expected=f"one of {', '.join(_KINDS)}",
        remedy="store its dense matrix: Dense(operator.dense())",
    )


def _put_together(spec: object, place: str, tensors: dict[str, Tensor]) -> LinearOperator:
    """The operator of a description; its tensors are taken from the others."""
    where = f"part {place[:-1]} of the stored matrix" if place else "the stored matrix"
    if not isinstance(spec, Mapping):
        _refuse(where, f"is described by {type(spec).__name__}", "a dictionary")
    kind = spec.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        _refuse(where, f"is of kind {kind!r}", f"one of {', '.join(_KINDS)}")
    space = _space(spec, where)
    try:
        if kind in ("sum", "scaled"):
            return _combined(kind, spec, place, where, tensors)
        if kind == "block_diagonal":
            parts = _parts(spec, "blocks", place, where, tensors)
            return BlockDiagonal([_structured(part, where) for part in parts], space)
        if kind == "permuted":
            (order,) = _taken({"order": "n"}, place, where, tensors, torch.int64)
            inner = _put_together(spec.get("operator"), f"{place}0.", tensors)
            return Permuted(_structured(inner, where), order, space)
        name = _entry(spec, "name", str, where)
        if kind == "low_rank":
            return _low_rank(spec, place, where, tensors, space)
        if kind == "half_diagonal":
            side = _entry(spec, "side", str, where)
            if side not in SIDES:
                _refuse(where, f"has the diagonal side {side!r:.80}", "'left' or 'right'")
            fields = {"vectors": "mm", "values": "nm" if side == "left" else "mn"}
            vectors, values = _taken(fields, place, where, tensors)
            return HalfDiagonal(vectors, values, side, space, name)
        cls, fields = _PLAIN[kind]
        return cls(*_taken(fields, place, where, tensors), space=space, name=name)
    except FileFormatError:
        raise
    except LinnetError as error:  # the tensors make no such matrix
        _refuse(where, f"is not of kind {kind!r}: {error.what}", error.expected)


def _combined(
    kind: str, spec: Mapping[str, Any], place: str, where: str, tensors: dict[str, Tensor]
) -> LinearOperator:
    """A sum or a multiple of operators."""
    if kind == "sum":
        return Sum(_parts(spec, "terms", place, where, tensors))
    scalar = _entry(spec, "scalar", float, where)
    return Scaled(_put_together(spec.get("operator"), f"{place}0.", tensors), scalar)


def _low_rank(
    spec: Mapping[str, Any], place: str, where: str, tensors: dict[str, Tensor], space: ParameterSpace | None
) -> LowRankMatrix:
    """Low rank plus diagonal, whose diagonal may be missing."""
    fields = {"basis": "nr", "values": "r"}
    if f"{place}scale" in tensors:
        fields["scale"] = "n"
    basis, values, *scale = _taken(fields, place, where, tensors)
    if scale and not bool((scale[0] > 0).all() & scale[0].isfinite().all()):
        _refuse(where, "has a scale that is not positive")
    rest, name = _entry(spec, "rest", float, where), _entry(spec, "name", str, where)
    return LowRankMatrix(basis, values, rest, scale[0] if scale else None, space, name)


def _parts(
    spec: Mapping[str, Any], key: str, place: str, where: str, tensors: dict[str, Tensor]
) -> list[LinearOperator]:
    """The operators of a list of descriptions."""
    parts = _entry(spec, key, list, where)
    return [_put_together(part, f"{place}{i}.", tensors) for i, part in enumerate(parts)]


def _structured(operator: LinearOperator, where: str) -> StructuredOperator:
    """A part that must have closed forms."""
    if not isinstance(operator, StructuredOperator):
        _refuse(where, f"has the part {operator!r}", "parts with closed forms")
    return operator


def _taken(
    fields: Mapping[str, str],
    place: str,
    where: str,
    tensors: dict[str, Tensor],
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The tensors of one part, removed from the others, if their shapes and types fit together."""
    found: list[Tensor] = []
    sizes: dict[str, int] = {}
    for field, letters in fields.items():
        tensor = tensors.pop(f"{place}{field}", None)
        if not isinstance(tensor, Tensor):
            _refuse(where, f"lacks the tensor {place + field!r}")
        own = dict(zip(letters, tensor.shape, strict=False))
        shape = tuple(sizes.get(letter, own.get(letter, 0)) for letter in letters)
        if tensor.shape != shape:
            _refuse(where, f"has {place + field!r} of shape {tuple(tensor.shape)}", f"({', '.join(letters)})")
        sizes.update(own)
        found.append(tensor)
        if tensor.is_floating_point() == (dtype is not None) or tensor.dtype != (dtype or found[0].dtype):
            expected = str(dtype or "one floating point type")
            _refuse(where, f"has {place + field!r} of type {tensor.dtype}", expected)
    return found


def _entry(spec: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """One entry of a description, of the right type."""
    value = spec.get(key)
    if not isinstance(value, kind):
        _refuse(where, f"has {key!r} = {value!r:.80}", f"{key!r} of type {kind.__name__}")
    return value


def _space(spec: Mapping[str, Any], where: str) -> ParameterSpace | None:
    """The stored parameter space, if there is one."""
    stored = spec.get("space")
    if stored is None:
        return None
    shapes: dict[str, list[int]] = {}
    for pair in stored if isinstance(stored, list) else [None]:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not _is_shape(*pair) or pair[0] in shapes:
            _refuse(where, f"has the parameter {pair!r:.80}", "['name', [sizes]], each name once")
        shapes[pair[0]] = pair[1]
    if not shapes:
        _refuse(where, "has a parameter space without parameters")
    return ParameterSpace(shapes)


def _is_shape(name: object, shape: object) -> bool:
    """Whether a stored name and shape are what they should be."""
    sizes = shape if isinstance(shape, list | tuple) else [None]
    return isinstance(name, str) and all(type(size) is int and 0 <= size < 2**62 for size in sizes)


def _refuse(where: str, fault: str, expected: str | None = None) -> NoReturn:
    """Say what is wrong with a description or its tensors."""
    raise FileFormatError(
        f"{where} {fault}",
        expected=expected or "a description and tensors as to_tensors made them",
        remedy="store it again",
    )
