"""Captures the input a and the output gradient g of every use of every tracked parameter.

One forward pass and C cotangents back to the results of the uses: gradients of weights are
never formed. ``plan`` decides what each parameter is treated by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from linnet.number_types import wide_type
from linnet.tangent.batch import Inputs, take
from linnet.tangent.coordinates import kernel_part, moved_network, pulled_parts
from linnet.tangent.forward_mode import handed_over, sketch
from linnet.tangent.functional import Functional
from linnet.tangent.gradients import disagreeing, exact_rows, random_cotangent, use_gradients
from linnet.tangent.independence import MOST, backwards
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.nonfinite import require_finite_derivative
from linnet.tangent.plan import DerivativePlan, Key, amend, expected_plan, keyed, plan_for
from linnet.tangent.rules import Captured, Form, Use, fits
from linnet.tangent.trace import Trace, trace, weighed_trace

Parts = list[Callable[[], Tensor]]
Cotangents = Tensor | Form | range | Callable[[Tensor], Tensor | Parts]
NONE: Mapping[str, Tensor] = {}
LARGE = 4  # a proof on fewer examples is repeated when the first larger batch comes


def capture(function: Functional, x: Inputs, cotangents: Cotangents = "full") -> Captured:
    """Differentiate the outputs on a batch with respect to every use."""
    return next(capture_parts(function, x, cotangents))


@in_exact_mode
def capture_for_products(function: Functional, x: Inputs, cotangents: Cotangents) -> Captured:
    """The same for gradients that are only multiplied: in any coordinates that give J H HᵀJᵀ."""
    inside = moved_network(function)
    if inside is None:
        return capture(function, x, cotangents)
    return kernel_part(function, capture(inside, x, cotangents))


def capture_parts(
    function: Functional, x: Inputs, cotangents: Cotangents, columns: int | None = None
) -> Iterator[Captured]:
    """The same, a few cotangents at once; the network runs forward once for all of them."""
    inside = moved_network(function)
    if inside is not None:
        yield from pulled_parts(function, capture_parts(inside, x, cotangents, columns))
        return
    run, parts = _run(function, x, cotangents, columns)
    for i, part in enumerate(parts):
        yield _capture(function, x, run, part(), last=i + 1 == len(parts))


def capture_parts_for_products(
    function: Functional, x: Inputs, cotangents: Cotangents, columns: int
) -> Iterator[Captured]:
    """``capture_for_products``, a few cotangents at once."""
    inside = moved_network(function)
    if inside is None:
        yield from capture_parts(function, x, cotangents, columns)
        return
    for part in capture_parts(inside, x, cotangents, columns):
        yield kernel_part(function, part)


@in_exact_mode
def _run(
    function: Functional, x: Inputs, cotangents: Cotangents, columns: int | None
) -> tuple[Trace, list[Callable[[], Tensor]]]:
    """A traced forward pass and the parts of the cotangents at its outputs, each made when it is wanted."""
    run = trace(function, x)
    outputs = run.outputs.detach()
    if isinstance(cotangents, str) and cotangents != "sum":
        cotangents = range(outputs.shape[1])
    if isinstance(cotangents, range):  # rows of the identity, which is never whole
        first, last = cotangents.start, cotangents.stop
        size = columns or max(last - first, 1)
        starts = range(first, last, size) or range(first, first + 1)
        return run, [partial(_identity_rows, outputs, i, min(i + size, last)) for i in starts]
    if isinstance(cotangents, str):
        cotangents = outputs.new_ones(1, *outputs.shape)
    u = cotangents(outputs) if callable(cotangents) else cotangents
    if isinstance(u, list):
        return run, u
    return run, [partial(_same, part) for part in u.split(columns or max(len(u), 1))]


def _same(part: Tensor) -> Tensor:
    """A part that is there already."""
    return part


def _identity_rows(outputs: Tensor, start: int, stop: int) -> Tensor:
    """Cotangents (K, N, C) that pick one output each, of those from start to stop."""
    n, c = outputs.shape
    rows = outputs.new_zeros(stop - start, c)
    rows.diagonal(start).fill_(1)
    return rows[:, None].expand(stop - start, n, c)


@in_exact_mode
def _capture(function: Functional, x: Inputs, run: Trace, u: Tensor, last: bool = False) -> Captured:
    """One backward pass with some cotangents; the last one may let go of what the forward pass saved."""
    plan = proved_plan(function, x, run)
    uses, surprised, _ = _differentiate(run, plan, u, keep=not last or run.moved or bool(plan.unproven))
    if surprised:  # a gradient that vanished on all probes does not vanish here
        plan = plan_for(function, run, x, renew=True)
        uses, _, _ = _differentiate(run, plan, u)
    if run.moved and run.lost is None:
        run.lost = _misplaced(run, uses)
    lost = run.lost or set()
    uses = [use for use in uses if not lost & set(use.sources)]
    exact = exact_rows(function, x, [name for name in function.names if name in {*plan.exact, *lost}], u)
    # a use of a weight and of the bias added to its product share their gradients
    _require_finite(function, x, [*{use.place: use.g for use in uses}.values(), *exact.values()])
    return Captured(run.n, run.outputs.detach(), uses, run.leaves, exact, len(u))


def _require_finite(function: Functional, x: Inputs, gradients: Sequence[Tensor | None]) -> None:
    """Raise if a gradient is not finite; all sums are read in one wait for the device."""
    sums = [g.sum(dtype=wide_type(g.dtype)) for g in gradients if g is not None]
    if sums and not bool(torch.stack([part.double() for part in sums]).sum().isfinite()):
        require_finite_derivative(function, x, *(g for g in gradients if g is not None))


def _traced(function: Functional, x: Inputs) -> Trace:
    """A traced pass, or an error that says why the network cannot take these examples in this order."""
    try:
        return trace(function, x)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        function.check_runs(x)
        raise


@in_exact_mode
def proved_plan(function: Functional, x: Inputs, run: Trace) -> DerivativePlan:
    """The plan for a pass; on the first batch of its kind, what the rules give is held against autograd."""
    proved = function.cache.proved
    size = min(run.n, MOST)
    if proved.get(run.signature, 0) >= min(size, LARGE):
        return plan_for(function, run, x)
    # of a large batch the first examples, in reverse: their outputs show whether the order matters, too
    part = x if size == run.n else take(x, backwards(size))
    own = run if size == run.n else _traced(function, part)
    plan_for(function, run, x, turned=None if own is run else own.outputs.detach())
    u = random_cotangent(own.outputs.detach())
    leaves = own.leaves if own.outputs.requires_grad else {}
    uses, surprised, truth = _differentiate(own, plan_for(function, own, part), u, leaves=leaves)
    if surprised:
        plan = plan_for(function, own, part, renew=True)
        uses, _, truth = _differentiate(own, plan, u, leaves=leaves)
    plan = plan_for(function, own, part)
    wrong = disagreeing(own, uses, truth) - set(plan.exact)
    if wrong:
        amend(function, own, part, wrong)
    proved[run.signature] = size
    return plan_for(function, run, x)


def _misplaced(run: Trace, uses: Sequence[Use]) -> set[str]:
    """Parameters of uses whose examples are not where the plan has them, where the data move rows."""
    # The gradients of a part of the examples must vanish outside that part. The parts are the zeros and ones
    # of the binary digits of the examples' numbers: any two examples are told apart by one of them.
    n = run.n
    index = torch.arange(n, device=run.outputs.device)
    digits = torch.stack([(index >> digit) & 1 for digit in range(max(1, (n - 1).bit_length()))])
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(run.outputs.shape, generator=generator).to(run.outputs) + 0.5
    lost: set[str] = set()
    for part in torch.cat([digits, 1 - digits]).bool():
        gradients = use_gradients(run.outputs, uses, (weights * part[:, None])[None])
        for use, g in zip(uses, gradients, strict=True):
            own = use.oriented(g)
            if (
                not fits(own.shape[1:], use.layout.axis, n)
                or use.layout.examples_first(own, n, skip=1)[:, ~part].any()
            ):
                lost |= set(use.sources)
    return lost


def _differentiate(
    run: Trace, plan: DerivativePlan, u: Tensor, keep: bool = True, leaves: Mapping[str, Tensor] = NONE
) -> tuple[list[Use], bool, dict[str, Tensor | None]]:
    """The planned uses with their gradients, whether an unproven one has one, and sketches of the leaves'."""
    pairs = _planned_uses(run, plan)
    uses = [use for _, use in pairs]
    in_leaves: dict[str, Tensor | None] = dict.fromkeys(leaves)
    with handed_over(leaves, lambda name, g: in_leaves.update({name: sketch(g)})):
        gradients = use_gradients(run.outputs, uses, u, keep, leaves)
    taken = []
    for (key, use), g in zip(pairs, gradients, strict=True):
        if key in plan.layouts:
            use.layout, use.g = plan.layouts[key], g
            taken.append(use)
        elif g.any():
            return [], True, in_leaves
    return taken, False, in_leaves


