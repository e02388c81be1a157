"""The data of a linear model: what its outputs are to add to their mean, in units of the noise.

With outputs f = m + Jδ, targets t_i = f(x_i) + ε_i, ε_i ~ N(0, s σ_i²), known σ_i² and a common scale s,
everything is written in

    w_i = 1/σ_i,   r̃ = w ∘ (t − m(X)),   J̃ = diag(w) J,   K̃ = J̃ J̃ᵀ

in which the noise is s I, and m the mean before the data: f₀, the network's own output, or zero. A target
that is missing has w = 0, and takes no part in anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from linnet.distributed import current
from linnet.linear.constraints import Conditioned, Confined, Constraints, forward
from linnet.linear.features import Examples, Features, Tangent
from linnet.linear.formed_rows import FormedRows, Rows
from linnet.memory import parse_bytes
from linnet.tangent.batch import (
    Inputs,
    all_but,
    batch_size,
    concatenate,
    hash_examples,
    observed,
    split,
    take,
)
from linnet.tangent.functional import Functional, called
from linnet.tangent.jacobian import JacobianOperator
from linnet.tree import hash_tensors, tensors_in
from linnet.unfinished import Resumed, checkpoint, summing

Memory = str | int | None
ROWS = 1024  # examples whose features are multiplied at a time
SHARE = 0.1  # of the budget that features of other examples may take at a time


class LinearModel(ABC):
    """What a linear model is linear in, and its training examples."""

    function: Functional  # the network, whose Jacobian J is
    x: Inputs  # N examples
    features: Features | None  # what the model is linear in, if not J of the network
    formed: Examples | None  # the examples with rows of features that are formed

    @property
    @abstractmethod
    def c(self) -> int:
        """C."""

    @property
    def basis(self) -> Features:
        """What the model is linear in."""
        return Tangent(self.function) if self.features is None else self.features

    @property
    def each(self) -> int:
        """Rows of an example: C of J, one of features that outputs share."""
        return 1 if self.basis.shared else self.c

    @property
    def width(self) -> int:
        """Columns of a row: P of J, D of features that outputs share."""
        if not self.basis.shared:
            return self.function.space.dim
        return self.basis.root(self.examples.taken(slice(0, 1))).shape[1]

    @property
    def held(self) -> Conditioned | None:
        """The same where outputs obey equations."""
        return self.features if isinstance(self.features, Conditioned) else None

    @property
    def free(self) -> Features:
        """What the model is linear in, but for equations on outputs."""
        return self.basis if self.held is None else self.held.free

    @property
    def constraints(self) -> Constraints | None:
        """Equations on outputs that the model obeys."""
        return None if self.held is None else self.held.constraints

    @property
    def confined(self) -> Confined | None:
        """The weights that equations on outputs leave."""
        return None if self.held is None else self.held.confined

    @property
    def examples(self) -> Examples:
        """The inputs, with their rows of features that are formed; formed once."""
        if self.formed is None:
            object.__setattr__(self, "formed", self.basis.examples(self.x))
        assert self.formed is not None
        return self.formed

    @cached_property
    def jacobian(self) -> JacobianOperator:
        """J over the examples, without w."""
        return JacobianOperator(self.function, self.x, self.c)

    def conditioned(
        self, constraints: Constraints, samples: bool, memory: Memory
    ) -> tuple[Conditioned, Examples | None]:
        """The features under other equations, and of a solution in samples the examples with their rows."""
        held, before = Conditioned(self.free, constraints, self.function, memory), self.constraints
        if not samples:
            return held, None
        if before is None or before.equations is not constraints.equations:
            return held, held.conditioned(self.examples)
        # the same at another ridge: Gᵀ = L⁻¹ (A Jᵀ)
        given = forward(constraints.factor, before.factor @ self.explained().T).T
        return held, self.examples._replace(given=given.reshape(-1, self.c, len(constraints.factor)))

    def confine(self, rows: Tensor) -> Tensor:
        """Rows of J as rows of J P, in the weights that equations leave."""
        return rows if self.confined is None else self.confined.mm(rows.T).T

    def form(self, x: Inputs, memory: Memory = None) -> Iterator[tuple[slice, Tensor]]:
        """The rows of other examples: the place of n of them and (n·C, P) or (n, D), block by block."""
        if self.basis.shared:
            room = int(SHARE * parse_bytes(memory, self.function.device)) // (8 * self.width)
            start = 0
            for several in split(x, max(ROWS, room)):
                of = self.basis.examples(several)
                for place in places(of):
                    rows = self.basis.root(of.taken(place))
                    yield slice(start, start := start + len(rows)), rows
            return
        for place, rows in FormedRows(self.function, x, self.c, memory, keep=False):
            yield place, self.confine(rows)

    def moved(self, v: Tensor) -> Tensor:
        """J v, or J P v, for columns v, (P, K) to (N·C, K)."""
        return self.jacobian.mm(v if self.confined is None else self.confined.mm(v))

    def pulled(self, u: Tensor) -> Tensor:
        """Jᵀ u, or P Jᵀ u, for columns u, (N·C, K) to (P, K), in the network's type."""
        found = self.jacobian.T.mm(u.to(self.function.dtype))
        return found if self.confined is None else self.confined.mm(found)

    def shift(self) -> Tensor:
        """What equations on outputs add to the mean of the examples, (N, C)."""
        assert self.held is not None
        if self.formed is not None or self.free.shared:
            return self.held.shift(self.examples)
        return self.jacobian.mm(self.held.confined.center[:, None]).view(-1, self.c)

    def displaced(self, eta: Tensor) -> Tensor:
        """δ = Wᵀg + P η of a solution η in weights, (P,)."""
        at = self.confined
        return eta if at is None else at.center.to(eta) + at.mm(eta[:, None])[:, 0]

    def explained(self) -> Tensor:
        """G of the examples, what equations on outputs explain, (N·C, q)."""
        given = self.examples.given
        assert given is not None
        return given.flatten(0, 1)

    def combined(self, beta: Tensor) -> Tensor:
        """δ = Jᵀβ + Aᵀν of a solution in samples, (P,)."""
        # beta (N, C)
        flat = self.jacobian.T.mm(beta.reshape(-1, 1).to(self.function.dtype))[:, 0]
        if self.constraints is None:
            return flat
        nu = self.constraints.multipliers(self.explained(), beta)
        return flat + self.constraints.equations.pull(self.function, nu)


