"""Forward pass of a feed-forward chain, with slopes, gradients and directional derivatives from it.

For h_l = W_l a_{l−1} + b_l and a_l = φ_l(h_l) with elementwise φ_l, the pass keeps a_l and φ'_l(h_l). Then

    backwards  g_l = φ'_l ∘ (W_{l+1}ᵀ g_{l+1}),           ∇W_l = Σ_n g_l a_{l−1}ᵀ,   ∇b_l = Σ_n g_l
    forwards   ḣ_l = V_l a_{l−1} + v_l + W_l ȧ_{l−1},     ȧ_l = φ'_l ∘ ḣ_l           (the R-operator)

φ' comes from differentiating the activations alone, so that no product with a weight is needed for it.
Which networks are chains is proved elsewhere, by :class:`~linnet.curvatures.kfra.RecursionSums`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.curvatures.layers import Layer
from linnet.linalg.operator import Params
from linnet.tangent.batch import Inputs
from linnet.tangent.functional import Functional
from linnet.tangent.modes import CallMode, in_exact_mode
from linnet.tangent.rules import Captured, Operand, Result, Use


class ChainPass:
    """One forward pass of a chain: outputs, inputs of the layers, slopes of the activations."""

    # inputs (N, d), slopes (h)

    def __init__(
        self,
        function: Functional,
        layers: Sequence[Layer],
        outputs: Tensor,
        inputs: Sequence[Tensor],
        slopes: Sequence[Tensor],
    ) -> None:
        self.theta, self.layers = function.theta, tuple(layers)
        self.outputs, self.inputs, self.slopes = outputs, tuple(inputs), tuple(slopes)

    @staticmethod
    @in_exact_mode
    def of(function: Functional, layers: Sequence[Layer], x: Inputs) -> ChainPass | None:
        """Run the network on a batch, (N, d)."""
        theta = function.theta
        cut = _Cut([[theta[name] for name in layer.names] for layer in layers])
        with torch.enable_grad(), cut:
            outputs = function(theta, x)
            n = outputs.shape[0]
            reached = [*cut.inputs[1:], outputs.reshape(n, -1)]
        plain = len(cut.inputs) == len(layers) and all(
            a.ndim == 2 and a.shape[0] == n for a in [*cut.inputs, *cut.results]
        )
        if not plain or outputs.numel() != cut.results[-1].numel():
            return None
        slopes = [_slope(a, h) for a, h in zip(reached, cut.results, strict=True)]
        if any(slope is None for slope in slopes):
            return None
        return ChainPass(
            function,
            layers,
            outputs.detach(),
            [a.detach() for a in cut.inputs],
            [s for s in slopes if s is not None],
        )

    def gradient(self, u: Tensor) -> Params:
        """Σ_n of the gradients, for cotangents of the outputs."""
        # u (N, ...)
        found = {}
        for i, g in self._backwards(u.reshape(len(u), -1)):
            names = self.layers[i].names
            found[names[0]] = g.T @ self.inputs[i]
            if len(names) == 2:
                found[names[1]] = g.sum(0)
        return found

    def _backwards(self, u: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Layers, last to first, with the gradients (..., N, c) at their results for u (..., N, C)."""
        behind = u
        for i in range(len(self.layers) - 1, -1, -1):
            g = self.slopes[i] * behind
            yield i, g
            if i:
                behind = g @ self.theta[self.layers[i].names[0]]

    def captures(
        self, cotangents: Callable[[Tensor], Tensor | list[Callable[[], Tensor]]], columns: int | None
    ) -> Iterator[Captured]:
        """The result of ``capture_parts`` for the batch, without another forward pass."""
        # cotangents (N, C)
        u = cotangents(self.outputs.reshape(len(self.outputs), -1))
        for part in u if isinstance(u, list) else u.split(columns or max(len(u), 1)):
            yield self._captured(part if isinstance(part, Tensor) else part())

    def _captured(self, u: Tensor) -> Captured:
        """The uses of all layers with the gradients of cotangents (K, N, C)."""
        uses = []
        for i, g in self._backwards(u):
            names = self.layers[i].names
            result = Result(g.shape[1:], SimpleNamespace(node=self, output_nr=i))
            if len(names) == 2:
                shift = Operand(self.theta[names[1]], names[1:], direct=True)
                uses.append(Use("shift", shift, result, options={"sign": 1}, g=g))
            weight = Operand(self.theta[names[0]], names[:1], direct=True)
            uses.append(Use("linear", weight, result, a=self.inputs[i], g=g))
        flat = self.outputs.reshape(len(self.outputs), -1)
        return Captured(len(flat), flat, uses[::-1], self.theta, {}, len(u))

    def tangent(self, v: Params) -> Tensor:
        """J v."""
        moved: Tensor | None = None
        for i, layer in enumerate(self.layers):
            names = layer.names
            shift = v[names[1]] if len(names) == 2 else None
            h = F.linear(self.inputs[i], v[names[0]], shift)
            if moved is not None:
                h.addmm_(moved, self.theta[names[0]].T)
            moved = h.mul_(self.slopes[i])
        assert moved is not None
        return moved.view_as(self.outputs)


class _Cut(CallMode):
    """Cuts the history of a forward pass at the layers: only activations are left in it."""

    def __init__(self, layers: Sequence[Sequence[Tensor]]) -> None:
        super().__init__()
        self.layers = [[id(t) for t in layer] for layer in layers]
        self.inputs: list[Tensor] = []
        self.results: list[Tensor] = []

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, of the next of the layers without its history."""
        if func is not F.linear or len(self.inputs) >= len(self.layers):
            return func(*args, **kwargs)
        bound = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        own = [id(t) for t in (bound["weight"], bound.get("bias")) if t is not None]
        if own != self.layers[len(self.inputs)]:
            return func(*args, **kwargs)
        with torch.no_grad():
            result = func(bound["input"].detach(), bound["weight"], bound.get("bias"))
        self.inputs.append(bound["input"])
        self.results.append(result.requires_grad_())
        return result.clone()  # the activation may work in place


def _slope(a: Tensor, h: Tensor) -> Tensor | None:
    """φ'(h) from a = φ(h), or ``None`` if a is not of h's size or not made of it."""
    if a.shape != h.shape or not a.requires_grad:
        return None
    (found,) = torch.autograd.grad(a, h, torch.ones_like(a), allow_unused=True)
    return found
