"""A network from the first of its blocks whose weights vary: what comes before is computed once.

Adapters in the last blocks of a deep network leave most of it as it is. Where all weights that vary are in
blocks k, k + 1, … of a list that runs in order, the input of block k is an input of what is left.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import LinnetError
from linnet.linalg.operator import ParameterSpace
from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.functional import Findings, Functional

STATES, GIVEN = "linnet_states", "linnet_x"  # the input of the first block, and x where it is one tensor
FEW = 2  # examples on which the two networks are compared
BATCH = 32  # examples that run up to the first block at a time


class _ReachedError(Exception):
    """The first block that varies, with its input."""


class _Given(nn.Module):
    """In the place of the first block: what the last of the blocks left out would have given."""

    def __init__(self, paired: bool) -> None:
        super().__init__()
        self.paired, self.states = paired, torch.zeros(0)

    def forward(self, *_: Any, **__: Any) -> Any:
        """The states, in a tuple where blocks return one."""
        return (self.states,) if self.paired else self.states


class _Passing(nn.Module):
    """In the place of a further block that is left out."""

    def __init__(self, paired: bool) -> None:
        super().__init__()
        self.paired = paired

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What it is given."""
        found = args[0] if args else kwargs["hidden_states"]
        return (found,) if self.paired else found


class _Rest(nn.Module):
    """A network that takes the input of its first block that varies beside its own."""

    def __init__(self, body: nn.Module, first: _Given) -> None:
        super().__init__()
        self.rest = body
        self._first = [first]  # a list: it is a module of the body already

    def forward(self, **inputs: Any) -> Any:
        """What the network returns from there on."""
        self._first[0].states = inputs.pop(STATES)
        x = inputs.pop(GIVEN, None)
        return self.rest(**inputs) if x is None else self.rest(x, **inputs)


class Cut:
    """The part of a network from its first block that varies on."""

    def __init__(self, whole: Functional, blocks: str, k: int, paired: bool) -> None:
        self.whole, self._first = whole, f"{blocks}.{k}" if blocks else str(k)
        first, body = _Given(paired), whole.model
        for place in range(k):
            stub = first if place == 0 else _Passing(paired)
            body = replaced(body, [*filter(None, blocks.split(".")), str(place)], stub)
        self.function = copy.copy(whole)
        self.function.model = _Rest(body, first)
        self.function.names = [f"rest.{name}" for name in whole.names]
        self.function.cache = Findings()
        self.function._masked = self.function._walked = None
        self.function.space = ParameterSpace.of(self.function.theta)

    @classmethod
    def of(cls, function: Functional, x: Inputs) -> Cut | None:
        """The part of a network that varies; ``None`` where it is all of it, or not a run of blocks."""
        if not isinstance(x, Tensor | Mapping) or function.masks:
            return None
        few = take(x, slice(0, FEW))
        for name, blocks in function.model.named_modules():
            if not isinstance(blocks, nn.ModuleList | nn.Sequential):
                continue
            own = f"{name}." if name else ""
            inside = [key.removeprefix(own).split(".")[0] for key in function.names if key.startswith(own)]
            places = [int(place) for place in inside if place.isdigit()]
            if len(inside) < len(function.names) or len(places) < len(inside) or not min(places, default=0):
                continue
            for paired in (False, True):
                cut = cls(function, name, min(places), paired)
                if cut._is_like(few):
                    return cut
        return None

    def _is_like(self, few: Inputs) -> bool:
        """Whether the part gives on a few examples what the whole network gives."""
        try:
            right = self.whole.check_runs(few)
            given = self.inputs(few)
            if given[STATES].shape[0] != batch_size(few):
                return False
            found = self.function.check_runs(given)
        except (LinnetError, KeyError, TypeError, AttributeError, IndexError):
            return False
        size = torch.finfo(right.dtype).eps ** 0.5 * right.abs().max()
        return found.shape == right.shape and bool((found - right).abs().max() <= size)

    @torch.no_grad()
    def inputs(self, x: Inputs) -> dict[str, Tensor]:
        """Inputs of the part: those of the network, and what its blocks before the part make of them."""
        states = torch.cat([self._reached(part) for part in split(x, BATCH)])
        return {**({GIVEN: x} if isinstance(x, Tensor) else x), STATES: states}

    @staticmethod
    def original(x: Inputs) -> Inputs:
        """The network's own inputs of those of a part."""
        return x[GIVEN] if GIVEN in x else {name: part for name, part in x.items() if name != STATES}

    def _reached(self, x: Inputs) -> Tensor:
        """The input of the first block that varies."""

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _ReachedError(args[0] if args else kwargs["hidden_states"])

        block = self.whole.model.get_submodule(self._first)
        handle = block.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with self.whole.inputs(x) as own:
                self.whole.run(self.whole.theta, own)
        except _ReachedError as reached:
            found: Tensor = reached.args[0]
            return found
        finally:
            handle.remove()
        raise LinnetError("a block never ran", "blocks that run in order", "nothing: it is not cut")


def replaced(module: nn.Module, path: list[str], new: nn.Module) -> nn.Module:
    """A network with another module at a place; all tensors are shared."""
    if not path:
        return new
    clone = copy.copy(module)
    clone._modules = {**module._modules, path[0]: replaced(getattr(module, path[0]), path[1:], new)}
    return clone
