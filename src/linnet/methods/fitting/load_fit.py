"""``linnet.load_fit``: a saved fit, able to do all that it could before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import FileFormatError, InputError
from linnet.methods.fitting.dual import Dual
from linnet.methods.fitting.fit_files import read_fit
from linnet.methods.fitting.linear_fit import LinearFit, Record
from linnet.methods.fitting.primal import CGSettings, Primal
from linnet.methods.fitting.targets import Targets
from linnet.tangent.batch import Inputs, map_tensors, take
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.linearized import Linearized


def load_fit(directory: str | Path, model: nn.Module, output: OutputAdapter = None) -> LinearFit:
    """Read a fit that ``LinearFit.save`` wrote.

    Args:
        directory: The folder.
        model: The network that was linearized, with the same weights, or its linearization.
        output: The output adapter, if the fit was made with a callable one.

    Returns:
        The fit, able to do all that it could before.

    Raises:
        FileFormatError: If the file is truncated, altered, foreign, or of another network.
        InputError: If there is no such file, or ``output`` is needed and not given.

    Example:
        >>> import linnet, tempfile, torch
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> x = torch.ones(3, 2).cumsum(0)
        >>> folder = tempfile.mkdtemp()
        >>> _ = linnet.fit(linnet.linearize(net), (x, x[:, :1])).save(folder)
        >>> load_fit(folder, net).ridge
        1.0
    """
    model = model.model if isinstance(model, Linearized) else model
    path, tensors, x, metadata = read_fit(directory)
    if metadata["custom_output"] and not callable(output):
        raise InputError(
            "output is missing",
            expected="the callable that the fit was made with",
            remedy="pass output= as to linnet.linearize",
        )
    function = _matching(model, metadata, output, path)
    device = function.device
    x = map_tensors(lambda t: t.to(device), x)
    targets = Targets(tensors["targets"].to(device), metadata["classes"], metadata["scale"])
    record = Record(**{**metadata["record"], "warnings": tuple(metadata["record"]["warnings"])})
    _check_outputs(function, x, targets.values, tensors["residual"].to(device), path)
    system = _system(function, x, tensors, metadata)
    return LinearFit(Linearized(function), x, targets, system, record)


def _matching(model: nn.Module, metadata: dict[str, Any], output: OutputAdapter, path: Path) -> Functional:
    """The network as a function, if it is the one that the fit was made on."""
    names = {name for name, _ in model.named_parameters()}
    missing = [name for name in metadata["parameters"] if name not in names]
    if not missing:
        function = Functional(
            model, metadata["parameters"], output if callable(output) else metadata["output"]
        )
        if function.fingerprint() == metadata["weights"]:
            return function
    detail = f"it lacks {missing[0]!r}" if missing else "its weights differ"
    raise FileFormatError(
        f"{path} was made on another network: {detail}",
        expected="the network that was linearized, with the same weights",
        remedy="load the same checkpoint, with the same head, before load_fit",
    )


def _check_outputs(function: Functional, x: Inputs, targets: Tensor, residual: Tensor, path: Path) -> None:
    """Raise if the network, for all its equal weights, computes something else: f₀ = t − r on one example."""
    with torch.no_grad():
        found = function.flat(function.theta, take(x, slice(0, 1))).double()
    expected = (targets[:1].double() - residual[:1].double()).reshape(1, -1)
    scale = float(targets.abs().max()) + float(residual.abs().max()) + 1e-12
    if found.shape != expected.shape or float((found - expected).abs().max()) > 1e-3 * scale:
        raise FileFormatError(
            f"{path} was made on another network: the weights are equal but the outputs differ",
            expected="the network that was linearized",
            remedy="build it with the same code and the same output=, before load_fit",
        )


def _system(
    function: Functional, x: Inputs, tensors: dict[str, Tensor], metadata: dict[str, Any]
) -> Dual | Primal:
    """The solved equations as they were saved."""
    residual, beta, solution = (tensors[key].to(function.device) for key in ("residual", "beta", "solution"))
    if metadata["settings"] is None:
        return Dual(solution, residual, metadata["ridge"], beta=beta)
    return Primal(function, x, residual, metadata["ridge"], CGSettings(**metadata["settings"]), solution)
