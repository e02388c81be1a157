"""Features whose products are the kernel of earlier layers, along some of the samples.

    κ(ψᵀψ') ≈ g(ψ)ᵀ g(ψ'),    g(ψ) = L⁻¹ κ(Ψψ),    L Lᵀ = κ(ΨΨᵀ) + εI

with Ψ the ψ of M samples, the *landmarks* (Williams and Seeger, NIPS 2000). Everything that was said of N
samples by a kernel (N, N) is then said by a matrix (M, M), at N M² operations in place of N³/3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import normalize

from linnet.linalg.factorize import cholesky
from linnet.linear.features import angular_kernel
from linnet.tree import node

# More samples than this are fitted in weights. At 8,000 samples of three sets 4,096 landmarks were right as
# often as the kernel of all to 0.1 to 0.3 points, 2,048 to 0.2 to 1.0 (docs/results/adapt.md). As many random
# ReLU features were behind landmarks in trials.
MANY = 10_000
LANDMARKS = 4096
# ε: rounding of ψ in float32 is 6e-8 of an entry of κ, which L⁻¹ makes up to 1/√ε times as large
ROUNDING = 1e-6


@node()
@dataclass(frozen=True, eq=False)
class Landmarks:
    """Samples along which the kernel of earlier layers is taken."""

    psi: Tensor  # Ψ, (M, E)

    @classmethod
    def of(cls, psi: Tensor) -> Landmarks:
        """Those of samples with features ψ (M, E)."""
        return cls(normalize(psi, dim=1))  # of a network in half precision their lengths are rounded

    @cached_property
    def root(self) -> Tensor:
        """L⁻ᵀ, (M, M)."""
        kernel = angular_kernel(self.psi, self.psi)
        kernel.diagonal().add_(ROUNDING)
        factor = cholesky(kernel, "kernel of earlier layers")
        eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        found: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False).T
        return found

    def __call__(self, psi: Tensor) -> Tensor:
        """The features g(ψ), (N, M)."""
        # psi (N, E)
        return angular_kernel(normalize(psi, dim=1), self.psi) @ self.root
