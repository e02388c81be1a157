"""Second moments of a use's inputs and output gradients: Σ a aᵀ, Σ a and Σ g gᵀ.

Index letters as in the rules: n example, k column, s position, r group, d and c features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.curvatures.sums import second_moment
from linnet.tangent.rules import Factors


@dataclass(frozen=True, eq=False)
class InputMoment:
    """What the Kronecker factor A of a layer is made of.

    Args:
        second: Σ a aᵀ, (R, d, d).
        first: Σ a, (R, d).
        count: Number of terms.
    """

    second: Tensor
    first: Tensor
    count: float

    def hatted(self) -> Tensor:
        """Σ â âᵀ for â = [a; 1], (R, d + 1, d + 1)."""
        corner = torch.full_like(self.first[:, :1, None], self.count)
        top = torch.cat([self.second, self.first[:, :, None]], 2)
        return torch.cat([top, torch.cat([self.first[:, None], corner], 2)], 1)


def active(f: Factors) -> Tensor:
    """Positions that any column reaches, (N, R, S): the others are padding or left out of the loss."""
    return (f.g != 0).any(-1).any(0)


def input_moment(f: Factors, weight: Tensor | None = None) -> InputMoment:
    """Moments of the inputs over all positions.

    Args:
        f: Factors of one use.
        weight: Which positions count, (N, R, S); all by default.

    Returns:
        The moments.
    """
    a = f.a if weight is None else f.a * weight[..., None]
    flat = a.transpose(0, 1).flatten(1, 2)  # (R, N·S, d)
    count = float(a.shape[0] * a.shape[2]) if weight is None else float(weight[:, 0].sum())
    return InputMoment(second_moment(flat.mT), flat.sum(1), count)


def gradient_moment(f: Factors) -> Tensor:
    """Σ g gᵀ over columns and positions, (R, c, c)."""
    return second_moment(f.g.permute(2, 4, 0, 1, 3).flatten(2))


def reduced(parts: list[Factors], masked: bool) -> Factors:
    """All positions of an example as one: the mean of its inputs, the sum of its gradients.

    Args:
        parts: Factors of every use of a weight.
        masked: Whether positions that no column reaches are left out of the mean.

    Returns:
        Factors with S = 1.
    """
    weights = [active(f) if masked else torch.ones_like(f.a[..., 0]) for f in parts]
    count = sum(w.sum(-1) for w in weights)  # (N, R)
    assert isinstance(count, Tensor)
    total = sum((f.a * w[..., None]).sum(2) for f, w in zip(parts, weights, strict=True))
    assert isinstance(total, Tensor)
    mean = total / count.clamp(min=1)[..., None]
    g = torch.stack([f.g.sum(3) for f in parts]).sum(0)  # (K, N, R, c)
    return Factors(mean[:, :, None], g[:, :, :, None], parts[0].transposed)
