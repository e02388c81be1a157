"""Structured matrices that are stored and read again: the same bits, or an error that says why not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.errors import FileFormatError, InputError
from linnet.files import load_tensors, save_tensors
from linnet.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    FunctionOperator,
    GroupedKronecker,
    GroupedKroneckerEigen,
    HalfDiagonal,
    Kronecker,
    KroneckerEigen,
    LinearOperator,
    LowRankMatrix,
    ParameterSpace,
    Permuted,
    StructuredOperator,
    Sum,
)
from linnet.linalg.operator import Scaled
from linnet.linalg.stored import from_tensors, operator_from_tensors, to_tensors

SPACE = ParameterSpace({"weight": (2, 2), "bias": (2,)})


def positive(*shape: int) -> Tensor:
    """Positive definite matrices (..., n, n)."""
    factor = torch.randn(*shape, 2 * shape[-1], dtype=torch.float64)
    return factor @ factor.mT / shape[-1]


def leaves() -> list[Callable[[], StructuredOperator]]:
    """How to make a 6 x 6 matrix of each kind that has no parts."""
    factor = torch.randn(6, 2, dtype=torch.float64)
    product, grouped = Kronecker(positive(2), positive(3)), GroupedKronecker(positive(2, 1), positive(2, 3))
    return [
        lambda: Dense(positive(6), SPACE, "G of fc1"),
        lambda: Diagonal(torch.rand(6, dtype=torch.float32), name="curvature of the bias"),
        lambda: Kronecker(positive(2), positive(3), SPACE, "layer 0"),
        lambda: product,
        lambda: KroneckerEigen.of(product).damped(0.1),
        lambda: HalfDiagonal.of(torch.rand(3).double(), positive(2), name="vocabulary"),
        lambda: HalfDiagonal.of(positive(2), torch.rand(3).double()),
        lambda: GroupedKronecker(positive(3, 2), positive(3, 1), name="depthwise"),
        lambda: GroupedKroneckerEigen.of(grouped).damped(1e-3),
        lambda: LowRankMatrix.from_factor(factor, diagonal=0.1 + 0.2, name="sketch"),
        lambda: LowRankMatrix.from_factor(factor, diagonal=torch.rand(6).double() + 0.5, space=SPACE),
        lambda: LowRankMatrix.from_factor(factor),
    ]


def assert_identical(actual: LinearOperator, expected: LinearOperator) -> None:
    """Same kind, names, space and description, and the same bits in every tensor and product."""
    assert type(actual) is type(expected)
    assert (actual.shape, actual.dtype, actual.space) == (expected.shape, expected.dtype, expected.space)
    (spec, tensors), (spec_wanted, wanted) = to_tensors(actual), to_tensors(expected)
    assert spec == spec_wanted
    assert list(tensors) == list(wanted)
    for key, tensor in wanted.items():
        assert tensors[key].dtype == tensor.dtype
        assert torch.equal(tensors[key], tensor), key
    assert torch.equal(actual.dense(), expected.dense())


def again(operator: LinearOperator) -> LinearOperator:
    """The operator stored and read, its description through JSON."""
    spec, tensors = to_tensors(operator)
    return operator_from_tensors(json.loads(json.dumps(spec)), tensors)


@pytest.mark.parametrize("index", range(10))
def test_every_kind_comes_back_bit_by_bit(index: int) -> None:
    operator = leaves()[index]()
    restored = from_tensors(*to_tensors(operator))
    assert_identical(restored, operator)
    assert restored.name == operator.name
    torch.testing.assert_close(restored.damped(0.5).dense(), operator.damped(0.5).dense())


@st.composite
def structures(draw: st.DrawFn, depth: int = 2) -> StructuredOperator:
    """Matrices of all kinds, some within others."""
    kind = draw(st.sampled_from(["leaf", "blocks", "permuted"] if depth else ["leaf"]))
    if kind == "leaf":
        made = draw(st.sampled_from(leaves()))()
        return made if made.dtype == torch.float64 else Diagonal(torch.rand(6).double())
    if kind == "blocks":
        return BlockDiagonal(draw(st.lists(structures(depth - 1), min_size=1, max_size=3)))
    inner = draw(structures(depth - 1))
    order = torch.tensor(draw(st.permutations(range(inner.shape[0]))))
    return Permuted(inner, order, SPACE if inner.shape[0] == 6 else None)


@given(structures(), st.floats(-3, 3), st.booleans())
def test_matrices_within_matrices_come_back(
    operator: StructuredOperator, scalar: float, summed: bool
) -> None:
    assert_identical(again(operator), operator)
    multiple = Scaled(operator, scalar)
    assert_identical(again(multiple), multiple)
    total = Sum([operator, multiple, operator])
    assert_identical(again(total), total)


def test_through_a_file(tmp_path: Path) -> None:
    parts = [leaves()[0](), Permuted(leaves()[7](), torch.tensor([5, 0, 4, 1, 3, 2])), leaves()[6]()]
    operator = BlockDiagonal(parts, ParameterSpace({"a": (6,), "b": (2, 3), "c": (6,)}))
    spec, tensors = to_tensors(operator)
    loaded, metadata = load_tensors(save_tensors(tmp_path, "G", tensors, {"curvature": spec}), "G")
    assert_identical(from_tensors(metadata["curvature"], loaded), operator)


def test_tensors_are_not_copied() -> None:
    matrix = positive(3)
    assert to_tensors(Dense(matrix))[1]["matrix"] is matrix


def test_a_space_can_be_given_and_must_fit() -> None:
    plain = to_tensors(Diagonal(torch.ones(6)))
    assert from_tensors(*plain, space=SPACE).damped(1.0).space == SPACE
    assert from_tensors(*plain).space is None
    named = to_tensors(Diagonal(torch.ones(6), SPACE))
    assert from_tensors(*named, space=SPACE).space == SPACE
    with pytest.raises(InputError, match=r"the stored ParameterSpace\(2 parameters"):
        from_tensors(*named, space=ParameterSpace({"weight": (6,)}))
    with pytest.raises(InputError, match=r"space has dimension 5.*6"):
        from_tensors(*plain, space=ParameterSpace({"weight": (5,)}))
    one = Diagonal(torch.ones(6))
    total = operator_from_tensors(*to_tensors(one - 3.0 * one), space=SPACE)
    product = total.T @ SPACE.to_params(torch.ones(6))
    assert isinstance(product, dict)
    assert torch.equal(product["bias"], -2 * torch.ones(2))


def test_what_has_no_stored_form_is_refused() -> None:
    function = FunctionOperator(lambda v: v, (2, 2), symmetric=True)
    for operator in (function, Diagonal(torch.ones(2)) + function, 2.0 * function):
        with pytest.raises(InputError, match=r"FunctionOperator.*cannot be stored.*kronecker_eigen"):
            to_tensors(operator)


def test_a_sum_has_no_closed_forms() -> None:
    stored = to_tensors(Diagonal(torch.ones(2)) + Diagonal(torch.ones(2)))
    with pytest.raises(FileFormatError, match=r"kind 'sum'.*operator_from_tensors"):
        from_tensors(*stored)


def written() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A stored matrix with a part of each kind."""
    torch.manual_seed(0)
    factor = torch.randn(6, 2, dtype=torch.float64)
    parts: list[StructuredOperator] = [
        Dense(positive(6), SPACE),
        Permuted(Diagonal(torch.rand(6).double()), torch.arange(6).flip(0)),
        LowRankMatrix.from_factor(factor, diagonal=torch.rand(6).double() + 0.5),
        Kronecker(positive(2), positive(3)),
        KroneckerEigen.of(Kronecker(positive(2), positive(3))),
        GroupedKronecker(positive(2, 1), positive(2, 3)),
        GroupedKroneckerEigen.of(GroupedKronecker(positive(2, 1), positive(2, 3))),
    ]
    return to_tensors(BlockDiagonal(parts))


