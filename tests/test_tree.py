"""Trees of tensors that are taken apart and put together: the same bits, or an error that says why not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.errors import FileFormatError, InputError
from linnet.files import load, save
from linnet.linalg import (
    Dense,
    Diagonal,
    FunctionOperator,
    Kronecker,
    KroneckerEigen,
    LinearOperator,
    LowRankMatrix,
    ParameterSpace,
    StructuredOperator,
    Sum,
)
from linnet.linalg.operator import Scaled
from linnet.solvers.solution import Solution, Status
from linnet.tree import flatten, from_plain, map_tensors, rebuild, tensors_in, to_plain

SPACE = ParameterSpace({"weight": (2, 2), "bias": (2,)})


def positive(*shape: int) -> Tensor:
    """Positive definite matrices (..., n, n)."""
    factor = torch.randn(*shape, 2 * shape[-1], dtype=torch.float64)
    return factor @ factor.mT / shape[-1]


def leaves() -> list[Callable[[], StructuredOperator]]:
    """How to make a 6 x 6 matrix of each kind that has no parts."""
    factor = torch.randn(6, 2, dtype=torch.float64)
    product, grouped = Kronecker(positive(2), positive(3)), Kronecker(positive(2, 1), positive(2, 3))
    return [
        lambda: Dense(positive(6), SPACE, "G of fc1"),
        lambda: Diagonal(torch.rand(6, dtype=torch.float32), name="curvature of the bias"),
        lambda: Kronecker(positive(2), positive(3), SPACE, "layer 0"),
        lambda: product,
        lambda: KroneckerEigen.of(product).damped(0.1),
        lambda: KroneckerEigen.half_diagonal(torch.rand(3).double(), positive(2), name="vocabulary"),
        lambda: KroneckerEigen.half_diagonal(positive(2), torch.rand(3).double()),
        lambda: Kronecker(positive(3, 2), positive(3, 1), name="depthwise"),
        lambda: KroneckerEigen.of(grouped).damped(1e-3),
        lambda: LowRankMatrix.from_factor(factor, diagonal=0.1 + 0.2, name="sketch"),
        lambda: LowRankMatrix.from_factor(factor, diagonal=torch.rand(6).double() + 0.5, space=SPACE),
        lambda: LowRankMatrix.from_factor(factor),
    ]


def assert_identical(actual: LinearOperator, expected: LinearOperator) -> None:
    """Same kind, names, space and description, and the same bits in every tensor and product."""
    assert type(actual) is type(expected)
    assert (actual.shape, actual.dtype, actual.space) == (expected.shape, expected.dtype, expected.space)
    (spec, tensors), (spec_wanted, wanted) = flatten(actual), flatten(expected)
    assert spec == spec_wanted
    assert list(tensors) == list(wanted)
    for key, tensor in wanted.items():
        assert tensors[key].dtype == tensor.dtype
        assert torch.equal(tensors[key], tensor), key
    assert torch.equal(actual.dense(), expected.dense())


def again(value: Any) -> Any:
    """The value taken apart and put together, what is no tensor through JSON."""
    plain, tensors = flatten(value)
    return rebuild(json.loads(json.dumps(plain, allow_nan=False)), tensors)


@pytest.mark.parametrize("index", range(10))
def test_every_kind_comes_back_bit_by_bit(index: int) -> None:
    operator = leaves()[index]()
    restored = rebuild(*flatten(operator))
    assert_identical(restored, operator)
    assert restored.name == operator.name
    torch.testing.assert_close(restored.damped(0.5).dense(), operator.damped(0.5).dense())


@st.composite
def structures(draw: st.DrawFn, depth: int = 2) -> LinearOperator:
    """Matrices of all kinds, some within others."""
    kind = draw(st.sampled_from(["leaf", "sum", "scaled"] if depth else ["leaf"]))
    if kind == "leaf":
        made = draw(st.sampled_from(leaves()))()
        return made if made.dtype == torch.float64 else Diagonal(torch.rand(6).double())
    if kind == "sum":
        return Sum(draw(st.lists(structures(depth - 1), min_size=1, max_size=3)))
    return Scaled(draw(structures(depth - 1)), draw(st.floats(-3, 3)))


@given(structures())
def test_matrices_within_matrices_come_back(operator: LinearOperator) -> None:
    assert_identical(again(operator), operator)


def test_through_a_file(tmp_path: Path) -> None:
    operator = Sum([leaves()[0](), Scaled(leaves()[7](), 0.1), leaves()[2]()])
    assert_identical(load(save(tmp_path, "G", {"curvature": operator}), "G")["curvature"], operator)


KEYS = st.sampled_from(["a", "b/c", "$tensor", "$tuple", "$dict", "$", ""])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_numbers_text_and_containers_come_back(value: Any) -> None:
    assert again(value) == value
    assert from_plain(to_plain(value)) == value


def test_tensors_come_back_by_their_path() -> None:
    w, v, u = torch.ones(2), torch.zeros(3), torch.tensor(2)
    value = {"a/b": w, "a": {"b": v}, "c": [(u, "text"), None]}
    plain, tensors = flatten(value)
    assert list(tensors) == ["a/b", "a/b'", "c/0/0"]
    found = rebuild(plain, tensors)
    assert found["a/b"] is w
    assert found["a"]["b"] is v
    assert found["c"] == [(u, "text"), None]


def test_results_and_their_words_come_back() -> None:
    value = Solution((torch.ones(2), 1.0), Status.STAGNATED, 3, float("nan"))
    found = again(value)
    assert found.status is Status.STAGNATED
    assert isinstance(found.value, tuple)
    assert found.residual != found.residual


def test_maps_keep_the_structure() -> None:
    value = {"x": [torch.ones(2), "text"], "y": Kronecker(torch.eye(2), torch.eye(3), name="G")}
    found = map_tensors(lambda t: 2 * t, value)
    assert found["x"][1] == "text"
    assert isinstance(found["x"], tuple)
    assert torch.equal(found["y"].dense(), 4 * torch.eye(6))
    assert found["y"].name == "G"
    assert [t.shape for t in tensors_in(value)] == [(2,), (2, 2), (3, 3)]


def test_tensors_are_not_copied() -> None:
    matrix = positive(3)
    assert flatten(Dense(matrix))[1]["matrix"] is matrix
    assert to_plain(Dense(matrix))["$Dense"]["matrix"] is matrix


class Color(Enum):
    """Of nothing that is saved."""

    RED = 1


def test_what_has_no_stored_form_is_refused() -> None:
    function = FunctionOperator(lambda v: v, (2, 2), symmetric=True)
    endless: list[Any] = []
    endless.append(endless)
    for value in (function, Diagonal(torch.ones(2)) + function, {"f": print}, Color.RED, endless):
        with pytest.raises(InputError, match=r"cannot be saved|holds itself"):
            flatten(value)


def written() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A stored matrix with a part of each kind."""
    torch.manual_seed(0)
    factor = torch.randn(6, 2, dtype=torch.float64)
    parts: list[LinearOperator] = [
        Dense(positive(6), SPACE),
        Scaled(Diagonal(torch.rand(6).double()), 2.0),
        LowRankMatrix.from_factor(factor, diagonal=torch.rand(6).double() + 0.5),
        Kronecker(positive(2), positive(3)),
        KroneckerEigen.of(Kronecker(positive(2), positive(3))),
        Kronecker(positive(2, 1), positive(2, 3)),
        KroneckerEigen.of(Kronecker(positive(2, 1), positive(2, 3))),
    ]
    return flatten(Sum(parts))


