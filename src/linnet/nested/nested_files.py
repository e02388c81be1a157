"""Files of a nested fit: solution, training samples and, if they were trained, weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from linnet.files import save_tensors
from linnet.fitting.last_layer import Appended
from linnet.nested.features import Prior
from linnet.tangent.batch import Inputs, flatten_inputs
from linnet.tangent.functional import IDLE

KIND = "nested-fit"
TRAINED = "trained."  # start of the names of trained weights


def write_nested(
    directory: str | Path, prior: Prior, x: Inputs, tensors: Mapping[str, Tensor], told: Mapping[str, Any]
) -> Path:
    """Write a fit to a folder, atomically."""
    inputs, layout = flatten_inputs(x)
    features = prior.network
    appended, output = None, None
    if isinstance(features.model, Appended):
        appended, output = features.model.width, features.model.output
    tensors = inputs | dict(tensors) | {"center": prior.center}
    if features.trained:
        weights = dict(features.model.named_parameters())
        tensors |= {f"{TRAINED}{name}": weights[name].detach() for name in features.function.names}
    metadata = {
        "weights": features.function.fingerprint(),
        "parameters": list(features.function.names),
        "heads": features.heads,
        "appended": appended,
        "idle": getattr(features.model, IDLE, None),
        "output": output if isinstance(output, str) else None,
        "custom_output": callable(output),
        "seed": features.seed,
        "inputs": layout,
        "mixture": asdict(prior.mixture),
        **told,
    }
    return save_tensors(directory, KIND, {k: t.contiguous() for k, t in tensors.items()}, metadata)
