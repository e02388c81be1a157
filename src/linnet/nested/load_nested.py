"""Loads a nested fit from its file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from linnet.errors import FileFormatError
from linnet.files import as_path, load_tensors
from linnet.fitting.arguments import Record
from linnet.fitting.last_layer import Appended
from linnet.linear.dual import DualSystem
from linnet.linear.targets import Targets
from linnet.nested.features import Prior, RandomHeads
from linnet.nested.nested_files import KIND, TRAINED
from linnet.nested.nested_fit import NestedFit, system_of
from linnet.nested.search import Mixture, Rung
from linnet.tangent.batch import KnownInputs, unflatten_inputs
from linnet.tangent.functional import OutputAdapter, copied
from linnet.tangent.matching import given_network, require_same_outputs, require_weights, saved_output

OTHER = ("made on", "the network that was adapted", "load the same checkpoint into the same network first")


def read_nested(directory: str | Path, model: nn.Module, output: OutputAdapter = None) -> NestedFit:
    """Read a fit."""
    path = as_path(directory)
    path = path / f"{KIND}.safetensors" if path.is_dir() or not path.suffix else path
    model = given_network(model)
    tensors, metadata = load_tensors(path, KIND)
    names, trained = metadata["parameters"], {}
    for key in [key for key in tensors if key.startswith(TRAINED)]:
        trained[key.removeprefix(TRAINED)] = tensors.pop(key)
    width, part = metadata.get("appended"), saved_output(metadata, output)
    if (width is not None or part is not None) and not isinstance(model, Appended):
        model = Appended(model, width, part)
    if isinstance(model, Appended):  # older files hash what the outputs do not depend on, too
        model.idle = metadata.get("idle")
    network = _with(model, trained)
    features = RandomHeads(network, metadata["heads"], metadata["seed"], names, trained=bool(trained))
    require_weights(features.function, metadata, path, OTHER)
    device = features.function.device
    tensors = {name: t.to(device) for name, t in tensors.items()}
    x = unflatten_inputs(tensors, metadata["inputs"])
    targets = Targets(tensors["targets"], metadata["classes"], metadata["scale"])
    record = Record.read(metadata["record"])
    features.function.known = KnownInputs.of(x, record.columns)
    prior = Prior(features, tensors["center"], Mixture(**metadata["mixture"]))
    require_same_outputs(lambda part: features.phi(part) - prior.center, x, tensors["phi"], path, OTHER)
    dual = DualSystem(tensors["kernel"], targets.values, metadata["ridge"], beta=tensors["beta"])
    fit = NestedFit(prior, targets, system_of(prior, (x, tensors["phi"]), dual), record)
    fit.held_out = tensors.get("held_out")
    fit.rungs = tuple(Rung(**rung) for rung in metadata.get("rungs", ()))
    fit.calibrate(**metadata.get("calibration", {}))
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
