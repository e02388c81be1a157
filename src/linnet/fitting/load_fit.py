"""``linnet.load_fit``: loads a saved fit."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from linnet.errors import InputError
from linnet.files import as_path
from linnet.fitting.combinations import averaged
from linnet.fitting.fit_files import KIND
from linnet.fitting.linear_fit import LinearFit, Record
from linnet.fitting.sketch import SketchedNetwork, restored_sketch
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.linear.files import read_solution, restored_newton, restored_system
from linnet.linear.label_problem import class_problem
from linnet.linear.problem import Problem
from linnet.linear.targets import Targets
from linnet.number_types import Precision
from linnet.tangent.batch import KnownInputs
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.linearized import Linearized
from linnet.tangent.matching import given_network, matching_function, require_parameters, require_same_outputs

ADAPTED = "nested-fit.safetensors"  # what NestedFit.save writes, which lies above this module
OTHER = (
    "made on",
    "the network that was linearized, with the same weights",
    "load the same checkpoint, with the same head, into the network first",
)


def load_fit(directory: str | Path, model: nn.Module, output: OutputAdapter = None) -> LinearFit | SoftmaxFit:
    """Read a fit that ``LinearFit.save`` or ``SoftmaxFit.save`` wrote.

    Args:
        directory: The folder.
        model: The network that was linearized, with the same weights, or its linearization.
        output: The output adapter, if the fit was made with a callable one.

    Returns:
        The fit, able to do all that it could before; a ``SoftmaxFit`` where the loss was the cross-entropy.

    Raises:
        FileFormatError: If the file is truncated, altered, not linnet's, or of another network.
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
    model = given_network(model)
    if (as_path(directory) / ADAPTED).is_file():
        raise InputError(
            f"{directory} holds a fit of linnet.adapt",
            expected="a fit of linnet.fit",
            remedy="read it with linnet.load(directory, model)",
        )
    path, tensors, x, metadata = read_solution(directory, KIND)
    if metadata["sketch"] is not None and not isinstance(model, SketchedNetwork):
        require_parameters(model, metadata["sketch"]["parameters"], path, OTHER)
        model = restored_sketch(model, tensors, metadata["sketch"])
    function = matching_function(model, metadata, output, path, OTHER)
    function = function.under(Precision(**metadata["precision"]))
    function = function.in_float64() if metadata["float64"] else function
    device = function.device
    tensors = {key: t.to(device) for key, t in tensors.items()}
    values, state = tensors["targets"], (tensors, metadata["solved"])
    targets = Targets(values, metadata["classes"], metadata["scale"], metadata["axis"])
    record = Record.read(metadata["record"])
    function.known = KnownInputs.of(x, record.columns)
    fitted: LinearFit | SoftmaxFit
    if metadata["loss"] == "squared":
        residual = tensors["residual"]
        require_same_outputs(function.check_runs, x, values.double() - residual.double(), path, OTHER)
        combinations = tensors.get("combinations")
        features = None if combinations is None else averaged(function, combinations)
        system = restored_system(Problem(function, x, residual, features=features), state)
        fitted = LinearFit(Linearized(function), targets, system, record)
    else:
        require_same_outputs(function.check_runs, x, tensors["base"].double(), path, OTHER)
        solved = restored_newton(class_problem(function, x, tensors["base"], values), state)
        fitted = SoftmaxFit(Linearized(function), targets, solved, record)
    if "held_out" in tensors:
        fitted.held_out = tensors["held_out"]
    return fitted
