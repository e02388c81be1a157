"""Products Jᵀ Λ J v of one batch for K vectors, by the cheapest order of operations.

With F the cost of a forward pass, S the number of columns that Λ is made of (C for Λ itself, the number of
samples for a sampled one) and K the number of vectors:

    by tangents  5 K F            Jv in forward mode, then its transpose by differentiating Jv in v, which
                                  reuses the pass: the primal, two products a layer forwards and two back
    by rows      (1 + 2 S) F      S backward passes give the gradients at every layer's result; with them
                                  per-example gradients are formed, or contracted with v where that is less
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from linnet.curvatures.expectation import Expectation
from linnet.curvatures.stream import Batch, Batches
from linnet.distributed import all_sum, collective
from linnet.errors import DataError, ModelError
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.operator import ParameterSpace, SymmetricOperator, require_fit
from linnet.linalg.random import normal
from linnet.progress import track
from linnet.shown import first_line
from linnet.tangent.batch import Inputs, batch_size, example_shapes, split, take
from linnet.tangent.capture import capture, capture_bytes
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional, not_finite
from linnet.tangent.gradients import pulled_back, side_by_side
from linnet.tangent.independence import require_history
from linnet.tangent.jacobian import jvp, jvp_path
from linnet.tangent.modes import differentiable_kernels, in_exact_mode
from linnet.tangent.rules import OUTER, Captured, Use, UseFactors, factors
from linnet.tangent.trace import weighing

Weigh = Callable[[Tensor, Tensor, slice], Tensor]  # f (N, ...), t (K, N, ...) of some examples to Λ t
Columns = Callable[[Tensor], Tensor]  # f (N, ...) to s (S, N, ...)

CAPTURED_BYTES = 192 << 20  # of one captured part of a batch
ROWS_BYTES = 64 << 20  # of the per-example gradients of one captured part
FEWEST = 4  # examples of a part, where there are as many
MANY = 32  # examples of a part from which products with V are not bound by reading V
TANGENT_BYTES = {"cpu": 32 << 20}  # of what autograd keeps of one pass with tangents
ACCELERATED_BYTES = 1 << 30  # the same elsewhere, where large batches are fast
FEWEST_TANGENTS = 64  # examples of such a pass, where there are as many
PROBES = 2  # examples that show what one keeps


def require_finite(f: Tensor, index: int, start: int = 0) -> None:
    """Raise if outputs are not finite, naming the first example."""
    # f (N, ...)
    good = torch.isfinite(f).reshape(f.shape[0], -1).all(1)
    if not bool(good.all()):
        first = start + int((~good).nonzero()[0])
        raise not_finite(f"example {first} of batch {index}")


@in_exact_mode
@torch.no_grad()
def weighted(function: Functional, x: Inputs, v: Tensor, weigh: Weigh) -> Tensor:
    """Σ_n J_nᵀ Λ_n J_n V, (P, K)."""
    # v (P, K)
    shape = function.output_shape(x)
    outputs = math.prod(shape)
    total, start = torch.zeros_like(v), 0
    if not _rows_pay(function, x, outputs, v.shape[1]):
        for part in split(x, _tangent_examples(function, x)):
            n = batch_size(part)
            own = partial(_placed, weigh, start)
            total += _by_tangents(function, part, v, own)
            start += n
        return total
    for jacobian in _captured(function, x, outputs, v.shape[1], None):
        n = jacobian.captured.n
        f = jacobian.captured.outputs.reshape(n, *shape)
        t = jacobian.times(v).movedim(-1, 0).reshape(-1, *f.shape)  # from (N, C, K)
        u = weigh(f, t, slice(start, start + n)).reshape(t.shape[0], n, outputs)
        total += jacobian.transposed(u.movedim(0, -1))
        start += n
    return total


@in_exact_mode
@torch.no_grad()
def factored(function: Functional, x: Inputs, v: Tensor, columns: Columns, count: int) -> Tensor:
    """Σ_n Σ_s (J_nᵀ s)(J_nᵀ s)ᵀ V for some columns s in the space of the outputs."""
    # v (P, K)
    shape = function.output_shape(x)
    if not _rows_pay(function, x, count, v.shape[1]):
        return _by_tangents(function, x, v, _OuterProducts(columns))

    def own(flat: Tensor) -> Tensor:
        return columns(flat.reshape(flat.shape[0], *shape)).flatten(2)

    # random columns belong to the whole batch, also where it is captured in parts
    whole = _part_size(function, x, count) >= batch_size(x)
    cotangents: Tensor | Columns = own if whole else own(function.flat(function.theta, x))
    total = torch.zeros_like(v)
    for jacobian in _captured(function, x, count, v.shape[1], cotangents):
        total += jacobian.transposed(jacobian.times(v))
    return total


class _OuterProducts:
    """Σ_s s sᵀ t, with the columns s made once."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.made: Tensor | None = None

    def __call__(self, f: Tensor, t: Tensor, place: slice) -> Tensor:
        if self.made is None:
            self.made = self.columns(f)
        return _outer_products(self.made, t)


