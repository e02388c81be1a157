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

from collections.abc import Collection, Sequence
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
from linnet.curvatures.sums import ROWS_AT_ONCE, Gradients, Sums, layer_rows, second_moment
from linnet.distributed import Share, all_same
from linnet.linalg.kronecker import Kronecker, KroneckerEigen, eigenbases
from linnet.number_types import wide_type
from linnet.tangent.rules import UseFactors


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
        (d, c), r, kind = layer.widths, layer.groups, wide_type(dtype)
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
            parts = [UseFactors(mean_input(parts, weights), summed_gradients(parts), parts[0].transposed)]
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

    def block(self) -> Kronecker | KroneckerEigen:
        """B ⊗ A, or A ⊗ B for a weight stored with its inputs first."""
        left, right = self.layer.ordered(*self.factors())
        if self.layer.groups == 1:
            left, right = left[0], right[0]
        return _product(left, right, self.layer)


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

    def block(self) -> Kronecker | KroneckerEigen:
        """L ⊗ R."""
        left, right = self.tensors["left"], self.tensors["right"]
        total = (left.sum() if left.ndim == 1 else left.trace()).clamp(min=torch.finfo(left.dtype).tiny)
        return _product(left, right / total, self.layer)


def _product(left: Tensor, right: Tensor, layer: Layer) -> Kronecker | KroneckerEigen:
    """L ⊗ R, where one of them may be a diagonal."""
    name = f"curvature of {layer.name}"
    if left.ndim == right.ndim:
        return Kronecker(left, right, name=name)
    return KroneckerEigen.half_diagonal(left, right, name)


# -- ekfac -----------------------------------------------------------------------------------------
#
# Eigenvalue-corrected Kronecker factors (EKFAC).
#
# In the eigenbasis Q_B ⊗ Q_A of the Kronecker factors the eigenvalues are replaced by the exact second
# moments of the per-example gradients, Σ_n Σ_k (Q_Bᵀ G_nk Q_A)² with G_nk = Σ_s g_nks â_nsᵀ: the diagonal
# of the layer's Gauss-Newton block in that basis, and of all matrices diagonal there the nearest to the
# block (George et al. 2018, section 3). It takes a second pass over the data, once the basis is known.
#
# The rotated gradients are formed from rotated inputs and output gradients, or rotated once formed; for
# each layer the cheaper is taken by counting multiplications.