def block(index: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    """A change to one part of the description; None takes an entry away."""

    def change(spec: dict[str, Any]) -> None:
        (part,) = parts_of(spec)[index].values()
        part.update(changes)
        for key, value in changes.items():
            if value is None:
                del part[key]

    return change


def parts_of(spec: dict[str, Any]) -> list[Any]:
    """The descriptions of the parts."""
    found: list[Any] = spec["$Sum"]["terms"]["$tuple"]
    return found


def space(**shapes: Any) -> dict[str, Any]:
    """The description of a parameter space."""
    return {"$ParameterSpace": {"shapes": shapes}}


HOSTILE_SPECS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda spec: spec.update({"$pickle": spec.pop("$Sum")}), "pickle.*Sum"),
    (lambda spec: spec.update({"$Sum": 3}), "put together"),
    (lambda spec: spec["$Sum"].pop("terms"), "terms"),
    (lambda spec: spec["$Sum"].update(terms={"$tuple": []}), "sum has no terms"),
    (lambda spec: spec["$Sum"].update(terms=1), "terms"),
    (lambda spec: spec["$Sum"].update(other=1), "other"),
    (lambda spec: parts_of(spec).pop(), "unknown tensors 'terms/6/left_vectors'"),
    (lambda spec: parts_of(spec).append("dense"), "terms"),
    (lambda spec: parts_of(spec).append({"$Dense": {"name": "G"}}), "matrix"),
    (lambda spec: parts_of(spec).append(copy.deepcopy(parts_of(spec)[0])), "terms/0/matrix"),
    (lambda spec: parts_of(spec).append({"$Sum": {"terms": {"$tuple": []}}}), "sum has no terms"),
    (lambda spec: spec["$Sum"].update(terms={"$Status": "CONVERGED"}), "terms"),
    (lambda spec: spec["$Sum"].update(terms={"$Status": "other"}), "other"),
    (block(0, space={"$float": "1e9"}), "float"),
    (block(0, name=3), "'name' = 3"),
    (block(0, space=space(weight=[2, 2])), "space has dimension 4.*6"),
    (block(0, space=space()), "at least one parameter"),
    (block(0, space={"weight": [6]}), "space"),
    (block(0, space=space(w=[True, 6])), "shapes"),
    (block(0, space=space(w=[-1, -6])), "-1"),
    (block(0, space=space(w=6)), "shapes"),
    (block(1, operator=None), "operator"),
    (block(1, operator={"$tuple": []}), "operator"),
    (block(2, rest="1.0"), r"'rest' = '1\.0'"),
    (block(2, rest=True), "'rest' = True"),
    (block(2, rest=-1.0), r"damping is -1\.0"),
    (block(2, rest={"$float": "nan"}), "damping is nan|multiplier is nan"),
]


