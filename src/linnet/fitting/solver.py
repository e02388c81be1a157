"""Solvers of a fit, their settings, and which one is taken, by predicted operations and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from linnet.curvatures.curvature import Curvature
from linnet.errors import InputError
from linnet.linalg.operator import LinearOperator
from linnet.linear.formed_rows import NETWORK_PENALTY, forward_operations, rows_bytes
from linnet.linear.iterative import CGSettings
from linnet.linear.newton import STEPS
from linnet.linear.preconditioner import check_preconditioner, preconditioner_bytes
from linnet.linear.problem import Memory
from linnet.memory import Plan, format_bytes, parse_bytes, require
from linnet.params import choice, integer, optional, path, seed
from linnet.tangent.batch import Inputs, batch_size
from linnet.tangent.functional import Functional, tensors_by_name
from linnet.tangent.gram import GramTask, plan_gram


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
        optional(path, "file", self.file)
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


# -- choice ----------------------------------------------------------------------------------------

SMALLER = ["use fewer parameters with params=", "raise memory="]
CG_STEPS = 300  # steps assumed when conjugate gradients are planned
NEWTON = 8  # steps of Newton's method, as most fits of classes take
EIGEN = 9.0  # operations of an eigendecomposition with vectors, in n³
RIDGES = 37  # of a path, each of which takes a leave-one-out of every example
DIMS = (2048, 1024, 512, 256)  # directions of a sketch that nobody asked for: the most that fit the memory


@dataclass(frozen=True)
class Size:
    """Size of the problem of a fit."""

    function: Functional  # the network
    x: Inputs  # N examples
    c: int  # C
    loss: str  # "squared" or "cross-entropy"
    searched: bool  # whether a criterion chooses the ridge
    memory: Memory  # budget

    @property
    def budget(self) -> int:
        """Bytes."""
        return parse_bytes(self.memory, self.function.device)

    def dual_memory(self) -> Plan:
        """Bytes of a dual fit: the kernel while it is formed, then its factorization."""
        n = batch_size(self.x) * self.c
        forming = plan_gram(GramTask(self.function, self.x, None, "full"), self.memory).memory
        square = 8 * n * n
        solving = factorized("kernel", n, self.searched)
        if self.loss == "cross-entropy":
            solving[1:] = [("kernel times the root of the curvature, with workspace", 2 * square),
                           ("ridge + curvature, its factor and inverse", 3 * square)]  # fmt: skip
        return _larger(f"dual fit of {n} equations", forming, solving)

    def shared_memory(self) -> Plan:
        """Bytes of a fit by one kernel for all outputs, of which the function has a few combinations."""
        n = batch_size(self.x)
        forming = plan_gram(GramTask(self.function, self.x, None, "trace"), self.memory).memory
        solving = factorized("kernel", n, self.searched)
        return _larger(f"fit of {n} equations that {self.c} outputs share", forming, solving)

    def primal_memory(self) -> Plan:
        """Bytes of a primal fit: the P × P matrix and its factorization."""
        searched = self.searched and self.loss == "squared"  # others have no eigenvectors
        items = factorized("Fisher matrix", self.function.space.dim, searched)
        if self.loss == "cross-entropy":
            of_path = 2 if self.searched else 0  # the best solution, and the one before
            count = 2 + of_path  # and the root of the inverse, and JᵀJ
            items.append(("other matrices", count * 8 * self.function.space.dim**2))
        items.append(("rows of the examples", self._rows(self.function.space.dim)))
        return Plan(f"primal fit of {self.function.space.dim} weights", self.budget, tuple(items))

    def sketch_memory(self, dim: int) -> Plan:
        """Bytes of a sketched fit: the D × D matrix and its factorization, whatever the ridge."""
        items = factorized("matrix of the sketch", min(dim, self.function.space.dim), searched=True)
        items.append(("rows of the examples", self._rows(dim)))
        items.append(("the network along directions", sketch_bytes(self.function)))
        space = self.function.space  # δ, and two gradients of the largest parameter, which the checks hold
        numbers = space.dim + 2 * max(shape.numel() for shape in space.shapes.values())
        items.append(("displacement and checks", numbers * self.function.dtype.itemsize))
        return Plan(f"sketched fit of {dim} directions", self.budget, tuple(items))

    def _rows(self, width: int) -> int:
        """Bytes of the rows of J of some examples."""
        return rows_bytes(batch_size(self.x) * self.c, width, self.function.dtype.itemsize, self.budget)

    def iterated_memory(self, settings: CGSettings) -> Plan:
        """Bytes of conjugate gradients, with a preconditioner if one is requested."""
        return _iterated_memory(self.function, self.x, settings, self.budget)

    def default_dim(self) -> int | None:
        """Directions of a sketch that fits the memory; ``None`` where there is none."""
        fitting = (dim for dim in DIMS if self.sketch_memory(dim).peak <= self.budget)
        return next((dim for dim in fitting if dim < self.function.space.dim), None)

    @property
    def equations(self) -> int:
        """N·C."""
        return batch_size(self.x) * self.c

    @property
    def forward(self) -> float:
        """Operations of a forward pass over the examples; a JVP costs two of them, a VJP three."""
        return NETWORK_PENALTY * batch_size(self.x) * forward_operations(self.function, self.x)

    @property
    def derivatives(self) -> float:
        """Operations of all rows of J."""
        return self.forward * (1 + 2 * self.c)

    @property
    def kernel_operations(self) -> float:
        """Operations of K = JJᵀ: half of 2 (N·C)² P, symmetric."""
        return self.derivatives + float(self.equations) ** 2 * self.function.space.dim

    @property
    def fisher_operations(self) -> float:
        """Operations of JᵀJ."""
        return self.derivatives + 2.0 * self.equations * self.function.space.dim**2

    def operations(self) -> dict[str, float]:
        """Predicted operations of each solver."""
        m, p = self.equations, self.function.space.dim
        found = {
            "dual": self.kernel_operations + 2 * float(m) ** 3 / 3,
            # the first leave-one-out or influence takes N·C solves
            "cg": CG_STEPS * (5 * self.forward + 4.0 * float(m) ** 2 * p),
            "primal": self.fisher_operations + 2 * float(p) ** 3 / 3,
        }
        if self.loss == "cross-entropy":  # a matrix and a factor of each step
            seen = m * max(self.c - 1, 1) / self.c  # outputs, less the one that softmax does not see
            found["dual"] = self.kernel_operations + NEWTON * (4.0 * seen * m * self.c + seen**3 / 3)
            found["dual"] += 2 * seen**3 / 3
            found["primal"] = self.derivatives + NEWTON * (seen * p**2 + p**3 / 3) + 2.0 * m * p**2
        elif self.searched:
            found["dual"] += EIGEN * float(m) ** 3 + RIDGES * 2.0 * (self.c + 1) * float(m) ** 2
            found["primal"] += self.derivatives + EIGEN * float(p) ** 3 + 2.0 * m * p**2
            found["primal"] += RIDGES * 2.0 * (self.c + 1) * m * p
        return found


def sketch_bytes(function: Functional) -> int:
    """Bytes of a sketched network: the network inside, and a copy of it to differentiate."""
    return 2 * sum(t.nbytes for t in tensors_by_name(function.model).values())


def choose_solver(size: Size, asked: Solving) -> tuple[str, str]:
    """The solver, and one sentence that says why."""
    solver, settings = asked.name, asked.settings
    if solver == "dual":
        require(size.dual_memory(), ['solve matrix-free with solver="cg"', "raise memory="])
    elif solver == "primal":
        require(size.primal_memory(), ['pass solver="dual" or "cg"', *SMALLER])
    elif solver == "sketch":
        assert asked.sketch is not None
        fewer = "pass solver=linnet.fitting.Sketch(dim=...) with fewer directions"
        require(size.sketch_memory(asked.sketch.dim), [fewer, "raise memory="])
    elif solver not in ("auto", "shared"):  # whose memory depends on the combinations
        require(size.iterated_memory(settings), SMALLER)
    if solver != "auto":
        return solver, "set by the user"
    plans = {"dual": size.dual_memory(), "primal": size.primal_memory()}
    needed = format_bytes(plans["dual"].peak)
    fitting = {name: plan for name, plan in plans.items() if plan.peak <= size.budget}
    operations, smallest = size.operations(), min(plans.values(), key=lambda plan: plan.peak)
    if not fitting and size.loss == "squared" and size.default_dim():
        budget = format_bytes(size.budget)
        return "sketch", f"the exact model would need {format_bytes(smallest.peak)} of a budget of {budget}"
    if size.searched and not fitting:
        require(smallest, ['give the ridge as a number, so that solver="cg" can be used', "raise memory="])
    if not fitting:
        require(size.iterated_memory(settings), SMALLER)
        return "cg", f"the dual would need {needed} of a budget of {format_bytes(size.budget)}"
    best = min(fitting, key=lambda name: operations[name])
    taken = format_bytes(fitting[best].peak)
    if size.searched:
        what = "gives every ridge at once" if size.loss == "squared" else "is formed once for every ridge"
        if size.loss != "squared" and best == "primal":
            what = "is summed anew at every step, which is faster than the kernel"
        kind = "the kernel" if best == "dual" else "the matrix of the weights"
        return best, f"{kind} {what} ({taken})"
    counts = f"about {operations[best]:.1e} operations and {taken} against {operations['cg']:.1e}"
    if operations["cg"] < operations[best]:
        return "cg", f"faster: {best} {counts} by conjugate gradients"
    return best, f"exact and faster: {counts} by conjugate gradients"


def affordable(function: Functional, x: Inputs, settings: CGSettings, memory: Memory) -> CGSettings:
    """The settings, with no preconditioner where one may be chosen but does not fit."""
    budget = parse_bytes(memory, function.device)
    if settings.preconditioner == "auto":
        needed = preconditioner_bytes(function, x, "auto", settings.rank)
        if _iterated_memory(function, x, settings, budget).peak + needed > budget:
            return replace(settings, preconditioner="none")
    return settings


def _larger(name: str, forming: Plan, solving: list[tuple[str, int]]) -> Plan:
    """The memory of a kernel while it is formed, or of its factorization where that is more."""
    solved = Plan(name, forming.budget, tuple(solving))
    return solved if solved.peak > forming.peak else Plan(name, forming.budget, forming.items)


def factorized(name: str, size: int, searched: bool = False) -> list[tuple[str, int]]:
    """Memory of a matrix and its factorization: of one ridge, or of every one."""
    square = 8 * size**2
    items = [(f"{name} in float64", square)]
    if searched:
        return [*items, ("eigenvectors", square), ("workspace of the eigendecomposition", 3 * square)]
    return [*items, (f"{name} + ridge", square), ("factor", square)]


def _iterated_memory(function: Functional, x: Inputs, settings: CGSettings, budget: int) -> Plan:
    """Bytes of conjugate gradients and their preconditioner."""
    items = [("vectors of conjugate gradients", 8 * function.space.dim * function.dtype.itemsize)]
    if settings.preconditioner not in ("auto", "none", "given"):
        name = settings.preconditioner
        items.append((f"preconditioner {name!r}", preconditioner_bytes(function, x, name, settings.rank)))
    return Plan("fit by conjugate gradients", budget, tuple(items))