class EigenvalueSums(Sums):
    """Σ (Q_Bᵀ G Q_A)² of a layer with factors."""

    def __init__(self, kronecker: KroneckerSums, basis: KroneckerEigen) -> None:
        self.layer = kronecker.layer
        self.basis = basis
        left, right = self.basis.left_vectors, self.basis.right_vectors
        if self.layer.groups == 1:
            left, right = (None if side is None else side[None] for side in (left, right))
        self.input_basis, self.gradient_basis = self.layer.ordered(left, right)
        self._turned: list[Tensor] = []  # rotated inputs of the batch in hand
        d, c = self.layer.widths
        self.tensors = {"values": self.basis.values.new_zeros(self.layer.groups, c, d)}

    def add(self, gradients: Gradients) -> None:
        """Add a batch."""
        if gradients.fresh:
            require_as_found(gradients.captured, self.layer)
        again = gradients.columns > gradients.captured.k
        parts = layer_factors(gradients.captured, self.layer, keep=again)
        if not parts:
            return
        kind = self.tensors["values"].dtype
        if gradients.fresh:
            self._turned = []
        a, turned = self._inputs_of(parts, gradients.columns, kind)
        g = [f.g.to(kind) for f in parts]
        if len(parts) == 1 and a[0].shape[2] == 1:
            # (Q_Bᵀ g)² ((Q_Aᵀ a)²)ᵀ
            if self.gradient_basis is None:
                gs = g[0][:, :, :, 0].square().sum(0).transpose(0, 1)
            else:
                gs = torch.einsum("knrc,rce->rkne", g[0][:, :, :, 0], self.gradient_basis).square_().sum(1)
            self.tensors["values"] += gs.mT @ a[0][:, :, 0].square().transpose(0, 1)
        else:
            self._add_rows(a, g, turned)
        if not again:
            self._turned = []

    def _inputs_of(
        self, parts: list[UseFactors], columns: int, kind: torch.dtype
    ) -> tuple[list[Tensor], bool]:
        """â of every use, and whether it has been rotated: kept for the batch's other columns if so."""
        k, (c, d) = columns, self.tensors["values"].shape[1:]
        s = sum(f.a.shape[2] for f in parts)
        on_a = 0 if self.input_basis is None else d * d
        on_g = 0 if self.gradient_basis is None else c * c
        turned = s == 1 or s * (on_a + k * on_g) < k * (on_g * d + c * on_a)
        if turned and self._turned:
            return self._turned, True
        a = [self.layer.homogeneous(f.a.to(kind)) for f in parts]  # (N, R, S, d)
        if turned:
            a = self._turned = a if self.input_basis is None else [one @ self.input_basis for one in a]
        return a, turned

    def _add_rows(self, a: list[Tensor], g: list[Tensor], turned: bool) -> None:
        """Σ (Q_Bᵀ G Q_A)² from gradients that are formed, a few examples at once."""
        k, n, r, _, c = g[0].shape
        d = a[0].shape[-1]
        size = max(1, ROWS_AT_ONCE // max(1, k * r * c * d))
        for start in range(0, n, size):
            examples = slice(start, start + size)
            total: Tensor | None = None
            for own_a, own_g in zip(a, g, strict=True):
                part = own_g[:, examples].permute(1, 2, 0, 3, 4)  # (n, R, K, S, c)
                if turned and self.gradient_basis is not None:
                    part = part @ self.gradient_basis[:, None]
                # one product for each example and group: (K·c × S)(S × d)
                rows = part.mT.flatten(0, 1).flatten(1, 2) @ own_a[examples].flatten(0, 1)
                total = rows if total is None else total + rows
            assert total is not None
            formed = total.view(-1, r, k, c, d)
            if not turned and self.input_basis is not None:
                formed = formed @ self.input_basis[:, None]
            if not turned and self.gradient_basis is not None:
                formed = self.gradient_basis.mT[:, None] @ formed
            self.tensors["values"] += formed.square_().sum((0, 2))

    def block(self) -> KroneckerEigen:
        """The corrected product."""
        values = _without_rounding(self.tensors["values"])
        values = values.mT if self.layer.transposed else values
        return self.basis.with_values(values.contiguous().view(self.basis.values.shape))


class RowEigenvalueSums(Sums):
    """The same for a layer that has per-example gradients only."""

    def __init__(self, moments: RowMomentSums, basis: KroneckerEigen) -> None:
        self.layer = moments.layer
        self.basis = basis
        self.tensors = {"values": torch.zeros_like(self.basis.values)}

    def add(self, gradients: Gradients) -> None:
        """Add a batch."""
        rows = layer_rows(gradients.captured, self.layer).flatten(0, 1).to(self.basis.dtype)
        rotated = self.basis.rotate(rows.unflatten(1, tuple(self.basis.values.shape)))
        self.tensors["values"] += rotated.square().sum(0)

    def block(self) -> KroneckerEigen:
        """The corrected product."""
        return self.basis.with_values(_without_rounding(self.tensors["values"]))


def _without_rounding(values: Tensor) -> Tensor:
    """Second moments with what is rounding alone set to zero, so that a singular block is known for one."""
    return torch.where(values <= torch.finfo(values.dtype).eps * values.max(), 0.0, values)


def shared_eigenvalue_sums(
    firsts: Sequence[KroneckerSums | RowMomentSums], share: Share
) -> list[EigenvalueSums | RowEigenvalueSums]:
    """The second pass that belongs to a first one, with bases that all processes have in common."""
    blocks = [first.block() for first in firsts]
    made = iter(eigenbases([block for block in blocks if isinstance(block, Kronecker)], share))
    bases = [next(made) if isinstance(block, Kronecker) else block for block in blocks]
    sides = [side for basis in bases if basis.halved for side in (basis.left_vectors, basis.right_vectors)]
    if share.world > 1 and sides:
        all_same([side for side in sides if side is not None])
    return [
        EigenvalueSums(first, basis) if isinstance(first, KroneckerSums) else RowEigenvalueSums(first, basis)
        for first, basis in zip(firsts, bases, strict=True)
    ]
