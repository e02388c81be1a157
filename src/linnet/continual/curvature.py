"""The curvature of one task, for methods with a quadratic penalty."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from linnet.continual.method import Prepare
from linnet.continual.quadratic import PenaltyBlock, computing_type, same_random_state, unwrapped
from linnet.curvatures.build import check_options, watched
from linnet.curvatures.curvature import Curvature
from linnet.curvatures.settings import (
    CurvatureOptions,
    LowRank,
    Passes,
    Structure,
    drawn,
    passes_of,
    word_of,
)
from linnet.curvatures.stream import Batches
from linnet.errors import InputError
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.params import call, function
from linnet.tangent.batch import Inputs, concatenate
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.linearized import Linearized

OUTPUTS = "shifted."  # where a shifted network keeps the network itself


@dataclass(frozen=True, eq=False)
class TaskCurvature:
    """The curvature of a task, to be added to that of others."""

    blocks: tuple[PenaltyBlock, ...]  # λ times the curvature, layer by layer
    device: torch.device  # where it is
    dtype: torch.dtype  # its type


@dataclass(frozen=True, eq=False)
class CurvatureRecipe:
    """Settings of the curvature of a task."""

    likelihood: Likelihood  # what the outputs mean
    structure: Structure  # the structure of the curvature
    options: CurvatureOptions  # keywords of :func:`linnet.curvature`, and ``params`` and ``output``

    @property
    def word(self) -> str:
        """The structure in a word, or a mixture as it was written."""
        return str(word_of(self.structure))

    @property
    def passes(self) -> Passes:
        """The passes over the data."""
        return passes_of(self.options.get("passes"))

    def settings(self) -> dict[str, Any]:
        """The settings that a saved state belongs to."""
        chosen: dict[str, Any] = {}
        if "expectation" in self.options:
            chosen["expectation"], samples, _ = drawn(self.options["expectation"])
            chosen |= {"samples": samples} if samples != 1 else {}
        for word in ("sharing", "matrix"):
            if word in self.options:
                chosen[word] = self.options[word]
        if isinstance(self.structure, LowRank):
            chosen["rank"] = self.structure.rank
        structure = dict(self.structure) if isinstance(self.structure, Mapping) else self.word
        return {"likelihood": repr(self.likelihood), "structure": structure, **chosen}

    def measure(
        self, model: nn.Module, data: Any, output: OutputAdapter = None, prepare: Prepare | None = None
    ) -> Curvature:
        """The curvature of a task at the current parameters, summed over its examples."""
        network, adapter = self.network(model, output, prepare)
        options = self.options.copy()
        if adapter is not None:
            options["output"] = adapter
        with same_random_state(data), torch.enable_grad():
            if isinstance(network, Linearized) and not isinstance(self.likelihood, Gaussian):
                network, data = _at_delta(network, data)
                options["params"] = [OUTPUTS + name for name in network.function.names]
            found = watched(None, network, data, self.likelihood, self.structure, **options)
        if not isinstance(found, Curvature):
            raise InputError(
                f"structure={self.structure!r}",
                expected="a structure that can be kept",
                remedy='pass structure="kfac" or "diagonal"',
            )
        return found

    def network(
        self, model: nn.Module, output: OutputAdapter = None, prepare: Prepare | None = None
    ) -> tuple[nn.Module, OutputAdapter]:
        """The network that serves a task, and how its outputs are taken."""
        network = unwrapped(model)
        if isinstance(network, Linearized) and (prepare is not None or output is not None):
            raise InputError(
                "output= or prepare= with a Linearized",
                expected="neither: a linearization has its own output",
                remedy="pass output= to linnet.linearize",
            )
        if prepare is not None:
            function("prepare", prepare, "a function that makes a network serve the task")
            network = copy.deepcopy(network)
            call("prepare", prepare, network, expected="a function that makes a network serve the task")
        return network, self.options.get("output") if output is None else output

    def function(self, network: nn.Module, adapter: OutputAdapter) -> Callable[[Inputs], Tensor]:
        """The outputs as a function of inputs, in evaluation mode, on a copy of the network, (N, ...)."""
        if isinstance(network, Linearized):
            return network
        return Functional(network, self.options.get("params"), adapter).check_runs

    def task(
        self,
        model: nn.Module,
        data: Any,
        output: OutputAdapter = None,
        prepare: Prepare | None = None,
        strength: float = 1.0,
    ) -> TaskCurvature:
        """The curvature of a task in the form in which it is kept."""
        measured = self.measure(model, data, output, prepare)
        kind = computing_type(measured.dtype)
        blocks = [PenaltyBlock.of(part, strength, measured.made.examples, kind) for part in measured.parts]
        return TaskCurvature(tuple(_renamed(block) for block in blocks), measured.device, kind)


def make_recipe(caller: type, likelihood: Any, structure: Any, options: CurvatureOptions) -> CurvatureRecipe:
    """A recipe, if its parts can be used for remembering."""
    check_likelihood(likelihood)
    check_options(caller, structure, options)
    if word_of(structure) == "matrix-free":
        raise InputError(
            "structure='matrix-free' needs the data of past tasks for every product",
            expected="a structure that can be kept without data",
            remedy='use structure="kfac" or "low-rank"',
        )
    if passes_of(options.get("passes")).file is not None:
        raise InputError(
            "passes has a file, which one task would leave to the next",
            expected="no file for the sums of a stream of tasks",
            remedy="leave file= out",
        )
    if options.get("matrix") == "hessian":
        raise InputError(
            "matrix='hessian' can be indefinite, and a penalty with it unbounded below",
            expected='"gauss-newton", "fisher" or "auto"',
            remedy="leave matrix= out",
        )
    return CurvatureRecipe(likelihood, structure, options)


def _renamed(block: PenaltyBlock) -> PenaltyBlock:
    """A block with the network's own parameter names."""
    shapes = {name.removeprefix(OUTPUTS): shape for name, shape in block.layer.shapes_by_name.items()}
    name = block.layer.name.removeprefix(OUTPUTS)
    return replace(block, layer=replace(block.layer, name=name, shapes_by_name=shapes))


