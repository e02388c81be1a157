"""Predictions of a tangent Gaussian process that are differentiable in x.

With R = J(x) and S = λ Cov[δ], the covariance R S Rᵀ and its derivative are those of

    R W + Wᵀ Rᵀ − (R W)ᵒ,        W = (S Rᵀ)ᵒ

where ᵒ marks what is held constant: S is symmetric, so d(R S Rᵀ) = dR W + Wᵀ dRᵀ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.linear.system import System
from linnet.tangent.batch import Inputs, split
from linnet.tangent.functional import Functional
from linnet.tangent.modes import differentiable_kernels


def differentiable_moments(
    system: System, x: Inputs, joint: bool, centered: bool = True
) -> tuple[Tensor, Tensor]:
    """The posterior mean and λ times the covariance, differentiable once in x, (T, C)."""
    # Costs one backward pass with its graph for each example and output.
    function = system.function
    outputs, rows = _rows(function, x)
    n, c = outputs.shape
    mean = (rows @ system.delta).view(n, c) + (outputs if centered else 0.0)
    held = system.spread(rows.detach().T.contiguous())  # W, (P, T·C)
    if joint:
        product = rows @ held
        return mean, (product + product.T - product.detach()).view(n, c, n, c)
    own = rows.view(n, c, -1) @ held.T.reshape(n, c, -1).mT
    return mean, own + own.mT - own.detach()


def _rows(function: Functional, x: Inputs) -> tuple[Tensor, Tensor]:
    """f₀(x) (T, C) and J(x) (T·C, P), both with their history."""
    outputs, rows = [], []
    with torch.enable_grad(), differentiable_kernels(function.recurrent):
        for part in split(x, 1):
            leaves = {name: t.detach().requires_grad_() for name, t in function.theta.items()}
            value = function.flat(leaves, part)[0]
            outputs.append(value)
            for one in value:
                grads = torch.autograd.grad(one, list(leaves.values()), create_graph=True, allow_unused=True)
                pairs = zip(grads, leaves.values(), strict=True)
                rows.append(
                    torch.cat([(torch.zeros_like(t) if g is None else g).flatten() for g, t in pairs])
                )
    return torch.stack(outputs), torch.stack(rows)