def _outer_products(s: Tensor, t: Tensor) -> Tensor:
    """Σ_j s_j s_jᵀ t of every example."""
    # s (S, N, ...), t (K, N, ...)
    s, flat = s.flatten(2), t.flatten(2)
    return torch.einsum("snc,snk->knc", s, torch.einsum("snc,knc->snk", s, flat)).reshape(t.shape)


def _rows_pay(function: Functional, x: Inputs, columns: int, vectors: int) -> bool:
    """Whether per-example gradients cost less than tangents, or are all there is."""
    return columns <= 2 * vectors or jvp_path(function, x)[0] == "rows"


# --- by tangents ----------------------------------------------------------------------------------


def _placed(weigh: Weigh, start: int, f: Tensor, t: Tensor, place: slice) -> Tensor:
    """Λ t of examples that begin at ``start`` of their batch."""
    return weigh(f, t, slice(start + place.start, start + place.stop))


def _tangent_examples(function: Functional, x: Inputs) -> int:
    """Examples that are run with their tangents at once, so that what autograd keeps is bounded."""
    key = ("examples with tangents", example_shapes(x))
    if key not in function.cache.others:
        few = take(x, list(range(min(PROBES, batch_size(x)))))
        zero = torch.zeros(function.space.dim, 1, dtype=function.dtype, device=function.device)
        with weighing(function) as kept:
            _by_tangents(function, few, zero, lambda f, t, place: t)
        each = sum(kept.values()) // batch_size(few)
        budget = TANGENT_BYTES.get(function.device.type, ACCELERATED_BYTES)
        function.cache.others[key] = max(FEWEST_TANGENTS, budget // max(1, each))
    found: int = function.cache.others[key]
    return found


def _by_tangents(function: Functional, x: Inputs, v: Tensor, weigh: Weigh) -> Tensor:
    """One vector after the other, or all on one graph where the network is differentiated twice."""
    if jvp_path(function, x)[0] == "double-backward":
        return _by_double_backward(function, x, v, weigh)
    parts = []
    for k in range(v.shape[1]):
        direction = function.space.to_params(v[:, k].contiguous())
        leaves = {name: t.detach().requires_grad_() for name, t in direction.items()}
        with torch.enable_grad():
            f, tangent = jvp(function, x, leaves)
        if not tangent.requires_grad:
            require_history(function, x)
        u = weigh(f.detach(), tangent.detach()[None], slice(0, f.shape[0]))[0]
        # Jv is linear in v: its gradient in v along u is Jᵀu
        parts.append(pulled_back(tangent, list(leaves.values()), u[None])[0])
    return torch.stack(parts, 1)


def _by_double_backward(function: Functional, x: Inputs, v: Tensor, weigh: Weigh) -> Tensor:
    """One pass with its graph for all vectors: J v = ∂/∂u ⟨Jᵀu, v⟩, then Jᵀ."""
    leaves = {name: t.detach().requires_grad_() for name, t in function.theta.items()}
    with torch.enable_grad(), differentiable_kernels(function.recurrent):
        f = function(leaves, x)
        if not f.requires_grad:
            require_history(function, x)
            return torch.zeros_like(v)
        u = torch.zeros_like(f, requires_grad=True)
        pulled = torch.autograd.grad(f, list(leaves.values()), u, create_graph=True, allow_unused=True)
        used = [(g, name) for g, name in zip(pulled, leaves, strict=True) if g is not None]
    tangents = []
    for k in range(v.shape[1]):
        along = function.space.to_params(v[:, k])
        pairs = [(g, along[name]) for g, name in used if g.requires_grad]
        (t,) = torch.autograd.grad([g for g, _ in pairs], u, [w for _, w in pairs], retain_graph=True)
        tangents.append(t)
    weighed = weigh(f.detach(), torch.stack(tangents), slice(0, f.shape[0]))
    return pulled_back(f, list(leaves.values()), weighed).T


# --- by rows --------------------------------------------------------------------------------------


def _part_size(function: Functional, x: Inputs, columns: int) -> int:
    """Examples that are captured at once."""
    key = ("captured examples", columns, example_shapes(x))
    if key not in function.cache.others:
        captured = CAPTURED_BYTES // max(1, capture_bytes(function, x, columns))
        rows = ROWS_BYTES // max(1, columns * function.space.dim * function.dtype.itemsize)
        # rows of all parameters do not fit: most are contracted
        if rows < min(MANY, captured, batch_size(x)):
            rows = ROWS_BYTES // max(1, columns * _always_formed(function, x) * function.dtype.itemsize)
        function.cache.others[key] = max(1, min(captured, max(FEWEST, rows)))
    found: int = function.cache.others[key]
    return found


def _always_formed(function: Functional, x: Inputs) -> int:
    """Size of the gradients of parameters that no outer products stand for."""
    captured = capture(function, take(x, slice(0, min(PROBES, batch_size(x)))), "sum")
    uses = captured.by_parameter()
    return sum(
        place.stop - place.start
        for name, place in function.space.slices.items()
        if _pairs(captured, name, uses.get(name, [])) is None
    )


def _captured(
    function: Functional, x: Inputs, columns: int, vectors: int, cotangents: Tensor | Columns | None
) -> Iterator[RowProducts]:
    """The batch in parts, each with the gradients of its outputs along the cotangents."""
    start = 0
    for part in split(x, _part_size(function, x, columns)):
        n = batch_size(part)
        wanted = cotangents[:, start : start + n] if isinstance(cotangents, Tensor) else cotangents
        captured = capture(function, part, "full" if wanted is None else wanted)
        yield RowProducts(captured, function.space, vectors)
        start += n


class RowProducts:
    """The per-example gradients of a captured batch as a matrix (N·S, P), never whole."""

    # A weight's gradient Σ_s g_s a_sᵀ is formed where that costs less and there is room; otherwise V is
    # contracted with a and g, position by position.

    def __init__(self, captured: Captured, space: ParameterSpace, vectors: int) -> None:
        self.captured, self.space = captured, space
        uses, self.rows, self.pairs = captured.by_parameter(), {}, {}
        room = 2 * ROWS_BYTES
        for name, place in space.slices.items():
            pairs = _pairs(captured, name, uses.get(name, []))
            size = place.stop - place.start
            if pairs is not None and _contracting_pays(captured, pairs, size, vectors, room):
                self.pairs[name] = pairs
            else:
                self.rows[name] = captured.rows(name).reshape(captured.n * captured.k, size)
                room -= self.rows[name].nbytes

    def times(self, v: Tensor) -> Tensor:
        """⟨gradient of example n along cotangent s, v_k⟩, (N, S, K)."""
        # v (P, K)
        n, s, k = self.captured.n, self.captured.k, v.shape[1]
        total = v.new_zeros(n * s, k)
        for name, rows in self.rows.items():
            total.addmm_(rows, v[self.space.slices[name]])
        for name, pairs in self.pairs.items():
            for pair in pairs:
                total += _contract(pair, v[self.space.slices[name]]).reshape(n * s, k)
        return total.view(n, s, k)

    def transposed(self, u: Tensor) -> Tensor:
        """Σ_ns of the gradients, weighted, (P, K)."""
        # u (N, S, K)
        flat = u.reshape(-1, u.shape[2])
        total = u.new_zeros(self.space.dim, u.shape[2])
        for name, rows in self.rows.items():
            torch.mm(rows.T, flat, out=total[self.space.slices[name]])
        for name, pairs in self.pairs.items():
            for pair in pairs:
                _expand(pair, u, total[self.space.slices[name]])
        return total


def _pairs(captured: Captured, name: str, uses: list[Use]) -> list[UseFactors] | None:
    """The outer-product form of all uses of a parameter, if they have it."""
    if name in captured.exact or not uses or not all(use.kind in OUTER and use.direct for use in uses):
        return None
    return [factors(use, captured.n) for use in uses]


def _contracting_pays(
    captured: Captured, pairs: list[UseFactors], size: int, vectors: int, room: int
) -> bool:
    """Whether V is contracted with a and g rather than with gradients that are formed, in ``room`` bytes."""
    n, s = captured.n, captured.k
    positions = sum(pair.g.shape[3] for pair in pairs)
    outputs = pairs[0].g.shape[2] * pairs[0].g.shape[4]  # groups x features
    if pairs[0].is_embedding or s * n * size * pairs[0].g.element_size() > room:
        return True
    form = s * positions * size + 2 * s * vectors * size
    contract = 2 * vectors * positions * (size + s * outputs)
    return contract < form


def _by_group(pair: UseFactors, v: Tensor) -> Tensor:
    """Rows of V that belong to one parameter, (R, c, d, K) or, for an embedding, (ids, c, K)."""
    _, _, groups, _, c = pair.g.shape
    if pair.is_embedding:
        return v.reshape(-1, c, v.shape[1])
    d = pair.a.shape[3]
    return v.view(groups, d, c, -1).transpose(1, 2) if pair.transposed else v.view(groups, c, d, -1)


def _contract(pair: UseFactors, v: Tensor) -> Tensor:
    """Σ_s g_sᵀ V_k a_s, (N, S, K)."""
    k = v.shape[1]
    s, n, groups, positions, c = pair.g.shape
    own = _by_group(pair, v)
    if pair.is_embedding:
        h = own[pair.a[:, 0]][:, None]  # (N, 1, positions, c, K)
    else:
        # V a at every position: (R, N·positions, d)(R, d, c·K)
        a = pair.a.transpose(0, 1).reshape(groups, n * positions, -1)
        h = torch.bmm(a, own.transpose(1, 2).reshape(groups, a.shape[2], c * k))
        h = h.view(groups, n, positions, c, k).transpose(0, 1)
    g = pair.g.transpose(0, 1).reshape(n, s, -1)
    return torch.bmm(g, h.reshape(n, -1, k))


def _expand(pair: UseFactors, u: Tensor, out: Tensor) -> None:
    """Σ_n Σ_s (Σ_j u_njk g_njs) a_nsᵀ, added to (rows of the parameter, K)."""
    k = u.shape[2]
    s, n, groups, positions, c = pair.g.shape
    g = pair.g.transpose(0, 1).reshape(n, s, -1)
    h = torch.bmm(g.mT, u).view(n, groups, positions, c, k)
    if pair.is_embedding:
        ids, width = pair.a.reshape(-1), c * k
        out.view(-1, width).index_add_(0, ids, h.reshape(-1, width))
        return
    a = pair.a.transpose(0, 1).reshape(groups, n * positions, -1)
    h = h.transpose(0, 1).reshape(groups, n * positions, c * k)
    grown = torch.bmm(a.mT, h).view(groups, a.shape[2], c, k)
    out.view(_by_shape(pair, k)).add_(grown if pair.transposed else grown.transpose(1, 2))


def _by_shape(pair: UseFactors, k: int) -> tuple[int, int, int, int]:
    """The shape in which a parameter is stored, by group."""
    _, _, groups, _, c = pair.g.shape
    d = pair.a.shape[3]
    return (groups, d, c, k) if pair.transposed else (groups, c, d, k)


# -- ggn -------------------------------------------------------------------------------------------
# The Gauss-Newton matrix as an operator, and the base class of sums over a data set.


class SummedOperator(SymmetricOperator, ABC):
    """A symmetric P x P matrix that is a sum over the examples of a data set."""

    # A product, with however many vectors, is one pass over the data; under `torch.distributed` each process
    # passes over its share, and the product is the same on all of them.

    description: str

    def __init__(self, function: Functional, data: Batches, likelihood: Likelihood) -> None:
        self.function, self.data, self.likelihood = function, data, likelihood
        self.shape = (function.space.dim, function.space.dim)
        self.dtype, self.device, self.space = function.dtype, function.device, function.space
        self.passes = 0

    @abstractmethod
    def product(self, batch: Batch, v: Tensor) -> Tensor:
        """A batch's part of the product, (P, K)."""
        # v (P, K)

    def mm(self, v: Tensor) -> Tensor:
        """A v: (P, K) to (P, K), in one pass over the data."""
        require_fit(self, v, 2)
        total = torch.zeros_like(v, memory_format=torch.contiguous_format)
        if v.shape[1] == 0:
            return total
        shared = self.data.share.world > 1
        shown = None if self.data.share.rank == 0 else False
        with collective(self.description, shared):
            for batch in track(self.data, self.description, total=self.data.length(), enabled=shown):
                total += self.product(batch, v)
            if shared:
                all_sum([total])
        self.passes += 1
        return total


class ColumnOperator(SummedOperator):
    """Σ_n J_nᵀ Λ_n J_n with Λ, or random columns that stand for it, from the likelihood."""

    matrix: ClassVar[str]  # "gauss-newton" or "fisher"

    def __init__(
        self,
        function: Functional,
        data: Batches,
        likelihood: Likelihood,
        expectation: str = "exact",
        samples: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(function, data, likelihood)
        self.expectation = Expectation(likelihood, expectation, self.matrix, samples, seed)

    def product(self, batch: Batch, v: Tensor) -> Tensor:
        """A batch's part of the product: by Λ itself, or by columns that stand for it."""
        expectation = self.expectation

        def weighed(f: Tensor, t: Tensor, place: slice) -> Tensor:
            require_finite(f, batch.index, place.start)
            return self._weigh(f, t, expectation.targets(f, None if batch.y is None else batch.y[place]))

        def columns(f: Tensor) -> Tensor:
            require_finite(f, batch.index)
            return expectation.columns(f, expectation.targets(f, batch.y), batch.index)

        if expectation.kind == "exact":
            return weighted(self.function, batch.x, v, weighed)
        count = 1 if expectation.kind == "empirical" else expectation.samples
        return factored(self.function, batch.x, v, columns, count)

    @abstractmethod
    def _weigh(self, f: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        """Λ t at outputs f."""


class GaussNewtonOperator(ColumnOperator):
    """The Gauss-Newton matrix G = Σ_n J_nᵀ Λ_n J_n of a negative log-likelihood, summed over examples."""

    # Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent", 2002.

    description = "product with the Gauss-Newton matrix"
    matrix = "gauss-newton"

    def _weigh(self, f: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        return self.likelihood.product(f, t, y)


# -- hessian ---------------------------------------------------------------------------------------
# The Hessian of a negative log-likelihood in the parameters, as an operator.

SECOND = "second derivative"  # in the cache of a function: it was looked at


class HessianOperator(SummedOperator):
    """H = ∇²_θ Σ_n −log p(y_n | f(θ, x_n)): Gauss-Newton and the network's own curvature."""

    # It may be indefinite. A product differentiates the gradient along v: Pearlmutter, "Fast exact
    # multiplication by the Hessian", 1994; the gradient with its graph is shared by all vectors.

    description = "product with the Hessian"

    def product(self, batch: Batch, v: Tensor) -> Tensor:
        """∇(gᵀ v) over a batch, g = ∇ Σ −log p."""
        if batch.y is None:
            raise DataError(
                f"data has no targets, which the Hessian of {self.likelihood!r} needs",
                expected="(x, y) pairs",
                remedy="pass the targets, or take the Gauss-Newton matrix",
            )
        try:
            _probe(self.function, batch, self.likelihood)
            return _hessian_product(self.function, batch, self.likelihood, v)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            network = type(self.function.model).__name__
            raise ModelError(
                f"{network} has no usable second derivative in torch: {first_line(error)}",
                expected="operations that can be differentiated twice",
                remedy="take the Gauss-Newton matrix, which needs first derivatives alone",
            ) from error


def _probe(function: Functional, batch: Batch, likelihood: Likelihood) -> None:
    """Raise where torch's second derivative is not symmetric, hence wrong; tried once, on two examples."""
    # That of `torch.nn.utils.parametrizations.weight_norm` is such a one in torch 2.13.
    if SECOND in function.cache.others:
        return
    assert batch.y is not None
    few = slice(0, min(2, batch.size))
    part = Batch(batch.index, take(batch.x, few), batch.y[few])
    generator = torch.Generator().manual_seed(0)
    v = normal((function.space.dim, 2), generator, function.dtype, function.device)
    # ⟨u, H w⟩ and ⟨w, H u⟩, term by term
    terms = v.double().flip(1) * _hessian_product(function, part, likelihood, v).double()
    difference, size = (terms[:, 0].sum() - terms[:, 1].sum()).abs(), torch.linalg.vector_norm(terms)
    if difference > (1e-6 if function.dtype == torch.float64 else 1e-2) * size:
        raise RuntimeError("the second derivative of one of its operations is wrong: it is not symmetric")
    function.cache.others[SECOND] = True


@in_exact_mode
def _hessian_product(function: Functional, batch: Batch, likelihood: Likelihood, v: Tensor) -> Tensor:
    """One gradient with its graph, then one backward pass through it for each vector."""
    leaves = {name: t.detach().requires_grad_() for name, t in function.theta.items()}
    inputs = list(leaves.values())
    with torch.enable_grad(), differentiable_kernels(function.recurrent):
        f = function(leaves, batch.x)
        require_finite(f, batch.index)
        assert batch.y is not None
        loss = likelihood.nll(f, batch.y).sum()
        if not loss.requires_grad:  # the outputs depend on no parameter
            require_history(function, batch.x)
            return torch.zeros_like(v)
        found = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        used = [(g, name) for g, name in zip(found, leaves, strict=True) if g is not None and g.requires_grad]
        if not used:  # linear in every parameter
            return torch.zeros_like(v)
        if SECOND not in function.cache.others:
            _require_second(used)
        return torch.stack([_along(function, inputs, used, v[:, k]) for k in range(v.shape[1])], 1)


def _along(
    function: Functional, inputs: Sequence[Tensor], gradient: list[tuple[Tensor, str]], v: Tensor
) -> Tensor:
    """∇(gᵀ v) for one vector, flat."""
    named = function.space.to_params(v)
    second = torch.autograd.grad(
        [g for g, _ in gradient],
        inputs,
        [named[name] for _, name in gradient],
        retain_graph=True,
        allow_unused=True,
    )
    return side_by_side(second, inputs)


def _require_second(gradient: list[tuple[Tensor, str]]) -> None:
    """Raise if an operation of the gradient refuses to be differentiated: torch leaves it out silently."""
    waiting = [g.grad_fn for g, _ in gradient]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("an operation is marked as differentiable once (once_differentiable)")
        waiting.extend(following for following, _ in node.next_functions)


# -- fisher ----------------------------------------------------------------------------------------
# Fisher matrices as operators: exact, sampled, empirical, and by finite differences.

PROBED = 8  # examples from which the length of a difference is found


class FisherOperator(ColumnOperator):
    """The Fisher matrix F = Σ_n E[s sᵀ] of the scores s = Jᵀ ∇_f log p(y | f), summed over examples."""

    # "exact" takes the expectation over the model's own labels in closed form, "mc" over labels drawn from
    # it, once for all products, and "empirical" takes the observed labels instead. The empirical Fisher is
    # another matrix: Kunstner, Balles, Hennig, "Limitations of the empirical Fisher approximation for natural
    # gradient descent", 2019.

    description = "product with the Fisher matrix"
    matrix = "fisher"

    def _weigh(self, f: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        if self.likelihood.canonical:  # the Fisher information of the outputs is Λ
            return self.likelihood.product(f, t, y)
        return _outer_products(self.likelihood.fisher_root(f, y), t)


class FiniteDifferenceFisher(SummedOperator):
    """The Fisher matrix by the directional derivative of the gradient of KL(p_θ ‖ p_θ'), by differences."""

    # Maddox, Tang, Moreno, Wilson, Damianou, "Fast adaptation with linearized neural networks", 2021, section
    # 3.2 and appendix C.2. The divergence has its minimum, zero, at θ' = θ, and its Hessian there is F, so
    # that
    #
    #     F v ≈ [∇_θ' KL(p_θ ‖ p_{θ+εu}) − ∇_θ' KL(p_θ ‖ p_{θ−εu})] ‖v‖ / (2 ε),   u = v / ‖v‖.
    #
    # It needs first derivatives alone: two gradients a product. Its relative error is about 1e-8 in float64
    # and 3e-4 in float32, or 2e-3 for a network with kinks. `FisherOperator` is exact.

    description = "product with the Fisher matrix by finite differences"

    def __init__(self, function: Functional, data: Batches, likelihood: Likelihood) -> None:
        super().__init__(function, data, likelihood)
        tied = [name for name, (_, shared) in function.padding.items() if shared]
        if tied:
            raise ModelError(
                f"{tied[0]} has a padding row and is the table of another layer too",
                expected="padding rows used for nothing else: a difference cannot hold half of a use",
                remedy="take FisherOperator, which differentiates",
            )
        self.step: float = torch.finfo(function.dtype).eps ** 0.5 / 3

    def product(self, batch: Batch, v: Tensor) -> Tensor:
        """The difference of two gradients over a batch, one vector after the other."""
        with torch.no_grad():
            f = _outputs(self.function, self.function.theta, batch.x)
        require_finite(f, batch.index)
        # Λ may need labels, this matrix does not: they only say which positions count
        y = None if batch.y is None else self.likelihood.check(f, batch.y)
        return torch.stack([self._column(batch, f, y, v[:, k]) for k in range(v.shape[1])], 1)

    def _column(self, batch: Batch, f: Tensor, y: Tensor | None, v: Tensor) -> Tensor:
        """F v over a batch for one vector."""
        v = held_fixed(self.function, v)
        length = torch.linalg.vector_norm(v)
        if not length > 0:
            return torch.zeros_like(v)
        direction = v / length
        epsilon = self._step_size(batch, f, direction)
        change = self._gradient(batch, f, y, epsilon * direction)
        change = change - self._gradient(batch, f, y, -epsilon * direction)
        scaled: Tensor = change * (length / (2 * epsilon))
        return scaled

    @torch.no_grad()
    def _step_size(self, batch: Batch, f: Tensor, direction: Tensor) -> float:
        """ε that moves the outputs by the fraction ``step`` of their size, from a few examples."""
        # Rounding costs u/κ of the product, where κ is how far the outputs move for their size, and the
        # third derivative κ². They would balance at κ = ∛u, but a network with kinks (ReLU, max-pooling)
        # also loses those of its units whose kink lies within the step: a share of about κ, whose parts
        # add up at random, so √κ over the root of the number of examples. √u / 3 serves both, for directions
        # that hardly move the outputs and for the stiffest, which a step in units of ‖θ‖ alone does not.
        theta = self.function.theta
        norm = float(torch.stack([t.double().square().sum() for t in theta.values()]).sum().sqrt()) or 1.0
        first = self.step * norm
        moved = self.function.space.to_params(first * direction)
        few = slice(0, min(PROBED, batch.size))
        g = _outputs(self.function, {name: t + moved[name] for name, t in theta.items()}, take(batch.x, few))
        motion = root_mean_square(g.double() - f[few].double())
        size = root_mean_square(f[few]) or 1.0
        longest: float = norm * torch.finfo(f.dtype).eps ** (
            1 / 3
        )  # for directions that hardly move the outputs
        return min(longest, first * self.step * size / motion) if motion > 0 else longest

    def _gradient(self, batch: Batch, f: Tensor, y: Tensor | None, step: Tensor) -> Tensor:
        """∇_θ' Σ_n KL(p_θ ‖ p_θ') at θ' = θ + step, flat."""
        moved = self.function.space.to_params(step)
        leaves = {name: (t + moved[name]).requires_grad_() for name, t in self.function.theta.items()}
        with torch.enable_grad():
            g = _outputs(self.function, leaves, batch.x)
            # in float64, since the gradient is a small difference of probabilities
            divergence = self.likelihood.kl(f.double(), g.double(), y).sum()
        if not divergence.requires_grad:  # the outputs depend on no parameter
            return torch.zeros_like(step)
        grads = torch.autograd.grad(divergence, list(leaves.values()), allow_unused=True)
        return side_by_side(grads, leaves.values())


@in_exact_mode
def _outputs(function: Functional, params: Params, x: Inputs) -> Tensor:
    """f(θ, x) in the network's own shape."""
    with differentiable_kernels(function.recurrent):
        value = function(params, x)
    return value


def held_fixed(function: Functional, v: Tensor) -> Tensor:
    """The vector without its part in padding rows of embeddings, which have no gradient."""
    if not function.padding:
        return v
    held = v.clone()
    for name, (row, _) in function.padding.items():
        held[function.space.slices[name]].view(function.space.shapes[name])[row] = 0
    return held


def root_mean_square(t: Tensor) -> float:
    """√ of the mean of squares."""
    return float(t.double().square().mean().sqrt())