def block(index: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    """A change to one part of the description; None takes an entry away."""

    def change(spec: dict[str, Any]) -> None:
        part = spec["blocks"][index]
        part.update(changes)
        for key, value in changes.items():
            if value is None:
                del part[key]

    return change


HOSTILE_SPECS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda spec: spec.pop("kind"), r"the stored matrix is of kind None.*block_diagonal"),
    (lambda spec: spec.update(kind="pickle"), r"kind 'pickle'"),
    (lambda spec: spec.update(kind=["dense"]), r"kind \['dense'\]"),
    (lambda spec: spec.update(kind="dense", name="G"), r"lacks the tensor 'matrix'"),
    (lambda spec: spec.pop("blocks"), r"'blocks' = None"),
    (lambda spec: spec.update(blocks={"0": 1}), r"'blocks' of type list"),
    (lambda spec: spec.update(blocks=[]), r"at least one block"),
    (lambda spec: spec["blocks"].pop(), r"unknown tensors '6\.left_vectors', '6\.right_vectors'"),
    (lambda spec: spec["blocks"].append("dense"), r"part 7 .* described by str.*dictionary"),
    (lambda spec: spec["blocks"].append({"kind": "dense", "name": "G"}), r"part 7 .*lacks .*'7\.matrix'"),
    (lambda spec: spec.update(kind="sum", terms=spec["blocks"] + [spec]), r"part 7\.0 .*lacks"),
    (block(0, kind="diagonal"), r"part 0 .*lacks the tensor '0\.values'"),
    (block(0, name=None), r"part 0 .*'name' = None.*str"),
    (block(0, name=3), r"'name' = 3"),
    (block(0, space=[["weight", [2, 2]]]), r"part 0 .*space has dimension 4.*6"),
    (block(0, space=[]), r"space without parameters"),
    (block(0, space={"weight": [6]}), r"parameter None"),
    (block(0, space=[["w", [3]], ["w", [3]]]), r"parameter \['w', \[3\]\].*each name once"),
    (block(0, space=[["w", [True, 6]]]), r"parameter \['w', \[True, 6\]\]"),
    (block(0, space=[["w", [-1, -6]]]), r"parameter \['w', \[-1, -6\]\]"),
    (block(0, space=[["w", 6]]), r"parameter \['w', 6\]"),
    (block(0, space=[["w"]]), r"parameter \['w'\]"),
    (block(0, space=[[6, [6]]]), r"parameter \[6, \[6\]\]"),
    (block(1, operator=None), r"part 1\.0 .* described by NoneType"),
    (block(1, operator={"kind": "sum", "terms": []}), r"part 1\.0 .*sum has no terms"),
    (
        block(1, operator={"kind": "scaled", "scalar": 2.0, "operator": {"kind": "diagonal", "name": ""}}),
        r"part 1\.0\.0 .*lacks the tensor '1\.0\.0\.values'",
    ),
    (block(2, rest=None), r"part 2 .*'rest' = None.*float"),
    (block(2, rest="1.0"), r"'rest' = '1\.0'"),
    (block(2, rest=True), r"'rest' = True"),
    (block(2, rest=-1.0), r"damping is -1\.0"),
    (block(2, rest=float("nan")), r"damping is nan|multiplier is nan"),
]


