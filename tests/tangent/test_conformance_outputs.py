"""For every network of the zoo: f₀ + Jδ, products with J and Jᵀ, and J itself, against the oracles."""

from __future__ import annotations

import pytest
import torch

import linnet
from tests.zoo import (
    BY_NAME,
    assert_near,
    case,
    every_animal,
    flat,
    linearize,
    linearized,
    named,
    rows,
    set_delta,
)


@every_animal
def test_linearization_at_its_point_is_the_network_itself(name: str) -> None:
    lin, expected = linearized(name), case(name)
    assert all(torch.count_nonzero(value) == 0 for value in lin.delta.values())
    assert_near(lin.base(expected.x1), expected.f1, 1e-12)
    assert_near(lin(expected.x1).flatten(1), lin.base(expected.x1), 1e-14)


@every_animal
def test_parameters_are_those_that_require_gradients_in_model_order(name: str) -> None:
    lin, model = linearized(name), case(name).model()
    wanted = [n for n, parameter in model.named_parameters() if parameter.requires_grad]
    assert lin.parameter_names == wanted
    assert list(lin.delta) == list(lin.theta0) == wanted
    for n, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(lin.theta0[n], parameter)
            assert lin.delta[n].shape == parameter.shape
            assert lin.delta[n].requires_grad
    assert sum(p.numel() for p in lin.parameters()) == case(name).parameters
    assert {id(p) for p in lin.parameters()} == {id(p) for p in lin.delta.values()}


@every_animal
@pytest.mark.thinned(3)
def test_linearization_away_from_its_point_is_affine(name: str) -> None:
    lin, expected = linearize(name), case(name)
    for seed, scale in ((0, 1.0), (1, 30.0)):
        delta = scale * expected.direction(seed)
        set_delta(lin, delta)
        assert_near(lin(expected.x1).flatten(1), expected.f1 + expected.j1 @ delta)
        assert_near(lin(expected.x2).flatten(1), expected.f2 + expected.j2 @ delta)
        with torch.no_grad():
            assert_near(lin(expected.x1).flatten(1), expected.f1 + expected.j1 @ delta)
        assert_near(lin.base(expected.x1), expected.f1, 1e-12)


@every_animal
def test_jvp_of_flat_named_and_stacked_vectors(name: str) -> None:
    lin, expected = linearized(name), case(name)
    v, columns = expected.direction(2), expected.direction(3, columns=3)
    assert_near(lin.jvp(expected.x1, v), expected.j1 @ v)
    assert_near(lin.jvp(expected.x1, named(lin, v)), expected.j1 @ v)
    assert_near(lin.jvp(expected.x2, columns), expected.j2 @ columns)


@every_animal
def test_vjp_is_the_adjoint(name: str) -> None:
    lin, expected = linearized(name), case(name)
    u = torch.randn(4, expected.animal.classes, dtype=torch.float64)
    assert_near(flat(lin.vjp(expected.x1, u)), torch.einsum("ncp,nc->p", expected.j1, u))


@every_animal
def test_jacobian(name: str) -> None:
    assert_near(linearized(name).jacobian(case(name).x1), case(name).j1)


@every_animal
@pytest.mark.parametrize("index", [[0], [2, 1], [3, 3, 0, 1, 2, 2, 1, 0]], ids=["one", "two", "eight"])
@pytest.mark.thinned(3)
def test_any_batch_size_gives_the_same_numbers(name: str, index: list[int]) -> None:
    lin, expected = linearized(name), case(name)
    x, j = rows(expected.x1, index), expected.j1[index]
    v = expected.direction(4)
    assert_near(lin.base(x), expected.f1[index], 1e-11)
    assert_near(lin.jvp(x, v), j @ v)
    assert_near(lin.jacobian(x), j)
    u = torch.randn(j.shape[:2], dtype=torch.float64)
    assert_near(flat(lin.vjp(x, u)), torch.einsum("ncp,nc->p", j, u))


@every_animal
def test_permuted_examples_permute_the_outputs(name: str) -> None:
    lin, expected, order = linearized(name), case(name), [2, 0, 3, 1]
    v = expected.direction(5)
    assert_near(lin.jvp(rows(expected.x1, order), v), lin.jvp(expected.x1, v)[order].detach())
    assert_near(lin.jacobian(rows(expected.x1, order)), lin.jacobian(expected.x1)[order].detach())


@every_animal
@pytest.mark.thinned(3)
def test_float32_is_close_to_float64(name: str) -> None:
    from tests.zoo import cast

    expected = case(name)
    lin = linnet.linearize(expected.model().float(), output=expected.output)
    x, v = cast(expected.x1, torch.float32), expected.direction(6)
    assert lin.base(x).dtype == torch.float32
    assert_near(lin.base(x), expected.f1, 1e-4)
    assert_near(lin.jvp(x, v.float()), expected.j1 @ v, 1e-4)
    assert_near(lin.jacobian(x), expected.j1, 1e-4)
    assert_near(lin.kernel(x), torch.einsum("ncp,mdp->ncmd", expected.j1, expected.j1), 1e-4)


def test_the_module_keeps_the_shape_of_the_outputs_and_everything_else_flattens_it() -> None:
    lin, expected = linearized("structured-output"), case("structured-output")
    assert lin(expected.x1).shape == (4, 2, 2)
    assert lin.base(expected.x1).shape == lin.jvp(expected.x1, expected.direction()).shape == (4, 4)
    assert linearized("regression-vector")(case("regression-vector").x1).shape == (4, 1)


def test_logits_of_hugging_face_outputs_are_found_without_output() -> None:
    expected = case("bert-eager")
    lin = linnet.linearize(expected.model())
    assert_near(lin.base(expected.x1), expected.f1, 1e-12)
    assert_near(lin.jvp(expected.x1, expected.direction()), expected.j1 @ expected.direction())


def test_output_by_key() -> None:
    expected = case("dict-output")
    lin = linnet.linearize(expected.model(), output="scores")
    assert_near(lin.jacobian(expected.x1), expected.j1)


def test_output_that_is_no_tensor_is_refused_with_a_remedy() -> None:
    lin = linnet.linearize(BY_NAME["dict-output"].factory(0))
    with pytest.raises(linnet.errors.ModelError, match="output="):
        lin.base(case("dict-output").x1)
