"""Linearizations in some of the parameters only, chosen in every way there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import linnet
from tests.oracles.dense import jacobian_oracle, kernel_oracle
from tests.zoo import Case, assert_near, case, every_animal, flat


def check(expected: Case, params: Any, names: list[str], model: nn.Module | None = None) -> None:
    """Outputs, products and kernels of a linearization in `params` against the oracle for `names`."""
    model = expected.model() if model is None else model
    lin = linnet.linearize(model, params=params, output=expected.output)
    j1 = jacobian_oracle(model, expected.x1, names, expected.output)
    j2 = jacobian_oracle(model, expected.x2, names, expected.output)
    assert lin.parameter_names == [n for n, _ in model.named_parameters() if n in names]
    v = torch.randn(j1.shape[2], dtype=torch.float64)
    u = torch.randn(j1.shape[:2], dtype=torch.float64)
    assert_near(lin.base(expected.x1), expected.f1, 1e-12)
    assert_near(lin.jvp(expected.x1, v), j1 @ v)
    assert_near(flat(lin.vjp(expected.x1, u)), torch.einsum("ncp,nc->p", j1, u))
    assert_near(lin.jacobian(expected.x1), j1)
    assert_near(lin.kernel(expected.x1, expected.x2), kernel_oracle(j1, j2))


def trainable(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@every_animal
@pytest.mark.thinned(3)
def test_every_second_parameter_by_name(name: str) -> None:
    names = trainable(case(name).model())[::2]
    check(case(name), names, names)


@every_animal
@pytest.mark.thinned(3)
def test_every_other_second_parameter_by_name_in_reverse(name: str) -> None:
    names = trainable(case(name).model())[1::2]
    check(case(name), list(reversed(names)), names)


@every_animal
@pytest.mark.thinned(6)
def test_vectors_and_matrices_by_predicate(name: str) -> None:
    model = case(name).model()
    small = [n for n, p in model.named_parameters() if p.ndim <= 1]
    large = [n for n, p in model.named_parameters() if p.ndim > 1]
    if small:
        check(case(name), lambda n, p: p.ndim <= 1, small)
    check(case(name), lambda n, p: p.ndim > 1, large)


@every_animal
@pytest.mark.thinned(2)
def test_biases(name: str) -> None:
    model = case(name).model()
    names = [n for n, _ in model.named_parameters() if n.split(".")[-1].endswith("bias")]
    if not names:
        with pytest.raises(linnet.errors.InputError, match="selects none"):
            linnet.linearize(model, params="bias")
        return
    check(case(name), "bias", names)


LAST_LAYERS = {
    "mlp-tanh": ["4.weight", "4.bias"],
    "lenet": ["9.weight", "9.bias"],
    "resnet-batchnorm": ["7.weight", "7.bias"],
    "convnext": ["5.weight", "5.bias"],
    "vit-mha": ["head.weight", "head.bias"],
    "bert-eager": ["classifier.weight", "classifier.bias"],
    "gpt2-sdpa": ["score.weight"],
    "lstm": ["head.weight", "head.bias"],
    "two-inputs": ["last.weight", "last.bias"],
}


@pytest.mark.parametrize("name", LAST_LAYERS)
@pytest.mark.thinned(2)
def test_last_layer(name: str) -> None:
    check(case(name), "last-layer", LAST_LAYERS[name])


@pytest.mark.parametrize(
    ("name", "params", "names"),
    [
        ("mlp-tanh", r"^[02]\.weight$", ["0.weight", "2.weight"]),
        ("bert-sdpa", r"attention\.self\.(query|value)", None),
        ("resnet-batchnorm", "bn", None),
    ],
)
def test_regular_expression(name: str, params: str, names: list[str] | None) -> None:
    import re

    every = trainable(case(name).model())
    check(case(name), params, names or [n for n in every if re.search(params, n)])


@pytest.mark.parametrize(
    ("name", "pick"),
    [
        ("vit-mha", lambda model: model.blocks[1]),
        ("mobilenet", lambda model: model[3]),
        ("lstm", lambda model: model.layer),
        ("tied-linears", lambda model: model.second),
        ("tied-embedding", lambda model: model.head),
        ("shared-module", lambda model: model.block),
    ],
)
def test_module(name: str, pick: Callable[[Any], nn.Module]) -> None:
    model = case(name).model()
    inside = {id(p) for p in pick(model).parameters()}
    names = [n for n, p in model.named_parameters() if id(p) in inside]
    check(case(name), pick(model), names, model)


def test_low_rank_adapters_come_by_default_because_the_rest_is_frozen() -> None:
    expected = case("lora")
    names = [f"{i}.lora_{letter}" for i in (0, 2, 4) for letter in "ab"]
    assert linnet.linearize(expected.model()).parameter_names == names
    check(expected, None, names)
    check(expected, "lora", names)


def test_all_takes_frozen_parameters_too() -> None:
    expected = case("lora")
    check(expected, "all", [n for n, _ in expected.model().named_parameters()])


def test_second_name_of_a_tied_parameter_stands_for_its_first() -> None:
    check(case("tied-linears"), ["second.weight"], ["first.weight"])
