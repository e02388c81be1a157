"""Checks that a saved object belongs to the network it is loaded with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from linnet.errors import FileFormatError, InputError
from linnet.tangent.functional import Functional, OutputAdapter


def matching_function(
    model: nn.Module,
    metadata: dict[str, Any],
    output: OutputAdapter,
    path: Path,
    words: tuple[str, str, str],
) -> Functional:
    """The network as a function, if its parameters and weights are those of a file.

    Args:
        model: The network.
        metadata: Of the file: ``"parameters"``, ``"output"`` and ``"weights"``.
        output: The output adapter, if it was a callable one.
        path: The file.
        words: For the error: what was done on another network, what is expected, and what to do.

    Returns:
        The function.

    Raises:
        InputError: If the model is no module.
        FileFormatError: If a parameter is missing or the weights differ.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model is {type(model).__name__}", expected="a torch.nn.Module", remedy=f"pass {words[1]}"
        )
    names = {name for name, _ in model.named_parameters()}
    missing = [name for name in metadata["parameters"] if name not in names]
    if not missing:
        adapter = output if callable(output) else metadata["output"]
        function = Functional(model, metadata["parameters"], adapter)
        if function.fingerprint() == metadata["weights"]:
            return function
    detail = f"it lacks {missing[0]!r}" if missing else "its weights differ"
    done, expected, remedy = words
    raise FileFormatError(f"{path} was {done} another network: {detail}", expected=expected, remedy=remedy)
