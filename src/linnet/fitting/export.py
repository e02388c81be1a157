"""Fits as plain modules: the linear model f₀(x) + J(x)δ, and the variance of a last layer's outputs.

In the weights of the last linear layer alone the model is linear in the features ψ = (φ, 1), and with
A = (ΨᵀΨ + ρI)⁻¹ = R Rᵀ, or the matrix JᵀΛJ + ρI of the cross-entropy in its place,

    Var f_c(x) = σ² ψᵀ A ψ = σ² ‖Rᵀψ‖²

exactly. The variance in other weights takes the derivatives of every example by itself (``export_variance``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from linnet.errors import LinnetError, ModelError
from linnet.fitting.arguments import BATCH
from linnet.fitting.export_variance import (
    Along,
    AlongDirections,
    AlongMetric,
    Posterior,
    root_of_inverse,
    rows_outputs,
)
from linnet.fitting.last_layer import bared, last_linear
from linnet.fitting.sketch import MetricNetwork, SketchedNetwork
from linnet.linalg.factorize import cholesky
from linnet.memory import Plan, parse_bytes, require
from linnet.tangent.batch import Inputs, observed, split, take
from linnet.tangent.coordinates import Coordinates, moved_network
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional, call_arguments
from linnet.tangent.graph import Axis, Prototype, Traced, plain_module, resized
from linnet.tangent.graph_rows import module_with_rows
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode


def own_network(module: Linearized) -> tuple[Functional, Params]:
    """The network itself and the δ of its weights, also where the fit has other coordinates."""
    delta = {name: t.detach() for name, t in module.delta.items()}
    network, moved = _in_own_weights(module.function, [delta])
    return network, moved[0]


def _in_own_weights(function: Functional, deltas: Sequence[Params]) -> tuple[Functional, list[Params]]:
    """The network itself and displacements of its weights, also where they are in other coordinates."""
    inside = moved_network(function)
    if inside is None:
        return function, list(deltas)
    coordinates = function.model
    assert isinstance(coordinates, Coordinates)
    start, epsilon = coordinates.displacement(), coordinates.epsilon.detach()
    found = []
    for delta in deltas:
        moved = coordinates.displacement(epsilon + delta["epsilon"])
        found.append({name: moved[name] - start[name] for name in inside.names})
    return inside, found


class _Mean(nn.Module):
    """f₀ + Jδ."""

    def forward(self, value: Tensor, tangents: Sequence[Tensor]) -> Tensor:
        return value + tangents[0]


class Moved(nn.Module):
    """What moves each output: r_hᵀ of the tangents along its own H directions, summed."""

    # heads (H, D)

    heads: Tensor  # r_h, (H, D)

    def __init__(self, heads: Tensor) -> None:
        super().__init__()
        self.register_buffer("heads", heads)

    def forward(self, tangents: Sequence[Tensor]) -> Tensor:
        """The change of every output, (N, C)."""
        # tangents (N, D)
        each = torch.stack(list(tangents), 1).unflatten(1, (-1, self.heads.shape[0]))  # (N, C, H, D)
        total: Tensor = (each * self.heads).sum((2, 3))
        return total


class _Directions(nn.Module):
    """f₀, and what moves each output."""

    def __init__(self, heads: Tensor) -> None:
        super().__init__()
        self.moved = Moved(heads)

    def forward(self, value: Tensor, tangents: Sequence[Tensor]) -> Tensor:
        moved: Tensor = self.moved(tangents)
        return value + moved


class HeadOutputs(nn.Module):
    """A linear layer on features, with the variance of its outputs where roots are given."""

    # weight (C, D), bias (C,), roots (1, E, E)

    weight: Tensor  # (C, D)
    bias: Tensor  # (C,)
    roots: Tensor | None  # σR, (1, E, E) for all outputs or (C, E, E)
    shape: nn.Module | None  # from φ to ψ, (N, D) to (N, E)

    def __init__(
        self, weight: Tensor, bias: Tensor, roots: Tensor | None = None, shape: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("roots", roots)
        self.shape = shape

    def forward(self, phi: Tensor, _: Sequence[Tensor]) -> Any:
        """Outputs (N, C), and their variances."""
        # phi (N, D)
        mean = nn.functional.linear(phi, self.weight, self.bias)
        if self.roots is None or self.shape is None:
            return mean
        psi = self.shape(phi.to(self.roots.dtype))
        each = torch.matmul(psi, self.roots).square().sum(2).T.to(mean.dtype)  # (N, 1) or (N, C)
        return mean, each.expand(mean.shape)


class Affine(nn.Module):
    """ψ from φ: scaled features less their mean, and a constant."""

    # center (D,)

    center: Tensor  # of the features, (D,)

    def __init__(self, center: Tensor, scale: float, constant: float) -> None:
        super().__init__()
        self.register_buffer("center", center)
        self.scale, self.constant = scale, constant

    def forward(self, phi: Tensor) -> Tensor:
        """ψ, (N, D + 1)."""
        last = torch.full_like(phi[:, :1], self.constant)
        return torch.cat([(phi - self.center) * self.scale, last], 1)


@in_exact_mode
@torch.no_grad()
def exported_fit(
    module: Linearized, like: Prototype, posterior: Posterior | None, kind: torch.dtype | None
) -> Traced:
    """The linear model as a plain module."""
    function, delta = own_network(module)
    if posterior is None:
        return plain_module(function.model, [delta], _Mean(), like, function.output)
    apart = posterior.held is None and observed(posterior.x)[1] is None  # the outputs, in the last layer
    last = _last_layer(function, delta) if apart else None
    if last is None:
        return _with_rows(module, function, like, posterior, kind)
    name, layer = last
    phi = bared(function.model)
    old: Tensor = layer.weight.detach()
    start = old.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
    weight = old + delta.get(f"{name}.weight", torch.zeros_like(old))
    bias = start + delta.get(f"{name}.bias", torch.zeros_like(start))
    shape = Affine(
        torch.zeros(layer.in_features, dtype=torch.float64, device=weight.device),
        float(f"{name}.weight" in delta),
        float(f"{name}.bias" in delta),
    )
    features = Functional(phi, "all", function.output)
    psi = [shape(features.flat(features.theta, part).double()) for part in split(posterior.x, BATCH)]
    roots = covariance_roots(torch.cat(psi), posterior)
    kind = kind or weight.dtype
    head = HeadOutputs(weight, bias, roots.to(kind), shape.to(kind))
    return plain_module(phi, [], head, like, function.output)


@in_exact_mode
@torch.no_grad()
def exported_directions(
    function: Functional, needed: Plan, directions: Callable[[], list[Params]], heads: Tensor, like: Prototype
) -> Traced:
    """A network whose outputs move along directions of their own, as a plain module."""
    # heads (H, C)
    require(needed, ["fit with another solver, which has one direction for all outputs", "raise memory="])
    network, moved = _in_own_weights(function, directions())
    return plain_module(network.model, moved, _Directions(heads), like, network.output)


def _last_layer(function: Functional, delta: Params) -> tuple[str, nn.Linear] | None:
    """The last linear layer, if no other weight moves."""
    owners = {name.rpartition(".")[0] for name in delta}
    if len(owners) != 1:
        return None
    try:
        name, layer = last_linear(function.model)
    except LinnetError:
        return None
    return (name, layer) if owners == {name} else None


def _with_rows(
    module: Linearized, network: Functional, like: Prototype, posterior: Posterior, kind: torch.dtype | None
) -> Traced:
    """The linear model with its variance from the rows of J, in the coordinates of the fit."""
    function, small = module.function, module.function.model
    along: Along | None = None
    if isinstance(small, SketchedNetwork):
        along = AlongDirections(small, network.names)
    elif isinstance(small, MetricNetwork):
        along = AlongMetric(small)
    delta = function.space.to_flat({name: t.detach() for name, t in module.delta.items()})
    outputs = rows_outputs(function, delta, posterior, kind or function.dtype, along)
    return module_with_rows(network, outputs, like)


def covariance_roots(psi: Tensor, posterior: Posterior) -> Tensor:
    """R with R Rᵀ the posterior covariance of the weights of each output, and no others'."""
    # psi (N, E)
    e = psi.shape[1]
    if posterior.roots is None:
        shared = root_of_inverse(psi.T @ psi, posterior.ridge)
        scaled: Tensor = shared[None] * posterior.noise**0.5
        return scaled
    curvature = posterior.roots.to(psi) @ posterior.roots.to(psi).mT
    c = curvature.shape[1]
    budget = parse_bytes(posterior.memory, psi.device)
    plan = Plan(f"covariance of {c * e} weights", budget, (("matrices", 3 * 8 * (c * e) ** 2),))
    require(plan, ["export without variance", "fit with loss='squared', whose outputs share one matrix"])
    whole = torch.zeros(c, e, c, e, dtype=psi.dtype, device=psi.device)
    for a in range(c):
        for b in range(c):
            whole[a, :, b] = psi.T @ (psi * curvature[:, a, b, None])
    inverse = root_of_inverse(whole.view(c * e, c * e), posterior.ridge).view(c, e, c * e)
    # the covariance of one output's weights is a block, whose own root is smaller
    blocks = [cholesky(rows @ rows.T, "covariance of an output's weights") for rows in inverse]
    return torch.stack(blocks)


