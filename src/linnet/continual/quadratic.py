"""The penalty Σ w/2 (θ − μ)ᵀ Λ (θ − μ), its value and gradient from one product with each Λ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.continual.parameters import Live
from linnet.continual.precision import Precision
from linnet.linalg.operator import Params
from linnet.params import device as checked_device
from linnet.params import real_type
from linnet.tree import node

Observe = Callable[[Tensor, Params], None]  # a factor, and gradients by parameter


@node()
@dataclass(frozen=True, eq=False)
class Quadratic:
    """w/2 (θ − μ)ᵀ Λ (θ − μ)."""

    anchor: Params  # μ by parameter name
    precision: Precision  # Λ
    weight: float = 1.0  # w

    def to(self, device: torch.device, dtype: torch.dtype) -> Quadratic:
        """The same on another device or in another type."""
        anchor = {name: mu.to(device, dtype) for name, mu in self.anchor.items()}
        return replace(self, anchor=anchor, precision=self.precision.to(device, dtype))


def value_and_gradient(quadratics: Sequence[Quadratic], live: Live) -> tuple[Tensor, Params]:
    """The penalty and its gradient in θ, in differentiable operations."""
    total = torch.zeros(())
    gradients: Params = {}
    for term in quadratics:
        delta = live.difference(term.anchor)
        for name, product in term.precision.product(delta).items():
            # ∇ = w Λ δ and the value is w/2 δᵀ Λ δ
            product = product if term.weight == 1 else term.weight * product
            half = 0.5 * torch.dot(delta[name].flatten(), product.flatten())
            total = half if total.device != half.device else total.to(half.dtype) + half
            tensor = live.tensors[name]
            # strides of the parameter: optimizers treat tensors alike all at once
            product = product.to(tensor.dtype).contiguous()
            gradients[name] = gradients[name] + product if name in gradients else product
    return total, gradients


class _Penalty(torch.autograd.Function):
    """The penalty, whose products Λ δ are formed once for value and gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        quadratics: Sequence[Quadratic],
        live: Live,
        names: Sequence[str],
        observe: Observe | None,
        *tensors: Tensor,
    ) -> Tensor:
        """The value; the gradient is kept."""
        with torch.autocast(tensors[0].device.type, enabled=False):
            value, gradients = value_and_gradient(
                quadratics, live.with_tensors(dict(zip(names, tensors, strict=True)))
            )
        ctx.quadratics, ctx.live, ctx.names, ctx.observe = quadratics, live, names, observe
        ctx.save_for_backward(*tensors)
        ctx.gradients = [gradients.get(name) for name in names]
        return value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """The kept gradient, or one with a history if there will be a second derivative."""
        (g,) = grad_outputs
        if ctx.observe is not None:
            known = zip(ctx.names, ctx.gradients, strict=True)
            ctx.observe(g.detach(), {name: d for name, d in known if d is not None})
        gradients = ctx.gradients
        if torch.is_grad_enabled():
            live = ctx.live.with_tensors(dict(zip(ctx.names, ctx.saved_tensors, strict=True)))
            found = value_and_gradient(ctx.quadratics, live)[1]
            gradients = [found.get(name) for name in ctx.names]
        products = [None if d is None else (g * d).to(d.dtype) for d in gradients]
        return None, None, None, None, *products


def penalty(quadratics: Sequence[Quadratic], live: Live, observe: Observe | None = None) -> Tensor:
    """The penalty as a scalar that can be added to a loss."""
    wanted = set().union(*(term.precision.names for term in quadratics)) if quadratics else set()
    names = [n for n, t in live.tensors.items() if n in wanted and t.requires_grad]
    if names:
        tensors = [live.tensors[name] for name in names]
        apply: Any = _Penalty.apply
        value: Tensor = apply(quadratics, live, names, observe, *tensors)
        return value
    if wanted & set(live.tensors):
        with torch.no_grad():
            return value_and_gradient(quadratics, live)[0]
    some = next(iter(live.tensors.values()))
    return torch.zeros((), dtype=some.dtype, device=some.device)


def moved_anchor(anchor: Mapping[str, Tensor], live: Live, precision: Precision) -> Params:
    """μ after a task: the parameters as they are, and of those that are absent the last known ones."""
    values = live.values()
    kept = {name: mu for name, mu in anchor.items() if name not in values}
    return {**kept, **{name: values[name] for name in precision.names if name in values}}


def moved_term(term: Quadratic, device: torch.device | str, dtype: torch.dtype | None) -> Quadratic:
    """A term on another device, in its own type unless another is given."""
    place = checked_device("device", device, 'pass "cpu" or "cuda"')
    if dtype is not None:
        real_type("dtype", dtype)
    kind = dtype or next((mu.dtype for mu in term.anchor.values()), torch.float32)
    return term.to(place, kind)
