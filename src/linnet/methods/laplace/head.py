"""Outputs of a posterior over the last linear layer: no derivatives, so that many classes cost little.

For f = W φ(x) + b the gradient of output k in [W b] is e_k φ̂ᵀ. With M = (Q_L ⊗ Q_R) diag(λ) (Q_L ⊗ Q_R)ᵀ

    Cov[f] = Q_L diag(w) Q_Lᵀ,  w_c = Σ_d λ_cd (Q_Rᵀ φ̂)_d²

which takes one forward pass, and C numbers an example for the variances.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.layers import Layer, layer_factors
from linnet.curvatures.parts import Part
from linnet.linalg.kronecker import KroneckerEigen
from linnet.linalg.structured import Diagonal
from linnet.tangent.batch import Inputs, split, take
from linnet.tangent.capture import capture
from linnet.tangent.functional import Functional

BLOCK = 256  # examples at once


def head_moments(covariance: Curvature, x: Inputs, diagonal: bool) -> tuple[Tensor, Tensor] | None:
    """Mean and covariance of the outputs, where all weights that vary are those of the last linear layer.

    Args:
        covariance: M.
        x: N examples, on the network's device.
        diagonal: Whether only the variances are wanted.

    Returns:
        (N, C), and (N, C, C) or (N, C); None where the network or the structure is another.
    """
    if len(covariance.parts) != 1 or not _is_head(covariance.function, covariance.parts[0], x):
        return None
    part, function = covariance.parts[0], covariance.function
    weights = part.layer.join([function.theta[name] for name in part.layer.names])[0]
    means, spreads = [], []
    for block in split(x, BLOCK):
        captured = capture(function, block, "sum")
        a = layer_factors(captured, part.layer)[0].a[:, 0, 0]
        a = F.pad(a, (0, 1), value=1.0) if part.layer.biased else a
        if not torch.allclose(a @ weights.T, captured.outputs, rtol=1e-3, atol=1e-3):
            return None  # on these examples the outputs are not the layer's
        means.append(captured.outputs)
        spreads.append(_spread(part, a, diagonal))
    return torch.cat(means), torch.cat(spreads)


def _spread(part: Part, a: Tensor, diagonal: bool) -> Tensor:
    """Cov[f] from φ̂ (N, d), or its diagonal."""
    operator, layer = part.operator, part.layer
    if isinstance(operator, Diagonal):
        sizes = [torch.Size(shape).numel() for shape in layer.shapes]
        pieces = operator.values.split(sizes)
        shaped = [v.reshape(shape) for v, shape in zip(pieces, layer.shapes, strict=True)]
        variance = a.to(operator.dtype).square() @ layer.join(shaped)[0].T
        return variance if diagonal else torch.diag_embed(variance)
    assert isinstance(operator, KroneckerEigen), "_is_head lets no other through"
    weight = (a.to(operator.dtype) @ operator.right_vectors).square() @ operator.values.T  # w, (N, C)
    left = operator.left_vectors
    if diagonal:
        return weight @ left.square().T
    spread = (left * weight[:, None]) @ left.T
    return (spread + spread.mT) / 2


def _is_head(function: Functional, part: Part, x: Inputs) -> bool:
    """Whether the outputs are those of one plain linear layer, with a covariance of a known form."""
    layer, operator = part.layer, part.operator
    plain = layer.factored and layer.why == "linear" and layer.form.uses == layer.form.positions == 1
    known = isinstance(operator, Diagonal) or (part.joined and isinstance(operator, KroneckerEigen))
    if not plain or not known or layer.groups > 1 or layer.transposed:
        return False
    key = f"outputs of {layer.name}"
    if key not in function.cache:
        function.cache[key] = _passes_on(function, layer, x)
    found: bool = function.cache[key]
    return found


def _passes_on(function: Functional, layer: Layer, x: Inputs) -> bool:
    """Whether the gradient of output k at the layer is e_k: nothing follows it."""
    captured = capture(function, take(x, slice(0, 1)))
    used = layer_factors(captured, layer)
    if len(used) != 1 or used[0].g.shape[-1] != captured.k:
        return False
    g = used[0].g[:, 0, 0, 0]
    return torch.equal(g, torch.eye(captured.k, dtype=g.dtype, device=g.device))
