"""Draws from N(0, A⁻¹) by products with A alone: A^(−½) z ≈ ‖z‖ Q T^(−½) e₁ (Lanczos).

Maddox et al. 2021, supplements A and B. For a Krylov space of m steps the error is at most twice that of the
best polynomial of degree m − 1 for x^(−½) on the spectrum of A (Saad 1992); with A = G + λ I and G of rank r,
r + 1 steps are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg.factorize import eigh
from linnet.linalg.operator import LinearOperator
from linnet.memory import Plan, parse_bytes, require
from linnet.solvers.lanczos import tridiagonalize

FIRST = 16  # steps that are tried first
BASIS_BYTES = 512 << 20  # of the bases that are held at once


def inverse_root(
    operator: LinearOperator, z: Tensor, floor: float, tolerance: float = 1e-2, max_steps: int = 512
) -> Tensor:
    """A^(−½) z for each column, by as many Lanczos steps as it takes, (P, K)."""
    # z (P, K)
    # Steps are doubled until the last quarter of them has changed the result by less than the tolerance.
    most, one = min(max_steps, operator.shape[0]), z.shape[0] * z.element_size()
    plan = Plan(
        f"{most} Lanczos steps in {z.shape[0]} dimensions",
        parse_bytes(None, z.device),
        (("basis", (most + 1) * one),),
    )
    require(plan, ["lower max_steps= and raise prior_precision=", "select fewer parameters"])
    return _columns(operator, z, floor, tolerance, min(FIRST, most), most)


def _columns(
    operator: LinearOperator, z: Tensor, floor: float, tolerance: float, steps: int, most: int
) -> Tensor:
    """A^(−½) z, as many columns at once as there is room for, with twice the steps where these fail."""
    at_once = max(1, BASIS_BYTES // ((steps + 1) * z.shape[0] * z.element_size()))
    found = []
    for part in z.split(at_once, 1):
        process = tridiagonalize(operator, part, steps)
        t = process.matrices().double()
        whole, early = _first_column(t, floor), steps - steps // 4
        change = whole - torch.nn.functional.pad(_first_column(t[:, :early, :early], floor), (0, steps // 4))
        error = float((change.norm(dim=1) / whole.norm(dim=1)).max())
        if error <= tolerance or steps == operator.shape[0]:
            found.append(torch.einsum("mpk,km->pk", process.basis, whole.to(z)) * part.norm(dim=0))
        elif steps < most:
            del process
            found.append(_columns(operator, part, floor, tolerance, min(2 * steps, most), most))
        else:
            raise NumericalError(
                f"{steps} Lanczos steps leave the relative error {error:.2g} in draws from the posterior",
                expected=f"at most {tolerance:.2g}",
                remedy="raise max_steps=, or raise prior_precision=",
            )
    return torch.cat(found, 1)


def _first_column(t: Tensor, floor: float) -> Tensor:
    """T^(−½) e₁ of every process, (K, m); Ritz values are not below the eigenvalues, up to rounding."""
    values, vectors = eigh(t, "the projected operator")
    first: Tensor = torch.einsum("kij,kj,kj->ki", vectors, values.clamp_min(floor).rsqrt(), vectors[:, 0])
    return first
