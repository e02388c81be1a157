"""Reverse mode for many cotangents at once, and for one example at a time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linnet.tangent.batch import Inputs, split
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional
from linnet.tangent.rules import Use


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
