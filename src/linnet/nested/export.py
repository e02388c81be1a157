"""An adapted network as a plain module.

    f_c(x) = φ(x)ᵀ W_c + b_c + Σ_h r_hᵀ ∂φ(x) δ_hc        (``weights.py``)

A probe (w = 0) is a linear layer, with its exact variance. Otherwise the module holds H·C directions of the
lower layers, and differentiates along each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from linnet.errors import InputError
from linnet.fitting.export import Affine, HeadOutputs, Moved, covariance_roots
from linnet.fitting.export_variance import Posterior
from linnet.fitting.last_layer import bared, last_linear, replace_module, zero_layer
from linnet.linear.dual import DualSystem
from linnet.memory import require
from linnet.nested.prior import Prior
from linnet.nested.search import BIAS
from linnet.nested.weights import Weights
from linnet.tangent.batch import Inputs
from linnet.tangent.graph import plain_module
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.sizes import Prototype, Traced


class _WithBody(nn.Module):
    """The linear layer on φ, and r_hᵀ of the tangents of φ for every output."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, heads: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.moved = Moved(heads)

    def forward(self, phi: Tensor, tangents: Sequence[Tensor]) -> Tensor:
        mean = nn.functional.linear(phi, self.weight, self.bias)
        moved: Tensor = self.moved(tangents)
        return mean + moved


@in_exact_mode
@torch.no_grad()
def exported_nested(
    prior: Prior,
    phi: Tensor,
    system: DualSystem,
    inputs: tuple[Inputs, Prototype],
    noise: float | None,
    kind: torch.dtype | None,
) -> Traced:
    """An adapted network as a plain module.

    Args:
        prior: The kernel.
        phi: φ̃ of the training examples, (N, D).
        system: The solved equations.
        inputs: Training inputs, and examples like those to come.
        noise: σ², where variances are wanted.
        kind: Type in which they are computed, if not the network's.

    Returns:
        The module.

    Raises:
        InputError: If variances are wanted and the lower layers take part.
        MemoryBudgetError: If the directions do not fit the budget.
        ModelError: If the network cannot be traced.
    """
    (train, like), function = inputs, prior.features.function
    remedies = [
        "adapt with weight=0, whose module is a network with a new head",
        "fit with linnet.fit, which has one direction for all outputs",
    ]
    require(Weights.plan(prior, system.c), remedies)
    found = Weights(prior, train, phi, system)
    weight, bias = found.weight.to(function.dtype), found.bias.to(function.dtype)
    network = bared(function.model)
    if prior.mixture.weight == 0:
        roots = shape = None
        if noise is not None:
            shape = Affine(prior.center.double(), prior.mixture.head**-0.5, BIAS**0.5)
            psi = torch.cat([phi * shape.scale, torch.full_like(phi[:, :1], shape.constant)], 1)
            kind = kind or function.dtype
            roots = covariance_roots(psi, Posterior(train, system.ridge, noise)).to(kind)
            shape = shape.to(kind)
        return plain_module(network, [], HeadOutputs(weight, bias, roots, shape), like, function.output)
    if noise is not None:
        raise InputError(
            f"variance=True of a fit in which the lower layers have the weight {prior.mixture.weight:g}",
            expected="weight 0, the linear probe, whose variance is a form of its features",
            remedy="adapt with weight=0, or keep the fit in linnet, whose predictive() has the variance",
        )
    heads = last_linear(function.model)[1].weight.detach()
    return plain_module(network, found.by_output(), _WithBody(weight, bias, heads), like, function.output)


@in_exact_mode
@torch.no_grad()
def network_of_probe(prior: Prior, train: Inputs, phi: Tensor, system: DualSystem) -> nn.Module:
    """The network with the probe for its last layer.

    Args:
        prior: The kernel, in which the lower layers have no weight.
        train: Training inputs.
        phi: φ̃ of the training examples, (N, D).
        system: The solved equations.

    Returns:
        The network in evaluation mode.

    Raises:
        InputError: If the lower layers take part.
    """
    if prior.mixture.weight:
        raise InputError(
            f"merge() of a fit in which the lower layers have the weight {prior.mixture.weight:g}",
            expected="weight 0: otherwise every output has weights of its own below the head",
            remedy="adapt with weight=0, or export() the linear model",
        )
    found = Weights(prior, train, phi, system)
    network = bared(prior.features.function.model)
    name, old = last_linear(network)
    new = zero_layer(nn.Linear, found.weight.shape[1], found.weight.shape[0], like=old.weight)
    new.weight.copy_(found.weight)
    new.bias.copy_(found.bias)
    replace_module(network, name, new)
    return network.eval()
