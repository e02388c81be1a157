"""The data of a linear model with any convex loss: Σᵢ ℓ(fᵢ, yᵢ) with outputs f = m + Jδ.

The loss is the negative logarithm of a likelihood that is canonical in f, so that Σᵢ Jᵢᵀ Λᵢ Jᵢ is the
Gauss-Newton matrix, the Fisher information and the Hessian in one. Of classes, with p = softmax(f) (or σ(f)
for one output) and labels y that may be probabilities themselves,

    ℓ_i = −Σ_c y_ic log p_ic        g_i = p_i − y_i        Λ_i = diag(p_i) − p_i p_iᵀ = L_i L_iᵀ

where L_i has C − 1 columns (one for one output): softmax does not see a shift of all outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.products import weighted
from linnet.distributed import current, share_sum
from linnet.errors import DataError, InputError
from linnet.likelihoods.discrete import Bernoulli, Categorical
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.operator import LinearOperator, SymmetricOperator
from linnet.linear.constraints import Constraints
from linnet.linear.features import Examples, Features
from linnet.linear.problem import LinearModel, Memory
from linnet.linear.targets import Targets, make_targets, require_finite_rows
from linnet.memory import parse_bytes
from linnet.tangent.batch import Inputs, all_but, concatenate, require_some, take
from linnet.tangent.functional import Functional
from linnet.tangent.jacobian import jacobian

SHARE = 0.25  # of the memory budget that J may take: kept, a product costs what it takes to read it
MOST = 4 << 30  # bytes that it may take
EACH = 4096  # outputs of an example above which J is not formed: a solve takes some hundred products with it
SUMS = 1e-4  # by how much the probabilities of an example may miss the sum of one


@dataclass(frozen=True, eq=False)
class LabelProblem(LinearModel):
    """A linear model, its training data and what its outputs mean."""

    function: Functional
    x: Inputs
    base: Tensor  # m, the mean before the data, (N, ...), float64, with what equations on outputs add
    likelihood: Likelihood
    y: Tensor
    room: int = 0  # bytes that J may take: where it is no larger it is kept
    features: Features | None = None
    formed: Examples | None = None

    @property
    def n(self) -> int:
        """N."""
        return self.base.shape[0]

    @property
    def c(self) -> int:
        """C, or the number of all outputs of an example."""
        return self.base[0].numel()

    @cached_property
    def rows(self) -> Tensor | None:
        """J, (N, C, P), where there is space for it; ``None`` elsewhere."""
        function = self.function
        size = self.base.numel() * function.space.dim * function.dtype.itemsize
        fits = self.held is None and self.c <= EACH and size <= self.room
        return jacobian(function, self.x) if fits else None

    def push(self, delta: Tensor) -> Tensor:
        """J δ on the data, (N, ...), float64."""
        moved = self.moved(delta[:, None]) if self.rows is None else self.rows @ delta
        return moved.double().reshape(self.base.shape)

    def pull(self, slopes: Tensor) -> Tensor:
        """Jᵀ u for u (N, ...), (P,), in the network's type."""
        u = slopes.reshape(-1, 1)
        if self.rows is None:
            return self.pulled(u)[:, 0]
        return self.rows.flatten(0, 1).T @ u[:, 0].to(self.function.dtype)

    def losses(self, f: Tensor) -> Tensor:
        """ℓ(fᵢ, yᵢ) at outputs f (N, ...), (N,), float64."""
        return self.likelihood.nll(f.double(), self.y)

    def gradient(self, f: Tensor) -> Tensor:
        """The gradient g of the loss in the outputs, (N, ...), float64."""
        return self.likelihood.gradient(f.double(), self.y)

    def roots(self, f: Tensor) -> Tensor:
        """L_i with L_i L_iᵀ = Λ_i at outputs f (N, C), (N, C, D)."""
        return self.likelihood.position_root(f.double(), self.y)[:, 0]

    def hessian(self, f: Tensor) -> LinearOperator:
        """JᵀΛJ with Λ at outputs f (N, ...), in the weights that equations leave."""
        found = OutputHessian(self, f)
        return found if self.confined is None else self.confined @ found @ self.confined

    def without(self, index: Tensor) -> LabelProblem:
        """The problem without some examples."""
        # index (k,)
        return self.taken(all_but(self.n, index.to(self.base.device)).nonzero()[:, 0])

    def taken(self, index: Tensor) -> LabelProblem:
        """The problem of some of the examples."""
        # index (k,)
        formed = None if self.formed is None else self.formed.taken(index)
        x = take(self.x, index) if formed is None else formed.x
        made = replace(self, x=x, base=self.base[index], y=self.y[index], formed=formed)
        if (rows := self.__dict__.get("rows")) is not None:  # which take no derivatives again
            made.__dict__["rows"] = rows[index]
        return made

    def of(self, x: Inputs, base: Tensor, y: Tensor) -> LabelProblem:
        """The same model on other data, with m there as it is without equations on outputs."""
        formed = None if self.formed is None else self.basis.examples(x)
        made = replace(self, x=x, base=base.double(), y=y, formed=formed)
        return made if self.held is None else replace(made, base=made.base + made.shift())

    @property
    def free_base(self) -> Tensor:
        """M as it is without equations on outputs, (N, ...)."""
        return self.base if self.held is None else self.base - self.shift()

    def given(self, constraints: Constraints, samples: bool, memory: Memory = None) -> LabelProblem:
        """The same data under other equations than before, for a solution in samples or in weights."""
        base = self.free_base
        held, formed = self.conditioned(constraints, samples, memory)
        made = replace(self, base=base, features=held, formed=formed)
        return replace(made, base=base + made.shift())

    def joined(self, more: LabelProblem) -> LabelProblem:
        """These examples and then others."""
        formed = None if self.formed is None else self.formed.joined(more.examples)
        x = concatenate([self.x, more.x]) if formed is None else formed.x
        base, y = torch.cat([self.base, more.base.to(self.base)]), torch.cat([self.y, more.y.to(self.y)])
        return replace(self, x=x, base=base, y=y, formed=formed)


