"""A saved nested fit, on the network that was adapted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linnet import tree
from linnet.errors import FileFormatError
from linnet.fitting.last_layer import Appended
from linnet.linear.dual import DualSystem
from linnet.nested.features import Prior, RandomHeads
from linnet.nested.nested_fit import NestedFit, system_of
from linnet.tangent.batch import KnownInputs
from linnet.tangent.functional import OutputAdapter, copied
from linnet.tangent.matching import given_network, require_same_outputs, require_weights, saved_output

OTHER = ("made on", "the network that was adapted", "load the same checkpoint into the same network first")


def restored_nested(
    saved: dict[str, Any], path: Path, model: nn.Module, output: OutputAdapter = None
) -> NestedFit:
    """The fit that ``NestedFit.save`` wrote."""
    model, known, record = given_network(model), saved["network"], saved["record"]
    part = saved_output(known, output)
    if (known["appended"] is not None or part is not None) and not isinstance(model, Appended):
        model = Appended(model, known["appended"], part)
    if isinstance(model, Appended):
        model.idle = known["idle"]
    network, trained = _with(model, saved["trained"]), bool(saved["trained"])
    features = RandomHeads(network, known["heads"], known["seed"], known["parameters"], trained=trained)
    require_weights(features.function, known, path, OTHER)
    moved = tree.map_tensors(lambda t: t.to(features.function.device), saved)
    x, targets, phi = moved["x"], moved["targets"], moved["phi"]
    features.function.known = KnownInputs.of(x, record.columns)
    prior = Prior(features, moved["center"], saved["mixture"])
    require_same_outputs(lambda part: features.phi(part) - prior.center, x, phi, path, OTHER)
    dual = DualSystem(moved["kernel"], targets.values, saved["ridge"], beta=moved["beta"])
    fit = NestedFit(prior, targets, system_of(prior, (x, phi), dual), record)
    fit.held_out, fit.rungs = moved["held_out"], saved["rungs"]
    fit.calibrate(**saved["calibration"])
    return fit


def _with(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of a network with other weights; the network itself where there are none."""
    if not weights:
        return model
    clone = copied(model)
    own = dict(clone.named_parameters())
    for name, value in weights.items():
        if name not in own or own[name].shape != value.shape:
            raise FileFormatError(
                f"the fit was made on a network with a parameter {name} of shape {tuple(value.shape)}",
                expected="the network that was adapted",
                remedy="pass the network as it was when it was adapted",
            )
        with torch.no_grad():
            own[name].copy_(value)
    return clone
