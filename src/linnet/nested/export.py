"""An adapted network as a plain module.

    f_c(x) = φ(x)ᵀ W_c + b_c + Σ_h r_hᵀ ∂φ(x) δ_hc        (``linear/features.py``)

Without derivatives (w = 0) it is a linear layer on φ and, where earlier layers take part, on the kernel κ of
their features with those of all N training examples. Otherwise the module holds H·C directions of the lower
layers, and differentiates along each.

Its variance takes the rows J_h(x) of every example. With φ̃ scaled and g = (√(1−w) φ̃, √(w/(H m_body)) J_1,
…, J_H) the features beside the intercept, whose prior variance is κ, and s = Σᵢ g(xᵢ) over the N training
examples,

    Var f(x) = σ²κ/(Nκ+ρ) + σ² g̃ᵀ (GᵀQ²G + ρI)⁻¹ g̃,   g̃ = g − s κ/(Nκ+ρ),   Q² = I − κ/(Nκ+ρ) 11ᵀ

(the intercept eliminated, so that its large variance is nowhere the difference of larger numbers). Features
that are known by their kernel alone, s κ, enter through its rows k = κ(x, X): as s k in G g, as s in |g|².
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linnet.errors import InputError
from linnet.fitting.accuracy import TOLERANCE
from linnet.fitting.arguments import BATCH
from linnet.fitting.export import (
    ExportedPosterior,
    HeadOutputs,
    OutputDirections,
    held_by_factor,
    in_examples,
    in_weights,
)
from linnet.fitting.last_layer import bared, last_linear, replace_module, zero_layer
from linnet.linear.features import Weights, angular_kernel, arc_cosine
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.normal_system import NormalSystem
from linnet.memory import Plan, parse_bytes, require
from linnet.nested.features import HEAD, Prior
from linnet.nested.stages import Alike, Headed
from linnet.tangent.batch import split
from linnet.tangent.functional import Functional, copied
from linnet.tangent.graph import Prototype, Traced, plain_module
from linnet.tangent.graph_rows import module_with_rows
from linnet.tangent.jacobian import jacobian
from linnet.tangent.modes import in_exact_mode

Solution = KernelSystem | NormalSystem


class Formed(nn.Module):
    """A network that returns the features of many samples' fits, (N, D + M) in float64."""

    center: Tensor
    psi: Tensor
    root: Tensor

    def __init__(self, prior: Prior) -> None:
        super().__init__()
        assert prior.landmarks is not None
        self.reader, self.width = prior.network.reader.model, prior.network.width
        self.scale, self.share, self.reads_last = prior.scale, prior.share**0.5, bool(prior.width)
        self.register_buffer("center", prior.center)
        self.register_buffer("psi", prior.landmarks.psi)
        self.register_buffer("root", prior.landmarks.root)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """φ, scaled and less its mean, where it takes part, and g(ψ)."""
        phi, psi = self.reader(*args, **kwargs).to(self.psi.dtype).tensor_split([self.width], 1)
        alike = self.share * (arc_cosine(nn.functional.normalize(psi, dim=1) @ self.psi.T) @ self.root)
        return torch.cat([(phi - self.center) * self.scale, alike], 1) if self.reads_last else alike


class _Remaining(NamedTuple):
    """The posterior of the features beside the intercept, and what the intercept adds."""

    # M: training examples where earlier layers take part, otherwise 0
    center: Tensor  # of φ, (D,)
    scale: float  # of φ
    of_rows: float  # √(w/(H m_body))
    shift: Tensor  # κ/(Nκ+ρ) of the sums over the training examples, (D + H·P + M,)
    factor: Tensor  # of the posterior, (D + H·P + M, ·), as ``fitting.export`` has it
    prior: float  # σ²/ρ where the factor is to be taken from it, 0 otherwise
    least: float  # σ²κ/(Nκ+ρ)
    # what features known by their kernel add to |g̃|²: a constant, and so much of each entry of k̃
    constant: float = 0.0
    each: float = 0.0

    def features(self, found: Tensor, j: Tensor) -> Tensor:
        """g̃ and k̃, (N, D + H·P + M), from φ and k (N, D + M) and J (N, H·P)."""
        phi, alike = found.tensor_split([len(self.center)], 1)
        return torch.cat([(phi - self.center) * self.scale, j * self.of_rows, alike], 1) - self.shift

    def length(self, g: Tensor, alike: int) -> Tensor:
        """|g̃|² of all features, (N,)."""
        if not alike:
            return g.square().sum(1)
        own, k = g.tensor_split([g.shape[1] - alike], 1)
        return own.square().sum(1) + self.constant + self.each * k.sum(1)


