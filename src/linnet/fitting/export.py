"""Fits as plain modules: the linear model f₀(x) + J(x)δ, and their variance.

In the weights of the last linear layer alone the model is linear in the features ψ = (φ, 1), and with
A = (ΨᵀΨ + ρI)⁻¹ = R Rᵀ, or the matrix JᵀΛJ + ρI of the cross-entropy in its place,

    Var f_c(x) = σ² ψᵀ A ψ = σ² ‖Rᵀψ‖²

exactly. The variance in all weights, or along the directions of a sketch, takes the derivatives of every
example by itself. With A = (JᵀΛJ + ρI)⁻¹ over the training examples, J̃ = SᵀJ for Λ = S Sᵀ, and the rows j of
a new example,

    Var f_c(x) = σ² j A jᵀ = σ² ‖Rᵀ j‖²,  A = R Rᵀ                          where the weights are fewer,
               = σ²/ρ (‖j‖² − ‖Vᵀ j‖²),  V = J̃ᵀ L⁻ᵀ,  J̃J̃ᵀ + ρI = L Lᵀ      where the training outputs are,

both exact. A module holds R or V, the weights times the fewer of the two; along D directions R is D × D.
Equations on outputs, with B the rows of their combinations, W = ABᵀ and T = BW + τ/ρ I, take σ² j W T⁻¹ Wᵀ jᵀ
from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from linnet.curvatures.leading import restored_basis
from linnet.errors import LinnetError, ModelError
from linnet.fitting.arguments import BATCH
from linnet.fitting.last_layer import bared, last_linear
from linnet.fitting.sketch import MetricNetwork, SketchedNetwork
from linnet.linalg.factorize import cholesky
from linnet.linear.constraints import Constraints
from linnet.memory import Plan, parse_bytes, require
from linnet.tangent.batch import Inputs, batch_size, observed, split, take
from linnet.tangent.coordinates import Coordinates, moved_network
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional, call_arguments
from linnet.tangent.graph import Axis, Prototype, Traced, plain_module, resized
from linnet.tangent.graph_rows import module_with_rows
from linnet.tangent.jacobian import jacobian
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode


@dataclass(frozen=True, eq=False)
class ExportedPosterior:
    """What variances are made of, beside the network."""

    x: Inputs  # training inputs, N examples
    ridge: float  # ρ
    noise: float  # σ²
    roots: Tensor | None = None  # S with Λ = S Sᵀ, (N, C, C); ``None`` for the identity
    memory: str | int | None = None  # budget
    held: Constraints | None = None  # equations that the outputs obey


class RowsOutputs(nn.Module):
    """f₀ + Jδ and its variance, from f₀ and the rows of J."""

    # delta (P,), factor (P, P)

    delta: Tensor  # δ, (P,), in the order of the rows
    factor: Tensor  # σR (P, P), or σ/√ρ V (P, N·C), and σ W T^(−½) (P, q) beside it

    def __init__(self, delta: Tensor, factor: Tensor, prior: float, along: Along | None = None) -> None:
        super().__init__()
        self.register_buffer("delta", delta)
        self.register_buffer("factor", factor)
        self.prior, self.along = prior, along

    def forward(self, value: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs and their variances, (N, C)."""
        # value (N, C), rows (N, C, *shape)
        if self.along is None:
            j = torch.cat([row.reshape(value.numel(), -1) for row in rows], 1)
        else:
            j = self.along(value, rows)
        # by a column: onnxruntime multiplies a transposed matrix by a vector wrongly
        mean = value + (j @ self.delta[:, None]).reshape(value.shape)
        j = j.to(self.factor.dtype)
        held = (j @ self.factor).square().sum(1)
        variance = self.prior * j.square().sum(1) - held if self.prior else held
        return mean, variance.clamp_min(0).to(mean.dtype).reshape(value.shape)


