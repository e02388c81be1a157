"""Directional derivatives: forward mode, two reverse passes, and a probe that proves the way it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from linnet.tangent.forward_mode import (
    Params,
    jvp_double_backward,
    jvp_forward,
    probe_jvp,
    random_direction,
)
from tests.fitting.problems import near, real

AT = {"a": real(3, 2, seed=1), "b": real(2, seed=2), "unused": real(4, seed=3)}
X = real(5, 3)


def smooth(p: Params) -> Tensor:
    return torch.tanh(X @ p["a"]) * p["b"]


def derivative(v: Params) -> Tensor:
    """The same by hand."""
    h = torch.tanh(X @ AT["a"])
    return (1 - h**2) * (X @ v["a"]) * AT["b"] + h * v["b"]


WAYS: list[Callable[..., tuple[Tensor, Tensor]]] = [jvp_forward, jvp_double_backward]


@pytest.mark.parametrize("jvp", WAYS)
def test_value_and_derivative(jvp: Callable[..., tuple[Tensor, Tensor]]) -> None:
    v = {name: real(*t.shape, seed=9) for name, t in AT.items()}
    value, tangent = jvp(smooth, AT, v)
    near(value, smooth(AT), 1e-14)
    near(tangent, derivative(v))


@pytest.mark.parametrize("jvp", WAYS)
def test_differentiable_in_the_direction(jvp: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Training differentiates u · J v in v: that is Jᵀu."""
    v = {name: real(*t.shape, seed=9).requires_grad_() for name, t in AT.items()}
    u = real(5, 2, seed=4)
    (jvp(smooth, AT, v)[1] * u).sum().backward()
    leaves = {name: t.clone().requires_grad_() for name, t in AT.items()}
    (smooth(leaves) * u).sum().backward()
    for name in ("a", "b"):
        near(v[name].grad, leaves[name].grad)  # type: ignore[arg-type]
    assert v["unused"].grad is None or not v["unused"].grad.any()


@pytest.mark.parametrize("jvp", WAYS)
def test_without_gradients_nothing_is_kept(jvp: Callable[..., tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        value, tangent = jvp(smooth, AT, {name: torch.ones_like(t) for name, t in AT.items()})
    assert not value.requires_grad
    assert not tangent.requires_grad


@pytest.mark.parametrize("jvp", WAYS)
def test_outputs_that_depend_on_nothing(jvp: Callable[..., tuple[Tensor, Tensor]]) -> None:
    only = {"unused": AT["unused"]}
    value, tangent = jvp(lambda p: X + 0 * p["unused"].sum().detach(), only, only)
    near(value, X)
    assert not tangent.any()


def test_random_directions_are_fixed_and_leave_the_generator_alone() -> None:
    state = torch.random.get_rng_state()
    first, second = random_direction(AT), random_direction(AT)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, t in AT.items():
        assert torch.equal(first[name], second[name])
        assert first[name].shape == t.shape
        assert first[name].dtype == t.dtype
        assert first[name].any()


# --- the probe ---------------------------------------------------------------------------------------


class NoForward(torch.autograd.Function):
    """sin with a backward pass only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0].cos()


class WrongForward(torch.autograd.Function):
    """sin with a forward-mode formula that is silently wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, v: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * v * ctx.saved_tensors[0].cos()


class OnceOnly(torch.autograd.Function):
    """sin with a backward pass that cannot itself be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0].cos()


def through(function: Any) -> Callable[[Params], Tensor]:
    return lambda p: function.apply(X @ p["a"])


def test_forward_mode_is_taken_where_it_works() -> None:
    assert probe_jvp(smooth, AT) == ("forward", "")


def test_two_reverse_passes_where_forward_mode_is_missing() -> None:
    path, why = probe_jvp(through(NoForward), AT)
    assert path == "double-backward"
    assert "forward mode is missing" in why
    assert "double-backward" in why


def test_a_formula_that_is_silently_wrong_is_not_accepted() -> None:
    path, why = probe_jvp(through(WrongForward), AT)
    assert path == "double-backward"
    assert "disagrees with reverse mode" in why


def test_gradients_of_examples_where_nothing_else_works() -> None:
    path, why = probe_jvp(through(OnceOnly), AT)
    assert path == "rows"
    assert "per-example gradients" in why
    assert "forward" in why
    assert "double-backward" in why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_probe_allows_for_rounding(dtype: torch.dtype) -> None:
    at = {name: t.to(dtype) for name, t in AT.items()}
    assert probe_jvp(lambda p: torch.tanh(X.to(dtype) @ p["a"]) * p["b"], at)[0] == "forward"


def test_a_function_of_nothing_is_fine() -> None:
    assert probe_jvp(lambda p: X, AT)[0] in ("forward", "double-backward")
