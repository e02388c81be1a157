"""Checks that a saved object belongs to the network it is loaded with.

Equal weights do not make equal networks: an activation or the eps of a normalization has none. So what a
network computes is compared too, on inputs that the file keeps: those of the fit, or made-up ones where an
object keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from linnet.errors import FileFormatError, InputError, LinnetError, ModelError
from linnet.linalg.factorize import is_finite
from linnet.tangent.batch import Inputs, take
from linnet.tangent.functional import FAILURES, Functional, OutputAdapter, check_output, without_wrapper
from linnet.tangent.linearized import Linearized
from linnet.tangent.selection import require_module

COMPARED = 8  # kept examples whose outputs are compared: units that agree on one differ on another
AGREEMENT = 1e-3  # of the largest output; the same network differs by rounding alone, on other machines too
ROUNDED = 4.0  # units of rounding that half precision may differ by beyond that

# Masks are no weights of the network: they come with its linearization.
MASKS = "; where params= had masks, pass linnet.linearize(network, params=...) with the same"


def given_network(model: Any) -> nn.Module:
    """The network that a file is read with: the one linearized, without torch.compile's wrapper."""
    model = require_module(model)
    return without_wrapper(model.model if isinstance(model, Linearized) else model)


def saved_output(metadata: Mapping[str, Any], output: OutputAdapter) -> OutputAdapter:
    """The output adapter that a file was written with."""
    check_output(output)
    if metadata.get("custom_output") and not callable(output):
        raise InputError(
            "output is missing",
            expected="the callable that the file was written with",
            remedy="pass output= as it was then, or linnet.linearize(model, output=...)",
        )
    return output if callable(output) else metadata.get("output")


def identity(function: Functional) -> dict[str, Any]:
    """What tells a network and its parameters from others, for a file."""
    return {
        "parameters": list(function.names),
        "weights": function.fingerprint(),
        "output": function.output if isinstance(function.output, str) else None,
        "custom_output": callable(function.output),
    }


def matching_function(
    model: nn.Module,
    metadata: dict[str, Any],
    output: OutputAdapter,
    path: Path,
    words: tuple[str, str, str],
) -> Functional:
    """The network as a function, if its parameters and weights are those of a file."""
    adapter = saved_output(metadata, output)
    require_parameters(model, metadata["parameters"], path, words)
    function = Functional(model, metadata["parameters"], adapter)
    require_weights(function, metadata, path, words)
    return function


def require_weights(
    function: Functional, metadata: Mapping[str, Any], path: Path, words: tuple[str, str, str]
) -> None:
    """Raise if a network has other weights, or modules of other types where the file says which."""
    if function.fingerprint() != metadata["weights"]:
        differ = "weights, or the masks of its params=," if function.masks else "weights"
        _refuse(f"its {differ} differ", path, (words[0], words[1], f"{words[2]}{MASKS}"))
    found = function.modules()
    saved = metadata.get("modules", found)
    for name in (*saved, *found):
        now, was = found.get(name, "missing"), saved.get(name, "missing")
        if now != was:
            _refuse(f"its module {name!r} is {now}, and was {was}", path, words)


def require_parameters(
    model: nn.Module, names: Sequence[str], path: Path, words: tuple[str, str, str]
) -> None:
    """Raise unless a network has the parameters that a file is about."""
    have = {name for name, _ in model.named_parameters()}
    missing = [name for name in names if name not in have]
    if missing:
        _refuse(f"it lacks {missing[0]!r}", path, words)


def require_same_outputs(
    outputs: Callable[[Inputs], Tensor],
    x: Inputs,
    expected: Tensor,
    path: Path,
    words: tuple[str, str, str],
    size: float = 0.0,
) -> None:
    """Raise if a network, for all its equal weights, computes something else than when a file was written."""
    # outputs (N, ...), expected (N, ...); size: of the numbers whose difference is expected
    detail, cause = "the outputs differ", None
    few = expected[:COMPARED].reshape(len(expected[:COMPARED]), -1)
    try:
        found = outputs(take(x, slice(0, COMPARED))).to(few.device)
    except ModelError as error:
        detail, cause = "it cannot run on the examples of the file", error
    else:
        rounding = ROUNDED * max(torch.finfo(t.dtype).eps for t in (found, expected))
        allowed = max(AGREEMENT, rounding) * (float(expected.abs().max()) + 1e-12) + rounding * size
        if found.numel() == few.numel() and _gap(found.reshape_as(few), few) <= allowed:
            return
    same = (words[0], words[1], "build it with the same code, and pass the same output= where there was one")
    _refuse(f"the weights are equal but {detail}", path, same, cause)


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    return float((a.double() - b.double()).abs().max())


def witness(outputs: Callable[[Inputs], Tensor], x: Inputs | None) -> dict[str, Any] | None:
    """Made-up inputs and the outputs on them, for files of objects that keep no examples."""
    # outputs (N, ...)
    if x is None:
        return None
    try:
        found = outputs(x)
    except (LinnetError, *FAILURES):
        return None
    return {"x": x, "outputs": found} if is_finite(found) else None


def require_witness(
    outputs: Callable[[Inputs], Tensor],
    seen: Mapping[str, Any] | None,
    path: Path,
    words: tuple[str, str, str],
) -> Inputs | None:
    """Raise if a network computes something else on the made-up inputs of a file."""
    if seen is None:
        return None
    require_same_outputs(outputs, seen["x"], seen["outputs"], path, words)
    return seen["x"]


def _refuse(detail: str, path: Path, words: tuple[str, str, str], cause: Exception | None = None) -> NoReturn:
    """The error of a file of another network."""
    done, expected, remedy = words
    what = f"{path} was {done} another network: {detail}"
    raise FileFormatError(what, expected=expected, remedy=remedy) from cause
