"""Outputs of a posterior over the last linear layer, from features alone.

For f = W φ(x) + b the gradient of output k in [W b] is e_k φ̂ᵀ. With M = (Q_L ⊗ Q_R) diag(λ) (Q_L ⊗ Q_R)ᵀ

    Cov[f] = Q_L diag(w) Q_Lᵀ,  w_c = Σ_d λ_cd (Q_Rᵀ φ̂)_d²

which takes one forward pass, and C numbers an example for the variances, at every position where the layer
has several, such as tokens. Covariances are formed for a few examples at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.output_layer import output_inputs
from linnet.curvatures.parts import Part
from linnet.linalg.kronecker import HalfDiagonal, KroneckerEigen
from linnet.linalg.structured import Diagonal
from linnet.tangent.batch import Inputs, split, take
from linnet.tangent.capture import capture
from linnet.tangent.trace import forward_trace, trace

EIGEN = (KroneckerEigen, HalfDiagonal)  # blocks in an eigenbasis
BLOCK = 128  # examples at once
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
    known = isinstance(operator, Diagonal) or (part.joined and isinstance(operator, EIGEN))
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
    assert isinstance(operator, EIGEN), "is_head lets no other through"
    left, right, a = operator.left_vectors, operator.right_vectors, a.to(operator.dtype)
    weight = (a if right is None else a @ right).square() @ operator.values.T  # w, (N, C)
    if left is None:
        return weight if diagonal else torch.diag_embed(weight)
    if diagonal:
        return weight @ left.square().T
    spread = (left * weight[:, None]) @ left.T
    return (spread + spread.mT) / 2
