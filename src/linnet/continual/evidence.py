"""Log evidence of a new task under the posterior of the previous tasks, to choose the strength."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from linnet.continual.curvature import Recipe
from linnet.continual.method import Prepare
from linnet.continual.parameters import Live, same_random_state
from linnet.continual.precision import Precision
from linnet.continual.quadratic import Quadratic, value_and_gradient
from linnet.curvatures.stream import Batches, held
from linnet.distributed import Share, collective, sum_numbers
from linnet.errors import DataError, ModelError
from linnet.tangent.functional import OutputAdapter


@torch.no_grad()
def log_evidence(
    recipe: Recipe,
    model: nn.Module,
    quadratics: Sequence[Quadratic],
    precision: Precision,
    merge: str,
    data: Any,
    output: OutputAdapter = None,
    prepare: Prepare | None = None,
) -> float:
    """The log probability of a task given those before, by Laplace's method at the current parameters."""
    # log p(D_{t+1} | D_{1:t}) ≈ log p(D_{t+1} | θ) − ½ δᵀ Λ_t δ + ½ log det Λ_t − ½ log det (G_{t+1} + Λ_t)
    #
    # Source: Botev 2020, eq. 5.18 and section 5.1; MacKay 1992.
    if precision.prior <= 0:
        raise ModelError(
            "the evidence of a model with prior_precision=0",
            expected="a proper prior",
            remedy="pass a positive prior_precision",
        )
    network, own = recipe.network(model, output, prepare)
    function = recipe.function(network, own)
    device, nll = next(iter(Live.of(model).tensors.values())).device, 0.0
    share = Share.of(recipe.passes.shard)
    with collective("the likelihood of a task", share.world > 1), same_random_state(data):
        data = held(data, recipe.passes.memory)
        for batch in Batches(data, device, recipe.passes.block, share):
            if batch.y is None:
                raise DataError("data have no targets", expected="(x, y) pairs", remedy="pass (x, y)")
            f = function(batch.x)
            nll += float(recipe.likelihood.nll(f, recipe.likelihood.check(f, batch.y)).double().sum())
        if share.world > 1:
            nll = sum_numbers([nll])[0]
    task = recipe.task(model, data, output, prepare)
    before = precision.to(task.device, task.dtype)
    after = before.plus(task.blocks, merge)
    distance = float(value_and_gradient(quadratics, Live.of(model))[0])
    fresh = sum(b.layer.size for b in after.blocks) - sum(b.layer.size for b in before.blocks)
    gained = _logdet(after) - _logdet(before) - fresh * math.log(precision.prior)
    return -nll - distance - 0.5 * gained


def _logdet(precision: Precision) -> float:
    """Σ log det of the blocks, the prior included."""
    return sum(float(part.operator.logdet()) for part in precision.parts())