def _planned_uses(run: Trace, plan: DerivativePlan) -> list[tuple[Key, Use]]:
    """Uses that a rule covers, or may cover once a gradient has been seen."""
    dropped = {*plan.exact, *plan.unused}
    return [
        (key, use)
        for key, use in keyed(run.uses)
        if (key in plan.layouts or key in plan.unproven) and not dropped & set(use.sources)
    ]


@in_exact_mode
def capture_bytes(function: Functional, x: Inputs, cotangents: int) -> int:
    """Predicted bytes of one captured example."""
    inside = moved_network(function)
    if inside is not None:  # the rows of J come beside those of J H
        rows = 2 * function.space.dim * function.dtype.itemsize
        return capture_bytes(inside, x, cotangents) + cotangents * rows
    plan = expected_plan(function, x)
    # gradients of single examples come one after the other and are then put side by side
    alone = 2 * sum(function.space.shapes[name].numel() for name in plan.exact) * function.dtype.itemsize
    return 3 * plan.bytes.inputs + (cotangents + 1) * plan.bytes.gradients + cotangents * alone


@in_exact_mode
def hollow_capture(function: Functional, x: Inputs, cotangents: int) -> Captured:
    """The result of ``capture_for_products`` without its gradients: shapes alone, and the uses."""
    inside = moved_network(function)
    if inside is not None:
        outputs = inside.flat(inside.theta, x)
        rows = outputs.new_empty(len(outputs), cotangents, function.space.dim, device="meta")
        return Captured(len(outputs), outputs, [], function.theta, {"epsilon": rows}, cotangents)
    first = not function.cache.plans  # weighed, a pass of a few examples can be their probe itself
    found = planned(function, x, (weighed_trace if first else trace)(function, x))

    def hollow(shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_empty((cotangents, *shape), device="meta")

    uses = [replace(use, g=hollow(use.shape, found.outputs)) for use in found.uses]
    exact = {
        name: hollow((found.n, *t.shape), t).transpose(0, 1)
        for name, t in found.leaves.items()
        if name in found.exact
    }
    return Captured(found.n, found.outputs, uses, found.leaves, exact, cotangents)


@in_exact_mode
def planned(function: Functional, x: Inputs, run: Trace) -> Captured:
    """The uses of a pass as the plan takes them; gradients are left out unless they decide something."""
    plan = plan_for(function, run, x)
    if plan.unproven or plan.exact or run.moved:
        return _capture(function, x, run, run.outputs.new_ones(1, *run.outputs.shape))
    pairs = _planned_uses(run, plan)
    for key, use in pairs:
        use.layout = plan.layouts[key]
    return Captured(run.n, run.outputs.detach(), [use for _, use in pairs], run.leaves, {}, 1)