Answer = Callable[[Inputs], Sequence[Tensor]]  # the fit's outputs (N, C), and their variances where wanted
Make = Callable[[Prototype, torch.dtype | None], Traced]  # exports, variances in a type or in the network's


@torch.no_grad()
def checked_module(make: Make, x: Inputs, answer: Answer) -> fx.GraphModule:
    """An exported module that answers as the fit does, or an error."""
    # A batch of one is tried, and the sizes that the trace leaves free. Where the module fails at another
    # size at which the fit answers, or answers otherwise, it is made again with that size fixed.
    like, kind = Prototype(x), None
    try:
        made = make(like, kind)
    except ModelError:
        made = make(like := like.rigid(), kind)  # where a network cannot be traced at all, this says so
    tried = [(part, answer(part)) for part in (x, take(x, slice(0, 1)))]

    # an output near zero is the difference of larger numbers, and as exact as they are
    scale = float(tried[0][1][0].abs().max())

    def off() -> str:
        return next(filter(None, (_off(made.module, *one, scale) for one in tried)), "")

    if off() == "variance":
        made = make(like, kind := torch.float64)
    wrong = off()
    if wrong == "variance":
        raise ModelError(
            "the variance of the exported model is another than the fit's",
            expected="a fit whose own variances are exact, and a last layer that is the last",
            remedy="export without variance=, and keep the fit in linnet for it",
        )
    if wrong:
        raise ModelError(
            f"the traced network gives other outputs, by up to {wrong}",
            expected="a network that computes the same whether torch.export traces it or not",
            remedy="look for torch.autograd.Function, torch.no_grad or conditions on shapes in its forward()",
        )
    while found := _only_so(made, x, answer, scale):
        made = make(like := Prototype(x, like.fixed | found), kind)
    return made.module