@pytest.mark.parametrize(("change", "text"), HOSTILE_SPECS)
def test_malformed_descriptions_are_refused(change: Callable[[dict[str, Any]], object], text: str) -> None:
    spec, tensors = written()
    rebuild(copy.deepcopy(spec), tensors)
    change(spec)
    with pytest.raises(FileFormatError, match=text):
        rebuild(spec, tensors)


HOSTILE_TENSORS: list[tuple[str, Callable[[Tensor], object]]] = [
    ("0/matrix", lambda t: t[:5]),
    ("0/matrix", lambda t: t[None]),
    ("0/matrix", lambda t: t.flatten()),
    ("0/matrix", lambda t: t.triu()),
    ("0/matrix", lambda t: t / 0),
    ("0/matrix", lambda t: t.tolist()),
    ("0/matrix", lambda t: t.float()),
    ("1/operator/values", lambda t: -t),
    ("2/basis", lambda t: t[:, :1]),
    ("2/basis", lambda t: t.T),
    ("2/values", lambda t: -t),
    ("2/scale", lambda t: t[:2]),
    ("3/left", lambda t: t[None]),
    ("3/right", lambda t: t.float()),
    ("4/values", lambda t: t.T),
    ("4/values", lambda t: -t),
    ("5/left", lambda t: t[:1]),
    ("6/values", lambda t: t[:, :, :2]),
]


@pytest.mark.parametrize(("key", "change"), HOSTILE_TENSORS)
def test_tensors_that_do_not_fit_are_refused(key: str, change: Callable[[Tensor], Any]) -> None:
    spec, tensors = written()
    tensors[f"terms/{key}"] = change(tensors[f"terms/{key}"])
    with pytest.raises(FileFormatError):
        rebuild(spec, tensors)


@pytest.mark.parametrize("key", list(written()[1]))
def test_every_tensor_is_needed(key: str) -> None:
    spec, tensors = written()
    del tensors[key]
    with pytest.raises(FileFormatError, match=key):
        rebuild(spec, tensors)


def test_tensors_without_a_place_are_refused() -> None:
    spec, tensors = written()
    with pytest.raises(FileFormatError, match=r"unknown tensors 'spare'"):
        rebuild(spec, {**tensors, "spare": torch.ones(1)})


def test_endless_descriptions_are_refused() -> None:
    inner: dict[str, Any] = {"scalar": 1.0}
    inner["operator"] = {"$Scaled": inner}
    with pytest.raises(FileFormatError, match="without end"):
        rebuild(inner, {})


KINDS = st.sampled_from(["Dense", "Diagonal", "KroneckerEigen", "Kronecker", "Sum", "Scaled"])
FIELDS = st.sampled_from(
    ["matrix", "values", "left", "right", "left_vectors", "operator", "terms", "scalar", "name", "space"]
)
NUMBERS = [torch.eye(2), torch.ones(2), torch.ones(3, 2), torch.zeros(0), torch.tensor([1, 0])]
DESCRIPTIONS = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=2) | st.sampled_from(NUMBERS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(lambda parts: {"$tuple": parts})
        | st.tuples(KINDS, st.dictionaries(FIELDS, inner, max_size=4)).map(lambda p: {f"${p[0]}": p[1]})
    ),
    max_leaves=12,
)


@given(KINDS, st.dictionaries(FIELDS, DESCRIPTIONS))
def test_any_description_gives_a_matrix_or_a_named_error(kind: str, entries: dict[str, Any]) -> None:
    try:
        operator = from_plain({f"${kind}": entries})
    except FileFormatError:
        return
    assert_identical(again(operator), operator)
