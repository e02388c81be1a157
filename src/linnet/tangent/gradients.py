"""Reverse mode for many cotangents at once, and for one example at a time.

Rules are verified on the user's batch. A plan is made on three examples and finds gradients where operations
read parameters. A network that differentiates itself in its forward pass (forces from an energy, the residual
of a differential equation) reads its parameters once more in the graph of that gradient, where no operation
is seen. So the gradient of a random combination of all outputs is summed from the uses, and compared with
autograd's. Both are multiplied by the same random matrix (:func:`sketch`) once they are formed, so that no
more than one is held.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linnet.linalg.factorize import read
from linnet.number_types import wide_type
from linnet.tangent.batch import Inputs, split
from linnet.tangent.forward_mode import Params, sketch
from linnet.tangent.functional import Functional
from linnet.tangent.rules import Use, pull_back, use_rows
from linnet.tangent.trace import Trace


def use_gradients(
    outputs: Tensor,
    uses: Sequence[Use],
    cotangents: Tensor,
    keep: bool = True,
    leaves: Mapping[str, Tensor] | None = None,
) -> list[Tensor]:
    """Gradients at the result of every use; uses of one operation share theirs, (K, *shape)."""
    # outputs (N, C), cotangents (K, N, C)
    edges = {use.place: use.result.edge for use in uses}
    wanted = [*edges.values(), *(leaves or {}).values()]
    if not wanted:
        return []
    found = dict(zip(edges, batched_grad(outputs, wanted, cotangents, keep), strict=False))
    k = cotangents.shape[0]
    at_uses = [found[use.place] for use in uses]
    return [
        outputs.new_zeros(k, *use.shape) if g is None else g for use, g in zip(uses, at_uses, strict=True)
    ]


def batched_grad(
    outputs: Tensor, inputs: Sequence[Any], cotangents: Tensor, keep: bool = True
) -> list[Tensor | None]:
    """Gradients for K cotangents at once; one after the other where torch cannot batch an operation."""
    # outputs (N, C), cotangents (K, N, C)
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
    last = len(cotangents) - 1
    each = [
        torch.autograd.grad(outputs, inputs, u, retain_graph=keep or i < last, allow_unused=True)
        for i, u in enumerate(cotangents)
    ]
    return [None if column[0] is None else _stacked(column) for column in zip(*each, strict=True)]


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Side by side on a new first axis; a single one without a copy."""
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))


def side_by_side(found: Iterable[Tensor | None], leaves: Iterable[Tensor], *lead: int) -> Tensor:
    """Gradients in some leaves, flattened side by side, (*lead, P); zeros where there is none."""
    pairs = zip(found, leaves, strict=True)
    parts = [t.new_zeros(*lead, t.numel()) if g is None else g.reshape(*lead, t.numel()) for g, t in pairs]
    return torch.cat(parts, -1)


def pulled_back(value: Tensor | None, leaves: Sequence[Tensor], u: Tensor, keep: bool = False) -> Tensor:
    """Gradients of ⟨value, u_k⟩ in some leaves, flattened side by side, (K, P)."""
    # u (K, *value.shape)
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if value is not None and value.requires_grad:
        grads = batched_grad(value, leaves, u, keep)
    return side_by_side(grads, leaves, len(u))


def recorded(function: Functional, x: Inputs, names: Iterable[str] | None = None) -> tuple[Tensor, Params]:
    """f₀(x) (n, C) with its history, and the parameters that are its leaves."""
    theta = function.theta
    leaves = {name: theta[name].detach().requires_grad_() for name in (theta if names is None else names)}
    with torch.enable_grad():
        return function.flat({**theta, **leaves}, x), leaves


def exact_rows(function: Functional, x: Inputs, names: Sequence[str], cotangents: Tensor) -> Params:
    """Per-example gradients of the named parameters, one example at a time, (N, K, *shape)."""
    if not names:
        return {}
    theta = function.theta
    collected: dict[str, list[Tensor]] = {name: [] for name in names}
    for i, example in enumerate(split(x, 1)):
        value, leaves = recorded(function, example, names)
        u = cotangents[:, i : i + 1]
        grads = batched_grad(value, list(leaves.values()), u) if value.requires_grad else [None] * len(names)
        for name, g in zip(names, grads, strict=True):
            collected[name].append(theta[name].new_zeros(u.shape[0], *theta[name].shape) if g is None else g)
    return {name: torch.stack(rows) for name, rows in collected.items()}


# Relative to the norm of a parameter's gradient: rules and autograd add many terms in another order.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3}
COARSE = 1e-1  # in half precision
FLOOR = 1e-2  # of the largest norm: below, gradients may be rounding alone (a bias that a norm takes out)


def random_cotangent(outputs: Tensor) -> Tensor:
    """A fixed random cotangent (1, N, C); the global generator is not touched."""
    # outputs (N, C)
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, *outputs.shape, generator=generator, dtype=torch.float64).to(outputs)


def disagreeing(run: Trace, uses: Sequence[Use], truth: Mapping[str, Tensor | None]) -> set[str]:
    """Parameters whose gradient is not what their uses add up to."""
    own: dict[str, list[Use]] = {}
    for use in uses:
        for name in use.sources:
            own.setdefault(name, []).append(use)
    norms = {name: _norm(g) for name, g in truth.items() if g is not None}
    missed: dict[str, tuple[float, Tensor]] = {}
    for name, g in truth.items():  # what the rules give is formed for one parameter at a time
        summed = _summed(run, name, own.get(name, []))
        ruled = None if summed is None else sketch(summed)
        if g is None and ruled is None:
            continue
        difference = ruled if g is None else g if ruled is None else ruled - g
        assert difference is not None
        missed[name] = (TOLERANCE.get(run.leaves[name].dtype, COARSE), _norm(difference))
    every = read([*norms.values(), *(difference for _, difference in missed.values())])  # in one wait
    known = dict(zip(norms, every, strict=False))
    largest = max(known.values(), default=0.0)
    return {
        name
        for (name, (tolerance, _)), difference in zip(missed.items(), every[len(norms) :], strict=True)
        if difference > tolerance * (known.get(name, 0.0) + FLOOR * largest)
    }


def _summed(run: Trace, name: str, uses: Sequence[Use]) -> Tensor | None:
    """The gradient of a parameter over the whole batch: all examples are positions of a single one."""
    total: Tensor | None = None
    for use in uses:
        rows = use_rows(use, 1)
        part = (rows if use.direct else pull_back(rows, use.target, run.leaves[name]))[0]
        total = part if total is None else total + part
    return total


def _norm(t: Tensor) -> Tensor:
    """The Euclidean norm, summed in double precision where single might overflow or lose digits."""
    norm: Tensor = torch.linalg.vector_norm(t.detach(), dtype=wide_type(t.dtype))
    return norm


def sharing_uses(names: set[str], uses: Sequence[Use]) -> set[str]:
    """The names with all parameters that go into a use along with them."""
    found = set(names)
    while more := {name for use in uses if found & set(use.sources) for name in use.sources} - found:
        found |= more
    return found
