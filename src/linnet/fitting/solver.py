"""Solvers of a fit and their settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from linnet.curvatures.curvature import Curvature
from linnet.errors import InputError
from linnet.linalg.operator import LinearOperator
from linnet.linear.iterative import CGSettings
from linnet.linear.newton import STEPS
from linnet.linear.preconditioner import check_preconditioner
from linnet.params import choice, integer, path, seed


@dataclass(frozen=True)
class Dual:
    """The N·C × N·C kernel, formed and decomposed: every ridge at once, exact.

    Args:
        file: A ``.npy`` file for the kernel. An interrupted fit resumes from it, and a finished file of the
            same weights, examples and settings is taken as it is; any other is refused.
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
    """A preconditioner that removes the largest eigenvalues of JᵀJ.

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


BASES = ("ekfac", "kfac", "diagonal")


@dataclass(frozen=True)
class Sketch:
    """D directions of the weights, the leading eigenvectors of a curvature: for many examples and weights.

    Everything is exact for the model that moves along these directions; the fit says what share of the
    tangent kernel's trace they keep. Variances are those of this model, at most those of all weights
    (:func:`linnet.audit.sketch_error` bounds them from above). Time and memory grow linearly with the number
    of examples.

    Args:
        dim: D, at most.
        basis: The curvature whose eigenvectors are taken: ``"ekfac"``, ``"kfac"``, ``"diagonal"``, or a
            curvature of the same network.
        examples: Training examples that the curvature is summed over.
        seed: Of the examples that are taken.

    Raises:
        InputError: If an argument has a value that cannot be.

    Example:
        >>> Sketch(dim=512).basis
        'ekfac'
    """

    dim: int = 2048
    basis: str | Curvature = "ekfac"
    examples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise on values that cannot be."""
        integer("dim", self.dim)
        if not isinstance(self.basis, Curvature):
            choice("basis", self.basis, BASES, 'pass basis="ekfac" if unsure')
        integer("examples", self.examples)
        seed("seed", self.seed)


@dataclass(frozen=True)
class Shared:
    """One N × N kernel for all C outputs, the mean over a few random combinations of them: for many outputs.

    The fit is exact for this kernel, in which every output has weights of its own; the fit
    says how far the kernel is from that of each output.

    Args:
        combinations: M; all outputs where there are no more.
        seed: Of the combinations.

    Raises:
        InputError: If an argument has a value that cannot be.

    Source:
        Mohamadi, Bae and Sutherland 2023; Novak, Sohl-Dickstein and Schoenholz 2022.

    Example:
        >>> Shared(combinations=2).seed
        0
    """

    combinations: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise on values that cannot be."""
        integer("combinations", self.combinations)
        seed("seed", self.seed)


@dataclass(frozen=True)
class CG:
    """Conjugate gradients in the weights, matrix-free: no kernel is formed.

    Args:
        tolerance: Relative residual at which they stop; for the cross-entropy, the gradient relative to that
            at δ = 0 at which Newton's method does.
        max_steps: Largest number of their steps.
        preconditioner: ``"nystrom"``, ``Nystrom(rank)``, ``"ekfac"``, ``"kfac"``, ``"diagonal"``, ``"none"``
            or ``None``, ``Sketch(dim)``, whose solution is also the start, or any symmetric positive definite
            operator that approximates (JᵀJ + ρI)⁻¹.
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
    preconditioner: str | Nystrom | Sketch | LinearOperator | None = "auto"

    def __post_init__(self) -> None:
        """Raise on values that cannot be."""
        if not isinstance(self.preconditioner, Nystrom | Sketch):
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


Solver = str | Dual | CG | SGD | Sketch | Shared


@dataclass(frozen=True, eq=False)
class Solving:
    """A solver as a fit takes it."""

    name: str  # "auto", "dual", "shared", "primal", "sketch", "cg" or "sgd"
    # how conjugate or stochastic gradients iterate, or how many steps Newton's method takes
    settings: CGSettings
    operator: LinearOperator | None = None  # A preconditioner of the user's own
    file: str | None = None  # file of the kernel
    sketch: Sketch | None = None  # settings of a sketch
    deflating: Sketch | None = None  # settings of a sketch that conjugate gradients are preconditioned by
    shared: Shared | None = None  # settings of one kernel for all outputs

    def finer(self) -> Solving:
        """The same to a smaller tolerance, for a network in another type."""
        return replace(self, settings=self.settings.finer(), operator=None, file=None)

    @classmethod
    def of(cls, solver: Any) -> Solving:
        """From what a user passed."""
        if isinstance(solver, str):
            named: dict[str, Solver] = {
                "dual": Dual(), "shared": Shared(), "cg": CG(), "sgd": SGD(), "sketch": Sketch()
            }  # fmt: skip
            solver = named.get(solver, solver)
        if isinstance(solver, Dual):
            return cls(
                "dual",
                CGSettings(max_steps=solver.max_steps),
                file=None if solver.file is None else str(solver.file),
            )
        if isinstance(solver, Sketch):
            return cls("sketch", *_settings(CG()), sketch=solver)
        if isinstance(solver, Shared):
            return cls("shared", *_settings(CG()), shared=solver)
        if isinstance(solver, str) and solver in ("auto", "primal"):
            return cls(solver, *_settings(CG()))
        if isinstance(solver, CG | SGD):
            name, given = "sgd" if isinstance(solver, SGD) else "cg", solver.preconditioner
            return cls(name, *_settings(solver), deflating=given if isinstance(given, Sketch) else None)
        raise InputError(
            f"solver={solver!r}",
            expected='"auto", "dual", "shared", "primal", "sketch", "cg", "sgd", or linnet.fitting.Dual(), '
            ".Shared(), .Sketch(), .CG() or .SGD()",
            remedy='pass solver="auto" to have it chosen',
        )


def _settings(asked: CG | SGD) -> tuple[CGSettings, LinearOperator | None]:
    """Settings of the iterations, and an operator of the user's own."""
    given, rank = asked.preconditioner, 0
    operator = given if isinstance(given, LinearOperator) else None
    kind = "given" if isinstance(given, LinearOperator | Sketch) else "none"
    if isinstance(given, Nystrom):
        kind, rank = "nystrom", given.rank
    elif isinstance(given, str):
        kind = "kfac" if isinstance(asked, SGD) and given == "auto" else given
    return CGSettings(asked.tolerance, asked.max_steps, rank, preconditioner=kind), operator
