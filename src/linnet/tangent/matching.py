"""Checks that a saved object belongs to the network it is loaded with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

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
    require_parameters(model, metadata["parameters"], path, words)
    adapter = output if callable(output) else metadata["output"]
    function = Functional(model, metadata["parameters"], adapter)
    if function.fingerprint() != metadata["weights"]:
        _refuse("its weights differ", path, words)
    return function


def require_parameters(
    model: nn.Module, names: Sequence[str], path: Path, words: tuple[str, str, str]
) -> None:
    """Raise unless a network has the parameters that a file is about.

    Args:
        model: The network.
        names: The parameters.
        path: The file.
        words: As for :func:`matching_function`.

    Raises:
        InputError: If the model is no module.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model is {type(model).__name__}", expected="a torch.nn.Module", remedy=f"pass {words[1]}"
        )
    have = {name for name, _ in model.named_parameters()}
    missing = [name for name in names if name not in have]
    if missing:
        _refuse(f"it lacks {missing[0]!r}", path, words)


def _refuse(detail: str, path: Path, words: tuple[str, str, str]) -> NoReturn:
    """The error of a file of another network."""
    done, expected, remedy = words
    raise FileFormatError(f"{path} was {done} another network: {detail}", expected=expected, remedy=remedy)
