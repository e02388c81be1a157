"""Output distributions from a Gaussian over the weights: moments, joint moments, gradients, samples.

With outputs f(x) + J(x)(θ − θ*) and weights N(θ*, M), outputs are N(f(x), J M Jᵀ). Blocks of examples keep
what is held small, and no Jacobian is formed. The derivative of the covariance in x is that of ⟨W, J M Jᵀ⟩
for the cotangent W that autograd brings: with V = M Jᵀ (W + Wᵀ) held fixed, one for each example, it is the
derivative of Σ_c ⟨∂f_c/∂θ(x), V_c⟩, one double backward pass an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.accumulate import output_inputs
from linnet.curvatures.curvature import Curvature
from linnet.curvatures.layers import Part
from linnet.curvatures.variance import (
    MOST,
    WITHOUT,
    batch_covariance,
    captured_blocks,
    half_rows,
    variance_blocks,
)
from linnet.likelihoods.discrete import Categorical
from linnet.linalg.kronecker import KroneckerEigen
from linnet.linalg.random import make_generator
from linnet.linalg.structured import Diagonal
from linnet.memory import Plan, parse_bytes, require
from linnet.params import flag
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.sampled import Labels, class_probabilities
from linnet.tangent.batch import Inputs, batch_size, check_finite, split, take
from linnet.tangent.capture import capture, capture_bytes
from linnet.tangent.functional import Functional
from linnet.tangent.jacobian import vjp_columns
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.nonfinite import require_finite_products
from linnet.tangent.parts import in_parts
from linnet.tangent.rules import Captured
from linnet.tangent.trace import forward_trace, trace
from linnet.tree import map_tensors, tensors_in

# -- head ------------------------------------------------------------------------------------------
#
# Outputs of a posterior over the last linear layer, from features alone.
#
# For f = W φ(x) + b the gradient of output k in [W b] is e_k φ̂ᵀ. With M = (Q_L ⊗ Q_R) diag(λ) (Q_L ⊗
# Q_R)ᵀ
#
#     Cov[f] = Q_L diag(w) Q_Lᵀ,  w_c = Σ_d λ_cd (Q_Rᵀ φ̂)_d²
#
# which takes one forward pass, and C numbers an example for the variances, at every position where the
# layer has several, such as tokens. Covariances are formed for a few examples at a time.

BLOCK = 128  # examples at once
RUN = 256  # examples at once under drawn weights
FORMED = 1 << 21  # numbers in the covariances that are formed at once


def is_head(covariance: Curvature, x: Inputs, positions: bool = False) -> bool:
    """Whether all weights that vary are those of a linear layer whose result is the output."""
    if len(covariance.parts) != 1:
        return False
    part, function = covariance.parts[0], covariance.function
    function.output_shape(x)  # raises where the network cannot run on x
    layer, operator = part.layer, part.operator
    once = layer.form.uses == 1 and (positions or layer.form.positions == 1)
    plain = layer.factored and layer.why == "linear" and once
    known = isinstance(operator, Diagonal) or (part.joined and isinstance(operator, KroneckerEigen))
    if not plain or not known or layer.groups > 1 or layer.transposed:
        return False
    key = f"outputs of {layer.name}"
    if key not in function.cache.others:
        few = take(x, slice(0, 1))
        capture(function, few, "sum")  # raises where the outputs of examples depend on each other
        function.cache.others[key] = output_inputs(trace(function, few), layer.names) is not None
    found: bool = function.cache.others[key]
    return found


def head_variances(covariance: Curvature, x: Inputs) -> tuple[Tensor, Tensor] | None:
    """Means and variances of the outputs."""
    means, variances = [], []
    for block in split(x, BLOCK):
        own = _outputs(covariance, block)
        if own is None:
            return None
        means.append(own[0])
        variances.append(_spread(covariance.parts[0], own[1], diagonal=True).view(own[0].shape))
    return torch.cat(means), torch.cat(variances)


def head_spreads(covariance: Curvature, block: Inputs) -> Iterator[tuple[Tensor, Tensor]] | None:
    """Means and covariances of the outputs, a few examples after the other."""
    own = _outputs(covariance, block)
    if own is None:
        return None
    mean, a = own
    size = max(1, FORMED // mean.shape[1] ** 2)
    parts = zip(mean.split(size), a.split(size), strict=True)
    return ((m, _spread(covariance.parts[0], some, diagonal=False)) for m, some in parts)


def _outputs(covariance: Curvature, block: Inputs) -> tuple[Tensor, Tensor] | None:
    """Outputs (n, T·C) and φ̂ (n·T, d) of a block, T positions of an example one after another."""
    layer, run = covariance.parts[0].layer, forward_trace(covariance.function, block)
    a = output_inputs(run, layer.names)
    if a is None:
        return None
    return run.outputs.detach(), layer.homogeneous(a.flatten(0, -2))


def _spread(part: Part, a: Tensor, diagonal: bool) -> Tensor:
    """Cov[f] from φ̂ (N, d), or its diagonal."""
    operator, layer = part.operator, part.layer
    if isinstance(operator, Diagonal):
        sizes = [torch.Size(shape).numel() for shape in layer.shapes]
        pieces = operator.values.split(sizes)
        shaped = [v.reshape(shape) for v, shape in zip(pieces, layer.shapes, strict=True)]
        variance = a.to(operator.dtype).square() @ layer.join(shaped)[0].T
        return variance if diagonal else torch.diag_embed(variance)
    assert isinstance(operator, KroneckerEigen), "is_head lets no other through"
    left, right, a = operator.left_vectors, operator.right_vectors, a.to(operator.dtype)
    weight = (a if right is None else a @ right).square() @ operator.values.T  # w, (N, C)
    if left is None:
        return weight if diagonal else torch.diag_embed(weight)
    if diagonal:
        return weight @ left.square().T
    spread = (left * weight[:, None]) @ left.T
    return (spread + spread.mT) / 2


SAMPLED = 1 << 26  # numbers in the weights that are drawn at once

Moments = tuple[Tensor, Tensor]


def moments(
    covariance: Curvature, x: Inputs, memory: str | int | None = None, diagonal: bool = False
) -> Moments:
    """Mean and covariance of the outputs of each example, (N, C)."""
    check_finite(x, "x")
    x, function, n = without_graph(x), covariance.function, batch_size(x)
    if diagonal:
        alone = head_variances(covariance, x) if is_head(covariance, x, positions=True) else None
        return _of_one_type(*(alone or _variances(covariance, x, memory)))
    c = function.output_shape(x).numel()
    means, spreads, start = torch.empty(0), torch.empty(0), 0
    for found in spread_blocks(covariance, x, memory, n * c * c):
        if start == 0:  # what is kept has passed the budget
            means, spreads = (t.new_empty(n, *t.shape[1:]) for t in found)
        some = slice(start, start + len(found[0]))
        means[some], spreads[some] = found
        start += len(found[0])
    require_finite_products(function, x, spreads)
    return means, spreads


def _variances(covariance: Curvature, x: Inputs, memory: str | int | None) -> Moments:
    """Mean and variances of the outputs, without a covariance between them."""
    blocks = list(variance_blocks(covariance.function, covariance.parts, x, memory))
    means, variances = (torch.cat(column) for column in zip(*blocks, strict=True))
    return means, variances


def spread_blocks(
    covariance: Curvature, x: Inputs, memory: str | int | None = None, kept: int = 0
) -> Iterator[Moments]:
    """Mean and covariance of the outputs of a few examples after the other."""
    x, function, parts = without_graph(x), covariance.function, covariance.parts
    if not is_head(covariance, x):
        for captured in captured_blocks(function, parts, x, memory, kept):
            yield _of_one_type(captured.outputs, batch_covariance(parts, captured))
        return
    c = function.output_shape(x).numel()
    budget, item = parse_bytes(memory, function.device), covariance.dtype.itemsize
    items = (("result", kept * item), ("covariances of one example", 4 * c * c * item))
    plan = Plan(f"output covariance of {batch_size(x)} examples x {c} outputs", budget, items)
    require(plan, WITHOUT)
    for block in split(x, BLOCK):
        own = head_spreads(covariance, block)
        if own is None:  # something follows the layer on these examples
            blocks = captured_blocks(function, parts, block, memory, kept)
            own = ((captured.outputs, batch_covariance(parts, captured)) for captured in blocks)
        yield from (_of_one_type(*found) for found in own)


def _of_one_type(mean: Tensor, spread: Tensor) -> Moments:
    """Means in the type of the spreads, which is wider where the network's is half of one."""
    return mean.to(spread.dtype), spread


