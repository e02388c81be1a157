"""A saved tangent Gaussian process, on the network that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from linnet import tree
from linnet.fitting.saved import OTHER
from linnet.likelihoods import from_description
from linnet.linear.problem import Problem
from linnet.linear.saved import restored_system
from linnet.tangent.batch import batch_size
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.matching import given_network, matching_function, require_same_outputs
from linnet.tangent.modes import in_exact_mode
from linnet.tangent_gp.tangent_gp import TangentGP


@in_exact_mode
def restored_gp(
    saved: dict[str, Any], path: Path, model: nn.Module, output: OutputAdapter = None
) -> TangentGP:
    """The process that ``TangentGP.save`` wrote."""
    network, x = given_network(model), saved.pop("x")
    base = matching_function(network, saved["network"], output, path, OTHER)
    gp = TangentGP(
        network,
        from_description(saved["likelihood"]),
        prior_precision=saved["prior_precision"],
        noise_scale=saved["noise_scale"],
        **saved["options"],
        params=saved["network"]["parameters"],
        output=base.output,
    )
    moved = tree.map_tensors(lambda t: t.to(base.device), saved)
    residual, weights, y = (moved[key] for key in ("residual", "weights", "y"))
    problem = Problem(gp._observed.function, x, residual, weights, y)
    gp._restore(restored_system(problem, moved["solved"], gp._options.memory, gp._options.iteration))
    y = y.reshape(gp._observed.shape_of(x))
    require_same_outputs(
        lambda few: gp._observed.problem(few, y[: batch_size(few)]).residual, x, residual, path, OTHER
    )
    return gp
