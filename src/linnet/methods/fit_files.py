"""A linear fit on disk: one safetensors file with its record as JSON metadata."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from linnet.errors import FileFormatError, InputError
from linnet.files import load_tensors, save_tensors
from linnet.methods.dual import Dual
from linnet.methods.linear_fit import LinearFit, Record
from linnet.methods.primal import CGSettings, Primal
from linnet.methods.targets import Targets
from linnet.tangent.batch import Inputs
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.linearized import Linearized

KIND = "linear-fit"


def save_fit(fit: LinearFit, directory: str | Path) -> Path:
    """Write a fit: δ, β, the kernel and the training inputs, so that nothing is lost by the round trip.

    Args:
        fit: The fit.
        directory: The folder; made if missing.

    Returns:
        The file written.
    """
    function, system = fit.module.function, fit.system
    tensors, layout = _flatten_inputs(fit.x)
    tensors |= {f"delta/{name}": t for name, t in fit.delta.items()}
    tensors |= {"targets": fit.targets, "residual": system.residual, "beta": system.beta}
    if isinstance(system, Dual):
        tensors["kernel"] = system.kernel
    settings = asdict(system.settings) if isinstance(system, Primal) else None
    metadata = {
        "weights": function.fingerprint(),
        "parameters": list(function.names),
        "inputs": layout,
        "output": function.output if isinstance(function.output, str) else None,
        "custom_output": callable(function.output),
        "ridge": system.ridge,
        "classes": fit.classes,
        "scale": fit._targets.scale,
        "record": asdict(fit.record),
        "settings": settings,
    }
    return save_tensors(Path(directory), KIND, {k: t.contiguous() for k, t in tensors.items()}, metadata)


def load_fit(directory: str | Path, model: nn.Module, output: OutputAdapter = None) -> LinearFit:
    """Read a fit that ``LinearFit.save`` wrote.

    Args:
        directory: The folder.
        model: The network that was linearized, with the same weights.
        output: The output adapter, if the fit was made with a callable one.

    Returns:
        The fit, able to do all that it could before.

    Raises:
        FileFormatError: If the file is truncated, altered, foreign, or of another network.
        InputError: If there is no such file, or ``output`` is needed and not given.

    Example:
        >>> import linnet, tempfile
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> x = torch.ones(3, 2).cumsum(0)
        >>> folder = tempfile.mkdtemp()
        >>> _ = linnet.fit(linnet.linearize(net), (x, x[:, :1])).save(folder)
        >>> load_fit(folder, net).ridge
        1.0
    """
    path = Path(directory)
    path = path / f"{KIND}.safetensors" if path.is_dir() or not path.suffix else path
    tensors, metadata = load_tensors(path, KIND)
    if metadata["custom_output"] and not callable(output):
        raise InputError(
            "output is missing",
            expected="the callable that the fit was made with",
            remedy="pass output= as to linnet.linearize",
        )
    function = _matching(model, metadata, output, path)
    device = function.device
    x = _unflatten_inputs({k: t.to(device) for k, t in tensors.items()}, metadata["inputs"])
    targets = Targets(tensors["targets"].to(device), metadata["classes"], metadata["scale"])
    record = Record(**{**metadata["record"], "warnings": tuple(metadata["record"]["warnings"])})
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


def _system(
    function: Functional, x: Inputs, tensors: dict[str, Tensor], metadata: dict[str, Any]
) -> Dual | Primal:
    """The solved equations as they were saved."""
    residual, beta = (tensors[key].to(function.device) for key in ("residual", "beta"))
    if metadata["settings"] is None:
        return Dual(tensors["kernel"].to(function.device), residual, metadata["ridge"], beta=beta)
    start = function.space.to_flat(
        {name: tensors[f"delta/{name}"].to(function.device) for name in function.names}
    )
    return Primal(function, x, residual, metadata["ridge"], CGSettings(**metadata["settings"]), start)


def _flatten_inputs(x: Inputs, prefix: str = "x") -> tuple[dict[str, Tensor], Any]:
    """Tensors by path, and the structure as JSON."""
    if isinstance(x, Tensor):
        return {prefix: x}, "tensor"
    items = x.items() if isinstance(x, dict) else enumerate(x)
    tensors: dict[str, Tensor] = {}
    layout: dict[str, Any] = {"kind": "dict" if isinstance(x, dict) else "tuple", "parts": {}}
    for key, value in items:
        found, layout["parts"][str(key)] = _flatten_inputs(value, f"{prefix}/{key}")
        tensors |= found
    return tensors, layout


def _unflatten_inputs(tensors: dict[str, Tensor], layout: Any, prefix: str = "x") -> Inputs:
    """The reverse of ``_flatten_inputs``."""
    if layout == "tensor":
        return tensors[prefix]
    parts = {
        key: _unflatten_inputs(tensors, part, f"{prefix}/{key}") for key, part in layout["parts"].items()
    }
    return parts if layout["kind"] == "dict" else tuple(parts.values())
