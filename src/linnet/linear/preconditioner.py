"""Preconditioners of the linear fit by conjugate gradients, (JᵀJ + ρI) δ = Jᵀr.

    "nystrom"                        the largest eigenvalues of JᵀJ, from its product with random vectors
    "ekfac", "kfac", "diagonal"      (G̃ + τI)⁻¹ with G̃ ≈ JᵀJ the curvature of the frozen network under a
                                     Gaussian likelihood of variance 1, and τ = ρ + tr G̃ / P

JᵀJ has few large eigenvalues and many that are hardly above zero, N·C of them at the most. Nyström takes the
large ones away. The curvatures have full rank: they lift directions in which JᵀJ + ρI is just ρI, which is
why τ is more than ρ and why they are never chosen unasked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.engine import Request, by_structure, layers_of
from linnet.curvatures.expectation import Expectation
from linnet.curvatures.stream import Batch, Batches
from linnet.errors import InputError
from linnet.likelihoods.gaussian import Gaussian
from linnet.linalg.operator import LinearOperator
from linnet.linear.problem import Memory
from linnet.solvers.nystrom import nystrom_preconditioner
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.functional import Functional
from linnet.tangent.jacobian import NormalOperator

NAMES = ("auto", "none", "nystrom", "ekfac", "kfac", "diagonal")
RANK = 50  # of Nyström, where none is requested
TRIAL = RANK // 2  # steps without a preconditioner, before one is made that costs as much as RANK steps
FEW = 2 * RANK  # unknowns up to which conjugate gradients end soon anyway


def check_preconditioner(preconditioner: Any) -> None:
    """Raise unless this is a preconditioner.

    Args:
        preconditioner: A name, an operator or ``None``.

    Raises:
        InputError: If it is something else.

    Example:
        >>> check_preconditioner("ekfac")
    """
    known = preconditioner in NAMES if isinstance(preconditioner, str) else True
    if not known or not isinstance(preconditioner, str | LinearOperator | None):
        raise InputError(
            f"preconditioner={preconditioner!r}",
            expected=", ".join(f'"{name}"' for name in NAMES) + ", Nystrom(rank), an operator or None",
            remedy="leave preconditioner= out to have it chosen",
        )


def preconditioner_bytes(function: Functional, x: Inputs, name: str, rank: int) -> int:
    """Bytes of a preconditioner, those of its making included.

    Args:
        function: The network.
        x: Training examples.
        name: One of ``"auto"``, ``"none"``, ``"nystrom"``, ``"ekfac"``, ``"kfac"`` and ``"diagonal"``.
        rank: Rank of Nyström; 0 for the usual one.

    Returns:
        The bytes.
    """
    p = function.space.dim
    if name == "none":
        return 0
    if name in ("auto", "nystrom"):  # Ω, JᵀJ Ω, its triangular solve, U
        return 4 * (rank or min(RANK, p)) * p * function.dtype.itemsize
    numbers = 2 * p  # eigenvalues, and their inverse
    if name != "diagonal":
        layers = layers_of(function, Batch(0, x, None))
        # factors and their eigenvectors
        numbers += sum(2 * a.groups * (a.matrix[0] ** 2 + a.matrix[1] ** 2) for a in layers if a.factored)
    return numbers * max(4, function.dtype.itemsize)


def make_preconditioner(
    name: str, normal: NormalOperator, outputs: int, ridge: float, rank: int = 0, lifted: bool = True
) -> LinearOperator | None:
    """An approximation of (JᵀJ + ρI)⁻¹, up to a factor.

    Args:
        name: ``"none"``, ``"nystrom"``, ``"ekfac"``, ``"kfac"`` or ``"diagonal"``.
        normal: JᵀJ.
        outputs: C.
        ridge: ρ.
        rank: Rank of Nyström; 0 for the usual one.
        lifted: Whether a curvature is damped by τ; ``False`` for ρ alone, the inverse that it stands for.

    Returns:
        The operator (P x P), ``None`` for none.

    Source:
        George et al. 2018 (EKFAC); Frangella, Tropp and Udell 2023 (Nyström).
    """
    jacobian = normal.jacobian
    function, p = jacobian.function, jacobian.shape[1]
    if name == "none":
        return None
    if name == "nystrom":
        generator = torch.Generator(device=function.device).manual_seed(0)
        return nystrom_preconditioner(normal, ridge, rank or min(RANK, *jacobian.shape), generator)
    curvature = frozen_curvature(function, jacobian.x, name, Expectation(Gaussian(variance=1.0)))
    # τ = ρ + tr G̃ / P
    tau = ridge + float(curvature.trace()) / p if lifted else ridge
    return Cast(curvature.damped(tau).inverse(), function.dtype)


def frozen_curvature(
    function: Functional, x: Inputs, structure: str, expectation: Expectation, memory: Memory = None
) -> Curvature:
    """G̃ ≈ JᵀJ of the frozen network, which takes no targets.

    Args:
        function: The network.
        x: N examples.
        structure: "diagonal", "kfac" or "ekfac".
        expectation: Of a Gaussian likelihood.
        memory: Budget.

    Returns:
        The curvature.
    """
    own = function.check_runs(take(x, slice(0, 1))).shape[1:]
    zeros = torch.zeros(batch_size(x), *own, dtype=function.dtype, device=function.device)
    batches = Batches((x, zeros), function.device)
    (found,) = by_structure(function, batches, Request(expectation, memory=memory), [(structure, structure)])
    return found


class Cast(LinearOperator):
    """A symmetric operator for vectors of another type."""

    def __init__(self, operator: LinearOperator, dtype: torch.dtype) -> None:
        self.operator, self.dtype = operator, dtype
        self.shape, self.device, self.space = operator.shape, operator.device, operator.space

    def mm(self, v: Tensor) -> Tensor:
        """The product, in the operator's own type."""
        return self.operator.mm(v.to(self.operator.dtype)).to(self.dtype)

    @property
    def T(self) -> LinearOperator:
        """Itself."""
        return self
