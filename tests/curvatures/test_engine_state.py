"""A curvature leaves the network, the data and the random numbers of its caller as they were."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.likelihoods import Categorical
from tests.curvatures.curvature_oracles import Problem
from tests.curvatures.side_by_side import curvature_of
from tests.zoo import BY_NAME, assert_near, case

STRUCTURES: list[Any] = [
    ["full", "block", "diagonal", "kfac", "ekfac"], "kfra", "low-rank", "last-layer", "matrix-free",
]  # fmt: skip


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a network that a caller could notice."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "identity": {name: id(p) for name, p in [*model.named_parameters(), *model.named_buffers()]},
        "versions": {name: p._version for name, p in [*model.named_parameters(), *model.named_buffers()]},
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "requires": {name: p.requires_grad for name, p in model.named_parameters()},
        "training": {name: m.training for name, m in model.named_modules()},
        "hooks": {name: (len(m._forward_hooks), len(m._backward_hooks)) for name, m in model.named_modules()},
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "attached": {name: sorted(vars(p)) for name, p in model.named_parameters()},
    }


def assert_equal(after: dict[str, Any], before: dict[str, Any]) -> None:
    for what, value in before.items():
        if what in ("state", "grads"):
            for name, tensor in value.items():
                other = after[what][name]
                assert (tensor is None) == (other is None), (what, name)
                assert tensor is None or torch.equal(tensor, other), (what, name)
        else:
            assert after[what] == value, what


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize(
    "name", ["dropout-train", "resnet-batchnorm", "weight-norm", "lora", "spectral-norm"]
)
@pytest.mark.thinned(4)
def test_the_network_is_left_as_it_was(name: str, structure: Any) -> None:
    if structure == "kfra":
        name = "inplace-relu"
    expected = case(name)
    model = expected.model()
    called = []
    model.register_forward_hook(lambda *_: called.append(1))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    y = torch.tensor([0, 2, 1, 0])
    x = copy.deepcopy(expected.x1)
    before = snapshot(model)
    states = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    G = curvature_of(model, (expected.x1, y), Categorical(), structure, output=expected.output)
    for one in G.values() if isinstance(G, dict) else [G]:
        one @ torch.ones(one.shape[0]).double()
        if structure != "matrix-free":
            one.damped(1.0).inverse().output_covariance(expected.x2)
    assert_equal(snapshot(model), before)
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    assert torch.equal(expected.x1, x)
    assert torch.equal(y, torch.tensor([0, 2, 1, 0]))


def test_a_network_in_train_mode_is_taken_in_eval_mode_and_left_in_train_mode() -> None:
    model = BY_NAME["dropout-train"].factory(0)
    assert model.training
    x = case("dropout-train").x1
    found = linnet.curvature(model, x, Categorical(), ["full", "kfac", "ekfac"])
    again = linnet.curvature(model, x, Categorical(), ["full", "kfac", "ekfac"])
    assert model.training
    calm = linnet.curvature(copy.deepcopy(model).eval(), x, Categorical(), ["full", "kfac", "ekfac"])
    for structure, G in found.items():
        torch.testing.assert_close(G.dense(), again[structure].dense())
        torch.testing.assert_close(G.dense(), calm[structure].dense())


def test_later_changes_of_the_network_do_not_reach_the_curvature() -> None:
    problem = Problem("mlp-tanh", "categorical")
    model = problem.case.model()
    G = linnet.curvature(model, problem.data, problem.likelihood, "kfac").damped(1.0).inverse()
    before = G.output_covariance(problem.case.x2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert_near(G.output_covariance(problem.case.x2), before)


@pytest.mark.parametrize("mode", ["no_grad", "enable_grad"])
def test_any_grad_mode_of_the_caller_gives_the_same(mode: str) -> None:
    problem = Problem("lenet", "categorical")
    expected = problem.curvature(["full", "kfac", "ekfac"])
    model = problem.case.model()
    with getattr(torch, mode)():
        found = linnet.curvature(model, problem.data, problem.likelihood, ["full", "kfac", "ekfac"])
    for structure, G in found.items():
        assert not G.dense().requires_grad
        torch.testing.assert_close(G.dense(), expected[structure].dense())


def test_a_linearization_has_the_curvature_of_its_network() -> None:
    problem = Problem("lenet", "categorical")
    lin = linnet.linearize(problem.case.model())
    for structure in ("kfac", "full"):
        G = linnet.curvature(lin, problem.data, problem.likelihood, structure)
        torch.testing.assert_close(G.dense(), problem.curvature(structure).dense())
        assert G.function is lin.function


def test_frozen_parameters_have_no_part() -> None:
    model, x = case("mlp-tanh").model(), case("mlp-tanh").x1
    model[0].requires_grad_(False)
    G = linnet.curvature(model, x, Categorical(), "kfac")
    assert [part.layer.name for part in G.parts] == ["2", "4"]
    everything = curvature_of(model, x, Categorical(), "kfac", params="all")
    assert everything.shape[0] == 155


def test_an_exception_in_the_data_leaves_the_network_as_it_was() -> None:
    model = case("resnet-batchnorm").model()
    before = snapshot(model)

    class Broken(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            if i == 5:
                raise OSError("the disk is gone")
            return case("resnet-batchnorm").x1[i % 4], 0

    with pytest.raises(OSError, match="disk"):
        linnet.curvature(model, torch.utils.data.DataLoader(Broken(), 2), Categorical(), "ekfac")
    assert_equal(snapshot(model), before)
