"""Kronecker factors of a layer's Gauss-Newton block.

With a the inputs and g the output gradients of the weight's uses, for one column k of Λ^½ after the other,

    expand    G ≈ B ⊗ A,  A = 1/M Σ_n Σ_s â_ns â_nsᵀ,  B = Σ_n Σ_k Σ_s g_nks g_nksᵀ,   M = Σ_n S
    reduce    G ≈ B ⊗ A,  A = 1/N Σ_n ā_n ā_nᵀ,  B = Σ_n Σ_k (Σ_s g_nks)(Σ_s g_nks)ᵀ,  ā_n = 1/S Σ_s â_ns

where â = [a; 1] when a bias rides along. Both are exact for one example without weight sharing. With all
columns of Λ^½ this is KFLR, with gradients at sampled labels KFAC (Botev 2020, 4.3.1 and 4.3.3; Martens
and Grosse 2015; weight sharing: Eschenhagen et al. 2023, eq. 8 and 12). Of a side that is too wide for a
matrix the diagonal of A or B is kept.

S counts no padding: positions at which ``"attention_mask"`` of the batch is 0 are in none of these sums, nor
are those that reach labels of −100 alone. Where a layer has other positions than the mask (a convolution with
strides), those of a padded example count that some output depends on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from linnet.curvatures.layers import Layer, layer_factors, require_as_found
from linnet.curvatures.moments import (
    InputMoment,
    active,
    counting,
    gradient_moment,
    mean_input,
    output_moment,
    shared_input_moment,
    summed_gradients,
    weighted_input_moment,
    without_padding,
)
from linnet.curvatures.sums import Gradients, Sums, layer_rows, second_moment
from linnet.curvatures.sums import wide as wide_type
from linnet.linalg.grouped import GroupedKronecker
from linnet.linalg.kronecker import HalfDiagonal, Kronecker
from linnet.tangent.rules import Factors


class KroneckerSums(Sums):
    """Σ â âᵀ and Σ g gᵀ of a layer with factors."""

    def __init__(
        self,
        layer: Layer,
        sharing: str,
        dtype: torch.dtype,
        device: torch.device,
        wide: Collection[str] = (),
    ) -> None:
        self.layer, self.sharing, self.wide = layer, sharing, frozenset(wide)
        self._reached: list[Tensor] = []  # positions that the columns of the batch in hand reach
        rows, columns = layer.matrix
        d, c = (rows, columns) if layer.transposed else (columns, rows)
        r, kind = layer.groups, wide_type(dtype)
        shapes = {
            side: (r, size) if side in self.wide else (r, size, size)
            for side, size in (("inputs", d), ("gradients", c))
        }
        self.tensors = {
            side: torch.zeros(shape, dtype=kind, device=device) for side, shape in shapes.items()
        } | {"count": torch.zeros((), dtype=torch.float64, device=device)}

    def add(self, gradients: Gradients) -> None:
        """Add a batch."""
        captured = gradients.captured
        if gradients.fresh:
            require_as_found(captured, self.layer)
        if self.sharing == "reduce" or gradients.counts is not None or gradients.tokens is not None:
            self._add_factors(gradients)
            return
        for use in captured.by_parameter().get(self.layer.names[0], []):
            if gradients.fresh:
                self.add_inputs(shared_input_moment(use, gradients.shared, "inputs" in self.wide))
            self.tensors["gradients"] += gradient_moment(use, "gradients" in self.wide)

    def _add_factors(self, gradients: Gradients) -> None:
        """The same where positions are not all alike; inputs once all columns have been seen."""
        parts = layer_factors(gradients.captured, self.layer)
        if not parts:
            return
        reached = [active(f) for f in parts]
        if not gradients.fresh:
            reached = [a | b for a, b in zip(reached, self._reached, strict=True)]
        self._reached = [] if gradients.last else reached
        weights = counting(reached, gradients.counts)
        if gradients.tokens is not None:
            weights = without_padding(weights, reached, gradients.tokens)
            parts = [replace(f, g=f.g * w[..., None]) for f, w in zip(parts, weights, strict=True)]
        if self.sharing == "reduce":
            parts = [Factors(mean_input(parts, weights), summed_gradients(parts), parts[0].transposed)]
            # an example that is masked whole has no mean input
            weights = [torch.cat(weights, 2).any(2, keepdim=True)]
        for f, weight in zip(parts, weights, strict=True):
            self.tensors["gradients"] += output_moment(f, "gradients" in self.wide)
            if gradients.last:
                self.add_inputs(weighted_input_moment(f, weight, "inputs" in self.wide))

    def add_inputs(self, moment: InputMoment) -> None:
        """Σ â âᵀ and the number of its terms."""
        self.tensors["inputs"] += moment.hatted() if self.layer.biased else moment.second
        self.tensors["count"] += moment.count

    @property
    def terms(self) -> float:
        """M, or N where positions are reduced: those that count."""
        return float(self.tensors["count"])

    def factors(self) -> tuple[Tensor, Tensor]:
        """A, a mean, and B, a sum: (R, d, d) and (R, c, c), or the diagonal of one."""
        count = max(self.terms, torch.finfo(torch.float32).tiny)  # 0 / 0 would be NaN
        return self.tensors["inputs"] / count, self.tensors["gradients"]

    def block(self) -> Kronecker | GroupedKronecker | HalfDiagonal:
        """B ⊗ A, or A ⊗ B for a weight stored with its inputs first."""
        inputs, gradients = self.factors()
        left, right = (inputs, gradients) if self.layer.transposed else (gradients, inputs)
        name = f"curvature of {self.layer.name}"
        if self.wide:
            return HalfDiagonal.of(left[0], right[0], name)
        if self.layer.groups == 1:
            return Kronecker(left[0], right[0], name=name)
        return GroupedKronecker(left, right, name=name)


class RowMomentSums(Sums):
    """Kronecker factors from per-example gradients, where there are no inputs and output gradients."""

    # For gradients G (rows x columns) of a weight, L = Σ G Gᵀ and R = Σ Gᵀ G / tr L. The product L ⊗ R has
    # the trace of Σ vec(G) vec(G)ᵀ, and equals it for a single gradient of rank one.

    def __init__(
        self, layer: Layer, dtype: torch.dtype, device: torch.device, wide: Collection[str] = ()
    ) -> None:
        self.layer, self.wide = layer, frozenset(wide)
        rows, kind = layer.shapes[0][0], wide_type(dtype)
        sizes = {"left": rows, "right": layer.size // rows}
        shapes = {side: (size,) if side in self.wide else (size, size) for side, size in sizes.items()}
        self.tensors = {side: torch.zeros(shape, dtype=kind, device=device) for side, shape in shapes.items()}

    def add(self, gradients: Gradients) -> None:
        """Add a batch."""
        rows = layer_rows(gradients.captured, self.layer).flatten(0, 1)
        matrices = rows.unflatten(1, (self.layer.shapes[0][0], -1)).to(self.tensors["left"].dtype)
        if "left" in self.wide:
            self.tensors["left"] += matrices.square().sum((0, 2))
        else:
            self.tensors["left"] += second_moment(matrices.transpose(0, 1).flatten(1))
        if "right" in self.wide:
            self.tensors["right"] += matrices.square().sum((0, 1))
        else:
            self.tensors["right"] += second_moment(matrices.flatten(0, 1).mT)

    def block(self) -> Kronecker | HalfDiagonal:
        """L ⊗ R."""
        left, right = self.tensors["left"], self.tensors["right"]
        total = (left.sum() if left.ndim == 1 else left.trace()).clamp(min=torch.finfo(left.dtype).tiny)
        name = f"curvature of {self.layer.name}"
        if self.wide:
            return HalfDiagonal.of(left, right / total, name)
        return Kronecker(left, right / total, name=name)
