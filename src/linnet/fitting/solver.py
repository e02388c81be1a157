"""Solvers of a fit and their settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linnet.errors import InputError
from linnet.linalg.operator import LinearOperator
from linnet.linear.iteration import CGSettings
from linnet.linear.newton import STEPS
from linnet.linear.preconditioner import check_preconditioner
from linnet.params import integer, path


@dataclass(frozen=True)
class Dual:
    """The N·C × N·C kernel, formed and decomposed: every ridge at once, exact.

    Args:
        file: A ``.npy`` file for the kernel; an interrupted fit resumes from it.
        max_steps: Largest number of Newton steps, for the cross-entropy.

    Raises:
        InputError: If an argument has a value that cannot be.

    Example:
        >>> Dual(file="kernel.npy").max_steps
        100
    """

    file: str | Path | None = None
    max_steps: int = STEPS

    def __post_init__(self) -> None:
        """Raise on values that cannot be."""
        if self.file is not None:
            path("file", self.file)
        integer("max_steps", self.max_steps)


@dataclass(frozen=True)
class Nystrom:
    """A preconditioner that takes the largest eigenvalues of JᵀJ away.

    Args:
        rank: How many.

    Raises:
        InputError: If the rank is no positive integer.

    Source:
        Frangella, Tropp and Udell 2023.

    Example:
        >>> CG(preconditioner=Nystrom(20)).preconditioner
        Nystrom(rank=20)
    """

    rank: int

    def __post_init__(self) -> None:
        """Raise on values that cannot be."""
        integer("rank", self.rank)


@dataclass(frozen=True)
class CG:
    """Conjugate gradients in the weights, matrix-free: no kernel is formed.

    Args:
        tolerance: Relative residual at which they stop; for the cross-entropy, the gradient relative to that
            at δ = 0 at which Newton's method does.
        max_steps: Largest number of their steps.
        preconditioner: ``"nystrom"``, ``Nystrom(rank)``, ``"ekfac"``, ``"kfac"``, ``"diagonal"``, ``"none"``
            or ``None``, or any symmetric positive definite operator that approximates (JᵀJ + ρI)⁻¹.
            ``"auto"`` begins without one and takes Nyström if the end is not near. Kept for audits,
            forgetting and updates; a saved fit keeps its name, but no operator of your own.

    Raises:
        InputError: If an argument has a value that cannot be.

    Example:
        >>> CG(tolerance=1e-8).max_steps
        2000
    """

    tolerance: float = 1e-5
    max_steps: int = 2000
    preconditioner: str | Nystrom | LinearOperator | None = "auto"

    def __post_init__(self) -> None:
        """Raise on values that cannot be."""
        if not isinstance(self.preconditioner, Nystrom):
            check_preconditioner(self.preconditioner)
        CGSettings(self.tolerance, self.max_steps)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradients, to compare with: momentum 0.9, one effective learning rate, batches that grow.

    Args:
        tolerance: Relative residual at which they stop.
        max_steps: Largest number of their steps.
        preconditioner: As of conjugate gradients.

    Raises:
        InputError: If an argument has a value that cannot be.

    Source:
        Achille et al. 2021, section 3.2.

    Example:
        >>> SGD(max_steps=500).preconditioner
        'kfac'
    """

    tolerance: float = 1e-5
    max_steps: int = 2000
    preconditioner: str | Nystrom | LinearOperator | None = "kfac"

    def __post_init__(self) -> None:
        """Raise on values that cannot be."""
        CG(self.tolerance, self.max_steps, self.preconditioner)


Solver = str | Dual | CG | SGD


@dataclass(frozen=True, eq=False)
class Solving:
    """A solver as a fit takes it.

    Args:
        name: "auto", "dual", "primal", "cg" or "sgd".
        settings: How conjugate or stochastic gradients iterate, or how many steps Newton's method takes.
        operator: A preconditioner of the user's own.
        file: File of the kernel.
    """

    name: str
    settings: CGSettings
    operator: LinearOperator | None = None
    file: str | None = None

    @classmethod
    def of(cls, solver: Any) -> Solving:
        """From what a user passed.

        Args:
            solver: A name, ``Dual``, ``CG`` or ``SGD``.

        Returns:
            The same in one form.

        Raises:
            InputError: If it is something else.
        """
        if isinstance(solver, str):
            solver = {"dual": Dual(), "cg": CG(), "sgd": SGD()}.get(solver, solver)
        if isinstance(solver, Dual):
            return cls(
                "dual",
                CGSettings(max_steps=solver.max_steps),
                file=None if solver.file is None else str(solver.file),
            )
        if isinstance(solver, str) and solver in ("auto", "primal"):
            return cls(solver, *_settings(CG()))
        if isinstance(solver, CG | SGD):
            return cls("sgd" if isinstance(solver, SGD) else "cg", *_settings(solver))
        raise InputError(
            f"solver={solver!r}",
            expected='"auto", "dual", "primal", "cg", "sgd", or linnet.fitting.Dual(), .CG() or .SGD()',
            remedy='pass solver="auto" to have it chosen',
        )


def _settings(asked: CG | SGD) -> tuple[CGSettings, LinearOperator | None]:
    """Settings of the iterations, and an operator of the user's own."""
    given, rank = asked.preconditioner, 0
    operator = given if isinstance(given, LinearOperator) else None
    kind = "none" if operator is None else "given"
    if isinstance(given, Nystrom):
        kind, rank = "nystrom", given.rank
    elif isinstance(given, str):
        kind = "kfac" if isinstance(asked, SGD) and given == "auto" else given
    return CGSettings(asked.tolerance, asked.max_steps, rank, preconditioner=kind), operator