class _WithVariance(nn.Module):
    """The layer on φ and k, the lower layers' part from their rows, and the variance of every output."""

    # layer (C, D + M), delta (H·P, C)

    weight: Tensor
    bias: Tensor
    delta: Tensor | None  # δ of every head, (H·P, C)

    def __init__(
        self, layer: tuple[Tensor, Tensor], delta: Tensor | None, rest: _Remaining, kind: torch.dtype
    ) -> None:
        super().__init__()
        self.register_buffer("weight", layer[0])
        self.register_buffer("bias", layer[1])
        self.register_buffer("delta", delta)
        # contiguous, as torch saves them in its files
        own = {name: getattr(rest, name).to(kind).contiguous() for name in ("center", "shift", "factor")}
        self.rest = rest._replace(**own)

    def forward(self, phi: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs and their variances, (N, C)."""
        # phi (N, D + M), rows (N, H, *shape)
        rest = self.rest
        mean, j = nn.functional.linear(phi, self.weight, self.bias), phi[:, :0]
        if self.delta is not None:
            j = torch.cat([row.flatten(2) for row in rows], 2).flatten(1)
            mean = mean + j @ self.delta
        g = rest.features(phi.to(rest.factor), j.to(rest.factor))
        held = (g @ rest.factor).square().sum(1)
        length = rest.length(g, phi.shape[1] - len(rest.center))
        variance = (rest.prior * length - held).clamp_min(0) if rest.prior else held
        each = (variance + rest.least).to(mean.dtype)
        return mean, each[:, None].expand(mean.shape)


class _Rounded(nn.Module):
    """What another module gives, in one type."""

    def __init__(self, finish: nn.Module, kind: torch.dtype) -> None:
        super().__init__()
        self.finish, self.kind = finish, kind

    def forward(self, value: Tensor, rows: Sequence[Tensor]) -> Any:
        """Its tensor, or several."""
        found = self.finish(value, rows)
        return tuple(one.to(self.kind) for one in found) if isinstance(found, tuple) else found.to(self.kind)


@in_exact_mode
@torch.no_grad()
def exported_nested(
    prior: Prior, system: Solution, like: Prototype, noise: float | None, kind: torch.dtype | None
) -> Traced:
    """An adapted network as a plain module."""
    function, problem = prior.network.function, system.problem
    rows, basis = problem.examples.rows[HEAD], problem.basis
    assert rows is not None
    remedies = [
        "adapt with weight=0, whose module is a network with a new head",
        "fit with linnet.fit, which has one direction for all outputs",
    ]
    require(basis.plan(system.c, system.memory, ["the same in the module"]), remedies)
    found = prior.weights(system)
    exact = _exact(prior, system)
    weight, bias = (part.to(exact) for part in _layer(prior, found))
    network, names = _reading(prior, rows, exact)
    delta = found.directions[0].values.flatten(0, 1) if found.directions else None
    if noise is not None:
        posterior = ExportedPosterior(problem.x, system.ridge, noise, memory=system.memory)
        finish = _WithVariance(
            (weight, bias), delta, _remaining(prior, rows, posterior), kind or function.dtype
        )
        rounded = _Rounded(finish, function.dtype)
        if delta is None:
            return plain_module(network, [], rounded, like)
        return module_with_rows(Functional(network, names), rounded, like, _heads(prior, weight))
    if delta is None:
        return plain_module(network, [], _Rounded(HeadOutputs(weight, bias), function.dtype), like)
    renamed = dict(zip(function.names, names, strict=True))
    each = found.directions[0].by_output()
    directions = [{renamed[name]: value for name, value in one.items()} for one in each]
    moved = OutputDirections(_heads(prior, weight), (weight, bias))
    return plain_module(network, directions, _Rounded(moved, function.dtype), like)


def _exact(prior: Prior, system: Solution) -> torch.dtype:
    """The type in which the kernel of earlier layers is summed: float64 where rounding would show."""
    if prior.landmarks is not None:
        return torch.float64
    # where it may add a tenth of the error at which a fit itself is made again in float64
    function, beta = prior.network.function, system.beta
    outputs = system.problem.unscaled(system.residual) - system.left_over
    eps = function.precision.eps(function.dtype, function.device)
    error = eps * prior.share * beta.square().sum(0).sqrt().max()
    shows = bool(error > TOLERANCE / 10 * (outputs - outputs.mean(0)).square().mean().sqrt())
    return torch.float64 if prior.mixture.earlier and shows else function.dtype


def _layer(prior: Prior, found: Weights) -> tuple[Tensor, Tensor]:
    """The linear layer on φ and k as the network gives them, from the one on scaled φ less their mean."""
    if prior.landmarks is not None:
        return found.layers[0][1], found.bias
    weight, alike = found.layers[0][1].tensor_split([prior.network.width], 1)
    weight = weight * prior.scale
    return torch.cat([weight, alike], 1), found.bias - weight @ prior.center


def _reading(prior: Prior, rows: Tensor, exact: torch.dtype) -> tuple[nn.Module, list[str]]:
    """The network that returns φ and k, and the names of the weights below the head."""
    # rows (N, D + E)
    function = prior.network.function
    if prior.landmarks is not None:
        return Formed(prior), [f"reader.{name}" for name in prior.network.read_names]
    if not prior.mixture.earlier:
        return bared(function.model), function.names
    psi = rows[:, prior.network.width :].to(exact)
    names = [f"reader.{name}" for name in prior.network.read_names]
    return Alike(prior.network.reader.model, psi), names


def _heads(prior: Prior, weight: Tensor) -> Tensor:
    """The random heads, zero on the kernel of earlier layers, (H, D + M)."""
    # weight (C, D + M)
    heads = last_linear(prior.network.function.model)[1].weight.detach()
    return nn.functional.pad(heads, (0, weight.shape[1] - heads.shape[1]))


def _remaining(prior: Prior, rows: Tensor, posterior: ExportedPosterior) -> _Remaining:
    """The posterior of the features beside the intercept."""
    # rows (N, D) or (N, D + E)
    function, h, mixture = prior.network.function, prior.network.heads, prior.mixture
    formed = prior.landmarks is not None
    rows, psi = rows.tensor_split([rows.shape[1] if formed else prior.network.width], 1)
    (n, d), p = rows.shape, h * function.space.dim if mixture.weight else 0
    known = n if mixture.earlier and not formed else 0  # columns of the kernel of earlier layers
    what = f"variance of {d} features and {h} heads on {function.space.dim} weights, {n} examples"
    columns = d + p + known
    items = (*held_by_factor(columns, n, h), ("training rows", 8 * n * columns))
    remedies = [
        "adapt with weight=0, whose variance takes the features alone",
        "export without variance=, and keep the fit in linnet for it",
    ]
    require(Plan(what, parse_bytes(posterior.memory, function.device), items), remedies)
    head, of_rows = (1 - mixture.weight) ** 0.5, (mixture.weight / (h * mixture.body)) ** 0.5
    parts = [rows * head]
    if mixture.weight:
        every = [jacobian(function, part, posterior.memory).double() for part in split(posterior.x, BATCH)]
        parts.append(torch.cat(every).flatten(1) * of_rows)
    g = torch.cat(parts, 1)
    share = mixture.bias / (n * mixture.bias + posterior.ridge)  # κ/(Nκ+ρ)
    total, drawn = g.sum(0), (1 - (1 - share * n) ** 0.5) / n
    g -= total * drawn  # Q G
    found = prior.center.double(), prior.scale * head, of_rows
    if formed:
        found = torch.zeros_like(rows[0]), 1.0, of_rows
    if not known:
        factor, of_prior = in_weights(g.T @ g, posterior) if d + p <= n else in_examples(g, posterior)
        return _Remaining(*found, total * share, factor, of_prior, share * posterior.noise)
    s, alike = head**2 * prior.share, angular_kernel(psi, psi)
    q = torch.eye(n).to(alike) - drawn
    kernel = g @ g.T + s * (q @ alike @ q)
    factor, of_prior = in_examples(torch.cat([g, s * q], 1), posterior, kernel)
    shift = torch.cat([total, alike.sum(0)]) * share
    constant, each = s * (1 - share**2 * float(alike.sum())), -2 * share * s
    return _Remaining(*found, shift, factor, of_prior, share * posterior.noise, constant, each)


@in_exact_mode
@torch.no_grad()
def network_of_probe(prior: Prior, system: Solution) -> nn.Module:
    """The network with the probe for its last layer, or behind it and what earlier layers give."""
    if prior.mixture.weight:
        raise InputError(
            f"merge() of a fit in which derivatives have the weight {prior.mixture.weight:g}",
            expected="weight 0: otherwise every output has weights of its own below the head",
            remedy="adapt with weight=0, or export() the linear model",
        )
    rows = system.problem.examples.rows[HEAD]
    assert rows is not None
    weight, bias = _layer(prior, prior.weights(system))
    exact = _exact(prior, system)
    network = _reading(prior, rows, exact)[0]
    old = last_linear(prior.network.function.model)[1]
    new = zero_layer(nn.Linear, weight.shape[1], weight.shape[0], like=old.weight).to(exact)
    new.weight.copy_(weight)
    new.bias.copy_(bias)
    if prior.mixture.earlier:
        return Headed(copied(network), new, old.weight.dtype).eval()
    replace_module(network, prior.network.layer, new)
    return network.eval()