@dataclass(frozen=True, eq=False)
class Problem(LinearModel):
    """A linear model and its training data."""

    function: Functional
    x: Inputs
    residual: Tensor  # r̃, (N, C), less what equations on outputs explain
    weights: Tensor | None = None  # w, (N, C), float64; 0 for a missing target. ``None`` for ones
    y: Tensor | None = None  # targets (N, C) as they were given, where a file is to keep them
    known: Rows | None = None  # the rows of J, where a larger problem has them
    features: Features | None = None
    formed: Examples | None = None

    def __post_init__(self) -> None:
        """Take of the types of numbers in force those that need no check, unless ``linnet.fit`` set them."""
        if self.function.pinned is None:
            function = self.function.under(self.function.precision.exact(self.function.dtype))
            object.__setattr__(self, "function", function)

    @property
    def n(self) -> int:
        """N."""
        return self.residual.shape[0]

    @property
    def c(self) -> int:
        """C."""
        return self.residual.shape[1]

    @property
    def count(self) -> int:
        """Number of targets that are there."""
        if self.weights is not None:
            return int((self.weights > 0).sum())
        mask = observed(self.x)[1]
        return self.residual.numel() if mask is None else int(mask.sum())

    @property
    def squared(self) -> float:
        """‖r̃‖²."""
        return float(self.residual.double().square().sum())

    @property
    def log_noise(self) -> float:
        """Σ log σ_i² over the targets that are there."""
        w = self.weights
        return 0.0 if w is None else -2 * float(w[w > 0].log().sum())

    @cached_property
    def scaled_jacobian(self) -> JacobianOperator:
        """J̃ as the Jacobian of a network of its own."""
        if self.weights is None:
            return self.jacobian
        return JacobianOperator(whitened(self.function), whitened_inputs(self), self.c)

    def weighing(self, weights: Tensor | None) -> Problem:
        """The same examples, of which some count more than others in the loss."""
        # weights (N,)
        if weights is None:
            return self
        w = weights.double().sqrt()[:, None].expand(self.n, self.c)
        return replace(self, weights=w, residual=self.residual * w.to(self.residual))

    def scaled(self, values: Tensor) -> Tensor:
        """Values of all examples in units of their noise, (N, C)."""
        return values if self.weights is None else values * self.weights.to(values)

    def unscaled(self, values: Tensor) -> Tensor:
        """Values in units of their noise as they are, (N, C), where no target is missing."""
        return values if self.weights is None else values / self.weights.to(values)

    def weighed(self, values: Tensor, start: int = 0) -> Tensor:
        """W ∘ v for columns v of outputs of consecutive examples, (n·C, K)."""
        # values (n·C, K)
        if self.weights is None:
            return values
        n = len(values) // self.c
        return values * self.weights[start : start + n].reshape(-1, 1).to(values)

    def push(self, v: Tensor) -> Tensor:
        """J̃ v for columns v, (P, K) to (N·C, K)."""
        return self.weighed(self.moved(v))

    def pull(self, u: Tensor) -> Tensor:
        """J̃ᵀ u for columns u, (N·C, K) to (P, K), in the network's type."""
        return self.pulled(self.weighed(u))

    def rows(self, memory: Memory = None, begun: Resumed | None = None) -> Iterator[tuple[slice, Tensor]]:
        """J̃, as many examples at a time as the memory budget allows, or Φ̃ of shared features."""
        if self.basis.shared:
            for place in places(self.examples, 0 if begun is None else begun[0]):
                rows = self.basis.root(self.examples.taken(place))
                yield place, rows if self.weights is None else rows * self.weights[place, :1].to(rows)
            return
        found = self._rows(memory)
        for place, rows in iter(found) if begun is None else found.after(*begun):
            yield place, self.weighed(self.confine(rows), place.start)

    def _rows(self, memory: Memory = None) -> Rows:
        """J, block by block, kept as the first budget allows."""
        if "kept rows" not in vars(self):
            made = self.known or FormedRows(self.function, self.x, self.c, memory, keep=False, spool=True)
            vars(self)["kept rows"] = made
        found: Rows = vars(self)["kept rows"]
        return found

    def own_rows(self, memory: Memory = None, begun: Resumed | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The same of the examples that this process has a share in; all of them where it computes alone."""
        share = current()
        if share.world == 1:
            yield from self.rows(memory, begun)
            return
        own = share.part(self.n)
        if own.start < own.stop:
            key = f"rows of {own.start} to {own.stop}"
            if key not in vars(self):
                index = torch.arange(own.start, own.stop, device=self.residual.device)
                vars(self)[key] = self.taken(index)
            part: Problem = vars(self)[key]
            here = None if begun is None else (begun[0] - own.start, begun[1])
            for place, rows in part.rows(memory, here):
                yield slice(own.start + place.start, own.start + place.stop), rows

    def summed_rows(
        self, what: str, tensors: Mapping[str, Tensor], memory: Memory = None, **settings: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        """The rows of this process for a sum, which inside ``resumable`` goes on where it was killed."""

        def identity() -> dict[str, Any]:
            own = {name: hash_tensors([value]) for name, value in settings.items()}
            return {**self._identity, **own}

        kept = checkpoint(what, current(), identity)
        return summing(tensors, kept, lambda begun: self.own_rows(memory, begun))

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What a sum over the examples belongs to."""
        noise = [] if self.weights is None else [self.weights]
        noise += [] if self.constraints is None else [self.constraints.factor]
        types = self.function.precision
        known = {} if types.sums is None else {"types": str(types)}
        if self.basis.shared:
            known["features"] = hash_tensors([self.basis.root(self.examples.taken(slice(0, ROWS)))])
        return known | {
            "number of examples": self.n,
            "network": self.function.fingerprint(),
            "x": hash_tensors(tensors_in(self.x)),
            "targets": hash_tensors([self.residual, *noise]),
        }

    def taken(self, index: Tensor) -> Problem:
        """The problem of some of the examples."""
        weights = None if self.weights is None else self.weights[index]
        y = None if self.y is None else self.y[index]
        formed = None if self.formed is None else self.formed.taken(index)
        x, residual = take(self.x, index) if formed is None else formed.x, self.residual[index]
        return replace(self, x=x, residual=residual, weights=weights, y=y, known=None, formed=formed)

    def of(self, x: Inputs, residual: Tensor) -> Problem:
        """The same model on other data, with r there as it is without equations on outputs."""
        formed = None if self.formed is None else self.basis.examples(x)
        made = replace(self, x=x, residual=residual, weights=None, y=None, known=None, formed=formed)
        return made if self.held is None else replace(made, residual=residual - made.shift())

    def given(self, constraints: Constraints, samples: bool, memory: Memory = None) -> Problem:
        """The same data under other equations than before, for a solution in samples or in weights."""
        residual = self.free_residual
        held, formed = self.conditioned(constraints, samples, memory)
        made = replace(self, residual=residual, features=held, known=None, formed=formed)
        return replace(made, residual=residual - made._scaled_shift())

    @property
    def free_residual(self) -> Tensor:
        """r̃ as it is without equations on outputs, (N, C)."""
        return self.residual if self.held is None else self.residual + self._scaled_shift()

    def _scaled_shift(self) -> Tensor:
        """What equations add to the mean, in units of the noise, (N, C)."""
        return self.scaled(self.shift())

    def without(self, index: Tensor) -> Problem:
        """The problem without some of the examples."""
        keep = all_but(self.n, index.to(self.residual.device))
        known = vars(self).get("kept rows")
        return replace(self.taken(keep.nonzero()[:, 0]), known=known and known.without(keep))

    def joined(self, more: Problem) -> Problem:
        """These data and more."""
        pairs = [(self.residual, more.residual), (self.weights, more.weights), (self.y, more.y)]
        residual, weights, y = (None if a is None or b is None else torch.cat([a, b.to(a)]) for a, b in pairs)
        assert residual is not None
        own = vars(self).get("kept rows")
        known = own and own.joined(more._rows())
        formed = None if self.formed is None else self.formed.joined(more.examples)
        x = concatenate([self.x, more.x]) if formed is None else formed.x
        return replace(self, x=x, residual=residual, weights=weights, y=y, known=known, formed=formed)

    def same_inputs(self, other: Problem) -> bool:
        """Whether another problem has these very inputs, and noise, so that its matrices are these."""
        one, two = self.weights, other.weights
        alike = (one is None) == (two is None) and (one is None or two is None or torch.equal(one, two))
        return alike and hash_examples(self.x) == hash_examples(other.x)


def widened(problem: Problem, count: int) -> Problem:
    """The same examples with more outputs, whose targets are zero."""
    residual = torch.cat([problem.residual, problem.residual.new_zeros(problem.n, count)], 1)
    weights = None if problem.weights is None else problem.weights[:, :1].expand(residual.shape)
    return replace(problem, residual=residual, weights=weights)


def places(of: Examples, first: int = 0) -> list[slice]:
    """The places of ``ROWS`` examples each, from one on."""
    n = batch_size(of.x)
    return [slice(start, min(start + ROWS, n)) for start in range(first, n, ROWS)]


class _Whitened(nn.Module):
    """A network with outputs in units of their noise."""

    def __init__(self, network: nn.Module, output: Any) -> None:
        super().__init__()
        self.network, self.output = network, output

    def forward(self, x: Any, weights: Tensor) -> Tensor:
        """The outputs f(x) ∘ w, (N, C)."""
        value = called(self.network, x, self.output)
        return value.reshape(value.shape[0], -1) * weights


def whitened(function: Functional) -> Functional:
    """The network f̃(x, w) = w ∘ f(x), whose Jacobian is J̃ = diag(w) J; made once."""
    if "whitened" not in function.cache.others:
        names = [f"network.{name}" for name in function.names]
        function.cache.others["whitened"] = Functional(_Whitened(function.model, function.output), names)
    double: Functional = function.cache.others["whitened"]
    return double


def whitened_inputs(problem: Problem) -> tuple[Inputs, Tensor]:
    """The inputs (x, w) of the network that ``whitened`` makes."""
    weights = torch.ones_like(problem.residual) if problem.weights is None else problem.weights
    return problem.x, weights.to(problem.function.dtype)
