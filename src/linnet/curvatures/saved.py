"""``linnet.load_curvature``: a saved curvature, on the network that it was computed for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from linnet.curvatures.curvature import KIND, Curvature, Provenance
from linnet.curvatures.layers import Form, Layer
from linnet.curvatures.parts import Part
from linnet.files import as_path, load_tensors
from linnet.linalg.stored import from_tensors
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.matching import given_network, matching_function, require_witness
from linnet.tangent.modes import in_exact_mode

_OTHER = (
    "computed for",
    "the same network with the same weights",
    "load the same checkpoint into the network first, or compute the curvature again",
)


@in_exact_mode
def load_curvature(directory: str | Path, model: nn.Module, output: OutputAdapter = None) -> Curvature:
    """Read a curvature that ``Curvature.save`` wrote.

    Args:
        directory: The folder, or the file in it that ``save`` returned.
        model: The network that it was computed for, with the same weights, or its linearization.
        output: The output adapter, if there was a callable one.

    Returns:
        The curvature, able to do all that it could before.

    Raises:
        FileFormatError: If the file is truncated, altered, not linnet's, or of another network.
        InputError: If there is no such file, or ``output`` is needed and not given.

    Example:
        >>> import linnet, tempfile, torch
        >>> net, folder = nn.Linear(2, 3), tempfile.mkdtemp()
        >>> data = torch.randn(5, 2), torch.randint(3, (5,))
        >>> G = linnet.curvature(net, data, linnet.likelihoods.Categorical())
        >>> _ = G.save(folder)
        >>> torch.equal(load_curvature(folder, net).dense(), G.dense())
        True
    """
    path = as_path(directory)
    path = path if path.is_file() else path / f"{KIND}.safetensors"
    tensors, metadata = load_tensors(path, KIND)
    model = given_network(model)
    function = matching_function(model, metadata, output, path, _OTHER)
    function.cache.probe = require_witness(
        function.check_runs, tensors, metadata.get("witness"), path, _OTHER
    )
    parts = tuple(
        _part(entry, {n: t.to(function.device) for n, t in _own(tensors, i).items()})
        for i, entry in enumerate(metadata["parts"])
    )
    return Curvature(parts, function, Provenance(**metadata["made"]), tuple(metadata["applied"]))


def _own(tensors: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """The tensors of one part."""
    prefix = f"{i}/"
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _part(entry: dict[str, Any], tensors: dict[str, Tensor]) -> Part:
    """A part as it was."""
    shapes = {name: tuple(shape) for name, shape in entry["shapes"].items()}
    layer = Layer(entry["layer"], shapes, Form(**entry["form"]), entry["why"])
    operator = from_tensors(entry["operator"], tensors)
    return Part(layer, operator, entry["structure"], entry["note"], entry.get("terms"))
