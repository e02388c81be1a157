"""Linear equations on outputs: linear combinations of outputs with prescribed values.

With S the weights of the combinations, f₀ and J those of the inputs, the equation S f(x) = v is
Aδ = b with A = S J and b = v − S f₀.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linear.targets import Targets, make_targets
from linnet.memory import Plan, parse_bytes, require
from linnet.params import tensor
from linnet.tangent.batch import Inputs, batch_size, concatenate, take
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram, own_kernels
from linnet.tangent.jacobian import vjp_columns

TOGETHER = 64  # examples differentiated at once


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

    def kernel_to(self, function: Functional, x: Inputs, memory: str | int | None = None) -> Tensor:
        """A J(x)ᵀ = S K(x_c, x), (q, T·C), in float64; no row of J is kept."""
        columns = batch_size(x) * self.outputs
        budget = parse_bytes(memory, function.device)
        size = max(1, int(0.2 * budget) // (columns * self.outputs * (function.dtype.itemsize + 8)))
        total = torch.zeros(self.count, columns, dtype=torch.float64, device=function.device)
        for part, row, place, weight in self._parts(size):
            kernel = gram(function, part, x, form="full", memory=memory).reshape(-1, columns).double()
            total.index_add_(0, row, weight[:, None] * kernel[place])
        return total

    def kernel(self, function: Functional, memory: str | int | None = None) -> Tensor:
        """A Aᵀ, (q, q), in float64."""
        square = self.combine(self.kernel_to(function, self.x, memory).T.contiguous())
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

    def norms(self, function: Functional, memory: str | int | None = None) -> Tensor:
        """Σ |S| √diag K: what the norm of a row of A could be without cancellation, (q,)."""
        own = own_kernels(function, self.x, memory).double().diagonal(dim1=1, dim2=2).reshape(-1)
        return replace(self, weight=self.weight.abs()).combine(own.clamp_min(0).sqrt())


@dataclass(frozen=True)
class Wanted:
    """Equations and the values that they ask for."""

    equations: Equations  # S
    values: Tensor  # v, (q,), float64
    names: tuple[str, ...]  # what each equation says, for errors


def wanted(x: Inputs, targets: Any, groups: Any, like: Targets, device: torch.device) -> Wanted:
    """The equations that a user asks for."""
    if targets is None and groups is None:
        raise InputError(
            "targets and groups are both missing",
            expected="targets= (outputs to hold), groups= (labels of groups with equal means), or both",
            remedy="pass targets=old_fit.predict(x) to keep old predictions",
        )
    m, c = batch_size(x), like.values.shape[1]
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


def _outputs_wanted(targets: Any, m: int, c: int, like: Targets) -> Tensor:
    """Targets as float64 (M, C), free ones NaN."""
    free = "pass outputs, with NaN for those that are free"
    values = tensor("targets", targets, f"a tensor ({m}, {c})", free).detach()
    if (
        not values.is_floating_point()
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
            expected=f"floats ({m}, {c}), one row for each example of x, or integer classes ({m},)",
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
    labels = tensor("groups", groups, f"one integer for each example of x, ({m},)").detach()
    if labels.shape != (m,) or labels.is_floating_point() or labels.is_complex():
        got = f"shape {tuple(labels.shape)} and type {labels.dtype}"
        raise InputError(
            f"groups is {type(groups).__name__} of {got}",
            expected=f"one integer for each example of x, ({m},)",
            remedy="number the groups from 0",
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
