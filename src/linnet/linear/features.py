"""What a linear model f(x) = m(x) + Φ(x) δ is linear in, known by its kernel K(x, x') = Φ(x) Φ(x')ᵀ.

    Tangent      Φ = J, the derivatives of all C outputs            K (N, C, M, C)
    Conditioned  any of these given equations on outputs            K (N, C, M, C)    constraints.py
    Heads        the mean of the tangent kernels of H outputs       k (N, M)
    Explicit     features φ(x) that are computed                    k (N, M)
    Angles       these, and the angles between others               k (N, M)
    Constant     an intercept                                       k (N, M)
    WeightedSum  Σ w_t k_t of several of these                      k (N, M)

The last five are *shared*: every output has the kernel k and weights of its own, K = k ⊗ I. In weights

    f_c(x) = m_c(x) + b_c + Σ W_c φ(x) + Σ_h J_h(x) δ_hc                                        (``Weights``)

and a prediction costs the features and derivatives of x alone, where the kernel takes those of all N examples
again. Coordinates (a sketch, a metric) change the network, not its features: they are a ``Functional``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linear.formed_rows import Directions
from linnet.memory import Plan, parse_bytes
from linnet.tangent.batch import Inputs, batch_size, concatenate, take
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram, gram_and_own, own_kernels
from linnet.tangent.modes import in_exact_mode

Memory = str | int | None


class Examples(NamedTuple):
    """Inputs, and their rows of those features that are formed."""

    x: Inputs
    rows: tuple[Tensor | None, ...] = (None,)  # φ of each term of a sum, (N, D)
    given: Tensor | None = None  # G, what equations on outputs take from each output, (N, C, q)

    def taken(self, index: Tensor | slice) -> Examples:
        """Some of the examples."""
        *rows, given = (None if part is None else part[index] for part in (*self.rows, self.given))
        return Examples(take(self.x, index), tuple(rows), given)

    def joined(self, more: Examples) -> Examples:
        """These examples, then others."""
        *rows, given = (
            None if one is None or two is None else torch.cat([one, two])
            for one, two in zip((*self.rows, self.given), (*more.rows, more.given), strict=True)
        )
        return Examples(concatenate([self.x, more.x]), tuple(rows), given)


class Features(ABC):
    """What a linear model is linear in."""

    shared: ClassVar[bool] = True  # whether one kernel serves all outputs
    finite: bool = False  # whether they can be written as a model in weights
    exact: ClassVar[bool] = False  # whether their kernel has no rounding errors

    def examples(self, x: Inputs) -> Examples:
        """Examples with their rows of features that are formed."""
        return Examples(x)

    @abstractmethod
    def kernel(self, of: Examples, memory: Memory = None) -> Tensor:
        """K(x, x), (N, N), or (N, C, N, C) where outputs do not share it."""

    @abstractmethod
    def cross(self, x: Inputs, train: Examples, memory: Memory = None) -> Tensor:
        """K(x, X), (T, N) or (T, C, N, C)."""

    @abstractmethod
    def own(self, x: Inputs, memory: Memory = None) -> Tensor:
        """K(x_i, x_i), (T,) or (T, C, C)."""

    def root(self, of: Examples) -> Tensor:
        """Φ(x) of shared features that are formed, a row an example, (N, D)."""
        raise InputError(
            f"Φ(x) of {type(self).__name__}",
            expected="features that are formed",
            remedy="take the kernel",
        )

    def rounded(self, x: Inputs, memory: Memory = None) -> Tensor:
        """K(x_i, x_i) of what rounding errors are relative to, (T,) or (T, C, C)."""
        return self.own(x, memory)

    def cross_and_own(self, x: Inputs, train: Examples, memory: Memory = None) -> tuple[Tensor, Tensor]:
        """Both, with one pass over x where that is possible."""
        return self.cross(x, train, memory), self.own(x, memory)

    def plan(self, outputs: int, memory: Memory = None, copies: Sequence[str] = ()) -> Plan:
        """The memory of shared features in weights, and of named copies of them."""
        del outputs, copies
        return Plan("no directions", parse_bytes(memory), ())

    def weigh(
        self, into: Weights, train: Examples, beta: Tensor, scale: float = 1.0, memory: Memory = None
    ) -> None:
        """Add s Φ(X)ᵀ β of shared features to a model in weights."""
        # beta (N, C)
        raise InputError(
            f"{type(self).__name__} as a model in weights",
            expected="features that all outputs share",
            remedy="take the kernel's own predictions",
        )

    def weights(self, train: Examples, beta: Tensor, memory: Memory = None) -> Weights:
        """Φ(x) Φ(X)ᵀ β of shared features in weights."""
        # beta (N, C)
        made = Weights(beta.new_zeros(beta.shape[1]))
        self.weigh(made, train, beta, memory=memory)
        return made


@dataclass
class Weights:
    """A model with shared features in its weights: x to Σ W φ(x) + b + Σ J(x) δ."""

    bias: Tensor  # b, (C,)
    layers: list[tuple[Callable[[Inputs], Tensor], Tensor]] = field(default_factory=list)  # φ and W (C, D)
    directions: list[Directions] = field(default_factory=list)  # δ

    def __call__(self, x: Inputs) -> Tensor:
        """The outputs (T, C)."""
        found: Tensor = sum((phi(x) @ weight.T for phi, weight in self.layers), self.bias)
        return sum((part.moved(x) for part in self.directions), found)


@dataclass(frozen=True, eq=False)
class Tangent(Features):
    """The derivatives of all outputs in the weights."""

    function: Functional
    shared = False

    def kernel(self, of: Examples, memory: Memory = None) -> Tensor:
        """K(x, x), (N, C, N, C)."""
        return gram(self.function, of.x, form="full", memory=memory)

    def cross(self, x: Inputs, train: Examples, memory: Memory = None) -> Tensor:
        """K(x, X), (T, C, N, C)."""
        return gram(self.function, x, train.x, form="full", memory=memory)

    def own(self, x: Inputs, memory: Memory = None) -> Tensor:
        """K(x_i, x_i), (T, C, C)."""
        return own_kernels(self.function, x, memory)


@dataclass(frozen=True, eq=False)
class Heads(Features):
    """1/H Σ_h J_h J_hᵀ, the mean of the tangent kernels of the H outputs of a network."""

    function: Functional
    count: int  # H
    combinations: Tensor | None = None  # V, (C, H), by which they are made of a network's C outputs
    finite = True

    @in_exact_mode
    def kernel(self, of: Examples, memory: Memory = None, file: Path | None = None) -> Tensor:
        """k(x, x), (N, N), float64; from a file, and into it, where there is one."""
        return gram(self.function, of.x, form="trace", memory=memory, file=file).double() / self.count

    @in_exact_mode
    def cross(self, x: Inputs, train: Examples, memory: Memory = None) -> Tensor:
        """k(x, X), (T, N), float64."""
        return gram(self.function, x, train.x, form="trace", memory=memory).double() / self.count

    @in_exact_mode
    def own(self, x: Inputs, memory: Memory = None) -> Tensor:
        """k(x_i, x_i), (T,), float64."""
        blocks = own_kernels(self.function, x, memory)
        return blocks.diagonal(dim1=1, dim2=2).double().sum(1) / self.count

    @in_exact_mode
    def cross_and_own(self, x: Inputs, train: Examples, memory: Memory = None) -> tuple[Tensor, Tensor]:
        """Both, in the same passes."""
        found, own = gram_and_own(self.function, x, train.x, memory)
        return found.double() / self.count, own / self.count

    def plan(self, outputs: int, memory: Memory = None, copies: Sequence[str] = ()) -> Plan:
        """The memory of H·C displacements of the weights."""
        return Directions.plan(self.function, self.count, outputs, memory, copies)

    def weigh(
        self, into: Weights, train: Examples, beta: Tensor, scale: float = 1.0, memory: Memory = None
    ) -> None:
        """With δ_hc = s/H Σ_i J_h(x_i)ᵀ β_ic."""
        made = Directions(self.function, self.count, train.x, beta, scale / self.count, memory)
        into.directions.append(made)


@dataclass(frozen=True, eq=False)
class Computed(Features):
    """A kernel of features φ(x) that are computed."""

    phi: Callable[[Inputs], Tensor]  # (N, D), float64
    finite = True

    def examples(self, x: Inputs) -> Examples:
        """Examples with their features."""
        return Examples(x, (self.phi(x),))

    def kernel(self, of: Examples, memory: Memory = None) -> Tensor:
        """k(x, x), (N, N)."""
        rows = self._rows(of)
        return self._between(rows, rows)

    def cross(self, x: Inputs, train: Examples, memory: Memory = None) -> Tensor:
        """k(x, X), (T, N)."""
        return self._between(self.phi(x), self._rows(train))

    def own(self, x: Inputs, memory: Memory = None) -> Tensor:
        """k(x_i, x_i), (T,)."""
        return self._within(self.phi(x))

    def cross_and_own(self, x: Inputs, train: Examples, memory: Memory = None) -> tuple[Tensor, Tensor]:
        """Both, from the same features."""
        rows = self.phi(x)
        return self._between(rows, self._rows(train)), self._within(rows)

    @abstractmethod
    def _between(self, rows: Tensor, others: Tensor) -> Tensor:
        """The kernel of two sets of features, (N, M)."""
        # rows (N, D), others (M, D)

    @abstractmethod
    def _within(self, rows: Tensor) -> Tensor:
        """The kernel of features with themselves, (N,)."""
        # rows (N, D)

    def _rows(self, of: Examples) -> Tensor:
        """φ(x), known or computed, (N, D)."""
        known = of.rows[0]
        return self.phi(of.x) if known is None else known


@dataclass(frozen=True, eq=False)
class Explicit(Computed):
    """Features φ(x) that are computed, such as the inputs of a last layer: k(x, x') = φ(x)ᵀφ(x')."""

    def root(self, of: Examples) -> Tensor:
        """φ(x), (N, D)."""
        return self._rows(of)

    def _between(self, rows: Tensor, others: Tensor) -> Tensor:
        """The kernel of two sets of features, (N, M)."""
        return rows @ others.T

    def _within(self, rows: Tensor) -> Tensor:
        """The kernel of features with themselves, (N,)."""
        return rows.square().sum(1)

    def weigh(
        self, into: Weights, train: Examples, beta: Tensor, scale: float = 1.0, memory: Memory = None
    ) -> None:
        """With W = s βᵀφ."""
        into.layers.append((self.phi, scale * (beta.T @ self._rows(train))))


def arc_cosine(cosines: Tensor) -> Tensor:
    """κ(t) = (√(1 − t²) + t (π − arccos t))/π."""
    # Cho and Saul, NeurIPS 2009, order 1: 2 E max(0, wᵀa) max(0, wᵀb), w ~ N(0, I), for a, b of length 1
    eps = torch.finfo(cosines.dtype).eps  # its derivatives at the ends are not finite
    t = cosines.clamp(eps - 1, 1 - eps)
    found: Tensor = ((1 - t.square()).sqrt() + t * (math.pi - t.acos())) / math.pi
    return found


ROWS = 1024  # of a kernel at a time, whose intermediate results are held


def angular_kernel(b: Tensor, d: Tensor) -> Tensor:
    """κ of the cosines between vectors of length 1, (N, M)."""
    # b (N, E), d (M, E)
    found = b.new_empty(len(b), len(d))
    for part, own in zip(found.split(ROWS), b.split(ROWS), strict=True):
        part.copy_(arc_cosine(own @ d.T))
    return found


@dataclass(frozen=True, eq=False)
class Angles(Computed):
    """k(x, x') = aᵀa' + s κ(bᵀb') of features (a, b), b of length 1: those of a random ReLU layer on b."""

    width: int  # of a
    share: float  # s

    def _between(self, rows: Tensor, others: Tensor) -> Tensor:
        """The kernel of two sets of features, (N, M)."""
        (a, b), (c, d) = (part.tensor_split([self.width], 1) for part in (rows, others))
        return angular_kernel(b, d).mul_(self.share).add_(a @ c.T)

    def _within(self, rows: Tensor) -> Tensor:
        """The kernel of features with themselves, (N,)."""
        a, _ = rows.tensor_split([self.width], 1)
        return a.square().sum(1) + self.share

    def weigh(
        self, into: Weights, train: Examples, beta: Tensor, scale: float = 1.0, memory: Memory = None
    ) -> None:
        """With weights of a, (C, D), and of κ for each example, (C, N)."""
        a, b = self._rows(train).tensor_split([self.width], 1)
        weights = scale * torch.cat([beta.T @ a, self.share * beta.T], 1)
        into.layers.append((partial(self._beside, b), weights))

    def _beside(self, b: Tensor, x: Inputs) -> Tensor:
        """a, and κ with the training examples, (T, D + N)."""
        own, angles = self.phi(x).tensor_split([self.width], 1)
        return torch.cat([own, angular_kernel(angles, b)], 1)


@dataclass(frozen=True, eq=False)
class Constant(Features):
    """The feature 1: an intercept for each output."""

    device: torch.device
    finite = True
    exact = True

    def root(self, of: Examples) -> Tensor:
        """1, (N, 1)."""
        return torch.ones(batch_size(of.x), 1, dtype=torch.float64, device=self.device)

    def kernel(self, of: Examples, memory: Memory = None) -> Tensor:
        """1, (N, N)."""
        return self.cross(of.x, of)

    def cross(self, x: Inputs, train: Examples, memory: Memory = None) -> Tensor:
        """1, (T, N)."""
        return torch.ones(batch_size(x), batch_size(train.x), dtype=torch.float64, device=self.device)

    def own(self, x: Inputs, memory: Memory = None) -> Tensor:
        """1, (T,)."""
        return torch.ones(batch_size(x), dtype=torch.float64, device=self.device)

    def weigh(
        self, into: Weights, train: Examples, beta: Tensor, scale: float = 1.0, memory: Memory = None
    ) -> None:
        """With b = s Σ_i β_i."""
        into.bias = into.bias + scale * beta.sum(0)


@dataclass(frozen=True, eq=False)
class WeightedSum(Features):
    """Σ w_t k_t: features of several kinds side by side, each with its prior variance."""

    terms: tuple[tuple[float, Features], ...]  # w_t and the features

    def examples(self, x: Inputs) -> Examples:
        """Examples with the rows of each kind."""
        return Examples(x, tuple(one.examples(x).rows[0] for _, one in self.terms))

    def _each(self, of: Examples) -> Iterator[tuple[float, Features, Examples]]:
        """Each kind, its weight and the examples with its rows."""
        every = of.rows if len(of.rows) == len(self.terms) else (None,) * len(self.terms)
        for (weight, one), rows in zip(self.terms, every, strict=True):
            yield weight, one, Examples(of.x, (rows,))

    @property
    def finite(self) -> bool:  # type: ignore[override]
        """Whether all kinds can be written as models in weights."""
        return all(one.finite for _, one in self.terms)

    def root(self, of: Examples) -> Tensor:
        """√w_t φ_t(x) side by side, (N, D)."""
        return torch.cat([weight**0.5 * one.root(part) for weight, one, part in self._each(of)], 1)

    def kernel(self, of: Examples, memory: Memory = None) -> Tensor:
        """k(x, x), (N, N)."""
        return _total(weight * one.kernel(part, memory) for weight, one, part in self._each(of))

    def cross(self, x: Inputs, train: Examples, memory: Memory = None) -> Tensor:
        """k(x, X), (T, N)."""
        return _total(weight * one.cross(x, part, memory) for weight, one, part in self._each(train))

    def own(self, x: Inputs, memory: Memory = None) -> Tensor:
        """k(x_i, x_i), (T,)."""
        return _total(weight * one.own(x, memory) for weight, one in self.terms)

    def rounded(self, x: Inputs, memory: Memory = None) -> Tensor:
        """Of the kinds that are not exact."""
        return _total(weight * one.own(x, memory) for weight, one in self.terms if not one.exact)

    def cross_and_own(self, x: Inputs, train: Examples, memory: Memory = None) -> tuple[Tensor, Tensor]:
        """Both, with one pass over x for each kind."""
        found = [(w, *one.cross_and_own(x, part, memory)) for w, one, part in self._each(train)]
        return _total(w * cross for w, cross, _ in found), _total(w * own for w, _, own in found)

    def plan(self, outputs: int, memory: Memory = None, copies: Sequence[str] = ()) -> Plan:
        """The memory of the kind that has displacements."""
        plans = [one.plan(outputs, memory, copies) for _, one in self.terms]
        return max(plans, key=lambda plan: plan.peak)

    def weigh(
        self, into: Weights, train: Examples, beta: Tensor, scale: float = 1.0, memory: Memory = None
    ) -> None:
        """Of each kind."""
        for weight, one, part in self._each(train):
            one.weigh(into, part, beta, scale * weight, memory)


def _total(parts: Iterator[Tensor]) -> Tensor:
    """The sum of tensors, in their order and in the memory of the first."""
    total = next(parts)
    for part in parts:
        total += part
    return total
