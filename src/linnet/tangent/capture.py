"""The input a and the output gradient g of every use of every tracked parameter.

One forward pass and C cotangents back to the results of the uses: gradients of weights are
never formed. How each parameter is treated is decided once for each kind of forward pass, on
three probe examples, and proved there: the gradients that the rules give are compared with
autograd's, one example at a time, and what does not agree falls to exact differentiation.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional
from linnet.tangent.layout import Layout, find_layout
from linnet.tangent.rules import OUTER, Use, example_axes, pull_back, use_rows
from linnet.tangent.trace import Trace, trace

PROBES = 3  # examples that a plan is proved on
Outputs = Literal["full", "trace", "diagonal", "sum"]


@dataclass(frozen=True)
class Plan:
    """How every tracked parameter is differentiated.

    Args:
        layouts: Layout of each use, in order; ``None`` for uses that are not taken.
        exact: Parameters that are differentiated example by example, and why.
        unused: Parameters that the outputs do not depend on.
        bytes_per_example: Activations and gradients of all uses, for one cotangent.
        activations_per_example: The part of it that does not grow with the cotangents.
    """

    layouts: tuple[Layout | None, ...]
    exact: dict[str, str]
    unused: tuple[str, ...]
    bytes_per_example: int
    activations_per_example: int


@dataclass(eq=False)
class Captured:
    """One batch, differentiated.

    Args:
        n: Number of examples.
        outputs: f₀(x), (N, C).
        uses: Uses with their gradients g, those that the plan takes.
        leaves: The tracked parameters.
        exact: Per-example gradients (N, K, *shape) of the parameters outside every rule.
    """

    n: int
    outputs: Tensor
    uses: list[Use]
    leaves: Params
    exact: Params

    def by_parameter(self) -> dict[str, list[Use]]:
        """The uses of each parameter."""
        found: dict[str, list[Use]] = {}
        for use in self.uses:
            for name in use.sources:
                found.setdefault(name, []).append(use)
        return found

    def rows(self, name: str) -> Tensor:
        """Gradient of every example and cotangent in one parameter, (N, K, *shape); all uses summed."""
        if name in self.exact:
            return self.exact[name]
        leaf = self.leaves[name]
        total: Tensor | None = None
        for use in self.uses:
            if name not in use.sources:
                continue
            part = use_rows(use, self.n)
            part = part if use.direct else pull_back(part, use.target, leaf)
            total = part if total is None else total + part
        assert total is not None
        return total


def capture(function: Functional, x: Inputs, cotangents: Tensor | Outputs = "full") -> Captured:
    """Differentiate the outputs on a batch with respect to every use.

    Args:
        function: The network.
        x: A batch of N examples.
        cotangents: (K, N, C), or ``"sum"`` for the sum of the outputs (K = 1), otherwise every
            output (K = C).

    Returns:
        The uses with a and g, and exact gradients where no rule holds.
    """
    run = trace(function, x)
    plan = plan_for(function, run, x)
    taken = [(use, layout) for use, layout in zip(run.uses, plan.layouts, strict=True) if layout is not None]
    u = cotangents if isinstance(cotangents, Tensor) else output_cotangents(run.outputs, cotangents)
    gradients = _use_gradients(run.outputs, [use for use, _ in taken], u)
    for (use, layout), g in zip(taken, gradients, strict=True):
        use.layout, use.g = layout, g
    exact = exact_rows(function, x, list(plan.exact), u)
    zeros = {n: run.outputs.new_zeros(run.n, u.shape[0], *run.leaves[n].shape) for n in plan.unused}
    return Captured(run.n, run.outputs.detach(), [use for use, _ in taken], run.leaves, {**exact, **zeros})


def output_cotangents(outputs: Tensor, kind: Outputs) -> Tensor:
    """One cotangent for each output, (C, N, C), or one for their sum, (1, N, C)."""
    n, c = outputs.shape
    if kind == "sum":
        return outputs.new_ones(1, n, c)
    return torch.eye(c, dtype=outputs.dtype, device=outputs.device)[:, None].expand(c, n, c)


def plan_for(function: Functional, run: Trace, x: Inputs) -> Plan:
    """The plan for passes like ``run``; made on first sight, then kept."""
    plans: dict[Any, Plan] = function.cache.setdefault("plans", {})
    if run.signature not in plans:
        plans[run.signature] = _make_plan(function, run, x)
    return plans[run.signature]


def _make_plan(function: Functional, run: Trace, x: Inputs) -> Plan:
    """Find the layouts on probe examples and prove the rules there."""
    probe = trace(function, take(x, [i % run.n for i in range(PROBES)]))
    exact = {name: "no rule for " + ", ".join(sorted(ops)) for name, ops in run.unhandled.items()}
    if probe.signature != run.signature:
        exact = dict.fromkeys(function.names, "the forward pass changes from batch to batch")
        return Plan((None,) * len(run.uses), exact, (), 0, 0)
    exact |= _find_layouts(probe, exact)
    unused, wrong = _prove(function, probe, exact)
    exact |= wrong
    exact = {name: why for name, why in exact.items() if name not in unused}
    dropped = {*exact, *unused}
    layouts = tuple(None if dropped & set(use.sources) else use.layout for use in probe.uses)
    activations, gradients = _sizes(
        [u for u, kept in zip(probe.uses, layouts, strict=True) if kept is not None]
    )
    return Plan(layouts, exact, tuple(unused), gradients, activations)


def _find_layouts(probe: Trace, exact: dict[str, str]) -> dict[str, str]:
    """Set the layout of every use; what has none is named."""
    n, c = probe.outputs.shape
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(n, c, generator=generator).to(probe.outputs)
    alone = torch.diag_embed(weights.T).permute(1, 2, 0)  # (n, n, C): row i holds example i's cotangent only
    uses = [use for use in probe.uses if not set(use.sources) & set(exact)]
    lost = {}
    for use, g in zip(uses, _use_gradients(probe.outputs, uses, alone), strict=True):
        layout = find_layout(use.oriented(g), example_axes(use), n)
        if layout is None:
            lost.update(dict.fromkeys(use.sources, "examples are mixed where it is used"))
        else:
            use.layout = layout
    return lost


def _prove(function: Functional, probe: Trace, exact: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Compare the rules' gradients with autograd's; return unused and wrongly ruled parameters."""
    n, c = probe.outputs.shape
    generator = torch.Generator().manual_seed(1)
    u = torch.randn(1, n, c, generator=generator).to(probe.outputs)
    uses = [use for use in probe.uses if not set(use.sources) & set(exact)]
    for use, g in zip(uses, _use_gradients(probe.outputs, uses, u), strict=True):
        use.g = g
    ruled = Captured(n, probe.outputs, uses, probe.leaves, {})
    covered = ruled.by_parameter()
    truth = [
        _reverse(probe, u[0] * torch.eye(n, device=u.device, dtype=u.dtype)[i, :, None]) for i in range(n)
    ]
    largest = max((float(g.abs().max()) for row in truth for g in row.values()), default=0.0)
    unused, wrong = [], {}
    for name in function.names:
        expected = [row.get(name) for row in truth]
        if all(g is None for g in expected):
            unused.append(name)
        elif name not in exact and not _matches(ruled, name, expected, largest, name in covered):
            wrong[name] = "its rule disagrees with autograd here"
    return unused, wrong


