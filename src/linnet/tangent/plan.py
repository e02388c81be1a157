"""Plans how each parameter is differentiated, verified on a few examples.

The layout of every use is found from the gradients of single examples, and the gradients that the
rules give are compared with autograd's. What does not agree is differentiated example by example. A
use whose gradient vanishes on all probes (a dead unit, below a zero head) is looked at again at weights that
are drawn. Where it vanishes there too it proves nothing: it stays *unproven*, and the plan is made
again when its gradient is first seen.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from linnet.errors import LinnetError
from linnet.linalg.factorize import read
from linnet.tangent.batch import Inputs, batch_size, example_shapes, take
from linnet.tangent.forward_mode import Params, hand_over, largest, largest_difference, sketch
from linnet.tangent.functional import FAILURES, Functional
from linnet.tangent.gradients import batched_grad, sharing_uses
from linnet.tangent.independence import (
    KnownOutputs,
    only_of,
    require_independence,
    require_one_function,
    require_own_gradients,
    settle_unused,
)
from linnet.tangent.rules import Captured, Layout, Use, example_axes, find_layout
from linnet.tangent.trace import Trace, trace, weighed_trace

PROBES = 3  # examples traced at once to prove a plan
HIDDEN = "it is read where no operation is seen"
APART = "it meets a constant that is not known to belong to the examples, as x.new_zeros(len(x), ...) is"
DRAWS = 2  # weights drawn where a gradient vanishes on all probes
TRIES = 8  # groups of probes looked at before a vanishing gradient is left unproven

Key = tuple[tuple[str, ...], int]  # sources of a use, and how many uses of the same sources came before


@dataclass(frozen=True)
class Bytes:
    """Bytes of one example."""

    gradients: int  # gradients at all uses, for one cotangent
    inputs: int  # inputs to all uses
    saved: int  # activations that autograd keeps for a backward pass, parameters apart
    fields: int  # receptive fields of all convolutions


@dataclass(frozen=True)
class DerivativePlan:
    """Differentiation method of every tracked parameter."""

    layouts: dict[Key, Layout]  # layout of each use that is taken
    exact: dict[str, str]  # parameters that are differentiated example by example, and why
    unused: tuple[str, ...]  # parameters that the outputs do not depend on
    unproven: frozenset[Key]  # uses whose gradient has been zero so far
    bytes: Bytes  # what an example takes


def keyed(uses: Sequence[Use]) -> list[tuple[Key, Use]]:
    """Every use with a key that repeats from batch to batch."""
    seen: dict[tuple[str, ...], int] = {}
    pairs = []
    for use in uses:
        count = seen[use.sources] = seen.get(use.sources, -1) + 1
        pairs.append(((use.sources, count), use))
    return pairs


def plan_for(
    function: Functional, run: Trace, x: Inputs, renew: bool = False, turned: Tensor | None = None
) -> DerivativePlan:
    """The plan for passes like ``run``; made on first sight, then kept."""
    plans: dict[Any, DerivativePlan] = function.cache.plans
    kind = run.signature
    seen = KnownOutputs(run.outputs.detach(), turned)
    require_independence(function, x, kind, seen)  # once more when the first larger batch comes
    if renew or kind not in plans:
        plans[kind] = _make_plan(function, run, x, None if renew else TRIES)
        settle_unused(function, x, _never_used(run, plans.values()))
        require_one_function(function, x)
    plan = function.cache.plans_by_shape[example_shapes(x)] = plans[kind]
    return plan


def _never_used(run: Trace, plans: Collection[DerivativePlan]) -> set[str]:
    """Parameters that neither this pass nor one of another plan uses; routed ones wait for their examples."""
    used = {name for use in run.uses for name in use.sources} | set(run.unhandled)
    return set.intersection(*(set(plan.unused) for plan in plans)) - used


def amend(function: Functional, run: Trace, x: Inputs, wrong: set[str]) -> DerivativePlan:
    """The plan with more parameters differentiated example by example."""
    plans: dict[Any, DerivativePlan] = function.cache.plans
    old = plans[run.signature]
    reasons = dict.fromkeys(sorted(sharing_uses(wrong, run.uses)), HIDDEN)
    unused = tuple(name for name in old.unused if name not in reasons)
    plans[run.signature] = replace(old, exact={**reasons, **old.exact}, unused=unused)
    return plan_for(function, run, x)


def expected_plan(function: Functional, x: Inputs) -> DerivativePlan:
    """The plan of the last pass over examples of these shapes, for predictions of memory."""
    known: DerivativePlan | None = function.cache.plans_by_shape.get(example_shapes(x))
    if known is not None:
        return known
    few = take(x, slice(0, min(PROBES, batch_size(x))))
    return plan_for(function, weighed_trace(function, few), x)


@dataclass
class _Draft:
    """Findings so far, while a plan is made."""

    exact: dict[str, str]
    layouts: dict[Key, Layout] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def open_uses(self, probe: Trace) -> list[tuple[Key, Use]]:
        """Uses of parameters that a rule may still cover."""
        dropped = {*self.exact, *self.unused}
        return [(key, use) for key, use in keyed(probe.uses) if not dropped & set(use.sources)]

    def unproven(self, probe: Trace) -> frozenset[Key]:
        """Those of them whose gradient has been zero so far."""
        return frozenset(key for key, _ in self.open_uses(probe) if key not in self.layouts)


def _make_plan(function: Functional, run: Trace, x: Inputs, tries: int | None) -> DerivativePlan:
    """Look at groups of probes until every use has shown a gradient, or the tries are spent."""
    found = _Draft({name: "no rule for " + ", ".join(sorted(ops)) for name, ops in run.unhandled.items()})
    # three different examples first, then single ones thrice until all gradients have been seen
    groups = [[i % run.n for i in range(PROBES)], *([i] * PROBES for i in range(run.n))]
    for group in groups[:tries]:
        few = take(x, group)
        probe = run if _looked_at(run, group) else weighed_trace(function, few)
        if group is groups[0]:
            _compare_passes(found, probe, run)
        gradients = _gradients_alone(found, probe)
        _find_layouts(found, probe, gradients)
        _prove(found, function, probe, gradients, few if group is groups[0] else None)
        if not found.unproven(probe):
            break
    for seed in range(DRAWS):
        if not found.unproven(probe):
            break
        _prove_elsewhere(found, function, take(x, groups[0]), probe, seed)
    open_uses, unproven = found.open_uses(probe), found.unproven(probe)
    if tries is None:  # some gradient does not vanish in this batch, yet no example shows where it is
        reason = "its gradient could not be separated by example"
        found.exact.update({name: reason for sources, _ in unproven for name in sources})
        unproven = frozenset()
    size = _bytes([use for _, use in open_uses], probe.saved_bytes or 0)
    return DerivativePlan(found.layouts, found.exact, found.unused, unproven, size)


def _prove_elsewhere(found: _Draft, function: Functional, few: Inputs, probe: Trace, seed: int) -> None:
    """Take the layouts of uses without a gradient from weights that are drawn, where the rules hold there."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator).to(t)
        size = float(t.square().mean().sqrt()) or 1 / max(t.shape[-1] if t.ndim else 1, 1) ** 0.5
        return t + size * noise

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            other = trace(function, few, {name: drawn(t) for name, t in function.theta.items()})
        except (LinnetError, *FAILURES):  # weights that the network cannot have
            return
    if other.signature != probe.signature or not bool(other.outputs.isfinite().all()):
        return
    draft = _Draft(dict(found.exact), unused=found.unused)
    gradients = _gradients_alone(draft, other)
    _find_layouts(draft, other, gradients)
    _prove(draft, function, other, gradients, None)
    for key, use in found.open_uses(probe):
        if key in draft.layouts and not set(use.sources) & set(draft.exact):
            found.layouts.setdefault(key, draft.layouts[key])