class OutputHessian(SymmetricOperator):
    """Σᵢ Jᵢᵀ Λᵢ Jᵢ over the data, P × P: the Hessian of the loss in δ."""

    # outputs (N, ...)

    def __init__(self, problem: LabelProblem, outputs: Tensor) -> None:
        function = problem.function
        self.problem, self.outputs = problem, outputs.to(function.dtype)
        self.shape = (function.space.dim, function.space.dim)
        self.dtype, self.device, self.space = function.dtype, function.device, function.space

    def mm(self, v: Tensor) -> Tensor:
        """JᵀΛJ v: (P, K) to (P, K)."""
        problem, f = self.problem, self.outputs
        if (rows := problem.rows) is None:
            return self._differentiated(v)
        flat = rows.flatten(0, 1)
        moved = (flat @ v).T.reshape(v.shape[1], *f.shape)
        return flat.T @ problem.likelihood.product(f, moved, problem.y).reshape(v.shape[1], -1).T

    def _differentiated(self, v: Tensor) -> Tensor:
        """The product from derivatives; each process of several takes its share of the examples."""
        problem = self.problem
        share = current()
        own = share.part(len(self.outputs))
        f, y = self.outputs[own], problem.y[own]

        def weigh(_: Tensor, t: Tensor, place: slice) -> Tensor:
            """Λ t of some examples, at the outputs that are given."""
            at = f[place]
            return problem.likelihood.product(at, t.reshape(len(t), *at.shape), y[place]).reshape(t.shape)

        if share.world == 1:
            return weighted(problem.function, problem.x, v, weigh)
        total = v.new_zeros(v.shape)
        if len(f):
            total += weighted(problem.function, take(problem.x, own), v, weigh)
        share_sum([total])
        return total


def room_for_rows(function: Functional, memory: Memory = None) -> int:
    """Bytes that the rows of J may take in a budget."""
    return min(MOST, int(SHARE * parse_bytes(memory, function.device)))