class _ShiftedNetwork(nn.Module):
    """f₀(x) + s with s given as one more input: its Jacobian is J(x), its value that of the linear model."""

    def __init__(self, function: Functional) -> None:
        super().__init__()
        self.function = function
        self.shifted = function.model

    def forward(self, *inputs: Any, **keywords: Any) -> Tensor:
        """The outputs at θ₀, moved by the last input or the one called "shift"."""
        theta: dict[str, Tensor] = {
            name: p for name, p in self.shifted.named_parameters() if name in self.function.names
        }
        if keywords:
            shift: Tensor = keywords.pop("shift")
            return self.function(theta, keywords) + shift
        *x, last = inputs
        moved: Tensor = self.function(theta, x[0] if len(x) == 1 else tuple(x)) + last
        return moved


def _at_delta(network: Linearized, data: Any) -> tuple[_ShiftedNetwork, tuple[Inputs, Tensor | None]]:
    """The linear model's outputs, with the network's Jacobian, as a network and data for it."""
    # The curvature of f₀ + J δ has the Jacobian of θ₀ and Λ at the outputs at δ.
    function = network.function.copy()
    xs, ys = [], []
    for batch in Batches(data, function):
        with torch.no_grad():
            shift = network(batch.x) - function(function.theta, batch.x)
        xs.append(_with_shift(batch.x, shift))
        if batch.y is not None:
            ys.append(batch.y)
    return _ShiftedNetwork(function).eval(), (concatenate(xs), torch.cat(ys) if ys else None)


def _with_shift(x: Inputs, shift: Tensor) -> Inputs:
    """One more input."""
    if isinstance(x, Mapping):
        return {**x, "shift": shift}
    return (*x, shift) if isinstance(x, list | tuple) else (x, shift)
