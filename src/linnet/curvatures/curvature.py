"""The curvature of a network over a data set, as one operator made of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linnet import tree
from linnet.curvatures.expectation import Expectation
from linnet.curvatures.layers import Part, in_eigenbases
from linnet.curvatures.variance import output_covariance, output_variance
from linnet.errors import InputError, NumericalError
from linnet.files import save
from linnet.linalg.kronecker import Kronecker, factored_damping
from linnet.linalg.operator import LinearOperator, require_fit
from linnet.linalg.structured import StructuredOperator
from linnet.params import instance
from linnet.tangent.batch import Inputs
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.matching import given_network, identity, matching_function, require_witness, witness
from linnet.tangent.modes import in_exact_mode
from linnet.tree import node

KIND = "curvature"
LEFT_OVER = 0.1  # share of the right-hand side up to which a solution is one


@node()
@dataclass(frozen=True)
class Provenance:
    """Provenance of a curvature."""

    structure: str  # what was requested
    matrix: str  # "gauss-newton", "fisher" or "hessian"
    expectation: str  # how Λ was taken
    sharing: str  # "expand" or "reduce"
    likelihood: Mapping[str, Any]  # the likelihood, described
    examples: float  # N, the number of examples summed over
    samples: int = 1  # random columns for each example, where there are any
    # why Λ was taken so, where the choice was left to `expectation="auto"` and fell on samples
    reason: str = ""

    @classmethod
    def of(
        cls, expectation: Expectation, structure: str, sharing: str, examples: float, reason: str = ""
    ) -> Provenance:
        """That of a curvature by an expectation."""
        e = expectation
        described = e.likelihood.describe()
        return cls(structure, e.matrix, e.kind, sharing, described, examples, e.samples, reason)

    @property
    def columns(self) -> str:
        """How Λ was taken, in words."""
        return self.expectation if self.samples == 1 else f"{self.expectation} with {self.samples} samples"


class Curvature(StructuredOperator):
    """A curvature matrix, P x P, summed over the data, made of one block for each layer.

    Made by :func:`linnet.curvature`. It multiplies with ``@`` (flat vectors, several columns, or Params),
    and ``solve``, ``inverse``, ``damped``, ``scaled``, ``logdet``, ``trace``, ``diagonal``, ``sample``,
    ``quadratic`` and ``dense`` are closed forms of its structure.

    Args:
        parts: One block a layer.
        function: The network, frozen at θ₀.
        made: Where the matrix comes from.
        applied: What was done to it since, in words.

    Attributes:
        parts: The blocks.
        function: The network.
        made: Where the matrix comes from.
        applied: What was done to it since: ``("damped 1", "inverted")``.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        >>> data = torch.randn(8, 2), torch.randint(2, (8,))
        >>> G = linnet.curvature(net, data, linnet.likelihoods.Categorical(), structure="kfac")
        >>> G.damped(1.0).solve(torch.ones(17)).shape, [part.layer.name for part in G.parts]
        (torch.Size([17]), ['0', '2'])
    """

    def __init__(
        self, parts: tuple[Part, ...], function: Functional, made: Provenance, applied: tuple[str, ...] = ()
    ) -> None:
        self.parts, self.function, self.made, self.applied = parts, function, made, applied
        p = function.space.dim
        self.shape, self.space = (p, p), function.space
        self.dtype, self.device = parts[0].operator.dtype, parts[0].operator.device
        self.name = f"{made.structure} {made.matrix} matrix"

    def _shown(self) -> dict[str, Any]:
        made = self.made
        return {
            "structure": made.structure,
            "matrix": made.matrix,
            "columns": made.columns,
            "P": self.shape[0],
            "examples": made.examples,
            "changes": list(self.applied),
            "layers": {part.layer.name: type(part.operator).__name__ for part in self.parts},
        }

    def _compared(self) -> tuple[Any, ...]:
        """What processes that work with it together must have alike."""
        return self.function, self.applied, self.parts

    def __repr__(self) -> str:
        kind = ", ".join((f"{self.made.structure} {self.made.matrix}", self.made.columns, *self.applied))
        return f"Curvature({kind}, {len(self.parts)} layers, P = {self.shape[0]})"

    def __add__(self, other: LinearOperator) -> LinearOperator:
        """A + B."""
        if not isinstance(other, LinearOperator):
            raise InputError(
                f"{other!r} is added to a curvature",
                expected="another operator",
                remedy="write G.damped(τ) for G + τ I",
            )
        return super().__add__(other)

    def _each(self, function: Callable[[StructuredOperator, Tensor], Tensor], v: Tensor) -> Tensor:
        """Apply a function to every block and its rows of v (P, K)."""
        out = torch.empty_like(v)
        for part in self.parts:
            part.scatter(
                function(part.operator, part.gather(v, self.function.space)), out, self.function.space
            )
        return out

    def _with(
        self, function: Callable[[StructuredOperator], StructuredOperator], what: str, by: float | None = None
    ) -> Curvature:
        """The same layers with other blocks."""
        parts = tuple(replace(part, operator=function(part.operator)) for part in self.parts)
        words = what if by is None else f"{what} {float(by):g}"  # after the blocks have checked the number
        return Curvature(parts, self.function, self.made, (*self.applied, words))

    @in_exact_mode
    def mm(self, v: Tensor) -> Tensor:
        """G v for v (P, K)."""
        require_fit(self, v, 2)
        return self._each(lambda block, rows: block.mm(rows), v)

    @in_exact_mode
    def inverse(self) -> Curvature:
        """G⁻¹, layer by layer."""
        self._require_regular()
        return self._with(lambda block: block.inverse(), "inverted")

    def _require_regular(self) -> None:
        """Raise where a block has no inverse: rounding alone would make one."""
        self._solve(torch.ones(self.shape[0], 1, dtype=self.dtype, device=self.device))

    @in_exact_mode
    def damped(self, tau: float) -> Curvature:
        """G + τ I, exactly; Kronecker products by their eigendecompositions."""
        whole = Curvature(in_eigenbases(self.parts), self.function, self.made, self.applied)
        return whole._with(lambda block: block.damped(tau), "damped", tau)

    @in_exact_mode
    def factored_damped(self, tau: float) -> Curvature:
        """G + τ I with τ put into the Kronecker factors, (B + √τ/ω I) ⊗ (A + ω√τ I).

        Cheaper than :meth:`damped` (Cholesky instead of eigenvalues) and larger than G + τ I; other
        structures are damped exactly.

        Args:
            tau: τ, not negative.

        Returns:
            The damped curvature.

        Source:
            Botev 2020, eq. 4.25 to 4.27, with the trace norm.
        """

        def damp(block: StructuredOperator) -> StructuredOperator:
            return factored_damping(block, tau) if isinstance(block, Kronecker) else block.damped(tau)

        return self._with(damp, "factors damped", tau)

    @in_exact_mode
    def scaled(self, scalar: float) -> Curvature:
        """``c G``."""
        return self._with(lambda block: block.scaled(scalar), "scaled", scalar)

    @in_exact_mode
    def logdet(self) -> Tensor:
        """Σ log det of the blocks."""
        self._require_regular()
        return torch.stack([part.operator.logdet() for part in self.parts]).sum()

    @in_exact_mode
    def trace(self) -> Tensor:
        """Σ trace of the blocks."""
        return torch.stack([part.operator.trace() for part in self.parts]).sum()

    @in_exact_mode
    def diagonal(self) -> Tensor:
        """The diagonals of the blocks, (P,)."""
        out = torch.empty(self.shape[0], 1, dtype=self.dtype, device=self.device)
        for part in self.parts:
            part.scatter(part.operator.diagonal()[:, None], out, self.function.space)
        return out[:, 0]

    @in_exact_mode
    def quadratic(self, rows: Tensor) -> Tensor:
        """J M Jᵀ, symmetric and positive semi-definite by construction.

        Args:
            rows: J, (..., C, P), or one row (P,).

        Returns:
            (..., C, C), or () for one row.
        """
        return super().quadratic(rows)

    @in_exact_mode
    def _solve(self, b: Tensor) -> Tensor:
        return self._each(_checked_solve, b)

    @in_exact_mode
    def _root(self, v: Tensor) -> Tensor:
        return self._each(lambda block, rows: block._root(rows), v)

    @in_exact_mode
    def _root_transposed(self, v: Tensor) -> Tensor:
        return self._each(lambda block, rows: block._root_transposed(rows), v)

    @in_exact_mode
    def output_covariance(self, x: Inputs, memory: str | int | None = None) -> Tensor:
        """J(x) M J(x)ᵀ for each example: the covariance of the outputs when this M is that of the weights.

        Of a posterior precision take the inverse first: ``G.damped(prior).inverse().output_covariance(x)``.
        It is summed use by use from inputs and output gradients; nothing of size N x C x P is held.

        Args:
            x: N examples.
            memory: Budget such as ``"1GB"``; by default half of what is available.

        Returns:
            (N, C, C), outputs flattened.
        """
        return output_covariance(self.function, self.parts, x, memory)

    @in_exact_mode
    def output_variance(self, x: Inputs, memory: str | int | None = None) -> Tensor:
        """The diagonal of :meth:`output_covariance`, for outputs too many for a matrix between them.

        Args:
            x: N examples.
            memory: Budget such as ``"1GB"``; by default half of what is available.

        Returns:
            (N, C), outputs flattened.
        """
        return output_variance(self.function, self.parts, x, memory)

    def save(self, directory: str | Path) -> Path:
        """Write everything to one checksummed file; see :func:`linnet.load`.

        Args:
            directory: The folder; made if it is missing.

        Returns:
            The file's path.
        """
        return save(directory, KIND, self.state())

    def state(self) -> dict[str, Any]:
        """All but the network, as a tree."""
        return {
            "parts": self.parts,
            "made": self.made,
            "applied": self.applied,
            "network": identity(self.function) | {"modules": self.function.modules()},
            "witness": witness(self.function.check_runs, self.function.cache.probe),
        }

    def coverage(self) -> str:
        """A table: each layer, its parameters, and how it is represented."""
        lines = [repr(self)]
        if self.made.reason:
            lines.append(f"  {self.made.columns}: {self.made.reason}")
        width = max(len(part.layer.name) for part in self.parts)
        for part in self.parts:
            size = " + ".join("x".join(map(str, shape)) or "1" for shape in part.layer.shapes)
            note = f" ({part.note})" if part.note else ""
            lines.append(f"  {part.layer.name:<{width}}  {size:<20} {part.structure}{note}")
        return "\n".join(lines)


def _checked_solve(block: StructuredOperator, b: Tensor) -> Tensor:
    """The solution of a block, if it is one: rounding can hide that a block is singular."""
    x = block._solve(b)
    left = (block.mm(x) - b).norm(dim=0)
    wrong = left > LEFT_OVER * b.norm(dim=0)
    if bool(wrong.any()) or not bool(torch.isfinite(left).all()):
        worst = float((left / b.norm(dim=0).clamp(min=torch.finfo(b.dtype).tiny)).max())
        raise NumericalError(
            f"{block.name} is singular: its solution leaves {worst:.2g} of the right-hand side",
            expected="a positive definite matrix",
            remedy="add a damping first, for example G.damped(1e-3)",
        )
    return x


# -- saved -----------------------------------------------------------------------------------------
# A saved curvature, on the network that it was computed for.

_OTHER = (
    "computed for",
    "the same network with the same weights",
    "load the same checkpoint into the network first, or compute the curvature again",
)


@in_exact_mode
def restored_curvature(
    state: dict[str, Any], path: Path, model: nn.Module, output: OutputAdapter = None
) -> Curvature:
    """The curvature of which ``Curvature.state`` was read from a file."""
    function = matching_function(given_network(model), state["network"], output, path, _OTHER)
    function.cache.probe = require_witness(function.check_runs, state["witness"], path, _OTHER)
    parts = tree.map_tensors(lambda t: t.to(function.device), state["parts"])
    return Curvature(parts, function, state["made"], state["applied"])


# -- default damping -------------------------------------------------------------------------------
# Default damping.

DAMPING = 0.1  # share of the mean eigenvalue


def default_damping(curvature: Curvature, scale: float) -> float:
    """A tenth of the mean eigenvalue of s G."""
    mean = scale * float(curvature.trace()) / curvature.shape[0]
    if not (math.isfinite(mean) and mean > 0):
        raise NumericalError(
            f"the mean eigenvalue of the curvature is {mean}",
            expected="a positive number to take the damping from",
            remedy="pass damping=1.0, or check whether the outputs depend on the parameters",
        )
    return DAMPING * mean


def require_as_made(curvature: Any) -> Curvature:
    """A curvature that was not inverted or damped, where its eigenvalues are to be those of the data."""
    how = 'make one with linnet.curvature(model, data, likelihood, structure="kfac")'
    found = instance("curvature", curvature, Curvature, "a Curvature that can be inverted", how)
    changed = [words for words in found.applied if not words.startswith("scaled")]
    if changed:
        raise InputError(
            f"curvature was changed since it was made: {', '.join(changed)}",
            expected="the curvature as linnet.curvature returned it",
            remedy="pass it as it was made; what takes it adds a damping itself",
        )
    return found