def joint_covariance(covariance: Curvature, x: Inputs, memory: str | int | None = None) -> Tensor:
    """J M Jᵀ between all examples, (N, C, N, C)."""
    # Tiles of examples: the half rows J S, with M = S Sᵀ, of one layer and two tiles at a time.
    function, parts, n = covariance.function, covariance.parts, batch_size(x)
    x = without_graph(x)
    check_finite(x, "x")
    c = function.check_runs(take(x, slice(0, 1))).numel()
    budget, item = parse_bytes(memory, function.device), covariance.dtype.itemsize
    one = 2 * capture_bytes(function, x, c) + 4 * max(part.layer.size for part in parts) * c * item
    items = (("result", n * n * c * c * item), ("two tiles of one example", one))
    plan = Plan(f"joint covariance of {n} examples x {c} outputs", budget, items)
    require(plan, ["raise memory=", "use fewer examples"])
    size = max(1, min(MOST, (budget - items[0][1]) // (2 * one)))
    out = torch.zeros(n, c, n, c, dtype=covariance.dtype, device=function.device)
    starts = range(0, n, size)
    for i in starts:
        rows = capture(function, take(x, slice(i, i + size)))
        for j in (start for start in starts if start >= i):
            columns = rows if i == j else capture(function, take(x, slice(j, j + size)))
            tile = _tile(parts, rows, columns)
            tile = (tile + tile.permute(2, 3, 0, 1)) / 2 if i == j else tile
            out[i : i + size, :, j : j + size] = tile
            if j > i:
                out[j : j + size, :, i : i + size] = tile.permute(2, 3, 0, 1)
    require_finite_products(function, x, out)
    return out


def _tile(parts: Sequence[Part], rows: Captured, columns: Captured) -> Tensor:
    """J M Jᵀ between two batches, (N, C, M, C)."""
    total: Tensor | None = None
    for part in parts:
        left = half_rows(part, rows)
        right = left if columns is rows else half_rows(part, columns)
        total = left @ right.T if total is None else total + left @ right.T
    assert total is not None, "a posterior has at least one block"
    return total.view(rows.n, rows.k, columns.n, columns.k)


def differentiable_moments(
    covariance: Curvature, x: Inputs, joint: bool, memory: str | int | None
) -> Moments:
    """Mean and covariance with gradients in x, exact, of first order, (N, C)."""
    function = covariance.function
    mean = _exact(function, function.theta, x)
    apply: Callable[..., Tensor] = _Spread.apply
    spread = apply(covariance, x, joint, memory, *_tracked(x))
    return mean, spread


def plain_outputs(function: Functional, x: Inputs) -> Tensor:
    """f(θ*, x) without gradients, (N, C)."""
    return in_parts(function.model, lambda part: function.check_runs(part).flatten(1), without_graph(x), MOST)


def without_graph(x: Inputs) -> Inputs:
    """Examples without a graph."""
    return map_tensors(lambda t: t.detach(), x)


def requires_gradient(x: Inputs) -> bool:
    """Whether predictions are to be differentiated in x."""
    return torch.is_grad_enabled() and bool(_tracked(x))


def _tracked(x: Inputs) -> list[Tensor]:
    """The tensors in x that require gradients."""
    return [t for t in tensors_in(x) if t.requires_grad]


@in_exact_mode
def _exact(function: Functional, theta: dict[str, Tensor], x: Inputs) -> Tensor:
    """f(θ, x), (N, C), with whatever graph x has."""
    with torch.enable_grad():
        return function.flat(theta, x)


class _Spread(torch.autograd.Function):
    """J M Jᵀ, and its derivative in x one example after the other."""

    @staticmethod
    def forward(
        ctx: Any, covariance: Curvature, x: Inputs, joint: bool, memory: str | int | None, *tracked: Tensor
    ) -> Tensor:
        """The covariance."""
        plain = map_tensors(lambda t: t.detach(), x)
        ctx.covariance, ctx.x, ctx.joint = covariance, plain, joint
        ctx.flags = [t.requires_grad for t in tensors_in(x)]
        return joint_covariance(covariance, plain, memory) if joint else moments(covariance, plain, memory)[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:
        """⟨W, d(J M Jᵀ)⟩ of each example."""
        covariance, function, n = ctx.covariance, ctx.covariance.function, batch_size(ctx.x)
        flags = iter(ctx.flags)
        x = map_tensors(lambda t: t.clone().requires_grad_(next(flags)), ctx.x)
        leaves = _tracked(x)
        totals = [torch.zeros_like(leaf) for leaf in leaves]
        for i in range(n):
            one, everything = slice(i, i + 1), slice(None) if ctx.joint else slice(i, i + 1)
            if ctx.joint:
                own = weight[i] + weight[:, :, i].permute(2, 0, 1)  # (C, N, C)
            else:
                own = (weight[i] + weight[i].T)[:, None]
            u = own.permute(1, 2, 0).to(function.dtype)
            pulled = vjp_columns(function, take(ctx.x, everything), u)  # Jᵀ(W + Wᵀ), (P, C)
            v = covariance.mm(pulled.to(covariance.dtype)).to(function.dtype)
            with torch.enable_grad():
                value = _contracted(function, take(x, one), function.space.to_params(v))
                found = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else ()
            for total, g in zip(totals, found, strict=False):
                if g is not None:
                    total += g
        return (None, None, None, None, *totals)


@in_exact_mode
def _contracted(function: Functional, x: Inputs, v: dict[str, Tensor]) -> Tensor:
    """Σ_c ⟨∂f_c/∂θ, V_c⟩ of one example, as a function of x."""
    with torch.enable_grad():
        leaves = {name: t.detach().requires_grad_() for name, t in function.theta.items()}
        outputs = function.flat(leaves, x)[0]
        total = outputs.new_zeros(())
        for c, value in enumerate(outputs.unbind(0)):
            grads = torch.autograd.grad(value, list(leaves.values()), create_graph=True, allow_unused=True)
            for name, g in zip(leaves, grads, strict=True):
                if g is not None and g.requires_grad:
                    total = total + (g * v[name][..., c]).sum()
    return total


def sampled_outputs(
    covariance: Curvature, x: Inputs, samples: int, generator: torch.Generator | int | None
) -> Tensor:
    """Outputs of networks whose weights are drawn from N(θ*, M), (S, N, C)."""
    drawn = _drawn(covariance, samples, make_generator(generator))
    return outputs_under(covariance.function, drawn, samples, x)


class Draws:
    """Displacements of the weights from N(0, M), the same whenever they are passed over."""

    # They are drawn once and kept, or, where S P numbers are too many for the memory, drawn again from the
    # same seed at every pass.

    def __init__(
        self, covariance: Curvature, samples: int, seed: int, memory: str | int | None = None
    ) -> None:
        self.covariance, self.samples, self.seed = covariance, samples, seed
        size = samples * covariance.shape[0] * covariance.dtype.itemsize
        self.kept = size <= parse_bytes(memory, covariance.function.device) // 4
        self._drawn: list[Tensor] = []

    def __iter__(self) -> Iterator[Tensor]:
        if self._drawn:
            yield from self._drawn
            return
        found = _drawn(self.covariance, self.samples, make_generator(self.seed))
        if self.kept:
            self._drawn = list(found)
            found = iter(self._drawn)
        yield from found


def outputs_under(function: Functional, draws: Iterable[Tensor], samples: int, x: Inputs) -> Tensor:
    """Outputs of networks with given weights, (S, N, C)."""
    check_finite(x, "x")
    c = function.check_runs(map_tensors(lambda t: t.detach(), take(x, slice(0, 1)))).numel()
    size = samples * batch_size(x) * c * function.dtype.itemsize
    plan = Plan(
        f"{samples} samples of the outputs of {batch_size(x)} examples",
        parse_bytes(None, function.device),
        (("result", size),),
    )
    require(plan, ["draw fewer samples=", "predict fewer examples at once"])
    theta = function.space.to_flat(function.theta)
    with torch.set_grad_enabled(requires_gradient(x)):
        return torch.cat(
            [torch.stack([_run(function, theta + row.to(theta), x) for row in drawn]) for drawn in draws]
        )


def _drawn(covariance: Curvature, samples: int, source: torch.Generator | None) -> Iterator[Tensor]:
    """Displacements of the weights, a few at once (S', P); how many depends on P alone."""
    at_once = max(1, min(16, SAMPLED // covariance.shape[0]))
    for start in range(0, samples, at_once):
        yield covariance.sample(min(at_once, samples - start), source)


def _run(function: Functional, weights: Tensor, x: Inputs) -> Tensor:
    """f(θ, x) with other weights, (N, C)."""
    params = function.space.to_params(weights)
    return torch.cat([function.flat(params, part) for part in split(x, RUN)])


# -- linearized ------------------------------------------------------------------------------------
# Predictions of the linearized network in bounded memory.

KEPT = 1 << 25  # numbers of a covariance (N, C, C) that a prediction keeps; beyond, variances alone
KEPT_OF_HEAD = 1 << 20  # the same for a last layer, whose variances need no covariance


def linearized(
    covariance: Curvature, x: Inputs, labels: Labels, joint: bool, memory: str | int | None
) -> GaussianPredictive:
    """Outputs N(f(x), J M Jᵀ) of the network linearized at θ*."""
    flag("joint", joint)
    if requires_gradient(x):
        mean, spread = differentiable_moments(covariance, x, joint, memory)
        return GaussianPredictive(mean, spread, labels, joint=joint)
    if joint:
        spread = joint_covariance(covariance, x, memory)
        mean, spread = _of_one_type(plain_outputs(covariance.function, x), spread)
        return GaussianPredictive(mean, spread, labels, joint=True)
    if _is_kept(covariance, x, batch_size(x) * torch.Size(labels.shape).numel() ** 2):
        return GaussianPredictive(*moments(covariance, x, memory), labels)
    return _wide(covariance, x, labels, memory)


def _is_kept(covariance: Curvature, x: Inputs, numbers: int) -> bool:
    """Whether covariances are formed and kept; those of a last layer are cheap to form when requested."""
    if not min(KEPT, KEPT_OF_HEAD) < numbers <= KEPT:
        return numbers <= KEPT
    check_finite(x, "x")
    return not is_head(covariance, without_graph(x))


def _wide(covariance: Curvature, x: Inputs, labels: Labels, memory: str | int | None) -> GaussianPredictive:
    """A prediction that keeps variances, and class probabilities where these need more."""
    likelihood = labels.likelihood

    def full() -> Tensor:
        return moments(covariance, x, memory)[1]

    if not (isinstance(likelihood, Categorical) and labels.needs_covariance):
        mean, variance = moments(covariance, x, memory, diagonal=True)
        return GaussianPredictive(mean, full, labels, variance=variance)
    found = []
    for mean, spread in spread_blocks(covariance, x, memory):
        p = class_probabilities(likelihood, mean, spread, labels.shape, labels.link)
        found.append((mean, spread.diagonal(dim1=1, dim2=2).clone(), p))
    mean, variance, probs = (torch.cat(column) for column in zip(*found, strict=True))
    return GaussianPredictive(mean, full, labels, variance=variance, probs=probs)
