"""The curvature of one task, and what the methods that measure it share."""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linnet.continual.method import ContinualMethod, Prepare
from linnet.continual.quadratic import (
    PenaltyBlock,
    check_merge,
    own_name,
    unwrapped,
)
from linnet.curvatures.build import check_options, watched
from linnet.curvatures.curvature import Curvature
from linnet.curvatures.settings import (
    CurvatureOptions,
    LowRank,
    Structure,
    drawn,
    passes_of,
    word_of,
)
from linnet.curvatures.stream import Batches
from linnet.errors import InputError, ModelError
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.number_types import wide_type
from linnet.params import call, function, refuse_first
from linnet.tangent.batch import Inputs, concatenate
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import random_kept

OUTPUTS = "shifted."  # where a shifted network keeps the network itself


class CurvatureMethod(ContinualMethod, ABC):
    """A penalty made of the curvature of every task, measured when the task has been learned."""

    KEPT: ClassVar[tuple[str, ...]]  # the settings, beside those of the curvature, that a state belongs to

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        structure: Structure,
        strength: float,
        merge: str,
        options: CurvatureOptions,
    ) -> None:
        check_merge(merge)
        super().__init__(model, strength)
        check_likelihood(likelihood)
        check_options(type(self), structure, options)
        table = (
            (
                word_of(structure) == "matrix-free",
                "structure='matrix-free' needs the data of past tasks for every product",
                "a structure that can be kept without data",
                'use structure="kfac" or "low-rank"',
            ),
            (
                passes_of(options.get("passes")).file is not None,
                "passes has a file, which one task would leave to the next",
                "no file for the sums of a stream of tasks",
                "leave file= out",
            ),
            (
                options.get("matrix") == "hessian",
                "matrix='hessian' can be indefinite, and a penalty with it unbounded below",
                '"gauss-newton", "fisher" or "auto"',
                "leave matrix= out",
            ),
        )
        refuse_first(table)
        self.merge = merge
        self._likelihood, self._structure, self._options = likelihood, structure, options

    @property
    def _word(self) -> str:
        """The structure in a word, or a mixture as it was written."""
        return str(word_of(self._structure))

    def _settings(self) -> dict[str, Any]:
        structure, options = self._structure, self._options
        chosen: dict[str, Any] = {}
        if "expectation" in options:
            chosen["expectation"], samples, _ = drawn(options["expectation"])
            chosen |= {"samples": samples} if samples != 1 else {}
        for word in ("sharing", "matrix"):
            if word in options:
                chosen[word] = options[word]
        if isinstance(structure, LowRank):
            chosen["rank"] = structure.rank
        shown = dict(structure) if isinstance(structure, Mapping) else self._word
        kept = {name: getattr(self, name) for name in self.KEPT}
        return {"likelihood": repr(self._likelihood), "structure": shown, **chosen, **kept}

    def _measured(
        self, data: Any, output: OutputAdapter, prepare: Prepare | None, strength: float = 1.0
    ) -> tuple[PenaltyBlock, ...]:
        """λ times the curvature of a task at the current parameters, summed over its examples, by layers."""
        network, adapter = self._network(output, prepare)
        options = self._options.copy()
        if adapter is not None:
            options["output"] = adapter
        with random_kept(data), torch.enable_grad():
            if isinstance(network, Linearized) and not isinstance(self._likelihood, Gaussian):
                network, data = _at_delta(network, data)
                options["params"] = [OUTPUTS + name for name in network.function.names]
            found = watched(None, network, data, self._likelihood, self._structure, **options)
        if not isinstance(found, Curvature):
            raise InputError(
                f"structure={self._structure!r}",
                expected="a structure that can be kept",
                remedy='pass structure="kfac" or "diagonal"',
            )
        kind = wide_type(found.dtype)
        blocks = [PenaltyBlock.of(part, strength, found.made.examples, kind) for part in found.parts]
        return tuple(_renamed(block) for block in blocks)

    def _network(self, output: OutputAdapter, prepare: Prepare | None) -> tuple[nn.Module, OutputAdapter]:
        """The network that serves a task, and how its outputs are taken."""
        network = unwrapped(self.model)
        if isinstance(network, Linearized) and (prepare is not None or output is not None):
            raise InputError(
                "output= or prepare= with a Linearized",
                expected="neither: a linearization has its own output",
                remedy="pass output= to linnet.linearize",
            )
        if prepare is not None:
            expected = "a function that makes a network serve the task"
            function("prepare", prepare, expected)
            try:
                network = copy.deepcopy(network)
            except RuntimeError as error:  # torch copies no tensor that has a history
                raise ModelError(
                    f"model ({type(network).__name__}) cannot be copied for prepare=: {error}",
                    expected="a network that holds no tensors of an earlier pass",
                    remedy="set what it keeps of a pass to None before consolidate()",
                ) from error
            made = call("prepare", prepare, network, expected=expected)
            if isinstance(made, nn.Module) and made is not network:
                names = {name for name, _ in network.named_parameters()}
                if not {name for name, _ in made.named_parameters()} <= names:
                    raise InputError(
                        f"prepare returned a {type(made).__name__} with parameters of other names",
                        expected="the network itself, or one with its parameters",
                        remedy="change the copy in place and return nothing",
                    )
                network = made
        return network, self._options.get("output") if output is None else output


def _renamed(block: PenaltyBlock) -> PenaltyBlock:
    """A block with the network's own parameter names."""
    shapes = {
        own_name(name.removeprefix(OUTPUTS)): shape for name, shape in block.layer.shapes_by_name.items()
    }
    name = own_name(block.layer.name.removeprefix(OUTPUTS))
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
