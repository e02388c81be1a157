"""Parameter space: flat vectors and Params are two views of one thing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linnet.linalg import ParameterSpace

SPACE = ParameterSpace({"weight": (2, 3), "scale": (), "bias": (2,)})

shapes = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4
)


@given(shapes, st.sampled_from([(), (1,), (4,)]))
def test_flat_to_params_and_back_is_the_identity(
    shapes: dict[str, list[int]], columns: tuple[int, ...]
) -> None:
    space = ParameterSpace(shapes)
    flat = torch.randn(space.dim, *columns)
    params = space.to_params(flat)
    assert [tuple(tensor.shape) for tensor in params.values()] == [
        (*shape, *columns) for shape in shapes.values()
    ]
    assert torch.equal(space.to_flat(params), flat)


def test_dim_and_slices_follow_the_order_of_names() -> None:
    assert SPACE.dim == 9
    assert SPACE.slices == {"weight": slice(0, 6), "scale": slice(6, 7), "bias": slice(7, 9)}


def test_params_from_flat_are_views() -> None:
    for flat in (torch.zeros(9), torch.zeros(9, 2)):
        SPACE.to_params(flat)["bias"].fill_(5.0)
        assert bool((flat[7:] == 5.0).all())


def test_one_parameter_is_flattened_without_a_copy() -> None:
    weight = torch.zeros(2, 3)
    assert ParameterSpace({"weight": (2, 3)}).to_flat({"weight": weight}).data_ptr() == weight.data_ptr()


def test_the_order_of_the_space_counts_not_that_of_the_dict() -> None:
    params = SPACE.to_params(torch.arange(9.0))
    shuffled = {name: params[name] for name in ("bias", "weight", "scale")}
    assert torch.equal(SPACE.to_flat(shuffled), torch.arange(9.0))


def test_flat_stays_flat_and_params_stay_params() -> None:
    flat = torch.arange(9.0)
    params = SPACE.to_params(flat)
    assert SPACE.to_flat(flat) is flat
    assert SPACE.to_params(params) is params
    assert isinstance(SPACE.in_kind(flat, like=flat), Tensor)
    assert isinstance(SPACE.in_kind(flat, like=params), dict)


def test_of_reads_the_shapes_of_a_network() -> None:
    network = torch.nn.Linear(3, 2)
    space = ParameterSpace.of(dict(network.named_parameters()))
    assert space == ParameterSpace({"weight": (2, 3), "bias": (2,)})
    assert hash(space) == hash(ParameterSpace({"weight": (2, 3), "bias": (2,)}))


def test_spaces_differ_by_order_and_shape() -> None:
    assert ParameterSpace({"a": (2,), "b": (2,)}) != ParameterSpace({"b": (2,), "a": (2,)})
    assert ParameterSpace({"a": (2,)}) != ParameterSpace({"a": (1, 2)})


def test_select_keeps_the_order() -> None:
    assert SPACE.select(["bias", "weight"]) == ParameterSpace({"weight": (2, 3), "bias": (2,)})


def test_flattening_keeps_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    flat = ParameterSpace({"a": (2,), "b": (1,)}).to_flat({"a": weight, "b": torch.ones(1)})
    assert torch.equal(torch.autograd.grad(flat.sum(), weight)[0], torch.ones(2))


def test_repr_says_how_large_it_is() -> None:
    assert repr(SPACE) == "ParameterSpace(3 parameters, P = 9)"