def _looked_at(run: Trace, group: Sequence[int]) -> bool:
    """Whether a pass is itself one of these examples, weighed."""
    return run.saved_bytes is not None and list(group) == list(range(run.n))


def _compare_passes(found: _Draft, probe: Trace, run: Trace) -> None:
    """Parameters that are used differently in the probe and in the batch have no fixed rule."""

    def by_source(t: Trace) -> dict[str, list[Any]]:
        uses: dict[str, list[Any]] = {}
        for use in t.uses:
            for name in use.sources:
                uses.setdefault(name, []).append(use.signature)
        return uses

    first, second = by_source(probe), by_source(run)
    for name in {*first, *second}:
        if first.get(name) != second.get(name):
            found.exact.setdefault(name, "its use changes from batch to batch")
    for name, operations in probe.unhandled.items():
        found.exact.setdefault(name, "no rule for " + ", ".join(sorted(operations)))


def _gradients_alone(found: _Draft, probe: Trace) -> dict[Any, Tensor | None]:
    """Autograd's own gradients at the open uses, by place, of each probe's outputs alone: (n, *shape)."""
    edges = {use.place: use.result.edge for _, use in found.open_uses(probe)}
    if not (edges and probe.outputs.requires_grad):
        return dict.fromkeys(edges)
    # (n, n, C): row i holds example i's cotangent only
    alone = torch.diag_embed(_weights(probe).T).permute(1, 2, 0)
    return dict(zip(edges, batched_grad(probe.outputs, list(edges.values()), alone), strict=True))


def _weights(probe: Trace) -> Tensor:
    """A fixed random cotangent (n, C) for the probes."""
    return torch.randn(probe.outputs.shape, generator=torch.Generator().manual_seed(0)).to(probe.outputs)


def _find_layouts(found: _Draft, probe: Trace, gradients: Mapping[Any, Tensor | None]) -> None:
    """Set the layout of every use whose gradient shows it; what has none is named."""
    shown = {place: g is not None and bool(g.flatten(1).any(1).all()) for place, g in gradients.items()}
    known: dict[Any, Layout | None] = {}  # a weight and the bias added to its product share their result
    for key, use in found.open_uses(probe):
        if key in found.layouts:
            use.layout = found.layouts[key]
        elif shown[use.place]:
            g = gradients[use.place]
            assert g is not None
            own, axes = use.oriented(g), tuple(example_axes(use))
            same = (use.place, own.shape, own.stride(), axes)
            if same not in known:
                known[same] = find_layout(own, axes, probe.n)
            layout = known[same]
            if layout is None:
                reason = "examples are mixed where it is used" if axes else APART
                found.exact.update(dict.fromkeys(use.sources, reason))
            else:
                use.layout = found.layouts[key] = layout


