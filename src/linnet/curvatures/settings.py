"""Settings of ``linnet.curvature`` that belong together: structure, expectation, passes over the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from linnet.memory import parse_bytes
from linnet.params import choice, flag, instance, integer, optional, refuse, seed
from linnet.params import path as checked_path
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.selection import Selector

# Rows of a Kronecker factor, beyond which its diagonal is kept. A matrix of 8192 rows has 270 MB; in float64,
# in which it is decomposed, it has 540 MB, as have its eigenvectors, and 10 n³ operations take a minute at
# 100 GFLOP/s.
WIDEST = 8192
EXPECTATIONS = ("exact", "mc", "random-projection", "empirical", "recursion")


@dataclass(frozen=True)
class LowRank:
    """The leading eigenpairs; ``structure="low-rank"`` are 32 of them.

    Args:
        rank: How many.
        method: ``"lanczos"`` (to convergence) or ``"randomized"`` (one product with ten vectors more, whose
            eigenvalues are too small where they decay slowly, and a posterior made of them too wide).
        seed: Seed of the vectors that it starts from.

    Raises:
        InputError: If a value is not one of those listed.

    Example:
        >>> LowRank(50).method
        'lanczos'
    """

    rank: int = 32
    method: str = "lanczos"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise on values that cannot be."""
        integer("rank", self.rank)
        choice("method", self.method, ("lanczos", "randomized"))
        seed("seed", self.seed)


@dataclass(frozen=True)
class MatrixFree:
    """Products with the whole matrix, one pass over the data each, as ``structure="matrix-free"``.

    Args:
        derivative: ``"exact"``, or ``"finite-difference"``, which takes Fisher products by the directional
            derivative of the gradient of a KL divergence: two backward passes and no forward mode.

    Raises:
        InputError: If the derivative is not one of those listed.

    Source:
        Maddox et al. 2021 (finite differences).

    Example:
        >>> MatrixFree(derivative="finite-difference")
        MatrixFree(derivative='finite-difference')
    """

    derivative: str = "exact"

    def __post_init__(self) -> None:
        """Raise on another word."""
        choice("derivative", self.derivative, ("exact", "finite-difference"))


@dataclass(frozen=True)
class _Sampled(ABC):
    """Random columns of each example."""

    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise on values that cannot be."""
        integer("samples", self.samples)
        seed("seed", self.seed)

    @property
    @abstractmethod
    def _word(self) -> str:
        """The expectation's word."""


@dataclass(frozen=True)
class MonteCarlo(_Sampled):
    """Labels drawn from the model; ``expectation="mc"`` is one for each example (and output position).

    Args:
        samples: Labels for each example.
        seed: Seed of the labels.

    Raises:
        InputError: If a number is not an integer, or no sample is drawn.

    Example:
        >>> MonteCarlo(10)
        MonteCarlo(samples=10, seed=0)
    """

    _word = "mc"


@dataclass(frozen=True)
class RandomProjection(_Sampled):
    """Columns Λ^½ v for random v; ``expectation="random-projection"`` is one for each example.

    Args:
        samples: Columns for each example.
        seed: Seed of the columns.

    Raises:
        InputError: If a number is not an integer, or no column is drawn.

    Source:
        Botev 2020, section 4.3.4.

    Example:
        >>> RandomProjection(10, seed=1)
        RandomProjection(samples=10, seed=1)
    """

    _word = "random-projection"


@dataclass(frozen=True)
class Passes:
    """Passes of a curvature over its data.

    Args:
        block: Examples differentiated at once; chosen by memory if left out. Random columns are drawn batch
            by batch, so that another block draws others.
        memory: Budget such as ``"4GB"``; by default half of what is available.
        file: A ``.safetensors`` file for unfinished sums, written every 15 seconds and between passes: an
            interrupted call resumes from it. Removed at the end.
        shard: Under torch.distributed, ``True`` if all processes pass the same data, which are then shared
            out; ``False`` if each passes its own; ``None`` for a process that computes alone. The first two
            add up over all processes, which must all make the call; an error on one is raised on all.
        widest: Rows that a Kronecker factor may have. A wider side, such as that of a vocabulary, has the
            factor's diagonal instead; so have the widest ones, beyond 1024 rows, of what does not fit the
            memory. ``Curvature.coverage()`` says where.

    Raises:
        InputError: If a value cannot be.

    Example:
        >>> Passes(memory="2GB", file="sums.safetensors").shard
        True
    """

    block: int | None = None
    memory: str | int | None = None
    file: str | Path | None = None
    shard: bool | None = True
    widest: int = WIDEST

    def __post_init__(self) -> None:
        """Raise on values that cannot be."""
        optional(integer, "block", self.block)
        parse_bytes(self.memory)
        optional(checked_path, "file", self.file, 'pass file="sums.safetensors"')
        optional(flag, "shard", self.shard)
        integer("widest", self.widest)


Structure = str | Mapping[str, str] | LowRank | MatrixFree
Drawn = MonteCarlo | RandomProjection


class Selected(TypedDict, total=False):
    """What of a network a curvature is of."""

    params: Selector  # which parameters vary; by default all that require a gradient
    output: OutputAdapter  # how to turn the network's result into a tensor


class CurvatureOptions(TypedDict, total=False):
    """Keywords that are handed on to ``linnet.curvature``."""

    # "auto", "exact", "mc", "random-projection", "empirical" or "recursion", or a `MonteCarlo` or
    # `RandomProjection`
    expectation: str | Drawn
    sharing: str  # "expand" or "reduce"
    matrix: str  # "gauss-newton", "fisher", "hessian" or "auto"
    passes: Passes | None  # A ``Passes``: memory, and how the data are shared out
    params: Selector
    output: OutputAdapter


def word_of(structure: Any) -> Any:
    """A structure's word, if it is given by its settings; other values as they are."""
    if isinstance(structure, LowRank):
        return "low-rank"
    return "matrix-free" if isinstance(structure, MatrixFree) else structure


def drawn(expectation: Any) -> tuple[str, int, int]:
    """An expectation's word, samples and seed."""
    if isinstance(expectation, MonteCarlo | RandomProjection):
        return expectation._word, expectation.samples, expectation.seed
    return choice("expectation", expectation, ("auto", *EXPECTATIONS)), 1, 0


def expectation_of(word: str, samples: int = 1, seed: int = 0) -> str | Drawn:
    """An expectation by its word, samples and seed."""
    if word == "mc":
        return MonteCarlo(samples, seed)
    return RandomProjection(samples, seed) if word == "random-projection" else word


def passes_of(passes: Any) -> Passes:
    """Passes, checked."""
    if passes is None:
        return Passes()
    return instance("passes", passes, Passes, "a linnet.curvatures.Passes", 'pass Passes(memory="4GB")')


def reseeded(structure: Any, expectation: Any, by: int) -> tuple[Any, Any]:
    """Structure and expectation with other random numbers."""
    low = LowRank() if structure == "low-rank" else structure
    if isinstance(low, LowRank):
        structure = replace(low, seed=low.seed + by)
    word, samples, start = drawn(expectation)
    return structure, expectation_of(word, samples, start + by)


def check_structure(structure: Any) -> None:
    """Raise unless it is one structure."""
    if not isinstance(structure, str | Mapping | LowRank | MatrixFree) or not structure:
        refuse("structure", structure, "a structure, or a mapping of them", 'pass structure="kfac"')