@pytest.mark.parametrize(("change", "text"), HOSTILE_SPECS)
def test_malformed_descriptions_are_refused(change: Callable[[dict[str, Any]], object], text: str) -> None:
    spec, tensors = written()
    from_tensors(copy.deepcopy(spec), tensors)
    change(spec)
    with pytest.raises(FileFormatError, match=text):
        from_tensors(spec, tensors)


HOSTILE_TENSORS: list[tuple[str, Callable[[Tensor], object], str]] = [
    ("0.matrix", lambda t: t[:5], r"'0\.matrix' of shape \(5, 6\).*\(n, n\)"),
    ("0.matrix", lambda t: t[None], r"shape \(1, 6, 6\)"),
    ("0.matrix", lambda t: t.flatten(), r"shape \(36,\)"),
    ("0.matrix", lambda t: t.triu(), r"part 0 .* not symmetric"),
    ("0.matrix", lambda t: t / 0, r"part 0 .*infinite"),
    ("0.matrix", lambda t: t.int(), r"type torch\.int32"),
    ("0.matrix", lambda t: t.to(torch.complex128), r"type torch\.complex128"),
    ("0.matrix", lambda t: t.tolist(), r"lacks the tensor '0\.matrix'"),
    ("0.matrix", lambda t: t.float(), r"one dtype"),
    ("1.order", lambda t: t.double(), r"'1\.order' of type torch\.float64.*int64"),
    ("1.order", lambda t: t.int(), r"'1\.order' of type torch\.int32"),
    ("1.order", lambda t: t[:5], r"permutation of 0 \.\.\. 5"),
    ("1.order", lambda t: t * 0, r"permutation of 0 \.\.\. 5"),
    ("1.order", lambda t: t[:, None], r"shape \(6, 1\)"),
    ("1.0.values", lambda t: -t, r"part 1\.0 .*negative entry"),
    ("2.basis", lambda t: t[:, :1], r"'2\.values' of shape \(2,\)"),
    ("2.basis", lambda t: t.T, r"'2\.values' of shape \(2,\)"),
    ("2.values", lambda t: -t, r"part 2 .*negative|part 2 .*semi-definite"),
    ("2.scale", lambda t: t[:2], r"'2\.scale' of shape \(2,\)"),
    ("2.scale", lambda t: -t, r"part 2 .*scale that is not positive"),
    ("2.scale", lambda t: t / 0, r"part 2 .*scale that is not positive"),
    ("3.left", lambda t: t[None], r"'3\.left' of shape \(1, 2, 2\)"),
    ("3.right", lambda t: t.float(), r"'3\.right' of type torch\.float32"),
    ("4.left_vectors", lambda t: t[:, :1], r"'4\.left_vectors' of shape \(2, 1\).*\(n, n\)"),
    ("4.values", lambda t: t.T, r"'4\.values' of shape \(3, 2\).*\(n, m\)"),
    ("4.values", lambda t: -t, r"part 4 .*semi-definite"),
    ("5.left", lambda t: t[:1], r"'5\.right' of shape \(2, 3, 3\).*\(r, m, m\)"),
    ("6.values", lambda t: t[:, :, :2], r"'6\.values' of shape \(2, 1, 2\)"),
]