def _off(module: nn.Module, x: Inputs, expected: Sequence[Tensor], scale: float) -> str:
    """What a module answers otherwise than the fit: nothing, the outputs, by how much, or the variance."""
    args, kwargs = call_arguments(x)
    found = module(*args, **kwargs)
    got: Sequence[Tensor] = found if len(expected) > 1 else (found,)
    eps = torch.finfo(expected[0].dtype).eps
    if _far(got[0], expected[0], eps**0.5, max(scale, 1e-2)):
        return f"{float((got[0] - expected[0]).abs().max()):.2g}"
    return "variance" if len(expected) > 1 and _far(got[1], expected[1], 1e-3) else ""


def _only_so(made: Traced, x: Inputs, answer: Answer, scale: float) -> frozenset[Axis]:
    """Axes that a trace leaves free, although it holds for the traced size alone."""
    found: set[Axis] = set()
    for free in made.free:
        tried = 0
        for size in free.others():
            other = resized(x, free, size)
            try:
                expected = answer(other)
            except LinnetError:  # the network takes no such size
                continue
            try:
                wrong = _off(made.module, other, expected, scale)
            except (RuntimeError, ValueError, IndexError):
                wrong = "fails"
            tried += not wrong
            found |= set(free.axes) if wrong else set()
        found |= set() if tried else set(free.axes)
    return frozenset(found)


def _far(got: Tensor, expected: Tensor, tolerance: float, scale: float = 1e-30) -> bool:
    """Whether numbers differ by more than a share of the largest, or of a scale that is larger."""
    if got.shape != expected.shape:
        return True
    return not bool((got - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=scale))