def _prove(
    found: _Draft,
    function: Functional,
    probe: Trace,
    gradients: Mapping[Any, Tensor | None],
    few: Inputs | None,
) -> None:
    """Compare the rules' gradients with autograd's on the probes, and those with single examples' of few."""
    uses = [use for key, use in found.open_uses(probe) if key in found.layouts]
    waiting = [use for key, use in found.open_uses(probe) if key not in found.layouts]
    # a use without any gradient here adds nothing; of one with some, it is not known where the examples are
    open_here = [use for use in waiting if (g := gradients[use.place]) is not None and bool(g.any())]
    undecided = {*found.exact, *(name for use in open_here for name in use.sources)}
    for use in uses:
        g = gradients[use.place]
        # of all examples at once: gradients are linear in the cotangents
        use.g = probe.outputs.new_zeros(1, *use.shape) if g is None else g.sum(0, keepdim=True)
    ruled = Captured(probe.n, probe.outputs, uses, probe.leaves, {}, 1)
    sizes: dict[str, list[Tensor]] = {}  # for each example the largest entry, and that of what the rules miss
    together: dict[int, Params] = {0: {}, probe.n - 1: {}} if few is not None else {}
    for i in range(probe.n):

        def compare(name: str, g: Tensor, i: int = i) -> None:
            sizes.setdefault(name, []).extend(_compared(ruled, g, name, i, name in undecided))
            if i in together:
                together[i][name] = sketch(g)

        hand_over(probe.outputs, probe.leaves, only_of(_weights(probe), i), compare)
    if few is not None:
        require_own_gradients(function, few, together, _weights(probe))
    numbers = iter(read([size for own in sizes.values() for size in own]))
    compared = {name: [next(numbers) for _ in own] for name, own in sizes.items()}
    whole = max((_most(own[::2]) for own in compared.values()), default=0.0)
    for name, own in compared.items():
        expected, missed = _most(own[::2]), _most(own[1::2])
        if name not in undecided and not _matches(expected, missed, whole, probe.leaves[name].dtype):
            hidden = not any(name in use.sources for use in uses)
            reason = HIDDEN if hidden else "its rule disagrees with autograd here"
            found.exact.update(dict.fromkeys(sorted(sharing_uses({name}, uses)), reason))
    found.unused = tuple(name for name in probe.leaves if name not in compared)
    found.exact = {name: why for name, why in found.exact.items() if name not in found.unused}


def _most(sizes: Sequence[float]) -> float:
    """The largest; NaN where one is."""
    return max(sizes, key=lambda size: (math.isnan(size), size))


def _compared(ruled: Captured, g: Tensor, name: str, i: int, undecided: bool) -> tuple[Tensor, Tensor]:
    """The largest entry of autograd's gradient of one example, and of what the rules miss."""
    size, none = largest(g), g.new_zeros(())
    if undecided:
        return size, none
    try:
        row = ruled.rows(name, only=i)[0, 0]
    except RuntimeError:  # a shape that the rule did not foresee
        return size, torch.full_like(none, torch.nan)
    return size, largest_difference(row, g)


def _matches(expected: float, missed: float, largest: float, dtype: torch.dtype) -> bool:
    """Whether the rules reproduce autograd's per-example gradients, given the largest entries."""
    tolerance = {torch.float64: 1e-7, torch.float32: 2e-3}.get(dtype, 1e-1)
    return missed <= tolerance * (expected + 1e-2 * largest)


def _bytes(uses: Sequence[Use], saved: int) -> Bytes:
    """Bytes of one of the probes, given what autograd keeps of it."""
    inputs = {use.a.data_ptr(): use.a for use in uses if use.a is not None}
    edges = {use.place: use.shape.numel() for use in uses}
    item = uses[0].target.element_size() if uses else 4
    gradients = sum(edges.values()) + sum(map(_copied, uses))
    fields = sum({use.place: _fields(use) for use in uses if use.kind == "conv"}.values())
    read = sum(a.nbytes for a in inputs.values())
    return Bytes(gradients * item // PROBES, read // PROBES, saved, fields * item // PROBES)


def _fields(use: Use) -> int:
    """Size of a convolution's receptive fields at all positions."""
    groups: int = use.options["groups"]
    return use.shape[0] * use.shape[2:].numel() * use.target.shape[1:].numel() * groups


def _copied(use: Use) -> int:
    """Size of the fields of a transposed convolution, copied from its gradient."""
    if use.kind != "conv-transposed" or use.a is None:
        return 0
    groups: int = use.options["groups"]
    return use.a.shape[0] * use.a.shape[2:].numel() * groups * use.target.shape[1:].numel()
