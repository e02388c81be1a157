"""Equations on the outputs of a linear model: the same linear algebra with another prior.

Let Aδ = b be the equations, A = S J and b = v − S m for combinations S of outputs with prescribed values v.
An equation is an observation without noise, a penalty ½w‖b − Aδ‖² one of noise τ = ρ/w. With LLᵀ = AAᵀ + τI,
G(x) = J(x)Aᵀ L⁻ᵀ and g = L⁻¹b, the prior δ ~ N(0, σ²/ρ I) given them is that of a model with

    mean      m(x) + G(x) g                               kernel    K̃(x, x') = K(x, x') − G(x) G(x')ᵀ
    weights   δ = Wᵀg + P η,  W = L⁻¹A                     P² = I − WᵀW

in which η is free, with the prior that δ had. Solutions, leave-one-out, forgetting, updates, paths of ridges
and covariances follow from K̃, or from the rows J P, as they do from K and J: ``Conditioned`` are features
like others, for every loss and solver. In samples δ = Jᵀβ + Aᵀν with ν = L⁻ᵀ (g − G(X)ᵀ β).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg.factorize import cholesky
from linnet.linalg.operator import SymmetricOperator
from linnet.linear.features import Examples, Features, Memory, Weights
from linnet.linear.targets import Targets, make_targets
from linnet.memory import Plan, parse_bytes, require
from linnet.params import tensor
from linnet.tangent.batch import Inputs, batch_size, concatenate, split, take
from linnet.tangent.functional import Functional
from linnet.tangent.jacobian import vjp_columns
from linnet.tangent.linearized import Linearized
from linnet.tree import node

# -- equations -------------------------------------------------------------------------------------
#
# Linear equations on outputs: linear combinations of outputs with prescribed values.
#
# With S the weights of the combinations, f₀ and J those of the inputs, the equation S f(x) = v is Aδ = b
# with A = S J and b = v − S f₀.

TOGETHER = 64  # examples differentiated at once
SHARE = 0.2  # of the budget that a block of their kernel may take


@node()
@dataclass(frozen=True)
class Equations:
    """q combinations of the C outputs of M inputs, as a sparse matrix S (q, M·C)."""

    x: Inputs  # M examples
    row: Tensor  # which equation each weight belongs to, (k,)
    place: Tensor  # which output, example · C + output, (k,)
    weight: Tensor  # the weights, (k,), float64
    count: int  # q
    outputs: int  # C

    def combine(self, values: Tensor) -> Tensor:
        """S v for values of all outputs, (q,)."""
        # values (M·C,)
        weight = self.weight.to(values.dtype).view(-1, *[1] * (values.ndim - 1))
        total = values.new_zeros(self.count, *values.shape[1:])
        return total.index_add_(0, self.row, weight * values[self.place])

    def spread(self, multipliers: Tensor) -> Tensor:
        """Sᵀν, (M, C)."""
        # multipliers (q,)
        flat = multipliers.new_zeros(batch_size(self.x) * self.outputs)
        flat.index_add_(0, self.place, self.weight.to(flat) * multipliers[self.row])
        return flat.view(-1, self.outputs)

    def chosen(self, rows: Tensor) -> Equations:
        """Some of the equations, in the order given."""
        # rows (r,)
        number = torch.full((self.count,), -1, dtype=torch.long, device=self.row.device)
        number[rows] = torch.arange(len(rows), device=rows.device)
        kept = number[self.row] >= 0
        return replace(
            self,
            row=number[self.row][kept],
            place=self.place[kept],
            weight=self.weight[kept],
            count=len(rows),
        )

    def joined(self, other: Equations) -> Equations:
        """These equations and others."""
        shift = batch_size(self.x) * self.outputs
        return Equations(
            concatenate([self.x, other.x]),
            torch.cat([self.row, other.row + self.count]),
            torch.cat([self.place, other.place + shift]),
            torch.cat([self.weight, other.weight]),
            self.count + other.count,
            self.outputs,
        )

    def _parts(self, size: int) -> Iterator[tuple[Inputs, Tensor, Tensor, Tensor]]:
        """Examples block by block: equations, places within the block and weights that concern them."""
        for start in range(0, batch_size(self.x), size):
            part = take(self.x, slice(start, start + size))
            low = start * self.outputs
            here = (self.place >= low) & (self.place < low + batch_size(part) * self.outputs)
            yield part, self.row[here], self.place[here] - low, self.weight[here]

    def kernel_to(self, features: Features, x: Inputs, memory: Memory = None) -> Tensor:
        """S K(x_c, x), (q, T·C), in float64; no row of J is kept."""
        columns, of, device = batch_size(x) * self.outputs, features.examples(x), self.weight.device
        # the kernel in its own type and in float64
        size = int(SHARE * parse_bytes(memory, device)) // (columns * self.outputs * 2 * 8)
        total = torch.zeros(self.count, columns, dtype=torch.float64, device=device)
        for part, row, place, weight in self._parts(max(1, size)):
            kernel = by_output(features, features.cross(part, of, memory), self.outputs)
            total.index_add_(0, row, weight[:, None] * kernel.reshape(-1, columns).double()[place])
        return total

    def kernel(self, features: Features, memory: Memory = None) -> Tensor:
        """A Aᵀ, (q, q), in float64."""
        square = self.combine(self.kernel_to(features, self.x, memory).T.contiguous())
        return (square + square.T) / 2

    def jacobian(self, function: Functional, memory: str | int | None = None) -> Tensor:
        """Aᵀ, (P, q), in the network's type."""
        size = function.space.dim * self.count * function.dtype.itemsize
        plan = Plan(
            f"{self.count} equations in {function.space.dim} parameters",
            parse_bytes(memory, function.device),
            (("equations", size), ("their solutions", size)),
        )
        require(plan, ['fit with solver="dual"', "constrain fewer outputs", "raise memory="])
        total = torch.zeros(function.space.dim, self.count, dtype=function.dtype, device=function.device)
        for part, row, place, weight in self._parts(max(1, TOGETHER // self.outputs)):
            present, inverse = row.unique(return_inverse=True)
            n = batch_size(part) * self.outputs
            cotangents = torch.zeros(n, len(present), dtype=function.dtype, device=function.device)
            cotangents.index_put_((place, inverse), weight.to(function.dtype), accumulate=True)
            if len(present):
                columns = vjp_columns(function, part, cotangents.view(-1, self.outputs, len(present)))
                total[:, present] += columns
        return total

    def pull(self, function: Functional, multipliers: Tensor) -> Tensor:
        """Aᵀν, (P,)."""
        # multipliers (q,)
        cotangents = self.spread(multipliers).to(function.dtype)
        flat = torch.zeros(function.space.dim, dtype=function.dtype, device=function.device)
        for start in range(0, len(cotangents), TOGETHER):
            rows = slice(start, start + TOGETHER)
            flat += vjp_columns(function, take(self.x, rows), cotangents[rows])
        return flat

    def norms(self, features: Features, memory: Memory = None) -> Tensor:
        """Σ |S| √diag K: what the rounding of a row of A is relative to, (q,)."""
        own = features.rounded(self.x, memory).double()
        each = own[:, None].expand(-1, self.outputs) if features.shared else own.diagonal(dim1=1, dim2=2)
        return replace(self, weight=self.weight.abs()).combine(each.reshape(-1).clamp_min(0).sqrt())


def by_output(features: Features, kernel: Tensor, outputs: int) -> Tensor:
    """A kernel (T, N) of features that outputs share as (T, C, N, C); any other as it is."""
    if not features.shared:
        return kernel
    eye = torch.eye(outputs, dtype=kernel.dtype, device=kernel.device)
    return torch.einsum("tn,cd->tcnd", kernel, eye)


@dataclass(frozen=True)
class Wanted:
    """Equations and the values that they ask for."""

    equations: Equations  # S
    values: Tensor  # v, (q,), float64
    names: tuple[str, ...]  # what each equation says, for errors


def wanted(
    x: Inputs, targets: Any, groups: Any, like: Targets | None, outputs: int, device: torch.device
) -> Wanted:
    """The equations that a user asks for."""
    if targets is None and groups is None:
        raise InputError(
            "targets and groups are both missing",
            expected="targets= (outputs to hold), groups= (labels of groups with equal means), or both",
            remedy="pass targets=old_fit.predict(x) to keep old predictions",
        )
    m, c = batch_size(x), outputs
    parts = []
    if targets is not None:
        parts.append(_held_outputs(x, _outputs_wanted(targets, m, c, like).to(device), device))
    if groups is not None:
        parts.append(_equal_means(x, group_numbers(groups, m).to(device), c))
    if len(parts) == 1:
        return parts[0]
    first, second = (part.equations for part in parts)
    both = Equations(
        x,
        torch.cat([first.row, second.row + first.count]),
        torch.cat([first.place, second.place]),
        torch.cat([first.weight, second.weight]),
        first.count + second.count,
        c,
    )
    return Wanted(both, torch.cat([p.values for p in parts]), parts[0].names + parts[1].names)


def _outputs_wanted(targets: Any, m: int, c: int, like: Targets | None) -> Tensor:
    """Targets as float64 (M, C), free ones NaN."""
    free = "pass outputs, with NaN for those that are free"
    values = tensor("targets", targets, f"a tensor ({m}, {c})", free).detach()
    if (
        like is not None
        and not values.is_floating_point()
        and values.ndim == 1
        and values.dtype != torch.bool
        and len(values) == m
    ):
        return make_targets(values, c, like.scale, varied=False).values.double()
    if c == 1 and values.shape == (m,):
        values = values[:, None]
    if values.shape != (m, c) or not values.is_floating_point():
        raise InputError(
            f"targets has shape {tuple(values.shape)} and type {values.dtype}",
            expected=f"floats ({m}, {c}), one row for each example of x"
            + ("" if like is None else f", or integer classes ({m},)"),
            remedy="pass fit.predict(x), or NaN for outputs that are free",
        )
    if values.isinf().any():
        at = int(values.isinf().any(1).nonzero()[0])
        raise InputError(
            f"targets holds an infinite value at index {at}",
            expected="finite outputs, or NaN for those that are free",
            remedy="repair it, or set it to NaN",
        )
    if values.isnan().all():
        raise InputError(
            "targets holds nothing but NaN: every output is free",
            expected="at least one output to hold",
            remedy="pass the outputs that are to be held",
        )
    return values.double()


def _held_outputs(x: Inputs, values: Tensor, device: torch.device) -> Wanted:
    """One equation for each output that is not free."""
    c = values.shape[1]
    place = (~values.isnan()).reshape(-1).nonzero()[:, 0]
    count = len(place)
    equations = Equations(
        x,
        torch.arange(count, device=device),
        place,
        torch.ones(count, dtype=torch.float64, device=device),
        count,
        c,
    )
    names = tuple(f"output {p % c} of example {p // c}" for p in place.tolist())
    return Wanted(equations, values.reshape(-1)[place], names)


def group_numbers(groups: Any, m: int) -> Tensor:
    """Labels of groups as numbers from 0, every group with two members at least, and two groups at least."""
    number = "number the groups from 0"
    labels = tensor("groups", groups, f"one integer for each example of x, ({m},)", number).detach()
    if labels.shape != (m,) or labels.is_floating_point() or labels.is_complex():
        got = f"shape {tuple(labels.shape)} and type {labels.dtype}"
        raise InputError(
            f"groups is {type(groups).__name__} of {got}",
            expected=f"one integer for each example of x, ({m},)",
            remedy=number,
        )
    names, counts = labels.long().unique(return_counts=True)
    if len(names) < 2:
        raise InputError(
            f"groups names one group only ({int(names[0])})" if len(names) else "groups is empty",
            expected="at least two groups, whose means are to agree",
            remedy="pass the label of every example's group, or targets= for fixed outputs",
        )
    if (counts < 2).any():
        raise InputError(
            f"groups has a single member in group {int(names[counts < 2][0])}",
            expected="at least two examples in every group: one example has no mean",
            remedy="merge the group with another, or leave its example out",
        )
    return labels.long()


def _equal_means(x: Inputs, labels: Tensor, c: int) -> Wanted:
    """mean_g f − mean_0 f = 0 for every other group g and every output."""
    names, number = labels.unique(return_inverse=True)
    row, place, weight = [], [], []
    outputs = torch.arange(c, device=labels.device)
    base = (number == 0).nonzero()[:, 0]
    for g in range(1, len(names)):
        for members, sign in (((number == g).nonzero()[:, 0], 1.0), (base, -1.0)):
            places = members[:, None] * c + outputs
            place.append(places.reshape(-1))
            row.append(((g - 1) * c + outputs).expand_as(places).reshape(-1))
            weight.append(torch.full((places.numel(),), sign / len(members), dtype=torch.float64))
    count = (len(names) - 1) * c
    equations = Equations(x, torch.cat(row), torch.cat(place), torch.cat(weight).to(labels.device), count, c)
    first = int(names[0])
    said = tuple(
        f"equal means of output {k} in groups {int(names[g])} and {first}"
        for g in range(1, len(names))
        for k in range(c)
    )
    return Wanted(equations, torch.zeros(count, dtype=torch.float64, device=labels.device), said)


BATCH = 128  # examples predicted at once
ROUNDS = 3  # refinements of the equations after rounding
NAMED = 3  # equations that an error names


@node()
@dataclass(frozen=True)
class Constraints:
    """Equations that a fit obeys, ready for use."""

    equations: Equations  # S
    values: Tensor  # v, what S f is to be, (q,)
    gap: Tensor  # b = v − S m, (q,)
    slack: Tensor  # τ of each equation, (q,); 0 where it holds exactly
    factor: Tensor  # L, (q, q)
    redundant: int = 0  # number of equations that followed from the others and were left out

    @property
    def level(self) -> Tensor:
        """The level g = L⁻¹ b, (q,)."""
        return forward(self.factor, self.gap[:, None])[:, 0]

    @property
    def soft(self) -> bool:
        """Whether any of the equations is a penalty."""
        return bool((self.slack > 0).any())

    def multipliers(self, given: Tensor, beta: Tensor) -> Tensor:
        """ν = L⁻ᵀ (g − G(X)ᵀ β), (q,)."""
        # given (N·C, q), beta (N, C)
        return backward(self.factor, self.level - given.T @ beta.reshape(-1).to(given))

    def at_ridge(self, old: float, new: float) -> Constraints:
        """The same equations at another ridge: penalties keep their weight w, so that τ = ρ/w follows."""
        slack = self.slack * (new / old)
        # LLᵀ = AAᵀ + τI
        factor = cholesky(self.factor @ self.factor.T + torch.diag(slack - self.slack), "penalties")
        return replace(self, slack=slack, factor=factor)

    def errors(self, module: Linearized) -> Tensor:
        """The errors v − S f for the present δ, (q,)."""
        with torch.no_grad():
            outputs = [module(part) for part in split(self.equations.x, BATCH)]
        flat = torch.cat([out.reshape(-1) for out in outputs]).double()
        return self.values - self.equations.combine(flat)

    def refine(self, module: Linearized) -> None:
        """Remove what rounding left of the errors of equations that hold exactly, in place."""
        if not len(self.values):
            return
        eps = torch.finfo(module.function.dtype).eps
        scale = float(self.values.abs().max()) + float(self.gap.abs().max()) + 1e-300
        for _ in range(ROUNDS):
            left = torch.where(self.slack > 0, 0.0, self.errors(module))
            if float(left.abs().max()) <= eps * scale:
                break
            step = backward(self.factor, forward(self.factor, left[:, None])[:, 0])
            moved = module.space.to_params(self.equations.pull(module.function, step))
            with torch.no_grad():
                for name, value in moved.items():
                    module.delta[name].add_(value)

    def says(self) -> str:
        """One sentence about the equations."""
        exact, soft = int((self.slack == 0).sum()), int((self.slack > 0).sum())
        parts = [f"{exact} equation(s) hold exactly"] if exact else []
        parts += [f"{soft} weigh on the fit as a penalty"] if soft else []
        parts += [f"{self.redundant} redundant one(s) left out"] if self.redundant else []
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class Conditioned(Features):
    """Features given equations on outputs: K̃(x, x') = K(x, x') − G(x) G(x')ᵀ, in float64."""

    free: Features
    constraints: Constraints
    function: Functional
    memory: Memory = None
    shared = False

    def examples(self, x: Inputs) -> Examples:
        """Examples with their rows G."""
        return self.conditioned(self.free.examples(x))

    def conditioned(self, of: Examples) -> Examples:
        """The same examples of the free features, with their rows G."""
        return of._replace(given=self._given(Examples(of.x)))

    def _given(self, of: Examples, memory: Memory = None) -> Tensor:
        """G(x) = J(x) Aᵀ L⁻ᵀ, known or computed, (N, C, q)."""
        if of.given is not None:
            return of.given
        held = self.constraints
        across = held.equations.kernel_to(self.free, of.x, self.memory if memory is None else memory)
        return forward(held.factor, across).T.reshape(batch_size(of.x), held.equations.outputs, -1)

    def shift(self, of: Examples) -> Tensor:
        """G(x) g, (N, C): what the equations add to the mean before the data."""
        found: Tensor = self._given(of) @ self.constraints.level
        return found

    def _less(self, kernel: Tensor, one: Tensor, two: Tensor) -> Tensor:
        """K − G(x) G(x')ᵀ, (T, C, N, C)."""
        found = by_output(self.free, kernel, self.constraints.equations.outputs).double()
        return found - (one.flatten(0, 1) @ two.flatten(0, 1).T).view(found.shape)

    def kernel(self, of: Examples, memory: Memory = None) -> Tensor:
        """K̃(x, x), (N, C, N, C)."""
        given = self._given(of, memory)
        return self._less(self.free.kernel(of, memory), given, given)

    def cross(self, x: Inputs, train: Examples, memory: Memory = None) -> Tensor:
        """K̃(x, X), (T, C, N, C)."""
        given = self._given(Examples(x), memory), self._given(train, memory)
        return self._less(self.free.cross(x, train, memory), *given)

    def own(self, x: Inputs, memory: Memory = None) -> Tensor:
        """K̃(x_i, x_i), (T, C, C)."""
        found = []
        for part in split(x, BATCH):
            own, g = self.free.own(part, memory).double(), self._given(Examples(part), memory)
            if self.free.shared:
                own = own[:, None, None] * torch.eye(g.shape[1], dtype=own.dtype, device=own.device)
            found.append(own - g @ g.mT)
        return torch.cat(found)

    def plan(self, outputs: int, memory: Memory = None, copies: Sequence[str] = ()) -> Plan:
        """Those of the features without the equations."""
        return self.free.plan(outputs, memory, copies)

    @property
    def finite(self) -> bool:  # type: ignore[override]
        """Whether the features can be written as a model in weights."""
        return self.free.finite

    def weigh(
        self, into: Weights, train: Examples, beta: Tensor, scale: float = 1.0, memory: Memory = None
    ) -> None:
        """The examples of the equations take part with Sᵀν."""
        held = self.constraints
        nu = held.equations.spread(held.multipliers(self._given(train).flatten(0, 1), beta))
        both = Examples(train.x, train.rows).joined(self.free.examples(held.equations.x))
        self.free.weigh(into, both, torch.cat([beta, nu.to(beta)]), scale, memory)

    @cached_property
    def confined(self) -> Confined:
        """The weights that are left."""
        return Confined(self)


class Confined(SymmetricOperator):
    """P = I − Wᵀ F W, the symmetric root of I − WᵀW, and the least displacement Wᵀg of the equations."""

    def __init__(self, given: Conditioned) -> None:
        held, function = given.constraints, given.function
        rows = held.equations.jacobian(function, given.memory)  # Aᵀ
        self.columns = forward(held.factor, rows.T.double()).T.to(rows)  # Wᵀ, (P, q)
        # with WWᵀ = U μ Uᵀ, F = U (1 − √(1 − μ))/μ Uᵀ = U 1/(1 + √(1 − μ)) Uᵀ; μ = 1 where it holds exactly
        values, vectors = torch.linalg.eigh(self.columns.T.double() @ self.columns.double())
        self.inner = (vectors / (1 + (1 - values).clamp_min(0).sqrt())) @ vectors.T  # F
        self.center = (self.columns.double() @ held.level).to(rows)  # Wᵀg, (P,)
        self.shape = (len(rows), len(rows))
        self.dtype, self.device, self.space = function.dtype, function.device, function.space

    def mm(self, v: Tensor) -> Tensor:
        """P v for columns v (P, K)."""
        columns = self.columns.to(v)
        moved: Tensor = columns @ (self.inner.to(v) @ (columns.T @ v))
        return v - moved


def impose(
    free: Features,
    function: Functional,
    asked: Wanted,
    start: Tensor,
    slack: float,
    kernel: Tensor,
    before: Constraints | None,
    memory: Memory,
) -> Constraints:
    """The equations that are new and consistent, after those that the fit obeys already."""
    # start (M, C), m(x) there; kernel (q₀ + q, q₀ + q)
    equations, base = asked.equations, start.reshape(-1).double()
    gap = asked.values - equations.combine(base)
    old = 0 if before is None else before.equations.count
    own, cross = kernel[old:, old:], kernel[old:, :old]
    given = cross.new_zeros(len(gap), 0) if before is None else forward(before.factor, cross.T).T
    rest = own - given @ given.T
    left = gap if before is None else gap - given @ before.level
    tau = torch.full_like(gap, slack)
    if slack > 0:
        order = torch.arange(len(gap), device=gap.device)
        factor = cholesky(rest + torch.diag(tau), "kernel of the constraints")
    else:
        norms = equations.norms(free, memory)
        order, factor, residual = _independent(rest, left, norms, torch.finfo(function.dtype).eps)
        _consistent(asked, residual, order, base, function.dtype)
    kept, redundant = equations.chosen(order), len(gap) - len(order)
    new = Constraints(kept, asked.values[order], gap[order], tau[order], factor, redundant)
    if before is None:
        return new
    top = torch.cat([before.factor, before.factor.new_zeros(old, len(order))], 1)
    return Constraints(
        before.equations.joined(kept),
        torch.cat([before.values, new.values]),
        torch.cat([before.gap, new.gap]),
        torch.cat([before.slack, new.slack]),
        torch.cat([top, torch.cat([given[order], factor], 1)]),
        before.redundant + redundant,
    )


def _independent(kernel: Tensor, gap: Tensor, norms: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Cholesky with pivots: equations that do not follow from others, L of their kernel, errors of all."""
    scale = torch.where(norms > 0, norms, 1.0)
    rest = kernel.diagonal() / scale**2  # what is left of each row, relative to what it could be
    tolerance = eps**0.7
    columns = kernel.new_zeros(len(gap), len(gap))
    order: list[int] = []
    error = gap.clone()
    for k in range(len(gap)):
        best = int(rest.argmax())
        if rest[best] <= tolerance:
            break
        # ℓ_k = (K_·p − Σ_j ℓ_j ℓ_pj) / √pivot
        column = kernel[:, best] - columns[:, :k] @ columns[best, :k]
        pivot = column[best].sqrt()
        column = column / pivot
        column[order] = 0
        columns[:, k] = column
        error = error - column * (error[best] / pivot)
        rest = (rest - (column / scale) ** 2).clamp_min(0)
        order.append(best)
        rest[order] = 0
    places = torch.tensor(order, dtype=torch.long, device=gap.device)
    return places, columns[places, : len(order)], error


def _consistent(asked: Wanted, error: Tensor, order: Tensor, base: Tensor, dtype: torch.dtype) -> None:
    """Raise if an equation that follows from the others is not met when they are."""
    scale = max(float(asked.values.abs().max()), float(base.abs().max()), 1e-300)
    limit = math.sqrt(torch.finfo(dtype).eps) * scale
    dropped = torch.ones_like(error, dtype=torch.bool)
    dropped[order] = False
    wrong = (dropped & (error.abs() > limit)).nonzero()[:, 0]
    if not len(wrong):
        return
    said = "; ".join(f"{asked.names[i]}: residual {float(error[i]):.3g}" for i in wrong[:NAMED].tolist())
    more = f", and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    raise InputError(
        f"the constraints contradict each other or cannot be reached ({said}{more})",
        expected="equations that some weights can meet at once, such as one target for equal inputs",
        remedy="drop one of them, set its target to NaN, or pass weight= to weigh them instead",
    )


def forward(factor: Tensor, b: Tensor) -> Tensor:
    """L⁻¹ b for columns b."""
    solved: Tensor = torch.linalg.solve_triangular(factor, b, upper=False)
    return solved


def backward(factor: Tensor, b: Tensor) -> Tensor:
    """L⁻ᵀ b for a vector b."""
    solved: Tensor = torch.linalg.solve_triangular(factor.T, b[:, None], upper=True)
    return solved[:, 0]
