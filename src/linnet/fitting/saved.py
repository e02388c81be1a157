"""A saved fit, on the network that was linearized."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from linnet import tree
from linnet.fitting.combinations import averaged
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.position_fit import PositionFit, position_problem
from linnet.fitting.sketch import SketchedNetwork, restored_sketch
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.linear.label_problem import class_problem
from linnet.linear.newton import WeightNewton
from linnet.linear.problem import Problem
from linnet.linear.saved import restored_newton, restored_system
from linnet.number_types import Precision
from linnet.tangent.data import SHIFTED
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.inputs import KnownInputs
from linnet.tangent.linearized import Linearized
from linnet.tangent.matching import given_network, matching_function, require_parameters, require_same_outputs

OTHER = (
    "made on",
    "the network that was linearized, with the same weights",
    "load the same checkpoint, with the same head, into the network first",
)


def restored_fit(
    saved: dict[str, Any], path: Path, model: nn.Module, output: OutputAdapter = None
) -> LinearFit | SoftmaxFit | PositionFit:
    """The fit that ``LinearFit.save`` or ``SoftmaxFit.save`` wrote."""
    model, network = given_network(model), saved["network"]
    if network["sketch"] is not None and not isinstance(model, SketchedNetwork):
        require_parameters(model, network["sketch"]["parameters"], path, OTHER)
        model = restored_sketch(model, network["sketch"])
    function = matching_function(model, network, output, path, OTHER)
    function = function.under(Precision(**network["precision"]))
    function = function.in_float64() if network["float64"] else function
    x, record = saved.pop("x"), saved["record"]
    was_moved = SHIFTED in record.reasons.get("data", "")
    function.known = KnownInputs.of(x, record.columns, function.token, was_moved)
    moved = tree.map_tensors(lambda t: t.to(function.device), saved)
    targets, solved = moved["targets"], moved["solved"]
    fitted: LinearFit | SoftmaxFit
    if moved["loss"] == "squared":
        residual, combinations = moved["residual"], moved["combinations"]
        features = None if combinations is None else averaged(function, combinations)
        squares = Problem(function, x, residual, features=features).weighing(targets.weights)
        # what was saved is in units of the noise
        squares = replace(squares, residual=residual)
        base = targets.values.double() - squares.unscaled(residual.double())
        size = float(targets.values.abs().max())
        require_same_outputs(function.check_runs, x, base, path, OTHER, size)
        system = restored_system(squares, solved)
        fitted = LinearFit(Linearized(function), targets, system, record)
    elif targets.axis is not None:
        problem = position_problem(function, x, targets.values, targets.axis, None)
        require_same_outputs(problem.function.check_runs, problem.x, solved["base"].double(), path, OTHER)
        newton = restored_newton(problem, solved)
        assert isinstance(newton, WeightNewton)
        return PositionFit(Linearized(function), targets, newton, record)
    else:
        require_same_outputs(function.check_runs, x, solved["base"].double(), path, OTHER)
        problem = class_problem(function, x, solved["base"], targets)
        fitted = SoftmaxFit(Linearized(function), targets, restored_newton(problem, solved), record)
    if moved["held_out"] is not None:
        fitted.held_out = moved["held_out"]
    return fitted