class AlongDirections(nn.Module):
    """J H from the rows of J, layer by layer."""

    def __init__(self, small: SketchedNetwork, names: Sequence[str]) -> None:
        super().__init__()
        self.names, self.kinds = list(names), [(type(basis).__name__, basis.layer) for basis in small.bases]
        for i, basis in enumerate(small.bases):
            for name, tensor in basis.tensors.items():
                self.register_buffer(f"basis_{i}_{name}", tensor)

    def forward(self, value: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """J H, (N·C, D)."""
        # value (N, C), rows (N, C, *shape)
        columns = {name: row.flatten(0, 1).movedim(0, -1) for name, row in zip(self.names, rows, strict=True)}
        parts = []
        for i, (kind, layer) in enumerate(self.kinds):
            prefix = f"basis_{i}_"
            own = {
                name.removeprefix(prefix): t for name, t in self.named_buffers() if name.startswith(prefix)
            }
            parts.append(restored_basis(kind, layer, own).projected([columns[name] for name in layer.names]))
        return torch.cat(parts).T.to(value.dtype)


class AlongMetric(nn.Module):
    """J H from the rows of J, H the root of a metric."""

    def __init__(self, network: MetricNetwork) -> None:
        super().__init__()
        self.turned = network.turned

    def forward(self, value: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """J H, (N·C, P)."""
        # value (N, C), rows (N, C, *shape)
        turned: Tensor = self.turned(torch.cat([row.reshape(value.numel(), -1) for row in rows], 1))
        return turned


Along = AlongDirections | AlongMetric


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


class OutputDirections(nn.Module):
    """Outputs, each of which moves by r_hᵀ of the tangents along its own H directions, summed."""

    heads: Tensor  # r_h, (H, D)
    weight: Tensor | None  # of a linear layer behind the network, (C, D)
    bias: Tensor | None

    def __init__(self, heads: Tensor, layer: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        weight, bias = layer or (None, None)
        for name, tensor in (("heads", heads), ("weight", weight), ("bias", bias)):
            self.register_buffer(name, tensor)

    def forward(self, value: Tensor, tangents: Sequence[Tensor]) -> Tensor:
        """Outputs (N, C), from tangents (N, D) each."""
        each = torch.stack(list(tangents), 1).unflatten(1, (-1, self.heads.shape[0]))  # (N, C, H, D)
        mean = value if self.weight is None else nn.functional.linear(value, self.weight, self.bias)
        moved: Tensor = (each * self.heads).sum((2, 3))
        return mean + moved


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
    module: Linearized, like: Prototype, posterior: ExportedPosterior | None, kind: torch.dtype | None
) -> Traced:
    """The linear model as a plain module."""
    function, delta = own_network(module)
    if posterior is None:
        return plain_module(
            function.model, [delta], lambda f, tangents: f + tangents[0], like, function.output
        )
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
    return plain_module(network.model, moved, OutputDirections(heads), like, network.output)


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
    module: Linearized,
    network: Functional,
    like: Prototype,
    posterior: ExportedPosterior,
    kind: torch.dtype | None,
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


def rows_outputs(
    function: Functional,
    delta: Tensor,
    posterior: ExportedPosterior,
    kind: torch.dtype,
    along: Along | None = None,
) -> RowsOutputs:
    """The outputs of a fit and their variance, from the rows of J."""
    # delta (P,)
    n, p = batch_size(posterior.x), function.space.dim
    c = function.check_runs(take(posterior.x, slice(0, 1))).numel()
    what = f"variance of {c} outputs: a factor of {p} weights × {min(p, n * c)}"
    remedies = [
        'fit with solver="sketch", whose factor has the size of the sketch alone',
        'fit with linnet.linearize(model, params="last-layer")',
        "export without variance=, and keep the fit in linnet for it",
    ]
    budget = parse_bytes(posterior.memory, function.device)
    require(Plan(what, budget, held_by_factor(p, n * c, c)), remedies)
    few = p <= n * c
    matrix = torch.zeros(p, p, dtype=torch.float64, device=function.device) if few else None
    kept, start = [], 0
    for part in split(posterior.x, BATCH):
        rows = jacobian(function, part, posterior.memory).double()  # (n, C, P)
        if posterior.roots is not None:
            rows = posterior.roots[start : start + len(rows)].to(rows).mT @ rows
        start += len(rows)
        rows = rows.flatten(0, 1)
        if matrix is None:
            kept.append(rows)
        else:
            matrix += rows.T @ rows
    found = in_examples(torch.cat(kept), posterior) if matrix is None else in_weights(matrix, posterior)
    factor, prior = found if posterior.held is None else _given(function, posterior.held, found, posterior)
    return RowsOutputs(delta.to(function.dtype), factor.to(kind), prior, along)


def held_by_factor(p: int, count: int, each: int) -> tuple[tuple[str, int], ...]:
    """Bytes that a factor of the posterior takes while it is made."""
    rank = min(p, count)
    return ("factor and its copy", 16 * p * rank), ("matrices", 24 * rank**2), ("rows", 16 * p * BATCH * each)


def in_weights(matrix: Tensor, posterior: ExportedPosterior) -> tuple[Tensor, float]:
    """The posterior where the weights are fewer than the training outputs, (P, P)."""
    # matrix (P, P)
    return root_of_inverse(matrix, posterior.ridge) * posterior.noise**0.5, 0.0


def in_examples(
    rows: Tensor, posterior: ExportedPosterior, kernel: Tensor | None = None
) -> tuple[Tensor, float]:
    """The posterior where the training outputs are fewer than the weights, (P, N·C)."""
    # rows (N·C, P), kernel (N·C, N·C): of the rows, unless some of them are kernels
    prior = posterior.noise / posterior.ridge
    square = rows @ rows.T if kernel is None else kernel
    return rows.T @ root_of_inverse(square, posterior.ridge) * prior**0.5, prior


def _given(
    function: Functional, held: Constraints, found: tuple[Tensor, float], posterior: ExportedPosterior
) -> tuple[Tensor, float]:
    """The posterior given equations on outputs, from that without them."""
    factor, prior = found
    b = held.equations.jacobian(function, posterior.memory).double()  # Bᵀ
    reach = factor.T @ b
    total = (prior * b.T @ b if prior else 0) + (-1 if prior else 1) * reach.T @ reach
    # σ² T, L its root
    slack = torch.diag(held.slack) * (posterior.noise / posterior.ridge)
    root = root_of_inverse(total + slack, 0.0)
    if prior:
        return torch.cat([factor, (prior * b - factor @ reach) @ root], 1), prior
    # R Q, Q² = I − Z Zᵀ, with the singular values s of Z in [0, 1]
    u, s, _ = torch.linalg.svd(reach @ root, full_matrices=False)
    less = 1 - (1 - s.square()).clamp_min(0).sqrt()
    return factor - (factor @ u) * less @ u.T, 0.0


def root_of_inverse(matrix: Tensor, ridge: float) -> Tensor:
    """L⁻ᵀ with L Lᵀ a matrix and its ridge, (P, P)."""
    # matrix (P, P)
    damped = matrix.clone()
    damped.diagonal().add_(ridge)
    factor = cholesky(damped, "features + ridge")
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    inverse: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
    return inverse.T


def covariance_roots(psi: Tensor, posterior: ExportedPosterior) -> Tensor:
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
    roots: Tensor = torch.stack(blocks) * posterior.noise**0.5
    return roots


Answer = Callable[[Inputs], Sequence[Tensor]]  # the fit's outputs (N, C), and their variances where wanted
Make = Callable[[Prototype, torch.dtype | None], Traced]  # exports, variances in a type or in the network's


@torch.no_grad()
def checked_module(make: Make, like: Prototype, answer: Answer) -> fx.GraphModule:
    """An exported module that answers as the fit does, or an error."""
    # A batch of one is tried, and the sizes that the trace leaves free. Where the module fails at another
    # size at which the fit answers, or answers otherwise, it is made again with that size fixed.
    x, kind = like.x, None
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
            remedy="fit model.double() or at a larger ridge, which leave less to rounding; or export without "
            "variance=, and keep the fit in linnet for it",
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