def _matches(
    ruled: Captured, name: str, expected: Sequence[Tensor | None], largest: float, covered: bool
) -> bool:
    """Whether the rules reproduce autograd's per-example gradients of one parameter."""
    if not covered:
        return False
    leaf = ruled.leaves[name]
    try:
        rows = ruled.rows(name)[:, 0]
    except RuntimeError:  # a shape that the rule did not foresee
        return False
    wanted = torch.stack([torch.zeros_like(leaf) if g is None else g for g in expected])
    tolerance = 1e-7 if leaf.dtype == torch.float64 else 2e-3 if leaf.dtype == torch.float32 else 1e-1
    return bool((rows - wanted).abs().max() <= tolerance * (wanted.abs().max() + 1e-2 * largest))


def _reverse(probe: Trace, u: Tensor) -> Params:
    """Autograd's own gradients of ⟨u, f⟩."""
    leaves = list(probe.leaves.values())
    if not probe.outputs.requires_grad:
        return {}
    grads = torch.autograd.grad(probe.outputs, leaves, u, retain_graph=True, allow_unused=True)
    return {name: g for name, g in zip(probe.leaves, grads, strict=True) if g is not None}


def _use_gradients(outputs: Tensor, uses: Sequence[Use], cotangents: Tensor) -> list[Tensor]:
    """Gradients (K, *shape) at the result of every use; uses of one operation share theirs."""
    edges = {(use.edge.node, use.edge.output_nr): use.edge for use in uses}
    if not edges:
        return []
    found = dict(zip(edges, batched_grad(outputs, list(edges.values()), cotangents), strict=True))
    k = cotangents.shape[0]
    zeros = lambda use: outputs.new_zeros(k, *use.shape)  # noqa: E731
    gradients = [found[use.edge.node, use.edge.output_nr] for use in uses]
    return [zeros(use) if g is None else g for use, g in zip(uses, gradients, strict=True)]


