"""Curvature matrices at each output: checks and repair of positive semi-definiteness."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg.factorize import eigh
from linnet.params import choice

Psd = Literal["raise", "clip"]


def require_psd(psd: Any) -> Psd:
    """The way to treat indefinite matrices as given, or an error when it is none."""
    choice(
        "psd", psd, ("raise", "clip"), 'pass psd="clip" to keep the positive part of an indefinite Hessian'
    )
    return "clip" if psd == "clip" else "raise"


def require_semidefinite(smallest: Tensor, largest: Tensor, name: str) -> None:
    """Check that no eigenvalue is more negative than rounding explains."""
    # smallest (N, T)
    if smallest.numel() == 0:
        return
    eps = torch.finfo(smallest.dtype).eps
    # curvatures below that of one nat and unit outputs by a factor of eps are rounding, too
    tolerance = 1000 * eps * float(largest.max()) + 10 * eps
    if float(smallest.min()) < -tolerance:
        example, position = (smallest == smallest.min()).nonzero()[0].tolist()[:2]
        raise NumericalError(
            f"the Hessian of {name} has the eigenvalue {float(smallest.min()):.4g} at example {example} "
            f"of the batch, position {position}",
            expected="a positive semi-definite Hessian, which alone has a square root",
            remedy='pass psd="clip" to keep its positive part, or use the Fisher information',
        )


def positive_root(matrix: Tensor, psd: Psd, name: str) -> Tensor:
    """R with R Rᵀ = M, or its positive part, (N, T, C, C)."""
    # matrix (N, T, C, C)
    values, vectors = eigh(matrix, f"the Hessian of {name}")
    if psd == "raise":
        require_semidefinite(values[..., 0], values.abs().amax(-1), name)
    # Q diag(√λ), λ ≥ 0
    return vectors * values.clamp_min(0).sqrt()[..., None, :]