@dataclass(frozen=True)
class WeighedLosses:
    """The losses of a likelihood, each times the weight in the last column of y."""

    # f (N, C), y (N, D + 1)

    likelihood: Likelihood

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """The loss times its weight, (N,)."""
        return y[:, -1] * self.likelihood.nll(f, y[:, :-1])

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """The gradient times its weight, (N, C)."""
        return y[:, -1:].to(f) * self.likelihood.gradient(f, y[:, :-1])

    def product(self, f: Tensor, v: Tensor, y: Tensor) -> Tensor:
        """The product Λ v times the weight, for v (K, N, C)."""
        return y[:, -1:].to(f) * self.likelihood.product(f, v, y[:, :-1])

    def position_root(self, f: Tensor, y: Tensor) -> Tensor:
        """√w L, (N, 1, C, D)."""
        return y[:, -1, None, None, None].to(f).sqrt() * self.likelihood.position_root(f, y[:, :-1])


def class_problem(function: Functional, x: Inputs, base: Tensor, targets: Targets) -> LabelProblem:
    """The cross-entropy against label probabilities (N, C): of C classes, or of yes or no for one output."""
    # base (N, C)
    likelihood: Any = Bernoulli() if targets.values.shape[1] == 1 else Categorical()
    likelihood = likelihood if targets.weights is None else WeighedLosses(likelihood)
    return LabelProblem(function, x, base.double(), likelihood, weighed_labels(targets))


def weighed_labels(targets: Targets) -> Tensor:
    """Label probabilities, and behind them the weights where there are any, (N, C) or (N, C + 1)."""
    y = targets.values.double()
    return y if targets.weights is None else torch.cat([y, targets.weights[:, None]], 1)


def class_targets(y: Tensor, outputs: int, dtype: torch.dtype) -> Targets:
    """Label probabilities (N, C) for a network with C outputs."""
    # y (N,)
    if y.is_floating_point():
        return Targets(_probabilities(y, outputs).to(dtype), max(2, outputs), 1.0)
    if y.numel() and not y.is_complex() and y.dtype != torch.bool and bool((y < 0).any()):
        first = int((y.flatten() < 0).nonzero()[0])
        raise DataError(
            f"y holds the negative label {int(y.flatten()[first])} at index {first}",
            expected=f"classes 0 to {max(2, outputs) - 1}, one for each example",
            remedy="leave out the examples that should not count: x[y >= 0], y[y >= 0]; for a class at every "
            "position, as in texts, pass axis=-1, where -100 does not count",
        )
    # for one output, labels 0 and 1
    made = make_targets(y, max(2, outputs), 1.0, varied=False, dtype=dtype)
    return made if outputs > 1 else Targets(made.values[:, 1:], 2, 1.0)


def _probabilities(y: Tensor, outputs: int) -> Tensor:
    """Float labels as (N, C)."""
    values = y[:, None] if y.ndim == 1 and outputs == 1 else y
    if values.ndim != 2 or values.shape[1] != outputs:
        raise InputError(
            f"y has type {y.dtype} and shape {tuple(y.shape)}",
            expected=f"integer classes (N,), or probabilities (N, {outputs})",
            remedy='convert classes with y.long(); for regression targets pass loss="squared"',
        )
    require_some(values, "y")
    require_finite_rows(values, "probabilities")
    sums = values.double().sum(1)
    wrong = (values < 0).any(1) | (values > 1 + SUMS).any(1)
    if outputs > 1:
        wrong = wrong | ((sums - 1).abs() > SUMS)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        shown = [round(v, 4) for v in values[first].tolist()[:4]]
        raise InputError(
            f"y is of float type, and at index {first} it is no probability: {shown}",
            expected="integer classes, or probabilities"
            + (" that sum to one for each example" if outputs > 1 else " from 0 to 1"),
            remedy='convert classes with y.long(); for regression targets pass loss="squared"',
        )
    return values
