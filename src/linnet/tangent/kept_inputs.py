"""Inputs in files: those of a fit, and made-up ones by which a network is known again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from linnet.tangent.batch import MASK, Inputs, map_tensors, take


def flatten_inputs(x: Inputs, prefix: str = "x") -> tuple[dict[str, Tensor], Any]:
    """Inputs as tensors by path, and their structure."""
    if isinstance(x, Tensor):
        return {prefix: x}, "tensor"
    items = x.items() if isinstance(x, dict) else enumerate(x)
    tensors: dict[str, Tensor] = {}
    layout: dict[str, Any] = {"kind": "dict" if isinstance(x, dict) else "tuple", "parts": {}}
    for key, value in items:
        found, layout["parts"][str(key)] = flatten_inputs(value, f"{prefix}/{key}")
        tensors |= found
    return tensors, layout


def unflatten_inputs(tensors: Mapping[str, Tensor], layout: Any, prefix: str = "x") -> Inputs:
    """The inputs that ``flatten_inputs`` wrote."""
    if layout == "tensor":
        return tensors[prefix]
    parts = {key: unflatten_inputs(tensors, part, f"{prefix}/{key}") for key, part in layout["parts"].items()}
    return parts if layout["kind"] == "dict" else tuple(parts.values())


def made_up(x: Inputs) -> Inputs:
    """One example with the shapes, types and ranges of a batch, from which no example can be read."""
    generator = torch.Generator().manual_seed(0)

    def drawn(t: Tensor) -> Tensor:
        if t.is_floating_point() or t.is_complex():
            return torch.randn(t.shape, dtype=t.dtype, generator=generator).to(t.device)
        largest = int(t.max()) if t.numel() else 0
        least = min(0, int(t.min())) if t.numel() else 0
        return torch.randint(least, largest + 1, t.shape, generator=generator).to(t)

    made = map_tensors(drawn, take(x, slice(0, 1)))
    if isinstance(made, dict) and isinstance(mask := x.get(MASK), Tensor):  # which keeps all positions
        made[MASK] = torch.full_like(made[MASK], bool((mask > 0).any()))
    return made