def batched_grad(outputs: Tensor, inputs: Sequence[Any], cotangents: Tensor) -> list[Tensor | None]:
    """Gradients for K cotangents at once; one after the other where torch cannot batch an operation.

    Args:
        outputs: (N, C) with a history.
        inputs: Tensors or gradient edges.
        cotangents: (K, N, C).

    Returns:
        For each input (K, *shape), or ``None`` if the outputs do not depend on it.
    """
    if cotangents.shape[0] > 1:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # "performance drop": still right
                return list(
                    torch.autograd.grad(
                        outputs,
                        inputs,
                        cotangents,
                        retain_graph=True,
                        allow_unused=True,
                        is_grads_batched=True,
                    )
                )
        except RuntimeError:
            pass  # an operation without a batching rule: take the cotangents one by one
    each = [torch.autograd.grad(outputs, inputs, u, retain_graph=True, allow_unused=True) for u in cotangents]
    return [None if column[0] is None else torch.stack(column) for column in zip(*each, strict=True)]


def exact_rows(function: Functional, x: Inputs, names: Sequence[str], cotangents: Tensor) -> Params:
    """Per-example gradients of the named parameters, one example at a time, (N, K, *shape)."""
    if not names:
        return {}
    theta = function.theta
    collected: dict[str, list[Tensor]] = {name: [] for name in names}
    for i, example in enumerate(split(x, 1)):
        leaves = {name: theta[name].detach().requires_grad_() for name in names}
        with torch.enable_grad():
            value = function.flat({**theta, **leaves}, example)
        u = cotangents[:, i : i + 1]
        grads = batched_grad(value, list(leaves.values()), u) if value.requires_grad else [None] * len(names)
        for name, g in zip(names, grads, strict=True):
            collected[name].append(theta[name].new_zeros(u.shape[0], *theta[name].shape) if g is None else g)
    return {name: torch.stack(rows) for name, rows in collected.items()}


def _sizes(uses: Sequence[Use]) -> tuple[int, int]:
    """Bytes of one example: inputs of all uses, and gradients for one cotangent."""
    inputs = {use.a.data_ptr(): use.a for use in uses if use.a is not None}
    edges = {(use.edge.node, use.edge.output_nr): use.shape.numel() for use in uses}
    item = uses[0].target.element_size() if uses else 4
    return sum(a.nbytes for a in inputs.values()) // PROBES, sum(edges.values()) * item // PROBES


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
    return 3 * plan.activations_per_example + (cotangents + 1) * plan.bytes_per_example


def is_outer(use: Use) -> bool:
    """Whether the use has the outer-product form."""
    return use.kind in OUTER
