"""The input a and the output gradient g of every use of every tracked parameter.

One forward pass and C cotangents back to the results of the uses: gradients of weights are
never formed. ``plan`` decides what each parameter is treated by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.captured import Captured, Outputs
from linnet.tangent.functional import Functional
from linnet.tangent.gradients import exact_rows, use_gradients
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.plan import PROBES, Plan, keyed, plan_for
from linnet.tangent.rules import Use
from linnet.tangent.trace import Trace, trace

Cotangents = Tensor | Outputs | Callable[[Tensor], Tensor]


def capture(function: Functional, x: Inputs, cotangents: Cotangents = "full") -> Captured:
    """Differentiate the outputs on a batch with respect to every use.

    Args:
        function: The network.
        x: A batch of N examples.
        cotangents: (K, N, C), or a function that makes them from the outputs (N, C), or ``"sum"`` for
            the sum of the outputs (K = 1), otherwise every output (K = C).

    Returns:
        The uses with a and g, and exact gradients where no rule holds.
    """
    return next(capture_parts(function, x, cotangents))


def capture_parts(
    function: Functional, x: Inputs, cotangents: Cotangents, columns: int | None = None
) -> Iterator[Captured]:
    """The same, a few cotangents at once; the network runs forward once for all of them.

    Args:
        function: The network.
        x: A batch of N examples.
        cotangents: As for :func:`capture`.
        columns: Cotangents at once; all by default.

    Yields:
        A captured batch for each part of the cotangents, in order. Inputs a are the same in all.
    """
    run, u = _run(function, x, cotangents)
    for part in u.split(columns or max(len(u), 1)):
        yield _capture(function, x, run, part)


@in_exact_mode
def _run(function: Functional, x: Inputs, cotangents: Cotangents) -> tuple[Trace, Tensor]:
    """A traced forward pass and the cotangents at its outputs."""
    run = trace(function, x)
    return run, _cotangents(run.outputs.detach(), cotangents)


@in_exact_mode
def _capture(function: Functional, x: Inputs, run: Trace, u: Tensor) -> Captured:
    """One backward pass with some cotangents."""
    plan = plan_for(function, run, x)
    uses, surprised = _differentiate(run, plan, u)
    if surprised:  # a gradient that vanished on all probes does not vanish here
        plan = plan_for(function, run, x, renew=True)
        uses, _ = _differentiate(run, plan, u)
    exact = exact_rows(function, x, list(plan.exact), u)
    return Captured(run.n, run.outputs.detach(), uses, run.leaves, exact, len(u))


def _differentiate(run: Trace, plan: Plan, u: Tensor) -> tuple[list[Use], bool]:
    """The planned uses with their gradients, and whether an unproven use has one."""
    pairs = [(key, use) for key, use in keyed(run.uses) if key in plan.layouts or key in plan.unproven]
    dropped = {*plan.exact, *plan.unused}
    pairs = [(key, use) for key, use in pairs if not dropped & set(use.sources)]
    gradients = use_gradients(run.outputs, [use for _, use in pairs], u)
    taken = []
    for (key, use), g in zip(pairs, gradients, strict=True):
        if key in plan.layouts:
            use.layout, use.g = plan.layouts[key], g
            taken.append(use)
        elif g.any():
            return [], True
    return taken, False


def _cotangents(outputs: Tensor, wanted: Cotangents) -> Tensor:
    """Cotangents (K, N, C), in whichever way they were asked for."""
    if isinstance(wanted, Tensor):
        return wanted
    return wanted(outputs) if callable(wanted) else output_cotangents(outputs, wanted)


def output_cotangents(outputs: Tensor, kind: Outputs) -> Tensor:
    """One cotangent for each output, (C, N, C), or one for their sum, (1, N, C)."""
    n, c = outputs.shape
    if kind == "sum":
        return outputs.new_ones(1, n, c)
    return torch.eye(c, dtype=outputs.dtype, device=outputs.device)[:, None].expand(c, n, c)


@in_exact_mode
def capture_bytes(function: Functional, x: Inputs, cotangents: int) -> int:
    """Predicted bytes of one captured example.

    Args:
        function: The network.
        x: A batch; three of its examples are run if its kind of pass is new.
        cotangents: K.

    Returns:
        Activations, what autograd saves of them, and K gradients of every use.
    """
    run = trace(function, take(x, slice(0, min(PROBES, batch_size(x)))))
    plan = plan_for(function, run, x)
    return 3 * plan.input_bytes + (cotangents + 1) * plan.gradient_bytes
