"""J M Jᵀ without Jacobians: output covariances from a covariance of the weights.

It is summed layer by layer from the inputs a and output gradients g of every use. Without weight sharing
nothing but small products is needed:

    M = L ⊗ R                           (g_k L g_k'ᵀ) (aᵀ R a)
    M = (Q_L ⊗ Q_R) diag(λ) (...)ᵀ      Σ_c g̃_kc g̃_k'c (Σ_d λ_cd ã_d²),   g̃ = g Q_L, ã = a Q_R
    M = diag(λ)                         the same without rotation

With sharing the gradients Σ_s g_s a_sᵀ of one layer are formed, a few examples at once. Variances alone take
outputs a few at a time, and never a matrix C x C.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from linnet.curvatures.layers import Part, as_found, layer_factors
from linnet.curvatures.stream import usable
from linnet.curvatures.sums import ROWS_AT_ONCE, layer_rows, looked_up
from linnet.linalg.kronecker import Kronecker, KroneckerEigen
from linnet.linalg.structured import Diagonal
from linnet.memory import Plan, parse_bytes, require
from linnet.tangent.batch import Inputs, batch_size, check_finite, split, take
from linnet.tangent.capture import capture, capture_bytes, capture_parts
from linnet.tangent.data import examples
from linnet.tangent.functional import Functional
from linnet.tangent.nonfinite import require_finite_products
from linnet.tangent.rules import Captured, UseFactors, factors
from linnet.tree import map_tensors

TARGET = 128 << 20  # bytes of one captured batch
MOST = 256  # examples captured at once
ALONE = 'take variances alone (output_variance(), .variance, link="probit"), which need no covariance'
WITHOUT = {  # what to do where covariances between outputs do not fit
    "result": ["use fewer examples at once", "raise memory="],
    "derivatives of one example": [ALONE, "raise memory="],
    "covariances of one example": [ALONE, "raise memory="],
}


def output_covariance(
    function: Functional, parts: Sequence[Part], x: Inputs, memory: str | int | None = None
) -> Tensor:
    """J(x) M J(x)ᵀ for each example."""
    x = map_tensors(lambda t: usable(t, None), examples(function, x))
    kept = batch_size(x) * function.output_shape(x).numel() ** 2
    blocks = captured_blocks(function, parts, x, memory, kept)
    found = torch.cat([batch_covariance(parts, captured) for captured in blocks])
    require_finite_products(function, x, found)
    return found


def captured_blocks(
    function: Functional, parts: Sequence[Part], x: Inputs, memory: str | int | None = None, kept: int = 0
) -> Iterator[Captured]:
    """The network differentiated on a few examples after the other; ``kept`` numbers are made of them."""
    x = map_tensors(lambda t: t.detach(), x)
    check_finite(x, "x")
    c = function.check_runs(take(x, slice(0, 1))).numel()
    budget, item = parse_bytes(memory, function.device), function.dtype.itemsize
    one = capture_bytes(function, x, c) + row_bytes(parts, c) + c * c * item
    items = (("result", kept * item), ("derivatives of one example", one))
    require(Plan(f"output covariance of {batch_size(x)} examples x {c} outputs", budget, items), WITHOUT)
    size = max(1, min(MOST, min(TARGET, budget // 2) // max(one, 1)))
    for block in split(x, size):
        yield capture(function, block)


def output_variance(
    function: Functional, parts: Sequence[Part], x: Inputs, memory: str | int | None = None
) -> Tensor:
    """The diagonal of J(x) M J(x)ᵀ for each example; nothing of size C x C is formed."""
    x = map_tensors(lambda t: usable(t, None), examples(function, x))
    return torch.cat([variance for _, variance in variance_blocks(function, parts, x, memory)])


def variance_blocks(
    function: Functional, parts: Sequence[Part], x: Inputs, memory: str | int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs and their variances, a few examples after the other, and of those a few outputs."""
    n, c = batch_size(x), function.check_runs(take(x, slice(0, 1))).numel()
    budget, item = parse_bytes(memory, function.device), function.dtype.itemsize
    shared = [p.layer.size for p in parts if _is_closed(p) and p.layer.form.positions > 1]
    inputs = capture_bytes(function, x, 0)
    column = capture_bytes(function, x, 1) - inputs + row_bytes(parts, 1) + c * item
    column += 2 * max(shared, default=0) * parts[0].operator.dtype.itemsize  # formed, and turned
    items = (("result", 2 * n * c * item), ("derivatives of one example", inputs + column))
    plan = Plan(f"output variances of {n} examples x {c} outputs", budget, items)
    require(plan, ["raise memory=", "use fewer examples at once"])
    room = min(TARGET, (budget - items[0][1]) // 2)
    size = max(1, min(MOST, room // max(1, inputs + c * column)))
    columns = min(c, max(1, (room - inputs) // max(1, column)))
    for block in split(x, size):
        found = []
        for captured in capture_parts(function, block, "full", columns):
            outputs = captured.outputs
            found.append(batch_variance(parts, captured))
        variances = torch.cat(found, 1)
        require_finite_products(function, block, variances)
        yield outputs, variances


def row_bytes(parts: Sequence[Part], c: int) -> int:
    """Bytes of the gradients of one example that are formed for blocks without closed forms."""
    formed = [part.layer.size for part in parts if not _looked_up(part) and not _is_closed(part)]
    return sum(formed) * c * parts[0].operator.dtype.itemsize


def batch_covariance(parts: Sequence[Part], captured: Captured) -> Tensor:
    """J(x) M J(x)ᵀ for each example of a batch that has been differentiated already."""
    k, kind = captured.k, parts[0].operator.dtype
    total = torch.zeros(captured.n, k, k, dtype=kind, device=captured.outputs.device)
    for part in parts:
        total += _part_covariance(part, captured).to(total.dtype)
    return (total + total.mT) / 2


def batch_variance(parts: Sequence[Part], captured: Captured) -> Tensor:
    """The diagonal of J(x) M J(x)ᵀ for each example of a batch, and for the outputs it was captured for."""
    total = torch.zeros(captured.n, captured.k, dtype=parts[0].operator.dtype, device=captured.outputs.device)
    for part in parts:
        total += _part_variance(part, captured).to(total.dtype)
    return total


def root_rows(parts: Sequence[Part], captured: Captured) -> Tensor:
    """Rows J S for some S with S Sᵀ = M, so that products of two batches of them are J₁ M J₂ᵀ, (N, K, P)."""
    # A block in an eigenbasis turns the factors before they are multiplied, and its S is Q Λ^½: both are
    # cheaper than the symmetric root of the block, applied to rows.
    return torch.cat([_part_rows(part, captured) for part in parts], 2)


def _part_rows(part: Part, captured: Captured) -> Tensor:
    """J S of one layer, (N, K, size)."""
    n, k = captured.n, captured.k
    if part.layer.factored and part.joined and as_found(captured, part.layer):
        form, found = _Form.of(part), _homogeneous(part, captured)
        if found and form.roots is not None:
            rows = _formed(found, slice(0, n), form.inputs, form.gradients)  # (N, R, K, c, d)
            return rows.mul_(form.roots[:, None]).transpose(1, 2).reshape(n, k, -1)
    return half_rows(part, captured).view(n, k, -1)


def half_rows(part: Part, captured: Captured) -> Tensor:
    """J S of one layer with the block's own root S, (N·K, size)."""
    return part.operator._root_transposed(_ordered_rows(part, captured).flatten(0, 1).T).T


def _homogeneous(part: Part, captured: Captured) -> list[UseFactors]:
    """The factors of every use, a with a one for the bias."""
    kind, found = part.operator.dtype, layer_factors(captured, part.layer)
    return [UseFactors(part.layer.homogeneous(f.a.to(kind)), f.g.to(kind)) for f in found]


def _part_covariance(part: Part, captured: Captured) -> Tensor:
    """One layer's contribution."""
    if not as_found(captured, part.layer):
        return part.operator.quadratic(_ordered_rows(part, captured))
    if _looked_up(part):
        return _embedding_covariance(part, captured)
    if not _is_closed(part):
        rows = layer_rows(captured, part.layer).to(part.operator.dtype)
        return part.operator.quadratic(rows)
    found = _homogeneous(part, captured)
    if not found:
        return torch.zeros((), dtype=part.operator.dtype, device=captured.outputs.device)
    return _Form.of(part).covariance(found)


def _part_variance(part: Part, captured: Captured) -> Tensor:
    """One layer's contribution to the variances."""
    found = as_found(captured, part.layer)
    if found and _looked_up(part):
        return _embedding_variance(part, captured)
    if found and _is_closed(part):
        parts = _homogeneous(part, captured)
        if not parts:
            return torch.zeros((), dtype=part.operator.dtype, device=captured.outputs.device)
        return _Form.of(part).variance(parts)
    return half_rows(part, captured).square().sum(1).view(captured.n, captured.k)


def _ordered_rows(part: Part, captured: Captured) -> Tensor:
    """Per-example gradients of a layer in the order of its block, (N, K, size)."""
    if not part.joined or not part.layer.biased:
        return layer_rows(captured, part.layer).to(part.operator.dtype)
    rows = part.layer.join([captured.rows(name).flatten(0, 1) for name in part.layer.names])
    return rows.reshape(captured.n, captured.k, -1).to(part.operator.dtype)


def _looked_up(part: Part) -> bool:
    """Whether the block is the diagonal of an embedding table, most of which no example looks up."""
    return part.layer.embedding and isinstance(part.operator, Diagonal)


def _embedding_covariance(part: Part, captured: Captured) -> Tensor:
    """Σ over the rows v of a table that an example looks up, of g_kv diag(λ_v) g_k'vᵀ."""
    k, n = captured.k, captured.n
    total = part.operator.diagonal().new_zeros(n, k, k)
    for example, sums, weight in _looked_up_rows(part, captured):
        total.index_add_(0, example, (sums * weight[:, None]) @ sums.mT)
    return total


def _embedding_variance(part: Part, captured: Captured) -> Tensor:
    """Σ over the rows v of a table that an example looks up, of Σ λ_v g_kv²."""
    total = part.operator.diagonal().new_zeros(captured.n, captured.k)
    for example, sums, weight in _looked_up_rows(part, captured):
        total.index_add_(0, example, (sums.square() @ weight[:, :, None]).squeeze(2))
    return total


def _looked_up_rows(part: Part, captured: Captured) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Example (U,), gradients (U, K, c) and λ_v (U, c) of all rows that are looked up, if any are."""
    rows = part.layer.shapes[0][0]
    assert isinstance(part.operator, Diagonal)
    uses = captured.by_parameter().get(part.layer.names[0], [])
    if uses:
        seen, sums = looked_up([factors(use, captured.n) for use in uses], rows)
        values = part.operator.values.view(rows, -1)
        yield seen // rows, sums.to(values.dtype).transpose(0, 1), values[seen % rows]


def _is_closed(part: Part) -> bool:
    """Whether the layer has factors and its block one of the formulas above."""
    kinds = Kronecker | KroneckerEigen if part.joined else Diagonal
    return part.layer.factored and isinstance(part.operator, kinds)


class _Form:
    """M of one layer as what it does to inputs, to output gradients, and to their products."""

    # With products L ⊗ R: ⟨U, L U' R⟩; in an eigenbasis: ⟨Ũ, λ ∘ Ũ'⟩ for Ũ = Q_Lᵀ U Q_R.

    def __init__(self, inputs: Tensor | None, gradients: Tensor | None, values: Tensor | None) -> None:
        self.inputs, self.gradients, self.values = inputs, gradients, values

    @cached_property
    def roots(self) -> Tensor | None:
        """λ^½, so that products with λ are symmetric; none for a matrix that is not positive."""
        positive = self.values is not None and bool((self.values >= 0).all())
        return self.values.sqrt() if self.values is not None and positive else None

    @classmethod
    def of(cls, part: Part) -> _Form:
        """The form of a block; matrices (R, d, d) and (R, c, c), values (R, c, d)."""
        operator, layer = part.operator, part.layer
        left: Tensor | None
        right: Tensor | None
        values: Tensor | None
        if isinstance(operator, Diagonal):
            matrix = layer.join(layer.shaped(operator.values))
            return cls(None, None, matrix.mT if layer.transposed else matrix)
        if isinstance(operator, Kronecker):
            left, right, values = operator.left, operator.right, None
        else:
            assert isinstance(operator, KroneckerEigen)
            left, right, values = operator.left_vectors, operator.right_vectors, operator.values
        if layer.groups == 1:
            left, right, values = (None if t is None else t[None] for t in (left, right, values))
        values = values.mT if values is not None and layer.transposed else values
        return cls(*layer.ordered(left, right), values)

    def covariance(self, parts: list[UseFactors]) -> Tensor:
        """(N, C, C) from the factors of all uses."""
        if len(parts) == 1 and parts[0].a.shape[2] == 1:
            return self._without_sharing(parts[0].a[:, :, 0], parts[0].g[:, :, :, 0])
        k, n, r, _, c = parts[0].g.shape
        size = max(1, ROWS_AT_ONCE // max(1, k * r * c * parts[0].a.shape[-1]))
        found = [self._with_sharing(parts, slice(i, i + size)) for i in range(0, n, size)]
        return torch.cat(found)

    def variance(self, parts: list[UseFactors]) -> Tensor:
        """(N, C) from the factors of all uses."""
        if len(parts) == 1 and parts[0].a.shape[2] == 1:
            a, g = parts[0].a[:, :, 0], parts[0].g[:, :, :, 0].permute(1, 2, 0, 3)  # (N, R, d), (N, R, K, c)
            turned = g if self.gradients is None else g @ self.gradients
            if self.values is None:
                return ((turned * g).sum(3) * self._scale(a)[:, :, None]).sum(1)
            return (turned.square() @ self._weight(a)[..., None]).squeeze(3).sum(1)
        k, n, r, _, c = parts[0].g.shape
        size = max(1, ROWS_AT_ONCE // max(1, k * r * c * parts[0].a.shape[-1]))
        found = []
        for start in range(0, n, size):
            plain, turned = self._rows(parts, slice(start, start + size))
            rows = turned.square() * self.values[:, None] if self.values is not None else plain * turned
            found.append(rows.flatten(3).sum(3).sum(1))
        return torch.cat(found)

    def _scale(self, a: Tensor) -> Tensor:
        """aᵀ R a for a (N, R, d), (N, R)."""
        mapped = a if self.inputs is None else torch.einsum("nrd,rde->nre", a, self.inputs)
        return (mapped * a).sum(2)

    def _weight(self, a: Tensor) -> Tensor:
        """Σ_d λ_cd ã_d² for a (N, R, d), (N, R, c)."""
        assert self.values is not None
        mapped = a if self.inputs is None else torch.einsum("nrd,rde->nre", a, self.inputs)
        return torch.einsum("nrd,rcd->nrc", mapped.square(), self.values)

    def _without_sharing(self, a: Tensor, g: Tensor) -> Tensor:
        """A (N, R, d) and g (K, N, R, c)."""
        g = g.permute(1, 2, 0, 3)  # (N, R, K, c)
        turned = g if self.gradients is None else g @ self.gradients
        if self.values is None:
            return ((turned @ g.mT) * self._scale(a)[:, :, None, None]).sum(1)
        return ((turned * self._weight(a)[:, :, None]) @ turned.mT).sum(1)

    def _with_sharing(self, parts: list[UseFactors], examples: slice) -> Tensor:
        """From the gradients of some examples, formed."""
        plain, turned = self._rows(parts, examples)
        if self.values is None:
            return (plain.flatten(3) @ turned.flatten(3).mT).sum(1)
        if self.roots is None:
            return ((turned * self.values[:, None]).flatten(3) @ turned.flatten(3).mT).sum(1)
        scaled = turned.mul_(self.roots[:, None]).flatten(3)
        return (scaled @ scaled.mT).sum(1)

    def _rows(self, parts: list[UseFactors], examples: slice) -> tuple[Tensor, Tensor]:
        """Gradients of some examples as they are, and turned; with eigenvalues the latter alone matter."""
        k, _, _, _, c = parts[0].g.shape
        s, d = sum(f.a.shape[2] for f in parts), parts[0].a.shape[-1]
        first = s * (d * d + k * c * c) + s * k * c * d < k * (c * c * d + c * d * d)
        turned = _formed(parts, examples, self.inputs, self.gradients) if first else None
        plain = _formed(parts, examples) if turned is None or self.values is None else None
        if turned is None:
            assert plain is not None
            turned = plain if self.inputs is None else plain @ self.inputs[:, None]
            turned = turned if self.gradients is None else self.gradients.mT[:, None] @ turned
        return (turned if plain is None else plain), turned


def _formed(
    parts: list[UseFactors], examples: slice, on_a: Tensor | None = None, on_g: Tensor | None = None
) -> Tensor:
    """Σ_s g_s a_sᵀ of some examples with a times ``on_a`` and g times ``on_g``, (n, R, K, c, d)."""
    total: Tensor | None = None
    for f in parts:
        a = f.a[examples] if on_a is None else f.a[examples] @ on_a  # (n, R, S, d)
        g = f.g[:, examples].permute(1, 2, 0, 3, 4)  # (n, R, K, S, c)
        n, r, k, s, c = g.shape
        if on_g is None and g.stride(3) == 1:  # positions side by side in memory: nothing is moved
            lines = g.mT.reshape(n * r, k * c, s)
        else:
            g = g.transpose(2, 3).reshape(n, r, s * k, c)
            lines = (g if on_g is None else g @ on_g).reshape(n * r, s, k * c).mT
        rows = lines @ a.reshape(n * r, s, -1)
        total = rows if total is None else total.add_(rows)
    assert total is not None
    return total.view(n, r, k, c, -1)
