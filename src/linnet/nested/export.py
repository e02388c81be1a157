"""An adapted network as a plain module.

    f_c(x) = φ(x)ᵀ W_c + b_c + Σ_h r_hᵀ ∂φ(x) δ_hc        (``linear/features.py``)

A probe (w = 0) is a linear layer, with its exact variance. Otherwise the module holds H·C directions of the
lower layers, and differentiates along each.

Its variance takes the rows J_h(x) of every example. With g = (√((1−w)/m_head) φ̃, √(w/(H m_body)) J_1, …, J_H)
the features beside the intercept, whose prior variance is κ, and s = Σᵢ g(xᵢ) over the N training examples,

    Var f(x) = σ²κ/(Nκ+ρ) + σ² g̃ᵀ (GᵀQ²G + ρI)⁻¹ g̃,   g̃ = g − s κ/(Nκ+ρ),   Q² = I − κ/(Nκ+ρ) 11ᵀ

(the intercept eliminated, so that its large variance is nowhere the difference of larger numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from linnet.errors import InputError
from linnet.fitting.arguments import BATCH
from linnet.fitting.export import (
    Affine,
    ExportedPosterior,
    HeadOutputs,
    OutputDirections,
    covariance_roots,
    held_by_factor,
    in_examples,
    in_weights,
)
from linnet.fitting.last_layer import bared, last_linear, replace_module, zero_layer
from linnet.linear.kernel_system import KernelSystem
from linnet.memory import Plan, parse_bytes, require
from linnet.nested.features import HEAD, Prior
from linnet.nested.search import BIAS
from linnet.tangent.batch import split
from linnet.tangent.functional import Functional
from linnet.tangent.graph import Prototype, Traced, plain_module
from linnet.tangent.graph_rows import module_with_rows
from linnet.tangent.jacobian import jacobian
from linnet.tangent.modes import in_exact_mode


class _Remaining(NamedTuple):
    """The posterior of the features beside the intercept, and what the intercept adds."""

    center: Tensor  # of φ, (D,)
    scales: tuple[float, float]  # √((1−w)/m_head) and √(w/(H m_body))
    shift: Tensor  # s κ/(Nκ+ρ), (D + H·P,)
    factor: Tensor  # of the posterior, (D + H·P, ·), as ``fitting.export`` has it
    prior: float  # σ²/ρ where the factor is to be taken from it, 0 otherwise
    least: float  # σ²κ/(Nκ+ρ)

    def features(self, phi: Tensor, j: Tensor) -> Tensor:
        """g, (N, D + H·P), from φ (N, D) and J (N, H, P)."""
        head, body = self.scales
        return torch.cat([(phi - self.center) * head, j.flatten(1) * body], 1)


class _WithVariance(nn.Module):
    """The layer on φ, the lower layers' part from their rows, and the variance of every output."""

    # layer (C, D), delta (H·P, C)

    weight: Tensor
    bias: Tensor
    delta: Tensor  # δ of every head, (H·P, C)

    def __init__(
        self, layer: tuple[Tensor, Tensor], delta: Tensor, rest: _Remaining, kind: torch.dtype
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
        # phi (N, D), rows (N, H, *shape)
        rest = self.rest
        j = torch.cat([row.flatten(2) for row in rows], 2)
        mean = nn.functional.linear(phi, self.weight, self.bias) + j.flatten(1) @ self.delta
        g = rest.features(phi.to(rest.factor), j.to(rest.factor)) - rest.shift
        held = (g @ rest.factor).square().sum(1)
        variance = (rest.prior * g.square().sum(1) - held).clamp_min(0) if rest.prior else held
        each = (variance + rest.least).to(mean.dtype)
        return mean, each[:, None].expand(mean.shape)


@in_exact_mode
@torch.no_grad()
def exported_nested(
    prior: Prior, system: KernelSystem, like: Prototype, noise: float | None, kind: torch.dtype | None
) -> Traced:
    """An adapted network as a plain module."""
    function, problem = prior.network.function, system.problem
    train, phi, basis = problem.x, problem.examples.rows[HEAD], problem.basis
    assert phi is not None
    remedies = [
        "adapt with weight=0, whose module is a network with a new head",
        "fit with linnet.fit, which has one direction for all outputs",
    ]
    require(basis.plan(system.c, system.memory, ["the same in the module"]), remedies)
    found = basis.weights(problem.examples, system.beta.double(), system.memory)
    weight, bias = found.layers[0][1].to(function.dtype), found.bias.to(function.dtype)
    network = bared(function.model)
    if prior.mixture.weight == 0:
        roots = shape = None
        if noise is not None:
            shape = Affine(prior.center.double(), prior.mixture.head**-0.5, BIAS**0.5)
            psi = torch.cat([phi * shape.scale, torch.full_like(phi[:, :1], shape.constant)], 1)
            kind = kind or function.dtype
            roots = covariance_roots(psi, ExportedPosterior(train, system.ridge, noise)).to(kind)
            shape = shape.to(kind)
        return plain_module(network, [], HeadOutputs(weight, bias, roots, shape), like, function.output)
    heads = last_linear(function.model)[1].weight.detach()
    if noise is not None:
        rest = _remaining(prior, phi, ExportedPosterior(train, system.ridge, noise, memory=system.memory))
        delta = found.directions[0].values.flatten(0, 1)
        finish = _WithVariance((weight, bias), delta, rest, kind or function.dtype)
        return module_with_rows(Functional(network, function.names, function.output), finish, like, heads)
    return plain_module(
        network,
        found.directions[0].by_output(),
        OutputDirections(heads, (weight, bias)),
        like,
        function.output,
    )


def _remaining(prior: Prior, phi: Tensor, posterior: ExportedPosterior) -> _Remaining:
    """The posterior of the features beside the intercept."""
    function, h, mixture = prior.network.function, prior.network.heads, prior.mixture
    (n, d), p = phi.shape, h * function.space.dim
    what = f"variance of {d} features and {h} heads on {function.space.dim} weights, {n} examples"
    items = (*held_by_factor(d + p, n, h), ("training rows", 8 * n * (d + p)))
    remedies = [
        "adapt with weight=0, whose variance takes the features alone",
        "export without variance=, and keep the fit in linnet for it",
    ]
    require(Plan(what, parse_bytes(posterior.memory, function.device), items), remedies)
    scales = ((1 - mixture.weight) / mixture.head) ** 0.5, (mixture.weight / (h * mixture.body)) ** 0.5
    rows = [jacobian(function, part, posterior.memory).double() for part in split(posterior.x, BATCH)]
    share = BIAS / (n * BIAS + posterior.ridge)  # κ/(Nκ+ρ)
    least = share * posterior.noise
    rest = _Remaining(prior.center.double(), scales, phi.new_zeros(()), phi.new_zeros(()), 0.0, least)
    g = rest.features(phi + rest.center, torch.cat(rows))
    total = g.sum(0)
    g -= total * ((1 - (1 - share * n) ** 0.5) / n)  # Q G
    found = in_weights(g.T @ g, posterior) if d + p <= n else in_examples(g, posterior)
    return rest._replace(shift=total * share, factor=found[0], prior=found[1])


@in_exact_mode
@torch.no_grad()
def network_of_probe(prior: Prior, system: KernelSystem) -> nn.Module:
    """The network with the probe for its last layer."""
    if prior.mixture.weight:
        raise InputError(
            f"merge() of a fit in which the lower layers have the weight {prior.mixture.weight:g}",
            expected="weight 0: otherwise every output has weights of its own below the head",
            remedy="adapt with weight=0, or export() the linear model",
        )
    found = system.problem.basis.weights(system.problem.examples, system.beta.double())
    network, weight = bared(prior.network.function.model), found.layers[0][1]
    name, old = last_linear(network)
    new = zero_layer(nn.Linear, weight.shape[1], weight.shape[0], like=old.weight)
    new.weight.copy_(weight)
    new.bias.copy_(found.bias)
    replace_module(network, name, new)
    return network.eval()
