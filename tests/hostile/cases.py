"""The networks of the random suite, the slice of them that every run takes, and how numbers are compared."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from tests.hostile.random_networks import Network, examples, network

COUNT = 300  # networks in all
SLICE = 7  # of them in an ordinary run; the others are marked as long
SHORT = sorted(random.Random(18).sample(range(COUNT), SLICE))
EXACT = 1e-8  # share of the scale of a result that rounding in float64 may take
VARIANCE = 0.7  # of the Gaussian likelihood

every_network = pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in SHORT else (pytest.mark.long,)) for seed in range(COUNT)]
)


@cache
def drawn(seed: int) -> Network:
    """The network of a seed, which tests share and must not change."""
    return network(seed)


@contextlib.contextmanager
def untouched(net: Network) -> Iterator[Network]:
    """A network that must be the same to the bit afterwards.

    Yields:
        The network.
    """
    before = [(name, t.clone(), t.requires_grad) for name, t in net.model.state_dict(keep_vars=True).items()]
    mode = [m.training for m in net.model.modules()]
    yield net
    after = [(name, t, t.requires_grad) for name, t in net.model.state_dict(keep_vars=True).items()]
    assert [(a[0], a[2]) for a in before] == [(a[0], a[2]) for a in after]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(before, after, strict=True)), "the network was changed"
    assert mode == [m.training for m in net.model.modules()]
    assert all(p.grad is None for p in net.model.parameters())


def near(actual: Any, expected: Any, scale: float = 0.0, share: float = EXACT) -> None:
    """Equal up to a share of the largest expected entry, or of the scale of what cancels in it."""
    actual, expected = (torch.as_tensor(v, dtype=torch.float64).detach() for v in (actual, expected))
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return
    size = max(float(expected.abs().max()), scale)
    error = float((actual - expected).abs().max())
    assert error <= share * size, f"off by {error:.3g} where numbers are of size {size:.3g}"


# --- the linear model, dense ----------------------------------------------------------------------


def ridge_solution(j: Tensor, residual: Tensor, rho: float) -> Tensor:
    """δ = (JᵀJ + ρI)⁻¹ Jᵀ r by least squares, for J (N, C, P) and r (N, C)."""
    matrix, right = j.flatten(0, 1), residual.flatten()
    eye = torch.eye(matrix.shape[1], dtype=torch.float64)
    stacked = torch.cat([matrix, rho**0.5 * eye])
    padded = torch.cat([right, right.new_zeros(len(eye))])
    found: Tensor = torch.linalg.lstsq(stacked, padded[:, None], driver="gels").solution[:, 0]
    return found


def left_out(j: Tensor, residual: Tensor, rho: float) -> Iterator[Tensor]:
    """δ of each refit without one example."""
    for _, kept in examples(len(j)):
        yield ridge_solution(j[kept], residual[kept], rho)


# --- likelihoods, from their definitions ----------------------------------------------------------


def families(net: Network) -> list[str]:
    """The likelihoods that a network's outputs go with."""
    return ["gaussian", "categorical" if net.own_shape[net.axis] > 1 else "bernoulli"]


def likelihood(net: Network, family: str) -> Any:
    """One of linnet.likelihoods."""
    if family == "gaussian":
        return linnet.likelihoods.Gaussian(VARIANCE, axis=net.axis)
    named = {"categorical": linnet.likelihoods.Categorical, "bernoulli": linnet.likelihoods.Bernoulli}
    return named[family](axis=net.axis)


def labels(net: Network, family: str) -> Tensor:
    """Targets that the likelihood takes."""
    if family == "gaussian":
        return net.targets
    return net.labels if family == "categorical" else net.labels.unsqueeze(net.axis)


def nll(net: Network, family: str, f: Tensor, y: Tensor) -> Tensor:
    """−log p(y | f), summed; f in the network's own shape."""
    if family == "gaussian":
        normal = torch.distributions.Normal(f, torch.tensor(VARIANCE, dtype=f.dtype).sqrt())
        return -normal.log_prob(y).sum()
    if family == "bernoulli":
        return nn.functional.binary_cross_entropy_with_logits(f, y.to(f), reduction="sum")
    return nn.functional.cross_entropy(f.movedim(net.axis, 1), y, reduction="sum")


def output_derivatives(net: Network, family: str, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """∇ (N, C) and Λ (N, C, C) of −log p in the flattened outputs, by autograd."""
    gradients, hessians = [], []
    for i in range(len(f)):

        def loss(flat: Tensor, i: int = i) -> Tensor:
            return nll(net, family, flat.view(1, *f.shape[1:]), y[i : i + 1])

        flat = f[i].reshape(-1).clone().requires_grad_(True)
        gradients.append(torch.autograd.grad(loss(flat), flat)[0])
        hessians.append(torch.autograd.functional.hessian(loss, f[i].reshape(-1)))
    return torch.stack(gradients), torch.stack(hessians)


def gauss_newton(j: Tensor, output_hessian: Tensor) -> Tensor:
    """Σ JᵀΛJ."""
    return torch.einsum("ncp,ncd,ndq->pq", j, output_hessian, j)
