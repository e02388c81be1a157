"""Every check of a parameter takes what it should and refuses everything else in three parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import linnet
from linnet import params
from linnet.errors import InputError

NET = torch.nn.Linear(3, 2)


class Odd:
    """Nothing of it works."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __index__(self) -> int:
        raise RuntimeError("no index")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("no array")


WRONG: tuple[Any, ...] = (
    None, "", "three", b"3", [], {}, object(), Odd(), int, 1 + 2j, math.nan, math.inf, -math.inf, 10**400,
    torch.zeros(2), torch.zeros(2, device="meta"), torch.tensor(1j), np.zeros(3), lambda: None,
)  # fmt: skip


@pytest.mark.parametrize("value", [torch.zeros(3), np.zeros(3), torch.zeros(3, 2)])
def test_targets_in_the_place_of_a_setting_are_recognized(value: Any) -> None:
    with pytest.raises(InputError, match="add is") as error:
        params.no_targets("add", value)
    assert error.value.remedy == "pass data=(x, y)"


@pytest.mark.parametrize("value", [None, "loo", 1.0, torch.tensor(1.0), np.float64(1.0)])
def test_a_setting_is_no_target(value: Any) -> None:
    params.no_targets("ridge", value)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: linnet.fit(linnet.linearize(NET), x, y),
        lambda x, y: linnet.curvature(NET, x, y),
        lambda x, y: linnet.finetune(NET, x, y),
        lambda x, y: linnet.linear_posterior(linnet.linearize(NET), x, y),
        lambda x, y: linnet.Laplace(NET, linnet.likelihoods.Categorical()).fit(x, y),
    ],
)
def test_inputs_and_targets_as_two_arguments_are_told_to_be_one(call: Callable[..., Any]) -> None:
    with pytest.raises(InputError) as error:
        call(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    assert error.value.remedy == "pass data=(x, y)"


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3), torch.tensor([3])])
def test_integer_takes(value: Any) -> None:
    found = params.integer("steps", value)
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([2])])
def test_number_takes(value: Any) -> None:
    assert params.number("ridge", value, above=0, most=2) == float(value)


def test_number_says_its_bounds() -> None:
    with pytest.raises(InputError, match="at least 0 and less than 1"):
        params.number("momentum", 1.0, least=0, below=1)


def test_choice_knows_a_slip() -> None:
    with pytest.raises(InputError, match='did you mean solver="dual"'):
        params.choice("solver", "daul", ("dual", "cg"))


@pytest.mark.parametrize(
    ("check", "bad"),
    [
        (lambda v: params.flag("shard", v), [*WRONG, 1, 0]),
        (lambda v: params.integer("steps", v, most=100), [*WRONG, True, 1.0, -1, 0, torch.tensor(1.0), "1"]),
        (lambda v: params.number("ridge", v, above=0), [*WRONG, True, "1", 0, -1.0]),
        (
            lambda v: params.positive_numbers("ridges", v, "positive numbers"),
            [*WRONG, True, [True], [1.0, 0.0], [1.0, math.inf]],
        ),
        (lambda v: params.choice("solver", v, ("dual", "cg")), [*WRONG, "daul", True]),
        (lambda v: params.path("file", v), [None, "", 3, b"x", "a\0b", "a" * 5000, [], Path, Odd()]),
        (lambda v: params.function("predict", v, "a function"), [None, 3, "sin", int, torch.zeros(1)]),
        (lambda v: params.instance("model", v, torch.nn.Module, "a module"), [*WRONG, torch.nn.Linear]),
        (
            lambda v: params.tensor("y", v, "numbers"),
            [None, "x", Odd(), [[1], [1, 2]], 1j, torch.zeros(1, device="meta"), torch.eye(2).to_sparse()],
        ),
    ],
)  # fmt: skip
def test_refuses(check: Callable[[Any], Any], bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises(InputError) as error:
            check(value)
        assert error.value.expected
        assert error.value.remedy
        assert len(str(error.value)) < 400


def test_values_come_back() -> None:
    layer = torch.nn.Linear(1, 1)
    assert params.instance("model", layer, torch.nn.Module, "a module") is layer
    assert params.flag("shard", False) is False
    assert params.path("file", "a/b") == Path("a/b")
    assert params.tensor("y", np.arange(2), "numbers").tolist() == [0, 1]
    assert params.positive_numbers("ridges", [1, 0.5], "positive numbers").tolist() == [1, 0.5]


def test_unknown_keywords_are_named() -> None:
    with pytest.raises(InputError, match=r"linnet.fit has no parameter rigde.*did you mean ridge="):
        params.known("linnet.fit", ["rigde"], ("ridge", "solver"))


def test_a_class_is_no_object() -> None:
    with pytest.raises(InputError, match=r"the class Linear.*pass an object of the class: Linear"):
        params.instance("model", torch.nn.Linear, torch.nn.Module, "an nn.Module")


def test_words_of_other_libraries_are_answered_with_ours() -> None:
    with pytest.raises(InputError, match='pass structure="kfac"'):
        params.choice("structure", "kron", ("full", "kfac"), "pass another if unsure")
    with pytest.raises(InputError, match="pass another if unsure"):
        params.choice("structure", "diag", ("full", "kfac"), "pass another if unsure")