@pytest.mark.parametrize(("key", "change", "text"), HOSTILE_TENSORS)
def test_tensors_that_do_not_fit_are_refused(key: str, change: Callable[[Tensor], Any], text: str) -> None:
    spec, tensors = written()
    tensors[key] = change(tensors[key])
    with pytest.raises(FileFormatError, match=text):
        from_tensors(spec, tensors)


@pytest.mark.parametrize("key", [key for key in written()[1] if key != "2.scale"])
def test_every_tensor_is_needed(key: str) -> None:
    spec, tensors = written()
    del tensors[key]
    with pytest.raises(FileFormatError, match=rf"lacks the tensor '{key}'"):
        from_tensors(spec, tensors)


def test_tensors_without_a_place_are_refused() -> None:
    spec, tensors = written()
    with pytest.raises(FileFormatError, match=r"unknown tensors 'spare'"):
        from_tensors(spec, {**tensors, "spare": torch.ones(1)})


def test_endless_descriptions_are_refused() -> None:
    spec: dict[str, Any] = {"kind": "scaled", "scalar": 1.0}
    spec["operator"] = spec
    with pytest.raises(FileFormatError, match=r"parts within parts"):
        operator_from_tensors(spec, {})


KEYS = st.sampled_from(["kind", "name", "blocks", "terms", "operator", "scalar", "rest", "space"])
KINDS = st.sampled_from(
    ["dense", "diagonal", "block_diagonal", "permuted", "low_rank", "kronecker", "sum", "scaled"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | KINDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
NUMBERS = st.sampled_from(
    [torch.eye(2), torch.ones(2), torch.ones(3, 2), torch.zeros(0), torch.tensor([1, 0])]
)
PLACES = st.sampled_from(
    ["matrix", "values", "left", "right", "order", "basis", "0.matrix", "0.values", "1.values"]
)


@given(KINDS, st.dictionaries(KEYS, JSON), st.dictionaries(PLACES, NUMBERS))
def test_any_description_gives_a_matrix_or_a_named_error(
    kind: str, entries: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    try:
        operator = operator_from_tensors({**entries, "kind": kind, "name": "G"}, tensors)
    except FileFormatError:
        return
    assert_identical(again(operator), operator)
