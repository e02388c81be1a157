"""The curvature of a final linear layer, from its inputs alone.

For f = W a + b the gradient of uᵀf at the layer is u itself, so that Λ stands where Σ_k u_k u_kᵀ stood. With
â = [a; 1], over examples and positions,

    kfac       A = 1/M Σ â âᵀ,  B = Σ Λ
    ekfac      Σ diag(Q_Bᵀ Λ Q_B) ((Q_Aᵀ â)²)ᵀ
    diagonal   Σ diag(Λ) (â²)ᵀ
    block      Σ Λ ⊗ â âᵀ

One forward pass, and of C columns an example none. That the outputs are the layer's result is read off every
pass: autograd delivers gradients at both in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.curvatures.block import BlockSums
from linnet.curvatures.diagonal import DiagonalSums
from linnet.curvatures.ekfac import EigenvalueSums
from linnet.curvatures.expectation import Expectation
from linnet.curvatures.kfac import KroneckerSums
from linnet.curvatures.moments import InputMoment
from linnet.curvatures.sums import Sums, second_moment, wide
from linnet.likelihoods.custom import Custom
from linnet.likelihoods.likelihood import Likelihood
from linnet.tangent.functional import Functional
from linnet.tangent.trace import Trace

FORMED = 1 << 22  # numbers in the matrices of several examples that are formed at once


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """A batch at the layer."""

    a: Tensor  # inputs (N, ..., d)
    f: Tensor  # outputs (N, ..., C), the class axis last
    y: Tensor | None  # checked labels, where there are any
    likelihood: Likelihood  # what the outputs mean
    biased: bool  # whether the bias varies as well

    @cached_property
    def inputs(self) -> Tensor:
        """â of all positions, (M, D)."""
        a = self.a.flatten(0, -2).to(wide(self.a.dtype))
        return F.pad(a, (0, 1), value=1.0) if self.biased else a

    @cached_property
    def counted(self) -> Tensor:
        """Inputs a of the positions that have a label, (M', d)."""
        mask = None if self.y is None else self.likelihood.mask(self.y)
        a = self.a.flatten(0, -2).to(wide(self.a.dtype))
        return a if mask is None else a[mask.flatten()]

    def parts(self, numbers: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """A few examples after the other: their positions, outputs and labels."""
        positions = self.f[0].numel() // max(1, self.f.shape[-1])
        size = max(1, FORMED // max(1, numbers * positions))
        for start in range(0, len(self.f), size):
            some = slice(start, start + size)
            rows = slice(start * positions, (start + size) * positions)
            yield rows, self.f[some], None if self.y is None else self.y[some]


def has_closed_form(function: Functional, expectation: Expectation, sums: Sequence[Sums]) -> bool:
    """Whether the statistics are all of one layer, and sums over Λ instead of its columns."""
    likelihood = expectation.likelihood
    known = likelihood.canonical and not isinstance(likelihood, Custom)
    if expectation.kind != "exact" or expectation.matrix == "hessian" or not known:
        return False
    names = {statistic.layer.names for statistic in sums}
    return len(names) == 1 and not names & _inner(function) and all(map(_is_known, sums))


def _inner(function: Functional) -> set[tuple[str, ...]]:
    """Layers, by their parameters, whose result some pass has shown not to be the output."""
    return function.cache.inner_layers


def _is_known(statistic: Sums) -> bool:
    """Whether a statistic has one of the formulas above."""
    layer = statistic.layer
    if isinstance(statistic, KroneckerSums) and statistic.sharing != "expand" and layer.form.positions > 1:
        return False
    if isinstance(statistic, KroneckerSums | EigenvalueSums):
        return layer.groups == 1 and not layer.transposed
    return isinstance(statistic, DiagonalSums | BlockSums)


def output_inputs(run: Trace, names: Sequence[str]) -> Tensor | None:
    """The inputs a of the linear layer whose result the outputs are."""
    own = [use for use in run.uses if set(names) & set(use.sources)]
    expected = [("linear", tuple(names[:1])), ("shift", tuple(names[1:]))][: len(names)]
    if [(use.kind, use.sources) for use in own] != expected or set(names) & set(run.unhandled):
        return None
    if not all(use.direct and use.place == run.place and use.options.get("sign", 1) == 1 for use in own):
        return None
    weight = own[0]
    plain = not weight.options.get("left") and not weight.options.get("transposed")
    if weight.a is None or not plain or weight.a.shape[:-1] != weight.shape[:-1]:
        return None
    return weight.a if weight.shape[0] == run.n else None


def remembered_inputs(function: Functional, run: Trace, names: Sequence[str]) -> Tensor | None:
    """The same; a layer that is not the output's is not requested again."""
    a = output_inputs(run, names)
    if a is None:
        _inner(function).add(tuple(names))
    return a


def add_output_layer(sums: Sequence[Sums], own: OutputLayer) -> None:
    """Add a batch to the statistics of the layer."""
    for statistic in sums:
        if isinstance(statistic, KroneckerSums):
            _add_factors(statistic, own)
        elif isinstance(statistic, EigenvalueSums):
            _add_eigenvalues(statistic, own)
        elif isinstance(statistic, DiagonalSums):
            _add_squares(statistic, own)
        else:
            assert isinstance(statistic, BlockSums), "has_closed_form lets no other through"
            _add_products(statistic, own)


def _add_factors(statistic: KroneckerSums, own: OutputLayer) -> None:
    """Σ â âᵀ and Σ Λ."""
    a = own.counted
    second = a.square().sum(0) if "inputs" in statistic.wide else second_moment(a.mT)
    statistic.add_inputs(InputMoment(second[None], a.sum(0)[None], float(len(a))))
    if "gradients" in statistic.wide:
        statistic.tensors["gradients"] += own.likelihood.hessian_diagonal(own.f, own.y).flatten(0, -2).sum(0)
    else:
        statistic.tensors["gradients"] += own.likelihood.hessian_sum(own.f, own.y)


def _add_squares(statistic: DiagonalSums, own: OutputLayer) -> None:
    """Σ diag(Λ) (â²)ᵀ, parameter after parameter."""
    squares = own.likelihood.hessian_diagonal(own.f, own.y).flatten(0, -2).mT @ own.inputs.square()
    d = own.a.shape[-1]
    statistic.tensors["squares"] += torch.cat([squares[:, :d].flatten(), squares[:, d:].flatten()])


def _add_eigenvalues(statistic: EigenvalueSums, own: OutputLayer) -> None:
    """Σ diag(Q_Bᵀ Λ Q_B) ((Q_Aᵀ â)²)ᵀ."""
    on_a = statistic.input_basis
    turned = (own.inputs if on_a is None else own.inputs @ on_a[0]).square()
    if statistic.gradient_basis is None:
        curved = own.likelihood.hessian_diagonal(own.f, own.y).flatten(0, -2)
        statistic.tensors["values"][0] += curved.mT @ turned
        return
    q = statistic.gradient_basis[0].to(own.f.dtype)
    for rows, f, y in own.parts(q.numel()):
        v = q.mT.reshape(len(q), *[1] * (f.ndim - 1), -1).expand(-1, *f.shape)
        # q_jᵀ Λ q_j for every column j of Q_B
        found = (own.likelihood.product(f, v, y) * v).sum(-1).flatten(1)
        statistic.tensors["values"][0] += found.clamp_min(0) @ turned[rows]


def _add_products(statistic: BlockSums, own: OutputLayer) -> None:
    """Σ Λ ⊗ â âᵀ, one row of classes after the other, parameter after parameter."""
    products, c, d = statistic.tensors["products"], own.f.shape[-1], own.a.shape[-1]
    spans = [slice(0, d), slice(d, d + 1)][: 1 + own.biased]
    places = [slice(0, c * d), slice(c * d, c * d + c)]
    pairs = [
        (p, q, products[at_p, at_q].unflatten(0, (c, -1)).unflatten(2, (c, -1)))
        for p, at_p in zip(spans, places, strict=False)
        for q, at_q in zip(spans, places, strict=False)
    ]
    width = own.inputs.shape[-1]
    for rows, f, y in own.parts(max(c * c, width * width)):
        curved = own.likelihood.hessian(f, y).flatten(0, 1)  # Λ, (M, C, C)
        a = own.inputs[rows]
        outer = (a[:, :, None] * a[:, None]).flatten(1)
        for i in range(c):
            # Σ Λ_ij â âᵀ for all j ≤ i; the blocks above the diagonal are the same
            block = (curved[:, i, : i + 1].mT @ outer).view(i + 1, width, width)
            block = (block + block.mT) / 2
            for p, q, place in pairs:
                place[i, :, : i + 1] += block[:, p, q].transpose(0, 1)
                place[:i, :, i] += block[:i, p, q]
