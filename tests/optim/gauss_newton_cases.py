"""Networks, data and dense oracles for the Gauss-Newton optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linnet.likelihoods import Categorical, Gaussian
from linnet.optim.gauss_newton import GaussNewton


def mlp(seed: int = 0, outputs: int = 3) -> nn.Sequential:
    """A small chain, in double precision."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def classes(n: int = 20, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)


def values(n: int = 20, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, 4, generator=g, dtype=torch.float64),
        torch.randn(n, 3, generator=g, dtype=torch.float64),
    )


def flat(net: nn.Module) -> Tensor:
    """θ."""
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def weight_of(net: nn.Module, name: str) -> Tensor:
    """The weight of a layer, sharing its memory."""
    return net.get_parameter(f"{name}.weight").detach()


def gradient_of(net: nn.Module, x: Tensor, y: Tensor, decay: float = 0.0) -> Tensor:
    """∇E of the mean cross-entropy, by autograd."""
    grads = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    return torch.cat([g.reshape(-1) for g in grads]) + decay * flat(net)


def dense_gauss_newton(net: nn.Module, x: Tensor) -> Tensor:
    """1/N Σ JᵀΛJ of a classifier, row by row."""
    f = net(x)
    rows = [
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(v, list(net.parameters()), retain_graph=True)])
        for v in f.reshape(-1)
    ]
    J = torch.stack(rows).view(*f.shape, -1)
    p = f.detach().softmax(1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.einsum("ncp,ncd,ndq->pq", J, hessian, J) / len(x)


def classifier(net: nn.Module, **options: Any) -> GaussNewton:
    """An optimizer for cross-entropy."""
    return GaussNewton(net, Categorical(), **options)


def regressor(net: nn.Module, **options: Any) -> GaussNewton:
    """An optimizer for ½ squared error."""
    return GaussNewton(net, Gaussian(), **options)
